"""Convert between our names (parts and keys) and DCP's flat list of dotted names for the entries of a state.

DCP (``torch.distributed.checkpoint``) splits a state into entries: it descends into dictionaries, and into lists that
hold a tensor or a dictionary; everything else is one entry, named by its path joined with dots. The first key of the
path becomes our part, if it is a valid name: ``{"model": {"weight": ...}, "step": 3}`` has the part ``model``, and the
part ``root`` for all other entries.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import torch

from ckpt_core._layouts.directory.file_names import check_part_name

ROOT = "root"  # the part whose entries' names do not begin with the part's name
_MOST_GAPS = 1000  # missing items in a list; DCP leaves out only empty dictionaries, so there are few

EntryPath = tuple[str | int, ...]


@dataclasses.dataclass(frozen=True)
class Entry:
    """An entry of a state."""

    path: EntryPath  # its path as DCP has it: dictionary keys as text, positions in lists as numbers
    where: tuple[Hashable, ...]  # the original keys, below the part
    value: Any  # the value at that path


def entry_name(path: EntryPath) -> str:
    """Return DCP's name of an entry: ``"optimizer.state.0.exp_avg"``."""
    return ".".join(map(str, path))


def split_path(path: EntryPath, part: str | None = None) -> tuple[str, EntryPath]:
    """Return the part that an entry belongs to (by default, from its first key), and its path below the part."""
    if part is not None:
        return part, path
    if len(path) > 1 and isinstance(path[0], str) and is_first_key_of_part(path[0]):
        return path[0], path[1:]
    return ROOT, path


def is_first_key_of_part(key: Hashable) -> bool:
    """Return whether entries below a top-level key become a part of that name, rather than entries of ``root``."""
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
    """A dictionary of the tree itself, as opposed to a dictionary that is a value."""


def subtree(values: Mapping[Any, Any]) -> Any:
    """Return nested dictionaries with values at their paths (for an empty path, its value), or raise ValueError."""
    root = _Branch()
    for path, value in values.items():
        if not path:
            return value
        node = root
        for key in path[:-1]:
            node = node.setdefault(key, _Branch())
            if not isinstance(node, _Branch):
                raise ValueError(f"{key!r} is both a value and a dictionary")  # noqa: TRY004 - not a wrong type
        if path[-1] in node:
            raise ValueError(f"{path[-1]!r} is there twice")
        node[path[-1]] = value
    return root


def nested(values: Mapping[EntryPath, Any]) -> Any:
    """Return the nested state with the values at DCP's paths; raise a ``ValueError`` if the paths contradict."""
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
