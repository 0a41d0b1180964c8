"""Reserves ports for the servers and process groups of tests."""

from __future__ import annotations

import random
import socket

_held: list[socket.socket] = []


def free_port() -> int:
    """Return a port on which no server listens, and that no outgoing connection will take before a server does.

    It stays reserved for this process: a socket that does not listen is bound to it, so that a server may listen there
    (all of ours set SO_REUSEADDR), but no other test that asks for a port gets it.
    """
    while True:
        holder = socket.socket()
        try:
            holder.bind(("127.0.0.1", random.SystemRandom().randrange(20_000, 32_000)))
        except OSError:
            holder.close()
            continue
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # only now: bind() would share a held port
        _held.append(holder)
        return int(holder.getsockname()[1])
