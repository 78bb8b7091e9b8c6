"""A coro that yields in an `except` block keeps the exception that it handles. Tracebacks and frames are right, even
for suspended coros.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import sys
import threading
import traceback

import pytest
from support import coro_is_available, run_script, together

import grapeshot

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import coro

COUNT = 10


def handled():
    exc = sys.exc_info()[1]
    assert sys.exception() is exc
    return exc


# ---------------------------------------------------------------- the exception that is being handled


def test_nested_handlers_of_coros_that_take_turns():
    def handle(number):
        try:
            raise KeyError(number)
        except KeyError as outer:
            coro.yield_slice()
            assert handled() is outer
            try:
                coro.yield_slice()
                raise ValueError(number)
            except ValueError as inner:
                coro.yield_slice()
                assert handled() is inner
                assert inner.__context__ is outer
            coro.yield_slice()
            assert handled() is outer
        assert handled() is None
        coro.yield_slice()
        assert handled() is None
        return number

    assert together(handle) == list(range(COUNT))


def test_bare_raise_after_a_yield():
    def reraise(number):
        try:
            try:
                raise ValueError(number)
            except ValueError:
                coro.yield_slice()
                raise
        except ValueError as exc:
            return exc.args

    assert together(reraise) == [(number,) for number in range(COUNT)]


def test_contexts_are_chained_across_yields():
    def chain(number):
        try:
            try:
                raise KeyError(number)
            except KeyError:
                coro.yield_slice()
                try:
                    coro.yield_slice()
                    raise ValueError(number)
                finally:
                    coro.yield_slice()
        except ValueError as exc:
            coro.yield_slice()
            context = exc.__context__
            return type(context), context.args, context.__context__

    assert together(chain) == [(KeyError, (number,), None) for number in range(COUNT)]


def test_an_exception_that_another_coro_handles_does_not_become_the_context():
    def work(number):
        coro.yield_slice()
        try:
            raise ValueError(number)
        except ValueError as exc:
            coro.yield_slice()
            return exc.__context__

    def main():
        try:
            raise LookupError
        except LookupError:
            threads = [coro.spawn(work, number) for number in range(COUNT)]
            results = [thread.join() for thread in threads]
            assert isinstance(handled(), LookupError)
            return results

    assert coro.run(main) == [None] * COUNT


def test_a_new_coro_handles_no_exception():
    async def main():
        try:
            raise LookupError
        except LookupError:
            assert await coro.spawn(handled) is None
            assert isinstance(handled(), LookupError)

    grapeshot.run(main())


def test_finally_blocks_and_returns():
    def work(number):
        log = []
        for step in range(3):
            try:
                coro.yield_slice()
                if step == 0:
                    continue
                if step == 2:
                    return log
            finally:
                coro.yield_slice()
                log.append((number, step))
        return None

    assert together(work) == [[(number, step) for step in range(3)] for number in range(COUNT)]


def test_with_statements_and_exit_stacks():
    def work(number):
        log = []

        @contextlib.contextmanager
        def block(name):
            coro.yield_slice()
            try:
                yield name
            except ValueError as exc:
                coro.yield_slice()
                log.append((name, exc.args))
                raise KeyError(name) from exc
            finally:
                coro.yield_slice()
                assert isinstance(handled(), (ValueError, KeyError))

        with pytest.raises(KeyError) as caught, contextlib.ExitStack() as stack:
            stack.callback(log.append, "last")
            stack.callback(coro.yield_slice)
            with contextlib.suppress(KeyError):
                with block("inner"):
                    coro.yield_slice()
                    raise ValueError(number)
            stack.enter_context(block("outer"))
            coro.yield_slice()
            raise ValueError(-number)
        assert handled() is None
        assert isinstance(caught.value.__cause__, ValueError)
        return log

    assert together(work) == [[("inner", (n,)), ("outer", (-n,)), "last"] for n in range(COUNT)]


def test_exception_groups():
    def work(number):
        seen = []
        try:
            raise ExceptionGroup("some", [ValueError(number), ExceptionGroup("more", [KeyError(number), OSError()])])
        except* ValueError as group:
            coro.yield_slice()
            assert handled() is group
            seen += [exc.args for exc in group.exceptions]
        except* KeyError as group:
            coro.yield_slice()
            seen += [exc.args for exc in group.exceptions[0].exceptions]
        except* OSError:
            coro.yield_slice()
            with contextlib.suppress(KeyError):
                raise KeyError from None
            coro.yield_slice()
            assert isinstance(handled(), ExceptionGroup)
        assert handled() is None
        return seen

    assert together(work) == [[(number,), (number,)] for number in range(COUNT)]


def test_handlers_of_the_loop_and_of_coros():
    async def main():
        async def task(number):
            try:
                raise KeyError(number)
            except KeyError as exc:
                for _ in range(5):
                    await asyncio.sleep(0)
                    assert handled() is exc

        def thread(number):
            try:
                raise ValueError(number)
            except ValueError as exc:
                for _ in range(5):
                    coro.yield_slice()
                    assert handled() is exc

        await asyncio.gather(*(task(n) for n in range(5)), *(coro.spawn(thread, n) for n in range(5)))

    grapeshot.run(main())


# ---------------------------------------------------------------- tracebacks


def raise_inside(number):
    coro.yield_slice()
    raise ValueError(number)


def call_raise_inside(number):
    coro.yield_slice()
    raise_inside(number)


def names_of(exc):
    return [entry.name for entry in traceback.extract_tb(exc.__traceback__)]


def test_the_traceback_of_an_error():
    async def main():
        thread = coro.spawn(call_raise_inside, 5)
        with pytest.raises(ValueError, match="5") as caught:
            await thread
        assert names_of(caught.value)[-2:] == ["call_raise_inside", "raise_inside"]
        assert "raise ValueError(number)" in "".join(traceback.format_exception(caught.value))

    grapeshot.run(main())


def test_the_traceback_goes_on_through_join():
    def main():
        threads = [coro.spawn(call_raise_inside, number) for number in range(3)]
        for number, thread in enumerate(threads):
            with pytest.raises(ValueError, match=str(number)) as caught:
                thread.join()
            # First the frames of main and join, then the frames of the coro.
            assert names_of(caught.value)[:2] == ["main", "join"]
            assert names_of(caught.value)[-2:] == ["call_raise_inside", "raise_inside"]
            locals_there = caught.value.__traceback__
            while locals_there.tb_next is not None:
                locals_there = locals_there.tb_next
            assert locals_there.tb_frame.f_locals == {"number": number}

    coro.run(main)


def test_the_traceback_through_a_c_function():
    def key(value):
        coro.yield_slice()
        raise LookupError(value)

    def main(number):
        with pytest.raises(LookupError) as caught:
            sorted([number], key=key)
        return names_of(caught.value)

    assert together(main) == [["main", "key"]] * COUNT


# ---------------------------------------------------------------- frames


def functions(frame):
    names = []
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names


def test_the_frames_of_the_running_coro():
    def innermost():
        coro.yield_slice()
        assert functions(sys._getframe()) == ["innermost", "<lambda>", "outermost"]
        assert sys._getframe(2).f_code.co_name == "outermost"
        with pytest.raises(ValueError, match="not deep enough"):
            sys._getframe(3)
        assert [entry.function for entry in inspect.stack()] == ["innermost", "<lambda>", "outermost"]
        assert [entry.name for entry in traceback.extract_stack()] == ["outermost", "<lambda>", "innermost"]
        current = sys._current_frames()[threading.get_ident()]
        assert functions(current) == ["innermost", "<lambda>", "outermost"]
        if sys.version_info >= (3, 12):
            assert sys._current_exceptions()[threading.get_ident()] is None

    def outermost(_):
        list(map(lambda _: innermost(), [1, 2]))  # noqa: C417

    together(outermost)


def wait_below(number, depth):
    local = [number, depth]
    if depth:
        return wait_below(number, depth - 1)
    for _ in map(lambda _: coro.wait(), [0]):  # noqa: C417
        pass
    return local


def test_the_frames_of_suspended_coros():
    async def main():
        threads = [coro.spawn(wait_below, number, 3) for number in range(COUNT)]
        await asyncio.sleep(0)
        for _ in range(2):
            for number, thread in enumerate(threads):
                frame = thread.get_frame()
                assert functions(frame) == ["<lambda>"] + ["wait_below"] * 4
                assert [entry.name for entry in traceback.extract_stack(frame)] == functions(frame)[::-1]
                frame = frame.f_back
                assert frame.f_locals["local"] == [number, 0]
                assert frame.f_lineno == wait_below.__code__.co_firstlineno + 4
                assert frame.f_back.f_locals["depth"] == 1
                assert "return wait_below" in "".join(traceback.format_stack(frame.f_back))
                with pytest.raises(RuntimeError, match="executing frame"):
                    frame.clear()
            await asyncio.sleep(0)
        for thread in threads:
            coro.schedule(thread)
        assert [await thread for thread in threads] == [[number, 0] for number in range(COUNT)]

    grapeshot.run(main())


def test_the_stack_of_a_suspended_coro_is_printed():
    async def main():
        threads = [coro.spawn(wait_below, number, 1) for number in range(3)]
        await asyncio.sleep(0)
        for thread in threads:
            frames = traceback.walk_stack(thread.get_frame())
            text = "".join(traceback.StackSummary.extract(frames, capture_locals=True).format())
            assert "coro.wait()" in text
            assert f"number = {threads.index(thread)}" in text
            coro.schedule(thread)
            await thread

    grapeshot.run(main())


def test_frames_are_kept_after_the_end():
    async def main():
        threads = [coro.spawn(wait_below, number, 2) for number in range(COUNT)]
        await asyncio.sleep(0)
        frames = [thread.get_frame() for thread in threads]
        tops = [[*traceback.walk_stack(frame)] for frame in frames[::2]]
        for thread in threads:
            coro.schedule(thread)
        for thread in threads:
            await thread
            assert thread.get_frame() is None
        del threads, thread
        for number, frame in enumerate(frames):
            assert functions(frame)[0] == "<lambda>"
            if number % 2 == 0:
                entries = tops[number // 2]
                assert [entry.f_code.co_name for entry, _ in entries] == ["<lambda>", *["wait_below"] * 3]
                assert entries[1][0].f_locals["number"] == number
                entries[1][0].clear()
        del frames, tops

    grapeshot.run(main())


def test_frames_of_an_error_outlive_its_coro():
    def fail(number):
        secret = [number] * 3
        coro.yield_slice()
        raise ValueError(len(secret))

    def main():
        threads = [coro.spawn(fail, number) for number in range(COUNT)]
        errors = []
        for thread in threads:
            with pytest.raises(ValueError, match="3") as caught:
                thread.join()
            errors.append(caught.value)
        del threads, thread
        for _ in range(20):
            coro.spawn(wait_below, 0, 0).shutdown()
            coro.yield_slice()
        for number, exc in enumerate(errors):
            frame = [*traceback.walk_tb(exc.__traceback__)][-1][0]
            assert frame.f_locals["secret"] == [number] * 3

    coro.run(main)


def test_locals_of_a_suspended_frame_are_written():
    def wait_for_it():
        value = "before"
        coro.wait()
        return value

    async def main():
        threads = [coro.spawn(wait_for_it) for _ in range(3)]
        await asyncio.sleep(0)
        for number, thread in enumerate(threads):
            frame = thread.get_frame()
            if sys.version_info >= (3, 13):  # PEP 667
                frame.f_locals["value"] = number
            del frame
            coro.schedule(thread)
        return [await thread for thread in threads]

    assert grapeshot.run(main()) == ([0, 1, 2] if sys.version_info >= (3, 13) else ["before"] * 3)


def test_faulthandler_shows_the_running_coro():
    """A direct call of faulthandler writes the coro's frames. So does faulthandler's watchdog thread, without the GIL,
    while a coro is stuck.
    """
    out = run_script(
        None,
        """
        import faulthandler, os, sys, tempfile
        from grapeshot import coro

        def innermost(file):
            coro.yield_slice()
            faulthandler.dump_traceback(file, all_threads=True)

        def outermost(file):
            for _ in map(lambda _: innermost(file), [0]):
                pass

        def stuck(file):
            coro.yield_slice()
            faulthandler.dump_traceback_later(0.001, file=file)
            while b"in stuck" not in os.pread(file.fileno(), 10000, 0):
                pass
            # The watchdog thread reads the frames without the GIL. This call waits until that thread has finished.
            faulthandler.cancel_dump_traceback_later()

        with tempfile.TemporaryFile("w+") as file, tempfile.TemporaryFile("w+") as late:

            def main():
                for co in [coro.spawn(coro.yield_slice) for _ in range(10)] + [coro.spawn(outermost, file)]:
                    co.join()
                coro.spawn(stuck, late).join()

            coro.run(main)
            file.seek(0)
            print([line.split()[-1] for line in file if "File" in line])
        """,
        flags=("-W", "error", "-X", "faulthandler"),
    )
    assert out.strip() == "['innermost', '<lambda>', 'outermost']"
