"""Digests (checksums) of the bytes on disk.

A fast non-cryptographic hash at memory speed: it detects flipped, missing and mixed-up bytes, not deliberate changes
by an attacker. Digests of a file are taken while it is written: see ``digested_window`` in ``_layouts``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import xxhash

from ckpt_core.errors import CheckpointFormatError

ALGORITHM = "xxh3_64"

Buffer = bytes | bytearray | memoryview

_ALGORITHMS: dict[str, Callable[[Buffer], str]] = {ALGORITHM: xxhash.xxh3_64_hexdigest}


def digest(data: Buffer) -> str:
    """Return the digest of ``data`` as hexadecimal text (the GIL is released while it runs)."""
    return _ALGORITHMS[ALGORITHM](data)


def digest_of_parts(parts: Iterable[Buffer]) -> str:
    """Return the digest of the concatenation of ``parts`` without building it."""
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return state.hexdigest()


def digest_with(algorithm: str, *, path: str) -> Callable[[Buffer], str]:
    """Return the digest function for the ``algorithm`` that the checkpoint at ``path`` uses.

    Raises:
        CheckpointFormatError: This version does not know the algorithm.
    """
    try:
        return _ALGORITHMS[algorithm]
    except KeyError:
        raise CheckpointFormatError(
            f"the checkpoint's digests use the algorithm {algorithm!r}, which this version does not know",
            path=path,
            remedy="upgrade ckpt_core to the version that wrote the checkpoint",
        ) from None
