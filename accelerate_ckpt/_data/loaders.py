"""Captures and restores the positions of an Accelerator's prepared loaders, and its random generators."""

from __future__ import annotations

import dataclasses
import functools
import logging
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from accelerate_ckpt._data.position import BETWEEN, LoaderPosition
from accelerate_ckpt._data.scripts_that_skip import Uses
from accelerate_ckpt._private import data as private_data
from accelerate_ckpt._recording import Fetched, Recording
from accelerate_ckpt._report import announce_on_main
from ckpt_core.errors import CheckpointFormatError
from ckpt_core.state.ddp import rebuild_ddp_buckets
from ckpt_core.state.elastic import derive_rng
from ckpt_core.state.lost_variables import is_done_with
from ckpt_core.state.rng import RngState

log = logging.getLogger(__name__)

VERSION = 1
_REPEATED = (
    "the script keeps training with one loader after another has ended: itertools.cycle repeats batches that it has "
    "kept, of which a resume has none (begin another iteration of the loader in its place)"
)
_READ_AHEAD = "a thread of the script had taken batches ahead of its training"
_UNUSED = "those that were not used yet (let the DataLoader read ahead, with num_workers and prefetch_factor)"
_RANKS_THAT_NEED_FINAL_BUCKETS = 3


@dataclasses.dataclass
class _BetweenEpochs:
    """The time between two epochs of a loader: the generators at its start, and the loaders iterated over since."""

    of: LoaderPosition
    rng: RngState
    saved: bool = False
    in_body: bool = True  # whether it starts in the body of the last batch; False: at a save after it
    passed: list[LoaderPosition] = dataclasses.field(default_factory=list)


class LoaderPositions:
    """Tracks the prepared loaders of one Accelerator.

    Create it before the Accelerator prepares models: with three or more ranks, DDP then gets its final gradient buckets
    at once, so that the first step after a resume adds gradients in the same order as an uninterrupted run.
    Raises ``CheckpointError`` if this release of Accelerate is not supported. ``warn`` is called on the main process
    with a message that says why a resume is not exact. ``before_epoch`` is called before the script takes the first
    batch of an epoch after one in which it has trained; ``before_offer`` before a resumed script gets a batch that it
    may not use.

    Example::

        positions = LoaderPositions(accelerator, warn=log.warning)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for batch in loader:
            state = positions.capture()
        positions.restore(state, saved_world_size=1)  # the next iteration continues after that batch
    """

    def __init__(self, accelerator: Any, *, warn: Callable[[str], None]) -> None:
        private_data.check(accelerator)
        self._accelerator = accelerator
        self._warn = warn
        self._positions: list[LoaderPosition] = []
        self._prepared: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._waiting: dict[int, Mapping[str, Any]] = {}
        self._restored_rng: RngState | None = None
        self._uses_at_restore = 0
        self._between: _BetweenEpochs | None = None
        self._told: set[str] = set()
        self._differs = False
        self._draws_between_epochs = self._draws_are_told = self._are_repeats_told = False
        self.leaves_loaders = False  # whether the last restore left loaders as they are: this process has trained
        self._begun_first: list[LoaderPosition] = []  # loaders iterated over before this process has trained
        self._began_with_evaluation: bool | None = None  # from the checkpoint: whether the run evaluated first
        self._unless_evaluated: tuple[str, set[int]] | None = None
        self._causes: list[str] = []
        self._rng_of_save: RngState | None = None
        # For each time between two epochs: whether the script has drawn no random numbers; since a save in the last
        # batch's body (True), or since a later one
        self._quiet: dict[bool, list[bool]] = {True: [], False: []}
        self._was_quiet: bool | None = None  # the same in the checkpoint; None if it is not known, or mixed
        self._rng_in_body: RngState | None = None  # at the first save in the body of a training batch
        self.recording: Recording | None = None
        self.before_epoch: Callable[[], None] | None = None
        self.before_offer: Callable[[], None] | None = None
        self.before_leaving: Callable[[], None] | None = (
            None  # before the script leaves a loop by break or an exception
        )
        self.uses = Uses()
        self._keep_ddp_buckets()
        private_data.register(self)

    def _keep_ddp_buckets(self) -> None:
        accelerator = self._accelerator
        if accelerator.num_processes < _RANKS_THAT_NEED_FINAL_BUCKETS:
            return
        if accelerator._models:
            self._say(
                "a model was prepared before the checkpoint plugin was attached; with three or more ranks the first "
                "step after a resume may differ in the last bits (attach before accelerator.prepare)"
            )
        stock = accelerator.prepare_model

        @functools.wraps(stock)
        def prepare_model(*args: Any, **kwargs: Any) -> Any:
            model = stock(*args, **kwargs)
            rebuild_ddp_buckets(model)
            return model

        accelerator.prepare_model = prepare_model

    def _say(self, message: str) -> None:
        if self._accelerator.is_main_process:
            self._warn(message)

    def _say_once(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            self._say(message)

    def release(self) -> None:
        """Leave the loaders as they were."""
        for position in self._positions:
            position.release()
        self._positions.clear()
        self._begun_first.clear()
        self._between = None
        vars(self._accelerator).pop("prepare_model", None)
        private_data.unregister(self)

    # ---- following ---------------------------------------------------------------------------------------------------

    def prepared(self, loader: Any) -> None:
        """Note how far training was when a loader was prepared."""
        self._prepared.setdefault(loader, self.uses.count)

    def find(self, loader: Any) -> LoaderPosition | None:
        """Return the tracked position of a loader that is iterated over; None if it is not the Accelerator's."""
        for number, prepared in enumerate(self._accelerator._dataloaders):
            if prepared is loader:
                position = self._follow(number, loader)
                if position is not None and self._is_waited_for():
                    self._assign_by_kind(number, position)
                return position
        return None

    def has_finished(self, loader: Any) -> bool:
        """Return whether the script has got all batches of the epoch."""
        return any(position.loader is loader and position.is_finished for position in self._positions)

    def trains(self, loader: Any) -> bool:
        """Return whether the script has trained on batches of a loader."""
        return any(position.loader is loader and position.has_trained for position in self._positions)

    def resumes_training(self, loader: Any) -> bool:
        """Return whether the run was resumed, and trains on batches of a loader."""
        return any(position.loader is loader and position.resumes_training for position in self._positions)

    @property
    def is_yet_compared(self) -> bool:
        """Whether a loader that draws random numbers will read batches again and compare them."""
        return any(position.is_yet_compared for position in self._positions)

    @property
    def is_between(self) -> bool:
        """Whether the script has got all training batches of this epoch."""
        return any(position.has_trained and position.is_finished for position in self._positions)

    def _follow(self, number: int, loader: Any) -> LoaderPosition | None:
        for position in self._positions:
            if position.loader is loader:
                return position
        if not private_data.Internals.is_known(loader):
            return None
        position = LoaderPosition(loader, self._accelerator.num_processes, self)
        position.fetches = Fetched(self.recording) if self.recording is not None else None
        self._positions.append(position)
        if self._is_waited_for():
            self._assign_by_number(number, position)
            self._say_causes()
        return position

    def follow(self) -> None:
        """Note the initial state of the loaders that were prepared so far, and of their samplers."""
        self._all()

    def _all(self) -> list[LoaderPosition | None]:
        loaders = self._accelerator._dataloaders
        self._positions = [p for p in self._positions if any(p.loader is loader for loader in loaders)]
        return [self._follow(number, loader) for number, loader in enumerate(loaders)]

    # ---- which saved position is whose -------------------------------------------------------------------------------

    def _is_waited_for(self) -> bool:
        """Whether there are saved positions of loaders that the script has yet to prepare, or to iterate over."""
        if self._waiting and self.uses.count != self._uses_at_restore:
            # the script has trained: loaders prepared from now on did not exist at the save, or start a new epoch
            self._waiting.clear()
        return bool(self._waiting)

    def _assign_by_number(self, number: int, position: LoaderPosition) -> None:
        """Give a loader the saved position of the one that was prepared at its number, if that was of its kind."""
        saved = self._waiting.get(number)
        if saved is not None and saved.get("kind", position.kind) == position.kind:
            self._give(number, position)

    def _assign_by_kind(self, number: int, position: LoaderPosition) -> None:
        """Give a loader without a position the first saved position of its kind, or else that of its number."""
        if position.is_restored:
            return
        same = [n for n, saved in self._waiting.items() if saved.get("kind") == position.kind]
        if same or number in self._waiting:
            self._give(next(iter(same), number), position)
            self._say_causes()

    def _give(self, number: int, position: LoaderPosition) -> None:
        saved, rng = self._waiting.pop(number), self._restored_rng
        assert rng is not None
        if not position.was_there:
            saved = _of_another(saved)
            if saved["between"] is None and saved["phase"] == BETWEEN:
                self.take_rng()  # not restored later: code before the epoch's first batch draws from them in both runs
        problem = position.problem(saved)
        if problem is not None:
            self._causes.append(problem)
        position.restore(saved, rng)

    def _say_causes(self) -> None:
        causes, self._causes = self._causes, []
        if causes:
            self._say(f"this resume is not guaranteed to be exact: {'; '.join(dict.fromkeys(causes))}")

    def _superseded(self, loaders: list[dict[str, Any] | None]) -> set[int]:
        """Return which loaders the script has replaced, as scripts do that prepare a new loader every epoch."""
        found = set()
        for number, loader in enumerate(loaders):
            for later in loaders[number + 1 :]:
                if loader is None or later is None or loader["last"] is None:
                    continue
                alike = all(loader[key] == later[key] for key in ("kind", "trained"))
                if alike and later["prepared"] > loader["prepared"] and later["prepared"] >= loader["last"]:
                    found.add(number)
        return found

    # ---- what the positions have to know -----------------------------------------------------------------------------

    def take_rng(self) -> RngState | None:
        """Return the generators of the save, once: to the first loader that resumes."""
        rng, self._rng_of_save = self._rng_of_save, None
        return rng

    def take_rng_of_epoch(self) -> RngState | None:
        """Return the generators of the save for a loader that begins an epoch, if the interrupted run began it so.

        Otherwise report if that run and this one have drawn, or may have drawn, different numbers.
        """
        rng = self.take_rng()
        if rng is None:
            return None
        has_drawn = not rng.same_as(RngState.capture())
        if self._was_quiet and has_drawn:
            announce_on_main(
                "random numbers were drawn between load_state and the first batch, and are taken back, because the run "
                "that saved has never drawn any between two epochs (draw them before load_state)"
            )
            return rng
        if self._was_quiet is None and has_drawn:
            announce_on_main(
                "random numbers were drawn between load_state and the first batch: this resume is exact only if the "
                "run that saved drew as many between its save and the next epoch (draw them before load_state)"
            )
        elif self._was_quiet is False and not has_drawn and not self._draws_are_told:
            self._causes.append(
                "it was saved at the end of an epoch, and the run that saved draws random numbers between such a save "
                "and the next epoch: the resume begins with the next epoch and does not draw them (save after that)"
            )
            self._say_causes()
        return None

    def step_back(self) -> Callable[[], None]:
        """Return a function that sets the micro-batch counter back to its present value."""
        step = int(self._accelerator.step)
        return functools.partial(setattr, self._accelerator, "step", step)

    def watch_models(self) -> None:
        """Count the next forward pass of a prepared model as the use of a batch."""
        self.uses.watch(self._accelerator._models)

    def offers(self) -> None:
        """Note that a resumed script gets a batch, perhaps not for the first time."""
        if self.before_offer is not None:
            self.before_offer()

    def asks(self, position: LoaderPosition) -> None:
        """Note that the script is done with a batch's body; warn if a resume would not repeat what it draws."""
        if self._rng_in_body is None or not position.has_trained:
            return
        rng, self._rng_in_body = self._rng_in_body, None
        if not rng.same_as(RngState.capture()):
            self._say_once(
                "the script has drawn random numbers after save_state, in what was left of the batch's body (an "
                "evaluation draws some): a resume from there continues with the next batch and does not draw them, "
                "so it is not exact (save at the end of the loop's body)"
            )

    def leaves(self) -> None:
        """Note that the script leaves a loop before its end."""
        if self.before_leaving is not None:
            self.before_leaving()

    def begins(self, position: LoaderPosition) -> None:
        """Note that the script begins to iterate over a loader; warn if a resume would not repeat what it draws."""
        if position.has_trained:
            self._rng_in_body = None  # the loop of that batch was left
            if self.before_epoch is not None:
                self.before_epoch()
        position.outlasted_by.clear()
        for other in self._positions:
            other.outlasted_by.pop(position, None)
        if self.uses.count == 0:
            self._begun_first.append(position)
        if self._unless_evaluated is not None:
            (cause, trained), self._unless_evaluated = self._unless_evaluated, None
            loaders = enumerate(self._accelerator._dataloaders)
            if any(number in trained and loader is position.loader for number, loader in loaders):
                self._causes.append(cause)
                self._say_causes()
        between = self._between
        if between is None:
            return
        if position is not between.of:
            between.passed.append(position)
            return
        self._between = None
        # a resumed run iterates over loaders that are trained on, too
        evaluated = any(not passed.has_trained for passed in between.passed)
        is_quiet = between.rng.same_as(RngState.capture())
        self._quiet[between.in_body].append(is_quiet)
        if not evaluated or is_quiet:
            return
        self._draws_between_epochs = True
        if between.saved and not self._begins_with_evaluation:
            self._say_once(
                "an evaluation between two epochs has drawn random numbers after the checkpoint at the end of the "
                "epoch was saved: a resume from it begins with the next epoch and does not draw them, so it is not "
                "exact (save after the evaluation)"
            )

    def hands_out(self, position: LoaderPosition) -> None:
        """Note that the script gets a batch; warn if it repeats another loader's, of which a resume has only a part."""
        if position.has_trained:
            self._rng_in_body = None  # the save was between two batches, with nothing left of a body
        for other in self._positions:
            if position in other.outlasted_by:
                other.outlasted_by[position] += 1
                if other.outlasted_by[position] == 2 and position.has_trained and other.has_trained:
                    other.repeats = True
                    if other.was_cut and not self._are_repeats_told:
                        self._are_repeats_told = True
                        self._causes.append(_REPEATED)
                        self._say_causes()

    def warn_data_differs(self, cause: str) -> None:
        """Note that batches that a loader has read again differ from those of the first time; warn once."""
        message = f"this resume is not exact: {cause}"
        if not self._accelerator.is_main_process and message not in self._told:  # rank 0's may be equal, and not warn
            log.warning("rank %d: %s", self._accelerator.process_index, message)
        self._say_once(message)
        self._differs = True
        if self.recording is not None:
            self.recording.told()

    def warn_counter_restarts(self, names: list[str], *, is_sure: bool) -> None:
        """Warn (``is_sure``), or else announce, that variables count a resumed epoch's batches from its beginning."""
        cause = (
            f"{', '.join(names)} counts the batches of the resumed epoch from its beginning, as enumerate does, and "
            "decides something (in that epoch: enumerate(loader, accelerator.resumed.batch))"
        )
        if is_sure:
            self._causes.append(cause)
            self._say_causes()
        else:
            announce_on_main(f"this resume is exact only if the number does not matter: {cause}")

    @property
    def difference_reported(self) -> bool:
        """Whether a difference was reported, or the flight recorder will compare steps, and report one itself."""
        return self._differs or (self.recording is not None and self.recording.repeats_steps)

    def ends(self, position: LoaderPosition) -> None:
        """Note that the script has gone through a whole loader."""
        others = (other for other in self._positions if other is not position)
        position.outlasted_by = {other: 0 for other in others if other.is_inside}
        if self._between is None and position.has_trained:
            self._between = _BetweenEpochs(position, RngState.capture())

    @property
    def _begins_with_evaluation(self) -> bool:
        """Whether the script evaluates before it trains, which it may do again after a resume."""
        if self._began_with_evaluation is not None:
            return self._began_with_evaluation
        return any(not position.has_trained for position in self._begun_first)

    # ---- capture and restore -----------------------------------------------------------------------------------------

    def capture(self) -> dict[str, Any]:
        """Capture this rank's random generators and the positions of its loaders, as tensors and plain data."""
        # first, because capturing a loader may draw from the generators
        rng = RngState.capture()
        positions = self._all()
        for number, position in enumerate(positions):
            if position is not None and self._is_waited_for():
                self._assign_by_kind(number, position)
        trains = any(position is not None and position.has_trained for position in positions)
        evaluates = [p is not None and trains and p.is_inside and not p.has_trained for p in positions]
        loaders = [
            None if position is None else self._capture(position, as_over=evaluated)
            for position, evaluated in zip(positions, evaluates, strict=True)
        ]
        leaves_one_out = any(position is not None and position.leaves_one_out for position in positions)
        if leaves_one_out:
            self._say_once(
                "save_state was called after the script took a batch, but before it used it: a resume skips that "
                "batch (save at the end of the loop's body)"
            )
        is_inside = any(position is not None and position.is_inside for position in positions)
        repeats = is_inside and any(position is not None and position.repeats for position in positions)
        read_ahead = any(position is not None and position.is_read_ahead for position in positions)
        if read_ahead:
            self._say_once(f"{_READ_AHEAD} when save_state was called: a resume leaves out {_UNUSED}")
        is_told = leaves_one_out or read_ahead or any(evaluates)
        if is_inside and trains and not is_told and self._rng_in_body is None:
            self._rng_in_body = rng
        for number in self._superseded(loaders):
            loaders[number] = None
        rng.restore()
        ended = [
            p for p, saved in zip(positions, loaders, strict=True) if saved and saved["trained"] and saved["finished"]
        ]
        in_body = is_inside or any(position is not None and position.is_in_last_body for position in ended)
        self._between = None
        if len(ended) == 1 and ended[0]:
            self._between = _BetweenEpochs(ended[0], rng, saved=True, in_body=in_body)
        return {
            "version": VERSION,
            "step": int(self._accelerator.step),
            "rng": rng.encode(),
            "draws_between_epochs": self._draws_between_epochs and bool(ended),
            "begins_with_evaluation": self._begins_with_evaluation,
            "is_quiet": self._has_been_quiet(in_body=in_body),
            "in_evaluation": any(evaluates),
            "read_ahead": read_ahead,
            "repeats": repeats,
            "loaders": loaders,
        }

    def _has_been_quiet(self, *, in_body: bool) -> bool | None:
        """Return True if the script never draws between two epochs after such a save, False if it always does.

        None if that is not known. One epoch does not suffice: a script may do something in every second one.
        """
        here = self._quiet[in_body]
        if not here and not in_body:  # after a later save, less code follows
            here = self._quiet[True] if all(self._quiet[True]) else []
        if all(here):
            return True if len(here) > 1 else None
        return None if any(here) else False

    def capture_ahead(self) -> dict[int, Any]:
        """Capture, by number of the loader, the generators before the batch that it has fetched ahead.

        Before the first step of an iteration that trains, capture its whole position.
        """
        positions = ((number, position) for number, position in enumerate(self._all()) if position is not None)
        return {number: position.capture_ahead() for number, position in positions if position.is_being_used}

    @property
    def is_settled(self) -> bool:
        """Whether no saved position waits for its loader any more."""
        return not self._is_waited_for()

    def _capture(self, position: LoaderPosition, *, as_over: bool) -> dict[str, Any]:
        history = {
            "kind": position.kind,
            "trained": position.has_trained,
            "prepared": self._prepared.get(position.loader, 0),
            "last": position.habit.last,
        }
        found = {**position.capture(as_over=as_over), **history}
        # scripts that prepare a loader for each epoch no longer use this one
        others = 1 + sum(one is position.loader for one in self._accelerator._dataloaders)  # 1: Internals.loader
        is_over = bool(found["finished"] and found["trained"])
        found["is_last_pass"] = is_over and is_done_with(position, "loader", others=others)
        return found

    def restore(self, state: Mapping[str, Any], *, saved_world_size: int, has_own: bool = True) -> bool:
        """Restore the generators, and make the next iteration of each loader continue where it was.

        If another number of ranks saved the checkpoint, the ranks divide the rest of the epoch that all old ranks had
        in common: nothing is lost, and nothing repeated except the padding by which Accelerate gives all ranks equally
        many batches. Ranks that existed keep their generators; those of a new rank are derived from rank 0's and its
        own number. ``state`` is what :meth:`capture` returned on this rank (``has_own``); on a rank that did not exist,
        what it returned on rank 0.
        """
        if state["version"] > VERSION:
            raise CheckpointFormatError(
                f"the data position has version {state['version']}, this release reads up to {VERSION}",
                remedy="update ckpt-plugins",
            )
        rank, world_size = self._accelerator.process_index, self._accelerator.num_processes
        rng = RngState.decode(state["rng"])
        self._accelerator.step = int(state["step"])
        causes = []
        if saved_world_size != world_size:
            causes.append(
                f"the checkpoint was saved by {saved_world_size} rank{'s' * (saved_world_size > 1)} and is loaded by "
                f"{world_size}: the rest of the epoch is divided over the new ranks, so batches and random numbers "
                "differ from those of the old number of ranks"
            )
        self._began_with_evaluation, self._unless_evaluated = bool(state.get("begins_with_evaluation")), None
        self._was_quiet = state.get("is_quiet")
        self._draws_are_told = bool(state.get("draws_between_epochs"))
        if self._draws_are_told:
            cause = (
                "it was saved at the end of an epoch, before an evaluation that draws random numbers: the resume "
                "begins with the next epoch and does not draw them (save after the evaluation)"
            )
            if self._began_with_evaluation:  # it is not known yet whether this start does, too
                trained = {number for number, saved in enumerate(state["loaders"]) if saved and saved["trained"]}
                self._unless_evaluated = cause, trained
            else:
                causes.append(cause)
        if state.get("in_evaluation"):
            causes.append(
                "it was saved inside an evaluation, whose rest is skipped: the next one is complete (save before "
                "an evaluation, or after it)"
            )
        self._are_repeats_told = bool(state.get("repeats"))
        if self._are_repeats_told:
            causes.append(_REPEATED)
        if state.get("read_ahead"):
            causes.append(f"{_READ_AHEAD} when it was saved: the resume leaves out {_UNUSED}")
        self._waiting, self._causes, self._rng_in_body, self._differs = {}, causes, None, False
        positions = self._all()
        self._waiting = {number: saved for number, saved in enumerate(state["loaders"]) if saved}
        self._restored_rng, self._uses_at_restore = rng, self.uses.count
        # a process that has trained keeps its position in the data, and gets an earlier state of the model back
        rolls_back = any(position is not None and position.has_trained for position in positions)
        self.leaves_loaders = False
        for number, position in enumerate(positions):
            if position is None:
                continue
            position.is_restored, position.was_there = False, True
            if number in self._waiting and rolls_back and not position.loader.use_stateful_dataloader:
                position.offer(self._waiting.pop(number))
                self.leaves_loaders = True
            elif number in self._waiting:
                self._assign_by_number(number, position)
        if rolls_back:
            self._waiting.clear()
        is_exact = not self._causes
        self._say_causes()
        self._rng_of_save = rng if has_own and rank < saved_world_size else derive_rng(rng, rank)
        self._rng_of_save.restore()
        return is_exact


def _of_another(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """Adapt a saved position to a loader that is created after the load, such as one that is created per epoch."""
    between = saved["between"]
    if saved["phase"] != BETWEEN:
        return saved
    if saved.get("is_last_pass"):
        return {**saved, "iteration": 0, "between": None}
    return {**saved, "between": {**between, "passes": 0, "workers": []}} if between.get("workers") else saved
