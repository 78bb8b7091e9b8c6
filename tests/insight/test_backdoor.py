"""The prompt of the back door, on each kind of loop: what a client types, and what it sees."""

from __future__ import annotations

import asyncio
import io
import sys

import pytest
from insight.callers import Caller, call
from support import until

from grapeshot.insight import backdoor

pytestmark = pytest.mark.usefixtures("tasks")


async def test_expressions_and_statements(loop, path):
    with backdoor.serve(path) as server:
        assert server.path == str(path)
        with await call(path) as caller:
            assert await caller.ask("1 + 1") == "2\n"
            assert await caller.ask("_ * 21") == "42\n"
            assert await caller.ask("None") == ""
            assert await caller.ask("x = [1]") == ""
            assert await caller.ask("x, loop is asyncio.get_running_loop()") == "([1], True)\n"
            assert await caller.ask("import sys; print('out'); print('err', file=sys.stderr)") == "out\nerr\n"
            assert await caller.ask("asyncio.current_task().get_name()") == "'backdoor client 1'\n"


async def test_await_at_top_level(loop, path):
    with backdoor.serve(path), await call(path) as caller:
        assert await caller.ask("await asyncio.sleep(0.001, 'slept')") == "'slept'\n"
        lines = ["async with asyncio.timeout(5):", "  for n in range(3):", "    await asyncio.sleep(0, n)", ""]
        assert await caller.ask(*lines) == "0\n1\n2\n"
        # While a command waits, the loop continues, and so do the commands of other clients.
        await caller.send(b"gate = asyncio.Event()\nasyncio.open_gate = gate.set\nawait gate.wait()\n")
        await caller.read_until(">>> >>> ")
        try:
            with await call(path) as other:
                assert await other.ask("asyncio.open_gate()") == ""
        finally:
            del asyncio.open_gate
        assert await caller.read_until(">>> ") == "True\n"


async def test_several_lines(loop, path):
    with backdoor.serve(path), await call(path) as caller:
        await caller.send(b"def f(x):\n")
        await caller.read_until("... ")
        await caller.send(b"  return x + 1\n")
        await caller.read_until("... ")
        assert await caller.ask("") == ""
        assert await caller.ask("f(1)") == "2\n"
        assert await caller.ask("'''a", "b'''") == "'a\\nb'\n"
        await caller.send(b"f(\r\n")  # the line end of telnet-like clients
        await caller.read_until("... ")
        assert await caller.ask("5)\r") == "6\n"


async def test_syntax_errors_and_tracebacks(loop, path):
    with backdoor.serve(path), await call(path) as caller:
        text = await caller.ask("1 +* 2")
        assert "1 +* 2\n" in text
        assert text.endswith("SyntaxError: invalid syntax\n")
        assert await caller.ask("def f(x):", "  return 1 / x", "") == ""
        text = await caller.ask("f(0)")
        lines = [line for line in text.splitlines() if "^" not in line and "~" not in line]
        assert lines == [
            "Traceback (most recent call last):",
            '  File "<backdoor 1.2>", line 1, in <module>',
            "    f(0)",
            '  File "<backdoor 1.1>", line 2, in f',
            "    return 1 / x",
            "ZeroDivisionError: division by zero",
        ]
        for name in ("KeyboardInterrupt", "asyncio.CancelledError"):
            assert (await caller.ask(f"raise {name}")).endswith(f"{name.split('.')[-1]}\n")
        await caller.ask("class Unspeakable(Exception):", "  def __str__(self): return 1 / 0", "")
        assert "Unspeakable" in await caller.ask("raise Unspeakable")
        assert await caller.ask("'goes on'") == "'goes on'\n"
        assert "\\ud800" in await caller.ask("print('\\ud800')")


async def test_a_command_that_raises_generator_exit(loop, path):
    """The exception ends the session of the client whose command raised it, and is not reported as an error."""
    reported = []
    loop.set_exception_handler(lambda _, context: reported.append(context))
    with backdoor.serve(path) as server, await call(path) as caller:
        await caller.send(b"raise GeneratorExit\n")
        text = b""
        while data := await caller.recv():
            text += data
        assert text.endswith(b"GeneratorExit\n")
        await until(lambda: not server._sessions, "the session to end")
    assert reported == []


@pytest.mark.parametrize("word", ["exit", "quit", " exit ", "exit()", "quit()", "raise SystemExit", "EOF"])
async def test_each_way_to_leave_closes_only_that_client(loop, path, word):
    with backdoor.serve(path), await call(path) as stays, await call(path) as leaves:
        if word == "EOF":
            leaves.shutdown()
        else:
            await leaves.send(f"{word}\n".encode())
        assert await leaves.is_ended()
        assert await stays.ask("6 * 7") == "42\n"


async def test_exit_in_the_middle_of_a_command_is_text(loop, path):
    with backdoor.serve(path), await call(path) as caller:
        assert await caller.ask("'''", "exit", "'''") == "'\\nexit\\n'\n"


async def test_lines_sent_before_the_end_are_run(loop, path):
    with backdoor.serve(path), await call(path) as caller:
        await caller.send(b"await asyncio.sleep(0.01, 'first')\n'second'")
        caller.shutdown()
        assert (await caller.read_to_end()).decode() == "'first'\n>>> 'second'\n>>> "


# ------------------------------------------------------------------ output


async def test_output_goes_to_its_client_only(loop, path, capsys):
    below = sys.stdout, sys.stderr, sys.displayhook

    async def program():
        for _ in range(50):
            print("of the program")
            await asyncio.sleep(0)

    with backdoor.serve(path):
        assert (sys.stdout, sys.stderr, sys.displayhook) == below  # replaced only while there are clients
        with await call(path) as first, await call(path) as second:
            printing = loop.create_task(program())
            talk = ["for n in range(20):", "  print('of {}'); await asyncio.sleep(0)", ""]
            texts = await asyncio.gather(
                first.ask(*(line.format("first") for line in talk)),
                second.ask(*(line.format("second") for line in talk)),
            )
            await printing
            assert texts == ["of first\n" * 20, "of second\n" * 20]
            assert await first.ask("1") == "1\n"
            assert await second.ask("2") == "2\n"
            assert await first.ask("_") == "1\n"
    await until(lambda: (sys.stdout, sys.stderr, sys.displayhook) == below, "the streams to be put back")
    assert capsys.readouterr().out == "of the program\n" * 50


async def test_tasks_and_threads_of_a_command_write_to_its_client(loop, path, capsys):
    with backdoor.serve(path), await call(path) as caller:
        assert await caller.ask("await asyncio.create_task(asyncio.sleep(0, print('task')))") == "task\n"
        assert await caller.ask("await asyncio.to_thread(print, 'thread')") == "thread\n"
        assert await caller.ask("h = loop.call_soon(print, 'callback'); await asyncio.sleep(0.001)") == "callback\n"
        await caller.ask("gate = asyncio.Event()")
        await caller.ask("async def late():", "  await gate.wait(); print('late')", "")
        await caller.ask("task, asyncio.late = asyncio.create_task(late()), gate.set")
    # Once the client has gone, its task prints to the program's own output.
    asyncio.late()
    del asyncio.late
    await until(lambda: "late\n" in capsys.readouterr().out, "the output")


async def test_lines_that_come_together_let_others_run(loop, path):
    with backdoor.serve(path), await call(path) as caller:
        ticks = 0

        def tick():
            nonlocal ticks, handle
            ticks += 1
            handle = loop.call_soon(tick)

        handle = loop.call_soon(tick)
        await caller.send(b"1\n" * 100 + b"exit\n")
        assert (await caller.read_to_end()).decode() == "1\n>>> " * 100
        handle.cancel()
        assert ticks >= 100


async def test_a_stream_that_the_program_replaces_stays(loop, path, monkeypatch):
    mine = io.StringIO()
    with backdoor.serve(path) as server:
        with await call(path) as caller:
            monkeypatch.setattr(sys, "stdout", mine)
            assert await caller.ask("print('to the new stream')") == ""
        await until(lambda: not server._sessions, "the session to end")
        assert sys.stdout is mine
    assert mine.getvalue() == "to the new stream\n"


async def test_a_client_that_does_not_read(loop, path):
    """The client's pending output is bounded, and the loop goes on. When the client reads again, a message tells how
    many bytes were dropped.
    """
    from grapeshot.insight.backdoor import _wire

    with backdoor.serve(path) as server, await call(path) as caller:
        await caller.send(b"for _ in range(100):\n  print('x' * 1_000_000); await asyncio.sleep(0)\n\n'done'\n")
        (session,) = server._sessions
        wire = session.wire
        await until(lambda: wire._dropped_len > 90_000_000 and not session._runs_command, "output to be dropped")
        assert _wire.MAX_OUTPUT_LEN // 2 < len(wire._to_send) <= _wire.MAX_OUTPUT_LEN
        with await call(path) as other:
            assert await other.ask("'alive'") == "'alive'\n"
        # The next command waits until the client has read.
        assert wire._lines
        text = await caller.read_until("'done'\n>>> ")
        assert "bytes of output were dropped: they were not read in time]" in text
        assert len(text) < _wire.MAX_OUTPUT_LEN + 2_000_000


async def test_output_that_is_larger_than_the_socket_buffer_arrives(loop, path):
    with backdoor.serve(path), await call(path) as caller:
        text = await caller.ask("print('\\u00e4' * 1_000_000)")
        assert text == "\u00e4" * 1_000_000 + "\n"


async def test_a_line_that_never_ends_is_refused(loop, path, monkeypatch):
    """The server stops reading, but the client reads only after it has sent everything. A time limit of the server ends
    this deadlock.
    """
    from grapeshot.insight.backdoor import _wire

    monkeypatch.setattr(_wire, "_CLOSE_WITHIN_S", 0.2)
    with backdoor.serve(path), await call(path) as caller:
        try:
            await caller.send(b"x" * 3_000_000)
        except (BrokenPipeError, ConnectionResetError):
            pass
        try:
            text = (await caller.read_to_end()).decode()
        except ConnectionResetError:
            return
        assert "this line is too long" in text


async def test_a_too_long_line_of_a_client_that_is_gone(loop, path, monkeypatch):
    from grapeshot.insight.backdoor import _wire

    monkeypatch.setattr(_wire, "MAX_INPUT_LEN", 1000)
    problems = []
    loop.set_exception_handler(lambda loop, context: problems.append(context))
    with backdoor.serve(path) as server, await call(path) as caller:
        caller.sock.send(b"x" * 2000)
        caller.sock.close()
        await until(lambda: not server._sessions, "the end of the client")
    assert problems == []


async def test_empty_lines_count_as_input_that_waits(loop, path, monkeypatch):
    from grapeshot.insight.backdoor import _wire

    monkeypatch.setattr(_wire, "MAX_INPUT_LEN", 1000)
    with backdoor.serve(path) as server, await call(path) as caller:
        await caller.send(b"await asyncio.sleep(1000)\n")
        (session,) = server._sessions
        await until(lambda: session._runs_command, "the command to wait")
        await caller.send(b"\n" * 2000)
        await until(lambda: not session.wire._is_reading, "the limit")


@pytest.mark.parametrize(
    "frames",
    [
        pytest.param(b"e\0\0\0\0" * 2, id="two ends"),
        pytest.param(b"e\0\0\0\0e\0\0\0\0i\0\0\0\0s\0\0\0\x046*7\n", id="commands after the end"),
        pytest.param(b"o\xff\xff\xff\xff", id="a frame of 4 GiB"),
        pytest.param(b"\xff\0\0\0\0" * 3 + b"p\0\0\0\x01x", id="unknown kinds"),
    ],
)
async def test_wrong_frames_are_an_error_of_the_client(loop, path, frames, monkeypatch):
    """A wrong frame ends at most the connection of the client that sent it. The loop reports no error."""
    from grapeshot.insight.backdoor import _wire

    monkeypatch.setattr(_wire, "_CHECK_S", 0.001)
    reported = []
    loop.set_exception_handler(lambda _, context: reported.append(context))
    with backdoor.serve(path) as server:
        with await call(path) as caller:
            await caller.send(_wire.HELLO + frames)
            if frames[:1] != b"\xff":
                while await caller.recv():
                    pass
                await until(lambda: not server._sessions, "the session to end")
        await until(lambda: not server._sessions, "the session to end")
        for _ in range(3):  # a timer that was left over would run now
            await asyncio.sleep(0.002)
        with await call(path) as caller:
            assert await caller.ask("1 + 1") == "2\n"
    assert reported == []


@pytest.mark.parametrize("frame", [b"i\0\0\0\0", b"c\0\0\0\4type"], ids=["interruptions", "completions"])
async def test_a_client_that_keeps_asking_and_does_not_read_the_answers(loop, path, frame, monkeypatch):
    from grapeshot.insight.backdoor import _wire

    monkeypatch.setattr(_wire, "MAX_OUTPUT_LEN", 50_000)
    with backdoor.serve(path) as server, Caller(path) as caller:
        await until(lambda: server._sessions, "the client")
        (session,) = server._sessions
        wire = session.wire
        sending = asyncio.create_task(caller.send(_wire.HELLO + frame * 15_000 + b"s\0\0\0\x046*7\n"))
        await until(lambda: not wire._is_reading, "the limit")
        assert len(wire._to_send) < 50_000 + 16 * 65536 // len(frame)
        text = ""
        while "42" not in text:
            text = text[-100:] + (await caller.recv()).decode()
        await sending


@pytest.mark.parametrize("line", ["-" * 50_000 + "1", "(" * 5000])
async def test_a_line_that_is_nested_too_deep_to_be_compiled(loop, path, line):
    with backdoor.serve(path), await call(path) as caller:
        assert "Error" in await caller.ask(line, "")
        assert "42\n" in await caller.ask("6 * 7")


# ------------------------------------------------------------------ interruption and loss


@pytest.mark.parametrize("command", ["await asyncio.sleep(1000)", "await asyncio.Event().wait()"])
async def test_ctrl_c_interrupts_an_await(loop, path, command):
    with backdoor.serve(path) as server, await call(path) as caller:
        await caller.send(f"{command}\n'not run'\n".encode())
        (session,) = server._sessions
        await until(lambda: session._runs_command, "the command to wait")
        await caller.send(b"\x03")
        assert await caller.read_until(">>> ") == "\nKeyboardInterrupt\n"
        assert session.task.cancelling() == 0
        assert await caller.ask("await asyncio.sleep(0, 'works')") == "'works'\n"
        # A command may catch the CancelledError.
        lines = ["try:", "  await asyncio.sleep(1000)", "except asyncio.CancelledError:", "  print('caught')", ""]
        await caller.send("\n".join([*lines, ""]).encode())
        await until(lambda: session._runs_command, "the command to wait")
        await caller.send(b"\x03")
        assert await caller.read_until("caught\n>>> ") is not None
        assert await caller.ask("await asyncio.sleep(0, 'works')") == "'works'\n"


async def test_ctrl_c_at_the_prompt_discards_the_input(loop, path):
    with backdoor.serve(path), await call(path) as caller:
        await caller.send(b"def f():\n")
        await caller.read_until("... ")
        await caller.send(b"\x03")
        assert await caller.read_until(">>> ") == "\nKeyboardInterrupt\n"
        assert await caller.ask("1 + 1") == "2\n"


async def test_a_client_that_vanishes_ends_its_command(loop, path):
    with backdoor.serve(path) as server:
        caller = await call(path)
        lines = ["try:", "  await asyncio.sleep(1000)", "finally:", "  asyncio.ended = True", ""]
        await caller.send("\n".join([*lines, ""]).encode())
        (session,) = server._sessions
        await until(lambda: session._runs_command, "the command to wait")
        caller.close()
        await until(lambda: not server._sessions, "the session to end")
        assert asyncio.ended
        del asyncio.ended


async def test_a_client_that_vanishes_after_its_last_line(loop, path, monkeypatch):
    """The client first shuts down its side of the stream, after which the server stops reading. Then the client closes
    the socket.
    """
    from grapeshot.insight.backdoor import _wire

    monkeypatch.setattr(_wire, "_CHECK_S", 0.1)
    with backdoor.serve(path) as server:
        caller = await call(path)
        await caller.send(b"await asyncio.sleep(1000)\n")
        caller.shutdown()
        (session,) = server._sessions
        await until(lambda: session._runs_command and session.wire._has_ended, "the command to wait")
        caller.close()
        await until(lambda: not server._sessions, "the session to end")


async def test_a_reset_while_output_waits(loop, path):
    with backdoor.serve(path) as server:
        caller = await call(path)
        await caller.send(b"print('x' * 3_000_000); await asyncio.sleep(1000)\n")
        (session,) = server._sessions
        await until(lambda: session.wire._to_send, "output to wait")
        caller.close()
        await until(lambda: not server._sessions, "the session to end")


async def test_many_clients_come_and_go(loop, path):
    with backdoor.serve(path) as server:
        callers = [await call(path) for _ in range(30)]
        texts = await asyncio.gather(*(caller.ask(f"{n} * 2") for n, caller in enumerate(callers)))
        assert texts == [f"{n * 2}\n" for n in range(30)]
        for caller in callers:
            caller.close()
        await until(lambda: not server._sessions, "the sessions to end")


async def test_closing_the_server_ends_its_clients(loop, path):
    server = backdoor.serve(path)
    with await call(path) as idle, await call(path) as busy:
        await busy.send(b"await asyncio.sleep(1000)\n")
        await until(lambda: any(session._runs_command for session in server._sessions), "the command to wait")
        server.close()
        server.close()
        assert server.is_closed
        assert not path.exists()
        for caller in (idle, busy):
            assert (await caller.read_to_end()).decode().endswith("[the back door is closed]\n")
        await until(lambda: not server._sessions, "the sessions to end")
    with pytest.raises(FileNotFoundError):
        Caller(path)


async def test_a_client_may_close_the_server(loop, path):
    with backdoor.serve(path) as server:
        server._namespace["server"] = server
        with await call(path) as caller:
            await caller.send(b"server.close()\n")
            assert await caller.is_ended()
        assert server.is_closed


def test_the_end_of_the_run_closes_the_server(new_loop, path):
    async def main():
        backdoor.serve(path)
        return await call(path)

    loop = new_loop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        caller = runner.run(main())
        assert path.exists()
    assert not path.exists()
    caller.close()


def test_the_end_of_the_run_closes_clients_that_do_not_read(new_loop, path):
    """The runner closes the back door without waiting for the client to read the pending output."""

    async def main():
        server = backdoor.serve(path)
        caller = await call(path)
        await caller.send(b"print('x' * 3_000_000)\n")
        await until(lambda: any(session.wire._to_send for session in server._sessions), "output to wait")
        return caller

    loop = new_loop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        caller = runner.run(main())
    caller.close()


def test_serve_without_a_running_loop_raises(path):
    with pytest.raises(RuntimeError, match="no running event loop"):
        backdoor.serve(path)


# ------------------------------------------------------------------ the names


async def test_help_lists_the_helpers(loop, path):
    with backdoor.serve(path, namespace={"answer": 42}), await call(path) as caller:
        text = await caller.ask("help")
        for name in ("tree()", "tasks()", "where(what)", "loop", "answer", "help(x)"):
            assert f"\n  {name} " in f"\n{text}"
        assert await caller.ask("help()") == text
        assert await caller.ask("answer") == "42\n"
        assert "Return the absolute value" in await caller.ask("help(abs)")
        assert "would read the standard input of the process" in await caller.ask("input()")


async def test_helpers_show_tasks_and_sockets(loop, path):
    async def patient(event):
        await event.wait()

    event = asyncio.Event()
    waiting = loop.create_task(patient(event), name="patient one")
    with backdoor.serve(path), await call(path) as caller:
        line = next(line for line in (await caller.ask("tasks()")).splitlines() if "patient one" in line)
        assert "asyncio.locks.Event" in line
        text = await caller.ask("where('patient')")
        assert text.startswith("task 'patient one' waits for")
        assert "in patient\n      await event.wait()\n" in text
        assert "backdoor client" not in text
        assert "task 'patient one'" in await caller.ask("where()")
        assert "task 'patient one'" in await caller.ask("tree()")
    event.set()
    await waiting


@pytest.mark.parametrize("what", ["'nobody'", "3"])
async def test_where_says_that_it_has_found_nothing(loop, path, what):
    with backdoor.serve(path):
        with await call(path) as caller:
            assert (await caller.ask(f"where({what})")).startswith(f"{what} is not a task")
            assert not (await caller.ask("where('backdoor')")).endswith("no name of one contains it\n")
            assert not (await caller.ask("where()")).endswith("no name of one contains it\n")
