"""Lightning's accelerator and strategy for the simulated device."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import SingleDeviceStrategy

from tests import simulated_device


class SimulatedAccelerator(Accelerator):
    """The simulated device as an accelerator of Lightning."""

    def setup_device(self, device: torch.device) -> None:
        simulated_device.set_device(device)

    def teardown(self) -> None:
        pass

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device(simulated_device.NAME, index) for index in range(devices)]

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return simulated_device.NAME

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}


def simulated_strategy() -> SingleDeviceStrategy:
    """Return the strategy of a fit on the first simulated device."""
    device = torch.device(simulated_device.NAME, 0)
    return SingleDeviceStrategy(device=device, accelerator=SimulatedAccelerator())
