"""Where this was before; to be removed."""

from ckpt_core._layouts.sharded.writing import PartContent

__all__ = ["PartContent"]
