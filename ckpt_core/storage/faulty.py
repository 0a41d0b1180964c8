"""Fault injection: a storage that fails or hangs at chosen operations, for tests of code that depends on a storage."""

from __future__ import annotations

import collections
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ckpt_core.errors import CheckpointError
from ckpt_core.option_checks import check_options, instance_of
from ckpt_core.storage.base import FileReader, FileWriter, Storage
from ckpt_core.storage.failures import storage_error

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class Operation:
    """One call of a method of a storage, a file writer or a file reader.

    Attributes:
        name: The method: ``"create"``, ``"write_at"``, ``"commit"``, ``"abort"``, ``"open"``, ``"read_into"``,
            ``"exists"``, ``"remove"``, ``"copy"``, ``"list"``, ``"remove_orphans"``, ``"put_file"``,
            ``"begin_directory"``, ``"publish_directory"``, ``"discard_directory"``, ``"leave_directory"``,
            ``"remove_directory"``, ``"subdirectories"`` or ``"list_directories"``.
        path: The file or directory; for a copy, its target.
        size: Bytes to write or read; 0 for the others.
    """

    name: str
    path: str
    size: int = 0


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault to inject: which operations it affects, and what happens then.

    Args:
        at: Name of the operation (:class:`Operation`), or a function that returns whether an operation matches.
        number: Which of the matching operations, from 1; None for all of them.
        error: Raised instead of carrying the operation out. An ``OSError`` (``OSError(errno.ENOSPC, "...")``,
            ``ConnectionResetError()``, ``TimeoutError()``) is raised as the :class:`~ckpt_core.StorageError` that the
            local storage turns it into; any other exception is raised as it is.
        delay: Seconds to wait before the operation.
        until: Wait before the operation until this event is set: a storage that hangs.
        written: For ``write_at`` with an ``error``: this many of the bytes reach the inner storage (a torn write).
        reply_lost: Carry the operation out and raise ``error`` after it, like a store whose answer is lost on the way.
            Not for ``create`` and ``open``.
    """

    at: str | Callable[[Operation], bool]
    number: int | None = 1
    error: BaseException | None = None
    delay: float = 0.0
    until: threading.Event | None = None
    written: int = 0
    reply_lost: bool = False

    def is_meant_for(self, operation: Operation) -> bool:
        """Whether :attr:`at` matches this operation, regardless of :attr:`number`."""
        return operation.name == self.at if isinstance(self.at, str) else self.at(operation)


def _performed(name: str, place: int = 0) -> Any:
    """Return a method that passes the call on to the inner storage; its argument at index ``place`` is the path."""

    def method(self: FaultyStorage, *arguments: Any, **options: Any) -> Any:
        action = functools.partial(getattr(self._inner, name), *arguments, **options)
        return self.perform(Operation(name, arguments[place]), action)

    return method


def _check_faults(value: Any) -> Sequence[Fault]:
    if not isinstance(value, Sequence) or not all(isinstance(fault, Fault) for fault in value):
        raise ValueError(f"must be a list of ckpt_core.storage.Fault, not {value!r:.80}")
    return value


class FaultyStorage(Storage):
    """Another storage, with faults injected at chosen operations, and a record of all operations.

    Args:
        inner: The storage that does the work.
        faults: The faults. If several affect one operation, it waits for all of them and raises the first error.

    Attributes:
        operations: All operations so far, in the order in which they began.

    Examples:
        >>> import errno, os, tempfile, torch
        >>> from ckpt_core import Checkpointer, StorageError
        >>> from ckpt_core.storage import Fault, FaultyStorage, LocalStorage
        >>> full = OSError(errno.ENOSPC, "No space left on device")
        >>> disk_is_full = Fault("write_at", number=2, error=full, written=4096)
        >>> storage = FaultyStorage(LocalStorage(), [disk_is_full])
        >>> directory = tempfile.mkdtemp()
        >>> checkpointer = Checkpointer(strategy="sync", storage=storage)
        >>> try:
        ...     checkpointer.save({"weight": torch.ones(2)}, os.path.join(directory, "step=1.ckpt"))
        ... except StorageError as error:
        ...     print(error.message, error.errno == errno.ENOSPC, os.listdir(directory))
        cannot write the checkpoint: No space left on device True []
        >>> [operation.name for operation in storage.operations]
        ['remove_orphans', 'list', 'list_directories', 'create', 'write_at', 'write_at', 'abort']
    """

    def __init__(self, inner: Storage, faults: Sequence[Fault] = ()) -> None:
        check_options({"inner": instance_of(Storage, "ckpt_core.storage.Storage"), "faults": _check_faults}, locals())
        self.operations: list[Operation] = []
        self._inner = inner
        self._faults = tuple(faults)
        self._met: collections.Counter[int] = collections.Counter()
        self._lock = threading.RLock()  # a signal handler that saves may interrupt a save

    def perform(
        self, operation: Operation, action: Callable[[], Result], tear: Callable[[int], object] | None = None
    ) -> Result:
        """Record ``operation`` and carry it out by ``action``, unless a fault affects it.

        Args:
            operation: The operation.
            action: Carries it out on the inner storage.
            tear: Writes only the given number of bytes to the inner storage.
        """
        faults = self._meet(operation)
        for fault in faults:
            time.sleep(fault.delay)
            if fault.until is not None:
                fault.until.wait()
        failing = next((fault for fault in faults if fault.error is not None), None)
        if failing is None:
            return action()
        if failing.reply_lost:
            action()
        elif failing.written and tear is not None:
            tear(failing.written)
        error = failing.error
        if isinstance(error, OSError) and not isinstance(error, CheckpointError):
            raise storage_error(operation.name.partition("_")[0], operation.path, error) from error
        assert error is not None
        raise error

    def _meet(self, operation: Operation) -> list[Fault]:
        met = []
        with self._lock:  # files are written from several threads
            self.operations.append(operation)
            for index, fault in enumerate(self._faults):
                if fault.is_meant_for(operation):
                    self._met[index] += 1
                    if fault.number in (None, self._met[index]):
                        met.append(fault)
        return met

    def create(self, path: str, expected_size: int) -> FileWriter:
        return self.perform(
            Operation("create", path), lambda: _FaultyWriter(self, path, self._inner.create(path, expected_size))
        )

    def open(self, path: str) -> FileReader:
        return self.perform(Operation("open", path), lambda: _FaultyReader(self, self._inner.open(path)))

    exists = _performed("exists")
    remove = _performed("remove")
    copy = _performed("copy", 1)
    list = _performed("list")
    remove_orphans = _performed("remove_orphans")
    put_file = _performed("put_file", 1)
    begin_directory = _performed("begin_directory")
    discard_directory = _performed("discard_directory")
    leave_directory = _performed("leave_directory")
    remove_directory = _performed("remove_directory")
    subdirectories = _performed("subdirectories")
    list_directories = _performed("list_directories")

    def orphans(self, directory: str) -> Sequence[str]:
        return self._inner.orphans(directory)

    def publish_directory(self, path: str, token: str, manifest: bytes, *, gone: Sequence[str] = ()) -> None:
        self.perform(
            Operation("publish_directory", path, len(manifest)),
            lambda: self._inner.publish_directory(path, token, manifest, gone=gone),
        )


class _FaultyWriter(FileWriter):
    def __init__(self, storage: FaultyStorage, path: str, inner: FileWriter) -> None:
        self.parallel = inner.parallel
        self.threads = inner.threads
        self._storage = storage
        self._path = path
        self._inner = inner

    def write_at(self, offset: int, data: memoryview) -> None:
        self._storage.perform(
            Operation("write_at", self._path, len(data)),
            lambda: self._inner.write_at(offset, data),
            lambda count: self._inner.write_at(offset, data[:count]),
        )

    def commit(self, size: int) -> None:
        self._storage.perform(Operation("commit", self._path), lambda: self._inner.commit(size))

    def abort(self) -> None:
        self._storage.perform(Operation("abort", self._path), self._inner.abort)


class _FaultyReader(FileReader):
    def __init__(self, storage: FaultyStorage, inner: FileReader) -> None:
        self.path = inner.path
        self.size = inner.size
        self.request_bytes = inner.request_bytes
        self._storage = storage
        self._inner = inner

    @property
    def threads(self) -> int:
        return self._inner.threads

    def read_into(self, offset: int, target: memoryview) -> None:
        self._storage.perform(
            Operation("read_into", self.path, len(target)), lambda: self._inner.read_into(offset, target)
        )

    def close(self) -> None:
        self._inner.close()
