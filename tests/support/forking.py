"""Prepares a process for being forked (what each child would repeat, it does once), and forks ranks from it."""

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

#: If installed, Lightning imports them when it handles its first path: some thousand modules, which takes a second.
CLOUDS = ("adlfs", "gcsfs", "s3fs")


def get_ready() -> None:
    """Import what is left to import, and exclude it from garbage collections, which would copy its pages in a child."""
    if {"lightning.fabric", "lightning_fabric"} & sys.modules.keys():
        for name in CLOUDS:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    # At its exit, each child would call one by one the finalizers that torch has registered here.
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False
    gc.collect()
    gc.freeze()


def serve(answer: Callable[[dict[str, Any]], object]) -> None:
    """Answer each line of JSON on standard input with one on standard output; other output goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)


def fork_rank(body: Callable[[], object], environment: Mapping[str, str], log: str, group: int | None = None) -> int:
    """Run ``body`` in a forked child, with its output in ``log``; return the child's process id.

    The child is in the process group of its parent, or in ``group`` (0: a new one of its own).
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
    """Return the environment variables that a launcher sets for a rank on one machine; none if there is only one."""
    if ranks == 1:
        return {}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": "0"}
    return {**address, "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
