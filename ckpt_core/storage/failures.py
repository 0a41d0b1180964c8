"""What went wrong at a store, in the words of this package and without credentials."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from ckpt_core.errors import CheckpointError, CheckpointNotFoundError, StorageError
from ckpt_core.storage.credentials import Secrets

__all__ = ["Describe", "describer", "translated"]

Describe = Callable[[Exception], CheckpointError]


def describer(secrets: Secrets, action: str, path: str) -> Describe:
    """Return what makes the error for the user out of the one of a client.

    Args:
        secrets: Shown nowhere.
        action: What was being done: ``"read"``, ``"write"``, ``"commit"``, ...
        path: To which URL.
    """
    shown = secrets.hide(path)

    def describe(error: Exception) -> CheckpointError:
        if isinstance(error, CheckpointError):
            return error
        failure: CheckpointError
        if isinstance(error, FileNotFoundError) and action not in ("write", "commit"):
            failure = CheckpointNotFoundError(f"Checkpoint file not found: {shown}", path=shown)
        else:
            failure = StorageError(
                f"cannot {action} the checkpoint: {type(error).__name__}: {secrets.hide(_text_of(error))}",
                path=shown,
                remedy="check the URL, the credentials and the storage_options",
                errno=getattr(error, "errno", None),
            )
        failure.__cause__ = None if secrets.are_in(error) else error
        return failure

    return describe


def _text_of(error: Exception) -> str:
    return str(error).partition("\n\nDebug source:")[0]  # which obstore adds, in the words of Rust


@contextlib.contextmanager
def translated(describe: Describe) -> Iterator[None]:
    """Raise what ``describe`` makes of an exception inside, in its place."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - raised below, where Python does not add it to what it shows
        failure = describe(error)
    else:
        return
    raise failure
