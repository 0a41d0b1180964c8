"""Opens, reads and writes storages for tests, and lists S3's unfinished uploads."""

from __future__ import annotations

from typing import Any

from ckpt_core.storage import FileWriter, Storage, storage_for

#: A directory, and the ``storage_options`` to reach it.
Place = tuple[str, dict[str, Any] | None]


def storage_at(place: Place) -> Storage:
    """Return the storage of a place."""
    root, options = place
    return storage_for(root, options)


def unfinished_uploads(root: str, storage: Storage) -> list[str]:
    """Return the keys of S3's unfinished multipart uploads; an empty list for other storages."""
    if not root.startswith("s3://"):
        return []
    filesystem = storage._filesystem  # type: ignore[attr-defined]
    found = filesystem.call_s3("list_multipart_uploads", Bucket=root.split("/")[2]).get("Uploads", [])
    return [upload["Key"] for upload in found]


def write(storage: Storage, path: str, content: bytes) -> FileWriter:
    """Write a file; return its writer."""
    writer = storage.create(path, len(content))
    try:
        writer.write_at(0, memoryview(content))
        writer.commit(len(content))
    except BaseException:
        writer.abort()
        raise
    return writer


def read(storage: Storage, path: str) -> bytes:
    """Return the content of a file."""
    with storage.open(path) as reader:
        target = bytearray(reader.size)
        reader.read_into(0, memoryview(target))
    return bytes(target)
