"""Plans and runs ranged reads: which bytes of a file a tensor needs; reads them and compares every block's digest.

Long runs are read directly into the target's memory, unless the storage is faster with aligned memory (direct I/O). All
others are read into scratch memory, neighbours together, and copied from there once their blocks are verified.
"""

from __future__ import annotations

import bisect
import ctypes
import dataclasses
from collections.abc import Iterable, Iterator

import torch

from ckpt_core._layouts.directory.contents import Placed, Shard
from ckpt_core._layouts.directory.files import Files
from ckpt_core._layouts.directory.safetensors_file import LARGEST_BLOCK, block_size
from ckpt_core._layouts.safetensors import bits_of, is_memory
from ckpt_core.buffers import ScratchBuffers, StagingBuffer, copy_late
from ckpt_core.geometry import Box, byte_runs, merged, strides_of

_ONE_READ = 8 * 2**20  # bytes that one job covers, not counting the rest of the blocks at its ends
_DIRECT = 2**20  # bytes: from this length, a run is worth a separate read
_PAGE = 4096


@dataclasses.dataclass(frozen=True, slots=True)
class Read:
    """Byte ranges of a file that fill (a part of) a target tensor.

    Without ``strides``, one run fills the memory of a contiguous target from byte ``skip`` on. With ``strides`` (of the
    elements in the file), the runs fill all of ``target``, whatever its memory layout.
    """

    runs: tuple[tuple[int, int], ...]
    target: torch.Tensor
    skip: int = 0
    strides: tuple[int, ...] | None = None

    @property
    def begin(self) -> int:
        """Offset of the first byte."""
        return self.runs[0][0]

    @property
    def end(self) -> int:
        """Offset after the last byte."""
        return self.runs[-1][1]

    def part(self, begin: int, end: int) -> Read:
        """Return the part of this read that lies between two offsets in the file; for contiguous targets."""
        return Read(((begin, end),), self.target, self.skip + begin - self.begin)

    def memory(self) -> torch.Tensor:
        """Return the memory of a contiguous target that this read fills, as flat bytes."""
        flat = self.target.as_strided((self.target.numel(),), (1,)).view(torch.uint8)
        return flat[self.skip : self.skip + self.end - self.begin]

    def fill(self, scratch: StagingBuffer, begin: int) -> None:
        """Fill the target from scratch memory, where the file's bytes from ``self.begin`` on are at ``begin``."""
        nbytes = self.end - self.begin
        if self.strides is None and self.target.device.type == "cpu":
            ctypes.memmove(self.target.data_ptr() + self.skip, scratch.tensor.data_ptr() + begin, nbytes)
            return
        found = scratch.tensor[begin : begin + nbytes]
        with torch.inference_mode(self.target.is_inference()):
            if self.strides is None:
                copy_late(self.memory(), found, scratch)
                return
            elements = found.view(self.target.dtype)
            elements = elements.as_strided(self.target.shape, self.strides, elements.storage_offset())
            copy_late(self.target, elements, scratch)


def reads_of(placed: Placed, box: Box, target: torch.Tensor) -> Iterator[Read]:
    """Yield the reads that fill a target with what a chunk has of it; ``box`` is the target's place in the tensor."""
    view, itemsize, shape = target.detach(), target.dtype.itemsize, placed.box.shape
    if placed.box == box:
        if is_memory(view):
            yield Read(((placed.begin, placed.begin + view.nbytes),), view)
            return
        inside = Box.whole(shape)
        first, last = 0, view.nbytes
    else:
        common = placed.box.intersection(box)
        if common is None:
            return
        for dimension, (begin, extent) in enumerate(zip(common.relative_to(box).offset, common.shape, strict=True)):
            view = view.narrow(dimension, begin, extent)
        inside = common.relative_to(placed.box)
        first, last = _span(shape, inside, itemsize)
    if last - first == view.numel() * itemsize and is_memory(view):
        yield Read(((placed.begin + first, placed.begin + last),), view)
        return
    view = bits_of(view)
    strides = strides_of(shape)
    step = block_size(Box.whole(shape).numel * itemsize)
    for part in _parts(shape, inside, itemsize):
        corner = part.relative_to(inside).offset
        cut = view[tuple(slice(b, b + n) for b, n in zip(corner, part.shape, strict=True))]
        runs = _runs(shape, part, itemsize, step)
        yield Read(tuple((placed.begin + b, placed.begin + e) for b, e in runs), cut, strides=strides)


def _span(shape: tuple[int, ...], box: Box, itemsize: int) -> tuple[int, int]:
    strides = strides_of(shape)
    first = sum(begin * stride for begin, stride in zip(box.offset, strides, strict=True))
    last = sum((end - 1) * stride for end, stride in zip(box.end, strides, strict=True))
    return first * itemsize, (last + 1) * itemsize


def _parts(shape: tuple[int, ...], box: Box, itemsize: int) -> Iterator[Box]:
    """Split ``box`` into parts that each span no more bytes than one job reads."""
    begin, end = _span(shape, box, itemsize)
    if end - begin <= _ONE_READ:
        yield box
        return
    dimension = next(index for index, extent in enumerate(box.shape) if extent > 1)
    extent = box.shape[dimension]
    for first, last in ((0, extent // 2), (extent // 2, extent)):
        yield from _parts(shape, box.along(dimension, first, last), itemsize)


def _runs(shape: tuple[int, ...], box: Box, itemsize: int, step: int) -> list[tuple[int, int]]:
    """Return ``(begin, end)`` of the needed bytes; one run for all of them if no block can be skipped in between."""
    runs = byte_runs(shape, box, itemsize)
    begin, nbytes = next(runs)
    second = next(runs, None)
    if second is None or second[0] - begin - nbytes < step:  # the first gap is the shortest
        return [_span(shape, box, itemsize)]
    return [(begin, begin + nbytes), (second[0], sum(second)), *((begin, begin + nbytes) for begin, nbytes in runs)]


@dataclasses.dataclass(slots=True)
class Job:
    """Blocks of one file that one thread reads, verifies and copies."""

    shard: Shard  # the file
    spans: list[tuple[int, int]]  # (first, last) numbers of the blocks, ascending, last not included
    reads: list[Read]  # the reads that are filled from the blocks
    in_place: torch.Tensor | None = None  # the memory that the blocks are read into; None: scratch memory
    past_cache: bool = False  # whether to read whole pages, so that the storage can bypass the page cache

    @property
    def origin(self) -> int:
        """Offset in the file of the first byte in the scratch memory."""
        return self.shard.blocks[self.spans[0][0]] // _PAGE * _PAGE

    @property
    def size(self) -> int:
        """Bytes of scratch memory that the job needs."""
        return 0 if self.in_place is not None else self.shard.blocks[self.spans[-1][1]] - self.origin


def jobs_of(shard: Shard, reads: Iterable[Read], *, past_cache: bool) -> list[Job]:
    """Return the jobs for the reads of one file, by ascending offset.

    With ``past_cache``, whole pages are read into scratch memory; otherwise, long runs go directly into their targets.
    """
    jobs: list[Job] = []
    small: list[Read] = []
    for read in reads:
        if read.strides is not None or read.end - read.begin < _DIRECT:
            small.append(read)
            continue
        for first, last, begin, end in _cuts(shard.blocks, read):
            if not past_cache and first < last and read.target.device.type == "cpu":
                jobs.append(Job(shard, [(first, last)], [], read.part(begin, end).memory()))
            elif begin < end:
                small.append(read.part(begin, end))
    jobs += _grouped(shard, sorted(small, key=lambda read: read.begin), past_cache)
    return sorted(jobs, key=lambda job: job.spans[0])


def all_of(shard: Shard, *, past_cache: bool) -> Iterator[Job]:
    """Yield jobs that read and verify all tensors of a file without filling any target."""
    first, count = 1, shard.file.blocks
    while first < count:
        last = max(first + 1, bisect.bisect_right(shard.blocks, shard.blocks[first] + _ONE_READ) - 1)
        yield Job(shard, [(first, last)], [], past_cache=past_cache)
        first = last


def _cuts(blocks: list[int], read: Read) -> Iterator[tuple[int, int, int, int]]:
    """Cut a long run into groups of whole blocks, and its two ends; yield them as ``(first, last, begin, end)``."""
    first = bisect.bisect_left(blocks, read.begin)
    behind = bisect.bisect_right(blocks, read.end) - 1
    if first >= behind:
        yield first, first, read.begin, read.end
        return
    yield first, first, read.begin, blocks[first]
    while first < behind:
        last = min(behind, max(first + 1, bisect.bisect_right(blocks, blocks[first] + _ONE_READ) - 1))
        yield first, last, blocks[first], blocks[last]
        first = last
    yield first, first, blocks[first], read.end


def _grouped(shard: Shard, reads: Iterable[Read], past_cache: bool) -> Iterator[Job]:
    """Group neighbouring reads, which must be sorted by offset, into jobs."""
    blocks = shard.blocks
    job = Job(shard, [], [], past_cache=past_cache)
    for read in reads:
        spans = [(bisect.bisect_right(blocks, b) - 1, bisect.bisect_left(blocks, e)) for b, e in read.runs]
        if job.reads and blocks[spans[-1][1]] - job.origin > _ONE_READ + 2 * LARGEST_BLOCK:
            job.spans = merged(job.spans)
            yield job
            job = Job(shard, [], [], past_cache=past_cache)
        job.spans += spans
        job.reads.append(read)
    if job.reads:
        job.spans = merged(job.spans)
        yield job


def run_job(job: Job, files: Files, scratch: ScratchBuffers, scratch_size: int) -> None:
    """Read the blocks of a job, compare them with their digests, and fill the targets.

    ``scratch_size`` is the scratch memory in bytes that the largest job of this load needs.
    """
    if job.in_place is not None:
        _read_blocks(job, files, job.in_place.numpy().data, job.shard.blocks[job.spans[0][0]])
        return
    with scratch.lent(scratch_size, [read.target for read in job.reads]) as buffer:
        _read_blocks(job, files, buffer.memory, job.origin)
        for read in job.reads:
            read.fill(buffer, read.begin - job.origin)


def _read_blocks(job: Job, files: Files, memory: memoryview, origin: int) -> None:
    blocks = job.shard.blocks
    for first, last in job.spans:
        begin, end = blocks[first], blocks[last]
        if job.past_cache:
            begin, end = begin // _PAGE * _PAGE, min(-(-end // _PAGE) * _PAGE, blocks[-1])
        files.read(job.shard, begin, memory[begin - origin : end - origin])
        for index in range(first, last):
            files.compare(job.shard, index, memory[blocks[index] - origin : blocks[index + 1] - origin])
