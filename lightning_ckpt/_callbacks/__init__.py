"""The parts of :class:`~lightning_ckpt.ResumableCheckpoint` that replace or accompany ``ModelCheckpoint``."""
