"""Files that try to run code when they are read."""

from __future__ import annotations

import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp

from ckpt_core import Catalog, Checkpointer, CheckpointError, UnsafeCheckpointError, verify
from ckpt_core.interchange import check_dcp, export_model


class Exploit:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: Path, how: str) -> None:
        self.marker = marker
        self.how = how

    def __reduce__(self) -> tuple[Any, ...]:
        if self.how == "os.system":
            return os.system, (f"touch '{self.marker}'",)
        if self.how == "eval":
            return eval, (f"open({str(self.marker)!r}, 'w').close()",)
        if self.how == "pathlib":
            return Path.touch, (Path(self.marker),)
        return torch.save, ({"a": 1}, str(self.marker))


def ours(state: Any, path: Path) -> None:
    with Checkpointer(strategy="sync") as checkpointer:
        checkpointer.save(state, path)


def stock(state: Any, path: Path) -> None:
    torch.save(state, path)


def stock_legacy(state: Any, path: Path) -> None:
    torch.save(state, path, _use_new_zipfile_serialization=False)


def plain_pickle(state: Any, path: Path) -> None:
    path.write_bytes(pickle.dumps(state, 2))


def newest_pickle(state: Any, path: Path) -> None:
    path.write_bytes(pickle.dumps(state, 5))


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("how", ["os.system", "eval", "pathlib", "torch.save"])
@pytest.mark.parametrize("write", [ours, stock, stock_legacy, plain_pickle, newest_pickle])
def test_no_code_runs_unless_asked_for(write: Callable[[Any, Path], None], how: str, tmp_path: Path) -> None:
    marker, path = tmp_path / "marker", tmp_path / "a.ckpt"
    write({"weight": torch.zeros(3), "bad": Exploit(marker, how)}, path)
    if write is ours:
        assert verify(path), "the digests are right: only the content is bad"
    checkpointer = Checkpointer(strategy="sync")
    for weights_only in (None, True):
        expected = CheckpointError if write is plain_pickle else UnsafeCheckpointError
        with pytest.raises(expected) as caught:
            checkpointer.load(path, weights_only=weights_only)
        assert isinstance(caught.value, pickle.UnpicklingError) or write is plain_pickle
        assert str(path) in str(caught.value)
        assert not marker.exists()
    if write in (plain_pickle, newest_pickle):  # which torch does not load either
        with pytest.raises(CheckpointError):
            verify(path)
    else:
        verify(path)
    Catalog(tmp_path).checkpoints()  # looks for the step
    assert not marker.exists()
    if write in (ours, stock) and how == "os.system":
        checkpointer.load(path, weights_only=False)
        assert marker.exists(), "the exploit would work"


def test_the_message_names_what_would_run_and_the_way_out(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    ours({"bad": Exploit(tmp_path / "marker", "os.system")}, path)
    with pytest.raises(UnsafeCheckpointError, match=r"posix\.system|os\.system") as caught:
        Checkpointer().load(path)
    assert "weights_only=False" in str(caught.value)
    assert "trust" in str(caught.value)


def test_our_own_reader_cannot_be_talked_into_a_plain_pickle(tmp_path: Path) -> None:
    """The fast reader builds objects before the tensors are read: it must be as strict as the slow one."""
    path = tmp_path / "a.ckpt"
    ours({"bad": Exploit(tmp_path / "marker", "torch.save"), "w": torch.ones(4)}, path)
    with zipfile.ZipFile(path) as archive:
        assert b"ctorch.serialization\nsave" in archive.read("archive/data.pkl")
    with pytest.raises(UnsafeCheckpointError):
        Checkpointer().load(path)
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("write", [ours, stock, stock_legacy])
def test_an_export_of_a_file_runs_no_code(write: Callable[[Any, Path], None], tmp_path: Path) -> None:
    marker, path = tmp_path / "ran", tmp_path / "x.ckpt"
    write({"state_dict": {"w": torch.ones(2)}, "extra": Exploit(marker, "os.system")}, path)
    with pytest.raises(UnsafeCheckpointError) as caught:
        export_model(path, tmp_path / "exported")
    assert caught.value.path == str(path) and not marker.exists()


def test_what_dcp_would_run_is_found_before_it_reads_it(tmp_path: Path) -> None:
    state = {"w": torch.ones(4), "plain": {"lr": 0.1, "step": 3}}
    dcp.save(state, checkpoint_id=tmp_path / "good", no_dist=True)
    check_dcp(tmp_path / "good")
    dcp.save(
        state | {"bad": Exploit(tmp_path / "marker", "os.system")}, checkpoint_id=tmp_path / "object", no_dist=True
    )
    shutil.copytree(tmp_path / "good", tmp_path / "metadata")
    (tmp_path / "metadata" / ".metadata").write_bytes(pickle.dumps(Exploit(tmp_path / "marker", "os.system")))
    for name, said in (("object", "object at bad"), ("metadata", "system")):
        with pytest.raises(UnsafeCheckpointError, match=said):
            check_dcp(tmp_path / name)
        assert not (tmp_path / "marker").exists()
    dcp.load({"w": torch.ones(4), "bad": 1}, checkpoint_id=tmp_path / "object", no_dist=True)
    assert (tmp_path / "marker").exists(), "the exploit would work"
