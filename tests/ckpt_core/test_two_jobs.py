"""Two jobs pointed at one directory by mistake: the second is warned, and no checkpoint of either is damaged."""

from __future__ import annotations

import gc
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core import Checkpointer, DirectoryCheckpointer, Kind, Part
from ckpt_core.storage import FileInfo, claims, lease, local, storage_for
from tests.conftest import ScriptRunner
from tests.support.server_fixtures import server_of, servers
from tests.support.servers import Server

__all__ = ["server_of", "servers"]

ServerOf = Callable[[str], Server]

JOBS = """
import json, logging, os, random, sys, time, torch
from ckpt_core import Catalog, CheckpointError, Checkpointer, DirectoryCheckpointer, Kind, Part

layout, root, options, way, seconds = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), sys.argv[4], float(sys.argv[5])
NAMES = ["a.ckpt", "b.ckpt", "c.ckpt"]
if way == "two renames":
    from ckpt_core.storage import local_directory
    local_directory._exchange = lambda one, other: False

def content(job, number):
    state = {f"w{index}": torch.full((30_000,), float(number)) for index in range(4)}
    return {"model": state, "optimizer": dict(state), "job": {"name": job, "number": number}}

def whole(state):
    '''The job of a state, all of which is of one save.'''
    number = state["job"]["number"]
    for part in ("model", "optimizer"):
        assert sorted(state[part]) == ["w0", "w1", "w2", "w3"]
        assert all(bool((tensor == number).all()) for tensor in state[part].values()), "mixed"
    return state["job"]["name"]

def one_is_told():
    return any(os.path.exists(name) and os.path.getsize(name) for name in ("A.log", "B.log"))

def run(job, strategy):
    logging.basicConfig(filename=f"{job}.log", level=logging.WARNING)
    logging.getLogger("stamina").setLevel(logging.ERROR)  # a busy server may have to be asked twice
    rng = random.Random(job)
    make = Checkpointer if layout == "file" else DirectoryCheckpointer
    checkpointer = make(strategy=strategy, storage_options=options)
    number, end, give_up = 0, time.monotonic() + seconds, time.monotonic() + 60
    while time.monotonic() < end or number < 3 or (not one_is_told() and time.monotonic() < give_up):
        number += 1
        path = f"{root}/{rng.choice(NAMES)}"
        state = content(job, number + (1_000_000 if job == "B" else 0))
        if layout == "file":
            checkpointer.save(state, path)
        else:
            checkpointer.save([Part(name, value, Kind.REPLICATED) for name, value in state.items()], path)
        if number == 1:
            checkpointer.wait()
            open(f"{job}.began", "w").close()
        if rng.random() < 0.25:
            checkpointer.remove(f"{root}/{rng.choice(NAMES)}")
        if "://" in root:
            time.sleep(rng.random() * 0.4)  # so that some are there for long enough to be read
        if rng.random() < 0.2:
            Catalog(root, storage_options=options).prune()
    checkpointer.wait()
    assert checkpointer.failures == 0
    checkpointer.close()
    with open(f"{job}.done", "w") as file:
        json.dump(number, file)

def identity(path):
    '''What is committed at ``path`` now.'''
    if "://" in root:
        import s3fs
        filesystem = s3fs.S3FileSystem(**options, use_listings_cache=False)
        try:
            return filesystem.info(path if layout == "file" else f"{path}/manifest.json")["ETag"]
        except FileNotFoundError:
            return None
    try:
        status = os.stat(path if layout == "file" else f"{path}/manifest.json")
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns

def look(path):
    '''The job whose checkpoint is at ``path``; None if there is none or it was replaced while it was read.'''
    before = identity(path)
    if before is None:
        return None
    try:
        if layout == "file":
            return whole(Checkpointer(storage_options=options).load(path))
        with DirectoryCheckpointer(storage_options=options).load(path) as checkpoint:
            checkpoint.verify()
            return whole({part: checkpoint.load(part) for part in checkpoint.parts})
    except (CheckpointError, AssertionError):
        if identity(path) == before:
            raise
        return None

children = {}
for job, strategy in (("A", "async"), ("B", "sync")):
    child = os.fork()
    if child == 0:
        try:
            if job == "B":
                while not os.path.exists("A.began"):
                    time.sleep(0.01)
            run(job, strategy)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        logging.shutdown()
        os._exit(0)
    children[child] = job
seen = {"A": 0, "B": 0}
while children:
    for name in NAMES:
        job = look(f"{root}/{name}")
        if job is not None:
            seen[job] += 1
    pid, status = os.waitpid(-1, os.WNOHANG)
    if pid:
        assert status == 0, f"{children[pid]} has ended with {status}"
        del children[pid]
found = [info.path for info in Catalog(root, storage_options=options).checkpoints()]
left = [look(path) for path in found]
assert None not in left
saves = {job: json.load(open(f"{job}.done")) for job in "AB"}
told = {job: open(f"{job}.log").read().splitlines() for job in "AB"}
print(json.dumps([seen, saves, told, sorted(os.path.basename(path) for path in found)]))
"""


@pytest.mark.sampled(2)
@pytest.mark.extended_cells("file-moto-")
@pytest.mark.parametrize(
    ("layout", "place", "way"),
    [
        ("file", "local", ""),
        ("directory", "local", "exchange"),
        ("directory", "local", "two renames"),
        ("file", "moto", ""),
        ("directory", "moto", ""),
    ],
)
def test_nothing_is_damaged_and_the_second_is_told(
    layout: str, place: str, way: str, tmp_path: Path, fork_script: ScriptRunner, request: pytest.FixtureRequest
) -> None:
    root, options = str(tmp_path / "runs"), None
    seconds = 2 if place == "local" else 4
    if place != "local":
        server = request.getfixturevalue("server_of")(place)
        root, options = f"{server.new_bucket()}/runs", dict(server.options)
    done = fork_script(JOBS, layout, root, json.dumps(options), way, seconds)
    seen, saves, told, names = json.loads(done.stdout.splitlines()[-1])
    assert min(saves.values()) >= 3
    assert sum(seen.values()) >= 2
    assert place != "local" or min(seen.values()) >= 1, "checkpoints of both were found, and were whole"
    assert sum(map(len, told.values())) == 1, told
    # On an object store, the job whose lease comes later is warned.
    assert [
        line
        for line in told["A" if place != "local" and told["A"] else "B"]
        if f"another job saves checkpoints into {root}: process " in line
    ]
    if place == "local":
        assert sorted(os.listdir(root)) == names, "nothing unfinished is left"


HOLD = """
import sys, time, torch
from ckpt_core import Checkpointer
checkpointer = Checkpointer(strategy="sync")
checkpointer.save({"a": torch.ones(3)}, sys.argv[1] + "/held.ckpt")
print("held", flush=True)
sys.stdin.read()
"""


def holder(directory: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLD, str(directory)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def save(directory: Path | str, checkpointer: Checkpointer) -> None:
    checkpointer.save({"a": torch.ones(3)}, f"{directory}/mine.ckpt")


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "another job" in record.getMessage()]


def test_one_warning_says_which_process_has_the_directory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = holder(tmp_path)
    try:
        with Checkpointer(strategy="sync") as checkpointer:
            for _ in range(3):
                save(tmp_path, checkpointer)
            with Checkpointer(strategy="async") as another:
                save(tmp_path, another)
            (message,) = warnings_in(caplog)
            assert str(tmp_path) in message
            assert f"process {other.pid} ({sys.executable} -c" in message
            assert "What to do" in message
            other.kill()
            other.wait()
            save(tmp_path, checkpointer)  # the lock is free, and is acquired
            caplog.clear()
            save(tmp_path, checkpointer)
            assert warnings_in(caplog) == []
            assert claims._holder(os.open(tmp_path, os.O_RDONLY)) == str(os.getpid())
    finally:
        other.kill()
        other.communicate()
    assert sorted(os.listdir(tmp_path)) == ["held.ckpt", "mine.ckpt"]


def locked(directory: Path) -> bool:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        return bool(claims._holder(descriptor))
    finally:
        os.close(descriptor)


def test_checkpointers_of_one_process_share_the_directory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one, other = Checkpointer(strategy="sync"), DirectoryCheckpointer(strategy="sync")
    save(tmp_path, one)
    (tmp_path / "alias").symlink_to(tmp_path)
    other.save([Part("a", {"w": torch.ones(2)}, Kind.REPLICATED)], tmp_path / "alias" / "directory")
    assert locked(tmp_path)
    one.close()
    assert locked(tmp_path), "the other still saves there"
    one.close()
    assert locked(tmp_path), "counted once"
    other.close()
    assert not locked(tmp_path)
    save(tmp_path, one)
    assert locked(tmp_path)
    del one
    gc.collect()
    assert not locked(tmp_path), "a forgotten checkpointer keeps nothing"
    assert warnings_in(caplog) == []


def test_a_fork_does_not_keep_the_directory(tmp_path: Path) -> None:
    checkpointer = Checkpointer(strategy="sync")
    save(tmp_path, checkpointer)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    assert locked(tmp_path)
    # As when the parent is killed: the descriptor is closed without an unlock.
    claim = claims.claim_on(str(tmp_path))
    assert claim is not None
    claim.forget()
    eventually(lambda: not locked(tmp_path))
    os.close(writing)
    os.waitpid(child, 0)
    os.close(reading)


def test_a_directory_that_was_made_anew_is_claimed_anew(tmp_path: Path) -> None:
    place = tmp_path / "run"
    with Checkpointer(strategy="sync") as checkpointer:
        save(place, checkpointer)
        place.rename(tmp_path / "gone")
        save(place, checkpointer)
        assert locked(place)
        assert not locked(tmp_path / "gone")


def test_a_filesystem_that_cannot_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(local.fcntl, "flock", flock)
    with Checkpointer(strategy="sync") as checkpointer:
        save(tmp_path, checkpointer)
    assert caplog.records == []


def test_many_directories_do_not_use_up_descriptors(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with Checkpointer(strategy="sync") as checkpointer:
        for number in range(40):
            save(tmp_path / str(number), checkpointer)
        assert len(os.listdir("/proc/self/fd")) <= before + 20
        assert locked(tmp_path / "39")
    assert not locked(tmp_path / "39")


# ---- object stores ---------------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "RENEW_SECONDS", 1.2)  # a store's clock may count whole seconds
    monkeypatch.setattr(lease, "ALIVE_SECONDS", 6.0)


def leases_in(root: str, storage: Any) -> list[str]:
    return [info.path for info in storage.hidden_objects(root, lease.LEASE_PREFIX)]


def eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def forged(owner: dict[str, Any]) -> bytes:
    return json.dumps({**lease.this_process(), **owner}).encode()


@pytest.mark.extended_cells("fsspec")
@pytest.mark.parametrize("backend", ["fsspec", "obstore"])
@pytest.mark.usefixtures("quick")
def test_a_lease_of_another_machine_counts_when_it_is_renewed(
    backend: str, server_of: ServerOf, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "ALIVE_SECONDS", 60.0)  # no lease expires here, however long a request takes
    server = server_of("moto")
    root = f"{server.new_bucket()}/runs"
    options = {**server.options, "backend": backend}
    storage: Any = storage_for(root, dict(options))
    theirs = f"{root}/{lease.LEASE_PREFIX}theirs"
    owner = forged({"machine": "another", "host": "node-7", "pid": 17})
    storage.put(theirs, owner)
    with DirectoryCheckpointer(strategy="async", storage_options=options) as checkpointer:
        checkpointer.save([Part("model", {"w": torch.ones(2)}, Kind.REPLICATED)], f"{root}/a")
        time.sleep(1.5)
        assert checkpointer.pending, "it is not known yet whether the other one lives"
        assert warnings_in(caplog) == []
        storage.put(theirs, owner)
        eventually(lambda: warnings_in(caplog))
        (message,) = warnings_in(caplog)
        assert f"into {root}: process 17 on node-7" in message
        checkpointer.wait()
        names = [info.path.rpartition("/")[2] for info in storage.list(f"{root}/a")]
        assert "manifest.json" in names
        assert "model.safetensors" not in names, "which is how the other one may be calling its own"
        assert storage.list(root) == []
        # The other job is gone, and from then on this job is the first.
        storage.delete(theirs)
        eventually(lambda: lease.claim_on(root)._is_first)  # type: ignore[attr-defined,union-attr]
        checkpointer.save([Part("model", {"w": torch.ones(2)}, Kind.REPLICATED)], f"{root}/b")
        checkpointer.wait()
        assert "model.safetensors" in [info.path.rpartition("/")[2] for info in storage.list(f"{root}/b")]
        # A second job does not change that, but files that are not this job's are not deleted any more.
        storage.put(theirs, owner)
        for name in ("a", "b"):
            storage.put(f"{root}/{name}/in-flight.safetensors", b"x")
        checkpointer.remove(f"{root}/b")
        checkpointer.wait()
        assert [info.path for info in storage.list(f"{root}/b")] == [f"{root}/b/in-flight.safetensors"]
        storage.delete(theirs)
        checkpointer.remove(f"{root}/a")
        checkpointer.wait()
        assert storage.list(f"{root}/a") == []
        assert len(leases_in(root, storage)) == 1
    assert leases_in(root, storage) == []


@pytest.mark.usefixtures("quick")
def test_leases_of_the_dead_do_not_count(server_of: ServerOf, caplog: pytest.LogCaptureFixture) -> None:
    server = server_of("moto")
    root = f"{server.new_bucket()}/runs"
    storage: Any = storage_for(root, dict(server.options))
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    storage.put(f"{root}/{lease.LEASE_PREFIX}ended", forged({"pid": ended.pid}))
    storage.put(f"{root}/{lease.LEASE_PREFIX}number-used-again", forged({"started": "17"}))
    storage.put(f"{root}/{lease.LEASE_PREFIX}garbage", b"[1")
    storage.put(f"{root}/{lease.LEASE_PREFIX}killed-elsewhere", forged({"machine": "another"}))
    with caplog.at_level(logging.WARNING), Checkpointer(storage_options=dict(server.options)) as checkpointer:
        checkpointer.save({"a": torch.ones(3)}, f"{root}/a.ckpt")
        checkpointer.wait()
        # The first two jobs are known to be dead; the others are once they have been silent for long enough.
        eventually(lambda: len(leases_in(root, storage)) == 3)
        eventually(lambda: len(leases_in(root, storage)) == 1)
    assert leases_in(root, storage) == []
    assert warnings_in(caplog) == []


@pytest.mark.usefixtures("quick")
def test_a_process_that_was_taken_for_dead_asks_again(server_of: ServerOf) -> None:
    server = server_of("moto")
    root = f"{server.new_bucket()}/runs"
    storage: Any = storage_for(root, dict(server.options))
    ours = lease.Lease(storage, root)
    ours.beat()
    assert ours.is_alone()
    ours._written_at -= 60.0  # as if the process had been suspended
    storage.put(
        f"{root}/{lease.LEASE_PREFIX}theirs", forged({"pid": os.getppid(), "started": lease._start_of(os.getppid())})
    )
    assert not ours.is_alone()


def test_files_of_callers_are_refused_where_another_job_could_overwrite_them(server_of: ServerOf) -> None:
    server = server_of("moto")
    root = f"{server.new_bucket()}/runs"
    storage: Any = storage_for(root, dict(server.options))
    parent = os.getppid()
    storage.put(f"{root}/{lease.LEASE_PREFIX}theirs", forged({"pid": parent, "started": lease._start_of(parent)}))
    checkpointer = DirectoryCheckpointer(strategy="sync", storage_options=dict(server.options))
    parts = [Part("model", {"w": torch.ones(2)}, Kind.REPLICATED)]
    with pytest.raises(OSError, match="another job saves into the same directory"):
        checkpointer.save(parts, f"{root}/a", write_files=lambda place: Path(place, "note").write_text("x") and None)
    assert not storage.exists(f"{root}/a")
    checkpointer.save(parts, f"{root}/a")
    checkpointer.close()


def test_the_second_job_deletes_no_file_that_the_first_may_be_writing(server_of: ServerOf) -> None:
    server = server_of("moto")
    root = f"{server.new_bucket()}/runs"
    storage: Any = storage_for(root, dict(server.options))
    parts = [Part("model", {"w": torch.ones(2)}, Kind.REPLICATED)]
    with DirectoryCheckpointer(strategy="sync", storage_options=dict(server.options)) as first:
        first.save(parts, f"{root}/a")
    parent = os.getppid()
    storage.put(f"{root}/{lease.LEASE_PREFIX}theirs", forged({"pid": parent, "started": lease._start_of(parent)}))
    with DirectoryCheckpointer(strategy="sync", storage_options=dict(server.options)) as second:
        second.save(parts, f"{root}/b")
        second.remove(f"{root}/a")
        second.remove(f"{root}/b")
    assert not storage.exists(f"{root}/a/manifest.json")
    left = sorted(os.path.basename(file.path) for file in storage.list(f"{root}/a"))
    assert left == ["model.safetensors", "rank-00001-of-00001.digests"]
    assert list(storage.list(f"{root}/b")) == []


class Store(lease.LeaseStore):
    """Keeps objects in a dictionary; ``error``, if set, is raised by ``put`` and ``delete``."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.error: Exception | None = None
        self.may_delete = threading.Event()
        self.may_delete.set()

    def put(self, path: str, data: bytes) -> None:
        if self.error is not None:
            raise self.error
        self.objects[path] = data

    def get(self, path: str) -> bytes | None:
        return self.objects.get(path)

    def delete(self, path: str, *, once: bool = False) -> None:
        self.may_delete.wait(60)
        if self.error is not None:
            raise self.error
        self.objects.pop(path, None)

    def hidden_objects(self, directory: str, prefix: str) -> list[FileInfo]:
        found = [path for path in list(self.objects) if path.startswith(f"{directory}/{prefix}")]
        return [FileInfo(path, len(self.objects[path]), time.time()) for path in found]


@pytest.mark.usefixtures("quick")
def test_an_error_of_a_client_does_not_end_a_lease(caplog: pytest.LogCaptureFixture) -> None:
    store = Store()
    store.error = KeyError("ETag")
    ours = lease.Lease(store, "bucket/one")
    ours.renew()
    assert ours.is_alone(), "nothing speaks against it"
    ours.beat()
    assert caplog.text.count("cannot find out whether another job saves into bucket/one") == 1, "as long as it fails"
    store.error = None
    eventually(lambda: store.objects)
    store.error = KeyError("ETag")
    ours.release()
    assert len(store.objects) == 1, "which ends by itself"


def test_a_lease_that_is_being_deleted_is_no_other_job(caplog: pytest.LogCaptureFixture) -> None:
    store = Store()
    store.may_delete.clear()
    first, second = claims.Claims(), claims.Claims()
    first.hold("fake://bucket/runs", lambda directory: lease.Lease(store, directory))
    eventually(lambda: store.objects)
    del first
    gc.collect()
    second.hold("fake://bucket/runs", lambda directory: lease.Lease(store, directory))
    assert second.is_alone("fake://bucket/runs")
    assert len(store.objects) == 2
    assert warnings_in(caplog) == []
    store.may_delete.set()
    second.release()
    eventually(lambda: not store.objects)
