"""``ckpt cp`` and ``mv``: checkpoints to another place, verified there."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ckpt_core.cli.finding import find
from ckpt_core.cli.output import print_json
from ckpt_core.cli.parser import Commands, Exit, Options, json_object
from ckpt_core.errors import CheckpointError, CheckpointFormatError, StorageError
from ckpt_core.events import size_in_words

if TYPE_CHECKING:
    from ckpt_core.catalog import CheckpointInfo
    from ckpt_core.storage import Storage

__all__ = ["add_commands"]

_FOOTER = b"ckpt_core torch_file"
_END = 256  # bytes at the end of a file, in which the digest of all digests is


def add_commands(commands: Commands) -> None:
    """Add the verbs of this file."""
    for name, run, what in (("cp", _cp, "copy"), ("mv", _mv, "move")):
        verb = commands.add(
            name,
            run,
            help=f"{what} checkpoints to another place or store; every byte is verified there",
            epilog="A checkpoint appears at the target when it is complete, or not at all. What is there already and\n"
            "the same is passed over, so that the same command continues after an interruption. SOURCE may be a\n"
            "directory of checkpoints, all of which are taken. TARGET is a directory if it ends with / or is one,\n"
            "or if there are several checkpoints.",
        )
        verb.add_argument("sources", nargs="+", metavar="SOURCE", help="a checkpoint, or a directory of them")
        verb.add_argument("target", metavar="TARGET", help="path or URL")
        verb.add_argument("-f", "--force", action="store_true", help="replace another checkpoint at the target")
        verb.add_argument(
            "--target-storage-options", type=json_object, metavar="JSON", help="of the target, where they differ"
        )


def _cp(options: Options) -> int:
    return _transfer_all(options, removes=False)


def _mv(options: Options) -> int:
    return _transfer_all(options, removes=True)


def _transfer_all(options: Options, *, removes: bool) -> int:
    from ckpt_core.cli.progress import progress
    from ckpt_core.cli.tidying import delete

    target_options = (
        options.storage_options if options.target_storage_options is None else options.target_storage_options
    )
    infos: list[CheckpointInfo] = []
    is_many = len(options.sources) > 1
    for source in options.sources:
        found = find(source, options.storage_options)
        if not found.checkpoints:
            raise CheckpointError(found.hint(options.storage_options), path=source)
        is_many = is_many or not found.is_checkpoint
        infos += reversed(found.checkpoints)  # the newest last, so that an interruption leaves an older one behind
    into = is_many or options.target.endswith("/") or _is_plain_directory(options.target, target_options)
    done = []
    with progress(options, "mv" if removes else "cp", 2 * sum(info.size for info in infos)) as advance:
        for info in infos:
            target = f"{options.target.rstrip('/')}/{info.name}" if into else options.target
            is_new = _transfer(info, target, options.storage_options, target_options, options.force, advance)
            if removes:
                _take_pin_along(info, target, options.storage_options, target_options)
                delete(info, options.storage_options)
            done.append({"source": info.path, "target": target, "bytes": info.size, "was_there": not is_new})
            if not options.json:
                word = "moved" if removes else "copied"
                print(
                    f"{word if is_new else 'was there'}  {info.path} -> {target} ({size_in_words(info.size)}, verified)"
                )
    if options.json:
        print_json(done)
    return Exit.OK


def _take_pin_along(
    info: CheckpointInfo, target: str, source_options: dict[str, Any] | None, target_options: dict[str, Any] | None
) -> None:
    from ckpt_core.pins import note_of_pin, pin, unpin
    from ckpt_core.storage import storage_for

    origin = storage_for(info.path, source_options)
    note = note_of_pin(info.path, origin) if info.is_pinned else None
    if note is not None:
        pin(target.rstrip("/"), storage_for(target, target_options), note)
        unpin(info.path, origin)


def _is_plain_directory(path: str, storage_options: dict[str, Any] | None) -> bool:
    from ckpt_core._pipeline.reader import is_directory_checkpoint
    from ckpt_core.storage import is_remote, storage_for

    return (
        not is_remote(path)
        and os.path.isdir(path)
        and not is_directory_checkpoint(storage_for(path, storage_options), path)
    )


def _transfer(
    info: CheckpointInfo,
    target: str,
    source_options: dict[str, Any] | None,
    target_options: dict[str, Any] | None,
    force: bool,
    advance: Callable[[int], None],
) -> bool:
    """Copy a checkpoint and verify the copy; return whether it was not there already.

    Raises:
        StorageError: There is another one, or the storage refused.
        CheckpointCorruptedError: The source is damaged; the target is as it was before, or gone if it was replaced.
        CheckpointFormatError: It is no checkpoint.
    """
    from ckpt_core._commit import RankGroup, SaveSeries
    from ckpt_core._pipeline import reader
    from ckpt_core._pipeline.directories import copy_directory
    from ckpt_core.checkpointer import full_path
    from ckpt_core.cli.progress import Watched
    from ckpt_core.storage import storage_for
    from ckpt_core.storage.base import transfer

    source, path = full_path(info.path), full_path(target)
    if source == path:
        raise StorageError("source and target are the same", path=path, remedy="give another target")
    origin, storage = Watched(storage_for(source, source_options), advance), storage_for(path, target_options)
    watched = Watched(storage, advance)
    there = _identity(storage, path)
    is_there = there is not None and there == _identity(origin, source)
    if not is_there and there is not None and not force:
        raise StorageError("there is another checkpoint at the target", path=path, remedy="--force replaces it")
    if is_there:
        reader.verify(path, storage=watched)
        return False
    # What is damaged at the source must not replace anything: it is compared there, and what has arrived, once more.
    reader.verify(source, storage=origin)
    if info.is_directory:
        joint = SaveSeries(RankGroup.alone()).open(path, timeout=600.0)
        copy_directory(storage, source, path, joint, origin=origin)
    else:
        transfer(origin, source, storage, path)
    reader.verify(path, storage=watched)
    return True


def _identity(storage: Storage, path: str) -> tuple[str, Any] | None:
    """Return what tells a checkpoint from any other; None if nothing is there."""
    from ckpt_core._layouts.sharded.reading import DirectoryCheckpoint
    from ckpt_core._pipeline import reader

    if reader.is_directory_checkpoint(storage, path):
        with DirectoryCheckpoint(path, storage) as checkpoint:
            return "directory", (checkpoint.save_id, checkpoint.stamp)
    if not storage.exists(path):
        return None
    try:
        with storage.open(path) as file:
            end = bytearray(min(file.size, _END))
            file.read_into(file.size - len(end), memoryview(end))
            # Of another program's there is no telling without comparing all of it.
            return ("file", (file.size, bytes(end))) if _FOOTER in end else ("file", object())
    except StorageError as error:
        raise CheckpointFormatError(
            "there is a directory at the target that is no checkpoint", path=path, remedy="end the target with /"
        ) from error
