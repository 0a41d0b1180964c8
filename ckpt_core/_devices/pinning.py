"""Memory of ours that a device copies to without blocking the host, because its pages are locked."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from typing import NamedTuple

import torch

logger = logging.getLogger(__name__)


class Pinning(NamedTuple):
    """How a type of device locks memory that it has not allocated."""

    register: Callable[[int, int], int]  # takes address and size in bytes, and returns 0 or the number of an error
    unregister: Callable[[int], int]  # takes the address, and returns the same


def _cuda_register(address: int, nbytes: int) -> int:
    return int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))


def _cuda_unregister(address: int) -> int:
    return int(torch.cuda.cudart().cudaHostUnregister(address))


# By the type of the device; ROCm calls itself "cuda". Others get memory that is not pinned, and block while they copy.
# Not torch's own pinned memory, whose allocator rounds up to a power of two: for 9 GB it would take 16.
PINNING: dict[str, Pinning] = {"cuda": Pinning(_cuda_register, _cuda_unregister)}


def pin(memory: torch.Tensor) -> Callable[[], None] | None:
    """Lock the pages of host memory for the device that the program uses, if it uses one; return what unlocks them.

    That is to be called before the memory goes; None if they are not locked.
    """
    kind = next((kind for kind in PINNING if _is_in_use(kind)), None)
    if kind is None:
        return None
    address = memory.data_ptr()
    error = PINNING[kind].register(address, memory.numel())
    if error:
        logger.info(
            "%d bytes of staging memory could not be pinned (error %d of %s): copies to it block the training thread; "
            "raise the limit of locked memory (ulimit -l) or free memory",
            memory.numel(),
            error,
            kind,
        )
        _forget_error(kind)
        return None
    process = os.getpid()

    def unpin() -> None:
        if os.getpid() != process:  # a forked child has the memory, and no device
            return
        error = PINNING[kind].unregister(address)
        if error:
            logger.warning("staging memory at %#x could not be unpinned: error %d of %s", address, error, kind)
            _forget_error(kind)

    return unpin


def _is_in_use(kind: str) -> bool:
    module = getattr(torch, kind, None)
    return module is not None and module.is_available() and module.is_initialized()


def _forget_error(kind: str) -> None:
    # CUDA remembers the error, and the next kernel to be launched would be blamed for it: let it be one of ours.
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=kind)
