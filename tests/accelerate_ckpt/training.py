"""A small training for the tests of ``save_state`` and ``load_state``, in one process."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Counter:
    """An object to register for checkpointing, with a count and a tensor."""

    def __init__(self, count: int = 0) -> None:
        self.count = count
        self.seen = torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "seen": self.seen, "names": ("a", None)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.seen = state["count"], state["seen"]
        assert state["names"] == ("a", None)


class Tied(nn.Module):
    """A model with one weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def model_of(seed: int, width: int = 4) -> nn.Module:
    """Return a model with dropout and statistics; the same for the same seed."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.3), nn.Linear(width, 1))


class Run:
    """A model, optimizer, scheduler and loader, prepared by an Accelerator.

    Args:
        accelerator: The Accelerator that prepares them.
        seed: Seed of the weights.
        width: Width of the model.
    """

    def __init__(self, accelerator: Accelerator, seed: int = 0, width: int = 4) -> None:
        # Moved before the optimizer is made, as devices need whose names torch does not know.
        model = model_of(seed, width).to(accelerator.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        data = TensorDataset(torch.arange(64.0).reshape(16, 4) / 64)
        loader = DataLoader(data, batch_size=2, shuffle=True)
        self.accelerator = accelerator
        self.losses: list[float] = []
        self.buffers_at_save: list[Any] = []
        self.model, self.optimizer, self.scheduler, self.loader = accelerator.prepare(
            model, optimizer, scheduler, loader
        )

    def train(self, steps: int, **saves: Any) -> Run:
        """Train for some micro-batches; ``save_after=n, path=p`` saves on the way."""
        done = 0
        while done < steps:
            for (batch,) in self.loader:
                with self.accelerator.accumulate(self.model):
                    loss = self.model(batch).pow(2).mean()
                    self.accelerator.backward(loss)
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
                self.losses.append(loss.item())
                done += 1
                if done == saves.get("save_after"):
                    self.accelerator.save_state(saves["path"])
                    self.buffers_at_save = self.buffers()
                if done == steps:
                    break
        return self

    def buffers(self) -> list[Any]:
        """Return the model's statistics, which differ between ranks."""
        return [buffer.tolist() for buffer in self.model.buffers()]

    def state(self) -> dict[str, Any]:
        """Return the state that must be equal in two runs at the same point."""
        return {
            "model": {name: value.clone() for name, value in self.model.state_dict().items()},
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "gradients": [p.grad if p.grad is None else p.grad.clone() for p in self.model.parameters()],
            "step": self.accelerator.step,
        }


def assert_same(left: Any, right: Any, where: str = "state") -> None:
    """Compare two nested states bit for bit."""
    assert type(left) is type(right), where
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right), where
    elif isinstance(left, dict):
        assert left.keys() == right.keys(), where
        for key in left:
            assert_same(left[key], right[key], f"{where}.{key}")
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right), where
        for index, (one, other) in enumerate(zip(left, right, strict=True)):
            assert_same(one, other, f"{where}.{index}")
    else:
        assert left == right, where
