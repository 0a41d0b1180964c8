"""Checkpoints that are directories, of one process: what is saved, when it is committed, and what is retained."""

from __future__ import annotations

import collections
import logging
import os
import pickle
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from safetensors import safe_open

import ckpt_core.checkpointer as checkpointer_module
from ckpt_core import (
    CheckpointError,
    CheckpointNotFoundError,
    DirectoryCheckpointer,
    Kind,
    Part,
    RankFailedError,
    SerializationError,
    SnapshotTornError,
    StorageError,
    verify,
)
from ckpt_core._pipeline import staging
from ckpt_core._pipeline.host_copy import HostCopy
from ckpt_core.catalog import Catalog
from ckpt_core.events import CheckpointRemoved, Event, SaveCommitted, SaveFailed, SaveStarted, SnapshotTaken
from ckpt_core.process.awaited_paths import without_waiting
from ckpt_core.storage import MANIFEST_NAME, Fault, FaultyStorage, LocalStorage
from tests.support.states import assert_same_state, states

STRATEGIES = ["sync", "async"]
SECONDS = 200.0


def parts(value: float = 1.0, size: int = 50_000) -> list[Part]:
    return [
        Part("model", {"w": torch.full((size,), value), "b": torch.arange(3)}, Kind.REPLICATED),
        Part("optimizer", {"state": {0: {"step": 3}}, "groups": [("lr", 0.1)]}, Kind.SHARDED),
        Part("rng", {"seed": torch.tensor([7])}, Kind.PER_RANK),
    ]


def value_at(path: Path | str) -> float:
    with DirectoryCheckpointer().load(path) as checkpoint:
        checkpoint.verify()
        return float(checkpoint.load("model")["w"][-1])


def names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


FILES = [
    "manifest.json",
    "model.safetensors",
    "rank-00001-of-00001.digests",
    "rank-00001-of-00001.safetensors",
]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_saved_comes_back(strategy: Any, tmp_path: Path) -> None:
    path = tmp_path / "folder" / "step=1"
    saved = parts()
    with DirectoryCheckpointer(strategy=strategy) as checkpointer:
        checkpointer.save(saved, path, metadata={"step": 1, "history": [0.5, None]})
        with checkpointer.load(path) as checkpoint:
            checkpoint.verify()
            assert checkpoint.metadata == {"step": 1, "history": [0.5, None]}
            assert checkpoint.world_size == 1
            assert {name: part.kind for name, part in checkpoint.parts.items()} == {
                "model": "replicated",
                "optimizer": "sharded",
                "rng": "per-rank",
            }
            for part in saved:
                assert_same_state(checkpoint.load(part.name), part.state)
    assert names(path) == FILES
    assert names(path.parent) == ["step=1"]
    with safe_open(path / "model.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("w"), saved[0].state["w"])


@given(state=states())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_state_comes_back(state: Any, tmp_path: Path) -> None:
    with DirectoryCheckpointer(strategy="async") as checkpointer:
        checkpointer.save([Part("one", state, Kind.REPLICATED), Part("two", state, Kind.PER_RANK)], tmp_path / "a")
        with checkpointer.load(tmp_path / "a") as checkpoint:
            checkpoint.verify()
            for part in ("one", "two"):
                assert_same_state(checkpoint.load(part), state)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strides_gradients_and_parameters_come_back(strategy: Any, tmp_path: Path) -> None:
    image = torch.randn(2, 3, 40, 50).to(memory_format=torch.channels_last)
    kept = {
        "image": image,
        "tied": [image, image],
        "one pixel": torch.randn(4, 3, 1, 1).to(memory_format=torch.channels_last),
        "turned": torch.randn(4, 2).t(),
        "parameter": torch.nn.Parameter(torch.randn(3, 2).t()),
        "frozen": torch.nn.Parameter(torch.arange(3), requires_grad=False),
        "leaf": torch.zeros(1, requires_grad=True),
    }
    both = torch.nn.Parameter(torch.randn(3))
    history = torch.ones(1, requires_grad=True) * 2
    others = {
        "both": [both, both.detach()],
        "history": history,
        "holes": torch.randn(4, 4)[:, ::2],
        "expanded": torch.ones(1, 3).expand(2, 3),
    }
    with DirectoryCheckpointer(strategy=strategy) as checkpointer:
        checkpointer.save([Part("own", {**kept, **others}, Kind.PER_RANK)], tmp_path / "c")
        checkpointer.save([Part("own", {"w": torch.ones(3, 2)}, Kind.PER_RANK)], tmp_path / "usual")
    with checkpointer.load(tmp_path / "c") as checkpoint:
        checkpoint.verify()
        loaded = checkpoint.load("own")
        with torch.inference_mode():
            assert not checkpoint.load("own")["parameter"].is_inference()
    assert_same_state({name: loaded[name] for name in kept}, kept)
    assert [loaded[name].stride() for name in ("image", "one pixel")] == [image.stride(), (3, 1, 3, 3)]
    assert loaded["tied"][0] is loaded["tied"][1] is loaded["image"]
    plain = [*loaded["both"], *(loaded[name] for name in ("history", "holes", "expanded"))]
    assert all(type(value) is torch.Tensor and value.is_contiguous() for value in plain)
    assert not any(value.requires_grad for value in plain), "what has a history, or is detached, too, can be added to"
    assert all(torch.equal(loaded[name], others[name]) for name in ("history", "holes", "expanded"))
    assert b'"forms"' in (tmp_path / "c" / MANIFEST_NAME).read_bytes()
    assert b'"forms"' not in (tmp_path / "usual" / MANIFEST_NAME).read_bytes()


def test_memory_that_the_caller_brings_is_filled_as_it_lies(tmp_path: Path) -> None:
    turned, pool = torch.nn.Parameter(torch.randn(3, 4).t()), torch.zeros(4, 10)
    with DirectoryCheckpointer() as checkpointer:
        checkpointer.save([Part("own", turned, Kind.PER_RANK)], tmp_path / "c")
    with checkpointer.load(tmp_path / "c") as checkpoint:
        assert torch.equal(checkpoint.load("own", map_location=lambda _: pool[:, :3]), turned)
        with torch.inference_mode():
            inferred = checkpoint.load("own", map_location=lambda info: torch.empty(info.shape))
    assert not pool[:, 3:].any()
    assert torch.equal(inferred, turned)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_save_of_the_same_path_replaces_it_and_keeps_what_is_not_ours(strategy: Any, tmp_path: Path) -> None:
    path = tmp_path / "last"

    def add(*files: str) -> Callable[[str], None]:
        def write(directory: str) -> None:
            assert os.listdir(directory) == []
            for file in files:
                target = Path(directory, file)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(file)

        return write

    with DirectoryCheckpointer(strategy=strategy) as checkpointer:
        checkpointer.save(parts(1.0), path, write_files=add("config.json", "old/notes.txt"))
        checkpointer.wait()
        (path / "mine").mkdir()
        (path / "mine" / "paper.pdf").write_text("of the user")
        (path / "link").symlink_to("mine")
        checkpointer.save(parts(2.0)[:2], path, write_files=add("config.json", "new/notes.txt"))
        checkpointer.wait()
        assert value_at(path) == 2.0
        assert (path / "mine" / "paper.pdf").read_text() == "of the user"
        assert os.readlink(path / "link") == "mine"
        assert (path / "config.json").read_text() == "config.json"
        assert names(path) == ["config.json", "link", *FILES[:1], "mine", "model.safetensors", "new", FILES[2]]
        with checkpointer.load(path) as checkpoint:
            assert checkpoint.read_file("new/notes.txt") == b"new/notes.txt"
    assert names(tmp_path) == ["last"]


@pytest.mark.parametrize("there", ["a file", "an empty directory", "a directory of others", "a damaged one", "a link"])
def test_what_is_in_the_way_is_replaced(there: str, tmp_path: Path) -> None:
    path = tmp_path / "a"
    if there == "a file":
        path.write_text("a checkpoint of another layout")
    elif there == "a link":
        (tmp_path / "target").mkdir()
        path.symlink_to("target")
    else:
        path.mkdir()
        if there == "a directory of others":
            (path / "optimizer.bin").write_text("stock")
        if there == "a damaged one":
            (path / "manifest.json").write_text("{}")
    with DirectoryCheckpointer(strategy="sync") as checkpointer:
        checkpointer.save(parts(2.0), path)
    assert value_at(path) == 2.0
    assert names(path) == sorted(FILES + ["optimizer.bin"] * (there == "a directory of others"))
    assert not path.is_symlink()
    assert names(tmp_path) == ["a"] + (["target"] if there == "a link" else [])


def test_files_of_callers(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("linked")

    def write(directory: str) -> None:
        os.makedirs(f"{directory}/a/b")
        for name in ("a/b/c.txt", "empty"):
            Path(directory, name).write_text("text" * (name != "empty"))
        os.symlink(outside, f"{directory}/link")

    with DirectoryCheckpointer(strategy="sync") as checkpointer:
        checkpointer.save([], tmp_path / "x", write_files=write)
        with checkpointer.load(tmp_path / "x") as checkpoint:
            checkpoint.verify()
            assert checkpoint.read_file("link") == b"linked"
    assert not (tmp_path / "x" / "link").is_symlink()
    assert outside.read_text() == "linked"
    (tmp_path / "x" / "a" / "b" / "c.txt").write_text("TEXT")
    with pytest.raises(CheckpointError, match=r"c\.txt"):
        verify(tmp_path / "x")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["model.safetensors", "manifest.json"])
def test_callers_cannot_write_our_own_files(name: str, strategy: Any, tmp_path: Path) -> None:
    checkpointer = DirectoryCheckpointer(strategy=strategy)
    with pytest.raises(SerializationError, match=f"write_files has written '{name}'"):
        checkpointer.save(parts(), tmp_path / "a", write_files=lambda d: Path(d, name).write_text("x") and None)
        checkpointer.wait()
    assert names(tmp_path) == []
    checkpointer.close()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_failure_leaves_the_old_checkpoint_and_is_raised_once(strategy: Any, tmp_path: Path) -> None:
    path = tmp_path / "a"
    with DirectoryCheckpointer(strategy="sync") as checkpointer:
        checkpointer.save(parts(1.0), path)
    broken = Fault("publish_directory", error=OSError(5, "Input/output error"))
    events: list[Event] = []
    checkpointer = DirectoryCheckpointer(
        strategy=strategy, storage=FaultyStorage(LocalStorage(), [broken]), listeners=[events.append]
    )
    with pytest.raises(StorageError, match="Input/output error") as info:
        checkpointer.save(parts(2.0), path)
        checkpointer.wait()
    assert info.value.path == str(path)
    assert not info.value.message.startswith("rank")
    assert value_at(path) == 1.0
    assert names(tmp_path) == ["a"]
    checkpointer.save(parts(3.0), path)
    checkpointer.close()
    assert value_at(path) == 3.0
    kinds = [type(event) for event in events]
    assert kinds.count(SaveFailed) == 1
    assert kinds.count(SaveCommitted) == 1


def test_failures_can_be_logged_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    broken = Fault("publish_directory", error=OSError(5, "Input/output error"))
    with DirectoryCheckpointer(on_error="warn", storage=FaultyStorage(LocalStorage(), [broken])) as checkpointer:
        checkpointer.save(parts(), tmp_path / "a")
        checkpointer.wait()
        assert checkpointer.failures == 1
    assert "could not save the checkpoint" in caplog.text


MISTAKES: dict[str, tuple[type[BaseException], str, dict[str, Any]]] = {
    "an object": (
        SerializationError,
        r"model\.x",
        {"parts": [Part("model", {"x": threading.Lock()}, Kind.REPLICATED)]},
    ),
    "a bad name": (ValueError, "cannot be the name", {"parts": [Part("a/b", {}, Kind.REPLICATED)]}),
    "two names": (ValueError, "the same name", {"parts": [Part("a", {}, Kind.REPLICATED)] * 2}),
    "no parts": (TypeError, "parts must be a list .* not of str", {"parts": {"model": {}}}),
    "another order": (TypeError, "not 'a' and {}", {"parts": [Part("a", Kind.REPLICATED, {})]}),  # type: ignore[arg-type]
    "a tensor in metadata": (SerializationError, "metadata", {"parts": [], "metadata": {"x": torch.ones(1)}}),
    "metadata that cannot be copied": (
        SerializationError,
        r"metadata\.x\.0",
        {"parts": [], "metadata": {"x": [threading.Lock()]}},
    ),
    "a hook that raises": (KeyError, "bug", {"parts": parts(), "write_files": lambda _: {}["bug"]}),
    "a sparse tensor": (
        SerializationError,
        r"model\.x",
        {"parts": [Part("model", {"x": torch.ones(2, 2).to_sparse()}, Kind.REPLICATED)]},
    ),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_leave_nothing(mistake: str, strategy: Any, tmp_path: Path) -> None:
    kind, words, arguments = MISTAKES[mistake]
    checkpointer = DirectoryCheckpointer(strategy=strategy)
    with pytest.raises(kind, match=words):
        checkpointer.save(path=tmp_path / "a", **arguments)
        checkpointer.wait()
    checkpointer.wait()  # the failure is raised only once
    assert names(tmp_path) == []
    checkpointer.save(parts(4.0), tmp_path / "a")
    checkpointer.close()
    assert value_at(tmp_path / "a") == 4.0


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_tensor_that_changes_while_it_is_taken_fails_the_save(
    strategy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = parts()
    armed = [True]

    def change(_: object = None) -> bool:
        if armed and armed.pop():
            state[0].state["w"].add_(1)
        return False

    class ChangingCopy(HostCopy):
        def hand_over(self, meanwhile: Callable[[], None] | None = None) -> None:
            super().hand_over(meanwhile)
            change()

    if strategy == "async":
        monkeypatch.setattr(staging, "HostCopy", ChangingCopy)
    else:  # change it while the files are written
        monkeypatch.setattr(checkpointer_module, "storage_for", lambda *_: FaultyStorage(LocalStorage(), [during]))
    during = Fault(lambda operation: operation.name == "write_at" and change(operation))
    checkpointer = DirectoryCheckpointer(strategy=strategy)
    with pytest.raises(SnapshotTornError):
        checkpointer.save(state, tmp_path / "a")
    checkpointer.wait()
    assert names(tmp_path) == []
    checkpointer.save(state, tmp_path / "a")
    checkpointer.close()
    assert value_at(tmp_path / "a") == 2.0


@pytest.mark.parametrize(
    "hold",
    [
        lambda tensor: collections.deque([tensor], maxlen=2),
        lambda tensor: collections.deque([collections.deque([{"a": (tensor,)}])]),
        lambda tensor: collections.deque([tensor.numpy()]),
        lambda tensor: collections.defaultdict(list, {"a": [tensor]}),
        lambda tensor: collections.OrderedDict(a=tensor),
        lambda tensor: collections.Counter({"a": tensor}),
        lambda tensor: {(1, "a"): tensor, "\ud83d\ude00": 1},  # surrogates, not the character of the pair
    ],
)
def test_whatever_holds_a_tensor_can_be_read_again(hold: Callable[[torch.Tensor], Any], tmp_path: Path) -> None:
    state = hold(torch.arange(5.0))
    with DirectoryCheckpointer() as checkpointer:
        checkpointer.save([Part("model", state, Kind.PER_RANK)], tmp_path / "a")
        with checkpointer.load(tmp_path / "a") as checkpoint:
            loaded = checkpoint.load("model")
            checkpoint.load("model", into=(into := hold(torch.zeros(5))))
    assert type(loaded) is type(state)
    assert repr(loaded) == repr(state)
    assert "array" in repr(state) or repr(into) == repr(state)


def test_an_async_save_returns_before_it_is_there(tmp_path: Path) -> None:
    release = threading.Event()
    events: list[Event] = []
    storage = FaultyStorage(LocalStorage(), [Fault("publish_directory", until=release)])
    checkpointer = DirectoryCheckpointer(storage=storage, listeners=[events.append])
    state = parts(1.0)
    checkpointer.save(state, tmp_path / "a")
    state[0].state["w"].fill_(9.0)
    assert checkpointer.pending == (str(tmp_path / "a"),)
    assert checkpointer.is_pending(tmp_path / "a")
    assert checkpointer.exists(tmp_path / "a")
    assert not (tmp_path / "a").exists()
    with without_waiting(), pytest.raises(CheckpointNotFoundError, match="written last"):
        DirectoryCheckpointer().load(tmp_path / "a")
    loaded: list[Any] = []
    loading = threading.Thread(target=lambda: loaded.append(checkpointer.load(tmp_path / "a")))
    loading.start()
    second = threading.Thread(target=lambda: checkpointer.save(parts(2.0), tmp_path / "b"))
    second.start()
    release.set()
    for thread in (loading, second):
        thread.join()
    checkpointer.close()
    assert value_at(tmp_path / "a") == 1.0
    loaded[0].close()
    begun = next(e for e in events if isinstance(e, SaveStarted) and e.path == str(tmp_path / "b"))
    committed = next(e for e in events if isinstance(e, SaveCommitted) and e.path == str(tmp_path / "a"))
    assert events.index(committed) < events.index(begun), "max_pending is 1"
    kinds = [type(event) for event in events if event.path == str(tmp_path / "a")]
    assert kinds == [SaveStarted, SnapshotTaken, SaveCommitted]


def test_the_buffer_is_kept_and_given_back(tmp_path: Path) -> None:
    checkpointer = DirectoryCheckpointer()
    checkpointer.save(parts(), tmp_path / "a")
    checkpointer.wait()
    (buffer,) = checkpointer._pipeline.buffers._idle
    checkpointer.save(parts(2.0), tmp_path / "b")
    checkpointer.wait()
    assert checkpointer._pipeline.buffers._idle == [buffer]
    checkpointer.close()
    assert checkpointer._pipeline.buffers._idle == []


def test_a_removal_waits_for_its_successor_and_is_given_up_when_that_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    release = threading.Event()
    broken = Fault("publish_directory", number=3, error=OSError(5, "Input/output error"))
    slow = Fault("publish_directory", number=2, until=release)
    events: list[Event] = []
    checkpointer = DirectoryCheckpointer(
        storage=FaultyStorage(LocalStorage(), [broken, slow]), listeners=[events.append], on_error="warn"
    )
    checkpointer.save(parts(1.0), tmp_path / "1")
    checkpointer.save(parts(2.0), tmp_path / "2")
    checkpointer.remove(tmp_path / "1")
    assert (tmp_path / "1").exists()
    release.set()
    checkpointer.wait()
    assert names(tmp_path) == ["2"]
    checkpointer.save(parts(3.0), tmp_path / "3")
    checkpointer.remove(tmp_path / "2")
    checkpointer.close()
    assert names(tmp_path) == ["2"]
    assert "kept the checkpoint" in caplog.text
    assert sum(isinstance(event, CheckpointRemoved) for event in events) == 1


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_copy_shares_no_fate_with_its_source(strategy: Any, tmp_path: Path) -> None:
    with DirectoryCheckpointer(strategy=strategy) as checkpointer:
        checkpointer.save(parts(1.0), tmp_path / "a", write_files=lambda d: Path(d, "note").write_text("n") and None)
        checkpointer.copy(tmp_path / "a", tmp_path / "b")
        checkpointer.wait()
        assert os.path.samefile(tmp_path / "a" / "model.safetensors", tmp_path / "b" / "model.safetensors")
        checkpointer.save(parts(2.0), tmp_path / "a")
        checkpointer.wait()
        assert value_at(tmp_path / "b") == 1.0
        assert (tmp_path / "b" / "note").read_text() == "n"
        checkpointer.copy(tmp_path / "a", tmp_path / "b")
        checkpointer.remove(tmp_path / "a")
        checkpointer.wait()
        assert value_at(tmp_path / "b") == 2.0
        assert "note" not in names(tmp_path / "b")
        with pytest.raises(CheckpointNotFoundError, match="no checkpoint to copy"):
            checkpointer.copy(tmp_path / "a", tmp_path / "c")
            checkpointer.wait()
    assert names(tmp_path) == ["b"]


def test_a_path_that_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    checkpointer = DirectoryCheckpointer()
    for name in ("empty", "missing"):
        assert not checkpointer.exists(tmp_path / name)
        with pytest.raises(CheckpointNotFoundError):
            checkpointer.load(tmp_path / name)
    with pytest.raises(CheckpointError):
        checkpointer.load(tmp_path / "file")


@pytest.mark.parametrize(
    "arguments",
    [{"strategy": "sharded"}, {"max_pending": 0}, {"on_error": "ignore"}, {"commit_timeout": 0.0}],
    ids=lambda arguments: next(iter(arguments)),
)
def test_settings_are_checked(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))):
        DirectoryCheckpointer(**arguments)


def test_a_copy_of_the_checkpointer_has_its_settings() -> None:
    original = DirectoryCheckpointer(strategy="sync", slice_replicated=True, commit_timeout=5.0, on_error="warn")
    copy = pickle.loads(pickle.dumps(original))
    assert copy.strategy == "sync"
    assert copy._commit_timeout == 5.0
    assert copy._slice_replicated


def test_a_save_from_a_signal_handler_inside_a_save(tmp_path: Path) -> None:
    checkpointer = DirectoryCheckpointer(strategy="async")

    def handler(*_: object) -> None:
        checkpointer.save(parts(2.0), tmp_path / "from-handler")

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        checkpointer.save(parts(1.0), tmp_path / "a", write_files=lambda _: os.kill(os.getpid(), signal.SIGUSR1))
    finally:
        signal.signal(signal.SIGUSR1, before)
    checkpointer.close()
    assert value_at(tmp_path / "a") == 1.0
    assert value_at(tmp_path / "from-handler") == 2.0


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ctrl_c_leaves_nothing_and_blocks_nothing(strategy: Any, tmp_path: Path) -> None:
    checkpointer = DirectoryCheckpointer(strategy=strategy)
    with pytest.raises(KeyboardInterrupt):
        checkpointer.save(parts(), tmp_path / "a", write_files=lambda _: signal.raise_signal(signal.SIGINT))
    assert names(tmp_path) == []
    checkpointer.save(parts(2.0), tmp_path / "a")
    checkpointer.close()
    assert value_at(tmp_path / "a") == 2.0


def test_a_url_may_end_with_a_slash() -> None:
    path = "memory://directories/slash/step=1"
    DirectoryCheckpointer().save(parts(2.0), f"{path}/")
    for spelled in (path, f"{path}/"):
        assert value_at(spelled) == 2.0
        assert verify(spelled)
    assert Catalog("memory://directories/slash/", suffix="").paths() == [path]


def test_an_object_store_is_written_in_place_under_names_of_its_own() -> None:
    root = "memory://directories"
    path = f"{root}/a"
    checkpointer = DirectoryCheckpointer(strategy="sync")
    storage = checkpointer._storage_for(path)

    def files() -> list[str]:
        return sorted(os.path.basename(file.path) for file in storage.list(path))

    def note(text: str) -> Callable[[str], None]:
        return lambda directory: Path(directory, "note.txt").write_text(text) and None

    checkpointer.save(parts(1.0), path, write_files=note("same"))
    assert files() == sorted([*FILES, "note.txt"])
    plain = files()
    checkpointer.save(parts(2.0), path, write_files=note("same"))
    assert value_at(path) == 2.0
    assert not set(files()) & (set(plain) - {"manifest.json", "note.txt"}), (
        "never was a file written to that was in use"
    )
    assert len(files()) == len(plain)
    before = files()
    with pytest.raises(StorageError, match=r"'note.txt' has changed"):
        checkpointer.save(parts(3.0), path, write_files=note("other"))
    assert files() == before
    assert value_at(path) == 2.0
    for number, operation in [(1, "write_at"), (2, "write_at"), (2, "commit"), (1, "publish_directory")]:
        broken = Fault(operation, number=number, error=ConnectionResetError(104, "reset"))
        with pytest.raises(StorageError, match="reset"):
            DirectoryCheckpointer(strategy="sync", storage=FaultyStorage(storage, [broken])).save(parts(4.0), path)
        assert files() == before
        assert value_at(path) == 2.0
    other = f"{root}/b"
    for value in (5.0, 6.0, 7.0):
        checkpointer.save(parts(value), other, write_files=note("same"))
        checkpointer.copy(other, path)
        assert value_at(path) == value
        assert len(files()) == len(plain)
        assert max(map(len, files())) < 80, "names do not grow from copy to copy"
        checkpointer.copy(path, other)
        assert value_at(other) == value
    checkpointer.remove(other)
    checkpointer.remove(path)
    assert not checkpointer.exists(path)
    assert files() == []


@pytest.mark.parametrize("act", ["save", "copy"])
def test_what_a_store_has_committed_stays_when_its_answer_is_lost(act: str) -> None:
    path = f"memory://answers/{act}"
    checkpointer = DirectoryCheckpointer(strategy="sync")
    checkpointer.save(parts(1.0), path)
    checkpointer.save(parts(2.0), f"{path}-other")
    lost = Fault("publish_directory", error=ConnectionResetError(104, "reset"), reply_lost=True)
    storage = FaultyStorage(checkpointer._storage_for(path), [lost])
    unlucky = DirectoryCheckpointer(strategy="sync", storage=storage)
    with pytest.raises(StorageError, match="reset"):
        unlucky.save(parts(2.0), path) if act == "save" else unlucky.copy(f"{path}-other", path)
    assert value_at(path) == 2.0


def test_a_save_succeeds_if_only_the_one_before_it_cannot_be_deleted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = "memory://answers/stays"
    checkpointer = DirectoryCheckpointer(strategy="sync")
    checkpointer.save(parts(1.0), path)
    storage = checkpointer._storage_for(path)

    def refuse(path: str) -> None:
        raise StorageError("refused", path=path)

    with monkeypatch.context() as patched:
        patched.setattr(storage, "remove", refuse)
        DirectoryCheckpointer(strategy="sync", storage=storage).save(parts(2.0), path)
    assert value_at(path) == 2.0
    assert f"could not delete what was at {path} before" in caplog.text


def test_ranks_of_a_closed_group_cannot_save(tmp_path: Path) -> None:
    from torch.distributed import HashStore

    from ckpt_core import RankGroup

    group = RankGroup(0, 2, HashStore(), "session")
    checkpointer = DirectoryCheckpointer(ranks=group, commit_timeout=0.2, strategy="sync")
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(checkpointer)
    # The second message appears on a busy machine, where no thread gets to ask the store in time.
    with pytest.raises(RankFailedError, match=r"rank 1 did not begin|rank 0, which .* has not answered"):
        checkpointer.save(parts(), tmp_path / "a")
    assert names(tmp_path) == []


def test_nothing_is_logged_by_a_save_that_goes_well(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), DirectoryCheckpointer() as checkpointer:
        checkpointer.save(parts(), tmp_path / "a")
    assert caplog.records == []
