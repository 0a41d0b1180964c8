"""Plain attributes of a script's models that training changes and no state holds: they are named, once.

Weights and buffers are saved with a model; a factor that its ``forward`` lowers, or a list that it keeps, is not. What
data sets, samplers and ``collate_fn`` change is captured (:class:`ckpt_core.state.loader_objects.Carried`), and what
registered objects return from ``state_dict`` is theirs to say.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ckpt_core.state.changed_values import PlainState
from ckpt_core.state.code_origin import is_users_class, place_of
from ckpt_core.state.kinds import indexed

_NAMED = 5
_SETTLED = 4  # backward passes after which a change that was not taken back is taken for one that stays


class Changes:
    """Watches the modules of a script whose classes are no library's.

    ``say`` is called once for each attribute that a resume will not have, with words for the user.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._plain: dict[str, PlainState] = {}
        self._has_begun = False
        self._named: set[tuple[str, str]] = set()

    def begin(self, models: Sequence[torch.nn.Module], held: Iterable[object]) -> None:
        """What changes from now on is changed by training; does nothing a second time.

        Objects that are held have a state of their own in each checkpoint.
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
                    # its children are watched by themselves
                    self._plain[f"{number}.{name}"] = PlainState(module, skip=(*module.children(), *held))

    def name(self) -> None:
        """Name what has changed since the save before, if anything has: each attribute once."""
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


class Flags:
    """Watches which parameters need gradients and which modules are in eval mode, as backward passes find them.

    ``say`` is called in a resumed run with those that an earlier run had changed once and for good, where they are as
    in a new run. What changes to and fro is left out: each step of the script sets it.
    """

    def __init__(self, say: Callable[[Sequence[str]], None]) -> None:
        self._say = say
        self._models: list[int] = []
        self._modules: list[tuple[str, list[str], weakref.ref[torch.nn.Module]]] = []
        self._now: list[tuple[bool, list[bool]]] = []
        self._passes = 0
        self._changed: dict[str, int] = {}  # in which pass each has changed, if it changed once
        self._restless: set[str] = set()
        self._saved: Mapping[str, bool] = {}

    def resume(self, saved: Mapping[str, bool]) -> None:
        """Compare the next backward pass with what :meth:`capture` returned in the run that saved."""
        self._saved, self._models = saved, []

    def backward(self, models: Sequence[torch.nn.Module]) -> None:
        """Look at the models in a backward pass."""
        self._passes += 1
        if self._models != list(map(id, models)):
            self._models = list(map(id, models))
            named = [(indexed("model", index), model) for index, model in enumerate(models)]
            found = [(f"{of}.{name}".rstrip("."), one) for of, model in named for name, one in model.named_modules()]
            self._modules = [(name, list(one._parameters), weakref.ref(one)) for name, one in found]
            self._now = self._read()
            flags = self._by_name()
            if lost := [name for name, flag in self._saved.items() if flags.get(name) is (not flag)]:
                self._say(lost)
            self._changed = dict.fromkeys(self._saved.keys() & flags.keys(), self._passes - _SETTLED)
            self._saved, self._restless = {}, set()
        elif (now := self._read()) != self._now:
            before, self._now = self._by_name(), now
            for name in (name for name, flag in self._by_name().items() if before.get(name, flag) is not flag):
                self._restless.update({name} & self._changed.keys())
                self._changed[name] = self._passes

    def capture(self) -> dict[str, bool]:
        """Return the flags that have changed once, some passes ago, by what a user is told of each."""
        latest = self._passes - _SETTLED
        settled = {name for name, when in self._changed.items() if when <= latest} - self._restless
        return {name: flag for name, flag in self._by_name().items() if name in settled} if settled else {}

    def _read(self) -> list[tuple[bool, list[bool]]]:
        modules = (known() for *_, known in self._modules)
        return [
            (one.training, [p is None or p.requires_grad for p in one._parameters.values()])
            if one is not None
            else (True, [])
            for one in modules
        ]

    def _by_name(self) -> dict[str, bool]:
        flags = {}
        for (name, names, _), (mode, gradients) in zip(self._modules, self._now, strict=True):
            flags[f"`training` of {name}"] = mode
            flags |= {f"`requires_grad` of {name}.{one}": flag for one, flag in zip(names, gradients, strict=False)}
        return flags


def _has_more_state(module: torch.nn.Module) -> bool:
    """Whether a module says itself what its state is."""
    kind = type(module)
    names = ("get_extra_state", "state_dict", "_save_to_state_dict")
    return any(getattr(kind, name) is not getattr(torch.nn.Module, name) for name in names)
