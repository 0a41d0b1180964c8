"""PYTEST_DONT_REWRITE. Makes Lightning's own tests use one of our ``CheckpointIO`` plugins by default.

Every Python process of a test run installs the hook below (through ``sitecustomize``, because tests spawn processes).
Once ``lightning.pytorch`` has been imported, the class named in ``ACCEPTANCE_IO`` replaces ``TorchCheckpointIO``
everywhere, in the strategies' default as well as in what the tests import, and the class named in
``ACCEPTANCE_CALLBACK``, if any, replaces ``ModelCheckpoint``. In the pytest process, this module is also a plugin that
appends the outcome of every phase of every test to the file named in ``ACCEPTANCE_RESULTS``.
"""

from __future__ import annotations

import collections
import functools
import importlib
import importlib.abc
import importlib.util
import io
import json
import os
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

METHODS = ("save_checkpoint", "load_checkpoint", "remove_checkpoint", "teardown")

calls: collections.Counter[str] = collections.Counter()


class _AfterLightning(importlib.abc.MetaPathFinder):
    """Swaps after Lightning's first import, which runs as usual; a process without that import imports nothing."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "lightning.pytorch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_swap(module: Any) -> None:
            execute(module)
            _bridge_versions()
            if os.environ.get("ACCEPTANCE_IO"):
                _swap(os.environ["ACCEPTANCE_IO"])
            if os.environ.get("ACCEPTANCE_CALLBACK"):
                _swap_callback(os.environ["ACCEPTANCE_CALLBACK"])

        spec.loader.exec_module = execute_and_swap  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Arrange for the swap when Lightning is imported in this process."""
    sys.meta_path.insert(0, _AfterLightning())


def _bridge_versions() -> None:
    """Define a name that tests of Lightning's development version import, and that a release may not have yet."""
    from lightning.pytorch.utilities import imports

    if not hasattr(imports, "_TORCH_GREATER_EQUAL_2_11"):
        import torch

        imports._TORCH_GREATER_EQUAL_2_11 = torch.torch_version.TorchVersion(torch.__version__) >= (2, 11)


def _swap(name: str) -> None:
    import lightning.fabric
    import lightning.pytorch  # noqa: F401 - the modules in which the class is looked for
    from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

    module_name, class_name = name.split(":")
    ours = getattr(importlib.import_module(module_name), class_name)
    if os.environ.get("ACCEPTANCE_NEVER_WAIT"):
        importlib.import_module("ckpt_core.small_states").SMALL_STATE_BYTES = 0
    for method in METHODS:
        setattr(ours, method, _counted(method, getattr(ours, method)))
    for module in list(sys.modules.values()):
        is_lightning = getattr(module, "__name__", "").startswith("lightning.")
        if is_lightning and vars(module).get("TorchCheckpointIO") is TorchCheckpointIO:
            module.TorchCheckpointIO = ours


def _swap_callback(name: str) -> None:
    import lightning.pytorch.callbacks.model_checkpoint as stock

    module_name, class_name = name.split(":")
    ours, replaced = getattr(importlib.import_module(module_name), class_name), stock.ModelCheckpoint
    # The name of the class is part of the key of the callback's state.
    ours.__name__ = ours.__qualname__ = replaced.__qualname__
    setattr(sys.modules[ours.__module__], ours.__name__, ours)
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("lightning.") and vars(module).get("ModelCheckpoint") is replaced:
            module.ModelCheckpoint = ours


def _counted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def counted(*args: Any, **kwargs: Any) -> Any:
        import torch

        calls[name] += 1
        if name == "save_checkpoint" and isinstance(torch.save, mock.NonCallableMock):
            # Tests count saves by calls of torch.save, which our plugins do not use. The real save follows.
            torch.save({}, io.BytesIO())
        return method(*args, **kwargs)

    return counted


def pytest_configure(config: Any) -> None:
    """Register the marker of pytest-rerunfailures, which is not used: a rerun would hide a race."""
    config.addinivalue_line("markers", "flaky(reruns): ignored, every test runs once")


def pytest_runtest_logreport(report: Any) -> None:
    """Append one phase (setup, call, teardown) of one test."""
    _append({"test": report.nodeid, "phase": report.when, "outcome": report.outcome})


def pytest_sessionfinish() -> None:
    """Append how often our plugin's methods were called in this process."""
    _append({"calls": dict(calls)})


def _append(record: dict[str, Any]) -> None:
    with open(os.environ["ACCEPTANCE_RESULTS"], "a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
