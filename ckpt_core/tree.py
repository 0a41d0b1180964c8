"""Walk a nested state: yield its leaves or its tensors, each with a readable dotted name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ckpt_core.errors import SerializationError

_SMALL = 8  # values
_PLAIN = (int, float, str, type(None))
_MOST_REPEATS = 10**6
PLAIN_TYPES = frozenset((int, float, str, bytes, bool, type(None)))  # types of values that contain no others


class Repeats:
    """Counts how often containers of a state occur again, for walks that visit each occurrence.

    If a list holds the same list twice, which holds a third list twice, and so on, each level doubles the occurrences.
    """

    def __init__(self) -> None:
        self._met: set[int] = set()
        self._again = 0

    def meet(self, node: Any, key: str) -> None:
        """Count an occurrence; raise SerializationError after too many repetitions of containers that hold others."""
        if id(node) not in self._met:
            self._met.add(id(node))
            return
        items = node.values() if isinstance(node, Mapping) else node
        if any(isinstance(item, (Mapping, list, tuple)) for item in items):
            self._again += 1
            if self._again > _MOST_REPEATS:
                raise SerializationError(
                    f"the state has the same lists or dictionaries in more than {_MOST_REPEATS:,} places",
                    key=key,
                    remedy="let it have each of them in one place",
                )


def join_key(prefix: str, key: object) -> str:
    """Return the name of a child: ``join_key("state_dict", "layer.weight")`` is ``"state_dict.layer.weight"``."""
    return f"{prefix}.{key}" if prefix else str(key)


def leaves(tree: Any, prefix: str = "", *, repeats: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield ``(name, leaf)`` for everything in ``tree`` that is not a dict, list or tuple, in pickling order.

    The same container object is walked only once, so that cycles end; but a container of few plain values, such as the
    ``betas`` that all groups of an optimizer share, is walked each time. With ``repeats``, only a container inside
    itself is skipped, so that shared lists do not change the names (with the limit of :class:`Repeats`).

    Examples:
        >>> list(leaves({"a": [1, {"b": 2}]}))
        [('a.0', 1), ('a.1.b', 2)]
    """
    seen: set[int] = set()
    met = Repeats()
    stack: list[tuple[int, Iterator[tuple[str, Any]]]] = [(0, iter([(prefix, tree)]))]
    while stack:
        for name, node in stack[-1][1]:
            children = _children(node, name)
            if children is None:
                yield name, node
            elif id(node) not in seen or _is_small(node):
                if repeats:
                    met.meet(node, name)
                seen.add(id(node))
                stack.append((id(node), children))
                break
        else:
            done, _ = stack.pop()
            if repeats:
                seen.discard(done)


def tensor_values(tree: Any) -> Iterator[torch.Tensor]:
    """Yield the same tensors as :func:`tensors`, without names, in a tenth of the time."""
    seen: set[int] = set()
    stack: list[Iterator[Any]] = [iter([tree])]
    while stack:
        for node in stack[-1]:
            if type(node) in PLAIN_TYPES:
                continue
            if isinstance(node, torch.Tensor):
                yield node
            elif isinstance(node, (dict, list, tuple, Mapping)) and id(node) not in seen:
                seen.add(id(node))
                stack.append(iter(node.values()) if isinstance(node, Mapping) else iter(node))
                break
        else:
            stack.pop()


def tensors(tree: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``(name, tensor)`` for every tensor among the leaves of ``tree``."""
    return ((name, leaf) for name, leaf in leaves(tree) if isinstance(leaf, torch.Tensor))


def _is_small(node: Any) -> bool:
    return isinstance(node, (list, tuple)) and len(node) <= _SMALL and all(isinstance(item, _PLAIN) for item in node)


def _children(node: Any, name: str) -> Iterator[tuple[str, Any]] | None:
    if isinstance(node, Mapping):
        return ((join_key(name, key), value) for key, value in node.items())
    if isinstance(node, (list, tuple)):
        return ((join_key(name, index), value) for index, value in enumerate(node))
    return None
