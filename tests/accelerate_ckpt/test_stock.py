"""Checkpoints of stock Accelerate: reading one runs no code, and one that cannot be used changes nothing."""

from __future__ import annotations

import itertools
import os
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from torch import nn

from accelerate_ckpt import attach
from accelerate_ckpt._private.files import registered_states
from ckpt_core.errors import CheckpointCorruptedError, CheckpointError, StateMismatchError, UnsafeCheckpointError
from tests.accelerate_ckpt.test_bad_input import assert_refused, ours
from tests.accelerate_ckpt.training import Counter, Run, assert_same, model_of
from tests.support.pickles import DAMAGED, REFUSED, archive_of

pytestmark = pytest.mark.usefixtures("fresh_accelerate")

PICKLES = ["custom_checkpoint_0.pkl", "optimizer.bin", "scheduler.bin", "random_states_0.pkl", "pytorch_model.bin"]
ALLOWED = PICKLES[:3]  # only those that stock itself would unpickle


class Exploit:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch '{self.marker}'",)


def prepared(accelerator: Accelerator) -> tuple[Run, Counter]:
    run, counter = Run(accelerator, seed=1), Counter()
    accelerator.register_for_checkpointing(counter)
    return run, counter


def save_stock(path: Path, **arguments: Any) -> Path:
    run = Run(Accelerator())
    run.accelerator.register_for_checkpointing(Counter(5))
    run.train(3)
    run.accelerator.save_state(str(path), **arguments)
    return path


@pytest.fixture
def stock(tmp_path: Path) -> Path:
    return save_stock(tmp_path / "stock", safe_serialization=False)


def poison(path: Path, marker: Path, *, legacy: bool = False) -> None:
    state = torch.load(path, weights_only=False)
    state["bad"] = Exploit(marker)
    torch.save(state, path, _use_new_zipfile_serialization=not legacy)


# ---- code ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("name", PICKLES)
def test_no_code_runs_from_any_file(stock: Path, tmp_path: Path, name: str, legacy: bool) -> None:
    marker = tmp_path / "marker"
    poison(stock / name, marker, legacy=legacy)
    run, counter = prepared(ours())
    said = ["it asks for posix.system", str(stock / name)]
    if name in ALLOWED:
        said.append("allow_pickle=True")
    assert_refused(run.accelerator, stock, UnsafeCheckpointError, *said)
    assert counter.count == 0
    assert not marker.exists()


@pytest.mark.parametrize("how", ["option", "load_kwargs"])
@pytest.mark.parametrize("name", ALLOWED)
def test_code_runs_where_it_was_allowed(stock: Path, tmp_path: Path, name: str, how: str) -> None:
    marker = tmp_path / "marker"
    poison(stock / name, marker)
    run, counter = prepared(attach(Accelerator(), "sync", allow_pickle=how == "option"))
    try:
        run.accelerator.load_state(str(stock), {"weights_only": False} if how == "load_kwargs" else None)
    except CheckpointError:
        assert name == "optimizer.bin"  # the optimizer's own check refuses the key
    else:
        assert counter.count == 5
    assert marker.exists()


def test_registered_objects_that_are_plain_data_need_no_option(stock: Path) -> None:
    run, counter = prepared(ours())
    run.accelerator.load_state(str(stock))
    assert counter.count == 5
    assert torch.equal(counter.seen, torch.zeros(2))
    torch.save({"other": 1}, stock / "custom_checkpoint_0.pkl")  # the object shares no memory with the file
    assert torch.equal(counter.seen, torch.zeros(2))


def test_a_type_that_the_script_allows_is_read(stock: Path) -> None:
    state = torch.load(stock / "custom_checkpoint_0.pkl", weights_only=False)
    torch.save(state | {"path": Path("a")}, stock / "custom_checkpoint_0.pkl")
    run, counter = prepared(ours())
    assert_refused(run.accelerator, stock, UnsafeCheckpointError, "pathlib")
    with torch.serialization.safe_globals([type(Path()), Path]):
        run.accelerator.load_state(str(stock))
    assert counter.count == 5


def test_a_release_that_reads_objects_in_another_way_is_found_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerate.Accelerator, "load_state", lambda self: None)
    with pytest.raises(CheckpointError, match="in a way that is not known"), registered_states([{}]):
        pass


# ---- which one -------------------------------------------------------------------------------------------------------


def automatic(tmp_path: Path) -> Accelerator:
    project = ProjectConfiguration(project_dir=str(tmp_path / "run"), automatic_checkpoint_naming=True)
    return attach(Accelerator(project_config=project), "sync")


def two_of_ours(tmp_path: Path) -> Path:
    run, _ = prepared(automatic(tmp_path))
    run.accelerator.save_state()
    run.train(1)
    run.accelerator.save_state()
    return tmp_path / "run" / "checkpoints"


def test_a_newer_one_of_stock_is_taken_if_it_is_safe(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved = two_of_ours(tmp_path)
    save_stock(saved / "checkpoint_9")
    run, counter = prepared(automatic(tmp_path))
    run.accelerator.load_state()
    assert counter.count == 5
    assert "checkpoint_9 was saved by stock Accelerate" in caplog.text
    assert run.accelerator.project_configuration.iteration == 10


def test_a_newer_one_of_stock_with_code_is_an_error_that_names_both(tmp_path: Path) -> None:
    saved, marker = two_of_ours(tmp_path), tmp_path / "marker"
    save_stock(saved / "checkpoint_9")
    poison(saved / "checkpoint_9" / "custom_checkpoint_0.pkl", marker)
    run, counter = prepared(automatic(tmp_path))
    with pytest.raises(UnsafeCheckpointError) as caught:
        run.accelerator.load_state()
    assert str(saved / "checkpoint_9") in str(caught.value)
    assert f"name it: '{saved / 'checkpoint_1'}'" in str(caught.value)
    assert counter.count == 0
    assert not marker.exists()


def test_a_damaged_one_of_stock_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved = two_of_ours(tmp_path)
    damage(save_stock(saved / "checkpoint_9") / "optimizer.bin")
    run, _ = prepared(automatic(tmp_path))
    run.accelerator.load_state()
    assert run.accelerator.project_configuration.iteration == 10  # its name is taken
    assert f"passed over the checkpoint {saved / 'checkpoint_9'}" in caplog.text


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["SETITEM of a number", "REDUCE of a number", "no such operation"])
@pytest.mark.parametrize("name", PICKLES[:3])
def test_a_pickle_that_nothing_writes_is_damaged(
    tmp_path: Path, name: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    saved = two_of_ours(tmp_path)
    (save_stock(saved / "checkpoint_9") / name).write_bytes(archive_of(DAMAGED[kind]))
    run, counter = prepared(automatic(tmp_path))
    assert_refused(
        run.accelerator, saved / "checkpoint_9", CheckpointCorruptedError, name, "load an earlier checkpoint"
    )
    run.accelerator.load_state()
    assert counter.count == 0  # from our checkpoint
    assert f"passed over the checkpoint {saved / 'checkpoint_9'}" in caplog.text


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("pickled", REFUSED.values(), ids=REFUSED)
def test_a_pickle_that_torch_refuses_is_left_to_the_user(stock: Path, pickled: bytes) -> None:
    (stock / "scheduler.bin").write_bytes(archive_of(pickled))
    assert_refused(prepared(ours())[0].accelerator, stock, UnsafeCheckpointError, "allow_pickle=True", "scheduler.bin")


def test_ours_without_its_manifest_is_not_taken_for_one_of_stock(tmp_path: Path, stock: Path) -> None:
    saved = two_of_ours(tmp_path) / "checkpoint_1"
    (saved / "manifest.json").unlink()
    for file in stock.iterdir():
        shutil.copy(file, saved)
    run, counter = prepared(ours())
    assert_refused(run.accelerator, saved, CheckpointCorruptedError, "manifest.json is missing", str(saved))
    assert counter.count == 0


# ---- damage ----------------------------------------------------------------------------------------------------------


def damage(path: Path) -> None:
    """Flip a bit of a tensor."""
    with zipfile.ZipFile(path) as archive:
        record = next(record for record in archive.infolist() if record.filename.endswith("/data/0"))
        content = archive.read(record)
    data = bytearray(path.read_bytes())
    lengths = struct.unpack_from("<2H", data, record.header_offset + 26)
    at = record.header_offset + 30 + sum(lengths)
    assert data[at : at + len(content)] == content
    data[at] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def garbage(path: Path) -> None:
    path.write_bytes(b"\x80\x02garbage")


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        *itertools.product([*PICKLES, "model.safetensors"], [cut, garbage]),
        *((name, damage) for name in PICKLES if name != "scheduler.bin"),  # it has no tensor
    ],
)
def test_nothing_is_changed_by_a_damaged_one(tmp_path: Path, name: str, harm: Callable[[Path], None]) -> None:
    path = save_stock(tmp_path / "stock", safe_serialization=name == "model.safetensors")
    harm(path / name)
    run, counter = prepared(ours())
    optimizer = run.optimizer.state_dict()
    assert_refused(run.accelerator, path, CheckpointCorruptedError, f"{name} cannot be read", str(path / name))
    assert_same(run.optimizer.state_dict(), optimizer)
    assert counter.count == 0


@pytest.mark.parametrize("safe", [True, False])
def test_nothing_is_changed_by_one_of_another_model(tmp_path: Path, safe: bool) -> None:
    path = save_stock(tmp_path / "stock", safe_serialization=safe)
    accelerator = ours()
    run = Run(accelerator, seed=1, width=5)
    accelerator.register_for_checkpointing(Counter())
    assert_refused(
        run.accelerator, path, StateMismatchError, "of another model", "0.weight has shape [4, 4] in the checkpoint"
    )


def test_files_without_checksums_are_loaded(stock: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        for name in PICKLES:
            torch.save(torch.load(stock / name, weights_only=False), stock / name)
    finally:
        torch.serialization.set_crc32_options(before)
    run, counter = prepared(ours())
    run.accelerator.load_state(str(stock))
    assert counter.count == 5


def test_models_that_load_in_their_own_way_may(tmp_path: Path) -> None:
    stock = Accelerator()
    model = stock.prepare(model_of(0))
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    stock.save_state(str(tmp_path / "stock"))

    class Renaming(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Identity(), *model_of(1))
            self.register_load_state_dict_pre_hook(self._rename)

        @staticmethod
        def _rename(_: nn.Module, state: dict[str, Any], *__: Any) -> None:
            for name in list(state):
                number, _, rest = name.partition(".")
                state[f"renamed.{int(number) + 1}.{rest}"] = state.pop(name)
            for name in list(state):
                state[name.removeprefix("renamed.")] = state.pop(name)

    accelerator = ours()
    loaded = accelerator.prepare(Renaming())
    accelerator.load_state(str(tmp_path / "stock"), strict=False)
    assert_same(dict(zip(weights, loaded.state_dict().values(), strict=True)), weights)
