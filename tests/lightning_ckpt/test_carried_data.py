"""Attributes of samplers, data sets, transforms and collators have the same values after a resume."""

from __future__ import annotations

import collections
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    default_collate,
    get_worker_info,
    random_split,
)

from tests.lightning_ckpt.captured import BATCHES, END, MIDDLE, Training, train_and_resume
from tests.lightning_ckpt.exact_cases import Model

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

LAST = ("on_train_batch_end", BATCHES)
NOISE = random.Random(4)


class Items(Dataset[Any]):
    """A data set, of 32 items by default; the result of ``change`` is added to each item."""

    def __init__(self, change: Callable[[], float] = lambda: 0.0, size: int = 32) -> None:
        self.change, self.order, self.reads = change, list(range(size)), np.zeros(size, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> Any:
        self.reads[index] += 1
        number = self.order[index]
        return number, torch.full((4,), number / 32) + float(self.change())


class ReadsCount(Items):
    def __getitem__(self, index: int) -> Any:
        number, x = super().__getitem__(index)
        return number, x + float(self.reads.sum()) / 10


class Noise:
    def __init__(self) -> None:
        self.own = np.random.default_rng(1)
        self.python = random.Random(2)

    def __call__(self) -> float:
        return float(self.own.random()) + self.python.random()


class Slots:
    __slots__ = ("generator",)

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(2)

    def __call__(self) -> torch.Tensor:
        return torch.rand((), generator=self.generator)


class WhenItDraws(Items):
    """Makes its generators when it draws for the first time."""

    def __init__(self) -> None:
        super().__init__()
        self.python = self.numpy = self.older = self.torch = None

    def __getitem__(self, index: int) -> Any:
        number, x = super().__getitem__(index)
        if self.python is None:
            self.python, self.numpy, self.older = random.Random(1), np.random.default_rng(2), np.random.RandomState(3)
            self.torch = torch.Generator().manual_seed(4)
        return number, x + self.python.random() + self.numpy.random() + self.older.randn() + torch.rand(
            (), generator=self.torch
        )


class ForEachKind(Items):
    """Makes generators for kinds of items when it first meets them, and one whose attribute does not exist before."""

    def __init__(self) -> None:
        super().__init__()
        self.by_kind: Any = collections.defaultdict(lambda: torch.Generator().manual_seed(4))
        self.by_name: dict[Any, Any] = {"1": random.Random(1)}
        self.some: list[Any] = []

    def __getitem__(self, index: int) -> Any:
        number, x = super().__getitem__(index)
        if not self.some:
            self.some += [random.Random(5), random.Random(6)]
            self.late = np.random.default_rng(7)
        own = self.by_name.setdefault(str(index % 3), random.Random(index % 3))
        drawn = sum(one.random() for one in self.some) + own.random() + float(self.late.random())
        kind = (index % 2, "odd") if index % 4 else index % 2
        return number, x + torch.rand((), generator=self.by_kind[kind]) + drawn


class InWorkers(Items):
    generator: np.random.Generator

    def __getitem__(self, index: int) -> Any:
        number, x = super().__getitem__(index)
        return number, x + float(self.generator.random())


def make_generator(worker: int) -> None:
    info: Any = get_worker_info()
    info.dataset.generator = np.random.default_rng(info.seed)


class Collate:
    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(1)

    def __call__(self, items: Any) -> Any:
        numbers, x = default_collate(items)
        return numbers, x * torch.rand((), generator=self.generator)


class Shuffled(Sampler[list[int]]):
    """The usual hand-written batch sampler: shuffles its list in place, with its own generator or the global one."""

    def __init__(self, own: random.Random | None = None, lazy: bool = False) -> None:
        self.batches = [list(range(begin, begin + 4)) for begin in range(0, 32, 4)]
        self.own, self.lazy = own, lazy

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        if self.lazy:
            return self.draw()
        self.shuffle()
        return iter(self.batches)

    def shuffle(self) -> None:
        (self.own or random).shuffle(self.batches)

    def draw(self) -> Iterator[list[int]]:
        self.shuffle()
        for batch in self.batches:
            self.own and self.own.shuffle(batch)
            yield list(batch)


class Mining(Sampler[int]):
    """Draws the items that training has marked with a higher probability."""

    def __init__(self) -> None:
        self.weights = torch.ones(32)

    def __len__(self) -> int:
        return 32

    def __iter__(self) -> Iterator[int]:
        return iter(torch.multinomial(self.weights, 32, replacement=True).tolist())


class Marks(Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.train_dataloader.sampler.weights[batch[0]] += 1


class Reorders(Callback):
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        random.shuffle(trainer.train_dataloader.dataset.order)


class GrowingItems(Items):
    size = 32

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index % 32)


class Grows(Callback):
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.train_dataloader.dataset.size += 8


class Counting(IterableDataset[Any]):
    """Counts its passes, and shuffles depending on the count."""

    def __init__(self) -> None:
        self.epoch, self.noise, self.queue = -1, Noise(), [0]

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        self.queue.append(self.epoch)
        order = list(range(32))
        random.Random(self.epoch + len(self.queue)).shuffle(order)
        return iter([(i, torch.full((4,), i / 32) + self.noise()) for i in order])


def loader_of(make: Callable[..., Any]) -> Callable[[int], Callable[[], Model]]:
    class Loads(Model):
        def train_dataloader(self) -> Any:
            return make(self.options["workers"])

    return lambda workers: lambda: Loads({"workers": workers})


def over(make: Callable[[], Any], **options: Any) -> Callable[[int], Callable[[], Model]]:
    def build(workers: int) -> Any:
        named = {name: option() for name, option in options.items()}
        shape = {} if "batch_sampler" in named else {"batch_size": 4, "shuffle": "sampler" not in named}
        return DataLoader(make(), num_workers=workers, **shape, **named)

    return loader_of(build)


def stream(make: Callable[[], Any]) -> Callable[[int], Callable[[], Model]]:
    return loader_of(lambda workers: DataLoader(make(), batch_size=4, num_workers=workers))


class ByChance(Items):
    def __getitem__(self, index: int) -> Any:
        number, x = super().__getitem__(index)
        return number, x + NOISE.random()


class OfAnother(DataLoader[Any]):
    """Takes its batches from another loader."""

    def __init__(self) -> None:
        self.other = DataLoader(Items(Noise()), 4, shuffle=True)
        super().__init__(self.other)  # type: ignore[arg-type]

    def __iter__(self) -> Any:
        return iter(self.other)


LOADERS = {
    "transform": over(lambda: Items(Noise())),
    "concatenated": over(lambda: ConcatDataset([Items(Noise(), 16), Items(Noise(), 16)])),
    "collate": over(Items, collate_fn=Collate),
    "generator of the code": over(ByChance),
    "shuffled in place": over(Items, batch_sampler=Shuffled),
    "shuffled by its own": over(Items, batch_sampler=lambda: Shuffled(random.Random(3), lazy=True)),
    "counts its passes": stream(Counting),
    "slots": over(lambda: Items(Slots())),
    "made when it draws": over(WhenItDraws),
    "made for each kind": over(ForEachKind),
}
IN_PROCESS = {
    "counts its reads": (over(ReadsCount), list),
    "mining": (over(Items, sampler=Mining), lambda: [Marks()]),
    "reorders": (over(Items), lambda: [Reorders()]),
    "grows": (over(GrowingItems), lambda: [Grows()]),
    "of another loader": (loader_of(lambda workers: OfAnother()), list),
}


def some(names: list[str], *quick: str) -> list[Any]:
    """Return all cases; those that are not in ``quick`` run with the slow tests."""
    return [pytest.param(name, marks=[] if name in quick else [pytest.mark.slow]) for name in names]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [*LOADERS, *IN_PROCESS])
def test_in_this_process(name: str, tmp_path: Path) -> None:
    check_in_this_process(name, MIDDLE, tmp_path)


@pytest.mark.each_value
@pytest.mark.parametrize("at", [LAST, END], ids=["last", "end"])
@pytest.mark.parametrize("name", some([*LOADERS, *IN_PROCESS], "counts its passes", "shuffled in place"))
def test_around_the_end_of_an_epoch(name: str, at: tuple[str, int], tmp_path: Path) -> None:
    check_in_this_process(name, at, tmp_path)


def check_in_this_process(name: str, at: tuple[str, int], tmp_path: Path) -> None:
    make, callbacks = IN_PROCESS[name] if name in IN_PROCESS else (LOADERS[name], list)
    NOISE.seed(4)
    expected, found, said = train_and_resume(Training(make(0), callbacks), tmp_path, at)
    assert [text for text in said if "draws random numbers" not in text] == []
    assert found.seen == expected.seen
    assert found == expected


@pytest.mark.extended_cells("collate", "made when it draws")
@pytest.mark.parametrize(
    "name", some([*LOADERS, "mining", "reorders"], "collate", "shuffled by its own", "made when it draws")
)
def test_in_workers(name: str, tmp_path: Path) -> None:
    make, callbacks = IN_PROCESS[name] if name in IN_PROCESS else (LOADERS[name], list)
    NOISE.seed(4)
    expected, found, said = train_and_resume(Training(make(2), callbacks), tmp_path)
    assert not said
    assert found.seen == expected.seen
    assert found == expected


@pytest.mark.extended
@pytest.mark.parametrize("persistent", [False, True])
def test_generators_that_are_made_in_workers(persistent: bool, tmp_path: Path) -> None:
    make = loader_of(
        lambda workers: DataLoader(
            InWorkers(), 4, True, num_workers=workers, worker_init_fn=make_generator, persistent_workers=persistent
        )
    )
    expected, found, said = train_and_resume(Training(make(2)), tmp_path)
    assert not said
    assert found == expected


def test_generators_in_workers_that_are_too_many_to_record_are_said(tmp_path: Path) -> None:
    class Many(InWorkers):
        def __getitem__(self, index: int) -> Any:
            if not hasattr(self, "many"):
                self.many = [random.Random(seed) for seed in range(20)]
            return index, torch.full((4,), self.many[index % 20].random())

    _, _, said = train_and_resume(Training(over(Many)(2)), tmp_path)
    assert len(said) == 1
    assert "in worker processes, where it is not recorded" in said[0]


def test_what_functions_of_the_data_keep_is_named(tmp_path: Path) -> None:
    def counting() -> Callable[..., Any]:
        seen = 0

        def collate(items: Any) -> Any:
            nonlocal seen
            seen += len(items)
            numbers, x = default_collate(items)
            return numbers, x * seen

        return collate

    _, _, said = train_and_resume(Training(over(Items, collate_fn=counting)(0)), tmp_path)
    assert len(said) == 1
    assert "begins without variables of the script that training had changed: `seen` of collate" in said[0]


def test_what_functions_of_the_data_only_tell_is_not_named(tmp_path: Path) -> None:
    def counting() -> Callable[..., Any]:
        told_items = 0

        def collate(items: Any) -> Any:
            nonlocal told_items
            told_items += len(items)
            if told_items % 16 == 0:
                print(f"{told_items} items")
            return default_collate(items)

        return collate

    expected, found, said = train_and_resume(Training(over(Items, collate_fn=counting)(0)), tmp_path)
    assert not said
    assert found == expected


class Draws(Items):
    """Caches the noise that it has drawn for a sample."""

    def __init__(self) -> None:
        super().__init__()
        self._cache: dict[int, torch.Tensor] = {}

    def __getitem__(self, index: int) -> Any:
        if index not in self._cache:
            self._cache[index] = torch.randn(4)
        return index, self._cache[index]


class DrawsAndReturns(Draws):
    def __getitem__(self, index: int) -> Any:
        if index in self._cache:
            return index, self._cache[index]
        self._cache[index] = torch.randn(4)
        return index, self._cache[index]


@pytest.mark.parametrize("kind", [Draws, DrawsAndReturns])
def test_a_cache_of_what_a_data_set_has_drawn_is_named(kind: Any, tmp_path: Path) -> None:
    expected, found, said = train_and_resume(Training(over(kind)(0)), tmp_path)
    assert found != expected
    (named,) = [text for text in said if "begins without variables of the script" in text]
    assert f"`_cache` of {kind.__name__}" in named


class OfSamples(Items):
    def __init__(self) -> None:
        super().__init__()
        self.samples = [{"drawn": torch.randn(4), "label": 1} for _ in range(24)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return index, self.samples[index]["drawn"]


@pytest.mark.parametrize(
    ("make", "name"),
    [(lambda: random_split(Items(), [24, 8])[0], "indices"), (OfSamples, "samples")],
    ids=["split", "samples"],
)
def test_data_that_is_drawn_at_each_start_is_said(make: Any, name: str, tmp_path: Path) -> None:
    class Divides(Model):
        def setup(self, stage: str) -> None:
            self.items = make()

        def train_dataloader(self) -> Any:
            return DataLoader(self.items, batch_size=4)

    expected, found, said = train_and_resume(Training(Divides), tmp_path)
    assert len(said) == 1
    assert f"the training data ({name}) is not that of the run that saved" in said[0]
    assert found != expected


def test_what_is_too_large_is_said(tmp_path: Path) -> None:
    class Large(Items):
        def __init__(self) -> None:
            super().__init__()
            self.log = [0] * 300_000

        def __getitem__(self, index: int) -> Any:
            self.log[0] += 1
            return super().__getitem__(index)

    _, _, said = train_and_resume(Training(over(Large)(0)), tmp_path)
    assert len(said) == 1
    assert "has changed log, which is too large" in said[0]
