"""The state of a shard: blocks of parameters and their optimizer; and the copy of it that a snapshot saves."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import Parameter

from ckpt_async.consistent_cut import UpdateId
from ckpt_async.consistent_cut.messages import PushHeader
from ckpt_core.errors import StateMismatchError

MakeOptimizer = Callable[[list[tuple[str, Parameter]]], torch.optim.Optimizer]


class _BlockState:
    """Parameters by the name of their block, and an optimizer that steps the blocks that an update contains."""

    def __init__(self, blocks: Mapping[str, torch.Tensor], make_optimizer: MakeOptimizer) -> None:
        self.parameters = {name: Parameter(tensor.detach().clone()) for name, tensor in blocks.items()}
        named = list(self.parameters.items())
        # torch refuses an optimizer without parameters; if there are more shards than blocks, a shard has none.
        self._optimizer = make_optimizer(named) if named else None

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups."""
        return [] if self._optimizer is None else self._optimizer.param_groups

    def optimizer_state(self, name: str) -> dict[str, Any]:
        """Return the optimizer's state of a block; not a copy."""
        assert self._optimizer is not None
        state: dict[str, Any] = self._optimizer.state[self.parameters[name]]
        return state

    def step(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Take an optimizer step with the gradients of some blocks; the other blocks stay unchanged."""
        assert self._optimizer is not None
        for name, gradient in gradients.items():
            self.parameters[name].grad = gradient
        self._optimizer.step()
        for name in gradients:
            self.parameters[name].grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state by block, so that any shard can load it: plain data and uncopied tensors."""
        names = {parameter: name for name, parameter in self.parameters.items()}
        groups = [
            {
                "blocks": [names[parameter] for parameter in group["params"]],
                "options": {key: value for key, value in group.items() if key not in {"params", "param_names"}},
            }
            for group in self.groups
        ]
        return {"state": {name: dict(self.optimizer_state(name)) for name in self.parameters}, "groups": groups}

    def load_optimizer(self, saved: Mapping[str, Any]) -> None:
        """Load the optimizer state of the blocks that are here, from :meth:`state_dict` of this or another shard."""
        assert self._optimizer is not None
        for name, state in saved["state"].items():
            if name in self.parameters:
                self._optimizer.state[self.parameters[name]] = copy.deepcopy(dict(state))
        for saved_group in saved["groups"]:
            here = {self.parameters[name] for name in saved_group["blocks"] if name in self.parameters}
            for group in self.groups:
                if here.intersection(group["params"]):
                    group.update(copy.deepcopy(saved_group["options"]))


class ServerState(_BlockState):
    """The live state of a shard; implements :class:`ckpt_async.consistent_cut.ShardState`.

    A copy is made lazily: each block is copied before it changes, or by :meth:`copy_a_block`, which the server calls
    every few milliseconds. The next copy reuses the memory of a released one. All calls are made under one lock.

    Args:
        blocks: Name and value of each block; copied.
        make_optimizer: Makes the optimizer, as ``lambda parameters: torch.optim.Adam(parameters, lr=1e-3)``. It is
            given names and parameters, and may put them into groups. The step of the optimizer must not need a closure.
    """

    def __init__(self, blocks: Mapping[str, torch.Tensor], make_optimizer: MakeOptimizer) -> None:
        super().__init__(blocks, make_optimizer)
        self._make_optimizer = make_optimizer
        self._idle: list[ShadowState] = []
        self._shadow: ShadowState | None = None

    def apply(self, update: UpdateId, payload: Mapping[str, torch.Tensor]) -> None:
        """Apply the gradients of some blocks."""
        self.check_gradients(payload)
        if self._shadow is not None:
            self._shadow.save_blocks(payload)
        self.step(payload)

    def check_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Raise ``StateMismatchError`` for gradients of blocks that are not here, or of another shape or type."""
        for name, gradient in gradients.items():
            parameter = self.parameters.get(name)
            if parameter is None or parameter.shape != gradient.shape or parameter.dtype != gradient.dtype:
                raise StateMismatchError(
                    f"a gradient of {name!r} of shape {tuple(gradient.shape)} does not fit what this shard holds",
                    key=name,
                    remedy="give servers and workers the same model and the same max_block_bytes",
                )

    def apply_recorded(self, recorded: Sequence[Any]) -> None:
        """Apply, after loading, the pieces that :func:`pack_recorded` returned; blocks of other shards are left out."""
        for update, gradients in recorded:
            here = {name: _unpack(gradient) for name, gradient in gradients.items() if name in self.parameters}
            if here:
                self.apply(UpdateId(*update), here)

    def copy(self) -> ShadowState:
        """Begin a copy of the current state, and return it."""
        shadow = self._idle.pop() if self._idle else ShadowState(self, self._make_optimizer)
        shadow.begin()
        self._shadow = shadow
        return shadow

    def copy_a_block(self) -> bool:
        """Copy one more block for the unfinished copy, if there is one; return False when none is left."""
        return self._shadow is not None and self._shadow.save_next_block()

    def release(self, shadow: ShadowState) -> None:
        """Take back a copy that is not needed any more, so that the next one reuses its memory."""
        if self._shadow is shadow:
            self._shadow = None
        self._idle.append(shadow)


class ShadowState(_BlockState):
    """A copy of a :class:`ServerState` at one moment, to which updates that were under way can be applied."""

    def __init__(self, live: ServerState, make_optimizer: MakeOptimizer) -> None:
        super().__init__(live.parameters, make_optimizer)
        self._live = live
        self._missing: dict[str, None] = {}

    def begin(self) -> None:
        """Start over: make this a copy of the current live state, of which no block is copied yet."""
        self._missing = dict.fromkeys(self.parameters)
        for group, live in zip(self.groups, self._live.groups, strict=True):
            group.update({key: copy.deepcopy(value) for key, value in live.items() if key != "params"})

    def apply(self, update: UpdateId, payload: Mapping[str, torch.Tensor]) -> None:
        """Apply the gradients of some blocks to the copy."""
        self.save_blocks(payload)
        self.step(payload)

    def save_blocks(self, names: Iterable[str]) -> None:
        """Copy these blocks, which are about to change, unless they were copied already."""
        for name in names:
            if name in self._missing:
                self._save(name)

    def save_next_block(self) -> bool:
        """Copy one more block; return False if all were copied."""
        if not self._missing:
            return False
        self._save(next(iter(self._missing)))
        return True

    @torch.no_grad()
    def _save(self, name: str) -> None:
        del self._missing[name]
        self.parameters[name].copy_(self._live.parameters[name])
        kept = self.optimizer_state(name)
        now = self._live.optimizer_state(name)
        for key in kept.keys() - now.keys():
            del kept[key]
        for key, value in now.items():
            kept[key] = _copy_of(value, kept.get(key))


def _copy_of(value: Any, memory: Any) -> Any:
    """Return an independent copy of ``value``, in the tensor ``memory`` if that has the same shape and type."""
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    if isinstance(memory, torch.Tensor) and memory.shape == value.shape and memory.dtype == value.dtype:
        return memory.copy_(value)
    return value.detach().clone()


def pack_recorded(recorded: Sequence[tuple[PushHeader, Mapping[str, torch.Tensor]]]) -> list[Any]:
    """Return recorded pieces of updates as plain data and dense tensors."""
    return [
        [list(header.update), {name: _pack(gradient) for name, gradient in gradients.items()}]
        for header, gradients in recorded
    ]


def _pack(gradient: torch.Tensor) -> Any:
    if not gradient.is_sparse:
        return gradient
    whole = gradient.coalesce()
    return {"indices": whole.indices(), "values": whole.values(), "shape": list(whole.shape)}


def _unpack(gradient: Any) -> torch.Tensor:
    if isinstance(gradient, torch.Tensor):
        return gradient
    return torch.sparse_coo_tensor(
        gradient["indices"], gradient["values"], gradient["shape"], is_coalesced=True, check_invariants=True
    )
