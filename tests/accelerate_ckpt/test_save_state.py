"""``save_state`` and ``load_state`` in one process: Accelerate's semantics, and what we promise beyond them."""

from __future__ import annotations

import copy
import enum
import json
import logging
import os
import random
import re
import threading
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import GradientState
from accelerate.utils import ProjectConfiguration
from safetensors import safe_open
from safetensors.torch import load_model
from torch import nn

from accelerate_ckpt import attach
from accelerate_ckpt._state import background_failures
from accelerate_ckpt._state import session as session_module
from accelerate_ckpt._state.session import session_of
from ckpt_core.cli import main
from ckpt_core.errors import (
    CheckpointError,
    SerializationError,
    StorageError,
    UnsafeCheckpointError,
)
from ckpt_core.report import read_events, totals_of
from tests.accelerate_ckpt.training import Counter, Run, Tied, assert_same, model_of
from tests.conftest import ACCELERATE
from tests.support.closing import closed_to_this_user
from tests.support.damage import flip_bit
from tests.support.optimizers import MomentumOfAnotherType
from tests.support.states import assert_same_state

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


def accelerator_of(strategy: str = "async", options: dict[str, Any] | None = None, **arguments: Any) -> Accelerator:
    # Also reset what the last Accelerator left, as in a new process.
    GradientState._reset_state()
    return attach(Accelerator(**arguments), strategy, **(options or {}))


def automatic(project: Path, **arguments: Any) -> Accelerator:
    configuration = ProjectConfiguration(str(project), automatic_checkpoint_naming=True, **arguments)
    return accelerator_of(project_config=configuration)


@pytest.mark.each_value
@pytest.mark.parametrize("strategy", ["sync", "async", "sharded"])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_run_goes_on_as_if_it_had_not_stopped(tmp_path: Path, strategy: str, accumulation: int) -> None:
    whole = Run(accelerator_of(strategy, gradient_accumulation_steps=accumulation))
    whole.train(23)
    cut = Run(accelerator_of(strategy, gradient_accumulation_steps=accumulation))
    cut.train(11, save_after=11, path=tmp_path / "saved")
    torch.rand(7), random.random()
    resumed = Run(accelerator_of(strategy, gradient_accumulation_steps=accumulation), seed=1)
    resumed.accelerator.load_state(tmp_path / "saved")
    assert_same(resumed.state(), cut.state())
    resumed.train(12)
    assert resumed.losses == whole.losses[11:]
    assert_same(resumed.state(), whole.state())


@pytest.mark.parametrize("strategy", ["async", "sharded"])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=str)
def test_state_of_an_optimizer_keeps_its_type(tmp_path: Path, strategy: str, weights: torch.dtype) -> None:
    def prepared() -> tuple[Accelerator, nn.Module, Any]:
        torch.manual_seed(1)
        accelerator = accelerator_of(strategy)
        model = nn.Linear(8, 3).to(weights)
        return accelerator, *accelerator.prepare(model, MomentumOfAnotherType(model.parameters(), lr=0.01))

    def train(accelerator: Accelerator, model: nn.Module, optimizer: Any, steps: range) -> None:
        for step in steps:
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).to(weights)
            accelerator.backward(model(x).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()

    run = prepared()
    train(*run, range(5))
    run[0].save_state(tmp_path / "saved")
    train(*run, range(5, 9))
    resumed = prepared()
    resumed[0].load_state(tmp_path / "saved")
    train(*resumed, range(5, 9))
    types = {state["momentum"].dtype for state in resumed[2].state.values()}
    assert types == {torch.bfloat16, torch.float32}
    for found, expected in zip(resumed[1:], run[1:], strict=True):
        assert_same_state(found.state_dict(), expected.state_dict())


@pytest.mark.parametrize("strategy", ["async", "sharded"])
def test_state_of_an_optimizer_lies_in_memory_as_its_parameter(tmp_path: Path, strategy: str) -> None:
    """A fused step takes for granted that both have the same memory format."""

    def prepared() -> tuple[Accelerator, nn.Module, Any]:
        torch.manual_seed(1)
        accelerator = accelerator_of(strategy)
        model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True))

    def train(accelerator: Accelerator, model: nn.Module, optimizer: Any, step: int, *, steps: bool = True) -> None:
        x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(step))
        accelerator.backward(model(x.to(memory_format=torch.channels_last)).pow(2).mean())
        if steps:
            optimizer.step()
            optimizer.zero_grad()

    run = prepared()
    train(*run, 0)
    train(*run, 1, steps=False)  # inside an accumulation window: its gradients are saved, too
    run[0].save_state(tmp_path / "saved")
    train(*run, 2)
    resumed = prepared()
    resumed[0].load_state(tmp_path / "saved")
    train(*resumed, 2)
    for found, expected in zip(resumed[1:], run[1:], strict=True):
        assert_same_state(found.state_dict(), expected.state_dict())


def test_a_load_is_in_the_event_log(tmp_path: Path) -> None:
    run = Run(accelerator_of())
    run.train(3, save_after=3, path=tmp_path / "saved")
    Run(accelerator_of("async", {"event_log": tmp_path / "log"})).accelerator.load_state(tmp_path / "saved")
    assert totals_of(read_events([str(tmp_path / "log")]))["loads"] == 1


def test_it_says_where_it_resumes_and_what_its_saves_cost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="accelerate_ckpt")
    run = Run(accelerator_of())
    run.train(3, save_after=3, path=tmp_path / "saved")
    Run(accelerator_of()).accelerator.load_state(tmp_path / "saved")
    run.accelerator.end_training()
    resumed, ended = (record.getMessage() for record in caplog.records if record.levelno == logging.INFO)
    where = rf"resuming from {re.escape(str(tmp_path))}/saved: epoch 0, batch 3, step 3"
    assert re.fullmatch(rf"{where}; \d+\.\d kB read and verified in \d\.\d s; exact", resumed)
    assert re.fullmatch(
        r"1 checkpoint saved \(\d+\.\d kB\); training stood still for \d\.\d\d s, \d+\.\d\d % of the run", ended
    )


def test_a_trigger_that_was_not_checked_yet_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(accelerator_of())
    run.accelerator.set_trigger()
    run.accelerator.save_state(tmp_path / "set")
    assert run.accelerator.check_trigger()
    run.accelerator.save_state(tmp_path / "checked")
    for name in ("checked", "set"):
        assert "set_trigger" not in caplog.text
        Run(accelerator_of()).accelerator.load_state(tmp_path / name)
    assert "this resume is not guaranteed to be exact: it was saved after set_trigger and before" in caplog.text


def test_the_command_says_where_a_checkpoint_is_and_whether_it_is_exact(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Run(accelerator_of()).train(3, save_after=3, path=tmp_path / "saved")
    assert main(["inspect", "--json", str(tmp_path / "saved")]) == 0
    card = json.loads(capsys.readouterr().out)
    assert (card["step"], card["epoch"], card["ranks"], card["exact"]) == (3, 0, 1, "yes")


def test_the_path_is_returned_as_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = Run(accelerator_of())
    returned = run.accelerator.save_state("below/saved")
    assert returned == Path("below/saved")
    monkeypatch.chdir("/")
    run.accelerator.end_training()
    assert (tmp_path / "below" / "saved").is_dir()
    assert [entry.name for entry in (tmp_path / "below").iterdir()] == ["saved"]


def test_a_local_url_is_a_local_path(tmp_path: Path) -> None:
    run = Run(accelerator_of())
    run.train(3)
    assert run.accelerator.save_state(f"file://{tmp_path}/saved") == tmp_path / "saved"
    run.accelerator.load_state(f"file://{tmp_path}/saved")
    assert run.accelerator.resumed.path == str(tmp_path / "saved")


def test_several_models_optimizers_and_objects(tmp_path: Path) -> None:
    def prepared(seed: int) -> tuple[Accelerator, list[Any]]:
        accelerator = accelerator_of()
        models = [model_of(seed), model_of(seed + 1, width=8)]
        optimizers = [torch.optim.AdamW(models[0].parameters()), torch.optim.SGD(models[1].parameters(), momentum=0.9)]
        prepared = list(accelerator.prepare(*models, *optimizers))
        objects = [Counter(seed), Counter(seed + 1)]
        accelerator.register_for_checkpointing(*objects)
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**seed)
        accelerator.scaler.scale(torch.ones(1))
        for model, optimizer in zip(prepared[:2], prepared[2:], strict=True):
            accelerator.backward(model(torch.ones(2, 4)).sum() * (seed + 1))
            optimizer.optimizer.step()
        return accelerator, [*prepared, *objects, accelerator.scaler]

    accelerator, saved = prepared(3)
    accelerator.save_state(tmp_path / "saved")
    other, loaded = prepared(5)
    other.load_state(tmp_path / "saved")
    for one, two in zip(saved, loaded, strict=True):
        assert_same(one.state_dict(), two.state_dict())
    assert [item.count for item in loaded[4:6]] == [3, 4]


def test_an_optimizer_does_not_count_the_steps_of_one_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise ranks disagree about their step when a later optimizer happens to get the same ``id``."""
    monkeypatch.setattr(session_module, "id", lambda _: 1, raising=False)
    accelerator: Any = attach(Accelerator(), strategy="sync")
    for steps, expected in [(4, 4), (1, 4), (6, 6)]:
        optimizer = accelerator.prepare(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1))
        for _ in range(steps):
            optimizer.step()
        assert session_of(accelerator).step == expected  # type: ignore[union-attr]
        accelerator.free_memory()


def test_the_first_step_of_an_optimizer_is_not_the_second_of_one_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise ranks would count the boundaries at which they raise a failure differently."""
    monkeypatch.setattr(background_failures, "id", lambda _: 1, raising=False)
    accelerator: Any = attach(Accelerator(), strategy="async")
    watch = session_of(accelerator).outcomes  # type: ignore[union-attr]
    boundaries: list[int] = []
    monkeypatch.setattr(watch, "at_boundary", lambda: boundaries.append(1))
    monkeypatch.setattr(watch, "_under_way", True)
    watch.optimizer_stepped(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1))
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    for expected in (0, 1):
        watch.optimizer_stepped(optimizer)
        assert len(boundaries) == expected


def test_a_tied_weight_is_stored_once_and_stays_tied(tmp_path: Path) -> None:
    accelerator = accelerator_of()
    model = accelerator.prepare(Tied())
    accelerator.save_state(tmp_path / "saved")
    with safe_open(tmp_path / "saved" / "model.safetensors", "pt") as file:
        assert list(file.keys()) == ["first.weight"]
    other, fresh = Tied(), accelerator_of()
    fresh.prepare(other)
    fresh.load_state(tmp_path / "saved")
    assert other.second.weight is other.first.weight
    assert torch.equal(other.first.weight, model.first.weight)


def test_stock_accelerate_and_safetensors_read_the_model(tmp_path: Path, fork_script: Any) -> None:
    accelerator = accelerator_of()
    model, tied = accelerator.prepare(model_of(7), Tied())
    accelerator.save_state(tmp_path / "saved", safe_serialization=False)
    other = Tied()
    assert load_model(other, str(tmp_path / "saved" / "model_1.safetensors")) == (set(), [])
    assert torch.equal(other.first.weight, tied.first.weight)
    script = """
        import sys, torch
        from accelerate import Accelerator
        from tests.accelerate_ckpt.training import Tied, model_of
        accelerator = Accelerator(cpu=True)
        model, tied = accelerator.prepare(model_of(1), Tied())
        accelerator.load_state(sys.argv[1])
        torch.save([model.state_dict(), tied.state_dict()], "loaded.pt")
    """
    fork_script(script, tmp_path / "saved", modules=ACCELERATE)
    loaded = torch.load(tmp_path / "loaded.pt", weights_only=True)
    assert_same([dict(state) for state in loaded], [dict(model.state_dict()), dict(tied.state_dict())])


def test_hooks_write_files_and_take_weights_away(tmp_path: Path) -> None:
    def save(models: list[Any], weights: list[Any], directory: str) -> None:
        seen.append(len(weights))
        Path(directory, "adapter").mkdir()
        torch.save(models[1].state_dict(), Path(directory, "adapter", "weights.pt"))
        Path(directory, "config.json").write_text(json.dumps({"width": 4}))
        weights.pop()

    def load(models: list[Any], directory: str) -> None:
        config = json.loads(Path(directory, "config.json").read_text())
        assert config == {"width": 4}
        models.pop().load_state_dict(torch.load(Path(directory, "adapter", "weights.pt"), weights_only=True))

    seen: list[int] = []
    accelerator = accelerator_of()
    first, second = accelerator.prepare(model_of(1), model_of(2))
    accelerator.register_save_state_pre_hook(save)
    accelerator.save_state(tmp_path / "saved")
    assert seen == [2]
    assert (tmp_path / "saved" / "model.safetensors").exists()
    assert not (tmp_path / "saved" / "model_1.safetensors").exists()
    fresh = accelerator_of()
    models = fresh.prepare(model_of(8), model_of(9))
    fresh.register_load_state_pre_hook(load)
    fresh.load_state(tmp_path / "saved")
    assert_same([dict(model.state_dict()) for model in models], [dict(m.state_dict()) for m in (first, second)])


def test_saving_again_replaces_the_checkpoint_and_keeps_other_files(tmp_path: Path) -> None:
    run = Run(accelerator_of())
    run.accelerator.save_state(tmp_path / "saved")
    (tmp_path / "saved" / "notes.txt").write_text("mine")
    run.train(3)
    run.accelerator.save_state(tmp_path / "saved")
    run.accelerator.end_training()
    assert (tmp_path / "saved" / "notes.txt").read_text() == "mine"
    fresh = Run(accelerator_of(), seed=1)
    fresh.accelerator.load_state(tmp_path / "saved")
    assert_same(fresh.state(), run.state())
    assert os.listdir(tmp_path) == ["saved"]


# ---- automatic names -------------------------------------------------------------------------------------------------


def names(project: Path) -> list[str]:
    return sorted(os.listdir(project / "checkpoints"))


def test_automatic_names_count_on_in_a_new_process(tmp_path: Path) -> None:
    run = Run(automatic(tmp_path, total_limit=2))
    for _ in range(11):
        run.accelerator.save_state()
    assert names(tmp_path) == ["checkpoint_10", "checkpoint_9"]
    assert os.listdir(tmp_path) == ["checkpoints"]  # and no file of ours
    fresh = Run(automatic(tmp_path, total_limit=2))
    fresh.accelerator.load_state()
    assert fresh.accelerator.save_iteration == 11
    assert fresh.accelerator.save_state() == tmp_path / "checkpoints" / "checkpoint_11"
    assert names(tmp_path) == ["checkpoint_10", "checkpoint_11"]


def test_after_going_back_the_next_checkpoint_is_the_newest(tmp_path: Path) -> None:
    run = Run(automatic(tmp_path))
    for _ in range(3):
        run.accelerator.save_state()
    fresh = Run(automatic(tmp_path))
    fresh.accelerator.load_state(tmp_path / "checkpoints" / "checkpoint_0")
    assert fresh.accelerator.save_state().name == "checkpoint_3"


@pytest.mark.parametrize("strategy", ["sync", "async"])
def test_a_file_is_not_replaced_by_a_checkpoint(tmp_path: Path, strategy: str) -> None:
    accelerator = attach(Accelerator(), strategy)
    accelerator.prepare(nn.Linear(2, 2))
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(FileExistsError, match="notes is a file, and a checkpoint is a directory"):
        accelerator.save_state(tmp_path / "notes")
    accelerator.save_state(tmp_path / "step_1")
    accelerator.end_training()
    assert (tmp_path / "notes").read_text() == "mine"
    assert (tmp_path / "step_1/manifest.json").exists()


@pytest.mark.parametrize("strategy", ["sync", "async"])
def test_a_link_to_a_directory_stays(tmp_path: Path, strategy: str) -> None:
    accelerator = attach(Accelerator(), strategy)
    model = accelerator.prepare(nn.Linear(1000, 1000))
    (tmp_path / "big_disk").mkdir()
    (tmp_path / "step_1").symlink_to("big_disk")
    accelerator.save_state(f"{tmp_path}/step_1/")
    assert (tmp_path / "step_1/model.safetensors").stat().st_size > 4_000_000
    weight = model.weight.detach().clone()
    nn.init.zeros_(model.weight)
    accelerator.load_state(tmp_path / "step_1")
    accelerator.end_training()
    assert torch.equal(model.weight, weight)
    assert (tmp_path / "step_1").is_symlink() and (tmp_path / "big_disk/manifest.json").exists()


def test_a_name_that_is_taken_is_refused(tmp_path: Path) -> None:
    run = Run(automatic(tmp_path))
    run.accelerator.save_state()
    with pytest.raises(ValueError, match=r"checkpoint_0 \(0\) already exists\. Please manually override"):
        Run(automatic(tmp_path)).accelerator.save_state()


def test_entries_that_are_no_checkpoints_are_left_alone(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    (checkpoints / "logs_99").mkdir(parents=True)
    (checkpoints / "LATEST").write_text("")
    (checkpoints / ".checkpoint_98.x.ckpt-part").mkdir()
    run = Run(automatic(tmp_path, total_limit=1))
    run.accelerator.save_state()
    run.accelerator.save_state()
    assert [name for name in names(tmp_path) if name.startswith("checkpoint_")] == ["checkpoint_1"]
    assert {"logs_99", "LATEST"} <= set(names(tmp_path))


def test_the_newest_that_verifies_is_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(automatic(tmp_path))
    run.accelerator.save_state()
    expected = run.state()
    run.train(2)
    run.accelerator.save_state()
    damaged = tmp_path / "checkpoints" / "checkpoint_1" / "model.safetensors"
    flip_bit(damaged, -3)
    fresh = Run(automatic(tmp_path), seed=1)
    fresh.accelerator.load_state()
    assert_same(fresh.state(), expected)
    assert "passed over the checkpoint" in caplog.text and "checkpoint_1" in caplog.text
    assert fresh.accelerator.save_iteration == 2


@pytest.mark.skipif(not hasattr(os, "seteuid"), reason="needs users")
def test_one_that_may_not_be_read_is_passed_over(anyones_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(automatic(anyones_path))
    run.accelerator.save_state()
    expected = run.state()
    run.train(2)
    run.accelerator.save_state()
    run.accelerator.load_state()  # imports modules, which another user may not be able to
    closed = anyones_path / "checkpoints" / "checkpoint_1"
    caplog.clear()
    with closed_to_this_user(closed):
        run.accelerator.load_state()
    assert_same(run.state(), expected)
    (said,) = [message for message in caplog.messages if message.startswith("passed over")]
    assert said.startswith(f"passed over the checkpoint {closed}: cannot read the checkpoint: Permission denied; took ")


def test_an_old_checkpoint_stays_if_its_successor_fails(small_filesystem: Path) -> None:
    project = small_filesystem / "project"
    accelerator = automatic(project, total_limit=1)
    model = accelerator.prepare(nn.Linear(1100, 1000))  # 4.4 MB, and only 8 fit
    accelerator.save_state()
    saved = model.weight.detach().clone()
    nn.init.zeros_(model.weight)  # unchanged weights would not be written again
    accelerator.save_state()
    with pytest.raises(CheckpointError, match="No space left"):
        accelerator.end_training()
    assert names(project) == ["checkpoint_0"]
    fresh = automatic(project)
    loaded = fresh.prepare(nn.Linear(1100, 1000))
    fresh.load_state()
    assert torch.equal(loaded.weight, saved)


def fail_in_the_background(filesystem: Path, **options: Any) -> tuple[Run, Path]:
    """Return a run whose background save has failed because the disk was full; it has space again."""
    filler = filesystem / "filler"
    filler.write_bytes(bytes(6 * 2**20))
    run = Run(accelerator_of(options=options), width=40_000)  # 4 MB with AdamW's moments
    run.train(1)
    run.accelerator.save_state(filesystem / "saved")
    session = session_of(run.accelerator)
    assert session is not None
    session.checkpointer.drain()
    filler.unlink()
    return run, filesystem / "saved"


@pytest.mark.parametrize("max_pending", [1, 2])
def test_a_failure_in_the_background_is_raised_by_the_next_save(small_filesystem: Path, max_pending: int) -> None:
    run, saved = fail_in_the_background(small_filesystem, max_pending=max_pending)
    with pytest.raises(StorageError, match="No space left"):
        run.accelerator.save_state(saved)
    run.accelerator.save_state(saved)
    run.accelerator.end_training()
    assert saved.is_dir()


def test_a_failure_in_the_background_is_raised_by_a_step(small_filesystem: Path) -> None:
    run, _ = fail_in_the_background(small_filesystem)
    with pytest.raises(StorageError, match="No space left"):
        run.train(200)
    assert len(run.losses) < 200
    run.train(1)
    run.accelerator.end_training()


def test_a_failure_in_the_background_may_only_be_counted(small_filesystem: Path) -> None:
    (small_filesystem / "filler").write_bytes(bytes(6 * 2**20))
    run = Run(accelerator_of(options={"on_error": "warn"}), width=40_000)
    run.train(1)
    run.accelerator.save_state(small_filesystem / "saved")
    run.train(8)
    run.accelerator.end_training()
    assert not (small_filesystem / "saved").exists()


# ---- accumulation windows --------------------------------------------------------------------------------------------


def test_a_save_inside_a_window_can_wait_for_its_end(tmp_path: Path) -> None:
    whole = Run(accelerator_of(gradient_accumulation_steps=4))
    whole.train(20)
    cut = Run(accelerator_of(options={"mid_accumulation": "defer"}, gradient_accumulation_steps=4))
    cut.train(6, save_after=2, path=tmp_path / "saved")
    assert (tmp_path / "saved").exists()
    resumed = Run(accelerator_of(gradient_accumulation_steps=4), seed=1)
    resumed.accelerator.load_state(tmp_path / "saved")
    assert resumed.accelerator.step == 4
    resumed.train(16)
    assert resumed.losses == whole.losses[4:]
    assert_same(resumed.state(), whole.state())


def test_a_save_that_waits_keeps_its_automatic_name(tmp_path: Path) -> None:
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
    waits = {"mid_accumulation": "defer"}
    run = Run(accelerator_of(options=waits, project_config=project, gradient_accumulation_steps=4))
    assert run.train(6, save_after=2, path=None).accelerator.save_iteration == 1
    assert names(tmp_path) == ["checkpoint_0"]
    fresh = Run(automatic(tmp_path, iteration=0))
    fresh.accelerator.load_state()
    assert fresh.accelerator.save_iteration == 1


def test_a_save_that_waits_is_not_there_yet(tmp_path: Path) -> None:
    cut = Run(accelerator_of(options={"mid_accumulation": "defer"}, gradient_accumulation_steps=4))
    cut.train(7, save_after=5, path=tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_a_save_inside_a_window_can_be_refused(tmp_path: Path) -> None:
    cut = Run(accelerator_of(options={"mid_accumulation": "error"}, gradient_accumulation_steps=4))
    cut.train(4, save_after=4, path=tmp_path / "allowed")
    with pytest.raises(CheckpointError, match="inside a window of gradient accumulation"):
        cut.train(1, save_after=1, path=tmp_path / "refused")
    assert not (tmp_path / "refused").exists()


class Adversaries:
    """A GAN: the generator's loss leaves gradients in the discriminator, which zeroes its own after its step."""

    def __init__(self, seed: int = 0) -> None:
        self.accelerator = accelerator_of("sync")
        torch.manual_seed(seed)
        models = [nn.Linear(2, 3), nn.Linear(3, 1)]
        optimizers = [torch.optim.Adam(model.parameters(), 0.1) for model in models]
        self.made, self.judge, *self.optimizers = self.accelerator.prepare(*models, *optimizers)

    def train(self, steps: range) -> list[list[float]]:
        """Return the weights after each step."""
        seen = []
        for step in steps:
            made = self.made(torch.linspace(-1, 1, 8).view(4, 2) * step)
            for optimizer, real in zip(self.optimizers[::-1], (made.detach(), made), strict=True):
                self.accelerator.backward(self.judge(real).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            seen.append([float(p.detach().sum()) for model in (self.made, self.judge) for p in model.parameters()])
        return seen


def test_gradients_that_another_loss_has_left_come_back(tmp_path: Path) -> None:
    whole = Adversaries().train(range(1, 8))
    cut = Adversaries()
    cut.train(range(1, 4))
    cut.accelerator.save_state(tmp_path / "saved")
    for name in ("saved", "saved again"):
        resumed = Adversaries(seed=1)
        resumed.accelerator.load_state(tmp_path / name)
        resumed.accelerator.save_state(tmp_path / "saved again")
        assert resumed.train(range(4, 8)) == whole[3:]


def test_gradients_that_a_step_has_used_are_not_saved(tmp_path: Path) -> None:
    run = Adversaries()
    for _ in range(2):
        run.accelerator.backward(run.judge(run.made(torch.ones(4, 2))).sum())
        for optimizer in run.optimizers:
            optimizer.step()
    assert all(parameter.grad is not None for parameter in run.judge.parameters())
    session = session_of(run.accelerator)
    assert session is not None and session.open_gradients(copies=False) is None


# ---- URLs ------------------------------------------------------------------------------------------------------------


def test_a_url_is_no_local_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    url = "memory://bucket/run/saved"
    run = Run(accelerator_of())
    run.train(3)
    assert run.accelerator.save_state(url) == url
    run.accelerator.end_training()
    assert os.listdir(tmp_path) == []
    assert fsspec.filesystem("memory").exists("/bucket/run/saved/model.safetensors")
    fresh = Run(accelerator_of(), seed=1)
    fresh.accelerator.load_state(url)
    assert_same(fresh.state(), run.state())


# ---- nothing is pickled ----------------------------------------------------------------------------------------------


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"inner": {"value": self.value}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["inner"]["value"]


class Mode(enum.Enum):
    FAST = 1


def test_an_object_that_is_not_plain_data_is_saved_and_loaded_where_that_is_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, holder = Run(accelerator_of()), Holder(Mode.FAST)
    run.accelerator.register_for_checkpointing(holder)
    run.train(2)
    run.accelerator.save_state(tmp_path / "saved")
    run.accelerator.end_training()
    assert "custom_0.inner.value: tests.accelerate_ckpt.test_save_state.Mode" in caplog.text
    expected = copy.deepcopy(run.state())
    run.train(1)
    trained = copy.deepcopy(run.state())
    holder.value = None
    with pytest.raises(UnsafeCheckpointError, match="allow_pickle=True") as caught:
        run.accelerator.load_state(tmp_path / "saved")
    assert caught.value.key == "custom_0"
    assert_same(run.state(), trained)
    run.accelerator.load_state(tmp_path / "saved", load_kwargs={"weights_only": False})
    assert holder.value is Mode.FAST
    assert_same(run.state(), expected)


def test_an_object_that_pickle_refuses_is_refused_by_name(tmp_path: Path) -> None:
    run = Run(accelerator_of())
    run.accelerator.register_for_checkpointing(Holder(1), Holder(threading.Lock()))
    with pytest.raises(SerializationError, match=r"object 1 given to register_for_checkpointing \(Holder\)") as caught:
        run.accelerator.save_state(tmp_path / "saved")
    assert caught.value.key == "custom_1.inner.value"
    assert not (tmp_path / "saved").exists()
    run.accelerator._custom_objects.pop()
    run.accelerator.save_state(tmp_path / "saved")
    assert (tmp_path / "saved").exists()


def test_automatic_names_at_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def prepared() -> Run:
        project = ProjectConfiguration("memory://bucket/project", automatic_checkpoint_naming=True, total_limit=2)
        return Run(accelerator_of(project_config=project))

    run = prepared()
    for _ in range(4):
        run.train(1)
        run.accelerator.save_state()
    run.accelerator.end_training()
    fresh = prepared()
    fresh.accelerator.load_state()
    assert_same(fresh.state(), run.state())
    assert fresh.accelerator.save_state() == "memory://bucket/project/checkpoints/checkpoint_4"
    fresh.accelerator.end_training()
    left = {path.split("/")[-2] for path in fsspec.filesystem("memory").glob("/bucket/project/checkpoints/*/*")}
    assert left == {"checkpoint_3", "checkpoint_4"}
    assert os.listdir(tmp_path) == []


def test_hooks_find_their_files_also_at_a_url(tmp_path: Path) -> None:
    def save(models: list[Any], weights: list[Any], directory: str) -> None:
        Path(directory, "adapter").mkdir()
        Path(directory, "adapter", "config.json").write_text(str(len(weights)))

    def load(models: list[Any], directory: str) -> None:
        found.append(Path(directory, "adapter", "config.json").read_text())

    found: list[str] = []
    run = Run(accelerator_of())
    run.accelerator.register_save_state_pre_hook(save)
    run.accelerator.register_load_state_pre_hook(load)
    run.accelerator.save_state("memory://bucket/hooks/saved")
    run.accelerator.load_state("memory://bucket/hooks/saved")
    assert found == ["1"]
