"""Signals to one rank or to several at different batches: what is saved, whether SLURM requeues, how the job ends."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from ckpt_core import verify
from lightning_ckpt import ResumableCheckpoint, _preemption
from tests.conftest import LIGHTNING, ScriptRunner
from tests.lightning_ckpt.features import needs_save_on_exception
from tests.lightning_ckpt.signal_ranks import START, Job


def requeued(directory: Path) -> list[str]:
    found = directory / "requeued"
    return found.read_text().splitlines() if found.exists() else []


VALIDATING = {"options": {"val": True}, "trainer": {"val_check_interval": 2}}
REQUEUES: dict[str, dict[str, Any]] = {
    "rank 0": {"signals": [[0, "SIGUSR1", START, 3]]},
    "a batch apart, in an open window": {
        "signals": [[1, "SIGUSR1", "on_after_backward", 2], [0, "SIGUSR1", START, 3]],
        "trainer": {"accumulate_grad_batches": 4},
    },
    "together, sharded": {
        "signals": [[rank, "SIGUSR1", START, 1] for rank in range(2)],
        "io": "ShardedCheckpointIO",
        "settings": {"every_n_train_steps": 1},
    },
    "in validation": {"signals": [[0, "SIGUSR1", "on_validation_batch_start", 1]], **VALIDATING},
    "in the sanity check": {
        "signals": [[1, "SIGUSR1", "on_sanity_check_start", 1]],
        "options": {"val": True},
        "trainer": {"num_sanity_val_steps": 1},
        "io": "SyncCheckpointIO",
    },
    "one process": {"signals": [[0, "SIGUSR1", "on_after_backward", 11]], "ranks": 1},
}


@pytest.mark.sampled(1)
@pytest.mark.extended_cells("together, sharded", "rank 0", "in validation")
@pytest.mark.parametrize("name", REQUEUES)
def test_a_requeued_job_resumes_exactly(job: Job, tmp_path: Path, name: str) -> None:
    spec = {"slurm": True, **REQUEUES[name]}
    whole = job.run(tmp_path, "whole", **spec)
    assert [result["raised"] for result in whole] == [None] * len(whole)
    assert requeued(tmp_path) == ["requeue 17 hpc_ckpt_1.ckpt"]
    path = tmp_path / "hpc_ckpt_1.ckpt"
    if spec.get("io") != "ShardedCheckpointIO":
        assert verify(path)
    resumed = job.run(tmp_path, "resumed", **{**spec, "signals": []}, resume=str(path), seed=77)
    for rank, (found, expected) in enumerate(zip(resumed, whole, strict=True)):
        assert found["warnings"] == []
        assert found["seen"] == expected["seen"][len(expected["seen"]) - len(found["seen"]) :], f"rank {rank}"
        assert len(found["seen"]) < len(expected["seen"])
        for part in ("weights", "optimizer", "step", "callback_metrics"):
            assert found[part] == expected[part], f"rank {rank}: {part}"


def test_a_signal_in_the_last_batch(job: Job, tmp_path: Path) -> None:
    signals = [[1, "SIGUSR1", START, 12]]
    found = job.run(tmp_path, "whole", slurm=True, signals=signals)
    assert [result["step"] for result in found] == [12, 12]
    assert requeued(tmp_path) == ["requeue 17 hpc_ckpt_1.ckpt"]
    assert torch.load(tmp_path / "hpc_ckpt_1.ckpt")["global_step"] == 12


@pytest.mark.sampled(1)
@pytest.mark.parametrize("io", ["AsyncCheckpointIO", "ShardedCheckpointIO"])
def test_a_job_with_a_stock_callback_is_requeued(job: Job, tmp_path: Path, io: str) -> None:
    signals = [[0, "SIGUSR1", START, 2], [1, "SIGUSR1", START, 3]]
    job.run(tmp_path, "first", slurm=True, io=io, callback="stock", signals=signals)
    assert requeued(tmp_path) == ["requeue 17 hpc_ckpt_1.ckpt"]


def test_a_signal_during_a_validation_of_its_own(job: Job, tmp_path: Path) -> None:
    signals = [[1, "SIGUSR1", "on_validation_batch_start", 1]]
    job.run(tmp_path, "first", slurm=True, validate=True, signals=signals, options={"val": True})
    assert requeued(tmp_path) == ["requeue 17 hpc_ckpt_1.ckpt"]


PREEMPTIONS: dict[str, dict[str, Any]] = {
    "one rank": {"signals": [[1, "SIGTERM", START, 3]]},
    "in validation": {"signals": [[0, "SIGTERM", "on_validation_batch_start", 3]]},
    "all ranks, in an open window": {
        "signals": [[0, "SIGTERM", START, 6], [1, "SIGTERM", "on_after_backward", 5]],
        "trainer": {"accumulate_grad_batches": 4},
        "io": "ShardedCheckpointIO",
    },
    "another signal, one process, sanity check": {
        "signals": [[0, "SIGUSR2", "on_sanity_check_start", 1]],
        "settings": {"preempt": "SIGTERM,SIGUSR2"},
        "trainer": {"num_sanity_val_steps": 1},
        "ranks": 1,
        "io": None,
    },
    "a file that one rank sees": {
        "signals": [[1, "notice", START, 2]],
        "settings": {"preempt": {"notice": "notice", "look_every": 0.01}},
    },
}


SLOW_PREEMPTIONS: dict[str, dict[str, Any]] = {
    "sanity check, rank 1": {
        "signals": [[1, "SIGTERM", "on_sanity_check_start", 1]],
        "trainer": {"num_sanity_val_steps": 1},
    },
    "end of an epoch, rank 1": {"signals": [[1, "SIGTERM and wait", "on_train_epoch_end", 1]]},
    "end of an epoch, rank 0": {"signals": [[0, "SIGTERM and wait", "on_train_epoch_end", 1]]},
    "begin of an epoch, rank 1": {"signals": [[1, "SIGTERM and wait", "on_train_epoch_start", 2]]},
    "twice, the second time in the save": {
        "signals": [[1, "SIGTERM", START, 3], *([rank, "SIGTERM", "on_save_checkpoint", 1] for rank in range(2))],
    },
}


@pytest.mark.sampled(1)
@pytest.mark.extended_cells("one rank", "in validation")
@pytest.mark.parametrize(
    "name", [*PREEMPTIONS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_PREEMPTIONS)]
)
def test_a_preempted_run_saves_on_all_ranks_and_resumes_exactly(job: Job, tmp_path: Path, name: str) -> None:
    spec = {"options": {"val": True}, **{**PREEMPTIONS, **SLOW_PREEMPTIONS}[name]}
    settings = {"every_n_epochs": 50, "save_last": True, **spec.pop("settings", {})}
    if isinstance(settings.get("preempt"), dict):
        settings["preempt"]["notice"] = str(tmp_path / "notice")
    ended = job.run(tmp_path, "ended", **spec, settings=settings)
    status = {"another": 128 + signal.SIGUSR2, "a": 75}.get(name.split(maxsplit=1)[0], 143)
    assert {(result["raised"], result["status"]) for result in ended} == {("SIGTERMException", status)}
    assert len({result["step"] for result in ended}) == 1
    saved = tmp_path / "saved"
    names = {f"preempted-step={ended[0]['step']}.ckpt"} | ({"last.ckpt"} if spec.get("io", "") is not None else set())
    assert {path.name for path in saved.iterdir()} == names
    whole = job.run(tmp_path, "whole", **{**spec, "signals": []})
    for path in saved.glob("step=*"):  # saved by the whole run
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    resumed = job.run(tmp_path, "resumed", **{**spec, "signals": []}, settings={"resume": "auto"}, seed=77)
    for found, expected in zip(resumed, whole, strict=True):
        assert found["warnings"] == []
        assert found["ckpt_path"] is not None
        assert 0 < len(found["seen"]) < len(expected["seen"])
        assert (found["weights"], found["optimizer"]) == (expected["weights"], expected["optimizer"])


@pytest.mark.sampled(1)
@pytest.mark.extended_cells(
    "on_train_end-stages0-1",
    "on_test_batch_start-stages2-2",
    "on_predict_end-stages5-1",
)
@pytest.mark.parametrize(
    ("hook", "stages", "ranks"),
    [
        ("on_train_end", [], 1),
        ("on_train_end", [], 2),
        ("on_test_batch_start", ["test"], 2),
        ("on_test_end", ["test"], 1),
        ("on_predict_batch_start", ["test", "predict"], 2),
        ("on_predict_end", ["test", "predict"], 1),
    ],
)
def test_a_run_that_is_told_to_end_after_its_last_batch_ends(
    job: Job, tmp_path: Path, hook: str, stages: list[str], ranks: int
) -> None:
    signals = [[ranks - 1, "SIGTERM", hook, 1]]
    spec: dict[str, Any] = {"ranks": ranks, "trainer": {"max_steps": 5}}
    settings = {"every_n_train_steps": 3}
    then = ["test", "predict", "fit"]
    ended = job.run(tmp_path, "ended", **spec, then=then, signals=signals, settings=settings)
    assert [(result["raised"], result["status"]) for result in ended] == [("SIGTERMException", 143)] * ranks
    assert [result["stages"] for result in ended] == [stages] * ranks
    if not stages:  # the steps since the last save are saved
        resumed = job.run(tmp_path, "resumed", **spec, signals=[], settings={**settings, "resume": "auto"}, seed=77)
        assert [result["ckpt_path"] for result in resumed] == [
            str(tmp_path / "saved" / "preempted-step=5.ckpt")
        ] * ranks
        assert [result["weights"] for result in resumed] == [result["weights"] for result in ended]


def test_a_rank_that_is_told_beside_a_dead_one_ends(job: Job, tmp_path: Path) -> None:
    # a rank that waited for the dead one's answer would wait for days
    signals = [[1, "SIGKILL", "on_test_batch_start", 1], [0, "SIGTERM and wait", "on_test_batch_start", 1]]
    (ended,) = job.run(
        tmp_path, "ended", trainer={"max_steps": 2}, then=["test"], signals=signals, killed=[1], answers=1e6
    )
    assert (ended["raised"], ended["status"]) == ("SIGTERMException", 143)


def test_a_trial_of_a_tuner_is_not_saved_as_if_it_were_the_run(job: Job, tmp_path: Path) -> None:
    settings = {"every_n_epochs": 50, "preempt": {"signals": [], "deadline": 0.001, "look_every": 0.01}}
    finder = {"num_training_steps": 4, "attr_name": "lr"}
    (ended,) = job.run(tmp_path, "ended", ranks=1, signals=[], settings=settings, finder=finder)
    assert ended["status"] == 75
    (saved,) = (tmp_path / "saved").iterdir()
    assert any(key.startswith("ResumableCheckpoint") for key in torch.load(saved)["callbacks"])


@pytest.mark.extended
def test_starts_that_are_told_to_end_before_they_train_are_no_crashes(job: Job, tmp_path: Path) -> None:
    spec: dict[str, Any] = {"ranks": 1, "settings": {"every_n_train_steps": 2, "resume": "auto", "resume_attempts": 1}}
    job.run(tmp_path, "first", signals=[[0, "SIGTERM", START, 5]], **spec)
    for _ in range(2):
        job.run(tmp_path, "ended", signals=[[0, "SIGTERM", "on_fit_start", 1]], killed=[0], **spec)
        assert not (tmp_path / "ended.0.json").exists()
    (last,) = job.run(tmp_path, "last", signals=[], **spec)
    assert last["ckpt_path"] == str(tmp_path / "saved" / "preempted-step=5.ckpt")


def test_a_deadline_ends_a_run(job: Job, tmp_path: Path) -> None:
    settings = {"every_n_epochs": 50, "preempt": {"signals": [], "deadline": 0.001, "look_every": 0.01}}
    ended = job.run(tmp_path, "ended", signals=[[0, "notice", START, 1]], settings=settings)
    assert [result["status"] for result in ended] == [75, 75]
    assert [path.name for path in (tmp_path / "saved").iterdir()] == [f"preempted-step={ended[0]['step']}.ckpt"]


@pytest.mark.extended
def test_only_the_newest_and_the_resumed_checkpoint_of_preemptions_stay(job: Job, tmp_path: Path) -> None:
    spec: dict[str, Any] = {"ranks": 1, "settings": {"every_n_epochs": 50, "resume": "auto"}}
    for batch in (3, 2, 2):
        job.run(tmp_path, "ended", signals=[[0, "SIGTERM", START, batch]], **spec)
    names = sorted(path.name for path in (tmp_path / "saved").iterdir())
    assert names == ["preempted-step=5.ckpt", "preempted-step=7.ckpt"]


def test_checkpoints_of_earlier_requeues_go_when_the_run_was_resumed_from_the_last(job: Job, tmp_path: Path) -> None:
    spec: dict[str, Any] = {"ranks": 1, "slurm": True, "settings": {"every_n_epochs": 50, "resume": "auto"}}
    for _ in range(3):
        signals = [[0, "SIGUSR1", START, 2], [0, "SIGTERM", START, 2]]
        spec["settings"]["preempt"] = False
        job.run(tmp_path, "ended", signals=signals, **spec)
        spec["settings"]["preempt"] = True
    job.run(tmp_path, "last", signals=[], **spec)
    assert [path.name for path in tmp_path.glob("hpc_ckpt_*")] == ["hpc_ckpt_3.ckpt"]


@pytest.mark.parametrize("settings", [{"callback": "stock"}, {"settings": {"preempt": False, "every_n_epochs": 50}}])
def test_sigterm_without_a_save_ends_all_ranks(job: Job, tmp_path: Path, settings: dict[str, Any]) -> None:
    ended = job.run(tmp_path, "ended", signals=[[1, "SIGTERM", START, 3]], **settings)
    assert not list(tmp_path.glob("saved/*"))
    assert [result["raised"] for result in ended] == ["SIGTERMException"] * 2


def test_sigterm_to_all_ranks_at_different_batches(job: Job, tmp_path: Path) -> None:
    signals = [[0, "SIGTERM", START, 3], [1, "SIGTERM", START, 4], [1, "SIGTERM", START, 2]]
    ended = job.run(tmp_path, "ended", signals=signals)
    assert [result["raised"] for result in ended] == ["SIGTERMException"] * 2
    assert ended[0]["step"] == ended[1]["step"]


def test_an_exception_on_rank_0_alone_ends_the_others(job: Job, tmp_path: Path) -> None:
    needs_save_on_exception()
    settings = {"save_on_exception": True, "every_n_train_steps": 2}
    ended = job.run(tmp_path, "ended", signals=[[0, "raise", START, 4]], settings=settings)
    assert ended[0]["raised"] == "PlannedError"
    assert ended[1]["raised"] is not None
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["step=2.ckpt"]
    assert verify(tmp_path / "saved" / "step=2.ckpt")


def test_what_fails_when_signals_begin_to_be_watched_is_what_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError("no threads")

    monkeypatch.setattr(_preemption, "Notices", fails)
    callback = ResumableCheckpoint(tmp_path)
    trainer = Trainer(max_steps=1, callbacks=[callback], logger=False, enable_progress_bar=False, accelerator="cpu")
    with pytest.raises(OSError, match="no threads"):
        trainer.fit(BoringModel())


_SETUP_WITHOUT_A_FIT = """
import os, signal, sys, threading
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_ckpt import AsyncCheckpointIO, ResumableCheckpoint

callback = ResumableCheckpoint(dirpath=sys.argv[1])
trainer = Trainer(logger=False, callbacks=[callback], plugins=[AsyncCheckpointIO()])
callback.setup(trainer, BoringModel(), "fit")
print(*(thread.name for thread in threading.enumerate()), signal.getsignal(signal.SIGTERM).name)
signal.signal(signal.SIGTERM, lambda *_: print("handled", flush=True))
os.kill(os.getpid(), signal.SIGTERM)
print("goes on", flush=True)
"""


def test_a_setup_that_no_run_follows_leaves_no_thread_and_no_handler(fork_script: ScriptRunner, tmp_path: Path) -> None:
    done = fork_script(_SETUP_WITHOUT_A_FIT, tmp_path, modules=LIGHTNING)
    assert done.stdout.splitlines() == ["MainThread SIG_DFL", "handled", "goes on"], done.stderr
