"""Ranks, here threads, that are asked to act at different moments, and act at one boundary."""

from __future__ import annotations

import datetime
import errno
import itertools
import threading
from collections.abc import Callable

import pytest
from torch.distributed import TCPStore

from ckpt_core._commit.acting_together import Meeting, Position

LIMIT_SECONDS = 200.0


def stores(count: int) -> list[TCPStore]:
    timeout = datetime.timedelta(seconds=LIMIT_SECONDS)
    first = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
    return [first, *(TCPStore("127.0.0.1", first.port, is_master=False, timeout=timeout) for _ in range(count - 1))]


class Ranks:
    """Threads that step together, as a gradient exchange makes ranks do, each with its own meeting.

    They train for ``steps`` steps, or until they have acted ``until`` times.
    """

    def __init__(
        self,
        count: int,
        steps: int,
        during: Callable[[int, int, Meeting], None],
        look_every: float = 0.01,
        acted: Callable[[int, int], None] = lambda rank, step: None,
        until: int | None = None,
    ) -> None:
        self.acted: list[list[tuple[Position, list[str], bool]]] = [[] for _ in range(count)]
        opened = stores(count)
        self.meetings = [
            Meeting(store, rank, count, look_every=look_every, answer_within=LIMIT_SECONDS)
            for rank, store in enumerate(opened)
        ]
        exchange = threading.Barrier(count, timeout=LIMIT_SECONDS)
        self.errors: list[BaseException] = []

        def train(rank: int) -> None:
            try:
                for step in range(1, steps + 1):
                    if len(self.acted[rank]) == until:
                        return
                    during(rank, step, self.meetings[rank])
                    exchange.wait()
                    call = self.meetings[rank].at((step, 0))
                    if call.requests:
                        self.acted[rank].append(((step, 0), sorted(call.requests), call.together))
                        acted(rank, step)
                        exchange.wait()  # what the ranks do here needs all of them
                call = self.meetings[rank].at_last((steps + 1, 0))
                if call.requests:
                    self.acted[rank].append(((steps + 1, 0), sorted(call.requests), call.together))
            except BaseException as error:  # noqa: BLE001 - for the test
                self.errors.append(error)

        threads = [threading.Thread(target=train, args=(rank,)) for rank in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for meeting in self.meetings:
            meeting.close()


@pytest.mark.parametrize("asked", [{0: 3}, {2: 3}, {0: 3, 1: 4, 2: 5}, {0: 3, 1: 3, 2: 3}], ids=str)
def test_all_act_once_at_the_same_boundary(asked: dict[int, int]) -> None:
    pause = threading.Event()

    def during(rank: int, step: int, meeting: Meeting) -> None:
        if asked.get(rank) == step:
            meeting.ask("save")
        pause.wait(0.005)  # a step takes some time

    ranks = Ranks(3, 60, during)
    assert ranks.errors == []
    assert ranks.acted[0] == ranks.acted[1] == ranks.acted[2]
    [(position, requests, together)] = ranks.acted[0]
    assert position >= (3, 0) and requests == ["save"] and together


@pytest.mark.parametrize("asked", [(0,), (1,), (0, 1)])
def test_what_is_asked_in_the_last_step_is_done_at_the_end(asked: tuple[int, ...]) -> None:
    def during(rank: int, step: int, meeting: Meeting) -> None:
        if rank in asked and step == 3:
            meeting.ask("save")

    ranks = Ranks(2, 3, during, look_every=2.0)  # no rank looks by itself before the end
    assert ranks.errors == []
    assert ranks.acted[0] == ranks.acted[1]
    assert [(requests, together) for _, requests, together in ranks.acted[0]] == [(["save"], True)]


def test_nothing_is_done_at_the_end_when_nothing_was_asked() -> None:
    ranks = Ranks(2, 3, lambda rank, step, meeting: None, look_every=2.0)
    assert (ranks.errors, ranks.acted) == ([], [[], []])


def test_what_a_rank_is_asked_again_is_done_again() -> None:
    pause = threading.Event()
    asked = [3]

    def during(rank: int, step: int, meeting: Meeting) -> None:
        if rank == 1 and step in asked:
            meeting.ask("save")
        pause.wait(0.005)

    def acted(rank: int, step: int) -> None:
        if rank == 1:
            asked.append(step + 3)

    ranks = Ranks(2, 10**6, during, acted=acted, until=2)
    assert ranks.errors == []
    assert [requests for _, requests, _ in ranks.acted[0]] == [["save"], ["save"]]
    assert ranks.acted[0] == ranks.acted[1]


def test_a_rank_whose_others_are_gone_acts_alone() -> None:
    first, second = stores(2)
    meeting = Meeting(second, 1, 2, look_every=0.01, answer_within=0.2)
    meeting.ask("end")
    calls = []
    for step in itertools.count(1):
        calls.append(meeting.at((step, 0)))
        if calls[-1].requests:
            break
        threading.Event().wait(0.005)
    meeting.close()
    assert calls[-1] == (frozenset({"end"}), False)
    del first


@pytest.mark.parametrize("fails", [False, True], ids=["dead", "a look-up that fails"])
def test_nobody_waits_for_the_answer_of_a_dead_rank(fails: bool, caplog: pytest.LogCaptureFixture) -> None:
    is_dead = threading.Event()

    def is_rank_gone() -> bool:
        if fails:
            raise OSError(errno.ESTALE, "Stale file handle")
        return is_dead.is_set()

    first, _ = stores(2)
    meeting = Meeting(first, 0, 2, look_every=0.01, answer_within=1e6, is_rank_gone=is_rank_gone)
    meeting.ask("end")
    calls = []

    def train() -> None:
        while not calls or not calls[-1].requests:
            calls.append(meeting.at((len(calls), 0)))

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    is_dead.set()
    thread.join(LIMIT_SECONDS)
    assert not thread.is_alive()
    assert calls[-1] == (frozenset({"end"}), False)
    assert ("Stale file handle" in caplog.text) == fails
    meeting.close()


def test_a_single_process_acts_at_its_next_boundary() -> None:
    meeting = Meeting(None)
    assert not meeting.at((1, 0)).requests
    meeting.ask("save")
    meeting.ask("save")
    assert meeting.at((2, 0)) == (frozenset({"save"}), True)
    assert not meeting.at((3, 0)).requests
    meeting.close()
