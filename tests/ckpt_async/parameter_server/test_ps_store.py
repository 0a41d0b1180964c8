"""The store of cuts: damage is no reason to start over or to delete, and nothing is committed that cannot be loaded."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ckpt_async.consistent_cut import COORDINATOR, ConsistentCut, InconsistentCutError, VectorClock
from ckpt_async.parameter_server import CutStore, SocketTransport, TrainingCoordinator
from ckpt_async.parameter_server.model import BlockTable
from ckpt_core.errors import CheckpointCorruptedError, CheckpointError
from tests.support.damage import flip_bit

PARAMETERS = {"weight": torch.arange(64.0)}
TABLE = BlockTable(PARAMETERS.items())


def write(store: CutStore, generation: int, snapshot: int, workers: tuple[str, ...] = ("w0", "w1")) -> str:
    """Commit a checkpoint of one shard; worker number ``i`` has stream ``i``."""
    store.reserve(generation, snapshot)
    says: list[tuple[str, list[list[int]]]] = [("s0", [[stream, snapshot] for stream in range(len(workers))])]
    says += [(worker, [[stream, snapshot]]) for stream, worker in enumerate(workers)]
    reports = [
        store.write(
            generation,
            snapshot,
            rank=rank,
            world_size=len(says),
            incarnation=0,
            table=TABLE,
            blocks={} if rank else PARAMETERS,
            participant={"name": name, "cut": cut},
        )
        for rank, (name, cut) in enumerate(says)
    ]
    vector = VectorClock(dict.fromkeys(range(len(workers)), snapshot))
    path, _ = store.commit(ConsistentCut(snapshot, generation, vector, workers, ("s0",)), reports)
    return path


def flip_a_bit(path: str) -> None:
    file = next(Path(path).glob("model-*.safetensors"))
    flip_bit(file, -1)


def cut_off_the_manifest(path: str) -> None:
    manifest = Path(path) / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-20])


def lose_a_file(path: str) -> None:
    next(Path(path).glob("model-*.safetensors")).unlink()


def lose_the_manifest(path: str) -> None:
    (Path(path) / "manifest.json").unlink()


@pytest.fixture
def transport() -> Iterator[SocketTransport]:
    opened = SocketTransport(COORDINATOR)
    yield opened
    opened.close()


def coordinator(transport: SocketTransport, root: Path, keep: int = 3) -> TrainingCoordinator:
    return TrainingCoordinator(transport, root, streams=2, shards=["s0"], workers=["w0", "w1"], keep=keep)


@pytest.mark.parametrize("damage", [flip_a_bit, cut_off_the_manifest, lose_a_file, lose_the_manifest])
@pytest.mark.parametrize("count", [1, 3])
def test_a_training_whose_checkpoints_are_all_damaged_does_not_begin_anew(
    tmp_path: Path, transport: SocketTransport, caplog: pytest.LogCaptureFixture, damage: object, count: int
) -> None:
    store = CutStore(tmp_path)
    paths = [write(store, 1, snapshot + 1) for snapshot in range(count)]
    before = sorted(os.listdir(tmp_path))
    for path in paths:
        damage(path)  # type: ignore[operator]
    with pytest.raises(CheckpointCorruptedError, match="none of the checkpoints") as caught:
        coordinator(transport, tmp_path)
    for said in (str(tmp_path), f"{count} do not verify", os.path.basename(paths[-1]), "what to do"):
        assert said in str(caught.value)
    assert all(f"passed over the checkpoint {path}" in caplog.text for path in paths)
    assert sorted({*os.listdir(tmp_path)} - {".ckpt-generations"}) == before, "no permission to delete"


def test_a_training_without_checkpoints_begins(tmp_path: Path, transport: SocketTransport) -> None:
    (tmp_path / "notes").mkdir()
    assert coordinator(transport, tmp_path).resumed is None


def test_what_was_passed_over_is_never_pruned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = CutStore(tmp_path)
    paths = [write(first, 1, snapshot) for snapshot in (1, 2, 3)]
    flip_a_bit(paths[2])

    second = CutStore(tmp_path)
    with second.newest() as found:  # type: ignore[union-attr]
        assert found.path == paths[1]
    assert f"passed over the checkpoint {paths[2]}: " in caplog.text
    paths.append(write(second, 2, 3))
    second.prune(2)
    assert second.committed() == [paths[3], paths[2], paths[1]]

    third = CutStore(tmp_path)  # does not look at the damaged one again, because a newer one verifies
    with third.newest() as found:  # type: ignore[union-attr]
        assert found.path == paths[3]
    paths += [write(third, 3, 4), write(third, 3, 5)]
    third.prune(2)
    assert third.committed() == [paths[5], paths[4], paths[2]]


def test_a_repaired_checkpoint_counts_again(tmp_path: Path) -> None:
    store = CutStore(tmp_path)
    write(store, 1, 1)
    newer = write(store, 1, 2)
    shutil.copytree(newer, tmp_path / "copy")
    flip_a_bit(newer)
    store.newest().close()  # type: ignore[union-attr]
    shutil.rmtree(newer)
    (tmp_path / "copy").rename(newer)
    with store.newest() as found:  # type: ignore[union-attr]
        assert found.path == newer
    store.prune(1)
    assert store.committed() == [newer]


def test_one_kept_checkpoint_is_verified_before_the_one_before_it_goes(tmp_path: Path) -> None:
    store = CutStore(tmp_path)
    paths = [write(store, 1, snapshot) for snapshot in (1, 2)]
    flip_a_bit(paths[1])
    store.prune(1)
    assert store.committed() == [paths[1], paths[0]]
    paths.append(write(store, 1, 3))
    store.prune(1)
    assert store.committed() == [paths[2], paths[1]], "the damaged one does not count, and stays"


def test_the_generation_is_newer_than_all_checkpoints_of_a_copy(tmp_path: Path) -> None:
    write(CutStore(tmp_path / "old"), 5, 1)
    shutil.copytree(tmp_path / "old", tmp_path / "new", ignore=shutil.ignore_patterns(".*"))
    assert CutStore(tmp_path / "new").claim_generation() == 6


def test_a_commit_whose_ranks_are_in_another_order_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CutStore(tmp_path)
    commit = store.commit
    # As from a coordinator whose second worker said hello first.
    monkeypatch.setattr(store, "commit", lambda cut, said: commit(replace(cut, workers=cut.workers[::-1]), said))
    with pytest.raises(InconsistentCutError, match="the ranks are s0, w0, w1, and the cut has s0, w1, w0"):
        write(store, 1, 1)
    assert store.committed() == []


@pytest.mark.parametrize("workers", [("w0",), ("w0", "w1", "w2"), ("w0", "other")])
def test_a_commit_of_other_workers_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: tuple[str, ...]
) -> None:
    store = CutStore(tmp_path)
    commit = store.commit
    monkeypatch.setattr(store, "commit", lambda cut, said: commit(replace(cut, workers=workers), said))
    with pytest.raises(InconsistentCutError):
        write(store, 1, 1)
    assert store.committed() == []


def test_a_commit_of_another_count_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CutStore(tmp_path)
    commit = store.commit
    other = VectorClock({0: 1, 1: 2})
    monkeypatch.setattr(store, "commit", lambda cut, said: commit(replace(cut, vector=other), said))
    with pytest.raises(InconsistentCutError, match="the state of s0 is at"):
        write(store, 1, 1)
    assert store.committed() == []


@pytest.mark.parametrize("generation", [1, 5])
def test_a_generation_that_does_not_grow_is_refused(
    tmp_path: Path, transport: SocketTransport, generation: int
) -> None:
    """Its checkpoints would be taken for older ones: deleted first, and not resumed from."""
    write(CutStore(tmp_path), 5, 7)
    with pytest.raises(CheckpointError, match=f"generation {generation}, and there are checkpoints of generation 5"):
        TrainingCoordinator(transport, tmp_path, streams=2, shards=["s0"], workers=["w0", "w1"], generation=generation)
    assert CutStore(tmp_path).claim_generation(6) == 6


def test_a_stranger_among_the_generations_is_left_alone(tmp_path: Path) -> None:
    store = CutStore(tmp_path)
    assert store.claim_generation() == 1
    (tmp_path / ".ckpt-generations" / ".DS_Store").touch()
    assert store.claim_generation() == 2


def test_a_url_may_end_with_a_slash() -> None:
    root = "memory://ps-store/slash"
    path = write(CutStore(f"{root}/"), 1, 1)
    for again in (f"{root}/", root):
        newest = CutStore(again).newest()
        assert newest is not None and newest.path == path == f"{root}/cut-000001-00000001"
        with pytest.raises(CheckpointError, match="this start has generation 1"):
            CutStore(again).claim_generation(1)
