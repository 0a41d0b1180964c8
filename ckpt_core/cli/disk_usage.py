"""``ckpt du``: show how much disk space checkpoints use, and how much deleting them would free."""

from __future__ import annotations

import os
from collections.abc import Iterable

from ckpt_core.cli.finding import find_all, size_at
from ckpt_core.cli.listing import print_hints
from ckpt_core.cli.output import count, print_error, print_json, print_table
from ckpt_core.cli.parser import Commands, Exit, Options
from ckpt_core.errors import CheckpointError
from ckpt_core.events import size_in_words
from ckpt_core.paths import full_path, is_remote, local_path
from ckpt_core.storage.local import files_of


def add_commands(commands: Commands) -> None:
    """Add the verbs of this file."""
    du = commands.add(
        "du",
        _du,
        help="show what checkpoints take on the disk; what several share by links counts once",
        epilog="Columns: size of its files, what deleting it alone would free, path.\n"
        "Other programs' checkpoints are counted if named themselves or, with -R, if in a directory below.",
        example="-R runs",
        codes="0 success, 1 a path, or a directory below it, is not there or cannot be read, 2 usage.",
    )
    du.add_argument("paths", nargs="*", default=["."], metavar="PATH", help="a directory or checkpoints (.)")
    du.add_argument("-r", "-R", "--recursive", action="store_true", help="look in directories below it, too")


class _Disk:
    """Counts the bytes of checkpoints on local disks; hard links to the same file count once."""

    def __init__(self) -> None:
        self.sizes: dict[tuple[int, int], int] = {}
        self.links: dict[tuple[int, int], int] = {}
        self.seen: dict[tuple[int, int], int] = {}

    def add(self, path: str) -> None:
        """Count the files of a checkpoint."""
        for file in files_of(path):
            try:
                status = os.lstat(file)
            except FileNotFoundError:
                continue  # deleted meanwhile by the run's retention
            key = status.st_dev, status.st_ino
            self.sizes[key], self.links[key] = status.st_size, status.st_nlink
            self.seen[key] = self.seen.get(key, 0) + 1

    @property
    def freed(self) -> int:
        """Bytes that deleting all counted files would free: of files that have no other hard links."""
        return sum(size for key, size in self.sizes.items() if self.seen[key] >= self.links[key])


def freed_by(found: Iterable[tuple[str, int]]) -> int:
    """Return the bytes that deleting all of these checkpoints together would free; ``found`` has paths and sizes."""
    disk, remote = _Disk(), 0
    for path, size in found:
        if is_remote(path):
            remote += size
        else:
            disk.add(local_path(path))
    return disk.freed + remote


def _du(options: Options) -> int:
    failures: dict[str, CheckpointError] = {}
    places = find_all(options.paths, options.storage_options, recursive=options.recursive, failures=failures)
    found = [(info.path, info.size) for place in places for info in place.checkpoints]
    for place in places:
        is_part = any(place.path.startswith(f"{path}/") for path, _ in found)
        if not is_part and place.foreign(options.storage_options) is not None:
            found.append((place.path.rstrip("/"), size_at(place.path, options.storage_options)))
    found = list({full_path(path): (path, size) for path, size in reversed(found)}.values())[::-1]  # each once
    disk = _Disk()
    for path, _ in found:
        if not is_remote(path):
            disk.add(local_path(path))
    total = sum(disk.sizes.values()) + sum(size for path, size in found if is_remote(path))
    sizes = [(path, size, freed_by([(path, size)])) for path, size in found]
    if options.json:
        print_json(
            {
                "bytes": total,
                "checkpoints": [{"path": path, "bytes": size, "freed": freed} for path, size, freed in sizes],
            }
        )
    else:
        print_table([(size_in_words(size), size_in_words(freed), path) for path, size, freed in sizes], right=(0, 1))
        apparent = sum(size for _, size, _ in sizes)
        shared = f", {size_in_words(apparent - total)} shared by links" if apparent > total else ""
        print(f"{size_in_words(total)} in {count(len(sizes), 'checkpoint')}{shared}")
        if not sizes:
            print_hints(places, options, failures)
    for error in failures.values():
        print_error(error)
    return Exit.FAILED if failures else Exit.OK
