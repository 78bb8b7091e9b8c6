"""``python -m grapeshot enable`` and ``disable``: the file in site-packages that heeds GRAPESHOT_INSTALL.

The interpreter runs the lines of a .pth file that begin with ``import`` at each start (Python 3.18 will not: PEP 829).
Ours is one line that looks at one variable of the environment, and runs the text of ``_startup`` if that is set. It
needs no other file, so that it does nothing where grapeshot was uninstalled.

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

# Not grapeshot.pth: an editable installation has a file of that name. After it in order.
_NAME = "grapeshot_install.pth"


def _line() -> str:
    text = Path(__file__).with_name("_startup.py").read_text(encoding="utf-8")
    return f'import os; os.environ.get("GRAPESHOT_INSTALL", "0") in ("", "0") or exec({text!a}, {{}})\n'


def _is_in_user_site() -> bool:
    return bool(site.ENABLE_USER_SITE) and Path(site.getusersitepackages()) in Path(__file__).parents


def _fail(problem: object) -> int:
    sys.stderr.write(f"python -m grapeshot: error: {problem}\n")
    return 1


def _enable(*, is_user: bool) -> int:
    """Write the file into site-packages of this environment, or into the user's; return an exit status."""
    if is_user and not site.ENABLE_USER_SITE:
        return _fail("this Python does not use the user's site-packages")
    is_user = is_user or _is_in_user_site()
    path = Path(site.getusersitepackages() if is_user else sysconfig.get_path("purelib"), _NAME)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A process that starts meanwhile reads the old file or the new one.
        with tempfile.NamedTemporaryFile("w", dir=path.parent, encoding="ascii", delete=False) as file:
            file.write(_line())
        Path(file.name).chmod(0o644)
        os.replace(file.name, path)
    except OSError as error:
        return _fail(f"{error}; --user writes into the user's site-packages" if site.ENABLE_USER_SITE else error)
    sys.stdout.write(f"{path}: with GRAPESHOT_INSTALL=1 in the environment, {sys.executable} uses grapeshot\n")
    return 0


def _disable() -> int:
    """Remove the file wherever this Python would read it; return an exit status."""
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


def main(arguments: list[str]) -> int:
    """Do what the command line after ``-m grapeshot`` asks for; return an exit status."""
    parser = argparse.ArgumentParser(prog="python -m grapeshot")
    commands = parser.add_subparsers(dest="command", required=True)
    enable = commands.add_parser("enable", help="let GRAPESHOT_INSTALL=1 install the loop in each process")
    enable.add_argument("--user", action="store_true", help="write into the user's site-packages")
    commands.add_parser("disable", help="remove what enable has written")
    options = parser.parse_args(arguments)
    return _enable(is_user=options.user) if options.command == "enable" else _disable()
