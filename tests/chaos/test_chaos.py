"""A short kill campaign, and what its judge notices. The long form is ``make chaos``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core import Checkpointer, DirectoryCheckpointer, Kind, Part
from tests.chaos.campaign import Campaign, Report
from tests.chaos.cells import ACCELERATE, CELLS, LIGHTNING, LOCAL, S3, Setting, plan, settings_of
from tests.chaos.jobs import Job, LogTail
from tests.chaos.judge import Judge
from tests.chaos.kills import BETWEEN, COMMIT, RETENTION, STAGING, STARTING, WRITING, phase_hit
from tests.chaos.places import LocalPlace, Place, StorePlace
from tests.support.descendants import kill_all, members, new_mark
from tests.support.servers import Server

KILLS = 3
SHORT = (
    Setting(LIGHTNING, "sync", LOCAL, accumulate=3),
    Setting(LIGHTNING, "sharded", S3, ranks=2),
    Setting(ACCELERATE, "async", S3),
    Setting(ACCELERATE, "sharded", LOCAL, ranks=2, accumulate=3, same_name=True),
)


@pytest.mark.slow
def test_killed_trainings_lose_nothing_and_end_as_if_never_killed(
    tmp_path: Path, server_of: Callable[[str], Server]
) -> None:
    said: list[str] = []
    server = server_of("moto")
    whole = Report(20)
    store = server.new_bucket(), server.options
    with Campaign(tmp_path, 20, said.append, store=store, kills_per_run=(KILLS, KILLS)) as campaign:
        for setting in SHORT:
            report = campaign.run(setting, KILLS)
            assert report.violations == []
            assert report.kills == KILLS
            assert report.runs[setting.cell] >= 1
            assert report.verified >= KILLS
            whole.add(report)
    assert {phase for _, _, phase in whole.hit} != {STARTING}
    assert {cell for cell, _, _ in whole.hit} == {setting.cell for setting in SHORT}
    assert f"{KILLS} kills, 0 violations" in said[-1]
    assert f"{len(SHORT) * KILLS} kills in" in whole.table()
    assert list(tmp_path.iterdir()) == [], "clean runs are removed"


@pytest.mark.slow
def test_a_campaign_that_is_stopped_says_so_and_leaves_no_process(tmp_path: Path) -> None:
    root, mark = Path(__file__).parents[2], new_mark()
    command = [sys.executable, "tools/chaos.py", "--kills=9", "--only=lightning-sync-local", "--jobs=1"]
    campaign = subprocess.Popen(
        [*command, f"--directory={tmp_path}"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), **mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        while campaign.poll() is None and not list(tmp_path.glob("runs/*/events.jsonl")):
            time.sleep(0.05)
        campaign.terminate()
        said, _ = campaign.communicate()
        assert campaign.returncode == 1 and not members(mark), said
    finally:
        kill_all(mark)
    assert "the campaign was stopped before its end" in said and "Traceback" not in said


def test_the_plan_covers_every_cell_and_setting() -> None:
    work = plan(1000)
    assert {setting.cell for setting, _ in work} == set(CELLS)
    assert {setting for setting, _ in work} == {setting for cell in CELLS for setting in settings_of(cell)}
    assert abs(sum(kills for _, kills in work) - 1000) < len(CELLS)
    assert [(str(setting), kills) for setting, kills in plan(7, ["accelerate-async-s3"])] == [
        ("accelerate-async-s3", 1),
        ("accelerate-async-s3, accumulating 3", 1),
        ("accelerate-async-s3, 2 ranks", 1),
        ("accelerate-async-s3, in parts", 1),
        ("accelerate-async-s3, one name", 1),
        ("accelerate-async-s3, 2 ranks, accumulating 3, one name", 2),
    ]
    with pytest.raises(ValueError, match="there is no cell 'lightning'"):
        plan(5, ["lightning"])


# ---- the judge
# ----------------------------------------------------------------------------------------------------------


class Scene:
    """A run with the checkpoints of steps 3 and 6, which a judge has looked at once and found good.

    Args:
        run: Its local directory.
        place: Where its checkpoints are.
        layout: ``"file"`` or ``"directory"``.
    """

    def __init__(self, run: Path, place: Place, layout: str) -> None:
        self.run, self.place, self.layout = run, place, layout
        self.judge = Judge(run, place, kept=2, never_missing={"last.ckpt"})
        self.save(3, "step=3.ckpt")
        self.save(6, "step=6.ckpt", "last.ckpt")
        self.leave_unfinished("step=9.ckpt")
        events = self.saved(3, "step=3.ckpt") + self.saved(6, "step=6.ckpt") + self.saved(6, "last.ckpt")
        assert self.judge.look(events) == []
        assert self.judge.verified == 3
        assert list(self.judge.unfinished.values()) == ["step=9.ckpt"] * len(self.judge.unfinished)
        assert self.judge.newest == 6

    def path(self, name: str) -> str:
        return f"{self.place.root}/checkpoints/{name}"

    def save(self, step: int, *names: str) -> None:
        """Put checkpoints into the place: made on the local disk, which is fast, and copied with the commit last."""
        weights = {"w": torch.full((5000,), float(step))}
        made = self.run / "made" / f"step={step}.ckpt"
        if self.layout == "file":
            with Checkpointer(strategy="sync") as files:
                files.save({"global_step": step, "optimizer_states": [], **weights}, made)
        else:
            with DirectoryCheckpointer(strategy="sync") as directories:
                directories.save([Part("model", weights, Kind.REPLICATED)], made, metadata={"global_step": step})
        for name in names:
            if self.layout == "file":
                self.place.put(f"checkpoints/{name}", made.read_bytes())
                continue
            for file in sorted(made.iterdir(), key=lambda path: path.name == "manifest.json"):
                self.place.put(f"checkpoints/{name}/{file.name}", file.read_bytes())

    def saved(self, step: int, name: str) -> list[dict[str, Any]]:
        """Add a line about a step to the log of steps, and return the events of its save."""
        with (self.run / "steps-rank0.jsonl").open("a") as log:
            log.write(json.dumps({"step": step, "end": float(step), "start": float(step)}) + "\n")
        kinds = ("SaveStarted", "SnapshotTaken", "SaveCommitted")
        return [{"event": kind, "path": self.path(name), "time": step + 0.5, "bytes": 1, "pid": 1} for kind in kinds]

    def leave_unfinished(self, name: str) -> None:
        """Leave what a killed save leaves; on a store, a save of a single file leaves nothing."""
        if self.place.options is None:
            self.place.put(f"checkpoints/.{name}.0123456789ab.ckpt-part", b"half")
        elif self.layout == "directory":
            self.place.put(f"checkpoints/{name}/model.safetensors", b"half")

    def data_of(self, name: str) -> str:
        return f"checkpoints/{name}" + ("/model.safetensors" if self.layout == "directory" else "")

    def commit_of(self, name: str) -> str:
        return f"checkpoints/{name}" + ("/manifest.json" if self.layout == "directory" else "")

    def truncate(self, name: str) -> None:
        data = self.place.get(self.data_of(name))
        assert data is not None
        self.place.put(self.data_of(name), data[:-100])

    def job(self, events: list[dict[str, Any]], launched: float = 0.0) -> Job:
        job = Job(Gone([0]), LogTail(self.run / "events.jsonl"), self.run, launched)
        job.events = events
        return job


class Gone:
    """Processes that are reported as running ``alive`` times, and then as gone."""

    def __init__(self, statuses: list[int], alive: int = 0) -> None:
        self.statuses, self.alive = statuses, alive

    def statuses_within(self, seconds: float) -> list[int] | None:
        self.alive -= 1
        return None if self.alive >= 0 else self.statuses

    def kill(self, rank: int | None) -> None:
        pass


@pytest.fixture(scope="module")
def store(server_of: Callable[[str], Server]) -> Callable[[], StorePlace]:
    """Return a function that makes places in a bucket of S3."""
    server = server_of("moto")
    bucket = server.new_bucket()
    return lambda: StorePlace(f"{bucket}/{uuid.uuid4().hex}", server.options)


@pytest.fixture(
    params=[
        "file-local",
        "directory-local",
        pytest.param("file-s3", marks=pytest.mark.slow),
        pytest.param("directory-s3", marks=pytest.mark.slow),
    ]
)
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Scene:
    """A scene of each kind."""
    layout, _, where = request.param.partition("-")
    place = LocalPlace(tmp_path) if where == LOCAL else request.getfixturevalue("store")()
    return Scene(tmp_path, place, layout)


DAMAGES: dict[str, tuple[Callable[[Scene], object], str]] = {
    "a truncated checkpoint": (lambda scene: scene.truncate("step=3.ckpt"), "step=3.ckpt does not verify"),
    "committed before its bytes": (lambda scene: scene.truncate("step=6.ckpt"), "step=6.ckpt does not verify"),
    "removed before the commit": (lambda scene: scene.place.delete(scene.commit_of("step=3.ckpt")), "retention left 1"),
    "last is gone": (lambda scene: scene.place.delete(scene.commit_of("last.ckpt")), "last.ckpt is gone"),
    "the newest is gone": (
        lambda scene: [scene.place.delete(scene.commit_of(name)) for name in ("step=6.ckpt", "last.ckpt")],
        "the newest checkpoint is of step 3, but step 6 was committed",
    ),
    "another checkpoint": (lambda scene: scene.save(7, "step=6.ckpt"), "changed although it was not saved"),
    "one of an earlier step": (lambda scene: scene.save(5, "step=6.ckpt"), "changed although it was not saved"),
    "a temporary file in sight": (
        lambda scene: scene.place.put("checkpoints/step=9.tmp", b""),
        "unexpected file step=9.tmp",
    ),
    "a foreign file changed": (lambda scene: scene.place.put("checkpoints/notes.txt", b""), "none of the training's"),
    "another run's file deleted": (lambda scene: scene.place.delete("other/step=1.ckpt"), "none of the training's"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_judge_notices(damage: str, scene: Scene) -> None:
    harm, expected = DAMAGES[damage]
    harm(scene)
    problems = scene.judge.look([])
    assert any(expected in problem for problem in problems), problems


def test_the_judge_notices_a_commit_that_is_not_there(scene: Scene) -> None:
    problems = scene.judge.look(scene.saved(9, "step=9.ckpt"))
    assert problems == ["the newest checkpoint is of step 6, but step 9 was committed"]
    scene.save(9, "step=9.ckpt")
    assert scene.judge.look([]) == []


def test_the_judge_notices_a_step_back(scene: Scene) -> None:
    scene.save(3, "last.ckpt")
    assert "last.ckpt went back from step 6 to 3" in scene.judge.look(scene.saved(6, "last.ckpt"))


def test_the_judge_notices_a_resume_from_an_older_checkpoint(scene: Scene) -> None:
    with (scene.run / "steps-rank0.jsonl").open("a") as log:
        log.write(json.dumps({"step": 4, "end": 101.0, "start": 100.0}) + "\n")
    expected = ["continued with step 4, although there was a checkpoint of step 6"]
    assert scene.judge.look([], launched=99.0) == expected
    assert scene.judge.look([], launched=102.0) == []


def test_the_judge_notices_what_the_engine_complains_about(scene: Scene) -> None:
    failed = {"event": "SaveFailed", "path": "x", "time": 0.0, "pid": 1}
    skipped = {**failed, "event": "CheckpointSkipped"}
    assert len(scene.judge.look([failed, skipped])) == 2
    assert len(scene.judge.look([failed, skipped], saves_may_fail=True)) == 1


def test_a_checkpoint_without_digests_is_noticed(tmp_path: Path) -> None:
    scene = Scene(tmp_path, LocalPlace(tmp_path), "file")
    torch.save({"global_step": 9}, tmp_path / "checkpoints" / "step=9.ckpt")
    assert "step=9.ckpt holds no digests" in scene.judge.look([])


def test_a_foreign_file_in_a_local_directory_is_noticed(tmp_path: Path) -> None:
    scene = Scene(tmp_path, LocalPlace(tmp_path), "directory")
    (tmp_path / "checkpoints" / "step=3.ckpt" / "half").touch()
    assert "unexpected file step=3.ckpt/half" in scene.judge.look([])


# ---- jobs, and what a kill has hit
# ---------------------------------------------------------------------------------------


def test_a_job_that_ends_just_before_its_kill_was_not_killed(tmp_path: Path) -> None:
    job = Job(Gone([0, 0], alive=1), LogTail(tmp_path / "events.jsonl"), tmp_path, 0.0)
    assert not job.kill()
    job.finish()  # its end is not awaited again
    assert job.is_over()


def test_a_rank_is_killed_before_the_others(tmp_path: Path) -> None:
    job = Job(Gone([1, -9], alive=2), LogTail(tmp_path / "events.jsonl"), tmp_path, 0.0)
    assert job.kill(first=1)
    assert job.lost_a_rank


def test_a_training_that_fails_by_itself_is_told(tmp_path: Path) -> None:
    (tmp_path / "console.log").write_text("ZeroDivisionError")
    job = Job(Gone([0, 1]), LogTail(tmp_path / "events.jsonl"), tmp_path, 0.0)
    with pytest.raises(RuntimeError, match=r"ended with \[0, 1\]:\nZeroDivisionError"):
        job.finish()


def test_what_a_kill_has_hit(scene: Scene) -> None:
    def hit(events: list[dict[str, Any]]) -> str:
        assert scene.judge.look(events) == []
        return phase_hit(scene.job(events), scene.judge, scene.run, resumed=False)

    assert hit([]) == BETWEEN
    started, snapshot, _ = scene.saved(9, "step=12.ckpt")
    assert hit([started]) == STAGING
    assert hit([started, snapshot]) == WRITING
    scene.save(9, "step=12.ckpt")
    assert hit([started, snapshot]) == COMMIT
    scene.save(12, "step=15.ckpt", "last.ckpt")
    assert hit(scene.saved(12, "step=15.ckpt") + scene.saved(12, "last.ckpt")) == RETENTION
    assert hit([]) == BETWEEN  # what earlier kills left over stays
    assert phase_hit(scene.job([], launched=1e12), scene.judge, scene.run, resumed=False) == STARTING


@pytest.mark.extended
def test_unfinished_objects_of_a_checkpoint_that_is_being_removed(
    tmp_path: Path, store: Callable[[], StorePlace]
) -> None:
    scene = Scene(tmp_path, store(), "directory")
    scene.save(9, "step=10.ckpt", "last.ckpt")
    events = scene.saved(9, "step=10.ckpt") + scene.saved(9, "last.ckpt")
    assert scene.judge.look(events) == []
    scene.place.delete(scene.commit_of("step=3.ckpt"))
    assert scene.judge.look([]) == []
    assert {path for path, name in scene.judge.unfinished.items() if name == "step=3.ckpt"} >= {
        "step=3.ckpt/model.safetensors"
    }
    assert phase_hit(scene.job([]), scene.judge, scene.run, resumed=True) == RETENTION


def test_uploads_under_way_are_found_and_pruned(tmp_path: Path, store: Callable[[], StorePlace]) -> None:
    scene = Scene(tmp_path, store(), "file")
    bucket, _, prefix = scene.place.root.removeprefix("s3://").partition("/")
    client = scene.place._client  # type: ignore[attr-defined]
    client.create_multipart_upload(Bucket=bucket, Key=f"{prefix}/checkpoints/step=9.ckpt")
    assert scene.judge.look([]) == []
    assert list(scene.judge.unfinished.values()) == ["step=9.ckpt"]
    scene.place.prune()
    assert scene.judge.look([]) == []
    assert scene.judge.unfinished == {}
