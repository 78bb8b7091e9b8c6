"""add_reader and add_writer, and descriptors that are closed and reused."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import socket
import weakref

import pytest
from support import Recorder, connected, iterations, until


async def test_reader_is_called_while_there_is_data(loop, pair):
    ours, theirs = pair
    seen = []
    loop.add_reader(ours, lambda: seen.append(ours.recv(1)))
    theirs.send(b"abc")
    await until(lambda: len(seen) == 3)
    assert seen == [b"a", b"b", b"c"]
    loop.remove_reader(ours)
    theirs.send(b"d")
    await asyncio.sleep(0.002)
    assert len(seen) == 3


async def test_arguments_and_descriptor_numbers(loop, pair):
    ours, theirs = pair
    seen = []

    def callback(*args):
        seen.append(args)
        loop.remove_reader(ours.fileno())

    theirs.send(b"x")
    loop.add_reader(ours.fileno(), callback, 1, "two", None)
    await until(lambda: seen)
    assert seen == [(1, "two", None)]


async def test_writer(loop, pair):
    ours, _ = pair
    seen = []

    def callback():
        seen.append("writable")
        if len(seen) == 3:
            loop.remove_writer(ours)

    loop.add_writer(ours, callback)
    await until(lambda: len(seen) == 3)
    await asyncio.sleep(0.001)
    assert len(seen) == 3


async def test_reader_and_writer_are_independent(loop, pair):
    ours, theirs = pair
    seen = []
    loop.add_reader(ours, lambda: (seen.append("read"), ours.recv(100)))
    loop.add_writer(ours, lambda: (seen.append("write"), loop.remove_writer(ours)))
    await until(lambda: seen == ["write"])
    theirs.send(b"x")
    await until(lambda: seen == ["write", "read"])
    loop.remove_reader(ours)


@pytest.mark.xfail_on(uvloop="it returns None")
async def test_remove_returns_whether_there_was_one(loop, pair):
    for add, remove in ((loop.add_reader, loop.remove_reader), (loop.add_writer, loop.remove_writer)):
        assert remove(pair[0]) is False
        add(pair[0], print)
        assert remove(pair[0]) is True
        assert remove(pair[0]) is False


async def test_remove_reader_keeps_the_writer(loop, pair):
    ours, theirs = pair
    seen = []
    theirs.send(b"x")
    loop.add_reader(ours, seen.append, "read")
    loop.add_writer(ours, lambda: (seen.append("write"), loop.remove_writer(ours)))
    loop.remove_reader(ours)
    await until(lambda: seen)
    await iterations(3)
    assert seen == ["write"]


async def test_a_second_reader_replaces_the_first(loop, pair):
    ours, theirs = pair
    seen = []
    loop.add_reader(ours, seen.append, "first")
    loop.add_reader(ours, lambda: (seen.append("second"), loop.remove_reader(ours)))
    theirs.send(b"x")
    await until(lambda: seen)
    assert seen == ["second"]


async def test_replaced_within_the_callback(loop, pair):
    ours, theirs = pair
    seen = []

    def first():
        seen.append("first")
        loop.add_reader(ours, second)

    def second():
        seen.append("second")
        loop.remove_reader(ours)

    loop.add_reader(ours, first)
    theirs.send(b"x")
    await until(lambda: len(seen) == 2)
    assert seen == ["first", "second"]


async def test_remove_of_a_descriptor_that_was_never_added(loop, pair):
    assert not loop.remove_reader(pair[0])
    assert not loop.remove_writer(pair[0])
    assert not loop.remove_reader(100_000)


@pytest.mark.parametrize("thing", ["a string", None, 1.5, object(), -1])
@pytest.mark.parametrize("method", ["add_reader", "add_writer"])
async def test_objects_that_are_not_descriptors(loop, method, thing):
    with pytest.raises((ValueError, TypeError)):
        getattr(loop, method)(thing, print)


async def test_errors_for_arguments_that_are_not_descriptors(loop):
    with pytest.raises(ValueError, match="Invalid file object"):
        loop.add_reader("a string", print)
    with pytest.raises(ValueError, match="Invalid file descriptor"):
        loop.add_reader(-1, print)


@pytest.mark.skip_on(uvloop="libuv aborts the process for such descriptors")
async def test_a_regular_file_cannot_be_watched(loop, tmp_path):
    with open(tmp_path / "file", "w+b") as file, pytest.raises(PermissionError):
        loop.add_reader(file, print)


async def test_a_closed_descriptor_is_an_error(loop):
    ours, theirs = socket.socketpair()
    fd = ours.fileno()
    ours.close()
    theirs.close()
    with pytest.raises(OSError, match=r"Bad file descriptor|bad file"):
        loop.add_reader(fd, print)


async def test_the_transports_descriptor_is_refused(loop):
    transport, _, peer = await connected(loop)
    with peer:
        fd = transport.get_extra_info("socket").fileno()
        for method in (loop.add_reader, loop.add_writer):
            with pytest.raises(RuntimeError, match="is used by transport"):
                method(fd, print)
        for method in (loop.remove_reader, loop.remove_writer):
            with pytest.raises(RuntimeError, match="is used by transport"):
                method(fd)
        transport.close()


async def test_a_hangup_is_readable(loop, pair):
    ours, theirs = pair
    seen = []
    loop.add_reader(ours, lambda: (seen.append(ours.recv(10)), loop.remove_reader(ours)))
    theirs.close()
    await until(lambda: seen)
    assert seen == [b""]


async def test_pipes(loop):
    read_end, write_end = os.pipe()
    try:
        os.set_blocking(read_end, False)
        seen = []
        loop.add_reader(read_end, lambda: seen.append(os.read(read_end, 100)))
        loop.add_writer(write_end, lambda: (os.write(write_end, b"x"), loop.remove_writer(write_end)))
        await until(lambda: seen)
        assert seen == [b"x"]
        loop.remove_reader(read_end)
    finally:
        os.close(read_end)
        os.close(write_end)


# ---------------------------------------------------------------- file objects that are closed before they are removed


@pytest.mark.xfail_on(uvloop="it returns None")
async def test_an_object_that_was_closed_before_it_is_removed(loop):
    for add, remove in ((loop.add_reader, loop.remove_reader), (loop.add_writer, loop.remove_writer)):
        ours, theirs = socket.socketpair()
        with theirs:
            add(ours, print)
            ours.close()
            assert remove(ours) is True
            with pytest.raises(ValueError, match="Invalid file descriptor: -1"):
                remove(ours)


@pytest.mark.xfail_on(asyncio="EBADF: it passes the closed descriptor to epoll", uvloop="it returns None")
async def test_a_reader_and_a_writer_of_a_closed_object(loop):
    ours, theirs = socket.socketpair()
    with theirs:
        loop.add_reader(ours, print)
        loop.add_writer(ours, print)
        ours.close()
        assert loop.remove_reader(ours) is True
        assert loop.remove_reader(ours) is False
        assert loop.remove_writer(ours) is True


@pytest.mark.xfail_on(uvloop="it returns None")
async def test_the_other_direction_of_a_closed_object(loop):
    ours, theirs = socket.socketpair()
    with theirs:
        loop.add_writer(ours, print)
        ours.close()
        assert loop.remove_reader(ours) is False
        assert loop.remove_writer(ours) is True


@pytest.mark.parametrize("method", ["add_reader", "remove_reader", "add_writer", "remove_writer"])
async def test_a_closed_object_that_was_never_added(loop, method):
    ours, theirs = socket.socketpair()
    with theirs:
        getattr(loop, method.replace("remove", "add"))(ours.fileno(), print)  # the loop gets only the number
        number = ours.fileno()
        ours.close()
        with pytest.raises(ValueError, match="Invalid file descriptor: -1"):
            getattr(loop, method)(ours, *([print] if method.startswith("add") else []))
        getattr(loop, method.replace("add", "remove"))(number)


async def test_a_closed_object_that_is_added_again(loop):
    """The reader of a closed object may be replaced, but no writer may be added, because the kernel may have given the
    object's number to another file.
    """
    ours, theirs = socket.socketpair()
    loop.add_reader(ours, print)
    ours.close()
    theirs.close()
    await iterations(2)
    loop.add_reader(ours, print)
    with pytest.raises((OSError, ValueError)):
        loop.add_writer(ours, print)
    for remove in (loop.remove_reader, loop.remove_writer):
        try:
            remove(ours)
        except ValueError:
            pass  # no loop has a writer of the closed object, and only grapeshot still finds its reader


@pytest.mark.skip_on(uvloop="libuv aborts the process")
async def test_a_closed_file_object(loop):
    reader, writer = os.pipe()
    file = open(reader, "rb", buffering=0)
    loop.add_reader(file, print)
    file.close()
    with pytest.raises(ValueError, match="Invalid file object"):
        loop.remove_reader(file)
    assert loop._remove_reader(file) is True
    os.close(writer)


async def test_the_error_of_fileno(loop):
    class File:
        def __init__(self, error):
            self.error = error

        def fileno(self):
            raise self.error

    for error in (TypeError, AttributeError, ValueError):
        for method in (loop.remove_reader, loop.remove_writer):
            with pytest.raises(ValueError, match="Invalid file object"):
                method(File(error))
    with pytest.raises(LookupError):
        loop.remove_reader(File(LookupError))


async def test_a_registered_object_is_kept(loop):
    ours, theirs = socket.socketpair()
    with theirs:
        reference = weakref.ref(ours)
        loop.add_reader(ours, print)
        del ours
        gc.collect()
        assert reference() is not None
        kept = reference()
        loop.remove_reader(kept)
        kept.close()
        del kept
        gc.collect()
        assert reference() is None


@pytest.mark.skip_on(
    asyncio="the selectors module believes that the number is still registered with the kernel",
    uvloop="libuv aborts the process when a watched descriptor is reused",
)
@pytest.mark.parametrize("taker", ["reader", "writer", "transport", "operation"])
async def test_a_removal_that_comes_after_the_number_was_reused(loop, taker):
    """anyio closes its socket first, and removes the callback in the next iteration."""
    # The loop opens its own descriptors now. Otherwise one of them could get the number of the closed socket.
    await iterations(1)
    ours, theirs = socket.socketpair()
    loop.add_reader(ours, print, "stale")
    loop.add_writer(ours, print, "stale")
    number = ours.fileno()
    ours.close()
    again, other = socket.socketpair()
    assert again.fileno() == number
    again.setblocking(False)
    seen = []
    if taker == "reader":
        loop.add_reader(again, lambda: seen.append(again.recv(10)))
    elif taker == "writer":
        loop.add_writer(again, lambda: (seen.append(b"x"), loop.remove_writer(again)))
    elif taker == "transport":
        transport, protocol = await loop.connect_accepted_socket(Recorder, again)
        seen = protocol.data
    else:
        task = asyncio.ensure_future(loop.sock_recv(again, 10))
        task.add_done_callback(lambda task: seen.append(task.result()))
        del task
        await asyncio.sleep(0)
    assert loop.remove_reader(ours) is False
    assert loop.remove_writer(ours) is False
    other.send(b"x")
    await until(lambda: seen)
    assert seen in ([b"x"], b"x")
    if taker == "transport":
        transport.close()
        await until(lambda: protocol.is_lost)
    else:
        loop.remove_reader(again)
    for sock in (again, other, theirs):
        sock.close()


@pytest.mark.skip_on(
    asyncio="the selectors module believes that the number is still registered with the kernel",
    uvloop="libuv aborts the process when a watched descriptor is reused",
)
async def test_closed_while_registered_then_reused(loop):
    """The kernel forgets a closed descriptor. The same number may come back and must work like a new one."""
    # The loop opens its own descriptors now. Otherwise one of them could get the number of the closed socket.
    await iterations(1)
    seen = []
    for round_number in range(20):
        ours, theirs = socket.socketpair()
        loop.add_reader(ours, seen.append, ("stale", round_number))
        fd = ours.fileno()
        ours.close()
        theirs.close()
        await iterations(2)
        again, other = socket.socketpair()
        assert again.fileno() == fd
        loop.add_reader(again, lambda n=round_number, s=again: seen.append(("fresh", n, s.recv(10))))
        other.send(b"x")
        await until(lambda n=round_number: ("fresh", n, b"x") in seen)
        loop.remove_reader(again)
        again.close()
        other.close()
    assert [entry for entry in seen if entry[0] == "stale"] == []


@pytest.mark.skip_on(uvloop="libuv aborts the process when a watched descriptor is reused")
async def test_a_stale_event_does_not_reach_a_reused_descriptor(loop):
    """Two descriptors become ready in one iteration; the callback of one closes the other and reuses its number."""
    for _ in range(20):
        sockets = [socket.socketpair() for _ in range(2)]
        seen, replaced = [], []

        def callback(mine, other, seen=seen, replaced=replaced, sockets=sockets):
            loop.remove_reader(sockets[mine][0])
            seen.append(mine)
            victim = sockets[other][0]
            fd = victim.fileno()
            loop.remove_reader(victim)
            victim.close()
            fresh = socket.socketpair()
            assert fresh[0].fileno() == fd
            replaced.extend(fresh)
            loop.add_reader(fresh[0], seen.append, "stale event")

        loop.add_reader(sockets[0][0], callback, 0, 1)
        loop.add_reader(sockets[1][0], callback, 1, 0)
        for _, theirs in sockets:
            theirs.send(b"x")
        await until(lambda seen=seen: seen)
        await iterations(5)
        assert len(seen) == 1
        assert "stale event" not in seen
        loop.remove_reader(replaced[0])
        for sock in [*replaced, *(sock for each in sockets for sock in each)]:
            sock.close()


async def test_the_callback_removes_another_that_is_ready_too(loop):
    pairs = [socket.socketpair() for _ in range(10)]
    seen = []

    def callback(index):
        seen.append(index)
        for ours, _ in pairs:
            loop.remove_reader(ours)

    for index, (ours, theirs) in enumerate(pairs):
        theirs.send(b"x")
        loop.add_reader(ours, callback, index)
    await until(lambda: seen)
    await iterations(3)
    assert len(seen) == 1
    for ours, theirs in pairs:
        ours.close()
        theirs.close()


async def test_random_add_and_remove(loop):
    rng = random.Random(7)
    pairs = [socket.socketpair() for _ in range(30)]
    added: set[int] = set()
    wrong = []

    def callback(index):
        if index not in added:
            wrong.append(index)
        pairs[index][0].recv(1)

    for ours, theirs in pairs:
        ours.setblocking(False)
        theirs.setblocking(False)
    for _ in range(2000):
        index = rng.randrange(30)
        match rng.randrange(4):
            case 0:
                loop.add_reader(pairs[index][0], callback, index)
                added.add(index)
            case 1:
                loop.remove_reader(pairs[index][0])
                added.discard(index)
            case 2:
                pairs[index][1].send(b"x")
            case 3:
                await asyncio.sleep(0)
    for index in added:
        loop.remove_reader(pairs[index][0])
    for ours, theirs in pairs:
        ours.close()
        theirs.close()
    assert wrong == []


def test_close_with_registered_descriptors(new_loop, pair):
    loop = new_loop()
    loop.add_reader(pair[0], print)
    loop.add_writer(pair[1], print)
    loop.close()
    pair[0].send(b"still ours")
    assert pair[1].recv(100) == b"still ours"
