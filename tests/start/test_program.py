"""`python -m grapeshot` runs a program like plain `python`, but on grapeshot's loop.

`python -m grapeshot.coro` uses the same code to start a program, so `run_all` tests that command, too. The other
effects of the command are tested in tests/coro.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import zipfile

import pytest
from support import coro_is_available

WAYS = {"plain": (), "grapeshot": ("-m", "grapeshot"), "patched": ("-m", "grapeshot.coro")}
BOTH = ("plain", "grapeshot")
ALL = (*BOTH, *["patched"] * coro_is_available())


def run(way, *arguments, flags=(), cwd=None, **options):
    command = [sys.executable, *flags, *WAYS[way], *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=cwd, **options)


def run_all(*arguments, ways=ALL, **options):
    """Run a program in several ways, check that its status and output are always the same, and return them."""
    plain, *others = (run(way, *arguments, **options) for way in ways)
    for other in others:
        assert (other.returncode, other.stdout, other.stderr) == (plain.returncode, plain.stdout, plain.stderr)
    return plain


def run_both(*arguments, **options):
    return run_all(*arguments, ways=BOTH, **options)


@pytest.fixture
def script(tmp_path):
    def write(code, name="script.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(code), encoding="utf-8")
        return path

    return write


LOOP = """
import asyncio
async def main():
    print(type(asyncio.get_running_loop()).__module__)
asyncio.run(main())
"""


@pytest.mark.parametrize("way", BOTH)
@pytest.mark.parametrize("how", ["file", "-m", "-c", "folder"])
def test_the_program_runs_on_the_loop(script, tmp_path, way, how):
    script(LOOP, "app.py")
    script(LOOP, "folder/__main__.py")
    arguments = {"file": ["app.py"], "-m": ["-m", "app"], "-c": ["-c", LOOP], "folder": ["folder"]}[how]
    done = run(way, *arguments, cwd=tmp_path, flags=("-W", "error"))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == {"plain": "asyncio.unix_events", "grapeshot": "grapeshot._loop"}[way]


def test_the_program_is_main_and_has_its_arguments(script, tmp_path):
    script("NAME = __name__", "beside.py")
    path = script(
        """
        import sys, beside, pickle
        print(__name__, __file__, sys.argv, sys.path[0], __spec__, sys.modules["__main__"].__dict__ is globals())
        print(beside.NAME, sorted(name for name in globals() if name.startswith("__")))
        class Kind: pass
        print(type(pickle.loads(pickle.dumps(Kind()))) is Kind)
        """,
        "folder/script.py",
    )
    (path.parent / "beside.py").write_text("NAME = __name__")
    assert "'one', '--two'" in run_all("folder/script.py", "one", "--two", "-c", cwd=tmp_path).stdout


def test_module_code_archive_and_compiled_file(script, tmp_path):
    script("import sys; print(__name__, sys.argv, __spec__.name, sys.path[0])", "module.py")
    assert run_all("-m", "module", "-x", cwd=tmp_path).returncode == 0
    assert run_all("-c", "import sys; print(__name__, sys.argv, sys.path[0])", "x").stdout == "__main__ ['-c', 'x'] \n"
    assert "BuiltinImporter" in run_both("-c", "print(sorted(globals()), __loader__)").stdout
    assert run_all("-m", "no_such_module", cwd=tmp_path).returncode == 1
    archive = tmp_path / "app.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("__main__.py", "import sys, helper; print(__name__, sys.argv, helper.X)")
        file.writestr("helper.py", "X = 5")
    assert run_all(archive, "y").returncode == 0
    assert run_both(archive, "y", flags=("-P",)).returncode == 0
    subprocess.run([sys.executable, "-m", "compileall", "-q", "-b", "module.py"], cwd=tmp_path, check=True)
    script("import sys; print(__name__, __file__, sys.argv)", "plain.py")
    subprocess.run([sys.executable, "-m", "compileall", "-q", "-b", "plain.py"], cwd=tmp_path, check=True)
    assert run_both("plain.pyc", "z", cwd=tmp_path).returncode == 0


def test_program_on_stdin():
    code = """
import sys
print(sys.argv, sys.path[0], __name__, sorted(globals()), __file__, repr(__loader__)[:40], sys.stdin.read())
def fail():
    1 / 0
fail()
"""
    assert run_both("-", "x", "-y", input=code).returncode == 1
    assert "SyntaxError" in run_both("-", input="def f(:").stderr


def test_options_of_the_interpreter_apply(script, tmp_path):
    path = script("import sys; print(sys.flags.optimize, sys.path[:1] == [%r])" % str(tmp_path))
    assert run_both(path, flags=("-O",)).stdout == "1 True\n"
    assert run_both(path, flags=("-P",)).stdout == "0 False\n"


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("import sys; sys.exit()", 0),
        ("import sys; sys.exit(7)", 7),
        ("raise SystemExit('a message')", 1),
        ("import os; os._exit(9)", 9),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -15),
        ("raise KeyboardInterrupt", -2),
        ("import atexit; atexit.register(print, 'atexit'); print('end')", 0),
        ("import atexit; atexit.register(print, 'atexit'); 1 / 0", 1),
        ("import threading; threading.Thread(target=lambda: 1 / 0, name='T').run()", 1),
        ("import threading, time; threading.Thread(target=lambda: (time.sleep(0.05), print('late'))).start(); 1/0", 1),
        ("import sys; sys.excepthook = lambda *a: print('hook', a[1]); 1 / 0", 1),
        ("import sys; sys.excepthook = lambda *a: {}['key']; 1 / 0", 1),
        ("import sys; sys.excepthook = lambda *a: sys.exit(5); 1 / 0", 5),
        ("raise BaseExceptionGroup('several', [ValueError(1), KeyboardInterrupt()])", 1),
    ],
)
def test_exit_status_and_output(script, code, status):
    assert run_all(script(code)).returncode == status
    assert run_both("-c", code).returncode == status


def test_tracebacks(script, tmp_path):
    fails = """
        def fail():
            raise ValueError("wrong")
        try:
            1 / 0
        except ZeroDivisionError:
            fail()
        """
    assert "ValueError: wrong" in run_all(script(fails)).stderr
    assert "ValueError: wrong" in run_both("-c", textwrap.dedent(fails)).stderr
    script(fails, "module.py")
    assert "ValueError: wrong" in run_both("-m", "module", cwd=tmp_path).stderr
    assert "SyntaxError" in run_all(script("def f(:\n")).stderr
    assert "SyntaxError" in run_both("-c", "def f(:\n").stderr
    indented = "\n    def f():\n        1 / 0\n    f()\n"
    assert run_both("-c", indented).returncode == 1


@pytest.mark.parametrize("code", ["x = 5", "x = 5; import sys; sys.exit(3)", "x = 5; 1 / 0"])
@pytest.mark.parametrize("how", ["file", "-c", "-m"])
def test_the_prompt_after_the_program(script, tmp_path, code, how):
    script(code, "app.py")
    arguments = {"file": ["app.py"], "-c": ["-c", code], "-m": ["-m", "app"]}[how]
    typed = "print('x is', x, __name__)\nimport sys; print(repr(getattr(sys, 'last_value', None)))\n"
    environment = os.environ | {"PYTHON_BASIC_REPL": "1"}
    done = run_both(*arguments, flags=("-i", "-q"), cwd=tmp_path, input=typed, env=environment)
    assert "x is 5 __main__" in done.stdout


@pytest.mark.parametrize("asked_in", ["environment", "program"])
def test_the_prompt_by_a_variable(script, asked_in):
    path = script("import os; os.environ['PYTHONINSPECT'] = '1'; x = 5")
    environment = (
        os.environ | {"PYTHON_BASIC_REPL": "1"} | ({"PYTHONINSPECT": "1"} if asked_in == "environment" else {})
    )
    assert run_both(path, input="print('x is', x)\n", env=environment).returncode == 0


def test_ctrl_c_cancels_the_main_task(script):
    path = script(
        """
        import asyncio, os, signal
        async def main():
            try:
                asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGINT)
                await asyncio.Event().wait()
            finally:
                print("cleaned up", flush=True)
        asyncio.run(main())
        """
    )
    plain, ours = (run(way, path) for way in BOTH)
    assert (ours.returncode, ours.stdout) == (plain.returncode, plain.stdout) == (-2, "cleaned up\n")
    assert ours.stderr.splitlines()[-1] == plain.stderr.splitlines()[-1] == "KeyboardInterrupt"


@pytest.mark.parametrize("way", BOTH)
def test_a_spawned_process_finds_the_program(script, way):
    path = script(
        """
        import multiprocessing
        def square(number):
            return number * number
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(square, [1, 2, 3]))
        """
    )
    assert run(way, path).stdout == "[1, 4, 9]\n"


def test_missing_file(tmp_path):
    assert run_all(tmp_path / "none.py").returncode == 2


def test_usage():
    done = run("grapeshot")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: python -m grapeshot script.py")
    assert run("grapeshot", "--help").stdout == done.stderr
    for option, error in (("-m", "-m needs an argument"), ("-c", "-c needs an argument"), ("-x", "unknown option: -x")):
        wrong = run("grapeshot", option)
        assert (wrong.returncode, wrong.stderr) == (2, f"{done.stderr}error: {error}\n")
    assert run("grapeshot", "enable", "--everywhere").returncode == 2
    assert run("grapeshot", "enable", "--help").returncode == 0


def test_version(tmp_path):
    package = tmp_path / "grapeshot-1.2.3.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: grapeshot\nVersion: 1.2.3\n")
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    done = run("grapeshot", "--version", env=os.environ | {"PYTHONPATH": paths})
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"grapeshot 1.2.3 on {sys.implementation.name} {sys.version.split()[0]}\n"


def test_gunicorns_worker_names_the_missing_package():
    missing = "import sys; sys.modules.update(dict.fromkeys(['uvicorn_worker', 'uvicorn.workers']))"
    done = run("plain", "-c", f"{missing}; import grapeshot.gunicorn")
    assert done.returncode == 1
    assert done.stderr.endswith("pip install 'grapeshot[gunicorn]'\n")
