"""``ckpt verify`` and ``ckpt inspect``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ckpt_core.cli.finding import find
from ckpt_core.cli.output import count, printable
from ckpt_core.cli.parser import Commands, Options
from ckpt_core.errors import CheckpointError

if TYPE_CHECKING:
    from ckpt_core._layouts.sharded.reading import DirectoryCheckpoint

__all__ = ["add_commands"]


def add_commands(commands: Commands) -> None:
    """Add the verbs of this file."""
    inspect = commands.add("inspect", _inspect, help="show what a checkpoint holds (every byte is verified)")
    inspect.add_argument("path")

    verify = commands.add("verify", _verify, help="compare every byte with its digest")
    verify.add_argument("paths", nargs="+", metavar="PATH", help="a checkpoint, or a directory of them")


def _inspect(options: Options) -> int:
    from ckpt_core._layouts.sharded.reading import DirectoryCheckpoint
    from ckpt_core._pipeline import reader
    from ckpt_core.storage import local_path, storage_for
    from ckpt_core.tree import leaves

    path = local_path(options.path)
    storage = storage_for(path, options.storage_options)
    if reader.is_directory_checkpoint(storage, path):
        with DirectoryCheckpoint(path, storage) as checkpoint:
            _inspect_directory(checkpoint)
        return 0
    state, verified, size = reader.load(path, map_location="cpu", storage_options=options.storage_options)
    print(f"{options.path}: {size:,} bytes, {'verified' if verified else 'no digests: written by another program'}")
    for name, leaf in leaves(state):
        print(f"  {printable(name)}: {_describe(leaf)}")
    return 0


def _inspect_directory(checkpoint: DirectoryCheckpoint) -> None:
    from ckpt_core.tree import leaves

    checkpoint.verify()
    print(f"{checkpoint.path}: {checkpoint.size:,} bytes, saved by {count(checkpoint.world_size, 'rank')}, verified")
    for name, leaf in leaves(checkpoint.metadata, "metadata"):
        print(f"  {printable(name)}: {_describe(leaf)}")
    for part in checkpoint.parts.values():
        print(f"  {part.name}: {part.kind}, {count(len(part.tensors), 'tensor')}")
        for key, tensor in part.tensors.items():
            print(f"    {printable(key)}: {_describe(tensor)}")
    for file, size in checkpoint.files.items():
        print(f"  {size:>14,}  {file}")


def _describe(leaf: Any) -> str:
    import torch

    if isinstance(leaf, torch.Tensor) and leaf.is_nested:
        return f"{str(leaf.dtype).removeprefix('torch.')}, nested, {count(leaf.size(0), 'tensor')}"
    if hasattr(leaf, "dtype") and hasattr(leaf, "shape"):
        return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
    try:
        text = repr(leaf)
    except ValueError:  # an integer that is longer than Python turns into digits
        return f"an integer of {leaf.bit_length()} bits" if isinstance(leaf, int) else f"a {type(leaf).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def _verify(options: Options) -> int:
    from ckpt_core._pipeline import reader

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
    return [info.path for path in paths for info in find(path, storage_options).checkpoints]
