"""A socket object remembers facts about its descriptor, for example that no data is left. In these tests, the facts
become outdated: another call consumes an event, a descriptor number is closed and used again, or the process forks.
"""

from __future__ import annotations

import errno
import os
import socket

import pytest
from support import HOST, coro_is_available, run_script

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import coro


def tcp_pair():
    """A `coro.sock` and the plain socket that it is connected to."""
    with socket.create_server((HOST, 0)) as listener:
        far = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
    # Send data without delay.
    far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return coro.sock(fileno=accepted.detach()), far


def let_run(thread):
    """Let the loop check for events many times; return whether the coro has ended."""
    for _ in range(200):
        if thread.done():
            break
        coro.yield_slice()
    return thread.done()


def read_short(near, far):
    """Make a short read. Then the loop watches the socket, and the socket object assumes that no data is left."""
    reader = coro.spawn(near.recv, 100)
    while reader._status != "waiting":
        coro.yield_slice()
    far.send(b"x")
    assert reader.join() == b"x"


# ---- an event comes once, and not always to the coro that reads ------------------------------------------------------


class Stop(Exception):
    pass


def use_up_by_an_interrupted_read(near, far):
    reader = coro.spawn(near.recv_exact, 10)
    while reader._status != "waiting":
        coro.yield_slice()
    far.send(b"hello")
    # The event arrives first, then the interruption.
    while reader._status == "waiting":
        coro.yield_slice()
    reader.raise_exception(Stop)
    with pytest.raises(Stop):
        reader.join()


def use_up_by_a_wait(near, far):
    waiter = coro.spawn(coro.wait_for_read, near)
    while waiter._status != "waiting":
        coro.yield_slice()
    far.send(b"hello")
    waiter.join()


def use_up_by_a_writer(near, far):
    far.setblocking(False)
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    while True:
        near.setblocking(False)
        with pytest.raises(BlockingIOError):
            while True:
                near.send(b"z" * 1000)
        near.setblocking(True)
        writer = coro.spawn(near.sendall, b"z")
        if not let_run(writer):
            break
    # The loop does not run while data arrives and room to send becomes free, so one event reports both.
    far.send(b"hello")
    with pytest.raises(BlockingIOError):
        while True:
            far.recv(1 << 20)
    writer.join()


@pytest.mark.parametrize("use_up", [use_up_by_an_interrupted_read, use_up_by_a_wait, use_up_by_a_writer])
def test_a_read_finds_the_data_of_an_event_that_another_wait_has_used_up(use_up):
    def main():
        near, far = tcp_pair()
        with near, far:
            read_short(near, far)
            use_up(near, far)
            reader = coro.spawn(near.recv, 100)
            assert let_run(reader)
            assert reader.join() == b"hello"

    coro.run(main)


def test_a_wait_for_data_that_is_already_there_ends_at_once():
    def main():
        near, far = tcp_pair()
        with near, far:
            reader = coro.spawn(near.recv, 3)
            while reader._status != "waiting":
                coro.yield_slice()
            far.send(b"hello")
            assert reader.join() == b"hel"
            # The event ended the wait of `recv`, but `recv` has left some data unread.
            waiter = coro.spawn(coro.wait_for_read, near)
            assert let_run(waiter)
            waiter.join()

            for _ in range(2):
                waiter = coro.spawn(coro.wait_for_write, near)
                assert let_run(waiter)
                waiter.join()

    coro.run(main)


# ---- the descriptor --------------------------------------------------------------------------------------------------


def test_a_descriptor_that_was_closed_behind_the_back_of_the_object():
    def calls(near):
        return (lambda: near.recv(10), lambda: near._wait(0, 5), lambda: near._wait(1, 5))

    def check(near):
        for call in calls(near):
            with pytest.raises(OSError, match="Bad file descriptor") as caught:
                call()
            assert caught.value.errno == errno.EBADF

    def main():
        near, far = tcp_pair()
        with far:
            read_short(near, far)
            socket.socket.__mro__[1].close(near)
            check(near)
        return near

    # Check again while no coro runs. A thread waits with `poll`, which ignores negative descriptors. So `_wait` itself
    # must refuse -1, the descriptor of a closed socket.
    check(coro.run(main))


def test_an_accepted_socket_that_its_constructor_closes():
    class Refusing(coro.sock):
        is_listening = True

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            if not Refusing.is_listening:
                number = self.fileno()
                self.close()
                others.append(os.open(os.devnull, os.O_RDONLY))
                assert others[-1] == number
                raise ValueError("refused")

    others: list[int] = []

    def main():
        with Refusing() as listener:
            listener.bind((HOST, 0))
            listener.listen()
            Refusing.is_listening = False
            for method in (listener.accept, listener.accept_many):
                with socket.create_connection(listener.getsockname()):
                    with pytest.raises(ValueError, match="refused"):
                        method()
                    # The number belongs to another file, which is still open.
                    os.fstat(others[-1])
                    os.close(others[-1])

    coro.run(main)


def test_init_once_more_for_a_socket_of_another_kind():
    def main():
        near, far = tcp_pair()
        read_short(near, far)
        first = near.fileno()
        near.__init__(socket.AF_INET, socket.SOCK_DGRAM)
        os.close(first)
        near.bind((HOST, 0))
        with near, far, socket.socket(type=socket.SOCK_DGRAM) as sender:
            reader = coro.spawn(near.recv, 100)
            while reader._status != "waiting":
                coro.yield_slice()
            sender.sendto(b"a", near.getsockname())
            sender.sendto(b"b", near.getsockname())
            assert reader.join() == b"a"
            # A short datagram does not mean that nothing is left.
            reader = coro.spawn(near.recv, 100)
            assert let_run(reader)
            assert reader.join() == b"b"

    coro.run(main)


def test_init_once_more_with_the_same_number():
    """The loop's registration belongs to the file that had the number before, so it is not used for the new file."""

    def main():
        near, far = tcp_pair()
        read_short(near, far)
        number = near.detach()
        other, other_far = socket.socketpair()
        os.dup2(other.fileno(), number)
        near.__init__(fileno=number)
        with near, far, other, other_far:
            reader = coro.spawn(near.recv, 100)
            while reader._status != "waiting":
                coro.yield_slice()
            other_far.send(b"a")
            assert reader.join(timeout=10) == b"a"

    coro.run(main)


# ---- the child of a fork ---------------------------------------------------------------------------------------------


def test_closing_in_a_forked_child_ends_the_waits_of_its_own_coros():
    out = run_script(
        None,
        """
        import os
        from grapeshot import coro

        def main():
            near, far = coro.socketpair()
            reader = coro.spawn(near.recv, 10)
            while reader._status != "waiting":
                coro.yield_slice()
            near.close()
            for _ in range(200):
                coro.yield_slice()
            try:
                print(type(reader.result()), flush=True)
            except Exception as error:
                print(type(error).__name__, flush=True)
            os._exit(0)

        coro.sock().close()
        if os.fork():
            os.wait()
        else:
            coro.run(main)
        """,
    )
    assert out.split() == ["ClosedError"]


def test_a_wait_of_the_parent_does_not_block_the_socket_in_the_child():
    out = run_script(
        None,
        """
        import os, threading, warnings
        from grapeshot import coro
        warnings.simplefilter("ignore")

        def child():
            reader = coro.spawn(near.recv, 10)
            for _ in range(3):
                coro.yield_slice()
            far.sendall(b"child")
            print(reader.join(), flush=True)

        def main():
            reader = coro.spawn(near.recv, 10)
            while reader._status != "waiting":
                coro.yield_slice()
            if not os.fork():
                thread = threading.Thread(target=coro.run, args=(child,))
                thread.start()
                thread.join()
                os._exit(0)
            os.wait()
            far.sendall(b"parent")
            print(reader.join(), flush=True)

        near, far = coro.socketpair()
        coro.run(main)
        """,
    )
    assert out.split() == ["b'child'", "b'parent'"]
