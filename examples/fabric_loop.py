"""A Fabric loop with asynchronous, verified checkpoints.

    python fabric_loop.py --output runs/fabric --steps 60
    python fabric_loop.py --output runs/fabric --steps 60    # resumes from the newest checkpoint that verifies

On SIGTERM it saves after the step and ends with the exit status 143; several ranks do so after the same step.

Fabric leaves the state to its user, so exactness is up to the loop: this one saves the random generators and draws its
batches from them.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import nn

from ckpt_core import Catalog, RankGroup
from ckpt_core.preemption import EndWatch
from ckpt_core.state.rng import RngState
from lightning_ckpt import AsyncCheckpointIO


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="directory of the checkpoints")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every-n-steps", type=int, default=20)
    options = parser.parse_args()

    io = AsyncCheckpointIO()
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[io])
    fabric.launch()
    fabric.seed_everything(1)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))

    state = {"model": model, "optimizer": optimizer, "step": 0, "random": None}
    newest = Catalog(options.output).newest_verified()
    if newest is not None:
        fabric.load(newest.path, state)
        RngState.decode(state["random"]).restore()
        fabric.print(f"resumed at step {state['step']}")

    watch = EndWatch("SIGTERM", RankGroup.connect(fabric.global_rank, fabric.world_size, fabric.strategy.broadcast))
    while state["step"] < options.steps:
        inputs = torch.randn(16, 8)
        loss = F.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
        state["step"] += 1
        end = watch.due(last=state["step"] == options.steps)
        if end is not None or state["step"] % options.every_n_steps == 0:
            state["random"] = RngState.capture().encode()
            fabric.save(options.output / f"step={state['step']:06d}.ckpt", state)
        if end is not None:
            io.teardown()
            fabric.barrier()  # launchers kill the other ranks when the first has ended
            raise SystemExit(end.status)

    watch.close()
    io.teardown()  # Fabric does not: wait until the last checkpoint is durable
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    fabric.print("weights", hashlib.sha256(weights).hexdigest())


if __name__ == "__main__":
    main()
