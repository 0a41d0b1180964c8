"""Resume from a checkpoint of another plugin's layout, of Lightning's sharded strategies, or a converted one."""

from __future__ import annotations

import enum
import inspect
from pathlib import Path
from typing import Any

import lightning.fabric
import lightning.pytorch as pl
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.utils.data import DataLoader

from ckpt_core import (
    CheckpointCorruptedError,
    CheckpointError,
    CheckpointFormatError,
    DirectoryCheckpointer,
    Kind,
    Part,
)
from ckpt_core.cli import main
from ckpt_core.interchange import convert_to_directory, convert_to_file
from lightning_ckpt import (
    AsyncCheckpointIO,
    ResumableCheckpoint,
    ShardedCheckpointIO,
    SyncCheckpointIO,
    load_from_checkpoint,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
FILE, DIRECTORY = AsyncCheckpointIO, ShardedCheckpointIO
SAVED, END = 5, 12


class Color(enum.Enum):
    RED = 1


class Model(pl.LightningModule):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters()
        layers = [
            torch.nn.Linear(8, width),
            torch.nn.BatchNorm1d(width),
            torch.nn.Dropout(0.5),
            torch.nn.Linear(width, 1),
        ]
        self.model = torch.nn.Sequential(*layers)

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        return self.model(batch).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # two groups; their parameters are in another order than the model's
        last, first = self.model[3].parameters(), self.model[:2].parameters()
        return torch.optim.Adam([{"params": last, "lr": 0.1}, {"params": first}], lr=0.01)


def train(plugin: Any, directory: Path, steps: int, ckpt_path: Path | None = None) -> tuple[pl.Trainer, dict[str, Any]]:
    pl.seed_everything(1, verbose=False)
    model = Model()
    callback = ResumableCheckpoint(dirpath=directory, filename="{step}", every_n_train_steps=SAVED, save_top_k=-1)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(max_steps=steps, accelerator="cpu", plugins=[plugin()], callbacks=[callback], **quiet)
    data = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    trainer.fit(model, DataLoader(data, batch_size=8, shuffle=True), ckpt_path=ckpt_path)
    return trainer, {name: value.clone() for name, value in model.state_dict().items()}


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return train(FILE, tmp_path_factory.mktemp("whole"), END)[1]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return checkpoints of step 5: a file, a directory, one of ModelParallelStrategy, and two converted to DCP."""
    root = tmp_path_factory.mktemp("saved")
    trainer, _ = train(FILE, root / "file", SAVED)
    train(DIRECTORY, root / "directory", SAVED)
    state = torch.load(root / "file" / "step=5.ckpt", weights_only=True)
    # as ModelParallelStrategy.save_checkpoint does, with torch's names for the optimizer's parameters
    optimizer = get_optimizer_state_dict(trainer.lightning_module, trainer.optimizers[0])
    dcp.save(
        {"state_dict": state.pop("state_dict"), "optimizer_0": optimizer}, checkpoint_id=root / "stock", no_dist=True
    )
    state.pop("optimizer_states")
    torch.save(state, root / "stock" / "meta.pt")
    paths = {
        "file": root / "file" / "step=5.ckpt",
        "directory": root / "directory" / "step=5.ckpt",
        "stock": root / "stock",
    }
    for layout in ("file", "directory"):
        paths[f"dcp of the {layout}"] = root / layout / "dcp"
        assert main(["convert", str(paths[layout]), str(paths[f"dcp of the {layout}"]), "--to", "dcp"]) == 0
    return paths


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("layout", "plugin"),
    [
        ("file", ShardedCheckpointIO),
        ("directory", AsyncCheckpointIO),
        ("directory", SyncCheckpointIO),
        ("stock", ShardedCheckpointIO),
        ("stock", AsyncCheckpointIO),
        ("dcp of the file", AsyncCheckpointIO),
    ],
)
def test_a_run_resumes_exactly_from_a_checkpoint_of_another_layout(
    uninterrupted: dict[str, Any], saved: dict[str, Path], tmp_path: Path, layout: str, plugin: Any
) -> None:
    _, found = train(plugin, tmp_path, END, saved[layout])
    assert same(found, uninterrupted)


@pytest.mark.parametrize("layout", ["directory", "stock", "dcp of the file"])
def test_a_converted_file_is_one_that_lightning_loads_and_resumes_from(
    uninterrupted: dict[str, Any], saved: dict[str, Path], tmp_path: Path, layout: str
) -> None:
    target = tmp_path / "one.ckpt"
    assert main(["convert", str(saved[layout]), str(target), "--to", "file"]) == 0
    wanted = torch.load(saved["file"], weights_only=True)["state_dict"]
    assert same(dict(Model.load_from_checkpoint(target, weights_only=True).state_dict()), wanted)
    assert same(train(FILE, tmp_path / "run", END, target)[1], uninterrupted)


@pytest.mark.parametrize("layout", ["file", "stock", "dcp of the directory"])
def test_a_converted_directory_is_one_that_a_run_resumes_from(
    uninterrupted: dict[str, Any], saved: dict[str, Path], tmp_path: Path, layout: str
) -> None:
    target = tmp_path / "step=5"
    assert main(["convert", str(saved[layout]), str(target), "--to", "directory"]) == 0
    assert main(["verify", str(target)]) == 0
    assert same(train(DIRECTORY, tmp_path / "run", END, target)[1], uninterrupted)


@pytest.mark.parametrize("layout", ["file", "directory", "stock"])
def test_load_from_checkpoint_reads_every_layout(saved: dict[str, Path], layout: str) -> None:
    wanted = torch.load(saved["file"], weights_only=True)["state_dict"]
    module = load_from_checkpoint(Model, saved[layout], map_location="cpu", weights_only=True)
    assert same(dict(module.state_dict()), wanted) and module.hparams == {"width": 16}


def test_a_trainer_without_a_plugin_says_what_reads_a_directory(saved: dict[str, Path], tmp_path: Path) -> None:
    trainer = pl.Trainer(
        max_steps=END, accelerator="cpu", logger=False, callbacks=[ResumableCheckpoint(dirpath=tmp_path)]
    )
    with pytest.raises(CheckpointFormatError, match="has no plugin that reads one"):
        trainer.fit(Model(), DataLoader(torch.randn(8, 8)), ckpt_path=saved["directory"])


@pytest.mark.parametrize("plugin", [AsyncCheckpointIO, ShardedCheckpointIO])
def test_what_is_no_trainers_checkpoint_is_refused_as_such(tmp_path: Path, plugin: Any) -> None:
    dcp.save({"state_dict": Model().state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    torch.save(Model().state_dict(), tmp_path / "weights.pt")
    for name in ("dcp", "dcp", "weights.pt"):
        with pytest.raises(CheckpointFormatError, match="it has no pytorch-lightning_version") as caught:
            train(plugin, tmp_path / "run", END, tmp_path / name)
        assert caught.value.path == str(tmp_path / name)
        torch.save({"epoch": 1, "global_step": 3}, tmp_path / "dcp" / "meta.pt")


def test_a_program_with_the_plugin_loads_what_it_has_just_saved(tmp_path: Path) -> None:
    trainer, state = train(DIRECTORY, tmp_path, SAVED + 1)
    trainer.save_checkpoint(tmp_path / "now.ckpt", weights_only=True)
    assert same(dict(Model.load_from_checkpoint(tmp_path / "now.ckpt").state_dict()), state)
    assert same(dict(Model.load_from_checkpoint(f"file://{tmp_path}/now.ckpt").state_dict()), state)
    (tmp_path / "empty.ckpt").mkdir()
    for name, error in (("nope.ckpt", FileNotFoundError), ("empty.ckpt", IsADirectoryError)):
        with pytest.raises(error, match=name) as caught:
            Model.load_from_checkpoint(tmp_path / name)
        assert type(caught.value) is error, "as without the plugin"


def test_fabric_with_the_plugin_loads_files_of_others(tmp_path: Path) -> None:
    fabric = lightning.fabric.Fabric(accelerator="cpu", plugins=[DIRECTORY()])
    fabric.launch()
    model = torch.nn.Linear(4, 2)
    state = {"model": model.state_dict(), "step": 3, "name": "x"}
    torch.save(model.state_dict(), tmp_path / "raw.pt")
    torch.save(state, tmp_path / "fabric.ckpt")
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "stock", no_dist=True)
    raw, filled, sharded = (fabric.setup(torch.nn.Linear(4, 2)) for _ in range(3))
    fabric.load_raw(tmp_path / "raw.pt", raw)
    into = {"model": filled, "step": 0}
    assert fabric.load(tmp_path / "fabric.ckpt", into) == {"name": "x"} and into["step"] == 3
    fabric.load(tmp_path / "stock", {"model": sharded})
    for loaded in (raw, filled, sharded):
        assert same(dict(loaded.state_dict()), dict(model.state_dict()))
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        fabric.load(tmp_path / "nope", into)
    fabric.save(tmp_path / "ours", {"model": model, "color": Color.RED})
    if "weights_only" in inspect.signature(fabric.load).parameters:  # not yet in Lightning 2.5.0
        assert fabric.load(tmp_path / "ours", weights_only=False)["color"] is Color.RED
    with pytest.raises(CheckpointError, match="weights_only"):
        fabric.load(tmp_path / "ours")


@pytest.mark.parametrize("of_fabric", [True, False])
def test_fabric_loads_a_directory_that_was_converted_to_a_file_and_back(of_fabric: bool, tmp_path: Path) -> None:
    fabric = lightning.fabric.Fabric(accelerator="cpu", plugins=[DIRECTORY() if of_fabric else FILE()])
    fabric.launch()
    model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2))
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters()))
    fabric.backward(model(torch.randn(4, 4)).square().mean())
    optimizer.step()
    fabric.save(tmp_path / "first", {"model": model, "optimizer": optimizer, "step": 3, "own": {"a": [1, 2]}, "x": "y"})
    convert_to_file(tmp_path / "first", tmp_path / "file.ckpt")
    convert_to_directory(tmp_path / "file.ckpt", tmp_path / "again")

    fabric = lightning.fabric.Fabric(accelerator="cpu", plugins=[DIRECTORY()])
    fabric.launch()
    filled = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2))
    filled, other = fabric.setup(filled, torch.optim.Adam(filled.parameters()))
    into = {"model": filled, "optimizer": other, "step": 0, "own": None}
    assert fabric.load(tmp_path / "again", into) == {"x": "y"}
    assert (into["step"], into["own"]) == (3, {"a": [1, 2]})
    assert same(dict(filled.state_dict()), dict(model.state_dict()))
    assert same(other.state_dict()["state"][0], optimizer.state_dict()["state"][0])
    assert fabric.load(tmp_path / "again")["step"] == 3


@pytest.mark.parametrize("plugin", [FILE, DIRECTORY])
def test_what_is_of_no_layout_is_refused_for_what_it_is(saved: dict[str, Path], tmp_path: Path, plugin: Any) -> None:
    with pytest.raises(CheckpointError, match=r"found|no checkpoint at"):
        plugin().load_checkpoint(tmp_path / "nope.ckpt")

    with DirectoryCheckpointer(strategy="sync") as directories:
        directories.save([Part("model", {"w": torch.ones(2)}, Kind.REPLICATED)], tmp_path / "other")
    if plugin is FILE:
        with pytest.raises(CheckpointFormatError, match="holds the parts model, which are not those of a Trainer's"):
            plugin().load_checkpoint(tmp_path / "other")

    damaged = tmp_path / "damaged.ckpt"
    data = bytearray(saved["file"].read_bytes())
    data[200] ^= 1
    damaged.write_bytes(data)
    with pytest.raises(CheckpointCorruptedError):
        plugin().load_checkpoint(damaged)
