"""Where all the prepared loaders of an Accelerator are, and its random generators."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from accelerate_ckpt import _private_data
from accelerate_ckpt._data_position import LoaderPosition
from ckpt_core.errors import CheckpointFormatError
from ckpt_core.state.ddp import rebuild_ddp_buckets
from ckpt_core.state.elastic import derive_rng
from ckpt_core.state.rng import RngState

__all__ = ["LoaderPositions"]

log = logging.getLogger(__name__)

VERSION = 1
_RANKS_THAT_NEED_FINAL_BUCKETS = 3


class LoaderPositions:
    """Follows the prepared loaders of one Accelerator.

    To be made before the Accelerator prepares models: with three or more ranks DDP gets its final gradient buckets then, so
    that the first step after a resume adds the gradients in the order in which an uninterrupted run adds them.

    Args:
        accelerator: The Accelerator.
        replay: Always go back by reading again, never by skipping.
        warn: Called on the main process with a message that says why a resume is not exact; a Python warning by default.

    Raises:
        CheckpointError: This release of Accelerate is built in another way.

    Example:
        >>> positions = LoaderPositions(accelerator)
        >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        >>> for batch in loader:
        ...     state = positions.capture()
        >>> positions.restore(state, saved_world_size=1)  # the next iteration goes on after that batch
    """

    def __init__(self, accelerator: Any, *, replay: bool = False, warn: Callable[[str], None] | None = None) -> None:
        _private_data.check()
        self._accelerator = accelerator
        self._replay = replay
        self._warn = warn or _warn
        self._positions: list[LoaderPosition] = []
        self._waiting: dict[int, tuple[Mapping[str, Any], RngState]] = {}
        self._rng_of_save: RngState | None = None
        self._keep_ddp_buckets()
        _private_data.register(self)

    def _keep_ddp_buckets(self) -> None:
        accelerator = self._accelerator
        if accelerator.num_processes < _RANKS_THAT_NEED_FINAL_BUCKETS:
            return
        if accelerator._models:
            self._say(
                "a model was prepared before the checkpoint plugin was attached; with three or more ranks the first step after "
                "a resume may differ in the last bits (attach before accelerator.prepare)"
            )
        stock = accelerator.prepare_model

        @functools.wraps(stock)
        def prepare_model(*args: Any, **kwargs: Any) -> Any:
            model = stock(*args, **kwargs)
            rebuild_ddp_buckets(model)
            return model

        accelerator.prepare_model = prepare_model

    def _say(self, message: str) -> None:
        if self._accelerator.is_main_process:
            self._warn(message)

    def release(self) -> None:
        """Give the loaders back as they were."""
        for position in self._positions:
            position.release()
        self._positions.clear()
        vars(self._accelerator).pop("prepare_model", None)
        _private_data.unregister(self)

    # ---- following ---------------------------------------------------------------------------------------------------

    def find(self, loader: Any) -> LoaderPosition | None:
        """Return what follows a loader, if it is one of the Accelerator's."""
        for number, prepared in enumerate(self._accelerator._dataloaders):
            if prepared is loader:
                return self._follow(number, loader)
        return None

    def _follow(self, number: int, loader: Any) -> LoaderPosition | None:
        for position in self._positions:
            if position.loader is loader:
                return position
        if not _private_data.Internals.is_known(loader):
            return None
        position = LoaderPosition(loader, self._accelerator.num_processes, self._take_rng, self._replay)
        self._positions.append(position)
        if number in self._waiting:
            position.restore(*self._waiting.pop(number))
        return position

    def _all(self) -> list[LoaderPosition | None]:
        loaders = self._accelerator._dataloaders
        self._positions = [p for p in self._positions if any(p.loader is loader for loader in loaders)]
        return [self._follow(number, loader) for number, loader in enumerate(loaders)]

    def _take_rng(self) -> RngState | None:
        rng, self._rng_of_save = self._rng_of_save, None
        return rng

    # ---- capture and restore -----------------------------------------------------------------------------------------

    def capture(self) -> dict[str, Any]:
        """Capture this rank's random generators and the positions of its loaders, as tensors and plain data."""
        # first, because asking a loader may draw from them
        rng = RngState.capture()
        loaders = [None if position is None else position.capture() for position in self._all()]
        rng.restore()
        return {
            "version": VERSION,
            "step": int(self._accelerator.step),
            "rng": rng.encode(),
            "loaders": loaders,
        }

    def restore(self, state: Mapping[str, Any], *, saved_world_size: int, has_own: bool = True) -> None:
        """Set the generators, and let the next iteration of each loader go on where it was.

        With another number of ranks than the checkpoint was saved by, the ranks go on in the rest of the epoch that all old
        ranks had in common: nothing is lost, and nothing repeated but the padding by which Accelerate gives all ranks
        equally many batches. Ranks that were there keep their generators; those of a new rank are derived from rank
        0's and its own number.

        Args:
            state: What :meth:`capture` returned on this rank; on a rank that was not there, what it returned on rank 0.
            saved_world_size: Number of ranks of the run that was saved.
            has_own: Whether ``state`` is of this rank; otherwise it is of rank 0.

        Raises:
            CheckpointFormatError: A newer version of this package captured it.
        """
        if state["version"] > VERSION:
            raise CheckpointFormatError(
                f"the data position has version {state['version']}, this release reads up to {VERSION}",
                remedy="update ckpt-plugins",
            )
        rank, world_size = self._accelerator.process_index, self._accelerator.num_processes
        rng = RngState.decode(state["rng"])
        self._accelerator.step = int(state["step"])
        causes = []
        if saved_world_size != world_size:
            causes.append(
                f"the checkpoint was saved by {saved_world_size} ranks and is loaded by {world_size}: the rest of the epoch is "
                "divided anew, so batches and random numbers differ from those of the old number of ranks"
            )
        self._waiting.clear()
        positions = self._all()
        # the rest is for loaders that the script has not prepared yet
        self._waiting = {number: (saved, rng) for number, saved in enumerate(state["loaders"]) if saved}
        for number, position in enumerate(positions):
            saved, _ = self._waiting.pop(number, (None, None))
            if position is None or saved is None:
                continue
            causes += [problem for problem in [position.problem(saved)] if problem]
            position.restore(saved, rng)
        if causes:
            self._say(f"this resume cannot be promised to be exact: {'; '.join(dict.fromkeys(causes))}")
        self._rng_of_save = rng if has_own and rank < saved_world_size else derive_rng(rng, rank)
        self._rng_of_save.restore()


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=5)
