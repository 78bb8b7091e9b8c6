"""inspect and unittest.mock see the sock_* methods and getaddrinfo as coroutine functions."""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import pydoc
import socket
import sys
import warnings
from unittest import mock

import pytest

pytestmark = pytest.mark.skip_on(
    uvloop="its methods are Cython functions, and only some are marked as coroutine functions"
)

NATIVE = (
    "sock_recv",
    "sock_recv_into",
    "sock_recvfrom",
    "sock_recvfrom_into",
    "sock_sendall",
    "sock_sendto",
    "sock_accept",
    "getaddrinfo",
)
METHODS = (*NATIVE, "sock_connect", "sock_sendfile", "getnameinfo", "create_connection", "subprocess_exec")


@pytest.mark.parametrize("name", METHODS)
def test_coroutine_functions(loop, name):
    for method in (getattr(loop, name), getattr(type(loop), name)):
        for wrapped in (method, functools.partial(method)):
            assert inspect.iscoroutinefunction(wrapped)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # iscoroutinefunction, from 3.14 on
                assert asyncio.iscoroutinefunction(wrapped)
        assert callable(method)
        assert inspect.isroutine(method)
        assert not inspect.isgeneratorfunction(method)
        assert not inspect.isasyncgenfunction(method)
    assert inspect.ismethod(getattr(loop, name))


@pytest.mark.parametrize("name", ["call_soon", "call_later", "time", "stop", "add_reader", "run_in_executor"])
def test_plain_functions(loop, name):
    assert not inspect.iscoroutinefunction(getattr(loop, name))


@pytest.mark.parametrize("name", NATIVE)
def test_signatures(loop, name):
    ours, theirs = (inspect.signature(getattr(kind, name)) for kind in (type(loop), asyncio.SelectorEventLoop))
    shapes = [[(each.kind, each.default) for each in shown.parameters.values()] for shown in (ours, theirs)]
    assert shapes[0] == shapes[1]
    bound = inspect.signature(getattr(loop, name))
    assert list(bound.parameters.values()) == list(ours.parameters.values())[1:]


@pytest.mark.parametrize("name", NATIVE)
def test_names_and_help(loop, name):
    method = getattr(loop, name)
    assert method.__name__ == name
    assert method.__self__ is loop
    assert inspect.isfunction(getattr(type(loop), name))
    assert name in pydoc.render_doc(method)
    assert name in repr(method)
    assert name in repr(getattr(type(loop), name))


@pytest.mark.parametrize("name", NATIVE)
@pytest.mark.parametrize("how", ["autospec", "spec", "AsyncMock", "patch"])
def test_mocks(loop, name, how):
    if how == "autospec":
        method = getattr(mock.create_autospec(loop, instance=True), name)
    elif how == "spec":
        method = getattr(mock.MagicMock(spec=loop), name)
    elif how == "AsyncMock":
        method = getattr(mock.AsyncMock(spec=loop), name)
    else:
        with mock.patch.object(loop, name, autospec=True) as method:
            pass
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        assert asyncio.iscoroutinefunction(method)
    parameters = inspect.signature(getattr(loop, name)).parameters.values()
    required = [each for each in parameters if each.default is each.empty]
    awaitable = method(*[mock.sentinel.argument] * len(required))
    assert inspect.iscoroutine(awaitable)
    awaitable.close()


async def test_patched_and_called(loop):
    with mock.patch.object(loop, "getaddrinfo") as lookup:
        lookup.return_value = ["answer"]
        assert await loop.getaddrinfo("host", 1) == ["answer"]
    with mock.patch.object(type(loop), "sock_recv", autospec=True) as recv:
        recv.return_value = b"data"
        assert await loop.sock_recv(None, 10) == b"data"
        recv.assert_awaited_once_with(loop, None, 10)
    assert (await loop.getaddrinfo("127.0.0.1", 80, type=socket.SOCK_STREAM))[0][4] == ("127.0.0.1", 80)


async def test_ways_to_call(loop):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        kind = type(loop)
        for call in (
            lambda: loop.sock_recv(ours, 1),
            lambda: kind.sock_recv(loop, ours, 1),
            lambda: kind.sock_recv.__get__(loop)(ours, 1),
            lambda: kind.sock_recv.__get__(loop, kind)(*(ours, 1)),
            lambda: functools.partial(loop.sock_recv, ours)(1),
            lambda: kind.__dict__.get("sock_recv", kind.sock_recv)(*[loop, ours, 1]),
        ):
            theirs.send(b"x")
            assert await call() == b"x"


async def test_a_subclass_that_calls_its_base(loop):
    class Own(type(loop)):
        async def sock_recv(self, sock, count):
            return b"own " + await super().sock_recv(sock, count)

    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.send(b"x")
        loop.__class__ = Own
        try:
            assert await loop.sock_recv(ours, 1) == b"own x"
        finally:
            loop.__class__ = Own.__base__


@pytest.mark.parametrize("name", NATIVE)
def test_wrong_receivers(loop_kind, loop, name):
    """A native method checks the object that it is called on."""
    if loop_kind != "grapeshot":
        pytest.skip("asyncio's methods are Python functions, which accept any object as self")
    method = getattr(type(loop), name)
    for args in ((), (None,), (object(), 1, 2), ("text", 1, 2), (type(loop), 1, 2)):
        with pytest.raises(TypeError, match="needs a Loop"):
            method(*args)
    with pytest.raises(TypeError, match="needs a Loop"):
        method(loop=loop)
    with pytest.raises(TypeError):
        method.__get__(object())(1, 2)


@pytest.mark.parametrize("name", NATIVE)
def test_docstrings(loop, name):
    if type(loop).__module__.startswith("grapeshot"):
        assert inspect.getdoc(getattr(loop, name)).endswith(".")


def test_a_mock_of_the_class(loop):
    made = mock.create_autospec(type(loop), instance=True)
    for name in NATIVE:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            assert asyncio.iscoroutinefunction(getattr(made, name))
    with pytest.raises(TypeError):
        made.sock_recv()


def test_coroutine_method_takes_only_native_methods(loop_kind):
    if loop_kind != "grapeshot":
        pytest.skip("tests a private function of grapeshot")
    from grapeshot import _core

    for function in (test_coroutine_method_takes_only_native_methods, len, print):
        with pytest.raises(AttributeError):
            _core._coroutine_method(function)

    def __init__(self): ...

    with pytest.raises(TypeError):
        _core._coroutine_method(__init__)
    with pytest.raises(TypeError):
        type(_core.Loop.sock_recv)()


def test_references(loop):
    method = type(loop).sock_recv
    before = sys.getrefcount(method)
    for _ in range(100):
        loop.sock_recv  # noqa: B018
        inspect.iscoroutinefunction(loop.sock_recv)
        inspect.signature(method)
    gc.collect()
    assert sys.getrefcount(method) <= before + 1
