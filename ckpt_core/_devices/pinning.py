"""Pins host memory (locks its pages), so that a device can copy to it without blocking the host."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from typing import NamedTuple

import torch

logger = logging.getLogger(__name__)


class Pinning(NamedTuple):
    """The functions with which a type of device pins and unpins memory that torch did not allocate."""

    register: Callable[[int, int], int]  # takes address and size in bytes, and returns 0 or an error number
    unregister: Callable[[int], int]  # takes the address, and returns 0 or an error number


def _cuda_register(address: int, nbytes: int) -> int:
    return int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))


def _cuda_unregister(address: int) -> int:
    return int(torch.cuda.cudart().cudaHostUnregister(address))


# By type of device; ROCm has the type "cuda". Others get memory that is not pinned, and copies to it block. torch's own
# pinned memory is not used, because its allocator rounds up to a power of two: 9 GB would take 16.
PINNING: dict[str, Pinning] = {"cuda": Pinning(_cuda_register, _cuda_unregister)}


def pin(memory: torch.Tensor) -> Callable[[], None] | None:
    """Pin host memory for the accelerator in use, and return a function that unpins it; None if it is not pinned.

    The caller must call that function before the memory is freed.
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
        if os.getpid() != process:  # a forked child inherits the memory, but not the device
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
    # CUDA keeps the error and raises it at the next kernel launch, so launch a kernel here.
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=kind)
