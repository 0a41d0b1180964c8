"""Damages files in a way that a digest must detect."""

from __future__ import annotations

from pathlib import Path


def flip_bit(path: Path, at: int | None = None) -> None:
    """Flip a bit of the byte ``at`` of a file (negative: from the end); by default of the byte in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 1
    path.write_bytes(data)
