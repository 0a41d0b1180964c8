"""How frames get from one process to another: over sockets, or over anything that implements :class:`Transport`."""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import socket
import struct
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple, Protocol

from ckpt_core.errors import CheckpointError
from ckpt_core.parameter_server.frames import Frame, decode_frame, encode_frame

__all__ = ["Handler", "Peer", "PeerLostError", "SocketTransport", "Transport"]

logger = logging.getLogger(__name__)

_LENGTH = struct.Struct("<Q")
_LONGEST_FRAME = 2**40  # bytes


class PeerLostError(CheckpointError):
    """Another process does not answer any more."""


class Peer(NamedTuple):
    """Who has sent something.

    Attributes:
        name: The participant.
        instance: Which process of that name.
    """

    name: str
    instance: str


Handler = Callable[[Peer, Frame], "Frame | None"]


class Transport(Protocol):
    """What participants need of a network. Frames may be reordered, duplicated and delayed.

    What is lost must be told by ``on_lost``.

    Attributes:
        name: This participant's name.
        address: Where others reach it; goes with its name to :meth:`connect` of others.
    """

    name: str
    address: str

    def start(self, handler: Handler, on_lost: Callable[[Peer], None]) -> None:
        """Begin to receive.

        Args:
            handler: Called, on any thread, with each frame that arrives; returns the answer if one was asked for.
            on_lost: Called when a process that has spoken to this one is gone.
        """

    def connect(self, name: str, address: str) -> None:
        """Say where a participant is reached; again when it has moved."""

    def send(self, to: str, frame: Frame) -> None:
        """Send without waiting; what cannot be delivered is dropped."""

    def request(self, to: str, frame: Frame) -> Future[Frame]:
        """Send, and give the answer; :class:`PeerLostError` if there will be none."""

    def close(self) -> None:
        """Stop, after what was given to :meth:`send` has left."""


class SocketTransport:
    """Frames over TCP: each is its length, 8 bytes little-endian, and a safetensors text. No pickle.

    There is no authentication and no encryption: use it where every process that can connect is trusted.

    Args:
        name: This participant's name.
        listen: ``host:port`` to listen at; port 0 takes a free one. Others must be able to reach the host.
        connect_timeout: Seconds to wait for a participant that does not listen yet.

    Attributes:
        address: ``host:port`` it listens at.
    """

    def __init__(self, name: str, listen: str = "127.0.0.1:0", *, connect_timeout: float = 60.0) -> None:
        self.name = name
        self._instance = uuid.uuid4().hex
        self._connect_timeout = connect_timeout
        host, _, port = listen.rpartition(":")
        self._listener = socket.create_server((host, int(port)))
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._handler: Handler = _refuse
        self._on_lost: Callable[[Peer], None] = _ignore
        self._addresses: dict[str, str] = {}
        self._outbound: dict[str, _Outbound] = {}
        self._inbound: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False

    def start(self, handler: Handler, on_lost: Callable[[Peer], None]) -> None:
        self._handler, self._on_lost = handler, on_lost
        self._run(self._accept, "ckpt-accept")

    def connect(self, name: str, address: str) -> None:
        with self._lock:
            if self._addresses.get(name) == address:
                return
            self._addresses[name] = address
            outdated = self._outbound.pop(name, None)
        if outdated is not None:
            outdated.drop()

    def send(self, to: str, frame: Frame) -> None:
        with contextlib.suppress(PeerLostError):
            self._to(to).put(self._encode(frame, None))

    def request(self, to: str, frame: Frame) -> Future[Frame]:
        outbound = self._to(to)
        number, future = outbound.expect()
        try:
            outbound.put(self._encode(frame, number))
        except PeerLostError as error:
            if not future.done():
                future.set_exception(error)
        return future

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            outbound = list(self._outbound.values())
        for connection in outbound:
            connection.finish()
        # Closing a listening socket does not wake the thread that waits in accept; shutting it down does.
        _shut(self._listener)
        with self._lock:
            inbound = list(self._inbound)
        for incoming in inbound:
            _shut(incoming)
        for thread in list(self._threads):
            if thread is not threading.current_thread():
                thread.join()

    def _run(self, target: Callable[..., None], name: str, *arguments: object) -> threading.Thread:
        thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
        self._threads = [*(known for known in self._threads if known.is_alive()), thread]
        thread.start()
        return thread

    def _encode(self, frame: Frame, number: int | None) -> bytearray:
        envelope = {"from": self.name, "instance": self._instance, "number": number, "body": frame.content}
        return encode_frame(Frame(envelope, frame.tensors))

    def _to(self, name: str) -> _Outbound:
        with self._lock:
            found = self._outbound.get(name)
            if found is not None and not found.lost:
                return found
            address = self._addresses.get(name)
            if address is None or self._closed:
                raise PeerLostError(f"{self.name} knows no address of {name}")
            made = self._outbound[name] = _Outbound(name, address, self._connect_timeout, self._peer_lost)
            self._run(made.write, "ckpt-send")
            return made

    def _peer_lost(self, name: str) -> None:
        if not self._closed:
            self._on_lost(Peer(name, ""))

    def _accept(self) -> None:
        while True:
            try:
                incoming, _ = self._listener.accept()
            except OSError:
                return  # closed
            incoming.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                if self._closed:
                    _shut(incoming)
                    return
                self._inbound.add(incoming)
                self._run(self._serve, "ckpt-receive", incoming)

    def _serve(self, incoming: socket.socket) -> None:
        peer: Peer | None = None
        try:
            while (data := _receive(incoming)) is not None:
                frame = decode_frame(data)
                peer = Peer(str(frame.content["from"]), str(frame.content["instance"]))
                answer = self._handler(peer, Frame(frame.content["body"], frame.tensors))
                number = frame.content["number"]
                if number is not None:
                    _transmit(incoming, self._encode(answer or Frame({}), number))
        except (OSError, ValueError, KeyError) as error:
            if not self._closed:
                logger.debug("the connection from %s broke: %s", peer, error)
        finally:
            with self._lock:
                self._inbound.discard(incoming)
            incoming.close()
        if peer is not None and not self._closed:
            self._on_lost(peer)


class _Outbound:
    """A connection to one participant: a queue of frames to write, and the answers that come back."""

    def __init__(self, name: str, address: str, timeout: float, on_lost: Callable[[str], None]) -> None:
        self.name = name
        self.lost = False
        self._address = address
        self._timeout = timeout
        self._on_lost = on_lost
        self._queue: queue.SimpleQueue[bytearray | None] = queue.SimpleQueue()
        self._numbers = itertools.count()
        self._expected: dict[int, Future[Frame]] = {}
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._reader: threading.Thread | None = None
        self._dropped = threading.Event()

    def expect(self) -> tuple[int, Future[Frame]]:
        future: Future[Frame] = Future()
        number = next(self._numbers)
        with self._lock:
            self._expected[number] = future
        return number, future

    def put(self, data: bytearray) -> None:
        if self.lost:
            raise PeerLostError(f"{self.name} at {self._address} is gone")
        self._queue.put(data)

    def write(self) -> None:
        """Write frames as they come; runs on a thread of its own."""
        try:
            self._socket = connection = self._dial()
            self._reader = threading.Thread(target=self._read, args=(connection,), name="ckpt-answers", daemon=True)
            self._reader.start()
            while (data := self._queue.get()) is not None:
                _transmit(connection, data)
            connection.shutdown(socket.SHUT_WR)
        except OSError as error:
            self._fail(error)
        if self._reader is not None:
            self._reader.join()
        if self._socket is not None:
            self._socket.close()

    def finish(self) -> None:
        """Let go after what is in the queue."""
        self._dropped.set()
        self._queue.put(None)

    def drop(self) -> None:
        """Let go at once."""
        self._dropped.set()
        self._fail(ConnectionError("it has moved"))
        if self._socket is not None:
            _shut(self._socket)

    def _dial(self) -> socket.socket:
        host, _, port = self._address.rpartition(":")
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                connection = socket.create_connection((host, int(port)), timeout=self._timeout)
            except ConnectionRefusedError:
                if time.monotonic() > deadline or self._dropped.wait(0.02):
                    raise
                continue
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection

    def _read(self, connection: socket.socket) -> None:
        try:
            while (data := _receive(connection)) is not None:
                frame = decode_frame(data)
                with self._lock:
                    future = self._expected.pop(frame.content["number"], None)
                if future is not None:
                    future.set_result(Frame(frame.content["body"], frame.tensors))
            self._fail(ConnectionError("it has closed the connection"))
        except (OSError, ValueError, KeyError) as error:
            self._fail(error)

    def _fail(self, cause: Exception) -> None:
        with self._lock:
            first, self.lost = not self.lost, True
            expected, self._expected = self._expected, {}
        self._queue.put(None)
        for future in expected.values():
            error = PeerLostError(f"{self.name} at {self._address} is gone: {cause}")
            error.__cause__ = cause
            future.set_exception(error)
        if first and not self._dropped.is_set():
            self._on_lost(self.name)


def _transmit(connection: socket.socket, data: bytearray) -> None:
    connection.sendall(_LENGTH.pack(len(data)))
    connection.sendall(data)


def _receive(connection: socket.socket) -> bytearray | None:
    """The next frame's bytes; None at the end of the stream."""
    head = _receive_exactly(connection, _LENGTH.size)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    if length > _LONGEST_FRAME:
        raise ValueError(f"a frame of {length} bytes")
    return _receive_exactly(connection, length)


def _receive_exactly(connection: socket.socket, length: int) -> bytearray | None:
    data = bytearray(length)
    view = memoryview(data)
    done = 0
    while done < length:
        count = connection.recv_into(view[done:])
        if count == 0:
            return None
        done += count
    view.release()
    return data


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def _refuse(peer: Peer, frame: Frame) -> Frame | None:
    raise ValueError(f"{peer.name} has sent {frame.content} before anything was started")


def _ignore(peer: Peer) -> None:
    """Nobody wants to know yet."""
