"""``ckpt cp``, ``mv`` and ``sync``: copy or move checkpoints to another directory or store, and verify them there."""

from __future__ import annotations

import dataclasses
import io
import os
import sys
from typing import TYPE_CHECKING, Any

from ckpt_core.cli.finding import (
    find,
    find_all,
    is_store_error,
    is_there,
    refuse_checkpoint,
    refuse_inside_checkpoint,
    refuse_itself,
    refuse_target_inside_checkpoint,
    state_of,
)
from ckpt_core.cli.output import print_error, print_json, print_lines, printable
from ckpt_core.cli.parser import Commands, Exit, Options, json_object
from ckpt_core.cli.progress import progress
from ckpt_core.cli.tidying import agreed, delete
from ckpt_core.errors import (
    CheckpointCorruptedError,
    CheckpointError,
    CheckpointFormatError,
    CheckpointNotFoundError,
    StorageError,
)
from ckpt_core.events import size_in_words
from ckpt_core.paths import full_path, is_remote, local_path
from ckpt_core.pins import note_of_pin, pin, unpin
from ckpt_core.process.console import progress_bars_cleared
from ckpt_core.storage import Storage, refuse_missing_bucket, storage_for
from ckpt_core.storage.base import ReaderIO, is_directory_checkpoint, transfer

if TYPE_CHECKING:
    from ckpt_core.catalog import CheckpointInfo

_FOOTER = b"ckpt_core torch_file"
_BLOCK = 2**20  # bytes
_MOVED = 4  # times that a checkpoint's bytes are transferred: verified, read, written, and verified at the target
_END = 256  # bytes at the end of a file, which contain the digest of all digests


def add_commands(commands: Commands) -> None:
    """Add the verbs of this file."""
    for name, what in (("cp", "copy"), ("mv", "move")):
        verb = commands.add(
            name,
            _transfer_all,
            help=f"{what} checkpoints to another place or store; every byte is verified there",
            epilog="A checkpoint appears at the target when it is complete, or not at all. What is there already and "
            "the same is passed over, so that the same command continues after an interruption. SOURCE may be a "
            "directory of checkpoints, all of which are taken. TARGET is a directory if it ends with / or is one, "
            "or if there are several checkpoints.",
            example="runs/step=100.ckpt s3://bucket/run-7/",
        )
        verb.add_argument("sources", nargs="+", metavar="SOURCE", help="a checkpoint, or a directory of them")
        verb.add_argument("target", metavar="TARGET", help="path or URL")
        verb.add_argument("-f", "--force", action="store_true", help="replace another checkpoint at the target")

    sync = commands.add(
        "sync",
        _sync,
        help="copy what another directory of checkpoints lacks; every byte is verified there",
        epilog="A checkpoint appears at the target when it is complete, or not at all; what is there already is "
        "passed over, so that the same command continues after an interruption, and may run beside a training.\n"
        "Under the same name (last.ckpt), the later commit replaces the earlier; a newer one at the target stays.\n"
        "--delete deletes at the target what SOURCE no longer has, when all that it has is there. What is pinned, "
        "damaged, another program's, or newer than all of SOURCE stays. An empty SOURCE is an error.",
        example="-R runs s3://bucket/runs",
        codes="0 TARGET has all of SOURCE, 1 not all of it, 2 usage, or --delete without --yes and nobody to ask.",
    )
    sync.add_argument("source", metavar="SOURCE", help="a directory of checkpoints; path or URL")
    sync.add_argument("target", metavar="TARGET", help="another directory, which need not exist; path or URL")
    sync.add_argument("-r", "-R", "--recursive", action="store_true", help="take directories below it, too")
    sync.add_argument("--delete", action="store_true", help="delete at the target what the source no longer has")
    sync.add_argument("--verify", action="store_true", help="also compare every byte of what is already there")
    sync.add_argument("-n", "--dry-run", action="store_true", help="only show what would be done")
    sync.add_argument("-y", "--yes", action="store_true", help="do not ask before deleting")
    for name in ("cp", "mv", "sync"):
        commands.parsers[name].add_argument(
            "--target-storage-options",
            type=json_object,
            metavar="JSON",
            help="--storage-options of the target, if they differ",
        )


def _transfer_all(options: Options) -> int:
    removes = options.verb == "mv"
    _begin(options)
    failures: dict[str, CheckpointError] = {}  # if some of several sources fail, the others are transferred
    infos, is_many = _sources(options, failures)
    given = local_path(options.target)
    into = is_many or given.endswith("/") or _is_plain_directory(given, options.target_storage_options)
    refuse = refuse_inside_checkpoint if into else refuse_target_inside_checkpoint
    refuse(given, options.target_storage_options)
    names = {info.name: info.path for info in infos}
    for info in infos if into else []:
        if not _are_same(names[info.name], info.path, options):  # with --force, the second would replace the first
            raise CheckpointError(
                f"{names[info.name]} has the same name",
                path=info.path,
                remedy=f"{options.verb} them to two directories",
            )
    if removes:
        infos.sort(key=lambda info: not os.path.islink(info.path))  # symbolic links before their targets
        for info in infos:
            _refuse_what_stays(info.path, info.is_directory)
    done: list[dict[str, Any]] = []
    with progress(options, options.verb, _MOVED * sum(info.size for info in infos)):
        for info in infos:
            target = f"{given.rstrip('/')}/{info.name}" if into else given
            try:
                is_new = _transfer(info, target, options, force=options.force)
                if removes:
                    _remove(info, target, options)
            except CheckpointError as error:
                if info.path not in options.sources and not is_there(info.path, options.storage_options):
                    print(f"{printable(info.path)} was deleted meanwhile", file=sys.stderr)
                    continue
                is_refused = isinstance(error, StorageError)  # by the storage, which would refuse the others, too
                if not done if is_refused else len(infos) == 1 and not failures:
                    raise
                failures[info.path] = error
                if is_refused:
                    break
                continue  # this source is damaged, or not a checkpoint
            done.append({"source": info.path, "target": target, "bytes": info.size, "was_there": not is_new})
            if not options.json:
                word = "moved" if removes else "copied"
                with progress_bars_cleared():
                    print_lines(
                        f"{word if is_new else 'was there'}  {info.path} -> {target} "
                        f"({size_in_words(info.size)}, verified)"
                    )
    if options.json:
        print_json(done)
    for failure in failures.values():
        print_error(failure)
    return Exit.FAILED if failures else Exit.OK


def _sources(options: Options, failures: dict[str, CheckpointError]) -> tuple[list[CheckpointInfo], bool]:
    """Return the checkpoints to transfer, and whether the sources can stand for several.

    The newest comes last, so that after an interruption the target lacks only newer ones. ``failures`` receives the
    errors of single sources by path, if there are several.
    """
    infos: list[CheckpointInfo] = []
    is_many = len(options.sources) > 1
    for source in options.sources:
        closed = len(failures)
        try:
            found = find(source, options.storage_options, failures=failures)
            if not found.checkpoints and len(failures) == closed:
                raise CheckpointError(found.hint(options.storage_options), path=source)
        except CheckpointError as error:
            if not is_many or is_store_error(error, source):
                raise
            failures[source] = error
            continue
        is_many = is_many or not found.is_checkpoint
        for info in found.checkpoints if is_many else []:
            state_of(info, options.storage_options, failures=failures)
        infos += [info for info in reversed(found.checkpoints) if info.path not in failures]
    return infos, is_many


def _begin(options: Options) -> None:
    """Use the source's storage options for the target if it has none of its own; refuse a target without a bucket."""
    if options.target_storage_options is None:
        options.target_storage_options = options.storage_options
    refuse_missing_bucket(options.target, options.target_storage_options)


# ---- sync ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Step:
    """What a sync does with one checkpoint."""

    action: str  # "copy", "replace", "was there", "keep", "delete"; or the outcome: "FAILED", "gone", "asked"
    path: str  # path at the source; for a checkpoint that is only at the target, its path there
    target: str  # path at the target
    info: CheckpointInfo
    why: str = ""  # reason why it is kept, deleted, or could not be copied
    is_missing: bool = False  # whether the target lacks this checkpoint of the source and sync cannot change that

    def __str__(self) -> str:
        arrow = "" if self.path == self.target else f" -> {self.target}"
        return f"{self.action:<9}  {self.path}{arrow}  ({self.why or size_in_words(self.info.size)})"


def _sync(options: Options) -> int:
    _begin(options)
    copies, deletions = _plan(options)
    size = sum(_MOVED * step.info.size for step in copies if step.action in ("copy", "replace"))
    size += sum(step.info.size for step in copies if step.action == "was there" and options.verify)
    done = copies
    if not options.dry_run:
        with progress(options, "sync", size):
            done = [_copied(step, options) for step in copies]
    if not options.json:
        for step in done:
            print_lines(str(step))
    is_whole = not any(step.is_missing for step in done)
    deletions = _delete_at_target(deletions, options, is_whole)
    if options.json:
        print_json(
            [{"action": s.action, "path": s.path, "target": s.target, "why": s.why} for s in [*done, *deletions]]
        )
    if any(step.action == "asked" for step in deletions):
        return Exit.USAGE
    return Exit.OK if is_whole else Exit.FAILED


def _plan(options: Options) -> tuple[list[_Step], list[_Step]]:
    """Return the steps for the checkpoints of the source, oldest first, and for those only at the target."""
    source, target = (full_path(path).rstrip("/") for path in (options.source, options.target))
    refuse_itself(source, target)
    real = [path if is_remote(path) else os.path.realpath(path) for path in (source, target)]
    if not is_remote(target) and os.path.lexists(target) and not os.path.isdir(target):
        raise StorageError(
            "something is already there: a file, not a directory", path=target, remedy="give another target"
        )
    checked = set[str]()
    refuse_inside_checkpoint(target, options.target_storage_options, checked=checked)
    if options.recursive and real[1].startswith(f"{real[0]}/"):
        raise CheckpointError(
            "the target is in the source, and would be copied into itself", path=target, remedy="give another target"
        )
    failures: dict[str, CheckpointError] = {}
    places = find_all([source], options.storage_options, recursive=options.recursive, failures=failures)
    refuse_checkpoint(places[0], "sync")
    if not failures and not any(place.checkpoints for place in places):
        raise CheckpointError(places[0].hint(options.storage_options), path=source)
    copies, others = [_unread(path, target + path.removeprefix(source), error) for path, error in failures.items()], []
    for place in places:
        directory = target + full_path(place.path).rstrip("/").removeprefix(source)
        refuse_inside_checkpoint(directory, options.target_storage_options, checked=checked)
        try:
            there = {info.name: info for info in find(directory, options.target_storage_options).checkpoints}
        except CheckpointNotFoundError:
            there = {}
        origin = storage_for(source, options.storage_options)
        storage = storage_for(target, options.target_storage_options)
        copies += [
            _step(info, there.pop(info.name, None), f"{directory}/{info.name}", origin, storage)
            for info in reversed(place.checkpoints)
        ]
        others += [_only_at_target(info, place.checkpoints) for info in there.values()]
    return copies, others if options.delete else []


def _unread(path: str, target: str, error: CheckpointError) -> _Step:
    from ckpt_core.catalog import CheckpointInfo

    info = CheckpointInfo(path, 0, 0.0, is_directory=True, is_readable=False)
    return _Step("FAILED", path, target, info, _in_a_line(error), is_missing=True)


def _step(info: CheckpointInfo, there: CheckpointInfo | None, target: str, origin: Storage, storage: Storage) -> _Step:
    if not info.is_readable:
        return _Step("keep", info.path, target, info, "cannot be read at the source: not copied", is_missing=True)
    if there is None:
        return _Step("copy", info.path, target, info)
    if not there.is_readable:
        return _Step("replace", info.path, target, info, "what is there cannot be read")
    if _is_same(origin, info.path, storage, there.path):
        return _Step("was there", info.path, target, info)
    if info.committed is None or (there.committed is not None and there.committed >= info.committed):
        why = "another one is at the target, and is not older: ckpt cp --force replaces it"
        return _Step("keep", info.path, target, info, why, is_missing=True)
    return _Step("replace", info.path, target, info, "newer than what is there")


def _only_at_target(info: CheckpointInfo, source: list[CheckpointInfo]) -> _Step:
    newest = max((other.committed or 0.0 for other in source), default=0.0)
    why = ""
    if info.is_pinned:
        why = "pinned"
    elif not info.is_readable:
        why = "cannot be read: delete it yourself"
    elif info.committed is None:
        why = "another program's"
    elif info.committed > newest:
        why = "newer than all of the source"
    return _Step("keep" if why else "delete", info.path, info.path, info, why or "not at the source")


def _copied(step: _Step, options: Options) -> _Step:
    try:
        if step.action in ("copy", "replace"):
            is_new = _transfer(step.info, step.target, options, force=True)
            return step if is_new else dataclasses.replace(step, action="was there", why="")
        if step.action == "was there" and options.verify:
            is_new = _transfer(step.info, step.target, options, force=True)
            return dataclasses.replace(step, action="replace", why="what was there was damaged") if is_new else step
    except CheckpointError as error:
        if not is_there(step.path, options.storage_options):
            return dataclasses.replace(step, action="gone", why="deleted meanwhile, by the run's retention")
        return dataclasses.replace(step, action="FAILED", why=_in_a_line(error), is_missing=True)
    return step


def _in_a_line(error: CheckpointError) -> str:
    return error.message if error.remedy is None else f"{error.message}; {error.remedy}"


def _delete_at_target(steps: list[_Step], options: Options, is_whole: bool) -> list[_Step]:
    """Delete surplus checkpoints at the target if that is safe and the user has agreed; return what was done."""
    surplus = [step for step in steps if step.action == "delete"]
    if surplus and not is_whole:
        print("ckpt sync: nothing was deleted, because not all of the source is at the target", file=sys.stderr)
        return [dataclasses.replace(step, action="keep", why="not all of the source is here") for step in steps]
    if not options.json:
        for step in steps:
            print_lines(str(step))
    if not surplus or options.dry_run:
        return steps
    if not (options.yes or agreed(options)):
        print("ckpt sync: nothing was deleted; --yes deletes, --dry-run only shows", file=sys.stderr)
        return [dataclasses.replace(step, action="asked") for step in steps]
    now: dict[str, CheckpointInfo] = {}
    for directory in dict.fromkeys(step.path.rpartition("/")[0] for step in surplus):
        now.update((info.path, info) for info in find(directory, options.target_storage_options).checkpoints)
    done = []
    for step in steps:
        if step.action == "delete" and now.get(step.path) != step.info:
            done.append(dataclasses.replace(step, action="keep", why="deleted, pinned or saved anew meanwhile"))
            if not options.json:
                print_lines(str(done[-1]))
            continue
        if step.action == "delete":
            delete(step.info, options.target_storage_options)
        done.append(step)
    return done


# ---- one checkpoint --------------------------------------------------------------------------------------------------


def _take_pin_along(info: CheckpointInfo, target: str, options: Options) -> None:
    origin = storage_for(info.path, options.storage_options)
    note = note_of_pin(info.path, origin) if info.is_pinned else None
    if note is not None:
        pin(target.rstrip("/"), storage_for(target, options.target_storage_options), note)
        unpin(info.path, origin)


def _refuse_what_stays(path: str, is_directory: bool) -> None:
    """Refuse to move a checkpoint that this user may not delete; for a store, only the deletion shows that."""
    if is_remote(path):
        return
    place = local_path(path).rstrip("/")
    folders = [os.path.dirname(place) or "."]
    if is_directory and not os.path.islink(place):
        folders.append(place)
    for folder in folders:
        if not os.access(folder, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
            raise StorageError(
                f"it cannot be moved: no permission to delete in {folder}", path=path, remedy="ckpt cp copies it"
            )


def _remove(info: CheckpointInfo, target: str, options: Options) -> None:
    source, path = full_path(info.path), full_path(target)
    origin, storage = storage_for(source, options.storage_options), storage_for(path, options.target_storage_options)
    # The run may have saved a new checkpoint under this name meanwhile.
    if _identity(origin, source) is not None and not _is_same(origin, source, storage, path):
        raise CheckpointError(
            f"it was replaced while it was moved: the new checkpoint stays here, the old one is at {target}",
            path=info.path,
            remedy="run the command again with --force",
        )
    try:
        _take_pin_along(info, target, options)
        delete(info, options.storage_options)
    except CheckpointError as error:
        error.message += f"; it is complete at {target}"
        raise


def _is_plain_directory(path: str, storage_options: dict[str, Any] | None) -> bool:
    return (
        not is_remote(path)
        and os.path.isdir(path)
        and not is_directory_checkpoint(storage_for(path, storage_options), path)
    )


def _transfer(info: CheckpointInfo, target: str, options: Options, *, force: bool) -> bool:
    """Copy a checkpoint and verify the copy; return False if the same checkpoint was at the target already.

    If the source is damaged, the target stays as it was, or is deleted if it had been replaced.
    """
    from ckpt_core._commit.rank_group import RankGroup
    from ckpt_core._commit.save_outcome import JointSave, SaveSeries
    from ckpt_core._pipeline import loading
    from ckpt_core._pipeline.directory_commit import copy_directory

    source, path = full_path(info.path), full_path(target)
    refuse_itself(source, path)
    origin = storage_for(source, options.storage_options)
    storage = storage_for(path, options.target_storage_options)
    is_there = _is_same(origin, source, storage, path)
    if is_there is False and not force:
        raise StorageError("there is another checkpoint at the target", path=path, remedy="--force replaces it")
    if is_there:
        try:
            loading.verify(path, storage=storage)
        except CheckpointCorruptedError as error:
            if not force:
                error.remedy = "--force replaces it, if the source is whole"
                raise
        else:
            return False
    # A damaged source must not replace anything, so it is verified before the copy, and the copy afterwards.
    loading.verify(source, storage=origin)
    if not is_remote(path):
        storage.remove_orphans(os.path.dirname(path))  # for example, of this command if it was killed before
    if info.is_directory:
        joint = JointSave(SaveSeries(RankGroup.alone()), path, timeout=600.0)
        copy_directory(storage, lambda: (origin, source), path, joint)
    else:
        transfer(origin, source, storage, path)
    loading.verify(path, storage=storage)
    return True


def _are_same(first: str, second: str, options: Options) -> bool:
    """Return whether two paths refer to one checkpoint, or to copies of it."""
    one, other = (path if is_remote(path) else os.path.realpath(path) for path in map(full_path, (first, second)))
    storage = storage_for(one, options.storage_options)
    return one == other or _is_same(storage, one, storage_for(other, options.storage_options), other) is True


def _is_same(origin: Storage, source: str, storage: Storage, path: str) -> bool | None:
    """Return whether the same checkpoint is at the target; None if nothing is there.

    For files of other programs, every byte is compared.
    """
    there = _identity(storage, path)
    if there is None:
        return None
    here = _identity(origin, source)
    if here != there or there[0] != "foreign":
        return here == there
    with origin.open(source) as first, storage.open(path) as second:
        one, other = io.BufferedReader(ReaderIO(first), _BLOCK), io.BufferedReader(ReaderIO(second), _BLOCK)
        while block := one.read(_BLOCK):
            if block != other.read(_BLOCK):
                return False
    return True


def _identity(storage: Storage, path: str) -> tuple[str, Any] | None:
    """Return a value that identifies a checkpoint (only its size for other programs' files); None if missing."""
    from ckpt_core._layouts.directory.loading import DirectoryReader

    if is_directory_checkpoint(storage, path):
        try:
            with DirectoryReader(path, storage) as checkpoint:
                return "directory", (checkpoint.save_id, checkpoint.stamp)
        except (CheckpointCorruptedError, CheckpointFormatError):
            return "damaged", object()  # equal to no other
        except CheckpointNotFoundError:
            return None  # deleted meanwhile
    if not storage.exists(path):
        return None
    try:
        with storage.open(path) as file:
            end = bytearray(min(file.size, _END))
            file.read_into(file.size - len(end), memoryview(end))
            return ("file", (file.size, bytes(end))) if _FOOTER in end else ("foreign", file.size)
    except CheckpointNotFoundError:
        return None  # a link that leads nowhere
    except StorageError as error:
        if not (is_remote(path) or os.path.isdir(path)):
            raise
        raise CheckpointFormatError(
            "the target is a directory that is not a checkpoint", path=path, remedy="end the target with /"
        ) from error
