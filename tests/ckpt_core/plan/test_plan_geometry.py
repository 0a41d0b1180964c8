"""Boxes, their bytes and their cuts; which elements of a tensor are on which rank of any mesh."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt_core.geometry import Box, Sharding, byte_runs, cut_dimension, sharded_boxes

SHAPES = st.lists(st.integers(0, 7), max_size=4).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    offset = tuple(draw(st.integers(0, size)) for size in shape)
    return Box(offset, tuple(draw(st.integers(0, size - begin)) for size, begin in zip(shape, offset, strict=True)))


def elements(shape: tuple[int, ...], box: Box) -> np.ndarray:
    """Return the flat indices of the box's elements."""
    slices = tuple(slice(begin, end) for begin, end in zip(box.offset, box.end, strict=True))
    return np.arange(math.prod(shape)).reshape(shape)[slices].ravel()


@given(st.data())
def test_byte_runs_are_where_numpy_says(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    box = data.draw(boxes_in(shape))
    itemsize = data.draw(st.sampled_from([1, 2, 8]))
    runs = list(byte_runs(shape, box, itemsize))
    found = [byte for begin, nbytes in runs for byte in range(begin, begin + nbytes)]
    expected = [int(element) * itemsize + byte for element in elements(shape, box) for byte in range(itemsize)]
    assert found == expected
    # Each run is as long as possible: the next one never begins where the last one ended.
    assert all(begin + nbytes < following for (begin, nbytes), (following, _) in itertools.pairwise(runs))
    assert all(nbytes > 0 for _, nbytes in runs)


def test_byte_runs_of_whole_rows_are_one() -> None:
    assert list(byte_runs((5, 3, 2), Box((1, 0, 0), (2, 3, 2)), 4)) == [(24, 48)]
    assert list(byte_runs((), Box((), ()), 4)) == [(0, 4)]


@given(st.data())
def test_an_intersection_has_the_elements_of_both(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    one, other = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    common = one.intersection(other)
    expected = np.intersect1d(elements(shape, one), elements(shape, other)).tolist()
    assert (elements(shape, common).tolist() if common else []) == expected
    if common:
        inside = common.relative_to(one)
        assert elements(shape, one)[elements(one.shape, inside)].tolist() == expected


@pytest.mark.parametrize(
    ("shape", "parts", "dimension"),
    [
        ((6, 4), 3, 0),
        ((1001, 1000), 2, 0),  # rows, though columns could be cut more evenly
        ((3, 1000), 2, 1),  # two rows against one would be half as much again
        ((3, 5), 64, 1),  # 5 parts are the most along one dimension
    ],
)
def test_a_box_is_cut_evenly_and_by_rows_first(shape: tuple[int, ...], parts: int, dimension: int) -> None:
    assert cut_dimension(Box.whole(shape), parts) == dimension


MESHES = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)


@st.composite
def shardings_for(draw: st.DrawFn, dimensions: int, mesh: tuple[int, ...]) -> list[Sharding | None]:
    if dimensions == 0:
        return [None] * len(mesh)
    # No product of the sizes of meshes is 5 or 7.
    one = st.builds(Sharding, st.integers(0, dimensions - 1), st.sampled_from([1, 1, 5, 7]))
    return draw(st.lists(st.none() | one, min_size=len(mesh), max_size=len(mesh)))


def chunks(tensor: torch.Tensor, parts: int, dimension: int) -> list[torch.Tensor]:
    found = list(tensor.chunk(parts, dimension))
    return found + [tensor.narrow(dimension, 0, 0)] * (parts - len(found))


def cut_by_torch(tensor: torch.Tensor, sharding: Sharding | None, parts: int, index: int) -> torch.Tensor:
    if sharding is None:
        return tensor
    sections = chunks(tensor, sharding.split_factor, sharding.dimension)
    return torch.cat([chunks(section, parts, sharding.dimension)[index] for section in sections], sharding.dimension)


@given(st.data())
def test_sharded_boxes_are_what_torch_cuts(data: st.DataObject) -> None:
    shape, mesh = data.draw(SHAPES), data.draw(MESHES)
    shardings = data.draw(shardings_for(len(shape), mesh))
    whole = torch.arange(math.prod(shape)).reshape(shape)
    for coordinate in itertools.product(*map(range, mesh)):
        local = whole
        for sharding, parts, index in zip(shardings, mesh, coordinate, strict=True):
            local = cut_by_torch(local, sharding, parts, index)
        pairs = sharded_boxes(shape, mesh, coordinate, shardings)
        covered = np.zeros(local.numel(), dtype=int)
        for box, inside in pairs:
            positions = elements(tuple(local.shape), inside)
            covered[positions] += 1
            assert elements(shape, box).tolist() == local.reshape(-1)[positions].tolist()
        assert (covered == 1).all()
        if pairs:
            assert pairs[-1][1].end == tuple(local.shape)


@given(st.integers(0, 60), st.lists(st.integers(1, 4), min_size=2, max_size=3).map(tuple), st.booleans())
def test_a_strided_cut_over_all_later_ones_comes_after_them(size: int, mesh: tuple[int, ...], even: bool) -> None:
    """What ``fully_shard`` does to what tensor parallelism has cut; where sizes divide, it is a strided cut."""
    size *= math.prod(mesh) if even else 1
    shardings = [Sharding(0, math.prod(mesh[number + 1 :])) for number in range(len(mesh))]
    whole = torch.arange(size)
    for coordinate in itertools.product(*map(range, mesh)):
        local = strided = whole
        for parts, index in reversed(list(zip(mesh, coordinate, strict=True))):
            local = chunks(local, parts, 0)[index]
        for sharding, parts, index in zip(shardings, mesh, coordinate, strict=True):
            strided = cut_by_torch(strided, sharding, parts, index)
        boxes = [box for box, _ in sharded_boxes((size,), mesh, coordinate, shardings)]
        assert [element for box in boxes for element in elements((size,), box)] == local.tolist()
        assert torch.equal(local, strided) or not even


def test_neighbouring_parts_are_one_box() -> None:
    """Four sections of one row each: the first rank has them all."""
    assert sharded_boxes((4, 3), (2,), (0,), [Sharding(0, 4)]) == [(Box.whole((4, 3)), Box.whole((4, 3)))]
    assert sharded_boxes((4, 3), (2,), (1,), [Sharding(0, 4)]) == []
