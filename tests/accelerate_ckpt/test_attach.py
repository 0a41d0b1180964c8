"""``attach`` for one Accelerator, ``install`` for all of them, and what both leave alone."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard
from accelerate.local_sgd import LocalSGD
from accelerate.optimizer import AcceleratedOptimizer

from accelerate_ckpt import CheckpointConfig, CheckpointProjectConfiguration, attach
from accelerate_ckpt._attach import drain, install, uninstall
from accelerate_ckpt._state.session import live_sessions, session_of
from accelerate_ckpt.config import OptionError
from ckpt_core.errors import StorageError
from tests.accelerate_ckpt.training import Run, assert_same, model_of
from tests.support.open_files import open_files

pytestmark = pytest.mark.usefixtures("fresh_accelerate")

METHODS = [
    (Accelerator, "__init__"),
    (Accelerator, "save_state"),
    (Accelerator, "load_state"),
    (Accelerator, "end_training"),
    (Accelerator, "backward"),
    (Accelerator, "prepare_model"),
    (AcceleratedOptimizer, "step"),
    (DataLoaderShard, "__iter__"),
    (LocalSGD, "__enter__"),
    (LocalSGD, "__exit__"),
]


@contextlib.contextmanager
def installed(**options: Any) -> Iterator[None]:
    install(CheckpointConfig(**options))
    try:
        yield
    finally:
        uninstall()


def manifest(path: Path) -> Path:
    return path / "manifest.json"


def test_attach_is_for_one_accelerator(tmp_path: Path) -> None:
    accelerator, other = Accelerator(), Accelerator()
    assert attach(accelerator, "sync") is accelerator
    for item in (accelerator, other):
        item.prepare(model_of(0))
        item.save_state(str(tmp_path / str(item is other)))
    assert manifest(tmp_path / "False").exists()
    assert not manifest(tmp_path / "True").exists()
    assert (tmp_path / "True" / "random_states_0.pkl").exists()


@pytest.mark.parametrize("way", ["attach", "install"])
def test_methods_of_a_subclass_are_called_as_without_us(tmp_path: Path, way: str) -> None:
    class Mine(Accelerator):  # type: ignore[misc]
        def save_state(self, output_dir: str, **kwargs: Any) -> Any:
            self.saved = output_dir
            return super().save_state(f"{output_dir}-of-mine", **kwargs)

    with installed(strategy="sync") if way == "install" else contextlib.nullcontext():
        accelerator = Mine() if way == "install" else attach(Mine(), "sync")
        accelerator.prepare(model_of(0))
        accelerator.save_state(str(tmp_path / "x"))
    assert accelerator.saved == str(tmp_path / "x")
    assert manifest(tmp_path / "x-of-mine").exists() and not (tmp_path / "x").exists()


def test_install_is_for_all_and_can_be_undone(tmp_path: Path) -> None:
    class Mine(Accelerator):  # type: ignore[misc]
        pass

    uninstall()
    before = [getattr(owner, name) for owner, name in METHODS]
    with installed(strategy="sync"):
        for accelerator in (Accelerator(), Mine()):
            accelerator.prepare(model_of(0))
            accelerator.save_state(str(tmp_path / type(accelerator).__name__))
        assert manifest(tmp_path / "Accelerator").exists()
        assert manifest(tmp_path / "Mine").exists()
    assert [getattr(owner, name) for owner, name in METHODS] == before
    accelerator = Accelerator()
    accelerator.prepare(model_of(0))
    accelerator.save_state(str(tmp_path / "stock"))
    assert not manifest(tmp_path / "stock").exists()


def test_installing_again_changes_the_options_of_what_is_still_to_come() -> None:
    with installed(strategy="sync"):
        method = Accelerator.save_state
        first = Accelerator()
        install(CheckpointConfig(strategy="sharded", max_pending=3))
        assert Accelerator.save_state is method
        second = Accelerator()
        sessions = [session_of(first), session_of(second)]
        assert [session and session.config.strategy for session in sessions] == ["sync", "sharded"]


def test_what_a_script_attaches_goes_before_what_is_installed() -> None:
    with installed(strategy="sync"):
        session = session_of(attach(Accelerator(), "sharded"))
        assert session is not None and session.config.strategy == "sharded"


def test_options_travel_in_the_project_configuration(tmp_path: Path) -> None:
    checkpoints = CheckpointConfig(strategy="sync", commit_timeout=7)
    project = CheckpointProjectConfiguration(str(tmp_path), checkpoints=checkpoints)
    session = session_of(attach(Accelerator(project_config=project)))
    assert session is not None and session.config == checkpoints
    session = session_of(attach(Accelerator(project_config=project), max_pending=2))
    assert session is not None
    assert (session.config.strategy, session.config.commit_timeout, session.config.max_pending) == ("sync", 7.0, 2)


def test_a_configuration_in_the_place_of_options_is_refused_in_few_words() -> None:
    config = CheckpointConfig(strategy="sync", commit_timeout=7)
    for arguments, options in (([config], {}), ([], {"config": config})):
        with pytest.raises(OptionError) as refused:
            attach(Accelerator(), *arguments, **options)
        assert "attach" in str(refused.value) and len(str(refused.value)) < 150
    session = session_of(attach(Accelerator(), **vars(config)))  # as the message tells the user to do
    assert session is not None and session.config == config


def test_saving_goes_on_after_the_training_has_ended(tmp_path: Path) -> None:
    run = Run(attach(Accelerator(), "async")).train(2)
    run.accelerator.end_training()
    run.accelerator.save_state(tmp_path / "saved")
    fresh = Run(attach(Accelerator()), seed=1)
    fresh.accelerator.load_state(tmp_path / "saved")
    assert_same(fresh.state(), run.state())


def test_an_accelerator_is_not_kept_alive(tmp_path: Path) -> None:
    run = Run(attach(Accelerator(), "async"))
    run.train(2, save_after=1, path=tmp_path / "run" / "saved")
    run.accelerator.end_training()
    run = Run(attach(Accelerator(), "async"))
    run.train(2, save_after=1, path=tmp_path / "run" / "saved")
    sessions = len(live_sessions())
    record = str(tmp_path / ".run.flight-rank0")
    assert record in open_files(tmp_path)
    gone = [weakref.ref(run.accelerator), weakref.ref(run.model)]
    del run
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
    assert len(live_sessions()) == sessions - 1
    assert record not in open_files(tmp_path)


def test_a_loader_is_not_kept_until_the_next_garbage_collection() -> None:
    accelerator = attach(Accelerator(), "sync")
    loader = accelerator.prepare_data_loader(torch.utils.data.DataLoader(list(range(16)), batch_size=4))
    iterator = iter(loader)
    assert next(iterator).tolist() == [0, 1, 2, 3]
    gone = [weakref.ref(accelerator), weakref.ref(loader)]
    gc.disable()
    try:
        del accelerator, loader, iterator
        assert [reference() for reference in gone] == [None, None]
    finally:
        gc.enable()


def test_draining_raises_what_failed(small_filesystem: Path) -> None:
    accelerator = attach(Accelerator(), "async")
    accelerator.prepare(torch.nn.Linear(2200, 1000))  # 8.8 MB, but only 8.4 fit
    accelerator.save_state(small_filesystem / "saved")
    with pytest.raises(StorageError, match="No space left"):
        drain(raised=False)
    drain(raised=False)


def test_draining_after_an_exception_only_logs(small_filesystem: Path, caplog: pytest.LogCaptureFixture) -> None:
    accelerator = attach(Accelerator(), "async")
    accelerator.prepare(torch.nn.Linear(2200, 1000))
    accelerator.save_state(small_filesystem / "saved")
    drain(raised=True)
    assert "No space left" in caplog.text


def test_a_window_that_never_ends_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(attach(Accelerator(gradient_accumulation_steps=4), mid_accumulation="defer"))
    run.train(2, save_after=2, path=tmp_path / "saved")
    run.accelerator.end_training()
    assert not (tmp_path / "saved").exists()
    assert "was not saved: the accumulation window" in caplog.text


def test_formats_of_others_are_left_to_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.utils import DistributedType

    accelerator = attach(Accelerator(), "sync")
    accelerator.prepare(model_of(0))
    monkeypatch.setattr(accelerator.state, "distributed_type", DistributedType.XLA)
    monkeypatch.setattr("accelerate.accelerator.xm", None, raising=False)
    with pytest.raises(AttributeError, match="mark_step"):  # Accelerate's own method
        accelerator.save_state(str(tmp_path / "saved"))


def test_attach_says_what_it_leaves_alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from accelerate.utils import DistributedType

    accelerator = Accelerator()
    monkeypatch.setattr(accelerator.state, "distributed_type", DistributedType.DEEPSPEED)
    attach(accelerator, just_in_time=True)
    assert "DEEPSPEED writes its own checkpoints: accelerate_ckpt leaves them alone" in caplog.text
