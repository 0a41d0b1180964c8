"""The zip container by itself, above all beyond 4 GiB, on sparse files without data."""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core._layouts.torch_file.zip_format import ZipRecord, local_header
from tests.support.archives import central_directory

GIB = 2**30


def write_archive(path: Path, records: list[tuple[str, bytes | int]], comment: bytes = b"") -> list[ZipRecord]:
    """Write an archive; a record given by its size is a hole that is never written."""
    written, position = [], 0
    with path.open("wb") as file:
        for name, data in records:
            size = data if isinstance(data, int) else len(data)
            record, header = local_header(name, position, size, alignment=64)
            file.seek(position)
            file.write(header)
            if not isinstance(data, int):
                file.write(data)
            assert record.offset == position + len(header)
            written.append(record)
            position = record.offset + size
        file.seek(position)
        file.write(central_directory(written, position, comment))
    return written


def pickle_of(tensors: dict[str, tuple[str, int]]) -> bytes:
    """Return the pickle of one-dimensional uint8 tensors, each in the record ``archive/data/<key>``."""

    class Reference:
        def __init__(self, key: str, size: int) -> None:
            self.key, self.size = key, size

    class Tensor(Reference):
        def __reduce__(self) -> tuple[Any, ...]:
            arguments = (Reference(self.key, self.size), 0, (self.size,), (1,), False, {})
            return torch._utils._rebuild_tensor_v2, arguments

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            return ("storage", torch.ByteStorage, obj.key, "cpu", obj.size) if type(obj) is Reference else None

    stream = io.BytesIO()
    Pickler(stream, 2).dump({name: Tensor(*where) for name, where in tensors.items()})
    return stream.getvalue()


@pytest.mark.parametrize("alignment", [64, 512, 4096])
@pytest.mark.parametrize("size", [0, 1, 2**32 - 2, 2**32 - 1, 2**32, 2**40])
def test_data_is_aligned_wherever_the_header_begins(size: int, alignment: int) -> None:
    for position in [*range(130), 2**32 - 1, 2**33 + 7]:
        record, header = local_header("archive/data/7", position, size, alignment=alignment)
        assert record.offset == position + len(header)
        assert record.offset % alignment == 0
        assert (record.header_offset, record.size) == (position, size)
        assert len(header) < 30 + 14 + 20 + alignment + 4
        size32, name_length = struct.unpack_from("<I", header, 22)[0], struct.unpack_from("<H", header, 26)[0]
        extra = header[30 + name_length :]
        if size < 2**32 - 1:
            assert size32 == size
        else:  # the true sizes are in the first extra field
            assert size32 == 2**32 - 1
            assert struct.unpack_from("<HHQQ", extra) == (1, 16, size, size)


@pytest.mark.parametrize("comment", [b"", b"what stands here"])
def test_a_small_archive_is_read_by_python_and_torch(comment: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    contents = [
        ("archive/data.pkl", b"pickle"),
        ("archive/empty", b""),
        ("archive/\u4e2d", b"x" * 1000),
        ("archive/version", b"3"),
    ]
    records = write_archive(path, list(contents), comment)
    with zipfile.ZipFile(path) as archive:
        assert archive.namelist() == [name for name, _ in contents]
        assert archive.comment == comment
        assert [info.header_offset for info in archive.infolist()] == [record.header_offset for record in records]
    reader = torch._C.PyTorchFileReader(str(path))
    for (name, data), record in zip(contents, records, strict=True):
        assert reader.get_record_offset(name.removeprefix("archive/")) == record.offset
        assert path.read_bytes()[record.offset : record.offset + record.size] == data


@pytest.mark.parametrize("sizes", [(5 * GIB,), (2**32 - 1, 3), (2**32 - 2, 3), (2**31, 2**31, 2**31, 9)], ids=str)
def test_offsets_and_sizes_beyond_4_gib(sizes: tuple[int, ...], tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    tensors = {f"t{key}": (str(key), size) for key, size in enumerate(sizes)}
    records = write_archive(
        path,
        [
            *((f"archive/data/{key}", size) for key, size in enumerate(sizes)),
            ("archive/data.pkl", pickle_of(tensors)),
            ("archive/byteorder", b"little"),
            ("archive/version", b"3\n"),
        ],
        b"a comment",
    )
    assert os.stat(path).st_blocks * 512 < 2**20, "the file must be sparse"
    marks = {record.name: position + 1 for position, record in enumerate(records) if "/data/" in record.name}
    with path.open("r+b") as file:
        for record in records:
            if record.name in marks:
                file.seek(record.offset + record.size - 1)
                file.write(bytes([marks[record.name]]))

    with zipfile.ZipFile(path) as archive:
        assert [(i.filename, i.header_offset, i.file_size) for i in archive.infolist()] == [
            (r.name, r.header_offset, r.size) for r in records
        ]
    reader = torch._C.PyTorchFileReader(str(path))
    assert [reader.get_record_offset(r.name.removeprefix("archive/")) for r in records] == [r.offset for r in records]

    loaded = torch.load(path, mmap=True)
    assert [tensor.numel() for tensor in loaded.values()] == list(sizes)
    assert [int(tensor[-1]) for tensor in loaded.values()] == list(marks.values())
    assert all(int(tensor[0]) == 0 for tensor in loaded.values() if tensor.numel() > 1)


def test_more_records_than_a_plain_zip_can_count(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    write_archive(path, [("archive/version", b"3"), *((f"archive/{i}", b"") for i in range(66_000))])
    with zipfile.ZipFile(path) as archive:
        assert len(archive.namelist()) == 66_001
    assert len(torch._C.PyTorchFileReader(str(path)).get_all_records()) == 66_001
