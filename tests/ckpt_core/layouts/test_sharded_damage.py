"""A damaged directory checkpoint raises an error that names file and tensor, and changes no target if it can."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core import CheckpointCorruptedError, CheckpointError, CheckpointFormatError
from ckpt_core._layouts.directory.safetensors_file import LARGEST_BLOCK
from ckpt_core.storage.base import MANIFEST_NAME
from tests.support.damage import flip_bit
from tests.support.sharded import open_directory, rewrite, save_directory

STATE = {"w": torch.arange(12.0).reshape(4, 3), "tied": torch.ones(2), "n": [1, "a"], "empty": torch.empty(0, 2)}


def save(path: Path, *, add: float = 0.0, save_id: str = "save-1", world_size: int = 2) -> Path:
    state = {key: value + add if isinstance(value, torch.Tensor) else value for key, value in STATE.items()}
    return save_directory(
        path,
        [
            {"model": ("sharded", state), "rng": ("per-rank", {"seed": torch.tensor([rank, 7]), "step": add})}
            for rank in range(world_size)
        ],
        spread=world_size > 1,
        save_id=save_id,
    )


def problem_of(path: Path, *, load: bool = True) -> CheckpointError:
    """Return the error of loading everything, or of verifying."""
    with pytest.raises(CheckpointError) as caught, open_directory(path) as checkpoint:
        if not load:
            checkpoint.verify()
        else:
            checkpoint.load("model")
            for rank in range(checkpoint.world_size):
                checkpoint.load("rng", rank=rank)
    return caught.value


def test_the_checkpoint_itself_is_fine(tmp_path: Path) -> None:
    for world_size in (1, 2):
        with open_directory(save(tmp_path / str(world_size), world_size=world_size)) as checkpoint:
            checkpoint.verify()
            assert torch.equal(checkpoint.load("model")["w"], STATE["w"])


@pytest.mark.parametrize("each", [pytest.param(1, marks=pytest.mark.slow), 5])
def test_every_flipped_byte_is_found(tmp_path: Path, each: int) -> None:
    path = save(tmp_path / "c", world_size=1)
    flipped = 0
    for file in sorted(path.iterdir()):
        data = file.read_bytes()
        with file.open("r+b", buffering=0) as stream:
            for position in range(0, len(data), each):
                byte = data[position]
                stream.seek(position)
                stream.write(bytes([byte ^ (1 << position % 8)]))
                error = problem_of(path, load=position % 2 == 0)
                if file.suffix == ".safetensors":
                    assert str(error.path) == str(file), position
                stream.seek(position)
                stream.write(bytes([byte]))
                flipped += 1
        assert file.read_bytes() == data
    assert flipped > 8000 // each


def test_a_flipped_byte_is_found_by_loading_and_by_verifying(tmp_path: Path) -> None:
    path = save(tmp_path / "c")
    for file in sorted(path.iterdir()):
        data = bytearray(file.read_bytes())
        for position in {0, 1, 9, len(data) // 2, len(data) - 1, len(data) - 2}:
            data[position] ^= 16
            file.write_bytes(data)
            for load in (False, True):
                assert str(path) in str(problem_of(path, load=load).path)
            data[position] ^= 16
        file.write_bytes(data)


def test_every_truncation_is_found(tmp_path: Path) -> None:
    path = save(tmp_path / "c", world_size=1)
    for file in sorted(path.iterdir()):
        data = file.read_bytes()
        # Every length of the manifest; some of the other files, whose sizes are in it.
        lengths = (
            range(len(data)) if file.name == MANIFEST_NAME else [0, 1, 8, 4095, 4096, len(data) - 1, len(data) + 1]
        )
        for length in lengths:
            file.write_bytes((data + b"\0")[:length])
            error = problem_of(path, load=length % 2 == 0)
            assert str(error.path) == str(file)
        file.write_bytes(data)


@pytest.mark.parametrize(
    "name",
    ["model-00002-of-00002.safetensors", "rank-00001-of-00002.safetensors", "rank-00002-of-00002.digests"],
)
@pytest.mark.parametrize("instead", [None, Path.mkdir, os.mkfifo])
def test_a_missing_file_is_named(tmp_path: Path, name: str, instead: Callable[[Path], None] | None) -> None:
    path = save(tmp_path / "c")
    (path / name).unlink()
    if instead is not None:
        instead(path / name)
    for load in (True, False):
        error = problem_of(path, load=load)
        assert isinstance(error, CheckpointCorruptedError)
        assert error.path == str(path / name)
        assert "missing" in str(error)


def test_files_of_another_save_are_named(tmp_path: Path) -> None:
    path, other = save(tmp_path / "c"), save(tmp_path / "d", add=1.0, save_id="save-2")
    for name in sorted(file.name for file in path.iterdir() if file.name != MANIFEST_NAME):
        shutil.copyfile(other / name, path / name)
        for load in (True, False):
            error = problem_of(path, load=load)
            assert error.path == str(path / name)
            if name.endswith(".safetensors"):
                assert "belongs to another save, save-2 and not save-1" in str(error)
        save(path)
    shutil.copyfile(other / MANIFEST_NAME, path / MANIFEST_NAME)
    assert "digests" in str(problem_of(path).path)


def test_swapped_files_are_named(tmp_path: Path) -> None:
    path = save(tmp_path / "c")
    one, two = path / "model-00001-of-00002.safetensors", path / "model-00002-of-00002.safetensors"
    data = one.read_bytes(), two.read_bytes()
    one.write_bytes(data[1])
    two.write_bytes(data[0])
    for load in (True, False):
        assert problem_of(path, load=load).path in {str(one), str(two)}


def target() -> dict[str, Any]:
    return {"w": torch.full((4, 3), -1.0), "tied": torch.full((2,), -1.0), "empty": torch.empty(0, 2)}


@pytest.mark.parametrize("kind", ["missing", "header", "digests", "other save", "size", "manifest", "version"])
def test_nothing_is_changed_when_a_file_is_wrong(tmp_path: Path, kind: str) -> None:
    path = save(tmp_path / "c")
    second = path / "model-00002-of-00002.safetensors"
    if kind == "missing":
        second.unlink()
    elif kind == "header":
        second.write_bytes(second.read_bytes().replace(b"  ", b"\t ", 1))
    elif kind == "digests":
        (path / "rank-00002-of-00002.digests").write_bytes(b"x" * 8 * 4)
    elif kind == "other save":
        other = save(tmp_path / "d", add=1.0, save_id="save-2")
        shutil.copyfile(other / second.name, second)
    elif kind == "size":
        second.write_bytes(second.read_bytes() + b"\0")
    elif kind == "manifest":
        manifest = path / MANIFEST_NAME
        manifest.write_bytes(manifest.read_bytes().replace(b"[4,3]", b"[3,4]"))
    else:
        rewrite(path, b'"version":3,', b'"version":9,')
    into = target()
    with pytest.raises(CheckpointError), open_directory(path) as checkpoint:
        checkpoint.load("model", into=into)
    assert all(bool((value == -1).all()) for value in into.values())


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (b'"older"', b'"other"', "older and not other"),
        (b'"older"', b'"../up"', "cannot be the id"),
        (b'"older"', b'"older","x"', "names 2 saves"),
        (b'"older"', b"7", "is not text"),
    ],
)
def test_a_file_of_an_earlier_save_is_held_to_what_the_manifest_says(
    old: bytes, new: bytes, says: str, tmp_path: Path
) -> None:
    path = tmp_path / "c"
    shutil.copytree(Path(__file__).parents[2] / "golden" / "sharded_v3_linked", path)
    with open_directory(path) as checkpoint:
        checkpoint.verify()
    rewrite(path, old, new)
    error = problem_of(path, load=False)
    assert isinstance(error, CheckpointCorruptedError)
    assert says in str(error)


def test_a_newer_version_is_refused_by_number(tmp_path: Path) -> None:
    path = save(tmp_path / "c")
    rewrite(path, b'"version":3,', b'"version":12,')
    error = problem_of(path)
    assert isinstance(error, CheckpointFormatError)
    assert "version 12" in str(error)
    assert "reads version 3" in str(error)
    assert "upgrade" in str(error.remedy)


@pytest.mark.parametrize("version", [0, 1, 2])
def test_versions_that_were_never_released_are_refused_by_number(tmp_path: Path, version: int) -> None:
    path = save(tmp_path / "c")
    rewrite(path, b'"version":3,', f'"version":{version},'.encode())
    error = problem_of(path)
    assert isinstance(error, CheckpointFormatError)
    assert f"format version {version};" in str(error)
    assert "unreleased" in str(error)
    assert "upgrade" not in str(error.remedy)


def test_an_empty_manifest_is_damage(tmp_path: Path) -> None:
    path = save(tmp_path / "c")
    (path / MANIFEST_NAME).write_bytes(b"")
    error = problem_of(path)
    assert isinstance(error, CheckpointCorruptedError) and "manifest is empty" in str(error)


@pytest.mark.parametrize("data", [b"{}", b"hello", b"\0" * 5000, b'{"weight_map": {}}\n'])
def test_the_manifest_of_another_program_is_refused(tmp_path: Path, data: bytes) -> None:
    path = save(tmp_path / "c")
    (path / MANIFEST_NAME).write_bytes(data)
    assert isinstance(problem_of(path), CheckpointFormatError)


def test_damage_names_the_tensor_and_whose_it_is(tmp_path: Path) -> None:
    states = [
        {
            "model": ("replicated", {"layer": {"small": torch.ones(5), "big": torch.randn(10**6)}}),
            "rng": ("per-rank", {"a": torch.ones(3)}),
            "data": ("per-rank", {"b": torch.ones(3)}),
        }
    ]
    path = save_directory(tmp_path / "c", states)
    for name, from_end, key, part in (
        ("model.safetensors", 1, "model.layer.small", "model"),  # the file's last tensor: it does not fill cache lines
        ("model.safetensors", 20 + 3, "model.layer.big", "model"),
        ("rank-00001-of-00001.safetensors", 1, None, "data"),
    ):
        file = path / name
        flip_bit(file, -from_end)
        with open_directory(path) as checkpoint:
            for check in (checkpoint.verify, lambda checkpoint=checkpoint, part=part: checkpoint.load(part)):
                with pytest.raises(CheckpointCorruptedError) as caught:
                    check()
                assert caught.value.path == str(file)
                if key is not None:
                    assert caught.value.key == key
        flip_bit(file, -from_end)


def test_damage_in_the_middle_never_reaches_a_target_that_needs_a_copy(tmp_path: Path) -> None:
    source = torch.randn(1000, 1000)
    path = save_directory(tmp_path / "c", [{"model": ("replicated", {"w": source})}])
    file = path / "model.safetensors"
    flip_bit(file, -(1000 * 1000 * 4) // 2)
    into = torch.zeros(1000, 1000).t()
    with pytest.raises(CheckpointCorruptedError), open_directory(path) as checkpoint:
        checkpoint.load("model", into={"w": into})
    assert bool((into == 0).all())


def test_what_is_not_needed_is_not_read(tmp_path: Path) -> None:
    source = torch.arange(8 * LARGEST_BLOCK, dtype=torch.int32)
    path = save_directory(tmp_path / "c", [{"model": ("sharded", {"w": source})}] * 2, spread=True)
    (path / "model-00002-of-00002.safetensors").unlink()
    from ckpt_core.geometry import Box
    from tests.support.sharded import Local, Piece

    box = Box((5,), (1000,))
    piece = Piece(box, torch.zeros(1000, dtype=torch.int32))
    with open_directory(path) as checkpoint:
        checkpoint.load("model", into={"w": source}, local=lambda *_: Local(torch.int32, tuple(source.shape), (piece,)))
    assert torch.equal(piece.tensor, source[5:1005])
