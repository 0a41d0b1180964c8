"""An evaluation that draws random numbers after an epoch's last save is said at that save, and at the resume."""

from __future__ import annotations

from pathlib import Path

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
