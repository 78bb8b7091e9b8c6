"""Cycles through handles, loops, transports and protocols are collected. Calls leave reference counts as they were."""

from __future__ import annotations

import asyncio
import gc
import socket
import sys
import weakref

import pytest
from support import Recorder, connected, iterations, loop_factory, run_script, until


class Holder:
    """An object to build cycles with."""

    def method(self, *_args):
        raise AssertionError("never runs")


def collected(reference):
    for _ in range(3):
        gc.collect()
    return reference() is None


@pytest.mark.parametrize("schedule", ["call_soon", "call_later", "call_at", "call_soon_threadsafe"])
def test_cycle_through_a_handle(loop, schedule):
    holder = Holder()
    if schedule in ("call_later", "call_at"):
        holder.handle = getattr(loop, schedule)(loop.time() + 1000, holder.method, holder)
    else:
        holder.handle = getattr(loop, schedule)(holder.method, holder)
    holder.handle.cancel()
    loop.call_soon(loop.stop)
    loop.run_forever()
    reference = weakref.ref(holder)
    del holder
    assert collected(reference)


@pytest.mark.parametrize("count", [0, 1, 2, 4, 5, 9])
def test_references_to_arguments_come_back(loop, count):
    things = [object() for _ in range(count)]
    callback = Holder().__repr__
    before = [sys.getrefcount(thing) for thing in things]
    before_callback = sys.getrefcount(callback)
    for _ in range(100):
        loop.call_soon(callback, *things) if not count else loop.call_soon(print, *things).cancel()
        loop.call_later(1000, print, *things).cancel()
        loop.call_soon_threadsafe(id, things)
    loop.run_until_complete(iterations(3))
    gc.collect()
    # asyncio leaves a few cancelled timers in its heap, without callback and arguments
    assert [sys.getrefcount(thing) for thing in things] == before
    assert sys.getrefcount(callback) == before_callback


def test_references_of_callbacks_that_ran(loop):
    thing, context = Holder(), __import__("contextvars").copy_context()
    before = sys.getrefcount(thing), sys.getrefcount(context)
    for _ in range(100):
        loop.call_soon(id, thing, context=context)
        loop.call_later(0, id, thing, context=context)
        loop.call_soon_threadsafe(id, thing, context=context)
    loop.run_until_complete(asyncio.sleep(0.002))
    loop.run_until_complete(iterations(2))
    assert (sys.getrefcount(thing), sys.getrefcount(context)) == before


def test_references_of_callbacks_that_failed(loop, reported):
    thing = Holder()
    before = sys.getrefcount(thing)

    def fails(_thing):
        raise LookupError

    for _ in range(10):
        loop.call_soon(fails, thing)
    loop.run_until_complete(iterations(2))
    assert len(reported) == 10
    reported.clear()
    gc.collect()
    assert sys.getrefcount(thing) == before


def test_a_closed_loop_drops_everything(new_loop):
    loop, holder = new_loop(), Holder()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        loop.call_soon(holder.method)
        loop.call_later(1000, holder.method, holder)
        loop.call_soon_threadsafe(holder.method)
        loop.add_reader(ours, holder.method, holder)
        loop.add_writer(ours, holder.method, holder)
        loop.close()
    reference = weakref.ref(holder)
    del holder
    assert collected(reference)


def test_a_loop_in_a_cycle_with_its_callbacks(loop_kind, _audit):
    loop = loop_factory(loop_kind)()

    class Attached(Holder):
        pass

    holder = Attached()
    holder.loop = loop
    holder.handle = loop.call_later(1000, holder.method, loop)
    loop.set_exception_handler(holder.method)
    loop.close()
    reference = weakref.ref(holder)
    del holder, loop
    assert collected(reference)


@pytest.mark.xfail_on(uvloop="it keeps the descriptors")
def test_an_open_loop_is_collected(loop_kind):
    out = run_script(
        loop_kind,
        """
        import gc, os, socket, weakref
        class Holder:
            def method(self): pass
        def fds():
            return len(os.listdir("/dev/fd"))
        new_event_loop().close()
        watched = [end for _ in range(2) for end in socket.socketpair()]
        before = fds()
        for _ in range(3):
            loop, holder = new_event_loop(), Holder()
            holder.loop = loop
            loop.call_soon(holder.method)
            loop.call_later(1000, holder.method)
            for sock in watched:
                loop.add_reader(sock, holder.method)
            reference = weakref.ref(holder)
            del loop, holder
            gc.collect()
            assert reference() is None
        print(fds() - before)
        """,
        flags=("-W", "ignore"),
    )
    assert out.strip() == "0"


@pytest.mark.only_on("asyncio", "grapeshot")
@pytest.mark.parametrize("flags", [(), ("-X", "dev")], ids=["plain", "dev"])
@pytest.mark.parametrize(
    "used",
    [
        "pass",
        "loop.run_until_complete(asyncio.sleep(0))",
        "loop.call_later(1000, print)",
        "loop.run_until_complete(loop.run_in_executor(None, id, 1))",
        "loop.add_signal_handler(signal.SIGUSR1, print)",
        "a, b = socket.socketpair(); loop.add_reader(a.detach(), print)",
        "loop.set_exception_handler(lambda *_: print('reported'))",
    ],
    ids=["new", "has run", "timer", "executor", "signal handler", "reader", "exception handler"],
)
def test_an_open_loop_at_the_end_of_the_interpreter(loop_kind, used, flags):
    """At the end of the interpreter, a loop that is still the current loop outlives the modules. Freeing it then prints
    nothing, except a ResourceWarning in development mode.
    """
    out = run_script(
        loop_kind,
        f"""
        import asyncio, os, signal, socket, warnings
        os.dup2(1, 2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loop = new_event_loop()
            asyncio.set_event_loop(loop)
        {used}
        del loop
        """,
        flags=flags,
    )
    said = [line for line in out.splitlines() if not (flags and "ResourceWarning" in line)]
    assert said == []


async def test_protocol_and_transport_after_close(loop):
    transport, protocol, peer = await connected(loop)
    with peer:
        protocol.cycle = (transport, protocol)
        transport.close()
        await until(lambda lost=protocol.lost_with: lost)
        references = weakref.ref(protocol), weakref.ref(transport)
        del protocol, transport
        await iterations(3)
        assert collected(references[0])
        assert collected(references[1])


async def test_connections_leave_nothing(loop):
    server = await loop.create_server(Recorder, "127.0.0.1", 0)
    address = server.sockets[0].getsockname()

    async def visit():
        transport, protocol = await loop.create_connection(Recorder, *address)
        transport.write(b"hello")
        transport.close()
        await until(lambda: protocol.is_lost)

    def alive():
        return [
            thing
            for thing in gc.get_objects()
            if issubclass(type(thing), (asyncio.BaseTransport, asyncio.BaseProtocol))
        ]

    for _ in range(50):
        await visit()
    gc.collect()
    await until(lambda: gc.collect() >= 0 and not alive(), "all transports and protocols to go")
    server.close()
    await server.wait_closed()


async def test_an_aborted_connection_with_data_in_its_buffer(loop):
    transport, protocol, peer = await connected(loop, small=True)
    with peer:
        payload = bytearray(1 << 20)
        transport.write(payload)
        assert transport.get_write_buffer_size() > 0
        transport.abort()
        await until(lambda lost=protocol.lost_with: lost)
        reference = weakref.ref(protocol)
        del protocol, transport
        await iterations(3)
        assert collected(reference)
    payload.append(1)  # fails if a view of the payload still exists


@pytest.mark.xfail_on(asyncio="a view of the data is kept", when=sys.version_info >= (3, 12))
@pytest.mark.xfail_on(uvloop="a view of the data is kept")
async def test_a_written_bytearray_can_be_changed(loop):
    """write() copies the data, so the caller may reuse its buffer at once."""
    transport, protocol, peer = await connected(loop, small=True)
    with peer:
        expected = bytearray()
        scratch = bytearray(1000)
        for number in range(200):
            scratch[:] = bytes([number % 251]) * 1000
            expected += scratch
            transport.write(scratch)
            scratch[:] = b"!" * 1000
        scratch.append(1)
        is_same = await peer.read_exactly(len(expected)) == expected
        assert is_same  # compared here, so that pytest does not print a difference of 200 KB
        transport.close()
        await until(lambda: protocol.is_lost)


async def test_traversal_of_a_live_transport(loop):
    transport, protocol, peer = await connected(loop)
    with peer:
        transport.write(b"x")
        loop.call_later(1000, protocol.data_received, b"").cancel()
        for _ in range(3):
            gc.collect()
        assert transport.get_protocol() is protocol
        assert await peer.read_exactly(1) == b"x"
        assert gc.get_referents(transport) is not None
        transport.close()
        await until(lambda: protocol.is_lost)


def test_collecting_inside_every_callback(loop):
    seen = []

    async def main():
        transport, protocol, peer = await connected(loop)
        with peer:
            for number in range(20):
                loop.call_soon(lambda: gc.collect(0))
                loop.call_later(0, lambda n=number: (gc.collect(0), seen.append(n)))
                transport.write(b"x")
            await peer.read_exactly(20)
            await until(lambda: len(seen) == 20)
            transport.close()
            await until(lambda: protocol.is_lost)

    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        loop.run_until_complete(main())
    finally:
        gc.set_threshold(*threshold)
    assert sorted(seen) == list(range(20))


def test_errors_of_a_loop_that_does_not_run_leave_nothing(loop):
    def refuse():
        with pytest.raises(TypeError):
            loop.set_task_factory(3)

    for _ in range(50):
        refuse()
    gc.collect()
    before = sys.getallocatedblocks()
    for _ in range(1000):
        refuse()
    gc.collect()
    assert sys.getallocatedblocks() - before < 500
