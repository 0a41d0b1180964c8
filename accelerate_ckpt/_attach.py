"""Installs checkpointing in Accelerate, by replacing methods: for one Accelerator, or for all of a process."""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from accelerate.local_sgd import LocalSGD
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType, ProjectConfiguration
from torch.utils.data import DataLoader

from accelerate_ckpt._data import unprepared
from accelerate_ckpt._private.replacing import Patches
from accelerate_ckpt._state.just_in_time import note_start, note_step, save_if_rank_was_lost
from accelerate_ckpt._state.load import load_state
from accelerate_ckpt._state.resume import refuse_unwritable
from accelerate_ckpt._state.save import save_deferred, save_snapshot, save_state
from accelerate_ckpt._state.session import (
    Session,
    close_sessions,
    live_sessions,
    open_session,
    session_of,
    unfinished_sessions,
)
from accelerate_ckpt._termination import unprotect
from accelerate_ckpt.config import CheckpointConfig, OptionError
from ckpt_core.errors import CheckpointError, RankFailedError

log = logging.getLogger(__name__)

_makers = Patches()  # wraps the creation of every Accelerator
_methods = Patches()  # without a session, they only call the original
_attached: weakref.WeakKeyDictionary[Any, CheckpointConfig] = weakref.WeakKeyDictionary()
_installed: list[CheckpointConfig] = []  # at most one: the options of Accelerators without attach

_OTHERS_FORMAT = {DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA}


@dataclass
class CheckpointProjectConfiguration(ProjectConfiguration):  # type: ignore[misc]  # Accelerate publishes no types
    """A ``ProjectConfiguration`` that also configures how checkpoints are saved.

    Args:
        checkpoints: The options.

    All other arguments are those of :class:`accelerate.utils.ProjectConfiguration`.

    Example::

        project = CheckpointProjectConfiguration("runs/1", total_limit=3, checkpoints=CheckpointConfig(strategy="sync"))
        accelerator = attach(Accelerator(project_config=project))
    """

    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)


def attach(accelerator: Any, strategy: str | None = None, **options: Any) -> Any:
    """Make ``save_state`` and ``load_state`` of one Accelerator durable, complete and exact.

    Call it on all ranks together, before ``prepare``.

    Args:
        accelerator: The Accelerator.
        strategy: ``"sync"``, ``"async"`` or ``"sharded"``: see :class:`~accelerate_ckpt.CheckpointConfig`.
        **options: The other options of :class:`~accelerate_ckpt.CheckpointConfig`. Missing ones come from the
            Accelerator's :class:`~accelerate_ckpt.CheckpointProjectConfiguration`, if it has one.

    Returns:
        The same Accelerator, with an additional attribute ``resumed``: None until ``load_state`` has continued from a
        checkpoint, then a :class:`ckpt_core.resume.ResumePoint` with ``path``, ``step``, ``epoch`` and ``batch``.

    Raises:
        OptionError: An option is unknown or has an invalid value.

    Example::

        accelerator = attach(Accelerator(), strategy="async")
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        accelerator.save_state("checkpoints/step_100")
    """
    project = accelerator.project_configuration
    if isinstance(project, CheckpointProjectConfiguration):
        options = {**vars(project.checkpoints), **options}
    if isinstance(strategy, CheckpointConfig):
        raise OptionError("attach takes options, not a CheckpointConfig: attach(accelerator, **vars(config))")
    if strategy is not None:
        options["strategy"] = strategy
    config = CheckpointConfig.from_sources(options, variables={}, flag_name="attach({})")
    _listen()
    _attached[accelerator] = config
    _begin(accelerator)
    return accelerator


def install(config: CheckpointConfig) -> None:
    """Do what :func:`attach` does for every Accelerator that this process creates from now on."""
    _installed[:] = [config]
    _listen()
    if not _makers:
        _makers.wrap(Accelerator, "__init__", _init)


def uninstall() -> None:
    """Undo :func:`install`, and end everything that is pending."""
    _installed.clear()
    try:
        drain(raised=False)
    finally:
        close_sessions()
        _makers.undo()
        _methods.undo()


def drain(*, raised: bool, tell_trackers: bool = False) -> None:
    """Wait for all background saves, and raise if one has failed.

    If the script ends with its own exception, failures are only logged, so that they do not hide that exception.
    ``tell_trackers`` sends the figures of the last saves to the trackers, which must still be open.
    """
    failure: CheckpointError | None = None
    for session in unfinished_sessions():
        try:
            if session.accelerator is None:  # it was deleted, perhaps on this rank only; finish() needs all ranks
                session.checkpointer.close()
            else:
                if not raised:
                    save_deferred(session)
                    session.training_ended()
                if tell_trackers:
                    session.tell_trackers()
                session.finish()
        except CheckpointError as error:
            failure = failure or error
            log.exception("a checkpoint could not be saved")
        for target in session.deferred:
            log.error("%s was not saved: the accumulation window that the save waited for was never completed", target)
        session.deferred.clear()
    if failure is not None and not raised:
        raise failure


def _session(accelerator: Any) -> Session | None:
    """Return the session that saves for the Accelerator; None if its engine writes its own checkpoints."""
    if accelerator.distributed_type in _OTHERS_FORMAT:
        return None
    config = _attached.get(accelerator) or next(iter(_installed), None)
    if config is None:
        return None
    return open_session(accelerator, config, note_step, save_if_rank_was_lost)


def _init(original: Any, accelerator: Any, *args: Any, **kwargs: Any) -> None:
    original(accelerator, *args, **kwargs)
    _begin(accelerator)


def _begin(accelerator: Any) -> None:
    accelerator.resumed = None
    # Opens the session now, while all ranks are together: a save may later be called on one rank alone.
    is_ours = _session(accelerator) is not None
    if not is_ours and accelerator.distributed_type in _OTHERS_FORMAT:
        log.warning(
            "%s writes its own checkpoints: accelerate_ckpt leaves them alone, and its options have no effect",
            accelerator.distributed_type.value,
        )


def _save_state(
    original: Any, accelerator: Any, output_dir: Any = None, safe_serialization: bool = True, **kwargs: Any
) -> Any:
    session = _session(accelerator)
    if session is None:
        return original(accelerator, output_dir, safe_serialization, **kwargs)
    if session.rehearsal is not None and not session.rehearsal.is_saving:
        output_dir = session.rehearsal.target(output_dir)
    try:
        return save_state(session, output_dir)
    except RankFailedError as error:
        save_if_rank_was_lost(error)
        raise


def _load_state(
    original: Any, accelerator: Any, input_dir: Any = None, load_kwargs: dict[str, Any] | None = None, **kwargs: Any
) -> None:
    session = _session(accelerator)
    if session is None:
        original(accelerator, input_dir, load_kwargs, **kwargs)
        return
    if session.rehearsal is not None:
        try:
            input_dir = session.rehearsal.source(input_dir)
        except LookupError:
            return
    load_state(session, functools.partial(original, accelerator), input_dir, load_kwargs, kwargs)


def _end_training(original: Any, accelerator: Any) -> None:
    error = sys.exc_info()[1]
    if error is not None:  # called in a finally block
        save_if_rank_was_lost(error)
    for session in live_sessions():
        if session.rehearsal is not None:
            session.rehearsal.leave_if_begun()
    try:
        drain(raised=False, tell_trackers=True)  # for all Accelerators: the process group is theirs too
        for session in live_sessions():
            session.variables.ends()
            session.note_clean_end()
    finally:
        unprotect()
        close_sessions()
        original(accelerator)


_LOCAL_SGD: dict[str, Callable[[Session, Any], None]] = {
    "__enter__": lambda session, context: session.local_sgd.entered(context),
    "__exit__": lambda session, context: session.local_sgd.left(context),
    "_sync_and_avg_model_params": lambda session, _: session.outcomes.at_boundary(),
}


def _listen() -> None:
    # On the class, so that a method of the user's own subclass is called first, and reaches ours through super().
    if not _methods:
        _methods.wrap(Accelerator, "save_state", _save_state)
        _methods.wrap(Accelerator, "load_state", _load_state)
        _methods.wrap(Accelerator, "end_training", _end_training)
        _methods.wrap(Accelerator, "prepare_model", _prepare_model)
        _methods.wrap(Accelerator, "prepare", _prepare)
        _methods.wrap(Accelerator, "prepare_data_loader", _prepare_data_loader)
        _methods.wrap(Accelerator, "backward", _backward)
        _methods.wrap(Accelerator, "log", _log)
        _methods.wrap(Accelerator, "join_uneven_inputs", _join_uneven_inputs)
        _methods.wrap(AcceleratedOptimizer, "step", _optimizer_step)
        _methods.wrap(DataLoaderShard, "__iter__", _iterate)
        _methods.wrap(DataLoaderDispatcher, "__iter__", _iterate)
        _methods.wrap(DataLoader, "__iter__", unprepared.iterate)
        for name, tell in _LOCAL_SGD.items():
            _methods.wrap(LocalSGD, name, _of_local_sgd(tell))


def _prepare_model(original: Any, accelerator: Any, *args: Any, **kwargs: Any) -> Any:
    model = original(accelerator, *args, **kwargs)
    session = session_of(accelerator)
    if session is not None:
        session.model_prepared(model)
    return model


def _prepare(original: Any, accelerator: Any, *args: Any, **kwargs: Any) -> Any:
    prepared = original(accelerator, *args, **kwargs)
    session = session_of(accelerator)
    if session is not None and accelerator._optimizers:  # an evaluation needs no writable directory
        refuse_unwritable(session)  # after the collectives of prepare, because before them ranks may be minutes apart
    return prepared


def _prepare_data_loader(original: Any, accelerator: Any, *args: Any, **kwargs: Any) -> Any:
    loader = original(accelerator, *args, **kwargs)
    session = session_of(accelerator)
    if session is not None:
        session.data.prepared(loader)
        if session.rehearsal is not None:
            session.rehearsal.prepared(args[0] if args else kwargs.get("data_loader"))
    return loader


def _training_begins(session: Session) -> None:
    if session.preemption is not None and not session.preemption.is_training:
        unprotect(session.preemption.signals)
        session.preemption.begin()


def _backward(original: Any, accelerator: Any, *args: Any, **kwargs: Any) -> None:
    session = session_of(accelerator)
    if session is not None:
        _training_begins(session)
        if session.just_in_time is not None:
            session.just_in_time.backward_begins(args[0] if args else kwargs.get("loss"))
    try:
        original(accelerator, *args, **kwargs)
    except Exception as error:
        save_if_rank_was_lost(error)
        raise
    if session is not None:
        session.backward_done(args[0] if args else kwargs.get("loss"))


def _log(original: Any, accelerator: Any, values: Any, *args: Any, **kwargs: Any) -> None:
    session = session_of(accelerator)
    # sent with the script's own values, because a call of our own would advance the step of some trackers
    figures = session.report.new_metrics() if session is not None and isinstance(values, Mapping) else {}
    original(accelerator, {**values, **figures} if figures else values, *args, **kwargs)
    if session is not None:
        session.note_metrics(values)
        session.logged_step = args[0] if args else kwargs.get("step")


def _join_uneven_inputs(original: Any, accelerator: Any, *args: Any, **kwargs: Any) -> Any:
    session = session_of(accelerator)
    if session is not None:
        session.uneven = True
    return original(accelerator, *args, **kwargs)


def _optimizer_step(original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    owners = [session for session in live_sessions() if session.owns(optimizer)]
    for session in owners:
        _training_begins(session)
    result = original(optimizer, *args, **kwargs)
    for session in owners:
        session.data.uses.stepped()
        if optimizer.gradient_state.sync_gradients:
            session.optimizer_stepped(optimizer)
    return result


def _iterate(original: Any, loader: Any) -> Iterator[Any]:
    """Make deferred saves between two batches, where the script has finished its step.

    Saves that the script did not request are not made after the last batch of an epoch: a resume would begin with the
    next epoch, and skip what the script does at the end of one. They are made when the next epoch begins.
    """
    begins = True
    for session in live_sessions():
        if session.saves_alone is None:  # otherwise the integration that set it calls note_start
            note_start(session)
    for batch in original(loader):
        before = {id(session): session.work_done for session in live_sessions() if session.saves_by_itself}
        rehearsals = [session.rehearsal for session in live_sessions() if session.rehearsal is not None]
        for rehearsal in rehearsals:
            rehearsal.hand_out(loader, batch, begins=begins)
        for session in live_sessions():
            session.variables.handed_out(begins=begins and session.data.trains(loader))
            if begins and session.data.resumes_training(loader):
                _training_begins(session)  # another rank may be in its first batch already
        begins = False
        yield batch
        for session in live_sessions():
            save_deferred(session)
            has_trained = session.saves_by_itself and before.get(id(session)) != session.work_done
            if has_trained and not session.data.has_finished(loader):
                session.after_batch()
                save_snapshot(session)
        for rehearsal in rehearsals:
            rehearsal.after_batch(loader)


def _of_local_sgd(tell: Callable[[Session, Any], None]) -> Callable[..., Any]:
    """Return a wrapper for a method of ``LocalSGD`` that then calls ``tell(session, context)``."""

    def around(original: Any, context: Any, *args: Any) -> Any:
        result = original(context, *args)
        session = session_of(context.accelerator) if context.enabled else None
        if session is not None:
            tell(session, context)
        return result

    return around
