"""Writes the zip structures that a torch file needs: stored records at aligned offsets, sizes beyond 4 GiB, a comment.

Not with ``zipfile``, because the staged buffer is the file's image: every record's offset must be known, and its header
written, before its data exists, and the data must never pass through Python. Source: PKWARE's APPNOTE 6.3, sections 4.3
and 4.5.3.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

_LOCAL_HEADER = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL_HEADER = struct.Struct("<4sHHHHHHIIIHHHHHII")
_ZIP64_END = struct.Struct("<4sQHHIIQQQQ")
_ZIP64_LOCATOR = struct.Struct("<4sIQI")
_END = struct.Struct("<4sHHHHIIH")

_VERSION = 45  # the first version of the zip format with zip64
_UTF8_NAMES = 0x0800
_DOS_DATE = 0x0021  # 1 January 1980: the commit time is in the manifest
_LIMIT32 = 0xFFFFFFFF
_LIMIT16 = 0xFFFF
_ZIP64_EXTRA = 1
_PADDING_EXTRA = 0x4246  # "FB", as torch pads its records


class ZipRecord(NamedTuple):
    """One stored file of the archive."""

    name: str  # its name in the archive
    header_offset: int  # offset of its local header, in bytes from the beginning of the file
    offset: int  # offset of its data
    size: int  # length of its data in bytes
    crc: int = 0  # CRC-32 of the data, or 0 if it was not computed (torch does not check it)


def local_header(name: str, header_offset: int, size: int, *, alignment: int, crc: int = 0) -> tuple[ZipRecord, bytes]:
    """Return the record and its local header, padded so that the data begins at a multiple of ``alignment`` bytes."""
    encoded = name.encode()
    zip64 = struct.pack("<HHQQ", _ZIP64_EXTRA, 16, size, size) if size >= _LIMIT32 else b""
    without_padding = header_offset + _LOCAL_HEADER.size + len(encoded) + len(zip64)
    padding = -without_padding % alignment
    if 0 < padding < 4:  # an extra field has a header of four bytes
        padding += alignment
    extra = zip64 + (struct.pack("<HH", _PADDING_EXTRA, padding - 4) + b"\0" * (padding - 4) if padding else b"")
    size32 = min(size, _LIMIT32)
    header = _LOCAL_HEADER.pack(
        b"PK\3\4", _VERSION, _UTF8_NAMES, 0, 0, _DOS_DATE, crc, size32, size32, len(encoded), len(extra)
    )
    record = ZipRecord(name, header_offset, without_padding + padding, size, crc)
    return record, header + encoded + extra


def central_entries(records: Iterable[ZipRecord]) -> bytes:
    """Return the entries of ``records`` in the archive's central directory."""
    return b"".join(map(_central_entry, records))


def central_end(count: int, size: int, offset: int, comment: bytes) -> bytes:
    """Return the end of a central directory that has ``count`` entries and ``size`` bytes, and begins at ``offset``."""
    end = b""
    if count >= _LIMIT16 or size >= _LIMIT32 or offset >= _LIMIT32:
        end += _ZIP64_END.pack(
            b"PK\6\6", _ZIP64_END.size - 12, _VERSION, _VERSION, 0, 0, count, count, size, offset
        ) + _ZIP64_LOCATOR.pack(b"PK\6\7", 0, offset + size, 1)
    count16 = min(count, _LIMIT16)
    return (
        end
        + _END.pack(b"PK\5\6", 0, 0, count16, count16, min(size, _LIMIT32), min(offset, _LIMIT32), len(comment))
        + comment
    )


def _central_entry(record: ZipRecord) -> bytes:
    encoded = record.name.encode()
    large = b""
    if record.size >= _LIMIT32:
        large += struct.pack("<QQ", record.size, record.size)
    if record.header_offset >= _LIMIT32:
        large += struct.pack("<Q", record.header_offset)
    extra = struct.pack("<HH", _ZIP64_EXTRA, len(large)) + large if large else b""
    size32 = min(record.size, _LIMIT32)
    return (
        _CENTRAL_HEADER.pack(
            b"PK\1\2",
            _VERSION,
            _VERSION,
            _UTF8_NAMES,
            0,
            0,
            _DOS_DATE,
            record.crc,
            size32,
            size32,
            len(encoded),
            len(extra),
            0,
            0,
            0,
            0,
            min(record.header_offset, _LIMIT32),
        )
        + encoded
        + extra
    )
