"""The ``TCPStore`` through which the ranks communicate: opened for checkpointing only, with a time limit per request.

torch's server takes requests from every program that can reach it. So it listens on the loopback interface if all ranks
are on one machine, and values are sealed with a secret that only the ranks have: another program may make a save fail,
but can forge neither a report nor an outcome.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import hmac
import ipaddress
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from ckpt_core.errors import RankFailedError
from ckpt_core.process.threads import start

Answer = TypeVar("Answer")

_SHORTEST_PAUSE = 0.001  # seconds
_LONGEST_PAUSE = 0.5
# Environment variables in which launchers give the number of processes on this machine, and in all.
_COUNTS = (("LOCAL_WORLD_SIZE", "WORLD_SIZE"), ("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"))

_secrets: dict[tuple[str, int], bytes] = {}  # of the stores that this process is connected to, by their addresses


def connect_store(
    rank: int, world_size: int, broadcast: Callable[[Any], Any], *, timeout_seconds: float = 300.0
) -> Store:
    """Open a ``TCPStore`` that only checkpointing uses; call it on all ranks together.

    Rank 0 serves it. ``broadcast`` sends an object from rank 0 to all ranks and returns it. An operation fails after
    ``timeout_seconds``.
    """
    timeout = datetime.timedelta(seconds=timeout_seconds)
    server, address = None, None
    if rank == 0:
        server, host = _serve(world_size, timeout)
        address = [host, server.port, secrets.token_hex(16)]
    host, port, secret = broadcast(address)
    _secrets[host, port] = bytes.fromhex(secret)
    return server or TCPStore(host, port, world_size=world_size, is_master=False, timeout=timeout)


def _serve(world_size: int, timeout: datetime.timedelta) -> tuple[TCPStore, str]:
    """Start the server; return it, and the address at which the other ranks reach it."""
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    for address in _addresses(host, world_size):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family) as listening:
            listening.bind((address, 0))
            listening.listen(socket.SOMAXCONN)
            port = listening.getsockname()[1]
            descriptor = listening.detach()
            server = TCPStore(
                address, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=descriptor
            )
            return server, address
    return TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout), host


def _addresses(host: str, world_size: int) -> list[str]:
    """Return the addresses of which listening on one is enough, best first; none if that is not known."""
    if host == "localhost" or _are_on_one_machine(world_size):
        return ["127.0.0.1", "::1"]
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return []  # a host name may resolve differently here and on other machines
    return [host]


def _are_on_one_machine(world_size: int) -> bool:
    get = os.environ.get
    total = str(world_size)
    if get("SLURM_NNODES") == "1" and get("SLURM_NTASKS") == total:
        return True
    return any(get(here) == get(everywhere) == total for here, everywhere in _COUNTS)


def seal(store: Store, key: str, value: str) -> str:
    """Return ``value`` with a seal, by which the other ranks know that a rank has stored it under ``key``."""
    secret = _secret_of(store)
    return value if secret is None else f"{_mark(secret, key, value)} {value}"


def unseal(store: Store, key: str, sealed: bytes) -> str:
    """Return the value that :func:`seal` has sealed; raise ``RankFailedError`` if no rank has stored it."""
    text = sealed.decode(errors="replace")
    secret = _secret_of(store)
    if secret is None:
        return text
    mark, _, value = text.partition(" ")
    if not hmac.compare_digest(mark.encode(), _mark(secret, key, value).encode()):
        raise RankFailedError(
            "the report of a rank was not written by one of the ranks: another program has access to the port of "
            "this job",
            remedy="find out who else connects to the ports of this job, and keep them out with a firewall",
        )
    return value


def derived_key(store: Store, purpose: str) -> bytes:
    """Return a secret key for a purpose, which only the ranks of this store know.

    Raises:
        RankFailedError: The store has no secret: it was not opened by :func:`connect_store`.
    """
    secret = _secret_of(store)
    if secret is None:
        raise RankFailedError("the ranks share no secret", remedy="connect them with RankGroup.connect")
    return hashlib.blake2b(purpose.encode(), key=secret, digest_size=32).digest()


def _mark(secret: bytes, key: str, value: str) -> str:
    return hashlib.blake2b(f"{key}\0{value}".encode(errors="replace"), key=secret, digest_size=16).hexdigest()


def _secret_of(store: Store) -> bytes | None:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return _secrets.get((store.host, store.port)) if isinstance(store, TCPStore) else None


class TimedStore:
    """A client of the store that rank 0 serves, whose requests have a time limit.

    torch's client waits for ever for the answer of a server whose process is stopped, so each request has a thread of
    its own, which is left behind if there is no answer after ``answer_within`` seconds. None makes requests without
    a thread and a limit, for callers whose training stops anyway if rank 0 does not answer.
    """

    def __init__(self, store: Store, *, answer_within: float | None) -> None:
        self._store = store
        self._answer_within = answer_within

    def set(self, key: str, value: str) -> None:
        self._ask(lambda: self._store.set(key, seal(self._store, key, value)))

    def get(self, key: str) -> str:
        """Return the value of ``key``, which exists."""
        return unseal(self._store, key, self._ask(lambda: self._store.get(key)))

    def append(self, key: str, line: str) -> None:
        """Add a line to those of ``key``."""
        sealed = f"{seal(self._store, key, line)}\n"
        self._ask(lambda: self._store.append(key, sealed))  # type: ignore[attr-defined]

    def lines(self, key: str) -> list[str]:
        """Return the lines of ``key``, which has some."""
        sealed: bytes = self._ask(lambda: self._store.get(key))
        return [unseal(self._store, key, line) for line in sealed.splitlines()]

    def has(self, key: str) -> bool:
        return self.have([key])

    def have(self, keys: Sequence[str]) -> bool:
        """Return whether there is a value under each of ``keys``."""
        return bool(self._ask(lambda: self._store.check(list(keys))))

    def add(self, key: str, amount: int) -> int:
        """Add to the number under ``key``, which is 0 if there is none, and return the sum."""
        return int(self._ask(lambda: self._store.add(key, amount)))

    def delete(self, keys: Sequence[str]) -> None:
        self._ask(lambda: [self._store.delete_key(key) for key in keys])

    def wait(self, keys: Sequence[str], seconds: float) -> bool:
        """Wait at most ``seconds`` for a value under each of ``keys``; return whether they are there.

        It polls: a request that waits in the store would block other requests of this process meanwhile.
        """
        return self.wait_until(lambda: self.have(keys), seconds)

    def wait_until(self, is_there: Callable[[], bool], seconds: float) -> bool:
        """Poll ``is_there``, which queries this store, for at most ``seconds``; return whether it became true."""
        began = time.monotonic()
        while not is_there():
            waited = time.monotonic() - began
            if waited >= seconds:
                return False
            time.sleep(min(max(_SHORTEST_PAUSE, waited / 10), _LONGEST_PAUSE, seconds - waited))
        return True

    def _ask(self, request: Callable[[], Answer]) -> Answer:
        answers: list[Answer] = []
        errors: list[BaseException] = []
        claim = threading.Lock()

        def run() -> None:
            if not claim.acquire(blocking=False):
                return  # the request was made without this thread, which has begun too late
            try:
                answers.append(request())
            except BaseException as error:  # noqa: BLE001 - raised again below, on the calling thread
                errors.append(error)

        if self._answer_within is None:
            run()
        else:
            thread = threading.Thread(target=run, name="ckpt-store", daemon=True)
            try:
                start(thread)
            except RuntimeError:
                run()  # no memory, or the interpreter is shutting down
            if not answers and not errors:
                thread.join(self._answer_within)
        if answers:
            return answers[0]
        if not errors:
            raise RankFailedError(
                f"rank 0, which keeps the record of a save, has not answered for {self._answer_within:g} s",
                remedy="find out whether the process of rank 0 is stopped or its machine is overloaded",
            )
        if isinstance(errors[0], RuntimeError):  # raised by torch.distributed
            raise RankFailedError(
                f"rank 0, which keeps the record of a save, is gone: {str(errors[0]).splitlines()[0]}",
                remedy="look at the log of rank 0: its process has ended or cannot be reached",
            ) from errors[0]
        raise errors[0]
