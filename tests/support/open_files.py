"""Lists the files that this process has open."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def open_files(directory: Path) -> list[str]:
    """Return the paths of open files in or below a directory; other open files of a test process come and go."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return sorted(path for path in found if path.startswith(f"{directory}{os.sep}"))
