"""Writes torch files: lays out the zip archive, and produces its bytes from staged or live tensors.

Tensors come first, then the pickle, the manifest and the archive's directory. So the offset of a tensor depends only on
the sizes of the tensors, the copy can start before anything is pickled, and the staged buffer is the image of the file.
"""

from __future__ import annotations

import bisect
import ctypes
import dataclasses
import functools
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ckpt_core._layouts.image import WINDOW, Memory
from ckpt_core._layouts.torch_file.default_reading import refused_by_default
from ckpt_core._layouts.torch_file.manifest import (
    ARCHIVE,
    MANIFEST_NAME,
    Footer,
    Manifest,
    RecordDigests,
    pieces,
)
from ckpt_core._layouts.torch_file.pickling import PickledState, StorageTable, collect_storages, pickle_state
from ckpt_core._layouts.torch_file.zip_format import ZipRecord, central_end, central_entries, local_header
from ckpt_core.buffers import Move, StagingBuffer, bytes_of
from ckpt_core.commit_time import Stamp, commit_time, step_in
from ckpt_core.digest import digest, digest_of_parts

_ALIGNMENT = 64  # bytes, as in torch: a memory-mapped tensor can be used in place
_BLOCK = 4096  # bytes: the region's size is a multiple, so that the tail begins at a block of the disk
_ARCHIVE_START = b"PK\3\4"  # the bytes that torch looks at first
_VERSION_RECORD = b"3\n"  # of torch's archive format: the newest version that needs only stored records


@dataclasses.dataclass(frozen=True)
class _Region:
    """The layout of the tensors' part of the file; depends only on their sizes, and is cached for the next save."""

    records: tuple[ZipRecord, ...]
    headers: tuple[bytes, ...]
    size: int

    @functools.cached_property
    def entries(self) -> bytes:
        """The entries of the tensors in the archive's directory."""
        return central_entries(self.records)

    @functools.cached_property
    def gaps(self) -> list[bytes]:
        """The bytes between the tensors, in file order."""
        result, position = [], 0
        for record, header in zip(self.records, self.headers, strict=True):
            result.append(bytes(record.header_offset - position) + header)
            position = record.offset + record.size
        result.append(bytes(self.size - position))
        return result


@functools.lru_cache(maxsize=8)
def _region(sizes: tuple[int, ...]) -> _Region:
    records, headers, position = [], [], 0
    for index, size in enumerate(sizes):
        record, header = local_header(f"{ARCHIVE}/data/{index}", position, size, alignment=_ALIGNMENT)
        records.append(record)
        headers.append(header)
        position = record.offset + size
    return _Region(tuple(records), tuple(headers), -(-position // _BLOCK) * _BLOCK)


class FileImage:
    """The bytes of a torch file, either staged in a buffer or still in the live tensors.

    It can be written while it is still being staged: :meth:`digested_window` waits for its bytes
    (``wait_staged(offset)`` returns when the buffer is filled up to an offset). :meth:`tail` needs :meth:`add_pickle`.
    """

    def __init__(
        self,
        region: _Region,
        sources: Sequence[torch.Tensor] = (),
        staged: StagingBuffer | None = None,
        wait_staged: Callable[[int], None] | None = None,
    ) -> None:
        self.region_size = region.size
        self._region = region
        self._sources = list(sources)
        self._staged = staged
        self._wait_staged = wait_staged
        self._pickle: PickledState | None = None
        self._references: list[int] = []
        self._late: list[bytes] = []
        self._step: int | None = None
        self._digests: list[dict[int, str]] = [{} for _ in region.records]

    def add_pickle(
        self, pickle: PickledState, references: list[int], late: list[bytes], step: int | None = None
    ) -> None:
        """Add everything except the tensors; the writer thread finishes ``pickle``.

        ``references`` are the indices of the storages in the order in which the pickle first refers to them; ``late``
        has the bytes of the storages that are not in the region.
        """
        self._pickle, self._references, self._late, self._step = pickle, references, late, step

    @functools.cached_property
    def _pickled(self) -> bytes:
        assert self._pickle is not None  # add_pickle() comes first
        return self._pickle.finish()

    @property
    def is_staged(self) -> bool:
        return self._staged is not None

    @property
    def approximate_size(self) -> int:
        """The file's size in bytes, without its last few kilobytes, and without the pickle until that is known."""
        pickle_size = 0 if self._pickle is None else self._pickle.approximate_size
        return self.region_size + pickle_size + sum(map(len, self._late))

    def digested_window(self, begin: int, scratch: Memory | None) -> memoryview:
        """Return the page-aligned bytes of the window that starts at ``begin``, and keep their digests."""
        end = min(begin + WINDOW, self.region_size)
        if self._wait_staged is not None:
            self._wait_staged(end)
        if self._staged is not None:
            memory = self._staged.memory[begin:end]
        else:
            assert scratch is not None
            memory = scratch.memory[: end - begin]
        position = begin
        for index in self._records_in(begin, end):
            record, header = self._region.records[index], self._region.headers[index]
            _put(memory, begin, position, bytes(max(0, min(end, record.header_offset) - position)))
            _put(memory, begin, record.header_offset, header)
            first, last = max(begin, record.offset), min(end, record.offset + record.size)
            if first < last:
                if scratch is not None and self._staged is None:
                    source = self._sources[index][first - record.offset : last - record.offset]
                    _copy(source, scratch.tensor[first - begin : last - begin])
                self._digests[index][first] = digest(memory[first - begin : last - begin])
            position = max(position, min(end, record.offset + record.size))
        _put(memory, begin, position, bytes(end - position))
        return memory

    def _records_in(self, begin: int, end: int) -> range:
        """Return the indices of the records whose headers or data are at these bytes."""
        records = self._region.records
        first, last = (
            bisect.bisect_right(records, position, key=lambda record: record.offset + record.size)
            for position in (begin, end - 1)
        )
        return range(first, min(last + 1, len(records)))

    def forget_sources(self) -> None:
        """Release the live tensors, all of whose bytes were taken."""
        self._sources = []

    def tail(self) -> bytes:
        region = self._region
        records = [
            RecordDigests(r.name, r.offset, r.size, tuple(found[begin] for begin, _ in pieces(r.offset, r.size)))
            for r, found in zip(region.records, self._digests, strict=True)
        ]
        gaps = list(region.gaps)
        entries = []  # of the records that are not tensors
        body = bytearray()
        position = region.size
        small = [
            *((f"data/{len(region.records) + i}", data) for i, data in enumerate(self._late)),
            ("data.pkl", self._pickled),
            ("byteorder", sys.byteorder.encode()),
            ("version", _VERSION_RECORD),
        ]
        for name, data in small:
            entry, header = local_header(
                f"{ARCHIVE}/{name}", position, len(data), alignment=_ALIGNMENT, crc=zlib.crc32(data)
            )
            cut = memoryview(data)
            found = tuple(digest(cut[b - entry.offset : e - entry.offset]) for b, e in pieces(entry.offset, entry.size))
            records.append(RecordDigests(entry.name, entry.offset, entry.size, found))
            gaps.append(header)
            entries.append(entry)
            body += header
            body += data
            position = entry.offset + entry.size
        storages = tuple(f"{ARCHIVE}/data/{index}" for index in self._references)
        stamp = Stamp(commit_time(), self._step)
        manifest = Manifest(tuple(records), storages, digest_of_parts(gaps), stamp=stamp).encode()
        entry, header = local_header(
            MANIFEST_NAME, position, len(manifest), alignment=_ALIGNMENT, crc=zlib.crc32(manifest)
        )
        entries.append(entry)
        closing = header + manifest
        comment = Footer(position, "0" * 16).encode()
        directory = region.entries + central_entries(entries)
        count = len(region.records) + len(entries)
        closing += directory + central_end(count, len(directory), position + len(closing), comment)
        covered = memoryview(closing)[: len(closing) - len(comment)]
        return bytes(body) + bytes(covered) + Footer(position, digest(covered)).encode()

    def refused_by_default(self) -> dict[str, str]:
        """Return what torch's default loading will refuse, by key; called when every window was taken."""
        tail = self.tail()
        segments = [(0, _ARCHIVE_START), (self.region_size, tail)]
        return refused_by_default(segments, self.region_size + len(tail), self._pickled)


def _put(memory: memoryview, begin: int, position: int, data: bytes) -> None:
    """Write ``data``, which is at ``position`` in the file, into the window at ``begin``, as far as it lies in it."""
    first, last = max(begin, position), min(begin + len(memory), position + len(data))
    if first < last:
        memory[first - begin : last - begin] = data[first - position : last - position]


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    if source.is_cpu:
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel())
    else:
        target.copy_(source)


class StateLayout:
    """The offsets of the tensors of a state in the file, known before anything is pickled or copied.

    ``tensors`` are the plain dense tensors of the state.
    """

    def __init__(self, state: Any) -> None:
        self._table = StorageTable()
        self.tensors = collect_storages(state, self._table)
        self._region = _region(tuple(self._table.sizes))
        self.region_size = self._region.size

    @property
    def staged_size(self) -> int:
        """Size in bytes of the staging buffer; never 0, because the number of buffers limits the number of saves."""
        return max(1, self.region_size)

    @property
    def _storages(self) -> list[torch.UntypedStorage]:
        return self._table.storages[: len(self._region.records)]

    @functools.cached_property
    def sources(self) -> list[torch.Tensor]:
        """The memory of the storages as ``uint8`` tensors, each storage once."""
        return self._table.memories(0, len(self._region.records))

    def pieces_in(self, buffer: StagingBuffer, nbytes: int) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Yield the copies into ``buffer`` as ``(end, target, source)``, in file order; each is a whole storage."""
        for record, source in zip(self._region.records, self.sources, strict=True):
            at, size = record.offset, record.size
            if size:
                yield at + size, buffer.tensor[at : at + size], source

    def moves_in(self, buffer: StagingBuffer, nbytes: int) -> Iterator[Move]:
        """Yield the same copies for a state in host memory, as addresses, without making a tensor for each piece."""
        base = buffer.tensor.data_ptr()
        for record, storage in zip(self._region.records, self._storages, strict=True):
            at, size, source = record.offset, record.size, storage.data_ptr() if record.size else 0
            if size and not source:  # bytes_of makes torch raise its own error for freed memory
                yield buffer.tensor[at : at + size], bytes_of([storage])[0]
                continue
            if size <= nbytes:
                yield base + at, source, size, storage
                continue
            for begin in range(0, size, nbytes):
                yield base + at + begin, source + begin, min(nbytes, size - begin), storage

    def live_image(self) -> FileImage:
        """Return an image that reads the live tensors when they are written."""
        return FileImage(self._region, self.sources)

    def staged_image(self, buffer: StagingBuffer, wait_staged: Callable[[int], None]) -> FileImage:
        """Return an image that reads the tensors' bytes from ``buffer``, waiting until it is filled far enough."""
        return FileImage(self._region, staged=buffer, wait_staged=wait_staged)

    def pickle_into(self, image: FileImage, state: Any) -> None:
        """Pickle ``state``, and add everything except its plain tensors to ``image``."""
        known = len(self._region.records)
        pickle, references = pickle_state(state, self._table)
        # Tensors inside objects that only pickle looks into: found when the layout of the others is already fixed.
        late = [found.cpu().numpy().tobytes() for found in self._table.memories(known)]
        image.add_pickle(pickle, references, late, step_in(state))
