"""What scripts do with loaders around a load: skip, leave early, load or save again; what attaching leaves alone."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate import Accelerator
from accelerate import data_loader as stock_data_loader
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader, IterableDataset, Sampler

from accelerate_ckpt import attach
from accelerate_ckpt._data.loaders import LoaderPositions
from accelerate_ckpt._private import data as private_data
from accelerate_ckpt._recording import Recording
from ckpt_core.errors import CheckpointError, CheckpointFormatError
from tests.accelerate_ckpt.elastic_cells import Numbered, NumberedStream
from tests.conftest import ACCELERATE

pytestmark = pytest.mark.usefixtures("fresh_accelerate")

SAMPLES = 23
STEPS = 6


class Run:
    """A prepared loader as at the start of a process; its position is followed unless ``follow`` is false."""

    def __init__(
        self, seed: int = 1, follow: bool = True, dataset: Any = None, config: Any = None, **kwargs: Any
    ) -> None:
        torch.manual_seed(seed)
        self.warned: list[str] = []
        self.accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**(config or {})))
        self.positions = LoaderPositions(self.accelerator, warn=self.warned.append) if follow else None
        data = Numbered(SAMPLES) if dataset is None else dataset
        loader = DataLoader(data, **{"batch_size": 4, "shuffle": dataset is None, **kwargs})
        self.loader = self.accelerator.prepare(loader, None)[0]

    def record(self) -> Run:
        assert self.positions is not None
        self.positions.recording = Recording(lambda: self.accelerator, lambda event: None, lambda line: None)
        return self

    def capture(self) -> dict[str, Any]:
        assert self.positions is not None
        return self.positions.capture()

    def restore(self, state: dict[str, Any]) -> Run:
        assert self.positions is not None
        self.positions.restore(state, saved_world_size=1)
        return self

    def epoch(self, steps: int | None = None, loader: Any = None) -> list[list[int]]:
        """Return the samples of each batch of an epoch; leave it after ``steps`` batches."""
        given = []
        for batch in self.loader if loader is None else loader:
            given.append(batch.tolist())
            if len(given) == steps:
                break
        return given

    def saved_after(self, steps: int) -> tuple[dict[str, Any], list[list[int]], list[list[int]]]:
        """Save in the body of a batch; return the state, the rest of that epoch, and the next epoch."""
        rest: list[list[int]] = []
        for number, batch in enumerate(self.loader, 1):
            if number == steps:
                state = self.capture()
            elif number > steps:
                rest.append(batch.tolist())
        return state, rest, self.epoch()


@pytest.fixture(autouse=True)
def _released(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    for finder in list(private_data._finders):
        private_data.unregister(finder)


def test_a_script_that_skips_goes_on_once() -> None:
    state, rest, following = Run().saved_after(2)
    for skip in (lambda run: run.accelerator.skip_first_batches, lambda run: accelerate.skip_first_batches):
        run = Run(2).restore(state)
        active = skip(run)(run.loader, 2)
        assert active is run.loader
        assert run.epoch(loader=active) == rest
        assert run.epoch() == following


def test_a_function_imported_by_name_before_attaching(fork_script: Any) -> None:
    code = """
        from accelerate import Accelerator, skip_first_batches
        from torch.utils.data import DataLoader
        accelerator = Accelerator(cpu=True)
        loader = accelerator.prepare(DataLoader(range(12), batch_size=2))
        stock = skip_first_batches
        from accelerate_ckpt._data.loaders import LoaderPositions
        positions = LoaderPositions(accelerator, warn=print)
        assert skip_first_batches is not stock
        import accelerate.accelerator, accelerate.data_loader
        assert accelerate.accelerator.skip_first_batches is accelerate.data_loader.skip_first_batches is skip_first_batches
        for number, batch in enumerate(loader):
            if number == 1:
                state = positions.capture()
        positions.restore(state, saved_world_size=1)
        assert [batch.tolist() for batch in skip_first_batches(loader, 2)] == [[4, 5], [6, 7], [8, 9], [10, 11]]
        other = DataLoader(range(6), batch_size=2)
        assert [batch.tolist() for batch in skip_first_batches(other, 2)] == [[4, 5]]
    """
    fork_script(code, modules=ACCELERATE)


class From(Sampler[int]):
    """An order that begins after ``consumed`` samples, as in scripts that give this number to their sampler."""

    def __init__(self, consumed: int) -> None:
        self.consumed = consumed

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(1))
        return iter(order[self.consumed :].tolist())


class StreamFrom(IterableDataset[Any]):
    def __init__(self, consumed: int) -> None:
        self.consumed = consumed

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.consumed, SAMPLES))


class Endless(Sampler[int]):
    def __init__(self, consumed: int) -> None:
        pass

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from torch.randperm(8).tolist()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("made", "consumed", "taken", "exact"),
    [
        (From, 0, 3, True),
        (From, 8, 2, False),
        (From, 12, 3, False),  # no batch is left
        (StreamFrom, 0, 3, True),
        (StreamFrom, 8, 2, False),
        (Endless, 0, 3, False),  # its second order was drawn at a different time
        (Endless, 0, 4, True),  # not exact with workers, which had drawn ahead
    ],
)
def test_another_next_batch_than_had_been_read_is_said(
    made: Any, consumed: int, taken: int, exact: bool, workers: int
) -> None:
    def run(seed: int, consumed: int = 0) -> Run:
        given = made(consumed)
        data = {"dataset": given} if made is StreamFrom else {"dataset": Numbered(SAMPLES), "sampler": given}
        return Run(seed, num_workers=workers, config={"dispatch_batches": False}, **data).record()

    first, following = run(1), []
    for number, batch in enumerate(first.loader, 1):
        torch.rand(1)  # as a model draws
        if number == taken:
            state = first.capture()
        elif number > taken:
            following = batch.tolist()
            break
    resumed = run(2, consumed).restore(state)
    found = [batch.tolist() for batch in islice(resumed.loader, 1)]
    said = [message for message in resumed.warned if "the next batch is another one" in message]
    exact &= not (made is Endless and workers)
    assert (found == [following], len(said), len(resumed.warned)) == (exact, not exact, not exact)


def test_ranks_but_the_first_log_what_they_read_otherwise(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run()
    monkeypatch.setattr(type(run.accelerator), "is_main_process", False)
    for _ in range(2):
        run.positions.warn_data_differs("another batch")
    assert run.warned == [] and caplog.text.count("rank 0: this resume is not exact: another batch") == 1


class Noisy(IterableDataset[Any]):
    def __iter__(self) -> Iterator[float]:
        return (index + float(torch.rand(())) for index in range(SAMPLES))


def test_a_stream_that_draws_is_known_to_in_a_run_that_was_itself_resumed() -> None:
    first = Run(dataset=Noisy(), batch_size=2, config={"dispatch_batches": False}).record()
    states, whole = [], []
    for batch in first.loader:
        whole.append(batch.tolist())
        states.append(first.capture())
    state = states[1]
    for place in (3, 5):  # the first of the two batches of each resume
        resumed = Run(2, dataset=Noisy(), batch_size=2, config={"dispatch_batches": False}).record().restore(state)
        for number, batch in enumerate(resumed.loader, place):
            assert batch.tolist() == whole[number - 1]
            if number == place + 1:
                state = resumed.capture()
                break
        assert resumed.warned == [] and state["loaders"][0]["draws_while_reading"]


def counts_from_one(run: Run, ends_body: Callable[[], None]) -> None:
    for _ in range(2):
        for number, _ in enumerate(run.loader, 1):
            run.uses.backward()
            if number % 2 == 0:
                run.uses.stepped()
            ends_body()


def ends_with_a_step(run: Run, ends_body: Callable[[], None]) -> None:
    for _ in range(2):
        for number, _ in enumerate(run.loader):
            run.uses.backward()
            if number % 2 == 0 or number == STEPS - 1:
                run.uses.stepped()
            ends_body()


def only_tells(run: Run, ends_body: Callable[[], None]) -> None:
    taken = 0
    for _ in range(2):
        for number, _ in enumerate(run.loader):
            run.uses.backward()
            taken += 1
            if taken % 2 == 0:
                run.uses.stepped()
            if number % 2 == 0:
                print("batch", number)
            ends_body()


def leaves_out_by_itself(run: Run, ends_body: Callable[[], None]) -> None:
    for _ in range(2):
        for number, _ in enumerate(run.loader):
            if number < run.had:
                continue
            run.uses.backward()
            if number % 2 == 0:
                run.uses.stepped()
            ends_body()


def adds_what_it_has(run: Run, ends_body: Callable[[], None]) -> None:
    for epoch in range(2):
        has = 0 if epoch else run.had % STEPS
        for number, _ in enumerate(run.loader):
            step = number + has
            run.uses.backward()
            if (step + 1) % 2 == 0 or (number + has + 1) % 2 == 0:
                run.uses.stepped()
            ends_body()


def saves_by_it(run: Run, ends_body: Callable[[], None]) -> None:
    taken = run.had
    for _ in range(2):
        for number, _ in enumerate(run.loader):
            run.uses.backward()
            taken += 1
            if taken % 2 == 0:
                run.uses.stepped()
            if (number + 1) % 500 == 0:
                run.accelerator.wait_for_everyone()
                run.accelerator.save_state(f"{number}")
            ends_body()


def counts_stages(run: Run, ends_body: Callable[[], None]) -> None:
    taken = run.had
    for number, rate in enumerate([0.1, 0.2]):
        if number < run.had // STEPS:
            continue
        run.rate = rate if number == 1 else 0.0
        for _ in run.loader:
            run.uses.backward()
            taken += 1
            if taken % 2 == 0:
                run.uses.stepped()
            ends_body()


def stage_of(run: Run, ends_body: Callable[[], None]) -> None:
    for _ in run.loader:
        run.uses.backward()
        run.taken += 1
        if run.taken % 2 == 0:
            run.uses.stepped()
        ends_body()


def counts_calls(run: Run, ends_body: Callable[[], None]) -> None:
    run.taken = run.had
    for number, rate in enumerate([0.1, 0.2]):
        if number >= run.had // STEPS:
            run.rate = rate if number == 1 else 0.0
            stage_of(run, ends_body)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("train", "saved", "said", "told"),
    [
        (adds_what_it_has, 4, 0, 0),
        (saves_by_it, STEPS + 3, 0, 0),
        (counts_stages, STEPS + 1, 0, 0),
        (counts_calls, STEPS + 1, 0, 0),
        (ends_with_a_step, 3, 1, 0),
        (ends_with_a_step, 4, 0, 1),  # after whole windows: only the end of the epoch may differ
        (ends_with_a_step, STEPS + 4, 1, 0),  # known from the first epoch
        (counts_from_one, 4, 0, 1),
        (counts_from_one, STEPS + 4, 0, 1),
        (counts_from_one, 5, 1, 0),
        (only_tells, 5, 0, 0),
        (leaves_out_by_itself, 3, 0, 0),
        (ends_with_a_step, STEPS, 0, 0),  # the next epoch begins with its first batch
    ],
)
def test_a_number_that_counts_batches_anew_is_said_where_it_decides_something(
    train: Any, saved: int, said: int, told: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr("accelerate_ckpt._data.loaders.announce_on_main", lines.append)

    def bodies(run: Run, number: int) -> Any:
        """Train, and return the state in the body of batch ``number``."""
        states: list[Any] = []

        def ends_body() -> None:
            states.append(run.capture() if len(states) == number - 1 else None)
            if len(states) == number:
                raise StopAsyncIteration

        run.uses = run.positions.uses
        with pytest.raises(StopAsyncIteration):
            train(run, ends_body)
        return states[-1]

    first, run = Run(), Run(2)
    first.had, run.had = 0, saved
    run.restore(bodies(first, saved))
    bodies(run, 2)
    name = f"`number` of {train.__name__}() in test_exact_data_scripts.py"
    assert [name in text for text in run.warned] == [True] * said
    assert [name in text for text in lines] == [True] * told


def test_another_number_to_skip_is_said(caplog: pytest.LogCaptureFixture) -> None:
    state, rest, _ = Run().saved_after(2)
    run = Run(2).restore(state)
    assert run.epoch(loader=run.accelerator.skip_first_batches(run.loader, 4)) == rest
    assert "asked to skip 4 batches, but the checkpoint was saved after 2" in caplog.text


@pytest.mark.parametrize(("number", "said"), [(0, False), (1, True), (2, True), (STEPS - 1, False), (STEPS, False)])
def test_a_number_to_skip_after_the_end_of_an_epoch_is_said(number: int, said: bool) -> None:
    first, run = Run(), Run(2)
    for _ in first.loader:
        first.positions.uses.note()
        state = first.capture()
    run.restore(state)
    skipped = run.accelerator.skip_first_batches(run.loader, number)
    assert run.warned == []
    for _ in skipped:
        run.positions.uses.note()
    assert ["an epoch that had not begun" in text for text in run.warned] == [True] * said
    run.epoch(loader=run.accelerator.skip_first_batches(run.loader, 2))
    assert len(run.warned) == said


def test_a_number_to_skip_after_a_whole_epoch_is_the_scripts() -> None:
    first, run = Run(), Run(2)
    first.epoch()
    run.restore(first.capture())
    later = run.accelerator.skip_first_batches(run.loader, 2)
    run.epoch()
    assert len(run.epoch(loader=later)) == STEPS - 2
    assert run.warned == []


@pytest.mark.sampled(1)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("config", [{}, {"use_seedable_sampler": True}, {"dispatch_batches": True}], ids=str)
def test_skipping_without_a_checkpoint(config: dict[str, Any], workers: int) -> None:
    stock = Run(follow=False, config=config, num_workers=workers)
    whole, second = stock.epoch(), stock.epoch()
    run = Run(config=config, num_workers=workers)
    skipped = run.accelerator.skip_first_batches(run.loader, 3)
    assert isinstance(skipped, DataLoader) and len(skipped) == STEPS - 3
    assert skipped.total_batch_size == 4 if not config.get("dispatch_batches") else True
    assert run.epoch(loader=skipped) == whole[3:]
    # unlike with the loader that stock Accelerate returns, this counts as an iteration of the loader
    assert run.loader.iteration == 1
    assert run.epoch() == second


@pytest.mark.sampled(1)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("config", [{}, {"use_seedable_sampler": True}, {"dispatch_batches": True}], ids=str)
def test_saved_in_an_iteration_that_skips(config: dict[str, Any], workers: int) -> None:
    run = Run(config=config, num_workers=workers)
    rest = []
    for number, batch in enumerate(run.accelerator.skip_first_batches(run.loader, 3), 1):
        if number == 1:
            state = run.capture()
        else:
            rest.append(batch.tolist())
    following = run.epoch()
    resumed = Run(2, config=config, num_workers=workers).restore(state)
    assert resumed.epoch() == rest
    assert resumed.epoch() == following


def test_skipping_twice() -> None:
    whole = Run(follow=False).epoch()
    run = Run()
    skip = run.accelerator.skip_first_batches
    skipped = skip(skip(run.loader, 2), 1)
    assert len(skipped) == STEPS - 3 and run.epoch(loader=skipped) == whole[3:]


def test_skipping_in_a_stream() -> None:
    run = Run(dataset=NumberedStream(), config={"dispatch_batches": False})
    whole = run.epoch()
    skipped = run.accelerator.skip_first_batches(run.loader, 5)
    assert run.epoch(loader=skipped) == whole[5:]
    assert run.epoch(loader=skipped) == whole[5:]
    assert run.epoch() == whole


def test_left_early_and_saved_then_a_new_iteration_is_a_whole_one() -> None:
    run = Run()
    given = run.epoch(2)
    state, following = run.capture(), run.epoch()
    assert len(following) == STEPS and following[:2] != given
    assert Run(2).restore(state).epoch() == following


def test_left_early_and_saved_then_a_script_that_skips_goes_on() -> None:
    whole = Run().epoch()
    run = Run()
    run.epoch(2)
    resumed = Run(2).restore(run.capture())
    assert resumed.epoch(loader=resumed.accelerator.skip_first_batches(resumed.loader, 2)) == whole[2:]


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("skips", [False, True])
def test_saved_after_an_exception_has_ended_the_loop_then_a_new_iteration_is_said(raises: bool, skips: bool) -> None:
    run = Run()
    whole, run = run.epoch(), Run()
    try:
        raise ValueError  # a script may train while it handles another exception
    except ValueError:
        try:
            for number, _ in enumerate(run.loader, 1):
                run.positions.uses.note()
                if number == 2 and raises:
                    raise KeyboardInterrupt
                if number == 2:
                    break
            state = run.capture()
        except KeyboardInterrupt:
            state = run.capture()
    resumed = Run(2).restore(state)
    found = []
    for number, batch in enumerate(resumed.loader, 1):
        if skips and number <= 2:
            continue
        found.append(batch.tolist())
        resumed.positions.uses.note()
    assert (found == whole[2:]) == skips
    assert ["after an exception" in message for message in resumed.warned] == [True] * (raises and not skips)


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_a_loop_that_ends_by_plan_before_the_script_handles_something_is_nothing_to_warn_of(error: Any) -> None:
    run = Run()
    try:
        for number, _ in enumerate(run.loader, 1):
            run.positions.uses.note()
            if number == 2 and error is ValueError:
                raise ValueError  # the script's own, raised at the end of each epoch
            if number == 2:
                break
        if error is KeyboardInterrupt:
            run.positions.uses.note()  # training continues with another loader
            raise KeyboardInterrupt
        state = run.capture()
    except (ValueError, KeyboardInterrupt):
        state = run.capture()
    resumed = Run(2).restore(state)
    for _ in resumed.loader:
        resumed.positions.uses.note()
    assert resumed.warned == []


def test_left_early_and_saved_then_a_stateful_loader_goes_on() -> None:
    config = {"use_stateful_dataloader": True}
    whole = Run(config=config).epoch()
    run = Run(config=config)
    run.epoch(2)
    assert Run(2, config=config).restore(run.capture()).epoch() == whole[2:]


@pytest.mark.sampled(1)
@pytest.mark.extended_cells("6-0", "6-2")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("taken", [2, STEPS])
def test_a_script_that_keeps_states_of_its_stateful_loader_too_is_resumed_in_the_same_place(
    taken: int, workers: int
) -> None:
    run = Run(config={"use_stateful_dataloader": True}, num_workers=workers)
    state, rest, following = run.saved_after(taken)
    kept = Run(config={"use_stateful_dataloader": True}, num_workers=workers)
    kept.epoch(taken)
    again = Run(2, config={"use_stateful_dataloader": True}, num_workers=workers).restore(state)
    again.loader.load_state_dict(kept.loader.state_dict())
    epochs = [rest, following] if rest else [following]
    assert [again.epoch() for _ in epochs] == epochs


class Resumable(Sampler[int]):
    """A sampler that counts the samples that it has given, and continues after them."""

    def __init__(self) -> None:
        self.given, self.generator = 0, torch.Generator().manual_seed(5)
        self.order = torch.randperm(SAMPLES, generator=self.generator)

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        if self.given >= SAMPLES:
            self.given, self.order = 0, torch.randperm(SAMPLES, generator=self.generator)
        while self.given < SAMPLES:
            self.given += 1
            yield int(self.order[self.given - 1])


@pytest.mark.parametrize("epochs", [0, 1])
def test_a_script_that_keeps_the_state_of_its_sampler_too_is_resumed_in_the_same_place(epochs: int) -> None:
    sampler = Resumable()
    run = Run(shuffle=False, sampler=sampler)
    for _ in range(epochs):
        run.epoch()
    given = iter(run.loader)
    next(given)
    state, kept, generator = run.capture(), dict(vars(sampler)), sampler.generator.get_state()
    rest, following = [batch.tolist() for batch in given], run.epoch()
    again = Resumable()
    resumed = Run(2, shuffle=False, sampler=again).restore(state)
    vars(again).update({**kept, "generator": torch.Generator().set_state(generator)})
    assert [resumed.epoch(), resumed.epoch()] == [rest, following]


class Strided(Sampler[int]):
    """A sampler with a number that the script sets at each start, which drawing does not change."""

    def __init__(self) -> None:
        self.stride = 1

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(SAMPLES).tolist()
        return iter([order[number * self.stride % SAMPLES] for number in range(SAMPLES)])


def test_a_number_of_a_sampler_that_the_script_sets_after_a_load_stays() -> None:
    def strided(seed: int) -> tuple[Run, Strided]:
        sampler = Strided()
        return Run(seed, shuffle=False, sampler=sampler), sampler

    run, sampler = strided(1)
    sampler.stride = 3
    state, rest, following = run.saved_after(2)
    again, sampler = strided(2)
    again.restore(state)
    sampler.stride = 3
    assert [again.epoch(), again.epoch()] == [rest, following]


@dataclasses.dataclass(frozen=True)
class Frozen(Sampler[int]):
    """A sampler whose attributes cannot be set."""

    size: int = SAMPLES

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.size).tolist())


def test_a_sampler_that_lets_nobody_set_its_numbers_is_resumed() -> None:
    state, rest, following = Run(shuffle=False, sampler=Frozen()).saved_after(2)
    again = Run(2, shuffle=False, sampler=Frozen()).restore(state)
    assert [again.epoch(), again.epoch()] == [rest, following]


class CountsInItself(IterableDataset[Any]):
    """A stream that keeps its position, and starts again at its end."""

    def __init__(self) -> None:
        self.given = self.passes = 0

    def __iter__(self) -> Iterator[Any]:
        while self.given < SAMPLES:
            self.given += 1
            yield torch.tensor([100 * self.passes + self.given])
        self.given, self.passes = 0, self.passes + 1

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given, "passes": self.passes}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given, self.passes = state["given"], state["passes"]


@pytest.mark.parametrize("keeps", [False, True], ids=["alone", "keeps"])
@pytest.mark.parametrize(("stream", "taken"), [(NumberedStream, 2), (NumberedStream, STEPS), (CountsInItself, 2)])
def test_a_stream_in_a_stateful_loader_is_resumed_in_the_same_place(stream: Any, taken: int, keeps: bool) -> None:
    config = {"use_stateful_dataloader": True}
    run, kept = Run(dataset=stream(), config=config), Run(dataset=stream(), config=config)
    state, rest, following = run.saved_after(taken)
    kept.epoch(taken)
    again = Run(2, dataset=stream(), config=config).restore(state)
    if keeps:
        again.loader.load_state_dict(kept.loader.state_dict())
    epochs = [rest, following] if rest else [following]
    assert [again.epoch() for _ in epochs] == epochs


class Registered(Resumable):
    """A sampler with a state, which a script can also register with its Accelerator."""

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given, "order": self.order, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given, self.order = state["given"], state["order"]
        self.generator.set_state(state["generator"])


def test_a_registered_sampler_is_resumed_in_the_same_place(tmp_path: Path) -> None:
    def prepared() -> tuple[Accelerator, Any]:
        accelerator, sampler = attach(Accelerator(cpu=True), "sync"), Registered()
        accelerator.register_for_checkpointing(sampler)
        return accelerator, accelerator.prepare(DataLoader(Numbered(SAMPLES), batch_size=2, sampler=sampler))

    accelerator, loader = prepared()
    given = iter(loader)
    next(given)
    accelerator.save_state(str(tmp_path / "saved"))
    rest = [batch.tolist() for batch in given]
    resumed, again = prepared()
    resumed.load_state(str(tmp_path / "saved"))
    assert [batch.tolist() for batch in again] == rest


def test_saved_again_before_going_on() -> None:
    state, rest, following = Run().saved_after(2)
    again = Run(2).restore(state).capture()
    run = Run(3).restore(again)
    assert (run.epoch(), run.epoch()) == (rest, following)


@pytest.mark.parametrize("workers", [0, 2])
def test_loaded_in_the_same_process(workers: int) -> None:
    run = Run(num_workers=workers, persistent_workers=workers > 0)
    state, rest, following = run.saved_after(2)
    for _ in range(2):
        assert run.restore(state).epoch() == rest
        assert run.epoch() == following


def test_loaded_in_the_middle_of_an_iteration() -> None:
    run = Run()
    state, rest, _ = run.saved_after(2)
    abandoned = iter(run.loader)
    next(abandoned)
    run.restore(state)
    next(abandoned)
    assert run.capture()["loaders"][0]["steps"] == 2
    del abandoned
    assert run.epoch() == rest


def read_in_a_thread(run: Run, steps: int | None = None) -> list[list[int]]:
    """Return the batches of an epoch, all taken by a thread of the script before one is used."""
    given: list[list[int]] = []
    thread = threading.Thread(target=lambda: given.extend(run.epoch(steps)))
    thread.start()
    thread.join()
    return given


def test_a_thread_that_reads_ahead_gets_each_batch_once() -> None:
    run = Run()
    assert run.positions is not None
    for _ in run.loader:
        run.positions.uses.backward()
    state = run.capture()
    following = run.epoch()
    again = Run(2).restore(state)
    assert read_in_a_thread(again) == following
    assert again.warned == []


@pytest.mark.parametrize("steps", [3, STEPS])
def test_batches_that_a_thread_has_taken_ahead_are_said_to_be_left_out(steps: int) -> None:
    run = Run()
    assert run.positions is not None
    given, taken, done = list[list[int]](), threading.Event(), threading.Event()

    def read() -> None:
        for batch in run.loader:
            given.append(batch.tolist())
            if len(given) == 3:
                taken.set()
                done.wait()

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    taken.wait()
    if steps == STEPS:
        done.set()
        thread.join()
    run.positions.uses.backward()
    state = run.capture()
    done.set()
    thread.join()
    assert ["had taken batches ahead of its training when save_state was called" in said for said in run.warned] == [1]
    again = Run(2).restore(state)
    assert ["had taken batches ahead of its training when it was saved" in said for said in again.warned] == [1]
    for _ in range(STEPS - 1):
        run.positions.uses.backward()
    assert Run(2).restore(run.capture()).warned == []


def one_ahead(loader: Any) -> Iterator[Any]:
    batches = iter(loader)
    before = next(batches)
    for batch in batches:
        yield before
        before = batch
    yield before


def in_pairs(loader: Any) -> Iterator[Any]:
    batches = iter(loader)
    while pair := list(islice(batches, 2)):
        yield pair


def some(loader: Any) -> Iterator[Any]:
    yield from (batch for batch in loader if int(batch.sum()) % 4)


@pytest.mark.each_value
@pytest.mark.parametrize(("epochs", "save"), [(1, 2), (1, 3), (2, 1), (2, 3)])
@pytest.mark.parametrize(("take", "is_said"), [(one_ahead, True), (in_pairs, False), (some, False), (iter, False)])
def test_batches_that_the_script_has_taken_ahead_are_said_to_be_left_out(
    take: Any, is_said: bool, epochs: int, save: int
) -> None:
    def train(run: Run, save: int = 0) -> list[dict[str, Any]]:
        saved = []
        for number, _ in enumerate(take(run.loader), 1):
            assert run.positions is not None
            run.positions.uses.backward()
            saved += [run.capture()] if number == save else []
        return saved

    run = Run()
    for state in [train(run, save) for _ in range(epochs)][-1]:
        again = Run(2).restore(state)
        train(again)
        assert run.warned == []
        assert ["the script takes batches ahead of its training" in said for said in again.warned] == [True] * is_said


class Two(Run):
    """Two loaders that are trained on together; the second is shorter."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__(seed)
        self.other = self.accelerator.prepare(DataLoader(Numbered(8), batch_size=4, shuffle=True), None)[0]

    def train(self, repeat: Any, save: int) -> list[dict[str, Any]]:
        """Train an epoch; return a list with the state at step ``save``, or an empty one."""
        saved = []
        for number, _ in enumerate(zip(self.loader, repeat(self.other), strict=False), 1):
            assert self.positions is not None
            torch.rand(1)  # the model draws
            self.positions.uses.backward()
            saved += [self.capture()] if number == save else []
        return saved


def begun_again(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


@pytest.mark.parametrize(
    ("epochs", "save", "said"), [(1, 1, "later"), (1, 5, "at once"), (2, 1, "at once"), (2, STEPS, "never")]
)
def test_a_loader_that_cycle_repeats_is_said(epochs: int, save: int, said: str) -> None:
    run = Two()
    (state,) = [run.train(cycle, save) for _ in range(epochs)][-1]
    assert run.warned == []
    again = Two(2)
    again.restore(state)
    assert ["itertools.cycle" in text for text in again.warned] == [True] * (said == "at once")
    again.train(cycle, 0)
    assert ["itertools.cycle" in text for text in again.warned] == [True] * (said != "never")


@pytest.mark.each_value
@pytest.mark.parametrize("save", [1, 2, STEPS])
@pytest.mark.parametrize("repeat", [list, begun_again])
def test_two_loaders_of_which_none_is_repeated_are_not_warned_of(repeat: Any, save: int) -> None:
    run = Two()
    states = [*run.train(repeat, save), *run.train(repeat, save), run.capture()]
    for state in states:
        again = Two(2)
        again.restore(state)
        again.train(repeat, 0)
        assert again.warned == run.warned == []


def test_another_loader_that_is_trained_on_is_not_taken_for_an_evaluation() -> None:
    run = Two()
    run.train(cycle, 5)  # after the shorter loader has ended
    (state,) = run.train(cycle, STEPS)
    again = Two(2)
    again.restore(state)
    assert again.warned == run.warned == []


def test_a_loader_that_is_prepared_after_the_load() -> None:
    state, rest, following = Run().saved_after(2)
    torch.manual_seed(2)
    accelerator = Accelerator()
    positions = LoaderPositions(accelerator, warn=print)
    positions.restore(state, saved_world_size=1)
    loader = accelerator.prepare(DataLoader(Numbered(SAMPLES), batch_size=4, shuffle=True))
    assert [batch.tolist() for batch in loader] == rest
    assert [batch.tolist() for batch in loader] == following


def test_another_batch_size_loses_nothing_and_is_said() -> None:
    state, rest, _ = Run().saved_after(2)
    run = Run(2, batch_size=5).restore(state)
    assert [*chain(*run.epoch())] == [*chain(*rest)]
    assert "batch_size was 4 and is 5" in run.warned[0]
    assert run.warned[0].startswith("this resume is not guaranteed to be exact: ")


def test_another_number_of_workers_is_said() -> None:
    state, rest, _ = Run().saved_after(2)
    run = Run(2, num_workers=2).restore(state)
    assert run.epoch() == rest
    assert "was 0 and is 2" in run.warned[0]


def test_a_stream_that_divides_itself_begins_anew_and_says_so() -> None:
    run = Run(dataset=NumberedStream(), config={"dispatch_batches": False})
    state, _, following = run.saved_after(2)
    state["loaders"][0]["layout"]["world_size"] = 2
    resumed = Run(dataset=NumberedStream(), config={"dispatch_batches": False})
    resumed.positions.restore(state, saved_world_size=2)
    assert resumed.epoch() == following
    assert "an iterable dataset divides itself over the ranks, so the epoch begins again" in resumed.warned[0]


def test_a_state_of_a_newer_version() -> None:
    state = Run().capture()
    with pytest.raises(CheckpointFormatError, match="this release reads up to"):
        Run().restore({**state, "version": 99})


def test_a_state_holds_tensors_and_plain_data_only(tmp_path: Path) -> None:
    run = Run(num_workers=2)
    state, rest, _ = run.saved_after(2)
    torch.save(state, tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    assert Run(2, num_workers=2).restore(loaded).epoch() == rest


def test_released_loaders_are_as_they_were() -> None:
    run = Run()
    run.epoch(2)
    base = run.loader.base_dataloader
    assert type(base.batch_sampler) is not torch.utils.data.BatchSampler
    run.positions.release()
    assert type(base.batch_sampler) is torch.utils.data.BatchSampler
    assert "__iter__" not in vars(base)
    assert run.accelerator.skip_first_batches(run.loader, 2) is not run.loader


def test_a_followed_loader_can_be_copied() -> None:
    run = Run(shuffle=False)
    run.epoch()
    for copied in (pickle.loads(pickle.dumps(run.loader)), copy.deepcopy(run.loader)):
        assert [batch.tolist() for batch in copied] == run.epoch()


def test_a_followed_loader_looks_as_before() -> None:
    run = Run(config={"even_batches": False})
    run.epoch(1)
    assert isinstance(run.loader.batch_sampler, torch.utils.data.BatchSampler)
    assert run.loader.total_batch_size == 4 and len(run.loader) == STEPS and run.loader.remainder == SAMPLES % 4
    assert run.loader.get_sampler().num_samples == SAMPLES


@pytest.mark.extended
def test_following_costs_little_for_each_batch() -> None:
    data = torch.zeros(20000, 1)

    def seconds(follow: bool) -> float:
        run = Run(follow=follow, dataset=data, shuffle=True)
        begun = time.process_time()
        steps = sum(1 for _ in run.loader)
        return (time.process_time() - begun) / steps

    without = min(seconds(False) for _ in range(3))
    followed = min(seconds(True) for _ in range(3))
    print(f"{followed - without:.6f} s")
    assert followed - without < 0.001


# ---- what we use of Accelerate is where it was -----------------------------------------------------------------------


def test_nothing_has_moved() -> None:
    assert private_data.missing_internals(Accelerator()) == [], "this release of Accelerate has moved something"


def test_what_has_moved_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator()
    del accelerator._schedulers
    monkeypatch.setitem(private_data._NEEDED, "DataLoaderShard", ("_renamed",))
    monkeypatch.setitem(private_data._NEEDED_ARGUMENTS, "BatchSamplerShard", ("other_batches",))
    with pytest.raises(
        CheckpointError,
        match=r"has no Accelerator\._schedulers, data_loader\.DataLoaderShard\._renamed, data_loader\.BatchSamplerShard\(other_batches\)",
    ):
        LoaderPositions(accelerator, warn=print)


def test_an_iteration_that_is_made_in_another_way_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        stock_data_loader.DataLoaderShard, "__iter__", lambda self: iter(list(iter(self.base_dataloader)))
    )
    run = Run()
    with pytest.raises(CheckpointError, match="does not make the iterator of the inner loader where it did"):
        run.epoch()


@pytest.mark.slow
def test_launched_for_real(tmp_path: Path) -> None:
    """Fresh interpreters, started by ``accelerate launch``, save and load with ``save_state`` and ``load_state``."""
    cells = ["default_workers", "seedable_skip", "default_accumulate"]
    script = Path(__file__).with_name("exact_script.py")
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(script.parents[2])}
    for mode in ("run", "resume"):
        launch = "-m accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1 --main_process_port 0"
        command = [sys.executable, *launch.split(), str(script), mode, str(tmp_path), *cells]
        subprocess.run(command, env=environment, check=False, capture_output=True, timeout=240)
        for rank in (0, 1):
            found = json.loads((tmp_path / f"{mode}-{rank}.json").read_text())
            assert found.keys() == set(cells)
            for verdicts in found.values():
                assert len(verdicts) >= (1 if mode == "run" else 5) and set(verdicts.values()) == {""}


def test_an_epoch_that_begins_before_another_loader_continues_keeps_what_it_has_drawn() -> None:
    def train(run: Run, state: dict[str, Any] | None) -> tuple[list[Any], dict[str, Any]]:
        second = run.accelerator.prepare(DataLoader(Numbered(40), batch_size=4, shuffle=True), None)[0]
        kept, found, saved = iter(second), list[Any](), {}
        assert run.positions is not None
        if state is not None:
            run.restore(state)
        for _ in range(2 if state is not None else 3):
            for number, batch in enumerate(run.loader, 1):
                kept = iter(second) if (other := next(kept, None)) is None else kept
                run.positions.uses.backward()
                found.append([batch.tolist(), None if other is None else other.tolist(), float(torch.rand(()))])
                if number == STEPS and not saved:
                    saved = run.capture()
        return found, saved

    whole, saved = train(Run(), None)
    assert train(Run(seed=2), saved)[0] == whole[STEPS:]


@pytest.mark.parametrize("place", [2, STEPS], ids=["middle", "last batch"])
def test_a_pass_that_uses_nothing_before_each_epoch_does_not_count_as_skipping(place: int) -> None:
    def train(run: Run, state: dict[str, Any] | None) -> tuple[list[Any], dict[str, Any]]:
        found, saved = list[Any](), {}
        assert run.positions is not None
        if state is not None:
            run.restore(state)
        for _ in range(3):
            assert sum(1 for _ in run.loader) == STEPS
            for number, batch in enumerate(run.loader, 1):
                run.positions.uses.backward()
                found.append([batch.tolist(), float(torch.rand(()))])
                if number == place:
                    saved = saved or run.capture()
        return found, saved

    whole, saved = train(Run(), None)
    rest = whole[place:]
    resumed = Run(seed=2)
    assert train(resumed, saved)[0][: len(rest)] == rest
    assert resumed.warned == []


def test_a_script_that_leaves_out_whole_epochs_by_itself_resumes_in_the_third() -> None:
    def train(run: Run, done: int, saves: int) -> tuple[list[Any], dict[str, Any]]:
        found, saved, step = list[Any](), {}, 0
        assert run.positions is not None
        for _ in range(4):
            for batch in run.loader:
                step += 1
                if step <= done:
                    continue
                run.positions.uses.backward()
                found.append([batch.tolist(), float(torch.rand(()))])
                if step == saves:
                    saved = run.capture()
        return found, saved

    saves = 2 * STEPS + 2
    whole, saved = train(Run(), 0, saves)
    assert train(Run(seed=2).restore(saved), saves, 0)[0] == whole[saves:]


class Drawing(torch.utils.data.Dataset[torch.Tensor]):
    """Draws from the generator of its process."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + torch.rand(())


def test_a_loader_that_is_prepared_for_each_epoch_has_new_workers() -> None:
    def train(run: Run, epochs: int) -> tuple[list[Any], dict[str, Any]]:
        found, saved = list[Any](), {}
        assert run.positions is not None
        for _ in range(epochs):
            made = DataLoader(Drawing(), batch_size=4, shuffle=True, num_workers=1, persistent_workers=True)
            for batch in run.accelerator.prepare(made, None)[0]:
                run.positions.uses.backward()
                found.append(batch.tolist())
            saved = saved or run.capture()
        return found, saved

    def run_of(seed: int) -> Run:
        run = Run(seed)
        run.accelerator._dataloaders.clear()
        return run

    whole, saved = train(run_of(1), 2)
    assert train(run_of(2).restore(saved), 1)[0] == whole[2:]


def in_a_variable(make: Callable[[], Any]) -> Iterator[Any]:
    loader = make()
    for number, batch in enumerate(loader):
        yield batch + 0 * number


def in_none(make: Callable[[], Any]) -> Iterator[Any]:
    yield from make()


def directly(make: Callable[[], Any]) -> Any:
    return make()


@pytest.mark.sampled(1)
@pytest.mark.extended_cells("False-in_a_variable")
@pytest.mark.parametrize("iterate", [in_a_variable, in_none, directly])
@pytest.mark.parametrize("in_body", [False, True])
def test_a_loader_that_only_one_epoch_has_begins_with_its_own_generator(
    iterate: Callable[[Callable[[], Any]], Any], in_body: bool
) -> None:
    def train(run: Any, epochs: range) -> tuple[list[list[Any]], dict[int, dict[str, Any]]]:
        found, saved = list[list[Any]](), {}

        def make(epoch: int) -> Any:
            generator = torch.Generator().manual_seed(epoch)
            made = DataLoader(Drawing(), batch_size=4, shuffle=True, generator=generator)
            return run.accelerator.prepare(made, None)[0]

        for epoch in epochs:
            found.append([])
            batches = iterate(functools.partial(make, epoch))
            for batch in batches:
                run.positions.uses.backward()
                found[-1].append(batch.tolist())
                if in_body and len(found[-1]) == 2:
                    saved[epoch] = run.capture()
            if not in_body:
                saved[epoch] = run.capture()
        return found, saved

    def run_of(seed: int) -> Run:
        run = Run(seed)
        run.accelerator._dataloaders.clear()
        return run

    whole, saved = train(run_of(1), range(4))
    for epoch in (0, 1):
        assert train(run_of(2).restore(saved[epoch]), range(epoch + 1, 4))[0] == whole[epoch + 1 :]


@pytest.mark.each_value
@pytest.mark.parametrize("has_generator", [False, True])
@pytest.mark.parametrize("config", [{}, {"use_seedable_sampler": True}, {"use_stateful_dataloader": True}], ids=str)
def test_a_loader_that_is_prepared_for_each_epoch_takes_nothing_over_from_the_one_before(
    config: dict[str, bool], has_generator: bool
) -> None:
    def train(run: Any, epochs: range) -> tuple[list[list[Any]], dict[int, dict[str, Any]]]:
        found, saved = list[list[Any]](), {}
        for epoch in epochs:
            generator = torch.Generator().manual_seed(epoch) if has_generator else None
            loader = run.accelerator.prepare(
                DataLoader(Drawing(), batch_size=4, shuffle=True, generator=generator), None
            )[0]
            run.positions.prepared(loader)
            found.append([])
            for batch in loader:
                run.positions.uses.backward()
                found[-1].append(batch.tolist())
            saved[epoch] = run.capture()
        return found, saved

    def run_of(seed: int) -> Run:
        run = Run(seed, config=config)
        run.accelerator._dataloaders.clear()
        return run

    whole, saved = train(run_of(1), range(4))
    for epoch in (0, 1):
        assert train(run_of(2).restore(saved[epoch]), range(epoch + 1, 4))[0] == whole[epoch + 1 :]
