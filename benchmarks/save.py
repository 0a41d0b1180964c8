"""Contenders of the save benchmark: ours, Lightning's, and what the machine allows at best.

A contender is a pair of functions: ``save`` returns when training may continue (the stall ends there), ``finish``
returns when the checkpoint is durable. Each save has a new path, and the previous checkpoint is deleted untimed: a disk
may take longer to delete a file than to write one.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import itertools
import mmap
import os
import queue
import shutil
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from lightning.pytorch.plugins.io import AsyncCheckpointIO as LightningAsyncCheckpointIO
from lightning.pytorch.plugins.io import TorchCheckpointIO

from benchmarks.states import tensor_bytes, tensors_in
from ckpt_core.process.threads import run_parallel
from lightning_ckpt import AsyncCheckpointIO, SyncCheckpointIO


@dataclasses.dataclass
class Contender:
    """One way to get a state to disk; ``prepare`` is called before each save, untimed."""

    save: Callable[[], Any]
    finish: Callable[[], Any] = lambda: None
    close: Callable[[], Any] = lambda: None
    prepare: Callable[[], Any] = lambda: None
    other_ways: Sequence[Callable[[], Any]] = ()  # of a limit: timed in the same round


Make = Callable[[dict[str, Any], Path], Contender]


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds: medians over the rounds; for a limit, the least."""

    first: float  # the stall of the very first save
    stall: float
    durable: float
    least: float  # the stall of the fastest round, comparable to a limit's
    least_durable: float
    stalls: tuple[float, ...]  # of each round; for a limit, the least of its ways
    durables: tuple[float, ...]

    def over(self, limit: Timing, figure: Literal["stalls", "durables"]) -> float:
        """Return the median over the rounds of this contender's seconds divided by the limit's in the same round."""
        rounds = zip(getattr(self, figure), getattr(limit, figure), strict=True)
        return statistics.median(mine / bound for mine, bound in rounds)


class FreshPaths:
    """Provides a new path for each save, and deletes what is at the one before."""

    def __init__(self, path: Path) -> None:
        self._paths = (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in itertools.count())
        self.path = path

    def prepare(self) -> None:
        """Delete what is at the last path, and go to the next one."""
        if self.path.is_dir():
            shutil.rmtree(self.path)
        self.path.unlink(missing_ok=True)
        self.path = next(self._paths)


def fsync(path: Path) -> None:
    """Wait until a file that other code has written is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def copy_ways(state: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """Return ways to copy all tensors of a state into reused memory of huge pages; the fastest is the limit."""
    sources = list(tensors_in(state))
    sizes = [-(-source.nbytes // 64) * 64 for source in sources]
    memory = mmap.mmap(-1, sum(sizes))
    memory.madvise(mmap.MADV_HUGEPAGE)
    pieces = torch.frombuffer(memory, dtype=torch.uint8).zero_().split(sizes)
    targets = [p[: s.nbytes].view(s.dtype).view(s.shape) for p, s in zip(pieces, sources, strict=True)]

    def move(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
        ctypes.memmove(pair[0].data_ptr(), pair[1].data_ptr(), pair[1].nbytes)

    return {
        "copy_ of each": lambda: [target.copy_(source) for target, source in zip(targets, sources, strict=True)],
        "_foreach_copy_": lambda: torch._foreach_copy_(targets, sources),
        "memmove in threads": lambda: run_parallel(move, zip(targets, sources, strict=True)),
    }


def one_copy(state: dict[str, Any], path: Path) -> Contender:
    """Return the limit of a stall: one copy of the same tensors into reused memory, the fastest way of three."""
    way, *others = copy_ways(state).values()
    return Contender(save=way, other_ways=others)


def raw_direct_write(state: dict[str, Any], path: Path) -> Contender:
    """Return the limit of a durable save: the same bytes by direct I/O from pre-faulted memory, fastest of three."""
    nbytes = -(-tensor_bytes(state) // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, nbytes)
    memory.madvise(mmap.MADV_HUGEPAGE)
    torch.frombuffer(memory, dtype=torch.uint8).random_(0, 255)
    view = memoryview(memory)
    fresh = FreshPaths(path)

    def save(block: int, threads: int) -> None:
        descriptor = os.open(fresh.path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o644)
        os.posix_fallocate(descriptor, 0, nbytes)
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda at: os.pwrite(descriptor, view[at : at + block], at), range(0, nbytes, block)))
        os.fsync(descriptor)
        os.close(descriptor)

    way, *others = (functools.partial(save, *way) for way in ((2**24, 2), (2**24, 4), (2**22, 8)))
    return Contender(save=way, other_ways=others, prepare=fresh.prepare)


def is_limit(name: str) -> bool:
    """Return whether this is a raw operation instead of a way to save."""
    return name.startswith("limit")


def figure_of(name: str, seconds: Iterable[float]) -> float:
    """Return the median of a contender's times; for a limit the least, because nothing may be faster than a limit."""
    return min(seconds) if is_limit(name) else statistics.median(seconds)


def ours_sync(state: dict[str, Any], path: Path) -> Contender:
    """``lightning_ckpt.SyncCheckpointIO``."""
    io, fresh = SyncCheckpointIO(), FreshPaths(path)
    return Contender(save=lambda: io.save_checkpoint(state, fresh.path), close=io.teardown, prepare=fresh.prepare)


def ours_async(state: dict[str, Any], path: Path) -> Contender:
    """``lightning_ckpt.AsyncCheckpointIO`` with memory reserved, as after a first step of training."""
    io, fresh = AsyncCheckpointIO(), FreshPaths(path)
    io.checkpointer.reserve([torch.nn.ParameterList(tensors_in(state))])
    return Contender(
        save=lambda: io.save_checkpoint(state, fresh.path),
        finish=io.checkpointer.wait,
        close=io.teardown,
        prepare=fresh.prepare,
    )


def lightning_sync(state: dict[str, Any], path: Path) -> Contender:
    """Lightning's ``TorchCheckpointIO`` and an fsync, which it does not do."""
    io, fresh = TorchCheckpointIO(), FreshPaths(path)

    def save() -> None:
        io.save_checkpoint(state, fresh.path)
        fsync(fresh.path)

    return Contender(save=save, prepare=fresh.prepare)


def lightning_async(state: dict[str, Any], path: Path) -> Contender:
    """Lightning's ``AsyncCheckpointIO`` and an fsync, which it does not do."""
    pending: queue.SimpleQueue[Any] = queue.SimpleQueue()
    fresh = FreshPaths(path)

    def save() -> None:
        io = LightningAsyncCheckpointIO(TorchCheckpointIO())
        io.save_checkpoint(state, fresh.path)
        pending.put(io)

    def finish() -> None:
        pending.get().teardown()
        fsync(fresh.path)

    return Contender(save=save, finish=finish, prepare=fresh.prepare)


COPY, WRITE = "limit: one copy into a reused buffer", "limit: raw direct write"
CONTENDERS: dict[str, Make] = {
    COPY: one_copy,
    WRITE: raw_direct_write,
    "lightning_ckpt.SyncCheckpointIO": ours_sync,
    "lightning_ckpt.AsyncCheckpointIO": ours_async,
    "Lightning TorchCheckpointIO + fsync": lightning_sync,
    "Lightning AsyncCheckpointIO + fsync": lightning_async,
}


def measure(
    state: dict[str, Any],
    directory: Path,
    *,
    repeats: int,
    idle_seconds: float,
    makers: dict[str, Make] = CONTENDERS,
) -> dict[str, Timing]:
    """Time every contender in turn, each save after ``idle_seconds`` of idling.

    The first round is a warm-up, and counts only for limits, whose least time is wanted.
    """
    contenders = {name: make(state, directory / f"{i}.ckpt") for i, (name, make) in enumerate(makers.items())}
    found: dict[str, list[list[tuple[float, float]]]] = {name: [] for name in contenders}
    first: dict[str, float] = {}
    names = list(contenders)
    for repeat in range(repeats + 1):
        # Each round begins with a different contender, so that none is always the first.
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            contender = contenders[name]
            found[name].append([])
            for save in (contender.save, *contender.other_ways):
                contender.prepare()
                os.sync()
                time.sleep(idle_seconds)
                started = time.perf_counter()
                save()
                stall = time.perf_counter() - started
                contender.finish()
                durable = time.perf_counter() - started
                first.setdefault(name, stall)
                found[name][-1].append((stall, durable))
    for contender in contenders.values():
        contender.close()
    return {name: _timing(name, first[name], rounds) for name, rounds in found.items()}


def _timing(name: str, first: float, rounds: Sequence[Sequence[tuple[float, float]]]) -> Timing:
    stalls, durables = (tuple(min(seconds[figure] for seconds in tries) for tries in rounds) for figure in (0, 1))
    counted = slice(0 if is_limit(name) else 1, None)
    return Timing(
        first,
        figure_of(name, stalls[counted]),
        figure_of(name, durables[counted]),
        min(stalls[counted]),
        min(durables[counted]),
        stalls[1:],
        durables[1:],
    )


def print_beaten_limits(timings: dict[str, Timing]) -> None:
    """Print which contenders were faster than a limit, because the machine's speed changed between the two."""
    for limit, figure in ((COPY, "least"), (WRITE, "least_durable")):
        least = {name: getattr(timing, figure) for name, timing in timings.items()}
        beaten = [name for name, seconds in least.items() if seconds < least[limit] and not is_limit(name)]
        if beaten:
            print(
                f"\n{' and '.join(beaten)} once took less than the {limit}: the machine's speed has changed in this "
                "run, and ratios to that limit say nothing; run it again, with more --repeats"
            )


def peak_extra_memory(state: dict[str, Any], directory: Path, make: Make, *, saves: int) -> float:
    """Return the most memory in bytes that a contender used beyond the state, over ``saves`` saves in a row."""
    process = psutil.Process()
    before = process.memory_info().rss
    contender = make(state, directory / "memory.ckpt")
    with _peak(process) as peak:
        for _ in range(saves):
            contender.prepare()
            contender.save()
            contender.finish()
    contender.close()
    return peak[0] - before


@contextlib.contextmanager
def _peak(process: psutil.Process) -> Iterator[list[int]]:
    highest = [process.memory_info().rss]
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.005):
            highest[0] = max(highest[0], process.memory_info().rss)

    thread = threading.Thread(target=watch, name="memory-watch")
    thread.start()
    try:
        yield highest
    finally:
        stop.set()
        thread.join()
