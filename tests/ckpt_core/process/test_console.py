"""Log lines stand on lines of their own, whichever library draws a progress bar."""

from __future__ import annotations

import io
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
from tqdm import tqdm

from ckpt_core.process import console as console_module
from ckpt_core.process.console import progress_bars_cleared, range_with_progress, warn


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal() -> Terminal:
    return Terminal()


def use(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the streams in the test itself: pytest replaces them after the fixtures."""
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "__stderr__", terminal)


@pytest.fixture
def logger(terminal: Terminal) -> Iterator[logging.Logger]:
    """A logger whose parent has a handler from before any bar was drawn, as Lightning's has."""
    parent, handler = logging.getLogger("console"), logging.StreamHandler(terminal)
    parent.addHandler(handler)
    parent.setLevel("INFO")
    yield logging.getLogger("console.below")
    parent.removeHandler(handler)


def test_a_line_does_not_hang_on_the_bar_of_tqdm(
    terminal: Terminal, logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(terminal, monkeypatch)
    with tqdm(total=10, desc="training") as bar:
        bar.update(3)
        before = len(terminal.getvalue())
        with progress_bars_cleared(logger):
            logger.info("resuming from x")
        after = terminal.getvalue()[before:]
    cleared, line, rest = after.partition("resuming from x\n")
    assert re.fullmatch(r"\r +\r", cleared) and line, "the bar is blanked, and the cursor at the beginning"
    assert "training:  30%" in rest, "and drawn again"


def test_a_line_does_not_hang_on_the_bar_of_rich(
    terminal: Terminal, logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(terminal, monkeypatch)
    console = pytest.importorskip("rich.console")
    from rich.progress import Progress

    (handler,) = logging.getLogger("console").handlers
    with Progress(console=console.Console(file=terminal, force_terminal=True), auto_refresh=False) as bars:
        bars.add_task("training", total=10)
        bars.refresh()
        before = len(terminal.getvalue())
        with progress_bars_cleared(logger):
            logger.info("resuming from x")
        after = terminal.getvalue()[before:]
    assert isinstance(handler, logging.StreamHandler) and handler.stream is terminal
    cleared, line, rest = after.partition("resuming from x")
    assert cleared.startswith("\r\x1b[2K") and line and "training" in rest


def test_what_takes_long_is_counted_aloud_ever_more_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(1000))
    monkeypatch.setattr(console_module, "time", SimpleNamespace(monotonic=lambda: float(next(now))))
    said: list[str] = []
    assert list(range_with_progress(500, "reading", said.append)) == list(range(500))
    assert said[:3] == [
        "reading: 2 of 500, about 498 s left",
        "reading: 4 of 500, about 496 s left",
        "reading: 8 of 500, about 492 s left",
    ]
    assert [int(line.split()[1]) for line in said] == [2, 4, 8, 16, 32, 64, 124, 184, 244, 304, 364, 424, 484]


def test_what_is_short_is_not_counted() -> None:
    said: list[str] = []
    assert list(range_with_progress(3, "reading", said.append)) == [0, 1, 2] and said == []


MESSAGE = "this resume is not exact: something is lost"


@pytest.mark.parametrize(
    ("set_filter", "warned", "logged"),
    [
        (lambda: None, 1, 0),
        (lambda: warnings.filterwarnings("ignore"), 0, 1),
        (lambda: warnings.simplefilter("ignore", UserWarning), 0, 1),
        (lambda: warnings.simplefilter("ignore", DeprecationWarning), 1, 0),
        (lambda: warnings.filterwarnings("ignore", module="torch"), 1, 0),
        (lambda: warnings.filterwarnings("ignore", message="this resume"), 0, 0),
        (lambda: warnings.filterwarnings("ignore", message="another"), 1, 0),
    ],
)
def test_what_must_be_said_is_logged_where_all_warnings_are_ignored(
    set_filter: Callable[[], None], warned: int, logged: int, caplog: pytest.LogCaptureFixture
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        set_filter()
        warn(MESSAGE)
    assert [str(w.message) for w in caught] == [MESSAGE] * warned
    assert [w.filename for w in caught] == [__file__] * warned
    assert caplog.messages == [MESSAGE] * logged
