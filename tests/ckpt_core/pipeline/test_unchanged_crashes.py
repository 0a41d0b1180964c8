"""Saves that link unchanged files, and what goes wrong in them: errors of the storage, kills, and several ranks."""

from __future__ import annotations

import errno
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core import Catalog, CheckpointError, DirectoryCheckpointer, RankGroup
from ckpt_core.storage import Fault, FaultyStorage, LocalStorage, Operation
from tests.conftest import ScriptRunner
from tests.support.fine_tuning import FineTune, copies, load_model
from tests.support.states import assert_same_state

WARM = 2  # number of saves after which what is unchanged is linked


class Broken(FaultyStorage):
    """Fails once: in the ``countdown``-th operation after that was set."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(LocalStorage(), [Fault(self._is_it, number=None, error=error)])
        self.countdown: int | None = None
        self.broke_at: Operation | None = None

    def _is_it(self, operation: Operation) -> bool:
        if self.countdown is None or operation.name == "leave_directory":
            return False
        self.countdown -= 1
        if self.countdown == 0:
            self.broke_at = operation
        return self.countdown == 0


@pytest.mark.parametrize("strategy", ["sync", "async"])
def test_an_error_in_any_operation_of_a_save_that_links(strategy: Any, tmp_path: Path) -> None:
    run = FineTune.new(layers=2, width=200)
    storage = Broken(OSError(errno.EIO, "Input/output error"))
    survived: set[str] = set()
    failed: set[str] = set()
    with DirectoryCheckpointer(strategy=strategy, storage=storage, slice_replicated=True) as checkpointer:
        for number in range(WARM):
            run.step()
            checkpointer.save(run.parts(), tmp_path / f"warm{number}")
            checkpointer.wait()
        newest, model = tmp_path / f"warm{WARM - 1}", dict(run.model())
        for number in itertools.count(1):
            model = {key: value.clone() for key, value in model.items()}
            run.step()
            storage.countdown, storage.broke_at = number, None
            path = tmp_path / f"step={number}"
            try:
                checkpointer.save(run.parts(), path)
                checkpointer.wait()
                newest, model = path, {key: value.clone() for key, value in run.model().items()}
                if storage.broke_at is not None:
                    survived.add(storage.broke_at.name)
            except CheckpointError:
                assert storage.broke_at is not None
                failed.add(storage.broke_at.name)
                assert not path.exists()
            unbroken = storage.broke_at is None
            storage.countdown = None
            assert_same_state(load_model(newest), model)
            found = Catalog(str(tmp_path), suffix="").newest_verified()
            assert found is not None
            assert Path(found.path) == newest
            if unbroken:
                break
    assert number > 20
    assert {"copy", "open", "read_into"} <= survived, "then it is written"
    assert {"create", "write_at", "commit", "publish_directory"} <= failed
    for path in tmp_path.iterdir():
        load_model(path)


KILLED = """
import json, os, shutil, sys
from ckpt_core import DirectoryCheckpointer
from tests.support.fine_tuning import FineTune, load_model
from tests.support.killed_saves import killed_before

strategy, again, stride = sys.argv[1], sys.argv[2] == "again", int(sys.argv[3])
def value_of(path):
    return float(load_model(path)["0.adapter"][0, 0])

def train(start, *paths, kill=None):
    run = FineTune.new(layers=2, width=200)
    with DirectoryCheckpointer(strategy=strategy, slice_replicated=True) as checkpointer:
        for number, path in enumerate(paths):
            for tensor in run.trained.values():
                tensor.fill_(start + number)
            if kill is not None and number == len(paths) - 1:
                killed_before(kill)
            checkpointer.save(run.parts(), path)
            checkpointer.wait()

target = "run/2" if again else "run/3"
number, rows = 0, []
while True:
    shutil.rmtree("run", ignore_errors=True)
    child = os.fork()
    if child == 0:
        train(0.0, "run/0", "run/1", "run/2", target, kill=number)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    killed = os.WIFSIGNALED(status)
    assert killed or status == 0, status
    values = {name: value_of(f"run/{name}") for name in sorted(os.listdir("run")) if not name.startswith(".")}
    train(9.0, "run/next")  # cleans up
    assert {name: value_of(f"run/{name}") for name in values} == values, "and harms none"
    rows.append([values, sorted(os.listdir("run")), os.stat("run/0/model-00001-of-00001-unchanged-1.safetensors").st_nlink])
    if not killed:
        break
    number += stride
print(json.dumps(rows))
"""


@pytest.mark.sampled(1)
@pytest.mark.extended_cells("sync-again-5")
@pytest.mark.parametrize(
    ("strategy", "again", "stride"), [("sync", "new", 3), ("sync", "again", 5), ("async", "new", 13)]
)
def test_killed_before_any_change_of_the_disk(
    strategy: str, again: str, stride: int, fork_script: ScriptRunner
) -> None:
    rows = json.loads(fork_script(KILLED, strategy, again, stride).stdout)
    assert len(rows) > 30 / stride
    target = "2" if again == "again" else "3"
    before = {"0": 0.0, "1": 1.0, "2": 2.0}
    after = {**before, target: 3.0}
    assert [values in (before, after) for values, _, _ in rows] == [True] * len(rows)
    assert rows[0][0] == before
    assert rows[-1][0] == after
    for values, left, links in rows:
        assert left == sorted([*values, "next"]), "what was left is removed, and with it its links"
        assert links == len(values)


RANKS = """
import json, sys
import torch
from pathlib import Path
from ckpt_core import DirectoryCheckpointer
from tests.support.fine_tuning import FineTune
from tests.support.ranks import Ranks

def work(rank, group):
    run = FineTune.new(layers=6, width=256)
    written = []
    with DirectoryCheckpointer(ranks=group, slice_replicated=True, strategy=sys.argv[1]) as checkpointer:
        if sys.argv[4] != "none":
            with checkpointer.load(sys.argv[4]) as checkpoint:
                model = checkpoint.load("model")
                for key, tensor in {**run.trained, **run.frozen}.items():
                    tensor.copy_(model[key])
        for number in range(int(sys.argv[3]), int(sys.argv[3]) + 4):
            run.step()
            checkpointer.save(run.parts(), f"run/{number}")
            checkpointer.wait()
    return float(next(iter(run.trained.values())).sum())

torch.set_num_threads(1)
print(json.dumps(Ranks(int(sys.argv[2]), work).results()))
"""


def inodes(path: Path) -> set[int]:
    return {file.stat().st_ino for file in path.iterdir()}


def links(path: Path) -> list[int]:
    return sorted(file.stat().st_nlink for file in path.iterdir() if "unchanged" in file.name)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["sync", "async"])
def test_ranks_link_their_own_files_also_with_another_number_of_them(
    strategy: str, tmp_path: Path, fork_script: ScriptRunner
) -> None:
    fork_script(RANKS, strategy, 2, 0, "none")
    fork_script(RANKS, strategy, 3, 4, "run/3")
    fork_script(RANKS, strategy, 3, 8, "run/7")
    shared = [len(inodes(tmp_path / "run" / str(n)) & inodes(tmp_path / "run" / str(n + 1))) for n in range(11)]
    assert shared[:3] == [2, 2, 2], "each of the two ranks links its own"
    assert shared[3] == 0, "another cut: everything is written"
    assert shared[6] == shared[7] == shared[10] >= 3, "with the same cut, the first save of a run links"
    expected = FineTune.new(layers=6, width=256)
    for number in range(12):
        expected.step()
        assert_same_state(load_model(tmp_path / "run" / str(number)), expected.model())


def test_a_rank_that_fails_leaves_the_others_files_unlinked(tmp_path: Path) -> None:
    """One rank's storage fails after the save has linked files: the next save links to the checkpoint before."""
    run = FineTune.new(layers=2, width=200)
    storage = FaultyStorage(
        LocalStorage(), [Fault("publish_directory", number=WARM + 1, error=OSError(errno.ENOSPC, "full"))]
    )
    with DirectoryCheckpointer(
        ranks=RankGroup.alone(), strategy="sync", storage=storage, slice_replicated=True
    ) as checkpointer:
        for number in range(WARM + 2):
            run.step()
            if number == WARM:
                with pytest.raises(CheckpointError):
                    checkpointer.save(run.parts(), tmp_path / str(number))
                continue
            checkpointer.save(run.parts(), tmp_path / str(number))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "3"]
    assert links(tmp_path / "3") == [3]
    assert copies(storage) == 3
    assert torch.equal(load_model(tmp_path / "3")["0.adapter"], run.trained["0.adapter"])
