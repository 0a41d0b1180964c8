"""Ports for servers and process groups of tests."""

from __future__ import annotations

import random
import socket

_held: list[socket.socket] = []


def free_port() -> int:
    """Return a port that nobody listens to, and that no outgoing connection is going to take before a server does.

    It stays this process's: a socket is bound to it, on which nobody listens, so that a server may listen there (all
    of ours set SO_REUSEADDR), and no other test that asks for a port is given it.
    """
    while True:
        holder = socket.socket()
        try:
            holder.bind(("127.0.0.1", random.SystemRandom().randrange(20_000, 32_000)))
        except OSError:
            holder.close()
            continue
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # only now: whoever else holds it has the same
        _held.append(holder)
        return int(holder.getsockname()[1])
