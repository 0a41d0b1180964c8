"""Devices for tests that run both on the simulated device and on CUDA: what differs between the two."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Protocol

import pytest
import torch

from ckpt_core._devices import row_sums, streams
from ckpt_core._pipeline import device_copy

#: Parameters of the fixture ``accelerator``.
SIMULATED = pytest.param("simulated", marks=pytest.mark.own_process)
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)

_BUSY_CYCLES = 500_000_000  # some tenths of a second
_HELD_SECONDS = 0.6  # how long late copies are held if no step waits for them: longer than until the next step


def late_copies(monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """Let small tensors be copied late, too (during the training); return a function: whether any was so far."""
    divide, found = device_copy._divide, [False]

    def watch(pieces: Any) -> Any:
        early, late = divide(pieces)
        found.append(bool(late))
        return early, late

    monkeypatch.setattr(device_copy, "LATE_PIECE", row_sums.ROW)
    monkeypatch.setattr(device_copy, "_divide", watch)
    return lambda: any(found)


def hold_late_copies(patch: Callable[[Any, str, Any], None] = setattr) -> Callable[[], bool]:
    """Let tensors from 64 KiB be copied during training, so late that a step that does not wait for them runs first.

    For the simulated device.

    Args:
        patch: Sets an attribute: ``setattr`` in a process of its own, otherwise ``monkeypatch.setattr``.

    Returns:
        A function that returns whether anything was copied late so far.
    """
    from tests import simulated_device

    copy_late, wait, found = (
        device_copy.BackgroundCopy._copy_late,
        device_copy.BackgroundCopy.let_training_wait,
        [False],
    )
    is_waited_for = threading.Event()

    def resume(side_streams: list[torch.Stream]) -> None:
        is_waited_for.wait(_HELD_SECONDS)
        time.sleep(0.05)  # a step that does not wait would have changed the tensors by then
        for stream in side_streams:
            simulated_device.resume(stream)

    def noticed(self: device_copy.BackgroundCopy) -> None:
        wait(self)
        is_waited_for.set()

    def held(self: device_copy.BackgroundCopy) -> None:
        if self._late:
            found.append(True)
            for event in self._early_events.values():  # what the save's own stream waits for
                event.synchronize()
            side_streams = list(streams._side_streams.values())
            for stream in side_streams:
                simulated_device.pause(stream)
            is_waited_for.clear()
            threading.Thread(target=resume, args=(side_streams,)).start()
        copy_late(self)

    patch(device_copy, "LATE_PIECE", row_sums.ROW)
    patch(device_copy.BackgroundCopy, "_copy_late", held)
    patch(device_copy.BackgroundCopy, "let_training_wait", noticed)
    return lambda: any(found)


class Accelerator(Protocol):
    """The interface of a device for tests."""

    type: str
    module: Any

    def in_use(self) -> contextlib.AbstractContextManager[None]:
        """Check at the end that nothing was done that a device forbids."""

    def busy(self, index: int = 0) -> None:
        """Delay what is queued next on the current stream of a device."""


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
    """The simulated device, whose streams run work only when it is waited for.

    Args:
        unavailable: Ends a test where the device cannot be built.
    """

    def __init__(self, unavailable: Callable[[str], NoReturn]) -> None:
        from ckpt_core._devices import pinning
        from tests import simulated_device

        if simulated_device.find_compiler() is None:
            unavailable("no C++ compiler for the simulated device")
        simulated_device.load()
        self.type, self.module = simulated_device.NAME, simulated_device
        pinning.PINNING[self.type] = pinning.Pinning(simulated_device.host_register, simulated_device.host_unregister)

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
        """Do nothing: in lazy mode, all work begins as late as possible."""
