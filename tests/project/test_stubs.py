"""The stub `_core.pyi` and the built extension agree. (The build takes most signatures of the extension from the stub.)

`make lint` runs mypy on the package and on this stub.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import grapeshot

STUB = Path(grapeshot.__file__).with_name("_core.pyi")
READER = Path(__file__).resolve().parents[2] / "build_stub.rs"
PROGRAM = """
#[path = "{path}"]
mod stub;
fn main() {{
    if let Err(problem) = stub::pass_to_compiler() {{
        eprint!("{{problem}}");
    }}
}}
"""


def test_stub_matches_the_extension(tmp_path):
    """stubtest gets a stub with one extra method. It must report this method and nothing else; the report proves that
    it has inspected the extension.
    """
    package = tmp_path / "grapeshot"
    package.mkdir()
    (package / "__init__.pyi").touch()
    stub = STUB.read_text(encoding="utf-8")
    planted = re.sub(
        r"^(class Loop\b[^\n]*:)[^\n]*\n", r"\1\n    def planted(self) -> int: ...\n", stub, flags=re.MULTILINE
    )
    assert planted != stub
    (package / "_core.pyi").write_text(planted, encoding="utf-8")
    config = tmp_path / "mypy.ini"
    config.write_text("[mypy]\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "mypy.stubtest", "--mypy-config-file", str(config), "grapeshot._core"],
        cwd=tmp_path.parent,
        env=os.environ | {"MYPYPATH": str(tmp_path), "MYPY_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "grapeshot._core.Loop.planted is not present at runtime" in done.stdout, done.stdout + done.stderr
    assert "Found 1 error" in done.stdout, done.stdout


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """A program that reads the stub with the build script's code."""
    rustc = shutil.which("rustc") or shutil.which("rustc", path=os.path.expanduser("~/.cargo/bin"))
    if rustc is None:
        pytest.skip("rustc is not installed (https://rustup.rs)")
    folder = tmp_path_factory.mktemp("reader")
    (folder / "main.rs").write_text(PROGRAM.format(path=READER), encoding="utf-8")
    subprocess.run([rustc, "--edition=2024", "-o", "reader", "main.rs"], cwd=folder, check=True, timeout=300)
    return folder / "reader"


def read(reader, folder, stub: str) -> tuple[dict[str, str], str]:
    """Return the signatures that the compiler gets for a stub, and what is wrong with the stub."""
    path = folder / "python/grapeshot/_core.pyi"
    path.parent.mkdir(parents=True)
    path.write_text(stub, encoding="utf-8")
    done = subprocess.run([reader], cwd=folder, capture_output=True, text=True, timeout=60, check=True)
    return dict(re.findall(r"^cargo::rustc-env=_core\.([\w.]+)=(.*)$", done.stdout, re.MULTILINE)), done.stderr


def declared(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (`class.method`, its signature without types) for each function of the stub that has no decorator."""
    for statement in body:
        if isinstance(statement, ast.If):
            yield from declared([*statement.body, *statement.orelse], prefix)
        elif isinstance(statement, ast.ClassDef):
            yield from declared(statement.body, f"{statement.name}.")
        elif isinstance(statement, ast.FunctionDef) and not statement.decorator_list:
            arguments = statement.args
            if prefix:
                del (arguments.posonlyargs or arguments.args)[0]
            for node in ast.walk(arguments):
                if isinstance(node, ast.arg):
                    node.annotation = None
            yield prefix + statement.name, f"{statement.name}({ast.unparse(arguments)})"


def test_the_build_reads_what_python_reads(reader, tmp_path):
    stub = STUB.read_text(encoding="utf-8")
    found, problem = read(reader, tmp_path, stub)
    assert not problem
    assert found == dict(declared(ast.parse(stub).body))
    assert len(found) > 300


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("@overload\ndef f() -> None: ...", "1: build_stub.rs does not know this kind of statement"),
        ("x: int\n\nasync def f() -> None: ...", "3: build_stub.rs does not know this kind of statement"),
        ('if sys.platform == "linux":\n    x: int', "1: build_stub.rs does not know this kind of statement"),
        ("def f[T](x: T) -> T: ...", "1: build_stub.rs does not know this kind of statement"),
        ('class C:\n    """One.\n\n    Two.\n    """\n    def f() -> None: ...', "6: the first parameter of a method"),
        ("def f() -> None: ...\ndef f() -> None: ...", "2: `f` is declared twice"),
        ("def f(x: Any = (1, 2)) -> None: ...", "1: the default of `x` must contain neither spaces nor a comma"),
        ("def f(x: int = 1 if y else 2) -> None: ...", "1: the default of `x` must contain neither"),
        ("def f(x: int\n", "1: the list of parameters does not end"),
        ("def f((x, y)) -> None: ...", "1: build_stub.rs cannot read the parameter `(x,y)`"),
        ("x: int\n\tdef f() -> None: ...", "2: build_stub.rs does not know the character '\\t'"),
        ('x: int\n"""A docstring', "2: a string does not end"),
    ],
)
def test_the_build_refuses_what_it_cannot_read(reader, tmp_path, text, problem):
    signatures, found = read(reader, tmp_path, text)
    assert found.startswith(f"python/grapeshot/_core.pyi:{problem}")
    assert not signatures
