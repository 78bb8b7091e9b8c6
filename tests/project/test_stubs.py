"""`_core.pyi` matches the built extension. (`make lint` runs mypy on the package and on this stub.)"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import grapeshot

STUB = Path(grapeshot.__file__).with_name("_core.pyi")


def test_stub_matches_the_extension(tmp_path):
    """stubtest gets a stub with one extra method. It must report that method, which proves that it has inspected the
    extension, and nothing else.
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
