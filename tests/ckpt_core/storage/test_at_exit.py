"""The end of a process: saves that nobody waited for are committed, and a forked process waits for none of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import torch

from ckpt_core import Checkpointer, DirectoryCheckpointer
from tests.support.servers import Server
from tests.support.stores import storage_at

SAVE = """
import json, os, sys
import torch
from ckpt_core import Checkpointer, DirectoryCheckpointer, Kind, Part

path, options = sys.argv[1], json.loads(sys.argv[2])
state = {"w": torch.arange(6 * 2**20, dtype=torch.float32)}
kept = Checkpointer(strategy="async", storage_options=options)
kept.save(state, path + "/a.ckpt")
directories = DirectoryCheckpointer(strategy="async", storage_options=options)
directories.save([Part("model", state, Kind.REPLICATED)], path + "/b")
"""

FORK = """
import os, sys, threading
from ckpt_core.process import at_exit

over = threading.Event()
thread = threading.Thread(target=over.wait, args=(50,))
thread.start()
at_exit.wait_for(thread)
child = os.fork()
if child:
    print("ended", os.waitpid(child, 0)[1], flush=True)
    print("still there" if thread.is_alive() else "gone", flush=True)
    over.set()
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-c", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, cwd=os.getcwd())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["rclone", "azurite"])
def test_saves_that_nobody_waits_for(kind: str, server_of: Callable[[str], Server]) -> None:
    server = server_of(kind)
    root, options = f"{server.new_bucket()}/run", dict(server.options)
    ended = run(SAVE, root, json.dumps(options))
    assert (ended.returncode, ended.stderr) == (0, "")
    expected = torch.arange(6 * 2**20, dtype=torch.float32)
    assert torch.equal(Checkpointer(storage_options=options).load(f"{root}/a.ckpt")["w"], expected)
    with DirectoryCheckpointer(storage_options=options).load(f"{root}/b") as checkpoint:
        assert torch.equal(checkpoint.load("model")["w"], expected)
    storage = storage_at((root, options))
    assert storage.hidden_objects(root, ".ckpt-lease-") == [], "the claim has ended, too"  # type: ignore[attr-defined]


def test_a_forked_process_does_not_wait() -> None:
    ended = run(FORK)
    assert ended.stdout.splitlines() == ["ended 0", "still there"], ended.stderr


def test_threading_still_has_the_call() -> None:
    """It is not a public function; without it, what this file tests does not work."""
    assert callable(threading._register_atexit)  # type: ignore[attr-defined]
