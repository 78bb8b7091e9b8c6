"""Two coros that wait for the same event, and descriptors that are closed and reused while coros wait for them."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import pickle
import random

import pytest
from support import coro_is_available, until_waiting

import grapeshot

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import coro


def test_two_coros_cannot_wait_for_the_same_event():
    def main():
        near, far = coro.socketpair()
        with near, far:
            first = coro.spawn(far.recv, 10)
            until_waiting(first)
            for call in (
                lambda: far.recv(10),
                lambda: coro.wait_for_read(far),
                lambda: coro.wait_for_read(far.fileno()),
            ):
                with pytest.raises(coro.SimultaneousError, match=f"descriptor {far.fileno()}"):
                    call()
            # No coro waits for the other direction.
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
        until_waiting(*waiters)
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
        until_waiting(reader)
        coro.threads.run(far.close)
        with pytest.raises(coro.ClosedError):
            reader.join()
        near.close()

    coro.run(main)


def test_a_file_that_keeps_the_socket_open():
    """As with plain sockets, the descriptor stays open while a file uses it."""

    def main():
        near, far = coro.socketpair()
        file = far.makefile("rb")
        reader = coro.spawn(file.readline)
        until_waiting(reader)
        far.close()
        near.sendall(b"line\n")
        assert reader.join() == b"line\n"
        file.close()
        assert far.fileno() == -1
        near.close()

    coro.run(main)


def test_numbers_that_are_closed_and_used_again():
    """A coro that waited on a closed socket gets no data from another socket that takes the closed one's number."""

    def main():
        for _ in range(50):
            near, far = coro.socketpair()
            number = far.fileno()
            reader = coro.spawn(far.recv, 10)
            until_waiting(reader)
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
    """`os.close` frees the number, and another file takes it. The waiting coro gets ClosedError, and no data of the
    other file.
    """

    def main():
        near, far = coro.socketpair()
        reader = coro.spawn(far.recv, 10)
        watcher = coro.spawn(coro.wait_for_write, far.fileno())
        watcher.join()
        until_waiting(reader)
        number = far.fileno()
        os.close(number)
        other_near, other_far = coro.socketpair()
        if number not in (other_near.fileno(), other_far.fileno()):
            pytest.fail("the number was not used again")
        mine, peer = (other_near, other_far) if other_near.fileno() == number else (other_far, other_near)
        other_reader = coro.spawn(mine.recv, 10)
        until_waiting(other_reader)
        with pytest.raises(coro.ClosedError):
            reader.join()
        peer.sendall(b"data")
        assert other_reader.join() == b"data"
        far.detach()
        for sock in (near, other_near, other_far):
            sock.close()

    coro.run(main)


def test_a_storm_of_closed_and_reused_numbers():
    """Connections are closed at random while coros read from them. Each reader gets only what was sent to it."""
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
