"""Where this was before; to be removed."""

from ckpt_core._layouts.sharded.files import describe_file
from ckpt_core._layouts.sharded.writing import build_manifest

__all__ = ["build_manifest", "describe_file"]
