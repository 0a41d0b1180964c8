"""``ckpt clean``: delete what nobody needs."""

from __future__ import annotations

from ckpt_core.cli.finding import find
from ckpt_core.cli.output import print_json
from ckpt_core.cli.parser import Commands, Exit, Options

__all__ = ["add_commands"]


def add_commands(commands: Commands) -> None:
    """Add the verbs of this file."""
    clean = commands.add("clean", _clean, help="delete what killed processes left unfinished in a directory")
    clean.add_argument("directory")


def _clean(options: Options) -> int:
    from ckpt_core.catalog import Catalog

    find(options.directory, options.storage_options)  # a directory that is not there is an error
    removed = Catalog(options.directory, storage_options=options.storage_options).prune()
    if options.json:
        print_json(removed)
        return Exit.OK
    for path in removed:
        print(f"deleted {path}")
    return Exit.OK
