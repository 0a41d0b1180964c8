"""``ckpt prune``, ``clean`` and ``du``: what may go, and what that frees."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ckpt_core.cli.finding import Found, find, walk
from ckpt_core.cli.output import count, print_json, print_table, short_size, styled
from ckpt_core.cli.parser import Commands, Exit, Options
from ckpt_core.errors import CheckpointError

if TYPE_CHECKING:
    from ckpt_core.catalog import CheckpointInfo
    from ckpt_core.policies import RetentionPolicy, SavedCheckpoint

__all__ = ["add_commands", "delete"]

_RULES = "latest=3, every_steps=1000, every_hours=6, at_steps=1000+5000"


def add_commands(commands: Commands) -> None:
    """Add the verbs of this file."""
    du = commands.add(
        "du",
        _du,
        help="show what checkpoints take on the disk; what several share by links counts once",
        epilog="Columns: size of its files, what deleting it alone would free, path.",
    )
    du.add_argument("paths", nargs="*", default=["."], metavar="PATH", help="a directory or checkpoints (.)")
    du.add_argument("-r", "--recursive", action="store_true", help="look in directories below it, too")

    prune = commands.add(
        "prune",
        _prune,
        help="delete the checkpoints that no rule keeps, and say why the others stay",
        epilog=f"Rules: {_RULES}; with several, what any of them keeps stays.\n"
        "The newest stays in any case, and so does what is damaged or does not say its step and time.",
    )
    prune.add_argument("directory")
    prune.add_argument("--keep", action="append", type=_rules, metavar="RULE=N", help=f"such as {_RULES}")
    prune.add_argument("-n", "--dry-run", action="store_true", help="delete nothing, only show what would be")
    prune.add_argument("-y", "--yes", action="store_true", help="do not ask; needed where no terminal is")

    clean = commands.add("clean", _clean, help="delete what killed processes left unfinished in a directory")
    clean.add_argument("directory")


# ---- du --------------------------------------------------------------------------------------------------------------


class _Disk:
    """Bytes on a local disk, of which links to the same file are one."""

    def __init__(self) -> None:
        self.sizes: dict[tuple[int, int], int] = {}
        self.links: dict[tuple[int, int], int] = {}
        self.seen: dict[tuple[int, int], int] = {}

    def add(self, path: str) -> None:
        """Count the files of a checkpoint."""
        if os.path.isdir(path):
            files = [os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names]
        else:
            files = [path]
        for file in files:
            status = os.lstat(file)
            key = status.st_dev, status.st_ino
            self.sizes[key], self.links[key] = status.st_size, status.st_nlink
            self.seen[key] = self.seen.get(key, 0) + 1

    @property
    def freed(self) -> int:
        """Bytes that are free when all that was counted is deleted."""
        return sum(size for key, size in self.sizes.items() if self.seen[key] >= self.links[key])


def _freed(infos: Iterable[CheckpointInfo]) -> int:
    from ckpt_core.storage import is_remote

    disk, remote = _Disk(), 0
    for info in infos:
        if is_remote(info.path):
            remote += info.size
        else:
            disk.add(info.path)
    return disk.freed + remote


def _du(options: Options) -> int:
    from ckpt_core.storage import is_remote

    places: list[Found] = []
    for path in options.paths:
        places.append(find(path, options.storage_options))
        if options.recursive and not places[-1].is_checkpoint:
            places += walk(path, options.storage_options)
    infos = [info for place in places for info in place.checkpoints]
    disk = _Disk()
    for info in infos:
        if not is_remote(info.path):
            disk.add(info.path)
    total = sum(disk.sizes.values()) + sum(info.size for info in infos if is_remote(info.path))
    sizes = [(info.path, info.size, _freed([info])) for info in infos]
    if options.json:
        print_json(
            {
                "bytes": total,
                "checkpoints": [{"path": path, "bytes": size, "freed": freed} for path, size, freed in sizes],
            }
        )
        return Exit.OK
    print_table([(short_size(size), short_size(freed), path) for path, size, freed in sizes], right=(0, 1))
    apparent = sum(size for _, size, _ in sizes)
    shared = f", {short_size(apparent - total)} shared by links" if apparent > total else ""
    print(f"{short_size(total)} in {count(len(sizes), 'checkpoint')}{shared}")
    return Exit.OK


# ---- prune -----------------------------------------------------------------------------------------------------------


def _rules(text: str) -> list[tuple[str, RetentionPolicy]]:
    from ckpt_core.policies import KeepAtSteps, KeepEverySteps, KeepEveryTime, KeepLatest

    makers: dict[str, Callable[[str], RetentionPolicy]] = {
        "latest": lambda value: KeepLatest(int(value)),
        "every_steps": lambda value: KeepEverySteps(int(value)),
        "every_hours": lambda value: KeepEveryTime(float(value)),
        "at_steps": lambda value: KeepAtSteps([int(step) for step in value.split("+")]),
    }
    found = []
    for word in text.split(","):
        name, _, value = (part.strip() for part in word.partition("="))
        if name not in makers:
            raise argparse.ArgumentTypeError(f"there is no rule {name!r}: {_RULES}")
        try:
            found.append((f"{name}={value}", makers[name](value)))
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{name}: {error}") from error
    return found


@dataclasses.dataclass(frozen=True)
class _Decision:
    info: CheckpointInfo
    reasons: list[str]


def _prune(options: Options) -> int:
    if not options.keep:
        print(
            "ckpt prune: say what to keep, such as --keep latest=3; what killed processes have left is deleted by "
            f"ckpt clean {options.directory}",
            file=sys.stderr,
        )
        return Exit.USAGE
    found = find(options.directory, options.storage_options)
    if found.is_checkpoint:
        raise CheckpointError("this is a checkpoint, and not a directory of them", path=options.directory)
    decisions = _decide(found.checkpoints, [rule for rules in options.keep for rule in rules])
    surplus = [decision.info for decision in decisions if not decision.reasons]
    freed = _freed(surplus)
    if not options.json:
        for line in _lines(decisions):
            print(line)
        would = "would delete" if options.dry_run else "to delete:"
        print(f"{would} {len(surplus)} of {count(len(decisions), 'checkpoint')}, which frees {short_size(freed)}")
    is_sure = not surplus or options.dry_run or options.yes or _agreed(options)
    if not is_sure:
        print("ckpt prune: nothing was deleted; --yes deletes, --dry-run only shows", file=sys.stderr)
        return Exit.USAGE
    if not options.dry_run:
        for info in surplus:
            delete(info, options.storage_options)
            if not options.json:
                print(f"deleted {info.path}")
    if options.json:
        kept = [{"path": d.info.path, "kept_because": d.reasons} for d in decisions]
        print_json({"deleted": not options.dry_run, "freed": freed, "checkpoints": kept})
    return Exit.OK


def _agreed(options: Options) -> bool:
    if options.json or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return False
    return input("delete them? [y/N] ").strip().lower() in ("y", "yes")


def _decide(infos: Sequence[CheckpointInfo], rules: Sequence[tuple[str, RetentionPolicy]]) -> list[_Decision]:
    """Return why each checkpoint stays, in the order given, the newest first; no reason where it may go.

    Copies, such as ``last.ckpt`` of the newest, are one checkpoint.
    """
    from ckpt_core.policies import SavedCheckpoint

    reasons: dict[str, list[str]] = {}
    copies: dict[tuple[float, int], list[CheckpointInfo]] = {}
    for info in infos:
        if not info.is_readable:
            reasons[info.path] = ["damaged: delete it yourself"]
        elif info.committed is None or info.step is None:
            reasons[info.path] = ["does not say its step and time"]
        else:
            copies.setdefault((info.committed, info.step), []).append(info)
    oldest_first = list(reversed(copies.items()))
    saved = [SavedCheckpoint(same[0].path, step, time) for (time, step), same in oldest_first]
    for candidate, (_, same) in zip(saved, oldest_first, strict=True):
        why = [name for name, policy in rules if _keeps(policy, saved, candidate)]
        if candidate is saved[-1]:
            why.insert(0, "newest")
        for info in same:
            reasons[info.path] = why
    return [_Decision(info, reasons[info.path]) for info in infos]


def _keeps(policy: RetentionPolicy, saved: Sequence[SavedCheckpoint], candidate: SavedCheckpoint) -> bool:
    return any(kept.path == candidate.path for kept in policy.kept(saved))


def _lines(decisions: Sequence[_Decision]) -> Iterable[str]:
    for decision in decisions:
        info = decision.info
        word = "keep  " if decision.reasons else styled("delete", "red")
        step = "" if info.step is None else f"step {info.step}"
        why = ", ".join(decision.reasons) or "no rule keeps it"
        yield f"{word}  {step:>12}  {short_size(info.size):>9}  {info.path}  ({why})"


def delete(info: CheckpointInfo, storage_options: dict[str, Any] | None) -> None:
    """Delete a checkpoint."""
    from ckpt_core._pipeline.directories import names_of_files
    from ckpt_core.storage import is_remote, storage_for

    storage = storage_for(info.path, storage_options)
    if info.is_directory:
        names = names_of_files(storage, info.path) if is_remote(info.path) else ()
        storage.remove_directory(info.path, names=names)
    else:
        storage.remove(info.path)


# ---- clean -----------------------------------------------------------------------------------------------------------


def _clean(options: Options) -> int:
    from ckpt_core.catalog import Catalog

    find(options.directory, options.storage_options)  # a directory that is not there is an error
    removed = Catalog(options.directory, storage_options=options.storage_options).prune()
    if options.json:
        print_json(removed)
        return Exit.OK
    for path in removed:
        print(f"deleted {path}")
    return Exit.OK
