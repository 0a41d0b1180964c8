"""Measures what the callback costs per batch, with a model so small that most of a step is Lightning itself."""

from __future__ import annotations

import argparse
import logging
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from ckpt_core.recorder import FlightRecorder, WeightSample, digest_batch, digest_generators, digest_numbers
from ckpt_core.state.rng import RngState
from lightning_ckpt import ResumableCheckpoint


class _Tiny(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        # As many parameter tensors as a 12-layer GPT has, but tiny ones.
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(74))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.layers[0](batch[0]).pow(2).mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class _Clock(Callback):
    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.times.append(time.perf_counter())


def table(options: argparse.Namespace, directory: Path) -> dict[str, float]:
    """Print the time of a batch with stock ``ModelCheckpoint`` and with ours, and the difference; return the times."""
    found = _seconds_per_batch(str(directory), rounds=options.repeats)
    stock, ours = found["ModelCheckpoint"], found["ResumableCheckpoint"]
    print(f"one batch of a model of 74 tiny layers, loss logged; median of {options.repeats} rounds of 600 batches\n")
    for name, seconds in found.items():
        print(f"{name:40s} {seconds * 1e6:8.0f} us")
    print(f"{'difference':40s} {(ours - stock) * 1e6:8.0f} us per batch")
    print(f"{'flight recorder, batch of 1 MB':40s} {_recorder_seconds(directory) * 1e6:8.0f} us per batch")
    return found


def _recorder_seconds(directory: Path, *, steps: int = 2000) -> float:
    """Time what the flight recorder does in a step, on its own: medians of a whole step hide some microseconds."""
    model, rng, loss = _Tiny(), RngState.capture(), torch.tensor(0.5)
    batch = [torch.randn(256, 1000), torch.randint(0, 10, (256,))]
    recorder, weights = FlightRecorder(str(directory / "flight-record"), tell=print), WeightSample(model)
    times = []
    for step in range(steps):
        begun = time.perf_counter()
        recorder.record(
            number=step,
            epoch=0,
            batch=step,
            step=step,
            generators=digest_generators(rng),
            data=digest_batch(batch),
            rates=digest_numbers([0.1]),
            weights=weights.digest(),
            loss=loss,
        )
        times.append(time.perf_counter() - begun)
    recorder.close()
    return statistics.median(times)


def _seconds_per_batch(directory: str, *, batches: int = 600, rounds: int = 5) -> dict[str, float]:
    kinds: dict[str, Callable[[], Callback]] = {
        "ModelCheckpoint": lambda: ModelCheckpoint(every_n_train_steps=10**6),
        "ResumableCheckpoint, recorder=False": lambda: ResumableCheckpoint(every_n_train_steps=10**6, recorder=False),
        "ResumableCheckpoint": lambda: ResumableCheckpoint(every_n_train_steps=10**6),
    }
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(rounds):
        for name, make in kinds.items():
            found[name].append(_one_round(make(), batches, directory))
    return {name: statistics.median(values) for name, values in found.items()}


def _one_round(callback: Callback, batches: int, directory: str) -> float:
    clock = _Clock()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = L.Trainer(
            default_root_dir=directory,
            max_steps=batches,
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[clock, callback],
        )
        trainer.fit(_Tiny(), DataLoader(TensorDataset(torch.randn(4 * batches, 8)), batch_size=4, shuffle=True))
    gaps = [after - before for before, after in zip(clock.times[50:-1], clock.times[51:], strict=True)]
    return statistics.median(gaps)
