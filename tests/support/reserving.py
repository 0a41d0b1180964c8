"""Records which threads allocate the staging buffers, the memory for copies of states."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from ckpt_core import checkpointer
from ckpt_core._pipeline import buffer_pool
from ckpt_core.buffers import StagingBuffer


def allocations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that collects the names of threads that allocate from now on; small states count as large ones."""
    names: list[str] = []

    class Noted(StagingBuffer):
        def __init__(self, *args: Any, **options: Any) -> None:
            names.append(threading.current_thread().name)
            super().__init__(*args, **options)

    monkeypatch.setattr(buffer_pool, "StagingBuffer", Noted)
    monkeypatch.setattr(checkpointer, "_WORTH_RESERVING", 1)
    return names


def wait_until_reserved() -> None:
    """Wait until no thread is reserving memory."""
    for thread in threading.enumerate():
        if thread.name == "ckpt-reserve":
            thread.join()
