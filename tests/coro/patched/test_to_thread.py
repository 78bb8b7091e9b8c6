"""The part ``to_thread`` of ``coro.patch()``: the same programs with real threads and with coros."""

from __future__ import annotations

import pytest
from support import coro_is_available, run_script

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")

HEAD = """
import sys
is_patched = IS_PATCHED
if is_patched:
    from grapeshot import coro
    coro.patch(to_thread=True)
import asyncio, contextvars, functools, threading, time, warnings, zlib, grapeshot
var = contextvars.ContextVar("var", default=0)

def is_coro():
    try:
        return is_patched and coro.current() is not None
    except coro.YieldFromMain:
        return False

def check_place():
    assert is_coro() == is_patched, "the function runs in the wrong place"
"""


def check(code):
    """Run the script with threads and with coros, and check that it prints the same."""
    outputs = [
        run_script(None, f"{HEAD.replace('IS_PATCHED', repr(is_patched))}\n{code}") for is_patched in (False, True)
    ]
    assert outputs[0] == outputs[1]
    assert outputs[0]


def test_asyncio():
    check(
        """
errors = []

def work(number, *, add=0):
    check_place()
    time.sleep(0.01)
    try:
        asyncio.get_running_loop()
    except RuntimeError as exc:
        errors.append(str(exc))
    before = var.get()
    var.set(1)
    return number + add, before

def fail():
    raise LookupError("nothing")

async def inner():
    await asyncio.sleep(0.01)
    return "inner"

async def leaves_a_function():
    asyncio.create_task(asyncio.to_thread(late, 0.1))
    while not begun.is_set():
        await asyncio.sleep(0.001)

begun, may_end = threading.Event(), threading.Event()

def late(timeout):
    begun.set()
    may_end.wait(timeout)
    print("late")

async def main():
    var.set(5)
    print(await asyncio.gather(*(asyncio.to_thread(work, number, add=1) for number in range(20))), var.get(), errors)
    try:
        await asyncio.to_thread(fail)
    except LookupError as exc:
        print(repr(exc))
    print(await asyncio.to_thread(asyncio.run, inner()))
    await asyncio.to_thread(asyncio.run, leaves_a_function())
    print("asyncio.run has waited for it")
    print(len(await asyncio.to_thread(zlib.compress, b"x" * 1000)))
    # Cancelling ends the wait, not the function.
    begun.clear()
    task = asyncio.create_task(asyncio.to_thread(late, 10))
    while not begun.is_set():
        await asyncio.sleep(0.001)
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        print("cancelled")
    print(threading.active_count() > 0)
    may_end.set()

grapeshot.run(main())
print("the end")
"""
    )


def test_many_wait_at_once():
    """300 functions wait for each other. A pool of real threads has fewer workers, so there they would wait forever."""
    pytest.importorskip("anyio")
    run_script(
        None,
        HEAD.replace("IS_PATCHED", "True")
        + """
import anyio
barrier = threading.Barrier(300)

executor = coro.CoroPoolExecutor()

async def in_executor(function):
    await asyncio.get_running_loop().run_in_executor(executor, function)

async def main():
    async with anyio.create_task_group() as group:
        for call in (asyncio.to_thread, anyio.to_thread.run_sync, in_executor):
            for _ in range(100):
                group.start_soon(call, barrier.wait)

grapeshot.run(main())
""",
    )


def test_functions_of_other_loops_get_threads():
    pytest.importorskip("anyio")
    pytest.importorskip("asgiref")
    run_script(
        None,
        HEAD.replace("IS_PATCHED", "True")
        + """
from anyio import to_thread
from asgiref.sync import sync_to_async

async def main():
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for call in (asyncio.to_thread, to_thread.run_sync, lambda f: sync_to_async(f)(),
                     lambda f: sync_to_async(f, thread_sensitive=False)()):
            assert not await call(lambda: is_coro())
    assert [each.category for each in warned] == [coro.PatchWarning]
    assert "no effect on asyncio.unix_events._UnixSelectorEventLoop" in str(warned[0].message)
    assert warned[0].filename == "<string>"

asyncio.Runner(loop_factory=asyncio.SelectorEventLoop).run(main())
""",
    )


def test_anyio():
    pytest.importorskip("anyio")
    check(
        """
import anyio
from anyio import from_thread, to_thread, CapacityLimiter

running, most = [], []
pair = threading.Barrier(2)

def work(number):
    check_place()
    return number, var.get()

def in_pairs(number):
    check_place()
    running.append(number)
    pair.wait(10)  # until two run at once
    most.append(len(running))
    pair.wait(10)
    running.remove(number)

async def double(number):
    await anyio.sleep(0.01)
    return 2 * number

def with_loop(number):
    return from_thread.run(double, number), from_thread.run_sync(lambda: asyncio.get_running_loop() is not None)

def stop():
    raise StopIteration

def checks(abandoned, begun, cancelled, ended):
    begun.set()
    cancelled.wait(10)
    try:
        from_thread.check_cancelled()
    except asyncio.CancelledError:
        ended.append(("check_cancelled", abandoned))
        raise
    ended.append("not cancelled")

async def call(function, *args, **kwargs):
    try:
        print(await to_thread.run_sync(function, *args, **kwargs))
    except BaseException as exc:
        print(type(exc).__name__, exc)
        raise

async def main():
    var.set(3)
    await call(work, 1)
    limiter = CapacityLimiter(2)
    async with anyio.create_task_group() as group:
        for number in range(10):
            group.start_soon(functools.partial(to_thread.run_sync, in_pairs, number, limiter=limiter))
    print(max(most), limiter.borrowed_tokens)
    await call(with_loop, 4)
    try:
        await to_thread.run_sync(stop)
    except RuntimeError as exc:
        print(exc)
    for abandoned in (False, True):
        begun, cancelled, ended = threading.Event(), threading.Event(), []
        async with anyio.create_task_group() as group:
            group.start_soon(functools.partial(
                to_thread.run_sync, checks, abandoned, begun, cancelled, ended, abandon_on_cancel=abandoned))
            while not begun.is_set():
                await anyio.sleep(0.001)
            group.cancel_scope.cancel()
            cancelled.set()
        while not ended:
            await anyio.sleep(0.001)
        print(ended, group.cancel_scope.cancelled_caught)
    async with await anyio.open_file(__file__ if "__file__" in globals() else "/etc/hostname") as file:
        print(len(await file.read()) > 0)

anyio.run(main, backend_options={"loop_factory": grapeshot.new_event_loop})
"""
    )


def test_asgiref():
    pytest.importorskip("asgiref")
    check(
        """
from asgiref.sync import ThreadSensitiveContext, async_to_sync, sync_to_async

local = threading.local()
running = []

def work(number):
    check_place()
    assert not running  # thread-sensitive functions run one after the other
    running.append(number)
    time.sleep(0.01)
    running.remove(number)
    local.count = getattr(local, "count", 0) + 1
    return number, local.count, var.get()

def parallel(number):
    check_place()
    time.sleep(0.01)
    return number

async def double(number):
    await asyncio.sleep(0.01)
    return 2 * number

def outer(number):
    return async_to_sync(double)(number), async_to_sync(sync_to_async(work))(number)

async def main():
    var.set(4)
    print(await asyncio.gather(*(sync_to_async(work)(number) for number in range(5))))
    print(await asyncio.gather(*(sync_to_async(parallel, thread_sensitive=False)(number) for number in range(50))))
    print(await sync_to_async(outer)(7))
    async with ThreadSensitiveContext():
        print([await sync_to_async(work)(number) for number in range(3)])
    try:
        await sync_to_async(int)("x")
    except ValueError as exc:
        print(exc)

grapeshot.run(main())
print(async_to_sync(sync_to_async(lambda: "without a loop"))())
"""
    )


def test_fastapi():
    """Endpoints, dependencies and background tasks that are plain functions."""
    pytest.importorskip("fastapi")
    pytest.importorskip("httpx")
    check(
        """
import httpx
from fastapi import BackgroundTasks, Depends, FastAPI, HTTPException
from fastapi.responses import FileResponse

app, order = FastAPI(), []

def session():
    check_place()
    order.append("open")
    try:
        yield "session"
    finally:
        time.sleep(0.01)
        order.append("close")

@app.get("/items/{number}")
def item(number: int, tasks: BackgroundTasks, session: str = Depends(session)):
    check_place()
    time.sleep(0.01)
    if number == 13:
        raise HTTPException(404, "no such item")
    tasks.add_task(order.append, "background")
    return {"number": number, "session": session}

@app.get("/file")
def file():
    return FileResponse("/etc/hostname")

async def main():
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        for path in ("/items/1", "/items/13", "/items/x", "/file"):
            reply = await client.get(path)
            print(reply.status_code, reply.text)
        replies = await asyncio.gather(*(client.get(f"/items/{number}") for number in range(20, 40)))
        print([reply.json()["number"] for reply in replies])
    print(sorted(order))

grapeshot.run(main())
"""
    )


def test_django():
    """A view that is a plain function, and the ORM in an async view."""
    pytest.importorskip("django")
    check(
        """
import tempfile, django
from django.conf import settings

database = tempfile.NamedTemporaryFile(suffix=".sqlite3")
settings.configure(
    ALLOWED_HOSTS=["*"], ROOT_URLCONF=__name__,
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": database.name}},
    INSTALLED_APPS=["django.contrib.contenttypes", "django.contrib.auth"],
)
django.setup()
from django.contrib.auth.models import Group
from django.core.management import call_command
from django.http import HttpResponse, JsonResponse
from django.test import AsyncClient
from django.urls import path

def plain(request):
    check_place()
    time.sleep(0.01)
    return HttpResponse(f"plain {Group.objects.count()}")

async def with_orm(request):
    await Group.objects.acreate(name=request.GET["name"])
    return JsonResponse({"names": [group.name async for group in Group.objects.order_by("name")]})

urlpatterns = [path("plain", plain), path("orm", with_orm)]

async def main():
    client = AsyncClient()
    for name in ("a", "b"):
        print((await client.get("/orm", {"name": name})).json())
    print([(await client.get("/plain")).content for _ in range(3)])
    print(await asyncio.gather(*(Group.objects.acount() for _ in range(5))))

call_command("migrate", verbosity=0)
grapeshot.run(main())
"""
    )


def test_anyio_imported_first():
    """Coros must not share anyio's thread-local object."""
    pytest.importorskip("anyio")
    run_script(
        None,
        """
import warnings, anyio._backends._asyncio, anyio.from_thread
from grapeshot import coro
warnings.simplefilter("ignore", coro.PatchWarning)
coro.patch(to_thread=True)
import asyncio, time, anyio.to_thread, grapeshot

async def double(number):
    return 2 * number

def work(number):
    time.sleep(0.01)
    return anyio.from_thread.run(double, number)

async def main():
    calls = (anyio.to_thread.run_sync(work, number) for number in range(10))
    assert await asyncio.gather(*calls) == [2 * number for number in range(10)]

grapeshot.run(main())
""",
    )


def test_asgiref_imported_first():
    """If asgiref was imported before the patch, `sync_to_async` still runs functions in threads, because coros would
    share Django's connections.
    """
    pytest.importorskip("asgiref")
    out = run_script(
        None,
        """
import warnings
from asgiref.sync import sync_to_async
from grapeshot import coro
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    coro.patch(to_thread=True)
print([str(each.message) for each in caught if "asgiref" in str(each.message)][-1][:40])
import grapeshot, threading

async def main():
    print(await sync_to_async(threading.get_native_id)() != threading.get_native_id())

grapeshot.run(main())
""",
    )
    assert out.splitlines() == ["asgiref was imported before coro.patch(t", "True"]


def test_marked_endpoints():
    """Functions that are marked with `coro.threads.in_thread` run in threads, although FastAPI wraps them."""
    pytest.importorskip("fastapi")
    pytest.importorskip("httpx")
    run_script(
        None,
        HEAD.replace("IS_PATCHED", "True")
        + """
import httpx
from fastapi import Depends, FastAPI

app = FastAPI()

@coro.threads.in_thread
def plain():
    return is_coro()

@coro.threads.in_thread
def with_cleanup():
    yield is_coro()

@app.get("/")
@coro.threads.in_thread
def endpoint(plain: bool = Depends(plain), cleanup: bool = Depends(with_cleanup)):
    return [is_coro(), plain, cleanup]

async def main():
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        assert (await client.get("/")).json() == [False, False, False]

grapeshot.run(main())
""",
    )


def test_django_settings_may_be_imported_first():
    """`patch()` looks at the script's global name `settings`, but does not read attributes of the object.

    `django.conf.settings` is a lazy object: reading its attributes fails before the settings are configured.
    """
    pytest.importorskip("django")
    run_script(None, "from django.conf import settings\nfrom grapeshot import coro\ncoro.patch()")


def test_anyio_is_patched_behind_another_finder():
    """A finder that stands before grapeshot's finder loads anyio's modules.

    pytest has such a finder: it stands before all others, and loads anyio because anyio has a pytest plugin.
    """
    pytest.importorskip("anyio")
    check(
        """
import importlib.machinery

class Finder:
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.PathFinder.find_spec(name, path, target) if name.startswith("anyio.") else None

sys.meta_path.insert(0, Finder())
import anyio.to_thread

async def main():
    await anyio.to_thread.run_sync(check_place)
    return "checked"

print(grapeshot.run(main()))
"""
    )


def test_a_portal_that_a_function_starts_has_a_loop_of_its_own():
    pytest.importorskip("anyio")
    check(
        """
import anyio.from_thread, anyio.to_thread

async def add(a, b):
    await anyio.sleep(0)
    return a + b

async def main():
    manager = anyio.from_thread.start_blocking_portal()
    portal = await anyio.to_thread.run_sync(manager.__enter__)
    try:
        print(await portal.call_async(add, 1, 2))
        print(await portal.call_async(asyncio.get_running_loop) is not asyncio.get_running_loop())
    finally:
        await anyio.to_thread.run_sync(manager.__exit__, None, None, None)

grapeshot.run(main())
"""
    )


def test_threads_of_tasks_stay_threads():
    """A thread that a task starts is a real thread if the only coros of the loop are executor workers, idle or busy."""
    check(
        """
async def use_executor():
    if is_patched:
        with coro.CoroPoolExecutor() as executor:
            await asyncio.get_running_loop().run_in_executor(executor, check_place)

def start_and_join():
    ran = []
    thread = threading.Thread(target=lambda: ran.append(is_coro()))
    thread.start()
    thread.join()
    print(ran)

async def main():
    start_and_join()
    await use_executor()
    start_and_join()
    await asyncio.to_thread(check_place)
    start_and_join()
    waiting = asyncio.create_task(asyncio.to_thread(time.sleep, 0.05))
    await asyncio.sleep(0.01)
    start_and_join()
    await waiting

grapeshot.run(main())
"""
    )
