"""Directory checkpoints: written in any pieces, read into any other, reading little more than what is asked for."""

from __future__ import annotations

import json
import math
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from ckpt_core import (
    CheckpointError,
    CheckpointNotFoundError,
    DirectoryCheckpointer,
    Kind,
    Part,
    SerializationError,
    StateMismatchError,
)
from ckpt_core._layouts.directory import fetching
from ckpt_core._layouts.directory.contents import Contents
from ckpt_core._layouts.directory.files import describe_file
from ckpt_core._layouts.directory.loading import DirectoryReader
from ckpt_core._layouts.directory.manifest import Manifest, PartRecord, encode_part
from ckpt_core._layouts.directory.writing import PartContent, RankFiles, build_manifest
from ckpt_core._layouts.safetensors import TensorInfo
from ckpt_core._pipeline.writer import write_image
from ckpt_core.buffers import ScratchBuffers
from ckpt_core.geometry import Box
from ckpt_core.storage import LocalStorage, local_reader
from ckpt_core.storage.base import MANIFEST_NAME, FileReader
from tests.support.sharded import (
    Local,
    Piece,
    cut,
    open_directory,
    part_of,
    rows,
    save_directory,
    save_ranks,
)
from tests.support.states import assert_same_state, states, tensor_of

DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.complex128, torch.int64)


@settings(max_examples=60, deadline=None)
@given(states(), st.booleans())
def test_any_state_comes_back(state: dict[Any, Any], staged: bool) -> None:
    with tempfile.TemporaryDirectory() as directory:
        save_directory(Path(directory) / "c", [{"state": ("replicated", state)}], staged=staged)
        with open_directory(Path(directory) / "c") as checkpoint:
            assert_same_state(checkpoint.load("state"), state)
            checkpoint.verify()


def partitions(draw: st.DrawFn, box: Box, depth: int) -> list[Box]:
    """Cut the box at random: the parts are disjoint and cover it."""
    wide = [dimension for dimension, extent in enumerate(box.shape) if extent > 1]
    if depth == 0 or not wide or draw(st.booleans()):
        return [box]
    dimension = draw(st.sampled_from(wide))
    at = draw(st.integers(1, box.shape[dimension] - 1))
    parts = (box.along(dimension, 0, at), box.along(dimension, at, box.shape[dimension]))
    return [found for part in parts for found in partitions(draw, part, depth - 1)]


@st.composite
def reshardings(draw: st.DrawFn) -> dict[str, Any]:
    large = draw(st.booleans())
    shape = tuple(draw(st.lists(st.integers(1, 64 if large else 5), min_size=2 if large else 0, max_size=3)))
    world_size = draw(st.integers(1, 4))
    boxes = partitions(draw, Box.whole(shape), 3)
    written: list[list[Box]] = [[] for _ in range(world_size)]
    for box in boxes:
        written[draw(st.integers(0, world_size - 1))].append(box)
    return {
        "dtype": draw(st.sampled_from(DTYPES)),
        "shape": shape,
        "written": written,
        "read": draw(st.permutations(partitions(draw, Box.whole(shape), 3))),
        "strided": draw(st.booleans()),
        "staged": draw(st.booleans()),
        "direct": draw(st.sampled_from([1, 2**14, 2**20])),
        "one_read": draw(st.sampled_from([2**15, 2**17, 2**23])),
        "past_cache": draw(st.booleans()),
    }


@settings(max_examples=120, deadline=None)
@given(reshardings())
def test_any_boxes_to_any_boxes(case: dict[str, Any]) -> None:
    source = tensor_of(case["dtype"], *case["shape"], seed=3)
    other = torch.arange(7)
    world_size = len(case["written"])
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(fetching, "_DIRECT", case["direct"])
        patch.setattr(fetching, "_ONE_READ", case["one_read"])
        if case["past_cache"]:
            patch.setattr(local_reader, "_SMALLEST_FILE", 0)
            patch.setattr(local_reader, "_SMALLEST_DIRECT", 4096)
        save_directory(
            Path(directory) / "c",
            [{"model": ("sharded", {"w": source, "other": other})}] * world_size,
            spread=True,
            cuts={"w": case["written"]},
            staged=case["staged"],
        )
        with open_directory(Path(directory) / "c") as checkpoint:
            checkpoint.verify()
            loaded = checkpoint.load("model")
            assert_same_state(loaded["w"], source)
            assert torch.equal(loaded["other"], other)
            for box in case["read"]:
                # Load into the middle of a larger tensor, of which nothing else may change.
                around = torch.full(tuple(2 * extent + 2 for extent in box.shape), 7, dtype=torch.uint8).to(
                    source.dtype
                )
                step = 2 if case["strided"] else 1
                target = around[tuple(slice(1, 1 + step * extent, step) for extent in box.shape)]
                untouched = around.clone()
                checkpoint.load(
                    "model",
                    into={"w": torch.empty(0), "other": torch.empty(0)},
                    local=lambda key, _, box=box, target=target: (
                        Local(source.dtype, case["shape"], (Piece(box, target),))
                        if key == "w"
                        else Local(torch.int64, (7,), ())
                    ),
                )
                untouched[tuple(slice(1, 1 + step * extent, step) for extent in box.shape)] = cut(source, box)
                assert_same_state(around, untouched)


def filled(tree: Any) -> Any:
    """Return the same tree with other values in other memory."""
    if isinstance(tree, torch.Tensor):
        return torch.zeros_like(tree)
    if isinstance(tree, dict):
        return {key: filled(value) for key, value in tree.items()}
    return [filled(value) for value in tree] if isinstance(tree, list) else "other"


MODEL = {
    "layers": [{"weight": torch.randn(20, 30), "bias": torch.randn(20)}, {"weight": torch.randn(30, 20)}],
    "count": torch.tensor(5),
    "name": "gpt",
    7: {"lr": 0.1, "empty": torch.empty(0, 3)},
}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_targets_are_filled_in_place_and_plain_values_come_from_the_checkpoint(tmp_path: Path, world_size: int) -> None:
    save_directory(tmp_path / "c", [{"model": ("sharded", MODEL)}] * world_size, spread=True, metadata={"step": 3})
    into = filled(MODEL)
    memory = into["layers"][0]["weight"].data_ptr()
    with open_directory(tmp_path / "c") as checkpoint:
        loaded = checkpoint.load("model", into=into)
        assert (checkpoint.world_size, checkpoint.metadata, checkpoint.save_id) == (world_size, {"step": 3}, "save-1")
    assert into["layers"][0]["weight"].data_ptr() == memory
    assert loaded["layers"][0]["weight"] is into["layers"][0]["weight"]
    assert_same_state(loaded, MODEL)


def test_tied_tensors(tmp_path: Path) -> None:
    weight = torch.randn(100, 100)
    state = {"embed": weight, "head": weight}
    save_directory(tmp_path / "c", [{"model": ("replicated", state)}])
    assert (tmp_path / "c" / "model.safetensors").stat().st_size < 1.5 * weight.nbytes
    with open_directory(tmp_path / "c") as checkpoint:
        assert list(checkpoint.parts["model"].tensors) == ["embed", "head"]
        loaded = checkpoint.load("model")
        assert loaded["embed"] is loaded["head"]
        untied = checkpoint.load("model", into={"embed": torch.zeros(100, 100), "head": torch.zeros(100, 100)})
        assert torch.equal(untied["embed"], weight)
        assert torch.equal(untied["head"], weight)
        assert untied["embed"] is not untied["head"]
        memory = torch.zeros(100, 100)
        before = checkpoint.bytes_read
        checkpoint.load("model", into={"embed": memory, "head": memory.detach()})
        assert torch.equal(memory, weight)
        assert checkpoint.bytes_read - before < 1.2 * weight.nbytes


def test_two_tensors_into_a_tied_one_leave_the_last(tmp_path: Path) -> None:
    save_directory(tmp_path / "c", [{"model": ("replicated", {"a": torch.ones(2**19), "b": 2 * torch.ones(2**19)})}])
    memory = torch.zeros(2**19)
    with open_directory(tmp_path / "c") as checkpoint:
        checkpoint.load("model", into={"a": memory, "b": memory})
    assert bool((memory == 2).all())


def test_parts_of_ranks_are_kept_apart(tmp_path: Path) -> None:
    states = [
        {
            "model": ("replicated", {"w": torch.ones(3)}),
            "rng": ("per-rank", {"seed": rank, "torch": torch.full((5 + rank,), rank)}),
            "data": ("per-rank", {"position": [rank], "order": torch.arange(rank)}),
        }
        for rank in range(3)
    ]
    save_directory(tmp_path / "c", states)
    with open_directory(tmp_path / "c") as checkpoint:
        for rank, state in enumerate(states):
            for part in ("rng", "data"):
                assert_same_state(checkpoint.load(part, rank=rank), state[part][1])
        assert {name: info.kind for name, info in checkpoint.parts.items()} == {
            "model": "replicated",
            "rng": "per-rank",
            "data": "per-rank",
        }
        assert list(checkpoint.parts["rng"].tensors) == ["torch"]
        with pytest.raises(StateMismatchError, match="rank 3") as caught:
            checkpoint.load("rng", rank=3)
        assert caught.value.key == "rng"
        with pytest.raises(CheckpointNotFoundError, match="model"):
            checkpoint.load("optimizer")


def test_a_part_of_plain_values_has_no_file(tmp_path: Path) -> None:
    save_directory(tmp_path / "c", [{"scheduler": ("replicated", {"epoch": 3, "lr": (0.1, {})})}] * 2)
    assert [path.name for path in (tmp_path / "c").iterdir()] == [MANIFEST_NAME]
    with open_directory(tmp_path / "c") as checkpoint:
        assert checkpoint.load("scheduler") == {"epoch": 3, "lr": (0.1, {})}
        checkpoint.verify()


def test_names_of_files_and_what_they_hold(tmp_path: Path) -> None:
    def state(rank: int) -> dict[str, Any]:
        return {"model": ("sharded", {"w": torch.arange(8)}), "rng": ("per-rank", {"r": torch.tensor(rank)})}

    save_directory(tmp_path / "c", [state(0), state(1)], spread=True)
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == [
        "manifest.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "rank-00001-of-00002.digests",
        "rank-00001-of-00002.safetensors",
        "rank-00002-of-00002.digests",
        "rank-00002-of-00002.safetensors",
    ]
    with open_directory(tmp_path / "c") as checkpoint:
        sizes = {path.name: path.stat().st_size for path in (tmp_path / "c").iterdir()}
        assert checkpoint.size == sum(sizes.values())
        assert checkpoint.files == {name: size for name, size in sizes.items() if name != MANIFEST_NAME}


def test_a_suffix_gives_new_names(tmp_path: Path) -> None:
    part = part_of("model", "replicated", {"w": torch.ones(3)})
    files = RankFiles([part], rank=0, world_size=1, save_id="s", suffix="-7f")
    assert files.names == ["model-7f.safetensors", "rank-00001-of-00001-7f.digests"]


def test_a_state_that_does_not_fit_is_refused_before_anything_is_changed(tmp_path: Path) -> None:
    saved = {f"layer.{index}": torch.ones(4, index + 1) for index in range(8)}
    save_directory(tmp_path / "c", [{"model": ("replicated", saved)}])
    checkpoint = open_directory(tmp_path / "c")

    def refused(into: dict[str, Any]) -> StateMismatchError:
        before = [value.clone() for value in into.values()]
        with pytest.raises(StateMismatchError) as caught:
            checkpoint.load("model", into=into)
        assert all(torch.equal(value, old) for value, old in zip(into.values(), before, strict=True))
        return caught.value

    fresh = {key: torch.zeros_like(value) for key, value in saved.items()}
    error = refused({**fresh, "new": torch.zeros(1)})
    assert error.key == "new"
    assert "1 not in the checkpoint: new" in str(error)
    error = refused({"layer.0": torch.zeros(4, 1)})
    assert "7 only in the checkpoint: layer.1, layer.2, layer.3, layer.4, layer.5, ..." in str(error)
    error = refused({**fresh, "layer.3": torch.zeros(4, 5), "layer.4": torch.zeros(4, 5, dtype=torch.bfloat16)})
    assert "layer.3 is float32[4, 4] in the checkpoint and float32[4, 5] in the state" in str(error)
    assert "layer.4 is float32[4, 5] in the checkpoint and bfloat16[4, 5] in the state" in str(error)
    assert error.key == "layer.3"
    assert error.path == str(tmp_path / "c")
    error = refused({**fresh, "layer.2": torch.zeros(1, 3).expand(4, 3)})
    assert "several elements in one place of memory" in str(error)
    assert error.key == "layer.2"
    checkpoint.close()


def test_not_strict_leaves_alone_what_only_one_side_has(tmp_path: Path) -> None:
    save_directory(tmp_path / "c", [{"model": ("replicated", {"a": torch.ones(3), "old": torch.ones(5), "n": 1})}])
    into = {"a": torch.zeros(3), "new": torch.zeros(2)}
    with open_directory(tmp_path / "c") as checkpoint:
        loaded = checkpoint.load("model", into=into, strict=False)
        assert torch.equal(into["a"], torch.ones(3))
        assert torch.equal(into["new"], torch.zeros(2))
        assert loaded["old"].is_meta
        assert loaded["old"].shape == (5,)
        assert loaded["n"] == 1
        with pytest.raises(StateMismatchError):
            checkpoint.load("model", into={"a": torch.zeros(4)}, strict=False)


def test_new_tensors_can_be_on_another_device_and_arrays_cannot(tmp_path: Path) -> None:
    state = {"a": torch.empty(2, 3), "strided": torch.empty(4, 2).t(), "n": np.arange(3)}
    save_directory(tmp_path / "c", [{"model": ("replicated", state)}])
    with open_directory(tmp_path / "c") as checkpoint:
        loaded = checkpoint.load("model", map_location="meta")
    assert loaded["a"].is_meta
    assert loaded["strided"].is_meta
    assert loaded["n"].tolist() == [0, 1, 2]


def test_tensors_of_inference_mode(tmp_path: Path) -> None:
    with torch.inference_mode():
        state = {"a": torch.randn(300, 300), "b": torch.randn(30, 30).t()}
        save_directory(tmp_path / "c", [{"model": ("replicated", state)}])
        with open_directory(tmp_path / "c") as checkpoint:
            loaded = checkpoint.load("model")
            into = {"a": torch.zeros(300, 300), "b": torch.zeros(30, 30).t()}
            checkpoint.load("model", into=into)
    assert not loaded["a"].is_inference()
    assert all(torch.equal(loaded[key], state[key]) and torch.equal(into[key], state[key]) for key in state)


@pytest.mark.parametrize(
    ("shape", "boxes", "most"),
    [
        ((1024, 16384), [Box((128, 0), (128, 16384))], 1.01),  # 8 of 64 MiB, from where a block begins
        ((1024, 16384), [Box((133, 0), (128, 16384))], 1.05),  # the same, from the middle of a block
        ((1024, 16384), [Box((7, 0), (3, 16384)), Box((500, 0), (9, 16384))], 1.5),
        ((16, 2**20), [Box((0, 2**18), (16, 2**19))], 1.05),  # half of every row of 4 MiB
        ((4, 16, 2**18), [Box((1, 3, 2**16), (2, 12, 2**17))], 1.3),
    ],
)
def test_a_part_of_a_large_chunk_costs_little_more_than_the_part(
    tmp_path: Path, shape: tuple[int, ...], boxes: list[Box], most: float
) -> None:
    source = torch.arange(math.prod(shape), dtype=torch.int32).reshape(shape)
    save_directory(tmp_path / "c", [{"model": ("replicated", {"w": source})}])
    with open_directory(tmp_path / "c") as checkpoint:
        before = checkpoint.bytes_read
        pieces = tuple(Piece(box, torch.zeros(box.shape, dtype=torch.int32)) for box in boxes)
        checkpoint.load("model", into={"w": torch.empty(0)}, local=lambda *_: Local(torch.int32, shape, pieces))
        read = checkpoint.bytes_read - before
    for piece in pieces:
        assert torch.equal(piece.tensor, cut(source, piece.box))
    needed = sum(piece.tensor.nbytes for piece in pieces)
    assert needed <= read <= most * needed


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (1, 4), (4, 1), (2, 2)])
def test_resharding_reads_at_most_1_05_times_the_bytes(tmp_path: Path, before: int, after: int) -> None:
    shapes = {
        f"block.{index}.{name}": shape
        for index in range(3)
        for name, shape in {
            "attention": (768, 512),
            "up": (1024, 512),
            "down": (512, 1024),
            "bias": (1024,),
            "norm": (512,),
        }.items()
    }
    state = {key: torch.randn(shape) for key, shape in shapes.items()}
    save_directory(tmp_path / "c", [{"model": ("sharded", state)}] * before, spread=True)
    total = sum(tensor.nbytes for tensor in state.values())
    everything = 0
    for rank in range(after):
        pieces = {
            key: tuple(Piece(box, torch.zeros(box.shape)) for box in rows(shape, after)[rank])
            for key, shape in shapes.items()
        }
        with open_directory(tmp_path / "c") as checkpoint:
            opened = checkpoint.bytes_read
            checkpoint.load(
                "model", into=state, local=lambda key, _, pieces=pieces: Local(torch.float32, shapes[key], pieces[key])
            )
            everything += checkpoint.bytes_read - opened
        for key, found in pieces.items():
            assert all(torch.equal(piece.tensor, cut(state[key], piece.box)) for piece in found)
    assert total <= everything <= 1.05 * total


def test_one_part_is_loaded_without_reading_the_others(tmp_path: Path) -> None:
    state = {"model": ("replicated", {"w": torch.randn(1000)}), "optimizer": ("replicated", {"m": torch.randn(10**6)})}
    save_directory(tmp_path / "c", [state])
    with open_directory(tmp_path / "c") as checkpoint:
        checkpoint.load("model")
        assert checkpoint.bytes_read < 20_000


@pytest.mark.parametrize("numel", [16, 64])
def test_2000_small_tensors_take_at_most_1_3_times_what_safetensors_takes(tmp_path: Path, numel: int) -> None:
    state = {f"model.layers.{index // 12}.block.weight_{index % 12}": torch.randn(numel) for index in range(2000)}
    save_directory(tmp_path / "c", [{"model": ("replicated", state)}])
    save_file(state, tmp_path / "theirs.safetensors")
    ours = sum(path.stat().st_size for path in (tmp_path / "c").iterdir())
    assert ours <= 1.3 * (tmp_path / "theirs.safetensors").stat().st_size


def test_the_files_of_others_are_kept_and_verified(tmp_path: Path) -> None:
    notes = tmp_path / "c" / "hooks" / "notes.txt"
    notes.parent.mkdir(parents=True)
    notes.write_bytes(b"x" * 5_000_000)
    with LocalStorage().open(str(notes)) as reader:
        found = describe_file("hooks/notes.txt", reader)
    save_directory(tmp_path / "c", [{"model": ("replicated", {"w": torch.ones(3)})}], extra_files=[found])
    with open_directory(tmp_path / "c") as checkpoint:
        assert checkpoint.read_file("hooks/notes.txt") == b"x" * 5_000_000
        checkpoint.verify()
        with pytest.raises(CheckpointNotFoundError):
            checkpoint.read_file("model.safetensors")
        notes.write_bytes(b"x" * 4_999_999 + b"y")
        for check in (checkpoint.verify, lambda: checkpoint.read_file("hooks/notes.txt")):
            with pytest.raises(CheckpointError, match="differ") as caught:
                check()
            assert str(caught.value.path).endswith("hooks/notes.txt")


def reports_of(states: list[dict[str, tuple[str, Any]]], tmp_path: Path, **options: Any) -> list[str]:
    parts = [
        [
            part_of(name, kind, tree, rank=rank, world_size=len(states), **options)
            for name, (kind, tree) in state.items()
        ]
        for rank, state in enumerate(states)
    ]
    return save_ranks(tmp_path / "c", parts)


def test_ranks_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    def refused(reports: list[str], error: type[Exception], match: str) -> None:
        with pytest.raises(error, match=match):
            build_manifest(reports, metadata={}, path="run/step-5")

    one = ("sharded", {"a": torch.ones(4), "b": torch.ones(4)})
    other = ("sharded", {"a": torch.ones(4), "c": torch.ones(4)})
    larger = ("sharded", {"a": torch.ones(4), "b": torch.ones(6)})
    refused(
        reports_of([{"m": one}, {"m": other}], tmp_path, spread=True), SerializationError, "rank 1 has other tensors"
    )
    refused(
        reports_of([{"m": one}, {"m": larger}], tmp_path, spread=True), SerializationError, "rank 1 has other tensors"
    )
    refused(reports_of([{"m": one}, {"n": one}], tmp_path, spread=True), SerializationError, "they differ in 'm', 'n'")
    good = reports_of([{"m": one}, {"m": one}], tmp_path, spread=True)
    build_manifest(good, metadata={})
    refused(good[:1], CheckpointError, "rank 0 belongs to another save: rank 0 of 2")
    refused([good[1], good[0]], CheckpointError, "another save")
    later = reports_of([{"m": one}, {"m": one}], tmp_path, spread=True)
    later[1] = later[1].replace("save-1", "save-2")
    refused(later, CheckpointError, "rank 1 belongs to another save")
    nothing = {"a": [[Box((0,), (4,))], []], "b": [[Box((0,), (4,))], []]}
    half = {"a": [[Box((0,), (2,))], []], "b": [[Box((0,), (4,))], []]}
    build_manifest(reports_of([{"m": one}, {"m": one}], tmp_path, spread=True, cuts=nothing), metadata={})
    refused(
        reports_of([{"m": one}, {"m": one}], tmp_path, spread=True, cuts=half),
        SerializationError,
        "written 24 bytes of the part 'm', which has 32",
    )
    with pytest.raises(SerializationError, match="metadata"):
        build_manifest(good, metadata={"loss": torch.ones(1)})


def save_one(path: Path, part: PartContent, *, rank: int, world_size: int) -> list[str]:
    """Return the lines of the report of one rank of many."""
    files = RankFiles([part], rank=rank, world_size=world_size, save_id="s" * 32)
    scratch = ScratchBuffers()
    for name, image in files.live_files():
        write_image(image, LocalStorage(), str(path / name), scratch=scratch)
    scratch.close()
    return files.report().split("\n")


@pytest.mark.slow
def test_the_manifest_of_1024_ranks_with_1000_tensors_each(tmp_path: Path) -> None:
    ranks, count = 1024, 1000
    whole = {f"model.layers.{index}.weight": Local(torch.float32, (ranks, 16), ()) for index in range(count)}
    skeleton = {key: f"${index}" for index, key in enumerate(whole)}
    row = torch.zeros(1, 16)

    pieces = {key: [Piece(Box((1, 0), (1, 16)), row)] for key in whole}
    part = PartContent("model", "sharded", skeleton, whole, pieces, spread=True)
    summary, record, _ = save_one(tmp_path, part, rank=1, world_size=ranks)
    common = json.dumps(
        {"model": encode_part(PartRecord(skeleton, tuple(TensorInfo(w.dtype, w.shape) for w in whole.values())))}
    )
    # The reports of other ranks differ only in the rank's number and the offsets.
    found = json.loads(record)
    reports = []
    for rank in range(ranks):
        found["files"][0][5][1] = [rank, 0] * count
        text = json.dumps(found, separators=(",", ":"))
        lines = [
            line.replace('"rank":1', f'"rank":{rank}').replace("00002-of", f"{rank + 1:05d}-of")
            for line in (summary, text)
        ]
        reports.append("\n".join([*lines, common]))
    manifest = build_manifest(reports, metadata={})
    assert len(manifest) <= 64 * 2**20
    part = Contents(Manifest.decode(manifest, path="m"), "c").part("model", 0)
    for index in (0, 500, count - 1):
        part.table.check_cover(index)
        (found,) = part.overlapping(index, Box((777, 3), (1, 5)))
        assert found.box == Box((777, 0), (1, 16))
        assert found.shard.rank == 777


def all_cuts(count: int) -> Iterator[list[Box]]:
    yield [Box((begin, 0), (1, 3)) for begin in range(count)]
    yield [Box((begin, at), (1, 1)) for begin in range(count) for at in range(3)]


@pytest.mark.parametrize("count", [2, 7, 40])
def test_elements_that_are_twice_or_nowhere_are_found(tmp_path: Path, count: int) -> None:
    for boxes in all_cuts(count):
        for wrong in (False, True):
            cuts = list(boxes)
            if wrong:
                if cuts[0].shape != cuts[1].shape:
                    continue
                cuts[1] = cuts[0]  # as many elements, but the wrong ones
            state = {"w": torch.randn(count, 3)}
            save_directory(tmp_path / "c", [{"m": ("sharded", state)}] * 2, spread=True, cuts={"w": [cuts, []]})
            with open_directory(tmp_path / "c") as checkpoint:
                if not wrong:
                    checkpoint.verify()
                    continue
                for check in (checkpoint.verify, lambda checkpoint=checkpoint: checkpoint.load("m")):
                    with pytest.raises(CheckpointError, match="two chunks hold the same") as caught:
                        check()
                    assert caught.value.key == "m.w"


def test_many_files_are_not_all_open_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckpt_core._layouts.directory import files

    monkeypatch.setattr(files, "_MOST_OPEN", 2)
    state = {"w": torch.arange(50)}
    save_directory(tmp_path / "c", [{"m": ("sharded", state)}] * 10, spread=True)
    with open_directory(tmp_path / "c") as checkpoint:
        assert torch.equal(checkpoint.load("m")["w"], state["w"])
        checkpoint.verify()
        assert len(checkpoint._files._readers) == 0


def test_no_manifest_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    for path in (tmp_path / "c", tmp_path / "nothing"):
        with pytest.raises(CheckpointNotFoundError, match=r"manifest\.json") as caught:
            DirectoryReader(str(path), LocalStorage())
        assert caught.value.path == str(path)


def test_tensors_without_memory_are_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    DirectoryCheckpointer(strategy="sync").save([Part("model", {"w": torch.ones(2)}, Kind.REPLICATED)], path)
    with DirectoryCheckpointer().load(path) as checkpoint:
        for strict in (True, False):
            with pytest.raises(StateMismatchError, match="meta device") as caught:
                checkpoint.load("model", into={"w": torch.empty(2, device="meta")}, strict=strict)
            assert caught.value.key == "w"


class _SlowReader(FileReader):
    """A store that answers only once ``threads`` ranges have been asked for at the same time."""

    threads = 6

    def __init__(self, inner: FileReader, answers: threading.Barrier) -> None:
        self.path, self.size = inner.path, inner.size
        self._inner, self._answers = inner, answers

    def read_into(self, offset: int, target: memoryview) -> None:
        if len(target) == fetching._ONE_READ:
            self._answers.wait(200)
        self._inner.read_into(offset, target)

    def close(self) -> None:
        self._inner.close()


def test_a_storage_is_asked_for_as_many_ranges_at_a_time_as_it_wants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Barrier(_SlowReader.threads)

    class SlowStorage(LocalStorage):
        def open(self, path: str) -> FileReader:
            return _SlowReader(super().open(path), answers)

    monkeypatch.setattr(fetching, "_ONE_READ", 2**20)
    state = {"w": torch.randn(2 * _SlowReader.threads, 2**18)}
    path = save_directory(tmp_path / "c", [{"m": ("replicated", state)}])
    with DirectoryReader(str(path), SlowStorage()) as checkpoint:
        assert torch.equal(checkpoint.load("m")["w"], state["w"])
