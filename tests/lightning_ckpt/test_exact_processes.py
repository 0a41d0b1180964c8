"""Exact resume in fresh processes: one is killed right after its save is on disk, another resumes with another seed."""

from __future__ import annotations

import dataclasses
import functools
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_ckpt._exact.state import ExactState
from tests.support.fork_server import LIGHTNING, ForkServers
from tests.support.ports import free_port
from tests.support.script_server import ScriptServer

SCRIPT = Path(__file__).with_name("exact_script.py")
ROOT = Path(__file__).resolve().parents[2]
BATCHES = 8


@dataclasses.dataclass(frozen=True)
class Case:
    """What to train and where to kill it (see ``exact_script.py``)."""

    hook: str
    count: int
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    trainer: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return int(self.trainer.get("devices", 1))


DDP = {"devices": 2, "strategy": "ddp"}
CASES = {
    "plain": Case("on_train_batch_end", BATCHES + 3),
    "workers, accumulation": Case("on_train_batch_end", BATCHES + 2, {"workers": 2}, {"accumulate_grad_batches": 3}),
    "stateful, workers": Case("on_train_batch_end", BATCHES, {"loader": "stateful", "workers": 2}),
    "stateful stream, workers": Case("on_train_batch_end", 5, {"loader": "stateful_stream", "workers": 2}),
    "stream, workers": Case("on_train_batch_end", 3, {"loader": "stream", "workers": 2}),
    "inside validation": Case("on_validation_batch_end", 5, {"val": True}, {"val_check_interval": 3}),
    "max_steps, epoch end": Case("on_train_epoch_end", 1, {}, {"max_steps": 19, "max_epochs": -1}),
    "two ranks, workers, accumulation": Case(
        "on_train_batch_end", 6, {"workers": 2}, {**DDP, "accumulate_grad_batches": 4}
    ),
    "two ranks, stateful, validation end": Case(
        "on_validation_end", 2, {"loader": "stateful", "val": True}, {**DDP, "val_check_interval": 3}
    ),
    "two ranks, sampler of the user, epoch end": Case(
        "on_train_epoch_end", 2, {"loader": "stateful_distributed", "workers": 2}, DDP
    ),
}
# each rank has its own statistics until DDP exchanges gradients again
CASES["two ranks, statistics, accumulation"] = Case(
    "on_train_batch_end", 6, {"statistics": True}, {**DDP, "accumulate_grad_batches": 4}
)
THREE = {"devices": 3, "strategy": "ddp", "accumulate_grad_batches": 2}
CASES["three ranks"] = Case("on_train_batch_end", 3, {"wide": True}, THREE)
# our own plugins, too, with one process and with several
RUNS = [
    *((name, "stock") for name in CASES),
    *(
        # one of our plugins is enough in CI
        pytest.param(name, f"lightning_ckpt.io:{io}CheckpointIO", marks=[pytest.mark.slow] if io == "Sync" else [])
        for name in ("plain", "two ranks, workers, accumulation")
        for io in ("Sync", "Async")
    ),
]


class Zygote(ScriptServer):
    """A clean process that forks the training processes."""

    def run(self, directory: Path, name: str, case: Case, **spec: Any) -> tuple[list[int], list[Any]]:
        """Train; return the exit status of each rank and what it wrote."""
        port = free_port()
        whole = {
            "options": case.options,
            "trainer": case.trainer,
            "ranks": case.ranks,
            "seed": 1,
            "save": None,
            "kill": False,
            "checkpoint": str(directory / "unused.ckpt"),
            "resume": False,
            "result": str(directory / name),
            "port": port,
            **spec,
        }
        statuses = self.ask(whole)
        results = []
        for rank, status in enumerate(statuses):
            if status > 0:
                pytest.fail((directory / f"{name}.{rank}.log").read_text())
            written = directory / f"{name}.{rank}.json"
            results.append(json.loads(written.read_text()) if written.exists() else None)
        return statuses, results


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory, fork_servers: ForkServers) -> Iterator[Zygote]:
    started = Zygote(fork_servers(LIGHTNING), SCRIPT, tmp_path_factory.mktemp("zygote"))
    yield started
    started.close()


@pytest.fixture(scope="module")
def whole(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Any]]:
    """Return a function that runs a case without a kill; its results do not depend on the plugin that saves."""

    @functools.cache
    def run(name: str) -> list[Any]:
        case = CASES[name]
        return zygote.run(tmp_path_factory.mktemp("whole"), "whole", case, save=[case.hook, case.count], io="stock")[1]

    return run


@pytest.mark.sampled(2)
@pytest.mark.extended_cells(
    "workers, accumulation-stock",
    "two ranks, statistics, accumulation-stock",
    "plain-stock",
    "stateful, workers-stock",
    "stateful stream, workers-stock",
    "stream, workers-stock",
    "inside validation-stock",
    "max_steps, epoch end-stock",
    "two ranks, sampler of the user, epoch end-stock",
    "two ranks, workers, accumulation-stock",
)
@pytest.mark.parametrize(("name", "io"), RUNS)
def test_killed_run_goes_on(
    zygote: Zygote, whole: Callable[[str], list[Any]], tmp_path: Path, name: str, io: str
) -> None:
    case, expected = CASES[name], whole(name)
    save, saved = [case.hook, case.count], str(tmp_path / "killed.ckpt")
    statuses, results = zygote.run(tmp_path, "killed", case, save=save, kill=True, checkpoint=saved, io=io)
    assert statuses == [-signal.SIGKILL] * case.ranks and results == [None] * case.ranks
    _, found = zygote.run(tmp_path, "resumed", case, resume=True, seed=77, checkpoint=saved, io=io)
    for rank in range(case.ranks):
        assert found[rank]["warnings"] == []
        assert found[rank]["whole"] == expected[rank]["after_save"], f"rank {rank}"


@pytest.mark.parametrize(
    ("gradients", "takes", "automatic", "is_saved"),
    [
        ({}, False, True, False),
        ({"w": 1}, False, True, True),
        ({"w": 1}, True, True, False),
        ({}, False, False, True),
        ({}, True, False, False),
    ],
)
def test_a_rank_of_ddp_saves_its_buffers_only_where_they_may_be_others(
    gradients: Any, takes: bool, automatic: bool, is_saved: bool
) -> None:
    # also after a validation, torch says that the next pass does not take over rank 0's buffers
    model = SimpleNamespace(broadcast_buffers=True, require_forward_param_sync=takes)
    module = torch.nn.BatchNorm1d(2)
    module.automatic_optimization = automatic
    trainer = SimpleNamespace(strategy=SimpleNamespace(model=model), lightning_module=module, is_global_zero=False)
    found = ExactState._own_buffers(SimpleNamespace(_trainer=trainer), gradients)  # type: ignore[arg-type]
    assert ("running_mean" in found) == is_saved
