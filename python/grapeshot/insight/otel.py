"""Exports a loop's statistics as OpenTelemetry metrics, and slow callbacks as spans. Needs ``grapeshot[otel]``.

This module uses only OpenTelemetry's API. The program chooses how the data is collected and sent, by the providers that
it sets.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time

try:
    from opentelemetry import metrics, trace
    from opentelemetry.context import Context
except ImportError as error:
    raise ImportError(
        "grapeshot.insight.otel needs opentelemetry-api: pip install 'grapeshot[otel]'", name=error.name
    ) from error

from grapeshot._loop import Loop

from ._statistics import Histogram, Statistics

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from types import TracebackType

    from ._measuring import SlowCallback

    Attributes = Mapping[str, str]

__all__ = ["Exporter", "export"]

_NAME = "grapeshot"
_PERCENTILES = (50, 90, 99, 100)


def export(
    loop: Loop | None = None,
    *,
    attributes: Attributes | None = None,
    meter_provider: metrics.MeterProvider | None = None,
    slow_spans: float | None = None,
    tracer_provider: trace.TracerProvider | None = None,
) -> Exporter:
    """Export the numbers of ``loop.statistics()`` as OpenTelemetry metrics, until the returned exporter is closed.

    Args:
        loop: the loop. The default is the running loop.
        attributes: attributes to attach to each number, for instance ``{"loop": "main"}``.
        meter_provider: the provider of the meter. The default is the one that the program has set.
        slow_spans: export each callback that takes at least this many seconds as a span, with its stack. This makes the
            loop measure its callbacks (``loop.add_slow_listener``). By default there are no spans.
        tracer_provider: the provider of the tracer. The default is the one that the program has set.

    Each number has an instrument ``grapeshot.loop.<name>``, in seconds (``s``), bytes (``By``) or counts. A final
    ``_s`` is removed from the name. The number is read when the metrics are collected. If callbacks are measured,
    ``grapeshot.loop.callback_durations`` and ``grapeshot.loop.scheduling_delays`` have a value for each of several
    percentiles, with the percentile in the attribute ``percentile``.
    """
    if loop is None:
        running = asyncio.get_running_loop()
        if not isinstance(running, Loop):
            raise TypeError(f"only grapeshot's loops have statistics, and the running loop is {running!r}")
        loop = running
    exporter = Exporter(loop, attributes or {})
    exporter._add_instruments(metrics.get_meter(_NAME, meter_provider=meter_provider))
    if slow_spans is not None:
        exporter._add_spans(trace.get_tracer(_NAME, tracer_provider=tracer_provider), slow_spans)
    return exporter


class Exporter:
    """Exports a loop's statistics. :func:`export` returns an exporter. The end of a ``with`` block closes it."""

    def __init__(self, loop: Loop, attributes: Attributes) -> None:
        self._loop: Loop | None = loop
        self._attributes = dict(attributes)
        self._listener: Callable[[SlowCallback], None] | None = None

    def __enter__(self) -> Exporter:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _exc: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop exporting. The instruments remain, without values, because OpenTelemetry cannot remove instruments."""
        loop, self._loop = self._loop, None
        if loop is not None and self._listener is not None and not loop.is_closed():
            loop.remove_slow_listener(self._listener)

    def _add_instruments(self, meter: metrics.Meter) -> None:
        for field in dataclasses.fields(Statistics):
            name = field.name
            if name in Statistics.HISTOGRAMS:
                meter.create_observable_gauge(f"grapeshot.loop.{name}", [self._percentiles(name)], unit="s")
                continue
            title = f"grapeshot.loop.{name.removesuffix('_s')}"
            if name in Statistics.GAUGES:
                meter.create_observable_gauge(title, [self._number(name)], unit=_unit(name))
            else:
                meter.create_observable_counter(title, [self._number(name)], unit=_unit(name))

    def _number(self, name: str) -> Callable[[metrics.CallbackOptions], Iterable[metrics.Observation]]:
        def observe(_options: metrics.CallbackOptions) -> Iterable[metrics.Observation]:
            loop = self._loop  # another thread may close the exporter
            if loop is not None:
                yield metrics.Observation(getattr(loop.statistics(), name), self._attributes)

        return observe

    def _percentiles(self, name: str) -> Callable[[metrics.CallbackOptions], Iterable[metrics.Observation]]:
        def observe(_options: metrics.CallbackOptions) -> Iterable[metrics.Observation]:
            loop = self._loop
            found: Histogram | None = None if loop is None else getattr(loop.statistics(), name)
            if found is not None and found.count:
                for percent in _PERCENTILES:
                    attributes: dict[str, str | int] = {**self._attributes, "percentile": percent}
                    yield metrics.Observation(found.percentile(percent), attributes)

        return observe

    def _add_spans(self, tracer: trace.Tracer, seconds: float) -> None:
        assert self._loop is not None

        def listener(slow: SlowCallback) -> None:
            # The loop's clock and the clock of spans have different starting points.
            began_ns = time.time_ns() - time.monotonic_ns() + int(slow.started_s * 1e9)
            attributes: dict[str, str] = {**self._attributes, "grapeshot.kind": slow.kind}
            if slow.stack:
                attributes["code.stacktrace"] = "\n".join(slow.stack)
            # The request that the callback belongs to is not known here. In an empty context, the span has no parent.
            span = tracer.start_span(f"{slow.kind} {slow.name}", Context(), attributes=attributes, start_time=began_ns)
            span.end(began_ns + int(slow.duration_s * 1e9))

        self._listener = listener
        self._loop.add_slow_listener(listener, seconds, stacks=True)


def _unit(name: str) -> str:
    if name.endswith("_s"):
        return "s"
    return "By" if "bytes" in name else f"{{{name}}}"
