"""Load a checkpoint of any layout into a model that may differ from the saved one, and report what was loaded."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from ckpt_core._plan import LocalTensor, local_tensor
from ckpt_core.directory import DirectoryCheckpoint, DirectoryCheckpointer
from ckpt_core.errors import CheckpointError, CheckpointFormatError, StateMismatchError
from ckpt_core.interchange.accelerate_files import is_stock_accelerate
from ckpt_core.interchange.converting import load_whole
from ckpt_core.interchange.model_files import holds_model, model_in, part_of_model
from ckpt_core.paths import StrPath, full_path
from ckpt_core.process.awaited_paths import wait_for_saves
from ckpt_core.state.kinds import indexed
from ckpt_core.state.trainer_parts import buffers_apart
from ckpt_core.storage import storage_for
from ckpt_core.tree import tensors

Rename = Mapping[str, str | None] | Callable[[str], str | None]
_SHOWN = 5
_ACCELERATE = "accelerate_ckpt"
# Names of optimizer state that has the shape of the weight; other state may hold statistics of its rows and columns.
_MOMENTS = frozenset(
    [
        "exp_avg",
        "exp_avg_sq",
        "exp_inf",
        "max_exp_avg_sq",
        "momentum_buffer",
        "square_avg",
        "grad_avg",
        "acc_delta",
        "sum",
        "prev",
        "step_size",
        "exp_avg_diff",
        "mu_product_buffer",
        "ax",
    ]
)


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """Result of :func:`load_into`. Names are those of the live model, except in ``skipped``.

    Attributes:
        path: The checkpoint.
        taken: Tensors of the model that were loaded.
        new: Tensors of the model that are not in the checkpoint, or differ in shape there; they were left unchanged.
        skipped: Tensors of the checkpoint that were not loaded: the reason, by their name in the checkpoint.
        converted: Loaded tensors that have a different type in the checkpoint: both types, by name.
        optimizer_taken: Parameters whose optimizer state was loaded.
        optimizer_skipped: Why the optimizer state of other parameters was not loaded, by name; for a whole optimizer,
            by ``optimizer`` or ``optimizer_1``.
    """

    path: str
    taken: tuple[str, ...] = ()
    new: tuple[str, ...] = ()
    skipped: Mapping[str, str] = dataclasses.field(default_factory=dict)
    converted: Mapping[str, str] = dataclasses.field(default_factory=dict)
    optimizer_taken: tuple[str, ...] = ()
    optimizer_skipped: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Whether every tensor of the model was loaded, and every tensor of the checkpoint was used."""
        return not (self.new or self.skipped or self.optimizer_skipped)

    def __str__(self) -> str:
        parts = [f"{self.path}: took {len(self.taken)} tensors"]
        if self.converted:
            parts.append(f"{len(self.converted)} of another type: {_some(self.converted)}")
        if self.new:
            parts.append(f"{len(self.new)} new here: {_some(self.new)}")
        if self.skipped:
            parts.append(f"{len(self.skipped)} skipped: {_some(self.skipped)}")
        if self.optimizer_taken:
            parts.append(f"optimizer state of {len(self.optimizer_taken)} parameters")
        if self.optimizer_skipped:
            parts.append(f"no optimizer state for {len(self.optimizer_skipped)}: {_some(self.optimizer_skipped)}")
        return "; ".join(parts)


def _some(names: Mapping[str, str] | Sequence[str]) -> str:
    shown = [f"{name} ({names[name]})" if isinstance(names, Mapping) else name for name in list(names)[:_SHOWN]]
    return ", ".join(shown) + (", ..." if len(names) > _SHOWN else "")


def load_into(
    path: StrPath,
    model: torch.nn.Module,
    *,
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
    rename: Rename | None = None,
    strict: bool = True,
    partial: bool = False,
    part: str | None = None,
    weights_only: bool | None = None,
    storage_options: dict[str, Any] | None = None,
) -> LoadReport:
    """Load a checkpoint of any layout into a model, and the optimizer state that still fits into optimizers.

    The layout is detected: one file, a directory of this package (of which only what the model needs is read), those
    of Lightning's sharded strategies and of stock Accelerate, a Hugging Face model or a ``.safetensors`` file, also of
    PEFT's adapters alone. Nothing is changed unless all checks pass.

    Args:
        path: Path or URL.
        model: Receives the weights; its parameters may be distributed (``fully_shard``).
        optimizers: Optimizers of the model's parameters, in the order in which they were saved. State is loaded for
            parameters whose weights have the same shape, if it is certain which state belongs to which parameter;
            learning rates and other settings of the given optimizers stay.
        rename: How to convert names in the checkpoint to names in the model: a mapping of names or prefixes
            (``{"backbone.": "encoder."}``, ``{"model.": ""}``; None leaves out), of which the longest match is used;
            or a function that returns the new name, or None.
        strict: Whether checkpoint and model must have the same names.
        partial: Load what fits: names may be on one side only, and shapes may differ.
        part: Where the model is in the checkpoint: a key of a file (``"ema"``), a part of a directory.
        weights_only: As for ``torch.load``.
        storage_options: Passed to fsspec for URLs.

    Returns:
        Which tensors were loaded, skipped or not in the checkpoint.

    Raises:
        StateMismatchError: The checkpoint does not fit as ``strict`` and ``partial`` require; the message has a remedy.
        CheckpointError: The checkpoint is missing, damaged, or holds no model.

    Examples:
        >>> import os, tempfile, torch
        >>> from ckpt_core import Checkpointer, load_into
        >>> path = os.path.join(tempfile.mkdtemp(), "old.ckpt")
        >>> size = Checkpointer(strategy="sync").save({"model": {"body.weight": torch.ones(2, 2)}}, path)
        >>> model = torch.nn.ModuleDict({"trunk": torch.nn.Linear(2, 2)})
        >>> report = load_into(path, model, rename={"body.": "trunk."}, partial=True)
        >>> report.taken, report.new
        (('trunk.weight',), ('trunk.bias',))
    """
    wanted = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
    _refuse_flat(model)
    name = full_path(path)
    with _opened(name, part, weights_only, storage_options) as source:
        plan = _plan(source, model, rename, name)
        plan.check(strict=strict and not partial, partial=partial)
        states = [source.optimizer(index) for index in range(len(wanted))]
        matches = [
            _match_optimizer(state, optimizer, plan, index)
            for index, (state, optimizer) in enumerate(zip(states, wanted, strict=True))
        ]
        source.fill({saved: plan.targets[here] for saved, here in plan.taken.items()}, plan.converted)
    if plan.extra:
        model.load_state_dict(plan.extra, strict=False)
    taken: list[str] = []
    reasons: dict[str, str] = {}
    for optimizer, match in zip(wanted, matches, strict=True):
        match.apply(optimizer)
        taken += match.taken
        reasons |= match.skipped
    return LoadReport(
        name,
        tuple(plan.taken.values()),
        plan.new,
        plan.skipped,
        {plan.taken[saved]: why for saved, why in plan.converted.items()},
        tuple(taken),
        reasons,
    )


def _refuse_flat(model: torch.nn.Module) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise CheckpointError(
            "the model is wrapped by FullyShardedDataParallel, which has joined its parameters",
            remedy="load before it is wrapped (in configure_model, before prepare), or use fully_shard (FSDP 2)",
        )


# ---- where from ------------------------------------------------------------------------------------------------------


class _State:
    """A checkpoint whose whole state is in memory, as a source for a load."""

    def __init__(self, state: Any, part: str | None, path: str, *, is_ordered: bool) -> None:
        self._state = state
        self.is_ordered = is_ordered
        model = _model_in(state, part, path)
        self.model: dict[str, Any] = {**{str(name): value for name, value in model.items()}, **dict(tensors(model))}
        self.buffers: frozenset[str] = frozenset()

    def optimizer(self, index: int) -> Any:
        state = self._state
        if not isinstance(state, Mapping):
            return None
        several = state.get("optimizer_states")
        if isinstance(several, Sequence):
            return several[index] if index < len(several) else None
        return state.get(indexed("optimizer", index), state.get("optimizer_state_dict") if index == 0 else None)

    def fill(self, targets: Mapping[str, torch.Tensor], _: Mapping[str, str]) -> None:
        with torch.no_grad():
            for name, target in targets.items():
                target.copy_(_placed(self.model[name], target))


class _Directory:
    """A directory checkpoint of this package, of which only the needed tensors are read."""

    def __init__(self, opened: DirectoryCheckpoint, part: str | None, path: str) -> None:
        self._opened = opened
        self._part = part or part_of_model(opened.parts)
        self.is_ordered = not opened.metadata.get(_ACCELERATE, {}).get("of_stock", False)
        if self._part not in opened.parts:
            raise CheckpointFormatError(
                f"the checkpoint has no part {self._part!r}: it has {', '.join(sorted(opened.parts))}",
                path=path,
                key=self._part,
                remedy="give one of them as part",
            )
        self.model: dict[str, Any] = {
            name: torch.empty(info.shape, dtype=info.dtype, device="meta")
            for name, info in opened.parts[self._part].tensors.items()
        }
        self._whole = buffers_apart(opened, self._part)
        self.model.update(self._whole)
        self.buffers = frozenset(self._whole)

    def optimizer(self, index: int) -> Any:
        name = indexed("optimizer", index)
        return self._opened.load(name) if name in self._opened.parts else None

    def fill(self, targets: Mapping[str, torch.Tensor], converted: Mapping[str, str]) -> None:
        apart = self._whole.keys() | converted.keys()
        into = {name: target for name, target in targets.items() if name not in apart}
        with torch.no_grad():
            if into:
                self._opened.load(self._part, into=into, local=_local, strict=False)
            for name in targets.keys() & apart:
                value = self._whole.get(name)
                if value is None:
                    like = self.model[name]
                    value = self._opened.load(
                        self._part, into={name: torch.empty(like.shape, dtype=like.dtype)}, strict=False
                    )[name]
                targets[name].copy_(_placed(value, targets[name]))


def _local(key: str, tensor: torch.Tensor) -> LocalTensor:
    is_spread = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank, world_size = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if is_spread else (0, 1)
    return local_tensor(tensor, key=key, rank=rank, world_size=world_size, replicated=True)


@contextlib.contextmanager
def _opened(
    path: str, part: str | None, weights_only: bool | None, storage_options: dict[str, Any] | None
) -> Iterator[_State | _Directory]:
    wait_for_saves(path)
    with DirectoryCheckpointer(strategy="sync", storage_options=storage_options) as directories:
        if directories.exists(path):
            with directories.load(path, weights_only=weights_only) as opened:
                yield _Directory(opened, part, path)
            return
    # Safetensors files do not keep the tensors in the order of the model.
    is_ordered = not (
        is_stock_accelerate(path, storage_options) or holds_model(path, storage_for(path, storage_options))
    )
    state = load_whole(path, weights_only=weights_only, storage_options=storage_options)
    yield _State(state, part, path, is_ordered=is_ordered)


def _model_in(state: Any, part: str | None, path: str) -> Mapping[str, Any]:
    found = model_in(state, part)
    if not isinstance(found, Mapping):
        keys = ", ".join(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise CheckpointFormatError(
            f"there is no model under {part!r}"
            if part
            else ("the location of the model in this checkpoint is unknown"),
            path=path,
            remedy=f"give its key as part; there is: {keys}",
        )
    return found


def _placed(value: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return a whole tensor as a DTensor like the target, with this rank's piece; unchanged if the target is plain."""
    if not isinstance(target, DTensor):
        return value
    # Every rank has the whole tensor, so nothing needs to be sent.
    return distribute_tensor(value.to(target.device), target.device_mesh, target.placements, src_data_rank=None)


# ---- what goes where -------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Plan:
    path: str
    targets: dict[str, torch.Tensor]  # tensors of the model, by their name in the model
    here: dict[str, str]  # name in the model, by name in the checkpoint, of all tensors that are in both
    taken: dict[str, str]  # the same, of those whose shape fits
    new: tuple[str, ...]
    skipped: dict[str, str]
    misfits: dict[str, str]  # of ``skipped``, the tensors that are in the model with a different shape
    converted: dict[str, str]
    extra: dict[str, Any]
    saved: Mapping[str, Any]
    buffers: frozenset[str]  # names in the checkpoint
    parameters: dict[int, str]  # names in the model, by id of the parameter
    is_ordered: bool  # whether the checkpoint's names are in the order of the model that was saved

    def check(self, *, strict: bool, partial: bool) -> None:
        """Raise StateMismatchError if the checkpoint does not fit the model as ``strict`` and ``partial`` require."""
        problems = [] if partial else [f"{name}: {why}" for name, why in self.misfits.items()]
        if strict:
            of_other_shape = {self.here[name] for name in self.misfits}
            problems += [f"{name} is not in the checkpoint" for name in self.new if name not in of_other_shape]
            problems += [
                f"{name} is in the checkpoint and not here" for name in self.skipped if name not in self.misfits
            ]
        if not problems and self.taken:
            return
        if not problems:
            problems = ["it has no tensor of a name and shape of the model here"]
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise StateMismatchError(
            f"the checkpoint is of another model: {'; '.join(problems[:3])}{more}",
            path=self.path,
            key=next(iter([*self.misfits, *self.new, *self.skipped]), None),
            remedy=self._remedy() or "rename=, or partial=True takes what fits and reports the rest",
        )

    def _remedy(self) -> str | None:
        if (prefix := _first_parts(self.saved, self.targets)) is not None:
            return f"names there begin with {prefix!r}: rename={{{prefix!r}: ''}}"
        if (prefix := _first_parts(self.targets, self.saved)) is not None:
            return f"names here begin with {prefix!r}: rename={{'': {prefix!r}}}"
        return None


def _first_parts(names: Iterable[str], others: Container[str]) -> str | None:
    """Return the most common prefix of ``names`` after which the rest is in ``others``: ``"module._orig_mod."``."""
    dots = ((name, dot.end()) for name in names for dot in re.finditer(r"\.", name))
    found = collections.Counter(name[:end] for name, end in dots if name[end:] in others)
    return max(found, key=lambda prefix: found[prefix]) if found else None


def _plan(source: _State | _Directory, model: torch.nn.Module, rename: Rename | None, path: str) -> _Plan:
    state = model.state_dict(keep_vars=True)
    targets = {name: value.detach() for name, value in state.items() if isinstance(value, torch.Tensor)}
    parameters = {id(value): name for name, value in reversed(state.items()) if isinstance(value, torch.nn.Parameter)}
    saved = source.model
    adapters = _adapters(model, targets)
    plan = _Plan(path, targets, {}, {}, (), {}, {}, {}, {}, saved, source.buffers, parameters, source.is_ordered)
    for name, value in saved.items():
        here = _renamed(name, rename)
        here = adapters.get(here, here) if here is not None and here not in targets else here
        if here is None:
            plan.skipped[name] = "left out by rename"
        elif here in plan.here.values():
            raise StateMismatchError(
                f"rename gives the name {here!r} to two tensors of the checkpoint, one of which is {name!r}",
                path=path,
                key=name,
                remedy="give each tensor a name of its own, or None to leave it out",
            )
        elif not isinstance(value, torch.Tensor):
            plan.extra.update({here: value} if here in state and here not in targets else {})
        elif here not in targets:
            plan.skipped[name] = "not here" if here == name else f"no {here} here"
        else:
            plan.here[name] = here
            target = targets[here]
            if value.shape != target.shape:
                why = f"shape {list(value.shape)} there and {list(target.shape)} here"
                plan.skipped[name] = plan.misfits[name] = why
                continue
            plan.taken[name] = here
            if value.dtype != target.dtype:
                plan.converted[name] = f"{str(value.dtype)[6:]} to {str(target.dtype)[6:]}"
    # A tied weight is loaded if the checkpoint has one of its names.
    filled = {id(state[here]) for here in plan.taken.values()}
    plan.new = tuple(name for name in targets if id(state[name]) not in filled)
    tied = {id(state[here]) for here in plan.here.values()}
    plan.new = tuple(name for name in plan.new if name in plan.here.values() or id(state[name]) not in tied)
    return plan


def _adapters(model: torch.nn.Module, targets: Mapping[str, Any]) -> dict[str, str]:
    """Map the names under which PEFT saves tensors (without the adapter's name) to their names in the model."""
    found = {}
    for adapter in getattr(model, "peft_config", None) or ():
        for name in targets:
            parts = name.split(".")
            if adapter in parts:
                found[".".join(part for part in parts if part != adapter)] = name
    return found


def _renamed(name: str, rename: Rename | None) -> str | None:
    if rename is None:
        return name
    if callable(rename):
        return rename(name)
    if name in rename:
        return rename[name]
    fits = [old for old in rename if name.startswith(old) and (old == "" or old.endswith(".") or name[len(old)] == ".")]
    if not fits:
        return name
    old = max(fits, key=len)
    new = rename[old]
    return None if new is None else new + name[len(old) :]


# ---- optimizers ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _OptimizerMatch:
    state: dict[int, Any]  # by the parameter's number in the live optimizer
    taken: list[str]
    skipped: dict[str, str]

    def apply(self, optimizer: torch.optim.Optimizer) -> None:
        """Load the state into the optimizer; its settings stay."""
        if not self.state:
            return
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        state = optimizer.state_dict()
        state["state"] = {
            **state["state"],
            **{number: _copied(found, parameters[number]) for number, found in self.state.items()},
        }
        optimizer.load_state_dict(state)


def _copied(found: Mapping[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    return {
        key: (_placed(value.clone(), parameter) if value.shape == parameter.shape else value.clone())
        if isinstance(value, torch.Tensor)
        else value
        for key, value in found.items()
    }


def _match_optimizer(state: Any, optimizer: torch.optim.Optimizer, plan: _Plan, index: int) -> _OptimizerMatch:
    """Match the state of a saved optimizer to the parameters of a live one.

    Saved state is keyed by numbers, in an order that only the saving program knew. A match is certain if each group of
    the live optimizer has as many parameters that are in the checkpoint as the saved group; or if there is one saved
    group with as many parameters as the saved model.
    """
    label = indexed("optimizer", index)
    if not isinstance(state, Mapping) or "param_groups" not in state or "state" not in state:
        return _OptimizerMatch({}, [], {label: "the checkpoint has no state for it"})
    names = [[plan.parameters.get(id(each)) for each in group["params"]] for group in optimizer.param_groups]
    numbers = [name for group in names for name in group]
    saved_names = _saved_names(state, names, plan)
    if saved_names is None:
        return _OptimizerMatch({}, [], {label: "it is not certain which state belongs to which parameter"})
    by_name = {saved_names[key]: found for key, found in state["state"].items() if key in saved_names}
    there = {here: saved for saved, here in plan.here.items()}
    match = _OptimizerMatch({}, [], {})
    for number, here in enumerate(numbers):
        found = by_name.get(there.get(here or "", ""))
        if here is None or here not in there:
            match.skipped[here or f"{label}.{number}"] = "the checkpoint does not have the parameter"
        elif there[here] not in plan.taken:
            match.skipped[here] = plan.skipped[there[here]]
        elif not found:
            match.skipped[here] = "the checkpoint has none for it"
        else:
            match.state[number] = found
            match.taken.append(here)
    return match


def _saved_names(saved: Mapping[str, Any], here: list[list[str | None]], plan: _Plan) -> dict[Any, str] | None:
    """Return the name of each parameter in a saved optimizer, by the keys of its state; None if uncertain."""
    groups, state = saved["param_groups"], saved["state"]
    flat = [key for group in groups for key in group["params"]]
    if all(isinstance(key, str) for key in flat):  # saved by FSDP or get_optimizer_state_dict
        return {key: key for key in flat}
    for names in _candidates(groups, here, plan):
        if len(names) == len(flat) and all(
            _is_of(state.get(key, {}), plan.saved.get(name)) for key, name in zip(flat, names, strict=True)
        ):
            return dict(zip(flat, names, strict=True))
    return None


def _candidates(groups: Sequence[Mapping[str, Any]], here: list[list[str | None]], plan: _Plan) -> Iterator[list[str]]:
    if all("param_names" in group for group in groups):  # the optimizer was created with named_parameters()
        yield [name for group in groups for name in group["param_names"]]
    there = {name: saved for saved, name in plan.here.items()}
    by_rule = [[there[name] for name in group if name in there] for group in here]
    if [len(group) for group in by_rule] == [len(group["params"]) for group in groups]:
        yield [name for group in by_rule for name in group]
    if len(groups) == 1 and plan.is_ordered:
        parameters = set(plan.parameters.values())
        yield [
            saved
            for saved, value in plan.saved.items()
            if isinstance(value, torch.Tensor)
            and saved not in plan.buffers
            and (plan.here[saved] in parameters if saved in plan.here else value.is_floating_point())
        ]


def _is_of(state: Mapping[str, Any], weight: Any) -> bool:
    """Return whether the optimizer state of one parameter can belong to a weight, judging by shapes."""
    return isinstance(weight, torch.Tensor) and all(
        value.shape == weight.shape
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and value.ndim and (key in _MOMENTS or value.ndim >= weight.ndim)
    )
