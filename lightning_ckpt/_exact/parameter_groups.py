"""Captures and restores optimizers' parameter groups that hooks have changed since ``configure_optimizers``.

An optimizer loads a state only if its groups are as large as those that saved it. A new process has the groups of
``configure_optimizers``, and the hook that adds others may not run, or only later.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

_restored_here: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers whose groups were restored here

Groups = list[list[list[str]]]  # names of parameters, by optimizer and group


class ParameterGroups:
    """The groups of the optimizers of one Trainer."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._first: list[list[list[int]]] = []

    def begin(self) -> None:
        """Note the groups that ``configure_optimizers`` has made."""
        self._first = self._members()

    def _members(self) -> list[list[list[int]]]:
        return [[[id(p) for p in group["params"]] for group in one.param_groups] for one in self._trainer.optimizers]

    def capture(self) -> Groups | None:
        """Return the names of the parameters in each group; None if all are as they were made, or some have no name."""
        members = self._members()
        if members == self._first:
            return None
        names = {id(parameter): name for name, parameter in self._trainer.lightning_module.named_parameters()}
        try:
            return [[[names[one] for one in group] for group in groups] for groups in members]
        except KeyError:
            return None

    @contextlib.contextmanager
    def temporarily(self, before: Groups | None) -> Iterator[None]:
        """Set the groups of ``before`` (None: the original ones) inside the context, for hooks that change them.

        Groups that a callback itself has restored are not set: that callback expects to find them changed.
        """
        optimizers = self._trainer.optimizers
        kept = [(optimizer, list(optimizer.param_groups)) for optimizer in optimizers]
        by_id = {id(p): p for p in self._trainer.lightning_module.parameters()}
        made = [[[by_id[one] for one in group if one in by_id] for group in groups] for groups in self._first]
        found = made if before is None else [_parameters(self._trainer, groups) for groups in before]
        for (optimizer, now), groups in zip(kept, found, strict=False):
            if optimizer in _restored_here and groups is not None:
                settings = [*now, *[now[-1]] * len(groups)]
                optimizer.param_groups[:] = [{**one, "params": of} for one, of in zip(settings, groups, strict=False)]
        yield
        for optimizer, now in kept:
            optimizer.param_groups[:] = now


def restore_groups(trainer: Any, saved: Groups | None, states: Sequence[Mapping[str, Any]]) -> None:
    """Restore the groups that :meth:`ParameterGroups.capture` returned, before the optimizers load ``states``.

    Groups that a callback has restored already stay.
    """
    if saved is None or len(saved) != len(trainer.optimizers) or trainer.strategy.restore_checkpoint_after_setup:
        return
    for optimizer, groups, state in zip(trainer.optimizers, saved, states, strict=False):
        found, settings = _parameters(trainer, groups), state.get("param_groups", ())
        now = [group["params"] for group in optimizer.param_groups]
        if found is None or len(found) != len(settings):
            continue
        members, wanted = ([[*map(id, of)] for of in groups] for groups in (now, found))
        if members == wanted:
            continue
        _restored_here.add(optimizer)
        made = [{**one, "params": of} for one, of in zip(settings, found, strict=True)]
        if members == wanted[: len(members)]:
            for group in made[len(members) :]:
                optimizer.add_param_group(group)  # some optimizers override this method
        else:
            optimizer.param_groups[:] = made


def _parameters(trainer: Any, groups: list[list[str]]) -> list[list[torch.nn.Parameter]] | None:
    parameters = dict(trainer.lightning_module.named_parameters())
    with contextlib.suppress(KeyError):  # the checkpoint is of another model, which Lightning's load reports
        return [[parameters[name] for name in group] for group in groups]
    return None
