"""The bytes of objects on S3 by threads: the filesystem signs a request on its event loop, a thread sends and receives.

An event loop copies every byte several times and holds the GIL meanwhile, so that it is the bottleneck of large transfers.
``http.client`` sends from the memory where the bytes are, and receives into the memory where they belong, without the GIL.
"""

from __future__ import annotations

import asyncio
import collections
import contextvars
import http.client
import logging
import os
import socket
import ssl
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import fsspec.asyn

__all__ = ["DirectTransfers"]

logger = logging.getLogger(__name__)

_IDLE_SECONDS = 15.0  # below what servers allow a connection that is not used
_MOST_SKIPPED = 1024  # requests after a failure
_CHUNK = 2**20  # bytes that are sent at once: the time that a connection may be silent counts for each
_MARK = "x-ckpt-not-sent"
_UNSUPPORTED = ("proxies", "proxies_config", "client_cert")  # settings of the client that are not followed here
_Address = tuple[str, str]  # scheme and host with port
Result = TypeVar("Result")

_signing: contextvars.ContextVar[list[Any] | None] = contextvars.ContextVar("ckpt_signing", default=None)


class _NotDoneError(Exception):
    """Why a transfer is left to the event loop."""


class _Signed(NamedTuple):
    """A request as the client would send it, and the settings of the client and of its connections."""

    request: Any
    config: Any
    tls: Callable[[], ssl.SSLContext]


class _Idle(NamedTuple):
    since: float
    connection: http.client.HTTPConnection


class _Nothing:
    async def read(self, _: int = -1) -> bytes:
        return b""

    def close(self) -> None:
        """There is nothing to close."""


def _keep(request: Any, **_: Any) -> Any:
    """Answer in the place of the server when nothing but the signed request is wanted; mocks use the same event of botocore."""
    kept = _signing.get()
    if kept is None:
        return None
    from aiobotocore.awsrequest import AioAWSResponse

    kept.append(request)
    return AioAWSResponse(request.url, 200, {_MARK: "1"}, _Nothing())


async def _sign(filesystem: Any, method: str, **arguments: Any) -> _Signed:
    await filesystem.set_session()
    client = await filesystem.get_s3(arguments["Bucket"])
    client.meta.events.register_first("before-send.s3", _keep, unique_id=_MARK)
    kept: list[Any] = []
    token = _signing.set(kept)  # seen by this task alone
    try:
        answer = await filesystem._call_s3(method, **arguments)
    finally:
        _signing.reset(token)
    if not kept or _MARK not in answer["ResponseMetadata"]["HTTPHeaders"]:
        if "Body" in answer:
            answer["Body"].close()
        raise _NotDoneError("the request was not held back")
    from botocore.utils import get_environ_proxies

    settings = filesystem.config_kwargs
    if any(settings.get(name) for name in _UNSUPPORTED) or get_environ_proxies(kept[-1].url):
        raise _NotDoneError("the client has settings that are not followed here")
    return _Signed(kept[-1], client.meta.config, lambda: _tls(filesystem))


def _tls(filesystem: Any) -> ssl.SSLContext:
    """Return which certificates are trusted, by the rules of botocore."""
    from botocore.httpsession import get_cert_path

    verify = filesystem.client_kwargs.get("verify")
    if verify is None:
        verify = filesystem.session.get_config_variable("ca_bundle") or True
    if verify is False:
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return context
    trusted = get_cert_path(verify)
    return ssl.create_default_context(**{"capath" if os.path.isdir(trusted) else "cafile": trusted})


class DirectTransfers:
    """Transfers past the event loop of one ``s3fs.S3FileSystem``, and the connections that they use again.

    What cannot be done so is left to the event loop, which also tells what is wrong: after a failure so are the next transfers,
    twice as many after each failure in a row.
    """

    def __init__(self) -> None:
        self._connections = _Connections()
        self._lock = threading.Lock()
        self._failures = 0
        self._skipped = 0

    def read_range(self, filesystem: Any, path: str, begin: int, targets: Sequence[memoryview]) -> bool:
        """Fill several targets, one after the other, with the bytes of an object from ``begin`` on.

        Args:
            filesystem: An ``s3fs.S3FileSystem``, always the same.
            path: URL of the object.
            begin: Offset of the first byte.
            targets: Together as long as what is wanted.

        Returns:
            Whether that was done; if not, ``targets`` are undefined.
        """
        if self._is_skipped():
            return False
        bucket, key, version = filesystem.split_path(path)
        end = begin + sum(map(len, targets))
        wanted = {**filesystem.req_kw, "Bucket": bucket, "Key": key, "Range": f"bytes={begin}-{end - 1}"}
        if version:
            wanted["VersionId"] = version
        try:
            signed = fsspec.asyn.sync(filesystem.loop, _sign, filesystem, "get_object", **wanted)
            self._connections.exchange(signed, lambda: None, lambda answer: _receive(answer, targets))
        except Exception as error:  # noqa: BLE001 - the event loop tries again and tells what is wrong
            self._count_failure(error)
            return False
        self._failures = 0
        return True

    async def upload_part(self, filesystem: Any, data: memoryview, **arguments: Any) -> str | None:
        """Upload a part; called on the event loop of the filesystem.

        Args:
            filesystem: An ``s3fs.S3FileSystem``, always the same.
            data: What is sent.
            arguments: Of the request of that name, ``Body`` among them.

        Returns:
            The part's ``ETag``, or None if the part must be sent by the event loop.
        """
        if self._is_skipped():
            return None
        try:
            signed = await _sign(filesystem, "upload_part", **arguments)
            is_over = threading.Event()
            try:
                tag = await _in_thread(
                    lambda: self._connections.exchange(signed, lambda: _chunks(data, is_over), _etag)
                )
            finally:
                is_over.set()
        except Exception as error:  # noqa: BLE001 - as above
            self._count_failure(error)
            return None
        self._failures = 0
        return tag

    def _is_skipped(self) -> bool:
        with self._lock:
            self._skipped -= 1
            return self._skipped >= 0

    def _count_failure(self, error: Exception) -> None:
        with self._lock:
            self._failures += 1
            self._skipped = min(2**self._failures, _MOST_SKIPPED)
        why = str(error) if isinstance(error, _NotDoneError) else type(error).__name__
        logger.debug("a transfer is left to the event loop: %s", why)


class _Connections:
    """Connections to servers, each used by one thread at a time and kept open for the next."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[_Address, collections.deque[_Idle]] = {}
        self._tls: ssl.SSLContext | None = None

    def exchange(
        self,
        signed: _Signed,
        body: Callable[[], Iterator[memoryview] | None],
        finish: Callable[[http.client.HTTPResponse], Result],
    ) -> Result:
        """Send a request and return what ``finish`` makes of the answer, of which it reads every byte.

        Args:
            signed: The request.
            body: Gives what is sent, anew each time.
            finish: Takes the answer.
        """
        request = signed.request
        url = urllib.parse.urlsplit(request.url)
        resource = f"{url.path}?{url.query}" if url.query else url.path
        headers = {
            name: value.decode() if isinstance(value, bytes) else value
            for name, value in request.headers.items()
            if name.lower() != "expect"  # what it asks for is not waited for here
        }
        address = url.scheme, url.netloc
        while True:
            connection, is_new = self._take(signed, address)
            try:
                connection.request(request.method, resource, body=body(), headers=headers)
                _acknowledge_at_once(connection)
                answer = connection.getresponse()
                break
            except BaseException as error:
                connection.close()
                # The server may have closed a connection that was not in use; one that is silent is another matter.
                is_closed = isinstance(error, (OSError, http.client.HTTPException)) and not isinstance(
                    error, TimeoutError
                )
                if is_new or not is_closed:
                    raise
        try:
            result = finish(answer)
        except BaseException:
            connection.close()
            raise
        if answer.will_close:
            connection.close()
        else:
            self._put_back(address, connection)
        return result

    def _take(self, signed: _Signed, address: _Address) -> tuple[http.client.HTTPConnection, bool]:
        """Return a connection, and whether it is a new one."""
        with self._lock:
            idle = self._idle.get(address)
            while idle:
                since, connection = idle.pop()
                if time.monotonic() - since < _IDLE_SECONDS:
                    return connection, False
                connection.close()
            if self._tls is None and address[0] == "https":
                self._tls = signed.tls()
        timeout = signed.config.connect_timeout
        if address[0] == "https":
            connection = http.client.HTTPSConnection(address[1], timeout=timeout, context=self._tls)
        else:
            connection = http.client.HTTPConnection(address[1], timeout=timeout)
        try:
            connection.connect()
            connection.sock.settimeout(signed.config.read_timeout)
        except BaseException:
            connection.close()
            raise
        return connection, True

    def _put_back(self, address: _Address, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            idle = self._idle.setdefault(address, collections.deque())
            now = time.monotonic()
            while idle and now - idle[0].since >= _IDLE_SECONDS:
                idle.popleft().connection.close()
            idle.append(_Idle(now, connection))


def _acknowledge_at_once(connection: http.client.HTTPConnection) -> None:
    """Do not let a server wait that sends the end of a small answer only when its beginning was acknowledged: 40 ms each time.

    Ceph does so by default. What is sent makes the system forget it.
    """
    if hasattr(socket, "TCP_QUICKACK"):
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)


async def _in_thread(work: Callable[[], Result]) -> Result:
    """Return what ``work`` returns, from a thread of its own; whoever is cancelled does not wait for it."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Result] = loop.create_future()

    def finish(result: Result | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(cast(Result, result))

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            loop.call_soon_threadsafe(finish, None, error)
        else:
            loop.call_soon_threadsafe(finish, result, None)

    threading.Thread(target=run, name="ckpt-send", daemon=True).start()
    return await done


def _chunks(data: memoryview, is_over: threading.Event) -> Iterator[memoryview]:
    for begin in range(0, len(data), _CHUNK):
        if is_over.is_set():
            raise _NotDoneError("the upload was given up")
        yield data[begin : begin + _CHUNK]


def _receive(answer: http.client.HTTPResponse, targets: Sequence[memoryview]) -> None:
    # Some stores answer 200 and send the range.
    if answer.status not in (200, 206) or answer.length != sum(map(len, targets)):
        raise _NotDoneError(f"HTTP {answer.status} with {answer.length} bytes")
    for target in targets:
        left = target
        while left:
            received = answer.readinto(left)
            if received == 0:
                raise _NotDoneError("the connection was closed")
            left = left[received:]


def _etag(answer: http.client.HTTPResponse) -> str:
    answer.read()
    tag = answer.headers.get("ETag")
    if answer.status != 200 or not tag:
        raise _NotDoneError(f"HTTP {answer.status}")
    return tag
