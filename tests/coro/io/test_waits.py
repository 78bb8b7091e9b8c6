"""How waits on descriptors end (by events and interruptions), and which callers may wait."""

from __future__ import annotations

import hashlib
import os
import random
import socket
import threading

import pytest
from support import HOST, coro_is_available, in_thread, run_script, until_waiting

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import coro


# ---- interruptions -------------------------------------------------------------------------------------------------


def test_an_interrupted_recv_has_taken_nothing():
    """An interrupted recv loses no data, even if the interruption arrives after the event."""

    def main():
        near, far = coro.socketpair()
        with near, far:
            reader = coro.spawn(far.recv, 10)
            until_waiting(reader)
            near.sendall(b"abc")
            while reader._status == "waiting":
                coro.yield_slice()
                if reader._status == "ready":
                    break
            if reader._status == "ready":
                reader.interrupt()
            reader.join()
            rest = b"abc" if reader.cancelled() else b""
            near.sendall(b"d")
            assert far.recv(10) == rest + b"d"

    coro.run(main)


@pytest.mark.parametrize("family", ["unix", "tcp"])
def test_interrupts_at_random_lose_no_byte(family):
    """Coros that read a stream are interrupted again and again. A checksum shows that no byte is lost."""
    rng = random.Random(11)
    data = rng.randbytes(600_000)

    def pair():
        if family == "unix":
            return coro.socketpair()
        with coro.tcp_sock() as listener:
            listener.bind((HOST, 0))
            listener.listen()
            near = coro.tcp_sock()
            near.connect(listener.getsockname())
            return near, listener.accept()[0]

    def send(sock):
        at = 0
        while at < len(data):
            length = rng.choice((1, 10, 1000, 20_000))
            sock.sendall(data[at : at + length])
            at += length
            if rng.random() < 0.5:
                coro.sleep_relative(0)
        sock.shutdown(socket.SHUT_WR)

    def read(sock, received):
        while True:
            length = rng.choice((1, 100, 5000, 300_000))
            way = rng.randrange(4)
            if way == 0:
                part = sock.recv(length)
            elif way == 1:
                buffer = bytearray(length)
                part = bytes(buffer[: sock.recv_into(buffer)])
            elif way == 2:
                part = sock.recvmsg(length)[0]
            else:
                try:
                    part = sock.recv_exact(min(length, 5000))
                except EOFError:
                    continue
            if not part:
                return
            received.append(part)

    def main():
        near, far = pair()
        with near, far:
            sender = coro.spawn(send, near)
            received = []
            interrupts = 0
            while True:
                reader = coro.spawn(read, far, received)
                for _ in range(rng.randrange(1, 6)):
                    coro.yield_slice()
                if reader.done():
                    break
                reader.interrupt()
                interrupts += 1
                reader.join()
                if not reader.cancelled():
                    break
            sender.join()
            assert interrupts > 5
            assert hashlib.sha256(b"".join(received)).digest() == hashlib.sha256(data).digest()

    coro.run(main)


def test_cancelling_and_timeouts_of_blocks():
    def main():
        near, far = coro.socketpair()
        with near, far:
            with pytest.raises(coro.TimeoutError):
                coro.with_timeout(0.001, far.recv, 10)
            reader = coro.spawn(far.recv, 10)
            until_waiting(reader)
            reader.shutdown()
            reader.join()
            assert reader.cancelled()
            # No coro waits for the socket any more.
            near.sendall(b"x")
            assert far.recv(10) == b"x"

    coro.run(main)


def test_a_coro_that_is_scheduled_by_mistake_keeps_waiting():
    def main():
        near, far = coro.socketpair()
        with near, far:
            reader = coro.spawn(far.recv, 10)
            waiter = coro.spawn(coro.wait_for_write, far)
            until_waiting(reader)
            coro.schedule(reader)
            until_waiting(reader)
            near.sendall(b"x")
            assert reader.join() == b"x"
            waiter.join()

    coro.run(main)


# ---- descriptors ---------------------------------------------------------------------------------------------------


def test_waiting_for_descriptors_of_any_kind(tmp_path):
    def main():
        read_end, write_end = os.pipe()
        waiter = coro.spawn(coro.wait_for_read, read_end)
        coro.wait_for_write(write_end)
        until_waiting(waiter)
        os.write(write_end, b"x")
        assert waiter.join() is None
        coro.wait_for_read(read_end, timeout=1)
        os.read(read_end, 10)
        for timeout in (0, 0.001, -1):
            with pytest.raises(TimeoutError):
                coro.wait_for_read(read_end, timeout)
        os.close(write_end)
        coro.wait_for_read(read_end)
        os.close(read_end)
        path = tmp_path / "file"
        path.write_text("")
        with path.open("rb") as file:
            coro.wait_for_read(file)
            with pytest.raises(ValueError, match="Invalid file object"):
                coro.wait_for_read("file")
            with pytest.raises(ValueError, match="Invalid file descriptor"):
                coro.wait_for_write(-1)
            with pytest.raises(OSError, match="Bad file descriptor"):
                coro.wait_for_write(10_000)
        with pytest.raises(TypeError):
            coro.wait_for_read()
        with pytest.raises(TypeError):
            coro.wait_for_read(0, deadline=1)

    coro.run(main)


def test_waiting_for_descriptors_in_a_thread_without_coros():
    read_end, write_end = os.pipe()
    with pytest.raises(TimeoutError):
        coro.wait_for_read(read_end, 0.001)
    coro.wait_for_write(write_end)
    threading.Timer(0.001, os.write, (write_end, b"x")).start()
    coro.wait_for_read(read_end)
    assert os.read(read_end, 1) == b"x"
    os.close(read_end)
    os.close(write_end)


# ---- where calls may wait ------------------------------------------------------------------------------------------


def test_real_threads_beside_coros():
    """One socket in a coro, its peer in a thread."""

    def answer(sock):
        while data := sock.recv(100):
            sock.sendall(data.upper())

    def main():
        near, far = coro.socketpair()
        thread = threading.Thread(target=answer, args=(far,))
        thread.start()
        with near, far:
            for _ in range(10):
                near.sendall(b"abc")
                assert near.recv_exact(3) == b"ABC"
            near.shutdown(socket.SHUT_WR)
            thread.join()

    coro.run(main)


def test_signals_reach_a_thread_that_blocks():
    """As PEP 475 requires: the handler runs, and the call continues."""
    out = run_script(
        None,
        """
        import os, signal, threading
        from grapeshot import coro
        near, far = coro.socketpair()
        def on_signal(*_):
            print("signal")
            near.sendall(b"x")
        signal.signal(signal.SIGUSR1, on_signal)
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        print(far.recv(10))
        """,
    )
    assert out.split() == ["signal", "b'x'"]


def test_an_exception_of_a_signal_handler_ends_a_blocking_call():
    out = run_script(
        None,
        """
        import os, signal, threading
        from grapeshot import coro
        near, far = coro.socketpair()
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            far.recv(10)
        except KeyboardInterrupt:
            print("interrupted")
        """,
    )
    assert out.split() == ["interrupted"]


def test_a_call_in_the_child_of_a_fork_blocks_its_thread():
    out = run_script(
        None,
        """
        import os, warnings
        from grapeshot import coro
        warnings.simplefilter("ignore")

        def main():
            near, far = coro.socketpair()
            waiting = coro.spawn(far.recv, 10)
            coro.yield_slice(); coro.yield_slice()
            ours, theirs = coro.socketpair()
            pid = os.fork()
            if pid == 0:
                try:
                    theirs.sendall(theirs.recv(10).upper())
                    far.close()  # a coro of the parent waits on this socket
                    near.close()
                finally:
                    os._exit(0)
            theirs.close()
            ours.sendall(b"abc")
            print(ours.recv(10))
            os.waitpid(pid, 0)
            near.sendall(b"unharmed")
            print(waiting.join())

        coro.run(main)
        """,
    )
    assert out.splitlines() == ["b'ABC'", "b'unharmed'"]


def test_a_coro_lets_others_run_after_some_calls_that_did_not_wait():
    def main():
        near, far = coro.socketpair()
        with near, far:
            near.sendall(bytes(100))
            rounds = []

            def count():
                while True:
                    rounds.append(1)
                    coro.yield_slice()

            other = coro.spawn(count)
            coro.current().set_max_selfish_acts(3)
            coro.yield_slice()
            before = len(rounds)
            for _ in range(12):
                far.recv(1)
            assert 3 <= len(rounds) - before <= 4
            coro.current().set_max_selfish_acts(1000)
            before = len(rounds)
            for _ in range(12):
                far.recv(1)
            assert len(rounds) == before
            other.shutdown()
            other.join()

    coro.run(main)


def test_two_loops_one_after_the_other():
    """A socket outlives its loop."""
    near, far = coro.socketpair()

    def talk(message):
        reader = coro.spawn(far.recv, 100)
        until_waiting(reader)
        near.sendall(message)
        assert reader.join() == message

    for message in (b"one", b"two", b"three"):
        coro.run(talk, message)
    in_thread(coro.run, talk, b"four")
    near.close()
    far.close()


def test_a_loop_that_ends_under_waiters():
    near, far = coro.socketpair()

    def main():
        coro.spawn(far.recv, 10)
        coro.yield_slice()

    coro.run(main)
    near.sendall(b"x")
    assert coro.run(far.recv, 10) == b"x"
    near.close()
    far.close()
