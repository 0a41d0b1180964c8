"""``save_state`` to a local disk with uploads from there, and ``load_state`` from the nearest complete copy."""

from __future__ import annotations

import copy
import logging
import os
import shutil
import uuid
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from accelerate.state import GradientState
from accelerate.utils import ProjectConfiguration

from accelerate_ckpt import CheckpointConfig, attach
from accelerate_ckpt._state.session import session_of
from accelerate_ckpt.config import OptionError
from ckpt_core import Catalog, verify
from ckpt_core.errors import StorageError
from ckpt_core.storage import Fault, FaultyStorage, LocalStorage
from tests.accelerate_ckpt.training import Run, assert_same
from tests.support.damage import flip_bit

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


class Place:
    """A project on a local disk, and a store in memory."""

    def __init__(self, folder: Path) -> None:
        self.local = folder / "local"
        self.remote = f"memory://{uuid.uuid4().hex}/run"

    def accelerator(self, strategy: str = "async", *, total_limit: int | None = None, **options: Any) -> Accelerator:
        GradientState._reset_state()  # as in a new process
        project = ProjectConfiguration(str(self.local), automatic_checkpoint_naming=True, total_limit=total_limit)
        accelerator = Accelerator(project_config=project, gradient_accumulation_steps=2)
        return attach(accelerator, strategy, **{"local_dir": self.local, "upload_to": self.remote, **options})

    def numbers(self, root: Any) -> list[int]:
        infos = Catalog(f"{root}/checkpoints", suffix="").checkpoints()
        return sorted(int(info.path.rpartition("_")[2]) for info in infos)

    def path(self, number: int) -> str:
        return str(self.local / "checkpoints" / f"checkpoint_{number}")


def saved(run: Run, count: int) -> Any:
    """Train and save ``count`` times; return the state at the last save."""
    for _ in range(count):
        run.train(3)
        run.accelerator.save_state()
    state = copy.deepcopy(run.state())
    run.accelerator.end_training()
    return state


@pytest.mark.each_value
@pytest.mark.parametrize("strategy", ["sync", "async", "sharded"])
@pytest.mark.parametrize("disk", ["whole", "damaged", "empty"])
def test_a_run_goes_on_from_the_nearest_copy(
    strategy: str, disk: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = Place(tmp_path)
    whole = Run(place.accelerator(strategy))
    state = saved(whole, 2)
    whole.train(7)
    assert place.numbers(place.remote) == place.numbers(place.local) == [0, 1]
    if disk == "empty":
        shutil.rmtree(place.local)
    elif disk == "damaged":
        files = Path(place.path(1)).glob("*.safetensors")
        largest = max(files, key=os.path.getsize)
        flip_bit(largest, -8)
    resumed = Run(place.accelerator(strategy), seed=1)
    resumed.accelerator.load_state()
    assert_same(resumed.state(), state)
    took = [record for record in caplog.records if "instead of the local one" in record.getMessage()]
    assert len(took) == (disk == "damaged")
    resumed.train(7)
    assert resumed.losses == whole.losses[6:]
    resumed.accelerator.save_state()
    resumed.accelerator.end_training()
    assert place.numbers(place.remote) == [0, 1, 2], "counted on from what the store has"


def test_the_limit_is_of_both_tiers(tmp_path: Path) -> None:
    place = Place(tmp_path)
    saved(Run(place.accelerator(total_limit=2, keep_local=1)), 4)
    assert place.numbers(place.remote) == [2, 3]
    assert place.numbers(place.local) == [3]
    resumed = Run(place.accelerator(total_limit=2, keep_local=1), seed=1)
    resumed.accelerator.load_state()
    saved(resumed, 1)
    assert place.numbers(place.remote) == [3, 4], "those of the run before count, wherever they are"
    assert place.numbers(place.local) == [4]


def test_a_name_that_only_the_store_has_is_taken(tmp_path: Path) -> None:
    place = Place(tmp_path)
    saved(Run(place.accelerator(keep_local=1)), 2)
    assert place.numbers(place.local) == [1]
    run = Run(place.accelerator(), seed=1)
    with pytest.raises(ValueError, match=r"checkpoint_0 .* already exists"):
        run.accelerator.save_state()
    run.accelerator.end_training()
    verify(f"{place.remote}/checkpoints/checkpoint_0")


def test_a_project_on_the_store(tmp_path: Path) -> None:
    place = Place(tmp_path)
    GradientState._reset_state()
    project = ProjectConfiguration(place.remote, automatic_checkpoint_naming=True, total_limit=1)
    options = {"local_dir": str(place.local), "upload_to": place.remote}
    run = Run(attach(Accelerator(project_config=project, gradient_accumulation_steps=2), "async", **options))
    saved(run, 3)
    assert place.numbers(place.remote) == place.numbers(place.local) == [2]


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_a_store_that_is_down(
    on_error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place = Place(tmp_path)
    monkeypatch.chdir(tmp_path)  # where the local storage makes a directory of the store's name
    down = FaultyStorage(LocalStorage(), [Fault("create", number=None, error=OSError(5, "it is down"))])
    monkeypatch.setattr("ckpt_core.tiers.Tiers.storage", lambda *_: down)
    run = Run(place.accelerator(on_error=on_error))
    if on_error == "raise":
        with pytest.raises(StorageError, match="it is down"):
            saved(run, 6)
    else:
        session = session_of(run.accelerator)
        assert session is not None
        with caplog.at_level(logging.WARNING):
            saved(run, 2)
        assert session.checkpointer.failures >= 2
        assert "it is down" in caplog.text
        assert place.numbers(place.local) == [0, 1]


def test_the_options_come_from_all_sources(tmp_path: Path) -> None:
    (tmp_path / "options.yaml").write_text("local_dir: /fast\nkeep_local: 3\n")
    config = CheckpointConfig.from_sources(
        {"upload_to": "s3://bucket/run", "config": str(tmp_path / "options.yaml")},
        variables={"ACCELERATE_CKPT_KEEP_LOCAL": "2"},
    )
    assert (config.local_dir, config.upload_to, config.keep_local) == ("/fast", "s3://bucket/run", 2)
    for options, message in (
        ({"local_dir": "/fast"}, "local_dir needs upload_to"),
        ({"upload_to": "/slow"}, "upload_to needs local_dir"),
        ({"keep_local": 1}, "keep_local needs local_dir and upload_to"),
        ({"keep_local": 0}, "keep_local must be a whole number of at least 1"),
        ({"local_dir": ""}, "local_dir must be a directory"),
    ):
        with pytest.raises(OptionError, match=message):
            CheckpointConfig(**options)  # type: ignore[arg-type]
