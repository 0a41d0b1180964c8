"""The only file that touches how Accelerate loads registered objects.

``load_state`` reads ``custom_checkpoint_N.pkl`` with ``weights_only=False``, which runs any code in it, and no argument changes
that. :func:`registered_states` gives the objects what was read safely before. A release that loads them in another way is
found before it reads anything.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import accelerate
from accelerate import accelerator as accelerator_module

from accelerate_ckpt._patches import Patches
from ckpt_core.errors import CheckpointError

__all__ = ["registered_states"]

_FUNCTION = "load_custom_state"


@contextlib.contextmanager
def registered_states(states: Sequence[Any] | None) -> Iterator[None]:
    """Let Accelerate's ``load_state`` give these states to the registered objects, instead of reading them.

    Args:
        states: One for each object; None leaves Accelerate as it is.

    Raises:
        CheckpointError: This release of Accelerate loads them in another way.
    """
    if not states:
        yield
        return
    original_load_state = vars(accelerate.Accelerator)["load_state"]
    while hasattr(original_load_state, "__wrapped__"):  # by us
        original_load_state = original_load_state.__wrapped__
    if not hasattr(accelerator_module, _FUNCTION) or _FUNCTION not in original_load_state.__code__.co_names:
        raise CheckpointError(
            f"Accelerate {accelerate.__version__} loads registered objects in a way that is not known, and may run code from them",
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
