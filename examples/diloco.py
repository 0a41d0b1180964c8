"""DiLoCo: workers train alone for some steps, then an outer optimizer steps the parameters that they share.

    python diloco.py --output runs/diloco --workers 3
    python diloco.py --output runs/diloco --workers 2    # after a crash or a kill: resumes, with any number of workers

Started again with as many workers, it ends with the same bits as if it had never been interrupted; with another number,
from the same shared parameters and outer optimizer. A part of the model counts how often each batch was used.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import socket
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ckpt_async.local_updates import DiLoCo, DiLoCoState, StreamCursor, WorkerState
from ckpt_core import Catalog, DirectoryCheckpointer, RankGroup
from ckpt_core.tree import tensors

STREAMS = 6


class Model(nn.Module):
    def __init__(self, batches: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.1), nn.Tanh(), nn.Linear(32, 1))
        # a number for each batch, to which its worker adds one
        self.used = nn.Parameter(torch.zeros(STREAMS * batches), requires_grad=False)


def outer_optimizer(model: Model) -> torch.optim.Optimizer:
    shared = {"params": list(model.net.parameters()), "lr": 0.7, "momentum": 0.9, "nesterov": True}
    return torch.optim.SGD([shared, {"params": [model.used]}], lr=1.0)


def train(model: Model, inner: torch.optim.Optimizer, row: int) -> None:
    inputs = torch.randn(8, 16)
    loss = (model.net(inputs) - inputs.sum(1, keepdim=True)).pow(2).mean()
    inner.zero_grad()
    loss.backward()
    inner.step()
    with torch.no_grad():
        model.used[row] += 1


def work(rank: int, options: argparse.Namespace, port: int) -> None:
    torch.set_num_threads(1)
    workers = options.workers
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=workers)
    torch.manual_seed(0)
    model = Model(options.batches)
    inner, outer = torch.optim.AdamW(model.net.parameters(), lr=1e-2), outer_optimizer(model)
    torch.manual_seed(1000 + rank)  # from here on, each worker has random numbers of its own
    loop = DiLoCo(model, outer)
    cursor = StreamCursor(STREAMS, worker=rank, workers=workers, batches=options.batches)
    state = DiLoCoState(loop, WorkerState(cursor, inner=inner))

    def broadcast(value: Any) -> Any:
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    newest = Catalog(options.output).newest_verified() if rank == 0 else None
    path, number = broadcast(newest.path if newest is not None else None), 0
    with DirectoryCheckpointer(ranks=RankGroup.connect(rank, workers, broadcast)) as checkpointer:
        if path is not None:
            with checkpointer.load(path) as opened:
                state.load(opened)
                number = opened.metadata["number"]
            print(f"worker {rank} resumes from {path}: {cursor.position.in_words()}\n", end="", flush=True)
        outer.param_groups[1]["lr"] = float(workers)  # the sum of what the workers counted, not the mean
        for _ in range(cursor.windows(options.window)):
            for update in cursor.take(options.window):
                train(model, inner, (update.seq - 1) * STREAMS + update.stream)
            loop.sync()
            number += 1
            checkpointer.save(state.parts(), options.output / f"{number:06d}.ckpt", metadata={"number": number})
    digest = hashlib.sha256()
    whole = [loop.global_parameters(), loop.outer_state(), inner.state_dict(), torch.get_rng_state()]
    for name, tensor in tensors(whole):
        digest.update(name.encode() + tensor.detach().contiguous().numpy().tobytes())
    print(f"worker {rank} ends with {digest.hexdigest()}\n", end="", flush=True)  # in one write
    dist.destroy_process_group()


def violations(path: str) -> list[str]:
    """Return where a checkpoint's shared parameters and its workers disagree on which batches were used."""
    with DirectoryCheckpointer().load(path) as opened:
        used = opened.load("model")["used"].tolist()
        states = [opened.load("worker", rank=rank)["state"] for rank in range(opened.world_size)]
    places = dict(pair for state in states for pair in state["cursor"]["position"])
    return [
        f"{path}: batch {row // STREAMS + 1} of stream {row % STREAMS} was used {times:g} times"
        for row, times in enumerate(used)
        if round(times, 3) != (row // STREAMS < places[row % STREAMS])
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="directory of the checkpoints")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--batches", type=int, default=100, help="in each of the 6 streams")
    parser.add_argument("--window", type=int, default=10, help="inner steps of a worker between two outer steps")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=work, args=(rank, options, port)) for rank in range(options.workers)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit("a worker failed: start again")
    checkpoints = Catalog(options.output).checkpoints()
    found = [line for info in checkpoints for line in violations(info.path)]
    for line in found:
        print(line)
    print(f"{len(checkpoints)} checkpoints, {len(found)} violations", flush=True)
    raise SystemExit(bool(found))


if __name__ == "__main__":
    main()
