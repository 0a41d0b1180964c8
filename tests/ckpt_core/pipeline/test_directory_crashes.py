"""Directories after crashes and disk errors: the old checkpoint or the new one, and no leftovers for long."""

from __future__ import annotations

import errno
import json
import os
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core import Catalog, CheckpointError, DirectoryCheckpointer, Kind, Part, StorageError, verify
from ckpt_core.storage import Fault, FaultyStorage, LocalStorage, Storage, local_directory
from ckpt_core.storage.local_directory import StagingDirectories, hidden_name
from tests.conftest import ScriptRunner
from tests.support.damage import flip_bit

STRATEGIES = ["sync", "async"]


def parts(value: float, size: int = 50_000) -> list[Part]:
    return [
        Part("model", {"w": torch.full((size,), value)}, Kind.REPLICATED),
        Part("rng", {"seed": torch.tensor([value])}, Kind.PER_RANK),
    ]


def add_note(text: str) -> Any:
    def write(directory: str) -> None:
        Path(directory, f"{text}.txt").write_text(text)

    return write


def value_at(path: Path | str, storage: Storage | None = None) -> float:
    with DirectoryCheckpointer(storage=storage).load(path) as checkpoint:
        checkpoint.verify()
        assert float(checkpoint.load("rng")["seed"]) == float(checkpoint.load("model")["w"][0])
        return float(checkpoint.load("model")["w"][-1])


def names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


KILLED = """
import json, os, shutil, sys
from ckpt_core import Catalog, DirectoryCheckpointer
from tests.ckpt_core.pipeline.test_directory_crashes import add_note, parts, value_at
from tests.support.killed_saves import killed_before

strategy, exchange, again, stride = sys.argv[1], sys.argv[2] == "exchange", sys.argv[3] == "again", int(sys.argv[4])
def save(value, note, path="run/a"):
    with DirectoryCheckpointer(strategy=strategy) as checkpointer:
        checkpointer.save(parts(value), path, write_files=add_note(note))

os.mkdir("before")
if again:
    save(1.0, "old", "before/a")
    with open("before/a/paper.pdf", "w") as file:
        file.write("of the user")
number = 0
rows = []
while True:
    shutil.rmtree("run", ignore_errors=True)
    shutil.copytree("before", "run")
    child = os.fork()
    if child == 0:
        killed_before(number, exchanges=exchange)
        save(2.0, "new")
        os._exit(0)
    _, status = os.waitpid(child, 0)
    killed = os.WIFSIGNALED(status)
    assert killed or status == 0, status
    missing = not os.path.exists("run/a")
    if missing and number % 2:
        Catalog("run", suffix="").checkpoints()  # mends, as loading does
    value = value_at("run/a") if again or not missing else None
    if again:
        assert os.path.exists("run/a/paper.pdf")
        assert os.path.exists("run/a/new.txt") == (value == 2.0) and os.path.exists("run/a/old.txt") == (value == 1.0)
    rubbish = len(os.listdir("run")) - (value is not None)
    save(3.0, "next", "run/next")
    left = sorted(os.listdir("run"))
    rows.append([value, missing, rubbish, left])
    if not killed:
        break
    number += stride
print(json.dumps(rows))
"""


@pytest.mark.sampled(1)
@pytest.mark.extended_cells("async-exchange-again-5", "sync-two renames-again-1")
@pytest.mark.parametrize(
    ("strategy", "way", "again", "stride"),
    [
        ("sync", "exchange", "again", 1),
        ("async", "exchange", "again", 5),
        ("sync", "two renames", "again", 1),
        ("sync", "exchange", "first", 3),
    ],
)
def test_killed_before_any_change_of_the_disk(
    strategy: str, way: str, again: str, stride: int, fork_script: ScriptRunner
) -> None:
    rows = json.loads(fork_script(KILLED, strategy, way, again, stride).stdout)
    values = [value for value, *_ in rows]
    before = 1.0 if again == "again" else None
    assert len(rows) > 35 / stride
    assert set(values) == {before, 2.0}
    assert values == sorted(values, key=lambda value: value == 2.0), "from one moment on, it is the new one"
    assert sum(missing for _, missing, _, _ in rows if before) == (1 if way == "two renames" else 0)
    assert max(rubbish for _, _, rubbish, _ in rows) <= 3
    for value, _, _, left in rows:
        assert left == (["a", "next"] if value is not None else ["next"]), "the next save removes what was left"


def test_an_unfinished_directory_is_rubbish_only_when_nobody_writes_into_it(tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    one, other = LocalStorage(), LocalStorage()
    staging = one.begin_directory(path, "session-1")
    assert other.begin_directory(path, "session-1") == staging
    Path(staging, "part").write_text("x")
    assert LocalStorage().remove_orphans(str(tmp_path)) == []
    one.leave_directory(path, "session-1")
    assert LocalStorage().remove_orphans(str(tmp_path)) == []
    assert names(tmp_path) == [os.path.basename(staging)]
    other.leave_directory(path, "session-1")
    assert names(tmp_path) == [], "the last one to leave takes it away"
    (tmp_path / ".b.session-2.ckpt-part").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "visible.ckpt-part").mkdir()
    assert Catalog(tmp_path, suffix="").prune() == [str(tmp_path / ".b.session-2.ckpt-part")]
    assert names(tmp_path) == [".hidden", "visible.ckpt-part"]


def test_an_orphan_that_is_being_removed_is_not_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a directory is created and before it is locked, another process may take it for an orphan."""
    path = str(tmp_path / "a")
    real = local_directory.fcntl.flock
    removed = []

    def flock(descriptor: int, operation: int) -> None:
        if not removed:
            removed.append(os.readlink(f"/proc/self/fd/{descriptor}"))
            os.rmdir(removed[0])
        real(descriptor, operation)

    monkeypatch.setattr(local_directory.fcntl, "flock", flock)
    staging = StagingDirectories().begin(path, "session-1")
    assert removed == [staging]
    assert os.path.isdir(staging)


def test_what_is_being_deleted_is_not_given_its_name_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another job is between its two renames of a directory while the first deletes what it has replaced."""
    monkeypatch.setattr(local_directory, "_exchange", lambda *_: False)
    path, away = tmp_path / "a", tmp_path / "away"
    delete, met = local_directory._delete, []

    def delete_and_look(remove: Any, name: str) -> None:
        delete(remove, name)
        os.rename(path, away)
        local_directory.restore(str(tmp_path))
        met.append(path.exists())
        os.rename(away, path)

    with DirectoryCheckpointer(strategy="sync") as checkpointer:
        checkpointer.save(parts(1.0), path)
        with monkeypatch.context() as patch:
            patch.setattr(local_directory, "_delete", delete_and_look)
            checkpointer.save(parts(2.0), path)
    assert len(met) > 3, "files and their directory"
    assert not any(met)
    assert verify(path)
    assert os.listdir(tmp_path) == ["a"]


FULL = errno.ENOSPC
CODES = [FULL, errno.EIO]


@pytest.fixture(params=["disk", "disk without exchange", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Storage]:
    """A directory, and the storage that holds it."""
    if request.param == "memory":
        from ckpt_core.storage.fsspec_storage import FsspecStorage

        root = f"memory://crashes-{uuid.uuid4().hex}"
        return root, FsspecStorage(root, None)
    if request.param == "disk without exchange":
        monkeypatch.setattr(local_directory, "_exchange", lambda *_: False)
    return str(tmp_path), LocalStorage()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("action", ["save", "copy"])
def test_every_operation_of_a_storage_fails(action: str, strategy: Any, place: tuple[str, Storage]) -> None:
    root, inner = place

    def act(storage: Storage) -> CheckpointError | None:
        checkpointer = DirectoryCheckpointer(strategy=strategy, storage=storage)
        error = None
        try:
            if action == "save":
                checkpointer.save(parts(2.0), path)
            else:
                checkpointer.copy(source, path)
            checkpointer.wait()
        except CheckpointError as raised:
            error = raised
        checkpointer.close()  # the failure is raised only once
        return error

    path, source = f"{root}/0", f"{root}/source"
    recording = FaultyStorage(inner)
    with DirectoryCheckpointer(strategy="sync", storage=inner) as checkpointer:
        checkpointer.save(parts(2.0), source)
    assert act(recording) is None
    operations = [operation.name for operation in recording.operations]
    assert operations.count("publish_directory") == 1
    survived = set()
    for number, name in enumerate(operations, start=1):
        path = f"{root}/{number}"  # an object store's names depend on what was there before
        before = None
        if number % 2:
            before = 1.0
            with DirectoryCheckpointer(strategy="sync", storage=inner) as checkpointer:
                checkpointer.save(parts(1.0), path)
        met = []

        def strike(operation: Any, number: int = number, met: list[Any] = met) -> bool:
            met.append(operation)
            return len(met) == number

        error = act(
            FaultyStorage(inner, [Fault(strike, None, OSError(CODES[number % 2], os.strerror(CODES[number % 2])))])
        )
        if len(met) < number:
            continue
        if error is None:
            survived.add(met[number - 1].name)
            assert value_at(path, inner) == 2.0
        else:
            assert isinstance(error, StorageError), (name, error)
            assert error.errno == CODES[number % 2]
            checkpoint = DirectoryCheckpointer(storage=inner)
            assert checkpoint.exists(path) == (before is not None), (number, met[number - 1])
            assert before is None or value_at(path, inner) == before
    # Operations that a save does not need: cleaning up, and reading what was there where that does not matter.
    needless = {
        "remove_orphans",
        "leave_directory",
        "discard_directory",
        "open",
        "read_into",
        "list",
        "list_directories",
    }
    assert survived <= needless
    if not root.startswith("memory"):
        with DirectoryCheckpointer(strategy="sync") as checkpointer:
            checkpointer.save(parts(3.0), f"{root}/last")
        assert not [name for name in os.listdir(root) if name.startswith(".")]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_full_disk(strategy: Any, small_filesystem: Path) -> None:
    path = small_filesystem / "a"
    checkpointer = DirectoryCheckpointer(strategy=strategy)
    checkpointer.save(parts(1.0, 500_000), path)  # uses 2 of 8 MB
    checkpointer.wait()
    for _ in range(2):
        with pytest.raises(StorageError, match="No space left on device") as info:
            checkpointer.save(parts(2.0, 2_500_000), path)
            checkpointer.wait()
        assert info.value.errno == errno.ENOSPC
        assert info.value.path is not None
        assert info.value.path.startswith(f"{path}/model")
        assert "free some space" in str(info.value)
        assert [name for name in names(small_filesystem) if name != "lost+found"] == ["a"]
    checkpointer.save(parts(3.0, 500_000), path)
    checkpointer.close()
    assert value_at(path) == 3.0


FULL_ON_ONE_RANK = """
import json, os, sys, torch
from ckpt_core import DirectoryCheckpointer, Kind, Part, StorageError
from tests.support.ranks import Ranks, seconds_of

disk, strategy = sys.argv[1:]

def parts(value, size):
    return [Part("own", {"w": torch.full((size,), float(value))}, Kind.PER_RANK)]

def work(rank, group):
    checkpointer = DirectoryCheckpointer(ranks=group, strategy=strategy, commit_timeout=60)
    found = []
    for value, size in ((1, 100_000), (2, 3_000_000 * rank), (3, 100_000)):
        found.append(seconds_of(lambda: (checkpointer.save(parts(value, size), f"{disk}/a"), checkpointer.wait())))
    checkpointer.close()
    return found

rows = Ranks(2, work).results()
with DirectoryCheckpointer().load(f"{disk}/a") as checkpoint:
    checkpoint.verify()
    values = [float(checkpoint.load("own", rank=rank)["w"][0]) for rank in range(2)]
print(json.dumps([rows, values, [name for name in os.listdir(disk) if name != "lost+found"]]))
"""


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_disk_that_is_full_for_one_rank(strategy: str, small_filesystem: Path, fork_script: ScriptRunner) -> None:
    rows, values, left = json.loads(fork_script(FULL_ON_ONE_RANK, small_filesystem, strategy).stdout)
    for row in rows:
        assert [outcome["raised"] for outcome in row] == [None, "StorageError", None]
        assert "rank 1: cannot write the checkpoint: No space left on device" in row[1]["message"]
        assert "free some space" in row[1]["message"]
    assert values == [3.0, 3.0]
    assert left == ["a"]


def test_a_read_only_parent(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match=r"File exists|Not a directory") as info:
        DirectoryCheckpointer(strategy="sync").save(parts(1.0), tmp_path / "file" / "a")
    assert info.value.path == str(tmp_path / "file" / "a")
    with pytest.raises(StorageError, match="File name too long"):
        DirectoryCheckpointer(strategy="sync").save(parts(1.0), tmp_path / ("x" * 256))
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize("name", ["x" * 255, "\u4e2d" * 85], ids=["ascii", "other"])
def test_a_name_as_long_as_the_filesystem_takes(tmp_path: Path, name: str) -> None:
    with DirectoryCheckpointer(strategy="sync") as checkpointer:
        checkpointer.save(parts(1.0), tmp_path / name)
        assert os.listdir(tmp_path) == [name]
        checkpointer.remove(tmp_path / name)
    assert os.listdir(tmp_path) == []
    hidden_name(name, "token").encode()  # does not raise: no character is cut in two


# ---- the catalog
# -------------------------------------------------------------------------------------------------------


def test_the_newest_directory_that_verifies(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with DirectoryCheckpointer(strategy="sync") as checkpointer:
        for step in range(1, 5):
            checkpointer.save(parts(float(step)), tmp_path / f"step={step}", metadata={"step": step})
            os.utime(tmp_path / f"step={step}" / "manifest.json", (step, step))
    (tmp_path / "not-a-checkpoint").mkdir()
    (tmp_path / "not-a-checkpoint" / "model.safetensors").write_text("x")
    catalog = Catalog(tmp_path, suffix="")
    found = catalog.checkpoints()
    assert [os.path.basename(info.path) for info in found] == ["step=4", "step=3", "step=2", "step=1"]
    assert all(info.is_directory for info in found)
    assert found[0].size == sum(file.stat().st_size for file in (tmp_path / "step=4").iterdir())
    assert found[0].modified == 4
    newest = catalog.newest_verified()
    assert newest is not None
    assert newest.path == str(tmp_path / "step=4")
    flip_bit(tmp_path / "step=4" / "model.safetensors", -1)
    (tmp_path / "step=3" / "rank-00001-of-00001.safetensors").unlink()
    newest = catalog.newest_verified()
    assert newest is not None
    assert newest.path == str(tmp_path / "step=2")
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 2
    assert "step=4" in warnings[0]
    assert "step=3" in warnings[1]
    older = catalog.newest_verified(accept=lambda metadata: metadata["step"] < 2)
    assert older is not None
    assert older.path == str(tmp_path / "step=1")
    errors = catalog.verify()
    assert [os.path.basename(path) for path, error in errors.items() if error is not None] == ["step=4", "step=3"]
    assert verify(tmp_path / "step=1")
    with pytest.raises(CheckpointError):
        verify(tmp_path / "not-a-checkpoint")


def test_a_save_on_an_object_store_is_in_its_catalog() -> None:
    root = "memory://directory-catalog"
    with DirectoryCheckpointer(strategy="sync") as checkpointer:
        for step in (1, 2):
            checkpointer.save(parts(float(step)), f"{root}/step={step}")
    found = Catalog(root, suffix="").checkpoints()
    assert sorted(info.path.rpartition("/")[2] for info in found) == ["step=1", "step=2"]
    assert all(info.is_directory for info in found)
