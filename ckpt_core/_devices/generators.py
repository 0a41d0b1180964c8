"""Captures and restores the default random generators (RNG) of the devices that the program has initialized."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

# Types that torch.accelerator may not name, because it knows only one per build, and a program may use several.
_BUILT_IN = ("cuda", "xpu", "mps")


class DeviceGenerators(NamedTuple):
    """The states of the generators of all devices of one type."""

    states: tuple[torch.Tensor, ...]  # of the default generator of every visible device, as CPU tensors
    current: int = 0  # index of the device that the process uses


def _types() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator()
    return tuple(dict.fromkeys([*_BUILT_IN, *([] if accelerator is None else [accelerator.type])]))


def _module(kind: str) -> Any:
    """Return torch's module of a device type; None if it has no generators."""
    module = getattr(torch, kind, None)
    return module if hasattr(module, "get_rng_state") else None


def _is_in_use(module: Any) -> bool:
    # is_initialized first: it is only a flag, while is_available may ask a driver. Not all modules have both.
    return all(getattr(module, name, _always)() for name in ("is_initialized", "is_available"))


def _always() -> bool:
    return True


def capture_device_generators() -> dict[str, DeviceGenerators]:
    """Return the generators of every device type in use; reading those of other types would initialize the devices."""
    found = {}
    for kind in _types():
        module = _module(kind)
        if module is None or not _is_in_use(module):
            continue
        if hasattr(module, "get_rng_state_all"):
            found[kind] = DeviceGenerators(tuple(module.get_rng_state_all()), int(module.current_device()))
        else:
            found[kind] = DeviceGenerators((module.get_rng_state(),))
    return found


def current_device_generators() -> list[torch.Tensor]:
    """Return the generator state of the current device of each type in use, in the order of the capture."""
    modules = filter(None, map(_module, _types()))
    return [module.get_rng_state() for module in modules if _is_in_use(module)]


def restore_device_generators(generators: Mapping[str, DeviceGenerators]) -> None:
    """Set the generators of the devices that exist both in the capture and in this process.

    The current device continues with the generator of the device that was current at the capture, whatever their
    numbers. If the program has not initialized a device yet, torch sets its generator when it does.
    """
    for kind, (states, current) in generators.items():
        module = _module(kind)
        if module is None or not states or not getattr(module, "is_available", _always)():
            continue
        if hasattr(module, "get_rng_state_all"):
            for device, state in enumerate(states[: module.device_count()]):
                module.set_rng_state(state, device)
        if current < len(states):
            module.set_rng_state(states[current])


def new_generator(kind: str) -> torch.Generator:
    """Return a new generator on the current device of a type, or on the CPU if there is no such device."""
    there = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.Generator(there if there is not None and there.type == kind else "cpu")
