"""``save_state``: saves an Accelerator with Accelerate's semantics, through :mod:`ckpt_core`."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import accelerate
import torch

from accelerate_ckpt import _termination
from accelerate_ckpt._private.files import wait_when_safetensors_open
from accelerate_ckpt._state.background_failures import AgreedSave
from accelerate_ckpt._state.naming import number_of, target_of
from accelerate_ckpt._state.parts import (
    FORMAT,
    RANK,
    custom_parts,
    is_sharded,
    model_parts,
    optimizer_parts,
    own_buffers,
    scheduler_parts,
    sharded_parts,
    tensor_sizes,
)
from accelerate_ckpt._state.resume import stay_where_it_began
from accelerate_ckpt._state.retention import remove_unwanted
from accelerate_ckpt._state.session import Session
from ckpt_core.commit_time import commit_time
from ckpt_core.directory import AddedFiles, Part
from ckpt_core.errors import CheckpointError, RankFailedError, SerializationError, StorageError
from ckpt_core.paths import StrPath, is_remote
from ckpt_core.process.awaited_paths import wait_for_saves
from ckpt_core.ranks import names_of
from ckpt_core.small_states import wait_if_small
from ckpt_core.state.changed_values import looks_without_waiting
from ckpt_core.state.ddp import unsaved_hook_states
from ckpt_core.state.kinds import Kind

_TRIGGERED = (
    "it was saved after set_trigger and before check_trigger, and the trigger is not saved (save after check_trigger)"
)


def save_state(session: Session, output_dir: StrPath | None) -> Path | str:
    """Save everything that an Accelerator's run needs to continue; called on all ranks together.

    Returns where the checkpoint is, or will be: a ``Path``, or for a URL a string, because a ``Path`` would change it.
    Raises if this save failed, or an earlier one in the background, or if the automatic name is taken.
    """
    accelerator = session.accelerator
    if session.config.is_async or session.tiers is not None:
        _termination.protect()
    if session.config.resume == "auto" and "resume" not in session.told:
        session.tell_once(
            "resume", "resume='auto' does nothing by itself: call accelerator.load_state() after prepare, at each start"
        )
    session.saving, begin = True, time.monotonic()
    try:
        stay_where_it_began(session)
        agreed = _agree(session, target_of(accelerator, output_dir))
        target = agreed.path
        if _must_wait_for_window(session):
            session.deferred.append(target if is_remote(target) else os.path.abspath(target))
        else:
            _save_now(session, agreed)
    finally:
        session.saving = False
    if session.interval is not None:
        session.interval.schedule.took(time.monotonic() - begin)
    accelerator.project_configuration.iteration += 1
    return target if is_remote(target) else Path(target)


def save_deferred(session: Session) -> None:
    """Make the saves that wait for the end of an accumulation window, if it has ended."""
    while session.deferred and not session.window_is_open:
        target = session.deferred.pop(0)
        _save_now(session, _agree(session, target))


def save_snapshot(session: Session) -> None:
    """Save to memory, if that is due; called on all ranks together, after each step.

    A failure ends the snapshots, and not the training.
    """
    memory = session.memory
    path = None if memory is None else memory.due(session)
    if memory is None or path is None:
        return
    begin = time.monotonic()
    files: Callable[[str], None] | None
    try:
        parts, metadata, files = _parts_of(session, _weights(session)), metadata_of(session, None), None
    except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must not wait for this one's part
        parts, metadata, files = [], {}, functools.partial(_raise, error)
    try:
        memory.checkpointer.save(parts, path, metadata=metadata, step=session.step_of_all, write_files=files)
        if not is_sharded(session.accelerator):
            wait_if_small(memory.checkpointer, tensor_sizes(parts))
    except Exception as error:  # noqa: BLE001 - as above
        memory.tier.fail(error)  # after this, rank 0 proposes no further snapshot
    memory.tier.took(time.monotonic() - begin)


def _raise(error: Exception, _: str) -> None:
    raise error


def _agree(session: Session, target: str) -> AgreedSave:
    accelerator = session.accelerator

    def refuse(path: str) -> Exception | None:
        if not accelerator.project_configuration.automatic_checkpoint_naming:
            if is_remote(path) or not os.path.lexists(path) or os.path.isdir(path):
                return None
            return FileExistsError(f"{path} is a file, and a checkpoint is a directory: give another path")
        wait_for_saves(session.checkpointer.known_as(path))  # another Accelerator may save there: it counts separately
        try:
            if not os.path.exists(path) and not session.checkpointer.is_taken(path):
                return None
        except StorageError:
            if session.config.on_error == "raise":
                raise
            return None  # the save itself fails, if the store is still down
        return ValueError(
            f"Checkpoint directory {path} ({accelerator.save_iteration}) already exists. Please manually override "
            "`self.save_iteration` with what iteration to start with."
        )

    # Without a step to compare, a rank that has missed a save would be mixed into the next one, so rank 0 waits for all
    # ranks. It also does until it knows whether all ranks call save_state, if that decides what it writes.
    step = session.step_of_all
    is_spread = is_sharded(accelerator) or session.config.slices_replicated
    unknown = (is_spread and session.come_all is not True) or (session.come_all is None and not session.config.is_async)
    agreed = session.outcomes.before_save(
        target, refuse, step=step, waits=step is None or unknown, may_be_absent=not is_sharded(accelerator)
    )
    if agreed.left_out:
        _tell_of_absent(session, agreed.left_out)
    elif (step is None or unknown) and session.world_size > 1:
        session.come_all = True
    if step != agreed.step:
        error = RankFailedError(
            f"rank {session.rank} saves step {step}, but rank 0 step {agreed.step}: they cannot save one "
            "checkpoint together",
            path=agreed.path,
            remedy="call save_state on all ranks, not under `if accelerator.is_main_process`; if the ranks may "
            "take different numbers of steps, create the Accelerator with even_batches=False",
        )
        _fail_everywhere(session, agreed, error)
        raise error
    return agreed


def _tell_of_absent(session: Session, absent: Collection[int]) -> None:
    session.come_all = False
    session.tell_once(
        "absent",
        f"save_state was called on rank 0 and not on {names_of(absent)}: as with stock Accelerate, the checkpoint "
        "has the models, optimizers and schedulers, but only rank 0's random generators, data position and "
        "registered objects, so a resume is not exact. Call save_state on all ranks, not under `if "
        "accelerator.is_main_process`",
    )


def _must_wait_for_window(session: Session) -> bool:
    if not session.window_is_open:
        return False
    policy = session.config.mid_accumulation
    accelerator = session.accelerator
    if policy == "error":
        raise CheckpointError(
            "save_state was called inside a window of gradient accumulation: there are gradients that no optimizer "
            "step has used",
            remedy="save where accelerator.sync_gradients is true, or set mid_accumulation to 'grads' or 'defer'",
        )
    if policy == "grads" and is_sharded(accelerator):
        session.tell_once(
            "fsdp-window",
            "FSDP does not expose the gradients of an open accumulation window: the save is made when the window "
            "is complete. Set mid_accumulation='defer' to silence this warning",
        )
        return True
    return policy == "defer"


def _save_now(session: Session, agreed: AgreedSave) -> None:
    target = agreed.path
    if session.recording is not None:
        session.recording.set_directory(session.checkpointer.known_as(target), session.rank)
    session.changes.name()
    with contextlib.ExitStack() as undo:
        weights, files = None, None
        if session.accelerator._save_model_state_pre_hook:
            # The hooks come first, because they decide what is to be saved.
            weights, files = _after_hooks(session, agreed, undo)
        parts = _save_parts(session, agreed, weights, files)
        undo.pop_all()  # the files belong to the save now
    remove_unwanted(session, target)
    if not is_sharded(session.accelerator):
        wait_if_small(session.checkpointer, tensor_sizes(parts))
    if session.config.is_async:
        wait_when_safetensors_open()
        session.checkpointer.wait_when_touched(target)  # the script may read the files at once, as after a stock save


def _save_parts(
    session: Session, agreed: AgreedSave, weights: list[Any] | None, files: AddedFiles | None
) -> list[Part]:
    try:
        parts = _parts_of(session, _weights(session) if weights is None else weights)
        metadata = metadata_of(session, agreed.path)
    except Exception as error:
        _fail_everywhere(session, agreed, error)
        raise
    if session.config.is_async:
        session.outcomes.save_begun()
    try:
        session.checkpointer.save(
            parts,
            agreed.path,
            metadata=metadata,
            step=session.step_of_all,
            write_files=files,
            number=agreed.number,
            absent=functools.partial(_absent, session, agreed) if session.world_size > 1 else None,
            slice_replicated=False if agreed.left_out else None,
        )
    except SerializationError as error:
        raise _named(error, session.accelerator) from error
    return parts


def _absent(session: Session, agreed: AgreedSave) -> Collection[int]:
    absent = agreed.absent()
    if absent and not (is_sharded(session.accelerator) or session.config.slices_replicated):
        _tell_of_absent(session, absent)
    return absent


def _fail_everywhere(session: Session, agreed: AgreedSave, error: Exception) -> None:
    """Make the save fail on the other ranks, which would otherwise wait for this rank's part."""
    session.checkpointer.refuse(agreed.path, error, number=agreed.number, absent=agreed.absent)


def _weights(session: Session) -> list[Any]:
    accelerator = session.accelerator
    return [] if is_sharded(accelerator) else [model.state_dict() for model in accelerator._models]


def _after_hooks(session: Session, agreed: AgreedSave, undo: contextlib.ExitStack) -> tuple[list[Any], AddedFiles]:
    """Call the script's hooks; return the weights that they leave on rank 0, and the files that they write."""
    accelerator = session.accelerator
    weights: list[Any] = []
    before: list[Any] = []
    files: AddedFiles | None = None
    failure: Exception | None = None
    try:
        weights = _weights(session)
        before = list(weights)
        files = session.checkpointer.begin_files(agreed.path)
        undo.callback(files.close)
        for hook in accelerator._save_model_state_pre_hook.values():
            hook(accelerator._models, weights, files.directory)
    except Exception as error:  # noqa: BLE001 - raised below, when the other ranks know of it
        failure = error
    left = [next((index for index, item in enumerate(before) if item is weight), None) for weight in weights]
    names, left = session.agreement.announce("save_state", [files.names() if files is not None else [], left], failure)
    if failure is not None:
        if session.rank:
            _fail_everywhere(session, agreed, failure)
        raise failure
    assert files is not None  # there is no failure
    if session.rank:
        # Every rank may write config.json; that of rank 0 is kept.
        for name in set(names).intersection(files.names()):
            os.unlink(os.path.join(files.directory, name))
    # Hooks usually remove weights on the main process only, but all ranks must save the same parts.
    return weights if session.rank == 0 or None in left else [before[index] for index in left], files


def _parts_of(session: Session, weights: list[Any]) -> list[Part]:
    accelerator, local_sgd = session.accelerator, session.local_sgd
    moments = Kind.PER_RANK if local_sgd.moments_differ else Kind.REPLICATED
    if is_sharded(accelerator):
        parts = sharded_parts(accelerator)
    else:
        kind = Kind.PER_RANK if local_sgd.active else Kind.REPLICATED
        parts = model_parts(accelerator._models, weights, kind)
        parts += optimizer_parts(accelerator._optimizers, moments)
    parts += scheduler_parts(accelerator._schedulers)
    if accelerator.scaler is not None:
        parts.append(Part("scaler", accelerator.scaler.state_dict(), moments))
    parts += custom_parts(accelerator._custom_objects)
    parts.append(Part(RANK, rank_state(session), Kind.PER_RANK))
    return parts


def metadata_of(session: Session, target: str | None) -> dict[str, Any]:
    """Return the metadata of a checkpoint.

    Without ``target``, it is a snapshot in memory, which uses up no automatic number.
    """
    accelerator = session.accelerator
    automatic = accelerator.project_configuration.automatic_checkpoint_naming
    iteration = accelerator.project_configuration.iteration
    if automatic:
        iteration = iteration - 1 if target is None else number_of(target)
    about = {
        "version": 1,
        "accelerate": accelerate.__version__,
        "torch": str(torch.__version__),
        "world_size": session.world_size,
        "iteration": iteration,
        "step": session.step,
        "custom_objects": len(accelerator._custom_objects),
        "local_sgd": session.local_sgd.capture(),
        "not_exact": session.not_exact
        + [note for model in session.distributed_models() for note in unsaved_hook_states(model)]
        + ([_TRIGGERED] if accelerator.flag_tensor is not None and accelerator.flag_tensor.item() else []),
    }
    if session.interval is not None:
        about["interval"] = session.interval.schedule.state_dict()
    if session.retention is not None and target is not None:
        about["time"] = commit_time()
        session.retention.record(target, session.step, session.metrics, about["time"])
    if session.metrics:
        about["metrics"] = dict(session.metrics)  # for policies, and for `ckpt ls`
    return {FORMAT: about}


def rank_state(session: Session, *, variables: bool = True) -> dict[str, Any]:
    """Return this rank's own state, for a save.

    With ``variables=False``, for a just-in-time note of each step: without the script's variables, which take long, and
    with copies of gradients.
    """
    accelerator = session.accelerator
    with looks_without_waiting(not variables):
        data = session.data.capture()
    if not variables:
        for loader in filter(None, data["loaders"]):
            loader["next"] = None  # not known of a rank that is lost
    state: dict[str, Any] = {
        "data": data,
        "gradients": session.open_gradients(copies=not variables),
        "window_open": session.window_is_open,
        "buffers": [],
        "takes_buffers": [model.require_forward_param_sync for model in session.distributed_models()],
    }
    if session.recording is not None:
        state["recorder"] = session.recording.capture()
    if variables:
        in_body = any(one and one["trained"] and one["in_last_body"] for one in state["data"]["loaders"])
        state["script"] = session.variables.capture(between=session.data.is_between, in_body=in_body)
    if session.world_size > 1:
        # Each rank starts a step from rank 0's buffers, and updates them with its own batch. Inside an accumulation
        # window, or if the weights are sharded, no rank takes over rank 0's.
        state["buffers"] = own_buffers(accelerator)
    return state


def _named(error: SerializationError, accelerator: Any) -> SerializationError:
    """Return the error with the index and class of the registered object that it is about."""
    name, _, _ = (error.key or "").partition(".")
    if not name.startswith("custom_"):
        return error
    index = int(name.removeprefix("custom_"))
    kind = type(accelerator._custom_objects[index]).__name__
    return SerializationError(
        f"the state of the object {index} given to register_for_checkpointing ({kind}) cannot be saved: "
        f"{error.message}",
        path=error.path,
        key=error.key,
        remedy="let its state_dict return tensors (of a sharded one this rank's part, `to_local()`), numbers, text, "
        "and lists and dictionaries of them: a checkpoint holds nothing whose loading would run code",
    )
