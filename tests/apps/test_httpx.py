"""httpx's AsyncClient with servers on the same loop: HTTP, HTTPS, a unix socket, and a proxy."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web

from tests.apps.certificates import Certificates
from tests.apps.servers import PAYLOAD, iter_pieces

Run = Callable[[Coroutine[Any, Any, Any]], Any]
HOST = "127.0.0.1"


class Site:
    """A small site over HTTP, HTTPS or a unix socket, and clients for it."""

    def __init__(self, way: str, certificates: Certificates, folder: Path) -> None:
        self.way, self.certificates, self.path = way, certificates, str(folder / "site.sock")
        self.never = asyncio.Event()
        self.peers: list[Any] = []

    async def number(self, request: web.Request) -> web.Response:
        assert request.transport is not None
        self.peers.append(request.transport.get_extra_info("peername"))
        return web.Response(text=request.query["n"])

    async def payload(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        async for piece in iter_pieces():
            await response.write(piece)
        return response

    async def digest(self, request: web.Request) -> web.Response:
        digest = hashlib.sha256()
        async for chunk in request.content.iter_any():
            digest.update(chunk)
        return web.Response(text=digest.hexdigest())

    async def held(self, _request: web.Request) -> web.Response:
        await self.never.wait()
        return web.Response()

    async def cut(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "1000"})
        await response.prepare(request)
        await response.write(b"x" * 10)
        assert request.transport is not None
        request.transport.abort()
        return response

    async def moved(self, _request: web.Request) -> web.Response:
        return web.Response(status=302, headers={"Location": "/number?n=302"})

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """Start the site and yield its base URL."""
        app = web.Application()
        for name in ("number", "payload", "held", "cut", "moved"):
            app.router.add_get(f"/{name}", getattr(self, name))
        app.router.add_post("/digest", self.digest)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            if self.way == "unix":
                await web.UnixSite(runner, self.path).start()
                yield "http://localhost"
            else:
                tls = self.certificates.for_server() if self.way == "https" else None
                await web.TCPSite(runner, HOST, 0, backlog=1024, ssl_context=tls).start()
                yield f"{self.way}://localhost:{runner.addresses[0][1]}"
        finally:
            self.never.set()
            await runner.cleanup()

    def client(self, **options: Any) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None)
        if self.way == "unix":
            options["transport"] = httpx.AsyncHTTPTransport(uds=self.path, limits=limits)
        tls = self.certificates.for_client() if self.way == "https" else False
        return httpx.AsyncClient(verify=tls, limits=limits, timeout=30.0, trust_env=False, **options)


@pytest.fixture(params=["http", "https", "unix"])
def site(request: pytest.FixtureRequest, certificates: Certificates, tmp_path: Path) -> Site:
    return Site(request.param, certificates, tmp_path)


def test_connections_are_kept(run: Run, site: Site) -> None:
    async def main() -> None:
        async with site.running() as url, site.client() as client:
            for n in range(50):
                reply = await client.get(f"{url}/number", params={"n": n})
                assert (reply.status_code, reply.text) == (200, str(n))
            assert len(set(site.peers)) == 1
            reply = await client.get(f"{url}/moved", follow_redirects=True)
            assert reply.text == "302"

    run(main())


def test_100_requests_at_once(run: Run, site: Site) -> None:
    async def main() -> None:
        async with site.running() as url, site.client() as client:
            replies = await asyncio.gather(*(client.get(f"{url}/number?n={n}") for n in range(100)))
            assert [reply.text for reply in replies] == [str(n) for n in range(100)]

    run(main())


def test_10_mb_both_ways(run: Run, site: Site) -> None:
    async def main() -> None:
        async with site.running() as url, site.client() as client:
            received = hashlib.sha256()
            async with client.stream("GET", f"{url}/payload") as reply:
                async for chunk in reply.aiter_bytes():
                    received.update(chunk)
            assert received.digest() == hashlib.sha256(PAYLOAD).digest()
            reply = await client.post(f"{url}/digest", content=iter_pieces())
            assert reply.text == received.hexdigest()

    run(main())


def test_timeouts_cancellation_and_cut_replies(run: Run, site: Site) -> None:
    async def main() -> None:
        async with site.running() as url, site.client() as client:
            for _ in range(3):
                with pytest.raises(httpx.ReadTimeout):
                    await client.get(f"{url}/held", timeout=httpx.Timeout(10, read=0.05))
                held = asyncio.ensure_future(client.get(f"{url}/held"))
                await asyncio.sleep(0)
                held.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await held
                with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
                    await client.get(f"{url}/cut")
                assert (await client.get(f"{url}/number?n=1")).text == "1"

    run(main())


def test_a_download_is_left_in_the_middle(run: Run, site: Site) -> None:
    async def main() -> None:
        async with site.running() as url, site.client() as client:
            for _ in range(5):
                async with client.stream("GET", f"{url}/payload") as reply:
                    async for chunk in reply.aiter_bytes():
                        assert chunk
                        break
            assert (await client.get(f"{url}/number?n=2")).text == "2"

    run(main())


def test_a_refused_connection(run: Run) -> None:
    async def main() -> None:
        server = await asyncio.start_server(lambda _reader, _writer: None, HOST, 0)
        port = server.sockets[0].getsockname()[1]
        server.close()
        await server.wait_closed()
        async with httpx.AsyncClient(trust_env=False) as client:
            with pytest.raises(httpx.ConnectError):
                await client.get(f"http://{HOST}:{port}/")

    run(main())


def test_an_unknown_authority_is_refused(run: Run, certificates: Certificates, tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            Site("https", certificates, tmp_path).running() as url,
            httpx.AsyncClient(verify=ssl.create_default_context(), trust_env=False) as client,
        ):
            for _ in range(3):
                with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                    await client.get(f"{url}/number?n=1")

    run(main())


@pytest.mark.parametrize("way", ["http", "https"])
def test_through_a_proxy(run: Run, certificates: Certificates, tmp_path: Path, way: str) -> None:
    """For HTTPS the client asks the proxy to CONNECT, then starts TLS on the same connection."""
    site = Site(way, certificates, tmp_path)
    asked: list[str] = []

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
            if writer.can_write_eof():
                writer.write_eof()

    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        method, target, _ = head.split(b" ", 2)
        asked.append(method.decode())
        host = httpx.URL(target.decode() if method != b"CONNECT" else f"//{target.decode()}")
        onward_reader, onward = await asyncio.open_connection(HOST, host.port)
        if method == b"CONNECT":
            writer.write(b"HTTP/1.1 200 connected\r\n\r\n")
        else:
            onward.write(head)
        await asyncio.gather(pump(reader, onward), pump(onward_reader, writer))
        for end in (onward, writer):
            end.close()
            with contextlib.suppress(ConnectionError):
                await end.wait_closed()

    async def main() -> None:
        server = await asyncio.start_server(proxy, HOST, 0)
        async with server, site.running() as url:
            address = f"http://{HOST}:{server.sockets[0].getsockname()[1]}"
            async with site.client(proxy=address) as client:
                for n in range(10):
                    assert (await client.get(f"{url}/number?n={n}")).text == str(n)
                async with client.stream("GET", f"{url}/payload") as reply:
                    data = b"".join([chunk async for chunk in reply.aiter_bytes()])
                assert hashlib.sha256(data).digest() == hashlib.sha256(PAYLOAD).digest()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            if tasks:
                await asyncio.wait(tasks)

    run(main())
    assert set(asked) == {"CONNECT" if way == "https" else "GET"}
