"""DiLoCo in one process: what is saved where, and what another number of workers is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckpt_core import DirectoryCheckpointer, StateMismatchError
from ckpt_core.local_updates import DiLoCo, DiLoCoState, StreamCursor, WorkerState


def make(workers: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, DiLoCo, DiLoCoState]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    loop = DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True))
    return model, inner, loop, DiLoCoState(loop, WorkerState(StreamCursor(4, workers=workers), inner=inner))


def train(model: torch.nn.Module, inner: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        inner.zero_grad()
        model(torch.rand(4, 3)).pow(2).mean().backward()
        inner.step()


def test_inside_a_window_each_worker_has_parameters_of_its_own(tmp_path: Path) -> None:
    model, inner, loop, state = make(1)
    train(model, inner, 3)
    loop.sync()
    train(model, inner, 2)
    with DirectoryCheckpointer() as checkpointer:
        checkpointer.save(state.parts(), tmp_path / "inside.ckpt")
        train(model, inner, 2)
        loop.sync()
        checkpointer.save(state.parts(), tmp_path / "boundary.ckpt")
        again, again_inner, again_loop, again_state = make(1)
        with checkpointer.load(tmp_path / "inside.ckpt") as opened:
            assert not torch.equal(opened.load("model")["weight"], opened.load("worker")["parameters"]["weight"])
            again_state.load(opened)
        train(again, again_inner, 2)
        again_loop.sync()
        assert torch.equal(again.weight, model.weight) and torch.equal(again.bias, model.bias)
        other, _, _, other_state = make(2)
        with (
            checkpointer.load(tmp_path / "inside.ckpt") as opened,
            pytest.raises(StateMismatchError, match="resume with 1 workers"),
        ):
            other_state.load(opened)
        with checkpointer.load(tmp_path / "boundary.ckpt") as opened:
            assert opened.load("worker")["parameters"] == {}
            other_state.load(opened)
        assert torch.equal(other.weight, model.weight)
