"""Opens the files of a directory checkpoint: checks their sizes and save ids, and compares blocks with digests."""

from __future__ import annotations

import errno
import re
import threading
from collections.abc import Iterator, Sequence

from ckpt_core._layouts.directory.contents import Shard
from ckpt_core._layouts.directory.manifest import ExtraFile, Manifest
from ckpt_core._layouts.directory.safetensors_file import DIGEST_BYTES
from ckpt_core.digest import digest, digest_of_parts
from ckpt_core.errors import (
    CheckpointCorruptedError,
    CheckpointError,
    CheckpointFormatError,
    CheckpointNotFoundError,
    StorageError,
)
from ckpt_core.process.threads import run_parallel
from ckpt_core.storage.base import MANIFEST_NAME, CountingReader, FileReader, Storage

_REMEDY = "resume from another checkpoint; this one cannot be repaired"
# A directory, a file in place of the folder, a pipe or socket, a link to itself.
_NO_FILE = (errno.EISDIR, errno.ENOTDIR, errno.ENXIO, errno.ELOOP)
_MOST_OPEN = 64  # files: the system limits the number of files that a process has open
_LARGEST_WHOLE = 2**31  # bytes
_READ = 4 * 2**20  # bytes per read when the digest of a whole file is computed
_SAVE_IN_HEADER = re.compile(rb'"save":"([^"]*)"')


def describe_file(name: str, reader: FileReader) -> ExtraFile:
    """Return the record of a file that a caller adds to the checkpoint."""
    return ExtraFile(name, reader.size, digest_of_parts(file_pieces(reader)))


def file_pieces(reader: FileReader) -> Iterator[memoryview]:
    """Yield the bytes of a file from begin to end; the memory is reused for the next ones."""
    memory = memoryview(bytearray(min(_READ, reader.size)))
    for begin in range(0, reader.size, _READ):
        piece = memory[: min(_READ, reader.size - begin)]
        reader.read_into(begin, piece)
        yield piece


class Files:
    """The files of a checkpoint, opened on demand; ``sizes`` has the bytes of each file in the manifest, by name."""

    def __init__(self, directory: str, storage: Storage) -> None:
        self.sizes: dict[str, int] = {}
        self.bytes_read = 0
        self._directory = directory
        self._storage = storage
        self._save_id = ""
        self._digest_files: dict[int, ExtraFile] = {}
        self._digests: dict[int, memoryview] = {}
        self._readers: dict[str, FileReader] = {}
        self._lock = threading.Lock()

    def use(self, manifest: Manifest) -> None:
        """Take the names, sizes and save id of the files from the manifest."""
        self._save_id = manifest.save_id
        for number, rank in enumerate(manifest.ranks):
            self.sizes.update({file.name: file.size for file in rank.files})
            self.sizes.update({file.name: file.size for file in rank.extra_files})
            if rank.digests is not None:
                self._digest_files[number] = rank.digests
                self.sizes[rank.digests.name] = rank.digests.size

    def path_of(self, name: str) -> str:
        return f"{self._directory}/{name}"

    def open(self, name: str) -> FileReader:
        """Open a file of the checkpoint's directory; raise if there is none."""
        return CountingReader(self._storage.open_inside(self._directory, name), self._count)

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self.bytes_read += nbytes

    def read_manifest(self) -> bytes:
        """Return the bytes of the manifest.

        Raises:
            CheckpointNotFoundError: There is none.
            CheckpointFormatError: The checkpoint's path is a file.
            CheckpointCorruptedError: Something other than a file has the manifest's name.
        """
        try:
            with self.open(MANIFEST_NAME) as reader:
                return reader.read_whole()
        except StorageError as error:
            if error.errno == errno.ENOTDIR:
                raise CheckpointFormatError(
                    f"{self._directory} is a file, but a checkpoint directory was expected",
                    path=self._directory,
                    remedy="load it with ckpt_core.Checkpointer, SyncCheckpointIO or AsyncCheckpointIO, or pass the "
                    "path of a directory",
                ) from error
            if error.errno not in _NO_FILE:
                raise
            message = "the checkpoint's manifest is missing, and something else has its name"
            raise _corrupted(message, self.path_of(MANIFEST_NAME)) from error
        except CheckpointNotFoundError as error:
            raise CheckpointNotFoundError(
                f"there is no checkpoint at {self._directory}: it has no {MANIFEST_NAME}, which is written last",
                path=self._directory,
                remedy="check the path; a save that did not finish leaves none",
            ) from error

    def _open_named(self, name: str) -> FileReader:
        """Open a file listed in the manifest; raise if it is missing or has another size."""
        try:
            reader = self.open(name)
        except CheckpointNotFoundError as error:
            raise _corrupted("a file of the checkpoint is missing", self.path_of(name)) from error
        except StorageError as error:
            if error.errno not in _NO_FILE:
                raise
            message = "a file of the checkpoint is missing, and something else has its name"
            raise _corrupted(message, self.path_of(name)) from error
        if reader.size != self.sizes[name]:
            reader.close()
            raise _corrupted(
                f"a file of the checkpoint has {reader.size} bytes instead of {self.sizes[name]}", self.path_of(name)
            )
        return reader

    def read_whole(self, file: ExtraFile) -> bytes:
        """Return the verified bytes of a file of at most 2 GiB."""
        if file.size > _LARGEST_WHOLE:
            raise CheckpointError(
                f"a file of {file.size} bytes is too large to be read into memory",
                path=self.path_of(file.name),
                remedy="verify the checkpoint, and read the file from where it is",
            )
        with self._open_named(file.name) as reader:
            data = reader.read_whole(_LARGEST_WHOLE)
        self._compare_whole(file, digest(data))
        return data

    def verify_whole(self, file: ExtraFile) -> None:
        """Compare a file with its digest."""
        with self._open_named(file.name) as reader:
            found = digest_of_parts(file_pieces(reader))
        self._compare_whole(file, found)

    def _compare_whole(self, file: ExtraFile, found: str) -> None:
        if found != file.digest:
            raise _corrupted("the bytes of a file differ from those that were saved", self.path_of(file.name))

    def prepare(self, shards: Sequence[Shard]) -> None:
        """Check that files are there, complete, and of this save: their sizes, headers and files of digests."""
        if not shards:
            return
        threads = self.threads(shards)
        ranks = sorted({shard.rank for shard in shards} - self._digests.keys())
        run_parallel(self._load_digests, ranks, threads=min(threads, len(ranks)))
        for batch in self.batches(shards):
            run_parallel(self._check_header, batch, threads=min(threads, len(batch)))

    def _load_digests(self, rank: int) -> None:
        self._digests[rank] = memoryview(self.read_whole(self._digest_files[rank]))

    def _check_header(self, shard: Shard) -> None:
        header = memoryview(bytearray(shard.file.header_size))
        self.read(shard, 0, header)
        found = _SAVE_IN_HEADER.search(header)
        wanted = shard.file.save_id or self._save_id
        if found is not None and found[1].decode("ascii", "replace") != wanted:
            raise _corrupted(
                f"a file of the checkpoint belongs to another save, {found[1].decode('ascii', 'replace')} and not "
                f"{wanted}",
                self.path_of(shard.file.name),
            )
        self.compare(shard, 0, header)

    def batches(self, shards: Sequence[Shard]) -> Iterator[Sequence[Shard]]:
        """Yield the files in groups that may be open at the same time."""
        for first in range(0, len(shards), _MOST_OPEN):
            yield shards[first : first + _MOST_OPEN]
            if len(shards) > _MOST_OPEN:
                self.close()

    def threads(self, shards: Sequence[Shard]) -> int:
        """Return with how many threads to read files; ``shards`` must not be empty."""
        return self._reader(shards[0].file.name).threads

    def passes_cache(self, shard: Shard) -> bool:
        """Return whether a file is read faster as whole pages into page-aligned memory (past the page cache)."""
        return self._reader(shard.file.name).passes_cache

    def read(self, shard: Shard, offset: int, memory: memoryview) -> None:
        """Fill ``memory`` with the bytes of a file from ``offset`` on."""
        self._reader(shard.file.name).read_into(offset, memory)

    def _reader(self, name: str) -> FileReader:
        """Return the open file of this name, opening it if necessary."""
        reader = self._readers.get(name)
        if reader is None:
            opened = self._open_named(name)
            with self._lock:
                reader = self._readers.setdefault(name, opened)
            if reader is not opened:
                opened.close()
        return reader

    def compare(self, shard: Shard, block: int, memory: memoryview) -> None:
        """Compare the bytes of a block with its digest; an error names the file and the tensor."""
        begin = (shard.first_digest + block) * DIGEST_BYTES
        if digest(memory) == self._digests[shard.rank][begin : begin + DIGEST_BYTES].hex():
            return
        path, tensor = self.path_of(shard.file.name), shard.tensor_at(shard.blocks[block])
        if tensor is None:
            raise _corrupted("the header of a file differs from what was saved", path)
        key = shard.key_of(tensor)
        raise _corrupted(f"the bytes of {key!r} differ from those that were saved", path, key)

    def close(self) -> None:
        """Close all files; they are reopened on demand."""
        with self._lock:
            while self._readers:
                self._readers.popitem()[1].close()


def _corrupted(message: str, path: str, key: str | None = None) -> CheckpointCorruptedError:
    return CheckpointCorruptedError(message, path=path, key=key, remedy=_REMEDY)
