"""Read DCP's own format without running code from it: ``.metadata``, which is a pickle, and the objects in its files.

The names and fields of the classes that DCP pickles are not public. Only this module knows them, as text. No torch
class is instantiated from the file: each known name is replaced by one of the few classes below, and every other name
is refused. ``tests/ckpt_core/interchange/test_interchange_files.py`` reads what DCP saves, and so detects a release of
torch that writes something else.
"""

from __future__ import annotations

import dataclasses
import io
import pathlib
import pickle
import re
import struct
import zipfile
from collections.abc import Callable, Hashable
from typing import Any

import torch

from ckpt_core._layouts.safetensors import DTYPES, TensorInfo
from ckpt_core._layouts.torch_file.loading import peek_torch_file, verify_torch_file
from ckpt_core._layouts.torch_file.storage_collector import MapLocation, StorageCollector, without_data
from ckpt_core.errors import (
    CheckpointCorruptedError,
    CheckpointFormatError,
    CheckpointNotFoundError,
    UnsafeCheckpointError,
)
from ckpt_core.geometry import Box
from ckpt_core.interchange.flat_names import EntryPath, entry_name
from ckpt_core.interchange.streaming import TensorMemory
from ckpt_core.storage import FileReader, Storage
from ckpt_core.storage.base import ReaderIO
from ckpt_core.weights_only import refused_in

METADATA_NAME = ".metadata"
REST_NAME = "meta.pt"  # Lightning's file next to DCP's: everything except weights and optimizers
_DCP = "torch.distributed.checkpoint"


@dataclasses.dataclass(frozen=True)
class Location:
    """Where DCP has stored an object: a torch file inside one of its files."""

    file: str  # path of the file in the checkpoint's directory
    offset: int  # where the object begins
    length: int  # its size in bytes


@dataclasses.dataclass(frozen=True)
class DcpEntry:
    """An entry of a DCP checkpoint."""

    path: EntryPath  # its path in the state
    info: TensorInfo | None  # type and shape; None if it is not a tensor
    chunks: tuple[tuple[Box, Location], ...]  # boxes of the tensor; if not a tensor, one location with a dummy box


class _Record:
    """Replaces an object of one of DCP's classes: holds its fields, but has none of its methods."""

    fields: Any = None

    def __setstate__(self, state: Any) -> None:
        self.fields = state

    def __getitem__(self, name: str) -> Any:
        if type(self.fields) is not dict:
            raise TypeError(f"a record has no field {name!r}")
        return self.fields[name]


class _Metadata(_Record): ...


class _Bytes(_Record): ...


class _Index(_Record):
    """A ``MetadataIndex``: the only one of DCP's records that is used as a dictionary key."""

    def key(self) -> Hashable:
        offset = self.fields.get("offset")  # fields with their default value are not in the file
        return self["fqn"], None if offset is None else tuple(offset)


def _text(*parts: Any) -> str:
    return str(pathlib.PurePosixPath(*map(str, parts)))


def _known(*_: Any) -> None:
    """Replaces constructors whose results are not used: layouts and memory formats."""


_NAMES: dict[tuple[str, str], Callable[..., Any]] = {
    (f"{_DCP}.metadata", "Metadata"): _Metadata,
    (f"{_DCP}.metadata", "TensorStorageMetadata"): _Record,
    (f"{_DCP}.metadata", "BytesStorageMetadata"): _Bytes,
    (f"{_DCP}.metadata", "TensorProperties"): _Record,
    (f"{_DCP}.metadata", "ChunkStorageMetadata"): _Record,
    (f"{_DCP}.metadata", "MetadataIndex"): _Index,
    (f"{_DCP}.metadata", "StorageMeta"): _Record,
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"): _known,
    (f"{_DCP}.filesystem", "_StorageInfo"): _Record,
    ("torch.serialization", "_get_layout"): _known,
    ("torch", "Size"): tuple,
    **{(module, name): _text for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")},
}


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, path: str) -> None:
        super().__init__(io.BytesIO(data))
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        if (module, name) not in _NAMES:
            raise UnsafeCheckpointError(
                f"the metadata of the checkpoint contain {module}.{name}, which DCP does not write there: it "
                "could run arbitrary code",
                path=self._path,
                remedy="do not use this checkpoint, unless you know its author: then load it with dcp.load and save "
                "it again",
            )
        return _NAMES[module, name]


def read_dcp_metadata(data: bytes, *, path: str) -> list[DcpEntry]:
    """Parse the bytes of ``.metadata`` into the entries of a DCP checkpoint; refuse any class that DCP does not use."""
    try:
        metadata = _Unpickler(data, path).load()
        if not isinstance(metadata, _Metadata):
            raise TypeError("it is not a description of a checkpoint")
        return _entries(metadata)
    except UnsafeCheckpointError:
        raise
    except Exception as error:  # invalid bytes can fail anywhere in pickle, or later in the code that reads the records
        raise CheckpointFormatError(
            f"this is not the metadata file of a DCP checkpoint: {type(error).__name__}: {error}",
            path=path,
            remedy="check that the path is a checkpoint of torch.distributed.checkpoint, and that its copy is complete",
        ) from error


def _entries(metadata: _Metadata) -> list[DcpEntry]:
    # Records are looked up by their own key(), so that the checkpoint cannot define which are equal.
    where = {index.key(): _location(stored) for index, stored in metadata["storage_data"].items()}
    paths, entries = metadata["planner_data"] or {}, metadata["state_dict_metadata"]
    found = []
    for name in dict.fromkeys([*(name for name in paths if name in entries), *entries]):
        described = entries[name]
        path: EntryPath = tuple(paths.get(name, (name,)))
        if not path or not all(type(key) in (str, int) for key in path):
            raise TypeError(f"{name!r} has no path")
        if isinstance(described, _Bytes):
            found.append(DcpEntry(path, None, ((Box.whole(()), where[name, None]),)))
            continue
        dtype: Any = described["properties"].fields[0]
        info = TensorInfo(dtype, _sizes(described["size"]))
        boxes = [Box(_sizes(chunk["offsets"]), _sizes(chunk["sizes"])) for chunk in described["chunks"]]
        if not isinstance(dtype, torch.dtype) or any(not _is_inside(box, info.shape) for box in boxes):
            raise ValueError(f"{name!r} has chunks that are not inside of it")
        found.append(DcpEntry(path, info, tuple((box, where[name, box.offset]) for box in boxes)))
    return found


def _location(stored: _Record) -> Location:
    if stored.fields.get("transform_descriptors"):
        raise ValueError("its files are compressed or encrypted by an extension")
    file, offset, length = stored["relative_path"], stored["offset"], stored["length"]
    if type(file) is not str or type(offset) is not int or type(length) is not int or min(offset, length) < 0:
        raise TypeError("an object has no place")
    parts = pathlib.PurePosixPath(file).parts
    if not parts or file.startswith("/") or ".." in parts:
        raise ValueError(f"{file!r} is not a file in the checkpoint")
    return Location(file, offset, length)


def _sizes(values: Any) -> tuple[int, ...]:
    sizes = tuple(values)
    if any(type(size) is not int or size < 0 for size in sizes):
        raise TypeError("a size is not a list of numbers")
    return sizes


def _is_inside(box: Box, shape: tuple[int, ...]) -> bool:
    return len(box.shape) == len(shape) and all(end <= extent for end, extent in zip(box.end, shape, strict=True))


# ---- the stored object of an entry or a chunk: a whole torch file, somewhere inside a larger file --------------------

REMEDY = "copy the checkpoint again, or import another one"
_DATA = re.compile(r"[^/]+/data/[0-9]+")
_LOCAL_HEADER = 30  # bytes, before name and extra field


def load_stored(storage: Storage, directory: str, entry: DcpEntry, location: Location, memory: TensorMemory) -> Any:
    """Load an object of a DCP checkpoint, or a chunk of a tensor; refuse objects that are not plain data."""
    return _read_stored(
        storage,
        directory,
        entry,
        location,
        lambda section: _object(section) if entry.info is None else _tensor(section, memory),
    )


def verify_stored(storage: Storage, directory: str, entry: DcpEntry, box: Box, location: Location) -> None:
    """Compare stored bytes with their CRC-32, and a tensor's type and shape with the metadata; errors as above."""

    def compare(section: FileReader) -> None:
        verify_torch_file(section)
        if entry.info is None:
            return
        found = peek_torch_file(section)
        if (found.dtype, tuple(found.shape)) != (entry.info.dtype, box.shape):
            raise CheckpointCorruptedError(
                "its type or shape differs from the metadata", path=section.path, remedy=REMEDY
            )

    _read_stored(storage, directory, entry, location, compare)


def _read_stored(
    storage: Storage, directory: str, entry: DcpEntry, location: Location, read: Callable[[FileReader], Any]
) -> Any:
    key, path = entry_name(entry.path), f"{directory}/{location.file}"
    try:
        with storage.open(path) as reader:
            return read(_Section(reader, location))
    except CheckpointNotFoundError as error:
        raise CheckpointCorruptedError(
            "a file of the checkpoint is missing", path=path, key=key, remedy=REMEDY
        ) from error
    except CheckpointCorruptedError as error:
        error.key = key
        raise
    except Exception as error:  # invalid bytes can fail anywhere in torch and pickle
        if refused_in(error) is not None:
            raise UnsafeCheckpointError(
                f"the object at {key} is not plain data, and rebuilding it could run arbitrary code",
                path=path,
                key=key,
                remedy="import the rest of the state with only=, or allow the type with "
                "torch.serialization.add_safe_globals",
            ) from error
        raise CheckpointCorruptedError(
            f"what is stored for {key} cannot be read: {type(error).__name__}", path=path, key=key, remedy=REMEDY
        ) from error


def _object(section: FileReader, map_location: MapLocation = "cpu") -> Any:
    return torch.load(io.BufferedReader(ReaderIO(section)), map_location=map_location, weights_only=True)


def _tensor(section: FileReader, memory: TensorMemory) -> Any:
    with zipfile.ZipFile(io.BufferedReader(ReaderIO(section))) as archive:
        records = [record for record in archive.infolist() if _DATA.fullmatch(record.filename)]
    collector = StorageCollector("cpu", [record.file_size for record in records])
    with without_data():
        found = _object(section, collector)
    if not isinstance(found, torch.Tensor):
        return found
    (record,) = records
    nbytes = found.untyped_storage().nbytes()
    if (record.compress_type, record.file_size) != (zipfile.ZIP_STORED, nbytes):
        raise ValueError("its bytes are not those of the tensor")
    dtype, place = found.dtype, (found.storage_offset(), found.shape, found.stride())
    del found  # frees the memory that torch has allocated for it, but not touched
    data = memory.flat(nbytes)
    if nbytes:
        header = bytearray(_LOCAL_HEADER)
        section.read_into(record.header_offset, memoryview(header))
        begin = record.header_offset + _LOCAL_HEADER + sum(struct.unpack_from("<2H", header, 26))
        section.read_into(begin, data.numpy().data)
    return torch.empty(0, dtype=dtype).set_(data.untyped_storage(), *place)


class _Section(FileReader):
    """Reader for a section of a file as if it were a file."""

    def __init__(self, reader: FileReader, location: Location) -> None:
        self.path = reader.path
        self.size = location.length
        self._reader = reader
        self._begin = location.offset
        if location.offset + location.length > reader.size:
            raise CheckpointCorruptedError("a file of the checkpoint is truncated", path=reader.path, remedy=REMEDY)

    def read_into(self, offset: int, target: memoryview) -> None:
        self._reader.read_into(self._begin + offset, target)

    def close(self) -> None:
        """Do nothing: the file belongs to the caller."""
