"""Interrupts code by a signal at every opcode or line: real signals, whose handlers run between two opcodes."""

from __future__ import annotations

import itertools
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


def at_every_moment(files: tuple[str, ...], handler: Callable[[], None], *, opcodes: bool = True) -> Iterator[Any]:
    """Yield ``run``, again and again: ``run(act)`` calls ``act`` and has ``handler`` interrupt it, each time later.

    Stops after the first ``act`` that ended before its interruption. A moment is an opcode (or a line) of code in a
    file whose path ends with one of ``files``.
    """
    before = signal.signal(signal.SIGUSR1, lambda *_: handler())
    try:
        for moment in itertools.count():
            met = 0

            def trace(frame: FrameType, event: str, _: object, moment: int = moment) -> Any:
                nonlocal met
                if not frame.f_code.co_filename.endswith(files):
                    return None
                frame.f_trace_opcodes = opcodes
                if event == ("opcode" if opcodes else "line"):
                    met += 1
                    if met == moment + 1:
                        sys.settrace(None)
                        signal.raise_signal(signal.SIGUSR1)
                return trace

            def run(act: Callable[[], None]) -> None:
                outer = sys.gettrace()
                sys.settrace(trace)
                try:
                    act()
                finally:
                    sys.settrace(outer)

            yield run
            if met <= moment:
                return
    finally:
        signal.signal(signal.SIGUSR1, before)
