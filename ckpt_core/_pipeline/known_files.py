"""What is remembered of the files of a committed checkpoint: which tensors are in them, and their digests."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ckpt_core._layouts.sharded.manifest import RankRecord, group_of
from ckpt_core._layouts.sharded.safetensors_file import DIGEST_BYTES, SMALLEST_BLOCK, FileLayout, IntArray, block_begins
from ckpt_core._layouts.sharded.writing import WrittenFile
from ckpt_core._pipeline.directories import read_manifest
from ckpt_core.digest import digest
from ckpt_core.errors import CheckpointCorruptedError, CheckpointError
from ckpt_core.storage import Storage

__all__ = ["NEVER_READ", "Known", "KnownFile", "changes", "known_at", "known_file"]

logger = logging.getLogger(__name__)

NEVER_READ = 2**31  # links of a file whose bytes this process has neither written nor read back

Key = tuple[str, str]  # part and tensor


@dataclasses.dataclass(frozen=True)
class KnownFile:
    """A safetensors file of the checkpoint.

    Attributes:
        name: Its name.
        part: The part it is of; None for the one with all per-rank parts.
        size: Its length in bytes.
        save_id: The save that wrote it.
        keys: The tensor that each chunk is of, in file order.
        names: The names of the chunks.
        blocks: For each chunk the number of the first block that it touches, and the number behind the last.
        is_large: For each chunk whether it has blocks of its own, which are the same wherever it stands.
        digests: Of its blocks, one after the other.
        links: How many checkpoints have taken it over since its bytes were written or read back.
    """

    name: str
    part: str | None
    size: int
    save_id: str
    keys: tuple[str, ...]
    names: tuple[str, ...]
    blocks: IntArray
    is_large: np.ndarray[Any, np.dtype[np.bool_]]
    digests: bytes
    links: int

    @property
    def header_digest(self) -> bytes:
        """Digest of the first block."""
        return self.digests[:DIGEST_BYTES]

    def digests_of(self, chunk: int) -> bytes:
        """Return the digests of the blocks that a chunk touches."""
        first, end = self.blocks[chunk].tolist()
        return self.digests[first * DIGEST_BYTES : end * DIGEST_BYTES]


@dataclasses.dataclass(frozen=True)
class Known:
    """A committed checkpoint, as far as one rank has written it.

    Attributes:
        path: Where it is.
        files: Its safetensors files.
        same: Tensors that were in the checkpoint before with the same values.
    """

    path: str
    files: tuple[KnownFile, ...]
    same: frozenset[Key]

    def with_header_of(self, layout: FileLayout) -> KnownFile | None:
        """Return the file that has the header of such a file, but for the save's id."""
        for file in self.files:
            fits = file.size == layout.size and len(file.digests) == (len(layout.blocks) - 1) * DIGEST_BYTES
            if fits and bytes.fromhex(digest(layout.header(file.save_id))) == file.header_digest:
                return file
        return None

    def groups(self) -> Mapping[str, Mapping[str, int]]:
        """Return for each part the groups in which its tensors are."""
        found: dict[str, dict[str, int]] = {}
        for file in self.files:
            if file.part is not None:
                found.setdefault(file.part, {}).update(dict.fromkeys(file.keys, group_of(file.name)))
        return found


def known_file(file: WrittenFile, *, links: int) -> KnownFile:
    """Return what is to be remembered of a file that was written, or taken over."""
    layout = file.layout
    return KnownFile(
        file.name,
        file.part,
        layout.size,
        file.save_id,
        file.keys,
        file.names,
        *_chunks(layout.blocks, layout.begins, layout.sizes),
        file.digests,
        links,
    )


def _chunks(
    blocks: IntArray, begins: Sequence[int], sizes: Sequence[int]
) -> tuple[IntArray, np.ndarray[Any, np.dtype[np.bool_]]]:
    begin, size = np.array(begins, dtype=np.int64), np.array(sizes, dtype=np.int64)
    first = np.searchsorted(blocks, begin, side="right") - 1
    end = np.maximum(np.searchsorted(blocks, begin + size, side="left"), first)
    return np.stack([first, end], axis=1), size >= SMALLEST_BLOCK


def changes(files: Iterable[KnownFile], before: Known) -> tuple[set[Key], set[Key]]:
    """Return which tensors have the values that they had in the checkpoint before, and which have others.

    Of some nothing is known: those that were not there, and small ones that shared their blocks with others than now.

    Args:
        files: Files of one part.
        before: The checkpoint before.
    """
    same: set[Key] = set()
    changed: set[Key] = set()
    for file in files:
        older = [other for other in before.files if other.part == file.part]
        twin = next((other for other in older if _stand_alike(file, other)), None)
        places = {} if twin is not None else {name: (other, i) for other in older for i, name in enumerate(other.names)}
        differs = [] if twin is None else _differ(file, twin)
        for number, (key, name) in enumerate(zip(file.keys, file.names, strict=True)):
            known = (file.part or "", key)
            if twin is not None:
                (changed if differs[number] else same).add(known)
            elif name in places and file.is_large[number]:
                other, place = places[name]
                (same if file.digests_of(number) == other.digests_of(place) else changed).add(known)
    return same - changed, changed


def _stand_alike(one: KnownFile, other: KnownFile) -> bool:
    return one.names == other.names and np.array_equal(one.blocks, other.blocks)


def _differ(one: KnownFile, other: KnownFile) -> list[bool]:
    """Return for each chunk whether a block that it touches differs."""
    blocks = np.frombuffer(one.digests, dtype=np.int64) != np.frombuffer(other.digests, dtype=np.int64)
    before = np.concatenate([[0], np.cumsum(blocks)])
    differs: list[bool] = (before[one.blocks[:, 1]] > before[one.blocks[:, 0]]).tolist()
    return differs


# ---- a checkpoint that another process has written -------------------------------------------------------------------


def known_at(storage: Storage, path: str, *, rank: int) -> Known | None:
    """Return what a rank has written of the checkpoint at ``path``; None if that cannot be found out."""
    try:
        _, manifest = read_manifest(storage, path)
        if rank >= len(manifest.ranks):
            return None
        files = tuple(_files_of(storage, path, manifest.ranks[rank], manifest.save_id))
    except (CheckpointError, ValueError, LookupError, TypeError, AttributeError) as error:
        logger.info("unchanged files of %s are written again: %s", path, error)
        return None
    same = {(file.part, key) for file in files if file.part is not None and group_of(file.name) for key in file.keys}
    return Known(path, files, frozenset(same))


def _files_of(storage: Storage, path: str, record: RankRecord, save_id: str) -> Iterable[KnownFile]:
    if record.digests is None:
        return
    digests = _read(storage, f"{path}/{record.digests.name}", record.digests.size)
    if digest(digests) != record.digests.digest:
        raise CheckpointCorruptedError("the digests differ from those that were saved", path=path)
    begin = 0
    for file in record.files:
        own = digests[begin : begin + file.blocks * DIGEST_BYTES]
        begin += len(own)
        header = _read(storage, f"{path}/{file.name}", file.header_size)
        if bytes.fromhex(digest(header)) != own[:DIGEST_BYTES]:
            raise CheckpointCorruptedError("the header of a file differs from what was saved", path=path, key=file.name)
        entries = [(name, entry["data_offsets"]) for name, entry in json.loads(header[8:]).items() if name[:2] != "__"]
        entries.sort(key=lambda entry: entry[1])
        names = tuple([name for name, _ in entries])
        begins = [file.header_size + first for _, (first, _) in entries]
        sizes = [last - first for _, (first, last) in entries]
        blocks = block_begins(file.header_size, sizes)
        keys = tuple([name.rpartition("@")[0] or name for name in names])
        places = _chunks(blocks, begins, sizes)
        links = NEVER_READ
        yield KnownFile(file.name, file.part, file.size, file.save_id or save_id, keys, names, *places, own, links)


def _read(storage: Storage, path: str, size: int) -> bytes:
    data = bytearray(size)
    with storage.open(path) as reader:
        reader.read_into(0, memoryview(data))
    return bytes(data)
