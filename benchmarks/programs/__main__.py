"""Compare programs for gevent, eventlet, FastAPI, Django and Celery, as they are and on grapeshot: `python -m
benchmarks.programs [CASE ...]`.

Every run is a fresh process, and the ways to run a program take turns (A B C, then C B A, ...).
"""

from __future__ import annotations

import sys

from benchmarks.compare import RESULTS, Suite, main
from benchmarks.programs.cases import CASES, QUICK, Settings
from benchmarks.programs.styles import ALL, available

HOW = (
    "`grapeshot` runs the same programs as the other columns: gevent's servers with `grapeshot.gevent.Loop` instead of "
    "libev or libuv; an echo server of eventlet on eventlet's asyncio hub, with grapeshot's loop instead of asyncio's "
    "or uvloop's, and beside eventlet's epoll hub; a FastAPI application under uvicorn with "
    "`coro.patch(to_thread=True)` instead of threads (on uvloop, with anyio's default of 40, and with 1,000); a "
    "Django project under uvicorn, also with `coro.patch(to_thread=True)`, instead of a thread for each request; and a "
    "Celery worker with the pool of `grapeshot.coro.celery` instead of Celery's own pools. The load and Celery's "
    "client have a core of their own, which they share with Redis and PostgreSQL."
)

SUITE = Suite(
    cases=CASES,
    loops=ALL,
    available=available,
    packages=("grapeshot", "gevent", "eventlet", "fastapi", "anyio", "uvicorn", "uvloop", "celery", "redis"),
    settings=Settings(),
    quick=QUICK,
    committed=RESULTS / "programs.json",
    has_load=True,
    page={"heading": "# Programs for gevent, eventlet, FastAPI, Django and Celery", "how": HOW},
)

if __name__ == "__main__":
    sys.exit(main(suites=(SUITE,), description=__doc__))
