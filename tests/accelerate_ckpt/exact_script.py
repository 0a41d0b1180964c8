"""One rank of a training run under Accelerate, for many ways to load data (``exact_cells``), in one process.

``exact_script.py run DIRECTORY CELL...`` trains without interruption and saves at several points;
``exact_script.py resume DIRECTORY CELL...`` resumes from each of these saves and writes down what differs, if anything.
As a script it saves with ``Accelerator.save_state``; the tests that call ``train_all`` use ``LoaderPositions`` alone.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import traceback
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.state import AcceleratorState, GradientState

from accelerate_ckpt import attach
from accelerate_ckpt._data.loaders import LoaderPositions
from ckpt_core.state.gradients import capture_gradients, restore_gradients
from tests.accelerate_ckpt.exact_cells import CELLS, Cell, configuration

EPOCHS = 3


class Run:
    """One training run of a cell.

    Args:
        cell: What to train on.
        directory: Where the ranks keep their checkpoints.
        seed: Seed of the script's generators.
        engine: Whether to save with ``save_state`` of an Accelerator that the plugin is attached to.
    """

    def __init__(self, cell: Cell, directory: Path, seed: int, engine: bool = False) -> None:
        AcceleratorState._reset_state()
        GradientState._reset_state()
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        self.cell, self.directory = cell, directory
        self.accelerator = Accelerator(
            cpu=True, dataloader_config=configuration(cell), gradient_accumulation_steps=cell.accumulate
        )
        self.warned: list[str] = []
        self.engine = engine
        if engine:
            attach(self.accelerator, strategy="async")
        else:
            self.positions = LoaderPositions(self.accelerator, warn=self.warned.append)
        hidden = cell.hidden
        model = torch.nn.Sequential(
            torch.nn.Linear(4, hidden),
            torch.nn.BatchNorm1d(hidden),
            torch.nn.Dropout(0.3),
            *([torch.nn.Linear(hidden, hidden)] * (hidden > 8)),
            torch.nn.Linear(hidden, 1),
        )
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        self.loaders = self.accelerator.prepare(*cell.loader(seed), None)[:-1]
        self.model = model
        if not cell.local:
            self.model, self.optimizer = self.accelerator.prepare(model, self.optimizer)
        self.bare = model
        self.log: list[Any] = []
        self.step = 0
        self.ends: list[Any] = []  # the step and the result at the end of each epoch

    # ---- the checkpoint ----------------------------------------------------------------------------------------------

    def path(self, name: str) -> Path:
        return self.directory / f"{name}-{self.accelerator.process_index}.pt"

    def save(self, name: str) -> None:
        if self.engine:
            self.accelerator.save_state(str(self.directory / name))
            torch.save(self.step, self.path(name))
            return
        state = {
            "model": self.bare.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "gradients": capture_gradients(self.bare.named_parameters()),
            "data": self.positions.capture(),
            "step": self.step,
        }
        torch.save(state, self.path(name))

    def load(self, name: str) -> None:
        state = torch.load(self.path(name), weights_only=True)
        if self.engine:
            self.accelerator.load_state(str(self.directory / name))
            self.step = state
            return
        self.bare.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        restore_gradients(self.bare.named_parameters(), state["gradients"])
        self.step = state["step"]
        self.positions.restore(state["data"], saved_world_size=self.accelerator.num_processes)

    # ---- the script --------------------------------------------------------------------------------------------------

    def train(self, total: int | None, save_at: tuple[tuple[int, int], ...] = (), resumed: bool = False) -> None:
        loader, cell = self.loaders[0], self.cell
        start, skip = 0, 0
        if cell.style == "skip" and resumed:
            start, skip = divmod(self.step, len(loader))
        for epoch in itertools.count(start):
            if total is None and epoch == EPOCHS:
                return
            active = loader
            if cell.style == "skip":
                loader.set_epoch(epoch)
                if resumed and epoch == start:
                    ways = (self.accelerator.skip_first_batches, accelerate.skip_first_batches, skip_first_batches)
                    active = ways[self.step % 3](loader, skip)
            batches = zip(active, self.loaders[1], strict=False) if cell.together else active
            index = 0
            for index, batch in enumerate(batches, 1):
                # a variable would keep the iteration of the longer loader open
                batches = None
                self._batch(batch)
                if (epoch, index) in save_at:
                    self.save(f"{epoch}.{index}")
            assert index > 0 or cell.local, f"nothing was left of epoch {epoch}"
            if cell.evaluate:
                with torch.no_grad():
                    for indices, _ in self.loaders[1]:
                        self.log.append((indices.tolist(), float(torch.rand(()))))
            if total is None:
                self.save(f"{epoch}.after")
                self.ends.append((self.step, self.result()))
            elif self.step >= total:
                return

    def _batch(self, batch: Any) -> None:
        other: list[int] = []
        if self.cell.together:
            batch, (others, _) = batch
            other = others.tolist()
        indices, values = batch
        if self.loaders[0].generator is not None:
            # the script shares this generator with its loader
            values = values + torch.rand((), generator=self.loaders[0].generator)
        if self.cell.local:
            loss = self.model(values).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        else:
            with self.accelerator.accumulate(self.model):
                loss = self.model(values).square().mean() + 0 * indices.sum()
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
        self.step += 1
        self.log.append((indices.tolist(), other, loss.item()))

    def result(self) -> dict[str, Any]:
        return {
            "log": [*self.log],
            "parameters": {name: value.clone() for name, value in self.bare.state_dict().items()},
            "moments": [
                {key: value.clone() for key, value in state.items()}
                for state in getattr(self.optimizer, "optimizer", self.optimizer).state.values()
            ],
            "rng": torch.get_rng_state(),
            "remainders": self.accelerator.gradient_state.remainder,
        }


def points(cell: Cell, run: Run) -> tuple[tuple[int, int], ...]:
    """Return the epochs and batches to save at: the first, last but one and last, and the first of the next epoch."""
    together = run.loaders if cell.together else run.loaders[:1]
    length = sum(1 for _ in zip(*together, strict=False))
    if cell.local:
        # all ranks save together, so not in a batch that some ranks do not have
        length = int(accelerate.utils.gather_object([length])[-1])
    return tuple(dict.fromkeys(((0, 1), (0, length - 1), (0, length), (1, 1))))


def run(directory: Path, name: str, engine: bool) -> dict[str, Any]:
    cell = CELLS[name]
    folder = directory / name
    folder.mkdir(parents=True, exist_ok=True)
    counted = Run(cell, folder, 1)
    save_at = points(cell, counted)
    counted.positions.release()
    undisturbed = Run(cell, folder, 1)
    undisturbed.positions.release()
    undisturbed.train(None)
    first = Run(cell, folder, 1, engine)
    first.train(None, save_at)
    torch.save({"ends": first.ends, "points": save_at}, first.path("end"))
    return {"first": difference(undisturbed.result(), first.result(), 0)}


def resume(directory: Path, name: str, engine: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    probe = Run(CELLS[name], directory / name, 2)
    end = torch.load(probe.path("end"), weights_only=False)
    names = [f"{epoch}.{index}" for epoch, index in end["points"]] + ["0.after"]
    if CELLS[name].evaluate or CELLS[name].together:
        # a script that resumes with the next epoch skips what it would have done at the end of this one
        names.remove("{}.{}".format(*end["points"][-2]))
    for point in names:
        again = Run(CELLS[name], directory / name, 2, engine)
        again.load(point)
        total, expected = end["ends"][int(point.partition(".")[0]) + 1]  # the end of the next epoch
        again.train(total, resumed=True)
        found[point] = difference(expected, again.result(), len(expected["log"]) - len(again.log))
        if again.warned:
            found[f"warned at {point}"] = "; ".join(again.warned)
    return found


def difference(expected: dict[str, Any], got: dict[str, Any], begun: int) -> str:
    """Return what is not equal bit for bit, or an empty string."""
    for number, (left, right) in enumerate(zip(expected["log"][begun:], got["log"], strict=True)):
        if left != right:
            return f"entry {number} of {len(got['log'])}: {left} became {right}"
    for name, value in expected["parameters"].items():
        if not torch.equal(value, got["parameters"][name]):
            return f"parameter {name} differs"
    for left, right in zip(expected["moments"], got["moments"], strict=True):
        if any(not torch.equal(left[key], right[key]) for key in left):
            return "the optimizer differs"
    if not torch.equal(expected["rng"], got["rng"]):
        return "the random generator differs"
    return ""


def train_all(mode: str, directory: Path, names: list[str], engine: bool = False) -> dict[str, dict[str, Any]]:
    """Run or resume each cell, as ``mode`` says; return for each what was not equal bit for bit."""
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        try:
            found[name] = {"run": run, "resume": resume}[mode](directory, name, engine)
        except Exception:  # noqa: BLE001 - told to the test, and the other cells go on
            found[name] = {"error": traceback.format_exc()}
    return found


def main() -> None:
    mode, directory, *names = sys.argv[1:]
    rank = Accelerator(cpu=True).process_index
    (Path(directory) / f"{mode}-{rank}.json").write_text(
        json.dumps(train_all(mode, Path(directory), names, engine=True))
    )


if __name__ == "__main__":
    main()
