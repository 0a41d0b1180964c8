"""``load_state``: loads our checkpoints, and those of stock Accelerate, with Accelerate's semantics."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from accelerate_ckpt import _termination
from accelerate_ckpt._state.naming import automatic_root, candidates, next_iteration, number_of, path_text
from accelerate_ckpt._state.parts import (
    FORMAT,
    RANK,
    apply_sharded,
    check_optimizer,
    check_weights,
    has_more_optimizers,
    is_sharded,
    load_model,
    read_sharded,
)
from accelerate_ckpt._state.resume import AutoResume, directory_of_run, point_of
from accelerate_ckpt._state.session import Session
from accelerate_ckpt._state.stock import StockCheckpoint, check_custom_objects
from ckpt_core.catalog import Catalog, CheckpointInfo, first_usable, newest_first
from ckpt_core.directory import DirectoryCheckpoint
from ckpt_core.errors import (
    CheckpointError,
    CheckpointFormatError,
    CheckpointNotFoundError,
    StateMismatchError,
    StorageError,
)
from ckpt_core.events import CheckpointLoaded
from ckpt_core.paths import StrPath, is_remote
from ckpt_core.process.awaited_paths import wait_for_saves
from ckpt_core.resume import ResumePoint
from ckpt_core.state.elastic import average_gradients
from ckpt_core.state.gradients import restore_gradients
from ckpt_core.state.kinds import indexed, restore_buffers
from ckpt_core.state.optimizer_types import restore_types, states_in_order

log = logging.getLogger(__name__)

_VERSION = 1
_INEXACT = "not exact, see the warning"
_IF_AS_READ = "exact if data that is read again is as it was, which is compared"
_LEFT_OUT = (
    "under FSDP, one optimizer for each model is saved, as in Accelerate: further ones begin anew (give one optimizer "
    "several groups)"
)
_LOADERS_STAY = "loaders stay where they are, because this process has trained"
_BUT_AN_END = (
    ", but it was saved in the body of an epoch's last batch: a script that begins with the next epoch does not "
    "repeat what it does after an epoch (save after that)"
)
_MAP_LOCATIONS = (None, "cpu", "on_device")


class FolderNotFoundError(CheckpointNotFoundError, ValueError):
    """There is no checkpoint at the path, or none in the directory; Accelerate raises a ``ValueError`` for this."""

    __module__ = "accelerate_ckpt"


def load_state(
    session: Session,
    original: Callable[..., None],
    input_dir: StrPath | None,
    load_kwargs: dict[str, Any] | None,
    model_arguments: dict[str, Any],
) -> None:
    """Restore the state of an Accelerator's run from a checkpoint; called on all ranks together.

    Without ``input_dir`` (a local path or URL), the newest automatically named checkpoint that verifies is loaded.
    ``load_kwargs`` are for Accelerate's own ``load_state``, ``original``, which reads its own checkpoints;
    ``weights_only=False`` in them means that code in the checkpoint may run. ``model_arguments`` are for
    ``load_state_dict`` of the models; ``map_location`` is Accelerate's. Raises on all ranks if the checkpoint is
    missing, damaged, or of another run.
    """
    if model_arguments.get("map_location") not in _MAP_LOCATIONS:
        raise TypeError(
            "Unsupported optimizer map location passed, please choose one of `None`, `'cpu'`, or `'on_device'`"
        )
    if session.rank == 0 and input_dir is not None:
        # Ranks that take no part in a pending save must find its checkpoint; another Accelerator may be saving it.
        wait_for_saves(session.checkpointer.known_as(input_dir))
    # Rank 0's path is used on all ranks, as for saves.
    session.told.add("resume")
    path: str | None
    if input_dir is not None:
        path = session.agreement.from_rank_zero("load_state", path_text(input_dir))
    elif session.config.resume == "auto":
        path = find_resume(session, directory_of_run(session), "load_state", _newest_of_run)
        if path is None:
            return
    else:
        path = _newest(session)

    # In two steps, because the second may need all ranks: if one failed before, the others would wait for it.
    found: list[_Ours | _Stock] = []

    def read() -> None:
        if session.reader_of(path).exists(path):
            found.append(_Ours(session, path, load_kwargs, dict(model_arguments)))
        else:
            found.append(_Stock(session, path, original, load_kwargs, model_arguments))

    session.agreement.all_succeeded("load_state", read)
    session.agreement.all_succeeded("load_state", found[0].apply)


def find_resume(
    session: Session, root: str, what: str, newest: Callable[[Session, str, AutoResume], str | None]
) -> str | None:
    """Return the checkpoint that ``resume="auto"`` continues from; log a line and return None if there is none.

    Called on all ranks together. ``newest`` is called on rank 0; it returns the newest usable checkpoint in ``root``,
    and raises if there are some and none is usable. ``what`` names the operation in errors.
    """
    _wait_for_saves(session, root)
    auto = session.auto_resume
    if auto is None or auto.root != root:
        auto = session.auto_resume = AutoResume(session, root)
    _termination.protect()
    path = session.agreement.asked_of_rank_zero(what, lambda: newest(session, root, auto))
    if path is None:
        session.tell_once("fresh", f"there is nothing to resume in {root}: this run starts from the beginning")
    return None if path is None else str(path)


def _wait_for_saves(session: Session, root: str) -> None:
    session.checkpointer.drain()
    wait_for_saves(session.checkpointer.known_as(root))  # also those of an earlier Accelerator of this process


class _Stock:
    """A checkpoint of stock Accelerate; the arguments are those of :func:`load_state`."""

    def __init__(
        self,
        session: Session,
        path: str,
        original: Callable[..., None],
        load_kwargs: dict[str, Any] | None,
        model_arguments: dict[str, Any],
    ) -> None:
        if is_remote(path) or not os.path.isdir(path):
            raise FolderNotFoundError(f"Tried to find {path} but folder does not exist", path=path)
        self._session = session
        self._path = path
        self._original = functools.partial(original, path, **model_arguments)
        self._load_kwargs = load_kwargs
        self._checkpoint = StockCheckpoint(
            session.accelerator,
            path,
            session.rank,
            allow_pickle=_may_run_code(session, load_kwargs),
            strict=model_arguments.get("strict", True),
        )

    def apply(self) -> None:
        session = self._session
        _tell_of_stock(session, self._path)
        self._checkpoint.load(self._original, self._load_kwargs)
        point = ResumePoint(self._path)
        session.note_resumed(point)
        session.announce(point.in_words(_INEXACT))
        _continue_counting(session, self._path, None)


def _may_run_code(session: Session, load_kwargs: Mapping[str, Any] | None) -> bool:
    return session.config.allow_pickle or (load_kwargs or {}).get("weights_only") is False


def _tell_of_stock(session: Session, path: str) -> None:
    session.tell_once(
        "stock",
        f"{path} was saved by stock Accelerate: the data order and position, the gradients of an open "
        "accumulation window and the registered objects of other ranks are not in it, so this resume is not "
        "exact. The next save_state holds everything",
    )


def _continue_counting(session: Session, path: str, loaded: int | None) -> None:
    accelerator = session.accelerator
    project = accelerator.project_configuration
    if project.automatic_checkpoint_naming:
        loaded = number_of(path) if loaded is None else loaded
        project.iteration = next_iteration(accelerator, loaded, session.config.storage_options, session.tiers)


# ---- which one -------------------------------------------------------------------------------------------------------


def _newest(session: Session) -> str:
    """Return the newest automatically named checkpoint that can be used; raise if there is none."""
    accelerator = session.accelerator
    if not accelerator.project_configuration.automatic_checkpoint_naming:
        raise ValueError("No input_dir provided and automatic checkpoint naming is disabled.")
    _wait_for_saves(session, automatic_root(accelerator))
    path = session.agreement.asked_of_rank_zero("load_state", lambda: _newest_usable(session))
    if path is None:
        root = automatic_root(accelerator)
        raise FolderNotFoundError(
            f"there is no usable checkpoint in {root}",
            path=root,
            remedy="resume='auto' starts the run from the beginning there",
        )
    return str(path)


def _newest_usable(session: Session) -> str | None:
    root = automatic_root(session.accelerator)
    found = _and_in_memory(session, candidates(root, session.config.storage_options, session.tiers))
    return newest_usable(session, root, found, lambda path: _check_usable(session, path))


def _newest_of_run(session: Session, root: str, auto: AutoResume) -> str | None:
    if session.accelerator.project_configuration.automatic_checkpoint_naming:
        found = candidates(root, session.config.storage_options, session.tiers)
    else:  # with any name
        options = session.config.storage_options
        found = Catalog(root, suffix="", storage_options=options, tiers=session.tiers).checkpoints()
        found = [info for info in found if info.is_directory]
    found = _and_in_memory(session, found)
    return newest_usable(session, root, found, lambda path: _check_usable(session, path), auto)


def _and_in_memory(session: Session, found: list[CheckpointInfo]) -> list[CheckpointInfo]:
    in_memory = [] if session.memory is None else session.memory.found()
    return newest_first([*found, *in_memory]) if in_memory else found


def newest_usable(
    session: Session,
    root: str,
    found: Sequence[CheckpointInfo],
    check: Callable[[str], None],
    auto: AutoResume | None = None,
) -> str | None:
    """Return the first checkpoint that can be used (:func:`ckpt_core.catalog.first_usable`), None if there are none.

    With ``auto``, those on which the run crashed too often come last, and the attempt is counted.
    """

    def check_info(info: CheckpointInfo) -> None:
        try:
            check(info.path)
        except CheckpointError:
            raise
        except OSError as error:  # from a checkpoint that is not ours: it is unreadable, or was deleted meanwhile
            text = f"cannot read the checkpoint: {error.strerror or error}"
            raise StorageError(text, path=info.path, errno=error.errno) from error

    if not found:
        catalog = Catalog(root, suffix="", storage_options=session.config.storage_options, tiers=session.tiers)
        catalog.refuse_wrong_directory()
        catalog.refuse_remains()
    problems: dict[str, CheckpointError] = {}
    order = list if auto is None else auto.in_order
    info = first_usable(root, found, check_info, passed_over=problems, order=order)
    session.note_passed_over(problems)
    if auto is not None and info is not None:
        auto.begin(info)
    return None if info is None else info.path


def _check_usable(session: Session, path: str) -> None:
    if not session.reader_of(path).exists(path):
        StockCheckpoint(session.accelerator, path, session.rank, allow_pickle=session.config.allow_pickle)
        return
    with contextlib.closing(session.reader_of(path).load(path)) as checkpoint:
        checkpoint.verify()


# ---- ours ------------------------------------------------------------------------------------------------------------


class _Ours:
    """A checkpoint of ours, of which all but the models is read; the arguments are those of :func:`load_state`."""

    def __init__(
        self, session: Session, path: str, load_kwargs: dict[str, Any] | None, model_arguments: dict[str, Any]
    ) -> None:
        model_arguments.pop("map_location", None)  # tensors are loaded to the devices of the model's own
        accelerator = session.accelerator
        self._begun = time.monotonic()
        self._session = session
        self._path = path
        self._model_arguments = model_arguments
        self._types: dict[int, torch.dtype] = {}  # saved dtypes of parameters, by their id()
        weights_only = not _may_run_code(session, load_kwargs)
        with contextlib.closing(session.reader_of(path).load(path, weights_only=weights_only)) as checkpoint:
            about = _metadata(checkpoint, path)
            self._saved_world_size = int(about["world_size"])
            self._saved_by = checkpoint.ranks_with(RANK)
            self._rank = session.rank if session.rank in self._saved_by else 0
            check_custom_objects(about["custom_objects"], len(accelerator._custom_objects), path)
            session.local_sgd.check(about["local_sgd"], self._saved_world_size, session.world_size, path)
            _check_parts(accelerator, checkpoint, path)
            self._about, self._size = about, checkpoint.size
            self._own = checkpoint.load(RANK, rank=self._rank)
            self._states = {name: checkpoint.load(name, rank=self._rank) for name in _states_to_read(accelerator)}
            self._gradients = self._read_gradients(checkpoint)
            self._sharded = read_sharded(accelerator, checkpoint) if is_sharded(accelerator) else None
        if self._sharded is None:
            for index, optimizer in enumerate(accelerator._optimizers):
                name = indexed("optimizer", index)
                check_optimizer(optimizer, self._states[name], path=path, key=name)

    def _read_gradients(self, checkpoint: DirectoryCheckpoint) -> list[dict[str, Any]]:
        """Return, for each model, the gradients to which the next backward pass adds."""
        found = self._own["gradients"]
        if found is None or self._session.world_size == self._saved_world_size:
            return list(found or [])
        ranks = [checkpoint.load(RANK, rank=rank)["gradients"] or [] for rank in self._saved_by]
        return [average_gradients(of_model) for of_model in itertools.zip_longest(*ranks, fillvalue={})]

    def apply(self) -> None:
        session, own = self._session, self._own
        if len(self._saved_by) < self._saved_world_size:
            session.tell_once(
                "saved-alone",
                f"{self._path} was saved on rank 0 and not on all of {self._saved_world_size}: the others continue "
                "with its data position and registered objects, and with random generators derived from its own, so "
                "this resume is not exact. Call save_state on all ranks, not under `if accelerator.is_main_process`",
            )
        if self._about.get("of_stock"):
            _tell_of_stock(session, self._path)
        accelerator = session.accelerator
        session.data.follow()  # notes the initial state of a registered sampler, before its saved state is loaded
        self._load_models()
        if session.world_size == self._saved_world_size:
            for model, buffers in zip(accelerator._models, own["buffers"], strict=False):
                restore_buffers(model, buffers)
            for wrapped, takes in zip(session.distributed_models(), own["takes_buffers"], strict=False):
                wrapped.require_forward_param_sync = takes
        for name, owner in _states_to_read(accelerator).items():
            owner.load_state_dict(self._states[name])
        for index, optimizer in enumerate(accelerator._optimizers if self._sharded is None else ()):
            saved = states_in_order(self._states[indexed("optimizer", index)])
            restore_types(optimizer.optimizer, saved, lambda parameter: self._types.get(id(parameter)))
        for model, found in itertools.zip_longest(accelerator._models, self._gradients):
            if model is not None:
                restore_gradients(model.named_parameters(), found or {})
        window_open = bool(own.get("window_open", any(self._gradients)))  # not in older checkpoints
        session.gradients_restored(window_open=window_open)
        session.local_sgd.restore(self._about["local_sgd"])
        _continue_counting(session, self._path, self._about["iteration"])
        session.step = int(self._about.get("step", 0))  # older checkpoints have none
        point = point_of(self._path, session.step, own["data"])
        session.note_resumed(point)
        if session.interval is not None:
            session.interval.resumed(session.step, self._about.get("interval"))
        has_own = self._rank == session.rank
        if session.recording is not None:
            recorded = own.get("recorder") if has_own else None
            session.recording.set_directory(session.place_of(self._path), session.rank, recorded)
            comparable = session.world_size == self._saved_world_size == len(self._saved_by)
            session.recording.resume(recorded if comparable else None, window_open=window_open)
        session.variables.resume(own.get("script", {}))
        # Last, because it sets the random generators, and what comes before may draw from them.
        is_exact = session.data.restore(own["data"], saved_world_size=self._saved_world_size, has_own=has_own)
        notes = list(self._about.get("not_exact", ()))
        notes += [_LEFT_OUT] if self._sharded is not None and has_more_optimizers(accelerator) else []
        if notes:
            session.tell_once("not exact", f"this resume is not guaranteed to be exact: {'; '.join(notes)}")
        is_exact &= not notes and not self._about.get("of_stock") and len(self._saved_by) == self._saved_world_size
        in_last_body = any(one and one["trained"] and one.get("in_last_body") for one in own["data"]["loaders"])
        outcome = f"exact{_BUT_AN_END if in_last_body else ''}" if is_exact else _INEXACT
        if is_exact and session.data.is_yet_compared:
            outcome = _IF_AS_READ
        if is_exact and session.data.leaves_loaders:
            outcome = _LOADERS_STAY
        seconds = time.monotonic() - self._begun
        session.checkpointer.notify(CheckpointLoaded(path=point.path, bytes=self._size, seconds=seconds, verified=True))
        session.announce(point.in_words(outcome, self._size, seconds))

    def _load_models(self) -> None:
        accelerator = self._session.accelerator
        models = list(accelerator._models) if self._sharded is None else []
        hooks = list(accelerator._load_model_state_pre_hook.values())
        with contextlib.closing(self._session.reader_of(self._path).load(self._path)) as checkpoint:
            if hooks:
                with _local_directory(checkpoint) as directory:
                    for hook in hooks:
                        hook(models, directory)
            for index, model in enumerate(models):
                part, arguments = indexed("model", index), self._model_arguments
                if self._about.get("of_stock"):  # stock Accelerate saves only one name of a tied weight
                    shapes = {name: info.shape for name, info in checkpoint.parts[part].tensors.items()}
                    check_weights(model, shapes, strict=arguments.get("strict", True), path=self._path)
                    arguments = {**arguments, "strict": False}
                load_model(model, checkpoint, part, rank=self._rank, **arguments)
                saved, here = checkpoint.parts[part].tensors, model.state_dict(keep_vars=True)
                self._types |= {id(here[name]): info.dtype for name, info in saved.items() if name in here}
        if self._sharded is not None:
            apply_sharded(accelerator, self._sharded)


@contextlib.contextmanager
def _local_directory(checkpoint: DirectoryCheckpoint) -> Iterator[str]:
    """Yield a local directory with the files that hooks wrote: the checkpoint itself, or a copy of one on a store."""
    if not is_remote(checkpoint.path):
        yield checkpoint.path
        return
    with tempfile.TemporaryDirectory(prefix="ckpt-hooks-") as directory:
        for name in checkpoint.files:
            target = Path(directory, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(CheckpointNotFoundError):  # a file of tensors, not written by hooks
                target.write_bytes(checkpoint.read_file(name))
        yield directory


def _metadata(checkpoint: DirectoryCheckpoint, path: str) -> Mapping[str, Any]:
    about = checkpoint.metadata.get(FORMAT)
    if about is None:
        raise CheckpointFormatError(
            "this checkpoint was not saved by accelerate_ckpt",
            path=path,
            remedy="load it with the program that saved it, or with ckpt_core.DirectoryCheckpointer",
        )
    if about["version"] > _VERSION:
        raise CheckpointFormatError(
            f"the checkpoint has version {about['version']}, but this accelerate_ckpt reads version {_VERSION}",
            path=path,
            remedy="install a newer accelerate_ckpt",
        )
    return about  # type: ignore[no-any-return]


def _states_to_read(accelerator: Any) -> dict[str, Any]:
    """Return the objects whose ``load_state_dict`` takes a part unchanged, by the part's name."""
    owners: dict[str, Any] = {}
    if not is_sharded(accelerator):
        owners |= {indexed("optimizer", index): owner for index, owner in enumerate(accelerator._optimizers)}
    owners |= {indexed("scheduler", index): owner for index, owner in enumerate(accelerator._schedulers)}
    if accelerator.scaler is not None:
        owners["scaler"] = accelerator.scaler
    return owners | {f"custom_{index}": owner for index, owner in enumerate(accelerator._custom_objects)}


def _check_parts(accelerator: Any, checkpoint: DirectoryCheckpoint, path: str) -> None:
    wanted = list(_states_to_read(accelerator))
    if not accelerator._load_model_state_pre_hook:  # a hook may load the models in its own way
        wanted += [indexed("model", index) for index, _ in enumerate(accelerator._models)]
    missing = [name for name in wanted if name not in checkpoint.parts]
    if missing:
        raise StateMismatchError(
            f"the checkpoint has no {', no '.join(missing)}: it has {', '.join(sorted(checkpoint.parts))}",
            path=path,
            key=missing[0],
            remedy="prepare as many models, optimizers and schedulers as the run that saved",
        )
