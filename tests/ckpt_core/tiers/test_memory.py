"""Snapshots in memory: which one a start resumes from, how many there are, what they refuse, when they are deleted."""

from __future__ import annotations

import errno
import logging
import os
import random
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core import Checkpointer, DirectoryCheckpointer, Kind, Part, StorageError, verify
from ckpt_core.cli import main
from ckpt_core.resume import newest_to_resume
from ckpt_core.storage import in_memory
from ckpt_core.storage.in_memory import MemoryStorage
from ckpt_core.tiers import MemoryTier, runs_in_memory
from tests.conftest import ScriptRunner
from tests.support.interrupting import at_every_moment

NUMBERS = 2**19  # float32: 2 MiB, whose pages are reused


@pytest.fixture(autouse=True)
def _in_memory(tmp_path: Path) -> Iterator[None]:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as directory:
        (tmp_path / "memory").symlink_to(directory)
        yield


def tier_of(tmp_path: Path, every: int = 1, root: Path | None = None) -> MemoryTier:
    return MemoryTier(tmp_path / "run", every=every, root=root or tmp_path / "memory")


def state_of(step: int) -> dict[str, Any]:
    return {"weight": torch.full((NUMBERS,), float(step)), "step": step}


def take(tier: MemoryTier, *steps: int, strategy: str = "sync") -> None:
    with Checkpointer(**tier.settings(strategy)) as snapshots:
        for step in steps:
            path = tier.next_path(step, "step={}.ckpt")
            if path is not None:
                snapshots.save(state_of(step), path)
                snapshots.drain()


def save(tmp_path: Path, step: int) -> None:
    Checkpointer(strategy="sync").save(state_of(step), tmp_path / "run" / f"step={step}.ckpt")


def names(tier: MemoryTier) -> list[str]:
    return sorted(os.listdir(tier.directory))


def resumed(tmp_path: Path) -> Any:
    point = newest_to_resume(tmp_path / "run", memory=tier_of(tmp_path))
    return None if point is None else Checkpointer(strategy="sync").load(point.path)["step"]


def test_a_start_takes_the_newer_of_memory_and_disk(tmp_path: Path) -> None:
    tier = tier_of(tmp_path)
    assert resumed(tmp_path) is None
    tier.begin()
    take(tier, 3)
    assert resumed(tmp_path) == 3  # there is no checkpoint on the disk yet
    save(tmp_path, 4)
    assert resumed(tmp_path) == 4
    take(tier, 5)
    tier.leave()
    assert resumed(tmp_path) == 5


def test_another_run_has_other_snapshots(tmp_path: Path) -> None:
    tier = tier_of(tmp_path)
    tier.begin()
    take(tier, 3)
    other = MemoryTier(tmp_path / "another", root=tmp_path / "memory")
    assert newest_to_resume(tmp_path / "another", memory=other) is None
    os.symlink(tmp_path / "run", tmp_path / "link")
    assert MemoryTier(tmp_path / "link", root=tmp_path / "memory").directory == tier.directory
    tier.end()


@pytest.mark.parametrize("damage", ["flip", "truncate"])
def test_a_damaged_snapshot_gives_way_to_the_disk(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    save(tmp_path, 2)
    tier = tier_of(tmp_path)
    tier.begin()
    take(tier, 3)
    snapshot = Path(tier.directory, "step=3.ckpt")
    data = bytearray(snapshot.read_bytes())
    data[len(data) // 2] ^= 1
    snapshot.write_bytes(data if damage == "flip" else data[: len(data) // 2])
    tier.leave()
    assert resumed(tmp_path) == 2
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert f"passed over the checkpoint {snapshot}: " in warning
    assert f"took {tmp_path}/run/step=2.ckpt instead" in warning


def test_a_run_counts_from_where_it_is(tmp_path: Path) -> None:
    tier = tier_of(tmp_path, every=4)
    tier.begin_at(6)
    assert [step for step in (7, 8, 9, 13, 14, 16) if tier.due(step)] == [8, 13, 16]  # 13: the step 12 was not asked


def test_two_are_kept_whose_pages_are_used_again(tmp_path: Path) -> None:
    tier = tier_of(tmp_path)
    tier.begin()
    take(tier, 1, 2)
    first = os.stat(f"{tier.directory}/step=1.ckpt").st_ino
    path = tier.next_path(3, "step={}.ckpt")
    assert names(tier) == ["step=2.ckpt"]  # while the third is being written, one is whole
    assert path is not None
    Checkpointer(**tier.settings("sync")).save(state_of(3), path)
    assert os.stat(path).st_ino == first
    assert names(tier) == ["step=2.ckpt", "step=3.ckpt"]
    assert sorted(os.listdir(os.path.dirname(tier.directory))) == ["run.json", "snapshots"]
    for step in (2, 3):
        found = Checkpointer().load(f"{tier.directory}/step={step}.ckpt")
        assert torch.equal(found["weight"], state_of(step)["weight"])


def test_a_spare_that_another_rank_deletes_fails_no_snapshot(tmp_path: Path) -> None:
    storage, other = MemoryStorage(str(tmp_path)), MemoryStorage(str(tmp_path))
    data = os.urandom(2**20)

    def write() -> None:
        writer = storage.create(f"{tmp_path}/new", len(data))
        writer.write_at(0, memoryview(data))
        writer.commit(len(data))

    for run in at_every_moment(("storage/in_memory.py",), other.drop_spares, opcodes=False):
        (tmp_path / "old").write_bytes(bytes(len(data)))
        storage.set_aside(f"{tmp_path}/old")
        run(write)
        assert (tmp_path / "new").read_bytes() == data
        (tmp_path / "new").unlink()


def test_what_two_snapshots_share_is_not_written_over(tmp_path: Path) -> None:
    tier = tier_of(tmp_path)
    tier.begin()
    frozen, settings = torch.full((NUMBERS,), 7.0), tier.settings("sync")
    with DirectoryCheckpointer(slice_replicated=True, **settings) as snapshots:
        for step in range(1, 6):
            # the first file that is large enough to reuse pages of another one is begun when step 1 is deleted
            state = {"frozen": frozen, "weight": torch.full((NUMBERS if step > 2 else 9,), float(step))}
            path = tier.next_path(step)
            assert path is not None
            snapshots.save([Part("model", state, Kind.REPLICATED, frozen={"frozen"})], path)
            verify(path)
    for step in (4, 5):
        verify(f"{tier.directory}/step={step}")
    shared = [name for name in os.listdir(f"{tier.directory}/step=5") if "frozen" in name]
    files = [os.stat(f"{tier.directory}/step=5/{name}") for name in os.listdir(f"{tier.directory}/step=5")]
    assert shared or any(file.st_nlink > 1 for file in files)  # otherwise the test shows nothing
    tier.end()


def test_the_end_leaves_nothing_and_a_crash_everything(tmp_path: Path) -> None:
    tier = tier_of(tmp_path)
    tier.begin()
    take(tier, 1, 2, 3, strategy="async")
    tier.leave()
    again = tier_of(tmp_path)
    again.begin()
    assert names(again) == ["step=2.ckpt", "step=3.ckpt"]
    take(again, 4)
    assert names(again) == ["step=3.ckpt", "step=4.ckpt"]
    assert tier_of(tmp_path).found() == again.directory
    tier_of(tmp_path).end()  # as a rank does that has begun nothing
    assert names(again) == ["step=3.ckpt", "step=4.ckpt"]
    again.end()
    assert os.listdir(tmp_path / "memory") == []


def test_only_the_ranks_of_one_memory_see_it(tmp_path: Path) -> None:
    tier = tier_of(tmp_path)
    token = tier.begin()
    assert tier_of(tmp_path).is_seen(token)
    assert not MemoryTier(tmp_path / "run", root=tmp_path).is_seen(token)
    tier.end()


def test_a_directory_of_others_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = tier_of(tmp_path)
    tier.begin()
    take(tier, 3)
    tier.leave()
    home = tmp_path / "memory" / f"ckpt-{os.geteuid()}"
    home.chmod(0o777)  # others could have created it
    with pytest.raises(StorageError, match="belongs to others, or that they may write to"):
        tier.begin()
    assert resumed(tmp_path) is None
    assert "could not look for snapshots in memory" in caplog.text
    home.chmod(0o700)
    if os.geteuid() == 0:
        os.chown(home, 65534, -1)
        with pytest.raises(StorageError, match=r"owner 65534"):
            tier.begin()
        os.chown(home, 0, -1)
    assert resumed(tmp_path) == 3


def test_no_memory_and_no_sense_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="no in-memory filesystem") as caught:
        MemoryTier(tmp_path / "run", root=tmp_path / "none").begin()
    assert "memory_dir" in (caught.value.remedy or "")
    with pytest.raises(ValueError, match="at least 1, not 0"):
        MemoryTier(tmp_path, every=0)
    with pytest.raises(ValueError, match="need a local directory"):
        MemoryTier(tmp_path, root="s3://bucket")


@pytest.mark.parametrize(
    ("number", "remedy"),
    [(errno.ENOSPC, "ckpt clean --memory"), (errno.ENOMEM, "ckpt clean --memory"), (errno.EROFS, "memory_dir")],
)
def test_memory_that_cannot_be_written_says_what_to_do(
    number: int, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    tier = tier_of(tmp_path)
    monkeypatch.setattr(os, "mkdir", fail)
    with pytest.raises(StorageError, match="cannot be kept in memory") as caught:
        tier.begin()
    assert remedy in (caught.value.remedy or "")


@pytest.mark.parametrize("strategy", ["sync", "async"])
def test_a_snapshot_that_does_not_fit_is_the_last(
    small_filesystem: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, strategy: Any
) -> None:
    tier = tier_of(tmp_path, root=small_filesystem)
    tier.begin()
    take(tier, 1)
    tier.next_path(2)
    with Checkpointer(**tier.settings(strategy)) as snapshots:
        large = {"weight": torch.zeros(2 * 2**20)}  # 8 MiB
        path = tier.next_path(2, "step={}.ckpt")
        assert path is not None
        if strategy == "sync":
            with pytest.raises(StorageError, match="does not fit into memory") as caught:
                snapshots.save(large, path)
            assert "--shm-size" in (caught.value.remedy or "")
        else:
            snapshots.save(large, path)
        snapshots.drain()
    assert tier.next_path(3) is None
    assert caplog.text.count("takes no more snapshots in memory") == 1
    assert names(tier) == ["step=1.ckpt"]  # still there, for the next start
    tier.end()


def test_memory_that_a_container_has_not_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"max": str(10 * 2**20), "used": str(9 * 2**20), "memory.stat": f"inactive_file {2**19}\nanon 1\n"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    limits = [(str(tmp_path / "max"), str(tmp_path / "used"), "inactive_file")]
    monkeypatch.setattr(in_memory, "_CGROUPS", limits)
    assert in_memory.available_memory() == (2**20 + 2**19, 10 * 2**20)
    tier = tier_of(tmp_path)
    tier.begin()
    with pytest.raises(StorageError, match=r"1\.6 MB of 10\.5 MB are available"):
        take(tier, 1)
    (tmp_path / "max").write_text("max\n")
    assert in_memory.available_memory()[1] > 10 * 2**20
    tier.end()


IN_TIER = ("tiers/memory.py",)


def test_a_run_that_begins_while_runs_are_listed_is_alive(tmp_path: Path) -> None:
    tier = tier_of(tmp_path)
    began: list[threading.Thread] = []

    def begin() -> None:
        began.append(threading.Thread(target=tier.begin))
        began[0].start()
        began[0].join(0.1)  # it may wait for the listing that it interrupts

    for run in at_every_moment(IN_TIER, begin, opcodes=False):
        tier.begin()
        tier.leave()
        run(lambda: runs_in_memory(tmp_path / "memory"))
        for thread in began:
            thread.join()
            assert [found.is_alive for found in runs_in_memory(tmp_path / "memory")] == [True]
        began.clear()
        tier.end()


def test_a_run_begins_while_the_only_other_one_ends(tmp_path: Path) -> None:
    other = MemoryTier(tmp_path / "other", root=tmp_path / "memory")
    for run in at_every_moment(IN_TIER, other.end, opcodes=False):
        other.begin()
        tier = tier_of(tmp_path)
        run(tier.begin)
        assert names(tier) == []
        tier.end()
        other.end()


def test_a_run_that_ends_while_runs_are_listed_hides_no_other(tmp_path: Path) -> None:
    first, last = (MemoryTier(tmp_path / name, root=tmp_path / "memory") for name in ("first", "last"))
    last.begin()
    for run in at_every_moment(IN_TIER, first.end, opcodes=False):
        first.begin()
        listed: list[str] = []
        run(lambda: listed.extend(found.run for found in runs_in_memory(tmp_path / "memory")))  # noqa: B023
        assert str(tmp_path / "last") in listed
        first.end()
    last.end()


def test_snapshots_of_runs_that_are_over_are_cleaned_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "memory"
    alive, over = tier_of(tmp_path), MemoryTier(tmp_path / "over", root=tmp_path / "memory")
    for tier in (alive, over):
        tier.begin()
        take(tier, 1)
    over.leave()
    assert [(run.run, run.is_alive) for run in runs_in_memory(root)] == [
        (str(tmp_path / "over"), False),
        (str(tmp_path / "run"), True),
    ]
    assert main(["clean", "--memory", str(root), "--dry-run"]) == 0
    assert len(runs_in_memory(root)) == 2
    capsys.readouterr()
    assert main(["clean", "--memory", str(root)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" /")[0] for line in lines] == ["deleted", "kept, in use:"]
    assert [run.run for run in runs_in_memory(root)] == [str(tmp_path / "run")]
    alive.end()


KILLS_ITSELF = """
import os, signal, sys, threading, time, torch
from ckpt_core import Checkpointer
from ckpt_core.tiers import MemoryTier

run, root, step, strategy, after = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], float(sys.argv[5])
memory = MemoryTier(run, root=root)
memory.begin()
snapshots = Checkpointer(**memory.settings(strategy))

def kill():
    while memory.snapshots < 2:
        time.sleep(0.001)
    time.sleep(after)
    os.kill(os.getpid(), signal.SIGKILL)

threading.Thread(target=kill, daemon=True).start()
while True:
    step += 1
    path = memory.next_path(step, "step={}.ckpt", is_busy=snapshots.is_busy)
    if path is not None:
        snapshots.save({"weight": torch.full((2**19,), float(step)), "step": step}, path)
"""


def killed_at_random(fork_script: ScriptRunner, tmp_path: Path, strategy: str, times: int) -> None:
    """Kill a process while it takes snapshots; each start finds a whole snapshot, newer than where it began."""
    step, chance = 0, random.Random(strategy)
    for _ in range(times):
        arguments = [tmp_path / "run", tmp_path / "memory", step, strategy, chance.random() / 10]
        killed = fork_script(KILLS_ITSELF, *arguments, check=False)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        point = newest_to_resume(tmp_path / "run", attempts=None, memory=tier_of(tmp_path))
        assert point is not None
        found = Checkpointer().load(point.path)
        assert found["step"] > step
        step = found["step"]
        assert torch.equal(found["weight"], torch.full((NUMBERS,), float(step)))
    tier = tier_of(tmp_path)
    tier.begin()
    assert len(names(tier)) <= 2  # the snapshot that was being written is gone
    tier.end()
    assert os.listdir(tmp_path / "memory") == []


@pytest.mark.parametrize("strategy", ["sync", "async"])
def test_a_killed_run_leaves_whole_snapshots(fork_script: ScriptRunner, tmp_path: Path, strategy: str) -> None:
    killed_at_random(fork_script, tmp_path, strategy, 1)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["sync", "async"])
def test_a_run_that_is_killed_often_leaves_whole_snapshots(
    fork_script: ScriptRunner, tmp_path: Path, strategy: str
) -> None:
    killed_at_random(fork_script, tmp_path, strategy, 40)


def test_a_run_that_begins_while_runs_are_cleaned_up_keeps_its_snapshots(tmp_path: Path) -> None:
    """At whatever line of one of the two, the other does all of its work."""
    run, root = tmp_path / "run", tmp_path / "memory"

    def clean_up() -> None:
        for each in runs_in_memory(root):
            if each.is_alive or each.delete():
                continue
            for thread in threads:  # not deleted, because a run begins, which may not have come far on a busy machine
                thread.join()
            assert any(other.is_alive for other in runs_in_memory(root))

    def begin() -> None:
        tier = MemoryTier(run, root=root)
        begun.append((tier, tier.begin()))
        Path(tier.directory, "snapshot").touch()

    def begin_beside() -> None:
        thread = threading.Thread(target=begin)  # it may have to wait for the lock
        thread.start()
        thread.join(0.02)
        threads.append(thread)

    begun: list[tuple[MemoryTier, str]] = []
    threads: list[threading.Thread] = []
    for act, handler in [(begin, clean_up), (clean_up, begin_beside)]:
        moments = 0
        for run_until in at_every_moment(IN_TIER, handler, opcodes=False):
            begun.clear()
            threads.clear()
            begin()
            begun.pop()[0].leave()
            run_until(act)
            for thread in threads:
                thread.join()
            for tier, token in begun:
                assert tier.is_seen(token)
                assert os.listdir(tier.directory) == ["snapshot"]
                assert [each.is_alive for each in runs_in_memory(root)] == [True]
                tier.end()
            assert not any(each.is_alive for each in runs_in_memory(root))
            moments += 1
        assert moments > 20


def test_a_run_that_has_begun_since_they_were_listed_keeps_its_snapshots(tmp_path: Path) -> None:
    tier = MemoryTier(tmp_path / "run", root=tmp_path / "memory")
    tier.begin()
    tier.leave()
    (listed,) = runs_in_memory(tmp_path / "memory")
    again = MemoryTier(tmp_path / "run", root=tmp_path / "memory")
    token = again.begin()
    Path(again.directory, "snapshot").touch()
    assert not listed.is_alive
    assert not listed.delete()
    assert os.listdir(again.directory) == ["snapshot"]
    assert again.is_seen(token)
    again.end()
    assert runs_in_memory(tmp_path / "memory") == []
