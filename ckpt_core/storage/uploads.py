"""Uploads of objects, in parts where they are large: through obstore, and through fsspec's own clients.

fsspec publishes a file that is closed or forgotten, whole or not: nothing here does.
"""

from __future__ import annotations

import abc
import datetime
import email.utils
import io
import logging
import math
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ckpt_core.errors import CheckpointError, CheckpointNotFoundError, StorageError
from ckpt_core.storage.base import FileWriter
from ckpt_core.storage.failures import Describe, translated
from ckpt_core.storage.obstore_client import ObstoreClient
from ckpt_core.storage.retry import IncompleteAnswerError, Retries, is_transient

logger = logging.getLogger(__name__)

PART_BYTES = 16 * 2**20
_MARK = "ckpt-upload"  # user metadata: tells whether an object is the one that an upload has made
_MOST_PARTS = 10_000  # that S3 takes


def _part_bytes(expected_size: int) -> int:
    """Return how large parts must be for as many as S3 takes; a tenth more than expected are allowed for."""
    return PART_BYTES * max(1, -(-expected_size * 11 // (10 * PART_BYTES * _MOST_PARTS)))


class _PartWriter(FileWriter):
    """Takes bytes in order, and sends a part when the first byte of the next one comes; ``commit`` sends the last.

    ``expected_size`` decides how large parts must be: how many bytes will be written, or a few less. ``retries``
    carries out the requests that the client does not repeat.
    """

    def __init__(self, path: str, expected_size: int, retries: Retries) -> None:
        self._path = path
        self._retries = retries
        self._mark = uuid.uuid4().hex
        self._part_bytes = _part_bytes(expected_size)
        self._part = bytearray()
        self._filled = 0
        self._position = 0

    def write_at(self, offset: int, data: memoryview) -> None:
        assert offset == self._position
        self._position += len(data)
        while data:
            if self._filled == self._part_bytes:
                self._send()
            self._part = self._part or self._new_part()
            piece = data[: self._part_bytes - self._filled]
            begin, self._filled = self._filled, self._filled + len(piece)
            np.copyto(np.frombuffer(self._part, np.uint8)[begin : self._filled], np.frombuffer(piece, np.uint8))
            data = data[len(piece) :]

    def _new_part(self) -> bytearray:
        return bytearray(self._part_bytes)

    @abc.abstractmethod
    def _send(self) -> None:
        """Send what is filled of the part, and let the next one begin."""


class ObstoreWriter(_PartWriter):
    """Uploads parts from a few buffers of its own."""

    def __init__(
        self, client: ObstoreClient, path: str, expected_size: int, retries: Retries, describe: Describe
    ) -> None:
        super().__init__(path, expected_size, retries)
        self._client = client
        self._describe = describe
        self._file: Any = None
        self._sent: list[tuple[bytearray, memoryview]] = []

    def _new_part(self) -> bytearray:
        for index, (part, view) in enumerate(self._sent):
            try:
                view.release()
            except BufferError:
                continue  # obstore still reads from it
            del self._sent[index]
            return part
        return super()._new_part()

    def _send(self) -> None:
        # obstore continues to read from what it was given after write() has returned: until it has released the view.
        view = memoryview(self._part)[: self._filled]
        self._sent.append((self._part, view))
        self._part, self._filled = bytearray(), 0
        if self._file is None:
            self._file = self._retries.call(lambda: self._client.begin(self._path, view, self._mark), self._describe)
            return
        with translated(self._describe):
            self._file.write(view)

    def commit(self, size: int) -> None:
        assert size == self._position
        if self._file is None:
            last = memoryview(self._part)[: self._filled]
            self._retries.call(lambda: self._client.put(self._path, last), self._describe)
            return
        self._send()
        failure: Exception | None = None
        try:
            self._file.close()
        except Exception as error:  # noqa: BLE001 - raised below, unless only the answer was lost
            failure = error
        found = self._client.size_made_by(self._mark, self._path)
        if failure is not None and found is None:
            raise self._describe(failure)
        self._file = None
        if found not in (None, size):
            raise StorageError(
                f"the store has {found} bytes of the object, of which {size} were sent",
                path=self._path,
                remedy="find out what stands between this machine and the store, and save again",
            )

    def abort(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            error = RuntimeError("the upload was abandoned")
            try:
                file.__exit__(type(error), error, None)
            except Exception as failure:  # noqa: BLE001 - the first one counts; what remains is an orphan
                logger.info("an abandoned upload could not be ended: %s", self._describe(failure).message)
        self._sent.clear()
        self._part = bytearray()


class S3Writer(_PartWriter):
    """Uploads parts, one after the other, by the requests of s3fs; each is repeated alone and its answer looked at."""

    def __init__(
        self,
        filesystem: Any,
        path: str,
        expected_size: int,
        retries: Retries,
        describe: Callable[[str, str], Describe],
    ) -> None:
        super().__init__(path, expected_size, retries)
        self._filesystem = filesystem
        bucket, key, _ = filesystem.split_path(path)
        self._object = {"Bucket": bucket, "Key": key}
        self._describe = describe
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
            # The failure that led here is the one to tell; what remains is invisible, and an orphan that is removed
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


def abandoned_uploads(
    filesystem: Any, directory: str, silent_seconds: float, *, empty: bool
) -> Iterator[dict[str, str]]:
    """Yield the uploads into ``directory``, or a directory directly in it, to which nobody has added for so long.

    Time is that of the store's clock. With ``empty``, those count of which no part has arrived: they cost nothing, and
    some servers do not tell when they began. Each is given as arguments of ``abort_multipart_upload``.
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
