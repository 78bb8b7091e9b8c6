"""The code blocks of the pages work: Python blocks run as scripts, servers answer a request, make targets exist."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import threading
import time
import tomllib
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from project.markdown import ROOT, RUN_AS_FRAMEWORKS, Block, blocks, pages
from support import coro_is_available, free_port

CAP_S = 30.0
BLOCKS = [block for page in pages() if page not in RUN_AS_FRAMEWORKS for block in blocks(page)]

SCRIPTS = [block for block in BLOCKS if block.language == "python" and "save" not in block.words]
COMMANDS = [block for block in BLOCKS if block.language == "bash" and "serves" not in block.words]
SERVERS = [block for block in BLOCKS if "serves" in block.words]


def named(found: list[Block]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("block", found, ids=[block.name for block in found])


def make_targets() -> set[str]:
    """The targets of the Makefile, as make itself lists them."""
    done = subprocess.run(["make", "-qpRr", "-f", "Makefile"], cwd=ROOT, capture_output=True, text=True, check=False)
    phony = re.search(r"^\.PHONY:(.*)$", done.stdout, re.MULTILINE)
    assert phony, done.stderr
    return set(phony[1].split())


def installed_programs() -> set[str]:
    """The programs that `make venv` installs. Each has the name of its package."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    return {"maturin", *(re.split(r"[^\w-]", requirement)[0] for requirement in extras["dev"])}


def is_too_new(block: Block) -> bool:
    needed = tuple(int(part) for part in block.words.get("python", "3.11").split("."))
    return sys.version_info < needed


@named(SCRIPTS)
def test_python_block_runs(block, tmp_path):
    if is_too_new(block):
        pytest.skip(f"the block is for Python {block.words['python']}")
    for needed in filter(None, block.words.get("needs", "").split(",")):
        if needed == "coro" and not coro_is_available():
            pytest.skip("no coros on this interpreter")
        elif needed != "coro":
            pytest.importorskip(needed)
    script = tmp_path / "block.py"
    script.write_text(block.text, encoding="utf-8")
    command = [sys.executable, "-W", "error", str(script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=CAP_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert block.words.get("prints", "") in done.stdout


@named(SERVERS)
def test_server_command_serves(block, tmp_path):
    for earlier in BLOCKS:
        if earlier.page == block.page and "save" in earlier.words:
            (tmp_path / earlier.words["save"]).write_text(earlier.text, encoding="utf-8")
    program, *arguments = shlex.split(block.text)
    assert (Path(sys.executable).parent / program).exists(), f"{program} is not installed"
    port = free_port()
    arguments[arguments.index("--port") + 1] = str(port)
    command = [sys.executable, "-m", program, *arguments]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    output: list[str] = []
    reader = threading.Thread(target=lambda: output.extend(process.stdout), daemon=True)
    reader.start()
    try:
        assert get(f"http://127.0.0.1:{port}/", process, output) == block.words["serves"]
        process.terminate()
        assert process.wait(CAP_S) in {0, -15}, "".join(output)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        reader.join(CAP_S)
        process.stdout.close()
    assert "Traceback" not in "".join(output), "".join(output)


def get(url: str, process: subprocess.Popen[str], output: list[str]) -> str:
    """Returns the body as soon as the server answers."""
    give_up = time.monotonic() + CAP_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=CAP_S) as response:
                return response.read().decode().strip()
        except urllib.error.URLError as error:
            assert process.poll() is None, "".join(output)
            assert time.monotonic() < give_up, f"{error}\n{''.join(output)}"
            time.sleep(0.01)


@named(COMMANDS)
def test_bash_block_names_real_commands(block):
    """Every line is a make target, an executable file of the tree, or a program that `make venv` installs."""
    for line in block.text.splitlines():
        words = [word for word in shlex.split(line, comments=True) if not re.fullmatch(r"[A-Z_]+=.*", word)]
        if not words:
            continue
        if words[0] == "make":
            assert set(words[1:]) <= make_targets(), line
        elif words[:2] == ["pip", "install"]:
            assert words[2] in {".", "git+$URL"}, line
        elif words[0].startswith(("./", ".ci/")):
            assert (ROOT / words[0]).stat().st_mode & 0o111, line
        elif words[0].startswith(".venv/bin/"):
            assert Path(words[0]).name in installed_programs(), line
        else:
            pytest.fail(f"{block.name}: nobody checks {line!r}")


def test_the_two_commands_are_in_the_readme():
    lines = {line for block in COMMANDS if block.page.name == "README.md" for line in block.text.splitlines()}
    assert {"make demo", "make test"} <= lines


def test_every_make_target_has_a_line_in_help():
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    listed = set(re.findall(r"^\s+(?:\x1b\[1m)?([a-z-]+)", done.stdout, re.MULTILINE))
    assert listed == make_targets()


def test_the_pages_have_the_blocks_that_this_file_is_for():
    """With a broken parser no block would run, and no test would fail."""
    readme = [block for block in BLOCKS if block.page.name == "README.md"]
    scripts = "\n".join(block.text for block in readme if block.language == "python")
    for way_in in ("grapeshot.install()", "grapeshot.run(main())"):
        assert way_in in scripts
    assert any("--loop grapeshot:new_event_loop" in block.text for block in SERVERS)
