"""Copies for which host memory is short: window after window through a buffer that is smaller than the state.

Threads of ours copy the windows of live tensors in the order in which they are written, as long as there is room; who
has written a window gives its room back. Training waits until all windows are copied, not until they are written.
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
from ckpt_core.threads import run_parallel, wait_through


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
        """As of the image."""
        return self.live.approximate_size

    def digested_window(self, begin: int, scratch: Memory | None) -> memoryview:
        """Return a window, waiting for it if need be; :meth:`written` has to follow."""
        return self._windows.take(self, begin)

    def written(self, begin: int) -> None:
        """Declare that a window's memory may be used again."""
        self._windows.give(self, begin)

    def tail(self) -> bytes:
        """Return the rest of the file."""
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
        self._has_begun = self._is_over = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._ended = threading.Event()

    # ---- the thread that trains --------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Return when all windows are copied, or nobody wants them; raise what a copy has raised."""
        wait_through(self._ended)
        if self._error is not None:
            raise self._error

    def abandon(self) -> None:
        """Copy no further window."""
        with self._changed:
            self._is_over = True
            if not self._has_begun:
                self._ended.set()
            self._changed.notify_all()

    def settle(self) -> None:
        """Return when nothing is copied any more."""
        self.abandon()
        wait_through(self._ended)
        self._copied.clear()
        self._rooms.clear()

    # ---- the thread that writes --------------------------------------------------------------------------------------

    def begin(
        self, files: Sequence[tuple[str, Image]], is_there: Callable[[str, Image], bool]
    ) -> list[tuple[str, PassedImage]] | None:
        """Begin to copy the windows of files, in the order in which they are to be written; return these.

        None if no thread can be started: training waits until they are written. ``is_there`` is called for each file
        before it is copied: whether it need not be written.
        """
        passed = [(name, PassedImage(image, self)) for name, image in files]
        with self._changed:
            if self._is_over:
                raise ImageAbandonedError("the save was given up")
            try:
                threading.Thread(target=self._run, args=(passed, is_there), name="ckpt-staging").start()
            except RuntimeError:  # the interpreter is shutting down
                return None
            self._has_begun = True
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

    def _run(self, files: Sequence[tuple[str, PassedImage]], is_there: Callable[[str, Image], bool]) -> None:
        try:
            run_parallel(self._copy, self._windows(files, is_there))
            for _, image in files:
                image.forget_sources()
        except BaseException as error:  # noqa: BLE001 - raised again by wait()
            self._fail(error)
        finally:
            self._ended.set()

    def _windows(
        self, files: Sequence[tuple[str, PassedImage]], is_there: Callable[[str, Image], bool]
    ) -> Iterator[tuple[PassedImage, int, _Room]]:
        """Yield each window with its room, in order: who writes one window after the other always gets the next."""
        for name, image in files:
            there = is_there(name, image.live)
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
