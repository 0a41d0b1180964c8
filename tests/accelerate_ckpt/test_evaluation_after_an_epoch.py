"""Evaluations: one that draws after an epoch's last save, and one inside of which is saved, are said at the resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.accelerate_ranks import Ranks

TRAIN = """
    import logging
    from torch.utils.data import DataLoader

    class Keep(logging.Handler):
        def emit(self, record):
            said.append(record.getMessage())

    said = []
    logging.getLogger("accelerate_ckpt").addHandler(Keep(logging.WARNING))
    accelerator = attach(Accelerator(), "sync")
    model, data = nn.Linear(4, 4), torch.arange(96.0).view(24, 4) / 96
    model, optimizer, train, evaluation = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), 0.01), DataLoader(data, 4, shuffle=True), DataLoader(data, 4)
    )
    if resume:
        accelerator.load_state(f"{path}/step_12")
    for epoch in range(2 if resume else 0, 3):
        for number, x in enumerate(train):
            accelerator.backward(model(x).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
            if number == 5 and not resume:
                accelerator.save_state(f"{path}/step_{6 * (epoch + 1)}")
        for x in evaluation if evaluates else ():
            pass
    accelerator.end_training()
    tell(said=[text for text in said if "exact" in text])
"""


def said(ranks: Ranks, path: Path, **names: bool) -> list[str]:
    (found,) = ranks.run(TRAIN, 1, path=str(path), **names)
    assert found.error is None, found.message
    return list(found.told["said"])


def test_it_is_said_by_the_resume_too(ranks: Ranks, tmp_path: Path) -> None:
    first = said(ranks, tmp_path / "with", resume=False, evaluates=True)
    assert ["an evaluation between two epochs" in text for text in first] == [True]
    again = said(ranks, tmp_path / "with", resume=True, evaluates=True)
    assert "before an evaluation that draws random numbers" in again[0]
    assert said(ranks, tmp_path / "without", resume=False, evaluates=False) == []
    assert said(ranks, tmp_path / "without", resume=True, evaluates=False) == []


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
    assert ["saved inside of an evaluation, of which the rest is not done" in text for text in again["said"]] == (
        [True] if inside else []
    )
