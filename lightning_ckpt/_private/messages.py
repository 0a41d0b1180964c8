"""Keeps the logger of Lightning's messages, which each of its packages sets to its own when it is imported."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator

_PACKAGES = ("lightning", "lightning_fabric", "pytorch_lightning")
_MESSAGES = "lightning_utilities.core.rank_zero"  # the logger is its ``log``
_FIRST = "lightning.pytorch.utilities.rank_zero"


@contextlib.contextmanager
def kept_logger() -> Iterator[None]:
    """While Lightning's packages are imported, keep the message logger of the package that the program uses.

    Otherwise, a script that silences ``logging.getLogger("lightning.pytorch")`` would get them from the other logger.
    """
    is_chosen = any(name in sys.modules for name in _PACKAGES)
    chosen = getattr(sys.modules.get(_MESSAGES), "log", None) if is_chosen else None
    yield
    if chosen is None and _FIRST in sys.modules:
        chosen = logging.getLogger(_FIRST)
    if chosen is not None and hasattr(sys.modules.get(_MESSAGES), "log"):
        sys.modules[_MESSAGES].log = chosen  # type: ignore[attr-defined]
