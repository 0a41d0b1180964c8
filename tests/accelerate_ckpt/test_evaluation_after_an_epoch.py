"""Warnings about evaluations that draw random numbers after an epoch's or a batch's last save, or contain a save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.accelerate_ranks import Ranks

LISTEN = """
    import logging
    from torch.utils.data import DataLoader

    class Keep(logging.Handler):
        def emit(self, record):
            said.append(record.getMessage())

    said = []
    logging.getLogger("accelerate_ckpt").addHandler(Keep(logging.WARNING))
    accelerator = attach(Accelerator(), "sync")
"""

TRAIN = (
    LISTEN
    + """
    model, data = nn.Linear(4, 4), torch.arange(96.0).view(24, 4) / 96
    model, optimizer, train, evaluation = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), 0.01), DataLoader(data, 4, shuffle=True), DataLoader(data, 4)
    )
    if resume:
        accelerator.load_state(f"{path}/step_12")
    if evaluates == "at each start" or evaluates == "at the first start" and not resume:
        list(evaluation)
    used = []
    for epoch in range(2 if resume else 0, 3):
        if evaluates == "first":
            list(evaluation)
        for number, x in enumerate(train):
            used.append(x[:, 0].tolist())
            accelerator.backward(model(x).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
            if number == 5 and epoch in saves and not resume:
                accelerator.save_state(f"{path}/step_{6 * (epoch + 1)}")
        if evaluates not in ("never", "first"):
            list(evaluation)
    accelerator.end_training()
    tell(said=[text for text in said if "exact" in text], used=used[-6:])
"""
)


def told(ranks: Ranks, path: Path, *, resume: bool, evaluates: str, saves: tuple[int, ...] = (0, 1, 2)) -> Any:
    (found,) = ranks.run(TRAIN, 1, path=str(path), resume=resume, evaluates=evaluates, saves=saves)
    assert found.error is None, found.message
    return found.told


def said(ranks: Ranks, path: Path, *, resume: bool, evaluates: str) -> list[str]:
    return list(told(ranks, path, resume=resume, evaluates=evaluates)["said"])


def test_it_is_said_by_the_resume_too(ranks: Ranks, tmp_path: Path) -> None:
    first = said(ranks, tmp_path / "with", resume=False, evaluates="last")
    assert ["an evaluation between two epochs" in text for text in first] == [True]
    again = said(ranks, tmp_path / "with", resume=True, evaluates="last")
    assert "before an evaluation that draws random numbers" in again[0]
    assert said(ranks, tmp_path / "without", resume=False, evaluates="never") == []
    assert said(ranks, tmp_path / "without", resume=True, evaluates="never") == []


def test_it_is_known_from_an_epoch_at_whose_end_nothing_was_saved(ranks: Ranks, tmp_path: Path) -> None:
    assert told(ranks, tmp_path, resume=False, evaluates="last", saves=(1,))["said"] != []
    (text,) = told(ranks, tmp_path, resume=True, evaluates="last")["said"]
    assert "before an evaluation that draws random numbers" in text


@pytest.mark.parametrize("evaluates", ["first", "at each start"])
def test_an_evaluation_that_a_resume_makes_too_is_exact_and_not_warned_of(
    ranks: Ranks, tmp_path: Path, evaluates: str
) -> None:
    first, again = (told(ranks, tmp_path, resume=resume, evaluates=evaluates) for resume in (False, True))
    assert first["said"] == again["said"] == []
    assert first["used"] == again["used"] and len(again["used"]) == 6


def test_an_evaluation_that_only_the_first_start_makes_is_said(ranks: Ranks, tmp_path: Path) -> None:
    first, again = (told(ranks, tmp_path, resume=resume, evaluates="at the first start") for resume in (False, True))
    assert first["said"] == []
    assert "before an evaluation that draws random numbers" in again["said"][0]
    assert first["used"] != again["used"]


DRAWS = (
    LISTEN
    + """
    from accelerate_ckpt._data import loaders
    loaders.announce_on_main = said.append
    model, data = nn.Linear(4, 4), torch.arange(96.0).view(24, 4) / 96
    model, optimizer, train = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), 0.01), DataLoader(data, 4, shuffle=True)
    )
    if resume:
        accelerator.load_state(f"{path}/epoch_{resume}")
    if draws == "at the start":
        torch.randn(3)
    used = []
    for epoch in range(resume, 4):
        if draws == "first" or (draws == "every second" and epoch % 2):
            torch.randn(3)
        for x in train:
            used.append(x[:, 0].tolist())
            accelerator.backward(model(x).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
        if not resume:
            accelerator.save_state(f"{path}/epoch_{epoch + 1}")
        if draws == "last":
            torch.randn(3)
    accelerator.end_training()
    tell(said=[text for text in said if "exact" in text or "taken back" in text], used=used[-6:])
"""
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("draws", ["at the start", "first", "last", "every second"])
def test_what_is_drawn_between_the_load_and_an_epoch_is_told_from_what_each_epoch_draws(
    ranks: Ranks, tmp_path: Path, draws: str
) -> None:
    first, again = (ranks.run(DRAWS, 1, path=str(tmp_path), resume=resume, draws=draws)[0].told for resume in (0, 3))
    assert first["said"] == []
    if draws == "last":
        (text,) = again["said"]
        assert "draws random numbers between such a save and the next epoch" in text
        assert first["used"] != again["used"]
    else:
        told = {"at the start": ["are taken back"], "every second": ["exact only if"]}.get(draws, [])
        assert [words in text for words, text in zip(told, again["said"], strict=True)] == [True] * len(told)
        assert first["used"] == again["used"]


@pytest.mark.parametrize("draws", ["at the start", "never"])
def test_what_each_epoch_draws_is_not_known_after_the_first(ranks: Ranks, tmp_path: Path, draws: str) -> None:
    ranks.run(DRAWS, 1, path=str(tmp_path), resume=0, draws=draws)
    (again,) = ranks.run(DRAWS, 1, path=str(tmp_path), resume=1, draws=draws)
    told = ["were drawn between load_state and the first batch" in text for text in again.told["said"]]
    assert told == [True] * (draws == "at the start")


INSIDE = """
    import logging
    from torch.utils.data import DataLoader

    class Keep(logging.Handler):
        def emit(self, record):
            said.append(record.getMessage())

    said, seen, used = [], [], []
    logging.getLogger("accelerate_ckpt").addHandler(Keep(logging.WARNING))
    accelerator = attach(Accelerator(), "sync")
    model, data = nn.Linear(4, 4), torch.arange(96.0).view(24, 4) / 96
    model, optimizer, train, evaluation = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), 0.01), DataLoader(data, 4, shuffle=True), DataLoader(data, 8)
    )
    step = 0
    if resume:
        accelerator.load_state(path)
        step = 9
    for epoch in range(1 if resume else 0, 3):
        for x in train:
            accelerator.backward(model(x).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            used.append([step, x[:, 0].tolist()])
            if step % 3 == 0:
                seen.append([step, 0])
                for number, x in enumerate(evaluation):
                    seen[-1][1] += 1
                    if step == 9 and number == 1 and not resume and inside:
                        accelerator.save_state(path)
                if step == 9 and not resume and not inside:
                    accelerator.save_state(path)
    accelerator.end_training()
    tell(said=[text for text in said if "evaluation" in text], seen=seen, used=used)
"""


@pytest.mark.parametrize("inside", [True, False])
def test_an_evaluation_in_which_is_saved_is_said_and_the_next_one_is_whole(
    ranks: Ranks, tmp_path: Path, inside: bool
) -> None:
    found = []
    for resume in (False, True):
        (told,) = ranks.run(INSIDE, 1, path=str(tmp_path / "saved"), resume=resume, inside=inside)
        assert told.error is None, told.message
        found.append(told.told)
    first, again = found
    assert again["seen"] == first["seen"][3:] == [[12, 3], [15, 3], [18, 3]]
    assert again["used"] == first["used"][9:] and len(again["used"]) == 9
    assert first["said"] == []
    assert ["saved inside an evaluation, whose rest is skipped" in text for text in again["said"]] == (
        [True] if inside else []
    )


BODY = (
    LISTEN.replace('"sync")', '"sync", interval=interval, checkpoint_dir=path)')
    + """
    model, data = nn.Sequential(nn.Linear(4, 4), nn.Dropout()), torch.arange(96.0).view(24, 4) / 96
    evaluation = DataLoader(data, 8)
    model, optimizer, train = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), 0.01), DataLoader(data, 4, shuffle=True)
    )
    for epoch in range(2):
        for step, x in enumerate(train):
            accelerator.backward(model(x).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
            if evaluates == "before" and step % 3 == 2:
                list(evaluation)
            if step % 2 == 1 and step < 5:
                accelerator.save_state(f"{path}/{epoch}{step}")
            if evaluates == "in other bodies" and step % 2 == 0:
                list(evaluation)
            if evaluates == "after" and step % 3 == 0:
                list(evaluation)
            if evaluates == "after another load" and step == 3:
                accelerator.load_state(f"{path}/{epoch}1")
            if evaluates == "after a break" and step == 3:
                break
        list(evaluation)
    accelerator.end_training()
    tell(said=said)
"""
)


@pytest.mark.extended_cells("in other bodies", "after a break")
@pytest.mark.parametrize("evaluates", ["before", "in other bodies", "after", "after another load", "after a break"])
def test_an_evaluation_after_a_save_in_a_body_is_said_by_the_run_that_saves(
    ranks: Ranks, tmp_path: Path, evaluates: str
) -> None:
    (found,) = ranks.run(BODY, 1, path=str(tmp_path), evaluates=evaluates, interval=None)
    assert found.error is None, found.message
    expected = [True] if evaluates == "after" else []
    assert ["in what was left of the batch's body" in text for text in found.told["said"]] == expected


def test_what_is_saved_between_two_batches_is_after_all_of_a_body(ranks: Ranks, tmp_path: Path) -> None:
    (found,) = ranks.run(BODY, 1, path=str(tmp_path), evaluates="never", interval="auto")
    assert found.error is None, found.message
    assert found.told["said"] == []
