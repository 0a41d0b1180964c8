"""The checkpoints that a path of the command line means."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ckpt_core.cli.output import count
from ckpt_core.cli.parser import STORE_OPTIONS
from ckpt_core.errors import (
    CheckpointCorruptedError,
    CheckpointError,
    CheckpointFormatError,
    CheckpointNotFoundError,
    StorageError,
    UnsafeCheckpointError,
)
from ckpt_core.paths import full_path, is_remote, local_path
from ckpt_core.pins import is_pinned
from ckpt_core.storage import MANIFEST_NAME, Storage, refuse_missing_bucket, storage_for
from ckpt_core.storage.base import is_directory_checkpoint

if TYPE_CHECKING:
    from ckpt_core.catalog import CheckpointInfo
    from ckpt_core.interchange import Foreign

_ENDING = ".ckpt"  # of files that are taken for checkpoints where a directory is named
_LEVELS_OF_A_HINT = 2
_DIRECTORIES_OF_A_HINT = 500  # a store is asked several times for each
_STATES: dict[type[CheckpointError], str] = {
    CheckpointCorruptedError: "DAMAGED",
    CheckpointNotFoundError: "MISSING",
    CheckpointFormatError: "FOREIGN",
}


def state_of_error(error: CheckpointError) -> str:
    """Return the word for what cannot be read."""
    return _STATES.get(type(error), "ERROR")


def state_of(
    info: CheckpointInfo,
    storage_options: dict[str, Any] | None,
    *,
    failures: dict[str, CheckpointError] | None = None,
) -> str:
    """Return a checkpoint's state, as far as its manifest says, in the words of ``ckpt verify``.

    ``failures``, if given, receives by path why one could not be read, which says nothing of what it is.
    """
    from ckpt_core._pipeline.loading import stamp_of

    try:
        if info.path.endswith(".safetensors") and not info.is_directory:  # as it was named itself
            find_foreign(info.path, storage_options)
        elif not info.is_readable:
            stamp_of(info.path, storage=storage_for(info.path, storage_options), is_directory=info.is_directory)
    except CheckpointError as error:
        state = state_of_error(error)
        if failures is not None and state == "ERROR":
            failures[info.path] = error
        return state
    return "no digests" if info.committed is None else "committed"


@dataclasses.dataclass(frozen=True)
class Found:
    """What is at a path."""

    path: str  # as it was given
    # The checkpoint that is there; or those directly in the directory, the newest first.
    checkpoints: list[CheckpointInfo]
    others: int = 0  # how many other files are directly in the directory
    # Whether the path itself is a checkpoint, or any other file, and not a directory of them.
    is_checkpoint: bool = False
    size: int = 0  # bytes of the files that are directly there, if there is no checkpoint

    def hint(self, storage_options: dict[str, Any] | None, verb: str = "ls") -> str:
        """Return why there are none, and where some are; ``verb`` is one that finds those."""
        foreign = self.foreign(storage_options)
        if foreign is not None:
            return foreign
        text = f"no checkpoints in {self.path}"
        if self.others:
            text += f" ({count(self.others, 'other file')})"
        places = walk(self.path, storage_options, levels=_LEVELS_OF_A_HINT, failures={})
        below = list(itertools.islice(places, _DIRECTORIES_OF_A_HINT))
        full = [found for found in below if found.checkpoints]
        if full:
            total = sum(len(found.checkpoints) for found in full)
            more = " or more" if len(below) == _DIRECTORIES_OF_A_HINT else ""
            return f"{text}; {total}{more} below it, such as in {full[0].path}: ckpt {verb} -R {self.path}"
        other = next((said for found in below if (said := found.foreign(storage_options)) is not None), None)
        return text if other is None else f"{text}; {other}"

    def foreign(self, storage_options: dict[str, Any] | None) -> str | None:
        """Return which other program's checkpoint it is, in words; None if of none."""
        if self.checkpoints:
            return None
        try:
            found = find_foreign(self.path, storage_options)
        except CheckpointError as error:
            return f"{self.path}: {error.message}"
        return None if found is None else f"{self.path} is {found.what}: see ckpt inspect, verify, convert"


def no_checkpoint(found: Found, storage_options: dict[str, Any] | None) -> CheckpointFormatError:
    """Return the error for a directory that was taken for a checkpoint."""
    if not found.checkpoints:
        text = f"this is a directory, not a checkpoint: {found.hint(storage_options)}"
        return CheckpointFormatError(text, path=found.path)
    first = next((info for info in found.checkpoints if info.is_readable), None)
    newest = f"; the newest is {first.path}" if first is not None else ""
    return CheckpointFormatError(
        f"this is a directory of {count(len(found.checkpoints), 'checkpoint')}, not a checkpoint{newest}",
        path=found.path,
        remedy=f"ckpt ls {found.path}",
    )


def refuse_checkpoint(found: Found, verb: str) -> None:
    """Refuse a checkpoint, or any other file, where a directory of them is wanted."""
    if found.is_checkpoint:
        raise CheckpointError(
            "this is a checkpoint, not a directory of them",
            path=found.path,
            remedy=f"ckpt {verb} {os.path.dirname(found.path.rstrip('/')) or '.'}",
        )


def refuse_itself(source: str, target: str) -> None:
    """Refuse a target that is the source, also through a link; hard links are two files. Both are full paths."""
    is_same = source == target
    if not is_same and not (is_remote(source) or is_remote(target)) and os.path.exists(source):
        is_same = os.path.realpath(source) == os.path.realpath(target)
        if not is_same and os.path.exists(target):
            is_same = os.path.samefile(source, target) and (os.path.isdir(source) or os.stat(source).st_nlink == 1)
    if is_same:
        raise StorageError("source and target are the same", path=target, remedy="give another target")


def refuse_other_data(path: str, storage_options: dict[str, Any] | None, *, force: bool) -> None:
    """Refuse a target at which something is, with ``force`` only what is no checkpoint; and one without a bucket."""
    refuse_missing_bucket(path, storage_options)
    place = local_path(path).rstrip("/")
    storage = storage_for(place, storage_options)
    if not is_directory_checkpoint(storage, place) and (storage.list(place) or storage.subdirectories(place)):
        raise StorageError(
            "something is already there: a directory that is not a checkpoint",
            path=path,
            remedy=f"choose a name inside it: {place}/NAME",
        )
    try:
        found = find(path, storage_options)
    except CheckpointNotFoundError:
        return
    if not found.is_checkpoint or not found.checkpoints[0].size:  # an empty file, as mktemp makes it
        return
    if state_of(found.checkpoints[0], storage_options) == "FOREIGN":
        raise StorageError(
            "something is already there: a file that is not a checkpoint", path=path, remedy="give another name"
        )
    if not force:
        raise StorageError("there is another checkpoint at the target", path=path, remedy="--force replaces it")


def refuse_inside_checkpoint(
    directory: str, storage_options: dict[str, Any] | None, *, checked: set[str] | None = None
) -> None:
    """Refuse to write into a checkpoint: whoever deletes it, such as ``mv`` or retention, deletes all that is in it.

    ``checked`` are directories that are in none, to which those are added that have been looked at.

    Raises:
        StorageError: It is one, or is inside of one; or the manifest in it cannot be read.
    """
    checked = set() if checked is None else checked
    path = full_path(directory)
    path = named = path.rstrip("/") if is_remote(path) else os.path.realpath(path)
    storage = storage_for(path, storage_options)
    while path.rstrip("/") and not path.endswith(":/") and path not in checked:
        try:
            is_checkpoint = _has_own_manifest(storage, path)
        except StorageError:
            if path == named and (not is_remote(path) or _is_listed(storage, path)):
                raise
            return  # such as above the prefix that a key is for
        if is_checkpoint:
            raise StorageError(
                "the target is inside a checkpoint, and would be deleted with it",
                path=path,
                remedy="name a directory of checkpoints as the target",
            )
        checked.add(path)
        path = path.rpartition("/")[0] if is_remote(path) else os.path.dirname(path)


def refuse_target_inside_checkpoint(target: str, storage_options: dict[str, Any] | None) -> None:
    """Refuse a target whose directory is a checkpoint, or inside of one."""
    place = full_path(target).rstrip("/")
    parent = place.rpartition("/")[0] if is_remote(place) else os.path.dirname(place)
    if is_remote(parent) or not is_remote(place):  # of a bucket, there is none
        refuse_inside_checkpoint(parent, storage_options)


def _has_own_manifest(storage: Storage, path: str) -> bool:
    """Whether a directory is a checkpoint of any version, and has not one of the many other files of that name."""
    from ckpt_core._layouts.directory.manifest import is_other_programs

    place = f"{path}/{MANIFEST_NAME}"
    if not (storage.exists(place) if is_remote(place) else os.path.isfile(place)):
        return False
    try:
        with storage.open(place) as file:
            return not is_other_programs(file)
    except CheckpointNotFoundError:
        return False


def _is_listed(storage: Storage, path: str) -> bool:
    try:
        return any(file.path == f"{path}/{MANIFEST_NAME}" for file in storage.list(path))
    except StorageError:
        return False


def missing(path: str) -> CheckpointNotFoundError:
    """Return the error for a path at which nothing is."""
    remedy = "check the path"
    if "://" in path:
        remedy += f"; for a store, also {STORE_OPTIONS}"
    elif os.path.islink(path):
        remedy = f"it is a link to {os.readlink(path)}, where nothing is: make or mount that, or delete the link"
    return CheckpointNotFoundError(f"there is no such file, directory or bucket: {path}", path=path, remedy=remedy)


def find(
    path: str, storage_options: dict[str, Any] | None, *, failures: dict[str, CheckpointError] | None = None
) -> Found:
    """Return what is at a path or URL: a checkpoint, or a directory of checkpoints.

    ``failures`` is that of :func:`find_all`.
    """
    from ckpt_core.catalog import Catalog
    from ckpt_core.process.awaited_paths import wait_for_saves

    place = local_path(path)
    place = place.rstrip("/") or place
    wait_for_saves(place)  # of a program that runs the command in its own process
    storage = storage_for(place, storage_options)
    is_file = not is_remote(place) and os.path.isfile(place)
    if is_file or is_directory_checkpoint(storage, place):
        return Found(path, [_info_of(place, storage_options)], is_checkpoint=True)
    catalog = Catalog(place, suffix="", storage_options=storage_options)
    found = _read_of(catalog.checkpoints(files=_ENDING), storage, failures)  # a project has many other files
    kept = [info for info in found if info.is_directory or info.path.endswith(_ENDING)]
    if not found:
        if is_remote(place) and "/" in place.partition("://")[2]:
            try:
                return Found(path, [_info_of(place, storage_options)], is_checkpoint=True)
            except CheckpointNotFoundError:
                pass  # no file either
        # Locally a pipe, a device or a link to nothing has a name, too.
        is_there = storage.exists(place) or storage.subdirectories(place) if is_remote(place) else os.path.isdir(place)
        if not is_there:
            raise missing(path)
    return Found(path, kept, others=len(found) - len(kept), size=0 if kept else sum(info.size for info in found))


def _read_of(
    infos: Iterable[CheckpointInfo], storage: Storage, failures: dict[str, CheckpointError] | None
) -> list[CheckpointInfo]:
    """Return those that are no directories which may not be read; ``failures`` is that of :func:`find_all`."""
    found = []
    for info in infos:
        try:
            if info.is_directory and not info.is_readable:
                storage.list(info.path)
            found.append(info)
        except CheckpointError as error:
            if failures is None:
                raise
            failures[info.path] = error
    return found


def is_there(path: str, storage_options: dict[str, Any] | None) -> bool:
    """Return whether a checkpoint is still there, and its run's retention has not deleted it."""
    try:
        return find(path, storage_options).is_checkpoint
    except CheckpointNotFoundError:
        return False


def find_foreign(path: str, storage_options: dict[str, Any] | None) -> Foreign | None:
    """Return what checkpoint of another program is at a path, if there is one that torch alone does not read."""
    place = local_path(path).rstrip("/")
    is_file = not is_remote(place) and os.path.isfile(place)
    storage = storage_for(place, storage_options)
    if (is_file and not place.endswith(".safetensors")) or is_directory_checkpoint(storage, place):
        return None
    from ckpt_core.interchange import recognize  # it takes a second to import

    return recognize(place, storage_options=storage_options)


def size_at(path: str, storage_options: dict[str, Any] | None) -> int:
    """Return how many bytes a checkpoint has, whosever it is; path or URL."""
    found = find(path, storage_options)
    if found.is_checkpoint:
        return found.checkpoints[0].size
    storage = storage_for(path, storage_options)
    folders, total = [local_path(path).rstrip("/")], 0
    while folders:
        folder = folders.pop()
        total += sum(file.size for file in storage.list(folder))
        folders += storage.subdirectories(folder)
    return total


def concerns_others(error: CheckpointError, path: str) -> bool:
    """Return whether what is wrong with one of several paths or URLs is wrong with the others, too: of a store."""
    return isinstance(error, StorageError) and is_remote(path)


def find_all(
    paths: Sequence[str],
    storage_options: dict[str, Any] | None,
    *,
    recursive: bool = False,
    failures: dict[str, CheckpointError] | None = None,
) -> list[Found]:
    """Return what is at each of several paths or URLs and, with ``recursive``, in the directories below them.

    ``failures``, if given, receives by path why directories below, or one of several paths, cannot be read, instead of
    raising it.
    """
    places = []
    for path in paths:
        try:
            found = find(path, storage_options, failures=failures)
        except CheckpointError as error:
            if failures is None or len(paths) == 1 or concerns_others(error, path):
                raise
            failures[path] = error
            continue
        places.append(found)
        if recursive and not found.is_checkpoint:
            places += walk(path, storage_options, failures=failures)
    return places


def _info_of(path: str, storage_options: dict[str, Any] | None) -> CheckpointInfo:
    from ckpt_core.catalog import Catalog

    directory, name = os.path.split(path if is_remote(path) else full_path(path))  # of ".", too
    catalog = Catalog(directory, suffix=name, storage_options=storage_options)
    try:
        for info in catalog.checkpoints():
            if info.name == name:
                return dataclasses.replace(info, path=path)
    except StorageError:
        if is_remote(path):
            raise
        return _unlisted(path)
    raise missing(path)


def _unlisted(path: str) -> CheckpointInfo:
    """Return what is at a local path whose directory this user may enter, but not list."""
    from ckpt_core._pipeline.loading import stamp_of
    from ckpt_core.catalog import CheckpointInfo

    storage, is_directory = storage_for(path), os.path.isdir(path)
    status = os.stat(os.path.join(path, MANIFEST_NAME) if is_directory else path)
    size = sum(file.size for file in storage.list(path)) if is_directory else status.st_size
    info = CheckpointInfo(path, size, status.st_mtime, is_directory, is_pinned=is_pinned(path, storage))
    try:
        stamp = stamp_of(path, storage=storage, is_directory=is_directory)
    except UnsafeCheckpointError:
        return info
    except CheckpointError:
        return dataclasses.replace(info, is_readable=False)
    return dataclasses.replace(info, committed=stamp.committed, step=stamp.step)


def walk(
    path: str,
    storage_options: dict[str, Any] | None,
    *,
    levels: int = 100,
    failures: dict[str, CheckpointError] | None = None,
    above: tuple[str, ...] = (),
) -> Iterator[Found]:
    """Yield what is in each directory below a path or URL that is no checkpoint; ``levels`` says how deep to look.

    ``failures`` is that of :func:`find_all`. A link to one of the directories ``above``, or to what holds it, is left
    out: it would lead round in a circle.
    """
    place = local_path(path).rstrip("/")
    above = (*above, "" if is_remote(place) else os.path.realpath(place))
    for directory in sorted(storage_for(place, storage_options).subdirectories(place)):
        if os.path.basename(directory.rstrip("/")).startswith("."):
            continue
        if not is_remote(place) and any(f"{passed}/".startswith(f"{os.path.realpath(directory)}/") for passed in above):
            continue
        try:
            found = find(directory, storage_options, failures=failures)
        except CheckpointError as error:
            if failures is None:
                raise
            failures[directory] = error
            continue
        if found.is_checkpoint:
            continue
        yield found
        if levels > 1:
            yield from walk(directory, storage_options, levels=levels - 1, failures=failures, above=above)
