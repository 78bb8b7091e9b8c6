"""add_signal_handler and Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

import pytest
from support import Script, gil_is_enabled, run_script, until


async def test_handler_runs_in_the_loop(loop):
    seen = []
    loop.add_signal_handler(signal.SIGUSR1, lambda *args: seen.append((args, asyncio.get_running_loop())), 1, "two")
    os.kill(os.getpid(), signal.SIGUSR1)
    await until(lambda: seen)
    assert seen == [((1, "two"), loop)]
    assert loop.remove_signal_handler(signal.SIGUSR1) is True
    assert loop.remove_signal_handler(signal.SIGUSR1) is False
    seen.clear()


async def test_a_signal_wakes_a_sleeping_loop(loop):
    future = loop.create_future()
    loop.add_signal_handler(signal.SIGUSR1, future.set_result, "woken")
    timer = threading.Timer(0.005, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    assert await future == "woken"
    timer.join()
    loop.remove_signal_handler(signal.SIGUSR1)


async def test_several_signals(loop):
    seen = []
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        loop.add_signal_handler(number, seen.append, number)
    for number in (signal.SIGUSR2, signal.SIGUSR1):
        os.kill(os.getpid(), number)
    await until(lambda: len(seen) == 2)
    assert sorted(seen) == [signal.SIGUSR1, signal.SIGUSR2]
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        loop.remove_signal_handler(number)


async def test_replaced_handler(loop):
    seen = []
    loop.add_signal_handler(signal.SIGUSR1, seen.append, "first")
    loop.add_signal_handler(signal.SIGUSR1, seen.append, "second")
    os.kill(os.getpid(), signal.SIGUSR1)
    await until(lambda: seen)
    assert seen == ["second"]
    loop.remove_signal_handler(signal.SIGUSR1)


async def test_removal_restores_the_default(loop):
    loop.add_signal_handler(signal.SIGINT, print)
    assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    loop.remove_signal_handler(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    loop.add_signal_handler(signal.SIGUSR1, print)
    loop.remove_signal_handler(signal.SIGUSR1)
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


@pytest.mark.xfail_on(uvloop="it has a wakeup fd only while it runs")
def test_the_wakeup_fd_is_removed_with_the_last_handler(new_loop):
    loop = new_loop()
    loop.add_signal_handler(signal.SIGUSR1, print)
    loop.add_signal_handler(signal.SIGUSR2, print)
    loop.remove_signal_handler(signal.SIGUSR1)
    wakeup_fd = signal.set_wakeup_fd(-1)
    assert wakeup_fd != -1
    signal.set_wakeup_fd(wakeup_fd, warn_on_full_buffer=False)
    loop.remove_signal_handler(signal.SIGUSR2)
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.skip_on(uvloop="its handler stays and breaks later tests")
def test_close_removes_the_handlers(new_loop):
    loop = new_loop()
    loop.add_signal_handler(signal.SIGUSR1, print)
    loop.close()
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    previous = signal.set_wakeup_fd(-1)
    assert previous == -1


def test_no_wakeup_fd_is_left_after_a_run(new_loop):
    """A loop without signal handlers leaves no wakeup fd set after its run."""
    loop = new_loop()
    loop.run_until_complete(asyncio.sleep(0))
    previous = signal.set_wakeup_fd(-1)
    assert previous == -1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_signals_that_cannot_be_caught(loop, number):
    with pytest.raises(RuntimeError, match="cannot be caught"):
        loop.add_signal_handler(number, print)


async def test_wrong_numbers(loop):
    with pytest.raises(TypeError, match="sig must be an int"):
        loop.add_signal_handler("SIGINT", print)
    for number in (0, -1, 10_000):
        with pytest.raises(ValueError, match=r"invalid signal number|out of range"):
            loop.add_signal_handler(number, print)
        with pytest.raises(ValueError, match=r"invalid signal number|out of range"):
            loop.remove_signal_handler(number)


async def test_coroutines_are_refused(loop):
    async def handler():
        raise AssertionError("never runs")

    with pytest.raises(TypeError, match="coroutines cannot be used"):
        loop.add_signal_handler(signal.SIGUSR1, handler)


def test_only_in_the_main_thread(loop):
    errors = []

    def work():
        try:
            loop.add_signal_handler(signal.SIGUSR1, print)
        except (RuntimeError, ValueError) as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(errors) == 1


async def test_a_failing_handler_is_reported(loop, reported):
    loop.add_signal_handler(signal.SIGUSR1, lambda: 1 / 0)
    os.kill(os.getpid(), signal.SIGUSR1)
    await until(lambda: reported)
    assert isinstance(reported.exceptions[0], ZeroDivisionError)
    loop.remove_signal_handler(signal.SIGUSR1)


@pytest.mark.xfail_on(uvloop="#409: RuntimeError")
async def test_sigchld_may_be_handled(loop):
    seen = []
    loop.add_signal_handler(signal.SIGCHLD, seen.append, "child")
    os.kill(os.getpid(), signal.SIGCHLD)
    await until(lambda: seen)
    loop.remove_signal_handler(signal.SIGCHLD)


async def test_a_burst_of_signals(loop):
    seen = []
    loop.add_signal_handler(signal.SIGUSR1, seen.append, 1)
    for _ in range(200):
        os.kill(os.getpid(), signal.SIGUSR1)
    await until(lambda: len(seen) >= 200)
    assert len(seen) == 200
    loop.remove_signal_handler(signal.SIGUSR1)


@pytest.mark.parametrize(
    "busy",
    [
        "loop.call_soon(again)",
        "loop.call_later(0, again)",
        "loop.call_soon_threadsafe(again)",
        # Keep the tasks, so that none is freed while the loop runs. In Python versions whose asyncio has a WeakSet of
        # tasks, freeing a task runs Python code of this set, and CPython drops a KeyboardInterrupt raised in that code.
        "kept.append(loop.create_task(asyncio.sleep(0))); kept[-1].add_done_callback(lambda _: again())",
    ],
)
def test_interrupt_in_a_tight_loop(loop_kind, busy):
    with Script(
        loop_kind,
        f"""
        import asyncio
        kept = []
        loop = new_event_loop()
        def again():
            {busy}
        loop.call_soon(again)
        loop.call_soon(print, "running")
        try:
            loop.run_forever()
        except KeyboardInterrupt:
            print("interrupted", loop.is_running())
        loop.stop()
        loop.run_forever()
        for task in asyncio.all_tasks(loop):
            task._log_destroy_pending = False  # the loop was stopped before this task ended
        loop.close()
        """,
    ) as script:
        assert script.line() == "running"
        script.interrupt()
        assert script.finish().strip() == "interrupted False"


@pytest.mark.parametrize("work", ["pass", "loop.call_later(1000, print)", "loop.add_reader(pair[0], print)"])
def test_interrupt_during_a_blocking_poll(loop_kind, work):
    with Script(
        loop_kind,
        f"""
        import socket
        pair = socket.socketpair()
        loop = new_event_loop()
        {work}
        loop.call_soon(print, "running")
        try:
            loop.run_forever()
        except KeyboardInterrupt:
            print("interrupted", loop.is_running())
        loop.close()
        for sock in pair:
            sock.close()
        """,
    ) as script:
        assert script.line() == "running"
        script.wait_blocked()
        script.interrupt()
        assert script.finish().strip() == "interrupted False"


def test_the_python_handler_runs_during_a_blocking_poll(loop_kind):
    """A handler that was set with signal.signal runs. It does not raise, so the loop continues."""
    with Script(
        loop_kind,
        """
        import signal
        loop = new_event_loop()
        def handler(number, frame):
            print("handled")
            loop.call_soon_threadsafe(loop.stop)
        signal.signal(signal.SIGINT, handler)
        loop.call_soon(print, "running")
        loop.run_forever()
        loop.close()
        """,
    ) as script:
        assert script.line() == "running"
        script.wait_blocked()
        script.interrupt()
        assert script.finish().strip() == "handled"


@pytest.mark.skip_on(uvloop="it sometimes raises 'stopped before Future completed'")
@pytest.mark.skipif(not gil_is_enabled(), reason="without a GIL the loop may continue before the signal arrives")
def test_an_interrupt_loses_no_event_of_the_same_poll(loop_kind):
    """The signal arrives after the poll returned an event and while the loop waits for the GIL."""
    out = run_script(
        loop_kind,
        """
        import asyncio, ctypes, signal, socket, sys, threading

        ours, other = socket.socketpair()
        ours.setblocking(False)
        loop = new_event_loop()
        send = ctypes.PyDLL(None).send  # keeps the GIL
        main = threading.main_thread().ident
        sys.setswitchinterval(60)
        is_waiting = threading.Event()

        def send_and_interrupt():
            is_waiting.wait()
            send(other.fileno(), b"x", 1, 0)
            for _ in range(10**6):
                pass
            signal.pthread_kill(main, signal.SIGINT)

        async def receive():
            asyncio.get_running_loop().call_soon(is_waiting.set)
            return await loop.sock_recv(ours, 10)

        thread = threading.Thread(target=send_and_interrupt)
        thread.start()
        task = loop.create_task(receive())
        try:
            loop.run_until_complete(task)
        except KeyboardInterrupt:
            print("interrupted")
        thread.join()
        print(loop.run_until_complete(asyncio.wait_for(task, 10)))
        loop.close()
        ours.close()
        other.close()
        """,
    )
    assert out.splitlines()[-1] == "b'x'"


def test_runner_turns_an_interrupt_into_a_cancel(loop_kind):
    with Script(
        loop_kind,
        """
        import asyncio
        async def main():
            try:
                print("running")
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                print("cancelled")
                raise
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            try:
                runner.run(main())
            except KeyboardInterrupt:
                print("interrupted")
        """,
    ) as script:
        assert script.line() == "running"
        script.wait_blocked()
        script.interrupt()
        assert script.finish().split() == ["cancelled", "interrupted"]


def test_interrupt_handler_of_the_loop(loop_kind):
    with Script(
        loop_kind,
        """
        import signal
        loop = new_event_loop()
        loop.add_signal_handler(signal.SIGINT, loop.stop)
        loop.call_soon(print, "running")
        loop.run_forever()
        print("stopped")
        loop.close()
        """,
    ) as script:
        assert script.line() == "running"
        script.wait_blocked()
        script.interrupt()
        assert script.finish().strip() == "stopped"


def test_a_child_makes_its_own_loop_after_fork(loop_kind):
    out = run_script(
        loop_kind,
        """
        import asyncio, os, sys
        loop = new_event_loop()
        loop.run_until_complete(asyncio.sleep(0.001))
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            child = new_event_loop()
            async def main():
                await asyncio.sleep(0.001)
                return await child.run_in_executor(None, pow, 2, 5)
            print("child", child.run_until_complete(main()))
            child.run_until_complete(child.shutdown_default_executor())
            child.close()
            sys.stdout.flush()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        print("parent", loop.run_until_complete(asyncio.sleep(0.001, "works")))
        loop.close()
        """,
        flags=("-W", "ignore"),
    )
    assert out.split("\n")[:2] == ["child 32", "parent works"]


def test_fork_inside_a_running_loop(loop_kind):
    out = run_script(
        loop_kind,
        """
        import asyncio, os, sys
        loop = new_event_loop()
        def child():
            asyncio.events._set_running_loop(None)  # from 3.12 on, asyncio does this itself
            own = new_event_loop()
            print("child", own.run_until_complete(asyncio.sleep(0.001, "works")))
            own.close()
            sys.stdout.flush()
            os._exit(0)
        async def main():
            await asyncio.sleep(0)
            sys.stdout.flush()
            pid = os.fork()
            if pid == 0:
                child()
            await asyncio.sleep(0.002)
            assert os.waitpid(pid, 0)[1] == 0
            print("parent works")
        loop.run_until_complete(main())
        loop.close()
        """,
        flags=("-W", "ignore"),
    )
    assert out.split("\n")[:2] == ["child works", "parent works"]


def test_multiprocessing_fork(loop_kind):
    out = run_script(
        loop_kind,
        """
        import asyncio, multiprocessing
        def work(queue):
            loop = new_event_loop()
            queue.put(loop.run_until_complete(asyncio.sleep(0.001, "from the child")))
            loop.close()
        context = multiprocessing.get_context("fork")
        queue = context.Queue()
        loop = new_event_loop()
        loop.run_until_complete(asyncio.sleep(0))
        process = context.Process(target=work, args=(queue,))
        process.start()
        print(loop.run_until_complete(asyncio.sleep(0, queue.get(timeout=20))))
        process.join()
        loop.close()
        """,
        flags=("-W", "ignore"),
    )
    assert out.strip() == "from the child"
