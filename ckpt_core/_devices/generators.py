"""The default random generators of devices, as far as the program has started them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

# What torch.accelerator may not name, where a program uses several: it knows one for each build.
_BUILT_IN = ("cuda", "xpu", "mps")


class DeviceGenerators(NamedTuple):
    """The generators of the devices of one type."""

    states: tuple[torch.Tensor, ...]  # of the default generator of every visible device, as tensors of the host
    current: int = 0  # which of them the process uses


def _types() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator()
    return tuple(dict.fromkeys([*_BUILT_IN, *([] if accelerator is None else [accelerator.type])]))


def _module(kind: str) -> Any:
    """Return the module of a type of devices if it has generators."""
    module = getattr(torch, kind, None)
    return module if hasattr(module, "get_rng_state") else None


def _is_in_use(module: Any) -> bool:
    # The first is a flag, the second may ask a driver. Not all modules have them.
    return all(getattr(module, name, _always)() for name in ("is_initialized", "is_available"))


def _always() -> bool:
    return True


def capture_device_generators() -> dict[str, DeviceGenerators]:
    """Return the generators of every type of devices in use; to ask others for theirs would start them."""
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
    """Return the state of the generator of the current device of each type in use, in the order of the capture."""
    modules = filter(None, map(_module, _types()))
    return [module.get_rng_state() for module in modules if _is_in_use(module)]


def restore_device_generators(generators: Mapping[str, DeviceGenerators]) -> None:
    """Set the generators, as far as both sides have the devices.

    The device that the process uses continues with the generator of the one that it used then, whatever their numbers;
    where it has not started the device yet, torch does that when it starts.
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
    """Return a generator on the current device of a type, or on the host if there is none."""
    there = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.Generator(there if there is not None and there.type == kind else "cpu")
