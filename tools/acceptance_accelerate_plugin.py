"""PYTEST_DONT_REWRITE. Makes Accelerate's own tests use our ``save_state`` and ``load_state``.

A pytest plugin that installs the strategy named in ``ACCEPTANCE_STRATEGY`` for every Accelerator of this process, and
of those that the tests fork, and appends the outcome of every phase of every test to the file named in
``ACCEPTANCE_RESULTS``.
"""

from __future__ import annotations

import collections
import functools
import json
import os
from typing import Any

calls: collections.Counter[str] = collections.Counter()


def pytest_configure() -> None:
    """Replace the methods before a test module is imported."""
    strategy = os.environ.get("ACCEPTANCE_STRATEGY")
    if not strategy:
        return
    from accelerate import Accelerator

    from accelerate_ckpt import CheckpointConfig
    from accelerate_ckpt._attach import install
    from ckpt_core import small_states

    if os.environ.get("ACCEPTANCE_NEVER_WAIT"):
        small_states.SMALL_STATE_BYTES = -1
    install(CheckpointConfig(strategy=strategy))
    for name in ("save_state", "load_state"):
        setattr(Accelerator, name, _counted(name, getattr(Accelerator, name)))


def _counted(name: str, method: Any) -> Any:
    @functools.wraps(method)
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return method(*args, **kwargs)

    return counted


def pytest_runtest_logreport(report: Any) -> None:
    """Append one phase (setup, call, teardown) of one test."""
    _append({"test": report.nodeid, "phase": report.when, "outcome": report.outcome})


def pytest_sessionfinish() -> None:
    """Append how often our methods were called in this process."""
    _append({"calls": dict(calls)})


def _append(record: dict[str, Any]) -> None:
    with open(os.environ["ACCEPTANCE_RESULTS"], "a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
