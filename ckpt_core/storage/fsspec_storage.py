"""Storage on any store that fsspec supports (``s3://``, ``abfs://``, ``gs://``, ``memory://``, ...)."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import errno
import logging
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TypeVar

import fsspec
import fsspec.asyn

from ckpt_core.errors import CheckpointCorruptedError, CheckpointNotFoundError, StorageError
from ckpt_core.process.threads import run_parallel
from ckpt_core.storage.base import (
    MANIFEST_NAME,
    REMOTE_REQUEST_BYTES,
    REMOTE_THREADS,
    Claim,
    FileInfo,
    FileReader,
    FileWriter,
    Storage,
    divide_into,
)
from ckpt_core.storage.failures import Describe, Secrets, describer, translated
from ckpt_core.storage.lease import LEASE_PREFIX, Lease, has_others, remove_dead_leases
from ckpt_core.storage.obstore_choice import PROBE_PREFIX, KnownClients, ObstoreChoice
from ckpt_core.storage.obstore_client import OBSTORE_OPTIONS
from ckpt_core.storage.retry import Retries, report_silence
from ckpt_core.storage.s3_settings import s3_defaults
from ckpt_core.storage.uploads import (
    ObstoreWriter,
    S3Writer,
    StreamWriter,
    WholeObjectWriter,
    abandoned_uploads,
    uploads_begun,
)

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_READ_BYTES = 16 * 2**20  # per request
_REQUESTS_UNDER_WAY = 4  # per call
_S3 = ("s3", "s3a")
_AZURE = ("abfs", "abfss", "az", "adl")
_GCS = ("gs", "gcs")
_OBJECT_STORES = {"s3": _S3, "az": _AZURE, "gs": _GCS}
_NOT_LISTED = (PROBE_PREFIX, LEASE_PREFIX)
_EXTRAS = {**dict.fromkeys(_S3, "s3"), **dict.fromkeys(_AZURE, "azure"), **dict.fromkeys(_GCS, "gcs")}


class _Shared:
    """State that all storages of one fsspec filesystem share: the retries, and what is known about the server."""

    def __init__(self, protocol: str) -> None:
        # gcsfs itself makes six attempts, which take half a minute, and this cannot be configured.
        self.retries = Retries(first_attempts=1) if protocol in _GCS else Retries()
        self.clients: KnownClients = {}


_SHARED: weakref.WeakKeyDictionary[Any, _Shared] = weakref.WeakKeyDictionary()


def _open_filesystem(url: str, options: dict[str, Any], secrets: Secrets) -> Any:
    protocol = url.partition("://")[0]
    with_defaults = s3_defaults(options) if protocol in _S3 else options
    describe = describer(secrets, "open", url)
    with translated(describe), report_silence(describe):
        try:
            filesystem, _ = fsspec.core.url_to_fs(url, **with_defaults)
        except ImportError as error:
            extra = _EXTRAS.get(protocol)
            install = (
                f"in a clone of ckpt-plugins, pip install '.[{extra}]'"
                if extra
                else f"install what fsspec asks for: {error}"
            )
            raise StorageError(f"the package for {protocol}:// is not installed", path=url, remedy=install) from error
    if protocol in _S3:
        filesystem.retries = 1  # our own retries replace those of s3fs
    return filesystem


class _FsspecReader(FileReader):
    request_bytes = REMOTE_REQUEST_BYTES
    threads = REMOTE_THREADS

    def __init__(self, storage: FsspecStorage, path: str) -> None:
        self.path = path
        self._storage = storage
        info = storage.info(path)
        if info["type"] == "directory":
            raise StorageError("the path is a directory, not a checkpoint file", path=path, errno=errno.EISDIR)
        if info["size"] is None:
            raise StorageError(
                "the server does not report the size of the file",
                path=path,
                remedy="download it, or have the server send Content-Length",
            )
        self.size = int(info["size"])
        self._whole: memoryview | None = None

    def read_into(self, offset: int, target: memoryview) -> None:
        if self._whole is None and len(target) > _READ_BYTES:
            begins = range(0, len(target), _READ_BYTES)
            run_parallel(
                lambda begin: self._read(offset + begin, [target[begin : begin + _READ_BYTES]]),
                begins,
                threads=min(_REQUESTS_UNDER_WAY, len(begins)),
            )
        elif target:
            self._read(offset, [target])

    def read_parts(self, offset: int, targets: Sequence[memoryview]) -> None:
        if 0 < sum(map(len, targets)) <= 2 * _READ_BYTES:
            self._read(offset, targets)
        else:
            super().read_parts(offset, targets)

    def _read(self, offset: int, targets: Sequence[memoryview]) -> None:
        end = offset + sum(map(len, targets))
        if end > self.size:
            raise CheckpointCorruptedError("the checkpoint is truncated", path=self.path)
        if self._whole is None:
            failure = self._storage.obstore.read(self.path, offset, targets)
            if failure is None:
                return
            data = self._fetch(offset, end)  # raises if fsspec's client fails, too: then it is not obstore's fault
            self._storage.obstore.avoid(self.path, failure)
        else:
            data = self._whole[offset:end]
        if len(data) != end - offset:
            raise CheckpointCorruptedError("the checkpoint is truncated", path=self.path)
        divide_into(data, targets)

    def _fetch(self, begin: int, end: int) -> memoryview:
        data = memoryview(self._storage.fetch(self.path, begin, end))
        if len(data) == self.size and (end - begin < self.size or self.size <= REMOTE_REQUEST_BYTES):
            # An HTTP server without range requests always sends the whole file: keep it, so that it is sent once. A
            # small file is kept, too.
            self._whole = data
            return data[begin:end]
        return data

    def close(self) -> None:
        """Nothing is held open."""


class FsspecStorage(Storage):
    """A store reached through fsspec.

    Uploads to S3, Azure and GCS go in parts of 16 MiB or more, several at a time if obstore makes them; to any other
    store in one call. Requests that fail transiently are retried.
    """

    #: An unfinished upload is an orphan if no part was added to it for this long.
    abandoned_after_seconds = 3600.0

    def __init__(self, url: str, storage_options: dict[str, Any] | None = None) -> None:
        self._options = options = dict(storage_options or {})
        self._url = url
        self._secrets = Secrets(options)
        backend = options.get("backend")
        if backend not in (None, "fsspec", "obstore"):
            raise StorageError(
                f"there is no storage backend {backend!r}",
                path=self._secrets.hide(url),
                remedy='choose "fsspec" or "obstore" as "backend"',
            )
        of_obstore = {name: options[name] for name in OBSTORE_OPTIONS if name in options}
        given = {
            name: value for name, value in options.items() if name not in ("backend", "follow_links", *OBSTORE_OPTIONS)
        }
        self._filesystem = _open_filesystem(url, given, self._secrets)
        shared = _SHARED.setdefault(self._filesystem, _Shared(url.partition("://")[0]))
        self._retries = shared.retries
        protocol = self._filesystem.protocol
        self._protocols = {protocol} if isinstance(protocol, str) else set(protocol)
        kind = next((kind for kind, group in _OBJECT_STORES.items() if self._is_in(group)), None)
        self._is_object_store = kind is not None
        self.obstore = ObstoreChoice(
            kind, backend, self._filesystem, of_obstore, known=shared.clients, secrets=self._secrets
        )
        if backend == "obstore":
            self.obstore.client_of(url)  # raises if obstore cannot be used

    @property
    def has_given_up(self) -> bool:  # type: ignore[override]
        return self._retries.has_given_up

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._url, self._options)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._secrets.hide(self._url)!r})"

    def create(self, path: str, expected_size: int) -> FileWriter:
        describe = self._describing("write", path)
        if not self._is_object_store:
            return WholeObjectWriter(self._filesystem, path, self._retries, describe)
        client = self.obstore.writing_client_of(path, self)
        if client is not None:
            return ObstoreWriter(client, path, expected_size, self._retries, describe, self._abort_begun)
        with translated(describe):
            if self._is_in(_S3):
                return S3Writer(self._filesystem, path, expected_size, self._retries, self._describing)
            return StreamWriter(self._filesystem, path, describe)

    def open(self, path: str) -> FileReader:
        return _FsspecReader(self, path)

    def info(self, path: str) -> dict[str, Any]:
        """Return fsspec's information about the object or directory, from the store."""

        def request() -> dict[str, Any]:
            self._filesystem.invalidate_cache()  # another process may have replaced the object
            found: dict[str, Any] = self._filesystem.info(path)
            return found

        return self._ask("read", path, request)

    def fetch(self, path: str, begin: int, end: int) -> bytes:
        """Return the bytes from ``begin`` up to ``end``, by one request."""
        return self._ask("read", path, lambda: bytes(self._filesystem.cat_file(path, start=begin, end=end)))

    def exists(self, path: str) -> bool:
        try:
            self.info(path)  # not fsspec's own exists(), which takes every error for "no"
        except CheckpointNotFoundError:
            return False
        return True

    def remove(self, path: str) -> None:
        def request() -> None:
            self._filesystem.invalidate_cache()
            # Not rm(), which takes a name with brackets or asterisks in it for a pattern.
            if self._is_object_store:
                self._remove_all(self._filesystem.find(path))
                return
            found = self._filesystem.find(path, withdirs=True, detail=True)
            files = [name for name, info in found.items() if info["type"] == "file"]
            self._remove_all(files)
            for directory in sorted(set(found) - set(files), key=len, reverse=True):
                self._filesystem.rmdir(directory)

        if self.exists(path):
            with contextlib.suppress(CheckpointNotFoundError):  # another process has deleted it
                self._ask("remove", path, request)

    def _remove_all(self, names: Sequence[str]) -> None:
        threads = min(_REQUESTS_UNDER_WAY, max(1, len(names)))
        run_parallel(self._filesystem.rm_file, names, threads=threads)

    def copy(self, source: str, target: str) -> int:
        def request() -> None:
            self._filesystem.cp_file(source, target)  # not copy(), which would take names for patterns
            if self._is_in(_AZURE):
                fsspec.asyn.sync(self._filesystem.loop, _wait_for_copy, self._filesystem, target)

        if source != target:  # S3 refuses to copy an object to itself
            self._ask("copy", target, request)
        return int(self.info(target)["size"])

    def list(self, directory: str) -> Sequence[FileInfo]:
        found = [_file_info(path, info) for path, info in self._listing(directory) if info["type"] == "file"]
        return [file for file in found if not file.path.rpartition("/")[2].startswith(_NOT_LISTED)]

    def hidden_objects(self, directory: str, prefix: str | tuple[str, ...]) -> Sequence[FileInfo]:
        found = [_file_info(path, info) for path, info in self._listing(directory)]
        return [file for file in found if file.path.rpartition("/")[2].startswith(prefix)]

    def subdirectories(self, directory: str) -> Sequence[str]:
        return [path for path, info in self._listing(directory) if info["type"] == "directory"]

    def _listing(self, directory: str) -> Iterator[tuple[str, dict[str, Any]]]:
        def request() -> Any:
            self._filesystem.invalidate_cache()
            return self._filesystem.ls(directory, detail=True)

        try:
            found = self._ask("list", directory, request)
        except CheckpointNotFoundError:
            return
        inside = self._filesystem._strip_protocol(directory).strip("/") + "/"
        for info in found:
            name = info["name"].strip("/")
            if name.startswith(inside):  # the listing of a file is the file itself; some stores list a directory, too
                yield f"{directory.rstrip('/')}/{name.removeprefix(inside)}", info

    def claim(self, directory: str) -> Claim | None:
        return Lease(self, directory) if self._is_object_store else None

    def remove_directory(self, path: str, *, names: Collection[str] = ()) -> None:
        if not self._is_object_store:
            super().remove_directory(path)
            return
        self.remove(f"{path}/{MANIFEST_NAME}")

        def request() -> None:
            self._filesystem.invalidate_cache()
            found = set(self._filesystem.find(path))
            # Check for other jobs after listing: a job whose files were found has written its lease before them.
            if has_others(self, path.rpartition("/")[0]):
                found &= {self._filesystem._strip_protocol(f"{path}/{name}") for name in names}
            self._remove_all(sorted(found))

        with contextlib.suppress(CheckpointNotFoundError):  # another process has deleted it
            self._ask("remove", path, request)

    def remove_orphans(self, directory: str) -> Sequence[str]:
        """Abort the uploads into ``directory`` that got no part for :attr:`abandoned_after_seconds` (S3).

        Azure deletes unfinished uploads itself after a week. GCS deletes those that its own client has begun, and keeps
        those of obstore, which cannot be listed from here. Other stores have none. Leases of dead processes and old
        probe objects are deleted, too.
        """
        probes: Sequence[str] = []
        if self._is_object_store:
            hidden = self.hidden_objects(directory, _NOT_LISTED)
            remove_dead_leases(self, [info for info in hidden if LEASE_PREFIX in info.path])
            probes = self._dead_probes(hidden)
            for probe in probes:
                self.delete(probe)
        return [*probes, *self._abort_uploads(directory, empty=True)]

    def _dead_probes(self, hidden: Sequence[FileInfo]) -> Sequence[str]:
        """Return the probe objects of processes that died while they tested obstore."""
        latest = time.time() - self.abandoned_after_seconds
        return [info.path for info in hidden if PROBE_PREFIX in info.path and 0 < info.modified < latest]

    def orphans(self, directory: str) -> Sequence[str]:
        is_object_store = self._is_object_store
        probes = self._dead_probes(self.hidden_objects(directory, PROBE_PREFIX)) if is_object_store else []
        return [*probes, *self._abort_uploads(directory, empty=True, dry_run=True)]

    def remove_abandoned(self, directory: str) -> Sequence[str]:
        return self._abort_uploads(directory, empty=False)

    def _abort_uploads(self, directory: str, *, empty: bool, dry_run: bool = False) -> Sequence[str]:
        if not self._is_in(_S3):
            return []

        def request() -> list[str]:
            removed = []
            for upload in abandoned_uploads(self._filesystem, directory, self.abandoned_after_seconds, empty=empty):
                with contextlib.suppress(FileNotFoundError):  # ended meanwhile
                    if not dry_run:
                        self._filesystem.call_s3("abort_multipart_upload", **upload)
                removed.append(self._filesystem.unstrip_protocol(f"{upload['Bucket']}/{upload['Key']}"))
            return removed

        try:
            return self._ask("clean up", directory, request)
        except CheckpointNotFoundError:
            return []  # there is no bucket

    def _abort_begun(self, path: str, seconds: float) -> None:
        """Abort the uploads of one object that began in the last ``seconds`` (S3).

        Raises:
            StorageError: The store refused, or the uploads may be those of another job.
        """
        if not self._is_in(_S3):
            return

        def request() -> None:
            begun = list(uploads_begun(self._filesystem, path, seconds))
            if begun and has_others(self, path.rpartition("/")[0]):
                raise StorageError("another job saves into the same directory, and may have begun it", path=path)
            for upload in begun:
                with contextlib.suppress(FileNotFoundError):  # ended meanwhile
                    self._filesystem.call_s3("abort_multipart_upload", **upload)

        self._ask("abort", path, request)

    # ---- the requests that leases are made of ------------------------------------------------------------------------

    def put(self, path: str, data: bytes) -> None:
        self._ask("write", path, lambda: self._filesystem.pipe_file(path, data))

    def get(self, path: str) -> bytes | None:
        try:
            return self._ask("read", path, lambda: bytes(self._filesystem.cat_file(path)))
        except CheckpointNotFoundError:
            return None

    def delete(self, path: str, *, once: bool = False) -> None:
        if once:
            with translated(self._describing("remove", path)):
                self._filesystem.rm_file(path)
        else:
            self._ask("remove", path, lambda: self._filesystem.rm_file(path))

    # ---- requests ----------------------------------------------------------------------------------------------------

    def _is_in(self, group: tuple[str, ...]) -> bool:
        return not self._protocols.isdisjoint(group)

    def _ask(self, action: str, path: str, request: Callable[[], Result]) -> Result:
        return self._retries.call(request, self._describing(action, path))

    def _describing(self, action: str, path: str) -> Describe:
        return describer(self._secrets, action, path)


def _file_info(path: str, info: dict[str, Any]) -> FileInfo:
    return FileInfo(path, int(info["size"] or 0), _modified(info))


def _modified(info: dict[str, Any]) -> float:
    for key in ("LastModified", "last_modified", "mtime", "updated", "created"):
        value = info.get(key)
        if isinstance(value, datetime.datetime):
            return value.timestamp()
        if isinstance(value, (int, float)):
            return float(value)
        if isinstance(value, str):
            with contextlib.suppress(ValueError):  # the server uses another date format
                return datetime.datetime.fromisoformat(value.replace("Z", "+00:00")).timestamp()
    return 0.0


async def _wait_for_copy(filesystem: Any, path: str) -> None:
    """Wait until Azure has finished the copy into ``path`` that it has accepted.

    Raises:
        OSError: The copy has failed.
    """
    container, blob, _ = filesystem.split_path(path)
    async with filesystem.service_client.get_blob_client(container, blob) as client:
        while (copy := (await client.get_blob_properties()).copy).status == "pending":
            await asyncio.sleep(0.5)
    if copy.status not in (None, "success"):
        raise OSError(f"the copy has ended with status {copy.status}: {copy.status_description}")
