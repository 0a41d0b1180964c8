"""An HTTP proxy in front of a real server that makes chosen requests fail as networks and stores do."""

from __future__ import annotations

import dataclasses
import http.client
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

#: What may happen to a request.
FAULTS = (
    "500",  # refused: internal error
    "503",  # refused: overload
    "429",  # refused: too many requests
    "reset",  # the connection breaks before the server has seen the request
    "lost reply",  # the server carries the request out, then the connection breaks
    "cut reply",  # the connection breaks in the middle of the reply
    "hang",  # no reply ever
)
#: Faults of a device between client and store that answers in the store's place.
FOREIGN = ("empty answer", "foreign answer")
HANG_SECONDS = 30.0
_NOT_FORWARDED = {"connection", "expect", "keep-alive", "transfer-encoding"}
_REFUSAL = (
    b'<?xml version="1.0" encoding="UTF-8"?><Error><Code>%s</Code><Message>not now</Message>'
    b"<RequestId>1</RequestId></Error>"
)
_CODES = {500: b"InternalError", 503: b"SlowDown", 429: b"TooManyRequests"}


@dataclasses.dataclass(frozen=True)
class HttpFault:
    """A fault: what goes wrong, and at which request.

    Args:
        kind: One of :data:`FAULTS` or :data:`FOREIGN`.
        number: Number of the request that fails, from 1.
        for_good: Whether all requests after it fail, too.
    """

    kind: str
    number: int
    for_good: bool = False

    def meets(self, number: int) -> bool:
        """Return whether the request of this number fails."""
        return number == self.number or (self.for_good and number > self.number)


class FaultProxy(ThreadingHTTPServer):
    """The proxy; see :func:`start_proxy`.

    Attributes:
        endpoint: Where it listens.
        requests: ``"METHOD path?query"`` of every request since the last :meth:`plan`.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, upstream: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"
        self.upstream = urlsplit(upstream).netloc
        self.requests: list[str] = []
        self.stopping = threading.Event()
        self._fault: HttpFault | None = None
        self._lock = threading.Lock()

    def plan(self, fault: HttpFault | None) -> None:
        """Count requests from 1 again, and let ``fault`` happen (None: no fault)."""
        with self._lock:
            self.requests, self._fault = [], fault

    def fault_of_next(self, request: str) -> str | None:
        """Count a request; return what is to happen to it."""
        with self._lock:
            self.requests.append(request)
            return self._fault.kind if self._fault is not None and self._fault.meets(len(self.requests)) else None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: clients that hang up are expected."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultProxy

    def _forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.server.fault_of_next(f"{self.command} {self.path}")
        if fault == "reset":
            self._break()
        elif fault == "hang":
            self.server.stopping.wait(HANG_SECONDS)
            self._break()
        elif fault in ("500", "503", "429"):
            self._reply(int(fault), {"Content-Type": "application/xml"}, _REFUSAL % _CODES[int(fault)])
        elif fault in FOREIGN:
            page = b"" if fault == "empty answer" else b"<html><body>Please log in</body></html>"
            self._reply(200, {"Content-Type": "text/html"}, page)
        else:
            status, headers, content = self._ask_upstream(body)
            if fault == "lost reply" or (fault == "cut reply" and not content):
                self._break()
            elif fault == "cut reply":
                self._reply(status, headers, content, sent=len(content) // 2)
                self._break()
            else:
                self._reply(status, headers, content)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _forward  # noqa: N815 - the base class looks for these

    def _ask_upstream(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(self.server.upstream, timeout=120)
        try:
            headers = {name: value for name, value in self.headers.items() if name.lower() not in _NOT_FORWARDED}
            connection.request(self.command, self.path, body=body, headers=headers)
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()

    def _reply(self, status: int, headers: dict[str, str], content: bytes, *, sent: int | None = None) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in _NOT_FORWARDED | {"content-length"}:
                self.send_header(name, value)
        length = headers.get("Content-Length") or headers.get("content-length")
        self.send_header("Content-Length", length if self.command == "HEAD" and length else str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[:sent])

    def _break(self) -> None:
        self.wfile.flush()
        # Linger for 0 seconds: closing sends a reset (RST) instead of an orderly end (FIN).
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


@contextmanager
def start_proxy(upstream: str) -> Iterator[FaultProxy]:
    """Start a proxy in front of the server at the URL ``upstream``."""
    proxy = FaultProxy(upstream)
    thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.stopping.set()
        proxy.shutdown()
        proxy.server_close()
        thread.join(10)
