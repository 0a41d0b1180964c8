"""Which checkpoint Accelerate and the Trainer resume from, and what happens to damaged ones."""

from __future__ import annotations

import importlib
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration

from accelerate_ckpt import attach
from accelerate_ckpt._state.session import close_sessions, session_of
from ckpt_core import CheckpointCorruptedError, CheckpointNotFoundError

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


def begin(folder: Path, **options: Any) -> Accelerator:
    limit = options.pop("total_limit", None)
    project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=limit)
    accelerator = attach(Accelerator(project_config=project), strategy="sync", **options)
    model = torch.nn.Linear(2, 2)
    accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    return accelerator


def damage(path: Path) -> bytes:
    data = bytearray((path / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "model.safetensors").unlink()  # a new file: other checkpoints may share the old one
    (path / "model.safetensors").write_bytes(data)
    return bytes(data)


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder), key=lambda name: (len(name), name))


@pytest.mark.parametrize("options", [{"total_limit": 2}, {"retention": "latest=2"}], ids=["total_limit", "retention"])
def test_a_damaged_checkpoint_that_was_passed_over_neither_counts_nor_goes(
    options: dict[str, Any], tmp_path: Path
) -> None:
    saved = tmp_path / "checkpoints"
    accelerator = begin(tmp_path)
    for _ in range(3):
        accelerator.save_state()
    data = damage(saved / "checkpoint_2")
    accelerator = begin(tmp_path, **options)
    accelerator.load_state()
    accelerator.save_state()
    assert names(saved) == ["checkpoint_1", "checkpoint_2", "checkpoint_3"]
    for _ in range(3):
        accelerator.save_state()
    assert names(saved) == ["checkpoint_2", "checkpoint_5", "checkpoint_6"]
    assert (saved / "checkpoint_2" / "model.safetensors").read_bytes() == data


def test_where_none_verifies_nothing_starts_from_scratch(tmp_path: Path) -> None:
    accelerator = begin(tmp_path)
    for path in [Path(accelerator.save_state()) for _ in range(2)]:
        damage(path)
    with pytest.raises(CheckpointCorruptedError, match="2 do not verify, such as checkpoint_1") as caught:
        begin(tmp_path, total_limit=1).load_state()
    # Scripts interpret these two as a first start.
    assert not isinstance(caught.value, (CheckpointNotFoundError, ValueError))
    assert names(tmp_path / "checkpoints") == ["checkpoint_0", "checkpoint_1"]


def test_an_empty_directory_and_what_is_no_checkpoint_are_nothing(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "logs_99").mkdir(parents=True)
    with pytest.raises(CheckpointNotFoundError):
        begin(tmp_path).load_state()


# ---- the Trainer -----------------------------------------------------------------------------------------------------


def steps_of(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("checkpoint-")) for path in folder.glob("checkpoint-*"))


def test_the_trainer_deletes_the_oldest_of_a_copy_and_keeps_what_it_passed_over(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    helpers = importlib.import_module("tests.accelerate_ckpt.test_transformers")
    saved = tmp_path / "saved"
    with pytest.raises(helpers.StopError):
        trainer = helpers.trainer_for(saved, strategy="sync", save_steps=2)
        trainer.add_callback(helpers.StopAfter(11))
        trainer.train()
    assert steps_of(saved) == [2, 4, 6, 8, 10]
    data = damage(saved / "checkpoint-10")
    for step in (2, 4, 6, 8, 10):  # as if copied with the largest number first
        for path in saved.glob(f"checkpoint-{step}/*"):
            os.utime(path, (2e9 - step, 2e9 - step))
    close_sessions()
    trainer = helpers.trainer_for(saved, strategy="sync", save_steps=2, save_total_limit=3)
    trainer.add_callback(helpers.StopAfter(13))
    with pytest.raises(helpers.StopError):
        trainer.train(resume_from_checkpoint=True)
    assert (saved / "checkpoint-10" / "model.safetensors").read_bytes() != data  # saved again, under the same name
    assert steps_of(saved) == [8, 10, 12]


def test_the_trainer_does_not_start_from_scratch_where_none_verifies(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    helpers = importlib.import_module("tests.accelerate_ckpt.test_transformers")
    saved = tmp_path / "saved"
    helpers.trainer_for(saved, strategy="sync", save_steps=8, max_steps=8).train()
    whole = tmp_path / "whole"
    shutil.copytree(saved, whole)
    damage(saved / "checkpoint-8")
    close_sessions()
    with pytest.raises(CheckpointCorruptedError, match="1 do not verify, such as checkpoint-8") as caught:
        helpers.trainer_for(saved, strategy="sync").train(resume_from_checkpoint=True)
    assert not isinstance(caught.value, ValueError)
    assert steps_of(saved) == [8]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["optimizer.pt", "model.safetensors", "rng_state.pth"])
def test_the_trainers_own_checkpoints_must_be_whole(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("transformers")
    helpers = importlib.import_module("tests.accelerate_ckpt.test_transformers")
    saved = tmp_path / "saved"
    helpers.trainer_for(saved, callback=False, save_steps=2, max_steps=4).train()
    assert steps_of(saved) == [2, 4]
    path = saved / "checkpoint-4" / name
    path.write_bytes(path.read_bytes()[:-30])
    trainer = helpers.trainer_for(saved, strategy="sync", max_steps=6, save_steps=100)
    trainer.train(resume_from_checkpoint=True)
    assert f"passed over the checkpoint {saved / 'checkpoint-4'}" in caplog.text
    assert trainer.state.global_step == 6


@pytest.mark.parametrize("options", [{"resume": "auto"}, {}], ids=["auto", "newest"])
def test_what_another_accelerator_is_saving_is_waited_for(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = attach(Accelerator(project_config=named(tmp_path)), strategy="async")
    model = first.prepare(torch.nn.Linear(300, 300))  # large enough to be saved in the background
    was_busy = threading.Event()
    monkeypatch.setattr(os, "fsync", lambda _: was_busy.wait() and time.sleep(0.05))
    first.save_state()
    assert session_of(first).checkpointer.is_busy  # type: ignore[union-attr]
    was_busy.set()
    second = attach(Accelerator(project_config=named(tmp_path)), **options)
    other = second.prepare(torch.nn.Linear(300, 300))
    if not options:
        with pytest.raises(ValueError, match="already exists"):  # its numbers also begin at 0
            second.save_state()
        first.save_state()
    second.load_state()
    assert torch.equal(other.weight, model.weight)


def named(folder: Path) -> ProjectConfiguration:
    return ProjectConfiguration(str(folder), automatic_checkpoint_naming=True)
