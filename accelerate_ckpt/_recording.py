"""Accelerate's side of the flight recorder: records the steps of a script, and reports differences after a resume.

The only steps of a script that can be observed are those of its optimizers. Each makes one record: the batches that
were handed out since the step before and that a backward pass followed, the loss given to ``accelerator.backward``, the
learning rates, a sample of the weights.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ckpt_core.events import Event
from ckpt_core.paths import is_remote
from ckpt_core.recorder import (
    FlightRecorder,
    Verdict,
    WeightSample,
    digest_batch,
    digest_generators,
    rates_of,
    record_path,
    say,
)
from ckpt_core.state.rng import RngState

_Digests = tuple[int | None, int]  # of the random generators before a fetch, and of the batch


class Fetched:
    """The batches of one prepared loader: fetched, handed out, used."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._ahead: dict[int, _Digests] = {}
        self._unused: list[_Digests] = []

    def begin(self) -> None:
        """Note that an iteration begins."""
        self._ahead.clear()
        self._drop_unused()

    def fetch(self, number: int, rng: RngState | None, batch: Any) -> int:
        """Note a batch while it is in host memory, by the ``number`` of its fetch in this iteration; return its digest.

        ``rng`` are the random generators before the fetch; None if workers fetch.
        """
        digest = digest_batch(batch)
        self._ahead[number] = None if rng is None else digest_generators(rng), digest
        return digest

    def hand_out(self, first: int, end: int) -> None:
        """Note that the script gets the batches of the fetches from ``first`` to before ``end``."""
        self._recording.settle()
        self._recording.threads.add(threading.get_ident())
        found = [self._ahead.pop(number, None) for number in range(first, end)]
        self._unused += [digests for digests in found if digests is not None]
        if self._unused:
            self._recording.given.add(self)

    def end(self) -> None:
        """Note that the iteration has ended, or that the script has left the loop."""
        self._recording.settle()
        self._drop_unused()

    def _drop_unused(self) -> None:
        self._unused.clear()
        self._recording.given.discard(self)

    def take(self) -> list[_Digests]:
        """Return the digests of the batches handed out since the last use, which are used now."""
        found, self._unused = self._unused, []
        return found


class Recording:
    """Records the training of one Accelerator, on one rank.

    ``accelerator`` returns the Accelerator, and ``announce`` prints a line on rank 0. ``given`` are the loaders that
    have handed out batches with no backward pass since, ``threads`` the threads that got batches.
    """

    def __init__(
        self, accelerator: Callable[[], Any], notify: Callable[[Event], None], announce: Callable[[str], None]
    ) -> None:
        self._accelerator, self._notify, self._announce = accelerator, notify, announce
        self._recorder = FlightRecorder(None, self._say, compares_place=False)
        self._directory = self._file = ""
        self._number = 0
        self._has_recorded = False
        self._loss: Any = None
        self._is_used = False
        self._used: list[_Digests] = []
        self._is_partial = False
        self._has_several = False
        self._weights: tuple[int, WeightSample] | None = None
        self.given: set[Fetched] = set()
        self.threads: set[int] = set()

    # ---- the data ----------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Count the batches that were handed out as used, if a backward pass has followed."""
        if self._is_used:
            self._is_used = False
            self._has_several |= len(self.given) > 1
            for loader in self.given:
                self._used += loader.take()
            self.given.clear()

    # ---- training ----------------------------------------------------------------------------------------------------

    def backward(self, loss: Any) -> None:
        """Note the loss of a backward pass."""
        self._loss, self._is_used = loss, True

    def stepped(self, optimizer: Any, step: int) -> None:
        """Record the step of a prepared optimizer, at ``step`` of the run."""
        self._is_used = True
        self.settle()
        used, self._used, loss, self._loss = self._used, [], self._loss, None
        # batches that another thread has taken may belong to this step or to a later one
        is_here = self.threads <= {threading.get_ident()}
        is_whole, self._is_partial = bool(used) and is_here and not self._is_partial, False
        # with several loaders, it is not known which one a resumed script reads first
        has_first, self._has_several = is_whole and not self._has_several, False
        generators = used[0][0] if has_first else None
        if has_first and generators is None:
            generators = digest_generators()  # workers have fetched, which draws nothing in this process
        self._recorder.record(
            number=self._number,
            epoch=0,
            batch=0,
            step=step,
            data=digest_batch(sorted(data for _, data in used)) if is_whole else None,
            generators=generators,
            weights=self._sample().digest(),
            loss=loss.detach() if isinstance(loss, torch.Tensor) else None,
            **rates_of([optimizer]),
        )
        self._number += 1
        self._has_recorded = True

    def _sample(self) -> WeightSample:
        models = self._accelerator()._models
        if self._weights is None or self._weights[0] != len(models):
            self._weights = len(models), WeightSample(torch.nn.ModuleList(models))
        return self._weights[1]

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def set_directory(self, path: str, rank: int, saved: Mapping[str, Any] | None = None) -> None:
        """Note the path of a checkpoint: the record file is in the directory of the first one.

        ``saved`` is the recorder's state in it, if the run resumes from it: the run that saved it may have recorded to
        another directory.
        """
        if self._file or is_remote(path):
            return
        self._directory = os.path.dirname(os.path.abspath(path))
        self._file = record_path(self._directory, rank)
        other = (saved or {}).get("file", "")
        if not os.path.exists(self._file) and os.path.isfile(other):
            self._file = other
        self._recorder.open(self._file)

    def capture(self) -> dict[str, Any]:
        return {**self._recorder.capture(), "number": self._number, "file": self._file}

    def resume(self, saved: Mapping[str, Any] | None, *, window_open: bool) -> None:
        """Compare the steps from now on with those of the interrupted run, unless ``saved`` is None.

        ``window_open`` is whether the checkpoint is inside a window of gradient accumulation.
        """
        # a run that goes back to an earlier state of its own may differ on purpose
        self._recorder.resume(None if self._has_recorded else saved)
        self._number = int(saved["number"]) if saved is not None else 0
        self._used, self._loss, self._is_used, self._is_partial = [], None, False, window_open
        self._weights = None

    @property
    def repeats_steps(self) -> bool:
        """Whether the interrupted run has recorded steps that this one is yet to repeat."""
        return self._recorder.repeats(self._number)

    def told(self) -> None:
        self._recorder.told()

    def finish(self) -> None:
        self._recorder.finish()

    def close(self) -> None:
        self._recorder.close()

    def _say(self, verdict: Verdict) -> None:
        accelerator = self._accelerator()
        rank = 0 if accelerator is None else accelerator.process_index
        say(verdict, rank, self._directory, notify=self._notify, announce=self._announce)
