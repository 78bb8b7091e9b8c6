"""Compare grapeshot.files with aiofiles: `python -m benchmarks.files [CASE ...]`. See README.md.

Every run is a fresh process, and the libraries take turns (A B C, then C B A, ...).
"""

from __future__ import annotations

import sys

from benchmarks import _loops
from benchmarks._loops import RAW
from benchmarks.compare import RESULTS, Suite, main
from benchmarks.files.cases import CASES, QUICK, FileSettings, file_system, folder
from benchmarks.files.libraries import ALL, THREADS, available

HOW = (
    "CPU time and wall time are those of the whole process, including its threads and the workers of io_uring. It runs "
    "on one core. The files are on a disk, but also in the page cache, so that neither reads nor writes wait for the "
    "disk. `grapeshot` is grapeshot.files on grapeshot's loop, with io_uring. aiofiles is measured on the other loops, "
    "and also on grapeshot's. For comparison, `threads` is grapeshot.files without io_uring "
    "(GRAPESHOT_FILE_THREADS=1), and `raw` is Python's own open() in a coroutine, which blocks the loop. blazio does "
    "not take part, because it is not on PyPI."
)


def facts() -> dict[str, str]:
    """Return the file system, and whether there is io_uring."""
    code = "import sys; from grapeshot import _core; sys.exit(None if _core._AioQueue().has_ring() else 'no')"
    return {"file system": file_system(folder()), "io_uring": _loops.why_it_fails(code) or "yes"}


SUITE = Suite(
    cases=CASES,
    loops=ALL,
    available=available,
    packages=("grapeshot", "aiofiles", "uvloop", "zuvloop", "rloop"),
    settings=FileSettings(),
    quick=QUICK,
    committed=RESULTS / "files.json",
    has_load=False,
    references=(THREADS, RAW),
    page={"heading": "# Files", "how": HOW},
    facts=facts,
)

if __name__ == "__main__":
    sys.exit(main(suites=(SUITE,), description=__doc__))
