"""The terminal, on which frameworks draw progress bars."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator

__all__ = ["beside_bars"]


@contextlib.contextmanager
def beside_bars(logger: logging.Logger | None = None) -> Iterator[None]:
    """Take progress bars off the terminal while the body prints a line, and draw them again.

    Args:
        logger: The one by which it prints, if it does.
    """
    tqdm = sys.modules.get("tqdm")
    with contextlib.ExitStack() as stack:
        if tqdm is not None:
            # No lock of tqdm's: a line about a run must not wait for whoever holds it.
            stack.enter_context(tqdm.tqdm.external_write_mode(sys.stderr, nolock=True))
        # While rich draws a bar, sys.stderr writes above it; handlers have the one from before.
        for handler in _handlers_of(logger) if sys.stderr is not sys.__stderr__ else []:
            if isinstance(handler, logging.StreamHandler) and handler.stream is sys.__stderr__:
                stack.callback(handler.setStream, handler.stream)
                handler.setStream(sys.stderr)
        yield


def _handlers_of(logger: logging.Logger | None) -> Iterator[logging.Handler]:
    while logger is not None:
        yield from logger.handlers
        logger = logger.parent if logger.propagate else None
