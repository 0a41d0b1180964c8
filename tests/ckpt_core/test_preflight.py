"""Warnings after the first save about later saves, and that nothing is warned about without a reason."""

from __future__ import annotations

import enum
import logging
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import fsspec
import pytest
import torch

from ckpt_core import Checkpointer, StorageError
from ckpt_core.options import CheckpointerOptions
from ckpt_core.resume import newest_to_resume


def save(path: str, count: int, **state: torch.Tensor) -> None:
    options = CheckpointerOptions(strategy="async")
    with Checkpointer(**options.settings()) as checkpointer:
        for number in range(count):
            checkpointer.save({"weight": torch.ones(300_000), **state}, f"{path}/{number}.ckpt")


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "ckpt_core.preflight"]


def test_a_disk_without_room_for_a_second_one_is_told_once(
    small_filesystem: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(str(small_filesystem), 1, filler=torch.zeros(1_000_000))  # uses 5.2 MB of 8 MiB
    assert len(said(caplog)) == 1
    assert "the next checkpoint may not fit" in said(caplog)[0]
    assert str(small_filesystem) in said(caplog)[0]


RANK = """
import logging, sys, torch
from ckpt_core import Checkpointer
from ckpt_core.options import CheckpointerOptions
from ckpt_core.events import rank_of_process
logging.basicConfig(format="%(message)s")
torch.distributed.init_process_group("gloo")
with Checkpointer(**CheckpointerOptions(strategy="async").settings()) as checkpointer:
    for number in range(2):
        checkpointer.save({"weight": torch.ones(3)}, f"{sys.argv[1]}/{rank_of_process()}/{number}.ckpt")
torch.distributed.barrier()  # one that leaves earlier ends the other, if that is still connecting
torch.distributed.destroy_process_group()
"""


@pytest.mark.extended
@pytest.mark.parametrize(
    ("restarts", "own_store", "times"), [(1, "0", 1), (1, "1", 0), (0, "0", 0)], ids=["shared", "own", "no restarts"]
)
def test_ranks_that_share_a_store_with_the_attempt_before_are_told_once(
    restarts: int, own_store: str, times: int, tmp_path: Path
) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", str(restarts)]
    done = subprocess.run(
        [sys.executable, *launch, str(script), str(tmp_path)],
        env={**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": own_store},
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun") == times


def test_nothing_is_said_where_there_is_room(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(str(tmp_path), 2)
    assert said(caplog) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.ckpt", "1.ckpt"]


@pytest.mark.parametrize("refuses", [False, True])
def test_a_store_that_refuses_to_delete_is_told_once(
    refuses: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = f"memory://{uuid.uuid4().hex}"
    if refuses:

        def refuse(*_: object, **__: object) -> None:
            raise PermissionError("AccessDenied: s3:DeleteObject")

        for name in ("rm", "rm_file", "_rm", "delete"):
            monkeypatch.setattr(fsspec.get_filesystem_class("memory"), name, refuse, raising=False)
    caplog.set_level(logging.WARNING)
    save(root, 2)
    assert len(said(caplog)) == int(refuses)
    if refuses:
        assert "nothing can be deleted" in said(caplog)[0]
        assert "AccessDenied" in said(caplog)[0]


def test_a_clock_that_is_behind_the_checkpoints_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(str(tmp_path), 1)
    assert said(caplog) == []
    now = time.time
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: now() - 2 * 3600)
        save(str(tmp_path), 2)
    assert len(said(caplog)) == 1
    assert "the clock of this machine is 2:00:00 behind the newest checkpoint" in said(caplog)[0]


def test_a_store_that_refuses_to_write_is_told_where_a_run_looks_and_ends_it_at_its_first_save(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = f"memory://{uuid.uuid4().hex}"
    assert newest_to_resume(root) is None
    assert fsspec.filesystem("memory").find(root) == []

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("AccessDenied: s3:PutObject")

    for name in ("_open", "pipe_file", "open"):
        monkeypatch.setattr(fsspec.get_filesystem_class("memory"), name, refuse, raising=False)
    with pytest.raises(StorageError, match=r"no checkpoint can be saved here: .*AccessDenied") as caught:
        newest_to_resume(root)
    assert caught.value.path == root
    with pytest.raises(StorageError, match="AccessDenied"):
        save(root, 1)


class Model:
    """A user's class that contains other classes."""

    class Mode(enum.Enum):
        TRAIN = 1

    class Settings:
        pass

    def method(self) -> None:
        pass


@pytest.mark.parametrize(
    ("value", "named"),
    [(Model.Mode.TRAIN, "Model.Mode"), (Model.Settings(), "Model.Settings"), (Model().method, "Model.method")],
    ids=["member", "instance", "method"],
)
def test_objects_of_nested_classes_are_told_by_their_keys(
    value: object, named: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Checkpointer(strategy="sync") as checkpointer:
        checkpointer.save({"settings": {"mode": value, "rate": 0.1}}, tmp_path / "a.ckpt")
    (message,) = caplog.messages
    assert f"will refuse it: settings.mode: {__name__}.{named}. Save" in message
