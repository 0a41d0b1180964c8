"""Store structure that DCP cannot represent in an extra entry, so that an exported checkpoint can be restored exactly.

DCP has dictionaries with text keys, lists and values, and drops empty dictionaries. So an export has one additional
entry with the structure of every part, as in our manifests; the tensors are in the other entries.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any

import torch

from ckpt_core._layouts.directory.loading import DirectoryReader
from ckpt_core._layouts.directory.matching import tensor_paths
from ckpt_core._layouts.directory.skeleton import Opaque, decode_plain, encode_plain
from ckpt_core.errors import CheckpointCorruptedError, CheckpointFormatError, SerializationError
from ckpt_core.interchange.dcp_format import DcpEntry
from ckpt_core.interchange.dcp_reader import load_values, structure_of
from ckpt_core.interchange.flat_names import EntryPath, entries_of, entry_name
from ckpt_core.state.kinds import Kind
from ckpt_core.tree import leaves

STRUCTURE = "__ckpt_structure__"  # name of the additional entry
_VERSION = 1


def structure(checkpoint: DirectoryReader, states: Iterable[tuple[str, int, EntryPath]]) -> bytes:
    """Return the bytes of the structure entry for states (part, rank, path of the part's state), as DCP stores objects.

    Raises:
        SerializationError: Something in the state is not plain data; the error names the key.
    """
    parts: list[dict[str, Any]] = []
    values: list[torch.Tensor] = []
    for part, rank, prefix in states:
        if checkpoint.parts[part].kind == Kind.PER_RANK.value and rank not in checkpoint.ranks_with(part):
            continue
        for name, leaf in leaves(checkpoint.peek(part, rank=rank), part):
            if isinstance(leaf, Opaque):
                raise SerializationError(
                    f"a {leaf.kind} is not plain data, and has no place in DCP's format",
                    path=checkpoint.path,
                    key=name,
                    remedy="keep it out of the state, or write a file: ckpt convert --to file",
                )
        state = structure_of(checkpoint, part, rank)
        entries = list(entries_of(state, prefix))
        names = {id(entry.value): entry_name(entry.path) for entry in entries if isinstance(entry.value, torch.Tensor)}
        for entry in entries:
            if id(entry.value) not in names and any(tensor_paths(entry.value, torch.Tensor)):
                _put(state, entry.where, load_values(checkpoint, part, rank, {}, [entry])[0])
        skeleton, tensors = encode_plain(state, key=part)
        where: list[str | int] = []
        for _, tensor in tensors:
            where.append(names.get(id(tensor), len(values)))
            if id(tensor) not in names:
                values.append(tensor)
        stored = checkpoint.stored_tensors(part, rank=rank)
        if len(stored) == len(where):  # tied tensors are stored once, under whichever of their names is read
            first = dict(zip(reversed(stored), reversed(where), strict=True))
            where = [first[number] for number in stored]
        kind = checkpoint.parts[part].kind
        parts.append({"name": part, "kind": kind, "rank": rank, "skeleton": skeleton, "tensors": where})
    record = {
        "version": _VERSION,
        "world_size": checkpoint.world_size,
        "step": checkpoint.stamp.step,
        "metadata": encode_plain(dict(checkpoint.metadata), key="metadata")[0],
        "parts": parts,
    }
    data = io.BytesIO()
    torch.save({"structure": json.dumps(record), "values": values}, data)
    return data.getvalue()


def _put(state: Any, where: tuple[Hashable, ...], value: Any) -> None:
    functools.reduce(operator.getitem, where[:-1], state)[where[-1]] = value


@dataclasses.dataclass(frozen=True)
class _Part:
    kind: str
    ranks: dict[int, tuple[Any, list[str | int]]]  # structure; per tensor, its entry's name or index in the values


class Exported:
    """A DCP export of a directory checkpoint, open for reading through the same interface as the original.

    Args:
        path: The path of the export, for errors.
        record: The value of the structure entry.
        entries: All entries of the export, by name.
        load: Returns the tensor of an entry; the second argument is a device, or a function that allocates the tensor.
    """

    def __init__(
        self,
        path: str,
        record: Any,
        entries: Mapping[str, DcpEntry],
        load: Callable[[DcpEntry, Any], torch.Tensor],
    ) -> None:
        self.path = path
        self._entries = entries
        self._load = load
        self.parts: dict[str, _Part] = {}
        with self._sense():
            found = json.loads(record["structure"])
            if found["version"] != _VERSION:
                raise CheckpointFormatError(
                    f"the structure of the export has version {found['version']}, which is not known here",
                    path=path,
                    remedy="update this package",
                )
            self._values = list(record["values"])
            self.world_size = int(found["world_size"])
            self.step = found["step"]
            self.metadata = dict(decode_plain(found["metadata"], ()))
            for part in found["parts"]:
                known = self.parts.setdefault(part["name"], _Part(Kind(part["kind"]).value, {}))
                known.ranks[int(part["rank"])] = part["skeleton"], list(part["tensors"])

    @contextlib.contextmanager
    def _sense(self) -> Iterator[None]:
        try:
            yield
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise CheckpointCorruptedError(
                f"the structure of the export is invalid: {error!r}",
                path=self.path,
                key=STRUCTURE,
                remedy="export the checkpoint again",
            ) from error

    def ranks_with(self, part: str) -> tuple[int, ...]:
        """Return the ranks that have saved this part."""
        return tuple(sorted(self.parts[part].ranks))

    def load(self, part: str, *, rank: int = 0, map_location: Any = None) -> Any:
        """Return a part of the state; ``map_location`` is a device, or a function that allocates a tensor."""
        made: dict[str | int, torch.Tensor] = {}
        with self._sense():
            skeleton, where = self.parts[part].ranks[rank]

            def resolve(index: int) -> torch.Tensor:
                at = where[index]
                if at not in made:
                    made[at] = self._values[at] if isinstance(at, int) else self._load(self._entries[at], map_location)
                return made[at]

            return decode_plain(skeleton, resolve)
