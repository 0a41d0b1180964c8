"""Train on several gloo ranks in fresh processes, for the tests of sharded checkpoints.

Reads one specification per line from its standard input, forks one process per rank from itself, which saves the
time of the imports, and answers with their exit statuses. Each rank writes ``RESULT.<rank>.json``. See
:class:`Spec`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import os
import signal
import threading
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from lightning_ckpt import ResumableCheckpoint, ShardedCheckpointIO
from tests.lightning_ckpt.sharded_faults import SetInBatch, faulty_storage
from tests.support.forking import fork_rank, rank_variables, serve
from tests.support.seen import seen_by

for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
    logging.getLogger(name).setLevel(logging.ERROR)

MACHINE_ENDS_SECONDS = 120.0


@dataclasses.dataclass
class Spec:
    """What to train.

    Attributes:
        ranks: Number of ranks.
        kind: ``"ddp"``, ``"mp"`` (``ModelParallelStrategy`` with FSDP2) or ``"fsdp"`` (FSDP1).
        directory: Directory of the checkpoints.
        result: Path of the results, without ``.<rank>.json``.
        port: Port of the process group.
        seed: Seed of the run.
        ckpt_path: Checkpoint to resume from.
        trainer: Arguments of the Trainer.
        callback: Arguments of :class:`ResumableCheckpoint`; None for no callback.
        plugin: Arguments of :class:`ShardedCheckpointIO`; None for Lightning's own plugin.
        samples: Size of the data set.
        batch: Samples in a batch.
        loader: ``"map"``, ``"stream"``, ``"sampler"`` (the user's own ``DistributedSampler``), or ``"stateful"`` (a
            ``StatefulDataLoader`` with a ``StatefulDistributedSampler``).
        workers: Data loading workers.
        manual: Number of batches per step of manual optimization; 0 for automatic optimization.
        average: Whether to average the weights.
        after: What to do after ``fit``: ``"save"``, ``"validate"`` and ``"test"`` with ``ckpt_path="best"``.
        save_at: Hook and number of its call at which to save to ``DIRECTORY/saved.ckpt``, and whether to kill all
            ranks then.
        fault: ``{"rank": 1 or None for all, "save": "step=6", "act": "fail" | "kill"}``: what happens in the middle of
            a save. ``"late": 9``: rank 0 learns of it only in the 9th batch.
        spoils: The only rank whose checkpoint after step 6 has no weights, which no plugin can save.
    """

    ranks: int
    kind: str
    directory: str
    result: str
    port: int
    seed: int = 1
    ckpt_path: str | None = None
    trainer: dict[str, Any] = dataclasses.field(default_factory=dict)
    callback: dict[str, Any] | None = dataclasses.field(default_factory=dict)
    plugin: dict[str, Any] | None = dataclasses.field(default_factory=dict)
    samples: int = 64
    batch: int = 4
    loader: str = "map"
    workers: int = 0
    manual: int = 0
    average: bool = False
    after: list[str] = dataclasses.field(default_factory=list)
    save_at: list[Any] | None = None
    fault: dict[str, Any] | None = None
    spoils: int | None = None


class Samples(Dataset):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.sin(torch.arange(8.0) * (index + 1))


class Stream(IterableDataset):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Any:
        for index in range(self.size):
            yield index, torch.sin(torch.arange(8.0) * (index + 1))


class Model(pl.LightningModule):
    def __init__(self, spec: Spec) -> None:
        super().__init__()
        # large enough that each rank writes a slice; odd, so that shards are uneven
        width = 1001 if spec.kind == "ddp" else 15
        out = 8 if spec.kind == "fsdp" else 3  # torch loads nothing into an FSDP1 rank that holds no part of a tensor
        middle = torch.nn.BatchNorm1d(width) if spec.kind == "ddp" else torch.nn.Identity()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, width), middle, torch.nn.Dropout(0.2), torch.nn.Linear(width, out, bias=False)
        )
        self.spec = spec
        self.automatic_optimization = not spec.manual
        self.losses: list[float] = []
        self._sharded = False

    @property
    def seen(self) -> list[Any]:
        return seen_by(self)

    def configure_model(self) -> None:
        if self.spec.kind == "mp" and not self._sharded:
            self._sharded = True
            mesh = self.device_mesh["data_parallel"]
            for layer in (self.net[0], self.net[3]):
                fully_shard(layer, mesh=mesh)
            fully_shard(self, mesh=mesh)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        indices, x = batch
        loss = self.net(x).pow(2).mean()
        self.losses.append(loss.item())
        self.seen.append([self.trainer.current_epoch, batch_idx, self.trainer.global_step, indices.tolist()])
        self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True)
        if not self.spec.manual:
            return loss
        self.manual_backward(loss)
        if (batch_idx + 1) % self.spec.manual == 0:
            self.optimizers().step()
            self.optimizers().zero_grad()
        return None

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch[1]).pow(2).mean(), sync_dist=True)

    test_step = validation_step

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.trainer.global_rank == self.spec.spoils and self.trainer.global_step == 6:
            checkpoint["state_dict"] = None

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def train_dataloader(self) -> Any:
        if self.spec.loader == "stream":
            return DataLoader(Stream(self.spec.samples), self.spec.batch, num_workers=self.spec.workers)
        data = Samples(self.spec.samples)
        if self.spec.loader == "sampler":
            sampler = DistributedSampler(data, self.trainer.world_size, self.trainer.global_rank, seed=5)
            return DataLoader(data, self.spec.batch, sampler=sampler, num_workers=self.spec.workers)
        if self.spec.loader == "stateful":
            from torchdata.stateful_dataloader import StatefulDataLoader
            from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

            sampler = StatefulDistributedSampler(data, self.trainer.world_size, self.trainer.global_rank, seed=5)
            return StatefulDataLoader(data, self.spec.batch, sampler=sampler, num_workers=self.spec.workers)
        return DataLoader(data, self.spec.batch, shuffle=True, num_workers=self.spec.workers)

    def val_dataloader(self) -> Any:
        return DataLoader(Samples(8), 2)

    def test_dataloader(self) -> Any:
        return DataLoader(Samples(8), 2)


class FSDPOnCPU(FSDPStrategy):
    """FSDP without a GPU, which Lightning refuses and torch allows."""

    def _setup_model(self, model: Any) -> Any:
        return FullyShardedDataParallel(
            module=model,
            cpu_offload=self.cpu_offload,
            mixed_precision=self.mixed_precision_config,
            sharding_strategy=self.sharding_strategy,
            device_id=self.root_device,
            **self.kwargs,
        )


def make_strategy(spec: Spec) -> Any:
    if spec.kind == "mp":
        return ModelParallelStrategy(data_parallel_size=spec.ranks, tensor_parallel_size=1)
    if spec.kind == "fsdp":
        return FSDPOnCPU(state_dict_type="sharded")
    return "ddp" if spec.ranks > 1 else "auto"


class SaveAt(Callback):
    """Saves at the n-th call of a hook; can kill all ranks when that checkpoint is durable."""

    def __init__(self, path: Path, hook: str, count: int, kill: bool) -> None:
        self.calls, self.seen = 0, 0

        def call(trainer: Any, module: Any, *args: Any) -> None:
            self.calls += 1
            if self.calls == count:
                self.seen = len(module.seen)
                trainer.save_checkpoint(path)
                if kill:
                    end_machine_once(path)

        setattr(self, hook, call)


def end_machine_once(path: Path) -> None:
    deadline = time.monotonic() + MACHINE_ENDS_SECONDS
    while not (path / "manifest.json").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(0, signal.SIGKILL)


class SaveAgain(Callback):
    """Saves what was just loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_start(self, trainer: Any, module: Any) -> None:
        trainer.save_checkpoint(self.path)


def digest(value: torch.Tensor) -> str:
    return hashlib.sha256(value.detach().cpu().contiguous().numpy().tobytes()).hexdigest()[:16]


def weights_of(model: Model) -> dict[str, str]:
    """Return a digest of each tensor; of distributed tensors, of this rank's shard."""
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    local = {name: value.to_local() if hasattr(value, "to_local") else value for name, value in state.items()}
    return {name: digest(value) for name, value in local.items()}


def make_trainer(spec: Spec, plugin: ShardedCheckpointIO | None, callbacks: list[Any]) -> pl.Trainer:
    validates = not callbacks or "val" in spec.after
    defaults = {"max_epochs": 100, "limit_val_batches": 2 if validates else 0, "num_sanity_val_steps": 0}
    return pl.Trainer(
        **{**defaults, **spec.trainer},
        accelerator="cpu",
        devices=spec.ranks,
        inference_mode=spec.kind != "mp",  # FSDP2 cannot gather weights in inference mode
        strategy=make_strategy(spec),
        plugins=[] if plugin is None else [plugin],
        callbacks=callbacks,
        default_root_dir=spec.directory,
        logger=False,
        enable_checkpointing=any(isinstance(callback, ResumableCheckpoint) for callback in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def train(spec: Spec, rank: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    pl.seed_everything(spec.seed, verbose=False)
    directory = Path(spec.directory)
    plugin = None if spec.plugin is None else ShardedCheckpointIO(**spec.plugin)
    callbacks: list[Any] = []
    storage = None
    if spec.fault is not None:
        late = threading.Event()
        assert plugin is not None
        storage = plugin._settings["storage"] = faulty_storage(spec.fault, rank, late)
        callbacks.append(SetInBatch(late, spec.fault.get("late", 0)))
    if spec.callback is not None:
        callbacks.append(ResumableCheckpoint(dirpath=directory, **spec.callback))
    if spec.average:
        from lightning.pytorch.callbacks import EMAWeightAveraging  # since Lightning 2.6

        callbacks.append(EMAWeightAveraging(decay=0.9))
    save = SaveAt(directory / "saved.ckpt", *spec.save_at) if spec.save_at else None
    if save is not None:
        callbacks.append(save)
    if "again" in spec.after:
        callbacks.append(SaveAgain(directory / "again.ckpt"))
    model = Model(spec)
    trainer = make_trainer(spec, plugin, callbacks)
    found: dict[str, Any] = {"raised": None}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(model, ckpt_path=spec.ckpt_path)
            found["weights"] = weights_of(model)
            if "save" in spec.after:
                trainer.save_checkpoint(directory / "after.ckpt")
            for stage in ("validate", "test"):
                if stage in spec.after:
                    path = trainer.checkpoint_callback.best_model_path
                    fresh = make_trainer(spec, ShardedCheckpointIO(), [])
                    metrics = getattr(fresh, stage)(Model(spec), ckpt_path=path, verbose=False)
                    found[stage] = {**metrics[0], "path": path}
        except Exception as error:  # noqa: BLE001 - the test says what it must be
            traceback.print_exc()
            found["raised"] = {"class": type(error).__name__, "message": str(error)}
    found.update(
        step=trainer.global_step,
        epoch=trainer.current_epoch,
        seen=model.seen,
        losses=model.losses,
        seen_at_save=save.seen if save is not None else None,
        warnings=[str(warning.message) for warning in caught if "guaranteed to be exact" in str(warning.message)],
        begun=storage and sum(operation.name == "begin_directory" for operation in storage.operations),
        pending=[] if plugin is None else list(plugin.checkpointer.pending),
        files=sorted(entry.name for entry in directory.iterdir()),
    )
    return found


def write_result(spec: Spec, rank: int) -> None:
    Path(f"{spec.result}.{rank}.json").write_text(json.dumps(train(spec, rank)))


def run(asked: dict[str, Any]) -> list[int]:
    """Run the ranks and return their exit statuses."""
    spec = Spec(**asked)
    processes: list[int] = []
    for rank in range(spec.ranks):
        log, group = f"{spec.result}.{rank}.log", processes[0] if processes else 0
        body = functools.partial(write_result, spec, rank)
        processes.append(fork_rank(body, rank_variables(rank, spec.ranks, spec.port), log, group))
    left, statuses = set(processes), dict.fromkeys(processes, 0)
    while left:
        process, status = os.wait()
        statuses[process] = os.waitstatus_to_exitcode(status)
        left.discard(process)
        if statuses[process] != 0:
            end_rest(left)
    return [statuses[process] for process in processes]


def end_rest(processes: set[int]) -> None:
    """Give the other ranks a moment to notice that one is gone, as a launcher does, and kill them."""
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline and any(_runs(process) for process in processes):
        time.sleep(0.1)
    for process in processes:
        if _runs(process):
            os.kill(process, signal.SIGKILL)


def _runs(process: int) -> bool:
    state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    return state != "Z"


if __name__ == "__main__":
    serve(run)
