"""Plans which rank writes what: each element once, about the same number of bytes on every rank that holds them.

Ranks that hold the same pieces see the same list of them, so each can compute its own share without communication. The
pieces, in the order of their keys, are laid end to end on a line, which is divided into as many equal shares as there
are ranks. Small pieces are written whole, large ones are cut where a share ends. So N ranks cut at most N - 1 times,
whatever the number of tensors, and a rank writes neighbouring pieces.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ckpt_core._plan.pieces import LocalTensor, Piece
from ckpt_core.geometry import Box, cut_dimension

# Bytes. One more part costs an entry in the manifest, separate digests (one per 128 KiB) and a request to read it; for
# fewer bytes than this, that is more than dividing them saves.
SMALLEST_PART = 256 * 1024
# Larger parts have about 1/16 of the bytes of a rank's share, so that shares are even.
PARTS_OF_A_SHARE = 16
# Bytes. Writing less than a block of the filesystem takes as long as writing a block.
SMALLEST_SHARE = 4096
# Plans kept in the cache: one for each part of a state (model, optimizer, ...).
MOST_PLANS = 16

Entry = tuple[str, torch.dtype, tuple[int, ...], tuple[Box, ...]]
# Holders, and the tensors that they all hold, in the order of keys.
Group = tuple[tuple[int, ...], tuple[Entry, ...]]
Structure = tuple[Group, ...]
# By key: the numbers of the pieces to write, and the box to write of each.
Plan = dict[str, list[tuple[int, Box]]]


class WritePlanCache:
    """Makes plans of what a rank writes, and caches them for states that keep their structure from save to save.

    A plan is reused only for the same keys, types, shapes, pieces, holders and rank, which is all that it depends on:
    another placement, mesh or number of ranks changes the pieces or the holders. Tensors are not kept.

    Attributes:
        misses: Number of plans made, because none was in the cache.
    """

    def __init__(self) -> None:
        self.misses = 0
        self._plans: dict[tuple[Structure, int], Plan] = {}

    def writes_of_rank(self, tensors: Mapping[str, LocalTensor], rank: int) -> dict[str, tuple[Piece, ...]]:
        """Return the pieces that this rank writes; over all ranks, every element is written exactly once.

        Needs no communication: all ranks that hold the same pieces know all that the plan depends on. The pieces are
        live views, in the order of ``tensors``; a tensor without elements is written by one rank, as one empty piece.
        """
        structure = _structure(tensors)
        plan = self._plans.pop((structure, rank), None)
        if plan is None:
            self.misses += 1
            plan = _plan(structure, rank)
            if len(self._plans) == MOST_PLANS:
                del self._plans[next(iter(self._plans))]
        # The plan used last goes to the end; the first one is the next to be removed.
        self._plans[structure, rank] = plan
        return _pieces(tensors, plan)


def _structure(tensors: Mapping[str, LocalTensor]) -> Structure:
    groups: dict[tuple[int, ...], list[Entry]] = {}
    # Holders can be thousands of numbers, and most tensors share one such tuple: it is hashed once.
    known: dict[int, list[Entry]] = {}
    for key in sorted(tensors):
        local = tensors[key]
        if local.pieces:
            group = known.get(id(local.holders))
            if group is None:
                group = known[id(local.holders)] = groups.setdefault(local.holders, [])
            group.append((key, local.dtype, local.shape, tuple([piece.box for piece in local.pieces])))
    return tuple((holders, tuple(entries)) for holders, entries in groups.items())


def _plan(structure: Structure, rank: int) -> Plan:
    plan: Plan = {}
    for holders, entries in structure:
        if holders == (rank,):
            plan.update((key, list(enumerate(boxes))) for key, _, _, boxes in entries)
        else:
            _plan_shared(plan, entries, holders, rank)
    return plan


def _plan_shared(plan: Plan, entries: tuple[Entry, ...], holders: tuple[int, ...], rank: int) -> None:
    total = sum(box.numel * dtype.itemsize for _, dtype, _, boxes in entries for box in boxes)
    writers = min(len(holders), max(1, total // SMALLEST_SHARE))
    position = holders.index(rank)
    # If there are fewer writers than holders, they are spread evenly over the holders, and so over the machines.
    writer = -(-position * writers // len(holders))
    if writer * len(holders) // writers != position:
        return
    share_begin, share_end = total * writer // writers, total * (writer + 1) // writers
    grain = max(SMALLEST_PART, total // writers // PARTS_OF_A_SHARE)
    begin = 0
    for key, dtype, _, boxes in entries:
        for number, box in enumerate(boxes):
            nbytes = box.numel * dtype.itemsize
            if nbytes == 0:
                mine = box if writer == 0 else None
            elif begin < share_end and share_begin < begin + nbytes:
                mine = _between(box, nbytes, share_begin - begin, share_end - begin, grain)
            else:
                mine = None
            if mine is not None:
                plan.setdefault(key, []).append((number, mine))
            begin += nbytes


def _between(box: Box, nbytes: int, begin: int, end: int, grain: int) -> Box | None:
    """Return the parts of the box whose middles are between ``begin`` and ``end`` (in bytes from the box's begin)."""
    parts, dimension = nbytes // grain, 0
    if parts > 1:
        dimension = cut_dimension(box, parts)
        parts = min(parts, box.shape[dimension])
    parts = max(parts, 1)
    # Part p has its middle at (p + 1/2) / parts of the bytes.
    first, last = (min(max(-(-(2 * at * parts - nbytes) // (2 * nbytes)), 0), parts) for at in (begin, end))
    if first == last:
        return None
    if (first, last) == (0, parts):
        return box
    size = box.shape[dimension]
    return box.along(dimension, size * first // parts, size * last // parts)


def _pieces(tensors: Mapping[str, LocalTensor], plan: Plan) -> dict[str, tuple[Piece, ...]]:
    return {
        key: tuple([local.pieces[number].part(box) for number, box in plan[key]])
        for key, local in tensors.items()
        if key in plan
    }
