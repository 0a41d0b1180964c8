"""The ``ckpt`` command: look at, trust and move checkpoints from a shell.

``command``: the list of verbs. ``parser``: what all verbs share; how to add one. ``output``, ``progress``: tables,
sizes, JSON, progress bars. ``finding``: the checkpoints that a path of the command line means. Everything else: one
file for each group of verbs.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with the words after ``ckpt``, by default this process's; return its exit code."""
    try:
        from ckpt_core.cli.command import run  # here, because Ctrl-C during the imports is no traceback, either

        return run(arguments)
    except KeyboardInterrupt:
        if arguments is None:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # the process ends, and Ctrl-C once more is no traceback
        print("ckpt: interrupted", file=sys.stderr)
        return 130  # Exit.INTERRUPTED, which may be what was being imported
