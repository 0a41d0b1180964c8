"""A run that is resumed in new objects, under another seed, ends with the bits of the run that was not interrupted."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, LearningRateFinder
from torch.utils.data import DataLoader, IterableDataset, Subset

from lightning_ckpt.resumable import ResumableCheckpoint
from tests.lightning_ckpt.captured import Training, train_and_resume
from tests.lightning_ckpt.exact_cases import (
    Model,
    Outcome,
    SaveAt,
    end_workers,
    make_trainer,
    outcome,
    saved_at_the_end,
)
from tests.support.data_sets import Samples

BATCHES = 8


def averaging() -> list[Any]:
    """Return Lightning's own callback that averages weights; skip the test before Lightning 2.6."""
    callbacks = pytest.importorskip("lightning.pytorch.callbacks.weight_averaging")
    return [callbacks.EMAWeightAveraging(decay=0.5)]


pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@dataclasses.dataclass(frozen=True)
class Case:
    """Where to save, and what to train.

    Attributes:
        hook: The hook in which the checkpoint is saved.
        count: Number of the call of that hook.
        options: Options of the model.
        trainer: Arguments of the Trainer.
        callbacks: Makes further callbacks, for both runs.
        warns: A part of the warning that is expected, although the resume happens to be exact.
    """

    hook: str
    count: int
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    trainer: dict[str, Any] = dataclasses.field(default_factory=dict)
    callbacks: Callable[[], list[Any]] = list
    warns: str | None = None


def train(case: Case, directory: Path) -> tuple[Path, Outcome]:
    """Train to the end, saving on the way; return the checkpoint and what the run did after it."""
    pl.seed_everything(1, verbose=False)
    model = Model(case.options)
    save = SaveAt(case.hook, case.count, directory / "saved.ckpt")
    trainer = make_trainer(directory, [*case.callbacks(), save], **case.trainer)
    trainer.fit(model)
    assert save.calls >= case.count, f"{case.hook} was called {save.calls} times"
    found = outcome(trainer, model).after(save.seen, save.rows)
    saved = saved_at_the_end(trainer, directory / "end.ckpt")
    end_workers(trainer)
    return save.path, dataclasses.replace(found, saved=saved)


def resume(case: Case, path: Path, directory: Path) -> tuple[Outcome, list[str]]:
    """Resume in new objects, under another seed; return the outcome and the warnings about exactness."""
    pl.seed_everything(77, verbose=False)
    torch.randn(3)
    model = Model(case.options)
    trainer = make_trainer(directory, case.callbacks(), **case.trainer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model, ckpt_path=path)
    found = [str(w.message) for w in caught if "exact" in str(w.message)]
    saved = saved_at_the_end(trainer, directory / "resumed-end.ckpt")
    end_workers(trainer)
    return dataclasses.replace(outcome(trainer, model), saved=saved), found


def check(case: Case, tmp_path: Path) -> None:
    path, expected = train(case, tmp_path)
    found, warned = resume(case, path, tmp_path)
    assert len(warned) == (case.warns is not None)
    assert case.warns is None or case.warns in warned[0]
    assert found.seen == expected.seen, "other samples, or in another order"
    assert found.saved.items() ^ expected.saved.items() == set()
    assert found == expected


MID, LAST = BATCHES + 3, BATCHES


def loader(kind: str, workers: int, hook: str = "on_train_batch_end", count: int = MID, **options: Any) -> Any:
    trainer = options.pop("trainer", {})
    case = Case(
        hook, count, {"loader": kind, "workers": workers, **options}, trainer, warns=READING.get((kind, workers))
    )
    return pytest.param(case, id=f"{kind}-{workers}-{hook.removeprefix('on_train_')}-{count}")


READING = {("stream", 0): "draws random numbers in the main process"}

LOADERS = [
    *(loader("plain", 0, count=count) for count in (1, 4, 7, LAST, MID)),
    *(loader("plain", 2, count=count) for count in (LAST, MID)),
    *(loader(kind, 0) for kind in ("generator", "sampler", "weighted", "replacement", "own_rng", "distributed")),
    *(loader(kind, 2) for kind in ("generator", "batch_sampler")),
    *(loader("plain", workers, "on_train_epoch_end", 1) for workers in (0, 2)),
    loader("generator", 0, count=LAST),
    loader("sampler", 0, "on_train_epoch_end", 1),
    loader("own_rng", 0, "on_train_epoch_end", 1),
    loader("distributed", 2),
    *(loader("persistent", 2, count=count) for count in (LAST, MID)),
    loader("persistent", 2, "on_train_epoch_end", 1),
    *(loader("stateful", 0, count=count) for count in (LAST, MID)),
    *(loader("stateful", 2, count=count) for count in (LAST, MID)),
    loader("stateful", 0, "on_train_epoch_end", 1),
    loader("stateful_persistent", 2),
    *(loader("stateful_dataset", workers) for workers in (0, 2)),
    loader("stateful_dataset", 0, count=LAST),
    loader("stateful_distributed", 2),
    loader("stateful_distributed", 0, "on_train_epoch_end", 1),
    *(loader("stateful_stream", 0, count=count) for count in (1, 7, LAST, MID)),
    *(loader("stateful_stream", 2, count=count) for count in (LAST, MID)),
    loader("stateful_stream", 0, "on_train_epoch_end", 1),
    loader("stateful_stateless_stream", 2),
    loader("stream", 0),
    loader("stream", 2),
    loader("stream", 2, count=LAST),
    loader("quiet_stream", 0),
    *(loader("beside_stream", 0, count=count) for count in (1, MID)),
    loader("own_loader", 0),
    *(loader("own_stateful_loader", 0, count=count) for count in (1, LAST, MID)),
    loader("own_stateful_loader", 0, "on_train_epoch_end", 1),
    *(loader("dict", workers) for workers in (0, 2)),
    loader("dict", 0, count=2 * BATCHES - 2),
    *(loader("persistent_dict", 2, count=count) for count in (5, LAST, MID)),
    *(loader("persistent_beside_stream", 2, count=count) for count in (3, 4)),  # read one batch ahead
    *(loader("persistent_one_beside_stream", 2, "on_train_batch_start", count) for count in (3, 4)),
    loader("persistent_generator", 2, count=BATCHES + 3),
    loader("persistent_generator_of_stream", 2, count=3),
    loader("min_size", 0, count=4),
    loader("max_size", 0, count=BATCHES + 5),
    loader("max_size", 2, count=BATCHES + 5),
    loader("persistent_max_size", 2, count=BATCHES + 5),
]


@pytest.mark.sampled(6)
@pytest.mark.extended_cells(
    "stateful_stateless_stream-2-batch_end-11",
    "batch_sampler-2-batch_end-11",
    "dict-2-batch_end-11",
    "stream-2-batch_end-11",
    "plain-0-batch_end-4",
    "plain-0-batch_end-7",
    "plain-2-batch_end-8",
    "plain-2-epoch_end-1",
    "replacement-0-batch_end-11",
    "generator-0-batch_end-8",
    "generator-2-batch_end-11",
    "distributed-2-batch_end-11",
    "own_rng-0-epoch_end-1",
    "plain-2-batch_end-11",
    "persistent-2-batch_end-11",
    "persistent-2-epoch_end-1",
    "stateful-0-batch_end-8",
    "stateful-2-batch_end-8",
    "stateful-2-batch_end-11",
    "stateful_dataset-0-batch_end-8",
    "stateful_distributed-2-batch_end-11",
    "stateful_stream-0-batch_end-7",
    "stateful_stream-0-batch_end-8",
    "stateful_stream-2-batch_end-11",
    "stream-2-batch_end-8",
    "beside_stream-0-batch_end-1",
    "own_stateful_loader-0-batch_end-1",
    "own_stateful_loader-0-batch_end-8",
    "dict-0-batch_end-14",
    "persistent_dict-2-batch_end-8",
    "persistent_dict-2-batch_end-11",
    "persistent_beside_stream-2-batch_end-4",
)
@pytest.mark.parametrize("case", LOADERS)
def test_loaders(case: Case, tmp_path: Path) -> None:
    check(case, tmp_path)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_save_before_the_first_batch_of_a_resumed_run_leaves_its_place(workers: int, tmp_path: Path) -> None:
    model = functools.partial(Model, {"loader": "stateful", "workers": workers})
    training = Training(model, lambda: [SaveAt("on_train_start", 1, tmp_path / "early.ckpt")])
    expected, found, said = train_and_resume(training, tmp_path, ("on_train_batch_end", MID))
    assert not said
    assert found == expected


class AtZeroBetweenPasses(DataLoader[Any]):
    """A loader with a state of its own, which is 0 when a pass is over."""

    position = 0

    def __iter__(self) -> Any:
        for number, batch in enumerate(super().__iter__()):
            if number >= self.position:
                self.position = number + 1
                yield batch
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class SkipsTheRest(Model):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.current_epoch == 2 and batch_idx == 2 else None


def test_batches_that_a_hook_skips_are_not_missed(tmp_path: Path) -> None:
    expected, found, said = train_and_resume(Training(SkipsTheRest), tmp_path, ("on_train_batch_end", MID))
    assert not said
    assert found == expected


class AtItsState(AtZeroBetweenPasses):
    """A loader that begins each pass where the loaded state was; batch ``nothing_at`` is None."""

    begin = 0
    nothing_at: int | None = None

    def __iter__(self) -> Any:
        for number, batch in enumerate(DataLoader.__iter__(self)):
            if number >= self.begin:
                self.position = number + 1
                yield None if number == self.nothing_at else batch
        self.position = 0

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["position"]


@pytest.mark.parametrize("nothing_at", [None, 4])
def test_batches_that_are_missed_are_said_also_where_one_is_none(nothing_at: int | None, tmp_path: Path) -> None:
    class Reads(Model):
        def train_dataloader(self) -> Any:
            loader = AtItsState(InOrder(), batch_size=4)
            loader.nothing_at = nothing_at
            return loader

    *_, said = train_and_resume(Training(Reads), tmp_path, ("on_train_batch_end", MID))
    assert ["but earlier ones had" in str(text) for text in said].count(True) == 1, said


class InOrder(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return enumerate(torch.randn(4 * BATCHES, 4, generator=torch.Generator().manual_seed(3)))


class ReadsInOrder(Model):
    def train_dataloader(self) -> Any:
        return AtZeroBetweenPasses(InOrder(), batch_size=4)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("at", [("on_train_batch_end", MID), ("on_train_batch_end", LAST), ("on_train_epoch_end", 1)])
def test_a_loader_whose_own_state_begins_anew_with_each_pass(at: tuple[str, int], tmp_path: Path) -> None:
    expected, found, said = train_and_resume(Training(ReadsInOrder), tmp_path, at)
    assert not said
    assert found == expected


class TakesTheIterator(Model):
    def log(self, *args: Any, **options: Any) -> None:
        super().log(*args, **{"batch_size": 4, **options})  # Lightning cannot know it here

    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


@pytest.mark.sampled(2)
@pytest.mark.extended_cells("{}-1", "{}-9", "{'workers': 2}-8", "{'loader': 'quiet_stream'}-11")
@pytest.mark.parametrize(
    ("options", "count"),
    [
        *(({}, count) for count in (1, LAST, LAST + 1, MID)),
        *(({"workers": 2}, count) for count in (LAST, MID)),
        *(({"loader": "quiet_stream"}, count) for count in (LAST, MID)),
    ],
    ids=str,
)
def test_steps_that_take_the_iterator(options: dict[str, Any], count: int, tmp_path: Path) -> None:
    model = functools.partial(TakesTheIterator, options)
    expected, found, said = train_and_resume(Training(model), tmp_path, ("on_train_batch_end", count))
    assert not said
    assert found == expected


VAL = {"val": True}
EVERY_3 = {"val_check_interval": 3}
POINTS = {
    "batch end, validation due": Case("on_train_batch_end", BATCHES + 3, VAL, EVERY_3),
    "batch end of the last batch, validation due": Case("on_train_batch_end", BATCHES, VAL),
    "batch end of the very last batch": Case("on_train_batch_end", 3 * BATCHES, VAL),
    "validation end inside an epoch": Case("on_validation_end", 3, VAL, EVERY_3),
    "validation end at the end of an epoch": Case("on_validation_end", 2, VAL),
    "validation end, unsized": Case("on_validation_end", 2, {**VAL, "loader": "stateful_stream"}),
    "validation start": Case("on_validation_start", 2, VAL, EVERY_3),
    "inside validation": Case("on_validation_batch_end", 5, VAL, EVERY_3),
    "inside validation, workers": Case("on_validation_batch_end", 5, {**VAL, "val_workers": 2, "workers": 2}, EVERY_3),
    "inside validation at the end of an epoch": Case("on_validation_batch_start", 5, VAL),
    "validation epoch end": Case("on_validation_epoch_end", 2, VAL, EVERY_3),
    "after a sanity check": Case("on_train_batch_end", 3, VAL, {"num_sanity_val_steps": 2}),
    "validation every second epoch": Case(
        "on_train_batch_end", 2 * BATCHES + 2, VAL, {"check_val_every_n_epoch": 2, "max_epochs": 4}
    ),
    "validation across epochs": Case(
        "on_validation_end", 2, VAL, {"check_val_every_n_epoch": None, "val_check_interval": 5}
    ),
    "inside validation across epochs": Case(
        "on_validation_batch_end", 5, VAL, {"check_val_every_n_epoch": None, "val_check_interval": 5}
    ),
    "train start": Case("on_train_start", 1),
    "first epoch start": Case("on_train_epoch_start", 1, {"workers": 2}),
    "later epoch start": Case("on_train_epoch_start", 2),
    "batch start": Case("on_train_batch_start", BATCHES + 3),
    "first batch start": Case("on_train_batch_start", 1),
    "first batch start of an epoch": Case("on_train_batch_start", BATCHES + 1, {"workers": 2}),
    "batch start, unsized": Case("on_train_batch_start", BATCHES + 3, {"loader": "stateful_stream"}),
    "first batch start, unsized": Case("on_train_batch_start", BATCHES + 1, {"loader": "stateful_stream"}),
    "batch start, unsized, workers": Case("on_train_batch_start", 4, {"loader": "stateful_stream", "workers": 2}),
    "epoch end with validation": Case("on_train_epoch_end", 1, VAL),
    "epoch end, unsized": Case("on_train_epoch_end", 2, {"loader": "stateful_stream"}),
}


@pytest.mark.sampled(4)
@pytest.mark.extended_cells(
    "batch-end-of-the-last-batch,-validation-due",
    "validation-end,-unsized",
    "inside-validation,-workers",
    "inside-validation-at-the-end-of-an-epoch",
    "inside-validation-across-epochs",
    "batch-start,-unsized,-workers",
    "first-batch-start-of-an-epoch",
    "epoch-end-with-validation",
)
@pytest.mark.parametrize("case", POINTS.values(), ids=[name.replace(" ", "-") for name in POINTS])
def test_points_of_the_loop(case: Case, tmp_path: Path) -> None:
    check(case, tmp_path)


ACCUMULATE = {"accumulate_grad_batches": 3}
PLATEAU = {"plateau": {"interval": "epoch", "monitor": "loss_epoch"}}
VAL_PLATEAU = {"plateau": {"interval": "step", "frequency": 3, "monitor": "val_loss"}, "val": True}
FEATURES = {
    "open window": Case("on_train_batch_end", BATCHES + 2, {}, ACCUMULATE),
    "open window, workers": Case("on_train_batch_end", BATCHES + 2, {"workers": 2}, ACCUMULATE),
    "window just closed": Case("on_train_batch_end", BATCHES + 3, {}, ACCUMULATE),
    "open window at validation": Case("on_validation_end", 3, VAL, {**ACCUMULATE, "val_check_interval": 2}),
    "open window inside validation": Case("on_validation_batch_end", 8, VAL, {**ACCUMULATE, "val_check_interval": 2}),
    "window of an epoch's end": Case("on_train_batch_end", BATCHES, {}, ACCUMULATE),
    "max_steps": Case("on_train_batch_end", 11, {}, {"max_steps": 19, "max_epochs": -1}),
    "max_steps, epoch end": Case("on_train_epoch_end", 1, {}, {"max_steps": 19, "max_epochs": -1}),
    "max_steps, last batch": Case("on_train_batch_end", 8, {}, {"max_steps": 19, "max_epochs": -1}),
    "max_steps, validation": Case("on_validation_end", 1, VAL, {"max_steps": 19, "max_epochs": -1}),
    "max_steps, epoch end, validation": Case("on_train_epoch_end", 1, VAL, {"max_steps": 19, "max_epochs": -1}),
    "max_steps, last batch, validation": Case("on_train_batch_end", 8, VAL, {"max_steps": 19, "max_epochs": -1}),
    "estimated_stepping_batches": Case("on_train_batch_end", MID, {"estimated": True, "loader": "stateful"}),
    "estimated_stepping_batches, workers": Case("on_train_batch_end", MID, {"estimated": True, "workers": 2}),
    "plateau at epoch end": Case("on_train_epoch_end", 1, PLATEAU),
    "plateau at batch end": Case("on_train_batch_end", 2 * BATCHES, PLATEAU),
    "plateau at validation end": Case("on_validation_end", 3, VAL_PLATEAU, EVERY_3),
    "plateau before validation": Case("on_train_batch_end", 3, VAL_PLATEAU, EVERY_3),
    "two optimizers by hand": Case("on_train_batch_end", MID + 1, {"manual": True}),
    "two optimizers by hand, window closed": Case("on_train_batch_end", BATCHES + 3, {"manual": True}),
    "reload every second epoch": Case("on_train_batch_end", MID, {}, {"reload_dataloaders_every_n_epochs": 2}),
    "reload due": Case("on_train_epoch_end", 2, {"workers": 2}, {"reload_dataloaders_every_n_epochs": 2}),
    **{
        f"reload the same {loader}, batch {batch}": Case(
            "on_train_batch_end",
            batch,
            {"loader": loader, "workers": 2, "keeps_loader": True},
            {"reload_dataloaders_every_n_epochs": 1, "limit_train_batches": 5},
        )
        for loader in ("persistent", "stateful_persistent")
        for batch in (5, 7)
    },
    "limited": Case("on_train_batch_end", 7, {}, {"limit_train_batches": 5}),
    "limited, last batch, workers": Case("on_train_batch_end", 5, {"workers": 2}, {"limit_train_batches": 5}),
    "limited, stateful": Case("on_train_epoch_end", 1, {"loader": "stateful"}, {"limit_train_batches": 5}),
    "limited, persistent": Case(
        "on_train_epoch_end", 1, {"loader": "persistent", "workers": 2}, {"limit_train_batches": 5}
    ),
    "limited, stateful stream": Case(
        "on_train_batch_end", 7, {"loader": "stateful_stream"}, {"limit_train_batches": 5}
    ),
    "limited, stateful stream, last batch": Case(
        "on_train_batch_end",
        5,
        {"loader": "stateful_stream"},
        {"limit_train_batches": 5},
        warns="left before its end",
    ),
    "bf16": Case("on_train_batch_end", MID, {}, {"precision": "bf16-mixed"}),
    "averaged weights": Case("on_train_batch_end", MID, {}, {}, averaging),
    "averaged weights, inside validation": Case("on_validation_batch_end", 4, VAL, {}, averaging),
    "averaged weights, validation end": Case("on_validation_end", 2, VAL, {}, averaging),
}


@pytest.mark.sampled(5)
@pytest.mark.extended_cells(
    "open-window,-workers",
    "open-window-inside-validation",
    "max_steps,-epoch-end",
    "max_steps,-validation",
    "max_steps,-epoch-end,-validation",
    "max_steps,-last-batch,-validation",
    "estimated_stepping_batches,-workers",
    "two-optimizers-by-hand,-window-closed",
    "reload-the-same-persistent,-batch-7",
    "reload-the-same-stateful_persistent,-batch-5",
    "limited,-last-batch,-workers",
    "limited,-stateful-stream",
    "averaged-weights,-inside-validation",
)
@pytest.mark.parametrize("case", FEATURES.values(), ids=[name.replace(" ", "-") for name in FEATURES])
def test_features(case: Case, tmp_path: Path) -> None:
    check(case, tmp_path)


class InterpolatesItsRate(Model):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        for group in optimizer.param_groups:
            group["lr"] = np.interp(self.trainer.global_step, [0, 20], [0.1, 0.01])


def test_a_learning_rate_that_is_a_number_of_numpy(tmp_path: Path) -> None:
    expected, found, said = train_and_resume(Training(InterpolatesItsRate), tmp_path)
    assert not said
    assert found == expected


class LoadsByEpoch(Model):
    """Makes loaders whose length depends on the epoch in which they are made."""

    def train_dataloader(self) -> Any:
        return DataLoader(Samples(4 * (6 + self.current_epoch)), batch_size=4, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(Samples(4 * (2 + self.current_epoch)), batch_size=4)


class LoadsByStep(Model):
    """Makes loaders whose samples depend on the step before which they are made."""

    def _from_here(self, size: int) -> Any:
        return Subset(Samples(64), range(self.trainer.global_step, self.trainer.global_step + size))

    def train_dataloader(self) -> Any:
        return DataLoader(self._from_here(24), batch_size=4, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self._from_here(8), batch_size=4)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("kind", "every", "at"),
    [
        (LoadsByEpoch, 0, ("on_train_batch_end", 9)),
        (LoadsByEpoch, 0, ("on_train_batch_end", 6)),
        (LoadsByEpoch, 2, ("on_train_batch_end", 9)),
        (LoadsByEpoch, 2, ("on_train_epoch_end", 2)),
        (LoadsByEpoch, 2, ("on_train_batch_end", 26)),
        (LoadsByStep, 0, ("on_train_batch_end", 9)),
        (LoadsByStep, 1, ("on_train_batch_end", 9)),
        (LoadsByStep, 2, ("on_validation_batch_end", 5)),
    ],
)
def test_loaders_are_those_of_the_epoch_and_step_in_which_they_were_made(
    kind: Any, every: int, at: tuple[str, int], tmp_path: Path
) -> None:
    settings = {"reload_dataloaders_every_n_epochs": every, "max_epochs": 4}
    expected, found, said = train_and_resume(Training(kind, trainer=settings), tmp_path, at)
    assert not said
    assert found == expected


class Rest:
    """Batches from 24 samples; its length is the number of batches that are left of them."""

    taken = 0

    def __len__(self) -> int:
        return 6 - self.taken % 6

    def __iter__(self) -> Any:
        for _ in range(len(self)):
            self.taken += 1
            yield [(self.taken * 4 + number) % 24 for number in range(4)]


def test_an_epoch_is_as_long_as_when_it_began(tmp_path: Path) -> None:
    class TakesTheRest(Model):
        def train_dataloader(self) -> Any:
            return DataLoader(Samples(24), batch_sampler=Rest())

    expected, found, said = train_and_resume(Training(TakesTheRest), tmp_path, ("on_train_batch_end", 9))
    assert not said
    assert found == expected


class LoadsByChance(Model):
    """Makes its loaders from samples that it draws with its own generator, or with the global one."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.generator = generator

    def _drawn(self, size: int) -> Any:
        return Subset(Samples(64), torch.randperm(64, generator=self.generator)[:size].tolist())

    def train_dataloader(self) -> Any:
        return DataLoader(self._drawn(24), batch_size=4)

    def val_dataloader(self) -> Any:
        return DataLoader(self._drawn(8), batch_size=4)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("has_generator", [True, False])
@pytest.mark.parametrize(
    ("every", "at"),
    [
        (0, ("on_train_batch_end", 9)),
        (1, ("on_train_batch_end", 9)),
        (1, ("on_train_batch_end", 12)),
        (1, ("on_train_epoch_end", 2)),
        (2, ("on_train_batch_end", 9)),
        (1, ("on_validation_batch_end", 3)),
    ],
)
def test_loaders_are_made_by_the_numbers_by_which_they_were_made(
    every: int, at: tuple[str, int], has_generator: bool, tmp_path: Path
) -> None:
    def make() -> LoadsByChance:
        return LoadsByChance(torch.Generator().manual_seed(11) if has_generator else None)

    settings = {"reload_dataloaders_every_n_epochs": every, "max_epochs": 4}
    expected, found, said = train_and_resume(Training(make, trainer=settings), tmp_path, at)
    assert not said
    assert found == expected


class MakesThemAnew(Callback):
    """Makes the loaders once more when the training starts."""

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        trainer.fit_loop._combined_loader = None
        trainer.fit_loop.setup_data()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("settings", "callbacks", "at"),
    [
        ({"num_sanity_val_steps": 2, "check_val_every_n_epoch": 2}, list, ("on_train_batch_end", 9)),
        ({}, lambda: [MakesThemAnew()], ("on_train_batch_end", 9)),
        (
            {"check_val_every_n_epoch": 2},
            lambda: [LearningRateFinder(max_lr=1e-2, num_training_steps=3, update_attr=True)],
            ("on_train_batch_end", 9),
        ),
    ],
    ids=["sanity check", "made anew", "search"],
)
def test_loaders_that_are_made_more_than_once_are_the_last_ones(
    settings: dict[str, Any], callbacks: Any, at: tuple[str, int], tmp_path: Path
) -> None:
    class Searched(LoadsByChance):
        lr = 1e-2

    training = Training(Searched, callbacks=callbacks, trainer={"max_epochs": 4, **settings})
    expected, found, said = train_and_resume(training, tmp_path, at)
    assert not [text for text in said if "training data" in text]
    assert found.rows == expected.rows
    assert found.weights == expected.weights


class MakesBuffers(Model):
    """Registers buffers when it trains, so a new object cannot load them from a checkpoint's state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.strict_loading = False

    def on_train_start(self) -> None:
        self.register_buffer("queue", torch.zeros(4))

    def loss(self, batch: Any) -> torch.Tensor:
        loss = super().loss(batch)
        if not hasattr(self.net, "bank"):
            self.net.register_buffer("bank", torch.ones(()))
        self.net.bank += float(loss)
        self.queue[:] = torch.cat([self.queue[1:], loss.detach().reshape(1)])
        return loss * (1 + self.queue.mean()) / self.net.bank


@pytest.mark.parametrize("at", [("on_train_batch_end", BATCHES + 3), ("on_train_epoch_end", 2)])
def test_buffers_that_training_makes_are_put_back(at: tuple[str, int], tmp_path: Path) -> None:
    expected, found, said = train_and_resume(Training(MakesBuffers), tmp_path, at)
    assert not said
    assert found == expected


class IsLazy(Model):
    """Has a layer whose weights exist from the first step on."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.LazyLinear(1)

    def loss(self, batch: Any) -> torch.Tensor:
        loss = super().loss(batch)
        return loss * (1 + self.scale(loss.detach().reshape(1, 1)).square().sum())


@pytest.mark.parametrize("at", [("on_train_batch_end", 1), ("on_train_batch_end", MID)])
def test_layers_whose_weights_the_first_step_makes(at: tuple[str, int], tmp_path: Path) -> None:
    expected, found, said = train_and_resume(Training(IsLazy), tmp_path, at)
    assert not said
    assert found == expected


class SavesOtherWeights(Model):
    """Saves halved weights instead of its own; with ``is_kept``, saves its own too, and loads those."""

    def __init__(self, is_kept: bool = False) -> None:
        super().__init__()
        self.is_kept = is_kept

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.is_kept:
            checkpoint["trained"] = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name: value / 2 for name, value in checkpoint["state_dict"].items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.is_kept:
            checkpoint["state_dict"] = checkpoint["trained"]


class SavesOtherWeightsOf(Callback):
    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {name: value / 2 for name, value in checkpoint["state_dict"].items()}


@pytest.mark.parametrize("training", [Training(SavesOtherWeights), Training(callbacks=lambda: [SavesOtherWeightsOf()])])
def test_weights_that_a_hook_has_put_in_place_of_others_are_said(training: Training, tmp_path: Path) -> None:
    expected, found, said = train_and_resume(training, tmp_path)
    assert found != expected
    assert "training had other weights than those in the checkpoint" in said[0]


class SavesListsOf(Callback):
    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {name: value.tolist() for name, value in checkpoint["state_dict"].items()}


class ReadsLists(Model):
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {name: torch.tensor(value) for name, value in checkpoint["state_dict"].items()}


@pytest.mark.parametrize(
    "training",
    [Training(lambda: SavesOtherWeights(is_kept=True)), Training(ReadsLists, callbacks=lambda: [SavesListsOf()])],
)
def test_weights_that_a_hook_gives_back_are_exact(training: Training, tmp_path: Path) -> None:
    expected, found, said = train_and_resume(training, tmp_path)
    assert not said
    assert found == expected


class ActsLate(Model):
    """Logs, draws and changes weights in its own hooks, which run after those of all callbacks."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("late", outputs["loss"] + torch.rand(()), on_step=True, on_epoch=True)
        with torch.no_grad():
            self.other.weight.mul_(0.99)

    def on_validation_end(self) -> None:
        with torch.no_grad():
            self.other.weight.add_(torch.rand(()))


@pytest.mark.parametrize(
    "saves", [{"every_n_train_steps": 5}, {"monitor": "val_loss", "save_on_train_epoch_end": False}]
)
def test_a_save_has_what_the_modules_own_hooks_have_done(saves: dict[str, Any], tmp_path: Path) -> None:
    def fit(seed: int, path: Path | None = None) -> tuple[Outcome, ResumableCheckpoint]:
        pl.seed_everything(seed, verbose=False)
        model = ActsLate(VAL)
        callback = ResumableCheckpoint(tmp_path / str(seed), "{step}", save_top_k=-1, recorder=False, **saves)
        trainer = make_trainer(tmp_path, [callback], log_every_n_steps=1)
        trainer.fit(model, ckpt_path=path)
        return outcome(trainer, model), callback

    expected, _ = fit(1)
    path = min((tmp_path / "1").iterdir(), key=lambda path: int(path.stem.partition("=")[2]))
    found, callback = fit(77, path)
    assert callback.resumed is not None
    assert found == expected.after(len(expected.seen) - len(found.seen), len(expected.rows) - len(found.rows))
