"""Interrupting coros, timeouts, groups and pools."""

from __future__ import annotations

import asyncio

import pytest
from support import coro_is_available

import grapeshot

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import coro


def test_shutdown_passes_except_exception():
    log = []

    def work():
        try:
            coro.wait()
        except Exception:
            log.append("caught")
        finally:
            log.append("finally")

    def main():
        thread = coro.spawn(work)
        coro.yield_slice()
        thread.shutdown()
        with pytest.raises(coro.Shutdown):
            thread.join()
        assert thread.cancelled()

    coro.run(main)
    assert log == ["finally"]


def test_interrupt_carries_a_value_and_the_coro_goes_on():
    def work():
        with pytest.raises(coro.Interrupted) as caught:
            coro.sleep_relative(60)
        coro.yield_slice()
        return caught.value.value

    def main():
        thread = coro.spawn(work)
        coro.yield_slice()
        thread.interrupt("now")
        return thread.join()

    assert coro.run(main) == "now"


def test_a_coro_that_never_ran_can_be_shut_down():
    ran = []

    def main():
        thread = coro.spawn(ran.append, 1)
        thread.shutdown()
        with pytest.raises(coro.Shutdown):
            thread.join()

    coro.run(main)
    assert ran == []


def test_with_timeout():
    def main():
        assert coro.with_timeout(10, lambda: 5) == 5
        with pytest.raises(coro.TimeoutError):
            coro.with_timeout(0.001, coro.sleep_relative, 60)
        with pytest.raises(TimeoutError):
            coro.with_timeout(0.001, coro.wait)
        coro.sleep_relative(0.002)
        return "alive"

    assert coro.run(main) == "alive"


def test_nested_timeouts_go_to_their_own_handler():
    def main():
        log = []
        with pytest.raises(coro.TimeoutError), coro.timeout(0.001):
            try:
                with coro.timeout(60):
                    coro.sleep_relative(60)
            except coro.TimeoutError:
                log.append("inner")
        with coro.timeout(60):
            with pytest.raises(coro.TimeoutError), coro.timeout(0.001):
                coro.sleep_relative(60)
            log.append("went on")
        return log

    assert coro.run(main) == ["went on"]


def test_join_with_a_timeout():
    def main():
        thread = coro.spawn(coro.wait)
        with pytest.raises(coro.TimeoutError):
            thread.join(0.001)
        coro.schedule(thread, 4)
        return thread.join(10)

    assert coro.run(main) == 4


def test_in_parallel():
    def main():
        assert coro.in_parallel([(max, (1, 2)), (min, (3, 4))]) == [2, 3]
        with pytest.raises(coro.InParallelError) as caught:
            coro.in_parallel([(int, ("1",)), (int, ("x",))])
        first, second = caught.value.result_list
        assert first == (True, 1)
        assert not second[0]
        assert isinstance(second[1], ValueError)

    coro.run(main)


def test_a_group_ends_together():
    log = []

    def fail():
        coro.yield_slice()
        raise KeyError("broken")

    def stay():
        try:
            coro.wait()
        finally:
            log.append("ended")

    def main():
        with coro.Group() as group:
            results = [group.spawn(int, number) for number in "123"]
        assert [thread.result() for thread in results] == [1, 2, 3]
        with pytest.raises(KeyError, match="broken"), coro.Group() as group:
            group.spawn(stay)
            group.spawn(stay)
            group.spawn(fail)
            coro.sleep_relative(60)
        with pytest.raises(LookupError), coro.Group() as group:
            group.spawn(stay)
            coro.yield_slice()
            raise LookupError

    coro.run(main)
    assert log == ["ended"] * 3


def test_a_pool_is_bounded():
    running = []
    most = []

    def work(number):
        running.append(number)
        most.append(len(running))
        coro.yield_slice()
        running.remove(number)
        return number * 2

    def main():
        with coro.Pool(3) as pool:
            assert pool.map(work, range(20)) == [number * 2 for number in range(20)]
            assert list(pool.imap(work, range(5))) == [0, 2, 4, 6, 8]

    coro.run(main)
    assert max(most) == 3


def test_threads():
    import threading

    def main():
        assert coro.threads.run(threading.get_ident) != threading.get_ident()
        with pytest.raises(ZeroDivisionError):
            coro.threads.run(lambda: 1 / 0)

    coro.run(main)


def test_an_exception_that_nobody_sees_is_reported():
    reported = []

    def fail():
        raise ValueError("lost")

    async def main():
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _loop, context: reported.append(str(context["exception"])))
        coro.spawn(fail)
        for _ in range(3):
            await asyncio.sleep(0)

    grapeshot.run(main())
    assert reported == ["lost"]


def test_keyboard_interrupt_leaves_the_loop():
    def main():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        coro.run(main)
    assert coro.get_live_coros() == []
