"""Checks what must be true of a run's checkpoints after every kill."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples" / "crash_demo"))

from records import Save, pair_events, read_lines

from ckpt_core import Catalog, CheckpointError, verify
from ckpt_core._layouts.directory.loading import DirectoryReader
from ckpt_core._pipeline.loading import peek
from ckpt_core.storage import storage_for
from ckpt_core.storage.base import is_directory_checkpoint
from tests.chaos.places import FOLDER, Committed, Listing, Place

BYSTANDERS = {"checkpoints/notes.txt": b"mine\n", "other/step=1.ckpt": b"of another run\n"}


@dataclasses.dataclass(frozen=True)
class Kept:
    """A committed checkpoint that verifies: which one it is, and the optimizer step that it holds."""

    committed: Committed
    step: int


class Judge:
    """Judges the checkpoints of one run, from kill to kill.

    Args:
        run: The run's local directory, with its logs.
        place: Where its checkpoints are. The judge puts files there that the training must not touch.
        kept: Number of checkpoints that retention keeps, in addition to those that are never missing.
        never_missing: Names of checkpoints that, once they exist, must exist at any instant.

    Attributes:
        files: The committed checkpoints by name, as of the last look.
        before: The same, as of the look before.
        listing: All that was there at the last look.
        newest: The step of the newest checkpoint, as of the last look.
        verified: Number of checkpoints verified so far.
        ranked: Number of checkpoints as of the last look, without those that are never missing.
        ranked_before: The same, as of the look before.
    """

    def __init__(self, run: Path, place: Place, kept: int, never_missing: Collection[str]) -> None:
        self.files: dict[str, Kept] = {}
        self.before: dict[str, Kept] = {}
        self.listing = Listing()
        self.newest = 0
        self.verified = 0
        self.ranked = self.ranked_before = 0
        self._run = run
        self._place = place
        self._kept = kept
        self._never_missing = never_missing
        self._announced = 0
        self._under_way: set[str] = set()
        for name, content in BYSTANDERS.items():
            place.put(name, content)

    @property
    def unfinished(self) -> dict[str, str]:
        """Paths of what belongs to no checkpoint, as of the last look, each with the name that it was made for."""
        return self.listing.unfinished

    def look(self, events: list[dict[str, Any]], launched: float = 0.0, *, saves_may_fail: bool = False) -> list[str]:
        """Compare what is there with the last look and with what happened since.

        Args:
            events: The lines that the job, which is over now, has added to the event log.
            launched: Unix time of the job's start.
            saves_may_fail: Whether a rank was killed before the others, which then report a failed save.

        Returns:
            A description of each problem.
        """
        problems = self._went_on(launched)
        problems += self._read_checkpoints()
        saves = saves_of(events)
        saved = {os.path.basename(save.path) for save in saves}
        # A request of the job that was killed before may have been carried out only after the last look.
        may_change, self._under_way = (
            saved | self._under_way,
            {os.path.basename(save.path) for save in saves if save.committed is None},
        )
        for name, old in self.before.items():
            new = self.files.get(name)
            if new is None:
                if name in self._never_missing:
                    problems.append(f"{name} is gone")
            elif new != old and name not in may_change:
                problems.append(f"{name} changed although it was not saved")
            elif new.step < old.step:
                problems.append(f"{name} went back from step {old.step} to {new.step}")
        self.ranked_before, self.ranked = self.ranked, sum(name not in self._never_missing for name in self.files)
        if self.ranked < min(self._kept, self.ranked_before):
            problems.append(f"retention left {self.ranked} checkpoints, {self._kept} are to be kept")
        problems += self._compare_newest(saves, launched)
        complaints = ("CheckpointSkipped",) if saves_may_fail else ("CheckpointSkipped", "SaveFailed")
        problems += [f"{event['event']}: {event}" for event in events if event["event"] in complaints]
        for name, content in BYSTANDERS.items():
            if self._place.get(name) != content:
                problems.append(f"{name}, which is none of the training's business, was touched")
        return problems

    def _went_on(self, launched: float) -> list[str]:
        """Return a problem if the job began before the newest checkpoint of the last look."""
        steps = [step for step in self._steps() if step["start"] >= launched]
        first = min((step["step"] for step in steps), default=None)
        if launched and first is not None and first < self.newest:
            return [f"continued with step {first}, although there was a checkpoint of step {self.newest}"]
        return []

    def _compare_newest(self, saves: list[Save], launched: float) -> list[str]:
        announced = [self._step_of(save, launched) for save in saves if save.committed is not None]
        self._announced = max([self._announced, *announced])
        catalog = Catalog(f"{self._place.root}/{FOLDER}", suffix="", storage_options=self._place.options)
        newest = next((info for info in catalog.checkpoints() if os.path.basename(info.path) in self.files), None)
        step = self.files[os.path.basename(newest.path)].step if newest is not None else 0
        self.newest = max([kept.step for kept in self.files.values()], default=0)
        if self.newest < self._announced:
            return [f"the newest checkpoint is of step {self.newest}, but step {self._announced} was committed"]
        if step < self.newest:
            return [f"the catalog calls that of step {step} the newest, but there is one of step {self.newest}"]
        return []

    def _read_checkpoints(self) -> list[str]:
        self.before, self.files = self.files, {}
        self.listing = self._place.look()
        unexpected = (name for name in self.listing.unexpected if f"{FOLDER}/{name}" not in BYSTANDERS)
        problems = [f"unexpected file {name}" for name in unexpected]
        for name, committed in self.listing.committed.items():
            try:
                if not verify(committed.path, storage_options=self._place.options):
                    problems.append(f"{name} holds no digests")
                step = step_in(committed.path, self._place.options)
            except CheckpointError as error:
                problems.append(f"{name} does not verify: {error.message}")
                continue
            self.verified += 1
            self.files[name] = Kept(committed, step)
        return problems

    def _step_of(self, save: Save, launched: float) -> int:
        # A rank logs a step before it calls the callback that saves it, so the furthest step logged by then is meant.
        done = [step for step in self._steps() if launched <= step["start"] and step["end"] <= save.started]
        return max((step["step"] for step in done), default=0)

    def _steps(self) -> list[dict[str, Any]]:
        return [step for log in self._run.glob("steps-rank*.jsonl") for step in read_lines(log)]


def saves_of(events: list[dict[str, Any]]) -> list[Save]:
    """Return the saves of all ranks in the order in which they started."""
    processes = {event["pid"] for event in events}
    saves = [save for pid in processes for save in pair_events([event for event in events if event["pid"] == pid])]
    return sorted(saves, key=lambda save: save.started)


def step_in(path: str, options: dict[str, Any] | None) -> int:
    """Return the optimizer step that a checkpoint of either framework holds."""
    storage = storage_for(path, options)
    if is_directory_checkpoint(storage, path):
        with DirectoryReader(path, storage) as checkpoint:
            if "custom_0" in checkpoint.parts:  # what train_accelerate.py has registered
                return int(checkpoint.load("custom_0", rank=0)["steps"])
            return int(checkpoint.metadata["global_step"])
    return int(peek(path, storage=storage)["global_step"])
