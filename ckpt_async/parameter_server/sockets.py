"""Sockets between participants: addresses, authentication by the shared secret, and frames on a connection.

``multiprocessing.connection`` is not enough here: its listener waits for a client that sends nothing, and accepts no
other meanwhile; its client has no time limit and no IPv6; and its authentication is HMAC-MD5 before Python 3.12.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import logging
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ckpt_async.parameter_server.secret import FILE_VARIABLE, SECRET_VARIABLE, Secret, find_secret
from ckpt_core.errors import CheckpointError
from ckpt_core.paths import StrPath

logger = logging.getLogger(__name__)

_HELLO = b"ckpt-ps2"
_NONCE_BYTES = _PROOF_BYTES = 32
_GREETING_BYTES = len(_HELLO) + _NONCE_BYTES
_ANSWER_BYTES = _GREETING_BYTES + _PROOF_BYTES
_LISTENER, _CALLER = b"listener", b"caller"  # the proofs of both sides differ, so that none can be sent back
_REFUSED = bytes(_PROOF_BYTES)
_MOST_STRANGERS = 64
_PATIENCE = 5.0  # seconds within which a client must prove that it knows the secret
_PAUSE = 0.1  # seconds to wait after a connection could not be accepted; and between two checks for the end
_LENGTH = struct.Struct("<Q")
_LONGEST_FRAME = 2**40  # bytes
_PIECE = 2**20  # bytes
_TICK_SECONDS = 1
# Detects on an idle connection, after 90 seconds, that a machine is gone. A frozen process still answers keepalives.
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}


class NotAcceptedError(CheckpointError):
    """The other side has another secret, or is not a participant."""


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of ``host:port`` or ``[host]:port``."""
    host, _, port = address.rpartition(":")
    if not port.isdigit() or int(port) > 65535 or (":" in host and not host.startswith("[")):
        raise ValueError(f"{address!r} is no address: it must be host:port, or [host]:port for IPv6")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _with_port(host: str, port: int) -> str:
    """Return ``host:port``, for a host that may already include a port."""
    try:
        split_address(host)
    except ValueError:
        return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
    return host


def shut(connection: socket.socket) -> None:
    """Close a connection, and wake the threads that wait in it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


# ---- frames on a connection ------------------------------------------------------------------------------------------


class Connection:
    """Sends and receives frames, each as its length, 8 bytes little-endian, and its bytes; length 0 is a sign of life.

    The other side has proved that it knows the secret.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection

    def frame_begins(self) -> None:
        """Called when a frame begins to arrive."""

    def progressed(self) -> None:
        """Called when bytes have arrived or left."""

    def nothing_came(self, seconds: float) -> None:
        """Called when nothing has arrived for ``seconds``, if the socket has a time limit."""

    def transmit(self, data: bytearray) -> None:
        """Send the bytes of a frame."""
        self.socket.sendall(_LENGTH.pack(len(data)))
        view = memoryview(data)
        while view:
            view = view[self.socket.send(view[:_PIECE]) :]
            self.progressed()

    def send_heartbeat(self) -> None:
        """Send a sign of life without waiting; skip it if the other side does not read."""
        try:
            if self.socket.send(_LENGTH.pack(0), socket.MSG_DONTWAIT) != _LENGTH.size:
                shut(self.socket)
        except OSError:
            pass  # the buffer is full, or the other side is gone, which the reading thread notices

    def receive(self) -> bytearray | None:
        """Return the bytes of the next frame; None at the end of the stream."""
        while (head := self.receive_exactly(_LENGTH.size)) is not None:
            (length,) = _LENGTH.unpack(head)
            if length > _LONGEST_FRAME:
                raise ValueError(f"a frame of {length} bytes")
            if length:
                self.frame_begins()
                return self.receive_exactly(length)
        return None

    def receive_exactly(self, length: int) -> bytearray | None:
        """Return ``length`` bytes, allocating memory as they arrive; None if the stream ends before."""
        data = bytearray(min(length, _PIECE))
        done = 0
        while done < length:
            if done == len(data):
                data += bytes(min(length - done, done))
            with memoryview(data) as view:
                try:
                    count = self.socket.recv_into(view[done:])
                except BlockingIOError:
                    self.nothing_came(_TICK_SECONDS)
                    continue
            if count == 0:
                return None
            self.progressed()
            done += count
        return data


# ---- who may connect -------------------------------------------------------------------------------------------------


@dataclass
class _Stranger:
    where: object
    deadline: float
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(_NONCE_BYTES))
    said: bytes = b""


class Listener:
    """Listens for connections, and hands over those whose other side has proved that it knows the secret.

    The secret itself is never sent. The listener sends a random number, the client another one and a digest of both
    with the secret; then the listener sends a different digest of both. All unauthenticated connections (*strangers*)
    together cost one thread, a few kilobytes and at most 64 descriptors, and are dropped after 5 seconds; ``rejected``
    counts the connections that were dropped because they did not prove that they know the secret.

    ``address`` is where other participants connect: ``advertise`` (a host, or ``host:port``), or where it listens.
    """

    def __init__(self, listen: str, advertise: str | None, secret: StrPath | None) -> None:
        host, port = split_address(listen)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family)
        try:
            bound, port = self._socket.getsockname()[:2]
            place = ipaddress.ip_address(bound.partition("%")[0])
            if advertise is None and place.is_unspecified:
                raise ValueError(f"listening at {listen}, it has no address for others: pass advertise='host'")
            self.address = _with_port(advertise or host, port)
            self.secret = find_secret(secret, address=self.address, is_loopback=place.is_loopback)
        except BaseException:
            self._socket.close()
            raise
        self._socket.setblocking(False)
        self._strangers: dict[socket.socket, _Stranger] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._has_complained = False
        self.rejected = 0

    def run(self, is_over: threading.Event, welcome: Callable[[socket.socket], None], tick: Callable[[], None]) -> None:
        """Accept connections until ``is_over`` is set, and then close all sockets.

        ``welcome`` is called with each connection whose other side knows the secret, and ``tick`` several times per
        second; neither may block.
        """
        while not is_over.is_set():
            try:
                self._look(welcome)
                tick()
            except Exception:  # nothing that a stranger does may end the thread
                logger.exception("a connection to %s could not be taken", self.address)
                is_over.wait(_PAUSE)
        self.close()

    def close(self) -> None:
        """Close all sockets; for callers that have not called :meth:`run`, which does this itself."""
        self._selector.close()
        for connection in (self._socket, *self._strangers):
            connection.close()

    def _look(self, welcome: Callable[[socket.socket], None]) -> None:
        for key, _ in self._selector.select(_PAUSE):
            if key.fileobj is self._socket:
                self._accept()
            elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._strangers:
                self._hear(key.fileobj, welcome)
        now = time.monotonic()
        for connection, stranger in list(self._strangers.items()):
            if stranger.deadline <= now:
                self._reject(connection)

    def _accept(self) -> None:
        try:
            connection, where = self._socket.accept()
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            if not self._has_complained:
                logger.warning("%s cannot take connections for now, and continues to try: %s", self.address, error)
            self._has_complained = True
            if self._strangers:  # dropping one frees a descriptor, of which there may be none left
                self._reject(next(iter(self._strangers)))
            time.sleep(_PAUSE)
            return
        self._has_complained = False
        stranger = self._strangers[connection] = _Stranger(where, time.monotonic() + _PATIENCE)
        try:
            connection.setblocking(False)
            connection.send(_HELLO + stranger.nonce)
            self._selector.register(connection, selectors.EVENT_READ)
        except OSError:
            self._reject(connection)
        if len(self._strangers) > _MOST_STRANGERS:
            self._reject(next(iter(self._strangers)))

    def _hear(self, connection: socket.socket, welcome: Callable[[socket.socket], None]) -> None:
        stranger = self._strangers[connection]
        try:
            said = connection.recv(_ANSWER_BYTES - len(stranger.said))
        except BlockingIOError:
            return
        except OSError:
            said = b""
        stranger.said += said
        if not said or not stranger.said.startswith(_HELLO[: len(stranger.said)]):
            self._reject(connection)
        elif len(stranger.said) == _ANSWER_BYTES:
            nonce, proof = stranger.said[len(_HELLO) : -_PROOF_BYTES], stranger.said[-_PROOF_BYTES:]
            if not hmac.compare_digest(proof, self.secret.proof(_CALLER, stranger.nonce, nonce)):
                self._reject(connection, _REFUSED)
                return
            self._forget(connection)
            try:
                connection.send(self.secret.proof(_LISTENER, stranger.nonce, nonce))
                connection.setblocking(True)
                _tune(connection)
                welcome(connection)
            except BaseException:
                connection.close()
                raise

    def _reject(self, connection: socket.socket, word: bytes = b"") -> None:
        where = self._forget(connection).where
        self.rejected += 1
        with contextlib.suppress(OSError):
            connection.send(word)
        connection.close()
        if self.rejected & (self.rejected - 1) == 0:  # log at powers of two only, so that strangers cannot fill the log
            logger.warning(
                "%d connections to %s have not shown that they know the secret; the last one came from %s",
                *(self.rejected, self.address, where),
            )

    def _forget(self, connection: socket.socket) -> _Stranger:
        with contextlib.suppress(KeyError):
            self._selector.unregister(connection)
        return self._strangers.pop(connection)


def dial(address: str, secret: Secret, timeout: float, is_over: threading.Event) -> socket.socket:
    """Connect to a participant, which may not listen yet, and authenticate both sides by the secret.

    Retries for ``timeout`` seconds, unless ``is_over`` is set. Raises ``OSError`` if no process listens, and
    :class:`NotAcceptedError` if the process there does not know the secret.
    """
    deadline = time.monotonic() + timeout
    while True:
        remaining = max(0.1, deadline - time.monotonic())
        try:
            connection = socket.create_connection(split_address(address), timeout=remaining)
            try:
                connection.settimeout(min(remaining, 2 * _PATIENCE))
                _introduce(connection, address, secret)
                connection.settimeout(None)
                _tune(connection)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _TICK_SECONDS, 0))
            except BaseException:
                connection.close()
                raise
        except OSError:  # also if the host name is not known yet, or the process there is about to end
            if time.monotonic() > deadline or is_over.wait(0.02):
                raise
        else:
            return connection


def _introduce(connection: socket.socket, address: str, secret: Secret) -> None:
    far = Connection(connection)
    greeting = far.receive_exactly(_GREETING_BYTES)
    if greeting is None:
        raise ConnectionError("it has closed the connection")
    if not greeting.startswith(_HELLO):
        raise NotAcceptedError(f"what listens at {address} is no participant, or one of another version")
    listener, caller = bytes(greeting[len(_HELLO) :]), secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(_HELLO + caller + secret.proof(_CALLER, listener, caller))
    proof = far.receive_exactly(_PROOF_BYTES)
    if proof is None:
        raise ConnectionError("it has closed the connection")
    if not hmac.compare_digest(proof, secret.proof(_LISTENER, listener, caller)):
        raise NotAcceptedError(
            f"what listens at {address} has another secret than that {secret.origin}",
            remedy=f"give all processes of the training the same secret=, {SECRET_VARIABLE} or {FILE_VARIABLE}",
        )


def _tune(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
