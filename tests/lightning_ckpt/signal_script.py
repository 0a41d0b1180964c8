"""Train on one or several ranks that get signals, for the tests of how signals are handled.

Reads one specification per line from its standard input, forks one process per rank from itself, and answers with
``"ended"`` or ``"hung"`` (then the ranks were killed). Each rank writes its results as JSON. A specification::

    {"directory": "...", "ranks": 2, "port": 29500, "limit_seconds": 60, "io": "AsyncCheckpointIO", "callback": "ours",
     "trainer": {...}, "options": {...}, "settings": {...}, "resume": "path" | null, "slurm": true,
     "machines": true, "shards": 2, "whole": true, "answers": 1e6, "then": ["test", "predict", "fit"], "finder": {...},
     "signals": [[rank, "SIGUSR1", "on_train_batch_start", count], ...], "never_durable": [rank, ...],
     "name": "first"}
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import os
import random
import signal
import threading
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule, fully_shard

import lightning_ckpt
from ckpt_core._commit.acting_together import Meeting
from ckpt_core.storage import Fault, FaultyStorage, LocalStorage
from lightning_ckpt import ResumableCheckpoint, _preemption
from lightning_ckpt._routing import gathering
from tests.lightning_ckpt.exact_cases import MemoryLogger, Model, PlannedError, outcome
from tests.lightning_ckpt.failure_script import wait_for
from tests.support.forking import fork_rank, rank_variables, serve


class Stages(Model):
    """A model that can also be tested and can predict."""

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def test_dataloader(self) -> Any:
        return self.train_dataloader()

    predict_dataloader = test_dataloader


class Sharded(Stages):
    """A model sharded over ranks, perhaps with each shard on two (HSDP); its statistics differ between ranks."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        norm = torch.nn.BatchNorm1d(8)
        self.net.insert(1, checkpoint_wrapper(norm) if options.get("wrapped") else norm)

    def configure_model(self) -> None:
        for layer in (*self.net[:2], self.net[3], self.other):
            if not isinstance(layer, FSDPModule):
                fully_shard(layer, mesh=self.device_mesh)


class Signals(pl.Callback):
    """Sends this process a signal at the n-th call of a hook, or raises there."""

    def __init__(self, what: str, hook: str, count: int) -> None:
        self.left, self.sent = count, False

        def call(trainer: Any, *_: Any) -> None:
            if trainer.sanity_checking != (hook == "on_sanity_check_start"):
                return
            self.left -= 1
            if self.left == 0 and what == "raise":
                raise PlannedError
            self.sent = self.sent or self.left == 0
            if self.left == 0 and what == "notice":
                (Path(trainer.default_root_dir) / "notice").touch()
            elif self.left == 0:
                os.kill(os.getpid(), getattr(signal, what.removesuffix(" and wait")))
                time.sleep(0.5 if what.endswith(" and wait") else 0.0)  # so that threads notice it

        setattr(self, hook, call)


class OwnGenerators(pl.Callback):
    """Seeds the generators of each rank differently, after the strategy has given all ranks the same seed."""

    def on_fit_start(self, trainer: Any, *_: Any) -> None:
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(trainer.global_rank)


class NotingMeeting(Meeting):
    """A meeting that records whether it has made its rank act."""

    has_acted = False

    def at(self, position: Any) -> Any:
        call = super().at(position)
        self.has_acted |= bool(call.requests)
        return call


class Patience(pl.Callback):
    """Holds a rank that sent itself a signal or a notice in its next batch until the ranks know where they act on it.

    Otherwise these batches take less time than a thread waits for its turn on a busy machine.
    """

    def __init__(self, signals: list[Signals]) -> None:
        self.signals, self.begun = signals, 0

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.begun += any(signals.sent for signals in self.signals)
        meeting = getattr(vars(trainer).get("_lightning_ckpt_boundaries"), "_meeting", None)
        limit = time.monotonic() + 30.0
        while self.begun == 2 and meeting is not None and meeting._thread is not None and time.monotonic() < limit:
            if meeting.has_acted or meeting._due is not None or not meeting._thread.is_alive():
                break
            time.sleep(0.001)


def callback_of(name: str, directory: Path, settings: dict[str, Any]) -> list[Any]:
    if name == "none":
        return []
    kind = {"ours": ResumableCheckpoint, "stock": ModelCheckpoint, "on_exception": ResumableCheckpoint}[name]
    also = [OnExceptionCheckpoint(directory / "saved", filename="on_exception")] if name == "on_exception" else []
    return [*also, kind(**{"dirpath": directory / "saved", "filename": "{step}", "save_top_k": -1, **settings})]


def main(spec: dict[str, Any], rank: int) -> None:
    torch.set_num_threads(1)
    gathering._INTERRUPTED_TIMEOUT = datetime.timedelta(seconds=2)  # type: ignore[attr-defined]
    _preemption.Meeting = NotingMeeting  # type: ignore[misc]
    directory = Path(spec["directory"])
    if "answers" in spec:  # how long a rank waits for ranks that do not report their position
        Meeting.__init__.__kwdefaults__["answer_within"] = spec["answers"]  # type: ignore[attr-defined,index]
    pl.seed_everything(spec.get("seed", 1), verbose=False)
    strategy: Any = "ddp" if spec["ranks"] > 1 else "auto"
    is_sharded = "shards" in spec
    model = (Sharded if is_sharded else Stages)(spec.get("options", {}))
    if is_sharded:
        replicas = spec["ranks"] // spec["shards"]
        sizes = {"data_parallel_size": replicas, "tensor_parallel_size": spec["shards"]}
        strategy = ModelParallelStrategy(**sizes, save_distributed_checkpoint=not spec.get("whole"))
    signals = [Signals(*rest) for target, *rest in spec.get("signals", []) if target == rank]
    callbacks: list[Any] = [*signals, Patience(signals)]
    callbacks += [OwnGenerators()] if spec.get("own_generators") else []
    callbacks += [pl.callbacks.LearningRateFinder(**spec["finder"])] if "finder" in spec else []
    callbacks += callback_of(spec.get("callback", "ours"), directory, spec.get("settings", {}))
    plugins: list[Any] = []
    if spec.get("io"):
        plugins.append(getattr(lightning_ckpt, spec["io"])(**spec.get("io_settings", {})))
    if rank in spec.get("never_durable", []):
        plugins[0]._settings["storage"] = FaultyStorage(LocalStorage(), [Fault("commit", until=threading.Event())])
    if spec.get("slurm"):
        plugins.append(SLURMEnvironment(auto_requeue=True))
    settings = {
        "accelerator": "cpu",
        "devices": spec["ranks"],
        "strategy": strategy,
        "max_epochs": 3,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 2,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": directory,
    }
    trainer = pl.Trainer(
        **{**settings, **spec.get("trainer", {})}, callbacks=callbacks, plugins=plugins, logger=MemoryLogger()
    )
    model.lr = 0.02
    result: dict[str, Any] = {"raised": None, "stages": []}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            if spec.get("validate"):
                trainer.validate(model, verbose=False)
            else:
                trainer.fit(model, ckpt_path=spec.get("resume"))
            for stage in spec.get("then", []):
                result["stages"].append(stage)
                getattr(trainer, stage)(model)
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            traceback.print_exc()
            result["raised"] = type(error).__name__
            result["status"] = getattr(error, "code", None)
    result["warnings"] = [str(w.message) for w in caught if "exact" in str(w.message)]
    result |= dataclasses.asdict(outcome(trainer, model)) if not spec.get("validate") else {}
    result["ckpt_path"] = None if trainer.ckpt_path is None else str(trainer.ckpt_path)
    (directory / f"{spec['name']}.{rank}.json").write_text(json.dumps(result))


def begin(spec: dict[str, Any], rank: int) -> None:
    """Run one rank, with the environment variables that its launcher would set."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(spec["port"])}
    if spec.get("slurm"):
        tasks = {"SLURM_NTASKS": spec["ranks"], "SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NODEID": 0}
        tasks |= {"SLURM_JOB_ID": 17, "SLURM_JOB_NAME": "train", "SLURM_NTASKS_PER_NODE": spec["ranks"]}
        os.environ.update({**address, **{name: str(value) for name, value in tasks.items()}})
        os.environ["PATH"] = spec["directory"] + os.pathsep + os.environ["PATH"]
    elif spec.get("machines"):  # one rank on each, where the same path is another directory
        os.chdir(f"{spec['directory']}/{rank}")
        os.environ.update({**address, "NODE_RANK": str(rank), "WORLD_SIZE": str(spec["ranks"]), "LOCAL_RANK": "0"})
    else:
        os.environ.update(rank_variables(rank, spec["ranks"], spec["port"]))
    main(spec, rank)


def run(spec: dict[str, Any]) -> str:
    log = f"{spec['directory']}/{spec['name']}"
    ranks = range(spec["ranks"])
    processes = [fork_rank(functools.partial(begin, spec, rank), {}, f"{log}.{rank}.log") for rank in ranks]
    return wait_for(processes, spec["limit_seconds"])


if __name__ == "__main__":
    serve(run)
