"""Encodes a nested state as JSON and a list of tensors, and decodes it with the exact types; never pickles plain data.

A tensor is the string ``"$<index>"``; a string that begins with ``$`` gets another ``$`` before it. A type that JSON
lacks is an object with one key, the tag: ``{"$tuple": [...]}``. A dictionary is a JSON object if its keys are strings
that do not begin with ``$``, and otherwise a ``$dict`` of pairs. Other objects, if the caller accepts them, are
archives of ``torch.save`` as text; they are turned into objects again only if the reader asks for that.

Tensors are tied if they are the same part of the same memory, so that their bytes are stored once. torch's private
``UntypedStorage._cdata`` identifies a storage, including storages without bytes.
"""

from __future__ import annotations

import base64
import collections
import datetime
import io
import json
import math
import pathlib
import pickle
import re
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

from ckpt_core._layouts.safetensors import check_known
from ckpt_core._layouts.torch_file.pickling import StorageTable, pickle_state
from ckpt_core._plan import QUANTIZED_TYPES
from ckpt_core.errors import CheckpointFormatError, SerializationError, UnsafeCheckpointError
from ckpt_core.geometry import strides_of
from ckpt_core.tree import Repeats, join_key
from ckpt_core.weights_only import reason_of, refused_in

Json = Any  # what json.dumps takes and json.loads returns

_MAXIMUM_DEPTH = 200
_LARGEST_INTEGER = 2**63  # JSON readers of other programs need not support larger ones
_NUMPY_TYPE = re.compile(r"[<>|=][biufcmMSUVO]\d{1,9}(\[\d{0,9}\w{1,9}\])?")  # in the notation of NumPy's dtype.str
_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")  # a surrogate pair, which JSON readers turn into one character
_MOST_OF_ONE_HASH = 100  # keys: 64-bit numbers not chosen to collide share a hash with ten others at most
_MOST_DIGITS = 16  # digits in the number of a tensor
_LARGEST_OBJECT = 64 * 2**20  # bytes: limited because it becomes text in the manifest
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_FACTORIES: dict[str, Callable[[], Any] | None] = {
    "None": None,
    **{factory.__name__: factory for factory in (int, float, bool, str, list, dict, set)},
}
_REMEDY = (
    "keep the object out of the state, or save what it is made of (numbers, strings, lists, dictionaries, tensors) and "
    "build it again on load"
)


class Form(NamedTuple):
    """The properties of a tensor other than its dtype, shape and elements."""

    strides: tuple[int, ...] | None = None  # in elements; None: row-major
    is_parameter: bool = False
    requires_grad: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Form:
        """Return a tensor's form: the usual one unless it is plain and strided; ``requires_grad`` only for leaves."""
        kind = type(tensor)
        if kind not in _PLAIN or tensor.layout is not torch.strided or tensor.is_nested:
            return USUAL
        shape, strides = tensor.shape, None
        if not tensor.is_contiguous() or 1 in shape:  # is_contiguous ignores the stride of a dimension of size 1
            strides = tensor.stride()
            if strides == strides_of(shape) or not fills_memory(shape, strides):
                strides = None
        if strides is None and kind is torch.Tensor and not tensor.requires_grad:
            return USUAL  # one shared object, because a state may have many thousands of tensors
        return cls(strides, kind is torch.nn.Parameter, tensor.requires_grad and tensor.is_leaf)

    def given_to(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor that has the right strides as a parameter or with ``requires_grad``, as it was saved."""
        if tensor.is_inference():  # made by the caller, and never trained
            return tensor
        with torch.inference_mode(False):
            if self.is_parameter:
                return torch.nn.Parameter(tensor, self.requires_grad)
            return tensor.requires_grad_() if self.requires_grad else tensor


def fills_memory(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether elements with these strides fill memory without holes and without overlaps."""
    size = 1
    for stride, extent in sorted(zip(strides, shape, strict=True)):
        if extent != 1 and stride != size:
            return False
        size *= extent
    return size > 0


def encode_plain(
    tree: Any,
    *,
    key: str,
    objects: dict[str, str] | None = None,
    any_tensor: bool = False,
    forms: dict[int, Form] | None = None,
) -> tuple[Json, list[tuple[str, torch.Tensor]]]:
    """Split a state into its structure, in which tensors are references, and the tensors by unique names.

    Names are the paths of tensors below ``tree``. Tensors that are the same part of the same memory (tied weights) are
    listed once, under the first name. With ``objects``, objects other than plain data are accepted, and ``objects`` is
    filled with the types of those that torch's default loading refuses, by key; with ``any_tensor``, sparse, quantized
    and nested tensors are saved as such objects instead of being refused later. ``forms`` is filled with the unusual
    forms of tensors, by number.

    Examples:
        >>> encode_plain({"weight": torch.ones(2), "sizes": (1, 2)}, key="model")
        ({'weight': '$0', 'sizes': {'$tuple': [1, 2]}}, [('weight', tensor([1., 1.]))])
    """
    encoder = _Encoder(key, objects, any_tensor, forms)
    try:
        skeleton = encoder.encode(tree, "")
    except RecursionError as error:
        raise SerializationError(
            f"the state is nested too deep: {error}", key=key, remedy="save a flatter state"
        ) from error
    return skeleton, list(encoder.tensors.items())


class _Encoder:
    def __init__(
        self,
        key: str,
        objects: dict[str, str] | None = None,
        any_tensor: bool = False,
        forms: dict[int, Form] | None = None,
    ) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._key = key
        self._objects = objects
        self._any_tensor = any_tensor
        self._forms = forms
        self._indices: dict[Any, int] = {}
        self._parents: list[int] = []
        self._repeats = Repeats()

    def encode(self, node: Any, name: str) -> Json:
        kind = type(node)
        if node is None or kind is bool:
            return node
        if kind is int:
            return node if -_LARGEST_INTEGER <= node < _LARGEST_INTEGER else {"$int": hex(node)}
        if kind is float:
            return node if math.isfinite(node) else {"$float": repr(node)}
        if kind is str:
            if not _is_same_in_json(node):
                return self._object(node, name)
            return "$" + node if node.startswith("$") else node
        if isinstance(node, torch.Tensor):
            is_object = self._objects is not None and self._any_tensor and _is_more_than_elements(node)
            return self._object(node, name) if is_object else self._reference(node, name)
        encoded = _ENCODERS[kind](node) if kind in _ENCODERS else None
        if encoded is not None:
            return encoded
        if kind in _CONTAINERS:
            return self._encode_container(node, name)
        if isinstance(node, np.generic) and not node.dtype.hasobject and node.dtype.names is None:
            return {"$scalar": [node.dtype.str, node.tobytes().hex()]}
        if kind is np.ndarray and not node.dtype.hasobject and node.dtype.names is None:
            return self._encode_array(node, name)
        return self._object(node, name)

    def _object(self, node: Any, name: str) -> Json:
        kind = f"{type(node).__module__}.{type(node).__qualname__}"
        if self._objects is None:
            self._refuse(f"a {kind} cannot be saved", name, _REMEDY)
        archive = io.BytesIO()
        try:
            torch.save(node, archive)
        except Exception as error:  # noqa: BLE001 - whatever a class raises when it is pickled
            self._refuse(f"a {kind} cannot be saved: {error}", name, _REMEDY)
        if archive.tell() > _LARGEST_OBJECT:
            self._refuse(f"a {kind} of {archive.tell()} bytes cannot be saved", name, _REMEDY)
        try:
            torch.load(io.BytesIO(archive.getbuffer()), map_location="cpu", weights_only=True)
        except Exception:  # noqa: BLE001 - what its class raises when it is rebuilt is no reason not to save it
            if (what := _never_loads(node)) is not None:
                self._refuse(f"a {kind} cannot be saved: {what}", name, _REMEDY)
            self._objects[join_key(self._key, name) if name else self._key] = kind
        return {"$object": [kind, base64.b64encode(archive.getbuffer()).decode()]}

    def _reference(self, tensor: torch.Tensor, name: str) -> str:
        identity = identity_of(tensor)
        index = self._indices.get(identity)
        form = USUAL if self._forms is None else Form.of(tensor)
        if index is None:
            index = self._indices[identity] = len(self.tensors)
            self.tensors[self._unique(name)] = tensor
        elif self._forms is not None and self._forms.get(index, USUAL) != form:
            form = Form(form.strides)  # a parameter and the same tensor detached: they are loaded as one plain tensor
        if self._forms is not None and form is not USUAL:
            self._forms[index] = form
        return f"${index}"

    def _unique(self, name: str) -> str:
        # A key may contain a dot, so paths may collide; __metadata__ is reserved in a safetensors file.
        name = name or "tensor"
        while name in self.tensors or name == "__metadata__":
            name += "~"
        return name

    def _encode_container(self, node: Any, name: str) -> Json:
        if id(node) in self._parents:
            self._refuse("the state contains itself", name, "break the circle before saving")
        if len(self._parents) >= _MAXIMUM_DEPTH:
            self._refuse(f"the state is nested more than {_MAXIMUM_DEPTH} deep", name, "save a flatter state")
        self._repeats.meet(node, join_key(self._key, name))
        self._parents.append(id(node))
        try:
            return self._encode_items(node, name)
        finally:
            self._parents.pop()

    def _encode_items(self, node: Any, name: str) -> Json:
        kind = type(node)
        if kind is dict and all(type(key) is str and not key.startswith("$") and _is_same_in_json(key) for key in node):
            return {key: self.encode(value, join_key(name, key)) for key, value in node.items()}
        if isinstance(node, dict):
            factory = None
            if isinstance(node, collections.defaultdict):
                factory = next((text for text, known in _FACTORIES.items() if known is node.default_factory), None)
                if factory is None:
                    return self._object(node, name)
            keys = self._all_hashable(node, name)
            values = (self.encode(value, join_key(name, key)) for key, value in node.items())
            pairs = [[key, value] for key, value in zip(keys, values, strict=True)]
            return {_CONTAINERS[kind]: pairs if factory is None else [factory, pairs]}
        if kind in (set, frozenset):
            return {_CONTAINERS[kind]: self._all_hashable(node, name)}
        items = [self.encode(value, join_key(name, index)) for index, value in enumerate(node)]
        if kind is collections.deque:
            return {"$deque": [node.maxlen, items]}
        return items if kind is list else {_CONTAINERS[kind]: items}

    def _all_hashable(self, keys: Collection[Any], name: str) -> list[Json]:
        most = _most_of_one_hash(keys)
        if most > _MOST_OF_ONE_HASH:
            self._refuse(f"{most} keys of one dictionary or set have the same hash", name, "use other keys")
        encoded = [self._hashable(key, name) for key in keys]
        texts = [json.dumps(key) for key in encoded if isinstance(key, dict)]
        if len(set(texts)) < len(texts):  # such as two keys that are both nan
            self._refuse("two keys of one dictionary or set cannot be told apart", name, "use other keys")
        return encoded

    def _hashable(self, value: Any, name: str) -> Json:
        before = len(self._indices)
        encoded = self.encode(value, name)
        if isinstance(value, torch.Tensor) or len(self._indices) != before:
            self._refuse("a tensor is used as a key or in a set", name, "use a list, or the tensor's number")
        return encoded

    def _encode_array(self, array: np.ndarray[Any, Any], name: str) -> Json:
        data = np.ascontiguousarray(array)
        flat = data.reshape(-1).view(np.uint8)
        tensor = torch.from_numpy(flat if flat.flags.writeable else flat.copy())
        return {"$array": [array.dtype.str, list(array.shape), self._reference(tensor, name)]}

    def _refuse(self, message: str, name: str, remedy: str) -> NoReturn:
        raise SerializationError(message, key=join_key(self._key, name) if name else self._key, remedy=remedy)


def _is_same_in_json(text: str) -> bool:
    return text.isascii() or _PAIR.search(text) is None


def _is_more_than_elements(tensor: torch.Tensor) -> bool:
    try:
        return tensor.layout is not torch.strided or tensor.dtype in QUANTIZED_TYPES or tensor.is_nested
    except RuntimeError:  # raised by FSDP's ShardedTensor, which has none of these attributes
        return False


def _never_loads(node: Any) -> str | None:
    """Return why ``torch.load`` can never read what ``torch.save`` wrote for an object; None if it can."""
    table = StorageTable()
    try:
        pickle_state(node, table)
    except SerializationError as error:
        return error.message
    odd = any(storage.nbytes() != size for storage, size in zip(table.storages, table.sizes, strict=True))
    return "the memory of a tensor in it ends inside an element" if odd else None


def _slice(value: slice) -> Json:
    parts = [value.start, value.stop, value.step]
    return {"$slice": parts} if all(part is None or type(part) is int for part in parts) else None


def _path_text(value: pathlib.PurePath) -> Json:
    return {"$path": [type(value).__name__, str(value)]} if _is_same_in_json(str(value)) else None


def _moment(tag: str, value: datetime.datetime | datetime.time) -> Json:
    # a time zone with rules (not a fixed offset) has no name that every machine knows
    fixed = value.tzinfo is None or type(value.tzinfo) is datetime.timezone
    return {tag: value.isoformat()} if fixed and not value.fold else None


_CONTAINERS: dict[type, str] = {
    dict: "$dict",
    collections.OrderedDict: "$ordered",
    collections.Counter: "$counter",
    collections.defaultdict: "$defaultdict",
    collections.deque: "$deque",
    list: "$list",
    tuple: "$tuple",
    torch.Size: "$size",
    set: "$set",
    frozenset: "$frozenset",
}
_PATHS: dict[type, type[pathlib.PurePath]] = {  # a concrete path is loaded as one of the machine that loads it
    pathlib.PurePosixPath: pathlib.PurePosixPath,
    pathlib.PureWindowsPath: pathlib.PureWindowsPath,
    pathlib.PosixPath: pathlib.Path,
    pathlib.WindowsPath: pathlib.Path,
}
_ENCODERS: dict[type, Callable[[Any], Json]] = {
    complex: lambda value: {"$complex": [_number(value.real), _number(value.imag)]},
    bytes: lambda value: {"$bytes": value.hex()},
    bytearray: lambda value: {"$bytearray": value.hex()},
    range: lambda value: {"$range": [_number(part) for part in (value.start, value.stop, value.step)]},
    slice: _slice,
    datetime.datetime: lambda value: _moment("$datetime", value),
    datetime.time: lambda value: _moment("$time", value),
    datetime.date: lambda value: {"$date": value.isoformat()},
    datetime.timedelta: lambda value: {"$timedelta": [value.days, value.seconds, value.microseconds]},
    **dict.fromkeys(_PATHS, _path_text),
    torch.dtype: lambda value: {"$dtype": str(value).removeprefix("torch.")},
    torch.device: lambda value: {"$device": str(value)},
}


def _number(value: float) -> Json:
    return _Encoder("").encode(value, "")


class Unresolved:
    """Placeholder for a tensor in a decoded structure whose tensors are not loaded yet.

    ``nbytes`` is the size of the NumPy array if the tensor is the memory of one; otherwise None.
    """

    __slots__ = ("index", "nbytes")

    def __init__(self, index: int) -> None:
        self.index = index
        self.nbytes: int | None = None


class Opaque:
    """Placeholder for an object that is not plain data and was not rebuilt."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __repr__(self) -> str:
        return f"<{self.kind}, not plain data>"


def decode_plain(
    skeleton: Json,
    tensors: Sequence[Any] | Callable[[int], Any],
    *,
    rebuilds: bool = False,
    weights_only: bool | None = None,
) -> Any:
    """Rebuild a state from its ``skeleton``; raise a ``ValueError`` if that is invalid.

    ``tensors`` may be a function that returns the tensor of an index; it is called for every reference, in order. With
    ``rebuilds``, objects that are not plain data are loaded by ``torch.load`` with ``weights_only``; without, each is
    replaced by an :class:`Opaque`.
    """
    resolve = tensors if callable(tensors) else tensors.__getitem__
    make = (lambda kind, data: _rebuilt(kind, data, weights_only is not False)) if rebuilds else _opaque
    return _decode(skeleton, resolve, _array, make)


def decode_structure(skeleton: Json) -> tuple[Any, list[Unresolved]]:
    """Return the state with an :class:`Unresolved` for each reference to a tensor, and a list of these, in order."""
    references: list[Unresolved] = []

    def resolve(index: int) -> Unresolved:
        references.append(Unresolved(index))
        return references[-1]

    def array(dtype: np.dtype[Any], shape: list[int], reference: Unresolved) -> Unresolved:
        reference.nbytes = math.prod(shape) * dtype.itemsize
        return reference

    return _decode(skeleton, resolve, array, _opaque), references


def _opaque(kind: str, _: bytes) -> Opaque:
    return Opaque(kind)


def _rebuilt(kind: str, archive: bytes, weights_only: bool) -> Any:
    try:
        return torch.load(io.BytesIO(archive), map_location="cpu", weights_only=weights_only)
    except Exception as error:
        if refused_in(error) is not None:
            raise UnsafeCheckpointError(
                f"the checkpoint holds a {kind}, which is not plain data, and rebuilding it could run arbitrary code",
                remedy="load with weights_only=False (with Accelerate: allow_pickle=True) if you trust the "
                "checkpoint's author, or allow the type with torch.serialization.add_safe_globals",
            ) from error
        if isinstance(error, pickle.UnpicklingError):
            raise ValueError(f"a {kind} is damaged: {reason_of(error)}") from error  # noqa: TRY004
        raise CheckpointFormatError(
            f"a {kind} in the checkpoint cannot be rebuilt: {error}",
            remedy="define or install the class where it was when the checkpoint was saved",
        ) from error


def _array(dtype: np.dtype[Any], shape: list[int], data: Any) -> np.ndarray[Any, Any]:
    # Not view(dtype), which does not work for elements of zero bytes.
    if math.prod(shape) * dtype.itemsize != data.nbytes:
        raise ValueError(f"an array of {dtype}{shape} does not have {data.nbytes} bytes")
    array: np.ndarray[Any, Any] = np.ndarray(shape, dtype, data.numpy())
    return array


def _scalar(dtype: np.dtype[Any], data: bytes) -> Any:
    if len(data) < dtype.itemsize:
        raise ValueError(f"a {dtype} has more than {len(data)} bytes")
    data = data[: dtype.itemsize]  # NumPy's tobytes() gives a zero for an empty string
    # Not through an array, where NumPy strips zeros at the end of a string as padding.
    if dtype.kind == "S":
        return np.bytes_(data)
    if dtype.kind == "U":
        return np.str_(data.decode("utf-32-be" if dtype.str[0] == ">" else "utf-32-le", "surrogatepass"))
    return np.ndarray((), dtype, data)[()]


def _decode(
    skeleton: Json, resolve: Callable[[int], Any], array: Callable[..., Any], rebuild: Callable[[str, bytes], Any]
) -> Any:
    try:
        return _Decoder(resolve, array, rebuild).decode(skeleton, 0)
    except (TypeError, IndexError, KeyError, AttributeError, OverflowError, RuntimeError) as error:
        raise ValueError(f"the structure of the state is invalid: {error}") from error


class _Decoder:
    def __init__(
        self,
        resolve: Callable[[int], Any],
        array: Callable[..., Any],
        rebuild: Callable[[str, bytes], Any],
    ) -> None:
        self._resolve = resolve
        self._array = array
        self._rebuild = rebuild

    def decode(self, node: Json, depth: int) -> Any:
        if depth > _MAXIMUM_DEPTH:
            raise ValueError(f"the state is nested more than {_MAXIMUM_DEPTH} deep")
        if isinstance(node, str):
            return self._decode_text(node)
        if isinstance(node, list):
            return [self.decode(item, depth + 1) for item in node]
        if not isinstance(node, dict):
            return node
        tag = next(iter(node), "")
        if not tag.startswith("$"):
            return {key: self.decode(value, depth + 1) for key, value in node.items()}
        (value,) = node.values()
        if tag == "$array":
            dtype, shape, reference = value
            return self._array(_numpy_type(dtype), [_integer(size) for size in shape], self._decode_text(reference))
        if tag in _VALUES:
            return _VALUES[tag](value)
        if tag == "$object":
            kind, archive = value
            return self._rebuild(str(kind), base64.b64decode(archive, validate=True))
        if tag == "$defaultdict":
            factory, pairs = value
            return collections.defaultdict(_FACTORIES[factory], self._pairs(pairs, depth))
        if tag == "$deque":
            longest, items = value
            return collections.deque(self._items(items, depth), longest)
        if tag in ("$dict", "$ordered", "$counter"):
            return _COLLECTIONS[tag](self._pairs(value, depth))
        items = list(self._items(value, depth))
        if tag in ("$set", "$frozenset"):
            _check_hashes(items)
        return _COLLECTIONS[tag](items)

    def _decode_text(self, text: str) -> Any:
        if text[:1] != "$":
            return text
        digits = text[1:]
        if digits.isdecimal() and digits.isascii() and len(digits) <= _MOST_DIGITS:
            return self._resolve(int(digits))
        if digits[:1] == "$":
            return digits
        raise ValueError(f"{text!r} is not a reference to a tensor")

    def _items(self, items: Json, depth: int) -> Iterator[Any]:
        if not isinstance(items, list):
            raise TypeError("items are not in a list")
        return (self.decode(item, depth + 1) for item in items)

    def _pairs(self, pairs: Json, depth: int) -> dict[Any, Any]:
        keys = [self.decode(key, depth + 1) for key, _ in pairs]
        _check_hashes(keys)
        decoded = {key: self.decode(value, depth + 1) for key, (_, value) in zip(keys, pairs, strict=True)}
        if len(decoded) != len(pairs):
            raise ValueError("a dictionary has a key twice")
        return decoded


def _check_hashes(keys: Sequence[Any]) -> None:
    """Raise for keys chosen to have the same hash: the time to build the dictionary would grow quadratically."""
    most = _most_of_one_hash(keys)
    if most > _MOST_OF_ONE_HASH:
        raise ValueError(f"{most} keys of one dictionary or set have the same hash")


def _most_of_one_hash(keys: Collection[Any]) -> int:
    """Return the largest number of keys that share a hash; 0 if there are only a few keys."""
    if len(keys) <= _MOST_OF_ONE_HASH:
        return 0
    return max(collections.Counter(map(hash, keys)).values())


_COLLECTIONS: dict[str, Callable[[Any], Any]] = {tag: kind for kind, tag in _CONTAINERS.items()}
_VALUES: dict[str, Callable[[Any], Any]] = {
    "$int": lambda value: int(value, 16),
    "$float": lambda value: _NON_FINITE[value],
    "$complex": lambda value: _complex(*value),
    "$bytes": bytes.fromhex,
    "$bytearray": bytearray.fromhex,
    "$range": lambda value: range(*(int(_plain_number(part)) for part in value)),
    "$slice": lambda value: slice(*(part if part is None else int(part) for part in value)),
    "$datetime": datetime.datetime.fromisoformat,
    "$time": datetime.time.fromisoformat,
    "$date": datetime.date.fromisoformat,
    "$timedelta": lambda value: datetime.timedelta(*(int(part) for part in value)),
    "$path": lambda value: _path(*value),
    "$dtype": lambda value: getattr(torch, _dtype_name(value)),
    "$device": lambda value: torch.device(str(value)),
    "$scalar": lambda value: _scalar(_numpy_type(value[0]), bytes.fromhex(value[1])),
}


def _complex(real: Json, imaginary: Json) -> complex:
    return complex(_plain_number(real), _plain_number(imaginary))


def _path(kind: str, path: str) -> pathlib.PurePath:
    return {known.__name__: build for known, build in _PATHS.items()}[kind](path)


def _plain_number(node: Json) -> Any:
    value = _Decoder(_no_tensor, _no_tensor, _no_tensor).decode(node, 0)
    if type(value) not in (int, float):
        raise TypeError(f"{value!r} is not a number")
    return value


def _no_tensor(*_: Any) -> NoReturn:
    raise ValueError("a tensor is where none can be")


def _integer(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a size")
    return value


def _dtype_name(name: Any) -> str:
    if not isinstance(getattr(torch, str(name), None), torch.dtype):
        check_known(name)
        raise TypeError(f"{name!r} is not a type of torch")
    return str(name)


def _numpy_type(text: Any) -> np.dtype[Any]:
    if _NUMPY_TYPE.fullmatch(str(text)) is None:
        raise ValueError(f"{text!r} is not the type of an array")
    found = np.dtype(str(text))
    if found.hasobject or found.names is not None:
        raise ValueError(f"arrays of {text!r} hold more than plain numbers")
    return found


# ---- tied tensors ----------------------------------------------------------------------------------------------------

_PLAIN = (torch.Tensor, torch.nn.Parameter)
#: The form of most tensors.
USUAL = Form()


def identity_of(tensor: torch.Tensor) -> Hashable:
    """Return a value that is equal for two tensors only if they are tied.

    Does not depend on the address of the data, so that all ranks agree about tensors of which they hold different
    pieces, or none. A tensor of an unknown type is tied only to itself (the same object).
    """
    if type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_nested:
        try:
            return _memory(tensor)
        except NotImplementedError:  # a tensor of torch.func, which has no memory
            return id(tensor)
    placements = getattr(tensor, "placements", None)
    if placements is None:
        return id(tensor)
    with torch.no_grad():
        local = tensor.to_local()  # type: ignore[attr-defined] # a DTensor: importing the class would cost a second
    if type(local) is not torch.Tensor or local.layout is not torch.strided:
        return id(tensor)
    return (_memory(local), tuple(tensor.shape), placements, tensor.device_mesh)  # type: ignore[attr-defined]


def _memory(tensor: torch.Tensor) -> Hashable:
    return (
        tensor.untyped_storage()._cdata,
        tensor.storage_offset(),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )
