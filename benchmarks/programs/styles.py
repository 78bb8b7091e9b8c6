"""The ways to run the programs of this folder. Each way has its own column in the tables of results."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks import _loops

OURS = "grapeshot"
# gevent on its own loops
LIBEV, LIBUV = "gevent+libev", "gevent+libuv"
GEVENT_LOOPS = {OURS: "grapeshot.gevent.Loop", LIBEV: "libev-cext", LIBUV: "libuv-cffi"}
# eventlet's epoll hub, and its asyncio hub on asyncio's loop and on uvloop
EPOLL_HUB, ASYNCIO_HUB, UVLOOP_HUB = "eventlet+epoll", "eventlet+asyncio", "eventlet+uvloop"
EVENTLET_HUBS = {OURS: "asyncio", EPOLL_HUB: "epolls", ASYNCIO_HUB: "asyncio", UVLOOP_HUB: "asyncio"}
# FastAPI on uvloop: with the 40 threads that anyio allows by default, and with a thread for each request
THREADS, MANY_THREADS = "40 threads", "1,000 threads"
# Django on uvloop
REQUEST_THREADS = "a thread per request"
# Celery's own pools. POOLS also contains grapeshot's pool. It maps each pool to a value of Celery's option --pool.
GEVENT_POOL, THREAD_POOL = "pool gevent", "pool threads"
POOLS = {OURS: "custom", GEVENT_POOL: "gevent", THREAD_POOL: "threads"}

ALL = (
    *(OURS, LIBEV, LIBUV, EPOLL_HUB, ASYNCIO_HUB, UVLOOP_HUB),
    *(THREADS, MANY_THREADS, REQUEST_THREADS, GEVENT_POOL, THREAD_POOL),
)
_NEEDED = {
    OURS: "grapeshot.coro",
    LIBEV: "gevent.libev.corecext",
    LIBUV: "gevent.libuv.loop",
    EPOLL_HUB: "eventlet",
    ASYNCIO_HUB: "eventlet",
    UVLOOP_HUB: "eventlet, uvloop",
    THREADS: "uvloop, fastapi",
    MANY_THREADS: "uvloop, fastapi",
    REQUEST_THREADS: "uvloop, django, psycopg",
    GEVENT_POOL: "gevent, celery",
    THREAD_POOL: "celery",
}


def available(names: Iterable[str]) -> tuple[list[str], dict[str, str]]:
    """Return the names that can take part, and why each of the others cannot. The reasons are also printed."""
    return _loops.available(names, lambda name: _loops.why_it_fails(f"import {_NEEDED[name]}"))
