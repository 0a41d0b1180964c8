"""``ckpt inspect``: show what a checkpoint holds, without reading its tensors."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ckpt_core.cli.finding import Found, find, find_foreign, no_checkpoint, state_of
from ckpt_core.cli.output import age, count, interest, print_card, print_json, print_lines, printable, styled
from ckpt_core.cli.parser import Commands, Exit, Options
from ckpt_core.cli.progress import progress
from ckpt_core.errors import UnsafeCheckpointError
from ckpt_core.events import size_in_words
from ckpt_core.storage import storage_for

if TYPE_CHECKING:
    from ckpt_core.catalog import CheckpointInfo
    from ckpt_core.interchange import Foreign

_DEPTH = 2  # levels of the tree
_DEEPEST = 50
_MOST = 50  # maximum children shown for a name, without --all
_LONGEST = 80  # characters of a value
_MODELS = ("model", "state_dict", "module")  # usual keys of the model
# Keys under which frameworks record their version, and whether a resume is exact.
_LIGHTNING, _LIGHTNING_STATE, _LIGHTNING_LACKS = (
    "pytorch-lightning_version",
    "lightning_ckpt",
    "lightning_ckpt_no_exact_state",
)
_ACCELERATE = "accelerate_ckpt"


def add_commands(commands: Commands) -> None:
    """Add the verb of this file."""
    inspect = commands.add(
        "inspect",
        _inspect,
        help="show what a checkpoint holds; its tensors are not read",
        epilog="The tree shows tensors and bytes below each name; --all shows every tensor and value.",
        example="runs/last.ckpt --depth 3",
    )
    inspect.add_argument("path", metavar="PATH", help="a checkpoint: a file or a directory, path or URL")
    inspect.add_argument("--depth", type=_depth, default=_DEPTH, metavar="N", help=f"levels of the tree ({_DEPTH})")
    inspect.add_argument("--all", action="store_const", const=None, dest="depth", help="show every level of the tree")
    inspect.add_argument("--verify", action="store_true", help="compare every byte with its digest first")


def _depth(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of levels")
    return int(text)


def _inspect(options: Options) -> int:
    found = find(options.path, options.storage_options, failures={})  # ignore unreadable entries next to a checkpoint
    foreign = find_foreign(options.path, options.storage_options)
    if foreign is None and not found.is_checkpoint:
        raise no_checkpoint(found, options.storage_options)
    path = options.path if foreign is not None else found.checkpoints[0].path
    verified = None
    if foreign is not None:
        card, entries = _about_foreign(foreign, found)
        if options.verify:
            foreign.check()
            verified = False
    else:
        verified = _verified(path, options) if options.verify else None
        card, entries = _about(found.checkpoints[0], options.storage_options)
    card["verified"] = verified
    if options.json:
        values = {name: _as_json(leaf) for name, leaf in entries}
        print_json({"path": path, **card, "entries": values})
        return Exit.OK
    print(styled(printable(options.path), "bold"))
    print_card([(f"  {name}", text) for name, text in _card_lines(card)])
    if options.depth != 0 and card["problem"] is None:
        print()
        tree = _Tree()
        for name, leaf in entries:
            tree.add(name, leaf)
        for line in tree.lines(options.depth):
            print_lines(line, indent=len(line) - len(line.lstrip()) + 4)
    return Exit.OK


def _verified(path: str, options: Options) -> bool:
    from ckpt_core._pipeline import loading

    with progress(options, "verify", find(path, options.storage_options).checkpoints[0].size):
        return loading.verify(path, storage_options=options.storage_options)


# ---- the card --------------------------------------------------------------------------------------------------------


def _card(kind: str, state: str, size: int, **known: Any) -> dict[str, Any]:
    names = ("step", "epoch", "committed", "framework", "ranks", "parameters")
    unknown = {"bytes": size, "bytes_by_part": {}, "exact": None, "problem": None}
    return {"kind": kind, "state": state, **dict.fromkeys(names), **unknown, **known}


def _about_foreign(foreign: Foreign, found: Found) -> tuple[dict[str, Any], list[tuple[str, Any]]]:
    """Return the card of another program's checkpoint, and its leaves by key, with tensors without values."""
    from ckpt_core.tree import leaves

    size = found.size or sum(info.size for info in found.checkpoints)
    card = _card(foreign.what, "no digests", size)
    card["bytes_by_part"] = _bytes_by_key(foreign.state)
    _say(card, {}, {"model": foreign.model})
    return card, list(leaves(foreign.state))


def _about(
    info: CheckpointInfo, storage_options: dict[str, Any] | None
) -> tuple[dict[str, Any], list[tuple[str, Any]]]:
    """Return the card of a checkpoint, and its leaves by key, with tensors without values."""
    from ckpt_core._layouts.directory.loading import DirectoryReader
    from ckpt_core._pipeline import loading
    from ckpt_core.tree import leaves

    kind = "directory" if info.is_directory else "file"
    card = _card(kind, state_of(info, storage_options).lower(), info.size, step=info.step, committed=info.committed)
    storage = storage_for(info.path, storage_options)
    if not info.is_directory:
        try:
            state = loading.peek(info.path, storage=storage)
        except UnsafeCheckpointError as error:
            card["problem"] = error.message
            return card, []
        card["bytes_by_part"] = _bytes_by_key(state)
        if isinstance(state, Mapping):
            _say(card, state, state)
        return card, list(leaves(state))
    with DirectoryReader(info.path, storage) as checkpoint:
        card["ranks"] = checkpoint.world_size
        card["bytes_by_part"] = dict(checkpoint.bytes_of_parts)
        ranks = {name: checkpoint.ranks_with(name) for name in checkpoint.parts}
        parts = {
            name: checkpoint.peek(name, rank=ranks[name][0] if ranks[name] else 0)
            for name, part in checkpoint.parts.items()
            if part.kind != "per-rank" or ranks[name]
        }
        trainer = parts.get("trainer")
        rest = trainer.get("checkpoint") if isinstance(trainer, Mapping) else None
        _say(card, {**checkpoint.metadata, **(rest if isinstance(rest, Mapping) else {})}, parts)
        entries = list(leaves(checkpoint.metadata, "metadata"))
        return card, entries + [entry for name, part in parts.items() for entry in leaves(part, name)]


def _say(card: dict[str, Any], values: Mapping[Any, Any], parts: Mapping[Any, Any]) -> None:
    """Add to the card what the framework has recorded: version, step, epoch, exactness, number of parameters."""
    import torch

    from ckpt_core.tree import tensors

    accelerate = values.get(_ACCELERATE)
    if _LIGHTNING in values:
        card["framework"] = f"Lightning {values[_LIGHTNING]}"
        card["step"] = values.get("global_step", card["step"])
        lacks = values.get(_LIGHTNING_LACKS) or "saved without ResumableCheckpoint"
        card["exact"] = _exact(values[_LIGHTNING_STATE]) if _LIGHTNING_STATE in values else f"no: {lacks}"
    elif isinstance(accelerate, Mapping):
        card["framework"] = f"Accelerate {accelerate.get('accelerate')}, torch {accelerate.get('torch')}"
        notes = ["its data position is not known"] if accelerate.get("of_stock") else accelerate.get("not_exact")
        card["exact"] = f"no: {'; '.join(notes)}" if notes else "yes"
    epoch = values.get("epoch", _epoch_of(parts.get("own")))
    card["epoch"] = epoch if isinstance(epoch, int) else None
    model = next((parts[name] for name in _MODELS if isinstance(parts.get(name), Mapping)), None)
    if model is not None:
        found = (tensor for _, tensor in _distinct(tensors(model)))
        card["parameters"] = sum(tensor.numel() for tensor in found if not torch.nn.parameter.is_lazy(tensor))


def _exact(state: Any) -> str:
    """Return whether a resume of a Lightning run is exact, from the notes that its ranks have saved."""
    shared = state.get("replicated") if isinstance(state, Mapping) else None
    noted, changed = (shared.get("notes"), shared.get("changed")) if isinstance(shared, Mapping) else (None, None)
    if noted:
        return f"no: {'; '.join(map(str, noted))}"
    owners = changed.items() if isinstance(changed, Mapping) else ()
    lost = [f"{owner}.{name}" for owner, names in owners for name in names]
    if lost:
        return f"yes, unless it needs {', '.join(lost)}, which training had changed and no state holds"
    return "yes"


def _epoch_of(own: Any) -> Any:
    """Return the epoch of an Accelerate run, from the saved state of its loaders; None if there is none."""
    try:
        return next(loader["iteration"] for loader in own["data"]["loaders"] if loader and loader["trained"])
    except (KeyError, TypeError, StopIteration):
        return None


def _distinct(found: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield the first of all tensors that share one memory."""
    seen: set[int] = set()
    for name, tensor in found:
        try:
            memory = id(tensor) if tensor.is_meta or tensor.is_nested else tensor.untyped_storage()._cdata
        except NotImplementedError:  # a sparse tensor, which has separate memories for indices and values
            memory = id(tensor)
        if memory not in seen:
            seen.add(memory)
            yield name, tensor


def _bytes_by_key(state: Any) -> dict[str, int]:
    from ckpt_core.tree import tensors

    found: dict[str, int] = {}
    for name, tensor in _distinct(tensors(state)):
        first = name.partition(".")[0]
        found[first] = found.get(first, 0) + _nbytes(tensor)
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _card_lines(card: Mapping[str, Any]) -> list[tuple[str, str]]:
    verified = {None: "not compared here (--verify)", True: "every byte verified", False: "none: another program's"}
    with_buffers = " (with buffers)" if card["kind"] == "file" else ""
    lines = {
        "kind": card["kind"] + ("" if card["ranks"] is None else f", saved by {count(card['ranks'], 'rank')}"),
        "state": card["state"] + ("" if card["committed"] is None else f" {age(card['committed'])}"),
        "digests": verified[card["verified"]],
        "step": card["step"],
        "epoch": card["epoch"],
        "framework": card["framework"],
        "resume is exact": card["exact"],
        "parameters": None if card["parameters"] is None else f"{card['parameters']:,}" + with_buffers,
        "size": f"{size_in_words(card['bytes'])} ({card['bytes']:,} bytes)",
        "of these": ", ".join(f"{name} {size_in_words(size)}" for name, size in card["bytes_by_part"].items()) or None,
        "not readable": card["problem"],
    }
    return [(name, str(value)) for name, value in lines.items() if value is not None]


# ---- the tree --------------------------------------------------------------------------------------------------------


class _Tree:
    """A node of the tree of names, which are split at dots."""

    def __init__(self) -> None:
        self.children: dict[str, _Tree] = {}
        self.leaves: list[Any] = []
        self.tensors = 0
        self.values = 0
        self.bytes = 0

    def add(self, name: str, leaf: Any) -> None:
        """Add a leaf below a name."""
        node = self
        for part in name.split(".", _DEEPEST):
            node = node.children.setdefault(part, _Tree())
            if _is_array(leaf):
                node.tensors += 1
                node.bytes += _nbytes(leaf)
            else:
                node.values += 1
        node.leaves.append(leaf)

    def lines(self, depth: int | None, indent: str = "") -> Iterator[str]:
        """Yield the lines of ``depth`` levels, or of all levels if None; the most important parts come first."""
        if depth == 0:
            return
        names = sorted(self.children.items(), key=lambda item: (interest(item[0]), item[1].tensors == 0))
        shown = names if depth is None or len(names) <= _MOST + 1 else names[:_MOST]
        for first, below in shown:
            name, node = below.shortened(first)
            for leaf in node.leaves:
                yield f"{indent}{name}: {described(leaf)}"
            if node.children:
                yield f"{indent}{name}  {node.summary()}"
                yield from node.lines(None if depth is None else depth - 1, indent + "  ")
        if len(shown) < len(names):
            yield f"{indent}and {len(names) - len(shown)} more (--all)"

    def shortened(self, name: str) -> tuple[str, _Tree]:
        """Join a name with those below it as long as each is an only child; return the joined name and its node."""
        node = self
        while len(node.children) == 1 and not node.leaves:
            ((more, node),) = node.children.items()
            name += f".{more}"
        return name, node

    def summary(self) -> str:
        parts = []
        if self.tensors:
            parts.append(f"{count(self.tensors, 'tensor')}, {size_in_words(self.bytes)}")
        if self.values:
            parts.append(count(self.values, "value"))
        return ", ".join(parts)


def described(leaf: Any) -> str:
    """Return a description of a leaf in one line: type and shape of a tensor, or the value."""
    import torch

    if isinstance(leaf, torch.Tensor) and leaf.is_nested:
        return f"{str(leaf.dtype).removeprefix('torch.')}, nested, {count(leaf.size(0), 'tensor')}"
    if isinstance(leaf, (torch.UntypedStorage, torch.TypedStorage)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TypedStorage is deprecated
            return f"a storage of {count(leaf.nbytes(), 'byte')}"
    if torch.nn.parameter.is_lazy(leaf):
        return f"{str(leaf.dtype).removeprefix('torch.')}, not initialized"
    if _is_array(leaf):
        return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
    try:
        text = repr(leaf)
    except ValueError:  # an integer that is too long for Python to print
        return f"an integer of {leaf.bit_length()} bits" if isinstance(leaf, int) else f"a {type(leaf).__name__}"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _is_array(leaf: Any) -> bool:
    """Return whether a leaf is a tensor, or a NumPy array or scalar."""
    import numpy as np
    import torch

    return isinstance(leaf, (torch.Tensor, np.ndarray, np.generic))


def _nbytes(array: Any) -> int:
    import torch

    if isinstance(array, torch.Tensor) and array.layout is torch.sparse_coo:
        return array._indices().nbytes + array._values().nbytes
    return int(array.nbytes)


def _as_json(leaf: Any) -> Any:
    import torch

    if _is_array(leaf):
        has_none = getattr(leaf, "is_nested", False) or torch.nn.parameter.is_lazy(leaf)
        shape = None if has_none else list(leaf.shape)
        return {"dtype": str(leaf.dtype).removeprefix("torch."), "shape": shape}
    return leaf if isinstance(leaf, (str, float, bool, type(None))) else described(leaf)
