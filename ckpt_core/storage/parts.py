"""Upload one object as numbered parts, several at a time, from memory that does not grow with the object."""

from __future__ import annotations

import abc
import asyncio
import logging
import threading
from collections.abc import Coroutine, Iterable
from typing import Any

import numpy as np

from ckpt_core.errors import CheckpointError
from ckpt_core.storage.base import FileWriter

__all__ = ["PART_BYTES", "PartUpload", "PartsWriter"]

logger = logging.getLogger(__name__)

PART_BYTES = 16 * 2**20
_PARTS_UNDER_WAY = 6
_SECONDS_TO_END_BEGINNING = 10.0


class PartUpload(abc.ABC):
    """What a store must offer: parts in any order, of which an object is made in one act at the end.

    All methods run on the event loop of the store's client and raise :class:`CheckpointError` only.

    Attributes:
        most_parts: How many parts an object may have.
    """

    most_parts: int

    @abc.abstractmethod
    async def begin(self) -> None:
        """Prepare for parts."""

    @abc.abstractmethod
    async def send(self, number: int, data: memoryview) -> None:
        """Upload part ``number``, counted from 0, of memory that is used for something else afterwards."""

    @abc.abstractmethod
    async def complete(self, count: int) -> None:
        """Make the object of parts 0 to ``count`` - 1, replacing what was there."""

    @abc.abstractmethod
    async def put(self, data: bytearray) -> None:
        """Make the whole object in one request, without parts."""

    @abc.abstractmethod
    async def abandon(self) -> None:
        """Delete the parts uploaded so far."""


class _Part:
    """A part in memory: ``filled`` of its bytes are there."""

    def __init__(self, memory: bytearray) -> None:
        self.memory = memory
        self.filled = 0


class PartsWriter(FileWriter):
    """Uploads what is written in parts of equal size, and collects it until one is whole.

    Memory is bounded: six parts under way, one for each thread that writes, and the last one, which waits for the commit,
    because only that knows where the object ends; none for whole parts that are written through. An object of one part is made
    by a single request.

    Args:
        upload: Talks to the store.
        loop: Where the store's client runs.
        expected_size: How many bytes will be written, or a few less; decides how large parts must be.
    """

    parallel = True
    threads = _PARTS_UNDER_WAY

    def __init__(self, upload: PartUpload, loop: asyncio.AbstractEventLoop, expected_size: int) -> None:
        self._upload = upload
        self._loop = loop
        self._expected_size = expected_size
        # A tenth more parts than expected are allowed for.
        self._part_bytes = PART_BYTES * max(1, -(-expected_size * 11 // (10 * PART_BYTES * upload.most_parts)))
        self._parts: dict[int, _Part] = {}
        self._sent: set[int] = set()
        self._last = -1
        self._lock = threading.Lock()
        self._slots = threading.Semaphore(_PARTS_UNDER_WAY)
        self._idle: list[bytearray] = []
        self._beginning: asyncio.Task[None] | None = None
        self._sending: set[asyncio.Task[Any]] = set()
        self._error: Exception | None = None
        self._is_over = False

    def write_at(self, offset: int, data: memoryview) -> None:
        while data:
            number, begin = divmod(offset, self._part_bytes)
            piece = data[: self._part_bytes - begin]
            self._fill(number, begin, piece)
            data, offset = data[len(piece) :], offset + len(piece)

    def write_through(self, offset: int, data: memoryview) -> None:
        number, begin = divmod(offset, self._part_bytes)
        is_whole = begin == 0 and len(data) == self._part_bytes
        if not is_whole or offset + len(data) > self._expected_size:
            self.write_at(offset, data)
            return
        with self._lock:
            self._sent.add(number)
            self._last = max(self._last, number)
        self._take_slot()
        asyncio.run_coroutine_threadsafe(self._send(number, data), self._loop).result()
        self._raise_failure()

    def _fill(self, number: int, begin: int, piece: memoryview) -> None:
        self._raise_failure()
        with self._lock:
            part = self._parts.get(number)
            if part is None:
                memory = self._idle.pop() if self._idle else bytearray(self._part_bytes)
                part = self._parts[number] = _Part(memory)
                self._last = max(self._last, number)
        # numpy copies without the GIL, a slice assignment holds it
        np.copyto(np.frombuffer(part.memory, np.uint8)[begin : begin + len(piece)], np.frombuffer(piece, np.uint8))
        with self._lock:
            part.filled += len(piece)
        self._send_whole_parts()

    def _send_whole_parts(self) -> None:
        while True:
            with self._lock:
                whole = (n for n, part in self._parts.items() if n < self._last and part.filled == self._part_bytes)
                number = next(whole, None)
                if number is None:
                    return
                memory = self._parts.pop(number).memory
                self._sent.add(number)
            self._take_slot()
            asyncio.run_coroutine_threadsafe(self._send_collected(number, memory), self._loop)

    def _take_slot(self) -> None:
        self._slots.acquire()
        if self._error is not None:
            self._slots.release()  # to the next thread that waits to be told
            raise self._error

    async def _send_collected(self, number: int, memory: bytearray) -> None:
        with memoryview(memory) as data:
            await self._send(number, data)
        with self._lock:
            self._idle.append(memory)

    async def _send(self, number: int, data: memoryview) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._sending.add(task)
        try:
            if self._beginning is None:
                self._beginning = asyncio.ensure_future(self._upload.begin())
            await asyncio.shield(self._beginning)
            await self._upload.send(number, data)
        except Exception as error:  # noqa: BLE001 - raised by the next write or the commit
            self._error = self._error or error
        finally:
            self._sending.discard(task)
            self._slots.release()

    def _raise_failure(self) -> None:
        if self._error is not None:
            raise self._error

    def commit(self, size: int) -> None:
        count = max(1, -(-size // self._part_bytes))
        with self._lock:
            # What is written in whole blocks may reach over the end by a few bytes.
            parts = {number: part for number, part in sorted(self._parts.items()) if number < count}
            self._parts.clear()
        if size == 0:
            parts = {0: _Part(bytearray())}
        for number, part in parts.items():
            length = min(self._part_bytes, size - number * self._part_bytes)
            if part.filled < length:
                raise ValueError(f"part {number} of the object was not written whole")
            if length < self._part_bytes:
                part.memory = part.memory[:length]
        if set(parts) | self._sent != set(range(count)):
            raise ValueError("a part of the object was not written at all")
        self._run(self._commit({number: part.memory for number, part in parts.items()}, count))
        self._is_over = True

    async def _commit(self, parts: dict[int, bytearray], count: int) -> None:
        if count == 1 and parts:
            await self._upload.put(parts[0])
            return
        tasks = [asyncio.ensure_future(self._send_collected(number, memory)) for number, memory in parts.items()]
        await asyncio.gather(*tasks, *self._sending)
        self._raise_failure()
        await self._upload.complete(count)

    def abort(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        self._parts.clear()
        self._run(self._abandon())

    async def _abandon(self) -> None:
        await _end(self._sending)
        if self._beginning is None:
            return
        # Without an answer nobody would know what to delete.
        await asyncio.wait({self._beginning}, timeout=_SECONDS_TO_END_BEGINNING)
        await _end({self._beginning})
        try:
            await self._upload.abandon()
        except CheckpointError as error:
            # The failure that led here is the one to tell; what stays is invisible, and an orphan that is removed later.
            logger.warning("parts of an abandoned upload could not be deleted: %s", error.message)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            future.result()
        except BaseException:  # Ctrl-C too
            future.cancel()
            raise


async def _end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    ending = list(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)
