"""Files of directories that were never committed: deleted when old and written by this package; no other file is."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save as safetensors_of

from ckpt_core import Catalog, DirectoryCheckpointer, Kind, Part
from ckpt_core._layouts.directory import leftovers
from ckpt_core.cli import main
from ckpt_core.interchange import export_model
from ckpt_core.storage import storage_for
from ckpt_core.storage.base import MANIFEST_NAME, FileInfo
from tests.support.servers import Server

ServerOf = Callable[[str], Server]
STATE = {"w": torch.arange(600_000.0), "b": torch.ones(3)}


@pytest.fixture
def scene(server_of: ServerOf) -> tuple[str, Any, dict[str, Any]]:
    """A store with two checkpoints, one of which has lost its manifest, as if it had never been committed."""
    server = server_of("moto")
    root, options = f"{server.new_bucket()}/run", dict(server.options)
    with DirectoryCheckpointer(strategy="sync", storage_options=options) as checkpointer:
        for name in ("step=1", "step=2"):
            checkpointer.save([Part("model", STATE, Kind.REPLICATED)], f"{root}/{name}")
    storage: Any = storage_for(root, options)
    storage.delete(f"{root}/step=2/{MANIFEST_NAME}")
    return root, storage, options


def names(storage: Any, root: str) -> list[str]:
    found = storage._filesystem.find(root)
    inside = storage._filesystem._strip_protocol(root) + "/"
    return sorted(name.removeprefix(inside) for name in found if ".ckpt-lease" not in name)


def put_models(storage: Any, root: str, tmp_path: Path) -> None:
    """Put models next to the checkpoints, as other programs write them and as this package exports them."""
    storage.put(f"{root}/hub/model-00001-of-00001.safetensors", safetensors_of(STATE, {"format": "pt", "save": "x"}))
    storage.put(f"{root}/hub/model.safetensors", b"no header at all")
    storage.put(f"{root}/broken/model.safetensors", b"\xff" * 8 + b'{"__metadata__":{"save":')
    storage.put(f"{root}/logs/events.jsonl", b"{}")
    with DirectoryCheckpointer(strategy="sync") as checkpointer:
        checkpointer.save([Part("model", STATE, Kind.REPLICATED)], tmp_path / "step=1")
    export_model(tmp_path / "step=1", tmp_path / "export")
    for file in (tmp_path / "export").iterdir():
        storage.put(f"{root}/export/{file.name}", file.read_bytes())


def test_old_ones_of_ours_go_and_nothing_else(scene: Any, tmp_path: Path) -> None:
    root, storage, options = scene
    put_models(storage, root, tmp_path)
    storage.put(f"{root}/step=2/notes.txt", b"by somebody else")
    storage.put(f"{root}/.ckpt-preflight", b"\0")
    before = names(storage, root)
    assert "export/model.safetensors" in before
    assert leftovers.remove_leftovers(storage, root) == [], "a day has not passed"
    assert Catalog(root, suffix="", storage_options=options).prune() == []
    assert names(storage, root) == before

    assert leftovers.remove_leftovers(storage, root, silent_seconds=-60.0) == [
        f"{root}/.ckpt-preflight",
        f"{root}/step=2",
    ]
    gone = {".ckpt-preflight", "step=2/model.safetensors", "step=2/rank-00001-of-00001.digests"}
    assert names(storage, root) == sorted(set(before) - gone)
    with DirectoryCheckpointer(storage_options=options).load(f"{root}/step=1") as checkpoint:
        target = {name: torch.zeros_like(value) for name, value in STATE.items()}
        checkpoint.load("model", into=target)
    assert torch.equal(target["w"], STATE["w"])


def test_the_newest_file_counts(scene: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    root, storage, _ = scene
    listed = type(storage).list

    def aged(self: Any, directory: str) -> list[FileInfo]:
        return [
            FileInfo(file.path, file.size, file.modified - (0 if file.path.endswith(".digests") else 10 * 24 * 3600))
            for file in listed(self, directory)
        ]

    monkeypatch.setattr(type(storage), "list", aged)
    assert leftovers.remove_leftovers(storage, root) == []
    assert "step=2/model.safetensors" in names(storage, root)


def test_one_that_is_committed_meanwhile_stays(scene: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    root, storage, _ = scene
    manifest = storage.get(f"{root}/step=1/{MANIFEST_NAME}")
    is_ours = leftovers._is_ours

    def commit(*arguments: Any) -> bool:
        storage.put(f"{root}/step=2/{MANIFEST_NAME}", manifest)
        return is_ours(*arguments)

    monkeypatch.setattr(leftovers, "_is_ours", commit)
    before = names(storage, root)
    assert leftovers.remove_leftovers(storage, root, silent_seconds=-60.0) == []
    assert names(storage, root) == sorted([*before, f"step=2/{MANIFEST_NAME}"])


def test_ckpt_clean(scene: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    root, storage, options = scene
    clean = ["--storage-options", json.dumps(options), "clean", root]
    assert main(clean) == 0
    assert capsys.readouterr().out == ""
    day = leftovers.SILENT_SECONDS
    now = time.time
    monkeypatch.setattr(leftovers.time, "time", lambda: now() + day + 60.0)
    assert main(clean) == 0
    assert capsys.readouterr().out == f"deleted {root}/step=2\n"
    assert names(storage, root) == [
        "step=1/manifest.json",
        "step=1/model.safetensors",
        "step=1/rank-00001-of-00001.digests",
    ]
