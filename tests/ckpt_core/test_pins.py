"""A pinned checkpoint is kept, whoever wants to delete it."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from ckpt_core import Catalog, Checkpointer, DirectoryCheckpointer, Kind, Part
from ckpt_core.cli import main
from ckpt_core.events import CheckpointRemoved, Event
from ckpt_core.pins import is_pinned, note_of_pin, pin, pin_path, unpin
from ckpt_core.storage import LocalStorage
from ckpt_core.tiers import Tiers

LOCAL = LocalStorage()


def parts() -> list[Part]:
    return [Part("model", {"weight": torch.ones(2)}, Kind.REPLICATED)]


@pytest.mark.parametrize("strategy", ["sync", "async"])
@pytest.mark.parametrize("kind", ["file", "directory"])
def test_a_pinned_checkpoint_is_not_removed_until_it_is_unpinned(
    tmp_path: Path, kind: str, strategy: Literal["sync", "async"], caplog: pytest.LogCaptureFixture
) -> None:
    events: list[Event] = []
    path = tmp_path / "step=1.ckpt"
    caplog.set_level(logging.INFO)
    make = {"file": Checkpointer, "directory": DirectoryCheckpointer}[kind]
    with make(strategy=strategy, listeners=[events.append]) as checkpointer:
        state: Any = {"weight": torch.ones(2)} if kind == "file" else parts()
        checkpointer.save(state, path)
        checkpointer.wait()
        pin(str(path), LOCAL, "figure 3")
        for _ in range(2):
            checkpointer.remove(path)
            checkpointer.drain()
        assert path.exists()
        assert [event for event in events if isinstance(event, CheckpointRemoved)] == []
        assert [record.message for record in caplog.records].count(
            f"kept the checkpoint {path}, which is pinned: ckpt drop unpins it"
        ) == 1
        unpin(str(path), LOCAL)
        checkpointer.remove(path)
        checkpointer.drain()
    assert os.listdir(tmp_path) == []


def test_a_pin_in_either_tier_holds_both_copies(tmp_path: Path) -> None:
    tiers = Tiers.of(str(tmp_path / "local"), str(tmp_path / "store"))
    for place in ("local", "store"):
        with Checkpointer(strategy="async", tiers=tiers) as checkpointer:
            checkpointer.save({"weight": torch.ones(2)}, tmp_path / "local" / f"{place}.ckpt")
            checkpointer.close()
            pin(str(tmp_path / place / f"{place}.ckpt"), LOCAL)
            checkpointer.remove(tmp_path / "local" / f"{place}.ckpt")
        assert (tmp_path / "local" / f"{place}.ckpt").exists() and (tmp_path / "store" / f"{place}.ckpt").exists()


def test_a_pin_is_no_checkpoint_and_spoils_none(tmp_path: Path) -> None:
    with Checkpointer(strategy="sync") as files, DirectoryCheckpointer(strategy="sync") as directories:
        files.save({"step": 1}, tmp_path / "a.ckpt")
        directories.save(parts(), tmp_path / "checkpoint_2", step=2)
    for name in ("a.ckpt", "checkpoint_2"):
        pin(str(tmp_path / name), LOCAL)
    found = Catalog(tmp_path, suffix="").checkpoints()
    assert [(info.name, info.is_pinned) for info in found] == [("checkpoint_2", True), ("a.ckpt", True)]
    assert Catalog(tmp_path, suffix="").newest_verified() == found[0]
    # older versions do not look for pins under these names
    assert not pin_path("a.ckpt").endswith(".ckpt") and pin_path("checkpoint_2").startswith(".")


def test_a_damaged_pin_still_pins(tmp_path: Path) -> None:
    path = str(tmp_path / "a.ckpt")
    assert note_of_pin(path, LOCAL) is None and not is_pinned(path, LOCAL)
    Path(pin_path(path)).write_bytes(b"\xff{")
    assert is_pinned(path, LOCAL) and note_of_pin(path, LOCAL) == ""


def test_keep_ls_prune_and_drop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Checkpointer(strategy="sync") as files:
        for step, loss in ((1, 0.9), (2, 0.2), (3, 0.5), (4, 0.6)):
            files.save({"step": step, "metrics": {"loss": loss}}, tmp_path / f"step={step}.ckpt")
    pinned = tmp_path / "step=1.ckpt"
    assert main(["keep", str(pinned), "--note", "figure 3"]) == 0
    capsys.readouterr()
    assert main(["ls", str(tmp_path), "--json"]) == 0
    listed = {os.path.basename(entry["path"]): entry for entry in json.loads(capsys.readouterr().out)}
    assert listed["step=1.ckpt"]["kept_because"] == ["pinned (figure 3)"] and listed["step=1.ckpt"]["pinned"]
    assert listed["step=4.ckpt"]["kept_because"] == ["newest"] and listed["step=4.ckpt"]["metrics"] == {"loss": 0.6}
    assert main(["ls", str(tmp_path)]) == 0
    assert "loss=0.9  pinned (figure 3)  " in capsys.readouterr().out

    assert main(["prune", str(tmp_path), "--keep", "best=los", "--yes"]) == 2, "a metric that nobody has noted"
    assert "they record loss" in capsys.readouterr().err
    assert main(["prune", str(tmp_path), "--keep", "best=loss", "--yes"]) == 0
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["step=1.ckpt", "step=2.ckpt", "step=4.ckpt"]
    assert main(["clean", str(tmp_path)]) == 0 and pinned.exists()
    for said in ("unpinned", "was not pinned:"):
        capsys.readouterr()
        assert main(["drop", str(pinned)]) == 0
        assert capsys.readouterr().out == f"{said} {pinned}\n"
    assert main(["prune", str(tmp_path), "--keep", "best=loss", "--yes"]) == 0
    assert not pinned.exists()
    assert main(["keep", str(tmp_path)]) == 1
    assert "name the checkpoints" in capsys.readouterr().err


def test_keep_refuses_what_is_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notes, manifest = tmp_path / "notes.txt", tmp_path / "7" / "manifest.json"
    notes.write_text("lr=3e-4")
    manifest.parent.mkdir()
    manifest.write_text("{}")
    for path in (notes, manifest.parent):
        assert main(["keep", str(path)]) == 1
        assert "this is not a checkpoint" in capsys.readouterr().err
    assert not list(tmp_path.rglob(".*.keep"))

    manifest.write_text("")  # damaged, and the user may want to look into it
    assert main(["verify", str(manifest.parent)]) == 1
    assert "DAMAGED" in capsys.readouterr().out
    assert main(["keep", str(manifest.parent)]) == 0


def test_the_pin_of_a_checkpoint_that_was_deleted_by_hand_can_be_dropped(tmp_path: Path) -> None:
    path = str(tmp_path / "a.ckpt")
    Checkpointer(strategy="sync").save({"step": 1}, path)
    assert main(["keep", path]) == 0
    os.unlink(path)
    assert main(["drop", path]) == 0
    assert os.listdir(tmp_path) == []
    assert main(["drop", path]) == 1
