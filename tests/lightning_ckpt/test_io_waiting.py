"""When the asynchronous plugin waits, and what a copy of it keeps: what Lightning's own tests expect of a plugin."""

from __future__ import annotations

import copy
import http.server
import pickle
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_core.checkpointer as checkpointer_module
from ckpt_core import small_states
from ckpt_core.errors import CheckpointNotFoundError, StorageError
from ckpt_core.storage import FileWriter, LocalStorage
from lightning_ckpt import AsyncCheckpointIO, SyncCheckpointIO
from tests.conftest import LIGHTNING, ScriptRunner

SECONDS = 200.0


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Return an event; all writes wait until it is set."""
    opened = threading.Event()

    class GatedStorage(LocalStorage):
        def create(self, path: str, expected_size: int) -> FileWriter:
            assert opened.wait(SECONDS)
            return super().create(path, expected_size)

    monkeypatch.setattr(checkpointer_module, "storage_for", lambda *_: GatedStorage())
    yield opened
    opened.set()


def trainer_state(*, ready: int, completed: int, numbers: int) -> dict[str, Any]:
    """Return the parts of a Trainer's checkpoint that matter here."""
    epochs = {"ready": ready, "completed": completed}
    return {"loops": {"fit_loop": {"epoch_progress": {"current": epochs}}}, "weight": torch.zeros(numbers)}


LARGE = small_states.SMALL_STATE_BYTES  # as a count of float32: four times the limit


def test_a_large_state_is_written_behind_a_running_epoch(
    gate: threading.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = AsyncCheckpointIO()
    monkeypatch.setattr(plugin.checkpointer, "drain", lambda **_: pytest.fail("it waited"))
    plugin.save_checkpoint(trainer_state(ready=2, completed=1, numbers=LARGE), tmp_path / "a.ckpt")
    assert plugin.checkpointer.pending == (str(tmp_path / "a.ckpt"),)
    gate.set()
    plugin.teardown()
    assert (tmp_path / "a.ckpt").exists()


@pytest.mark.parametrize(
    ("state", "name"),
    [
        (trainer_state(ready=2, completed=2, numbers=LARGE), "after_fit.ckpt"),
        (trainer_state(ready=0, completed=0, numbers=LARGE), "before_fit.ckpt"),
        (trainer_state(ready=2, completed=1, numbers=LARGE), "hpc_ckpt_1.ckpt"),
        (trainer_state(ready=2, completed=1, numbers=LARGE), "lightning_checkpoints-job_id=1-name=a/0/checkpoint.ckpt"),
    ],
    ids=["after fit", "before fit", "SLURM", "Ray"],
)
def test_a_save_that_nothing_trains_behind_returns_when_it_is_durable(
    gate: threading.Event, tmp_path: Path, state: dict[str, Any], name: str
) -> None:
    plugin = AsyncCheckpointIO()
    saving = threading.Thread(target=plugin.save_checkpoint, args=(state, tmp_path / name))
    saving.start()
    saving.join(0.3)
    assert saving.is_alive()
    gate.set()
    saving.join(SECONDS)
    assert (tmp_path / name).exists()
    plugin.teardown()


def test_a_save_after_fit_raises_its_own_failure(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    plugin = AsyncCheckpointIO()
    with pytest.raises(StorageError):
        plugin.save_checkpoint(trainer_state(ready=1, completed=1, numbers=LARGE), tmp_path / "file" / "a.ckpt")
    plugin.teardown()


def test_a_small_state_is_waited_for_but_not_for_ever(
    gate: threading.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = AsyncCheckpointIO(max_pending=2)
    monkeypatch.setattr(small_states, "LONGEST_WAIT_FOR_SMALL_SECONDS", 0.05)
    plugin.save_checkpoint(trainer_state(ready=2, completed=1, numbers=1), tmp_path / "slow.ckpt")
    assert plugin.checkpointer.pending == (str(tmp_path / "slow.ckpt"),)
    gate.set()
    monkeypatch.setattr(small_states, "LONGEST_WAIT_FOR_SMALL_SECONDS", SECONDS)
    plugin.save_checkpoint(trainer_state(ready=2, completed=1, numbers=1), tmp_path / "a.ckpt")
    assert plugin.checkpointer.pending == ()
    assert (tmp_path / "a.ckpt").exists()
    plugin.teardown()


def test_a_removal_with_no_save_under_way_is_over_when_it_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, may_remove = threading.Event(), threading.Event()

    class SlowRemoval(LocalStorage):
        def remove(self, path: str) -> None:
            asked.set()
            assert may_remove.wait(SECONDS)
            super().remove(path)

    monkeypatch.setattr(checkpointer_module, "storage_for", lambda *_: SlowRemoval())
    plugin = AsyncCheckpointIO()
    plugin.save_checkpoint({"a": 1}, tmp_path / "a.ckpt")
    plugin.checkpointer.wait()
    removing = threading.Thread(target=plugin.remove_checkpoint, args=(tmp_path / "a.ckpt",))
    removing.start()
    assert asked.wait(SECONDS)
    removing.join(0.3)
    assert removing.is_alive()
    may_remove.set()
    removing.join(SECONDS)
    assert not (tmp_path / "a.ckpt").exists()
    plugin.teardown()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda plugin: pickle.loads(pickle.dumps(plugin))])
@pytest.mark.parametrize("plugin_class", [SyncCheckpointIO, AsyncCheckpointIO])
def test_a_copy_has_the_same_settings(plugin_class: type, duplicate: Callable[[Any], Any], tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    plugin = duplicate(plugin_class(event_log=str(log)))
    plugin.save_checkpoint({"a": torch.ones(2)}, tmp_path / "a.ckpt")
    plugin.teardown()
    assert plugin.checkpointer.strategy == plugin_class().checkpointer.strategy
    assert '"event": "SaveCommitted"' in log.read_text()


def test_a_copy_keeps_what_the_asynchronous_plugin_was_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    plugin = copy.deepcopy(AsyncCheckpointIO(on_error="warn"))
    plugin.save_checkpoint({"a": 1}, tmp_path / "file" / "a.ckpt")
    plugin.teardown()
    assert plugin.checkpointer.failures == 1


@pytest.mark.parametrize("path", ["missing.ckpt", "folder/missing.ckpt"])
def test_a_missing_checkpoint_is_named_as_it_was_asked_for(path: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointNotFoundError, match=f"^Checkpoint file not found: {path}\n  file: /"):
        SyncCheckpointIO().load_checkpoint(path)


def test_a_server_that_knows_no_ranges_is_asked_for_the_file_once(tmp_path: Path) -> None:
    SyncCheckpointIO().save_checkpoint({"weight": torch.arange(1000.0)}, tmp_path / "a.ckpt")
    downloads = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            downloads.append(self.path)
            super().do_GET()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(tmp_path))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            state = SyncCheckpointIO().load_checkpoint(f"http://127.0.0.1:{server.server_port}/a.ckpt")
        finally:
            server.shutdown()
            thread.join()
    assert torch.equal(state["weight"], torch.arange(1000.0))
    assert downloads == ["/a.ckpt"]


OVERWRITTEN = """
import sys, time, torch
from lightning.fabric import Fabric
import ckpt_core.checkpointer as checkpointer_module
from ckpt_core.storage import LocalStorage
from lightning_ckpt import AsyncCheckpointIO

class SlowStorage(LocalStorage):
    def create(self, path, expected_size):
        time.sleep(seconds)
        return super().create(path, expected_size)

checkpointer_module.storage_for = lambda *_: SlowStorage()
fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp", plugins=[AsyncCheckpointIO()])
fabric.launch()
model = fabric.setup(torch.nn.Linear(300, 300))
path = sys.argv[1] + "/best.ckpt"
for seconds in (0, 1):
    fabric.save(path, {"model": model, "seconds": seconds})
assert fabric.load(path=path)["seconds"] == 1
print("DONE")
"""


def test_each_rank_of_fabric_loads_what_was_saved_last_under_the_name(
    fork_script: ScriptRunner, tmp_path: Path
) -> None:
    done = fork_script(OVERWRITTEN, tmp_path, modules=LIGHTNING, ranks=2)
    assert done.stdout.count("DONE") == 2
