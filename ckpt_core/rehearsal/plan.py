"""The plan of one process of a rehearsal, passed in an environment variable, so that the script needs no changes."""

from __future__ import annotations

import dataclasses
import json
import os

from ckpt_core.options import REHEARSAL_VARIABLE

#: The points at which a rehearsal saves, unless steps are given.
POINTS = ("middle", "epoch-end", "accumulation", "validation")

_LONG = 60
_SHORT = 30


@dataclasses.dataclass(frozen=True)
class Plan:
    """The instructions for one process of a rehearsal."""

    directory: str  # for its notes
    checkpoints: str  # directory for the script's own checkpoints, instead of the one that the script names
    saves: str  # directory for the rehearsal's checkpoints
    at: tuple[int, ...] = ()  # optimizer steps after which to save
    points: tuple[str, ...] = ()  # names of other points at which to save, of POINTS
    only_points: bool = False  # whether the user named the points; then the script's own checkpoints are no points
    # Number of optimizer steps after which to end; None: a little after the second epoch if that is short.
    steps: int | None = None
    resume: str | None = None  # the checkpoint to resume from; None trains from the beginning
    ranks: int | None = None  # a different number of ranks, which only finish the epoch; their steps are not compared
    by_script: bool = False  # whether the script requested the rehearsal, by an option of the training to be rehearsed
    until: int | None = None  # number of the last step to note, in a run that is compared with another one

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
        """Return the number of batches after which to end; None if ``steps`` is given instead.

        An epoch has ``per_epoch`` batches (None: unknown), and an optimizer step uses ``window`` batches.
        """
        if self.steps is not None:
            return None
        two_epochs = 0 if per_epoch is None else 2 * per_epoch + 2 * window
        return two_epochs if 0 < two_epochs <= _LONG * window else _SHORT * window
