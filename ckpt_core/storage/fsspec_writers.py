"""Uploads to stores that take an object only as one stream or as one piece."""

from __future__ import annotations

import io
import logging
from typing import Any

from ckpt_core.errors import CheckpointError
from ckpt_core.storage.base import FileWriter
from ckpt_core.storage.failures import Describe, translated
from ckpt_core.storage.parts import PART_BYTES
from ckpt_core.storage.retrying import Retries

__all__ = ["ResumableWriter", "WholeObjectWriter"]

logger = logging.getLogger(__name__)


class ResumableWriter(FileWriter):
    """One upload that bytes are added to in order (GCS); the object exists when ``commit`` ends it.

    gcsfs repeats failed requests by itself, and goes on where the server says that it is.

    Args:
        filesystem: A ``gcsfs.GCSFileSystem``.
        path: URL of the object.
        describe: Makes errors for the user.
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
    """Collects the object in memory and stores it by one call, for stores that would show an unfinished file.

    Args:
        filesystem: Any fsspec filesystem.
        path: URL of the object.
        retries: Carries out the requests.
        describe: Makes errors for the user.
    """

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
