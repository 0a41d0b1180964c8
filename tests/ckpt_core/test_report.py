"""``ckpt report``: totals and a page of what real saves have written to an event log."""

from __future__ import annotations

import html.parser
import json
import os
import signal
from pathlib import Path

import pytest
import torch

from ckpt_core import Checkpointer, EventLog, StorageError
from ckpt_core.cli import main
from ckpt_core.cli.report import page_of, read_events, totals_of
from ckpt_core.storage import LocalStorage
from ckpt_core.storage.base import FileWriter

STATE = {"weight": torch.zeros(5000)}


class Gone(LocalStorage):
    """Kills its process at the first byte of a file."""

    def create(self, path: str, expected_size: int) -> FileWriter:
        os.kill(os.getpid(), signal.SIGKILL)
        return super().create(path, expected_size)


@pytest.fixture
def log(tmp_path: Path) -> str:
    """Of a process that saved twice and failed once, and of one that read a checkpoint and was killed in a save."""
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
        file.write('{"event": "SaveSt')  # a crash of the machine
    return str(tmp_path / "events.jsonl")


def test_totals_are_those_of_the_run(log: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", log, "--json"]) == 0
    totals = json.loads(capsys.readouterr().out)
    counted = {name: value for name, value in totals.items() if "seconds" not in name and name != "share_of_run"}
    size = os.path.getsize(Path(log).with_name("1.ckpt"))
    assert counted == {
        "processes": 2,
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
    """Takes a page apart, and checks that what is opened is closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.colors: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        assert "src" not in values and "href" not in values, "self-contained"
        if tag == "rect":
            self.colors.append(values["fill"] or "")
        if tag not in ("html", "meta", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_shows_every_save_and_how_it_ended(log: str, tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    assert main(["report", log, "--output", str(target)]) == 0
    page = Page(target.read_text())
    assert page.open == []
    text = "\n".join(page.text)
    for name, outcome in (("1.ckpt", "durable"), ("3.ckpt", "not finished"), ("below.ckpt", "failed: ")):
        assert f"{tmp_path}" in text and name in text and outcome in text
    assert page.colors.count("#d6293e") >= 1, "the save that was killed"
    assert page.colors.count("#8e6bbf") == 1, "what was read"
    assert page.colors.count("#f08c00") >= 4, "two stalls, in the time line and by themselves"


def test_a_long_run_is_a_page_that_a_browser_can_show(tmp_path: Path) -> None:
    log = tmp_path / "long.jsonl"
    with log.open("w") as file:
        for step in range(30_000):
            place = {"path": f"/run/<{step}>.ckpt", "pid": 1 + step // 10_000}
            for number, event in enumerate(
                (
                    {"event": "SaveStarted"},
                    {"event": "SnapshotTaken", "bytes": 10, "stall_seconds": 0.1},
                    {"event": "SaveCommitted", "bytes": 10, "background_seconds": 0.2},
                )
            ):
                file.write(json.dumps({**place, "time": 1e9 + step + number / 10, **event}) + "\n")
    processes = read_events([str(log)])
    assert totals_of(processes)["stall_seconds"] == pytest.approx(3000)
    page = page_of(processes)
    assert len(page) < 2_000_000
    assert Page(page).open == []
    assert "&lt;29999&gt;" in page


def test_what_is_no_log_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other").write_text("[1, 2]\n{}\n")
    assert main(["report", str(tmp_path / "other")]) == 1
    assert "holds no events" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "none")]) == 3
