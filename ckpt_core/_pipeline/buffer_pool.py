"""Pools the host buffers that states are staged into: each is lent to one save at a time, and kept for the next.

Copying into memory that is reused runs at memory speed; copying into newly allocated memory runs at a fifth of that,
because the system first has to find and clear every page.
"""

from __future__ import annotations

import contextlib
import threading

from ckpt_core._devices.streams import on_this_device
from ckpt_core._layouts.image import WINDOW
from ckpt_core.buffers import StagingBuffer
from ckpt_core.errors import OutOfMemoryError
from ckpt_core.process.threads import start


class BufferPool:
    """A pool of at most ``limit`` staging buffers, each lent to one save at a time and kept for the next.

    Together they take at most ``most_bytes`` (None: no limit); each gets an equal share, in whole windows.
    """

    def __init__(self, limit: int, most_bytes: int | None = None) -> None:
        self._limit = limit
        self._share = None if most_bytes is None else most_bytes // limit // WINDOW * WINDOW
        self._lent = 0
        self._idle: list[StagingBuffer] = []
        self._outside: list[StagingBuffer] = []  # lent buffers that are kept when they come back (not after close())
        self._changed = threading.Condition()
        self._reserving: threading.Thread | None = None

    def reserve(self, nbytes: int) -> None:
        """Allocate a buffer of ``nbytes`` in the background for the next save, which may wait for it.

        A lack of memory is ignored here, and is handled by that save. If all buffers are lent, nothing is allocated.
        """

        def allocate() -> None:
            if not self.exhausted:
                with contextlib.suppress(OutOfMemoryError):
                    self.release(self.acquire(nbytes))

        with contextlib.suppress(RuntimeError):  # no memory, or the interpreter is shutting down
            reserving = threading.Thread(target=on_this_device(allocate), name="ckpt-reserve")
            start(reserving)
            self._reserving = reserving

    @property
    def exhausted(self) -> bool:
        """Whether the next :meth:`acquire` would have to wait."""
        return self._lent >= self._limit

    def acquire(self, nbytes: int) -> StagingBuffer:
        """Lend a buffer of ``nbytes``, or of the share of one save if that is less; wait until one is free."""
        if self._share is not None:
            nbytes = min(nbytes, self._share)
        is_lent, buffer = False, None
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._lent < self._limit)
                self._lent, is_lent = self._lent + 1, True
                idle = sorted(self._idle, key=lambda buffer: buffer.nbytes)
                buffer = next((b for b in idle if b.nbytes >= nbytes), None)
                if buffer is not None:
                    self._idle.remove(buffer)
                    self._outside.append(buffer)
                    buffer.is_lent = True
                    return buffer
                if len(idle) + self._lent > self._limit:
                    # Replace an idle buffer that is too small, so that there are never more than the limit.
                    self._idle.remove(idle[0])
                    idle[0].close()
            try:
                buffer = StagingBuffer(nbytes, pinned=True)
            except OutOfMemoryError:
                with self._changed:
                    self._free_idle()  # all of them are too small
                buffer = StagingBuffer(nbytes, pinned=True)
            self._outside.append(buffer)
            buffer.is_lent = True
            return buffer
        except BaseException:  # also on Ctrl-C
            with self._changed:
                self._lent -= is_lent
                if buffer in self._outside:
                    self._outside.remove(buffer)
                self._changed.notify_all()
            raise

    def wait(self) -> None:
        """Return when a buffer is free."""
        with self._changed:
            self._changed.wait_for(lambda: self._lent < self._limit)

    def release(self, buffer: StagingBuffer) -> None:
        """Take a lent buffer back; safe to call again after Ctrl-C."""
        with self._changed:
            if buffer.is_lent:
                buffer.is_lent, self._lent = False, self._lent - 1  # one statement: no signal handler runs in between
            if buffer in self._outside:
                self._outside.remove(buffer)
                self._idle.append(buffer)
            elif buffer not in self._idle:
                buffer.close()
            self._changed.notify_all()

    def close(self) -> None:
        """Free the buffers; lent ones are freed when they come back."""
        reserving, self._reserving = self._reserving, None
        if reserving is not None:
            reserving.join()
        with self._changed:
            self._outside.clear()
            self._free_idle()

    def _free_idle(self) -> None:
        while self._idle:
            self._idle.pop().close()
