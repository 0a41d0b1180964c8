"""Whatever bytes the reader is given, it returns the saved state or raises a ``CheckpointError``."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpt_core import CheckpointError
from ckpt_core._layouts.torch_file.loading import load_torch_file, verify_torch_file
from ckpt_core.checkpointer import Checkpointer
from ckpt_core.storage.base import FileReader
from ckpt_core.storage.local import LocalStorage
from tests.support.states import assert_same_state

STATE = {
    "w": torch.arange(20.0),
    "e": torch.empty(0),
    "x": [1, "text", None],
    "n": {"d": torch.ones(3, dtype=torch.int8)},
}
pytestmark = pytest.mark.filterwarnings("ignore:Detected pickle protocol")
EXAMPLES = settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))


def _ours() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.ckpt")
        with Checkpointer(strategy="sync") as checkpointer:
            checkpointer.save(STATE, path)
        return path.read_bytes()


def _stock(zipped: bool) -> bytes:
    stream = io.BytesIO()
    torch.save(STATE, stream, _use_new_zipfile_serialization=zipped)
    return stream.getvalue()


OURS = _ours()
SEEDS = {"ours": OURS, "stock": _stock(True), "legacy": _stock(False)}


class BytesReader(FileReader):
    """A file in memory."""

    def __init__(self, data: bytes) -> None:
        self.path = "bytes"
        self.size = len(data)
        self._data = data

    def read_into(self, offset: int, target: memoryview) -> None:
        assert offset >= 0
        assert offset + len(target) <= self.size, "the reader must not read beyond the end"
        target[:] = self._data[offset : offset + len(target)]

    def close(self) -> None:
        """Do nothing: no file is open."""


def read(data: bytes, weights_only: bool = True) -> tuple[Any, bool] | None:
    """Verify and load; return the state and whether it was verified, or None if the file was refused."""
    reader = BytesReader(data)
    try:
        verified = verify_torch_file(reader)
    except CheckpointError:
        verified = False
        refused = True
    else:
        refused = False
    try:
        state, checked = load_torch_file(reader, weights_only=weights_only)
    except CheckpointError:
        return None
    # in another program's file, bytes that torch does not look at may differ
    assert not (refused and checked), "what loads also verifies"
    assert checked == verified
    return state, checked


def mutations() -> st.SearchStrategy[list[tuple[str, int, bytes]]]:
    kinds = st.sampled_from(["overwrite", "insert", "delete", "truncate", "copy"])
    return st.lists(st.tuples(kinds, st.integers(0, 2**16), st.binary(min_size=1, max_size=9)), min_size=1, max_size=4)


def mutated(seed: bytes, changes: list[tuple[str, int, bytes]]) -> bytes:
    data = bytearray(seed)
    for kind, position, payload in changes:
        at = position % (len(data) + 1)
        if kind == "overwrite":
            data[at : at + len(payload)] = payload
        elif kind == "insert":
            data[at:at] = payload
        elif kind == "delete":
            del data[at : at + len(payload)]
        elif kind == "truncate":
            del data[at:]
        else:
            data += data[at : at + 64 * len(payload)]
    return bytes(data)


def test_the_seeds_load() -> None:
    for name, seed in SEEDS.items():
        loaded = read(seed)
        assert loaded is not None
        assert_same_state(loaded[0], STATE)
        assert loaded[1] is (name == "ours")


@given(changes=mutations())
@EXAMPLES
def test_changed_checkpoints_of_ours(changes: list[tuple[str, int, bytes]]) -> None:
    data = mutated(OURS, changes)
    loaded = read(data)
    if loaded is not None:  # unchanged, or taken for another program's file
        assert (data == OURS) == loaded[1]
        if loaded[1]:
            assert_same_state(loaded[0], STATE)


@pytest.mark.parametrize("seed", ["stock", "legacy"])
@given(changes=mutations())
@EXAMPLES
def test_changed_files_of_torch(seed: str, changes: list[tuple[str, int, bytes]]) -> None:
    loaded = read(mutated(SEEDS[seed], changes))
    assert loaded is None or loaded[1] is False


@given(data=st.binary(max_size=300))
@EXAMPLES
def test_random_bytes(data: bytes) -> None:
    for start in (b"", b"PK\3\4", b"\x80\x02"):
        assert read(start + data) is None or not data


@given(data=st.binary(max_size=200), changes=mutations())
@EXAMPLES
def test_random_ends_and_beginnings(data: bytes, changes: list[tuple[str, int, bytes]]) -> None:
    for mixed in (OURS[: len(OURS) // 2] + data, data + OURS, OURS[:-60] + data + OURS[-60:]):
        changed = mutated(mixed, changes) if data else mixed + b"\0"
        loaded = read(changed)
        assert loaded is None or not loaded[1] or changed == OURS


def test_the_reader_used_here_is_as_strict_as_the_real_one(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    with LocalStorage().open(str(tmp_path / "a")) as reader, pytest.raises(CheckpointError):
        reader.read_into(1, memoryview(bytearray(3)))
