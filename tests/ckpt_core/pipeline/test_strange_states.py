"""States that cannot be saved, or not be read by default: reported at the save, with the key."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import io
import logging
import pathlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.serialization import get_unsafe_globals_in_checkpoint

from ckpt_core import (
    Checkpointer,
    CheckpointFormatError,
    DirectoryCheckpointer,
    Kind,
    Part,
    SerializationError,
    UnsafeCheckpointError,
)
from ckpt_core.cli import main

Save = Callable[[Any], None]


class Colour(enum.Enum):
    RED = 1


@pytest.fixture(params=["sync", "async", "directory"])
def save(request: pytest.FixtureRequest, tmp_path: Path) -> Save:
    def act(state: Any) -> None:
        if request.param == "directory":
            with DirectoryCheckpointer(strategy="async") as checkpointer:
                checkpointer.save([Part("part", state, Kind.REPLICATED)], tmp_path / "a", step=1)
        else:
            with Checkpointer(strategy=request.param) as files:
                files.save(state, tmp_path / "a.ckpt")

    return act


def freed() -> torch.Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def too_small() -> torch.Tensor:
    tensor = torch.ones(4, 4).t()
    tensor.untyped_storage().resize_(60)
    return tensor


@pytest.mark.parametrize(("make", "remedy"), [(freed, "materialize"), (too_small, "materialize")])
def test_a_tensor_without_its_memory_is_refused_by_key(
    make: Callable[[], torch.Tensor], remedy: str, save: Save, tmp_path: Path
) -> None:
    with pytest.raises(SerializationError, match=remedy) as caught:
        save({"whole": torch.ones(2), "model": {"w": make()}})
    assert str(caught.value.key).endswith("model.w")
    assert list(tmp_path.glob("[!.]*")) == []


def test_an_object_with_a_tensor_without_its_memory_is_refused_by_key(save: Save, tmp_path: Path) -> None:
    with pytest.raises(SerializationError, match="was freed or is too small") as caught:
        save({"whole": torch.ones(2), "options": argparse.Namespace(inside=freed())})
    assert str(caught.value.key).endswith("options")
    assert list(tmp_path.glob("[!.]*")) == []


@pytest.mark.parametrize("key", ["a", "tensor"])
def test_a_key_that_is_a_word_of_the_message_is_named(key: str, save: Save) -> None:
    with pytest.raises(SerializationError, match=rf"the tensor at (part\.)?{key} has a memory of 0 bytes"):
        save({key: freed()})


def test_lists_of_the_same_lists_beside_an_object_are_saved_in_one_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lists: list[Any] = [Colour.RED]
    for _ in range(40):
        lists = [lists, lists]
    state = {"lists": lists, "object": argparse.Namespace(inside=lists)}
    with Checkpointer(strategy="async") as checkpointer:
        checkpointer.save(state, tmp_path / "a.ckpt")
    assert "object" in caplog.text
    assert checkpointer.load(tmp_path / "a.ckpt", weights_only=False)["object"].inside[0][1] is not None


def test_a_tensor_inside_a_transform_is_refused_by_key(save: Save) -> None:
    errors = []

    def loss(weight: torch.Tensor) -> torch.Tensor:
        with pytest.raises(SerializationError, match=r"torch\.func") as caught:
            save({"model": {"w": weight}})
        errors.append(caught.value)
        return weight.sum()

    torch.func.grad(loss)(torch.ones(3))
    assert str(errors[0].key).endswith("model.w")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_of_the_strided_layout(
    save: Save, tmp_path: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    parts = [torch.ones(2), torch.full((3,), 2.0)]
    state = {"model": {"w": torch.nested.nested_tensor(parts)}}
    if "directory" in request.node.name:
        with pytest.raises(SerializationError, match="unbind") as caught:
            save(state)
        assert caught.value.key == "part.model.w"
        return
    save(state)
    of_plain_data = not get_unsafe_globals_in_checkpoint(tmp_path / "a.ckpt")  # until torch 2.14
    if not of_plain_data:
        with pytest.raises(UnsafeCheckpointError, match="_rebuild_nested_tensor"):
            Checkpointer().load(tmp_path / "a.ckpt")
    found = Checkpointer().load(tmp_path / "a.ckpt", weights_only=of_plain_data)["model"]["w"].unbind()
    assert [part.tolist() for part in found] == [part.tolist() for part in parts]
    assert main(["inspect", str(tmp_path / "a.ckpt")]) == 0
    assert ("model.w: float32, nested, 2 tensors" in capsys.readouterr().out) == of_plain_data


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_without_tensors_is_refused_by_key(save: Save) -> None:
    with pytest.raises(SerializationError, match="nested tensor") as caught:
        save({"model": {"w": torch.nested.nested_tensor([])}})
    assert str(caught.value.key).endswith("model.w")


@pytest.mark.parametrize("strategy", ["sync", "async"])
def test_two_types_of_one_memory_are_refused_by_key(strategy: Any, tmp_path: Path) -> None:
    weight = torch.ones(3)
    with pytest.raises(SerializationError, match="different types") as caught, Checkpointer(strategy=strategy) as files:
        files.save({"a": {"w": weight}, "b": weight.view(torch.int32)}, tmp_path / "a.ckpt")
    assert caught.value.key == "b"


@pytest.mark.parametrize("strategy", ["sync", "async"])
def test_a_chain_that_is_too_deep_is_refused_for_what_it_is(strategy: Any, tmp_path: Path) -> None:
    state: Any = []
    for _ in range(10_000):
        state = [state]
    with pytest.raises(SerializationError, match="nested too deep"), Checkpointer(strategy=strategy) as files:
        files.save(state, tmp_path / "a.ckpt")


@pytest.mark.parametrize(
    ("value", "key", "what"),
    [
        (np.float64(1.5), "hyper.x", "numpy"),
        (np.arange(3), "hyper.x", "numpy"),
        ([1, {"deep": np.int64(3)}], "hyper.x.1.deep", "numpy"),
        (range(3), "hyper.x", "range"),
        (10**5000, "hyper.x", "integer of 16610 bits"),
        (-(10**5000), "hyper.x", "integer of 16610 bits"),
        (Colour.RED, "hyper.x", "Colour"),
        ({Colour.RED: 1}, "a key in hyper.x", "Colour"),
        ({Colour.RED}, "hyper.x", "Colour"),
        (pathlib.PurePosixPath("/x"), "hyper.x", "PurePosixPath"),
        (defaultdict(list, a=[1]), "hyper.x", "defaultdict"),
        (torch.nn.Linear(2, 2), "hyper.x", "Linear"),
        (np.dtype("f4"), "hyper.x", "dtype"),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("strategy", ["sync", "async"])
def test_what_a_load_will_refuse_is_said_at_the_first_save(
    value: Any, key: str, what: str, strategy: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.ckpt"
    with caplog.at_level(logging.WARNING), Checkpointer(strategy=strategy) as files:
        files.save({"w": torch.ones(3), "hyper": {"fine": 1, "x": value}}, path)
        files.save({"w": torch.ones(3), "hyper": {"fine": 1, "x": value}}, path)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert f"{key}: " in warning
    assert what in warning.partition(f"{key}: ")[2].partition(".  ")[0]
    assert "fine" not in warning
    assert "weights_only=False" in warning
    with pytest.raises(UnsafeCheckpointError):
        Checkpointer().load(path)
    Checkpointer().load(path, weights_only=False)


@pytest.mark.parametrize(
    "value",
    [
        1,
        2**2038,
        "text",
        OrderedDict(a=torch.ones(1)),
        torch.Size([1]),
        torch.float16,
        torch.nn.Linear(2, 2).state_dict(),
        torch.eye(3).to_sparse(),
        torch.nn.Parameter(torch.ones(2)),
        {1, 2},
        1 + 2j,
        b"bytes",
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("strategy", ["sync", "async"])
def test_nothing_is_said_of_what_a_load_takes(
    value: Any, strategy: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), Checkpointer(strategy=strategy) as files:
        files.save({"x": value}, tmp_path / "a.ckpt")
    assert caplog.records == []
    Checkpointer().load(tmp_path / "a.ckpt")


def test_what_the_program_allows_is_not_complained_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with torch.serialization.safe_globals([Colour]), caplog.at_level(logging.WARNING):
        with Checkpointer(strategy="sync") as files:
            files.save({"x": Colour.RED}, tmp_path / "a.ckpt")
        assert Checkpointer().load(tmp_path / "a.ckpt") == {"x": Colour.RED}
    assert caplog.records == []


@dataclasses.dataclass
class Point:
    x: int


class Pair(NamedTuple):
    a: int
    b: list[int]


OBJECTS = {
    "enum": (Colour.RED, "part.hyper.x"),
    "dataclass": (Point(3), "part.hyper.x"),
    "Namespace": (argparse.Namespace(lr=1), "part.hyper.x"),
    "namedtuple": (Pair(1, [2]), "part.hyper.x"),
    "key": ({Colour.RED: 1}, "part.hyper.x"),
    "defaultdict": (defaultdict(Path, a=1), "part.hyper.x"),
}


@pytest.mark.parametrize(("value", "key"), OBJECTS.values(), ids=OBJECTS)
@pytest.mark.parametrize("kind", [Kind.PER_RANK, Kind.REPLICATED])
def test_an_object_in_a_directory_is_saved_and_said_and_loaded_only_where_that_is_asked_for(
    value: Any, key: str, kind: Kind, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: Any
) -> None:
    path = tmp_path / "a"
    state = {"w": torch.ones(3), "hyper": {"fine": 1, "x": value}}
    with caplog.at_level(logging.WARNING), DirectoryCheckpointer() as directories:
        for step in (1, 2):
            directories.save([Part("part", state, kind)], path, step=step)
            directories.wait(path)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert f"{key}: " in warning
    assert "fine" not in warning
    with DirectoryCheckpointer().load(path) as opened, pytest.raises(UnsafeCheckpointError, match="weights_only") as no:
        opened.load("part")
    assert (no.value.path, no.value.key) == (str(path), "part")
    with DirectoryCheckpointer().load(path, weights_only=False) as opened:
        found = opened.load("part")
    assert found["hyper"] == state["hyper"]
    assert type(found["hyper"]["x"]) is type(value)
    assert main(["verify", str(path)]) == 0
    assert main(["inspect", str(path)]) == 0
    assert "w: float32[3]" in capsys.readouterr().out


def test_an_object_that_the_program_allows_is_loaded_from_a_directory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with torch.serialization.safe_globals([Colour]), caplog.at_level(logging.WARNING):
        with DirectoryCheckpointer(strategy="sync") as directories:
            directories.save([Part("part", {"x": Colour.RED}, Kind.PER_RANK)], tmp_path / "a", step=1)
        with DirectoryCheckpointer().load(tmp_path / "a") as opened:
            assert opened.load("part") == {"x": Colour.RED}
    assert caplog.records == []


class Dud:
    """Cannot be rebuilt, although the program allows it."""

    def __setstate__(self, state: Any) -> None:
        raise KeyError("gone")

    def __getstate__(self) -> Any:
        return {"a": 1}


def test_an_object_that_cannot_be_rebuilt_now_is_saved_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with torch.serialization.safe_globals([Dud]), caplog.at_level(logging.WARNING):
        with DirectoryCheckpointer(strategy="sync") as directories:
            directories.save([Part("part", {"x": Dud(), "n": 1}, Kind.PER_RANK)], tmp_path / "a", step=1)
        with directories.load(tmp_path / "a") as opened, pytest.raises(CheckpointFormatError, match="Dud") as caught:
            opened.load("part")
    assert (caught.value.path, caught.value.key) == (str(tmp_path / "a"), "part")
    assert "part.x: " in caplog.text


def _is_loaded_by_torch(state: Any) -> bool:
    archive = io.BytesIO()
    torch.save(state, archive)
    try:
        torch.load(io.BytesIO(archive.getvalue()), weights_only=False)
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("allowed", [[], [Point]], ids=["refused", "allowed"])
def test_an_object_over_memory_that_torch_cannot_load_is_refused_by_key(allowed: list[Any], tmp_path: Path) -> None:
    odd = torch.empty(0).set_(torch.UntypedStorage(10), 0, (2,))
    state = {"x": Point(odd)}  # type: ignore[arg-type]
    refused = pytest.raises(SerializationError, match="ends inside an element")
    if allowed and _is_loaded_by_torch(state):
        pytest.skip("torch 2.8 loads it")
    with torch.serialization.safe_globals(allowed), refused as caught:
        DirectoryCheckpointer(strategy="sync").save([Part("part", state, Kind.PER_RANK)], tmp_path / "a")
    assert caught.value.key == "part.x"


class Bomb:
    """Leaves a mark when it is rebuilt."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (Path.touch, (Path(self.mark),))


def test_no_look_at_a_directory_runs_code_from_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, mark = tmp_path / "a", tmp_path / "mark"
    with DirectoryCheckpointer(strategy="sync") as directories:
        directories.save([Part("part", {"x": Bomb(str(mark)), "w": torch.ones(2)}, Kind.PER_RANK)], path, step=1)
        opened = directories.load(path)
    with opened:
        opened.verify()
        with pytest.raises(UnsafeCheckpointError):
            opened.load("part")
        with pytest.raises(UnsafeCheckpointError):
            opened.load("part", into={"w": torch.zeros(2)}, strict=False)
    for command in (["inspect", "--depth", "9"], ["verify"], ["diff", str(path)], ["cp", str(path)]):
        main([*command, str(path)] if command[0] != "cp" else ["cp", str(path), str(tmp_path / "b")])
    assert "Bomb" in capsys.readouterr().out
    assert not mark.exists()
    with directories.load(path, weights_only=False) as opened:
        opened.load("part")
    assert mark.exists()


def test_a_class_that_is_gone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with DirectoryCheckpointer(strategy="sync") as directories:
        directories.save([Part("part", {"x": Point(1)}, Kind.PER_RANK)], tmp_path / "a", step=1)
        monkeypatch.delattr(f"{__name__}.Point")
        with (
            directories.load(tmp_path / "a", weights_only=False) as opened,
            pytest.raises(CheckpointFormatError, match="Point in the checkpoint cannot be rebuilt") as caught,
        ):
            opened.load("part")
    assert caught.value.path == str(tmp_path / "a")


def test_inspect_shows_what_python_does_not_print(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with DirectoryCheckpointer(strategy="sync") as checkpointer:
        parts = [Part("part", {"a\x1b[2J\nb": torch.ones(2)}, Kind.REPLICATED)]
        checkpointer.save(parts, tmp_path / "a", metadata={"big": 10**5000, "seen": {10**5000}}, step=1)
    assert main(["inspect", str(tmp_path / "a")]) == 0
    out = capsys.readouterr().out
    assert "  big: an integer of 16610 bits" in out
    assert "  seen: a set" in out
    assert "a\\x1b[2J\\nb: float32[2]" in out
