"""``memory_every_n_steps`` on several machines: snapshots of a lost machine come from the next one."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lightning_ckpt.signal_ranks import START, Job

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/cwd"), reason="machines are simulated with Linux's /proc")


@pytest.fixture
def memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as directory:
        yield Path(directory)


def run(job: Job, directory: Path, name: str, memory: Path, **spec: Any) -> list[dict[str, Any]]:
    """Train on two simulated machines, each with its own memory."""
    for machine in range(2):
        place = directory / str(machine)
        place.mkdir(exist_ok=True)
        (memory / str(machine)).mkdir(exist_ok=True)
        if not (place / "memory").is_symlink():
            (place / "memory").symlink_to(memory / str(machine))
    settings: dict[str, Any] = {"every_n_train_steps": 4, "memory_every_n_steps": 1}
    settings["memory_dir"] = "/proc/self/cwd/memory"
    if "resume" not in spec:
        settings["resume"] = "auto"
    trainer = {"devices": 1, "num_nodes": 2}
    return job.run(directory, name, **{"machines": True, "settings": settings, "trainer": trainer, **spec})


@pytest.mark.extended_cells("AsyncCheckpointIO-0-{'resume': 'last'}")
@pytest.mark.parametrize(
    ("io", "lost", "resume"),
    [
        ("AsyncCheckpointIO", 0, {}),
        ("AsyncCheckpointIO", 0, {"resume": "last"}),
        pytest.param("AsyncCheckpointIO", 1, {}, marks=pytest.mark.slow),
        pytest.param("ShardedCheckpointIO", 0, {}, marks=pytest.mark.slow),
        pytest.param("ShardedCheckpointIO", 1, {"resume": "last"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_what_a_lost_machine_had_in_memory_comes_from_the_other_one(
    job: Job, tmp_path: Path, memory: Path, io: str, lost: int, resume: dict[str, str]
) -> None:
    signals = [[rank, "SIGKILL", START, 8] for rank in range(2)]
    saves = {"io": io, "io_settings": {"mode": "sync"} if io == "ShardedCheckpointIO" else {}, **resume}
    run(job, tmp_path, "killed", memory, **saves, signals=signals, killed=[0, 1])
    shutil.rmtree(memory / str(lost))
    resumed = run(job, tmp_path, "resumed", memory, **saves)
    shutil.rmtree(tmp_path / "saved")
    whole = run(job, tmp_path, "whole", memory, **saves)
    for found, expected in zip(resumed, whole, strict=True):
        assert "/proc/self/cwd/memory/" in found["ckpt_path"]
        assert int(Path(found["ckpt_path"]).name.split("-")[0].removeprefix("step=")) > 4
        assert expected["ckpt_path"] is None
        assert (found["weights"], found["optimizer"]) == (expected["weights"], expected["optimizer"])
    assert list(memory.glob("*/*")) == []
