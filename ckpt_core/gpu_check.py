"""``python -m ckpt_core.gpu_check``: what saves cost a training on this machine's accelerator, in one table.

It trains a small model with AdamW, without saves and with saves of each kind, and loads the last one. The table is in
Markdown, to be pasted.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ckpt_core._devices import device_to_check, peak_bytes, pinned_copy_rate, wait_for_devices
from ckpt_core.checkpointer import Checkpointer

__all__ = ["main"]

_LAYERS = 8
_COPIED = 256 * 2**20  # bytes, to find out how fast a pinned copy is
_MIB = 2**20
_LONGEST_STEP = 1000  # forward and backward passes

Save = Callable[[dict[str, Any], str], None]


class _Training:
    """A model of linear layers and AdamW, which have about as many bytes as they are told to.

    Args:
        device: Where it trains.
        nbytes: Of parameters and moments.
        batch: Rows of a batch.
    """

    def __init__(self, device: torch.device, nbytes: int, batch: int) -> None:
        width = max(8, round((nbytes / (3 * 4 * _LAYERS)) ** 0.5))
        layers = [torch.nn.Linear(width, width) for _ in range(_LAYERS)]
        self.model = torch.nn.Sequential(*layers).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        self.passes = 1  # forward and backward, before each step of the optimizer
        self._batch = torch.randn(batch, width).to(device)

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def nbytes(self) -> int:
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return sum(tensor.nbytes for tensor in [*self.model.parameters(), *moments])

    def run(self, steps: int, *, every: int = 0, save: Callable[[], None] | None = None) -> tuple[float, list[float]]:
        """Return the seconds that some steps took, until the device has done them, and those of each save."""
        stalls = []
        wait_for_devices([self._batch])
        begin = time.perf_counter()
        for step in range(1, steps + 1):
            for _ in range(self.passes):
                self.model(self._batch).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if save is not None and step % every == 0:
                stopped = time.perf_counter()
                save()
                stalls.append(time.perf_counter() - stopped)
        wait_for_devices([self._batch])
        return time.perf_counter() - begin, stalls


def _row(training: _Training, device: torch.device, options: argparse.Namespace, alone: float, save: Save) -> list[str]:
    path = os.path.join(options.path, "saved")
    save(training.state(), path)  # allocates and pins memory
    peak_bytes(device, reset=True)
    training.run(2)
    before = peak_bytes(device, reset=True)
    seconds, stalls = training.run(options.steps, every=options.every, save=lambda: save(training.state(), path))
    after = peak_bytes(device)
    extra = "-" if before is None or after is None else f"{(after - before) / _MIB:.0f} MiB"
    return [f"{statistics.median(stalls) * 1000:.1f} ms", f"{seconds / alone - 1:+.1%}".replace("%", " %"), extra]


def _measure(options: argparse.Namespace, device: torch.device, name: str) -> None:
    training = _Training(device, int(options.gigabytes * 1e9), options.batch)
    training.run(2)
    one, _ = training.run(1)
    training.passes = max(1, min(_LONGEST_STEP, round(options.step_ms / 1000 / max(one, 1e-6))))
    alone, _ = training.run(options.steps)
    size, rate = training.nbytes(), pinned_copy_rate(device, min(_COPIED, training.nbytes()))
    print(f"{name}, torch {torch.__version__}, {size / 1e9:.2f} GB of weights and moments, ", end="")
    print(f"a save every {options.every} steps of {alone / options.steps * 1000:.0f} ms\n")
    rows: list[list[str]] = []
    with Checkpointer(overlap=True) as ours:
        rows.append(["async, overlap=True", *_row(training, device, options, alone, _save_with(ours))])
    with Checkpointer() as ours:
        rows.append(["async", *_row(training, device, options, alone, _save_with(ours))])
        begin = time.perf_counter()
        ours.load(os.path.join(options.path, "saved"), map_location=device)
        wait_for_devices(training.model.parameters())
        loaded = time.perf_counter() - begin
    shutil.rmtree(options.path)  # ours is a file, and DCP's a directory
    os.mkdir(options.path)
    dcp = _Dcp()
    try:
        theirs = ["DCP async_save", *_row(training, device, options, alone, dcp.save)]
        dcp.finish()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 - its own errors are no Exceptions; ours was measured
        theirs = [f"DCP async_save: {type(error).__name__}", "-", "-", "-"]
    rows.append(theirs)
    for row in (["saves", "stall", "training slower", "extra device memory"], ["---"] * 4, *rows):
        print("| " + " | ".join(row) + " |")
    stall = float(rows[1][1].removesuffix(" ms")) / 1000
    print(f"\nPinned copy: {rate / 1e9:.2f} GB/s; the stall of async is one at {size / stall / rate:.2f} of that rate.")
    print(f"Load to the device, verified: {loaded:.2f} s, {size / loaded / 1e9:.2f} GB/s.")


def _save_with(checkpointer: Checkpointer) -> Save:
    def save(state: dict[str, Any], path: str) -> None:
        checkpointer.save(state, path)

    return save


class _Dcp:
    """torch's own asynchronous saves, one after the other."""

    def __init__(self) -> None:
        self._under_way: Any = None

    def save(self, state: dict[str, Any], path: str) -> None:
        from torch.distributed.checkpoint.state_dict_saver import async_save

        self.finish()
        self._under_way = async_save(state, checkpoint_id=path, no_dist=True)

    def finish(self) -> None:
        """Wait for the save under way."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            getattr(under_way, "upload_completion", under_way).result()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print the table.

    Args:
        arguments: Of the command line.

    Returns:
        The exit status: 0, or 1 where there is no accelerator.
    """
    parser = argparse.ArgumentParser(
        prog="python -m ckpt_core.gpu_check", description="Measure what saves cost a training on this accelerator."
    )
    parser.add_argument("path", nargs="?", default=".", help="a directory on the disk that takes the checkpoints (.)")
    parser.add_argument("--gigabytes", type=float, default=4.0, help="of weights and moments (4)")
    parser.add_argument("--steps", type=int, default=60, help="of each run (60)")
    parser.add_argument("--every", type=int, default=20, help="how many steps lie between two saves (20)")
    parser.add_argument("--step-ms", type=float, default=250.0, help="about how long a step takes (250)")
    parser.add_argument("--batch", type=int, default=256, help="rows of a batch (256)")
    options = parser.parse_args(arguments)
    if not 1 <= options.every <= options.steps:
        parser.error("--every must be from 1 to the number of --steps")
    found = device_to_check()
    if found is None:
        print(f"torch {torch.__version__} finds no accelerator on this machine: there is nothing to measure")
        return 1
    options.path = tempfile.mkdtemp(prefix="ckpt-gpu-check-", dir=options.path)
    try:
        _measure(options, *found)
    finally:
        shutil.rmtree(options.path, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
