"""When a checkpoint was committed, by its own account.

Clocks of two nodes differ, and clocks are set back. What a process saves is newer than all that it has read before,
whatever its clock says: a run that resumes from a checkpoint never saves one that looks older.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Mapping
from typing import Any

_STEP = 1e-4  # seconds between two commits at least; a float still tells them apart after the year 5000
_LATEST = 1e11  # seconds: what is beyond is no time
_LARGEST = 2**63 - 1
# Right behind the version in the manifest of either layout, so that it is found without parsing all of it.
_BEGINNING = re.compile(
    rb'\{"format":"ckpt_core\.[a-z_]+","version":[0-9]{1,9}'
    rb'(?:,"committed":([0-9]{1,11}(?:\.[0-9]{1,9})?))?(?:,"step":([0-9]{1,19}))?,'
)
_STEP_KEYS = ("global_step", "step")


class _Clock:
    """Never behind what it has seen or given.

    Without a lock: a signal handler may save, and wait for the thread that commits, while it interrupts whoever holds
    it. What is appended is never lost; the latest is among the last, unless as many threads append at the same time.
    """

    _KEPT = 16

    def __init__(self) -> None:
        self._seen = [0.0]

    def now(self) -> float:
        microseconds = round(max(time.time(), max(self._seen) + _STEP) * 1e6)
        # Six decimals are written, always: manifests of the same state have the same length.
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
    """Return the time of a commit that happens now: Unix time in seconds, later than all noted or returned before."""
    return _clock.now()


def seconds_behind() -> float:
    """Return by how many seconds this machine's clock is behind the newest checkpoint that was noted or committed."""
    return _clock.seconds_behind()


def note_commit(committed: float | None) -> None:
    """Note when a checkpoint was committed that this process has read; its own are later."""
    if committed is not None:
        _clock.note(committed)


@dataclasses.dataclass(frozen=True)
class Stamp:
    """What a checkpoint says of its own age."""

    committed: float | None = None  # when it was committed: Unix time in seconds; None if it does not say
    step: int | None = None  # of which step of the training it is; None if it does not say

    def fields(self) -> dict[str, Any]:
        """Return what goes into a manifest, right behind its version."""
        step = self.step if self.step is not None and 0 <= self.step <= _LARGEST else None
        found = {"committed": self.committed, "step": step}
        return {name: value for name, value in found.items() if value is not None}

    @classmethod
    def read(cls, manifest: bytes) -> Stamp:
        """Return what a manifest says, whose digest was compared; one of an older version says nothing."""
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
    """Return the step that a state or its metadata name: a whole number under ``global_step`` or ``step``.

    ``depth`` says in how many levels of mappings below to look as well.
    """
    if not isinstance(state, Mapping):
        return None
    for key in _STEP_KEYS:
        value = state.get(key)
        if type(value) is int and 0 <= value <= _LARGEST:
            return value
    below = (step_in(value, depth=depth - 1) for value in state.values()) if depth else ()
    return next((step for step in below if step is not None), None)
