"""Writes an image to storage: windows in parallel as they become available, then the tail, then the commit."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ckpt_core._layouts.image import WINDOW, Image
from ckpt_core.buffers import ScratchBuffers, StagingBuffer
from ckpt_core.process.threads import run_parallel
from ckpt_core.storage.base import FileWriter, Storage

_BLOCK = 4096
_WINDOWS_IN_MEMORY = 7  # 112 MiB
_WINDOWS_AHEAD = 3


def write_image(
    image: Image,
    storage: Storage,
    path: str,
    *,
    scratch: ScratchBuffers,
    meanwhile: Callable[[], None] | None = None,
    before_tail: Callable[[], None] | None = None,
    written: Callable[[int], None] | None = None,
    one_by_one: bool = False,
) -> int:
    """Write ``image`` to ``path``, durable and whole or not at all; return its size in bytes.

    ``scratch`` lends up to 7 windows of memory (112 MiB), unless the image is staged. The calling thread calls
    ``meanwhile`` while other threads write. ``written`` is called for each window of a staged image once its memory may
    be reused. ``before_tail`` is called when all windows are written, and returns once the tail is known; if it raises,
    no file appears. With ``one_by_one``, the calling thread alone writes the windows, in order.
    """
    created: FileWriter | None = None
    try:
        created = writer = storage.create(path, image.approximate_size)

        # More windows are assembled at a time than written, so that the disk never waits for a copy.
        writing = threading.Semaphore(writer.threads)

        def write_window(begin: int) -> None:
            if image.is_staged:
                try:
                    writer.write_at(begin, image.digested_window(begin, None))
                finally:
                    if written is not None:
                        written(begin)
                return
            with scratch.lent(min(WINDOW, image.region_size)) as buffer:
                window = image.digested_window(begin, buffer)
                with writing:
                    writer.write_at(begin, window)

        windows = range(0, image.region_size, WINDOW)
        threads = 1
        if writer.parallel and not one_by_one:
            threads = writer.threads if image.is_staged else min(writer.threads + _WINDOWS_AHEAD, _WINDOWS_IN_MEMORY)
        # With ``meanwhile``, the calling thread joins late, so one more thread is useful.
        useful = len(windows) + (meanwhile is not None)
        run_parallel(write_window, windows, threads=min(threads, useful), meanwhile=meanwhile)
        if before_tail is not None:
            before_tail()
        tail = image.tail()
        size = image.region_size + len(tail)
        if writer.parallel:
            _write_whole_blocks(writer, image.region_size, tail)
        else:
            writer.write_at(image.region_size, memoryview(tail))
        writer.commit(size)
    except BaseException:
        if created is not None:
            created.abort()
        raise
    return size


def _write_whole_blocks(writer: FileWriter, offset: int, data: bytes) -> None:
    if not data:
        return
    # Direct I/O requires whole blocks from aligned memory; the commit truncates the file to its size.
    aligned = StagingBuffer(len(data))
    try:
        aligned.memory[: len(data)] = data
        with aligned.memory[: -(-len(data) // _BLOCK) * _BLOCK] as whole_blocks:
            writer.write_at(offset, whole_blocks)
    finally:
        aligned.close()
