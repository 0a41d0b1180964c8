"""Samplers, workers, gradients and kinds, each on its own."""

from __future__ import annotations

import io
import os
import random
from typing import Any, Protocol, runtime_checkable

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler
from torchdata import nodes
from torchdata.stateful_dataloader import StatefulDataLoader

from ckpt_core.errors import CheckpointError, StateMismatchError
from ckpt_core.state.gradients import capture_gradients, restore_gradients
from ckpt_core.state.kinds import Kind, capture_buffers, join_ranks, restore_buffers, state_of_rank
from ckpt_core.state.loader_objects import Carried
from ckpt_core.state.loaders import FetchHistory, LoaderTracker
from ckpt_core.state.rng import RngState, pack_rng
from ckpt_core.state.samplers import RecordingSampler
from ckpt_core.state.worker_generators import RngMapDataset, WorkerRngLog


def reseed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def batches(size: int = 16) -> BatchSampler:
    return BatchSampler(RandomSampler(range(size)), 4, False)


@pytest.mark.parametrize("skip", [1, 3, 4])
def test_sampler_repeats_its_pass_without_its_beginning(skip: int) -> None:
    sampler = RecordingSampler(batches(), None)
    expected = list(sampler)
    begun = sampler.current
    assert begun is not None and begun.drawn == 4
    reseed(99)
    again = RecordingSampler(batches(), None)
    again.resume(begun, skip)
    iterator = iter(again)
    reseed(5)
    before = RngState.capture()
    iterator.fast_forward()
    assert before.same_as(RngState.capture()), "skipping must leave the global generators alone"
    assert list(iterator) == expected[skip:]
    assert again.current is not None and again.current.drawn == 4


def test_sampler_is_what_it_stands_in_front_of() -> None:
    inner = DistributedSampler(range(8), num_replicas=2, rank=0, seed=3)
    sampler = RecordingSampler(inner, None)
    assert len(sampler) == 4 and sampler.num_replicas == 2
    sampler.set_epoch(5)
    assert inner.epoch == 5
    sampler.epoch = 6
    assert inner.epoch == 6
    assert sampler.moment().counters == {"seed": 3, "epoch": 6}


def test_sampler_that_draws_as_it_goes_is_noticed() -> None:
    class Draws:
        def __len__(self) -> int:
            return 4

        def __iter__(self) -> Any:
            return (random.randrange(9) for _ in range(4))

    sampler = RecordingSampler(Draws(), None)
    list(sampler)
    assert sampler.current is not None and sampler.current.draws_throughout
    plain = RecordingSampler(batches(), None)
    list(plain)
    assert plain.current is not None and not plain.current.draws_throughout


class Noise(Dataset[Any]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> float:
        return float(torch.rand(())) + float(np.random.rand()) + random.random()


class Pool:
    """Opens files, which no resume can restore, and counts them."""

    def __init__(self) -> None:
        self.opened, self.file = 0, None

    def read(self) -> int:
        if self.opened == 0:
            self.file, self.opened = io.BytesIO(b"read"), 1  # type: ignore[assignment]
        return len(self.file.getvalue())  # type: ignore[attr-defined]


class Counting(Dataset[Any]):
    def __init__(self) -> None:
        self.reads, self.side, self.hits, self.last, self.pool = 0, 0, np.zeros(3), [1.0, 2.0], Pool()

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> float:
        self.reads += 1
        self.side = 1 - self.side
        self.hits[index % 3] += 1
        self.last = [self.last[1], float(index)]
        return self.reads + 100 * self.side + 1000 * float(self.hits[0]) + 10000 * sum(self.last) + self.pool.read()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("make", "start_method", "done"),
    [(kind, "fork", done) for kind in (Noise, Counting) for done in (1, 2, 3, 5)]
    + [pytest.param(Counting, "spawn", 3, marks=pytest.mark.slow)],
)
def test_workers_go_on_from_where_they_were(make: Any, start_method: str, done: int) -> None:
    def loader() -> Any:
        return DataLoader(make(), batch_size=2, num_workers=2, multiprocessing_context=start_method)

    reseed(1)
    first = loader()
    tracker = LoaderTracker(first)
    tracker.begin_pass()
    iterator = iter(first)
    taken = [next(iterator) for _ in range(done)]
    state = tracker.capture(tracker.mark(), done)
    rest = list(iterator)
    reseed(2)
    second = loader()
    follower = LoaderTracker(second)
    drop = follower.prepare(state)
    iterator = iter(second)
    for _ in range(drop):
        next(iterator)
    follower.finish(state)
    found = list(iterator)
    assert len(taken) + len(found) == 6 and len(found) == len(rest)
    assert all(torch.equal(a, b) for a, b in zip(found, rest, strict=True))
    follower.release()
    assert not isinstance(second.batch_sampler, RecordingSampler)


class ReadsOn(DataLoader[Any]):
    """Reads from one iterator in all epochs, as loaders with persistent workers do."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.iterator = super().__iter__()

    def __iter__(self) -> Any:
        return (next(self.iterator) for _ in range(3))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_that_reads_on_from_an_iterator_of_its_own_is_said(workers: int) -> None:
    loader: Any = ReadsOn(Noise(), batch_size=2, num_workers=workers)
    tracker = LoaderTracker(loader)
    tracker.begin_pass()
    iterator = iter(loader)
    for _ in range(2):
        tracker.mark()
        next(iterator)
    fresh = LoaderTracker(DataLoader(Noise(), batch_size=2, num_workers=workers))
    states = [tracker.capture(tracker.mark(), 2), tracker.capture_between_passes()]
    causes = [fresh.check({**state, "type": "DataLoader"}) for state in states]
    assert ["from elsewhere than its sampler" in str(cause) for cause in causes] == [True, workers > 0]


class FromIterators(Dataset[Any]):
    """Returns the next items of its own iterators, whatever index is asked for."""

    def __init__(self) -> None:
        self.idle, self.ahead, self.queue = (i for i in range(9)), iter(DataLoader(Noise())), None

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> float:
        self.queue = self.queue or (float(one) for one in self.ahead)  # type: ignore[assignment]
        return next(self.queue)  # type: ignore[call-overload, no-any-return]


def test_iterators_of_the_data_that_nobody_brings_to_their_place_are_said() -> None:
    loader: Any = DataLoader(FromIterators(), batch_size=2)
    tracker, fresh = LoaderTracker(loader), LoaderTracker(DataLoader(FromIterators(), batch_size=2))
    tracker.begin_pass()
    iterator = iter(loader)
    assert fresh.check(tracker.capture(tracker.mark(), 0)) is None
    next(iterator)
    assert "has changed ahead, queue," in str(fresh.check(tracker.capture(tracker.mark(), 1)))
    assert "has changed ahead," in str(fresh.check(tracker.capture_between_passes()))


class Slice:
    """Yields the next item of one iterator in each pass."""

    def __init__(self) -> None:
        self.source = (torch.rand(()) for _ in range(99))

    def __iter__(self) -> Any:
        return (next(self.source) for _ in range(3))


def test_a_loader_that_goes_on_in_the_next_pass_is_said_between_them() -> None:
    loader, fresh = Slice(), LoaderTracker(Slice())
    tracker = LoaderTracker(loader)
    tracker.begin_pass()
    list(loader)
    assert fresh.check(tracker.capture(tracker.mark(), 3)) is None  # the pass is read again, and compared
    assert "has changed source," in str(fresh.check(tracker.capture_between_passes()))


def test_worker_log_says_when_a_state_is_gone() -> None:
    log = WorkerRngLog(1, depth=2)
    log.start(0)
    states = []
    for _ in range(4):
        random.random()
        log.record(0)
        states.append(pack_rng())
    latest = log.state_after(0, 4)
    assert latest is not None and latest.numpy().tobytes() == states[3]
    assert log.state_after(0, 0) is None
    with pytest.raises(CheckpointError, match="no longer recorded"):
        log.state_after(0, 1)
    with pytest.raises(CheckpointError, match="made 4 of 5 batches"):
        log.state_after(0, 5, timeout=0.05)


def test_wrapped_data_set_is_used_through_its_wrapper() -> None:
    inner = Noise()
    wrapped = RngMapDataset(inner)
    wrapped.extra = 3  # type: ignore[attr-defined]
    assert inner.extra == 3 and len(wrapped) == 12  # type: ignore[attr-defined]
    assert wrapped.state_dict() == {"inner": None, "rng": None}


def test_gradients_come_back() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[0](torch.ones(2)).sum().backward()
    captured = capture_gradients(model.named_parameters())
    assert sorted(captured) == ["0.bias", "0.weight"]
    other = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    other[1](torch.ones(2)).sum().backward()
    restore_gradients(other.named_parameters(), captured)
    assert torch.equal(other[0].weight.grad, captured["0.weight"]) and other[1].weight.grad is None
    model[0].weight.grad.add_(1)
    assert not torch.equal(model[0].weight.grad, captured["0.weight"]), "the capture is a copy"


def test_gradients_of_another_model_are_refused() -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(StateMismatchError, match="shape") as shape:
        restore_gradients(model.named_parameters(), {"weight": torch.ones(3)})
    assert shape.value.key == "weight"
    with pytest.raises(StateMismatchError, match="does not have"):
        restore_gradients(model.named_parameters(), {"other": torch.ones(3)})


def test_kinds() -> None:
    joined = join_ranks({"step": 3}, [{"rng": 1}, None])
    assert joined == {Kind.REPLICATED.value: {"step": 3}, Kind.PER_RANK.value: [{"rng": 1}, None]}
    assert state_of_rank(joined, 0) == {"rng": 1}
    for rank in (1, 2):
        with pytest.raises(StateMismatchError, match=f"no state of rank {rank}"):
            state_of_rank(joined, rank)


@runtime_checkable
class Stateful(Protocol):
    """The protocol, as torchdata defines it."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class Counted:
    """A sampler that has a state; so does its iterator."""

    def __init__(self) -> None:
        self.count = 0

    def __iter__(self) -> Counted:
        return self

    def __next__(self) -> int:
        self.count += 1
        return self.count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]


def test_what_has_a_state_has_it_behind_a_wrapper_too() -> None:
    """Also for ``isinstance`` of a protocol, which inspects the class from Python 3.12 on."""
    sampler = RecordingSampler(Counted(), None)
    iterator = iter(sampler)
    assert isinstance(sampler, RecordingSampler)
    for wrapper in (sampler, iterator):
        assert isinstance(wrapper, Stateful)
        assert hasattr(type(wrapper), "state_dict"), "before Python 3.12, isinstance asks the object"
    assert [next(iterator) for _ in range(3)] == [1, 2, 3]
    assert iterator.state_dict() == {"count": 3}
    iterator.load_state_dict({"count": 10})
    assert next(iterator) == 11
    plain = RecordingSampler([1, 2], None)
    assert not isinstance(plain, Stateful)
    assert not isinstance(iter(plain), Stateful)


def test_the_last_fetches_of_a_pass_are_remembered() -> None:
    history: FetchHistory[str] = FetchHistory(2)
    for fetch in range(3):
        history.add(fetch, f"before {fetch}")
    assert [history.before(fetch) for fetch in range(4)] == [None, "before 1", "before 2", None]
    history.clear()
    assert history.before(2) is None


def test_reading_that_draws_is_noticed_in_the_first_fetches_and_not_forgotten() -> None:
    history: FetchHistory[str] = FetchHistory(2)
    before = RngState.capture()
    history.was_read(0, before)
    assert not history.draws_while_reading
    torch.rand(1)
    history.was_read(2, before)  # by then the script trains, and draws numbers, too
    assert not history.draws_while_reading
    history.was_read(1, before)
    history.clear()
    assert history.draws_while_reading


def test_buffers_of_a_rank_are_put_back_where_the_model_still_has_them() -> None:
    def model() -> torch.nn.Module:
        made = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.BatchNorm1d(3, affine=False))
        made.register_buffer("table", torch.zeros(4), persistent=False)
        made.register_buffer("gone", torch.zeros(4), persistent=False)
        made._buffers.pop("gone")
        return made

    first, second = model(), model()
    first[0](torch.randn(8, 2))
    saved = capture_buffers(first)
    assert "table" not in saved and len(saved) == 6
    del second[1].running_var
    restore_buffers(second, {**saved, "1.running_mean": torch.ones(7)})
    assert torch.equal(second[0].running_mean, first[0].running_mean)
    assert torch.equal(second[1].running_mean, torch.zeros(3))


class Squares(IterableDataset[Any]):
    """Has a state like that of the data sets of the datasets library: each pass begins at the loaded state."""

    _starting_state_dict: dict[str, Any] | None = None

    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._starting_state_dict = state

    def __iter__(self) -> Any:
        self.at = self._starting_state_dict["at"] if self._starting_state_dict else 0
        while self.at < 6:
            self.at += 1
            yield self.at**2


class Streamed(IterableDataset[Any]):
    """Makes a new order for each epoch, and yields it from sample ``start`` on."""

    def __init__(self) -> None:
        self.epoch, self.start = 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        order = random.Random(self.epoch).sample(range(12), 12)
        yield from (index + float(torch.rand(())) for index in order[self.start :])


class CountsSamples(DataLoader[Any]):
    """Like mosaicml-streaming's loader: the state at the end of a pass has no samples left."""

    __module__ = "streaming.base.dataloader"

    def __init__(self) -> None:
        super().__init__(Streamed(), batch_size=2)
        self.next_epoch = self.yielded = self.begun_at = 0
        self.loaded: dict[str, int] | None = None

    def __iter__(self) -> Any:
        loaded, self.loaded = self.loaded, None
        epoch, self.begun_at = (loaded["epoch"], loaded["samples"]) if loaded else (self.next_epoch, 0)
        self.next_epoch, self.yielded = epoch + 1, 0
        self.dataset.epoch, self.dataset.start = epoch, self.begun_at  # type: ignore[attr-defined]
        for batch in super().__iter__():
            self.yielded += len(batch)
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.next_epoch - 1, "samples": self.begun_at + self.yielded}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = state


class Restores(DataLoader[Any]):
    """Like litdata's: states of a pass share one object; a loaded state counts until a pass is read past its end."""

    __module__ = "litdata.streaming.dataloader"

    def __init__(self) -> None:
        super().__init__(Streamed(), batch_size=2)
        self.restore, self.current_epoch, self.yielded = False, 0, 0
        self.of_dataset: dict[str, int] | None = None

    def __iter__(self) -> Any:
        if not self.restore:
            self.current_epoch, self.yielded, self.of_dataset = self.current_epoch + 1, 0, None
            self.dataset.set_epoch(self.current_epoch)  # type: ignore[attr-defined]
        state: Any = self.of_dataset or {"epoch": self.current_epoch, "yielded": 0}
        self.dataset.epoch, self.dataset.start = state["epoch"], state["yielded"]  # type: ignore[attr-defined]
        for batch in super().__iter__():
            self.yielded += len(batch)
            yield batch
        self.restore = False

    def state_dict(self) -> dict[str, Any]:
        now = {"epoch": self.dataset.epoch, "yielded": self.yielded}  # type: ignore[attr-defined]
        self.of_dataset = now if self.of_dataset is None else self.of_dataset
        self.of_dataset.update(now)
        return {"dataset": self.of_dataset, "current_epoch": self.current_epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.current_epoch, self.of_dataset = state["current_epoch"], state["dataset"]
        self.yielded = state["dataset"]["yielded"]
        self.restore = 0 < self.yielded < 12


def nodes_that_draw() -> Any:
    node: Any = nodes.SamplerWrapper(RandomSampler(range(6)))
    return nodes.Loader(nodes.Mapper(node, lambda index: index + float(torch.rand(()))))


STREAMS: dict[str, Any] = {
    "datasets": lambda: StatefulDataLoader(Squares(), batch_size=1),
    "mosaicml": CountsSamples,
    "litdata": Restores,
    "nodes": nodes_that_draw,
}


def run_passes(tracker: LoaderTracker, begun: Any, first: int, saves: tuple[int, int]) -> tuple[list[Any], Any]:
    """Run three passes; return the batches from ``saves`` (pass, batch) on, and the state captured there."""
    taken, saved = list[Any](), None
    for number in range(first, 3):
        iterator, begun = begun, None
        at = 0 if iterator is None else saves[1]
        if iterator is None:
            tracker.begin_pass()
            iterator = iter(tracker.loader)
            tracker.pass_made()
        while at < 6:
            mark = tracker.mark()
            if (number, at) == saves:
                saved = tracker.capture(mark, at), RngState.capture()
            taken += [(number, at, torch.as_tensor(next(iterator)).tolist())]
            at += 1
        if isinstance(tracker.loader, (StatefulDataLoader, nodes.Loader)):  # their length is not known
            assert next(iterator, None) is None
        if saves == (number, 6):
            saved = tracker.capture_between_passes(), RngState.capture()
    return [one for one in taken if one[:2] >= saves], saved


@pytest.mark.parametrize("place", [(0, 3), (1, 0), (1, 2), (1, 6)], ids=str)
@pytest.mark.parametrize("name", STREAMS)
def test_streams_with_a_state_continue_also_in_later_passes(name: str, place: tuple[int, int]) -> None:
    reseed(1)
    expected, (state, rng) = run_passes(LoaderTracker(STREAMS[name]()), None, 0, place)
    for _ in range(2):  # the second time, from what the resumed run has saved
        reseed(99)
        tracker = LoaderTracker(STREAMS[name]())
        assert tracker.check(state) is None
        if place[1] == 6:
            tracker.prepare_next_pass(state)
            rng.restore()
            found, _ = run_passes(tracker, None, 2, place)
        else:
            assert tracker.prepare(state) == 0
            iterator = iter(tracker.loader)
            tracker.finish(state)
            rng.restore()
            found, (state, rng) = run_passes(tracker, iterator, place[0], place)
        assert found == expected


def test_a_combined_stream_of_litdata_in_workers_is_said() -> None:
    tracker = LoaderTracker(Restores())
    _, (state, _) = run_passes(tracker, None, 0, (1, 2))
    tracker.loader.dataset.__class__ = type("CombinedStreamingDataset", (Streamed,), {})
    assert tracker.check(state) is None
    tracker.workers = state["num_workers"] = 2
    assert "CombinedStreamingDataset" in str(tracker.check(state))


def test_a_shuffle_buffer_that_no_state_has_is_said() -> None:
    examples = type("BufferShuffledExamplesIterable", (), {})()
    dataset = Squares()
    tracker = LoaderTracker(StatefulDataLoader(dataset, batch_size=1))
    _, (state, _) = run_passes(tracker, None, 0, (1, 2))
    assert tracker.check(state) is None
    dataset._ex_iterable = type("TakeExamplesIterable", (), {"ex_iterable": examples})()  # type: ignore[attr-defined]
    assert "lacks its shuffle buffer" in str(tracker.check(state))
    assert tracker.check(tracker.capture(tracker.mark(), 0)) is None


class Masks:
    """A collator that makes its generator at its first draw, once in each process, as that of transformers 5.24."""

    def __init__(self) -> None:
        self.generator: torch.Generator | None = None
        self._generator_pid: int | None = None

    def __call__(self, rows: Any = ()) -> float:
        if self.generator is None or self._generator_pid != os.getpid():
            self.generator, self._generator_pid = torch.Generator().manual_seed(7), os.getpid()
        return float(torch.rand(1, generator=self.generator))


@pytest.mark.parametrize("workers", [False, True])
def test_a_generator_of_another_process_continues_in_this_one(workers: bool) -> None:
    first, resumed = Masks(), Masks()
    carried = Carried({"collate_fn": first})
    first()
    carried.look()
    first._generator_pid = -1  # as if another process had made its generator
    generators, values = carried.generators(), carried.values()[0]
    here = Carried({"collate_fn": resumed}, plain=not workers)
    here.restore_values({} if workers else values)
    here.restore_generators(generators)
    first._generator_pid = os.getpid()
    assert [resumed(), resumed()] == [first(), first()]
