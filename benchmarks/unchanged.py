"""Measures what each save of a fine-tune (adapters over a frozen base) writes, compared with writing everything."""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.states import gpt_state
from ckpt_core import DirectoryCheckpointer, Kind, Part

FROZEN = 0.95  # of the parameters
WARM_UP = 1  # the first save, which also writes what does not change
AIM = 1.05


def table(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Print the table; return its figures."""
    base = gpt_state(options.layers)["state_dict"]
    adapters = _adapters(base)
    moments = {name: {"exp_avg": value / 2, "exp_avg_sq": value / 3} for name, value in adapters.items()}
    frozen = sum(value.nbytes for value in base.values())
    trained = 3 * sum(value.nbytes for value in adapters.values())
    print(
        f"one process; {frozen / 1e6:.0f} MB frozen, {trained / 1e6:.0f} MB trained (adapters and their Adam state); "
        f"{options.repeats} saves after {WARM_UP}, {options.idle:g} s idle before each\n"
    )
    print(f"{'':22s} {'written per save':>18s} {'of the trained':>15s} {'durable':>10s}")
    parts = [
        Part("model", {**base, **adapters}, Kind.SHARDED, frozenset(base)),
        Part("optimizer", moments, Kind.SHARDED),
    ]
    changing = [*adapters.values(), *(value for entry in moments.values() for value in entry.values())]
    results: dict[str, Any] = {"frozen_bytes": frozen, "trained_bytes": trained, "aim": AIM}
    for name, link in (("unchanged files linked", True), ("everything written", False)):
        results[name] = found = _measure(parts, changing, options, directory / "run", link=link)
        ratio = found["bytes"] / trained
        print(f"{name:22s} {found['bytes'] / 1e6:15.1f} MB {ratio:14.3f}x {found['seconds'] * 1e3:7.0f} ms")
    ratio = results["unchanged files linked"]["bytes"] / trained
    print(f"\naim: at most {AIM} of the trained bytes: {'reached' if ratio <= AIM else 'MISSED'}")
    return results


def _adapters(base: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return two low-rank matrices for each weight of a layer, of the rank that makes the base ``FROZEN`` of all."""
    layers = {name: weight for name, weight in base.items() if weight.ndim == 2 and ".h." in name}
    wanted = sum(weight.numel() for weight in base.values()) * (1 / FROZEN - 1)
    rank = round(wanted / sum(sum(weight.shape) for weight in layers.values()))
    found = {}
    for name, (rows, columns) in ((name, weight.shape) for name, weight in layers.items()):
        found[f"{name}.lora_a"] = torch.randn(rank, columns)
        found[f"{name}.lora_b"] = torch.randn(rows, rank)
    return found


def _measure(
    parts: list[Part], changing: list[torch.Tensor], options: argparse.Namespace, directory: Path, *, link: bool
) -> dict[str, float]:
    seen: set[int] = set()
    written: list[int] = []
    seconds: list[float] = []
    with DirectoryCheckpointer(slice_replicated=True, link_unchanged=link) as checkpointer:
        for number in range(WARM_UP + options.repeats):
            for tensor in changing:
                tensor.add_(1e-3)
            os.sync()
            time.sleep(options.idle)
            started = time.perf_counter()
            checkpointer.save(parts, directory / str(number))
            checkpointer.wait()
            seconds.append(time.perf_counter() - started)
            # A linked file has the same inode, so new inodes are what was written.
            new = [status for file in (directory / str(number)).iterdir() if (status := file.stat()).st_ino not in seen]
            written.append(sum(status.st_size for status in new))
            seen.update(status.st_ino for status in new)
            if not link:  # a reused inode number would be taken for an old file
                seen.clear()
                shutil.rmtree(directory / str(number))
    shutil.rmtree(directory)
    return {"bytes": statistics.median(written[WARM_UP:]), "seconds": statistics.median(seconds[WARM_UP:])}
