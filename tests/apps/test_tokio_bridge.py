"""pyo3-async-runtimes on the loop: Python awaits tokio's futures, and Rust awaits Python's coroutines.

The tests build the example crate examples/tokio_bridge and keep the build in target/, so that only the first run
compiles it.
"""

from __future__ import annotations

import asyncio
import contextvars
import importlib
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support import PROCESS_CAP_S, until

from tests.apps.requirements import program

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "tokio_bridge"
BUILD_CAP_S = 600.0
HAS_GIL = not sysconfig.get_config_var("Py_GIL_DISABLED")

Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that holds the extension module."""
    cargo = program("cargo", "Rust, https://rustup.rs", os.path.expanduser("~/.cargo/bin"))
    target = ROOT / "target" / "examples" / ("abi3" if HAS_GIL else f"cpython-{sys.version_info.minor}t")
    # A free-threaded Python cannot load an abi3 module. There, the module is built for this interpreter only.
    interpreter = {"PYO3_NO_PYTHON": "1"} if HAS_GIL else {"PYO3_PYTHON": sys.executable}
    command = [cargo, "build", "--locked", "--quiet", "--manifest-path", str(EXAMPLE / "Cargo.toml")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYO3_")}
    environment |= {"CARGO_TARGET_DIR": str(target), "PYO3_BUILD_EXTENSION_MODULE": "1", **interpreter}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=BUILD_CAP_S, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    folder = tmp_path_factory.mktemp("tokio_bridge")
    library = "libtokio_bridge.dylib" if sys.platform == "darwin" else "libtokio_bridge.so"
    suffix = ".abi3.so" if HAS_GIL else sysconfig.get_config_var("EXT_SUFFIX")
    shutil.copy(target / "debug" / library, folder / f"tokio_bridge{suffix}")
    return folder


@pytest.fixture(scope="session")
def bridge(built: Path) -> ModuleType:
    """The module with its tokio runtime, which runs and keeps its descriptors open until the process ends."""
    sys.path.insert(0, str(built))
    try:
        module = importlib.import_module("tokio_bridge")
    finally:
        sys.path.remove(str(built))
    module.Counter(0)
    return module


def test_importing_the_module_does_not_enable_the_gil(bridge: ModuleType) -> None:
    assert HAS_GIL or not sys._is_gil_enabled()


def test_a_tokio_future_is_awaited(run: Run, bridge: ModuleType) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        before = loop.time()
        assert await bridge.sleep(0.02, "slept") == "slept"
        assert loop.time() - before >= 0.02  # tokio's timers are never early

    run(main())


def test_1000_tokio_futures_at_once(run: Run, bridge: ModuleType) -> None:
    async def main() -> None:
        sleeps = (bridge.sleep(0.0001 * (number % 50), number) for number in range(1000))
        assert await asyncio.gather(*sleeps) == list(range(1000))

    run(main())


def test_a_tokio_future_is_shielded_timed_out_and_waited_for(run: Run, bridge: ModuleType) -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await bridge.sleep(60.0, None)
        quick, slow = (asyncio.ensure_future(bridge.sleep(delay_s, delay_s)) for delay_s in (0.0, 60.0))
        done, pending = await asyncio.wait([quick, slow], return_when=asyncio.FIRST_COMPLETED)
        assert (done, pending) == ({quick}, {slow})
        slow.cancel()
        with pytest.raises(asyncio.CancelledError):
            await slow

    run(main())


def test_cancelling_drops_the_rust_future(run: Run, bridge: ModuleType) -> None:
    async def main() -> None:
        for _ in range(20):
            dropped = threading.Event()
            hanging = asyncio.ensure_future(bridge.hang(dropped.set))
            await asyncio.sleep(0)
            assert not dropped.is_set()
            hanging.cancel()
            with pytest.raises(asyncio.CancelledError):
                await hanging
            await until(dropped.is_set, "the Rust future to be dropped")

    run(main())


def test_tokio_sockets_talk_to_the_loops_server(run: Run, bridge: ModuleType) -> None:
    async def main() -> None:
        async def shout(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            line = await reader.readline()
            if line != b"silence\n":
                writer.write(line.upper())
            writer.close()
            await writer.wait_closed()

        server = await asyncio.start_server(shout, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            answers = await asyncio.gather(*(bridge.ask("127.0.0.1", port, f"line {n}") for n in range(100)))
            assert answers == [f"LINE {n}" for n in range(100)]
            with pytest.raises(ConnectionError, match="closed the connection without an answer"):
                await bridge.ask("127.0.0.1", port, "silence")
        with pytest.raises(ConnectionRefusedError):
            await bridge.ask("127.0.0.1", port, "anybody there?")

    run(main())


def test_tokio_awaits_python_coroutines(run: Run, bridge: ModuleType) -> None:
    async def main() -> None:
        loop, most, running = asyncio.get_running_loop(), 0, 0
        all_there = asyncio.Event()

        async def square(number: int) -> int:
            nonlocal most, running
            assert asyncio.get_running_loop() is loop
            assert threading.current_thread() is threading.main_thread()
            running += 1
            most = max(most, running)
            if running == 50:
                all_there.set()
            await all_there.wait()
            running -= 1
            return number * number

        assert await bridge.sum_of(square, list(range(50))) == sum(n * n for n in range(50))
        assert most == 50  # they ran at the same time, each as a task of this loop

    run(main())


def test_both_worlds_nested(run: Run, bridge: ModuleType) -> None:
    """Python awaits Rust, which awaits Python, and so on, several levels deep."""

    async def main() -> None:
        async def descend(depth: int) -> int:
            if depth == 0:
                return await bridge.sleep(0.0, 0)
            return 1 + await bridge.relay(descend(depth - 1))

        assert await descend(10) == 10

    run(main())


def test_exceptions_pass_both_ways(run: Run, bridge: ModuleType) -> None:
    async def main() -> None:
        error = LookupError("from Python")

        async def fail(_value: int = 0) -> int:
            await asyncio.sleep(0)
            raise error

        with pytest.raises(LookupError) as caught:
            await bridge.relay(fail())
        assert caught.value is error
        with pytest.raises(LookupError):
            await bridge.sum_of(fail, [1])
        with pytest.raises(ValueError, match="negative"):
            bridge.sleep(-1.0, None)
        with pytest.raises(Exception, match="panicked"):
            await bridge.panic()
        assert await bridge.sleep(0.0, "still there") == "still there"

    run(main())


def test_a_coroutine_called_from_tokio_sees_its_callers_context(run: Run, bridge: ModuleType) -> None:
    variable = contextvars.ContextVar("variable", default="unset")

    async def main() -> None:
        async def look() -> str:
            return variable.get()

        async def caller(value: str) -> str:
            variable.set(value)
            return await bridge.relay(look())

        assert await asyncio.gather(*map(caller, "abc")) == ["a", "b", "c"]
        assert variable.get() == "unset"

    run(main())


def test_an_asynchronous_iterator_over_a_channel(run: Run, bridge: ModuleType) -> None:
    async def main() -> None:
        async def count(number: int) -> list[int]:
            return [seen async for seen in bridge.Counter(number)]

        counts = await asyncio.gather(*map(count, (0, 1, 15, 16, 17, 300)))
        assert counts == [list(range(number)) for number in (0, 1, 15, 16, 17, 300)]

    run(main())


def test_tokio_tasks_call_soon_threadsafe(run: Run, bridge: ModuleType) -> None:
    async def main() -> None:
        seen: list[int] = []
        bridge.flood(asyncio.get_running_loop(), seen.append, 5000)
        # For each call a thread of tokio attaches to the interpreter, which takes 0.4 ms on a free-threaded build.
        await until(lambda: len(seen) >= 5000, "all the callbacks", PROCESS_CAP_S)
        assert sorted(seen) == list(range(5000))

    run(main())


@pytest.mark.parametrize("flags", [(), ("-X", "dev")], ids=["plain", "dev mode"])
def test_demo(kind: str, built: Path, flags: tuple[str, ...]) -> None:
    search = os.pathsep.join([str(built), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-W", "error", *flags, str(EXAMPLE / "demo.py"), "--loop", kind],
        env=os.environ | {"PYTHONPATH": search},
        capture_output=True,
        text=True,
        timeout=PROCESS_CAP_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "tokio's timer: slept",
        "tokio's sockets: QUESTION 0, QUESTION 1, QUESTION 2",
        "Python called from tokio: 12",
        "a channel: [0, 1, 2, 3, 4]",
    ]
