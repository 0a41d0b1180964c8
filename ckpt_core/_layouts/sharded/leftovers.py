"""Where this was before; to be removed."""

from ckpt_core._layouts.sharded.files import SILENT_SECONDS, remove_leftovers

__all__ = ["SILENT_SECONDS", "remove_leftovers"]
