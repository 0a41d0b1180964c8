"""The pickle inside a torch file: everything but the tensors' bytes.

This writes what ``torch.save`` writes, so that ``torch.load`` reads it, but it hands out the storages instead of
writing them. ``torch.serialization.skip_data`` would do the same; it is an early prototype by its own documentation,
needs a real file to write to, and takes a quarter longer (23 against 18 ms for 600 tensors), which the training thread
would pay.

torch's private names are used here and nowhere else in this package: ``TypedStorage._pickle_storage_type``,
``_untyped_storage`` and ``_size`` (what ``torch.save`` calls for its storage entries) and ``UntypedStorage._cdata``
(the identity of a storage that several tensors share).
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch.serialization import location_tag, normalize_storage_type

from ckpt_core.errors import SerializationError
from ckpt_core.memory import storage_of
from ckpt_core.tree import leaves, tensors

_PROTOCOL = 2  # torch's default, which every torch.load reads
_STORAGE_TYPES = (torch.storage.TypedStorage, torch.UntypedStorage)


class StorageTable:
    """The storages of a state, each once, in the order in which they were met.

    Tied tensors and views share a storage and therefore an entry.
    """

    def __init__(self) -> None:
        self.storages: list[torch.UntypedStorage] = []
        self._index: dict[int, int] = {}

    def add(self, storage: torch.UntypedStorage) -> int:
        """Return the index of ``storage``, adding it if it is new."""
        identity = storage._cdata
        index = self._index.get(identity)
        if index is None:
            index = self._index[identity] = len(self.storages)
            self.storages.append(storage)
        return index


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is plain and dense, and of no other kind (sparse, subclass, meta, ...)."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return False
    return tensor.device.type != "meta" and not tensor.is_quantized


def pickle_state(state: Any, table: StorageTable) -> tuple[bytes, list[int]]:
    """Pickle ``state`` with its storages taken out; also return these, in the order in which the pickle has them."""
    stream = io.BytesIO()
    pickler = _StoragePickler(stream, table)
    try:
        pickler.dump(state)
    except SerializationError as error:
        error.key = error.key or _key_of_second_type(state)
        raise
    except RecursionError as error:
        raise SerializationError(
            f"cannot save the state: it is nested too deep: {error}",
            remedy="save a flatter state: long chains of objects as a list",
        ) from error
    except Exception as error:  # whatever an object's own __reduce__ or __getstate__ raises
        key = _unpicklable_key(state)
        raise SerializationError(
            f"cannot save {'the value' if key else 'the state'}: {error}",
            key=key,
            remedy="keep objects that pickle refuses (lambdas, open files, locks, local classes) out of the state, "
            "or give them a __getstate__ that leaves such parts out",
        ) from error
    return stream.getvalue(), list(pickler.references)


class _StoragePickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, table: StorageTable) -> None:
        super().__init__(stream, protocol=_PROTOCOL)
        self.references: dict[int, torch.dtype] = {}
        self._table = table

    def persistent_id(self, obj: Any) -> tuple[str, Any, str, str, int] | None:
        if not isinstance(obj, _STORAGE_TYPES):
            return None
        if isinstance(obj, torch.UntypedStorage):
            storage, dtype = obj, torch.uint8
            storage_type, length = normalize_storage_type(type(obj)), obj.nbytes()
        else:
            storage, dtype = obj._untyped_storage, obj.dtype
            storage_type, length = getattr(torch, obj._pickle_storage_type()), obj._size()
        index = self._table.add(storage)
        if self.references.setdefault(index, dtype) is not dtype:
            raise SerializationError(
                f"two tensors share their memory but have different types ({dtype} and {self.references[index]}), "
                "which a torch file cannot express",
                remedy="clone one of the two before saving",
            )
        return ("storage", storage_type, str(index), location_tag(storage), length)


def _key_of_second_type(state: Any) -> str | None:
    types: dict[int, torch.dtype] = {}
    for name, tensor in tensors(state):
        if is_dense(tensor) and types.setdefault(tensor.untyped_storage()._cdata, tensor.dtype) is not tensor.dtype:
            return name
    return None


def _unpicklable_key(state: Any) -> str | None:
    for name, leaf in leaves(state):
        try:
            _StoragePickler(io.BytesIO(), StorageTable()).dump(leaf)
        except Exception:  # noqa: BLE001 - whatever this leaf raises, it is the one that we look for
            return name or None
    return None


def collect_storages(state: Any, table: StorageTable) -> list[torch.Tensor]:
    """Add the storages of all plain dense tensors of ``state`` to ``table`` and return those tensors."""
    plain = []
    for name, tensor in tensors(state):
        if is_dense(tensor):
            table.add(storage_of(tensor, key=name))
            plain.append(tensor)
    return plain
