"""What a run knows of its own and earlier checkpoints, for its retention policy."""

from __future__ import annotations

from pathlib import Path

import torch

from ckpt_core.commit_time import commit_time
from ckpt_core.policies import KeepBest, KeepLatest, RetentionHistory, SavedCheckpoint, numbers_in


def of_three(policy: KeepLatest | KeepBest) -> RetentionHistory:
    history = RetentionHistory(policy)
    for step, loss in ((1, 0.1), (2, 0.3), (3, 0.2)):
        history.record(f"run/step={step}", step, {"loss": torch.tensor(loss), "name": "a run"})
    return history


def test_what_was_saved_later_is_newer() -> None:
    assert of_three(KeepLatest(1)).surplus() == ["run/step=1", "run/step=2"]


def test_the_best_is_found_among_numbers_of_any_kind() -> None:
    assert of_three(KeepBest("loss")).surplus() == ["run/step=2"]
    assert numbers_in({"a": torch.tensor(2), "b": "text", "c": torch.ones(2), "d": None, "e": True}) == {"a": 2, "e": 1}


def test_protected_and_forgotten_checkpoints_stay() -> None:
    history = of_three(KeepLatest(1))
    assert history.surplus({"run/step=1"}) == ["run/step=2"]
    assert history.wants("run/step=3") and not history.wants("run/step=2") and not history.wants("unknown")
    history.forget("run/step=2")
    assert history.surplus() == ["run/step=1"]


def test_only_those_asked_for_compete() -> None:
    assert of_three(KeepLatest(1)).surplus(among={"run/step=1", "run/step=2"}) == ["run/step=1"]


def test_a_checkpoint_of_an_earlier_run_is_read_once_and_stays_if_it_cannot_be() -> None:
    asked: list[str] = []

    def read(path: str) -> SavedCheckpoint | None:
        asked.append(path)
        return SavedCheckpoint(path, 0, 1.0) if path == "run/step=0" else None

    history = of_three(KeepLatest(2))
    for _ in range(2):
        history.read_back(["run/step=0", "run/damaged", "run/step=1"], read)
    assert asked == ["run/damaged", "run/step=0"]
    assert history.surplus() == ["run/step=0", "run/step=1"]


def test_a_later_process_knows_what_an_earlier_one_knew(tmp_path: Path) -> None:
    state = of_three(KeepLatest(1)).state_dict()
    state[0]["time"] = ahead = commit_time() + 1000  # from a machine whose clock is ahead
    for step in (1, 3):
        (tmp_path / f"step={step}").touch()
    history = RetentionHistory(KeepLatest(1))
    history.load_state_dict(state, f"{tmp_path}/")
    assert history.surplus() == [f"{tmp_path}/step=3"]  # the directory was moved, and step 2 is not there any more
    assert commit_time() > ahead
    everywhere = RetentionHistory(KeepLatest(1))
    everywhere.load_state_dict(state, "s3://bucket/run")
    assert everywhere.surplus() == ["s3://bucket/run/step=2", "s3://bucket/run/step=3"]
