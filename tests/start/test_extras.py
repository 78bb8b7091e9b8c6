"""If a package is missing, the error names the extra that installs it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support import coro_is_available

needs_coro = pytest.mark.skipif(not coro_is_available(), reason="no coros here")


@pytest.mark.parametrize(
    ("extra", "package", "code"),
    [
        ("otel", "opentelemetry", "import grapeshot.insight.otel"),
        ("rpc", "msgspec", "import grapeshot.rpc; grapeshot.rpc.Client(path='/nowhere')"),
        ("gunicorn", "uvicorn_worker uvicorn", "import grapeshot.gunicorn"),
        pytest.param("gunicorn", "gunicorn", "import grapeshot.coro.gunicorn", marks=needs_coro),
        pytest.param("wsgi", "httptools", "import grapeshot.coro.wsgi", marks=needs_coro),
    ],
)
def test_a_missing_package_names_the_extra(extra, package, code):
    hiding = f"import sys; sys.modules.update(dict.fromkeys({package.split()!r})); "
    done = subprocess.run(
        [sys.executable, "-c", hiding + code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: ")
    assert last.endswith(f": pip install 'grapeshot[{extra}]'")
