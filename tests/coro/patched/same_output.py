"""Check that a script prints the same when it runs plain and when it runs with `python -m grapeshot.coro`."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

HEAD = """
import sys
if "grapeshot.coro" in sys.modules:
    sys.modules["grapeshot.coro"].set_latency_warning(None)  # a slow machine could cause this warning
"""
TAIL = """
import sys
print("patched" if "grapeshot.coro" in sys.modules else "plain", file=sys.stderr)
"""


def check_same_output(path: Path, code: str, *arguments: str) -> None:
    """Run a script plain and patched. Both runs must succeed and print the same."""
    path.write_text(HEAD + textwrap.dedent(code) + TAIL)
    plain, patched = (
        subprocess.run(
            [sys.executable, *way, str(path), *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            cwd=path.parent,
            # A debug build shows ResourceWarnings by default.
            env={**os.environ, "PYTHONWARNINGS": "ignore::ResourceWarning"},
        )
        for way in ((), ("-m", "grapeshot.coro"))
    )
    assert (plain.returncode, plain.stderr) == (0, "plain\n"), plain.stderr
    assert (patched.returncode, patched.stderr) == (0, "patched\n"), patched.stdout + patched.stderr
    assert patched.stdout == plain.stdout
    assert plain.stdout
