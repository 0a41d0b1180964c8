"""The gate of Hogwild: all workers are between two steps while the model is saved, and none waits for the dead."""

from __future__ import annotations

import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ckpt_async.local_updates import StepGate, step_gate
from ckpt_core.errors import CheckpointError
from tests.conftest import ScriptRunner

# Two shared tensors that are equal between steps: a snapshot in the middle of a step would see them unequal.
PREAMBLE = """
import contextlib, json, os, signal, sys, time, torch
import torch.multiprocessing as mp
from ckpt_async.local_updates import *

fork = mp.get_context("fork")
gate = StepGate(3)
first, last = (torch.zeros(3).share_memory_() for _ in range(2))
is_enough = torch.zeros(1).share_memory_()

def work(number):
    torch.set_num_threads(1)
    done = 0
    with gate.worker(number, lambda: {"done": done, "noise": torch.full((1000,), float(done))}) as worker:
        while not is_enough:
            with worker.step():
                first[number] += 1
                time.sleep(0.002)
                last[number] += 1
            done += 1

def start():
    workers = [fork.Process(target=work, args=(number,)) for number in range(3)]
    for process in workers:
        process.start()
    return workers

def until(condition):
    while not condition():
        time.sleep(0.005)

def raised(action):
    try:
        action()
    except Exception as error:
        return [type(error).__name__, str(error)]

def close(timeout=60.0):
    with gate.closed(timeout):
        pass
"""


def told(fork_script: ScriptRunner, script: str, *arguments: object) -> Any:
    return json.loads(fork_script(PREAMBLE + script, *arguments).stdout)


EXACT = """
workers, seen = start(), []
for count in range(1, 21):
    until(lambda: min(first.tolist()) > count)
    with gate.closed() as states:
        before = first.tolist(), last.tolist()
        time.sleep(0.01)
        seen.append([*before, first.tolist(), [state["done"] for state in states]])
        assert all(bool((state["noise"] == state["done"]).all()) for state in states)
is_enough += 1
for process in workers:
    process.join()
with gate.closed() as states:
    seen.append([first.tolist(), last.tolist(), last.tolist(), [state["done"] for state in states]])
left = os.listdir(gate._directory)
gate.close()
print(json.dumps([seen, left, os.path.exists(gate._directory)]))
"""


def test_every_snapshot_is_between_two_steps_of_all(fork_script: ScriptRunner) -> None:
    seen, left, is_there = told(fork_script, EXACT)
    assert len(seen) == 21
    for first, last, later, done in seen:
        assert first == last == later == [float(count) for count in done]
    assert sorted(left) == ["0.end", "1.end", "2.end", "gate"]
    assert not is_there


KILLED = """
workers = start()
until(lambda: min(first.tolist()) > 5)
if sys.argv[1] == "step":
    until(lambda: first[1] != last[1])
    os.kill(workers[1].pid, signal.SIGSTOP)
    while first[1] == last[1]:
        os.kill(workers[1].pid, signal.SIGCONT)
        time.sleep(0.003)
        os.kill(workers[1].pid, signal.SIGSTOP)
        time.sleep(0.01)
else:
    with contextlib.suppress(GateTimeoutError), gate.closed():
        os.kill(workers[1].pid, signal.SIGKILL)
        workers[1].join()
os.kill(workers[1].pid, signal.SIGKILL) if workers[1].is_alive() else None
workers[1].join()
began = time.monotonic()
error = raised(close)
before = first.tolist()
until(lambda: first[0] > before[0] + 5 and first[2] > before[2] + 5)
again = raised(close)
for process in workers:
    process.kill()
print(json.dumps([error, again]))
gate.close()
"""


@pytest.mark.parametrize("where", ["step", "wait"])
def test_a_killed_worker_is_named_and_nobody_waits_for_it(fork_script: ScriptRunner, where: str) -> None:
    for name, message in told(fork_script, KILLED, where):
        assert name == "WorkerLostError"
        assert "worker 1 ended" in message
        assert "start all workers again from the newest checkpoint" in message
        assert ("the shared model may hold a part of that step" in message) == (where == "step")
        assert ("in the middle of its step" if where == "step" else "between two steps") in message


FROZEN = """
workers = start()
until(lambda: min(first.tolist()) > 5)
os.kill(workers[2].pid, signal.SIGSTOP)
error = raised(lambda: close(1.0))
while "worker 2" not in error[1]:  # on a busy machine, another may not have come in time
    error = raised(lambda: close(1.0))
before = first.tolist()
until(lambda: first[0] > before[0] + 5 and first[1] > before[1] + 5)
os.kill(workers[2].pid, signal.SIGCONT)
with gate.closed() as states:
    exact = first.tolist() == last.tolist() == [state["done"] for state in states]
for process in workers:
    process.kill()
print(json.dumps([error, exact]))
gate.close()
"""


def test_a_frozen_worker_is_named_and_the_next_snapshot_is_taken(fork_script: ScriptRunner) -> None:
    (name, message), exact = told(fork_script, FROZEN)
    assert name == "GateTimeoutError"
    assert "worker 2 has not come to the gate" in message and "timeout=" in message
    assert exact


SAVER = """
def save_and_die():
    with gate.closed():
        os.kill(os.getpid(), signal.SIGKILL)

workers = start()
until(lambda: min(first.tolist()) > 5)
saver = fork.Process(target=save_and_die)
saver.start()
saver.join()
before = first.tolist()
until(lambda: all(now > was + 5 for now, was in zip(first.tolist(), before)))
with gate.closed() as states:
    exact = first.tolist() == last.tolist() == [state["done"] for state in states]
for process in workers:
    process.kill()
print(json.dumps([saver.exitcode, exact]))
gate.close()
"""


def test_the_gate_opens_when_who_was_saving_is_killed(fork_script: ScriptRunner) -> None:
    assert told(fork_script, SAVER) == [-9, True]


MISUSED = """
def fails():
    with gate.worker(0, dict) as worker:
        with contextlib.suppress(ZeroDivisionError), worker.step():
            1 / 0
        try:
            with worker.step():
                pass
        except Exception as error:
            again.put([type(error).__name__, str(error)])

again = fork.SimpleQueue()
process = fork.Process(target=fails)
process.start()
found = [again.get()]
process.join()
for number in (1, 2):
    with gate.worker(number, dict):
        pass
found.append(raised(close))
found.append(raised(lambda: gate.worker(1, dict).__enter__()))
found.append(raised(lambda: gate.worker(3, dict)))
print(json.dumps(found))
gate.close()
"""


def test_a_step_that_raised_and_a_second_worker_are_refused(fork_script: ScriptRunner) -> None:
    step, snapshot, second, unknown = told(fork_script, MISUSED)
    assert step[0] == "CheckpointError" and "has not finished its step 1" in step[1]
    assert snapshot[0] == "WorkerLostError" and "the shared model may hold a part" in snapshot[1]
    assert second[0] == "CheckpointError" and "another worker 1" in second[1] and "make a new gate" in second[1]
    assert unknown[0] == "ValueError"


def test_workers_and_savers_on_threads_of_one_process_see_each_other() -> None:
    first, last, done = [0, 0], [0, 0], [0, 0]
    is_enough = threading.Event()

    def work(number: int) -> None:
        with gate.worker(number, lambda: {"done": done[number]}) as worker:
            while not is_enough.is_set():
                with worker.step():
                    first[number] += 1
                    time.sleep(0.001)
                    last[number] += 1
                done[number] += 1

    def save() -> list[bool]:
        seen = []
        for _ in range(10):
            with gate.closed() as states:
                before = list(first)
                time.sleep(0.005)
                seen.append(before == first == last == [state["done"] for state in states])
        return seen

    with StepGate(2) as gate, ThreadPoolExecutor(4) as pool:
        working = [pool.submit(work, number) for number in range(2)]
        savers = [pool.submit(save) for _ in range(2)]
        try:
            assert [saver.result() for saver in savers] == [[True] * 10] * 2
        finally:
            is_enough.set()
        assert [worker.result() for worker in working] == [None, None]


def test_a_worker_cannot_close_the_gate_on_itself() -> None:
    with StepGate(1) as gate:
        refused = pytest.raises(CheckpointError, match="this thread cannot close the gate")
        with gate.worker(0, dict), refused, gate.closed():
            pass
        with gate.closed() as states:
            assert states == [{}]


def test_who_saves_next_finds_its_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a snapshot leaves is deleted before the next one can begin, so that the next one's answers stay."""
    left = []
    unlock = step_gate._Shared.unlock

    def look_and_unlock(shared: step_gate._Shared, byte: int) -> None:
        if byte == step_gate._SAVER:
            left.append(sorted(os.listdir(gate._directory)))
        unlock(shared, byte)

    monkeypatch.setattr(step_gate._Shared, "unlock", look_and_unlock)

    def work() -> None:
        with gate.worker(0, dict) as worker:
            while not left:
                with worker.step():
                    pass

    with StepGate(1) as gate, ThreadPoolExecutor(1) as pool:
        working = pool.submit(work)
        with gate.closed() as states:
            assert states == [{}]
        working.result()
    assert left == [["gate"]]


def test_two_threads_that_use_a_gate_first_have_one_file(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    second = threading.Event()

    class Slow(step_gate._Shared):
        def __init__(self, path: Any) -> None:
            made.append(path)
            second.wait(0.5 if len(made) == 1 else 0)  # if nothing keeps the other thread out, it gets here
            second.set()
            super().__init__(path)

    monkeypatch.setattr(step_gate, "_Shared", Slow)
    with StepGate(2) as gate, ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lambda _: gate._open(), range(2))
        assert one is other and len(made) == 1
