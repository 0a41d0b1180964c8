"""Damage that a digest must notice."""

from __future__ import annotations

from pathlib import Path


def flip_bit(path: Path, at: int | None = None) -> None:
    """Flip a bit of the byte ``at`` of a file, from the end if it is negative; by default of the one in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 1
    path.write_bytes(data)
