"""A failed background save is raised on every rank at the same step, as the same class."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ckpt_core._commit import SharedOutcome, decode_error, encode_error
from ckpt_core.errors import CheckpointError, RankFailedError, SerializationError, StorageError
from tests.conftest import ScriptRunner

WORKER = """
import json, os, sys, time
import torch.distributed as dist, torch
from ckpt_core._commit import SharedOutcome, connect_store
from ckpt_core.errors import CheckpointError, StorageError

rank, world, failing_step = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"]), int(sys.argv[1])
dist.init_process_group("gloo", rank=rank, world_size=world)

def broadcast(value):
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]

outcome = SharedOutcome(connect_store(rank, world, broadcast), world)
result = {"raised_at": None, "steps": 0}
try:
    for step in range(1, 11):
        dist.all_reduce(torch.ones(1))  # the gradient exchange of a step
        if step == 2:
            outcome.save_begun()
        failed = rank == 0 and step == failing_step
        failure = StorageError("the disk is full", path="x.ckpt", remedy="free some", errno=28) if failed else None
        pending = rank == 0 and step < min(failing_step, 7)
        result["steps"] = step
        # The others look before there is anything to hear, and again when rank 0, which has the store, may be gone.
        if step == failing_step + bool(rank):
            time.sleep(0.5)
        outcome.at_boundary(writes=rank == 0, pending=pending, failure=failure)
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


def test_a_single_process_raises_at_once() -> None:
    outcome = SharedOutcome(None)
    outcome.save_begun()
    outcome.at_boundary(writes=True, pending=True, failure=None)
    failure = StorageError("the disk is full")
    with pytest.raises(StorageError) as caught:
        outcome.at_boundary(writes=True, pending=False, failure=failure)
    assert caught.value is failure


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
