"""Frames over ``torch.distributed.rpc``, for clusters that use it already. It does not keep the order of messages."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
from torch.distributed import rpc

from ckpt_async.parameter_server.frames import Frame, decode_frame, encode_frame
from ckpt_async.parameter_server.transport import Handler, Peer, PeerLostError

__all__ = ["TorchRpcTransport"]

_here: dict[str, TorchRpcTransport] = {}
_arrived = threading.Condition()
_PATIENCE = 60.0  # seconds that a message waits for its receiver to be there


class TorchRpcTransport:
    """Carries frames between the workers of ``torch.distributed.rpc``.

    ``rpc.init_rpc`` must have been called with the participant's name, and the coordinator's as that of the coordinator;
    ``rpc.shutdown(graceful=False)`` is the caller's, after everything is over. torch's RPC unpickles what it receives, from
    whoever reaches its port, and has no secret: use it where every process that can connect is trusted. It cannot be
    initialised again in a process that has lost a peer, so recovery means new processes. Who does not answer is taken for lost
    after the ``rpc_timeout`` of its options.

    Args:
        name: This participant's name.

    Attributes:
        address: The same; nothing else is needed to reach it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.address = name
        self._instance = uuid.uuid4().hex
        self._handler: Handler | None = None
        self._on_lost: Callable[[Peer], None] | None = None
        self._under_way: set[Any] = set()
        self._lock = threading.Lock()

    def start(self, handler: Handler, on_lost: Callable[[Peer], None]) -> None:
        self._handler, self._on_lost = handler, on_lost
        with _arrived:
            _here[self.name] = self
            _arrived.notify_all()

    def connect(self, name: str, address: str) -> None:
        """Names are enough."""

    def send(self, to: str, frame: Frame) -> None:
        self.request(to, frame)

    def request(self, to: str, frame: Frame) -> Future[Frame]:
        answer: Future[Frame] = Future()
        data = torch.frombuffer(encode_frame(frame), dtype=torch.uint8)
        try:
            call = rpc.rpc_async(to, _deliver, args=(to, self.name, self._instance, data))
        except (RuntimeError, ValueError) as error:
            self._fail(to, answer, error)
            return answer
        with self._lock:
            self._under_way.add(call)
        call.add_done_callback(lambda done: self._settle(to, answer, done))
        return answer

    def close(self) -> None:
        with self._lock:
            under_way = list(self._under_way)
        for call in under_way:
            with contextlib.suppress(Exception):  # of any type that the other process has raised
                call.wait()
        with _arrived:
            _here.pop(self.name, None)

    def receive(self, peer: Peer, data: torch.Tensor) -> torch.Tensor:
        """Take a frame that has arrived; returns the answer's bytes."""
        assert self._handler is not None
        answer = self._handler(peer, decode_frame(bytearray(data.numpy().tobytes())))
        return torch.frombuffer(encode_frame(answer or Frame({})), dtype=torch.uint8)

    def _settle(self, to: str, answer: Future[Frame], done: Any) -> None:
        with self._lock:
            self._under_way.discard(done)
        try:
            found = decode_frame(bytearray(done.value().numpy().tobytes()))
        except Exception as error:  # noqa: BLE001 - of any type that the other process has raised; who waits is told
            self._fail(to, answer, error)
        else:
            answer.set_result(found)

    def _fail(self, to: str, answer: Future[Frame], cause: Exception) -> None:
        error = PeerLostError(f"{to} is gone: {cause}")
        error.__cause__ = cause
        answer.set_exception(error)
        if self._on_lost is not None and self.name in _here:
            self._on_lost(Peer(to, ""))


def _deliver(to: str, sender: str, instance: str, data: torch.Tensor) -> torch.Tensor:
    """Runs in the receiver's process."""
    with _arrived:
        if not _arrived.wait_for(lambda: to in _here, _PATIENCE):
            raise RuntimeError(f"{to} takes no messages")
        receiver = _here[to]
    return receiver.receive(Peer(sender, instance), data)
