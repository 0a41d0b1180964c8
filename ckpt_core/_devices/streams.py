"""Streams: copies beside the training, and work of other threads in the order of the thread that asked for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch

Job = TypeVar("Job")
Events = dict[torch.device, torch.Event]  # of the side stream of each device

# One for each device, kept: allocators cache memory per stream, and torch has no more than 32 of them to give out.
_side_streams: dict[torch.device, torch.Stream] = {}


def _devices_of(tensors: Iterable[torch.Tensor]) -> list[torch.device]:
    """Return the devices whose memory is not the host's."""
    return list(dict.fromkeys([tensor.device for tensor in tensors if not (tensor.is_cpu or tensor.is_meta)]))


def _current_stream(device: torch.device) -> torch.Stream | None:
    """Return the stream that this thread's work for a device goes to; None if the device has no such thing."""
    try:
        return torch.accelerator.current_stream(device)
    except (RuntimeError, ValueError, NotImplementedError):  # a device that torch.accelerator does not know
        return None


def _side_stream(device: torch.device) -> torch.Stream | None:
    if device not in _side_streams:
        try:
            # Without a lock, which a signal handler that saves could wait for: one stream more is let go of.
            _side_streams.setdefault(device, torch.Stream(device=device))
        except (RuntimeError, NotImplementedError):  # it has one stream only, as Apple's have
            return None
    return _side_streams[device]


def _wait_for(device: torch.device) -> None:
    stream = _current_stream(device)
    if stream is not None:
        stream.synchronize()
    elif hasattr(module := torch.get_device_module(device), "synchronize"):
        module.synchronize()


def wait_for_devices(tensors: Iterable[torch.Tensor]) -> None:
    """Return when what this thread has queued for tensors of devices is done, so that other threads may read them."""
    for device in _devices_of(tensors):
        _wait_for(device)


def let_devices_wait(events: Events) -> None:
    """Let what this thread queues from now on wait for events; the devices wait, this thread does not.

    What is recorded into a graph is not done now, and must not wait for what is not in the graph.
    """
    for device, event in events.items():
        stream = _current_stream(device)
        if stream is not None and not _is_capturing(device):
            stream.wait_event(event)


def is_capturing(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether this thread's work for a device of some tensors is recorded into a graph, and not done."""
    return any(map(_is_capturing, _devices_of(tensors)))


def _is_capturing(device: torch.device) -> bool:
    return bool(getattr(getattr(torch, device.type, None), "is_current_stream_capturing", _never)())


def _never() -> bool:
    return False


def accelerator_name() -> str | None:
    """Return how many devices of which type there are, as people say it; None if there are none."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if device is None else f"{torch.accelerator.device_count()} x {device.type}"


class LateCopy:
    """A small tensor of an accelerator, copied to the host behind the work that computes it.

    Where the device has no pinned memory or events, torch raises a ``RuntimeError``, ``ValueError`` or ``TypeError``.
    """

    def __init__(self, value: torch.Tensor) -> None:
        # of the same type: the device would have to convert it first
        self._host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        self._host.copy_(value.detach(), non_blocking=True)
        self._event = torch.accelerator.current_stream(value.device).record_event()

    def is_there(self) -> bool:
        """Whether :meth:`take` would return at once."""
        return bool(self._event.query())

    def take(self) -> torch.Tensor:
        """Return the copy, when it has come."""
        self._event.synchronize()
        return self._host


class SideStreams:
    """A stream for each device that some tensors are on, which starts after what this thread has queued there.

    Without any such tensor it is false, and costs nothing. A device that has no streams to give out is waited for. The
    memory of the tensors must stay until :meth:`synchronize`. ``may_be_late`` says whether copies may be queued,
    because there is something to wait for afterwards.
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

    def __bool__(self) -> bool:
        return bool(self._streams)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Let this thread use the streams, and the device that the thread used which made this."""
        with _used(self._streams.values(), self._device):
            yield

    def record(self, tensors: Iterable[torch.Tensor]) -> Events:
        """Return events that happen when what is queued now is done, of the streams that some tensors are read on."""
        devices = [device for device in _devices_of(tensors) if device in self._streams]
        return {device: self._streams[device].record_event() for device in devices}

    def synchronize(self) -> None:
        """Return when nothing is queued on any of the streams any more; raise what one of them has raised."""
        with contextlib.ExitStack() as all_of_them:  # also when the first one raises
            for stream in self._streams.values():
                all_of_them.callback(stream.synchronize)


@contextlib.contextmanager
def _used(streams: Iterable[torch.Stream], device: int | None) -> Iterator[None]:
    if device is None:
        yield
        return
    # A thread begins on the first device, and to come back to that one would take memory there.
    torch.accelerator.set_device_index(device)
    with contextlib.ExitStack() as stack:
        for stream in streams:
            stack.enter_context(_another_handle(stream))
        yield


def _another_handle(stream: torch.Stream) -> torch.Stream:
    # One that is entered remembers what was current before; torch 2.8 refuses to let a second thread enter it.
    return torch.Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)


def events_of_current_streams(tensors: Iterable[torch.Tensor]) -> Events:
    """Return events that happen when what this thread has queued so far for tensors of devices is done."""
    streams = {device: _current_stream(device) for device in _devices_of(tensors)}
    return {device: stream.record_event() for device, stream in streams.items() if stream is not None}


def can_copy_late(tensor: torch.Tensor) -> bool:
    """Return whether copies to a tensor may be queued, because there is something to wait for afterwards."""
    return not (tensor.is_cpu or tensor.is_meta) and _current_stream(tensor.device) is not None


def on_current_streams(work: Callable[[Job], None], tensors: Iterable[torch.Tensor]) -> Callable[[Job], None]:
    """Return ``work`` that other threads do in the order of this one's current streams, as if it did it itself.

    Where the ``tensors`` are that it fills decides about the streams; with none on a device, it is returned as it is.
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
    """Return ``work`` that another thread does on the device that this one uses, if the program has started one."""
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is None or not getattr(getattr(torch, kind.type, None), "is_initialized", _never)():
        return work
    device = torch.accelerator.current_device_index()

    def work_on_device() -> None:
        with _used((), device):
            work()

    return work_on_device
