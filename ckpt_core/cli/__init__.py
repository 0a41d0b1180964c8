"""The ``ckpt`` command: look at, verify and clean up checkpoints from a shell."""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Sequence
from typing import Any

import torch

from ckpt_core._layouts.sharded.reading import DirectoryCheckpoint
from ckpt_core._pipeline import reader
from ckpt_core.catalog import Catalog, CheckpointInfo
from ckpt_core.cli.interchange import add_commands
from ckpt_core.errors import CheckpointError
from ckpt_core.resume import only_checkpoints
from ckpt_core.storage import local_path, storage_for
from ckpt_core.tree import leaves

__all__ = ["NOTHING_TO_RESUME", "main"]

NOTHING_TO_RESUME = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: The words after ``ckpt``; those of this process, if not given.

    Returns:
        The exit code: 0 if all went well, 1 if a checkpoint is missing or damaged; of ``latest``, 3 if there is nothing
        to resume.
    """
    options = _parser().parse_args(arguments)
    try:
        code: int = options.run(options)
    except CheckpointError as error:
        print(f"ckpt: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ckpt", description="Look at, verify and clean up checkpoints.")
    parser.add_argument(
        "--storage-options",
        type=_json_object,
        metavar="JSON",
        help='passed to fsspec for URLs, for example \'{"endpoint_url": "http://127.0.0.1:9000"}\'',
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    ls = commands.add_parser("ls", help="list the checkpoints of a directory, the newest first")
    ls.add_argument("directory")
    ls.set_defaults(run=_ls)

    latest = commands.add_parser(
        "latest",
        help="print the path of the newest checkpoint of a directory that verifies, for scripts",
        description="Print the path of the newest checkpoint of a directory that verifies. Exit status: 0 if there is "
        "one, 3 if there is nothing to resume (no checkpoints, or no such directory), 1 if there are checkpoints and "
        "none verifies, or the directory cannot be read.",
    )
    latest.add_argument("directory")
    latest.add_argument("--json", action="store_true", help="print path, step, time of the commit and bytes as JSON")
    latest.set_defaults(run=_latest)

    inspect = commands.add_parser("inspect", help="show what a checkpoint holds (every byte is verified)")
    inspect.add_argument("path")
    inspect.set_defaults(run=_inspect)

    verify = commands.add_parser("verify", help="compare every byte with its digest")
    verify.add_argument("paths", nargs="+", metavar="PATH", help="a checkpoint, or a directory of them")
    verify.set_defaults(run=_verify)

    prune = commands.add_parser("prune", help="delete what killed processes left unfinished in a directory")
    prune.add_argument("directory")
    prune.set_defaults(run=_prune)

    add_commands(commands)
    return parser


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("not a JSON object")
    return value


def _ls(options: argparse.Namespace) -> int:
    for info in _checkpoints(options.directory, options.storage_options):
        when = info.modified if info.committed is None else info.committed
        date = datetime.datetime.fromtimestamp(when).isoformat(sep=" ", timespec="seconds")
        known_by = "file date" if info.committed is None else ""
        step = "" if info.step is None else f"step {info.step}"
        print(f"{date}  {known_by:9}  {step:>12}  {info.size:>14,}  {info.path}")
    return 0


def _latest(options: argparse.Namespace) -> int:
    catalog = Catalog(options.directory, suffix="", storage_options=options.storage_options)
    info = catalog.newest_verified(order=only_checkpoints)
    if info is None:
        print(f"ckpt: there is nothing to resume in {options.directory}", file=sys.stderr)
        return NOTHING_TO_RESUME
    about = {"path": info.path, "step": info.step, "committed": info.committed, "bytes": info.size}
    print(json.dumps(about) if options.json else info.path)
    return 0


def _inspect(options: argparse.Namespace) -> int:
    path = local_path(options.path)
    storage = storage_for(path, options.storage_options)
    if reader.is_directory_checkpoint(storage, path):
        with DirectoryCheckpoint(path, storage) as checkpoint:
            _inspect_directory(checkpoint)
        return 0
    state, verified, size = reader.load(path, map_location="cpu", storage_options=options.storage_options)
    print(f"{options.path}: {size:,} bytes, {'verified' if verified else 'no digests: written by another program'}")
    for name, leaf in leaves(state):
        print(f"  {_shown(name)}: {_describe(leaf)}")
    return 0


def _inspect_directory(checkpoint: DirectoryCheckpoint) -> None:
    checkpoint.verify()
    print(f"{checkpoint.path}: {checkpoint.size:,} bytes, saved by {_count(checkpoint.world_size, 'rank')}, verified")
    for name, leaf in leaves(checkpoint.metadata, "metadata"):
        print(f"  {_shown(name)}: {_describe(leaf)}")
    for part in checkpoint.parts.values():
        print(f"  {part.name}: {part.kind}, {_count(len(part.tensors), 'tensor')}")
        for key, tensor in part.tensors.items():
            print(f"    {_shown(key)}: {_describe(tensor)}")
    for file, size in checkpoint.files.items():
        print(f"  {size:>14,}  {file}")


def _shown(key: str) -> str:
    """Return a key without what would break the line or control the terminal."""
    return key if key.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in key)


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _describe(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor) and leaf.is_nested:
        return f"{str(leaf.dtype).removeprefix('torch.')}, nested, {_count(leaf.size(0), 'tensor')}"
    if hasattr(leaf, "dtype") and hasattr(leaf, "shape"):
        return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
    try:
        text = repr(leaf)
    except ValueError:  # an integer that is longer than Python turns into digits
        return f"an integer of {leaf.bit_length()} bits" if isinstance(leaf, int) else f"a {type(leaf).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def _verify(options: argparse.Namespace) -> int:
    failed = False
    for path in _expand(options.paths, options.storage_options):
        try:
            verified = reader.verify(path, storage_options=options.storage_options)
        except CheckpointError as error:
            failed = True
            print(f"DAMAGED  {path}: {error.message}")
        else:
            print(f"{'whole' if verified else 'no digests'}  {path}")
    return int(failed)


def _expand(paths: Sequence[str], storage_options: dict[str, Any] | None) -> list[str]:
    result = []
    for path in paths:
        if reader.is_directory_checkpoint(storage_for(path, storage_options), local_path(path)):
            result.append(path)
            continue
        result.extend([info.path for info in _checkpoints(path, storage_options)] or [path])
    return result


def _checkpoints(directory: str, storage_options: dict[str, Any] | None) -> list[CheckpointInfo]:
    return only_checkpoints(Catalog(directory, suffix="", storage_options=storage_options).checkpoints())


def _prune(options: argparse.Namespace) -> int:
    for path in Catalog(options.directory, storage_options=options.storage_options).prune():
        print(f"deleted {path}")
    return 0
