"""The options that both plugins share, and the checkpointer settings that follow from them."""

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

#: Set in each process of a rehearsal (:mod:`ckpt_core.rehearsal`), which writes nothing to the event log of the run.
REHEARSAL_VARIABLE = "CKPT_REHEARSAL"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointerOptions:
    """How and where a checkpointer saves, and which listeners, log and report receive its events.

    Args:
        strategy: When a save returns. ``"sync"``: when it is durable. ``"async"``: when the state is copied.
        max_pending: How many saves may be pending before the next one waits for the oldest (async only).
        on_error: What to do when a background save fails: ``"raise"`` ends the training, ``"warn"`` logs and counts
            the failure.
        storage_options: Passed to fsspec for checkpoints at URLs (``s3://...``): endpoint, credentials and so on.
        local_dir: Directory on a fast local disk, visible to all ranks, below which checkpoints are committed. Training
            then continues, and rank 0 uploads them from there in the background. Needs ``upload_to``.
        upload_to: URL or directory that receives the uploads, under the same relative names. Loads and look-ups accept
            the path of either tier, and use the nearest intact copy.
        keep_local: How many of the newest uploaded checkpoints of a directory stay in ``local_dir``; None: all.
        event_log: A local file to which every event is appended as a line of JSON (:mod:`ckpt_core.events`).
        report: A local file for an HTML page about the run, including all earlier starts in the event log, written at
            the run's end (:mod:`ckpt_core.report`). Without ``event_log``, the log is ``<report>.jsonl`` next to it. If
            the name ends with ``.png``, Chromium or Chrome also draws a picture, next to the page, whose name then ends
            with ``.html``.
        listeners: Called with every event.
        overlap: Whether an asynchronous save of an accelerator's tensors copies parameters and optimizer state during
            the next forward and backward pass; the device then waits at the next optimizer step. Any other code that
            changes them must call :func:`ckpt_core.wait_staged` first, or that save fails.
        max_host_bytes: Maximum host memory in bytes that this process uses for copies of states; None: as much as they
            need. A larger state is copied and written in windows, and training waits until the last one is copied. At
            least 32 MiB for each of ``max_pending`` (async only).

    Raises:
        ValueError: An option has an invalid value, or only one of ``local_dir`` and ``upload_to`` is given; the
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
        """Create options from a plugin's arguments of the same names, overridden by those in ``own``."""
        names = {option.name for option in dataclasses.fields(cls)}
        return cls(**{**{name: value for name, value in given.items() if name in names}, **own})

    def __post_init__(self) -> None:
        # Invalid values are refused here rather than at the first save.
        path = or_none(check_path)
        check_options({**OPTION_CHECKS, "event_log": path, "report": path}, vars(self))
        _ = self.tiers
        check_max_host_bytes(self.max_host_bytes, self.max_pending)

    @functools.cached_property
    def tiers(self) -> Tiers | None:
        """The two tiers; None if checkpoints are kept in one place only."""
        return Tiers.of(self.local_dir, self.upload_to, self.keep_local)

    @property
    def log_path(self) -> str | None:
        """The path of the event log; None if no log or report is wanted, or this process is part of a rehearsal."""
        if os.environ.get(REHEARSAL_VARIABLE):
            return None
        if self.event_log is not None:
            return os.fspath(self.event_log)
        return None if self.report is None else f"{page_beside(os.fspath(self.report))}.jsonl"

    @functools.cached_property
    def _page(self) -> _Page | None:
        return None if self.report is None or self.log_path is None else _Page(self.log_path, os.fspath(self.report))

    def write_report(self) -> None:
        """Write the report, if one is wanted and there are new events. Call it at the end of a run, on one rank.

        If it is not called, the report is written when the interpreter exits.
        """
        if self._page is not None:
            self._page.write()

    def settings(self, *listeners: Listener) -> dict[str, Any]:
        """Return the arguments for a checkpointer of either layout, with additional listeners."""
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
    """Writes the report of a run; a listener, so that it knows whether there are new events."""

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
