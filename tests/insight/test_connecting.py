"""`attach` and `top` connect to a back door, given its path or the id of its process. They refuse the path of a socket
that another user owns or could use.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading

import pytest
from insight.callers import NOBODY, needs_root
from insight.terminals import Terminal
from support import Script, wait_until

from grapeshot._loop import peer
from grapeshot.insight.backdoor import _reach
from grapeshot.insight.backdoor._wire import HELLO, frame

ESCAPE = "\x1b]0;owned\x07"
# PARTS has the parts that the first screen of `top` asks for. NESTED is JSON that Python cannot parse, because it is
# nested too deep.
PARTS = {"waits": [], "descriptors": [], "memory": {}}
NESTED = b"[" * 100_000
needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/net/unix"), reason="this system has no /proc")

PROGRAM = """
    import asyncio, signal, sys
    from grapeshot.insight import backdoor

    async def main(paths):
        loop = asyncio.get_running_loop()
        servers = [backdoor.serve(path) for path in paths]
        done = asyncio.Event()
        {more}
        loop.add_reader(sys.stdin, done.set)
        print("open", flush=True)
        await done.wait()

    loop = new_event_loop()
    loop.run_until_complete(main({paths!r}))
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()
"""


def program(*paths, more=""):
    script = Script("grapeshot", PROGRAM.format(paths=[os.fspath(path) for path in paths], more=more))
    assert script.line() == "open", script.process.stderr.read()
    return script


def listen(path, mode=0o600):
    """Listen at the path as any program could, without being a back door."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.fspath(path))
    os.chmod(path, mode)
    listener.listen()
    return listener


def refusal(target):
    with pytest.raises(_reach.RefusedError) as caught:
        _reach.connect(str(target))
    return str(caught.value)


def test_a_path(path):
    with listen(path), _reach.connect(os.fspath(path)).sock as sock:
        assert sock.getpeername() == os.fspath(path)


def test_a_relative_path_behind_a_link_of_ones_own(path, monkeypatch):
    (path.parent / "link").symlink_to(".")
    monkeypatch.chdir(path.parent)
    with listen(path), _reach.connect("link/app.bd").sock as sock:
        assert sock.getpeername() == os.path.realpath(path)


def silent(listener):
    """Return whether nothing was sent to the listener."""
    listener.setblocking(False)
    try:
        accepted, _ = listener.accept()
    except BlockingIOError:
        return True
    with accepted:
        return accepted.recv(1) == b""


@needs_root
def test_a_name_that_a_stranger_has_taken_first(path):
    """In a directory like /tmp any user can be the first to bind a socket to the name. That user could read what is
    typed, and send escape sequences to the terminal.
    """
    path.parent.chmod(0o1777)
    with listen(path) as listener:
        os.lchown(path, NOBODY, -1)
        assert refusal(path) == (
            f"{path}: the socket belongs to the user {NOBODY}; root can reach it by giving the process id"
        )
        assert silent(listener)


def test_a_listener_of_another_user(path, monkeypatch):
    """The kernel knows which user listens, no matter which user the file belongs to."""
    monkeypatch.setattr(peer, "peer_uid", lambda sock: os.geteuid() + 1)
    with listen(path) as listener:
        assert f"a process of the user {os.geteuid() + 1} is listening there; nothing was sent to it" in refusal(path)
        assert silent(listener)


def test_a_system_that_cannot_tell_who_listens(path, monkeypatch):
    monkeypatch.setattr(peer, "peer_uid", None)
    with listen(path):
        assert "cannot tell which user is listening there" in refusal(path)


@pytest.mark.parametrize("mode", [0o666, 0o660, 0o602])
def test_a_socket_that_others_may_use(path, mode):
    with listen(path, mode):
        assert refusal(path) == f"{path}: other users can use the socket: its mode is {mode:04o}, not 0600"


def test_a_directory_in_which_others_may_write(path):
    with listen(path):
        path.parent.chmod(0o777)
        assert "others can write to the directory, and it is not sticky" in refusal(path)


def test_a_symbolic_link(path):
    with listen(path):
        (path.parent / "link").symlink_to(path)
        assert "this is a symbolic link" in refusal(path.parent / "link")


def test_a_process_of_another_id_listens(path):
    problem = f"a process other than {os.getppid()} is listening there"
    with listen(path), pytest.raises(_reach.RefusedError, match=problem):
        _reach._connect_to(os.fspath(path), {os.geteuid()}, os.getppid())


# ------------------------------------------------------------------ by the id of a process


def attach(target, text, *options):
    command = [sys.executable, "-m", "grapeshot", "attach", *options, str(target)]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False)


@needs_proc
def test_the_back_door_of_a_process(path):
    with program(path) as script:
        done = attach(script.process.pid, "import os; os.getpid()\n")
        assert (done.returncode, done.stdout, done.stderr) == (0, f"{script.process.pid}\n", "")
        script.finish()


@needs_proc
def test_several_back_doors_of_a_process(path):
    paths = [path.with_name("one.bd"), path.with_name("two.bd")]
    with program(*paths) as script:
        assert refusal(script.process.pid) == "\n".join(
            [f"the process {script.process.pid} has 2 back doors; give the path of one:", *map(str, paths)]
        )
        script.finish()


@needs_proc
def test_a_process_without_a_back_door(path):
    with program() as script:
        pid = script.process.pid
        listener = listen(path)  # this process listens, too, but `pid` is the other process
        assert refusal(pid).startswith(f"the process {pid} has no back door open. It does not handle SIGUSR2")
        assert "GRAPESHOT_BACKDOOR=PATH python -m grapeshot" in refusal(pid)
        listener.close()
        script.finish()


@needs_proc
def test_a_process_that_opens_one_at_a_signal(path):
    more = f"backdoor.enable({os.fspath(path)!r})"
    with program(more=more) as script:
        pid = script.process.pid
        assert f"`kill -USR2 {pid}` opens one" in refusal(pid)
        script.process.send_signal(signal.SIGUSR2)
        wait_until(path.exists, "the back door to open")
        _reach.connect(str(pid)).sock.close()
        script.finish()


@needs_proc
def test_no_process(path, tmp_path, monkeypatch):
    pid = subprocess.Popen(["true"])
    pid.wait()
    assert refusal(pid.pid) == f"there is no process {pid.pid}; for a socket of that name, write ./{pid.pid}"


@needs_proc
@pytest.mark.parametrize("paths", [[], ["/nowhere.bd"]], ids=["without a back door", "with one"])
def test_a_process_that_ends_while_it_is_looked_at(monkeypatch, paths):
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        look = _reach.paths_of

        def end(pid):
            assert look(pid) == []
            process.communicate()
            return paths

        monkeypatch.setattr(_reach, "paths_of", end)
        assert refusal(process.pid).startswith(f"there is no process {process.pid}")


@needs_proc
@pytest.mark.parametrize("command", ["attach", "top"])
def test_names_of_back_doors_do_not_move_the_cursor(path, command):
    if command == "top":
        pytest.importorskip("rich")
        pytest.importorskip("pyte")
    paths = [path.with_name(f"{ESCAPE}{number}.bd") for number in (1, 2)]
    with program(*paths) as script:
        with Terminal("-m", "grapeshot", command, str(script.process.pid)) as terminal:
            assert terminal.finish() == 1
            assert "has 2 back doors; give the path of one:\n" in terminal._text
            assert "\ufffd]0;owned\ufffd2.bd" in terminal._text
            assert b"\x1b]0" not in terminal._raw
        script.finish()


@needs_proc
@needs_root
def test_another_user_sees_no_back_door_of_a_process(path):
    with program(path) as script:
        code = f"""
import os, sys
from grapeshot.insight.backdoor import _reach
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
try:
    _reach.connect("{script.process.pid}")
except _reach.RefusedError as exc:
    print(exc)
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
        assert done.stdout == (
            f"the process {script.process.pid} belongs to the user {os.geteuid()}; "
            "only that user and root can see its back door\n"
        )
        script.finish()


@needs_proc
@needs_root
def test_root_reaches_the_process_of_a_user_and_sees_no_escapes(path):
    os.chown(path.parent, NOBODY, -1)
    for folder in (path.parent, *path.parent.parents):
        folder.chmod(folder.stat().st_mode | 0o011)
    more = "pass"
    code = PROGRAM.replace("loop = new_event_loop()", f"import os; os.setuid({NOBODY})\n    loop = new_event_loop()")
    # The user NOBODY owns the socket's directory, and root owns the directories above it.
    with Script("grapeshot", code.format(paths=[os.fspath(path)], more=more)) as script:
        assert script.line() == "open", script.process.stderr.read()
        assert "the directory belongs to the user" in refusal(path)
        done = attach(script.process.pid, f"print({ESCAPE!r} + 'end')\n")
        assert done.stdout == "\ufffd]0;owned\ufffdend\n"
        script.finish()


# ------------------------------------------------------------------ the other end is not a back door


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(b"\0" + frame(b"p", b"no number"), id="a prompt without a number"),
        pytest.param(b"\0" + frame(b"p", b"\xff\xff 1"), id="a prompt that is not text"),
        pytest.param(b"\0o\xff\xff\xff\xff", id="a frame of 4 GiB"),
        pytest.param(b"hello" * 100_000, id="no greeting"),
        # `attach` parses completions whenever they arrive. `top` asks twice, and parses the output between the prompts.
        pytest.param(
            b"\0" + frame(b"c", NESTED) + frame(b"p", b"1 ") + frame(b"o", NESTED) + frame(b"p", b"2 "),
            id="lists nested too deep",
        ),
    ],
)
@pytest.mark.parametrize("command", ["attach", "top"])
def test_a_peer_that_is_not_a_back_door_ends_the_client(path, answer, command):
    client_ends(path, answer, command, "is not a back door")


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        pytest.param([], "is not a back door", id="no dictionary"),
        pytest.param({}, "is not a back door", id="nothing"),
        pytest.param({"pid": "../../tmp/x", "took_s": 0} | PARTS, "is not a back door", id="a pid that is a path"),
        pytest.param({"pid": 1, "took_s": 0}, "is not a back door", id="no parts"),
        pytest.param({"pid": 1, "took_s": 0} | PARTS, "data that top cannot show: KeyError", id="no numbers"),
        pytest.param(
            {"pid": 1, "took_s": 0} | {part: [7] for part in PARTS}, "data that top cannot show: TypeError", id="rows"
        ),
    ],
)
def test_a_malformed_sample_ends_top(path, sample, words):
    answer = b"\0" + frame(b"p", b"1 ") + frame(b"o", json.dumps(sample).encode()) + frame(b"p", b"2 ")
    client_ends(path, answer, "top", words)


def client_ends(path, answer, command, words):
    """Run a client against a listener that sends `answer`, and check that the client ends and shows `words`."""
    if command == "top":
        pytest.importorskip("rich")
        pytest.importorskip("pyte")

    def serve():
        try:
            with listener.accept()[0] as accepted:
                accepted.recv(len(HELLO), socket.MSG_WAITALL)
                accepted.sendall(answer)
                while accepted.recv(1000):
                    pass
        except OSError:
            pass  # the client has left, or never came

    with listen(path) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        options = ["--plain"] if command == "attach" else []
        try:
            with Terminal("-m", "grapeshot", command, *options, path, GRAPESHOT_HISTORY=os.devnull) as terminal:
                terminal.finish()
                assert words in terminal._text
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
