"""Arguments of waiting calls are converted once, before the wait. Wrong arguments cause errors before the wait, too."""

from __future__ import annotations

import array
import os
import socket

import pytest
from support import coro_is_available, until_waiting

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")


def fill(sock):
    """Send until nothing more fits; return the number of bytes sent."""
    sock.settimeout(0)
    count = 0
    with pytest.raises(BlockingIOError):
        while True:
            count += sock.send(bytes(4096))
    sock.settimeout(None)
    return count


def spawn_waiting(world, function, *args):
    """Start a function in a coro or a thread. With a coro, return when it waits; with a thread, return at once."""
    made = world.spawn(function, *args)
    if world.kind == "coros":
        until_waiting(made)
    return made


def receive(sock, count):
    """Receive this many bytes, with the descriptors that accompany them."""
    data, numbers = b"", array.array("i")
    while len(data) < count:
        part, messages, _, _ = sock.recvmsg(count - len(data), socket.CMSG_SPACE(numbers.itemsize))
        assert part
        data += part
        for level, kind, payload in messages:
            assert (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
            numbers.frombytes(payload)
    return data, list(numbers)


class Listing:
    """An iterable that yields its items only once."""

    def __init__(self, *items):
        self._items = list(items)

    def __iter__(self):
        while self._items:
            yield self._items.pop(0)


@pytest.mark.parametrize("once", [lambda *items: iter(items), Listing, lambda *items: (x for x in items)])
def test_sendmsg_with_iterables_that_yield_their_items_only_once(world, once):
    def main():
        near, far = world.pair()
        reader, writer = os.pipe()
        with near, far:
            count = fill(near)
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [reader]))
            sender = spawn_waiting(world, near.sendmsg, once(b"hello ", bytearray(b"world")), once(rights))
            data, numbers = receive(far, count + 11)
            assert sender.join() == 11
            assert data[count:] == b"hello world"
            assert len(numbers) == 1
            assert os.path.sameopenfile(numbers[0], reader)
            for number in (reader, writer, *numbers):
                os.close(number)

    world.run(main)


def test_recvmsg_into_with_an_iterator(world):
    def main():
        near, far = world.pair()
        with near, far:
            first, second = bytearray(3), bytearray(10)
            receiver = spawn_waiting(world, lambda: near.recvmsg_into(iter([first, second]))[0])
            far.sendall(b"abcdefg")
            assert receiver.join() == 7
            assert first + second[:4] == b"abcdefg"

    world.run(main)


def test_numbers_and_ancillary_data_are_read_once(world):
    class Number:
        def __init__(self, value):
            self.value, self.count = value, 0

        def __index__(self):
            self.count += 1
            assert self.count == 1
            return self.value

    def main():
        near, far = world.pair()
        with near, far:
            for call in (near.recv, near.recvfrom, near.recvmsg):
                receiver = spawn_waiting(world, call, Number(100))
                far.sendall(b"x")
                received = receiver.join()
                assert (received if isinstance(received, bytes) else received[0]) == b"x"
            for call in (near.recv_into, near.recvfrom_into):
                receiver = spawn_waiting(world, call, bytearray(10), Number(5))
                far.sendall(b"x")
                receiver.join()
            # The lists and the array are changed while the call waits, which has no effect.
            count = fill(near)
            reader, writer = os.pipe()
            numbers, buffers = array.array("i", [reader]), [b"ab"]
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers)]
            sender = spawn_waiting(world, near.sendmsg, buffers, rights)
            if world.kind == "coros":
                numbers[0] = -1
                buffers.append(b"cd")
                rights.clear()
            data, passed = receive(far, count + 2)
            assert (sender.join(), data[count:], len(passed)) == (2, b"ab", 1)
            for number in (reader, writer, *passed):
                os.close(number)

    world.run(main)


def test_the_buffer_of_a_waiting_call_cannot_be_resized(world):
    if world.kind != "coros":
        pytest.skip("the test cannot find out whether a thread waits")

    def main():
        near, far = world.tcp_pair()
        with near, far:
            for call in (near.recv_into, near.recvfrom_into, lambda buffer: near.recvmsg_into([buffer])):
                buffer = bytearray(10)
                receiver = spawn_waiting(world, call, buffer)
                with pytest.raises(BufferError):
                    buffer.clear()
                far.sendall(b"data")
                receiver.join()
                assert buffer[:4] == b"data"
                buffer.clear()

    world.run(main)


WRONG = {
    "recv": [(-1,), ("x",), (), (1.5,), (1, "x")],
    "recv_into": [(b"abc",), (bytearray(3), 10), (bytearray(3), -1), ("x",), (), (bytearray(1), 1, "x")],
    "recvfrom": [(-1,), ("x",)],
    "recvfrom_into": [(b"abc",), (bytearray(3), 10), ("x",)],
    "recvmsg": [(-1,), (1, -1), (1, 1, "x"), ()],
    "recvmsg_into": [(5,), ([b"abc"],), ([bytearray(1)], -1), (["x"],)],
    "send": [("x",), (), (b"x", "y")],
    "sendall": [("x",), (), (b"x", "y")],
    "sendto": [("x", b""), (b"x",), (b"x", "y", b"")],
    "sendmsg": [(5,), (["x"],), ([b"x"], 5), ([b"x"], [(1, 2)]), ([b"x"], [(1, 2, "x")]), ([b"x"], [], "x")],
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_raise_the_errors_of_cpython_at_once(world, name):
    def main():
        near, far = world.tcp_pair()
        with near, far, socket.socket() as plain:
            for arguments in WRONG[name]:
                # After the next three lines, any call on `near` with right arguments has to wait: the short read has
                # emptied the receive buffer (in a coro, `near` remembers that), and `fill` has filled the send buffer.
                far.sendall(b"x")
                assert near.recv(100) == b"x"
                fill(near)
                with pytest.raises((TypeError, ValueError)) as expected:
                    getattr(plain, name)(*arguments)
                with pytest.raises((TypeError, ValueError)) as raised:
                    getattr(near, name)(*arguments)
                assert (raised.type, str(raised.value)) == (expected.type, str(expected.value))
                while True:
                    far.settimeout(0)
                    try:
                        far.recv(1 << 20)
                    except BlockingIOError:
                        break
                far.settimeout(None)

    world.run(main)


def test_an_iterator_that_raises(world):
    def items():
        yield b"x"
        raise LookupError("no more")

    def main():
        near, far = world.pair()
        with near, far:
            for call in (near.sendmsg, near.recvmsg_into):
                # Instead of the LookupError, plain sockets of CPython 3.14 raise a TypeError whose text says that the
                # iterator is not iterable.
                with pytest.raises((LookupError, TypeError) if world.kind == "plain" else LookupError):
                    call(items())

    world.run(main)
