"""Ray Train with Accelerate: training continues after a worker or the whole job is killed, on any number of workers.

    python examples/ray/train_accelerate.py --storage runs/ray --workers 2

Start it again after whatever ended it. ``FailureConfig`` restarts it by itself when a worker is lost.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import ray.train
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from ray.train.torch import TorchConfig, TorchTrainer

from accelerate_ckpt import attach


def train(config: dict[str, Any]) -> None:
    """Train on one worker."""
    torch.set_num_threads(1)
    set_seed(1)
    storage, steps = Path(config["storage"]), config["steps"]
    accelerator = attach(Accelerator(cpu=True, project_dir=str(storage)), resume="auto", retention="latest=2")
    (storage / f"worker{accelerator.process_index}").write_text(str(os.getpid()))
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Dropout(0.2), torch.nn.Linear(64, 1))
    rows = torch.randn(96, 8, generator=torch.Generator().manual_seed(5))
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=4, shuffle=True)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    kept = ray.train.get_checkpoint() if config["from_ray"] else None
    if kept is None:
        accelerator.load_state()  # the newest in storage, even if Ray knows nothing of the job that saved it
    else:
        with kept.as_directory() as directory:
            accelerator.load_state(directory)
    step = accelerator.resumed.step if accelerator.resumed else 0
    while step < steps:
        for (batch,) in data:
            time.sleep(0.05)
            accelerator.backward(model(batch).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 5 == 0:
                report(accelerator, storage / "checkpoints" / f"step_{step}", step)
            if step == steps:
                break
    if accelerator.is_main_process:
        torch.save({"step": step, "weights": accelerator.unwrap_model(model).state_dict()}, storage / "end.pt")
    accelerator.end_training()


def report(accelerator: Accelerator, path: Path, step: int) -> None:
    """Save, and report the checkpoint to Ray, too, which manages a copy of it."""
    accelerator.save_state(path)
    checkpoint = None
    if accelerator.is_main_process:
        os.listdir(path)  # waits until it is durable; Ray's copying does not
        checkpoint = ray.train.Checkpoint(str(path))
    ray.train.report({"step": step}, checkpoint=checkpoint)


def main() -> None:
    """Train until the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", type=Path, required=True, help="a directory that all workers share")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--from-ray", action="store_true", help="resume from what Ray keeps: ray.train.get_checkpoint")
    options = parser.parse_args()
    storage = options.storage.absolute()
    storage.mkdir(parents=True, exist_ok=True)
    result = TorchTrainer(
        train,
        train_loop_config={"storage": str(storage), "steps": options.steps, "from_ray": options.from_ray},
        scaling_config=ray.train.ScalingConfig(num_workers=options.workers),
        torch_config=TorchConfig(backend="gloo"),
        run_config=ray.train.RunConfig(
            name="ray", storage_path=str(storage), failure_config=ray.train.FailureConfig(max_failures=3)
        ),
    ).fit()
    print("Ray keeps", result.checkpoint)


if __name__ == "__main__":
    main()
