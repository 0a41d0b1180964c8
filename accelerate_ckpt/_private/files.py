"""The only module that changes how Accelerate loads registered objects, and how safetensors opens files.

Accelerate's ``load_state`` reads ``custom_checkpoint_N.pkl`` with ``weights_only=False``, which runs any code in it,
and no argument changes that. :func:`registered_states` makes it use states that were read safely before. If a release
loads them differently, an error is raised before anything is read.

safetensors opens files in compiled code, which Python cannot intercept, so reading ``model.safetensors`` right after
``save_state`` would not wait for the save. :func:`wait_when_safetensors_open` replaces ``safe_open`` wherever it was
imported to: all other functions of safetensors that read files call it or :func:`open`.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import accelerate
import safetensors
from accelerate import accelerator as accelerator_module

from accelerate_ckpt._private.replacing import Patches
from ckpt_core.errors import CheckpointError
from ckpt_core.process import awaited_paths

_FUNCTION = "load_custom_state"


@contextlib.contextmanager
def registered_states(states: Sequence[Any] | None) -> Iterator[None]:
    """Make Accelerate's ``load_state`` load these states into the registered objects, instead of reading files.

    None leaves Accelerate unchanged. Raises ``CheckpointError`` if its release loads them differently.
    """
    if not states:
        yield
        return
    original_load_state = vars(accelerate.Accelerator)["load_state"]
    while hasattr(original_load_state, "__wrapped__"):  # our own wrapper
        original_load_state = original_load_state.__wrapped__
    if not hasattr(accelerator_module, _FUNCTION) or _FUNCTION not in original_load_state.__code__.co_names:
        raise CheckpointError(
            f"Accelerate {accelerate.__version__} loads registered objects in a way that is not known, and may run "
            "code from them",
            remedy="use Accelerate 1.10 to 1.15, or load with allow_pickle=True if you trust the checkpoint's author",
        )

    def give(_: Any, item: Any, path: str, index: int = 0) -> None:
        item.load_state_dict(states[index])

    patches = Patches()
    patches.wrap(accelerator_module, _FUNCTION, give)
    try:
        yield
    finally:
        patches.undo()


awaited_paths.own_packages.add("accelerate_ckpt")


class _WaitsFirst(type):
    """Metaclass of a replacement for ``safe_open`` that waits for pending saves first; isinstance checks still work."""

    original: Any

    def __call__(cls, filename: Any, *args: Any, **kwargs: Any) -> Any:
        awaited_paths.wait_for(filename)
        return cls.original(filename, *args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.original)


@functools.cache
def wait_when_safetensors_open() -> None:
    """Make ``safe_open`` wait, from now on, for a pending save of the file that it opens."""
    original: Any = safetensors.safe_open
    replacement = _WaitsFirst("safe_open", (), {"original": original, "__doc__": original.__doc__})
    replacement.__module__ = "safetensors"
    for module in list(sys.modules.values()):
        found = getattr(module, "__dict__", {})
        for name in [name for name, value in list(found.items()) if value is original]:
            setattr(module, name, replacement)
