"""The application of the Celery worker that is measured."""

from __future__ import annotations

import os
import time

import redis
from celery import Celery  # type: ignore[import-untyped]

WAIT_S = 0.05
URL = os.environ.get("BENCH_REDIS", "redis://127.0.0.1:6379")

app = Celery("benchmarks", broker=f"{URL}/0")
app.conf.update(broker_connection_retry_on_startup=True, task_ignore_result=True, worker_prefetch_multiplier=4)
store = redis.Redis.from_url(f"{URL}/1")


@app.task  # type: ignore[untyped-decorator]
def wait() -> None:
    """Wait, and count this call."""
    time.sleep(WAIT_S)
    store.incr("done")
