"""Signals that a thread hears, also where the main thread waits in C, as in a collective, and Python runs no handlers.

Python's own handler, in C, writes the number of each signal to a descriptor, from which the thread reads it. A child
has the descriptor of its parent, so signals wait until a fork has given it up: in the parent's pipe they would end the
parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import NoReturn

#: What ends a process, unless it is handled.
ENDING = [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]

_END, _ASKS = 0, 255  # the numbers of no signals
_LONGEST_END = 10.0  # seconds
_living: list[SignalThread] = []
_mask = threading.local()
_exit = os._exit


class SignalThread:
    """Hears signals for which the program has set a handler; made and closed on the main thread.

    Args:
        heard: Called on the thread with the number of each.
        in_child: Called in each child that is forked, before signals reach it.
    """

    def __init__(self, heard: Callable[[int], None], in_child: Callable[[], None] = lambda: None) -> None:
        self.in_child = in_child
        self._heard = heard
        self._asked = self._answered = 0
        self._reads, self._writes = os.pipe()
        os.set_blocking(self._writes, False)
        self._thread = threading.Thread(target=self._read, name="ckpt-signals", daemon=True)
        self._thread.start()
        _living.append(self)
        self.listen()

    def listen(self) -> None:
        """Hear signals from now on, unless another reader does, such as an event loop."""
        before = signal.set_wakeup_fd(self._writes, warn_on_full_buffer=False)
        if before not in (-1, self._writes):
            signal.set_wakeup_fd(before)

    def catch_up(self) -> None:
        """Return when it has heard all signals of before, as which handler was there for them is soon not known."""
        self._asked += 1
        with contextlib.suppress(BlockingIOError):
            os.write(self._writes, bytes([_ASKS]))
            deadline = time.monotonic() + _LONGEST_END
            while self._answered < self._asked and self._thread.is_alive() and time.monotonic() < deadline:
                time.sleep(0.001)  # no lock: a handler may have interrupted this

    def close(self) -> None:
        """Hear none any more, and return when the thread has ended, or is at something that does not end."""
        _living.remove(self)
        self._give_up()
        with contextlib.suppress(BlockingIOError):
            os.write(self._writes, bytes([_END]))  # a child that did not fork by Python may have the descriptor, too
        os.close(self._writes)
        self._thread.join(_LONGEST_END)

    def _give_up(self) -> None:
        before = signal.set_wakeup_fd(-1)
        if before != self._writes:
            signal.set_wakeup_fd(before)

    def _read(self) -> None:
        while numbers := os.read(self._reads, 64):
            for number in numbers.partition(bytes([_END]))[0]:
                if number == _ASKS:
                    self._answered += 1
                else:
                    self._heard(number)
            if _END in numbers:
                break
        os.close(self._reads)

    def forked(self) -> None:
        """Let go of what is the parent's."""
        with contextlib.suppress(ValueError):  # not on the main thread
            self._give_up()
        for descriptor in (self._reads, self._writes):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self.in_child()


def die_of(number: int) -> NoReturn:
    """End this process by a signal, on any thread, as if it had not been handled."""
    with contextlib.suppress(AttributeError, OSError):
        # Python changes dispositions on its main thread only, which may be in a collective for ever.
        library = ctypes.CDLL(None)
        library.signal.argtypes, library.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
        library.signal(int(number), None)
        os.kill(os.getpid(), number)
        time.sleep(1)
    _exit(128 + number)


def _before_fork() -> None:
    if _living:
        _mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)


def _after_fork() -> None:
    before = vars(_mask).pop("before", None)
    if before is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _in_child() -> None:
    for each in _living:
        each.forked()
    _living.clear()
    _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)
