"""Tracks the position of one prepared loader, batch by batch, and restores it at a resume.

A position counts *steps*: batches that the script of this rank has got. Accelerate's loaders fetch one step ahead, so
the state of random generators and loader is remembered before each fetch; the step that was fetched ahead is fetched
again after a resume.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

from accelerate_ckpt._data.scripts_that_skip import BatchUsePattern, Next, Opening
from accelerate_ckpt._data.tracker import Consumed, Division, InnerTracker
from accelerate_ckpt._private.data import Internals, unsupported_release
from accelerate_ckpt._recording import Fetched
from accelerate_ckpt._report import announce_on_main
from ckpt_core.process.console import range_with_progress
from ckpt_core.recorder import digest_batch
from ckpt_core.state.loaders import FetchHistory, LoaderMark
from ckpt_core.state.lost_variables import loop_counts
from ckpt_core.state.rng import RngState

log = logging.getLogger(__name__)

_AGAIN = "reading batches again to get back to the saved position"
_DRAWS = (
    "an iterable dataset is read again from its beginning, because it has no state_dict or Accelerate divides it over "
    "the ranks, and draws random numbers in the main process while it is read"
)
_ON_ITS_OWN = f"{_DRAWS}; its order is reproduced only if it does not depend on them (num_workers=1 avoids that)"
_OTHER_BATCH = f"{_DRAWS}; the batch before the saved position is another one now (num_workers=1 avoids that)"
_OTHER_NEXT = (
    "the next batch is another one than the run that saved had read (a dataset, sampler or collate_fn has state that "
    "is not restored; or the script leaves out itself what was used: make its data as in a first run)"
)
_AHEAD = (
    "the script takes batches ahead of its training, and those that it had taken and not used when it saved are left "
    "out (let the DataLoader read ahead, with num_workers and prefetch_factor)"
)
_LATER = (
    "skip_first_batches leaves out batches of an epoch that had not begun at the save (its number has "
    "to count batches: the last window of gradient accumulation in an epoch may have fewer than the others)"
)
_INTERRUPTED = (
    "it was saved after an exception had ended the loop over a loader, and the script begins with that loader's first "
    "batch again (leave out what was used by accelerator.skip_first_batches, or save inside the loop)"
)

BETWEEN, INSIDE, LEFT = "between", "inside", "left"
_NOTHING_INSIDE = {"pass": None, "ahead": None, "begun": None, "last_read": None}
_OVER = object()


@dataclasses.dataclass(frozen=True)
class _Moment:
    """The state before a step was fetched; ``rng`` is None with workers, which do not draw from this process's."""

    rng: RngState | None
    mark: LoaderMark
    dataset_generators: Mapping[str, Any]


class LoaderPosition:
    """Tracks one loader that Accelerate has prepared, in a run of ``world_size`` ranks.

    ``run`` is the :class:`~accelerate_ckpt._data.loaders.LoaderPositions` that it belongs to.

    Attributes:
        outlasted_by: Loaders that were in the middle of an iteration when this one's ended, and how many batches they
            have handed out since then.
        repeats: Whether the script continues to train as if this loader had no end, as with ``itertools.cycle``.
    """

    def __init__(self, loader: Any, world_size: int, run: Any) -> None:
        self.loader = loader
        self.habit = BatchUsePattern(run.uses)
        self.is_restored = self.repeats = self._is_yet_to_begin = False
        self.was_there = False  # whether the loader was prepared before a load
        self.outlasted_by: dict[LoaderPosition, int] = {}
        self.resumes_training = False  # whether the run was resumed, and trains on batches of this loader
        self.fetches: Fetched | None = None
        self._run = run
        self._internals = Internals(loader)
        self._tracker = InnerTracker(loader.base_dataloader)
        self._division = Division(self._internals, self._tracker, world_size)
        self._internals.before_iterator(self._make_iterator)
        self._iteration_number = 0
        self._handled = id(None)  # the exception that the script handles as this iteration begins
        self._uses_when_left = 0
        self._window = 1  # the most batches between two steps of an optimizer in one iteration
        self._stepped = 0
        self._stepped_at: int | None = None
        self._is_short = False  # whether the last step of an optimizer came after fewer than ``_window`` batches
        self._closes = False  # whether one came after fewer batches at the end of an iteration
        self._captured = 0  # the last iteration whose start is in a just-in-time note
        self._phase = BETWEEN
        self._made = False
        self._steps = 0
        self._taken_by = self._restored_by = threading.get_ident()
        self._backwards_before = 0
        self._fetched = 0
        self._consumed: Consumed = self._division.nothing
        self._ahead: _Moment | None = None
        self._history: FetchHistory[_Moment] = FetchHistory(2)
        self._digests: dict[int, int] = {}  # of the batches of the last two steps, by the numbers of their fetches
        self._begun_generators: dict[str, Any] = {}
        self._first_rng: RngState | None = None
        self._begun_step: RngState | None = None
        self._resume: Mapping[str, Any] | None = None
        self._resumed: Mapping[str, Any] | None = None
        self._left: Mapping[str, Any] | None = None
        self._offered: tuple[Mapping[str, Any], int] | None = None
        self._opening: Opening | None = None
        self._leave_out = 0
        self._rng_after: RngState | None = None

    def release(self) -> None:
        """Leave the loader as it was."""
        self._internals.release()
        self._tracker.begin_at_the_beginning()
        self._tracker.release()

    # ---- following ---------------------------------------------------------------------------------------------------

    def iterate(self, begin: Callable[[Any], Generator[Any, None, None]]) -> Iterator[Any]:
        """Iterate over the loader by ``begin(loader)``, and count the steps."""
        self._run.begins(self)
        self._take_back_unused()
        number = self._now_iterating()
        yielded, over = False, False
        batches = begin(self.loader)
        try:
            while (batch := self._next(batches)) is not _OVER:
                yielded = True
                if not self._made:
                    raise unsupported_release("it does not make the iterator of the inner loader where it did")
                if number == self._iteration_number:
                    self._steps += 1
                    self._taken_by = threading.get_ident()
                    self.habit.take()
                    self._run.hands_out(self)
                    if self.fetches is not None:
                        each = self._internals.fetches
                        self.fetches.hand_out((self._steps - 1) * each, self._steps * each)
                if self._restored_by != threading.get_ident():
                    self._opening = None  # reading ahead in a thread is not skipping
                opening = self._opening
                if opening is None or opening.iteration != number:
                    yield batch
                    continue
                answer = yield from self._hand_out(opening, batch)
                if number != self._iteration_number or answer is Next.BATCH:
                    continue
                batches.close()
                self._begin_again(opening)
                if answer is Next.END:
                    return
                number, batches = self._now_iterating(), begin(self.loader)
            over = True
            if number == self._iteration_number:
                self._closes |= self._is_short and self._stepped_at == self._steps
                self.habit.end(is_whole=self._opening is None and not self.was_cut)
                self._run.ends(self)
                if not self._may_be_taken_back(self._opening):
                    self._opening = None
        except GeneratorExit:  # possibly because of an exception in the loop's body: the position is still known
            self._run.leaves()
            raise
        finally:
            # an iteration that the script has begun or restored since then has taken over
            if number == self._iteration_number:
                if self.fetches is not None:
                    self.fetches.end()
                self._phase, self._uses_when_left = BETWEEN if over else LEFT, self._run.uses.count
                if over and self._resumed is not None and not yielded:
                    # only other ranks had a batch left, and Accelerate does not count an empty iteration
                    self.loader.iteration += 1

    def _next(self, batches: Iterator[Any]) -> Any:
        self._run.asks(self)
        self._note_window()
        return next(batches, _OVER)

    def _note_window(self) -> None:
        if self._stepped != self._run.uses.steps:
            if self._stepped_at is not None:
                taken = self._steps - self._stepped_at
                self._window, self._is_short = max(self._window, taken), taken < self._window
            self._stepped, self._stepped_at = self._run.uses.steps, self._steps

    def _now_iterating(self) -> int:
        self._iteration_number += 1
        self._phase, self._made, self._steps = INSIDE, False, 0
        self._backwards_before = self._run.uses.backwards
        self._stepped, self._stepped_at = self._run.uses.steps, None
        self._handled = id(sys.exc_info()[1])
        self.habit.begin()
        opening = self._opening
        if opening is not None:
            opening.iteration = self._iteration_number
            if opening.then is Next.END:
                opening.rng = RngState.capture()
        return self._iteration_number

    def _make_iterator(self) -> Iterator[Any]:
        self._made = True
        if self._is_yet_to_begin and (self._resume is not None or self._tracker.method != "load"):
            # a script that also restores the state of its stateful loader has set the same position a second time
            self._internals.forget_loaded_state()
        self._is_yet_to_begin = False
        self._resumed, self._resume, self._left, self._offered = self._resume, None, None, None
        leave_out, self._leave_out = self._leave_out, 0
        self._fetched, self._consumed, self._ahead, self._rng_after = 0, self._division.nothing, None, None
        self._history.clear()
        self._digests.clear()
        if self.fetches is not None:
            self.fetches.begin()
        self._begun_generators, self._first_rng = self._dataset_generators(), None
        first_rows = None
        if self._resumed is None:
            # this epoch draws from the generators of the save, if no other loader has continued an epoch with them
            rng = self._run.take_rng_of_epoch() if self.resumes_training else None
            if rng is not None:
                rng.restore()
                if self._opening is not None:
                    self._opening.rng = rng
            iterator = self._begin(leave_out)
        else:
            self._rng_after = self._run.take_rng() or RngState.capture()
            # only the process that began the epoch can detect it
            self._history.draws_while_reading |= bool(self._resumed["draws_while_reading"])
            if self._opening is not None:
                self._opening.rng = self._rng_after
            if self._fits(self._resumed):
                iterator = self._continue_exact(self._resumed)
                first_rows = self._resumed["first_rows"]
            else:
                iterator = self._continue_elastic(self._resumed)
        self._internals.follow_first_rows(first_rows)
        if self._internals.fetches == 0:
            self._caught_up()
        return _Fetches(self, iterator)

    def _begin(self, leave_out: int) -> Iterator[Any]:
        # an iterator that was created too early has drawn its seed then, so a new one must draw none
        rng = RngState.capture() if self._internals.has_early_iterator else None
        if rng is not None:
            self._internals.forget_iterator()
        self._tracker.begin_at_the_beginning()
        self._tracker.begin_pass()
        drop = self._tracker.leave_out(leave_out * self._internals.fetches) if leave_out else 0
        iterator = self._internals.make_iterator()
        self._tracker.pass_made()
        if rng is not None:
            rng.restore()
        for _ in range_with_progress(drop, _AGAIN, announce_on_main):
            next(iterator, None)
        self._steps, self._fetched = leave_out, leave_out * self._internals.fetches
        return iterator

    def fetch(self, iterator: Iterator[Any]) -> Any:
        """Fetch one batch of the inner loader."""
        fetches = self._internals.fetches
        if self._fetched % fetches == 0:
            self._before_step()
        try:
            batch = next(iterator)
        except StopIteration:
            self._caught_up()
            raise
        before = self._begun_step
        if before is not None and self._tracker.may_read_again:
            self._history.was_read(self._fetched, before)
        if self.fetches is not None:
            self._digests[self._fetched] = self.fetches.fetch(self._fetched, before, batch)
            self._digests.pop(self._fetched - 2 * fetches, None)
        self._fetched += 1
        if self._fetched % fetches == 0:
            self._caught_up()
        return batch

    def _before_step(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.rng is not None:
            ahead.rng.restore()
        moment = self._moment()
        self._history.add(self._fetched, moment)
        self._begun_step = moment.rng
        if self._fetched == 0:
            self._first_rng = moment.rng

    def _moment(self) -> _Moment:
        rng = None if self._tracker.workers else RngState.capture()
        return _Moment(rng, self._tracker.mark(), self._dataset_generators())

    def _dataset_generators(self) -> dict[str, Any]:
        return self._tracker.carried.generators() if self._tracker.workers == 0 else {}

    def _caught_up(self) -> None:
        after, self._rng_after = self._rng_after, None
        if after is not None and self._resumed is not None:
            if self._fits(self._resumed):
                self._tracker.fetched_ahead(self._resumed["pass"])
                self._compare_next(self._resumed)
            after.restore()

    def _compare_next(self, state: Mapping[str, Any]) -> None:
        saved, found = state.get("next"), self._next_digests()
        if saved is None or saved["steps"] != state["steps"] or saved == found or self.fetches is None:
            return
        # repeated steps are compared anyway; a run that goes back to its own earlier state may differ on purpose
        if not self._run.difference_reported and not self.has_trained and self.problem(state) is None:
            self._run.warn_data_differs(_OTHER_NEXT)

    def _next_digests(self) -> dict[str, Any] | None:
        """Return the digests of the next step's batches, if they have been fetched."""
        first, end = (step * self._internals.fetches for step in (self._steps, self._steps + 1))
        digests = [self._digests.get(number) for number in range(first, end)]
        return None if not digests or None in digests else {"steps": self._steps, "digests": digests}

    @property
    def leaves_one_out(self) -> bool:
        """Whether a save now counts a batch that the script has taken and not used."""
        return self._phase == INSIDE and self._opening is None and self.habit.holds_one

    @property
    def is_read_ahead(self) -> bool:
        """Whether another thread takes batches, of which some may not have been used yet."""
        used = self._run.uses.backwards - self._backwards_before
        return self._taken_by != threading.get_ident() and (self._phase == INSIDE or used < self._steps)

    @property
    def was_cut(self) -> bool:
        """Whether the last iteration was the rest of one that began in another process."""
        return self._resumed is not None and int(self._resumed["steps"]) > 0

    @property
    def kind(self) -> list[str]:
        """What identifies a loader among those of a script: the classes of its data set and samplers."""
        sampler = self._tracker.sampler.source
        parts = (self._tracker.loader.dataset, sampler, getattr(sampler, "sampler", None))
        return [type(part).__qualname__ for part in parts]

    @property
    def has_trained(self) -> bool:
        """Whether this process has trained with batches of the loader."""
        self.habit.settle()
        return self.habit.trained

    # ---- capture -----------------------------------------------------------------------------------------------------

    @property
    def is_inside(self) -> bool:
        """Whether the script is in the middle of an iteration; after a load, only if it has used a batch since."""
        return self._phase == INSIDE and self._opening is None and not self.is_finished

    @property
    def is_in_last_body(self) -> bool:
        """Whether the script is in the body of the last batch of an iteration."""
        return self._phase == INSIDE and self.is_finished

    def capture(self, *, as_over: bool = False) -> dict[str, Any]:
        """Capture the position as tensors and plain data; with ``as_over``, as if this iteration was over."""
        self.habit.settle()
        waiting = self._resume or self._left
        if waiting is None and self._opening is not None and self._opening.is_unused(self._run.uses):
            waiting = self._opening.state
        if waiting is not None:
            # a save before the script has continued from a load
            return dict(waiting)
        phase, iteration = self._phase, int(self.loader.iteration)
        if in_last_body := phase == INSIDE and self.is_finished:
            # the rest of this iteration would increase the count
            phase, iteration = BETWEEN, iteration + 1
        elif as_over:
            phase, iteration = BETWEEN, iteration + 1
        inside = phase != BETWEEN
        if not inside and not as_over:
            self._tracker.begin_at_the_beginning()
        return {
            "phase": phase,
            "iteration": iteration,
            "layout": self._division.describe(),
            "steps": self._steps if inside else 0,
            "consumed": self._consumed if inside else self._division.nothing,
            "consumed_after": self._division.consumed(self._consumed, self._steps) if inside else 0,
            "between": self._tracker.capture_between_passes() if phase != INSIDE else None,
            "first_rows": self._internals.first_rows if inside else None,
            "draws_while_reading": inside and self._history.draws_while_reading,
            "habit": self.habit.longest,
            "ahead_of_training": self.habit.ahead,
            "idles": self.habit.idles,
            "finished": 0 if inside else self._steps,
            "in_last_body": in_last_body,
            "next": self._next_digests() if inside else None,
            "interrupted": phase == LEFT and self._was_interrupted(),
            **self._capture_counts(is_inside=phase == INSIDE),
            **(self._capture_inside() if inside else _NOTHING_INSIDE),
        }

    @property
    def is_being_used(self) -> bool:
        """Whether the script is in the middle of an iteration, and uses the batch that it has."""
        return self._phase == INSIDE and (self._opening is None or not self._opening.is_unused(self._run.uses))

    def capture_ahead(self) -> dict[str, Any]:
        """Capture the generators before the next batch was fetched.

        In the body of an iteration's first batch, also all that the iteration begins with, and in that of the last, all
        that the next one begins with: this differs on each rank.
        """
        if self.is_finished:
            self._tracker.begin_at_the_beginning()
            return {"between": self._tracker.capture_between_passes(), **_NOTHING_INSIDE}
        if self._captured == self._iteration_number:
            return {"ahead": self._capture_moment()}
        self._captured = self._iteration_number
        return {"between": None, **self._capture_inside()}

    def _capture_moment(self) -> dict[str, Any]:
        moment = self._moment_ahead()
        return {"rng": _encode(moment.rng), "dataset_generators": dict(moment.dataset_generators)}

    def _moment_ahead(self) -> _Moment:
        moment = self._history.before(self._steps * self._internals.fetches)
        # nothing is fetched ahead: by this rank (a dispatcher), or because the iteration was left at its end
        return moment or _Moment(None, LoaderMark(0, self._tracker.sampler.current, None), {})

    def _was_interrupted(self) -> bool:
        """Return whether the script handles a Ctrl-C or ``SystemExit`` that ended its loop; others may be planned."""
        error = sys.exc_info()[1]
        is_end = error is not None and not isinstance(error, Exception) and id(error) != self._handled
        return is_end and self._run.uses.count == self._uses_when_left

    def _capture_counts(self, *, is_inside: bool) -> dict[str, Any]:
        """Capture which variables of the script count this iteration's batches, from 0 or 1.

        As JSON text, because notes of different ranks are compared key by key.
        """
        self._note_window()
        found = {
            name: count - self._steps + 1 for name, count in (loop_counts(innermost=True).items() if is_inside else ())
        }
        counts = {name: one for name, one in found.items() if one in (0, 1)}
        return {"counts": json.dumps(counts), "window": self._window, "closes": self._closes}

    def _compare_counts(self, state: Mapping[str, Any]) -> None:
        """Report which of them count from the beginning again in a continued iteration, if it has accumulation windows.

        A script that steps after every batch mostly uses such a number only for its output.
        """
        steps, counts, window = int(state["steps"]), json.loads(state.get("counts", "{}")), int(state.get("window", 1))
        if counts and window > 1 and self._resumed is not None and self._steps == steps + 1 > 1:
            begun = {name for name, count in loop_counts().items() if count == counts.get(name)}
            if names := loop_counts(deciding=begun) if begun else ():
                self._run.warn_counter_restarts(sorted(names), is_sure=steps % window > 0 or bool(state["closes"]))

    def _capture_inside(self) -> dict[str, Any]:
        return {
            "pass": self._tracker.capture(self._moment_ahead().mark, self._steps * self._internals.fetches),
            "ahead": self._capture_moment(),
            "last_read": self._capture_last() if self._history.draws_while_reading else None,
            "begun": {"rng": _encode(self._first_rng), "dataset_generators": self._begun_generators},
        }

    def _capture_last(self) -> dict[str, Any] | None:
        """Capture the digests of the last step's batches, and the generators with which they were fetched."""
        first, end = (step * self._internals.fetches for step in (self._steps - 1, self._steps))
        moment, digests = self._history.before(first), [self._digests.get(number) for number in range(first, end)]
        if moment is None or moment.rng is None or not digests or None in digests:
            return None
        return {"steps": self._steps, "rng": moment.rng.encode(), "digests": digests}

    @property
    def is_finished(self) -> bool:
        """Whether no rank gets another batch in this iteration."""
        if not self.loader.end_of_dataloader:
            return False
        return not self._internals.may_be_uneven or self._steps >= self._division.steps_of_longest_rank(self._consumed)

    # ---- restore -----------------------------------------------------------------------------------------------------

    def _fits(self, state: Mapping[str, Any]) -> bool:
        """Return whether the data is divided over the ranks as it was."""
        return bool(state["layout"] == self._division.describe())

    def problem(self, state: Mapping[str, Any]) -> str | None:
        """Return why continuing from a captured position would not be exact, in words, or ``None``."""
        if self._fits(state):
            if state["draws_while_reading"] and not self.is_compared(state):
                return _ON_ITS_OWN
            found = [self._tracker.check(part) for part in (state["pass"], state["between"]) if part is not None]
            return next((problem for problem in found if problem is not None), None)
        if state["phase"] != INSIDE:
            return None
        obstacle = self._division.obstacle(state)
        return self._division.difference(state) if obstacle is None else f"{obstacle}, so the epoch begins again"

    @property
    def is_yet_compared(self) -> bool:
        """Whether the next iteration reads batches again that draw random numbers, and compares them."""
        return self._resume is not None and self.is_compared(self._resume)

    def is_compared(self, state: Mapping[str, Any]) -> bool:
        """Return whether the last step before a captured position is compared when it is read again."""
        last = state.get("last_read")
        return bool(self.fetches is not None and last and last["steps"] == state["steps"] and self._fits(state))

    def restore(self, state: Mapping[str, Any], rng: RngState) -> None:
        """Make the next iteration continue from a captured position, with the generators of the save."""
        self._iteration_number += 1
        self._phase, self._resume, self._left, self._leave_out = BETWEEN, None, None, 0
        self._steps, self._offered = int(state.get("finished", 0)), None
        self.is_restored = self._is_yet_to_begin = True
        self.resumes_training = bool(state.get("trained"))
        self._window, self._closes = int(state.get("window", 1)), bool(state.get("closes"))
        self.habit.carry(state.get("habit"), state.get("ahead_of_training", 0), idles=bool(state.get("idles")))
        self.loader.iteration = int(state["iteration"])
        understood = self._fits(state) or self._division.obstacle(state) is None
        if state["phase"] == INSIDE:
            self._resume = state if understood else None
        else:
            self._restore_between(state, rng, understood)
        self._opening, self._restored_by = self._opening_after(state, rng), threading.get_ident()

    def _restore_between(self, state: Mapping[str, Any], rng: RngState, understood: bool) -> None:
        between = state["between"]
        if between is None:  # the position is another loader's, and this one starts from scratch
            return
        if between["passes"]:
            self._internals.forget_iterator()
        if self._fits(state):
            self._tracker.prepare_next_pass(between)
        else:
            self._tracker.carry_between_passes(between, rng)
        if state["phase"] == LEFT and understood:
            # a stateful loader continues where it was left; with any other, the script has to ask for that by skipping
            stateful = bool(self.loader.use_stateful_dataloader)
            self._resume, self._left = (state, None) if stateful else (None, state)

    def _continue_exact(self, state: Mapping[str, Any]) -> Iterator[Any]:
        self.loader.set_epoch(int(state["iteration"]))
        self._internals.forget_iterator()
        self._consumed = state["consumed"]
        self._tracker.begin_at(self._consumed)
        begun = state["begun"]
        self._begun_generators = begun["dataset_generators"]
        self._first_rng = _decode(begun["rng"])
        self._tracker.carried.restore_generators(self._begun_generators)
        drop = self._tracker.prepare(state["pass"])
        if drop >= 100:
            log.info("reading %d batches again to get back to the saved position", drop)
        iterator = self._internals.make_iterator()
        if drop and self._first_rng is not None:
            # a division of an iterable data set keeps its first batch, to complete the last one with it
            self._first_rng.restore()
        last = state["last_read"] if self.is_compared(state) else None
        found = []
        for number in range_with_progress(drop, _AGAIN, announce_on_main):
            left = drop - number
            if last is not None and left == len(last["digests"]):
                # batches that contain random numbers are the same only with the generators of the first time
                RngState.decode(last["rng"]).restore()
            batch = next(iterator, None)
            if last is not None and left <= len(last["digests"]):
                found.append(digest_batch(batch))
        if last is not None and found != last["digests"]:
            self._run.warn_data_differs(_OTHER_BATCH)
        ahead = state["ahead"]
        self._tracker.made(ahead["dataset_generators"])
        self._steps = int(state["steps"])
        self._fetched = self._steps * self._internals.fetches
        self._ahead = _Moment(_decode(ahead["rng"]), LoaderMark(0, None, None), {})
        self._set_remainder()
        return iterator

    def _continue_elastic(self, state: Mapping[str, Any]) -> Iterator[Any]:
        self.loader.set_epoch(int(state["iteration"]))
        self._internals.forget_iterator()
        self._consumed = state["consumed_after"]
        self._tracker.begin_at(self._consumed, self._tracker.carried_moment(state["pass"]))
        self._tracker.begin_pass()
        iterator = self._internals.make_iterator()
        self._tracker.pass_made()
        self._set_remainder()
        return iterator

    def _set_remainder(self) -> None:
        """Correct the number of samples in the last step, by which ``gather_for_metrics`` knows the padding."""
        remainder = self._division.remainder(self._consumed)
        if remainder is not None:
            self.loader.remainder = remainder

    # ---- scripts that skip batches themselves ------------------------------------------------------------------------

    def skip_first_batches(self, batches: int) -> Any:
        """Return the loader for the script to iterate over: this one itself if it resumes from a checkpoint anyway."""
        left = self._left or self._offer
        if left is not None and (batches == left["steps"] or not self._fits(left)):
            self._resume, self._left = left, None
        waiting = self._resume
        opening = self._opening
        if waiting is None and opening is not None and opening.waits and opening.is_unused(self._run.uses):
            waiting = opening.state if opening.then is Next.RESUMED else None
        if waiting is None:
            if self._is_over(batches):
                self._opening = None
                return _SkippedLoader(self.loader, batches, self._begin_after_an_empty_one())
            return self.loader if batches <= 0 else _SkippedLoader(self.loader, batches, self._begin_later)
        steps = int(waiting["steps"])
        # a stream without a length has no known epochs: the Trainer counts from the beginning of the training
        counts_all = batches > steps and int(waiting["iteration"]) > 0 and not self._has_length()
        if batches != steps and not counts_all and self._fits(waiting):
            log.warning(
                "skip_first_batches was asked to skip %d batches, but the checkpoint was saved after %d: resuming "
                "after %d",
                batches,
                steps,
                steps,
            )
        return self.loader

    def _has_length(self) -> bool:
        try:
            return len(self.loader) >= 0
        except TypeError:
            return False

    def _begin_later(self, batches: int) -> bool:
        if self._follows_an_end:
            self._run.warn_data_differs(_LATER)
        self._leave_out = batches
        return True

    @property
    def _follows_an_end(self) -> bool:
        """Whether a loaded checkpoint was saved at the end of an epoch, and the script has not begun another since."""
        opening = self._opening
        if opening is None or opening.then is not Next.END or opening.iteration:
            return False
        return self._fits(opening.state)

    def _is_over(self, batches: int) -> bool:
        """Return whether the script skips what it had of a finished epoch; some scripts count one batch less."""
        opening = self._opening
        return opening is not None and self._follows_an_end and batches >= max(1, opening.steps - 1)

    def _begin_after_an_empty_one(self) -> Callable[[int], bool]:
        iterations = itertools.count()
        return lambda batches: next(iterations) > 0 and self._begin_later(batches)

    def offer(self, state: Mapping[str, Any]) -> None:
        """Make the next iteration continue from a captured position only if the script asks to skip to it.

        For a load in a process that has trained with the loader: it restores an earlier state of the model, and the
        data continues, as with stock Accelerate.
        """
        understood = self._fits(state) or self._division.obstacle(state) is None
        self._opening, self._offered = None, None
        if state["phase"] != BETWEEN and understood:
            self._offered = (state, self._run.uses.count)

    @property
    def _offer(self) -> Mapping[str, Any] | None:
        # a script that has trained since the load no longer skips to it
        offered = self._offered
        return None if offered is None or offered[1] != self._run.uses.count else offered[0]

    def _opening_after(self, state: Mapping[str, Any], rng: RngState) -> Opening | None:
        habit, steps, then = state.get("habit"), int(state["steps"]), Next.RESUMED
        if state["phase"] == BETWEEN:
            steps, then = int(state.get("finished", 0)), Next.END
        elif self._resume is None and self._left is None:
            return None
        if not habit or not steps or (then is Next.END and self.habit.idles):
            return None
        if habit == 1 and (not self._fits(state) or state["consumed"] != self._division.nothing):
            # the script itself may count batches of another division
            with contextlib.suppress(TypeError, NotImplementedError):
                steps = max(steps, len(self.loader))
        waits, ahead = self._resume is not None or then is Next.END, int(state.get("ahead_of_training", 0))
        return Opening(state, rng, steps, int(habit), then, waits, ahead)

    def _hand_out(self, opening: Opening, batch: Any) -> Generator[Any, None, Next]:
        """Hand out a batch, and find out what comes next, as long as the script has used none since the load."""
        rng, step_back = RngState.capture(), self._run.step_back()
        while True:
            opening.count = self._run.uses.count
            self._run.watch_models()
            self._run.offers()
            yield batch
            if self._opening is not opening:
                return Next.BATCH
            if not opening.is_unused(self._run.uses):
                self._opening = None
                opening.tell()
                self._compare_counts(opening.state)
                if opening.state.get("interrupted") and self._resumed is None:
                    self._run.warn_data_differs(_INTERRUPTED)
                if opening.reads_ahead:
                    self._run.warn_data_differs(_AHEAD)
                return Next.BATCH
            answer = opening.next()
            if answer is not Next.SAME:
                return answer
            rng.restore()
            step_back()

    def _begin_again(self, opening: Opening) -> None:
        """Undo an iteration of which the script has used no batch."""
        self.loader.end()
        self.restore(opening.state, opening.rng)
        self._opening = None
        if opening.then is Next.RESUMED:
            self._resume, self._left, self._opening = opening.state, None, opening
        opening.rng.restore()

    def _may_be_taken_back(self, opening: Opening | None) -> bool:
        """Return whether an iteration that ended without a use was something other than the rest of the epoch."""
        if opening is None or opening.then is not Next.RESUMED:
            return False
        # a script that uses each batch leaves at most one unused, the last one of the epoch
        return self.habit.idles or (opening.habit == 1 and self._steps - opening.steps > 1)

    def _take_back_unused(self) -> None:
        opening, self._opening = self._opening, None
        if opening is None:
            return
        if not opening.iteration:
            self._opening = opening
        elif opening.waits and opening.then is Next.RESUMED and opening.is_unused(self._run.uses):
            # the script only looked at a batch
            opening.taken = 0
            self._begin_again(opening)


def _encode(rng: RngState | None) -> dict[str, Any] | None:
    return None if rng is None else rng.encode()


def _decode(state: Mapping[str, Any] | None) -> RngState | None:
    return None if state is None else RngState.decode(state)


class _Fetches:
    """The iterator that a prepared loader gets from its inner loader."""

    def __init__(self, position: LoaderPosition, inner: Iterator[Any]) -> None:
        self._position = position
        self._inner = inner

    def __iter__(self) -> _Fetches:
        return self

    def __next__(self) -> Any:
        return self._position.fetch(self._inner)

    def __getattr__(self, name: str) -> Any:
        if name in ("_position", "_inner"):
            raise AttributeError(name)
        return getattr(self._inner, name)


class _SkippedLoader:
    """What ``skip_first_batches`` returns. The loader itself skips its first batches, so its progress is not lost.

    ``leave_out(batches)`` makes the loader's next iteration begin later, or returns False if nothing is left in it.
    """

    def __init__(self, loader: Any, batches: int, leave_out: Callable[[int], bool]) -> None:
        self._loader = loader
        self._batches = batches
        self._leave_out = leave_out

    # scripts and Accelerate check isinstance(..., DataLoader)
    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return self._loader.__class__

    def __getattr__(self, name: str) -> Any:
        if name in ("_loader", "_batches", "_leave_out"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def ckpt_skip_more(self, batches: int) -> Any:
        """Return a loader that skips ``batches`` more."""
        return _SkippedLoader(self._loader, self._batches + batches, self._leave_out)

    def __len__(self) -> int:
        return len(self._loader) - self._batches

    def __iter__(self) -> Iterator[Any]:
        if self._leave_out(self._batches):
            yield from self._loader
