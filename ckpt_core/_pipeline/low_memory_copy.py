"""Stages a state through a buffer smaller than the state, window by window, when host memory is short.

The training thread and a few helpers copy windows of live tensors in the order in which they are written, as long as
the buffer has room; the writer returns the room of each window that it has written. Training continues when all windows
are copied, not when they are written.
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
from ckpt_core.process.threads import Latch, run_parallel, wait_uninterrupted


class _Room(NamedTuple):
    """The part of the buffer that holds one window."""

    tensor: torch.Tensor
    memory: memoryview


class RelayedImage:
    """An image whose windows are copied from live tensors ahead of the writer."""

    is_staged = True

    def __init__(self, image: Image, windows: WindowRelay) -> None:
        self.region_size = image.region_size
        self.live = image
        self._windows = windows
        self._live_is_read = threading.Lock()

    @property
    def approximate_size(self) -> int:
        return self.live.approximate_size

    def digested_window(self, begin: int, scratch: Memory | None) -> memoryview:
        """Return a window, waiting until it is copied; the caller must call :meth:`written` afterwards."""
        return self._windows.take(self, begin)

    def written(self, begin: int) -> None:
        """Declare that the memory of the window may be reused."""
        self._windows.give(self, begin)

    def tail(self) -> bytes:
        with self._live_is_read:
            return self.live.tail()

    def forget_sources(self) -> None:
        """Take what is left of the live tensors; they are not read any more after this returns."""
        with self._live_is_read:
            self.live.forget_sources()

    def is_there(self) -> bool:
        """Return whether the file is already there and need not be written; wait until that is known."""
        return self._windows.is_there(self)


class WindowRelay:
    """The windows of one save, passed from the training thread to the writer.

    ``raise_reason`` is called when a window will not come, to raise the reason. ``seconds_without_room`` is the time
    for which the copy has waited for windows to be written.
    """

    def __init__(self, buffer: StagingBuffer, raise_reason: Callable[[], None]) -> None:
        self.seconds_without_room = 0.0
        self._raise_reason = raise_reason
        self._rooms = collections.deque(
            _Room(buffer.tensor[begin : begin + WINDOW], buffer.memory[begin : begin + WINDOW])
            for begin in range(0, buffer.nbytes - WINDOW + 1, WINDOW)
        )
        self._copied: dict[tuple[RelayedImage, int], tuple[memoryview, _Room]] = {}
        self._there: dict[RelayedImage, bool] = {}
        self._files: Sequence[tuple[str, RelayedImage]] | None = None
        self._find: Callable[[str, Image], bool] = lambda *_: False
        self._is_over = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._ended = Latch()

    # ---- the thread that trains --------------------------------------------------------------------------------------

    def copy(self) -> None:
        """Copy all windows once :meth:`begin` has named them; stop if they are abandoned; raise what a copy raises."""
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._files is not None or self._is_over)
            if self._files is not None:
                run_parallel(self._copy, self._windows(self._files))
                for _, image in self._files:
                    image.forget_sources()
        except BaseException as error:  # noqa: BLE001 - raised below, unless the windows are no longer wanted
            self._fail(error)
        finally:
            self._ended.set()
        if self._error is not None:
            raise self._error

    def give_up(self) -> None:
        """Declare that nothing will be copied any more; :meth:`copy` is not called after this."""
        self.abandon()
        self._ended.set()

    # ---- the thread that writes --------------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Declare that the writer needs no further window."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def settle(self) -> None:
        """Return when no copy is running any more."""
        self.abandon()
        wait_uninterrupted(self._ended)
        self._copied.clear()
        self._rooms.clear()

    def begin(
        self, files: Sequence[tuple[str, Image]], is_there: Callable[[str, Image], bool]
    ) -> list[tuple[str, RelayedImage]]:
        """Let the training thread copy the windows of ``files``, in this order; return their relayed images.

        ``is_there`` is called before each file is copied, and returns whether the file need not be written.
        """
        passed = [(name, RelayedImage(image, self)) for name, image in files]
        with self._changed:
            if self._is_over:
                raise ImageAbandonedError("the save was given up")
            self._files, self._find = passed, is_there
            self._changed.notify_all()
        return passed

    def is_there(self, image: RelayedImage) -> bool:
        """As :meth:`RelayedImage.is_there`."""
        self._wait_for(lambda: image in self._there)
        return self._there[image]

    def take(self, image: RelayedImage, begin: int) -> memoryview:
        """As :meth:`RelayedImage.digested_window`."""
        self._wait_for(lambda: (image, begin) in self._copied)
        return self._copied[image, begin][0]

    def give(self, image: RelayedImage, begin: int) -> None:
        """As :meth:`RelayedImage.written`; does nothing for a window that never came."""
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

    def _windows(self, files: Sequence[tuple[str, RelayedImage]]) -> Iterator[tuple[RelayedImage, int, _Room]]:
        """Yield each window with its room, in the order of the files, so that the writer's next window always comes."""
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

    def _copy(self, job: tuple[RelayedImage, int, _Room]) -> None:
        image, begin, room = job
        try:
            memory = image.live.digested_window(begin, room)
        except BaseException as error:
            self._fail(error)  # at once, because other threads may be waiting for room
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
