"""Lightning's side of the flight recorder: records the batches of a fit, and reports differences after a resume."""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Iterator, Mapping
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
from lightning_ckpt._plugin_base import ReliableCheckpointIO
from lightning_ckpt._private.replacing import Live
from lightning_ckpt._report import announce

# Lightning is at most one batch ahead of training
_FETCHES_REMEMBERED = 4


class Recording(Live):
    """Records the fit of one Trainer whose model is set up, on one rank."""

    def __init__(self, trainer: Any, directory: Any) -> None:
        self._trainer, self._directory = trainer, str(directory)
        path = None if is_remote(directory) else record_path(self._directory, trainer.global_rank)
        self._recorder = FlightRecorder(path, self._say)
        self.look()
        self._is_inside = False
        self._alarm = ""
        self._fetched: collections.deque[tuple[int, int | None, int]] = collections.deque(maxlen=_FETCHES_REMEMBERED)

    def look(self) -> None:
        """Choose the sampled weights again, because hooks may have replaced them."""
        self._weights = WeightSample(self._trainer.lightning_module)

    def told(self) -> None:
        self._recorder.told()

    def resume(self, saved: Mapping[str, Any] | None, *, known_inexact: bool) -> None:
        self._recorder.resume(saved, known_inexact=known_inexact)

    def fetched(self, index: int, rng: RngState | None, batch: Any) -> None:
        """Note a batch of the epoch as fetched from the loaders, and the random generators before the fetch."""
        if self._is_inside:
            return
        self._fetched.append((index, None if rng is None else digest_generators(rng), digest_batch(batch)))

    def read_again(self, index: int, batch: Any) -> bool | None:
        """Return whether a batch, read again to reach the checkpoint's position, is the same; None if unknown."""
        return self._recorder.read_again(self._trainer.current_epoch, index, digest_batch(batch))

    def batch_ended(self, outputs: Any, batch_idx: int) -> None:
        """Record a batch that was trained on."""
        if self._is_inside:
            return
        trainer = self._trainer
        # the latest with this index: short epochs, and fits that a callback runs in between, reuse indices
        found = ((g, d) for index, g, d in reversed(self._fetched) if index == batch_idx)
        generators, data = next(found, (None, None))
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        self._recorder.record(
            number=trainer.fit_loop.total_batch_idx,
            epoch=trainer.current_epoch,
            batch=batch_idx,
            step=trainer.global_step,
            data=data,
            generators=generators,
            weights=self._weights.digest(),
            gradients=self._weights.digest_gradients(trainer.optimizers) if self._is_window_open(batch_idx) else None,
            loss=loss if isinstance(loss, (torch.Tensor, float)) else None,
            **rates_of(trainer.optimizers),
        )

    def _is_window_open(self, batch_idx: int) -> bool:
        trainer = self._trainer
        is_last = bool(trainer.is_last_batch)
        is_automatic = trainer.lightning_module.automatic_optimization
        return is_automatic and not is_last and (batch_idx + 1) % trainer.accumulate_grad_batches != 0

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Record nothing while a callback runs the loops itself; it restores afterwards what it has trained."""
        before, self._is_inside = self._is_inside, True
        try:
            yield
        finally:
            self._is_inside = before

    def capture(self) -> dict[str, Any]:
        return self._recorder.capture()

    def finish(self) -> None:
        if not self._is_inside:
            self._recorder.finish()

    def close(self) -> None:
        self._recorder.close()

    def _say(self, verdict: Verdict) -> None:
        rank = self._trainer.global_rank
        say(verdict, rank, self._directory, notify=self._notify, announce=functools.partial(announce, self._trainer))
        if verdict.is_alarm and rank:
            self._alarm = f"on rank {rank}, {verdict.message}"

    def _notify(self, event: Event) -> None:
        plugin = self._trainer.strategy.checkpoint_io
        if isinstance(plugin, ReliableCheckpointIO):
            plugin.checkpointer.notify(event)

    def take_alarm(self) -> str:
        """Return the alarm of this rank, once; rank 0 warns about it."""
        alarm, self._alarm = self._alarm, ""
        return alarm
