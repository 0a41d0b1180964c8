"""Wrap an index sampler to record its position in a pass, and to continue from there without a stored permutation."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ckpt_core.state.changed_values import PlainState
from ckpt_core.state.rng import RngState, capture_generators, restore_generators
from ckpt_core.state.stateful import Forwarding, stay_stateful

_SEEDS = ("seed", "epoch")


@dataclasses.dataclass(frozen=True)
class SamplerMoment:
    """Everything that a sampler's next indices can depend on, at one moment."""

    rng: RngState  # the global generators
    generators: Mapping[str, Any]  # the sampler's own generators, captured
    counters: Mapping[str, int]  # its seed, its epoch, and other integers it has changed since it was made
    # Other plain values that it has changed, such as a list that it shuffles in place.
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def encode(self) -> dict[str, Any]:
        return {
            "rng": self.rng.encode(),
            "generators": dict(self.generators),
            "counters": dict(self.counters),
            "values": dict(self.values),
        }

    @classmethod
    def decode(cls, state: Mapping[str, Any]) -> SamplerMoment:
        return cls(RngState.decode(state["rng"]), state["generators"], state["counters"], state.get("values", {}))


@dataclasses.dataclass
class SamplerPass:
    """One pass over the data."""

    begun: SamplerMoment  # the moment when its iterator was created
    # The moment before the first batch of indices was drawn, when most samplers draw their permutation; None until then
    first: SamplerMoment | None = None
    drawn: int = 0  # number of batches of indices drawn; with workers, ahead of the number of consumed batches
    draws_throughout: bool = False


def _parts(sampler: object) -> Iterator[tuple[str, object]]:
    path, part = "", sampler
    for _ in range(4):
        yield path, part
        child = getattr(part, "sampler", None) or getattr(part, "_sampler", None)
        if child is None:
            return
        path, part = path + "sampler.", child


def handed_out(iterator: Any) -> int | None:
    """Return how many batches an iterator of a ``DataLoader`` has handed out, from torch's private counter.

    None if a release of torch has no such counter; the iterator's position is unknown then.
    """
    count = getattr(iterator, "_num_yielded", None)
    return count if isinstance(count, int) else None


def describe_sampler(sampler: object) -> str:
    """Return a text with the classes of a sampler and the samplers inside it, and whether they shuffle."""
    names = []
    for _, part in _parts(sampler):
        shuffle = getattr(part, "shuffle", None)
        names.append(type(part).__name__ + (f"(shuffle={shuffle})" if isinstance(shuffle, bool) else ""))
    return " of ".join(names)


def capture_counters(sampler: object, initial: Mapping[str, int] | None = None) -> dict[str, int]:
    """Capture the integers of a sampler and of the samplers inside it.

    With an ``initial`` capture, only seeds, epochs and integers that differ from it are returned, so that settings of
    the resumed run (``num_replicas``, ``batch_size``) take effect.
    """
    counters: dict[str, int] = {}
    for path, part in _parts(sampler):
        for name, value in vars(part).items() if hasattr(part, "__dict__") else ():
            if type(value) is int:
                counters[path + name] = value
    if initial is None:
        return counters
    return {
        path: value
        for path, value in counters.items()
        if path.rpartition(".")[2] in _SEEDS or initial.get(path, value) != value
    }


def restore_counters(sampler: object, counters: Mapping[str, int]) -> None:
    """Set the integers that :func:`capture_counters` returned, if the sampler still has them."""
    for path, part in _parts(sampler):
        for name, value in list(vars(part).items()) if hasattr(part, "__dict__") else ():
            if type(value) is int and counters.get(path + name, value) != value:
                setattr(part, name, counters[path + name])


def _itself(sampler: Any) -> Any:
    return sampler


class RecordingSampler(Forwarding):
    """A wrapper of the sampler (or batch sampler) that a loader takes its indices from.

    It yields what the sampler yields, and records what is needed to repeat the pass and skip the consumed part. No
    permutation is stored, however large the data set is. All other attributes are those of the sampler.
    """

    _own = frozenset(
        {"inner", "loader", "current", "live", "undo_seed", "plain", "moving", "moved", "_initial", "_pending"}
        | {"drawn_in"}
    )

    def __init__(self, inner: Iterable[Any], loader: object) -> None:
        self.inner = inner
        self.loader = loader
        self.current: SamplerPass | None = None  # the pass of the last iterator
        self.live: _RecordingIterator | None = None  # the last iterator
        self.drawn_in: int | None = None  # id of the thread that has last drawn from it
        # Set for a pass that had persistent workers already in the saved run, so that no seed was drawn for them there.
        self.undo_seed = False
        self._initial = capture_counters(inner)
        # The sampler's plain values.
        self.plain = PlainState(inner, skip=(loader, getattr(loader, "dataset", None)))
        self.moving: set[str] = set()  # paths of plain values and integers that change when indices are drawn
        self.moved: frozenset[str] = frozenset()  # the same of the run that is resumed
        self._pending: tuple[SamplerPass, int] | None = None
        stay_stateful(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self.inner,)  # a copy of the loader has its own

    def drawn_from(self) -> Any:
        """Return the sampler whose state is captured and restored."""
        return self.inner

    def make_iterator(self) -> Any:
        """Return the iterator that yields the indices of the next pass."""
        return iter(self.inner)

    def moment(self) -> SamplerMoment:
        """Capture everything that the next indices depend on."""
        return SamplerMoment(RngState.capture(), self.generators(), self.counters(), self.plain.capture()[0])

    def counters(self) -> dict[str, int]:
        """Capture the integers of the sampler that may change."""
        return capture_counters(self.drawn_from(), self._initial)

    def generators(self) -> dict[str, Any]:
        """Capture the generators of the sampler and of the loader."""
        own = {f"sampler.{path}": state for path, state in capture_generators(self.drawn_from()).items()}
        generator = getattr(self.loader, "generator", None)
        if generator is not None:
            own["loader"] = generator.get_state()
        return own

    def restore(self, moment: SamplerMoment, rng: bool = True) -> None:
        """Go back to a captured moment, with or without the global generators."""
        # An integer that drawing changes, but that the moment does not have, had its initial value then. The script may
        # have changed it since.
        began = {path: value for path, value in self._initial.items() if path in self.moved}
        restore_counters(self.drawn_from(), {**began, **moment.counters})
        self.plain.restore(moment.values)
        self.restore_generators(moment.generators)
        if rng:
            moment.rng.restore()

    def restore_generators(self, generators: Mapping[str, Any]) -> None:
        """Set the generators of the sampler and of the loader."""
        own = {path.removeprefix("sampler."): state for path, state in generators.items() if path != "loader"}
        restore_generators(self.drawn_from(), own)
        generator = getattr(self.loader, "generator", None)
        if generator is not None and "loader" in generators:
            generator.set_state(generators["loader"].cpu())

    def resume(self, begun: SamplerPass, skip: int) -> None:
        """Make the next pass a repetition of ``begun`` without its first ``skip`` batches of indices."""
        self._pending = (begun, skip)
        self.live = None

    def resumed(self) -> None:
        """Note that the loader's iterator was created, so that later passes are new ones."""
        self._pending = None
        self.undo_seed = False

    def __iter__(self) -> _RecordingIterator:
        # a loader with workers calls this twice, before and after it draws its workers' seed; the first call counts
        again = self.live is not None and self.live.untouched
        if again and self.undo_seed and self.current is not None:
            self.restore(self.current.begun)
        if self._pending is None:
            if self.current is None or not again:
                self.current = SamplerPass(self.moment())
            self.live = _RecordingIterator(self, self.current)
        else:
            begun, skip = self._pending
            if not again:
                self.restore(begun.begun)
            self.current = SamplerPass(begun.begun, None, 0, begun.draws_throughout)
            self.live = _RecordingIterator(self, self.current, begun.first, skip)
        return self.live


class _RecordingIterator:
    def __init__(
        self, sampler: RecordingSampler, current: SamplerPass, first: SamplerMoment | None = None, skip: int = 0
    ) -> None:
        self.sampler = sampler
        self.current = current
        self.inner = sampler.make_iterator()
        self._first = first
        self._skip = skip
        stay_stateful(self)  # so that the loader's own state_dict, which includes the sampler's, stays complete

    def __iter__(self) -> _RecordingIterator:
        return self

    @property
    def untouched(self) -> bool:
        """Whether nothing has been drawn from it."""
        return self.current.first is None

    def fast_forward(self) -> None:
        """Draw and drop the batches to skip, leaving the global generators unchanged."""
        if not self._skip:
            return
        skip, self._skip = self._skip, 0
        now = RngState.capture()
        if self._first is not None:
            self.sampler.restore(self._first)
            self.current.first = self._first
        for _ in range(skip):
            next(self.inner, None)
        self.current.drawn = skip
        now.restore()

    def __next__(self) -> Any:
        self.sampler.drawn_in = threading.get_ident()
        self.fast_forward()
        if self.current.first is None:
            self.current.first = self.sampler.moment()
        # the second draw shows whether the sampler draws random numbers with each batch, or only once for a permutation
        before = (RngState.capture(), self._values()) if self.current.drawn == 1 else None
        indices = next(self.inner)
        if before is not None:
            rng, values = before
            if not rng.same_as(RngState.capture()):
                self.current.draws_throughout = True
            now = self._values()
            self.sampler.moving |= {path for path in now if now[path] != values.get(path)}
        self.current.drawn += 1
        return indices

    def _values(self) -> dict[str, Any]:
        return {**self.sampler.plain.digests(), **capture_counters(self.sampler.drawn_from())}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in {"sampler", "current", "inner", "_first", "_skip"}:
            raise AttributeError(name)
        return getattr(self.inner, name)
