"""Find the checkpoints at the paths of the command line, and refuse targets that must not be overwritten."""

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

_ENDING = ".ckpt"  # ending of files that count as checkpoints if a directory is given
_LEVELS_OF_A_HINT = 2
_DIRECTORIES_OF_A_HINT = 500  # each takes several requests to a store
_STATES: dict[type[CheckpointError], str] = {
    CheckpointCorruptedError: "DAMAGED",
    CheckpointNotFoundError: "MISSING",
    CheckpointFormatError: "FOREIGN",
}


def state_of_error(error: CheckpointError) -> str:
    """Return the state, such as ``"DAMAGED"``, of a checkpoint that cannot be read because of an error."""
    return _STATES.get(type(error), "ERROR")


def state_of(
    info: CheckpointInfo,
    storage_options: dict[str, Any] | None,
    *,
    failures: dict[str, CheckpointError] | None = None,
) -> str:
    """Return a checkpoint's state as ``ckpt verify`` names it, judging by the manifest only.

    ``failures``, if given, receives by path the errors (state ``"ERROR"``) that leave the real state unknown.
    """
    from ckpt_core._pipeline.loading import stamp_of

    try:
        if info.path.endswith(".safetensors") and not info.is_directory:  # only if it was given as a path itself
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
    """Result of :func:`find`: the checkpoints at a path."""

    path: str  # as it was given
    # The checkpoint at the path; or those directly in the directory, newest first.
    checkpoints: list[CheckpointInfo]
    others: int = 0  # number of other files directly in the directory
    # Whether the path itself is a checkpoint or any other file, rather than a directory of checkpoints.
    is_checkpoint: bool = False
    size: int = 0  # bytes of the files directly in the directory, if there is no checkpoint

    def hint(self, storage_options: dict[str, Any] | None, verb: str = "ls") -> str:
        """Return a text why there are no checkpoints, and where some are; ``verb`` is a verb that finds them."""
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
        """Return a text about another program's checkpoint at the path; None if there is none."""
        if self.checkpoints:
            return None
        try:
            found = find_foreign(self.path, storage_options)
        except CheckpointError as error:
            return f"{self.path}: {error.message}"
        return None if found is None else f"{self.path} is {found.what}: see ckpt inspect, verify, convert"


def no_checkpoint(found: Found, storage_options: dict[str, Any] | None) -> CheckpointFormatError:
    """Return the error for a directory that was given where a checkpoint is needed."""
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
    """Raise if a checkpoint, or any other file, was given where a directory of checkpoints is needed."""
    if found.is_checkpoint:
        raise CheckpointError(
            "this is a checkpoint, not a directory of them",
            path=found.path,
            remedy=f"ckpt {verb} {os.path.dirname(found.path.rstrip('/')) or '.'}",
        )


def refuse_itself(source: str, target: str) -> None:
    """Refuse a target (both are full paths) that is the source, also by a symbolic link; hard links are two files."""
    is_same = source == target
    if not is_same and not (is_remote(source) or is_remote(target)) and os.path.exists(source):
        is_same = os.path.realpath(source) == os.path.realpath(target)
        if not is_same and os.path.exists(target):
            is_same = os.path.samefile(source, target) and (os.path.isdir(source) or os.stat(source).st_nlink == 1)
    if is_same:
        raise StorageError("source and target are the same", path=target, remedy="give another target")


def refuse_other_data(path: str, storage_options: dict[str, Any] | None, *, force: bool) -> None:
    """Refuse a target that exists (with ``force``, only if it is not a checkpoint), or whose bucket does not exist."""
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
    if not found.is_checkpoint or not found.checkpoints[0].size:  # an empty file, such as mktemp creates
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
    """Refuse to write into a checkpoint, because its deletion, by ``mv`` or retention, would delete all files in it.

    ``checked`` holds directories that are known to be in no checkpoint; the checked directories are added to it.

    Raises:
        StorageError: The directory is a checkpoint or inside one; or the manifest in it cannot be read.
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
            return  # for example, above the prefix for which the credentials are valid
        if is_checkpoint:
            raise StorageError(
                "the target is inside a checkpoint, and would be deleted with it",
                path=path,
                remedy="name a directory of checkpoints as the target",
            )
        checked.add(path)
        path = path.rpartition("/")[0] if is_remote(path) else os.path.dirname(path)


def refuse_target_inside_checkpoint(target: str, storage_options: dict[str, Any] | None) -> None:
    """Refuse a target whose parent directory is a checkpoint, or inside one."""
    place = full_path(target).rstrip("/")
    parent = place.rpartition("/")[0] if is_remote(place) else os.path.dirname(place)
    if is_remote(parent) or not is_remote(place):  # a bucket has no parent
        refuse_inside_checkpoint(parent, storage_options)


def _has_own_manifest(storage: Storage, path: str) -> bool:
    """Return whether a directory has a manifest of ours, of any version, rather than another program's file."""
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
    """Return the error for a path that does not exist."""
    remedy = "check the path"
    if "://" in path:
        remedy += f"; for a store, also {STORE_OPTIONS}"
    elif os.path.islink(path):
        remedy = f"it is a link to {os.readlink(path)}, where nothing is: make or mount that, or delete the link"
    return CheckpointNotFoundError(f"there is no such file, directory or bucket: {path}", path=path, remedy=remedy)


def find(
    path: str, storage_options: dict[str, Any] | None, *, failures: dict[str, CheckpointError] | None = None
) -> Found:
    """Return the checkpoint at a path or URL, or the checkpoints directly in a directory.

    ``failures`` is as for :func:`find_all`.
    """
    from ckpt_core.catalog import Catalog
    from ckpt_core.process.awaited_paths import wait_for_saves

    place = local_path(path)
    place = place.rstrip("/") or place
    wait_for_saves(place)  # for programs that run the command in their own process
    storage = storage_for(place, storage_options)
    is_file = not is_remote(place) and os.path.isfile(place)
    if is_file or is_directory_checkpoint(storage, place):
        return Found(path, [_info_of(place, storage_options)], is_checkpoint=True)
    catalog = Catalog(place, suffix="", storage_options=storage_options)
    found = _read_of(catalog.checkpoints(files=_ENDING), storage, failures)  # do not read other files of a project
    kept = [info for info in found if info.is_directory or info.path.endswith(_ENDING)]
    if not found:
        if is_remote(place) and "/" in place.partition("://")[2]:
            try:
                return Found(path, [_info_of(place, storage_options)], is_checkpoint=True)
            except CheckpointNotFoundError:
                pass  # not a file, either
        # Locally, existence is not enough: a pipe, a device or a dangling link exists, too.
        is_there = storage.exists(place) or storage.subdirectories(place) if is_remote(place) else os.path.isdir(place)
        if not is_there:
            raise missing(path)
    return Found(path, kept, others=len(found) - len(kept), size=0 if kept else sum(info.size for info in found))


def _read_of(
    infos: Iterable[CheckpointInfo], storage: Storage, failures: dict[str, CheckpointError] | None
) -> list[CheckpointInfo]:
    """Return the checkpoints without directories that this user may not read; ``failures`` as for :func:`find_all`."""
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
    """Return whether a checkpoint still exists: the run's retention may have deleted it."""
    try:
        return find(path, storage_options).is_checkpoint
    except CheckpointNotFoundError:
        return False


def find_foreign(path: str, storage_options: dict[str, Any] | None) -> Foreign | None:
    """Return another program's checkpoint at a path; None if there is none, or it is a plain torch file."""
    place = local_path(path).rstrip("/")
    is_file = not is_remote(place) and os.path.isfile(place)
    storage = storage_for(place, storage_options)
    if (is_file and not place.endswith(".safetensors")) or is_directory_checkpoint(storage, place):
        return None
    from ckpt_core.interchange import recognize  # it takes a second to import

    return recognize(place, storage_options=storage_options)


def size_at(path: str, storage_options: dict[str, Any] | None) -> int:
    """Return the bytes of a checkpoint of this or another program, at a path or URL."""
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


def is_store_error(error: CheckpointError, path: str) -> bool:
    """Return whether an error at one of several paths will also occur at the others: an error of an object store."""
    return isinstance(error, StorageError) and is_remote(path)


def find_all(
    paths: Sequence[str],
    storage_options: dict[str, Any] | None,
    *,
    recursive: bool = False,
    failures: dict[str, CheckpointError] | None = None,
) -> list[Found]:
    """Find the checkpoints at several paths or URLs and, with ``recursive``, in the directories below them.

    ``failures``, if given, receives errors by path, of directories below or of one of several paths, which otherwise
    are raised.
    """
    places = []
    for path in paths:
        try:
            found = find(path, storage_options, failures=failures)
        except CheckpointError as error:
            if failures is None or len(paths) == 1 or is_store_error(error, path):
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
    """Return the checkpoint at a local path whose parent directory this user may enter, but not list."""
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
    """Yield what is found in each directory below a path or URL, except checkpoints, up to ``levels`` deep.

    ``failures`` is as for :func:`find_all`. Links to a directory in ``above`` or to one of its parents are skipped,
    because they would lead into an endless loop.
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
