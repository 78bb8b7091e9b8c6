"""Start servers and put load on them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import select
import shutil
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks._loops import RAW
from benchmarks._machine import ROOT, child_environment, cores, on_core

# Kinds of servers in `benchmarks.blocking.servers`. For these and for WEB, a style takes the place of the loop.
BLOCKING = ("blocking", "patched")
# Kinds of HTTP servers, in `benchmarks.blocking.web`.
WEB = ("wsgi", "gunicorn")
# Kinds of servers in `benchmarks.programs.servers`. They also have styles instead of loops.
PROGRAMS = ("gevent-echo", "gevent-pywsgi", "eventlet-echo", "fastapi", "django")
CRATE = ROOT / "benchmarks" / "loadgen"


class MeasurementError(Exception):
    """A server or the load failed, so there is no number."""


class UnsupportedError(Exception):
    """The loop says that it does not have the measured feature."""


@functools.cache
def loadgen() -> str:
    """Return the path of the load generator, after building it if cargo is installed. GRAPESHOT_LOADGEN overrides
    the path.
    """
    name_libssl()
    named = os.environ.get("GRAPESHOT_LOADGEN")
    if named:
        return named
    target = Path(os.environ.get("CARGO_TARGET_DIR", CRATE / "target"))
    binary = (ROOT / target / "release" / "loadgen").resolve()
    cargo = shutil.which("cargo")
    if cargo is not None:
        manifest = str(CRATE / "Cargo.toml")
        environ = os.environ | {"CARGO_TARGET_DIR": str(binary.parent.parent)}
        subprocess.run([cargo, "build", "--release", "--quiet", "--manifest-path", manifest], env=environ, check=True)
    if not binary.exists():
        raise MeasurementError(f"no load generator: `cargo build --release` in {CRATE.relative_to(ROOT)} makes it")
    return str(binary)


def name_libssl() -> None:
    """Tell the load generator which OpenSSL this interpreter uses, so that the raw server uses the same one.

    If the library cannot be found (it is linked statically, or there is no /proc), the load generator uses
    the system's OpenSSL.
    """
    maps = Path("/proc/self/maps")
    if "LOADGEN_LIBSSL" in os.environ or not maps.exists():
        return
    for line in maps.read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if Path(path).name.startswith("libssl.so"):
            os.environ["LOADGEN_LIBSSL"] = path
            return


@functools.cache
def check_openssl(version: str | None) -> None:
    """Print a warning, once, if the raw server and this interpreter use different versions of OpenSSL."""
    if version not in (None, ssl.OPENSSL_VERSION):
        print(f"!!! the raw server uses {version}, but Python uses {ssl.OPENSSL_VERSION}", file=sys.stderr, flush=True)


@functools.cache
def scratch_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="grapeshot-bench-")


@functools.cache
def certificate() -> str:
    """Return a folder with a new self-signed certificate and its key. The folder is removed when this process
    ends.
    """
    folder = f"{scratch_folder().name}/certificate"
    subprocess.run([loadgen(), "certificate", folder], check=True)
    return folder


class Child:
    """A process that prints one line of JSON when it is ready, and that ends when its stdin is closed."""

    def __init__(self, command: Sequence[str], core: int | None, ready_within_s: float = 60) -> None:
        self.command = command
        with on_core(core):
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=child_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        self.pid = self._process.pid
        try:
            self.ready: dict[str, Any] = self._read_line(ready_within_s)
        except BaseException:
            self._process.kill()
            self._process.communicate()
            raise

    def _read_line(self, within_s: float) -> dict[str, Any]:
        if self._process.stdout is None:
            raise MeasurementError("no stdout")
        if not select.select([self._process.stdout], [], [], within_s)[0]:
            raise MeasurementError(f"{' '.join(self.command[1:])} is not ready after {within_s} s")
        line = self._process.stdout.readline()
        if not line:
            raise MeasurementError(
                f"{' '.join(self.command[1:])} ended with {self._process.wait()} before it was ready"
            )
        parsed: dict[str, Any] = json.loads(line)
        if "unsupported" in parsed:
            raise UnsupportedError(parsed["unsupported"])
        return parsed

    def close(self) -> None:
        """End the process. Raise MeasurementError if it fails, or if it has to be killed."""
        try:
            self._process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            raise MeasurementError(f"{' '.join(self.command[1:])} did not end when asked to") from None
        if self._process.returncode != 0:
            raise MeasurementError(f"{' '.join(self.command[1:])} ended with {self._process.returncode}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self._process.kill()
            self._process.communicate()


_socket_numbers = itertools.count()


def raw_options(kind: str) -> list[str]:
    """Return the raw server's arguments for this kind. All kinds that are not listed here share one raw counterpart,
    which echoes over TCP.
    """
    if kind == "tls":
        return ["--tls", certificate()]
    if kind == "udp":
        return ["--udp"]
    if kind == "unix":
        return ["--address", f"unix:{scratch_folder().name}/{next(_socket_numbers)}.sock"]
    return []


def flags(options: dict[str, object]) -> list[str]:
    """Return command-line words for these options: a flag alone for True, and nothing for None and False."""
    words = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            words.append(flag)
        elif value is not None and value is not False:
            words += [flag, str(value)]
    return words


def server_command(kind: str, loop: str, serving: dict[str, object] | None = None) -> list[str]:
    if loop == RAW:
        return [loadgen(), "raw-server", *raw_options(kind)]
    if kind in (*BLOCKING, *WEB):
        program = "web" if kind in WEB else "servers"
        command = [sys.executable, "-m", f"benchmarks.blocking.{program}", kind, "--style", loop]
    elif kind in PROGRAMS:
        command = [sys.executable, "-m", "benchmarks.programs.servers", kind, "--style", loop]
    else:
        command = [sys.executable, "-m", "benchmarks.servers", kind, "--loop", loop]
    command += flags(serving or {})
    return [*command, "--certificate", certificate()] if kind == "tls" else command


class Server(Child):
    """A server of benchmarks.servers, benchmarks.blocking or benchmarks.programs, or the raw one. A server that
    is not measured runs on the load's core, and a measured one on the other core.
    """

    def __init__(
        self,
        kind: str,
        loop: str,
        serving: dict[str, object] | None = None,
        *,
        under: Sequence[str] = (),
        ready_within_s: float = 60,
        is_measured: bool = True,
    ) -> None:
        core = cores()[0 if is_measured else 1]
        super().__init__([*under, *server_command(kind, loop, serving)], core, ready_within_s)
        # `address:port` or `unix:/path`.
        self.address: str = self.ready["address"]
        # If a server forks, the process that serves reports its own id.
        self.pid = self.ready.get("pid", self.pid)
        if loop == RAW:
            check_openssl(self.ready["openssl"])


def load_command(mode: str, address: str, options: dict[str, object]) -> list[str]:
    return [loadgen(), mode, "--address", address, *flags(options)]


def parse_report(output: str, mode: str) -> dict[str, Any]:
    """Return the report of a load.

    Raises MeasurementError if there is no report, or if the load saw an error.
    """
    try:
        report: dict[str, Any] = json.loads(output)
    except ValueError:
        raise MeasurementError(f"the {mode} load ended without a report") from None
    if report["errors"]:
        raise MeasurementError(f"the {mode} load saw {report['errors']} errors, the first: {report['first_error']}")
    return report


@contextlib.contextmanager
def load_beside(mode: str, address: str, **options: object) -> Iterator[None]:
    """Run a load in the background while the block runs. The load must last longer than the block.

    Raises MeasurementError if it ended too early, or if a reply was wrong or missing.
    """
    command = load_command(mode, address, options)
    with on_core(cores()[1]):
        load = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield
        if load.poll() is not None:
            raise MeasurementError(f"the {mode} load in the background ended too early")
        parse_report(load.communicate()[0], mode)
    finally:
        if load.poll() is None:
            load.kill()
            load.communicate()


def run_load(mode: str, address: str, **options: object) -> dict[str, Any]:
    """Run one load on the load's core and return its report.

    Raises MeasurementError when a reply was wrong or missing.
    """
    command = load_command(mode, address, options)
    with on_core(cores()[1]):
        load = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    return parse_report(load.communicate()[0], mode)


class IdleConnections(Child):
    """Connections that stay open and idle until this object is closed. With `touch_size`, each of them first
    exchanges one message of that many bytes.
    """

    def __init__(self, address: str, connections: int, touch_size: int = 0) -> None:
        options: dict[str, object] = {"connections": connections, "touch_size": touch_size}
        super().__init__(load_command("idle", address, options), cores()[1])
