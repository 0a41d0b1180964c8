"""DiLoCo in one process: what is saved where, and what is refused to another number of workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_async.local_updates import DiLoCo, DiLoCoState, StreamCursor, WorkerState
from ckpt_core import DirectoryCheckpointer, StateMismatchError
from ckpt_core.directory import DirectoryCheckpoint
from ckpt_core.separate import SeparateSaves


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


def test_a_models_buffers_come_back_without_being_asked_for(tmp_path: Path) -> None:
    def make_normed() -> tuple[torch.nn.Module, DiLoCoState]:
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
        model.register_buffer("scratch", torch.zeros(1), persistent=False)
        loop = DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.7))
        return model, DiLoCoState(loop, WorkerState(StreamCursor(4)))

    model, state = make_normed()
    model(torch.rand(4, 3))
    mean = model[1].running_mean.clone()  # type: ignore[index, union-attr, operator]
    with DirectoryCheckpointer() as checkpointer:
        checkpointer.save(state.parts(), tmp_path / "a.ckpt")
        other, again = make_normed()
        with checkpointer.load(tmp_path / "a.ckpt") as opened:
            again.load(opened)
            assert opened.load("worker", rank=0)["buffers"].keys() == {
                "1.running_mean",
                "1.running_var",
                "1.num_batches_tracked",
            }
    assert mean.any()
    assert torch.equal(other[1].running_mean, mean)  # type: ignore[index, union-attr, arg-type]


def test_a_checkpoint_without_buffers_loads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    loop, own = DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.7)), WorkerState(StreamCursor(4))
    with DirectoryCheckpointer() as checkpointer:
        checkpointer.save(DiLoCoState(loop, own, buffers=dict).parts(), tmp_path / "a.ckpt")
        with checkpointer.load(tmp_path / "a.ckpt") as opened:
            DiLoCoState(loop, own).load(opened)
    assert "has nothing of the buffer 1.running_mean" in caplog.text


@pytest.mark.parametrize(("worker", "workers", "read"), [(2, 3, [2]), (1, 2, [1]), (3, 4, [0]), (4, 5, [0, 1])])
def test_a_worker_reads_its_own_state_and_the_places_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worker: int, workers: int, read: list[int]
) -> None:
    def make(worker: int, workers: int) -> tuple[torch.optim.Optimizer, StreamCursor, DiLoCoState]:
        model = torch.nn.Linear(3, 2)
        inner = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
        cursor = StreamCursor(6, worker=worker, workers=workers, batches=4)
        loop = DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.7))
        return inner, cursor, DiLoCoState(loop, WorkerState(cursor, inner=inner))

    path = str(tmp_path / "a.ckpt")
    saves = SeparateSaves(tmp_path)
    saves.begin(path, "1")
    reports, moments = [], []
    for rank in range(3):
        inner, cursor, state = make(rank, 3)
        for _ in cursor.take(1 + rank):
            for parameter in inner.param_groups[0]["params"]:
                parameter.grad = torch.full_like(parameter, 1.0 + rank)
            inner.step()
        moments.append(inner.state_dict()["state"][0]["momentum_buffer"])
        torch.manual_seed(rank)
        where = {"rank": rank, "world_size": 3, "suffix": f"-{rank}", "local": None}
        reports.append(saves.write(state.parts(), path, "1", **where))  # type: ignore[arg-type]
    saves.commit(reports, path, "1", metadata={})

    loaded: list[int] = []
    load = DirectoryCheckpoint.load

    def note(opened: DirectoryCheckpoint, part: str, **options: Any) -> Any:
        loaded.extend([options["rank"]] if part == "worker" else [])
        return load(opened, part, **options)

    monkeypatch.setattr(DirectoryCheckpoint, "load", note)
    inner, cursor, state = make(worker, workers)
    with DirectoryCheckpointer() as checkpointer, checkpointer.load(path) as opened:
        state.load(opened)
    assert loaded == read
    assert torch.equal(inner.state_dict()["state"][0]["momentum_buffer"], moments[worker % 3])
    used = {0: 1, 1: 1, 4: 1, 2: 2, 5: 1, 3: 0}
    assert cursor.position == {stream: used[stream] for stream in range(worker, 6, workers)}
