"""Random generators: their captured states are restored, and load without running code."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.random import mtrand
from torch.utils.data import BatchSampler, RandomSampler

from ckpt_core.errors import SerializationError
from ckpt_core.state.rng import (
    PACKED_RNG_BYTES,
    RngState,
    capture_generator,
    capture_generators,
    made_generator,
    pack_rng,
    restore_generator,
    restore_generators,
    unpack_rng,
)
from tests.support.accelerators import CUDA, SIMULATED, Accelerator


def draw() -> list[float]:
    return [float(torch.randn(())), float(np.random.randn()), random.gauss(0, 1), float(torch.rand(()))]


def reload(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("drawn", [0, 1, 2, 700])
def test_encoded_state_comes_back(drawn: int) -> None:
    for _ in range(drawn):
        draw()  # an odd number leaves the second number of a Gaussian pair pending
    encoded = reload(RngState.capture().encode())
    expected = [draw() for _ in range(3)]
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(99)
    RngState.decode(encoded).restore()
    assert [draw() for _ in range(3)] == expected


def test_a_generator_of_another_kind_is_refused_by_name() -> None:
    kept = mtrand.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(5))
        for capture in (RngState.capture, pack_rng):
            with pytest.raises(SerializationError, match="replaced by PCG64") as caught:
                capture()
            assert "set_bit_generator" in str(caught.value)
    finally:
        np.random.set_bit_generator(kept)
    assert RngState.capture().numpy[0] == "MT19937"


@pytest.mark.parametrize("drawn", [0, 1, 2])
def test_packed_state_comes_back(drawn: int) -> None:
    for _ in range(drawn):
        draw()
    packed = pack_rng()
    assert len(packed) == PACKED_RNG_BYTES
    expected = [draw() for _ in range(3)]
    draw()
    unpack_rng(packed).restore()
    assert [draw() for _ in range(3)] == expected


NUMPY_STEPS: dict[str, Callable[[list[RngState]], Any]] = {
    "uniform": lambda _: np.random.rand(),
    "many": lambda _: np.random.rand(700),
    "normal": lambda _: np.random.randn(),  # every second call leaves NumPy's memory unchanged
    "seed": lambda _: np.random.seed(7),
    "restore the last": lambda captured: captured[-1].restore(),
    "restore the one before": lambda captured: captured[-2:][0].restore(),
    "restore the first": lambda captured: captured[0].restore(),
    "another generator": lambda _: np.random.set_bit_generator(np.random.MT19937(3)),
    "nothing": lambda _: None,
}


@given(st.lists(st.sampled_from(sorted(NUMPY_STEPS)), max_size=20))
@example(["normal", "normal", "restore the one before"])
def test_what_is_captured_of_numpy_is_its_state(steps: list[str]) -> None:
    bit_generator, before = mtrand.get_bit_generator(), np.random.get_state()
    try:
        captured = [RngState.capture()]
        for step in steps:
            NUMPY_STEPS[step](captured)
            captured.append(RngState.capture())
            found, real = captured[-1].numpy, np.random.get_state(legacy=True)
            assert (found[0], found[2:]) == (real[0], real[2:])
            assert np.array_equal(found[1], real[1])
    finally:
        np.random.set_bit_generator(bit_generator)
        np.random.set_state(before)


@pytest.mark.parametrize("move", [torch.rand, np.random.rand, random.random])
def test_movement_is_noticed(move: Any) -> None:
    before = RngState.capture()
    assert before.same_as(RngState.capture())
    move(1) if move is not random.random else move()
    assert not before.same_as(RngState.capture())


class Owner(torch.utils.data.Dataset[Any]):
    def __init__(self, seed: int) -> None:
        self.a = torch.Generator().manual_seed(seed)
        self.b = np.random.default_rng(seed)
        self.c = np.random.RandomState(seed)
        self.d = random.Random(seed)
        self.inner: Owner | None = None

    def draw(self) -> list[float]:
        own = [float(torch.rand((), generator=self.a)), self.b.random(), self.c.random_sample(), self.d.random()]
        return own + (self.inner.draw() if self.inner is not None else [])


def test_generators_of_objects_come_back() -> None:
    owner, other = Owner(1), Owner(2)
    owner.inner, other.inner = Owner(3), Owner(4)
    owner.draw()
    states = reload(capture_generators(owner))
    assert sorted(states) == ["a", "b", "c", "d", "inner.a", "inner.b", "inner.c", "inner.d"]
    assert restore_generators(other, states) == []
    assert other.draw() == owner.draw()


def test_missing_generators_are_named() -> None:
    assert restore_generators(object(), {"sampler.generator": torch.Generator().get_state()}) == ["sampler.generator"]


def test_generator_inside_a_batch_sampler_is_found() -> None:
    generator = torch.Generator().manual_seed(4)
    sampler = BatchSampler(RandomSampler(range(8), generator=generator), 2, False)
    states = capture_generators(sampler)
    assert list(states) == ["sampler.generator"]
    first = list(sampler)
    restore_generators(sampler, states)
    assert list(sampler) == first


def test_what_is_encoded_twice_shares_no_memory() -> None:
    state = RngState.capture()
    one, other = state.encode(), state.encode()
    for name in ("python", "numpy_keys", "torch"):
        one[name].zero_()
        assert other[name].any()
        assert state.encode()[name].any()


@pytest.mark.parametrize("accelerator", [SIMULATED, CUDA], indirect=True)
def test_a_generator_that_training_made_on_a_device_is_made_there_again(accelerator: Accelerator) -> None:
    saved = torch.Generator(accelerator.type).manual_seed(3)
    torch.rand(2, device=accelerator.type, generator=saved)
    made = made_generator(reload(capture_generator(saved)))
    assert made.device.type == accelerator.type
    drawn = [torch.rand(3, device=accelerator.type, generator=one).tolist() for one in (made, saved)]
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("accelerator", [SIMULATED, CUDA], indirect=True)
def test_a_generator_that_is_on_another_kind_of_device_now_is_named_and_left_alone(accelerator: Accelerator) -> None:
    state = capture_generator(torch.Generator(accelerator.type).manual_seed(3))
    now = torch.Generator().manual_seed(5)
    with pytest.warns(UserWarning, match="the random generator noise is torch's, on cpu now"):
        restore_generator(now, state, "noise")
    assert torch.rand(3, generator=now).tolist() == torch.rand(3, generator=torch.Generator().manual_seed(5)).tolist()


def test_a_generator_of_another_library_is_named_and_left_alone() -> None:
    now = torch.Generator().manual_seed(5)
    with pytest.warns(UserWarning, match="or another library's"):
        restore_generator(now, capture_generator(np.random.default_rng(3)))
    assert torch.rand(3, generator=now).tolist() == torch.rand(3, generator=torch.Generator().manual_seed(5)).tolist()
