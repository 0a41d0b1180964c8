"""Sharded models: FSDP2 and FSDP1, on two processes and the CPU."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import accelerate
import pytest
from torch.distributed import checkpoint as dcp

from tests.attacks.test_pickles import Exploit
from tests.support.accelerate_ranks import Ranks

# On the CPU, Accelerate silently replaces FSDP by DDP. This is what it would set for a GPU.
PREPARED = """
    import functools
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType
    if alone:  # which Accelerate would make no process group for
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    accelerator = Accelerator(gradient_accumulation_steps=accumulation)
    state, options = accelerator.state, {"use_orig_params": True} if version == 1 else {}
    state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version, state_dict_type="SHARDED_STATE_DICT", auto_wrap_policy="size_based_wrap", min_num_params=50,
        cpu_ram_efficient_loading=False, **options
    )
    state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    state.device = PartialState._shared_state["device"] = torch.device("cpu")
    attach(accelerator, "sharded")
    torch.manual_seed(seed)
    norm = [nn.BatchNorm1d(63)] if normed else []
    model = nn.Sequential(nn.Linear(16, 63), nn.Dropout(0.2), *norm, nn.Linear(63, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    data = torch.utils.data.TensorDataset(torch.arange(512.0).reshape(32, 16) / 512)
    loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    torch.manual_seed(50 + rank)
    losses = []

    def train(steps, save_after=None):
        done = 0
        while done < steps:
            for (batch,) in loader:
                with accelerator.accumulate(model):
                    loss = model(batch).pow(2).mean()
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                losses.append(loss.item())
                done += 1
                if done == save_after:
                    accelerator.save_state(saved)
                if done == steps:
                    break

    def whole():
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
        options = StateDictOptions(full_state_dict=True)
        weights, moments = get_state_dict(model, optimizer.optimizer, options=options)
        return [
            {name: value.tolist() for name, value in sorted(weights.items())},
            {name: entry["exp_avg"].tolist() for name, entry in sorted(moments["state"].items())},
        ]
"""


#: Arguments of the script, except for its seed and where it saves.
NAMES: dict[str, Any] = {"version": 2, "accumulation": 1, "normed": False, "alone": False}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("version", [1, 2])
def test_a_sharded_run_goes_on_as_if_it_had_not_stopped(ranks: Ranks, tmp_path: Path, version: int) -> None:
    names = {**NAMES, "saved": str(tmp_path / "saved"), "version": version}
    ending = "    tell(losses=losses, lr=scheduler.get_last_lr())\n    accelerator.end_training()\n"
    whole = ranks.run(PREPARED + "    train(11, save_after=6)\n" + ending, 2, seed=0, **names)
    resumed = ranks.run(PREPARED + "    accelerator.load_state(saved)\n    train(5)\n" + ending, 2, seed=1, **names)
    for rank in range(2):
        assert whole[rank].error is None and resumed[rank].error is None
        assert resumed[rank].told["losses"] == whole[rank].told["losses"][6:]
        assert resumed[rank].told["lr"] == whole[rank].told["lr"]
    files = {path.name for path in (tmp_path / "saved").iterdir()}
    assert {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"} <= files


def test_a_second_optimizer_of_a_model_is_said_to_begin_anew(
    ranks: Ranks, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    both = PREPARED.replace(
        "torch.optim.AdamW(model.parameters(), lr=0.01)",
        "torch.optim.AdamW([one for one in model.parameters() if one.ndim > 1], lr=0.01)\n"
        "    biases = torch.optim.AdamW([one for one in model.parameters() if one.ndim == 1], lr=0.02)",
    )
    both = both.replace("prepare(model,", "prepare(model, biases,").replace("    model, opt", "    model, biases, opt")
    both = both.replace("optimizer.step()", "optimizer.step(), biases.step(), biases.zero_grad()")
    names = {**NAMES, "saved": str(tmp_path / "saved")}
    ranks.run(both + "    train(6, save_after=6)\n    accelerator.end_training()\n", 2, seed=0, **names)
    resumed = ranks.run(
        both + "    accelerator.load_state(saved)\n    accelerator.end_training()\n", 2, seed=1, **names
    )
    assert [rank.error for rank in resumed] == [None, None]
    output = "".join(capfd.readouterr())
    assert "not guaranteed to be exact: under FSDP, one optimizer for each model is saved" in output, output


@pytest.mark.sampled(1)
@pytest.mark.parametrize("version", [1, 2])
def test_each_rank_has_its_own_statistics_again(ranks: Ranks, tmp_path: Path, version: int) -> None:
    names = {**NAMES, "saved": str(tmp_path / "saved"), "version": version}
    telling = (
        "    tell(means=[mean.tolist() for name, mean in model.named_buffers() if name.endswith('running_mean')])\n"
    )
    ending = "    accelerator.end_training()\n"
    saved = ranks.run(
        PREPARED + "    train(3, save_after=3)\n" + telling + ending, 2, seed=0, **{**names, "normed": True}
    )
    loading = PREPARED + "    accelerator.load_state(saved)\n" + telling + ending
    loaded = ranks.run(loading, 2, seed=1, **{**names, "normed": True})
    for before, after in zip(saved, loaded, strict=True):
        assert before.error is None and after.error is None
        assert after.told["means"] == before.told["means"]
    assert saved[0].told["means"] != saved[1].told["means"]


def test_another_number_of_ranks_loads_the_same_state(ranks: Ranks, tmp_path: Path) -> None:
    names = {**NAMES, "saved": str(tmp_path / "saved")}
    saving = "    train(6, save_after=6)\n    tell(whole=whole())\n    accelerator.end_training()\n"
    loading = (
        "    accelerator.load_state(saved)\n    tell(whole=whole())\n    train(2)\n    accelerator.end_training()\n"
    )
    saved = ranks.run(PREPARED + saving, 2, seed=0, **names)
    for world_size in (1, 3):
        loaded = ranks.run(PREPARED + loading, world_size, seed=1, **{**names, "alone": world_size == 1})
        assert [result.error for result in loaded] == [None] * world_size
        assert loaded[0].told["whole"] == saved[0].told["whole"]


def test_a_checkpoint_of_stock_accelerate_is_loaded(ranks: Ranks, tmp_path: Path) -> None:
    names = {**NAMES, "saved": str(tmp_path / "saved")}
    stock = "    train(3)\n    Accelerator.save_state.__wrapped__(accelerator, saved)\n    tell(whole=whole())\n"
    saved = ranks.run(PREPARED + stock, 2, seed=0, **names)
    loaded, by_stock = (
        ranks.run(f"{PREPARED}    {load}({of}saved)\n    tell(whole=whole())\n", 2, seed=1, **names)
        for load, of in (("accelerator.load_state", ""), ("Accelerator.load_state.__wrapped__", "accelerator, "))
    )
    assert (tmp_path / "saved" / "pytorch_model_fsdp_0").is_dir()
    assert [result.error for result in loaded] == [None, None]
    assert loaded[0].told["whole"] == by_stock[0].told["whole"]
    if not accelerate.__version__.startswith("1.10."):  # which does not restore the optimizer itself
        assert loaded[0].told["whole"] == saved[0].told["whole"]


@pytest.mark.parametrize("where", ["metadata", "object"])
def test_no_code_runs_from_a_checkpoint_of_stock_accelerate(ranks: Ranks, tmp_path: Path, where: str) -> None:
    marker, saved = tmp_path / "marker", tmp_path / "saved"
    names = {**NAMES, "alone": True, "saved": str(saved)}
    ranks.run(
        PREPARED + "    train(3)\n    Accelerator.save_state.__wrapped__(accelerator, saved)\n", 1, seed=0, **names
    )
    folder = saved / "optimizer_0"
    evil = Exploit(marker, "os.system")
    if where == "metadata":
        (folder / ".metadata").write_bytes(pickle.dumps(evil))
    else:
        dcp.save({"optimizer": {"param_groups": evil}}, checkpoint_id=folder, no_dist=True)
    loading = "    before = whole()\n    try:\n        accelerator.load_state(saved)\n    finally:\n"
    (result,) = ranks.run(f"{PREPARED}{loading}        tell(same=whole() == before)\n", 1, seed=1, **names)
    assert result.error == "UnsafeCheckpointError"
    assert result.told["same"]
    assert not marker.exists()


def test_a_save_inside_a_window_waits_for_its_end(ranks: Ranks, tmp_path: Path) -> None:
    names = {**NAMES, "saved": str(tmp_path / "saved"), "accumulation": 4}
    saving = "    train(8, save_after=2)\n    tell(losses=losses)\n    accelerator.end_training()\n"
    loading = (
        "    accelerator.load_state(saved)\n    train(4)\n    tell(losses=losses)\n    accelerator.end_training()\n"
    )
    whole = ranks.run(PREPARED + saving, 2, seed=0, **names)
    resumed = ranks.run(PREPARED + loading, 2, seed=1, **names)
    for rank in range(2):
        assert resumed[rank].error is None
        assert resumed[rank].told["losses"] == whole[rank].told["losses"][4:]


def test_another_model_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    names = {**NAMES, "saved": str(tmp_path / "saved")}
    ranks.run(PREPARED + "    train(2, save_after=2)\n    accelerator.end_training()\n", 2, seed=0, **names)
    other = PREPARED.replace(
        "nn.Linear(16, 63), nn.Dropout(0.2), *norm, nn.Linear(63, 1)", "nn.Linear(16, 62), nn.Linear(62, 1)"
    )
    results = ranks.run(other + "    accelerator.load_state(saved)\n", 2, seed=0, **names)
    assert [result.error for result in results] == ["StateMismatchError", "StateMismatchError"]
    assert "2.weight" in results[0].message
