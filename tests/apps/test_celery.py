"""Celery's worker with the pool of `grapeshot.coro.celery`: the worker and its client run in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from support import HOST, PROCESS_CAP_S, coro_is_available

from tests.apps.certificates import Certificates
from tests.apps.daemons import RabbitMQ, RedisAddress
from tests.apps.processes import Process
from tests.apps.requirements import package

pytestmark = [
    pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter"),
    pytest.mark.slow,
]

POOL = "grapeshot.coro.celery:TaskPool"
TASKS = """
import asyncio, os, sys, threading, time
import redis
from celery import Celery, exceptions

app = Celery("tasks", broker=os.environ["BROKER"], backend=os.environ["RESULTS"])
app.conf.update(
    broker_connection_retry_on_startup=True,
    broker_transport_options=eval(os.environ.get("OPTIONS", "{}")),
    task_acks_late="LATE" in os.environ,
    worker_soft_shutdown_timeout=float(os.environ.get("SOFT", "0")),
    worker_prefetch_multiplier=2,
)
store = redis.Redis.from_url(os.environ["RESULTS"], socket_timeout=None)


def meet(name, count):
    "Wait until `meet` has been called `count` times with this name."
    store.incr(name)
    while int(store.get(name)) < count:
        time.sleep(0.01)


@app.task
def together(name, count):
    "Wait for the others. Return the thread in which the task ran."
    meet(name, count)
    return threading.get_native_id()


@app.task
async def async_together(name, count):
    store.incr(name)
    async with asyncio.timeout(60):
        while int(store.get(name)) < count:
            await asyncio.sleep(0.01)
    return asyncio.current_task() is not None


@app.task
def wait(name):
    "Note that the task has begun, wait for ever, and note which exception ended the wait."
    store.set(name, "begun")
    try:
        threading.Event().wait()
    except BaseException as exc:
        store.set(name, type(exc).__name__)
        raise


@app.task
def nap(name):
    store.set(name, "begun")
    time.sleep(0.5)
    store.set(name, "ended")


@app.task(soft_time_limit=0.2, time_limit=60)
def soft():
    try:
        time.sleep(60)
    except exceptions.SoftTimeLimitExceeded:
        return "tidied up"


@app.task(soft_time_limit=0.2)
async def async_soft():
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(60))
    except exceptions.SoftTimeLimitExceeded:
        return "tidied up"


@app.task(soft_time_limit=0.2)
async def async_soft_uncaught():
    await asyncio.sleep(60)


@app.task(time_limit=0.3)
def hard():
    time.sleep(60)


@app.task(time_limit=0.2)
def stubborn():
    for _ in range(2):
        try:
            time.sleep(60)
        except BaseException:
            pass
    return "twice"


@app.task
def exits():
    sys.exit(3)


@app.task(autoretry_for=(LookupError,), max_retries=2, retry_backoff=0, default_retry_delay=0)
async def again(name):
    await asyncio.sleep(0)
    if store.incr(name) < 3:
        raise LookupError(name)
    return int(store.get(name))


@app.task
def nested():
    return together.delay("nested", 1).get(timeout=60)


@app.task
async def calls_another():
    return await plain_async(20) + 1


@app.task
async def plain_async(number):
    await asyncio.sleep(0)
    return 2 * number


@app.task
def identify():
    return threading.current_thread().name


@app.task
def echo(number):
    return number


@app.task
def timer_threads():
    return [thread.name for thread in threading.enumerate() if "Timer" in thread.name]


@app.task
def count(number):
    while not store.get("gate"):
        time.sleep(0.05)
    store.sadd("done", number)
"""
CLIENT = """
import time
from tasks import *

def outcome(result):
    try:
        return result.get(timeout=60)
    except Exception as exc:
        return f"{type(exc).__name__}({exc})"

def wait_until(function):
    end = time.monotonic() + 60
    while not (value := function()):
        assert time.monotonic() < end, "never came"
        time.sleep(0.01)
    return value

def noted(name, *values):
    return wait_until(lambda: (value := store.get(name)) and value.decode() in values and value.decode())

def inspected(method):
    # With `limit`, Celery does not wait for more answers.
    return getattr(app.control.inspect(timeout=60, limit=1), method)().popitem()[1]

def controlled(method, *args):
    return getattr(app.control, method)(*args, reply=True, timeout=60, limit=1)[0].popitem()[1]
"""

# Celery's timer for threads and the pool's own timer must both pass `check`. `main` checks the pool's timer further.
TIMERS = """
import sys, threading, time
from grapeshot import coro
from grapeshot.coro.celery import TaskPool
from celery.utils import timer2
from celery.worker import state


def wait_until(function):
    end = time.monotonic() + 60
    while not function():
        assert time.monotonic() < end, "never came"
        time.sleep(0.005)


def check(kind):
    called, errors = [], []
    timer = kind(max_interval=0.01, on_error=errors.append)
    if kind is TaskPool.Timer:
        timer.call_after(0, called.append, ("before it begins",))
        timer.begin()
        wait_until(lambda: called)
        called.clear()

    now = time.monotonic()
    for number in (3, 1, 2):
        timer.call_at(now + number * 0.02, called.append, (number,))
    assert [scheduled.entry.args for scheduled in timer.schedule.queue] == [(1,), (2,), (3,)], timer.schedule.queue
    wait_until(lambda: len(called) == 3)
    assert called == [1, 2, 3], called
    assert len(timer) == 0 and timer

    called.clear()
    cancelled = [timer.call_after(0.01, called.append, ("cancelled",)) for _ in range(3)]
    cancelled[0].cancel()
    timer.cancel(cancelled[1])
    coro.threads.run(timer.cancel, cancelled[2])
    coro.threads.run(timer.call_after, 0.02, called.append, ("from a real thread",))
    wait_until(lambda: called)
    assert called == ["from a real thread"], called

    called.clear()
    timer.call_after(0, lambda: 1 / 0)
    repeated = timer.call_repeatedly(0.01, called.append, ("again",))
    wait_until(lambda: len(called) == 3)
    timer.cancel(repeated)
    assert [type(error) for error in errors] == [ZeroDivisionError], errors

    timer.call_after(3600, called.append, ("cleared",))
    timer.clear()
    assert len(timer) == 0
    timer.call_after(3600, called.append, ("never",))
    timer.stop()
    assert set(called) == {"again"}, called


def main():
    for kind in (timer2.Timer, TaskPool.Timer):
        check(kind)
    # The second entry is due before the first one, and runs on time. Celery's timer for threads would sleep for an hour
    # (`max_interval`) before it noticed the second entry.
    timer = TaskPool.Timer(max_interval=3600)
    timer.begin()
    timer.call_after(3600, print)
    time.sleep(0.01)
    timer.call_after(0.01, sys.exit, (3,))
    wait_until(lambda: state.should_stop == 3)


coro.run(coro.call_blocking, main)
"""


class Application:
    """The tasks, in a directory of their own; the environment of their worker and their clients; and their results."""

    def __init__(self, folder: Path, broker: str, results: str) -> None:
        (folder / "tasks.py").write_text(TASKS, encoding="utf-8")
        self.folder = folder
        # What the tasks have noted. The tests read it here and not through a client, because a client is a process that
        # takes a second to start.
        self.store = redis.Redis.from_url(results, decode_responses=True)
        self.env = {"BROKER": broker, "RESULTS": results, "C_FORCE_ROOT": "1", "CELERY_CUSTOM_WORKER_POOL": POOL}

    def worker(self, *options: str, **env: str) -> Process:
        """Start a worker, and wait until it is ready."""
        process = Process(
            *("-W", "ignore", "-m", "celery", "-A", "tasks", "worker", "-P", "custom", "-l", "info"),
            *("--without-mingle", "--without-gossip", *options),
            env=self.env | env,
            cwd=self.folder,
        )
        process.wait_line("ready.")
        return process

    def client(self, code: str) -> list[str]:
        """Run a script that uses the tasks; return the lines that it prints."""
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", CLIENT + code],
            cwd=self.folder,
            env=os.environ | self.env,
            capture_output=True,
            text=True,
            timeout=2 * PROCESS_CAP_S,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout.splitlines()


@pytest.fixture
def application(redis_server: RedisAddress, tmp_path: Path) -> Iterator[Application]:
    package("celery")
    url = f"redis://{HOST}:{redis_server.port}"
    application = Application(tmp_path, f"{url}/5", f"{url}/6")
    with redis.Redis.from_url(f"{url}/5") as broker, application.store as store:
        broker.flushdb()
        store.flushdb()
        yield application


def test_tasks(application: Application) -> None:
    """Forty blocking tasks run at the same time in one thread, and then forty `async def` tasks run at the same time.
    Further tasks check time limits, retries and results. The warm shutdown at the end waits for a running task, but not
    for a task that has a countdown of an hour.
    """
    with application.worker("-c", "40") as worker:
        lines = application.client("""
threads = {outcome(result) for result in [together.delay("together", 40) for _ in range(40)]}
print(len(threads))
print({outcome(result) for result in [async_together.delay("async", 40) for _ in range(40)]})
tasks = [soft, async_soft, async_soft_uncaught, hard, stubborn, exits, calls_another, nested]
for result in [task.delay() for task in tasks]:
    print(outcome(result))
print(outcome(again.delay("again")))
later = identify.apply_async(countdown=3600)
print(outcome(identify.apply_async(countdown=0.1)).startswith("celery-"), outcome(timer_threads.delay()))
print([task["request"]["id"] == later.id for task in inspected("scheduled")])
nap.delay("nap"), noted("nap", "begun", "ended")
""")
        assert lines == [
            "1",
            "{True}",
            "tidied up",
            "tidied up",
            "SoftTimeLimitExceeded(SoftTimeLimitExceeded(0.2,))",
            "TimeLimitExceeded(TimeLimitExceeded(0.3,))",
            "twice",
            "WorkerLostError(SystemExit(3))",
            "41",
            lines[9],
            "3",
            "True []",
            "[True]",
        ]
        assert int(lines[9]) == worker.process.pid
        worker.process.send_signal(signal.SIGTERM)
        assert worker.finish() == 0
        assert application.store.get("nap") == "ended"


def test_timers() -> None:
    package("celery")
    subprocess.run([sys.executable, "-W", "ignore", "-c", TIMERS], timeout=2 * PROCESS_CAP_S, check=True)


def test_prefetch_limit(application: Application) -> None:
    """A worker that may have only one unacknowledged message gets the next one as soon as a task has begun.

    Without `task_acks_late`, a message is acknowledged when its task begins.
    """
    with application.worker("-c", "1", "--prefetch-multiplier", "1"):
        lines = application.client("print({outcome(result) for result in [echo.delay(n) for n in range(100)]})")
    assert lines == [str(set(range(100)))]


def test_remote_control(application: Application) -> None:
    with application.worker("-c", "2", "--max-tasks-per-child", "3") as worker:
        lines = application.client("""
running = [wait.delay(f"running {number}") for number in range(2)]
for number in range(2):
    noted(f"running {number}", "begun")
queued = wait.delay("queued")
wait_until(lambda: any(task["id"] == queued.id for task in inspected("reserved")))
print(len(inspected("active")), inspected("stats")["pool"]["coros"])
queued.revoke()
running[0].revoke(terminate=True)
print(outcome(running[0]), outcome(queued), noted("running 0", "Interrupted"), store.get("queued"))
running[1].revoke(terminate=True, signal="SIGUSR1")
print(noted("running 1", "SoftTimeLimitExceeded"))
print(controlled("pool_grow", 3), inspected("stats")["pool"]["max-concurrency"])
print(outcome(together.delay("five", 1)) and len({outcome(r) for r in [together.delay("5", 5) for _ in range(5)]}))
print(controlled("pool_shrink", 4), inspected("stats")["pool"]["max-concurrency"])
print("error" in controlled("pool_shrink", 2))
names = [outcome(identify.delay()) for _ in range(10)]
print(max(names.count(name) for name in names))
app.control.shutdown()
""")
        assert lines == [
            "2 2",
            "TaskRevokedError(terminated) TaskRevokedError(revoked) Interrupted None",
            "SoftTimeLimitExceeded",
            "{'ok': 'pool will grow'} 5",
            "1",
            "{'ok': 'pool will shrink'} 1",
            "True",
            "3",
        ]
        assert worker.finish() == 0


def test_shutdown(application: Application) -> None:
    """A soft shutdown waits for the running tasks for a limited time, and a cold one does not wait. Other tasks stay
    queued. The exit code is 1 if Ctrl-C has ended the worker, and otherwise 0.
    """
    store = application.store
    with application.worker("-c", "1") as worker:
        application.client('wait.delay("first"), wait.delay("second"); noted("first", "begun")')
        worker.process.send_signal(signal.SIGINT)
        worker.wait_line("Warm shutdown")  # by now, another handler is set for the next SIGINT
        worker.process.send_signal(signal.SIGINT)
        assert worker.finish() == 1
    assert (store.get("first"), store.get("second")) == ("Interrupted", None)
    with application.worker("-c", "3", SOFT="2") as worker:  # it also begins "second", which stayed queued
        application.client("""
nap.delay("nap"), wait.delay("third")
noted("nap", "begun", "ended"), noted("third", "begun")
""")
        worker.process.send_signal(signal.SIGQUIT)
        worker.wait_line("Initiating Soft Shutdown")
        assert worker.finish() == 0
    assert [store.get(name) for name in ("second", "third", "nap")] == ["Interrupted", "Interrupted", "ended"]


def lose_nothing(application: Application, **env: str) -> None:
    """Kill a worker while it has tasks, and let another worker run all tasks. A task is acknowledged when it ends."""
    application.env["LATE"] = "1"
    with application.worker("-c", "50") as worker:
        # Each task that begins waits at the gate, so the worker takes no more than a hundred tasks: 50 run, and 50 are
        # reserved. The worker must not be killed while it is looking for old messages in Redis: it would leave a lock
        # behind, and no worker could look for old messages in the next five minutes. When the worker answers
        # `inspected`, it is not looking for them.
        application.client("""
with app.producer_pool.acquire(block=True) as producer:
    for number in range(1000):
        count.apply_async((number,), producer=producer)
wait_until(lambda: len(inspected("active")) == 50 and len(inspected("reserved")) == 50)
""")
        worker.process.send_signal(signal.SIGKILL)
    application.store.set("gate", 1)
    with application.worker("-c", "50", **env) as worker:
        application.client('wait_until(lambda: store.scard("done") == 1000); app.control.shutdown()')
        assert worker.finish() == 0


def test_a_killed_worker_loses_nothing_in_redis(application: Application) -> None:
    options = {"visibility_timeout": 1, "unacked_restore_interval": 0.5, "unacked_restore_throttle": 1}
    lose_nothing(application, OPTIONS=repr(options))


def test_a_killed_worker_loses_nothing_in_rabbitmq(application: Application, certificates: Certificates) -> None:
    with RabbitMQ(certificates) as broker:
        application.env["BROKER"] = f"amqp://guest:guest@{HOST}:{broker.port}//"
        lose_nothing(application)
