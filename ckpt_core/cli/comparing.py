"""``ckpt diff``: compare two checkpoints key by key, bit for bit."""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import pickle
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ckpt_core.cli.finding import find, find_foreign, no_checkpoint, size_at
from ckpt_core.cli.inspecting import described
from ckpt_core.cli.output import count, fail, interest, print_json, print_lines
from ckpt_core.cli.parser import Commands, Exit, Options
from ckpt_core.cli.progress import progress
from ckpt_core.errors import CheckpointError
from ckpt_core.paths import full_path

if TYPE_CHECKING:
    import torch

_SHOWN = 10  # maximum differences shown for each part
_KINDS = {"only_first": ("-", "red"), "only_second": ("+", "green"), "differ": ("~", "yellow")}


def add_commands(commands: Commands) -> None:
    """Add the verb of this file."""
    diff = commands.add(
        "diff",
        _diff,
        help="compare two checkpoints, key by key",
        epilog="First weights (- only in A, + only in B, ~ differ), then optimizers, steps, and the rest. A file may "
        "be compared with a directory. Both are loaded into memory, and every byte is verified.",
        example="runs/step=100.ckpt runs/step=200.ckpt",
        codes="0 the same bits, 1 they differ, 2 they cannot be compared, or usage.",
    )
    diff.add_argument("first", metavar="A", help="a checkpoint; path or URL")
    diff.add_argument("second", metavar="B", help="another checkpoint")
    diff.add_argument("--all", action="store_true", help=f"show more than {_SHOWN} differences of each part")
    diff.add_argument(
        "--allow-pickle", "--trust-pickle", action="store_true", help="load objects that are not plain data"
    )


def _diff(options: Options) -> int:
    try:
        size = sum(size_at(path, options.storage_options) for path in (options.first, options.second))
        with progress(options, "load", size):
            (first, is_model), (second, is_other_model) = (
                _leaves(path, options) for path in (options.first, options.second)
            )
        if is_model != is_other_model:
            first, second = (_named_as_in(second, first), second) if is_model else (first, _named_as_in(first, second))
    except CheckpointError as error:
        return fail(options, error, Exit.USAGE, said_by="ckpt diff")
    found = list(_differences(first, second))
    counts = {kind: sum(each[0] == kind for each in found) for kind in _KINDS}
    same = len(first) - counts["differ"] - counts["only_first"]
    if options.json:
        by_kind = {kind: {name: text for each, name, text in found if each == kind} for kind in _KINDS}
        print_json(by_kind | {"same": same})
    else:
        for part, entries in itertools.groupby(found, key=lambda each: _part(each[1])):
            for line, style in _lines(part, list(entries), None if options.all else _SHOWN):
                print_lines(line, style)
        print_lines(
            f"{count(same, 'key')} the same, {counts['differ']} differ, {counts['only_first']} only in "
            f"{options.first}, {counts['only_second']} only in {options.second}"
        )
    return Exit.FAILED if found else Exit.OK


def _differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield, for each key that differs, the kind of difference, the key and a description; weights come first."""
    parts = list(dict.fromkeys(map(_part, (*first, *second))))
    parts.sort(key=interest)
    for name in sorted({**first, **second}, key=lambda name: parts.index(_part(name))):
        if name not in second:
            yield "only_first", name, described(first[name])
        elif name not in first:
            yield "only_second", name, described(second[name])
        elif (difference := _difference(first[name], second[name])) is not None:
            yield "differ", name, difference


def _part(name: str) -> str:
    return name.partition(".")[0]


def _lines(part: str, entries: list[tuple[str, str, str]], most: int | None) -> Iterator[tuple[str, str]]:
    for kind, name, text in entries[:most]:
        sign, style = _KINDS[kind]
        yield f"{sign} {name}: {text}", style
    if most is not None and len(entries) > most:
        yield f"  and {len(entries) - most} more of {part} (--all)", ""


def _leaves(path: str, options: Options) -> tuple[dict[str, Any], bool]:
    """Return the leaves of a checkpoint by key, and whether it is a bare model, such as a safetensors file."""
    from ckpt_core.interchange.converting import load_whole, metadata_and_step
    from ckpt_core.tree import leaves

    found = find(path, options.storage_options)
    foreign = find_foreign(path, options.storage_options)
    if not found.is_checkpoint and foreign is None:
        raise no_checkpoint(found, options.storage_options)
    trust = False if options.allow_pickle else None
    state = load_whole(path, weights_only=trust, storage_options=options.storage_options)
    beside = metadata_and_step(full_path(path), options.storage_options)
    known = dict(leaves({**beside, **state} if beside else state, repeats=True))
    is_model = foreign is not None and foreign.state is foreign.model  # no other keys around the model
    return known, is_model and all(name.startswith("model.") for name in known)


def _named_as_in(other: Mapping[str, Any], model: dict[str, Any]) -> dict[str, Any]:
    """Return the leaves of a bare model, renamed to the model's keys in the checkpoint that it is compared with."""
    named = {name.partition(".")[2]: leaf for name, leaf in model.items()}
    first = next(iter(named), "")
    prefixes = {known.removesuffix(first) for known in other if known.endswith(f".{first}")}
    there = {prefix: [name for name in named if prefix + name in other] for prefix in sorted(prefixes)}
    likely = [prefix for prefix in there if len(there[prefix]) == max(map(len, there.values()))]

    def same(prefix: str) -> int:  # to choose between a model and its average, which have the same names
        return sum(_difference(named[name], other[prefix + name]) is None for name in there[prefix])

    prefix = max(likely, key=same) if len(likely) > 1 else likely[0] if likely else "model."
    return {prefix + name: leaf for name, leaf in named.items()}


def _difference(first: Any, second: Any) -> str | None:
    """Return a description of how two leaves differ; None if they have the same bits."""
    import numpy as np
    import torch

    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        with contextlib.suppress(TypeError, ValueError):  # torch lacks this type or this byte order
            first, second = torch.from_numpy(first.copy()), torch.from_numpy(second.copy())
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return _tensor_difference(first, second)
    if isinstance(first, float) and isinstance(second, float) and math.isnan(first) and math.isnan(second):
        return None
    if _is_same(first, second):
        return None
    texts = described(first), described(second)
    return "other values" if texts[0] == texts[1] else " and ".join(texts)


def _is_same(first: Any, second: Any) -> bool:
    """Return whether two values that are not tensors are the same, even if their ``repr`` shows only a part."""
    if type(first) is not type(second):
        return False
    if first is second or isinstance(first, int):
        return bool(first == second)
    if isinstance(first, (float, complex, str, bytes)):
        return repr(first) == repr(second)
    one, other = _pickled(first), _pickled(second)
    if one is not None and other is not None:
        if one[0] == other[0]:
            return all(_tensor_difference(*pair) is None for pair in zip(one[1], other[1], strict=True))
        if one[1] or other[1]:
            return False
    if isinstance(first, (set, frozenset)):
        return bool(first == second)
    # Equal values can have different pickles: a string that occurs twice may be one object or two.
    text = repr(first)
    return text == repr(second) and "..." not in text


def _pickled(value: Any) -> tuple[bytes, list[torch.Tensor]] | None:
    """Return the pickle of a value without its tensors, and the tensors; None if it cannot be pickled."""
    import torch

    found: list[torch.Tensor] = []

    class Pickler(pickle.Pickler):
        def persistent_id(self, part: Any) -> int | None:
            if not isinstance(part, torch.Tensor):
                return None
            found.append(part)
            return len(found)

    stream = io.BytesIO()
    try:
        Pickler(stream).dump(value)
    except Exception:  # noqa: BLE001 - whatever its class raises
        return None
    return stream.getvalue(), found


def _is_same_object(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two nested, sparse, quantized or subclassed tensors have the same pickle and the same bytes."""
    from ckpt_core._layouts.torch_file.pickling import StorageTable, pickle_state

    parts = []
    for tensor in (first, second):
        table = StorageTable()
        pickle, _ = pickle_state(tensor, table)
        parts.append((pickle.finish(), [memory.cpu().numpy().tobytes() for memory in table.memories()]))
    return type(first) is type(second) and parts[0] == parts[1]


def _bytes_in(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    # A dimension with one element can have any stride, which makes a direct view as bytes fail.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _tensor_difference(first: torch.Tensor, second: torch.Tensor) -> str | None:
    import torch

    if any(map(torch.nn.parameter.is_lazy, (first, second))):
        return None if type(first) is type(second) else f"{described(first)} and {described(second)}"
    if (first.dtype, first.layout, first.is_nested) != (second.dtype, second.layout, second.is_nested):
        return f"{described(first)} and {described(second)}"
    is_plain = {type(first), type(second)} <= {torch.Tensor, torch.nn.Parameter}
    if first.is_nested or first.layout != torch.strided or first.is_quantized or not is_plain:
        return None if _is_same_object(first, second) else "other values"
    if first.shape != second.shape or first.is_meta != second.is_meta:
        return f"{described(first)} and {described(second)}"
    if first.is_meta:
        return None
    one, other = (tensor.detach().cpu().resolve_conj().resolve_neg().contiguous() for tensor in (first, second))
    if not one.numel() or torch.equal(_bytes_in(one), _bytes_in(other)):
        return None
    text = f"{described(first)}, {{}} of {count(one.numel(), 'element')} differ"
    try:
        if one.numel() == 1 and one.item() != other.item():
            return f"{described(first)}, {one.item()!r} and {other.item()!r}"
        differing = int((one != other).sum()) if one.dtype.itemsize > 1 or not one.is_floating_point() else one.numel()
        if one.is_floating_point():
            text += f", by up to {float((one.double() - other.double()).abs().max()):.3g}"
    except RuntimeError:  # torch supports no operations on some types
        differing = one.numel()
    return text.format(f"{differing:,}")
