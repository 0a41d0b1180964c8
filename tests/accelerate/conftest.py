"""Fixtures for the tests of the plugin for Accelerate."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.accelerate_ranks import ranks

__all__ = ["fresh_accelerate", "ranks"]


@pytest.fixture
def fresh_accelerate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Accelerate as in a new process, on the CPU."""
    from accelerate.state import AcceleratorState, GradientState

    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
