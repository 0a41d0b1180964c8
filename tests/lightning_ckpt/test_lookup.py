"""``ckpt_path="last"`` and ``"best"``: which file is taken, also in a fresh process, and what if there is none."""

from __future__ import annotations

import io
import json
import logging
import os
import shutil
import signal
import subprocess
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from ckpt_core import CheckpointCorruptedError, Checkpointer, Tiers
from ckpt_core.policies import KeepLatest
from ckpt_core.resume import ResumeAttempts
from lightning_ckpt import AsyncCheckpointIO, ResumableCheckpoint, ShardedCheckpointIO, SyncCheckpointIO
from lightning_ckpt._callbacks.lookup import Lookup
from tests.conftest import LIGHTNING
from tests.lightning_ckpt.reliable_cases import BATCHES, NUMBERS, model_of, names, trainer_of
from tests.support.damage import flip_bit

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),
]

PLUGINS = [SyncCheckpointIO, AsyncCheckpointIO]
LOSSES = (5.0, 3.0, 1.0, 2.0, 4.0, 6.0)  # the third is the best


def callback_of(directory: Any, **options: Any) -> ResumableCheckpoint:
    settings = {"every_n_train_steps": 1, "save_top_k": -1, "filename": "{step}", **options}
    return ResumableCheckpoint(directory, **settings)


def fit(directory: Any, folder: Path, *, plugin: Any = AsyncCheckpointIO, **options: Any) -> Any:
    trainer_options = {name: options.pop(name) for name in ("max_epochs", "max_steps") if name in options}
    resume = options.pop("ckpt_path", None)
    callback = callback_of(directory, **options)
    trainer = trainer_of(folder, [callback], plugins=[plugin()], **{"max_epochs": 1, **trainer_options})
    trainer.fit(model_of(metrics=LOSSES), ckpt_path=resume)
    return trainer


def set_times(directory: Path, *order: str) -> None:
    """Set the modification times of files; the first is the oldest."""
    for seconds, name in enumerate(order):
        os.utime(directory / name, (1e9 + seconds, 1e9 + seconds))


def passed_over(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING and record.name.split(".")[0] in ("ckpt_core", "lightning_ckpt")
    ]


def steps_after(trainer: Any) -> int:
    """Return how many steps a run did itself."""
    return int(trainer.model.batches)


# ---- last
# -------------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("newest", ["step=2.ckpt", "last.ckpt", "anything.ckpt"])
def test_the_date_of_a_file_does_not_make_it_the_last(newest: str, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    fit(saved, tmp_path, max_steps=3)
    shutil.copyfile(saved / "step=1.ckpt", saved / "last.ckpt")
    shutil.copyfile(saved / "step=1.ckpt", saved / "anything.ckpt")
    set_times(saved, *sorted(names(saved), key=lambda name: name == newest))
    trainer = fit(saved, tmp_path, ckpt_path="last")
    assert trainer.ckpt_path == str(saved / "step=3.ckpt")
    assert steps_after(trainer) == BATCHES - 3
    assert torch.equal(trainer.model.weight, torch.full((NUMBERS,), float(BATCHES)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("save_last", [False, True, "link"])
@pytest.mark.parametrize("plugin", [*PLUGINS, ShardedCheckpointIO, TorchCheckpointIO])
def test_a_run_that_was_copied_file_by_file_is_resumed_where_it_was(
    plugin: Any, save_last: Any, tmp_path: Path
) -> None:
    saved, copy, options = tmp_path / "saved", tmp_path / "copy", {"plugin": plugin, "save_last": save_last}
    fit(saved, tmp_path, max_epochs=2, max_steps=10, **options)
    for number, reverse in enumerate((False, True)):
        target = copy / str(number)
        target.mkdir(parents=True)
        for name in sorted(names(saved), reverse=reverse):
            subprocess.run(["cp", "-r", saved / name, target], check=True)
        trainer = fit(target, tmp_path, max_epochs=2, max_steps=11, ckpt_path="last", **options)
        assert steps_after(trainer) == 1
        assert trainer.global_step == 11


@pytest.mark.sampled(1)
@pytest.mark.parametrize("plugin", [*PLUGINS, ShardedCheckpointIO])
def test_of_a_checkpoint_and_its_copy_the_copy_is_taken(plugin: Any, tmp_path: Path) -> None:
    saved, options = tmp_path / "saved", {"plugin": plugin, "filename": "x", "save_last": True, "save_top_k": 1}
    fit(saved, tmp_path, max_steps=1, **options)
    assert names(saved) == ["last.ckpt", "x.ckpt"]
    trainer = fit(saved, tmp_path, max_steps=3, ckpt_path="last", **options)
    assert trainer.ckpt_path == str(saved / "last.ckpt")
    assert "last-v1.ckpt" not in names(saved)


def test_what_was_passed_over_is_neither_deleted_nor_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved, options = tmp_path / "saved", {"save_last": True, "retention": KeepLatest(2)}
    fit(saved, tmp_path, max_steps=3, **options)
    flip_bit(saved / "step=3.ckpt")  # and in last.ckpt, which is the same file
    damaged = (saved / "step=3.ckpt").read_bytes()
    trainer = fit(saved, tmp_path, ckpt_path="last", **options)
    assert steps_after(trainer) == BATCHES - 2
    assert names(saved) == [
        "last-v1.ckpt",
        "last.ckpt",
        "step=2.ckpt",
        "step=3.ckpt",
        f"step={BATCHES - 1}.ckpt",
        f"step={BATCHES}.ckpt",
    ]
    assert (saved / "step=3.ckpt").read_bytes() == (saved / "last.ckpt").read_bytes() == damaged
    caplog.clear()
    assert fit(saved, tmp_path, ckpt_path="last", **options).global_step == BATCHES
    assert passed_over(caplog) == []


def test_of_two_callbacks_the_one_that_saved_last_is_taken(tmp_path: Path) -> None:
    fit(tmp_path / "a", tmp_path, max_steps=2)
    fit(tmp_path / "b", tmp_path, max_steps=3)
    for path, date in ((tmp_path / "a", 2e9), (tmp_path / "b", 1e9)):
        for file in path.iterdir():
            os.utime(file, (date, date))
    callbacks = [callback_of(tmp_path / "a"), callback_of(tmp_path / "b", every_n_train_steps=2)]
    trainer = trainer_of(tmp_path, callbacks, plugins=[SyncCheckpointIO()], max_epochs=1)
    trainer.fit(model_of(), ckpt_path="last")
    assert trainer.ckpt_path == str(tmp_path / "b" / "step=3.ckpt")


@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_file_with_two_names_is_taken_by_the_last_so_that_the_other_can_go(plugin: Any, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    options = {"save_top_k": 1, "save_last": True, "plugin": plugin}
    fit(saved, tmp_path, max_steps=3, **options)
    assert os.path.samefile(saved / "step=3.ckpt", saved / "last.ckpt")
    trainer = fit(saved, tmp_path, ckpt_path="last", **options)
    assert trainer.ckpt_path == str(saved / "last.ckpt")
    assert names(saved) == ["last.ckpt", f"step={BATCHES}.ckpt"]


def test_a_damaged_newest_is_passed_over_with_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved = tmp_path / "saved"
    fit(saved, tmp_path, max_steps=3)
    flip_bit(saved / "step=3.ckpt")
    set_times(saved, "step=1.ckpt", "step=2.ckpt", "step=3.ckpt")
    trainer = fit(saved, tmp_path, ckpt_path="last")
    assert steps_after(trainer) == BATCHES - 2
    told = passed_over(caplog)
    assert len(told) == 1
    assert f"passed over the checkpoint {saved / 'step=3.ckpt'}" in told[0]


def test_nothing_is_told_when_all_is_well(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path / "saved", tmp_path, max_steps=3, monitor="loss", save_last=True)
    fit(tmp_path / "saved", tmp_path, ckpt_path="last", monitor="loss", save_last=True)
    trainer = trainer_of(tmp_path, [callback_of(tmp_path / "saved", monitor="loss")], limit_val_batches=1)
    trainer.validate(model_of(), ckpt_path="best", verbose=False)
    assert passed_over(caplog) == []


def test_bare_weights_are_not_resumed_from(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    fit(saved, tmp_path, max_steps=2)
    fit(saved, tmp_path, max_steps=4, save_weights_only=True, every_n_train_steps=4, filename="weights")
    torch.save(model_of().state_dict(), saved / "bare.ckpt")
    set_times(saved, "step=1.ckpt", "step=2.ckpt", "weights.ckpt", "bare.ckpt")
    trainer = fit(saved, tmp_path, ckpt_path="last")
    assert trainer.ckpt_path == str(saved / "step=2.ckpt")
    assert steps_after(trainer) == BATCHES - 2


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside weights"])
def test_when_none_verifies_nothing_starts_from_scratch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, beside: bool
) -> None:
    saved = tmp_path / "saved"
    fit(saved, tmp_path, max_steps=2)
    for path in saved.iterdir():
        flip_bit(path)
    if beside:
        fit(saved, tmp_path, max_steps=4, save_weights_only=True, every_n_train_steps=4, filename="weights")
    before = names(saved)
    with pytest.raises(CheckpointCorruptedError) as caught:
        fit(saved, tmp_path, ckpt_path="last")
    assert caught.value.path == str(saved)
    assert "2 do not verify" in str(caught.value)
    assert "to start from scratch" in str(caught.value)
    assert names(saved) == before
    assert len(passed_over(caplog)) == 2


@pytest.mark.parametrize("exists", [False, True])
def test_an_empty_directory_is_a_start_from_scratch(tmp_path: Path, exists: bool) -> None:
    if exists:
        (tmp_path / "saved").mkdir()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = fit(tmp_path / "saved", tmp_path, ckpt_path="last")
        assert not [each for each in warnings.filters if "last checkpoint" in str(each[1])]
    assert steps_after(trainer) == BATCHES
    # Lightning's own warning asks for save_last=True, whether it is set or not
    assert not [each for each in caught if "no last checkpoint" in str(each.message)]


def test_without_a_directory_of_its_own(tmp_path: Path) -> None:
    """Without a logger, checkpoints are in ``checkpoints`` of the Trainer's root directory."""
    fit(None, tmp_path, max_steps=2)
    assert names(tmp_path / "checkpoints") == ["step=1.ckpt", "step=2.ckpt"]
    trainer = fit(None, tmp_path, ckpt_path="last")
    assert trainer.ckpt_path == str(tmp_path / "checkpoints" / "step=2.ckpt")
    assert steps_after(trainer) == BATCHES - 2


SCRIPT = """
import json, os, signal, sys
from pathlib import Path
from ckpt_core.checkpointer import Checkpointer
from tests.lightning_ckpt.test_lookup import callback_of, fit, steps_after
from tests.lightning_ckpt.reliable_cases import model_of, trainer_of

if sys.argv[1] == "kill":
    original = Checkpointer.copy

    def copy(self, source, target):
        if "step=3" in str(source):
            self.drain()
            os.kill(os.getpid(), signal.SIGKILL)
        original(self, source, target)

    Checkpointer.copy = copy
    fit("saved", Path.cwd(), save_last=True)
else:
    trainer = fit("saved", Path.cwd(), save_last=True, ckpt_path="last")
    fresh = trainer_of(Path.cwd(), [callback_of("saved", monitor=None)], limit_val_batches=1)
    fresh.validate(model_of(), ckpt_path="best", verbose=False)
    print(json.dumps([trainer.ckpt_path, steps_after(trainer), fresh.ckpt_path, float(fresh.model.weight[0])]))
"""


def test_a_kill_between_a_save_and_its_second_name(tmp_path: Path, fork_script: Any) -> None:
    killed = fork_script(SCRIPT, "kill", modules=LIGHTNING, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    saved = tmp_path / "saved"
    assert names(saved) == ["last.ckpt", "step=1.ckpt", "step=2.ckpt", "step=3.ckpt"]
    assert torch.load(saved / "last.ckpt")["global_step"] == 2
    done = fork_script(SCRIPT, "go on", modules=LIGHTNING)
    resumed, steps, best, weight = json.loads(done.stdout.splitlines()[-1])
    assert resumed == str(saved / "step=3.ckpt")
    assert steps == BATCHES - 3
    assert weight == BATCHES
    assert best in (str(saved / f"step={BATCHES}.ckpt"), str(saved / "last.ckpt"))
    assert "last-v1.ckpt" not in names(saved)
    assert torch.load(saved / "last.ckpt")["global_step"] == BATCHES


# ---- best
# -------------------------------------------------------------------------------------------------------------


MONITORED = {"monitor": "loss", "save_top_k": -1}


def evaluate(trainer: Any, stage: str) -> Any:
    if stage == "fit":
        trainer.fit(model_of(metrics=LOSSES), ckpt_path="best")
    else:
        getattr(trainer, stage)(model_of(), ckpt_path="best", verbose=False)
    return trainer


def fresh(directory: Any, folder: Path, **options: Any) -> Any:
    return trainer_of(
        folder,
        [callback_of(directory, **options)],
        plugins=[AsyncCheckpointIO()],
        limit_val_batches=1,
        max_epochs=1,
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stage", ["fit", "validate", "test"])
@pytest.mark.parametrize(("options", "step"), [(MONITORED, 3), ({}, 6)], ids=["monitor", "no monitor"])
def test_the_best_in_a_trainer_that_has_not_trained(
    stage: str, options: dict[str, Any], step: int, tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    fit(saved, tmp_path, **options)
    trainer = evaluate(fresh(saved, tmp_path, **options), stage)
    assert trainer.ckpt_path == str(saved / f"step={step}.ckpt")
    if stage == "fit":
        assert steps_after(trainer) == BATCHES - step
    else:
        assert torch.equal(trainer.model.weight, torch.full((NUMBERS,), float(step)))


def test_the_best_of_the_run_itself(tmp_path: Path) -> None:
    trainer = fit(tmp_path / "saved", tmp_path, **MONITORED)
    trainer.test(ckpt_path="best", verbose=False)
    assert trainer.ckpt_path == str(tmp_path / "saved" / "step=3.ckpt")


def test_a_damaged_best_gives_way_to_the_newest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved = tmp_path / "saved"
    fit(saved, tmp_path, **MONITORED)
    flip_bit(saved / "step=3.ckpt")
    set_times(saved, *(f"step={step}.ckpt" for step in (3, 1, 2, 4, 5, 6)))
    trainer = evaluate(fresh(saved, tmp_path, **MONITORED), "validate")
    assert trainer.ckpt_path == str(saved / "step=6.ckpt")
    told = passed_over(caplog)
    assert len(told) == 1
    assert str(saved / "step=3.ckpt") in told[0]
    assert str(saved / "step=6.ckpt") in told[0]


def test_a_best_that_is_gone_gives_way_to_the_newest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved = tmp_path / "saved"
    fit(saved, tmp_path, **MONITORED)
    (saved / "step=3.ckpt").unlink()
    trainer = evaluate(fresh(saved, tmp_path, **MONITORED), "validate")
    assert trainer.ckpt_path == str(saved / "step=6.ckpt")
    assert len(passed_over(caplog)) == 1


@pytest.mark.parametrize("keep", [False, True], ids=["moved", "copied"])
def test_the_best_in_another_place(tmp_path: Path, caplog: pytest.LogCaptureFixture, keep: bool) -> None:
    fit(tmp_path / "saved", tmp_path, **MONITORED)
    shutil.copytree(tmp_path / "saved", tmp_path / "elsewhere")
    if not keep:
        shutil.rmtree(tmp_path / "saved")
    trainer = evaluate(fresh(tmp_path / "elsewhere", tmp_path, **MONITORED), "validate")
    assert trainer.ckpt_path == str(tmp_path / "elsewhere" / "step=3.ckpt")
    assert passed_over(caplog) == []


def test_a_newest_that_knows_no_best(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path / "saved", tmp_path)
    trainer = evaluate(fresh(tmp_path / "saved", tmp_path, **MONITORED), "validate")
    assert trainer.ckpt_path == str(tmp_path / "saved" / "step=6.ckpt")
    told = passed_over(caplog)
    assert len(told) == 1
    assert "does not record which one has the best loss" in told[0]


def test_no_checkpoint_at_all_is_lightnings_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not configured to save the best model"):
        evaluate(fresh(tmp_path / "saved", tmp_path), "validate")


def test_a_run_after_a_look_at_the_best_deletes_nothing_of_it(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    fit(saved, tmp_path, save_top_k=1)
    trainer = fresh(saved, tmp_path, save_top_k=1, filename="new-{step}")
    assert trainer.checkpoint_callback.best_model_path == str(saved / "step=6.ckpt")
    trainer.fit(model_of())
    assert trainer.checkpoint_callback.best_model_path == str(saved / "new-step=6.ckpt")
    assert names(saved) == ["new-step=6.ckpt", "step=6.ckpt"]


# ---- in memory
# --------------------------------------------------------------------------------------------------------


@pytest.fixture
def memory() -> Iterator[str]:
    """Return the URL of a directory in fsspec's memory filesystem."""
    url = f"memory://{uuid.uuid4().hex}"
    yield url
    store = fsspec.filesystem("memory")
    if store.exists(url):
        store.rm(url, recursive=True)


def listing(url: str) -> list[str]:
    return sorted(path.rsplit("/", 1)[1] for path in fsspec.filesystem("memory").ls(url, detail=False))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("plugin", PLUGINS)
@pytest.mark.parametrize("resume", ["last", "memory:///{}/step=4.ckpt", "memory://{}/last.ckpt"])
def test_resumed_in_memory(resume: str, plugin: Any, memory: str, tmp_path: Path) -> None:
    options = {"plugin": plugin, "every_n_train_steps": 4, "save_top_k": 1, "save_last": True}
    fit(memory, tmp_path, max_steps=4, **options)
    assert listing(memory) == ["last.ckpt", "step=4.ckpt"]
    path = resume.format(memory.removeprefix("memory://"))
    trainer = fit(memory, tmp_path, max_epochs=2, max_steps=8, ckpt_path=path, **options)
    assert steps_after(trainer) == 4
    assert torch.equal(trainer.model.weight, torch.full((NUMBERS,), 8.0))
    # As on a local disk: the checkpoint resumed from stays, unless it is last.ckpt, which is replaced.
    named = trainer.ckpt_path.rsplit("/", 1)[1]
    second = "last.ckpt" if named == "last.ckpt" else "last-v1.ckpt"
    assert listing(memory) == sorted({"last.ckpt", second, "step=8.ckpt", named})
    assert torch.load(io.BytesIO(fsspec.filesystem("memory").cat_file(f"{memory}/{second}")))["global_step"] == 8


@pytest.mark.parametrize("name", ["last.ckpt", "step=4.ckpt"])
def test_the_checkpoint_resumed_from_stays_in_memory(name: str, memory: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"save_top_k": 1, "save_last": True}
    fit(memory, tmp_path, max_steps=4, **options)
    with pytest.warns(UserWarning, match="dirpath has changed"):
        trainer = fit(f"{memory}/new", tmp_path, ckpt_path=f"{memory}/{name}", **options)
    assert steps_after(trainer) == BATCHES - 4
    assert {"last.ckpt", "step=4.ckpt"} <= set(listing(memory))
    assert listing(f"{memory}/new") == ["last.ckpt", "step=6.ckpt"]


def test_the_best_in_memory(memory: str, tmp_path: Path) -> None:
    fit(memory, tmp_path, monitor="loss", save_top_k=2)
    assert listing(memory) == ["step=3.ckpt", "step=4.ckpt"]
    trainer = evaluate(fresh(memory, tmp_path, monitor="loss", save_top_k=2), "validate")
    assert trainer.ckpt_path == f"{memory}/step=3.ckpt"
    assert torch.equal(trainer.model.weight, torch.full((NUMBERS,), 3.0))


def test_a_damaged_newest_in_memory(memory: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = fsspec.filesystem("memory")
    fit(memory, tmp_path, max_steps=3)
    content = bytearray(store.cat_file(f"{memory}/step=3.ckpt"))
    content[len(content) // 2] ^= 1
    store.pipe_file(f"{memory}/step=3.ckpt", bytes(content))
    trainer = fit(memory, tmp_path, ckpt_path="last")
    assert steps_after(trainer) == BATCHES - 2
    assert len(passed_over(caplog)) == 1


def save_states(directory: Path, *names_of_files: str) -> None:
    with Checkpointer(strategy="sync") as checkpointer:
        for name in names_of_files:
            checkpointer.save({"optimizer_states": []}, directory / name)


def test_what_a_run_crashes_on_counts_as_passed_over(tmp_path: Path) -> None:
    save_states(tmp_path, "step=1.ckpt", "step=2.ckpt")
    lookup = Lookup(".ckpt", "last")
    newest = lookup.newest(str(tmp_path), str(tmp_path))
    assert newest is not None
    ResumeAttempts(tmp_path, 1).begin(newest)
    found = lookup.newest(str(tmp_path), str(tmp_path), attempts=ResumeAttempts(tmp_path, 1))
    assert found is not None
    passed_over = [lookup.was_passed_over(str(tmp_path / name)) for name in ("step=1.ckpt", "step=2.ckpt")]
    assert (os.path.basename(found.path), passed_over) == ("step=1.ckpt", [False, True])


def test_the_best_is_looked_up_again_when_it_is_known_how_to_reach_it(tmp_path: Path) -> None:
    local, remote = tmp_path / "local", tmp_path / "remote"
    save_states(remote, "step=1.ckpt")
    lookup = Lookup(".ckpt", "last")
    assert lookup.best(str(local), "callback", None) == ""
    lookup.set_access(None, Tiers(local_dir=str(local), upload_to=str(remote)))
    assert lookup.best(str(local), "callback", None) == str(local / "step=1.ckpt")
