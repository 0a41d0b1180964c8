"""Parts and retries of remote storages, without a server."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import stamina

from ckpt_core.errors import CheckpointError, StorageError
from ckpt_core.parallel import run_parallel
from ckpt_core.storage import parts
from ckpt_core.storage.parts import PART_BYTES, PartsWriter, PartUpload
from ckpt_core.storage.retrying import Retries, http_status, is_transient

KIB = 1024


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    running = asyncio.new_event_loop()
    thread = threading.Thread(target=running.run_forever, daemon=True)
    thread.start()
    yield running
    running.call_soon_threadsafe(running.stop)
    thread.join(10)
    running.close()


class MemoryUpload(PartUpload):
    """A store in memory that looks at how it is used."""

    most_parts = 100

    def __init__(self, *, fail_at: int | None = None, seconds: float = 0.0) -> None:
        self.sent: dict[int, bytes] = {}
        self.result: bytes | None = None
        self.abandoned = 0
        self.begun = 0
        self.under_way = 0
        self.most_under_way = 0
        self._fail_at = fail_at
        self._seconds = seconds

    async def begin(self) -> None:
        await asyncio.sleep(self._seconds)
        self.begun += 1

    async def send(self, number: int, data: memoryview) -> None:
        assert self.begun == 1
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            await asyncio.sleep(self._seconds)
            if number == self._fail_at:
                raise StorageError("the cable was pulled")
            self.sent[number] = bytes(data)
        finally:
            self.under_way -= 1

    async def complete(self, count: int) -> None:
        assert self.under_way == 0
        self.result = b"".join(self.sent[number] for number in range(count))

    async def put(self, data: bytearray) -> None:
        self.result = bytes(data)

    async def abandon(self) -> None:
        assert self.under_way == 0
        self.abandoned += 1
        self.sent.clear()


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(parts, "PART_BYTES", 64 * KIB)
    return 64 * KIB


@pytest.mark.parametrize("size", [0, 1, 64 * KIB - 1, 64 * KIB, 64 * KIB + 1, 1_000_003, 20 * 64 * KIB])
@pytest.mark.parametrize("piece", [4 * KIB, 64 * KIB, 100 * KIB, 300 * KIB])
@pytest.mark.parametrize("method", ["write_at", "write_through"])
def test_any_pieces_in_any_order(
    size: int, piece: int, method: str, loop: asyncio.AbstractEventLoop, small_parts: int
) -> None:
    data = random.Random(size).randbytes(-(-size // 4096) * 4096)  # whole blocks, as direct I/O wants them
    upload = MemoryUpload()
    writer = PartsWriter(upload, loop, size)
    pieces = [(begin, memoryview(data)[begin : begin + piece]) for begin in range(0, len(data), piece)]
    random.Random(piece).shuffle(pieces)
    run_parallel(lambda args: getattr(writer, method)(*args), pieces, threads=4)
    assert upload.result is None
    writer.commit(size)
    assert upload.result == data[:size]
    assert upload.begun == (size > small_parts or (method == "write_through" and piece >= size == small_parts))
    writer.abort()
    assert upload.abandoned == 0


def test_as_many_at_a_time_as_allowed_and_no_more(loop: asyncio.AbstractEventLoop, small_parts: int) -> None:
    upload = MemoryUpload(seconds=0.02)
    writer = PartsWriter(upload, loop, 40 * small_parts)
    for number in range(40):  # from one thread
        writer.write_at(number * small_parts, memoryview(bytes([number]) * small_parts))
    writer.commit(40 * small_parts)
    assert upload.most_under_way == 6
    assert upload.result == b"".join(bytes([number]) * small_parts for number in range(40))


def test_memory_does_not_grow_with_the_object(loop: asyncio.AbstractEventLoop) -> None:
    class Forgetful(MemoryUpload):
        async def send(self, number: int, data: memoryview) -> None:
            await asyncio.sleep(0.002)

        async def complete(self, count: int) -> None:
            self.result = b"done"

    writer = PartsWriter(Forgetful(), loop, 30 * PART_BYTES)
    window = memoryview(bytearray(PART_BYTES))
    tracemalloc.start()
    try:
        run_parallel(lambda number: writer.write_at(number * PART_BYTES, window), range(30), threads=3)
        writer.commit(30 * PART_BYTES)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 15 * PART_BYTES, "half the object: six under way, one for each thread, and what is about to be freed"


def test_whole_parts_that_are_written_through_are_not_copied(loop: asyncio.AbstractEventLoop) -> None:
    class Looking(MemoryUpload):
        async def send(self, number: int, data: memoryview) -> None:
            await asyncio.sleep(0.002)
            self.sent[number] = bytes(data[:8])

    upload = Looking()
    writer = PartsWriter(upload, loop, 20 * PART_BYTES)

    def write(number: int) -> None:
        window = memoryview(bytearray([number]) * PART_BYTES)
        writer.write_through(number * PART_BYTES, window)
        np.frombuffer(window, np.uint8)[:] = 255  # used for something else at once

    tracemalloc.start()
    try:
        run_parallel(write, range(20), threads=3)
        writer.commit(20 * PART_BYTES)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert upload.result == b"".join(bytes([number]) * 8 for number in range(20))
    assert peak < 5 * PART_BYTES, "the windows of three threads, and some change"


@pytest.mark.parametrize("method", ["write_at", "write_through"])
def test_a_failure_is_told_to_every_thread_that_waits(
    method: str, loop: asyncio.AbstractEventLoop, small_parts: int
) -> None:
    class Failing(MemoryUpload):
        async def send(self, number: int, data: memoryview) -> None:
            await asyncio.sleep(0.5)  # until all threads wait
            raise StorageError("the cable was pulled")

    writer = PartsWriter(Failing(), loop, 40 * small_parts)
    window = memoryview(bytes(small_parts))
    told = []

    def write(number: int) -> None:
        try:
            getattr(writer, method)(number * small_parts, window)
            getattr(writer, method)((number + 20) * small_parts, window)
        except StorageError:
            told.append(number)

    threads = [threading.Thread(target=write, args=(number,), daemon=True) for number in range(20)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 30
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads)
    assert len(told) > 6, "more than there are places under way"
    if method == "write_through":
        assert sorted(told) == list(range(20))
    writer.abort()


def test_parts_are_as_large_as_the_number_of_parts_demands(loop: asyncio.AbstractEventLoop) -> None:
    upload = MemoryUpload()
    size = 150 * PART_BYTES  # more than the 100 parts of this store
    writer = PartsWriter(upload, loop, size)
    window = bytearray(PART_BYTES)
    for begin in range(0, 6 * PART_BYTES, PART_BYTES):
        writer.write_at(begin, memoryview(window))
    writer.commit(6 * PART_BYTES)
    assert [len(part) for _, part in sorted(upload.sent.items())] == [2 * PART_BYTES] * 3


def test_a_part_that_fails_fails_the_file(loop: asyncio.AbstractEventLoop, small_parts: int) -> None:
    upload = MemoryUpload(fail_at=2)
    writer = PartsWriter(upload, loop, 50 * small_parts)
    with pytest.raises(StorageError, match="the cable was pulled"):
        for number in range(50):
            writer.write_at(number * small_parts, memoryview(bytes(small_parts)))
            time.sleep(0.001)
    with pytest.raises((StorageError, ValueError)):
        writer.commit(50 * small_parts)
    writer.abort()
    assert upload.result is None
    assert upload.abandoned == 1


def test_the_last_part_failing_fails_the_commit(loop: asyncio.AbstractEventLoop, small_parts: int) -> None:
    upload = MemoryUpload(fail_at=2)
    writer = PartsWriter(upload, loop, 3 * small_parts)
    for number in range(3):
        writer.write_at(number * small_parts, memoryview(bytes(small_parts)))
    with pytest.raises(StorageError, match="the cable was pulled"):
        writer.commit(3 * small_parts)
    writer.abort()
    assert (upload.result, upload.abandoned) == (None, 1)


def test_an_abort_ends_what_is_under_way_and_waits_for_the_name_of_the_upload(
    loop: asyncio.AbstractEventLoop, small_parts: int
) -> None:
    upload = MemoryUpload(seconds=0.3)
    writer = PartsWriter(upload, loop, 10 * small_parts)
    for number in range(4):
        writer.write_at(number * small_parts, memoryview(bytes(small_parts)))
    writer.abort()
    assert (upload.begun, upload.abandoned, upload.under_way) == (1, 1, 0)
    writer.abort()
    assert upload.abandoned == 1


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_gap_is_noticed(missing: int, loop: asyncio.AbstractEventLoop, small_parts: int) -> None:
    upload = MemoryUpload()
    writer = PartsWriter(upload, loop, 3 * small_parts)
    for number in {0, 1, 2} - {missing}:
        writer.write_at(number * small_parts, memoryview(bytes(small_parts)))
    with pytest.raises(ValueError, match="not written"):
        writer.commit(3 * small_parts)
    writer.abort()
    assert upload.result is None


# What is worth another attempt


def client_error(status: int, code: str) -> Exception:
    botocore = pytest.importorskip("botocore.exceptions")
    response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    error: Exception = botocore.ClientError(response, "PutObject")
    return error


def caused(outer: Exception, inner: Exception) -> Exception:
    outer.__cause__ = inner
    return outer


def aiohttp_payload_error() -> Exception:
    aiohttp = pytest.importorskip("aiohttp")
    http_exceptions = pytest.importorskip("aiohttp.http_exceptions")
    # A reply that was cut off: aiohttp gives its own complaint the code 400
    inner = http_exceptions.ContentLengthError("Not enough data to satisfy content length header")
    error: Exception = caused(aiohttp.ClientPayloadError("Response payload is not completed"), inner)
    return error


def azure_error(status: int) -> Exception:
    exceptions = pytest.importorskip("azure.core.exceptions")
    error: Exception = exceptions.HttpResponseError("refused")
    error.status_code = status  # type: ignore[attr-defined]
    return error


def gcs_error(code: int) -> Exception:
    error: Exception = pytest.importorskip("gcsfs.retry").HttpError({"code": code, "message": "no"})
    return error


@pytest.mark.parametrize(
    ("make", "transient", "status"),
    [
        (lambda: ConnectionResetError(104, "reset"), True, None),
        (lambda: BrokenPipeError(32, "pipe"), True, None),
        (TimeoutError, True, None),
        (asyncio.TimeoutError, True, None),
        (aiohttp_payload_error, True, None),
        (lambda: client_error(500, "InternalError"), True, 500),
        (lambda: client_error(503, "SlowDown"), True, 503),
        (lambda: client_error(429, "TooManyRequests"), True, 429),
        (lambda: client_error(400, "RequestTimeout"), True, 400),
        (lambda: client_error(409, "ConditionalRequestConflict"), True, 409),
        (lambda: caused(OSError(16, "busy"), client_error(503, "SlowDown")), True, 503),
        (lambda: azure_error(503), True, 503),
        (lambda: gcs_error(502), True, 502),
        (lambda: client_error(400, "EntityTooSmall"), False, 400),
        (lambda: client_error(403, "AccessDenied"), False, 403),
        (lambda: client_error(404, "NoSuchUpload"), False, 404),
        (lambda: client_error(412, "PreconditionFailed"), False, 412),
        (lambda: caused(PermissionError("no"), client_error(403, "AccessDenied")), False, 403),
        (lambda: azure_error(403), False, 403),
        (lambda: gcs_error(401), False, 401),
        (lambda: FileNotFoundError("a"), False, None),
        (lambda: PermissionError(13, "no"), False, None),
        (lambda: ValueError("a bug"), False, None),
        (lambda: caused(ValueError("a"), ConnectionResetError(104, "reset")), True, None),
    ],
)
def test_what_is_transient(make: Any, transient: bool, status: int | None) -> None:
    error = make()
    assert is_transient(error) is transient
    assert http_status(error) == status


def described(error: Exception) -> CheckpointError:
    failure = StorageError(f"cannot do it: {error}")
    failure.__cause__ = error
    return failure


class Request:
    """Fails as often as told."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.calls = 0

    def __call__(self) -> str:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return "done"

    async def later(self) -> str:
        return self()


@pytest.fixture
def _no_pauses() -> Iterator[None]:
    stamina.set_testing(True, attempts=10, cap=True)
    yield
    stamina.set_testing(False)


def ask(request: Request, retries: Retries, kind: str) -> str:
    if kind == "sync":
        return retries.call(request, described)
    return asyncio.run(retries.call_async(request.later, described))


@pytest.mark.usefixtures("_no_pauses")
@pytest.mark.parametrize("kind", ["sync", "async"])
class TestRetries:
    def test_transient_failures_are_repeated(self, kind: str) -> None:
        request, retries = Request(*[TimeoutError(str(number)) for number in range(2)]), Retries()
        assert ask(request, retries, kind) == "done"
        assert request.calls == 3
        again = Request(*[TimeoutError(str(number)) for number in range(9)])
        assert ask(again, retries, kind) == "done", "the store has answered once: more patience"
        assert again.calls == 10

    def test_others_are_not(self, kind: str) -> None:
        request = Request(PermissionError(13, "no"))
        with pytest.raises(StorageError, match="cannot do it") as caught:
            ask(request, Retries(), kind)
        assert request.calls == 1
        assert isinstance(caught.value.__cause__, PermissionError)

    def test_a_store_that_never_answered_gets_less_patience(self, kind: str) -> None:
        request = Request(*[ConnectionRefusedError(111, "refused") for _ in range(20)])
        with pytest.raises(StorageError) as caught:
            ask(request, Retries(), kind)
        assert request.calls == 3
        assert isinstance(caught.value.__cause__, ConnectionRefusedError)
        busy = Request(*[client_error(503, "SlowDown") for _ in range(20)])
        with pytest.raises(StorageError):
            ask(busy, Retries(), kind)
        assert busy.calls == 10, "a store that is busy has answered"

    def test_interrupts_are_not_failures(self, kind: str) -> None:
        request = Request()
        request.errors.append(KeyboardInterrupt())  # type: ignore[arg-type]
        with pytest.raises(KeyboardInterrupt):
            ask(request, Retries(), kind)
        assert request.calls == 1


@pytest.mark.skipif(sys.platform != "linux", reason="fork")
def test_obstore_says_that_it_cannot_be_forked(run_script: Any) -> None:
    pytest.importorskip("obstore")
    script = """
        import os
        from ckpt_core import StorageError
        from ckpt_core.storage.remote import remote_storage
        options = {"backend": "obstore", "endpoint_url": "http://127.0.0.1:1", "key": "k", "secret": "s"}
        storage = remote_storage("s3://bucket", options)
        if os.fork() == 0:
            for ask in (lambda: storage.exists("s3://bucket/a"), lambda: remote_storage("s3://bucket", options)):
                try:
                    ask()
                except StorageError as error:
                    print(error.message, flush=True)
            os._exit(0)
        os.wait()
    """
    assert run_script(script).stdout.count("forked process") == 2
