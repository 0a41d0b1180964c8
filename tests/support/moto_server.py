"""Runs moto, a simulation of S3, on the port that is given; it answers one request at a time.

By itself, it answers 500 where one request deletes an object that another one is just listing.
"""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable
from typing import Any


class OneAtATime:
    """A WSGI application that answers no request before it is done with the one before.

    A request begins when all of it has arrived: a client that is slow, or stopped, holds up no other.
    """

    def __init__(self, answer: Callable[..., Any]) -> None:
        self._answer, self._lock = answer, threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        if length := int(environ.get("CONTENT_LENGTH") or 0):
            environ["wsgi.input"] = io.BytesIO(environ["wsgi.input"].read(length))
        with self._lock:
            return self._answer(environ, start_response)


if __name__ == "__main__":
    from moto import server

    make = server.DomainDispatcherApplication
    server.DomainDispatcherApplication = lambda *arguments: OneAtATime(make(*arguments))  # type: ignore[assignment, misc]
    server.main(["-H", "127.0.0.1", "-p", sys.argv[1]])
