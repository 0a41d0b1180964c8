"""Elastic resume, with a different number of ranks: generators, gradients and the rest of the epoch for the new ranks.

Every index and every sample belongs to one global order, which the old ranks had divided among themselves. The new
ranks take the same order, leave out what was consumed, and divide the rest.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    get_worker_info,
)

from ckpt_core.errors import StateMismatchError
from ckpt_core.state.rng import RngState
from ckpt_core.state.samplers import SamplerMoment, SamplerPass
from ckpt_core.state.stateful import Forwarding


def derive_rng(state: RngState, rank: int) -> RngState:
    """Return random generators for a rank that did not exist when the state was saved.

    They are seeded with the SHA-256 digest of the given generators and the rank's number, so the same checkpoint always
    gives a rank the same random numbers, and no two ranks draw the same.
    """
    digest = hashlib.sha256(f"rank {rank}".encode())
    digest.update(repr(state.python).encode())
    digest.update(np.asarray(state.numpy[1], dtype="<u4").tobytes() + repr(state.numpy[2:]).encode())
    digest.update(state.torch_cpu.numpy().tobytes())
    seed = int.from_bytes(digest.digest()[:8], "little") >> 1
    now = RngState.capture()
    try:
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        torch.manual_seed(seed)
        return RngState.capture()
    finally:
        now.restore()


def average_gradients(ranks: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the mean of the saved ranks' gradients, which each new rank gets in an open accumulation window.

    The next synchronised backward pass averages over the new ranks, as it would have over the old ones, so the mean
    preserves the weight of the accumulated gradients. A rank without a gradient for a parameter counts as zero.
    """
    average: dict[str, torch.Tensor] = {}
    for name in dict.fromkeys(name for gradients in ranks for name in gradients):
        found = [gradients[name] for gradients in ranks if name in gradients]
        if any(gradient.shape != found[0].shape for gradient in found):
            raise StateMismatchError("the ranks' saved gradients have different shapes", key=name)
        # in half precision, a rank's small gradient would be lost in a large sum
        wide = torch.promote_types(found[0].dtype, torch.float32)
        total = torch.zeros_like(found[0], dtype=wide)
        for gradient in found:
            total += gradient
        average[name] = (total / len(ranks)).to(found[0].dtype)
    return average


def _innermost(sampler: Any) -> tuple[str, Any]:
    path = ""
    while isinstance(getattr(sampler, "sampler", None), Sampler):
        path, sampler = path + "sampler.", sampler.sampler
    return path, sampler


def carry_order(sampler: Any, moment: SamplerMoment) -> SamplerMoment:
    """Make a sampler draw the order that a sampler of the same class drew from another source of random numbers.

    With one rank, a shuffling sampler usually draws from the global generators. With several, Accelerate gives it a
    generator of its own. Without this function, the two would draw different permutations from the same state.
    ``moment`` is the other sampler's just before it drew the order. Returned is the moment from which ``sampler`` draws
    the same order. If it needs a generator, it gets one.
    """
    path, leaf = _innermost(sampler)
    if not hasattr(leaf, "generator"):
        return moment
    key = f"sampler.{path}generator"
    if leaf.generator is None and key in moment.generators:
        leaf.generator = torch.Generator()
    if leaf.generator is None or key in moment.generators:
        return moment
    source = torch.Generator()
    source.set_state(moment.rng.torch_cpu)
    if isinstance(leaf, RandomSampler):
        # this is what RandomSampler does if it has no generator
        seed = int(torch.empty((), dtype=torch.int64).random_(generator=source).item())
        source.manual_seed(seed)
    return dataclasses.replace(moment, generators={**moment.generators, key: source.get_state()})


class RemainingBatches(BatchSampler):
    """A batch sampler that yields the remaining batches of indices of an epoch.

    A ``torch.utils.data.BatchSampler`` is continued at the next sample, so that the batch size may differ from that of
    the consumed batches: ``consumed`` counts samples. For other classes, it counts batches.
    """

    def __init__(self, inner: Any, consumed: int) -> None:
        self.inner = inner
        self.consumed = consumed
        self.batch_size: Any = getattr(inner, "batch_size", None)
        self.drop_last = getattr(inner, "drop_last", False)

    @staticmethod
    def counts_samples(inner: Any) -> bool:
        """Return whether the consumed part of a batch sampler is counted in samples."""
        return type(inner) is BatchSampler and isinstance(getattr(inner, "batch_size", None), int)

    def __len__(self) -> int:
        if not self.counts_samples(self.inner):
            return max(0, len(self.inner) - self.consumed)
        left = max(0, len(self.inner.sampler) - self.consumed)
        return _batches_of(left, int(self.batch_size), drop_last=self.drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        if self.counts_samples(self.inner):
            indices = _leave_out(iter(self.inner.sampler), self.consumed)
            return iter(BatchSampler(indices, self.batch_size, self.drop_last))
        return _leave_out(iter(self.inner), self.consumed)


@dataclasses.dataclass(frozen=True)
class EpochShare:
    """One rank's share of the rest of an epoch: iterating over it yields batches of indices.

    The ranks take the samples in turn, as with ``DistributedSampler``.
    """

    # The order of the epoch's samples, as plain data and tensors: {"kind": "sequential"}, the seed and epoch of a
    # DistributedSampler, or the moment at which a RandomSampler drew it.
    order: Mapping[str, Any]
    length: int  # number of samples in the epoch
    consumed: int  # number of samples that were consumed before
    batch_size: int  # samples per batch of one rank
    drop_last: bool  # whether an incomplete batch at the end is left out
    replicas: int  # number of ranks that share the rest
    rank: int  # the number of this rank
    # Whether samples at the end that do not suffice for one per rank are left out, instead of some being repeated.
    even: bool

    @property
    def batches(self) -> int:
        """Number of batches that each rank gets."""
        left = max(0, self.length - self.consumed)
        samples = left // self.replicas if self.even else -(-left // self.replicas)
        return _batches_of(samples, self.batch_size, drop_last=self.drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(BatchSampler(self._indices(), self.batch_size, self.drop_last))

    def _indices(self) -> Iterator[int]:
        left = itertools.islice(_in_order(self.order, self.length), self.consumed, None)
        first: list[int] = []
        while row := list(itertools.islice(left, self.replicas)):
            first = first or row
            missing = self.replicas - len(row)
            if missing and self.even:
                return
            yield [*row, *itertools.islice(itertools.cycle(first), missing)][self.rank]


def describe_order(sampler: Any, current: SamplerPass | None) -> dict[str, Any] | None:
    """Return the ``order`` of an :class:`EpochShare` for the pass that a sampler is in; None before the first draw."""
    if isinstance(sampler, DistributedSampler):
        return {"kind": "distributed", "shuffle": sampler.shuffle, "seed": sampler.seed, "epoch": sampler.epoch}
    if isinstance(sampler, SequentialSampler):
        return {"kind": "sequential"}
    if current is None or current.first is None:
        return None  # nothing was drawn yet: the resumed run draws an order of its own
    return {"kind": "random", "moment": current.first.encode()}


def _in_order(order: Mapping[str, Any], length: int) -> Iterable[int]:
    if order["kind"] == "distributed":
        data: Any = range(length)
        whole: DistributedSampler[int] = DistributedSampler(data, 1, 0, shuffle=order["shuffle"], seed=order["seed"])
        whole.set_epoch(order["epoch"])
        return whole
    if order["kind"] == "sequential":
        return range(length)
    sampler = RandomSampler(range(length), generator=torch.Generator())
    # wrapped in a batch sampler, so that the generator's path is as in the loader that the moment was captured from
    moment = carry_order(BatchSampler(sampler, 1, False), SamplerMoment.decode(order["moment"]))
    sampler.generator.set_state(moment.generators["sampler.sampler.generator"])
    return sampler


class RemainingSamples(Forwarding, IterableDataset[Any]):
    """The remaining samples of an epoch of an iterable data set.

    The first pass reads the ``consumed`` samples again (a count per data loading worker, or one count without workers)
    and drops them. Later passes are whole.
    """

    _own = frozenset({"inner", "consumed"})

    def __init__(self, inner: Any, consumed: Sequence[int]) -> None:
        self.inner, self.consumed = inner, list(consumed)

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        number = worker.id if worker is not None else 0
        consumed, self.consumed = self.consumed, []
        return _leave_out(iter(self.inner), consumed[number] if number < len(consumed) else 0)


def _batches_of(samples: int, size: int, *, drop_last: bool) -> int:
    return samples // size if drop_last else -(-samples // size)


def _leave_out(items: Iterator[Any], count: int) -> Iterator[Any]:
    for _ in range(count):
        next(items, None)
    yield from items
