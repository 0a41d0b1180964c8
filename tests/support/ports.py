"""Ports for servers and process groups of tests."""

from __future__ import annotations

import contextlib
import random
import socket


def free_port() -> int:
    """Return a port that nobody listens to, and that no outgoing connection is going to take before a server does."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
