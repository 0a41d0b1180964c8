"""Record the state of each step in a process of a rehearsal: one short text for each key.

Numbers are recorded as they are, so that users can read what differs; everything else as a digest. Unlike the flight
recorder, a rehearsal may wait for the device and read the whole state.
"""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import sys
import types
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ckpt_core.digest import digest, digest_of_parts
from ckpt_core.rehearsal.plan import Plan
from ckpt_core.rehearsal.samples import Drawn
from ckpt_core.state.changed_values import PlainState, fingerprint
from ckpt_core.state.code_origin import is_users_file, place_of
from ckpt_core.state.object_walk import is_plain
from ckpt_core.state.rng import RngState, capture_generator, find_generators
from ckpt_core.tree import leaves

_SHOWN = 48  # characters
_SMALL = 2**16
_SAMPLED = ("attributes", "data sets", "variables")
_OF_INTEREST = ("exact", "resume", "no state")

State = Mapping[str, Mapping[str, Any]]


class Notes:
    """The notes of one rank in a process of a rehearsal, which :meth:`write` saves for the comparison."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self._path = os.path.join(plan.directory, f"rank-{rank}.json")
        self._steps: dict[str, dict[str, dict[str, str]]] = {}
        self._where: dict[str, list[str]] = {}
        self._saved: list[dict[str, Any]] = []
        self._missed: list[str] = []
        self._said: list[str] = []
        self._resumed = False
        self._drawn = Drawn()
        self._handed: dict[int, list[tuple[int, list[str]]]] = {}
        self._last = self._trained = 0  # ids of loaders
        self._drops = False
        self._listen()

    def _listen(self) -> None:
        show = warnings.showwarning

        def listen(message: Any, *args: Any, **kwargs: Any) -> None:
            if any(word in str(message) for word in _OF_INTEREST) and str(message) not in self._said:
                self._said.append(str(message))
            show(message, *args, **kwargs)

        warnings.showwarning = listen

    def take(self, number: int, state: State) -> None:
        """Note a step. ``state`` has everything that is compared between two runs: by subject, values by key.

        ``number`` counts the steps of the training, including those before a resume.
        """
        self._steps[str(number)] = {
            subject: {key: described(value, whole=subject not in _SAMPLED) for key, value in values.items()}
            for subject, values in state.items()
        }

    def define(self, subject: str, places: list[str]) -> None:
        """Note the ``places`` of the user's code (class or function, file, line) that a subject depends on."""
        self._where[subject] = list(dict.fromkeys([*self._where.get(subject, []), *places]))

    @property
    def handed(self) -> int:
        """How many batches the training loader has handed out."""
        return len(self._handed.get(self._trained, ()))

    def hand_out(self, epoch: int, loader: Any, batch: Mapping[str, Any], count: int = 1) -> None:
        """Note the samples of a batch of an epoch, which the loader has made from ``count`` batches of indices."""
        self._last = id(loader)
        self._handed.setdefault(id(loader), []).append((epoch, self._drawn.of_batch(loader, batch, described, count)))
        self._drops |= any(getattr(one, "drop_last", False) for one in (loader, getattr(loader, "sampler", None)))

    def trains(self) -> None:
        """Note that the script trains on the last batch; the loader of the first such batch is the training loader."""
        self._trained = self._trained or self._last

    def saved(
        self, point: str, path: str, number: int, place: str, already: Sequence[str] = (), handed: int | None = None
    ) -> None:
        """Note a checkpoint: why it was saved, its path, and the number and description (``place``) of the step before.

        ``already`` has ``subject:key`` of values that the next step has from before the save and a resumed run lacks.
        """
        handed = self.handed if handed is None else handed
        saved = {"point": point, "path": path, "number": number, "place": place, "already": [*already]}
        self._saved.append({**saved, "handed": handed})

    def missed(self, points: list[str]) -> None:
        """Note the points at which nothing was saved because they did not occur."""
        self._missed = points

    def resumed(self) -> None:
        """Note that the script has resumed from the checkpoint in the plan."""
        self._resumed = True

    def write(self) -> None:
        """Write the file atomically."""
        found = {
            "steps": self._steps,
            "where": self._where,
            "saved": self._saved,
            "missed": self._missed,
            "said": self._said,
            "resumed": self._resumed,
            "handed": self._handed.get(self._trained, []),
            "drops": self._drops,
        }
        with open(f"{self._path}.part", "w", encoding="utf-8") as file:
            json.dump(found, file)
        os.replace(f"{self._path}.part", self._path)

    def leave(self) -> None:
        """Write the file and end the process, so that the script does not run any code after its training."""
        self.write()
        for child in multiprocessing.active_children():
            child.terminate()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(0)


def described(value: Any, *, whole: bool = True) -> str:
    """Return a short text that is the same in every process for the same bits.

    Objects of unknown classes are described by their class. Unless ``whole``, large tensors are sampled.

    Example:
        >>> described(0.5), described("a" * 100) == described("a" * 100)
        ('0.5', True)
    """
    if isinstance(value, torch.Tensor) and (whole or value.numel() <= _SMALL):
        return _of_tensor(value.detach())
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, np.generic)):
        text = repr(value)
        return text if len(text) <= _SHOWN else f"{type(value).__name__} #{digest(text.encode())}"
    if isinstance(value, np.ndarray) or is_plain(value):
        return f"{type(value).__name__} #{fingerprint(value)}"
    parts = [f"{name}={described(leaf, whole=whole)};".encode() for name, leaf in leaves(value) if leaf is not value]
    return f"{type(value).__name__} #{digest_of_parts(parts)}"


def _of_tensor(tensor: torch.Tensor) -> str:
    tensor = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
    kind = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    if tensor.is_meta or tensor.layout is not torch.strided or tensor.is_quantized:
        return kind
    tensor = tensor.resolve_conj().resolve_neg().cpu().contiguous()
    if tensor.dim() == 0 and not tensor.is_complex():
        return f"{tensor.item()!r} ({str(tensor.dtype).removeprefix('torch.')})"
    data = tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else np.empty(0, np.uint8)
    return f"{kind} #{digest(data.data)}"


def generators_of(owners: Iterable[Any] = ()) -> dict[str, Any]:
    """Return the states of the global generators of this process, and of generators in ``owners``, by name."""
    state = RngState.capture()
    found: dict[str, Any] = {"random": str(state.python), "torch": state.torch_cpu}
    found["numpy.random"] = str([np.asarray(part).tolist() for part in state.numpy[1:]])
    for kind, (states, _) in state.devices.items():
        found.update({f"{kind}:{number}": one for number, one in enumerate(states)})
    for label, owner in labelled(owners):
        for path, generator in find_generators(owner):
            is_torch = isinstance(generator, torch.Generator)
            found[f"{label}.{path}"] = generator.get_state() if is_torch else str(capture_generator(generator))
    return found


def optimizers_of(optimizers: Iterable[Any], names: Mapping[int, str]) -> dict[str, Any]:
    """Return the groups and the state of optimizers by parameter name; ``names`` has the name for a parameter's id."""
    found: dict[str, Any] = {}
    for number, optimizer in enumerate(optimizers):
        for index, group in enumerate(optimizer.param_groups):
            found.update({f"{number}.group {index}.{key}": value for key, value in group.items() if key != "params"})
            for position, parameter in enumerate(group["params"]):
                name = names.get(id(parameter), f"{index}.{position}")
                state = leaves(optimizer.state.get(parameter, {}))
                found.update({f"{number}.{name}.{key}": value for key, value in state})
    return found


def states_of(named: Iterable[tuple[Any, Any]]) -> dict[str, Any]:
    """Return all values in the ``state_dict`` of some objects, by the objects' names."""
    return {f"{name}.{key}": value for name, each in named for key, value in leaves(each.state_dict())}


def plain_of(owners: Iterable[Any]) -> dict[str, Any]:
    """Return the plain attributes of some objects, by the objects' classes."""
    return {f"{n}.{k}": value for n, owner in labelled(owners) for k, value in PlainState(owner).values().items()}


# ---- the user's code -------------------------------------------------------------------------------------------------


def defined_at(thing: Any) -> str | None:
    """Return the name of an object's class, or of a function, with file and line; None if it is not the user's."""
    while isinstance(thing, functools.partial):
        thing = thing.func
    thing = thing.__func__ if isinstance(thing, types.MethodType) else thing  # not its object, which place_of caches
    code = thing if isinstance(thing, (type, types.FunctionType)) else type(thing)
    file, line = place_of(code) or ("", 0)
    if not is_users_file(file):
        return None
    with contextlib.suppress(ValueError):
        file = min(str(file), os.path.relpath(str(file)), key=len)
    return f"{code.__qualname__} ({file}:{line})"


def labelled(things: Iterable[Any]) -> list[tuple[str, Any]]:
    """Return objects with the name of their class or function; from the second object of a name on with a number."""
    found: dict[str, Any] = {}
    for thing in things:
        name = getattr(thing, "__name__", None) or type(thing).__name__
        same = sum(label.partition("#")[0] == name for label in found)
        found[f"{name}#{same + 1}" if same else name] = thing
    return list(found.items())


def classes_of(*things: Any, depth: int = 3) -> list[str]:
    """Return :func:`defined_at` for objects and for those in their attributes and lists."""
    found: list[str] = []
    seen: set[int] = set()

    def walk(thing: Any, depth: int) -> None:
        if depth < 0 or id(thing) in seen or isinstance(thing, (torch.Tensor, np.ndarray, type, types.ModuleType, str)):
            return
        seen.add(id(thing))
        place = defined_at(thing)
        if place is not None:
            found.append(place)
        items: Any = thing if isinstance(thing, (list, tuple)) else getattr(thing, "__dict__", {}).values()
        for item in list(items)[:64]:
            walk(item, depth - (not isinstance(thing, (list, tuple))))

    for thing in things:
        walk(thing, depth)
    return list(dict.fromkeys(found))


def script_variables() -> dict[str, Any]:
    """Return the plain variables of the script: globals of its modules and local variables of its running functions.

    They may explain a difference, but are none themselves, because a script that resumes has different arguments.
    """
    found: dict[str, Any] = {}
    for scope, values in _scopes():
        for name, value in values.items():
            if not name.startswith("__") and is_plain(value):
                found[f"{scope}:{name}"] = value
    return found


def _scopes() -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name != "__mp_main__" and is_users_file(file):
            yield os.path.basename(str(file)) if name == "__main__" else name, dict(vars(module))
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if is_users_file(code.co_filename) and code.co_name != "<module>":
            yield f"{os.path.basename(code.co_filename)}:{code.co_name}()", dict(frame.f_locals)
        frame = frame.f_back  # type: ignore[assignment]
