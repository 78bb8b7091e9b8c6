"""The database servers whose clients are measured. Each uses a free port or its own Unix socket, and keeps no data."""

from __future__ import annotations

import glob
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks._load import MeasurementError
from benchmarks._machine import cores, on_core

START_WITHIN_S = 60.0


def program(name: str, *places: str) -> str | None:
    """Return the path of the program. `places` are patterns of folders to search if it is not in PATH."""
    found = shutil.which(name)
    return found or next((path for place in places for path in sorted(glob.glob(f"{place}/{name}"))), None)


def postgres_program(name: str) -> str | None:
    found = program(name, "/usr/lib/postgresql/*/bin", "/usr/local/pgsql/bin")
    return os.path.realpath(found) if found else None


def is_there(kind: str) -> bool:
    """Return whether the server for this client is installed."""
    if kind == "redis":
        return program("redis-server") is not None
    # PostgreSQL refuses to run as root. If this process is root, the server runs as the user that its package creates.
    has_account = os.geteuid() != 0 or any(entry.pw_name == "postgres" for entry in pwd.getpwall())
    return postgres_program("initdb") is not None and has_account


@contextmanager
def running(command: Sequence[str], target: tuple[socket.AddressFamily, object], user: str | None) -> Iterator[None]:
    """Run the server. The block starts when the server accepts connections, and the server ends with the block."""
    with on_core(cores()[1]):
        process = subprocess.Popen(command, user=user, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_WITHIN_S
        while True:
            with socket.socket(target[0]) as probe:
                if probe.connect_ex(target[1]) == 0:  # type: ignore[arg-type]
                    break
            if process.poll() is not None or time.monotonic() > deadline:
                raise MeasurementError(f"{command[0]} does not start")
            time.sleep(0.02)
        yield
    finally:
        process.terminate()
        process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def redis_server() -> Iterator[str]:
    """Yield `address:port`."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="grapeshot-bench-") as folder:
        command = ["redis-server", "--bind", "127.0.0.1", "--port", str(port), "--dir", folder]
        command += ["--save", "", "--appendonly", "no", "--daemonize", "no"]
        with running(command, (socket.AF_INET, ("127.0.0.1", port)), None):
            yield f"127.0.0.1:{port}"


@contextmanager
def postgres_server() -> Iterator[str]:
    """Yield the folder of the server's Unix socket. The server trusts every user who connects."""
    initdb, postgres = postgres_program("initdb"), postgres_program("postgres")
    if initdb is None or postgres is None:
        raise MeasurementError("PostgreSQL is not installed")
    user = "postgres" if os.geteuid() == 0 else None
    with tempfile.TemporaryDirectory(prefix="gs-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        if user:
            shutil.chown(folder, user)
        data = f"{folder}/data"
        made = [initdb, "--pgdata", data, "--username", "tester", "--no-sync", "--auth", "trust"]
        subprocess.run(made, user=user, cwd=folder, stdout=subprocess.DEVNULL, check=True)
        command = [postgres, "-D", data, "-c", "listen_addresses=", "-c", f"unix_socket_directories={folder}"]
        command += ["-c", "fsync=off", "-c", "port=5432"]
        path = str(Path(folder) / ".s.PGSQL.5432")
        with running(command, (socket.AF_UNIX, path), user):
            yield folder


SERVERS = {"redis": redis_server, "asyncpg": postgres_server}
