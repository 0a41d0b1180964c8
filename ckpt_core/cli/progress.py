"""Progress on the terminal, for what reads or writes many bytes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from ckpt_core.cli.parser import Options
from ckpt_core.storage.counting import counting


@contextlib.contextmanager
def progress(options: Options, what: str, total: int | None) -> Iterator[None]:
    """Show a bar with speed and time left while the body runs, where a person sees it and tqdm is installed.

    What is read from and written to the storages that the body makes moves it; ``total`` is in bytes, if it is known.
    """
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        is_shown = False
    else:
        is_shown = sys.stderr.isatty() and not options.quiet
    if not is_shown:
        yield
        return
    with (
        tqdm(desc=what, total=total, unit="B", unit_scale=True, leave=False, dynamic_ncols=True) as bar,
        counting(bar.update),
    ):
        yield
