"""``ckpt export`` and ``ckpt import``: checkpoints of other programs."""

from __future__ import annotations

import argparse
import re

from ckpt_core.cli.parser import Commands, Options

__all__ = ["add_commands"]

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def add_commands(commands: Commands) -> None:
    """Add the verbs of this file."""
    export = commands.add("export", _export, help="write a checkpoint in the format of another program")
    export.add_argument("path", help="a checkpoint that is a directory; for safetensors, a torch file too")
    export.add_argument("target", help="a local directory that is not there yet")
    _add_format(export)
    export.add_argument("--part", help="safetensors: where the model is (model; in a torch file, state_dict)")
    export.add_argument(
        "--prefix", default="", help="safetensors: only tensors whose names begin so, without it (model.)"
    )
    export.add_argument(
        "--max-shard-size", type=_size, default="5GB", metavar="SIZE", help="safetensors: of one file (5GB)"
    )

    bring = commands.add("import", _import, help="make a checkpoint of one of another program")
    bring.add_argument("path", help="a directory that dcp.save wrote, or the directory of a model")
    bring.add_argument("target", help="the checkpoint")
    _add_format(bring)
    bring.add_argument("--part", default="model", help="safetensors: the part that the model becomes (model)")
    bring.add_argument("--only", nargs="+", metavar="KEY", help="dcp: first keys of what is wanted of the state")


def _add_format(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--format",
        required=True,
        choices=("dcp", "safetensors"),
        help="dcp: torch.distributed.checkpoint; safetensors: a Hugging Face model",
    )


def _size(text: str) -> int:
    found = re.fullmatch(r"([0-9]+) *([A-Za-z]*)", text)
    if found is None or found[2].upper() not in _UNITS or int(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size like 500MB or 5GB")
    return int(found[1]) * _UNITS[found[2].upper()]


def _export(options: Options) -> int:
    from ckpt_core import interchange  # it needs torch.distributed, which takes a second that other commands do not

    if options.format == "dcp":
        interchange.export_dcp(options.path, options.target, storage_options=options.storage_options)
    else:
        interchange.export_model(
            options.path,
            options.target,
            part=options.part,
            prefix=options.prefix,
            max_shard_size=options.max_shard_size,
            storage_options=options.storage_options,
        )
    print(f"wrote {options.target}")
    return 0


def _import(options: Options) -> int:
    from ckpt_core import interchange

    if options.format == "dcp":
        size = interchange.import_dcp(
            options.path, options.target, only=options.only, storage_options=options.storage_options
        )
    else:
        size = interchange.import_model(
            options.path, options.target, part=options.part, storage_options=options.storage_options
        )
    print(f"wrote {options.target}: {size:,} bytes")
    return 0
