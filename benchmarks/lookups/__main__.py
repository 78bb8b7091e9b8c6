"""Compare name lookups on grapeshot, other loops and gevent: `python -m benchmarks.lookups [CASE ...]`. See README.md.

The benchmark runs in new namespaces with a local DNS server (`server.py`). If that is not possible here, it says why.
Every run is a fresh process, and the libraries take turns (A B C, then C B A, ...).
"""

from __future__ import annotations

import platform
import subprocess
import sys

from benchmarks._screen import say
from benchmarks.compare import RESULTS, Suite, main
from benchmarks.lookups import server
from benchmarks.lookups.cases import CASES, QUICK, LookupSettings
from benchmarks.lookups.styles import CACHE, CACHE_S, COROS, STYLES, available

HOW = (
    "The DNS server is a local dnsmasq on the other core, which answers every name with an IPv4 and an IPv6 address "
    f"that may be cached for {server.TTL_S} s. CPU time and wall time are those of the process that asks, including "
    f"its threads. `grapeshot` is loop.getaddrinfo() of grapeshot's loop. For comparison, `{CACHE}` is the same after "
    f"loop.set_dns_cache({CACHE_S:g}), and `{COROS}` is socket.getaddrinfo() as grapeshot.coro patches it. gevent's "
    "resolver is its thread pool (the default) or c-ares, which caches answers by default. The ten names have been "
    "looked up before, so that caches have all answers; the new names are in no cache."
)


def facts() -> dict[str, str]:
    """Return the versions of the DNS server and the C library."""
    found = server.program()
    assert found is not None
    said = subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout
    library, version = platform.libc_ver()
    return {"dnsmasq": said.split()[2], library or "libc": version or "unknown"}


SUITE = Suite(
    cases=CASES,
    loops=tuple(STYLES),
    available=available,
    packages=("grapeshot", "uvloop", "zuvloop", "rloop", "gevent"),
    settings=LookupSettings(),
    quick=QUICK,
    committed=RESULTS / "lookups.json",
    has_load=False,
    references=(CACHE, COROS),
    page={"heading": "# Name lookups", "how": HOW},
    facts=facts,
)


def run() -> int:
    if server.is_inside():
        with server.running():
            return main(suites=(SUITE,), description=__doc__)
    if reason := server.why_impossible():
        say(f"!!! NO LOOKUPS ARE MEASURED: {reason}")
        return 1
    return server.run_inside([sys.executable, "-m", "benchmarks.lookups", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(run())
