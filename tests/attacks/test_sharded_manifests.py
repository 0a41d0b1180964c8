"""Manifests forged by an attacker, with a right digest: refused with a path, before a tensor is read or filled."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_core import Catalog, CheckpointCorruptedError, CheckpointError, CheckpointFormatError, verify
from ckpt_core._layouts.directory.manifest import Manifest
from ckpt_core.catalog import RECORD_OF_RESUMES
from ckpt_core.cli import main
from ckpt_core.digest import digest
from ckpt_core.geometry import Box
from ckpt_core.pins import note_of_pin, pin_path
from ckpt_core.resume import newest_to_resume
from ckpt_core.storage import LocalStorage
from ckpt_core.storage.base import MANIFEST_NAME
from ckpt_core.tiers.ledger import LEDGER_NAME, read_ledger
from tests.support.sharded import open_directory, rows, save_directory

PIECES = {"w": rows((4, 3), 2), "b": [[Box((0,), (2,))], [Box((2,), (2,))]]}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    state = {"w": torch.ones(4, 3), "b": torch.ones(4, dtype=torch.uint8), "n": 1}
    rng = [("per-rank", {"s": torch.ones(rank + 1)}) for rank in range(2)]
    states = [{"model": ("sharded", state), "rng": own} for own in rng]
    return save_directory(tmp_path_factory.mktemp("attack") / "c", states, spread=True, cuts=PIECES)


def document_of(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((path / MANIFEST_NAME).read_bytes())
    document.pop("check")
    return document


def signed(text: str) -> bytes:
    data = text.encode("ascii")
    return data + f'"check":"{digest(data)}"}}\n'.encode()


def encoded(document: dict[str, Any]) -> bytes:
    return signed(json.dumps(document, separators=(",", ":"))[:-1] + ",\n")


@pytest.fixture
def attack(saved: Path, tmp_path: Path) -> Callable[[bytes], Path]:
    """Return a function that makes a copy of the checkpoint with another manifest and returns its path."""

    def with_manifest(data: bytes) -> Path:
        path = tmp_path / "c"
        path.mkdir(exist_ok=True)
        for file in saved.iterdir():
            if not (path / file.name).exists():
                os.link(file, path / file.name)
        (path / MANIFEST_NAME).unlink(missing_ok=True)
        (path / MANIFEST_NAME).write_bytes(data)
        return path

    return with_manifest


def refused(path: Path) -> CheckpointError:
    """Check that loading and verifying refuse a checkpoint, and that loading changes nothing; return the error."""
    into = {"w": torch.zeros(4, 3), "b": torch.zeros(4, dtype=torch.uint8)}
    with pytest.raises(CheckpointError) as caught, open_directory(path) as checkpoint:
        checkpoint.load("model", into=into)
        checkpoint.load("rng", rank=0)
        checkpoint.load("rng", rank=1)
    assert all(bool((value == 0).all()) for value in into.values()) or caught.value.key == "rng"
    with pytest.raises(CheckpointError), open_directory(path) as checkpoint:
        checkpoint.verify()
    return caught.value


def test_the_manifest_itself_is_accepted(saved: Path, attack: Callable[[bytes], Path]) -> None:
    path = attack(encoded(document_of(saved)))
    with open_directory(path) as checkpoint:
        checkpoint.verify()
        assert torch.equal(checkpoint.load("model")["w"], torch.ones(4, 3))


def file_of(document: dict[str, Any], rank: int = 0, index: int = 0) -> list[Any]:
    found: list[Any] = document["ranks"][rank]["files"][index]
    return found


NAMES = [
    *("../c/model.safetensors", "/etc/passwd", "a/b.safetensors", "..", ".", "", "\x00", "model\n", ".hidden", "-x"),
    *("a\\b", "C:x", "x" * 300, "manifest.json", 7, None, ["a"]),
]


@pytest.mark.parametrize("name", NAMES, ids=repr)
@pytest.mark.parametrize("where", ["shard", "digests"])
def test_names_that_lead_elsewhere(saved: Path, attack: Callable[[bytes], Path], name: Any, where: str) -> None:
    document = document_of(saved)
    if where == "shard":
        file_of(document)[0] = name
    else:
        document["ranks"][0]["digests"][0] = name
    assert isinstance(refused(attack(encoded(document))), CheckpointCorruptedError)


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "/etc/passwd",
        "a/../../x",
        "a//b",
        "./a",
        "a/.",
        "",
        "a\\..\\b",
        "C:/x",
        "a\x00b",
        MANIFEST_NAME,
        5,
        "a/" * 30 + "b",
    ],
)
def test_files_of_others_that_lie_elsewhere(saved: Path, attack: Callable[[bytes], Path], name: Any) -> None:
    document = document_of(saved)
    document["ranks"][0]["extra"] = [[name, 0, digest(b"")]]
    assert isinstance(refused(attack(encoded(document))), CheckpointCorruptedError)


def set_in(where: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Return a function that sets the entry at a path such as ``ranks.0.files.0.3``."""

    def change(document: dict[str, Any]) -> None:
        *path, last = (int(key) if key.isdigit() else key for key in where.split("."))
        node: Any = document
        for key in path:
            node = node[key]
        node[last] = value

    return change


def blocks_of_another_file(document: dict[str, Any]) -> None:
    file_of(document)[4] += 1
    file_of(document, index=1)[4] -= 1


CHANGES = {
    **{
        f"{field} is {value!r}": set_in(field, value)
        for field in (
            "ranks.0.files.0.2",  # size of the header
            "ranks.0.files.0.3",  # size of the file
            "ranks.0.files.0.4",  # number of blocks
            "ranks.0.digests.1",  # size of the digests
            "parts.model.tensors.0",
            "parts.model.types.0.1.0",  # a size
            "ranks.0.files.0.5.0.0",  # number of a tensor
            "ranks.0.files.0.5.1.0",  # offset of a chunk
            "ranks.0.files.0.5.2.0",  # size of a chunk
            "ranks.0.rank",
        )
        for value in (-1, 2**63, 2**63 - 1, 10**30, 3.0, "4", None, [], 17)
    },
    "other algorithm": set_in("digest", "none"),
    "id of the save": set_in("save", "a b"),
    "no ranks": set_in("ranks", []),
    "ranks are an object": set_in("ranks", {}),
    "rank twice": lambda document: document["ranks"].append(document["ranks"][0]),
    "rank missing": lambda document: document["ranks"].pop(0),
    "the last rank missing": lambda document: document["ranks"].pop(),
    "unknown kind": set_in("kinds.model", "mine"),
    "another kind": set_in("kinds.model", "per-rank"),
    "a part without a kind": lambda document: document["kinds"].pop("model"),
    "a part that is a path": lambda document: document["kinds"].update({"../x": "per-rank"}),
    "unknown type": set_in("parts.model.types.0.0", "load"),
    "quantised type": set_in("parts.model.types.0.0", "qint8"),
    "enormous shape": set_in("parts.model.types.0.1", [2**32, 2**32]),
    "enormous empty shape": set_in("parts.model.types.0.1", [0, 2**62, 2**62]),
    "other type": set_in("parts.model.types.0.0", "float16"),
    "other shape": set_in("parts.model.types.0.1", [2, 6]),
    "more dimensions": set_in("parts.model.types.0.1", [4, 3, 1]),
    "file of no part": set_in("ranks.0.files.0.1", "nothing"),
    "file of a per-rank part": set_in("ranks.0.files.0.1", "rng"),
    "file of all per-rank parts": set_in("ranks.0.files.0.1", None),
    "same file twice": lambda document: document["ranks"][0]["files"].append(file_of(document)),
    "no digests": set_in("ranks.0.digests", None),
    "digests of nothing": set_in("ranks.0.files", []),
    "digests are not those": set_in("ranks.0.digests.2", "0" * 16),
    "all tensors in half a file": set_in("ranks.0.files.0.5", None),
    "one chunk less": lambda document: [column.pop() for column in file_of(document)[5]],
    "chunks are missing": set_in("ranks.0.files.0.5", []),
    "chunks of an object": set_in("ranks.0.files.0.5", {}),
    "a chunk of the other half": set_in("ranks.0.files.0.5.1", [2, 0, 2]),
    "overlapping": set_in("ranks.1.files.0.5.1", [0, 0, 2]),
    "chunks in another order": set_in("ranks.0.files.0.5", [[1, 0], [0, 0, 0], [2, 2, 3]]),
    "true for one": set_in("ranks.0.files.0.5.0", [False, True]),
    "a reference to nothing": set_in("parts.model.state.w", "$9"),
    "a reference that is none": set_in("parts.model.state.w", "$x"),
    "a tag that is none": set_in("parts.model.state.w", {"$pickle": "gASV"}),
    "an array that is a tensor": set_in("parts.model.state.w", {"$array": ["<f4", [12], "$0"]}),
    "an array of another size": set_in("parts.model.state.b", {"$array": ["<f4", [2], "$1"]}),
    "a tensor in a set": set_in("parts.model.state.w", {"$set": ["$0"]}),
    "a tensor for a key": set_in("parts.model.state.w", {"$dict": [["$0", 1]]}),
    **{
        f"a form is {form}": set_in("parts.model.forms", [form])
        for form in (
            [0, [3, 0], False, False],  # elements in one place
            [0, [6, 2], False, False],  # holes
            [0, [1, 4, 1], False, False],
            [0, [-3, 1], False, False],
            [0, [3, 1], 1, False],
            [0, None, False, "yes"],
            [1, None, True, True],  # of bytes
            [2, None, True, True],
            [0, None],
            [None, None, False, False],
            7,
        )
    },
    "forms are an object": set_in("parts.model.forms", {"0": [None, True, True]}),
    "blocks of another file": blocks_of_another_file,
    "metadata that are no dictionary": set_in("metadata", [1]),
    "metadata with a tensor": set_in("metadata", {"a": "$0"}),
    "no metadata": lambda document: document.pop("metadata"),
    "a rank's part that is shared": lambda document: document["ranks"][0]["parts"].update(
        model=document["parts"]["model"]
    ),
}


@pytest.mark.parametrize(
    "change",
    [set_in("parts.model.types.0.0", "float3_e1m1"), set_in("parts.model.state.n", {"$dtype": "float3_e1m1"})],
    ids=["of a tensor", "of a value"],
)
def test_a_type_that_a_newer_torch_has(
    saved: Path, attack: Callable[[bytes], Path], change: Callable[[Any], None]
) -> None:
    document = document_of(saved)
    change(document)
    error = refused(attack(encoded(document)))
    assert isinstance(error, CheckpointFormatError)
    assert "saved with a newer version of torch" in str(error)
    assert "has no type 'float3_e1m1'" in str(error)
    assert "update torch" in str(error)
    assert error.path is not None


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_manifest_that_lies(saved: Path, attack: Callable[[bytes], Path], change: Callable[[Any], None]) -> None:
    document = document_of(saved)
    before = repr(document)
    change(document)
    assert repr(document) != before
    assert refused(attack(encoded(document))).path is not None


@pytest.mark.parametrize(
    "text",
    [
        '{"format":"ckpt_core.sharded","version":3,' + '"a":[' * 200_000,
        '{"format":"ckpt_core.sharded","version":3,"a":' + "[" * 200_000 + "]" * 200_000 + ",\n",
        '{"format":"ckpt_core.sharded","version":3,"a":' + '{"a":' * 100_000 + "1" + "}" * 100_000 + ",\n",
        '{"format":"ckpt_core.sharded","version":3,"a":' + "9" * 100_000 + ",\n",
        '{"format":"ckpt_core.sharded","version":3,"a":1e999999,\n',
        '{"format":"ckpt_core.sharded","version":3,"a":NaN,\n',
        '{"format":"ckpt_core.sharded","version":3,\n',
    ],
    ids=["open", "deep lists", "deep objects", "long number", "large float", "nan", "nothing"],
)
def test_json_that_hurts(attack: Callable[[bytes], Path], text: str) -> None:
    assert isinstance(refused(attack(signed(text))), CheckpointCorruptedError)


def test_a_structure_that_is_too_deep(saved: Path, attack: Callable[[bytes], Path]) -> None:
    document = document_of(saved)
    text = json.dumps(document, separators=(",", ":"))[:-1] + ",\n"
    deep = "[" * 900 + "]" * 900
    assert isinstance(refused(attack(signed(text.replace('"n":1', f'"n":{deep}')))), CheckpointCorruptedError)


def test_keys_that_are_there_twice(saved: Path, attack: Callable[[bytes], Path]) -> None:
    text = json.dumps(document_of(saved), separators=(",", ":"))[:-1] + ",\n"
    error = refused(attack(signed(text.replace('"n":1', '"n":1,"n":2'))))
    assert "twice" in str(error)


def test_a_sparse_file_that_claims_to_be_large_fills_no_memory(
    saved: Path, attack: Callable[[bytes], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    document = document_of(saved)
    size = 2**40
    document["parts"]["model"]["types"][0][1] = [size // 8]
    path = attack(encoded(document))
    refused(path)
    make_huge(path / MANIFEST_NAME)
    with pytest.raises(CheckpointError):
        open_directory(path)
    (found,) = Catalog(path.parent, suffix="").checkpoints()
    assert not found.is_readable
    # a save next to it checks its age
    assert save_directory(path.parent / "d", [{"model": ("replicated", {"w": torch.ones(2)})}]).is_dir()
    assert main(["inspect", str(path.parent)]) == 1
    assert "a directory of 2 checkpoints" in capsys.readouterr().err
    assert main(["inspect", str(path)]) == 1
    assert f"of {2**42} bytes is not valid" in capsys.readouterr().err
    os.truncate(path / MANIFEST_NAME, 2**30 + 1)
    with pytest.raises(CheckpointError, match=f"is not valid: at most {2**30} are read"):
        open_directory(path)


def make_huge(path: Path) -> None:
    path.write_bytes(b"")
    os.truncate(path, 2**42)


def test_what_lies_beside_checkpoints_fills_no_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = save_directory(tmp_path / "c", [{"model": ("replicated", {"w": torch.ones(2)})}])
    storage = LocalStorage()
    for name in (pin_path(str(path)), RECORD_OF_RESUMES, LEDGER_NAME):
        make_huge(tmp_path / name)
    assert note_of_pin(str(path), storage) == ""
    point = newest_to_resume(str(tmp_path))
    assert point is not None
    assert point.path == str(path)
    assert read_ledger(storage, str(tmp_path)) == {}
    for name in (RECORD_OF_RESUMES, LEDGER_NAME):
        assert f"a {name} of {2**42} bytes is not valid: at most" in caplog.text


@pytest.mark.parametrize("which", ["digests", "extra"])
def test_a_sparse_file_beside_the_tensors_fills_no_memory(
    saved: Path, attack: Callable[[bytes], Path], which: str
) -> None:
    document = document_of(saved)
    size = 2**42
    if which == "digests":
        name = document["ranks"][0]["digests"][0]
        document["ranks"][0]["digests"][1] = size
    else:
        name = "notes"
        document["ranks"][0]["extra"] = [[name, size, "0" * 16]]
    path = attack(encoded(document))
    (path / name).unlink(missing_ok=True)
    (path / name).touch()
    os.truncate(path / name, size)
    with pytest.raises(CheckpointError), open_directory(path) as checkpoint:
        checkpoint.load("model")
        checkpoint.read_file(name)


def test_digests_that_are_not_one_for_each_block_are_refused_before_any_file_is_read(saved: Path) -> None:
    document = document_of(saved)
    document["ranks"][0]["digests"][1] += 8
    with pytest.raises(CheckpointCorruptedError, match="one digest for each block"):
        Manifest.decode(encoded(document), path="manifest.json")


@pytest.mark.parametrize("to", ["another file", "the right file", "itself", "nothing"])
def test_a_link_in_the_place_of_a_file_is_refused(saved: Path, attack: Callable[[bytes], Path], to: str) -> None:
    path = attack((saved / MANIFEST_NAME).read_bytes())
    shard = path / "model-00001-of-00002.safetensors"
    secret = path.parent / "secret"
    secret.write_bytes(b"s" * shard.stat().st_size)
    shard.unlink()
    targets = {"another file": secret, "the right file": saved / shard.name, "itself": shard, "nothing": path / "no"}
    shard.symlink_to(targets[to])
    error = refused(path)
    assert isinstance(error, CheckpointCorruptedError)
    assert error.path == str(shard)
    assert "symbolic link" in str(error)
    assert "follow_links" in str(error)
    assert "cp -rL" in str(error)
    assert "ssss" not in str(error)


def test_a_link_in_the_place_of_the_manifest_is_refused(saved: Path, attack: Callable[[bytes], Path]) -> None:
    path = attack((saved / MANIFEST_NAME).read_bytes())
    (path / MANIFEST_NAME).unlink()
    (path / MANIFEST_NAME).symlink_to(saved / MANIFEST_NAME)
    assert refused(path).path == str(path / MANIFEST_NAME)


@pytest.mark.parametrize("name", [MANIFEST_NAME, "model-00001-of-00002.safetensors"])
def test_a_trusted_link_to_where_nothing_is_is_damage(saved: Path, tmp_path: Path, name: str) -> None:
    path = shutil.copytree(saved, tmp_path / "copy")
    (path / name).unlink()
    (path / name).symlink_to("gone")
    with pytest.raises(CheckpointCorruptedError, match="is a link to where nothing is") as caught:
        verify(path, storage_options={"follow_links": True})
    assert caught.value.path == str(path / name)


def test_a_link_to_the_checkpoint_is_fine(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "newest").symlink_to(saved)
    with open_directory(tmp_path / "newest") as checkpoint:
        checkpoint.verify()
        found = checkpoint.load("model")
    with open_directory(saved) as checkpoint:
        assert torch.equal(found["w"], checkpoint.load("model")["w"])


def test_a_directory_in_place_of_a_file(saved: Path, attack: Callable[[bytes], Path]) -> None:
    path = attack((saved / MANIFEST_NAME).read_bytes())
    shard = path / "model-00001-of-00002.safetensors"
    shard.unlink()
    shard.mkdir()
    assert refused(path).path == str(shard)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_value_anywhere_is_accepted_or_refused_by_name(saved: Path, data: st.DataObject) -> None:
    document = document_of(saved)
    node: Any = document
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = data.draw(st.sampled_from(keys))
        if isinstance(node[key], (dict, list)) and node[key] and data.draw(st.booleans() | st.just(True)):
            node = node[key]
            continue
        node[key] = data.draw(JSON)
        break
    with contextlib.suppress(CheckpointError):
        Manifest.decode(encoded(document), path="manifest.json")


def test_a_million_ranks_that_are_none_are_refused(attack: Callable[[bytes], Path], saved: Path) -> None:
    document = document_of(saved)
    document["ranks"] = [0] * 1_000_001
    refused(attack(encoded(document)))
