"""The only file that touches how safetensors opens files.

It opens them in compiled code, which Python sees nothing of, so reading ``model.safetensors`` right after ``save_state`` would not
wait for the save. ``safe_open`` is replaced wherever it was imported to: all other functions of safetensors that read files call
it or :func:`open`.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import safetensors

from ckpt_core import awaited_paths

__all__ = ["wait_when_safetensors_open"]

awaited_paths.own_packages.add("accelerate_ckpt")


class _WaitsFirst(type):
    """Makes what ``safe_open`` makes; is for :func:`isinstance` what ``safe_open`` is."""

    original: Any

    def __call__(cls, filename: Any, *args: Any, **kwargs: Any) -> Any:
        awaited_paths.wait_for(filename)
        return cls.original(filename, *args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.original)


@functools.cache
def wait_when_safetensors_open() -> None:
    """From now on, let ``safe_open`` wait for the save of what it opens, if that is under way."""
    original: Any = safetensors.safe_open
    replacement = _WaitsFirst("safe_open", (), {"original": original, "__doc__": original.__doc__})
    replacement.__module__ = "safetensors"
    for module in list(sys.modules.values()):
        found = getattr(module, "__dict__", {})
        for name in [name for name, value in list(found.items()) if value is original]:
            setattr(module, name, replacement)
