"""`python -m grapeshot attach PATH`: on a terminal with and without prompt_toolkit, and on a pipe."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys

import pytest
from insight.terminals import Terminal
from support import PROCESS_CAP_S, Script

PROGRAM = """
    import asyncio, sys
    from grapeshot.insight import backdoor

    async def patient(event):
        await event.wait()

    async def main(path):
        event = asyncio.Event()
        task = asyncio.create_task(patient(event), name="patient one")
        with backdoor.serve(path, namespace=dict(answer_of_all=42, event=event)):
            print("open", flush=True)
            await task
            await asyncio.sleep(0)

    loop = new_event_loop()
    loop.run_until_complete(main({path!r}))
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()
    print("ended")
"""

HAS_PROMPT_TOOLKIT = importlib.util.find_spec("prompt_toolkit") is not None
EDITORS = [
    pytest.param(
        "prompt_toolkit",
        marks=pytest.mark.skipif(not HAS_PROMPT_TOOLKIT, reason="NOT TESTED: prompt_toolkit is not installed"),
    ),
    pytest.param(
        "readline",
        marks=pytest.mark.skipif(importlib.util.find_spec("readline") is None, reason="this Python has no readline"),
    ),
]


@pytest.fixture
def program(path):
    with Script("grapeshot", PROGRAM.format(path=os.fspath(path))) as script:
        assert script.line() == "open", script.process.stderr.read()
        yield script


def end(program):
    """Wait until the program ends, and check that it has printed nothing but `ended`."""
    assert program.finish() == "ended\n"


def attach(path, *options):
    return ["-m", "grapeshot", "attach", path, *options]


@pytest.fixture(params=EDITORS)
def terminal(request, path, program):
    options = ["--plain"] if request.param == "readline" else []
    with Terminal(*attach(path, *options), GRAPESHOT_HISTORY=str(path.parent / "history")) as found:
        found.wait_for("Type help for the available names.")
        found.wait_for(">>>")
        yield found


def test_lines_and_output(terminal, program):
    terminal.type("6 * 7\r")
    terminal.wait_for("42\n")
    terminal.wait_for(">>>")
    terminal.type("def f(x):\r")
    terminal.wait_for("...")
    terminal.type("    return 1 / x\r")
    terminal.wait_for("...")
    terminal.type("\r")
    terminal.wait_for(">>>")
    terminal.type("f(0)\r")
    terminal.wait_for("ZeroDivisionError: division by zero")
    terminal.wait_for(">>>")
    terminal.type("event.set()\r")
    terminal.wait_for("[the back door is closed]")
    end(program)


def test_ctrl_c(terminal, program):
    terminal.type("print('it ' + 'waits'); await asyncio.sleep(1000)\r")
    terminal.wait_for("it waits")
    terminal.interrupt()
    terminal.wait_for("KeyboardInterrupt")
    terminal.wait_for(">>>")
    terminal.type("half a li")
    terminal.wait_for("half a li")
    terminal.interrupt()
    terminal.wait_for("KeyboardInterrupt")
    terminal.wait_for(">>>")
    terminal.type("'still ' + 'here'\r")
    terminal.wait_for("'still here'")


@pytest.mark.parametrize("keys", ["\x04", "exit\r", "quit()\r"])
def test_leaving(terminal, program, keys):
    terminal.type(keys)
    assert terminal.finish() == 0
    assert program.process.poll() is None


def test_completion(terminal, program):
    terminal.type("answer_o\t")
    terminal.wait_for("f_all")
    terminal.type(" + 1\r")
    terminal.wait_for("43\n")
    terminal.wait_for(">>>")
    terminal.type("asyncio.get_running_l\t")
    terminal.wait_for("oop(")


def test_history_lasts(path, program):
    history = path.parent / "history"
    options = [] if HAS_PROMPT_TOOLKIT else ["--plain"]
    # prompt_toolkit and `--plain` use the same history file.
    for number, more in enumerate((options, ["--plain"])):
        with Terminal(*attach(path, *more), GRAPESHOT_HISTORY=str(history)) as terminal:
            terminal.wait_for(">>>")
            if number == 0:
                terminal.type("'from ' + 'before'\r")
            else:
                terminal.type("\x1b[A\r")  # the Up key
            terminal.wait_for("'from before'\n")
            terminal.wait_for(">>>")
            terminal.type("\x04")
            assert terminal.finish() == 0
    assert history.read_text().splitlines() == ["'from ' + 'before'"] * 2
    assert stat.S_IMODE(history.stat().st_mode) == 0o600


@pytest.mark.skipif(not HAS_PROMPT_TOOLKIT, reason="NOT TESTED: prompt_toolkit is not installed")
def test_output_of_a_callback_appears_while_a_line_is_edited(path, program):
    with Terminal(*attach(path), GRAPESHOT_HISTORY=os.devnull) as terminal:
        terminal.wait_for(">>>")
        terminal.type(f"loop.add_signal_handler({signal.SIGUSR1:d}, print, 'from ' + 'a callback') or 'rea' + 'dy'\r")
        terminal.wait_for("ready")  # not for the prompt, which is drawn again at each key
        terminal.type("40")
        terminal.wait_for("40")
        program.process.send_signal(signal.SIGUSR1)
        terminal.wait_for("from a callback")
        terminal.type(" + 2\r")
        terminal.wait_for("42\n")


@pytest.mark.skipif(not HAS_PROMPT_TOOLKIT, reason="NOT TESTED: prompt_toolkit is not installed")
def test_the_end_of_the_process_ends_the_prompt(path, program):
    with Terminal(*attach(path), GRAPESHOT_HISTORY=os.devnull) as terminal:
        terminal.wait_for(">>>")
        program.process.kill()
        terminal.finish()


def test_without_prompt_toolkit_attach_says_so(path, program, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['prompt_toolkit'] = None\n")
    search = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with Terminal(*attach(path), PYTHONPATH=search, GRAPESHOT_HISTORY=os.devnull) as terminal:
        terminal.wait_for("pip install 'grapeshot[attach]'")
        terminal.wait_for(">>>")
        terminal.type("6 * 7\r")
        terminal.wait_for("42\n")


def run(path, text, *options):
    command = [sys.executable, *map(str, attach(path, *options))]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=30, check=False)


def test_a_pipe_gives_output_only(path, program):
    done = run(path, "6 * 7\nawait asyncio.sleep(0.01, 'slept')\n1 / 0\nprint('\u00e4')\n")
    assert done.returncode == 0
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert (lines[0], lines[1], lines[-2:]) == ("42", "'slept'", ["ZeroDivisionError: division by zero", "\u00e4"])
    assert run(path, "event.set()\n").returncode == 0
    end(program)


def test_the_tree_is_printed_without_a_prompt(path, program):
    command = [sys.executable, "-m", "grapeshot", "tree", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROCESS_CAP_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "patient one" in done.stdout
    assert run(path, "event.set()\n").returncode == 0
    end(program)
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROCESS_CAP_S, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert str(path) in done.stderr


def test_a_path_where_no_process_listens(path):
    done = run(path, "")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"{path}: No such file or directory\n"
    with socket.socket(socket.AF_UNIX) as sock:  # a process that was killed leaves its socket file
        sock.bind(str(path))
    done = run(path, "")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"{path}: no process is listening there\n"
    path.unlink()
    path.write_text("a file")
    done = run(path, "")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"{path}: this is not a socket\n")


@pytest.mark.parametrize(("arguments", "status"), [([], 2), (["--help"], 0), (["a", "b"], 2)])
def test_the_command_line(arguments, status):
    command = [sys.executable, "-m", "grapeshot", "attach", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == status
    assert "usage: python -m grapeshot attach [-h] [--plain] PATH|PID" in done.stdout + done.stderr


def test_a_blocked_process_is_named(path, program):
    """The back door cannot answer while the loop is blocked. At the third Ctrl-C, attach says so and ends."""
    with Terminal(*attach(path, "--plain"), GRAPESHOT_HISTORY=os.devnull) as terminal:
        terminal.wait_for(">>>")
        terminal.type("import time; print('be' + 'gins'); time.sleep(1000)\r")
        terminal.wait_for("begins")
        terminal.press_until("\x03", "something is blocking its event loop")
        assert terminal.finish() == 1
    program.process.kill()


@pytest.mark.parametrize("tool", [["nc", "-N", "-U"], ["socat", "-t5", "-", "UNIX-CONNECT:"]], ids=["nc", "socat"])
def test_common_tools_serve_as_well(path, program, tool):
    if shutil.which(tool[0]) is None:
        pytest.skip(f"{tool[0]} is not installed")
    command = [*tool[:-1], tool[-1] + str(path)] if tool[-1].endswith(":") else [*tool, str(path)]
    done = subprocess.run(command, input="6 * 7\nexit\n", capture_output=True, text=True, timeout=30, check=False)
    assert re.fullmatch(r"Python .* Type help for the available names\.\n>>> 42\n>>> ", done.stdout), done
