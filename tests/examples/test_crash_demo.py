"""The demo: a killed and resumed run ends with the bits of the uninterrupted one, and the demo would notice if not."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from ckpt_core.report import interruptions_of, read_events

REPOSITORY = Path(__file__).resolve().parents[2]
DEMO = REPOSITORY / "examples" / "crash_demo"
# Quick steps, and a model so large that a kill can hit a save.
SHORT_DEMO = "--steps 18 --every 3 --kills 1 -- --width 256 --batch-size 1 --block-size 8 --text-limit 100000"

pytest.importorskip("matplotlib")


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(DEMO))

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load


@pytest.mark.extended_cells("1")
@pytest.mark.timeout(900)  # three trainings, each with several processes
@pytest.mark.parametrize("devices", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_killed_run_ends_with_the_same_bits(tmp_path: Path, devices: str) -> None:
    arguments = [*SHORT_DEMO.split(), "--devices", devices]
    command = [sys.executable, str(DEMO / "run.py"), "--output", str(tmp_path), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path])}
    demo = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert "BIT-EXACT" in demo.stdout

    alone = torch.load(tmp_path / "uninterrupted" / "final.ckpt", weights_only=True)
    killed = torch.load(tmp_path / "killed" / "final.ckpt", weights_only=True)
    assert alone["global_step"] == killed["global_step"] == 18
    assert alone["state_dict"].keys() == killed["state_dict"].keys()
    for name, weights in alone["state_dict"].items():
        assert torch.equal(weights, killed["state_dict"][name]), name
    jobs = [json.loads(line) for line in (tmp_path / "killed" / "jobs.jsonl").read_text().splitlines()]
    assert [job["killed"] for job in jobs][-2:] == [True, False]
    assert jobs[-2]["during_save"], "the last kill did not hit a save"

    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "timeline.html").read_text()
    assert "bit-exact: yes" in page
    assert f"kill {len(jobs) - 1}: SIGKILL to all processes, aimed while a save is being written" in page
    assert "resumed from step" in page
    (interruption,) = interruptions_of(read_events([str(tmp_path / "killed" / "events.jsonl")]))
    assert interruption.seconds > 0
    assert "Interruptions" in (tmp_path / "killed" / "report.html").read_text()
    assert "a typical save of Lightning&#x27;s own stops training" in page
    assert "http" not in page, "the page must not need anything from elsewhere"


def write_run(
    directory: Path, *, weight: float = 1.0, losses: tuple[float, ...] = (3.0, 2.0), moment: float = 0.5
) -> Path:
    """A finished run by hand, as the training script would leave it."""
    directory.mkdir()
    state = {
        "state_dict": {"weight": torch.tensor([weight, float("nan")])},
        "optimizer_states": [{"state": {0: {"exp_avg": torch.tensor([moment])}}, "param_groups": [{"lr": 0.1}]}],
        "lr_schedulers": [{"last_epoch": 2}],
        "loops": {"fit_loop": {"completed": 2}},
    }
    torch.save(state, directory / "final.ckpt")
    (directory / "result.json").write_text(json.dumps({"loss": losses[-1]}))
    log_steps(directory, enumerate(losses))
    return directory


def log_steps(directory: Path, losses: Any, later: float = 0.0) -> None:
    with (directory / "steps-rank0.jsonl").open("a") as log:
        for batch, loss in losses:
            record = {"epoch": 0, "batch": batch, "step": batch + 1, "loss": loss, "learning_rate": 0.1}
            log.write(json.dumps({**record, "start": batch + later, "end": batch + later + 0.5}) + "\n")


def differing(demo: Any, left: Path, right: Path) -> set[str]:
    return {row.part for row in demo("compare").compare(left, right) if not row.equal}


def test_comparison_finds_one_bit(demo: Any, tmp_path: Path) -> None:
    reference = write_run(tmp_path / "reference")
    assert differing(demo, reference, write_run(tmp_path / "same")) == set()
    one_bit = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0)).item()
    assert differing(demo, reference, write_run(tmp_path / "weights", weight=one_bit)) == {"weights"}
    assert differing(demo, reference, write_run(tmp_path / "optimizer", moment=0.5000001)) == {"optimizer"}
    assert differing(demo, reference, write_run(tmp_path / "first", losses=(3.1, 2.0))) == {"loss log, rank 0"}
    assert differing(demo, reference, write_run(tmp_path / "less", losses=(2.0,))) == {"loss log, rank 0"}


def test_comparison_counts_the_last_of_repeated_batches_but_wants_both_equal(demo: Any, tmp_path: Path) -> None:
    reference, repeated = write_run(tmp_path / "reference"), write_run(tmp_path / "repeated")
    log_steps(repeated, [(1, 2.0)])
    rows = {row.part: row for row in demo("compare").compare(reference, repeated)}
    assert rows["loss log, rank 0"].equal
    assert rows["loss log, rank 0"].right == "2 batches (+1 repeated)"
    log_steps(repeated, [(1, 2.5), (1, 2.0)])
    assert differing(demo, reference, repeated) == {"loss log, rank 0"}


def test_comparison_by_itself_tells_by_its_exit_status(
    demo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    left, right = write_run(tmp_path / "left"), write_run(tmp_path / "right", weight=2.0)
    for other, status in ((left, 0), (right, 1)):
        monkeypatch.setattr(sys, "argv", ["compare.py", str(left), str(other)])
        assert demo("compare").main() == status
        assert ("NO: 1 of 1 differ, first weight" in capsys.readouterr().out) is bool(status)


def log_jobs_and_saves(directory: Path, *jobs: dict[str, Any], cut_off: bool = False) -> None:
    """Add to a run by hand what its driver and saves would log: a save after the first step and the next."""
    (directory / "jobs.jsonl").write_text("".join(json.dumps(job) + "\n" for job in jobs))
    events = []
    for moment, path in ((0.6, "first.ckpt"), (1.6, "second.ckpt")):
        place = {"pid": 1, "path": path}
        events.append({**place, "event": "SaveStarted", "time": moment})
        events.append({**place, "event": "SnapshotTaken", "time": moment + 0.1, "bytes": 8, "stall_seconds": 0.1})
        if not (cut_off and path == "second.ckpt"):
            events.append({**place, "event": "SaveCommitted", "time": moment + 0.2, "bytes": 8})
    (directory / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


def test_picture_shows_what_happened_and_says_when_bits_differ(demo: Any, tmp_path: Path) -> None:
    alone, killed, stock = (write_run(tmp_path / name) for name in ("alone", "killed", "stock"))
    whole = {"launched": -1.0, "ended": 3.0, "killed": False, "aim": "", "during_save": []}
    log_jobs_and_saves(alone, whole)
    log_jobs_and_saves(stock, whole)
    first = {"launched": -1.0, "ended": 1.8, "killed": True, "aim": "at a save", "during_save": ["second.ckpt"]}
    log_jobs_and_saves(killed, first, {**whole, "launched": 2.0, "ended": 6.0}, cut_off=True)
    log_steps(killed, [(1, 2.25)], later=3.0)

    runs = [demo("records").read_run(run) for run in (alone, killed, stock)]
    assert [len(job.lost) for job in runs[1].jobs] == [1, 0]
    # Between the two steps, and where the kill came after a snapshot: until training was free again.
    assert [run.stall_seconds for run in runs] == pytest.approx([0.5, 0.7, 0.5])
    rows = demo("compare").compare(alone, killed)
    figure, notes = demo("picture").draw(*runs, exact=False)
    sentences = " / ".join(notes.values())
    assert "kill 1: SIGKILL to all processes, aimed at a save; 1 step to repeat" in sentences
    assert "second.ckpt: 0 MB not yet on the disk when the job was killed" in sentences
    assert "resumed from step 1" in sentences
    demo("page").write_page(tmp_path / "page.html", figure, notes, runs, rows)
    page = (tmp_path / "page.html").read_text()
    assert "bit-exact: no" in page
    assert "differ, first epoch 0 batch 1.loss 2.0 and 2.25" in page
    assert all(page.count(f'id="{mark}"') == 1 for mark in notes)


def test_save_without_commit_is_seen_as_cut_off(demo: Any) -> None:
    def event(name: str, time: float, path: str, **more: Any) -> dict[str, Any]:
        return {"event": name, "time": time, "path": path, **more}

    saves = demo("records").pair_events(
        [
            event("SaveStarted", 1.0, "a"),
            event("SnapshotTaken", 1.5, "a", bytes=8, stall_seconds=0.5),
            event("SaveStarted", 2.0, "a"),
            event("SaveCommitted", 2.2, "a"),
            event("SnapshotTaken", 2.5, "a", bytes=8, stall_seconds=0.5),
        ]
    )
    assert [(save.started, save.freed, save.committed) for save in saves] == [(1.0, 1.5, 2.2), (2.0, 2.5, None)]
    assert saves[0].background_seconds == pytest.approx(0.7)
    assert saves[1].background_seconds == 0.0


def test_log_is_followed_line_by_line(demo: Any, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    tail = demo("records").LogTail(log)
    assert tail.new() == []
    log.write_text('{"a": 1}\n{"a"')
    assert tail.new() == [{"a": 1}]
    with log.open("a") as more:
        more.write(': 2}\n{"a": 3}\n')
    assert tail.new() == [{"a": 2}, {"a": 3}]
    assert tail.new() == []


def wait_until_dead(process_id: int) -> None:
    """Return when a process of somebody else is gone, or a zombie that nobody has buried yet."""
    status = Path(f"/proc/{process_id}/stat")
    while True:
        try:
            state = status.read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return
        if state in "ZX":
            return
        time.sleep(0.01)


def test_kill_ends_every_process_of_the_job(demo: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    child = "import time, os; print('child', os.getpid(), flush=True); time.sleep(1000)"
    script.write_text(f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {child!r}]).wait()\n")
    module = demo("job")
    monkeypatch.setattr(module, "SCRIPT", script)
    job = module.TrainingJob(tmp_path / "run", [])
    console = tmp_path / "run" / "console.log"
    assert job.wait_until(lambda: console.exists() and b"\n" in console.read_bytes(), seconds=200)
    job.kill("here")
    child_id = int(console.read_text().split()[1])
    wait_until_dead(child_id)
    (record,) = demo("records").read_lines(tmp_path / "run" / "jobs.jsonl")
    assert record["killed"]
    assert record["aim"] == "here"
    assert record["during_save"] == []
