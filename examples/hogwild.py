"""Hogwild: several processes change one shared model without locks, and checkpoints are exact all the same.

    python hogwild.py --output runs/hogwild --workers 3
    python hogwild.py --output runs/hogwild --workers 2    # after a crash or a kill: resumes, with any number of them

The model itself counts how often each batch was used, which shows whether any was lost or repeated.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import nn

from ckpt_async.local_updates import GateTimeoutError, StepGate, StreamCursor, WorkerState
from ckpt_core import Catalog, CheckpointError, DirectoryCheckpointer, Kind, Part

STREAMS = 6


class Model(nn.Module):
    def __init__(self, batches: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 256), nn.Dropout(0.1), nn.Tanh(), nn.Linear(256, 1))
        # a number for each batch, changed only by the worker that has the batch
        self.register_buffer("used", torch.zeros(STREAMS * batches))


def train(model: Model, adam: torch.optim.Optimizer, row: int) -> None:
    model.used[row] += 1
    inputs = torch.randn(8, 16)
    loss = (model.net(inputs) - inputs.sum(1, keepdim=True)).pow(2).mean()
    adam.zero_grad()
    loss.backward()
    adam.step()


def work(number: int, options: argparse.Namespace, gate: StepGate, model: Model, saved: list[Any]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(number)
    adam = torch.optim.Adam(model.net.parameters(), lr=1e-3)
    cursor = StreamCursor(STREAMS, worker=number, workers=options.workers, batches=options.batches)
    own = WorkerState(cursor, adam=adam)
    if saved:
        own.load_state_dicts(saved)
    with gate.worker(number, own.state_dict) as worker:
        for update in cursor.take():
            with worker.step():
                train(model, adam, (update.seq - 1) * STREAMS + update.stream)


def run(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, saved = Model(options.batches).share_memory(), []
    checkpointer, newest = DirectoryCheckpointer(), Catalog(options.output).newest_verified()
    number = 0
    if newest is not None:
        with checkpointer.load(newest.path) as opened:
            model.load_state_dict(opened.load("model"))
            saved = opened.load("workers")
            number = opened.metadata["number"]
        print(f"resumes from {newest.path}", flush=True)
    context = mp.get_context(options.start_method)
    with StepGate(options.workers) as gate, checkpointer:
        arguments = [(worker, options, gate, model, saved) for worker in range(options.workers)]
        workers = [context.Process(target=work, args=each) for each in arguments]
        for process in workers:
            process.start()
        try:
            is_over = False
            while not is_over:
                time.sleep(options.every)
                is_over = not any(process.is_alive() for process in workers)
                number += 1
                with contextlib.suppress(GateTimeoutError), gate.closed(options.timeout) as states:
                    parts = [
                        Part("model", model.state_dict(), Kind.REPLICATED),
                        Part("workers", states, Kind.REPLICATED),
                    ]
                    path = options.output / f"{number:06d}.ckpt"
                    checkpointer.save(parts, path, metadata={"number": number})
        finally:
            for process in workers:
                process.kill()
                process.join()


def violations(path: str) -> list[str]:
    """Return where a checkpoint's model and its workers disagree on which batches were used."""
    with DirectoryCheckpointer().load(path) as opened:
        used = opened.load("model")["used"].tolist()
        places = dict(pair for state in opened.load("workers") for pair in state["cursor"]["position"])
    return [
        f"{path}: batch {row // STREAMS + 1} of stream {row % STREAMS} was used {times:g} times"
        for row, times in enumerate(used)
        if times != (row // STREAMS < places[row % STREAMS])
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="directory of the checkpoints")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--batches", type=int, default=500, help="in each of the 6 streams")
    parser.add_argument("--every", type=float, default=0.5, help="seconds between two checkpoints")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds to wait for the workers' steps")
    parser.add_argument("--start-method", choices=["fork", "spawn"], default="spawn")
    options = parser.parse_args()
    try:
        run(options)
    except CheckpointError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from error
    checkpoints = Catalog(options.output).checkpoints()
    found = [line for info in checkpoints for line in violations(info.path)]
    for line in found:
        print(line)
    print(f"{len(checkpoints)} checkpoints, {len(found)} violations", flush=True)
    raise SystemExit(bool(found))


if __name__ == "__main__":
    main()
