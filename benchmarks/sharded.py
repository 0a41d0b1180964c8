"""Compares directory checkpoints with torch.distributed.checkpoint (DCP) and plain safetensors."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import mmap
import os
import resource
import shutil
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from benchmarks.save import figure_of, raw_direct_write
from benchmarks.states import gpt_state, tensor_bytes
from ckpt_core import DirectoryCheckpointer, Kind, Part
from ckpt_core._commit.rank_group import RankGroup
from ckpt_core._layouts.directory.writing import PartContent, RankFiles, build_manifest
from ckpt_core._pipeline.writer import write_image
from ckpt_core._plan import LocalTensor, Piece, WritePlanCache
from ckpt_core.buffers import ScratchBuffers
from ckpt_core.storage import LocalStorage
from ckpt_core.tree import tensors

State = dict[str, Any]


def table(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Print the tables; return their figures."""
    return {
        "large": _large(options, directory),
        "resharding": _resharding(directory),
        "small": _small(options, directory),
        "commit": [_commit(ranks, directory) for ranks in (1024, 2048, 4096, 8192)],
    }


def _parts(state: State) -> list[Part]:
    return [Part(name, value, Kind.REPLICATED) for name, value in state.items()]


def _idle(seconds: float) -> None:
    os.sync()
    time.sleep(seconds)


def _train(state: State) -> None:
    """Change every tensor, as a training step does, so that a save can reuse nothing of the previous checkpoint."""
    torch._foreach_add_([tensor for _, tensor in tensors(state)], 1.0)


def _timed(action: Callable[[], Any]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


# ---- one large state
# -------------------------------------------------------------------------------------------------------


def _large(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Time saves and loads as in a training: each checkpoint has a new path, and old ones are deleted between saves."""
    whole = gpt_state(options.layers)
    state: State = {"model": whole["state_dict"], "optimizer": whole["optimizer_states"][0]["state"]}
    nbytes = tensor_bytes(whole)
    print(f"one process, {nbytes / 1e9:.2f} GB; {options.repeats} rounds, {options.idle:g} s idle before each line\n")
    found: dict[str, list[float]] = {}
    ours = {name: DirectoryCheckpointer(strategy=name) for name in ("sync", "async")}  # type: ignore[arg-type]
    limit = raw_direct_write(whole, directory / "raw")
    for repeat in range(options.repeats + 1):
        times: dict[str, float] = {}
        for name, checkpointer in ours.items():
            _train(state)
            _idle(options.idle)
            started = time.perf_counter()
            checkpointer.save(_parts(state), directory / f"{name}-{repeat}")
            times[f"{name}: stall"] = time.perf_counter() - started
            checkpointer.wait()
            times[f"{name}: durable"] = time.perf_counter() - started
        _idle(options.idle)
        dcp_arguments = {"state_dict": {"s": state}, "checkpoint_id": directory / f"dcp-{repeat}", "no_dist": True}
        times["DCP: durable"] = _timed(functools.partial(dcp.save, **dcp_arguments))
        tried = []
        for write in (limit.save, *limit.other_ways):
            (directory / "raw").unlink(missing_ok=True)
            _idle(options.idle)
            tried.append(_timed(write))
        times["limit: raw direct write"] = min(tried)
        loads: dict[str, Callable[[], Any]] = {
            "load": functools.partial(_load_into, directory / f"sync-{repeat}", state),
            "DCP: load": functools.partial(dcp.load, **dcp_arguments),
        }
        limit_read = functools.partial(_read_raw, directory / "raw")
        for name, load in {**loads, "limit: raw direct read": limit_read}.items():
            # DCP's files are in the page cache; ours, written by direct I/O, are not. So all loads begin cold.
            _drop_from_cache(directory)
            _idle(options.idle)
            times[name] = _timed(load)
        for name, load in loads.items():
            _read_into_cache(directory / (f"dcp-{repeat}" if name.startswith("DCP") else f"sync-{repeat}"))
            _idle(options.idle)
            times[f"{name}, in the page cache"] = _timed(load)
        for name in (*ours, "dcp"):
            shutil.rmtree(directory / f"{name}-{repeat}")
        (directory / "raw").unlink()
        if repeat > 0:
            for name, seconds in times.items():
                found.setdefault(name, []).append(seconds)
    for checkpointer in ours.values():
        checkpointer.close()
    figures = {name: figure_of(name, seconds) for name, seconds in found.items()}
    for name, seconds in figures.items():
        line = f"{name:32s} {seconds * 1e3:8.0f} ms (fastest {min(found[name]) * 1e3:6.0f}) "
        if name.endswith("cache"):
            line += f"{figures['DCP: load, in the page cache'] / seconds:6.2f}x as fast as DCP"
        else:
            is_load = name.endswith(("load", "read"))
            dcp_seconds = figures["DCP: load" if is_load else "DCP: durable"]
            limit_seconds = figures["limit: raw direct read" if is_load else "limit: raw direct write"]
            line += (
                f"{dcp_seconds / seconds:6.2f}x as fast as DCP, {seconds / limit_seconds:6.2f}x as long as the limit"
            )
        print(line)
    return {"bytes": nbytes, **figures, "fastest": {name: min(seconds) for name, seconds in found.items()}}


def _read_raw(path: Path, block: int = 16 * 2**20) -> None:
    """Read the same bytes as a load, by direct I/O into reused memory in 2 threads, unused: the limit of a load."""
    with mmap.mmap(-1, 2 * block) as memory, memoryview(memory) as view:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        offsets = iter(range(0, path.stat().st_size, block))
        lock = threading.Lock()

        def read(slot: int) -> None:
            with view[slot * block : (slot + 1) * block] as target:
                while True:
                    with lock:
                        offset = next(offsets, None)
                    if offset is None:
                        return
                    os.preadv(descriptor, [target], offset)

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(read, range(2)))
        os.close(descriptor)


def _drop_from_cache(directory: Path) -> None:
    for file in directory.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def _read_into_cache(directory: Path) -> None:
    for file in directory.rglob("*"):
        if file.is_file():
            with file.open("rb") as opened:
                while opened.read(16 * 2**20):
                    pass


def _load_into(path: Path, state: State) -> None:
    with DirectoryCheckpointer().load(path) as checkpoint:
        for name, value in state.items():
            checkpoint.load(name, into=value)


# ---- an eighth of a tensor
# -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _eighth() -> Iterator[Any]:
    """Yield a mesh of eight ranks, of which this process is rank 3: loading does not need the others."""
    torch.distributed.init_process_group("fake", rank=3, world_size=8)
    try:
        yield init_device_mesh("cpu", (8,))
    finally:
        torch.distributed.destroy_process_group()


def _bytes_read() -> int:
    return int(next(line for line in Path("/proc/self/io").read_text().splitlines() if "rchar" in line).split()[1])


def _resharding(directory: Path) -> dict[str, float]:
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend

    whole = torch.arange(16 * 2**20, dtype=torch.float32).reshape(4096, 4096)
    DirectoryCheckpointer(strategy="sync").save(_parts({"model": {"w": whole}}), directory / "whole")
    dcp.save({"w": whole}, checkpoint_id=directory / "dcp", no_dist=True)
    read = {}
    with _eighth() as mesh:
        ranks = RankGroup(3, 8, torch.distributed.HashStore(), "bench")
        for name in ("ours", "DCP"):
            target = distribute_tensor(torch.zeros_like(whole), mesh, [Shard(0)])
            before = _bytes_read()
            if name == "ours":
                with DirectoryCheckpointer(ranks=ranks).load(directory / "whole") as checkpoint:
                    checkpoint.load("model", into={"w": target})
            else:
                dcp.load({"w": target}, checkpoint_id=directory / "dcp", no_dist=True)
            read[name] = _bytes_read() - before
            _check(target, whole)
    needed = whole.nbytes / 8
    print("\nloading an eighth of a tensor of 64 MiB, bytes read as a multiple of the bytes needed")
    for name, count in read.items():
        print(f"{name:40s} {count / needed:8.3f}x")
    return {name: count / needed for name, count in read.items()}


def _check(target: DTensor, whole: torch.Tensor) -> None:
    rows = whole.shape[0] // 8
    if not torch.equal(target.to_local(), whole[3 * rows : 4 * rows]):
        raise AssertionError("a wrong eighth was loaded")


# ---- many small tensors
# ----------------------------------------------------------------------------------------------------


def _small(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    small_state = {f"model.layers.{index}.weight": torch.randn(16) for index in range(2000)}

    def plain() -> None:
        save_file(small_state, directory / "plain.safetensors")
        descriptor = os.open(directory / "plain.safetensors", os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)

    small, small_dcp = directory / "small", directory / "small_dcp"
    with DirectoryCheckpointer(strategy="sync") as checkpointer:
        actions: dict[str, Callable[[], Any]] = {
            "safetensors + fsync": plain,
            "ours": lambda: checkpointer.save(_parts({"model": small_state}), small),
            "DCP": lambda: dcp.save(dict(small_state), checkpoint_id=small_dcp, no_dist=True),
        }
        times: dict[str, list[float]] = {name: [] for name in actions}
        for repeat in range(4 * options.repeats + 1):
            for path in (small, small_dcp):
                shutil.rmtree(path, ignore_errors=True)
            for name, action in actions.items():
                _train(small_state)
                os.sync()
                seconds = _timed(action)
                if repeat > 0:
                    times[name].append(seconds)
    sizes = {
        "safetensors + fsync": (directory / "plain.safetensors").stat().st_size,
        "ours": _size(small),
        "DCP": _size(small_dcp),
    }
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    print("\n2000 tensors of 64 bytes")
    base = "safetensors + fsync"
    for name, seconds in medians.items():
        print(
            f"{name:40s} {sizes[name] / 1e3:8.0f} kB {sizes[name] / sizes[base]:6.2f}x "
            f"{seconds * 1e3:8.1f} ms {seconds / medians[base]:6.2f}x (fastest {min(times[name]) / min(times[base]):.2f}x)"
        )
    return {name: {"bytes": sizes[name], "seconds": medians[name]} for name in medians}


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


# ---- a thousand ranks
# ------------------------------------------------------------------------------------------------------


def _commit(ranks: int, directory: Path, count: int = 1000) -> dict[str, float]:
    """Time the plan of one rank, and the commit with the reports of all; each rank has a row of every tensor."""
    row = torch.zeros(1, 16)
    keys = [f"model.layers.{index}.weight" for index in range(count)]
    from ckpt_core.geometry import Box

    def local(rank: int) -> dict[str, LocalTensor]:
        piece = Piece(Box((rank, 0), (1, 16)), row)
        return {key: LocalTensor(torch.float32, (ranks, 16), (piece,), (rank,)) for key in keys}

    mine = local(1)
    plan_seconds = _timed(lambda: WritePlanCache().writes_of_rank(mine, 1))
    skeleton = {key: f"${index}" for index, key in enumerate(keys)}
    content = PartContent("model", "sharded", skeleton, mine, {k: t.pieces for k, t in mine.items()}, spread=True)
    files = RankFiles([content], rank=1, world_size=ranks, save_id="s" * 32)
    scratch = ScratchBuffers()
    for name, image in files.live_files():
        write_image(image, LocalStorage(), str(directory / "commit" / name), scratch=scratch)
    scratch.close()
    summary, record, common = files.report().split("\n")
    # The report of another rank differs only in the rank and in its offsets.
    offsets, file_name = json.dumps([1, 0] * count, separators=(",", ":")), f"00002-of-{ranks:05d}"
    if offsets not in record or file_name not in record:
        raise AssertionError("the report is not built as this simulation thinks")
    reports = []
    for rank in range(ranks):
        own = json.dumps([rank, 0] * count, separators=(",", ":"))
        lines = [
            line.replace(offsets, own).replace('"rank":1', f'"rank":{rank}').replace("00002-of", f"{rank + 1:05d}-of")
            for line in (summary, record)
        ]
        reports.append("\n".join([*lines, common]))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    manifest = b""

    def commit() -> None:
        nonlocal manifest
        manifest = build_manifest(reports, metadata={})

    commit_seconds = _timed(commit)
    extra = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    print(
        f"\n{ranks} ranks x {count} tensors: plan {plan_seconds * 1e3:.0f} ms, commit {commit_seconds:.2f} s, "
        f"manifest {len(manifest) / 2**20:.1f} MiB, extra memory {extra / 2**20:.0f} MiB"
    )
    return {
        "ranks": ranks,
        "plan_seconds": plan_seconds,
        "commit_seconds": commit_seconds,
        "manifest_bytes": len(manifest),
    }
