"""Ranges of objects through s3fs, straight into the memory where they belong."""

from __future__ import annotations

from typing import Any

__all__ = ["read_range"]

_CHUNK = 2**20  # bytes


async def read_range(filesystem: Any, path: str, begin: int, target: memoryview) -> int:
    """Fill ``target`` with the bytes of an object from ``begin`` on; called on the event loop of the filesystem.

    Args:
        filesystem: An ``s3fs.S3FileSystem``. Its own ``cat_file`` collects all bytes in memory that is new each time.
        path: URL of the object.
        begin: Offset of the first byte.
        target: As long as what is wanted.

    Returns:
        How many bytes have come: more than were asked for, with ``target`` undefined, if the server knows no ranges.
    """
    bucket, key, version = filesystem.split_path(path)
    wanted = {"Bucket": bucket, "Key": key, "Range": f"bytes={begin}-{begin + len(target) - 1}"}
    if version:
        wanted["VersionId"] = version
    answer = await filesystem._call_s3("get_object", filesystem.req_kw, **wanted)
    body = answer["Body"]
    count = 0
    try:
        while count <= len(target) and (chunk := await body.read(_CHUNK)):
            fits = len(target) - count
            target[count : count + len(chunk)] = chunk if len(chunk) <= fits else chunk[:fits]
            count += len(chunk)
    finally:
        body.close()
    return count
