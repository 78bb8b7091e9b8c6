"""In a coro program, the back door serves each client in a coro."""

from __future__ import annotations

import asyncio

import pytest
from insight.callers import call
from support import coro_is_available, until

import grapeshot
from grapeshot.insight import backdoor

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import coro


def with_door(path, talk, **options):
    """Open a back door in a coro, call `talk` with its server, and return the result."""

    def main():
        with backdoor.serve(path, **options) as server:
            return coro.await_(talk(server))

    return coro.run(main)


def test_a_client_is_a_coro_where_commands_wait_in_both_styles(path):
    async def talk(server):
        with await call(path) as caller:
            assert await caller.ask("coro.current().name") == "'backdoor client 1'\n"
            assert await caller.ask("coro.sleep_relative(0.001)") == ""
            assert await caller.ask("await asyncio.sleep(0.001, 'slept')") == "'slept'\n"
            assert await caller.ask("coro.spawn(lambda: coro.await_(asyncio.sleep(0, 5))).join()") == "5\n"
            await caller.ask("queue = coro.fifo(); co = coro.spawn(lambda: print('of a coro', queue.pop()))")
            assert await caller.ask("queue.push(1); co.join()") == "of a coro 1\n"
            text = await caller.ask("coro.spawn(lambda: 1 / 0).join()")
            assert text.endswith("ZeroDivisionError: division by zero\n")

    with_door(path, talk)


def test_others_run_while_a_command_waits(path):
    async def talk(server):
        with await call(path) as first, await call(path) as second:
            await first.ask("gate = coro.event(); coro.gate = gate")
            await first.send(b"gate.wait(); print('through')\n")
            assert await second.ask("coro.gate.set(); del coro.gate") == ""
            assert (await first.read_until(">>> ")).endswith("through\n")

    with_door(path, talk)


@pytest.mark.parametrize(
    "command", ["coro.sleep_relative(1000)", "coro.wait()", "await asyncio.sleep(1000)", "coro.semaphore(0).acquire(1)"]
)
def test_ctrl_c_interrupts_a_wait_in_both_styles(path, command):
    async def talk(server):
        with await call(path) as caller:
            for _ in range(2):
                await caller.send(f"{command}\n".encode())
                (session,) = server._sessions
                await until(lambda: session._runs_command, "the command to wait")
                await caller.send(b"\x03")
                assert await caller.read_until(">>> ") == "\nKeyboardInterrupt\n"
                assert await caller.ask("coro.sleep_relative(0) or 'works'") == "'works'\n"

    with_door(path, talk)


def test_a_client_that_vanishes_ends_its_command(path):
    async def talk(server):
        caller = await call(path)
        await caller.send(b"coro.sleep_relative(1000)\n")
        (session,) = server._sessions
        await until(lambda: session._runs_command, "the command to wait")
        caller.close()
        await until(lambda: not server._sessions, "the session to end")

    with_door(path, talk)


def test_the_helpers_see_coros(path):
    async def talk(server):
        patient = coro.spawn(coro.wait, name="patient one")
        with await call(path) as caller:
            assert "coro 'patient one' waits\n" in await caller.ask("tasks()")
            assert "coro 'patient one' waits\n" in await caller.ask("tree()")
            assert (await caller.ask("where('patient')")).startswith("coro 'patient one' waits")
            assert (
                await caller.ask("coro.schedule(next(c for c in coro.get_live_coros() if 'patient' in c.name))") == ""
            )
        await patient

    with_door(path, talk)


def test_in_a_program_that_hides_the_loop(path):
    """The program runs in a coro that hides the loop, as under `python -m grapeshot.coro app.py`."""

    def main():
        def program():
            with pytest.raises(RuntimeError):
                asyncio.get_running_loop()
            return backdoor.serve(path)

        with coro.call_blocking(program):

            async def talk():
                with await call(path) as caller:
                    assert await caller.ask("loop is asyncio.get_running_loop()") == "True\n"

            coro.await_(talk())

    coro.run(main)


def test_the_end_of_the_run_ends_clients_and_removes_the_file(path):
    callers = []

    async def talk():
        callers.append(await call(path))
        await callers[0].send(b"coro.sleep_relative(1000)\n")
        await asyncio.sleep(0.01)

    def main():
        backdoor.serve(path)
        coro.await_(talk())

    coro.run(main)
    assert not path.exists()
    callers[0].close()


def test_a_program_of_tasks_that_has_imported_coros(path):
    async def main():
        with backdoor.serve(path), await call(path) as caller:
            assert await caller.ask("type(asyncio.current_task()).__name__") == "'Coro'\n"

    grapeshot.run(main())
