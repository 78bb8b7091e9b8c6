"""Debug mode writes to the `asyncio` logger and keeps data in handles. Objects that are left open cause warnings."""

from __future__ import annotations

import asyncio
import gc
import logging
import re
import socket
import sys
import threading
import time
import warnings

import pytest
from support import HOST, Recorder, connected, run_script, until

NO_LOG = "it does not write asyncio's debug log"


class Messages(list):
    """The messages of the asyncio logger. Each is formatted at once and hidden from pytest, so that no record keeps an
    object alive.
    """

    def __init__(self):
        super().__init__()
        self.errors = []

    def filter(self, record):
        self.append(re.sub(r"0x[0-9a-f]+", "ADDRESS", record.getMessage()))
        if record.exc_info:
            self.errors.append((record.levelno, record.exc_info[0], record.getMessage()))
        return False


@pytest.fixture
def asyncio_log():
    """The messages of all records of the asyncio logger, including those of the level DEBUG."""
    logger, messages = logging.getLogger("asyncio"), Messages()
    level = logger.level
    logger.setLevel(logging.DEBUG)
    logger.addFilter(messages.filter)
    yield messages
    logger.removeFilter(messages.filter)
    logger.setLevel(level)


@pytest.fixture
def debug_log(loop, asyncio_log):
    """Like `asyncio_log`, with the loop in debug mode."""
    loop.set_debug(True)
    asyncio_log.clear()
    return asyncio_log


def named(*_args):
    """A function whose name appears in reprs."""


# ---------------------------------------------------------------- handles


@pytest.mark.xfail_on(uvloop="its handles show nothing once cancelled")
@pytest.mark.parametrize("delay", [None, 1000])
def test_a_cancelled_handle_still_shows_its_call(loop, delay):
    loop.set_debug(True)
    handle = loop.call_soon(named, 1, "two") if delay is None else loop.call_later(delay, named, 1, "two")
    before = repr(handle)
    handle.cancel()
    assert "named(1, 'two')" in before
    assert repr(handle) == before.replace("Handle ", "Handle cancelled ", 1)
    assert handle._callback is None
    assert handle._args is None


@pytest.mark.xfail_on(uvloop="its handles show nothing once cancelled")
def test_debug_mode_at_the_time_of_cancel_keeps_the_call_in_the_repr(loop):
    handle = loop.call_soon(named)
    loop.set_debug(True)
    handle.cancel()
    assert "cancelled named()" in repr(handle)
    later = loop.call_soon(named)
    loop.set_debug(False)
    later.cancel()
    assert "named" not in repr(later)
    assert "cancelled" in repr(later)


@pytest.mark.skipif(sys.version_info < (3, 13), reason="before 3.13 arguments are shown without debug mode, too")
@pytest.mark.xfail_on(uvloop="its handles show no arguments")
def test_arguments_are_shown_in_debug_mode_only(loop, reported):
    loop.call_soon(lambda secret: 1 / 0, "secret")
    handle = loop.call_soon(named, "secret")
    assert "secret" not in repr(handle)
    handle.cancel()
    loop.call_soon(loop.stop)
    loop.run_forever()
    assert "secret" not in reported[0]["message"]
    loop.set_debug(True)
    loop.call_soon(lambda secret: 1 / 0, "secret")
    assert "'secret'" in repr(loop.call_soon(named, "secret"))
    loop.call_soon(loop.stop)
    loop.run_forever()
    assert "'secret'" in reported[1]["message"]


@pytest.mark.xfail_on(uvloop="its handles drop their callback after the call")
def test_a_handle_that_ran_still_shows_its_call(loop):
    loop.set_debug(True)
    handle = loop.call_soon(named, 5)
    loop.call_soon(loop.stop)
    loop.run_forever()
    assert "named(5)" in repr(handle)


def test_a_kept_handle_is_collected(loop):
    """In debug mode, a handle keeps its call after the loop has run it. The collector can free such a handle."""
    loop.set_debug(True)

    class Thing:
        def call(self):
            """Does nothing."""

    dropped = []
    thing = Thing()
    thing.handle = loop.call_soon(thing.call)
    thing.guard = Guard(dropped)
    del thing
    loop.call_soon(loop.stop)
    loop.run_forever()
    gc.collect()
    assert dropped == ["dropped"]


class Guard:
    def __init__(self, dropped):
        self.dropped = dropped

    def __del__(self):
        self.dropped.append("dropped")


def place(traceback):
    """Return the name of the function of the innermost frame that does not belong to asyncio."""
    return next(frame.name for frame in reversed(traceback) if "asyncio" not in frame.filename)


def test_where_handles_were_made(loop, reported):
    loop.set_debug(True)
    sock, other = socket.socketpair()
    with sock, other:
        sock.setblocking(False)

        def schedule_failures():
            loop.call_soon(fail)
            loop.call_later(0, fail)
            loop.add_reader(sock, fail_once)
            other.send(b"x")

        def fail():
            raise LookupError("scheduled")

        def fail_once():
            sock.recv(1)
            loop.call_soon(loop.stop)
            raise LookupError("reader")

        schedule_failures()
        loop.run_forever()
        loop.remove_reader(sock)
    assert len(reported) == 3
    for context in reported:
        assert place(context["source_traceback"]) == "schedule_failures"
        assert re.search(r" created at .*\.py:\d+>$", repr(context["handle"]))


@pytest.mark.xfail_on(uvloop="its default handler does not show where the running handle was made")
def test_the_default_handler_shows_the_running_handle(loop, debug_log):
    loop.set_exception_handler(None)

    def report():
        loop.call_exception_handler({"message": "something is wrong"})
        loop.stop()

    loop.call_soon(report)
    loop.run_forever()
    [message] = debug_log
    assert message.startswith("something is wrong\nhandle_traceback: Handle created at (most recent call last):")
    assert "test_the_default_handler_shows_the_running_handle" in message
    loop.call_exception_handler({"message": "outside"})
    assert debug_log[1] == "outside"


@pytest.mark.parametrize("what", ["future", "task"])
def test_never_retrieved(loop, debug_log, what):
    loop.set_exception_handler(None)

    async def fail():
        raise LookupError("lost")

    async def main():
        if what == "task":
            thing = loop.create_task(fail())
        else:
            thing = loop.create_future()
            thing.set_exception(LookupError("lost"))
        await asyncio.sleep(0)
        assert re.search(r"created at .*test_debug_mode_log\.py:|created at .*asyncio|created at .*uvloop", repr(thing))

    loop.run_until_complete(main())
    gc.collect()
    [message] = debug_log
    assert message.startswith(f"{what.capitalize()} exception was never retrieved\nfuture: <{what.capitalize()} ")
    assert "source_traceback: Object created at (most recent call last):" in message
    assert "in main" in message


# ---------------------------------------------------------------- slow callbacks


def test_cancelled_callbacks_are_not_slow(loop, debug_log):
    loop.slow_callback_duration = 0
    handle = loop.call_soon(named, "cancelled")
    loop.call_soon(loop.stop)
    handle.cancel()
    loop.run_forever()
    assert any("stop" in message for message in debug_log)
    assert not any("cancelled" in message for message in debug_log)


@pytest.mark.parametrize("step", ["connection_made", "data_received", "eof_received", "connection_lost"])
@pytest.mark.skip_on(uvloop="it times only handles")
async def test_slow_protocols_are_logged(loop, debug_log, step):
    """Every callback of a protocol is timed. The callback that `step` names takes longer than the limit."""

    def slow(protocol, *args):
        time.sleep(0.03)
        getattr(Recorder, step)(protocol, *args)

    loop.slow_callback_duration = 0.02
    kind = type("SlowRecorder", (Recorder,), {step: slow})
    transport, protocol, peer = await connected(loop, kind, "client")
    with peer:
        await peer.send(b"x")
        await until(lambda: protocol.data, "the data")
        peer.shutdown()
        await until(lambda: protocol.is_lost, "the end of the connection")
    await asyncio.sleep(0)
    slow_ones = [message for message in debug_log if re.match(r"Executing .*took 0\.\d{3} seconds", message)]
    assert any("Transport" in message or ".slow(" in message for message in slow_ones)
    assert transport.is_closing()


@pytest.mark.xfail_on(uvloop="cancelled handles drop their callback")
async def test_slow_callback_that_cancels_itself(loop, debug_log):
    loop.slow_callback_duration = 0.01

    def work():
        time.sleep(0.02)
        handle.cancel()

    handle = loop.call_soon(work)
    await asyncio.sleep(0)
    assert any("Executing <Handle cancelled" in message and "work()" in message for message in debug_log)


# ---------------------------------------------------------------- transports


def transport_name(kind):
    return r"<StreamTransport" if kind == "grapeshot" else r"<_SelectorSocketTransport"


@pytest.mark.xfail_on(uvloop=NO_LOG)
async def test_the_log_of_a_connection(loop, debug_log, loop_kind):
    made = []

    def factory():
        made.append(Recorder())
        return made[-1]

    server = await loop.create_server(factory, HOST, 0)
    address = server.sockets[0].getsockname()
    port = address[1]
    transport, _ = await loop.create_connection(factory, *address)
    await until(lambda: len(made) == 2 and all(each.transport for each in made), "both ends")
    transport.pause_reading()
    transport.pause_reading()
    transport.resume_reading()
    transport.resume_reading()
    transport.close()
    await until(lambda: all(each.is_lost for each in made), "the end of the connection")
    server.close()
    await server.wait_closed()
    name = transport_name(loop_kind) + r" (closing )?fd=\d+ read=\w+ write=<\w+, bufsize=0>>"
    expected = [
        r"<Server sockets=.*> is serving",
        rf"<Server sockets=.*{port}.*> got a new connection from \('{HOST}', \d+\): "
        r"<socket\.socket fd=\d+, family=2, type=1, proto=\d+, laddr=.*, raddr=.*>",
        rf"<.*TransportSocket fd=\d+.*> connected to {HOST}:{port}: \({name}, <.*Recorder object at ADDRESS>\)",
        rf"{name} pauses reading",
        rf"{name} resumes reading",
        rf"{name} received EOF",
    ]
    found = {pattern: [each for each in debug_log if re.fullmatch(pattern, each)] for pattern in expected}
    assert all(len(matching) == 1 for matching in found.values()), (found, debug_log)
    assert len(debug_log) == len(expected), debug_log


@pytest.mark.xfail_on(uvloop=NO_LOG)
async def test_network_errors_are_logged_in_debug_mode(loop, debug_log):
    _, protocol, peer = await connected(loop)
    peer.reset()
    await until(lambda: protocol.is_lost, "the end of the connection")
    [(level, kind, message)] = debug_log.errors
    assert (level, kind) == (logging.DEBUG, ConnectionResetError)
    assert message.endswith(": Fatal read error on socket transport")
    assert isinstance(protocol.lost_with[0], ConnectionResetError)


async def test_nothing_is_logged_otherwise(loop, asyncio_log):
    asyncio_log.clear()
    transport, protocol, peer = await connected(loop)
    with peer:
        transport.pause_reading()
        transport.resume_reading()
        peer.shutdown()
        await until(lambda: protocol.is_lost, "the end of the connection")
    assert not asyncio_log


@pytest.mark.xfail_on(uvloop=NO_LOG)
def test_the_end_of_a_loop_is_logged(new_loop, asyncio_log):
    loop = new_loop()
    loop.set_debug(True)
    text = repr(loop)
    asyncio_log.clear()
    loop.close()
    assert asyncio_log == [f"Close {text}"]
    assert "closed=False" in text


def error_in_thread(method):
    errors = []

    def work():
        try:
            method()
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return "\n".join(errors)


@pytest.mark.skip_on(uvloop="it has no check, and would close the connection from the other thread")
async def test_closing_a_transport_on_another_thread(loop, loop_kind):
    loop.set_debug(True)
    for name in ("close", "abort"):
        transport, protocol, peer = await connected(loop)
        assert "Non-thread-safe operation" in error_in_thread(getattr(transport, name))
        if loop_kind == "asyncio":
            # asyncio marks the connection as closed before it raises, so another close() would not end the connection
            transport._call_connection_lost(None)
        else:
            assert not transport.is_closing()
            transport.abort()
        await until(lambda protocol=protocol: protocol.is_lost, "the end of the connection")
        peer.close()


# ---------------------------------------------------------------- objects that are left open


def unclosed(caught, kind):
    found = [each for each in caught if issubclass(each.category, ResourceWarning) and kind in str(each.message)]
    caught.clear()
    return found


@pytest.mark.leaks_on(asyncio="the transport's descriptor stays open", uvloop="same as asyncio")
@pytest.mark.xfail_on(uvloop="its warning has another text")
def test_an_unclosed_transport_warns(new_loop, quiet, loop_kind):
    loop = new_loop()
    sock, other = socket.socketpair()

    class Careless(asyncio.Protocol):
        """A protocol that keeps no transport."""

    async def main():
        await loop.connect_accepted_socket(Careless, sock)

    sock.setblocking(False)
    loop.run_until_complete(main())
    loop.close()
    gc.collect()
    [warning] = unclosed(quiet, "unclosed transport")
    assert re.fullmatch(
        rf"unclosed transport {transport_name(loop_kind)} fd=\d+( read=polling write=<idle, bufsize=0>)?>",
        str(warning.message),
    )
    assert isinstance(warning.source, asyncio.Transport)
    del warning
    other.close()
    sock.close()
    gc.collect()


@pytest.mark.xfail_on(uvloop="its warning has no source")
def test_an_unclosed_loop_warns_with_its_source(loop_kind, _audit, quiet):
    from support import loop_factory

    loop = loop_factory(loop_kind)()
    text = repr(loop)
    del loop
    gc.collect()
    [warning] = unclosed(quiet, "unclosed event loop")
    assert str(warning.message) == f"unclosed event loop {text}"
    assert isinstance(warning.source, asyncio.AbstractEventLoop)
    del warning
    gc.collect()


@pytest.mark.skipif(sys.version_info < (3, 12), reason="3.11 does not find where the loop was allocated")
@pytest.mark.xfail_on(uvloop="it does not warn")
def test_tracemalloc_shows_where_an_unclosed_loop_was_made(loop_kind):
    code = """
        import gc, sys, warnings
        warnings.simplefilter("always")
        sys.stderr = sys.stdout
        def make():
            new_event_loop()
        make()
        gc.collect()
    """
    output = run_script(loop_kind, code, flags=("-X", "tracemalloc=10"))
    assert "ResourceWarning: unclosed event loop" in output
    assert "Object allocated at (most recent call last)" in output


# ---------------------------------------------------------------- ways into debug mode


def test_the_environment_variable(loop_kind, monkeypatch):
    code = "loop = new_event_loop(); print(loop.get_debug()); loop.close()"
    monkeypatch.setenv("PYTHONASYNCIODEBUG", "1")
    assert run_script(loop_kind, code).strip() == "True"
    # -E ignores PYTHONPATH, too, so the script sets sys.path itself
    ignoring = f"""
        import sys
        sys.path[:0] = {sys.path!r}
        from support import loop_factory
        new_event_loop = loop_factory({loop_kind!r})
        {code}
    """
    assert run_script(None, ignoring, flags=("-E",)).strip() == "False"
    monkeypatch.setenv("PYTHONASYNCIODEBUG", "")
    assert run_script(loop_kind, code).strip() == "False"


def test_a_coroutine_that_was_never_awaited_shows_where_it_was_made(loop, quiet):
    async def forgotten():
        """A coroutine that never runs."""

    async def main():
        def make():
            forgotten()

        make()

    loop.set_debug(True)
    loop.run_until_complete(main())
    [warning] = [each for each in quiet if "never awaited" in str(each.message)]
    assert "Coroutine created at (most recent call last)" in str(warning.message)
    assert "in make" in str(warning.message)


def test_runner_debug(loop_kind):
    from support import loop_factory

    async def main():
        return asyncio.get_running_loop().get_debug()

    for debug in (True, False):
        with warnings.catch_warnings(), asyncio.Runner(debug=debug, loop_factory=loop_factory(loop_kind)) as runner:
            assert runner.run(main()) is debug
