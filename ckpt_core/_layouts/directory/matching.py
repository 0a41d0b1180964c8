"""Matches the tensors of a checkpoint with those of the state to restore, and refuses what does not fit."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ckpt_core._layouts.directory.skeleton import identity_of
from ckpt_core._layouts.safetensors import TensorInfo, dtype_name
from ckpt_core._plan import LocalTensor
from ckpt_core.errors import StateMismatchError
from ckpt_core.tree import join_key

_SHOWN = 5  # keys in a message

KeyPath = tuple[Hashable, ...]


LocalView = Callable[[str, torch.Tensor], LocalTensor]


@dataclasses.dataclass(frozen=True, slots=True)
class Reference:
    """A place in the structure of a part that holds a tensor."""

    where: KeyPath  # the keys that lead there
    key: str  # the same path as text
    index: int  # the tensor's number
    is_array: bool  # whether the tensor is the memory of a NumPy array


@dataclasses.dataclass(frozen=True, slots=True)
class Match:
    """A tensor of the checkpoint, and the tensor that it is loaded into."""

    key: str  # its name
    index: int  # its number in the checkpoint's part
    target: torch.Tensor | None  # the tensor to fill; None if a new one has to be made


def tensor_paths(tree: Any, kind: type) -> Iterator[tuple[KeyPath, Any]]:
    """Yield ``(path, leaf)``, in order, for each leaf of type ``kind`` in dictionaries and sequences of ``tree``."""
    if isinstance(tree, kind):
        yield (), tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            for path, leaf in tensor_paths(value, kind):
                yield (key, *path), leaf
    elif isinstance(tree, (list, tuple, deque)):
        for index, value in enumerate(tree):
            for path, leaf in tensor_paths(value, kind):
                yield (index, *path), leaf


def key_of(path: KeyPath) -> str:
    """Return a path as text: ``"layer.0.weight"``."""
    text = ""
    for key in path:
        text = join_key(text, key)
    return text


def match(
    saved: Sequence[Reference], infos: Sequence[TensorInfo], into: Any, *, strict: bool, part: str, path: str
) -> list[Match]:
    """Return the target of each reference in a checkpoint's part.

    With ``strict``, raises a ``StateMismatchError`` with the first keys if a tensor is only on one side.
    """
    targets = dict(tensor_paths(into, torch.Tensor))
    empty = [key_of(where) for where, target in targets.items() if _has_no_memory(target)]
    if empty:
        raise StateMismatchError(
            f"{len(empty)} tensors of the target have no memory: they are on the meta device",
            path=path,
            key=empty[0],
            remedy="give them memory first (module.to_empty(device=...)), or load new tensors without into=",
        )
    if strict:
        _refuse_different_keys({r.where for r in saved if not r.is_array}, targets, part, path)
    matches = []
    for reference in saved:
        target = None if reference.is_array else targets.get(reference.where)
        if target is None and not reference.is_array:
            target = infos[reference.index].empty("meta")
        matches.append(Match(reference.key, reference.index, target))
    return matches


def _has_no_memory(tensor: torch.Tensor) -> bool:
    # is_meta raises for a ShardedTensor that has nothing on this rank.
    return type(tensor).__name__ != "ShardedTensor" and tensor.is_meta


def _refuse_different_keys(wanted: set[KeyPath], targets: Mapping[KeyPath, Any], part: str, path: str) -> None:
    missing = sorted(key_of(where) for where in targets.keys() - wanted)
    unexpected = sorted(key_of(where) for where in wanted - targets.keys())
    if not missing and not unexpected:
        return
    found = [
        f"{len(keys)} {what}: {', '.join(keys[:_SHOWN])}{', ...' if len(keys) > _SHOWN else ''}"
        for keys, what in ((missing, "not in the checkpoint"), (unexpected, "only in the checkpoint"))
        if keys
    ]
    raise StateMismatchError(
        f"the checkpoint's part {part!r} has other tensors than the state that it is loaded into; {'; '.join(found)}",
        path=path,
        key=(missing or unexpected)[0],
        remedy="load it into the model and the optimizer that it was saved from, or with strict=False",
    )


def check_fits(fits: Sequence[tuple[str, TensorInfo, LocalTensor]], *, part: str, path: str) -> None:
    """Raise if a target's shape or dtype differs; ``fits`` are ``(name, the checkpoint's tensor, the target)``."""
    wrong = [
        (key, f"{key} is {_text(info)} in the checkpoint and {_text(local)} in the state")
        for key, info, local in fits
        if info.dtype != local.dtype or info.shape != tuple(local.shape)
    ]
    if wrong:
        texts = [text for _, text in wrong[:_SHOWN]] + (["..."] if len(wrong) > _SHOWN else [])
        raise StateMismatchError(
            f"{len(wrong)} tensors of the part {part!r} do not fit: {'; '.join(texts)}",
            path=path,
            key=wrong[0][0],
            remedy="load it into a model of the same sizes and types: nothing is cut, padded or rounded",
        )
    expanded = [key for key, _, local in fits if any(_repeats_elements(piece.tensor) for piece in local.pieces)]
    if expanded:
        raise StateMismatchError(
            f"{len(expanded)} tensors of the target have several elements in one place of memory (expand)",
            path=path,
            key=expanded[0],
            remedy="clone() them first, or load new tensors without into=",
        )


def _repeats_elements(tensor: torch.Tensor) -> bool:
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _text(tensor: TensorInfo | LocalTensor) -> str:
    return f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"


def unique_targets(matches: Sequence[Match]) -> list[Match]:
    """Return the matches that have a target, each target once; if tied targets have two matches, the last one wins."""
    found: dict[Hashable, Match] = {}
    for entry in matches:
        if entry.target is not None and not _has_no_memory(entry.target):
            found[identity_of(entry.target)] = entry
    return list(found.values())
