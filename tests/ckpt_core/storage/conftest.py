"""The servers of the tests of this folder."""

from __future__ import annotations

from tests.support.server_fixtures import server_of, servers

__all__ = ["server_of", "servers"]
