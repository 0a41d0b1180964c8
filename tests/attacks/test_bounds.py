"""Small files made to cost much time or memory are refused, by bounds that no honest checkpoint reaches."""

from __future__ import annotations

import json
import os
import resource
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckpt_core import Catalog, CheckpointCorruptedError, Checkpointer, verify
from ckpt_core._layouts.directory.skeleton import decode_plain, encode_plain
from ckpt_core._layouts.torch_file.manifest import Footer, Manifest
from ckpt_core.cli import main
from ckpt_core.storage.base import MANIFEST_NAME
from tests.attacks.test_sharded_manifests import attack, document_of, encoded, refused, saved, signed

__all__ = ["attack", "saved"]

Attack = Callable[[bytes], Path]
PRIME = 2**61 - 1  # integers that differ by a multiple of it have one hash


def colliding(count: int) -> list[int]:
    return [number * PRIME for number in range(count)]


@pytest.mark.parametrize("tag", ["$dict", "$ordered", "$counter"])
@pytest.mark.parametrize("place", ["metadata", "state"])
def test_keys_of_one_hash(tag: str, place: str, saved: Path, attack: Attack) -> None:
    document = document_of(saved)
    pairs = {tag: [[{"$int": hex(key)}, 0] for key in colliding(2000)]}
    if place == "metadata":
        document["metadata"]["x"] = pairs
    else:
        document["parts"]["model"]["state"]["n"] = pairs
    assert "the same hash" in str(refused(attack(encoded(document))))


@pytest.mark.parametrize(
    "skeleton",
    [
        {"$set": [{"$int": hex(key)} for key in colliding(2000)]},
        {"$frozenset": [{"$complex": [-1000003.0 * i, float(i)]} for i in range(2000)]},
        {"$defaultdict": ["int", [[{"$tuple": [{"$int": hex(key)}]}, 0] for key in colliding(2000)]]},
    ],
    ids=["set", "complex", "tuples"],
)
def test_members_of_one_hash(skeleton: Any) -> None:
    with pytest.raises(ValueError, match="the same hash"):
        decode_plain(skeleton, [])


def test_honest_keys_are_read_back() -> None:
    """Numbers in order, with holes, negative, huge and random; floats that are powers of two; tuples of them."""
    random = np.random.default_rng(1)
    keys: list[Any] = [
        *range(-50_000, 50_000),
        *(2**power for power in range(2000)),
        *(-(2**power) for power in range(2000)),
    ]
    keys += [int(number) for number in random.integers(-(2**63), 2**63 - 1, 50_000)]
    keys += [
        *(i << 40 for i in range(1, 1000)),
        *(2.0**power for power in range(-1000, 1000)),
        *((i, -i) for i in range(50_000)),
    ]
    tree = {"d": dict.fromkeys(keys, 1), "s": set(keys)}
    skeleton, _ = encode_plain(tree, key="x")
    assert decode_plain(json.loads(json.dumps(skeleton)), []) == tree


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "Infinity", "-Infinity"])
def test_numbers_that_are_not_finite(number: str, saved: Path, attack: Attack) -> None:
    document = document_of(saved)
    document["metadata"]["x"] = "HERE"
    text = json.dumps(document, separators=(",", ":"))[:-1].replace('"HERE"', number) + ",\n"
    assert isinstance(refused(attack(signed(text))), CheckpointCorruptedError)


def test_tensors_that_are_no_part_of_the_state(saved: Path, attack: Attack) -> None:
    document = document_of(saved)
    document["parts"]["model"]["tensors"] += [0] * 100_000
    assert "not part of the state" in str(refused(attack(encoded(document))))


def test_records_that_are_no_tensors() -> None:
    end = 10**6
    records = [[f"r{number}", 0, 0, []] for number in range(2000)]
    document = {
        "format": "ckpt_core.torch_file",
        "version": 1,
        "digest": "xxh3_64",
        "window": 2**24,
        "structure": "0" * 16,
        "storages": [],
        "records": records,
    }
    with pytest.raises(CheckpointCorruptedError, match="no tensor"):
        Manifest.decode(json.dumps(document).encode(), path="a", end=end)
    document["storages"] = [name for name, *_ in records]
    assert len(Manifest.decode(json.dumps(document).encode(), path="a", end=end).records) == 2000


def test_a_sparse_file_that_claims_a_manifest_of_its_own_size(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    footer = Footer(4096, "0" * 16).encode()
    with path.open("wb") as file:
        file.write(b"PK\3\4")
        file.seek(8 * 2**30)
        file.write(footer)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for read in (verify, Checkpointer().load):
        with pytest.raises(CheckpointCorruptedError, match="too large"):
            read(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500 * 1024  # KiB


@pytest.mark.parametrize(
    "name", ["d/manifest.json", "d/.metadata", "d/model.safetensors.index.json", "a.ckpt", ".a.ckpt.keep"]
)
def test_no_command_reads_an_absurdly_large_file(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Checkpointer(strategy="sync").save({"w": torch.ones(3)}, tmp_path / "a.ckpt")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    with (tmp_path / name).open("wb") as file:
        file.truncate(2**42)
    for words in ("ls", "ls -r", "inspect", "verify", "du", "clean -n", "latest", "prune --keep latest=1 -n"):
        for path in (tmp_path, tmp_path / "d"):
            if path.exists():
                assert main([*words.split(), str(path)]) in (0, 1, 3, 4)
    assert str(tmp_path / "a.ckpt") in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["fifo", "device", "socket"])
def test_what_is_no_file_is_not_waited_for(kind: str, saved: Path, attack: Attack) -> None:
    path = attack((saved / MANIFEST_NAME).read_bytes())
    shard = path / "model-00001-of-00002.safetensors"
    shard.unlink()
    if kind == "fifo":
        os.mkfifo(shard)
    elif kind == "device":
        if os.geteuid() != 0:
            pytest.skip("only root makes devices")
        try:
            os.mknod(shard, 0o600 | 0o020000, os.makedev(1, 5))
        except PermissionError:
            pytest.skip("not in this container")
    else:
        with socket.socket(socket.AF_UNIX) as server:
            here = os.getcwd()
            os.chdir(path)  # a socket's address must be short
            try:
                server.bind(shard.name)
            finally:
                os.chdir(here)
    assert refused(path).path == str(shard)


@pytest.mark.extended
def test_many_small_tensors_are_honest(tmp_path: Path) -> None:
    state = {f"layer.{number}": torch.tensor(float(number)) for number in range(5_000)}
    with Checkpointer(strategy="sync") as checkpointer:
        checkpointer.save(state, tmp_path / "a.ckpt")
        found = checkpointer.load(tmp_path / "a.ckpt")
    assert found == state
    assert Catalog(tmp_path).newest_verified() is not None
