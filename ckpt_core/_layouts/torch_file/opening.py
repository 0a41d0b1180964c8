"""Opens torch files: reads and verifies everything except the tensors, with few requests.

In our files, everything that is not a tensor is at the end, so one read gets nearly all of it. The bytes right before a
tensor (its header in the archive, and padding, called a gap) are read later, together with the tensor.
"""

from __future__ import annotations

import io
import struct
import sys
import zipfile
import zlib
from collections.abc import Mapping
from typing import NamedTuple

import torch

from ckpt_core._layouts.image import WINDOW
from ckpt_core._layouts.torch_file.filling import RESUME_FROM_ANOTHER, Piece, compare, read_pieces
from ckpt_core._layouts.torch_file.manifest import (
    ARCHIVE,
    FOOTER_SIZE,
    MANIFEST_NAME,
    Footer,
    Manifest,
    RecordDigests,
    pieces,
)
from ckpt_core._layouts.torch_file.segments import SegmentIO, Segments
from ckpt_core.commit_time import Stamp
from ckpt_core.digest import digest_of_parts, digest_with
from ckpt_core.errors import CheckpointCorruptedError, CheckpointFormatError
from ckpt_core.process.threads import run_parallel
from ckpt_core.storage.base import FileReader, ReaderIO

_LOCAL_HEADER_SIZE = 30
_UTF8_NAMES = 0x0800
_ENCRYPTED_OR_PATCHED = 0x2061
_END_BYTES = 256 * 2**10  # enough for most files; a store sends it in less time than another request would take
_LONGEST_END = 64 * 2**20  # bytes
_LONGEST_TAIL = 2**30  # bytes: more than four million tensors need
_LONGEST_GAP = 64 * 2**10  # bytes
_ARCHIVE_START = b"PK\3\4"
_PICKLE_START = b"\x80"  # the beginning of torch's files before the zip format


class OpenedFile(NamedTuple):
    """A torch file of which everything was read except the tensors and the gaps right before them."""

    manifest: Manifest  # verified
    segments: Segments  # what was read; verified, except for the gaps
    # The gaps (bytes that belong to no record) read so far, by the name of the record that follows; the last one is
    # before the manifest's own record.
    gaps: dict[str, bytes]

    @property
    def filled_storages(self) -> list[str]:
        """The names of the storages that are not empty, in the order in which the pickle first refers to them."""
        sizes = {record.name: record.size for record in self.manifest.records}
        return [name for name in self.manifest.storages if sizes[name]]

    def bytes_of(self, name: str) -> bytes:
        """Return the bytes of a record that holds no tensor."""
        found = next(record for record in self.manifest.records if record.name == name)
        return next((data for at, data in self.segments if (at, len(data)) == (found.offset, found.size)), b"")

    def read_tensors(self, reader: FileReader, memories: Mapping[str, torch.Tensor]) -> None:
        """Read and verify the rest of the file.

        A tensor's record is read into its memory in ``memories``; records without memory there are only verified.
        """
        found: list[Piece] = []
        tensors = set(self.manifest.storages)
        for record, gap in zip(self.manifest.records, _gap_begins(self.manifest), strict=False):
            if record.name in tensors:
                before = record.offset if record.name in self.gaps else gap
                memory = memories.get(record.name)
                # An empty tensor has no piece, but there is a gap before it.
                whole = list(pieces(record.offset, record.size)) or [(record.offset, record.offset)]
                for index, (begin, end) in enumerate(whole):
                    found.append(Piece(record, index, begin, end, begin if index else before, memory))
        more = read_pieces(reader, digest_with(self.manifest.algorithm, path=reader.path), found)
        self._check_structure(reader.path, more)

    def read_gaps(self, reader: FileReader) -> None:
        """Read the missing gaps (bytes that belong to no record), and verify all gaps."""
        ends = zip(self.manifest.records, _gap_begins(self.manifest), strict=False)
        missing = [(record, begin) for record, begin in ends if record.name not in self.gaps]
        more: dict[str, bytes] = {}

        def read(job: tuple[RecordDigests, int]) -> None:
            more[job[0].name] = _read(reader, job[1], job[0].offset)

        run_parallel(read, missing, threads=reader.threads)
        self._check_structure(reader.path, more)

    def _check_structure(self, path: str, more: Mapping[str, bytes]) -> None:
        gaps = {**self.gaps, **more}
        names = [*(record.name for record in self.manifest.records), MANIFEST_NAME]
        if digest_of_parts(gaps.get(name, b"") for name in names) != self.manifest.structure:
            raise _damaged("the archive's structure differs from what was saved", path)


def _gap_begins(manifest: Manifest) -> list[int]:
    """Return the offsets at which the gaps before each record, and before the manifest's own record, begin."""
    return [0, *(record.offset + record.size for record in manifest.records)]


def open_torch_file(reader: FileReader) -> OpenedFile | None:
    """Read and verify everything except tensors and the gaps before them; None if the file has no digests of ours."""
    path, size = reader.path, reader.size
    end = _End(reader)
    found = _read_tail(reader, end)
    if found is None:
        return None
    footer, tail, encoded = found
    manifest = Manifest.decode(encoded, path=path, end=footer.tail_offset)

    names = set(manifest.storages)
    end.extend(max((r.offset + r.size for r in manifest.records if r.name in names), default=0))
    hash_of = digest_with(manifest.algorithm, path=path)
    segments: Segments = [(footer.tail_offset, tail + footer.encode())]
    gaps: dict[str, bytes] = {}
    stops = [*((record.offset, record) for record in manifest.records), (footer.tail_offset, None)]
    for gap, (stop, record) in zip(_gap_begins(manifest), stops, strict=True):
        # The gap before a tensor is read later, with the tensor, unless it is too long to be a header and padding.
        if record is None or record.name not in names or stop - gap > _LONGEST_GAP:
            gaps[MANIFEST_NAME if record is None else record.name] = data = end.read(gap, stop)
            segments.append((gap, data))
        if record is not None and record.name not in names:
            data = end.read(record.offset, record.offset + record.size)
            for index, (first, last) in enumerate(pieces(record.offset, record.size)):
                cut = memoryview(data)[first - record.offset : last - record.offset]
                compare(hash_of, cut, record, index, path)
            segments.append((record.offset, data))
    if manifest.records and manifest.records[0].name not in gaps:
        segments.append((0, _ARCHIVE_START))  # torch looks at these bytes first; the real ones are verified later
    if not {f"{ARCHIVE}/data.pkl", f"{ARCHIVE}/byteorder"} <= {record.name for record in manifest.records} - names:
        raise _damaged("the archive lacks its pickle", path)
    _check_archive(SegmentIO(segments, size), size, path)
    opened = OpenedFile(manifest, segments, gaps)
    if opened.bytes_of(f"{ARCHIVE}/byteorder") != sys.byteorder.encode():
        raise CheckpointFormatError(
            "the checkpoint was written on a machine of the other byte order",
            path=path,
            remedy="load it there and save it with torch.save",
        )
    if len(gaps) > len(manifest.records):
        opened.read_gaps(reader)  # all gaps were read already: this verifies them
    return opened


def read_stamp(reader: FileReader) -> Stamp | None:
    """Return a file's commit time and step, reading only its end; None if the file has no digests of ours."""
    found = _read_tail(reader, _End(reader))
    return None if found is None else Stamp.read(found[2])


def _read_tail(reader: FileReader, end: _End) -> tuple[Footer, bytes, bytes] | None:
    """Return the footer, the verified bytes from the manifest's record on, and the bytes of the manifest."""
    path, size = reader.path, reader.size
    footer = Footer.decode(end.read(max(0, size - FOOTER_SIZE), size), path=path)
    if footer is None:
        _reject_damaged_or_foreign(reader)
        return None
    if footer.tail_offset + _LOCAL_HEADER_SIZE > size - FOOTER_SIZE:
        raise _damaged("the footer points outside the file", path)
    if size - footer.tail_offset > _LONGEST_TAIL:
        raise _damaged(f"a manifest of {size - footer.tail_offset} bytes is too large", path)
    end.extend(footer.tail_offset)
    tail = end.read(footer.tail_offset, size - FOOTER_SIZE)
    # The footer always uses the current algorithm: a change would change the version number in the footer.
    if digest_of_parts([tail]) != footer.tail_digest:
        raise _damaged("the manifest differs from what was saved", path)
    name_length, extra_length = struct.unpack_from("<HH", tail, 26)
    (length,) = struct.unpack_from("<I", tail, 22)
    begin = _LOCAL_HEADER_SIZE + name_length + extra_length
    return footer, tail, tail[begin : begin + length]


class _End:
    """The last bytes of a file, read at once: in our files, that is everything except the tensors."""

    def __init__(self, reader: FileReader) -> None:
        if reader.size == 0:
            raise CheckpointCorruptedError("the checkpoint is empty", path=reader.path, remedy=RESUME_FROM_ANOTHER)
        self._reader = reader
        self._begin = max(0, reader.size - _END_BYTES)
        self._data = _read(reader, self._begin, reader.size)

    def extend(self, begin: int) -> None:
        """Read more, so that the end begins at ``begin``, if that is earlier and not too far away."""
        if 0 < self._begin - begin <= _LONGEST_END:
            self._data = _read(self._reader, begin, self._begin) + self._data
            self._begin = begin

    def read(self, begin: int, end: int) -> bytes:
        """Return the bytes from ``begin`` up to ``end``."""
        if begin < self._begin:
            return _read(self._reader, begin, end)
        return self._data[begin - self._begin : end - self._begin]


def _damaged(message: str, path: str) -> CheckpointCorruptedError:
    return CheckpointCorruptedError(message, path=path, remedy=RESUME_FROM_ANOTHER)


def _reject_damaged_or_foreign(reader: FileReader) -> None:
    """Raise if the file is one of ours or a zip archive and its end is lost, or if torch cannot have written it."""
    end = _read(reader, max(0, reader.size - WINDOW // 16), reader.size)
    begin = _read(reader, 0, min(reader.size, 4))
    if MANIFEST_NAME.encode() in end:
        raise _damaged("the end of the checkpoint is damaged", reader.path)
    if _ARCHIVE_START.startswith(begin):
        if b"PK\5\6" not in end:
            raise _damaged("the checkpoint is truncated", reader.path)
        _check_archive(ReaderIO(reader), reader.size, reader.path)
    elif not begin.startswith(_PICKLE_START):
        raise CheckpointFormatError(
            "this is not a torch checkpoint: it is neither a zip archive nor a pickle",
            path=reader.path,
            remedy="check that the path is a checkpoint",
        )


def is_archive(reader: FileReader) -> bool:
    """Return whether a file begins like a zip archive."""
    return _read(reader, 0, min(reader.size, len(_ARCHIVE_START))) == _ARCHIVE_START


def check_archive_records(reader: FileReader) -> None:
    """Compare each record of an archive of ``torch.save`` with its CRC-32, unless that was left out."""
    records = _check_archive(ReaderIO(reader), reader.size, reader.path)

    def check(record: zipfile.ZipInfo) -> None:
        if not _is_as_written(reader, record):
            raise CheckpointCorruptedError(
                "a record of the archive differs from what torch.save wrote",
                path=reader.path,
                key=record.filename,
                remedy=RESUME_FROM_ANOTHER,
            )

    run_parallel(check, records, threads=min(reader.threads, max(1, len(records))))


def read_pickle(reader: FileReader) -> bytes:
    """Return the unverified pickle of an archive of ``torch.save``."""
    records = _check_archive(ReaderIO(reader), reader.size, reader.path)
    record = next(record for record in records if record.filename.endswith("/data.pkl"))
    header = _read(reader, record.header_offset, min(record.header_offset + _LOCAL_HEADER_SIZE, reader.size))
    begin = record.header_offset + len(header) + sum(struct.unpack_from("<HH", header.ljust(_LOCAL_HEADER_SIZE), 26))
    return _read(reader, begin, max(begin, min(begin + record.file_size, reader.size)))


def _is_as_written(reader: FileReader, record: zipfile.ZipInfo) -> bool:
    name = record.orig_filename.encode("utf-8" if record.flag_bits & _UTF8_NAMES else "cp437")
    data_begin = record.header_offset + _LOCAL_HEADER_SIZE + len(name)
    if data_begin > reader.size or record.flag_bits & _ENCRYPTED_OR_PATCHED:
        return False
    header = _read(reader, record.header_offset, data_begin)
    name_length, extra_length = struct.unpack_from("<HH", header, 26)
    begin = data_begin + extra_length
    end = begin + record.file_size
    is_there = header.startswith(_ARCHIVE_START) and name_length == len(name) and header.endswith(name)
    if not is_there or end > reader.size:
        return False
    crc = 0
    for first in range(begin, end, WINDOW // 4):
        crc = zlib.crc32(_read(reader, first, min(first + WINDOW // 4, end)), crc)
    return record.CRC in (crc, 0)  # 0 if torch.serialization.set_crc32_options turned it off


def _check_archive(file: io.RawIOBase, size: int, path: str) -> list[zipfile.ZipInfo]:
    """Return the records of an archive; raise if torch cannot have written it, for example if it is compressed."""
    try:
        with zipfile.ZipFile(io.BufferedReader(file)) as archive:
            records = archive.infolist()
    except (zipfile.BadZipFile, ValueError, IndexError, struct.error, NotImplementedError, MemoryError) as error:
        raise CheckpointFormatError(
            f"the archive's directory is invalid: {error}",
            path=path,
            remedy="check that the path is a checkpoint and that its copy is complete",
        ) from error
    stored = all(record.compress_type == zipfile.ZIP_STORED for record in records)
    outside = any(not 0 <= record.header_offset < size for record in records)
    if not stored or outside or sum(record.file_size for record in records) > size:
        raise CheckpointFormatError(
            "the archive's records are compressed, overlap or lie outside of it, which torch does not write",
            path=path,
            remedy="do not use this file: it may be designed to exhaust memory",
        )
    if not any(record.filename.endswith("/data.pkl") for record in records):
        raise CheckpointFormatError(
            "this zip archive is not a torch checkpoint: it has no data.pkl",
            path=path,
            remedy="check that the path is a checkpoint",
        )
    return records


def _read(reader: FileReader, begin: int, end: int) -> bytes:
    try:
        return reader.read(begin, end)
    except MemoryError as error:  # a sparse file can claim any size
        raise _damaged(f"a part of {end - begin} bytes that holds no tensor is too large", reader.path) from error
