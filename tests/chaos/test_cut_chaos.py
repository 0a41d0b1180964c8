"""Asynchronous trainings of real processes: killed as a whole, one worker lost or frozen, a file damaged, all replayed.

The long form of the kills is ``tools/chaos_cut.py``.
"""

from __future__ import annotations

import dataclasses
import os
import random
import re
import signal
import time
from pathlib import Path

import pytest

from ckpt_async.consistent_cut import CutOptions
from ckpt_async.parameter_server import CutStore, Transport
from tests.chaos import cut_training
from tests.chaos.cut_campaign import (
    SCENARIOS,
    Campaign,
    assert_complete,
    cut_off,
    judged,
    run_to_end,
    wait_for_checkpoints,
)
from tests.chaos.cut_cluster import Cluster
from tests.chaos.cut_replay import differences
from tests.chaos.cut_training import Job, batch_of, violations, work
from tests.support.damage import flip_bit

KILLS = 8
LIMIT = 200.0


@pytest.mark.slow
def test_killed_clusters_lose_no_sample_and_repeat_none(tmp_path: Path) -> None:
    said: list[str] = []
    report = Campaign(tmp_path, 3, said.append, epochs=3).run(KILLS, SCENARIOS[2:6])
    assert report.violations == []
    assert report.kills.total() == KILLS
    assert report.finished.total() >= 4
    assert report.checkpoints.total() > KILLS
    assert report.in_snapshot >= 1
    assert "0 violations" in report.table()


def test_the_judge_notices_a_lost_and_a_repeated_sample(tmp_path: Path) -> None:
    job = Job(str(tmp_path / "checkpoints"), epochs=1, workers=1, shards=1, samples=48, every=60.0)

    def careless(job: Job, transport: Transport, coordinator: str) -> None:
        # In this process alone: the second batch of every stream is the first one again.
        cut_training.batch_of = lambda job, update: batch_of(
            job, update._replace(seq=1 if update.seq == 2 else update.seq)
        )
        work(job, transport, coordinator)

    store = run_to_end(Cluster(job, tmp_path / "log", work=careless), LIMIT)
    with store.open(store.committed()[0]) as checkpoint:
        found = violations(job, checkpoint)
    assert len(found) == 4
    assert "ledger 0 is wrong for 48 samples" in found[0]


@pytest.mark.extended
def test_a_lone_worker_is_replaced_without_rollback(tmp_path: Path) -> None:
    options = CutOptions(on_worker_failure="rejoin")
    job = Job(str(tmp_path / "checkpoints"), epochs=3, keep=1000, options=options, reorder=True)
    cluster = Cluster(job, tmp_path / "log")
    store, chance, kills = CutStore(job.root), random.Random(5), 0
    try:
        for _ in range(3):
            known = len(store.committed())
            assert wait_for_checkpoints(store, known + 2, LIMIT), cluster.logs()
            name = chance.choice(job.worker_names)
            process = cluster.processes[name]
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)  # type: ignore[arg-type]
                process.join()
                kills += process.exitcode == -signal.SIGKILL
                cluster.start(name)
        assert cluster.wait(LIMIT), cluster.logs()
    finally:
        cluster.kill()
    assert kills >= 2
    assert judged(job) > 6
    assert_complete(job)


def test_a_lost_worker_makes_everything_stop_in_rollback(tmp_path: Path) -> None:
    job = Job(str(tmp_path / "checkpoints"), epochs=50)
    cluster = Cluster(job, tmp_path / "log")
    try:
        assert wait_for_checkpoints(CutStore(job.root), 1, LIMIT), cluster.logs()
        os.kill(cluster.processes["worker-1"].pid, signal.SIGKILL)  # type: ignore[arg-type]
        for process in cluster.processes.values():
            process.join(30)
        codes = {name: process.exitcode for name, process in cluster.processes.items()}
    finally:
        cluster.kill()
    assert codes == {**dict.fromkeys(codes, 1), "worker-1": -signal.SIGKILL}
    assert "worker-1 was lost" in cluster.logs()
    assert judged(job) >= 1


@pytest.mark.extended
def test_a_frozen_worker_stops_snapshots_and_not_the_others(tmp_path: Path) -> None:
    options = CutOptions(alignment="aligned", aligned_timeout=0.05, snapshot_timeout=1.0)
    job = Job(str(tmp_path / "checkpoints"), epochs=6, options=options)
    cluster = Cluster(job, tmp_path / "log")
    store = CutStore(job.root)
    try:
        assert wait_for_checkpoints(store, 1, LIMIT), cluster.logs()
        frozen = cluster.processes["worker-2"].pid
        os.kill(frozen, signal.SIGSTOP)  # type: ignore[arg-type]
        log = cluster.log / "coordinator.log"
        deadline = time.monotonic() + LIMIT
        is_said = re.compile("nothing was heard from .*worker-2").search  # and from others, on a busy machine
        while not is_said(log.read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert is_said(log.read_text())
        os.kill(frozen, signal.SIGCONT)  # type: ignore[arg-type]
        assert cluster.wait(LIMIT), cluster.logs()
    finally:
        os.kill(frozen, signal.SIGCONT) if cluster.processes["worker-2"].is_alive() else None  # type: ignore[arg-type]
        cluster.kill()
    with store.open(store.committed()[0]) as checkpoint:
        assert violations(job, checkpoint) == []
    assert_complete(job)


@pytest.mark.extended
@pytest.mark.parametrize(("workers", "shards"), [(5, 3), (1, 1)])
def test_another_number_of_workers_and_shards_goes_on(tmp_path: Path, workers: int, shards: int) -> None:
    job = Job(str(tmp_path / "checkpoints"), epochs=2, samples=480)
    cut_off(Cluster(job, tmp_path / "log"), 2, LIMIT)
    other = dataclasses.replace(job, workers=workers, shards=shards)
    run_to_end(Cluster(other, tmp_path / "log-2"), LIMIT)
    assert "resumes at batch" in (tmp_path / "log-2" / "coordinator.log").read_text()
    assert judged(other) >= 1
    assert_complete(other)


def test_a_damaged_file_is_noticed_and_the_checkpoint_before_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(str(tmp_path / "checkpoints"), epochs=50)
    store = cut_off(Cluster(job, tmp_path / "log"), 2, LIMIT)
    newest, before = store.committed()[:2]
    file = max(Path(newest).glob("model-*.safetensors"), key=lambda file: file.stat().st_size)
    flip_bit(file, -1)
    with store.newest() as found:  # type: ignore[union-attr]
        assert found.path == before
    assert f"passed over the checkpoint {newest}" in caplog.text


@pytest.mark.extended
@pytest.mark.parametrize("alignment", ["unaligned", "aligned"])
def test_every_checkpoint_is_the_replay_of_the_recorded_order_bit_for_bit(tmp_path: Path, alignment: str) -> None:
    options = CutOptions(alignment=alignment, record_order=True)  # type: ignore[arg-type]
    job = Job(str(tmp_path / "checkpoints"), epochs=2, samples=480, keep=1000, reorder=True, options=options)
    store = cut_off(Cluster(job, tmp_path / "log"), 3, LIMIT)
    first = store.committed()
    assert len(first) >= 3
    run_to_end(Cluster(job, tmp_path / "log-2"), LIMIT)
    with store.open(first[0]) as base:
        for path in first:
            with store.open(path) as checkpoint:
                assert differences(job, checkpoint) == []
        later = [path for path in store.committed() if path not in first]
        for path in later:
            with store.open(path) as checkpoint:
                assert differences(job, checkpoint, base) == []
        with store.open(later[-1]) as checkpoint:
            assert differences(job, checkpoint) != [], "replayed from another beginning, it must not fit"
