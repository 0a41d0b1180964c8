"""Watches user variables outside of module, datamodule and callbacks: globals, class attributes, closures."""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import Any

from ckpt_core.state.code_origin import is_library
from ckpt_core.state.lost_variables import Variables, Watched, in_words, only_logged_in_words
from lightning_ckpt._report import announce


def _is_users(owner: object) -> bool:
    has_functions = any(isinstance(one, types.FunctionType) for one in vars(owner).values())  # e.g. a LambdaCallback
    return has_functions or not is_library(type(owner))


class ScriptVariables:
    """Watches the variables of the script of one Trainer.

    ``warn`` is called with the variables that are found to be lost only after training has continued.
    """

    def __init__(self, trainer: Any, warn: Callable[[str], None]) -> None:
        self._trainer, self._warn = trainer, warn
        self._callbacks = list(trainer.callbacks)
        self._lost: list[str] = []
        self._continues = False
        self._variables = Variables(
            self._watched, self._tell, lambda names: announce(trainer, only_logged_in_words(names))
        )

    def _tell(self, names: Sequence[str]) -> None:
        if self._continues:
            self._warn(_in_words(names))
        else:
            self._lost.extend(names)

    def _watched(self) -> Watched | None:
        trainer = self._trainer
        # reading a value of a sharded tensor would need all ranks
        if not trainer.is_global_zero or trainer.strategy.restore_checkpoint_after_setup:
            return None
        module = trainer.lightning_module
        owners = [one for one in (trainer.datamodule, *trainer.callbacks) if one is not None and _is_users(one)]
        loader = trainer.train_dataloader  # its position is captured separately
        data = [getattr(loader, name, None) for name in ("dataset", "sampler", "batch_sampler", "collate_fn")]
        made = [*trainer.optimizers, *(one.scheduler for one in trainer.lr_scheduler_configs)]
        data += [function for one in made for function in getattr(one, "lr_lambdas", ())]
        # a state_dict of the user's own class may leave out attributes
        owners += [one for one in made if not is_library(type(one))]
        return Watched([module], [trainer, loader, *made, *trainer.loggers], owners, data, waits=True)

    @property
    def _is_trial(self) -> bool:
        # a tuner replaces the callbacks with its own, or with none; what its trials change, training has not changed
        return not any(ours is one for ours in self._callbacks for one in self._trainer.callbacks)

    def epoch_begins(self) -> None:
        """Note that an epoch begins; called after the hooks of its start."""
        if self._is_trial:
            return
        self._variables.handed_out(begins=True)
        self._variables.trains()

    def ends(self) -> None:
        """Note that the fit is over."""
        self._variables.ends()

    def capture(self, *, between: bool, ends: bool, but: Set[str]) -> dict[str, Any]:
        """Return what training has changed; a resume continues ``between`` epochs, or where this epoch ``ends``.

        Names in ``but`` are left out: only what a resume repeats has changed them.
        """
        found = self._variables.capture(between=between, ends=ends)
        return {**found, "values": {key: one for key, one in found.get("values", {}).items() if key not in but}}

    def resume(self, saved: Mapping[str, Any]) -> None:
        """Continue from what :meth:`capture` returned."""
        self._variables.resume(saved)

    @property
    def compared_later(self) -> Collection[str]:
        """Names of lost variables that the script may create again with the same values; they are compared later."""
        return self._variables.compared_later

    def lost(self) -> list[str]:
        """Return which variables training continues without."""
        if self._is_trial:
            return []
        self._variables.handed_out(begins=False)
        self._variables.trains()
        self._continues = True
        return self._lost


def lost_in_words(lost: Sequence[str], but: str) -> str | None:
    """Return which variables are lost, in words, without those that ``but`` names already."""
    names = [name for name in lost if re.sub(r"`(.*)` of (.*)", r"\2.\1", name) not in but]
    return _in_words(names) if names else None


def _in_words(names: Sequence[str]) -> str:
    return (
        f"it begins without variables of the script that training had changed: {in_words(names)} (if "
        "training depends on them, save them in on_save_checkpoint and set them in on_load_checkpoint)"
    )
