"""Fixtures of the application tests: real servers, and a loop of each kind."""

from __future__ import annotations

import asyncio
import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import grapeshot
from tests.apps import requirements
from tests.apps.certificates import Certificates
from tests.apps.daemons import MariaDB, MariaDBAddress, Memcached, Postgres, PostgresAddress, Redis, RedisAddress

KINDS = {"asyncio": "asyncio:SelectorEventLoop", "grapeshot": "grapeshot:new_event_loop"}


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Certificates for localhost and 127.0.0.1."""
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a virtual environment where `grapeshot enable` was run, so that GRAPESHOT_INSTALL works."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    packages = next(iter((folder / "lib").glob("python*/site-packages")))
    lines = [f"import site; site.addsitedir({path!r})" for path in sys.path if Path(path).name == "site-packages"]
    lines.append(str(Path(grapeshot.__file__).parents[1]))
    (packages / "these.pth").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    found = folder / "bin" / "python"
    subprocess.run([str(found), "-m", "grapeshot", "enable"], check=True, stdout=subprocess.DEVNULL)
    return found


@pytest.fixture(scope="session")
def redis_server(certificates: Certificates) -> Iterator[RedisAddress]:
    """The address of the Redis server that the tests start."""
    with Redis(certificates) as server:
        yield server.address


@pytest.fixture(scope="session")
def postgres_server(certificates: Certificates) -> Iterator[PostgresAddress]:
    """The address of the PostgreSQL server that the tests start."""
    with Postgres(certificates) as server:
        yield server.address


@pytest.fixture(scope="session")
def mariadb_server(certificates: Certificates) -> Iterator[MariaDBAddress]:
    """The address of the MariaDB server that the tests start."""
    with MariaDB(certificates) as server:
        yield server.address


@pytest.fixture(scope="session")
def memcached_server(certificates: Certificates) -> Iterator[int]:
    """The port of the memcached server that the tests start."""
    with Memcached(certificates) as server:
        yield server.port


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if requirements.ABSENT:
        terminalreporter.section("NOT TESTED: programs or packages are missing on this machine", sep="=")
        for what, where_from in requirements.ABSENT.items():
            terminalreporter.write_line(f"{what} ({where_from}): the tests that need it were skipped or failed")


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    """`asyncio` or `grapeshot`."""
    chosen: str = request.param
    return chosen


@pytest.fixture
def factory_name(kind: str) -> str:
    """`module:callable` that makes a loop of this kind."""
    return KINDS[kind]


@pytest.fixture
def factory(factory_name: str) -> Callable[[], asyncio.AbstractEventLoop]:
    """A function that makes a loop of this kind."""
    module, _, attribute = factory_name.partition(":")
    made: Callable[[], asyncio.AbstractEventLoop] = getattr(importlib.import_module(module), attribute)
    return made


@pytest.fixture
def run(factory: Callable[[], asyncio.AbstractEventLoop]) -> Iterator[Callable[..., object]]:
    """A function that runs a coroutine on a loop of this kind. The test fails if the exception handler was called."""
    contexts: list[dict[str, object]] = []

    def start(coroutine: object) -> object:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.get_loop().set_exception_handler(lambda _loop, context: contexts.append(context))
            return runner.run(coroutine)  # type: ignore[arg-type]

    yield start
    assert not contexts, f"reported to the exception handler: {contexts}"
