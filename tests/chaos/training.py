"""What the trainings of both frameworks have in common; imports neither."""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

EVERY_N_STEPS = 3
KEPT = 2


def network(width: int) -> nn.Sequential:
    """Return a network with dropout, so that the generators' state matters."""
    return nn.Sequential(
        nn.Linear(32, width), nn.Dropout(0.2), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
    )


def samples() -> TensorDataset:
    """Return inputs and targets, the same in every process."""
    inputs = torch.randn(200, 32, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())


def sha256(state: Any) -> str:
    """Return the SHA-256 of a nested state: structure, plain values, and the bytes of all tensors."""
    digest = hashlib.sha256()

    def update(part: Any) -> None:
        if isinstance(part, torch.Tensor):
            digest.update(f"{part.dtype}{tuple(part.shape)}".encode())
            digest.update(part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        elif isinstance(part, dict):
            for key, item in part.items():
                digest.update(f"{key!r}:".encode())
                update(item)
        elif isinstance(part, (list, tuple)):
            for item in part:
                update(item)
        else:
            digest.update(repr(part).encode())

    update(state)
    return digest.hexdigest()


def common_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that the scripts of both frameworks have."""
    parser.add_argument("--output", type=Path, required=True, help="local directory of the run: logs and result")
    parser.add_argument("--root", required=True, help="directory or URL, below which the checkpoints are")
    parser.add_argument("--resume", action="store_true", help="resume from the newest checkpoint, if there is one")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--width", type=int, default=270)
    parser.add_argument("--steps", type=int, default=60)
