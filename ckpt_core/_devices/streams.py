"""Device streams: side streams for copies during training, and worker threads on the calling thread's streams."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch

Job = TypeVar("Job")
Events = dict[torch.device, torch.Event]  # one event per device

# One per device, kept for ever: allocators cache memory per stream, and torch has a pool of only 32 streams.
_side_streams: dict[torch.device, torch.Stream] = {}


def _devices_of(tensors: Iterable[torch.Tensor]) -> list[torch.device]:
    """Return the devices of the tensors that are not in host memory."""
    return list(dict.fromkeys([tensor.device for tensor in tensors if not (tensor.is_cpu or tensor.is_meta)]))


def _current_stream(device: torch.device) -> torch.Stream | None:
    """Return this thread's current stream of a device; None if the device has no streams."""
    try:
        return torch.accelerator.current_stream(device)
    except (RuntimeError, ValueError, NotImplementedError):  # a device that torch.accelerator does not know
        return None


def _side_stream(device: torch.device) -> torch.Stream | None:
    if device not in _side_streams:
        try:
            # Without a lock, on which a signal handler that saves could deadlock; a second stream is just dropped.
            _side_streams.setdefault(device, torch.Stream(device=device))
        except (RuntimeError, NotImplementedError):  # the device has only one stream, as on Apple hardware
            return None
    return _side_streams[device]


def _wait_for(device: torch.device) -> None:
    stream = _current_stream(device)
    if stream is not None:
        stream.synchronize()
    elif hasattr(module := torch.get_device_module(device), "synchronize"):
        module.synchronize()


def wait_for_devices(tensors: Iterable[torch.Tensor]) -> None:
    """Wait until the work that this thread has queued on the tensors' devices is done, so that others may read them."""
    for device in _devices_of(tensors):
        _wait_for(device)


def let_devices_wait(events: Events) -> None:
    """Make what this thread queues on devices from now on wait for events; only the devices wait, not the thread.

    Does nothing during a graph capture: captured work does not run now, and must not wait for work outside the graph.
    """
    for device, event in events.items():
        stream = _current_stream(device)
        if stream is not None and not _is_capturing(device):
            stream.wait_event(event)


def is_capturing(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether this thread's work for a device of the tensors is being captured into a graph, and not run."""
    return any(map(_is_capturing, _devices_of(tensors)))


def _is_capturing(device: torch.device) -> bool:
    return bool(getattr(getattr(torch, device.type, None), "is_current_stream_capturing", _never)())


def _never() -> bool:
    return False


def accelerator_name() -> str | None:
    """Return number and type of the accelerators, such as ``"8 x cuda"``; None if there are none."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if device is None else f"{torch.accelerator.device_count()} x {device.type}"


class LateCopy:
    """A copy of a small tensor from an accelerator to the host, queued after the work that computes the tensor.

    If the device has no pinned memory or events, torch raises a ``RuntimeError``, ``ValueError`` or ``TypeError``.
    """

    def __init__(self, value: torch.Tensor) -> None:
        # of the same dtype: otherwise the device would have to convert it first
        self._host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        self._host.copy_(value.detach(), non_blocking=True)
        self._event = torch.accelerator.current_stream(value.device).record_event()

    def is_there(self) -> bool:
        """Return whether the copy is done, so that :meth:`take` would return at once."""
        return bool(self._event.query())

    def take(self) -> torch.Tensor:
        """Wait for the copy, and return it."""
        self._event.synchronize()
        return self._host


class SideStreams:
    """One side stream per device of the tensors, each of which starts after the work this thread has queued there.

    Free of cost if no tensor is on a device. If a device has no second stream, the constructor waits for it. The memory
    of the tensors must stay allocated until :meth:`synchronize`. ``may_be_late`` says whether copies may be queued
    without blocking, because every device has a side stream to wait for.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        devices = _devices_of(tensors)
        self.may_be_late = bool(devices)
        self._device = torch.accelerator.current_device_index() if devices else None
        self._streams: dict[torch.device, torch.Stream] = {}
        for device in devices:
            side, current = _side_stream(device), _current_stream(device)
            if side is None or current is None:
                _wait_for(device)
                self.may_be_late = False
            else:
                side.wait_stream(current)
                self._streams[device] = side

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Make this thread use the streams, and the device that the thread which made this object used."""
        with _used(self._streams.values(), self._device):
            yield

    def record(self, tensors: Iterable[torch.Tensor]) -> Events:
        """Return events, for the devices of the tensors, that are done when their side stream's work so far is done."""
        devices = [device for device in _devices_of(tensors) if device in self._streams]
        return {device: self._streams[device].record_event() for device in devices}

    def synchronize(self) -> None:
        """Wait until all work queued on the streams is done; raise what one of them raises."""
        with contextlib.ExitStack() as all_of_them:  # waits for the others, too, if one raises
            for stream in self._streams.values():
                all_of_them.callback(stream.synchronize)


@contextlib.contextmanager
def _used(streams: Iterable[torch.Stream], device: int | None) -> Iterator[None]:
    if device is None:
        yield
        return
    # A new thread uses the first device. It is not set back to that one, which would allocate memory there.
    torch.accelerator.set_device_index(device)
    with contextlib.ExitStack() as stack:
        for stream in streams:
            stack.enter_context(_another_handle(stream))
        yield


def _another_handle(stream: torch.Stream) -> torch.Stream:
    # An entered Stream object stores the previous stream, so torch 2.8 does not let a second thread enter it.
    return torch.Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)


def events_of_current_streams(tensors: Iterable[torch.Tensor]) -> Events:
    """Return events that are done when the work that this thread has queued on the tensors' devices is done."""
    streams = {device: _current_stream(device) for device in _devices_of(tensors)}
    return {device: stream.record_event() for device, stream in streams.items() if stream is not None}


def can_copy_late(tensor: torch.Tensor) -> bool:
    """Return whether copies to a tensor may be queued without blocking, because its device has a stream to wait for."""
    return not (tensor.is_cpu or tensor.is_meta) and _current_stream(tensor.device) is not None


def on_current_streams(work: Callable[[Job], None], tensors: Iterable[torch.Tensor]) -> Callable[[Job], None]:
    """Wrap ``work`` so that other threads run it on this thread's current streams, in order with its own work.

    The streams are those of the devices of ``tensors``, which ``work`` fills; without devices, returns ``work`` itself.
    """
    devices = _devices_of(tensors)
    if not devices:
        return work
    streams = [stream for stream in map(_current_stream, devices) if stream is not None]
    device = torch.accelerator.current_device_index()

    def work_on_streams(job: Job) -> None:
        with _used(streams, device):
            work(job)

    return work_on_streams


def on_this_device(work: Callable[[], None]) -> Callable[[], None]:
    """Wrap ``work`` so that another thread runs it on this thread's device, if the program has initialized one."""
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is None or not getattr(getattr(torch, kind.type, None), "is_initialized", _never)():
        return work
    device = torch.accelerator.current_device_index()

    def work_on_device() -> None:
        with _used((), device):
            work()

    return work_on_device
