"""The options that all plugins have, spelled alike, and what a checkpointer is made of them."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ckpt_core.checkpointer import OPTION_CHECKS
from ckpt_core.events import Event, EventLog, Listener, rank_of_process
from ckpt_core.option_checks import check_max_host_bytes, check_options, check_path, or_none
from ckpt_core.paths import StrPath
from ckpt_core.preflight import Preflight
from ckpt_core.report import page_beside, try_to_write
from ckpt_core.tiers import Tiers

#: Set in each process of a rehearsal (:mod:`ckpt_core.rehearsal`), which writes nothing into the log of the run.
REHEARSAL_VARIABLE = "CKPT_REHEARSAL"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointerOptions:
    """How a checkpointer saves, where, and who hears of it.

    Args:
        strategy: ``"sync"`` returns from a save when it is durable, ``"async"`` when the state is copied.
        max_pending: How many saves may be under way before the next one waits for the oldest (async only).
        on_error: What a save that fails in the background does: ``"raise"`` ends the training, ``"warn"`` logs and
            counts it.
        storage_options: Passed to fsspec for checkpoints at URLs (``s3://...``): endpoint, credentials and so on.
        local_dir: Directory on a fast local disk, which all ranks see, below which checkpoints are committed and
            training continues; then rank 0 uploads them from there in the background. Needs ``upload_to``.
        upload_to: URL or directory that takes the uploads, under the same relative names. Loads and look-ups take the
            nearest copy that is whole, under the path of either tier.
        keep_local: How many of the newest uploaded checkpoints of a directory stay in ``local_dir``; None: all.
        event_log: A local file to which every event is appended as a line of JSON (:mod:`ckpt_core.events`).
        report: A local file to which a page of HTML about the run, with all starts that the event log has, is written
            at its end (:mod:`ckpt_core.report`). Without ``event_log``, the log is beside it, as ``<report>.jsonl``.
            A name that ends with ``.png`` gives a picture as well, beside the page, which ends with ``.html``; Chromium
            or Chrome draws it.
        listeners: Called with every event.
        overlap: Whether an asynchronous save of an accelerator's tensors copies parameters and optimizers' state while
            the next forward and backward pass run; the device then waits at the next optimizer step. Whatever
            else changes them calls :func:`ckpt_core.wait_staged` first, or that save fails.
        max_host_bytes: The most host memory in bytes that this process takes for copies of states; None: as much as
            they need. A larger state passes through it, and training waits until the last of it is copied. At least
            32 MiB for each of ``max_pending`` (async only).

    Raises:
        ValueError: An option has a value that it cannot have, or one of ``local_dir`` and ``upload_to`` is missing; the
            message names the option.

    Examples:
        >>> from ckpt_core.options import CheckpointerOptions
        >>> options = CheckpointerOptions(local_dir="/nvme/run-7", upload_to="s3://bucket/run-7")
        >>> options.tiers.remote_path("/nvme/run-7/step=5.ckpt")
        's3://bucket/run-7/step=5.ckpt'
    """

    strategy: Literal["sync", "async"] = "async"
    max_pending: int = 1
    on_error: Literal["raise", "warn"] = "raise"
    storage_options: dict[str, Any] | None = dataclasses.field(default=None, repr=False)
    local_dir: StrPath | None = None
    upload_to: StrPath | None = None
    keep_local: int | None = None
    event_log: StrPath | None = None
    report: StrPath | None = None
    listeners: Sequence[Listener] = ()
    overlap: bool = False
    max_host_bytes: int | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any], **own: Any) -> CheckpointerOptions:
        """Return the options among what a plugin was given, by the same names, and those that it decides itself."""
        names = {option.name for option in dataclasses.fields(cls)}
        return cls(**{**{name: value for name, value in given.items() if name in names}, **own})

    def __post_init__(self) -> None:
        # Refused here, and not at the first save.
        path = or_none(check_path)
        check_options({**OPTION_CHECKS, "event_log": path, "report": path}, vars(self))
        _ = self.tiers
        check_max_host_bytes(self.max_host_bytes, self.max_pending)

    @functools.cached_property
    def tiers(self) -> Tiers | None:
        """The two tiers; None if there is one place only."""
        return Tiers.of(self.local_dir, self.upload_to, self.keep_local)

    @property
    def log_path(self) -> str | None:
        """Where the events go; None if nobody wants them, or this process is one of a rehearsal."""
        if os.environ.get(REHEARSAL_VARIABLE):
            return None
        if self.event_log is not None:
            return os.fspath(self.event_log)
        return None if self.report is None else f"{page_beside(os.fspath(self.report))}.jsonl"

    @functools.cached_property
    def _page(self) -> _Page | None:
        return None if self.report is None or self.log_path is None else _Page(self.log_path, os.fspath(self.report))

    def write_report(self) -> None:
        """Write the page, if it is wanted and anything has happened since; called at the end of a run, on one rank.

        Where nobody calls it, the page is written when the interpreter ends.
        """
        if self._page is not None:
            self._page.write()

    def settings(self, *listeners: Listener) -> dict[str, Any]:
        """Return the arguments for a checkpointer of either layout, with more listeners."""
        log: list[Listener] = [] if self.log_path is None else [EventLog(self.log_path)]
        if self._page is not None:
            log.append(self._page)
        return {
            "strategy": self.strategy,
            "max_pending": self.max_pending,
            "on_error": self.on_error,
            "storage_options": self.storage_options,
            "tiers": self.tiers,
            "listeners": [*listeners, *self.listeners, *log, Preflight(self.storage_options)],
            "overlap": self.overlap,
            "max_host_bytes": self.max_host_bytes,
        }


class _Page:
    """Writes the page about a run; a listener, which knows whether there is anything new."""

    def __init__(self, log: str, target: str) -> None:
        self._log, self._target = os.path.abspath(log), os.path.abspath(target)
        self._process = os.getpid()
        self._is_due = False
        atexit.register(self.write)

    def __call__(self, event: Event) -> None:
        self._is_due = self._is_due or rank_of_process() == 0

    def write(self) -> None:
        if self._is_due and os.getpid() == self._process:
            self._is_due = False
            try_to_write(self._log, self._target)
