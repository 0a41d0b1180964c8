"""``Session``: the state of checkpointing for one Accelerator: options, checkpointer, data position, pending saves."""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import logging
import os
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from accelerate.utils import broadcast_object_list
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from accelerate_ckpt._data import unprepared
from accelerate_ckpt._data.loaders import LoaderPositions
from accelerate_ckpt._private.data import unregister
from accelerate_ckpt._recording import Recording
from accelerate_ckpt._rehearsing import Rehearsal, is_rehearsed
from accelerate_ckpt._report import RunReport, announce, forget_reports
from accelerate_ckpt._state.background_failures import OutcomeWatch
from accelerate_ckpt._state.interval import PREFIX, AutoInterval
from accelerate_ckpt._state.local_sgd import LocalSgdState
from accelerate_ckpt._state.memory import MemorySnapshots
from accelerate_ckpt._state.parts import is_sharded
from accelerate_ckpt._state.preemption import PreemptionWatch
from accelerate_ckpt._state.resume import AutoResume, directory_of_run
from accelerate_ckpt._state.retention import Retention
from accelerate_ckpt._state.user_attributes import Changes
from accelerate_ckpt.config import CheckpointConfig, OptionError
from ckpt_core.directory import DirectoryCheckpointer
from ckpt_core.options import CheckpointerOptions
from ckpt_core.policies import KeepLatest, SaveInterval, numbers_in
from ckpt_core.process.console import warn
from ckpt_core.ranks import Agreement, RankGroup
from ckpt_core.resume import ResumePoint
from ckpt_core.state.code_origin import is_library
from ckpt_core.state.gradients import capture_gradients
from ckpt_core.state.lost_variables import Variables, Watched, in_words, only_logged_in_words
from ckpt_core.tiers import MemoryTier

log = logging.getLogger(__name__)

_sessions: weakref.WeakKeyDictionary[Any, Session] = weakref.WeakKeyDictionary()
_orphans: list[Session] = []  # sessions whose Accelerators were deleted before all saves were over
_serials = itertools.count()
_group: list[RankGroup] = []  # one at most, for all Accelerators of the process: they have the same ranks


class IntegrationSave(NamedTuple):
    """How a just-in-time save of an integration differs from ``save_state``."""

    directory: str  # of the checkpoints
    target: Callable[[], str]  # returns the path of the save
    write_files: Callable[[str], None]  # writes files of the framework into a directory


class Session:
    """The state of checkpointing for one Accelerator, to which it has only a weak reference."""

    def __init__(self, accelerator: Any, config: CheckpointConfig) -> None:
        self._accelerator = weakref.ref(accelerator)
        self.config = config
        self.local_sgd = LocalSgdState()
        self.told: set[str] = set()
        self.began_in = ""  # the working directory in which the run began
        with contextlib.suppress(FileNotFoundError):  # the directory was deleted: relative paths have no meaning
            self.began_in = os.getcwd()
        self.window_open = False  # whether there are accumulated gradients that no optimizer step has used
        # Whether all ranks call `save_state`, as the saves so far have shown; None before the first
        self.come_all: bool | None = None
        self.saving = False  # whether the script is inside `save_state`
        self.uneven = not accelerator.even_batches  # whether ranks may have taken different numbers of steps
        self.deferred: list[str] = []
        self._steps_before = self._most_steps = 0
        # By the optimizers themselves: a new optimizer may get the id() of a deleted one, on some ranks only
        self._steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        # By optimizer: after how many backward passes it has stepped last
        self._used: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._has_reserved = False
        self.has_tried_to_save = False  # whether refuse_unwritable has checked that the run can save
        self._backward_seen = False
        self._wrapped: list[weakref.ref[Any]] = []
        # Tracked from here on; a proxy, because the session must not keep the Accelerator and its models alive.
        self.data = LoaderPositions(weakref.proxy(accelerator), warn=log.warning)
        weakref.finalize(accelerator, _forget, self.data).atexit = False
        ranks = _rank_group(accelerator, config.commit_timeout)
        serial = next(_serials)
        # Several Accelerators of one process share the store, each in a name space of its own.
        store = None if ranks.store is None else PrefixStore(f"accelerator-{serial}", ranks.store)
        strategy = "async" if config.is_async else "sync"
        options = CheckpointerOptions.of(vars(config), strategy=strategy, listeners=config.made_listeners())
        self.tiers = options.tiers  # where checkpoints are committed and where they are uploaded to, if both are set
        self.report = RunReport(options, log_metrics=config.log_metrics, rank=ranks.rank)
        self.checkpointer = DirectoryCheckpointer(
            ranks=ranks,
            slice_replicated=config.slices_replicated,
            commit_timeout=config.commit_timeout,
            **options.settings(self.report.summary),
        )
        self.agreement = Agreement(ranks.rank, ranks.world_size, store, config.commit_timeout)
        self.agreement.find_dead = ranks.find_dead
        if store is not None:
            atexit.register(self.agreement.leave)  # for scripts that end without end_training
        self.memory: MemorySnapshots | None = None  # the snapshots in memory, if there are any
        if config.memory_every_n_steps is not None and not is_rehearsed():  # a rehearsal leaves the run's alone
            tier = MemoryTier(directory_of_run(self), every=config.memory_every_n_steps, root=config.memory_dir)
            self.memory = MemorySnapshots(
                tier,
                self.agreement,
                ranks,
                options.strategy,
                slice_replicated=config.slices_replicated,
                commit_timeout=config.commit_timeout,
            )
        self.outcomes = OutcomeWatch(self.checkpointer, self.agreement, store)
        # The history of checkpoints for a retention policy; None without a policy
        self.retention: Retention | None = None
        interval = SaveInterval.of(config.interval, config.mtbf, config.max_overhead)
        # Saves without a request of the script; None without `interval`
        self.interval = None if interval is None else AutoInterval(interval, ranks.world_size)
        automatic = accelerator.project_configuration.automatic_checkpoint_naming
        if config.retention is not None:
            self.retention = Retention(config.retention, self.checkpointer, config.storage_options)
        elif self.interval is not None and not automatic:
            self.retention = Retention(KeepLatest(2), self.checkpointer, config.storage_options, PREFIX)
        elif self.interval is not None and accelerator.project_configuration.total_limit is None:
            raise OptionError(
                "interval saves often, and automatic names without total_limit keep everything: set retention, "
                "such as 'latest=2', or ProjectConfiguration(total_limit=2)"
            )
        self.recording = (
            Recording(self._accelerator, self.checkpointer.notify, self.announce) if config.recorder else None
        )
        self.data.recording = self.recording
        # Set by an integration: returns, for the paths of pending saves, the paths that the framework's own rule
        # deletes, or None if it has none; if this is not set, the rule is `total_limit`
        self.limit: Callable[[list[str]], list[str] | None] | None = None
        self.protected: set[str] = set()  # paths of checkpoints that no policy deletes
        # Set by an integration: returns further objects that may be of the script's own classes
        self.owners: Callable[[], Iterable[object]] = tuple
        # Why a resume from a checkpoint saved now is not exact, as far as an integration knows
        self.not_exact: list[str] = []
        self.metrics: dict[str, float] = {}  # the last value of each number that the script has logged
        self.logged_step: int | None = None  # the step under which it logged last; None if it has given none
        self.passed_over: set[str] = set()
        # Where `load_state` has continued; None if there was nothing to resume
        self.resumed: ResumePoint | None = None
        # Counts attempts to resume; None unless the run was resumed by `resume="auto"`
        self.auto_resume: AutoResume | None = None
        self.backwards = 0
        self.changes = Changes(log.warning)  # warns about attributes of models that training changes and no state holds
        # Warns at a resume about variables of the script that are lost
        self.variables = Variables(
            self._watched, _warn_of_loss, lambda names: self.announce(only_logged_in_words(names))
        )
        self.data.before_offer = functools.partial(self.variables.handed_out, begins=False)
        # The rehearsal of this process; None unless the process was started for one
        self.rehearsal = Rehearsal.asked_for(self)
        self.just_in_time: Any = None  # the JustInTime that saves when another rank has died, if there is one
        self.saves_alone: IntegrationSave | None = None  # how that save differs from `save_state`, if it does
        self.note_step: Callable[[Session], None] = lambda _: None  # called after each step
        # Returns further parts of this rank's note that change when gradients of a loss are exchanged
        self.note_ahead: Callable[[Any], dict[str, Any]] = lambda _: {}
        # Returns the state of a registered object for a note
        self.note_object: Callable[[Any], dict[str, Any]] = lambda each: each.state_dict()
        # Returns in words what a note lacks of those objects, so that a resume from it may not be exact
        self.not_noted: Callable[[], list[str]] = list
        # Called with an exception that may be due to the loss of a rank
        self.rank_lost: Callable[[BaseException], None] = lambda _: None
        # Text that is the same on all ranks, and different for each Accelerator and run
        self.run_id = f"{ranks.session}-{serial}"
        self.preemption: PreemptionWatch | None = None  # watches for signals and notices; None without `preempt`
        if config.preempt is not None:
            self.preemption = PreemptionWatch(
                config.preempt, RankGroup(ranks.rank, ranks.world_size, store, ranks.session), self._is_rank_gone
            )
        if self.saves_by_itself:
            self.data.before_epoch = self.after_batch

    @property
    def accelerator(self) -> Any:
        return self._accelerator()

    @property
    def rank(self) -> int:
        return self.agreement.rank

    @property
    def world_size(self) -> int:
        return self.agreement.world_size

    def tell_once(self, topic: str, message: str) -> None:
        """Log a warning about ``topic``, the first time, on rank 0."""
        if topic not in self.told:
            self.told.add(topic)
            if self.rank == 0:
                log.warning("%s", message)

    def announce(self, message: str) -> None:
        """Print a line on rank 0."""
        if self.rank == 0:
            announce(message)

    def model_prepared(self, model: Any) -> None:
        """Note the DDP wrappers of a model; Accelerate itself keeps only the model in them."""
        wrappers = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
        self._wrapped += [weakref.ref(wrapper) for wrapper in wrappers]

    def distributed_models(self) -> list[DistributedDataParallel]:
        """Return the models that DDP synchronizes, in the order in which they were prepared.

        Whether their next forward pass starts from rank 0's buffers is a flag of theirs, which the last pass has set:
        it does not inside an accumulation window, nor in ``LocalSGD``.
        """
        return [model for wrapped in self._wrapped if (model := wrapped()) is not None]

    def backward_done(self, loss: Any = None) -> None:
        """Note that a backward pass of ``loss`` has added gradients."""
        self.window_open = self._backward_seen = True
        self.backwards += 1
        if self.rank == 0:
            self.changes.begin(self.accelerator._models, self.accelerator._custom_objects)
        self.variables.trains()
        if self.recording is not None:
            self.recording.backward(loss)
        if self.rehearsal is not None:
            self.rehearsal.backward(loss)
        self.data.uses.backward()

    def _watched(self) -> Watched | None:
        """Return the models and other objects of the script to watch; None on ranks that do not watch."""
        accelerator = self.accelerator
        if self.rank != 0 or is_sharded(accelerator):  # reading a sharded tensor would need all ranks
            return None
        wrapped = [*accelerator._optimizers, *accelerator._schedulers]
        inner = [getattr(one, name) for one in wrapped for name in ("optimizer", "scheduler") if hasattr(one, name)]
        loaders = list(accelerator._dataloaders)
        names = ("dataset", "sampler", "batch_sampler", "collate_fn")
        data = [getattr(one, name, None) for one in loaders for name in names]
        # an object of the script's own class may have more state than its state_dict holds
        owners = [*inner, *accelerator._custom_objects, *self.owners()]
        users = [one for one in owners if not is_library(type(one))]
        data += [one for one in owners if isinstance(one, types.FunctionType)]
        librarys = [one for one in accelerator._custom_objects if is_library(type(one))]
        held = [accelerator, *wrapped, *inner, *loaders, *librarys]
        return Watched(accelerator._models, held, users, data, iterators=unprepared.iterators())

    @property
    def window_is_open(self) -> bool:
        """Whether a save now would be inside an accumulation window: there are gradients that no step has used."""
        accelerator = self.accelerator
        if self.window_open:
            return True
        # A script may call loss.backward() directly. With accumulate(), Accelerate knows where the window is; without
        # it, gradients that exist may be part of an open window.
        if self._backward_seen and accelerator.sync_gradients:
            return False
        return any(parameter.grad is not None for model in accelerator._models for parameter in model.parameters())

    def open_gradients(self, *, copies: bool) -> list[dict[str, torch.Tensor]] | None:
        """Return each model's gradients to which the next backward pass may add, or copies; None if there are none.

        Outside of a window, those that a backward pass has left in parameters whose optimizer has not stepped since: in
        a GAN, the generator's loss leaves some in the discriminator. They may not be needed, if it is zeroed first.
        """
        accelerator = self.accelerator
        if self.window_is_open:
            used: set[int] = set()
        elif is_sharded(accelerator):
            return None
        else:
            stepped = [one for one in accelerator._optimizers if self._used.get(one, -1) == self.backwards]
            used = {id(p) for one in stepped for group in one.param_groups for p in group["params"]}
        found = [
            capture_gradients(((n, p) for n, p in model.named_parameters() if id(p) not in used), copies=copies)
            for model in accelerator._models
        ]
        return found if any(found) else None

    def gradients_restored(self, *, window_open: bool) -> None:
        """Note that gradients are those of a checkpoint, which may have been saved inside a window."""
        self.window_open = window_open
        self._used.clear()

    @property
    def step(self) -> int:
        """Steps that the run has taken, including those before a resume, of the optimizer that has taken the most."""
        return self._steps_before + self._most_steps

    @step.setter
    def step(self, steps: int) -> None:
        self._steps_before, self._most_steps = steps, 0
        self._steps.clear()

    def note_resumed(self, point: ResumePoint) -> None:
        """Note where ``load_state`` has continued, and set ``accelerator.resumed`` for the script."""
        self.resumed = self.accelerator.resumed = point
        self.report.resumed()
        if self.memory is not None:
            self.memory.tier.begin_at(self.step)

    def reader_of(self, path: str) -> DirectoryCheckpointer:
        """Return the checkpointer that reads ``path``."""
        return (
            self.memory.checkpointer if self.memory is not None and self.memory.tier.covers(path) else self.checkpointer
        )

    def place_of(self, path: str) -> str:
        """Return the path next to which records are: the checkpoint's or, for a snapshot in memory, one on the disk."""
        if self.memory is not None and self.memory.tier.covers(path):
            path = os.path.join(directory_of_run(self), os.path.basename(path))
        return self.checkpointer.known_as(path)

    @property
    def commit_seconds(self) -> float:
        """How many seconds the last durable save took in the background, on this rank."""
        return self.report.summary.commit_seconds

    @property
    def saves_by_itself(self) -> bool:
        """Whether saves are made that the script does not request."""
        savers = (self.preemption, self.interval, self.memory)
        return bool(self.config.just_in_time) or any(saver is not None for saver in savers)

    def after_batch(self) -> None:
        """Do what is due after the body of the training loop; raise ``SystemExit`` if the run has to end."""
        if self.preemption is not None:
            try:
                self.preemption.after_batch(self)
            except SystemExit as end:
                self.rank_lost(end)  # a lost rank may be why the others do not answer
                raise
        if self.interval is not None:
            self.interval.after_batch(self)
        self.note_step(self)

    @property
    def work_done(self) -> tuple[int, int]:
        """Counts that increase when the script trains on a batch."""
        return self.backwards, self.step

    def _is_rank_gone(self) -> bool:
        is_gone = self.just_in_time is not None and self.just_in_time.survivors.is_rank_gone()
        return is_gone or bool(self.agreement.find_dead())

    @property
    def _directory(self) -> str:
        return os.path.abspath(self.config.checkpoint_dir or self.accelerator.project_dir or ".")

    def training_ended(self) -> None:
        """Notify listeners that the training has ended, at the end of the script."""
        if self.accelerator is not None:
            self.report.ended(self.checkpointer.notify, self.step, self._directory)

    def note_clean_end(self) -> None:
        """Clear the count of failed attempts and the snapshots: training is over, or a signal or notice ended it."""
        if self.auto_resume is not None:
            self.auto_resume.end()
        if self.memory is not None:
            self.memory.end(self)

    @property
    def step_of_all(self) -> int | None:
        """The step of all ranks that make the same call; None if they may be at different steps."""
        return None if self.uneven else self.step

    def owns(self, optimizer: Any) -> bool:
        """Whether the optimizer was prepared by this Accelerator."""
        accelerator = self.accelerator
        return accelerator is not None and any(item is optimizer for item in accelerator._optimizers)

    def optimizer_stepped(self, optimizer: Any) -> None:
        """Note that an optimizer used its gradients; raise a failure of a background save, on every rank."""
        self.window_open = False
        self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        self._most_steps = max(self._most_steps, self._steps[optimizer])
        self._used[optimizer] = self.backwards
        self.variables.trains()
        if self.recording is not None:
            self.recording.stepped(optimizer, self.step)
        self.report.stepped(self.checkpointer, self.resumed, self._directory)
        if not self._has_reserved and all(item in self._steps for item in self.accelerator._optimizers):
            self._has_reserved = True
            self.checkpointer.reserve(
                self.accelerator._models, [item.optimizer for item in self.accelerator._optimizers]
            )
        if not self.local_sgd.active:  # its ranks exchange nothing until they average
            self.outcomes.optimizer_stepped(optimizer)

    def note_metrics(self, values: Any) -> None:
        """Note the numbers that a script logs, which checkpoints record and policies use.

        Values on a device are read only for a policy, because reading waits for the device.
        """
        if not isinstance(values, Mapping):
            return  # the script's own tracker may take anything
        if self.retention is None:
            values = {name: value for name, value in values.items() if not _is_on_device(value)}
        self.metrics |= numbers_in(values)

    def was_passed_over(self, path: str) -> bool:
        """Return whether a look-up found the checkpoint damaged: it does not count, and is kept for inspection."""
        return self.checkpointer.known_as(path) in self.passed_over

    def note_passed_over(self, paths: Iterable[str]) -> None:
        """Note the paths of checkpoints that a look-up has found damaged."""
        self.passed_over |= set(map(self.checkpointer.known_as, paths))

    def tell_trackers(self) -> None:
        """Log the figures of the last saves to the trackers, which must still be open."""
        self.checkpointer.drain()
        figures = self.report.new_metrics()
        if figures:
            self.accelerator.log(figures, step=self.logged_step)

    def finish(self) -> None:
        """Wait for pending saves and raise a failure that was not raised yet; called on all ranks together."""
        if self.recording is not None:
            self.recording.finish()
        just_in_time, self.just_in_time = self.just_in_time, None
        if just_in_time is not None:
            just_in_time.close(remove=True)
        try:
            self.outcomes.after_training()
        finally:
            try:
                self.checkpointer.close()
            finally:
                self.agreement.leave()
                self.report.close()


def _warn_of_loss(names: Sequence[str]) -> None:
    warn(
        f"this resume begins without variables of the script that training had changed: {in_words(names)}. They "
        "have the values of a new run, because no checkpoint holds them. If training depends on them, this "
        "resume is not exact: pass an object that holds them to register_for_checkpointing, or set them after "
        "load_state",
        stacklevel=2,
    )


def _is_on_device(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type != "cpu"


def open_session(
    accelerator: Any,
    config: CheckpointConfig,
    note_step: Callable[[Session], None],
    rank_lost: Callable[[BaseException], None],
) -> Session:
    """Return the Accelerator's session, a new one if there is none or options differ; called on all ranks together.

    A new one calls ``note_step`` and ``rank_lost``, unless an integration replaces them.
    """
    session = _sessions.get(accelerator)
    if session is None or session.config != config:
        if session is not None:
            session.finish()
            session.data.release()
            if session.preemption is not None:
                session.preemption.close()
                session.preemption = None
        session = _sessions[accelerator] = Session(accelerator, config)
        session.note_step, session.rank_lost = note_step, rank_lost
        weakref.finalize(accelerator, _outlive, session).atexit = False
    return session


def session_of(accelerator: Any) -> Session | None:
    """Return the Accelerator's session, None if it has none."""
    return _sessions.get(accelerator)


def live_sessions() -> list[Session]:
    """Return the sessions of all Accelerators that are alive, the oldest first."""
    return list(_sessions.values())


def unfinished_sessions() -> list[Session]:
    """Return the live sessions, and those of deleted Accelerators (e.g. locals of a function) with unfinished saves."""
    _orphans[:] = [session for session in _orphans if _is_unfinished(session)]
    return [*live_sessions(), *_orphans]


def _is_unfinished(session: Session) -> bool:
    return bool(session.checkpointer.is_busy or session.checkpointer.failure or session.deferred)


def _outlive(session: Session) -> None:
    if session.preemption is not None:
        session.preemption.close()  # nothing would act on what its handlers note
    if session.recording is not None:
        session.recording.close()  # otherwise each Accelerator of a hyperparameter search leaves its file open
    if _is_unfinished(session):
        _orphans.append(session)


def close_sessions() -> None:
    """Drop the sessions of all Accelerators, which are finished, and the connection between the ranks."""
    for session in live_sessions():
        atexit.unregister(session.agreement.leave)
        if session.preemption is not None:
            session.preemption.close()
        if session.accelerator is not None:
            session.data.release()
    _sessions.clear()
    _orphans.clear()
    forget_reports()
    _group.clear()


def _forget(data: LoaderPositions) -> None:
    """Release the loaders of a deleted Accelerator, so that they can be deleted, too."""
    with contextlib.suppress(ReferenceError):  # release also restores the Accelerator, which no longer exists
        data.release()
    unregister(data)


def _rank_group(accelerator: Any, timeout: float) -> RankGroup:
    if accelerator.num_processes == 1:
        return RankGroup.alone()
    if not _group:
        rank, world_size = accelerator.process_index, accelerator.num_processes
        _group.append(RankGroup.connect(rank, world_size, _broadcast, timeout_seconds=timeout))
    return _group[0]


def _broadcast(value: Any) -> Any:
    values = [value]
    broadcast_object_list(values)
    return values[0]
