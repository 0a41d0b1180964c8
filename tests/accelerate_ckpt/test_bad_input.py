"""Errors name what is wrong with a checkpoint or a call, and are raised before anything is changed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from accelerate_ckpt import attach
from accelerate_ckpt.config import OptionError
from ckpt_core.errors import (
    CheckpointCorruptedError,
    CheckpointError,
    CheckpointFormatError,
    CheckpointNotFoundError,
    StateMismatchError,
)
from tests.accelerate_ckpt.training import Counter, Run, assert_same, model_of

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


def ours() -> Accelerator:
    return attach(Accelerator(), "sync")


@pytest.fixture
def stock(tmp_path: Path) -> Path:
    """Return a checkpoint that stock Accelerate saved after three steps."""
    run = Run(Accelerator())
    run.accelerator.register_for_checkpointing(Counter(5))
    run.train(3)
    run.accelerator.save_state(str(tmp_path / "stock"))
    return tmp_path / "stock"


def assert_refused(accelerator: Accelerator, path: Path, error: type[Exception], *said: str) -> None:
    """Load, and check that this error is raised with these words and that nothing has changed."""
    before = [{k: v.clone() for k, v in model.state_dict().items()} for model in accelerator._models]
    random_state = torch.get_rng_state()
    with pytest.raises(error) as caught:
        accelerator.load_state(str(path))
    for words in said:
        assert words in str(caught.value)
    assert_same([dict(model.state_dict()) for model in accelerator._models], before)
    assert torch.equal(torch.get_rng_state(), random_state)


# ---- checkpoints of stock Accelerate ---------------------------------------------------------------------------------


def test_a_checkpoint_of_stock_accelerate_is_loaded(stock: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = Run(Accelerator()).train(3).state()
    run, counter = Run(ours(), seed=1), Counter()
    run.accelerator.register_for_checkpointing(counter)
    run.accelerator.load_state(str(stock))
    assert_same(run.state(), expected)
    assert counter.count == 5
    assert "saved by stock Accelerate" in caplog.text
    caplog.clear()
    run.accelerator.load_state(str(stock))
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("model.safetensors", "model.safetensors or pytorch_model.bin"),
        ("optimizer.bin", "no optimizer.bin"),
        ("scheduler.bin", "no scheduler.bin"),
        ("random_states_0.pkl", "the random states of rank 0"),
    ],
)
def test_a_partial_stock_checkpoint_is_refused(stock: Path, name: str, said: str) -> None:
    (stock / name).unlink()
    run = Run(ours(), seed=1)
    run.accelerator.register_for_checkpointing(Counter())
    assert_refused(run.accelerator, stock, CheckpointCorruptedError, said, str(stock), "earlier checkpoint")


def test_a_rank_without_random_states_is_named(stock: Path) -> None:
    # as if two ranks had saved, and only the random states of rank 1 were there
    (stock / "random_states_0.pkl").rename(stock / "random_states_1.pkl")
    run = Run(ours(), seed=1)
    run.accelerator.register_for_checkpointing(Counter())
    assert_refused(run.accelerator, stock, CheckpointCorruptedError, "random_states_0.pkl")


def test_torn_random_states_are_not_passed_over(stock: Path) -> None:
    path = stock / "random_states_0.pkl"
    path.write_bytes(path.read_bytes()[:100])
    run = Run(ours(), seed=1)
    run.accelerator.register_for_checkpointing(Counter())
    assert_refused(run.accelerator, stock, CheckpointCorruptedError, "random_states_0.pkl", "cannot be read")


def test_tensors_of_other_layouts_in_an_object_come_back(tmp_path: Path) -> None:
    held = {
        "coo": torch.eye(3).to_sparse(),
        "csr": torch.eye(3).to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    }

    class Holder:
        def state_dict(self) -> dict[str, Any]:
            return held

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.found = state

    holder, accelerator = Holder(), ours()
    accelerator.prepare(torch.nn.Linear(2, 2))
    accelerator.register_for_checkpointing(holder)
    accelerator.save_state(tmp_path / "saved")
    accelerator.load_state(tmp_path / "saved")
    assert {name: value.layout for name, value in holder.found.items()} == {k: v.layout for k, v in held.items()}
    assert torch.equal(holder.found["coo"].to_dense(), torch.eye(3))
    assert torch.equal(holder.found["csr"].to_dense(), torch.eye(3))
    assert torch.equal(holder.found["quantized"].int_repr(), held["quantized"].int_repr())


# ---- any checkpoint --------------------------------------------------------------------------------------------------


def saved_by_us(directory: Path, objects: int = 1) -> Path:
    run = Run(ours())
    run.accelerator.register_for_checkpointing(*(Counter(5) for _ in range(objects)))
    run.train(3)
    run.accelerator.save_state(directory / "ours")
    return directory / "ours"


@pytest.mark.parametrize("saved_by", ["ours", "stock"])
@pytest.mark.parametrize("registered", [0, 2])
def test_another_number_of_objects_is_refused_in_accelerates_words(
    tmp_path: Path, stock: Path, saved_by: str, registered: int
) -> None:
    path = stock if saved_by == "stock" else saved_by_us(tmp_path)
    run = Run(ours(), seed=1)
    run.accelerator.register_for_checkpointing(*(Counter() for _ in range(registered)))
    assert_refused(
        run.accelerator,
        path,
        StateMismatchError,
        f"Number of custom checkpoints in folder {path} does not match the number of registered objects:",
        f"\tFound checkpoints: 1\n\tRegistered objects: {registered}\n",
    )


def without_objects(accelerator: Accelerator, saved: Path) -> Path:
    accelerator.register_for_checkpointing(Counter())
    return saved


def test_another_model_is_refused_by_the_names_of_its_weights(tmp_path: Path) -> None:
    accelerator = ours()
    path = without_objects(accelerator, saved_by_us(tmp_path))
    accelerator.prepare(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4)))
    assert_refused(accelerator, path, StateMismatchError, "3.weight", str(path))


def test_a_model_of_another_width_is_refused(tmp_path: Path) -> None:
    accelerator = ours()
    path = without_objects(accelerator, saved_by_us(tmp_path))
    accelerator.prepare(model_of(0, width=8))
    assert_refused(accelerator, path, StateMismatchError, "0.weight")


def test_a_model_too_many_is_refused(tmp_path: Path) -> None:
    accelerator = ours()
    path = without_objects(accelerator, saved_by_us(tmp_path))
    accelerator.prepare(model_of(0), model_of(1))
    assert_refused(
        accelerator, path, StateMismatchError, "no model_1", "it has custom_0, model, optimizer, own, scheduler"
    )


def test_an_optimizer_of_other_parameters_is_refused(tmp_path: Path) -> None:
    accelerator = ours()
    path = without_objects(accelerator, saved_by_us(tmp_path))
    model = model_of(1)
    accelerator.prepare(model, torch.optim.AdamW(list(model.parameters())[:2]))
    assert_refused(accelerator, path, StateMismatchError, "groups of [2]", "optimizer")


def test_a_model_alone_may_be_loaded(tmp_path: Path) -> None:
    accelerator = ours()
    path = without_objects(accelerator, saved_by_us(tmp_path))
    expected = Run(Accelerator()).train(3).model.state_dict()
    model = accelerator.prepare(model_of(1))
    accelerator.load_state(path)
    assert_same(dict(model.state_dict()), dict(expected))


def test_missing_names_may_be_allowed(tmp_path: Path) -> None:
    accelerator = ours()
    path = without_objects(accelerator, saved_by_us(tmp_path))
    model = accelerator.prepare(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4)))
    accelerator.load_state(path, strict=False)
    expected = Run(Accelerator()).train(3).model.state_dict()
    assert torch.equal(model[0].weight, expected["0.weight"])


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (lambda path: (path / "model.safetensors").unlink(), CheckpointError),
        (lambda path: next(path.glob("rank-*.safetensors")).unlink(), CheckpointError),
        (lambda path: (path / "manifest.json").write_text("{"), CheckpointError),
    ],
    ids=["model", "rank", "manifest"],
)
def test_a_damaged_checkpoint_is_refused(
    tmp_path: Path, damage: Callable[[Path], None], error: type[Exception]
) -> None:
    path = saved_by_us(tmp_path)
    damage(path)
    run = Run(ours(), seed=1)
    run.accelerator.register_for_checkpointing(Counter())
    assert_refused(run.accelerator, path, error, str(path))


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    run = Run(ours(), seed=1)
    with pytest.raises(ValueError, match=r"Tried to find .*nothing but folder does not exist"):
        run.accelerator.load_state(tmp_path / "nothing")
    with pytest.raises(CheckpointNotFoundError):
        run.accelerator.load_state(tmp_path / "nothing")
    with pytest.raises(ValueError, match="No input_dir provided and automatic checkpoint naming is disabled"):
        run.accelerator.load_state()


def test_a_checkpoint_of_another_program_is_refused(tmp_path: Path) -> None:
    from ckpt_core.directory import DirectoryCheckpointer, Part
    from ckpt_core.state.kinds import Kind

    with DirectoryCheckpointer(strategy="sync") as checkpointer:
        checkpointer.save([Part("model", model_of(0).state_dict(), Kind.REPLICATED)], tmp_path / "foreign")
    accelerator = ours()
    accelerator.prepare(model_of(1))
    assert_refused(accelerator, tmp_path / "foreign", CheckpointFormatError, "not saved by accelerate_ckpt")


def test_a_save_cut_off_before_its_commit_is_no_checkpoint(tmp_path: Path) -> None:
    path = saved_by_us(tmp_path)
    (path / "manifest.json").unlink()
    run = Run(ours(), seed=1)
    run.accelerator.register_for_checkpointing(Counter())
    assert_refused(run.accelerator, path, CheckpointCorruptedError, "its manifest.json is missing")
    shutil.rmtree(path)


# ---- calls -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"strategy": "asink"}, "strategy must be one of 'sync', 'async', 'sharded'"),
        ({"mid_accumulation": "maybe"}, "mid_accumulation must be one of"),
        ({"max_pending": 0}, "max_pending must be"),
        ({"max_pendin": 1}, "did you mean 'max_pending'"),
    ],
)
def test_an_option_that_cannot_be_is_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        attach(Accelerator(), **options)


def test_an_unknown_map_location_is_refused_in_accelerates_words(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="Unsupported optimizer map location passed"):
        ours().load_state(tmp_path, map_location="invalid")


def test_a_directory_is_needed() -> None:
    with pytest.raises(TypeError, match="output_dir"):
        ours().save_state()
