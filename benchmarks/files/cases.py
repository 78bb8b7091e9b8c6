"""The cases in which files are read and written, with their bounds."""

from __future__ import annotations

import functools
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks._machine import ROOT
from benchmarks.files.libraries import ALL
from benchmarks.files.programs import KINDS
from benchmarks.measure import Bound, Case, Sample, Wall, own_sample

# File systems in memory. The benchmark refuses them, because its files must be on a disk.
IN_MEMORY = ("tmpfs", "ramfs")
FOLDER = "GRAPESHOT_BENCH_FOLDER"
PEERS = ("aiofiles+asyncio", "aiofiles+uvloop", "aiofiles+grapeshot")


@dataclass(frozen=True)
class FileSettings:
    """How much one run does."""

    # The CPU time to measure; at least one round is run.
    seconds: float = 0.05
    files: int = 1000
    mib: int = 1024
    lines: int = 10_000


QUICK = FileSettings(mib=64)


def file_system(folder: Path) -> str:
    """Return the type of the file system of a folder, as /proc/self/mountinfo has it, or "unknown"."""
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    except OSError:
        return "unknown"
    return next((mount[mount.index("-") + 1] for mount in mounts if mount[2] == number), "unknown")


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    where = Path(os.environ.get(FOLDER) or ROOT / "target" / "bench")
    where.mkdir(parents=True, exist_ok=True)
    if (kind := file_system(where)) in IN_MEMORY:
        raise SystemExit(f"{where} is on {kind}, which is in memory: set {FOLDER} to a folder on a disk")
    return tempfile.TemporaryDirectory(prefix="files-", dir=where)


def folder() -> Path:
    """Return the folder of the files, on a disk. It is removed when this process ends.

    Raises SystemExit if it would be in memory.
    """
    return Path(_folder().name)


def _case(kind: str, title: str, of: str) -> Case:
    def measure(library: str, settings: FileSettings) -> Sample:
        sizes = ("--files", str(settings.files), "--mib", str(settings.mib), "--lines", str(settings.lines))
        place = ("--folder", str(folder()), "--seconds", str(settings.seconds))
        return own_sample("files.programs", kind, library, "--library", library, *sizes, *place)

    if kind not in KINDS:
        raise ValueError(kind)
    wall = Wall("Files, wall time", "wall_us", f"us/{of}", tuple(Bound(0.5, peer) for peer in PEERS))
    return Case(
        kind.replace("_", "-"),
        "Files, CPU time",
        title,
        "cpu_us",
        f"us CPU/{of}",
        tuple(Bound(0.35, peer) for peer in PEERS),
        measure,
        only=ALL,
        wall=wall,
    )


CASES: tuple[Case, ...] = (
    _case("write_each", "1,000 new files of 4 KiB written, one after the other", "file"),
    _case("write_gather", "1,000 new files of 4 KiB written, all at once", "file"),
    _case("read_each", "1,000 files of 4 KiB read, one after the other", "file"),
    _case("read_gather", "1,000 files of 4 KiB read, all at once", "file"),
    _case("large_write_64k", "1 GiB written, 64 KiB at a time", "MiB"),
    _case("large_write_1m", "1 GiB written, 1 MiB at a time", "MiB"),
    _case("large_read_64k", "1 GiB read, 64 KiB at a time", "MiB"),
    _case("large_read_1m", "1 GiB read, 1 MiB at a time", "MiB"),
    _case("lines", "10,000 lines of a text file", "line"),
)
