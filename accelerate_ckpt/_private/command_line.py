"""The only module that uses the internals of Accelerate's command line.

Accelerate has no entry point for flags of plugins, and refuses flags that it does not know. Its parser and the function
behind it are importable, but not documented; if a release moves them, ``accelerate launch -m accelerate_ckpt``, which
needs neither, keeps working, and the error here says so.
"""

from __future__ import annotations

import argparse
from typing import Any

import accelerate

try:
    from accelerate.commands.launch import CustomHelpFormatter, launch_command, launch_command_parser
except ImportError as moved:
    raise ImportError(
        f"Accelerate {accelerate.__version__} has moved the parser that accelerate-ckpt extends ({moved}); use "
        "'accelerate launch [flags] -m accelerate_ckpt [options] train.py' instead"
    ) from moved


def launch_parser(title: str) -> argparse.ArgumentParser:
    """Return the parser of ``accelerate launch``, with help that also shows the argument group ``title``.

    Accelerate hides groups that do not belong to the given flags, and those that it does not know.
    """

    class HelpFormatter(CustomHelpFormatter):  # type: ignore[misc]  # Accelerate publishes no types
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.titles.append(title)

    parser: argparse.ArgumentParser = launch_command_parser()
    parser.formatter_class = HelpFormatter
    return parser


def launch(options: argparse.Namespace) -> None:
    """Start the processes, as ``accelerate launch`` does after parsing."""
    launch_command(options)
