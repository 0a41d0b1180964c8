"""A failed background save is raised on every rank at the same step, as the same class."""

from __future__ import annotations

import functools
import json
import traceback
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from ckpt_core._commit.agreement import Agreement
from ckpt_core._commit.announcement import decode_error, encode_error
from ckpt_core._commit.background_failures import RunOutcome
from ckpt_core._commit.raising_together import raise_together
from ckpt_core.errors import CheckpointError, RankFailedError, SerializationError, StorageError
from tests.conftest import ScriptRunner
from tests.support.interrupting import at_every_moment

WORKER = """
import json, os, sys, time
import torch.distributed as dist, torch
from ckpt_core._commit.background_failures import RunOutcome
from ckpt_core._commit.tcp_store import connect_store
from ckpt_core.errors import CheckpointError, StorageError

rank, world, failing_step = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"]), int(sys.argv[1])
dist.init_process_group("gloo", rank=rank, world_size=world)

def broadcast(value):
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]

class Saves:
    is_busy, failure = False, None

    def take_failure(self):
        self.failure = None

    def drain(self):
        pass

saves = Saves()
outcome = RunOutcome(saves, connect_store(rank, world, broadcast), rank, world)
result = {"raised_at": None, "steps": 0}
try:
    for step in range(1, 11):
        dist.all_reduce(torch.ones(1))  # the gradient exchange of a step
        if step == 2:
            outcome.save_begun()
        failed = rank == 0 and step == failing_step
        if failed:
            saves.failure = StorageError("the disk is full", path="x.ckpt", remedy="free some", errno=28)
        saves.is_busy = rank == 0 and step < min(failing_step, 7)
        result["steps"] = step
        # The others look before there is anything to hear, and again when rank 0, which has the store, may be gone.
        if step == failing_step + bool(rank):
            time.sleep(0.5)
        outcome.at_boundary()
except CheckpointError as error:
    result.update(raised_at=step, type=type(error).__name__, text=str(error), errno=error.errno)
print(json.dumps(result), flush=True)
if result["raised_at"]:
    os._exit(0)
dist.barrier()
dist.destroy_process_group()
"""


def run_ranks(fork_script: ScriptRunner, world: int, failing_step: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in fork_script(WORKER, failing_step, ranks=world).stdout.splitlines()]


@pytest.mark.parametrize("failing_step", [2, 5])
def test_all_ranks_raise_the_same_error_at_the_same_step(fork_script: ScriptRunner, failing_step: int) -> None:
    results = run_ranks(fork_script, 3, failing_step)
    assert [result["raised_at"] for result in results] == [failing_step + 1] * 3
    assert {result["type"] for result in results} == {"StorageError"}
    assert {result["errno"] for result in results} == {28}
    assert {result["text"] for result in results} == {"the disk is full\n  file: x.ckpt\n  what to do: free some"}


def test_nothing_is_raised_when_nothing_fails(fork_script: ScriptRunner) -> None:
    results = run_ranks(fork_script, 2, failing_step=99)
    assert [(result["raised_at"], result["steps"]) for result in results] == [(None, 10)] * 2


class Saves:
    """Stands for the saves of one rank, as far as an outcome asks about them."""

    def __init__(self) -> None:
        self.is_busy = True
        self.failure: CheckpointError | None = None

    def take_failure(self) -> CheckpointError | None:
        failure, self.failure = self.failure, None
        return failure

    def drain(self) -> None:
        self.is_busy = False


def test_a_single_process_raises_at_once_and_only_once() -> None:
    saves = Saves()
    outcome = RunOutcome(saves)
    outcome.save_begun()
    outcome.at_boundary()
    saves.is_busy, saves.failure = False, StorageError("the disk is full")
    failure = saves.failure
    with pytest.raises(StorageError) as caught:
        outcome.at_boundary()
    assert caught.value is failure
    outcome.at_boundary()


def test_each_of_two_saves_under_way_may_fail() -> None:
    """A rank that has raised the first failure still learns of the second."""
    store = HashStore()
    ranks = [Saves(), Saves()]
    outcomes = [RunOutcome(saves, store, rank, 2) for rank, saves in enumerate(ranks)]
    for outcome in outcomes:
        outcome.save_begun()
    for text in ("the first", "the second"):
        ranks[0].failure = StorageError(text)
        for outcome in outcomes:
            outcome.at_boundary()
        for outcome in reversed(outcomes):  # rank 0 waits until the other rank has heard of it
            with pytest.raises(StorageError, match=text):
                outcome.at_boundary()


@pytest.mark.parametrize("failing", [0, 1, None])
def test_what_fails_on_one_rank_is_raised_on_all(failing: int | None) -> None:
    told: list[dict[str, Any] | None] = [None, None]

    def fail(rank: int) -> None:
        if rank == failing:
            raise StorageError(f"rank {rank}: full", errno=28)

    def exchange(mine: Any) -> list[Any]:
        told[rank] = json.loads(json.dumps(mine))
        return told

    for rank in (0, 1, 0, 1):  # the second time, all ranks have told the others
        if failing is None or (failing == 1 and told == [None, None] and rank == 0):
            raise_together(functools.partial(fail, rank), exchange)
            continue
        with pytest.raises(StorageError, match=f"rank {failing}: full"):
            raise_together(functools.partial(fail, rank), exchange)


def test_an_exception_of_any_kind_on_one_rank_is_an_error_of_ours_on_the_others() -> None:
    told: list[Any] = []

    def exchange(mine: Any) -> list[Any]:
        told.append(json.loads(json.dumps(mine)))
        return told

    def fail() -> None:
        raise RuntimeError("the hook broke")

    with pytest.raises(RuntimeError, match="the hook broke"):
        raise_together(fail, exchange)
    with pytest.raises(CheckpointError, match="RuntimeError: the hook broke"):
        raise_together(lambda: None, exchange)


@pytest.mark.parametrize(
    "error",
    [
        StorageError("full", path="a", key="b", remedy="c", errno=28),
        SerializationError("no", key="state.x"),
        RankFailedError("rank 2 died"),
    ],
)
def test_errors_survive_the_wire(error: CheckpointError) -> None:
    decoded = decode_error(json.loads(json.dumps(encode_error(error))))
    assert type(decoded) is type(error)
    assert str(decoded) == str(error)
    assert getattr(decoded, "errno", None) == getattr(error, "errno", None)


def test_an_unknown_error_class_is_still_an_error() -> None:
    encoded = {**encode_error(CheckpointError("x")), "class": "SomethingNewer"}
    assert type(decode_error(encoded)) is RankFailedError


def test_after_ctrl_c_rank_0_waits_for_no_answer_that_it_has_deleted() -> None:
    def interrupt() -> None:
        if "_forget_what_all_have_read" in (frame.f_code.co_name for frame, _ in traceback.walk_stack(None)):
            raise KeyboardInterrupt

    interrupted = 0
    for run in at_every_moment(("_commit/agreement.py",), interrupt, opcodes=False):
        store = HashStore()
        first, second = (Agreement(rank, 2, store, 60) for rank in range(2))
        first.announce("save", 1)
        assert second.announce("save", None) == 1
        try:
            run(lambda: first.announce("save", 2))  # noqa: B023
        except KeyboardInterrupt:
            interrupted += 1
        assert second.announce("save", None) == 2
        first._forget_what_all_have_read()
        assert not first._unread
    assert interrupted > 4
