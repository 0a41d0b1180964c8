"""Report what the checkpoints of a run have cost, from its event log: totals, and one self-contained HTML page.

Examples:
    >>> import os, tempfile, torch
    >>> from ckpt_core import Checkpointer, EventLog
    >>> from ckpt_core.report import read_events, totals_of
    >>> log = os.path.join(tempfile.mkdtemp(), "events.jsonl")
    >>> with Checkpointer(listeners=[EventLog(log)]) as checkpointer:
    ...     size = checkpointer.save({"weight": torch.ones(2)}, os.path.join(os.path.dirname(log), "1.ckpt"))
    >>> totals_of(read_events([log]))["durable"]
    1
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import html
import json
import logging
import math
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ckpt_core.errors import CheckpointError, StorageError
from ckpt_core.events import size_in_words

__all__ = [
    "BROWSERS",
    "Interruption",
    "Process",
    "Save",
    "draw",
    "interruptions_of",
    "page_beside",
    "page_of",
    "read_events",
    "run_in_words",
    "seconds_in_words",
    "totals_of",
    "try_to_write",
    "write_page",
]

logger = logging.getLogger(__name__)

_WIDTH, _ROW, _PLOT = 1000, 40, 140  # pixels
_MOST_MARKS = 1000  # in one diagram; more cannot be distinguished
_CROWD = 100  # with more saves in a row of the timeline, bars narrower than a pixel are drawn paler
_FAR = 20  # if the longest stall is more than this many times the median, the scale is logarithmic
_MOST_ROWS = 100  # of a table
_MOST_RANKS = 64

#: Browsers that can draw a picture of the page; the first that is installed is used.
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_WINDOW = (1100, 980)  # width and height in pixels, without the rows for ranks and interruptions
_TABLE_ROW, _HEADING = 32, 150  # pixels: height of a table's row, and of the other lines of a section with a table
_DRAWING_SECONDS = 120.0
# Names of optional numeric fields of events, and of the numeric fields that events of some kinds must have.
_SECONDS = ("seconds", "stall_seconds", "waited_seconds")
_NUMBERS = {
    "SnapshotTaken": ("stall_seconds", "bytes"),
    "SaveCommitted": ("bytes",),
    "TrainingStarted": ("resumed", "step"),
}
_END_OF_TIME = 1e11  # seconds; events with a later Unix time are ignored, since datetime may not represent it
_PAGE, _PICTURE = b"<!doctype html>", b"\x89PNG\r\n\x1a\n"  # first bytes of the files that this module writes


@dataclasses.dataclass
class Save:
    """One save of one process.

    Attributes:
        path: The checkpoint.
        started: Unix time in seconds at which training stopped for the save.
        stall: Seconds until training continued; None if the process ended before that.
        waited: The part of the stall spent waiting for an earlier save.
        durable: Unix time at which it was committed; None if it was not.
        bytes: Size of the checkpoint.
        error: Why it failed; empty if it did not.
        failed: Unix time at which it failed; None if it did not.
        is_copy: Whether it is only a second name of a checkpoint; median and longest stall leave it out.
    """

    path: str
    started: float
    stall: float | None = None
    waited: float = 0.0
    durable: float | None = None
    bytes: int = 0
    error: str = ""
    failed: float | None = None
    is_copy: bool = False

    @property
    def outcome(self) -> str:
        """The outcome of the save: ``"failed"``, ``"durable"`` or ``"not finished"``."""
        if self.error:
            return "failed"
        return "durable" if self.durable is not None else "not finished"

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rstrip("/").rpartition("/")[2]


@dataclasses.dataclass
class Process:
    """The events of one process, from one start of its training to the next.

    Attributes:
        pid: The process id.
        rank: Its rank; 0 if the log does not contain it.
        first, last: Unix times in seconds of its first and its last event.
        saves: Its saves.
        others: The other events: uploads, loads, deletions, skipped checkpoints, start and end of training.
    """

    pid: int
    rank: int
    first: float
    last: float
    saves: list[Save] = dataclasses.field(default_factory=list)
    others: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    _copied: list[Save] = dataclasses.field(default_factory=list, repr=False)  # states copied but not durable, in order

    def add(self, event: dict[str, Any]) -> None:
        """Add one event; call it in the order of the log."""
        kind, moment = event["event"], float(event["time"])
        begun = moment - float(event.get("stall_seconds") or event.get("seconds") or 0.0)
        self.first, self.last = min(self.first, begun), max(self.last, moment)
        if kind == "SaveStarted":
            self.saves.append(Save(event["path"], moment))
            return
        save = next((each for each in reversed(self.saves) if each.path == event["path"]), None)
        if kind in ("SaveCommitted", "SaveFailed"):  # several saves of one path may be pending; they end in order
            save = next((each for each in self._copied if each.path == event["path"]), save)
            self._copied = [each for each in self._copied if each is not save]
        if save is None or kind not in ("SnapshotTaken", "SaveCommitted", "SaveFailed"):
            self.others.append(event)
        elif kind == "SnapshotTaken":
            save.stall, save.waited = float(event["stall_seconds"]), float(event.get("waited_seconds", 0.0))
            save.bytes, save.is_copy = max(save.bytes, int(event["bytes"])), not event["bytes"]
            if save.outcome == "not finished":
                self._copied.append(save)
        elif kind == "SaveCommitted":
            save.durable, save.bytes = moment, max(save.bytes, int(event["bytes"]))
        else:
            save.error, save.failed = str(event.get("error") or "failed"), moment

    @property
    def seconds(self) -> float:
        """How long it has trained: from its TrainingStarted event or its first save to its last event."""
        begun = [float(event["time"]) for event in self.events("TrainingStarted")] + [s.started for s in self.saves[:1]]
        return self.last - min(begun, default=self.first)

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return the other events of one kind, in order."""
        return [event for event in self.others if event["event"] == kind]


@dataclasses.dataclass(frozen=True)
class Interruption:
    """A training that ended too early, and was continued by another process.

    Attributes:
        path: The checkpoint from which training continued.
        step: Optimizer steps of that checkpoint.
        saved: Unix time in seconds at which its state was saved; the training after that was lost.
        ended: Unix time of the last event of the process that ended.
        resumed: Unix time at which training continued.
    """

    path: str
    step: int
    saved: float
    ended: float
    resumed: float

    @property
    def seconds(self) -> float:
        """What the interruption cost: the lost training, and the time until training continued."""
        return self.resumed - self.saved


def read_events(paths: Iterable[str]) -> list[Process]:
    """Return the processes that have written to event logs, in the order of their first events; see :class:`Process`.

    A line that was cut off by a crash is left out.

    Args:
        paths: Local files, as ``event_log`` writes them; a file that is given twice counts once.

    Raises:
        ValueError: A file contains no events.
        OSError: A file cannot be read.
    """
    processes: list[Process] = []
    for path in {os.path.realpath(path): path for path in paths}.values():
        before = len(processes)
        running: dict[tuple[Any, ...], Process] = {}
        for event in _events(path):
            pid, moment = int(event["pid"]), float(event["time"])
            # In containers, each start may have the same host and pid; in a notebook, one process has several starts.
            key = (event.get("host"), pid, event.get("since"))
            process = running.get(key)
            if process is None or (event["event"] == "TrainingStarted" and process.events("TrainingStarted")):
                process = running[key] = Process(pid, int(event.get("rank", 0)), moment, moment)
                processes.append(process)
            process.add(event)
        if len(processes) == before:
            raise ValueError(f"{path} holds no events")
    return sorted(processes, key=lambda process: process.first)


def _events(path: str) -> Iterator[dict[str, Any]]:
    with Path(path).open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                event = json.loads(line)
                needed = [event[name] for name in ("pid", *_NUMBERS.get(event["event"], ()))]
                given = [event[name] or 0 for name in ("rank", *_SECONDS) if name in event]
                is_whole = bool(event["path"] + event["event"]) and 0 < float(event["time"]) < _END_OF_TIME
                if is_whole and all(math.isfinite(float(number)) for number in needed + given):
                    yield event
            except (ValueError, KeyError, TypeError):
                continue  # cut off, or written by another program


def interruptions_of(processes: Sequence[Process]) -> list[Interruption]:
    """Return the interruptions after which a run was continued, from the events of rank 0.

    Args:
        processes: From :func:`read_events`.
    """
    found = []
    before: list[Process] = []
    for process in (each for each in processes if each.rank == 0):
        started = next(iter(process.events("TrainingStarted")), None)
        last = before[-1] if before else None
        if started is not None and last is not None and started["resumed"] and not last.events("TrainingEnded"):
            same = [save for each in before for save in each.saves if save.path == started["path"]]
            saved = max((save.started for save in same if save.outcome == "durable"), default=last.last)
            found.append(Interruption(started["path"], int(started["step"]), saved, last.last, float(started["time"])))
        if started is not None:
            before.append(process)
    return found


def totals_of(processes: Sequence[Process]) -> dict[str, Any]:
    """Return the totals of a run; a save of several ranks counts once, with the stall of the slowest rank.

    Args:
        processes: From :func:`read_events`.
    """
    saves = _saves_of_all_ranks(processes)
    states = [save for save in saves if not save.is_copy]
    stalls = [save for save in states if save.stall is not None]
    commits = sorted(save.durable - save.started for save in states if save.durable is not None)
    ranks = _by_rank(processes)
    span = max((sum(each.seconds for each in starts) for _, starts in ranks), default=0.0)
    stalled = sum(save.stall or 0.0 for save in saves)
    kinds = [event["event"] for process in processes for event in process.others]
    interruptions = interruptions_of(processes)
    return {
        "processes": len(processes),
        "ranks": len(ranks),
        "seconds": span,
        "saves": len(states),
        "durable": sum(save.durable is not None for save in states),
        "failed": sum(bool(save.error) for save in saves),
        "not_finished": sum(save.outcome == "not finished" for save in saves),
        "bytes": sum(save.bytes for save in states if save.durable is not None),
        "stall_seconds": stalled,
        "stall_seconds_median": _median(stalls),
        "stall_seconds_longest": max((save.stall or 0.0 for save in stalls), default=0.0),
        "durable_after_seconds_median": commits[len(commits) // 2] if commits else 0.0,
        "share_of_run": stalled / span if span > 0 else 0.0,
        "interruptions": len(interruptions),
        "interruption_seconds": sum(each.seconds for each in interruptions),
        "uploads": kinds.count("CheckpointUploaded"),
        "failed_uploads": kinds.count("UploadFailed"),
        "loads": kinds.count("CheckpointLoaded"),
        "passed_over": kinds.count("CheckpointSkipped"),
    }


def _median(saves: Sequence[Save]) -> float:
    """Return the median stall of saves in seconds."""
    stalls = sorted(save.stall or 0.0 for save in saves)
    return stalls[len(stalls) // 2] if stalls else 0.0


def run_in_words(totals: dict[str, Any]) -> str:
    """Return a text such as ``"2.9 s on 2 ranks, 6 processes"`` from the totals of a run."""
    numbers = ((totals["ranks"], "rank", "ranks"), (totals["processes"], "process", "processes"))
    ranks, processes = (f"{number:,} {one if number == 1 else many}" for number, one, many in numbers)
    return f"{seconds_in_words(totals['seconds'])} on {ranks}, {processes}"


def _saves_of_all_ranks(processes: Sequence[Process]) -> list[Save]:
    """Return the saves in order; a save of several ranks is merged, with the longest stall and the latest commit."""
    together: dict[tuple[int, str, int], list[Save]] = {}
    for _, starts in _by_rank(processes):
        for start, process in enumerate(starts):
            times: collections.Counter[str] = collections.Counter()
            for save in process.saves:
                times[save.path] += 1
                together.setdefault((start, save.path, times[save.path]), []).append(save)
    merged = [
        dataclasses.replace(
            max(saves, key=lambda save: save.stall or 0.0),
            started=min(save.started for save in saves),
            durable=max((save.durable for save in saves if save.durable is not None), default=None),
            bytes=max(save.bytes for save in saves),
            error=next((save.error for save in saves if save.error), ""),
            is_copy=all(save.is_copy for save in saves),
        )
        for saves in together.values()
    ]
    return sorted(merged, key=lambda save: save.started)


def seconds_in_words(seconds: float) -> str:
    """Return a duration such as ``"34 ms"``, ``"1.2 s"`` or ``"2:03:04"``.

    Args:
        seconds: The duration.
    """
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 120 else str(datetime.timedelta(seconds=round(seconds)))


# ---- the page --------------------------------------------------------------------------------------------------------

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:1040px;margin:2em auto;padding:0 1em;color:#1f2933;background:#fff}
.cards{display:flex;flex-wrap:wrap;gap:1em}
.card{flex:1;min-width:9em;padding:.8em 1em;background:#f4f6f8;border-radius:8px}
.card b{display:block;font-size:1.5em}svg{width:100%;min-width:640px;height:auto}svg text{font-size:12px;fill:#6b7785}
rect{shape-rendering:crispEdges}.wide{overflow-x:auto}table{border-collapse:collapse;width:100%;white-space:nowrap}
td,th{text-align:right;padding:.25em .6em;border-bottom:1px solid #e3e8ee}
td:first-child,th:first-child{text-align:left}
.path td:first-child{white-space:normal;min-width:14em;overflow-wrap:anywhere}
.path td:last-child{white-space:normal}.muted{color:#6b7785}
.r{fill:#d9e2ec}.t{fill:#f08c00}.w{fill:#38a89d}.x{fill:#d6293e}.u{fill:#5b8def}.l{fill:#8e6bbf}.g{fill:#12564f}.m{stroke:#6b7785;stroke-dasharray:4}
@media(prefers-color-scheme:dark){body{background:#14181d;color:#e3e8ee}.card{background:#1f2933}
td,th{border-color:#334}.r{fill:#3b4654}.g{fill:#5fd3c0}.muted,svg text{color:#93a1b0;fill:#93a1b0}}
"""

_MARKS = {"CheckpointUploaded": "u", "UploadFailed": "x", "CheckpointLoaded": "l"}
_LEGEND = (
    "One row for each rank; a process is a grey bar. Orange: training stands still. Green: a checkpoint is written in "
    "the background. Red: it failed, or the process ended before it was durable. Blue: an upload. Violet: a checkpoint "
    "is read. A triangle: training continues from a checkpoint. Point at a mark to read what it is."
)


def try_to_write(log: str, target: str) -> None:
    """Write the page about a run; if that fails, log a warning instead of ending the training.

    Args:
        log: The event log of the run.
        target: The local file to write; if it ends with ``.png``, a picture is written next to the page.
    """
    try:
        processes, page = read_events([log]), page_beside(target)
        write_page(processes, page)
        if page != target:
            draw(processes, target)
    except (OSError, ValueError, CheckpointError) as error:
        logger.warning("the report %s could not be written: %s", target, error)


def page_of(processes: Sequence[Process], *, lists_saves: bool = True) -> str:
    """Return one self-contained HTML page about a run: totals, a timeline, every stall, and tables.

    Args:
        processes: From :func:`read_events`.
        lists_saves: Whether the page ends with a table of the saves.
    """
    totals = totals_of(processes)
    interruptions = interruptions_of(processes)
    cards = [
        (f"{totals['share_of_run']:.2%}", "of the run was spent waiting for checkpoints"),
        (seconds_in_words(totals["stall_seconds_median"]), "training stood still for a typical save"),
        (f"{totals['durable']:,}", f"checkpoints durable, {size_in_words(totals['bytes'])} in all"),
        (seconds_in_words(totals["durable_after_seconds_median"]), "until a typical save was durable"),
    ]
    if interruptions:
        what = "interruption" if len(interruptions) == 1 else "interruptions"
        cards.append((seconds_in_words(totals["interruption_seconds"]), f"{len(interruptions):,} {what} cost"))
    bad = totals["failed"] + totals["not_finished"] + totals["failed_uploads"] + totals["passed_over"]
    if bad:
        cards.append((f"{bad:,}", "saves failed or not finished, uploads failed, checkpoints passed over"))
    begin, end = processes[0].first, max(process.last for process in processes)
    ran = f"{_date(begin)} to {_date(end)}: {run_in_words(totals)} in {seconds_in_words(end - begin)}"
    saves = _saves_of_all_ranks(processes)
    parts = [
        f"{_PAGE.decode()}<html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>",
        f"<title>Checkpoints of a run</title><style>{_STYLE}</style><h1>Checkpoints of a run</h1>",
        f"<p class=muted>{ran}</p>",
        "<div class=cards>",
        *(f"<div class=card><b>{html.escape(value)}</b>{html.escape(text)}</div>" for value, text in cards),
        f"</div><h2>Timeline</h2><p>{_LEGEND}</p>",
        _time_line(processes),
        *_interruptions(interruptions),
        "<h2>Stall of each save</h2>",
        _stalls(saves),
        "<h2>Ranks</h2>",
        _ranks(processes),
        *(("<h2>Saves</h2>", _saves(saves)) if lists_saves else ()),
    ]
    return "\n".join(parts) + "\n"


def write_page(processes: Sequence[Process], target: str) -> None:
    """Write :func:`page_of` to a file.

    Args:
        processes: From :func:`read_events`.
        target: The local file; only an earlier page is replaced.

    Raises:
        StorageError: There is a file that is not such a page, for example a checkpoint.
        OSError: The page cannot be written.
    """
    _refuse_other_file(target, _PAGE)
    try:
        Path(target).write_text(page_of(processes), encoding="utf-8")
    except OSError as error:
        error.filename = error.filename or target  # the error of a full disk has no file name
        raise


def _refuse_other_file(target: str, beginning: bytes) -> None:
    if os.path.isfile(target):
        with open(target, "rb") as file:
            found = file.read(len(beginning))
        if found not in (b"", beginning):
            what = "page of a report" if beginning == _PAGE else "picture"
            raise StorageError(
                f"something is already there: a file that is not a {what}", path=target, remedy="give another name"
            )


def page_beside(target: str) -> str:
    """Return the path of the page for a report: ``"run.html"`` next to the picture ``"run.png"``, else ``target``."""
    name, ending = os.path.splitext(target)
    return f"{name}.html" if ending == ".png" else target


def draw(processes: Sequence[Process], target: str) -> None:
    """Draw a picture of :func:`page_of` with a browser, without the table of saves, which would be cut off.

    Args:
        processes: From :func:`read_events`.
        target: The local PNG file; only an earlier picture is replaced.

    Raises:
        StorageError: There is a file that is not a PNG, for example a checkpoint.
        CheckpointError: None of :data:`BROWSERS` is installed, or the browser has failed.
    """
    _refuse_other_file(target, _PICTURE)
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise CheckpointError(
            f"no browser is installed that draws a picture ({', '.join(BROWSERS)})",
            remedy="install one, or open the page, ckpt report --output page.html, in any browser",
        )
    ranks, interruptions = len({process.rank for process in processes}), len(interruptions_of(processes))
    height = _WINDOW[1] + _ROW * min(ranks, _MOST_RANKS) + _TABLE_ROW * min(ranks, _MOST_ROWS)
    if interruptions:
        height += _HEADING + _TABLE_ROW * min(interruptions, _MOST_ROWS)
    options = ["--headless=new", "--disable-gpu", "--hide-scrollbars", f"--window-size={_WINDOW[0]},{height}"]
    if os.geteuid() == 0:
        options.append("--no-sandbox")  # Chromium has no sandbox for root; the page is ours, and has no scripts
    with tempfile.TemporaryDirectory() as folder:
        source, picture = Path(folder, "page.html"), Path(folder, "page.png")
        source.write_text(page_of(processes, lists_saves=False), encoding="utf-8")
        ways = [f"--user-data-dir={folder}/profile", f"--screenshot={picture}", source.as_uri()]
        try:
            done = subprocess.run(
                [browser, *options, *ways], capture_output=True, check=False, timeout=_DRAWING_SECONDS
            )
        except subprocess.TimeoutExpired as error:
            raise CheckpointError(f"{browser} has not drawn the picture in {_DRAWING_SECONDS:.0f} s") from error
        if not picture.exists():
            said = done.stderr.decode(errors="replace").strip().splitlines()
            raise CheckpointError(f"{browser} has not drawn the picture: {said[-1] if said else done.returncode}")
        shutil.copyfile(picture, target)


def _date(moment: float) -> str:
    return datetime.datetime.fromtimestamp(moment).isoformat(sep=" ", timespec="seconds")


def _text(text: str) -> str:
    return html.escape("".join(c if c.isprintable() else repr(c)[1:-1] for c in text))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], style: str = "") -> str:
    body = "".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>\n" for row in rows)
    names = "".join(f"<th>{name}</th>" for name in head)
    return f"<div class='wide {style}'><table><tr>{names}</tr>\n{body}</table></div>"


def _by_rank(processes: Sequence[Process]) -> list[tuple[int, list[Process]]]:
    ranks: dict[int, list[Process]] = {}
    for process in processes:
        ranks.setdefault(process.rank, []).append(process)
    return sorted(ranks.items())


def _time_line(processes: Sequence[Process]) -> str:
    ranks = _by_rank(processes)
    shown = ranks[:_MOST_RANKS]
    begin, end = min(process.first for process in processes), max(process.last for process in processes)
    scale = _WIDTH / max(end - begin, 1e-9)
    height = _ROW * len(shown) + 20

    def bar(start: float, stop: float, top: int, style: str, note: str) -> str:
        left, width = (start - begin) * scale, (stop - start) * scale
        # The narrower a bar below one pixel, the paler it is: many short stalls must not look like one long stall.
        pale = f" opacity='{max(width, 0.15):.2f}'" if width < 1 and crowded and style != "x" else ""
        return (
            f"<rect x='{left:.1f}' y='{top}' width='{max(width, 1.0):.1f}' height='10' class='{style}'{pale}>"
            f"<title>{_text(note)}</title></rect>\n"
        )

    marks = [f"<div class=wide><svg viewBox='0 0 {_WIDTH} {height}' role='img' aria-label='timeline'>"]
    for row, (rank, starts) in enumerate(shown):
        top = row * _ROW + 16
        crowded = sum(len(process.saves) for process in starts) > _CROWD
        marks.append(f"<text x='0' y='{top - 3}'>rank {rank}</text>\n")
        ends = {id(save): process.last for process in starts for save in process.saves}
        marks += [bar(each.first, each.last, top, "r", f"process {each.pid}") for each in starts]
        saves = _some([save for process in starts for save in process.saves], _MOST_MARKS // len(shown))
        for save in saves:
            resumed = save.started + (save.stall or 0.0)
            written = save.durable if save.durable is not None else save.failed
            written = ends[id(save)] if written is None else written
            if written > resumed or save.outcome != "durable":
                style = "w" if save.outcome == "durable" else "x"
                marks.append(bar(resumed, written, top + 11, style, f"{save.name}: {save.outcome} {save.error}"))
            if save.stall is not None:
                marks.append(bar(save.started, resumed, top, "t", f"{save.name}: {seconds_in_words(save.stall)}"))
        others = [event for process in starts for event in process.others]
        for event in others[: _MOST_MARKS // len(shown)]:
            if event["event"] in _MARKS:
                start, note = event["time"] - event.get("seconds", 0.0), f"{event['event']}: {event['path']}"
                marks.append(bar(start, event["time"], top + 11, _MARKS[event["event"]], note))
            elif event["event"] == "TrainingStarted" and event["resumed"]:
                x, note = (event["time"] - begin) * scale, f"continues at step {event['step']} from {event['path']}"
                marks.append(f"<path d='M{x:.1f} {top - 2}l9 7l-9 7z' class='g'><title>{_text(note)}</title></path>\n")
    marks.append(f"<text x='0' y='{height - 4}'>0</text>")
    marks.append(
        f"<text x='{_WIDTH}' y='{height - 4}' text-anchor='end'>{seconds_in_words(end - begin)}</text></svg></div>"
    )
    if len(ranks) > len(shown):
        marks.append(f"<p class=muted>the first {len(shown)} of {len(ranks):,} ranks</p>")
    return "".join(marks)


def _some(saves: Sequence[Save], most: int) -> list[Save]:
    """Return at most ``most`` saves: of each group of neighbours, one that is not durable or the longest stall."""
    each = len(saves) // most + 1
    groups = (saves[i : i + each] for i in range(0, len(saves), each))
    return [max(group, key=lambda save: (save.outcome != "durable", save.stall or 0.0)) for group in groups]


def _interruptions(interruptions: Sequence[Interruption]) -> list[str]:
    if not interruptions:
        return []
    rows = [
        (
            each.path,
            f"{each.step:,}",
            seconds_in_words(max(each.ended - each.saved, 0.0)),
            seconds_in_words(each.resumed - max(each.ended, each.saved)),
            seconds_in_words(each.seconds),
        )
        for each in interruptions[:_MOST_ROWS]
    ]
    head = ("continued from", "step", "work lost, at least", "until training again", "in all")
    return [
        "<h2>Interruptions</h2><p>Training was cut off, and continued from a checkpoint.</p>",
        _table(head, rows, "path"),
    ]


def _stalls(saves: Sequence[Save]) -> str:
    stalls = [save for save in saves if save.stall is not None and not save.is_copy]
    if not stalls:
        return "<p class=muted>no save got this far</p>"
    longest, typical = max(save.stall or 0.0 for save in stalls) or 1e-9, _median(stalls)
    chosen = _some(stalls, _MOST_MARKS)
    width = _WIDTH / len(chosen)
    # On a linear scale, one stall that is far longer than the others would make those invisible.
    decades = math.log10(longest / typical) + 1 if longest > _FAR * typical > 0 else 0.0
    bars = []
    for index, save in enumerate(chosen):
        part = (save.stall or 0.0) / longest
        if decades:
            part = 1 + math.log10(part) / decades if part > 0 else 0.0
        height = max(_PLOT * part, 1.0)
        waited = f", {seconds_in_words(save.waited)} of it for an earlier save" if save.waited >= 0.001 else ""
        bars.append(
            f"<rect x='{index * width:.2f}' y='{_PLOT - height:.1f}' width='{width if width < 4 else width * 0.8:.2f}' "
            f"height='{height:.1f}' class='t'><title>{_text(save.name)}: "
            f"{seconds_in_words(save.stall or 0.0)}{waited}</title></rect>\n"
        )
    label = f"<text x='0' y='-6'>up to {seconds_in_words(longest)}</text>"
    notes = []
    if decades:
        label += f"<path d='M0 {_PLOT * (1 - 1 / decades):.1f}H{_WIDTH}' class='m'/>"
        notes.append(f"logarithmic; dashed: the typical stall, {seconds_in_words(typical)}")
    each = -(-len(stalls) // len(chosen))
    notes += [f"each bar is the longest of {each:,}"] * (each > 1)
    note = f"<p class=muted>{'; '.join(notes)}</p>" * bool(notes)
    svg = f"<svg viewBox='0 -20 {_WIDTH} {_PLOT + 20}' role='img' aria-label='stalls'>{''.join(bars)}{label}</svg>"
    return f"<div class=wide>{svg}</div>{note}"


def _ranks(processes: Sequence[Process]) -> str:
    rows = []
    for rank, starts in _by_rank(processes)[:_MOST_ROWS]:
        totals = totals_of(starts)
        failures = totals["failed"] + totals["not_finished"] + totals["failed_uploads"]
        rows.append(
            (
                f"{rank}",
                f"{len(starts):,}",
                f"{totals['durable']:,}",
                seconds_in_words(totals["stall_seconds"]),
                seconds_in_words(totals["stall_seconds_longest"]),
                f"{totals['share_of_run']:.2%}",
                f"{totals['uploads']:,}",
                f"{failures:,}",
            )
        )
    head = ("rank", "starts", "durable", "stall", "longest", "share", "uploads", "failed or not finished")
    return _table(head, rows)


def _saves(saves: Sequence[Save]) -> str:
    bad = [save for save in saves if save.outcome != "durable"]
    rest = [save for save in saves if save.outcome == "durable"]
    shown = [*bad[:_MOST_ROWS], *rest[-max(_MOST_ROWS - len(bad), 0) or len(rest) :]]
    rows = [
        (
            save.path,
            _date(save.started),
            size_in_words(save.bytes),
            "" if save.stall is None else seconds_in_words(save.stall),
            "" if save.durable is None else seconds_in_words(save.durable - save.started),
            f"{save.outcome}{': ' if save.error else ''}{save.error}",
        )
        for save in shown
    ]
    left_out = len(saves) - len(shown)
    note = f"<p class=muted>{len(shown):,} of {len(saves):,}: those that failed, and the last ones</p>"
    head = ("checkpoint", "saved", "size", "stall", "durable after", "outcome")
    return _table(head, rows, "path") + note * bool(left_out)
