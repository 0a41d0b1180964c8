"""The listeners for Prometheus and OpenTelemetry, with their real clients, on the events of real saves."""

from __future__ import annotations

import os
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core import Catalog, Checkpointer, StorageError
from ckpt_core.events import Event, SaveCommitted, SnapshotTaken

STATE = {"weight": torch.zeros(5000)}
LARGE = {"weight": torch.zeros(500_000)}  # a save of a small state waits for the commit


def use(listener: Any, folder: Path) -> int:
    """Save twice, fail once, load once, pass over a damaged checkpoint; return the size of a checkpoint."""
    (folder / "file").touch()
    with Checkpointer(strategy="async", listeners=[listener]) as checkpointer:
        for step in (1, 2):
            checkpointer.save(STATE, folder / f"{step}.ckpt")
        with pytest.raises(StorageError):
            checkpointer.save(STATE, folder / "file" / "below.ckpt")
            checkpointer.drain()
            raise checkpointer.take_failure() or AssertionError("it did not fail")
        checkpointer.load(folder / "1.ckpt")
    with (folder / "2.ckpt").open("r+b") as file:
        file.truncate(1000)
    found = Catalog(folder, listeners=[listener]).newest_verified()
    assert found is not None and found.name == "1.ckpt"
    return os.path.getsize(folder / "1.ckpt")


def test_prometheus_counts_saves_loads_and_failures(tmp_path: Path) -> None:
    prometheus = pytest.importorskip("prometheus_client")
    from ckpt_core.listeners.prometheus import PrometheusListener

    registry = prometheus.CollectorRegistry()
    listener = PrometheusListener(registry)
    under_way = []

    def both(event: Event) -> None:
        listener(event)
        if isinstance(event, SnapshotTaken):
            under_way.append(registry.get_sample_value("ckpt_pending"))

    size = use(both, tmp_path)

    def value(name: str, **labels: str) -> Any:
        return registry.get_sample_value(f"ckpt_{name}", labels)

    assert value("saves_total", outcome="durable") == 2
    assert value("saves_total", outcome="failed") == 1
    assert value("saved_bytes_total") == 2 * size
    assert value("size_bytes") == size
    assert value("stall_seconds_count") >= 2 and 0 < value("stall_seconds_sum") < 100
    assert value("commit_seconds_count") == 2
    assert value("load_seconds_count") == 1
    assert value("passed_over_total") == 1
    assert under_way[0] == 1 and value("pending") == 0
    assert value("last_commit_time_seconds") == pytest.approx(os.path.getmtime(tmp_path / "1.ckpt"), abs=60)
    assert b"ckpt_stall_seconds_bucket" in prometheus.generate_latest(registry)


def test_saves_under_one_name_are_counted_and_end_one_by_one(tmp_path: Path) -> None:
    prometheus = pytest.importorskip("prometheus_client")
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from ckpt_core.listeners.opentelemetry import OpenTelemetryListener
    from ckpt_core.listeners.prometheus import PrometheusListener

    registry, all_started = prometheus.CollectorRegistry(), threading.Event()
    reader, spans, tracers = InMemoryMetricReader(), InMemorySpanExporter(), TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(spans))

    def wait(event: Event) -> None:  # blocks the first commit until all saves are under way
        if isinstance(event, SaveCommitted):
            all_started.wait()

    listeners = [wait, PrometheusListener(registry), OpenTelemetryListener(MeterProvider([reader]), tracers)]
    with Checkpointer(strategy="async", max_pending=3, listeners=listeners) as checkpointer:
        for _ in range(3):
            checkpointer.save(LARGE, tmp_path / "last.ckpt")
        assert registry.get_sample_value("ckpt_pending") == 3
        all_started.set()
        checkpointer.wait()
    assert registry.get_sample_value("ckpt_pending") == 0
    ((scope,),) = (resource.scope_metrics for resource in reader.get_metrics_data().resource_metrics)
    assert [m.data.data_points[0].value for m in scope.metrics if m.name == "checkpoint.pending"] == [0]
    saves = spans.get_finished_spans()
    assert len(saves) == 3 and all(len(span.events) == 1 for span in saves)


def test_listeners_of_one_registry_count_together() -> None:
    prometheus = pytest.importorskip("prometheus_client")
    from ckpt_core.events import CheckpointSkipped
    from ckpt_core.listeners.prometheus import PrometheusListener

    before = prometheus.REGISTRY.get_sample_value("ckpt_passed_over_total") or 0.0
    first = PrometheusListener()
    for listener in (first, pickle.loads(pickle.dumps(first))):
        listener(CheckpointSkipped(path="a", reason=""))
    assert prometheus.REGISTRY.get_sample_value("ckpt_passed_over_total") == before + 2


def test_opentelemetry_gets_metrics_and_a_span_for_each_save(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from opentelemetry.trace import StatusCode

    from ckpt_core.listeners.opentelemetry import OpenTelemetryListener

    reader, spans, tracers = InMemoryMetricReader(), InMemorySpanExporter(), TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(spans))
    size = use(OpenTelemetryListener(MeterProvider([reader]), tracers), tmp_path)

    (resource,) = reader.get_metrics_data().resource_metrics
    (scope,) = resource.scope_metrics
    points = {metric.name: list(metric.data.data_points) for metric in scope.metrics}
    assert {point.attributes["outcome"]: point.value for point in points["checkpoint.saves"]} == {
        "durable": 2,
        "failed": 1,
    }
    assert points["checkpoint.pending"][0].value == 0
    assert points["checkpoint.size"][0].sum == 2 * size
    assert points["checkpoint.stall"][0].sum > 0
    assert points["checkpoint.passed_over"][0].value == 1
    saves = [span for span in spans.get_finished_spans() if span.name == "checkpoint.save"]
    paths = [Path(span.attributes["checkpoint.path"]).name for span in saves]
    assert sorted(paths) == ["1.ckpt", "2.ckpt", "below.ckpt"]
    for span in saves:
        failed = span.attributes["checkpoint.path"].endswith("below.ckpt")
        assert (span.status.status_code is StatusCode.ERROR) is failed
        assert 0 <= span.end_time - span.start_time < 100e9
        if not failed:
            assert span.attributes["checkpoint.size"] == size
            assert [event.name for event in span.events] == ["training continues"]
    assert [span.name for span in spans.get_finished_spans()].count("checkpoint.load") == 1
