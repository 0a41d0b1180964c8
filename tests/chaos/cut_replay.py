"""Repeats a recorded training in one process, update by update, and compares every bit with a checkpoint of it."""

from __future__ import annotations

import torch

from ckpt_async.consistent_cut import UpdateId, replay_schedule
from ckpt_async.consistent_cut.replay import ApplyPiece, ComputeUpdate, ReadShard
from ckpt_async.parameter_server import CutCheckpoint
from ckpt_async.parameter_server.client import seed_of
from ckpt_async.parameter_server.model import BlockTable
from ckpt_async.parameter_server.state import ServerState
from tests.chaos.cut_training import CountingModel, Job, compute_gradients, make_optimizer


def differences(job: Job, checkpoint: CutCheckpoint, base: CutCheckpoint | None = None) -> list[str]:
    """Return the names of what differs between a checkpoint and a replay of the training up to its cut.

    Args:
        job: The training; recorded with ``record_order``.
        checkpoint: The checkpoint to compare.
        base: The checkpoint from which that start of the training resumed, if any.
    """
    model = CountingModel(job.samples)
    table = BlockTable(model.named_parameters())
    cut = checkpoint.cut
    values = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    shards = {
        shard: ServerState({name: values[name] for name in names}, make_optimizer)
        for shard, names in table.deal(cut.shards).items()
    }
    for state in shards.values() if base is not None else ():
        base.load_into(state, table)  # type: ignore[union-attr]
    orders = {
        name: [UpdateId(*update) for update in checkpoint.participant(rank)["order"]]
        for rank, name in enumerate(cut.shards)
    }
    pulled = {}
    for name in cut.workers:
        for stream, seq, versions in checkpoint.worker(name)["pulled"]:  # type: ignore[index]
            pulled[UpdateId(stream, seq)] = versions

    read: dict[UpdateId, dict[str, torch.Tensor]] = {}
    gradients: dict[UpdateId, dict[str, torch.Tensor]] = {}
    for step in replay_schedule(orders, pulled):
        match step:
            case ReadShard(shard, update):
                now = {name: tensor.detach().clone() for name, tensor in shards[shard].parameters.items()}
                read.setdefault(update, {}).update(now)
            case ComputeUpdate(update):
                with torch.no_grad():
                    for name, parameter in model.named_parameters():
                        parameter.copy_(read[update][name])
                del read[update]
                torch.manual_seed(seed_of(0, update))
                compute_gradients(job, model, update)
                gradients[update] = {
                    name: parameter.grad.clone()
                    for name, parameter in model.named_parameters()
                    if parameter.grad is not None
                }
            case ApplyPiece(shard, update):
                own = shards[shard].parameters
                shards[shard].apply(update, {name: gradients[update][name] for name in own})
    return [name for shard, state in shards.items() for name in _compare(state, shard, checkpoint, table)]


def _compare(state: ServerState, shard: str, checkpoint: CutCheckpoint, table: BlockTable) -> list[str]:
    saved = ServerState({name: torch.zeros_like(tensor) for name, tensor in state.parameters.items()}, make_optimizer)
    checkpoint.load_into(saved, table)
    found = []
    for name, tensor in state.parameters.items():
        if not torch.equal(tensor, saved.parameters[name]):
            found.append(f"{shard}: {name}")
        mine, theirs = state.optimizer_state(name), saved.optimizer_state(name)
        found += [
            f"{shard}: {name}.{key}"
            for key in {*mine, *theirs}
            if key not in mine or key not in theirs or not torch.equal(mine[key], theirs[key])
        ]
    return found
