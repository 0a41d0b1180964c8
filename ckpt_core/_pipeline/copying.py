"""One checkpoint to another path, without writing its bytes again."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence

from ckpt_core._commit import JointSave
from ckpt_core._layouts.sharded.manifest import encode_manifest
from ckpt_core._pipeline.cleaning import discard, leave
from ckpt_core._pipeline.previous import files_of, not_alone, previous_at, read_manifest, unchangeable
from ckpt_core.commit_time import Stamp
from ckpt_core.errors import CheckpointError, CheckpointNotFoundError
from ckpt_core.storage import Storage
from ckpt_core.storage.base import transfer

__all__ = ["copy_directory"]

_TOKEN = re.compile(r"-[0-9a-f]{12}-\d+-\d+$")  # of an earlier save or copy in the same place


def copy_directory(
    storage: Storage,
    source: str,
    target: str,
    joint: JointSave,
    *,
    is_alone: Callable[[], bool] = lambda: True,
    origin: Storage | None = None,
    before_commit: Callable[[], None] = lambda: None,
) -> int:
    """Make ``target`` a copy of the checkpoint ``source``, and return its size in bytes; called by all ranks.

    Rank 0 does it; the others learn the outcome.

    Args:
        storage: Where ``target`` goes.
        source: The checkpoint to copy.
        target: The other path.
        joint: What the ranks have in common.
        is_alone: Whether no other job may be writing files of the same names in the same place.
        origin: Where ``source`` is, if it is in another storage.
        before_commit: Called when all files are there; if it raises, no checkpoint appears.

    Raises:
        CheckpointError: There is no ``source``, or the storage refused; the same on all ranks.
    """
    joint.join()
    created: list[str] = []

    def commit(_: Sequence[str | None]) -> int:
        try:
            manifest, content = read_manifest(origin or storage, source)
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
                storage.copy(old_path, new_path) if origin is None else transfer(origin, old_path, storage, new_path)
            )
        kept = set(new_names.values())
        gone = [name for name in (*previous.files, *previous.extra) if has_place and name not in kept]
        before_commit()
        storage.publish_directory(target, joint.token, manifest, gone=gone)
        return size

    size, failure = 0, None
    try:
        size = joint.conclude("", commit)
    except CheckpointError as error:
        failure = error
    if failure is not None and joint.group.rank == 0:
        discard(storage, target, joint.token, created)
    leave(storage, target, joint.token)
    if failure is not None:
        raise failure
    return size


def _suffixed(name: str, token: str) -> str:
    stem, _, ending = name.rpartition(".")
    return f"{_TOKEN.sub('', stem)}-{token}.{ending}"


def _renamed(manifest: bytes, new_names: Mapping[str, str]) -> bytes:
    """Return the manifest of the same content in files of other names."""
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
        version=document["version"],
        stamp=Stamp.read(manifest),
    )
