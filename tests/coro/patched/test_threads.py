"""`coro.patch()`: threads, thread locals, queues and sleep of unmodified code. Each script runs in its own process."""

from __future__ import annotations

import textwrap

import pytest
from support import coro_is_available, run_script

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")

HEAD = "from grapeshot import coro\ncoro.patch()\nimport threading, time, queue, _thread, sys, gc\n"


def run(code):
    return run_script(None, HEAD + textwrap.dedent(code)).splitlines()


def test_threads_are_coros_that_overlap():
    assert run(
        """
        real = set()
        get_real = coro.get_original("_thread", "get_ident")
        order = []
        together = threading.Barrier(101)  # passed when all threads and the main one wait in it
        def work(number):
            real.add(get_real())
            for step in range(2):
                time.sleep(0.001)
                order.append((step, number))
                together.wait()
        def main():
            threads = [threading.Thread(target=work, args=(number,), name=f"T{number}") for number in range(100)]
            for thread in threads:
                thread.start()
            assert len({thread.ident for thread in threads}) == 100
            assert all(thread.is_alive() for thread in threads)
            assert threading.active_count() >= 101
            for step in range(2):
                together.wait()
            for thread in threads:
                thread.join()
            assert not any(thread.is_alive() for thread in threads)
        coro.run(main)
        print(len(real), len(order), {step for step, _ in order[:100]}, threading.active_count())
        """
    ) == ["1 200 {0} 1"]


def test_current_thread_and_ident():
    assert run(
        """
        def work():
            me = threading.current_thread()
            print(me.name, me.ident == threading.get_ident(), me is threading.main_thread())
            assert threading._active[me.ident] is me
        def main():
            thread = threading.Thread(target=work, name="worker")
            thread.start()
            thread.join(10)
            print(thread.is_alive(), thread.ident in threading._active)
        coro.run(main)
        print(threading.current_thread() is threading.main_thread())
        """
    ) == ["worker True False", "False False", "True"]


def test_local_of_each_coro_and_thread():
    assert run(
        """
        class Mine(threading.local):
            kind = "class"
            def __init__(self, first):
                self.number = first
            @property
            def double(self):
                return self.number * 2
        data = Mine(7)
        plain = threading.local()
        plain.x = "main"
        def work(number):
            assert data.number == 7 and data.double == 14 and data.kind == "class"
            assert not hasattr(plain, "x")
            data.number = number
            plain.x = number
            time.sleep(0.001)
            assert (data.number, plain.x, data.__dict__) == (number, number, {"number": number})
            del data.number
            try:
                del data.number
            except AttributeError as exc:
                assert "number" in str(exc)
            try:
                data.double = 3
            except AttributeError:
                pass
            else:
                raise AssertionError
        def main():
            threads = [threading.Thread(target=work, args=(number,)) for number in range(20)]
            threads += [coro.threads.Thread(target=work, args=(99,))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        coro.run(main)
        print(plain.x, data.number)
        try:
            threading.local(1)
        except TypeError as exc:
            print(exc)
        """
    ) == ["main 7", "Initialization arguments are not supported"]


def test_local_of_a_coro_that_has_ended_is_freed():
    assert run(
        """
        import weakref
        class Value: pass
        data = threading.local()
        values = []
        def work():
            data.value = Value()
            values.append(weakref.ref(data.value))
        async def main():
            import asyncio
            await coro.spawn(work)
            for _ in range(3):
                await asyncio.sleep(0)
            gc.collect()
            print(values[0]())
        import grapeshot
        grapeshot.run(main())
        """
    ) == ["None"]


def test_real_threads_and_coros_wait_for_each_other():
    """Real threads and coros share an event, a barrier, a semaphore and queues."""
    assert run(
        """
        results, got = [], []
        bounded, simple = queue.Queue(2), queue.SimpleQueue()
        event, barrier = threading.Event(), threading.Barrier(4)
        semaphore = threading.BoundedSemaphore(1)
        def produce():
            for number in range(100):
                bounded.put(number)
                simple.put(number)
            barrier.wait()
            event.wait()
            with semaphore:
                results.append("end")
        def consume():
            for number in range(100):
                got.append(bounded.get())
                simple.get()
            barrier.wait()
            event.wait()
            with semaphore:
                time.sleep(0.001)
                results.append("end")
        def main():
            threads = [coro.threads.Thread(target=produce), threading.Thread(target=consume)]
            threads += [threading.Thread(target=produce), coro.threads.Thread(target=consume)]
            for thread in threads:
                thread.start()
            time.sleep(0.01)
            event.set()
            for thread in threads:
                thread.join()
        coro.run(main)
        print(results, sorted(got) == sorted([*range(100)] * 2), bounded.qsize(), simple.qsize())
        """
    ) == ["['end', 'end', 'end', 'end'] True 0 0"]


def test_where_no_coro_runs_everything_is_as_before():
    assert run(
        """
        get_real = coro.get_original("_thread", "get_ident")
        seen = []
        def work():
            seen.append(threading.get_ident() == get_real())
            seen.append(threading.get_ident() != threading.main_thread().ident)
            time.sleep(0.001)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        _thread.start_new_thread(lambda: seen.append("low"), ())
        while "low" not in seen:
            time.sleep(0.001)
        print(seen, thread.is_alive(), threading.get_ident() == get_real())
        """
    ) == ["[True, True, 'low'] False True"]


def test_task_starts_a_thread():
    """The thread is a coro of the task's loop, so it cannot run before the task awaits something. Therefore `start`
    does not wait until the thread runs, and `join` raises an error.
    """
    assert run(
        """
        import asyncio, grapeshot
        def work():
            time.sleep(0.001)
            print("worked", threading.current_thread().name)
        async def main():
            keeper = coro.spawn(time.sleep, 5)
            await asyncio.sleep(0)
            thread = threading.Thread(target=work, name="T")
            thread.start()
            print(thread.is_alive(), thread.ident > 0)
            try:
                thread.join()
            except RuntimeError as exc:
                print("coro of its own loop" in str(exc))
            await coro.run_sync(thread.join)
            print(thread.is_alive())
            keeper.cancel()
        grapeshot.run(main())
        """
    ) == ["True True", "True", "worked T", "False"]


@pytest.mark.parametrize("head", ["", HEAD], ids=["plain", "patched"])
def test_asyncio_in_threads_of_a_program_with_a_loop(head):
    """A thread sees no running loop, and can run loops of its own beside the program's loop."""
    code = """
        import asyncio, sys, threading

        async def answer(number):
            await asyncio.sleep(0.01)
            return number

        def work(number):
            try:
                asyncio.get_running_loop()
            except RuntimeError:
                answers[number] = asyncio.run(answer(number))

        answers = {}

        def program():
            threads = [threading.Thread(target=work, args=(number,)) for number in range(20)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            print(answers == {number: number for number in range(20)})

        coro.run(program) if "grapeshot" in sys.modules else program()
        """
    assert run_script(None, head + textwrap.dedent(code)).splitlines() == ["True"]


def test_to_thread_and_executors_keep_real_threads():
    assert run(
        """
        import asyncio, grapeshot, concurrent.futures
        get_real = coro.get_original("_thread", "get_ident")
        main_ident = get_real()
        def work(number):
            me = threading.current_thread()
            assert get_real() != main_ident and threading.get_ident() == get_real()
            assert type(me).__name__ == "Thread" and isinstance(me, threading.Thread), me
            time.sleep(0.005)
            return me.name.rpartition("_")[0] or me.name.rpartition("-")[0]
        def blocking(executor):
            # This function runs in a coro, so the loop runs while `result()` waits.
            return {future.result() for future in [executor.submit(work, number) for number in range(8)]}
        async def main(factory=None):
            ticks = 0
            async def tick():
                nonlocal ticks
                while True:
                    ticks += 1
                    await asyncio.sleep(0)
            ticker = asyncio.create_task(tick())
            loop = asyncio.get_running_loop()
            print(set(await asyncio.gather(*(asyncio.to_thread(work, number) for number in range(8)))))
            print(await loop.run_in_executor(None, work, 1))
            with concurrent.futures.ThreadPoolExecutor(3, "pool") as executor:
                print(await loop.run_in_executor(executor, work, 1))
                before = ticks
                print(await coro.run_sync(blocking, executor), ticks > before)
                print(await coro.run_sync(lambda: coro.threads.run(work, 1)))
                await coro.run_sync(executor.shutdown)
            ticker.cancel()
        grapeshot.run(main())
        """
    ) == ["{'asyncio'}", "asyncio", "pool", "{'pool'} True", "asyncio"]


def test_an_executor_works_on_after_the_loop_of_its_workers_has_ended():
    assert run(
        """
        import concurrent.futures
        coro.patch(futures=True)
        executor = concurrent.futures.ThreadPoolExecutor(2)
        def main():
            return [executor.submit(pow, 2, 3).result(10) for _ in range(4)]
        print(coro.run(main), coro.run(main), coro.run(main))
        """
    ) == [str([8] * 4) + " " + str([8] * 4) + " " + str([8] * 4)]


def test_finalizer_of_a_patched_library_takes_a_free_lock():
    """As in urllib3: the collector frees a pool, whose finalizer uses a queue and a lock."""
    assert run(
        """
        class Pool:
            def __init__(self):
                self.queue = queue.LifoQueue(3)
                self.lock = threading.RLock()
                self.me = self
                for _ in range(3):
                    self.queue.put(object())
            def __del__(self):
                with self.lock:
                    while True:
                        try:
                            self.queue.get(block=False)
                        except queue.Empty:
                            break
                closed.append(self.queue.qsize())
        closed = []
        def work():
            for _ in range(10):
                Pool()
                time.sleep(0)
                gc.collect()
        def main():
            threads = [threading.Thread(target=work) for _ in range(5)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        coro.run(main)
        print(len(closed), set(closed))
        """
    ) == ["50 {0}"]


def test_threads_that_run_already_can_be_joined_in_a_coro():
    output = run_script(
        None,
        """
        import threading, time
        stop = threading.Event()
        thread = threading.Thread(target=stop.wait)
        thread.start()
        from grapeshot import coro
        coro.patch()
        def main():
            thread.join(0.001)
            print(thread.is_alive())
            coro.spawn(stop.set)
            thread.join()
            print(thread.is_alive())
        coro.run(main)
        """,
    )
    assert output == "True\nFalse\n"


def test_uncaught_exceptions():
    assert run(
        """
        seen = []
        threading.excepthook = lambda args: seen.append((args.exc_type.__name__, args.thread.name))
        sys.unraisablehook = lambda args: seen.append(args.exc_type.__name__)
        def fail():
            raise KeyError(1)
        def main():
            thread = threading.Thread(target=fail, name="T")
            thread.start()
            thread.join()
            _thread.start_new_thread(fail, ())
            _thread.start_new_thread(sys.exit, ())
            time.sleep(0.001)
        coro.run(main)
        print(seen)
        """
    ) == ["[('KeyError', 'T'), 'KeyError']"]


def test_threads_that_are_left_at_the_end():
    """The loop ends the remaining threads with Shutdown and reports no error. Joining them does not wait forever."""
    assert run(
        """
        def work():
            try:
                time.sleep(60)
            finally:
                print("ends")
        threads = []
        def main():
            threads.append(threading.Thread(target=work, daemon=True))
            threads.append(threading.Thread(target=work))
            for thread in threads:
                thread.start()
        coro.run(main)
        for thread in threads:
            thread.join()
        print([thread.is_alive() for thread in threads], threading.active_count())
        """
    ) == ["ends", "ends", "[False, False] 1"]


def test_timer_and_condition():
    assert run(
        """
        def main():
            done = threading.Event()
            timer = threading.Timer(0.001, done.set)
            timer.start()
            print(done.wait(10))
            timer.join()
            condition = threading.Condition()
            with condition:
                print(condition.wait(0.001))
                print(condition.wait_for(lambda: True))
        coro.run(main)
        """
    ) == ["True", "False", "True"]


def test_an_interrupted_wait_passes_its_notification_on():
    """A coro is notified, but interrupted before it runs again. The other waiting coro gets the notification."""
    assert (
        run(
            """
        def main():
            for lock in (threading.Lock(), threading.RLock()):
                condition, woken = threading.Condition(lock), []
                def wait(name):
                    with condition:
                        try:
                            woken.append((name, condition.wait(10)))
                        except coro.Interrupted:
                            woken.append((name, "interrupted"))
                            assert condition._is_owned()
                first, second = coro.spawn(wait, "first"), coro.spawn(wait, "second")
                coro.yield_slice()
                with condition:
                    condition.notify()
                    first.interrupt()
                first.join()
                second.join()
                print(woken)
        coro.run(main)
        """
        )
        == ["[('first', 'interrupted'), ('second', True)]"] * 2
    )


def test_an_interruption_does_not_keep_a_permit_from_being_given_back():
    """`release` waits for the semaphore's inner lock. If the coro is interrupted during this wait, the exception is
    raised only at the coro's next wait.
    """
    assert (
        run(
            """
        def main():
            for semaphore in (threading.Semaphore(0), threading.BoundedSemaphore(1)):
                if isinstance(semaphore, threading.BoundedSemaphore):
                    semaphore.acquire()
                seen = []
                def give():
                    semaphore.release()
                    seen.append("released")
                    try:
                        coro.sleep_relative(10)
                    except coro.Interrupted:
                        seen.append("interrupted")
                with semaphore._cond:
                    giving = coro.spawn(give)
                    coro.yield_slice()
                    giving.interrupt()
                    coro.yield_slice()
                    assert seen == []
                giving.join()
                print(seen, semaphore.acquire(blocking=False))
        coro.run(main)
        """
        )
        == ["['released', 'interrupted'] True"] * 2
    )


def test_a_notification_while_the_lock_is_taken_again_counts():
    """The time limit of a wait has passed, but the coro is notified before it has the lock again."""
    assert run(
        """
        def main():
            condition, outcomes = threading.Condition(), []
            def wait():
                with condition:
                    outcomes.append(condition.wait(0.001))
            waiting = coro.spawn(wait)
            coro.yield_slice()
            with condition:
                coro.sleep_relative(0.05)
                condition.notify()
            waiting.join()
            print(outcomes)
        coro.run(main)
        """
    ) == ["[True]"]


def test_a_task_may_log_while_a_coro_waits_inside_of_the_handler():
    assert run(
        """
        import asyncio, logging, os
        import grapeshot
        from grapeshot.coro import threads

        reading, writing = os.pipe()
        out = open(writing, "w", buffering=1)
        logger = logging.getLogger("x")
        logger.addHandler(logging.StreamHandler(out))
        logger.setLevel(logging.INFO)
        lines = []

        def log_much():
            for number in range(3):
                logger.info("a%d %s", number, "x" * 60_000)  # the pipe has room for 64 KiB

        def read():
            with open(reading) as file:
                lines.extend(line.split()[0] for line in file)

        async def main():
            first = coro.spawn(log_much)
            await asyncio.sleep(0.01)
            for number in range(3):
                logger.info("b%d", number)
            assert not first.done()
            asyncio.get_running_loop().call_soon(logger.info, "c")
            await asyncio.sleep(0)
            reader = threads.Thread(target=read)
            reader.start()
            await first
            logger.info("d")
            while any(each.name == "logging" for each in coro.get_live_coros()):
                await asyncio.sleep(0.001)
            logger.info("e")
            out.close()
            reader.join()
            print(*lines)

        grapeshot.run(main())
        """
    ) == ["a0 a1 b0 b1 b2 c a2 d e"]


def test_handlers_with_other_locks_and_filters_that_wait():
    """In coros and in threads, filters run without the handler's lock, and that lock may be of any kind."""
    assert run(
        """
        import logging

        class Handler(logging.Handler):
            def createLock(self):
                self.lock = threading.Lock()
            def emit(self, record):
                messages.append((record.msg, self.lock.locked()))
            def filter(self, record):
                assert not self.lock.locked()
                return record.msg != "dropped"

        messages = []
        logger = logging.getLogger("x")
        logger.addHandler(Handler())
        logger.setLevel(logging.INFO)
        def log():
            logger.info("kept")
            logger.info("dropped")
        log()
        coro.run(log)
        thread = coro.threads.Thread(target=log)
        thread.start()
        thread.join()
        print(messages)
        """
    ) == ["[('kept', True), ('kept', True), ('kept', True)]"]


def test_the_records_of_tasks_are_not_lost_when_the_loop_ends():
    assert run(
        """
        import asyncio, logging
        import grapeshot

        messages = []

        class Handler(logging.Handler):
            def emit(self, record):
                if record.msg == "a":
                    coro.sleep_relative(1000)
                messages.append(record.msg)

        logger = logging.getLogger("x")
        logger.addHandler(Handler())
        logger.setLevel(logging.INFO)

        async def main():
            coro.spawn(logger.info, "a")
            await asyncio.sleep(0)
            logger.info("b")
            assert not messages

        grapeshot.run(main())
        print(messages)
        """
    ) == ["['b']"]


def test_sleep():
    assert run(
        """
        outcomes = []
        def check():
            for value in (-1, float("nan"), "1", None, 1e300, 2**70, 0, 0.0, 0.001, True):
                try:
                    outcomes.append(time.sleep(value) if value is not True else None)
                except Exception as exc:
                    outcomes.append(type(exc).__name__)
        check()
        plain, outcomes = outcomes, []
        coro.run(check)
        print(plain == outcomes, plain)
        """
    )[0].startswith("True")


def test_import_that_waits():
    """A coro waits for a module that another coro has partly imported; circular imports do not hang."""
    assert run(
        """
        import tempfile, os
        folder = tempfile.mkdtemp()
        sys.path.insert(0, folder)
        def write(name, text):
            with open(os.path.join(folder, name + ".py"), "w") as file:
                file.write(text)
        write("slow_one", "import time\\ntime.sleep(0.01)\\nvalue = 1\\n")
        write("circle_a", "import time\\ntime.sleep(0.01)\\nimport circle_b\\nvalue = 1\\n")
        write("circle_b", "import time\\ntime.sleep(0.01)\\nimport circle_a\\nvalue = 2\\n")
        def load(name):
            module = __import__(name)
            return module.value
        def main():
            print([co.join() for co in [coro.spawn(load, "slow_one") for _ in range(5)]])
            print([co.join() for co in [coro.spawn(load, name) for name in ("circle_a", "circle_b")]])
        coro.run(main)
        """
    ) == ["[1, 1, 1, 1, 1]", "[1, 2]"]


def test_fork_in_a_thread_that_is_a_coro():
    assert run(
        """
        import os, warnings
        warnings.simplefilter("ignore")
        def work():
            pid = os.fork()
            if not pid:
                me = threading.current_thread()
                good = me is threading.main_thread() and me.name == "forker" and not other.is_alive()
                with threading.Lock(), threading.RLock():
                    os._exit(7 if good else 8)
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        def main():
            global other
            other = threading.Thread(target=time.sleep, args=(0.05,))
            other.start()
            thread = threading.Thread(target=work, name="forker")
            thread.start()
            thread.join()
            other.join()
        coro.run(main)
        """
    ) == ["7"]


def test_coros_that_are_not_threads_have_a_thread_object_until_they_end():
    assert run(
        """
        import asyncio, grapeshot
        idents = []
        def work():
            me = threading.current_thread()
            time.sleep(0)
            idents.append((me is threading.current_thread(), me.ident == threading.get_ident(), me.ident))
        async def main():
            coros = [coro.spawn(work) for _ in range(10)]
            for co in coros:
                await co
            for _ in range(3):
                await asyncio.sleep(0)
            print({each[:2] for each in idents}, len({each[2] for each in idents}), len(threading._active))
        grapeshot.run(main())
        """
    ) == ["{(True, True)} 10 1"]
