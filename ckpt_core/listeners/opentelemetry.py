"""Metrics and traces for OpenTelemetry. The extra ``[otel]`` installs its API; the program adds SDK and exporter.

Metrics: ``checkpoint.saves`` and ``checkpoint.uploads`` (by ``outcome``: ``durable`` or ``failed``),
``checkpoint.pending``, ``checkpoint.size`` (By), ``checkpoint.stall``, ``checkpoint.commit``, ``checkpoint.upload`` and
``checkpoint.load`` (s), ``checkpoint.passed_over``. Traces: a span ``checkpoint.save`` for each save, from when
training stops until the checkpoint is durable, with the event ``training continues``; and spans ``checkpoint.upload``
and ``checkpoint.load``.
"""

from __future__ import annotations

from typing import Any

from opentelemetry import metrics, trace
from opentelemetry.trace import Span, StatusCode

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

__all__ = ["OpenTelemetryListener"]

_NAME = "ckpt_core"


class OpenTelemetryListener:
    """Exports checkpoint events (saves, uploads, loads) to OpenTelemetry.

    Args:
        meter_provider: Receives the metrics; by default the global provider.
        tracer_provider: Receives the spans; by default the global provider.

    Examples:
        >>> from ckpt_core import Checkpointer
        >>> from ckpt_core.listeners.opentelemetry import OpenTelemetryListener
        >>> checkpointer = Checkpointer(listeners=[OpenTelemetryListener()])
    """

    def __init__(self, meter_provider: Any = None, tracer_provider: Any = None) -> None:
        self._providers = (meter_provider, tracer_provider)
        meter = metrics.get_meter(_NAME, meter_provider=meter_provider)
        self._tracer = trace.get_tracer(_NAME, tracer_provider=tracer_provider)
        self._saves = meter.create_counter("checkpoint.saves")
        self._uploads = meter.create_counter("checkpoint.uploads")
        self._passed_over = meter.create_counter("checkpoint.passed_over")
        self._pending = meter.create_up_down_counter("checkpoint.pending")
        self._size = meter.create_histogram("checkpoint.size", "By")
        self._stall = meter.create_histogram("checkpoint.stall", "s")
        self._commit = meter.create_histogram("checkpoint.commit", "s")
        self._upload = meter.create_histogram("checkpoint.upload", "s")
        self._load = meter.create_histogram("checkpoint.load", "s")
        self._spans: list[tuple[str, Span]] = []  # of the saves under way, in order; several may have the same path

    def __reduce__(self) -> tuple[Any, ...]:
        """Make a copy use the same providers, and a copy in another process that process's global ones."""
        return OpenTelemetryListener, self._providers if any(self._providers) else ()

    def __call__(self, event: Event) -> None:
        if isinstance(event, SaveStarted):
            self._pending.add(1)
            self._spans.append((event.path, self._begin("save", event, event.time)))
        elif isinstance(event, SnapshotTaken):
            self._stall.record(event.stall_seconds)
            spans = self._spans_of(event.path)
            if spans:
                about = {"stall": event.stall_seconds, "waited": event.waited_seconds}
                spans[-1].add_event("training continues", about, _nanoseconds(event.time))
        elif isinstance(event, SaveCommitted):
            self._commit.record(event.background_seconds)
            self._size.record(event.bytes)
            self._end_save(event, {"checkpoint.size": event.bytes})
        elif isinstance(event, SaveFailed):
            self._end_save(event, {}, event.error)
        elif isinstance(event, CheckpointUploaded):
            self._uploads.add(1, {"outcome": "durable"})
            self._upload.record(event.seconds)
            self._begin("upload", event, event.time - event.seconds).end(_nanoseconds(event.time))
        elif isinstance(event, UploadFailed):
            self._uploads.add(1, {"outcome": "failed"})
        elif isinstance(event, CheckpointLoaded):
            self._load.record(event.seconds)
            self._begin("load", event, event.time - event.seconds).end(_nanoseconds(event.time))
        elif isinstance(event, CheckpointSkipped):
            self._passed_over.add(1)

    def _begin(self, what: str, event: Event, time: float) -> Span:
        about = {"checkpoint.path": event.path}
        return self._tracer.start_span(f"checkpoint.{what}", attributes=about, start_time=_nanoseconds(time))

    def _spans_of(self, path: str) -> list[Span]:
        return [span for of, span in list(self._spans) if of == path]

    def _end_save(self, event: Event, about: dict[str, Any], error: str | None = None) -> None:
        self._saves.add(1, {"outcome": "durable" if error is None else "failed"})
        spans = self._spans_of(event.path)
        if spans:
            span = spans[0]
            self._spans.remove((event.path, span))
            self._pending.add(-1)
            span.set_attributes(about)
            if error is not None:
                span.set_status(StatusCode.ERROR, error)
            span.end(_nanoseconds(event.time))


def _nanoseconds(time: float) -> int:
    return int(time * 1e9)
