"""What must be true of a run's directory after every kill."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples" / "crash_demo"))

from records import Save, pair_events, read_lines

from ckpt_core import Catalog, CheckpointError, verify
from ckpt_core.reader import peek

ORPHAN = re.compile(r"\..+\.[0-9a-f]{12}\.ckpt-part")
LAST = "last.ckpt"
BYSTANDERS = {"checkpoints/notes.txt": b"mine\n", "other/step=1.ckpt": b"of another run\n"}


@dataclasses.dataclass(frozen=True)
class Kept:
    """A committed checkpoint: which file it is, and the optimizer step that it holds."""

    inode: int
    modified: int
    step: int


class Judge:
    """Watches one run from kill to kill.

    Args:
        run: The run's directory. Files that are none of the training's business are put there.
        kept: Number of checkpoints that retention keeps besides ``last.ckpt``.

    Attributes:
        files: The committed checkpoints by name, as of the last look.
        orphans: Names of unfinished files, as of the last look.
        verified: Number of checkpoints verified so far.
        ranked: How many checkpoints there are besides ``last.ckpt``, as of the last look.
        ranked_before: The same as of the look before.
    """

    def __init__(self, run: Path, kept: int) -> None:
        self.files: dict[str, Kept] = {}
        self.orphans: set[str] = set()
        self.verified = 0
        self.ranked = self.ranked_before = 0
        self._run = run
        self._kept = kept
        self._announced = 0
        for name, content in BYSTANDERS.items():
            (run / name).parent.mkdir(parents=True, exist_ok=True)
            (run / name).write_bytes(content)

    def look(self, events: list[dict[str, Any]]) -> list[str]:
        """Compare the directory with the last look and with what happened since.

        Args:
            events: The lines that the job that is over now added to the event log.

        Returns:
            What is wrong, in words; nothing if all is well.
        """
        before, problems = self.files, self._read_directory()
        saves = pair_events(events)
        saved = {os.path.basename(save.path) for save in saves}
        for name, old in before.items():
            new = self.files.get(name)
            if new is None:
                if name == LAST:
                    problems.append(f"{name} is gone")
            elif new != old and name not in saved:
                problems.append(f"{name} changed although it was not saved")
            elif new.step < old.step:
                problems.append(f"{name} went back from step {old.step} to {new.step}")
        self.ranked_before, self.ranked = self.ranked, sum(name != LAST for name in self.files)
        if self.ranked < min(self._kept, self.ranked_before):
            problems.append(f"retention left {self.ranked} checkpoints, {self._kept} are to be kept")
        announced = [self._step_of(save) for save in saves if save.committed is not None]
        self._announced = max([self._announced, *announced])
        newest = Catalog(self._run / "checkpoints").newest_verified()
        step = self.files[os.path.basename(newest.path)].step if newest is not None else 0
        if step < self._announced:
            problems.append(f"the newest checkpoint is of step {step}, but step {self._announced} was committed")
        problems += [
            f"{event['event']}: {event}" for event in events if event["event"] in ("SaveFailed", "CheckpointSkipped")
        ]
        for name, content in BYSTANDERS.items():
            if not (self._run / name).exists() or (self._run / name).read_bytes() != content:
                problems.append(f"{name}, which is none of the training's business, was touched")
        return problems

    def _read_directory(self) -> list[str]:
        self.files, self.orphans, problems = {}, set(), []
        for path in sorted((self._run / "checkpoints").iterdir()):
            if f"checkpoints/{path.name}" in BYSTANDERS:
                continue
            if ORPHAN.fullmatch(path.name):
                self.orphans.add(path.name)
                continue
            if path.suffix != ".ckpt":
                problems.append(f"unexpected file {path.name}")
                continue
            try:
                if not verify(path):
                    problems.append(f"{path.name} holds no digests")
                step = peek(path)["global_step"]
            except CheckpointError as error:
                problems.append(f"{path.name} does not verify: {error.message}")
                continue
            self.verified += 1
            status = path.stat()
            self.files[path.name] = Kept(status.st_ino, status.st_mtime_ns, step)
        return problems

    def _step_of(self, save: Save) -> int:
        # A step is written down before the callback that saves it is called.
        return max(step["step"] for step in self._last_steps(save.started))

    def _last_steps(self, moment: float) -> list[dict[str, Any]]:
        return [step for step in read_lines(self._run / "steps-rank0.jsonl") if step["end"] <= moment][-1:]
