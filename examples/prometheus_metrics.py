"""An echo server that exports its loop's statistics to Prometheus. Run `pip install prometheus-client`, then

    python examples/prometheus_metrics.py --port 8888 --metrics-port 9100
    curl http://127.0.0.1:9100/metrics

A thread serves the metrics, so they are available even while something blocks the loop.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import signal
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

import grapeshot


class LoopCollector(Collector):
    """Reads `loop.statistics()` whenever Prometheus asks, so that no numbers are stored twice."""

    def __init__(self, loop: grapeshot.Loop) -> None:
        self._loop = loop

    def collect(self) -> Iterator[Metric]:
        found = self._loop.statistics()
        for field in dataclasses.fields(found):
            value = getattr(found, field.name)
            unit = "_seconds" if field.name.endswith("_s") else ""
            name = f"grapeshot_{field.name.removesuffix('_s') if unit else field.name}{unit}"
            text = f"{field.name} of loop.statistics()"
            if field.name in found.HISTOGRAMS:
                if value is not None:
                    yield self._histogram(f"{name}_seconds", text, value)
            elif field.name in found.GAUGES:
                yield GaugeMetricFamily(name, text, value)
            else:
                yield CounterMetricFamily(name, text, value)

    def _histogram(self, name, text, found) -> HistogramMetricFamily:
        buckets, total = [], 0
        for end_s, number in found.buckets:
            total += number
            buckets.append((repr(end_s), total))
        return HistogramMetricFamily(name, text, [*buckets, ("+Inf", total)], found.sum_s)


class Echo(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        self.transport.write(data)


async def main(port: int, metrics_port: int) -> None:
    loop = asyncio.get_running_loop()
    loop.measure_callbacks()
    registry = CollectorRegistry()
    registry.register(LoopCollector(loop))
    http_server, thread = start_http_server(metrics_port, "127.0.0.1", registry)
    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    server = await loop.create_server(Echo, "127.0.0.1", port)
    print(f"listening on 127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    print(f"metrics on 127.0.0.1:{http_server.server_port}", flush=True)
    await stopping.wait()
    server.close()
    server.close_clients()
    await asyncio.to_thread(http_server.shutdown)
    http_server.server_close()
    thread.join()
    print("stopped")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8888)
    parser.add_argument("--metrics-port", type=int, default=9100)
    arguments = parser.parse_args()
    grapeshot.run(main(arguments.port, arguments.metrics_port))
