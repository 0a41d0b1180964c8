"""A retention policy beside ``save_top_k``: a checkpoint stays while one of the two wants it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ckpt_core.commit_time import commit_time, note_commit
from ckpt_core.policies import RetentionPolicy, SavedCheckpoint, to_delete

__all__ = ["Retention"]


class Retention:
    """The checkpoints that a callback has made, and which of them its policy gives up.

    Args:
        policy: Says which to keep.
    """

    def __init__(self, policy: RetentionPolicy) -> None:
        self._policy = policy
        self._saved: dict[str, SavedCheckpoint] = {}

    def record(self, path: str, step: int, metrics: Mapping[str, Any]) -> None:
        """Note a checkpoint that was just saved.

        Args:
            path: Its path or URL.
            step: Optimizer steps taken.
            metrics: What the callback may choose its monitor from; what is no number is left out.
        """
        numbers = {name: float(value) for name, value in metrics.items() if _is_number(value)}
        self._saved[path] = SavedCheckpoint(path, step, commit_time(), numbers)

    def forget(self, path: str) -> None:
        """Note that a checkpoint is gone, or never came to be."""
        self._saved.pop(path, None)

    def wants(self, path: str) -> bool:
        """Return whether the policy wants to keep a checkpoint of ours."""
        return path in self._saved and all(gone.path != path for gone in self._surplus(()))

    def surplus(self, protected: Collection[str]) -> list[str]:
        """Return the checkpoints to delete.

        Args:
            protected: Paths to keep whatever the policy says.
        """
        return [checkpoint.path for checkpoint in self._surplus(protected)]

    def _surplus(self, protected: Collection[str]) -> list[SavedCheckpoint]:
        return to_delete(self._policy, self._saved.values(), protected=protected)

    def state_dict(self) -> list[dict[str, Any]]:
        """Return what is known of the checkpoints, as plain data."""
        return [{**dataclasses.asdict(saved), "metrics": dict(saved.metrics)} for saved in self._saved.values()]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]], directory: str, *, looks: bool = True) -> None:
        """Take over what an earlier process knew.

        Args:
            state: Its :meth:`state_dict`.
            directory: Where the callback saves now; the directory may have been moved since.
            looks: Whether what is not on the local disk is left out.
        """
        for entry in state:
            note_commit(entry["time"])
            path = f"{directory.rstrip('/')}/{os.path.basename(entry['path'])}"
            if not looks or "://" in path or os.path.exists(path):
                self._saved.setdefault(path, SavedCheckpoint(**{**entry, "path": path}))


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError, RuntimeError):
        return False
    return True
