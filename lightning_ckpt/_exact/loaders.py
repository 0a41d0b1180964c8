"""Tracks the position of a fit's training loaders, fetch by fetch, and restores it at a resume.

Elastic resume: another number of ranks can continue an epoch, and each sample that was left is used once. The ranks
divide one global order among themselves, batch by batch, so what they have consumed together is the beginning of it. A
few numbers describe the order, however long it is: the seed and the epoch of a ``DistributedSampler``, or the random
generators from which a ``RandomSampler`` drew it. The new ranks make the same order and divide the rest of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

from ckpt_core.errors import StateMismatchError
from ckpt_core.process.console import range_with_progress
from ckpt_core.state.elastic import EpochShare, RemainingBatches, describe_order
from ckpt_core.state.loaders import READS_ON, FetchHistory, LoaderMark, LoaderTracker
from ckpt_core.state.rng import RngState
from ckpt_core.state.samplers import RecordingSampler, SamplerPass, restore_counters
from lightning_ckpt._private.loops import Internals
from lightning_ckpt._report import announce

log = logging.getLogger(__name__)

_AGAIN = "reading batches again to get back to the saved position (state_dict would avoid it)"

# Lightning is at most one batch ahead of training, and the batch in training may have to be fetched again
_FETCHES_REMEMBERED = 4

# how many of the last batches read again are compared: as many as the flight recorder keeps in a checkpoint
_COMPARED = 8

DRAWS_WHILE_READ = (
    "an iterable dataset without state_dict draws random numbers in the main process while it is read; its order "
    "is reproduced only if it does not depend on them (give it state_dict and load_state_dict, or use "
    "num_workers=1)"
)
READ_IN_A_THREAD = (
    "a thread of the data loader takes batches ahead of the training, and draws random numbers at a time of its own "
    "(let the DataLoader read ahead, with num_workers and prefetch_factor)"
)


class _DivisibleSampler(RecordingSampler):
    """Wraps a batch sampler; with a ``division``, yields this rank's batches of it for one pass."""

    _own = RecordingSampler._own | {"division"}

    def __init__(self, inner: Any, loader: object) -> None:
        self.division: EpochShare | None = None
        super().__init__(inner, loader)

    def make_iterator(self) -> Any:
        return super().make_iterator() if self.division is None else iter(self.division)


class TrainingLoader(LoaderTracker):
    """Tracks one training loader, and can continue with what another number of ranks left of an epoch.

    The loader is a ``DataLoader`` (also a stateful one) or any iterable; with ``replay``, its position is always
    restored by reading batches again.
    """

    def __init__(self, loader: Any, replay: bool, world_size: int) -> None:
        self._world_size = world_size
        super().__init__(loader, replay)

    def _wrap_sampler(self) -> None:
        super()._wrap_sampler()
        if not self.iterable and self.sampler is not None:
            self.sampler = _DivisibleSampler(self.sampler.inner, self.loader)
            self._set("batch_sampler" if self.loader.batch_sampler is not None else "sampler", self.sampler)

    @property
    def division(self) -> EpochShare | None:
        """How the present pass is divided, if another number of ranks began the epoch."""
        return getattr(self.sampler, "division", None) if self.sampler is not None else None

    @division.setter
    def division(self, division: EpochShare | None) -> None:
        if isinstance(self.sampler, _DivisibleSampler):
            self.sampler.division = division

    def begin_pass(self, started: int = 0) -> None:
        super().begin_pass(started)
        self.division = None

    @property
    def _batches(self) -> Any:
        return self.sampler.inner if self.sampler is not None else None

    # ---- capture -----------------------------------------------------------------------------------------------------

    def capture(self, mark: LoaderMark, fetches: int) -> dict[str, Any]:
        state = super().capture(mark, fetches)
        return {**state, "division": self._describe(mark.sampler_pass)}

    def _describe(self, current: SamplerPass | None) -> dict[str, Any]:
        """Return the order of this pass as plain data for another number of ranks, or why it is not known."""
        problem = self._problem_with_dividing()
        if problem is not None:
            return {"problem": problem}
        batches, division = self._batches, self.division
        if division is None and _is_of_torchdata(batches.sampler, RandomSampler.__name__):
            return {"problem": "the order that a RandomSampler of torchdata has drawn is not known"}
        replicas, _, _ = self._place(batches.sampler)
        found: dict[str, Any] = {"length": len(self.loader.dataset), "samples": batches.batch_size * replicas}
        if division is not None:
            return {**found, "order": dict(division.order), "consumed": division.consumed, "divided": True}
        order = describe_order(batches.sampler, current)
        return {**found, "order": order, "consumed": 0, "divided": False}

    def _problem_with_dividing(self) -> str | None:
        if self.iterable or self._batches is None:
            return "an iterable dataset divides itself, so its position cannot be used with another number of ranks"
        if self.method == "load":
            return "the dataset has its own state, which cannot be used with another number of ranks"
        is_counted = RemainingBatches.counts_samples(self._batches) or _is_of_torchdata(self._batches, "BatchSampler")
        if not is_counted:
            return f"the position of a {type(self._batches).__name__} cannot be used with another number of ranks"
        sampler = self._batches.sampler
        if type(sampler) is DistributedSampler or _is_of_torchdata(sampler, "StatefulDistributedSampler"):
            return None
        if self._world_size > 1:
            return f"a {type(sampler).__name__} gives each rank an order of its own"
        if type(sampler) is SequentialSampler:
            return None
        is_random = type(sampler) is RandomSampler or _is_of_torchdata(sampler, RandomSampler.__name__)
        if is_random and not sampler.replacement and sampler.num_samples == len(self.loader.dataset):
            return None
        return f"the order that a {type(sampler).__name__} makes cannot be divided over another number of ranks"

    @staticmethod
    def _place(sampler: Any) -> tuple[int, int, bool]:
        if isinstance(sampler, DistributedSampler):
            return sampler.num_replicas, sampler.rank, sampler.drop_last
        return 1, 0, False

    # ---- restore -----------------------------------------------------------------------------------------------------

    def _reads_again(self, state: Mapping[str, Any]) -> bool:
        # the loader does not read its sampler (it may read other loaders in __iter__); the batches are compared
        is_read = state.get("problem") == READS_ON and state["position"] > 0
        return is_read or super()._reads_again(state)

    def prepare(self, state: Mapping[str, Any]) -> int:
        description = state.get("division") or {}
        if description.get("divided"):
            self.division = self._divide(description, description["consumed"])
        return super().prepare(state)

    def elastic_problem(self, state: Mapping[str, Any]) -> str | None:
        """Return why these ranks cannot divide what another number of ranks left of an epoch, in words, or ``None``."""
        description = state.get("division") or {"problem": "it says nothing of its order"}
        problem = description.get("problem") or self._problem_with_dividing()
        if problem is None and description["length"] != len(self.loader.dataset):
            return f"the dataset had {description['length']} samples and now has {len(self.loader.dataset)}"
        return None if problem is None else str(problem)

    def rest(self, state: Mapping[str, Any], again: int) -> EpochShare | None:
        """Return what another number of ranks left of an epoch, divided over these; ``None`` if all of it is left.

        ``state`` is what one of them captured, and their last ``again`` batches do not count.
        """
        description = state["division"]
        if description["order"] is None:
            return None
        batches = max(0, int(state["position"]) - again)
        return self._divide(description, description["consumed"] + batches * description["samples"])

    def _divide(self, description: Mapping[str, Any], consumed: int) -> EpochShare:
        batches = self._batches
        replicas, rank, even = self._place(batches.sampler)
        return EpochShare(
            description["order"],
            description["length"],
            consumed,
            batches.batch_size,
            batches.drop_last,
            replicas,
            rank,
            even,
        )

    def carry_seeds(self, state: Mapping[str, Any]) -> None:
        """Set the seeds and epochs of the samplers to those of the interrupted run, for the epochs to come."""
        if self.sampler is not None:
            seeds = {path: n for path, n in state["counters"].items() if path.rpartition(".")[2] in ("seed", "epoch")}
            restore_counters(self.sampler.inner, seeds)


def _is_of_torchdata(sampler: Any, name: str) -> bool:
    kind = type(sampler)
    return kind.__name__ == name and kind.__module__.startswith("torchdata.")


@dataclasses.dataclass(frozen=True)
class _Fetch:
    """The state just before batch ``index`` of the epoch was fetched."""

    index: int
    rng: RngState
    marks: tuple[LoaderMark, ...]
    exhausted: tuple[bool, ...]


@dataclasses.dataclass(frozen=True)
class _Rest:
    """What is left of an epoch after ``batches`` batches, if it is known how to divide it."""

    batches: int
    division: EpochShare | None


class _WatchedIterator:
    """Iterates over ``inner``, and calls ``was_read`` after each batch with the generators before it."""

    def __init__(self, inner: Iterator[Any], was_read: Callable[[RngState], None]) -> None:
        self.inner = inner
        self._was_read = was_read

    def __iter__(self) -> _WatchedIterator:
        return self

    def __next__(self) -> Any:
        before = RngState.capture()
        batch = next(self.inner)
        self._was_read(before)
        return batch


class TrainingData:
    """The training loaders of one Trainer.

    ``before_fetch`` is called before each batch is fetched, with the random generators of that moment. With ``replay``,
    the position of loaders is always restored by reading batches again.

    Attributes:
        begun: Number of batches of the epoch that were done when the present iterators were made.
        attempts: Number of batches of the epoch that were requested from the loaders.
        after_fetch: Called after each fetch with the batch's number in the epoch, the generators before it (None if a
            thread of the loader reads ahead), and the batch.
        after_reading_again: Called with each of the last batches that a single loader has read again, and its number in
            the epoch; returns whether it is the same, None if that is not known.
        is_as_read: Whether the batches that were read again equal those of the first time; None if not known.
        taken: Number of batches of the present pass until now; None where another number of ranks began it.
        idle: Whether iterators are made but not read from.
    """

    def __init__(self, internals: Internals, replay: bool, before_fetch: Callable[[RngState], None]) -> None:
        self._internals = internals
        self._replay = replay
        self._before_fetch = before_fetch
        self._combined: Any = None
        self._trackers: list[TrainingLoader] = []
        self._history: FetchHistory[_Fetch] = FetchHistory(_FETCHES_REMEMBERED)
        self._pending: Mapping[str, Any] | None = None
        self._rest: _Rest | None = None
        self.after_fetch: Callable[[int, RngState | None, Any], None] | None = None
        self.after_reading_again: Callable[[int, Any], bool | None] | None = None
        self.is_as_read: bool | None = None
        self.taken: int | None = None
        self.begun = 0
        self.attempts = 0
        self.idle = False

    def follow(self) -> None:
        """Start to track the loaders that Lightning has just made or been given, possibly the same ones again."""
        # a tracker that started persistent workers has recorded their generators, or has yet to restore them
        known = {id(tracker.loader): tracker for tracker in self._trackers if tracker.persistent}
        self._trackers = [tracker for tracker in self._trackers if id(tracker.loader) not in known]
        self.release()
        self._combined = self._internals.combined_loader
        world_size = self._internals.trainer.world_size
        self._trackers = [
            known.pop(id(loader)) if id(loader) in known else TrainingLoader(loader, self._replay, world_size)
            for loader in self._combined.flattened
        ]
        for tracker in known.values():
            tracker.release()
        self._internals.record_iteration(self._combined, self._iterate, self._fetch)

    def release(self) -> None:
        """Leave the loaders as they were."""
        if self._combined is not None:
            self._internals.stop_recording(self._combined)
            for tracker in self._trackers:
                tracker.release()
        self._combined = None
        self._trackers = []
        self._history.clear()

    # ---- while training ----------------------------------------------------------------------------------------------

    def _iterate(self, make_iterators: Callable[[], Any]) -> None:
        self._history.clear()
        if self.idle:
            # the iterators that Lightning makes before training begins would be of no use to a resumed run
            self._internals.make_idle_iterator(self._combined)
            return
        if self._pending is not None:
            self._iterate_from(self._pending, make_iterators)
            return
        if self._rest is not None:
            self._iterate_over(self._rest, make_iterators)
            return
        for tracker in self._trackers:
            tracker.begin_pass()
        make_iterators()
        for tracker in self._trackers:
            tracker.pass_made()
        self.begun = self.attempts = self.taken = 0

    def _fetch(self, fetch: Callable[[], Any]) -> Any:
        if self.idle:
            if self._internals.prefetched:
                raise StopIteration
            # a callback trains before the run resumes
            self.idle = False
            iter(self._combined)
        moment = self._moment()
        self._history.add(moment.index, moment)
        self._before_fetch(moment.rng)
        before = list(self._internals.iterators(self._combined))
        self.attempts += 1
        with self._watched_reading(moment.index):
            batch = fetch()
        if self.taken is not None:
            self.taken += 1
        for number, iterator in enumerate(self._internals.iterators(self._combined)):
            tracker, mark = self._trackers[number], moment.marks[number]
            if iterator is not before[number] or tracker.has_restarted(mark, iterator):
                tracker.restarted(moment.index, mark)
        if self.after_fetch is not None:
            # batch[0]: without the numbers of the batch and the loader
            self.after_fetch(moment.index, None if self._is_read_in_a_thread else moment.rng, batch[0])
        return batch

    @contextlib.contextmanager
    def _watched_reading(self, index: int) -> Iterator[None]:
        """Detect, inside the context, loaders that draw from this process's generators and would be read again."""
        iterators = self._internals.iterators(self._combined)
        watched = {
            number: _WatchedIterator(iterator, functools.partial(self._history.was_read, index))
            for number, (tracker, iterator) in enumerate(zip(self._trackers, iterators, strict=False))
            if (tracker.method == "replay" or (index > 0 and tracker.reads_on))
            and tracker.workers == 0
            and self._history.is_watched(index)
        }
        for number, iterator in watched.items():
            iterators[number] = iterator
        try:
            yield
        finally:
            for number, iterator in watched.items():
                if iterators[number] is iterator:  # unless it was replaced at the end of its data
                    iterators[number] = iterator.inner

    @property
    def _is_read_in_a_thread(self) -> bool:
        """Whether a loader reads ahead in its own thread, which draws random numbers at unpredictable times."""
        samplers = (tracker.sampler for tracker in self._trackers)
        return any(one is not None and one.drawn_in not in (None, threading.get_ident()) for one in samplers)

    def _moment(self) -> _Fetch:
        marks = tuple(tracker.mark() for tracker in self._trackers)
        return _Fetch(self.attempts, RngState.capture(), marks, tuple(self._internals.exhausted(self._combined)))

    # ---- capture -----------------------------------------------------------------------------------------------------

    def rng_before(self, index: int) -> RngState | None:
        """Return the global generators before batch ``index`` was fetched; None if that is no longer remembered."""
        fetch = self._history.before(index)
        return None if fetch is None else fetch.rng

    def capture(self, batches: int, ahead: int) -> dict[str, Any]:
        """Capture the loaders' position when ``batches`` of an epoch are done and Lightning has fetched ``ahead``."""
        fetch = self._history.before(batches)
        moment = fetch or self._moment()
        last = self._history.before(batches - 1) if self._history.draws_while_reading else None
        return {
            "between": False,
            "batches": batches,
            "exhausted": list(moment.exhausted),
            "length": self._internals.fetcher.length,  # at the epoch's start; a sampler's may be that of the rest
            "last_rng": last.rng.encode() if last is not None else None,
            "ahead_rng": fetch.rng.encode() if fetch is not None and ahead else None,
            "loaders": [
                tracker.capture(mark, self._fetches_from(tracker, mark, batches))
                for tracker, mark in zip(self._trackers, moment.marks, strict=True)
            ],
        }

    def _fetches_from(self, tracker: TrainingLoader, mark: LoaderMark, batches: int) -> int:
        """Return how many of the epoch's fetches count for a loader: its workers make no batches after its end."""
        if tracker.method != "skip" or not self._internals.waits_for_the_longest(self._combined):
            return batches
        drawn = mark.sampler_pass.drawn if mark.sampler_pass is not None else 0
        return min(batches, mark.started + drawn) if drawn else batches

    def capture_between_epochs(self) -> dict[str, Any]:
        """Capture the state of the loaders between two epochs."""
        return {"between": True, "batches": 0, "loaders": [t.capture_between_passes() for t in self._trackers]}

    def notes(self) -> list[str]:
        """Return why a resume from here would not be exact, in words."""
        if not self.attempts:
            return []
        return [DRAWS_WHILE_READ] * self._history.draws_while_reading + [READ_IN_A_THREAD] * self._is_read_in_a_thread

    # ---- restore -----------------------------------------------------------------------------------------------------

    def check(self, state: Mapping[str, Any]) -> list[str]:
        """Return why the saved state does not fit the loaders exactly, in words; raise if their number differs."""
        loaders = state["loaders"]
        if not loaders:
            # saved before the loaders were made
            return []
        if len(loaders) != len(self._trackers):
            raise StateMismatchError(
                f"the checkpoint was saved with {len(loaders)} training data loaders, now there are "
                f"{len(self._trackers)}"
            )
        found = [tracker.check(saved) for tracker, saved in zip(self._trackers, loaders, strict=True)]
        return [problem for problem in found if problem is not None]

    def go_to(self, state: Mapping[str, Any]) -> None:
        """Make the next iterators continue in the middle of an epoch."""
        self.idle = False
        self._pending = state

    def go_between_epochs(self, state: Mapping[str, Any]) -> None:
        """Make the next iterators begin the next epoch."""
        self.idle = False
        for tracker, saved in zip(self._trackers, state["loaders"], strict=False):
            tracker.prepare_next_pass(saved)

    def _iterate_from(self, state: Mapping[str, Any], make_iterators: Callable[[], Any]) -> None:
        self._pending = None
        # only the process that began the epoch can detect it
        self._history.draws_while_reading |= state.get("last_rng") is not None
        pairs = list(zip(self._trackers, state["loaders"], strict=True))
        again = sum(tracker.batches_to_read_again(saved) for tracker, saved in pairs)
        if again:
            log.info("reading %d batches again", again)
        drops = [tracker.prepare(saved) for tracker, saved in pairs]
        make_iterators()
        is_alone = len(pairs) == 1 and self._combined.iterables is self._trackers[0].loader
        is_compared = is_alone and again == drops[0] == state["batches"]
        for iterator, drop in zip(self._internals.iterators(self._combined), drops, strict=True):
            self._read_again(iterator, drop, state, is_compared=is_compared)
        for tracker, saved in pairs:
            tracker.finish(saved)
        self._internals.set_position(self._combined, state["batches"], state["exhausted"])
        self.begun = self.attempts = self.taken = state["batches"]
        if state["ahead_rng"] is not None:
            RngState.decode(state["ahead_rng"]).restore()

    def _read_again(self, iterator: Any, drop: int, state: Mapping[str, Any], *, is_compared: bool) -> None:
        last_rng, first = state.get("last_rng"), max(0, drop - _COMPARED)
        if self._history.draws_while_reading or last_rng is not None:
            # batches that contain random numbers differ when read again, except the last, read with its generators
            first = drop - 1 if last_rng is not None else drop
        for number in range_with_progress(drop, _AGAIN, functools.partial(announce, self._internals.trainer)):
            if number == drop - 1 and last_rng is not None:
                RngState.decode(last_rng).restore()
            batch = next(iterator, None)
            if (
                is_compared
                and self.after_reading_again is not None
                and number >= first
                and self.is_as_read is not False
            ):
                is_same = self.after_reading_again(number, batch)
                self.is_as_read = self.is_as_read if is_same is None else is_same

    @property
    def world_size(self) -> int:
        """Number of ranks that continue."""
        return int(self._internals.trainer.world_size)

    @property
    def batches(self) -> float:
        """Number of batches in an epoch of this rank."""
        return float(self._internals.trainer.num_training_batches)

    @property
    def batches_now(self) -> float:
        """The same, by the present length of a single loader, of which a hook may have changed the batch size."""
        with contextlib.suppress(TypeError, NotImplementedError):
            if self._combined is not None and self._combined.iterables is self._trackers[0].loader:
                return min(self.batches, len(self._trackers[0].loader))
        return self.batches

    # ---- restore with another number of ranks ------------------------------------------------------------------------

    def elastic_problem(self, state: Mapping[str, Any]) -> str | None:
        """Return why these ranks cannot divide what other ranks left of an epoch, in words, or ``None``."""
        if state["between"]:
            return None
        loaders = state["loaders"]
        if len(loaders) != len(self._trackers):
            return f"there were {len(loaders)} training data loaders, and now there are {len(self._trackers)}"
        if len(loaders) > 1:
            return "there are several training data loaders, which end at different times"
        return self._trackers[0].elastic_problem(loaders[0])

    def continue_epoch(self, state: Mapping[str, Any], again: int, world_size: int) -> int:
        """Make the next iterators continue with what ``world_size`` other ranks left of the epoch.

        ``state`` is what one of them captured, and their last ``again`` batches do not count. Returns how many batches
        of the epoch count as done on these ranks.
        """
        done: float
        if state["between"]:
            done = self.batches
        elif self.elastic_problem(state) is None:
            division = self._trackers[0].rest(state["loaders"][0], again)
            # all batches that are left are trained on, so the others count as done
            done = len(self._trackers[0].loader) - division.batches if division is not None else 0
            self._rest = _Rest(int(done), division)
        else:
            done = (state["batches"] - again) * world_size // self.world_size
            self._rest = _Rest(int(done), None)
        done = min(done, self.batches)
        for tracker, saved in zip(self._trackers, state["loaders"], strict=False):
            tracker.carry_seeds(saved)
        self.idle = False
        return int(done) if math.isfinite(done) else 0

    def _iterate_over(self, rest: _Rest, make_iterators: Callable[[], Any]) -> None:
        self._rest = None
        for tracker in self._trackers:
            tracker.begin_pass(rest.batches)
            tracker.division = rest.division
        make_iterators()
        for tracker in self._trackers:
            tracker.pass_made()
        self._internals.set_position(self._combined, rest.batches, [])
        self.taken = None
        self.begun = self.attempts = rest.batches
