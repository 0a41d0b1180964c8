"""Accelerate's project configuration, with our options on board."""

from __future__ import annotations

from dataclasses import dataclass, field

from accelerate.utils import ProjectConfiguration

from accelerate_ckpt.config import CheckpointConfig

__all__ = ["CheckpointProjectConfiguration"]


@dataclass
class CheckpointProjectConfiguration(ProjectConfiguration):  # type: ignore[misc]  # Accelerate publishes no types
    """A ``ProjectConfiguration`` that also says how checkpoints are saved.

    Args:
        checkpoints: The options.

    All other arguments are those of :class:`accelerate.utils.ProjectConfiguration`.

    Example::

        project = CheckpointProjectConfiguration("runs/1", total_limit=3, checkpoints=CheckpointConfig(strategy="sync"))
        accelerator = attach(Accelerator(project_config=project))
    """

    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
