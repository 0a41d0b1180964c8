"""``ckpt latest``: print the path of the newest checkpoint that verifies, for scripts that resume from it."""

from __future__ import annotations

from ckpt_core.cli.finding import find, refuse_checkpoint
from ckpt_core.cli.output import fail, print_json
from ckpt_core.cli.parser import Commands, Exit, Options
from ckpt_core.cli.progress import progress
from ckpt_core.errors import CheckpointNotFoundError, StorageError


def add_commands(commands: Commands) -> None:
    """Add the verb of this file."""
    latest = commands.add(
        "latest",
        _latest,
        help="print the path of the newest checkpoint of a directory that verifies",
        example="runs/7",
        codes="0 there is one, 1 there are checkpoints and none verifies, the directory cannot be read, it is a "
        "checkpoint, or there is no such bucket, 2 usage, 3 there is nothing to resume (no checkpoints, or no such "
        "directory).",
    )
    latest.add_argument("directory", metavar="DIR", help="a directory of checkpoints; path or URL")


def _latest(options: Options) -> int:
    from ckpt_core.catalog import Catalog
    from ckpt_core.resume import only_checkpoints

    with progress(options, "verify", None):
        catalog = Catalog(options.directory, suffix="", storage_options=options.storage_options)
        try:
            info = catalog.newest_verified(order=only_checkpoints)
        except StorageError:
            _why(options)  # raises a better error if the path is a checkpoint
            raise
    if info is None:
        return fail(options, f"there is nothing to resume in {options.directory}{_why(options)}", Exit.MISSING)
    if options.json:
        print_json({"path": info.path, "step": info.step, "committed": info.committed, "bytes": info.size})
    else:
        print(info.path)
    return Exit.OK


def _why(options: Options) -> str:
    try:
        found = find(options.directory, options.storage_options)
    except CheckpointNotFoundError:
        return ""
    refuse_checkpoint(found, "latest")  # with "nothing to resume", a script would start from scratch
    return f": {found.hint(options.storage_options)}"
