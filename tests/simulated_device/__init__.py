"""An accelerator that is simulated on the CPU, for tests of code that uses streams: see docs/simulated_device.md.

:func:`load` gives torch the device type ``simulated``, with two devices. This module is also what
``torch.get_device_module("simulated")`` returns, with the functions that torch and frameworks ask such modules for.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tests.simulated_device.build import built_library, find_compiler

__all__ = [
    "NAME",
    "capturing",
    "find_compiler",
    "host_register",
    "host_unregister",
    "host_waits",
    "in_flight",
    "lazy",
    "limited_memory",
    "limited_pinning",
    "live_bytes",
    "load",
    "pause",
    "resume",
    "stream_count",
    "take_violations",
    "without_streams",
    "work_queued",
]

NAME = "simulated"
DEVICES = 2
_ops: Any = torch.ops.simulated
_captures: list[bool] = []
_libraries: list[Any] = []  # kept alive: what they register ends with them


def load() -> None:
    """Build the device if necessary, and register it with torch, once in a process.

    Call it before the process's first ``backward()``, which starts a thread for each device that exists.

    Raises:
        BuildError: There is no compiler, or it fails.
    """
    if hasattr(torch, NAME):
        return
    torch.ops.load_library(str(built_library()))
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, sys.modules[__name__])
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    if not torch._C._dispatch_has_backend_fallback(torch._C.DispatchKey.AutogradPrivateUse1):  # up to torch 2.8
        library = torch.library.Library("_", "IMPL")
        library.fallback(torch.library.fallthrough_kernel, "AutogradPrivateUse1")
        _libraries.append(library)


# ---- what tests decide -----------------------------------------------------------------------------------------------


def pause(stream: torch.Stream) -> None:
    """Stop a stream from beginning more work: what is queued, now or later, runs after :func:`resume`."""
    _ops.pause(stream.device_index, stream.stream_id, True)


def resume(stream: torch.Stream) -> None:
    """Undo :func:`pause`."""
    _ops.pause(stream.device_index, stream.stream_id, False)


@contextlib.contextmanager
def lazy(*, side_streams_only: bool = False) -> Iterator[None]:
    """Let every stream run only what is waited for, by the host or by another stream that is waited for.

    So work that code forgets to wait for has not happened yet when the code uses its result.

    Args:
        side_streams_only: Whether the default streams still run at once, and so overtake the others.
    """
    _ops.set_lazy(2 if side_streams_only else 1)
    try:
        yield
    finally:
        _ops.set_lazy(0)


@contextlib.contextmanager
def limited_memory(free: int, device: int = 0) -> Iterator[None]:
    """Let a device have no more than ``free`` bytes left; more raises ``torch.OutOfMemoryError``."""
    _ops.limit_memory(device, live_bytes(device) + free)
    try:
        yield
    finally:
        _ops.limit_memory(device, -1)


@contextlib.contextmanager
def limited_pinning(count: int) -> Iterator[None]:
    """Let only ``count`` more pieces of host memory be pinned."""
    _ops.limit_pinning(count)
    try:
        yield
    finally:
        _ops.limit_pinning(-1)


@contextlib.contextmanager
def without_streams() -> Iterator[None]:
    """Refuse to make streams, as devices that have only one do."""
    _ops.refuse_streams(True)
    try:
        yield
    finally:
        _ops.refuse_streams(False)


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """Let the device report that queued work is captured into a graph; the work is done all the same."""
    _captures.append(True)
    try:
        yield
    finally:
        _captures.pop()


# ---- what tests look at ----------------------------------------------------------------------------------------------


def live_bytes(device: int = 0) -> int:
    """Return how many bytes of a device's memory are allocated."""
    return int(_ops.live_bytes(device))


def in_flight() -> int:
    """Return how many queued copies still use pinned host memory."""
    return int(_ops.in_flight())


def take_violations() -> list[str]:
    """Return and clear the violations: actions that would cause memory errors on a real device."""
    return list(_ops.take_violations())


def work_queued() -> int:
    """Return how many copies, fills and operators were queued so far, on all streams."""
    return int(_ops.work_queued())


def host_waits() -> int:
    """Return how many times the host has waited for a stream or an event so far, in blocking copies too."""
    return int(_ops.host_waits())


def stream_count(device: int = 0) -> int:
    """Return how many streams were made on a device so far, the default one included."""
    return int(_ops.stream_count(device))


def host_register(address: int, nbytes: int) -> int:
    """Pin host memory; return 0, or an error with CUDA's number."""
    return int(_ops.host_register(address, nbytes))


def host_unregister(address: int) -> int:
    """Undo :func:`host_register`; return 0, or an error with CUDA's number."""
    return int(_ops.host_unregister(address))


# ---- what torch and frameworks ask a device's module for -------------------------------------------------------------


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return bool(_ops.is_started()) and not _is_in_bad_fork()


def init() -> None:
    _ops.start()


_lazy_init = init


def _is_in_bad_fork() -> bool:
    return bool(_ops.is_bad_fork())


def device_count() -> int:
    return DEVICES


def current_device() -> int:
    return int(_ops.current_device())


def set_device(device: Any) -> None:
    _ops.set_device(_index(device))


@contextlib.contextmanager
def device(device: Any) -> Iterator[None]:
    before = current_device()
    set_device(device)
    try:
        yield
    finally:
        set_device(before)


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def stream(stream: torch.Stream) -> torch.Stream:
    return stream  # a stream is a context manager itself


def Stream(device: Any = None, priority: int = 0) -> torch.Stream:  # noqa: N802 - torch's name
    return torch.Stream(device=torch.device(NAME, _index(device)), priority=priority)


Event = torch.Event


def synchronize(device: Any = None) -> None:
    torch.accelerator.synchronize(_index(device))


def is_current_stream_capturing() -> bool:
    return bool(_captures)


def empty_cache() -> None:
    pass


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def get_rng_state(device: Any = None) -> torch.Tensor:
    state: torch.Tensor = _ops.generator_state(_index(device))
    return state


def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    _ops.set_generator_state(_index(device), new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(index) for index in range(DEVICES)]


def set_rng_state_all(new_states: Sequence[torch.Tensor]) -> None:
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


def manual_seed(seed: int) -> None:
    _ops.seed(current_device(), int(seed) % 2**63)


def manual_seed_all(seed: int) -> None:
    for index in range(DEVICES):
        _ops.seed(index, int(seed) % 2**63)


def _index(device: Any) -> int:
    if device is None:
        return current_device()
    index = device if isinstance(device, int) else torch.device(device).index
    return current_device() if index is None else int(index)
