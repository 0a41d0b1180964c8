"""Accelerate's side of a rehearsal: in its processes, an Accelerator saves, takes notes of each step, and ends early.

The script is not changed. Its checkpoints go to another directory, its trackers are not started, and code after the
rehearsed steps is not run. A resumed script loads the rehearsal's checkpoint, whatever path it asks for.
"""

from __future__ import annotations

import atexit
import collections
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from accelerate_ckpt._private.data import Internals
from accelerate_ckpt._state.naming import target_of
from ckpt_core.rehearsal import (
    Notes,
    Plan,
    classes_of,
    generators_of,
    labelled,
    optimizers_of,
    plain_of,
    script_variables,
    states_of,
)
from ckpt_core.tree import leaves

_OF_LOADERS = ("dataset", "sampler", "batch_sampler", "collate_fn")
_OWN = "save_state"
_MIDDLE, _EPOCH_END, _ACCUMULATION = "middle", "epoch-end", "accumulation"
_MOST_SAVES = 4


def is_rehearsed() -> bool:
    """Return whether this process belongs to a rehearsal."""
    return Plan.of_environment() is not None


class Rehearsal:
    """Rehearses the training of the Accelerator of a session, as the plan says."""

    _begun = False

    def __init__(self, session: Any, plan: Plan) -> None:
        self._session, self._plan, self.resume = session, plan, plan.resume
        # a resumed run must not save to the directory that the next one resumes from
        self._checkpoints = plan.checkpoints if plan.resume is None else os.path.join(plan.directory, "checkpoints")
        accelerator = session.accelerator
        self._notes = Notes(plan, accelerator.process_index)
        self._data: list[Any] = []
        self.has_all_data = False  # True: loaders prepared from now on are for evaluations
        self.window = 0  # batches per step, if an integration knows it and the Accelerator does not
        self._pending: list[dict[str, Any]] = []
        self._used: list[dict[str, Any]] = []
        self._losses: list[Any] = []
        self._logged: dict[str, Any] = {}
        self._step: int | None = None
        self._last: int | None = plan.until if plan.until is not None else plan.steps
        self._saves: list[dict[str, Any]] = []
        self._waiting: list[tuple[dict[str, Any], int, int, list[str]]] = []
        self._at = set(plan.at)
        self._epochs: collections.Counter[int] = collections.Counter()
        self._is_defined = self._has_loaded = False
        if accelerator.project_configuration.automatic_checkpoint_naming:
            accelerator.project_configuration.project_dir = self._checkpoints
        accelerator.init_trackers = lambda *_, **__: None
        atexit.register(self._script_ends)

    @classmethod
    def asked_for(cls, session: Any) -> Rehearsal | None:
        """Return the rehearsal of this process, for the first Accelerator; None if it was not started for one."""
        plan = Plan.of_environment()
        if plan is None or cls._begun:
            return None
        cls._begun = True
        return cls(session, plan)

    # ---- what the script does ----------------------------------------------------------------------------------------

    def prepared(self, loader: Any) -> None:
        """Note the data set and samplers of a loader of the script, unless it is prepared for one evaluation only."""
        if self.has_all_data:
            return
        parts = (getattr(loader, name, None) for name in _OF_LOADERS)
        self._data += [part for part in parts if part is not None and not any(part is other for other in self._data)]

    def hand_out(self, loader: Any, batch: Any, *, begins: bool) -> None:
        """Note a batch that the script gets, and whether an epoch begins with it."""
        if self._step is None:
            self._step = self._session.step
        parts = {name or "batch": leaf for name, leaf in leaves(batch)}
        self._pending.append(parts)
        self._epochs[id(loader)] += begins
        self._notes.hand_out(self._epochs[id(loader)], loader.base_dataloader, parts, Internals(loader).fetches)

    def backward(self, loss: Any) -> None:
        """Note a backward pass: the batches that were handed out before it count as trained on."""
        self._used += self._pending
        self._pending = []
        self._notes.trains()
        self._losses.append(loss.detach().clone() if isinstance(loss, torch.Tensor) else loss)

    def log(self, values: Mapping[str, Any]) -> None:
        """Note what the script logs."""
        self._logged.update(values)

    def after_batch(self, loader: Any) -> None:
        """Take notes if the script has stepped, and save or end if that is due; called when it asks for a batch."""
        self._pending = []
        if self._plan.ranks is not None:
            if self._notes.handed and self._session.data.is_between:
                self._leave()
            return
        step = int(self._session.step)
        if step == self._step or not self._used:
            if self._used and self._session.window_is_open:
                self._save_at(_ACCUMULATION)
            return
        self._step = step
        self._take()
        if self._last is None:
            self._last = self._steps_of(loader)
        if step >= self._last:
            self._leave()
        if step in self._at:
            self._at.discard(step)
            self._save(os.path.join(self._plan.saves, f"checkpoint_{step}"), "step")
        elif _MIDDLE in self._plan.points and step == max(1, self._last // 2):
            self._save(os.path.join(self._plan.saves, f"checkpoint_{step}"), _MIDDLE)
        elif self._session.data.is_between:
            self._save_at(_EPOCH_END)

    def _save_at(self, point: str) -> None:
        """Save once at ``point``, if the plan has it."""
        is_new = all(saved["point"] != point for saved in self._saves)
        if self._plan.only_points and point in self._plan.points and is_new:
            self._save(os.path.join(self._plan.saves, f"checkpoint_{self._session.step}_{point}"), point)

    def _steps_of(self, loader: Any) -> int:
        per_epoch = len(loader) if hasattr(loader, "__len__") else None
        window = self.window or int(self._session.accelerator.gradient_accumulation_steps)
        return math.ceil((self._plan.batches(per_epoch, window) or window) / window)

    def target(self, output_dir: Any) -> str:
        """Return where to write a save of the script, and note it as a point to resume from."""
        target = target_of(self._session.accelerator, output_dir)
        if not os.path.abspath(target).startswith(os.path.dirname(self._plan.directory)):
            target = os.path.join(self._checkpoints, os.path.basename(os.path.normpath(target)))
        is_other = all(saved["place"] != self._place for saved in self._saves)
        counts = self._plan.points and not self._plan.only_points
        if counts and self._plan.resume is None and is_other and len(self._saves) < _MOST_SAVES:
            self._note(target, _OWN)
        return target

    def source(self, input_dir: Any) -> Any:
        """Return the path for ``load_state`` to load; raise ``LookupError`` if this run starts from the beginning."""
        if self._plan.resume is not None and not self._has_loaded:
            self._has_loaded = True
            self._notes.resumed()
            return self._plan.resume
        if input_dir is None and self._session.config.resume == "auto":
            raise LookupError("a rehearsal begins at the beginning")
        return input_dir

    def _save(self, path: str, point: str) -> None:
        accelerator = self._session.accelerator
        self._note(path, point)
        naming = accelerator.project_configuration
        automatic, naming.automatic_checkpoint_naming = naming.automatic_checkpoint_naming, False
        count = naming.iteration
        self.is_saving = True
        try:
            accelerator.save_state(path)
        finally:
            self.is_saving = False
            naming.automatic_checkpoint_naming, naming.iteration = automatic, count

    is_saving = False  # whether the rehearsal is saving, and not the script

    def _note(self, path: str, point: str) -> None:
        # notes of the present step may follow after this save; what came before it in the step is not compared
        saved = {"point": point, "path": path, "number": self._session.step, "place": self._place}
        saved["handed"] = self._notes.handed
        self._saves.append(saved)
        self._waiting.append((saved, len(self._used), len(self._losses), [f"logged:{name}" for name in self._logged]))

    @property
    def _place(self) -> str:
        return f"step {self._session.step}"

    # ---- the end -----------------------------------------------------------------------------------------------------

    def _script_ends(self) -> None:
        self._end()
        self._notes.write()

    def leave_if_begun(self) -> None:
        """End the process if training has begun; called when the script ends its training."""
        if self._step is not None:
            self._leave()

    def _end(self) -> None:
        self._session.checkpointer.drain()
        own = [saved for saved in self._saves if saved["point"] != _MIDDLE or self._plan.only_points]
        for saved in own or self._saves:
            if "already" in saved:
                self._notes.saved(**saved)
        points = self._plan.points if self._plan.only_points else ()
        missed = [point for point in points if all(saved["point"] != point for saved in self._saves)]
        self._notes.missed([*(f"step {step}" for step in sorted(self._at)), *missed])

    def _leave(self) -> None:
        atexit.unregister(self._script_ends)
        self._end()
        self._notes.write()
        self._session.accelerator.wait_for_everyone()
        self._notes.leave()

    # ---- notes -------------------------------------------------------------------------------------------------------

    def _take(self) -> None:
        assert self._step is not None
        accelerator = self._session.accelerator
        used, self._used = self._used, []
        losses, self._losses = self._losses, []
        logged, self._logged = self._logged, {}
        # counted back from the step: a run that resumes inside an accumulation window has only the last batches
        data = {f"{i - len(used)}.{k}": v for i, batch in enumerate(used) for k, v in batch.items()}
        self._settle(used, len(losses))
        models, objects = accelerator._models, accelerator._custom_objects
        state: dict[str, dict[str, Any]] = {
            "position": {"step": self._step},
            "generators": generators_of(self._data),
            "data": data,
            "modes": {
                **{f"{n}.{k}.training": m.training for n, model in enumerate(models) for k, m in model.named_modules()},
                **{f"{name}.requires_grad": parameter.requires_grad for name, parameter in _parameters(models)},
            },
            "loss": {str(i - len(losses)): loss for i, loss in enumerate(losses)},
            "gradients": {name: parameter.grad for name, parameter in _parameters(models)},
            "weights": {**dict(_parameters(models)), **dict(_buffers(models))},
            "optimizers": optimizers_of(accelerator._optimizers, {id(p): name for name, p in _parameters(models)}),
            "schedulers": states_of(enumerate(each.scheduler for each in accelerator._schedulers)),
            "logged": logged,
            "objects": states_of(labelled(objects)),
            "data sets": plain_of(self._data),
            "attributes": plain_of(models),
            "variables": script_variables(),
        }
        self._notes.take(self._step, state)
        if not self._is_defined:
            self._is_defined = True
            of_models, of_data = classes_of(*models, depth=0), classes_of(*self._data)
            for subject in ("data", "data sets", "generators"):
                self._notes.define(subject, of_data)
            for subject in ("loss", "weights", "gradients", "modes", "attributes"):
                self._notes.define(subject, of_models)
            self._notes.define("objects", classes_of(*objects, depth=0))

    def _settle(self, used: list[dict[str, Any]], losses: int) -> None:
        """Complete the notes of saves since the last step: what precedes a save in its step is not compared later."""
        for saved, before, losses_before, already in self._waiting:
            if saved["number"] < self._step:
                batches = [(i, key) for i, batch in enumerate(used[:before]) for key in batch]
                already += [f"data:{i - len(used)}.{key}" for i, key in batches]
                already += [f"loss:{i - losses}" for i in range(losses_before)]
                saved["already"] = already
        self._waiting = [waiting for waiting in self._waiting if "already" not in waiting[0]]
        # the others were saved in the body of this step, after all of its batches: nothing precedes them in the next
        self._waiting = [(saved, 0, 0, []) for saved, *_ in self._waiting]


def _parameters(models: list[Any]) -> Iterator[tuple[str, Any]]:
    for number, model in enumerate(models):
        yield from ((f"{number}.{name}", parameter) for name, parameter in model.named_parameters())


def _buffers(models: list[Any]) -> Iterator[tuple[str, Any]]:
    for number, model in enumerate(models):
        yield from ((f"{number}.{name}", buffer) for name, buffer in model.named_buffers())
