"""Saves and loads of a Trainer or Fabric on all ranks, taken to :class:`~lightning_ckpt.ShardedCheckpointIO`."""
