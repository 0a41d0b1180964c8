"""Where this was before; to be removed."""

from ckpt_core.state.gradients import rebuild_ddp_buckets

__all__ = ["rebuild_ddp_buckets"]
