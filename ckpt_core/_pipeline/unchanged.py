"""Tensors that have not changed since the last checkpoint are not written again: their file is linked or copied.

What decides is the content: a file is taken over only if every block of it has the digest that the same block has in
the file of the earlier checkpoint. So a file is taken over whole or not at all, and tensors that stay as they are get
files of their own (:class:`~ckpt_core._plan.Grouping`). Which those are may be guessed, from what was found at the last
save and from the counters in which autograd notes changes; a wrong guess costs a file that is written, and never a
wrong byte.

Every checkpoint remains whole by itself: what is taken over is a hard link or a copy, never a reference. Links share
the blocks of a disk, though, so a block that goes bad would be in all checkpoints from then on. Therefore a file is
read back and compared in full when this process has not written it, and after :data:`LINKS_BETWEEN_READINGS` links; one
that is damaged is written anew. The file itself is not looked at otherwise, but for its header, which says which save
wrote it.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from ckpt_core._layouts.image import WINDOW, Image
from ckpt_core._layouts.sharded.writing import PartContent, RankFiles, WrittenFile
from ckpt_core._pipeline.known_files import Known, KnownFile, changes, known_at, known_file
from ckpt_core._plan import Grouping
from ckpt_core.digest import digest
from ckpt_core.errors import CheckpointError
from ckpt_core.memory import ScratchBuffers
from ckpt_core.parallel import IO_THREADS, run_parallel
from ckpt_core.storage import FileReader, Storage, is_remote

__all__ = ["LINKS_BETWEEN_READINGS", "IncrementalSave", "UnchangedFiles"]

logger = logging.getLogger(__name__)

LINKS_BETWEEN_READINGS = 10
_READ = 8 * 2**20  # bytes of a file that are read at a time, to be compared

Key = tuple[str, str]  # part and tensor
Hint = tuple[int, int]  # address and autograd's counter of changes


class UnchangedFiles:
    """What one rank knows of the last committed checkpoint, in order not to write the same files again.

    Args:
        rank: This process's rank.
        world_size: Number of ranks.
        divide_replicated: Whether parts that all ranks hold alike may be divided over files. If not, they stay files
            that other programs read as they are, and are taken over only if all of the part is unchanged.
        enabled: If not, everything is written each time.
    """

    def __init__(self, *, rank: int, world_size: int, divide_replicated: bool, enabled: bool = True) -> None:
        self._rank = rank
        self._enabled = enabled
        self._world_size = world_size
        self._divide_replicated = divide_replicated
        self._groupings: dict[str, Grouping] = {}
        self._known: Known | None = None
        self._hints: Mapping[Key, Hint] = {}
        self._misled: set[Key] = set()
        self._loaded: tuple[Storage, str] | None = None

    def loaded(self, storage: Storage, path: str) -> None:
        """Note that the run resumes from the checkpoint at ``path``, which is read when the first save comes."""
        if self._enabled and self._known is None:
            self._loaded = storage, path

    def begin(self, storage: Storage, path: str) -> IncrementalSave:
        """Return what a save at ``path`` needs to know."""
        if self._loaded is not None:
            found, self._loaded = known_at(*self._loaded, rank=self._rank), None
            if found is not None and self._known is None:
                self._known = found
                for part, groups in found.groups().items():
                    self._grouping(part).restore(groups)
        hints = {key: hint for key, hint in self._hints.items() if key not in self._misled}
        return IncrementalSave(self, storage, path, self._known, hints)

    def _grouping(self, part: str) -> Grouping:
        return self._groupings.setdefault(part, Grouping())

    def group(self, content: PartContent, unchanged: Collection[Key]) -> PartContent:
        """Return the part with the groups that its tensors are written in."""
        may_be_divided = self._divide_replicated if content.kind == "replicated" else content.kind == "sharded"
        if not may_be_divided or (self._world_size == 1 and not self._divide_replicated):
            return content
        sizes = {key: sum(piece.tensor.nbytes for piece in pieces) for key, pieces in content.pieces.items()}
        found = {key for key in sizes if (content.name, key) in unchanged}
        return dataclasses.replace(content, groups=self._grouping(content.name).update(sizes, found))

    def committed(self, known: Known, hints: Mapping[Key, Hint], misled: Iterable[Key]) -> None:
        """Note that a save was committed.

        Args:
            known: Its files.
            hints: Of the tensors, when it began.
            misled: Tensors that have changed although their hint said that they had not: not every kernel counts.
        """
        if self._enabled:
            self._known, self._hints = known, hints
            self._misled.update(misled)


class IncrementalSave:
    """One save that does not write again what is in the checkpoint before.

    Args:
        memory: What it is a save of.
        storage: Where it goes.
        path: The checkpoint.
        known: The checkpoint before, if one is known.
        hints: Of the tensors at that time.
    """

    def __init__(
        self, memory: UnchangedFiles, storage: Storage, path: str, known: Known | None, hints: Mapping[Key, Hint]
    ) -> None:
        self._memory = memory
        self._storage = storage
        self._path = path
        self._known = known if known is not None and _same_store(known.path, path) else None
        self._hints_before = hints
        self._hints: dict[Key, Hint] = {}
        self._expected: set[Key] = set()
        self._links: dict[str, int] = {}
        self._surprises: set[str] = set()  # files that were not what was expected

    def divide(self, contents: Sequence[PartContent]) -> list[PartContent]:
        """Return the parts with their tensors divided over files; called when the state is about to be taken."""
        for content in contents:
            if content.kind == "per-rank":
                continue
            for key, pieces in content.pieces.items():
                if len(pieces) == 1 and not pieces[0].tensor.is_inference():
                    self._hints[content.name, key] = pieces[0].tensor.data_ptr(), pieces[0].tensor._version
        if self._known is not None:
            before = self._hints_before
            self._expected = {key for key, hint in self._hints.items() if before.get(key) == hint} | self._known.same
        return [self._memory.group(content, self._expected) for content in contents]

    def take_over(self, files: RankFiles, name: str, image: Image, target: str, *, scratch: ScratchBuffers) -> bool:
        """Make the file ``name`` of this save that of the checkpoint before, if the two are equal.

        Args:
            files: The files of this save; learns of it.
            name: Which of them.
            image: Its bytes.
            target: Where it goes.
            scratch: Lends memory.

        Returns:
            Whether it is there now. If not, it has to be written, over what may be there.
        """
        if self._known is None:
            return False
        file = next((file for file in files.written() if file.name == name), None)
        if file is None or file.part is None or not {(file.part, key) for key in file.keys} <= self._expected:
            return False
        before = self._known.with_header_of(file.layout)
        if before is None:
            return False
        _take_all(image, scratch)
        file = next(file for file in files.written() if file.name == name)
        if file.digests[len(before.header_digest) :] != before.digests[len(before.header_digest) :]:
            self._surprises.add(name)
            return False
        try:
            self._storage.copy(f"{self._known.path}/{before.name}", target)
            is_right = self._is_right(target, file, before)
        except CheckpointError as error:  # deleted meanwhile, or the storage cannot: then it is written
            logger.info(
                "wrote %s again, because %s/%s could not be copied: %s", name, self._known.path, before.name, error
            )
            return False
        if is_right:
            files.take_over(name, save_id=before.save_id, header_digest=before.header_digest)
        return is_right

    def _is_right(self, target: str, file: WrittenFile, before: KnownFile) -> bool:
        assert self._known is not None
        links = before.links + 1
        whole = links > LINKS_BETWEEN_READINGS
        with self._storage.open(target) as reader:
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
        written = [known_file(file, links=self._links.get(file.name, 0)) for file in files.written()]
        same: set[Key] = set()
        misled: set[Key] = set()
        if self._known is not None:
            for part in {file.part for file in written if file.part is not None}:
                unchanged, changed = changes([f for f in written if f.part == part], self._known)
                if not changed:
                    unchanged = {key for key in self._known.same if key[0] == part}  # saved twice: nothing new is known
                same |= unchanged
                expected = {(part, key) for f in written if f.name in self._surprises for key in f.keys}
                misled |= changed & expected
        self._memory.committed(Known(self._path, tuple(written), frozenset(same)), self._hints, misled)


def _same_store(one: str, other: str) -> bool:
    if is_remote(one) != is_remote(other):
        return False
    return not is_remote(one) or one.split("/")[:3] == other.split("/")[:3]


def _take_all(image: Image, scratch: ScratchBuffers) -> None:
    """Take all bytes of an image, which leaves it with the digests of its blocks."""

    def take(begin: int) -> None:
        if image.is_staged:
            image.window(begin, None)
            return
        buffer = scratch.take(min(WINDOW, image.region_size))
        try:
            image.window(begin, buffer)
        finally:
            scratch.give(buffer)

    windows = range(0, image.region_size, WINDOW)
    run_parallel(take, windows, threads=max(1, min(IO_THREADS, len(windows))))
    image.tail()


def _compare(reader: FileReader, file: WrittenFile, before: KnownFile, *, whole: bool) -> bool:
    """Return whether the header of a file, or all of it, has the digests that are known of it."""
    blocks = file.layout.blocks.tolist() if whole else [0, file.layout.header_size]
    wanted = [before.digests[i * 8 : i * 8 + 8].hex() for i in range(len(blocks) - 1)]
    # Whole blocks, as many as are read at a time; the header is larger only if there are very many tensors.
    first_of_read = np.unique(np.searchsorted(blocks, range(0, blocks[-1], _READ), side="right") - 1).tolist()
    found: list[bool] = []
    scratch = ScratchBuffers()

    def compare(number: int) -> None:
        first = first_of_read[number]
        last = first_of_read[number + 1] if number + 1 < len(first_of_read) else len(blocks) - 1
        begin, end = blocks[first], blocks[last]
        buffer = scratch.take(end - begin)
        try:
            memory = buffer.memory[: end - begin]
            reader.read_into(begin, memory)
            found.extend(
                digest(memory[blocks[index] - begin : blocks[index + 1] - begin]) == wanted[index]
                for index in range(first, last)
            )
        finally:
            scratch.give(buffer)

    try:
        run_parallel(compare, range(len(first_of_read)), threads=max(1, min(IO_THREADS, len(first_of_read))))
    finally:
        scratch.close()
    return all(found)
