"""The examples under Ray Train: a worker or the whole job is killed, and training continues, also on fewer workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from ckpt_core import verify

pytest.importorskip("ray.train", reason="Ray Train is not installed", exc_type=ImportError)

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 500.0
STEPS = 60
Start = Callable[..., subprocess.Popen[bytes]]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * SECONDS)]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start an example that keeps everything in a directory; what is still running at the end of the test is killed."""
    jobs = []

    def start(framework: str, storage: Path, *more: str) -> subprocess.Popen[bytes]:
        storage.mkdir(exist_ok=True)
        for old in storage.glob("worker*"):
            old.unlink()
        quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_memory_monitor_refresh_ms": "0", "OMP_NUM_THREADS": "1"}
        slow = dict.fromkeys(
            ("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S"), str(int(SECONDS))
        )
        command = [sys.executable, str(ROOT / f"examples/ray/train_{framework}.py"), "--storage", str(storage), *more]
        with (storage / "log").open("ab") as log:
            environment = {**os.environ, **quiet, **slow, "PYTHONPATH": str(ROOT)}
            job = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        jobs.append(job)
        return job

    yield start
    for job in jobs:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()


def log_of(storage: Path) -> str:
    return (storage / "log").read_text()


def wait_for(job: subprocess.Popen[bytes], storage: Path, saved: str = "checkpoints/[!.]*") -> None:
    """Wait until a checkpoint is there, and the job is still training."""
    deadline = time.monotonic() + SECONDS
    while job.poll() is None and time.monotonic() < deadline:
        if (storage / "worker1").exists() and any(storage.glob(saved)):
            return
        time.sleep(0.05)
    pytest.fail(log_of(storage)[-5000:])


def kill_worker(storage: Path) -> None:
    os.kill(int((storage / "worker1").read_text()), signal.SIGKILL)


def weights_after(job: subprocess.Popen[bytes], storage: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a job at its end."""
    assert job.wait(SECONDS) == 0, log_of(storage)[-5000:]
    end = torch.load(storage / "end.pt", weights_only=True)
    assert end["step"] == STEPS
    return dict(end["weights"])


def are_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(found[name], weight) for name, weight in expected.items())


@pytest.mark.parametrize("framework", ["lightning", "accelerate"])
def test_runs_continue_after_a_loss(framework: str, start: Start, tmp_path: Path) -> None:
    whole, worker, job, kept = (tmp_path / name for name in ("whole", "worker", "job", "kept"))
    expected = weights_after(start(framework, whole), whole)
    assert "resuming from" not in log_of(whole).lower()

    started = start(framework, worker)
    wait_for(started, worker)
    kill_worker(worker)  # Ray starts both again
    assert are_same(weights_after(started, worker), expected)
    assert "resuming from" in log_of(worker).lower()

    started = start(framework, job)
    wait_for(started, job)
    os.killpg(started.pid, signal.SIGKILL)
    started.wait()
    assert not (job / "end.pt").exists()
    fewer = weights_after(start(framework, job, "--workers", "1"), job)
    assert "resuming from" in log_of(job).lower()
    assert not are_same(fewer, expected), "one worker and two have seen the same batches"

    started = start(framework, kept, "--from-ray")
    wait_for(started, kept, "ray/checkpoint_2*")
    kill_worker(kept)
    assert are_same(weights_after(started, kept), expected)
    reported = sorted(kept.glob("ray/checkpoint_2*"))  # next to a file of Ray's own
    assert reported
    for path in reported:
        assert verify(path / "checkpoint.ckpt" if framework == "lightning" else path)
