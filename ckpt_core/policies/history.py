"""The history of a run's checkpoints, including those of earlier runs, from which a retention policy chooses."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from ckpt_core.commit_time import commit_time, note_commit
from ckpt_core.policies.retention import RetentionPolicy, SavedCheckpoint, to_delete


def numbers_in(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the values that are numbers, as floats, for policies that choose by a metric; others are left out."""
    found = {}
    for name, value in values.items():
        try:
            found[name] = float(value)
        except Exception:  # noqa: BLE001 - whatever an object of the script's raises
            continue
    return found


class RetentionHistory:
    """The checkpoints of a run, and which of them its policy no longer keeps.

    Args:
        policy: Decides which to keep.

    Attributes:
        policy: The policy.

    Examples:
        >>> from ckpt_core.policies import KeepLatest, RetentionHistory
        >>> history = RetentionHistory(KeepLatest(1))
        >>> for step in (1, 2):
        ...     history.record(f"step={step}", step, {"loss": 0.5})
        >>> history.surplus()
        ['step=1']
    """

    def __init__(self, policy: RetentionPolicy) -> None:
        self.policy = policy
        self._saved: dict[str, SavedCheckpoint | None] = {}  # None: kept regardless of the policy

    def record(self, path: str, step: int, metrics: Mapping[str, Any], time: float | None = None) -> None:
        """Add a checkpoint.

        Args:
            path: Its path or URL.
            step: Optimizer steps taken.
            metrics: Values at that moment, by name; values that are not numbers are left out.
            time: Unix time of its commit in seconds; by default, now.
        """
        self._saved[path] = SavedCheckpoint(path, step, commit_time() if time is None else time, numbers_in(metrics))

    def forget(self, path: str) -> None:
        """Remove a checkpoint that was deleted, or was never saved."""
        self._saved.pop(path, None)

    def read_back(self, paths: Iterable[str], read: Callable[[str], SavedCheckpoint | None]) -> None:
        """Add the checkpoints of earlier runs; each is read once.

        Args:
            paths: All existing checkpoints.
            read: Returns the record of the checkpoint at a path; None keeps it, regardless of the policy.
        """
        for path in sorted(set(paths) - set(self._saved)):
            self._saved[path] = read(path)

    def wants(self, path: str) -> bool:
        """Return whether the policy wants to keep a known checkpoint."""
        return path in self._saved and path not in self.surplus()

    def surplus(self, protected: Collection[str] = (), *, among: Collection[str] | None = None) -> list[str]:
        """Return the paths of the checkpoints to delete, oldest first.

        Args:
            protected: Paths to keep regardless of the policy.
            among: Paths that the policy considers; by default, all known ones.
        """
        known = [saved for path, saved in self._saved.items() if saved is not None and (among is None or path in among)]
        return [saved.path for saved in to_delete(self.policy, known, protected=protected)]

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the records of the checkpoints, as plain data."""
        known = (saved for saved in self._saved.values() if saved is not None)
        return [{**dataclasses.asdict(saved), "metrics": dict(saved.metrics)} for saved in known]

    def load_state_dict(
        self, state: Iterable[Mapping[str, Any]], directory: str, *, looks: bool = True, levels: int = 0
    ) -> None:
        """Restore the records of an earlier process.

        Args:
            state: The :meth:`state_dict` of that process.
            directory: Where the checkpoints are now; they may have been moved.
            looks: Whether to leave out local checkpoints that do not exist any more.
            levels: At most how many directories below ``directory`` the checkpoints are.
        """
        for entry in state:
            note_commit(entry["time"])
            inside, names = f"{directory.rstrip('/')}/", entry["path"].split("/")
            moved = [inside + "/".join(names[-level - 1 :]) for level in range(levels, -1, -1)]
            for path in [entry["path"]] if entry["path"].startswith(inside) else moved:
                if not looks or "://" in path or os.path.exists(path):
                    self._saved.setdefault(path, SavedCheckpoint(**{**entry, "path": path}))
                    break
