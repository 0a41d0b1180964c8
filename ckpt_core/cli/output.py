"""Print the output of the command: tables, cards, ages and errors for people, JSON for programs."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ckpt_core.errors import UnsafeCheckpointError

_AGES = ((86400 * 365, "y"), (86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
_STYLES = {"bold": 1, "red": 31, "green": 32, "yellow": 33, "dim": 2}

# Parts of a state in the order in which they are shown. Others, such as loops and callbacks, come after these.
_FIRST = (
    {"state_dict", "model", "module"},
    {"optimizer_states", "optimizer"},
    {"global_step", "step", "epoch"},
    {"lr_schedulers", "scheduler"},
)
_WORD = re.compile(r"\W.*")
_BEGINNING = re.compile(r" *(?:[-+~] )?")  # indentation and sign of a line, which stay with the first word
_INDEX = re.compile(r"_\d+$")  # Accelerate's second model is model_1


def interest(part: str) -> int:
    """Return the position at which to show a part of a state, by its top-level name: 0 is first."""
    name = _INDEX.sub("", part)
    return next((place for place, names in enumerate(_FIRST) if name in names), len(_FIRST))


def age(then: float) -> str:
    """Return how long ago a Unix time in seconds is: ``"3 h ago"``."""
    seconds = time.time() - then
    for unit, name in _AGES:
        if seconds >= unit:
            return f"{seconds / unit:.0f} {name} ago"
    return "now"


def count(number: int, thing: str) -> str:
    """Return ``"1 rank"`` or ``"2 ranks"``."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def printable(text: str) -> str:
    """Return text with all characters escaped that would break the line or control the terminal."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def print_error(error: Exception | str, command: str = "ckpt") -> None:
    """Print an error to stderr, without characters that would control the terminal."""
    text = f"{command}: {error}" if isinstance(error, str) else f"{command}: {type(error).__name__}: {error}"
    print("\n".join(printable(line) for line in text.split("\n")), file=sys.stderr)


def print_json_error(error: Exception | str, code: int) -> None:
    """Print the JSON document of a command that fails with a message and has nothing else to print."""
    known = {name: getattr(error, name, None) for name in ("path", "key", "remedy")}
    name = None if isinstance(error, str) else type(error).__name__
    print_json({"error": {"code": code, "type": name, "message": getattr(error, "message", str(error)), **known}})


def fail(options: argparse.Namespace, error: Exception | str, code: int, *, said_by: str = "ckpt") -> int:
    """Print why a command does nothing, with ``--json`` also as its JSON document, and return its exit code."""
    if isinstance(error, UnsafeCheckpointError):  # its own remedy, weights_only, is for programs
        error.remedy = "if you trust its author, ckpt convert and diff take --allow-pickle: it can run arbitrary code"
    print_error(error, said_by)
    if options.json:
        print_json_error(error, code)
    return code


def styled(text: str, style: str) -> str:
    """Return text in a style (``"bold"``, ``"red"``, ...) if stdout is a terminal and styles are not disabled."""
    is_wanted = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return f"\033[{_STYLES[style]}m{text}\033[0m" if text and style and is_wanted else text


def print_json(value: Any) -> None:
    """Print a JSON document; values that JSON cannot represent, including NaN and infinity, are printed as text."""
    print(json.dumps(_strict(value), indent=2, default=str))


def _strict(value: Any) -> Any:
    """Return a value with NaN and infinity replaced by text, because strict JSON parsers refuse them."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {name: _strict(below) for name, below in value.items()}
    return [_strict(below) for below in value] if isinstance(value, (list, tuple)) else value


def _terminal_width() -> int | None:
    """Return the width of the terminal in characters; None if stdout is not a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def print_lines(text: str, style: str = "", *, to: int | None = None, indent: int = 4) -> None:
    """Print a line, with its first ``to`` characters (by default all) in a style.

    If the terminal is too narrow, the line is broken between words, and its other lines are indented.
    """
    line, width = printable(text), _terminal_width()
    lines = [line]
    if width is not None and len(line) > width:
        own = _BEGINNING.match(line)[0]  # type: ignore[index] # it may be empty
        lines = textwrap.wrap(
            line[len(own) :],
            max(width, indent + 20),
            initial_indent=own,
            subsequent_indent=" " * indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
    for i, part in enumerate(lines):
        end = len(part) if to is None else 0 if i else to
        print(styled(part[:end], style) + part[end:])


def print_card(rows: Iterable[Sequence[str]]) -> None:
    """Print two columns: names and their texts."""
    found = [*rows]
    widest = max(len(name) for name, _ in found)
    for name, text in found:
        print_lines(f"{name.ljust(widest)}  {text}".rstrip(), indent=widest + 2)


def print_table(
    rows: Iterable[Sequence[str]], *, right: Sequence[int] = (), styles: Mapping[str, str] | None = None
) -> None:
    """Print rows in columns as wide as their widest cell, without a heading; the last column is not padded.

    Empty columns are left out, and those with an index in ``right`` are aligned to the right. ``styles`` has the style
    of a cell by its first word. Columns that do not fit into the terminal are printed on a second line of each row.
    """
    found = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*found, strict=True)]
    breaks, here, width = set(), 0, _terminal_width()
    for i, w in enumerate(widths):
        if width is not None and here and w and here + w > width:
            breaks.add(i)
            here = 2
        here += w + 2 if w else 0
    for row in found:
        text = ""
        for i, (cell, w) in enumerate(zip(row, widths, strict=True)):
            if i in breaks:
                text = text.rstrip() + "\n  "
            if i < len(row) - 1:
                padded = cell.rjust(w) if i in right else cell.ljust(w)
                text += styled(padded, (styles or {}).get(_WORD.sub("", cell), "")) + "  " * bool(w)
            else:
                text += cell
        print(text)
