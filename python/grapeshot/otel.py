"""Exports what a loop counts through OpenTelemetry, and slow callbacks as spans: needs the extra ``grapeshot[otel]``.

Only OpenTelemetry's API is used: what collects and sends is the program's choice, by the providers that it sets.
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
        "grapeshot.otel needs opentelemetry-api: pip install 'grapeshot[otel]'", name=error.name
    ) from error

from ._loop import Loop
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
    """Export the numbers of ``loop.statistics()`` as OpenTelemetry metrics, until the result is closed.

    Args:
        loop: the loop; the running one if it is left out.
        attributes: what each number has, ``{"loop": "main"}`` for instance.
        meter_provider: the one that the program has set if it is left out.
        slow_spans: each callback that takes at least so many seconds becomes a span, with the stack that it was seen
            with. This measures callbacks (``loop.add_slow_listener``); left out, there are none.
        tracer_provider: as ``meter_provider``.

    There is an instrument ``grapeshot.loop.<name>`` for each number, in seconds (``s``), bytes (``By``) or counts, read
    when the metrics are collected. Where callbacks are measured, ``grapeshot.loop.callback_durations`` and
    ``grapeshot.loop.scheduling_delays`` have percentiles in an attribute ``percentile``.
    """
    if loop is None:
        running = asyncio.get_running_loop()
        if not isinstance(running, Loop):
            raise TypeError(f"only grapeshot's loops have statistics, and {running!r} runs")
        loop = running
    exporter = Exporter(loop, attributes or {})
    exporter._add_instruments(metrics.get_meter(_NAME, meter_provider=meter_provider))
    if slow_spans is not None:
        exporter._add_spans(trace.get_tracer(_NAME, tracer_provider=tracer_provider), slow_spans)
    return exporter


class Exporter:
    """Exports a loop. Made by :func:`export`; also a context manager that closes itself."""

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
        """Export no more. The instruments stay, without values: OpenTelemetry has no way to remove them."""
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
            if self._loop is not None:
                yield metrics.Observation(getattr(self._loop.statistics(), name), self._attributes)

        return observe

    def _percentiles(self, name: str) -> Callable[[metrics.CallbackOptions], Iterable[metrics.Observation]]:
        def observe(_options: metrics.CallbackOptions) -> Iterable[metrics.Observation]:
            found: Histogram | None = None if self._loop is None else getattr(self._loop.statistics(), name)
            if found is not None and found.count:
                for percent in _PERCENTILES:
                    attributes: dict[str, str | int] = {**self._attributes, "percentile": percent}
                    yield metrics.Observation(found.percentile(percent), attributes)

        return observe

    def _add_spans(self, tracer: trace.Tracer, seconds: float) -> None:
        assert self._loop is not None

        def listener(slow: SlowCallback) -> None:
            # The loop's clock has another beginning than that of spans.
            began_ns = time.time_ns() - time.monotonic_ns() + int(slow.started_s * 1e9)
            attributes: dict[str, str] = {**self._attributes, "grapeshot.kind": slow.kind}
            if slow.stack:
                attributes["code.stacktrace"] = "\n".join(slow.stack)
            # It belongs to no request that is known here: an empty context has no span above it.
            span = tracer.start_span(f"{slow.kind} {slow.name}", Context(), attributes=attributes, start_time=began_ns)
            span.end(began_ns + int(slow.duration_s * 1e9))

        self._listener = listener
        self._loop.add_slow_listener(listener, seconds, stacks=True)


def _unit(name: str) -> str:
    if name.endswith("_s"):
        return "s"
    return "By" if "bytes" in name else f"{{{name}}}"
