"""Captures the exact state of a fit for a checkpoint, and restores it at a resume.

A save can happen at many points of Lightning's loops. Each is one of a few *phases*, named by what remains to be done:

======================  ================================================================================================
``between_epochs``      begin the next epoch
``batch``               fetch the next batch (also: fetch the batch again that was interrupted)
``batch_end``           the end of a batch after its ``on_train_batch_end`` hooks, validation if it is due, and so on
``validation``          validation, from its start, then as above
``validation_end``      what follows a validation after its ``on_validation_end`` hooks
``epoch_end``           the end of an epoch after its ``on_train_epoch_end`` hooks
======================  ================================================================================================

A resumed run restores all counters and values, and then does what remains. Lightning's own restart logic, which
repeats or leaves out parts of that, is not used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from ckpt_core.errors import CheckpointFormatError
from ckpt_core.process.console import warn
from ckpt_core.recorder import digest_generators
from ckpt_core.state.changed_values import fingerprint, looks_without_waiting
from ckpt_core.state.ddp import rebuild_ddp_buckets, unsaved_hook_states
from ckpt_core.state.fast_pickle import Noted
from ckpt_core.state.gradients import capture_gradients, restore_gradients
from ckpt_core.state.kinds import Kind, capture_buffers, join_ranks, parameters_of, restore_buffers, state_of_rank
from ckpt_core.state.loader_objects import Carried
from ckpt_core.state.loaders import READS_ON
from ckpt_core.state.rng import RngState, restore_generators
from ckpt_core.state.trainer_parts import GRADIENTS_KEY
from ckpt_core.state.value_marks import mark_of, some
from lightning_ckpt._exact.counters import Accumulation, Counters, Limits, epochs_begun, undo_unfinished
from lightning_ckpt._exact.epoch_lengths import EpochLengths, has_all, is_cut_short
from lightning_ckpt._exact.epoch_start import EpochStart, is_users_own
from lightning_ckpt._exact.fit_resume import Resume
from lightning_ckpt._exact.loaders import DRAWS_WHILE_READ, TrainingData
from lightning_ckpt._exact.lost_variables import ScriptVariables, lost_in_words
from lightning_ckpt._exact.metrics import FollowedMetric, MetricsMoment, follow_metrics, restore_metrics
from lightning_ckpt._exact.modes import Modes
from lightning_ckpt._exact.parameter_groups import ParameterGroups
from lightning_ckpt._exact.precision import Precision, as_python_numbers
from lightning_ckpt._exact.rank_states import continue_elastic, elastic_causes, put_back, split_large, state_for_rank
from lightning_ckpt._exact.user_attributes import Digests, UserAttributes
from lightning_ckpt._private.guard import check
from lightning_ckpt._private.loops import Internals
from lightning_ckpt._private.pruning import missing_masks, weights_to_go_back_to
from lightning_ckpt._private.replacing import Live
from lightning_ckpt._recording import Recording
from lightning_ckpt._report import announce, resumed_in_words
from lightning_ckpt._routing.gathering import Gathering, on_host
from lightning_ckpt._routing.post_local_sgd import PostLocalSgd
from lightning_ckpt._routing.trainer import is_routed, keeps_whole_gradients
from lightning_ckpt.io import NO_STATE_KEY

KEY = "lightning_ckpt"
VERSION = 1
# the hooks before each of these phases; a run that stops inside such a hook is in the phase already
_LAST_HOOKS = {
    "batch_end": "on_train_batch_end",
    "validation_end": "on_validation_end",
    "epoch_end": "on_train_epoch_end",
}

_ATTRIBUTE = "_lightning_ckpt_exact_state"
_INEXACT = "not exact, see the warning"
_IN_PROGRESS = (
    "_after_fit",
    "_is_in_epoch",
    "_is_inside",
    "_batch",
    "_validation",
    "_validation_over",
    "_validation_progress",
    "_before",
    "_versions_at_end",
    "_hooks_are_over",
    "_after_hooks",
)


@dataclasses.dataclass(frozen=True)
class _Moment:
    """The values that a batch or a validation in progress changes, as they were before it."""

    rng: RngState
    metrics: MetricsMoment
    versions: int
    generators: Mapping[str, Any]
    attributes: Mapping[Any, Any]


class ExactState(Live):
    """The exact state of one Trainer, shared by all callbacks on it.

    With ``replay``, the position of loaders is always restored by reading batches again; ``warn`` is called on rank 0
    with the causes why a resume is not exact.
    """

    def __init__(self, trainer: Any, replay: bool, warn: Callable[[str], None]) -> None:
        check(trainer)
        self._trainer = trainer
        self._internals = Internals(trainer)
        self._data = TrainingData(self._internals, replay, self._before_fetch)
        self._warn = warn if trainer.is_global_zero else _keep_quiet
        self.gathering = Gathering(trainer)
        self._post_local_sgd = PostLocalSgd(trainer, self.gathering)
        self._resume = Resume(self._internals)
        self._counters = Counters(self._internals, self._run_inside)
        self._accumulation = Accumulation(trainer)
        self._limits = Limits(self._internals)
        self._groups = ParameterGroups(trainer)
        self._epoch = EpochStart(self._internals, self._groups)
        self._modes = Modes(trainer.lightning_module)
        self._users = UserAttributes(trainer)
        self._variables = ScriptVariables(trainer, self._warn)
        self._lengths = EpochLengths()
        self._is_in_epoch = self._is_inside = self._is_cut = self._trains = False
        self._versions_at_end: int | None = None
        self._changes_late = self._hooks_are_over = self._is_behind_hooks = False
        self._after_hooks: list[Callable[[], None]] = []
        self._continues = self._has_none = False
        self._loaded: dict[str, Any] | None = None
        # for train and val loaders: the step at which they were made, and the generators before, if making them draws
        self._made: dict[str, Any] = {}
        self._made_noted: tuple[dict[str, Any], Noted] | None = None
        self._drawn = (0, "")
        self._to_make: dict[str, dict[str, Any]] = {}  # the same in the checkpoint that is resumed from
        # whether this fit, or the one before it, had nothing left to train in the checkpoint of a later fit
        self._resumed_later_fit = self._follows_such_fit = False
        self._ahead: Callable[[], Any] = _no_model  # returns the model of the fit that resumed so
        self._precision: Precision | None = None  # for rounded tensors of the checkpoint, until training starts
        self._buffers: Collection[str] = ()  # names of the module's buffers at the start of the fit
        self._late: dict[str, torch.Tensor] = {}  # saved tensors for which the module has no place yet
        self._batch: _Moment | None = None
        self._validation: _Moment | None = None
        self._validation_progress: dict[str, Any] = {}
        self._before: Digests = {}  # of attributes, before the validation
        self._validation_over = False
        self._modes_outside: dict[str, dict[str, bool]] = {}
        self._averaged = False
        self._backward = False
        self._open_gradients: set[int] = set()
        self._tensors: list[torch.Tensor] = []
        self._metrics: list[FollowedMetric] = []
        self._of_validation: list[tuple[int, Carried]] = []
        self._begun: tuple[Any, Noted] | None = None
        self._after_fit: dict[str, Any] | None = None
        self._recording: Recording | None = None
        # Called before each batch is fetched and each validation begins
        self.at_moment: Callable[[], None] | None = None
        # The state of all ranks to save instead of gathering it, when a rank has died
        self.joined: dict[str, Any] | None = None
        self._released = False
        self._internals.before_iterators(self._before_iterators)
        self._internals.around_setup(self._set_up)
        self._internals.around_epoch_start(self._epoch_starts)
        self._internals.around_validation(self._before_validation, self._end_validation, self._after_validation)
        self._internals.after_last_hooks(self._hooks_have_run)

    @classmethod
    def of(cls, trainer: Any, replay: bool, warn: Callable[[str], None]) -> ExactState:
        """Return the state of a Trainer that starts a fit; all its callbacks share it."""
        before: ExactState | None = getattr(trainer, _ATTRIBUTE, None)
        if before is not None and not before._released:
            return before
        state = cls(trainer, replay, warn)
        if before is not None and before._resumed_later_fit:
            state._follows_such_fit, state._ahead = True, before._ahead
        setattr(trainer, _ATTRIBUTE, state)
        return state

    @staticmethod
    def resumed_ahead(trainer: Any) -> bool:
        """Return whether a Trainer's last fit had nothing left to train in the checkpoint of a later fit."""
        state = getattr(trainer, _ATTRIBUTE, None)
        return state is not None and state._resumed_later_fit

    @staticmethod
    def evaluation_begins(trainer: Any, stage: str, warn: Callable[[str], None]) -> None:
        """Warn if an evaluation runs with the weights of a later fit."""
        if ExactState.resumed_ahead(trainer) and trainer.is_global_zero:
            warn(
                f"this trainer.{stage} has the weights of a checkpoint that a later fit had saved: the fit before it "
                "resumed from that one, and had nothing left to train"
            )

    def record(self, recording: Recording) -> None:
        """Record the steps of the fit in ``recording``, which compares them after a resume."""
        self._recording = recording
        self._data.after_fetch, self._data.after_reading_again = recording.fetched, recording.read_again

    # ---- while training ----------------------------------------------------------------------------------------------

    def fit_started(self) -> None:
        """Prepare the fit; called when the model is wrapped and on its device, before anything is trained."""
        self._trains = False
        if self._trainer.world_size > 2:
            rebuild_ddp_buckets(self._trainer.strategy.model)
        self._post_local_sgd.fit_started()
        self._groups.begin()
        if self._precision is not None:
            self._precision.restore_weights(self._trainer.lightning_module)
        self._buffers = {name for name, _ in self._trainer.lightning_module.named_buffers()}
        self._limits.fit_started()
        self._resume_limits()

    def training_starts(self) -> None:
        """Restore counters before the loops read them; called in the hooks ``on_train_start``."""
        self._after_fit = None
        self._trains = not self._is_inside
        precision, self._precision = self._precision, None
        if precision is not None:
            precision.restore_optimizers(self._trainer.optimizers, self._trainer.lightning_module)
        self._counters.training_starts()
        self._accumulation.training_starts()
        self._look_again()
        self._users.training_starts()
        if self._loaded is not None:
            shared, mine = self._loaded[Kind.REPLICATED.value], self._loaded["mine"]
            self._internals.set_progress(shared["progress"])
            counters, own = shared.get("post_local_sgd", {}), mine.get("post_local_sgd", {})
            shared["notes"] += self._post_local_sgd.restore(counters, own, resharded=self._is_resharded(self._loaded))
            self._continues = True
            if self._follows_such_fit and self._ahead() is not self._trainer.lightning_module:
                self._warn(
                    "the fit before this one, of another model, resumed from a checkpoint that this fit had saved, so "
                    "that model has the weights of this one (give each model a Trainer and a directory of its own)"
                )
        elif self._has_none:
            self._announce(self._internals.progress(), _INEXACT)
        elif self._follows_such_fit:
            self._warn(
                "an earlier fit of this Trainer had nothing left to train, as it resumed from a checkpoint that this "
                "fit had saved, and this fit has no ckpt_path (give it ckpt_path, too)"
            )
        self._has_none = self._follows_such_fit = False

    def fit_ended(self) -> None:
        """Finish the fit; if nothing was left to train, restore here what the script may use after it."""
        self._variables.ends()
        if self._loaded is not None:
            shared, mine = self._loaded[Kind.REPLICATED.value], self._loaded["mine"]
            # what a script reads after a fit, such as the metrics that it reports
            restore_metrics(self._internals, self._trainer.lightning_module, mine["metrics"])
            if notes := shared["notes"]:
                self._warn("; ".join(notes))
            epochs = epochs_begun(shared["phase"], shared["progress"]["epoch"]["current"]["processed"])
            limits, done = self._internals.limits(), {"max_epochs": epochs, "max_steps": self._trainer.global_step}
            self._resumed_later_fit = any(
                n > limits[name] for name, n in done.items() if limits[name] not in (None, -1)
            )
            self._ahead = weakref.ref(self._trainer.lightning_module)
            # for what a script draws after a fit, such as the weights of the next model
            RngState.decode(mine["rng"]).restore()
        if self._loaded is not None or self._has_none:
            self._announce(self._internals.progress(), "nothing is left to train")

    def _announce(self, progress: Mapping[str, Any], outcome: str) -> None:
        announce(self._trainer, resumed_in_words(self._trainer, self._resume.path, progress)(outcome))

    def _epoch_starts(self, begin: Callable[[], None]) -> None:
        if self._continues and self._loaded is not None:
            self._continues = False
            self._continue(begin)
        else:
            self._begin_epoch(begin)
            if not self._is_inside:
                self._variables.epoch_begins()

    def _begin_epoch(self, begin: Callable[[], None]) -> None:
        self._epoch_ended()
        before = self._users.digests()
        self._epoch.run(begin)
        self._users.epoch_began(before)
        self._look_again()
        self._is_in_epoch = True

    def _epoch_ended(self) -> None:
        batches = self._taken_in_epoch()
        if batches is not None:
            problem = self._lengths.ended(batches, self._trainer.current_epoch - 1)
            # loaders that know their length have lost nothing if they gave that many batches
            if problem is not None and batches < self._data.batches_now:
                self._warn(problem)
        self._is_in_epoch = self._is_cut = False

    def _taken_in_epoch(self) -> int | None:
        batch = self._internals.progress()["batch"]["current"]
        # True if a hook (on_train_batch_start) skipped the rest of the epoch. A batch of None is completed, not started
        is_cut = self._is_cut or max(batch["started"], batch["completed"]) < batch["ready"]
        return self._data.taken if self._is_in_epoch and not (self._is_inside or is_cut) else None

    def _whole_epoch(self) -> int | None:
        # a run that resumes after the last batch of an epoch counts only later epochs, so this one is counted now
        return None if is_cut_short(self._trainer) else self._taken_in_epoch()

    def _cut_after(self, progress: Mapping[str, Any]) -> int | None:
        """Return the number of batches of an epoch that ended before its last batch because training ended; or None."""
        is_cut = is_cut_short(self._trainer) and not (progress["is_last_batch"] or self._is_inside)
        return int(progress["current"]["ready"]) or None if is_cut else None

    def _look_again(self) -> None:
        # hooks may have replaced tensors and metrics
        module = self._trainer.lightning_module
        self._tensors = [*parameters_of([module]), *module.buffers()]
        self._metrics = follow_metrics(module, self._metrics)
        self._of_validation = []
        if self._recording is not None:
            self._recording.look()

    def _moment(self, rng: RngState) -> _Moment:
        metrics = MetricsMoment.take(self._internals, self._metrics)
        versions, generators = self._versions(), self._users.generators.generators()
        return _Moment(rng, metrics, versions, generators, self._users.now())

    def _versions(self) -> int:
        return sum(tensor._version for tensor in self._tensors)

    def _set_up(self, name: str, set_up: Callable[[], None]) -> None:
        # a resumed run makes its loaders as they were last made before the save: in that epoch, with those generators
        generators, last = self._users.generators, self._internals.combined(name)
        then = self._to_make.get(name, {})
        made = then if last is None else {}  # after a tuner's search, they are made again
        generators.look()
        if "rng" in made:
            RngState.decode(made["rng"]).restore()
            generators.restore_generators(made["generators"])
        before, own = RngState.capture(), generators.generators()
        not_drawn = self._drawn = self._numbers()
        with self._internals.at(then.get("epoch", math.inf), then.get("step")):
            step = self._trainer.global_step
            set_up()
        if self._internals.combined(name) is last:
            return
        drawn = self._drawn if name == "train_reload_epoch" else self._numbers()
        by = {key: made[key] for key in ("rng", "generators") if key in made}
        if not by and drawn != not_drawn:
            by = {"rng": before.encode(), "generators": own}
        self._made = {**self._made, name: {**by, "step": step} if by or step else None}

    def _numbers(self) -> tuple[int, str]:
        """Return digests of all generators, also the user's, which differ once random numbers are drawn."""
        return digest_generators(), fingerprint(self._users.generators.generators())

    def _before_iterators(self) -> None:
        self._drawn = self._numbers()  # after making the loaders, before their iterators, which draw in every run
        self._data.follow()
        # a callback that trains before the training state is restored does get batches
        self._data.idle = self._loaded is not None and not self._resume.awaits_training_state

    def _before_fetch(self, rng: RngState) -> None:
        self._batch = self._moment(rng)
        self._backward = self._hooks_are_over = False
        self._after_hooks = []  # left over if a hook failed
        self._validation = self._after_fit = None  # left over if loops failed that a callback ran
        if self._data.attempts <= self._data.begun + self._internals.prefetched:
            # a training_step that takes the iterator is counted before it fetches
            self._counters.pass_begins(self._data.begun + self._internals.steps_take_the_iterator)
        if not self._window_open(self._internals.counts()["batch"]["ready"]):
            self._accumulation.window_closed()
        if self.at_moment is not None:
            self.at_moment()

    def _run_inside(self, run: Callable[[], Any]) -> Any:
        # a callback runs the loops inside the running loops, which continue after that with the state kept here
        kept, begun = {name: vars(self)[name] for name in _IN_PROGRESS}, self._epoch.begun
        self._is_inside = True
        try:
            with contextlib.nullcontext() if self._recording is None else self._recording.inside():
                return run()
        finally:
            vars(self).update(kept)
            self._epoch.begun = begun
            # such a callback may leave less of the epoch, which must not look like lost data
            self._is_cut = True

    def _before_validation(self) -> None:
        if not self._trainer.sanity_checking:
            self._validation, self._validation_over = self._moment(RngState.capture()), False
            self._modes_outside = self._modes.capture()
            self._validation_progress = self._internals.progress()
            self._before = self._users.digests()
            if self.at_moment is not None:
                self.at_moment()

    def _end_validation(self) -> None:
        self._validation_over = True

    def _after_validation(self) -> None:
        self._validation = None
        self._of_validation = []

    def weights_averaged(self, averaged: bool) -> None:
        """Note whether a weight averaging callback has put the averaged weights into the model."""
        self._averaged = averaged

    def backward_begins(self) -> None:
        """Note that a backward pass begins to change gradients."""
        self._backward = True

    def gradients_added(self, module: torch.nn.Module) -> None:
        """Note open gradients after a backward pass, if only the user's code knows when a window ends."""
        if not module.automatic_optimization:
            self._open_gradients.update(id(p) for p in module.parameters() if p.grad is not None)

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer uses its gradients, which are no longer open."""
        if self._open_gradients:
            self._open_gradients.difference_update(id(p) for group in optimizer.param_groups for p in group["params"])

    def after_hooks(self, name: str, save: Callable[[], None]) -> None:
        """Call ``save`` when the hooks ``name`` have run; the module's own runs after those of all callbacks.

        ``name`` is ``on_train_batch_end`` or ``on_validation_end``. If the module has none, ``save`` is called at once.
        """
        if self._released or not is_users_own(getattr(type(self._trainer.lightning_module), name, None)):
            save()
            return
        if name == "on_train_batch_end":
            self._versions_at_end = self._versions()
        self._after_hooks.append(save)

    def _hooks_have_run(self) -> None:
        if self._versions_at_end is not None:
            self._changes_late |= self._versions_at_end != self._versions()
            self._versions_at_end, self._hooks_are_over = None, True
        saves, self._after_hooks = self._after_hooks, []
        self._is_behind_hooks = True
        try:
            for save in saves:
                save()
        finally:
            self._is_behind_hooks = False

    def training_ended(self) -> None:
        """Capture the state for saves after the fit now, because the loops will be torn down."""
        self._after_fit = self._capture_rank()
        if has_all(self._trainer):
            self._epoch_ended()

    def release(self) -> None:
        """Leave Lightning's objects as they were."""
        self._after_fit = self._after_fit or {}
        self._released = True
        self._data.release()
        self._post_local_sgd.release()
        self._internals.release()

    # ---- capture -----------------------------------------------------------------------------------------------------

    def save(self, checkpoint: dict[str, Any]) -> None:
        """Put the exact state of all ranks into a checkpoint, on rank 0; called on every rank, once per checkpoint."""
        for name in ("optimizer_states", "lr_schedulers"):
            if name in checkpoint:
                checkpoint[name] = as_python_numbers(checkpoint[name])
        if self._loaded is not None or self._resume.awaits_training_state:
            self._save_again(checkpoint)
            return
        if self.joined is not None:
            checkpoint[KEY] = {"version": VERSION, **self.joined}
            self._unswap_averaged_weights(checkpoint)
            return
        mine = dict(self._after_fit if self._after_fit is not None else self._capture_rank(is_saved=True))
        if not mine:
            return
        mine["per_rank"] = {**mine["per_rank"], "buffers": self._own_buffers(mine["per_rank"]["gradients"])}
        if is_routed(self._trainer.strategy):
            checkpoint[GRADIENTS_KEY], mine["per_rank"] = split_large(mine["per_rank"])
        counters = self._post_local_sgd.counters()
        mine["alarm"] = self._recording.take_alarm() if self._recording is not None else ""
        ranks = self.gathering.gather(mine)
        if ranks is not None:
            for alarm in filter(None, (rank["alarm"] for rank in ranks if rank is not None)):
                warn(alarm, stacklevel=2)
            notes = sorted({note for rank in ranks if rank is not None for note in rank["notes"]})
            notes += missing_masks(self._trainer.lightning_module, checkpoint.get("state_dict", {}))
            common = {"world_size": self._trainer.world_size, "notes": notes, "post_local_sgd": counters}
            common["goes_back_to"] = self._goes_back_to
            are_means = self._averaged or counters.get("differ")
            common["weights"] = "" if are_means else self._mark_if_replaced(checkpoint.get("state_dict", {}))
            replicated = {**ranks[0]["replicated"], **common}
            per_rank = [None if r is None else r["per_rank"] for r in ranks]
            checkpoint[KEY] = {"version": VERSION, **join_ranks(replicated, per_rank)}
        self._unswap_averaged_weights(checkpoint)

    def _mark_if_replaced(self, saved: Mapping[str, Any]) -> str:
        """Return the mark of the weights if hooks have saved others in their place, or may still do so; else ``""``."""
        module = self._trainer.lightning_module
        if self._trainer.strategy.restore_checkpoint_after_setup:
            return ""  # sharded
        may_be_others = is_users_own(type(module).on_save_checkpoint)  # the module's hook runs after this
        with contextlib.suppress(RuntimeError, ValueError):  # some tensors have no data_ptr
            live = [(saved[name], one) for name, one in module.named_parameters() if name in saved]
            may_be_others |= any(
                not isinstance(kept, torch.Tensor) or kept.data_ptr() != one.data_ptr() for kept, one in live
            )
        return _mark_of_weights(module) if may_be_others else ""

    def _own_buffers(self, gradients: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return this rank's buffers if they may differ from rank 0's, such as BatchNorm's statistics without DDP.

        DDP copies rank 0's buffers to all ranks before a forward pass, but not inside an open accumulation window
        (``gradients`` are then not empty), nor under manual optimization after the first pass, nor after a validation,
        whose first forward pass has done so.
        """
        model, module = self._trainer.strategy.model, self._trainer.lightning_module
        begins_equal = not gradients and module.automatic_optimization
        is_synchronized = begins_equal or getattr(model, "require_forward_param_sync", False)
        takes = getattr(model, "broadcast_buffers", False) and is_synchronized
        return {} if self._trainer.is_global_zero or takes else capture_buffers(module)

    @functools.cached_property
    def _goes_back_to(self) -> str:
        return weights_to_go_back_to(self._trainer.callbacks)

    def _save_again(self, checkpoint: dict[str, Any]) -> None:
        self._resume.put_into(checkpoint)
        if self._loaded is not None:
            checkpoint[KEY] = self._loaded["all_ranks"]
            if is_routed(self._trainer.strategy):
                checkpoint[GRADIENTS_KEY] = self._loaded["apart"].get(self._trainer.global_rank, {})

    @property
    def is_in_progress(self) -> bool:
        """Whether a batch or a validation is under way, which a resume repeats from its beginning."""
        phase, _, redo = self._phase()
        return redo or phase == "validation"

    def capture_alone(self, *, is_start: bool = False) -> dict[str, Any] | None:
        """Return the exact state of this rank alone, for a just-in-time note; None inside an accumulation window.

        Called at each step. With ``is_start``, it has no gradients: other ranks only compare it with what comes after
        the first window. Generators of validation loaders are as of the epoch's start or the last validation.
        """
        resumes = self._loaded is not None or self._resume.awaits_training_state
        counts = self._internals.counts()["batch"]
        # a batch that was trained on counts as complete while its last hooks run, as it does for a resume
        batches = counts["completed"] + (counts["completed"] < counts["processed"] == counts["ready"])
        is_open = self._open_gradients or self._window_open(batches)
        if resumes or self._is_inside or (is_open and not is_start):
            return None
        with looks_without_waiting():
            own: dict[str, Any] = on_host(self._capture_rank(looks=False))
        if is_start:
            own["per_rank"]["gradients"] = {}
        if self._begun is None or self._begun[0] is not self._epoch.begun:
            self._begun = self._epoch.begun, Noted(own["per_rank"]["epoch_begun"])
        own["per_rank"]["epoch_begun"] = self._begun[1]
        if self._made_noted is None or self._made_noted[0] is not self._made:
            self._made_noted = self._made, Noted(own["per_rank"]["loaders_made"])
        own["per_rank"]["loaders_made"] = self._made_noted[1]
        return own

    def capture_step(self) -> list[dict[str, Any]]:
        """Return the parts of :meth:`capture_alone` that a step changes differently on each rank, before a backward.

        The second part applies, too, if the logged values are read after this, as loggers do: reading changes them.
        """
        moment = self._moment(RngState.capture())
        metrics = moment.metrics.encode(self._internals)
        values = metrics.pop("connector")
        metrics["connector"] = {name: values[name] for name in ("callback", "logged", "progress_bar")}
        asked = {"per_rank": {"metrics": {"connector": self._internals.logged_when_asked()}}}
        drawn = {"per_rank": {"rng": moment.rng.encode(), "generators": moment.generators, "metrics": metrics}}
        parts: list[dict[str, Any]] = on_host([drawn, asked])
        return parts

    def _capture_rank(self, *, looks: bool = True, is_saved: bool = False) -> dict[str, Any]:
        """Return this rank's state; gradients are copied unless it ``is_saved`` at once by a save that copies them."""
        if looks and self._recording is not None:
            self._recording.look()  # a run that resumes from this checkpoint does so, too
        phase, progress, redo = self._phase()
        self._counters.settle(progress, phase, redo=redo)
        progress["accumulation"] = self._accumulation.capture()
        moment = self._batch if redo else None
        if phase in ("validation", "validation_end"):
            moment = self._validation
        batches = progress["batch"]["current"]["completed"] + (phase == "batch_end")
        position = self._counters.own()["batch"]["completed"] + (phase == "batch_end")
        rng, metrics = RngState.capture(), MetricsMoment.take(self._internals, self._metrics)
        if phase == "validation" and moment is not None:
            rng, metrics = moment.rng, moment.metrics
        generators: Mapping[str, Any] = self._users.generators.generators()
        in_epoch = phase not in ("between_epochs", "epoch_end") and not progress["batch"]["is_last_batch"]
        ends = phase not in ("between_epochs", "epoch_end") and not in_epoch
        # the data of an epoch that a resume starts from its beginning is not read again
        notes = self._data.notes() if in_epoch else []
        notes += unsaved_hook_states(self._trainer.strategy.model)
        if phase == "batch_end" and self._changes_late and not self._hooks_are_over:
            notes.append(
                f"{type(self._trainer.lightning_module).__name__}.on_train_batch_end changes weights or buffers, and "
                "Lightning runs it after the callback that saved (do it in on_before_zero_grad or training_step)"
            )
        if self._trainer.state.status == "interrupted" and self._has_users_hook(_LAST_HOOKS.get(phase)):
            notes.append(
                f"training stopped in the hooks {_LAST_HOOKS[phase]}, and what they had left to do is not done again"
            )
        if phase == "validation" and moment is not None:
            generators = moment.generators
        if phase == "validation_end" and moment is not None:
            first = {"first_iteration": moment.metrics.connector["first_iteration"], "current_hook": None}
            metrics = dataclasses.replace(metrics, connector={**metrics.connector, **first})
        if redo and moment is not None:
            rng = self._data.rng_before(position + self._internals.prefetched) or moment.rng
            metrics, generators = moment.metrics, moment.generators
            notes += self._damage(moment, batches)
        if self._internals.fetcher is not None and self._internals.steps_take_the_iterator and redo:
            notes.append("training_step takes the iterator and has fetched batches that it has not trained on")
        if in_epoch and self._window_open(batches) and keeps_whole_gradients(self._trainer.strategy):
            notes.append(
                "FSDPStrategy keeps the gradients of an open accumulation window whole, and they are not saved"
            )
        begun = phase == "between_epochs" and self._counters.own()["epoch"]["completed"] == 0
        if (in_epoch or begun) and self._internals.fetcher is not None:
            data = self._data.capture(0 if begun else position, self._internals.prefetched)
        else:
            data = self._data.capture_between_epochs()
        is_written_here = self.gathering.is_single or is_routed(self._trainer.strategy)
        again = moment if redo or phase == "validation" else None
        changed, made = self._users.capture(
            in_epoch=phase not in ("between_epochs", "epoch_end"),
            ends=ends,
            looks=looks,
            names=self._trains,  # before training, a tuner's search saves, too, and changes attributes
            again=None if again is None else again.attributes,
            before=self._before if phase == "validation" else None,
        )
        anew = self._users.not_before(self._before) if phase == "validation" else set()
        begins = any(map(self._has_users_hook, ("on_validation_start", "on_validation_epoch_start")))
        aside = begins and (phase == "validation" or (phase == "validation_end" and not self._is_behind_hooks))
        return {
            "replicated": {
                "phase": phase,
                "aside": aside,
                "progress": progress,
                "changed": changed,
                "made": [n for n, _ in self._trainer.lightning_module.named_buffers() if n not in self._buffers],
                "data": self._users.data(),
                "set_by_hooks": self._users.set_by_hooks(),
                "variables": {
                    **self._variables.capture(between=not in_epoch and not ends, ends=ends, but=anew),
                    "aside": aside and phase == "validation",
                }
                if looks
                else {},
                "limits": self._limits.capture(),
                "groups": self._groups.capture(),
                "epoch_lengths": self._lengths.capture(None if in_epoch else self._whole_epoch()),
                "cut_after": None if in_epoch or ends else self._cut_after(progress["batch"]),
                "modes": self._modes_outside if self._validation is not None else self._modes.capture(),
                "validation_made": any(True for _ in self._internals.validation_loaders()),
            },
            "per_rank": {
                "rng": rng.encode(),
                "epoch_begun": self._epoch.capture(),
                "generators": generators,
                "attributes": made,
                "data": data,
                "metrics": metrics.encode(self._internals),
                "buffers": {},
                "takes_buffers": getattr(self._trainer.strategy.model, "require_forward_param_sync", True),
                "gradients": self._gradients(batches, in_epoch, copies=not (is_saved and is_written_here)),
                "post_local_sgd": self._post_local_sgd.capture(),
                "validation": self._validation_generators(looks=looks),
                "loaders_made": self._made,
                "recorder": self._recording.capture() if self._recording is not None else None,
            },
            "notes": notes,
        }

    def _has_users_hook(self, name: str | None) -> bool:
        objects = (self._trainer.lightning_module, *self._trainer.callbacks)
        return name is not None and any(is_users_own(getattr(each, name, None)) for each in objects)

    def _validation_generators(self, *, looks: bool) -> list[dict[str, Any]]:
        loaders = list(self._internals.validation_loaders())
        if looks or list(map(id, loaders)) != [found for found, _ in self._of_validation]:
            self._of_validation = [(id(loader), Carried({"": loader}, plain=False)) for loader in loaders]
        return [carried.generators() for _, carried in self._of_validation]

    def _phase(self) -> tuple[str, dict[str, Any], bool]:
        """Return the phase of the loops, the counters to continue with, and whether a batch was interrupted."""
        progress = self._internals.progress()
        counted = self._counters.own()
        epoch, batch = counted["epoch"], counted["batch"]
        if self._validation is not None and not self._trainer.sanity_checking:
            if self._validation_over:
                return "validation_end", progress, False
            return "validation", self._validation_progress, False
        if epoch["ready"] == epoch["completed"]:
            return "between_epochs", progress, False
        if epoch["ready"] > epoch["started"]:
            undo_unfinished(progress["epoch"])
            return "between_epochs", progress, False
        if epoch["processed"] == epoch["ready"]:
            return "epoch_end", progress, False
        if batch["completed"] < batch["processed"] == batch["ready"]:
            return "batch_end", progress, False
        redo = self._data.attempts > batch["completed"] + self._internals.prefetched
        if redo:
            for part in ("batch", "scheduler", "automatic", "manual"):
                undo_unfinished(progress[part])
            progress["batch"]["is_last_batch"] = False
        return "batch", progress, redo

    def _damage(self, before: _Moment, batches: int) -> list[str]:
        notes = []
        if self._versions() != before.versions:
            notes.append(
                "a batch was interrupted after it had changed weights or buffers (an optimizer step, or the "
                "running statistics of batch normalisation); it is trained again"
            )
        is_manual = not self._trainer.lightning_module.automatic_optimization  # only the user knows when a window ends
        if self._backward and (is_manual or self._window_open(batches)):
            notes.append("a batch was interrupted after its backward pass began, inside an open accumulation window")
        return notes

    def _window_open(self, batches: int) -> bool:
        return batches % int(self._trainer.accumulate_grad_batches) != 0

    def _gradients(self, batches: int, in_epoch: bool, *, copies: bool) -> dict[str, torch.Tensor]:
        module = self._trainer.lightning_module
        if not module.automatic_optimization:
            opened = ((name, p) for name, p in module.named_parameters() if id(p) in self._open_gradients)
            return capture_gradients(opened, copies=copies)
        is_kept = in_epoch and self._window_open(batches) and not keeps_whole_gradients(self._trainer.strategy)
        return capture_gradients(module.named_parameters(), copies=copies) if is_kept else {}

    def _unswap_averaged_weights(self, checkpoint: dict[str, Any]) -> None:
        # during validation, Lightning's WeightAveraging has swapped the averaged weights into the model and the trained
        # ones into the average, but its own hook has saved both under the names that are right without the swap
        if self._averaged and "current_model_state" in checkpoint:
            trained, averaged = checkpoint["state_dict"], checkpoint["current_model_state"]
            checkpoint["current_model_state"], checkpoint["state_dict"] = trained, averaged

    # ---- restore -----------------------------------------------------------------------------------------------------

    def load(self, checkpoint: Mapping[str, Any]) -> bool:
        """Take the exact state from the checkpoint that a fit resumes from; training will continue from it.

        Returns whether ``checkpoint`` is that one. Any other is restored by a callback or a hook: then only Lightning
        restores, and generators and loaders keep their state. Raises if it has a newer version or lacks this rank.
        """
        if not self._resume.is_loading:
            self._restored_by_others(checkpoint)
            return False
        state = checkpoint.get(KEY)
        if state is None:
            how = checkpoint.get(NO_STATE_KEY, "without ResumableCheckpoint")
            self._has_none = True
            self._warn(f"it was saved {how}, so it holds no exact state")
            return True
        if state["version"] > VERSION:
            raise CheckpointFormatError(
                f"the exact state has version {state['version']}, this release reads up to {VERSION}",
                key=f"{KEY}.version",
                remedy="update ckpt-plugins",
            )
        saved, apart = state, checkpoint.get(GRADIENTS_KEY, {})
        state, rank = put_back(state, apart), self._trainer.global_rank
        if self._is_resharded(state):
            mine = state_for_rank(state, rank, gradients=not self._begins_window_again)
        else:
            mine = state_of_rank(state, rank)
        others = {"lr_schedulers": checkpoint.get("lr_schedulers"), "callbacks": checkpoint.get("callbacks") or {}}
        epochs, made = state[Kind.REPLICATED.value]["progress"], mine.get("loaders_made", {})
        self._to_make = {
            name: {"epoch": epochs[name], **({} if name not in made else {"step": 0, **(made[name] or {})})}
            for name in ("train_reload_epoch", "val_reload_epoch")
        }
        self._loaded = {**state, "mine": mine, "all_ranks": saved, "apart": apart, **others}
        module = self._trainer.lightning_module
        self._precision = Precision(checkpoint, module)
        there = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
        self._late = {name: value for name, value in checkpoint.get("state_dict", {}).items() if name not in there}
        self._variables.resume(state[Kind.REPLICATED.value].get("variables", {}))
        if self._trainer.strategy.restore_checkpoint_after_setup:  # fit_started was called already
            self._resume_limits()
        return True

    def _resume_limits(self) -> None:
        limits = None if self._loaded is None else self._loaded[Kind.REPLICATED.value].get("limits")
        changed = None if limits is None else self._limits.resume(limits)
        if changed is not None:
            announce(self._trainer, f"This run continues with {changed}, as set by a hook of the run that it resumes.")

    def _restored_by_others(self, checkpoint: Mapping[str, Any]) -> None:
        resumes = self._loaded is not None or self._resume.awaits_training_state
        if resumes and not self._resume.keeps(checkpoint):
            self._loaded, self._to_make = None, {}
            self._resume.give_up()

    @property
    def _begins_window_again(self) -> bool:
        # Shards of gradients are of no use to another number of ranks.
        sharded = self._trainer.strategy.restore_checkpoint_after_setup
        return bool(self._trainer.lightning_module.automatic_optimization or sharded)

    def _is_resharded(self, state: Mapping[str, Any]) -> bool:
        return bool(state[Kind.REPLICATED.value]["world_size"] != self._trainer.world_size)

    def _continue(self, begin_epoch: Callable[[], None]) -> None:
        assert self._loaded is not None
        state = self._loaded
        shared, mine, module = state[Kind.REPLICATED.value], state["mine"], self._trainer.lightning_module
        resharded = self._is_resharded(state)
        causes = elastic_causes(self._data, shared, mine) if resharded else self._data.check(mine["data"])
        if shared.get("weights", "") not in ("", _mark_of_weights(module)):
            causes.append(
                "training had other weights than those in the checkpoint, so a hook has put others in their place "
                "(save them under another key in on_save_checkpoint, or give them back in on_load_checkpoint)"
            )
        in_epoch = shared["phase"] not in ("between_epochs", "epoch_end")
        late, self._late = self._late, {}
        restore_buffers(module, late)  # those that on_train_start has created
        for name in shared.get("made", ()):
            _make_buffer(module, name, late)
        self._users.resume(shared.get("set_by_hooks", {}))
        self._users.make_again(mine.get("attributes", {}))
        if in_epoch:
            begun, others = mine.get("epoch_begun"), (state["lr_schedulers"], state["callbacks"])
            self._users.before_hooks(shared.get("changed", {}))
            self._epoch.run_again(begun, shared["progress"], *others, begin_epoch)
            self._users.after_hooks()
            restore_buffers(module, late)
            self._internals.set_progress(shared["progress"])
        # until here, a checkpoint that a hook saves holds the same state as the one that is resumed from
        self._loaded = None
        if not resharded and "epoch_lengths" in shared:
            self._lengths.resume(shared["epoch_lengths"])
        if shared.get("cut_after") is not None:
            causes.append(
                f"the run that saved had ended an epoch after {shared['cut_after']} batches and before its last "
                "(max_steps, max_time or another stop), and this one begins with the next epoch "
                "(a checkpoint saved after a batch, by every_n_train_steps or interval, continues in it)"
            )
        setting = self._accumulation.resume(shared["progress"], in_epoch=in_epoch)
        causes += [setting] if setting is not None else []
        if shared.get("goes_back_to", "") != "" and shared["goes_back_to"] != self._goes_back_to:
            causes.append(
                "ModelPruning goes back to other weights than in the run that saved, as this process began with "
                "others (set the same seed before the model is built, at every start)"
            )
        is_comparable = self._trainer.is_global_zero and not resharded  # the saved digests are rank 0's
        other_data = self._users.other_data(shared.get("data", {})) if is_comparable else None
        causes = [*shared["notes"], *causes, *filter(None, [other_data])]
        # these need no warning if the batches are read again and compare equal
        is_read = self._recording is not None and not (resharded or mine["data"]["between"])
        awaits_reading = [cause for cause in causes if is_read and cause in (DRAWS_WHILE_READ, READS_ON)]
        causes = [cause for cause in causes if cause not in awaits_reading]
        if causes:
            self._warn("; ".join(causes))
        in_words = resumed_in_words(self._trainer, self._resume.path, shared["progress"])
        if self._recording is not None:
            comparable = None if resharded else mine.get("recorder")
            self._recording.resume(comparable, known_inexact=bool(causes))
        if resharded:
            shared = continue_elastic(self._data, shared, mine["data"], begin_window_again=self._begins_window_again)
        if shared["validation_made"]:
            self._internals.set_up_validation()
        else:
            self._internals.discard_validation_loaders()
        self._to_make = {}
        for loader, generators in zip(self._internals.validation_loaders(), mine["validation"], strict=False):
            restore_generators(loader, generators)
        self._internals.set_progress(shared["progress"])
        self._trainer.should_stop |= shared.get("limits", {}).get("waits", False) and not self._internals.can_stop
        self._counters.resumed(shared["phase"])
        restore_metrics(self._internals, module, mine["metrics"])
        self._look_again()
        restore_buffers(module, mine.get("buffers", {}))
        if not resharded and hasattr(self._trainer.strategy.model, "require_forward_param_sync"):
            self._trainer.strategy.model.require_forward_param_sync = mine.get("takes_buffers", True)
        self._restore_gradients(module, mine["gradients"])
        self._users.generators.look()
        self._users.generators.restore_generators(mine.get("generators", {}))
        if "modes" in shared:
            self._modes.restore(shared["modes"])
        rng = RngState.decode(mine["rng"])
        if shared["phase"] == "epoch_end":
            rng.restore()
            self._internals.end_epoch()
            rng = RngState.capture()
        if shared["phase"] in ("between_epochs", "epoch_end"):
            self._enter(mine["data"], rng, resharded)
            if mine["data"]["between"] and self._trainer.current_epoch == 0:
                # the checkpoint is from before the first epoch, whose iterators are made before the epoch begins
                iter(self._internals.fetcher)
            before = self._users.digests()
            self._begin_epoch(begin_epoch)
            are_told = self._say_differences(shared, before)
            announce(self._trainer, in_words(_INEXACT if causes or are_told else "exact"))
        else:
            ready = shared["progress"]["batch"]["current"]["ready"]
            fetched = ready if resharded else mine["data"]["batches"]
            self._counters.pass_begins(fetched)

            def enter() -> None:
                self._enter(mine["data"], rng, resharded)
                fetcher, length = self._internals.fetcher, mine["data"].get("length")
                # if the length is larger now, `limit_train_batches` has changed
                if None not in (length, fetcher.length) and not (causes or resharded):
                    fetcher.length = max(length, fetcher.length)
                self._is_in_epoch = not mine["data"]["between"]
                is_other = self._data.is_as_read is False  # warned about during reading
                if awaits_reading and self._recording is not None and self._data.is_as_read is None:
                    is_other = True
                    self._warn("; ".join(awaits_reading))
                    self._recording.told()
                are_told = self._say_differences(shared)
                announce(self._trainer, in_words(_INEXACT if causes or is_other or are_told else "exact"))

            self._continue_epoch(shared, fetched, enter)

    def _say_differences(self, shared: Mapping[str, Any], before: Any = None) -> bool:
        ends = shared.get("variables", {}).get("ends", True)
        lost, later = self._variables.lost(), self._variables.compared_later
        # callbacks save before the module's own hook, which may restore values that it has put aside
        aside = shared.get("aside", shared["phase"] in ("validation", "validation_end"))
        changed = shared.get("changed", {})
        problem = self._users.differences(changed, before, steps_make_anew=not ends, is_aside=aside, but=later)
        causes = [problem, lost_in_words(lost, but=problem or "")]
        if any(causes):
            self._warn("; ".join(filter(None, causes)))
            if self._recording is not None:
                self._recording.told()
        self._users.training_starts()
        return any(causes)

    def _restore_gradients(self, module: torch.nn.Module, gradients: Mapping[str, torch.Tensor]) -> None:
        restore_gradients(module.named_parameters(), gradients)
        if not module.automatic_optimization:
            self._open_gradients = {id(p) for p in module.parameters() if p.grad is not None}

    def _enter(self, data: Mapping[str, Any], rng: RngState, resharded: bool) -> None:
        if data["between"]:
            if not resharded:
                self._data.go_between_epochs(data)
        else:
            if not resharded:
                self._data.go_to(data)
            iter(self._internals.fetcher)
        # restoring the position may have drawn numbers
        rng.restore()

    def _continue_epoch(self, shared: Mapping[str, Any], fetched: int, enter: Callable[[], None]) -> None:
        phase = shared["phase"]
        self._internals.continue_epoch(enter, fetched)
        if phase == "batch_end":
            self._internals.finish_batch(self._internals.end_batch, None)
        elif phase in ("validation", "validation_end"):
            self._internals.finish_batch(self._internals.skip_batch, phase == "validation")


def _mark_of_weights(module: torch.nn.Module) -> str:
    return mark_of(some([*module.parameters()]))


def _make_buffer(module: torch.nn.Module, name: str, saved: Mapping[str, torch.Tensor]) -> None:
    """Register a saved buffer that training steps create, if the module does not have it yet."""
    owner, _, key = name.rpartition(".")
    with contextlib.suppress(AttributeError):  # the submodule does not exist yet either
        of = module.get_submodule(owner)
        if name in saved and getattr(of, key, None) is None:
            of._buffers[key] = saved[name].to(next((p.device for p in module.parameters()), "cpu"), copy=True)


def _no_model() -> None:
    """Return None, as a weak reference to a deleted model does."""


def _keep_quiet(causes: str) -> None:
    """Do nothing: rank 0 warns for all ranks."""
