"""Just-in-time saves: when a rank dies, the others save; at most one step is lost, and the resume is exact."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckpt_core import verify
from lightning_ckpt import ResumableCheckpoint
from lightning_ckpt._callbacks.just_in_time import JustInTime
from tests.conftest import LIGHTNING, ScriptRunner
from tests.lightning_ckpt.exact_cases import make_trainer
from tests.lightning_ckpt.signal_ranks import START, Job
from tests.support.server_fixtures import server_of, servers
from tests.support.servers import Server

__all__ = ["server_of", "servers"]  # fixtures

SETTINGS = {"every_n_train_steps": 1000, "resume": "auto", "just_in_time": True}
BACKWARD = "on_before_backward"
HOOKS_OF_EPOCH = "training stopped in the hooks on_train_epoch_end"


def check_resumes(job: Job, directory: Path, at: int, **spec: Any) -> list[dict[str, Any]]:
    """Lose ranks in step ``at``, resume, and compare with an undisturbed run; return the results of the resume."""
    spec = {"settings": SETTINGS, "own_generators": True, **spec}
    (directory / "whole").mkdir()
    whole = job.run(directory / "whole", "whole", **{**spec, "signals": [], "killed": []})
    first = job.run(directory, "first", **spec)
    assert all(result["raised"] for result in first)
    (saved,) = (directory / "saved").glob("*.ckpt")
    assert saved.name in (f"just-in-time-step={at - 1}.ckpt", f"just-in-time-step={at}.ckpt")
    assert verify(saved)
    resumed = job.run(directory, "resumed", **{**spec, "signals": [], "killed": []}, seed=77)
    for rank, (found, expected) in enumerate(zip(resumed, whole, strict=True)):
        assert found["ckpt_path"] == str(saved)
        assert found["seen"] == expected["seen"][len(expected["seen"]) - len(found["seen"]) :], f"rank {rank}"
        for part in ("weights", "optimizer", "step", "callback_metrics"):
            assert found[part] == expected[part], f"rank {rank}: {part}"
    assert not list((directory).glob(".saved.survivor*")), "the files of survivors stay after a run that has ended"
    return resumed


def test_rank_0_is_killed_in_backward(job: Job, tmp_path: Path) -> None:
    resumed = check_resumes(job, tmp_path, 7, signals=[[0, "SIGKILL", BACKWARD, 7]], killed=[0])
    assert [result["warnings"] for result in resumed] == [[], []]


@pytest.mark.extended
def test_rank_1_is_killed_between_the_exchange_of_gradients_and_its_note(job: Job, tmp_path: Path) -> None:
    resumed = check_resumes(job, tmp_path, 7, signals=[[1, "SIGKILL", "on_before_optimizer_step", 7]], killed=[1])
    assert [result["warnings"] for result in resumed] == [[], []]


def test_a_rank_that_is_lost_before_the_hooks_of_an_epochs_end_meet_is_said(job: Job, tmp_path: Path) -> None:
    # in that hook, the model computes a metric together with the other rank, and resets it
    spec = {"settings": SETTINGS, "own_generators": True}
    job.run(tmp_path, "first", **spec, signals=[[1, "SIGKILL", "on_train_batch_end", 8]], killed=[1])
    resumed = job.run(tmp_path, "resumed", **spec)
    assert [len(result["warnings"]) for result in resumed] == [1, 0]
    assert HOOKS_OF_EPOCH in resumed[0]["warnings"][0]


@pytest.mark.extended
@pytest.mark.parametrize("every", [2, 3], ids=["within an epoch", "at the end of an epoch"])
def test_rank_1_is_killed_before_its_first_note_of_a_resumed_start(job: Job, tmp_path: Path, every: int) -> None:
    spec = {"settings": {**SETTINGS, "every_n_train_steps": every}, "own_generators": True}
    (tmp_path / "whole").mkdir()
    whole = job.run(tmp_path / "whole", "whole", **spec)
    first = [[rank, "SIGKILL", "on_before_optimizer_step", every + 1] for rank in range(2)]
    job.run(tmp_path, "first", **spec, signals=first, killed=[0, 1])
    # the resumed run loses rank 1 in its first step, after the exchange of gradients
    job.run(tmp_path, "second", **spec, signals=[[1, "SIGKILL", "on_before_optimizer_step", 1]], killed=[1], seed=76)
    resumed = job.run(tmp_path, "resumed", **spec, seed=77)
    saved = str(tmp_path / "saved" / f"just-in-time-step={every + 1}.ckpt")
    assert [result["ckpt_path"] for result in resumed] == [saved] * 2
    said = [HOOKS_OF_EPOCH in warning for result in resumed for warning in result["warnings"]]
    assert said == ([True] if every == 3 else [])
    assert [result["weights"] for result in resumed] == [result["weights"] for result in whole]


def test_a_rank_that_fails_in_each_first_step_makes_no_newer_checkpoint(job: Job, tmp_path: Path) -> None:
    spec: dict[str, Any] = {"settings": {**SETTINGS, "every_n_train_steps": 2, "resume_attempts": 2, "save_top_k": -1}}
    job.run(tmp_path, "first", **spec, signals=[[rank, "SIGKILL", START, 6] for rank in range(2)], killed=[0, 1])
    for _ in range(3):
        (found, _) = job.run(tmp_path, "again", **spec, signals=[[1, "raise", START, 1]])
    assert sorted(path.name for path in (tmp_path / "saved").glob("*.ckpt")) == ["step=2.ckpt", "step=4.ckpt"]
    assert found["ckpt_path"] == str(tmp_path / "saved" / "step=2.ckpt")  # the newer one was skipped


@pytest.mark.extended
def test_a_survivor_is_told_to_end_while_no_collective_waits(job: Job, tmp_path: Path) -> None:
    signals = [[1, "SIGKILL", START, 5], [0, "SIGTERM and wait", START, 5]]  # as launchers do when a rank has died
    check_resumes(job, tmp_path, 2, signals=signals, killed=[1], trainer={"accumulate_grad_batches": 2}, answers=1e6)


def test_rank_0_is_killed_in_a_save_at_the_end_of_a_window(job: Job, tmp_path: Path) -> None:
    settings = {**SETTINGS, "every_n_train_steps": 3, "monitor": "step", "mode": "max", "save_top_k": 2}
    signals = [[0, "SIGKILL", "on_save_checkpoint", 1]]
    spec = {"settings": settings, "trainer": {"accumulate_grad_batches": 2}}
    check_resumes(job, tmp_path, 3, signals=signals, killed=[0], **spec)


@pytest.mark.extended_cells("False")
@pytest.mark.parametrize("survivors_save", [True, False])
def test_a_save_in_which_a_rank_dies_is_given_up_at_once(job: Job, tmp_path: Path, survivors_save: bool) -> None:
    settings = {**SETTINGS, "every_n_train_steps": 3, "just_in_time": survivors_save}
    spec = {"settings": settings, "io": "ShardedCheckpointIO", "ranks": 3, "io_settings": {"commit_timeout": 1e6}}
    spec["options"] = {"wide": True}  # so that each rank writes a part
    job.run(tmp_path, "first", **spec, signals=[[1, "SIGKILL", BACKWARD, 5]], never_durable=[1], killed=[1])
    path = tmp_path / "saved" / "step=3.ckpt"
    for rank in (0, 2):
        said = (tmp_path / f"first.{rank}.log").read_text()
        assert f"rank 1 died before the save of {path} was complete" in said
    assert [each.name for each in (tmp_path / "saved").iterdir()] == ["just-in-time-step=4.ckpt"] * survivors_save


# ranks 0 and 2 hold one half of each tensor, ranks 1 and 3 the other
HSDP: dict[str, Any] = {"ranks": 4, "shards": 2, "io": "ShardedCheckpointIO", "options": {"val": True}}
HSDP["trainer"] = {"num_sanity_val_steps": 2, "val_check_interval": 3}


@pytest.mark.extended
def test_survivors_of_hsdp_save_a_shard_each(job: Job, tmp_path: Path) -> None:
    signals = [[rank, "SIGKILL", BACKWARD, 7] for rank in (0, 3)]
    resumed = check_resumes(job, tmp_path, 6, **HSDP, signals=signals, killed=[0, 3])
    assert [result["warnings"] for result in resumed] == [[]] * 4
    assert (tmp_path / "saved" / "just-in-time-step=6.ckpt").is_dir()


def test_a_shard_that_nobody_holds_is_said_and_the_last_checkpoint_taken(job: Job, tmp_path: Path) -> None:
    spec = {"settings": {**SETTINGS, "every_n_train_steps": 3}, **HSDP}
    signals = [[rank, "SIGKILL", BACKWARD, 5] for rank in (1, 3)]
    job.run(tmp_path, "first", **spec, signals=signals, killed=[1, 3])
    assert "no surviving rank holds a complete state" in (tmp_path / "first.0.log").read_text()
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["step=3.ckpt"]


MORE: dict[str, tuple[int, dict[str, Any]]] = {
    "rank 1 of 3, between steps": (6, {"signals": [[1, "SIGKILL", START, 6]], "killed": [1], "ranks": 3}),
    "rank 0 of 3 has an error of its own": (6, {"signals": [[0, "raise", START, 6]], "ranks": 3}),
    "ranks 0 and 2 of 3": (
        6,
        {"signals": [[0, "SIGKILL", BACKWARD, 6], [2, "SIGKILL", BACKWARD, 6]], "killed": [0, 2], "ranks": 3},
    ),
    "rank 0 of 4, while rank 2 waits for its neighbours": (
        6,
        {
            "settings": {**SETTINGS, "just_in_time": 1000.0},
            "signals": [[0, "SIGKILL", BACKWARD, 6]],
            "killed": [0],
            "ranks": 4,
        },
    ),
    "in an accumulation window": (
        2,
        {"signals": [[1, "SIGKILL", BACKWARD, 8]], "killed": [1], "trainer": {"accumulate_grad_batches": 4}},
    ),
    "sharded, after a save": (
        6,
        {"signals": [[1, "SIGKILL", BACKWARD, 6]], "killed": [1], "io": "ShardedCheckpointIO"},
    ),
    **{
        f"rank {rank} of HSDP": (6, {**HSDP, "signals": [[rank, "SIGKILL", BACKWARD, 6]], "killed": [rank]})
        for rank in (0, 1)
    },
    "rank 1 of HSDP, in a save": (
        3,
        {
            **HSDP,
            "settings": {**SETTINGS, "every_n_train_steps": 3, "monitor": "step", "mode": "max", "save_top_k": 2},
            "signals": [[1, "SIGKILL", "on_save_checkpoint", 1]],
            "killed": [1],
        },
    ),
    "rank 2 of HSDP, in a validation": (
        3,
        {**HSDP, "signals": [[2, "SIGKILL", "on_validation_batch_start", 2]], "killed": [2], "own_generators": False},
    ),
    "rank 3 of HSDP, before its step": (
        5,
        {**HSDP, "signals": [[3, "SIGKILL", "on_before_optimizer_step", 5]], "killed": [3]},
    ),
    "in a validation": (
        4,
        {
            "signals": [[0, "SIGKILL", "on_validation_batch_start", 3]],
            "killed": [0],
            "own_generators": False,  # the others have drawn for the whole validation by then: a warning
            "options": {"val": True},
            "trainer": {"val_check_interval": 2},
        },
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_other_losses(job: Job, tmp_path: Path, name: str) -> None:
    at, spec = MORE[name]
    check_resumes(job, tmp_path, at, **spec)


@pytest.mark.slow
def test_a_survivor_saves_to_a_store(job: Job, tmp_path: Path, server_of: Callable[[str], Server]) -> None:
    server = server_of("moto")
    url, options = f"{server.new_bucket()}/run", {"storage_options": dict(server.options)}
    spec = {"settings": {**SETTINGS, "dirpath": url}, "io_settings": options, "own_generators": True}
    (tmp_path / "whole").mkdir()
    whole = job.run(tmp_path / "whole", "whole", settings=SETTINGS, own_generators=True)
    job.run(tmp_path, "first", **spec, signals=[[0, "SIGKILL", BACKWARD, 7]], killed=[0])
    resumed = job.run(tmp_path, "resumed", **spec, seed=77)
    for found, expected in zip(resumed, whole, strict=True):
        assert found["ckpt_path"] in (f"{url}/just-in-time-step=6.ckpt", f"{url}/just-in-time-step=7.ckpt")
        assert (found["weights"], found["warnings"]) == (expected["weights"], [])


@pytest.mark.slow
def test_an_error_of_all_ranks_saves_nothing(job: Job, tmp_path: Path) -> None:
    signals = [[rank, "raise", START, 5] for rank in range(2)]
    job.run(tmp_path, "first", settings=SETTINGS, signals=signals)
    assert not list(tmp_path.glob("saved/just-in-time*"))


def test_the_option_makes_sense() -> None:
    with pytest.raises(ValueError, match="just_in_time must be true, false, or seconds above 0, not -1"):
        ResumableCheckpoint(just_in_time=-1)


@pytest.mark.parametrize("strategy", [DDPStrategy, FSDPStrategy, ModelParallelStrategy, DeepSpeedStrategy])
def test_strategies_whose_ranks_hold_parts_are_refused(strategy: type) -> None:
    trainer = SimpleNamespace(  # DeepSpeed is not installed, and FSDP asks for a GPU
        strategy=strategy.__new__(strategy), lightning_module=BoringModel(), optimizers=[], world_size=2
    )
    problem = JustInTime.problem_of(trainer)
    words = f"it is for ranks that hold what others hold, too (DDP, HSDP), and this is {strategy.__name__}"
    assert problem == (None if strategy is DDPStrategy else words)


@pytest.fixture
def _four() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_four")
def test_shards_that_no_plugin_writes_are_refused() -> None:
    model, strategy = BoringModel(), ModelParallelStrategy(save_distributed_checkpoint=False)
    fully_shard(model.layer, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("data_parallel", "tensor_parallel")))
    trainer = SimpleNamespace(strategy=strategy, lightning_module=model, optimizers=[], world_size=4)
    assert JustInTime.problem_of(trainer) == "with ModelParallelStrategy, it needs ShardedCheckpointIO"


FORKED = """
import lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_ckpt import ResumableCheckpoint

if __name__ == "__main__":
    callback = ResumableCheckpoint("saved", just_in_time=True)
    callback.save_on_exception = True  # an argument since Lightning 2.5.6
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy="ddp_fork", max_steps=2, callbacks=[callback], logger=False,
        enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
    )
    trainer.fit(BoringModel())
"""


def test_under_a_launcher_that_tells_no_callback_of_exceptions_a_warning_says_so(
    fork_script: ScriptRunner, tmp_path: Path
) -> None:
    ended = fork_script(FORKED, modules=LIGHTNING)
    for what in ("just_in_time will save nothing if a rank dies", "save_on_exception will save nothing"):
        assert ended.stderr.count(f"{what}: ranks that Lightning forks or spawns tell no callback") == 1
    assert not list(tmp_path.glob(".saved.survivor*"))


def test_one_process_notes_nothing(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        callback = ResumableCheckpoint(tmp_path / "saved", just_in_time=True)
        make_trainer(tmp_path, [callback], max_steps=2).fit(BoringModel())
    assert not list(tmp_path.glob(".saved.survivor*"))
