"""A gate for Hogwild: workers update a shared model without locks, and wait between two steps while it is saved.

Each worker has a few numbers in a shared file: how many steps it has begun and how many it has finished. The saver
writes the number of the snapshot there; each worker that sees it, before its next step, writes its own state to a file
and waits. A step costs no system call. Kernel locks, which end with the process that holds them, show which workers are
alive.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import logging
import mmap
import os
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from ckpt_core.errors import CheckpointError

logger = logging.getLogger(__name__)

_POLL = 0.0005  # seconds between two checks
_MEMORY = "/dev/shm"  # if it exists, the gate needs no disk
_WORD = 8
_ASKED, _OPENED = 0, 1  # numbers of the newest snapshot requested, and of the newest that is over
_HEAD, _EACH = 2, 3
_BEGUN, _DONE, _STATUS = 0, 1, 2
_ABSENT, _RUNNING, _FINISHED = 0, 1, 2
_SAVER = 0  # the byte that the saver locks; the bytes after it are locked by the workers


class GateTimeoutError(CheckpointError):
    """Some workers did not end their step in time. Training continues, and the last checkpoint stays valid."""


class WorkerLostError(CheckpointError):
    """A worker is gone, and with it its own state, so that no checkpoint can be taken any more."""


class StepGate:
    """Lets all workers finish their current step, and holds the next one back until the snapshot is taken.

    Make it once, in the process that starts the workers, and pass it to them as an argument, by ``fork`` or ``spawn``.
    All processes must be on one machine, and each must use only one copy of the gate.

    Args:
        workers: Number of workers.

    Example:
        In a worker::

            with gate.worker(number, own.state_dict) as worker:
                for update in cursor.take():
                    with worker.step():
                        train(model, update)

        The saver, in any process that has the shared model::

            with gate.closed() as workers:
                parts = [Part("model", model.state_dict(), Kind.REPLICATED), Part("workers", workers, Kind.REPLICATED)]
                checkpointer.save(parts, path)
    """

    _opening = threading.Lock()  # on the class, because gates are pickled and locks cannot be

    def __init__(self, workers: int) -> None:
        if workers < 1:
            raise ValueError(f"workers={workers} must be at least 1")
        self.workers = workers
        self._directory = Path(tempfile.mkdtemp(prefix="ckpt-gate-", dir=_MEMORY if os.path.isdir(_MEMORY) else None))
        (self._directory / "gate").write_bytes(bytes(_WORD * (_HEAD + _EACH * workers)))
        self._shared: _Shared | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_shared": None}

    def _open(self) -> _Shared:
        with StepGate._opening:  # closing a second descriptor would drop all locks of this process on the file
            if self._shared is None or self._shared.process != os.getpid():
                self._shared = _Shared(self._directory / "gate")
            return self._shared

    def worker(self, number: int, capture: Callable[[], Mapping[str, Any]]) -> GatedWorker:
        """Return a worker's side of the gate, a context manager.

        Args:
            number: Number of the worker, from 0.
            capture: Returns this worker's own state, as plain data and tensors; see
                :class:`~ckpt_async.local_updates.WorkerState`. It is called between two steps, so code that draws
                random numbers for an update must be inside its step.
        """
        if not 0 <= number < self.workers:
            raise ValueError(f"there is no worker {number} of {self.workers}")
        return GatedWorker(self._open(), self._directory, number, capture)

    @contextlib.contextmanager
    def closed(self, timeout: float = 60.0) -> Iterator[list[dict[str, Any]]]:
        """Hold all workers between two steps, for as long as it takes to copy the shared model.

        Args:
            timeout: Seconds to wait for all of them.

        Returns:
            The captured state of each worker, in the order of their numbers.

        Raises:
            WorkerLostError: A worker was killed. The others continue, but restart all of them from the newest
                checkpoint.
            GateTimeoutError: Workers did not come, because they are in a step, frozen, or not started. All continue.
        """
        shared, deadline = self._open(), time.monotonic() + timeout
        if shared.is_of_this_thread():
            raise CheckpointError(
                "this thread cannot close the gate: it is a worker's, or has closed it, and would wait for itself",
                remedy="call closed() on another thread or in another process than the workers'",
            )
        while not shared.lock(_SAVER):
            if time.monotonic() > deadline:
                raise GateTimeoutError(f"another snapshot has kept the gate closed for {timeout} s")
            time.sleep(_POLL)
        snapshot = shared[_ASKED] + 1
        shared[_ASKED] = snapshot
        try:
            yield [self._await(shared, number, snapshot, deadline) for number in range(self.workers)]
        finally:
            shared[_OPENED] = snapshot
            for file in self._directory.glob("*.[0-9]*"):
                file.unlink()
            shared.unlock(_SAVER)  # last, so that the deletion above does not hit the answers of the next snapshot

    def _await(self, shared: _Shared, number: int, snapshot: int, deadline: float) -> dict[str, Any]:
        answers = (self._directory / f"{number}.{snapshot}", self._directory / f"{number}.end")
        place = _HEAD + _EACH * number
        while True:
            is_gone = shared[place + _STATUS] == _RUNNING and not shared.is_locked(1 + number)
            is_late = time.monotonic() > deadline
            for answer in answers:
                if answer.exists():
                    found: dict[str, Any] = torch.load(io.BytesIO(answer.read_bytes()), weights_only=True)
                    return found
            is_torn = shared[place + _BEGUN] != shared[place + _DONE]
            if is_gone:
                where = f"in the middle of its step {shared[place + _BEGUN]}" if is_torn else "between two steps"
                raise WorkerLostError(
                    f"worker {number} ended {where}, and with it its place in the data and its random state"
                    + (": the shared model may hold a part of that step" if is_torn else ""),
                    remedy="start all workers again from the newest checkpoint",
                )
            if is_late:
                where = f"is in its step {shared[place + _BEGUN]}" if is_torn else "is not at a step"
                raise GateTimeoutError(
                    f"worker {number} has not come to the gate: it {where}", remedy="give closed() a longer timeout="
                )
            time.sleep(_POLL)

    def close(self) -> None:
        """Delete the gate's files; call it when no worker needs the gate any more."""
        shutil.rmtree(self._directory)

    def __enter__(self) -> StepGate:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _renew_lock() -> None:
    StepGate._opening = threading.Lock()  # the old lock may be held by a thread that does not exist in the child


os.register_at_fork(after_in_child=_renew_lock)


class GatedWorker:
    """A worker's side of a :class:`StepGate`."""

    def __init__(self, shared: _Shared, directory: Path, number: int, capture: Callable[[], Mapping[str, Any]]) -> None:
        self._shared = shared
        self._directory = directory
        self._number = number
        self._capture = capture
        self._place = _HEAD + _EACH * number
        self._answered = self._abandoned = 0

    def __enter__(self) -> GatedWorker:
        if not self._shared.lock(1 + self._number) or self._shared[self._place + _STATUS] != _ABSENT:
            raise CheckpointError(
                f"there is or was another worker {self._number} at this gate",
                remedy="make a new gate for each start of the workers",
            )
        self._shared[self._place + _STATUS] = _RUNNING
        return self

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Enclose one step, all code that changes the shared model; wait at its start while the model is saved.

        Raises:
            CheckpointError: The previous step ended with an exception, so the shared model may hold a part of it.
        """
        shared, place = self._shared, self._place
        if shared[_ASKED] != shared[_OPENED] and shared[_ASKED] != self._abandoned:
            self._wait()
        if shared[place + _BEGUN] != shared[place + _DONE]:
            raise CheckpointError(
                f"worker {self._number} has not finished its step {shared[place + _BEGUN]}",
                remedy="start all workers again from the newest checkpoint",
            )
        shared[place + _BEGUN] += 1
        yield
        shared[place + _DONE] += 1

    def _wait(self) -> None:
        shared = self._shared
        while (snapshot := shared[_ASKED]) != shared[_OPENED]:
            if snapshot != self._answered:
                self._answer(str(snapshot))
                self._answered = snapshot
            if not shared.is_locked(_SAVER) and shared[_ASKED] == snapshot != shared[_OPENED]:
                logger.warning("the process that was saving is gone: worker %d continues", self._number)
                self._abandoned = snapshot
                return
            time.sleep(_POLL)

    def _answer(self, name: str) -> None:
        temporary = self._directory / f"{self._number}.part"
        torch.save(dict(self._capture()), temporary)
        temporary.replace(self._directory / f"{self._number}.{name}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        place = self._place
        if kind is None and self._shared[place + _BEGUN] == self._shared[place + _DONE]:
            self._answer("end")
            self._shared[place + _STATUS] = _FINISHED
        self._shared.unlock(1 + self._number)


class _Shared:
    """The numbers in the shared file, and the locks of its bytes, which children do not inherit from a process.

    The kernel's locks exclude other processes only; which thread of this process has a lock is recorded here.
    """

    def __init__(self, path: Path) -> None:
        self.process = os.getpid()
        self._mine: dict[int, int] = {}
        self._noting = threading.Lock()
        self._file = os.open(path, os.O_RDWR)
        # Not closed at exit, so that a process keeps its locks until it has ended.
        weakref.finalize(self, os.close, self._file).atexit = False
        self._words = memoryview(mmap.mmap(self._file, 0)).cast("q")

    def __getitem__(self, index: int) -> int:
        return self._words[index]

    def __setitem__(self, index: int, value: int) -> None:
        self._words[index] = value

    def lock(self, byte: int) -> bool:
        with self._noting:
            is_free = byte not in self._mine and self._try_lock(byte, fcntl.LOCK_EX)
            if is_free:
                self._mine[byte] = threading.get_ident()
            return is_free

    def unlock(self, byte: int) -> None:
        with self._noting:
            self._mine.pop(byte, None)
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, byte)

    def is_locked(self, byte: int) -> bool:
        """Return whether any process has locked a byte."""
        with self._noting:
            if byte in self._mine or not self._try_lock(byte, fcntl.LOCK_SH):
                return True
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, byte)
            return False

    def is_of_this_thread(self) -> bool:
        """Return whether this thread has locked any byte."""
        with self._noting:
            return threading.get_ident() in self._mine.values()

    def _try_lock(self, byte: int, kind: int) -> bool:
        try:
            fcntl.lockf(self._file, kind | fcntl.LOCK_NB, 1, byte)
        except (BlockingIOError, PermissionError):  # POSIX allows EAGAIN or EACCES
            return False
        return True
