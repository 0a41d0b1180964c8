"""Transport of frames between processes: over sockets, or any other implementation of :class:`Transport`."""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import socket
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple, Protocol

from ckpt_async.parameter_server.frames import Frame, decode_frame, encode_frame
from ckpt_async.parameter_server.sockets import Connection, Listener, dial, shut, split_address
from ckpt_core.errors import CheckpointError
from ckpt_core.paths import StrPath

logger = logging.getLogger(__name__)

_BEAT_SECONDS = 2.0
_LINGER = 10.0  # seconds without progress after which close() gives up frames that are not sent yet


class PeerLostError(CheckpointError):
    """Another process does not answer any more."""


class Peer(NamedTuple):
    """The sender of a frame.

    Attributes:
        name: Name of the participant.
        instance: ID of the process that has this name; empty if that is not known.
    """

    name: str
    instance: str


Handler = Callable[[Peer, Frame], "Frame | None"]


class Transport(Protocol):
    """The interface of a network for participants. Frames may be reordered, duplicated and delayed.

    If frames of a process are lost, ``on_lost`` must be called.

    Attributes:
        name: This participant's name.
        address: Where other participants reach it; they pass it, with the name, to their :meth:`connect`.
    """

    name: str
    address: str

    def start(self, handler: Handler, on_lost: Callable[[Peer], None]) -> None:
        """Begin to receive.

        Args:
            handler: Called, on any thread, with each frame that arrives; returns the answer if it is a request.
            on_lost: Called when a process with which this one communicates is gone.
        """

    def connect(self, name: str, address: str) -> None:
        """Set the address of a participant; called again when it has moved."""

    def send(self, to: str, frame: Frame) -> None:
        """Send a frame without waiting; a frame that cannot be delivered is dropped."""

    def request(self, to: str, frame: Frame) -> Future[Frame]:
        """Send a frame, and return a future of the answer, or of :class:`PeerLostError` if there will be none."""

    def close(self) -> None:
        """Stop, after the frames passed to :meth:`send` were sent."""


class SocketTransport:
    """Frames over TCP, without pickle.

    Both sides of a connection must know the shared secret. Nothing is encrypted: use it only in a network in which no
    other user can read or change packets.

    Args:
        name: This participant's name.
        listen: ``host:port`` to listen on, ``[host]:port`` for IPv6; port 0 takes a free one.
        advertise: Host, or ``host:port``, to which other participants connect, if it differs from ``listen``: as with
            ``0.0.0.0``.
        secret: The secret that all processes of the training share, at least 16 characters, or a
            :class:`~pathlib.Path` of the file with it. None: the environment variable ``CKPT_SECRET``, or the file that
            ``CKPT_SECRET_FILE`` names; without these, a file of this user (mode 600), which is enough if all processes
            are on one machine and listen on its loopback interface.
        connect_timeout: Seconds to wait for a participant that does not listen yet.
        silence_timeout: Seconds, at least 6, after which a process that sends no sign of life while it owes an answer
            is taken for lost. A process that works on a long answer does send signs of life; one that was stopped, or
            whose machine is gone, does not.

    Attributes:
        address: Where other participants reach it.

    Raises:
        CheckpointError: Other machines can connect, and there is no secret.
        ValueError: An address is invalid or cannot be reached by others; or ``silence_timeout`` is too short.
    """

    def __init__(
        self,
        name: str,
        listen: str = "127.0.0.1:0",
        *,
        advertise: str | None = None,
        secret: StrPath | None = None,
        connect_timeout: float = 60.0,
        silence_timeout: float = 60.0,
    ) -> None:
        if silence_timeout < 3 * _BEAT_SECONDS:
            raise ValueError(f"silence_timeout={silence_timeout} must be at least {3 * _BEAT_SECONDS} seconds")
        self.name = name
        self.connect_timeout = connect_timeout
        self.silence_timeout = silence_timeout
        self._instance = uuid.uuid4().hex
        self._listener = Listener(listen, advertise, secret)
        self.address = self._listener.address
        self.secret = self._listener.secret
        self._handler: Handler | None = None
        self._on_lost: Callable[[Peer], None] = lambda peer: None
        self._addresses: dict[str, str] = {}
        self._outbound: dict[str, _Outbound] = {}
        self._inbound: set[_Inbound] = set()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._beat_due = 0.0

    def start(self, handler: Handler, on_lost: Callable[[Peer], None]) -> None:
        self._handler, self._on_lost = handler, on_lost
        self._run("ckpt-accept", self._listener.run, self._closed, self._welcome, self._beat)

    def connect(self, name: str, address: str) -> None:
        split_address(address)
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
            if self._closed.is_set():
                return
            self._closed.set()
        for connection in list(self._outbound.values()):
            connection.finish()
        for incoming in list(self._inbound):
            shut(incoming.socket)
        if self._handler is None:
            self._listener.close()
        for thread in list(self._threads):
            if thread is not threading.current_thread():
                thread.join()

    def _run(self, name: str, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
        thread.start()
        self._threads = [*(known for known in self._threads if known.is_alive()), thread]

    def _encode(self, frame: Frame, number: int | None) -> bytearray:
        envelope = {"from": self.name, "instance": self._instance, "number": number, "body": frame.content}
        return encode_frame(Frame(envelope, frame.tensors))

    def _to(self, name: str) -> _Outbound:
        with self._lock:
            found = self._outbound.get(name)
            if found is not None and not found.lost:
                return found
            address = self._addresses.get(name)
            if address is None or self._closed.is_set():
                raise PeerLostError(f"{self.name} knows no address of {name}")
            made = _Outbound(name, address, self)
            try:
                self._run("ckpt-send", made.write)
            except RuntimeError as error:
                raise PeerLostError(f"{name} at {address} cannot be reached: {error}") from error
            self._outbound[name] = made
            return made

    def report_lost(self, peer: Peer) -> None:
        """Call ``on_lost`` for a process that is gone, unless this transport is closed."""
        if not self._closed.is_set():
            try:
                self._on_lost(peer)
            except Exception:  # the thread is a connection's
                logger.exception("%s failed on the loss of %s", self.name, peer.name)

    # ---- connections of others ---------------------------------------------------------------------------------------

    def _welcome(self, connection: socket.socket) -> None:
        incoming = _Inbound(connection)
        with self._lock:
            if self._closed.is_set():
                shut(connection)
                return
            self._inbound.add(incoming)
            try:
                self._run("ckpt-receive", self._serve, incoming)
            except RuntimeError:  # no more threads can be started
                self._inbound.discard(incoming)
                raise

    def _serve(self, incoming: _Inbound) -> None:
        assert self._handler is not None
        peer: Peer | None = None
        try:
            while (data := incoming.receive()) is not None:
                frame = decode_frame(data)
                peer = Peer(str(frame.content["from"]), str(frame.content["instance"]))
                answer = self._handler(peer, Frame(frame.content["body"], frame.tensors))
                number = frame.content["number"]
                with incoming.lock:
                    incoming.is_busy = False
                    if number is not None:
                        incoming.transmit(self._encode(answer or Frame({}), number))
        except OSError as error:
            if not self._closed.is_set():
                logger.debug("the connection from %s broke: %s", peer, error)
        except Exception as error:  # noqa: BLE001 - whatever a frame leads to ends its connection and nothing else
            logger.warning("closed the connection from %s: %s: %s", peer, type(error).__name__, error)
        finally:
            with self._lock:
                self._inbound.discard(incoming)
            incoming.socket.close()
        if peer is not None:
            self.report_lost(peer)

    def _beat(self) -> None:
        """Send signs of life, every few seconds, on connections whose other side waits for an answer."""
        if time.monotonic() < self._beat_due:
            return
        self._beat_due = time.monotonic() + _BEAT_SECONDS
        with self._lock:
            busy = [incoming for incoming in self._inbound if incoming.is_busy]
        for incoming in busy:
            if incoming.lock.acquire(blocking=False):  # if it is held, the answer itself is being sent
                try:
                    if incoming.is_busy:
                        incoming.send_heartbeat()
                finally:
                    incoming.lock.release()


class _Inbound(Connection):
    """A connection that another process has made to this one."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection)
        self.lock = threading.Lock()  # held while sending
        self.is_busy = False

    def frame_begins(self) -> None:
        self.is_busy = True


class _Outbound(Connection):
    """A connection to another participant: a queue of frames to write, and the answers that come back."""

    def __init__(self, name: str, address: str, transport: SocketTransport) -> None:
        self.name = name
        self._why_lost: Exception | None = None
        self._address = address
        self._transport = transport
        self._queue: queue.SimpleQueue[bytearray | None] = queue.SimpleQueue()
        self._numbers = itertools.count()
        self._expected: dict[int, Future[Frame]] = {}
        self._lock = threading.Lock()
        self._is_open = False
        self._dropped = threading.Event()
        self._silent_seconds = 0.0

    @property
    def lost(self) -> bool:
        return self._why_lost is not None

    def expect(self) -> tuple[int, Future[Frame]]:
        future: Future[Frame] = Future()
        number = next(self._numbers)
        with self._lock:
            self._expected[number] = future
        return number, future

    def put(self, data: bytearray) -> None:
        if self._why_lost is not None:  # it may have failed before any request, so that no future got the error
            raise self._lost_by(self._why_lost)
        self._queue.put(data)

    def write(self) -> None:
        """Connect, and write frames as they come; runs on a thread of its own."""
        reader = threading.Thread(target=self._read, name="ckpt-answers", daemon=True)
        try:
            own = self._transport
            super().__init__(dial(self._address, own.secret, own.connect_timeout, self._dropped))
            self._is_open = True
            reader.start()
            while (data := self._queue.get()) is not None:
                self.transmit(data)
            self.socket.shutdown(socket.SHUT_WR)
        except Exception as error:  # noqa: BLE001 - raised where the answer is awaited
            self._fail(error)
        if reader.ident is not None:
            reader.join()
        if self._is_open:
            self.socket.close()

    def finish(self) -> None:
        """Close the connection after the frames in the queue were written."""
        self._dropped.set()
        self._queue.put(None)

    def drop(self) -> None:
        """Close the connection at once."""
        self._dropped.set()
        self._fail(ConnectionError("it has moved"))

    def _read(self) -> None:
        try:
            while (data := self.receive()) is not None:
                frame = decode_frame(data)
                with self._lock:
                    future = self._expected.pop(frame.content["number"], None)
                if future is not None:
                    future.set_result(Frame(frame.content["body"], frame.tensors))
            self._fail(ConnectionError("it has closed the connection"))
        except Exception as error:  # noqa: BLE001 - raised where the answer is awaited
            self._fail(error)

    def progressed(self) -> None:
        self._silent_seconds = 0.0

    def nothing_came(self, seconds: float) -> None:
        # Counted instead of taken from a clock, because this process may itself have been stopped meanwhile.
        is_ending = self._dropped.is_set()
        self._silent_seconds = self._silent_seconds + seconds if self._expected or is_ending else 0.0
        longest = min(_LINGER, self._transport.silence_timeout) if is_ending else self._transport.silence_timeout
        if self._silent_seconds >= longest:
            raise TimeoutError(f"nothing was heard from it for {self._silent_seconds:.0f} s")

    def _fail(self, cause: Exception) -> None:
        with self._lock:
            first = self._why_lost is None
            self._why_lost = self._why_lost or cause
            expected, self._expected = self._expected, {}
        self._queue.put(None)
        if self._is_open:
            with contextlib.suppress(OSError):  # wakes the other thread of the connection, which may wait in it
                self.socket.shutdown(socket.SHUT_RDWR)
        for future in expected.values():
            future.set_exception(self._lost_by(cause))
        if first and not self._dropped.is_set():
            log = logger.debug if isinstance(cause, ConnectionError) else logger.warning
            log("%s has lost %s at %s: %s", self._transport.name, self.name, self._address, _reason(cause))
            self._transport.report_lost(Peer(self.name, ""))

    def _lost_by(self, cause: Exception) -> PeerLostError:
        remedy = cause.remedy if isinstance(cause, CheckpointError) else None
        error = PeerLostError(f"{self.name} at {self._address} is gone: {_reason(cause)}", remedy=remedy)
        error.__cause__ = cause
        return error


def _reason(cause: Exception) -> str:
    return cause.message if isinstance(cause, CheckpointError) else str(cause)
