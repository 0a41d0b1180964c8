"""The file of a flight recorder: a ring buffer with one record of fixed size for each of a rank's last steps.

Each record is one ``pwrite`` into the page cache, where it outlives the process, even after SIGKILL; it is not synced
to disk. (A memory map would be no faster, and a full disk or a truncated file would end the training with SIGBUS.) Each
record has a checksum, so a torn record, or one of another program, is ignored.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import logging
import os
import struct
from collections.abc import Iterable

import torch
import xxhash

log = logging.getLogger(__name__)

#: Steps that are kept; at 128 bytes each, the file has at most a megabyte.
CAPACITY = 2**13

_MAGIC = 0x31544C46  # FLT1
_LAYOUT = struct.Struct("<IIQQQIIQQQQddddQ")
_CHECK = struct.Struct("<Q")
_SIZE = 128
_HAS = {"data": 1, "generators": 2, "rates": 4, "weights": 8, "loss": 16, "gradients": 32}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """The record of one step."""

    branch: int  # the history of training that it belongs to; a resumed run with equal steps keeps it
    number: int  # counts the steps of a training, including those before a resume
    epoch: int  # this and the next two: the position of the training, as its framework counts
    batch: int
    step: int
    data: int | None = None  # digest of the batch
    generators: int | None = None  # digest of the random generators before the batch was fetched
    rates: int | None = None  # digest of the learning rates
    weights: int | None = None  # digest of a sample of the weights after the step
    gradients: int | None = None  # digest of a sample of the gradients, if the optimizer has not used them yet
    loss: float | None = None
    is_noisy: bool = False  # whether the loss comes from a device whose kernels were not asked to be deterministic
    rate: float = 0.0  # the first learning rate, to be shown
    seconds: float = 0.0  # duration of the step
    time: float = 0.0  # Unix time at its end

    def pack(self) -> bytes:
        """Return the record in 128 bytes."""
        flags = sum(bit for name, bit in _HAS.items() if getattr(self, name) is not None) | (self.is_noisy << 8)
        digests = (self.data or 0, self.generators or 0, self.rates or 0, self.weights or 0)
        loss = 0.0 if self.loss is None else self.loss
        body = _LAYOUT.pack(
            _MAGIC,
            flags,
            self.branch,
            self.number,
            self.step,
            self.epoch,
            self.batch,
            *digests,
            loss,
            self.rate,
            self.seconds,
            self.time,
            self.gradients or 0,
        )
        body = body.ljust(_SIZE - _CHECK.size, b"\0")
        return body + _CHECK.pack(xxhash.xxh3_64_intdigest(body))

    @classmethod
    def unpack(cls, data: bytes) -> Record | None:
        """Undo :meth:`pack`; return None if the data is no intact record."""
        body = data[: _SIZE - _CHECK.size]
        if len(data) != _SIZE or _CHECK.pack(xxhash.xxh3_64_intdigest(body)) != data[len(body) :]:
            return None
        magic, flags, branch, number, step, epoch, batch, *digests, loss, rate, seconds, time, gradients = (
            _LAYOUT.unpack_from(body)
        )
        if magic != _MAGIC:
            return None
        found = dict(zip(("data", "generators", "rates", "weights", "gradients"), (*digests, gradients), strict=True))
        present = {name: found[name] if flags & _HAS[name] else None for name in found}
        return cls(
            branch=branch,
            number=number,
            epoch=epoch,
            batch=batch,
            step=step,
            **present,
            loss=loss if flags & _HAS["loss"] else None,
            is_noisy=bool(flags >> 8 & 1),
            rate=rate,
            seconds=seconds,
            time=time,
        )


def encode(records: Iterable[Record]) -> torch.Tensor:
    """Return records as a tensor of bytes, for a checkpoint."""
    return torch.frombuffer(bytearray(b"".join(record.pack() for record in records) or b"\0"), dtype=torch.uint8)


def decode(data: bytes) -> list[Record]:
    """Return the intact records in the bytes of a file or of :func:`encode`, in the order of the bytes."""
    found = [Record.unpack(data[at : at + _SIZE]) for at in range(0, len(data) - _SIZE + 1, _SIZE)]
    return [record for record in found if record is not None]


def record_path(directory: str, rank: int, what: str = "flight") -> str:
    """Return the path of the file in which a rank records the training with checkpoints in a local directory.

    The file is next to the directory, because scripts list the directory and take all files in it for checkpoints. It
    is inside only if the directory is the working directory, or if the parent directory is not writable or on another
    file system, which may not survive the machine.
    """
    directory = os.path.abspath(directory)
    parent, name = os.path.split(directory)
    try:
        os.makedirs(directory, exist_ok=True)
        is_apart = os.path.samefile(directory, os.curdir)
        is_apart = is_apart or os.stat(parent).st_dev != os.stat(directory).st_dev or not os.access(parent, os.W_OK)
    except OSError:
        is_apart = False
    return os.path.join(directory if is_apart else parent, f".{name}.{what}-rank{rank}")


class Ring:
    """The record file of one rank; does nothing if it cannot be written, or if another process is writing to it.

    It is created, with its directory, at the first record, so a program that only saves or loads finds no such file
    among its own.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._descriptor: int | None = None
        self._is_closed = False
        if os.path.exists(path):
            self._open()

    def _open(self) -> None:
        try:
            os.makedirs(os.path.dirname(self.path) or ".", exist_ok=True)
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._lock()
        except OSError as error:
            self._give_up(error)

    def _lock(self) -> None:
        # a POSIX lock: forked data loading workers, which may outlive a killed run by some seconds, do not inherit it
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # type: ignore[arg-type]
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise  # another process records into this file
            # otherwise the file system has no locks

    def _give_up(self, error: OSError) -> None:
        log.info(
            "steps are recorded in checkpoints only, because the flight recorder cannot use %s: %s", self.path, error
        )
        self.close()

    def read(self) -> list[Record]:
        """Return the intact records of the file."""
        if self._descriptor is None:
            return []
        try:
            return decode(os.pread(self._descriptor, CAPACITY * _SIZE, 0))
        except OSError as error:
            self._give_up(error)
            return []

    def write(self, record: Record) -> None:
        """Write a record over the one of :data:`CAPACITY` steps before."""
        if self._descriptor is None and not self._is_closed:
            self._open()
        if self._descriptor is None:
            return
        try:
            os.pwrite(self._descriptor, record.pack(), record.number % CAPACITY * _SIZE)
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Close the file, which is kept."""
        descriptor, self._descriptor = self._descriptor, None
        self._is_closed = True
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(descriptor)
