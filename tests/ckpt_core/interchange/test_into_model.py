"""Loading into a model that differs from the one that was saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from ckpt_core import Checkpointer, DirectoryCheckpointer, Kind, Part, load_into
from ckpt_core.errors import CheckpointCorruptedError, CheckpointFormatError, StateMismatchError
from tests.conftest import ScriptRunner
from tests.support.damage import flip_bit

LAYOUTS = ["file", "stock file", "bare file", "directory", "trainer directory"]


class Net(torch.nn.Module):
    def __init__(self, *names: str, classes: int = 3) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, torch.nn.Linear(4, classes if name == "head" else 4))
        self.norm = torch.nn.BatchNorm1d(4)


def trained(*names: str, groups: bool = False) -> tuple[Net, torch.optim.Adam]:
    torch.manual_seed(1)
    model = Net(*names)
    optimizer = adam(model, groups=groups)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    model.norm.running_mean.normal_()
    return model, optimizer


def adam(model: torch.nn.Module, *, groups: bool = False) -> torch.optim.Adam:
    if not groups:
        return torch.optim.Adam(model.parameters(), lr=0.5)
    named = list(model.named_parameters())
    decay = [p for name, p in named if p.ndim > 1]
    return torch.optim.Adam([{"params": [p for name, p in named if p.ndim < 2]}, {"params": decay}], lr=0.5)


def saved(path: Path, layout: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Path:
    state: dict[str, Any] = {
        "state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()], "global_step": 5
    }  # fmt: skip
    file = path / "old.ckpt"
    if layout == "file":
        Checkpointer(strategy="sync").save(state, file)
    elif layout == "stock file":
        torch.save({"model": state["state_dict"], "optimizer": optimizer.state_dict()}, file)
    elif layout == "bare file":
        torch.save(model.state_dict(), file)
    elif layout == "directory":
        parts = [
            Part("model", model.state_dict(), Kind.REPLICATED),
            Part("optimizer", optimizer.state_dict(), Kind.REPLICATED),
        ]
        DirectoryCheckpointer(strategy="sync").save(parts, file)
    else:
        from ckpt_core.interchange import convert_to_directory

        Checkpointer(strategy="sync").save(state, path / "file.ckpt")
        convert_to_directory(path / "file.ckpt", file)
    return file


@pytest.mark.parametrize("layout", LAYOUTS)
def test_renamed_added_and_dropped_names_and_other_shapes(tmp_path: Path, layout: str) -> None:
    old, optimizer = trained("body", "gone", "head")
    path = saved(tmp_path, layout, old, optimizer)
    new = Net("encoder", "added", "head", classes=7)
    before = {name: value.clone() for name, value in new.state_dict().items()}
    report = load_into(path, new, rename={"body": "encoder"}, partial=True)
    norm = tuple(f"norm.{name}" for name in old.norm.state_dict())
    assert set(report.taken) == {"encoder.weight", "encoder.bias", *norm}
    assert set(report.new) == {"added.weight", "added.bias", "head.weight", "head.bias"}
    assert report.skipped == {
        "gone.weight": "not here",
        "gone.bias": "not here",
        "head.weight": "shape [3, 4] there and [7, 4] here",
        "head.bias": "shape [3] there and [7] here",
    }
    assert not report.is_complete and "took 7 tensors" in str(report) and "4 skipped" in str(report)
    after = new.state_dict()
    assert torch.equal(after["encoder.weight"], old.body.weight)  # type: ignore[arg-type, union-attr]
    assert torch.equal(after["norm.running_mean"], old.norm.running_mean)  # type: ignore[arg-type]
    assert all(torch.equal(after[name], before[name]) for name in report.new)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("names", "settings", "says"),
    [
        (("body", "head", "added"), {}, "added.weight is not in the checkpoint"),
        (("body",), {}, "head.weight is in the checkpoint and not here"),
        (("body", "head"), {"classes": 7}, "shape [3, 4] there and [7, 4] here"),
    ],
)
def test_without_partial_it_is_all_or_nothing(
    tmp_path: Path, layout: str, names: tuple[str, ...], settings: dict[str, int], says: str
) -> None:
    path = saved(tmp_path, layout, *trained("body", "head"))
    model = Net(*names, **settings)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(StateMismatchError) as refused:
        load_into(path, model)
    assert says in str(refused.value)
    assert "shape" not in says or "head.weight is not in" not in str(refused.value)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    if not settings:  # without strict, names may differ, but shapes may not
        assert load_into(path, model, strict=False).taken
    else:
        with pytest.raises(StateMismatchError):
            load_into(path, model, strict=False)


@pytest.mark.parametrize("layout", ["file", "directory", "stock file", "trainer directory"])
@pytest.mark.parametrize("groups", [False, True])
def test_optimizer_state_goes_to_the_parameters_it_is_of(tmp_path: Path, layout: str, groups: bool) -> None:
    old, optimizer = trained("body", "head", groups=groups)
    path = saved(tmp_path, layout, old, optimizer)
    model = Net("first", "encoder", "head", classes=7)
    mine = adam(model, groups=groups)
    mine.param_groups[0]["lr"] = 0.125
    report = load_into(path, model, optimizers=mine, rename={"body": "encoder"}, partial=True)
    assert set(report.optimizer_taken) == {"encoder.weight", "encoder.bias", "norm.weight", "norm.bias"}
    assert set(report.optimizer_skipped) == {"first.weight", "first.bias", "head.weight", "head.bias"}
    assert mine.param_groups[0]["lr"] == 0.125
    for here, there in ((model.encoder, old.body), (model.norm, old.norm)):
        for name in ("weight", "bias"):
            found, wanted = mine.state[getattr(here, name)], optimizer.state[getattr(there, name)]
            assert torch.equal(found["exp_avg"], wanted["exp_avg"]) and found["step"] == 1
    assert model.head.weight not in mine.state  # type: ignore[union-attr]


def test_optimizer_state_whose_owner_is_uncertain_is_left(tmp_path: Path) -> None:
    old, _ = trained("a", "b", "gone")
    reordered = torch.optim.Adam([{"params": old.b.parameters()}, {"params": old.a.parameters()}])  # type: ignore[union-attr]
    for parameter in old.parameters():
        parameter.grad = torch.ones_like(parameter)
    reordered.step()
    path = saved(tmp_path, "file", old, reordered)
    model = Net("a", "b")
    mine = adam(model)
    report = load_into(path, model, optimizers=mine, partial=True)
    assert report.optimizer_taken == () and not mine.state
    assert report.optimizer_skipped == {"optimizer": "it is not certain which state belongs to which parameter"}
    # with the parameters' names, it is certain
    named = torch.optim.Adam([{"params": list(old.b.named_parameters("b"))}])  # type: ignore[union-attr]
    named.step()
    path = saved(tmp_path, "file", old, named)
    report = load_into(path, model, optimizers=mine, partial=True)
    if hasattr(named, "param_groups") and "param_names" in named.param_groups[0]:
        assert set(report.optimizer_taken) == {"b.weight", "b.bias"}
        assert torch.equal(mine.state[model.b.bias]["exp_avg"], named.state[old.b.bias]["exp_avg"])  # type: ignore[union-attr]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_another_type_is_converted_and_said(tmp_path: Path, layout: str) -> None:
    old, optimizer = trained("body")
    path = saved(tmp_path, layout, old, optimizer)
    model = Net("body").to(torch.bfloat16)
    report = load_into(path, model)
    assert report.converted["body.weight"] == "float32 to bfloat16" and "norm.num_batches_tracked" in report.taken
    assert torch.equal(model.body.weight, old.body.weight.to(torch.bfloat16))  # type: ignore[union-attr, operator]


def test_a_prefix_is_found_and_said(tmp_path: Path) -> None:
    old, _ = trained("body")
    torch.save({"state_dict": {f"model.{name}": value for name, value in old.state_dict().items()}}, tmp_path / "a")
    with pytest.raises(StateMismatchError, match=r"rename=\{'model\.': ''\}"):
        load_into(tmp_path / "a", Net("body"))
    assert load_into(tmp_path / "a", Net("body"), rename={"model.": ""}).is_complete
    wrapped = torch.nn.ModuleDict({"module": Net("body")})
    torch.save(old.state_dict(), tmp_path / "b")
    with pytest.raises(StateMismatchError, match=r"rename=\{'': 'module\.'\}"):
        load_into(tmp_path / "b", wrapped, partial=True)
    assert load_into(tmp_path / "b", wrapped, rename={"": "module."}).is_complete
    both = torch.nn.ModuleDict({"module": torch.nn.ModuleDict({"_orig_mod": Net("body")})})
    torch.save(both.state_dict(), tmp_path / "c")
    with pytest.raises(StateMismatchError, match=r"rename=\{'module\._orig_mod\.': ''\}"):
        load_into(tmp_path / "c", Net("body"))
    assert load_into(tmp_path / "c", Net("body"), rename={"module._orig_mod.": ""}).is_complete
    with pytest.raises(StateMismatchError, match="to two tensors"):
        load_into(tmp_path / "b", Net("body"), rename=lambda name: "body.weight")


def test_models_in_safetensors_tied_weights_and_nested_parts(tmp_path: Path) -> None:
    old, _ = trained("body")
    safetensors.torch.save_file(old.state_dict(), tmp_path / "model.safetensors")
    for path in (tmp_path, tmp_path / "model.safetensors"):
        assert load_into(path, Net("body")).is_complete
    tied = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})
    tied["b"].weight = tied["a"].weight
    torch.save(
        {"ema": {"a.weight": torch.ones(2, 2), "a.bias": torch.zeros(2), "b.bias": torch.ones(2)}}, tmp_path / "t"
    )
    report = load_into(tmp_path / "t", tied, part="ema")
    assert report.is_complete and torch.equal(tied["b"].weight, torch.ones(2, 2))
    with pytest.raises(CheckpointFormatError, match="there is: ema"):
        load_into(tmp_path / "t", tied)


def test_what_is_damaged_is_not_loaded(tmp_path: Path) -> None:
    path = saved(tmp_path, "file", *trained("body"))
    flip_bit(path, 200)
    with pytest.raises(CheckpointCorruptedError):
        load_into(path, Net("body"), partial=True)


SHARDED = """
import os, sys, traceback, torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from ckpt_core import load_into

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.added = torch.nn.Linear(5, 5)
        self.encoder = torch.nn.Linear(5, 7)

def work(rank, world):
    dist.init_process_group("gloo", store=dist.FileStore("store", world), rank=rank, world_size=world)
    expected = torch.load("expected.pt")
    for path in ("old.ckpt", "old"):
        model = Net()
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
        optimizer = torch.optim.Adam(model.parameters())
        report = load_into(path, model, optimizers=optimizer, rename={"body": "encoder"}, partial=True)
        assert set(report.taken) == {"encoder.weight", "encoder.bias"} == set(report.optimizer_taken), report
        for name in ("weight", "bias"):
            parameter = getattr(model.encoder, name)
            assert isinstance(parameter, DTensor)
            assert torch.equal(parameter.full_tensor(), expected[name])
            moment = optimizer.state[parameter]["exp_avg"]
            assert isinstance(moment, DTensor) and torch.equal(moment.full_tensor(), expected["exp_avg." + name])
    dist.destroy_process_group()

pids = []
for rank in range(2):
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work(rank, 2)
            status = 0
        except BaseException:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(status)
    pids.append(pid)
assert not any([os.waitpid(pid, 0)[1] for pid in pids])
print("ok")
"""


def test_each_rank_of_a_sharded_model_takes_its_pieces(tmp_path: Path, fork_script: ScriptRunner) -> None:
    torch.manual_seed(1)
    old = torch.nn.ModuleDict({"body": torch.nn.Linear(5, 7)})
    optimizer = torch.optim.Adam(old.parameters())
    old["body"](torch.randn(2, 5)).pow(2).sum().backward()
    optimizer.step()
    expected = {"weight": old["body"].weight.detach(), "bias": old["body"].bias.detach()}
    moments = {f"exp_avg.{name}": optimizer.state[getattr(old["body"], name)]["exp_avg"] for name in expected}
    torch.save({**expected, **moments}, tmp_path / "expected.pt")
    saved(tmp_path, "file", old, optimizer)
    parts = [
        Part("model", old.state_dict(), Kind.REPLICATED),
        Part("optimizer", optimizer.state_dict(), Kind.REPLICATED),
    ]
    DirectoryCheckpointer(strategy="sync").save(parts, tmp_path / "old")
    assert fork_script(SHARDED).stdout == "ok\n"


def test_adapters_alone_are_loaded_into_a_model_that_has_some(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def adapted() -> Any:
        torch.manual_seed(0)
        return peft.get_peft_model(Net("body", "head"), peft.LoraConfig(target_modules=["body"], r=2))

    old = adapted()
    for name, parameter in old.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter)
    wanted = peft.get_peft_model_state_dict(old)
    Checkpointer(strategy="sync").save({"model": wanted}, tmp_path / "adapters.ckpt")
    old.save_pretrained(tmp_path / "hub")
    hub = tmp_path / "hub"
    for path in (tmp_path / "adapters.ckpt", hub / "adapter_model.safetensors", hub):
        model = adapted()
        report = load_into(path, model, strict=False)
        assert len(report.taken) == 2 and not report.skipped
        found = peft.get_peft_model_state_dict(model)
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
