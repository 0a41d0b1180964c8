"""Deletes the files that killed saves of directory checkpoints have left on an object store.

On a local disk, an unfinished directory has a temporary name and a lock. On a store, its files are already under the
final name, and become a checkpoint when the manifest is written.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Sequence

from ckpt_core.errors import CheckpointError
from ckpt_core.storage.base import MANIFEST_NAME, PROBE_NAME, FileInfo, Storage, is_directory_checkpoint

logger = logging.getLogger(__name__)

SILENT_SECONDS = 24 * 3600.0  # longer than any save takes between two files
_DIGESTS = re.compile(r"rank-\d{5}-of-\d{5}(-[0-9A-Za-z-]+)?\.digests")
_METADATA = b'{"__metadata__":'  # the beginning of our safetensors headers, after the length
_LONGEST_METADATA = 512  # bytes
_LENGTH_BYTES = 8


def remove_leftovers(
    storage: Storage, directory: str, *, silent_seconds: float = SILENT_SECONDS, dry_run: bool = False
) -> list[str]:
    """Delete the files of directory checkpoints that were never committed and are abandoned; return the affected paths.

    Deletes only files whose name or content shows that this package wrote them, in directories that have no manifest
    and to which no file was added for ``silent_seconds`` (by the store's dates and this machine's clock), and a probe
    file as old as that. With ``dry_run``, deletes nothing. Everything else stays.
    """
    removed = []
    for file in storage.list(directory):
        if os.path.basename(file.path) == PROBE_NAME and _is_abandoned([file], silent_seconds):
            if not dry_run:
                storage.remove(file.path)
            removed.append(file.path)
    for path in storage.subdirectories(directory):
        files = storage.list(path)
        if not _is_abandoned(files, silent_seconds):
            continue
        ours = [file.path for file in files if _is_ours(storage, file)]
        # Checked again, because it may have been committed while the files were read.
        if ours and not is_directory_checkpoint(storage, path):
            for name in [] if dry_run else ours:
                storage.remove(name)
            removed.append(path)
    return removed


def has_digests(files: Sequence[FileInfo]) -> bool:
    """Return whether a directory has a file of digests, which only this package writes."""
    return any(_DIGESTS.fullmatch(os.path.basename(file.path)) for file in files)


def _is_abandoned(files: Sequence[FileInfo], silent_seconds: float) -> bool:
    if any(os.path.basename(file.path) == MANIFEST_NAME or file.modified == 0.0 for file in files):
        return False
    return bool(files) and time.time() - max(file.modified for file in files) >= silent_seconds


def _is_ours(storage: Storage, file: FileInfo) -> bool:
    """Return whether this package wrote a file as part of a checkpoint; other model files can have the same names."""
    name = os.path.basename(file.path)
    if _DIGESTS.fullmatch(name):
        return True
    if not name.endswith(".safetensors"):
        return False
    end = min(file.size, _LENGTH_BYTES + len(_METADATA) + _LONGEST_METADATA)
    try:
        with storage.open(file.path) as reader:
            header = reader.read(0, end)[_LENGTH_BYTES:]
        if not header.startswith(_METADATA):
            return False
        text = header[len(_METADATA) :].decode("ascii", "replace")
        metadata, _ = json.JSONDecoder().raw_decode(text)
    except (CheckpointError, ValueError, RecursionError) as error:
        logger.info("%s stays, because it could not be read: %s", file.path, error)
        return False
    return isinstance(metadata, dict) and {"save", "rank"} <= metadata.keys()
