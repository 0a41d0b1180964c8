"""What new ranks of an elastic resume get: generators, gradients of an open window, the order of samples."""

from __future__ import annotations

import collections
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler, WeightedRandomSampler

from ckpt_core.errors import StateMismatchError
from ckpt_core.state.elastic import (
    EpochShare,
    RemainingBatches,
    RemainingSamples,
    average_gradients,
    carry_order,
    derive_rng,
    describe_order,
)
from ckpt_core.state.rng import RngState
from ckpt_core.state.samplers import SamplerMoment


def _numbers(state: RngState) -> tuple[float, float, float]:
    state.restore()
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_new_ranks_get_numbers_of_their_own_that_depend_on_the_state_alone() -> None:
    torch.manual_seed(1)
    saved = RngState.capture()
    found = [_numbers(derive_rng(saved, rank)) for rank in (2, 3, 4)]
    # independent of the generators of the new process
    torch.manual_seed(99)
    random.seed(99)
    assert [_numbers(derive_rng(saved, rank)) for rank in (2, 3, 4)] == found
    assert len({number for numbers in found for number in numbers}) == 9
    torch.manual_seed(2)
    assert _numbers(derive_rng(RngState.capture(), 2)) != found[0]


@pytest.mark.parametrize("generator", ["python", "numpy", "torch"])
def test_new_ranks_depend_on_each_generator(generator: str) -> None:
    saved = RngState.capture()
    before = _numbers(derive_rng(saved, 2))
    saved.restore()
    {"python": random.random, "numpy": np.random.rand, "torch": lambda: torch.rand(())}[generator]()
    assert _numbers(derive_rng(RngState.capture(), 2)) != before


def test_deriving_leaves_the_generators_alone() -> None:
    now = RngState.capture()
    derive_rng(now, 5)
    assert RngState.capture().same_as(now)


def test_every_new_rank_gets_the_mean_of_the_gradients() -> None:
    ranks = [{"a": torch.tensor([1.0, 2.0])}, {"a": torch.tensor([3.0, 6.0]), "b": torch.tensor([4.0])}]
    found = average_gradients(ranks)
    assert found["a"].tolist() == [2.0, 4.0]
    assert found["b"].tolist() == [2.0]
    # the next synchronised step averages over the new ranks
    assert torch.stack([found["a"]] * 3).mean(0).tolist() == torch.stack([rank["a"] for rank in ranks]).mean(0).tolist()


def test_gradients_keep_their_type_and_are_added_in_a_wide_one() -> None:
    ones = {"a": torch.ones(3, dtype=torch.bfloat16)}
    found = average_gradients([ones] * 300)
    assert found["a"].dtype == torch.bfloat16
    assert found["a"].tolist() == [1.0] * 3


def test_gradients_that_do_not_fit_are_named() -> None:
    with pytest.raises(StateMismatchError) as caught:
        average_gradients([{"layer.weight": torch.zeros(2)}, {"layer.weight": torch.zeros(3)}])
    assert caught.value.key == "layer.weight"


class _Sizes(BatchSampler):
    def __iter__(self) -> Iterator[list[int]]:
        yield from ([0], [1, 2], [3, 4, 5])


def test_what_is_left_of_an_epoch() -> None:
    whole = BatchSampler(SequentialSampler(range(11)), 4, False)
    assert list(RemainingBatches(whole, 5)) == [[5, 6, 7, 8], [9, 10]] and len(RemainingBatches(whole, 5)) == 2
    dropped = BatchSampler(SequentialSampler(range(11)), 4, True)
    assert list(RemainingBatches(dropped, 5)) == [[5, 6, 7, 8]] and len(RemainingBatches(dropped, 5)) == 1
    assert list(RemainingBatches(whole, 12)) == [] and len(RemainingBatches(whole, 12)) == 0
    # for another kind of batch sampler, whole batches are skipped
    own = _Sizes(SequentialSampler(range(6)), 2, False)
    assert list(RemainingBatches(own, 1)) == [[1, 2], [3, 4, 5]]


def test_what_is_left_of_a_stream_is_left_once() -> None:
    left = RemainingSamples(range(5), [2])
    assert list(left) == [2, 3, 4]
    assert list(left) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("replacement", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_one_order_from_the_global_generators_and_from_an_own_one(replacement: bool, weighted: bool) -> None:
    def sampler() -> BatchSampler:
        if weighted:
            return BatchSampler(WeightedRandomSampler([1.0] * 40, 40, replacement), 4, False)
        return BatchSampler(RandomSampler(range(40), replacement), 4, False)

    # saved by one rank: the sampler has no generator of its own
    torch.manual_seed(3)
    alone = SamplerMoment(RngState.capture(), {}, {})
    order = list(sampler())
    several = sampler()
    several.sampler.generator = torch.Generator().manual_seed(99)
    moment = carry_order(several, alone)
    several.sampler.generator.set_state(moment.generators["sampler.sampler.generator"])
    state = several.sampler.generator.get_state()
    assert list(several) == order
    # and back to one rank
    back = sampler()
    carried = carry_order(back, SamplerMoment(RngState.capture(), {"sampler.sampler.generator": state}, {}))
    back.sampler.generator.set_state(carried.generators["sampler.sampler.generator"])
    assert list(back) == order


def test_what_we_use_of_ddp_is_where_it_was() -> None:
    for name in ("_push_all_rebuilt_params", "_rebuild_buckets"):
        assert hasattr(torch._C._distributed_c10d.Reducer, name), name


def divide(order: dict[str, Any], length: int, consumed: int, replicas: int, *, even: bool = False) -> list[list[int]]:
    return [
        [i for batch in EpochShare(order, length, consumed, 2, False, replicas, rank, even) for i in batch]
        for rank in range(replicas)
    ]


@pytest.mark.parametrize("replicas", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("consumed", [0, 6, 11, 19, 20, 24])
def test_rest_of_an_order_is_divided_without_loss(replicas: int, consumed: int) -> None:
    order = {"kind": "distributed", "shuffle": True, "seed": 3, "epoch": 2}
    sampler = DistributedSampler(range(20), 1, 0, shuffle=True, seed=3)
    sampler.set_epoch(2)
    left = list(sampler)[consumed:]
    ranks = divide(order, 20, consumed, replicas)
    assert len({len(rank) for rank in ranks}) == 1
    used = collections.Counter(index for rank in ranks for index in rank)
    assert set(used) == set(left)
    assert sum(used.values()) - len(left) == -len(left) % replicas, "no more is repeated than makes the ranks even"
    dropped = divide(order, 20, consumed, replicas, even=True)
    assert len([i for rank in dropped for i in rank]) == len(left) // replicas * replicas
    assert not collections.Counter(i for rank in dropped for i in rank) - collections.Counter(left)


@pytest.mark.parametrize("own_generator", [False, True])
def test_order_of_a_random_sampler_is_made_again(own_generator: bool) -> None:
    generator = torch.Generator().manual_seed(5) if own_generator else None
    sampler = BatchSampler(RandomSampler(range(20), generator=generator), 2, False)
    generators = {} if generator is None else {"sampler.sampler.generator": generator.get_state()}
    moment = SamplerMoment(RngState.capture(), generators, {})
    drawn = [i for batch in sampler for i in batch]
    now = torch.get_rng_state()
    assert divide({"kind": "random", "moment": moment.encode()}, 20, 6, 1) == [drawn[6:]]
    assert torch.equal(torch.get_rng_state(), now)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("even", [False, True])
def test_the_batches_of_a_share_are_counted_without_making_them(even: bool, drop_last: bool) -> None:
    for consumed in range(22):
        share = EpochShare({"kind": "sequential"}, 20, consumed, 3, drop_last, 2, 1, even)
        assert share.batches == len(list(share))


def test_an_order_is_described_so_that_it_can_be_made_again() -> None:
    distributed = DistributedSampler(range(9), 3, 1, seed=7)
    distributed.set_epoch(4)
    order = describe_order(distributed, None)
    assert order is not None
    for rank, batches in enumerate(divide(order, 9, 0, 3)):
        sampler = DistributedSampler(range(9), 3, rank, seed=7)
        sampler.set_epoch(4)
        assert batches == list(sampler)
    assert describe_order(SequentialSampler(range(9)), None) == {"kind": "sequential"}
    assert describe_order(RandomSampler(range(9)), None) is None
