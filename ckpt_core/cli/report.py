"""``ckpt report``: show what the checkpoints of a run cost, from its event log: text, JSON, an HTML page, a picture."""

from __future__ import annotations

import os
import sys
from typing import Any

from ckpt_core.cli.output import fail, print_card, print_json, printable
from ckpt_core.cli.parser import Commands, Exit, Options
from ckpt_core.events import size_in_words
from ckpt_core.report import draw, read_events, run_in_words, seconds_in_words, totals_of, write_page


def add_commands(commands: Commands) -> None:
    """Add the verb of this file."""
    report = commands.add(
        "report",
        _report,
        help="show what the checkpoints of a run cost, from its event log",
        example="events.jsonl --output report.html",
        codes="0 success, 1 the log cannot be read, 2 usage, 3 there is none.",
    )
    report.add_argument(
        "events", nargs="+", metavar="EVENTS", help="the file given to event_log=, or PAGE.jsonl of report=PAGE"
    )
    report.add_argument("-o", "--output", metavar="HTML", help="write one self-contained page, too")
    report.add_argument("--png", metavar="PNG", help="write a picture of that page, too; Chromium or Chrome draws it")


def _report(options: Options) -> int:
    try:
        processes = read_events(options.events)
    except (OSError, ValueError) as error:
        said = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else error
        log = next((f"{path}.jsonl" for path in options.events if os.path.isfile(f"{path}.jsonl")), None)
        said = said if log is None else f"{said} (this is the page: give {log})"
        code = Exit.MISSING if isinstance(error, FileNotFoundError) else Exit.FAILED
        return fail(options, f"there is no event log: {said}", code)
    if options.output is not None:
        write_page(processes, options.output)
    if options.png is not None:
        draw(processes, options.png)
    totals = totals_of(processes)
    if options.json:
        print_json(totals)
    else:
        print_card(_in_words(totals))
    for path in filter(None, (options.output, options.png)):
        print(f"wrote {printable(path)}", file=sys.stderr)
    return Exit.OK


def _in_words(totals: dict[str, Any]) -> list[tuple[str, str]]:
    bad = [(totals["failed"], "failed"), (totals["not_finished"], "not finished")]
    durable = f"{totals['durable']:,} durable, {size_in_words(totals['bytes'])}"
    in_words = {name: seconds_in_words(value) for name, value in totals.items() if "seconds" in name}
    rows = [
        ("saves", ", ".join([durable, *(f"{number:,} {what}" for number, what in bad if number)])),
        ("stall", f"{in_words['stall_seconds']} in all, {totals['share_of_run']:.2%} of the run"),
        ("", f"{in_words['stall_seconds_median']} typically, {in_words['stall_seconds_longest']} at most"),
        ("run", run_in_words(totals)),
    ]
    if totals["durable"]:
        rows.insert(-1, ("durable after", f"{in_words['durable_after_seconds_median']} typically"))
    if totals["interruptions"]:
        rows.append(("interruptions", f"{totals['interruptions']:,}, which cost {in_words['interruption_seconds']}"))
    more = {"uploads": "uploaded", "failed_uploads": "uploads failed", "loads": "loaded", "passed_over": "passed over"}
    rows += [("", f"{totals[name]:,} {what}") for name, what in more.items() if totals[name]]
    return rows
