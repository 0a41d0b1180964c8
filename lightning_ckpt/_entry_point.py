"""The callback that Lightning adds to every Trainer and Fabric where this package is installed, through its entry points.

It does nothing unless there is a :class:`~lightning_ckpt.ShardedCheckpointIO`, which would not be used otherwise. It is made in
programs that never heard of it, so nothing is imported here that is not imported already.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

__all__ = ["callbacks"]

_CALLBACK_MODULES = ("lightning.pytorch.callbacks", "pytorch_lightning.callbacks")
_PLUGIN_MODULE = "lightning_ckpt.sharded"


class _Routing:
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Hook of the Trainer: its processes are connected, and nothing has been loaded."""
        if _PLUGIN_MODULE in sys.modules:
            importlib.import_module("lightning_ckpt._sharded_routing").route(trainer)

    def on_after_setup(self, fabric: Any, module: Any) -> None:
        """Hook of Fabric: a model has been set up."""
        if _PLUGIN_MODULE in sys.modules:
            importlib.import_module("lightning_ckpt._fabric_routing").route_fabric(fabric)


def callbacks() -> list[Any]:
    """Return the callbacks to add to a Trainer or to Fabric."""
    # of the packages that are in use: a Trainer wants its own base class
    bases = [sys.modules[name].Callback for name in _CALLBACK_MODULES if hasattr(sys.modules.get(name), "Callback")]
    return [type("ShardedRouting", (_Routing, *bases), {"__module__": __name__})()]
