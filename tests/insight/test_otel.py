"""`grapeshot.insight.otel`: OpenTelemetry collects exactly what the loop has counted."""

from __future__ import annotations

import asyncio
import dataclasses
import time

import pytest
from support import gil_is_enabled

import grapeshot

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from grapeshot.insight import otel


@pytest.fixture
def loop():
    loop = grapeshot.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture
def reader():
    reader = InMemoryMetricReader()
    reader.provider = MeterProvider([reader], shutdown_on_exit=False)
    yield reader
    reader.provider.shutdown()


def collected(reader):
    """Return {name of a metric: (its unit, {attributes: value})}."""
    data = reader.get_metrics_data()
    if data is None:
        return {}
    return {
        metric.name: (metric.unit, {tuple(point.attributes.items()): point.value for point in metric.data.data_points})
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }


def test_every_number(loop, reader):
    exporter = otel.export(loop, attributes={"loop": "main"}, meter_provider=reader.provider)
    for _ in range(3):
        loop.call_soon(int)
    loop.call_later(3600, int)
    loop.run_until_complete(asyncio.sleep(0.001))
    found = loop.statistics()
    metrics = collected(reader)
    own = (("loop", "main"),)
    for field in dataclasses.fields(found):
        name = field.name
        if name in found.HISTOGRAMS:
            assert f"grapeshot.loop.{name}" not in metrics  # callbacks are not measured, so there are no histograms
            continue
        unit, points = metrics[f"grapeshot.loop.{name.removesuffix('_s')}"]
        if name in ("running_s", "polling_s"):
            assert unit == "s"
            assert points[own] >= getattr(found, name) > 0
        else:
            assert points == {own: getattr(found, name)}, name
    assert metrics["grapeshot.loop.bytes_written"][0] == "By"
    assert metrics["grapeshot.loop.timers"][1] == {own: 1}
    exporter.close()
    assert collected(reader) == {}


def test_percentiles(loop, reader):
    with otel.export(loop, meter_provider=reader.provider):
        loop.measure_callbacks()
        loop.run_until_complete(asyncio.sleep(0.001))
        durations = loop.statistics().callback_durations
        unit, points = collected(reader)["grapeshot.loop.callback_durations"]
        assert unit == "s"
        assert points == {(("percentile", percent),): durations.percentile(percent) for percent in (50, 90, 99, 100)}


def test_spans_of_slow_callbacks(loop, reader):
    spans = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(spans))

    def slow():
        end = time.monotonic() + 0.05
        while time.monotonic() < end or not loop._measuring.recorder._seen[0]:
            pass

    exporter = otel.export(loop, meter_provider=reader.provider, slow_spans=0.05, tracer_provider=provider)
    before = time.time_ns()
    loop.call_soon(int)
    loop.call_soon(slow)
    loop.call_soon(loop.stop)
    loop.run_forever()
    after = time.time_ns()
    name = f"callback {slow.__qualname__}"
    [span] = [each for each in spans.get_finished_spans() if each.name == name]  # a slow machine has other spans, too
    assert span.parent is None
    assert span.end_time - span.start_time >= 0.05e9
    assert before - 1_000_000 <= span.start_time < span.end_time <= after + 1_000_000
    if gil_is_enabled():  # without a GIL, stacks of other threads cannot be read
        assert "in slow" in span.attributes["code.stacktrace"]
    assert span.attributes["grapeshot.kind"] == "callback"
    exporter.close()
    exporter.close()
    assert loop._measuring.listeners == []
    provider.shutdown()


async def test_the_running_loop(loop, reader):
    with otel.export(meter_provider=reader.provider):
        assert collected(reader)["grapeshot.loop.iterations"][1] == {(): loop.statistics().iterations}


def test_loops_of_others_are_refused(reader):
    async def main():
        with pytest.raises(TypeError, match="only grapeshot's loops"):
            otel.export(meter_provider=reader.provider)

    runner = asyncio.Runner(loop_factory=asyncio.SelectorEventLoop)
    with runner:
        runner.run(main())
