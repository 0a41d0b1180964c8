"""Detects, from the first batches that a script takes after a load, whether it skips batches itself.

Scripts skip the batches that they had by ``continue``, ``next`` or ``islice``: they take batches and do not use them. A
loader that is already in the middle of its epoch must not lose these. A use is a backward pass, an optimizer's step, or
a forward pass of a prepared model.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from ckpt_core.state.rng import RngState

log = logging.getLogger(__name__)


class Uses:
    """Counts the uses of batches, which show that a script trains."""

    def __init__(self) -> None:
        self.count = self.backwards = self.steps = 0
        self._hooks: list[Any] = []

    def backward(self) -> None:
        """Note a backward pass."""
        self.backwards += 1
        self.note()

    def stepped(self) -> None:
        """Note a step of an optimizer."""
        self.steps += 1
        self.note()

    def note(self, *_: Any) -> None:
        """Note a use."""
        self.count += 1
        self.forget_models()

    def watch(self, models: Iterable[Any]) -> None:
        """Count the next forward pass of one of the models as a use."""
        self.forget_models()
        # a hook inside a compiled call would be compiled with it
        self._hooks = [
            model.register_forward_pre_hook(self.note)
            for model in models
            if getattr(model, "_compiled_call_impl", None) is None
        ]

    def forget_models(self) -> None:
        """Stop watching for a forward pass."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


class BatchUsePattern:
    """How many batches of one loader a script takes before it uses one: one, or several that it collects or filters."""

    def __init__(self, uses: Uses) -> None:
        self.longest: int | None = None  # the most so far; None as long as nothing was used
        self.ahead = 0  # how many more it takes before the first use in an iteration than before any later one
        self._first = self._later = 0  # batches taken before this iteration's first use, and at most before a later one
        self.trained = False  # whether a batch was used in this process
        self.idles = False  # whether it went through a whole iteration without a use, such as to count the batches
        self._uses = uses
        self._begun = uses.count
        # The count of uses when the last batch was handed out, None before the first
        self.last: int | None = None
        self._taken = 0

    def take(self) -> None:
        """Note that a batch is handed out."""
        self.settle()
        self._taken += 1
        self.last = self._uses.count

    def settle(self) -> None:
        """Note whether the batches that were handed out have been used since."""
        if self._taken and self._uses.count != self.last:
            self.longest = max(self.longest or 0, self._taken)
            if self._first:
                self._later = max(self._later, self._taken)
                self.ahead = max(0, self._first - self._later)
            else:
                self._first = self._taken
            self.trained, self._taken = True, 0

    @property
    def holds_one(self) -> bool:
        """Whether the script uses every batch before it takes the next one, and has not used the last one yet."""
        return self.longest == 1 and self._taken == 1 and self._uses.count == self.last

    def carry(self, longest: int | None, ahead: int, *, idles: bool) -> None:
        """Take over what an earlier process has found out about the script."""
        self.idles |= idles
        if longest is not None:
            self.longest, self.ahead = max(self.longest or 0, longest), ahead

    def begin(self) -> None:
        """Note that an iteration begins."""
        self.settle()
        self._first = self._later = 0
        self._begun = self._uses.count

    def end(self, *, is_whole: bool) -> None:
        """Note that an iteration is over: uses from now on are of batches of another loader."""
        self.settle()
        self._taken = 0
        self.idles |= is_whole and self._uses.count == self._begun


class Next(enum.Enum):
    """What a script gets when it requests a batch and has used none since the load."""

    BATCH = enum.auto()
    SAME = enum.auto()
    RESUMED = enum.auto()
    END = enum.auto()


@dataclasses.dataclass
class Opening:
    """The time from a load until the script uses a batch."""

    state: Mapping[str, Any]  # the position that was restored
    rng: RngState  # the generators from which the iteration has to continue
    steps: int  # how many batches of the epoch the script had
    habit: int  # how many batches it takes before it uses one
    then: Next  # what comes after ``steps`` batches: the restored position, or the end of an epoch that was finished
    waits: bool  # whether the position waits while the script skips batches; otherwise a new iteration has begun
    ahead: int = 0  # how many batches it had taken ahead of its training
    taken: int = 0  # how many batches it has requested after the first
    iteration: int = 0  # number of the iteration that has begun since the load, 0 for none
    count: int | None = None  # the count of uses when the last batch was handed out, None before the first

    def is_unused(self, uses: Uses) -> bool:
        """Whether batches were handed out, and none was used."""
        return self.count is not None and self.count == uses.count

    def next(self) -> Next:
        """Return what the script gets when it requests another batch without having used the last one."""
        self.taken += 1
        if self.habit > self.steps or self.taken > self.steps or self.taken < self.habit:
            return Next.BATCH
        if self.taken == self.steps:
            # a single batch that was handed out again and again is the right one
            return Next.SAME if self.waits and self.habit == 1 and self.then is Next.RESUMED else self.then
        return Next.SAME if self.waits else Next.BATCH

    @property
    def reads_ahead(self) -> bool:
        """Whether the script, which uses a batch now, has taken more before it, as many as in each iteration."""
        return self.then is Next.RESUMED and 0 < self.ahead == self.taken + 1 - (self.habit - self.ahead)

    def tell(self) -> None:
        """Log how many batches the script has skipped; called when it uses one for the first time."""
        left_out = self.taken - self.habit + 1
        if left_out < 1 or self.then is not Next.RESUMED:
            return
        if self.habit <= self.steps <= self.taken < self.steps + self.habit:
            log.info("the script skipped %d batches by itself, as many as it had used: resumed after them", self.steps)
        elif self.waits and self.habit == 1:
            log.warning(
                "after the load the script took %d batches that it did not use, but the checkpoint was saved after %d: "
                "resumed after %d",
                left_out,
                self.steps,
                max(left_out, self.steps),
            )
        elif self.waits:
            log.warning(
                "after the load the script took %d batches that it did not use, and the checkpoint was saved "
                "after %d: if it meant to skip those that it had used, some were lost: use "
                "accelerator.skip_first_batches",
                left_out,
                self.steps,
            )
