"""Saves of real processes that share only a store: their outcome, also when one is killed or stopped."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core import DirectoryCheckpointer, Kind, Part
from tests.conftest import ScriptRunner

PREAMBLE = """
import contextlib, functools, json, os, signal, sys, threading, time, torch
from ckpt_core import DirectoryCheckpointer, Kind, OutOfMemoryError, Part, StorageError
from ckpt_core.events import SaveCommitted, SaveFailed, SaveStarted, SnapshotTaken
from ckpt_core.storage import Fault, FaultyStorage, LocalStorage
from ckpt_core.tiers import Tiers
from tests.support.ranks import Ranks, answer_patiently, seconds_of

SIZE = 3_000_000  # floats: several windows

def parts(rank, value):
    return [
        Part("model", {"w": torch.full((SIZE,), float(value)), "b": torch.arange(5)}, Kind.REPLICATED),
        Part("rng", {"seed": torch.tensor([rank, value]), "text": f"rank {rank}"}, Kind.PER_RANK),
    ]

def check(path, value, world):
    with DirectoryCheckpointer().load(path) as checkpoint:
        checkpoint.verify()
        model = checkpoint.load("model")
        assert torch.equal(model["w"], torch.full((SIZE,), float(value)))
        for rank in range(world):
            rng = checkpoint.load("rng", rank=rank)
            assert rng["text"] == f"rank {rank}" and rng["seed"].tolist() == [rank, value], rng
        return checkpoint.metadata

def listing(directory):
    return sorted(os.listdir(directory))
"""

SAVES = (
    PREAMBLE
    + """
world, strategy, slices = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "slices"

def work(rank, group):
    events = []
    checkpointer = DirectoryCheckpointer(
        ranks=group, strategy=strategy, slice_replicated=slices, commit_timeout=60, listeners=[events.append]
    )
    def hook(directory):
        with open(f"{directory}/same.txt", "w") as file:
            file.write("on all")
        os.mkdir(f"{directory}/ranks")
        with open(f"{directory}/ranks/{rank}.txt", "w") as file:
            file.write(f"of {rank}")
    with checkpointer:
        for value in (1, 2, 3):
            state = parts(rank, value)
            checkpointer.save(state, "run/last", metadata={"value": value, "rank": rank}, write_files=hook)
            state[0].state["w"].zero_()  # what was copied counts
        checkpointer.copy("run/last", "run/copy")
        checkpointer.wait()
        checkpointer.remove("run/last")
        checkpointer.wait()
    with checkpointer.load("run/copy") as checkpoint:
        own = checkpoint.load("rng")["text"]
    return [own, [type(event).__name__ for event in events], sorted({e.bytes for e in events if type(e) is SaveCommitted})]

rows = Ranks(world, work).results()
assert check("run/copy", 3, world) == {"value": 3, "rank": 0}
print(json.dumps([rows, listing("run"), listing("run/copy"), listing("run/copy/ranks")]))
"""
)


@pytest.mark.parametrize(
    ("world", "strategy", "slices"), [(2, "sync", "whole"), (3, "async", "whole"), (2, "async", "slices")]
)
def test_ranks_save_one_checkpoint(
    world: int, strategy: str, slices: str, fork_script: ScriptRunner, tmp_path: Path
) -> None:
    rows, run, copy, ranks = json.loads(fork_script(SAVES, world, strategy, slices).stdout)
    assert run == ["copy"]
    assert ranks == [f"{rank}.txt" for rank in range(world)]
    numbered = [f"{rank + 1:05d}-of-{world:05d}" for rank in range(world)]
    models = [f"model-{number}.safetensors" for number in numbered] if slices == "slices" else ["model.safetensors"]
    others = [f"rank-{number}.{kind}" for number in numbered for kind in ("digests", "safetensors")]
    assert copy == sorted(["manifest.json", "ranks", "same.txt", *models, *others])
    assert [row[0] for row in rows] == [f"rank {rank}" for rank in range(world)]
    for _, events, sizes in rows:
        assert len(sizes) == 1, "every rank is told the size of the whole checkpoint, and they are all of one size"
        assert sizes == rows[0][2]
        counts = {name: events.count(name) for name in events}
        assert counts == {"SaveStarted": 4, "SnapshotTaken": 4, "SaveCommitted": 4, "CheckpointRemoved": 1}
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "run" / "copy").iterdir()}
    if slices == "slices":
        one, other = (sizes[name] for name in models)
        assert abs(one - other) < 600_000, "each rank writes its half"


FAILURES = (
    PREAMBLE
    + """
strategy, fault, world = sys.argv[1], sys.argv[2], 3

def disturbed(rank):
    '''The storage of a rank; that of rank 1 does something in the middle of its writing.'''
    storage = FaultyStorage(LocalStorage())
    if rank != 1:
        return storage
    def strike(operation):
        if operation.name == "write_at" and "run/" in operation.path and armed.is_set():
            armed.clear()
            if fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            if fault == "full":
                return True
        return False
    return FaultyStorage(LocalStorage(), [Fault(strike, None, OSError(28, "No space left on device"))])

armed = threading.Event()

def work(rank, group):
    events = []
    checkpointer = DirectoryCheckpointer(
        ranks=group, strategy=strategy, commit_timeout=1000.0,
        listeners=[events.append], storage=disturbed(rank)
    )
    checkpointer.save(parts(rank, 1), "run/a")
    checkpointer.wait()
    if fault == "stopped":
        checkpointer._commit_timeout = 3.0
    armed.set()
    outcome = seconds_of(lambda: (checkpointer.save(parts(rank, 2), "run/a"), checkpointer.wait()))
    again = None
    if fault == "full":
        again = seconds_of(lambda: (checkpointer.save(parts(rank, 3), "run/b"), checkpointer.wait()))
    checkpointer.close()
    return [outcome, again, [type(event).__name__ for event in events]]

ranks = Ranks(world, work)
if fault == "stopped":
    ranks.wait_until_stopped(1)
first, third = ranks.result(0), ranks.result(2)
names = listing("run")
check("run/a", 1, world)
if fault == "stopped":
    ranks.signal(1, signal.SIGCONT)
second = ranks.result(1)
print(json.dumps([[first, second, third], names, listing("run")]))
"""
)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["sync", "async"])
@pytest.mark.parametrize("fault", ["killed", "stopped", "full"])
def test_a_rank_that_does_not_finish_fails_the_save_on_all(
    fault: str, strategy: str, fork_script: ScriptRunner
) -> None:
    rows, names, names_in_the_end = json.loads(fork_script(FAILURES, strategy, fault).stdout)
    expected = {
        "killed": ("RankFailedError", "rank 1 died before the save of"),
        "stopped": ("RankFailedError", "rank 1 began the save"),
        "full": ("StorageError", "rank 1: cannot write the checkpoint: No space left on device"),
    }[fault]
    for rank in (0, 2):
        outcome, again, events = rows[rank]
        assert outcome["raised"] == expected[0], outcome
        assert outcome["message"].startswith(expected[1])
        assert events.count("SaveFailed") == 1
        assert again is None or again["raised"] is None
    assert names == (["a", "b"] if fault == "full" else ["a"]), "nothing is left of the save that failed"
    assert names_in_the_end == names
    if fault == "killed":
        assert rows[1] is None
    elif fault == "stopped":
        # When the stopped rank continues, it learns what happened without it, or that the others are gone.
        assert rows[1][0]["raised"] in {"RankFailedError", "StorageError"}
    else:
        assert rows[1][0]["raised"] == expected[0]
        assert "run/a/" in rows[1][0]["message"], "and not the hidden directory"


RANK_0_FAILS = (
    PREAMBLE
    + """
strategy, fault, world = sys.argv[1], sys.argv[2], 2

def work(rank, group):
    def strike(operation):
        if rank == 0 and operation.name == "write_at" and armed.is_set():
            armed.clear()
            os.kill(os.getpid(), getattr(signal, fault))
        return False
    storage = FaultyStorage(LocalStorage(), [Fault(strike)])
    checkpointer = DirectoryCheckpointer(ranks=group, strategy=strategy, commit_timeout=1000.0, storage=storage)
    checkpointer.save(parts(rank, 1), "run/a")
    checkpointer.wait()
    checkpointer._commit_timeout = 3.0
    armed.set()
    return seconds_of(lambda: (checkpointer.save(parts(rank, 2), "run/a"), checkpointer.wait()))

armed = threading.Event()
ranks = Ranks(world, work)
if fault == "SIGSTOP":
    ranks.wait_until_stopped(0)
outcome = ranks.result(1)
check("run/a", 1, world)
if fault == "SIGSTOP":
    ranks.signal(0, signal.SIGKILL)
    os.waitpid(ranks.pids[0], 0)
names = listing("run")
with DirectoryCheckpointer(strategy="sync") as checkpointer:
    checkpointer.save([], "run/next")
print(json.dumps([outcome, names, listing("run")]))
"""
)


@pytest.mark.each_value
@pytest.mark.parametrize("strategy", ["sync", "async"])
@pytest.mark.parametrize("fault", ["SIGKILL", "SIGSTOP"])
def test_the_death_of_rank_0_is_told_to_the_others(fault: str, strategy: str, fork_script: ScriptRunner) -> None:
    outcome, names, names_after_next = json.loads(fork_script(RANK_0_FAILS, strategy, fault).stdout)
    assert outcome["raised"] == "RankFailedError"
    words = "is gone" if fault == "SIGKILL" else "has not answered for 3 s"
    assert f"rank 0, which keeps the record of a save, {words}" in outcome["message"]
    assert "a" in names
    # A stopped rank 0 may continue: what it was writing is not removed before it is dead. When rank 0 is killed, the
    # kernel closes its connection and its lock at two moments: the others may find the files still locked.
    assert fault == "SIGKILL" or len(names) == 2
    assert names_after_next == ["a", "next"]


CTRL_C = (
    PREAMBLE
    + """
import traceback
strategy, fails, copies, world = sys.argv[1], sys.argv[2] == "fails", sys.argv[3] == "copy", 2

def work(rank, group):
    may_write, begun, over = threading.Event(), threading.Event(), threading.Event()
    error = OSError(5, "first") if fails else None
    slow = Fault(lambda it: it.name == "write_at" and "/run/.a." in it.path, number=None, until=may_write, error=error)
    checkpointer = DirectoryCheckpointer(
        ranks=group, strategy=strategy, commit_timeout=1000.0,
        storage=FaultyStorage(LocalStorage(), [slow] if rank == 1 else []),
    )
    if strategy == "sync":  # what interrupts it is a listener, before anything is written
        may_write.set()

    def interrupt(_, frame):
        where = {each.f_code.co_name for each, _ in traceback.walk_stack(frame)}
        if rank == 1 and not over.is_set() and (strategy == "sync" or "wait_for_turn" in where):
            over.set()
            may_write.set()
            raise KeyboardInterrupt

    def until_it_is():
        begun.wait()
        while strategy == "async" and not over.wait(0.05):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

    def listen(event):
        if strategy == "sync" and type(event) is SaveStarted and begun.is_set():
            signal.raise_signal(signal.SIGUSR1)

    checkpointer._listeners.append(listen)
    signal.signal(signal.SIGUSR1, interrupt)
    if rank == 1:
        threading.Thread(target=until_it_is).start()
    checkpointer.save(parts(rank, 1), "run/a")
    act = functools.partial(checkpointer.save, parts(rank, 2), "run/b")
    if copies:
        checkpointer.copy("run/a", "run/a2")
        act = functools.partial(checkpointer.copy, "run/a", "run/b")
    begun.set()
    second = None
    try:
        second = seconds_of(lambda: (act(), checkpointer.wait()))
    except KeyboardInterrupt:
        second = "interrupted"
    if copies and fails:  # the first copy has failed, too, which is raised in the place of this save
        seconds_of(lambda: checkpointer.save(parts(rank, 3), "run/c"))
    third = seconds_of(lambda: (checkpointer.save(parts(rank, 3), "run/c"), checkpointer.wait()))
    checkpointer.close()
    return [second, third]

rows = Ranks(world, work).results()
if not fails:
    check("run/a", 1, world)
check("run/c", 3, world)
print(json.dumps([rows, listing("run")]))
"""
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("strategy", "first", "second_is"),
    [
        ("sync", "succeeds", "save"),
        ("async", "succeeds", "save"),
        ("async", "fails", "save"),
        ("async", "succeeds", "copy"),
        ("async", "fails", "copy"),
    ],
)
def test_ctrl_c_on_a_rank_before_its_part_is_queued_is_told_to_the_others(
    strategy: str, first: str, second_is: str, fork_script: ScriptRunner
) -> None:
    told = json.loads(fork_script(CTRL_C, strategy, first, second_is).stdout)
    ((second, third), (interrupted, third_there)), names = told
    assert interrupted == "interrupted"
    if first == "fails":  # its error is raised instead of the second one's
        assert second["raised"] == "StorageError"
        assert "rank 1: cannot write the checkpoint: first" in second["message"]
    else:
        assert second["raised"] == "CheckpointError"
        assert "rank 1: the save failed: KeyboardInterrupt" in second["message"]
    assert third["raised"] is third_there["raised"] is None
    copied = ["a2"] if second_is == "copy" else []
    assert names == (["c"] if first == "fails" else ["a", *copied, "c"])


MISTAKES = (
    PREAMBLE
    + """
strategy, world = sys.argv[1], 2

def unserializable(rank):
    return [*parts(rank, 1), Part("custom", {"x": (lambda: 0) if rank == 1 else 1}, Kind.PER_RANK)]

class Unclaimed(LocalStorage):
    def claim(self, directory):
        raise StorageError("not to be claimed")

class Uncopied:
    def __deepcopy__(self, memo):
        raise RuntimeError("a bug in a copy")

def work(rank, group):
    make = functools.partial(DirectoryCheckpointer, ranks=group, strategy=strategy)
    def failing_hook(directory):
        if rank == 1:
            raise RuntimeError("a bug in a hook")
    def different_hook(directory):
        with open(f"{directory}/config.json", "w") as file:
            file.write(str(rank))
    def both(checkpointer, *args, **options):
        def act():
            checkpointer.save(*args, **options)
            checkpointer.wait()
        try:
            return seconds_of(act)
        except RuntimeError as error:
            checkpointer.drain()
            return {"raised": "RuntimeError", "message": str(error), "later": repr(checkpointer.take_failure())}
    checkpointer = make(commit_timeout=60.0)
    found = {
        "paths": both(checkpointer, parts(rank, 1), f"run/{rank}"),
        "unserializable": both(checkpointer, unserializable(rank), "run/a"),
        "hook": both(checkpointer, parts(rank, 1), "run/a", write_files=failing_hook),
        "metadata": both(checkpointer, parts(rank, 1), "run/a", metadata={"x": Uncopied() if rank else 1}),
        "files": both(checkpointer, parts(rank, 1), "run/a", write_files=different_hook),
        "steps": both(checkpointer, parts(rank, 1), "run/a", step=rank),
        "parts": both(checkpointer, parts(rank, 1)[rank:], "run/a"),
        "shapes": both(checkpointer, [Part("model", {"w": torch.zeros(3 + rank)}, Kind.REPLICATED)], "run/a"),
    }
    found["fine"] = both(checkpointer, parts(rank, 1), "run/a")
    checkpointer.close()
    unclaimed = make(commit_timeout=60.0, storage=Unclaimed())
    found["claim"] = both(unclaimed, parts(rank, 1), "run/b")
    unclaimed.close(raises=False)
    unknown = make(commit_timeout=60.0, storage_options={"backend": "unknown"} if rank else None)
    found["storage"] = both(unknown, parts(rank, 1), "memory://run/b")
    def copied():
        unknown.copy("run/a", "memory://run/c")
        unknown.wait()
    found["copy"] = seconds_of(copied)
    here = os.getcwd()
    for astray in range(world):
        tiers = Tiers(local_dir=f"{here}/{'other' if rank == astray else 'run'}", upload_to=f"{here}/uploads")
        apart = make(commit_timeout=60.0, tiers=tiers)
        found[f"place {astray}"] = both(apart, parts(rank, 1), "run/b")
        def copied_there():
            apart.copy("run/a", "run/c")
            apart.wait()
        found[f"place of copy {astray}"] = seconds_of(copied_there)
        apart.close(raises=False)
    slow = Fault("create", None, delay=0.5)
    short_of_memory = make(commit_timeout=60.0, storage=FaultyStorage(LocalStorage(), [slow]))
    def refuse(nbytes):
        raise OutOfMemoryError("no memory")
    short_of_memory._pipeline.buffers.acquire = refuse
    pending = []
    def failed():
        try:
            short_of_memory.save(parts(rank, 1), "run/b", write_files=failing_hook)
        finally:
            pending.extend(short_of_memory.pending)
    with contextlib.suppress(RuntimeError):
        seconds_of(failed)
    found["pending"] = pending
    short_of_memory.close(raises=False)
    answer_patiently()
    short = make(commit_timeout=1.0)
    if rank == 0:
        found["alone"] = both(short, parts(rank, 1), "run/b")
    return found

print(json.dumps([Ranks(world, work).results(), listing("run")]))
"""
)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["sync", "async"])
def test_mistakes_fail_on_all_ranks_and_spoil_nothing(strategy: str, fork_script: ScriptRunner) -> None:
    (zero, one), names = json.loads(fork_script(MISTAKES, strategy).stdout)
    assert names == ["a"], (zero, one)
    expected = {
        "paths": ("RankFailedError", ["run/0", "run/1", "the same path to save() on all ranks"]),
        "unserializable": ("SerializationError", ["custom.x"]),
        "hook": ("CheckpointError", ["rank 1: the save failed: RuntimeError: a bug in a hook"]),
        "metadata": ("SerializationError", ["Uncopied cannot be saved", "metadata"]),
        "files": ("SerializationError", ["config.json", "on one rank only"]),
        "steps": ("RankFailedError", ["rank 0 saves step 0, but rank 1 step 1"]),
        "parts": ("SerializationError", ["rank 1 saves other parts than rank 0: they differ in "]),
        "shapes": ("SerializationError", ["rank 1 has other tensors in the part 'model' than rank 0"]),
        "claim": ("StorageError", ["not to be claimed"]),
        "storage": ("StorageError", ["'unknown'"]),
        "copy": ("StorageError", ["'unknown'"]),
        **{f"place{of} {rank}": ("StorageError", ["below local_dir"]) for of in ("", " of copy") for rank in (0, 1)},
    }
    for name, (kind, words) in expected.items():
        for row in (zero[name], one[name]):
            if kind == "CheckpointError" and row is one[name] and strategy == "async":
                bug = words[0].rpartition("RuntimeError: ")[2]
                assert row == {"raised": "RuntimeError", "message": bug, "later": "None"}
                continue
            assert row["raised"] == kind, (name, row)
            for word in words:
                assert word in row["message"], (name, row)
    assert one["pending"] == []  # live tensors are not written any more once the save has failed
    assert zero["fine"]["raised"] is one["fine"]["raised"] is None
    assert zero["alone"]["raised"] == "RankFailedError"
    assert "rank 1 did not begin the save of " in zero["alone"]["message"]
    assert "call save on all ranks" in zero["alone"]["message"]


ORDER = (
    PREAMBLE
    + """
world = 2

def work(rank, group):
    '''Saves without waiting, the third of which fails on rank 1; each rank says at which call it was told.'''
    def third(operation):
        return rank == 1 and operation.name == "write_at" and "/.3." in operation.path
    slow = Fault("begin_directory", None, delay=0.3 * (rank == 0))
    storage = FaultyStorage(LocalStorage(), [slow, Fault(third, None, OSError(5, "Input/output error"))])
    checkpointer = DirectoryCheckpointer(ranks=group, max_pending=int(sys.argv[1]), commit_timeout=60, storage=storage)
    for number in range(1, 9):
        try:
            checkpointer.save(parts(rank, number)[1:], f"run/{number}")
        except StorageError as error:
            checkpointer.drain()
            return [number, type(error).__name__, checkpointer.failures, repr(checkpointer.take_failure())]
        time.sleep(1.0 * (rank == 1))  # rank 1 knows of the failure long before its next save

print(json.dumps([Ranks(world, work).results(), listing("run")]))
"""
)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("max_pending", [1, 2])
def test_ranks_are_told_of_a_failure_at_the_same_save(max_pending: int, fork_script: ScriptRunner) -> None:
    rows, names = json.loads(fork_script(ORDER, max_pending).stdout)
    assert rows == [[3 + max_pending, "StorageError", 1, "None"]] * 2
    assert names == [str(number) for number in range(1, 3 + max_pending) if number != 3]


AGAIN = (
    PREAMBLE
    + """
failing, max_pending, waits = map(int, sys.argv[1:])

def work(rank, group):
    '''Saves on, whatever the first save raises; each rank says which call has raised what.'''
    checkpointer = DirectoryCheckpointer(ranks=group, max_pending=max_pending, commit_timeout=60)
    found = []
    for number in range(1, 6):
        spoiled = [Part("custom", {"x": (lambda: 0) if rank == failing and number == 1 else 1}, Kind.PER_RANK)]
        found.append(seconds_of(lambda: checkpointer.save(parts(rank, number) + spoiled, f"run/{number}"))["raised"])
        if waits:
            found.append(seconds_of(checkpointer.wait)["raised"])
    checkpointer.close()
    return found

rows = Ranks(2, work).results()
for number in listing("run"):
    check(f"run/{number}", int(number), 2)
print(json.dumps([rows, listing("run")]))
"""
)


@pytest.mark.each_value
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("max_pending", [1, 2])
def test_ranks_save_again_after_one_has_raised_at_once(
    max_pending: int, failing: int, fork_script: ScriptRunner
) -> None:
    rows, names = json.loads(fork_script(AGAIN, failing, max_pending, 0).stdout)
    assert rows[failing] == ["SerializationError", None, None, None, None]
    assert rows[1 - failing] == [None] * max_pending + ["SerializationError"] + [None] * (4 - max_pending)
    assert names == ["2", "3", "4", "5"], "also the save that has raised what was wrong with the first one"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("failing", [0, 1])
def test_ranks_that_have_waited_save_again_after_one_has_raised_at_once(
    failing: int, fork_script: ScriptRunner
) -> None:
    rows, names = json.loads(fork_script(AGAIN, failing, 1, 1).stdout)
    assert rows[failing] == ["SerializationError", *[None] * 9]
    assert rows[1 - failing] == [None, "SerializationError", *[None] * 8]
    assert names == ["2", "3", "4", "5"]


def test_tensors_are_whole_again_in_another_world(fork_script: ScriptRunner, tmp_path: Path) -> None:
    fork_script(SAVES, 2, "async", "slices")
    with DirectoryCheckpointer().load(tmp_path / "run" / "copy") as checkpoint:
        into: dict[str, Any] = {"w": torch.zeros(3_000_000), "b": torch.zeros(5, dtype=torch.int64)}
        checkpoint.load("model", into=into)
    assert torch.equal(into["w"], torch.full((3_000_000,), 3.0))
    with DirectoryCheckpointer(strategy="sync") as checkpointer:  # one process saves over what two have saved
        checkpointer.save([Part("model", into, Kind.REPLICATED)], tmp_path / "run" / "copy")
    assert sorted(os.listdir(tmp_path / "run" / "copy")) == [
        "manifest.json",
        "model.safetensors",
        "rank-00001-of-00001.digests",
    ]


NOT_SHARED = (
    PREAMBLE
    + """
from ckpt_core._pipeline import directory_commit as directories
directories._LISTING_SECONDS = 0.5

class AnotherMachine(LocalStorage):
    # The same paths, on a disk of its own.
    def begin_directory(self, path, token):
        return super().begin_directory(path.replace("/run/", "/elsewhere/"), token)
    def discard_directory(self, path, token, names=()):
        super().discard_directory(path.replace("/run/", "/elsewhere/"), token, names)
    def leave_directory(self, path, token):
        super().leave_directory(path.replace("/run/", "/elsewhere/"), token)

def work(rank, group):
    storage = AnotherMachine() if rank == 1 else LocalStorage()
    checkpointer = DirectoryCheckpointer(ranks=group, strategy="sync", storage=storage, commit_timeout=60)
    return seconds_of(lambda: checkpointer.save(parts(rank, 1), "run/a"))

print(json.dumps([Ranks(2, work).results(), listing("run"), listing("elsewhere")]))
"""
)


def test_a_disk_that_the_ranks_do_not_share_is_found_out(fork_script: ScriptRunner) -> None:
    rows, run, elsewhere = json.loads(fork_script(NOT_SHARED).stdout)
    for row in rows:
        assert row["raised"] == "StorageError"
        assert "does not see 2 of 5 files" in row["message"]
        assert "rank-00002-of-00002" in row["message"]
        assert "a directory that all machines share" in row["message"]
    assert run == elsewhere == []


EXIT = (
    PREAMBLE
    + """
import subprocess
from ckpt_core import RankGroup
from torch.distributed import TCPStore

if len(sys.argv) == 1:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [subprocess.Popen([sys.executable, "script.py", str(rank), str(server.port)]) for rank in range(2)]
    print([rank.wait() for rank in ranks], listing("run"))
    check("run/a", 1, 2)
    sys.exit()

rank = int(sys.argv[1])
bootstrap = TCPStore("127.0.0.1", int(sys.argv[2]), is_master=False)
keys = iter("abc")

def broadcast(value):
    key = next(keys)
    if rank == 0:
        bootstrap.set(key, json.dumps(value))
    return json.loads(bootstrap.get(key))

slow = Fault("create", delay=1.0 * rank)
checkpointer = DirectoryCheckpointer(
    ranks=RankGroup.connect(rank, 2, broadcast), storage=FaultyStorage(LocalStorage(), [slow])
)
checkpointer.save(parts(rank, 1), "run/a")
"""
)


def test_processes_end_when_their_save_is_there(run_script: ScriptRunner, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(EXIT)
    done = run_script(tmp_path / "script.py")
    assert done.stdout == "[0, 0] ['a']\n"
    assert "Error" not in done.stderr, "no rank loses the connection to another that has ended"
