"""A process that is told to end, or that ends at once, while a checkpoint is saved in the background."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from ckpt_core import DirectoryCheckpointer
from tests.conftest import ACCELERATE
from tests.support.accelerate_ranks import Ranks

TERMINATED = -signal.SIGTERM
# Each case is a fresh process, with a disk on which a save takes a while.
CASES = """
    import os, signal, sys, threading, time
    from accelerate_ckpt._termination import finish_before_exit, protect

    def slow_disk(seconds):
        fsync = os.fsync
        os.fsync = lambda descriptor: (time.sleep(seconds), fsync(descriptor))[1]

    def prepared(**options):
        accelerator = attach(Accelerator(), "async", **options)
        accelerator.prepare(nn.Linear(1000, 500))
        return accelerator

    def status_of(case):
        child = os.fork()
        if not child:
            try:
                case()
            finally:
                os._exit(99)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def end(number=signal.SIGTERM):
        os.kill(os.getpid(), number)

    def wait_in_c():
        torch.distributed.TCPStore("127.0.0.1", 0, is_master=True).wait(["never"])

    def save_and(what, seconds=0.1):
        def case():
            slow_disk(seconds)
            prepared().save_state(saved)
            what()
            time.sleep(60)
        return case
"""


def is_saved(path: Path) -> bool:
    with DirectoryCheckpointer().load(path) as checkpoint:
        checkpoint.verify()
    return True


def status(ranks: Ranks, path: Path, case: str) -> Any:
    (result,) = ranks.run(f"{CASES}\n    tell(status=status_of({case}))", 1, saved=str(path))
    assert result.error is None, result.message
    return result.told["status"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("save_and(end)", TERMINATED),
        ("save_and(lambda: end(signal.SIGHUP))", -signal.SIGHUP),
        ("save_and(lambda: (threading.Timer(0.05, end).start(), wait_in_c()))", TERMINATED),  # as in a collective
        ("save_and(lambda: (finish_before_exit(), os._exit(3)))", 3),
    ],
)
def test_what_is_under_way_is_saved_and_the_status_is_as_without_us(
    ranks: Ranks, tmp_path: Path, case: str, expected: int
) -> None:
    assert status(ranks, tmp_path / "saved", case) == expected
    assert is_saved(tmp_path / "saved")


def test_handlers_of_the_script_are_called_and_may_call_ours(ranks: Ranks, tmp_path: Path) -> None:
    before = """save_and(lambda: (end(), os._exit(flag[0])))"""
    body = f"""{CASES}
    flag = [0]
    signal.signal(signal.SIGTERM, lambda *_: flag.__setitem__(0, 7))
    own = status_of({before})
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def replace():
        signal.signal(signal.SIGTERM, lambda *_: flag.__setitem__(0, 8))
        end()
        time.sleep(2)  # longer than the save, after which ours would end the process
        os._exit(flag[0])

    def chain():
        ours = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda *arguments: ours(*arguments))
        end()
    tell(own=own, replaced=status_of(save_and(replace)), chained=status_of(save_and(chain)))
    """
    (result,) = ranks.run(body, 1, saved=str(tmp_path / "saved"))
    assert result.told == {"own": 7, "replaced": 8, "chained": TERMINATED}
    assert is_saved(tmp_path / "saved")


def test_a_signal_that_another_handler_got_is_not_taken_for_ours_later(ranks: Ranks, tmp_path: Path) -> None:
    body = f"""{CASES}
    from accelerate_ckpt import _termination

    def late():
        (thread,) = _termination._threads
        hears = thread._heard
        thread._heard = lambda number: (time.sleep(0.5), hears(number))  # on a busy machine
        _termination.unprotect(["SIGTERM"])
        signal.signal(signal.SIGTERM, lambda *_: None)
        end()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        protect()
        thread.catch_up()
        os._exit(7 if _termination._ending.since is None else 8)
    tell(status=status_of(save_and(late)))
    """
    (result,) = ranks.run(body, 1, saved=str(tmp_path / "saved"))
    assert result.told == {"status": 7}


def test_ctrl_c_after_sigterm_ends_at_once(ranks: Ranks, tmp_path: Path) -> None:
    no_exception = "signal.signal(signal.SIGINT, lambda *_: None)"
    case = f"save_and(lambda: ({no_exception}, end(), time.sleep(0.5), end(signal.SIGINT), wait_in_c()), seconds=60)"
    assert status(ranks, tmp_path / "saved", case) == TERMINATED
    assert not (tmp_path / "saved").exists()


def test_children_end_as_ever_and_their_parent_lives_on(ranks: Ranks, tmp_path: Path) -> None:
    body = f"""{CASES}
    def with_child():
        slow_disk(0.1)
        accelerator = prepared()
        accelerator.save_state(saved)
        finish_before_exit()
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(1)
        os.kill(child, signal.SIGTERM)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        child = os.fork()
        if not child:
            os._exit(5)
        quick = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        time.sleep(0.2)
        accelerator.end_training()
        restored = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        Path(told).write_text(repr((ended, quick, restored)))
    tell(status=status_of(with_child))
    """
    (result,) = ranks.run(body, 1, saved=str(tmp_path / "saved"), told=str(tmp_path / "told"))
    assert result.error is None, result.message
    assert (tmp_path / "told").read_text() == repr((-15, 5, True))
    assert is_saved(tmp_path / "saved")


def test_all_ranks_finish_a_save_when_they_are_told_to_end(ranks: Ranks, tmp_path: Path) -> None:
    body = f"""{CASES}
    slow_disk(0.2)
    accelerator = prepared()
    accelerator.save_state(saved)
    threading.Timer(0.05, end).start()
    if rank == 1:
        accelerator.wait_for_everyone()  # rank 0 does not come
    time.sleep(60)
    """
    results = ranks.run(body, 2, saved=str(tmp_path / "saved"))
    assert [result.ended for result in results] == [True, True]
    assert is_saved(tmp_path / "saved")


def test_a_rank_that_has_yet_to_come_to_a_save_gets_there(ranks: Ranks, tmp_path: Path) -> None:
    body = f"""{CASES}
    accelerator = prepared()
    accelerator.save_state(saved + "-before")
    accelerator.wait_for_everyone()
    if rank == 1:
        while not list(Path(saved).parent.glob(".saved.*")):  # until rank 0 is saving
            time.sleep(0.001)
        end()
        time.sleep(0.3)
    accelerator.save_state(saved)
    end()
    time.sleep(60)
    """
    results = ranks.run(body, 2, saved=str(tmp_path / "saved"))
    assert [result.ended for result in results] == [True, True]
    assert is_saved(tmp_path / "saved")


def test_a_rank_that_is_gone_is_not_waited_for(ranks: Ranks, tmp_path: Path) -> None:
    # commit_timeout is ten minutes: a rank that waits for the dead one does not end in time.
    body = f"""{CASES}
    accelerator = prepared()
    if rank == 1:
        time.sleep(1)
        end(signal.SIGKILL)
    accelerator.save_state(saved)
    time.sleep(2)
    end()
    time.sleep(1000)
    """
    results = ranks.run(body, 2, saved=str(tmp_path / "saved"))
    assert [result.ended for result in results] == [True, True]
    assert not (tmp_path / "saved").exists()


ENDS_BESIDE_A_DEAD_RANK = """
    import atexit, os, signal, sys, torch
    from accelerate import Accelerator
    from accelerate_ckpt import attach
    from ckpt_core._commit import agreement
    from ckpt_core._pipeline import directory_save

    atexit.register(print, "came to its end")  # the last that it does
    agreement._LINGER_SECONDS = 1000.0  # for which no rank stays that waits for the dead one
    accelerator = attach(Accelerator(cpu=True), "async", commit_timeout=90.0)
    rank, write, dies = accelerator.process_index, directory_save.write_image, sys.argv[1]
    directory_save.write_image = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL) if rank else write(*a, **k)
    model = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    if rank and dies == "before the save":
        os.kill(os.getpid(), signal.SIGKILL)
    accelerator.save_state("saved")
    sys.exit("as a script that a preempted run or a failed collective ends")
"""


@pytest.mark.parametrize(
    ("dies", "words"),
    [("in the save", "rank 1 died before the save of"), ("before the save", "rank 1 did not begin the save of")],
)
def test_a_program_that_ends_waits_for_no_save_of_a_rank_that_is_gone(
    fork_script: Any, tmp_path: Path, dies: str, words: str
) -> None:
    ended = fork_script(ENDS_BESIDE_A_DEAD_RANK, dies, modules=ACCELERATE, ranks=2, check=False)
    assert words in ended.stdout + ended.stderr
    assert ended.stdout.count("came to its end") == 1
    assert [path for path in tmp_path.iterdir() if path.name == "saved"] == []
