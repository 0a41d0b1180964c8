"""Runs moto, a simulation of S3, on a given port, so that it handles one request at a time.

Unchanged, moto answers 500 if one request deletes an object while another one lists it.
"""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable
from typing import Any


class OneAtATime:
    """A WSGI application that handles requests one after the other.

    A request is handled once all of it has arrived, so a client that is slow or stopped does not block others.
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
