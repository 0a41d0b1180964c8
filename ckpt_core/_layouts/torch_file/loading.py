"""Loads torch files: every byte is compared with its digest before the caller gets a tensor.

``torch.load`` builds the objects from verified bytes in memory, with empty storages
(``torch.serialization.skip_data``); then the storages are filled from the file in parallel, and each piece is verified
when it is read. A pickle that needs the values of its tensors while it is loaded (sparse tensors, objects with a
``__setstate__``) cannot be loaded like this; its file is verified first and then passed to ``torch.load`` as it is.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import pickletools
from collections.abc import Iterator
from typing import Any

import torch

from ckpt_core._layouts.torch_file.filling import RESUME_FROM_ANOTHER
from ckpt_core._layouts.torch_file.manifest import ARCHIVE
from ckpt_core._layouts.torch_file.opening import (
    OpenedFile,
    check_archive_records,
    is_archive,
    open_torch_file,
    read_pickle,
)
from ckpt_core._layouts.torch_file.segments import SegmentIO
from ckpt_core._layouts.torch_file.storage_collector import MapLocation, StorageCollector, without_data
from ckpt_core.buffers import bytes_of
from ckpt_core.errors import (
    CheckpointCorruptedError,
    CheckpointError,
    CheckpointFormatError,
    UnsafeCheckpointError,
)
from ckpt_core.storage.base import FileReader, ReaderIO
from ckpt_core.tree import tensors
from ckpt_core.weights_only import reason_of, refused_in

# A pickle that uses only these globals is built without reading the values of any tensor.
_PLAIN_GLOBALS = frozenset(
    {
        "collections OrderedDict",
        "collections defaultdict",
        "collections Counter",
        "torch._utils _rebuild_tensor_v2",
        "torch._utils _rebuild_tensor_v3",
        "torch._utils _rebuild_parameter",
        "__builtin__ set",
        "builtins set",
        "_codecs encode",
    }
)


_LARGEST_ITEM = 16  # bytes
_OLD_MAGIC_NUMBER = 0x1950A86A20F9469CFC6C  # of the format of torch before 1.6
_OLD_PICKLES = 5  # pickles in such a file: magic number, version, machine, state, names of its storages


def load_torch_file(
    reader: FileReader, *, map_location: MapLocation = None, weights_only: bool | None = None
) -> tuple[Any, bool]:
    """Load a torch file; also return whether every byte was verified (files of other programs have no digests).

    Raises a ``CheckpointCorruptedError`` that names the tensor if bytes are damaged, a ``CheckpointFormatError`` if it
    is not a torch file, and an ``UnsafeCheckpointError`` if loading would run code that the caller did not allow.
    """
    opened = open_torch_file(reader)
    if opened is None:
        return _torch_load(ReaderIO(reader), reader.path, map_location, weights_only), False
    manifest = opened.manifest
    by_name = {record.name: record for record in manifest.records}
    if not _is_plain(opened.bytes_of(f"{ARCHIVE}/data.pkl")):
        verify_torch_file(reader)
        return _torch_load(ReaderIO(reader), reader.path, map_location, weights_only), True

    names = opened.filled_storages
    filler = StorageCollector(map_location, [by_name[name].size for name in names])
    with without_data():
        result = _build(opened, reader, filler, weights_only)
    if any(storage.device.type == "meta" for storage in filler.storages):
        verify_torch_file(reader)
        return _torch_load(ReaderIO(reader), reader.path, map_location, weights_only), True
    if len(filler.storages) != len(names):
        raise CheckpointCorruptedError(
            "the checkpoint's pickle and its manifest disagree", path=reader.path, remedy=RESUME_FROM_ANOTHER
        )
    memories: dict[str, torch.Tensor] = {}
    longer: list[tuple[torch.Tensor, torch.Tensor]] = []
    for name, storage in zip(names, filler.storages, strict=True):
        record = by_name[name]
        (memory,) = bytes_of([storage])
        if 0 < record.size - memory.nbytes < _LARGEST_ITEM:
            # Bytes after the last whole element, which older versions of this package wrote and torch does not read.
            longer.append((memory, torch.empty(record.size, dtype=torch.uint8)))
            memory = longer[-1][1]
        if memory.nbytes != record.size:
            raise CheckpointCorruptedError(
                "a tensor's size in the pickle differs from its record's",
                path=reader.path,
                key=name,
                remedy=RESUME_FROM_ANOTHER,
            )
        memories[name] = memory
    with _named_by_key(opened, reader):
        opened.read_tensors(reader, memories)
    for target, found in longer:
        target.copy_(found[: target.nbytes])
    return result, True


def peek_torch_file(reader: FileReader) -> Any:
    """Load everything except the tensors' bytes: shapes and dtypes are correct, values are undefined.

    Costs very little, except for a file of torch before 1.6, which is loaded as a whole.
    """
    opened = open_torch_file(reader)
    if opened is None:
        with without_data() if is_archive(reader) else contextlib.nullcontext():
            return _torch_load(ReaderIO(reader), reader.path, "cpu", None)
    with without_data():
        return _build(opened, reader, "cpu", None)


def verify_torch_file(reader: FileReader) -> bool:
    """Compare every byte of the file with its digest; return whether the file has digests.

    For a file of another program, checks what there is instead: the CRC-32 of each record for an archive of
    ``torch.save``; for an older format, that the file can be read to its end.
    """
    opened = open_torch_file(reader)
    if opened is None:
        if is_archive(reader):
            check_archive_records(reader)
        else:
            _check_old_pickles(reader)
        with contextlib.suppress(UnsafeCheckpointError):  # cannot be checked without running code from the file
            peek_torch_file(reader)
        return False
    with _named_by_key(opened, reader):
        opened.read_tensors(reader, {})
    return True


@contextlib.contextmanager
def _named_by_key(opened: OpenedFile, reader: FileReader) -> Iterator[None]:
    """Replace an error about a record with one that names the key of the state."""
    try:
        yield
    except CheckpointCorruptedError as error:
        key = None
        if error.key in opened.manifest.storages:
            with contextlib.suppress(Exception):  # without the key, the error with the record's name is raised
                key = _key_of(error.key, opened, reader)
        if key is None:
            raise
        failure = CheckpointCorruptedError(
            f"the bytes of {key!r} differ from those that were saved", path=error.path, key=key, remedy=error.remedy
        )
    else:
        return
    raise failure


def _key_of(record: str | None, opened: OpenedFile, reader: FileReader) -> str | None:
    collector = StorageCollector("cpu", ())
    with without_data():
        state = _torch_load(SegmentIO(opened.segments, reader.size), reader.path, collector, None)
    places = dict(zip(opened.filled_storages, collector.storages, strict=False))
    wanted = places[str(record)]._cdata
    return next((key for key, tensor in tensors(state) if tensor.untyped_storage()._cdata == wanted), None)


class _Anything(dict[Any, Any]):
    """Stand-in for every object in a pickle that is only inspected: nothing is imported or called."""

    def __new__(cls, *_: Any, **__: Any) -> _Anything:
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def __call__(self, *_: Any) -> _Anything:
        return self

    def __setstate__(self, _: Any) -> None:
        pass

    def append(self, _: Any) -> None:
        pass

    __hash__ = object.__hash__  # type: ignore[assignment]


def _attribute(*_: Any) -> type[_Anything]:
    """Stand in for ``getattr``, with which protocol 2 refers to nested classes and methods."""
    return _Anything


class _Glance(pickle.Unpickler):
    """Unpickles lists, dictionaries and numbers, at the speed of C; every other object becomes a stand-in."""

    def find_class(self, _module: str, name: str) -> Any:
        return _attribute if name == "getattr" else _Anything

    def persistent_load(self, _: Any) -> Any:
        return None


def glance_at_torch_file(reader: FileReader) -> Any:
    """Return the plain values of an archive, without tensors and objects; nothing is verified."""
    pickled = read_pickle(reader)
    try:
        return _Glance(io.BytesIO(pickled)).load()
    except Exception as error:  # invalid bytes can raise anything in pickle
        raise _unreadable(reader.path, error) from error


def _check_old_pickles(reader: FileReader) -> None:
    """Raise for a truncated file of torch before 1.6, and for a file that is not a torch file."""
    file = io.BufferedReader(ReaderIO(reader))
    try:
        pickles = [[argument for _, argument, _ in pickletools.genops(file)] for _ in range(_OLD_PICKLES)]
        if _OLD_MAGIC_NUMBER not in pickles[0]:
            raise ValueError("it is a pickle, but not one that torch.save wrote")
    except (ValueError, IndexError, EOFError, OverflowError, MemoryError) as error:
        raise _unreadable(reader.path, error) from error


def _unreadable(path: str, error: Exception) -> CheckpointFormatError:
    return CheckpointFormatError(
        f"this is not a readable torch checkpoint: {reason_of(error)}",
        path=path,
        remedy="check that the path is a checkpoint and that its copy is complete",
    )


def _build(opened: OpenedFile, reader: FileReader, map_location: MapLocation, weights_only: bool | None) -> Any:
    """Let torch build the objects from the bytes read so far.

    These include gaps that may not be verified yet; if torch fails, they are verified, so that damage is named.
    """
    try:
        return _torch_load(SegmentIO(opened.segments, reader.size), reader.path, map_location, weights_only)
    except CheckpointError:
        opened.read_gaps(reader)
        raise


def _is_plain(pickled: bytes) -> bool:
    try:
        operations = [(opcode.name, argument) for opcode, argument, _ in pickletools.genops(pickled)]
    except (ValueError, IndexError):
        return False
    if any(name in {"STACK_GLOBAL", "INST", "OBJ", "EXT1", "EXT2", "EXT4"} for name, _ in operations):
        return False
    found = {str(argument) for name, argument in operations if name == "GLOBAL"}
    return all(name in _PLAIN_GLOBALS or name.startswith("torch ") for name in found)


def _torch_load(file: io.RawIOBase, path: str, map_location: MapLocation, weights_only: bool | None) -> Any:
    with translated_errors(path):
        return torch.load(io.BufferedReader(file), map_location=map_location, weights_only=weights_only)


@contextlib.contextmanager
def translated_errors(path: str) -> Iterator[None]:
    """Turn what torch raises about a file into a :class:`CheckpointError` that names the file."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # invalid bytes can raise anything in torch and pickle
        what = refused_in(error)
        if what is None:
            raise _unreadable(path, error) from error
        raise UnsafeCheckpointError(
            "the checkpoint holds objects that are not plain data, and rebuilding them could run arbitrary code: "
            f"{what}",
            path=path,
            remedy="pass weights_only=False (trainer.fit(..., weights_only=False)) if you trust the file's "
            "author: it can run arbitrary code; or allow the type with "
            "torch.serialization.add_safe_globals",
        ) from error
