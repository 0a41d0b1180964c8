"""Which rank writes what: every element once, evenly, and each rank computes its part alone."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from ckpt_core._plan import LocalTensor, Piece, WritePlanCache, local_tensor, slicing
from ckpt_core._plan._torch_private import sharding_of
from ckpt_core._plan.pieces import _MeshView
from ckpt_core.geometry import Box

World = list[dict[str, LocalTensor]]


def writes_of_rank(tensors: dict[str, LocalTensor], rank: int) -> dict[str, tuple[Piece, ...]]:
    return WritePlanCache().writes_of_rank(tensors, rank)  # planned from scratch


@contextmanager
def small_parts() -> Iterator[None]:
    """Let tensors of a few bytes be cut."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slicing, "SMALLEST_PART", 8)
        patch.setattr(slicing, "SMALLEST_SHARE", 4)
        yield


def whole(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(math.prod(shape)).to(dtype).reshape(shape)


def replicated_world(tensors: dict[str, torch.Tensor], ranks: int) -> World:
    return [
        {key: local_tensor(t, key=key, rank=rank, world_size=ranks, replicated=True) for key, t in tensors.items()}
        for rank in range(ranks)
    ]


def add_sharded(world: World, key: str, tensor: torch.Tensor, mesh: np.ndarray, placements: list[Placement]) -> None:
    """Add what ``local_tensor`` returns on each rank for a DTensor, without processes."""
    for rank, tensors in enumerate(world):
        shardings = tuple(sharding_of(placement) for placement in placements)
        share = _MeshView(SimpleNamespace(mesh=torch.tensor(mesh)), rank).share(tuple(tensor.shape), shardings)
        if 0 in tensor.shape:
            pieces = (Piece(Box.whole(tensor.shape), tensor),) if share.holders else ()
        else:
            pieces = tuple(Piece(box, part_of(tensor, box)) for box, _ in share.boxes)
        tensors[key] = LocalTensor(tensor.dtype, tuple(tensor.shape), pieces, share.holders)


def part_of(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(begin, end) for begin, end in zip(box.offset, box.end, strict=True))]


def check_written_once(
    world: World, wholes: dict[str, torch.Tensor], plans: list[dict[str, Any]] | None = None
) -> None:
    """Check that every element is written by one rank, with its value; a tensor without elements by one rank, too."""
    plans = plans or [writes_of_rank(tensors, rank) for rank, tensors in enumerate(world)]
    for key, tensor in wholes.items():
        times = torch.zeros(tensor.shape, dtype=torch.int)
        pieces = [piece for plan in plans for piece in plan.get(key, ())]
        for piece in pieces:
            assert piece.tensor.shape == piece.box.shape
            assert torch.equal(piece.tensor, part_of(tensor, piece.box))
            part_of(times, piece.box).add_(1)
        assert (times == 1).all(), key
        assert len(pieces) == 1 if tensor.numel() == 0 else all(piece.box.numel for piece in pieces)
    assert all(key in wholes and plan[key] for plan in plans for key in plan)


def written_bytes(plan: dict[str, tuple[Piece, ...]]) -> int:
    return sum(piece.tensor.nbytes for pieces in plan.values() for piece in pieces)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[World, dict[str, torch.Tensor]]:
    ranks = draw(st.integers(1, 8))
    order = draw(st.permutations(range(ranks)))
    world: World = [{} for _ in range(ranks)]
    wholes = {}
    for number in range(draw(st.integers(1, 5))):
        key = f"{draw(st.sampled_from('abc'))}.{number}"
        shape = tuple(draw(st.lists(st.integers(0, 9) | st.integers(1, 40), max_size=3)))
        dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.int8]))
        wholes[key] = whole(*shape, dtype=dtype)
        if draw(st.booleans()):
            for rank, tensors in enumerate(world):
                tensors[key] = local_tensor(wholes[key], key=key, rank=rank, world_size=ranks, replicated=True)
            continue
        # A mesh of some or all ranks, ascending along each dimension: the other ranks are not members.
        mesh = draw(st.sampled_from([m for m in MESHES if math.prod(m) <= ranks]))
        members = np.array(order[: math.prod(mesh)]).reshape(mesh)
        for dimension in range(len(mesh)):
            members.sort(axis=dimension)
        dimensions = range(len(shape))
        one = st.just(Replicate())
        if shape:
            one |= st.builds(Shard, st.sampled_from(dimensions))
            one |= st.builds(
                lambda dim, factor: _StridedShard(dim, split_factor=factor), st.sampled_from(dimensions), st.just(2)
            )
        add_sharded(world, key, wholes[key], members, draw(st.lists(one, min_size=len(mesh), max_size=len(mesh))))
    return world, wholes


MESHES = [(1,), (2,), (3,), (5,), (8,), (1, 3), (2, 2), (3, 2), (2, 4), (2, 2, 2), (2, 1, 3)]


@given(worlds())
def test_every_element_is_written_once_on_any_mesh(drawn: tuple[World, dict[str, torch.Tensor]]) -> None:
    world, wholes = drawn
    with small_parts():
        check_written_once(world, wholes)
    check_written_once(world, wholes)


@given(st.lists(st.integers(0, 400), min_size=1, max_size=12), st.integers(1, 9))
def test_replicated_bytes_are_shared_evenly(sizes: list[int], ranks: int) -> None:
    tensors = {f"t{number}": whole(size, dtype=torch.int8) for number, size in enumerate(sizes)}
    with small_parts():
        loads = [
            written_bytes(writes_of_rank(local, rank)) for rank, local in enumerate(replicated_world(tensors, ranks))
        ]
        largest_part = max(slicing.SMALLEST_PART, sum(sizes) / ranks / slicing.PARTS_OF_A_SHARE)
    assert sum(loads) == sum(sizes)
    if sum(sizes) >= 4 * ranks:
        # Half a part too much at either end of the share; a part is up to twice the smallest one, uneven by an eighth.
        assert max(loads) <= sum(sizes) / ranks + 1 + 2 * largest_part * 1.125


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_a_model_is_written_by_all_ranks_alike(ranks: int) -> None:
    tensors = {f"layers.{n}.weight": torch.zeros(300, 256) for n in range(12)} | {"embed": torch.zeros(5000, 256)}
    tensors |= {f"layers.{n}.bias": torch.zeros(256) for n in range(12)}
    plans = [writes_of_rank(local, rank) for rank, local in enumerate(replicated_world(tensors, ranks))]
    check_written_once(replicated_world(tensors, ranks), tensors, plans)
    share = sum(tensor.nbytes for tensor in tensors.values()) / ranks
    assert all(abs(written_bytes(plan) - share) <= slicing.SMALLEST_PART for plan in plans)
    # Few cuts: each rank adds at most one part to the tensors' number.
    assert sum(len(pieces) for plan in plans for pieces in plan.values()) <= len(tensors) + ranks - 1


def test_what_is_smaller_than_a_block_is_not_spread() -> None:
    tensors = {name: torch.zeros(10) for name in "abcdef"}
    plans = [writes_of_rank(local, rank) for rank, local in enumerate(replicated_world(tensors, 4))]
    assert [len(plan) for plan in plans] == [6, 0, 0, 0]


def test_fewer_writers_than_ranks_are_spread_over_them() -> None:
    tensors = {f"t{n}": torch.zeros(1024) for n in range(4)}
    plans = [writes_of_rank(local, rank) for rank, local in enumerate(replicated_world(tensors, 12))]
    assert [rank for rank, plan in enumerate(plans) if plan] == [0, 3, 6, 9]


def test_a_large_tensor_is_cut_in_rows_and_a_flat_one_in_columns() -> None:
    tall, wide = torch.zeros(1001, 1024), torch.zeros(2, 512 * 1024)
    [rows] = writes_of_rank(replicated_world({"x": tall}, 2)[1], 1)["x"]
    assert (rows.box.shape[1], rows.box.end) == (1024, (1001, 1024))
    assert rows.tensor.data_ptr() == tall[rows.box.offset[0]].data_ptr()  # no copy
    [columns] = writes_of_rank(replicated_world({"x": wide}, 3)[1], 1)["x"]
    assert columns.box.shape[0] == 2


def test_what_only_one_rank_has_is_written_whole() -> None:
    big = torch.zeros(2_000_000)
    tensors = {"rng": local_tensor(big, key="rng", rank=3, world_size=4, replicated=False)}
    assert writes_of_rank(tensors, 3)["rng"] == tensors["rng"].pieces


def test_the_order_of_the_state_does_not_matter() -> None:
    tensors = {f"t{n}": torch.zeros(5000 + n) for n in range(20)}
    forth, back = tensors, dict(reversed(tensors.items()))
    for rank in range(4):
        mine = writes_of_rank(replicated_world(forth, 4)[rank], rank)
        assert list(mine) == [key for key in forth if key in mine]
        other = writes_of_rank(replicated_world(back, 4)[rank], rank)
        assert {key: [piece.box for piece in pieces] for key, pieces in other.items()} == {
            key: [piece.box for piece in pieces] for key, pieces in mine.items()
        }


def test_the_work_for_a_tensor_does_not_grow_with_the_number_of_ranks() -> None:
    """Measured in lines run, because timings say little."""
    tensors = {f"t{n}": torch.zeros(1).expand(10_000_000 + n) for n in range(200)}

    def lines_run(ranks: int) -> int:
        count = 0

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal count
            count += event == "line"
            return trace if "/ckpt_core/_plan/" in frame.f_code.co_filename else None

        sys.settrace(trace)
        try:
            local = {k: local_tensor(t, key=k, rank=0, world_size=ranks, replicated=True) for k, t in tensors.items()}
            assert writes_of_rank(local, 0)
        finally:
            sys.settrace(None)
        return count

    few, many = lines_run(8), lines_run(8192)
    assert few > 200  # the counter counts
    assert many <= few


class TestCache:
    def test_a_plan_is_used_again_for_other_tensors_of_the_same_structure(self) -> None:
        cache = WritePlanCache()
        for save in range(3):
            tensors = {"w": torch.full((300_000,), float(save)), "b": torch.full((5,), float(save))}
            local = replicated_world(tensors, 2)[1]
            [planned], [fresh] = cache.writes_of_rank(local, 1)["w"], writes_of_rank(local, 1)["w"]
            assert planned.box == fresh.box
            assert planned.tensor.data_ptr() == fresh.tensor.data_ptr() != tensors["w"].data_ptr()
            assert (planned.tensor == save).all()
        assert cache.misses == 1

    @pytest.mark.parametrize(
        "change", ["key", "dtype", "shape", "world size", "placement", "mesh", "split factor", "rank", "one more"]
    )
    def test_a_changed_structure_is_planned_again(self, change: str) -> None:
        def made(changed: str = "") -> tuple[dict[str, LocalTensor], int]:
            rank = 2 if changed == "rank" else 1
            plain = torch.zeros(301 if changed == "shape" else 300, dtype=torch.int8 if changed == "dtype" else None)
            tensors = {"other" if changed == "key" else "plain": plain}
            if changed == "one more":
                tensors["more"] = torch.zeros(3)
            world = replicated_world(tensors, 8 if changed == "world size" else 4)
            strided = _StridedShard(0, split_factor=4 if changed == "split factor" else 2)
            placements = [strided, Shard(1) if changed == "placement" else Replicate()]
            mesh = [[0, 2], [1, 3]] if changed == "mesh" else [[0, 1], [2, 3]]
            add_sharded(world, "sharded", torch.zeros(8, 4), np.array(mesh), placements)
            return world[rank], rank

        cache = WritePlanCache()
        cache.writes_of_rank(*made())
        cache.writes_of_rank(*made())
        assert cache.misses == 1
        changed, rank = made(change)
        planned = cache.writes_of_rank(changed, rank)
        assert cache.misses == 2
        fresh = writes_of_rank(changed, rank)
        assert {k: [p.box for p in v] for k, v in planned.items()} == {k: [p.box for p in v] for k, v in fresh.items()}
        cache.writes_of_rank(*made())
        assert cache.misses == 2  # the earlier plan is still cached

    def test_it_keeps_no_tensors_and_only_so_many_plans(self) -> None:
        cache = WritePlanCache()
        for size in range(1, slicing.MOST_PLANS + 2):
            cache.writes_of_rank(replicated_world({"x": torch.zeros(size)}, 1)[0], 0)
        assert cache.misses == slicing.MOST_PLANS + 1
        cache.writes_of_rank(replicated_world({"x": torch.zeros(2)}, 1)[0], 0)
        assert cache.misses == slicing.MOST_PLANS + 1
        cache.writes_of_rank(replicated_world({"x": torch.zeros(1)}, 1)[0], 0)
        assert cache.misses == slicing.MOST_PLANS + 2  # the oldest plan was evicted


@given(worlds(), st.data())
def test_the_cache_never_changes_a_plan(drawn: tuple[World, dict[str, torch.Tensor]], data: st.DataObject) -> None:
    world, wholes = drawn
    cache = WritePlanCache()
    with small_parts():
        for _ in range(2):
            plans = [cache.writes_of_rank(tensors, rank) for rank, tensors in enumerate(world)]
            check_written_once(world, wholes, plans)
    assert cache.misses == len(world)


def test_pairs_of_ranks_share_their_own_pieces_in_hsdp() -> None:
    """2 replicas of 4 shards: the two ranks that hold a shard write about half of it each."""
    tensor, world = whole(4096, 256), [{} for _ in range(8)]
    add_sharded(world, "w", tensor, np.arange(8).reshape(2, 4), [Replicate(), Shard(0)])
    check_written_once(world, {"w": tensor})
    for rank, tensors in enumerate(world):
        assert tensors["w"].holders == (rank % 4, rank % 4 + 4)
        assert written_bytes(writes_of_rank(tensors, rank)) == tensor.nbytes // 8
    assert list(itertools.chain(*(writes_of_rank(t, r) for r, t in enumerate(world)))) == ["w"] * 8
