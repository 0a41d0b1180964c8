"""Saves a state as one torch-loadable file: tensors are staged while the rest of the state is pickled."""

from __future__ import annotations

import functools
from typing import Any

from ckpt_core._layouts.torch_file.archive import FileImage, StateLayout
from ckpt_core._pipeline.save import Pipeline
from ckpt_core._pipeline.staging import Snapshot
from ckpt_core._pipeline.writer import write_image
from ckpt_core.storage import Storage


class FileSave:
    """One save of a state as one file."""

    is_shared = False

    def __init__(self, state: Any, storage: Storage, path: str, pipeline: Pipeline) -> None:
        self.path = path
        self.is_known = False
        self._state = state
        self._storage = storage
        self._pipeline = pipeline
        self._layout: StateLayout | None = None
        self._image: FileImage | None = None

    @property
    def size(self) -> int:
        return self._taken_image.approximate_size

    @property
    def _taken_image(self) -> FileImage:
        assert self._image is not None  # take() comes first
        return self._image

    def take(self, snapshot: Snapshot) -> None:
        self._layout = layout = StateLayout(self._state)
        snapshot.take(layout)
        if snapshot.buffer is None:
            self._image = layout.live_image()
        else:
            self._image = layout.staged_image(snapshot.buffer, snapshot.wait_until)

    def complete(self, snapshot: Snapshot) -> None:
        assert self._layout is not None  # take() comes first
        snapshot.finish(functools.partial(self._layout.pickle_into, self._taken_image, self._state))
        self._state = self._layout = None  # all that remains to write is in the image: staged or live tensors

    def write(self, snapshot: Snapshot) -> int:
        snapshot.wait_taken()
        self._pipeline.directories.note_commits(self._storage, self.path)
        image = self._taken_image
        size = self._write_image(image, snapshot)
        self._pipeline.refused.warn_of(self.path, image.refused_by_default)
        return size

    def _write_image(self, image: FileImage, snapshot: Snapshot) -> int:
        passed = snapshot.pass_through([(self.path, image)])
        return write_image(
            image if passed is None else passed[0][1],
            self._storage,
            self.path,
            scratch=self._pipeline.scratch,
            meanwhile=functools.partial(self.complete, snapshot) if snapshot.is_live else None,
            before_tail=snapshot.wait_sealed,
            written=None if passed is None else passed[0][1].written,
        )

    def close(self) -> None:
        self._state = self._layout = self._image = None
