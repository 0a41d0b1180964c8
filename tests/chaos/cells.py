"""What the campaign kills: the cells of its table, and how the trainings of each cell run."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

LIGHTNING, ACCELERATE, LAUNCH = "lightning", "accelerate", "launch"
# LAUNCH stands for ``accelerate launch``, where each rank is a new interpreter, which takes ten seconds to start.
FRAMEWORKS = (LIGHTNING, ACCELERATE, LAUNCH)
STRATEGIES = ("sync", "async", "sharded")
LOCAL, S3 = "local", "s3"
STORES = (LOCAL, S3)
WIDTH = 270  # about a megabyte of state: saves wait for smaller ones, which are never written in the background
WIDTH_IN_PARTS = 850  # nine megabytes: more than one part of the smallest size that S3 allows
STEPS = 60
STEPS_IN_PARTS = 30


@dataclasses.dataclass(frozen=True)
class Setting:
    """How a training runs.

    Attributes:
        framework: One of :data:`FRAMEWORKS`.
        strategy: One of :data:`STRATEGIES`.
        store: One of :data:`STORES`.
        ranks: Number of processes.
        accumulate: Batches for each optimizer step.
        in_parts: Whether the state is so large that it is uploaded in parts.
        same_name: Whether every save replaces the one before (Accelerate; with Lightning, ``last.ckpt`` is always
            replaced).
    """

    framework: str
    strategy: str
    store: str
    ranks: int = 1
    accumulate: int = 1
    in_parts: bool = False
    same_name: bool = False

    @property
    def cell(self) -> str:
        """Name of the cell, such as ``lightning-async-local``."""
        return f"{self.framework}-{self.strategy}-{self.store}"

    @property
    def arguments(self) -> list[str]:
        """The arguments of the training script, except where it saves."""
        width = WIDTH_IN_PARTS if self.in_parts else WIDTH
        steps = STEPS_IN_PARTS if self.in_parts else STEPS
        words = ["--accumulate", str(self.accumulate), "--width", str(width), "--steps", str(steps)]
        if self.framework == LIGHTNING:
            words += ["--io", self.strategy, "--devices", str(self.ranks)]
        return [*words, "--same-name"] if self.same_name else words

    @property
    def never_missing(self) -> frozenset[str]:
        """Names of checkpoints that, once they exist, must exist at any instant."""
        if self.framework == LIGHTNING:
            return frozenset({"last.ckpt"})
        return frozenset({"latest"}) if self.same_name else frozenset()

    def __str__(self) -> str:
        words = [self.cell]
        words += [f"{self.ranks} ranks"] if self.ranks > 1 else []
        words += [f"accumulating {self.accumulate}"] if self.accumulate > 1 else []
        words += ["in parts"] if self.in_parts else []
        return ", ".join([*words, "one name"] if self.same_name else words)


def settings_of(cell: str) -> list[Setting]:
    """Return the settings of a cell; each gets the same share of its kills.

    Raises:
        ValueError: There is no such cell.
    """
    if cell not in CELLS:
        raise ValueError(f"there is no cell {cell!r}; there are {', '.join(CELLS)}")
    framework, strategy, store = cell.split("-")
    if framework == LAUNCH:
        return [Setting(framework, strategy, store, ranks=2)]
    found = [
        Setting(framework, strategy, store),
        Setting(framework, strategy, store, accumulate=3),
        Setting(framework, strategy, store, ranks=2),
    ]
    if store == S3:
        found.append(Setting(framework, strategy, store, in_parts=True))
    if framework == ACCELERATE:
        found.append(Setting(framework, strategy, store, same_name=True))
        found.append(Setting(framework, strategy, store, ranks=2, accumulate=3, same_name=True))
    return found


CELLS = tuple("-".join(words) for words in itertools.product(FRAMEWORKS, STRATEGIES, STORES))
# More kills for saves in the background; fewer where each start takes ten seconds.
_SHARES = {cell: (1 if cell.startswith(LAUNCH) or "-sync-" in cell else 4) for cell in CELLS}


def plan(kills: int, cells: Sequence[str] = CELLS) -> list[tuple[Setting, int]]:
    """Divide the kills among the cells, and those of a cell among its settings; at least one for each cell.

    Returns:
        Settings with their kills: the first of each cell, the second of each cell, and so on.

    Raises:
        ValueError: There is no such cell.
    """
    by_cell = {cell: settings_of(cell) for cell in cells}
    whole = sum(_SHARES[cell] for cell in cells)
    work = []
    for cell, settings in by_cell.items():
        of_cell = max(1, round(kills * _SHARES[cell] / whole))
        for index, setting in enumerate(settings):
            share = (index + 1) * of_cell // len(settings) - index * of_cell // len(settings)
            work += [(index, setting, share)] if share else []
    return [(setting, share) for _, setting, share in sorted(work, key=lambda item: item[0])]
