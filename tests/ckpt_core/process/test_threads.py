"""``run_parallel``: a few threads work through a list of jobs."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from ckpt_core.process.threads import Latch, no_collections, run_parallel
from tests.support.interrupting import at_every_moment


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_every_job_is_done_once(threads: int) -> None:
    done: list[int] = []
    run_parallel(done.append, range(500), threads=threads)
    assert sorted(done) == list(range(500))


def test_several_threads_work_at_the_same_time() -> None:
    meeting = threading.Barrier(3)
    run_parallel(lambda _: meeting.wait(200), range(3), threads=3)
    assert not meeting.broken


SHORT_OF_MEMORY = """
import os, resource, threading
from ckpt_core.process.threads import run_parallel

threading.stack_size(1 << 20)
nothing = resource.getrlimit(resource.RLIMIT_AS)
for rest in range(0, 32, 4):  # KiB: enough for a thread, and not always for its first call
    pages = int(open("/proc/self/statm").read().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + (1 << 20) + rest * 1024
    resource.setrlimit(resource.RLIMIT_AS, (limit, nothing[1]))
    done = []
    try:
        run_parallel(done.append, range(5), threads=2)
    except MemoryError:
        done = range(5)  # the calling thread was short of it, too, and says so
    resource.setrlimit(resource.RLIMIT_AS, nothing)
    print(sorted(done))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
def test_threads_that_have_no_memory_to_begin_are_not_waited_for() -> None:
    command = [sys.executable, "-c", SHORT_OF_MEMORY]
    child = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert child.stdout.splitlines() == [str(list(range(5)))] * 8


def test_the_first_error_is_raised_when_all_threads_have_stopped() -> None:
    done: list[int] = []

    def work(job: int) -> None:
        if job == 3:
            raise ValueError("job 3")
        done.append(job)

    with pytest.raises(ValueError, match="job 3"):
        run_parallel(work, range(10_000), threads=4)
    count = len(done)
    assert count < 9_999  # 9,999 would be all but the failed one
    time.sleep(0.05)
    assert len(done) == count


def test_an_error_of_the_jobs_themselves_is_raised() -> None:
    def jobs() -> Iterator[int]:
        yield 1
        raise KeyError("no more")

    with pytest.raises(KeyError, match="no more"):
        run_parallel(lambda _: None, jobs(), threads=3)


def test_an_interrupt_is_raised_only_when_no_thread_works_any_more() -> None:
    """The caller then frees the memory that the threads read, and closes the file that they write to."""
    other_has_begun, main_is_done = threading.Event(), threading.Event()
    finished: list[str] = []

    def work(job: str) -> None:
        if threading.current_thread() is threading.main_thread():
            assert other_has_begun.wait(200)  # before there is nothing left for it
            main_is_done.set()
            return
        other_has_begun.set()
        assert main_is_done.wait(200)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)
        finished.append(job)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_parallel(work, iter(["a", "b"]), threads=2)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(finished) == 1


@pytest.mark.parametrize("method", ["wait", "set"])
def test_ctrl_c_at_any_moment_leaves_nobody_waiting(method: str) -> None:
    """With a ``threading.Event``, the lock would stay taken, and the thread that sets it would wait for ever."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    interrupted = 0
    for run in at_every_moment(("threads.py", "threading.py"), interrupt):
        latch = Latch()
        other = threading.Thread(target=latch.wait, daemon=True)
        other.start()
        try:
            run(latch.set if method == "set" else lambda latch=latch: latch.wait(0.001))
        except KeyboardInterrupt:
            interrupted += 1
        setting = threading.Thread(target=latch.set, daemon=True)
        setting.start()
        for thread in (setting, other):
            thread.join(200.0)
            assert not thread.is_alive()
        assert latch.wait()
    assert interrupted > 20


def test_collections_are_on_again_when_the_last_of_two_has_kept_them_off() -> None:
    gc.enable()
    one, other = no_collections(), no_collections()
    with one:
        assert not gc.isenabled()
        other.__enter__()
        assert not gc.isenabled()
    other.__exit__(None, None, None)
    assert gc.isenabled()
    gc.disable()
    try:
        with no_collections():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
