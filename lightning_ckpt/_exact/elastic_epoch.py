"""An epoch that one number of ranks began and another continues: each sample that was left is used once.

The ranks divide one global order among themselves, batch by batch, so what they have consumed together is the beginning of
it. Which order it is takes a few numbers to say, however long it is: the seed and the epoch of a ``DistributedSampler``, or the
random generators from which a ``RandomSampler`` drew it. New ranks make the same order and divide the rest of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

from ckpt_core.state.elastic import EpochShare, RemainingBatches, describe_order
from ckpt_core.state.loaders import LoaderMark, LoaderTracker
from ckpt_core.state.samplers import RecordingSampler, SamplerPass, restore_counters

__all__ = ["TrainingLoader"]


class _DivisibleSampler(RecordingSampler):
    """Stands in front of a batch sampler, and for one pass yields this rank's batches of a division instead.

    Attributes:
        division: How the present pass is divided, if another number of ranks began the epoch.
    """

    def __init__(self, inner: Any, loader: object) -> None:
        self.division: EpochShare | None = None
        super().__init__(inner, loader)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "division":
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def __iter__(self) -> Any:
        live = super().__iter__()
        if self.division is not None:
            live.inner = iter(self.division)
        return live


class TrainingLoader(LoaderTracker):
    """Follows one training loader, and can go on with what another number of ranks left of an epoch.

    Args:
        loader: A ``DataLoader`` (also a stateful one) or any iterable.
        replay: Always go back by reading again.
        world_size: Number of ranks that train.
    """

    def __init__(self, loader: Any, replay: bool, world_size: int) -> None:
        self._world_size = world_size
        super().__init__(loader, replay)

    def _wrap_sampler(self) -> None:
        super()._wrap_sampler()
        if not self.iterable and self.sampler is not None:
            self.sampler = _DivisibleSampler(self.sampler.inner, self.loader)
            self._set("batch_sampler" if self.loader.batch_sampler is not None else "sampler", self.sampler)

    @property
    def division(self) -> EpochShare | None:
        """How the present pass is divided, if another number of ranks began the epoch."""
        return getattr(self.sampler, "division", None) if self.sampler is not None else None

    @division.setter
    def division(self, division: EpochShare | None) -> None:
        if isinstance(self.sampler, _DivisibleSampler):
            self.sampler.division = division

    def begin_pass(self, started: int = 0) -> None:
        super().begin_pass(started)
        self.division = None

    @property
    def _batches(self) -> Any:
        return self.sampler.inner if self.sampler is not None else None

    # ---- capture -----------------------------------------------------------------------------------------------------

    def capture(self, mark: LoaderMark, fetches: int) -> dict[str, Any]:
        state = super().capture(mark, fetches)
        return {**state, "division": self._describe(mark.sampler_pass)}

    def _describe(self, current: SamplerPass | None) -> dict[str, Any]:
        """Say in which order this pass is, for ranks of another number, or why that cannot be said."""
        problem = self._problem_with_dividing()
        if problem is not None:
            return {"problem": problem}
        batches, division = self._batches, self.division
        replicas, _, _ = self._place(batches.sampler)
        found: dict[str, Any] = {"length": len(self.loader.dataset), "samples": batches.batch_size * replicas}
        if division is not None:
            return {**found, "order": dict(division.order), "consumed": division.consumed, "divided": True}
        order = describe_order(batches.sampler, current)
        return {**found, "order": order, "consumed": 0, "divided": False}

    def _problem_with_dividing(self) -> str | None:
        if self.iterable or self._batches is None:
            return "an iterable data set divides itself, so where it was means nothing to another number of ranks"
        if self.method == "load":
            return "the data set has a state of its own, which means nothing to another number of ranks"
        if not RemainingBatches.counts_samples(self._batches):
            return f"where a {type(self._batches).__name__} was means nothing to another number of ranks"
        sampler = self._batches.sampler
        if type(sampler) is DistributedSampler:
            return None
        if self._world_size > 1:
            return f"a {type(sampler).__name__} gives each rank an order of its own"
        if type(sampler) is SequentialSampler:
            return None
        whole = type(sampler) is RandomSampler and not sampler.replacement
        if whole and sampler.num_samples == len(self.loader.dataset):
            return None
        return f"the order that a {type(sampler).__name__} makes cannot be divided over another number of ranks"

    @staticmethod
    def _place(sampler: Any) -> tuple[int, int, bool]:
        if isinstance(sampler, DistributedSampler):
            return sampler.num_replicas, sampler.rank, sampler.drop_last
        return 1, 0, False

    # ---- restore -----------------------------------------------------------------------------------------------------

    def prepare(self, state: Mapping[str, Any]) -> int:
        description = state.get("division") or {}
        if description.get("divided"):
            self.division = self._divide(description, description["consumed"])
        return super().prepare(state)

    def elastic_problem(self, state: Mapping[str, Any]) -> str | None:
        """Return why what another number of ranks left of an epoch cannot be divided over these, in words, or ``None``."""
        description = state.get("division") or {"problem": "it says nothing of its order"}
        problem = description.get("problem") or self._problem_with_dividing()
        if problem is None and description["length"] != len(self.loader.dataset):
            return f"the data set had {description['length']} samples and has {len(self.loader.dataset)}"
        return None if problem is None else str(problem)

    def rest(self, state: Mapping[str, Any], again: int) -> EpochShare | None:
        """Return what another number of ranks left of an epoch, divided over these; ``None`` if that is all of it.

        Args:
            state: What :meth:`capture` returned on one of them.
            again: Number of their last batches that do not count.
        """
        description = state["division"]
        if description["order"] is None:
            return None
        batches = max(0, int(state["position"]) - again)
        return self._divide(description, description["consumed"] + batches * description["samples"])

    def _divide(self, description: Mapping[str, Any], consumed: int) -> EpochShare:
        batches = self._batches
        replicas, rank, even = self._place(batches.sampler)
        return EpochShare(
            description["order"],
            description["length"],
            consumed,
            batches.batch_size,
            batches.drop_last,
            replicas,
            rank,
            even,
        )

    def carry_seeds(self, state: Mapping[str, Any]) -> None:
        """Give the samplers the seeds that they had in the other run, for the epochs to come."""
        if self.sampler is not None:
            seeds = {path: n for path, n in state["counters"].items() if path.rpartition(".")[2] in ("seed", "epoch")}
            restore_counters(self.sampler.inner, seeds)
