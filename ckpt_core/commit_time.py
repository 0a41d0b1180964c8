"""Commit time and step that a checkpoint records in its manifest, and a clock that never goes back.

Clocks of two nodes differ, and clocks are set back. A checkpoint that a process saves always gets a later commit time
than all checkpoints that it has read, whatever its clock says: a resumed run never saves one that looks older.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Mapping
from typing import Any

_STEP = 1e-4  # minimum seconds between two commits; a float can still distinguish them after the year 5000
_LATEST = 1e11  # seconds; a larger number is not taken for a time
_LARGEST = 2**63 - 1
# Right behind the version in the manifest of either layout, so that the stamp is found without parsing the manifest.
_BEGINNING = re.compile(
    rb'\{"format":"ckpt_core\.[a-z_]+","version":[0-9]{1,9}'
    rb'(?:,"committed":([0-9]{1,11}(?:\.[0-9]{1,9})?))?(?:,"step":([0-9]{1,19}))?,'
)
_STEP_KEYS = ("global_step", "step")


class _Clock:
    """Clock that is never behind the commit times that it has returned or that were noted.

    It has no lock: a signal handler may save, and wait for the thread that commits, while the interrupted code holds
    the lock. Appended times are not lost: the latest is among the last 16, unless that many threads append at once.
    """

    _KEPT = 16

    def __init__(self) -> None:
        self._seen = [0.0]

    def now(self) -> float:
        microseconds = round(max(time.time(), max(self._seen) + _STEP) * 1e6)
        # Never a multiple of 10 microseconds, so that all six decimals are written, and manifests have equal lengths.
        now = (microseconds + (microseconds % 10 == 0)) / 1e6
        self._append(now)
        return now

    def seconds_behind(self) -> float:
        return max(0.0, max(self._seen) - time.time())

    def note(self, committed: float) -> None:
        if committed > max(self._seen):
            self._append(committed)

    def _append(self, seconds: float) -> None:
        self._seen.append(seconds)
        del self._seen[: -self._KEPT]


_clock = _Clock()


def commit_time() -> float:
    """Return the time for a commit that happens now: Unix time in seconds, later than all noted or returned before."""
    return _clock.now()


def seconds_behind() -> float:
    """Return by how many seconds this machine's clock is behind the newest checkpoint that was noted or committed."""
    return _clock.seconds_behind()


def note_commit(committed: float | None) -> None:
    """Note the commit time of a checkpoint that this process has read, so that its own commits get later times."""
    if committed is not None:
        _clock.note(committed)


@dataclasses.dataclass(frozen=True)
class Stamp:
    """Commit time and step of a checkpoint, as recorded in its manifest."""

    committed: float | None = None  # Unix time of the commit in seconds; None if not recorded
    step: int | None = None  # training step of the state; None if not recorded

    def fields(self) -> dict[str, Any]:
        """Return the fields for the manifest, to be written right behind its version."""
        step = self.step if self.step is not None and 0 <= self.step <= _LARGEST else None
        found = {"committed": self.committed, "step": step}
        return {name: value for name, value in found.items() if value is not None}

    @classmethod
    def read(cls, manifest: bytes) -> Stamp:
        """Read the stamp from a manifest whose digest was verified; manifests of older versions have none."""
        found = _BEGINNING.match(manifest)
        if found is None:
            return cls()
        committed = None if found[1] is None else float(found[1])
        step = None if found[2] is None else int(found[2])
        stamp = cls(
            committed if committed is not None and committed <= _LATEST else None,
            step if step is not None and step <= _LARGEST else None,
        )
        note_commit(stamp.committed)
        return stamp


NO_STAMP = Stamp()


def step_in(state: Any, *, depth: int = 0) -> int | None:
    """Return the step in a state or its metadata: a whole number under the key ``global_step`` or ``step``.

    ``depth`` is the number of levels of nested mappings that are searched, too.
    """
    if not isinstance(state, Mapping):
        return None
    for key in _STEP_KEYS:
        value = state.get(key)
        if type(value) is int and 0 <= value <= _LARGEST:
            return value
    below = (step_in(value, depth=depth - 1) for value in state.values()) if depth else ()
    return next((step for step in below if step is not None), None)
