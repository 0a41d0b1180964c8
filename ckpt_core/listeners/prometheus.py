"""Metrics for Prometheus. Needs the extra ``[prometheus]``.

==================================  =========  ===============================================================
``ckpt_saves_total{outcome}``       counter    saves that are ``durable``, or have ``failed``
``ckpt_saved_bytes_total``          counter    bytes of those that are durable
``ckpt_pending``                    gauge      saves under way
``ckpt_last_commit_time_seconds``   gauge      Unix time of the last commit: the one to alert on
``ckpt_size_bytes``                 gauge      size of the last checkpoint
``ckpt_stall_seconds``              histogram  for how long a save stopped training
``ckpt_commit_seconds``             histogram  from the end of the stall until the checkpoint was durable
``ckpt_uploads_total{outcome}``     counter    uploads that are ``durable``, or have ``failed``
``ckpt_upload_seconds``             histogram  duration of an upload
``ckpt_load_seconds``               histogram  duration of a load
``ckpt_passed_over_total``          counter    checkpoints that a resume has passed over because they do not verify
==================================  =========  ===============================================================
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from ckpt_core.events import (
    CheckpointLoaded,
    CheckpointSkipped,
    CheckpointUploaded,
    Event,
    SaveCommitted,
    SaveFailed,
    SaveStarted,
    SnapshotTaken,
    UploadFailed,
)

__all__ = ["PrometheusListener"]

_SECONDS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
_lock = threading.RLock()  # a signal handler that saves may make a listener
_made: weakref.WeakKeyDictionary[CollectorRegistry, _Metrics] = weakref.WeakKeyDictionary()


class _Metrics:
    """Our metrics in one registry; shared by its listeners, because a registry accepts each name only once."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def make(kind: Callable[..., Any], name: str, help_text: str, **settings: Any) -> Any:
            return kind(f"ckpt_{name}", help_text, registry=registry, **settings)

        def seconds(name: str, help_text: str) -> Any:
            return make(Histogram, f"{name}_seconds", help_text, buckets=_SECONDS)

        self.saves = make(Counter, "saves", "Saves by outcome", labelnames=("outcome",))
        self.saved_bytes = make(Counter, "saved_bytes", "Bytes of durable checkpoints")
        self.pending = make(Gauge, "pending", "Saves under way")
        self.last_commit = make(Gauge, "last_commit_time_seconds", "Unix time of the last commit")
        self.size = make(Gauge, "size_bytes", "Size of the last checkpoint")
        self.stall = seconds("stall", "For how long a save stopped training")
        self.commit = seconds("commit", "From the end of the stall until the checkpoint was durable")
        self.uploads = make(Counter, "uploads", "Uploads by outcome", labelnames=("outcome",))
        self.upload = seconds("upload", "Duration of an upload")
        self.load = seconds("load", "Duration of a load")
        self.passed_over = make(Counter, "passed_over", "Checkpoints that do not verify, passed over by a resume")


class PrometheusListener:
    """Exports checkpoint events as metrics in a ``prometheus_client`` registry; the program serves or pushes them.

    Several listeners of one registry share its metrics.

    Args:
        registry: Registry of the metrics; by default the one that ``start_http_server`` serves.

    Examples:
        >>> from ckpt_core import Checkpointer
        >>> from ckpt_core.listeners.prometheus import PrometheusListener
        >>> checkpointer = Checkpointer(listeners=[PrometheusListener()])
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._registry = registry
        self._pending: list[str] = []  # paths of the saves under way, one entry per save
        with _lock:
            self._metrics = _made.get(registry) or _made.setdefault(registry, _Metrics(registry))

    def __reduce__(self) -> tuple[Any, ...]:
        """Make a copy use the same registry, and a copy in another process that process's default one."""
        return PrometheusListener, () if self._registry is REGISTRY else (self._registry,)

    def __call__(self, event: Event) -> None:
        metrics = self._metrics
        if isinstance(event, SaveStarted):
            self._pending.append(event.path)
            metrics.pending.inc()
        elif isinstance(event, SaveCommitted | SaveFailed):
            if event.path in self._pending:
                self._pending.remove(event.path)
                metrics.pending.dec()
            metrics.saves.labels("durable" if isinstance(event, SaveCommitted) else "failed").inc()
        if isinstance(event, SnapshotTaken):
            metrics.stall.observe(event.stall_seconds)
        elif isinstance(event, SaveCommitted):
            metrics.saved_bytes.inc(event.bytes)
            metrics.size.set(event.bytes)
            metrics.last_commit.set(event.time)
            metrics.commit.observe(event.background_seconds)
        elif isinstance(event, CheckpointUploaded):
            metrics.uploads.labels("durable").inc()
            metrics.upload.observe(event.seconds)
        elif isinstance(event, UploadFailed):
            metrics.uploads.labels("failed").inc()
        elif isinstance(event, CheckpointLoaded):
            metrics.load.observe(event.seconds)
        elif isinstance(event, CheckpointSkipped):
            metrics.passed_over.inc()
