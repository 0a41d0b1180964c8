"""Ranks for tests: processes forked from one that has imported torch, connected only by a store.

For scripts (fixture ``fork_script``), not for tests themselves: pytest's process has threads and must not be forked.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from ckpt_core import CheckpointError, RankGroup
from ckpt_core._commit.tcp_store import TimedStore


class Ranks:
    """Forked processes, each of which calls ``work(rank, group)`` and sends back the result as JSON.

    An exception is sent back as ``{"raised": class, "message": text}``.

    Args:
        world_size: Number of processes.
        work: Called in each.
    """

    def __init__(self, world_size: int, work: Callable[[int, RankGroup], Any]) -> None:
        to_ranks = [os.pipe() for _ in range(world_size)]
        self._results = [os.pipe() for _ in range(world_size)]
        self.pids = []
        for rank in range(world_size):
            pid = os.fork()
            if pid == 0:
                self._run(rank, to_ranks, work)
            self.pids.append(pid)
        for descriptor in [end for pipe in to_ranks for end in pipe] + [writing for _, writing in self._results]:
            os.close(descriptor)

    def _run(self, rank: int, to_ranks: list[tuple[int, int]], work: Callable[[int, RankGroup], Any]) -> None:
        def broadcast(value: Any) -> Any:
            if rank != 0:
                line = b""
                while not line.endswith(b"\n"):
                    line += os.read(to_ranks[rank][0], 1)
                return json.loads(line)
            for _, writing in to_ranks[1:]:
                os.write(writing, json.dumps(value).encode() + b"\n")
            return value

        for other, (reading, _) in enumerate(self._results):
            os.close(reading)
            if other != rank:
                os.close(self._results[other][1])
        try:
            result = work(rank, RankGroup.connect(rank, len(to_ranks), broadcast))
        except CheckpointError as error:
            result = {"raised": type(error).__name__, "message": str(error)}
        except BaseException:  # noqa: BLE001 - must not continue as the parent would
            traceback.print_exc()
            result = {"raised": "?", "message": traceback.format_exc()}
        with open(self._results[rank][1], "w") as pipe:
            json.dump(result, pipe)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def wait_until_stopped(self, rank: int) -> None:
        """Wait until the rank has stopped itself with SIGSTOP."""
        _, status = os.waitpid(self.pids[rank], os.WUNTRACED)
        assert os.WIFSTOPPED(status), status

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to a rank."""
        os.kill(self.pids[rank], number)

    def result(self, rank: int) -> Any:
        """Return what the rank has sent back, waiting for it; None if it died before."""
        with open(self._results[rank][0]) as pipe:
            text = pipe.read()
        return json.loads(text) if text else None

    def results(self) -> list[Any]:
        """Return what all ranks have sent back."""
        return [self.result(rank) for rank in range(len(self.pids))]


def seconds_of(action: Callable[[], Any]) -> dict[str, Any]:
    """Call ``action``; return ``{"raised": class of its error or None, "message": text, "seconds": duration}``."""
    began = time.monotonic()
    result: dict[str, Any] = {"raised": None, "message": ""}
    try:
        action()
    except CheckpointError as error:
        result = {"raised": type(error).__name__, "message": str(error)}
    return {**result, "seconds": time.monotonic() - began}


def answer_patiently() -> None:
    """Wait up to 200 s for each of the store's answers, even if a save allows less: on a busy machine, they are late.

    Otherwise the save of this process would fail for that reason, and not for the one that the test is about.
    """
    init = TimedStore.__init__

    def patient(self: TimedStore, store: Any, *, answer_within: float | None) -> None:
        init(self, store, answer_within=None if answer_within is None else 200.0)

    TimedStore.__init__ = patient  # type: ignore[method-assign]
