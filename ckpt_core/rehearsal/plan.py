"""The plan of one process of a rehearsal, passed in an environment variable, so that the script stays as it is."""

from __future__ import annotations

import dataclasses
import json
import os

from ckpt_core.options import REHEARSAL_VARIABLE

#: Where a rehearsal saves, unless steps are given.
POINTS = ("middle", "epoch-end", "accumulation", "validation")

_LONG = 60
_SHORT = 30


@dataclasses.dataclass(frozen=True)
class Plan:
    """What one process does."""

    directory: str  # where its notes go
    checkpoints: str  # where the checkpoints of the script's own go, in the place of those that it names
    saves: str  # where those of the rehearsal go
    at: tuple[int, ...] = ()  # optimizer steps after which to save
    points: tuple[str, ...] = ()  # names of other points at which to save, of POINTS
    only_points: bool = False  # whether these were asked for, so that checkpoints of the script's own are no points
    # After how many optimizer steps to end; None: a little after the second epoch if that is short.
    steps: int | None = None
    resume: str | None = None  # the checkpoint to resume from; None trains from the beginning
    ranks: int | None = None  # how many other ranks continue the epoch, until its end; what they train is not compared
    by_script: bool = False  # whether the script itself asked for it, by an option of the training to be rehearsed
    until: int | None = None  # number of the last step to take notes of, in a run that is compared with another one

    def variables(self) -> dict[str, str]:
        """Return the environment variables that pass the plan to a process."""
        return {REHEARSAL_VARIABLE: json.dumps(dataclasses.asdict(self))}

    @classmethod
    def of_environment(cls) -> Plan | None:
        """Return the plan of this process; None if it is not part of a rehearsal."""
        text = os.environ.get(REHEARSAL_VARIABLE)
        if not text:
            return None
        told = json.loads(text)
        return cls(**{**told, "at": tuple(told["at"]), "points": tuple(told["points"])})

    def batches(self, per_epoch: int | None, window: int) -> int | None:
        """Return after how many batches to end, None if that is counted in steps.

        An epoch has ``per_epoch`` batches, if that is known, an optimizer step ``window`` of them.
        """
        if self.steps is not None:
            return None
        two_epochs = 0 if per_epoch is None else 2 * per_epoch + 2 * window
        return two_epochs if 0 < two_epochs <= _LONG * window else _SHORT * window
