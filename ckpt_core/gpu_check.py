"""``python -m ckpt_core.gpu_check``: benchmark what saves cost a training on this machine's accelerator.

It trains a small model with AdamW, without saves and with saves of each kind, and loads one checkpoint. In a clone of
the repository, it first runs the tests that need an accelerator. It prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from ckpt_core import tree
from ckpt_core._devices.measuring import device_to_check, peak_bytes, pinned_copy_rate
from ckpt_core._devices.streams import wait_for_devices
from ckpt_core.checkpointer import Checkpointer
from ckpt_core.directory import DirectoryCheckpointer, Kind, Part

__all__ = ["Contender", "main"]

_LAYERS = 8
_COPIED = 256 * 2**20  # bytes copied to measure the speed of a pinned copy
_MIB = 2**20
_ON_DEVICES = re.compile(r"accelerator: Accelerator|mark\.gpu")  # in the source of test files that can run on a GPU
_SOME_PASSES = 5  # forward and backward passes, to measure how long one takes
_LONGEST_STEP = 1000  # maximum forward and backward passes in a step


class Contender:
    """One way of saving, measured in one row of the table."""

    def __init__(self, name: str) -> None:
        self.name = name

    def save(self, state: dict[str, Any], path: str) -> None:
        """Begin a save; the caller then continues to train, and calls :meth:`before_step` before its next step."""
        raise NotImplementedError

    def before_step(self) -> None:
        """Block until the optimizer may change the state."""

    def finish(self) -> None:
        """Block until all saves have ended."""

    def close(self) -> None:
        """Free the resources that are kept between saves."""


class _Ours(Contender):
    def __init__(self, name: str, checkpointer: Checkpointer | DirectoryCheckpointer) -> None:
        super().__init__(name)
        self._checkpointer = checkpointer

    def save(self, state: dict[str, Any], path: str) -> None:
        if isinstance(self._checkpointer, Checkpointer):
            self._checkpointer.save(state, path)
        else:
            self._checkpointer.save([Part(name, value, Kind.SHARDED) for name, value in state.items()], path)

    def finish(self) -> None:
        self._checkpointer.wait()

    def close(self) -> None:
        self._checkpointer.close()


class _Dcp(Contender):
    """torch's own asynchronous saves, one at a time; its stager pins memory and copies while training continues."""

    def __init__(self, name: str, *, stages: bool) -> None:
        super().__init__(name)
        self._options: dict[str, Any] = {}
        self._under_way: Any = None
        if stages:
            from torch.distributed.checkpoint import staging

            self._options = {"async_stager": staging.DefaultStager(staging.StagingOptions())}

    def save(self, state: dict[str, Any], path: str) -> None:
        from torch.distributed.checkpoint.state_dict_saver import async_save

        self.finish()
        self._under_way = async_save(state, checkpoint_id=path, no_dist=True, **self._options)

    def before_step(self) -> None:
        if hasattr(self._under_way, "staging_completion"):
            self._under_way.staging_completion.result()

    def finish(self) -> None:
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            getattr(under_way, "upload_completion", under_way).result()

    def close(self) -> None:
        for stager in self._options.values():
            stager.close()


#: Creates the contender of each row of the table.
CONTENDERS: tuple[Callable[[], Contender], ...] = (
    lambda: _Ours("async, overlap=True", Checkpointer(overlap=True)),
    lambda: _Ours("sharded, overlap=True", DirectoryCheckpointer(overlap=True)),
    lambda: _Ours("async", Checkpointer()),
    lambda: _Ours("sharded", DirectoryCheckpointer()),
    lambda: _Dcp("DCP async_save", stages=False),
    lambda: _Dcp("DCP async_save, DefaultStager", stages=True),
)


class _Training:
    """A model of linear layers and AdamW, with a state of about ``nbytes`` bytes."""

    def __init__(self, device: torch.device, nbytes: int, batch: int) -> None:
        width = max(8, round((nbytes / (3 * 4 * _LAYERS)) ** 0.5))
        layers = [torch.nn.Linear(width, width) for _ in range(_LAYERS)]
        self.model = torch.nn.Sequential(*layers).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        self.passes = 1  # forward and backward passes before each step of the optimizer
        self._batch = torch.randn(batch, width).to(device)

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def nbytes(self) -> int:
        return sum(tensor.nbytes for _, tensor in tree.tensors(self.state()))

    def run(self, steps: int, *, every: int = 0, save: Contender | None = None, path: str = "") -> _Measured:
        """Train for some steps; wait for the device after each, as a script that logs the loss does."""
        stalls = []
        wait_for_devices([self._batch])
        begin = time.perf_counter()
        for step in range(1, steps + 1):
            for _ in range(self.passes):
                self.model(self._batch).square().mean().backward()
            if save is not None:
                save.before_step()
            self.optimizer.step()
            self.optimizer.zero_grad()
            wait_for_devices([self._batch])
            if save is not None and step % every == 0:
                stopped = time.perf_counter()
                save.save(self.state(), path)
                stalls.append(time.perf_counter() - stopped)
        wait_for_devices([self._batch])
        return time.perf_counter() - begin, stalls


_Measured = tuple[float, list[float]]  # seconds of all steps together, and of each save


def _measure_row(
    training: _Training, device: torch.device, options: argparse.Namespace, alone: float, saves: Contender
) -> list[str]:
    path = os.path.join(options.path, "saved")
    training.run(1, every=1, save=saves, path=path)  # the first save allocates and pins memory
    training.run(1, every=2, save=saves)
    saves.finish()
    begin = time.perf_counter()
    saves.save(training.state(), path)
    saves.before_step()
    saves.finish()
    whole = time.perf_counter() - begin
    peak_bytes(device, reset=True)
    training.run(2)
    before = peak_bytes(device, reset=True)
    seconds, stalls = training.run(options.steps, every=options.every, save=saves, path=path)
    after = peak_bytes(device)
    extra = "-" if before is None or after is None else f"{(after - before) / _MIB:.0f} MiB"
    slower = f"{seconds / alone - 1:+.1%}".replace("%", " %")
    return [f"{statistics.median(stalls) * 1000:.1f} ms", slower, f"{whole:.2f} s", extra]


def _row(
    training: _Training,
    device: torch.device,
    options: argparse.Namespace,
    alone: float,
    make: Callable[[], Contender],
) -> list[str]:
    with contextlib.ExitStack() as after:
        name = ""
        try:
            saves = make()
            name = saves.name
            after.callback(saves.close)
            after.callback(saves.finish)
            row = [name, *_measure_row(training, device, options, alone, saves)]
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001 - DCP's CheckpointException is no Exception; the other rows count
            after.pop_all()
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
            row = [f"{name}: {type(error).__name__}", "-", "-", "-", "-"]
    shutil.rmtree(options.path)  # some contenders write files, and others directories
    os.mkdir(options.path)
    return row


def _load(training: _Training, device: torch.device, path: str) -> tuple[float, bool]:
    """Save while training continues, and load; return the seconds, and whether the load equals the saved state."""
    with Checkpointer(overlap=True) as ours:
        training.run(1)  # so that the checkpointer sees the optimizer
        ours.save(training.state(), path)
        kept = {name: tensor.clone() for name, tensor in tree.tensors(training.state())}
        training.run(2)
        ours.wait()
        wait_for_devices(kept.values())
        begin = time.perf_counter()
        loaded = ours.load(path, map_location=device)
        wait_for_devices(kept.values())
        seconds = time.perf_counter() - begin
    found = dict(tree.tensors(loaded))
    is_equal = found.keys() == kept.keys() and all(torch.equal(found[name], kept[name].to(device)) for name in kept)
    return seconds, is_equal


def measure(
    options: argparse.Namespace, device: torch.device, name: str, contenders: Iterable[Callable[[], Contender]]
) -> bool:
    """Print the table; return whether a checkpoint that was saved during training equals the state at its save."""
    training = _Training(device, int(options.gigabytes * 1e9), options.batch)
    training.run(2)
    one, _ = training.run(1)
    training.passes = _SOME_PASSES
    more, _ = training.run(1)
    each = max((more - one) / (_SOME_PASSES - 1), 1e-6)
    training.passes = max(1, min(_LONGEST_STEP, 1 + round((options.step_ms / 1000 - one) / each)))
    training.run(2)
    alone, _ = training.run(options.steps)
    size, rate = training.nbytes(), pinned_copy_rate(device, min(_COPIED, training.nbytes()))
    print(f"{name}, torch {torch.__version__}, {size / 1e9:.2f} GB of weights and moments, ", end="")
    print(f"a save every {options.every} steps of {alone / options.steps * 1000:.0f} ms\n")
    header = ["saves", "stall", "training slower", "saved after", "extra device memory"]
    for row in (header, ["---"] * len(header)):
        print("| " + " | ".join(row) + " |")
    stalls = {}
    for make in contenders:
        row = _row(training, device, options, alone, make)
        stalls[row[0]] = row[1]
        print("| " + " | ".join(row) + " |", flush=True)
    again, _ = training.run(options.steps)
    print(
        f"\nTraining without saves, once more at the end: {again / alone - 1:+.1%} (what a difference has to exceed)."
    )
    stall = float(stalls.get("async", "nan").removesuffix(" ms")) / 1000
    print(f"Pinned copy: {rate / 1e9:.2f} GB/s; the stall of async is one at {size / stall / rate:.2f} of that rate.")
    loaded, is_equal = _load(training, device, os.path.join(options.path, "saved"))
    print(f"Load to the device, verified: {loaded:.2f} s, {size / loaded / 1e9:.2f} GB/s; ", end="")
    print("bit for bit the state of the save." if is_equal else "NOT the state of the save: please report this.")
    return is_equal


def _run_tests(tests: Path) -> bool:
    """Run the tests that need an accelerator; print pytest's last line and all failures; return whether all passed."""
    # Only those: the other test files may import packages that are not installed here.
    files = [path for path in sorted(tests.rglob("test_*.py")) if _ON_DEVICES.search(path.read_text(encoding="utf-8"))]
    options = ["-q", "-m", "gpu", "-p", "no:cacheprovider", "--tb=short"]
    command = [sys.executable, "-m", "pytest", *options, *map(str, files)]
    done = subprocess.run(command, cwd=tests.parent, capture_output=True, text=True, check=False)
    lines = (done.stdout + done.stderr).strip().splitlines() or [f"pytest ended with {done.returncode}"]
    if done.returncode:
        print("\n".join(lines[:-1]), file=sys.stderr)
    print(f"Tests that need an accelerator: {lines[-1].strip('= ')}\n", flush=True)
    return done.returncode == 0


def main(
    arguments: Sequence[str] | None = None,
    contenders: Iterable[Callable[[], Contender]] = CONTENDERS,
    tests: Path = Path(__file__).parent.parent / "tests",
) -> int:
    """Run the tests and the benchmark, and print the table.

    Returns:
        0; 1 if there is no accelerator, a test fails or a loaded checkpoint differs from the saved state.
    """
    parser = argparse.ArgumentParser(
        prog="python -m ckpt_core.gpu_check", description="Measure what saves cost a training on this accelerator."
    )
    parser.add_argument("path", nargs="?", default=".", help="a directory on the disk that takes the checkpoints (.)")
    parser.add_argument("--gigabytes", type=float, default=4.0, help="of weights and moments (4)")
    parser.add_argument("--steps", type=int, default=60, help="of each run (60)")
    parser.add_argument("--every", type=int, default=20, help="how many steps lie between two saves (20)")
    parser.add_argument("--step-ms", type=float, default=250.0, help="about how long a step takes (250)")
    parser.add_argument("--batch", type=int, default=256, help="rows of a batch (256)")
    parser.add_argument("--no-tests", action="store_true", help="only measure, also in a clone")
    options = parser.parse_args(arguments)
    if not 1 <= options.every <= options.steps:
        parser.error("--every must be from 1 to the number of --steps")
    found = device_to_check()
    if found is None:
        print(f"torch {torch.__version__} finds no accelerator on this machine: there is nothing to measure")
        return 1
    # Not for an installed package: the folder "tests" next to it may belong to a different project.
    passed = options.no_tests or not (tests / "support" / "accelerators.py").exists() or _run_tests(tests)
    options.path = tempfile.mkdtemp(prefix="ckpt-gpu-check-", dir=options.path)
    try:
        return 0 if measure(options, *found, contenders) and passed else 1
    finally:
        shutil.rmtree(options.path, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
