"""The reports of many ranks become one outcome, whichever ranks fail, stall or do not take part."""

from __future__ import annotations

import datetime
import linecache
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from torch.distributed import HashStore, TCPStore

from ckpt_core._commit.rank_group import RankGroup
from ckpt_core._commit.save_outcome import JointSave, SaveSeries
from ckpt_core._commit.tcp_store import TimedStore
from ckpt_core.errors import CheckpointError, RankFailedError, SerializationError, StorageError
from tests.support.interrupting import at_every_moment

SECONDS = 200.0  # longer than anything here takes


@pytest.fixture
def server() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def series(server: TCPStore) -> Callable[[int], list[SaveSeries]]:
    """Return a function that makes a series for each rank of a world, each with its own connection."""

    def make(world_size: int) -> list[SaveSeries]:
        def store(rank: int) -> TCPStore:
            if rank == 0:
                return server
            return TCPStore("127.0.0.1", server.port, is_master=False, timeout=datetime.timedelta(seconds=SECONDS))

        return [SaveSeries(RankGroup(rank, world_size, store(rank), "session")) for rank in range(world_size)]

    return make


def together(*actions: Callable[[], Any]) -> list[Any]:
    """Run all actions at the same time; return what each has returned or raised."""
    results: list[Any] = [None] * len(actions)

    def run(index: int) -> None:
        try:
            results[index] = actions[index]()
        except Exception as error:  # noqa: BLE001 - the test judges it
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(actions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()
    return results


def opened(series: SaveSeries, path: str = "/a", *, timeout: float) -> JointSave:
    """Open a save with this timeout, in which a thread of a busy machine still gets to ask the store."""
    joint = JointSave(series, path, timeout=timeout)
    if joint._store is not None:
        joint._store._answer_within = SECONDS
    return joint


def save(
    series: SaveSeries,
    path: str = "/a",
    report: str | CheckpointError = "report",
    *,
    commit: Callable[[Sequence[str]], int] = len,
    timeout: float = SECONDS,
) -> int:
    joint = opened(series, path, timeout=timeout)
    joint.join()
    return joint.conclude(report, commit)


def save_behind(rank_0: SaveSeries, *others: SaveSeries) -> list[Any]:
    """Save on these ranks alone, on rank 0 for 0.1 s once the others have reported; return as :func:`together`."""

    def last() -> int:
        while not rank_0.group.store.check([f"session-0-1/report/{other.group.rank}" for other in others]):
            time.sleep(0.01)
        return save(rank_0, timeout=0.1)

    return together(last, *[lambda other=other: save(other) for other in others])


def failures(results: Sequence[Any]) -> list[tuple[type, str]]:
    for result in results:
        assert isinstance(result, CheckpointError), result
    return [(type(error), error.message) for error in results]


def test_rank_0_commits_all_reports_in_order_and_all_learn_the_size(series: Any) -> None:
    committed: list[list[str]] = []

    def commit(reports: Sequence[str]) -> int:
        committed.append(list(reports))
        return 123

    ranks = series(3)
    for number in range(1, 4):
        texts = [f"{number}: line of {rank}\nanother" for rank in range(3)]
        actions = [
            lambda s=s, t=t, n=number: save(s, f"/{n}", t, commit=commit) for s, t in zip(ranks, texts, strict=True)
        ]
        assert together(*actions) == [123, 123, 123]
        assert committed.pop() == texts
        assert not committed
        assert [s.concluded for s in ranks] == [number] * 3


def test_nothing_is_left_in_the_store(series: Any, server: TCPStore) -> None:
    before = server.num_keys()
    ranks = series(3)
    for _ in range(5):
        together(*[lambda s=s: save(s) for s in ranks])
    assert server.num_keys() == before


def test_ranks_agree_on_a_token_that_no_other_save_has(series: Any) -> None:
    tokens: list[set[str]] = []
    first, second = series(2)
    other = [SaveSeries(first.group), SaveSeries(second.group)]
    for ranks in ([first, second], other, [first, second]):
        joints = [JointSave(s, "/a", timeout=SECONDS) for s in ranks]
        for joint in joints:
            joint.join()
        tokens.append({joint.token for joint in joints})
        together(*[lambda joint=joint: joint.conclude("", len) for joint in joints])
    assert all(len(found) == 1 for found in tokens)
    assert len(set.union(*tokens)) == 3


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_the_failure_of_one_rank_is_raised_on_all_as_the_same_class(series: Any, failing: int) -> None:
    full = StorageError("cannot write", path="/a/x", remedy="free some", errno=28)
    ranks = series(3)

    def commit(reports: Sequence[str]) -> int:
        raise AssertionError("there is nothing to commit")

    results = together(
        *[lambda s=s, r=r: save(s, report=full if r == failing else "", commit=commit) for r, s in enumerate(ranks)]
    )
    assert failures(results) == [(StorageError, f"rank {failing}: cannot write")] * 3
    assert [(e.errno, e.path, e.remedy) for e in results] == [(28, "/a/x", "free some")] * 3
    assert together(*[lambda s=s: save(s) for s in ranks]) == [3, 3, 3]


def test_of_several_failures_all_ranks_raise_the_same(series: Any) -> None:
    reports = ["", SerializationError("no plain data", key="model.x"), StorageError("full")]
    results = together(*[lambda s=s, r=r: save(s, report=r) for s, r in zip(series(3), reports, strict=True)])
    assert failures(results) == [(SerializationError, "rank 1: no plain data")] * 3


@pytest.mark.parametrize(
    ("error", "expected"),
    [(StorageError("no"), (StorageError, "no")), (ZeroDivisionError("a bug"), (CheckpointError, "a bug"))],
)
def test_a_commit_that_fails(series: Any, error: Exception, expected: tuple[type, str]) -> None:
    def commit(_: Sequence[str]) -> int:
        raise error

    results = together(*[lambda s=s: save(s, commit=commit) for s in series(2)])
    assert results[0] is error
    assert type(results[1]) is expected[0]
    assert expected[1] in results[1].message


def test_a_missing_rank_is_named(series: Any) -> None:
    ranks = series(4)
    joint = JointSave(ranks[2], "/a", timeout=SECONDS)
    joint.join()  # this rank then dies
    results = save_behind(ranks[0], ranks[1], ranks[3])
    assert {kind for kind, _ in failures(results)} == {RankFailedError}
    assert all(
        e.message.startswith("rank 2 began the save of /a and did not finish within 0.1 s of rank 0") for e in results
    )
    assert all("commit_timeout" in str(e) for e in results)


def test_a_rank_that_is_known_to_be_dead_is_not_waited_for(series: Any) -> None:
    ranks = series(3)
    JointSave(ranks[2], "/a", timeout=SECONDS).join()  # this rank then dies
    results = together(
        *[lambda s=s: save(s) for s in ranks[:2]],
        lambda: setattr(ranks[0], "find_dead", lambda: [2]),
    )
    assert {error.message for error in results[:2]} == {"rank 2 died before the save of /a was complete"}


def test_a_rank_that_died_before_a_save_fails_it_unless_it_does_not_take_part(series: Any) -> None:
    ranks = series(2)
    ranks[0].find_dead = lambda: [1]
    with pytest.raises(
        RankFailedError, match="rank 1 did not begin the save of /a, and cannot any more: the process has ended"
    ):
        save(ranks[0])
    joint = JointSave(ranks[0], "/b", timeout=SECONDS, absent=lambda: [1])
    joint.join()
    assert joint.conclude("report", len) == 2


def test_what_a_rank_has_reported_before_it_died_counts(series: Any) -> None:
    ranks = series(2)
    ranks[0].find_dead = lambda: [1]
    other = threading.Thread(target=save, args=(ranks[1],))
    other.start()
    while not ranks[0].group.store.check(["session-0-1/report/1"]):
        time.sleep(0.01)
    assert save(ranks[0]) == 2
    other.join(SECONDS)


def test_ranks_that_do_not_call_save_are_named(series: Any) -> None:
    ranks = series(3)
    results = save_behind(*ranks[:2])
    assert all(e.message.startswith("rank 2 did not begin the save of /a within 0.1 s of rank 0") for e in results)
    assert all("call save on all ranks" in str(e) for e in results)


def test_a_save_on_rank_0_only_fails_and_spoils_no_other(series: Any) -> None:
    ranks = series(3)
    for number in range(3):
        with pytest.raises(RankFailedError, match=r"ranks 1, 2 did not begin[^\n]*\n[^\n]*call save on all ranks"):
            save(ranks[0], f"/alone/{number}", timeout=0.1)
        assert together(*[lambda s=s, n=number: save(s, f"/{n}") for s in ranks]) == [3, 3, 3]


def test_a_save_on_another_rank_only_fails(series: Any) -> None:
    ranks = series(2)
    with pytest.raises(RankFailedError, match=r"rank 0 did not begin[^\n]*\n[^\n]*call save on all ranks"):
        save(ranks[1], "/a", timeout=0.1)
    with pytest.raises(RankFailedError, match="rank 0 saves to /b, but rank 1 to /a"):
        save(ranks[0], "/b", timeout=0.1)  # it waits this long for the other rank to read the outcome
    with pytest.raises(RankFailedError, match="rank 0 saves to /b, but rank 1 to /a"):
        save(ranks[1], "/b")
    assert together(*[lambda s=s: save(s, "/c") for s in ranks]) == [2, 2]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("who_missed", [0, 1])
@pytest.mark.parametrize("missed", [[1], [0, 1], [1, 4]])
@pytest.mark.parametrize("same_path", [False, True])
def test_ranks_find_each_other_again_when_one_has_missed_saves(
    series: Any, who_missed: int, missed: list[int], same_path: bool
) -> None:
    def saves(rank: int) -> list[tuple[int, Any]]:
        results = []
        for step in range(12):
            if rank == who_missed and step in missed:
                continue
            try:
                joint = JointSave(ranks[rank], "/a" if same_path else f"/{step}", timeout=SECONDS, of=step)
                joint.join()
                results.append((step, joint.conclude(str(step), lambda texts: len(set(texts)))))
            except RankFailedError as error:
                results.append((step, error))
        return results

    ranks = series(2)
    of_0, of_1 = together(lambda: saves(0), lambda: saves(1))
    assert of_0[-4:] == of_1[-4:] == [(step, 1) for step in range(8, 12)]  # both ranks have saved the same


def test_a_rank_that_was_left_out_catches_up(series: Any) -> None:
    ranks = series(3)
    save_behind(*ranks[:2])
    assert together(*[lambda s=s: save(s, "/b") for s in ranks]) == [3, 3, 3]
    assert [s.concluded for s in ranks] == [2, 2, 2]


def test_a_rank_that_comes_too_late_learns_that_its_save_has_failed(series: Any) -> None:
    ranks = series(3)
    save_behind(*ranks[:2])
    with pytest.raises(RankFailedError, match="rank 2 did not begin"):
        save(ranks[2], "/a")
    assert together(*[lambda s=s: save(s, "/a") for s in ranks]) == [3, 3, 3]


def test_different_paths_are_an_error_that_names_both(series: Any) -> None:
    ranks = series(2)
    results = together(lambda: save(ranks[0], "/run/0"), lambda: save(ranks[1], "/run/1"))
    assert all(kind is RankFailedError for kind, _ in failures(results))
    assert all("/run/0" in e.message and "/run/1" in e.message and "rank 1" in e.message for e in results)
    assert together(*[lambda s=s: save(s) for s in ranks]) == [2, 2]


def test_a_rank_0_that_is_slow_to_commit_is_waited_for(series: Any) -> None:
    """Each step of a save has the whole timeout, however long the ones before have taken."""
    ranks, may_take = series(2), []
    joint = JointSave(ranks[1], "/a", timeout=SECONDS)
    assert joint._store is not None
    wait = joint._store.wait

    def note(keys: Sequence[str], seconds: float) -> bool:
        may_take.append(seconds)
        return wait(keys, seconds)

    joint._store.wait = note  # type: ignore[method-assign]
    joint.join()
    assert together(lambda: save(ranks[0], commit=lambda _: 7), lambda: joint.conclude("", len)) == [7, 7]
    assert len(may_take) == 3
    assert min(may_take) >= SECONDS


def test_rank_0_stays_until_all_have_read_the_outcome(series: Any) -> None:
    """Rank 0 may be about to exit, and the outcome would be gone with it."""
    ranks = series(2)
    order: list[str] = []

    def slow_reader() -> int:
        joint = JointSave(ranks[1], "/a", timeout=SECONDS)
        joint.join()
        line = joint._store
        assert line is not None
        get = line.get

        def get_slowly(key: str) -> str:
            time.sleep(0.5)
            value = get(key)
            order.append("read")
            return value

        line.get = get_slowly  # type: ignore[method-assign]
        return joint.conclude("", len)

    assert together(lambda: (save(ranks[0]), order.append("rank 0 is free")), slow_reader) == [(2, None), 2]
    assert order == ["read", "rank 0 is free"]


@pytest.mark.parametrize("step", ["join", "write", "collect", "commit"])
def test_a_rank_0_that_stops_is_named(series: Any, step: str) -> None:
    ranks = series(2)
    line = JointSave(ranks[0], "/a", timeout=SECONDS)._store
    assert line is not None
    for name in {"join": [], "write": ["begun/0"], "collect": ["begun/0", "collecting"]}.get(
        step, ["begun/0", "collecting", "collected"]
    ):
        line.set(f"{ranks[0].name}-1/{name}", "")
    joint = opened(ranks[1], timeout=0.1)
    joint.join()
    with pytest.raises(RankFailedError, match=r"rank 0 did not begin" if step == "join" else r"rank 0 began the save"):
        joint.conclude("", len)
    assert joint.undecided


def test_a_rank_0_that_is_gone_is_named(series: Any) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, is_master=False)
    ranks = SaveSeries(RankGroup(1, 2, client, "session"))
    joint = JointSave(ranks, "/a", timeout=SECONDS)
    joint.join()
    del server
    with pytest.raises(RankFailedError, match="rank 0, which keeps the record of a save, is gone") as info:
        joint.conclude("", len)
    assert joint.undecided
    assert "log of rank 0" in str(info.value)
    with pytest.raises(RankFailedError, match="is gone"):
        save(ranks)


def test_an_interrupted_wait_for_the_outcome_leaves_it_open(series: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> bool:
        raise KeyboardInterrupt

    ranks = series(2)
    interrupted = JointSave(ranks[1], "/a", timeout=SECONDS)
    interrupted.join()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(TimedStore, "wait", interrupt)
        interrupted.conclude("written", lambda _: 0)
    assert interrupted.undecided
    assert save(ranks[0]) == 2
    assert not ranks[0].group.store.check(["session-0-1/outcome"])  # rank 0 does not wait until another rank reads it


def test_a_rank_that_has_missed_saves_waits_for_rank_0_once(series: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rank, waited, wait = series(2)[1], [], TimedStore.wait

    def count(store: TimedStore, keys: list[str], timeout: float) -> bool:
        waited.append(timeout)
        return wait(store, keys, timeout)

    rank.unmatched = [["/before", None]]
    monkeypatch.setattr(TimedStore, "wait", count)
    with pytest.raises(RankFailedError, match="rank 0 did not begin the save"):
        save(rank, timeout=0.1)
    assert sum(waited) == 0  # beyond the time in which it asked what rank 0 saves


def test_a_single_process_needs_no_store() -> None:
    alone = SaveSeries(RankGroup.alone())
    assert save(alone) == 1
    error = StorageError("full")
    with pytest.raises(StorageError) as info:
        save(alone, report=error)
    assert info.value is error  # no rank is named where there is only one
    assert alone.concluded == 2


def test_a_closed_group_refuses() -> None:
    group = RankGroup(0, 2, HashStore(), "session")
    ranks = SaveSeries(group)
    group.close()
    with pytest.raises(ValueError, match="closed"):
        JointSave(ranks, "/a", timeout=1.0)
    with pytest.raises(ValueError, match="needs a store"):
        RankGroup(0, 2, None, "session")


@pytest.mark.extended
def test_a_thousand_ranks_report_in_seconds() -> None:
    store = HashStore()
    world = 1024
    text = "x" * 50_000
    ranks = [SaveSeries(RankGroup(rank, world, store, "session")) for rank in range(world)]
    for rank in range(1, world):
        joint = JointSave(ranks[rank], "/a", timeout=SECONDS)
        joint.join()
        assert joint._store is not None
        joint._store.set(joint._key(f"report/{rank}"), f'[["/a", null], null]\n{text}')
    began = time.process_time()
    sizes: list[int] = []
    joint = opened(ranks[0], timeout=0.1)  # no rank reads the outcome
    joint.join()
    assert joint.conclude(text, lambda reports: sizes.append(sum(map(len, reports))) or len(reports)) == world
    assert sizes == [world * 50_000]
    assert time.process_time() - began < 20


@pytest.mark.sampled(1)
@pytest.mark.parametrize("who", [0, 1])
def test_ctrl_c_at_any_line_of_a_save_is_told_to_the_other_rank(series: Any, who: int) -> None:
    def interrupt() -> None:
        frame = sys._getframe()
        while not frame.f_code.co_filename.endswith("_commit/save_outcome.py"):
            assert frame.f_back is not None
            frame = frame.f_back
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        is_reported = frame.f_code.co_name != "_join" and not line.startswith(
            ("own_error", "head", "self.undecided = T")
        )
        if not is_reported and line != "try:":
            raise KeyboardInterrupt

    ranks, interrupted = series(2), 0
    for number, run in enumerate(at_every_moment(("_commit/save_outcome.py",), interrupt, opcodes=False)):
        other: list[Any] = []
        thread = threading.Thread(target=lambda: other.extend(together(lambda: save(ranks[1 - who], f"/{number}"))))  # noqa: B023
        thread.start()
        try:
            run(lambda: save(ranks[who], f"/{number}"))  # noqa: B023
        except KeyboardInterrupt:
            interrupted += 1
        thread.join(SECONDS / 2)
        assert not thread.is_alive(), f"the other rank waits for one that has given up save {number}"
    assert interrupted > 4
