"""What DCP stores for an entry or a part of one: a whole torch file, somewhere inside of a file."""

from __future__ import annotations

import io
import re
import struct
import zipfile
from typing import Any

import torch
from torch.serialization import skip_data

from ckpt_core._layouts.torch_file.storage_collector import MapLocation, StorageCollector
from ckpt_core.errors import CheckpointCorruptedError, CheckpointNotFoundError, UnsafeCheckpointError
from ckpt_core.interchange.dcp_metadata import DcpEntry, Location
from ckpt_core.interchange.naming import entry_name
from ckpt_core.interchange.tensor_memory import TensorMemory
from ckpt_core.storage import FileReader, Storage
from ckpt_core.storage.base import ReaderIO

__all__ = ["load_stored"]

_REMEDY = "copy the checkpoint again, or import another one"
_DATA = re.compile(r"[^/]+/data/[0-9]+")
_REFUSED = re.compile("GLOBAL|Unsupported (global|class)")  # in what torch says of a pickle that is more than data
_LOCAL_HEADER = 30  # bytes, before name and extra field


def load_stored(storage: Storage, directory: str, entry: DcpEntry, location: Location, memory: TensorMemory) -> Any:
    """Return an object of a DCP checkpoint, which is a tensor where the entry is one.

    Args:
        storage: Where the checkpoint is.
        directory: The checkpoint.
        entry: What it is of.
        location: Where it is.
        memory: Where tensors go.

    Raises:
        UnsafeCheckpointError: It is no plain data.
        CheckpointCorruptedError: It cannot be read.
    """
    key, path = entry_name(entry.path), f"{directory}/{location.file}"
    try:
        with storage.open(path) as reader:
            section = _Section(reader, location)
            return _object(section) if entry.info is None else _tensor(section, memory)
    except CheckpointNotFoundError as error:
        raise CheckpointCorruptedError(
            "a file of the checkpoint is missing", path=path, key=key, remedy=_REMEDY
        ) from error
    except CheckpointCorruptedError as error:
        error.key = key
        raise
    except Exception as error:  # bytes that make no sense fail anywhere in torch and pickle
        if _REFUSED.search(str(error)):
            raise UnsafeCheckpointError(
                f"the object at {key} is no plain data, and rebuilding it could run any code",
                path=path,
                key=key,
                remedy="import the rest of the state with only=, or allow the type with torch.serialization.add_safe_globals",
            ) from error
        raise CheckpointCorruptedError(
            f"what is stored for {key} cannot be read: {type(error).__name__}", path=path, key=key, remedy=_REMEDY
        ) from error


def _object(section: FileReader, map_location: MapLocation = "cpu") -> Any:
    return torch.load(io.BufferedReader(ReaderIO(section)), map_location=map_location, weights_only=True)


def _tensor(section: FileReader, memory: TensorMemory) -> Any:
    with zipfile.ZipFile(io.BufferedReader(ReaderIO(section))) as archive:
        records = [record for record in archive.infolist() if _DATA.fullmatch(record.filename)]
    collector = StorageCollector("cpu", [record.file_size for record in records])
    with skip_data():
        found = _object(section, collector)
    if not isinstance(found, torch.Tensor):
        return found
    (record,) = records
    nbytes = found.untyped_storage().nbytes()
    if (record.compress_type, record.file_size) != (zipfile.ZIP_STORED, nbytes):
        raise ValueError("its bytes are not those of the tensor")
    dtype, place = found.dtype, (found.storage_offset(), found.shape, found.stride())
    del found  # torch has made room for it, which was not touched
    data = memory.flat(nbytes)
    if nbytes:
        header = bytearray(_LOCAL_HEADER)
        section.read_into(record.header_offset, memoryview(header))
        begin = record.header_offset + _LOCAL_HEADER + sum(struct.unpack_from("<2H", header, 26))
        section.read_into(begin, data.numpy().data)
    return torch.empty(0, dtype=dtype).set_(data.untyped_storage(), *place)


class _Section(FileReader):
    """A part of a file, as a file."""

    def __init__(self, reader: FileReader, location: Location) -> None:
        self.path = reader.path
        self.size = location.length
        self._reader = reader
        self._begin = location.offset
        if location.offset + location.length > reader.size:
            raise CheckpointCorruptedError("a file of the checkpoint is truncated", path=reader.path, remedy=_REMEDY)

    def read_into(self, offset: int, target: memoryview) -> None:
        self._reader.read_into(self._begin + offset, target)

    def close(self) -> None:
        """Do nothing: the file belongs to somebody else."""
