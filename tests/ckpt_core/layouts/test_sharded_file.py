"""The safetensors files: other programs open them, blocks cover them, and all ways to write give the same bytes."""

from __future__ import annotations

import itertools
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from ckpt_core import SerializationError
from ckpt_core._layouts.directory.safetensors_file import (
    ALIGNMENT,
    LARGEST_BLOCK,
    SMALLEST_BLOCK,
    block_begins,
    block_size,
    file_layout,
    file_order,
)
from ckpt_core._layouts.directory.writing import RankFiles
from ckpt_core._layouts.image import WINDOW
from ckpt_core._layouts.safetensors import DTYPES, TensorInfo
from ckpt_core._pipeline.writer import write_image
from ckpt_core.buffers import ScratchBuffers, StagingBuffer
from ckpt_core.geometry import Box
from ckpt_core.storage import LocalStorage
from tests.support.sharded import open_directory, part_of, save_directory
from tests.support.states import raw_bytes, tensor_of

NATIVE = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint64,
        torch.uint32,
        torch.uint16,
        torch.uint8,
        torch.bool,
    ),
)


def random_bytes(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    count = torch.Size(shape).numel() * dtype.itemsize
    data = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8)
    return data.view(dtype).reshape(shape)


def zeros(dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    return torch.zeros(shape.numel() * dtype.itemsize, dtype=torch.uint8).view(dtype).reshape(shape)


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(
        left.contiguous().reshape(-1).view(torch.uint8), right.contiguous().reshape(-1).view(torch.uint8)
    )


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_type_comes_back_bit_by_bit_and_safetensors_opens_the_file(tmp_path: Path, dtype: torch.dtype) -> None:
    state = {"matrix": random_bytes(dtype, 3, 5), "scalar": random_bytes(dtype), "empty": random_bytes(dtype, 0, 2)}
    save_directory(tmp_path / "c", [{"model": ("replicated", state)}])
    with open_directory(tmp_path / "c") as checkpoint:
        loaded = checkpoint.load("model")
        target = {key: zeros(dtype, value.shape) for key, value in state.items()}
        checkpoint.load("model", into=target)
    for key, value in state.items():
        for found in (loaded[key], target[key]):
            assert (found.dtype, found.shape) == (dtype, value.shape)
            assert same_bytes(found, value)
    with safe_open(tmp_path / "c" / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(state)
        matrix = file.get_tensor("matrix")
        if dtype in NATIVE:
            assert matrix.dtype == dtype
        if dtype.is_complex:
            assert matrix.shape == (3, 5, 2)
        if dtype.is_complex and dtype.itemsize > 4:  # torch cannot compare halves
            assert torch.equal(matrix, torch.view_as_real(state["matrix"])) or bool(matrix.isnan().any())
        assert same_bytes(matrix, state["matrix"])


def test_all_types_that_torch_has_are_known() -> None:
    missing = {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)} - set(DTYPES.values())
    assert {str(dtype)[6:11].rstrip("28x4") for dtype in missing} <= {"qint", "qint3", "quint"}


def test_non_contiguous_tensors_and_views(tmp_path: Path) -> None:
    base = torch.randn(40, 30, 20)
    number = torch.randn(5, 4, dtype=torch.complex64)
    state = {
        "transposed": base.permute(2, 0, 1),
        "strided": base[::3, 1::2],
        "column": base[:, 5:6],
        "expanded": torch.randn(1, 4).expand(3, 4),
        "reversed": torch.arange(6).flip(0)[::2],
        "one_of_many": torch.arange(10)[4:9:2][:1],
        "conjugate": number.conj(),
        "negative": number.conj().imag,
        "real": number.real,
        "parameter": torch.nn.Parameter(base[0].t()),
    }
    for staged in (True, False):
        save_directory(tmp_path / str(staged), [{"model": ("replicated", state)}], staged=staged)
        with open_directory(tmp_path / str(staged)) as checkpoint:
            checkpoint.verify()
            loaded = checkpoint.load("model")
        for key, value in state.items():
            assert torch.equal(loaded[key], value), key


@given(
    st.lists(
        st.tuples(st.sampled_from(list(DTYPES.values())), st.lists(st.integers(0, 9), max_size=3).map(tuple)),
        max_size=12,
    )
)
def test_elements_are_aligned_and_what_fills_cache_lines_begins_at_one(tensors: list[tuple[torch.dtype, Any]]) -> None:
    infos = [TensorInfo(dtype, shape) for dtype, shape in tensors]
    order = file_order(infos)
    assert sorted(order) == list(range(len(infos)))
    layout = file_layout(tuple((str(index), infos[index]) for index in order), ())
    for index, begin in zip(order, layout.begins, strict=True):
        assert begin % infos[index].dtype.itemsize == 0
        assert begin % 64 == 0 or infos[index].nbytes % 64


def test_the_scalars_of_an_optimizer_do_not_shift_its_moments(tmp_path: Path) -> None:
    state = {str(number): {"step": torch.tensor(1.0), "exp_avg": torch.randn(4, 16)} for number in range(3)}
    save_directory(tmp_path / "c", [{"optimizer": ("replicated", state)}])
    data = (tmp_path / "c" / "optimizer.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    begins = {name: 8 + length + entry["data_offsets"][0] for name, entry in header.items() if name[:2] != "__"}
    assert [begin % 64 for name, begin in begins.items() if "exp_avg" in name] == [0, 0, 0]


def written(files: list[tuple[str, Any]], path: Path) -> dict[str, bytes]:
    path.mkdir()
    scratch = ScratchBuffers()
    for name, image in files:
        size = write_image(image, LocalStorage(), str(path / name), scratch=scratch)
        assert size == image.approximate_size == (path / name).stat().st_size
    scratch.close()
    return {name: (path / name).read_bytes() for name, _ in files}


@pytest.mark.parametrize("header_tensors", [0, 3000])
def test_staged_and_live_files_are_the_same_across_windows(tmp_path: Path, header_tensors: int) -> None:
    state: dict[str, torch.Tensor] = {f"small.{index}": torch.tensor(index) for index in range(header_tensors)}
    state["crosses"] = tensor_of(torch.float32, (WINDOW + 3 * LARGEST_BLOCK) // 4 + 17)
    state["strided"] = tensor_of(torch.float32, 1500, 1400, seed=1).t()
    state["bytes"] = tensor_of(torch.uint8, 12345, seed=2)
    part = part_of("model", "replicated", state)
    buffer = StagingBuffer(1)
    found = []
    for number in range(2):
        files = RankFiles([part], rank=0, world_size=1, save_id="s")
        if number == 0:
            buffer.close()
            buffer = StagingBuffer(files.staged_size)
            ends = []
            for end, target, source in files.pieces_in(buffer, 2**20):
                target.copy_(source)
                ends.append(end)
            assert ends == sorted(ends)
        images = files.staged_files(buffer) if number == 0 else files.live_files()
        found.append((written(images, tmp_path / str(number)), files.report()))
    buffer.close()
    assert found[0] == found[1]
    data = found[0][0]["model.safetensors"]
    header_size = struct.unpack("<Q", data[:8])[0]
    assert (8 + header_size) % ALIGNMENT == 0
    header = json.loads(data[8 : 8 + header_size])
    for key in ("crosses", "strided", "bytes"):
        begin, end = header[key]["data_offsets"]
        assert data[8 + header_size + begin : 8 + header_size + end] == raw_bytes(state[key])
    begins = [entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"]
    assert begins == sorted(begins)


def test_the_header_says_which_save_it_is_of_and_keys_need_no_care(tmp_path: Path) -> None:
    keys = ['"', "\\", "ä", "\n", "@" * 64, "a@0", "__metadata__", ""]
    save_directory(tmp_path / "c", [{"model": ("replicated", {key: torch.ones(2) for key in keys})}], save_id="x-1")
    with safe_open(tmp_path / "c" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "rank": "0", "save": "x-1"}
        assert set(file.keys()) == {*keys[:-2], "__metadata__~", "tensor"}
    with open_directory(tmp_path / "c") as checkpoint:
        assert list(checkpoint.load("model")) == keys


def test_too_many_tensors_for_a_header_are_refused() -> None:
    info = TensorInfo(torch.float32, (1,))
    with pytest.raises(SerializationError, match="header"):
        file_layout(tuple((f"{index:0200000d}", info) for index in range(600)), ())


@given(st.integers(0, 2**40))
def test_a_tensor_has_about_64_blocks(nbytes: int) -> None:
    size = block_size(nbytes)
    assert size & (size - 1) == 0
    assert SMALLEST_BLOCK <= size <= LARGEST_BLOCK
    assert size == SMALLEST_BLOCK or size <= 2 * nbytes / 64
    assert size == LARGEST_BLOCK or size >= nbytes / 64


@settings(deadline=None)
@given(st.lists(st.integers(0, 40_000) | st.integers(0, 20 * 2**20), max_size=30))
def test_blocks_cover_the_file_and_large_tensors_begin_one(sizes: list[int]) -> None:
    begins = block_begins(ALIGNMENT, sizes).tolist()
    assert begins[0] == 0
    assert begins[-1] == ALIGNMENT + sum(sizes)
    lengths = [after - before for before, after in itertools.pairwise(begins)]
    assert all(length > 0 for length in lengths)
    assert lengths[0] == ALIGNMENT
    assert max(lengths[1:], default=0) <= LARGEST_BLOCK
    position = ALIGNMENT
    for size in sizes:
        if size >= SMALLEST_BLOCK:
            assert position in begins
        position += size
    # Small tensors share blocks: those of two neighbouring blocks do not fit into one.
    small = [size for size in sizes if size < SMALLEST_BLOCK]
    if len(small) == len(sizes):
        assert len(lengths) - 1 <= 2 * sum(sizes) / SMALLEST_BLOCK + 1


def test_a_file_of_digests_that_is_written_too_early_is_an_error() -> None:
    files = RankFiles([part_of("model", "replicated", {"a": torch.ones(3)})], rank=0, world_size=1, save_id="s")
    with pytest.raises(RuntimeError, match="last"):
        files.live_files()[-1][1].tail()
    with pytest.raises(RuntimeError, match="last"):
        files.report()


@pytest.mark.parametrize("name", ["", "a b", "rank", "manifest", "a/b", "..", "a-00001-of-00002", "x" * 101, "ä"])
def test_a_bad_name_of_a_part_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="part"):
        RankFiles([part_of(name, "replicated", {})], rank=0, world_size=1, save_id="s")


@pytest.mark.parametrize("save_id", ["", "a b", "x" * 65, "a_b", "ä"])
def test_a_bad_id_of_a_save_is_refused(save_id: str) -> None:
    with pytest.raises(ValueError, match="id of a save"):
        RankFiles([], rank=0, world_size=1, save_id=save_id)


def test_misuse_is_an_error() -> None:
    part = part_of("model", "replicated", {"a": torch.ones(3)})
    with pytest.raises(ValueError, match="same name"):
        RankFiles([part, part], rank=0, world_size=1, save_id="s")
    with pytest.raises(ValueError, match="rank 0 alone"):
        RankFiles([part], rank=1, world_size=2, save_id="s")
    with pytest.raises(ValueError, match="not the name"):
        RankFiles([part], rank=0, world_size=1, save_id="s", suffix="/../x")
    own = part_of("rng", "per-rank", {"a": torch.ones(3)})
    piece = own.pieces["a"][0]
    own.pieces["a"][0] = type(piece)(Box((0,), (2,)), piece.tensor[:2])  # type: ignore[index]
    with pytest.raises(SerializationError, match="distributed"):
        RankFiles([own], rank=0, world_size=1, save_id="s")
