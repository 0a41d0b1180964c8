"""``ckpt diff``: in what two checkpoints differ."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ckpt_core.cli.finding import find, size_at
from ckpt_core.cli.inspecting import described
from ckpt_core.cli.output import count, print_json, printable, styled
from ckpt_core.cli.parser import Commands, Exit, Options
from ckpt_core.errors import CheckpointError, CheckpointFormatError

if TYPE_CHECKING:
    import torch

__all__ = ["add_commands"]

_SHOWN = 20  # differences of each kind


def add_commands(commands: Commands) -> None:
    """Add the verb of this file."""
    diff = commands.add(
        "diff",
        _diff,
        help="compare two checkpoints, key by key",
        epilog="A file may be compared with a directory. Both are loaded into memory, and every byte is verified.\n"
        "Exit codes: 0 the same bits, 1 they differ, 2 they cannot be compared.",
    )
    diff.add_argument("first", metavar="A", help="a checkpoint; path or URL")
    diff.add_argument("second", metavar="B", help="another one")
    diff.add_argument("--all", action="store_true", help=f"show more than {_SHOWN} differences of each kind")
    diff.add_argument("--trust-pickle", action="store_true", help="load objects that are not plain data")


def _diff(options: Options) -> int:
    from ckpt_core.cli.progress import progress

    try:
        size = sum(size_at(path, options.storage_options) for path in (options.first, options.second))
        with progress(options, "load", size):
            first, second = _leaves(options.first, options), _leaves(options.second, options)
    except CheckpointError as error:
        print(f"ckpt diff: {type(error).__name__}: {error}", file=sys.stderr)
        return Exit.USAGE
    only_first = [(name, described(leaf)) for name, leaf in first.items() if name not in second]
    only_second = [(name, described(leaf)) for name, leaf in second.items() if name not in first]
    differ = [
        (name, difference)
        for name, leaf in first.items()
        if name in second and (difference := _difference(leaf, second[name])) is not None
    ]
    same = len(first) - len(only_first) - len(differ)
    if options.json:
        found = {"only_first": only_first, "only_second": only_second, "differ": differ}
        print_json({name: dict(entries) for name, entries in found.items()} | {"same": same})
    else:
        for sign, style, entries in (("-", "red", only_first), ("+", "green", only_second), ("~", "yellow", differ)):
            for line in _lines(sign, entries, None if options.all else _SHOWN):
                print(styled(line, style))
        print(
            f"{count(same, 'key')} the same, {len(differ)} differ, {len(only_first)} only in {options.first}, "
            f"{len(only_second)} only in {options.second}"
        )
    return Exit.FAILED if only_first or only_second or differ else Exit.OK


def _lines(sign: str, entries: list[tuple[str, str]], most: int | None) -> Iterator[str]:
    for name, text in entries[:most]:
        yield f"{sign} {printable(name)}: {printable(text)}"
    if most is not None and len(entries) > most:
        yield f"{sign} and {len(entries) - most} more (--all)"


def _leaves(path: str, options: Options) -> dict[str, Any]:
    from ckpt_core.interchange import load_whole
    from ckpt_core.tree import leaves

    if not find(path, options.storage_options).is_checkpoint:
        raise CheckpointFormatError("this is a directory, and no checkpoint", path=path, remedy=f"ckpt ls {path}")
    trust = False if options.trust_pickle else None
    return dict(leaves(load_whole(path, weights_only=trust, storage_options=options.storage_options)))


def _difference(first: Any, second: Any) -> str | None:
    """Return in what two leaves differ; None if they are the same bits."""
    import numpy as np
    import torch

    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray) and first.dtype.kind in "biufc":
        first, second = torch.from_numpy(first.copy()), torch.from_numpy(second.copy())
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return _tensor_difference(first, second)
    is_same = type(first) is type(second) and (first is second or repr(first) == repr(second))
    if isinstance(first, float) and isinstance(second, float) and not is_same:
        return f"{first!r} and {second!r}" if not (math.isnan(first) and math.isnan(second)) else None
    return None if is_same else f"{described(first)} and {described(second)}"


def _tensor_difference(first: torch.Tensor, second: torch.Tensor) -> str | None:
    import torch

    if (first.dtype, first.shape, first.layout) != (second.dtype, second.shape, second.layout):
        return f"{described(first)} and {described(second)}"
    if first.is_nested or first.layout != torch.strided or first.is_quantized:
        return None if repr(first) == repr(second) else "other values"
    one, other = (tensor.detach().cpu().resolve_conj().resolve_neg().contiguous() for tensor in (first, second))
    if torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8)) or not one.numel():
        return None
    differing = int((one != other).sum()) if one.dtype.itemsize > 1 or not one.is_floating_point() else one.numel()
    text = f"{described(first)}, {differing:,} of {count(one.numel(), 'element')} differ"
    if one.is_floating_point():
        text += f", by up to {float((one.double() - other.double()).abs().max()):.3g}"
    return text
