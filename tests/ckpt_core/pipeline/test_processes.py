"""Saves in whole processes: kills, exits, signals and memory."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core import Checkpointer, CheckpointNotFoundError, verify
from tests.conftest import ScriptRunner

KILLER = """
import os, random, signal, sys, time, torch
from ckpt_core import Checkpointer, verify

# One process that has imported everything, and a child of it for each kill: torch takes seconds to import.
strategy, path, kills = sys.argv[1], "last.ckpt", int(sys.argv[2])

def save_for_ever(pipe):
    checkpointer = Checkpointer(strategy=strategy)
    for step in range(10_000):
        state = {f"w{i}": torch.full((600_000,), float(step)) for i in range(4)}
        checkpointer.save({**state, "step": step}, path)
        os.write(pipe, b"%d\\n" % step)

chance = random.Random(1)
for kill in range(kills):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        save_for_ever(writing)
    os.close(writing)
    first = os.read(reading, 2)
    while kill == kills - 1 and not os.path.exists(path):
        time.sleep(0.001)  # on a slow disk, none has been there before
    time.sleep(chance.uniform(0.0, 0.08))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with open(reading) as pipe:
        newest = max(map(int, (first.decode() + pipe.read()).split()))
    orphans = len(os.listdir(".")) - os.path.exists(path)
    verified = os.path.exists(path) and verify(path)
    state = Checkpointer().load(path) if verified else {"step": -1}
    whole = all(torch.equal(state[f"w{i}"], torch.full((600_000,), float(state["step"]))) for i in range(4 * verified))
    print(newest, state["step"], int(verified), int(whole), orphans)
"""


@pytest.mark.extended_cells("sync")
@pytest.mark.parametrize("strategy", ["sync", "async"])
def test_killed_at_any_moment_the_name_holds_a_whole_checkpoint(
    strategy: str, fork_script: ScriptRunner, tmp_path: Path
) -> None:
    output = fork_script(KILLER, strategy, 20).stdout
    rows = [tuple(map(int, line.split())) for line in output.splitlines()]
    assert len(rows) == 20
    existed = False
    for newest, found, verified, whole, orphans in rows:
        assert orphans <= 1, "the next process's first save removes what the one before left"
        if not verified:  # killed before the very first save
            assert strategy == "async"
            assert not existed
            continue
        existed = True
        assert whole
        # A checkpoint that a sync save has reported exists; the child may be killed between its commit and its report.
        if strategy == "sync":
            assert found >= newest
    assert existed
    with Checkpointer(strategy="sync") as checkpointer:
        checkpointer.save({"a": 1}, tmp_path / "last.ckpt")
    assert os.listdir(tmp_path) == ["last.ckpt"]


STOPPED_IN_THE_MIDDLE = """
import os, signal, sys, torch
from ckpt_core import Checkpointer
from ckpt_core.storage import local

real_write = os.pwrite

def save_until(last_call):
    calls = iter(range(100))

    def write(descriptor, data, offset):
        if next(calls) == last_call:
            real_write(descriptor, data[: len(data) // 2 // 4096 * 4096], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        return real_write(descriptor, data, offset)

    local.os.pwrite = write
    with Checkpointer(strategy=sys.argv[1]) as checkpointer:
        checkpointer.save({"w": torch.full((5 * 2**20,), 2.0)}, "last.ckpt")

with open("last.ckpt", "rb") as file:
    before = file.read()
for last_call in range(3):
    child = os.fork()
    if child == 0:
        save_until(last_call)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    with open("last.ckpt", "rb") as file:
        print(os.WTERMSIG(status), file.read() == before, len(os.listdir(".")))
"""


@pytest.mark.parametrize("strategy", ["sync", "async"])
def test_killed_in_the_middle_of_a_write_the_old_checkpoint_stays(
    strategy: str, fork_script: ScriptRunner, tmp_path: Path
) -> None:
    path = tmp_path / "last.ckpt"
    with Checkpointer(strategy="sync") as checkpointer:
        checkpointer.save({"old": 1}, path)
    # Two files: the old checkpoint and the orphan of this process; the orphan of the process before is removed.
    assert fork_script(STOPPED_IN_THE_MIDDLE, strategy).stdout == "9 True 2\n" * 3
    assert Checkpointer().load(path) == {"old": 1}
    with Checkpointer(strategy="async") as checkpointer:
        checkpointer.save({"new": 1}, path)
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_a_pending_save_is_finished_at_the_end_of_the_program(run_script: ScriptRunner, tmp_path: Path) -> None:
    done = run_script(
        """
        import sys, threading, time, torch
        from ckpt_core import Checkpointer
        from ckpt_core.storage import LocalStorage

        create = LocalStorage.create

        def late(storage, path, size):
            while not threading._SHUTTING_DOWN:
                time.sleep(0.01)
            time.sleep(0.2)
            return create(storage, path, size)

        LocalStorage.create = late
        checkpointer = Checkpointer(max_pending=2)
        checkpointer.save({"w": torch.ones(10_000_000)}, "a.ckpt")
        checkpointer.save({"w": torch.ones(10)}, "b.ckpt")
        print("the end")
        """
    )
    assert done.stdout == "the end\n"
    assert done.stderr == ""
    assert verify(tmp_path / "a.ckpt")
    assert verify(tmp_path / "b.ckpt")
    assert torch.equal(Checkpointer().load(tmp_path / "a.ckpt")["w"], torch.ones(10_000_000))


def test_a_save_at_exit_is_made(run_script: ScriptRunner, tmp_path: Path) -> None:
    run_script(
        """
        import atexit, torch
        from ckpt_core import Checkpointer

        checkpointer = Checkpointer()
        atexit.register(lambda: checkpointer.save({"w": torch.ones(10)}, "a.ckpt"))
        """
    )
    assert verify(tmp_path / "a.ckpt")


def test_an_error_at_the_end_of_the_program_is_told(run_script: ScriptRunner, tmp_path: Path) -> None:
    (tmp_path / "a.ckpt").mkdir()
    done = run_script(
        """
        import torch
        from ckpt_core import Checkpointer
        Checkpointer().save({"w": torch.ones(10)}, "a.ckpt")
        """
    )
    assert "could not save the checkpoint" in done.stderr
    assert str(tmp_path / "a.ckpt") in done.stderr


def test_an_uncaught_exception_does_not_cost_the_pending_save(run_script: ScriptRunner, tmp_path: Path) -> None:
    done = run_script(
        """
        import torch
        from ckpt_core import Checkpointer
        checkpointer = Checkpointer()
        checkpointer.save({"w": torch.ones(1_000_000)}, "a.ckpt")
        raise RuntimeError("training failed")
        """,
        check=False,
    )
    assert done.returncode == 1
    assert verify(tmp_path / "a.ckpt")


SEVERAL_THREADS = """
import sys, threading, torch
import ckpt_core
from ckpt_core import Kind, Part

is_file = sys.argv[1] == "Checkpointer"

def save(number):
    for step in range(8):
        state = {"w": torch.full((1000,), float(number)), "step": step}
        checkpointer.save(state if is_file else [Part("all", state, Kind.REPLICATED)], f"{number}-{step}")

with getattr(ckpt_core, sys.argv[1])() as checkpointer:
    threads = [threading.Thread(target=save, args=(number,)) for number in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
"""


@pytest.mark.parametrize("kind", ["Checkpointer", "DirectoryCheckpointer"])
def test_several_threads_may_save_with_one_checkpointer(kind: str, fork_script: ScriptRunner, tmp_path: Path) -> None:
    fork_script(SEVERAL_THREADS, kind)
    saved = sorted(path for path in tmp_path.iterdir() if not path.name.startswith("."))
    assert [path.name for path in saved] == [f"{number}-{step}" for number in range(8) for step in range(8)]
    assert all(map(verify, saved))


FORKED_BESIDE_A_SAVE = """
import os, threading, torch
from ckpt_core import Checkpointer
from ckpt_core.storage import LocalStorage

create, go = LocalStorage.create, threading.Event()

def late(storage, path, size):
    go.wait()
    return create(storage, path, size)

LocalStorage.create = late
checkpointer = Checkpointer()
checkpointer.save({"w": torch.ones(100_000)}, "parent.ckpt")
child = os.fork()
if child == 0:
    go.set()
    assert checkpointer.pending == ()
    checkpointer.save({"w": torch.zeros(100_000)}, "child.ckpt")
    checkpointer.close()
    os._exit(0)
print(os.waitpid(child, 0)[1], os.path.exists("child.ckpt"), checkpointer.is_pending("parent.ckpt"))
go.set()
checkpointer.close()
"""


def test_a_forked_process_saves_while_its_parent_does(fork_script: ScriptRunner, tmp_path: Path) -> None:
    assert fork_script(FORKED_BESIDE_A_SAVE).stdout == "0 True True\n"
    loaded = {name: Checkpointer().load(tmp_path / f"{name}.ckpt")["w"] for name in ("parent", "child")}
    assert torch.equal(loaded["parent"], torch.ones(100_000))
    assert torch.equal(loaded["child"], torch.zeros(100_000))


@pytest.fixture
def alarm() -> Iterator[Any]:
    """``alarm(handler)``: the handler runs on the main thread after every two milliseconds of processor time."""
    before = signal.getsignal(signal.SIGVTALRM)

    def install(handler: Any) -> None:
        signal.signal(signal.SIGVTALRM, lambda *_: handler())
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.002, 0.002)

    yield install
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    signal.signal(signal.SIGVTALRM, before)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["sync", "async"])
def test_a_signal_handler_may_save_while_a_save_is_running(strategy: Any, alarm: Any, tmp_path: Path) -> None:
    weights = {f"w{i}": torch.full((1000,), float(i)) for i in range(300)}
    with Checkpointer(strategy=strategy) as checkpointer:
        handled = 0
        busy = False

        def handler() -> None:
            nonlocal handled, busy
            if busy or handled >= 40:
                return
            busy = True
            handled += 1
            checkpointer.save({**weights, "handled": handled}, tmp_path / "signal.ckpt")
            busy = False

        alarm(handler)
        step = 0
        while handled < 40:
            step += 1
            checkpointer.save({**weights, "step": step}, tmp_path / "last.ckpt")
        checkpointer.wait()
        assert checkpointer.load(tmp_path / "last.ckpt")["step"] == step
        assert checkpointer.load(tmp_path / "signal.ckpt")["handled"] == handled
        assert checkpointer.failures == 0
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "signal.ckpt"]


def test_a_handler_that_saves_inside_a_snapshot_does_not_wait_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Checkpointer() as checkpointer:

        class Interrupted:
            def __reduce__(self) -> tuple[Any, ...]:
                checkpointer.save({"inner": 1}, tmp_path / "inner.ckpt")
                return dict, ()

        checkpointer.save({"w": torch.ones(5), "x": Interrupted()}, tmp_path / "outer.ckpt")
        assert verify(tmp_path / "inner.ckpt")
        assert checkpointer.load(tmp_path / "inner.ckpt") == {"inner": 1}
    assert verify(tmp_path / "outer.ckpt")


MEMORY = """
import os, re, resource, sys, torch
from ckpt_core import Checkpointer

def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

strategy = sys.argv[1]
size = 300 * 2**20
checkpointer = Checkpointer(strategy=strategy)
checkpointer.save({"warm up": torch.ones(5)}, "w.ckpt")
checkpointer.close()
state = {f"w{i}": torch.ones(size // 60 // 4) for i in range(60)}
before = resident()
open("/proc/self/clear_refs", "w").write("5")
for step in range(5):
    checkpointer.save(state, "a.ckpt")
    checkpointer.wait()
print((peak() - before) / size)
checkpointer.close()
print((resident() - before) / size)
checkpointer.save({k: state[k] for k in list(state)[:40]}, "a.ckpt")
checkpointer.wait()
open("/proc/self/clear_refs", "w").write("5")
checkpointer.save(state, "a.ckpt")
checkpointer.close()
print((peak() - before) / size)
"""


@pytest.mark.extended
@pytest.mark.parametrize("strategy", ["sync", "async"])
def test_extra_memory_is_bounded_whatever_the_number_of_saves(
    strategy: str, run_script: ScriptRunner, tmp_path: Path
) -> None:
    during, after, grown = map(float, run_script(MEMORY, strategy, env={"OMP_NUM_THREADS": "2"}).stdout.split())
    limit = 1.05 if strategy == "async" else 128 / 300
    assert during <= limit
    assert after <= 0.05
    assert grown <= limit, "the buffer that became too small must be freed before a larger one is made"


def test_a_missing_file_while_nothing_is_pending(tmp_path: Path) -> None:
    with Checkpointer() as checkpointer, pytest.raises(CheckpointNotFoundError):
        checkpointer.load(tmp_path / "a.ckpt")
