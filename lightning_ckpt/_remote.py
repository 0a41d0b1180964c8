"""What Lightning does with checkpoint directories by itself, for stores that it cannot reach without our options.

``ModelCheckpoint`` and the Trainer look at directories through fsspec, without the ``storage_options`` of the plugin. On a store
that needs them they fail, or take a directory for empty and start from scratch. Listings that fsspec remembers hide files
that were saved since. And ``"best"`` is a question to a callback that, before ``setup``, has not been told of any Trainer.
"""

from __future__ import annotations

import datetime
import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import fsspec

from ckpt_core.errors import CheckpointError
from lightning_ckpt._bases import ModelCheckpointBase

__all__ = ["before_look_ups", "is_remote", "open_filesystem", "tell_of_checkpoint"]


def is_remote(path: Any) -> bool:
    """Return whether ``path`` is a URL of something else than the local filesystem."""
    return "://" in str(path) and not str(path).startswith(("file://", "local://"))


def open_filesystem(directory: str, storage_options: Mapping[str, Any] | None) -> Any:
    """Return fsspec's filesystem of a URL; it takes the options of the plugin and remembers no listings."""
    options = {name: value for name, value in (storage_options or {}).items() if name != "backend"}
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


def before_look_ups(call: Callable[[Any], None]) -> None:
    """Let every Trainer of this process, of either package, call ``call(trainer)`` before it finds out what its ``ckpt_path`` is.

    No hook is called before that. Does nothing a second time.

    Args:
        call: A function, and always the same.

    Raises:
        CheckpointError: This release of Lightning is not built as we know it.
    """
    for base in ModelCheckpointBase.__mro__:
        package, is_lightnings, _ = base.__module__.partition(".callbacks.model_checkpoint")
        if not is_lightnings:
            continue
        connectors = importlib.import_module(f"{package}.trainer.connectors.checkpoint_connector")
        connector = getattr(connectors, "_CheckpointConnector", None)
        if not hasattr(connector, "_select_ckpt_path"):
            raise CheckpointError(
                f"cannot look up checkpoints with this release of {package}: it has no _select_ckpt_path",
                remedy="use Lightning 2.5 to 2.7",
            )
        _call_before_select(connector, call)


def _call_before_select(connector: Any, call: Callable[[Any], None]) -> None:
    original = connector._select_ckpt_path
    if getattr(original, "called_before", None) is call:
        return

    @functools.wraps(original)
    def select_ckpt_path(self: Any, *args: Any, **kwargs: Any) -> Any:
        call(self.trainer)
        return original(self, *args, **kwargs)

    select_ckpt_path.called_before = call  # type: ignore[attr-defined]
    connector._select_ckpt_path = select_ckpt_path
