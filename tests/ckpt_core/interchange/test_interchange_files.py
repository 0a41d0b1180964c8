"""Checkpoints to and from the files of other programs: values, what is refused by which name, and memory."""

from __future__ import annotations

import copy
import io
import json
import os
import pathlib
import pickle
import shutil
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ckpt_core import (
    CheckpointCorruptedError,
    Checkpointer,
    CheckpointError,
    CheckpointFormatError,
    CheckpointNotFoundError,
    DirectoryCheckpointer,
    Kind,
    Part,
    SerializationError,
    StateMismatchError,
    StorageError,
    UnsafeCheckpointError,
    load_into,
)
from ckpt_core.cli import main
from ckpt_core.interchange import (
    CkptStorageReader,
    CkptStorageWriter,
    convert_to_accelerate,
    export_dcp,
    export_model,
    import_dcp,
    import_model,
)
from ckpt_core.interchange.dcp_extras import Exported
from ckpt_core.state import trainer_parts
from tests.conftest import ScriptRunner
from tests.support.damage import flip_bit
from tests.support.states import DTYPES, assert_same_state, tensor_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]


def save(path: Path, *parts: Part) -> Path:
    with DirectoryCheckpointer(strategy="sync") as checkpointer:
        checkpointer.save(parts, path)
    return path


def load(path: Path, part: str = "model") -> Any:
    with DirectoryCheckpointer().load(path) as checkpoint:
        checkpoint.verify()
        return checkpoint.load(part)


def model() -> dict[str, torch.Tensor]:
    tied = tensor_of(torch.float32, 4, 5, seed=1)
    return {
        "embed.weight": tied,
        "norm": tensor_of(torch.bfloat16, 3, seed=2),
        "head.weight": tied,
        "step": torch.tensor(7),
        "none": torch.empty(0, 3),
        "part": torch.arange(24.0).view(4, 6)[:, ::2],
    }


# ---- dcp.save, dcp.load ----------------------------------------------------------------------------------------------


def test_dcp_saves_and_loads_every_type_and_plain_data(tmp_path: Path) -> None:
    state = {
        "model": {str(dtype): tensor_of(dtype, 3, 2, seed=n) for n, dtype in enumerate(DTYPES)} | model(),
        "optimizer": {
            "state": {0: {"m": torch.ones(3)}, 1: {"m": torch.zeros(2)}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, float("inf")), "params": [0, 1], "t": (torch.ones(2), {1})}],
        },
        "rng": np.random.RandomState(3).get_state(),
        "text": "$0",
        "a/b": {"x": torch.ones(1)},
        "order": OrderedDict(b=1, a=None),
    }
    dcp.save(state, storage_writer=CkptStorageWriter(), checkpoint_id=tmp_path / "a", no_dist=True)
    blank = copy.deepcopy(state)
    for tensor in (*blank["model"].values(), blank["optimizer"]["state"][0]["m"]):
        tensor.view(torch.uint8).zero_() if tensor.is_contiguous() and tensor.ndim else tensor.zero_()
    blank["optimizer"]["param_groups"][0].update(lr=0, betas=None, params=None, t=None)
    blank.update(rng=None, text=None)
    blank["order"] = OrderedDict(b=0, a=0)
    dcp.load(blank, storage_reader=CkptStorageReader(), checkpoint_id=str(tmp_path / "a"), no_dist=True)
    rng, wanted = blank.pop("rng"), state.pop("rng")
    assert_same_state(blank, state)
    assert [part.tolist() if isinstance(part, np.ndarray) else part for part in rng] == [
        part.tolist() if isinstance(part, np.ndarray) else part for part in wanted
    ]
    names = {path.name for path in (tmp_path / "a").iterdir()}
    assert {"model.safetensors", "optimizer.safetensors", "root.safetensors", "manifest.json"} < names
    assert set(safetensors.torch.load_file(tmp_path / "a" / "model.safetensors")) >= set(model())


def test_dcp_loads_less_than_there_is_and_reads_no_more_than_it_needs(tmp_path: Path) -> None:
    path = save(tmp_path / "a", Part("model", {"big": torch.ones(2**20), "small": torch.arange(4)}, Kind.REPLICATED))
    reader = CkptStorageReader(path)
    state = {"model": {"small": torch.zeros(4, dtype=torch.int64)}}
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert state["model"]["small"].tolist() == [0, 1, 2, 3]
    assert reader._checkpoint is not None
    assert reader._checkpoint.bytes_read < 64 * 1024


def failure_of(action: Callable[[], Any]) -> BaseException:
    with pytest.raises(dcp.CheckpointException) as caught:
        action()
    ((error, _),) = caught.value.failures.values()
    return error


def test_a_failed_save_of_dcp_leaves_what_was_there(tmp_path: Path) -> None:
    writer = CkptStorageWriter(tmp_path / "a")
    dcp.save({"model": {"w": torch.ones(3)}}, storage_writer=writer, no_dist=True)
    error = failure_of(lambda: dcp.save({"model": {"w": io.StringIO()}}, storage_writer=writer, no_dist=True))
    assert isinstance(error, SerializationError)
    assert error.key == "model.w"
    sparse = torch.eye(2).to_sparse()
    error = failure_of(lambda: dcp.save({"sparse": sparse}, storage_writer=writer, no_dist=True))
    assert isinstance(error, SerializationError)
    assert error.key == "sparse"
    with pytest.raises(CheckpointError, match="use_collectives"):
        writer.set_up_storage_writer(True, rank=0, use_collectives=False)
    assert os.listdir(tmp_path) == ["a"]
    assert load(tmp_path / "a")["w"].tolist() == [1, 1, 1]


def test_dcp_is_told_what_is_wrong(tmp_path: Path) -> None:
    path = save(tmp_path / "a", Part("model", {"w": torch.ones(5000)}, Kind.REPLICATED))

    def read(**tensors: torch.Tensor) -> BaseException:
        state = {"model": tensors}
        return failure_of(lambda: dcp.load(state, storage_reader=CkptStorageReader(path), no_dist=True))

    assert "Missing key" in str(read(other=torch.ones(1)))
    assert isinstance(read(w=torch.ones(5000, dtype=torch.float64)), StateMismatchError)
    flip_bit(path / "model.safetensors", 4096 + 10_000)
    error = read(w=torch.zeros(5000))
    assert isinstance(error, CheckpointCorruptedError)
    assert error.key == "model.w"
    assert error.path == str(path / "model.safetensors")
    (path / "manifest.json").unlink()
    assert "no checkpoint" in str(read(w=torch.zeros(5000)))
    assert "no checkpoint" in str(
        failure_of(lambda: dcp.load({}, storage_reader=CkptStorageReader(path), no_dist=True))
    )


def test_names_that_would_be_one_in_dcp_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "a", Part("model", {"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, Kind.REPLICATED))
    with pytest.raises(StateMismatchError, match=r"model\.a\.b"):
        CkptStorageReader(path).read_metadata()
    with pytest.raises(StateMismatchError, match=r"model\.a\.b"):
        export_dcp(path, tmp_path / "b")
    assert os.listdir(tmp_path) == ["a"]


# ---- DCP's files -----------------------------------------------------------------------------------------------------


def stock(path: Path) -> Path:
    state = {"model": model(), "names": ["a", "b"], "list": [torch.ones(2), {"x": (1, torch.ones(1))}]}
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


def test_dcp_files_come_and_go(tmp_path: Path) -> None:
    assert main(["import", str(stock(tmp_path / "stock")), str(tmp_path / "a"), "--format", "dcp"]) == 0
    assert_same_state(load(tmp_path / "a"), {key: value.contiguous() for key, value in model().items()})
    root = {"names": ["a", "b"], "list": [torch.ones(2), {"x": (1, torch.ones(1))}]}
    assert_same_state(load(tmp_path / "a", "root"), {"names": root["names"]})
    assert_same_state(load(tmp_path / "a", "list"), root["list"])
    assert main(["export", str(tmp_path / "a"), str(tmp_path / "b"), "--format", "dcp"]) == 0
    state: dict[str, Any] = {
        "model": {key: torch.zeros_like(value) for key, value in model().items()},
        "names": None,
        "list": [torch.zeros(2), {"x": None}],
    }
    dcp.load(state, checkpoint_id=tmp_path / "b", no_dist=True)
    wanted = {key: torch.zeros_like(value).copy_(value) for key, value in model().items()}
    assert_same_state(state, {"model": wanted, **root})
    import_dcp(tmp_path / "stock", tmp_path / "c", only=["model"])
    with DirectoryCheckpointer().load(tmp_path / "c") as checkpoint:
        assert list(checkpoint.parts) == ["model"]
    with pytest.raises(StateMismatchError, match=r"nothing below \['modle'\]; it has list, model, names"):
        import_dcp(tmp_path / "stock", tmp_path / "d", only=["modle"])


def test_dcp_gives_back_what_it_has_no_words_for(tmp_path: Path) -> None:
    tensor = tensor_of(torch.bfloat16, 3, 5)
    state = {
        "state_dict": OrderedDict({"a.weight": tensor, "b": torch.empty(0, 2), "step": torch.tensor(3)}),
        "optimizer_states": [
            {"state": {0: {"m": tensor}, 1: {}}, "param_groups": [{"params": [0, 1], "betas": (1, 2)}]}
        ],
        "global_step": 3,
        "callbacks": {},
        "rng": {"seeds": ("MT19937", (7, 8), 3), 5: (1, tensor), None: float("nan"), "$x": "$0"},
        "lr_schedulers": [],
    }
    with Checkpointer(strategy="sync") as files:
        files.save(state, tmp_path / "file")
        for source, layout in (("file", "dcp"), ("dcp", "file"), ("dcp", "directory"), ("directory", "dcp")):
            target = tmp_path / f"{source}-{layout}"
            origin = tmp_path / {"file": "file", "dcp": "file-dcp", "directory": "dcp-directory"}[source]
            assert main(["convert", str(origin), str(target), "--to", layout]) == 0
        assert main(["import", str(tmp_path / "directory-dcp"), str(tmp_path / "again"), "--format", "dcp"]) == 0
        for name in ("dcp-file", "dcp-directory", "again"):
            assert main(["diff", str(tmp_path / "file"), str(tmp_path / name)]) == 0
        found = files.load(tmp_path / "dcp-file")
    assert found.keys() == state.keys()
    for key in ("optimizer_states", "global_step", "callbacks", "rng", "lr_schedulers"):
        assert_same_state(found[key], state[key])
    asked = {"optimizer": {"state": {"0": {"m": torch.zeros(3, 5, dtype=torch.bfloat16)}}}}
    dcp.load(asked, checkpoint_id=tmp_path / "file-dcp", no_dist=True)  # without this package, under DCP's names
    assert torch.equal(asked["optimizer"]["state"]["0"]["m"].view(torch.uint8), tensor.view(torch.uint8))


def test_parts_and_metadata_come_back_from_dcp(tmp_path: Path) -> None:
    parts = [
        Part("model", {"w": torch.ones(3)}, Kind.SHARDED),
        Part("rng", {"seed": {0: ("MT19937", np.arange(7, dtype=np.uint32))}}, Kind.PER_RANK),
        Part("empty", {}, Kind.REPLICATED),
    ]
    with DirectoryCheckpointer(strategy="sync") as checkpointer:
        checkpointer.save(parts, tmp_path / "a", metadata={"x": {1: None}}, step=4)
    assert main(["convert", str(tmp_path / "a"), str(tmp_path / "dcp"), "--to", "dcp"]) == 0
    assert main(["convert", str(tmp_path / "dcp"), str(tmp_path / "b"), "--to", "directory"]) == 0
    with DirectoryCheckpointer().load(tmp_path / "b") as found:
        assert found.metadata == {"x": {1: None}} and found.stamp.step == 4
        assert {name: part.kind for name, part in found.parts.items()} == {p.name: p.kind.value for p in parts}
        for part in parts:
            assert_same_state(found.load(part.name), part.state)


@pytest.mark.parametrize("option", ["--allow-pickle", "--trust-pickle"])  # the second is its old name
def test_what_dcp_cannot_say_is_refused_by_its_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    torch.save({"model": {"w": torch.ones(1)}, "more": {"x": [pathlib.PurePath, Attack]}}, tmp_path / "a.ckpt")
    words = ["convert", str(tmp_path / "a.ckpt"), str(tmp_path / "dcp"), "--to", "dcp", option]
    assert main(words) == 1
    assert "more.x.0" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["a.ckpt"]


@pytest.mark.parametrize(
    "change",
    [
        lambda record: record.clear(),
        lambda record: record.update(structure="{"),
        lambda record: record.update(structure="[]"),
        lambda record: record.update(structure=record["structure"].replace("model.w", "model.v")),
        lambda record: record.update(structure=record["structure"].replace('"sharded"', '"other"')),
        lambda record: record.update(structure=record["structure"].replace("$0", "$1")),
        lambda record: record.update(structure=record["structure"].replace('"version": 1', '"version": 2')),
    ],
)
def test_a_structure_that_makes_no_sense_is_refused(tmp_path: Path, change: Callable[[Any], Any]) -> None:
    export_dcp(save(tmp_path / "a", Part("model", {"w": torch.ones(1)}, Kind.SHARDED)), tmp_path / "b")
    found: dict[str, Any] = {"__ckpt_structure__": None}
    dcp.load(found, checkpoint_id=tmp_path / "b", no_dist=True)
    entries: Any = {"model.w": None}
    assert Exported("b", found["__ckpt_structure__"], entries, lambda *_: torch.ones(1)).load("model")[
        "w"
    ].tolist() == [1]
    change(found["__ckpt_structure__"])
    with pytest.raises((CheckpointCorruptedError, CheckpointFormatError), match="structure of the export"):
        Exported("b", found["__ckpt_structure__"], entries, lambda *_: torch.ones(1)).load("model")


class Attack:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("attacked",)


def test_nothing_in_a_dcp_checkpoint_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    metadata: Metadata = pickle.loads((stock(tmp_path / "a") / ".metadata").read_bytes())
    metadata.planner_data["x"] = Attack()
    for data in (pickle.dumps(metadata), pickle.dumps(Attack()), b"cos\nsystem\n(S'mkdir attacked'\ntR."):
        (tmp_path / "a" / ".metadata").write_bytes(data)
        with pytest.raises(UnsafeCheckpointError, match=r"mkdir|system"):
            import_dcp(tmp_path / "a", tmp_path / "b")
    dcp.save({"model": {"w": torch.ones(1)}, "x": Attack()}, checkpoint_id=tmp_path / "c", no_dist=True)
    with pytest.raises(UnsafeCheckpointError) as caught:
        import_dcp(tmp_path / "c", tmp_path / "b")
    assert caught.value.key == "x"
    import_dcp(tmp_path / "c", tmp_path / "b", only=["model"])
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "c"]


@pytest.mark.parametrize(
    "change",
    [
        lambda m, stored: stored.update(offset=-1),
        lambda m, stored: stored.update(relative_path="../a/__0_0.distcp"),
        lambda m, stored: stored.update(relative_path="/etc/hostname"),
        lambda m, stored: stored.update(transform_descriptors=["zstd"]),
        lambda m, stored: m.storage_data.clear(),
        lambda m, stored: m.planner_data.update({"model.norm": (object,)}),
        lambda m, stored: m.planner_data.update({"list.0": ("list", 10**15)}),
        lambda m, stored: m.state_dict_metadata["model.norm"].chunks[0].__dict__.update(sizes=torch.Size([4])),
    ],
)
def test_metadata_that_make_no_sense_are_refused(tmp_path: Path, change: Callable[[Metadata, Any], Any]) -> None:
    metadata: Metadata = pickle.loads((stock(tmp_path / "a") / ".metadata").read_bytes())
    (index,) = [index for index in metadata.storage_data if index.fqn == "model.norm"]
    change(metadata, metadata.storage_data[index].__dict__)
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises((CheckpointFormatError, UnsafeCheckpointError, SerializationError)):
        import_dcp(tmp_path / "a", tmp_path / "b")
    assert os.listdir(tmp_path) == ["a"]


def test_dcp_files_that_are_not_what_the_metadata_say(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError):
        import_dcp(tmp_path, tmp_path / "b")
    metadata: Metadata = pickle.loads((stock(tmp_path / "a") / ".metadata").read_bytes())
    described = metadata.state_dict_metadata["model.norm"]
    assert isinstance(described, TensorStorageMetadata)
    described.properties = TensorProperties(dtype=torch.float32)
    file = tmp_path / "a" / "__0_0.distcp"
    whole, right = file.read_bytes(), (tmp_path / "a" / ".metadata").read_bytes()
    steps: list[tuple[Callable[[], Any], str]] = [
        (lambda: (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(metadata)), "bfloat16"),
        (lambda: (tmp_path / "a" / ".metadata").write_bytes(right), ""),
        (lambda: file.write_bytes(whole[:-100]), "truncated|cannot be read"),
        (lambda: file.write_bytes(bytes(len(whole))), "cannot be read"),
        (file.unlink, "missing"),
    ]
    for change, message in steps:
        change()
        if not message:
            continue
        with pytest.raises(CheckpointCorruptedError, match=message) as caught:
            import_dcp(tmp_path / "a", tmp_path / "b")
        assert caught.value.path == str(file)
    assert os.listdir(tmp_path) == ["a"]
    for data in (b"", b"\x80\x04.", pickle.dumps(torch.Size([1])), whole):
        (tmp_path / "a" / ".metadata").write_bytes(data)
        with pytest.raises(CheckpointFormatError):
            import_dcp(tmp_path / "a", tmp_path / "b")


def test_a_chunk_that_is_missing_is_noticed(tmp_path: Path) -> None:
    path = stock(tmp_path / "a")
    metadata: Metadata = pickle.loads((path / ".metadata").read_bytes())
    half = ChunkStorageMetadata(torch.Size([0]), torch.Size([1]))
    metadata.state_dict_metadata["model.norm"].chunks = [half]  # type: ignore[union-attr]
    with io.BytesIO() as data:
        torch.save(tensor_of(torch.bfloat16, 1), data)
        (path / "extra").write_bytes(data.getvalue())
    (index,) = [index for index in metadata.storage_data if index.fqn == "model.norm"]
    metadata.storage_data[MetadataIndex("model.norm", torch.Size([0]))].__dict__.update(
        relative_path="extra", offset=0, length=(path / "extra").stat().st_size
    )
    assert index in metadata.storage_data
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointCorruptedError, match="1 of 3 elements"):
        import_dcp(path, tmp_path / "b")


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path) -> None:
    path = save(tmp_path / "a", Part("model", {"w": torch.ones(5000), "v": torch.ones(3)}, Kind.REPLICATED))
    flip_bit(path / "model.safetensors", 4096 + 10_000)
    for export in (export_dcp, export_model):
        with pytest.raises(CheckpointCorruptedError, match=r"model\.w"):
            export(path, tmp_path / "b")
    assert os.listdir(tmp_path) == ["a"]
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "mine").touch()
    for export in (export_dcp, export_model):
        with pytest.raises(StorageError, match="something is already there"):
            export(path, tmp_path / "c")
        with pytest.raises(StorageError, match="local directories only"):
            export(path, "memory://somewhere")
    assert os.listdir(tmp_path / "c") == ["mine"]


# ---- safetensors models ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["5GB", "90"])
def test_models_come_and_go(tmp_path: Path, size: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = save(tmp_path / "a", Part("model", {**model(), "name": "x"}, Kind.REPLICATED))
    out, back = str(tmp_path / "hf"), str(tmp_path / "b")
    assert main(["export", str(path), out, "--format", "safetensors", "--max-shard-size", size]) == 0
    files = sorted(file.name for file in Path(out).glob("*.safetensors"))
    found: dict[str, torch.Tensor] = {}
    for file in files:
        tensors = safetensors.torch.load_file(f"{out}/{file}")
        found |= tensors
        if size == "90":
            index = json.loads(Path(out, "model.safetensors.index.json").read_text())
            assert {index["weight_map"][key] for key in tensors} == {file}
            assert sum(tensor.nbytes for tensor in tensors.values()) <= 90
            assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in model().values())
    with safetensors.safe_open(f"{out}/{files[0]}", "pt") as opened:
        assert opened.metadata()["format"] == "pt"
    assert len(files) == (1 if size == "5GB" else 3)
    wanted = {key: value.contiguous() for key, value in model().items()}
    assert_same_state({key: found[key] for key in wanted}, wanted)
    assert main(["import", out, back, "--format", "safetensors"]) == 0
    brought = load(tmp_path / "b")
    assert_same_state({key: brought[key] for key in wanted}, wanted)  # one file has its own order
    assert len(brought) == len(wanted)
    assert main(["export", str(path), out, "--format", "safetensors"]) == 1
    assert "something is already there" in capsys.readouterr().err


def test_a_model_comes_out_of_a_torch_file(tmp_path: Path) -> None:
    state = {
        "state_dict": {f"model.{key}": value for key, value in model().items()} | {"loss.w": torch.ones(1)},
        "epoch": 1,
    }
    with Checkpointer(strategy="sync") as checkpointer:
        checkpointer.save(state, tmp_path / "a.ckpt")
    export_model(tmp_path / "a.ckpt", tmp_path / "b", prefix="model.")
    wanted = {key: value.contiguous() for key, value in model().items()}
    found = safetensors.torch.load_file(tmp_path / "b" / "model.safetensors")
    assert_same_state({key: found[key] for key in wanted}, wanted)
    assert found.keys() == wanted.keys()
    with pytest.raises(CheckpointNotFoundError, match="epoch"):
        export_model(tmp_path / "a.ckpt", tmp_path / "c", part="model")
    with pytest.raises(StateMismatchError, match=r"model\.embed"):
        export_model(tmp_path / "a.ckpt", tmp_path / "c", prefix="net.")
    flip_bit(tmp_path / "a.ckpt", 4096 + 8)
    with pytest.raises(CheckpointCorruptedError):
        export_model(tmp_path / "a.ckpt", tmp_path / "c")


@pytest.mark.parametrize(
    "state",
    [
        pytest.param({"fc.weight": torch.randn(3, 4), "fc.bias": torch.randn(3)}, id="only-a-state-dict"),
        pytest.param({"step": 3, "model": {"fc.weight": torch.randn(3, 4)}, "w": torch.ones(2)}, id="both"),
        pytest.param({"root": {"a": 1}, "w": torch.ones(2)}, id="a-key-root"),
        pytest.param({"a/b": {"w": torch.ones(2)}, 3: {"a": 1}, "manifest": {}}, id="keys-that-no-part-can-have"),
    ],
)
def test_keys_of_a_file_come_back_from_a_directory(tmp_path: Path, state: dict[Any, Any]) -> None:
    torch.save(state, tmp_path / "a.pt")
    assert main(["convert", str(tmp_path / "a.pt"), str(tmp_path / "b"), "--to", "directory"]) == 0
    assert main(["diff", str(tmp_path / "a.pt"), str(tmp_path / "b")]) == 0
    assert main(["convert", str(tmp_path / "b"), str(tmp_path / "c.pt"), "--to", "file"]) == 0
    found = torch.load(tmp_path / "c.pt", weights_only=True)
    assert found.keys() == state.keys()
    assert_same_state({key: found[key] for key in state}, state)


def test_a_state_dict_alone_is_a_model_in_each_layout(tmp_path: Path) -> None:
    state = {"fc.weight": torch.randn(3, 4), "fc.bias": torch.randn(3)}
    torch.save(state, tmp_path / "a.pt")
    assert main(["convert", str(tmp_path / "a.pt"), str(tmp_path / "b"), "--to", "directory"]) == 0
    for name in ("a.pt", "b"):
        target = tmp_path / f"{name}-model"
        assert main(["convert", str(tmp_path / name), str(target), "--to", "safetensors", "--prefix", ""]) == 0
        found = safetensors.torch.load_file(target / "model.safetensors")
        assert_same_state({key: found[key] for key in state}, state)
        assert found.keys() == state.keys()
        layer = torch.nn.ModuleDict({"fc": torch.nn.Linear(4, 3)})
        assert load_into(tmp_path / name, layer).taken == tuple(state)
        assert torch.equal(layer["fc"].weight, state["fc.weight"])


@pytest.mark.parametrize(("outside", "prefix"), [(False, "net."), (True, "")])
def test_a_model_of_a_trainers_directory_has_its_buffers(
    tmp_path: Path, outside: bool, prefix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    buffers = {"net.1.mean": torch.randn(3), "net.1.batches": torch.tensor(4)}
    buffers |= {"scale": torch.randn(2)} if outside else {}
    model = {"net.0.weight": torch.randn(3, 4), **buffers}
    parts = trainer_parts.parts_of({"state_dict": model, "epoch": 1}, rank=0, buffers=buffers)
    path = save(tmp_path / "a", *parts)
    for words in ([], ["--part", "model"]):
        target = tmp_path / f"b{len(words)}"
        assert main(["convert", str(path), str(target), "--to", "safetensors", *words]) == 0
        found = safetensors.torch.load_file(target / "model.safetensors")
        wanted = {name.removeprefix(prefix): value for name, value in model.items()}
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
    net = torch.nn.Module()
    net.register_buffer("mean", torch.zeros(3))
    report = load_into(path, net, part="model", rename={"net.1.": ""}, partial=True)
    assert report.taken == ("mean",) and torch.equal(net.mean, buffers["net.1.mean"])
    assert (f"left {prefix!r} out" in capsys.readouterr().err) == bool(prefix)


def test_types_that_safetensors_lacks_are_refused_by_name(tmp_path: Path) -> None:
    path = save(tmp_path / "a", Part("model", {"c": torch.ones(2, dtype=torch.complex64)}, Kind.REPLICATED))
    with pytest.raises(SerializationError, match="complex64") as caught:
        export_model(path, tmp_path / "b")
    assert caught.value.key == "c"
    with pytest.raises(SerializationError, match="complex64\n  key: c\n") as caught:  # a part of a word is not a name
        convert_to_accelerate(path, tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_types_that_dcp_cannot_write_are_refused_by_name(tmp_path: Path) -> None:
    bits = torch.zeros(4, dtype=torch.uint8).view(torch.bits8)
    path = save(tmp_path / "a", Part("model", {"c": bits}, Kind.REPLICATED))
    with pytest.raises(SerializationError, match="bits8") as caught:
        export_dcp(path, tmp_path / "b")
    assert caught.value.key == "model.c"
    assert not (tmp_path / "b").exists()


def test_names_that_safetensors_cannot_read_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "a", Part("model", {"a\ud800": torch.ones(2)}, Kind.REPLICATED))
    with pytest.raises(SerializationError, match="not valid Unicode"):
        export_model(path, tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_models_that_are_damaged_or_foreign(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    with pytest.raises(CheckpointNotFoundError):
        import_model(folder, tmp_path / "b")
    file = folder / "model.safetensors"
    safetensors.torch.save_file({"a": torch.arange(6.0), "b": torch.ones(2, 2)}, file)
    whole = file.read_bytes()
    length = struct.unpack("<Q", whole[:8])[0]
    header = json.loads(whole[8 : 8 + length])

    def with_header(change: Callable[[dict[str, Any]], Any]) -> bytes:
        changed = json.loads(json.dumps(header))
        change(changed)
        text = json.dumps(changed).encode()
        return struct.pack("<Q", len(text)) + text + whole[8 + length :]

    assert file.write_bytes(with_header(lambda _: None))
    import_model(folder, tmp_path / "a")
    assert_same_state(load(tmp_path / "a"), {"a": torch.arange(6.0), "b": torch.ones(2, 2)})
    damaged = [
        b"",
        whole[:5],
        whole[:-1],
        whole + b"\0",
        struct.pack("<Q", 2**60) + whole[8:],
        with_header(lambda h: h["b"].update(data_offsets=[0, 16])),
        with_header(lambda h: h["b"].update(shape=[2, 3])),
        with_header(lambda h: h["b"].update(shape=[-2, -2])),
        with_header(lambda h: h.pop("b")),
        with_header(lambda h: h.update(b=1)),
    ]
    for data in damaged:
        file.write_bytes(data)
        with pytest.raises(CheckpointCorruptedError) as caught:
            import_model(folder, tmp_path / "b")
        assert caught.value.path == str(file)
    file.write_bytes(with_header(lambda h: h["b"].update(dtype="I3")))
    with pytest.raises(CheckpointFormatError, match="I3"):
        import_model(folder, tmp_path / "b")

    file.rename(folder / "model-1.safetensors")
    index = folder / "model.safetensors.index.json"
    for text in ("", "[]", "{}", '{"weight_map": {"a": "../hf/model-1.safetensors"}}', '{"weight_map": {"a": 1}}'):
        index.write_text(text)
        with pytest.raises(CheckpointFormatError):
            import_model(folder, tmp_path / "b")
    (folder / "model-1.safetensors").write_bytes(whole)
    for weight_map, message in (({"c": "model-1.safetensors"}, "c is not in"), ({"a": "x.safetensors"}, "missing")):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(CheckpointCorruptedError, match=message):
            import_model(folder, tmp_path / "b")
    assert sorted(os.listdir(tmp_path)) == ["a", "hf"]


# ---- memory ----------------------------------------------------------------------------------------------------------

TENSOR = 16  # MiB
COUNT = 8
MEMORY = """
import sys, threading, torch
from ckpt_core.interchange import (
    convert_to_directory, convert_to_file, export_dcp, export_model, import_dcp, import_model
)

def memory(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) // 1024 for line in file if line.startswith(name))

import_dcp("warm", "warm-again")  # what is loaded once
export_model("warm-again", "warm-model")
for act, source, target in (
    (export_dcp, "a", "exported"), (import_dcp, "dcp", "b"), (export_model, "a", "model"), (import_model, "model", "c")
):
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # begins the peak anew
    before = memory("VmRSS")
    act(source, target)
    print(act.__name__, memory("VmHWM") - before)

for act, source, target in (
    (convert_to_file, "a", "file-again.ckpt"),
    (convert_to_directory, "file.ckpt", "d"),
    (convert_to_directory, "exported", "e"),
):
    before, peak, ended = memory("RssAnon"), 0, threading.Event()  # mapped files give way where memory is short
    def watch():
        global peak
        while not ended.wait(0.002):
            peak = max(peak, memory("RssAnon"))
    thread = threading.Thread(target=watch)
    thread.start()
    try:
        act(source, target)
    finally:
        ended.set()
        thread.join()
    print(f"{act.__name__}-of-{source}", peak - before)
"""


@pytest.mark.extended
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of memory from Linux")
def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path, run_script: ScriptRunner) -> None:
    stock(tmp_path / "warm")
    state = {f"w{number}": torch.full((TENSOR * 2**18,), float(number)) for number in range(COUNT)}
    dcp.save({"model": state}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    save(tmp_path / "a", Part("model", state, Kind.REPLICATED))
    Checkpointer(strategy="sync").save({"model": state}, tmp_path / "file.ckpt")
    peaks = dict(line.split() for line in run_script(MEMORY).stdout.splitlines())
    for name in ("b", "c", "d", "e"):
        assert_same_state(load(tmp_path / name), state)
    assert_same_state(Checkpointer().load(tmp_path / "file-again.ckpt")["model"], state)
    # One tensor, one window of 16 MiB or a few reads of 8 MiB, and some room; all tensors together are 128 MiB.
    assert {name: int(peak) for name, peak in peaks.items() if int(peak) > 2 * TENSOR + 24} == {}
    assert len(peaks) == 7
    shutil.rmtree(tmp_path)


def test_tied_tensors_come_back_tied_from_dcp(tmp_path: Path) -> None:
    tied, alone = torch.arange(3.0), torch.arange(3.0)
    array = np.arange(5.0)
    state = {
        "z": tied,
        "a": alone,
        "arrays": [array, {"again": array}],
        "m": {"same": tied, "list": [torch.ones(1), tied]},
        0: {"number": tied},
    }
    ranks = [{"mine": alone, "too": alone}]
    with DirectoryCheckpointer(strategy="sync") as checkpointer:
        parts = [Part("model", state, Kind.REPLICATED), Part("mine", ranks[0], Kind.PER_RANK)]
        checkpointer.save(parts, tmp_path / "ours")
    export_dcp(tmp_path / "ours", tmp_path / "dcp")
    import_dcp(tmp_path / "dcp", tmp_path / "back")
    with DirectoryCheckpointer().load(tmp_path / "back") as checkpoint:
        model, mine = checkpoint.load("model"), checkpoint.load("mine")
    names = [model["z"], model["m"]["same"], model["m"]["list"][1], model[0]["number"]]
    assert len({tensor.data_ptr() for tensor in names}) == 1 and torch.equal(names[0], tied)
    assert model["a"].data_ptr() != names[0].data_ptr() and torch.equal(model["a"], alone)
    assert mine["mine"].data_ptr() == mine["too"].data_ptr() and torch.equal(mine["too"], alone)
    assert np.array_equal(model["arrays"][1]["again"], array) and torch.equal(model["m"]["list"][0], torch.ones(1))
    plain = {"model": {"m": {"same": torch.zeros(3)}, "z": torch.zeros(3)}}
    dcp.load(plain, checkpoint_id=tmp_path / "dcp", no_dist=True)  # it knows nothing of ties, and finds each name
    assert torch.equal(plain["model"]["m"]["same"], tied) and torch.equal(plain["model"]["z"], tied)
