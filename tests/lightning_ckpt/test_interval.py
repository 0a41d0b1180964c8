"""``ResumableCheckpoint(interval=...)``: saves at the same steps on all ranks, and a resume remembers failures."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_ckpt import AsyncCheckpointIO, ResumableCheckpoint
from tests.conftest import LIGHTNING
from tests.lightning_ckpt.reliable_cases import model_of, names, trainer_of

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning:lightning")]

TRAIN = """
    import json, os, sys, time
    import lightning.pytorch as pl
    import torch
    from lightning_ckpt import AsyncCheckpointIO, ResumableCheckpoint

    class Model(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))

        def training_step(self, batch, index):
            time.sleep(0.001 * self.global_rank)
            return self.layers(batch).pow(2).mean()

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), 0.01)

        def train_dataloader(self):
            return torch.utils.data.DataLoader(torch.arange(96.0).view(24, 4) / 96, batch_size=2, shuffle=True)

    folder, steps = sys.argv[1], int(sys.argv[2])
    saves = []

    class Told(ResumableCheckpoint):
        def _save_checkpoint(self, trainer, filepath):
            saves.append(trainer.global_step)
            super()._save_checkpoint(trainer, filepath)

    pl.seed_everything(1, verbose=False)
    mtbf = [1e9, 1e-3][int(os.environ["LOCAL_RANK"])]  # what another rank would choose by itself
    callback = Told(folder, interval="auto", mtbf=mtbf, resume="auto", save_top_k=-1)
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_steps=steps, callbacks=[callback],
        plugins=[AsyncCheckpointIO()], logger=False, enable_progress_bar=False, enable_model_summary=False)
    model = Model()
    trainer.fit(model)
    weights = [value.tolist() for value in model.parameters()]
    with open(f"{folder}.{trainer.global_rank}", "w") as file:
        json.dump([saves, callback.resumed and callback.resumed.step, weights], file)
"""


def test_ranks_save_at_the_same_steps_and_the_end_resumes_exactly(fork_script: Any, tmp_path: Path) -> None:
    def train(folder: str, steps: int) -> list[Any]:
        fork_script(TRAIN, folder, steps, modules=LIGHTNING, ranks=2, cwd=tmp_path)
        return [json.loads((tmp_path / f"{folder}.{rank}").read_text()) for rank in range(2)]

    whole = train("whole", 28)
    assert [found[0] for found in whole] == [[10, 20, 28]] * 2  # two saves to measure, and one at the end
    assert [found[0] for found in train("run", 15)] == [[10, 15]] * 2
    resumed = train("run", 28)
    assert [(saves, step) for saves, step, _ in resumed] == [([25, 28], 15)] * 2
    assert [found[2] for found in resumed] == [found[2] for found in whole]


def test_one_line_says_what_was_chosen_and_a_crash_is_remembered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="lightning.pytorch")

    def fit(steps: int, raise_at: int | None = None) -> Any:
        callback = ResumableCheckpoint(tmp_path, interval="auto", max_overhead=0.001, resume="auto", save_last=True)
        trainer = trainer_of(tmp_path, [callback], plugins=[AsyncCheckpointIO()], max_steps=steps, max_epochs=-1)
        trainer.fit(model_of(raise_at=raise_at))
        return trainer

    with pytest.raises(ValueError, match="on fire"):
        fit(100, raise_at=25)
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("interval: ")]
    assert len(lines) == 1
    assert lines[0].startswith("interval: saving about every ") and lines[0].endswith("may be 0.1 % of the run")
    fit(31)
    state = torch.load(tmp_path / "last.ckpt", weights_only=True)
    ((_, kept),) = ((key, value) for key, value in state["callbacks"].items() if "interval" in value)
    assert state["global_step"] == 31
    assert kept["interval"]["failures"] == 1
    assert kept["interval"]["run_seconds"] > 0


def test_what_says_when_to_save_as_well_is_refused() -> None:
    for options in ({"every_n_train_steps": 5}, {"monitor": "loss"}):
        with pytest.raises(ValueError, match="need two callbacks"):
            ResumableCheckpoint(interval="auto", **options)
    with pytest.raises(ValueError, match="mtbf is for interval"):
        ResumableCheckpoint(mtbf=60.0)


def test_epochs_may_be_saved_besides(tmp_path: Path) -> None:
    callback = ResumableCheckpoint(
        tmp_path, filename="{step}", interval="auto", mtbf=1e9, every_n_epochs=1, save_top_k=-1
    )
    trainer = trainer_of(tmp_path, [callback], plugins=[AsyncCheckpointIO()], max_epochs=2)
    trainer.fit(model_of())
    assert [name for name in names(tmp_path) if name.endswith(".ckpt")] == [
        "step=10.ckpt",
        "step=12.ckpt",
        "step=6.ckpt",
    ]
