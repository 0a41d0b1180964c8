"""The store through which the ranks talk: opened for checkpointing alone, and asked with a time limit."""

from __future__ import annotations

import datetime
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from ckpt_core.errors import RankFailedError

__all__ = ["StoreLine", "connect_store"]

Answer = TypeVar("Answer")

_SHORTEST_PAUSE = 0.001  # seconds
_LONGEST_PAUSE = 0.5


def connect_store(
    rank: int, world_size: int, broadcast: Callable[[Any], Any], *, timeout_seconds: float = 300.0
) -> Store:
    """Open a ``TCPStore`` that only checkpointing uses; call it on all ranks together.

    Args:
        rank: This process's rank; rank 0 serves.
        world_size: Number of ranks.
        broadcast: Sends an object from rank 0 to all ranks and returns it.
        timeout_seconds: How long an operation may take before it fails.
    """
    timeout = datetime.timedelta(seconds=timeout_seconds)
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    server = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout) if rank == 0 else None
    port = broadcast(server.port if server is not None else None)
    if server is not None:
        return server
    return TCPStore(host, port, world_size=world_size, is_master=False, timeout=timeout)


class StoreLine:
    """A store that rank 0 serves, asked with a time limit.

    torch's client waits for ever for the answer of a server whose process is stopped, so each request has a thread of its
    own, which is left behind if there is no answer.

    Args:
        store: The store.
        answer_within: Seconds after which rank 0 counts as lost.
    """

    def __init__(self, store: Store, *, answer_within: float) -> None:
        self._store = store
        self._answer_within = answer_within

    def set(self, key: str, value: str) -> None:
        """Store ``value`` under ``key``."""
        self._ask(lambda: self._store.set(key, value))

    def get(self, key: str) -> str:
        """Return the value of ``key``, which exists."""
        value: bytes = self._ask(lambda: self._store.get(key))
        return value.decode()

    def has(self, key: str) -> bool:
        """Return whether there is a value under ``key``."""
        return bool(self._ask(lambda: self._store.check([key])))

    def add(self, key: str, amount: int) -> int:
        """Add to the number under ``key``, which is 0 if there is none, and return the sum."""
        return int(self._ask(lambda: self._store.add(key, amount)))

    def delete(self, keys: Sequence[str]) -> None:
        """Forget ``keys``."""
        self._ask(lambda: [self._store.delete_key(key) for key in keys])

    def wait(self, keys: Sequence[str], seconds: float) -> bool:
        """Return whether there is a value under each of ``keys``, waiting for them for so many seconds.

        It asks again and again: a request that waits would keep others of this process from the store meanwhile.
        """
        return self._wait(lambda: bool(self._store.check(list(keys))), seconds)

    def wait_for_any(self, keys: Sequence[str], seconds: float) -> bool:
        """Return whether there is a value under one of ``keys``, waiting for it for so many seconds."""
        return self._wait(lambda: any(self._store.check([key]) for key in keys), seconds)

    def _wait(self, is_there: Callable[[], bool], seconds: float) -> bool:
        began = time.monotonic()
        while not self._ask(is_there):
            waited = time.monotonic() - began
            if waited >= seconds:
                return False
            time.sleep(min(max(_SHORTEST_PAUSE, waited / 10), _LONGEST_PAUSE, seconds - waited))
        return True

    def _ask(self, request: Callable[[], Answer]) -> Answer:
        answers: list[Answer] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                answers.append(request())
            except BaseException as error:  # noqa: BLE001 - raised again below, on the calling thread
                errors.append(error)

        thread = threading.Thread(target=run, name="ckpt-store", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            run()  # the interpreter is shutting down: no new threads
        else:
            thread.join(self._answer_within)
        if answers:
            return answers[0]
        if not errors:
            raise RankFailedError(
                f"rank 0, which keeps the record of a save, has not answered for {self._answer_within:g} s",
                remedy="find out whether the process of rank 0 is stopped or its machine is overloaded",
            )
        if isinstance(errors[0], RuntimeError):  # what torch.distributed raises
            raise RankFailedError(
                f"rank 0, which keeps the record of a save, is gone: {str(errors[0]).splitlines()[0]}",
                remedy="look at the log of rank 0: its process has ended or cannot be reached",
            ) from errors[0]
        raise errors[0]
