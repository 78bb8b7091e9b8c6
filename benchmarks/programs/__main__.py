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
    "`grapeshot` runs the same programs as the other columns. gevent's servers run with `grapeshot.gevent.Loop`; the "
    "other columns run them with libev and libuv. An echo server of eventlet runs on eventlet's asyncio hub with "
    "grapeshot's loop; the other columns run it on that hub with asyncio's loop, on that hub with uvloop, and on "
    "eventlet's epoll hub. A FastAPI application under uvicorn runs with `coro.patch(to_thread=True)`; the other "
    "columns run it on uvloop with real threads, at most 40 of them (anyio's default) or at most 1,000. A Django "
    "project under uvicorn also runs with `coro.patch(to_thread=True)`; the other column runs it on uvloop with a "
    "thread for each request. A Celery worker uses the pool of `grapeshot.coro.celery`; the other columns use Celery's "
    "own pools. The load, Celery's client, Redis and PostgreSQL run on one core, and the measured program on the other."
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
