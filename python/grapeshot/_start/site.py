"""``python -m grapeshot enable`` and ``disable``: the file in site-packages that makes GRAPESHOT_INSTALL work.

At each start, the interpreter executes the lines of .pth files that begin with ``import`` (Python 3.18 will not: PEP
829). Our file has a single line, which checks the environment variable and, if it is set, executes the source text of
``startup.py``. That text is part of the line, so the line causes no error after grapeshot was uninstalled.

Source: the documentation of the module ``site``.
"""

from __future__ import annotations

import argparse
import os
import site
import sys
import sysconfig
import tempfile
from pathlib import Path

# Not grapeshot.pth, because an editable installation has a file of that name, which makes the package importable. Files
# are read in alphabetical order: grapeshot.pth comes before this one.
_NAME = "grapeshot_install.pth"


def _line() -> str:
    text = Path(__file__).with_name("startup.py").read_text(encoding="utf-8")
    return f'import os; os.environ.get("GRAPESHOT_INSTALL", "0") in ("", "0") or exec({text!a}, {{}})\n'


def _is_in_user_site() -> bool:
    return bool(site.ENABLE_USER_SITE) and Path(site.getusersitepackages()) in Path(__file__).parents


def _fail(problem: object) -> int:
    sys.stderr.write(f"python -m grapeshot: error: {problem}\n")
    return 1


def _enable(*, is_user: bool) -> int:
    """Write the file into this environment's site-packages, or into the user's; return the exit status."""
    if is_user and not site.ENABLE_USER_SITE:
        return _fail("--user: this Python does not use the user's site-packages")
    is_user = is_user or _is_in_user_site()
    path = Path(site.getusersitepackages() if is_user else sysconfig.get_path("purelib"), _NAME)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Replace the file in one step: a process that starts now reads either the old or the new one.
        with tempfile.NamedTemporaryFile("w", dir=path.parent, encoding="ascii", delete=False) as file:
            file.write(_line())
        Path(file.name).chmod(0o644)
        os.replace(file.name, path)
    except OSError as error:
        can_try_user = site.ENABLE_USER_SITE and not is_user
        return _fail(f"{error}; try --user to use the user's site-packages" if can_try_user else error)
    sys.stdout.write(f"{path}: with GRAPESHOT_INSTALL=1 in the environment, {sys.executable} uses grapeshot\n")
    return 0


def _disable() -> int:
    """Remove the file from every directory in which this Python would read it; return the exit status."""
    folders = [sysconfig.get_path("purelib"), *site.getsitepackages(), site.getusersitepackages()]
    paths = [path for folder in dict.fromkeys(folders) if (path := Path(folder, _NAME)).exists()]
    for path in paths:
        try:
            path.unlink()
        except OSError as error:
            return _fail(error)
        sys.stdout.write(f"{path}: removed\n")
    if not paths:
        sys.stdout.write("not enabled\n")
    return 0


def enable(arguments: list[str]) -> int:
    """Run ``python -m grapeshot enable`` with these arguments; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m grapeshot enable")
    parser.add_argument("--user", action="store_true", help="write into the user's site-packages")
    return _enable(is_user=parser.parse_args(arguments).user)


def disable(arguments: list[str]) -> int:
    """Run ``python -m grapeshot disable`` with these arguments; return the exit status."""
    argparse.ArgumentParser(prog="python -m grapeshot disable").parse_args(arguments)
    return _disable()
