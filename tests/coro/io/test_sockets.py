"""The socket objects: types, subclasses, ways to create them, garbage collection; and how they resolve names."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import socket
import threading
import weakref

import pytest
from support import HOST, coro_is_available, until_waiting

import grapeshot

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import _core, coro


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


def test_the_class_itself_defines_the_native_methods():
    for name in ("recv", "recv_into", "send", "sendall", "recv_exact", "accept"):
        assert vars(coro.sock)[name].__objclass__ is coro.sock

    class Shouting(coro.sock):
        def recv(self, *args):
            return super().recv(*args).upper()

    _core._coro_bind_socket_methods(Shouting)
    near, far = socket.socketpair()
    with far, Shouting(fileno=near.detach()) as sock:
        far.send(b"abc")
        assert sock.recv(10) == b"ABC"
    for other in (socket.socket, int):
        with pytest.raises(TypeError, match="native socket type"):
            _core._coro_bind_socket_methods(other)


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
                until_waiting(reader)
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


def test_a_socket_that_is_not_closed_causes_a_warning(world):
    if world.kind == "threads":
        pytest.skip("threads use the same socket objects as coros")
    with pytest.warns(ResourceWarning, match="unclosed"):
        world.socket()


def test_an_object_that_was_never_opened():
    unopened = coro.sock.__new__(coro.sock)
    with pytest.raises(OSError, match="Bad file descriptor"):
        unopened.recv(1)
    assert unopened.fileno() == -1


def test_asyncio_uses_them():
    """With a timeout of 0, asyncio treats sockets of coros as ordinary sockets."""

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


def test_names_are_resolved(monkeypatch):
    from grapeshot.coro import _dns

    asked = []

    def look_up(question):
        asked.append(question[1][0])
        return [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", (HOST, 0))]

    monkeypatch.setattr(_dns, "look_up", look_up)

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
    assert asked == [b"name.test"] * 4


def test_a_replaced_resolver_is_called_in_another_thread(monkeypatch):
    from grapeshot.coro import _dns

    threads = []

    def replacement(host, *args):
        threads.append(threading.get_ident())
        return [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", (HOST, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", replacement)

    def main():
        with coro.tcp_sock() as listener:
            listener.bind(("name.test", 0))
            assert listener.getsockname()[0] == HOST
        assert _dns.getaddrinfo("name.test", 1)[0][4] == (HOST, 0)

    coro.run(main)
    assert len(threads) == 2
    assert threading.get_ident() not in threads


def test_address_literals_need_no_lookup(monkeypatch):
    from grapeshot.coro import _dns

    monkeypatch.setattr(_dns, "look_up", None)
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


@pytest.mark.parametrize("flags", [(), (0,)])
def test_data_that_an_interrupted_read_has_put_back_comes_first(flags):
    def receive_into(sock, size):
        buffer = bytearray(size)
        return bytes(buffer[: sock.recv_into(buffer, size, *flags)])

    def main():
        near, far = coro.socketpair()
        with near, far:
            reader = coro.spawn(near.recv_exact, 10)
            until_waiting(reader)
            far.sendall(b"hello")
            for _ in range(3):
                coro.yield_slice()
            reader.raise_exception(InterruptedError)
            with pytest.raises(InterruptedError):
                reader.join()
            far.sendall(b", world")
            return near.recv(3, *flags), receive_into(near, 100), near.recv(100, *flags)

    assert coro.run(main) == (b"hel", b"lo", b", world")


def _into(method, *args, **kwargs):
    """Call a method that fills a buffer. Return what it returned, and the buffer."""
    buffer = bytearray(4)
    return method(buffer, *args, **kwargs), bytes(buffer)


def _into_two(sock, *args):
    buffers = [bytearray(1), memoryview(bytearray(4))[::1]]
    return sock.recvmsg_into(buffers, *args), [bytes(buffer) for buffer in buffers]


CALLS = {
    "recv, peek": lambda sock: (sock.recv(3, socket.MSG_PEEK), sock.recv(3), sock.recv(9)),
    "recv_into, flags": lambda sock: _into(sock.recv_into, flags=socket.MSG_PEEK),
    "recvfrom": lambda sock: (sock.recvfrom(3), sock.recvfrom(9, socket.MSG_PEEK)),
    "recvfrom_into": lambda sock: (_into(sock.recvfrom_into), _into(sock.recvfrom_into, 3, socket.MSG_PEEK)),
    "recvmsg": lambda sock: (sock.recvmsg(3), sock.recvmsg(9, 100, socket.MSG_PEEK)),
    "recvmsg_into": lambda sock: (_into_two(sock, 0, socket.MSG_PEEK), _into_two(sock), sock.recv(9, 0)),
    "nothing": lambda sock: (sock.recvfrom(0), sock.recvmsg(0), sock.recvmsg_into([]), sock.recv(9)),
    "an iterator": lambda sock: (sock.recvmsg_into(iter([bytearray(2)])), sock.recv(9)),
    "all": lambda sock: (sock.recv(12, socket.MSG_PEEK), sock.recv(12, socket.MSG_WAITALL)),
    "at once": lambda sock: (sock.recv(3, socket.MSG_DONTWAIT), sock.recvfrom(9, socket.MSG_DONTWAIT)),
    "negative": lambda sock: sock.recv(-1, socket.MSG_PEEK),
    "a huge length": lambda sock: sock.recvfrom(2**70),
    "a text": lambda sock: sock.recvfrom("1"),
    "too small": lambda sock: sock.recv_into(bytearray(2), 3, socket.MSG_PEEK),
    "read-only": lambda sock: sock.recvmsg_into([b"read-only"]),
    "bad flags": lambda sock: sock.recvmsg(9, 0, "flags"),
    "a bad length": lambda sock: sock.recvmsg(5, -1),
    "closed": lambda sock: (sock.close(), sock.recvfrom(5)),
}


def _outcome(call, sock):
    """Return what the call returns. If it raises an error, return the error's type, its text and the unread data."""
    try:
        return call(sock)
    except Exception as exc:
        return type(exc), str(exc), sock.fileno() >= 0 and sock.recv(99)


@pytest.mark.parametrize("is_patched", [False, True], ids=["coro", "patched"])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_each_receiving_method_returns_data_that_was_put_back(call, is_patched):
    near, far = socket.socketpair()
    with near, far:
        far.sendall(b"hello, world")
        expected = _outcome(call, near)

    def main():
        from grapeshot.coro._patching._socket import socket as patched_socket

        plain, far = socket.socketpair()
        with (patched_socket if is_patched else coro.sock)(fileno=plain.detach()) as near, far:
            far.sendall(b"hello, world")
            # Read all 12 bytes and put them back. In the case "all", read and put back only 5 bytes: 7 are left in the
            # kernel.
            near._put_back(near.recv(5 if call is CALLS["all"] else 12))
            return _outcome(call, near)

    assert coro.run(main) == expected


def test_the_address_of_a_unix_peer(tmp_path):
    path = str(tmp_path / "socket")

    def main():
        listener = coro.sock(socket.AF_UNIX, socket.SOCK_STREAM)
        client = coro.sock(socket.AF_UNIX, socket.SOCK_STREAM)
        with listener, client:
            listener.bind(path)
            listener.listen()
            client.connect(path)
            client._put_back(b"data")
            return client.recvfrom(1), client.recvmsg(1), client.recvfrom_into(bytearray(1))

    assert coro.run(main) == ((b"d", path), (b"a", [], 0, path), (1, path))


def test_other_coros_run_while_one_waits():
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
