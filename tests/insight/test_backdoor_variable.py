"""`GRAPESHOT_BACKDOOR=PATH python -m grapeshot[.coro] app.py`: a back door without any code in the program."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap

import pytest
from insight.callers import call
from support import PROCESS_CAP_S, coro_is_available, wait_until

needs_coros = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
COMMANDS = ["grapeshot", pytest.param("grapeshot.coro", marks=needs_coros)]

# A program that waits until its input ends.
WAITING = """
    import asyncio, sys

    async def main():
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, sys.stdin.read)

    asyncio.run(main())
    print("ended")
"""
# A program that lists a directory after one iteration of the loop.
LISTING = """
    import asyncio, os, sys

    async def main():
        await asyncio.sleep(0)
        print(os.getpid(), *os.listdir(sys.argv[1]), flush=True)
"""


class Command:
    """A program that runs under one of the commands, with GRAPESHOT_BACKDOOR set."""

    def __init__(self, command, value, code, *arguments):
        self.process = subprocess.Popen(
            [sys.executable, "-m", command, "-c", textwrap.dedent(code), *map(str, arguments)],
            env={**os.environ, "GRAPESHOT_BACKDOOR": str(value)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self):
        """End the program's input; return what it has printed."""
        out, err = self.process.communicate(timeout=PROCESS_CAP_S)
        assert self.process.returncode == 0, err
        return out, err

    def __enter__(self):
        return self

    def __exit__(self, *_exc):
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


def ask(path, line):
    async def talk():
        with await call(path) as caller:
            return await caller.ask(line)

    return asyncio.run(talk())


@pytest.mark.parametrize("command", COMMANDS)
def test_the_back_door_is_there_while_the_program_runs(path, command):
    with Command(command, path, WAITING) as program:
        wait_until(lambda: path.exists() or program.process.poll() is not None, "the back door to open", PROCESS_CAP_S)
        assert ask(path, "import os; os.getpid()") == f"{program.process.pid}\n"
        assert program.finish() == ("ended\n", "")
    assert os.listdir(path.parent) == []


@pytest.mark.parametrize("command", COMMANDS)
def test_a_directory_has_a_back_door_for_each_process(path, command):
    with Command(command, f"{path.parent}", WAITING) as program:
        own = path.parent / f"{program.process.pid}.bd"
        wait_until(lambda: own.exists() or program.process.poll() is not None, "the back door to open", PROCESS_CAP_S)
        assert program.finish() == ("ended\n", "")
    assert os.listdir(path.parent) == []


def test_a_path_that_ends_with_a_slash(path):
    """A slash at the end of the path means a directory, whether it exists or not."""
    with Command("grapeshot", f"{path.parent}/none/", WAITING) as program:
        _, err = program.finish()
    reason = f"No such file or directory ({path.parent}/none)"
    assert err == f"GRAPESHOT_BACKDOOR={path.parent}/none/: the back door cannot be opened: {reason}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_path_that_is_taken(path, command):
    with Command("grapeshot", path, WAITING) as first:
        wait_until(path.exists, "the back door to open", PROCESS_CAP_S)
        with Command(command, path, WAITING) as second:
            out, err = second.finish()
            assert out == "ended\n", "the program runs all the same"
            problem = f"the back door cannot be opened: a process is already listening there ({path})"
            assert err == f"GRAPESHOT_BACKDOOR={path}: {problem}\n"
        assert ask(path, "import os; os.getpid()") == f"{first.process.pid}\n"
        first.finish()


def test_a_problem_is_reported_once_for_all_loops(path):
    path.write_text("precious")
    code = LISTING + "\n    asyncio.run(main())" * 3
    with Command("grapeshot", path, code, path.parent) as program:
        _, err = program.finish()
    problem = f"the back door cannot be opened: a file that is not a socket already exists there ({path})"
    assert err == f"GRAPESHOT_BACKDOOR={path}: {problem}\n"
    assert path.read_text() == "precious"


@pytest.mark.parametrize(
    ("value", "err"),
    [
        ("", ""),
        ("0", ""),
        ("1", ""),
        ("app.bd", "GRAPESHOT_BACKDOOR=app.bd: not a path: a path must contain a slash, as in ./app.bd\n"),
    ],
)
def test_values_that_are_not_paths(path, value, err, monkeypatch):
    monkeypatch.chdir(path.parent)
    with Command("grapeshot", value, LISTING + "\n    asyncio.run(main())", path.parent) as program:
        assert program.finish() == (f"{program.process.pid}\n", err)


def test_a_relative_path_of_a_program_that_changes_its_directory(path, monkeypatch):
    monkeypatch.chdir(path.parent)
    code = LISTING + "\n    os.chdir('/')\n    asyncio.run(main())"
    with Command("grapeshot", "./app.bd", code, path.parent) as program:
        assert program.finish() == (f"{program.process.pid} app.bd\n", "")


def test_each_loop_has_the_back_door_and_an_unclosed_loop_leaves_no_file(path):
    code = (
        LISTING
        + """
    asyncio.run(main())
    asyncio.run(main())
    loop = asyncio.new_event_loop()
    loop.run_until_complete(main())
    """
    )
    with Command("grapeshot", path, code, path.parent) as program:
        out, err = program.finish()
        assert out == f"{program.process.pid} app.bd\n" * 3
        assert "the back door" not in err
    assert os.listdir(path.parent) == []


CHILDREN = (
    LISTING
    + """
    def child():
        import grapeshot
        grapeshot.run(main())

    async def parent():
        await asyncio.sleep(0)
        {start}
        print(os.getpid(), *os.listdir(sys.argv[1]), flush=True)

    if __name__ == "__main__":
        asyncio.run(parent())
"""
)
FORK = """
        import warnings; warnings.simplefilter("ignore", DeprecationWarning)
        if (pid := os.fork()) == 0:
            asyncio._set_running_loop(None)
            child()
            os._exit(0)
        os.waitpid(pid, 0)
"""
PROCESS = """
        import multiprocessing
        process = multiprocessing.get_context("{method}").Process(target=child)
        process.start()
        process.join()
"""


@pytest.mark.parametrize("kind", ["os.fork", "fork", "spawn", "forkserver"])
@pytest.mark.parametrize("has_enable", [False, True], ids=["command", "enable"])
def test_children_do_not_fight_over_the_path(path, tmp_path_factory, kind, has_enable):
    """Children have a path of their own, or none, and leave their parent's path alone."""
    start = FORK if kind == "os.fork" else PROCESS.format(method=kind)
    code = textwrap.dedent(CHILDREN.format(start=start))
    if has_enable:  # at module level, so that children that import the module call enable(), too
        code = "from grapeshot.insight import backdoor\nbackdoor.enable('/nowhere')\n" + code
    file = tmp_path_factory.mktemp("program") / "app.py"
    file.write_text(code)
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-m", "grapeshot", file, path.parent],
        env={**os.environ, "GRAPESHOT_BACKDOOR": str(path)},
        capture_output=True,
        text=True,
        timeout=PROCESS_CAP_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    child, parent = done.stdout.splitlines()
    pid, *names = child.split()
    # With spawn and forkserver, the child imports the module again, but not through `python -m grapeshot`, so it has a
    # back door only if the program calls enable().
    own = [f"app.bd.{pid}"] if has_enable or ("spawn" not in kind and kind != "forkserver") else []
    assert sorted(names) == ["app.bd", *own]
    assert parent.split()[1:] == ["app.bd"]
    assert "cannot be opened" not in done.stderr
    assert os.listdir(path.parent) == []


def test_a_daemon_has_the_path(path):
    """The process that was started has ended, so its child is the program now."""
    code = """
        import asyncio, os, sys, time
        pid = os.getpid()
        if os.fork():
            os._exit(0)
        while True:
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                break
            if os.getppid() != pid:  # the parent has ended, and is a zombie now
                break
            time.sleep(0.001)

        async def main():
            await asyncio.sleep(0)
            print(*os.listdir(sys.argv[1]), flush=True)
        asyncio.run(main())
    """
    with Command("grapeshot", path, code, path.parent) as program:
        program.process.wait()
        out, err = program.finish()
        assert (out, err) == ("app.bd\n", "")


def test_the_programs_own_enable_replaces_the_variable(path):
    code = f"""
        from grapeshot.insight import backdoor
        switch = backdoor.enable({os.fspath(path.with_name("other.bd"))!r}, namespace=dict(answer=42))
        {textwrap.dedent(WAITING).replace(chr(10), chr(10) + " " * 8)}
    """
    with Command("grapeshot", path, code) as program:
        wait_until(lambda: path.exists() or program.process.poll() is not None, "the back door to open", PROCESS_CAP_S)
        assert ask(path, "answer") == "42\n"
        assert os.listdir(path.parent) == ["app.bd"]
        _, err = program.finish()
        assert err == f"the back door {path} is open\n"
