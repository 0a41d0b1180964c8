"""Uploads through fsspec's own clients, for the stores and processes in which obstore cannot be used.

fsspec publishes a file that is closed or forgotten, whole or not: nothing here does.
"""

from __future__ import annotations

import io
import logging
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np

from ckpt_core.errors import CheckpointError, CheckpointNotFoundError
from ckpt_core.storage.base import FileWriter
from ckpt_core.storage.failures import Describe, translated
from ckpt_core.storage.obstore_client import PART_BYTES
from ckpt_core.storage.retry import IncompleteAnswerError, Retries, is_transient

logger = logging.getLogger(__name__)

_MARK = "ckpt-upload"  # user metadata: tells whether an object is the one that an upload has made
_MOST_PARTS = 10_000


class S3Writer(FileWriter):
    """Uploads parts, one after the other, by the requests of s3fs; each is repeated alone and its answer looked at.

    ``expected_size`` decides how large parts must be: how many bytes will be written, or a few less.
    """

    def __init__(
        self,
        filesystem: Any,
        path: str,
        expected_size: int,
        retries: Retries,
        describe: Callable[[str, str], Describe],
    ) -> None:
        self._filesystem = filesystem
        bucket, key, _ = filesystem.split_path(path)
        self._object = {"Bucket": bucket, "Key": key}
        self._path = path
        self._retries = retries
        self._describe = describe
        self._mark = uuid.uuid4().hex
        # A tenth more parts than expected are allowed for.
        self._part_bytes = PART_BYTES * max(1, -(-expected_size * 11 // (10 * PART_BYTES * _MOST_PARTS)))
        self._part = bytearray()
        self._filled = 0
        self._position = 0
        self._upload: dict[str, str] = {}
        self._parts: list[dict[str, Any]] = []

    def _call(self, action: str, method: str, *, needs: str = "", **arguments: Any) -> dict[str, Any]:
        """Return the store's answer, which must have the field ``needs``."""

        def request() -> dict[str, Any]:
            answer: dict[str, Any] = self._filesystem.call_s3(method, **self._object, **arguments)
            if needs and not answer.get(needs):
                raise IncompleteAnswerError(f"the answer to {method} has no {needs}: it is not the store's own")
            return answer

        return self._retries.call(request, self._describe(action, self._path))

    def write_at(self, offset: int, data: memoryview) -> None:
        assert offset == self._position
        self._position += len(data)
        self._part = self._part or bytearray(self._part_bytes)
        while data:
            if self._filled == self._part_bytes:
                self._send()
            piece = data[: self._part_bytes - self._filled]
            begin, self._filled = self._filled, self._filled + len(piece)
            np.copyto(np.frombuffer(self._part, np.uint8)[begin : self._filled], np.frombuffer(piece, np.uint8))
            data = data[len(piece) :]

    def _send(self) -> None:
        if not self._upload:
            answer = self._call("write", "create_multipart_upload", needs="UploadId", Metadata={_MARK: self._mark})
            self._upload = {"UploadId": answer["UploadId"]}
        part: dict[str, Any] = {"PartNumber": len(self._parts) + 1}
        body = self._part if self._filled == self._part_bytes else self._part[: self._filled]
        tag = self._call("write", "upload_part", needs="ETag", **self._upload, **part, Body=body)["ETag"]
        self._parts.append({**part, "ETag": tag})
        self._filled = 0

    def commit(self, size: int) -> None:
        assert size == self._position
        if self._upload:
            self._send()
            self._complete()
            self._upload = {}
        else:
            self._call("commit", "put_object", needs="ETag", Body=self._part[: self._filled])

    def _complete(self) -> None:
        arguments: dict[str, Any] = {**self._upload, "MultipartUpload": {"Parts": self._parts}}
        try:
            answer = self._call("commit", "complete_multipart_upload", **arguments)
            if not answer.get("ETag") and not self._is_there():
                # That was not the store's answer: once more, now with no doubt about it.
                self._call("commit", "complete_multipart_upload", needs="ETag", **arguments)
        except CheckpointError as error:
            # An earlier attempt may have done it, and its answer was lost.
            if is_transient(error) or not self._is_there():
                raise

    def _is_there(self) -> bool:
        try:
            answer = self._call("commit", "head_object")
        except CheckpointError:
            return False
        return bool(answer.get("Metadata", {}).get(_MARK) == self._mark)

    def abort(self) -> None:
        upload, self._upload = self._upload, {}
        if not upload:
            return
        try:
            self._call("abort", "abort_multipart_upload", **upload)
        except CheckpointNotFoundError:
            return  # gone already
        except CheckpointError as error:
            # The failure that led here is the one to tell; what stays is invisible, and an orphan that is removed
            # later.
            logger.warning("parts of an abandoned upload could not be deleted: %s", error.message)


class StreamWriter(FileWriter):
    """One file of fsspec's that bytes are added to in order (GCS, Azure); the object exists when ``commit`` closes it.

    The clients repeat failed requests by themselves.
    """

    def __init__(self, filesystem: Any, path: str, describe: Describe) -> None:
        self._describe = describe
        self._position = 0
        self._file = filesystem.open(path, "wb", block_size=PART_BYTES)

    def write_at(self, offset: int, data: memoryview) -> None:
        assert offset == self._position
        with translated(self._describe):
            self._file.write(bytes(data))
        self._position += len(data)

    def commit(self, size: int) -> None:
        assert size == self._position
        with translated(self._describe):
            self._file.close()

    def abort(self) -> None:
        if not self._file.closed:
            # Closing would publish what has been written so far: mark it closed before anything can.
            self._file.closed = True
            try:
                with translated(self._describe):
                    self._file.discard()
            except CheckpointError as error:
                # The failure that led here is the one to tell; the service forgets the upload after a week.
                logger.warning("an abandoned upload could not be ended: %s", error.message)

    def __del__(self) -> None:
        # fsspec publishes a file that is merely forgotten, whole or not.
        if hasattr(self, "_file"):
            self._file.closed = True


class WholeObjectWriter(FileWriter):
    """Collects the object in memory and stores it by one call, for stores that would show an unfinished file."""

    def __init__(self, filesystem: Any, path: str, retries: Retries, describe: Describe) -> None:
        self._filesystem = filesystem
        self._path = path
        self._retries = retries
        self._describe = describe
        self._buffer = io.BytesIO()

    def write_at(self, offset: int, data: memoryview) -> None:
        self._buffer.seek(offset)
        self._buffer.write(data)

    def commit(self, size: int) -> None:
        self._buffer.truncate(size)

        def request() -> None:
            self._filesystem.makedirs(self._filesystem._parent(self._path), exist_ok=True)
            self._filesystem.pipe_file(self._path, self._buffer.getvalue())

        self._retries.call(request, self._describe)
        self._buffer = io.BytesIO()

    def abort(self) -> None:
        self._buffer = io.BytesIO()
