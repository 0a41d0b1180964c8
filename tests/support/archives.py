"""The end of a zip archive, for tests that put one together from records."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_core._layouts.torch_file.zip_format import ZipRecord, central_end, central_entries


def central_directory(records: Sequence[ZipRecord], offset: int, comment: bytes) -> bytes:
    """Return the directory of ``records``, to stand at ``offset``, and the comment."""
    entries = central_entries(records)
    return entries + central_end(len(records), len(entries), offset, comment)
