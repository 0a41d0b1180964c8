"""``ckpt prune``, ``clean``, ``keep`` and ``drop``: delete old checkpoints and leftovers, pin and unpin checkpoints."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckpt_core.cli.disk_usage import freed_by
from ckpt_core.cli.finding import find, refuse_checkpoint, state_of
from ckpt_core.cli.metrics_and_pins import Told, listen, pinned
from ckpt_core.cli.output import count, fail, print_error, print_json, print_table, printable
from ckpt_core.cli.parser import Commands, Exit, Options
from ckpt_core.cli.progress import progress
from ckpt_core.errors import CheckpointCorruptedError, CheckpointError, CheckpointNotFoundError
from ckpt_core.events import size_in_words
from ckpt_core.paths import is_remote, local_path
from ckpt_core.pins import is_pinned, pin, unpin
from ckpt_core.policies import KeepBest, RetentionPolicy, SavedCheckpoint, rules_of_words
from ckpt_core.storage import storage_for
from ckpt_core.storage.local import unfinished

if TYPE_CHECKING:
    from ckpt_core.catalog import CheckpointInfo

_NEWEST = "newest"
_CHANGED = "pinned or saved anew meanwhile"
_RULES = "latest=3, best=val_loss, best=acc:max:2, every_steps=1000, every_hours=6, at_steps=1000+5000"


def add_commands(commands: Commands) -> None:
    """Add the verbs of this file."""
    prune = commands.add(
        "prune",
        _prune,
        help="delete the checkpoints that no rule keeps, and say why the others stay",
        epilog="What any rule keeps stays. The newest stays in any case, and so does what is pinned (ckpt keep), "
        "damaged, or does not say its step and time. For best, each checkpoint's own metrics count, as ckpt ls shows "
        "them.",
        example="runs/7 --keep latest=3 --keep every_steps=1000 --dry-run",
        codes="0 success, 1 failure, 2 usage, no --yes and nobody to ask, or a metric that none has.",
    )
    prune.add_argument("directory", metavar="DIR", help="a directory of checkpoints; path or URL")
    prune.add_argument("--keep", action="append", type=_rules, metavar="RULE=N", help=f"such as {_RULES}")
    prune.add_argument("-n", "--dry-run", action="store_true", help="only show what would be deleted")
    prune.add_argument("-y", "--yes", action="store_true", help="do not ask; needed without a terminal")

    clean = commands.add(
        "clean",
        _clean,
        help="delete what killed processes left unfinished in a directory",
        example="runs/7 --dry-run",
        codes="0 success, 1 failure, or this user may not read or delete something unfinished, 2 usage.",
    )
    clean.add_argument("directory", nargs="?", metavar="DIR", help="a directory of checkpoints; path or URL")
    clean.add_argument(
        "--memory",
        nargs="?",
        const="/dev/shm",
        metavar="ROOT",
        help="instead delete the snapshots that finished runs have left in memory (/dev/shm)",
    )
    clean.add_argument("-n", "--dry-run", action="store_true", help="only show what would be deleted")

    keep = commands.add(
        "keep",
        _pin_all,
        help="pin checkpoints: neither retention nor prune deletes them",
        epilog="A small file .NAME.keep beside the checkpoint says so; the checkpoint stays as it is.\n"
        "A save under the same name still replaces it: of last.ckpt, pin the checkpoint that it is a copy of.",
        example='runs/step=100.ckpt --note "the paper"',
    )
    keep.add_argument("paths", nargs="+", metavar="CHECKPOINT", help="path or URL")
    keep.add_argument("--note", default="", metavar="WHY", help="the reason, which ckpt ls shows")

    drop = commands.add(
        "drop", _pin_all, help="unpin checkpoints: retention may delete them again", example="runs/step=100.ckpt"
    )
    drop.add_argument("paths", nargs="+", metavar="CHECKPOINT", help="path or URL")


# ---- prune -----------------------------------------------------------------------------------------------------------


def _rules(text: str) -> list[tuple[str, RetentionPolicy]]:
    try:
        return rules_of_words(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


@dataclasses.dataclass(frozen=True)
class _Decision:
    info: CheckpointInfo
    reasons: list[str]


def _prune(options: Options) -> int:
    if not options.keep:
        said = "say what to keep, such as --keep latest=3; what killed processes have left is deleted by ckpt clean"
        return fail(options, f"{said} {options.directory}", Exit.USAGE, said_by="ckpt prune")
    failures: dict[str, CheckpointError] = {}
    found = find(options.directory, options.storage_options, failures=failures)
    refuse_checkpoint(found, "prune")
    for info in found.checkpoints:
        state_of(info, options.storage_options, failures=failures)
    if failures:  # an unreadable checkpoint may change which others the rules keep
        for error in failures.values():
            print_error(error)
        said = f"nothing was deleted, because not all of {options.directory} could be read"
        return fail(options, said, Exit.FAILED, said_by="ckpt prune")
    if not found.checkpoints:
        print(found.hint(options.storage_options), file=sys.stderr)
    rules = [rule for rules in options.keep for rule in rules]
    told = listen(found.checkpoints, options.storage_options)
    decisions = _decide(found.checkpoints, rules, told)
    for metric in _unknown_metrics(rules, told):
        known = sorted({name for each in told.values() for name in each.metrics})
        said = f"no checkpoint records {metric!r}, so none would be the best: they record"
        return fail(options, f"{said} {', '.join(known) or 'no metrics'}", Exit.USAGE, said_by="ckpt prune")
    surplus = [decision.info for decision in decisions if not decision.reasons]
    freed = freed_by((info.path, info.size) for info in surplus)
    if not options.json:
        print_table(map(_row, decisions), right=(1, 2), styles={"delete": "red"})
        would = "would delete" if options.dry_run else "to delete:"
        print(f"{would} {len(surplus)} of {count(len(decisions), 'checkpoint')}, which frees {size_in_words(freed)}")
    is_sure = not surplus or options.dry_run or options.yes or agreed(options)
    is_done = is_sure and not options.dry_run
    if is_done and surplus and (problem := _problem_of_newest(decisions, options)):
        return fail(options, f"nothing was deleted, because {problem}", Exit.FAILED, said_by="ckpt prune")
    stays = list[str]()  # checkpoints that were pinned or saved again while the user was asked
    if is_done and surplus:
        now = {info.path: info for info in find(options.directory, options.storage_options, failures={}).checkpoints}
        stays = [info.path for info in surplus if now.get(info.path, info) != info]
        surplus = [info for info in surplus if info.path in now and info.path not in stays]
        freed = freed_by((info.path, info.size) for info in surplus)
        for info in surplus:
            delete(info, options.storage_options)
            if not options.json:
                print(f"deleted {printable(info.path)}")
        for path in stays if not options.json else ():
            print(f"kept {printable(path)}: {_CHANGED}")
    if options.json:
        kept = [
            {"path": d.info.path, "kept_because": [_CHANGED] if d.info.path in stays else d.reasons} for d in decisions
        ]
        print_json({"deleted": is_done, "freed": freed, "checkpoints": kept})
    if not is_sure:
        print("ckpt prune: nothing was deleted; --yes deletes, --dry-run only shows", file=sys.stderr)
        return Exit.USAGE
    return Exit.OK


def _problem_of_newest(decisions: Sequence[_Decision], options: Options) -> str:
    """Verify the newest checkpoint, since only its manifest has been read so far; return the problem, "" if intact."""
    from ckpt_core._pipeline import loading

    problem = "there is none to resume from"
    for newest in [decision.info for decision in decisions if _NEWEST in decision.reasons]:  # and its copies
        try:
            with progress(options, "verify", newest.size):
                loading.verify(newest.path, storage_options=options.storage_options)
        except CheckpointError as error:
            print_error(error)
            why = "could not be read: run the command again"
            if isinstance(error, CheckpointCorruptedError):
                why = "does not verify: move it away first"
            problem = f"the newest checkpoint {newest.path} {why}"
        else:
            return ""
    return problem


def agreed(options: Options) -> bool:
    """Ask the user whether to delete the checkpoints shown, and return the answer; False with --json or no terminal."""
    if options.json or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return False
    try:
        return input("delete them? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:  # Ctrl-D
        return False


def _unknown_metrics(rules: Iterable[tuple[str, RetentionPolicy]], told: Mapping[str, Told]) -> list[str]:
    wanted = [policy.metric for _, policy in rules if isinstance(policy, KeepBest)]
    return [metric for metric in wanted if not any(metric in each.metrics for each in told.values())]


def _decide(
    infos: Sequence[CheckpointInfo], rules: Sequence[tuple[str, RetentionPolicy]], told: Mapping[str, Told]
) -> list[_Decision]:
    """Return the reasons to keep each checkpoint of ``infos`` (newest first); one without a reason may be deleted.

    Copies, such as ``last.ckpt`` of the newest, count as one checkpoint.
    """
    reasons: dict[str, list[str]] = {}
    copies: dict[tuple[float, int], list[CheckpointInfo]] = {}
    for info in infos:
        if not info.is_readable:
            reasons[info.path] = ["cannot be read: delete it yourself"]
        elif info.committed is None or info.step is None:
            reasons[info.path] = ["does not say its step and time"]
        else:
            copies.setdefault((info.committed, info.step), []).append(info)
    oldest_first = list(reversed(copies.items()))
    saved = [
        SavedCheckpoint(same[0].path, step, time, told[same[0].path].metrics) for (time, step), same in oldest_first
    ]
    for candidate, (_, same) in zip(saved, oldest_first, strict=True):
        why = [name for name, policy in rules if _keeps(policy, saved, candidate)]
        if candidate is saved[-1]:
            why.insert(0, _NEWEST)
        why += [pinned(note) for note in (told[info.path].note for info in same) if note is not None]
        for info in same:
            reasons[info.path] = why
    return [_Decision(info, reasons[info.path]) for info in infos]


def _keeps(policy: RetentionPolicy, saved: Sequence[SavedCheckpoint], candidate: SavedCheckpoint) -> bool:
    return any(kept.path == candidate.path for kept in policy.kept(saved))


def _row(decision: _Decision) -> tuple[str, ...]:
    info = decision.info
    why = ", ".join(decision.reasons) or "no rule keeps it"
    step = "" if info.step is None else f"step {info.step}"
    return "keep" if decision.reasons else "delete", step, size_in_words(info.size), info.path, f"({why})"


def delete(info: CheckpointInfo, storage_options: dict[str, Any] | None) -> None:
    """Delete a checkpoint."""
    from ckpt_core._pipeline.directory_commit import names_of_files

    storage = storage_for(info.path, storage_options)
    if info.is_directory:
        names = names_of_files(storage, info.path) if is_remote(info.path) else ()
        storage.remove_directory(info.path, names=names)
    else:
        storage.remove(info.path)


# ---- clean -----------------------------------------------------------------------------------------------------------


def _clean(options: Options) -> int:
    from ckpt_core.catalog import Catalog

    if options.memory is not None:
        return _clean_memory(options)
    if options.directory is None:
        said = "name a directory, or ask for the memory: ckpt clean --memory"
        return fail(options, said, Exit.USAGE, said_by="ckpt clean")
    # A missing directory is an error; unreadable directories in it are not, since leftovers are recognized by name.
    found = find(options.directory, options.storage_options, failures={})
    if found.is_checkpoint and not found.checkpoints[0].is_directory:
        refuse_checkpoint(found, "clean")
    catalog = Catalog(options.directory, storage_options=options.storage_options)
    kept = _kept_from_this_user(options.directory)
    removed = [path for path in catalog.prune(dry_run=options.dry_run) if path not in kept]
    if not removed and not kept:
        print(f"nothing was left unfinished in {printable(options.directory)}", file=sys.stderr)
    if options.json:
        print_json(removed)
    else:
        for path in removed:
            print(f"{'would delete' if options.dry_run else 'deleted'} {printable(path)}")
    for path in kept:
        print(printable(f"ckpt clean: {path} stays: this user may not read or delete it"), file=sys.stderr)
    return Exit.FAILED if kept else Exit.OK


def _kept_from_this_user(directory: str) -> list[str]:
    """Return the unfinished files and directories in a local directory that this user may not lock or delete."""
    if is_remote(directory):
        return []
    effective = os.access in os.supports_effective_ids
    paths = unfinished(local_path(directory))
    if not os.access(local_path(directory), os.W_OK | os.X_OK, effective_ids=effective):
        return paths
    return [path for path in paths if not os.access(path, os.R_OK, effective_ids=effective) and os.path.lexists(path)]


def _clean_memory(options: Options) -> int:
    from ckpt_core.tiers import runs_in_memory

    runs = runs_in_memory(options.memory)
    over = [run for run in runs if not run.is_alive and (options.dry_run or run.delete())]
    if not over:
        print(f"no run that is over has left snapshots in {printable(options.memory)}", file=sys.stderr)
    if options.json:
        print_json([run.directory for run in over])
        return Exit.OK
    for run in runs:
        print(f"{'kept, in use:' if run not in over else 'would delete' if options.dry_run else 'deleted'} {run}")
    return Exit.OK


# ---- keep and drop ---------------------------------------------------------------------------------------------------


def _pin_all(options: Options) -> int:
    pins = options.verb == "keep"
    was_pinned: dict[str, bool] = {}
    for path in options.paths:
        storage = storage_for(path, options.storage_options)
        try:
            found = find(path, options.storage_options)
        except CheckpointNotFoundError:
            if pins or not is_pinned(path, storage):
                raise
            was_pinned[path.rstrip("/")] = True  # the checkpoint was deleted by hand
            continue
        if not found.is_checkpoint:
            raise CheckpointError(
                "this is a directory, not a checkpoint", path=path, remedy=f"name the checkpoints: ckpt ls {path}"
            )
        if pins and state_of(found.checkpoints[0], options.storage_options) == "FOREIGN":
            raise CheckpointError(
                "this is not a checkpoint", path=path, remedy="check the path: ckpt inspect says more"
            )
        was_pinned |= {info.path.rstrip("/"): info.is_pinned for info in found.checkpoints}
    for path, was in was_pinned.items():
        storage = storage_for(path, options.storage_options)
        if pins:
            pin(path, storage, options.note)
        else:
            unpin(path, storage)
        if not options.json:
            print(f"{'pinned' if pins else 'unpinned' if was else 'was not pinned:'} {printable(path)}")
    if options.json:
        print_json([{"path": path, "pinned": pins} for path in was_pinned])
    return Exit.OK
