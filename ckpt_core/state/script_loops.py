"""Which ``for`` loops of a script are under way, and whether a resumed run is in the same round of each.

A loop over a prepared loader is brought back to where it was. What a script loops over besides (minibatches cut by
hand, steps of an epoch, folds, stages) begins again, unless the script itself begins where it was. Where it does not,
its variables of the loop have other values in the first step after the resume than a run that was never interrupted.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import functools
import gc
import itertools
import linecache
import sys
import threading
import types
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

from ckpt_core.state.code_origin import is_users_file
from ckpt_core.state.object_walk import is_plain
from ckpt_core.state.value_marks import variables_of
from ckpt_core.state.variable_use import mark, what_it_does

_ITEMS, _RANGE, _COUNTS = "items", "range", "counts"
_PURE = frozenset({"len", "int", "min", "max", "round", "abs", "range"})
_EVALUATED = (
    *(ast.Name, ast.Attribute, ast.Constant, ast.BinOp, ast.UnaryOp, ast.Subscript, ast.Call, ast.expr_context),
    *(ast.operator, ast.unaryop, ast.Expression, ast.Tuple, ast.List),
)
_LONGEST = 60  # characters of what is looped over


class _Running(NamedTuple):
    """A loop that is under way, in one of its rounds."""

    node: Any
    frame: types.FrameType
    name: str

    @property
    def key(self) -> str:
        """What tells it from others of the same text."""
        return f"{self.node.lineno - self.frame.f_code.co_firstlineno} {self.name}"

    @property
    def values(self) -> dict[str, Any]:
        """The plain values of its variables."""
        targets = self.node.target.elts if isinstance(self.node.target, ast.Tuple) else [self.node.target]
        variables = dict(variables_of(self.frame))
        names = [one.id for one in targets if isinstance(one, ast.Name)]
        return {name: variables[name] for name in names if name in variables and is_plain(variables[name])}

    @property
    def counter(self) -> str | None:
        """The variable that counts the rounds, as of ``enumerate``."""
        calls = [self.node.iter, *getattr(self.node.iter, "args", ())[:1]]
        is_counted = any(_called(one) == "enumerate" for one in calls)
        first = getattr(self.node.target, "elts", [None])[0]
        return first.id if is_counted and isinstance(first, ast.Name) else None

    @property
    def range(self) -> range | None:
        """The numbers that it goes through; None if it goes through others, or nobody knows."""
        calls: list[Any] = [one for one in ast.walk(self.node.iter) if _called(one) in ("range", "trange")]
        if len(calls) != 1 or not isinstance(self.node.target, ast.Name):
            return None
        found = [_value_of(one, self.frame) for one in calls[0].args]
        return range(*found) if all(type(one) is int for one in found) else None

    @property
    def is_in_its_last_round(self) -> bool:
        """Whether it is known that no round follows."""
        if (numbers := self.range) is not None:
            return len(numbers) > 0 and self.values.get(self.node.target.id) == numbers[-1]
        if called := {_called(one) for one in ast.walk(self.node.iter)} - {None}:
            makers = [one for one in gc.get_objects() if type(one) is types.GeneratorType]
            frames = [one.gi_frame for one in makers if one.gi_code.co_name in called and one.gi_frame is not None]
            inner = [loop for frame in frames for loop in _loops_of(frame)]
            if inner and len(frames) == 1:
                return all(one.is_in_its_last_round for one in inner)
        if not isinstance(self.node.target, ast.Name):
            return False
        item = dict(variables_of(self.frame)).get(self.node.target.id)
        holders = gc.get_referrers(item) if gc.is_tracked(item) else [_value_of(self.node.iter, self.frame)]
        items = [one for one in holders if isinstance(one, (list, tuple)) and all(type(i) is type(item) for i in one)]
        return len(items) == 1 and (items[0][-1] is item or (not gc.is_tracked(item) and items[0][-1] == item))


class Loops:
    """Follows the loops of the script's functions that are running."""

    def __init__(self) -> None:
        self._of_loaders: dict[tuple[int, int], tuple[types.CodeType, int]] = {}
        self._step: list[tuple[types.CodeType, int]] = []  # where the first step was made, the outermost function first
        self._threads: set[int] = set()  # that take batches

    def given_a_batch(self, frames: Sequence[types.FrameType]) -> None:
        """Note which lines take a batch of a loader, which knows itself where it is; ``frames`` are the script's."""
        self._threads.add(threading.get_ident())
        for frame in frames:
            place = id(frame.f_code), frame.f_lasti
            if place not in self._of_loaders:
                self._of_loaders[place] = frame.f_code, frame.f_lineno

    def trains(self, frames: Sequence[types.FrameType]) -> None:
        """Note where the first step is made."""
        self._step = [(frame.f_code, frame.f_lineno) for frame in frames]

    def capture(self, frames: Sequence[types.FrameType], *, between: bool) -> list[list[Any]]:
        """Return the loops that are under way: what tells each, its kind, and its variables with what may follow.

        Args:
            frames: Of the script's functions that are running, the outermost first.
            between: Whether the script has all batches of an epoch.
        """
        found: list[list[Any]] = []
        if not self._step or self._threads - {threading.get_ident()}:
            return found
        running = [loop for frame in frames for loop in _loops_of(frame)]
        is_done = self._has_trained_in(running[-1].frame, frames) if running else None
        for loop in reversed(running):
            values, kind = loop.values, _ITEMS
            if self._is_of_loader(loop):
                values, kind = {n: values[n] for n in (loop.counter,) if n in values and not between}, _COUNTS
            elif loop.is_in_its_last_round and is_done is not False:
                continue  # what is around it begins another one
            elif loop.range is not None:
                kind = _RANGE
            if values:
                follow = {name: _after(value, loop, is_done=is_done) for name, value in values.items()}
                marks = {name: [mark(value), follow[name]] for name, value in values.items()}
                found.append([loop.key, kind, loop is running[0], marks])
            is_done = False
        return found

    def begun_again(self, saved: Sequence[Sequence[Any]], frames: Sequence[types.FrameType]) -> dict[str, Any]:
        """Return the loops that have begun again since the load, by name, now that the first step is made.

        Returns:
            dict: None for each, or of those that only count the variable, its function, and by how much it differs.
        """
        running = {loop.key: loop for frame in frames for loop in _loops_of(frame)}
        found: dict[str, Any] = {}
        for key, kind, is_outermost, marks in saved:
            loop = running.get(key)
            now = {} if loop is None else {one: mark(value) for one, value in loop.values.items() if one in marks}
            if loop is None or not now or any(mark_now in marks[one][1] for one, mark_now in now.items()):
                continue
            one = next(iter(now))
            is_counted = all(mark_now.lstrip("-").isdigit() for mark_now in now.values())
            first = loop.range
            if first is not None and now[one] not in (mark(first[0]) if len(first) else "", marks[one][0]):
                continue  # the script has set it, to whatever
            if is_counted and (is_outermost or kind == _COUNTS):
                found[loop.name] = one, loop.frame, int(marks[one][1][-1]) - int(now[one])
            else:
                found[loop.name] = None
        return found

    def _is_of_loader(self, loop: _Running) -> bool:
        header = range(loop.node.lineno, loop.node.iter.end_lineno + 1)
        return any(code is loop.frame.f_code and line in header for code, line in self._of_loaders.values())

    def _has_trained_in(self, frame: types.FrameType, frames: Sequence[types.FrameType]) -> bool | None:
        """Whether the step of the innermost loop's round is made already; None if that is not seen."""
        here = frames[frames.index(frame) :]
        steps = [number for number, (code, _) in enumerate(self._step) if code is frame.f_code]
        for (code, line), one in zip(self._step[steps[-1] :] if steps else (), here, strict=False):
            if code is not one.f_code:
                return None
            if line != one.f_lineno:
                return line < one.f_lineno
        return None


def running_instruction() -> tuple[types.CodeType, int] | None:
    """Return the instruction of the script's innermost function that is under way; None outside of its functions."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and not is_users_file(frame.f_code.co_filename):
        frame = frame.f_back
    return None if frame is None else (frame.f_code, frame.f_lasti)


def is_a_loops(instruction: tuple[types.CodeType, int] | None) -> bool:
    """Whether it takes the next item for a ``for``."""
    return instruction is not None and instruction[0].co_code[instruction[1]] == dis.opmap["FOR_ITER"]


def is_same(one: tuple[types.CodeType, int] | None, other: tuple[types.CodeType, int] | None) -> bool:
    """Whether two of :func:`running_instruction` are one."""
    return one is not None and other is not None and one[0] is other[0] and one[1] == other[1]


def is_cycled(owners: Collection[object]) -> bool:
    """Whether an ``itertools.cycle`` goes through what a generator makes that has one of some objects in a variable."""
    cycles = [one for one in gc.get_objects() if type(one) is itertools.cycle]
    makers = [one for cycle in cycles for one in gc.get_referents(cycle) if isinstance(one, types.GeneratorType)]
    values = [value for one in makers if one.gi_frame is not None for value in one.gi_frame.f_locals.values()]
    return any(value is owner for value in values for owner in owners)


def skips_by(name: str, frame: types.FrameType) -> bool:
    """Whether a function leaves out rounds by a variable: ``if step < done: continue``."""
    nodes = (one for function in _functions(frame.f_code) for one in ast.walk(function))
    skips = [one.test for one in nodes if isinstance(one, ast.If) and isinstance(one.body[-1], ast.Continue)]
    compared = [one for test in skips for one in ast.walk(test) if isinstance(one, ast.Compare)]
    is_less = (one for one in compared if isinstance(one.ops[0], (ast.Lt, ast.LtE)))
    return any(isinstance(part, ast.Name) and part.id == name for one in is_less for part in ast.walk(one.left))


def moduli(name: str, frame: types.FrameType) -> list[int]:
    """Return by what a function takes the remainder of a variable, but to tell of it or to save.

    One that is not known is more than anybody counts.
    """
    nodes = [one for function in _functions(frame.f_code) for one in ast.walk(function)]
    tells = [
        part
        for node in nodes
        if isinstance(node, ast.If) and {what_it_does(one) for one in node.body + node.orelse} <= {"tells", "saves"}
        for part in ast.walk(node.test)
    ]
    found = []
    for node in nodes:
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mod) or any(node is one for one in tells):
            continue
        if any(isinstance(one, ast.Name) and one.id == name for one in ast.walk(node.left)):
            divisor = _value_of(node.right, frame)
            found.append(divisor if type(divisor) is int and divisor else sys.maxsize)
    return found


def _after(value: Any, loop: _Running, *, is_done: bool | None) -> list[str]:
    """Return the marks that a variable of a loop may have in the next step, the likeliest last."""
    numbers = loop.range
    then = [mark(value + (1 if numbers is None else numbers.step))] if type(value) is int else []
    return then if is_done and then else [mark(value), *then]


def _called(node: Any) -> str | None:
    function = node.func if isinstance(node, ast.Call) else None
    return getattr(function, "id", getattr(function, "attr", None))


def _value_of(node: ast.expr, frame: types.FrameType) -> Any:
    return _evaluated(node, frame.f_globals, dict(variables_of(frame)))


def _evaluated(node: ast.expr, names: dict[str, Any], variables: dict[str, Any]) -> Any:
    """Return the value of an expression that does nothing but read; None of another one."""
    parts = [*ast.walk(node)]
    calls = [one for one in parts if isinstance(one, ast.Call)]
    if not all(isinstance(one, _EVALUATED) for one in parts):
        return None
    if any(not isinstance(one.func, ast.Name) or one.func.id not in _PURE for one in calls):
        return None
    with contextlib.suppress(Exception):  # of the user's objects, whatever they raise when read
        return eval(compile(ast.Expression(node), "<loop>", "eval"), dict(names), variables)  # noqa: S307
    return None


def _loops_of(frame: types.FrameType) -> list[_Running]:
    """Return the loops of a function that are in one of their rounds, the outermost first."""
    code = frame.f_code
    place = code.co_filename.rpartition("/")[2]
    place = place if code.co_name == "<module>" else f"{code.co_name}() in {place}"
    return [
        _Running(loop, frame, f"`for {ast.unparse(loop.target)} in {ast.unparse(loop.iter)[:_LONGEST]}` of {place}")
        for loop in _loops_in(code)
        if loop.body[0].lineno <= frame.f_lineno <= loop.body[-1].end_lineno
    ]


@functools.lru_cache(maxsize=256)
def _loops_in(code: types.CodeType) -> list[Any]:
    return sorted((one for function in _functions(code) for one in _own_loops(function)), key=lambda one: one.lineno)


def _own_loops(function: ast.AST) -> Iterator[ast.For]:
    for node in ast.iter_child_nodes(function):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            continue
        if isinstance(node, ast.For):
            yield node
        yield from _own_loops(node)


def _functions(code: types.CodeType) -> Collection[ast.AST]:
    """Return the source of a function, or of a module."""
    tree = _tree(code.co_filename)
    if tree is None or code.co_name == "<module>":
        return [] if tree is None else [tree]
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and node.name == code.co_name
        and min([node.lineno, *(one.lineno for one in node.decorator_list)]) == code.co_firstlineno
    ]


@functools.lru_cache(maxsize=16)
def _tree(file: str) -> ast.Module | None:
    with contextlib.suppress(SyntaxError, ValueError, RecursionError):
        return ast.parse("".join(linecache.getlines(file)))
    return None
