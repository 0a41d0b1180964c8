"""The flight recorder under Lightning: what a resumed run reports, compared with the verdict of an outside judge."""

from __future__ import annotations

import dataclasses
import json
import queue
import re
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader, IterableDataset

from lightning_ckpt import ResumableCheckpoint
from tests.campaign.judging import Point
from tests.conftest import LIGHTNING, ScriptRunner
from tests.lightning_ckpt.exact_cases import Model
from tests.lightning_ckpt.features import LOTTERY_GOES_BACK
from tests.support.open_files import open_files

SCRIPT = """
    import dataclasses, json, sys
    from pathlib import Path
    from tests.campaign.judging import Point
    from tests.campaign.lightning_cases import BROKEN, CASES
    from tests.campaign.lightning_runs import judge

    points = [Point(name, tuple(saves), tuple(dies), *rest) for name, saves, dies, *rest in json.loads(sys.argv[2])]
    found = judge({**CASES, **BROKEN}[sys.argv[1]], Path(sys.argv[3]), points)
    print(json.dumps({name: dataclasses.asdict(judgement) for name, judgement in found.items()}))
"""

MIDDLE, END = Point("middle", (1, 1), (1, 4)), Point("end", (1, -1), (2, 2))
EARLY = Point("early", (0, 3), (0, 5))
KILLED = Point("killed", (1, 2), (1, 5), really=True)
UNRECORDED = Point("unrecorded", (1, 3), (1, 5), leaves_records=False)


def judged(fork_script: ScriptRunner, directory: Path, name: str, *points: Point) -> list[dict[str, Any]]:
    asked = json.dumps([dataclasses.astuple(point) for point in points])
    done = fork_script(SCRIPT, name, asked, directory, modules=LIGHTNING)
    found: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return [found[point.name] for point in points]


@pytest.mark.extended_cells(
    "trainer: validates in mid-epoch-points1", "loader: two workers, counted noise-points2", "model: grows-points3"
)
@pytest.mark.parametrize(
    ("name", "points"),
    [
        # in EARLY, there are gradients that no optimizer has used yet
        ("trainer: accumulates, two workers", (KILLED, EARLY)),
        ("trainer: validates in mid-epoch", (MIDDLE, END)),
        ("loader: two workers, counted noise", (MIDDLE, END)),
        ("model: grows", (MIDDLE, END)),
    ],
)
def test_an_exact_resume_says_that_its_steps_are_equal(
    fork_script: ScriptRunner, tmp_path: Path, name: str, points: tuple[Point, ...]
) -> None:
    for point, found in zip(points, judged(fork_script, tmp_path, name, *points), strict=True):
        assert (found["verdict"], found["warned"]) == ("exact", []), found
        repeated = "1 repeated step equals" if point is EARLY else "2 repeated steps equal"
        assert found["recorder"] == f"{repeated} the first run's, bit for bit"


@pytest.mark.extended_cells("batch size finder")
@pytest.mark.parametrize("name", ["learning rate finder in epochs", "batch size finder"])
def test_a_fit_in_which_a_callback_runs_the_loops_is_compared(
    fork_script: ScriptRunner, tmp_path: Path, name: str
) -> None:
    point = Point("late", (2, 1), (2, 4))
    (found,) = judged(fork_script, tmp_path, f"callback: {name}", point)
    assert found["verdict"] == "exact", (found["verdict"], found["warned"], found["wrong"], found["differs"])
    assert found["recorder"] == "2 repeated steps equal the first run's, bit for bit"


@pytest.mark.sampled(2)
@pytest.mark.extended_cells(
    "forgets a buffer-weights",
    "forgets the order-data",
    "forgets the gradients-weights",
)
@pytest.mark.parametrize(
    ("name", "differs"),
    [
        ("forgets the generators", "generators"),
        ("forgets a batch", "data"),
        ("forgets a moment", "weights"),
        ("forgets a buffer", "weights"),
        ("forgets a schedule", "rates"),
        ("forgets the gradients", "weights"),
        ("forgets the order", "data"),
        ("forgets the modes", "loss"),
    ],
)
def test_the_recorder_alone_sees_what_a_resume_does_not_have(
    fork_script: ScriptRunner, tmp_path: Path, name: str, differs: str
) -> None:
    (found,) = judged(fork_script, tmp_path, name, MIDDLE)
    assert found["verdict"] == "said", found
    assert differs in found["differs"]
    assert [text for text in found["warned"] if "had 5 batches" not in text] == []


def test_gradients_that_are_not_there_are_seen_before_the_optimizer_steps(
    fork_script: ScriptRunner, tmp_path: Path
) -> None:
    (found,) = judged(fork_script, tmp_path, "forgets the gradients", EARLY)
    assert found["verdict"] == "said", found
    assert found["differs"] == ["gradients"]


def test_the_length_of_the_epoch_alone_tells_of_a_batch_that_a_resume_left_out(
    fork_script: ScriptRunner, tmp_path: Path
) -> None:
    point = Point("late", (2, 1), (2, 4))  # after two whole epochs
    (found,) = judged(fork_script, tmp_path, "forgets a batch, no recorder", point)
    assert found["wrong"] and not found["recorder"]
    assert [re.findall(r"epoch 2 had 5 batches, but earlier ones had 6", text) for text in found["warned"]] == [
        ["epoch 2 had 5 batches, but earlier ones had 6"]
    ]


@pytest.mark.sampled(1)
@pytest.mark.extended_cells("model: datamodule, drawn in setup-data")
@pytest.mark.parametrize(
    ("name", "differs"),
    [
        ("loader: two workers, noise that flips", "data"),
        ("model: datamodule, drawn in setup", "data"),
        ("model: attribute: int", "loss"),
    ],
)
def test_state_that_nobody_captures_is_seen_by_the_recorder(
    fork_script: ScriptRunner, tmp_path: Path, name: str, differs: str
) -> None:
    (found,) = judged(fork_script, tmp_path, name, MIDDLE)
    assert found["wrong"] and differs in found["differs"], found


@pytest.mark.sampled(1)
@pytest.mark.extended_cells(
    "kept: a cache that draws-point4-`_drawn` of kept_lightning.py",
    "kept: a dataclass in a global-point1-`PROGRESS.total` of kept_lightning.py",
    "kept: attributes of the class-point2-`losses` of OfTheClass in kept_lightning.py",
    "kept: a bounded cache-point5-`_norm_then` of kept_lightning.py",
    "kept: a cached property in a global-point7-`BEGUN.norm` of kept_lightning.py",
    "kept: a cache by its name-point8-`_norm_cache` of kept_lightning.py",
)
@pytest.mark.parametrize(
    ("name", "point", "variable"),
    [
        ("model: attribute: global", MIDDLE, "`_HELD.x` of lightning_cases.py"),
        ("kept: a dataclass in a global", END, "`PROGRESS.total` of kept_lightning.py"),
        ("kept: attributes of the class", MIDDLE, "`losses` of OfTheClass in kept_lightning.py"),
        ("kept: an average in closures of callbacks", END, ".shadow` of LambdaCallback"),
        ("kept: a cache that draws", EARLY, "`_drawn` of kept_lightning.py"),
        ("kept: a bounded cache", MIDDLE, "`_norm_then` of kept_lightning.py"),
        ("kept: a cached method", MIDDLE, "`at` of Curve in kept_lightning.py"),
        ("kept: a cached property in a global", END, "`BEGUN.norm` of kept_lightning.py"),
        ("kept: a cache by its name", MIDDLE, "`_norm_cache` of kept_lightning.py"),
    ],
)
def test_variables_of_the_script_that_a_resume_has_lost_are_named(
    fork_script: ScriptRunner, tmp_path: Path, name: str, point: Point, variable: str
) -> None:
    (found,) = judged(fork_script, tmp_path, name, point)
    assert found["wrong"]
    (said,) = [text for text in found["warned"] if "begins without variables of the script" in text]
    assert variable in said


@pytest.mark.extended_cells(
    "kept: exact: restores a global",
    "kept: exact: makes lazily",
    "kept: exact: a cache that is cleared",
    "kept: exact: tells",
)
@pytest.mark.parametrize(
    "name",
    [
        "kept: exact: tells",
        "kept: exact: restores a global",
        "kept: exact: caches",
        "kept: exact: makes lazily",
        "kept: exact: a cache that is cleared",
    ],
)
def test_variables_that_the_script_restores_or_only_tells_are_not_named(
    fork_script: ScriptRunner, tmp_path: Path, name: str
) -> None:
    found = judged(fork_script, tmp_path, name, MIDDLE, END)
    assert [(one["verdict"], one["warned"]) for one in found] == [("exact", [])] * 2


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "point", "words"),
    [
        ("callback: pruning, each epoch", MIDDLE, "of the pruning are not in the checkpoint"),
        ("callback: pruning, lottery", EARLY, "goes back to other weights"),
    ],
)
def test_pruning_that_a_resume_does_not_continue_is_said(
    fork_script: ScriptRunner, tmp_path: Path, name: str, point: Point, words: str
) -> None:
    (found,) = judged(fork_script, tmp_path, name, point)
    if "lottery" in name and not LOTTERY_GOES_BACK:
        assert found["verdict"] == "exact", found
        return
    assert found["verdict"] == "said", found
    assert words in found["warned"][0]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("callback: pruning, not permanent", "prune.identity"),
        ("model: adds a parameter group", "the checkpoint's optimizers do not fit"),
    ],
)
def test_what_cannot_be_loaded_is_an_error_that_says_why(
    fork_script: ScriptRunner, tmp_path: Path, name: str, words: str
) -> None:
    (found,) = judged(fork_script, tmp_path, name, END)
    assert found["verdict"] == "refused"
    assert words in found["warned"][0]


def test_another_batch_is_said_when_it_is_read_again(fork_script: ScriptRunner, tmp_path: Path) -> None:
    (found,) = judged(fork_script, tmp_path, "loader: stream clock", UNRECORDED)
    assert "(epoch 1, batch 0) was read again" in found["recorder"]
    assert found["differs"] == ["data"]


@pytest.mark.extended
@pytest.mark.parametrize("name", ["loader: stream noise", "loader: stream global"])
def test_a_stream_that_draws_and_is_read_again_as_it_was_gives_no_warning(
    fork_script: ScriptRunner, tmp_path: Path, name: str
) -> None:
    recorded, unrecorded, end = judged(fork_script, tmp_path, name, MIDDLE, UNRECORDED, END)
    assert [recorded["verdict"], unrecorded["verdict"], end["verdict"]] == ["exact"] * 3, (recorded, unrecorded, end)


def test_a_stream_whose_order_depends_on_other_draws_is_said(fork_script: ScriptRunner, tmp_path: Path) -> None:
    (found,) = judged(fork_script, tmp_path, "loader: chained streams", UNRECORDED)
    assert found["verdict"] == "said", found
    assert "was read again" in found["recorder"]


class Draws(BoringModel):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch * torch.rand(1), batch_idx)


class NoisyStream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return (torch.full((32,), float(number)) + torch.rand(32) for number in range(12))


def test_a_stream_that_draws_is_known_to_in_a_run_that_was_itself_resumed(tmp_path: Path) -> None:
    for until in (3, 5, 8):  # all in one epoch
        callback = ResumableCheckpoint(tmp_path, every_n_train_steps=1)
        settings: Any = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = Trainer(accelerator="cpu", max_steps=until, callbacks=[callback], **settings)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(Draws(), DataLoader(NoisyStream()), ckpt_path="last" if until > 3 else None)
        assert [str(one.message) for one in caught if "exact" in str(one.message)] == []


class ReadsAhead(DataLoader[Any]):
    """A loader as users write it, whose thread takes batches ahead of the training."""

    def __iter__(self) -> Any:
        taken: queue.Queue[Any] = queue.Queue()
        batches = super().__iter__()

        def read() -> None:
            for batch in batches:
                taken.put(batch)
            taken.put(None)

        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
        return iter(taken.get, None)


@pytest.mark.parametrize(("steps", "is_said"), [(2, True), (4, False)])
def test_a_loader_whose_thread_reads_ahead_is_said_in_the_middle_of_an_epoch(
    tmp_path: Path, steps: int, is_said: bool
) -> None:
    data = RandomDataset(32, 8)
    for until in (steps + 1, 8):  # an epoch has 4 steps
        callback = ResumableCheckpoint(tmp_path, every_n_train_steps=steps)
        settings: Any = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = Trainer(accelerator="cpu", max_steps=until, callbacks=[callback], **settings)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loader = ReadsAhead(data, batch_size=2, shuffle=True)
            trainer.fit(BoringModel(), loader, ckpt_path="last")
    found = [str(warning.message) for warning in caught if "exact" in str(warning.message)]
    assert ["a thread of the data loader takes batches ahead" in text for text in found] == [True] * is_said


def test_an_epoch_with_fewer_batches_is_said(fork_script: ScriptRunner, tmp_path: Path) -> None:
    middle, end = judged(fork_script, tmp_path, "loader: stateful loader, stuck stream", UNRECORDED, END)
    assert "epoch 2 had 2 batches, but earlier ones had 6 or more" in middle["warned"][0]
    assert "epoch 2 had 0 batches, but earlier ones had 6 or more" in end["warned"][0]


@pytest.mark.extended
@pytest.mark.parametrize("name", ["callback: lambda that doubles the batch", "model: carries a hidden state"])
def test_what_hooks_of_an_epochs_start_set_is_not_missed(fork_script: ScriptRunner, tmp_path: Path, name: str) -> None:
    (found,) = judged(fork_script, tmp_path, name, END)
    assert found["verdict"] == "exact", (found["verdict"], found["warned"], found["wrong"], found["differs"])


@pytest.mark.extended
def test_hooks_of_an_epochs_end_are_not_taken_for_one_of_a_batchs(fork_script: ScriptRunner, tmp_path: Path) -> None:
    (found,) = judged(fork_script, tmp_path, "model: teacher follows at epoch end", MIDDLE)
    assert found["verdict"] == "exact", (found["verdict"], found["warned"], found["wrong"], found["differs"])
    (found,) = judged(fork_script, tmp_path / "batch", "model: teacher follows at batch end", MIDDLE)
    assert "changes weights or buffers" in found["warned"][0]


def test_the_recorder_can_be_left_out(tmp_path: Path) -> None:
    for recorder in (True, False):
        directory = tmp_path / str(recorder) / "checkpoints"
        callback = ResumableCheckpoint(directory, every_n_train_steps=1, recorder=recorder)
        trainer = Trainer(accelerator="cpu", max_steps=2, logger=False, enable_progress_bar=False, callbacks=[callback])
        trainer.fit(Model({}))
        assert (directory.parent / ".checkpoints.flight-rank0").exists() is recorder


def test_a_fit_that_raises_leaves_no_record_open(tmp_path: Path) -> None:
    class Raises(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 2:
                assert open_files(tmp_path)
                raise RuntimeError("out of memory")
            return super().training_step(batch, batch_idx)

    trainer = Trainer(
        max_steps=4,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ResumableCheckpoint(tmp_path / "checkpoints")],
    )
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.fit(Raises())
    assert open_files(tmp_path) == []
