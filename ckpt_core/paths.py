"""The type of a path that a caller gives."""

from __future__ import annotations

import os

__all__ = ["StrPath"]

StrPath = str | os.PathLike[str]  # of a file or directory; or a URL, where a docstring says so
