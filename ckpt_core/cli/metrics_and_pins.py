"""Read from checkpoints their metrics, the best checkpoint according to their run, and pins; explain why they stay."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckpt_core.errors import CheckpointError
from ckpt_core.pins import note_of_pin
from ckpt_core.process.threads import run_parallel
from ckpt_core.storage import storage_for

if TYPE_CHECKING:
    from ckpt_core.catalog import CheckpointInfo

_ACCELERATE = "accelerate_ckpt"
_THREADS = 8
_SHOWN = 3  # metrics


@dataclasses.dataclass(frozen=True)
class Told:
    """What :func:`listen` has read from a checkpoint."""

    metrics: Mapping[str, float]  # values that its run saved with it, by name
    best: frozenset[str]  # names of the checkpoints that were the best according to its run when it was saved
    note: str | None  # the reason for its pin, "" if none was given; None if it is not pinned


def listen(infos: Sequence[CheckpointInfo], storage_options: dict[str, Any] | None) -> dict[str, Told]:
    """Read metrics, best checkpoints and pins of checkpoints, by path; no tensor is read, and errors are ignored."""
    found: dict[str, Told] = {}

    def ask(info: CheckpointInfo) -> None:
        found[info.path] = _ask(info, storage_options)

    run_parallel(ask, infos, threads=min(_THREADS, len(infos)))
    return found


def _ask(info: CheckpointInfo, storage_options: dict[str, Any] | None) -> Told:
    from ckpt_core._pipeline import loading
    from ckpt_core.state.trainer_parts import metrics_of

    storage = storage_for(info.path, storage_options)
    note = note_of_pin(info.path, storage) if info.is_pinned else None
    values: Mapping[Any, Any] = {}
    if info.committed is not None and info.is_readable:
        with contextlib.suppress(CheckpointError):
            values = _mapping(loading.glance(info.path, storage=storage))
    accelerate, callbacks = _mapping(values.get(_ACCELERATE)), _mapping(values.get("callbacks"))
    metrics = {**_mapping(values.get("metrics")), **_mapping(accelerate.get("metrics"))}
    metrics |= metrics_of({"callbacks": callbacks})
    # Without a monitored metric, Lightning calls its last checkpoint the best.
    compared = (state for key, state in callbacks.items() if "'monitor': None" not in str(key))
    best = (_mapping(state).get("best_model_path") for state in compared)
    return Told(
        {str(name): value for name, value in metrics.items() if isinstance(value, float)},
        frozenset(os.path.basename(path.rstrip("/")) for path in best if isinstance(path, str) and path),
        note,
    )


def _mapping(value: Any) -> Mapping[Any, Any]:
    return value if isinstance(value, Mapping) else {}


def reasons(infos: Sequence[CheckpointInfo], told: Mapping[str, Told]) -> dict[str, list[str]]:
    """Return the known reasons why retention keeps each checkpoint of one directory; ``infos`` are newest first."""
    found: dict[str, list[str]] = {info.path: [] for info in infos}
    newest = next((info for info in infos if info.is_readable), None)
    best = told[newest.path].best if newest is not None else frozenset()
    for info in infos:
        if newest is not None and info.is_readable and _is_copy(info, newest):
            found[info.path].append("newest")
        if info.name in best:
            found[info.path].append("best")
        note = told[info.path].note
        if note is not None:
            found[info.path].append(pinned(note))
    return found


def pinned(note: str) -> str:
    """Return the text for a pinned checkpoint, with the reason for the pin."""
    return f"pinned ({note})" if note else "pinned"


def _is_copy(info: CheckpointInfo, other: CheckpointInfo) -> bool:
    same = info.committed is not None and (info.committed, info.step) == (other.committed, other.step)
    return same or info.path == other.path


def in_words(metrics: Mapping[str, float]) -> str:
    """Return metrics as short text: ``"loss=0.31 acc=0.9"``; of many, the first three and the number of others."""
    shown = [f"{name}={value:.4g}" for name, value in list(metrics.items())[:_SHOWN]]
    return " ".join(shown) + (f" +{len(metrics) - _SHOWN}" if len(metrics) > _SHOWN else "")
