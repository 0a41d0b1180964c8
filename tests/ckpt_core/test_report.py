"""``ckpt report``: the totals and the page that it makes of the event log of real saves."""

from __future__ import annotations

import html.parser
import json
import math
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core import Checkpointer, EventLog, StorageError
from ckpt_core.cli import main
from ckpt_core.events import (
    Event,
    RunSummary,
    SaveCommitted,
    SaveFailed,
    SaveStarted,
    TrainingEnded,
    TrainingStarted,
    notify,
)
from ckpt_core.options import CheckpointerOptions
from ckpt_core.report import BROWSERS, interruptions_of, page_of, read_events, run_in_words, totals_of
from ckpt_core.storage import LocalStorage
from ckpt_core.storage.base import FileWriter

STATE = {"weight": torch.zeros(5000)}


class Gone(LocalStorage):
    """Kills its process when a file is created."""

    def create(self, path: str, expected_size: int) -> FileWriter:
        os.kill(os.getpid(), signal.SIGKILL)
        return super().create(path, expected_size)


@pytest.fixture
def log(tmp_path: Path) -> str:
    """Event log of a process that saved twice and failed once, and of one that loaded and was killed during a save."""
    events = EventLog(tmp_path / "events.jsonl")
    (tmp_path / "file").touch()
    with Checkpointer(strategy="sync", listeners=[events]) as checkpointer:
        for step in (1, 2):
            checkpointer.save(STATE, tmp_path / f"{step}.ckpt")
        with pytest.raises(StorageError):
            checkpointer.save(STATE, tmp_path / "file" / "below.ckpt")
    child = os.fork()
    if child == 0:
        checkpointer = Checkpointer(strategy="sync", listeners=[events], storage=Gone())
        Checkpointer(listeners=[events]).load(tmp_path / "2.ckpt")
        checkpointer.save(STATE, tmp_path / "3.ckpt")
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"event": "SaveSt')  # as after a crash of the machine
    return str(tmp_path / "events.jsonl")


def test_totals_are_those_of_the_run(log: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", log, "--json"]) == 0
    totals = json.loads(capsys.readouterr().out)
    counted = {name: value for name, value in totals.items() if "seconds" not in name and name != "share_of_run"}
    size = os.path.getsize(Path(log).with_name("1.ckpt"))
    assert counted == {
        "processes": 2,
        "ranks": 1,
        "interruptions": 0,
        "saves": 4,
        "durable": 2,
        "failed": 1,
        "not_finished": 1,
        "bytes": 2 * size,
        "uploads": 0,
        "failed_uploads": 0,
        "loads": 1,
        "passed_over": 0,
    }
    records = [json.loads(line) for line in Path(log).read_text().splitlines()[:-1]]
    stalls = [record["stall_seconds"] for record in records if record["event"] == "SnapshotTaken"]
    assert totals["stall_seconds"] == pytest.approx(sum(stalls))
    assert totals["stall_seconds_longest"] == max(stalls)
    assert 0 < totals["share_of_run"] <= 1


class Page(html.parser.HTMLParser):
    """Parses a page, and checks that opened tags are closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.marks: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        assert "src" not in values and "href" not in values, "self-contained"
        if tag in ("rect", "path"):
            self.marks.append(values["class"] or "")
        if tag not in ("html", "meta", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_a_log_that_is_given_twice_counts_once(log: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(os.path.dirname(log))
    assert totals_of(read_events([log, os.path.basename(log)])) == totals_of(read_events([log]))


def test_the_page_shows_every_save_and_how_it_ended(log: str, tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    assert main(["report", log, "--output", str(target)]) == 0
    page = Page(target.read_text())
    assert page.open == []
    text = "\n".join(page.text)
    for name, outcome in (("1.ckpt", "durable"), ("3.ckpt", "not finished"), ("below.ckpt", "failed: ")):
        assert f"{tmp_path}" in text and name in text and outcome in text
    assert page.marks.count("x") >= 1, "the save that was killed"
    assert page.marks.count("l") == 1, "what was read"
    assert page.marks.count("t") >= 4, "two stalls, in the time line and by themselves"


def process_of(events: EventLog, end: str, act: Callable[[Checkpointer], None]) -> None:
    """Run ``act`` in a child process, which then is killed or ends normally."""
    child = os.fork()
    if child == 0:
        with Checkpointer(strategy="sync", listeners=[events]) as checkpointer:
            act(checkpointer)
            if end == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            notify([events], TrainingEnded(path="/run", step=9))
        os._exit(0)
    os.waitpid(child, 0)


def test_what_interruptions_cost_is_counted_from_the_state_that_was_resumed_from(tmp_path: Path) -> None:
    events, saved = EventLog(tmp_path / "events.jsonl"), str(tmp_path / "1.ckpt")

    def first(checkpointer: Checkpointer) -> None:
        checkpointer.notify(TrainingStarted(path=str(tmp_path), resumed=False, step=0))
        checkpointer.save(STATE, saved)
        time.sleep(0.2)
        checkpointer.save(STATE, tmp_path / "2.ckpt")
        checkpointer.notify(SaveStarted(path=saved))  # a save that does not finish

    def again(checkpointer: Checkpointer) -> None:
        time.sleep(0.3)
        checkpointer.notify(TrainingStarted(path=saved, resumed=True, step=1))

    process_of(events, "killed", first)
    process_of(events, "ended", again)
    process_of(events, "ended", again)  # the process before ended normally: nothing was interrupted
    processes = read_events([str(events.path)])
    (interruption,) = interruptions_of(processes)
    assert (interruption.path, interruption.step) == (saved, 1)
    records = [json.loads(line) for line in events.path.read_text().splitlines()]
    begun = next(each["time"] for each in records if each["event"] == "SaveStarted" and each["path"] == saved)
    resumed = next(each["time"] for each in records if each["event"] == "TrainingStarted" and each["resumed"])
    assert interruption.seconds == pytest.approx(resumed - begun) and interruption.seconds >= 0.5
    assert interruption.ended - interruption.saved >= 0.2, "the second save was lost with it"
    totals = totals_of(processes)
    assert totals["interruptions"] == 1 and totals["interruption_seconds"] == interruption.seconds
    page = Page(page_of(processes))
    assert "Interruptions" in page.text and saved in page.text
    assert page.marks.count("g") == 2, "where training continued"


def test_other_names_of_a_checkpoint_do_not_count_as_typical_saves(tmp_path: Path) -> None:
    events = EventLog(tmp_path / "events.jsonl")
    with Checkpointer(strategy="async", listeners=[events]) as checkpointer:
        for step in (1, 2):
            checkpointer.save(STATE, tmp_path / f"{step}.ckpt")
            for name in ("last", "best"):
                checkpointer.copy(tmp_path / f"{step}.ckpt", tmp_path / f"{name}.ckpt")
    (process,) = read_events([str(events.path)])
    of_saves = sorted(save.stall or 0.0 for save in process.saves if save.name in ("1.ckpt", "2.ckpt"))
    totals = totals_of([process])
    assert (totals["saves"], totals["durable"], totals["stall_seconds_median"]) == (2, 2, of_saves[1])
    assert totals["bytes"] == sum((tmp_path / f"{step}.ckpt").stat().st_size for step in (1, 2))
    assert totals["stall_seconds"] >= sum(of_saves)


def test_saves_under_one_name_are_told_apart(tmp_path: Path) -> None:
    log, all_started = EventLog(tmp_path / "events.jsonl"), threading.Event()

    def wait(event: Event) -> None:  # blocks the first commit until all saves are under way
        if isinstance(event, SaveCommitted):
            all_started.wait()

    with Checkpointer(strategy="async", max_pending=3, listeners=[wait, log]) as checkpointer:
        for step in range(3):
            checkpointer.save({"weight": torch.full((500_000,), step)}, tmp_path / "last.ckpt")
        all_started.set()
    (process,) = read_events([str(log.path)])
    assert [save.outcome for save in process.saves] == ["durable"] * 3


def test_starts_in_containers_are_told_apart(tmp_path: Path) -> None:
    log = tmp_path / "log"
    line = {"event": "TrainingStarted", "pid": 7, "host": "node", "path": "/run", "resumed": True, "step": 5}
    log.write_text("".join(json.dumps({**line, "since": since, "time": 1e9 + since}) + "\n" for since in (1, 2)))
    assert totals_of(read_events([str(log)]))["interruptions"] == 1


def test_what_ranks_save_together_is_one_save(tmp_path: Path) -> None:
    log = tmp_path / "log"
    lines = []

    def say(rank: int, start: int, moment: float, event: str, path: str = "/run/1", **more: object) -> None:
        line = {"event": event, "path": path, "pid": 10 * start + rank, "rank": rank, "host": "node"}
        lines.append(json.dumps({**line, "time": 1e9 + moment, **more}))

    for rank, stall in ((0, 0.1), (1, 0.4)):
        say(rank, 1, -5.0, "CheckpointLoaded", "/weights", bytes=1, seconds=3.0)  # before training: not counted
        say(rank, 1, 0.0, "TrainingStarted", "/run", resumed=False, step=0)
        for moment in (10.0, 20.0):  # two saves under the same name
            say(rank, 1, moment, "SaveStarted")
            say(rank, 1, moment + stall, "SnapshotTaken", bytes=5, stall_seconds=stall)
            say(rank, 1, moment + 1 + rank, "SaveCommitted", bytes=100, background_seconds=1.0)
        say(rank, 1, 30.0, "SaveStarted", "/run/2")  # both ranks are killed during this save
        say(rank, 2, 40.0, "TrainingStarted", resumed=True, step=1)
        say(rank, 2, 41.0, "SaveStarted", "/run/2")
        say(rank, 2, 41.5, "SaveFailed", "/run/2", error="full")
    log.write_text("\n".join(lines))
    processes = read_events([str(log)])
    totals = totals_of(processes)
    assert (totals["saves"], totals["durable"], totals["failed"], totals["not_finished"]) == (4, 2, 1, 1)
    assert (totals["bytes"], totals["stall_seconds"], totals["seconds"]) == (200, pytest.approx(0.8), 31.5)
    assert totals["durable_after_seconds_median"] == 2.0, "when the last rank knows it"
    assert run_in_words(totals) == "31.5 s on 2 ranks, 4 processes"
    text = Page(page_of(processes)).text
    assert text.count("/run/2") == 2 and "31.5 s on 2 ranks, 4 processes in 49.5 s" in " ".join(text)


def page_with_stalls(log: Path, stalls: Sequence[float]) -> str:
    """Return the page of a run with a save every ten seconds."""
    with log.open("w") as file:
        for number, stall in enumerate(stalls):
            for seconds, event in (
                (0, {"event": "SaveStarted"}),
                (stall, {"event": "SnapshotTaken", "bytes": 1, "stall_seconds": stall}),
                (5, {"event": "SaveCommitted", "bytes": 1}),
            ):
                place = {"path": f"/run/{number}", "pid": 1, "time": 1e9 + 10 * number + seconds}
                file.write(json.dumps(place | event) + "\n")
    return page_of(read_events([str(log)]))


def test_one_long_stall_does_not_hide_the_others(tmp_path: Path) -> None:
    page = page_with_stalls(tmp_path / "log", [0.01] * 8 + [0.1, 1.0])
    chart = page[page.index("aria-label='stalls'") :]
    heights = [float(each) for each in re.findall(r"height='([\d.]+)' class='t'", chart)]
    assert heights == [pytest.approx(140 / 3, abs=0.1)] * 8 + [pytest.approx(280 / 3, abs=0.1), 140]
    assert "logarithmic; dashed: the typical stall, 10 ms" in chart and "M0 93.3H1000" in chart
    page = page_with_stalls(tmp_path / "log", [0.1, 0.1, 1.0])
    chart = page[page.index("aria-label='stalls'") :]
    assert "height='14.0' class='t'" in chart and "logarithmic" not in page, (
        "in proportion, as long as that can be seen"
    )


def test_many_short_stalls_do_not_look_like_one_long_one(tmp_path: Path) -> None:
    few, many = (page_with_stalls(tmp_path / "log", [1.0] * number) for number in (100, 200))
    assert "opacity" not in few
    assert "class='t' opacity='0.50'" in many, "a second is half a pixel of 1995 seconds"


@pytest.fixture(scope="module")
def long_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Page of a run of a hundred thousand steps on two ranks, with a save every ten steps, killed now and then."""
    folder = tmp_path_factory.mktemp("long")
    log = folder / "long.jsonl"
    with log.open("w") as file:
        for step in range(0, 100_000, 10):
            for rank in (0, 1):
                place = {"path": f"/run/<{step}>.ckpt", "pid": 1 + step // 10_000, "rank": rank, "host": f"node{rank}"}
                begun = {"event": "TrainingStarted", "resumed": step > 0, "step": step}
                for number, event in enumerate(
                    (
                        *([{**begun, "path": f"/run/<{step - 10}>.ckpt"}] if step % 10_000 == 0 else []),
                        {"event": "SaveStarted"},
                        {"event": "SnapshotTaken", "bytes": 10, "stall_seconds": 0.1 + 0.2 * (step == 50_000)},
                        {"event": "SaveCommitted", "bytes": 10, "background_seconds": 0.2},
                    )
                ):
                    file.write(json.dumps({**place, "time": 1e9 + step + number, **event}) + "\n")
    processes = read_events([str(log)])
    totals = totals_of(processes)
    assert totals["stall_seconds"] == pytest.approx(1000.2), "both ranks stood still at the same time"
    assert (totals["saves"], totals["durable"], totals["bytes"]) == (10_000, 10_000, 100_000)
    assert totals["seconds"] == pytest.approx(10 * 9992, abs=50)
    assert (totals["ranks"], totals["processes"], totals["interruptions"]) == (2, 20, 9)
    assert totals["interruption_seconds"] == pytest.approx(9 * 10)
    (folder / "page.html").write_text(page_of(processes))
    return folder / "page.html"


@pytest.mark.extended
def test_a_long_run_is_a_small_page(long_page: Path) -> None:
    page = long_page.read_text()
    assert len(page) < 500_000
    assert Page(page).open == []
    assert "&lt;99990&gt;" in page
    assert "&lt;50000&gt;.ckpt: 300 ms" in page, "the longest stall is shown, whatever is left out"


def test_a_picture_needs_a_browser(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    EventLog(tmp_path / "log")(TrainingStarted(path="run", resumed=False, step=0))
    words = ["report", str(tmp_path / "log"), "--png", str(tmp_path / "page.png")]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(words) == 1
    assert "no browser is installed that draws a picture" in capsys.readouterr().err
    browser = tmp_path / "chromium"
    browser.write_text("#!/bin/sh\necho it crashed >&2\nexit 3\n")
    browser.chmod(0o755)
    assert main(words) == 1
    assert "has not drawn the picture: it crashed" in capsys.readouterr().err


def test_a_run_that_wants_a_picture_has_its_page_in_any_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    options = CheckpointerOptions(strategy="sync", report=str(tmp_path / "run.png"))
    with Checkpointer(**options.settings()) as checkpointer:
        checkpointer.save(STATE, tmp_path / "1.ckpt")
    options.write_report()
    assert "1.ckpt" in (tmp_path / "run.html").read_text() and (tmp_path / "run.html.jsonl").exists()
    assert f"the report {tmp_path}/run.png could not be written: no browser is installed" in caplog.text


@pytest.mark.parametrize(("sizes", "said"), [([1000, 1010], "1.0 kB each"), ([9000, 9000, 2000], "20.0 kB in all")])
def test_the_line_at_the_end_says_one_size_of_all_where_it_is_one(sizes: list[int], said: str) -> None:
    summary = RunSummary()
    for size in sizes:
        summary(SaveCommitted(path="a.ckpt", bytes=size, background_seconds=0.1))
    assert summary.in_words(10.0).startswith(f"{len(sizes)} checkpoints saved ({said});")


def test_a_save_that_failed_is_red_until_it_failed(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "log")
    log(SaveStarted(path="/a.ckpt", time=1000.0))
    log(SaveFailed(path="/a.ckpt", time=1001.0, error="no space"))
    log(SaveStarted(path="/b.ckpt", time=1050.0))
    log(SaveCommitted(path="/b.ckpt", time=1100.0, bytes=1, background_seconds=50.0))
    (width,) = re.findall(r"width='([0-9.]+)' height='10' class='x'", page_of(read_events([str(log.path)])))
    assert float(width) == 10.0, "one of 100 seconds, on 1000 pixels"


@pytest.mark.slow
@pytest.mark.parametrize("way", ["command", "option"])
def test_a_browser_shows_the_page_of_a_long_run(long_page: Path, way: str) -> None:
    if not any(map(shutil.which, BROWSERS)):
        pytest.skip("no chromium is installed")
    picture, log = long_page.with_name(f"{way}.png"), str(long_page.with_name("long.jsonl"))
    if way == "command":
        assert main(["report", log, "--png", str(picture)]) == 0
    else:
        options = CheckpointerOptions(
            event_log=str(shutil.copy(log, picture.with_suffix(".jsonl"))), report=str(picture)
        )
        for listener in options.settings()["listeners"]:
            listener(SaveStarted(path="/run/<100000>.ckpt", time=1e9 + 100_000))
        options.write_report()
    matplotlib = pytest.importorskip("matplotlib.image")
    rows = (matplotlib.imread(picture)[:, :, :3] * 255).round().astype(int)
    assert (rows[-30:] == 255).all(), "nothing is cut off at the lower edge"
    pixels = rows.reshape(-1, 3)
    shown = {tuple(map(int, pixel)) for pixel in pixels}
    assert (0xF0, 0x8C, 0x00) in shown, "stalls"
    assert any(r + 8 < b <= g < 250 and r > 150 for r, g, b in shown), "what is written in the background, pale"


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "odd",
    [
        {"event": "SnapshotTaken", "bytes": 3},
        {"event": "SnapshotTaken", "bytes": 3, "stall_seconds": "long"},
        {"event": "SaveCommitted", "bytes": None},
        {"event": "SaveCommitted"},
        {"event": "SaveStarted", "time": math.nan},
        {"event": "SaveStarted", "time": 1e18},
        {"event": "SaveStarted", "path": 5},
        {"event": "SaveStarted", "rank": "first"},
        {"event": "CheckpointLoaded", "seconds": "many"},
        {"event": "TrainingStarted"},
        {"event": 5},
    ],
    ids=str,
)
def test_lines_of_another_shape_are_left_out(
    odd: dict[str, Any], log: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", log, "--json"]) == 0
    expected = capsys.readouterr().out
    with open(log, "a", encoding="utf-8") as file:
        file.write("\n" + json.dumps({"path": "a.ckpt", "time": time.time(), "pid": 1, "host": "other", **odd}) + "\n")
    assert main(["report", log, "--json", "--output", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().out == expected


def test_what_is_no_log_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other").write_text("[1, 2]\n{}\n")
    assert main(["report", str(tmp_path / "other")]) == 1
    assert "holds no events" in capsys.readouterr().err
    (tmp_path / "other.jsonl").touch()
    assert main(["report", str(tmp_path / "other")]) == 1
    assert f"(this is the page: give {tmp_path / 'other.jsonl'})" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "none")]) == 3


@pytest.mark.parametrize("option", ["--output", "--png", "report=", "event_log="])
def test_a_report_replaces_no_checkpoint(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, checkpoint = tmp_path / "log", tmp_path / "1.ckpt"
    with Checkpointer(strategy="sync", listeners=[EventLog(log)]) as checkpointer:
        checkpointer.save({"weight": torch.ones(2)}, checkpoint)
    before = checkpoint.read_bytes()
    if option == "event_log=":
        with pytest.raises(StorageError, match="a file that is not an event log"):
            EventLog(checkpoint)
    elif option == "report=":
        options = CheckpointerOptions(event_log=str(log), report=str(checkpoint))
        with Checkpointer(**options.settings()) as checkpointer:
            checkpointer.save(STATE, tmp_path / "2.ckpt")
        options.write_report()
    else:
        assert main(["report", str(log), "--json", option, str(checkpoint)]) == 1
        shown = capsys.readouterr()
        said = json.loads(shown.out)["error"]
        assert "something is already there" in said["message"] and said["path"] == str(checkpoint)
    assert checkpoint.read_bytes() == before
