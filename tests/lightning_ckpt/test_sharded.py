"""Sharded saves of the Trainer on real gloo ranks: resumed at the same number of ranks and at others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core import DirectoryCheckpointer
from ckpt_core.cli import main
from tests.lightning_ckpt.features import SAVES_LAST_AT_EPOCH_END, needs_weight_averaging
from tests.lightning_ckpt.sharded_runs import Runs, assert_same_tensors, parts_at
from tests.lightning_ckpt.signal_ranks import Job
from tests.support.damage import flip_bit

KINDS = ("ddp", "mp", "fsdp")
EVERY = {"every_n_train_steps": 3, "save_top_k": -1, "save_last": True}
LAST_BEFORE_9 = 8 if SAVES_LAST_AT_EPOCH_END else 6  # an epoch has 8 steps


def tail(results: list[Any], since: int) -> list[Any]:
    return [[result["losses"][since:], result["seen"][since:], result["weights"], result["step"]] for result in results]


@pytest.mark.extended_cells("ddp", "mp")
@pytest.mark.parametrize("kind", KINDS)
def test_killed_run_goes_on_bit_for_bit(runs: Runs, tmp_path: Path, kind: str) -> None:
    whole = runs.run(tmp_path / "whole", "whole", kind=kind, trainer={"max_steps": 12}, callback=EVERY)
    killed = runs.run(
        tmp_path / "killed",
        "killed",
        fails=True,
        kind=kind,
        trainer={"max_steps": 12},
        callback=EVERY,
        fault={"rank": None, "save": "step=9", "act": "kill"},
    )
    assert killed == [None, None]
    assert not (tmp_path / "killed" / "epoch=1-step=9.ckpt").exists()
    found = runs.run(
        tmp_path / "killed",
        "resumed",
        kind=kind,
        trainer={"max_steps": 12},
        callback=EVERY,
        seed=7,
        ckpt_path="last",
    )
    for result in found:
        assert result["warnings"] == [] and result["pending"] == []
        assert len(result["losses"]) == 12 - LAST_BEFORE_9
    assert tail(found, 0) == tail(whole, LAST_BEFORE_9)
    assert {"last.ckpt", "epoch=0-step=6.ckpt", "epoch=1-step=9.ckpt"} <= set(found[0]["files"])
    assert_same_tensors(parts_at(tmp_path / "whole" / "last.ckpt"), parts_at(tmp_path / "killed" / "last.ckpt"))


def test_rank_that_dies_in_a_save_leaves_the_last_checkpoint(runs: Runs, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    fault = {"rank": 1, "save": "step=9", "act": "kill"}
    results = runs.run(directory, "killed", fails=True, trainer={"max_steps": 12}, callback=EVERY, fault=fault)
    assert results[1] is None
    assert results[0] is None or results[0]["raised"]
    assert not (directory / "epoch=1-step=9.ckpt").exists()
    found = runs.run(directory, "resumed", trainer={"max_steps": 9}, callback=EVERY, ckpt_path="last")
    assert [len(result["losses"]) for result in found] == [9 - LAST_BEFORE_9] * 2
    assert not [name for name in found[0]["files"] if name.endswith(".ckpt-part")]


@pytest.mark.extended_cells("ddp", "mp")
@pytest.mark.parametrize("kind", KINDS)
def test_other_numbers_of_ranks_load_the_same_values(runs: Runs, tmp_path: Path, kind: str) -> None:
    first = tmp_path / "2"
    callback = {"every_n_train_steps": 5, "save_top_k": -1, "filename": "{step}"}
    runs.run(first, "first", kind=kind, trainer={"max_steps": 5}, callback=callback)
    saved = first / "step=5.ckpt"
    expected = parts_at(saved)
    # FSDP1 with one rank does not shard, and Lightning then uses other names
    for ranks in (3,) if kind == "fsdp" else (1, 3):
        directory = tmp_path / str(ranks)
        runs.run(
            directory,
            "again",
            ranks=ranks,
            kind=kind,
            trainer={"max_steps": 6},
            ckpt_path=str(saved),
            after=["again"],
            seed=9,
        )
        assert_same_tensors(parts_at(directory / "again.ckpt"), expected)


@pytest.mark.parametrize("kind", ["mp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_a_run_resumes_from_what_lightnings_own_strategy_has_saved(runs: Runs, tmp_path: Path, kind: str) -> None:
    callback = {"every_n_train_steps": 3, "save_top_k": -1, "filename": "{step}"}
    whole = runs.run(tmp_path / "whole", "whole", kind=kind, trainer={"max_steps": 5}, callback=callback)
    settings: dict[str, Any] = {"kind": kind, "callback": callback}
    runs.run(tmp_path / "stock", "stock", plugin=None, trainer={"max_steps": 3}, **settings)
    stock = tmp_path / "stock" / "step=3.ckpt"
    assert (stock / "meta.pt").exists()
    found = runs.run(tmp_path / "run", "run", trainer={"max_steps": 5}, ckpt_path=str(stock), **settings)
    assert [result["weights"] for result in found] == [result["weights"] for result in whole]
    # a single file is refused, and the error says what to do instead
    one = str(tmp_path / "one.ckpt")
    assert main(["convert", str(tmp_path / "whole" / "step=3.ckpt"), one, "--to", "file"]) == 0
    refused = runs.run(tmp_path / "no", "no", fails=True, trainer={"max_steps": 5}, ckpt_path=one, **settings)
    assert {result["raised"]["class"] for result in refused} == {"CheckpointFormatError"}
    assert all("WarmStart(path, optimizers=True)" in result["raised"]["message"] for result in refused)
    # the file has all weights under their names, for load_from_checkpoint
    weights = torch.load(one, weights_only=True)["state_dict"]
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == {
        "net.0.weight": (15, 8),
        "net.0.bias": (15,),
        "net.3.weight": (3 if kind == "mp" else 8, 15),
    }


@pytest.mark.extended_cells("mp")
@pytest.mark.parametrize("kind", ["ddp", "mp"])
def test_best_last_top_k_and_saves_after_fit(runs: Runs, tmp_path: Path, kind: str) -> None:
    directory = tmp_path / "run"
    best = {"every_n_train_steps": 2, "monitor": "loss", "mode": "min", "save_top_k": 2, "save_last": True}
    # after a validation at the end of a fit, torch cannot read the weights of FSDP2 that Lightning has moved to the CPU
    after = ["save", "validate", "test", *(["val"] if kind == "ddp" else [])]
    found = runs.run(directory, "first", kind=kind, trainer={"max_steps": 8}, callback=best, after=after)
    kept = [name for name in found[0]["files"] if name.startswith("epoch=")]
    assert len(kept) == 2 and {"after.ckpt", "last.ckpt"} <= set(found[0]["files"])
    for result in found:
        assert result["validate"]["path"] == result["test"]["path"]
        assert Path(result["test"]["path"]).name in kept
        assert result["validate"]["val_loss"] == pytest.approx(result["test"]["val_loss"])
    assert_same_tensors(parts_at(directory / "after.ckpt"), parts_at(directory / "last.ckpt"))


@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing", "swapped", "manifest"])
def test_damaged_checkpoint_is_passed_over(tmp_path: Path, damage: str, trained: Path) -> None:
    from lightning_ckpt import ResumableCheckpoint

    directory = tmp_path / "run"
    shutil.copytree(trained, directory)
    newest, older = directory / "step=6.ckpt", directory / "step=3.ckpt"
    shard = next(newest.glob("model-00002*.safetensors"))
    if damage == "flipped":
        flip_bit(shard, -5)
    elif damage == "truncated":
        shard.write_bytes(shard.read_bytes()[:-8])
    elif damage == "missing":
        shard.unlink()
    elif damage == "swapped":
        shutil.copy(older / shard.name, shard)
    else:
        (newest / "manifest.json").write_bytes((newest / "manifest.json").read_bytes()[:-30])
    callback = ResumableCheckpoint(dirpath=directory)
    assert callback._lookup.newest_verified(str(directory)).path == str(older)


@pytest.fixture(scope="module")
def trained(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a run with checkpoints of steps 3 and 6."""
    directory = tmp_path_factory.mktemp("trained") / "run"
    callback = {"every_n_train_steps": 3, "save_top_k": -1, "filename": "{step}"}
    runs.run(directory, "trained", trainer={"max_steps": 6}, callback=callback)
    return directory


def test_resume_walks_back_over_a_damaged_shard(runs: Runs, tmp_path: Path, trained: Path) -> None:
    directory = tmp_path / "run"
    shutil.copytree(trained, directory)
    shard = next((directory / "step=6.ckpt").glob("model-00002*.safetensors"))
    shard.write_bytes(bytes(len(shard.read_bytes())))
    found = runs.run(directory, "resumed", trainer={"max_steps": 6}, callback={}, ckpt_path="last")
    assert [len(result["losses"]) for result in found] == [3, 3]


@pytest.mark.sampled(1)
@pytest.mark.extended_cells("fsdp-raise")
@pytest.mark.parametrize(("kind", "on_error"), [("ddp", "raise"), ("mp", "warn"), ("fsdp", "raise")])
def test_failure_on_one_rank_is_one_on_all(runs: Runs, tmp_path: Path, kind: str, on_error: str) -> None:
    directory = tmp_path / "run"
    callback = {"every_n_train_steps": 3, "save_top_k": -1, "filename": "{step}"}
    found = runs.run(
        directory,
        "failed",
        fails=True,
        kind=kind,
        trainer={"max_steps": 12},
        callback=callback,
        plugin={"on_error": on_error},
        fault={"rank": 1, "save": "step=6", "act": "fail"},
    )
    assert found[0]["step"] == found[1]["step"]
    assert "step=6.ckpt" not in found[0]["files"] and "step=3.ckpt" in found[0]["files"]
    assert not [name for name in found[0]["files"] if name.endswith(".ckpt-part")]
    if on_error == "warn":
        assert [result["raised"] for result in found] == [None, None]
        assert "step=12.ckpt" in found[0]["files"]
    else:
        assert found[0]["step"] < 12
        assert {result["raised"]["class"] for result in found} <= {"StorageError", "RankFailedError"}
        assert "No space left" in found[1]["raised"]["message"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_cannot_save_does_not_leave_the_other_waiting(
    runs: Runs, tmp_path: Path, mode: str, rank: int
) -> None:
    log = tmp_path / "events.jsonl"
    found = runs.run(
        tmp_path / "run",
        "failed",
        fails=True,
        trainer={"max_steps": 12},
        callback={"every_n_train_steps": 3, "save_top_k": -1, "filename": "{step}"},
        plugin={"mode": mode, "commit_timeout": 10.0, "event_log": str(log)},
        spoils=rank,
    )
    for result in found:
        assert "'NoneType' object has no attribute 'items'" in result["raised"]["message"], result["raised"]
    assert [(result["step"], result["files"]) for result in found] == [(6, ["step=3.ckpt"])] * 2
    failures = [event for event in map(json.loads, log.read_text().splitlines()) if event["event"] == "SaveFailed"]
    assert failures and all("'NoneType'" in event["error"] for event in failures), failures


def test_failure_of_which_a_rank_hears_late_is_one_on_all(runs: Runs, tmp_path: Path) -> None:
    """The rank that knows of the failure does not begin the next save, where it would wait for the other."""
    found = runs.run(
        tmp_path / "run",
        "failed",
        fails=True,
        trainer={"max_steps": 12},
        callback={"every_n_train_steps": 3, "save_top_k": -1, "filename": "{step}"},
        fault={"rank": 1, "save": "step=6", "act": "fail", "late": 9},
    )
    assert [(result["step"], result["begun"]) for result in found] == [(9, 2), (9, 2)]
    assert ["No space left" in result["raised"]["message"] for result in found] == [True, True]
    assert found[0]["files"] == ["step=3.ckpt"]


@pytest.mark.extended
def test_averaged_weights_are_saved_and_resumed(runs: Runs, tmp_path: Path) -> None:
    needs_weight_averaging()
    whole = runs.run(tmp_path / "whole", "whole", trainer={"max_steps": 8}, callback=EVERY, average=True)
    first = tmp_path / "first"
    runs.run(first, "first", trainer={"max_steps": 3}, callback=EVERY, average=True)
    found = runs.run(first, "resumed", trainer={"max_steps": 8}, callback=EVERY, average=True, ckpt_path="last", seed=3)
    # each rank averages its own running statistics of the batches; those of rank 0 are saved
    assert tail(found[:1], 0) == tail(whole[:1], 3)
    for name, value in whole[1]["weights"].items():
        assert "running" in name or found[1]["weights"][name] == value


@pytest.mark.extended
def test_without_the_exact_callback_the_plugin_is_still_used(runs: Runs, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    save_at = ["on_train_batch_end", 3, False]
    for kind in KINDS:
        saved = directory / kind
        runs.run(saved, "first", kind=kind, trainer={"max_steps": 3}, callback=None, save_at=save_at)
        assert (saved / "saved.ckpt" / "manifest.json").exists()
        assert len(list((saved / "saved.ckpt").glob("model-*-of-00002.safetensors"))) == 2
        found = runs.run(
            saved,
            "second",
            kind=kind,
            trainer={"max_steps": 5},
            callback=None,
            ckpt_path=str(saved / "saved.ckpt"),
            after=["save"],
        )
        assert [result["step"] for result in found] == [5, 5]
        assert (saved / "after.ckpt" / "manifest.json").exists()


@pytest.mark.extended_cells("ddp")
@pytest.mark.parametrize("kind", ["ddp", "mp"])
def test_open_accumulation_window_goes_on(runs: Runs, tmp_path: Path, kind: str) -> None:
    trainer = {"max_steps": 4, "accumulate_grad_batches": 3}
    whole = runs.run(tmp_path / "whole", "whole", kind=kind, trainer=trainer, callback={})
    directory = tmp_path / "run"
    save = ["on_train_batch_end", 5, True]
    runs.run(directory, "first", fails=True, kind=kind, trainer=trainer, callback={}, save_at=save)
    found = runs.run(
        directory, "second", kind=kind, trainer=trainer, callback={}, ckpt_path=str(directory / "saved.ckpt"), seed=4
    )
    assert [result["warnings"] for result in found] == [[], []]
    assert tail(found, 0) == tail(whole, 5)
    with DirectoryCheckpointer().load(directory / "saved.ckpt") as opened:
        gradients = [opened.load("gradients", rank=rank) for rank in range(2)]
    assert all(gradient.numel() and gradient.any() for gradient in gradients[0].values())
    if kind == "mp":
        assert {g.shape for rank in gradients for g in rank.values()} == {(8, 8), (7, 8), (8,), (7,), (2, 15), (1, 15)}


@pytest.mark.extended_cells("saves0", "saves1")
@pytest.mark.parametrize(
    "saves",
    [
        {"io": "ShardedCheckpointIO", "options": {"wrapped": True}},  # state dicts do not show the wrapper
        {"io": None, "whole": True},
    ],
)
def test_each_rank_of_fsdp_continues_with_its_own_statistics(job: Job, tmp_path: Path, saves: Any) -> None:
    spec = {"shards": 2, "settings": {"every_n_train_steps": 5}, "own_generators": True, **saves}
    whole = job.run(tmp_path, "whole", **spec)
    resumed = job.run(tmp_path, "resumed", **spec, resume=str(tmp_path / "saved" / "step=5.ckpt"), seed=77)
    for found, expected in zip(resumed, whole, strict=True):
        assert (found["weights"], found["warnings"]) == (expected["weights"], [])


def test_open_window_that_is_not_kept_is_told(runs: Runs, tmp_path: Path) -> None:
    trainer = {"max_steps": 4, "accumulate_grad_batches": 3}
    directory = tmp_path / "run"
    save = ["on_train_batch_end", 5, True]
    runs.run(directory, "first", fails=True, kind="fsdp", trainer=trainer, callback={}, save_at=save)
    found = runs.run(
        directory, "second", kind="fsdp", trainer=trainer, callback={}, ckpt_path=str(directory / "saved.ckpt")
    )
    assert "FSDPStrategy keeps the gradients" in found[0]["warnings"][0]
