"""Pickles a state for a torch file: everything except the tensors' bytes, whose storages are returned separately.

The pickle is the one that ``torch.save`` writes, so that ``torch.load`` reads it. ``torch.serialization.skip_data``
would leave out the bytes, too, but is an early prototype by its own documentation, needs a real file to write to, and
takes almost three times as long (13 instead of 5 ms for 600 tensors) on the training thread.

Private names of torch used by this package: here ``TypedStorage._pickle_storage_type``, ``_untyped_storage`` and
``_size`` (which ``torch.save`` calls for its storage entries), ``UntypedStorage._cdata`` (the identity of a storage
that several tensors share), and ``_rebuild_tensor_v2`` (the function that the pickle names for a tensor); in
``storage_collector``, the list of sparse tensors that a load is going to validate.
"""

from __future__ import annotations

import functools
import io
import os
import pickle
import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._utils import _rebuild_tensor_v2
from torch.serialization import location_tag, normalize_storage_type

from ckpt_core.buffers import bytes_of, storage_of
from ckpt_core.errors import SerializationError
from ckpt_core.tree import PLAIN_TYPES, leaves, tensor_values, tensors

_PROTOCOL = 2  # torch's default, which every torch.load reads
_STORAGE_TYPES = (torch.storage.TypedStorage, torch.UntypedStorage)
_PLAIN_DTYPES = frozenset(
    getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "complex128", "complex64"),
        *("int64", "int32", "int16", "int8", "uint8", "bool"),
    )
)
_ITEM_SIZES = {dtype: dtype.itemsize for dtype in _PLAIN_DTYPES}  # bytes; faster than asking torch each time
# Named tensors, which torch refuses to save, were removed in newer releases.
_has_names: Callable[[torch.Tensor], bool] | None = getattr(torch.Tensor, "has_names", None)


_Entry = tuple[str, Any, str, str, int]  # what the pickle contains in place of a storage
# What the pickle contains for a plain tensor, except the storage's number: dtype, shape, strides, offset,
# requires_grad, and the location and length of the storage.
_Described = tuple[Any, ...]
_DESCRIPTION = 100  # bytes in the pickle for each plain tensor, approximately


class StorageTable:
    """The storages of a state, each once, in the order in which they were found.

    Tied tensors and views share a storage, and so an entry. A storage without bytes has one entry for each dtype that
    uses it: torch saves it so, and for a memory-mapped file it reads an entry with the first dtype that it finds.
    """

    def __init__(self) -> None:
        self.storages: list[torch.UntypedStorage] = []
        self.sizes: list[int] = []  # size of each storage in bytes, in whole elements, as the pickle counts them
        self.plain: list[tuple[int, _Described]] = []  # the plain tensors by number: index of the storage, description
        self.numbers: dict[int, int] = {}  # numbers of the plain tensors, by id()
        self._kept: list[torch.Tensor] = []  # the plain tensors, kept so that no other tensor gets the same id()
        self._index: dict[Any, int] = {}
        # Equal descriptions, which are common, share one object: memory for each takes longer than computing it.
        self._descriptions: dict[_Described, _Described] = {}
        self._places: dict[torch.device, str] = {}  # torch's location tags, which are slow to compute

    def add(self, storage: torch.UntypedStorage, dtype: torch.dtype) -> int:
        """Return the index of ``storage``, adding it if it is new."""
        return self._add(storage, storage.nbytes(), dtype, dtype.itemsize)

    def _add(self, storage: torch.UntypedStorage, nbytes: int, dtype: torch.dtype, item_size: int) -> int:
        identity = storage._cdata if nbytes else (storage._cdata, dtype)
        index = self._index.get(identity)
        if index is None:
            index = self._index[identity] = len(self.storages)
            self.storages.append(storage)
            self.sizes.append(nbytes - nbytes % item_size)
        return index

    def add_plain(self, tensor: torch.Tensor) -> int | None:
        """Return the number of a plain tensor, adding it if it is new; None if a description does not cover it.

        Everything is in one function because calls into torch are slow: for thousands of small tensors, they take a
        tenth of the time of the copy.
        """
        number = self.numbers.get(id(tensor))
        if number is not None:
            return number
        dtype, is_cpu = tensor.dtype, tensor.is_cpu
        item_size = _ITEM_SIZES.get(dtype)
        if (
            item_size is None
            or tensor.layout is not torch.strided
            or not (is_cpu or tensor.device.type == "cuda")
            or tensor.is_nested
            or tensor.is_neg()
            or (dtype.is_complex and tensor.is_conj())
            or tensor._is_zerotensor()  # has no memory: torch refuses to save it
            or tensor._backward_hooks is not None
            or tensor.__dict__
            or (_has_names is not None and _has_names(tensor))
        ):
            return None
        storage = storage_of(tensor)
        nbytes = storage.nbytes()
        described = (
            dtype,
            tensor.shape,
            tensor.stride(),
            tensor.storage_offset(),
            tensor.requires_grad,
            "cpu" if is_cpu else self._place_of(storage),
            nbytes // item_size,
        )
        described = self._descriptions.setdefault(described, described)
        number = self.numbers[id(tensor)] = len(self.plain)
        self.plain.append((self._add(storage, nbytes, dtype, item_size), described))
        self._kept.append(tensor)
        return number

    def _place_of(self, storage: torch.UntypedStorage) -> str:
        device = storage.device
        place = self._places.get(device)
        if place is None:
            place = self._places[device] = location_tag(storage)
        return place

    def memories(self, begin: int = 0, end: int | None = None) -> list[torch.Tensor]:
        """Return the memory of the storages ``begin`` to ``end`` as ``uint8`` tensors."""
        found = zip(bytes_of(self.storages[begin:end]), self.sizes[begin:end], strict=True)
        return [memory if memory.numel() == size else memory[:size] for memory, size in found]


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor or parameter is dense: not sparse, quantized, on the meta device, or of a subclass."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return False
    return not (tensor.is_meta or tensor.is_quantized or tensor._is_zerotensor())


class PickledState:
    """A pickle into which the plain tensors still have to be inserted; it does not need the state any more.

    Inserting them takes as long as all of the pickling before, so the writer thread does it, in :meth:`finish`.
    """

    def __init__(self, dumped: bytes, mark: bytes, plain: Sequence[tuple[int, _Described]], memo_size: int) -> None:
        self.approximate_size = len(dumped) + _DESCRIPTION * len(plain)  # bytes
        self._dumped, self._mark, self._plain, self._memo_size = dumped, mark, plain, memo_size

    def finish(self) -> bytes:
        """Return the complete pickle, with the plain tensors inserted."""
        if not self._plain:
            return self._dumped
        # LONG1, its length, the number, BINPERSID
        parts = re.split(rb"\x8a\x0c(....)" + re.escape(self._mark) + rb"Q", self._dumped, flags=re.DOTALL)
        numbers = [int.from_bytes(number, "little") for number in parts[1::2]]
        met_again = {number for number, count in Counter(numbers).items() if count > 1}
        opcodes = _TensorOpcodes(self._memo_size)
        written: dict[int, bytes] = {}
        for at, number in enumerate(numbers):
            if number in written:
                parts[2 * at + 1] = written[number]
                continue
            parts[2 * at + 1] = opcodes.of(*self._plain[number])
            if number in met_again:
                put, written[number] = opcodes.memorize()
                parts[2 * at + 1] += put
        return b"".join(parts)


def pickle_state(state: Any, table: StorageTable) -> tuple[PickledState, list[int]]:
    """Pickle ``state`` without its storages; also return their indices, in the order in which the pickle has them."""
    stream = io.BytesIO()
    pickler = _StoragePickler(stream, table, {})
    try:
        pickler.dump(state)
    except SerializationError as error:
        error.key = error.key or _unpicklable_key(state)
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
    return pickler.finish(), list(pickler.references)


class _StoragePickler(pickle.Pickler):
    """Pickles everything except plain tensors, which become numbers; :class:`PickledState` replaces the numbers later.

    The result is the same as with ``Tensor.__reduce_ex__``, in a third of the time: that method runs Python code for
    each of the 25 objects that describe a tensor, nearly all of which are the same for every tensor.
    """

    def __init__(self, stream: io.BytesIO, table: StorageTable, references: dict[int, torch.dtype]) -> None:
        super().__init__(stream, protocol=_PROTOCOL)
        self._stream = stream
        self.references = references  # the dtype of each storage, by its index, in the order of the pickle
        self._table = table
        self._mark = os.urandom(7) + b"\1"  # random, unlike any number in a state; the last byte makes it positive
        self._first_number = int.from_bytes(b"\0\0\0\0" + self._mark, "little")

    def persistent_id(self, obj: Any) -> _Entry | int | None:
        kind = type(obj)
        if kind in PLAIN_TYPES:
            return None
        if kind is torch.Tensor:
            number = self._table.add_plain(obj)
            if number is None:
                if obj.is_nested and not obj.size(0):
                    raise SerializationError(
                        "a nested tensor of no tensors cannot be saved: torch could not load it",
                        remedy="save an empty list",
                    )
                return None
            index, described = self._table.plain[number]
            self._refer(index, described[0])
            return self._first_number + number
        if not isinstance(obj, _STORAGE_TYPES):
            return None
        if isinstance(obj, torch.UntypedStorage):
            return self._entry(obj, torch.uint8, normalize_storage_type(type(obj)), obj.nbytes())
        storage_type = getattr(torch, obj._pickle_storage_type())
        return self._entry(obj._untyped_storage, obj.dtype, storage_type, obj._size())

    def _entry(self, storage: torch.UntypedStorage, dtype: torch.dtype, storage_type: Any, length: int) -> _Entry:
        if storage.device.type == "meta":
            raise SerializationError(
                "a storage on the meta device has no bytes", remedy="save the tensor that it is of, or materialize it"
            )
        index = self._table.add(storage, dtype)
        self._refer(index, dtype)
        return "storage", storage_type, str(index), location_tag(storage), length

    def _refer(self, index: int, dtype: torch.dtype) -> None:
        if self.references.setdefault(index, dtype) is not dtype:
            raise SerializationError(
                f"two tensors share their memory but have different types ({dtype} and {self.references[index]}), "
                "which a torch file cannot express",
                remedy="clone one of the two before saving",
            )

    def finish(self) -> PickledState:
        """Return the pickle that was dumped."""
        return PickledState(self._stream.getvalue(), self._mark, self._table.plain, self._memo_size())

    def _memo_size(self) -> int:
        """Return the size of the pickler's memo, found by one more dump; reading ``self.memo`` would copy all of it."""
        begin = self._stream.tell()
        self.dump([])
        self._stream.seek(begin + len(pickle.PROTO + b"\2" + pickle.EMPTY_LIST + pickle.BINPUT))
        return int.from_bytes(self._stream.read().removesuffix(pickle.STOP), "little")


class _TensorOpcodes:
    """Generates the opcodes that ``pickle`` would write for ``_rebuild_tensor_v2`` and its arguments.

    ``memo_size`` is the number of values in the memo of the surrounding pickle.
    """

    def __init__(self, memo_size: int) -> None:
        self._memo_size = memo_size
        self._memorized: dict[bytes, bytes] = {}
        self._known: dict[_Described, tuple[bytes, bytes]] = {}

    def of(self, index: int, described: _Described) -> bytes:
        """Return the opcodes of a plain tensor whose storage has this index."""
        known = self._known.get(described)
        if known is None:
            memorized = len(self._memorized)
            known = self._build(*described)
            if len(self._memorized) == memorized:  # it adds nothing to the memo, so it can be reused anywhere
                self._known[described] = known
        before, after = known
        return before + _text(b"%d" % index) + after

    def _build(
        self,
        dtype: torch.dtype,
        shape: Sequence[int],
        strides: Sequence[int],
        offset: int,
        requires_grad: bool,
        place: str,
        length: int,
    ) -> tuple[bytes, bytes]:
        function = self._once(_global(_rebuild_tensor_v2))
        stored = self._once(_text(b"storage")) + self._once(_global(_storage_type(dtype)))
        before = function + pickle.MARK + pickle.MARK + stored
        after = (
            self._once(_text(place.encode()))
            + _integer(length)
            + pickle.TUPLE
            + pickle.BINPERSID
            + _integer(offset)
            + _integers(shape)
            + _integers(strides)
            + (pickle.NEWTRUE if requires_grad else pickle.NEWFALSE)
            # the backward hooks: a new dictionary, because each loaded tensor needs its own
            + self._once(_global(OrderedDict))
            + pickle.EMPTY_TUPLE
            + pickle.REDUCE
            + pickle.TUPLE
            + pickle.REDUCE
        )
        return before, after

    def _once(self, opcodes: bytes) -> bytes:
        """Return ``opcodes`` plus those that memorize the value; on later calls, those that fetch it from the memo."""
        fetch = self._memorized.get(opcodes)
        if fetch is not None:
            return fetch
        put, self._memorized[opcodes] = self.memorize()
        return opcodes + put

    def memorize(self) -> tuple[bytes, bytes]:
        """Return the opcodes that memorize the value on top of the stack, and those that fetch it from the memo."""
        at = struct.pack("<I", self._memo_size)
        self._memo_size += 1
        return pickle.LONG_BINPUT + at, pickle.LONG_BINGET + at


def _global(value: Any) -> bytes:
    return pickle.GLOBAL + f"{value.__module__}\n{value.__qualname__}\n".encode()


def _text(encoded: bytes) -> bytes:
    return pickle.BINUNICODE + struct.pack("<I", len(encoded)) + encoded


@functools.lru_cache(maxsize=4096)
def _integer(value: int) -> bytes:
    return pickle.dumps(value, _PROTOCOL)[2:-1]  # without the PROTO header and the STOP opcode


def _integers(values: Sequence[int]) -> bytes:
    return pickle.MARK + b"".join(map(_integer, values)) + pickle.TUPLE


@functools.cache
def _storage_type(dtype: torch.dtype) -> Any:
    return getattr(torch, torch.storage.TypedStorage(0, dtype=dtype, _internal=True)._pickle_storage_type())


def _unpicklable_key(state: Any) -> str | None:
    table, references = StorageTable(), dict[int, torch.dtype]()
    for name, leaf in leaves(state):
        try:
            _StoragePickler(io.BytesIO(), table, references).dump(leaf)
        except Exception:  # noqa: BLE001 - whatever this leaf raises, it is the one searched for
            return name or None
    return None


def _stored_as(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in _PLAIN_DTYPES else torch.uint8  # newer dtypes have no storage type: torch saves bytes


def collect_storages(state: Any, table: StorageTable) -> list[torch.Tensor]:
    """Add the storages of all dense tensors of ``state`` to ``table`` and return those tensors."""
    dense = []
    for tensor in tensor_values(state):
        try:
            if type(tensor) is not torch.Tensor or table.add_plain(tensor) is None:
                if not is_dense(tensor):
                    continue
                table.add(storage_of(tensor), _stored_as(tensor.dtype))
        except SerializationError:
            key = next((name for name, leaf in tensors(state) if leaf is tensor), "")
            storage_of(tensor, key=key)  # raises the same error with the key
            raise
        dense.append(tensor)
    return dense
