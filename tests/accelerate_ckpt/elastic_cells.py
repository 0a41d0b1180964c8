"""One rank of an elastic run: the samples that it gets when the number of ranks changes, for many ways to load data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from accelerate_ckpt._data.loaders import LoaderPositions
from tests.accelerate_ckpt import exact_cells
from tests.accelerate_ckpt.exact_cells import DISPATCHED, SEEDABLE, SHARDED, STATEFUL, Buckets
from tests.support.data_sets import OwnSampler, Samples

SAMPLES = 83


class Numbered(Samples):
    """A data set whose samples are their own indices."""

    def __init__(self, size: int = SAMPLES) -> None:
        super().__init__(size)

    def __getitem__(self, index: int) -> int:
        return index


class NumberedStream(IterableDataset):
    """The same samples as an iterable data set in order, shared between workers."""

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        return iter(range(first, SAMPLES, step))


def _loader(seed: int, world_size: int, **kwargs: Any) -> DataLoader:
    return DataLoader(Numbered(), **{"batch_size": 4, "shuffle": True, **kwargs})


# name -> (maker, configuration)
CELLS: dict[str, tuple[Any, dict[str, Any]]] = {
    "default": (_loader, {}),
    "workers": (lambda seed, world: _loader(seed, world, num_workers=2), {}),
    "generator": (lambda seed, world: _loader(seed, world, generator=torch.Generator().manual_seed(seed)), {}),
    "drop_last": (lambda seed, world: _loader(seed, world, drop_last=True), {}),
    # the batch of all ranks together keeps its size
    "same_total": (lambda seed, world: _loader(seed, world, batch_size=12 // world), {}),
    "split_batches": (lambda seed, world: _loader(seed, world, batch_size=12), {"split_batches": True}),
    "seedable": (_loader, SEEDABLE),
    "stateful": (_loader, STATEFUL),
    "stateful_seedable": (_loader, {**STATEFUL, **SEEDABLE}),
    "own_sampler": (lambda seed, world: _loader(seed, world, shuffle=False, sampler=OwnSampler(SAMPLES)), {}),
    "own_batches": (lambda seed, world: DataLoader(Numbered(), batch_sampler=Buckets(SAMPLES)), {}),
    "dispatched": (_loader, DISPATCHED),
    "dispatched_stream": (lambda seed, world: DataLoader(NumberedStream(), batch_size=4), DISPATCHED),
    "stream": (lambda seed, world: DataLoader(NumberedStream(), batch_size=4), SHARDED),
    "stream_split": (
        lambda seed, world: DataLoader(NumberedStream(), batch_size=12),
        {**SHARDED, "split_batches": True},
    ),
    "stream_workers": (lambda seed, world: DataLoader(NumberedStream(), batch_size=4, num_workers=2), SHARDED),
    "stateful_stream": (lambda seed, world: DataLoader(NumberedStream(), batch_size=4), {**SHARDED, **STATEFUL}),
}


def stage(
    directory: Path, name: str, source: str | None, save_after: int, cells: list[str], seed: int
) -> dict[str, Any]:
    """Continue from what stage ``source`` saved to the end of the next epoch, and save on the way as ``name``.

    Args:
        directory: Where the stages save.
        name: Name of this stage.
        source: The stage to continue from; None to start from scratch.
        save_after: Number of steps after which to save; with 0 after the epoch.
        cells: The ways to load data.
        seed: What the script seeds its generators with.

    Returns:
        For each cell the batches of this rank in each epoch, its random numbers, and the warnings about the resume.
    """
    found: dict[str, Any] = {}
    for cell in cells:
        make, config = CELLS[cell]
        AcceleratorState._reset_state()
        GradientState._reset_state()
        torch.manual_seed(seed)
        accelerator = Accelerator(
            cpu=True, dataloader_config=exact_cells.DataLoaderConfiguration(**config), gradient_accumulation_steps=2
        )
        warned: list[str] = []
        positions = LoaderPositions(accelerator, warn=warned.append)
        loader = accelerator.prepare(make(seed, accelerator.num_processes), None)[0]
        rank = accelerator.process_index
        if source is not None:
            folder = directory / source / cell
            world_size = len(list(folder.iterdir()))
            saved = torch.load(folder / f"{rank if rank < world_size else 0}.pt", weights_only=True)
            positions.restore(saved, saved_world_size=world_size)
        random_number = float(torch.rand((), generator=torch.Generator().set_state(torch.get_rng_state())))
        begun_at = int(accelerator.step)
        epochs: list[list[list[int]]] = []
        remainders, numbers = [], []
        for _ in range(2):
            epochs.append([])
            for batch in loader:
                with accelerator.accumulate():
                    epochs[-1].append(batch.tolist())
                    numbers.append(float(torch.rand(())))
                if save_after and len(epochs) == 1 and len(epochs[0]) == save_after:
                    (directory / name / cell).mkdir(parents=True, exist_ok=True)
                    torch.save(positions.capture(), directory / name / cell / f"{rank}.pt")
                if loader.end_of_dataloader:
                    remainders.append(loader.remainder)
            if not save_after and len(epochs) == 1:
                (directory / name / cell).mkdir(parents=True, exist_ok=True)
                torch.save(positions.capture(), directory / name / cell / f"{rank}.pt")
        found[cell] = {
            "epochs": epochs,
            "step": begun_at,
            "random": random_number,
            "numbers": numbers,
            "remainders": remainders,
            "warned": warned,
        }
    return found
