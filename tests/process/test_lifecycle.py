"""A process from connection_made to connection_lost: order of events, exits, signals, waiting, closing."""

from __future__ import annotations

import asyncio
import contextvars
import errno
import os
import signal
import subprocess
import sys
import threading

import pytest
from process.children import BLOCKED, CAT, Events, has_children, sh
from support import iterations, run_script, until, wait_until

PIPE = subprocess.PIPE


def running(**kwargs):
    return asyncio.create_subprocess_exec(*BLOCKED, **kwargs)


# ---------------------------------------------------------------- the transport


@pytest.mark.skip_on(uvloop="set_protocol has no effect, and the test hangs after the failure")
async def test_the_interface(loop):
    transport, protocol = await loop.subprocess_exec(Events, *CAT, stderr=None)
    assert isinstance(transport, asyncio.SubprocessTransport)
    assert isinstance(transport.get_pipe_transport(0), asyncio.WriteTransport)
    assert isinstance(transport.get_pipe_transport(1), asyncio.ReadTransport)
    assert transport.get_pipe_transport(2) is None
    assert transport.get_pipe_transport(7) is None
    assert transport.get_pid() > 0
    assert transport.get_returncode() is None
    assert transport.get_protocol() is protocol
    assert not transport.is_closing()
    other = Events()
    transport.set_protocol(other)
    assert transport.get_protocol() is other
    pid = transport.get_pid()
    transport.get_pipe_transport(0).close()
    await other.wait_lost()
    assert protocol.events == ["made"]
    assert transport.get_returncode() == 0
    assert transport.get_pid() == pid
    transport.close()
    assert transport.is_closing()


@pytest.mark.xfail_on(uvloop="it has no Popen object")
async def test_the_popen_object(loop):
    transport, protocol = await loop.subprocess_exec(Events, *sh("exit 3"))
    process = transport.get_extra_info("subprocess")
    assert isinstance(process, subprocess.Popen)
    assert process.pid == transport.get_pid()
    assert transport.get_extra_info("nothing", "default") == "default"
    await protocol.wait_lost()
    assert process.returncode == 3
    transport.close()


@pytest.mark.skip_on(uvloop="its repr differs, and the test hangs after the failure")
async def test_the_repr_names_the_state_and_the_pipes(loop):
    transport, protocol = await loop.subprocess_exec(Events, *CAT, stderr=None)
    text = repr(transport)
    assert f"SubprocessTransport pid={transport.get_pid()} running stdin=<" in text
    assert " stdout=<" in text
    assert "stderr" not in text
    transport.close()
    await protocol.wait_lost()
    assert f"SubprocessTransport closed pid={transport.get_pid()} returncode={-signal.SIGKILL}" in repr(transport)


@pytest.mark.skip_on(uvloop="connection_lost may come before the end of a pipe")
async def test_the_order_of_events(loop):
    transport, protocol = await loop.subprocess_exec(Events, *sh("echo out; echo err >&2"))
    await protocol.wait_lost()
    transport.close()
    events = protocol.events
    assert sorted(map(str, events)) == sorted(
        map(
            str,
            ["made", ("data", 1), ("data", 2), ("pipe lost", 0), ("pipe lost", 1), ("pipe lost", 2), "exited", "lost"],
        )
    )
    assert events[0] == "made"
    assert events[-1] == "lost"
    for fd in (1, 2):
        assert events.index(("data", fd)) < events.index(("pipe lost", fd))
    assert protocol.data == {1: b"out\n", 2: b"err\n"}


@pytest.mark.skip_on(uvloop="pipe_connection_lost may come after connection_lost")
async def test_a_child_that_ends_before_its_pipes_are_connected(loop):
    for _ in range(20):
        transport, protocol = await loop.subprocess_exec(Events, *sh("exit 3"))
        assert protocol.events[0] == "made"
        await protocol.wait_lost()
        assert protocol.events[-1] == "lost"
        assert transport.get_returncode() == 3
        transport.close()


@pytest.mark.skip_on(when=sys.version_info < (3, 12), asyncio="process_exited comes from a waiting thread")
async def test_callbacks_run_in_the_context_of_the_start(loop):
    variable = contextvars.ContextVar("variable", default="outside")
    seen = []

    class Protocol(asyncio.SubprocessProtocol):
        def connection_made(self, transport):
            seen.append(("made", variable.get()))

        def pipe_data_received(self, fd, data):
            seen.append(("data", variable.get()))

        def process_exited(self):
            seen.append(("exited", variable.get()))

        def connection_lost(self, exc):
            seen.append(("lost", variable.get()))

    async def start():
        variable.set("inside")
        return await loop.subprocess_exec(Protocol, *sh("echo x"), stdin=None, stderr=None)

    transport, _ = await loop.create_task(start())
    await until(lambda: len(seen) == 4)
    transport.close()
    assert sorted(seen) == [("data", "inside"), ("exited", "inside"), ("lost", "inside"), ("made", "inside")]


async def test_exceptions_of_a_protocol_are_reported(loop, reported):
    class Failing(Events):
        def pipe_data_received(self, fd, data):
            raise KeyError("data")

        def process_exited(self):
            super().process_exited()
            raise IndexError("exited")

    transport, protocol = await loop.subprocess_exec(Failing, *sh("echo x"), stdin=None, stderr=None)
    await protocol.wait_lost()
    transport.close()
    assert sorted(type(error).__name__ for error in reported.exceptions) == ["IndexError", "KeyError"]
    reported.clear()


# ---------------------------------------------------------------- signals


@pytest.mark.parametrize("how", ["terminate", "kill", "send_signal"])
async def test_signals(loop, how):
    process = await running()
    number = {"terminate": signal.SIGTERM, "kill": signal.SIGKILL, "send_signal": signal.SIGUSR1}[how]
    getattr(process, how)(*([number] if how == "send_signal" else []))
    assert await process.wait() == -number
    assert process.returncode == -number


async def test_a_signal_that_the_child_handles(loop):
    process = await asyncio.create_subprocess_exec(
        *sh("trap 'echo caught; exit 8' USR1; echo ready; while :; do sleep 0.01; done"), stdout=PIPE
    )
    assert await process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGUSR1)
    assert await process.stdout.readline() == b"caught\n"
    assert await process.wait() == 8


async def test_signals_to_an_ended_process(loop):
    transport, protocol = await loop.subprocess_exec(Events, *sh("exit"), stdin=None, stdout=None, stderr=None)
    await protocol.wait_lost()
    for send in (transport.terminate, transport.kill, lambda: transport.send_signal(signal.SIGUSR1)):
        with pytest.raises(ProcessLookupError):
            send()
    transport.close()


@pytest.mark.skip_on(when=sys.version_info < (3, 13), asyncio="older versions may lose the status and return 255")
async def test_signals_race_with_the_end(loop):
    """The signal or the end of the child may come first. In both cases the only possible error is ProcessLookupError,
    and the return code is right.
    """
    for number in range(40):
        process = await asyncio.create_subprocess_exec(*sh("exit 7"))
        for _ in range(number % 4):
            await asyncio.sleep(0)
        try:
            process.terminate()
        except ProcessLookupError:
            pass
        assert await process.wait() in (7, -signal.SIGTERM)


@pytest.mark.skip_on(when=sys.version_info < (3, 14, 7), asyncio="older versions may send such a signal")
async def test_no_signal_is_sent_to_a_process_id_that_is_free_again(loop, monkeypatch):
    """No other code may run between fetching the status and setting `returncode`: it could signal another process."""
    killed = []
    process = await asyncio.create_subprocess_exec(*sh("exit"))
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append((pid, has_children())))
    while process.returncode is None:
        process._transport.send_signal(signal.SIGUSR1)
        await asyncio.sleep(0)
    assert all(was_child for _, was_child in killed)
    await process.wait()


# ---------------------------------------------------------------- waiting


async def test_many_wait(loop):
    process = await running()
    waiting = [loop.create_task(process.wait()) for _ in range(10)]
    waiting[3].cancel()
    await asyncio.sleep(0)
    process.kill()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(results.pop(3), asyncio.CancelledError)
    assert results == [-signal.SIGKILL] * 9
    assert await process.wait() == -signal.SIGKILL


async def test_wait_with_a_timeout(loop):
    process = await running()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(process.wait(), 0.005)
    assert process.returncode is None
    process.kill()
    assert await process.wait() == -signal.SIGKILL


@pytest.mark.skip_on(when=sys.version_info < (3, 14, 7), asyncio="older versions wait for the pipes")
@pytest.mark.skip_on(uvloop="it waits for the pipes")
async def test_wait_does_not_wait_for_a_grandchild_with_the_pipe(loop):
    process = await asyncio.create_subprocess_exec(
        *sh("sleep 3600 & echo $!; exit 6"), stdout=PIPE, start_new_session=True
    )
    grandchild = int(await process.stdout.readline())
    assert await process.wait() == 6
    os.kill(grandchild, signal.SIGKILL)
    assert await process.stdout.read() == b""


@pytest.mark.only_on("asyncio", "grapeshot")
async def test_many_children_at_once(loop):
    async def run(number):
        process = await asyncio.create_subprocess_exec(*sh(f"read line; exit {number % 100}"), stdin=PIPE)
        started.append(process)
        assert await process.wait() == number % 100

    started = []
    tasks = [loop.create_task(run(number)) for number in range(200)]
    await until(lambda: len(started) == 200, "200 children", 20)
    for process in started:
        process.stdin.close()
    await asyncio.gather(*tasks)
    started.clear()


@pytest.mark.only_on("asyncio", "grapeshot")
async def test_many_short_children(loop):
    async def run(number):
        process = await asyncio.create_subprocess_exec(*sh(f"echo {number}"), stdout=PIPE)
        out, _ = await process.communicate()
        return int(out)

    assert await asyncio.gather(*[run(number) for number in range(100)]) == list(range(100))


@pytest.mark.skip_on(uvloop="it needs the main thread")
def test_in_another_thread(new_loop):
    results = []

    async def main():
        process = await asyncio.create_subprocess_exec(*sh("echo from a thread; exit 4"), stdout=PIPE)
        out, _ = await process.communicate()
        results.append((out, process.returncode))

    loop = new_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
    thread.start()
    thread.join()
    assert results == [(b"from a thread\n", 4)]


# ---------------------------------------------------------------- other code waits for the process, too


async def test_sigchld_is_left_alone(loop, loop_kind):
    before = signal.getsignal(signal.SIGCHLD)
    process = await running()
    assert signal.getsignal(signal.SIGCHLD) == before
    seen = []
    if loop_kind != "uvloop":
        loop.add_signal_handler(signal.SIGCHLD, seen.append, "a child")
    process.kill()
    assert await process.wait() == -signal.SIGKILL
    if loop_kind != "uvloop":
        await until(lambda: seen)
        loop.remove_signal_handler(signal.SIGCHLD)


@pytest.mark.skip_on(uvloop="it waits forever")
@pytest.mark.skip_on(when=sys.version_info < (3, 12), asyncio="its waiting thread may fetch the status first")
async def test_a_status_that_other_code_has_fetched(loop, caplog):
    process = await running()
    process.kill()
    os.waitpid(process.pid, 0)
    assert await process.wait() == 255
    assert f"child process pid {process.pid} exit status already read" in caplog.text or sys.version_info < (3, 12)
    assert "255" in caplog.text
    caplog.clear()


@pytest.fixture
def ignored_sigchld():
    """Ignore SIGCHLD. The kernel then discards the status of a child as soon as the child ends."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.skip_on(uvloop="it waits forever")
async def test_ignored_sigchld(loop, ignored_sigchld, caplog):
    process = await running()
    process.kill()
    assert await process.wait() == 255
    caplog.clear()


@pytest.mark.skip_on(asyncio="ProcessLookupError if the child ends before it is watched", uvloop="it waits forever")
async def test_ignored_sigchld_and_short_children(loop, ignored_sigchld, caplog):
    for _ in range(20):
        process = await asyncio.create_subprocess_exec(*sh("exit"))
        assert await process.wait() == 255
    caplog.clear()


@pytest.mark.xfail_on(asyncio="it returns 255, because it does not ask the Popen object")
@pytest.mark.skip_on(uvloop="it has no Popen object")
async def test_a_status_fetched_through_the_popen_object_is_known(loop, caplog):
    process = await running()
    popen = process._transport.get_extra_info("subprocess")
    popen.kill()
    assert popen.wait() == -signal.SIGKILL
    process.kill()  # this sends nothing, because the process has ended
    try:
        assert await process.wait() == -signal.SIGKILL
        assert caplog.text == ""
    finally:
        caplog.clear()
        del process, popen


# ---------------------------------------------------------------- closing


@pytest.mark.xfail_on(uvloop="is_closing() is false")
@pytest.mark.parametrize("stdio", [None, PIPE])
async def test_close_kills_a_running_process(loop, stdio):
    transport, protocol = await loop.subprocess_exec(Events, *BLOCKED, stdin=stdio, stdout=stdio, stderr=stdio)
    transport.close()
    transport.close()
    assert transport.is_closing()
    await protocol.wait_lost()
    assert transport.get_returncode() == -signal.SIGKILL


@pytest.mark.xfail_on(asyncio="it returns 255, because its own poll() has fetched the status")
@pytest.mark.skip_on(when=sys.version_info < (3, 12), asyncio="a waiting thread fetches the status")
async def test_close_keeps_the_code_of_a_process_that_has_ended(loop):
    """The child has ended, and close() is called before the loop has noticed this. Nothing is killed, and the return
    code is kept.
    """
    read_end, write_end = os.pipe()
    transport, protocol = await loop.subprocess_exec(
        Events, *sh("read line; exit 5"), stdin=read_end, stdout=None, stderr=None
    )
    os.close(read_end)
    os.close(write_end)
    not_fetched = os.WEXITED | os.WNOHANG | os.WNOWAIT
    wait_until(lambda: os.waitid(os.P_PID, transport.get_pid(), not_fetched), "the child to end")
    transport.close()
    await protocol.wait_lost()
    assert transport.get_returncode() == 5


@pytest.mark.parametrize("steps", range(6))
async def test_cancelled_while_starting(loop, steps):
    for stdio in (None, PIPE):
        starting = loop.create_task(running(stdin=stdio, stdout=stdio, stderr=stdio))
        for _ in range(steps):
            await asyncio.sleep(0)
        starting.cancel()
        try:
            process = await starting
        except asyncio.CancelledError:
            pass
        else:
            process.kill()
            await process.wait()
            process = None
        await until(lambda: not has_children())
        await iterations(3)


@pytest.mark.skip_on(uvloop="its methods cannot be replaced")
@pytest.mark.skip_on(when=sys.version_info < (3, 14, 7), asyncio="older versions wait forever")
async def test_a_pipe_that_cannot_be_connected(loop):
    """The loop ends the child and frees everything that belongs to it."""

    async def fail(factory, pipe):
        raise ConnectionError("no transport")

    loop.connect_read_pipe = fail
    with pytest.raises(ConnectionError):
        await running(stdin=PIPE, stdout=PIPE, stderr=PIPE)
    del loop.connect_read_pipe
    await iterations(3)


@pytest.mark.skip_on(uvloop="the script does not end")
@pytest.mark.skip_on(when=sys.version_info < (3, 12), asyncio="a waiting thread keeps the transport")
def test_an_unclosed_transport_warns_and_ends_its_process(loop_kind):
    out = run_script(
        loop_kind,
        """
        import asyncio, gc, os, signal, warnings
        loop = new_event_loop()
        async def main():
            start = loop.subprocess_exec
            transport, _ = await start(asyncio.SubprocessProtocol, "/bin/sh", "-c", "exec sleep 3600",
                                       stdin=None, stdout=None, stderr=None)
            return transport.get_pid()
        pid = loop.run_until_complete(main())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loop.close()
            del loop, main
            gc.collect()
            print(any("unclosed transport" in str(entry.message) for entry in caught))
        try:
            print(os.waitpid(pid, 0)[1] == signal.SIGKILL)
        except ChildProcessError:
            print(True)  # the status was fetched when the Popen object was freed
        """,
        flags=("-W", "ignore"),
    )
    assert out.split() == ["True", "True"]


def test_a_loop_closed_under_a_running_process(loop_kind):
    out = run_script(
        loop_kind,
        """
        import asyncio, subprocess
        loop = new_event_loop()
        async def main():
            return await asyncio.create_subprocess_exec("/bin/sh", "-c", "exec cat", stdin=subprocess.PIPE)
        process = loop.run_until_complete(main())
        loop.close()
        try:
            process._transport.close()
        except RuntimeError as error:
            assert "closed" in str(error)
        print("done")
        """,
        flags=("-W", "ignore"),
    )
    assert out.strip() == "done"


@pytest.mark.skip_on(asyncio="it leaves the child running", uvloop="it watches children without a descriptor")
def test_a_child_that_cannot_be_watched_is_ended(loop_kind):
    """No descriptor is free. posix_spawn, which starts the child, needs none, but a pidfd to watch the child cannot be
    opened.
    """
    out = run_script(
        loop_kind,
        """
        import asyncio, os, resource
        loop = new_event_loop()
        async def main():
            await asyncio.sleep(0.001)  # the loop creates descriptors of its own when it first sleeps
            before = len(os.listdir("/dev/fd"))
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
            taken = []
            try:
                while True:
                    taken.append(os.dup(0))
            except OSError:
                pass
            try:
                await asyncio.create_subprocess_exec("/bin/sleep", "3600", close_fds=False)
            except OSError as error:
                print(error.errno)
            for fd in taken:
                os.close(fd)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            try:
                print(os.waitpid(-1, os.WNOHANG))
            except ChildProcessError:
                print("no child")
            print(len(os.listdir("/dev/fd")) - before)
        loop.run_until_complete(main())
        loop.close()
        """,
    )
    assert out.split("\n")[:3] == [str(errno.EMFILE), "no child", "0"]


# ---------------------------------------------------------------- other code closes the child's pidfd

CLOSED_WATCH = """
import asyncio, os, subprocess

def watches():
    numbers = []
    for number in os.listdir("/proc/self/fd"):
        try:
            if "pidfd" in os.readlink("/proc/self/fd/" + number):
                numbers.append(int(number))
        except OSError:
            pass
    return numbers

async def start():
    await asyncio.sleep(0.001)  # the loop creates descriptors of its own when it first sleeps
    process = await asyncio.create_subprocess_exec("/bin/sh", "-c", "exec cat", stdin=subprocess.PIPE)
    (number,) = watches()
    os.dup2(other, number)
    return process, number

reading, other = os.pipe()
loop = new_event_loop()
"""

only_with_pidfds = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="this system has no pidfds")


@only_with_pidfds
@pytest.mark.skip_on(asyncio="it waits forever", uvloop="it uses no pidfds")
def test_another_file_gets_the_number_of_the_pidfd(loop_kind):
    """Another file gets the number of the child's pidfd. The loop notices this and watches the child again."""
    out = run_script(
        loop_kind,
        CLOSED_WATCH
        + """
async def main():
    process, number = await start()
    loop.add_writer(number, lambda: None)
    process.stdin.close()
    print(await process.wait())
    loop.remove_writer(number)
    os.fstat(number)

loop.run_until_complete(main())
loop.close()
""",
    )
    assert out.strip() == "0"


@only_with_pidfds
@pytest.mark.skip_on(uvloop="it uses no pidfds")
@pytest.mark.skip_on(when=sys.version_info < (3, 12), asyncio="its child watcher does not belong to the loop")
def test_another_file_with_the_number_of_the_pidfd_stays_open(loop_kind):
    out = run_script(
        loop_kind,
        CLOSED_WATCH
        + """
process, number = loop.run_until_complete(start())
loop.close()
os.fstat(number)
process._transport._proc.kill()
process._transport._proc.wait()
print("open")
""",
        flags=("-W", "ignore"),
    )
    assert out.strip() == "open"
