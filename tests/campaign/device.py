"""The device that the campaign trains on: the host, or that of ``CAMPAIGN_DEVICE``: ``cuda``, ``simulated``."""

from __future__ import annotations

import os
from typing import Any

import torch

DEVICE = os.environ.get("CAMPAIGN_DEVICE", "cpu")
IS_HOST = DEVICE == "cpu"
HAS_CUDA = DEVICE == "cuda"


def begin() -> None:
    """Set the device up, in the process that trains: a process that has used a device cannot be forked."""
    if not IS_HOST:
        torch.use_deterministic_algorithms(True, warn_only=True)
    if DEVICE == "simulated":
        from tests import simulated_device

        simulated_device.load()


def of_trainer() -> dict[str, Any]:
    """Return the arguments of Lightning's Trainer that choose the device."""
    if DEVICE != "simulated":
        return {"accelerator": DEVICE}
    from tests.support.lightning_device import simulated_strategy

    return {"strategy": simulated_strategy()}


def choose_for_accelerate() -> None:
    """Let Accelerate, which chooses from a fixed list of devices, take the simulated one."""
    if DEVICE == "simulated":
        from accelerate.state import PartialState

        PartialState.default_device = property(lambda _: torch.device(DEVICE, 0))  # type: ignore[method-assign,assignment]
