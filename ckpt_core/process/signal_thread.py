"""A thread that receives signals even while the main thread waits in C (a collective) and Python runs no handlers.

Python's own C handler writes the number of each signal to a descriptor (``signal.set_wakeup_fd``), from which the
thread reads it. A forked child inherits the descriptor, so signals are blocked until the child has dropped it: a signal
to the child that was written to the parent's pipe would end the parent.
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

#: Signals that end a process unless they are handled.
ENDING = [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]

_END, _ASKS = 0, 255  # messages to the thread; no signals have these numbers
_LONGEST_END = 10.0  # seconds
_living: list[SignalThread] = []
_mask = threading.local()
_exit = os._exit


class SignalThread:
    """A thread that receives the signals for which the program has set a handler; made and closed on the main thread.

    Args:
        heard: Called on the thread with the number of each signal.
        in_child: Called in each forked child, before signals reach it.
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
        """Receive signals from now on, unless another reader, such as an event loop, has the wakeup descriptor."""
        before = signal.set_wakeup_fd(self._writes, warn_on_full_buffer=False)
        if before not in (-1, self._writes):
            signal.set_wakeup_fd(before)

    def catch_up(self) -> None:
        """Wait until the thread has processed all earlier signals; called before the handlers for them are replaced."""
        self._asked += 1
        with contextlib.suppress(BlockingIOError):
            os.write(self._writes, bytes([_ASKS]))
            deadline = time.monotonic() + _LONGEST_END
            while self._answered < self._asked and self._thread.is_alive() and time.monotonic() < deadline:
                time.sleep(0.001)  # no lock: a handler may have interrupted this

    def close(self) -> None:
        """Stop receiving signals, and wait a limited time until the thread has ended."""
        _living.remove(self)
        self._give_up()
        with contextlib.suppress(BlockingIOError):
            # Closing is not enough: a child that was not forked by Python may have the descriptor, too.
            os.write(self._writes, bytes([_END]))
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
        """Release, in a forked child, the parent's pipe; then call ``in_child``."""
        with contextlib.suppress(ValueError):  # not on the main thread
            self._give_up()
        for descriptor in (self._reads, self._writes):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self.in_child()


def die_of(number: int) -> NoReturn:
    """End this process by a signal, as if it had no handler; may be called on any thread."""
    with contextlib.suppress(AttributeError, OSError):
        # Python sets signal handlers on its main thread only, which may be in a collective for ever.
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
