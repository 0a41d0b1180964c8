"""Files and directories that this user may not read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def closed_to_this_user(*paths: Path, mode: int = 0o000) -> Iterator[None]:
    """Take permissions from paths; root, who needs none, is another user meanwhile."""
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
