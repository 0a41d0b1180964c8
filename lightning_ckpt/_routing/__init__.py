"""Routes saves and loads of a Trainer or Fabric to :class:`~lightning_ckpt.ShardedCheckpointIO` on all ranks."""
