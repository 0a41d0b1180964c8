"""Tracks the position of the loader inside a prepared loader, and how Accelerate divides its epoch over the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from accelerate_ckpt._private.data import Internals, inner_batch_sampler, is_iterable_shard, over_other_batches
from ckpt_core.state.changed_values import PlainState
from ckpt_core.state.elastic import RemainingBatches, RemainingSamples, carry_order
from ckpt_core.state.loaders import LoaderMark, LoaderTracker, has_no_dataset_state
from ckpt_core.state.rng import RngState, find_generators
from ckpt_core.state.samplers import (
    RecordingSampler,
    SamplerMoment,
    SamplerPass,
    _RecordingIterator,
    capture_counters,
)
from ckpt_core.state.stateful import is_stateful

_UNLIKE_ANY = -1


class ShardSampler(RecordingSampler):
    """Wraps the batch sampler of a prepared loader.

    Its generators and counters are those of the script's own batch sampler, which is the same for any number of ranks,
    and not those of Accelerate's division of it.
    """

    _own = RecordingSampler._own | {"source", "whole", "carried", "leave_out"}

    def __init__(self, inner: Any, loader: object) -> None:
        super().__init__(inner, loader)
        self.whole = inner  # divides the source over the ranks
        self.source = inner_batch_sampler(inner)  # the script's batch sampler
        # For a pass that another number of ranks began: the moment from which its order is drawn
        self.carried: SamplerMoment | None = None
        self.leave_out = 0  # number of batches to skip in the next pass, of which there is no record
        initial = capture_counters(self.source)
        # a seed that was drawn from the global generators is part of the state even if it has not changed since
        self._initial = {k: _UNLIKE_ANY if k.endswith("initial_seed") else v for k, v in initial.items()}
        self.plain = PlainState(self.source, skip=(loader, getattr(loader, "dataset", None)))

    # Accelerate checks isinstance(..., BatchSampler)
    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self.whole)

    def __len__(self) -> int:
        # the whole length, also in a pass that begins in the middle: scripts compute their epoch from it
        return len(self.whole)

    def __reduce__(self) -> Any:
        return _itself, (self.whole,)

    def generators(self) -> dict[str, Any]:
        # samplers reference their data set, whose generators are captured separately
        foreign = {id(generator) for _, generator in find_generators(getattr(self.loader, "dataset", None))}
        mine = {path for path, generator in find_generators(self.source) if id(generator) not in foreign}
        return {
            path: state
            for path, state in super().generators().items()
            if path == "loader" or path.removeprefix("sampler.") in mine
        }

    def restore(self, moment: SamplerMoment, rng: bool = True) -> None:
        super().restore(carry_order(self.source, moment), rng)

    def drawn_from(self) -> Any:
        return self.source

    def begin_at(self, consumed: int, carried: SamplerMoment | None = None) -> None:
        """Make the next pass go over what is left of an epoch of which ``consumed`` was consumed before the pass."""
        self.inner = self.whole
        if consumed:
            self.inner = over_other_batches(self.whole, RemainingBatches(self.source, consumed))
        self.carried = None if carried is None else carry_order(self.source, carried)
        self.live = None

    def resumed(self) -> None:
        super().resumed()
        self.carried, self.leave_out = None, 0

    def __iter__(self) -> Any:
        # a loader with workers calls this twice, before and after it draws their seed; the first time counts
        again = self.live is not None and self.live.untouched
        if self._pending is not None and not self._pending[1]:
            self._begin_again(self._pending[0], again)
        elif self.carried is not None or self.leave_out:
            if self.current is None or not again:
                self.current = SamplerPass(self.moment())
            self.live = _ShiftedIterator(self, self.current, self.carried, self.leave_out)
        else:
            return super().__iter__()
        return self.live

    def _begin_again(self, begun: SamplerPass, again: bool) -> None:
        # the loader itself skips what was consumed, but does not go back to the moment at which the order was drawn
        if self.current is None or not again or self.undo_seed:
            self.restore(begun.begun)
        self.current = SamplerPass(begun.begun, None, 0, begun.draws_throughout)
        self.live = _ShiftedIterator(self, self.current, begun.first)


class _ShiftedIterator(_RecordingIterator):
    """Draws the order from a moment of another run, or skips batches of which there is no record."""

    def fast_forward(self) -> None:
        skip, self._skip = self._skip, 0
        if skip:
            self.current.first = self.sampler.moment()
            for _ in range(skip):
                next(self.inner, None)
            self.current.drawn = skip

    def __next__(self) -> Any:
        if self._first is None or not self.untouched:
            return super().__next__()
        now = RngState.capture()
        self.sampler.restore(self._first)
        self.current.first = self.sampler.moment()
        try:
            indices = next(self.inner)
        finally:
            now.restore()
        self.current.drawn = 1
        return indices


def _itself(value: Any) -> Any:
    return value


class InnerTracker(LoaderTracker):
    """Tracks the loader inside a prepared loader."""

    sampler: ShardSampler

    def __init__(self, loader: Any) -> None:
        self._whole_dataset: tuple[Any, Any] | None = None
        super().__init__(loader)

    @property
    def may_read_again(self) -> bool:
        """Whether a resume reads the consumed batches again in this process."""
        if self.workers:
            return False
        return self.method == "replay" or (self.iterable and not is_stateful(self.loader.dataset))

    def capture(self, mark: LoaderMark, fetches: int) -> dict[str, Any]:
        state = super().capture(mark, fetches)
        if self.workers == 0:
            # a resume fetches the batch that was fetched ahead again; after that, the generators are as they are now
            state["dataset_generators"] = state["carried"]["generators"] = self.carried.generators()
        return state

    def _wrap_sampler(self) -> None:
        name = "batch_sampler" if self.loader.batch_sampler is not None else "sampler"
        self.sampler = ShardSampler(getattr(self.loader, name), self.loader)
        self._set(name, self.sampler)

    def _state_between_passes(self) -> dict[str, Any] | None:
        state = super()._state_between_passes()
        # without a state of the data set, it does not affect the next pass, and loading it would read this pass again
        return None if self.iterable and self.workers == 0 and has_no_dataset_state(state) else state

    # ---- a pass that does not begin at the beginning -----------------------------------------------------------------

    def leave_out(self, batches: int) -> int:
        """Skip the first batches of the pass that has just begun, of which there is no record.

        Returns how many batches to take from the new iterator and drop.
        """
        if self.method != "skip":
            return batches
        drop = batches % self.workers if self.workers else 0
        if self.workers:
            self._throwaway_base = batches // self.workers
            if not self.alive:
                self._record_workers([], drop)
        self.sampler.leave_out = batches - drop
        return drop

    def begin_at(self, consumed: int | Sequence[int], carried: SamplerMoment | None = None) -> None:
        """Make the next pass go over what is left of an epoch after the consumed samples."""
        self.begin_at_the_beginning()
        if isinstance(consumed, int):
            self.sampler.begin_at(consumed, carried)
        elif any(consumed):
            owner = self.loader.dataset if is_iterable_shard(self.loader.dataset) else self.loader
            self._whole_dataset = owner, owner.dataset
            vars(owner)["dataset"] = RemainingSamples(owner.dataset, consumed)

    def begin_at_the_beginning(self) -> None:
        """Make the next pass a whole one."""
        self.sampler.begin_at(0)
        if self._whole_dataset is not None and not self.alive:
            owner, dataset = self._whole_dataset
            vars(owner)["dataset"] = dataset
            self._whole_dataset = None

    def made(self, dataset_generators: Mapping[str, Any]) -> None:
        """Note that a resumed pass has its iterator, before it fetches the batch that had been fetched ahead."""
        self.pass_made()
        if self.workers == 0 and self.sampler.live is not None:
            self.sampler.live.fast_forward()
        self.carried.restore_generators(dataset_generators)

    def fetched_ahead(self, state: Mapping[str, Any]) -> None:
        """Note that a resumed pass has fetched the batch that had been fetched ahead."""
        self._restore_common(state, generators=self.workers == 0)

    def carried_moment(self, state: Mapping[str, Any]) -> SamplerMoment:
        """Return the moment from which the order of a captured pass was drawn."""
        return SamplerMoment.decode(state["first"] or state["begun"])

    def carry_between_passes(self, state: Mapping[str, Any], rng: RngState) -> None:
        """Make the next pass draw the order that it would have drawn with the saved number of ranks."""
        moment = SamplerMoment(rng, state["generators"], state["counters"], state.get("values", {}))
        self.sampler.restore(moment, rng=False)
        self.sampler.live = None


# how much of an epoch is consumed: samples (for unknown batch samplers: batches), or samples per worker of a stream
Consumed = int | list[int]


class Division:
    """How one prepared loader divides its data."""

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
        """The value of ``Consumed`` at the beginning of an epoch."""
        return [0] * max(1, self._tracker.workers) if self._tracker.iterable else 0

    def consumed(self, before: Consumed, steps: int) -> Consumed:
        """Return what all ranks together have consumed of the epoch: ``before`` this pass, and in its ``steps``."""
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
        """Return the number of steps of a pass after ``consumed``, on the rank with the most."""
        source = self._tracker.sampler.source
        batches = len(RemainingBatches(source, consumed)) if isinstance(consumed, int) and consumed else len(source)
        return -(-batches // self._internals.source_batches)

    def remainder(self, consumed: Consumed) -> int | None:
        """Return the samples in the last step of all ranks after ``consumed``; None if Accelerate's number is right."""
        if isinstance(consumed, list) or not consumed or self._internals.loader._drop_last:
            return None
        if not self._counts_samples or self._internals.is_dispatcher or self._batch_size is None:
            return None
        left = max(0, len(self._tracker.sampler.source.sampler) - consumed)
        return left % (self._batch_size * self._internals.source_batches)

    def obstacle(self, state: Mapping[str, Any]) -> str | None:
        """Return why a position in another division cannot be used in this one, in words, or ``None``."""
        then, now = state["layout"], self.describe()
        if isinstance(self.nothing, list) is not isinstance(state["consumed"], list):
            return "a data loader is of a different kind than the saved one"
        moved = now["world_size"] != then["world_size"]
        if self._tracker.iterable and moved and now["ranks"] == then["ranks"] == 1:
            return "an iterable dataset divides itself over the ranks"
        if isinstance(state["consumed"], list) and len(state["consumed"]) != max(1, self._tracker.workers):
            return "an iterable dataset was read by another number of workers"
        if then["counts_samples"] != now["counts_samples"]:
            return "a data loader has a different kind of batch sampler than the saved one"
        return None

    def difference(self, state: Mapping[str, Any]) -> str | None:
        """Return what of the division has changed, in words, or ``None`` if only the number of ranks has."""
        then, now = state["layout"], self.describe()
        if then["method"] == "load" and not self._tracker.iterable:
            return "the state of a dataset is not carried over to another division of its samples"
        if then["world_size"] != now["world_size"]:
            return None
        changed = [f"{name} was {then[name]} and is {now[name]}" for name in now if then[name] != now[name]]
        return f"a data loader divides its samples differently ({', '.join(changed)})"
