"""Capture and restore the random generators and counters of data loading workers.

After every batch, each worker writes its generators, and the numbers that its copies of data set and ``collate_fn``
have changed, to shared memory. At a save, the main process, which knows how many batches of each worker were consumed,
picks the matching record. A new worker can continue from it, so a resume need not load past data again.
"""

from __future__ import annotations

import base64
import io
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from ckpt_core.errors import CheckpointError
from ckpt_core.state.changed_values import Counts
from ckpt_core.state.loader_objects import Carried
from ckpt_core.state.rng import PACKED_RNG_BYTES, pack_rng, unpack_rng
from ckpt_core.state.stateful import Forwarding, stay_stateful

_UNTOUCHED = -1
_LENGTH = struct.Struct("<Q")
_TOO_LONG = (1 << 64) - 1


class WorkerRngLog:
    """A ring buffer of the last generator states of each worker, in shared memory.

    ``depth`` is the number of batches for which states are kept, more than a worker can be ahead of the consumer.
    ``room`` is the number of bytes for the generators that data set and ``collate_fn`` carry.
    """

    def __init__(self, num_workers: int, depth: int, room: int = 0) -> None:
        self.depth = depth
        self.room = room
        self._counts = torch.full((num_workers,), _UNTOUCHED, dtype=torch.int64).share_memory_()
        self._slots: torch.Tensor = torch.zeros(
            (num_workers, depth, PACKED_RNG_BYTES + room), dtype=torch.uint8
        ).share_memory_()

    def start(self, worker: int) -> None:
        """Note, in a worker, that it has started."""
        self._counts[worker] = 0

    def count(self, worker: int) -> int:
        """Return the number of batches that a worker has made since it started."""
        return max(0, int(self._counts[worker]))

    def record(self, worker: int, carried: bytes = b"") -> None:
        """Record, in a worker, its generators after a batch, and what its objects carry."""
        count = int(self._counts[worker])
        packed = torch.frombuffer(
            bytearray(pack_rng() + carried.ljust(self.room, b"\0")[: self.room]), dtype=torch.uint8
        )
        self._slots[worker, count % self.depth].copy_(packed)
        self._counts[worker] = count + 1

    def state_after(self, worker: int, batches: int, timeout: float = 60.0) -> torch.Tensor | None:
        """Return the record of a worker after its first ``batches`` batches; None if that is 0.

        Waits up to ``timeout`` seconds for a worker that has not made them yet. Raises :class:`CheckpointError` if it
        does not make them in time, or if the record has been overwritten.
        """
        if batches <= 0:
            return None
        deadline = time.monotonic() + timeout
        while self.count(worker) < batches:
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"data loading worker {worker} made {self.count(worker)} of {batches} batches in {timeout:.0f} s"
                )
            time.sleep(0.001)
        if self.count(worker) - batches >= self.depth:
            raise CheckpointError(f"the random state of data loading worker {worker} is no longer recorded")
        return self._slots[worker, (batches - 1) % self.depth].clone()


def pack_carried(carried: Carried, room: int | None = None) -> bytes:
    """Return the generators as bytes, preceded by their number of bytes; only a mark if they exceed ``room``."""
    if not carried.has_generators:
        return b""
    buffer = io.BytesIO()
    torch.save(carried.generators(), buffer)
    data = buffer.getvalue()
    packed = _LENGTH.pack(len(data)) + data
    return packed if room is None or len(packed) <= room else _LENGTH.pack(_TOO_LONG)


def pack_counts(counts: Mapping[str, Counts], room: int) -> bytes:
    """Return the changed numbers as bytes, preceded by their number of bytes; nothing if they exceed ``room``."""
    numbers = {name: found for name, of in counts.items() if (found := of.numbers())}
    if not numbers:
        return b""
    buffer = io.BytesIO()
    torch.save(numbers, buffer)
    packed = _LENGTH.pack(buffer.tell()) + buffer.getvalue()
    return packed if len(packed) <= room else b""


def unpack_carried(packed: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """Undo :func:`pack_carried`, and :func:`pack_counts` in the bytes after it."""
    found = []
    for _ in range(2):
        (length,) = _LENGTH.unpack_from(packed) if len(packed) >= _LENGTH.size else (0,)
        length = 0 if length == _TOO_LONG else length
        data, packed = packed[_LENGTH.size : _LENGTH.size + length], packed[_LENGTH.size + length :]
        found.append(dict(torch.load(io.BytesIO(data), weights_only=True)) if data else {})
    return found[0], found[1]


def has_lost_carried(recorded: torch.Tensor, here: Carried) -> bool:
    """Return whether a worker's record lacks generators: it has no room for those in ``here``, or too little."""
    carried = recorded[PACKED_RNG_BYTES:].numpy().tobytes()
    return here.has_generators if not carried else _LENGTH.unpack_from(carried)[0] == _TOO_LONG


class RecordingCollate:
    """A ``collate_fn`` that also records the worker's generators, and restores them once after a resume.

    ``resume`` has for each worker the record to continue from, or None. The first ``throwaway`` workers make one batch
    that is dropped before they continue.
    """

    def __init__(
        self,
        collate_fn: Callable[[Any], Any],
        log: WorkerRngLog,
        resume: Sequence[torch.Tensor | None] = (),
        throwaway: int = 0,
    ) -> None:
        self.collate_fn = collate_fn
        self.log = log
        self.resume = list(resume)
        self.throwaway = throwaway
        self._carried: Carried | None = None
        self._counts: dict[str, Counts] = {}

    def begin(self) -> Carried:
        """Return the generators that this worker's objects carry; the first call also notes the objects' numbers."""
        if self._carried is None:
            worker = get_worker_info()
            owners = {"": None if worker is None else worker.dataset, "collate_fn": self.collate_fn}
            self._carried = Carried(owners, plain=False)
            self._counts = {name: Counts(owner) for name, owner in owners.items()}
        return self._carried

    def __call__(self, samples: Any) -> Any:
        batch = self.collate_fn(samples)
        worker = get_worker_info()
        if worker is not None:
            if worker.id < self.throwaway and self.log.count(worker.id) == 0:
                self.install(worker.id)
            count = self.log.count(worker.id)
            carried = self.begin()
            if count & (count + 1) == 0:
                carried.look()  # making a batch may have created generators, most often one of the first batches
            packed = pack_carried(carried, self.log.room) or _LENGTH.pack(0)
            self.log.record(worker.id, packed + pack_counts(self._counts, self.log.room - len(packed)))
        return batch

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_carried": None, "_counts": {}}

    def install(self, worker: int) -> None:
        """Restore the generators and counters of this worker process from the record that it continues from."""
        packed = self.resume[worker] if worker < len(self.resume) else None
        if packed is not None:
            data = packed.numpy().tobytes()
            unpack_rng(data[:PACKED_RNG_BYTES]).restore()
            if len(data) > PACKED_RNG_BYTES:
                generators, numbers = unpack_carried(data[PACKED_RNG_BYTES:])
                carried = self.begin()
                carried.look()  # making the dropped batch may have created generators
                carried.restore_generators(generators)
                for name, counts in self._counts.items():
                    counts.restore(numbers.get(name, {}))


class WorkerInit:
    """A ``worker_init_fn`` that calls the loader's own and then restores the state of a resumed worker."""

    def __init__(self, worker_init_fn: Callable[[int], None] | None, collate: RecordingCollate) -> None:
        self.worker_init_fn = worker_init_fn
        self.collate = collate

    def __call__(self, worker: int) -> None:
        if self.worker_init_fn is not None:
            self.worker_init_fn(worker)
        self.collate.log.start(worker)
        self.collate.begin()
        if worker >= self.collate.throwaway:
            self.collate.install(worker)


class _WithWorkersGenerators(Forwarding):
    """Base of the wrappers of data sets: attributes are read from and set on the wrapped data set.

    A user's ``worker_init_fn`` may set attributes of its worker's data set, and means the user's object.
    """

    _own = frozenset({"inner", "pending"})
    pending: str | None

    def __init__(self, inner: Any) -> None:
        self.inner, self.pending = inner, None

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"inner": None, "rng": None}
        if hasattr(self.inner, "state_dict"):
            state["inner"] = self.inner.state_dict()
        if get_worker_info() is not None:
            # text, because stateful loaders compare old and new states with ==
            state["rng"] = base64.b64encode(pack_rng()).decode("ascii")
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if hasattr(self.inner, "load_state_dict"):
            self.inner.load_state_dict(state["inner"])
        if get_worker_info() is not None:
            self.pending = state["rng"]

    def install(self) -> None:
        if self.pending is not None:
            packed, self.pending = self.pending, None
            unpack_rng(base64.b64decode(packed)).restore()


class RngMapDataset(_WithWorkersGenerators, Dataset[Any]):
    """A map-style data set whose state includes the generators of the worker it is in."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.install()

    def __getitem__(self, index: Any) -> Any:
        return self.inner[index]

    @property
    def __getitems__(self) -> Any:
        return getattr(self.inner, "__getitems__", None)


class RngIterableDataset(_WithWorkersGenerators, IterableDataset[Any]):
    """An iterable data set whose state includes the generators of the worker it is in."""

    def __iter__(self) -> Iterator[Any]:
        return _RngIterator(self, iter(self.inner))


class _RngIterator:
    def __init__(self, owner: RngIterableDataset, inner: Iterator[Any]) -> None:
        self.owner = owner
        self.inner = inner
        stay_stateful(self)

    def __iter__(self) -> _RngIterator:
        return self

    def __next__(self) -> Any:
        # not earlier, because the stateful loader draws numbers between loading the state and the first sample
        self.owner.install()
        return next(self.inner)

    def __getattr__(self, name: str) -> Any:
        if name in ("inner", "owner") or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.inner, name)
