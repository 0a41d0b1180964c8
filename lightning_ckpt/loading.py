"""``load_from_checkpoint`` for checkpoints that are directories."""

from __future__ import annotations

from typing import Any, TypeVar

from ckpt_core.interchange import load_whole
from ckpt_core.paths import StrPath
from lightning_ckpt._private.hooks import for_directories

_Module = TypeVar("_Module")


def load_from_checkpoint(cls: type[_Module], path: StrPath, **kwargs: Any) -> _Module:
    """Load a module as ``cls.load_from_checkpoint`` does, also from a directory: ours, or Lightning's sharded ones.

    Once a program has created a :class:`~lightning_ckpt.ShardedCheckpointIO`, ``cls.load_from_checkpoint`` does so too.

    Args:
        cls: A ``LightningModule`` or ``LightningDataModule``.
        path: Path or URL of a checkpoint.
        kwargs: As for ``cls.load_from_checkpoint``: ``map_location``, ``strict``, ``weights_only``, hyperparameters.

    Raises:
        CheckpointError: The directory is damaged, or was not saved by a Trainer.

    Example::

        model = load_from_checkpoint(MyModule, "runs/last.ckpt", map_location="cpu")
    """
    read_directories()
    model: _Module = cls.load_from_checkpoint(path, **kwargs)  # type: ignore[attr-defined]
    return model


def read_directories() -> None:
    """Make every ``load_from_checkpoint`` of this process read directories, too."""
    for_directories(_load)


def _load(path: StrPath, map_location: Any | None = None, weights_only: bool | None = None) -> dict[str, Any]:
    found: dict[str, Any] = load_whole(path, map_location=map_location, weights_only=weights_only, of_trainer=True)
    return found
