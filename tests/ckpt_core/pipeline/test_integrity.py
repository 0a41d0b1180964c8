"""A damaged file is refused, whatever the damage, and nothing of it is returned."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core import (
    Catalog,
    CheckpointCorruptedError,
    Checkpointer,
    CheckpointError,
    CheckpointFormatError,
    verify,
)
from ckpt_core._layouts.image import WINDOW
from ckpt_core._layouts.torch_file.archive import StateLayout
from ckpt_core._layouts.torch_file.manifest import FOOTER_SIZE, FORMAT_VERSION
from ckpt_core._pipeline.writer import write_image
from ckpt_core.buffers import ScratchBuffers
from ckpt_core.storage import LocalStorage
from tests.support.states import tensor_of

REFUSALS = (CheckpointCorruptedError, CheckpointFormatError)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a small checkpoint with tensors, an empty one, plain data and a footer."""
    path = tmp_path_factory.mktemp("whole") / "a.ckpt"
    state = {"w": torch.arange(9.0), "e": torch.empty(0), "b": tensor_of(torch.uint8, 70), "x": [1, "text", None]}
    with Checkpointer(strategy="sync") as checkpointer:
        checkpointer.save(state, path)
    return path.read_bytes()


def refuses(action: Callable[[], Any]) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        action()
    assert type(caught.value) in REFUSALS, caught.value
    assert caught.value.path is not None
    return caught.value


def assert_refused(path: Path) -> None:
    refuses(lambda: Checkpointer(strategy="sync").load(path))
    refuses(lambda: verify(path))


@pytest.mark.parametrize("each", [pytest.param(1, marks=pytest.mark.slow), 5])
def test_every_byte_counts(whole: bytes, tmp_path: Path, each: int) -> None:
    path = tmp_path / "a.ckpt"
    path.write_bytes(whole)
    assert verify(path)
    load = Checkpointer(strategy="sync").load
    chance = random.Random(0)
    accepted = []
    with path.open("r+b", buffering=0) as file:
        for position in range(0, len(whole), each):
            file.seek(position)
            file.write(bytes([whole[position] ^ (1 << chance.randrange(8))]))
            for action in (load, verify):
                try:
                    action(path)
                except REFUSALS:
                    continue
                accepted.append((position, action))
            file.seek(position)
            file.write(whole[position : position + 1])
    assert accepted == []
    assert verify(path)


def test_every_bit_of_headers_and_footer_counts(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    path.write_bytes(whole)
    accepted = []
    with path.open("r+b", buffering=0) as file:
        for position in [*range(64), *range(len(whole) - FOOTER_SIZE - 22, len(whole))]:
            for changed in {whole[position] ^ (1 << bit) for bit in range(8)} | {0, 255, whole[position] ^ 0xFF}:
                if changed == whole[position]:
                    continue
                file.seek(position)
                file.write(bytes([changed]))
                try:
                    verify(path)
                except REFUSALS:
                    continue
                accepted.append((position, changed))
            file.seek(position)
            file.write(whole[position : position + 1])
    assert accepted == []


def test_every_truncation_is_refused(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    path.write_bytes(whole)
    load = Checkpointer(strategy="sync").load
    accepted = []
    for length in range(len(whole) - 1, -1, -1):
        with path.open("r+b") as file:
            file.truncate(length)
        for action in (load, verify):
            try:
                action(path)
            except REFUSALS:
                continue
            accepted.append((length, action))
    assert accepted == []


@pytest.mark.parametrize("garbage", [b"\0", b"x" * 22, bytes(1000), b"PK\5\6" + bytes(18), bytes(3 * 2**20)], ids=len)
def test_appended_garbage_is_refused(garbage: bytes, whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    path.write_bytes(whole + garbage)
    assert_refused(path)


def test_two_files_in_one_are_refused(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    path.write_bytes(whole + whole)
    assert_refused(path)


def test_halves_of_two_checkpoints_of_the_same_shape_are_refused(tmp_path: Path) -> None:
    files = []
    for seed in (1, 2):
        path = tmp_path / f"{seed}.ckpt"
        with Checkpointer(strategy="sync") as checkpointer:
            checkpointer.save({f"w{i}": tensor_of(torch.float32, 500, seed=100 * seed + i) for i in range(6)}, path)
        files.append(path.read_bytes())
    one, two = files
    assert len(one) == len(two)
    spliced = tmp_path / "spliced.ckpt"
    for cut in [*range(1, len(one), 401), len(one) - FOOTER_SIZE, len(one) - 1]:
        if one[:cut] + two[cut:] not in (one, two):
            spliced.write_bytes(one[:cut] + two[cut:])
            assert_refused(spliced)


def test_a_damaged_tensor_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    with Checkpointer(strategy="sync") as checkpointer:
        checkpointer.save({"a": torch.zeros(100), "b": tensor_of(torch.uint8, WINDOW + 5000, seed=3)}, path)
    position = WINDOW + 2000
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)
        file.seek(position)
        file.write(bytes([byte[0] ^ 1]))
    for action in (verify, Checkpointer(strategy="sync").load):
        error = refuses(lambda action=action: action(path))
        assert isinstance(error, CheckpointCorruptedError)
        assert error.key == "b"
        assert error.path == str(path)
        assert "resume from another checkpoint" in str(error)


def test_a_newer_format_says_which_and_what_to_do(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    newer = FORMAT_VERSION + 6
    old, new = (f"ckpt_core torch_file {version:04d}".encode() for version in (FORMAT_VERSION, newer))
    assert whole.count(old) == 1
    path.write_bytes(whole.replace(old, new))
    for action in (verify, Checkpointer(strategy="sync").load):
        error = refuses(lambda action=action: action(path))
        assert isinstance(error, CheckpointFormatError)
        assert f"version {newer}" in str(error)
        assert f"version {FORMAT_VERSION}" in str(error)
        assert "upgrade" in str(error)
        assert str(path) in str(error)


def foreign_files() -> dict[str, bytes]:
    return {
        "text": b"Dear reader,\nthis is no checkpoint.\n" * 30,
        "one byte": b"P",
        "zeros": bytes(5000),
        "image": b"\x89PNG\r\n\x1a\n" + bytes(300),
        "almost a zip": b"PK\3\4" + bytes(300),
    }


@pytest.mark.parametrize("name", foreign_files())
def test_foreign_files_are_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    path.write_bytes(foreign_files()[name])
    for weights_only in (None, True, False):
        error = refuses(lambda weights_only=weights_only: Checkpointer().load(path, weights_only=weights_only))
        assert error.path == str(path)
    assert refuses(lambda: verify(path)).path == str(path)


def test_an_unreadable_pickle_is_refused_when_it_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    path.write_bytes(b"\x80\x02" + bytes(300))
    with pytest.raises(CheckpointError, match="Unsupported operand 0"):
        Checkpointer().load(path)
    refuses(lambda: Checkpointer().load(path, weights_only=False))


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    path.touch()
    assert "empty" in str(refuses(lambda: verify(path)))
    assert "empty" in str(refuses(lambda: Checkpointer().load(path)))


def test_a_zip_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.txt").write_text("hello")
    path = Path(shutil.make_archive(str(tmp_path / "a"), "zip", tmp_path / "folder"))
    for action in (verify, Checkpointer().load):
        assert isinstance(refuses(lambda action=action: action(path)), CheckpointFormatError)


def test_a_stock_file_that_lost_its_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    torch.save({"a": torch.zeros(1000)}, path)
    path.write_bytes(path.read_bytes()[:-30])
    assert_refused(path)


def test_the_catalog_walks_back_over_damaged_and_foreign_files(whole: bytes, tmp_path: Path, caplog: Any) -> None:
    names = ["1-good", "2-flipped", "3-truncated", "4-text", "5-empty"]
    contents = [whole, whole[:50] + b"\xff" + whole[51:], whole[:-9], b"text", b""]
    for age, (name, content) in enumerate(zip(names, contents, strict=True)):
        path = tmp_path / f"{name}.ckpt"
        path.write_bytes(content)
        os.utime(path, (1_000_000 + age, 1_000_000 + age))
    skipped: list[Any] = []
    catalog = Catalog(tmp_path, listeners=[skipped.append])
    # The copies record the same age; of the others, which record none, the date decides.
    assert [Path(info.path).stem for info in catalog.checkpoints()] == [*names[:1:-1], "2-flipped", "1-good"]
    newest = catalog.newest_verified()
    assert newest is not None
    assert (Path(newest.path).stem, newest.size, newest.modified) == ("1-good", len(whole), 1_000_000.0)
    assert [Path(event.path).stem for event in skipped] == names[:0:-1]
    assert all(name in caplog.text for name in names[1:])
    errors = catalog.verify()
    assert [Path(path).stem for path, error in errors.items() if error is None] == ["1-good"]


def test_a_pickle_of_other_sizes_than_its_records_is_refused(tmp_path: Path) -> None:
    saved, claimed = {"weight": torch.ones(8)}, {"weight": torch.ones(16)}
    layout, other = StateLayout(saved), StateLayout(claimed)
    image, donor = layout.live_image(), other.live_image()
    other.pickle_into(donor, claimed)
    assert donor._pickle is not None
    image.add_pickle(donor._pickle, donor._references, [])
    path = tmp_path / "mixed.ckpt"
    write_image(image, LocalStorage(), str(path), scratch=ScratchBuffers())
    verify(path)  # every digest matches: only the sizes differ
    with pytest.raises(CheckpointCorruptedError, match="size in the pickle differs"):
        Checkpointer().load(path)
