"""How a signal reaches a loop: the wakeup fd inside and outside a run, full buffers, forks, native code."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import sys

import pytest
from support import Script, iterations, run_script, until

needs_fd_directory = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="there is no /proc/self/fd")


@pytest.fixture
def own_fd():
    """Set a wakeup fd, as a program may do before a loop runs. Yield the socket that receives the signal numbers, and
    the wakeup fd.
    """
    read_end, write_end = socket.socketpair()
    read_end.setblocking(False)
    write_end.setblocking(False)
    assert signal.set_wakeup_fd(write_end.fileno()) == -1
    yield read_end, write_end.fileno()
    signal.set_wakeup_fd(-1)
    read_end.close()
    write_end.close()


@pytest.fixture
def usr1():
    """SIGUSR1 with an empty Python handler."""
    previous = signal.signal(signal.SIGUSR1, lambda *_args: None)
    yield signal.SIGUSR1
    signal.signal(signal.SIGUSR1, previous)


@pytest.mark.skip_on(asyncio="its selector is not woken: the script would wait forever")
def test_a_signal_that_another_thread_gets_wakes_the_loop(loop_kind):
    """The kernel may deliver a signal to any thread. If another thread gets it, no system call of the main thread is
    interrupted.
    """
    with Script(
        loop_kind,
        """
        import signal, sys, threading
        loop = new_event_loop()
        def interrupt():
            sys.stdin.readline()
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        thread = threading.Thread(target=interrupt)
        thread.start()
        loop.call_soon(print, "running")
        try:
            loop.run_forever()
        except KeyboardInterrupt:
            print("interrupted")
        thread.join()
        loop.close()
        """,
    ) as script:
        assert script.line() == "running"
        script.wait_blocked()
        script.process.stdin.write("now\n")
        script.process.stdin.flush()
        assert script.finish().split() == ["interrupted"]


@pytest.mark.xfail_on(uvloop="it replaces the descriptor, and removes it after the run")
def test_an_own_wakeup_fd_is_left_alone(new_loop, own_fd, usr1):
    read_end, number = own_fd
    loop = new_loop()
    loop.call_later(0.001, os.kill, os.getpid(), usr1)
    loop.run_until_complete(asyncio.sleep(0.003))
    assert signal.set_wakeup_fd(number) == number
    assert read_end.recv(100) == bytes([usr1])


@pytest.mark.xfail_on(uvloop="it removes the descriptor after the run")
def test_a_wakeup_fd_set_during_a_run_stays(new_loop, usr1):
    read_end, write_end = socket.socketpair()
    write_end.setblocking(False)
    loop = new_loop()

    async def main():
        await asyncio.sleep(0.001)  # so that the loop blocks in a poll
        signal.set_wakeup_fd(write_end.fileno())
        await asyncio.sleep(0.001)
        os.kill(os.getpid(), usr1)

    try:
        loop.run_until_complete(main())
        assert signal.set_wakeup_fd(-1) == write_end.fileno()
        assert read_end.recv(100) == bytes([usr1])
    finally:
        signal.set_wakeup_fd(-1)
        read_end.close()
        write_end.close()


def test_nothing_is_set_between_runs(new_loop):
    loop = new_loop()
    for _ in range(2):
        loop.run_until_complete(asyncio.sleep(0.001))
        assert signal.set_wakeup_fd(-1) == -1

    async def add_and_remove():
        loop.add_signal_handler(signal.SIGUSR1, print)
        await asyncio.sleep(0.001)
        loop.remove_signal_handler(signal.SIGUSR1)

    loop.run_until_complete(add_and_remove())
    assert signal.set_wakeup_fd(-1) == -1


def test_a_timer_that_a_signal_handler_sets_as_the_loop_falls_asleep(loop):
    """The loop calls kill() through ctypes, so no bytecode runs after it. The signal's Python handler therefore runs
    only when the loop checks for signals for the last time before it blocks.
    """

    def handle(*_args):
        loop.call_later(0, loop.stop)

    previous = signal.signal(signal.SIGUSR1, handle)
    try:
        loop.call_soon(ctypes.CDLL(None).kill, os.getpid(), int(signal.SIGUSR1))
        loop.run_forever()
    finally:
        signal.signal(signal.SIGUSR1, previous)


@needs_fd_directory
def test_later_runs_cost_no_descriptors(new_loop):
    loop = new_loop()
    loop.run_until_complete(asyncio.sleep(0.0005))
    first = sorted(os.listdir("/proc/self/fd"))
    for _ in range(5):
        loop.run_until_complete(asyncio.sleep(0.0005))
        assert sorted(os.listdir("/proc/self/fd")) == first


@pytest.mark.skip_on(uvloop="the signal is lost, and its handler stays")
def test_a_signal_between_two_runs_is_handled_in_the_next(new_loop):
    loop = new_loop()
    seen = []
    loop.add_signal_handler(signal.SIGUSR1, seen.append, "handled")
    loop.run_until_complete(asyncio.sleep(0.0005))
    os.kill(os.getpid(), signal.SIGUSR1)
    assert seen == []
    loop.run_until_complete(until(lambda: seen))
    assert seen == ["handled"]
    loop.remove_signal_handler(signal.SIGUSR1)


async def test_a_handler_may_remove_itself(loop):
    seen = []

    def handler():
        seen.append(loop.remove_signal_handler(signal.SIGUSR1))
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    loop.add_signal_handler(signal.SIGUSR1, handler)
    os.kill(os.getpid(), signal.SIGUSR1)
    await until(lambda: seen)
    os.kill(os.getpid(), signal.SIGUSR1)
    await iterations(3)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    assert seen == [True]


async def test_a_handler_that_raises_keeps_the_others(loop, reported):
    seen = []
    loop.add_signal_handler(signal.SIGUSR1, lambda: 1 / 0)
    loop.add_signal_handler(signal.SIGUSR2, seen.append, "second")
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGUSR2)
    await until(lambda: seen and reported)
    os.kill(os.getpid(), signal.SIGUSR1)
    await until(lambda: len(reported) == 2)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        loop.remove_signal_handler(number)


@pytest.mark.parametrize(
    "number",
    sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}, key=int),
    ids=lambda number: str(int(number)),
)
async def test_every_signal_can_be_handled(loop, loop_kind, number):
    if loop_kind == "uvloop" and number == signal.SIGCHLD:
        pytest.skip("uvloop keeps SIGCHLD for itself (#409)")
    before = signal.getsignal(number)
    seen = []
    loop.add_signal_handler(number, seen.append, number)
    try:
        signal.raise_signal(number)
        await until(lambda: seen)
    finally:
        loop.remove_signal_handler(number)
        signal.signal(number, before)
    assert seen == [number]


@pytest.mark.xfail_on(asyncio="a signal that arrives while the buffer is full is lost", uvloop="same as asyncio")
async def test_a_full_buffer_loses_no_kind_of_signal(loop):
    counts = {signal.SIGUSR1: 0, signal.SIGUSR2: 0}

    def count(number):
        counts[number] += 1

    for number in counts:
        loop.add_signal_handler(number, count, number)
    try:
        for _ in range(70_000):
            signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR2)
        await iterations(10)
        assert counts[signal.SIGUSR1] >= 4096
        assert counts[signal.SIGUSR2] == 1
        before = dict(counts)
        signal.raise_signal(signal.SIGUSR2)
        await until(lambda: counts[signal.SIGUSR2] == 2)
        assert counts[signal.SIGUSR1] == before[signal.SIGUSR1]
    finally:
        for number in counts:
            loop.remove_signal_handler(number)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.skip_on(
    when=sys.version_info < (3, 12), asyncio="the child writes into its parent's socket pair", uvloop="same as asyncio"
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_the_signals_of_a_forked_child_are_its_own(loop):
    seen = []
    loop.add_signal_handler(signal.SIGUSR1, seen.append, "the child's signal")
    await asyncio.sleep(0.0005)
    pid = os.fork()
    if pid == 0:
        try:
            signal.signal(signal.SIGUSR1, lambda *_args: None)
            os.kill(os.getpid(), signal.SIGUSR1)
        finally:
            os._exit(0)
    assert os.waitpid(pid, 0) == (pid, 0)
    await iterations(5)
    loop.remove_signal_handler(signal.SIGUSR1)
    assert seen == []


@pytest.mark.xfail_on(uvloop="it checks at the end of the batch")
def test_interrupt_within_a_batch_of_native_callbacks(loop_kind):
    """No bytecode runs between the signal and the end of the batch, so the loop itself has to check for signals."""
    out = run_script(
        loop_kind,
        """
        import ctypes, signal
        loop = new_event_loop()
        seen = []
        loop.call_soon(getattr(ctypes.CDLL(None), "raise"), int(signal.SIGINT))
        for _ in range(10_000):
            loop.call_soon(seen.append, 1)
        try:
            loop.run_forever()
        except KeyboardInterrupt:
            print(len(seen) < 1000)
        loop.close()
        """,
    )
    assert out.strip() == "True"


@pytest.mark.parametrize("entry", ["asyncio.run", "grapeshot.run"])
def test_interrupt_cancels_the_main_task(entry):
    code = f"""
        import asyncio, sys
        import grapeshot
        async def main():
            try:
                print("running", flush=True)
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                print("cancelled", flush=True)
                raise
        grapeshot.install()
        try:
            {entry}(main())
        except KeyboardInterrupt:
            print("interrupted")
    """
    with Script("grapeshot", code) as script:
        assert script.line() == "running"
        script.wait_blocked()
        script.interrupt()
        assert script.finish().split() == ["cancelled", "interrupted"]


def test_a_second_interrupt_ends_a_stubborn_task(loop_kind):
    with Script(
        loop_kind,
        """
        import asyncio, os
        async def main():
            while True:
                try:
                    print("waiting")
                    await asyncio.sleep(1000)
                except asyncio.CancelledError:
                    print("refused")
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            try:
                runner.run(main())
            except KeyboardInterrupt:
                print("interrupted")
                os._exit(0)  # the runner would cancel the task again, and wait for it
        """,
    ) as script:
        assert script.line() == "waiting"
        script.wait_blocked()
        script.interrupt()
        assert script.line() == "refused"
        assert script.line() == "waiting"
        script.wait_blocked()
        script.interrupt()
        assert script.finish().split() == ["interrupted"]


def test_a_terminated_program_ends_by_the_signal(loop_kind):
    """A signal without a handler keeps its default action while the loop runs."""
    with Script(
        loop_kind,
        """
        loop = new_event_loop()
        loop.call_soon(print, "running")
        loop.run_forever()
        """,
    ) as script:
        assert script.line() == "running"
        script.wait_blocked()
        script.process.terminate()
        assert script.process.wait(timeout=30) == -signal.SIGTERM


def test_a_programs_own_sigchld_handler_is_called(loop_kind):
    out = run_script(
        loop_kind,
        """
        import asyncio, os, signal, subprocess, sys
        loop = new_event_loop()
        ended = []
        def on_child(*_args):
            ended.append(os.waitpid(child.pid, os.WNOHANG)[0] == child.pid)
        signal.signal(signal.SIGCHLD, on_child)
        child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
        async def main():
            child.stdin.close()  # the child ends only now, so `child` is set when the handler runs
            while not any(ended):
                await asyncio.sleep(0.001)
        loop.run_until_complete(main())
        child.returncode = 0
        print(any(ended))
        loop.close()
        """,
    )
    assert out.strip() == "True"


# ---------------------------------------------------------------- loops that end in other threads

_ENDS_IN_A_THREAD = """
    import contextlib, gc, os, signal, sys, threading

    def pipes():
        made = [os.pipe() for _ in range(30)]
        for ends in made:
            for end in ends:
                os.set_blocking(end, False)
        return made

    def check(made):
        for read_end, write_end in made:
            with contextlib.suppress(BlockingIOError):
                raise SystemExit(f"a signal's number arrived in a pipe of other code: {os.read(read_end, 10)!r}")
            os.close(read_end)
            os.close(write_end)

    def begin():
        loop = new_event_loop()
        loop.add_signal_handler(signal.SIGUSR1, print, "never called")
        loop.call_later(0.001, loop.stop)
        loop.run_forever()
        return loop

    def run(function, *args):
        thread = threading.Thread(target=function, args=args)
        thread.start()
        thread.join()

    def close(loop):
        with contextlib.suppress(ValueError):
            loop.close()  # only the main thread can remove the signal's handler
        del loop
"""


@needs_fd_directory
@pytest.mark.xfail_on(asyncio="the wakeup fd stays set to the number of a closed descriptor")
@pytest.mark.skip_on(uvloop="same as asyncio, if the loop is collected")
@pytest.mark.parametrize("end", ["close", "collect"])
def test_a_loop_that_ends_in_another_thread(loop_kind, end):
    """The wakeup fd must never be the number of a closed descriptor, because another file may get that number."""
    run_script(
        loop_kind,
        _ENDS_IN_A_THREAD
        + f"""
    end = {end!r}
    """
        + """
    def collect(loops):
        loops.clear()
        gc.collect()

    def end_and_signal(loops):
        # The main thread waits in join(), so it runs no bytecode.
        if end == "close":
            close(loops.pop())
        else:
            collect(loops)
        made = pipes()
        # SIGUSR1 would not do: without a GIL, the main thread may be the one that frees the loop. This restores the
        # default action of SIGUSR1, so the signal would end the program.
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR2)
        check(made)

    sys.unraisablehook = lambda args: None  # hides the ValueError that the close() of a collected loop raises
    signal.signal(signal.SIGUSR2, lambda *args: None)
    first = None
    for _ in range(40):
        run(end_and_signal, [begin()])
        made = pipes()
        os.kill(os.getpid(), signal.SIGUSR2)
        check(made)
        assert signal.set_wakeup_fd(-1) == -1
        count = len(os.listdir("/proc/self/fd"))
        first = first or count
        assert count == first, (count, first)
    """,
        flags=(),
    )


@needs_fd_directory
@pytest.mark.xfail_on(uvloop="the handlers of the other loop are not called")
def test_others_keep_their_wakeup_fd_when_a_loop_ends_in_another_thread(loop_kind):
    run_script(
        loop_kind,
        _ENDS_IN_A_THREAD
        + """
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    os.set_blocking(write_end, False)
    loop = begin()
    signal.set_wakeup_fd(write_end)
    run(close, loop)
    del loop
    os.kill(os.getpid(), signal.SIGUSR1)
    assert os.read(read_end, 10) == bytes([signal.SIGUSR1])
    assert signal.set_wakeup_fd(-1) == write_end

    loop = begin()
    other = begin()
    run(close, loop)
    for _ in range(3):
        seen = []
        other.add_signal_handler(signal.SIGUSR1, lambda: (seen.append(1), other.stop()))
        os.kill(os.getpid(), signal.SIGUSR1)
        late = other.call_later(30, other.stop)
        other.run_forever()
        late.cancel()
        assert seen == [1], seen
    other.close()
    assert signal.set_wakeup_fd(-1) == -1
    """,
        flags=(),
    )


def test_a_loop_that_ends_in_another_thread_while_the_interpreter_exits(loop_kind):
    """An exit handler closes the loop in another thread. grapeshot then asks the main thread, with Py_AddPendingCall,
    to close the loop's signal pipe. The main thread may exit before it does this.
    """
    run_script(
        loop_kind,
        _ENDS_IN_A_THREAD
        + """
    import atexit
    loop = begin()
    atexit.register(run, close, loop)
    """,
        flags=(),
    )
