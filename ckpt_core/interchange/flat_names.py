"""Two ways to name what is in a state: parts and keys here, one flat list of dotted names in DCP.

DCP (``torch.distributed.checkpoint``) takes a state apart into entries: it goes down into dictionaries, and into lists
that hold a tensor or a dictionary; everything else is one entry, named by its path joined with dots. The first key of
the path is our part, where it can be: ``{"model": {"weight": ...}, "step": 3}`` is the part ``model`` and, for what has
no dictionary of its own, the part ``root``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import torch

from ckpt_core._layouts.directory.file_names import check_part_name

ROOT = "root"  # the part whose entries' names do not begin with the part's name
_MOST_GAPS = 1000  # in a list: what DCP leaves out of it is nothing but empty dictionaries

EntryPath = tuple[str | int, ...]


@dataclasses.dataclass(frozen=True)
class Entry:
    """An entry of a state."""

    path: EntryPath  # its path in DCP's words: dictionary keys as text, positions in lists as numbers
    where: tuple[Hashable, ...]  # the keys themselves, below the part
    value: Any  # what is there


def entry_name(path: EntryPath) -> str:
    """Return DCP's name of an entry: ``"optimizer.state.0.exp_avg"``."""
    return ".".join(map(str, path))


def split_path(path: EntryPath, part: str | None = None) -> tuple[str, EntryPath]:
    """Return the part that an entry belongs to (its first key says, if it is not given), and its path there."""
    if part is not None:
        return part, path
    if len(path) > 1 and isinstance(path[0], str) and is_first_key_of_part(path[0]):
        return path[0], path[1:]
    return ROOT, path


def is_first_key_of_part(key: Hashable) -> bool:
    """Return whether what is below a first key of a state becomes a part of that name, and not an entry of ``root``."""
    if not isinstance(key, str) or key == ROOT:
        return False
    try:
        check_part_name(key)
    except ValueError:
        return False
    return True


def entries_of(state: Any, path: EntryPath, where: tuple[Hashable, ...] = ()) -> Iterator[Entry]:
    """Yield the entries that DCP makes of a state of nested dictionaries and lists, which is itself at ``path``."""
    if isinstance(state, Mapping):
        for key, item in state.items():
            yield from entries_of(item, (*path, str(key)), (*where, key))
    elif isinstance(state, list) and _is_branch(state):
        for index, item in enumerate(state):
            yield from entries_of(item, (*path, index), (*where, index))
    else:
        yield Entry(path, where, state)


def _is_branch(value: Any) -> bool:
    if isinstance(value, list):
        return any(isinstance(item, torch.Tensor) or _is_branch(item) for item in value)
    return isinstance(value, Mapping)


class _Branch(dict[Any, Any]):
    """A dictionary that is none of the values."""


def subtree(values: Mapping[Any, Any]) -> Any:
    """Return nested dictionaries that hold values at paths (the value itself at an empty one), where that can be."""
    root = _Branch()
    for path, value in values.items():
        if not path:
            return value
        node = root
        for key in path[:-1]:
            node = node.setdefault(key, _Branch())
            if not isinstance(node, _Branch):
                raise ValueError(f"{key!r} is both a value and a dictionary")  # noqa: TRY004 - of the caller's names
        if path[-1] in node:
            raise ValueError(f"{path[-1]!r} is there twice")
        node[path[-1]] = value
    return root


def nested(values: Mapping[EntryPath, Any]) -> Any:
    """Return the state that has values at paths in DCP's words; or a ``ValueError``."""
    return _with_lists(subtree(values))


def _with_lists(node: Any) -> Any:
    if not isinstance(node, _Branch):
        return node
    items = {key: _with_lists(value) for key, value in node.items()}
    if not items or not all(isinstance(key, int) for key in items):
        return items
    length = max(items) + 1
    if min(items) < 0 or length > len(items) + _MOST_GAPS:
        raise ValueError(f"a list has {len(items)} items, and one at position {max(items)}")
    return [items.get(index) for index in range(length)]
