"""``python -m benchmarks.gpu``: the table of ``ckpt_core.gpu_check``, with Lightning's own plugin and torchsnapshot.

The row of a contender that is not installed says so.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from ckpt_core.gpu_check import CONTENDERS, Contender, main


class _Lightning(Contender):
    """Lightning's own asynchronous plugin, which clones tensors on the device before ``torch.save``."""

    def __init__(self) -> None:
        super().__init__("Lightning AsyncCheckpointIO")
        from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

        self._make = lambda: AsyncCheckpointIO(TorchCheckpointIO())
        self._io = self._make()

    def save(self, state: dict[str, Any], path: str) -> None:
        self._io.save_checkpoint(state, path)

    def finish(self) -> None:
        self._io.teardown()
        self._io = self._make()


class _TorchSave(Contender):
    """``torch.save``: training waits until it is written, but not until it is on the disk."""

    def __init__(self) -> None:
        super().__init__("torch.save")

    def save(self, state: dict[str, Any], path: str) -> None:
        import torch

        torch.save(state, path)


class _Torchsnapshot(Contender):
    def __init__(self) -> None:
        super().__init__("torchsnapshot async_take")
        import torchsnapshot  # type: ignore[import-not-found,unused-ignore]

        self._library = torchsnapshot
        self._pending: Any = None

    def save(self, state: dict[str, Any], path: str) -> None:
        self.finish()
        app_state = {name: self._library.StateDict(state=value) for name, value in state.items()}
        self._pending = self._library.Snapshot.async_take(path, app_state)

    def finish(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()


PEERS: tuple[Callable[[], Contender], ...] = (_TorchSave, _Lightning, _Torchsnapshot)

if __name__ == "__main__":
    sys.exit(main(contenders=(*CONTENDERS, *PEERS)))
