"""Capture the position of each data loader, and bring a loader of a resumed run back to it.

There is one tracker for each loader. It does not know the training loop: the caller passes the number of batches that
count as consumed in the current pass, and gets a state made of tensors and plain data.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import operator
import types
from collections.abc import Mapping, Sequence
from typing import Any, Generic, Literal, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset

from ckpt_core.errors import CheckpointError, StateMismatchError
from ckpt_core.state.loader_objects import Carried
from ckpt_core.state.rng import RngState
from ckpt_core.state.samplers import (
    RecordingSampler,
    SamplerMoment,
    SamplerPass,
    capture_counters,
    describe_sampler,
    restore_counters,
)
from ckpt_core.state.stateful import is_stateful
from ckpt_core.state.worker_generators import (
    RecordingCollate,
    RngIterableDataset,
    RngMapDataset,
    WorkerInit,
    WorkerRngLog,
    has_lost_carried,
    pack_carried,
)

log = logging.getLogger(__name__)

Method = Literal["skip", "load", "replay"]
Moment = TypeVar("Moment")

_FETCHES_THAT_SHOW_DRAWS = 2
_LEAST_ROOM = 32768  # bytes, for generators that only workers create
_SLACK = 4096  # bytes, because the encoded size of a generator depends on the digits of its numbers

_STARTED_BEFORE = (
    "persistent workers of a training data loader were started before this fit, so their random generators are not "
    "known (make a new DataLoader for each fit)"
)

_BUFFER = (
    "the state of a dataset of the datasets library lacks its shuffle buffer, whose samples are left out (use a "
    "DataLoader without a state, which reads again)"
)

_COMBINED = (
    "litdata does not bring workers with a CombinedStreamingDataset back to where they were (num_workers=0 does, and a "
    "DataLoader, which reads again)"
)

#: The problem of a loader that takes no batches from its sampler, so that skipping in the sampler has no effect.
READS_ON = (
    "a training data loader takes its batches from elsewhere than its sampler, where its place is not known (let it "
    "read its sampler, or give it state_dict and load_state_dict)"
)

# settings of a loader that determine its batches
_COMPARED = {
    "type": "type",
    "num_workers": "num_workers",
    "length": "number of batches",
    "batch_size": "batch size",
    "sampler": "sampler",
}


@dataclasses.dataclass(frozen=True)
class LoaderMark:
    """The state of a loader between two fetches."""

    started: int  # the fetch, counted from the start of the epoch, at which its current pass began
    sampler_pass: SamplerPass | None  # its current pass over the sampler
    state: Mapping[str, Any] | None  # its own state, if it has one
    # The generators of its data set and collate_fn, if these run in this process.
    generators: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class FetchHistory(Generic[Moment]):
    """The moments before the last fetches of a pass, which a resumed run needs to fetch again what was fetched ahead.

    ``draws_while_reading`` is True if one of the first two fetches of a pass has drawn from the generators of this
    process. Reading again then draws at a different moment than the first time.
    """

    def __init__(self, length: int) -> None:
        self._moments: collections.deque[tuple[int, Moment]] = collections.deque(maxlen=length)
        self.draws_while_reading = False

    def clear(self) -> None:
        """Forget the fetches, because a pass begins."""
        self._moments.clear()

    def add(self, fetch: int, moment: Moment) -> None:
        """Remember the moment before a fetch, counted from the start of the epoch."""
        self._moments.append((fetch, moment))

    def before(self, fetch: int) -> Moment | None:
        """Return the moment before a fetch, None if it is not remembered."""
        return next((moment for number, moment in self._moments if number == fetch), None)

    def was_read(self, fetch: int, before: RngState) -> None:
        """Note that a batch was read that a resume would read again; ``before``: the generators before reading it."""
        if self.is_watched(fetch):
            self.draws_while_reading |= not before.same_as(RngState.capture())

    @staticmethod
    def is_watched(fetch: int) -> bool:
        """Return whether :meth:`was_read` checks this fetch."""
        return fetch < _FETCHES_THAT_SHOW_DRAWS


def has_no_dataset_state(state: Any) -> bool:
    """Return whether a stateful loader's state has none of the data set, so that loading it reads the data again."""
    if isinstance(state, Mapping):
        if "fetcher_state" in state and "dataset_state" in state:
            fetcher = state["fetcher_state"]
            return state["dataset_state"] is None and (fetcher is None or fetcher.get("dataset_iter_state") is None)
        found = [has_no_dataset_state(item) for item in state.values() if isinstance(item, Mapping)]
        return any(found)
    return False


def _copied(state: Any) -> Any:
    """Return a copy of a state's nested dictionaries, because the loader may change its own."""
    return {key: _copied(value) for key, value in state.items()} if type(state) is dict else state


def _is_of(library: str, loader: object) -> bool:
    return any(base.__module__.startswith(library) for base in type(loader).__mro__)


def _has_shuffle_buffer(dataset: Any) -> bool:
    left = [getattr(dataset, "_ex_iterable", None)]
    while left:
        examples = left.pop()
        if type(examples).__name__ == "BufferShuffledExamplesIterable":
            return True
        inner = [getattr(examples, "ex_iterable", None), *getattr(examples, "ex_iterables", ())]
        left += [one for one in inner if one is not None]
    return False


def _may_be_left_early(reader: Any) -> bool:
    """Return whether an iterator that several passes read from may be in the middle of its own pass when they end.

    The iterator of a loader whose sampler never ends is most often not, if it has no workers that read ahead.
    """
    with contextlib.suppress(Exception):  # whatever the length of a user's sampler raises
        has_end = isinstance(reader, types.GeneratorType) or operator.length_hint(reader) > 0
        return has_end or getattr(reader, "_num_workers", 0) > 0
    return False


def _drawn(current: SamplerPass | None) -> int:
    return 0 if current is None else current.drawn


class LoaderTracker:
    """Tracks the position of one loader, which is a ``DataLoader`` (also a stateful one) or any iterable.

    With ``replay``, a resumed run always reaches the position by reading the data again.
    """

    def __init__(self, loader: Any, replay: bool = False) -> None:
        self.loader = loader
        self.workers = int(getattr(loader, "num_workers", 0) or 0)
        self.persistent = bool(getattr(loader, "persistent_workers", False)) and self.workers > 0
        self.is_loader = isinstance(loader, DataLoader)
        # torchdata's passes begin from scratch in new workers, and its state_dict() creates its iterator
        self._is_of_torchdata = _is_of("torchdata.stateful", loader)
        self._is_of_litdata = _is_of("litdata.", loader)
        dataset = getattr(loader, "dataset", None)
        self.iterable = isinstance(dataset, IterableDataset) or not self.is_loader
        self.method: Method = self._choose_method(dataset, replay)
        self.started = 0
        self.passes = 0
        self._original: dict[str, Any] = {}
        self._collate: RecordingCollate | None = None
        self._worker_batches: list[int] = [0] * self.workers
        self._throwaway_base = 0
        # passes that a restart has ended: the fetch at which one began, its number, batches its workers had made before
        self._last_passes: collections.deque[tuple[int, int, list[int]]] = collections.deque(maxlen=4)
        self._marks = 0  # number of calls of mark() in this pass
        self._begun_rng: RngState | None = None
        self._next_workers: list[Any] = []
        self._resumed_workers: list[Any] = []
        self._problem: str | None = None
        self._has_loaded = False
        self._loaded: dict[str, Any] | None = None  # the state from which the first batch will be read
        self._state_before_pass: Mapping[str, Any] | None = None
        self.sampler: RecordingSampler | None = None
        owners = {"": dataset, "collate_fn": loader.collate_fn} if self.is_loader else {"": loader}
        # a loader with a state of its own saves what it carries, except generators
        self.carried = Carried(owners, plain=self.method != "load")
        self._begun_carried: dict[str, Any] = {}
        if self.is_loader:
            self._wrap_sampler()
            self._wrap_dataset(dataset)

    def _choose_method(self, dataset: object, replay: bool) -> Method:
        if replay:
            return "replay"
        if self.is_loader and not self.iterable and not (is_stateful(self.loader) and is_stateful(dataset)):
            return "skip"
        return "load" if is_stateful(self.loader) else "replay"

    # ---- wrapping and unwrapping -------------------------------------------------------------------------------------

    def _set(self, name: str, value: Any) -> None:
        # DataLoader refuses to change these attributes after construction because others were derived from them, which
        # are the same for our wrappers
        self._original.setdefault(name, vars(self.loader).get(name))
        vars(self.loader)[name] = value

    def _wrap_sampler(self) -> None:
        name = "batch_sampler" if self.loader.batch_sampler is not None else "sampler"
        inner = getattr(self.loader, name)
        self.sampler = RecordingSampler(inner, self.loader)
        self._set(name, self.sampler)

    def _wrap_dataset(self, dataset: Any) -> None:
        if self.method == "load" and self.workers and self._is_of_torchdata:
            if self.iterable:
                if is_stateful(dataset):
                    self._set("dataset", RngIterableDataset(dataset))
            else:
                self._set("dataset", RngMapDataset(dataset))

    def release(self) -> None:
        """Remove all wrappers, so that the loader is as it was."""
        for name in list(self._original):
            self._reset(name)

    def _reset(self, name: str) -> None:
        if name in self._original:
            vars(self.loader)[name] = self._original.pop(name)

    # ---- following ---------------------------------------------------------------------------------------------------

    def begin_pass(self, started: int = 0) -> None:
        """Note that the loader's iterator is about to be created, at fetch ``started`` of the epoch."""
        self._forget_early_iterator()
        if self.method == "load":
            self._reset("generator")
            if self._has_loaded:
                self._forget_loaded()
        self._begun_rng = RngState.capture()
        if self.method == "load" and self.persistent and self.passes and not self.alive:
            self._draw_seed_apart()
        self.started = started
        self._state_before_pass = self._state_between_passes()
        self._marks = 0
        self.carried.look()
        self._begun_carried = {"generators": self.carried.generators(), "values": self.carried.values()[0]}
        if self.method == "skip" and self.workers:
            self._worker_batches = self._made_by_workers(_drawn(self._pass())) if self.alive else [0] * self.workers
            self._throwaway_base = 0
            if not self.alive:
                self._record_workers(self._next_workers)
                self._next_workers = []
        self.passes += 1

    def _forget_early_iterator(self) -> None:
        # When torchdata's loader is asked for its state, as by a save in on_train_start, it creates the iterator of its
        # next pass. That neither begins at the position to continue from, nor do its workers record their generators.
        if self.method != "load" and getattr(self.loader, "_initial_iter_for_state_dict", False):
            self.loader.load_state_dict({})

    @property
    def alive(self) -> bool:
        """Whether the loader has persistent workers that are running."""
        return self.persistent and getattr(self.loader, "_iterator", None) is not None

    def pass_made(self) -> None:
        """Note that the loader's iterator, and with it its workers, have been created."""
        if self.sampler is not None:
            self.sampler.resumed()
        if self._collate is not None:
            # later workers of the same loader begin from scratch
            self._collate.resume, self._collate.throwaway = [], 0
        self._reset("restart_on_stop_iteration")

    def has_restarted(self, before: LoaderMark, iterator: Any) -> bool:
        """Return whether ``iterator`` has begun another pass: with persistent workers, torch reuses the object.

        A user's iterator (a generator in ``__iter__``) begins its only pass when its first batch is fetched.
        """
        return self.alive and iterator is self.loader._iterator and self._pass() is not before.sampler_pass

    def restarted(self, fetch: int, before: LoaderMark) -> None:
        """Note that the loader was exhausted and began again while batch ``fetch`` of the epoch was fetched."""
        self._last_passes.append((self.started, self.passes, self._made_by_workers(0)))
        self.started = fetch
        self.passes += 1
        if self.method == "skip" and self.workers:
            after = self._made_by_workers(_drawn(before.sampler_pass))
            self._worker_batches = after if self.persistent else [0] * self.workers
            self._throwaway_base = 0
            if not self.persistent:
                self._resumed_workers = []

    def _record_workers(self, resume: list[Any] | None = None, throwaway: int = 0) -> None:
        room = max(len(pack_carried(self.carried)), _LEAST_ROOM) + _SLACK
        log = WorkerRngLog(self.workers, depth=int(self.loader.prefetch_factor or 2) + 4, room=room)
        self._resumed_workers = list(resume or ())
        collate_fn = self._original.get("collate_fn", self.loader.collate_fn)
        init_fn = self._original.get("worker_init_fn", self.loader.worker_init_fn)
        self._collate = RecordingCollate(collate_fn, log, resume or (), throwaway)
        self._set("collate_fn", self._collate)
        self._set("worker_init_fn", WorkerInit(init_fn, self._collate))

    def _pass(self) -> SamplerPass | None:
        return self.sampler.current if self.sampler is not None else None

    def _made_by_workers(self, batches: int, begun: Sequence[int] | None = None) -> list[int]:
        """Return how many batches each worker has made after ``batches`` of a pass, which are dealt round robin."""
        shares = ((batches - worker + self.workers - 1) // self.workers for worker in range(self.workers))
        begun = [made - self._throwaway_base for made in self._worker_batches] if begun is None else begun
        return [made + share for made, share in zip(begun, shares, strict=True)]

    @property
    def reads_on(self) -> bool:
        """Whether the batches of this pass, if there were any, did not come from its sampler."""
        return self._reads_on(self._pass())

    def _reads_on(self, of: SamplerPass | None) -> bool:
        """Return whether the batches of a pass, if there were any, came from an iterator of a different pass."""
        return self.method == "skip" and _drawn(of) == 0 and not self.alive

    def mark(self) -> LoaderMark:
        """Return the loader's state before a fetch."""
        self._marks += 1
        if self._marks > 1 and self._marks & (self._marks - 1) == 0 and self.workers == 0:
            self.carried.look()  # making a batch may have created generators, most often one of the first batches
        state, self._loaded = (self._loaded or self._state()) if self.method == "load" else None, None
        here = self.workers == 0 and self.carried.has_generators
        return LoaderMark(self.started, self._pass(), state, self.carried.generators() if here else {})

    # ---- capture -----------------------------------------------------------------------------------------------------

    def capture(self, mark: LoaderMark, fetches: int) -> dict[str, Any]:
        """Capture the state from which the loader continues in the middle of a pass.

        The first ``fetches`` of this epoch count as consumed; ``mark`` is what :meth:`mark` returned before the next.
        """
        position = fetches - mark.started
        state = {**self._common(), "position": position, "method": self.method, "started": mark.started}
        began = [one for one in self._last_passes if one[0] == mark.started != self.started]
        earlier = began[-1] if began else None  # fetching ahead has begun another pass
        state["passes"] = self.passes if earlier is None else earlier[1]
        if self.workers == 0:
            state["dataset_generators"] = state["carried"]["generators"] = dict(mark.generators)
        state["carried"]["begun"] = self._begun_carried
        if self._begun_rng is not None:
            state["begun_rng"] = self._begun_rng.encode()
        if mark.sampler_pass is not None:
            current = mark.sampler_pass
            state["begun"] = current.begun.encode()
            state["first"] = current.first.encode() if current.first is not None else None
            state["draws_throughout"] = current.draws_throughout
        if self.method == "load":
            # before the first fetch of a pass, the loader's state may still be that at the end of the previous pass
            state["state"] = dict(mark.state or {}) if position else self._state_before_pass
        if position and self._reads_on(mark.sampler_pass):
            return {**state, "problem": READS_ON}
        state["carried"]["left_out"] += self._moved(between=False)
        begun = None if earlier is None else earlier[2]
        return {**state, **self._states_of_workers(position, begun)} if self.workers else state

    def capture_between_passes(self) -> dict[str, Any]:
        """Capture the state from which the loader begins its next pass."""
        state = {**self._common(), "position": 0, "method": self.method, "between": True, "passes": self.passes}
        state["carried"]["left_out"] += self._moved(between=True)
        state["state"] = self._state_between_passes()
        if self._marks > 1 and self.workers and self._reads_on(self._pass()):  # its workers have read ahead
            return {**state, "problem": READS_ON}
        return {**state, **self._states_of_workers(_drawn(self._pass()))} if self.persistent else state

    def _moved(self, *, between: bool) -> list[str]:
        """Return the paths of iterators in the data whose positions a resume does not restore."""
        is_read_again = self.method == "replay" and not between
        if self.method == "load" or self.workers or is_read_again:
            return []
        if self.method == "skip":
            return [*self.carried.moved(new=not between)]
        return [path for path, one in self.carried.moved(others=False).items() if _may_be_left_early(one)]

    def _states_of_workers(self, batches: int, begun: Sequence[int] | None = None) -> dict[str, Any]:
        """Return the workers' generators after ``batches`` of this pass, or of one before which they made ``begun``."""
        if self.method != "skip":
            return {}
        if self._collate is None:
            return {"problem": _STARTED_BEFORE} if self.alive else {}
        self._problem = None
        all_made = self._made_by_workers(batches, begun)
        states = [self._worker_state(worker, made) for worker, made in enumerate(all_made)]
        return {"workers": states, "problem": self._problem}

    def _worker_state(self, worker: int, batches: int) -> Any:
        if batches > 0 and self._collate is not None:
            try:
                return self._collate.log.state_after(worker, batches)
            except CheckpointError as error:
                # a worker that hangs must not end a training that may still continue; the resumed run warns about it
                log.warning("%s", error.message)
                self._problem = error.message
                return None
        # it has made nothing yet, so its state is still that at its start
        return self._resumed_workers[worker] if worker < len(self._resumed_workers) else None

    def _state_between_passes(self) -> dict[str, Any] | None:
        """Return the loader's own state if its next pass depends on it, else None."""
        is_known = self._is_of_litdata or _is_of("streaming.", self.loader)
        if self.method != "load" or (not is_known and self.workers and not self.persistent):
            return None
        if self.is_loader and (self.passes == 0 if is_known else getattr(self.loader, "_iterator", None) is None):
            return None
        return self._state()

    def _state(self) -> dict[str, Any]:
        return dict(_copied(self.loader.state_dict() or {}))

    def _common(self) -> dict[str, Any]:
        state: dict[str, Any] = {"type": type(self.loader).__name__, "num_workers": self.workers, "length": None}
        with contextlib.suppress(TypeError, NotImplementedError):
            state["length"] = len(self.loader)
        state["batch_size"] = getattr(self.loader, "batch_size", None)
        if self.sampler is not None:
            # describe the script's sampler, also while the rest of an epoch is divided among other ranks
            state["sampler"] = describe_sampler(vars(self.sampler).get("source", self.sampler.inner))
            state["generators"] = self.sampler.generators()
            state["counters"] = self.sampler.counters()
            state["values"], too_much = self.sampler.plain.capture()
            state["moving"] = sorted(self.sampler.moving)
            state["dataset_generators"] = self.carried.generators() if self.workers == 0 else {}
        values, left_out = self.carried.values()
        state["data"] = self.carried.data(values, left_out)
        if self.sampler is not None:
            left_out += [f"sampler.{path}" for path in too_much]
            state["data"]["sampler"] = self.sampler.plain.data({*state["values"], *too_much})
        state["carried"] = {"generators": self.carried.generators(), "values": values, "left_out": left_out}
        return state

    # ---- restore -----------------------------------------------------------------------------------------------------

    def check(self, state: Mapping[str, Any]) -> str | None:
        """Return a message why a resume from the saved state is not exact for this loader, or ``None``."""
        now = self._common()
        if state.get("length") != now["length"]:
            now["length"] = self._length_with(state)
        for key, what in _COMPARED.items():
            if key in state and key in now and state[key] != now[key]:
                return f"the {what} of a training data loader was {state[key]} and is {now[key]}"
        if state["method"] != self.method and "replay" not in (state["method"], self.method):
            raise StateMismatchError(
                f"a training data loader is of another kind than the one that was saved: that one continues by "
                f"{state['method']!r}, this one by {self.method!r}",
                remedy="resume with the same kind of loader",
            )
        others = [
            f"{name}.{path}" if name else path
            for name, digests in state.get("data", {}).items()
            for path, digest in digests.items()
            if now["data"].get(name, {}).get(path, digest) != digest
        ]
        if others:
            return (
                f"the training data ({', '.join(others[:3])}) is not that of the run that saved (if it is drawn at "
                "each start, set a seed before)"
            )
        return self._inexact(state)

    def _length_with(self, state: Mapping[str, Any]) -> int | None:
        """Return the loader's length with the saved values, because a data set may grow from epoch to epoch."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.carried.temporarily(state.get("carried", {}).get("values", {})))
            if self.sampler is not None:
                stack.enter_context(self.sampler.plain.temporarily(state.get("values", {})))
                sampler = self.sampler.drawn_from()
                stack.callback(restore_counters, sampler, capture_counters(sampler))
                restore_counters(sampler, state.get("counters", {}))
            with contextlib.suppress(TypeError, NotImplementedError):
                return len(self.loader)
        return None

    def _inexact(self, state: Mapping[str, Any]) -> str | None:
        if state.get("problem"):
            return str(state["problem"])
        if state.get("draws_throughout") and self.workers:
            return "the sampler draws from the global random generators with every batch, ahead of its workers"
        left_early = (state.get("state") or {}).get("_iterator_finished") is False
        is_continued = self.method == "load" and state["position"] and not self._reads_again(state)
        dataset = getattr(self.loader, "dataset", None)
        if is_continued and _has_shuffle_buffer(dataset):
            return _BUFFER
        if is_continued and self._is_of_litdata and self.workers and type(dataset).__name__.startswith("Combined"):
            return _COMBINED
        if state.get("between") and left_early and self.iterable:
            return "a stateful loader was left before its end, and its dataset may not begin each pass afresh"
        if not getattr(self.loader, "in_order", True):
            return "the data loader returns batches out of order (in_order=False)"
        if self._has_lost_generators(state):
            path = next(iter(self.carried.paths), "or several")
            return f"the dataset keeps its own random generator ({path}) in worker processes, where it is not recorded"
        left_out = state.get("carried", {}).get("left_out")
        if left_out:
            return (
                f"the dataset or its sampler has changed {', '.join(left_out[:3])}, which is too large or of a "
                "kind that is not captured (give it state_dict and load_state_dict)"
            )
        whole_passes = state["passes"] if state.get("between") else state["passes"] - 1  # made by the same workers
        if self._reads_again(state) and self.persistent and whole_passes > 0:
            return "an iterable dataset without state_dict in persistent workers keeps state that cannot be read again"
        return None

    def _has_lost_generators(self, state: Mapping[str, Any]) -> bool:
        if not self.workers or state.get("between"):
            return False
        if self.method == "skip":
            recorded = [packed for packed in state.get("workers") or () if packed is not None]
            return any(has_lost_carried(packed, self.carried) for packed in recorded)
        return self.carried.has_generators and (self.method != "replay" or "carried" not in state)

    def _reads_again(self, state: Mapping[str, Any]) -> bool:
        if self.method == "load" and self.iterable and self.is_loader:
            return state["position"] > 0 and (not state["state"] or has_no_dataset_state(state["state"]))
        return self.method == "replay"

    def batches_to_read_again(self, state: Mapping[str, Any]) -> int:
        """Return how many batches :meth:`prepare` lets the caller read again and drop."""
        return int(state["position"]) if self._reads_again(state) else 0

    def prepare(self, state: Mapping[str, Any]) -> int:
        """Prepare the loader to create an iterator in the middle of a pass; return how many batches to drop then."""
        self._forget_early_iterator()
        self.passes = int(state["passes"])
        self.started = int(state["started"])
        position = int(state["position"])
        self._begun_rng = RngState.decode(state["begun_rng"])
        self._begun_rng.restore()
        self._begun_carried = state.get("carried", {}).get("begun") or {}
        self._restore_carried(self._begun_carried)
        skip, drop = self._split(state, position)
        if self.sampler is not None and state.get("begun") is not None:
            first = SamplerMoment.decode(state["first"]) if state["first"] is not None else None
            begun = SamplerPass(SamplerMoment.decode(state["begun"]), first, 0, state["draws_throughout"])
            self.sampler.moved = frozenset({*state["counters"], *state.get("moving", ())})
            self.sampler.resume(begun, skip)
            self.sampler.undo_seed = self.persistent and self.passes > 1
        if self.method == "load" and not self._reads_again(state):
            if position:
                self._load(state["state"])
                self._draw_seed_apart()  # the seed may be drawn as late as for the first batch
            else:
                self._close_pass(state["state"])
                self._state_before_pass = state["state"]
                self._begun_rng.restore()
        return drop

    def _split(self, state: Mapping[str, Any], position: int) -> tuple[int, int]:
        if self.method == "load" and not self._reads_again(state):
            return 0, 0
        if self.method != "skip" or self._reads_again(state):
            return 0, position
        drop = 0
        if self.workers:
            # batches are dealt to workers round robin, beginning with worker 0: begin at a multiple of their number, so
            # that each new worker makes the batches that the old worker of its number would have made
            drop = position % self.workers
            self._worker_batches = [0] * self.workers
            self._throwaway_base = position // self.workers
            self._record_workers(list(state.get("workers") or ()), drop)
        return position - drop, drop

    def finish(self, state: Mapping[str, Any]) -> None:
        """Note that the iterator was created and batches were dropped; restore what the pass had changed."""
        self.pass_made()
        if self.sampler is not None:
            if self.sampler.live is not None and self.workers == 0:
                self.sampler.live.fast_forward()
            self._restore_common(state, generators=self.workers == 0)

    def _restore_carried(self, carried: Mapping[str, Any]) -> None:
        self.carried.look()
        self.carried.restore_generators(carried.get("generators", {}))
        self.carried.restore_values(carried.get("values", {}))

    def _restore_common(self, state: Mapping[str, Any], generators: bool = True) -> None:
        if self.sampler is None:
            return
        now = self.sampler.moment()
        kept = state["generators"] if generators else now.generators
        # with workers, the sampler is drawn from ahead of the batches, so these values are those of later batches
        moving = () if generators else state.get("moving", ())
        values = {path: value for path, value in state.get("values", {}).items() if path not in moving}
        self.sampler.restore(SamplerMoment(now.rng, kept, state["counters"], values), rng=False)
        carried = state.get("carried") or {"generators": state["dataset_generators"]}
        # reading again has restored the values, and the iterator may refer to them
        again = self.method == "replay" and not state.get("between")
        self._restore_carried({**carried, "values": {}} if again else carried)

    def prepare_next_pass(self, state: Mapping[str, Any]) -> None:
        """Prepare the loader to begin its next whole pass."""
        self.passes = int(state["passes"])
        if self.method == "load":
            self._close_pass(state["state"])
        self._restore_common(state)
        if self.sampler is None:
            self._restore_carried(state.get("carried", {}))
        self._next_workers = list(state.get("workers") or ())
        if self.sampler is not None:
            self.sampler.undo_seed = self.persistent and self.passes > 0
            self.sampler.live = None

    def _close_pass(self, state: Mapping[str, Any] | None) -> None:
        if not state:
            return
        if not self.iterable and self.workers == 0 and state.get("dataset_state") is not None:
            self.loader.dataset.load_state_dict(state["dataset_state"])
            return
        self._load(state)
        if not self._is_of_litdata and (self.is_loader or "restart_on_stop_iteration" in self._original):
            # The next pass is a new one, whether or not the saved pass was marked as finished, and whatever the data
            # set does in its first iteration after its state was loaded.
            next(iter(self.loader), None)
        self._forget_loaded()

    def _draw_seed_apart(self) -> None:
        """Let the seed of new workers be drawn from a separate generator: the saved run drew none here."""
        if not self.is_loader or not self.iterable or self._is_of_torchdata:
            return
        if self.loader.generator is None and self._begun_rng is not None:
            generator = torch.Generator()
            generator.set_state(self._begun_rng.torch_cpu)
            self._set("generator", generator)

    def _forget_loaded(self) -> None:
        """Make later passes begin at the start instead of at the position in the loaded state."""
        dataset: Any = getattr(self.loader, "dataset", None)
        if hasattr(dataset, "_starting_state_dict"):  # of the datasets library
            dataset._starting_state_dict = None
        if self._is_of_litdata:
            self.loader.restore = False  # it stays True until a pass is read past its end
        self._loaded = None
        self._reset("restart_on_stop_iteration")

    def _load(self, state: Mapping[str, Any]) -> None:
        if self._is_of_litdata:
            self.loader.dataset.set_epoch(state["current_epoch"])  # otherwise only the workers' copies would have it
        self._has_loaded, self._loaded = True, _copied(dict(state))
        self.loader.load_state_dict(_copied(dict(state)))
        if hasattr(self.loader, "restart_on_stop_iteration"):
            # torchdata's nodes would fetch a batch at once, with different generators than in the run that saved
            self._set("restart_on_stop_iteration", False)
