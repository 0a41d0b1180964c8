"""Positions in the data: each batch is read once, whatever number of workers resumes."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from ckpt_async.local_updates import StreamCursor, WorkerState
from ckpt_core import StateMismatchError

STREAMS, BATCHES = 7, 9


def cursors(workers: int) -> list[StreamCursor]:
    return [StreamCursor(STREAMS, worker=worker, workers=workers, batches=BATCHES) for worker in range(workers)]


@pytest.mark.parametrize("seed", range(20))
def test_each_batch_once_with_changing_numbers_of_workers(seed: int) -> None:
    dice, used = random.Random(seed), Counter[tuple[int, int]]()
    states = None
    while sum(used.values()) < STREAMS * BATCHES:
        everybody = cursors(dice.randint(1, STREAMS))
        for cursor in everybody:
            if states is not None:
                cursor.load_state_dicts(states)
        for cursor in everybody:
            used.update(tuple(update) for update in cursor.take(dice.randint(0, 6)))
        states = [cursor.state_dict() for cursor in everybody]
    assert set(used.values()) == {1}
    assert len(used) == STREAMS * BATCHES


def test_a_batch_that_was_left_counts_not() -> None:
    cursor = StreamCursor(2, batches=3)
    for update in cursor.take():
        if update == (1, 2):
            break
    assert dict(cursor.position) == {0: 2, 1: 1}
    assert cursor.upcoming == (1, 2)


def test_windows_are_as_many_as_the_slowest_worker_needs() -> None:
    everybody = cursors(3)  # 3, 2 and 2 streams
    assert [cursor.windows(10) for cursor in everybody] == [3, 3, 3]
    for cursor in everybody:
        assert len(list(cursor.take(10))) == 10
    states = [cursor.state_dict() for cursor in everybody]
    for cursor in (again := cursors(2)):
        cursor.load_state_dicts(states)
    assert {cursor.windows(10) for cursor in again} == {2}  # of the 33 batches that are left, 15 and 18
    with pytest.raises(ValueError, match="batches="):
        StreamCursor(2).windows(10)


def test_states_of_some_workers_are_refused() -> None:
    states = [cursor.state_dict() for cursor in cursors(3)]
    for wrong in (states[:2], [*states, states[0]]):
        with pytest.raises(StateMismatchError, match="and there are 7"):
            StreamCursor(STREAMS).load_state_dicts(wrong)
    with pytest.raises(StateMismatchError):
        StreamCursor(STREAMS + 1).load_state_dicts(states)
    with pytest.raises(ValueError, match="there must be enough"):
        StreamCursor(2, workers=3)


def worker_state(number: int, workers: int) -> tuple[WorkerState, torch.optim.Optimizer, torch.nn.Module]:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.full((3, 2), number + 1.0)).sum().backward()
    optimizer.step()
    cursor = StreamCursor(STREAMS, worker=number, workers=workers, batches=BATCHES)
    return WorkerState(cursor, adam=optimizer), optimizer, model


def test_as_many_workers_get_back_what_was_theirs_and_others_numbers_of_their_own() -> None:
    states, drawn = [], []
    for number in range(2):
        torch.manual_seed(number)
        own, optimizer, _ = worker_state(number, 2)
        list(own.cursor.take(number + 3))
        states.append(own.state_dict())
        drawn.append((torch.rand(4), optimizer.state_dict()["state"][0]["exp_avg"].clone()))
    for number in range(2):
        torch.manual_seed(99)
        own, optimizer, _ = worker_state(number, 2)
        own.load_state_dicts(states)
        assert torch.equal(torch.rand(4), drawn[number][0])
        assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], drawn[number][1])
        assert own.cursor.state_dict() == states[number]["cursor"]
    numbers = []
    for number in range(3):
        own, optimizer, _ = worker_state(number, 3)
        own.load_state_dicts(states)
        numbers.append(tuple(torch.rand(4).tolist()))
        assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], drawn[number % 2][1])
    assert numbers[:2] == [tuple(values.tolist()) for values, _ in drawn]
    assert len(set(numbers)) == 3


def test_other_objects_are_refused() -> None:
    own, _, _ = worker_state(0, 1)
    with pytest.raises(StateMismatchError, match=r"had the objects \['adam'\], and this one has \[\]"):
        WorkerState(StreamCursor(STREAMS)).load_state_dicts([own.state_dict()])
