"""Variables of the script that training changes and no checkpoint holds: a resume that begins without them is told.

A best value, a patience, an average of the weights, an optimizer that was not prepared: what the script keeps to itself
is often used long after a resume, when nothing compares steps any more. A look at the variables when the first batch is
handed out shows what a run begins with; what a save finds changed goes into the checkpoint as digests. A resumed run
that has at its first batch what a new run has there, has lost it. One that has restored it in its own way has another
value.

Of a function's own variables only those count that are *live* where ``save_state`` is called: that may be read later
before they are written again (Plank, Beck, Kingsley, "Compiler-assisted memory exclusion for fast checkpointing",
1995). Whether what an object or a dictionary holds is made anew by each step, nobody knows: it counts only where it is
that of a new run after one more step, too. A whole number that the first step changes counts steps, and is left out.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import itertools
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import UninitializedParameter
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler

from ckpt_core.state.plain import fingerprint
from ckpt_core.state.reach import is_generator, is_library, is_plain, reach
from ckpt_core.state.rng import capture_generator

_LIBRARIES = ("site-packages", "dist-packages", os.path.dirname(os.__file__), "<")
_OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_PACKAGES = tuple(os.path.join(_OURS, name) + os.sep for name in ("ckpt_core", "lightning_ckpt", "accelerate_ckpt"))
_FOLLOWED = (DataLoader, Dataset, Sampler, torch.nn.Module)  # what they change is captured, or named at the save
_RECORDS = (bool, int, str, bytes, type(None))  # most often, they only tell what has happened
_VARIABLES, _VALUES, _OF_WEIGHTS, _NAMED = 256, 64, 64, 5

# What is known of a value: that it stays until it is changed, that it is a copy of the weights, or nothing.
_STAYS, _WEIGHTS, _UNKNOWN = "stays", "weights", "unknown"


class _Held(NamedTuple):
    """What is somewhere: its digest, what is known of it, the variable, if it is one itself, and how it is used."""

    digest: str
    kind: str
    frame: types.FrameType | None = None
    is_record: bool = False
    is_count: bool = False


class Variables:
    """Watches the variables of the functions of a script that are running.

    Args:
        held: Returns the models of the script, and what else a checkpoint holds; None where nothing is looked at.
        say: Called once in a resumed run that has lost variables, with their names.
    """

    def __init__(
        self, held: Callable[[], tuple[Sequence[torch.nn.Module], Sequence[object]] | None], say: Callable[[str], None]
    ) -> None:
        self._held, self._say = held, say
        self._looks: list[dict[str, str]] = []
        self._mine: dict[str, str] = {}
        self._saved: Mapping[str, Any] = {}
        self._at_load: dict[str, str] = {}
        self._trained = self._has_said = False

    def handed_out(self) -> None:
        """Note that the script is given a batch: that of the first, and of the first after a backward pass, counts."""
        if len(self._looks) == self._trained < 2:
            self._look()

    def backward(self) -> None:
        """Note a backward pass."""
        self._trained = True
        if not self._looks:  # it has loaders of its own
            self._look()

    def capture(self) -> dict[str, Any]:
        """Return what has changed since training began: its digests, at the two looks of a new run and now."""
        if not self._looks:
            return {}
        noted = {}
        for key, now in self._found().items():
            first, second = (look.get(key) for look in (self._looks * 2)[:2])
            if first is None or first == now.digest:
                continue
            if now.is_count and (first != second or len(self._looks) == 1):
                continue  # of steps: a script starts it anew on purpose, or its first steps show that it is lost
            if _may_be_read(key, now) and (now.kind != _UNKNOWN or len(self._looks) == 2):
                noted[key] = [now.digest, first, second, now.kind]
        return noted

    def resume(self, saved: Mapping[str, Any]) -> None:
        """Compare what training begins with now with what a checkpoint says."""
        self._saved, self._looks, self._trained, self._has_said = saved, [], False, False
        self._at_load = {key: one.digest for key, one in self._found().items()} if saved else {}

    def _look(self) -> None:
        number = len(self._looks)
        found = self._found()
        now = {key: one.digest for key, one in found.items()}
        if number == 0:
            self._mine = now
        lost = [
            key
            for key, noted in self._saved.items()
            if self._is_lost(noted, now.get(key), key, number) and _may_be_read(key, found[key])
        ]
        # what a new run began with stays known in the runs that are resumed from it
        self._looks.append(now | {key: noted[1 + number] for key, noted in self._saved.items()})
        if lost and not self._has_said:
            self._has_said = True
            self._say(", ".join(lost[:_NAMED]) + (f" and {len(lost) - _NAMED} more" if len(lost) > _NAMED else ""))

    def _is_lost(self, noted: Sequence[str], now: str | None, key: str, number: int) -> bool:
        digest, first, second, kind = noted
        if now is None or now == digest:
            return False
        if kind == _UNKNOWN:
            return number == 1 and self._mine.get(key) == first and now == second
        untouched = kind == _WEIGHTS and now == self._at_load.get(key)
        return number == 0 and (now == first or untouched)

    # ---- what there is -----------------------------------------------------------------------------------------------

    def _found(self) -> dict[str, _Held]:
        if (known := self._held()) is None:
            return {}
        models, held = known
        shapes = {
            parameter.shape
            for model in models
            for parameter in model.parameters()
            if not isinstance(parameter, UninitializedParameter)
        }
        found: dict[str, _Held] = {}
        seen = {id(one) for one in held} | {id(module) for model in models for module in model.modules()}
        skip = (*models, *held)
        for frame in reversed(list(_frames())):  # what is in several is looked at where it is for the longest time
            code = frame.f_code
            place = os.path.basename(code.co_filename)
            place = place if code.co_name == "<module>" else f"{code.co_name}() in {place}"
            for name, value in _variables_of(frame):
                with contextlib.suppress(Exception):  # of the user's classes, whatever they raise when looked at
                    if name.startswith("__") or (id(value) in seen and not is_plain(value)):
                        continue
                    for path, one in itertools.islice(_described(name, value, shapes, skip, seen), _VALUES):
                        found[f"`{path}` of {place}"] = one._replace(frame=frame if path == name else None)
        return found


def _may_be_read(key: str, held: _Held) -> bool:
    return is_live(key.split("`")[1], held.frame) if held.frame is not None else not held.is_record


def _described(
    name: str, value: Any, shapes: set[torch.Size], skip: tuple[object, ...], seen: set[int]
) -> Iterator[tuple[str, _Held]]:
    if isinstance(value, (type, types.ModuleType, *_FOLLOWED[:-1])):
        return
    if is_generator(value):
        yield name, _Held(fingerprint(repr(capture_generator(value))), _STAYS)
    elif is_plain(value):
        weights = _weights_in(value, shapes)
        kind = _WEIGHTS if weights else _UNKNOWN if isinstance(value, dict) else _STAYS
        yield name, _Held(fingerprint(weights or value), kind, is_count=type(value) is int)
    else:
        for part, child in _torch_in(name, value, seen):
            if not isinstance(child, torch.nn.Module):
                yield part, _Held(fingerprint(child.state_dict()), _STAYS)
            elif weights := _weights_in(list(child.parameters()), shapes):
                yield part, _Held(fingerprint(weights), _WEIGHTS)
        for found in reach(value, skip=skip, leave=_FOLLOWED):
            path, held = f"{name}.{found.path}", found.value
            if is_generator(held):
                yield path, _Held(fingerprint(repr(capture_generator(held))), _STAYS)
            else:
                weights = _weights_in(held, shapes)
                kind = _WEIGHTS if weights else _UNKNOWN
                yield path, _Held(fingerprint(weights or held), kind, is_record=isinstance(held, _RECORDS))


def _torch_in(name: str, value: Any, seen: set[int], depth: int = 3) -> Iterator[tuple[str, Any]]:
    """Find optimizers, schedules and modules in containers and objects of the script's own classes."""
    if id(value) in seen or depth < 0:
        return
    seen.add(id(value))
    if isinstance(value, (torch.optim.Optimizer, LRScheduler, torch.nn.Module)):
        yield name, value
    elif isinstance(value, dict) and len(value) <= _VALUES:
        for key, child in value.items():
            yield from _torch_in(f"{name}.{key}", child, seen, depth - 1)
    elif isinstance(value, (list, tuple)) and len(value) <= _VALUES:
        for number, child in enumerate(value):
            yield from _torch_in(f"{name}.{number}", child, seen, depth - 1)
    elif not isinstance(value, (types.ModuleType, type)) and not is_library(type(value)):
        yield from _torch_in(name, getattr(value, "__dict__", None), seen, depth)


def _weights_in(value: Any, shapes: set[torch.Size]) -> list[torch.Tensor]:
    """Return some numbers of each tensor, if a value is a copy or an average of the weights of a model."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    if len(items) < len(shapes) or not isinstance(next(iter(items), None), torch.Tensor):
        return []
    found = [item.detach() for item in items if isinstance(item, torch.Tensor)]
    if not shapes or not shapes <= {tensor.shape for tensor in found}:
        return []
    some = found[:: max(1, len(found) // _OF_WEIGHTS)]  # all of them change
    return [t.flatten()[:: max(1, t.numel() // _OF_WEIGHTS)] if t.is_contiguous() else t for t in some]


def _variables_of(frame: types.FrameType) -> list[tuple[str, Any]]:
    # Until Python 3.12, a function has one dictionary for locals() and for those who look at it.
    is_shared = sys.version_info < (3, 13) and bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)
    if is_shared and "locals" in frame.f_code.co_names:
        return []  # what the script got would change
    variables = frame.f_locals
    found = list(variables.items())[:_VARIABLES]
    if is_shared:
        variables.clear()  # or it would keep what the script deletes
    return found


def _frames() -> Iterator[types.FrameType]:
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if _is_users(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


@functools.cache
def _is_users(file: str) -> bool:
    return not any(part in file for part in _LIBRARIES) and not os.path.abspath(file).startswith(_PACKAGES)


# ---- liveness --------------------------------------------------------------------------------------------------------


def is_live(name: str, frame: types.FrameType) -> bool:
    """Return whether a variable may be read after the instruction that is under way, before it is written again.

    Args:
        name: Of the variable.
        frame: Of a function, or of a module. Where it waits for the next item of a loop, there is one.
    """
    code = frame.f_code
    if name in code.co_cellvars or name in code.co_freevars:
        return True  # other functions may read it
    if code.co_name == "<module>" and any(name in inner.co_names for inner in _inner(code)):
        return True
    steps = _steps(code)
    # it may point behind the instruction, into its cache
    here = steps[max(offset for offset in steps if offset <= frame.f_lasti)]
    ahead = here.then[-1:] if here.is_loop else list(here.then)
    seen: set[int] = set()
    while ahead:
        offset = ahead.pop()
        if offset not in seen:
            seen.add(offset)
            effect = next((is_read for variable, is_read in steps[offset].effects if variable == name), None)
            if effect:
                return True
            if effect is None:
                ahead += steps[offset].then
    return False


class _Step(NamedTuple):
    """What an instruction reads (True) and writes, and the offsets of those that may follow."""

    effects: list[tuple[str, bool]]
    then: list[int]
    is_loop: bool


@functools.lru_cache(maxsize=64)
def _steps(code: types.CodeType) -> dict[int, _Step]:
    found: dict[int, _Step] = {}
    instructions = list(dis.get_instructions(code))
    jumps = {*dis.hasjrel, *dis.hasjabs}
    for step, after in zip(instructions, [*instructions[1:], None], strict=True):
        then = [step.argval] if step.opcode in jumps else []
        leaves = step.opname.startswith(("RETURN", "RAISE", "RERAISE"))
        if after is not None and not leaves and not (step.opname.startswith("JUMP") and "IF" not in step.opname):
            then.append(after.offset)
        effects: list[tuple[str, bool]] = []
        parts = step.opname.split("_")
        # what LOAD_FAST_AND_CLEAR reads is put back after a comprehension
        if {"FAST", "NAME"} & set(parts) and parts[0] in ("LOAD", "STORE", "DELETE") and "CLEAR" not in parts:
            does = [part == "LOAD" for part in parts if part in ("LOAD", "STORE", "DELETE")]
            names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
            effects = list(zip(names, does, strict=False))
        found[step.offset] = _Step(effects, then, step.opname == "FOR_ITER")
    return found


def _inner(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _inner(constant)
