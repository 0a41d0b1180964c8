"""``make bench``: ours, the peers and the physical limits, side by side in one run; prints ratios.

Every figure is a median. Compare ratios within one run: absolute times depend on the machine and on what else it does.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from benchmarks.save import CONTENDERS, measure, peak_extra_memory
from benchmarks.states import gpt_state, tensor_bytes


def main() -> None:
    """Run the tables that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12, help="size of the GPT whose state is saved (12: 1.49 GB)")
    parser.add_argument("--repeats", type=int, default=5, help="counted rounds; one more is a warm-up")
    parser.add_argument("--idle", type=float, default=4.0, help="seconds of idling before each save")
    parser.add_argument("--directory", type=Path, help="where to write; a temporary folder by default")
    parser.add_argument("--output", type=Path, default=Path("benchmark_output"), help="where results.json goes")
    parser.add_argument("--memory-of", choices=list(CONTENDERS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="ckpt-bench-", dir=options.directory))
    try:
        if options.memory_of is not None:
            state = gpt_state(options.layers)
            print(peak_extra_memory(state, directory, options.memory_of, saves=5) / tensor_bytes(state))
        else:
            _tables(options, directory)
    finally:
        shutil.rmtree(directory)


def _tables(options: argparse.Namespace, directory: Path) -> None:
    state = gpt_state(options.layers)
    nbytes = tensor_bytes(state)
    tensors = len(state["state_dict"])
    print(
        f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}; state {nbytes / 1e9:.2f} GB: "
        f"{tensors} weights with Adam's moments; {options.repeats} rounds, {options.idle:g} s idle before each save\n"
    )
    timings = measure(state, directory, repeats=options.repeats, idle_seconds=options.idle)
    del state
    memory = {name: _memory_in_own_process(options, name) for name in CONTENDERS if not name.startswith("limit")}
    copy = timings["limit: one copy_ into a reused buffer"].stall
    write = timings["limit: raw direct write"].durable
    stock = timings["Lightning TorchCheckpointIO + fsync"].durable

    print(f"{'':40s} {'stall':>9s} {'x copy':>7s} {'durable':>9s} {'x write':>8s} {'x faster':>9s} {'memory':>8s}")
    for name, timing in timings.items():
        extra = f"{memory[name]:7.2f}x" if name in memory else ""
        print(
            f"{name:40s} {timing.stall * 1e3:6.0f} ms {timing.stall / copy:6.2f}x {timing.durable * 1e3:6.0f} ms "
            f"{timing.durable / write:7.2f}x {stock / timing.durable:8.2f}x {extra:>8s}"
        )
    print(
        "\nx copy: stall over one copy_ into a reused buffer; x write: time to durable over a raw direct write;\n"
        "x faster: durable time of Lightning's TorchCheckpointIO + fsync over this one's; memory: most extra memory over "
        "five saves, as a multiple of the state"
    )
    options.output.mkdir(parents=True, exist_ok=True)
    results = {
        name: {"stall_s": t.stall, "durable_s": t.durable, "memory": memory.get(name)} for name, t in timings.items()
    }
    (options.output / "results.json").write_text(json.dumps({"state_bytes": nbytes, "save": results}, indent=2) + "\n")


def _memory_in_own_process(options: argparse.Namespace, name: str) -> float:
    command = [sys.executable, __file__, "--memory-of", name, "--layers", str(options.layers)]
    if options.directory is not None:
        command += ["--directory", str(options.directory)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


if __name__ == "__main__":
    main()
