"""Builds the central directory of a zip archive, for tests that assemble one from records."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_core._layouts.torch_file.zip_format import ZipRecord, central_end, central_entries


def central_directory(records: Sequence[ZipRecord], offset: int, comment: bytes) -> bytes:
    """Return the central directory of ``records``, to be written at ``offset``, with the archive's comment."""
    entries = central_entries(records)
    return entries + central_end(len(records), len(entries), offset, comment)
