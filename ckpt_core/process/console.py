"""Console output: warnings that a blanket filter does not hide, progress lines, and lines next to progress bars."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator

logger = logging.getLogger(__name__)

_SILENT = 2.0  # seconds before the first line
_SELDOM = 60.0  # longest interval between two lines, in seconds


def warn(message: str, *, stacklevel: int = 1) -> None:
    """Issue a warning that must reach the user; also log it if the script ignores all warnings, not just this one.

    Many scripts begin with ``warnings.filterwarnings("ignore")``, to hide the warnings of libraries.
    """
    warnings.warn(message, stacklevel=stacklevel + 1)
    for action, text, category, module, _ in warnings.filters:
        if issubclass(UserWarning, category) and module is None and (text is None or text.match(message)):
            if action == "ignore" and text is None:
                logger.warning("%s", message)
            return


@contextlib.contextmanager
def progress_bars_cleared(logger: logging.Logger | None = None) -> Iterator[None]:
    """Clear progress bars while the body prints a line, maybe through ``logger``, and redraw them afterwards."""
    tqdm = sys.modules.get("tqdm")
    with contextlib.ExitStack() as stack:
        if tqdm is not None:
            # Without tqdm's lock: a line about a run must not wait for the thread that holds it.
            stack.enter_context(tqdm.tqdm.external_write_mode(sys.stderr, nolock=True))
        # While rich draws a bar, sys.stderr is a stream that writes above the bar, but handlers still have the old one.
        for handler in _handlers_of(logger) if sys.stderr is not sys.__stderr__ else []:
            if isinstance(handler, logging.StreamHandler) and handler.stream is sys.__stderr__:
                stack.callback(handler.setStream, handler.stream)
                handler.setStream(sys.stderr)
        yield


def _handlers_of(logger: logging.Logger | None) -> Iterator[logging.Handler]:
    while logger is not None:
        yield from logger.handlers
        logger = logger.parent if logger.propagate else None


class Progress:
    """Reports the progress of a long operation: first after two seconds, then at growing intervals, up to a minute.

    ``say`` is called with the amount of the ``total`` that is done, and the seconds since the start.
    """

    def __init__(self, total: int, say: Callable[[int, float], None]) -> None:
        self._total, self._say = total, say
        self._done = 0
        self._begin, self._due = time.monotonic(), _SILENT

    def __call__(self, more: int) -> None:
        """Add ``more`` to the amount that is done, and report it if that is due."""
        self._done += more
        seconds = time.monotonic() - self._begin
        if seconds >= self._due and self._done < self._total:
            self._due = seconds + min(seconds, _SELDOM)
            self._say(self._done, seconds)


def range_with_progress(total: int, what: str, say: Callable[[str], None]) -> Iterator[int]:
    """Yield the numbers below ``total``, and call ``say`` with progress lines if the loop takes long."""

    def tell(done: int, seconds: float) -> None:
        say(f"{what}: {done:,} of {total:,}, about {seconds * (total - done) / done:,.0f} s left")

    progress = Progress(total, tell)
    for number in range(total):
        yield number
        progress(1)
