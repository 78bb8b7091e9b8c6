"""uvicorn as a library (a test checks that it uses httptools), and from the command line with `--loop module:factory`.

The command line serves HTTP, and HTTPS with `--ssl-certfile` and `--ssl-keyfile`.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Callable, Iterator

import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tests.apps.certificates import Certificates
from tests.apps.processes import Process
from tests.apps.servers import PAYLOAD, PAYLOAD_DIGEST, UvicornApp
from tests.apps.wire import HOST, Wire, head


def test_httptools_parses_the_requests(factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
    app = UvicornApp(factory)
    with app, Wire(app.port) as wire:
        assert wire.get("/hello").text == "hello"
        [protocol] = app.server.server_state.connections
        assert type(protocol) is HttpToolsProtocol
        assert type(protocol.parser).__module__.startswith("httptools.")
        assert isinstance(protocol.transport, asyncio.Transport)


def test_loop_option_makes_this_loop(factory_name: str) -> None:
    import uvicorn

    config = uvicorn.Config("tests.apps.cli_app:app", loop=factory_name)
    make_loop = config.get_loop_factory()
    assert make_loop is not None
    with contextlib.closing(make_loop()) as loop:
        module, _, attribute = factory_name.partition(":")
        with contextlib.closing(getattr(sys.modules[module], attribute)()) as same:
            assert type(loop) is type(same)


class Served(Process):
    """`python -m uvicorn ... --loop factory`."""

    def __init__(self, factory_name: str, certificates: Certificates | None) -> None:
        self.for_client = certificates and certificates.for_client()
        with socket.create_server((HOST, 0)) as listener:
            listener.set_inheritable(True)
            self.port = listener.getsockname()[1]
            arguments = ["-m", "uvicorn", "tests.apps.cli_app:app", "--fd", str(listener.fileno())]
            arguments += ["--loop", factory_name, "--http", "httptools", "--lifespan", "on", "--no-access-log"]
            if certificates is not None:
                arguments += ["--ssl-certfile", str(certificates.chain_file)]
                arguments += ["--ssl-keyfile", str(certificates.key_file)]
            super().__init__(*arguments, pass_fds=[listener.fileno()])


@pytest.fixture(params=["http", "https"])
def served(request: pytest.FixtureRequest, factory_name: str, certificates: Certificates) -> Iterator[Served]:
    with Served(factory_name, certificates if request.param == "https" else None) as started:
        started.wait_line("lifespan started")
        yield started


def test_command_line(served: Served, factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
    with contextlib.closing(factory()) as loop:
        loop_class = f"{type(loop).__module__}.{type(loop).__qualname__}"
    with Wire(served.port, served.for_client) as wire:
        assert wire.get("/loop").text == loop_class
        assert wire.get("/protocol").text == "HttpToolsProtocol"
        wire.send(head("POST", "/digest", f"Content-Length: {len(PAYLOAD)}"))
        wire.send(PAYLOAD)
        assert wire.reply().text == PAYLOAD_DIGEST
        wire.send(b"".join(head("GET", f"/number?n={n}") for n in range(20)))
        assert [wire.reply().text for _ in range(20)] == [str(n) for n in range(20)]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_command_line_ends_gracefully(served: Served, signum: signal.Signals) -> None:
    with Wire(served.port, served.for_client) as wire, Wire(served.port, served.for_client) as idle:
        assert idle.get("/number?n=1").text == "1"
        wire.send(head("GET", "/until-shutdown"))
        served.wait_line("request held")
        served.process.send_signal(signum)
        served.wait_line("Shutting down")
        assert idle.is_at_end()
        served.process.send_signal(signal.SIGUSR1)  # releases the request that waits in the server
        assert wire.reply().text == "released"
        assert wire.is_at_end()
    served.finish()
    assert any("lifespan ended" in line for line in served.output)
    assert not any("Traceback" in line or "Error" in line for line in served.output), served.output
