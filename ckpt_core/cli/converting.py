"""``ckpt convert``, ``export`` and ``import``: convert checkpoints between layouts, also of other programs."""

from __future__ import annotations

import argparse
import os
import sys

from ckpt_core.cli.finding import (
    find,
    find_foreign,
    no_checkpoint,
    refuse_itself,
    refuse_other_data,
    refuse_target_inside_checkpoint,
    size_at,
)
from ckpt_core.cli.output import print_json, printable
from ckpt_core.cli.parser import Commands, Exit, Options, nbytes
from ckpt_core.cli.progress import progress
from ckpt_core.errors import CheckpointFormatError
from ckpt_core.events import size_in_words
from ckpt_core.paths import full_path, is_remote
from ckpt_core.storage import Storage, storage_for
from ckpt_core.storage.base import is_directory_checkpoint

_OURS = ("file", "directory")
_LAYOUTS = (*_OURS, "dcp", "safetensors", "accelerate")


def add_commands(commands: Commands) -> None:
    """Add the verbs of this file."""
    convert = commands.add(
        "convert",
        _convert,
        help="write a checkpoint in another layout: one file, a directory, DCP, safetensors, or stock Accelerate's",
        epilog="The layout of SOURCE is detected: a torch file, a directory of this package, DCP's own (also of "
        "Lightning's FSDP and ModelParallel strategies, with meta.pt), stock Accelerate's save_state, a Hugging Face "
        "model. --to file makes one .ckpt of what many ranks have saved; load_from_checkpoint takes it.\n"
        "--to accelerate makes a directory for stock load_state, of a checkpoint of accelerate_ckpt or Lightning.",
        example="runs/step=100 model.ckpt --to file",
    )
    convert.add_argument("source", metavar="SOURCE", help="a checkpoint; path or URL")
    convert.add_argument(
        "target", metavar="TARGET", help="path or URL; for other programs' layouts, a new local directory"
    )
    convert.add_argument("--to", required=True, choices=_LAYOUTS, help="the layout")
    _add_model(convert)
    convert.add_argument(
        "--allow-pickle",
        "--trust-pickle",
        action="store_true",
        help="load objects that are not plain data: the file can then run code",
    )
    _add_force(convert)

    export = commands.add(
        "export",
        _export,
        help="write a checkpoint in the format of another program",
        example="runs/last.ckpt model --format safetensors",
    )
    export.add_argument("path", metavar="SOURCE", help="a checkpoint; path or URL")
    export.add_argument("target", metavar="TARGET", help="a new local directory")
    _add_format(export)
    _add_model(export)

    bring = commands.add(
        "import",
        _import,
        help="turn another program's checkpoint into one of ours",
        example="model runs/start --format safetensors",
    )
    bring.add_argument("path", metavar="SOURCE", help="a directory that dcp.save wrote, or the directory of a model")
    bring.add_argument("target", metavar="TARGET", help="the checkpoint; path or URL")
    _add_format(bring)
    bring.add_argument("--part", default="model", help="safetensors: name of the part for the model (model)")
    bring.add_argument("--only", nargs="+", metavar="KEY", help="dcp: take only these first keys of the state")
    _add_force(bring)


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--part", help="safetensors: part or key of the model (default: found by the usual names)")
    parser.add_argument(
        "--prefix",
        help="safetensors: take only names with this prefix, and remove it (default: the prefix that all have)",
    )
    parser.add_argument(
        "--max-shard-size", type=nbytes, default="5GB", metavar="SIZE", help="safetensors: largest size of a file (5GB)"
    )


def _add_force(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-f", "--force", action="store_true", help="replace another file or directory of this package at the target"
    )


def _add_format(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--format",
        required=True,
        choices=("dcp", "safetensors"),
        help="dcp: torch.distributed.checkpoint; safetensors: a Hugging Face model",
    )


def _convert(options: Options) -> int:
    size = size_at(options.source, options.storage_options)  # raises if there is no source
    # Bytes that DCP writes are not counted; for DCP, a file is first converted to a directory.
    times = 3 if options.to == "dcp" and os.path.isfile(options.source) else 2 if options.to in _OURS else 1
    with progress(options, options.verb, times * size):
        _run_conversion(options)
    return _wrote(options, options.to)


def _run_conversion(options: Options) -> None:
    from ckpt_core import interchange
    from ckpt_core.interchange.streaming import scratch_directory

    found = find(options.source, options.storage_options)
    if not found.is_checkpoint and find_foreign(options.source, options.storage_options) is None:
        raise no_checkpoint(found, options.storage_options)
    path = full_path(options.source)
    if options.to in _OURS:
        refuse_itself(path, full_path(options.target))
        refuse_other_data(options.target, options.storage_options, force=options.force)
    if options.to in _OURS or not is_remote(options.target):
        refuse_target_inside_checkpoint(options.target, options.storage_options)
    storage = storage_for(path, options.storage_options)
    is_ours = is_directory_checkpoint(storage, path)
    is_foreign = not is_ours and not found.is_checkpoint
    is_model = is_foreign and _holds_a_model(storage, path)
    is_model = is_model and not interchange.is_stock_accelerate(path, options.storage_options)
    weights_only = False if options.allow_pickle else None
    given = {"storage_options": options.storage_options}
    if options.to == "dcp":
        interchange.convert_to_dcp(path, options.target, weights_only=weights_only, **given)
    elif options.to == "safetensors" and is_foreign:
        with scratch_directory(options.target) as between:
            ours = os.path.join(between, "checkpoint")
            interchange.convert_to_directory(path, ours, weights_only=weights_only, **given)
            if is_model and options.prefix is None:
                options.prefix = ""  # keep the names, which the model's own program expects
            _export_model(options, ours, storage_for(ours))
    elif options.to == "safetensors":
        _export_model(options, path, storage)
    elif options.to == "accelerate":
        interchange.convert_to_accelerate(path, options.target, weights_only=weights_only, **given)
    elif is_model and options.to == "directory":
        interchange.import_model(path, options.target, part=options.part or "model", **given)
    else:
        convert = interchange.convert_to_file if options.to == "file" else interchange.convert_to_directory
        convert(path, options.target, weights_only=weights_only, **given)


def _export_model(options: Options, path: str, storage: Storage) -> None:
    from ckpt_core import interchange

    prefix = options.prefix
    if prefix is None:
        prefix = _common_prefix(path, options.part, storage)
        if prefix:
            print(f"left {prefix!r} out of the tensors' names (--prefix '' keeps it)", file=sys.stderr)
    interchange.export_model(
        path,
        options.target,
        part=options.part,
        prefix=prefix,
        max_shard_size=options.max_shard_size,
        storage_options=options.storage_options,
    )


def _wrote(options: Options, layout: str) -> int:
    size = size_at(options.target, options.storage_options)
    if options.json:
        print_json({"path": options.target, "layout": layout, "bytes": size})
    else:
        print(f"wrote {printable(options.target)}: {size_in_words(size)}")
    return Exit.OK


def _holds_a_model(storage: Storage, path: str) -> bool:
    return any(file.path.endswith((".safetensors", ".safetensors.index.json")) for file in storage.list(path))


def _common_prefix(path: str, part: str | None, storage: Storage) -> str:
    """Return the first component, with its dot, that the names of all tensors of a model share; ``""`` if none."""
    from ckpt_core._pipeline.loading import peek
    from ckpt_core.interchange.model_files import model_in, tensors_of
    from ckpt_core.tree import tensors

    if is_directory_checkpoint(storage, path):
        with tensors_of(path, part, storage) as found:
            names = list(found)
    else:
        names = [name for name, _ in tensors(model_in(peek(path, storage=storage), part))]
    if all(name.startswith("base_model.model.") for name in names):
        return ""  # PEFT recognizes adapters by their full names
    first = {name.partition(".")[0] + "." if "." in name else "" for name in names}
    return first.pop() if len(first) == 1 else ""


def _export(options: Options) -> int:
    options.source, options.to, options.allow_pickle = options.path, options.format, False
    return _convert(options)


def _import(options: Options) -> int:
    from ckpt_core import interchange

    if os.path.isfile(options.path):
        raise CheckpointFormatError(
            "this is one file",
            path=options.path,
            remedy=f"give the directory that dcp.save wrote, or that of a model; of a torch file: ckpt convert "
            f"{options.path} {options.target} --to directory",
        )
    refuse_other_data(options.target, options.storage_options, force=options.force)
    refuse_target_inside_checkpoint(options.target, options.storage_options)
    with progress(options, "import", 2 * size_at(options.path, options.storage_options)):
        if options.format == "dcp":
            interchange.import_dcp(
                options.path, options.target, only=options.only, storage_options=options.storage_options
            )
        else:
            interchange.import_model(
                options.path, options.target, part=options.part, storage_options=options.storage_options
            )
    rest = f"{options.path.rstrip('/')}/meta.pt"
    if options.format == "dcp" and storage_for(rest, options.storage_options).exists(rest):
        print(
            f"left out {rest}, in which Lightning has epoch, step, loops and callbacks: "
            "ckpt convert --to directory takes them",
            file=sys.stderr,
        )
    return _wrote(options, "directory")
