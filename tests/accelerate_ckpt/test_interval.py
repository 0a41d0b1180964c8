"""The option ``interval``: all ranks save automatically at the same steps, and old automatic saves are deleted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from accelerate_ckpt.config import CheckpointConfig, OptionError
from tests.support.accelerate_ranks import RankResult, Ranks

TRAINING = """
    import time
    from accelerate.utils import ProjectConfiguration

    if rank:
        options = {**options, "mtbf": 1e-3}  # what another rank would choose by itself
    project = ProjectConfiguration(folder, **project)
    accelerator = attach(Accelerator(project_config=project, gradient_accumulation_steps=2), **options)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    data = torch.utils.data.DataLoader(torch.arange(160.0).reshape(40, 4) / 100, batch_size=2, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    if options.get("resume"):
        accelerator.load_state()
    point = accelerator.resumed
    step = point.step if point else 0
    while step < steps:
        for batch in data:
            time.sleep(0.001 * rank)
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).pow(2).mean())
                optimizer.step()
                optimizer.zero_grad()
            step += accelerator.sync_gradients
            if step == steps:
                break
    if save_as:
        accelerator.save_state(f"{folder}/checkpoints/{save_as}")
    accelerator.end_training()
    tell(resumed=point and [point.path.rpartition("/")[2], point.step])
    tell(weights=[value.tolist() for value in accelerator.unwrap_model(model).parameters()])
"""


def run(ranks: Ranks, folder: Path, world_size: int, steps: int, **names: Any) -> list[RankResult]:
    options = {"interval": "auto", "mtbf": 1e9, **names.pop("options", {})}
    defaults: dict[str, Any] = {"project": {}, "save_as": None}
    folder.mkdir(exist_ok=True)
    return ranks.run(
        TRAINING, world_size, **{**defaults, "folder": str(folder), "steps": steps, "options": options, **names}
    )


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir() if not path.name.startswith("."))


def test_ranks_save_by_themselves_and_resume_exactly(ranks: Ranks, tmp_path: Path) -> None:
    options = {"resume": "auto"}
    whole = run(ranks, tmp_path / "whole", 2, 130, options=options)
    assert [result.error for result in whole] == [None, None]
    assert saved(tmp_path / "whole") == ["auto_120", "auto_20"]  # the two newest of 10, 20 and 120
    folder = tmp_path / "run"
    run(ranks, folder, 2, 15, options=options, save_as="mine_7")
    assert saved(folder) == ["auto_10", "mine_7"]
    resumed = run(ranks, folder, 2, 130, options=options)
    assert saved(folder) == ["auto_25", "auto_35", "mine_7"]  # the script's own saves stay
    for found, expected in zip(resumed, whole, strict=True):
        assert found.told == {"resumed": ["mine_7", 15], "weights": expected.told["weights"]}


def test_automatic_names_need_a_rule_of_what_stays(ranks: Ranks, tmp_path: Path) -> None:
    automatic = {"automatic_checkpoint_naming": True}
    (refused,) = run(ranks, tmp_path / "refused", 1, 12, project=automatic)
    assert refused.error == "OptionError" and "total_limit" in refused.message
    (done,) = run(ranks, tmp_path / "done", 1, 130, project={**automatic, "total_limit": 2})
    assert done.error is None
    assert saved(tmp_path / "done") == ["checkpoint_1", "checkpoint_2"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"interval": "often"}, "interval must be one of 'auto', 'continuous', not 'often'"),
        ({"interval": "auto", "mtbf": 0}, "mtbf must be a number of seconds above 0"),
        ({"interval": "auto", "max_overhead": 5}, "max_overhead must be a share of the run between 0 and 1"),
        ({"max_overhead": 0.1}, "max_overhead is for interval='auto'"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        CheckpointConfig(**options)


def test_flags_say_the_same() -> None:
    config = CheckpointConfig.from_sources({"interval": "auto", "max_overhead": "0.005", "mtbf": "3600"}, variables={})
    assert (config.interval, config.max_overhead, config.mtbf) == ("auto", 0.005, 3600.0)
