"""Multipart uploads through s3fs, and the clean-up of those that dead processes left."""

from __future__ import annotations

import datetime
import email.utils
import logging
import math
import os
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import fsspec

from ckpt_core.errors import CheckpointError, CheckpointNotFoundError, StorageError
from ckpt_core.storage.base import RandomAccessIO
from ckpt_core.storage.failures import Describe
from ckpt_core.storage.parts import PartUpload
from ckpt_core.storage.retrying import IncompleteAnswerError, Retries, is_transient
from ckpt_core.storage.s3_direct import DirectTransfers

__all__ = ["S3Upload", "abandoned_uploads", "s3_defaults"]

logger = logging.getLogger(__name__)

_MARK = "ckpt-upload"  # user metadata: tells whether an object is the one that an upload has made
_Describe = Callable[[str, str], Describe]
_Buffer = bytearray | memoryview


def s3_defaults(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options for s3fs with what we rely on added where the user has not decided otherwise."""
    config = {
        # The checksums that botocore adds otherwise cost a fifth of the processor time, and other stores than AWS answer
        # ranged reads with ones that do not fit.
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "retries": {"max_attempts": 0},  # ours take over
        "connect_timeout": 10,
        "read_timeout": 60,
        **(options.get("config_kwargs") or {}),
    }
    if _is_encrypted(options):
        # The connection guards the bytes already; their SHA-256 takes a third of the client's processor time.
        config["s3"] = {"payload_signing_enabled": False, **(config.get("s3") or {})}
    return {"use_listings_cache": False, **options, "config_kwargs": config}


def _is_encrypted(options: dict[str, Any]) -> bool:
    """Return whether requests go through TLS, which is so unless an endpoint without it is named."""
    named = [
        options.get("endpoint_url"),
        (options.get("client_kwargs") or {}).get("endpoint_url"),
        fsspec.config.conf.get("s3", {}).get("endpoint_url"),
        *(os.environ.get(name) for name in ("FSSPEC_S3_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")),
    ]
    endpoint = next(filter(None, named), "https://")
    return bool(options.get("use_ssl", True)) and str(endpoint).startswith("https://")


class S3Upload(PartUpload):
    """An object under construction.

    Args:
        filesystem: An ``s3fs.S3FileSystem``.
        path: URL of the object.
        retries: Carries out the requests.
        describe: ``describe(action, path)`` makes errors for the user.
        direct: Sends parts past the event loop.
    """

    most_parts = 10_000

    def __init__(
        self, filesystem: Any, path: str, retries: Retries, describe: _Describe, direct: DirectTransfers
    ) -> None:
        self._filesystem = filesystem
        bucket, key, _ = filesystem.split_path(path)
        self._object = {"Bucket": bucket, "Key": key}
        self._path = path
        self._retries = retries
        self._describe = describe
        self._direct = direct
        self._mark = uuid.uuid4().hex
        self._upload_id = ""
        self._tags: dict[int, str] = {}
        self._sizes: dict[int, int] = {}

    async def _call(
        self, action: str, method: str, data: _Buffer | None = None, *, needs: str = "", **arguments: Any
    ) -> dict[str, Any]:
        """Return the store's answer, which must have the field ``needs``."""

        async def request() -> dict[str, Any]:
            if data is not None:
                arguments["Body"] = _Body(data)  # a new one for each attempt: the last may have read half of it
            answer: dict[str, Any] = await self._filesystem._call_s3(method, **self._object, **arguments)
            if needs and not answer.get(needs):
                raise IncompleteAnswerError(f"the answer to {method} has no {needs}: it is not the store's own")
            return answer

        return await self._retries.call_async(request, self._describe(action, self._path))

    async def begin(self) -> None:
        answer = await self._call("write", "create_multipart_upload", needs="UploadId", Metadata={_MARK: self._mark})
        self._upload_id = answer["UploadId"]

    async def send(self, number: int, data: memoryview) -> None:
        where = {"UploadId": self._upload_id, "PartNumber": number + 1}
        tag = await self._direct.upload_part(self._filesystem, data, **self._object, **where, Body=_Body(data))
        if tag is None:
            tag = (await self._call("write", "upload_part", data, needs="ETag", **where))["ETag"]
        self._tags[number], self._sizes[number] = tag, len(data)

    async def complete(self, count: int) -> None:
        await self._compare_sizes()
        parts = [{"PartNumber": number + 1, "ETag": self._tags[number]} for number in range(count)]
        try:
            answer = await self._call(
                "commit", "complete_multipart_upload", UploadId=self._upload_id, MultipartUpload={"Parts": parts}
            )
            if not answer.get("ETag") and not await self._is_there():
                # That was not the store's answer: once more, now with no doubt about it.
                await self._call(
                    "commit",
                    "complete_multipart_upload",
                    needs="ETag",
                    UploadId=self._upload_id,
                    MultipartUpload={"Parts": parts},
                )
        except CheckpointError as error:
            # An earlier attempt may have done it, and its answer was lost.
            if is_transient(error) or not await self._is_there():
                raise

    async def _compare_sizes(self) -> None:
        """Refuse parts of which the store holds another number of bytes: in a moment they would replace what is there."""
        more: dict[str, Any] = {}
        while True:
            try:
                page = await self._call("verify", "list_parts", UploadId=self._upload_id, **more)
            except CheckpointError as error:
                # A store or a policy may not allow to list parts.
                logger.debug("could not compare the parts of %s with what was sent: %s", self._path, error.message)
                return
            for part in page.get("Parts", []):
                sent = self._sizes.get(part["PartNumber"] - 1, part["Size"])
                if part["Size"] != sent:
                    raise StorageError(
                        f"the store has {part['Size']} bytes of part {part['PartNumber']}, of which {sent} were sent; nothing was "
                        "replaced",
                        path=self._path,
                        remedy="find out what stands between this machine and the store, and save again",
                    )
            if not page.get("IsTruncated"):
                return
            more = {"PartNumberMarker": page["NextPartNumberMarker"]}

    async def _is_there(self) -> bool:
        try:
            answer = await self._call("commit", "head_object")
        except CheckpointError:
            return False
        return bool(answer.get("Metadata", {}).get(_MARK) == self._mark)

    async def put(self, data: bytearray) -> None:
        await self._call("commit", "put_object", data, needs="ETag")

    async def abandon(self) -> None:
        try:
            await self._call("abort", "abort_multipart_upload", UploadId=self._upload_id)
        except CheckpointNotFoundError:
            return  # gone already


class _Body(RandomAccessIO):
    """What is sent, as a file: of other memory the client makes copies, which costs more processor time."""

    def __init__(self, data: _Buffer) -> None:
        super().__init__(len(data))
        self._data = memoryview(data)

    def read(self, count: int = -1) -> bytes:
        end = self._size if count < 0 else self._position + count
        found = bytes(self._data[self._position : end])
        self._position += len(found)
        return found


def abandoned_uploads(
    filesystem: Any, directory: str, silent_seconds: float, *, empty: bool
) -> Iterator[dict[str, str]]:
    """Yield the uploads into ``directory``, or a directory directly in it, to which nobody has added for so long.

    Args:
        filesystem: An ``s3fs.S3FileSystem``.
        directory: URL.
        silent_seconds: By the clock of the store.
        empty: Whether those count of which no part has arrived. They cost nothing, and some servers do not tell when they began.

    Yields:
        Arguments of ``abort_multipart_upload``.
    """
    bucket, key, _ = filesystem.split_path(directory)
    prefix = f"{key.rstrip('/')}/" if key else ""
    more: dict[str, str] = {}
    while True:
        page = filesystem.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix, **more)
        for upload in page.get("Uploads", []):
            name = upload["Key"].removeprefix(prefix)
            if upload["Key"].startswith(prefix) and name.count("/") <= 1:
                arguments = {"Bucket": bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
                begun = upload["Initiated"] if empty else None
                if _seconds_silent(filesystem, arguments, begun, page) >= silent_seconds:
                    yield arguments
        if not page.get("IsTruncated"):
            return
        more = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}


def _seconds_silent(
    filesystem: Any, upload: dict[str, str], begun: datetime.datetime | None, page: dict[str, Any]
) -> float:
    now = email.utils.parsedate_to_datetime(page["ResponseMetadata"]["HTTPHeaders"]["date"])
    times = [begun] if begun is not None else []
    more: dict[str, int] = {}
    try:
        while True:
            parts = filesystem.call_s3("list_parts", **upload, **more)
            times += [part["LastModified"] for part in parts.get("Parts", [])]
            if not parts.get("IsTruncated"):
                return float((now - max(times)).total_seconds()) if times else -math.inf
            more = {"PartNumberMarker": parts["NextPartNumberMarker"]}
    except FileNotFoundError:
        return 0.0  # completed or aborted meanwhile
