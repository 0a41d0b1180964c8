"""Find user variables that training changed, that no checkpoint holds, and that a resumed run has therefore lost.

Examples are a best value, a patience counter, a meter, an average of the weights, an optimizer that was not prepared,
and the position in a loader. The script often uses such a variable long after the resume, when the flight recorder no
longer compares steps. So the variables are inspected when the first batch is handed out (their initial values), and
each save records in the checkpoint those that have changed. If a variable of a resumed run, when it trains on its first
batch, has its initial value again, it is lost. If the script has restored it itself, it has a different value.

Not every lost variable is missed. A local variable counts only if it is *live*: it may be read before it is next
written (Plank, Beck, Kingsley, "Compiler-assisted memory exclusion for fast checkpointing", 1995). Globals and the
contents of objects and dictionaries count if the source shows that they carry something from one step to the next, and
that an epoch does not reset them. A value that the source only prints or logs does not count. The source is read only
by a resumed run that has lost something.
"""

from __future__ import annotations

import collections
import contextlib
import dis
import functools
import gc
import inspect
import logging
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch

from ckpt_core.process.threads import no_collections
from ckpt_core.state.code_origin import is_library, is_librarys_module, is_users_class, is_users_file
from ckpt_core.state.object_walk import OF_EVERY_MODULE, STORE_ATTR, set_by_libraries, stored_by
from ckpt_core.state.value_marks import (
    CACHE,
    CODE,
    MOST_VALUES,
    NO_STATE,
    NUMBERS,
    OF_CODE,
    PLACE,
    STAYS,
    VALUE,
    WEIGHTS,
    Known,
    Look,
    children_of,
    defaults_of,
    is_other,
    mark_of,
    may_change,
    own_attributes,
    some,
    tensors_in,
    variables_of,
)
from ckpt_core.state.variable_use import (
    CELL,
    CONTAINERS,
    Source,
    counts_of_loops,
    is_hook,
    is_live,
    is_surely_live,
)

logger = logging.getLogger(__name__)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_STORE_GLOBAL = dis.opmap["STORE_GLOBAL"]
_NAMED, _MODULES, _SOURCE = 5, 64, 1 << 20
_MOST_GLOBAL = 256  # values in globals and classes: inspecting more would take longer than a save


class Watched(NamedTuple):
    """The objects of a run in which user variables are searched for, and those that are left out."""

    models: Sequence[torch.nn.Module]
    held: Sequence[object]  # other objects that the checkpoint holds or another check covers; not inspected
    # Objects of the script whose attributes are inspected like those of modules, except attributes that libraries set
    owners: Sequence[object] = ()
    # Objects that make the data: a checkpoint holds their values and generators, not their functions' closures, caches
    data: Sequence[object] = ()
    waits: bool = False  # whether the script's running functions wait for the training to end
    # Iterators to which perhaps no variable refers, as that of a ``for``: iterator, name, and its pass and item
    iterators: Sequence[tuple[Any, str, Any]] = ()


class _Held(NamedTuple):
    """A user variable: its mark, kind, path, the frame that has it, its value, and the class that it belongs to."""

    mark: str
    kind: str
    path: str
    frame: types.FrameType | None
    value: Any
    owner: type | None
    is_elsewhere: bool = False  # in the frame of another thread, which may be executing anything

    @property
    def code(self) -> types.CodeType | None:
        return self.frame.f_code if self.frame is not None else None

    @property
    def is_live(self) -> bool:
        return self.frame is None or self.is_elsewhere or is_live(self.path.partition(".")[0], self.frame)

    @property
    def is_made_by_training(self) -> bool:
        """Whether a value that did not exist when training began is an average, an optimizer or a schedule."""
        return self.kind == WEIGHTS or (self.kind == STAYS and isinstance(self.value, list))

    def outlives_epoch(self, *, in_body: bool) -> bool:
        """Return whether the next epoch certainly reads it; ``in_body`` if the last batch's loop body is running."""
        if self.frame is None or self.is_elsewhere:
            return False
        return is_surely_live(self.path, self.frame, ends=in_body)


Kinds = type | tuple[type, ...]
_Method = TypeVar("_Method", bound=Callable[..., Any])


def _harmless(look: _Method) -> _Method:
    """Make a method of :class:`Variables` return nothing, and stop all later inspection, if it raises.

    These methods run in every training and inspect arbitrary objects of the user's program. They must never end it.
    """

    @functools.wraps(look)
    def look_or_stop(self: Variables, *arguments: Any, **options: Any) -> Any:
        try:
            return look(self, *arguments, **options)
        except Exception:
            logger.debug("the variables of the script are not looked at any more", exc_info=True)
            self._watched = lambda: None
            self._lost = []
            return {}

    return cast(_Method, look_or_stop)


class _UserModule(NamedTuple):
    """A module of the user's program, its globals that functions set, and its functions that hold values themselves."""

    module: types.ModuleType
    names: set[str]
    functions: list[types.FunctionType]


class Variables:
    """Tracks user variables in running functions, objects, globals and classes, and reports those a resume has lost.

    Args:
        watched: Returns the objects to inspect; None if nothing is to be inspected.
        say: Called in a resumed run with the names of lost variables; again if caches or recreated values differ later.
        tell: Called once, with the names of lost variables that the script only logs.
    """

    def __init__(
        self,
        watched: Callable[[], Watched | None],
        say: Callable[[Sequence[str]], None],
        tell: Callable[[Sequence[str]], None],
    ) -> None:
        self._watched, self._say, self._tell = watched, say, tell
        self._first: dict[str, str] = {}
        self._ids: dict[str, int] = {}
        self._of_pass: dict[str, str] = {}
        self._passes = 0
        self._anew: set[str] = set()
        self._saved: Mapping[str, Any] = {}
        self._at_load: dict[str, str] = {}
        self._lost: list[str] | None = None
        self._only_logged: list[str] = []
        self._made_once: dict[str, str] = {}  # saved marks of lost variables that the script may recreate, by name
        self._loose: dict[str, Any] = {}  # positions of iterators that no variable refers to, by name
        self._loose_first: dict[str, Any] = {}  # their positions when a new run trained on its first batch
        self._trained = False
        self._known: Known | None = None

    @property
    def compared_later(self) -> Collection[str]:
        """The names of lost variables that the script may recreate unchanged: they are compared once it has."""
        return self._made_once

    def handed_out(self, *, begins: bool) -> None:
        """Note that a batch is handed to the script; ``begins`` if it is the first of an epoch."""
        if not self._trained and (self._lost or not self._first or self._lost is None):
            self._look()
        elif self._trained and begins:
            found = self._found()
            self._compare_caches(found)
            self._of_pass = {key: one.mark for key, one in found.items()}
            self._passes += 1
            self._anew |= {key for key, mark in self._of_pass.items() if self._first.get(key) == mark}

    def trains(self) -> None:
        """Note a backward pass or an optimizer step; at the first one, report what a resumed run has lost."""
        if self._trained:
            return
        if not self._first:  # the script uses loaders of its own, so no batch was noted
            self._look()
        self._trained = True
        self._look_at_iterators()
        if self._lost:
            self._say(self._lost)
        if self._only_logged:
            self._tell(self._only_logged)

    @_harmless
    def _look_at_iterators(self) -> None:
        watched, saved = self._watched(), self._saved.get("iterators", {})
        now = {name: place for _, name, place in watched.iterators} if watched is not None else {}
        self._loose_first = now | {name: first for name, (_, first) in saved.items()}
        self._lost = [*(self._lost or ()), *(n for n, (then, first) in saved.items() if now.get(n) == first != then)]

    @_harmless
    def ends(self) -> None:
        """Note that the training is over: compare the caches and recreated values a last time."""
        if self._trained and (self._caches or self._made_once):
            self._compare_caches(self._found())

    @property
    def _caches(self) -> dict[str, str]:
        return {key: noted[0] for key, noted in self._saved.get("values", {}).items() if noted[2] == CACHE}

    def _compare_caches(self, found: Mapping[str, _Held]) -> None:
        """Report caches that now hold a different result for the same arguments than the checkpoint's run had.

        Also report lost variables that the script has recreated with a different value.
        """
        anew = {
            key: found[key].mark
            for key, mark in self._made_once.items()
            if self._trained and key in found and found[key].value is not None
        }
        others = [key for key, mark in anew.items() if mark != self._made_once[key]]
        # a list of the model's own parameters differs because they have been trained
        if others := [key for key in others if not self._are_parameters(found[key].value)]:
            self._say(others)
        self._made_once = {key: mark for key, mark in self._made_once.items() if key not in anew}
        caches = self._caches if self._trained else {}
        lost = {key: found[key] for key in caches if key in found and is_other(caches[key], found[key].mark)}
        source = _source_of([*lost.values()], self._watched()) if lost else None
        names = [key for key, held in lost.items() if source is not None and _is_filled_once(held, source)]
        if names:
            self._say(names)
            self._saved = {**self._saved, "values": {k: v for k, v in self._saved["values"].items() if k not in names}}

    def _are_parameters(self, value: Any) -> bool:
        known = set() if self._known is None else self._known.parameters
        return bool(found := tensors_in(value)) and all(id(one) in known for one in found)

    @_harmless
    def capture(self, *, between: bool = False, in_body: bool = False, ends: bool = False) -> dict[str, Any]:
        """Return the variables that have changed since training began and may still be read, for the checkpoint.

        Args:
            between: Whether the run continues with another epoch.
            in_body: Whether, in that case, the script is still in the loop body of the last batch.
            ends: Whether the run continues with the end of this epoch, so that no step sets a variable again first.
        """
        if not self._first:
            return {}
        noted: dict[str, list[Any]] = {}
        found = self._found(anew=False)
        self._compare_caches(found)
        for key, now in found.items():
            first = self._first.get(key)
            if now.kind == CODE and not (first or "").startswith(OF_CODE):
                continue  # there was no function or class at first: it was created when it was needed
            if first is not None and first != now.mark and now.is_live:
                touched = self._of_pass.get(key) != now.mark
                in_place = isinstance(now.value, CONTAINERS) and self._ids.get(key) == id(now.value)
                if now.kind == PLACE:
                    in_place = between and now.outlives_epoch(in_body=in_body)
                noted[key] = [now.mark, first, now.kind, touched, in_place]
            elif first is None and now.is_live and (owner := self._began_without(key, found)):
                noted.setdefault(owner, ["", self._first[owner], VALUE, True, True, []])
                noted[owner][5].append(key[len(owner.partition("` of ")[0]) + 1 : key.index("` of ")])
            elif first is None and now.owner is not None and now.is_made_by_training:
                noted[key] = [now.mark, "", now.kind, True, False]
        anew = [key for key in noted if key in self._anew]
        # each epoch may reseed a generator, each time differently
        stays = [] if between or ends else [key for key, one in noted.items() if one[2] == STAYS and one[3]]
        begun = {key: mark for key in stays if (mark := self._of_pass.get(key)) not in (None, noted[key][1])}
        counts = {"passes": self._passes, "anew": anew} if noted else {}  # of this process, and only for these values
        # iterators of an epoch end with it
        places = {} if between else self._loose
        loose = {name: [place, self._loose_first.get(name, [1, 1])] for name, place in places.items()}
        more = {"iterators": loose, "begun": begun}
        return {"values": noted, "between": between, "ends": ends, **{k: v for k, v in more.items() if v}, **counts}

    def _began_without(self, key: str, found: Mapping[str, _Held]) -> str | None:
        """Return the variable that has got this one as a part, and was None, empty or of another kind at first."""
        path, _, place = key.partition("` of ")
        while "." in path:
            path = path.rpartition(".")[0]
            owner = f"{path}` of {place}"
            if owner in self._first:
                return owner if owner not in found else None
        return None

    @_harmless
    def resume(self, saved: Mapping[str, Any]) -> None:
        """Start over from a loaded checkpoint: at the next batch, variables are compared with those ``saved`` in it."""
        self._saved = saved if saved.get("values") or saved.get("iterators") else {}
        self._first, self._ids, self._trained, self._lost, self._passes, self._anew = {}, {}, False, None, 0, set()
        self._at_load = {key: one.mark for key, one in self._found().items()} if self._saved else {}

    @_harmless
    def _look(self) -> None:
        found = self._found()
        if not self._first:
            self._of_pass = {key: one.mark for key, one in found.items()}
            self._ids = {key: id(one.value) for key, one in found.items()}
            # the initial values of the first run are passed on to all runs that are resumed from it
            self._first = self._of_pass | {key: noted[1] for key, noted in self._saved.get("values", {}).items()}
            self._passes, self._anew = int(self._saved.get("passes", 0)), set(self._saved.get("anew", ()))
        self._lost, self._only_logged = self._lost_of(found) if self._saved else ([], [])

    # ---- what is lost ------------------------------------------------------------------------------------------------

    def _lost_of(self, found: Mapping[str, _Held]) -> tuple[list[str], list[str]]:
        """Return the names of the lost variables that training may miss, and of those that are only logged."""
        lost = [
            (key, found[key], noted)
            for key, noted in self._saved["values"].items()
            if key in found and self._is_as_new(found[key], noted, key)
        ]
        lost += [
            (key, _Held("", noted[2], f"self.{key[1 : key.index('` of ')]}", None, None, None), noted)
            for key, noted in self._saved["values"].items()
            if noted[1] == "" and key not in found
        ]
        has_values = any(held.kind in (VALUE, CODE) or noted[1] == "" for _, held, noted in lost)
        source = _source_of([held for _, held, _ in lost], self._watched()) if has_values else None
        missed = [one for one in lost if one[1].is_live and self._is_missed(*one, source)]
        made_once = {key: noted[0] for key, held, noted in missed if _is_made_once(source, held, noted)}
        self._made_once |= made_once
        missed = [one for one in missed if one[0] not in made_once]
        # a function's variable may also be found in the closures of functions defined in it: prefer the shortest path
        missed.sort(key=lambda one: -one[1].path.count("."))
        used, logged = dict[Any, str](), dict[Any, str]()
        for key, held, noted in missed:
            name = _shown(held.path).rpartition(".")[2]
            # a class attribute, which all instances share, is reported once, as the class's
            is_shared = CELL in held.path or "." not in held.path or name in defaults_of(held.owner or object)
            told = (name, *noted[:2]) if is_shared else key
            if _decides(source, held, noted):
                used[told] = key
            elif source is not None and source.is_logged(source.names_of(held.path, held.code)[-1]):
                logged[told] = key
        return [*used.values()][::-1], [*logged.values()][::-1]

    def _is_as_new(self, now: _Held, noted: Sequence[Any], key: str) -> bool:
        saved, first = noted[:2]
        if now.mark == saved:
            return False
        if now.kind == STAYS and now.mark == self._saved.get("begun", {}).get(key):
            return True  # its value when the interrupted epoch began
        if now.kind == WEIGHTS == noted[2] and (now.mark == self._at_load.get(key) or self._is_a_copy(now)):
            return True
        # in a run without a loader, the first inspection comes after its first steps, whose random values may differ
        lengths = [_length_of(one) for one in (now.mark, first, saved)]
        is_as_long = now.kind == VALUE and None not in lengths and lengths[0] == lengths[1] != lengths[2]
        return bool(now.mark == first) or is_as_long

    def _is_a_copy(self, now: _Held) -> bool:
        """Return whether an average of the weights, or the best ones, is just a copy of the loaded weights."""
        watched = self._watched()
        models = watched.models if watched is not None else ()
        mine = {mark_of([p]) for model in models for p in (*model.parameters(), *model.buffers())}
        return all(mark_of([tensor]) in mine for tensor in some(tensors_in(now.value)))

    def _is_missed(self, key: str, now: _Held, noted: Sequence[Any], source: Source | None) -> bool:
        first, kind, touched, in_place, *parts = noted[1:]
        if parts and source is not None:  # it was empty at first, and each step may set the parts that it has got
            names = [source.names_of(f"{now.path}.{part}", now.code)[-1] for part in parts[0][:MOST_VALUES]]
            if all(name.endswith("]") and not source.keeps(name, 0.0) for name in names) and not self._saved["ends"]:
                return False
        if kind == CACHE:
            return False  # the same results may be computed again; _compare_caches checks that
        names = [] if source is None else source.names_of(now.path, now.code)
        if source is not None and not self._saved.get("aside") and source.is_put_aside(names[-1]):
            return False
        if kind in (WEIGHTS, STAYS):
            return first != "" or source is None or source.keeps(names[-1], now.value)
        if kind in (VALUE, CODE) and source is not None:
            is_variable = now.frame is not None and not now.is_elsewhere and "." not in now.path
            if not (is_variable or in_place or self._saved.get("ends") or source.keeps(names[-1], now.value)):
                return False
        if kind == PLACE and in_place:
            return True
        # the load has restored it, and the code between two epochs has reset it, as it did in the saved run
        was_restored = self._saved["between"] and self._at_load.get(key) == noted[0]
        if was_restored and any(source.is_set_to_a_literal(name) for name in names if source):
            return False
        # the next epoch, or the code before it, may set it again
        if self._saved["between"] and self._saved["passes"]:
            return key not in self._saved["anew"]
        may_begin_anew = kind == PLACE or any(source.begins_anew(name, first) for name in names if source)
        return not may_begin_anew or (touched and not self._saved["between"])

    # ---- what there is -----------------------------------------------------------------------------------------------

    @_harmless
    def _found(self, *, anew: bool = True) -> dict[str, _Held]:
        if (watched := self._watched()) is None or not watched.models:
            return {}
        models = watched.models
        if self._known is None or anew or self._known.models != list(map(id, models)):
            self._known = Known.of(models)
        look = Look(self._known, [*watched.held, *watched.owners, *watched.data])
        found: dict[str, _Held] = {}
        for source in watched.data:
            place = getattr(source, "__name__", type(source).__name__)
            for name, value in children_of(source):
                for path, what, one, of, told_by in look.into(name, value):
                    if CELL in path or what == CACHE or (what == CODE and path == name):
                        found[f"`{_shown(path)}` of {place}"] = _Held(told_by, what, f"self.{path}", None, one, of)
        # an object reachable from several places is inspected in the one that exists the longest
        objects = [
            *((one, [*_of_model(one)]) for one in models),
            *((one, [_attributes(one)]) for one in watched.owners),
        ]
        alike = collections.Counter[type]()
        for thing, parts in objects:
            alike[type(thing)] += 1
            number = f" ({alike[type(thing)]})" if alike[type(thing)] > 1 else ""  # two callbacks of one class
            for owner, name, value in ((owner, *one) for owner, variables in parts for one in variables):
                # such attributes of a library's class are metrics that it is about to log
                is_told = name.endswith(("_logs", "_metrics")) and not is_users_class(owner)
                if not (NO_STATE.search(name) or is_told):
                    for path, what, one, of, mark in look.into(name, value):
                        held = _Held(mark, what, f"self.{path}", None, one, of or owner)
                        found[f"`{_shown(path)}` of {owner.__name__}{number}"] = held
        elsewhere, frames = _frames_elsewhere(), _frames(sys._getframe(1))
        everywhere, innermost = [*elsewhere, *frames], frames[-1] if frames else None
        for place, frame, variables in [
            *_globals(frames, watched),
            *((*_place_of(one), variables_of(one)) for one in everywhere),
        ]:
            for name, value in variables:
                if frame is None and len(found) > _MOST_GLOBAL:
                    break
                # a variable that was passed to a function and is not read here again is inspected in that function
                is_other = frame in elsewhere
                is_given = frame not in (None, innermost) and not is_other and not is_live(name, frame)
                is_none = bool(NO_STATE.search(name)) and not isinstance(value, dict)
                if not (name.startswith("__") or is_given or is_none):
                    for path, what, one, of, mark in look.into(name, value):
                        found[f"`{_shown(path)}` of {place}"] = _Held(mark, what, path, frame, one, of, is_other)
        self._loose = {name: place for one, name, place in watched.iterators if not look.has_seen(one)}
        return found


def are_kept(values: Sequence[tuple[Kinds, str, Any]]) -> list[bool]:
    """Return which attributes carry state: they are neither set from scratch in each step nor only printed or logged.

    Args:
        values: Class of the object (or with it that of its part which has the attribute), path of the attribute, value.
    """
    source, names = _named_in_source(values)
    return [
        _is_used(source, name, value) and source.keeps(name, value) and not source.is_put_aside(name)
        for name, (_, _, value) in zip(names, values, strict=True)
    ]


def are_made_once(values: Sequence[tuple[Kinds, str, Any]]) -> list[bool]:
    """Return which attributes (``values`` as in :func:`are_kept`) the source sets only if they are None or missing."""
    source, names = _named_in_source(values)
    return [source.is_made_once(name) for name in names]


def are_put_aside(values: Sequence[tuple[Kinds, str, Any]]) -> list[bool]:
    """Return which attributes (``values`` as in :func:`are_kept`) are read only after the same call has set them."""
    source, names = _named_in_source(values)
    return [source.is_put_aside(name) for name in names]


def setters_of(values: Sequence[tuple[Kinds, str, Any]]) -> list[set[str]]:
    """Return, for each attribute (``values`` as in :func:`are_kept`), the functions that set it without reading it."""
    source, names = _named_in_source(values)
    return [source.set_in(name) for name in names]


def are_set_by_hooks(values: Sequence[tuple[Kinds, str, Any]], *, but: Collection[str]) -> list[bool]:
    """Return which attributes (``values`` as in :func:`are_kept`) hooks other than ``but`` set, and not to a time."""
    source, names = _named_in_source(values)
    kept = are_kept(values)  # an attribute that is computed from its old value is reported if it is lost
    return [
        any(map(is_hook, (source.taken_in(name) if is_kept else source.set_in(name)) - {*but}))
        and not source.is_of_a_clock(name)
        for name, is_kept in zip(names, kept, strict=True)
    ]


def _named_in_source(values: Sequence[tuple[Kinds, str, Any]]) -> tuple[Source, list[str]]:
    """Return the source of the classes, and the names that the values have in it."""
    if not values:
        return Source((), frozenset(), waits=False), []  # each save calls this, mostly with nothing: read no source
    source = _source_of([_held_by(kind, path, one) for kinds, path, one in values for kind in _each(kinds)])
    return source, [source.names_of(f"self.{path}", None)[-1] for _, path, _ in values]


def _each(kinds: Kinds) -> tuple[type, ...]:
    return kinds if isinstance(kinds, tuple) else (kinds,)


def _held_by(owner: type, path: str, value: Any) -> _Held:
    return _Held("", VALUE, f"self.{path}", None, value, owner)


def are_set_back(values: Sequence[tuple[Collection[type], str, Any, str]], *, but: Collection[str] = ()) -> list[bool]:
    """Return which attributes methods reset repeatedly, as at an epoch's end, or recreate together with their owner.

    Args:
        values: Classes whose methods count, path of the attribute, value, and fingerprint of the initial value.
        but: The names of methods that run only once, which do not count.
    """
    if not values:
        return []
    source = _source_of([_held_by(kind, path, value) for kinds, path, value, _ in values for kind in kinds])
    return [_is_set_back(source, *one, but) for one in values]


def _is_set_back(
    source: Source, kinds: Collection[type], path: str, value: Any, first: str, but: Collection[str]
) -> bool:
    *ahead, name = path.split(".")
    by = {name: source.set_back_by(f".{name}", value, first), **{each: source.made_by(f".{each}") for each in ahead}}
    bases = {base for kind in kinds for base in kind.__mro__ if not is_library(base)}
    in_place = isinstance(value, (*CONTAINERS, torch.Tensor, np.ndarray))
    return any(
        _sets(vars(base).get(method), each, in_place=in_place and each == name)
        for each in by
        for method in by[each].difference(but)
        for base in bases
    )


def loop_counts(*, innermost: bool = False, deciding: Collection[str] | None = None) -> dict[str, int]:
    """Return the counters of the script's running loops, such as those of ``enumerate``, by variable name.

    Args:
        innermost: Only those of the innermost function with a loop, which outer loops call in each iteration.
        deciding: Return only variables of these names that also decide something; None for all.
    """
    found: dict[str, _Held] = {}
    with contextlib.suppress(Exception):  # whatever the user's variables raise when they are inspected
        for frame in _frames(sys._getframe(1)):
            names = counts_of_loops(frame)
            if innermost and names is not None:
                found.clear()
            for name, value in variables_of(frame) if names else ():
                if names and name in names and type(value) is int:
                    found[f"`{name}` of {_place_of(frame)[0]}"] = _Held("", VALUE, name, frame, value, None)
        if deciding is not None and (found := {key: one for key, one in found.items() if key in deciding}):
            source = _source_of([*found.values()], of_loops=True)
            found = {k: one for k, one in found.items() if source.decides(source.names_of(one.path, one.code)[-1])}
    return {key: one.value for key, one in found.items()}


def is_done_with(holder: object, name: str, *, others: int) -> bool:
    """Return whether, as far as can be seen, nothing will use the object in attribute ``name`` of ``holder`` again.

    That is so if all references to it are: that of ``holder``, a known number of ``others``, suspended generators of
    libraries that iterate over it, and variables of running functions or suspended generators of the user's that are
    not live.
    """
    with contextlib.suppress(Exception):  # whatever the user's variables raise when they are inspected
        running = _frames(sys._getframe(1))
        variables, references = _variables_with(holder, name, running), _references(holder, name)
        if any(_is_kept(variable, frame) for variable, frame in variables):
            return False
        more = references - (1 + others + len(variables))
        if more <= 0 or _had_by_others.get(holder) == references:
            return more <= 0
        waiting, iterations = _generators_with(holder, name, running)
        variables = _variables_with(holder, name, waiting)
        if len(variables) + iterations >= more:
            return not any(_is_kept(variable, frame) for variable, frame in variables)
        _had_by_others[holder] = references
    return False


# by holder: the number of references at which a search of all objects found other users, so as not to search again
_had_by_others: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()


def _variables_with(holder: object, name: str, frames: Sequence[types.FrameType]) -> list[tuple[str, types.FrameType]]:
    """Return the variables in ``frames`` that refer to the object in attribute ``name`` of ``holder``."""
    thing = getattr(holder, name)
    return [(variable, frame) for frame in frames for variable, value in variables_of(frame) if value is thing]


def _generators_with(
    holder: object, name: str, running: Sequence[types.FrameType]
) -> tuple[list[types.FrameType], int]:
    """Return the suspended generators that refer to an attribute's object: the user's, and the number of libraries'."""
    # the referrers are the generators' frames in Python 3.10, and the generators in later versions
    referrers = gc.get_referrers(getattr(holder, name))
    found = [one.gi_frame if isinstance(one, types.GeneratorType) else one for one in referrers]
    waiting = [one for one in found if isinstance(one, types.FrameType) and one.f_code.co_flags & inspect.CO_GENERATOR]
    waiting = [one for one in waiting if one not in running]
    own = [one for one in waiting if not is_librarys_module(one.f_globals.get("__name__"))]
    return own, len(waiting) - len(own)


def _is_kept(variable: str, frame: types.FrameType) -> bool:
    shared = (*frame.f_code.co_cellvars, *frame.f_code.co_freevars)  # with functions that may be called later
    return variable in shared or is_live(variable, frame)


class _Alone:
    """Holds a value that nothing else refers to."""

    def __init__(self) -> None:
        self.value = object()


def _references(holder: object, name: str) -> int:
    """Return how many references there are to the object in an attribute, without those of this call."""
    one, of_one = _Alone(), "value"  # measures this call's own references, because it is read in the same way
    return sys.getrefcount(getattr(holder, name)) - sys.getrefcount(getattr(one, of_one)) + 1


def _sets(method: object, name: str, *, in_place: bool) -> bool:
    function = inspect.unwrap(method) if isinstance(method, types.FunctionType) else None
    if not isinstance(function, types.FunctionType) or name not in function.__code__.co_names:
        return False
    return in_place or name in stored_by(function.__code__, STORE_ATTR)


def _is_made_once(source: Source | None, held: _Held, noted: Sequence[Any]) -> bool:
    """Return whether the variable is None now, and the source creates its value only when it is needed."""
    if source is None or held.value is not None or held.kind != VALUE or not noted[0]:
        return False
    return source.is_made_once(source.names_of(held.path, held.code)[-1]) and _decides(source, held, noted)


def _decides(source: Source | None, held: _Held, noted: Sequence[Any]) -> bool:
    """Return whether the script uses a lost variable for more than printing and logging it."""
    is_metric = held.kind == PLACE and isinstance(held.value, dict) and "" in held.value
    if source is None or not (is_metric or held.kind == noted[2] == VALUE):
        return True
    # if it is None now and its saved mark is a number, training had set it to that whole number
    value = 0 if held.value is None and noted[0].lstrip("-").isdigit() else held.value
    return _is_used(source, source.names_of(held.path, held.code)[-1], value)


def _length_of(mark: str) -> int | None:
    """Return the length of the container that a mark stands for; None if it is not that of a container."""
    length = mark.rpartition(" ")[2]
    return int(length) if length.isdigit() and length != mark else None


def _is_used(source: Source, name: str, value: object) -> bool:
    return source.decides(name, counts=type(value) is int, holds=isinstance(value, CONTAINERS))


def in_words(names: Sequence[str]) -> str:
    """Return a text with the first names of lost variables, and how many more there are."""
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


def only_logged_in_words(names: Sequence[str]) -> str:
    """Return the line that a resumed run logs about lost variables that are only logged."""
    return f"logged values of this epoch count only what follows the resume: {in_words(names)}"


def _of_model(model: torch.nn.Module) -> Iterator[tuple[type, list[tuple[str, Any]]]]:
    """Yield the attributes of modules of the user's classes without ``get_extra_state``, and all hooks.

    Also yield the class names of all modules: replacing a module without weights by another leaves no trace in a state.
    """
    kinds = [type(module).__qualname__.removeprefix("Lazy") for module in model.modules()]
    yield type(model), [("classes of its modules", " ".join(kinds))]
    for name, module in model.named_modules():
        kind, found = type(module), []
        if not is_library(kind) and kind.get_extra_state is torch.nn.Module.get_extra_state:
            found = [(f"{name}.{n}".lstrip("."), v) for n, v in _attributes(module)[1]]
        hooks = [one for of in _HOOKS for one in vars(module)[of].values()]
        hooks += [
            one for p in module._parameters.values() if p is not None for one in (p._backward_hooks or {}).values()
        ]
        found += [(f"{name}.hook{number}".lstrip("."), hook) for number, hook in enumerate(hooks)]
        if found:
            yield kind, found


def _attributes(owner: object) -> tuple[type, list[tuple[str, Any]]]:
    kind: Any = type(owner)
    librarys = set_by_libraries(kind) | (OF_EVERY_MODULE if isinstance(owner, torch.nn.Module) else frozenset())
    return kind, [(name, value) for name, value in own_attributes(owner) if name not in librarys]


def _shown(path: str) -> str:
    return path.replace(CELL, "")


def _is_filled_once(held: _Held, source: Source) -> bool:
    """Return whether a cache, once it has a result for a key, keeps it until the end."""
    name = source.names_of(held.path, held.code)[-1]
    return source.fills_once(name) if NO_STATE.search(held.path) else not source.clears(name)


def _place_of(frame: types.FrameType) -> tuple[str, types.FrameType]:
    code = frame.f_code
    place = os.path.basename(code.co_filename)
    return (place if code.co_name == "<module>" else f"{code.co_name}() in {place}"), frame


def _frames(innermost: types.FrameType) -> list[types.FrameType]:
    """Return the frames of the user's functions that are running, the outermost first."""
    found: list[types.FrameType] = []
    frame: types.FrameType | None = innermost
    while frame is not None:
        if is_users_file(frame.f_code.co_filename):
            found.append(frame)
        frame = frame.f_back
    return found[::-1]


def _frames_elsewhere() -> list[types.FrameType]:
    """Return the frames of the user's functions that run in other threads."""
    mine = threading.get_ident()
    # Up to Python 3.11, a garbage collection may start while a frame is being returned and let its thread leave the
    # function. Accessing the frame then crashes the process.
    with no_collections():
        return [one for ident, frame in sys._current_frames().items() if ident != mine for one in _frames(frame)]


def _globals(frames: Sequence[types.FrameType], watched: Watched) -> Iterator[tuple[str, None, list[tuple[str, Any]]]]:
    """Yield the globals of the user's modules that may change, and what their classes and functions hold."""
    running = {id(frame.f_globals) for frame in frames if frame.f_code.co_name == "<module>"}
    for module, names, functions in _user_modules(frames, watched):
        with contextlib.suppress(Exception):  # whatever the user's objects raise when asked for their class
            file, variables = os.path.basename(str(module.__file__)), dict(vars(module))
            if id(vars(module)) not in running:
                yield file, None, [(n, v) for n, v in variables.items() if n in names or may_change(v)]
            for kind in variables.values():
                if isinstance(kind, type) and kind.__module__ == module.__name__:
                    yield f"{kind.__name__} in {file}", None, [(n, v) for n, v in vars(kind).items() if _of_class(v)]
            for function in functions:
                yield f"{function.__name__}() in {file}", None, _kept_by(function)


def _of_class(value: Any) -> bool:
    return type(value) in (*NUMBERS, str) or may_change(value)


def _kept_by(function: types.FunctionType) -> list[tuple[str, Any]]:
    """Return the attributes of a function, and the defaults of its arguments that may change."""
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    defaults = function.__defaults__ or ()
    found = [*zip(names[len(names) - len(defaults) :], defaults, strict=True), *(function.__kwdefaults__ or {}).items()]
    return [*vars(function).items(), *((name, value) for name, value in found if may_change(value))]


def _user_modules(frames: Sequence[types.FrameType], watched: Watched | None) -> list[_UserModule]:
    """Return the user's modules to inspect, beginning with those of running functions and of ``watched`` objects."""
    names = dict.fromkeys(str(f.f_globals.get("__name__")) for f in frames)
    if watched is not None:
        modules = [one for model in watched.models for one in model.modules()]
        kinds = dict.fromkeys(map(type, [*modules, *watched.owners, *watched.held]))
        names |= {base.__module__: None for kind in kinds for base in kind.__mro__}
    return _modules_from(tuple(names), len(sys.modules))


@functools.lru_cache(maxsize=16)
def _modules_from(running: tuple[str, ...], _: int) -> list[_UserModule]:
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    place = os.path.dirname(os.path.abspath(main)) + os.sep if main and is_users_file(os.path.abspath(main)) else None
    beside = [name for name, module in list(sys.modules.items()) if place and _file_of(module).startswith(place)]
    found: dict[str, _UserModule] = {}
    every: list[types.FunctionType] = []
    ahead = collections.deque([*running, *beside])
    while ahead and len(found) < _MODULES:
        name = ahead.popleft()
        module = sys.modules.get(name)
        if name in found or name == "__mp_main__" or module is None or not (file := _file_of(module)):
            continue
        if os.path.isabs(file) and is_users_file(file):
            with contextlib.suppress(Exception):  # whatever modules raise that import their attributes on access
                functions = list(_functions_in(module))
                names = {name for function in functions for name in stored_by(function.__code__, _STORE_GLOBAL)}
                found[name] = _UserModule(module, names, [function for function in functions if _kept_by(function)])
                every += functions
                ahead.extend(_used_by(module))
    # other modules may set a module's globals as its attributes
    values = {n for one in found.values() for n, v in vars(one.module).items() if type(v) in (*NUMBERS, str)}
    setting = [one.__code__ for one in every if not values.isdisjoint(one.__code__.co_names)]
    attributes = {name for code in setting for name in stored_by(code, STORE_ATTR)} & values
    return [one._replace(names=one.names | (attributes & vars(one.module).keys())) for one in found.values()]


def _file_of(module: Any) -> str:
    return str(vars(module).get("__file__") or "") if isinstance(module, types.ModuleType) else ""


def _used_by(module: types.ModuleType) -> Iterator[str]:
    """Yield the names of the modules from which a module has imported something."""
    for value in list(vars(module).values()):
        name = value.__name__ if isinstance(value, types.ModuleType) else getattr(type(value), "__module__", None)
        if isinstance(value, (type, types.FunctionType)):
            name = value.__module__
        if isinstance(name, str):
            yield name


def _functions_in(module: types.ModuleType) -> Iterator[types.FunctionType]:
    for value in list(vars(module).values()):
        if getattr(value, "__module__", None) == module.__name__:
            for function in [value, *(vars(value).values() if isinstance(value, type) else ())]:
                inner = inspect.unwrap(getattr(function, "__func__", function))
                if isinstance(inner, types.FunctionType):
                    yield inner


def _source_of(lost: Sequence[_Held], watched: Watched | None = None, *, of_loops: bool = False) -> Source:
    """Read the files of running functions, of the user's modules, and of the classes that lost variables belong to."""
    frames = [*_frames(sys._getframe(1)), *_frames_elsewhere()]
    running = {(f.f_code.co_filename, f.f_code.co_name, f.f_code.co_firstlineno) for f in frames}
    files = {file: None for file, _, _ in sorted(running)}
    for held in lost:
        for kind in held.owner.__mro__[:-1] if held.owner is not None else ():
            file = getattr(sys.modules.get(kind.__module__), "__file__", None)
            files |= {str(file): None} if file else {}
    files |= {str(module.__file__): None for module, *_ in _user_modules(frames, watched)}
    left, some = _SOURCE, list[str]()
    for file in files:
        with contextlib.suppress(OSError):
            left -= os.path.getsize(file)
            some += [file] if left > 0 else []
    running = {one for one in running if one[0] in some}
    return _read(tuple(some), frozenset(running), watched is not None and watched.waits, of_loops)


@functools.lru_cache(maxsize=1)
def _read(files: tuple[str, ...], running: frozenset[tuple[str, str, int]], waits: bool, of_loops: bool) -> Source:
    # a save calls it twice with the same arguments
    return Source(files, running, waits=waits, of_loops=of_loops)
