"""`python -m grapeshot enable` and `disable`, and GRAPESHOT_INSTALL=1. Each test makes a new virtual environment."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import grapeshot

LOOP = "import asyncio; loop = asyncio.new_event_loop(); print(type(loop).__module__); loop.close()"
OURS, PLAIN = "grapeshot._loop", "asyncio.unix_events"


class Environment:
    """A virtual environment with this grapeshot, found through a .pth file as in an editable installation."""

    def __init__(self, folder: Path, *options: str) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", *options, str(folder)], check=True)
        self.python = folder / "bin" / "python"
        self.site = next(iter((folder / "lib").glob("python*/site-packages")))
        self.home = folder / "home"
        self.home.mkdir()
        self.installation = self.site / "grapeshot.pth"
        self.installation.write_text(f"{Path(grapeshot.__file__).parents[1]}\n", encoding="utf-8")
        self.file = self.site / "grapeshot_install.pth"

    def run(self, *arguments: str, value: str | None = None) -> subprocess.CompletedProcess[str]:
        dropped = {"PYTHONPATH", "GRAPESHOT_INSTALL", "PYTHONUSERBASE", "PYTHONNOUSERSITE"}
        environment = {name: text for name, text in os.environ.items() if name not in dropped}
        environment["HOME"] = str(self.home)
        if value is not None:
            environment["GRAPESHOT_INSTALL"] = value
        return subprocess.run(
            [str(self.python), *arguments], env=environment, capture_output=True, text=True, timeout=60, check=False
        )

    def output(self, *arguments: str, value: str | None = "1") -> str:
        done = self.run("-W", "error", *arguments, value=value)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        return done.stdout.strip()

    def grapeshot(self, *arguments: str) -> str:
        return self.output("-m", "grapeshot", *arguments)


@pytest.fixture
def environment(tmp_path):
    return Environment(tmp_path / "environment")


def test_the_variable_has_an_effect_only_after_enable_and_before_disable(environment):
    assert environment.output("-c", LOOP) == PLAIN
    assert str(environment.file) in environment.grapeshot("enable")
    assert environment.output("-c", LOOP) == OURS
    for off in (None, "", "0"):
        assert environment.output("-c", LOOP, value=off) == PLAIN
    assert environment.grapeshot("enable")  # enabling twice does no harm
    assert environment.output("-c", LOOP) == OURS
    assert environment.grapeshot("disable") == f"{environment.file}: removed"
    assert environment.output("-c", LOOP) == PLAIN
    assert environment.grapeshot("disable") == "not enabled"
    assert [path.name for path in environment.site.glob("*grapeshot*")] == ["grapeshot.pth"]


@pytest.mark.parametrize("first", ["asyncio", "grapeshot", "asyncio.events", "concurrent.futures, asyncio"])
def test_any_module_may_be_imported_first(environment, first):
    environment.grapeshot("enable")
    assert environment.output("-c", f"import {first}; {LOOP}") == OURS


def test_a_process_without_asyncio_imports_nothing(environment):
    environment.grapeshot("enable")
    code = "import sys; print(sorted({'asyncio', 'grapeshot', 'importlib.util'} & sys.modules.keys()))"
    for value in (None, "1"):
        assert environment.output("-I", "-c", code, value=value) == "[]"


def test_importing_asyncio_leaves_the_same_modules_and_finders(environment):
    environment.grapeshot("enable")
    code = """
import asyncio, sys, importlib
print(type(asyncio.__loader__).__name__, asyncio.__spec__.loader is asyncio.__loader__, vars(asyncio.__loader__).keys())
print([type(finder) for finder in sys.meta_path])
print(importlib.reload(asyncio) is asyncio, sys.modules["asyncio"] is asyncio)
"""
    assert environment.output("-c", code, value="1") == environment.output("-c", code, value="0")


def test_a_program_may_uninstall_what_the_variable_installed(environment):
    environment.grapeshot("enable")
    assert environment.output("-c", f"import grapeshot; grapeshot.uninstall(); {LOOP}") == PLAIN


def test_the_variables_of_servers_are_set_unless_the_user_has_set_them(environment):
    environment.grapeshot("enable")
    code = """
import asyncio, os
print(*(os.environ.get(name) for name in ("GRANIAN_LOOP", "SANIC_USE_UVLOOP", "UVICORN_LOOP")))
"""
    assert environment.output("-c", code) == "asyncio false none"
    assert environment.output("-c", code, value="0") == "None None None"
    assert environment.output("-c", f"import os; os.environ['UVICORN_LOOP'] = 'uvloop'{code}").endswith("uvloop")


def test_a_loop_of_another_kind_is_reported(environment):
    environment.grapeshot("enable")
    code = "import asyncio; loop = asyncio.SelectorEventLoop(); loop.run_until_complete(asyncio.sleep(0)); loop.close()"
    said = environment.run("-c", code, value="1").stderr
    assert said.startswith("grapeshot: <string>:1 runs asyncio.unix_events._UnixSelectorEventLoop, ")
    assert environment.run("-c", code, value="0").stderr == ""


def test_children_of_children(environment):
    environment.grapeshot("enable")
    code = f"import subprocess, sys; print(subprocess.check_output([sys.executable, '-c', {LOOP!r}], text=True))"
    assert environment.output("-c", code) == OURS


@pytest.mark.parametrize("value", [None, "1"])
def test_programs_still_run_after_grapeshot_was_removed(environment, value):
    environment.grapeshot("enable")
    environment.installation.unlink()
    assert environment.output("-c", LOOP, value=value) == PLAIN
    assert environment.output("-c", "try: import grapeshot\nexcept ImportError: print('gone')", value=value) == "gone"


def test_a_broken_installation_is_reported(environment, tmp_path):
    (tmp_path / "broken" / "grapeshot").mkdir(parents=True)
    (tmp_path / "broken" / "grapeshot" / "__init__.py").write_text("import no_such_module")
    environment.grapeshot("enable")
    environment.installation.write_text(f"{tmp_path / 'broken'}\n", encoding="utf-8")
    assert "No module named 'no_such_module'" in environment.run("-c", LOOP, value="1").stderr
    assert environment.output("-c", LOOP, value=None) == PLAIN


def test_the_users_site_packages(tmp_path):
    environment = Environment(tmp_path / "environment", "--system-site-packages")
    scheme = sysconfig.get_preferred_scheme("user")
    assert str(environment.home) in environment.grapeshot("enable", "--user")
    found = list(environment.home.rglob("grapeshot_install.pth"))
    assert len(found) == 1, scheme
    assert environment.output("-c", LOOP) == OURS
    assert environment.grapeshot("disable") == f"{found[0]}: removed"
    assert environment.output("-c", LOOP) == PLAIN


def test_both_site_packages_at_once(tmp_path):
    environment = Environment(tmp_path / "environment", "--system-site-packages")
    environment.grapeshot("enable")
    environment.grapeshot("enable", "--user")
    assert environment.output("-c", LOOP) == OURS
    assert environment.grapeshot("disable").count(": removed") == 2


def test_an_installation_in_the_users_site_packages_is_enabled_there(tmp_path):
    environment = Environment(tmp_path / "environment", "--system-site-packages")
    environment.installation.unlink()
    where = Path(environment.output("-c", "import site; print(site.getusersitepackages())"))
    where.mkdir(parents=True)
    (where / "grapeshot").symlink_to(Path(grapeshot.__file__).parent)
    assert str(environment.home) in environment.grapeshot("enable")
    assert environment.output("-c", LOOP) == OURS


def test_no_users_site_packages(environment):
    done = environment.run("-m", "grapeshot", "enable", "--user")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "python -m grapeshot: error: --user: this Python does not use the user's site-packages\n"


def test_errors_of_the_system_are_shown(tmp_path):
    environment = Environment(tmp_path / "environment", "--system-site-packages")
    environment.home.rmdir()
    environment.home.touch()
    done = environment.run("-m", "grapeshot", "enable", "--user")
    assert (done.returncode, done.stdout) == (1, "")
    assert "Not a directory" in done.stderr
    assert "Traceback" not in done.stderr
