"""Runs ``torch.load`` without reading tensor data, and collects the empty storages to fill later."""

from __future__ import annotations

import contextlib
import functools
import io
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.serialization import default_restore_location, skip_data

MapLocation = Any

_UNCHECKED = threading.RLock()  # the setting is one for all threads


@contextlib.contextmanager
def without_data() -> Iterator[None]:
    """Make ``torch.load`` build tensors without reading their bytes.

    The indices of sparse tensors are not read either, so torch must not validate them: neither at the end of this load
    (if the program enabled ``torch.sparse.check_sparse_tensor_invariants``, or torch always does it) nor, if this load
    fails, at the end of the next load of the process, to which torch leaves the list of what to validate.
    """
    with _UNCHECKED, torch.sparse.check_sparse_tensor_invariants(False), _unlisted(), skip_data():
        yield


class _Unlisted(list[Any]):
    """A list that ignores what the thread that made it appends, and keeps what other threads append."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    def append(self, tensor: Any) -> None:
        if threading.get_ident() != self._thread:
            super().append(tensor)


@contextlib.contextmanager
def _unlisted() -> Iterator[None]:
    """Keep sparse tensors of this thread out of torch's list of those to validate when a load ends.

    torch always validates since 2.14, without a public switch. Its list is per thread since 2.15, and global before.
    """
    owner, name = getattr(torch.serialization, "_serialization_tls", None), "sparse_tensors_to_validate"
    if not hasattr(owner, name):
        owner, name = torch._utils, "_sparse_tensors_to_validate"
    listed = getattr(owner, name, None)
    if listed is None:
        yield
        return
    ours = _Unlisted()
    setattr(owner, name, ours)
    try:
        yield
    finally:
        setattr(owner, name, listed)
        listed.extend(ours)


class StorageCollector:
    """A ``map_location`` that does what the caller's would do, and collects the storages in the order of the pickle.

    Empty storages are left out, because torch asks for them again at each reference in the pickle. It does the same for
    storages on the meta device, which are therefore in the list several times.
    """

    def __init__(self, map_location: MapLocation, sizes: Sequence[int]) -> None:
        self.storages: list[torch.UntypedStorage] = []
        self._map_location = map_location
        self._sizes = sizes
        self._are_too_large = _skip_data_makes_too_large()

    def __call__(self, storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
        size = self._sizes[len(self.storages)] if len(self.storages) < len(self._sizes) else 0
        if self._are_too_large:
            # torch 2.8 multiplies by the itemsize twice when it skips the data.
            whole = [size // item * item for item in (2, 4, 8, 16) if size // item * item**2 == storage.nbytes() > 0]
            storage = torch.UntypedStorage(whole[0]) if whole else storage
        restored = self._restore(storage, location)
        if restored.nbytes():
            self.storages.append(restored)
        return restored

    def _restore(self, storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
        where = self._map_location
        if callable(where):
            chosen: torch.UntypedStorage | None = where(storage, location)
            if chosen is not None:
                return chosen
            where = location
        elif isinstance(where, dict):
            where = where.get(location, location)
        elif where is None:
            where = location
        # torch would copy bytes that are not loaded yet, and from memory that is not pinned.
        empty = default_restore_location(torch.UntypedStorage(0), str(where))
        if type(empty) is torch.UntypedStorage and empty.device.type != "cpu":
            return torch.UntypedStorage(storage.nbytes(), device=empty.device)
        restored: torch.UntypedStorage = default_restore_location(storage, str(where))
        return restored


@functools.cache
def _skip_data_makes_too_large() -> bool:
    file = io.BytesIO()
    torch.save(torch.zeros(1, dtype=torch.float64), file)
    file.seek(0)
    with skip_data():
        return bool(torch.load(file, weights_only=True).untyped_storage().nbytes() > 8)
