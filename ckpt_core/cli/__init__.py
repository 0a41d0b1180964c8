"""The ``ckpt`` command: inspect, verify and move checkpoints from a shell.

``command``: the list of verbs, and error handling. ``parser``: options of all verbs; how to add one. ``output``,
``progress``: tables, sizes, JSON, progress bars. ``finding``: the checkpoints at a path of the command line.
``metrics_and_pins``: their metrics and pins. Every other module has one group of verbs.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with the arguments after ``ckpt`` (by default, those of this process); return its exit code."""
    try:
        from ckpt_core.cli.command import run  # here, so that Ctrl-C during the imports prints no traceback, either

        return run(arguments)
    except KeyboardInterrupt:
        if arguments is None:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # so that a second Ctrl-C prints no traceback, either
        print("ckpt: interrupted", file=sys.stderr)
        return 130  # Exit.INTERRUPTED, whose module may not be imported yet
