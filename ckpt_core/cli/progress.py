"""Progress on the terminal, for what reads or writes many bytes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence

from ckpt_core.cli.parser import Options
from ckpt_core.storage import FileInfo, FileReader, FileWriter, Storage
from ckpt_core.storage.base import CountingReader

__all__ = ["Watched", "progress"]


@contextlib.contextmanager
def progress(options: Options, what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar with speed and time left while the body runs, where a person sees it and rich is installed.

    Args:
        options: Of the command: ``--quiet`` shows none.
        what: What is under way.
        total: Bytes in all.

    Yields:
        To be called with the number of bytes that were moved, from any thread.
    """
    try:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.progress import TransferSpeedColumn as Speed
    except ModuleNotFoundError:
        is_shown = False
    else:
        is_shown = sys.stderr.isatty() and not options.quiet
    if not is_shown:
        yield lambda _: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), Speed(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda nbytes: bar.advance(task, nbytes)


class Watched(Storage):
    """Another storage, to read from, which says how many bytes were read.

    Args:
        inner: The storage.
        count: Called with the bytes of each read, from any thread.
    """

    def __init__(self, inner: Storage, count: Callable[[int], None]) -> None:
        self._inner = inner
        self._count = count

    def open(self, path: str) -> FileReader:
        return CountingReader(self._inner.open(path), self._count)

    def open_inside(self, directory: str, name: str) -> FileReader:
        return CountingReader(self._inner.open_inside(directory, name), self._count)

    def exists(self, path: str) -> bool:
        return self._inner.exists(path)

    def list(self, directory: str) -> Sequence[FileInfo]:
        return self._inner.list(directory)

    def create(self, path: str, expected_size: int) -> FileWriter:
        return self._inner.create(path, expected_size)

    def remove(self, path: str) -> None:
        self._inner.remove(path)

    def copy(self, source: str, target: str) -> int:
        return self._inner.copy(source, target)

    def remove_orphans(self, directory: str) -> Sequence[str]:
        return self._inner.remove_orphans(directory)
