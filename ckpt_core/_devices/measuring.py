"""What a check of a device asks of it: which there is, how fast it copies to the host, how much memory it took."""

from __future__ import annotations

import contextlib
import time

import torch

from ckpt_core._devices.streams import wait_for_devices

_COPIES = 5  # of which the fastest counts


def device_to_check() -> tuple[torch.device, str] | None:
    """Return the current device of the accelerator and its name, if there is one."""
    if not torch.accelerator.is_available():
        return None
    kind = torch.accelerator.current_accelerator()
    assert kind is not None  # it is available
    device = torch.device(kind.type, torch.accelerator.current_device_index())
    module = torch.get_device_module(device)
    return device, str(module.get_device_name(device)) if hasattr(module, "get_device_name") else str(device)


def pinned_copy_rate(device: torch.device, nbytes: int) -> float:
    """Return how many bytes a second the device copies to pinned memory, which nothing can be faster than."""
    source = torch.empty(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    seconds = []
    for _ in range(_COPIES):
        wait_for_devices([source])
        begin = time.perf_counter()
        target.copy_(source, non_blocking=True)
        wait_for_devices([source])
        seconds.append(time.perf_counter() - begin)
    return nbytes / min(seconds)


def peak_bytes(device: torch.device, *, reset: bool = False) -> int | None:
    """Return the most memory that tensors took on the device so far, or since a reset; None if it does not count."""
    peak = None
    with contextlib.suppress(RuntimeError, NotImplementedError, AttributeError):
        peak = int(torch.accelerator.max_memory_allocated(device))
        if reset:
            torch.accelerator.reset_peak_memory_stats(device)
    return peak
