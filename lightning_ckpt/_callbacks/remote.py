"""What Lightning does with checkpoint directories by itself, for stores that it cannot reach without our options.

``ModelCheckpoint`` and the Trainer look at directories through fsspec, without the ``storage_options`` of the plugin. On a store
that needs them they fail, or take a directory for empty and start from scratch. Listings that fsspec remembers hide files
that were saved since. And ``"best"`` is a question to a callback that, before ``setup``, has not been told of any Trainer.
"""

from __future__ import annotations

import datetime
import functools
import sys
from collections.abc import Mapping
from typing import Any

import fsspec

__all__ = ["is_remote", "open_filesystem", "tell_of_checkpoint"]


def is_remote(path: Any) -> bool:
    """Return whether ``path`` is a URL of something else than the local filesystem."""
    return "://" in str(path) and not str(path).startswith(("file://", "local://"))


def open_filesystem(directory: str, storage_options: Mapping[str, Any] | None) -> Any:
    """Return fsspec's filesystem of a URL; it takes the options of the plugin and remembers no listings."""
    options = {
        name: value for name, value in (storage_options or {}).items() if name not in ("backend", "follow_links")
    }
    filesystem, _ = fsspec.core.url_to_fs(directory, **{"use_listings_cache": False, **options})
    return filesystem


class _FoundCheckpoint:
    """Answers for a filesystem what the Trainer asks about the checkpoint that was found for ``"last"``."""

    def __init__(self, modified: float) -> None:
        self._modified = datetime.datetime.fromtimestamp(modified, tz=datetime.timezone.utc)

    def exists(self, path: str) -> bool:
        return True

    def modified(self, path: str) -> datetime.datetime:
        return self._modified


def tell_of_checkpoint(trainer: Any, path: str, modified: float) -> None:
    """Let the Trainer know a checkpoint on a store without looking for it.

    Args:
        trainer: Of either package.
        path: URL of a checkpoint that exists.
        modified: Unix time of its commit in seconds.
    """
    connector = sys.modules[type(trainer._checkpoint_connector).__module__]
    original = connector.get_filesystem
    known: dict[str, _FoundCheckpoint] | None = getattr(original, "found_checkpoints", None)
    if known is None:
        known = {}

        @functools.wraps(original)
        def get_filesystem(asked: Any, **options: Any) -> Any:
            found = known.pop(str(asked), None)
            return original(asked, **options) if found is None else found

        get_filesystem.found_checkpoints = known  # type: ignore[attr-defined]
        connector.get_filesystem = get_filesystem  # type: ignore[attr-defined]
    known[path] = _FoundCheckpoint(modified)
