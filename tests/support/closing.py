"""Takes permissions from files and directories, for tests of unreadable ones."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def closed_to_this_user(*paths: Path, mode: int = 0o000) -> Iterator[None]:
    """Set the mode of paths, and 755 at the end; root, whom modes do not stop, acts as user 65534 meanwhile."""
    for path in paths:
        path.chmod(mode)
    user = os.geteuid()
    try:
        if user == 0:
            os.seteuid(65534)
        yield
    finally:
        os.seteuid(user)
        for path in paths:
            path.chmod(0o755)
