"""Train on two ranks whose saves or batches fail, and write what each rank raised.

Reads one specification per line from its standard input, forks one process per rank from itself, and answers
``"ended"`` or ``"hung"`` (then the ranks were killed). Each rank writes the exception that it caught as JSON.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed._composable.fsdp import fully_shard

import ckpt_core.checkpointer as checkpointer_module
import lightning_ckpt
from ckpt_core.process import awaited_paths
from lightning_ckpt import ResumableCheckpoint
from tests.lightning_ckpt.reliable_cases import Callback, FillsDisk, GatedStorage, model_of, names, trainer_of
from tests.support.forking import fork_rank, rank_variables, serve


class Opens(Callback):
    """Opens the gate of the storage soon after training has raised, and records what was pending and saved by then."""

    at_exception: Any = None

    def on_exception(self, trainer: Any, *_: Any) -> None:
        pending = trainer.strategy.checkpoint_io.checkpointer.pending
        saved = Path(trainer.checkpoint_callback.dirpath)
        with awaited_paths.without_waiting():
            self.at_exception = [list(pending), names(saved) if saved.exists() else []]
        threading.Timer(0.2, GatedStorage.opened.set).start()


def left_over(plugin: Any) -> list[str]:
    """Return the threads, saves and buffers that should be gone by now, but are not."""
    buffers = plugin.checkpointer._pipeline.buffers
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("ckpt-")]
    for thread in threads:
        thread.join(60.0)  # a thread that starts late finds nothing to do
    found = [*(thread.name for thread in threads if thread.is_alive()), *plugin.checkpointer.pending]
    if buffers._lent or buffers._idle:
        found.append("buffers")
    return found


def main(spec: dict[str, Any], rank: int) -> None:
    torch.set_num_threads(1)
    saved, opens = Path(spec["saved"]), Opens()
    options = {"on_error": spec["on_error"]} if "on_error" in spec else {}
    plugin = getattr(lightning_ckpt, spec.get("io", "AsyncCheckpointIO"))(**options)
    settings = {"every_n_train_steps": 2, "save_top_k": -1, "filename": "{step}", **spec.get("callback", {})}
    callbacks: list[Any] = [opens, ResumableCheckpoint(saved, **settings)]
    if "second" in spec:
        callbacks.append(ResumableCheckpoint(Path(spec["second"]), every_n_train_steps=3, filename="{step}"))
    if "raise_at" not in spec:
        callbacks.append(FillsDisk(saved.parent, spec.get("full_at", -1), spec.get("free_at")))
    if plugin.checkpointer.strategy == "async" and ("full_at" in spec or "raise_at" in spec):
        checkpointer_module.storage_for = lambda *_: GatedStorage()  # type: ignore[assignment,misc]
    strategy: Any = "ddp"
    model = model_of(raise_at=spec.get("raise_at"))
    if spec.get("strategy") == "model_parallel":
        strategy = ModelParallelStrategy(
            data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=False
        )
        model.configure_model = lambda: fully_shard(model, mesh=model.device_mesh["data_parallel"])
    trainer_options = {"accumulate_grad_batches": 1, **spec.get("trainer", {})}
    epochs = 2 * trainer_options["accumulate_grad_batches"]
    trainer = trainer_of(
        Path(spec["directory"]),
        callbacks,
        devices=2,
        strategy=strategy,
        plugins=[plugin],
        max_epochs=epochs,
        **trainer_options,
    )
    result: dict[str, Any] = {"type": None, "message": None, "errno": None, "path": None}
    try:
        trainer.fit(model)
    except Exception as error:  # noqa: BLE001 - whatever it is, the test looks at it
        traceback.print_exc()
        result = {
            "type": type(error).__name__,
            "message": str(error),
            "errno": getattr(error, "errno", None),
            "path": getattr(error, "path", None),
        }
    result |= {
        "step": trainer.global_step,
        "failures": plugin.checkpointer.failures,
        "left": left_over(plugin),
        "at_exception": opens.at_exception,
    }
    Path(spec["results"][rank]).write_text(json.dumps(result))


def wait_for(processes: list[int], limit_seconds: float) -> str:
    deadline = time.monotonic() + limit_seconds
    running = set(processes)
    while running and time.monotonic() < deadline:
        running = {process for process in running if os.waitpid(process, os.WNOHANG) == (0, 0)}
        time.sleep(0.01)
    for process in running:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    return "hung" if running else "ended"


def run(spec: dict[str, Any]) -> str:
    processes = []
    for rank in range(2):
        body, log = functools.partial(main, spec, rank), f"{spec['results'][rank]}.log"
        processes.append(fork_rank(body, rank_variables(rank, 2, spec["port"]), log))
    return wait_for(processes, spec["limit_seconds"])


if __name__ == "__main__":
    serve(run)
