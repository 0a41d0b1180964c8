"""The exact state of all ranks in a checkpoint: what each rank writes itself, and elastic resume on other ranks."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from ckpt_core.errors import StateMismatchError
from ckpt_core.state.elastic import average_gradients, derive_rng
from ckpt_core.state.kinds import Kind
from ckpt_core.state.rng import RngState
from lightning_ckpt._exact.loaders import TrainingData

# keys among those of the gradients, which no parameter can have as its name
_APART = {"post_local_sgd": "post-localSGD/", "buffers": "buffers/"}


def split_large(mine: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a rank's exact state into what is as large as the weights, which each rank writes itself, and the rest."""
    large = dict(mine["gradients"])
    large |= {key: mine[name] for name, key in _APART.items() if mine[name]}
    return large, {**mine, "gradients": {}, **{name: {} for name in _APART}}


def put_back(state: Mapping[str, Any], apart: Mapping[int, Any]) -> dict[str, Any]:
    """Undo :func:`split_large` in the exact state of all ranks; ``apart`` is what ranks wrote themselves, by rank."""
    ranks = list(state[Kind.PER_RANK.value])
    for rank, saved in apart.items():
        if rank < len(ranks) and ranks[rank] is not None:
            gradients = dict(saved)
            own = {name: gradients.pop(key, {}) for name, key in _APART.items()}
            ranks[rank] = {**ranks[rank], "gradients": gradients, **own}
    return {**state, Kind.PER_RANK.value: ranks}


def state_for_rank(state: Mapping[str, Any], rank: int, *, gradients: bool) -> dict[str, Any]:
    """Return a rank's state for a resume on another number of ranks; raise if ``state``, of all ranks, has none.

    It has the random generators of the rank of its number, or, if there was none, generators derived from those of
    the first and from its number. Without ``gradients``, those accumulated in an open window are left out, and the
    window begins again. With manual optimization, only the user's code knows where it began: all ranks get the mean.
    """
    ranks = [saved for saved in state[Kind.PER_RANK.value] if saved is not None]
    if not ranks:
        raise StateMismatchError("the checkpoint holds no rank's exact state", key=Kind.PER_RANK.value)
    own = (state[Kind.PER_RANK.value] + [None] * (rank + 1))[rank]
    rng = own["rng"] if own is not None else derive_rng(RngState.decode(ranks[0]["rng"]), rank).encode()
    average = average_gradients([saved["gradients"] for saved in ranks]) if gradients else {}
    metrics = {**ranks[0]["metrics"], "results": {}, "metrics": {}}
    return {**ranks[0], "rng": rng, "gradients": average, "metrics": metrics}


def elastic_causes(data: TrainingData, shared: Mapping[str, Any], mine: Mapping[str, Any]) -> list[str]:
    """Return how this resume differs from an uninterrupted run; ``shared`` is of all ranks, ``mine`` of this rank."""
    problem = data.elastic_problem(mine["data"])
    if problem is None:
        rest = "every sample that was left of the epoch is used once"
    else:
        rest = f"the data of the epoch begins again, for as many batches as were left, because {problem}"
    saved = shared["world_size"]
    ranks = f"it was saved by {saved} rank{'s' * (saved > 1)} and is resumed by {data.world_size}"
    return [f"{ranks}: {rest}, and open metrics begin again"]


def continue_elastic(
    data: TrainingData, shared: Mapping[str, Any], state: Mapping[str, Any], *, begin_window_again: bool
) -> dict[str, Any]:
    """Make the loaders continue with what is left of the epoch, and count its batches as these ranks do.

    ``state`` is the state of the loaders on one of the ranks that saved. Returns ``shared``, with the phase and the
    counters of the loops changed for these ranks.
    """
    phase, progress = shared["phase"], copy.deepcopy(shared["progress"])
    again = 0
    if begin_window_again and not state["between"]:
        again = state["batches"] % progress["accumulate_grad_batches"]
    done = data.continue_epoch(state, again, shared["world_size"])
    if phase == "between_epochs":
        return dict(shared)
    if phase in ("batch", "batch_end"):
        # nothing may be left for these ranks (drop_last); the epoch's end is to follow a batch all the same
        over = done >= data.batches
        progress["batch"]["is_last_batch"] = over
        phase = "batch_end" if done and (over or (phase == "batch_end" and not again)) else "batch"
    current = progress["batch"]["current"]
    current.update(dict.fromkeys(("ready", "started", "processed", "completed"), done))
    if phase == "batch_end":
        current["completed"] = done - 1
    return {**shared, "phase": phase, "progress": progress}
