"""Record the steps of one rank, and compare those that a resumed run repeats with those of the interrupted run.

A *branch* identifies one history of training. A new run begins a new branch. A resumed run is on the branch of its
checkpoint as long as its steps equal the recorded ones, and continues that branch after the last record. At the first
difference, or if there is nothing to compare, it begins a branch of its own. So a record is only compared with one that
descends from the same state, also after several resumes and after going back to an older checkpoint.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import math
import secrets
import struct
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ckpt_core._devices.streams import LateCopy
from ckpt_core.events import Event, ResumeCompared
from ckpt_core.recorder.fingerprints import digest_bytes, digest_numbers
from ckpt_core.recorder.ring import Record, Ring, decode, encode

log = logging.getLogger(__name__)

VERSION = 1
_KEPT_IN_CHECKPOINTS = 8
_WAITING_FOR_LOSS = 8
# Tolerances for losses of non-deterministic kernels: relative (adjacent bfloat16 numbers differ by up to 0.8 %, and
# losses drift apart slowly), and absolute for losses of about 0.
_NOISE, _LEAST_NOISE = 1e-2, 1e-4

_USUAL_CAUSES = {
    "position": "Usually the length of an epoch has changed, or a dataset or a loader has lost its place.",
    "generators": (
        "Usually something drew random numbers in one run only: an evaluation, a hook of an epoch's start, code "
        "that runs once in a process."
    ),
    "data": (
        "Usually a dataset, transform, sampler or collate_fn has state that no state_dict holds: a random "
        "generator, a list that it shuffles in place, a count of its passes."
    ),
    "rates": "Usually a learning rate or a schedule was changed, or a schedule is not part of the checkpoint.",
    "loss": (
        "Usually the model or the code around it has state that no checkpoint holds: train() or eval() of a "
        "part, attributes that a hook sets, masks, a generator; or its kernels are not deterministic."
    ),
    "weights": (
        "Usually requires_grad of parameters, the state of an optimizer or of a callback that changes weights differs."
    ),
    "gradients": "Usually the gradients of an open accumulation window were changed or cleared after the resume.",
}
_WORDS = {
    "position": "the place in the data",
    "generators": "random generators",
    "data": "the batch",
    "rates": "learning rates",
    "loss": "the loss",
    "weights": "the weights after the step",
    "gradients": "the gradients of the accumulation window",
}


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The result of comparing a resumed run's repeated steps with those of the interrupted run."""

    steps: int  # how many repeated steps were equal
    differs: tuple[str, ...]  # what differed at the next step, in the order a step uses it; empty if all were equal
    message: str  # the same as a text for users
    is_alarm: bool  # whether the user is to be warned


class FlightRecorder:
    """Records the steps of one rank, in a local file or, without one, in checkpoints only.

    ``tell`` is called with the verdict once in a resumed run: after the repeated steps, or at the first that differs.
    With ``compares_place``, epoch, batch and step are compared, too: a resumed run must count them like the first run.

    Example:
        >>> from ckpt_core.recorder import digest_batch
        >>> recorder = FlightRecorder(None, tell=print)
        >>> recorder.record(number=0, epoch=0, batch=0, step=1, data=digest_batch([1, 2]), loss=torch.tensor(0.5))
        >>> recorder.capture()["branch"] == recorder.branch
        True
    """

    def __init__(self, path: str | None, tell: Callable[[Verdict], None], *, compares_place: bool = True) -> None:
        self._ring: Ring | None = None
        self._tell = tell
        self._compares_place = compares_place
        self._last: collections.deque[Record] = collections.deque(maxlen=_KEPT_IN_CHECKPOINTS)
        # records, each with its values (by field name) that are still being copied from an accelerator
        self._waiting: collections.deque[tuple[Record, dict[str, LateCopy]]] = collections.deque()
        self._expected: dict[int, Record] = {}
        self._before: dict[int, Record] = {}
        self._equal = 0
        self._noise = 0.0
        self._end: int | None = None
        self._is_said = False
        self._resumes = False
        self._clock = time.perf_counter()
        self.branch = _new_branch()
        if path is not None:
            self.open(path)

    def open(self, path: str) -> None:
        """Close the file and record into the one at ``path`` from now on."""
        self.close()
        self._ring = Ring(path)

    # ---- resume ------------------------------------------------------------------------------------------------------

    def told(self) -> None:
        """Note that the user has already been warned that this resume is not exact."""
        self._is_said = True

    def repeats(self, number: int) -> bool:
        """Return whether step ``number`` or a later one will be compared when it is repeated."""
        return self._resumes and any(other >= number for other in self._expected)

    def resume(self, saved: Mapping[str, Any] | None, *, known_inexact: bool = False) -> None:
        """Continue from a checkpoint: the next steps are compared with those recorded after it.

        ``saved`` is what :meth:`capture` returned; None if there is nothing to compare with, as with a different number
        of ranks. ``known_inexact`` is True if the user was already warned that this resume is not exact.
        """
        self._expected, self._before, self._equal, self._end = {}, {}, 0, None
        self._last.clear()
        self._waiting.clear()
        self._noise, self._resumes, self._is_said = 0.0, False, known_inexact
        self.branch = _new_branch()
        if saved is None or saved["version"] > VERSION:
            return
        self._resumes, self.branch = True, int(saved["branch"])
        self._last.extend(decode(saved["records"].cpu().numpy().tobytes()))
        self._before = {record.number: record for record in self._last}
        found = self._ring.read() if self._ring is not None else []
        self._expected = {record.number: record for record in found if record.branch == self.branch}

    def read_again(self, epoch: int, batch: int, data: int) -> bool | None:
        """Compare the digest of a batch that was read again to get to the checkpoint's position in the data.

        Returns whether it equals the batch of the interrupted run; None if the checkpoint has no record of that one.
        """
        for record in self._before.values():
            if (record.epoch, record.batch) == (epoch, batch) and record.data is not None:
                if record.data != data:
                    self._differ(record, ("data",), "was read again to get to the checkpoint's place")
                return record.data == data
        return None

    # ---- record ------------------------------------------------------------------------------------------------------

    def record(
        self,
        *,
        number: int,
        epoch: int,
        batch: int,
        step: int,
        data: int | None = None,
        generators: int | None = None,
        rates: int | None = None,
        rate: float = 0.0,
        weights: int | LateCopy | None = None,
        gradients: int | None = None,
        loss: torch.Tensor | float | None = None,
    ) -> None:
        """Record one step. Values on an accelerator are copied asynchronously and completed when they have arrived.

        ``number`` counts the steps of the training, including those before a resume; ``epoch`` and ``batch`` are as
        users count. The digests are ``data``: of the batch, if it is known; ``generators``: before it was fetched;
        ``rates``: of all learning rates (``rate`` is the first); ``weights``: of a sample after the step;
        ``gradients``: of a sample of what an open accumulation window has added up.
        """
        now = time.perf_counter()
        value, late_loss = _value_of(loss)
        late = {} if late_loss is None else {"loss": late_loss}
        if weights is not None and not isinstance(weights, int):
            late["weights"] = weights
        record = Record(
            branch=self.branch,
            number=number,
            epoch=epoch,
            batch=batch,
            step=step,
            data=data,
            generators=generators,
            rates=rates,
            rate=rate,
            weights=weights if isinstance(weights, int) else None,
            gradients=gradients,
            loss=value,
            is_noisy=late_loss is not None and not torch.are_deterministic_algorithms_enabled(),
            seconds=now - self._clock,
            time=time.time(),
        )
        self._clock = now
        if not late and not self._waiting:
            self._complete(record)
        else:
            self._waiting.append((record, late))
            self._take_losses(wait=False)

    def _take_losses(self, *, wait: bool) -> None:
        while self._waiting:
            record, late = self._waiting[0]
            if wait or all(one.is_there() for one in late.values()):
                record = dataclasses.replace(record, **{name: _TAKEN[name](one.take()) for name, one in late.items()})
            elif len(self._waiting) <= _WAITING_FOR_LOSS:
                return
            self._waiting.popleft()
            self._complete(record)

    def _complete(self, record: Record) -> None:
        if self._resumes:
            self._compare(record)
        if record.branch != self.branch:
            record = dataclasses.replace(record, branch=self.branch)
        self._last.append(record)
        if self._ring is not None:
            self._ring.write(record)

    def _compare(self, record: Record) -> None:
        if self._end is None:
            # this is the first step after the resume
            self._expected = {n: other for n, other in self._expected.items() if n >= record.number}
            self._end = max(self._expected, default=-1)
            if self._end < record.number:
                self._resumes, self.branch = False, _new_branch()
                log.info("nothing to compare: the interrupted run ended at its checkpoint, so no step is repeated")
                return
        other = self._expected.pop(record.number, None)
        if other is not None:
            differs = _differences(record, other, place=self._compares_place)
            if differs:
                self._differ(record, differs, "repeats one of the interrupted run")
                return
            self._equal += 1
            if record.loss is not None and other.loss is not None:
                self._noise = max(self._noise, abs(record.loss - other.loss))  # max() ignores NaN as second argument
        if record.number >= self._end:
            self._resumes = False
            self._say_equal()

    def _say_equal(self) -> None:
        if not self._equal:
            return
        what = "1 repeated step equals" if self._equal == 1 else f"{self._equal} repeated steps equal"
        if self._noise:
            message = (
                f"{what} the first run's in data and random generators; losses differ by up to {self._noise:.3g}: "
                "because kernels are not deterministic, or because training depends on state that no checkpoint holds. "
                "With torch.use_deterministic_algorithms(True), the recorder tells which"
            )
        else:
            message = f"{what} the first run's, bit for bit"
        self._tell(Verdict(self._equal, (), message, is_alarm=False))

    def _differ(self, record: Record, differs: tuple[str, ...], how: str) -> None:
        self._resumes, self.branch = False, _new_branch()
        cause = _USUAL_CAUSES[differs[0]]
        *others, last = (_WORDS[name] for name in differs)
        names = f"{', '.join(others)} and {last}" if others else last
        place = f" (epoch {record.epoch}, batch {record.batch})" if self._compares_place else ""
        message = (
            f"this resume is not exact: step {record.step}{place} {how}, and "
            f"differs in {names}. Repeated before it, and equal: {self._equal}. {cause} What to do: "
            "docs/exact_resume.md"
        )
        alarm, self._is_said = not self._is_said, True
        if not alarm:
            message = f"as expected: {message}"
        self._tell(Verdict(self._equal, differs, message, is_alarm=alarm))

    # ---- checkpoints and the end -------------------------------------------------------------------------------------

    def capture(self) -> dict[str, Any]:
        """Return the recorder's state for a checkpoint, as numbers and a tensor."""
        # the losses of the last steps may still be on an accelerator, but the digests of their batches are known
        last = [*self._last, *(dataclasses.replace(record, branch=self.branch) for record, _ in self._waiting)]
        return {"version": VERSION, "branch": self.branch, "records": encode(last[-_KEPT_IN_CHECKPOINTS:])}

    def finish(self) -> None:
        """Wait for outstanding losses and record their steps, report the comparison, and close the file."""
        self._take_losses(wait=True)
        if self._resumes and self._end is not None:
            self._resumes = False
            self._say_equal()
        self.close()

    def close(self) -> None:
        """Close the file, which is kept; steps that still wait for their loss are dropped."""
        if self._ring is not None:
            self._ring.close()


def say(
    verdict: Verdict, rank: int, directory: str, *, notify: Callable[[Event], None], announce: Callable[[str], None]
) -> None:
    """Report the verdict of one rank: as an event to ``notify``, in the log, and on rank 0 as a warning or a line.

    ``announce`` prints a line on rank 0 if nothing differs. ``directory`` is that of the checkpoints.
    """
    differs, message = list(verdict.differs), verdict.message
    notify(ResumeCompared(path=directory, rank=rank, steps=verdict.steps, differs=differs, message=message))
    if differs:
        log.warning("rank %d: %s", rank, message)
    else:
        announce(message)
    if verdict.is_alarm and rank == 0:
        warnings.warn(message, stacklevel=2)


def rates_of(optimizers: Iterable[Any]) -> dict[str, Any]:
    """Return the ``rates`` and ``rate`` for :meth:`FlightRecorder.record`, without rates on an accelerator."""
    found = (group.get("lr", 0.0) for optimizer in optimizers for group in optimizer.param_groups)
    rates = [float(rate) for rate in found if not isinstance(rate, torch.Tensor) or rate.device.type == "cpu"]
    return {"rates": digest_numbers(rates), "rate": rates[0] if rates else 0.0}


def _new_branch() -> int:
    return secrets.randbits(62) + 1


def _differences(record: Record, other: Record, *, place: bool) -> tuple[str, ...]:
    """Return which of the fields that both records have differ, in the order in which a step uses them."""
    if place and (record.epoch, record.batch, record.step) != (other.epoch, other.batch, other.step):
        return ("position",)
    is_noisy = record.is_noisy or other.is_noisy
    found: list[str] = []
    for name in ("generators", "data", "rates", "loss", "weights", "gradients"):
        mine, theirs = getattr(record, name), getattr(other, name)
        if mine is None or theirs is None or (is_noisy and name in ("weights", "gradients")):
            continue  # digests cannot show whether the difference is only noise
        if name != "loss":
            is_same = mine == theirs
        elif is_noisy:
            is_close = math.isclose(mine, theirs, rel_tol=_NOISE, abs_tol=_LEAST_NOISE)
            is_same = is_close or (math.isnan(mine) and math.isnan(theirs))
        else:
            is_same = struct.pack("<d", mine) == struct.pack("<d", theirs)
        if not is_same:
            found.append(name)
    return tuple(found)


# By field of a record: converts the tensor that has arrived from an accelerator.
_TAKEN: dict[str, Callable[[torch.Tensor], Any]] = {"loss": float, "weights": digest_bytes}


def _value_of(loss: torch.Tensor | float | None) -> tuple[float | None, LateCopy | None]:
    if not isinstance(loss, torch.Tensor):
        return (None if loss is None else float(loss)), None
    if loss.numel() != 1 or loss.is_complex():
        return None, None
    if loss.device.type == "cpu":
        return float(loss.detach()), None
    try:
        return None, LateCopy(loss)
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return None, None  # a device without pinned memory or events
