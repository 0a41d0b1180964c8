"""Where this was before; to be removed."""

from ckpt_core._layouts.sharded.manifest import group_of

__all__ = ["group_of"]
