"""``ckpt ls``: which checkpoints there are."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ckpt_core.cli.finding import Found, find_all
from ckpt_core.cli.output import age, print_json, print_table
from ckpt_core.cli.parser import Commands, Exit, Options
from ckpt_core.cli.telling import Told, in_words, listen, reasons
from ckpt_core.events import size_in_words

if TYPE_CHECKING:
    from ckpt_core.catalog import CheckpointInfo

__all__ = ["add_commands", "print_hints", "state_of"]


def add_commands(commands: Commands) -> None:
    """Add the verbs of this file."""
    ls = commands.add(
        "ls",
        _ls,
        help="list the checkpoints of a directory, the newest first",
        epilog="Columns: when it was committed, state, step, size, metrics that its run noted, why it stays, path.\n"
        "States: committed (by this package), no digests (another program's), DAMAGED (cannot be read).\n"
        "Why: newest; best (says the newest of the run); pinned (by ckpt keep).",
    )
    ls.add_argument("paths", nargs="*", default=["."], metavar="PATH", help="a directory, a bucket, a checkpoint (.)")
    ls.add_argument("-r", "-R", "--recursive", action="store_true", help="look in directories below it, too")


def _ls(options: Options) -> int:
    places = find_all(options.paths, options.storage_options, recursive=options.recursive)
    infos = [info for place in places for info in place.checkpoints]
    told = listen(infos, options.storage_options)
    kept = {path: why for place in places for path, why in reasons(place.checkpoints, told).items()}
    if options.json:
        print_json([_as_json(info, told[info.path], kept[info.path]) for info in infos])
        return Exit.OK
    print_table([_row(info, told[info.path], kept[info.path]) for info in infos], right=(1, 3, 4))
    print_hints(places, options)
    return Exit.OK


def print_hints(places: Sequence[Found], options: Options) -> None:
    """Say of what has no checkpoints of ours what it has, and where some are."""
    if not options.recursive:
        said = [place.hint(options.storage_options) for place in places if not place.checkpoints]
    else:
        said = [text for place in places if (text := place.foreign(options.storage_options)) is not None]
        if not said and not any(place.checkpoints for place in places):
            said = [f"no checkpoints in or below {', '.join(options.paths)}"]
    for text in said:
        print(text, file=sys.stderr)


def state_of(info: CheckpointInfo) -> str:
    """Return a checkpoint's state, as far as its manifest says."""
    if info.path.endswith(".safetensors"):  # as it was named itself
        return "no digests"
    if not info.is_readable:
        return "DAMAGED"
    return "no digests" if info.committed is None else "committed"


def _row(info: CheckpointInfo, told: Told, kept: list[str]) -> tuple[str, ...]:
    when = info.modified if info.committed is None else info.committed
    date = datetime.datetime.fromtimestamp(when).isoformat(sep=" ", timespec="seconds")
    step = "" if info.step is None else f"step {info.step}"
    state = state_of(info) + (", file date" if info.committed is None else "")
    return date, age(when), state, step, size_in_words(info.size), in_words(told.metrics), ", ".join(kept), info.path


def _as_json(info: CheckpointInfo, told: Told, kept: list[str]) -> dict[str, Any]:
    return {
        "path": info.path,
        "state": state_of(info).lower(),
        "step": info.step,
        "committed": info.committed,
        "modified": info.modified,
        "bytes": info.size,
        "kind": "directory" if info.is_directory else "file",
        "metrics": dict(told.metrics),
        "kept_because": kept,
        "pinned": info.is_pinned,
    }
