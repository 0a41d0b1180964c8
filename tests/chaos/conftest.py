"""The S3 server of the kill campaign's tests."""

from __future__ import annotations

from tests.support.server_fixtures import server_of, servers

__all__ = ["server_of", "servers"]
