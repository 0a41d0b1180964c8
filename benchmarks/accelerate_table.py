"""Times ``Accelerator.save_state``, ours and stock, next to the machine's limits, and what attaching costs per step."""

from __future__ import annotations

import argparse
import functools
import itertools
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

from accelerate_ckpt._attach import attach, uninstall
from accelerate_ckpt._state.session import session_of
from benchmarks.save import (
    COPY,
    WRITE,
    Contender,
    FreshPaths,
    Make,
    fsync,
    measure,
    one_copy,
    peak_extra_memory,
    print_beaten_limits,
    raw_direct_write,
)
from benchmarks.states import gpt_state, tensor_bytes

STOCK = "accelerate save_state + fsync"


def table(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Print both tables; return their figures."""
    saves = _table_of_saves(options, directory)
    steps = _table_of_steps(options)
    return {**saves, "step_s": steps}


# ---- saving ----------------------------------------------------------------------------------------------------------


class _Model(torch.nn.Module):
    """The weights of a state, as the parameters of a module."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, weight in weights.items():
            self.register_parameter(name.replace(".", "_"), torch.nn.Parameter(weight))


def _prepared(state: dict[str, Any], **options: Any) -> Accelerator:
    """Return an Accelerator whose model and optimizer hold the tensors of ``state``; with options, attach ours."""
    accelerator = Accelerator(cpu=True)
    if options:
        attach(accelerator, **options)
    model = _Model(state["state_dict"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    moments = state["optimizer_states"][0]["state"]
    for index, parameter in enumerate(model.parameters()):
        optimizer.state[parameter] = dict(moments[index])
    data = DataLoader(TensorDataset(torch.zeros(64, 1)), batch_size=4, shuffle=True)
    accelerator.prepare(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 10), data)
    return accelerator


class _Saves(FreshPaths):
    """Saves to a new directory each time, after changing every tensor."""

    def __init__(self, accelerator: Accelerator, path: Path) -> None:
        super().__init__(path.with_suffix(""))
        self._accelerator = accelerator

    def prepare(self) -> None:
        super().prepare()
        tensors = [parameter.data for model in self._accelerator._models for parameter in model.parameters()]
        for optimizer in self._accelerator._optimizers:
            tensors += [value for entry in optimizer.state.values() for value in entry.values()]
        torch._foreach_add_(tensors, 1e-3)

    def save(self) -> None:
        self._accelerator.save_state(str(self.path))


def _ours(strategy: str, state: dict[str, Any], path: Path) -> Contender:
    accelerator = _prepared(state, strategy=strategy)
    session = session_of(accelerator)
    assert session is not None
    saves = _Saves(accelerator, path)
    return Contender(save=saves.save, finish=session.checkpointer.wait, close=session.finish, prepare=saves.prepare)


def _stock(state: dict[str, Any], path: Path) -> Contender:
    saves = _Saves(_prepared(state), path)

    def finish() -> None:
        for file in saves.path.iterdir():
            fsync(file)
        fsync(saves.path)

    return Contender(save=saves.save, finish=finish, prepare=saves.prepare)


OURS = {f"accelerate_ckpt {strategy}": functools.partial(_ours, strategy) for strategy in ("sync", "async", "sharded")}
# Stock last: what is attached to one Accelerator must not be in the way of another.
MAKERS: dict[str, Make] = {COPY: one_copy, WRITE: raw_direct_write, **OURS, STOCK: _stock}


def _table_of_saves(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    state = gpt_state(options.layers)
    nbytes = tensor_bytes(state)
    print(
        f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}, accelerate "
        f"{accelerate.__version__}; state {nbytes / 1e9:.2f} GB: {len(state['state_dict'])} weights with Adam's moments; "
        f"{options.repeats} rounds, {options.idle:g} s idle before each save\n",
        flush=True,
    )
    timings = measure(state, directory, repeats=options.repeats, idle_seconds=options.idle, makers=MAKERS)
    del state
    memory = {name: _memory_in_own_process(name, options.layers, directory) for name in [*OURS, STOCK]}
    copy, write, stock = timings[COPY].stall, timings[WRITE].durable, timings[STOCK].durable
    print(f"{'':40s} {'stall':>9s} {'x copy':>7s} {'durable':>9s} {'x write':>8s} {'x faster':>9s} {'memory':>9s}")
    for name, timing in timings.items():
        extra = f"{memory[name] / 2**20:5.0f} MiB" if name in memory else ""
        print(
            f"{name:40s} {timing.stall * 1e3:6.0f} ms {timing.stall / copy:6.2f}x {timing.durable * 1e3:6.0f} ms "
            f"{timing.durable / write:7.2f}x {stock / timing.durable:8.2f}x {extra:>9s}"
        )
    print(
        f"\nx copy: stall over one copy of the tensors into a reused buffer, the fastest way of three; x write: time to durable over a raw direct write;\n"
        f"x faster: durable time of stock over this one's; memory: most extra memory over five saves (the state has "
        f"{nbytes / 2**20:.0f} MiB)"
    )
    print_beaten_limits(timings)
    figures = {
        name: {"stall_s": t.stall, "durable_s": t.durable, "memory_bytes": memory.get(name)}
        for name, t in timings.items()
    }
    return {"state_bytes": nbytes, "contenders": figures}


def _memory_in_own_process(name: str, layers: int, directory: Path) -> float:
    command = [sys.executable, "-m", "benchmarks.accelerate_table", name, str(layers), str(directory)]
    root = Path(__file__).parents[1]
    return float(subprocess.run(command, check=True, capture_output=True, text=True, cwd=root).stdout.split()[-1])


def _print_memory(name: str, layers: str, directory: str) -> None:
    state = gpt_state(int(layers))
    with tempfile.TemporaryDirectory(dir=directory) as place:
        print(peak_extra_memory(state, Path(place), MAKERS[name], saves=5))


# ---- stepping --------------------------------------------------------------------------------------------------------

_STEPS = 100
_COUNTED_FROM = 20


def _table_of_steps(options: argparse.Namespace) -> dict[str, float]:
    """Time a step of a small transformer, alternately with stock Accelerate and with ours attached."""
    found: dict[str, list[float]] = {"stock": [], "attached": []}
    for number in range(2 * options.repeats):
        # In pairs whose order alternates, so that neither is always second.
        for name in sorted(found, reverse=number % 2 == 0):
            found[name].append(_median_step(attached=name == "attached"))
    medians = {name: statistics.median(values) for name, values in found.items()}
    differences = [ours - stock for ours, stock in zip(found["attached"], found["stock"], strict=True)]
    difference, spread = statistics.median(differences), statistics.quantiles(found["stock"], n=4)
    print(f"\none step of a transformer of two layers; medians of {len(differences)} rounds of {_STEPS} steps\n")
    for name, seconds in medians.items():
        print(f"{name:40s} {seconds * 1e6:8.0f} us")
    print(
        f"{'difference':40s} {difference * 1e6:8.0f} us per step, {difference / medians['stock']:.2%}; half of the rounds of "
        f"stock lie within {(spread[2] - spread[0]) * 1e6:.0f} us"
    )
    return {**medians, "difference": difference}


def _median_step(*, attached: bool) -> float:
    accelerator = Accelerator(cpu=True)
    if attached:
        attach(accelerator, strategy="async")
    try:
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
        model: Any = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4)
        data: Any = DataLoader(TensorDataset(torch.randn(8 * _STEPS, 32, 128)), batch_size=8, shuffle=True)
        model, optimizer, data = accelerator.prepare(model, optimizer, data)
        times = []
        for (batch,) in data:
            loss = model(batch).pow(2).mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter())
    finally:
        uninstall()
    gaps = [after - before for before, after in itertools.pairwise(times[_COUNTED_FROM:])]
    return statistics.median(gaps)


if __name__ == "__main__":
    _print_memory(*sys.argv[1:])
