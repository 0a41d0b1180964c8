"""What torch.load's default refuses is unsafe if the pickle is valid, and damaged otherwise: in each layout."""

from __future__ import annotations

import base64
import io
import logging
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.serialization import UNSAFE_MESSAGE

from ckpt_core import (
    Catalog,
    CheckpointCorruptedError,
    Checkpointer,
    CheckpointError,
    CheckpointFormatError,
    UnsafeCheckpointError,
    verify,
)
from ckpt_core._layouts.directory.skeleton import decode_plain
from ckpt_core.geometry import Box
from ckpt_core.interchange.dcp_format import DcpEntry, Location, load_stored
from ckpt_core.interchange.streaming import TensorMemory
from ckpt_core.resume import newest_to_resume
from ckpt_core.storage import LocalStorage
from ckpt_core.weights_only import reason_of, refused_in
from tests.support.pickles import DAMAGED, REFUSED, REFUSED_THOUGH_ALLOWED, archive_of, old_file_of

pytestmark = pytest.mark.filterwarnings("ignore:Detected pickle protocol")


def read_file(file: bytes, tmp_path: Path) -> Any:
    path = tmp_path / "a.ckpt"
    path.write_bytes(file)
    return Checkpointer(strategy="sync").load(path)


def read_archive(pickled: bytes, tmp_path: Path) -> Any:
    return read_file(archive_of(pickled), tmp_path)


def read_old_file(pickled: bytes, tmp_path: Path) -> Any:
    return read_file(old_file_of(pickled), tmp_path)


def read_object_of_directory(pickled: bytes, _: Path) -> Any:
    skeleton = {"$object": ["module.Class", base64.b64encode(archive_of(pickled)).decode()]}
    return decode_plain(skeleton, [], rebuilds=True)


def read_object_of_dcp(pickled: bytes, tmp_path: Path) -> Any:
    (tmp_path / "stored").write_bytes(archive_of(pickled))
    where = Location("stored", 0, os.path.getsize(tmp_path / "stored"))
    entry = DcpEntry(("x",), None, ((Box.whole(()), where),))
    return load_stored(LocalStorage(), str(tmp_path), entry, where, TensorMemory())


# How each layout is read, and the error for a damaged one: the caller of the third adds which checkpoint it is.
LAYOUTS = [
    (read_archive, CheckpointFormatError),
    (read_old_file, CheckpointFormatError),
    (read_object_of_directory, (ValueError, CheckpointFormatError)),
    (read_object_of_dcp, CheckpointCorruptedError),
]


@pytest.mark.parametrize(("read", "error"), LAYOUTS, ids=[read.__name__ for read, _ in LAYOUTS])
@pytest.mark.parametrize("pickled", DAMAGED.values(), ids=DAMAGED)
def test_what_is_damaged_is_not_called_unsafe(
    read: Callable[[bytes, Path], Any], error: type[Exception], pickled: bytes, tmp_path: Path
) -> None:
    with pytest.raises(error) as caught:
        read(pickled, tmp_path)
    assert not isinstance(caught.value, UnsafeCheckpointError)
    assert "weights_only" not in str(caught.value)


@pytest.mark.parametrize("read", [read for read, _ in LAYOUTS])
@pytest.mark.parametrize("pickled", REFUSED.values(), ids=REFUSED)
def test_what_a_valid_pickle_asks_for_is_unsafe(
    read: Callable[[bytes, Path], Any], pickled: bytes, tmp_path: Path
) -> None:
    with pytest.raises(UnsafeCheckpointError, match="could run arbitrary code"):
        read(pickled, tmp_path)


@pytest.mark.parametrize(("pickled", "allowed"), REFUSED_THOUGH_ALLOWED.values(), ids=REFUSED_THOUGH_ALLOWED)
def test_a_type_that_torch_does_not_read_although_it_is_allowed_is_not_damage(
    pickled: bytes, allowed: list[Any], tmp_path: Path
) -> None:
    with torch.serialization.safe_globals(allowed), pytest.raises(UnsafeCheckpointError, match="defaultdict"):
        read_archive(pickled, tmp_path)


@pytest.mark.parametrize(
    ("pickled", "reason"),
    [
        (REFUSED["a function"], "Unsupported global: GLOBAL posixpath.join"),
        (REFUSED["a function of a blocked module"], "Trying to load unsupported GLOBAL posix.getpid"),
    ],
)
def test_the_reason_is_what_torch_says_without_its_advice(pickled: bytes, reason: str) -> None:
    with pytest.raises(Exception, match="Weights only load failed") as caught:
        torch.load(io.BytesIO(archive_of(pickled)), weights_only=True)
    assert str(refused_in(caught.value)).startswith(reason)
    assert reason_of(caught.value).startswith(reason)
    assert "arbitrary code" not in reason_of(caught.value)


def test_what_a_program_has_not_imported_is_not_damage() -> None:
    reason = "``torch.distributed.tensor`` must be imported to load DTensors"
    error = pickle.UnpicklingError(f"Weights only load failed. {reason}\n {UNSAFE_MESSAGE}\n")  # as torch words it
    assert refused_in(error) == reason_of(error) == reason


def test_words_in_a_damaged_pickle_do_not_make_it_unsafe(tmp_path: Path) -> None:
    text = b"Unsupported global: GLOBAL os.system was not allowed"
    with pytest.raises(CheckpointFormatError):
        read_archive(b"\x80\x02X" + len(text).to_bytes(4, "little") + text + b")R.", tmp_path)


@pytest.mark.parametrize("write", [archive_of, old_file_of])
@pytest.mark.parametrize("kind", ["SETITEM of a number", "no such operation", "REDUCE of a number"])
def test_a_resume_walks_back_past_a_damaged_one(
    write: Callable[[bytes], bytes], kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Checkpointer(strategy="sync").save({"weight": torch.ones(3), "global_step": 1}, tmp_path / "step=1.ckpt")
    newest = tmp_path / "step=2.ckpt"
    newest.write_bytes(write(DAMAGED[kind]))
    with pytest.raises(CheckpointError) as caught:
        verify(newest)
    assert not isinstance(caught.value, UnsafeCheckpointError)
    with caplog.at_level(logging.WARNING):
        point = newest_to_resume(tmp_path)
    assert point is not None
    assert os.path.basename(point.path) == "step=1.ckpt"
    assert f"passed over the checkpoint {newest}" in caplog.text


def test_a_resume_stops_at_an_unsafe_one(tmp_path: Path) -> None:
    Checkpointer(strategy="sync").save({"weight": torch.ones(3), "global_step": 1}, tmp_path / "step=1.ckpt")
    (tmp_path / "step=2.ckpt").write_bytes(archive_of(REFUSED["a function"]))
    info = Catalog(tmp_path).newest_verified()
    assert info is not None
    with pytest.raises(UnsafeCheckpointError):
        Checkpointer(strategy="sync").load(info.path)
