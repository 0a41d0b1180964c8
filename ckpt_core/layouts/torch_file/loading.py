"""Reading a torch file: every byte is compared with its digest before the caller sees a tensor.

``torch.load`` builds the objects from verified bytes in memory, with empty storages (``torch.serialization.skip_data``);
then the storages are filled from the file in parallel, each piece checked as it arrives. A pickle that needs its tensors'
values while it is being read (sparse tensors, objects with a ``__setstate__``) cannot be loaded so; its file is verified
first and then given to ``torch.load`` as it is.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import pickletools
import re
import struct
import sys
import zipfile
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.serialization import skip_data

from ckpt_core.digest import digest_of_parts, digest_with
from ckpt_core.errors import (
    CheckpointCorruptedError,
    CheckpointError,
    CheckpointFormatError,
    UnsafeCheckpointError,
)
from ckpt_core.layouts.torch_file.filling import LONGEST_RUN, RESUME_FROM_ANOTHER, Piece, compare, read_pieces
from ckpt_core.layouts.torch_file.manifest import (
    ARCHIVE,
    FOOTER_SIZE,
    MANIFEST_NAME,
    WINDOW,
    Footer,
    Manifest,
    RecordDigests,
    pieces,
)
from ckpt_core.layouts.torch_file.segments import SegmentIO, Segments
from ckpt_core.layouts.torch_file.storage_collector import MapLocation, StorageCollector
from ckpt_core.memory import bytes_of
from ckpt_core.parallel import run_parallel
from ckpt_core.storage.base import FileReader, ReaderIO

__all__ = ["load_torch_file", "peek_torch_file", "verify_torch_file"]

_LOCAL_HEADER_SIZE = 30
_PICKLE_START = b"\x80"  # of torch's files before the zip format
# A pickle made of nothing but these is built without looking at a tensor's values.
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


def load_torch_file(
    reader: FileReader, *, map_location: MapLocation = None, weights_only: bool | None = None
) -> tuple[Any, bool]:
    """Load a torch file.

    Args:
        reader: The open file.
        map_location: As for ``torch.load``.
        weights_only: As for ``torch.load``.

    Returns:
        The object, and whether every byte was verified: False for files that others wrote, which hold no digests.

    Raises:
        CheckpointCorruptedError: The file is empty, truncated, or a byte differs; the error names the tensor.
        CheckpointFormatError: The file is no torch file, or of a newer format.
        UnsafeCheckpointError: Reading it would run code and ``weights_only`` is not False.
    """
    opened = _open(reader)
    if opened is None:
        return _torch_load(ReaderIO(reader), reader.path, map_location, weights_only), False
    manifest, segments = opened
    by_name = {record.name: record for record in manifest.records}
    pickled = _record_bytes(segments, by_name[f"{ARCHIVE}/data.pkl"])
    if not _is_plain(pickled):
        verify_torch_file(reader)
        return _torch_load(ReaderIO(reader), reader.path, map_location, weights_only), True

    filler = StorageCollector(map_location, [by_name[name].size for name in manifest.storages])
    with skip_data():
        result = _torch_load(SegmentIO(segments, reader.size), reader.path, filler, weights_only)
    if len(filler.storages) != len(manifest.storages):
        raise CheckpointCorruptedError(
            "the checkpoint's pickle and its manifest disagree", path=reader.path, remedy=RESUME_FROM_ANOTHER
        )
    found: list[Piece] = []
    for name, storage in zip(manifest.storages, filler.storages, strict=True):
        record = by_name[name]
        if storage.nbytes() != record.size:
            raise CheckpointCorruptedError(
                "a tensor's size in the pickle differs from its record's",
                path=reader.path,
                key=name,
                remedy=RESUME_FROM_ANOTHER,
            )
        if record.size:
            memory = bytes_of(storage)
            found.extend(Piece(record, i, *piece, memory) for i, piece in enumerate(pieces(record.offset, record.size)))
    hash_of = digest_with(manifest.algorithm, path=reader.path)
    read_pieces(reader, hash_of, found)
    return result, True


def peek_torch_file(reader: FileReader) -> Any:
    """Load everything but the tensors' bytes: their shapes and types are right, their values are undefined.

    Costs next to nothing for a file of ours. A file that another program wrote is loaded whole.

    Raises:
        CheckpointError: As :func:`load_torch_file`; damage inside a tensor is not found.
    """
    opened = _open(reader)
    if opened is None:
        return _torch_load(ReaderIO(reader), reader.path, "cpu", None)
    with skip_data():
        return _torch_load(SegmentIO(opened[1], reader.size), reader.path, "cpu", None)


def verify_torch_file(reader: FileReader) -> bool:
    """Compare every byte of the file with its digest.

    Returns:
        True if the file holds digests and all of them match; False if it holds none (another program wrote it).

    Raises:
        CheckpointCorruptedError: The file is empty, truncated, or a byte differs; the error names the record.
        CheckpointFormatError: The file is no torch file, or of a newer format.
    """
    opened = _open(reader)
    if opened is None:
        return False
    manifest, _ = opened
    hash_of = digest_with(manifest.algorithm, path=reader.path)
    found = [
        Piece(record, index, *piece, None)
        for record in manifest.records
        for index, piece in enumerate(pieces(record.offset, record.size))
    ]
    read_pieces(reader, hash_of, found)
    return True


def _open(reader: FileReader) -> tuple[Manifest, Segments] | None:
    """Read and verify everything but the tensors; None if the file holds no digests of ours."""
    path, size = reader.path, reader.size
    if size == 0:
        raise CheckpointCorruptedError("the checkpoint is empty", path=path, remedy=RESUME_FROM_ANOTHER)
    footer = Footer.decode(_read(reader, max(0, size - FOOTER_SIZE), size), path=path)
    if footer is None:
        _reject_damaged_or_foreign(reader)
        return None
    if footer.tail_offset + _LOCAL_HEADER_SIZE > size - FOOTER_SIZE:
        raise _damaged("the footer points outside the file", path)
    tail = _read(reader, footer.tail_offset, size - FOOTER_SIZE)
    # The footer is always written with the current algorithm: its own version number covers a change.
    if digest_of_parts([tail]) != footer.tail_digest:
        raise _damaged("the manifest differs from what was saved", path)
    name_length, extra_length = struct.unpack_from("<HH", tail, 26)
    (length,) = struct.unpack_from("<I", tail, 22)
    begin = _LOCAL_HEADER_SIZE + name_length + extra_length
    manifest = Manifest.decode(tail[begin : begin + length], path=path, end=footer.tail_offset)

    names = set(manifest.storages)
    gaps = _read_gaps(reader, manifest, footer.tail_offset)
    if digest_of_parts(gap for _, gap in gaps) != manifest.structure:
        raise _damaged("the archive's structure differs from what was saved", path)
    segments: Segments = [*gaps, (footer.tail_offset, tail + footer.encode())]
    hash_of = digest_with(manifest.algorithm, path=path)
    for record in manifest.records:
        if record.name not in names:
            data = _read(reader, record.offset, record.offset + record.size)
            for index, (first, last) in enumerate(pieces(record.offset, record.size)):
                cut = memoryview(data)[first - record.offset : last - record.offset]
                compare(hash_of, cut, record, index, path)
            segments.append((record.offset, data))
    by_name = {record.name: record for record in manifest.records}
    if not {f"{ARCHIVE}/data.pkl", f"{ARCHIVE}/byteorder"} <= by_name.keys() - names:
        raise _damaged("the archive lacks its pickle", path)
    _check_archive(SegmentIO(segments, size), size, path)
    if _record_bytes(segments, by_name[f"{ARCHIVE}/byteorder"]) != sys.byteorder.encode():
        raise CheckpointFormatError(
            "the checkpoint was written on a machine of the other byte order",
            path=path,
            remedy="load it there and save it with torch.save",
        )
    return manifest, segments


def _read_gaps(reader: FileReader, manifest: Manifest, end: int) -> Segments:
    """Read what stands between the records, in file order; several at a time, for a store answers each only after a while.

    What stands close together is read by one request, with the records between.
    """
    begins = [0, *(record.offset + record.size for record in manifest.records)]
    ends = [*(record.offset for record in manifest.records), end]
    found: dict[int, bytes] = {}
    runs: list[list[int]] = []
    for index, begin in enumerate(begins):
        if (
            runs
            and begin - ends[index - 1] <= reader.request_bytes
            and ends[index] - begins[runs[-1][0]] <= LONGEST_RUN
        ):
            runs[-1].append(index)
        else:
            runs.append([index])

    def read(run: Sequence[int]) -> None:
        first = begins[run[0]]
        data = _read(reader, first, ends[run[-1]])
        for index in run:
            found[index] = data[begins[index] - first : ends[index] - first]

    run_parallel(read, runs, threads=reader.threads)
    return [(begins[index], found[index]) for index in range(len(begins))]


def _damaged(message: str, path: str) -> CheckpointCorruptedError:
    return CheckpointCorruptedError(message, path=path, remedy=RESUME_FROM_ANOTHER)


def _reject_damaged_or_foreign(reader: FileReader) -> None:
    """Raise if the file was ours, or a zip archive, and has lost its end, or if torch cannot have written it."""
    end = _read(reader, max(0, reader.size - WINDOW // 16), reader.size)
    begin = _read(reader, 0, min(reader.size, 4))
    if MANIFEST_NAME.encode() in end:
        raise _damaged("the end of the checkpoint is damaged", reader.path)
    if b"PK\3\4".startswith(begin):
        if b"PK\5\6" not in end:
            raise _damaged("the checkpoint is truncated", reader.path)
        _check_archive(ReaderIO(reader), reader.size, reader.path)
    elif not begin.startswith(_PICKLE_START):
        raise CheckpointFormatError(
            "this is not a torch checkpoint: it is neither a zip archive nor a pickle",
            path=reader.path,
            remedy="check that the path is a checkpoint",
        )


def _check_archive(file: io.RawIOBase, size: int, path: str) -> None:
    """Refuse an archive that torch cannot have written, above all one that unpacks to more than the file's own size."""
    try:
        with zipfile.ZipFile(io.BufferedReader(file)) as archive:
            records = archive.infolist()
    except (zipfile.BadZipFile, ValueError, IndexError, struct.error, NotImplementedError, MemoryError) as error:
        raise CheckpointFormatError(f"the archive's directory makes no sense: {error}", path=path) from error
    stored = all(record.compress_type == zipfile.ZIP_STORED for record in records)
    if not stored or sum(record.file_size for record in records) > size:
        raise CheckpointFormatError(
            "the archive's records are compressed or overlap, which torch does not write",
            path=path,
            remedy="do not use this file: it may be made to fill the memory",
        )
    if not any(record.filename.endswith("/data.pkl") for record in records):
        raise CheckpointFormatError(
            "this zip archive is not a torch checkpoint: it has no data.pkl",
            path=path,
            remedy="check that the path is a checkpoint",
        )


def _read(reader: FileReader, begin: int, end: int) -> bytes:
    try:
        data = bytearray(end - begin)
    except MemoryError as error:  # a sparse file can claim any size
        raise _damaged(f"a part of {end - begin} bytes that holds no tensor is too large", reader.path) from error
    if data:
        reader.read_into(begin, memoryview(data))
    return bytes(data)


def _record_bytes(segments: Segments, record: RecordDigests) -> bytes:
    return next((data for offset, data in segments if offset == record.offset and len(data) == record.size), b"")


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
    with _translated_errors(path):
        return torch.load(io.BufferedReader(file), map_location=map_location, weights_only=weights_only)


@contextlib.contextmanager
def _translated_errors(path: str) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:
        if "weights_only" in str(error) or "Unsupported" in str(error):
            found = re.search(r"WeightsUnpickler error:\s*(.*?)(?: was not an allowed|$)", str(error), re.MULTILINE)
            what = found[1] if found else _first_lines(error)
            raise UnsafeCheckpointError(
                f"the checkpoint holds objects that are not plain data, and rebuilding them could run any code: {what}",
                path=path,
                remedy="pass weights_only=False if you trust the file's author (it can run any code), or allow the type "
                "with torch.serialization.add_safe_globals",
            ) from error
        raise CheckpointFormatError(f"this is not a torch checkpoint: {_first_lines(error)}", path=path) from error
    except Exception as error:  # bytes that make no sense fail anywhere in torch and pickle
        raise CheckpointFormatError(
            f"this is not a readable torch checkpoint: {_first_lines(error)}",
            path=path,
            remedy="check that the path is a checkpoint and that its copy is complete",
        ) from error


def _first_lines(error: BaseException) -> str:
    return " ".join(str(error).split())[:600]
