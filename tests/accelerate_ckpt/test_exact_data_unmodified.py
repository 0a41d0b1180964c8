"""Unmodified scripts resume in their own ways, bit for bit like runs that were not interrupted."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader, Dataset

from accelerate_ckpt import attach

pytestmark = pytest.mark.usefixtures("fresh_accelerate")

BATCHES = 6
EPOCHS = 3


class Numbered(Dataset[torch.Tensor]):
    """A data set of numbers."""

    def __len__(self) -> int:
        return 2 * BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index))


class KilledError(Exception):
    """Raised where the simulated process is killed."""


class Progress:
    """The epoch and batch that a script registers as its progress."""

    def __init__(self) -> None:
        self.epoch = self.batch = 0

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class Process:
    """A simulated process with the prepared objects of a script, killed after some optimizer steps.

    Args:
        directory: Directory of the checkpoints.
        resumed: Whether to resume from the newest checkpoint.
        save_at: Optimizer steps after which it saves.
        stop: Number of optimizer steps after which it is killed.
        accumulate: Number of batches per optimizer step.
    """

    def __init__(
        self,
        directory: Path,
        *,
        resumed: bool = False,
        save_at: tuple[int, ...] = (),
        stop: int | None = None,
        accumulate: int = 1,
        config: dict[str, Any] | None = None,
        workers: int = 0,
    ) -> None:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        torch.manual_seed(7 if resumed else 1)
        self.directory, self.resumed, self.save_at, self.stop = directory, resumed, save_at, stop
        self.accumulate, self.workers = accumulate, workers
        self.accelerator = attach(
            Accelerator(
                gradient_accumulation_steps=accumulate, dataloader_config=DataLoaderConfiguration(**(config or {}))
            ),
            "sync",
        )
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        self.model, self.optimizer = self.accelerator.prepare(model, self.optimizer)
        self.progress = Progress()
        self.accelerator.register_for_checkpointing(self.progress)
        self.step = 0
        self.log: list[Any] = []

    def loader(self) -> Any:
        return self.accelerator.prepare(DataLoader(Numbered(), batch_size=2, shuffle=True, num_workers=self.workers))

    def evaluation(self) -> Any:
        return self.accelerator.prepare(DataLoader(Numbered(), batch_size=4))

    def load(self) -> int:
        """Load the newest checkpoint if this process resumes; return the number of optimizer steps done."""
        if self.resumed:
            self.step = max(int(path.name) for path in self.directory.iterdir() if path.name.isdigit())
            self.accelerator.load_state(str(self.directory / str(self.step)))
        return self.step

    def train(self, *batches: torch.Tensor, save: bool = True) -> None:
        with self.accelerator.accumulate(self.model):
            loss = sum(self.model(batch / 10).square().mean() for batch in batches)
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.log.append(([batch[:, 0].tolist() for batch in batches], loss.item()))
        if self.accelerator.sync_gradients:
            self.step += 1
            if save:
                self.save()

    def save(self) -> None:
        if self.step in self.save_at:
            self.accelerator.save_state(str(self.directory / str(self.step)))
        if self.step == self.stop:
            raise KilledError

    def result(self) -> tuple[Any, ...]:
        weights = [value.tolist() for value in self.model.parameters()]
        return self.log, weights, torch.get_rng_state().tolist()


Script = Callable[[Process], None]


def interrupted(script: Script, directory: Path, saved: int, **options: Any) -> tuple[Process, Process]:
    """Run a script to its end, and again with a kill in between; return the whole process and the resumed one."""
    whole = Process(directory, **options)
    script(whole)
    with pytest.raises(KilledError):
        script(Process(directory, save_at=(saved,), stop=saved + 1, **options))
    resumed = Process(directory, resumed=True, **options)
    script(resumed)
    return whole, resumed


def assert_exact(whole: Process, resumed: Process) -> None:
    log, weights, rng = whole.result()
    log_again, weights_again, rng_again = resumed.result()
    assert log_again == log[len(log) - len(log_again) :]
    assert (weights, rng) == (weights_again, rng_again)
    assert resumed.step == whole.step


# ---- the ways --------------------------------------------------------------------------------------------------------


def by_continue(process: Process) -> None:
    loader = process.loader()
    first, skip = divmod(process.load() * process.accumulate, len(loader))
    for epoch in range(first, EPOCHS):
        for step, batch in enumerate(loader):
            if process.resumed and epoch == first and step < skip:
                continue
            process.train(batch)


def by_continue_in_accumulate(process: Process) -> None:
    loader = process.loader()
    first, skip = divmod(process.load() * process.accumulate, len(loader))
    for epoch in range(first, EPOCHS):
        for step, batch in enumerate(loader):
            with process.accelerator.accumulate(process.model):
                if process.resumed and epoch == first and step < skip:
                    continue
            process.accelerator.step -= 1
            process.train(batch)


def by_skip_first_batches(process: Process) -> None:
    loader = process.loader()
    first, skip = divmod(process.load() * process.accumulate, len(loader))
    for epoch in range(first, EPOCHS):
        left = process.accelerator.skip_first_batches(loader, skip) if process.resumed and epoch == first else loader
        for batch in left:
            process.train(batch)


def by_nothing(process: Process) -> None:
    loader = process.loader()
    for _ in range(process.load() * process.accumulate // len(loader), EPOCHS):
        for batch in loader:
            process.train(batch)


def by_next(process: Process) -> None:
    loader = process.loader()
    first, skip = divmod(process.load() * process.accumulate, len(loader))
    for epoch in range(first, EPOCHS):
        batches = iter(loader)
        if process.resumed and epoch == first:
            for _ in range(skip):
                next(batches)
        for batch in batches:
            process.train(batch)


def by_islice(process: Process) -> None:
    loader = process.loader()
    first, skip = divmod(process.load() * process.accumulate, len(loader))
    for epoch in range(first, EPOCHS):
        for batch in itertools.islice(loader, skip if process.resumed and epoch == first else 0, None):
            process.train(batch)


def by_counting(process: Process) -> None:
    loader = process.loader()
    done = process.load() * process.accumulate
    seen = done // len(loader) * len(loader)
    batches = iter(loader)
    while seen < EPOCHS * len(loader):
        try:
            batch = next(batches)
        except StopIteration:
            batches = iter(loader)
            continue
        seen += 1
        if seen > done:
            process.train(batch)


def by_stored_progress(process: Process) -> None:
    """Store the epoch and the number of its batches that are done, which in the last batch is all of them."""
    loader, progress = process.loader(), process.progress
    process.load()
    first, done = progress.epoch, progress.batch
    for epoch in range(first, EPOCHS):
        for step, batch in enumerate(loader):
            if process.resumed and epoch == first and step < done:
                continue
            progress.epoch, progress.batch = epoch, step + 1
            process.train(batch)


def by_stored_progress_and_skip_first_batches(process: Process) -> None:
    loader, progress = process.loader(), process.progress
    process.load()
    first, done = progress.epoch, progress.batch
    for epoch in range(first, EPOCHS):
        resuming = process.resumed and epoch == first
        left = process.accelerator.skip_first_batches(loader, done) if resuming else loader
        for step, batch in enumerate(left, done if resuming else 0):
            progress.epoch, progress.batch = epoch, step + 1
            process.train(batch)


def by_the_index_of_the_last_batch(process: Process) -> None:
    """Store the index of the batch in whose body it saves, and train on that batch again."""
    loader, progress = process.loader(), process.progress
    process.load()
    first, done = progress.epoch, progress.batch
    for epoch in range(first, EPOCHS):
        for step, batch in enumerate(loader):
            if process.resumed and epoch == first and step < done:
                continue
            progress.epoch, progress.batch = epoch, step
            process.train(batch)


def with_a_look_at_a_batch(process: Process) -> None:
    loader = process.loader()
    first = process.load() * process.accumulate // len(loader)
    if process.resumed:
        assert next(iter(loader)).shape == (2, 4)
    for _ in range(first, EPOCHS):
        for batch in loader:
            process.train(batch)


def by_a_loop_of_its_own(process: Process) -> None:
    loader = process.loader()
    first, skip = divmod(process.load() * process.accumulate, len(loader))
    for epoch in range(first, EPOCHS):
        if process.resumed and epoch == first and skip:
            for step, _ in enumerate(loader, 1):
                if step == skip:
                    break
        for batch in loader:
            process.train(batch)


def two_at_a_time(process: Process) -> None:
    loader = process.loader()
    for _ in range(process.load() * 2 // len(loader), EPOCHS):
        batches = iter(loader)
        for batch in batches:
            process.train(batch, next(batches))


def two_at_a_time_by_next(process: Process) -> None:
    loader = process.loader()
    first, skip = divmod(process.load() * 2, len(loader))
    for epoch in range(first, EPOCHS):
        batches = iter(loader)
        for _ in range(skip if process.resumed and epoch == first else 0):
            next(batches)
        for batch in batches:
            process.train(batch, next(batches))


def with_a_filter(process: Process) -> None:
    loader = process.loader()
    process.load()
    while process.step < 12:
        for batch in loader:
            if 3 in batch or 8 in batch or 9 in batch:
                continue
            process.train(batch)
            if process.step == 12:
                break


def with_a_random_filter(process: Process) -> None:
    loader = process.loader()
    process.load()
    while process.step < 9:
        for batch in loader:
            if torch.rand(()) < 0.5:
                continue
            process.train(batch)
            if process.step == 9:
                break


def with_two_loaders(process: Process) -> None:
    one, other = process.loader(), process.loader()
    first, skip = divmod(process.load(), len(one))
    for epoch in range(first, EPOCHS):
        for step, batches in enumerate(zip(one, other, strict=True)):
            if process.resumed and epoch == first and step < skip:
                continue
            process.train(*batches)


def with_an_endless_iterator(process: Process) -> None:
    loader = process.loader()

    def cycle() -> Iterator[torch.Tensor]:
        while True:
            yield from loader

    batches = cycle()
    process.load()
    while process.step < EPOCHS * BATCHES:
        process.train(next(batches))


def with_a_loss_that_is_nan(process: Process) -> None:
    loader = process.loader()
    process.load()
    while process.step < 12:
        for batch in loader:
            loss = process.model(batch)
            if 3 in batch or torch.isnan(loss).any():
                continue
            process.train(batch)
            if process.step == 12:
                break


def with_its_own_backward(process: Process) -> None:
    loader = process.loader()
    first, skip = divmod(process.load(), len(loader))
    for epoch in range(first, EPOCHS):
        for step, batch in enumerate(loader):
            if process.resumed and epoch == first and step < skip:
                continue
            process.model(batch / 10).square().mean().backward()
            process.optimizer.step()
            process.optimizer.zero_grad()
            process.log.append(batch[:, 0].tolist())
            process.step += 1
            process.save()


def with_a_loader_for_each_epoch(process: Process) -> None:
    first, skip = divmod(process.load(), BATCHES)
    for epoch in range(first, EPOCHS):
        torch.manual_seed(epoch)
        loader, evaluation = process.loader(), process.evaluation()
        left = process.accelerator.skip_first_batches(loader, skip) if process.resumed and epoch == first else loader
        for batch in left:
            process.train(batch)
        process.log.append([batch.tolist() for batch in evaluation])


def with_a_loader_for_each_epoch_and_one_to_evaluate(process: Process) -> None:
    evaluation = process.evaluation()
    first, skip = divmod(process.load(), BATCHES)
    for epoch in range(first, EPOCHS):
        torch.manual_seed(epoch)
        loader = process.loader()
        for step, batch in enumerate(loader):
            if process.resumed and epoch == first and step < skip:
                continue
            process.train(batch)
        process.log.append([batch.tolist() for batch in evaluation])


ONE_LOADER = [by_continue, by_skip_first_batches, by_nothing, by_next, by_islice, by_counting]
IN_THE_MIDDLE = [
    *ONE_LOADER,
    by_continue_in_accumulate,
    by_stored_progress,
    by_stored_progress_and_skip_first_batches,
    by_the_index_of_the_last_batch,
    with_a_look_at_a_batch,
    by_a_loop_of_its_own,
    with_a_filter,
    with_a_random_filter,
    with_two_loaders,
    with_an_endless_iterator,
    with_a_loss_that_is_nan,
    with_its_own_backward,
    with_a_loader_for_each_epoch,
    with_a_loader_for_each_epoch_and_one_to_evaluate,
]


@pytest.mark.sampled(7)
@pytest.mark.parametrize("saved", [1, 5, 8])
@pytest.mark.parametrize("script", IN_THE_MIDDLE, ids=lambda script: script.__name__)
def test_saved_in_the_middle_of_an_epoch(script: Script, saved: int, tmp_path: Path) -> None:
    assert_exact(*interrupted(script, tmp_path, saved))


@pytest.mark.each_value
@pytest.mark.parametrize("saved", [1, 2, 4, 5])
@pytest.mark.parametrize("script", [two_at_a_time, two_at_a_time_by_next], ids=lambda script: script.__name__)
def test_several_batches_for_a_step(script: Script, saved: int, tmp_path: Path) -> None:
    assert_exact(*interrupted(script, tmp_path, saved))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "script",
    [*ONE_LOADER, by_stored_progress, by_stored_progress_and_skip_first_batches],
    ids=lambda script: script.__name__,
)
def test_saved_in_the_last_batch_of_an_epoch(script: Script, tmp_path: Path) -> None:
    assert_exact(*interrupted(script, tmp_path, BATCHES))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "options",
    [
        {"accumulate": 2},
        {"workers": 2},
        {"config": {"dispatch_batches": True}},
        {"config": {"use_stateful_dataloader": True}},
        {"config": {"use_seedable_sampler": True}},
    ],
    ids=str,
)
@pytest.mark.parametrize("script", [by_continue, two_at_a_time_by_next], ids=lambda script: script.__name__)
def test_with_other_loaders(script: Script, options: dict[str, Any], tmp_path: Path) -> None:
    if script is two_at_a_time_by_next and "accumulate" in options:
        pytest.skip("it takes two at a time already")
    assert_exact(*interrupted(script, tmp_path, 2, **options))


def test_another_number_than_the_checkpoints_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert_exact(*interrupted(by_the_index_of_the_last_batch, tmp_path, 4))
    assert "took 3 batches that it did not use, but the checkpoint was saved after 4: resumed after 4" in caplog.text


def test_an_evaluation_after_a_save_at_the_end_of_an_epoch_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said = {}
    for evaluates in (True, False):
        process = Process(tmp_path / str(evaluates), save_at=(BATCHES, 2 * BATCHES))
        loader, evaluation = process.loader(), process.evaluation()
        caplog.clear()
        for _ in range(EPOCHS):
            for batch in loader:
                process.train(batch)
            for batch in evaluation if evaluates else ():
                assert batch.shape == (4, 4)
        said[evaluates] = caplog.text.count("save after the evaluation")
    assert said == {True: 1, False: 0}


@pytest.mark.parametrize("at_the_end", [True, False])
def test_a_save_before_the_batch_is_used_is_said(
    at_the_end: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    process = Process(tmp_path)
    for number, batch in enumerate(process.loader()):
        if at_the_end:
            process.train(batch)
        process.accelerator.save_state(str(tmp_path / str(number)))
        if not at_the_end:
            process.train(batch)
    assert caplog.text.count("before it used it") == (0 if at_the_end else 1)


# ---- loads in a process that has trained -----------------------------------------------------------------------------


@pytest.mark.parametrize("at", [3, 4])
def test_a_load_in_the_middle_of_a_loop_leaves_the_data_where_it_is(
    at: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    process = Process(tmp_path, save_at=(3,))
    loader = process.loader()
    for epoch in range(3):
        given = []
        for step, batch in enumerate(loader):
            given += batch[:, 0].int().tolist()
            process.train(batch)
            if (epoch, step) == (0, at):
                process.accelerator.load_state(str(tmp_path / "3"))
        assert sorted(given) == list(range(2 * BATCHES))
    assert "; loaders stay where they are, because this process has trained" in caplog.text


def test_the_best_state_for_a_second_stage_begins_its_epochs_at_the_beginning(tmp_path: Path) -> None:
    process = Process(tmp_path, save_at=(3,))
    loader, evaluation = process.loader(), process.evaluation()
    for batch in loader:
        process.train(batch)
    process.accelerator.load_state(str(tmp_path / "3"))
    assert sum(len(batch) for batch in evaluation) == 2 * BATCHES
    for _ in range(2):
        given = [number for batch in loader for number in batch[:, 0].int().tolist()]
        assert sorted(given) == list(range(2 * BATCHES))


def test_a_script_that_starts_again_in_the_same_process_says_so_by_skipping(tmp_path: Path) -> None:
    process = Process(tmp_path, save_at=(3,))
    loader = process.loader()
    for batch in loader:
        process.train(batch)
    expected, process.log = process.log[3:], []
    process.accelerator.load_state(str(tmp_path / "3"))
    for batch in process.accelerator.skip_first_batches(loader, 3):
        process.train(batch)
    assert process.log == expected


def test_loaded_twice_the_last_one_counts(tmp_path: Path) -> None:
    with pytest.raises(KilledError):
        by_nothing(Process(tmp_path, save_at=(2, 4), stop=5))
    whole = Process(tmp_path)
    by_nothing(whole)
    resumed = Process(tmp_path)
    loader = resumed.loader()
    for name in ("2", "4"):
        resumed.accelerator.load_state(str(tmp_path / name))
    for batch in loader:
        resumed.train(batch)
    assert resumed.log == whole.log[4:BATCHES]


# ---- for real --------------------------------------------------------------------------------------------------------

SKIPS_BY_CONTINUE = """
import os, signal, sys
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

directory, mode = sys.argv[1:]
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
set_seed(2 if mode == "resume" else 1)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
torch.manual_seed(3 if mode == "resume" else 1)
for parameter in model.parameters():
    torch.nn.init.normal_(parameter)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = torch.arange(48.0).view(12, 4) / 48
loader = torch.utils.data.DataLoader(data, batch_size=1, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
global_step = first_epoch = resume_step = 0
if mode == "resume":
    newest = max(os.listdir(directory), key=lambda name: int(name.split("-")[1]))
    accelerator.load_state(os.path.join(directory, newest))
    global_step = int(newest.split("-")[1])
    first_epoch, resume_step = divmod(global_step * 2, len(loader))
for epoch in range(first_epoch, 3):
    for step, batch in enumerate(loader):
        if mode == "resume" and epoch == first_epoch and step < resume_step:
            continue
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            global_step += 1
            if global_step in (4, 8):
                accelerator.save_state(os.path.join(directory, f"checkpoint-{global_step}"))
            if mode == "kill" and global_step == 9:
                os.kill(os.getpid(), signal.SIGKILL)
print(global_step, [value.hex() for parameter in model.parameters() for value in parameter.flatten().tolist()])
accelerator.end_training()
"""


@pytest.mark.slow
def test_killed_and_resumed_for_real(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SKIPS_BY_CONTINUE)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}

    def run(mode: str, *flags: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *flags, str(script), str(tmp_path / ("stock" if mode == "whole" else "ours")), mode]
        return subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=240)

    stock = run("whole")
    assert stock.stdout.startswith("18 ["), stock.stderr
    ours = ("-m", "accelerate_ckpt", "--strategy", "async")
    assert run("kill", *ours).returncode == -signal.SIGKILL
    resumed = run("resume", *ours)
    assert resumed.stdout == stock.stdout, resumed.stderr
