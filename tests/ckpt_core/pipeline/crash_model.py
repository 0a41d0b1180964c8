"""What a disk may hold after a crash, as in ALICE and CrashMonkey: any reordering of what was not synced.

:class:`Recorder` records the operations on a directory tree. From the record, :func:`crash_states` makes the trees that
the disk may hold after a power failure at any moment:

* bytes written to a file are certain once the file was synced afterwards; before, each block may be there or not;
* a name (made, removed, renamed, exchanged, linked) is certain once its directory was synced afterwards; before, each
  change may be there or not, whatever became of the others. One rename is one change, of both its names.

The model does not rely on what one filesystem happens to do: neither that names change in order, nor that syncing a new
file makes its name durable, too.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ckpt_core.storage import local_directory

BLOCK = 4096
MOST_COMPLETE = 6  # up to this many uncertain changes, all subsets are tried; of more, chosen ones
SAMPLES = 24

#: Relative path -> content; None for a directory.
Tree = dict[str, bytes | None]


class Node:
    """A file or directory, under whatever names."""

    def __init__(self, *, is_directory: bool) -> None:
        self.is_directory = is_directory


@dataclasses.dataclass(frozen=True)
class Operation:
    """One change, or one sync.

    Attributes:
        name: Name of the system call.
        node: The file or directory that is written or synced.
        offset: Where ``data`` is written, or the size that a file is truncated to.
        data: The bytes that are written.
        entries: Names that change: (directory, name) -> the node from now on; None if it is removed.
    """

    name: str
    node: Node | None = None
    offset: int = 0
    data: bytes | None = None
    entries: tuple[tuple[tuple[Node, str], Node | None], ...] = ()


class Recorder:
    """Records every change of a directory tree.

    Args:
        root: The directory; what it holds now counts as durable.
        patch: Installs the recording, and undoes it.
    """

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.operations: list[Operation] = []
        self.root = Node(is_directory=True)
        self._path = os.path.abspath(root)
        self._lock = threading.RLock()  # operations are recorded in the order in which they happen on the disk
        self._children: dict[Node, dict[str, Node]] = {self.root: {}}
        self._descriptors: dict[int, Node] = {}
        for folder, folders, files in os.walk(root):
            for name in folders + files:
                self._node_at(os.path.join(folder, name), adopt=True)
        self._count_at_start = len(self.operations)
        for name in (
            "open",
            "close",
            "pwrite",
            "ftruncate",
            "fsync",
            "mkdir",
            "rmdir",
            "unlink",
            "rename",
            "replace",
            "link",
        ):
            patch.setattr(os, name, self._wrapped(getattr(os, name), getattr(self, f"_{name}")))
        patch.setattr(local_directory, "_exchange", self._wrapped(local_directory._exchange, self._exchange))

    def _wrapped(self, real: Callable[..., Any], record: Callable[..., None]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            with self._lock:
                result = real(*args, **options)
                record(result, *args)
                return result

        return call

    # ---- which node is meant -----------------------------------------------------------------------------------------

    def _place(self, path: Any) -> tuple[Node, str] | None:
        """Return the directory and the name that a path in the tree consists of; None for a path outside the tree."""
        full = os.path.abspath(os.fspath(path))
        if not full.startswith(self._path + os.sep):
            return None
        parent, name = os.path.split(full)
        directory = self.root if parent == self._path else self._node_at(parent, adopt=True)
        return None if directory is None else (directory, name)

    def _node_at(self, path: Any, *, adopt: bool = False) -> Node | None:
        if os.path.abspath(os.fspath(path)) == self._path:
            return self.root
        place = self._place(path)
        if place is None:
            return None
        node = self._children[place[0]].get(place[1])
        if node is None and adopt and os.path.lexists(path):
            node = self._adopt(path, place)
        return node

    def _adopt(self, path: Any, place: tuple[Node, str]) -> Node:
        """Record a node that was made by functions that are not recorded; nothing of it is certain."""
        node = Node(is_directory=os.path.isdir(path))
        if node.is_directory:
            self._children[node] = {}
        else:
            self.operations.append(Operation("write", node, 0, Path(path).read_bytes()))
        self._change("made", {place: node})
        return node

    def _change(self, name: str, entries: dict[tuple[Node, str], Node | None]) -> None:
        for (directory, entry), node in entries.items():
            if node is None:
                self._children[directory].pop(entry, None)
            else:
                self._children[directory][entry] = node
        self.operations.append(Operation(name, entries=tuple(entries.items())))

    # ---- system calls ------------------------------------------------------------------------------------------------

    def _open(self, descriptor: int, path: Any, flags: int = 0, *_: Any) -> None:
        place = self._place(path)
        node = self._node_at(path)
        if node is None and place is not None:
            if flags & os.O_CREAT:
                node = Node(is_directory=False)
                self._change("create", {place: node})
            else:
                node = self._adopt(path, place)
        if node is not None:
            self._descriptors[descriptor] = node

    def _close(self, _: Any, descriptor: int) -> None:
        self._descriptors.pop(descriptor, None)

    def _pwrite(self, count: int, descriptor: int, data: Any, offset: int) -> None:
        node = self._descriptors.get(descriptor)
        if node is not None:
            self.operations.append(Operation("pwrite", node, offset, bytes(memoryview(data)[:count])))

    def _ftruncate(self, _: Any, descriptor: int, size: int) -> None:
        node = self._descriptors.get(descriptor)
        if node is not None:
            self.operations.append(Operation("ftruncate", node, size))

    def _fsync(self, _: Any, descriptor: int) -> None:
        node = self._descriptors.get(descriptor)
        if node is not None:
            self.operations.append(Operation("fsync", node))

    def _mkdir(self, _: Any, path: Any, *__: Any) -> None:
        place = self._place(path)
        if place is not None:
            node = Node(is_directory=True)
            self._children[node] = {}
            self._change("mkdir", {place: node})

    def _rmdir(self, _: Any, path: Any) -> None:
        self._remove("rmdir", path)

    def _unlink(self, _: Any, path: Any) -> None:
        self._remove("unlink", path)

    def _remove(self, name: str, path: Any) -> None:
        place = self._place(path)
        if place is not None:
            self._change(name, {place: None})

    def _rename(self, _: Any, source: Any, target: Any) -> None:
        places = self._place(source), self._place(target)
        assert places[1] is not None
        if places[0] is not None and places[0] != places[1]:
            node = self._children[places[0][0]].get(places[0][1])
            if node is None:  # made by functions that are not recorded
                self._change("rename", {places[1]: self._adopt(target, places[1])})
            else:
                self._change("rename", {places[0]: None, places[1]: node})

    _replace = _rename

    def _link(self, _: Any, source: Any, target: Any) -> None:
        place, node = self._place(target), self._node_at(source, adopt=True)
        assert place is not None
        assert node is not None
        self._change("link", {place: node})

    def _exchange(self, done: bool, one: str, other: str) -> None:
        places = self._place(one), self._place(other)
        if done and places[0] is not None and places[1] is not None:
            nodes = [self._children[directory][name] for directory, name in places]  # type: ignore[misc]
            self._change("exchange", {places[0]: nodes[1], places[1]: nodes[0]})

    # ---- the result --------------------------------------------------------------------------------------------------

    @property
    def begun_with(self) -> int:
        """Return how many of the operations describe what was there at the beginning."""
        return self._count_at_start


def crash_states(recorder: Recorder, rng: random.Random) -> Iterator[tuple[int, Tree]]:
    """Yield the trees that may be found after a crash, each once, with the number of operations begun.

    The trees of all moments after the last operation come with the number of all operations.
    """
    before = recorder.begun_with
    for moment in range(before, len(recorder.operations) + 1):
        seen: set[int] = set()
        for tree in _states_at(recorder, moment, rng):
            identity = hash(frozenset(tree.items()))
            if identity not in seen:
                seen.add(identity)
                yield moment, tree


def _states_at(recorder: Recorder, moment: int, rng: random.Random) -> Iterator[Tree]:
    done = recorder.operations[:moment]
    certain = set(range(recorder.begun_with))
    for index, operation in enumerate(done):
        if operation.name == "fsync":
            certain |= {earlier for earlier in range(index) if _is_of(done[earlier], operation.node)}
    uncertain = [index for index, operation in enumerate(done) if index not in certain and operation.name != "fsync"]
    names = [index for index in uncertain if done[index].entries]
    data = [index for index in uncertain if not done[index].entries]
    for kept in _subsets(names, rng):
        for blocks in ("all", "none", "some") if data else ("all",):
            yield _tree(recorder.root, done, certain | set(kept), set(data), blocks, rng)


def _is_of(operation: Operation, node: Node | None) -> bool:
    """Return whether a sync of ``node`` makes the operation certain."""
    if operation.entries:
        return any(directory is node for (directory, _), _ in operation.entries)
    return operation.node is node


def _subsets(uncertain: Sequence[int], rng: random.Random) -> Iterator[tuple[int, ...]]:
    """Yield which of the uncertain changes happened: all choices, or of many the telling ones and some at random."""
    if len(uncertain) <= MOST_COMPLETE:
        for count in range(len(uncertain) + 1):
            yield from itertools.combinations(uncertain, count)
        return
    yield tuple(uncertain)
    yield ()
    for index in range(len(uncertain)):
        yield (uncertain[index],)
        yield (*uncertain[:index], *uncertain[index + 1 :])
        yield tuple(uncertain[:index])
    for _ in range(SAMPLES):
        yield tuple(index for index in uncertain if rng.random() < 0.5)


def _tree(
    root: Node, done: Sequence[Operation], happened: set[int], data: set[int], blocks: str, rng: random.Random
) -> Tree:
    children: dict[Node, dict[str, Node]] = {}
    contents: dict[Node, bytearray] = {}
    for index, operation in enumerate(done):
        if index in data:
            if blocks != "none":
                _write(contents, operation, rng if blocks == "some" else None)
        elif index not in happened:
            continue
        elif operation.entries:
            for (directory, name), node in operation.entries:
                entries = children.setdefault(directory, {})
                entries.pop(name, None)
                if node is not None:
                    entries[name] = node
        else:
            _write(contents, operation, None)
    found: Tree = {}

    def visit(directory: Node, path: str) -> None:
        for name, node in children.get(directory, {}).items():
            inside = os.path.join(path, name)
            found[inside] = None if node.is_directory else bytes(contents.get(node, b""))
            if node.is_directory:
                visit(node, inside)

    visit(root, "")
    return found


def _write(contents: dict[Node, bytearray], operation: Operation, rng: random.Random | None) -> None:
    """Apply a write or a truncation; with ``rng``, a random part of it."""
    assert operation.node is not None
    content = contents.setdefault(operation.node, bytearray())
    if operation.data is None:
        if rng is None or rng.random() < 0.5:
            del content[operation.offset :]
            content.extend(bytes(operation.offset - len(content)))
        return
    for begin in range(0, len(operation.data), BLOCK):
        if rng is not None and rng.random() < 0.5:
            continue
        piece, at = operation.data[begin : begin + BLOCK], operation.offset + begin
        content.extend(bytes(max(0, at + len(piece) - len(content))))
        content[at : at + len(piece)] = piece


def materialise(tree: Tree, directory: Path) -> None:
    """Fill ``directory``, which is empty, with the content of ``tree``."""
    for path, content in tree.items():
        if content is None:
            (directory / path).mkdir()
        else:
            (directory / path).write_bytes(content)
