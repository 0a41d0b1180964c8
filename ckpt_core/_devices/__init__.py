"""Accelerators: the only place that knows their streams, their pinned memory and their generators.

Everything goes through torch's interface to all of them. What decides is whether memory is the host's, never which
device it is; only pinning needs to know, because torch has no call for memory that it has not allocated. Nothing here
starts a device that the program has not started.
"""

from __future__ import annotations

from ckpt_core._devices.checking import device_to_check, peak_bytes, pinned_copy_rate
from ckpt_core._devices.generators import (
    DeviceGenerators,
    capture_device_generators,
    current_device_generators,
    restore_device_generators,
)
from ckpt_core._devices.pinning import PINNING, Pinning, pin
from ckpt_core._devices.row_sums import ROW, RowSums
from ckpt_core._devices.streams import (
    Events,
    LateNumber,
    SideStreams,
    accelerator_name,
    can_copy_late,
    events_of_current_streams,
    is_capturing,
    let_devices_wait,
    on_current_streams,
    on_this_device,
    wait_for_devices,
)

__all__ = [
    "PINNING",
    "ROW",
    "DeviceGenerators",
    "Events",
    "LateNumber",
    "Pinning",
    "RowSums",
    "SideStreams",
    "accelerator_name",
    "can_copy_late",
    "capture_device_generators",
    "current_device_generators",
    "device_to_check",
    "events_of_current_streams",
    "is_capturing",
    "let_devices_wait",
    "on_current_streams",
    "on_this_device",
    "peak_bytes",
    "pin",
    "pinned_copy_rate",
    "restore_device_generators",
    "wait_for_devices",
]
