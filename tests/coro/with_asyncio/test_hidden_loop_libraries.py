"""Django's ORM and asgiref, which look for a running loop, in coros that hide the loop. The control is a thread."""

from __future__ import annotations

import asyncio
import contextvars
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from support import coro_is_available

import grapeshot
from tests.coro.with_asyncio.blocking_code import in_thread

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import coro

variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)


def in_coro(fn):
    """Run a function in a coro that hides the loop."""
    return grapeshot.run(coro.run_blocking(fn))


@pytest.fixture(params=[in_thread, in_coro])
def run(request):
    return request.param


@pytest.fixture(autouse=True)
def _no_idle_thread() -> Iterator[None]:
    """End the thread that asgiref would otherwise keep for its calls until the process ends."""
    yield
    if (sync := sys.modules.get("asgiref.sync")) is not None:
        sync.SyncToAsync.single_thread_executor.shutdown()
        sync.SyncToAsync.single_thread_executor = ThreadPoolExecutor(max_workers=1)


# ---- asgiref ---------------------------------------------------------------------------------------------------


def test_async_to_sync_and_back(run):
    sync = pytest.importorskip("asgiref.sync")

    async def asynchronous(value):
        await asyncio.sleep(0.001)
        variable.set(variable.get() + 1)
        thread = await sync.sync_to_async(threading.get_ident)()  # thread-sensitive: it runs in the caller's thread
        other = await sync.sync_to_async(threading.get_ident, thread_sensitive=False)()
        return value, thread == caller, other == caller, await sync.sync_to_async(blocking)()

    async def fail():
        raise LookupError

    def blocking():
        return sync.async_to_sync(innermost)()

    async def innermost():
        await asyncio.sleep(0)
        return "innermost"

    def work():
        nonlocal caller
        caller = threading.get_ident()
        result = sync.async_to_sync(asynchronous)(5)
        with pytest.raises(LookupError):
            sync.async_to_sync(fail)()
        return result, variable.get()

    caller = None
    assert run(work) == ((5, True, False, "innermost"), 1)


def test_sync_to_async_in_a_run(run):
    sync = pytest.importorskip("asgiref.sync")

    async def main():
        async def asynchronous():
            return asyncio.get_running_loop()

        first = await sync.sync_to_async(sync.async_to_sync(asynchronous))()
        second = await sync.sync_to_async(sync.async_to_sync(asynchronous), thread_sensitive=False)()
        return first is second is asyncio.get_running_loop()

    assert run(lambda: asyncio.run(main()))


def test_async_to_sync_is_refused_where_the_loop_is_seen():
    sync = pytest.importorskip("asgiref.sync")

    async def asynchronous():
        return 5

    def work():
        with pytest.raises(RuntimeError, match="same thread as an async event loop"):
            sync.async_to_sync(asynchronous)()
        return coro.call_blocking(sync.async_to_sync(asynchronous))

    assert coro.run(work) == 5


# ---- Django ----------------------------------------------------------------------------------------------------


def test_async_unsafe(run, monkeypatch):
    pytest.importorskip("django")
    from django.core.exceptions import SynchronousOnlyOperation
    from django.utils.asyncio import async_unsafe

    monkeypatch.delenv("DJANGO_ALLOW_ASYNC_UNSAFE", raising=False)
    unsafe = async_unsafe(lambda: "fine")
    assert run(unsafe) == "fine"

    async def main():
        with pytest.raises(SynchronousOnlyOperation):
            unsafe()

    run(lambda: asyncio.run(main()))
    if run is in_coro:
        with pytest.raises(SynchronousOnlyOperation):
            coro.run(unsafe)  # this coro shows the loop


ORM = """
import asyncio, sys, threading
import django
from django.conf import settings
settings.configure(
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": sys.argv[1]}},
    INSTALLED_APPS=[], DEFAULT_AUTO_FIELD="django.db.models.AutoField", USE_TZ=True,
)
django.setup()
from django.db import connection, models, transaction

class Item(models.Model):
    name = models.CharField(max_length=20)
    class Meta:
        app_label = "items"

async def count():
    return await Item.objects.acount(), [item.name async for item in Item.objects.order_by("name")]

def work():
    with connection.schema_editor() as editor:
        editor.create_model(Item)
    with transaction.atomic():
        Item.objects.create(name="a")
        Item.objects.bulk_create([Item(name="b"), Item(name="c")])
    assert [item.name for item in Item.objects.filter(name__gt="a").order_by("name")] == ["b", "c"]
    print(Item.objects.count(), asyncio.run(count()))
    connection.close()

if sys.argv[2] == "coro":
    import grapeshot
    from grapeshot import coro
    grapeshot.run(coro.run_blocking(work))
else:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
"""


@pytest.mark.parametrize("place", ["thread", "coro"])
def test_the_orm_on_sqlite(place, tmp_path):
    pytest.importorskip("django")
    environment = {name: value for name, value in os.environ.items() if name != "DJANGO_ALLOW_ASYNC_UNSAFE"}
    done = subprocess.run(
        [sys.executable, "-c", ORM, str(tmp_path / "items.sqlite"), place],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=environment,
    )
    assert (done.stdout, done.returncode) == ("3 (3, ['a', 'b', 'c'])\n", 0), done.stderr
