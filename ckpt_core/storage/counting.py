"""Count the bytes that storages read and write, for progress lines."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import TypeAlias

from ckpt_core.storage.base import CountingReader, FileReader, FileWriter, Storage

Count: TypeAlias = Callable[[int], None]

_count: contextvars.ContextVar[Count | None] = contextvars.ContextVar("count", default=None)


@contextlib.contextmanager
def counting(count: Count) -> Iterator[None]:
    """Call ``count`` with the bytes moved by each storage that the body makes by ``storage_for``, on any thread."""
    token = _count.set(count)
    try:
        yield
    finally:
        _count.reset(token)


def counted(storage: Storage) -> Storage:
    """Return the storage, made to count its bytes if the caller is in the body of :func:`counting`."""
    count = _count.get()
    if count is None:
        return storage
    opens, opens_inside, creates = storage.open, storage.open_inside, storage.create

    def reader(file: FileReader) -> FileReader:
        return file if isinstance(file, CountingReader) else CountingReader(file, count)

    # Replace methods instead of wrapping the storage, so that it keeps its class and all other methods.
    vars(storage).update(
        open=lambda path: reader(opens(path)),
        open_inside=lambda directory, name: reader(opens_inside(directory, name)),
        create=lambda path, expected_size: _CountingWriter(creates(path, expected_size), count),
    )
    return storage


class _CountingWriter(FileWriter):
    def __init__(self, writer: FileWriter, count: Count) -> None:
        self.parallel = writer.parallel
        self.threads = writer.threads
        self._writer = writer
        self._count = count

    def write_at(self, offset: int, data: memoryview) -> None:
        self._writer.write_at(offset, data)
        self._count(len(data))

    def commit(self, size: int) -> None:
        self._writer.commit(size)

    def abort(self) -> None:
        self._writer.abort()
