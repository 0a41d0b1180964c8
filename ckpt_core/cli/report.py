"""``ckpt report``: what the checkpoints of a run have cost, from its event log; as text, JSON, or one HTML page."""

from __future__ import annotations

import dataclasses
import datetime
import html
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ckpt_core.cli.output import print_json, print_table, printable
from ckpt_core.cli.parser import Commands, Exit, Options
from ckpt_core.events import size_in_words

__all__ = ["Process", "Save", "add_commands", "page_of", "read_events", "totals_of"]

_WIDTH, _ROW, _PLOT = 1000, 34, 140  # pixels
_MOST_MARKS = 2000  # in one picture: more cannot be told apart
_MOST_ROWS = 200  # of the table
_MOST_PROCESSES = 64


@dataclasses.dataclass
class Save:
    """One save of one process.

    Attributes:
        path: The checkpoint.
        started: Unix time in seconds at which training stopped for it.
        stall: Seconds until training continued; None if the process ended before.
        durable: Unix time at which it was committed; None if it was not.
        bytes: Size of the checkpoint.
        error: Why it failed; empty if it did not.
    """

    path: str
    started: float
    stall: float | None = None
    durable: float | None = None
    bytes: int = 0
    error: str = ""

    @property
    def outcome(self) -> str:
        """What became of it, in a word or two."""
        if self.error:
            return "failed"
        return "durable" if self.durable is not None else "not finished"


@dataclasses.dataclass
class Process:
    """What one process has reported.

    Attributes:
        pid: Its number.
        first, last: Unix times in seconds of its first and its last event.
        saves: Its saves.
        others: The other events: uploads, loads, deletions and what was passed over.
    """

    pid: int
    first: float
    last: float
    saves: list[Save] = dataclasses.field(default_factory=list)
    others: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def add(self, event: dict[str, Any]) -> None:
        """Note one event."""
        kind, moment = event["event"], float(event["time"])
        begun = moment - float(event.get("stall_seconds") or event.get("seconds") or 0.0)
        self.first, self.last = min(self.first, begun), max(self.last, moment)
        if kind == "SaveStarted":
            self.saves.append(Save(event["path"], moment))
            return
        save = next((each for each in reversed(self.saves) if each.path == event["path"]), None)
        if save is None or kind not in ("SnapshotTaken", "SaveCommitted", "SaveFailed"):
            self.others.append(event)
        elif kind == "SnapshotTaken":
            save.stall, save.bytes = float(event["stall_seconds"]), max(save.bytes, int(event["bytes"]))
        elif kind == "SaveCommitted":
            save.durable, save.bytes = moment, max(save.bytes, int(event["bytes"]))
        else:
            save.error = str(event["error"])


def read_events(paths: Iterable[str]) -> list[Process]:
    """Return the processes that have written to event logs, in the order of their first events.

    A line that was cut off by a crash is left out.

    Args:
        paths: Local files, as ``event_log`` writes them.

    Raises:
        ValueError: One of them is no event log.
        OSError: One of them cannot be read.
    """
    processes: dict[tuple[str, int], Process] = {}
    for path in paths:
        before = len(processes)
        for event in _events(path):
            key, moment = (path, int(event["pid"])), float(event["time"])
            processes.setdefault(key, Process(key[1], moment, moment)).add(event)
        if len(processes) == before:
            raise ValueError(f"{path} holds no events")
    return sorted(processes.values(), key=lambda process: process.first)


def _events(path: str) -> Iterator[dict[str, Any]]:
    with Path(path).open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                event = json.loads(line)
                if event["event"] and event["path"] and float(event["time"]) and int(event["pid"]):
                    yield event
            except (ValueError, KeyError, TypeError):
                continue


def totals_of(processes: Sequence[Process]) -> dict[str, Any]:
    """Return the totals of a run.

    Args:
        processes: From :func:`read_events`.
    """
    saves = [save for process in processes for save in process.saves]
    stalls = sorted(save.stall for save in saves if save.stall is not None)
    commits = sorted(save.durable - save.started for save in saves if save.durable is not None)
    span = sum(process.last - process.first for process in processes)
    kinds = [event["event"] for process in processes for event in process.others]
    return {
        "processes": len(processes),
        "seconds": span,
        "saves": len(saves),
        "durable": sum(save.durable is not None for save in saves),
        "failed": sum(bool(save.error) for save in saves),
        "not_finished": sum(save.outcome == "not finished" for save in saves),
        "bytes": sum(save.bytes for save in saves if save.durable is not None),
        "stall_seconds": sum(stalls),
        "stall_seconds_median": stalls[len(stalls) // 2] if stalls else 0.0,
        "stall_seconds_longest": stalls[-1] if stalls else 0.0,
        "durable_after_seconds_median": commits[len(commits) // 2] if commits else 0.0,
        "share_of_run": sum(stalls) / span if span > 0 else 0.0,
        "uploads": kinds.count("CheckpointUploaded"),
        "failed_uploads": kinds.count("UploadFailed"),
        "loads": kinds.count("CheckpointLoaded"),
        "passed_over": kinds.count("CheckpointSkipped"),
    }


def add_commands(commands: Commands) -> None:
    """Add the verb of this file."""
    report = commands.add(
        "report",
        _report,
        help="say what the checkpoints of a run have cost, from its event log",
        epilog="Example: ckpt report events.jsonl --output report.html\n"
        "Exit codes: 0 well, 1 the log cannot be read, 3 there is none.",
    )
    report.add_argument("events", nargs="+", metavar="EVENTS", help="a file that event_log= has named")
    report.add_argument("-o", "--output", metavar="HTML", help="write one self-contained page, too")


def _report(options: Options) -> int:
    import sys

    try:
        processes = read_events(options.events)
    except (OSError, ValueError) as error:
        print(f"ckpt: {error}", file=sys.stderr)
        return Exit.MISSING if isinstance(error, FileNotFoundError) else Exit.FAILED
    totals = totals_of(processes)
    if options.json:
        print_json(totals)
    else:
        print_table(_in_words(totals))
    if options.output is not None:
        Path(options.output).write_text(page_of(processes), encoding="utf-8")
        print(f"wrote {options.output}", file=sys.stderr)
    return Exit.OK


def _in_words(totals: dict[str, Any]) -> list[tuple[str, str]]:
    bad = [(totals["failed"], "failed"), (totals["not_finished"], "not finished")]
    durable = f"{totals['durable']:,} durable, {size_in_words(totals['bytes'])}"
    typical, longest = _seconds(totals["stall_seconds_median"]), _seconds(totals["stall_seconds_longest"])
    rows = [
        ("saves", ", ".join([durable, *(f"{number:,} {what}" for number, what in bad if number)])),
        ("stall", f"{_seconds(totals['stall_seconds'])} in all, {totals['share_of_run']:.2%} of the run"),
        ("", f"{typical} typically, {longest} at most"),
        ("durable after", f"{_seconds(totals['durable_after_seconds_median'])} typically"),
        ("run", f"{_seconds(totals['seconds'])} in {totals['processes']:,} process(es)"),
    ]
    more = {"uploads": "uploaded", "failed_uploads": "uploads failed", "loads": "read", "passed_over": "passed over"}
    rows += [("", f"{totals[name]:,} {what}") for name, what in more.items() if totals[name]]
    return rows


def _seconds(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 120 else str(datetime.timedelta(seconds=round(seconds)))


# ---- the page --------------------------------------------------------------------------------------------------------

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:1040px;margin:2em auto;padding:0 1em;color:#1f2933;background:#fff}
.cards{display:flex;flex-wrap:wrap;gap:1em}
.card{flex:1;min-width:9em;padding:.8em 1em;background:#f4f6f8;border-radius:8px}
.card b{display:block;font-size:1.5em}svg{width:100%;height:auto}
table{border-collapse:collapse;width:100%}td,th{text-align:right;padding:.25em .6em;border-bottom:1px solid #e3e8ee}
td:first-child,th:first-child{text-align:left;word-break:break-all}.muted{color:#6b7785}
@media(prefers-color-scheme:dark){body{background:#14181d;color:#e3e8ee}.card{background:#1f2933}td,th{border-color:#334}}
"""

_COLORS = {"CheckpointUploaded": "#5b8def", "UploadFailed": "#d6293e", "CheckpointLoaded": "#8e6bbf"}
_LEGEND = (
    "One row for each process. Orange: training stands still. Green: the checkpoint is written in the background. Red: "
    "it failed, or the process ended before it was durable. Blue: an upload. Violet: a checkpoint is read."
)


def page_of(processes: Sequence[Process]) -> str:
    """Return one self-contained HTML page about a run: totals, a time line, every stall, and a table of the saves.

    Args:
        processes: From :func:`read_events`.
    """
    totals = totals_of(processes)
    cards = [
        (f"{totals['share_of_run']:.2%}", "of the run was spent waiting for checkpoints"),
        (_seconds(totals["stall_seconds_median"]), "training stood still for a typical save"),
        (f"{totals['durable']:,}", f"checkpoints durable, {size_in_words(totals['bytes'])} in all"),
        (_seconds(totals["durable_after_seconds_median"]), "until a typical save was durable"),
    ]
    bad = totals["failed"] + totals["not_finished"] + totals["failed_uploads"] + totals["passed_over"]
    if bad:
        cards.append((f"{bad:,}", "saves failed or not finished, uploads failed, checkpoints passed over"))
    begin = datetime.datetime.fromtimestamp(processes[0].first).isoformat(sep=" ", timespec="seconds")
    saves = sorted((save for process in processes for save in process.saves), key=lambda save: save.started)
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>",
        f"<title>Checkpoints of a run</title><style>{_STYLE}</style><h1>Checkpoints of a run</h1>",
        f"<p class=muted>from {begin}, {_seconds(totals['seconds'])} in {totals['processes']:,} process(es)</p>",
        "<div class=cards>",
        *(f"<div class=card><b>{html.escape(value)}</b>{html.escape(text)}</div>" for value, text in cards),
        f"</div><h2>Time line</h2><p>{_LEGEND}</p>",
        _time_line(processes),
        "<h2>Stall of each save</h2>",
        _stalls(saves),
        "<h2>Saves</h2>",
        _table(saves),
    ]
    return "\n".join(parts) + "\n"


def _time_line(processes: Sequence[Process]) -> str:
    shown = processes[:_MOST_PROCESSES]
    begin, end = min(process.first for process in shown), max(process.last for process in shown)
    scale = _WIDTH / max(end - begin, 1e-9)
    height = _ROW * len(shown) + 20
    marks = [f"<svg viewBox='0 0 {_WIDTH} {height}' role='img' aria-label='time line'>"]
    for row, process in enumerate(shown):
        top = row * _ROW + 4

        def bar(start: float, stop: float, offset: int, color: str, note: str, top: int = top) -> str:
            left, width = (start - begin) * scale, max((stop - start) * scale, 1.0)
            return (
                f"<rect x='{left:.1f}' y='{top + offset}' width='{width:.1f}' height='12' fill='{color}'>"
                f"<title>{html.escape(printable(note))}</title></rect>"
            )

        marks.append(bar(process.first, process.last, 0, "#d9e2ec", f"process {process.pid}"))
        for save in process.saves[:: len(process.saves) // (_MOST_MARKS // len(shown)) + 1]:
            name = save.path.rstrip("/").rpartition("/")[2]
            resumed = save.started + (save.stall or 0.0)
            written = process.last if save.durable is None else save.durable
            color = "#38a89d" if save.outcome == "durable" else "#d6293e"
            if written > resumed:
                marks.append(bar(resumed, written, 13, color, f"{name}: {save.outcome} {save.error}"))
            if save.stall is not None:
                marks.append(bar(save.started, resumed, 0, "#f08c00", f"{name}: {_seconds(save.stall)}"))
        for event in process.others[: _MOST_MARKS // len(shown)]:
            if event["event"] in _COLORS:
                start, note = event["time"] - event.get("seconds", 0.0), f"{event['event']}: {event['path']}"
                marks.append(bar(start, event["time"], 13, _COLORS[event["event"]], note))
    marks.append(f"<text x='0' y='{height - 4}' font-size='12' fill='#6b7785'>0</text>")
    marks.append(
        f"<text x='{_WIDTH}' y='{height - 4}' font-size='12' text-anchor='end' fill='#6b7785'>"
        f"{_seconds(end - begin)}</text></svg>"
    )
    if len(processes) > len(shown):
        marks.append(f"<p class=muted>the first {len(shown)} of {len(processes):,} processes</p>")
    return "".join(marks)


def _stalls(saves: Sequence[Save]) -> str:
    stalls = [save for save in saves if save.stall is not None]
    if not stalls:
        return "<p class=muted>no save got so far</p>"
    longest = max(save.stall or 0.0 for save in stalls) or 1e-9
    # of the saves that share a place in the picture, the longest
    each = len(stalls) // _MOST_MARKS + 1
    chosen = [max(stalls[i : i + each], key=lambda save: save.stall or 0.0) for i in range(0, len(stalls), each)]
    width = _WIDTH / len(chosen)
    bars = []
    for index, save in enumerate(chosen):
        height = max(_PLOT * (save.stall or 0.0) / longest, 1.0)
        bars.append(
            f"<rect x='{index * width:.2f}' y='{_PLOT - height:.1f}' width='{max(width * 0.8, 0.5):.2f}' "
            f"height='{height:.1f}' fill='#f08c00'><title>{html.escape(printable(save.path))}: "
            f"{_seconds(save.stall or 0.0)}</title></rect>"
        )
    label = f"<text x='0' y='12' font-size='12' fill='#6b7785'>{_seconds(longest)}</text>"
    return f"<svg viewBox='0 0 {_WIDTH} {_PLOT}' role='img' aria-label='stalls'>{''.join(bars)}{label}</svg>"


def _table(saves: Sequence[Save]) -> str:
    bad = [save for save in saves if save.outcome != "durable"]
    rest = [save for save in saves if save.outcome == "durable"]
    shown = [*bad[:_MOST_ROWS], *rest[-max(_MOST_ROWS - len(bad), 0) or len(rest) :]]
    rows = [
        "<tr>"
        + "".join(
            f"<td>{html.escape(printable(cell))}</td>"
            for cell in (
                save.path,
                datetime.datetime.fromtimestamp(save.started).isoformat(sep=" ", timespec="seconds"),
                size_in_words(save.bytes),
                "" if save.stall is None else _seconds(save.stall),
                "" if save.durable is None else _seconds(save.durable - save.started),
                f"{save.outcome}{': ' if save.error else ''}{save.error}",
            )
        )
        + "</tr>"
        for save in shown
    ]
    head = "".join(f"<th>{name}</th>" for name in ("checkpoint", "saved", "size", "stall", "durable after", "outcome"))
    note = (
        ""
        if len(shown) == len(saves)
        else f"<p class=muted>{len(shown):,} of {len(saves):,}: those that failed first</p>"
    )
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>{note}"
