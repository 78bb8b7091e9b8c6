"""Methods take the same arguments as asyncio's, by position and by name, and show them to `inspect` and `help`."""

from __future__ import annotations

import asyncio
import inspect
import socket
from asyncio import selector_events, sslproto, unix_events

import pytest

from grapeshot import _core

TYPES = {name: kind for name, kind in vars(_core).items() if isinstance(kind, type)}
NATIVE = [
    (kind, method)
    for kind, made in TYPES.items()
    for method, value in vars(made).items()
    if inspect.ismethoddescriptor(value) and not method.startswith("__")
]
# Native types, and the types of asyncio that they replace.
ASYNCIO = {
    "Loop": asyncio.SelectorEventLoop,
    "Handle": asyncio.Handle,
    "TimerHandle": asyncio.TimerHandle,
    "StreamTransport": selector_events._SelectorSocketTransport,
    "DatagramTransport": selector_events._SelectorDatagramTransport,
    "SSLTransport": sslproto._SSLProtocolTransport,
    "ReadPipeTransport": unix_events._UnixReadPipeTransport,
    "WritePipeTransport": unix_events._UnixWritePipeTransport,
}
OTHERWISE = {
    ("Loop", "create_task"): "asyncio's keywords depend on the version; grapeshot passes all keywords to the task",
    ("Loop", "sock_recv"): "the second parameter is named as in asyncio's documentation, not as in its code",
    ("Loop", "_add_reader"): "a private method; asyncio's has a parameter `context` from 3.15 on",
    ("Loop", "_add_writer"): "a private method; asyncio's has a parameter `context` from 3.15 on",
}


def parameters(method):
    """Return the parameters except `self`, which would always differ: native methods take it by position only."""
    return [(each.name, each.kind, each.default) for each in list(inspect.signature(method).parameters.values())[1:]]


@pytest.mark.parametrize(("kind", "name"), NATIVE)
def test_a_native_method_shows_its_parameters_and_help(kind, name):
    method = getattr(TYPES[kind], name)
    parameters(method)
    assert method.__name__ == name
    assert method.__doc__.endswith((".", ":", "\n"))
    assert not method.__doc__.startswith(f"{name}(")


@pytest.mark.parametrize(("kind", "name"), [row for row in NATIVE if row[0] in ASYNCIO and row not in OTHERWISE])
def test_the_parameters_are_the_same_as_asyncios(kind, name):
    theirs = getattr(ASYNCIO[kind], name, None)
    if theirs is None:
        pytest.skip("asyncio has no such method")
    assert parameters(getattr(TYPES[kind], name)) == parameters(theirs)


def test_the_tables_name_only_native_types_and_methods():
    assert {name for name, _ in NATIVE} >= ASYNCIO.keys()
    assert {*OTHERWISE} <= {*NATIVE}


async def test_arguments_by_name(loop):
    calls = []
    loop.call_soon(callback=lambda: calls.append("soon"))
    loop.call_soon(callback=lambda: calls.append("soon"), context=None)
    loop.call_soon_threadsafe(callback=lambda: calls.append("threadsafe"))
    loop.call_at(when=loop.time(), callback=lambda: calls.append("at"))
    ended = loop.create_future()
    loop.call_later(delay=0.001, callback=lambda: ended.set_result(None))
    await ended
    assert sorted(calls) == ["at", "soon", "soon", "threadsafe"]
    loop.set_debug(enabled=False)
    loop.set_task_factory(factory=None)


@pytest.mark.xfail_on(uvloop="add_reader's parameter is named fileobj")
async def test_a_descriptor_by_name(loop):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        readable = loop.create_future()
        loop.add_reader(fd=ours, callback=lambda: readable.done() or readable.set_result("readable"))
        theirs.send(b"x")
        assert await readable == "readable"
        assert loop.remove_reader(fd=ours) is True
        assert loop.remove_writer(fd=ours) is False


@pytest.mark.parametrize(
    "call",
    [
        lambda loop: loop.call_soon(),
        lambda loop: loop.call_soon(context=None),
        lambda loop: loop.call_soon(fn=print),
        lambda loop: loop.call_soon(print, callback=print),
        lambda loop: loop.call_later(0),
        lambda loop: loop.call_later(0, delay=1),
        lambda loop: loop.call_later(callback=print),
        lambda loop: loop.call_at(when=0),
        lambda loop: loop.stop(0),
        lambda loop: loop.stop(now=True),
        lambda loop: loop.set_debug(),
        lambda loop: loop.set_debug(True, enabled=True),
        lambda loop: loop.set_debug(on=True),
        lambda loop: loop.add_reader(0),
        lambda loop: loop.remove_reader(),
        lambda loop: loop.remove_reader(0, 1),
        lambda loop: loop.set_task_factory(),
        lambda loop: loop.get_task_factory(None),
        lambda loop: loop.create_future(0),
        lambda loop: loop.create_task(),
    ],
)
def test_wrong_arguments(loop, call):
    with pytest.raises(TypeError):
        call(loop)


@pytest.mark.xfail_on(uvloop="write takes its data by position only")
async def test_a_transport_takes_arguments_by_name(loop):
    ours, theirs = socket.socketpair()
    with theirs:
        transport, protocol = await loop.create_connection(asyncio.Protocol, sock=ours)
        transport.set_write_buffer_limits(low=10, high=100)
        assert transport.get_write_buffer_limits() == (10, 100)
        transport.set_protocol(protocol=protocol)
        transport.write(data=b"one ")
        transport.writelines(list_of_data=[b"two ", b"three"])
        assert transport.get_extra_info(name="nothing", default="default") == "default"
        await asyncio.sleep(0)
        assert theirs.recv(100) == b"one two three"
        with pytest.raises(TypeError):
            transport.write(data=b"x", more=1)
        with pytest.raises(TypeError):
            transport.write(b"x", data=b"x")
        transport.close()


@pytest.mark.parametrize("method", ["call_soon", "call_soon_threadsafe", "call_later", "add_reader", "add_writer"])
async def test_an_unknown_keyword_is_refused(loop, method):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        before = {"call_later": [1.0], "add_reader": [ours], "add_writer": [ours]}.get(method, [])
        with pytest.raises(TypeError):
            getattr(loop, method)(*before, print, unknown=1)
        assert not loop.remove_reader(ours)
        assert not loop.remove_writer(ours)
