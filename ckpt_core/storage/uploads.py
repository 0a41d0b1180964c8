"""Uploads to object stores, in parts if they are large: through obstore, and through fsspec's own clients.

fsspec publishes a file that is closed or garbage-collected, even if it is incomplete. The writers here never do.
"""

from __future__ import annotations

import abc
import datetime
import email.utils
import io
import logging
import time
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
_MARK = "ckpt-upload"  # key of user metadata that identifies the upload which has made an object
_MOST_PARTS = 10_000  # the limit of S3
_CLOCK_SECONDS = 2.0  # tolerance: stores report whole seconds
IN_DOUBT = (
    "The store may have committed the checkpoint before it fell silent: when it answers again, `ckpt verify` tells "
    "what is there"
)


def _part_bytes(expected_size: int) -> int:
    """Return the size of parts with which an upload stays within S3's limit, even if it grows by a tenth."""
    return PART_BYTES * max(1, -(-expected_size * 11 // (10 * PART_BYTES * _MOST_PARTS)))


def _in_doubt(failure: CheckpointError) -> CheckpointError:
    """Add to the error of a commit that it is unknown whether the store has carried it out; return the error."""
    failure.remedy = f"{failure.remedy}. {IN_DOUBT}"
    return failure


def _of_commit(describe: Describe) -> Describe:
    """Wrap ``describe`` for a commit that may have succeeded although its answer was lost, which cannot be checked."""

    def described(error: Exception) -> CheckpointError:
        failure = describe(error)
        return _in_doubt(failure) if is_transient(error) else failure

    return described


class _PartWriter(FileWriter):
    """Takes bytes in order, and sends a part when the first byte of the next one comes; ``commit`` sends the last.

    ``expected_size``, the number of bytes that will be written or a little less, determines the size of parts.
    ``retries`` carries out the requests that the client does not retry itself.
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
        """Send the filled bytes of the current part, and begin the next one."""


class ObstoreWriter(_PartWriter):
    """Uploads one object through obstore, in parts, from a few reused buffers."""

    def __init__(
        self,
        client: ObstoreClient,
        path: str,
        expected_size: int,
        retries: Retries,
        describe: Describe,
        abort_begun: Callable[[str, float], None],
    ) -> None:
        super().__init__(path, expected_size, retries)
        self._client = client
        self._describe = describe
        self._abort_begun = abort_begun
        self._file: Any = None
        self._is_closed = False  # whether closing obstore's writer was tried; it cannot abort from then on
        self._began_at = 0.0
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
        # obstore reads from the view even after write() has returned, until it has released the view.
        view = memoryview(self._part)[: self._filled]
        self._sent.append((self._part, view))
        self._part, self._filled = bytearray(), 0
        if self._file is None:
            self._began_at = time.monotonic()
            once = self._retries.has_given_up
            self._file = self._retries.call(
                lambda: self._client.begin(self._path, view, self._mark, once=once), self._describe
            )
            return
        with translated(self._describe):
            self._file.write(view)

    def commit(self, size: int) -> None:
        assert size == self._position
        failure: CheckpointError | None = None
        try:
            if self._file is None:
                last = memoryview(self._part)[: self._filled]
                once = self._retries.has_given_up
                self._retries.call(
                    lambda: self._client.put(self._path, last, mark=self._mark, once=once), self._describe
                )
                return
            self._send()
            self._is_closed = True
            with translated(self._describe):
                self._file.close()
        except CheckpointError as error:
            failure = error  # dropped below if only the answer was lost
        found: int | None = None
        try:
            if failure is not None and self._retries.has_given_up:
                raise failure  # do not ask the store, which would not answer this either
            found = self._client.size_made_by(self._mark, self._path)
        except Exception as error:  # noqa: BLE001 - of any type that a client raises: nothing is known
            logger.debug("could not look at %s: %s", self._path, type(error).__name__)
            failure = failure and _in_doubt(failure)
        if failure is not None and found is None:
            raise failure
        self._file = None
        if found not in (None, size):
            raise StorageError(
                f"the store has {found} bytes of the object, but {size} were sent",
                path=self._path,
                remedy="check what is between this machine and the store, and save again",
            )

    def abort(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            error = RuntimeError("the upload was abandoned")
            try:
                if self._is_closed:
                    self._abort_begun(self._path, time.monotonic() - self._began_at)
                else:
                    file.__exit__(type(error), error, None)
            except Exception as failure:  # noqa: BLE001 - the first one counts; what remains is an orphan
                _tell_of_orphan(self._path, self._describe(failure))
        self._sent.clear()
        self._part = bytearray()


def _tell_of_orphan(path: str, failure: CheckpointError) -> None:
    logger.warning(
        "the parts of an abandoned upload of %s could not be deleted: %s. They are in no checkpoint, and a later run "
        "or `ckpt clean` deletes them when they are an hour old",
        failure.path or path,
        failure.message,
    )


class S3Writer(_PartWriter):
    """Uploads parts, one after the other, by requests of s3fs; retries each alone and checks its answer."""

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
        """Make a request with retries; return the store's answer, which must have the field ``needs``, if given."""

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
            # Do not check the answer's ETag, which Ceph leaves empty if the object existed before.
            parts = {"MultipartUpload": {"Parts": self._parts}}
            self._finish("complete_multipart_upload", needs="Key", **self._upload, **parts)
            self._upload = {}
        else:
            body = self._part[: self._filled]
            self._finish("put_object", needs="ETag", Metadata={_MARK: self._mark}, Body=body)

    def _finish(self, method: str, *, needs: str, **arguments: Any) -> None:
        try:
            self._call("commit", method, needs=needs, **arguments)
        except CheckpointError as error:
            # An attempt may have succeeded although its answer was lost.
            is_there = self._is_there(patiently=not is_transient(error))
            if is_there is None:
                _in_doubt(error)
            if not is_there:
                raise

    def _is_there(self, *, patiently: bool) -> bool | None:
        """Return whether the object is the one that this upload made; None if the store does not answer."""
        try:
            if patiently:
                answer = self._call("read", "head_object")
            else:
                answer = self._filesystem.call_s3("head_object", **self._object)
        except FileNotFoundError:
            return False
        except Exception as error:  # noqa: BLE001 - of any type that a client raises: nothing is known
            logger.debug("could not look at %s: %s", self._path, type(error).__name__)
            return None
        return bool(answer.get("Metadata", {}).get(_MARK) == self._mark)

    def abort(self) -> None:
        upload, self._upload = self._upload, {}
        if not upload:
            return
        try:
            self._call("abort", "abort_multipart_upload", **upload)
        except CheckpointNotFoundError:
            return  # the upload is gone already
        except CheckpointError as error:
            _tell_of_orphan(self._path, error)  # the failure that led here is the one to raise


class StreamWriter(FileWriter):
    """Writes an object in order through a file of fsspec (GCS, Azure); the object exists once ``commit`` closes it.

    The clients retry failed requests themselves.
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
        with translated(_of_commit(self._describe)):
            self._file.close()

    def abort(self) -> None:
        if not self._file.closed:
            # Closing would publish what has been written so far: mark it closed before anything can close it.
            self._file.closed = True
            try:
                with translated(self._describe):
                    self._file.discard()
            except CheckpointError as error:
                # The error to raise is the one that led here; the service deletes the upload after a week.
                logger.warning("an abandoned upload could not be aborted: %s", error.message)

    def __del__(self) -> None:
        # fsspec publishes a file when it is garbage-collected, even if it is incomplete.
        if hasattr(self, "_file"):
            self._file.closed = True


class WholeObjectWriter(FileWriter):
    """Collects an object in memory and stores it by one call, for stores in which unfinished files would be visible."""

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

        self._retries.call(request, _of_commit(self._describe))
        self._buffer = io.BytesIO()

    def abort(self) -> None:
        self._buffer = io.BytesIO()


def abandoned_uploads(
    filesystem: Any, directory: str, silent_seconds: float, *, empty: bool
) -> Iterator[dict[str, str]]:
    """Yield uploads into ``directory``, or a directory directly in it, that got no part for ``silent_seconds``.

    Time is by the store's clock. Uploads of which no part has arrived are included only with ``empty``: they cost
    nothing, and some servers do not report when they began. Each is yielded as arguments of ``abort_multipart_upload``.
    """
    bucket, key, _ = filesystem.split_path(directory)
    prefix = f"{key.rstrip('/')}/" if key else ""
    for upload, begun, now in _uploads(filesystem, bucket, prefix):
        if upload["Key"].removeprefix(prefix).count("/") <= 1:
            times = [*([begun] if empty else []), *_times_of_parts(filesystem, upload, now)]
            if times and (now - max(times)).total_seconds() >= silent_seconds:
                yield upload


def uploads_begun(filesystem: Any, path: str, seconds: float) -> Iterator[dict[str, str]]:
    """Yield the uploads of one object that began in the last ``seconds``; clock and form as in abandoned_uploads."""
    bucket, key, _ = filesystem.split_path(path)
    for upload, begun, now in _uploads(filesystem, bucket, key):
        if upload["Key"] == key and (now - begun).total_seconds() <= seconds + _CLOCK_SECONDS:
            yield upload


def _uploads(
    filesystem: Any, bucket: str, prefix: str
) -> Iterator[tuple[dict[str, str], datetime.datetime, datetime.datetime]]:
    """Yield uploads of objects whose keys begin with ``prefix``: identifying arguments, start, and the store's time."""
    more: dict[str, str] = {}
    while True:
        page = filesystem.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix, **more)
        now = email.utils.parsedate_to_datetime(page["ResponseMetadata"]["HTTPHeaders"]["date"])
        for upload in page.get("Uploads", []):
            if upload["Key"].startswith(prefix):
                names = {"Bucket": bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
                yield names, upload["Initiated"], now
        if not page.get("IsTruncated"):
            return
        more = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}


def _times_of_parts(filesystem: Any, upload: dict[str, str], now: datetime.datetime) -> list[datetime.datetime]:
    """Return the times at which the parts of an upload have arrived; ``now`` if the upload has ended meanwhile."""
    times: list[datetime.datetime] = []
    more: dict[str, int] = {}
    try:
        while True:
            parts = filesystem.call_s3("list_parts", **upload, **more)
            times += [part["LastModified"] for part in parts.get("Parts", [])]
            if not parts.get("IsTruncated"):
                return times
            more = {"PartNumberMarker": parts["NextPartNumberMarker"]}
    except FileNotFoundError:
        return [now]
