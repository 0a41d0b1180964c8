"""A shard's state: every optimizer, blocks, and a copy that stays what it was while the live state changes."""

from __future__ import annotations

import pytest
import torch

from ckpt_async.consistent_cut import UpdateId
from ckpt_async.consistent_cut.messages import PushHeader
from ckpt_async.consistent_cut.types import MessageTag
from ckpt_async.parameter_server.model import BlockTable
from ckpt_async.parameter_server.state import MakeOptimizer, ServerState, pack_recorded
from ckpt_core.errors import StateMismatchError

UPDATE = UpdateId(0, 1)
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1, amsgrad=True),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, lr=0.1),
    "RAdam": lambda parameters: torch.optim.RAdam(parameters, lr=0.1),
    "Adamax": lambda parameters: torch.optim.Adamax(parameters, lr=0.1),
    "Adadelta": torch.optim.Adadelta,
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.1),
    "ASGD": lambda parameters: torch.optim.ASGD(parameters, lr=0.1),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.1, momentum=0.5, centered=True),
    "Rprop": lambda parameters: torch.optim.Rprop(parameters, lr=0.1),
}
BLOCKS = {"weight": torch.randn(4, 3), "bias": torch.randn(4), "other": torch.randn(2, 2)}


def gradients(seed: int, *names: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(BLOCKS[name].shape, generator=generator) for name in names or BLOCKS}


def contents(state: ServerState) -> dict[str, torch.Tensor]:
    found = {name: tensor.detach().clone() for name, tensor in state.parameters.items()}
    for name in BLOCKS:
        for key, value in state.optimizer_state(name).items():
            found[f"{name}.{key}"] = torch.as_tensor(value).clone()
    return found


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_copy_stays_and_takes_what_was_under_way(make: MakeOptimizer) -> None:
    live, twin = ServerState(BLOCKS, make), ServerState(BLOCKS, make)
    for state in (live, twin):
        state.apply(UPDATE, gradients(1))
        state.apply(UPDATE, gradients(2, "weight"))
    shadow = live.copy()
    before = contents(twin)
    assert live.copy_a_block()
    live.apply(UPDATE, gradients(3, "bias"))  # an update from after the cut
    live.apply(UPDATE, gradients(4))
    while live.copy_a_block():
        pass
    assert_same(contents(shadow), before)
    shadow.apply(UPDATE, gradients(5))  # a late update from before the cut
    twin.apply(UPDATE, gradients(5))
    assert_same(contents(shadow), contents(twin))
    after = contents(live)
    live.release(shadow)
    assert_same(contents(live), after)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_blocks_dealt_anew_go_on_as_if_nothing_had_happened(make: MakeOptimizer) -> None:
    whole = ServerState(BLOCKS, make)
    whole.apply(UPDATE, gradients(1))
    parts = [
        ServerState({name: tensor for name, tensor in whole.parameters.items() if name in here}, make)
        for here in (("weight",), ("bias", "other"))
    ]
    for part in parts:
        part.load_optimizer(whole.state_dict())
        part.apply(UPDATE, {name: grad for name, grad in gradients(2).items() if name in part.parameters})
    whole.apply(UPDATE, gradients(2))
    again = ServerState({name: tensor for part in parts for name, tensor in part.parameters.items()}, make)
    for part in parts:
        again.load_optimizer(part.state_dict())
    again.apply(UPDATE, gradients(3))
    whole.apply(UPDATE, gradients(3))
    assert_same(contents(again), contents(whole))


def test_changed_options_of_the_optimizer_are_saved() -> None:
    state = ServerState(BLOCKS, OPTIMIZERS["SGD"])
    state.groups[0]["lr"] = 0.25
    loaded = ServerState(BLOCKS, OPTIMIZERS["SGD"])
    loaded.load_optimizer(state.copy().state_dict())
    assert loaded.groups[0]["lr"] == 0.25


def test_the_memory_of_a_copy_is_used_again() -> None:
    live = ServerState(BLOCKS, OPTIMIZERS["Adam"])
    live.apply(UPDATE, gradients(1))

    def addresses() -> list[int]:
        shadow = live.copy()
        while live.copy_a_block():
            pass
        found = [tensor.data_ptr() for tensor in shadow.parameters.values()]
        found += [shadow.optimizer_state(name)["exp_avg"].data_ptr() for name in BLOCKS]
        live.release(shadow)
        return found

    first = addresses()
    live.apply(UPDATE, gradients(2))
    assert addresses() == first


def test_two_copies_at_a_time_do_not_share_memory() -> None:
    live = ServerState(BLOCKS, OPTIMIZERS["SGD"])
    first = live.copy()
    first.save_blocks(BLOCKS)
    live.apply(UPDATE, gradients(1))
    second = live.copy()
    second.save_blocks(BLOCKS)
    assert not torch.equal(first.parameters["bias"], second.parameters["bias"])


def test_sparse_gradients_touch_the_rows_they_name() -> None:
    state = ServerState(
        {"table": torch.zeros(5, 2)},
        lambda parameters: torch.optim.SparseAdam([parameter for _, parameter in parameters], lr=1.0),
    )
    sparse = torch.sparse_coo_tensor(torch.tensor([[1, 3]]), torch.ones(2, 2), (5, 2), check_invariants=True)
    state.apply(UPDATE, {"table": sparse})
    changed = (state.parameters["table"] != 0).any(dim=1)
    assert changed.tolist() == [False, True, False, True, False]


@pytest.mark.parametrize(
    "wrong", [{"nothing": torch.zeros(1)}, {"bias": torch.zeros(5)}, {"bias": torch.zeros(4).double()}]
)
def test_a_gradient_that_does_not_fit_changes_nothing(wrong: dict[str, torch.Tensor]) -> None:
    state = ServerState(BLOCKS, OPTIMIZERS["SGD"])
    before = contents(state)
    with pytest.raises(StateMismatchError, match=next(iter(wrong))):
        state.apply(UPDATE, {**gradients(1, "weight"), **wrong})
    assert_same(contents(state), before)


def test_recorded_pieces_are_applied_after_loading() -> None:
    saved, expected = ServerState(BLOCKS, OPTIMIZERS["Adam"]), ServerState(BLOCKS, OPTIMIZERS["Adam"])
    header = PushHeader(MessageTag(0, 0), UPDATE, 1)
    sparse = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1, 3), (4, 3), check_invariants=True)
    packed = pack_recorded([(header, gradients(1)), (header, gradients(2, "bias"))])
    saved.apply_recorded(packed)
    expected.apply(UPDATE, gradients(1))
    expected.apply(UPDATE, gradients(2, "bias"))
    assert_same(contents(saved), contents(expected))
    plain = ServerState({"weight": torch.zeros(4, 3)}, lambda parameters: torch.optim.SGD(parameters, lr=1.0))
    plain.apply_recorded(pack_recorded([(header, {"weight": sparse, "of another shard": torch.ones(1)})]))
    assert plain.parameters["weight"].sum() == -3.0


# ---- blocks ----------------------------------------------------------------------------------------------------------


def table(max_block_bytes: int | None = None) -> BlockTable:
    parameters = {"large": torch.zeros(10, 4), "small": torch.zeros(3), "scalar": torch.zeros(())}
    return BlockTable(parameters.items(), max_block_bytes=max_block_bytes)


def test_large_parameters_are_divided_by_rows() -> None:
    assert list(table().blocks) == ["large", "small", "scalar"]
    divided = table(64)
    assert list(divided.blocks) == ["large[0:4]", "large[4:8]", "large[8:10]", "small", "scalar"]
    assert sum(block.nbytes for block in divided.blocks.values()) == 160 + 12 + 4
    assert list(table(1).blocks)[:2] == ["large[0:1]", "large[1:2]"]


@pytest.mark.parametrize("shards", [1, 2, 3, 7])
def test_every_block_is_dealt_to_one_shard_evenly(shards: int) -> None:
    divided = table(64)
    dealt = divided.deal([f"shard-{number}" for number in range(shards)])
    assert sorted(name for names in dealt.values() for name in names) == sorted(divided.blocks)
    load = [sum(divided.blocks[name].nbytes for name in names) for names in dealt.values()]
    assert max(load) <= 176 // shards + 64


def test_dense_and_sparse_gradients_are_divided_alike() -> None:
    dense = torch.zeros(10, 4)
    dense[1], dense[9] = 1.0, 2.0
    divided = table(64)
    sparse = divided.divide({"large": dense.to_sparse(1)})
    assert list(sparse) == ["large[0:4]", "large[8:10]"], "nothing to send for the rows in between"
    whole = divided.divide({"large": dense})
    for name, part in sparse.items():
        assert torch.equal(part.to_dense(), whole[name])
