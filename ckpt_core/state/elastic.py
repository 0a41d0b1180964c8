"""Going on with another number of ranks: what new ranks get, and how an epoch goes on where the old ranks left it.

Every index and every sample belongs to one global order, which the old ranks had divided among themselves. New ranks take the
same order, leave out what was consumed, and divide the rest.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, Sampler, get_worker_info

from ckpt_core.errors import StateMismatchError
from ckpt_core.state.rng import RngState
from ckpt_core.state.samplers import SamplerMoment

__all__ = [
    "RemainingBatches",
    "RemainingSamples",
    "average_gradients",
    "carry_order",
    "derive_rng",
]


def derive_rng(state: RngState, rank: int) -> RngState:
    """Return random generators for a rank that was not there when a state was saved.

    They are seeded with the SHA-256 digest of the given generators and the rank's number: the same checkpoint always gives
    a rank the same numbers, and no two ranks the same.

    Args:
        state: The generators of rank 0.
        rank: The new rank's number.
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
    """Return the gradients that every rank of a new number of ranks gets in an open accumulation window.

    The next synchronised backward pass averages over the new ranks, as it would have over the old ones, so the mean keeps
    the weight of what was accumulated. A rank without a gradient for a parameter counts as zero.

    Args:
        ranks: The gradients that each old rank had accumulated.

    Raises:
        StateMismatchError: The ranks' gradients for a parameter have different shapes.
    """
    average: dict[str, torch.Tensor] = {}
    for name in dict.fromkeys(name for gradients in ranks for name in gradients):
        found = [gradients[name] for gradients in ranks if name in gradients]
        if any(gradient.shape != found[0].shape for gradient in found):
            raise StateMismatchError("the ranks' saved gradients have different shapes", key=name)
        # half precision would lose what a rank adds to a large sum
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
    """Let a sampler make the order that a sampler of the same kind made with another source of random numbers.

    With one rank a shuffling sampler usually draws from the global generators; with several, Accelerate gives it a generator
    of its own. Without this the two would make different permutations from the same state.

    Args:
        sampler: The batch sampler that is to make the order; a generator is added to its sampler where it needs one.
        moment: The other sampler's moment just before it drew the order.

    Returns:
        The moment from which this sampler draws that order.
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
        # what RandomSampler does when it has no generator
        seed = int(torch.empty((), dtype=torch.int64).random_(generator=source).item())
        source.manual_seed(seed)
    return SamplerMoment(moment.rng, {**moment.generators, key: source.get_state()}, moment.counters)


class RemainingBatches(BatchSampler):
    """The batches of indices that are left of an epoch.

    Args:
        inner: The batch sampler of the whole epoch. One of torch's own is taken up at the sample, so that its batches may have
            another size than those that were consumed.
        consumed: Number of samples consumed (for another kind of batch sampler: of batches).
    """

    def __init__(self, inner: Any, consumed: int) -> None:
        self.inner = inner
        self.consumed = consumed
        self.batch_size: Any = getattr(inner, "batch_size", None)
        self.drop_last = getattr(inner, "drop_last", False)

    @staticmethod
    def counts_samples(inner: Any) -> bool:
        """Whether the consumed part of such a batch sampler is counted in samples."""
        return type(inner) is BatchSampler and isinstance(getattr(inner, "batch_size", None), int)

    def __len__(self) -> int:
        if not self.counts_samples(self.inner):
            return max(0, len(self.inner) - self.consumed)
        left = max(0, len(self.inner.sampler) - self.consumed)
        size = int(self.batch_size)
        return left // size if self.drop_last else -(-left // size)

    def __iter__(self) -> Iterator[list[int]]:
        if self.counts_samples(self.inner):
            indices = _leave_out(iter(self.inner.sampler), self.consumed)
            return iter(BatchSampler(indices, self.batch_size, self.drop_last))
        return _leave_out(iter(self.inner), self.consumed)


class RemainingSamples(IterableDataset[Any]):
    """The samples that are left of an epoch of an iterable data set.

    What was consumed is read again and dropped, once: the pass after it is a whole one.

    Args:
        inner: The data set.
        consumed: Number of samples consumed, for each data loading worker (one number without workers).
    """

    def __init__(self, inner: Any, consumed: Sequence[int]) -> None:
        self.inner = inner
        self.consumed = list(consumed)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("inner", "consumed"):
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        number = worker.id if worker is not None else 0
        consumed, self.consumed = self.consumed, []
        return _leave_out(iter(self.inner), consumed[number] if number < len(consumed) else 0)


def _leave_out(items: Iterator[Any], count: int) -> Iterator[Any]:
    for _ in range(count):
        next(items, None)
    yield from items
