"""Fixtures for the tests of the plugin for Accelerate."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.support.accelerate_ranks import ranks

__all__ = ["fresh_accelerate", "ranks"]


@pytest.fixture(autouse=True)
def _no_accelerator_of_others() -> Iterator[None]:
    """Make Accelerate forget the Accelerators of earlier tests, also for processes that are forked from this one."""
    _forget_accelerators()
    yield
    _end_sessions()
    _forget_accelerators()


@pytest.fixture
def fresh_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use Accelerate as in a new process, on the CPU."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


def _end_sessions() -> None:
    """End what a test has left running: its uploads and failures would appear in the next test."""
    if "accelerate_ckpt._attach" in sys.modules:
        from accelerate_ckpt._attach import drain
        from accelerate_ckpt._state.session import close_sessions
        from accelerate_ckpt._termination import unprotect

        drain(raised=True)
        close_sessions()
        unprotect()


def _forget_accelerators() -> None:
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(True)
        state.GradientState._reset_state()
