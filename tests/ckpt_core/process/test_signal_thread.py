"""The thread that hears signals has ended once it is closed."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from ckpt_core.process import signal_thread
from ckpt_core.process.signal_thread import SignalThread


def test_the_thread_has_ended_when_it_was_closed() -> None:
    heard: list[int] = []
    hears = threading.Event()

    def slow(number: int) -> None:
        hears.set()
        time.sleep(0.2)
        heard.append(number)

    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    thread = SignalThread(slow)
    try:
        signal.raise_signal(signal.SIGUSR1)
        hears.wait()
    finally:
        thread.close()
        signal.signal(signal.SIGUSR1, before)
    assert heard == [signal.SIGUSR1]
    assert "ckpt-signals" not in [each.name for each in threading.enumerate()]


def test_what_came_before_has_been_heard_when_it_has_caught_up() -> None:
    heard: list[int] = []
    goes_on = threading.Event()

    def late(number: int) -> None:
        goes_on.wait()
        heard.append(number)

    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    thread = SignalThread(late)
    try:
        signal.raise_signal(signal.SIGUSR1)
        threading.Timer(0.2, goes_on.set).start()
        thread.catch_up()
        assert heard == [signal.SIGUSR1]
        thread.catch_up()
        assert heard == [signal.SIGUSR1]
    finally:
        goes_on.set()
        thread.close()
        signal.signal(signal.SIGUSR1, before)


def test_the_thread_ends_where_another_process_has_its_pipe() -> None:
    thread = SignalThread(lambda _: None)
    copy = os.dup(thread._writes)  # as in a child that a C library has forked
    try:
        thread.close()
    finally:
        os.close(copy)
    assert "ckpt-signals" not in [each.name for each in threading.enumerate()]


def test_closing_does_not_wait_for_what_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal_thread, "_LONGEST_END", 0.01)
    hears, ends = threading.Event(), threading.Event()

    def stuck(number: int) -> None:
        hears.set()
        ends.wait()

    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    thread = SignalThread(stuck)
    try:
        signal.raise_signal(signal.SIGUSR1)
        hears.wait()
        thread.close()
        assert thread._thread.is_alive()
    finally:
        ends.set()
        signal.signal(signal.SIGUSR1, before)
    thread._thread.join()
