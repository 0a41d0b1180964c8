"""Fills a filesystem, for tests of what happens when there is no space left."""

from __future__ import annotations

import contextlib
import errno
from pathlib import Path
from typing import Any


def fill(directory: Path) -> Path:
    """Fill the filesystem of ``directory``; return the file to delete to free the space again."""
    path = directory / "filler"
    with path.open("wb", buffering=0) as file:
        for size in (2**16, 2**12, 1):
            with contextlib.suppress(_FullError):
                while True:
                    _write(file, b"x" * size)
    return path


class _FullError(Exception):
    pass


def _write(file: Any, data: bytes) -> None:
    try:
        file.write(data)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise _FullError from error
