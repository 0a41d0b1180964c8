"""``ckpt ls``: which checkpoints there are."""

from __future__ import annotations

import datetime
import sys
from typing import TYPE_CHECKING, Any

from ckpt_core.cli.finding import Found, find, walk
from ckpt_core.cli.output import age, print_json, print_table, short_size
from ckpt_core.cli.parser import Commands, Exit, Options

if TYPE_CHECKING:
    from ckpt_core.catalog import CheckpointInfo

__all__ = ["add_commands", "state_of"]


def add_commands(commands: Commands) -> None:
    """Add the verbs of this file."""
    ls = commands.add(
        "ls",
        _ls,
        help="list the checkpoints of a directory, the newest first",
        epilog="states: committed (by this package), no digests (another program's), DAMAGED (cannot be read)",
    )
    ls.add_argument("paths", nargs="*", default=["."], metavar="PATH", help="a directory, a bucket, a checkpoint (.)")
    ls.add_argument("-r", "--recursive", action="store_true", help="look in directories below it, too")


def _ls(options: Options) -> int:
    places: list[Found] = []
    for path in options.paths:
        found = find(path, options.storage_options)
        places.append(found)
        if options.recursive and not found.is_checkpoint:
            places += walk(path, options.storage_options)
    infos = [info for place in places for info in place.checkpoints]
    if options.json:
        print_json([_as_json(info) for info in infos])
        return Exit.OK
    print_table([_row(info) for info in infos], right=(1, 3, 4))
    if not options.recursive:
        for place in places:
            if not place.checkpoints:
                print(place.hint(options.storage_options), file=sys.stderr)
    elif not infos:
        print(f"no checkpoints in or below {', '.join(options.paths)}", file=sys.stderr)
    return Exit.OK


def state_of(info: CheckpointInfo) -> str:
    """Return a checkpoint's state, as far as its manifest says."""
    if not info.is_readable:
        return "DAMAGED"
    return "no digests" if info.committed is None else "committed"


def _row(info: CheckpointInfo) -> tuple[str, ...]:
    when = info.modified if info.committed is None else info.committed
    date = datetime.datetime.fromtimestamp(when).isoformat(sep=" ", timespec="seconds")
    step = "" if info.step is None else f"step {info.step}"
    state = state_of(info) + (", file date" if info.committed is None else "")
    return date, age(when), state, step, short_size(info.size), info.path


def _as_json(info: CheckpointInfo) -> dict[str, Any]:
    return {
        "path": info.path,
        "state": state_of(info).lower(),
        "step": info.step,
        "committed": info.committed,
        "modified": info.modified,
        "bytes": info.size,
        "kind": "directory" if info.is_directory else "file",
    }
