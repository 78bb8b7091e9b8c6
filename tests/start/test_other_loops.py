"""If a program under `python -m grapeshot` runs another kind of loop, a warning of one line says so."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap

import pytest

HAS_UVLOOP = importlib.util.find_spec("uvloop") is not None
TAIL = "(GRAPESHOT_QUIET=1 silences this line)"
PROGRAM = """
import asyncio, sys, threading
async def main():
    print(type(asyncio.get_running_loop()).__module__)
def by_hand():
    loop = asyncio.SelectorEventLoop()
    loop.run_until_complete(main())  # created by hand
    loop.close()
"""


@pytest.fixture
def run(tmp_path):
    """Run PROGRAM and then `code` as prog.py under `python -m grapeshot`; return its output and stderr."""

    def run(code, *, way=("-m", "grapeshot", "prog.py"), **variables):
        (tmp_path / "prog.py").write_text(PROGRAM + textwrap.dedent(code), encoding="utf-8")
        dropped = {"GRAPESHOT_INSTALL", "GRAPESHOT_QUIET", "UVICORN_LOOP", "SANIC_USE_UVLOOP", "GRANIAN_LOOP"}
        environment = {name: text for name, text in os.environ.items() if name not in dropped} | variables
        command = [sys.executable, "-W", "error::ResourceWarning", *way]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path, env=environment
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.split(), done.stderr.splitlines()

    return run


def test_our_own_loop_is_not_reported(run):
    assert run("asyncio.run(main())") == (["grapeshot._loop"], [])


def test_a_loop_of_another_kind_is_reported_with_the_line_that_runs_it(run, tmp_path):
    output, said = run("by_hand()")
    assert output == ["asyncio.unix_events"]
    line = PROGRAM.splitlines().index("    loop.run_until_complete(main())  # created by hand") + 1
    [text] = said
    assert text.startswith(f"grapeshot: {tmp_path}/prog.py:{line} runs asyncio.unix_events._UnixSelectorEventLoop, ")
    assert text.endswith(TAIL)


def test_each_kind_is_reported_once(run):
    code = """
        class Mine(asyncio.SelectorEventLoop):
            pass
        by_hand(), by_hand(), asyncio.run(main())
        with asyncio.Runner(loop_factory=Mine) as runner:
            runner.run(main())
    """
    output, said = run(code)
    assert output == ["asyncio.unix_events"] * 2 + ["grapeshot._loop", "__main__"]
    assert [text.split(" runs ")[1].split(",")[0] for text in said] == [
        "asyncio.unix_events._UnixSelectorEventLoop",
        "__main__.Mine",
    ]


def test_a_loop_derived_from_ours_is_not_reported(run):
    code = """
        import grapeshot
        class Mine(grapeshot.Loop):
            pass
        with asyncio.Runner(loop_factory=Mine) as runner:
            runner.run(main())
    """
    assert run(code)[1] == []


def test_a_package_that_runs_the_loop_is_reported_with_its_caller(run, tmp_path):
    package = tmp_path / "serving"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "server.py").write_text(
        "def serve(loop, main):\n    loop.run_until_complete(main())\n    loop.close()\n"
    )
    code = "import serving.server; serving.server.serve(asyncio.SelectorEventLoop(), main)"
    lines = len(PROGRAM.splitlines()) + 1
    [text] = run(code)[1]
    places = f"{package}/server.py:2 (called from {tmp_path}/prog.py:{lines}) runs "
    assert text.startswith(f"grapeshot: {places}")


def test_in_a_thread(run):
    assert len(run("thread = threading.Thread(target=by_hand); thread.start(); thread.join()")[1]) == 1


@pytest.mark.skipif(not HAS_UVLOOP, reason="uvloop is not installed")
@pytest.mark.parametrize(
    ("code", "place"),
    [
        ("uvloop.run(main())", "/prog.py:"),
        ("asyncio.Runner(loop_factory=uvloop.new_event_loop).__enter__().run(main())", "/prog.py:"),
        (
            "thread = threading.Thread(target=uvloop.run, args=(main(),)); thread.start(); thread.join()",
            "'Thread-1 (run)'",
        ),
    ],
)
def test_uvloop(run, code, place):
    output, said = run(f"import uvloop; {code}")
    assert output == ["uvloop"]
    [text] = said
    assert place in text
    assert " runs uvloop.Loop, which is not grapeshot's loop: remove " in text


@pytest.mark.parametrize("value", ["", "0"])
def test_silence(run, value):
    assert len(run("by_hand()", GRAPESHOT_QUIET=value)[1]) == 1
    assert run("by_hand()", GRAPESHOT_QUIET="1") == (["asyncio.unix_events"], [])
    assert run("import os; os.environ['GRAPESHOT_QUIET'] = '1'; by_hand()")[1] == []


def test_after_uninstall_nothing_is_reported(run):
    assert run("import grapeshot; grapeshot.uninstall(); asyncio.run(main())") == (["asyncio.unix_events"], [])


@pytest.mark.parametrize("code", ["sys.stderr = None", "sys.stderr.close()", "import os; os.close(2)"])
def test_without_stderr_the_loop_runs(run, code):
    assert run(f"{code}; by_hand()") == (["asyncio.unix_events"], [])


def test_install_in_the_program_does_not_report_other_loops(run):
    assert run("import grapeshot; grapeshot.install(); by_hand()", way=("prog.py",))[1] == []


@pytest.mark.parametrize(
    ("given", "found"), [({}, "grapeshot:new_event_loop"), ({"UVICORN_LOOP": "asyncio"}, "asyncio")]
)
def test_uvicorn_loop_is_set_for_the_uvicorn_command_unless_the_user_has_set_it(run, tmp_path, given, found):
    show = "import os; print(os.environ.get('UVICORN_LOOP'))"
    (tmp_path / "uvicorn").write_text(show)
    assert run("", way=("-m", "grapeshot", "./uvicorn"), **given)[0] == [found]
    assert run(show, **given)[0] == [given.get("UVICORN_LOOP", "None")]


def test_the_variables_of_other_servers_are_set_unless_the_user_has_set_them(run):
    show = "import os; print(*(os.environ.get(name) for name in ('GRANIAN_LOOP', 'SANIC_USE_UVLOOP')))"
    assert run(show)[0] == ["asyncio", "false"]
    assert run("", way=("-m", "grapeshot", "-c", show))[0] == ["asyncio", "false"]
    assert run(show, GRANIAN_LOOP="uvloop", SANIC_USE_UVLOOP="true")[0] == ["uvloop", "true"]
    assert run(f"import grapeshot; grapeshot.install(); {show}", way=("prog.py",))[0] == ["None", "None"]


@pytest.mark.skipif(not HAS_UVLOOP, reason="uvloop is not installed")
def test_uvicorn_in_a_program(run):
    """If a program calls uvicorn, uvicorn runs uvloop unless the program gives the argument `loop`. The warning names
    that argument.
    """
    pytest.importorskip("uvicorn")
    code = """
        import uvicorn
        async def app(scope, receive, send):
            await main()
        for options in ({}, {"loop": "grapeshot:new_event_loop"}, {"loop": "none"}):
            server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="on", **options))
            server.should_exit = True
            server.run()
    """
    output, said = run(code)
    assert output == ["uvloop", "grapeshot._loop", "grapeshot._loop"]
    [text] = said
    assert "uvicorn/" in text
    assert " (called from " in text
    assert "give uvicorn `loop='grapeshot:new_event_loop'`" in text
