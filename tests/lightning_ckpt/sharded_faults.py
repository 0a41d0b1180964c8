"""Faults to inject into the saves of ``sharded_script.py``."""

from __future__ import annotations

import errno
import os
import signal
import threading
from typing import Any

from lightning.pytorch.callbacks import Callback

from ckpt_core.storage import Fault, FaultyStorage, LocalStorage, Operation


class SetInBatch(Callback):
    """Sets an event when the n-th batch begins."""

    def __init__(self, event: threading.Event, count: int) -> None:
        self.event, self.count = event, count

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if len(module.seen) + 1 >= self.count:
            self.event.set()


def faulty_storage(fault: dict[str, Any], rank: int, late: threading.Event) -> FaultyStorage:
    """Return a storage that fails, or kills ranks, in the middle of a save: when this rank's first file is written."""

    def is_meant(operation: Operation) -> bool:
        return operation.name == "commit" and fault["save"] in operation.path

    if fault["act"] == "fail":
        error: BaseException = OSError(errno.ENOSPC, "No space left on device")
        if rank == fault["rank"]:
            return FaultyStorage(LocalStorage(), [Fault(is_meant, error=error)])
        return FaultyStorage(LocalStorage(), [Fault("discard_directory", until=late)] if "late" in fault else [])

    def kill(operation: Operation) -> bool:
        if is_meant(operation):
            if fault["rank"] is None:
                os.killpg(0, signal.SIGKILL)
            elif fault["rank"] == rank:
                os.kill(os.getpid(), signal.SIGKILL)
        return False

    return FaultyStorage(LocalStorage(), [Fault(kill)])
