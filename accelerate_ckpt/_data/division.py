"""How a prepared loader divides its data over the ranks, and what that makes of a position in another number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate_ckpt._data.tracker import InnerTracker
from accelerate_ckpt._private.data import Internals
from ckpt_core.state.elastic import RemainingBatches

__all__ = ["Consumed", "Division"]

# samples (of batch samplers of another kind: batches), or the samples of each worker that reads a stream
Consumed = int | list[int]


class Division:
    """How one prepared loader divides its data.

    Args:
        internals: Access to the loader.
        tracker: Follows the loader inside it.
        world_size: Number of ranks of the run.
    """

    def __init__(self, internals: Internals, tracker: InnerTracker, world_size: int) -> None:
        self._internals = internals
        self._tracker = tracker
        self._world_size = world_size

    def describe(self) -> dict[str, Any]:
        """Return all that has to be the same for a resume to be exact, as plain data."""
        return {
            "world_size": self._world_size,
            "ranks": self._internals.ranks,
            "split_batches": self._internals.split_batches,
            "dispatched": self._internals.is_dispatcher,
            "batch_size": self._batch_size,
            "counts_samples": self._counts_samples,
            "method": self._tracker.method,
        }

    @property
    def _batch_size(self) -> int | None:
        """Number of samples in a batch of the script's loader, if that is known."""
        if self._tracker.iterable:
            size = getattr(self._internals.shard, "batch_size", None) or self._tracker.loader.batch_size
        else:
            size = getattr(self._tracker.sampler.source, "batch_size", None)
        return int(size) if isinstance(size, int) else None

    @property
    def _counts_samples(self) -> bool:
        return self._tracker.iterable or RemainingBatches.counts_samples(self._tracker.sampler.source)

    @property
    def nothing(self) -> Consumed:
        """What is consumed at the beginning of an epoch."""
        return [0] * max(1, self._tracker.workers) if self._tracker.iterable else 0

    def consumed(self, before: Consumed, steps: int) -> Consumed:
        """What all ranks together have consumed of the epoch.

        Args:
            before: What had been consumed when the current pass began.
            steps: Number of steps of this pass.
        """
        batches = steps * self._internals.source_batches
        size = (self._batch_size or 1) if self._counts_samples else 1
        if isinstance(before, int):
            return before + batches * size
        # each worker reads the whole stream, or a stream of its own; either way it made every n-th batch of this rank
        made = batches if self._internals.is_dispatcher else steps
        workers = len(before)
        shares = [(made - worker + workers - 1) // workers for worker in range(workers)]
        samples = size * (1 if self._internals.is_dispatcher else self._internals.source_batches)
        return [earlier + share * samples for earlier, share in zip(before, shares, strict=True)]

    def steps_of_longest_rank(self, consumed: Consumed) -> int:
        """Number of steps of a pass on the rank that has most, after ``consumed``."""
        source = self._tracker.sampler.source
        batches = len(RemainingBatches(source, consumed)) if isinstance(consumed, int) and consumed else len(source)
        return -(-batches // self._internals.source_batches)

    def remainder(self, consumed: Consumed) -> int | None:
        """Number of samples in the last step of all ranks after ``consumed``, or None where Accelerate's number is right."""
        if isinstance(consumed, list) or not consumed or self._internals.loader._drop_last:
            return None
        if not self._counts_samples or self._internals.is_dispatcher or self._batch_size is None:
            return None
        left = max(0, len(self._tracker.sampler.source.sampler) - consumed)
        return left % (self._batch_size * self._internals.source_batches)

    def obstacle(self, state: Mapping[str, Any]) -> str | None:
        """Return why a position in another division means nothing in this one, in words, or ``None``."""
        then, now = state["layout"], self.describe()
        if isinstance(self.nothing, list) is not isinstance(state["consumed"], list):
            return "a data loader is of another kind than the one that was saved"
        moved = now["world_size"] != then["world_size"]
        if self._tracker.iterable and moved and now["ranks"] == then["ranks"] == 1:
            return "an iterable data set divides itself over the ranks"
        if isinstance(state["consumed"], list) and len(state["consumed"]) != max(1, self._tracker.workers):
            return "an iterable data set was read by another number of workers"
        if then["counts_samples"] != now["counts_samples"]:
            return "a data loader has another kind of batch sampler than the one that was saved"
        return None

    def difference(self, state: Mapping[str, Any]) -> str | None:
        """Return what of the division has changed, in words, or ``None`` where only the number of ranks has."""
        then, now = state["layout"], self.describe()
        if then["method"] == "load" and not self._tracker.iterable:
            return "the state of a data set is not carried over to another division of its samples"
        if then["world_size"] != now["world_size"]:
            return None
        changed = [f"{name} was {then[name]} and is {now[name]}" for name in now if then[name] != now[name]]
        return f"a data loader divides its samples in another way ({', '.join(changed)})"
