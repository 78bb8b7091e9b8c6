"""`coro.signal_handler`: signals that start coros."""

from __future__ import annotations

import asyncio
import contextvars
import os
import signal

import pytest
from support import coro_is_available, in_thread, run_script

import grapeshot

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import coro


def send(signum):
    os.kill(os.getpid(), signum)


def test_each_signal_starts_a_coro():
    variable = contextvars.ContextVar("variable")

    def main():
        numbers = coro.fifo()

        def handler(signum):
            coro.yield_slice()
            numbers.push((signum, coro.current().name, variable.get()))

        variable.set("of the call")
        coro.signal_handler.register(signal.SIGUSR1, handler)
        variable.set("later")
        for _ in range(3):
            send(signal.SIGUSR1)
            assert numbers.pop(timeout=10) == (signal.SIGUSR1, "handler of signal SIGUSR1", "of the call")
        assert coro.signal_handler.unregister(signal.SIGUSR1) is True
        assert coro.signal_handler.unregister(signal.SIGUSR1) is False
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL

    coro.run(main)


def test_a_handler_that_waits_lets_the_next_one_begin():
    def main():
        begun, go_on, ended = coro.semaphore(0), coro.event(), coro.semaphore(0)

        def handler(signum):
            begun.release()
            go_on.wait()
            ended.release()

        coro.signal_handler.register(signal.SIGUSR1, handler)
        for _ in range(2):
            send(signal.SIGUSR1)
            assert begun.acquire(timeout=10)
        coro.signal_handler.unregister(signal.SIGUSR1)
        go_on.set()
        assert ended.acquire(2, timeout=10)

    coro.run(main)


def test_a_later_handler_replaces_the_earlier_one():
    def main():
        told = coro.fifo()
        coro.signal_handler.register(signal.SIGUSR2, lambda signum: told.push("first"))
        coro.signal_handler.register(signal.SIGUSR2, lambda signum: told.push("second"))
        send(signal.SIGUSR2)
        assert told.pop(timeout=10) == "second"
        assert coro.signal_handler.unregister(signal.SIGUSR2)

    coro.run(main)


def test_the_end_of_the_loop_restores_the_default():
    def main():
        coro.signal_handler.register(signal.SIGUSR2, print)
        assert signal.getsignal(signal.SIGUSR2) != signal.SIG_DFL

    coro.run(main)
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL


def test_an_error_of_a_handler_is_reported():
    reports = []

    def handler(signum):
        raise ValueError(signum)

    async def main():
        loop = asyncio.get_running_loop()
        reported = loop.create_future()

        def report(loop, context):
            reports.append(repr(context["exception"]))
            if not reported.done():
                reported.set_result(None)

        loop.set_exception_handler(report)
        coro.signal_handler.register(signal.SIGUSR1, handler)
        send(signal.SIGUSR1)
        async with asyncio.timeout(10):
            await reported
        coro.signal_handler.unregister(signal.SIGUSR1)

    grapeshot.run(main())
    assert reports == [repr(ValueError(int(signal.SIGUSR1)))] or reports == [repr(ValueError(signal.SIGUSR1))]


def test_wrong_arguments():
    async def coroutine_function(signum): ...

    def main():
        for kind, signum, function in (
            (TypeError, signal.SIGUSR1, 5),
            (TypeError, signal.SIGUSR1, coroutine_function),
            (TypeError, "SIGUSR1", print),
            (ValueError, 1000, print),
            (RuntimeError, signal.SIGKILL, print),
        ):
            with pytest.raises(kind):
                coro.signal_handler.register(signum, function)

    coro.run(main)
    with pytest.raises(RuntimeError):
        in_thread(lambda: coro.run(coro.signal_handler.register, signal.SIGUSR1, print))


def test_before_the_loop_runs():
    assert (
        run_script(
            None,
            """
            import os, signal
            from grapeshot import coro
            coro.signal_handler.register(signal.SIGTERM, coro.set_exit)
            coro.spawn(os.kill, os.getpid(), signal.SIGTERM)
            print(int(coro.event_loop()) == signal.SIGTERM)
            """,
        )
        == "True\n"
    )
