"""Progress bars on the terminal, for verbs that read or write many bytes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from ckpt_core.cli.parser import Options
from ckpt_core.storage.counting import counting


@contextlib.contextmanager
def progress(options: Options, what: str, total: int | None) -> Iterator[None]:
    """Show a bar with speed and time left while the body runs: on a terminal, with tqdm, without ``--quiet``.

    It counts bytes read from and written to storages that the body creates; ``total`` is in bytes, None if unknown.
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
