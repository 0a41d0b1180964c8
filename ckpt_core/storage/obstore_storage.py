"""S3, Azure and GCS through ``obstore``: a tenth of the processor time of fsspec's clients, and no part of Python's lock.

Used only when asked for by ``storage_options={"backend": "obstore"}``. It is not taken by itself where it is installed: its
threads do not survive a fork, it looks for credentials in other places than fsspec's packages, and some servers that those
get along with answer it in ways that it refuses.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from ckpt_core.errors import CheckpointCorruptedError, CheckpointNotFoundError, StorageError
from ckpt_core.parallel import run_parallel
from ckpt_core.storage.base import (
    MANIFEST_NAME,
    REMOTE_REQUEST_BYTES,
    REMOTE_THREADS,
    FileInfo,
    FileReader,
    FileWriter,
    Storage,
)
from ckpt_core.storage.claims import Claim
from ckpt_core.storage.conditional import PROBE_PREFIX, ConditionalStore, create_new
from ckpt_core.storage.credentials import Secrets
from ckpt_core.storage.failures import describer, translated
from ckpt_core.storage.leases import LEASE_PREFIX, Lease, LeaseStore, has_others, remove_dead_leases
from ckpt_core.storage.obstore_options import open_store
from ckpt_core.storage.parts import PART_BYTES

__all__ = ["ObstoreStorage"]

Result = TypeVar("Result")

_READ_BYTES = 8 * 2**20  # of one request
_READS_UNDER_WAY = 4  # of one call
_PARTS_UNDER_WAY = 6
_PROTOCOLS = {"s3": "s3", "s3a": "s3", "abfs": "az", "abfss": "az", "az": "az", "adl": "az", "gs": "gs", "gcs": "gs"}

# The process whose threads obstore's are.
_process: int | None = None
# Stores by bucket and options, each with the connections it keeps, and what is known of its server.
_stores: dict[tuple[str, str], tuple[Any, dict[str, bool]]] = {}


class _ObstoreWriter(FileWriter):
    """Uploads parts from a few buffers of its own; takes them in order."""

    def __init__(self, storage: ObstoreStorage, path: str) -> None:
        import obstore

        self._storage = storage
        self._path = path
        self._obstore = obstore
        self._file: Any = None
        self._slots: list[tuple[bytearray, memoryview | None]] = []
        self._slot = bytearray()
        self._filled = 0
        self._position = 0

    def write_at(self, offset: int, data: memoryview) -> None:
        assert offset == self._position
        self._position += len(data)
        while data:
            if self._filled == PART_BYTES:
                self._send()
            if not self._slot:
                self._slot = self._free_slot()
            piece = data[: PART_BYTES - self._filled]
            begin, self._filled = self._filled, self._filled + len(piece)
            np.copyto(np.frombuffer(self._slot, np.uint8)[begin : self._filled], np.frombuffer(piece, np.uint8))
            data = data[len(piece) :]

    def _free_slot(self) -> bytearray:
        for index, (slot, view) in enumerate(self._slots):
            if _is_released(view):
                del self._slots[index]
                return slot
        return bytearray(PART_BYTES)

    def _send(self) -> None:
        # obstore goes on reading from what it was given after write() has returned: until it has released the view.
        view = memoryview(self._slot)[: self._filled]
        self._slots.append((self._slot, view))
        self._slot, self._filled = bytearray(), 0

        def request() -> None:
            if self._file is None:
                self._file = self._obstore.open_writer(
                    self._storage.store,
                    self._storage.key(self._path),
                    buffer_size=PART_BYTES,
                    max_concurrency=_PARTS_UNDER_WAY,
                )
            self._file.write(view)

        self._storage.ask("write", self._path, request)

    def commit(self, size: int) -> None:
        self._filled -= self._position - size
        if self._file is None:
            last = memoryview(self._slot)[: self._filled]
            self._storage.ask(
                "commit",
                self._path,
                lambda: self._obstore.put(
                    self._storage.store, self._storage.key(self._path), last, use_multipart=False
                ),
            )
        else:
            self._send()
            self._storage.ask("commit", self._path, self._file.close)
        self._forget()

    def abort(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            error = RuntimeError("the upload was abandoned")
            file.__exit__(type(error), error, None)
        self._forget()

    def _forget(self) -> None:
        self._file = None
        self._slots.clear()
        self._slot = bytearray()


def _is_released(view: memoryview | None) -> bool:
    if view is None:
        return True
    try:
        view.release()
    except BufferError:
        return False
    return True


class _ObstoreReader(FileReader):
    request_bytes = REMOTE_REQUEST_BYTES
    threads = REMOTE_THREADS

    def __init__(self, storage: ObstoreStorage, path: str) -> None:
        import obstore

        self.path = path
        self._storage = storage
        self._get_range = obstore.get_range
        self.size = int(storage.ask("read", path, lambda: obstore.head(storage.store, storage.key(path)))["size"])

    def read_into(self, offset: int, target: memoryview) -> None:
        begins = range(0, len(target), _READ_BYTES)
        run_parallel(
            lambda begin: self._read(offset + begin, target[begin : begin + _READ_BYTES]),
            begins,
            threads=max(1, min(_READS_UNDER_WAY, len(begins))),
        )

    def _read(self, offset: int, target: memoryview) -> None:
        if offset + len(target) > self.size:
            raise CheckpointCorruptedError("the checkpoint is truncated", path=self.path)
        data = self._storage.ask(
            "read",
            self.path,
            lambda: self._get_range(
                self._storage.store, self._storage.key(self.path), start=offset, length=len(target)
            ),
        )
        if len(data) != len(target):
            raise CheckpointCorruptedError("the checkpoint is truncated", path=self.path)
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(memoryview(data), np.uint8))

    def close(self) -> None:
        """Nothing is held open."""


class ObstoreStorage(Storage, ConditionalStore, LeaseStore):
    """A bucket reached through ``obstore``.

    Args:
        url: Any URL in the bucket: ``s3://``, ``abfs://`` or ``gs://``.
        storage_options: As for fsspec's packages (``endpoint_url``, ``key``, ``secret``, ``connection_string``,
            ``account_name``, ...), or by obstore's own names. They show in no error, log or ``repr``.

    Raises:
        StorageError: ``obstore`` is not installed, does not know the URL, or the options do not fit.
    """

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None = None) -> None:
        self._url = url
        self._options = dict(storage_options or {})
        self._secrets = Secrets(self._options)
        _refuse_fork(url)
        scheme, _, rest = url.partition("://")
        self._root = f"{scheme}://{rest.partition('/')[0]}/"
        protocol = _PROTOCOLS.get(scheme)
        if protocol is None:
            raise StorageError(
                f"obstore does not know {scheme}://", path=url, remedy='leave out storage_options["backend"]'
            )
        identity = (self._root, repr(sorted(self._options.items())))
        try:
            with translated(describer(self._secrets, "open", url)):
                if identity not in _stores:
                    _stores[identity] = open_store(protocol, rest.partition("/")[0], self._options), {}
            self.store, self.honours_conditions = _stores[identity]
        except ImportError as error:
            install = "pip install 'ckpt-plugins[obstore]', or leave out storage_options['backend']"
            raise StorageError("the package obstore is not installed", path=url, remedy=install) from error

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._url, self._options)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._secrets.hide(self._root)!r})"

    def key(self, path: str) -> str:
        """Return the name in the bucket of the object at ``path``."""
        return path.partition("://")[2].partition("/")[2].strip("/")

    def create(self, path: str, expected_size: int) -> FileWriter:
        return _ObstoreWriter(self, path)

    def open(self, path: str) -> FileReader:
        return _ObstoreReader(self, path)

    def exists(self, path: str) -> bool:
        return self._is_object(path) or bool(self._below(path))

    def _is_object(self, path: str) -> bool:
        import obstore

        try:
            self.ask("find", path, lambda: obstore.head(self.store, self.key(path)))
        except CheckpointNotFoundError:
            return False
        return True

    def _below(self, path: str) -> list[str]:
        import obstore

        pages = self.ask("list", path, lambda: list(obstore.list(self.store, self.key(path) or None)))
        return [entry["path"] for page in pages for entry in page]

    def remove(self, path: str) -> None:
        import obstore

        names = [*self._below(path), *([self.key(path)] if self._is_object(path) else [])]
        try:
            self.ask("remove", path, lambda: obstore.delete(self.store, names))
        except CheckpointNotFoundError:
            return  # by somebody else

    def copy(self, source: str, target: str) -> int:
        import obstore

        if source != target:  # S3 refuses to copy an object to itself
            self.ask("copy", target, lambda: obstore.copy(self.store, self.key(source), self.key(target)))
        return int(self.ask("copy", target, lambda: obstore.head(self.store, self.key(target)))["size"])

    def list(self, directory: str) -> Sequence[FileInfo]:
        return [
            FileInfo(self._root + entry["path"], int(entry["size"]), entry["last_modified"].timestamp())
            for entry in self._listing(directory)["objects"]
            if not entry["path"].rpartition("/")[2].startswith((PROBE_PREFIX, LEASE_PREFIX))
        ]

    def hidden_objects(self, directory: str, prefix: str) -> Sequence[FileInfo]:
        return [
            FileInfo(self._root + entry["path"], int(entry["size"]), entry["last_modified"].timestamp())
            for entry in self._listing(directory)["objects"]
            if entry["path"].rpartition("/")[2].startswith(prefix)
        ]

    def subdirectories(self, directory: str) -> Sequence[str]:
        return [self._root + name.rstrip("/") for name in self._listing(directory)["common_prefixes"]]

    def _listing(self, directory: str) -> Any:
        import obstore

        return self.ask("list", directory, lambda: obstore.list_with_delimiter(self.store, self.key(directory) or None))

    def remove_orphans(self, directory: str) -> Sequence[str]:
        """Delete leases of dead processes; obstore cannot list unfinished uploads, which the default backend finds."""
        remove_dead_leases(self, directory)
        return []

    def claim(self, directory: str) -> Claim | None:
        return Lease(self, directory)

    def remove_directory(self, path: str, *, names: Collection[str] = ()) -> None:
        import obstore

        self.remove(f"{path}/{MANIFEST_NAME}")
        found = set(self._below(path))
        # In this order: whoever has written what was found has said before that they are there.
        if has_others(self, path.rpartition("/")[0]):
            found &= {self.key(f"{path}/{name}") for name in names}
        try:
            self.ask("remove", path, lambda: obstore.delete(self.store, sorted(found)))
        except CheckpointNotFoundError:
            return  # by somebody else

    # ---- objects that only one writer may make -----------------------------------------------------------------------

    def create_new(self, path: str, data: bytes) -> bool:
        """Make ``path`` a small object unless there is one; see :func:`ckpt_core.storage.conditional.create_new`."""
        return create_new(self, path, data)

    def put_new(self, path: str, data: bytes) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError

        def request() -> bool:
            try:
                obstore.put(self.store, self.key(path), data, mode="create")
            except AlreadyExistsError:
                return False
            return True

        return self.ask("write", path, request)

    def put(self, path: str, data: bytes) -> None:
        import obstore

        self.ask("write", path, lambda: obstore.put(self.store, self.key(path), data, use_multipart=False))

    def get(self, path: str) -> bytes | None:
        import obstore

        try:
            return self.ask("read", path, lambda: bytes(obstore.get(self.store, self.key(path)).bytes()))
        except CheckpointNotFoundError:
            return None

    def delete(self, path: str) -> None:
        import obstore

        self.ask("remove", path, lambda: obstore.delete(self.store, self.key(path)))

    # ---- requests ----------------------------------------------------------------------------------------------------

    def ask(self, action: str, path: str, request: Callable[[], Result]) -> Result:
        """Return what ``request`` returns; obstore repeats by itself what fails for the moment."""
        _refuse_fork(path)
        with translated(describer(self._secrets, action, path)):
            return request()


def _refuse_fork(path: str) -> None:
    global _process  # noqa: PLW0603 - a fact about the process
    if _process is None:
        _process = os.getpid()
    elif _process != os.getpid():
        raise StorageError(
            "obstore does not work in a forked process: its threads stayed behind",
            path=path,
            remedy='start processes by spawn, or leave out storage_options["backend"]',
        )
