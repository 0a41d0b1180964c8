"""The options of the plugins are passed on as arguments of a checkpointer."""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckpt_core import Checkpointer, DirectoryCheckpointer, Kind, Part, small_states
from ckpt_core.events import Event
from ckpt_core.options import CheckpointerOptions
from ckpt_core.small_states import wait_if_small


@pytest.mark.parametrize("layout", [Checkpointer, DirectoryCheckpointer])
def test_a_checkpointer_of_either_layout_has_them(
    layout: type[Checkpointer | DirectoryCheckpointer], tmp_path: Path
) -> None:
    near, far, log = (str(tmp_path / name) for name in ("near", "far", "events.jsonl"))
    heard: list[Event] = []
    given = CheckpointerOptions(local_dir=near, upload_to=far, keep_local=1, event_log=log, max_pending=2)
    with layout(**given.settings(heard.append)) as checkpointer:
        state = {"weight": torch.ones(2)}
        if isinstance(checkpointer, Checkpointer):
            checkpointer.save(state, f"{far}/a")
        else:
            checkpointer.save([Part("model", state, Kind.REPLICATED)], f"{far}/a")
    assert (tmp_path / "near" / "a").exists() and (tmp_path / "far" / "a").exists()
    kinds = [type(event).__name__ for event in heard]
    assert "SaveCommitted" in kinds and "CheckpointUploaded" in kinds
    assert [json.loads(line)["event"] for line in Path(log).read_text().splitlines()] == kinds


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"local_dir": "/near"}, "local_dir needs upload_to"),
        ({"upload_to": "/far"}, "upload_to needs local_dir"),
        ({"keep_local": 2}, "keep_local needs"),
        ({"local_dir": "/near", "upload_to": "/near/far"}, "must lie apart"),
    ],
)
def test_tiers_that_make_no_sense_are_refused_at_once(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CheckpointerOptions(**given)  # type: ignore[arg-type]


def test_credentials_are_not_shown() -> None:
    assert "secret" not in repr(CheckpointerOptions(storage_options={"key": "secret"}))


def test_only_a_small_state_is_waited_for_and_no_more_sizes_are_looked_at_than_needed() -> None:
    waited: list[float] = []

    class Saves:
        def drain(self, *, timeout: float) -> None:
            waited.append(timeout)

    saves, limit = Saves(), small_states.SMALL_STATE_BYTES
    sizes = iter([limit, 1, 1])
    wait_if_small(saves, sizes)  # type: ignore[arg-type]
    assert waited == [] and list(sizes) == [1]
    wait_if_small(saves, [limit - 1, 1])  # type: ignore[arg-type]
    assert waited == [small_states.LONGEST_WAIT_FOR_SMALL_SECONDS]


def test_the_page_is_written_when_the_interpreter_ends_if_nobody_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    page = tmp_path / "report.html"
    given = CheckpointerOptions(report=str(page))
    with Checkpointer(**given.settings()) as checkpointer:
        checkpointer.save({"w": torch.ones(2)}, tmp_path / "1.ckpt")
    (end,) = at_exit
    monkeypatch.setattr(os, "getpid", lambda: 1)
    end()  # as in a fork of the process
    assert not page.exists()
    monkeypatch.undo()
    end()
    assert "Checkpoints of a run" in page.read_text()
    page.unlink()
    end()
    given.write_report()
    assert not page.exists(), "nothing has happened since"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_pending": "2"}, "max_pending must be a whole number of at least 1, not '2'"),
        ({"max_pending": float("nan")}, "max_pending must be a whole number"),
        ({"overlap": "false"}, "overlap must be true or false, not 'false'"),
        ({"storage_options": "key=1"}, "storage_options must be a mapping with names as keys"),
        ({"listeners": print}, "listeners must be a list of functions"),
        ({"listeners": ["print"]}, "listeners must be a list of functions"),
        ({"max_host_bytes": 1e9}, "max_host_bytes must be a whole number"),
        ({"event_log": 0}, "event_log must be the path of a file, not 0"),
        ({"report": ""}, "report must be the path of a file, not ''"),
        ({"max_pending": {"weights": list(range(1000))}}, r"not {'weights': .{68}$"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_a_wrong_value_is_refused_by_name(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CheckpointerOptions(**wrong)
    if not {"event_log", "report"} & set(wrong):
        with pytest.raises(ValueError, match=message):
            DirectoryCheckpointer(**wrong)


def test_a_number_of_numpy_is_a_number() -> None:
    assert Checkpointer(max_pending=np.int64(2)).strategy == "async"  # type: ignore[arg-type]
