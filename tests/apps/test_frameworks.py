"""The servers and programs of the documentation pages, including all servers of docs/frameworks.md, in real processes.

(tests/apps/test_scaling.py runs the programs of docs/scaling.md.) All commands run in a virtual environment that sees
the packages of the current one, and in which `python -m grapeshot enable` was run. Port 8000 in a block is replaced by
a free port.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.apps.pages import CAP_S, Command
from tests.apps.processes import Process
from tests.apps.requirements import framework
from tests.project.markdown import ROOT, Block, blocks, pages

PAGE = ROOT / "docs" / "frameworks.md"
PAGES = {page: list(blocks(page)) for page in pages()}
BLOCKS = PAGES[PAGE]
COMMANDS = [block for found in PAGES.values() for block in found if block.language in {"bash", "js"}]
SERVERS = [block for block in COMMANDS if "serves" in block.words]
PRINTING = [block for block in COMMANDS if "prints" in block.words]


def names(found: list[Block]) -> list[str]:
    return [f"{block.page.stem}:{block.line}" for block in found]


@pytest.mark.parametrize("block", SERVERS, ids=names(SERVERS))
def test_a_server_of_the_pages(block: Block, python: Path, tmp_path: Path) -> None:
    command = Command(block, PAGES[block.page], python, tmp_path)
    with command.start() as server:
        assert get(f"http://127.0.0.1:{command.port}/", server) == block.words["serves"]
        if "end" not in block.words:
            server.process.terminate()
            assert server.process.wait(CAP_S) in {0, -15}, server.output
    assert not any("Traceback" in line for line in server.output), server.output


@pytest.mark.parametrize("block", PRINTING, ids=names(PRINTING))
def test_a_program_of_the_pages(block: Block, python: Path, tmp_path: Path) -> None:
    """The output, with its lines joined by spaces, contains the expected text."""
    output: list[str] = []
    for line in block.text.splitlines() if block.language == "bash" else [block.text]:
        words = shlex.split(line, comments=True) if block.language == "bash" else None
        with Command(block, PAGES[block.page], python, tmp_path, words).start() as program:
            assert program.process.wait(CAP_S) == 0, program.output
        output += program.output
    assert block.words["prints"] in " ".join(output)
    assert "Traceback" not in " ".join(output), output


def get(url: str, server: Process) -> str:
    """Repeat the request until the server answers; return the body."""
    give_up_s = time.monotonic() + CAP_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=CAP_S) as response:
                text: str = response.read().decode().strip()
                return text
        except (urllib.error.URLError, ConnectionError) as error:
            assert server.process.poll() is None, server.output
            assert time.monotonic() < give_up_s, f"{error}\n{server.output}"
            time.sleep(0.02)


@pytest.mark.parametrize(
    ("options", "answer"),
    [("--loop asyncio", "asyncio.unix_events"), ("--loop grapeshot:new_event_loop", "grapeshot._loop")],
)
def test_the_applications_tell_the_loops_apart(python: Path, tmp_path: Path, options: str, answer: str) -> None:
    shown = next(block for block in SERVERS if block.page == PAGE and block.text.startswith("uvicorn app:app"))
    text = shown.text.replace("--loop grapeshot:new_event_loop", options)
    command = Command(shown, BLOCKS, python, tmp_path, shlex.split(text))
    with command.start() as server:
        assert get(f"http://127.0.0.1:{command.port}/", server) == f"Hello from {answer}"


def test_a_notebooks_kernel(python: Path, tmp_path: Path) -> None:
    """Jupyter's own client starts the kernel that the page specifies, and sends it a request."""
    framework("ipykernel")
    framework("jupyter_client")
    kernel = tmp_path / "kernels" / "grapeshot" / "kernel.json"
    kernel.parent.mkdir(parents=True)
    [shown] = [block for block in BLOCKS if block.words.get("save") == "kernel.json"]
    kernel.write_text(json.dumps(json.loads(shown.text)), encoding="utf-8")
    (tmp_path / "ask.py").write_text(ASK_KERNEL, encoding="utf-8")
    environment = {
        "HOME": str(tmp_path),
        "JUPYTER_PATH": str(tmp_path),
        "PATH": f"{python.parent}:{os.environ['PATH']}",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }
    with Process("ask.py", env=environment, cwd=tmp_path, python=python) as asking:
        assert asking.process.wait(CAP_S) == 0, asking.output
    assert "the loop is grapeshot._loop" in asking.output


ASK_KERNEL = """
from jupyter_client.manager import KernelManager

manager = KernelManager(kernel_name="grapeshot", transport="ipc")
manager.start_kernel()
client = manager.client()
client.start_channels()
client.wait_for_ready(timeout=60)
code = "import asyncio; await asyncio.sleep(0); print('the loop is', type(asyncio.get_running_loop()).__module__)"
reply = client.execute_interactive(code, timeout=60)
assert reply["content"]["status"] == "ok", reply
client.stop_channels()
manager.shutdown_kernel()
"""


def test_the_page_has_its_sections_and_programs() -> None:
    """Without this test, a broken parser of pages would go unnoticed: no program would run, so no test would fail."""
    sections = re.findall(r"^## (.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(sections) >= 17
    assert len([block for block in SERVERS if block.page == PAGE]) >= 14
    assert len([block for block in PRINTING if block.page == PAGE]) >= 6
