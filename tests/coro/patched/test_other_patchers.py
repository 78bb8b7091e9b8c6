"""gevent or eventlet in the same process as `coro.patch()`: whichever patches second is refused at once.

The tests use fakes of both packages. They also use each real package that is installed, together with the fake of the
other one.
"""

from __future__ import annotations

import importlib.util

import pytest
from support import coro_is_available, run_script

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")

GEVENT = """
saved = {}
def patch_all():
    patch_time()
def patch_time():
    saved["time"] = {}
def get_original(module, name):
    return name
"""
EVENTLET = """
already_patched = {}
def monkey_patch(**on):
    already_patched["time"] = True
def original(name):
    return name
"""
REFUSED = """
import warnings
warnings.simplefilter("ignore")  # eventlet warns that it is outdated

def refused(action):
    try:
        action()
    except (RuntimeError, ImportError) as error:
        print(type(error).__name__, *[word for word in str(error).split() if "(" in word or "." in word])
    else:
        print("done")
"""


@pytest.fixture(params=["stand-ins", "gevent", "eventlet"])
def head(request, tmp_path):
    """Return the first lines of a script. They make both packages importable, and define `refused`, which prints the
    exception that an action raises.

    The parameter of the fixture says which package is real. With "stand-ins", both are fakes.
    """
    if request.param != "stand-ins" and importlib.util.find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    for package, module, text in (("gevent", "monkey", GEVENT), ("eventlet", "patcher", EVENTLET)):
        if package != request.param:
            (tmp_path / package).mkdir()
            (tmp_path / package / f"{module}.py").write_text(text)
            start = (
                "from eventlet import patcher\nmonkey_patch = patcher.monkey_patch\n" if package == "eventlet" else ""
            )
            (tmp_path / package / "__init__.py").write_text(start)
    return f"import sys; sys.path.insert(0, {str(tmp_path)!r})" + REFUSED


def test_after_coro_patch_the_others_cannot_patch(head):
    code = """
from grapeshot import coro
coro.patch()
import gevent.monkey, eventlet, eventlet.patcher
from gevent.monkey import patch_all
refused(gevent.monkey.patch_all)
refused(gevent.monkey.patch_time)
refused(patch_all)
refused(eventlet.monkey_patch)
refused(lambda: eventlet.monkey_patch(time=True))
refused(lambda: gevent.monkey.get_original("time", "sleep"))
print(gevent.monkey.saved, eventlet.patcher.already_patched)
coro.patch()
print(coro.run(lambda: coro.sleep_relative(0)))
"""
    lines = run_script(None, head + code, flags=()).splitlines()
    assert lines[0].startswith("RuntimeError gevent.monkey.patch_all() coro.patch():")
    assert lines[1].startswith("RuntimeError gevent.monkey.patch_time() coro.patch():")
    assert lines[2] == lines[0]
    assert lines[3].startswith("RuntimeError eventlet.monkey_patch() coro.patch():")
    assert lines[4:] == [lines[3], "done", "{} {}", "None"]


def test_functions_that_were_imported_before_are_refused_too(head):
    """The name `patch_all` was imported before `coro.patch()`, so it still refers to the original function. The
    original raises because the functions that it calls are replaced.
    """
    code = """
import gevent.monkey, eventlet, eventlet.patcher
from gevent.monkey import patch_all
from grapeshot import coro
coro.patch("time")
refused(patch_all)
refused(gevent.monkey.patch_all)
refused(eventlet.monkey_patch)
refused(eventlet.patcher.monkey_patch)
print(gevent.monkey.saved.get("time"), eventlet.patcher.already_patched)
"""
    lines = run_script(None, head + code, flags=()).splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["RuntimeError"] * 4
    assert lines[4] == "None {}"


@pytest.mark.parametrize(
    "patch", ["import gevent.monkey; gevent.monkey.patch_all()", "import eventlet; eventlet.monkey_patch()"]
)
def test_after_the_others_there_are_no_coros(head, patch):
    call = patch.split("; ")[1]
    code = "refused(lambda: __import__('grapeshot.coro'))"
    line = run_script(None, f"{head}{patch}\n{code}", flags=()).splitlines()[-1]
    assert line.startswith("ImportError grapeshot.coro ")
    assert f" {call}:" in line
    code = f"from grapeshot import coro\n{patch}\nrefused(coro.patch)\nprint(coro.is_patched('time'))"
    *_, line, is_patched = run_script(None, head + code, flags=()).splitlines()
    assert line.startswith(f"RuntimeError coro.patch() {call}:")
    assert is_patched == "False"


def test_gevent_without_patching_is_accepted(head):
    code = """
from grapeshot import coro
coro.patch()
import gevent.monkey, eventlet
coro.run(lambda: print("ran"))
"""
    assert run_script(None, head + code, flags=()).endswith("ran\n")
