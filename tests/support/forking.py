"""Makes a process ready to have others forked from it: what each of them would do again, it has done once."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import sys
import traceback
import weakref
from collections.abc import Callable, Mapping
from typing import Any

#: Where they are installed, Lightning imports them with the first path that it sees: some thousand modules in a second.
CLOUDS = ("adlfs", "gcsfs", "s3fs")


def get_ready() -> None:
    """Import what is left to import, and keep all of it out of collections, which would copy its pages."""
    if {"lightning.fabric", "lightning_fabric"} & sys.modules.keys():
        for name in CLOUDS:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    # At the end of each child torch would take back one by one what it has registered here.
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False
    gc.collect()
    gc.freeze()


def serve(answer: Callable[[dict[str, Any]], object]) -> None:
    """Answer each line of JSON on standard input with one; what else is written there goes to the log."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)


def fork_rank(body: Callable[[], object], environment: Mapping[str, str], log: str, group: int | None = None) -> int:
    """Run ``body`` in a child; its process number.

    It is in the process group of its parent, or in ``group``: with 0, one of its own.
    """
    process = os.fork()
    if process:
        if group is not None:
            os.setpgid(process, group or process)
        return process
    if group is not None:
        os.setpgid(0, group)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(environment)
    status = 1
    try:
        body()
        status = 0
    except BaseException:  # noqa: BLE001 - a forked child must never return into its parent's code
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def rank_variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return what a launcher tells a rank of several on one machine; nothing to one alone."""
    if ranks == 1:
        return {}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": "0"}
    return {**address, "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
