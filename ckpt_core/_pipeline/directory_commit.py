"""Commits directory checkpoints: publishes, copies, reads the previous one, and deletes what a failed save left."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from ckpt_core._commit.save_outcome import JointSave
from ckpt_core._layouts.directory.manifest import ExtraFile, Manifest, encode_manifest
from ckpt_core.commit_time import Stamp
from ckpt_core.errors import CheckpointError, CheckpointNotFoundError, StorageError
from ckpt_core.storage import MANIFEST_NAME, Storage, is_remote
from ckpt_core.storage.base import transfer

_LISTING_SECONDS = 10.0  # a network filesystem may take that long to list what another machine has written
logger = logging.getLogger(__name__)

_TOKEN = re.compile(r"-[0-9a-f]{12}-\d+-\d+$")  # the token of one save or copy, at the end of a file's stem

# ---- what is at a path before a save ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Previous:
    """The checkpoint that is at a path before a save."""

    exists: bool  # whether there is one
    files: Collection[str] = ()  # names of its own files
    extra: Mapping[str, ExtraFile] = dataclasses.field(default_factory=dict)  # files that the caller added, by name


NOTHING = Previous(exists=False)


def read_manifest(storage: Storage, path: str) -> tuple[bytes, Manifest]:
    """Return the manifest of the checkpoint at ``path``: its bytes, and the decoded manifest."""
    with storage.open(f"{path}/{MANIFEST_NAME}") as reader:
        data = reader.read_whole()
    return data, Manifest.decode(data, path=path)


def files_of(manifest: Manifest) -> tuple[set[str], dict[str, ExtraFile]]:
    """Return the names of a checkpoint's own files, and the files that the caller added, by name."""
    own = {file.name for rank in manifest.ranks for file in rank.files}
    own |= {rank.digests.name for rank in manifest.ranks if rank.digests is not None}
    return own, {file.name: file for rank in manifest.ranks for file in rank.extra_files}


def names_of_files(storage: Storage, path: str) -> set[str]:
    """Return the names of all files of the checkpoint at ``path``; none if its manifest cannot be read."""
    try:
        own, extra = files_of(read_manifest(storage, path)[1])
    except CheckpointError:
        return set()
    return {*own, *extra}


def previous_at(storage: Storage, path: str) -> Previous:
    """Return the checkpoint at ``path``; raise only if an object store cannot tell whether there is one."""
    try:
        _, manifest = read_manifest(storage, path)
    except CheckpointNotFoundError:
        return NOTHING
    except StorageError:
        if is_remote(path):
            raise
        return NOTHING  # a file, or an unreadable directory: if it cannot be replaced, the commit will raise
    except CheckpointError:
        return Previous(exists=True)  # damaged, or written by another program: no file there is known to be ours
    return Previous(True, *files_of(manifest))


def unchangeable(name: str, path: str) -> StorageError:
    """Return the error for a caller's file that would have to change at the same moment as the manifest."""
    return StorageError(
        f"{name!r} has changed and cannot be replaced together with the rest of the checkpoint",
        path=path,
        key=name,
        remedy="on an object store, save to a path of its own each time",
    )


def not_alone(name: str, path: str) -> StorageError:
    """Return the error for a caller's file when another job may be writing a file of the same name."""
    return StorageError(
        f"another job saves into the same directory, and could overwrite {name!r}, which has the same name in all "
        "checkpoints",
        path=path,
        key=name,
        remedy="end one of the two jobs, or give it a directory of its own",
    )


# ---- what a failed save leaves ---------------------------------------------------------------------------------------


def discard(storage: Storage, path: str, token: str, created: Sequence[str]) -> None:
    """Delete the files that a failed save has created; a failure to delete is logged.

    Files in the manifest at ``path`` stay: the store may have committed the save, and only its reply was lost.
    """
    try:
        previous = previous_at(storage, path)
        names = [name for name in created if name not in previous.files and name not in previous.extra]
        storage.discard_directory(path, token, names)
    except CheckpointError as error:
        logger.warning("could not delete what a failed save of %s has left: %s", path, error)


def leave(storage: Storage, path: str, token: str) -> None:
    """End what ``begin_directory`` began in this process, and clean up after it; a failure is logged."""
    try:
        storage.leave_directory(path, token)
    except CheckpointError as error:
        logger.warning("could not clean up after the save of %s: %s", path, error)


# ---- copies ----------------------------------------------------------------------------------------------------------


def copy_directory(
    storage: Storage,
    find_source: Callable[[], tuple[Storage, str]],
    target: str,
    joint: JointSave,
    *,
    is_alone: Callable[[], bool] = lambda: True,
    before_commit: Callable[[], None] = lambda: None,
) -> int:
    """Make ``target`` a copy of a checkpoint, and return its size in bytes; called by all ranks.

    Rank 0 copies; the others learn the outcome. On rank 0, ``find_source`` returns the storage that has the checkpoint
    and its path, or raises; ``is_alone`` returns whether no other job may be writing files of the same names in the
    target's directory; ``before_commit`` is called when all files are copied; if it raises, no checkpoint appears.
    """
    joint.join()
    created: list[str] = []

    def commit(_: Sequence[str | None]) -> int:
        origin, source = find_source()
        try:
            manifest, content = read_manifest(origin, source)
        except CheckpointNotFoundError as error:
            raise CheckpointNotFoundError("there is no checkpoint to copy", path=source) from error
        own, extra = files_of(content)
        directory = storage.begin_directory(target, joint.token)
        previous = previous_at(storage, target)
        new_names = {name: name for name in sorted({*own, *extra})}
        has_place = directory != target or is_alone()
        if extra and not has_place:
            raise not_alone(next(iter(extra)), target)
        if directory == target and (previous.exists or not has_place):
            new_names.update({name: _suffixed(name, joint.token) for name in own})
            manifest = _renamed(manifest, new_names)
            changed = [name for name, file in extra.items() if previous.extra.get(name, file) != file]
            if changed:
                raise unchangeable(changed[0], target)
        size = len(manifest)
        for name, new_name in new_names.items():
            if name in extra and name in previous.extra and directory == target:
                size += extra[name].size
                continue
            created.append(new_name)
            old_path, new_path = f"{source}/{name}", f"{directory}/{new_name}"
            size += (
                storage.copy(old_path, new_path) if origin is storage else transfer(origin, old_path, storage, new_path)
            )
        kept = set(new_names.values())
        gone = [name for name in (*previous.files, *previous.extra) if has_place and name not in kept]
        before_commit()
        storage.publish_directory(target, joint.token, manifest, gone=gone)
        return size

    is_there = False
    try:
        size = joint.conclude("", commit)
        is_there = True
    finally:  # also at Ctrl-C
        if not is_there and joint.group.rank == 0:
            discard(storage, target, joint.token, created)
        leave(storage, target, joint.token)
    return size


def has_suffix(name: str) -> bool:
    """Return whether a file's name ends with the token of one save, so that no other save writes that name."""
    return _TOKEN.search(name.rpartition(".")[0]) is not None


def _suffixed(name: str, token: str) -> str:
    stem, _, ending = name.rpartition(".")
    return f"{_TOKEN.sub('', stem)}-{token}.{ending}"


def _renamed(manifest: bytes, new_names: Mapping[str, str]) -> bytes:
    """Return the same manifest with its files renamed."""
    document = json.loads(manifest)
    for rank in document["ranks"]:
        for file in (*rank["files"], *([] if rank["digests"] is None else [rank["digests"]])):
            file[0] = new_names[file[0]]
    compact = functools.partial(json.dumps, separators=(",", ":"))
    return encode_manifest(
        save_id=document["save"],
        metadata=document["metadata"],
        kinds=document["kinds"],
        parts=compact(document["parts"]),
        ranks=list(map(compact, document["ranks"])),
        stamp=Stamp.read(manifest),
    )


@contextlib.contextmanager
def errors_name(path: str, *, written_to: str) -> Iterator[None]:
    """Change the paths in errors from the temporary directory ``written_to`` to ``path``, which the user knows."""
    try:
        yield
    except CheckpointError as error:
        if error.path is not None and error.path.startswith(written_to):
            error.path = path + error.path[len(written_to) :]
        raise


def publish(
    storage: Storage,
    path: str,
    token: str,
    manifest: bytes,
    sizes: Mapping[str, int],
    *,
    written_to: str,
    added: Collection[str] = (),
    keeps_old: bool = False,
    is_shared: bool = True,
) -> None:
    """Publish the files written for a save as the checkpoint at ``path``, replacing the previous one.

    ``sizes`` are the sizes of the files that the ranks wrote to ``written_to``, by name; ``added`` are the names of the
    caller's files. With ``keeps_old``, files of the previous checkpoint are not deleted. With ``is_shared``, other
    processes, maybe on other machines, wrote some of the files, and this one first waits until it sees all of them.
    """
    if is_shared:
        wait_for_files(storage, written_to, sizes, path)
    previous = previous_at(storage, path)
    old = [name for name in (*previous.files, *previous.extra) if name not in sizes and name not in added]
    storage.publish_directory(path, token, manifest, gone=[] if keeps_old else old)


def wait_for_files(storage: Storage, directory: str, sizes: Mapping[str, int], path: str) -> None:
    """Wait until this process sees all files, with these sizes, that other ranks have written.

    Raises a ``StorageError`` after 10 seconds: the files are probably on the local disk of another machine.
    """
    deadline = time.monotonic() + _LISTING_SECONDS
    while True:
        found = {os.path.basename(file.path): file.size for file in storage.list(directory)}
        missing = sorted(name for name, size in sizes.items() if found.get(name) != size)
        if not missing:
            return
        if time.monotonic() > deadline:
            raise StorageError(
                f"the process that commits does not see {len(missing)} of {len(sizes)} files that the others have "
                f"written, such as {missing[0]!r}",
                path=path,
                remedy="save to a directory that all machines share",
            )
        time.sleep(0.1)
