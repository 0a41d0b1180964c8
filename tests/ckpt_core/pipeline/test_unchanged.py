"""Frozen tensors, unchanged between two saves, are not written again; every checkpoint is whole without the others."""

from __future__ import annotations

import logging
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from ckpt_core import CheckpointCorruptedError, DirectoryCheckpointer, Kind, Part
from ckpt_core._pipeline.unchanged import LINKS_BETWEEN_READINGS
from ckpt_core.state.kinds import frozen_parameters
from ckpt_core.storage import FaultyStorage, storage_for
from tests.support.fine_tuning import FineTune, bytes_written, copies, counted, files_with, load_model
from tests.support.states import assert_same_state

STRATEGIES = ["sync", "async"]
UNCHANGED = "unchanged"
STEADY = 2  # number of saves until what does not change has been written, and is linked


def train_and_save(
    run: FineTune, checkpointer: DirectoryCheckpointer, path: Path | str, *, kind: Kind = Kind.SHARDED
) -> dict[str, torch.Tensor]:
    """Train a step and save; return the model that was saved."""
    run.step()
    checkpointer.save(run.parts(kind), path)
    checkpointer.wait()
    return {key: value.clone() for key, value in run.model().items()}


def saved(root: Path, count: int, run: FineTune, **options: Any) -> dict[Path, dict[str, torch.Tensor]]:
    """Save ``count`` times; return the models by path."""
    with DirectoryCheckpointer(slice_replicated=True, **options) as checkpointer:
        return {root / f"step={n}": train_and_save(run, checkpointer, root / f"step={n}") for n in range(count)}


def inodes(path: Path) -> set[int]:
    return {file.stat().st_ino for file in path.iterdir()}


@pytest.mark.parametrize("place", ["local", "memory"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_save_writes_what_is_trained_and_little_more(strategy: Any, place: str, tmp_path: Path) -> None:
    root = str(tmp_path) if place == "local" else f"memory://{uuid.uuid4().hex}"
    storage = counted(None if place == "local" else storage_for(root, None))
    run = FineTune.new(width=600)
    written, models = [], {}
    with DirectoryCheckpointer(strategy=strategy, storage=storage, slice_replicated=True) as checkpointer:
        for number in range(STEADY + 3):
            before = bytes_written(storage)
            models[f"{root}/{number}"] = train_and_save(run, checkpointer, f"{root}/{number}")
            written.append(bytes_written(storage) - before)
    everything = run.trained_bytes + sum(tensor.nbytes for tensor in run.frozen.values())
    assert all(count > everything for count in written[: STEADY - 1])
    # Only blocks of the disk, headers, digests and the manifest are added.
    overhead = 10 * 4096
    assert all(run.trained_bytes < count < run.trained_bytes * 1.05 + overhead for count in written[STEADY - 1 :])
    assert copies(storage) == STEADY + 2
    for path, model in models.items():
        assert_same_state(load_model(path, storage), model)


def test_links_are_of_one_file_and_other_programs_read_them(tmp_path: Path) -> None:
    run = FineTune.new()
    models = saved(tmp_path, STEADY + 1, run)
    paths = list(models)
    kept = [files_with(path, UNCHANGED) for path in paths]
    assert [[file.stat().st_nlink for file in files] for files in kept] == [[3], [3], [3]]
    assert len(inodes(paths[1]) & inodes(paths[2])) == 1
    with safe_open(kept[2][0], "pt") as file:
        assert set(file.keys()) == set(run.frozen), "large and small ones"
        assert all(torch.equal(file.get_tensor(key), value) for key, value in run.frozen.items())


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_deleting_one_leaves_the_others_whole(gone: int, tmp_path: Path) -> None:
    models = saved(tmp_path, STEADY + 1, FineTune.new())
    shutil.rmtree(tmp_path / f"step={gone}")
    for path, model in models.items():
        if path.name != f"step={gone}":
            assert_same_state(load_model(path), model)


def test_the_checkpoint_before_may_be_gone_when_the_next_save_comes(tmp_path: Path) -> None:
    run = FineTune.new()
    with DirectoryCheckpointer(slice_replicated=True) as checkpointer:
        for number in range(STEADY + 3):
            model = train_and_save(run, checkpointer, tmp_path / str(number))
            assert_same_state(load_model(tmp_path / str(number)), model)
            checkpointer.remove(tmp_path / str(number))
            checkpointer.wait()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("place", ["local", "memory"])
def test_saving_over_the_same_path(place: str, strategy: Any, tmp_path: Path) -> None:
    root = str(tmp_path) if place == "local" else f"memory://{uuid.uuid4().hex}"
    storage = counted(None if place == "local" else storage_for(root, None))
    run = FineTune.new()
    with DirectoryCheckpointer(strategy=strategy, storage=storage, slice_replicated=True) as checkpointer:
        for _ in range(STEADY + 3):
            model = train_and_save(run, checkpointer, f"{root}/last")
            assert_same_state(load_model(f"{root}/last", storage), model)
    assert copies(storage) == STEADY + 2
    if place == "local":
        assert files_with(tmp_path / "last", UNCHANGED)[0].stat().st_nlink == 1
    assert len(storage.list(f"{root}/last")) == 6, "of the ones before, nothing is left"


def test_a_state_that_is_made_anew_for_each_save_is_compared_by_its_bytes(tmp_path: Path) -> None:
    run = FineTune.new(width=300)
    storage = counted()
    written = []
    with DirectoryCheckpointer(storage=storage, slice_replicated=True, strategy="sync") as checkpointer:
        for number in range(STEADY + 3):
            run.step()
            parts = [Part(part.name, _copied(part.state), part.kind, part.frozen) for part in run.parts()]
            before = bytes_written(storage)
            checkpointer.save(parts, tmp_path / str(number))
            written.append(bytes_written(storage) - before)
            assert_same_state(load_model(tmp_path / str(number)), run.model())
    assert written[-1] == written[-2] == written[1] < written[0] / 4
    assert copies(storage) == STEADY + 2


def _copied(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _copied(value) for key, value in tree.items()}
    return tree.clone() if isinstance(tree, torch.Tensor) else tree


def _by_data(tensor: torch.Tensor) -> None:
    tensor.data.add_(1.0)


def _by_numpy(tensor: torch.Tensor) -> None:
    tensor.numpy()[...] += 1.0


@pytest.mark.parametrize("change", [_by_data, _by_numpy])
@pytest.mark.parametrize("name", ["1.weight", "1.bias"])
def test_what_is_called_frozen_and_changes_is_saved(
    name: str, change: Callable[[torch.Tensor], None], tmp_path: Path
) -> None:
    run = FineTune.new()
    storage = counted()
    with DirectoryCheckpointer(storage=storage, slice_replicated=True, strategy="sync") as checkpointer:
        for number in range(STEADY + 3):
            if number in (2, 3):
                change(run.frozen[name])
            train_and_save(run, checkpointer, tmp_path / str(number))
            assert_same_state(load_model(tmp_path / str(number)), run.model())
    assert copies(storage) == 2, "at the second save and at the last one"


def test_a_tensor_that_is_trained_later(tmp_path: Path) -> None:
    run = FineTune.new()
    storage = counted()
    written = []
    with DirectoryCheckpointer(storage=storage, slice_replicated=True) as checkpointer:
        for number in range(8):
            if number == 5:
                run.trained["1.weight"] = run.frozen.pop("1.weight")
            before = bytes_written(storage)
            model = train_and_save(run, checkpointer, tmp_path / str(number))
            written.append(bytes_written(storage) - before)
            assert_same_state(load_model(tmp_path / str(number)), model)
    assert written[4] < written[0] / 3
    assert written[4] < written[-1] < written[0] / 1.1, "it, its moments and what was trained before, and no more"
    assert written[-1] == written[-2]


def test_changed_back_and_forth(tmp_path: Path) -> None:
    run = FineTune.new()
    weight = run.frozen["1.weight"]
    values = [weight.clone(), weight + 1.0]
    with DirectoryCheckpointer(slice_replicated=True, strategy="sync") as checkpointer:
        for number, which in enumerate([0, 0, 0, 1, 0, 1, 1, 1, 0, 0]):
            weight.copy_(values[which])
            model = train_and_save(run, checkpointer, tmp_path / str(number))
            assert_same_state(load_model(tmp_path / str(number)), model)


def test_little_is_not_worth_a_file(tmp_path: Path) -> None:
    for path in saved(tmp_path, STEADY + 1, FineTune.new(width=60)):
        assert not files_with(path, UNCHANGED)


def test_a_part_that_is_frozen_whole_is_linked_whole(tmp_path: Path) -> None:
    run = FineTune.new()
    with DirectoryCheckpointer(slice_replicated=True, strategy="sync") as checkpointer:
        for number in range(3):
            part = Part("teacher", run.frozen, Kind.REPLICATED, frozenset(run.frozen))
            checkpointer.save([part], tmp_path / str(number))
    assert [file.stat().st_nlink for file in files_with(tmp_path / "2", "safetensors")] == [3]
    assert not files_with(tmp_path / "2", UNCHANGED)


def test_names_of_frozen_parameters() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    assert frozen_parameters(model) == frozenset()
    model[0].requires_grad_(False)
    model[1].weight = model[0].weight
    assert frozen_parameters(model) == {"0.weight", "0.bias", "1.weight"}, "tied ones by each of their names"
    wrapped = torch.nn.ModuleDict({"module": model, "_orig_mod": model})
    assert {"module.0.bias", "0.bias"} <= frozen_parameters(wrapped)


@pytest.mark.parametrize("frozen", [True, False])
def test_files_for_other_programs_stay_one(frozen: bool, tmp_path: Path) -> None:
    run = FineTune.new()
    with DirectoryCheckpointer(strategy="sync") as checkpointer:
        for number in range(4):
            if not frozen:
                run.step()
            names = frozenset(run.model() if frozen else run.frozen)
            checkpointer.save([Part("model", run.model(), Kind.REPLICATED, names)], tmp_path / str(number))
            assert not files_with(tmp_path / str(number), UNCHANGED)
    file = tmp_path / "3" / "model.safetensors"
    assert file.stat().st_nlink == (4 if frozen else 1)
    with safe_open(file, "pt") as opened:
        assert set(opened.keys()) == set(run.model())


def test_nothing_is_linked_when_it_is_not_wanted(tmp_path: Path) -> None:
    for path in saved(tmp_path, STEADY + 1, FineTune.new(), link_unchanged=False):
        assert {file.stat().st_nlink for file in path.iterdir()} == {1}


# ---- damage
# ------------------------------------------------------------------------------------------------------------------


def damage(path: Path) -> None:
    """Flip a byte in the middle of the file of unchanged tensors, and with it of all its links."""
    (file,) = files_with(path, UNCHANGED)
    with file.open("r+b") as opened:
        opened.seek(file.stat().st_size // 2)
        byte = opened.read(1)
        opened.seek(-1, 1)
        opened.write(bytes([byte[0] ^ 1]))


def test_damage_does_not_spread_for_ever(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = FineTune.new()
    whole = []
    with DirectoryCheckpointer(slice_replicated=True, strategy="sync") as checkpointer:
        for number in range(LINKS_BETWEEN_READINGS + 6):
            model = train_and_save(run, checkpointer, tmp_path / str(number))
            if number == 3:
                damage(tmp_path / "3")
            try:
                assert_same_state(load_model(tmp_path / str(number)), model)
                whole.append(number)
            except CheckpointCorruptedError:
                assert not caplog.records
    assert whole == [0, 1, 2, *range(LINKS_BETWEEN_READINGS + 1, LINKS_BETWEEN_READINGS + 6)]
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "damaged" in caplog.text


def resumed(root: Path, run: FineTune, name: str, storage: FaultyStorage) -> None:
    with DirectoryCheckpointer(slice_replicated=True, strategy="sync", storage=storage) as checkpointer:
        with checkpointer.load(root / "step=3") as checkpoint:
            checkpoint.load("model")
        model = train_and_save(run, checkpointer, root / name)
    assert_same_state(load_model(root / name), model)


def test_the_first_save_of_a_resumed_run_links_to_what_was_loaded(tmp_path: Path) -> None:
    run = FineTune.new()
    saved(tmp_path, 4, run)
    storage = counted()
    resumed(tmp_path, run, "next", storage)
    assert files_with(tmp_path / "next", UNCHANGED)[0].stat().st_nlink == 5
    assert bytes_written(storage) < sum(tensor.nbytes for tensor in run.frozen.values()) / 2


def test_another_file_of_the_same_size_is_not_taken_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = FineTune.new()
    with DirectoryCheckpointer(slice_replicated=True, strategy="sync") as checkpointer:
        for number in range(STEADY):
            train_and_save(run, checkpointer, tmp_path / str(number))
        (file,) = files_with(tmp_path / "1", UNCHANGED)
        other = file.read_bytes().replace(b"  ", b"\t ", 1)  # the same to safetensors, but in other bytes
        file.unlink()
        file.write_bytes(other)
        model = train_and_save(run, checkpointer, tmp_path / "next")
    assert_same_state(load_model(tmp_path / "next"), model)
    assert "damaged" in caplog.text


def test_a_resumed_run_reads_back_what_it_links_to(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = FineTune.new()
    saved(tmp_path, 4, run)
    with DirectoryCheckpointer(slice_replicated=True, strategy="sync") as checkpointer:
        with checkpointer.load(tmp_path / "step=3"):
            damage(tmp_path / "step=3")  # right after the load
        model = train_and_save(run, checkpointer, tmp_path / "next")
        assert "damaged" in caplog.text
        assert_same_state(load_model(tmp_path / "next"), model)
        train_and_save(run, checkpointer, tmp_path / "after")
    assert files_with(tmp_path / "after", UNCHANGED)[0].stat().st_nlink == 2
    with pytest.raises(CheckpointCorruptedError):
        load_model(tmp_path / "step=3")


@pytest.mark.parametrize("spoilt", ["manifest.json", "rank-00001-of-00001.digests", UNCHANGED])
def test_a_resumed_run_writes_everything_when_what_was_loaded_has_changed(spoilt: str, tmp_path: Path) -> None:
    run = FineTune.new()
    saved(tmp_path, 4, run)
    storage = counted()
    with DirectoryCheckpointer(slice_replicated=True, strategy="sync", storage=storage) as checkpointer:
        checkpointer.load(tmp_path / "step=3").close()
        (file,) = files_with(tmp_path / "step=3", spoilt)
        file.write_bytes(b"{" + file.read_bytes()[1:] + b" ")
        model = train_and_save(run, checkpointer, tmp_path / "next")
    assert_same_state(load_model(tmp_path / "next"), model)
    assert bytes_written(storage) > sum(tensor.nbytes for tensor in run.frozen.values())


def test_a_file_of_the_caller_with_another_link_is_copied(tmp_path: Path) -> None:
    mine = tmp_path / "mine.txt"
    mine.write_text("old")
    run = FineTune.new()
    with DirectoryCheckpointer(strategy="sync") as checkpointer:
        checkpointer.save(
            run.parts(), tmp_path / "a", write_files=lambda directory: Path(directory, "its.txt").hardlink_to(mine)
        )
    with mine.open("r+") as file:
        file.write("new")
    assert (tmp_path / "a" / "its.txt").read_text() == "old"
    load_model(tmp_path / "a")


def test_saves_to_another_store_take_nothing_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    run = FineTune.new()
    store = f"memory://{uuid.uuid4().hex}"
    with DirectoryCheckpointer(slice_replicated=True, strategy="sync") as checkpointer:
        for number in range(STEADY):
            train_and_save(run, checkpointer, tmp_path / str(number))
        for root in (store, str(tmp_path), store, str(tmp_path)):
            model = train_and_save(run, checkpointer, f"{root}/other")
            assert_same_state(load_model(f"{root}/other"), model)
    assert files_with(tmp_path / "1", UNCHANGED)[0].stat().st_nlink == 2
    assert "could not be copied" not in caplog.text, "it was not even tried"


@pytest.mark.parametrize("place", ["local", "memory"])
def test_a_checkpoint_with_linked_files_is_copied_over_another(place: str, tmp_path: Path) -> None:
    root = str(tmp_path) if place == "local" else f"memory://{uuid.uuid4().hex}"
    run = FineTune.new()
    with DirectoryCheckpointer(slice_replicated=True, strategy="sync") as checkpointer:
        for number in range(STEADY + 1):
            model = train_and_save(run, checkpointer, f"{root}/{number}")
            checkpointer.copy(f"{root}/{number}", f"{root}/last")
            assert_same_state(load_model(f"{root}/last"), model)
