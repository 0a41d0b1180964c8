"""Lists the checkpoints of a run without the engine: with system calls, or requests of S3."""

from __future__ import annotations

import abc
import dataclasses
import functools
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from botocore.config import Config
from botocore.session import Session

from ckpt_core import Catalog
from ckpt_core.storage.fsspec_storage import FsspecStorage

FOLDER = "checkpoints"
FILE_SUFFIX = ".ckpt"
MANIFEST = "manifest.json"
LEASE_PREFIX = ".ckpt-lease-"
PROBE_PREFIX = ".ckpt-probe-"
PREFLIGHT = ".ckpt-preflight"  # the next run deletes it
ORPHAN = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{12}[-0-9]*(-replaced)?\.ckpt-part")


@dataclasses.dataclass(frozen=True)
class Committed:
    """A committed checkpoint.

    Attributes:
        path: Full path or URL.
        identity: Changes when it is written again.
    """

    path: str
    identity: tuple[Any, ...]


@dataclasses.dataclass
class Listing:
    """What is in the directory of checkpoints.

    Attributes:
        committed: Committed checkpoints, by name.
        unfinished: What belongs to no committed checkpoint, and is not seen by code that looks for checkpoints: by its
            path, the name of the checkpoint that it was made for, or was a part of.
        unexpected: Everything else, including the files that the judge puts there.
    """

    committed: dict[str, Committed] = dataclasses.field(default_factory=dict)
    unfinished: dict[str, str] = dataclasses.field(default_factory=dict)
    unexpected: list[str] = dataclasses.field(default_factory=list)


class Place(abc.ABC):
    """The directory of one run; its checkpoints are in a folder below.

    Attributes:
        root: Full path or URL.
        options: ``storage_options`` to reach it; None for a local directory.
        settle_seconds: How long requests of a dead process may still be carried out.
    """

    root: str
    options: dict[str, Any] | None = None
    settle_seconds = 0.0

    @abc.abstractmethod
    def put(self, name: str, content: bytes) -> None:
        """Write a file, named relative to the root."""

    @abc.abstractmethod
    def get(self, name: str) -> bytes | None:
        """Return a file's content; None if there is no such file."""

    @abc.abstractmethod
    def delete(self, name: str) -> None:
        """Delete a file that is there."""

    @abc.abstractmethod
    def look(self) -> Listing:
        """List the folder of checkpoints."""

    @abc.abstractmethod
    def prune(self) -> None:
        """Delete abandoned files by the engine's pruning, as if the run had ended long ago."""


class LocalPlace(Place):
    """A local directory.

    Args:
        root: Its path.
    """

    def __init__(self, root: Path) -> None:
        self.root = str(root)

    def put(self, name: str, content: bytes) -> None:
        path = Path(self.root, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    def get(self, name: str) -> bytes | None:
        path = Path(self.root, name)
        return path.read_bytes() if path.is_file() else None

    def delete(self, name: str) -> None:
        Path(self.root, name).unlink()

    def prune(self) -> None:
        Catalog(f"{self.root}/{FOLDER}").prune()

    def look(self) -> Listing:
        listing = Listing()
        for entry in sorted(Path(self.root, FOLDER).iterdir()):
            orphan = ORPHAN.fullmatch(entry.name)
            if orphan:
                listing.unfinished[entry.name] = orphan["name"]
            elif entry.is_dir() and (entry / MANIFEST).is_file():
                listing.committed[entry.name] = Committed(str(entry), _identity(entry / MANIFEST))
                inside = {str(path.relative_to(entry)) for path in entry.rglob("*") if path.is_file()}
                foreign = inside - _files_of((entry / MANIFEST).read_bytes())
                listing.unexpected += [f"{entry.name}/{name}" for name in sorted(foreign)]
            elif entry.is_file() and entry.suffix == FILE_SUFFIX:
                listing.committed[entry.name] = Committed(str(entry), _identity(entry))
            else:
                listing.unexpected.append(entry.name)
        return listing


class StorePlace(Place):
    """A prefix in a bucket of S3.

    Args:
        url: ``s3://bucket/prefix``.
        options: ``endpoint_url``, ``key`` and ``secret``.
    """

    settle_seconds = 0.1

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self.root, self.options = url, dict(options)
        self._bucket, _, self._prefix = url.removeprefix("s3://").partition("/")
        self._client = _client(options["endpoint_url"], options["key"], options["secret"])

    def put(self, name: str, content: bytes) -> None:
        self._client.put_object(Bucket=self._bucket, Key=f"{self._prefix}/{name}", Body=content)

    def get(self, name: str) -> bytes | None:
        try:
            answer = self._client.get_object(Bucket=self._bucket, Key=f"{self._prefix}/{name}")
        except self._client.exceptions.NoSuchKey:
            return None
        return bytes(answer["Body"].read())

    def prune(self) -> None:
        storage = FsspecStorage(self.root, self.options)
        storage.abandoned_after_seconds = 0.0  # type: ignore[misc]
        Catalog(f"{self.root}/{FOLDER}", storage=storage).prune()

    def delete(self, name: str) -> None:
        self._client.delete_object(Bucket=self._bucket, Key=f"{self._prefix}/{name}")

    def clear(self) -> None:
        """Delete everything, so that a simulated store does not fill the memory."""
        for name, _ in self._objects(""):
            self.delete(name)

    def look(self) -> Listing:
        listing = Listing()
        inside: dict[str, dict[str, tuple[Any, ...]]] = {}
        for path, identity in self._objects(f"{FOLDER}/"):
            name, _, file = path.removeprefix(f"{FOLDER}/").partition("/")
            if file:
                inside.setdefault(name, {})[file] = identity
            elif name.endswith(FILE_SUFFIX):
                listing.committed[name] = Committed(f"{self.root}/{path}", identity)
            elif name.startswith((LEASE_PREFIX, PROBE_PREFIX, PREFLIGHT)):
                listing.unfinished[name] = ""  # made for none
            else:
                listing.unexpected.append(name)
        for name, files in inside.items():
            manifest = self.get(f"{FOLDER}/{name}/{MANIFEST}") if MANIFEST in files else None
            if manifest is not None:
                listing.committed[name] = Committed(f"{self.root}/{FOLDER}/{name}", files[MANIFEST])
            known = _files_of(manifest) if manifest is not None else set()
            listing.unfinished.update({f"{name}/{file}": name for file in files if file not in known})
        for upload in self._uploads():
            if upload["Key"].startswith(f"{self._prefix}/{FOLDER}/"):
                path = upload["Key"].removeprefix(f"{self._prefix}/{FOLDER}/")
                listing.unfinished[f"{path}, upload {upload['UploadId'][:8]}"] = path.partition("/")[0]
        return listing

    def _uploads(self) -> list[dict[str, Any]]:
        try:
            return list(self._client.list_multipart_uploads(Bucket=self._bucket).get("Uploads", []))
        except self._client.exceptions.NoSuchUpload:
            return []  # rclone's way to say that there are none

    def _objects(self, below: str) -> Iterator[tuple[str, tuple[Any, ...]]]:
        pages = self._client.get_paginator("list_objects_v2")
        for page in pages.paginate(Bucket=self._bucket, Prefix=f"{self._prefix}/{below}"):
            for item in page.get("Contents", []):
                identity = (item["ETag"], item["LastModified"], item["Size"])
                yield item["Key"].removeprefix(f"{self._prefix}/"), identity


@functools.lru_cache
def _client(endpoint: str, key: str, secret: str) -> Any:
    """Return a client of S3; making one takes longer than many requests."""
    config = Config(
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"addressing_style": "path"},
    )
    return Session().create_client(
        "s3",
        region_name="us-east-1",
        endpoint_url=endpoint,
        aws_access_key_id=key,
        aws_secret_access_key=secret,
        config=config,
    )


def _identity(path: Path) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_ino, status.st_mtime_ns


def _files_of(manifest: bytes) -> set[str]:
    """Return the names of a manifest's files, and its own; callers' extra files are not expected here."""
    content = json.loads(manifest)
    found = {MANIFEST}
    for rank in content["ranks"]:
        found |= {file[0] for file in rank["files"]}
        found |= {rank["digests"][0]} if rank["digests"] is not None else set()
    return found
