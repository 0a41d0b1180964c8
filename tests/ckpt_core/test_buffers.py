"""Saves with little memory: slower, or refused by name; never a raw error, never a damaged checkpoint."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from ckpt_core import buffers as buffers_module
from ckpt_core.errors import OutOfMemoryError
from tests.conftest import ScriptRunner

# The limit is on the address space, which includes thread stacks: the memory left is not known to a megabyte.
SCRIPT = """
import json, logging, os, resource, sys
import torch
from ckpt_core import *

torch.set_num_threads(1)
layout, spare, directory = sys.argv[1], int(sys.argv[2]), os.getcwd()
texts = []
handler = logging.Handler()
handler.emit = lambda record: texts.append(record.getMessage())
logging.getLogger("ckpt_core").addHandler(handler)
path = sys.argv[3]
checkpointer = Checkpointer(strategy="async") if layout == "file" else DirectoryCheckpointer(strategy="async")

def save(size, value):
    state = {"w": torch.full((size,), value)}
    if layout == "file":
        checkpointer.save(state, path)
    else:
        checkpointer.save([Part("model", state, Kind.REPLICATED)], path, step=1)
    checkpointer.wait()

save(10, 1.0)
used = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + (spare << 20), -1))
state = torch.empty(0)
failure = None
try:
    save(40_000_000, 2.0)
except CheckpointError as error:
    failure = [type(error).__name__, str(error)]
except RuntimeError:  # torch has no memory for the state itself
    raise SystemExit("the limit is too low for the test")
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
verify(path)
found = checkpointer.load(path)
weight = (found if layout == "file" else found.load("model"))["w"]
save(10, 3.0)
print(json.dumps([failure, weight.numel(), float(weight[0]), float(weight[-1]), texts]))
"""


@pytest.mark.parametrize("layout", ["file", "directory"])
def test_a_state_of_which_there_is_no_room_for_a_copy_is_saved_all_the_same(
    layout: str, fork_script: ScriptRunner, tmp_path: object
) -> None:
    failure, size, first, last, texts = json.loads(fork_script(SCRIPT, layout, 280, f"{tmp_path}/a").stdout)
    assert failure is None
    assert (size, first, last) == (40_000_000, 2.0, 2.0)
    (text,) = texts
    assert "training waits" in text
    assert "1600" in text  # bytes
    assert "strategy='sync'" in text


@pytest.mark.parametrize("layout", ["file", "directory"])
def test_where_there_is_no_room_for_anything_the_old_checkpoint_stays(
    layout: str, fork_script: ScriptRunner, tmp_path: object
) -> None:
    failure, size, first, _, _ = json.loads(fork_script(SCRIPT, layout, 165, f"{tmp_path}/a").stdout)
    assert failure is not None
    assert failure[0] == "OutOfMemoryError"
    assert "what to do: free memory" in failure[1]
    assert (size, first) == (10, 1.0)


def test_threads_that_all_find_no_memory_do_not_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers, may_fail, failures = buffers_module.ScratchBuffers(), threading.Event(), []

    def allocate(_: int, **__: Any) -> None:
        if threading.current_thread().name == "first":
            may_fail.wait()
        raise OutOfMemoryError("there is no memory")

    def take() -> None:
        try:
            with buffers.lent(1):
                pass
        except OutOfMemoryError as error:
            failures.append(error)

    monkeypatch.setattr(buffers_module, "StagingBuffer", allocate)
    threads = [threading.Thread(target=take, name=name, daemon=True) for name in ("first", "second")]
    for thread in threads:
        thread.start()
    threads[1].join(0.5)  # it waits for the memory that the first thread may get
    may_fail.set()
    for thread in threads:
        thread.join(200)
    assert len(failures) == 2
