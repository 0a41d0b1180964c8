"""Memory for the copies of saves is allocated alongside training, and not by the first save."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core import Checkpointer, DirectoryCheckpointer, Kind, Part, checkpointer
from ckpt_core._pipeline.buffer_pool import BufferPool
from tests.support.reserving import allocations, wait_until_reserved


@pytest.fixture
def allocating(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the threads that have allocated buffers."""
    return allocations(monkeypatch)


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.BatchNorm1d(300))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 300)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("layout", ["file", "directory"])
def test_the_first_save_finds_its_memory(layout: str, tmp_path: Path, allocating: list[str]) -> None:
    model, optimizer = trained()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if layout == "file":
        with Checkpointer() as file:
            file.reserve([model], [optimizer])
            wait_until_reserved()
            file.save(state, tmp_path / "a")
    else:
        with DirectoryCheckpointer() as directory:
            directory.reserve([model], [optimizer])
            wait_until_reserved()
            directory.save([Part("model", state, Kind.REPLICATED)], tmp_path / "a")
    assert allocating == ["ckpt-reserve"]


def test_saves_in_the_foreground_and_small_states_reserve_nothing(
    allocating: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = trained()
    with Checkpointer(strategy="sync") as file:
        file.reserve([model], [optimizer])
    monkeypatch.setattr(checkpointer, "_WORTH_RESERVING", 2**30)
    with Checkpointer() as file:
        file.reserve([model], [optimizer])
        wait_until_reserved()
    assert allocating == []


def test_what_there_is_no_memory_for_is_not_reserved_and_close_frees_the_rest() -> None:
    pool = BufferPool(1)
    pool.reserve(2**60)
    wait_until_reserved()
    assert not pool.exhausted
    pool.reserve(10_000)
    pool.close()
    assert not pool.exhausted
    assert pool._idle == []


def test_what_cannot_be_asked_for_its_size_does_not_end_the_training(allocating: list[str]) -> None:
    class Foreign(torch.nn.Module):
        def buffers(self, recurse: bool = True) -> Any:
            raise RuntimeError("not materialized")

    with Checkpointer() as file:
        file.reserve([Foreign()])
        wait_until_reserved()
    assert allocating == []


def test_a_buffer_that_comes_back_wakes_everybody_who_waits() -> None:
    """Also the save of a signal handler, inside one that has waited longer and cannot continue before it."""
    pool = BufferPool(1)
    lent = pool.acquire(10)
    waiting = [threading.Thread(target=pool.wait, daemon=True) for _ in range(3)]
    for thread in waiting:
        thread.start()
    while len(pool._changed._waiters) < 3:  # type: ignore[attr-defined]
        time.sleep(0.001)
    pool.release(lent)
    for thread in waiting:
        thread.join(200)
    assert not any(thread.is_alive() for thread in waiting)
    pool.close()
