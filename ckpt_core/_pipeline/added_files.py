"""Files that a caller adds to a checkpoint."""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator

from ckpt_core._layouts.sharded.joining import describe_file
from ckpt_core._layouts.sharded.manifest import ExtraFile
from ckpt_core._pipeline.cleaning import leave
from ckpt_core.storage import LocalStorage, Storage, is_remote

__all__ = ["AddedFiles"]


class AddedFiles:
    """Files that a caller adds to a checkpoint, in a local directory until they are moved into it.

    Args:
        storage: Where the checkpoint goes.
        path: The checkpoint.

    Attributes:
        directory: Where the caller writes them.
    """

    def __init__(self, storage: Storage, path: str) -> None:
        self._storage = storage
        self._path = path
        self._token = f"added-{uuid.uuid4().hex[:12]}"
        self._is_temporary = is_remote(path)
        if self._is_temporary:
            self.directory = tempfile.mkdtemp(prefix="ckpt-")
        else:
            self.directory = storage.begin_directory(path, self._token)  # beside it: moving them costs nothing

    @classmethod
    def collect(cls, storage: Storage, path: str, write_files: Callable[[str], None]) -> AddedFiles:
        """Return what ``write_files`` writes into the directory that it is called with."""
        added = cls(storage, path)
        try:
            write_files(added.directory)
        except BaseException:
            added.close()
            raise
        return added

    def describe(self) -> list[ExtraFile]:
        """Return the files with their digests; links, of both kinds, are replaced by files of our own."""
        found = []
        for name in sorted(self._names()):
            path = self.local_path(name)
            if os.path.islink(path) or os.stat(path).st_nlink > 1:
                self._own(path)
            with LocalStorage().open(path) as reader:
                found.append(describe_file(name, reader))
        return found

    def _own(self, path: str) -> None:
        """Replace a link: what others write to their file later must not change the checkpoint's."""
        copied = f"{path}.{self._token}"
        shutil.copyfile(path, copied)
        os.replace(copied, path)

    def _names(self) -> Iterator[str]:
        for folder, _, files in os.walk(self.directory):
            for name in files:
                yield os.path.relpath(os.path.join(folder, name), self.directory).replace(os.sep, "/")

    def local_path(self, name: str) -> str:
        """Return where the file ``name`` is now."""
        return os.path.join(self.directory, *name.split("/"))

    def close(self) -> None:
        """Delete what was not moved."""
        if self._is_temporary:
            shutil.rmtree(self.directory, ignore_errors=True)
        else:
            leave(self._storage, self._path, self._token)
