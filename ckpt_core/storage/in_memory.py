"""Storage on an in-memory filesystem (tmpfs): refuses files that do not fit, and reuses the pages of old files.

Taking new pages from the kernel costs several times as much as copying into pages that are there. So the files of
a discarded checkpoint are not deleted but set aside as spares, and become the files of the next one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import uuid

from ckpt_core.errors import StorageError
from ckpt_core.events import size_in_words
from ckpt_core.storage.base import MANIFEST_NAME, FileWriter
from ckpt_core.storage.local import LocalFileWriter, LocalStorage, files_of

_SPARE = "spare-"
_TAKEN = "taken-"
_SMALLEST_SPARE = 2**20  # bytes; smaller files are not worth the trouble
_KEPT_FREE = 0.05  # of the machine's memory
_CGROUPS = (  # files with the limit and the use, and the field of memory.stat with what the kernel can reclaim
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "inactive_file"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "total_inactive_file",
    ),
)


class MemoryStorage(LocalStorage):
    """Files below one directory of a tmpfs, which also holds the spare files."""

    def __init__(self, directory: str) -> None:
        super().__init__()
        self._directory = directory

    def __reduce__(self) -> tuple[type[MemoryStorage], tuple[str]]:
        """Pickle and copy only the directory: a copy is not writing any checkpoint."""
        return MemoryStorage, (self._directory,)

    def create(self, path: str, expected_size: int) -> FileWriter:
        """Begin a file, if it fits into the filesystem and the memory that the machine or container has left."""
        spare, pages = self._take_spare(expected_size)
        try:
            _refuse_if_full(self._directory, expected_size - pages)
        except StorageError:
            if spare is not None:
                with contextlib.suppress(OSError):
                    os.unlink(spare)
            raise
        return _MemoryFileWriter(path, expected_size, spare)

    def set_aside(self, path: str) -> None:
        """Delete a checkpoint, but keep the pages of its large files for the next one."""
        with contextlib.suppress(OSError):
            os.unlink(f"{path}/{MANIFEST_NAME}")  # first, so that a crash leaves nothing that looks whole
        for file in files_of(path):
            with contextlib.suppress(OSError):
                status = os.lstat(file)
                # A file with another hard link is part of another checkpoint.
                if stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and status.st_size >= _SMALLEST_SPARE:
                    name = f"{_SPARE}{status.st_size}-{uuid.uuid4().hex[:12]}"
                    os.rename(file, f"{self._directory}/{name}")
        self.remove(path)

    def drop_spares(self) -> None:
        """Delete the spare files, which frees their pages; called while nothing is being saved."""
        for name in [*self._names(_SPARE), *self._names(_TAKEN)]:
            with contextlib.suppress(OSError):
                os.unlink(f"{self._directory}/{name}")

    def _names(self, prefix: str) -> list[str]:
        with contextlib.suppress(OSError):
            return [name for name in os.listdir(self._directory) if name.startswith(prefix)]
        return []

    def _take_spare(self, size: int) -> tuple[str | None, int]:
        """Take a spare file of about that size; return its new path, which no other rank uses, and its usable bytes."""
        spares = [(int(name.split("-")[1]), name) for name in self._names(_SPARE)] if size >= _SMALLEST_SPARE else []
        for pages, name in sorted(spares, key=lambda spare: abs(spare[0] - size)):
            taken = f"{self._directory}/{_TAKEN}{uuid.uuid4().hex[:12]}"
            with contextlib.suppress(OSError):
                os.rename(f"{self._directory}/{name}", taken)
                return taken, min(pages, size)
        return None, 0


class _MemoryFileWriter(LocalFileWriter):
    def __init__(self, path: str, expected_size: int, spare: str | None) -> None:
        self._spare = spare
        super().__init__(path, expected_size)

    def _open(self) -> None:
        spare, self._spare = self._spare, None
        if spare is not None:
            with contextlib.suppress(FileNotFoundError):  # another rank, whose snapshot is over, dropped the spares
                os.rename(spare, self._part)
                self._descriptor = os.open(self._part, os.O_WRONLY | os.O_CLOEXEC)
                return
        super()._open()


def _refuse_if_full(directory: str, size: int) -> None:
    filesystem = os.statvfs(directory)
    free, total = filesystem.f_bavail * filesystem.f_frsize, filesystem.f_blocks * filesystem.f_frsize
    if free < size:
        raise StorageError(
            f"a snapshot does not fit into memory: it needs {size_in_words(size)}, and this filesystem has "
            f"{size_in_words(free)} of {size_in_words(total)} left",
            path=directory,
            remedy="make it larger (docker run --shm-size=64g; Kubernetes: an emptyDir of medium Memory at /dev/shm; "
            "else mount -o remount,size=64g /dev/shm): two snapshots must fit",
            errno=errno.ENOSPC,
        )
    available, memory = available_memory()
    if available - size < _KEPT_FREE * memory:
        raise StorageError(
            f"a snapshot does not fit into memory: it needs {size_in_words(size)}, and {size_in_words(available)} of "
            f"{size_in_words(memory)} are available; {_KEPT_FREE:.0%} of the memory must stay free",
            path=directory,
            remedy="give the job or container more memory: two snapshots must fit besides the training",
            errno=errno.ENOSPC,
        )


def available_memory() -> tuple[int, int]:
    """Return the available and the total memory in bytes, limited by the machine and by its cgroup."""
    known = _numbers("/proc/meminfo")
    if "MemAvailable" not in known:
        return 2**62, 0  # a system without this information: no limit
    available, total = known["MemAvailable"] * 1024, known["MemTotal"] * 1024
    for limit, used, reclaimable in _CGROUPS:
        with contextlib.suppress(OSError, ValueError):
            with open(limit, encoding="ascii") as file:
                most = int(file.read())  # not a number: there is no limit
            with open(used, encoding="ascii") as file:
                taken = int(file.read()) - _numbers(f"{os.path.dirname(limit)}/memory.stat").get(reclaimable, 0)
            available, total = min(available, max(most - taken, 0)), min(total, most)
    return available, total


def _numbers(path: str) -> dict[str, int]:
    with contextlib.suppress(OSError), open(path, encoding="ascii") as file:
        pairs = [line.replace(":", "").split()[:2] for line in file]
        return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
    return {}
