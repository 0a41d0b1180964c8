"""Directory checkpoints on every server: saved, replaced, read, copied, removed, walked back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ckpt_core import Catalog, CheckpointError, DirectoryCheckpointer, Kind, Part
from ckpt_core.storage import storage_for
from tests.support.servers import Server

ServerOf = Callable[[str], Server]
PLACES = ("moto", "azurite", "gcs", "moto fsspec")
MORE_SERVERS = ("ceph", "rclone", "ceph fsspec", "azurite fsspec")
LARGE = 11 * 2**20 // 4  # elements: three parts of the smallest size that S3 takes


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt_core.storage.uploads.PART_BYTES", 5 * 2**20)


@pytest.fixture(params=[*PLACES, *(pytest.param(name, marks=pytest.mark.extended) for name in MORE_SERVERS)])
def place(request: pytest.FixtureRequest, server_of: ServerOf) -> tuple[str, dict[str, Any]]:
    kind, _, backend = str(request.param).partition(" ")
    server = server_of(kind)
    return f"{server.new_bucket()}/runs", {**server.options, **({"backend": backend} if backend else {})}


def parts(value: float, size: int = 1000) -> list[Part]:
    model = {"w": torch.full((size,), value), "b": torch.arange(7) + int(value)}
    return [Part("model", model, Kind.REPLICATED), Part("rng", {"seed": torch.tensor([value])}, Kind.PER_RANK)]


def value_at(checkpointer: DirectoryCheckpointer, path: str) -> float:
    """Return the number in a checkpoint, after checking that all of it verifies and is of one save."""
    with checkpointer.load(path) as checkpoint:
        checkpoint.verify()
        model = checkpoint.load("model")
        value = float(model["w"][0])
        assert bool((model["w"] == value).all())
        assert torch.equal(model["b"], torch.arange(7) + int(value))
        assert float(checkpoint.load("rng")["seed"]) == value
        return value


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", ["sync", "async"])
def test_the_life_of_directories(strategy: Any, place: tuple[str, dict[str, Any]]) -> None:
    root, options = place
    storage: Any = storage_for(root, dict(options))
    with DirectoryCheckpointer(strategy=strategy, storage_options=options) as checkpointer:
        path = f"{root}/step=1"
        assert not checkpointer.exists(path)
        checkpointer.save(parts(1.0, LARGE), path, metadata={"step": 1})
        checkpointer.wait()
        assert checkpointer.exists(path)
        assert value_at(checkpointer, path) == 1.0
        assert "model.safetensors" in [info.path.rpartition("/")[2] for info in storage.list(path)]

        # Into tensors that are there already; only what is asked for is read.
        with checkpointer.load(path) as checkpoint:
            target = {"w": torch.zeros(LARGE), "b": torch.zeros(7, dtype=torch.int64)}
            memory = target["w"].data_ptr()
            checkpoint.load("model", into=target)
            assert target["w"].data_ptr() == memory
            assert bool((target["w"] == 1.0).all())
        with checkpointer.load(path) as checkpoint:
            checkpoint.load("rng")
            assert checkpoint.bytes_read < 2**20
            assert checkpoint.metadata == {"step": 1}

        # Replaced: the old files are deleted once the new manifest is there.
        checkpointer.save(parts(2.0), path)
        checkpointer.copy(path, f"{root}/copy")
        checkpointer.wait()
        assert value_at(checkpointer, path) == 2.0
        assert value_at(checkpointer, f"{root}/copy") == 2.0
        assert len(storage.list(path)) == 4, "two files of tensors, their digests and the manifest"

        # Walked back: the newest one that verifies.
        checkpointer.remove(f"{root}/copy")
        checkpointer.save(parts(3.0), f"{root}/step=3")
        checkpointer.wait()
        catalog = Catalog(root, suffix="", storage_options=options)
        assert {info.path for info in catalog.checkpoints()} == {path, f"{root}/step=3"}
        broken = next(info for info in storage.list(f"{root}/step=3") if "model" in info.path)
        data = bytearray(storage.get(broken.path))
        data[-1] ^= 1
        storage.put(broken.path, bytes(data))
        newest = catalog.newest_verified()
        assert newest is not None
        assert newest.path == path
        with pytest.raises(CheckpointError):
            value_at(checkpointer, f"{root}/step=3")

        # Removed, with all of its files.
        checkpointer.remove(f"{root}/step=3")
        checkpointer.remove(path)
        checkpointer.wait()
        assert catalog.checkpoints() == []
        assert storage.list(f"{root}/step=3") == storage.list(path) == []
    assert storage.hidden_objects(root, "") == []
