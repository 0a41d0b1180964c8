"""Generators are found wherever users keep them, captured without pickle, and restored."""

from __future__ import annotations

import functools
import gc
import io
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from ckpt_core.state.changed_values import PlainState
from ckpt_core.state.object_walk import reach
from ckpt_core.state.rng import capture_generators, find_generators, restore_generators

OF_THE_MODULE = random.Random(5)


class Transform:
    of_the_class = np.random.RandomState(3)

    def __init__(self) -> None:
        self.own = np.random.default_rng(1)

    def __call__(self) -> float:
        return float(self.own.random())


class HidesThatOfItsClass(Transform):
    own = np.random.RandomState(4)

    def __init__(self) -> None:
        self.own = np.random.RandomState(5)


class Slots:
    __slots__ = ("own",)

    def __init__(self) -> None:
        self.own = torch.Generator().manual_seed(1)


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)


class Items(Dataset[Any]):
    def __init__(self, **held: Any) -> None:
        vars(self).update(held)

    def __getitem__(self, index: int) -> Any:
        return OF_THE_MODULE.random()

    def __len__(self) -> int:
        return 4


def closure() -> Callable[[], float]:
    own = random.Random(1)
    return lambda: 2 * own.random()


CARRIERS = {
    "transform": lambda: Items(transform=Transform()),
    "one that hides that of its class": lambda: Items(transform=HidesThatOfItsClass()),
    "list of transforms": lambda: Items(transforms=[len, [Transform()]]),
    "dictionary": lambda: Items(transforms={"train": Transform()}),
    "partial": lambda: Items(transform=functools.partial(print, end=Transform())),
    "bound method": lambda: Items(transform=Transform().__call__),
    "closure": lambda: Items(transform=closure()),
    "module": lambda: Items(transform=torch.nn.Sequential(Layer())),
    "concatenated": lambda: ConcatDataset([Items(), Items(rng=np.random.default_rng(2))]),
    "subset": lambda: Subset(Items(rng=torch.Generator()), [0, 1]),
    "collate": lambda: DataLoader(Items(), collate_fn=closure()),
    "slots": lambda: Items(transform=Slots()),
    "bit generator": lambda: Items(bits=np.random.PCG64(1)),
}


@pytest.mark.parametrize("name", CARRIERS)
def test_generators_are_found_and_set_again(name: str) -> None:
    owner = CARRIERS[name]()
    found = [generator for _, generator in find_generators(owner)]
    assert len(found) == len({id(generator) for generator in found}) >= 2  # including ``OF_THE_MODULE``
    buffer = io.BytesIO()
    torch.save(capture_generators(owner), buffer)
    buffer.seek(0)
    first = [draw(generator) for generator in found]
    assert [draw(generator) for generator in found] != first
    assert restore_generators(owner, torch.load(buffer, weights_only=True)) == []
    assert [draw(generator) for generator in found] == first


def draw(generator: Any) -> float:
    if isinstance(generator, torch.Generator):
        return float(torch.rand((), generator=generator))
    if isinstance(generator, np.random.BitGenerator):
        return float(np.random.Generator(generator).random())
    return float(generator.random() if not isinstance(generator, np.random.RandomState) else generator.random_sample())


def test_what_streams_of_libraries_count_is_found_and_put_back() -> None:
    class SharedScalar:  # of mosaicml-streaming, in memory that its processes share
        __module__ = "streaming.base.shared.scalar"
        memory = np.zeros(1, np.int64)

        def get(self) -> Any:
            return self.memory[0]

        def set(self, value: Any) -> None:
            self.memory[0] = value

    stage: Any = type("detshuffle", (), {"__module__": "webdataset.filters"})()
    stage.epoch, stage.rng = -1, random.Random(1)
    owner = Items(next_epoch=SharedScalar(), pipeline=[stage])
    state = PlainState(owner)
    owner.next_epoch.set(3)
    stage.epoch = 2
    captured, left_out = state.capture()
    owner.next_epoch.set(0)
    stage.epoch = -1
    PlainState(owner).restore(captured)
    assert (owner.next_epoch.get(), stage.epoch, left_out) == (3, 2, [])
    assert "pipeline.0.rng" in [path for path, _ in find_generators(owner)]


def test_what_a_training_has_no_state_in_is_not_entered() -> None:
    model = torch.nn.Linear(1, 1)
    model.generator = torch.Generator()  # type: ignore[assignment]
    owner = Items(model=model, system=random.SystemRandom(), many=[Transform()] * 1000)
    assert [path for path, _ in find_generators(owner)] == ["globals.OF_THE_MODULE"]


def test_what_an_augmentation_in_the_model_has_drawn_last_is_left_out() -> None:
    kinds = [type("Flip", (torch.nn.Module,), {"__module__": name}) for name in ("kornia.augmentation", "mine")]
    model = torch.nn.ModuleList([kind() for kind in kinds])
    for part in model:
        part._params = {"batch_prob": torch.zeros(1)}  # type: ignore[assignment]
        part.p = 0.5  # type: ignore[assignment]
    assert [found.path for found in reach(model)] == ["0.p", "1._params", "1.p"]


def test_many_records_leave_something_for_what_comes_after_them() -> None:
    records = [Items(boxes=[Items(at=Items()) for _ in range(40)]) for _ in range(200)]
    owner = Items(records=records, transforms=[Transform()])
    assert "transforms.0.own" in [path for path, _ in find_generators(owner)]


@pytest.mark.extended
def test_a_look_keeps_nothing_alive() -> None:
    class Holds:
        def __init__(self) -> None:
            self.generator = torch.Generator()
            self.best = 3

    gc.collect()
    gc.disable()
    try:
        for is_whole in (True, False):
            looked_at = Holds()
            found = reach(looked_at)
            assert len(list(found) if is_whole else [next(found)]) == (2 if is_whole else 1)
            del found
            gone = weakref.ref(looked_at)
            del looked_at
            assert gone() is None
    finally:
        gc.enable()
