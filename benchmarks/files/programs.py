"""Measure one kind of work on files, in this process: `python -m benchmarks.files.programs KIND --library NAME`.

The work is done in rounds of a fixed number of operations; what a round needs is prepared outside of the measured time.
After a short warm-up, rounds are run until enough CPU time is spent. Prints a sample: the CPU time and the wall time
per operation, each as the median of all rounds. The CPU time is that of the process with all its threads; io_uring's
workers are threads of the process, too. What the kernel does later (writing to the disk) is not measured.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks._machine import raise_descriptor_limit
from benchmarks.files.libraries import ALL, Open, choose

KIB, MIB = 1024, 1024 * 1024
SMALL_LEN = 4 * KIB
LINE = "grapeshot" * 8 + " naïve\n"


@dataclass(frozen=True)
class Place:
    """Where the files are, and how much one round does."""

    # Files to read are made by the first process that needs them. The process that made the folder removes the folder.
    folder: Path
    files: int = 1000
    mib: int = 1024
    lines: int = 10_000

    def small(self) -> Place:
        """The same place with less work, for a warm-up."""
        return replace(self, files=min(self.files, 50), mib=min(self.mib, 2), lines=min(self.lines, 200))


@dataclass(frozen=True)
class Round:
    run: Callable[[Open], Awaitable[None]]
    operations: int
    # Checks what the round did, and removes large files.
    end: Callable[[], None]
    # The smallest number of rounds that a process does.
    least: int = 1


def _nothing() -> None:
    pass


_numbers = itertools.count()


def _new_path(place: Place, name: str) -> Path:
    """Return a path that no other process uses."""
    return place.folder / f"{name}-{os.getpid()}-{next(_numbers)}"


# ---------------------------------------------------------------- small files


async def _each(work: Callable[[Path], Awaitable[None]], paths: list[Path]) -> None:
    for path in paths:
        await work(path)


async def _together(work: Callable[[Path], Awaitable[None]], paths: list[Path]) -> None:
    await asyncio.gather(*map(work, paths))


InTurn = Callable[[Callable[[Path], Awaitable[None]], list[Path]], Awaitable[None]]


def _write(place: Place, in_turn: InTurn) -> Round:
    """Write new files. They are not removed afterwards: ext4 does not reuse the inode of a removed file for one
    to six minutes, and until then it looks at all such inodes for each new file.
    """
    folder = _new_path(place, "written")
    folder.mkdir()
    paths = [folder / str(number) for number in range(place.files)]
    data = os.urandom(SMALL_LEN)

    async def run(open_file: Open) -> None:
        async def write(path: Path) -> None:
            async with open_file(path, "wb") as file:
                await file.write(data)

        await in_turn(write, paths)

    def end() -> None:
        if any(path.read_bytes() != data for path in (paths[0], paths[-1])) or len(os.listdir(folder)) != place.files:
            raise AssertionError(f"wrong files in {folder}")

    return Round(run, place.files, end)


def _read(place: Place, in_turn: InTurn) -> Round:
    folder = place.folder / "small"
    folder.mkdir(exist_ok=True)
    paths = [folder / str(number) for number in range(place.files)]
    for path in paths:
        if not path.exists() or len(path.read_bytes()) != SMALL_LEN:
            path.write_bytes(os.urandom(SMALL_LEN))

    async def run(open_file: Open) -> None:
        async def read(path: Path) -> None:
            async with open_file(path, "rb") as file:
                data = await file.read()
            if len(data) != SMALL_LEN:
                raise AssertionError(f"{len(data)} bytes read")

        await in_turn(read, paths)

    return Round(run, place.files, _nothing)


def write_each(place: Place) -> Round:
    """Small files are opened, written and closed, one after the other."""
    return _write(place, _each)


def write_gather(place: Place) -> Round:
    """The same with a task for each file, all at once."""
    return _write(place, _together)


def read_each(place: Place) -> Round:
    """Small files are opened, read and closed, one after the other."""
    return _read(place, _each)


def read_gather(place: Place) -> Round:
    """The same with a task for each file, all at once."""
    return _read(place, _together)


# ---------------------------------------------------------------- one large file


def _fill(path: Path, mib: int, *, is_kept: bool) -> None:
    """Write a large file. If it is kept, wait until it is on the disk; otherwise remove it again."""
    part = os.urandom(MIB)
    with path.open("wb", buffering=0) as file:
        for _ in range(mib):
            file.write(part)
        if is_kept:
            os.fsync(file.fileno())
    if not is_kept:
        path.unlink()


def _write_large(place: Place, chunk_len: int) -> Round:
    path = _new_path(place, "large")
    chunk = os.urandom(chunk_len)
    # The file needs much memory, and in a virtual machine, memory that was not used for a while is slow at first. So
    # write and remove a file of this size first. The kernel then gives the freed memory to the measured file.
    _fill(path, place.mib, is_kept=False)

    async def run(open_file: Open) -> None:
        async with open_file(path, "wb") as file:
            for _ in range(place.mib * MIB // chunk_len):
                await file.write(chunk)

    def end() -> None:
        # Remove the file now, before the kernel has written all of it to the disk.
        written = path.stat().st_size
        path.unlink()
        if written != place.mib * MIB:
            raise AssertionError(f"{written} bytes written")

    # Although `_fill` has just used this memory, some rounds take four times as long as others. The median of three
    # rounds is seldom one of the slow ones.
    return Round(run, place.mib, end, least=3)


def _read_large(place: Place, chunk_len: int) -> Round:
    path = place.folder / f"large-{place.mib}"
    if not path.exists():
        _fill(path, place.mib, is_kept=True)
    # Read the file once, in case the kernel has dropped a part of it from the page cache.
    buffer = bytearray(MIB)
    with path.open("rb", buffering=0) as raw:
        while raw.readinto(buffer):
            pass

    async def run(open_file: Open) -> None:
        length = 0
        async with open_file(path, "rb") as file:
            while chunk := await file.read(chunk_len):
                length += len(chunk)
        if length != place.mib * MIB:
            raise AssertionError(f"{length} bytes read")

    return Round(run, place.mib, _nothing)


def large_write_64k(place: Place) -> Round:
    return _write_large(place, 64 * KIB)


def large_write_1m(place: Place) -> Round:
    return _write_large(place, MIB)


def large_read_64k(place: Place) -> Round:
    return _read_large(place, 64 * KIB)


def large_read_1m(place: Place) -> Round:
    return _read_large(place, MIB)


# ---------------------------------------------------------------- text


def lines(place: Place) -> Round:
    """The lines of a text file, in a loop with `async for`."""
    path = place.folder / f"lines-{place.lines}"
    if not path.exists():
        path.write_text(LINE * place.lines, encoding="utf-8")

    async def run(open_file: Open) -> None:
        count = 0
        async with open_file(path, encoding="utf-8") as file:
            async for line in file:
                count += len(line) == len(LINE)
        if count != place.lines:
            raise AssertionError(f"{count} lines read")

    return Round(run, place.lines, _nothing)


KINDS: dict[str, Callable[[Place], Round]] = {
    kind.__name__: kind
    for kind in (
        write_each,
        write_gather,
        read_each,
        read_gather,
        large_write_64k,
        large_write_1m,
        large_read_64k,
        large_read_1m,
        lines,
    )
}


# ---------------------------------------------------------------- measuring


def measure(kind: str, library: str, place: Place, cpu_s: float) -> dict[str, float]:
    """Run rounds until `cpu_s` of CPU time is spent, but no fewer than `Round.least`."""
    loop, open_file = choose(library)
    cpu_us: list[float] = []
    wall_us: list[float] = []
    spent_s = 0.0

    async def timed(run: Callable[[Open], Awaitable[None]]) -> tuple[float, float]:
        wall_start, cpu_start = time.perf_counter(), time.process_time()
        await run(open_file)
        return time.process_time() - cpu_start, time.perf_counter() - wall_start

    try:
        warm_up = KINDS[kind](place.small())
        loop.run_until_complete(timed(warm_up.run))
        warm_up.end()
        least = 1
        while len(cpu_us) < least or spent_s < cpu_s:
            taken = KINDS[kind](place)
            least = taken.least
            gc.collect()
            took_cpu_s, took_wall_s = loop.run_until_complete(timed(taken.run))
            taken.end()
            spent_s += took_cpu_s
            cpu_us.append(took_cpu_s / taken.operations * 1e6)
            wall_us.append(took_wall_s / taken.operations * 1e6)
        loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        loop.close()
    return {"cpu_us": statistics.median(cpu_us), "wall_us": statistics.median(wall_us), "rounds": len(cpu_us)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--library", required=True, choices=ALL)
    parser.add_argument("--seconds", type=float, default=0.05, help="CPU seconds to measure (0.05)")
    parser.add_argument("--files", type=int, default=1000, help="small files in a round (1000)")
    parser.add_argument("--mib", type=int, default=1024, help="MiB of the large file (1024)")
    parser.add_argument("--lines", type=int, default=10_000, help="lines of the text file (10000)")
    parser.add_argument(
        "--folder", type=Path, help="where to put the files (default: a temporary folder in the current one)"
    )
    args = parser.parse_args()
    raise_descriptor_limit()
    given = contextlib.nullcontext(args.folder)
    with given if args.folder else tempfile.TemporaryDirectory(prefix="files-", dir=".") as folder:
        place = Place(Path(folder).resolve(), args.files, args.mib, args.lines)
        sample = measure(args.kind, args.library, place, args.seconds)
    print(json.dumps(sample))


if __name__ == "__main__":
    main()
