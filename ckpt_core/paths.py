"""Tell local paths from URLs of object stores, and normalize the paths that callers pass."""

from __future__ import annotations

import os
import re

from ckpt_core.errors import StorageError

StrPath = str | os.PathLike[str]  # path of a file or directory; also a URL, where a docstring says so
_URL = re.compile(r"^[a-zA-Z][a-zA-Z0-9+.-]+://|^[a-zA-Z0-9+]+::")
_SLASHES = re.compile(r"(?<![:/])/+$")  # but not those of "memory://"
_LOCAL_PROTOCOLS = ("file://", "local://")


def is_remote(path: StrPath) -> bool:
    """Return whether ``path`` is a URL that does not refer to the local filesystem."""
    text = os.fspath(path)
    return bool(_URL.match(text)) and not text.startswith(_LOCAL_PROTOCOLS)


def local_path(path: StrPath) -> str:
    """Return ``path`` as text, without the prefix of a local URL (``file://``).

    Raises:
        StorageError: No file can have such a name.
    """
    text = os.fspath(path)
    if "\0" in text:
        raise StorageError("the path has a NUL character in it", path=repr(text), remedy="choose another path")
    for prefix in _LOCAL_PROTOCOLS:
        if text.startswith(prefix):
            return text[len(prefix) :]
    return text


def full_path(path: StrPath) -> str:
    """Return the absolute path or URL that identifies a checkpoint, however ``path`` is spelled."""
    # A background save must not depend on a later chdir, and two spellings of a path must identify one checkpoint.
    text = local_path(path)
    return _SLASHES.sub("", text) if is_remote(text) else os.path.abspath(text)
