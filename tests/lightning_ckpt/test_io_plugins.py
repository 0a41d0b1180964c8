"""The synchronous and the asynchronous plugin in the Trainers and in Fabric."""

from __future__ import annotations

import importlib
import json
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_core.checkpointer as checkpointer_module
import lightning_ckpt.io as io_module
from ckpt_core import CheckpointNotFoundError, StorageError, small_states, verify
from ckpt_core.process import awaited_paths
from ckpt_core.storage import FileWriter, LocalStorage
from lightning_ckpt import AsyncCheckpointIO, SyncCheckpointIO

SECONDS = 200.0
PLUGINS = [SyncCheckpointIO, AsyncCheckpointIO]
PACKAGES = ["lightning.pytorch", "pytorch_lightning"]
ABOUT_CALLBACK = "not enough for an exact resume"

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*is smaller than the logging interval"),
    pytest.mark.filterwarnings("ignore:.*Checkpoint directory"),
    pytest.mark.filterwarnings(f"ignore:.*{ABOUT_CALLBACK}"),
]


def package_of(name: str) -> Any:
    return pytest.importorskip(name)


def model_of(pl: Any) -> Any:
    class Regression(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            return self.layer(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=0.1)

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=2)

    return Regression()


def trainer_of(pl: Any, plugin: Any, folder: Path, **options: Any) -> Any:
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 2,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
        "plugins": [plugin],
    }
    return pl.Trainer(**{**settings, **options})


@pytest.fixture
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write all states in the background; by default, saves wait for small ones."""
    monkeypatch.setattr(small_states, "SMALL_STATE_BYTES", -1)


class Gate:
    def __init__(self) -> None:
        self.opened = threading.Event()
        self.failing: set[str] = set()
        self.created: list[str] = []


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch, everything_is_large: None) -> Iterator[Gate]:
    """Return a gate; all writes wait until it is opened."""
    gate = Gate()

    class GatedStorage(LocalStorage):
        def create(self, path: str, expected_size: int) -> FileWriter:
            assert gate.opened.wait(SECONDS)
            gate.created.append(Path(path).name)
            if Path(path).name in gate.failing:
                raise StorageError("the disk is on fire", path=path)
            return super().create(path, expected_size)

    monkeypatch.setattr(checkpointer_module, "storage_for", lambda *_: GatedStorage())
    with awaited_paths.without_waiting():  # the tests look at the files while saves are pending
        yield gate
    gate.opened.set()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("make", PLUGINS)
@pytest.mark.parametrize("package", PACKAGES)
def test_a_trainer_saves_loads_and_removes_through_it(package: str, make: type[Any], tmp_path: Path) -> None:
    pl = package_of(package)
    plugin = make(event_log=str(tmp_path / "events.jsonl"))
    callback = importlib.import_module(f"{package}.callbacks").ModelCheckpoint(
        dirpath=tmp_path / "c", save_top_k=1, every_n_train_steps=1, save_last=True, filename="{step}"
    )
    model = model_of(pl)
    trainer = trainer_of(pl, plugin, tmp_path, callbacks=[callback])
    assert trainer.strategy.checkpoint_io is plugin
    trainer.fit(model)
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["last.ckpt", "step=8.ckpt"]
    for name in ("last.ckpt", "step=8.ckpt"):
        assert verify(tmp_path / "c" / name)
        stock = torch.load(tmp_path / "c" / name)
        assert stock["global_step"] == 8
        assert torch.equal(stock["state_dict"]["layer.weight"], model.layer.weight)
    events = [json.loads(line)["event"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert events.count("SaveCommitted") == 16
    assert events.count("CheckpointRemoved") == 7
    assert events.count("SaveFailed") == 0

    again = model_of(pl)
    trainer_of(pl, make(), tmp_path, max_epochs=2, enable_checkpointing=False).fit(
        again, ckpt_path=str(tmp_path / "c" / "last.ckpt")
    )
    assert torch.equal(again.layer.weight, model.layer.weight)
    restored = type(model).load_from_checkpoint(tmp_path / "c" / "last.ckpt")
    assert torch.equal(restored.layer.weight, model.layer.weight)


@pytest.mark.parametrize("make", PLUGINS)
@pytest.mark.parametrize("package", ["lightning.fabric", "lightning_fabric"])
def test_fabric_saves_and_loads_through_it(package: str, make: type[Any], tmp_path: Path) -> None:
    fabric_package = package_of(package)
    plugin = make()
    fabric = fabric_package.Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    fabric.launch()
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wrapped, wrapped_optimizer = fabric.setup(model, optimizer)
    fabric.backward(wrapped(torch.ones(1, 3)).sum())
    wrapped_optimizer.step()
    expected = model.weight.detach().clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fabric.save(tmp_path / "a.ckpt", {"model": wrapped, "optimizer": wrapped_optimizer, "step": 3})
    with torch.no_grad():
        model.weight.zero_()
    rest = fabric.load(tmp_path / "a.ckpt", {"model": wrapped, "optimizer": wrapped_optimizer})
    assert rest == {"step": 3}
    assert torch.equal(model.weight, expected)
    plugin.teardown()
    assert verify(tmp_path / "a.ckpt")


@pytest.mark.parametrize("package", PACKAGES)
def test_it_derives_from_the_base_class_of_each_package(package: str) -> None:
    base = importlib.import_module(f"{package}.plugins").CheckpointIO
    for make in PLUGINS:
        assert isinstance(make(), base)


@pytest.mark.parametrize("make", PLUGINS)
def test_the_missing_callback_is_told_once(make: type[Any], tmp_path: Path) -> None:
    pl = package_of("lightning.pytorch")
    plugin = make()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            trainer_of(pl, plugin, tmp_path, max_epochs=2).fit(model_of(pl))
    told = [warning for warning in caught if ABOUT_CALLBACK in str(warning.message)]
    assert len(told) == 1
    assert "ResumableCheckpoint" in str(told[0].message)
    assert make.__name__ in str(told[0].message)


@pytest.mark.parametrize(
    "state",
    [
        {"state_dict": {}},
        {"loops": {}, "callbacks": {}, io_module.STATE_KEY: {}},
        {"loops": {}, "state_dict": {}},
        torch.nn.Linear(1, 1).state_dict(),
    ],
    ids=["weights", "with our state", "weights only", "bare"],
)
@pytest.mark.parametrize("make", PLUGINS)
def test_nothing_is_told_where_nothing_is_missing(make: type[Any], state: Any, tmp_path: Path) -> None:
    plugin = make()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        plugin.save_checkpoint(state, tmp_path / "a.ckpt")
    plugin.teardown()
    assert [str(warning.message) for warning in told] == []
    assert verify(tmp_path / "a.ckpt")


@pytest.mark.parametrize("make", PLUGINS)
def test_storage_options_of_a_single_save_are_refused(make: type[Any], tmp_path: Path) -> None:
    plugin = make()
    with pytest.raises(TypeError, match=rf"{make.__name__}\(storage_options=\.\.\.\)"):
        plugin.save_checkpoint({"a": 1}, tmp_path / "a.ckpt", storage_options={"key": "secret"})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("make", PLUGINS)
def test_storage_options_of_the_plugin_reach_the_store(make: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    real = checkpointer_module.storage_for

    def remember(path: Any, options: Any = None) -> Any:
        given.append(options)
        return real(path)

    monkeypatch.setattr(checkpointer_module, "storage_for", remember)
    plugin = make(storage_options={"skip": "me"})
    plugin.save_checkpoint({"a": 1}, "memory://plugin/a.ckpt")
    plugin.teardown()
    assert given
    assert all(options == {"skip": "me"} for options in given)


def test_a_save_for_slurm_is_durable_when_it_returns(gate: Gate, tmp_path: Path) -> None:
    plugin = AsyncCheckpointIO()
    plugin.save_checkpoint({"a": 1}, tmp_path / "usual.ckpt")
    assert not (tmp_path / "usual.ckpt").exists()
    thread = threading.Thread(target=plugin.save_checkpoint, args=({"a": 2}, str(tmp_path / "hpc_ckpt_1.ckpt")))
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    gate.opened.set()
    thread.join(SECONDS)
    assert not thread.is_alive()
    assert verify(tmp_path / "hpc_ckpt_1.ckpt")
    plugin.teardown()


def test_a_failed_save_for_slurm_is_raised_at_once(gate: Gate, tmp_path: Path) -> None:
    gate.opened.set()
    gate.failing.add("hpc_ckpt_1.ckpt")
    plugin = AsyncCheckpointIO()
    with pytest.raises(StorageError, match="on fire"):
        plugin.save_checkpoint({"a": 1}, tmp_path / "hpc_ckpt_1.ckpt")
    plugin.teardown()


def test_teardown_waits_for_everything_and_raises_what_failed(gate: Gate, tmp_path: Path) -> None:
    plugin = AsyncCheckpointIO(max_pending=2)
    gate.failing.add("bad.ckpt")
    for name in ("good.ckpt", "bad.ckpt"):
        plugin.save_checkpoint({"w": torch.ones(5)}, tmp_path / name)
    assert list(tmp_path.iterdir()) == []
    threading.Timer(0.2, gate.opened.set).start()
    with pytest.raises(StorageError, match="on fire"):
        plugin.teardown()
    assert [path.name for path in tmp_path.iterdir()] == ["good.ckpt"]
    assert plugin.checkpointer.pending == ()
    plugin.teardown()
    plugin.save_checkpoint({"a": 1}, tmp_path / "again.ckpt")
    plugin.teardown()
    assert verify(tmp_path / "again.ckpt")


def test_the_end_of_fit_waits_for_the_last_save(gate: Gate, tmp_path: Path) -> None:
    pl = package_of("lightning.pytorch")

    class Opens(pl.Callback):
        def on_train_epoch_end(self, *_: Any) -> None:
            threading.Timer(0.2, gate.opened.set).start()

    callback = importlib.import_module("lightning.pytorch.callbacks").ModelCheckpoint(
        dirpath=tmp_path / "c", every_n_train_steps=5, save_top_k=-1, filename="{step}"
    )
    plugin = AsyncCheckpointIO()
    trainer_of(pl, plugin, tmp_path, callbacks=[callback, Opens()]).fit(model_of(pl))
    assert gate.created == ["step=5.ckpt"]
    assert verify(tmp_path / "c" / "step=5.ckpt")


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_a_failure_in_the_background_of_fit(
    on_error: Any, gate: Gate, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pl = package_of("lightning.pytorch")
    gate.opened.set()
    gate.failing.add("step=2.ckpt")
    callback = importlib.import_module("lightning.pytorch.callbacks").ModelCheckpoint(
        dirpath=tmp_path / "c", every_n_train_steps=2, save_top_k=1, filename="{step}"
    )
    plugin = AsyncCheckpointIO(on_error=on_error)
    trainer = trainer_of(pl, plugin, tmp_path, callbacks=[callback])
    if on_error == "raise":
        with pytest.raises(StorageError, match="on fire"):
            trainer.fit(model_of(pl))
        assert trainer.global_step < 8
        assert not list(tmp_path.rglob("*step=2*"))
    else:
        trainer.fit(model_of(pl))
        assert trainer.global_step == 8
        assert [path.name for path in (tmp_path / "c").iterdir()] == ["step=8.ckpt"]
        assert "on fire" in caplog.text
    assert plugin.checkpointer.failures == 1


@pytest.mark.parametrize("make", PLUGINS)
def test_missing_and_unsafe_files_have_lightnings_exceptions_too(make: type[Any], tmp_path: Path) -> None:
    import pickle

    plugin = make()
    with pytest.raises(CheckpointNotFoundError) as caught:
        plugin.load_checkpoint(tmp_path / "a.ckpt")
    assert isinstance(caught.value, FileNotFoundError)
    plugin.save_checkpoint({"path": tmp_path}, tmp_path / "a.ckpt")
    with pytest.raises(pickle.UnpicklingError):
        plugin.load_checkpoint(tmp_path / "a.ckpt")
    assert plugin.load_checkpoint(tmp_path / "a.ckpt", weights_only=False) == {"path": tmp_path}
    plugin.remove_checkpoint(tmp_path / "a.ckpt")
    plugin.teardown()
    assert list(tmp_path.iterdir()) == []


def test_loads_to_the_cpu_unless_told_otherwise(tmp_path: Path) -> None:
    plugin = SyncCheckpointIO()
    plugin.save_checkpoint({"w": torch.ones(3)}, str(tmp_path / "a.ckpt"))
    assert plugin.load_checkpoint(tmp_path / "a.ckpt")["w"].device.type == "cpu"
    assert plugin.load_checkpoint(tmp_path / "a.ckpt", map_location="meta")["w"].device.type == "meta"


def test_saves_inside_and_outside_of_inference_mode_share_a_plugin(tmp_path: Path) -> None:
    pl = package_of("lightning.pytorch")

    class SavesEverywhere(pl.Callback):
        modes: list[bool]

        def __init__(self) -> None:
            self.modes = []

        def _save(self, trainer: Any) -> None:
            self.modes.append(torch.is_inference_mode_enabled())
            trainer.save_checkpoint(tmp_path / f"{len(self.modes)}.ckpt")

        def on_validation_end(self, trainer: Any, *_: Any) -> None:
            self._save(trainer)

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            self._save(trainer)

    class Validated(type(model_of(pl))):  # type: ignore[misc]
        def validation_step(self, batch: torch.Tensor, _: int) -> None:
            self.log("loss", self.layer(batch).square().mean())

    callback, plugin, model = SavesEverywhere(), AsyncCheckpointIO(), Validated()
    data = torch.utils.data.DataLoader(torch.randn(4, 4), batch_size=2)
    trainer = trainer_of(pl, plugin, tmp_path, callbacks=[callback], enable_checkpointing=False, max_epochs=1)
    trainer.validate(model, data, verbose=False)
    trainer.fit(model)
    trainer.validate(model, data, verbose=False)
    assert callback.modes == [True, *[False] * 4, True]
    assert plugin.checkpointer.failures == 0
    for number in range(1, 7):
        assert verify(tmp_path / f"{number}.ckpt")
