"""``memory_every_n_steps``: after a crash, a fit continues from the machine's memory."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core.tiers import MemoryTier
from lightning_ckpt import AsyncCheckpointIO, ResumableCheckpoint, ShardedCheckpointIO, SyncCheckpointIO
from tests.conftest import LIGHTNING, ScriptRunner
from tests.lightning_ckpt.reliable_cases import BATCHES, NUMBERS, model_of, names, trainer_of
from tests.support.damage import flip_bit

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),
]


@pytest.fixture
def memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as directory:
        yield Path(directory)


def fit(root: Path, memory: Path, plugin: Any = AsyncCheckpointIO, raise_at: int | None = None, **options: Any) -> Any:
    trainer_options = options.pop("trainer", {})
    settings = {"every_n_train_steps": 3, "save_top_k": 1, "filename": "{step}", "resume": "auto", **options}
    callback = ResumableCheckpoint(memory_every_n_steps=1, memory_dir=memory, **settings)
    plugins = [] if plugin is None else [plugin()]
    trainer = trainer_of(root, [callback], plugins=plugins, **{"max_epochs": 1, **trainer_options})
    trainer.callback, model = callback, model_of(raise_at=raise_at)
    if raise_at is None:
        trainer.fit(model)
    else:
        with pytest.raises(ValueError, match="on fire"):
            trainer.fit(model)
    return trainer


def snapshots_of(root: Path, memory: Path) -> Path:
    return Path(MemoryTier(root / "checkpoints", root=memory).directory)


def sharded() -> ShardedCheckpointIO:
    return ShardedCheckpointIO(mode="sync")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("plugin", [SyncCheckpointIO, sharded])
def test_a_crashed_fit_continues_from_memory_and_leaves_nothing(tmp_path: Path, memory: Path, plugin: Any) -> None:
    fit(tmp_path, memory, plugin, raise_at=6)
    assert names(tmp_path / "checkpoints")[-1] == "step=3.ckpt"
    assert names(snapshots_of(tmp_path, memory)) == ["step=4.ckpt", "step=5.ckpt"]
    trainer = fit(tmp_path, memory, plugin)
    point = trainer.callback.resumed
    assert (point.path, point.step) == (str(snapshots_of(tmp_path, memory) / "step=5.ckpt"), 5)
    assert trainer.model.batches == BATCHES - 5
    assert torch.equal(trainer.model.weight, torch.full((NUMBERS,), float(BATCHES)))
    assert names(memory) == []
    assert [name for name in names(tmp_path / "checkpoints") if name.startswith("step")] == ["step=6.ckpt"]


def test_a_rehearsal_takes_none(tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_ckpt.resumable.is_rehearsed", lambda: True)
    assert fit(tmp_path, memory, raise_at=6).global_step == 5
    assert names(memory) == []


def test_last_takes_the_newer_one_too(tmp_path: Path, memory: Path) -> None:
    settings: dict[str, Any] = {"resume": None, "dirpath": tmp_path / "checkpoints"}
    fit(tmp_path, memory, SyncCheckpointIO, raise_at=6, **settings)
    callback = ResumableCheckpoint(memory_every_n_steps=1, memory_dir=memory, **settings)
    trainer = trainer_of(tmp_path, [callback], plugins=[SyncCheckpointIO()], max_epochs=1)
    trainer.fit(model_of(), ckpt_path="last")
    assert callback.resumed is not None
    assert callback.resumed.step == 5


def test_a_damaged_snapshot_gives_way_to_the_disk(
    tmp_path: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit(tmp_path, memory, SyncCheckpointIO, raise_at=6)
    for snapshot in snapshots_of(tmp_path, memory).iterdir():
        flip_bit(snapshot)
    trainer = fit(tmp_path, memory, SyncCheckpointIO)
    assert trainer.callback.resumed.path == str(tmp_path / "checkpoints" / "step=3.ckpt")
    warnings = [record.getMessage() for record in caplog.records if "passed over" in record.getMessage()]
    assert [warning.count("step=5.ckpt") + warning.count("step=3.ckpt") for warning in warnings] == [2, 1]
    assert torch.equal(trainer.model.weight, torch.full((NUMBERS,), float(BATCHES)))


def test_a_checkpoint_that_never_became_durable_is_forgotten(tmp_path: Path, memory: Path) -> None:
    fit(tmp_path, memory, SyncCheckpointIO, raise_at=6)
    lost = tmp_path / "checkpoints" / "step=3.ckpt"
    lost.rename(tmp_path / "checkpoints" / "step=2.ckpt")  # as if step 3 was being written, and step 2 still there
    assert fit(tmp_path, memory, SyncCheckpointIO).callback.resumed.step == 5
    assert [name for name in names(tmp_path / "checkpoints") if name.startswith("step")] == ["step=6.ckpt"]


def test_where_there_can_be_none_a_warning_says_so(
    tmp_path: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit(tmp_path, memory, None)
    assert "takes no more snapshots in memory" in caplog.text
    assert "does not save them: add AsyncCheckpointIO or Sharded" in caplog.text
    assert names(memory) == []


def test_each_start_must_find_the_same_directory(tmp_path: Path, memory: Path) -> None:
    with pytest.raises(ValueError, match="memory_every_n_steps needs dirpath or resume='auto'"):
        ResumableCheckpoint(memory_every_n_steps=1)
    with pytest.raises(ValueError, match="memory_every_n_steps must be a whole number of at least 1, not 0"):
        ResumableCheckpoint(tmp_path, memory_every_n_steps=0)


def test_no_room_ends_the_snapshots_and_not_the_training(
    tmp_path: Path, small_filesystem: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (small_filesystem / "filler").write_bytes(bytes(8 * 2**20 - 2**18))
    trainer = fit(tmp_path, small_filesystem)
    assert trainer.global_step == BATCHES
    assert caplog.text.count("takes no more snapshots in memory") == 1
    assert names(small_filesystem) == ["filler"]


TRAINS = """
import os, signal, sys, torch
from lightning.pytorch import LightningModule, Trainer
from lightning_ckpt import AsyncCheckpointIO, ResumableCheckpoint, ShardedCheckpointIO

root, memory, kill, plugin = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
ranks = int(os.environ.get("WORLD_SIZE", 1))

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    def training_step(self, batch, index):
        if self.global_step == kill and self.global_rank == ranks - 1:
            callback._memory.checkpointer.wait()  # one is there, however slow the machine is
            os.kill(os.getpid(), signal.SIGKILL)
        return self.net(batch).pow(2).mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.1)
    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.arange(160.0).reshape(40, 4) / 100, batch_size=2, shuffle=True)

callback = ResumableCheckpoint(every_n_train_steps=50, resume="auto", memory_every_n_steps=1, memory_dir=memory)
trainer = Trainer(accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto", max_steps=12,
    logger=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=root,
    callbacks=[callback], plugins=[{"async": AsyncCheckpointIO, "sharded": ShardedCheckpointIO}[plugin]()])
model = Model()
trainer.fit(model)
if trainer.is_global_zero:
    values = torch.cat([value.detach().flatten() for value in model.parameters()])
    torch.save([callback.resumed and callback.resumed.step, values], f"{root}/result.pt")
"""


def result_of(root: Path) -> Any:
    return torch.load(root / "result.pt")


@pytest.mark.parametrize(("plugin", "ranks"), [("async", None), pytest.param("sharded", 2, marks=pytest.mark.slow)])
def test_after_sigkill_the_bits_are_those_of_a_run_without(
    tmp_path: Path, memory: Path, fork_script: ScriptRunner, plugin: str, ranks: int | None
) -> None:
    def run(root: Path, kill: int, check: bool = True) -> Any:
        root.mkdir(exist_ok=True)
        arguments = [root, memory, kill, plugin]
        return fork_script(TRAINS, *arguments, modules=LIGHTNING, ranks=ranks, check=check)

    assert run(tmp_path / "killed", 8, check=False).returncode in (-signal.SIGKILL, 1, -signal.SIGABRT)
    run(tmp_path / "killed", -1)
    run(tmp_path / "whole", -1)
    step, values = result_of(tmp_path / "killed")
    assert step in range(1, 9)  # from memory: there is no checkpoint on the disk
    assert result_of(tmp_path / "whole")[0] is None
    assert torch.equal(values, result_of(tmp_path / "whole")[1])
    assert names(memory) == []
