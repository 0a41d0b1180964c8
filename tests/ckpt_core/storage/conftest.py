"""Fixtures: the servers that the tests of this folder use."""

from __future__ import annotations

from tests.support.server_fixtures import server_of, servers

__all__ = ["server_of", "servers"]
