"""Held writes are sent, however the step, the run or the process ends."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

import pytest
from support import gil_is_enabled, run_iterations, run_script
from transports.tcp.socket_pairs import arrived, finish, unix_pair


def run_step(loop, step):
    """Call step(transport) in a callback of a run. Return the data that the peer has received when the run ends, and
    the exception that the run raised.
    """
    transport, protocol, peer = loop.run_until_complete(unix_pair(loop))
    caught = None
    loop.call_soon(step, transport)
    with peer:
        try:
            loop.run_forever()
        except BaseException as error:
            caught = error
        data = arrived(peer)
        loop.run_until_complete(finish(transport, protocol))
    return data, caught


def test_stop(loop):
    def step(transport):
        transport.write(b"1")
        loop.stop()
        transport.write(b"2")

    assert run_step(loop, step) == (b"12", None)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_exception_that_ends_the_run(loop, kind):
    def step(transport):
        transport.write(b"1")
        raise kind

    data, caught = run_step(loop, step)
    assert data == b"1"
    assert type(caught) is kind


def test_an_exception_of_the_callback(loop, reported):
    def step(transport):
        transport.write(b"1")
        loop.call_soon(loop.stop)
        raise LookupError("no")

    assert run_step(loop, step) == (b"1", None)
    assert [type(error) for error in reported.exceptions] == [LookupError]


def test_ctrl_c(loop):
    def step(transport):
        transport.write(b"1")
        signal.raise_signal(signal.SIGINT)

    data, caught = run_step(loop, step)
    assert data == b"1"
    assert type(caught) is KeyboardInterrupt


def test_a_task_that_is_cancelled(loop):
    async def work(transport):
        try:
            await asyncio.sleep(100)
        finally:
            transport.write(b"1")
            transport.write(b"2")

    def step(transport):
        task = loop.create_task(work(transport))
        task.add_done_callback(lambda _task: loop.stop())
        loop.call_soon(task.cancel)

    assert run_step(loop, step) == (b"12", None)


def test_writes_outside_of_a_run_leave_at_once(loop):
    transport, protocol, peer = loop.run_until_complete(unix_pair(loop))
    with peer:
        transport.write(b"at ")
        transport.write(b"once")
        assert arrived(peer) == b"at once"
        run_iterations(loop)
        transport.write(b"again")
        assert arrived(peer) == b"again"
        loop.run_until_complete(finish(transport, protocol))


@pytest.mark.skip_on(uvloop="sends at the end of the iteration")
def test_a_loop_that_runs_inside_a_step(loop, new_loop):
    """The inner run delays neither the data that was written before it nor the data that it writes itself."""
    transport, protocol, peer = loop.run_until_complete(unix_pair(loop))
    inner, seen = new_loop(), []

    def inside():
        seen.append(arrived(peer))
        transport.write(b"inside")
        seen.append(arrived(peer))
        inner.stop()

    def step():
        transport.write(b"before")
        asyncio._set_running_loop(None)
        try:
            inner.call_soon(inside)
            inner.run_forever()
        finally:
            asyncio._set_running_loop(loop)
        transport.write(b"after, ")
        transport.write(b"together")
        loop.call_soon(loop.stop)

    with peer:
        loop.call_soon(step)
        loop.run_forever()
        seen.append(arrived(peer))
        loop.run_until_complete(finish(transport, protocol))
    assert seen == [b"before", b"inside", b"after, together"]


@pytest.mark.skipif(not gil_is_enabled(), reason="without the GIL, calls from other threads are refused")
@pytest.mark.skip_on(uvloop="does not wake the loop")
async def test_a_write_of_another_thread_while_the_loop_waits(loop):
    """asyncio forbids writes by other threads, but programs make them. No step runs, so the data must leave at once."""
    transport, protocol, peer = await unix_pair(loop)
    done = loop.create_future()
    got = []

    def run():
        transport.write(b"from outside")
        peer.sock.settimeout(5)
        got.append(peer.sock.recv(100))
        loop.call_soon_threadsafe(done.set_result, None)

    thread = threading.Thread(target=run)
    with peer:
        thread.start()
        await done
        thread.join()
        assert got == [b"from outside"]
        await finish(transport, protocol)


@pytest.mark.skip_on(uvloop="runs signal handlers as callbacks of the loop")
async def test_a_write_of_a_signal_handler_while_the_loop_waits(loop):
    """The handler runs while no step runs, so its data cannot wait for the end of a step."""
    transport, protocol, peer = await unix_pair(loop)
    done = loop.create_future()
    got = []

    def run():
        os.kill(os.getpid(), signal.SIGUSR1)
        peer.sock.settimeout(5)
        got.append(peer.sock.recv(100))
        loop.call_soon_threadsafe(done.set_result, None)

    loop.add_signal_handler(signal.SIGUSR2, lambda: None)  # so that signals wake asyncio's loop, too
    before = signal.signal(signal.SIGUSR1, lambda *_: transport.write(b"from the handler"))
    thread = threading.Thread(target=run)
    try:
        with peer:
            thread.start()
            await done
            thread.join()
            assert got == [b"from the handler"]
            await finish(transport, protocol)
    finally:
        signal.signal(signal.SIGUSR1, before)
        loop.remove_signal_handler(signal.SIGUSR2)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.skip_on(uvloop="parent and child both send the data written before the fork")
@pytest.mark.parametrize("flags", [(), ("-X", "dev")], ids=["plain", "dev"])
def test_fork(loop_kind, flags):
    """Data written before the fork is sent once. The child's own writes are sent although its step never ends."""
    out = run_script(
        loop_kind,
        """
        import asyncio, os, socket

        async def main():
            loop = asyncio.get_running_loop()
            ours, theirs = socket.socketpair()
            transport, _ = await loop.create_connection(asyncio.Protocol, sock=ours)
            transport.write(b"parent, ")
            if not (pid := os.fork()):
                transport.write(b"child")
                os._exit(0)
            os.waitpid(pid, 0)
            await asyncio.sleep(0)
            print(theirs.recv(100))
            theirs.close()
            transport.abort()
            await asyncio.sleep(0)

        loop = new_event_loop()
        loop.run_until_complete(main())
        loop.close()
        """,
        flags=("-W", "ignore", *flags),
    )
    assert out.strip() == "b'parent, child'"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.skip_on(asyncio="sends at once", uvloop="parent and child both send the data written before the fork")
def test_fork_while_held_writes_are_sent(loop_kind):
    """The socket of one transport forks in `fileno()`, before the data of the next transport is sent. Parent and child
    together must send that data only once.
    """
    out = run_script(
        loop_kind,
        """
        import asyncio, os, socket

        class Forks:
            is_armed, pid = False, None

            def __init__(self, sock):
                self.sock = sock

            def __getattr__(self, name):
                return getattr(self.sock, name)

            def fileno(self):
                if self.is_armed and self.pid is None:
                    self.pid = os.fork()
                    if self.pid:
                        os.waitpid(self.pid, 0)
                return self.sock.fileno()

        async def main():
            loop = asyncio.get_running_loop()
            (other, peer), (ours, theirs) = socket.socketpair(), socket.socketpair()
            forks = Forks(other)
            first, _ = await loop.create_connection(asyncio.Protocol, sock=forks)
            second, _ = await loop.create_connection(asyncio.Protocol, sock=ours)
            first.write(b"first")
            second.write(b"parent, ")
            forks.is_armed = True

            def end_child(): # from 3.14 on, a task does not continue in the child
                if forks.pid == 0:
                    second.write(b"child")
                    os._exit(0)

            loop.call_soon(end_child)
            await asyncio.sleep(0)
            assert forks.pid
            print(theirs.recv(100))
            peer.close()
            theirs.close()
            first.abort()
            second.abort()
            await asyncio.sleep(0)

        loop = new_event_loop()
        loop.run_until_complete(main())
        loop.close()
        """,
        flags=("-W", "ignore"),
    )
    assert out.strip() == "b'parent, child'"


def test_exit_inside_a_step(loop_kind):
    out = run_script(
        loop_kind,
        """
        import asyncio, atexit, socket, sys

        ours, theirs = socket.socketpair()

        async def main():
            transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=ours)
            transport.write(b"the ")
            transport.write(b"end")
            atexit.register(lambda: print(theirs.recv(100)))
            sys.exit()

        new_event_loop().run_until_complete(main())
        """,
        flags=("-W", "ignore"),
    )
    assert out.strip() == "b'the end'"
