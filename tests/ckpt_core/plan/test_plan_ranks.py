"""Models that torch itself shards, on real ranks: together they write the full tensors, each element once.

This file is the test and the script that it runs as ranks.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardedStateDictConfig, StateDictType, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ckpt_core._plan import LocalTensor, WritePlanCache, local_tensor, slicing
from ckpt_core.errors import SerializationError
from ckpt_core.tree import tensors as tensors_of
from tests.conftest import ScriptRunner

CASES: dict[str, tuple[tuple[int, ...], Callable[[int], None]]] = {}


def case(*worlds: int) -> Callable[[Callable[[int], None]], Callable[[int], None]]:
    def register(function: Callable[[int], None]) -> Callable[[int], None]:
        CASES[function.__name__] = (worlds, function)
        return function

    return register


class Block(nn.Module):
    """Layers whose sizes no number of ranks divides; most ranks hold nothing of `gate` and of the scalar-like bias."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 5)
        self.gate = nn.Linear(5, 1)
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.down(torch.relu(self.up(x))))
        return y * self.gate(y)


def trained(model: nn.Module, *, steps: int = 2) -> dict[str, torch.Tensor]:
    """Return the tensors of the model and its optimizer after some steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(steps):
        torch.manual_seed(10 * step + dist.get_rank())
        model(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(tensors_of({"model": model.state_dict(), "optimizer": optimizer.state_dict()}))


def planned(state: dict[str, torch.Tensor], *, replicated: bool = True) -> dict[str, LocalTensor]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return {
        key: local_tensor(tensor, key=key, rank=rank, world_size=world_size, replicated=replicated)
        for key, tensor in state.items()
    }


def check(state: dict[str, torch.Tensor], wholes: dict[str, torch.Tensor]) -> None:
    """Check that the ranks, for `state`, together write `wholes`, every element once."""
    mine = {
        key: [(piece.box, piece.tensor.clone()) for piece in pieces]
        for key, pieces in WritePlanCache().writes_of_rank(planned(state), dist.get_rank()).items()
    }
    written: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(written, mine)
    assert set().union(*written) == set(wholes)
    for key, whole in wholes.items():
        found, times = torch.zeros_like(whole), torch.zeros(whole.shape, dtype=torch.int)
        for box, part in (item for writes in written for item in writes.get(key, ())):
            where = tuple(slice(begin, end) for begin, end in zip(box.offset, box.end, strict=True))
            found[where] = part
            times[where] += 1
        assert (times == 1).all(), f"{key}: {times}"
        assert torch.equal(found, whole), key


def check_distributed(state: dict[str, torch.Tensor]) -> None:
    assert any(isinstance(tensor, DTensor) for tensor in state.values())
    check(state, {key: t.full_tensor() if isinstance(t, DTensor) else t for key, t in state.items()})


def same_on_all_ranks(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


@case(2, 3, 4)
def fsdp2_uneven(world: int) -> None:
    torch.manual_seed(0)
    model = Block()
    model.norm.eval()  # its buffers are replicated
    state = trained(fully_shard(fully_shard_layers(model)))
    check_distributed(state)
    nothing = [key for key, local in planned(state).items() if not local.pieces]
    assert bool(nothing) == (dist.get_rank() > 0), nothing  # gate's row is on rank 0


def fully_shard_layers(model: Block, mesh: DeviceMesh | None = None) -> Block:
    fully_shard(model.up, mesh=mesh)
    fully_shard(model.down, mesh=mesh)
    return model


@case(2, 4)
def fsdp2_by_columns(world: int) -> None:
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(8, 12, bias=False)), shard_placement_fn=lambda _: Shard(1))
    check_distributed(dict(model.state_dict()))


@case(4)
def hsdp(world: int) -> None:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = Block()
    model.norm.eval()
    state = trained(fully_shard(fully_shard_layers(model, mesh), mesh=mesh))
    check_distributed(state)
    rank = dist.get_rank()
    assert planned(state)["model.up.weight"].holders == (rank % 2, rank % 2 + 2)


@case(4)
def tensor_parallel_and_fsdp(world: int) -> None:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 8))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh["dp"])
    state = trained(model)
    assert any("_StridedShard" in repr(t.placements) for t in state.values() if isinstance(t, DTensor))
    check_distributed(state)


@case(6)
def tensor_parallel_and_fsdp_uneven(world: int) -> None:
    """7 rows in 2 parts, each split in 3: torch's own offsets put a row on a rank that has none."""
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(nn.Sequential(nn.Linear(4, 7)), mesh["tp"], {"0": ColwiseParallel()})
    whole = {"0.weight": same_on_all_ranks(7, 4), "0.bias": same_on_all_ranks(7)}
    model.load_state_dict(
        {key: distribute_tensor(tensor, mesh["tp"], [Shard(0)]) for key, tensor in whole.items()}, assign=True
    )
    state = dict(fully_shard(model, mesh=mesh["dp"]).state_dict())
    check(state, whole)


@case(4)
def tensor_parallel_and_fsdp_on_a_flattened_mesh(world: int) -> None:
    """As Accelerate and torchtitan shard: what is not parallelized is on a slice of the flattened mesh."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "cp", "tp"))
    flat = mesh["dp", "cp"]._flatten("dp_cp")
    model = nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.Linear(12, 8))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for layer in (*model, model):
        fully_shard(layer, mesh=flat)
    state = dict(model.state_dict())
    check_distributed(state)
    assert planned(state)["1.weight"].holders == ((0, 1), (2, 3))[dist.get_rank() // 2]


@case(2, 4)
def tensor_parallel(world: int) -> None:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (world,))
    model = parallelize_module(
        nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 5)), mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()}
    )
    check_distributed(dict(model.state_dict()))


@case(4)
def any_placements(world: int) -> None:
    cube = init_device_mesh("cpu", (2, 2))
    line = init_device_mesh("cpu", (4,))
    odd = DeviceMesh("cpu", [[0, 2], [1, 3]])
    choices = [Replicate(), Shard(0), Shard(1), Shard(2)]
    state = {}
    for number, shape in enumerate([(5, 3, 7), (1, 2, 3)]):
        whole = same_on_all_ranks(*shape)
        for mesh in (cube, odd):
            for one in choices:
                for other in choices:
                    key = f"{number}.{mesh is odd}.{one}.{other}"
                    state[key] = distribute_tensor(whole.clone(), mesh, [one, other])
        for one in choices:
            state[f"{number}.line.{one}"] = distribute_tensor(whole.clone(), line, [one])
    state["plain"] = same_on_all_ranks(100_000)
    check_distributed(state)


@case(3, 4)
def on_some_of_the_ranks(world: int) -> None:
    whole = same_on_all_ranks(5, 4)
    pair, others = DeviceMesh("cpu", [0, 2]), DeviceMesh("cpu", [1])
    state = {
        "pair": distribute_tensor(whole, pair, [Shard(0)]),
        "both": distribute_tensor(whole, pair, [Replicate()]),
        "other": distribute_tensor(whole, others, [Shard(1)]),
        "plain": whole,
    }
    assert bool(planned(state)["pair"].pieces) == (dist.get_rank() in (0, 2))
    check(state, dict.fromkeys(state, whole))


@contextlib.contextmanager
def sharded_state(model: FullyShardedDataParallel) -> Iterator[None]:
    with FullyShardedDataParallel.state_dict_type(
        model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(offload_to_cpu=False)
    ):
        yield


@case(2, 3)
def fsdp1(world: int) -> None:
    torch.manual_seed(0)
    model = FullyShardedDataParallel(Block().eval(), device_id=torch.device("cpu"), use_orig_params=True)
    trained(model, steps=1)
    with sharded_state(model):
        state = dict(model.state_dict())
    kinds = {type(tensor).__name__ for tensor in state.values()}
    assert kinds == {"ShardedTensor", "Tensor"}, kinds
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        full = {key: tensor.detach().clone() for key, tensor in model.module.state_dict().items()}
    check(state, full)


@case(2)
def fsdp1_hybrid_with_a_mesh(world: int) -> None:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
    model = FullyShardedDataParallel(Block().eval(), device_id=torch.device("cpu"), device_mesh=mesh)
    with sharded_state(model):
        check_distributed(dict(model.state_dict()))


@case(3)
def sharded_tensor_of_several_parts(world: int) -> None:
    """Rank 1 holds two of three parts, rank 2 none."""
    spec = ChunkShardingSpec(dim=0, placements=["rank:1/cpu", "rank:0/cpu", "rank:1/cpu"])
    tensor = sharded_tensor.zeros(spec, 7, 2, requires_grad=True)
    whole = same_on_all_ranks(7, 2)
    with torch.no_grad():
        for shard in tensor.local_shards():
            begin = shard.metadata.shard_offsets[0]
            shard.tensor.copy_(whole[begin : begin + shard.metadata.shard_sizes[0]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns when a ShardedTensor is used as a tensor
        pieces = planned({"x": tensor})["x"].pieces
    assert len(pieces) == (1, 2, 0)[dist.get_rank()]
    assert not any(piece.tensor.requires_grad for piece in pieces)
    check({"x": tensor}, {"x": whole})


@case(3)
def sharded_tensor_with_less_rows_than_ranks(world: int) -> None:
    spec = ChunkShardingSpec(dim=0, placements=["rank:0/cpu", "rank:1/cpu", "rank:2/cpu"])
    few, none = sharded_tensor.ones(spec, 2, 4), sharded_tensor.ones(spec, 0, 4)
    found = planned({"few": few, "none": none})
    assert found["few"].holders == ((0,), (1,), ())[dist.get_rank()]
    assert len(found["few"].pieces) == len(found["few"].holders)
    check({"few": few, "none": none}, {"few": torch.ones(2, 4), "none": torch.ones(0, 4)})


@case(4)
def sharded_tensor_of_some_ranks_is_refused(world: int) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    first = dist.get_rank() // 2 * 2
    spec = ChunkShardingSpec(dim=0, placements=[f"rank:{first}/cpu", f"rank:{first + 1}/cpu"])
    tensor = sharded_tensor.zeros(spec, 4, 2, process_group=groups[first // 2])
    with pytest.raises(SerializationError, match="2 of 4 ranks") as caught:
        planned({"net.weight": tensor})
    assert caught.value.key == "net.weight"
    assert "device_mesh" in str(caught.value.remedy)


def run_rank(rank: int, world: int, directory: Path) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/store-{world}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=60),
    )
    # Let small tensors be cut, too.
    slicing.SMALLEST_PART, slicing.SMALLEST_SHARE = 64, 16
    outcomes = {}
    for name, (worlds, function) in CASES.items():
        if world in worlds:
            problem = ""
            try:
                function(world)
            except (Exception, pytest.fail.Exception):  # noqa: BLE001 - the test reports it
                problem = f"rank {rank}: {traceback.format_exc()}"
            problems: list[Any] = [None] * world
            dist.all_gather_object(problems, problem)
            outcomes[f"{name} on {world} ranks"] = "\n".join(filter(None, problems))
    if rank == 0:
        (directory / f"outcomes-{world}.json").write_text(json.dumps(outcomes))
    dist.destroy_process_group()


def main() -> None:
    """Run all ranks as children of one process: their imports take longer than the cases."""
    importlib.import_module("torch._dynamo")
    for world in sorted({world for worlds, _ in CASES.values() for world in worlds}):
        children = []
        for rank in range(world):
            child = os.fork()
            if child == 0:
                run_rank(rank, world, Path(sys.argv[1]))
                os._exit(0)
            children.append(child)
        statuses = [os.waitpid(child, 0)[1] for child in children]
        if any(statuses):
            sys.exit(f"a rank of {world} failed")


if __name__ == "__main__":
    main()


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """The outcomes of the one run of the script, which the first test starts."""
    return {}


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    "name", [f"{name} on {world} ranks" for name, (worlds, _) in CASES.items() for world in worlds]
)
def test_what_all_ranks_write_is_the_whole(
    name: str, fork_script: ScriptRunner, outcomes: dict[str, str], tmp_path: Path
) -> None:
    if not outcomes:
        fork_script(Path(__file__), tmp_path)
        for file in tmp_path.glob("outcomes-*.json"):
            outcomes.update(json.loads(file.read_text()))
    assert outcomes[name] == ""
