"""Saves frozen tensors incrementally: their file is hard-linked or copied from the previous checkpoint.

The caller says which tensors are frozen (:attr:`~ckpt_core.Part.frozen`), and those are written into a separate file.
The content decides: the file is taken over only if every block has the same digest as that block has in the previous
checkpoint's file. If a tensor declared as frozen has changed, its file is written again: no wrong byte is ever saved.

Every checkpoint stays complete by itself: a file that is taken over is a hard link or a copy, never a reference. Hard
links share the blocks of a disk, though, so a block that goes bad would be in all later checkpoints. Therefore a file
is read back and compared in full if this process has not written it, and after :data:`LINKS_BETWEEN_READINGS` links; a
damaged one is written again. Otherwise only its header is read, which says which save wrote the file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from ckpt_core._layouts.directory.manifest import RankRecord
from ckpt_core._layouts.directory.safetensors_file import DIGEST_BYTES, FileLayout
from ckpt_core._layouts.directory.writing import PartContent, RankFiles, WrittenFile
from ckpt_core._layouts.image import WINDOW, Image
from ckpt_core._pipeline.directory_commit import read_manifest
from ckpt_core.buffers import ScratchBuffers
from ckpt_core.digest import digest
from ckpt_core.errors import CheckpointCorruptedError, CheckpointError
from ckpt_core.process.threads import IO_THREADS, run_parallel
from ckpt_core.storage import FileReader, Storage, is_remote

logger = logging.getLogger(__name__)

LINKS_BETWEEN_READINGS = 10
_NEVER_READ = 2**31  # links of a file whose bytes this process has neither written nor read back
_READ = 8 * 2**20  # bytes per read when a file is compared
_WORTH_A_FILE = 256 * 1024  # bytes: a file costs a call or two to make it durable, and an entry in the manifest


@dataclasses.dataclass(frozen=True)
class _KnownFile:
    """A safetensors file of the previous checkpoint."""

    name: str
    size: int  # its length in bytes
    save_id: str  # the save that wrote it
    digests: bytes  # the digests of its blocks, concatenated; the first is the header's
    links: int  # how many checkpoints have taken the file over since it was written or read back

    def fits(self, layout: FileLayout) -> bool:
        """Return whether the file has the size and header of ``layout``, apart from the id of the save."""
        fits = self.size == layout.size and len(self.digests) == (len(layout.blocks) - 1) * DIGEST_BYTES
        return fits and bytes.fromhex(digest(layout.header(self.save_id))) == self.digests[:DIGEST_BYTES]


@dataclasses.dataclass(frozen=True)
class _Known:
    """One rank's share of a committed checkpoint: the checkpoint's path, and the rank's safetensors files."""

    path: str
    files: tuple[_KnownFile, ...]


class UnchangedFiles:
    """What one rank knows about the last committed checkpoint, so that it need not write the same files again.

    With ``divide_replicated``, replicated parts may be split into a frozen and another file. Without it, each stays one
    file that other programs can read as it is, and is taken over only if the whole part is frozen.
    """

    def __init__(self, *, rank: int, world_size: int, divide_replicated: bool, enabled: bool = True) -> None:
        self._rank = rank
        self._enabled = enabled
        self._world_size = world_size
        self._divide_replicated = divide_replicated
        self._known: _Known | None = None
        self._loaded: tuple[Storage, str] | None = None

    def loaded(self, storage: Storage, path: str) -> None:
        """Note that the run resumes from the checkpoint at ``path``; the first save reads its manifest and digests."""
        if self._enabled and self._known is None:
            self._loaded = storage, path

    def begin(self, storage: Storage, path: str) -> IncrementalSave:
        """Begin a save at ``path``, which may take over files of the last known checkpoint."""
        if self._loaded is not None:
            found, self._loaded = _known_at(*self._loaded, rank=self._rank), None
            self._known = self._known or found
        return IncrementalSave(self, storage, path, self._known)

    def divide(self, content: PartContent) -> PartContent:
        """Return the part with its frozen tensors moved to a separate file, if they are large enough."""
        may_be_divided = content.kind == "sharded" or (content.kind == "replicated" and self._divide_replicated)
        if not self._enabled or not may_be_divided or (self._world_size == 1 and not self._divide_replicated):
            return content
        sizes = {key: sum(piece.tensor.nbytes for piece in pieces) for key, pieces in content.pieces.items() if pieces}
        frozen = sizes.keys() & set(content.frozen)
        apart = len(frozen) < len(sizes) and sum(sizes[key] for key in frozen) >= _WORTH_A_FILE
        return dataclasses.replace(content, apart=apart)

    def committed(self, path: str, files: Iterable[_KnownFile]) -> None:
        """Note that the checkpoint at ``path`` is committed, with these files of this rank."""
        if self._enabled:
            self._known = _Known(path, tuple(files))


class IncrementalSave:
    """One save that takes over unchanged files of the previous checkpoint instead of writing them again."""

    def __init__(self, memory: UnchangedFiles, storage: Storage, path: str, known: _Known | None) -> None:
        self._memory = memory
        self.storage = storage
        self._path = path
        self._known = known if known is not None and _same_store(known.path, path) else None
        self._frozen: Mapping[str, frozenset[str]] = {}
        self._links: dict[str, int] = {}

    def divide(self, contents: Sequence[PartContent]) -> list[PartContent]:
        """Return the parts with their tensors divided over files; called right before the state is taken."""
        self._frozen = {content.name: frozenset(content.frozen) for content in contents}
        return [self._memory.divide(content) for content in contents]

    def take_over(self, files: RankFiles, name: str, image: Image, target: str, *, scratch: ScratchBuffers) -> bool:
        """Link or copy the file ``name`` from the previous checkpoint if it is equal, and return whether it was.

        If not, the caller has to write the file, and to overwrite what may be at ``target``.
        """
        if self._known is None:
            return False
        file = next((file for file in files.written() if file.name == name), None)
        if file is None or file.part is None or not self._frozen[file.part].issuperset(file.keys):
            return False
        before = next((known for known in self._known.files if known.fits(file.layout)), None)
        if before is None:
            return False
        _take_all(image, scratch)
        file = next(file for file in files.written() if file.name == name)
        if file.digests[DIGEST_BYTES:] != before.digests[DIGEST_BYTES:]:
            return False
        try:
            self.storage.copy(f"{self._known.path}/{before.name}", target)
            is_right = self._is_right(target, file, before)
        except CheckpointError as error:  # deleted meanwhile, or the storage cannot copy: the caller writes the file
            logger.info(
                "wrote %s again, because %s/%s could not be copied: %s", name, self._known.path, before.name, error
            )
            return False
        if is_right:
            files.take_over(name, save_id=before.save_id, header_digest=before.digests[:DIGEST_BYTES])
        return is_right

    def _is_right(self, target: str, file: WrittenFile, before: _KnownFile) -> bool:
        assert self._known is not None
        links = before.links + 1
        whole = links > LINKS_BETWEEN_READINGS
        with self.storage.open(target) as reader:
            found = reader.size == file.layout.size and _compare(reader, file, before, whole=whole)
        if not found:
            logger.warning(
                "the file %s of the checkpoint %s is damaged: its tensors, which have not changed, are written again",
                before.name,
                self._known.path,
            )
        self._links[file.name] = 0 if whole else links
        return found

    def committed(self, files: RankFiles) -> None:
        """Note that the checkpoint is committed, with these files of this rank."""
        self._memory.committed(
            self._path,
            [
                _KnownFile(file.name, file.layout.size, file.save_id, file.digests, self._links.get(file.name, 0))
                for file in files.written()
            ],
        )


def _known_at(storage: Storage, path: str, *, rank: int) -> _Known | None:
    """Return the files that ``rank`` of an earlier process wrote for the checkpoint at ``path``; None if unknown."""
    try:
        _, manifest = read_manifest(storage, path)
        if rank >= len(manifest.ranks):
            return None
        return _Known(path, tuple(_files_of(storage, path, manifest.ranks[rank], manifest.save_id)))
    except (CheckpointError, ValueError, LookupError, TypeError, AttributeError) as error:
        logger.info("unchanged files of %s are written again: %s", path, error)
        return None


def _files_of(storage: Storage, path: str, record: RankRecord, save_id: str) -> Iterable[_KnownFile]:
    if record.digests is None:
        return
    with storage.open(f"{path}/{record.digests.name}") as reader:
        digests = reader.read_whole()
    if digest(digests) != record.digests.digest:
        raise CheckpointCorruptedError("the digests differ from those that were saved", path=path)
    begin = 0
    for file in record.files:
        end = begin + file.blocks * DIGEST_BYTES
        yield _KnownFile(file.name, file.size, file.save_id or save_id, digests[begin:end], _NEVER_READ)
        begin = end


def _same_store(one: str, other: str) -> bool:
    if is_remote(one) != is_remote(other):
        return False
    return not is_remote(one) or one.split("/")[:3] == other.split("/")[:3]


def _take_all(image: Image, scratch: ScratchBuffers) -> None:
    """Read all windows of an image, so that the digests of all its blocks are known."""

    def take(begin: int) -> None:
        if image.is_staged:
            image.digested_window(begin, None)
            return
        with scratch.lent(min(WINDOW, image.region_size)) as buffer:
            image.digested_window(begin, buffer)

    windows = range(0, image.region_size, WINDOW)
    run_parallel(take, windows, threads=max(1, min(IO_THREADS, len(windows))))
    image.tail()


def _compare(reader: FileReader, file: WrittenFile, before: _KnownFile, *, whole: bool) -> bool:
    """Return whether the header (with ``whole``: the whole file) has the digests recorded for ``before``."""
    blocks = list(map(int, file.layout.blocks)) if whole else [0, file.layout.header_size]
    wanted = [before.digests[i * DIGEST_BYTES : (i + 1) * DIGEST_BYTES].hex() for i in range(len(blocks) - 1)]
    # Each read covers whole blocks, about _READ bytes; more only for the header of very many tensors.
    first_of_read: list[int] = np.unique(
        np.searchsorted(blocks, range(0, blocks[-1], _READ), side="right") - 1
    ).tolist()
    found: list[bool] = []

    def compare(number: int) -> None:
        first = first_of_read[number]
        last = first_of_read[number + 1] if number + 1 < len(first_of_read) else len(blocks) - 1
        begin, end = blocks[first], blocks[last]
        with scratch.lent(end - begin) as buffer:
            memory = buffer.memory[: end - begin]
            reader.read_into(begin, memory)
            found.extend(
                digest(memory[blocks[index] - begin : blocks[index + 1] - begin]) == wanted[index]
                for index in range(first, last)
            )

    with contextlib.closing(ScratchBuffers()) as scratch:
        run_parallel(compare, range(len(first_of_read)), threads=max(1, min(IO_THREADS, len(first_of_read))))
    return all(found)
