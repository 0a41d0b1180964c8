"""The processes of a test run share one server, which runs as long as one of them does."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.support.moto_server import OneAtATime
from tests.support.server_fixtures import server_of, servers
from tests.support.servers import Server
from tests.support.shared_servers import ROOT, ServerPool

__all__ = ["server_of", "servers"]

ASKER = """
import json, os, sys, time
from pathlib import Path
from tests.support.shared_servers import ServerPool
pool = ServerPool(Path(sys.argv[1]))
server = pool[sys.argv[2]]
print(json.dumps([server.endpoint, server.new_bucket()]), flush=True)
child = os.fork() if "fork" in sys.argv else None  # which must not keep the server
if child == 0:
    time.sleep(60)
    os._exit(0)
sys.stdin.readline()
pool.close()
print("null", flush=True)
sys.stdin.read()
if child:
    os.kill(child, 9)
"""


def ask(directory: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", ASKER, str(directory), *words]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def answer(asker: subprocess.Popen[str]) -> Any:
    assert asker.stdout is not None
    return json.loads(asker.stdout.readline())


def is_up(endpoint: str) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex((urlsplit(endpoint).hostname or "", urlsplit(endpoint).port or 0)) == 0


def goes_down(endpoint: str) -> bool:
    deadline = time.monotonic() + 200
    while is_up(endpoint) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not is_up(endpoint)


@pytest.mark.parametrize("kind", ["moto", pytest.param("ceph", marks=pytest.mark.slow)])
def test_who_asks_at_once_gets_one_server_that_runs_until_the_last_has_left(
    tmp_path: Path, kind: str, server_of: Callable[[str], Server]
) -> None:
    server_of(kind)  # skipped where it is not installed
    askers = [ask(tmp_path, kind), ask(tmp_path, kind, "fork")]
    (endpoint, bucket), (other_endpoint, other_bucket) = map(answer, askers)
    assert endpoint == other_endpoint and bucket != other_bucket
    askers[0].kill()  # SIGKILL: it cannot release the server itself
    askers[0].communicate()
    assert is_up(endpoint)
    pool = ServerPool(tmp_path)
    assert pool[kind].endpoint == endpoint
    assert askers[1].stdin is not None
    print(file=askers[1].stdin, flush=True)
    assert answer(askers[1]) is None
    assert is_up(endpoint)
    pool.close()
    assert goes_down(endpoint)
    askers[1].communicate()
    assert askers[1].returncode == 0


def test_after_the_last_has_left_another_server_is_started(tmp_path: Path) -> None:
    pool = ServerPool(tmp_path)
    before = pool["moto"].endpoint
    pool.close()
    assert goes_down(before)
    after = pool["moto"].endpoint
    assert is_up(after) and after != before
    pool.close()
    assert goes_down(after)


def test_moto_answers_a_request_when_it_is_done_with_the_one_before() -> None:
    has_arrived, is_begun, may_end, sizes = threading.Semaphore(0), threading.Event(), threading.Event(), []

    class Body(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            has_arrived.release()
            return super().read(size)

    def answer(environ: dict[str, Any], _: Any) -> None:
        is_begun.set()
        assert may_end.wait(200)
        sizes.append(environ["wsgi.input"].getbuffer().nbytes)

    answer_in_turn = OneAtATime(answer)
    requests = [{"CONTENT_LENGTH": str(size), "wsgi.input": Body(b"x" * 9)} for size in (5, 7)]
    threads = [threading.Thread(target=answer_in_turn, args=(request, None)) for request in requests]
    threads[0].start()
    assert has_arrived.acquire(timeout=200)
    assert is_begun.wait(200)
    is_begun.clear()
    threads[1].start()
    assert has_arrived.acquire(timeout=200), "a client that is slow to send holds up no other"
    assert not is_begun.wait(0.2)
    may_end.set()
    for thread in threads:
        thread.join(200)
    assert sizes == [5, 7]


def test_what_is_missing_is_told_to_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.support.servers import MissingServerError

    monkeypatch.setenv("CKPT_AZURITE", os.fspath(tmp_path))
    pools = [ServerPool(tmp_path / "run") for _ in range(2)]
    for pool in pools:
        with pytest.raises(MissingServerError, match="azurite-blob"):
            pool["azurite"]
    for pool in pools:
        pool.close()
