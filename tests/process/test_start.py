"""subprocess_exec, subprocess_shell and asyncio's functions on top of them: arguments, stdio, results, errors."""

from __future__ import annotations

import asyncio
import os
import stat
import subprocess
import sys

import pytest
from process.children import CAT, SHELL, Events, sh
from support import run_script

PIPE = subprocess.PIPE


async def output_of(*args, **kwargs):
    process = await asyncio.create_subprocess_exec(*args, stdout=PIPE, stderr=PIPE, **kwargs)
    out, err = await process.communicate()
    assert err == b""
    return out.decode().strip()


async def test_exec(loop):
    process = await asyncio.create_subprocess_exec(
        *sh('echo "$0 $1"; echo no >&2; exit 3'), "a b", "c", stdout=PIPE, stderr=PIPE
    )
    assert await process.communicate() == (b"a b c\n", b"no\n")
    assert process.returncode == 3
    assert await process.wait() == 3


async def test_shell(loop):
    process = await asyncio.create_subprocess_shell("cat; exit 5", stdin=PIPE, stdout=PIPE)
    assert await process.communicate(b"through the shell") == (b"through the shell", None)
    assert process.returncode == 5


async def test_shell_takes_bytes(loop):
    process = await asyncio.create_subprocess_shell(b"exit 6")
    assert await process.wait() == 6


async def test_the_default_of_the_loops_methods_is_three_pipes(loop):
    transport, protocol = await loop.subprocess_exec(Events, *CAT)
    for fd in (0, 1, 2):
        assert transport.get_pipe_transport(fd) is not None
    transport.get_pipe_transport(0).write(b"hello")
    transport.get_pipe_transport(0).close()
    await protocol.wait_lost()
    assert protocol.data == {1: b"hello", 2: b""}
    transport.close()


@pytest.mark.xfail_on(uvloop="#505: stdin is a socket")
async def test_stdio_are_pipes(loop):
    kinds = "import os, stat; print(*[stat.S_IFMT(os.fstat(fd).st_mode) for fd in (0, 1, 2)])"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", kinds, stdin=PIPE, stdout=PIPE, stderr=PIPE)
    out, _ = await process.communicate()
    assert [int(kind) for kind in out.split()] == [stat.S_IFIFO] * 3


async def test_redirections(loop, tmp_path):
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_bytes(b"from a file")
    with source.open("rb") as stdin, target.open("wb") as stdout:
        process = await asyncio.create_subprocess_exec(*CAT, stdin=stdin, stdout=stdout, stderr=subprocess.DEVNULL)
        assert await process.wait() == 0
    assert target.read_bytes() == b"from a file"
    process = await asyncio.create_subprocess_exec(*sh("echo out; echo err >&2"), stdout=PIPE, stderr=subprocess.STDOUT)
    assert await process.communicate() == (b"out\nerr\n", None)


async def test_popen_arguments(loop, loop_kind, tmp_path):
    assert await output_of(*sh("pwd"), cwd=tmp_path) == str(tmp_path.resolve())
    assert await output_of(*sh("echo $ONE"), env={"ONE": "1"}) == "1"
    assert await output_of("not this name", "-c", "echo ran", executable=SHELL) == "ran"
    if loop_kind != "uvloop":  # uvloop refuses these arguments
        assert await output_of(*sh("umask"), umask=0o27) == "0027"
        script = "import os; print(os.getpgid(0) == os.getpid())"
        assert await output_of(sys.executable, "-c", script, process_group=0) == "True"


async def test_pass_fds(loop):
    read_end, write_end = os.pipe()
    try:
        program = sys.executable, "-c", f"import os; os.write({write_end}, b'through')"
        assert await output_of(*program, pass_fds=(write_end,)) == ""
        assert os.read(read_end, 100) == b"through"
        process = await asyncio.create_subprocess_exec(*program, stderr=subprocess.DEVNULL)
        assert await process.wait() != 0
    finally:
        os.close(read_end)
        os.close(write_end)


async def test_start_new_session(loop):
    script = "import os; print(os.getsid(0) == os.getpid())"
    assert await output_of(sys.executable, "-c", script, start_new_session=True) == "True"


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("universal_newlines", True),
        ("shell", None),
        ("bufsize", 4096),
        ("text", True),
        ("encoding", "utf-8"),
        ("errors", "strict"),
    ],
)
@pytest.mark.parametrize("how", ["exec", "shell"])
async def test_text_and_buffering_are_refused(loop, how, option, value):
    def factory():
        raise AssertionError("the factory was called before the arguments were checked")

    if option == "shell":
        value = how == "exec"
    start = loop.subprocess_exec if how == "exec" else loop.subprocess_shell
    with pytest.raises(ValueError, match=option):
        await start(factory, "true", **{option: value})


@pytest.mark.xfail_on(uvloop="it raises a TypeError")
async def test_a_command_line_is_text(loop):
    with pytest.raises(ValueError, match="string"):
        await loop.subprocess_shell(Events, ["true"])


@pytest.mark.parametrize("stdio", [None, PIPE])
async def test_a_program_that_is_not_there(loop, stdio):
    with pytest.raises(FileNotFoundError):
        await asyncio.create_subprocess_exec("/no/such/program", stdin=stdio, stdout=stdio, stderr=stdio)
    with pytest.raises(FileNotFoundError):
        await asyncio.create_subprocess_exec(*sh("true"), stdin=stdio, cwd="/no/such/directory")


async def test_a_factory_that_raises_starts_nothing(loop, tmp_path):
    def factory():
        raise KeyError("factory")

    with pytest.raises(KeyError):
        await loop.subprocess_exec(factory, *sh(f"touch {tmp_path}/started"))
    assert list(tmp_path.iterdir()) == []


async def test_much_data_both_ways(loop):
    data = os.urandom(3_000_000)
    process = await asyncio.create_subprocess_exec(*CAT, stdin=PIPE, stdout=PIPE)
    out, _ = await process.communicate(data)
    assert out == data


async def test_a_conversation(loop):
    process = await asyncio.create_subprocess_exec(
        *sh('while read line; do echo "<$line>"; done; exit 9'), stdin=PIPE, stdout=PIPE
    )
    for word in (b"one", b"two", b"three"):
        process.stdin.write(word + b"\n")
        assert await process.stdout.readline() == b"<" + word + b">\n"
    process.stdin.close()
    assert await process.stdout.read() == b""
    assert await process.wait() == 9


@pytest.mark.skip_on(uvloop="RuntimeError from a transport that may already be closed")
async def test_a_program_that_does_not_read(loop):
    process = await asyncio.create_subprocess_exec(*sh("exec 0<&-; exit 4"), stdin=PIPE, stdout=PIPE)
    await process.communicate(bytes(1_000_000))  # communicate() ignores the broken pipe
    assert process.returncode == 4


@pytest.mark.skipif(not hasattr(os, "register_at_fork"), reason="there is no fork")
@pytest.mark.xfail_on(uvloop="#749: the hooks run")
def test_no_hooks_of_the_parent_run_in_the_child(loop_kind):
    """The program's at-fork hooks do not run in a child that only executes another program."""
    out = run_script(
        loop_kind,
        """
        import asyncio, os, subprocess
        def hook():
            os.write(1, b"the hook ran ")
        loop = new_event_loop()
        os.register_at_fork(after_in_child=hook)
        async def main():
            for options in ({}, {"stdout": subprocess.PIPE}, {"close_fds": False}, {"start_new_session": True}):
                process = await asyncio.create_subprocess_exec("/bin/sh", "-c", "echo child", **options)
                out, _ = await process.communicate()
                if out:
                    os.write(1, out)
        loop.run_until_complete(main())
        loop.close()
        """,
    )
    assert out.split() == ["child"] * 4


@pytest.mark.xfail_on(uvloop="it logs nothing")
async def test_debug_mode_logs_the_life_of_a_process(loop, caplog):
    loop.set_debug(True)
    caplog.set_level("DEBUG", logger="asyncio")
    process = await asyncio.create_subprocess_exec(*sh("exit 2"), "secret", stdin=PIPE)
    await process.communicate()
    text = caplog.text
    caplog.clear()  # the log records refer to the transports
    assert f"execute program '{SHELL}' stdin=<pipe>" in text
    assert f"created: pid {process.pid}" in text
    assert "exited with return code 2" in text
    assert "secret" not in text
