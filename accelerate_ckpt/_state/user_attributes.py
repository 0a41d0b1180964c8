"""Warns, once each, about user attributes of models that training changes and no state holds.

Weights and buffers are saved with a model; a factor that its ``forward`` lowers, or a list that it keeps, is not. What
data sets, samplers and ``collate_fn`` change is captured (:class:`ckpt_core.state.loader_objects.Carried`), and
registered objects decide themselves what their ``state_dict`` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ckpt_core.state.changed_values import PlainState
from ckpt_core.state.code_origin import is_users_class, place_of

_NAMED = 5


class Changes:
    """Watches those modules of a script's models whose classes are not from a library.

    ``say`` is called with a message for the user, once for each attribute that a resume will not have.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._plain: dict[str, PlainState] = {}
        self._has_begun = False
        self._named: set[tuple[str, str]] = set()

    def begin(self, models: Sequence[torch.nn.Module], held: Iterable[object]) -> None:
        """Take the present values as those before training; does nothing if called again.

        Objects in ``held`` have their own state in each checkpoint.
        """
        if self._has_begun:
            return
        self._has_begun = True
        held = tuple(held)
        kinds = {type(module) for model in models for module in model.modules()}
        users = {kind for kind in kinds if is_users_class(kind)}
        for number, model in enumerate(models):
            for name, module in model.named_modules():
                if type(module) in users and not _has_more_state(module) and all(module is not one for one in held):
                    # its children are watched separately
                    self._plain[f"{number}.{name}"] = PlainState(module, skip=(*module.children(), *held))

    def name(self) -> None:
        """Report attributes that have changed since training began, each once; called at each save."""
        for name, plain in self._plain.items():
            new = [path for path in plain.changed() if (name, path) not in self._named]
            if new:
                self._named.update((name, path) for path in new)
                shown = ", ".join(f"`{path}`" for path in new[:_NAMED]) + (" and more" if len(new) > _NAMED else "")
                kind: Any = type(plain.owner)
                place = place_of(kind)
                where = "" if place is None else f" ({place[0]}:{place[1]})"
                self._say(
                    f"the module {kind.__qualname__}{where} changed {shown} since training began, and no state holds "
                    "it: a resume will not have it. Make it a buffer (register_buffer), or part of an object given to "
                    "register_for_checkpointing"
                )


def _has_more_state(module: torch.nn.Module) -> bool:
    """Return whether a module's class defines its own state."""
    kind = type(module)
    names = ("get_extra_state", "state_dict", "_save_to_state_dict")
    return any(getattr(kind, name) is not getattr(torch.nn.Module, name) for name in names)
