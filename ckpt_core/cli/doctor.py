"""``ckpt doctor``: show installed versions, measure saves and loads at a path or URL, and predict costs of saves."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import platform
import shutil
import time
import uuid
from collections.abc import Callable
from typing import Any

from ckpt_core.cli.finding import find
from ckpt_core.cli.output import print_card, print_error, print_json
from ckpt_core.cli.parser import Commands, Exit, Options, nbytes
from ckpt_core.errors import CheckpointError
from ckpt_core.events import size_in_words
from ckpt_core.paths import full_path, is_remote
from ckpt_core.storage import refuse_missing_bucket, storage_for
from ckpt_core.storage.in_memory import available_memory

_LARGEST = 100_000  # megabytes
_SHORTEST = 1e-4  # seconds; shorter measurements count as this
_PACKAGES: tuple[str, ...] = (
    "ckpt-plugins",
    "torch",
    "lightning",
    "pytorch-lightning",
    "accelerate",
    "transformers",
    "fsspec",
    "s3fs",
    "gcsfs",
    "adlfs",
    "obstore",
    "tqdm",
)


def add_commands(commands: Commands) -> None:
    """Add the verb of this file."""
    doctor = commands.add(
        "doctor",
        _doctor,
        help="show versions, devices, how fast a place saves and loads, and what saves of a model will cost",
        epilog="A checkpoint of --size is saved, loaded and deleted again. --bytes and --like say what a save of that "
        "size would cost one process that trains here: from host memory; a device adds its copy to the host.",
        example="s3://bucket/run-7 --bytes 10GB",
        codes="0 the place works, 1 it does not, 2 usage.",
    )
    doctor.add_argument("path", nargs="?", default=".", metavar="PATH", help="a directory or URL for checkpoints (.)")
    doctor.add_argument(
        "--size", type=_megabytes, default=256, metavar="MB", help="size of the checkpoint that is saved (256)"
    )
    doctor.add_argument(
        "--bytes", type=nbytes, metavar="SIZE", help="predict saves of a state of this size, such as 10GB"
    )
    doctor.add_argument("--like", metavar="CHECKPOINT", help="predict saves of a state as large as this one")


def _megabytes(text: str) -> int:
    if not (text.isdecimal() and 0 < int(text) <= _LARGEST):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of megabytes from 1 to {_LARGEST:,}")
    return int(text)


def _doctor(options: Options) -> int:
    import torch

    from ckpt_core._devices.streams import accelerator_name

    versions: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    versions["torch"] = torch.__version__  # includes the build, such as +cu132
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}, {os.cpu_count()} CPUs",
        "accelerator": accelerator_name(),
        "packages": versions,
        "path": options.path,
    }
    failure = None
    wanted: int | None = options.bytes
    if options.like is not None:
        like = find(options.like, options.storage_options)
        if not like.is_checkpoint:
            raise CheckpointError("this is a directory, not a checkpoint", path=options.like)
        wanted = like.checkpoints[0].size
    try:
        found |= _place(options.path, options.storage_options, options.size * 10**6)
        found |= {} if wanted is None else {"predicted": _predicted(found, wanted)}
    except CheckpointError as error:
        failure = error
        found["problem"] = str(error)
    if options.json:
        print_json(found)
    else:
        rows = [(name, str(found[name])) for name in ("python", "system")]
        rows.append(("accelerator", found["accelerator"] or "none"))
        rows += [(name, version or "not installed") for name, version in versions.items()]
        rows.append(("path", options.path))
        rows += [(name, text) for name, text in _shown(found)]
        print_card(rows)
    if failure is not None:
        print_error(failure, "ckpt doctor")
    return Exit.OK if failure is None else Exit.FAILED


def _shown(found: dict[str, Any]) -> list[tuple[str, str]]:
    rows = []
    if "free" in found:
        rows.append(("free", size_in_words(found["free"])))
        rows.append(("direct I/O", "yes" if found["direct"] else "no: ordinary writes through the page cache"))
    if "written" in found:
        rows.append(("save, durable", f"{size_in_words(found['written'])}/s"))
        rows.append(("load, verified", f"{size_in_words(found['read'])}/s"))
        rows.append(("smallest save", f"{found['smallest'] * 1000:.0f} ms"))
        rows.append(("stall, async", f"{size_in_words(found['staged'])}/s copied"))
    if "predicted" in found:
        cost = found["predicted"]
        rows.append((f"a save of {size_in_words(cost['bytes'])}", ""))
        rows.append(("  training stands still", f"{cost['stall']:.2f} s async ({cost['first_stall']:.2f} s the first)"))
        rows.append(("", f"{cost['durable']:.1f} s sync"))
        rows.append(("  durable after", f"{cost['durable']:.1f} s; save no more often than that"))
        rows.append(("  loaded in", f"{cost['load']:.1f} s"))
        rows.append(("  memory for the copy", f"{size_in_words(cost['bytes'])}{_of_memory(cost)}"))
        if "free" in found and found["free"] < 2 * cost["bytes"]:
            rows.append(("  too little room", "an old checkpoint goes only when the new one is durable: two must fit"))
    return rows


def _place(path: str, storage_options: dict[str, Any] | None, size: int) -> dict[str, Any]:
    """Measure the speed of saves and loads in a directory or at a URL.

    Raises:
        CheckpointError: It cannot be written to or read from.
    """
    import torch

    from ckpt_core.checkpointer import Checkpointer

    directory = full_path(path)
    storage = storage_for(directory, storage_options)
    refuse_missing_bucket(directory, storage_options)
    found: dict[str, Any] = {}
    file = f"{directory.rstrip('/')}/ckpt-doctor-{uuid.uuid4().hex[:12]}"
    if not is_remote(directory):
        if not os.path.isdir(directory):
            raise CheckpointError("there is no such directory", path=directory, remedy="make it, or give another one")
        found["free"] = shutil.disk_usage(directory).free
        found["direct"] = _writes_directly(file)
    state = {"tensor": torch.empty(size, dtype=torch.uint8).random_()}
    try:
        with Checkpointer(strategy="sync", storage_options=storage_options) as checkpointer:
            found["smallest"] = _seconds(lambda: checkpointer.save({}, file))
            found["written"] = size / _seconds(lambda: checkpointer.save(state, file))
            found["read"] = size / _seconds(lambda: checkpointer.load(file))
        with Checkpointer(strategy="async", storage_options=storage_options) as checkpointer:
            stalls = []
            for saved in (
                {},
                {},
                state,
                state,
                state,
            ):  # threads start with the first; memory is allocated for the third
                stalls.append(_seconds(lambda saved=saved: checkpointer.save(saved, file)))  # type: ignore[misc]
                checkpointer.wait()
        found["smallest_stall"] = stalls[1]
        for name, seconds in (("first_staged", stalls[2]), ("staged", min(stalls[3:]))):
            found[name] = size / max(seconds - stalls[1], _SHORTEST)
    except BaseException:
        with contextlib.suppress(CheckpointError):  # the first error is the one to report
            storage.remove(file)
        raise
    storage.remove(file)
    return found


def _predicted(found: dict[str, Any], wanted: int) -> dict[str, Any]:
    """Return what a save of ``wanted`` bytes would cost, predicted from the measurements."""
    available, memory = available_memory()
    return {
        "bytes": wanted,
        "stall": found["smallest_stall"] + wanted / found["staged"],
        "first_stall": found["smallest_stall"] + wanted / found["first_staged"],
        "durable": found["smallest"] + wanted / found["written"],
        "load": wanted / found["read"],
        "memory_available": available if memory else None,
    }


def _of_memory(cost: dict[str, Any]) -> str:
    available = cost["memory_available"]
    if available is None:
        return ""
    enough = "" if available > cost["bytes"] else ": NOT ENOUGH, use strategy sync"
    return f" of {size_in_words(available)} that are free{enough}"


def _seconds(act: Callable[[], object]) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


def _writes_directly(path: str) -> bool:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | getattr(os, "O_DIRECT", 0), 0o600)
    except OSError:
        return False
    os.close(descriptor)
    os.unlink(path)
    return hasattr(os, "O_DIRECT")
