"""Forks the trainings that the campaign kills.

This process has imported torch, Lightning and Accelerate, so by forking it starts a training in a fraction of a second
instead of ten. It reads one order per line of standard input, a JSON object: ``framework``, ``run`` (the directory),
``ranks``, and the ``arguments`` of the training. It answers with a list of process ids, one for each rank and all in
the process group of the first, and once all of them are gone, with a list of their exit statuses.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import s3fs  # noqa: F401 - imported once for all trainings, and so are the next ones
import torch._dynamo  # noqa: F401

import accelerate_ckpt._state.session  # noqa: F401
from accelerate_ckpt import launcher
from tests.chaos import train
from tests.support.ports import free_port

HERE = Path(__file__).resolve().parent


def main() -> None:
    """Carry out orders until there are no more."""
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        reading, writing = os.pipe()
        port = free_port()
        ranks: list[int] = []
        for rank in range(order["ranks"]):
            child = os.fork()
            if child == 0:
                os.close(reading)
                be_rank(order, rank, ranks[0] if ranks else 0, port, writing)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.setpgid(child, ranks[0] if ranks else child)  # as does the child, whichever is first
            ranks.append(child)
        print(json.dumps(ranks), flush=True)
        os.close(writing)
        with open(reading, "rb", buffering=0) as pipe, Path(order["run"], "console.log").open("ab") as log:
            # Ends when the last process that has the other end open is dead.
            while block := pipe.read(65536):
                log.write(block)
                log.flush()
        statuses = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
        print(json.dumps(statuses), flush=True)


def be_rank(order: dict[str, Any], rank: int, group: int, port: int, output: int) -> None:
    """Run as one rank of a training, and exit."""
    with contextlib.suppress(PermissionError):
        os.setpgid(0, group)
    os.nice(1)  # the process that kills this one at the right moment must not wait for the CPU
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.close(output)
    os.close(0)
    world = order["ranks"]
    if world > 1:
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            NODE_RANK="0",
            WORLD_SIZE=str(world),
            LOCAL_WORLD_SIZE=str(world),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
    status = 1
    try:
        if order["framework"] == train.NAME:
            train.main(order["arguments"])
        else:
            launcher.main(order["arguments"])
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - a forked child must never return into its parent's code
        traceback.print_exc()
    # What an interpreter does at exit, except freeing torch's memory, which takes seconds in a forked process.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
