"""Encodes and decodes the manifest of a torch file (its records and their digests), and the footer that locates it.

The manifest is one more record of the archive. The footer is the zip comment at the very end of the file; it always has
``FOOTER_SIZE`` bytes, and holds the offset of the manifest's record and the digest of everything from there to the
comment. So every byte of the file is covered: records by their digests, everything between them by the ``structure``
digest, the rest by the footer.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from ckpt_core import digest
from ckpt_core._layouts.image import WINDOW
from ckpt_core.commit_time import NO_STAMP, Stamp
from ckpt_core.errors import CheckpointCorruptedError, CheckpointFormatError

FORMAT_VERSION = 1
ARCHIVE = "archive"
MANIFEST_NAME = f"{ARCHIVE}/.ckpt_core/manifest.json"
_FORMAT = "ckpt_core.torch_file"
_FOOTER = re.compile(rb"ckpt_core torch_file (\d{4}) ([0-9a-f]{16}) ([0-9a-f]{16})")
FOOTER_SIZE = len(b"ckpt_core torch_file 0001 0123456789abcdef 0123456789abcdef")
_MAXIMUM_RECORDS = 10_000_000
_MOST_OTHERS = 1000  # records that are not tensors; this package writes three


@dataclasses.dataclass(frozen=True)
class Footer:
    """The footer of a torch file, stored as the zip comment."""

    tail_offset: int  # offset of the manifest's record, in bytes from the beginning of the file
    tail_digest: str  # digest of the bytes from there to the comment

    def encode(self) -> bytes:
        return f"ckpt_core torch_file {FORMAT_VERSION:04d} {self.tail_offset:016x} {self.tail_digest}".encode()

    @classmethod
    def decode(cls, data: bytes, *, path: str) -> Footer | None:
        """Decode the comment; return None if it is not one of ours."""
        match = _FOOTER.fullmatch(data)
        if match is None:
            return None
        version = int(match[1])
        if version != FORMAT_VERSION:
            raise CheckpointFormatError(
                f"the checkpoint has format version {version}; this version of ckpt_core reads version "
                f"{FORMAT_VERSION}",
                path=path,
                remedy="upgrade ckpt_core to the version that wrote the checkpoint",
            )
        return cls(int(match[2], 16), match[3].decode())


class RecordDigests(NamedTuple):
    """One record of the archive and the digests of its pieces."""

    name: str  # name in the archive
    offset: int  # offset of its data in the file, in bytes
    size: int  # length in bytes
    digests: tuple[str, ...]  # one for each piece (see pieces)


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The manifest of a torch file: its records, storages and digests."""

    records: tuple[RecordDigests, ...]  # all records except the manifest itself, in file order
    storages: tuple[str, ...]  # record names in the order in which the pickle first refers to them
    structure: str  # digest of all bytes before the manifest's record that belong to no record's data
    algorithm: str = digest.ALGORITHM  # name of the digest algorithm
    stamp: Stamp = NO_STAMP  # commit time and training step

    def encode(self) -> bytes:
        """Return the manifest as JSON."""
        document = {
            "format": _FORMAT,
            "version": FORMAT_VERSION,
            **self.stamp.fields(),
            "digest": self.algorithm,
            "window": WINDOW,
            "structure": self.structure,
            "storages": self.storages,
            "records": self.records,
        }
        return json.dumps(document, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes, *, path: str, end: int) -> Manifest:
        """Decode and validate a manifest whose digest was compared; no record may reach beyond the offset ``end``."""
        try:
            document = json.loads(data)
            return dataclasses.replace(cls._checked(document, end), stamp=Stamp.read(data))
        except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
            raise CheckpointCorruptedError(
                f"the checkpoint's manifest is invalid: {error}", path=path, remedy="resume from another checkpoint"
            ) from error

    @classmethod
    def _checked(cls, document: Any, end: int) -> Manifest:
        if document["format"] != _FORMAT or document["version"] != FORMAT_VERSION or document["window"] != WINDOW:
            raise ValueError("unexpected format, version or window")
        records = []
        position = 0
        if len(document["records"]) > _MAXIMUM_RECORDS:
            raise ValueError("too many records")
        for name, offset, size, digests in document["records"]:
            if not (isinstance(name, str) and type(offset) is int and type(size) is int):
                raise ValueError("a record's fields have the wrong types")
            if offset < position or size < 0 or offset + size > end:
                raise ValueError(f"record {name!r} overlaps another or lies outside the file")
            if len(digests) != sum(1 for _ in pieces(offset, size)) or not all(isinstance(d, str) for d in digests):
                raise ValueError(f"record {name!r} has the wrong number of digests")
            position = offset + size
            records.append(RecordDigests(name, offset, size, tuple(digests)))
        names = {record.name for record in records}
        storages = document["storages"]
        if len(records) - len(storages) > _MOST_OTHERS:
            raise ValueError("too many records that hold no tensor")
        if len(names) != len(records) or len(set(storages)) != len(storages) or not names.issuperset(storages):
            raise ValueError("names of records or storages are not unique, or a storage has no record")
        return cls(tuple(records), tuple(storages), str(document["structure"]), str(document["digest"]))


def pieces(offset: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield the ``(begin, end)`` file offsets of a record's pieces: the record cut at multiples of ``WINDOW``."""
    position, end = offset, offset + size
    while position < end:
        stop = min(end, (position // WINDOW + 1) * WINDOW)
        yield position, stop
        position = stop
