"""Frozen tensors are not written again: their file is linked to the one of the checkpoint before, or copied.

Callers say which tensors are frozen (:attr:`~ckpt_core.Part.frozen`), and those are written into a file of their own.
What decides is the content: the file is taken over only if every block of it has the digest that the same block has in
the file of the checkpoint before. A tensor that was called frozen and has changed costs a file that is written, and
never a wrong byte.

Every checkpoint remains whole by itself: what is taken over is a hard link or a copy, never a reference. Links share
the blocks of a disk, though, so a block that goes bad would be in all checkpoints from then on. Therefore a file is
read back and compared in full when this process has not written it, and after :data:`LINKS_BETWEEN_READINGS` links; one
that is damaged is written again. The file itself is not looked at otherwise, but for its header, which says which save
wrote it.
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
_READ = 8 * 2**20  # bytes of a file that are read at a time, to be compared
_WORTH_A_FILE = 256 * 1024  # a file costs a call or two to make durable, and its share of the manifest


@dataclasses.dataclass(frozen=True)
class _KnownFile:
    """A safetensors file of the checkpoint before."""

    name: str
    size: int  # its length in bytes
    save_id: str  # the save that wrote it
    digests: bytes  # of its blocks, one after the other; the first is its header's
    links: int  # how many checkpoints have taken it over since its bytes were written or read back

    def fits(self, layout: FileLayout) -> bool:
        """Return whether it has the header of such a file, but for the save's id."""
        fits = self.size == layout.size and len(self.digests) == (len(layout.blocks) - 1) * DIGEST_BYTES
        return fits and bytes.fromhex(digest(layout.header(self.save_id))) == self.digests[:DIGEST_BYTES]


@dataclasses.dataclass(frozen=True)
class _Known:
    """A committed checkpoint, as far as one rank has written it: where it is, and its safetensors files."""

    path: str
    files: tuple[_KnownFile, ...]


class UnchangedFiles:
    """What one rank knows of the last committed checkpoint, in order not to write the same files again.

    With ``divide_replicated``, parts that all ranks hold alike may be divided over files. If not, they stay files that
    other programs read as they are, and are taken over only if all of the part is frozen.
    """

    def __init__(self, *, rank: int, world_size: int, divide_replicated: bool, enabled: bool = True) -> None:
        self._rank = rank
        self._enabled = enabled
        self._world_size = world_size
        self._divide_replicated = divide_replicated
        self._known: _Known | None = None
        self._loaded: tuple[Storage, str] | None = None

    def loaded(self, storage: Storage, path: str) -> None:
        """Note that the run resumes from the checkpoint at ``path``, which is read when the first save comes."""
        if self._enabled and self._known is None:
            self._loaded = storage, path

    def begin(self, storage: Storage, path: str) -> IncrementalSave:
        """Return what a save at ``path`` needs to know."""
        if self._loaded is not None:
            found, self._loaded = _known_at(*self._loaded, rank=self._rank), None
            self._known = self._known or found
        return IncrementalSave(self, storage, path, self._known)

    def divide(self, content: PartContent) -> PartContent:
        """Return the part with its frozen tensors in a file of their own, if that is worth it."""
        may_be_divided = content.kind == "sharded" or (content.kind == "replicated" and self._divide_replicated)
        if not self._enabled or not may_be_divided or (self._world_size == 1 and not self._divide_replicated):
            return content
        sizes = {key: sum(piece.tensor.nbytes for piece in pieces) for key, pieces in content.pieces.items() if pieces}
        frozen = sizes.keys() & set(content.frozen)
        apart = len(frozen) < len(sizes) and sum(sizes[key] for key in frozen) >= _WORTH_A_FILE
        return dataclasses.replace(content, apart=apart)

    def committed(self, path: str, files: Iterable[_KnownFile]) -> None:
        """Note that a checkpoint is there, with these files of this rank."""
        if self._enabled:
            self._known = _Known(path, tuple(files))


class IncrementalSave:
    """One save that does not write again what is in the checkpoint before."""

    def __init__(self, memory: UnchangedFiles, storage: Storage, path: str, known: _Known | None) -> None:
        self._memory = memory
        self.storage = storage
        self._path = path
        self._known = known if known is not None and _same_store(known.path, path) else None
        self._frozen: Mapping[str, frozenset[str]] = {}
        self._links: dict[str, int] = {}

    def divide(self, contents: Sequence[PartContent]) -> list[PartContent]:
        """Return the parts with their tensors divided over files; called when the state is about to be taken."""
        self._frozen = {content.name: frozenset(content.frozen) for content in contents}
        return [self._memory.divide(content) for content in contents]

    def take_over(self, files: RankFiles, name: str, image: Image, target: str, *, scratch: ScratchBuffers) -> bool:
        """Make the file ``name`` of this save that of the checkpoint before, if they are equal; return whether it is.

        If not, it has to be written, over what may be there.
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
        except CheckpointError as error:  # deleted meanwhile, or the storage cannot: then it is written
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
        """Note that the checkpoint is there, with these files of this rank."""
        self._memory.committed(
            self._path,
            [
                _KnownFile(file.name, file.layout.size, file.save_id, file.digests, self._links.get(file.name, 0))
                for file in files.written()
            ],
        )


def _known_at(storage: Storage, path: str, *, rank: int) -> _Known | None:
    """Return what a rank of another process has written of the checkpoint at ``path``; None if that is not known."""
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
    """Take all bytes of an image, which leaves it with the digests of its blocks."""

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
    """Return whether the header of a file, or all of it, has the digests that are known of it."""
    blocks = list(map(int, file.layout.blocks)) if whole else [0, file.layout.header_size]
    wanted = [before.digests[i * DIGEST_BYTES : (i + 1) * DIGEST_BYTES].hex() for i in range(len(blocks) - 1)]
    # Whole blocks, as many as are read at a time; the header is larger only if there are very many tensors.
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
