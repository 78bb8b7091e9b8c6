"""How waits on descriptors end: events, timeouts, interruptions, closing; and who may wait."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import hashlib
import os
import pickle
import random
import socket
import threading
import weakref

import pytest
from support import HOST, coro_is_available, in_thread, run_script, wait_until

import grapeshot

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import coro


def wait_until_waiting(*waiting):
    """Lets coros run until these wait."""
    while not all(thread._status == "waiting" for thread in waiting):
        coro.yield_slice()


# ---- timeouts ------------------------------------------------------------------------------------------------------


def test_each_call_ends_after_the_timeout_of_its_socket(world):
    def fill(sock):
        sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                sock.send(b"x" * 100_000)

    def main():
        near, far = world.pair()
        with near, far, world.socket() as listener:
            listener.bind((HOST, 0))
            listener.listen()
            listener.settimeout(0.001)
            fill(near)
            near.settimeout(0.001)
            calls = [
                lambda: near.recv(1),
                lambda: near.recv(1, 0),
                lambda: near.recv_into(bytearray(1)),
                lambda: near.recvfrom(1),
                lambda: near.recvmsg(1),
                lambda: near.send(b"x"),
                lambda: near.sendall(b"x"),
                lambda: near.sendmsg([b"x"]),
                lambda: listener.accept(),
            ]
            for call in calls:
                with pytest.raises(TimeoutError, match=r"^timed out$") as caught:
                    call()
                assert type(caught.value) is TimeoutError
            assert near.gettimeout() == near.timeout == 0.001

    world.run(main)


def test_the_timeout_as_a_plain_socket_shows_it(world):
    def main():
        with world.socket() as sock:
            assert (sock.gettimeout(), sock.getblocking(), sock.timeout) == (None, True, None)
            for value, shown in ((0, 0.0), (0.0, 0.0), (2, 2.0), (2.5, 2.5), (None, None), (True, 1.0)):
                sock.settimeout(value)
                assert (sock.gettimeout(), sock.timeout, sock.getblocking()) == (shown, shown, shown != 0)
                assert type(sock.gettimeout()) is type(shown)
            sock.setblocking(False)
            assert sock.gettimeout() == 0.0
            sock.setblocking(True)
            assert sock.gettimeout() is None

    world.run(main)


@pytest.mark.parametrize("what", ["socket", "number"])
def test_waiting_again_for_what_is_still_ready(what):
    """`wait_for_read` and `wait_for_write` tell the state, also if nothing was read after the last wait."""

    def main():
        listener = socket.socket()
        listener.bind((HOST, 0))
        listener.listen()
        near = coro.tcp_sock()
        near.connect(listener.getsockname())
        far, _ = listener.accept()
        target = near if what == "socket" else near.fileno()
        with listener, near, far, coro.timeout(10):
            for _ in range(3):
                # A short read, after which the socket is known to be empty.
                far.sendall(b"x")
                assert near.recv(100) == b"x"
                waiter = coro.spawn(coro.wait_for_read, target)
                wait_until_waiting(waiter)
                far.sendall(b"abc")
                waiter.join()
                coro.wait_for_write(target)
                coro.wait_for_read(target)
                assert near.recv(1) == b"a"
                coro.wait_for_read(target)
                assert near.recv(100) == b"bc"
            far.shutdown(socket.SHUT_WR)
            coro.wait_for_read(target)
            coro.wait_for_read(target)
            assert near.recv(100) == b""

    coro.run(main)


def test_the_default_timeout(world):
    socket.setdefaulttimeout(5)
    try:

        def main():
            with world.socket() as listener, world.socket() as client:
                assert listener.gettimeout() == 5
                listener.bind((HOST, 0))
                listener.listen()
                client.connect(listener.getsockname())
                accepted, _ = listener.accept()
                with accepted:
                    assert accepted.gettimeout() == 5

        world.run(main)
    finally:
        socket.setdefaulttimeout(None)


def test_without_waiting(world):
    def main():
        near, far = world.pair()
        with near, far, world.socket() as listener, world.socket() as client:
            near.setblocking(False)
            listener.setblocking(False)
            listener.bind((HOST, 0))
            listener.listen()
            for call in (lambda: near.recv(1), lambda: near.recvfrom(1), listener.accept):
                with pytest.raises(BlockingIOError) as caught:
                    call()
                assert caught.value.args == (errno.EAGAIN, os.strerror(errno.EAGAIN))
            client.setblocking(False)
            with pytest.raises(BlockingIOError) as caught:
                client.connect(listener.getsockname())
            assert caught.value.errno == errno.EINPROGRESS
            far.sendall(b"x")
            assert near.recv(10) == b"x"
            with pytest.raises(BlockingIOError):
                near.recv(10)

    world.run(main)


def test_a_timeout_concerns_the_whole_sendall():
    """It does not begin again with each part."""

    def read_slowly(sock, stop):
        while not stop:
            sock.recv(1000)
            coro.sleep_relative(0.002)

    def main():
        near, far = coro.socketpair()
        with near, far:
            stop = []
            near.settimeout(0.05)
            reader = coro.spawn(read_slowly, far, stop)
            with pytest.raises(TimeoutError):
                near.sendall(bytes(50_000_000))
            stop.append(True)
            reader.join()

    coro.run(main)


def test_a_connection_that_takes_too_long():
    def main():
        with coro.tcp_sock() as listener:
            listener.bind((HOST, 0))
            listener.listen(0)
            clients = [coro.tcp_sock() for _ in range(4)]
            late = 0
            for client in clients:
                client.settimeout(0.05)
                try:
                    client.connect(listener.getsockname())
                except TimeoutError as error:
                    assert str(error) == "timed out"
                    late += 1
            if late:  # the kernel drops what the queue of the listening socket has no place for
                assert clients[-1].connect_ex(listener.getsockname()) in (errno.EWOULDBLOCK, errno.EALREADY)
            for client in clients:
                client.close()

    coro.run(main)


# ---- interruptions -------------------------------------------------------------------------------------------------


def test_an_interrupted_recv_has_taken_nothing():
    """Also where the interruption comes after the event."""

    def main():
        near, far = coro.socketpair()
        with near, far:
            reader = coro.spawn(far.recv, 10)
            wait_until_waiting(reader)
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
    """A stream with checksums, read by coros that are interrupted all the time."""
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
                part = sock.recvmsg(length)[0] if not sock._has_unread() else sock.recv(length)
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
            wait_until_waiting(reader)
            reader.shutdown()
            reader.join()
            assert reader.cancelled()
            # Nobody waits any more.
            near.sendall(b"x")
            assert far.recv(10) == b"x"

    coro.run(main)


def test_a_coro_that_is_scheduled_by_mistake_waits_on():
    def main():
        near, far = coro.socketpair()
        with near, far:
            reader = coro.spawn(far.recv, 10)
            waiter = coro.spawn(coro.wait_for_write, far)
            wait_until_waiting(reader)
            coro.schedule(reader)
            wait_until_waiting(reader)
            near.sendall(b"x")
            assert reader.join() == b"x"
            waiter.join()

    coro.run(main)


# ---- two waiters, closing ------------------------------------------------------------------------------------------


def test_two_coros_that_wait_for_the_same():
    def main():
        near, far = coro.socketpair()
        with near, far:
            first = coro.spawn(far.recv, 10)
            wait_until_waiting(first)
            for call in (
                lambda: far.recv(10),
                lambda: coro.wait_for_read(far),
                lambda: coro.wait_for_read(far.fileno()),
            ):
                with pytest.raises(coro.SimultaneousError, match=f"descriptor {far.fileno()}"):
                    call()
            # The other direction is free.
            far.sendall(b"there")
            coro.wait_for_write(far.fileno())
            near.sendall(b"x")
            assert first.join() == b"x"

    coro.run(main)


def test_a_reader_callback_of_asyncio_is_a_waiter_too():
    async def main():
        near, far = coro.socketpair()
        with near, far:
            loop = asyncio.get_running_loop()
            loop.add_reader(far.fileno(), print)
            with pytest.raises(coro.SimultaneousError):
                await coro.run_sync(far.recv, 10)
            loop.remove_reader(far.fileno())
            near.sendall(b"x")
            assert await coro.run_sync(far.recv, 10) == b"x"

    grapeshot.run(main())


@pytest.mark.parametrize("how", ["close", "detach"])
def test_closing_under_waiters(how):
    def main():
        near, far = coro.socketpair()
        with contextlib.suppress(BlockingIOError):
            far.setblocking(False)
            while True:
                far.send(b"x" * 100_000)
        far.setblocking(True)
        waiters = [coro.spawn(far.recv, 10), coro.spawn(far.sendall, b"y")]
        wait_until_waiting(*waiters)
        if how == "close":
            far.close()
        else:
            os.close(far.detach())
        for waiter in waiters:
            with pytest.raises(coro.ClosedError) as caught:
                waiter.result() if waiter.done() else (waiter.join(), waiter.result())
            assert isinstance(caught.value, OSError)
            assert caught.value.errno == errno.EBADF
            assert str(caught.value) == "the descriptor was closed while a coro waited on it"
        copy = pickle.loads(pickle.dumps(caught.value))
        assert (type(copy), copy.args, str(copy)) == (coro.ClosedError, caught.value.args, str(caught.value))
        near.close()

    coro.run(main)


def test_closing_by_another_thread():
    def main():
        near, far = coro.socketpair()
        reader = coro.spawn(far.recv, 10)
        wait_until_waiting(reader)
        coro.threads.run(far.close)
        with pytest.raises(coro.ClosedError):
            reader.join()
        near.close()

    coro.run(main)


def test_a_file_that_keeps_the_socket_open():
    """As for plain sockets: the descriptor stays open while a file uses it."""

    def main():
        near, far = coro.socketpair()
        file = far.makefile("rb")
        reader = coro.spawn(file.readline)
        wait_until_waiting(reader)
        far.close()
        near.sendall(b"line\n")
        assert reader.join() == b"line\n"
        file.close()
        assert far.fileno() == -1
        near.close()

    coro.run(main)


def test_numbers_that_are_closed_and_used_again():
    """A coro gets nothing from the file that has the number of its own one next."""

    def main():
        for _ in range(50):
            near, far = coro.socketpair()
            number = far.fileno()
            reader = coro.spawn(far.recv, 10)
            wait_until_waiting(reader)
            far.close()
            other_near, other_far = coro.socketpair()
            assert number in (other_near.fileno(), other_far.fileno())
            other_near.sendall(b"near")
            other_far.sendall(b"far")
            assert other_near.recv(10) == b"far"
            assert other_far.recv(10) == b"near"
            with pytest.raises(coro.ClosedError):
                reader.join()
            for sock in (near, other_near, other_far):
                sock.close()

    coro.run(main)


def test_numbers_that_are_closed_behind_the_back_of_the_socket():
    """`os.close`, and the number belongs to another file: the coro that waits on it gets ClosedError, not its data."""

    def main():
        near, far = coro.socketpair()
        reader = coro.spawn(far.recv, 10)
        watcher = coro.spawn(coro.wait_for_write, far.fileno())
        watcher.join()
        wait_until_waiting(reader)
        number = far.fileno()
        os.close(number)
        other_near, other_far = coro.socketpair()
        if number not in (other_near.fileno(), other_far.fileno()):
            pytest.fail("the number was not used again")
        mine, peer = (other_near, other_far) if other_near.fileno() == number else (other_far, other_near)
        other_reader = coro.spawn(mine.recv, 10)
        wait_until_waiting(other_reader)
        with pytest.raises(coro.ClosedError):
            reader.join()
        peer.sendall(b"data")
        assert other_reader.join() == b"data"
        far.detach()
        for sock in (near, other_near, other_far):
            sock.close()

    coro.run(main)


def test_a_storm_of_closed_and_reused_numbers():
    """Connections that are closed under their readers at random. Each one gets only what was sent to it."""
    rng = random.Random(7)
    counts = {"whole": 0, "closed": 0}

    def serve(sock, name):
        try:
            while data := sock.recv(100):
                assert set(data) == {name}
        except OSError as error:
            assert error.errno == errno.EBADF
            counts["closed"] += 1
        else:
            counts["whole"] += 1
        finally:
            sock.close()

    def live(name):
        for _ in range(20):
            near, far = coro.socketpair()
            server = coro.spawn(serve, far, name)
            for _ in range(rng.randrange(5)):
                try:
                    near.sendall(bytes([name]) * rng.randrange(1, 300))
                except OSError:
                    break
                coro.yield_slice()
            if rng.random() < 0.5:
                far.close()
            near.close()
            coro.yield_slice()
            server.join()

    coro.run(lambda: coro.in_parallel([(live, (name,)) for name in range(1, 30)]))
    assert min(counts.values()) > 20


# ---- descriptors ---------------------------------------------------------------------------------------------------


def test_waiting_for_descriptors_of_any_kind(tmp_path):
    def main():
        read_end, write_end = os.pipe()
        waiter = coro.spawn(coro.wait_for_read, read_end)
        coro.wait_for_write(write_end)
        wait_until_waiting(waiter)
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
    """As PEP 475 says: the handler runs, and the call goes on."""
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


def test_the_child_of_a_fork_blocks():
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
                    far.close()  # on which a coro of the parent waits
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
        wait_until_waiting(reader)
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


# ---- objects -------------------------------------------------------------------------------------------------------


def test_they_are_sockets():
    near, far = coro.socketpair()
    assert isinstance(near, socket.socket)
    assert repr(near).startswith("<grapeshot.coro.sock fd=")
    assert near.family is socket.AF_UNIX
    assert near.type is socket.SOCK_STREAM
    with pytest.raises(TypeError, match="cannot pickle"):
        pickle.dumps(near)
    copy = near.dup()
    assert type(copy) is coro.sock
    copy.settimeout(3)
    again = copy.dup()
    assert again.gettimeout() == 3
    for sock in (near, far, copy, again):
        sock.close()


def test_makers():
    made = {
        coro.tcp_sock: (socket.AF_INET, socket.SOCK_STREAM),
        coro.udp_sock: (socket.AF_INET, socket.SOCK_DGRAM),
        coro.unix_sock: (socket.AF_UNIX, socket.SOCK_STREAM),
        lambda: coro.make_socket(socket.AF_UNIX, socket.SOCK_DGRAM): (socket.AF_UNIX, socket.SOCK_DGRAM),
    }
    if socket.has_ipv6:
        made[coro.tcp6_sock] = (socket.AF_INET6, socket.SOCK_STREAM)
        made[coro.udp6_sock] = (socket.AF_INET6, socket.SOCK_DGRAM)
    for maker, kind in made.items():
        try:
            sock = maker()
        except OSError:
            assert kind[0] == socket.AF_INET6
            continue
        with sock:
            assert type(sock) is coro.sock
            assert (sock.family, sock.type) == kind
            assert not os.get_blocking(sock.fileno())


def test_subclasses():
    class Counting(coro.sock):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.count = 0

        def recv(self, *args):
            self.count += 1
            return super().recv(*args)

    def main():
        with Counting() as listener, coro.tcp_sock() as client:
            listener.bind((HOST, 0))
            listener.listen()
            client.connect(listener.getsockname())
            accepted, _ = listener.accept()
            assert type(accepted) is Counting
            with accepted:
                reader = coro.spawn(accepted.recv, 10)
                wait_until_waiting(reader)
                client.sendall(b"x")
                assert reader.join() == b"x"
                assert accepted.count == 1

    coro.run(main)


def test_cycles_are_collected():
    class Holder(coro.sock):
        pass

    def main():
        near, far = Holder(), Holder()
        near.other, far.other = far, near
        near.close()
        far.close()
        return weakref.ref(near)

    reference = coro.run(main)
    gc.collect()
    assert reference() is None


def test_a_socket_that_is_not_closed_warns(world):
    if world.kind == "threads":
        pytest.skip("the same objects as for coros")
    with pytest.warns(ResourceWarning, match="unclosed"):
        world.socket()


def test_an_object_that_was_never_opened():
    unopened = coro.sock.__new__(coro.sock)
    with pytest.raises(OSError, match="Bad file descriptor"):
        unopened.recv(1)
    assert unopened.fileno() == -1


def test_asyncio_uses_them():
    """With the timeout 0 they are ordinary sockets to it."""

    async def main():
        loop = asyncio.get_running_loop()
        near, far = coro.socketpair()
        with near, far:
            near.setblocking(False)
            far.setblocking(False)
            await loop.sock_sendall(near, b"abc")
            assert await loop.sock_recv(far, 10) == b"abc"
            reader, writer = await asyncio.open_connection(sock=near)
            writer.write(b"x")
            assert await coro.run_sync(lambda: (far.settimeout(None), far.recv(1))[1]) == b"x"
            writer.close()
            await writer.wait_closed()

    grapeshot.run(main())


# ---- names ---------------------------------------------------------------------------------------------------------


def test_names_are_resolved_in_another_thread(monkeypatch):
    from grapeshot.coro import _dns

    threads = []

    def look_up(host, *args):
        threads.append(threading.get_ident())
        assert host == "name.test"
        return [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", (HOST, 0))]

    monkeypatch.setattr(_dns, "_getaddrinfo", look_up)

    def main():
        with coro.tcp_sock() as listener, coro.tcp_sock() as client, coro.udp_sock() as receiver:
            listener.bind(("name.test", 0))
            listener.listen()
            client.connect(("name.test", listener.getsockname()[1]))
            receiver.bind((HOST, 0))
            with coro.udp_sock() as sender:
                assert sender.sendto(b"x", ("name.test", receiver.getsockname()[1])) == 1
                assert sender.sendto(b"y", 0, ("name.test", receiver.getsockname()[1])) == 1
            assert receiver.recv(10) == b"x"
            assert receiver.recv(10) == b"y"
            listener.accept()[0].close()

    coro.run(main)
    assert len(threads) == 4
    assert threading.get_ident() not in threads


def test_literals_ask_nobody(monkeypatch):
    from grapeshot.coro import _dns

    monkeypatch.setattr(_dns, "_getaddrinfo", None)
    monkeypatch.setattr(_dns, "run_in_thread", None)

    def main():
        with coro.tcp_sock() as listener, coro.tcp_sock() as client, coro.udp_sock() as receiver:
            listener.bind(("", 0))
            listener.listen()
            client.connect((HOST, listener.getsockname()[1]))
            receiver.bind((HOST, 0))
            with coro.udp_sock() as sender:
                sender.sendto(b"x", receiver.getsockname())
            assert receiver.recv(1) == b"x"
            listener.accept()[0].close()

    coro.run(main)


def test_a_name_that_does_not_resolve(world):
    def main():
        with world.socket() as client:
            with pytest.raises(socket.gaierror):
                client.connect(("name.invalid", 1))
            with pytest.raises(socket.gaierror):
                client.connect_ex(("name.invalid", 1))

    world.run(main)


def test_other_coros_run_while_one_waits():
    """The loop turns: a coro that waits for input does not stop it."""

    def main():
        near, far = coro.socketpair()
        with near, far:
            reader = coro.spawn(far.recv, 10)
            for _ in range(100):
                coro.yield_slice()
            assert not reader.done()
            near.sendall(b"x")
            wait = reader.join()
            assert wait == b"x"

    coro.run(main)
    wait_until(lambda: True)
