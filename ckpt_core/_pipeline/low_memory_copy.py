"""Copies for which host memory is short: window after window through a buffer that is smaller than the state.

The thread that trains, and a few that help it, copy the windows of live tensors in the order in which they are written,
as long as there is room; who has written a window gives its room back. Training continues when all windows are copied,
not when they are written.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from ckpt_core._layouts.image import WINDOW, Image, ImageAbandonedError, Memory
from ckpt_core.buffers import StagingBuffer
from ckpt_core.process.threads import Latch, run_parallel, wait_through


class _Room(NamedTuple):
    """A part of the buffer, for one window."""

    tensor: torch.Tensor
    memory: memoryview


class PassedImage:
    """An image whose windows are copied ahead of those who write them."""

    is_staged = True

    def __init__(self, image: Image, windows: PassingWindows) -> None:
        self.region_size = image.region_size
        self.live = image
        self._windows = windows
        self._live_is_read = threading.Lock()

    @property
    def approximate_size(self) -> int:
        return self.live.approximate_size

    def digested_window(self, begin: int, scratch: Memory | None) -> memoryview:
        """Return a window, waiting for it if need be; :meth:`written` has to follow."""
        return self._windows.take(self, begin)

    def written(self, begin: int) -> None:
        """Declare that a window's memory may be used again."""
        self._windows.give(self, begin)

    def tail(self) -> bytes:
        with self._live_is_read:
            return self.live.tail()

    def forget_sources(self) -> None:
        """Take what is left of the live tensors, which nobody reads any more when this returns."""
        with self._live_is_read:
            self.live.forget_sources()

    def is_there(self) -> bool:
        """Return, when it is known, whether the file is there without being written."""
        return self._windows.is_there(self)


class PassingWindows:
    """The windows of one save.

    ``raise_reason`` is called where a window does not come: raises why. ``seconds_without_room`` says how long the copy
    has waited for windows to be written.
    """

    def __init__(self, buffer: StagingBuffer, raise_reason: Callable[[], None]) -> None:
        self.seconds_without_room = 0.0
        self._raise_reason = raise_reason
        self._rooms = collections.deque(
            _Room(buffer.tensor[begin : begin + WINDOW], buffer.memory[begin : begin + WINDOW])
            for begin in range(0, buffer.nbytes - WINDOW + 1, WINDOW)
        )
        self._copied: dict[tuple[PassedImage, int], tuple[memoryview, _Room]] = {}
        self._there: dict[PassedImage, bool] = {}
        self._files: Sequence[tuple[str, PassedImage]] | None = None
        self._find: Callable[[str, Image], bool] = lambda *_: False
        self._is_over = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._ended = Latch()

    # ---- the thread that trains --------------------------------------------------------------------------------------

    def copy(self) -> None:
        """Copy all windows, when it is known which, unless nobody wants them; raise what a copy has raised."""
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._files is not None or self._is_over)
            if self._files is not None:
                run_parallel(self._copy, self._windows(self._files))
                for _, image in self._files:
                    image.forget_sources()
        except BaseException as error:  # noqa: BLE001 - raised below, if it is not that nobody wants them
            self._fail(error)
        finally:
            self._ended.set()
        if self._error is not None:
            raise self._error

    def give_up(self) -> None:
        """Declare that nothing is copied any more: the caller of :meth:`copy` does not call it now."""
        self.abandon()
        self._ended.set()

    # ---- the thread that writes --------------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Declare that no further window is wanted."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def settle(self) -> None:
        """Return when nothing is copied any more."""
        self.abandon()
        wait_through(self._ended)
        self._copied.clear()
        self._rooms.clear()

    def begin(
        self, files: Sequence[tuple[str, Image]], is_there: Callable[[str, Image], bool]
    ) -> list[tuple[str, PassedImage]]:
        """Let the windows of files be copied, in the order in which they are to be written; return these.

        ``is_there`` is called for each file before it is copied: whether it need not be written.
        """
        passed = [(name, PassedImage(image, self)) for name, image in files]
        with self._changed:
            if self._is_over:
                raise ImageAbandonedError("the save was given up")
            self._files, self._find = passed, is_there
            self._changed.notify_all()
        return passed

    def is_there(self, image: PassedImage) -> bool:
        """As :meth:`PassedImage.is_there`."""
        self._wait_for(lambda: image in self._there)
        return self._there[image]

    def take(self, image: PassedImage, begin: int) -> memoryview:
        """As :meth:`PassedImage.window`."""
        self._wait_for(lambda: (image, begin) in self._copied)
        return self._copied[image, begin][0]

    def give(self, image: PassedImage, begin: int) -> None:
        """As :meth:`PassedImage.written`; nothing to do for a window that never came."""
        with self._changed:
            _, room = self._copied.pop((image, begin), (None, None))
            if room is not None:
                self._rooms.append(room)
                self._changed.notify_all()

    def _wait_for(self, is_true: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: is_true() or self._is_over)
            if is_true():
                return
        self._raise_reason()
        raise ImageAbandonedError("the state could not be copied")

    # ---- the threads that copy ---------------------------------------------------------------------------------------

    def _windows(self, files: Sequence[tuple[str, PassedImage]]) -> Iterator[tuple[PassedImage, int, _Room]]:
        """Yield each window with its room, in order: who writes one window after the other always gets the next."""
        for name, image in files:
            there = self._find(name, image.live)
            with self._changed:
                self._there[image] = there
                self._changed.notify_all()
            if not there:
                for begin in range(0, image.region_size, WINDOW):
                    yield image, begin, self._find_room()

    def _find_room(self) -> _Room:
        started = time.perf_counter()
        with self._changed:
            if not self._rooms:
                self._changed.wait_for(lambda: self._rooms or self._is_over)
                self.seconds_without_room += time.perf_counter() - started
            if self._is_over:
                raise ImageAbandonedError("the save was given up")
            return self._rooms.popleft()

    def _copy(self, job: tuple[PassedImage, int, _Room]) -> None:
        image, begin, room = job
        try:
            memory = image.live.digested_window(begin, room)
        except BaseException as error:
            self._fail(error)  # at once: others may be waiting for room
            raise
        with self._changed:
            self._copied[image, begin] = memory, room
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            if self._error is None and not (self._is_over and isinstance(error, ImageAbandonedError)):
                self._error = error
            self._is_over = True
            self._changed.notify_all()
