"""Measures an accelerator for ``gpu_check``: its name, the speed of copies to the host, and its peak memory."""

from __future__ import annotations

import contextlib
import time

import torch

from ckpt_core._devices.streams import wait_for_devices

_COPIES = 5  # copies to time; the fastest one counts


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
    """Return the rate in bytes per second of copies to pinned memory, the upper limit for any copy to the host."""
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
    """Return the peak memory of tensors on the device in bytes, since the last reset; None if it is not tracked."""
    peak = None
    with contextlib.suppress(RuntimeError, NotImplementedError, AttributeError):
        peak = int(torch.accelerator.max_memory_allocated(device))
        if reset:
            torch.accelerator.reset_peak_memory_stats(device)
    return peak
