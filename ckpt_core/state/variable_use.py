"""Static analysis of the user's source: is a user variable kept between steps, reset, live, or used for a decision?

The analysis goes by names alone (of variables, attributes and constant keys of dictionaries), not by the objects that
they refer to: an attribute ``best`` is the same in all classes. It is an approximation. If the source cannot be read,
every variable is assumed to be kept and to decide something.
"""

from __future__ import annotations

import ast
import collections
import contextlib
import dis
import functools
import itertools
import linecache
import re
import types
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

from ckpt_core.state.changed_values import fingerprint
from ckpt_core.state.object_walk import codes_in

#: Prefix of the name of a closure's variable in the path to a value.
CELL = "()"

# functions that only print, log or write a value
_TELLS = re.compile(
    r"print|info|debug|warn\w*|error|critical|exception|set_postfix\w*|set_description\w*|\w*save\w*|dumps?|str|repr"
    r"|format|write\w*|flush|close|isinstance|type|id|assert\w*|join"
)
# methods that pass a value to a tracker, like log({...}); not log("name", value), by which Lightning's callbacks decide
_LOGS = re.compile(r"add_scalars?|log_metrics?|log_scalars?")
_METHODS = """
    append appendleft extend extendleft add update insert pop popleft popitem remove discard setdefault sort reverse
    rotate subtract push
"""
_CHANGES = frozenset(_METHODS.split())
_EMPTIES = ("clear", "zero_")
_MAKES = frozenset({"dict", "list", "set", "deque", "defaultdict", "Counter", "OrderedDict"})
# functions that return times, or properties of this process or machine
_CLOCK_NAMES = """
    time time_ns monotonic monotonic_ns perf_counter perf_counter_ns process_time process_time_ns now elapsed_time
    time_elapsed time_remaining
    getpid get_ident fileno gethostname getloadavg disk_usage virtual_memory
    memory_allocated max_memory_allocated memory_reserved mem_get_info
"""
_CLOCKS = frozenset(_CLOCK_NAMES.split())
_AT_START = frozenset({"__init__", "__post_init__", "__new__", "setup"})
_TELLING = frozenset({"state_dict", "__getstate__", "get_state", "__repr__", "__str__", "get_extra_state"})
# names by which a condition asks for the current step
_WHEN = frozenset({"batch_idx", "current_epoch", "global_step", "sanity_checking", "training"})
_CONSTANTS = _MAKES | {"float", "int", "math", "np", "numpy", "torch", "collections", "inf"}
_ANY, _MADE = "any", "made"
_EVALUATIONS = ("validation", "test", "predict")
_EVALUATES = re.compile(rf"on_({'|'.join(_EVALUATIONS)})\w*_(start|end)")
CONTAINERS = (dict, list, tuple, set, collections.deque)
_SHORT = 256
_CALLS_DEEP = 8


class Source:
    """What the code in some source files does with names.

    Names are as in :meth:`names_of`: variables belong to a function, attributes and keys to all objects.

    Args:
        files: Paths of source files.
        running: File name, name and first line of each running function, whose loops are under way.
        waits: Whether running functions wait for the training to end: what they read, they read after it.
        of_loops: Whether a number that the script only adds to another one, or saves by, decides nothing.
    """

    def __init__(
        self,
        files: Collection[str],
        running: Collection[tuple[str, str, int]] = (),
        *,
        waits: bool = False,
        of_loops: bool = False,
    ) -> None:
        self._reader = _Reader(waits, of_loops)
        for file in files:
            here = frozenset((name, line) for path, name, line in running if path == file)
            with contextlib.suppress(Exception):  # a file that cannot be analyzed must not end the training
                text = "".join(linecache.getlines(file))
                self._reader.add(_read(text, here, waits, of_loops, frozenset(self._reader.made)))
        self._is_readable = self._reader.is_readable

    def clears(self, name: str) -> bool:
        """Return whether the source empties the cache of a function."""
        return name in self._reader.cleared

    def fills_once(self, name: str) -> bool:
        """Return whether the source sets items in a dictionary only if their keys are missing."""
        return name in self._reader.filled_once

    def is_made_once(self, name: str) -> bool:
        """Return whether the source sets a value only if it is None or the attribute is missing."""
        return name in self._reader.made_once and name not in self._reader.set_freely

    def names_of(self, path: str, code: types.CodeType | None) -> list[str]:
        """Return the names on the path to a value, the value's own last.

        Args:
            path: A variable, followed by attributes and keys, joined by dots.
            code: The code of the function that has the variable; None for a global or an attribute of a class.
        """
        root, *rest = path.split(".")
        if code is not None and code.co_name != "<module>":
            root = f"{code.co_name}:{code.co_firstlineno}:{root}"
        elif f":{root}" in self._reader.stored | self._reader.read_names:
            root = f":{root}"
        else:
            root = f".{root}"
        names = [root]
        for part in rest:
            key = f"{names[-1]}[{part}]"
            if part.startswith(CELL):  # a closure's variable: it is not known which function defines it
                end = part.replace(CELL, ":")
                alike = sorted(n for n in self._reader.stored if n.count(":") == 2 and n.endswith(end))
                # a function that sets its variable of this name from scratch in each step cannot have kept this value
                kept = [n for n in alike if self.keeps(n, 0.0)]
                names.append(next((n for n in kept if self.decides(n)), [*kept, *alike, part][0]))
            else:
                names.append(key if key in self._reader.stored else f".{part}")
        while len(names) > 1 and self._is_readable and names[-1] not in self._reader.stored:
            names.pop()  # it is only accessed through another name, such as an item of a list
        return names

    def keeps(self, name: str, value: object) -> bool:
        """Return whether a new value may depend on the previous one, or no step is seen to set it from scratch."""
        reader = self._reader
        is_state = isinstance(value, (bool, int, str, type(None))) and name in reader.set_to
        return is_state or not self._is_readable or name not in reader.set_by_steps or name in reader.keeps

    def begins_anew(self, name: str, first: str) -> bool:
        """Return whether it is always reset to the value of mark ``first``, other than when its owner is created."""
        found = [(to, by) for to, by, is_sure in self._reader.resets.get(name, ()) if is_sure]
        return any(to in (first, _ANY) and (by is None or by in self._reader.called) for to, by in found)

    def set_back_by(self, name: str, value: object, first: str) -> set[str]:
        """Return the names of the functions, except those that create its owner, that reset a value to a constant.

        A container counts as reset if it is emptied or set to the value with the fingerprint ``first`` again. A number
        counts if it is set to its first value, perhaps conditionally, or unconditionally to any number.
        """
        # a user's class may need arguments, so its base class is instantiated
        empty = next((mark(kind()) for kind in CONTAINERS if isinstance(value, kind)), "")

        def is_back(to: str, by: str, *, is_sure: bool) -> bool:
            if to == _ANY or empty:
                return to in (_ANY, empty) or to.partition(" ")[0] == first or first in _fingerprints(to)
            # a flag may be a reason for this process to stop, set by a signal handler, so only hooks count
            is_other = is_sure and (type(value) is not bool or is_hook(by)) and bool(_fingerprints(to))
            return is_other or first in _fingerprints(to)

        found = self._reader.resets.get(name, ())
        return {by for to, by, is_sure in found if by and is_back(to, by, is_sure=is_sure)}

    def made_by(self, name: str) -> set[str]:
        """Return the names of the functions, except those that create its owner, that always recreate an object."""
        return {by for to, by, is_sure in self._reader.resets.get(name, ()) if by and to == _MADE and is_sure}

    def set_in(self, name: str) -> set[str]:
        """Return the names of the functions that set it unconditionally, without having read it.

        Also return the methods that call such a function, always or in some steps or epochs, on ``self`` or on an
        attribute of it (``self.updater.update()``).
        """
        found, ahead = set[str](), [*self._reader.set_in.get(name, ())]
        while ahead:
            one = ahead.pop()
            if one not in found:
                found.add(one)
                ahead += self._reader.called_by.get(one, ()) if one not in _AT_START else ()
        return found

    def taken_in(self, name: str) -> set[str]:
        """Return the names of the functions that set it, perhaps after reading it, from other attributes alone.

        There are none if any other function sets it in another way.
        """
        found = self._reader.taken_in.get(name, set())
        return set() if "" in found else found

    def is_of_a_clock(self, name: str) -> bool:
        """Return whether it is, or is computed from, a time or another property of this process or machine."""
        return any(name in self._comes_to(one) for one in self._reader.of_clocks)

    @functools.cached_property
    def _mentions(self) -> dict[str, set[str]]:
        """For each name, the names of the functions that set, read or call it."""
        found: dict[str, set[str]] = collections.defaultdict(set)
        for function, each in self._reader.runs.items():
            for one in itertools.chain.from_iterable(each):
                found[one.what].add(function)
        return found

    def is_put_aside(self, name: str) -> bool:
        """Return whether every read comes after it was set in the same function call or the same evaluation.

        An example is the trained weights, put aside while averaged ones are evaluated.
        """
        every, setters, readers = self._reader.runs, set[str](), set[str]()
        by = self._mentions.get(name, set()) - _AT_START
        if not any(one.kind == "set" and one.what == name for f in by for run in every[f] for one in run):
            return False
        near, ahead = set[str](), [name]
        while ahead:
            new = self._mentions.get(ahead.pop(), set()) - near
            near |= new
            ahead += new
        runs = {function: every[function] for function in near}

        def sets(one: _Event) -> bool:
            return one.what == name if one.kind == "set" else one.kind == "call" and one.what in setters

        def reads_first(events: Sequence[_Event]) -> bool:
            done: list[frozenset[str]] = []
            for one in events:
                done += [one.when] if sets(one) else []
                reads = one.what == name if one.kind == "read" else one.kind == "call" and one.what in readers
                if reads and not any(when <= one.when for when in done):
                    return True
            return False

        for _ in range(_CALLS_DEEP):
            before = setters, readers
            readers = {function for function, each in runs.items() if any(map(reads_first, each))} - _TELLING
            always = {f for f, each in runs.items() if all(any(sets(o) and not o.when for o in one) for one in each)}
            setters = always - readers - _AT_START
            if before == (setters, readers):
                # a reader that these functions do not call is called by other code, and not after it was set
                called = {one.what for each in runs.values() for run in each for one in run if one.kind == "call"}
                called -= {one for one in readers if {one, f".{one}"} & self._reader.read_names}  # passed as a callback
                inner = {one for one in readers if (one in called and not is_hook(one)) or _EVALUATES.fullmatch(one)}
                return name.startswith(".") and bool(readers) and inner == readers
        return False

    def is_set_to_a_literal(self, name: str) -> bool:
        """Return whether an epoch or a step sets it to a constant, perhaps conditionally."""
        return name in self._reader.set_to

    def is_logged(self, name: str) -> bool:
        """Return whether a value, or one computed from it, is passed to a tracker."""
        return any(one in self._reader.logged for one in self._comes_to(name))

    def decides(self, name: str, *, counts: bool = False, holds: bool = False) -> bool:
        """Return whether a value is used for anything other than printing, logging and writing it.

        Args:
            name: The value's name.
            counts: Whether it is a whole number: one that only ends a loop, or is read after training, does not count.
            holds: Whether it is a container: one that is only returned, or read after the training, does not count.
        """
        reader = self._reader
        if not self._is_readable or name not in reader.read_names | reader.stored:
            return True
        for one in self._comes_to(name):
            if one in reader.decides or (one in reader.returned and not holds):
                return True
            if one in reader.properties - reader.read_names:  # perhaps a library reads it
                return True
            if one in reader.read_after and not (counts or holds):
                return True
            if one in reader.ends and not (counts and one not in reader.set_again):
                return True
        return False

    def _comes_to(self, name: str) -> Iterator[str]:
        """Yield a name, and those whose values are computed from its value."""
        seen, ahead = set[str](), [name]
        while ahead:
            one = ahead.pop()
            if one in seen:
                continue
            seen.add(one)
            yield one
            if one.startswith(":"):
                ahead.append(f".{one[1:]}")  # other modules read a global as an attribute
            ahead += self._reader.flows.get(one, ())


def is_hook(function: str) -> bool:
    """Return whether a function's name is that of a hook, which a framework calls."""
    return function.startswith("on_") or function.endswith("_step")


def mark(value: Any) -> str:
    """Return a text that differs if a plain value differs; that of a container ends with its length."""
    is_short = isinstance(value, (bool, int, float, type(None))) or (type(value) is str and len(value) < _SHORT)
    if is_short:
        return repr(value)
    return f"{fingerprint(value)} {len(value)}" if isinstance(value, CONTAINERS) else fingerprint(value)


class _Event(NamedTuple):
    """A read, set or call in a function's source, and the conditions under which it happens."""

    kind: str
    what: str
    when: frozenset[str]


def _under_way(events: Sequence[_Event]) -> tuple[_Event, ...]:
    """Make the events of a running function independent: a resume may come between any two of them."""
    return tuple(one._replace(when=one.when | {f"event {number}"}) for number, one in enumerate(events))


class _Scope:
    """The body of a function, or of a loop of a running one: names that it has read and stored so far."""

    def __init__(self, depth: int, *, resets: bool) -> None:
        self.depth, self.resets = depth, resets
        self.read: set[str] = set()
        self.stored: set[str] = set()


class _Reader(ast.NodeVisitor):
    def __init__(self, waits: bool, of_loops: bool) -> None:
        self._waits, self._of_loops, self.is_readable = waits, of_loops, False
        self.keeps, self.stored, self.set_by_steps, self.set_to, self.set_again = (set[str]() for _ in range(5))
        self.decides, self.ends, self.returned, self.read_after, self.read_names = (set[str]() for _ in range(5))
        self.called, self.filled_once, self.cleared, self.logged, self.made = (set[str]() for _ in range(5))
        self.made_once, self.set_freely, self.properties, self.of_clocks = (set[str]() for _ in range(4))
        self.flows: dict[str, set[str]] = collections.defaultdict(set)
        self.set_in: dict[str, set[str]] = collections.defaultdict(set)
        self.taken_in: dict[str, set[str]] = collections.defaultdict(set)  # "" for those that set it in another way
        self.called_by: dict[str, set[str]] = collections.defaultdict(set)  # as in set_in()
        # by name: the constant it is reset to, the function that does it, and whether unconditionally
        self.resets: dict[str, set[tuple[str, str | None, bool]]] = collections.defaultdict(set)
        # by function name: its events in order; by "on <evaluation>": those of the hooks from its start to its end
        self.runs: dict[str, set[tuple[_Event, ...]]] = collections.defaultdict(set)
        # by function name: names that it stores values computed from its variables in, and names passed to it
        self._from_variables: dict[str, set[str]] = collections.defaultdict(set)
        self._given: dict[str, set[str]] = collections.defaultdict(set)
        self._functions: list[tuple[str, set[str]]] = []
        self._running = frozenset[tuple[str, int]]()
        # the visitor's current place, changed by _within alone
        self._scopes = [_Scope(0, resets=False)]
        self._is_running = self._in_class = False
        self._depth = self._loops = 0
        self._periods = 0  # how many of the enclosing conditions ask for the step or epoch
        self._into: set[str] | None = self.decides
        self._is_none: str | None = None  # the name that an enclosing condition tests for None
        self._property: str | None = None  # the property that this function computes
        self._methods: dict[str, tuple[_Event, ...]] = {}  # those of the enclosing class
        self._when = frozenset[str]()  # the enclosing conditions
        self._events = list[_Event]()

    def add(self, other: _Reader) -> None:
        """Add what another reader has found in its files."""
        self.is_readable |= other.is_readable
        for name, found in vars(other).items():
            if name.startswith("_"):
                continue
            if isinstance(found, set):
                vars(self)[name] |= found
            elif isinstance(found, dict):
                for key, values in found.items():
                    vars(self)[name][key] |= values

    def read(self, tree: ast.Module, running: frozenset[tuple[str, int]]) -> None:
        self.is_readable |= bool(tree.body)
        self._running, self._is_running = running, any(name == "<module>" for name, _ in running)
        self._scopes = [_Scope(0, resets=False)]
        self._into = self.read_after if self._waits and self._is_running else self.decides
        self.visit(tree)
        self.runs["<module>"].add(_under_way(self._events))
        for function, names in self._from_variables.items():
            is_set = f".{function}" in self.keeps  # through a property
            self.keeps |= names if is_set else names & self._given[function]

    # ---- names -------------------------------------------------------------------------------------------------------

    def _variable(self, name: str) -> str:
        if self._in_class:
            return f".{name}"
        for function, local in reversed(self._functions):
            if name in local:
                return f"{function}:{name}"
        return f":{name}"

    def _name(self, node: ast.AST | None) -> str | None:
        if isinstance(node, ast.Name):
            return self._variable(node.id)
        if isinstance(node, ast.Attribute):
            return f".{node.attr}"
        if not isinstance(node, ast.Subscript):
            return None
        name, key = self._name(node.value), _key(node)
        return name if name is None or key is None else f"{name}[{key}]"

    def _goes_to(self, target: ast.AST) -> str | None:
        """Return the name under which an assignment is tracked; None if the target may belong to other code."""
        if isinstance(target, ast.Name):
            return self._name(target)
        owner = getattr(target, "value", None)
        if isinstance(target, ast.Attribute):
            return self._name(target) if isinstance(owner, ast.Name) and owner.id in ("self", "cls") else None
        if not isinstance(target, ast.Subscript) or self._name(owner) not in self.made:
            return None
        return self._name(target)

    # ---- events ------------------------------------------------------------------------------------------------------

    def _reads(self, name: str | None) -> None:
        if name is None:
            return
        self.read_names.add(name)
        self._events.append(_Event("read", name, self._when))
        for scope in self._scopes:
            if name not in scope.stored:
                scope.read.add(name)
        if self._into is not None:
            self._into.add(name)

    def _stores(self, name: str | None, value: ast.AST | None, *, updates: bool = False) -> None:
        if name is None:
            return
        self.stored.add(name)
        if updates or value is not None:
            self._events.append(_Event("read" if updates else "set", name, self._when))
        inner = self._scopes[-1]
        is_sure = self._depth == inner.depth
        for scope in self._scopes:
            if name not in scope.stored and (updates or name in scope.read or self._depth != scope.depth):
                self.keeps.add(name)
            if self._depth == scope.depth:
                scope.stored.add(name)
        if not updates and (self._depth or self._loops):
            self.set_again.add(name)
        if name == self._is_none:
            self.made_once.add(name)
        elif self._functions and self._functions[-1][0].partition(":")[0] not in _AT_START:
            self.set_freely |= set() if isinstance(value, ast.Constant) and value.value is None else {name}
        calls = (one.func for one in ast.walk(value) if isinstance(one, ast.Call)) if value is not None else ()
        if any(getattr(one, "attr", getattr(one, "id", "")) in _CLOCKS for one in calls):
            self.of_clocks.add(name)
        if inner.resets:
            self.set_by_steps.add(name)
        if self._functions and is_sure and not updates and name not in inner.read:
            self.set_in[name].add(self._functions[-1][0].partition(":")[0])
        if value is not None and self._functions:
            storing, local = self._functions[-1]
            if any(isinstance(part, ast.Name) and part.id in local - {"self"} for part in ast.walk(value)):
                self._from_variables[storing.partition(":")[0]].add(name)
        literal = None if updates or value is None else _literal(value)
        if self._functions and literal is None and (by := self._functions[-1][0].partition(":")[0]) not in _AT_START:
            is_taken = is_sure and not updates and value is not None and _is_of_others(value, name)
            self.taken_in[name].add(by if is_taken else "")
        is_made = not updates and literal is None and isinstance(value, ast.Call)
        if inner.resets and (literal is not None or is_made):
            self.set_to |= {name} if literal is not None else set()
            is_outside = self._is_running or not self._functions
            function = None if is_outside else self._functions[-1][0].partition(":")[0]
            self.resets[name].add((literal or _MADE, function, is_sure))

    @contextlib.contextmanager
    def _within(self, **place: Any) -> Iterator[None]:
        kept = {name: getattr(self, name) for name in place}
        vars(self).update(place)
        try:
            yield
        finally:
            vars(self).update(kept)

    def _reading(self, into: set[str] | None) -> contextlib.AbstractContextManager[None]:
        # inside an expression that only prints or logs, everything is only printed or logged
        return self._within(_into=into if self._into is not None else None)

    def _flow(self, names: set[str], targets: set[str]) -> None:
        for name in names:
            self.flows[name] |= targets - {name}

    def _all(self, nodes: list[Any], *, conditional: bool = False) -> None:
        with self._within(_depth=self._depth + conditional):
            for node in nodes:
                self.visit(node)

    # ---- expressions -------------------------------------------------------------------------------------------------

    def visit_Name(self, node: ast.Name | ast.Attribute) -> None:
        if isinstance(node.ctx, ast.Load):
            self._reads(self._name(node))
        else:
            self._stores(self._name(node), None)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.visit_Name(node)
        is_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        with self._reading(None if is_self else self._into):  # its owner
            self.visit(node.value)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if isinstance(node.ctx, ast.Load):
            if _key(node) is not None:
                self._reads(self._name(node))
            self.visit(node.value)
        else:
            self._stores(self._name(node), None, updates=_key(node) is None)
        self.visit(node.slice)

    def visit_Call(self, node: ast.Call) -> None:
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        owner = self._name(node.func.value) if isinstance(node.func, ast.Attribute) else None
        if not self._functions or self._functions[-1][0].partition(":")[0] not in _AT_START:
            self.called.add(called)
        self._given[called] |= {str(self._name(part)) for one in [*node.args, *node.keywords] for part in ast.walk(one)}
        of = {"setdefault": self.filled_once, "cache_clear": self.cleared}.get(called)
        if of is not None:
            of.add(str(owner))
        on = getattr(node.func, "value", None)
        is_own = getattr(on, "id", getattr(getattr(on, "value", None), "id", "")) == "self"  # self.f() or self.x.f()
        if is_own and self._functions and self._depth - self._periods == self._scopes[-1].depth:
            self.called_by[called].add(self._functions[-1][0].partition(":")[0])
        changes = owner is not None and (called in _CHANGES or called.endswith("_"))
        with self._reading(None if owner is not None else self._into):
            if isinstance(node.func, ast.Attribute):
                self.visit(node.func.value)
            elif not isinstance(node.func, ast.Name):
                self.visit(node.func)
        found = set[str]()
        logs = self._logs(node)
        tells = bool(_TELLS.fullmatch(called)) or logs
        into = self.logged if logs else None if tells else found if changes and owner in self.made else self._into
        if into is self._into is not self.read_after and called.endswith("_"):
            into = self.decides  # a method that ends with "_" changes its object, whatever its result is used for
        with self._reading(into):
            self._all([*node.args, *node.keywords])
        is_of_base = isinstance(on, ast.Call) and getattr(on.func, "id", "") == "super"  # a base class's method
        self._events.append(_Event("of a base" if is_of_base else "call", called, self._when))
        if owner is None:
            return
        self._flow(found, {owner})
        key = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
        if called == "get" and isinstance(key, str):
            self._reads(f"{owner}[{key}]")
        if called in _EMPTIES:
            self._stores(owner, node.func)
        elif called in ("fill", "fill_") and len(node.args) == 1 and _literal(node.args[0]) is not None:
            self._stores(owner, node.args[0])
        elif changes:
            self._stores(owner, None, updates=True)
        elif called == "reset":
            self._stores(owner, None)
        elif not tells and self._into is not None:
            self._into.add(owner)  # calling any other method uses the object

    def _logs(self, node: ast.AST) -> bool:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            return False
        if node.func.attr == "log":
            return bool(node.args) and (_makes(node.args[0]) or self._name(node.args[0]) in self.made)
        return bool(_LOGS.fullmatch(node.func.attr))

    def visit_BinOp(self, node: ast.BinOp) -> None:
        parts = _summands(node) if self._of_loops else []
        is_moved = sum(not isinstance(one, ast.Constant) for one in parts) > 1
        for one in parts if is_moved else ast.iter_child_nodes(node):
            with self._reading(None if is_moved and isinstance(one, ast.Name) else self._into):
                self.visit(one)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        with self._reading(self.decides):  # its caller gets the value, and may use it for anything
            self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        with self._reading(None):
            self.generic_visit(node)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self._assigns([node.target], node.value)
        self._reads(self._name(node.target))

    # ---- statements --------------------------------------------------------------------------------------------------

    def visit_Assign(self, node: ast.Assign) -> None:
        self._assigns(node.targets, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._assigns([node.target], node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._assigns([node.target], node.value, updates=True)

    def _assigns(self, targets: list[Any], value: Any, *, updates: bool = False) -> None:
        flat = [part for target in targets for part in (target.elts if hasattr(target, "elts") else [target])]
        values = value.elts if len(getattr(value, "elts", ())) == len(flat) > 1 else [value] * len(flat)
        for target, one in zip(flat, values, strict=True):
            if _makes(one):
                self.made.add(str(self._name(target)))
            into, found = self._goes_to(target), set[str]()
            with self._reading(self.decides if into is None else found):
                self.visit(one)
            if into is not None:
                self._flow(found, {into})
        for target, one in zip(flat, values, strict=True):
            index = target.slice if isinstance(target, ast.Subscript) else None
            with self._reading(None):
                for child in ast.iter_child_nodes(target):
                    if child is not index and not isinstance(child, ast.expr_context):
                        self.visit(child)
            if index is not None:  # the index decides which item changes
                into, found = self._goes_to(target), set[str]()
                with self._reading(self.decides if into is None else found):
                    self.visit(index)
                self._flow(found, set() if into is None else {into})
            is_part = isinstance(target, ast.Subscript) and _key(target) is None and not _is_emptied(target, one)
            if not (is_part and not updates):
                self._stores(self._name(target), one, updates=updates)
            elif (name := self._name(target)) is not None:
                # assigning an item depends on the previous contents if the assigned value does
                reads = {self._name(part) for part in ast.walk(one)}
                self._stores(name, None, updates=name in reads)

    def visit_Assert(self, node: ast.Assert) -> None:
        with self._reading(None):
            self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        is_bare = isinstance(node.value, (ast.Name, ast.Attribute, ast.Tuple, ast.Dict))
        found = set[str]()
        with self._reading(found if self._property else self.returned if is_bare else self.decides):
            self.generic_visit(node)
        self._flow(found, {str(self._property)})

    def visit_Delete(self, node: ast.Delete) -> None:
        """Ignore the statement: the variable ends there."""

    def visit_If(self, node: ast.If) -> None:
        test = node.test.ops[0] if isinstance(node.test, ast.Compare) else None
        if isinstance(test, ast.NotIn) or (isinstance(test, ast.In) and isinstance(node.body[-1], ast.Return)):
            self.filled_once.add(str(self._name(node.test.comparators[0])))  # type: ignore[attr-defined]
        into, targets = self._if_only_sets(node.body + node.orelse)
        if self._property and into is self.ends:  # the condition decides the property's value
            into, targets = None, targets | {self._property}
        found = set[str]()
        with self._reading(found if targets else into):
            self.visit(node.test)
        self._flow(found, targets)
        if targets and into is not None and self._into is not None:
            into |= found
        asks_for_none = self._asks_for_none(node.test) or self._is_none
        condition = ast.dump(node.test)
        with self._within(_periods=self._periods + _asks_for_step(node.test)):
            with self._within(_is_none=asks_for_none, _when=self._when | {condition}):
                self._all(node.body, conditional=True)
            with self._within(_when=self._when | {f"not {condition}"}):
                self._all(node.orelse, conditional=True)
        for body, others in ((node.body, f"not {condition}"), (node.orelse, condition)):
            if any(isinstance(part, ast.Return) for one in body for part in ast.walk(one)):
                self._when |= {others}  # for the rest of the function

    def _perhaps(self, nodes: list[Any]) -> None:
        with self._within(
            _when=self._when | {f"line {nodes[0].lineno}:{nodes[0].col_offset}"} if nodes else self._when
        ):
            self._all(nodes)

    def visit_Try(self, node: Any) -> None:
        self._perhaps(node.body) if node.handlers else self._all(node.body)
        for handler in node.handlers:
            self._perhaps([handler])
        self._perhaps(node.orelse)
        self._all(node.finalbody)

    visit_TryStar = visit_Try  # noqa: N815

    def visit_With(self, node: Any) -> None:
        self._all(node.items)
        self._perhaps(node.body) if "suppress" in ast.dump(node.items[0]) else self._all(node.body)

    def visit_Match(self, node: ast.Match) -> None:
        self.visit(node.subject)
        for case in node.cases:
            self.visit(case.pattern)
            self._perhaps([*([case.guard] if case.guard else []), *case.body])

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.visit(node.values[0])
        self._perhaps(node.values[1:])

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.visit(node.test)
        self._perhaps([node.body])
        self._perhaps([node.orelse])

    def _asks_for_none(self, test: ast.expr) -> str | None:
        """Return the name that a condition tests for None or ``not hasattr``; None for any other condition."""
        if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Is) and len(test.ops) == 1:
            other = test.comparators[0]
            return self._name(test.left) if isinstance(other, ast.Constant) and other.value is None else None
        called = test.operand if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not) else None
        if isinstance(called, ast.Call) and getattr(called.func, "id", "") == "hasattr" and len(called.args) > 1:
            return f".{getattr(called.args[1], 'value', None)}"
        return None

    def _if_only_sets(self, body: list[ast.stmt]) -> tuple[set[str] | None, set[str]]:
        """Return the set to add an ``if`` condition's names to, and the names that its body sets if it does no more."""
        targets: set[str] = set()
        kinds = set[str]()
        for one in body:
            parts: list[Any] = one.targets if isinstance(one, ast.Assign) else []
            parts = [one.target] if isinstance(one, (ast.AugAssign, ast.AnnAssign)) else parts
            flat = [part for target in parts for part in getattr(target, "elts", [target])]
            names = {self._goes_to(part) for part in flat} or self._changed(one)
            tells = self._logs(getattr(one, "value", one))
            kinds.add("sets" if names and None not in names else "tells" if tells else _kind(one, self._of_loops))
            targets |= {name for name in names if name is not None}
        if "does" in kinds or {"ends", "sets"} <= kinds:
            return self._into, set()
        # a value that decides whether to save (only the best) changes which checkpoints exist
        is_end = kinds & ({"ends"} if self._of_loops else {"ends", "saves"})
        return (self.ends if is_end else None), targets if "sets" in kinds else set()

    def _changed(self, node: ast.stmt) -> set[str | None]:
        """Return the container that a statement only adds to or removes from; an empty set for other statements."""
        call = node.value if isinstance(node, ast.Expr) else None
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or call.func.attr not in _CHANGES:
            return set()
        parts = [part for one in [*call.args, *call.keywords] for part in ast.walk(one)]
        name = self._goes_to(call.func.value)
        return {name} if name in self.made and not any(isinstance(part, ast.Call) for part in parts) else set()

    def visit_While(self, node: ast.While) -> None:
        found, changed = set[str](), [self._changed(one) for one in node.body]
        with self._loop(node.lineno):
            with self._reading(found if all(changed) else self.ends):  # it may decide the length of a container
                self.visit(node.test)
            self._flow(found, {str(name) for names in changed for name in names})
            self._all(node.body + node.orelse)

    def visit_For(self, node: Any) -> None:
        self.visit(node.iter)
        with self._loop(node.lineno):
            self.visit(node.target)
            self._all(node.body + node.orelse)

    visit_AsyncFor = visit_For  # noqa: N815

    def _loop(self, line: int) -> contextlib.AbstractContextManager[None]:
        inner = [_Scope(self._depth, resets=True)] if self._is_running else []
        when = self._when | {f"loop {line}"}
        return self._within(_loops=self._loops + 1, _scopes=[*self._scopes, *inner], _when=when)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        with self._within(_in_class=True, _methods={}):
            self._all(node.body)
            for name in _EVALUATIONS:
                parts = (f"on_{name}\\w*_{end}" for end in ("start", "end"))
                hooks = (run for part in parts for m, run in self._methods.items() if re.fullmatch(part, m))
                self.runs[f"on {name}"].add(tuple(one for run in hooks for one in run))

    def visit_FunctionDef(self, node: Any) -> None:
        line = min([node.lineno, *(one.lineno for one in node.decorator_list)])
        is_running = (node.name, line) in self._running
        into = self.read_after if self._waits and is_running else self.decides
        self._functions.append((f"{node.name}:{line}", _local_to(node)))
        decorators = {getattr(one, "attr", getattr(one, "id", "")) for one in node.decorator_list}
        of = f".{node.name}" if decorators & {"property", "cached_property"} else None
        self.properties |= {of} if of else set()
        with self._within(
            _property=of,
            _is_running=is_running,
            _in_class=False,
            _depth=0,
            _periods=0,
            _loops=0,
            _into=None if node.name in _TELLING else into,
            _when=frozenset(),
            _events=[],
            _scopes=[_Scope(0, resets=node.name not in _AT_START and not is_running)],
        ):
            self._all(node.body)
            self._methods[node.name] = (_under_way if is_running else tuple)(self._events)
            self.runs[node.name].add(self._methods[node.name])
        self._functions.pop()

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815


@functools.lru_cache(maxsize=64)
def _read(text: str, running: frozenset[tuple[str, int]], waits: bool, of_loops: bool, made: frozenset[str]) -> _Reader:
    """Analyze a file once for all saves with the same running functions; ``made``: containers made in earlier files."""
    reader = _Reader(waits, of_loops)
    reader.made |= made
    reader.read(ast.parse(text), running)
    return reader


def _local_to(function: Any) -> set[str]:
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    found, others = {one.arg for one in every if one is not None}, set[str]()
    ahead = list(function.body)
    while ahead:
        node = ahead.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
            continue
        if isinstance(node, (ast.Global, ast.Nonlocal)):
            others |= set(node.names)
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            found.add(node.id)
        ahead += ast.iter_child_nodes(node)
    return found - others


def _asks_for_step(test: ast.expr) -> bool:
    return any(getattr(part, "attr", getattr(part, "id", "")) in _WHEN for part in ast.walk(test))


def _is_of_others(value: ast.AST, name: str) -> bool:
    """Return whether a value is computed from attributes of ``self`` alone, and not from attribute ``name``."""
    parts = list(ast.walk(value))
    names = {part.id for part in parts if isinstance(part, ast.Name)}
    return names == {"self"} and not any(f".{part.attr}" == name for part in parts if isinstance(part, ast.Attribute))


def _summands(node: ast.AST) -> list[ast.AST]:
    is_sum = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)
    return [*_summands(node.left), *_summands(node.right)] if is_sum else [node]  # type: ignore[attr-defined]


def _key(node: Any) -> str | None:
    key = node.slice.value if isinstance(node.slice, ast.Constant) else None
    return key if isinstance(key, str) else None


def _makes(node: ast.AST) -> bool:
    """Return whether an expression creates a container."""
    called = getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""
    called = getattr(getattr(getattr(node, "func", None), "value", None), "id", called)  # of list[float]()
    return isinstance(node, (ast.Dict, ast.List, ast.Set)) or called in _MAKES


def _literal(node: ast.AST) -> str | None:
    """Return the mark of a literal, ``_ANY`` for another constant expression; None if it depends on variables."""
    with contextlib.suppress(ValueError, TypeError, SyntaxError):
        return mark(ast.literal_eval(node))
    if isinstance(node, ast.Attribute) and node.attr in _EMPTIES:
        return _ANY
    if isinstance(node, ast.Call):
        where = [one for one in node.keywords if one.arg in ("device", "dtype")]
        parts = [node.func, *node.args, *(one for one in node.keywords if one not in where)]
        node = ast.List(parts, ast.Load())  # type: ignore[arg-type]
    names = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
    return _ANY if names <= _CONSTANTS else None


def _is_emptied(target: ast.Subscript, value: ast.AST) -> bool:
    """Return whether an assignment sets all items (``x[:] = 0``) to a constant."""
    index = target.slice
    is_whole = isinstance(index, ast.Slice) and index.lower is index.upper is index.step is None
    return is_whole and _literal(value) is not None


def _fingerprints(mark: str) -> set[str]:
    """Return the fingerprints of the number in a mark, also as int and float, or that of None; else an empty set."""
    with contextlib.suppress(ValueError, SyntaxError, OverflowError):
        number = ast.literal_eval(mark)
        if number is None:
            return {fingerprint(None)}
        if isinstance(number, (bool, int, float)):
            return {fingerprint(number), fingerprint(float(number)), fingerprint(int(number))}
    return set()


def _kind(node: ast.AST, of_loops: bool) -> str:
    if isinstance(node, (ast.Break, ast.Return, ast.Raise, ast.Continue)):
        return "ends"
    if isinstance(node, ast.Pass):
        return "tells"
    if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        return "does"
    called = getattr(node.value.func, "attr", getattr(node.value.func, "id", ""))
    if "save" in called:
        return "saves"
    if of_loops and called in ("wait_for_everyone", "barrier"):  # called before a save
        return "tells"
    return "tells" if _TELLS.fullmatch(called) else "ends" if called == "exit" else "does"


# ---- liveness --------------------------------------------------------------------------------------------------------


def is_live(name: str, frame: types.FrameType) -> bool:
    """Return whether a variable may be read after the frame's current instruction, before it is next written.

    If the frame is waiting for the next item of a loop, the loop is assumed to have one.
    """
    return _is_live(name, frame.f_code, frame.f_lasti)


def is_surely_live(name: str, frame: types.FrameType, *, ends: bool) -> bool:
    """Return what :func:`is_live` does, and False for a variable that other functions may write.

    With ``ends``, the innermost running ``for`` is assumed to be exhausted, and the one around it to take its next
    item. Without two nested loops, the result is False.
    """
    return not _is_shared(name, frame.f_code) and _is_live(name, frame.f_code, frame.f_lasti, ends=ends)


def counts_of_loops(frame: types.FrameType) -> list[str] | None:
    """Return the counter that the innermost running ``for`` unpacks first, as of ``enumerate``, if its body reads it.

    None if no loop is running.
    """
    steps = _steps(frame.f_code)
    loops = [(start, step.then[0]) for start, step in steps.items() if step.is_loop]
    start, end = max(((start, end) for start, end in loops if start <= frame.f_lasti < end), default=(0, 0))
    body = [step for offset, step in steps.items() if start < offset < end]
    if not body:
        return None
    if body[0].effects:  # the first instruction stores a variable instead of unpacking
        return []
    names = [name for name, is_read in body[1].effects[:1] if not is_read]
    return [name for name in names if any((name, True) in step.effects for step in body)]


def _is_shared(name: str, code: types.CodeType) -> bool:
    """Return whether other functions may read and write a variable."""
    if name in code.co_cellvars or name in code.co_freevars:
        return True
    return code.co_name == "<module>" and any(name in one.co_names for one in codes_in(code) if one is not code)


@functools.lru_cache(maxsize=4096)
def _is_live(name: str, code: types.CodeType, last: int, *, ends: bool = False) -> bool:
    if _is_shared(name, code):
        return True
    steps = _steps(code)
    # the offset may lie after the instruction, in its inline cache
    last = max(offset for offset in steps if offset <= last)
    here = steps[last]
    if ends:
        around = [step for offset, step in steps.items() if step.is_loop and offset <= last < step.then[0]]
        ahead = around[-2].then[-1:] if len(around) > 1 else []
    else:
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
    """A bytecode instruction: variables that it reads (True) or writes (False), offsets that may follow, if a loop."""

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
        # LOAD_FAST_AND_CLEAR only saves a variable, which is put back after the comprehension
        if {"FAST", "NAME"} & set(parts) and parts[0] in ("LOAD", "STORE", "DELETE") and "CLEAR" not in parts:
            does = [part == "LOAD" for part in parts if part in ("LOAD", "STORE", "DELETE")]
            names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
            effects = list(zip(names, does, strict=False))
        found[step.offset] = _Step(effects, then, step.opname == "FOR_ITER")
    return found
