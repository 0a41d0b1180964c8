"""Compares contenders that save one file: stall, time to durable and extra memory of each."""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.save import CONTENDERS, COPY, WRITE, is_limit, measure, peak_extra_memory, print_beaten_limits
from benchmarks.states import state_for, tensor_bytes, tensors_in


def table(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Print the table; return its figures."""
    state = state_for(options)
    nbytes = tensor_bytes(state)
    tensors = sum(1 for _ in tensors_in(state))
    print(
        f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}; state {nbytes / 1e9:.2f} GB: "
        f"{tensors} tensors; {options.repeats} rounds, {options.idle:g} s idle before each save\n",
        flush=True,
    )
    timings = measure(state, directory, repeats=options.repeats, idle_seconds=options.idle)
    del state
    contenders = [name for name in CONTENDERS if not is_limit(name)]
    memory = {name: _memory_in_own_process(name, options, directory) for name in contenders}
    copy = timings[COPY].stall
    write = timings[WRITE].durable
    stock = timings["Lightning TorchCheckpointIO + fsync"].durable

    print(
        f"{'':40s} {'first':>9s} {'stall':>9s} {'x copy':>7s} {'least':>7s} {'round':>7s} {'durable':>9s} {'x write':>8s} "
        f"{'round':>7s} {'x faster':>9s} {'memory':>8s}"
    )
    for name, timing in timings.items():
        extra = f"{memory[name]:7.2f}x" if name in memory else ""
        print(
            f"{name:40s} {timing.first * 1e3:6.0f} ms {timing.stall * 1e3:6.0f} ms {timing.stall / copy:6.2f}x "
            f"{timing.least / copy:6.2f}x {timing.over(timings[COPY], 'stalls'):6.2f}x {timing.durable * 1e3:6.0f} ms "
            f"{timing.durable / write:7.2f}x {timing.over(timings[WRITE], 'durables'):6.2f}x "
            f"{stock / timing.durable:8.2f}x {extra:>8s}"
        )
    print(
        "\nfirst: stall of the first save, in the process; x copy: stall over one copy of the tensors into a reused buffer, "
        "the fastest of three ways and all rounds; least: the same of the fastest save; x write: time to durable over a raw "
        "direct write;\nround: over the fastest copy or write of the same round, the median: the machine's speed changes "
        "between rounds;\nx faster: durable time of Lightning's TorchCheckpointIO + fsync over this one's; memory: most extra memory over "
        "five saves, as a multiple of the state"
    )
    print_beaten_limits(timings)
    figures = {
        name: {
            "first_s": t.first,
            "stall_s": t.stall,
            "least_s": t.least,
            "stall_over_copy_of_round": t.over(timings[COPY], "stalls"),
            "durable_over_write_of_round": t.over(timings[WRITE], "durables"),
            "durable_s": t.durable,
            "memory": memory.get(name),
        }
        for name, t in timings.items()
    }
    return {"state_bytes": nbytes, "contenders": figures}


def _memory_in_own_process(name: str, options: argparse.Namespace, directory: Path) -> float:
    shape = {"layers": options.layers, "tensors": options.tensors, "tensor_mb": options.tensor_mb}
    command = [sys.executable, "-m", "benchmarks.save_table", name, json.dumps(shape), str(directory)]
    root = Path(__file__).parents[1]
    return float(subprocess.run(command, check=True, capture_output=True, text=True, cwd=root).stdout.split()[-1])


def _print_memory(name: str, shape: str, directory: str) -> None:
    state = state_for(argparse.Namespace(**json.loads(shape)))
    with tempfile.TemporaryDirectory(dir=directory) as place:
        print(peak_extra_memory(state, Path(place), CONTENDERS[name], saves=5) / tensor_bytes(state))


if __name__ == "__main__":
    _print_memory(*sys.argv[1:])
