"""A process is killed while it uploads to a real S3 server: what the store holds, and what the next process does."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core import Catalog, Checkpointer, DirectoryCheckpointer, Kind, Part, verify
from ckpt_core.storage.fsspec_storage import FsspecStorage
from ckpt_core.tiers import Tiers
from tests.conftest import ScriptRunner
from tests.support.server_fixtures import server_of, servers
from tests.support.servers import Server
from tests.support.stores import storage_at, unfinished_uploads

__all__ = ["server_of", "servers"]  # fixtures

UPLOADS_UNTIL_KILLED = """
import json, os, signal, sys, time, torch
from ckpt_core import Checkpointer, DirectoryCheckpointer, Kind, Part
from ckpt_core.storage import Fault, FaultyStorage, storage_for
from ckpt_core.tiers import Tiers
from tests.support.stores import unfinished_uploads

layout, local, remote, options, value = json.loads(sys.argv[1])

def is_third_window(operation):
    if operation.name != "write_at" or operation.size <= 2**22:
        return False
    windows.append(operation)
    if len(windows) == 3:
        while not unfinished_uploads(remote, store):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)

windows = []
store = storage_for(remote, options)
storage = FaultyStorage(store, [Fault(is_third_window)])
tiers = Tiers(local_dir=local, upload_to=remote, remote=storage)
state = {"w": torch.full((12 * 2**20,), float(value))}
if layout == "file":
    run = Checkpointer(tiers=tiers)
    run.save({"w": torch.zeros(10)}, f"{local}/0.ckpt")
    run.close()  # at the end, the newest would be first
    run.save(state, f"{local}/1.ckpt")
else:
    run = DirectoryCheckpointer(tiers=tiers)
    run.save([Part("model", {"w": torch.zeros(10)}, Kind.REPLICATED)], f"{local}/0")
    run.close()
    run.save([Part("model", state, Kind.REPLICATED)], f"{local}/1")
run.close()
"""


def value_at(layout: str, path: str, **settings: Any) -> float:
    if layout == "file":
        weight = Checkpointer(**settings).load(path)["w"]
    else:
        with DirectoryCheckpointer(**settings).load(path) as checkpoint:
            weight = checkpoint.load("model")["w"]
    assert torch.equal(weight, torch.full_like(weight, float(weight[0])))
    return float(weight[0])


@pytest.mark.extended_cells("directory-loading")
@pytest.mark.parametrize(("layout", "goes_on"), [("file", "saving"), ("directory", "loading")])
def test_the_next_process_finishes_the_upload(
    layout: str,
    goes_on: str,
    server_of: Callable[[str], Server],
    fork_script: ScriptRunner,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = server_of("moto")
    options = dict(server.options)
    remote, local = f"{server.new_bucket()}/run", str(tmp_path / "local")
    ending = ".ckpt" if layout == "file" else ""
    store = storage_at((remote, options))
    arguments = json.dumps([layout, local, remote, options, 1.0])
    killed = fork_script(UPLOADS_UNTIL_KILLED, arguments, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert unfinished_uploads(remote, store)

    there = Catalog(remote, suffix=ending, storage_options=options).checkpoints()
    assert [info.path for info in there] == [f"{remote}/0{ending}"], "half an upload is no checkpoint"
    tiers = Tiers(local_dir=local, upload_to=remote)
    newest = Catalog(local, suffix=ending, storage_options=options, tiers=tiers).newest_verified()
    assert newest is not None
    assert newest.path == f"{local}/1{ending}"

    monkeypatch.setattr(FsspecStorage, "abandoned_after_seconds", -1.0)  # instead of waiting for an hour
    # With it, the test's own uploads would be taken for orphans.
    monkeypatch.setattr(FsspecStorage, "remove_abandoned", lambda *_: [])
    if goes_on == "loading":
        assert unfinished_uploads(remote, store)
        run: Any = (Checkpointer if layout == "file" else DirectoryCheckpointer)(tiers=tiers, storage_options=options)
        with run:
            run.load(f"{local}/1{ending}")
        expected = {"0": 0.0, "1": 1.0}
    else:
        if layout == "file":
            with Checkpointer(tiers=tiers, storage_options=options) as run:
                run.save({"w": torch.full((10,), 2.0)}, f"{local}/2.ckpt")
        else:
            with DirectoryCheckpointer(tiers=tiers, storage_options=options) as run:
                run.save([Part("model", {"w": torch.full((10,), 2.0)}, Kind.REPLICATED)], f"{local}/2")
        expected = {"0": 0.0, "1": 1.0, "2": 2.0}
    assert unfinished_uploads(remote, store) == []
    for name, value in expected.items():
        verify(f"{remote}/{name}{ending}", storage_options=options)
        assert value_at(layout, f"{remote}/{name}{ending}", storage_options=options) == value
    newest = Catalog(remote, suffix=ending, storage_options=options).newest_verified()
    assert newest is not None
    assert newest.path == f"{remote}/{max(expected)}{ending}"
