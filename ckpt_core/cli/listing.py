"""``ckpt ls``: list the checkpoints in directories, with commit time, state, step, size and metrics."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckpt_core.cli.finding import Found, find_all, state_of
from ckpt_core.cli.metrics_and_pins import Told, in_words, listen, reasons
from ckpt_core.cli.output import age, print_error, print_json, print_table
from ckpt_core.cli.parser import Commands, Exit, Options
from ckpt_core.errors import CheckpointError
from ckpt_core.events import size_in_words

if TYPE_CHECKING:
    from ckpt_core.catalog import CheckpointInfo

_STYLES = {"DAMAGED": "red", "ERROR": "red", "FOREIGN": "yellow"}


def add_commands(commands: Commands) -> None:
    """Add the verbs of this file."""
    ls = commands.add(
        "ls",
        _ls,
        help="list the checkpoints of a directory, the newest first",
        epilog="Columns: when it was committed, state, step, size, metrics that its run noted, why it stays, path.\n"
        "States: committed (by this package), no digests (another program's), and those of ckpt verify: DAMAGED, "
        "FOREIGN, ERROR.\n"
        "Why: newest; best (says the newest of the run); pinned (by ckpt keep).",
        example="-R runs",
        codes="0 success, 1 a path, or what is below it, is not there or cannot be read, 2 usage.",
    )
    ls.add_argument("paths", nargs="*", default=["."], metavar="PATH", help="a directory, a bucket, a checkpoint (.)")
    ls.add_argument("-r", "-R", "--recursive", action="store_true", help="look in directories below it, too")


def _ls(options: Options) -> int:
    failures: dict[str, CheckpointError] = {}
    places = find_all(options.paths, options.storage_options, recursive=options.recursive, failures=failures)
    infos = [info for place in places for info in place.checkpoints]
    told = listen(infos, options.storage_options)
    kept = {path: why for place in places for path, why in reasons(place.checkpoints, told).items()}
    states = {info.path: state_of(info, options.storage_options, failures=failures) for info in infos}
    if options.json:
        print_json([_as_json(info, states[info.path], told[info.path], kept[info.path]) for info in infos])
    else:
        rows = [_row(info, states[info.path], told[info.path], kept[info.path]) for info in infos]
        print_table(rows, right=(1, 3, 4), styles=_STYLES)
        print_hints(places, options, failures)
    for error in failures.values():
        print_error(error)
    return Exit.FAILED if failures else Exit.OK


def print_hints(places: Sequence[Found], options: Options, failures: Mapping[str, CheckpointError]) -> None:
    """Print what places without our checkpoints hold, and where some are; what ``failures`` hold is unknown."""
    if not options.recursive:
        said = [place.hint(options.storage_options, options.verb) for place in places if not place.checkpoints]
    else:
        said = [text for place in places if (text := place.foreign(options.storage_options)) is not None]
        if not said and not failures and not any(place.checkpoints for place in places):
            said = [f"no checkpoints in or below {', '.join(options.paths)}"]
    for text in said:
        print(text, file=sys.stderr)


def _row(info: CheckpointInfo, state: str, told: Told, kept: list[str]) -> tuple[str, ...]:
    when = info.modified if info.committed is None else info.committed
    date = datetime.datetime.fromtimestamp(when).isoformat(sep=" ", timespec="seconds")
    step = "" if info.step is None else f"step {info.step}"
    said = state + (", file date" if info.committed is None else "")
    return date, age(when), said, step, size_in_words(info.size), in_words(told.metrics), ", ".join(kept), info.path


def _as_json(info: CheckpointInfo, state: str, told: Told, kept: list[str]) -> dict[str, Any]:
    return {
        "path": info.path,
        "state": state.lower(),
        "step": info.step,
        "committed": info.committed,
        "modified": info.modified,
        "bytes": info.size,
        "kind": "directory" if info.is_directory else "file",
        "metrics": dict(told.metrics),
        "kept_because": kept,
        "pinned": info.is_pinned,
    }
