"""Requests to end a run: how options are written, deadlines, notices, own handlers; a loop whose ranks end together."""

from __future__ import annotations

import datetime
import os
import pickle
import queue
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckpt_core.preemption import End, EndWatch, Notices, Preemption, SignalNotes

SECONDS = 200.0


@pytest.mark.parametrize(
    ("value", "signals"),
    [
        (True, ("SIGTERM",)),
        ("sigterm, SIGUSR1", ("SIGTERM", "SIGUSR1")),
        (["SIGUSR1", "SIGUSR1"], ("SIGUSR1",)),
        ({"signals": [], "deadline": 5}, ()),
        (Preemption(signals="SIGHUP"), ("SIGHUP",)),
    ],
)
def test_an_option_is_written_in_several_ways(value: Any, signals: tuple[str, ...]) -> None:
    found = Preemption.of(value)
    assert found is not None
    assert found.signals == signals
    assert Preemption.of(False) is Preemption.of(None) is None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("SIGTREM", "signals must be names of signals such as 'SIGTERM': 'SIGTREM' is not a signal"),
        ("SIGKILL", "'SIGKILL' is not a signal that a program can handle"),
        ({"after": 3}, "it has signals, deadline, notice and look_every"),
        ({"deadline": "soon"}, "deadline must be seconds or a time"),
        ({"deadline": -1}, "deadline must be seconds above 0"),
        ({"deadline": datetime.datetime.min}, "deadline must be a time that the system's clock can represent"),
        ({"signals": signal.SIGTERM}, "signals must be names of signals such as 'SIGTERM', not <Signals"),
        (["SIGTERM", 10], "signals must be names of signals such as 'SIGTERM', not"),
        ({"signals": None}, "signals must be names of signals such as 'SIGTERM', not None"),
        ({"notice": 5}, "notice must be the path of a file, or a function, not 5"),
        ({"look_every": "1"}, "look_every must be a number of seconds above 0, not '1'"),
        ({"look_every": 0}, "look_every must be a number of seconds above 0, not 0"),
        (3, "must be true, false, names of signals"),
    ],
)
def test_what_makes_no_sense_is_refused(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Preemption.of(value)
    with pytest.raises(ValueError, match=f"preempt .*{message}"):
        EndWatch(value)


def test_deadlines_are_seconds_or_times() -> None:
    at = datetime.datetime(2030, 1, 1, tzinfo=datetime.timezone.utc)
    assert Preemption(deadline=at).ends_at == Preemption(deadline="2030-01-01T00:00+00:00").ends_at == at.timestamp()
    before = time.time()
    ends_at = Preemption(deadline="60").ends_at
    assert ends_at is not None
    assert before + 60 <= ends_at <= time.time() + 60


def test_a_notice_comes_once(tmp_path: Path) -> None:
    came: list[str] = []
    arrived = threading.Event()

    def ask(what: str) -> None:
        came.append(what)
        arrived.set()

    notices = Notices(Preemption(notice=tmp_path / "notice", look_every=0.01), ask)
    assert not arrived.wait(0.1)
    (tmp_path / "notice").touch()
    assert arrived.wait(SECONDS)
    notices.close()
    assert came == ["a notice"]


def test_seconds_are_counted_though_the_clock_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    came: queue.Queue[str] = queue.Queue()
    preemption = Preemption(deadline=1, look_every=0.01)
    watches = [Notices(preemption, came.put)]
    set_back = SimpleNamespace(time=lambda: time.time() - 3600, monotonic=time.monotonic)
    monkeypatch.setattr("ckpt_core.preemption.time", set_back)
    watches.append(Notices(preemption, came.put))
    assert [came.get(timeout=SECONDS) for _ in watches] == ["its deadline"] * 2
    for watch in watches:
        watch.close()


def test_a_copy_of_a_deadline_counts_by_the_clock_until_it_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    came: queue.Queue[str] = queue.Queue()
    preemption = Preemption(deadline=3600, look_every=0.01)
    copied = pickle.loads(pickle.dumps(preemption))
    assert copied == preemption
    rebooted = SimpleNamespace(time=lambda: time.time() + 3600, monotonic=lambda: time.monotonic() - 1e6)
    monkeypatch.setattr("ckpt_core.preemption.time", rebooted)
    notices = Notices(copied, came.put)
    assert came.get(timeout=SECONDS) == "its deadline"
    notices.close()


def test_a_question_that_is_never_answered_holds_up_no_deadline() -> None:
    came: queue.Queue[str] = queue.Queue()
    answers = threading.Event()
    notices = Notices(Preemption(notice=answers.wait, deadline=0.1, look_every=0.01), came.put)
    assert came.get(timeout=SECONDS) == "its deadline"
    notices.close()
    answers.set()


def test_a_deadline_that_is_over_is_said(caplog: pytest.LogCaptureFixture) -> None:
    Preemption(deadline="2020-01-01T04:00")
    assert "the deadline 2020-01-01T04:00 is over: this run saves after its first step" in caplog.text


@pytest.mark.parametrize("reason", ["a notice", "its deadline"])
def test_a_question_that_fails_is_asked_again_and_ends_no_other_watch(
    caplog: pytest.LogCaptureFixture, reason: str
) -> None:
    asked: queue.Queue[int] = queue.Queue()
    came: queue.Queue[str] = queue.Queue()

    def fails() -> bool:
        asked.put(1)
        if asked.qsize() < 4 or reason == "its deadline":
            raise OSError("no network")
        return True

    notices = Notices(Preemption(notice=fails, deadline="2100-01-01", look_every=0.01), came.put)
    if reason == "its deadline":
        for _ in range(2):
            asked.get(timeout=SECONDS)
        notices._ends_at = time.time()
    assert came.get(timeout=SECONDS) == reason
    assert [record.exc_info[1].args for record in caplog.records if record.exc_info] == [("no network",)]


def test_there_is_no_thread_without_a_deadline_or_notice() -> None:
    before = threading.active_count()
    Notices(Preemption(), lambda _: None)
    assert threading.active_count() == before


def test_handlers_of_the_program_are_called_and_come_back() -> None:
    theirs: list[int] = []

    def handler(number: int, _: Any) -> None:
        theirs.append(number)

    noted: list[str] = []
    before = signal.signal(signal.SIGUSR2, handler)
    try:
        notes = SignalNotes(["SIGUSR2"], noted.append)
        os.kill(os.getpid(), signal.SIGUSR2)
        assert (noted, theirs) == (["SIGUSR2"], [signal.SIGUSR2])
        notes.close()
        assert signal.getsignal(signal.SIGUSR2) is handler
        notes = SignalNotes(["SIGUSR2"], noted.append)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # set last, by the program
        notes.close()
        assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR2, before)


LOOP = """
    import fcntl, os, pathlib, signal, sys, time
    import torch.distributed as dist
    from ckpt_core import RankGroup
    from ckpt_core.preemption import EndWatch

    folder, told = pathlib.Path(sys.argv[1]), [int(rank) for rank in sys.argv[2]]
    alive = open(f"alive.{os.environ['LOCAL_RANK']}", "w")  # locked for as long as this rank lives
    fcntl.flock(alive, fcntl.LOCK_EX)
    dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]), world_size=2)
    rank = dist.get_rank()

    def broadcast(value):
        values = [value]
        dist.broadcast_object_list(values)
        return values[0]

    watch = EndWatch(True, RankGroup.connect(rank, dist.get_world_size(), broadcast))
    for step in range(1, 10_000):
        time.sleep(0.002 * rank)
        dist.barrier()  # the gradients
        if step == 20 and rank in told:
            os.kill(os.getpid(), signal.SIGTERM)
        end = watch.due()
        if end is not None:
            (folder / f"end.{rank}").write_text(f"{step} {end.reason} {end.status}")
            dist.barrier()
            watch.close()
            break
"""


@pytest.mark.parametrize("told", ["1", "01"])
def test_all_ranks_end_after_the_same_step_whoever_is_told(told: str, fork_script: Any, tmp_path: Path) -> None:
    fork_script(LOOP, tmp_path, told, ranks=2)
    first, second = ((tmp_path / f"end.{rank}").read_text() for rank in range(2))
    assert first == second
    step, reason, status = first.split()
    assert 20 <= int(step) < 9_999
    assert (reason, status) == ("SIGTERM", "143")


def test_a_rank_whose_peer_is_dead_ends_before_its_launcher_kills_it(fork_script: Any) -> None:
    dies = """
    if rank == 1:
        os._exit(0)
    fcntl.flock(open("alive.1"), fcntl.LOCK_EX)  # until it is dead
    signal.alarm(30)  # as torchrun kills those that it has told to end
    os.kill(os.getpid(), signal.SIGTERM)
    while True:
        watch.due()
    """
    done = fork_script(LOOP.partition("    for step in")[0] + dies, "x", "0", ranks=2, check=False)
    assert (done.returncode, "ends this rank alone" in done.stderr) == (143, True)


FORKED_BY_A_LAUNCHER = """
import os, signal, sys
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes
from ckpt_core.preemption import EndWatch

def train():
    watch = EndWatch()
    os.kill(os.getpid(), signal.SIGTERM)
    end = watch.due()
    watch.close()
    return end

one = {"args": {0: ()}, "envs": {0: {}}, "logs_specs": DefaultLogsSpecs()}
result = start_processes("train", train, **one, start_method="fork").wait()
print(result.return_values, result.failures)
"""


def test_handlers_that_ranks_inherit_from_their_launcher_do_not_end_them(fork_script: Any) -> None:
    told = fork_script(FORKED_BY_A_LAUNCHER).stdout  # as notebook_launcher starts its ranks
    assert told.strip() == "{0: End(reason='SIGTERM', status=143)} {}"


def test_what_comes_after_the_last_step_is_for_those_who_handled_it_before() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: heard.append(number))
    try:
        watch = EndWatch("SIGUSR2")
        watch.ask("a full disk")
        assert watch.due(last=True) == End("a full disk", 75)
        os.kill(os.getpid(), signal.SIGUSR2)
        assert (watch.due(last=True), heard) == (None, [signal.SIGUSR2])
        watch.close()
    finally:
        signal.signal(signal.SIGUSR2, before)


@pytest.mark.parametrize("closed_on", ["the main thread", "another"])
def test_handlers_that_are_closed_in_any_order_leave_what_was_there(closed_on: str) -> None:
    heard: list[Any] = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: heard.append("before"))
    try:
        first, second = (SignalNotes(["SIGUSR2"], lambda _, name=name: heard.append(name)) for name in ("1", "2"))
        first.close()
        os.kill(os.getpid(), signal.SIGUSR2)
        assert heard == ["2", "before"]
        if closed_on == "another":
            thread = threading.Thread(target=second.close)  # a finalizer may run on any thread
            thread.start()
            thread.join()
        else:
            second.close()
        os.kill(os.getpid(), signal.SIGUSR2)
        assert heard == ["2", "before", "before"]
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_a_single_process_ends_at_the_next_step_and_its_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGUSR2)
    watch = EndWatch("SIGUSR2")
    try:
        assert watch.due() is None
        os.kill(os.getpid(), signal.SIGUSR2)
        assert watch.due() == End("SIGUSR2", 128 + signal.SIGUSR2)
        assert watch.due() is None
    finally:
        watch.close()
    assert signal.getsignal(signal.SIGUSR2) == before
