"""The types are right: mypy --strict passes on the package, and `_core.pyi` matches the built extension."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import grapeshot

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(grapeshot.__file__).parent


def run(*arguments: str, cache: Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"MYPY_CACHE_DIR": str(cache)}
    if path is not None:
        environment["MYPYPATH"] = str(path)
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("mypy-cache")


def test_mypy_strict(cache):
    done = run("mypy", cache=cache)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout


def test_stub_says_what_the_extension_has(cache):
    done = run("mypy.stubtest", "--mypy-config-file", "pyproject.toml", "grapeshot._core", cache=cache)
    assert done.returncode == 0, done.stdout + done.stderr


def test_stubtest_would_notice(cache, tmp_path):
    """stubtest reports a stub with one extra method, which proves that it did inspect the extension."""
    copy = tmp_path / "grapeshot"
    copy.mkdir()
    (copy / "__init__.pyi").touch()
    stub = (PACKAGE / "_core.pyi").read_text(encoding="utf-8")
    planted = re.sub(
        r"^(class Loop\b[^\n]*:)[^\n]*\n", r"\1\n    def planted(self) -> int: ...\n", stub, flags=re.MULTILINE
    )
    assert planted != stub
    (copy / "_core.pyi").write_text(planted, encoding="utf-8")
    config = tmp_path / "mypy.ini"
    config.write_text("[mypy]\n", encoding="utf-8")
    done = run("mypy.stubtest", "--mypy-config-file", str(config), "grapeshot._core", cache=cache, path=tmp_path)
    assert done.returncode == 1
    assert "grapeshot._core.Loop.planted is not present at runtime" in done.stdout


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("grapeshot.run(main())", None),
        ("asyncio.Runner(loop_factory=grapeshot.new_event_loop)", None),
        ("x: int = grapeshot.run(main())", "[assignment]"),
        ("grapeshot.new_event_loop().call_soon(1)", "[arg-type]"),
        ("grapeshot.missing()", "[attr-defined]"),
    ],
)
def test_types_that_a_user_sees(cache, tmp_path, text, error):
    """The package is typed (py.typed), so type checkers check programs that use it."""
    program = tmp_path / "program.py"
    head = """
        import asyncio
        import grapeshot

        async def main() -> str:
            return "done"

        """
    program.write_text(textwrap.dedent(head) + text + "\n", encoding="utf-8")
    config = tmp_path / "mypy.ini"
    config.write_text("[mypy]\nstrict = True\n", encoding="utf-8")
    done = run("mypy", "--config-file", str(config), str(program), cache=cache)
    if error is None:
        assert done.returncode == 0, done.stdout
    else:
        assert done.returncode == 1, done.stdout
        assert error in done.stdout
