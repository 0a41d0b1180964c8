"""The same tests on the simulated device and on CUDA: what differs between the two."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Protocol

import pytest
import torch

from ckpt_core._pipeline import staging

__all__ = ["CUDA", "SIMULATED", "Accelerator", "CudaAccelerator", "SimulatedAccelerator", "late_copies"]

#: Parameters of the fixture ``accelerator``.
SIMULATED = pytest.param("simulated", marks=pytest.mark.own_process)
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)

_BUSY_CYCLES = 500_000_000  # some tenths of a second


def late_copies(monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """Let small tensors be copied beside the training, too, and return what says whether any was so far."""
    divide, found = staging._divide, [False]

    def watch(pieces: Any) -> Any:
        early, late = divide(pieces)
        found.append(bool(late))
        return early, late

    monkeypatch.setattr(staging, "LATE_PIECE", staging.ROW)
    monkeypatch.setattr(staging, "_divide", watch)
    return lambda: any(found)


class Accelerator(Protocol):
    """What tests ask of a device."""

    type: str
    module: Any

    def in_use(self) -> contextlib.AbstractContextManager[None]:
        """Check at the end that nothing was done that a device forbids."""

    def busy(self, index: int = 0) -> None:
        """Let what is queued next on the current stream of a device begin late."""


class CudaAccelerator:
    """A GPU."""

    type = "cuda"
    module = torch.cuda

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        torch.ones(1, device=self.type)
        yield
        torch.cuda.synchronize()

    def busy(self, index: int = 0) -> None:
        with torch.cuda.device(index):
            torch.cuda._sleep(_BUSY_CYCLES)


class SimulatedAccelerator:
    """The simulated device, whose streams run only what somebody waits for.

    Args:
        unavailable: Ends a test where the device cannot be built.
    """

    def __init__(self, unavailable: Callable[[str], NoReturn]) -> None:
        from ckpt_core import _devices
        from tests import simulated_device

        if simulated_device.find_compiler() is None:
            unavailable("no C++ compiler for the simulated device")
        simulated_device.load()
        self.type, self.module = simulated_device.NAME, simulated_device
        _devices.PINNING[self.type] = _devices.Pinning(simulated_device.host_register, simulated_device.host_unregister)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        torch.ones(1, device=self.type)
        with self.module.lazy():
            yield
        for index in range(self.module.device_count()):
            self.module.synchronize(index)
        assert self.module.take_violations() == []
        assert self.module.in_flight() == 0

    def busy(self, index: int = 0) -> None:
        """Nothing: everything begins as late as it can."""
