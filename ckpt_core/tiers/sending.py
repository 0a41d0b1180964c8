"""Upload of one checkpoint from the local tier to the remote one, or a copy within the store if it is there already."""

from __future__ import annotations

import copy
import functools
import logging
import os
import threading
from collections.abc import Callable

from ckpt_core._commit.rank_group import RankGroup
from ckpt_core._commit.save_outcome import JointSave, SaveSeries
from ckpt_core._layouts.torch_file.opening import read_stamp
from ckpt_core._pipeline.directory_commit import copy_directory, read_manifest
from ckpt_core._pipeline.loading import verify
from ckpt_core.errors import (
    CheckpointCorruptedError,
    CheckpointError,
    CheckpointFormatError,
    CheckpointNotFoundError,
    StorageError,
)
from ckpt_core.process.console import Progress
from ckpt_core.storage.base import transfer
from ckpt_core.storage.claims import Claims
from ckpt_core.storage.counting import counted, counting
from ckpt_core.storage.local import files_of
from ckpt_core.tiers.ledger import Identity, identity_of, read_ledger, write_ledger
from ckpt_core.tiers.nearest import TieredStorage

logger = logging.getLogger(__name__)

_NO_LIMIT = 3600.0  # seconds to wait for other ranks, of which there are none


class _ReplacedError(CheckpointError):
    """The local copy was replaced or removed while it was being read; that save or removal queues its own upload."""


class Sender:
    """Uploads, removes and lists checkpoints of the remote tier, and keeps its ledger."""

    def __init__(self, storage: TieredStorage) -> None:
        self._storage = storage
        self._tiers = storage.tiers
        self._series = SaveSeries(RankGroup.alone())
        self._claims = Claims()
        self._names: dict[str, set[str]] = {}
        self._lock = threading.RLock()  # a signal handler that saves may interrupt a look-up

    def send(self, path: str, say: Callable[[int, int, float], None]) -> int | None:
        """Upload a checkpoint, by its local path, and return its size in bytes; None if there is nothing to upload.

        If it takes long, ``say`` is called repeatedly with the bytes sent, the total bytes, and the seconds so far.
        If it fails, an earlier upload of that name is untouched.
        """
        identity = identity_of(path)
        remote = self._tiers.remote_path(path)
        directory, name = os.path.split(remote)
        known = self._ledger(directory)
        if identity is None or known.get(name) == identity:
            return None
        twins = [twin for twin, other in known.items() if identity.is_copy_of(other) and twin != name]
        if name in known:  # until the upload is complete, it is unknown which checkpoint is there
            self._note(directory, name, None)
        try:
            size = self._copy(f"{directory}/{twins[0]}", remote, identity) if twins else None
            if size is None:
                size = self._upload(path, remote, identity, say)
        except (_ReplacedError, CheckpointNotFoundError, CheckpointCorruptedError):
            if identity_of(path) == identity:
                raise
            return None  # replaced while it was read, so the bytes read may be of two saves
        self._note(directory, name, identity)
        if not self._is_what_is_there(remote, identity):
            logger.warning("another process has written to %s meanwhile: give each run a directory of its own", remote)
            self._note(directory, name, None)
        return size

    def _is_what_is_there(self, remote: str, identity: Identity) -> bool:
        """Return whether the upload is still there, not replaced by another process before it was recorded."""
        there = self._storage.remote
        try:
            if identity.save is not None:
                return read_manifest(there, remote)[1].save_id == identity.save
            with there.open(remote) as reader:
                stamp = read_stamp(reader)
                is_alike = stamp is None or stamp.committed in (None, identity.committed)
                return reader.size == identity.size and is_alike
        except (CheckpointNotFoundError, CheckpointCorruptedError, CheckpointFormatError):
            return False

    def _upload(self, path: str, remote: str, identity: Identity, say: Callable[[int, int, float], None]) -> int:
        there = self._storage.remote
        self._claims.hold(os.path.dirname(remote), there.claim)
        verify(path, storage=self._storage.local)
        total = sum(map(os.path.getsize, files_of(path)))
        with counting(Progress(total, lambda done, seconds: say(done, total, seconds))):
            local = counted(copy.copy(self._storage.local))

        def check() -> None:
            # Otherwise the ledger would record this upload under the identity of another checkpoint.
            if identity_of(path) != identity:
                raise _ReplacedError("the checkpoint was replaced while it was being uploaded", path=path)

        if identity.save is None:
            return transfer(local, path, there, remote, when_open=check)
        joint = JointSave(self._series, remote, timeout=_NO_LIMIT)
        is_alone = functools.partial(self._claims.is_alone, os.path.dirname(remote))
        return copy_directory(there, lambda: (local, path), remote, joint, is_alone=is_alone, before_commit=check)

    def _copy(self, twin: str, remote: str, identity: Identity) -> int | None:
        """Copy within the remote tier a checkpoint that it has under another name; None if that is gone."""
        there = self._storage.remote
        try:
            if identity.save is None:
                return there.copy(twin, remote)
            return copy_directory(
                there, lambda: (there, twin), remote, JointSave(self._series, remote, timeout=_NO_LIMIT)
            )
        except CheckpointNotFoundError:
            return None

    def close(self) -> None:
        """End the claims on the directories of the remote tier."""
        self._claims.release()

    def remove(self, path: str) -> None:
        """Delete a checkpoint from the remote tier."""
        self._storage.remove_upload(path)
        directory, name = os.path.split(self._tiers.remote_path(path))
        with self._lock:
            self._names.get(directory, set()).discard(name)

    def leftovers(self, directory: str, ending: str, names: set[str]) -> list[str]:
        """Return the paths of local checkpoints that were not uploaded since their last save, the newest first.

        Only checkpoints of ``names`` that have the ``ending``, or are directories, are considered.
        """
        remote = self._tiers.remote_path(directory)
        self._storage.remote.remove_orphans(remote)
        known = self._ledger(remote)
        found = []
        for path, identity in self._local(directory):
            name = os.path.basename(path)
            counts = name in names and (identity.save is not None or os.path.splitext(path)[1] == ending)
            if counts and known.get(name) != identity:
                found.append((identity.committed, path))
        return [path for _, path in sorted(found, reverse=True)]

    def evict(self, directory: str, keep: int) -> None:
        """Delete the local copies of all uploaded checkpoints of a directory but the newest ``keep``.

        Hard links of one file count once.
        """
        known = self._ledger(self._tiers.remote_path(directory))
        uploaded = [
            (identity, path)
            for path, identity in self._local(directory)
            if known.get(os.path.basename(path)) == identity
        ]
        # By commit time and inode: whether a name has no digits, as last.ckpt, which is first of equally old copies.
        newest: dict[tuple[float, int], bool] = {}
        for identity, path in uploaded:
            age = (identity.committed, identity.inode)
            newest[age] = newest.get(age, False) or not any(map(str.isdigit, os.path.basename(path)))
        order = sorted(newest, key=lambda age: (age[0], newest[age], age[1]), reverse=True)
        for identity, path in uploaded:
            is_old = (identity.committed, identity.inode) in order[keep:]
            if is_old and identity.is_in(self._storage.remote, self._tiers.remote_path(path)):
                self._storage.local.remove(path)

    def uploaded_in(self, directory: str) -> list[str]:
        """Return the local paths of the checkpoints of a directory that are in the remote tier; lists it only once.

        If the remote tier does not answer, only the checkpoints that this process has uploaded are returned.
        """
        there, remote = self._tiers.remote_path(directory), self._storage.remote
        with self._lock:
            is_known = there in self._names
        if not is_known:
            try:
                found = [*remote.list(there), *remote.list_directories(there)]
            except StorageError as error:
                logger.warning("could not list the checkpoints in %s: %s", there, error)
                found = []
            with self._lock:
                names = self._names.setdefault(there, set())
                names.update(os.path.basename(file.path) for file in found)
        with self._lock:
            return [f"{self._tiers.local_path(directory)}/{name}" for name in sorted(self._names[there])]

    def _local(self, directory: str) -> list[tuple[str, Identity]]:
        local = self._storage.local
        paths = [file.path for file in (*local.list(directory), *local.list_directories(directory))]
        found = [(path, identity_of(path)) for path in paths if not os.path.basename(path).startswith(".")]
        return [(path, identity) for path, identity in found if identity is not None]

    def _ledger(self, directory: str) -> dict[str, Identity]:
        return read_ledger(self._storage.remote, directory)

    def _note(self, directory: str, name: str, identity: Identity | None) -> None:
        # Read again: another process may have uploaded something else meanwhile.
        known = {**self._ledger(directory), name: identity}
        uploads = {each: other for each, other in known.items() if other is not None}
        write_ledger(self._storage.remote, directory, uploads)
        with self._lock:
            if directory in self._names:
                self._names[directory].add(name)
