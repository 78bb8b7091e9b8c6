"""The machine that runs the measurement: its description, its cores, and what /proc says about a process."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import resource
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@functools.cache
def has_gil() -> bool:
    """Whether only one thread of this interpreter runs at a time."""
    return getattr(sys, "_is_gil_enabled", lambda: True)()


def cores() -> tuple[int | None, int | None]:
    """Return a core for the server and one for the load, or (None, None) if there is only one core or if this system
    cannot pin processes.
    """
    if not hasattr(os, "sched_getaffinity"):
        return None, None
    usable = sorted(os.sched_getaffinity(0))
    return (usable[-1], usable[0]) if len(usable) > 1 else (None, None)


@contextlib.contextmanager
def on_core(core: int | None) -> Iterator[None]:
    """Pin the calling thread to this core during the block. Processes that it starts then stay on this core."""
    if core is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@functools.cache
def _bytecode_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="grapeshot-bytecode-")


def child_environment() -> dict[str, str]:
    """Return the environment of measured Python processes, with a writable folder for bytecode.

    Without this folder, or with PYTHONDONTWRITEBYTECODE, Python might compile every module at every start.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return environment | {"PYTHONPYCACHEPREFIX": _bytecode_folder().name}


def raise_descriptor_limit() -> int:
    """Raise the soft limit of open descriptors as far as allowed, and return it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1_000_000 if hard == resource.RLIM_INFINITY else hard
    # macOS refuses more than OPEN_MAX even when it reports no limit.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def resident_kib(pid: int) -> float:
    """Return the resident memory of a process. Like everything here that reads /proc, it works on Linux only."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1024


def peak_kib(pid: int) -> float:
    """Return the largest resident memory that a process has had."""
    status = Path(f"/proc/{pid}/status").read_text()
    return float(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")))


def open_descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def _processor() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _revision() -> str | None:
    git = shutil.which("git")
    if git is None:
        return None

    def said(*arguments: str) -> str:
        outcome = subprocess.run([git, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        return outcome.stdout.strip()

    revision = said("describe", "--always", "--abbrev=12")
    # Ignore changes to the results, which the comparison itself writes.
    changed = said("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results")
    return f"{revision}-dirty" if revision and changed else revision or None


def describe() -> dict[str, object]:
    """Describe the machine, as far as a reader needs it to judge the numbers."""
    return {
        "processor": _processor(),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "libc": " ".join(platform.libc_ver()).strip(),
        "python": platform.python_version(),
        "python_compiler": platform.python_compiler(),
        "free_threaded": bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "revision": _revision(),
    }
