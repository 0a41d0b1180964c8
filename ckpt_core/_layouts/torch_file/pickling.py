"""The pickle inside a torch file: everything but the tensors' bytes.

This writes what ``torch.save`` writes, so that ``torch.load`` reads it, but it hands out the storages instead of
writing them. ``torch.serialization.skip_data`` would do the same; it is an early prototype by its own documentation,
needs a real file to write to, and takes three times as long (13 against 5 ms for 600 tensors), which the training
thread would pay.

torch's private names are used here and nowhere else in this package: ``TypedStorage._pickle_storage_type``,
``_untyped_storage`` and ``_size`` (what ``torch.save`` calls for its storage entries), ``UntypedStorage._cdata``
(the identity of a storage that several tensors share), and ``_rebuild_tensor_v2``, which the file names for a tensor.
"""

from __future__ import annotations

import functools
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch._utils import _rebuild_tensor_v2
from torch.serialization import location_tag, normalize_storage_type

from ckpt_core.buffers import storage_of
from ckpt_core.errors import SerializationError
from ckpt_core.tree import leaf_values, leaves, tensors

_PROTOCOL = 2  # torch's default, which every torch.load reads
_STORAGE_TYPES = (torch.storage.TypedStorage, torch.UntypedStorage)
_PLAIN_DTYPES = frozenset(
    getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "complex128", "complex64"),
        *("int64", "int32", "int16", "int8", "uint8", "bool"),
    )
)
# Named tensors, which torch refuses to save, have gone from newer ones.
_has_names: Callable[[torch.Tensor], bool] = getattr(torch.Tensor, "has_names", lambda _: False)


_Entry = tuple[str, Any, str, str, int]  # what the pickle has in the place of a storage


class _Stored:
    """A storage whose entry is known."""

    __slots__ = ("entry",)

    def __init__(self, entry: _Entry) -> None:
        self.entry = entry


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
    return not (tensor.is_meta or tensor.is_quantized)


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

    def persistent_id(self, obj: Any) -> _Entry | None:
        if type(obj) is _Stored:
            return obj.entry
        if not isinstance(obj, _STORAGE_TYPES):
            return None
        if isinstance(obj, torch.UntypedStorage):
            return self._entry(obj, torch.uint8, normalize_storage_type(type(obj)), obj.nbytes())
        storage_type = getattr(torch, obj._pickle_storage_type())
        return self._entry(obj._untyped_storage, obj.dtype, storage_type, obj._size())

    def reducer_override(self, obj: Any) -> Any:
        """Return what ``__reduce_ex__`` would, sooner: for plain tensors, and the empty dictionary that each has."""
        if type(obj) is OrderedDict and not obj and not obj.__dict__:
            return OrderedDict, ()
        if type(obj) is not torch.Tensor or not _is_plain(obj):
            return NotImplemented
        storage, dtype = obj.untyped_storage(), obj.dtype
        hooks: OrderedDict[Any, Any] = OrderedDict()  # of its own, as each loaded tensor has to have
        stored = _Stored(self._entry(storage, dtype, _storage_type(dtype), storage.nbytes() // obj.itemsize))
        arguments = (stored, obj.storage_offset(), tuple(obj.size()), obj.stride(), obj.requires_grad, hooks)
        return _rebuild_tensor_v2, arguments

    def _entry(self, storage: torch.UntypedStorage, dtype: torch.dtype, storage_type: Any, length: int) -> _Entry:
        index = self._table.add(storage)
        if self.references.setdefault(index, dtype) is not dtype:
            raise SerializationError(
                f"two tensors share their memory but have different types ({dtype} and {self.references[index]}), "
                "which a torch file cannot express",
                remedy="clone one of the two before saving",
            )
        return "storage", storage_type, str(index), location_tag(storage), length


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether nothing but its type, place, size and strides belongs to a tensor."""
    return (
        tensor.dtype in _PLAIN_DTYPES
        and is_dense(tensor)
        and not (tensor.is_nested or tensor.is_conj() or tensor.is_neg() or _has_names(tensor))
        and (tensor.is_cpu or tensor.device.type == "cuda")
        and tensor._backward_hooks is None
        and not tensor.__dict__
    )


@functools.cache
def _storage_type(dtype: torch.dtype) -> Any:
    return getattr(torch, torch.storage.TypedStorage(0, dtype=dtype, _internal=True)._pickle_storage_type())


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
    plain = [leaf for leaf in leaf_values(state) if isinstance(leaf, torch.Tensor) and is_dense(leaf)]
    for tensor in plain:
        try:
            table.add(storage_of(tensor, key=""))
        except SerializationError:
            key = next((name for name, leaf in tensors(state) if leaf is tensor), "")
            table.add(storage_of(tensor, key=key))  # which says it again, with the key
    return plain
