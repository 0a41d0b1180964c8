"""What ``skip_first_batches`` returns for a loader that is followed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["SkippedLoader"]


class SkippedLoader:
    """A loader without its first batches; the loader itself does the work, so its progress is not lost.

    Args:
        loader: The prepared loader.
        batches: How many batches to leave out of each iteration.
        leave_out: Lets the next iteration of the loader begin so many batches later; False if nothing is left in it.
    """

    def __init__(self, loader: Any, batches: int, leave_out: Callable[[int], bool]) -> None:
        self._loader = loader
        self._batches = batches
        self._leave_out = leave_out

    # scripts and Accelerate ask isinstance(..., DataLoader)
    @property
    def __class__(self) -> Any:
        return self._loader.__class__

    @__class__.setter
    def __class__(self, value: type) -> None:
        raise TypeError(f"the class of this loader cannot be changed to {value.__name__}")

    def __getattr__(self, name: str) -> Any:
        if name in ("_loader", "_batches", "_leave_out"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader) - self._batches

    def __iter__(self) -> Iterator[Any]:
        if self._leave_out(self._batches):
            yield from self._loader
