"""``ckpt verify``: compare every byte of checkpoints with its digest."""

from __future__ import annotations

import dataclasses
import sys
import time
from typing import Any

from ckpt_core.cli.finding import find, find_foreign, is_there, state_of_error
from ckpt_core.cli.output import count, print_json, print_lines, printable
from ckpt_core.cli.parser import Commands, Exit, Options
from ckpt_core.cli.progress import progress
from ckpt_core.errors import CheckpointError
from ckpt_core.events import size_in_words

_EXIT = {"whole": 0, "no digests": 0, "DAMAGED": Exit.FAILED, "ERROR": Exit.FAILED}
_EXIT |= {"MISSING": Exit.MISSING, "FOREIGN": Exit.FOREIGN}
_WORST = (Exit.FAILED, Exit.MISSING, Exit.FOREIGN, Exit.OK)


@dataclasses.dataclass(frozen=True)
class _Verdict:
    path: str
    state: str
    message: str = ""
    key: str | None = None
    file: str | None = None
    bytes: int = 0


def add_commands(commands: Commands) -> None:
    """Add the verb of this file."""
    verify = commands.add(
        "verify",
        _verify,
        help="compare every byte with its digest",
        epilog="whole       every byte is the one that was saved\n"
        "no digests  another program's (torch, Hugging Face, DCP, Accelerate), and as whole as its format can tell\n"
        "DAMAGED     bytes differ or are missing: the file, and the key of the tensor\n"
        "MISSING     nothing is there\n"
        "FOREIGN     no checkpoint, or of a version that is not known here\n"
        "ERROR       it could not be read",
        example="runs/7",
        codes="0 whole or no digests, 1 DAMAGED or ERROR, 2 usage, 3 MISSING or nothing to verify, 4 FOREIGN; "
        "of several checkpoints, the first of 1, 3, 4 that occurs.",
    )
    verify.add_argument("paths", nargs="+", metavar="PATH", help="a checkpoint, or a directory of them")


def _verify(options: Options) -> int:
    sizes: dict[str, int] = {}
    verdicts: dict[str, _Verdict | None] = {}  # in the order of the paths; None: yet to be read
    for path in options.paths:
        failures: dict[str, CheckpointError] = {}
        try:
            found = find(path, options.storage_options, failures=failures)
            is_foreign = not found.checkpoints and find_foreign(path, options.storage_options) is not None
        except CheckpointError as error:
            verdicts[path] = _failed(path, error)
            continue
        verdicts |= {unread: _failed(unread, error) for unread, error in failures.items()}
        here = {path: found.size} if is_foreign else {info.path: info.size for info in found.checkpoints}
        if not here and not failures:
            verdicts[path] = _Verdict(path, "MISSING", f"nothing to verify: {found.hint(options.storage_options)}")
        sizes |= here
        verdicts |= dict.fromkeys(here)
    started, read = time.perf_counter(), 0
    with progress(options, "verify", sum(sizes.values())):
        for path, size in sizes.items():
            verdict = _verdict(path, size, options.storage_options)
            is_alarm = _EXIT[verdict.state] != Exit.OK and path not in options.paths
            if is_alarm and not is_there(path, options.storage_options):
                print(f"{printable(path)} was deleted meanwhile", file=sys.stderr)
                del verdicts[path]
                continue
            verdicts[path] = verdict
            read += size
    seconds = time.perf_counter() - started
    found_out = [verdict for verdict in verdicts.values() if verdict is not None]
    if options.json:
        print_json([{**dataclasses.asdict(verdict), "state": verdict.state.lower()} for verdict in found_out])
    else:
        for verdict in found_out:
            style = "red" if _EXIT[verdict.state] != Exit.OK else "green" if verdict.state == "whole" else "yellow"
            print_lines(_line(verdict), style, to=len(verdict.state))
        if sys.stderr.isatty() and sizes:
            speed = f"{size_in_words(read)} in {seconds:.1f} s, {size_in_words(read / seconds)}/s"
            print(f"{count(len(sizes), 'checkpoint')}, {speed}", file=sys.stderr)
    codes = {_EXIT[verdict.state] for verdict in found_out}
    return next((code for code in _WORST if code in codes), Exit.MISSING)


def _verdict(path: str, size: int, storage_options: dict[str, Any] | None) -> _Verdict:
    from ckpt_core._pipeline import loading

    try:
        foreign = find_foreign(path, storage_options)
        if foreign is not None:
            foreign.check()
            return _Verdict(path, "no digests", f"{foreign.what}; compared: {foreign.checked}", bytes=size)
        verified = loading.verify(path, storage_options=storage_options)
    except CheckpointError as error:
        return _failed(path, error, size)
    return _Verdict(path, "whole" if verified else "no digests", bytes=size)


def _failed(path: str, error: CheckpointError, size: int = 0) -> _Verdict:
    return _Verdict(path, state_of_error(error), error.message, error.key, error.path, size)


def _line(verdict: _Verdict) -> str:
    text = f"{verdict.state}  {verdict.path}" + (f": {verdict.message}" if verdict.message else "")
    if _EXIT[verdict.state] == Exit.OK:
        return text
    if verdict.key is not None and verdict.key not in verdict.message:
        text += f", key {verdict.key}"
    if verdict.file is not None and verdict.file.rstrip("/") != verdict.path.rstrip("/"):
        text += f" ({verdict.file})"
    return text
