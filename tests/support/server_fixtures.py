"""Fixtures that start servers of object stores; a folder's ``conftest.py`` imports them."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import NoReturn

# gcsfs, which reads this when imported, would probe a bucket's kind by gRPC and TLS, which the emulator does not speak.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
# Without credentials, clients would wait for the metadata service of a cloud that is not there.
os.environ.setdefault("AWS_EC2_METADATA_DISABLED", "true")

import pytest

from tests.support.servers import MissingServerError, Server
from tests.support.shared_servers import ServerPool


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPool]:
    """Return the pool of servers, each started when it is first asked for; pytest-xdist's workers share them."""
    base = tmp_path_factory.getbasetemp()
    pool = ServerPool((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "servers")
    with pytest.MonkeyPatch.context() as patch:
        with contextlib.suppress(ImportError):
            from botocore.loaders import JSONFileLoader

            # Each of botocore's sessions would parse megabytes again, which takes longer than most tests.
            patch.setattr(JSONFileLoader, "load_file", staticmethod(functools.cache(JSONFileLoader().load_file)))
        yield pool
    pool.close()


@pytest.fixture(scope="session")
def server_of(servers: ServerPool, unavailable: Callable[[str], NoReturn]) -> Callable[[str], Server]:
    """``server_of(kind)`` returns the running server, or ends the test where it is not installed."""

    def get(kind: str) -> Server:
        try:
            return servers[kind]
        except MissingServerError as missing:
            unavailable(str(missing))

    return get
