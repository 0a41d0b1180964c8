"""Makes a process ready to have others forked from it: what each of them would do again, it has done once."""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys

#: Where they are installed, Lightning imports them with the first path that it sees: some thousand modules in a second.
CLOUDS = ("adlfs", "gcsfs", "s3fs")


def get_ready() -> None:
    """Import what is left to import, and keep all of it out of collections, which would copy its pages."""
    if {"lightning.fabric", "lightning_fabric"} & sys.modules.keys():
        for name in CLOUDS:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    gc.collect()
    gc.freeze()
