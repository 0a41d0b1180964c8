"""Cuts on disk: one that an earlier version wrote is read, and the same state is written with the same bytes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

from ckpt_async.consistent_cut import ConsistentCut, UpdateId, VectorClock
from ckpt_async.consistent_cut.messages import PushHeader
from ckpt_async.consistent_cut.types import MessageTag
from ckpt_async.parameter_server import CutStore
from ckpt_async.parameter_server.model import BlockTable
from ckpt_async.parameter_server.state import ServerState, pack_recorded

GOLDEN = Path(__file__).parent / "golden_cut"
NAME = "cut-000001-00000002"
SHARDS, WORKERS = ("s0", "s1"), ("w0", "w1")
CUT = ConsistentCut(2, 1, VectorClock({0: 3, 1: 2}), WORKERS, SHARDS)
PARAMETERS = {
    "table": torch.arange(40.0).reshape(10, 4),
    "bias": torch.tensor([0.5, -0.25], dtype=torch.float64),
    "scale": torch.tensor(2.0, dtype=torch.bfloat16),
}
TABLE = BlockTable(PARAMETERS.items(), max_block_bytes=48)


def state_of(shard: str) -> ServerState:
    values = TABLE.divide(PARAMETERS)
    blocks = {name: values[name] for name in TABLE.deal(SHARDS)[shard]}
    state = ServerState(blocks, lambda named: torch.optim.SGD(named, lr=0.5, momentum=0.5))
    state.apply(UpdateId(0, 1), {name: torch.ones_like(value) for name, value in blocks.items()})
    return state


def recorded() -> list[object]:
    sparse = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1, 4), (3, 4), check_invariants=True)
    return pack_recorded([(PushHeader(MessageTag(1, 1), UpdateId(1, 2), 2), {"table[0:3]": sparse})])


def write_cut(root: Path) -> Path:
    store = CutStore(root)
    store.reserve(1, 2)
    said: list[tuple[dict[str, torch.nn.Parameter], dict[str, object]]] = []
    for shard in SHARDS:
        state = state_of(shard)
        optimizer = state.state_dict()
        for group in optimizer["groups"]:
            group["options"] = {"lr": 0.5, "momentum": 0.5}  # the other options depend on torch's version
        own = {"blocks": TABLE.describe(), "optimizer": optimizer, "recorded": recorded(), "order": []}
        said.append((state.parameters, {"name": shard, "cut": CUT.vector.to_pairs(), **own}))
    for stream, worker in enumerate(WORKERS):
        buffers = {"mean": torch.full((2,), float(stream))}
        own = {"buffers": buffers, "aliases": {"tied": "bias"}, "objects": {"scaler": {"scale": 8.0}}}
        said.append(({}, {"name": worker, "cut": [[stream, CUT.vector[stream]]], **own}))
    reports = [
        store.write(1, 2, rank=rank, world_size=4, incarnation=0, table=TABLE, blocks=blocks, participant=participant)
        for rank, (blocks, participant) in enumerate(said)
    ]
    return Path(store.commit(CUT, reports)[0])


def contents(path: Path) -> dict[str, object]:
    found: dict[str, object] = {file: (path / file).read_bytes() for file in sorted(os.listdir(path))}
    manifest = json.loads(found.pop("manifest.json"))  # type: ignore[arg-type]
    del manifest["committed"], manifest["check"]  # the commit time, and the digest of the manifest
    return {**found, "manifest": manifest}


def test_the_same_state_is_written_with_the_same_bytes(tmp_path: Path) -> None:
    assert contents(write_cut(tmp_path)) == contents(GOLDEN / NAME)


def test_a_cut_of_an_earlier_version_is_read() -> None:
    store = CutStore(GOLDEN)
    assert [os.path.basename(path) for path in store.committed()] == [NAME]
    with store.open(f"{store.root}/{NAME}") as checkpoint:
        checkpoint.verify()
        assert checkpoint.cut == CUT
        model = checkpoint.model()
        for name, before in PARAMETERS.items():
            assert torch.equal(model[name], before - 0.5), name
        assert torch.equal(model["tied"], model["bias"])
        assert model["mean"].tolist() == [0.5, 0.5]
        assert checkpoint.worker("w1")["objects"] == {"scaler": {"scale": 8.0}}  # type: ignore[index]
        all_blocks = TABLE.divide({name: torch.zeros_like(value) for name, value in PARAMETERS.items()})
        state = ServerState(all_blocks, lambda named: torch.optim.SGD(named, lr=0.5, momentum=0.5))
        checkpoint.load_into(state, TABLE)  # a single shard loads what two have saved
    found = {name: parameter.detach() for name, parameter in state.parameters.items()}
    expected = TABLE.divide({name: value - 0.5 for name, value in PARAMETERS.items()})
    # Both shards have kept the recorded piece: two steps with a momentum that was 1.
    expected["table[0:3]"] -= 0.5 * (0.5 + 0.25)
    expected["table[0:3]"][1] -= 0.5 * (1 + 1.5)
    for name, value in expected.items():
        assert torch.allclose(found[name].double(), value.double()), name
