"""asyncssh on the loop under test, server and client: commands, streams, files, forwarding, and lost connections."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncssh
import pytest
from support import CAP_S

Run = Callable[[Coroutine[Any, Any, Any]], Any]
HOST = "127.0.0.1"
BLOB = random.Random(17).randbytes(2 * 1024 * 1024)


class Keys:
    """A host key, a user's key, and an unknown key."""

    def __init__(self) -> None:
        self.host, self.user, self.foreign = (asyncssh.generate_private_key("ssh-ed25519") for _ in range(3))

    @property
    def known_hosts(self) -> asyncssh.SSHKnownHosts:
        return asyncssh.import_known_hosts(f"* {self.host.export_public_key().decode()}")

    @property
    def authorized(self) -> asyncssh.SSHAuthorizedKeys:
        return asyncssh.import_authorized_keys(self.user.export_public_key().decode())


@pytest.fixture(scope="session")
def keys() -> Keys:
    return Keys()


class Gate(asyncssh.SSHServer):
    """Accepts a user who has the password `open`, and allows forwarding."""

    connections: list[asyncssh.SSHServerConnection]

    def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
        self.connections.append(conn)

    def password_auth_supported(self) -> bool:
        return True

    def validate_password(self, username: str, password: str) -> bool:
        return password == "open"

    def connection_requested(self, *_: object) -> bool:
        return True

    def server_requested(self, *_: object) -> bool:
        return True

    def unix_connection_requested(self, *_: object) -> bool:
        return True


class Served:
    """A listening server, the connections that it has accepted, and a method to connect to it."""

    def __init__(self, keys: Keys, acceptor: asyncssh.SSHAcceptor, accepted: list[Any]) -> None:
        self.keys, self.acceptor, self.accepted = keys, acceptor, accepted
        self.port = acceptor.get_port()

    def connect(self, **options: Any) -> Any:
        login = {"username": "user", "client_keys": [self.keys.user], "known_hosts": self.keys.known_hosts}
        return asyncssh.connect(HOST, self.port, config=None, agent_path=None, **{**login, **options})


async def handle(process: asyncssh.SSHServerProcess[Any]) -> None:
    """Run one of the commands that the server offers."""
    command, _, argument = (process.command or "").partition(" ")
    try:
        if command == "echo":
            process.stdout.write(argument + "\n")
            process.exit(0)
        elif command == "fail":
            process.stderr.write("it failed\n")
            process.exit(int(argument))
        elif command == "cat":
            while data := await process.stdin.read(65536):
                process.stdout.write(data)
                await process.stdout.drain()
            process.exit(0)
        elif command == "pour":
            for _ in range(int(argument)):
                process.stdout.write(BLOB[:65536].decode("latin-1"))
                await process.stdout.drain()
            process.exit(0)
        elif command == "wait":
            process.stdout.write("waiting\n")
            await process.stdin.read()
            process.exit(0)
        else:
            process.exit(127)
    except asyncssh.SignalReceived as received:
        process.exit_with_signal(received.signal)
    except asyncssh.TerminalSizeChanged as changed:
        process.stdout.write(f"{changed.width}x{changed.height}\n")
        process.exit(0)


@asynccontextmanager
async def serving(keys: Keys, **options: Any) -> AsyncIterator[Served]:
    accepted: list[Any] = []

    def gate() -> Gate:
        made = Gate()
        made.connections = accepted
        return made

    options = {"process_factory": handle, "authorized_client_keys": keys.authorized, "encoding": None, **options}
    if options["process_factory"] is handle and options["encoding"] is None:
        options["encoding"] = "latin-1"  # every byte is a character
    acceptor = await asyncssh.listen(HOST, 0, server_factory=gate, server_host_keys=[keys.host], **options)
    try:
        yield Served(keys, acceptor, accepted)
    finally:
        acceptor.close()
        await acceptor.wait_closed()
        for connection in accepted:
            connection.close()
            await connection.wait_closed()


def test_commands(run: Run, keys: Keys) -> None:
    async def main() -> None:
        async with serving(keys) as server, server.connect() as client:
            done = await client.run("echo hello", check=True)
            assert (done.stdout, done.stderr, done.exit_status) == ("hello\n", "", 0)
            failed = await client.run("fail 3")
            assert (failed.stdout, failed.stderr, failed.exit_status) == ("", "it failed\n", 3)
            with pytest.raises(asyncssh.ProcessError):
                await client.run("fail 4", check=True)
            several = await asyncio.gather(*(client.run(f"echo {n}", check=True) for n in range(50)))
            assert [done.stdout for done in several] == [f"{n}\n" for n in range(50)]

    run(main())


def test_ways_to_log_in(run: Run, keys: Keys) -> None:
    async def main() -> None:
        async with serving(keys) as server:
            async with server.connect(client_keys=None, password="open") as client:
                assert (await client.run("echo by password")).stdout == "by password\n"
            with pytest.raises(asyncssh.PermissionDenied):
                await server.connect(client_keys=None, password="shut")
            with pytest.raises(asyncssh.PermissionDenied):
                await server.connect(client_keys=[keys.foreign])
            strangers = asyncssh.import_known_hosts(f"* {keys.foreign.export_public_key().decode()}")
            with pytest.raises(asyncssh.HostKeyNotVerifiable):
                await server.connect(known_hosts=strangers)

    run(main())


def test_streams_both_ways_at_once(run: Run, keys: Keys) -> None:
    async def main() -> None:
        async with serving(keys) as server, server.connect() as client:

            async def cat(data: bytes) -> bytes:
                async with client.create_process("cat", encoding=None) as process:

                    async def send() -> None:
                        for start in range(0, len(data), 50_000):
                            process.stdin.write(data[start : start + 50_000])
                            await process.stdin.drain()
                        process.stdin.write_eof()

                    _, received = await asyncio.gather(send(), process.stdout.read())
                    return received

            assert await cat(BLOB) == BLOB
            pieces = [BLOB[n * 1000 : n * 50_000] for n in range(1, 11)]
            assert await asyncio.gather(*map(cat, pieces)) == pieces

    run(main())


def test_a_slow_reader_delays_only_its_own_channel(run: Run, keys: Keys) -> None:
    async def main() -> None:
        async with serving(keys) as server, server.connect() as client:
            process = await client.create_process("pour 64", encoding=None)
            for number in range(20):  # meanwhile, the client does not read the output of `pour`
                assert (await client.run(f"echo {number}")).stdout == f"{number}\n"
            assert process.returncode is None
            assert await process.stdout.read() == BLOB[:65536] * 64
            await process.wait_closed()

    run(main())


def test_signals_terminal_and_environment(run: Run, keys: Keys) -> None:
    async def main() -> None:
        async with serving(keys) as server, server.connect() as client:
            process = await client.create_process("wait")
            assert await process.stdout.readline() == "waiting\n"
            process.send_signal("TERM")
            done = await process.wait()
            assert done.exit_signal is not None
            assert done.exit_signal[0] == "TERM"
            process = await client.create_process("wait", term_type="xterm", term_size=(80, 24))
            assert (await process.stdout.readline()).strip() == "waiting"
            process.change_terminal_size(132, 50)
            assert (await process.stdout.readline()).strip() == "132x50"
            assert (await process.wait()).exit_status == 0

    run(main())


def test_sftp(run: Run, keys: Keys, tmp_path: Path) -> None:
    async def main() -> None:
        home = tmp_path / "home"
        home.mkdir()

        def chrooted(channel: Any) -> asyncssh.SFTPServer:
            return asyncssh.SFTPServer(channel, chroot=str(home).encode())

        async with (
            serving(keys, sftp_factory=chrooted) as server,
            server.connect() as client,
            client.start_sftp_client() as sftp,
        ):
            (tmp_path / "blob").write_bytes(BLOB)
            await sftp.put(str(tmp_path / "blob"), "/blob")
            assert (home / "blob").read_bytes() == BLOB
            await sftp.get("/blob", str(tmp_path / "back"))
            assert (tmp_path / "back").read_bytes() == BLOB
            await sftp.mkdir("/folder")
            for number in range(20):
                async with sftp.open(f"/folder/{number}", "w") as file:
                    await file.write(f"file {number}")
            names = {str(name) for name in await sftp.listdir("/folder")} - {".", ".."}
            assert names == {str(number) for number in range(20)}
            with pytest.raises(asyncssh.SFTPNoSuchFile):
                await sftp.stat("/nothing")

    run(main())


async def shout(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while line := await reader.readline():
        writer.write(line.upper())
        await writer.drain()
    writer.close()


async def shouted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, text: str) -> str:
    writer.write(f"{text}\n".encode())
    line = await asyncio.wait_for(reader.readline(), CAP_S)
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    return line.decode().strip()


@pytest.mark.parametrize("direction", ["local", "remote", "socks"])
def test_port_forwarding(run: Run, keys: Keys, direction: str) -> None:
    async def main() -> None:
        ended = asyncio.Semaphore(0)

        async def shout_to_the_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await shout(reader, writer)
            await writer.wait_closed()
            ended.release()

        behind = await asyncio.start_server(shout_to_the_end, HOST, 0)
        port = behind.sockets[0].getsockname()[1]
        async with behind, serving(keys) as server, server.connect() as client:
            if direction == "local":
                listener = await client.forward_local_port(HOST, 0, HOST, port)
            elif direction == "remote":
                listener = await client.forward_remote_port(HOST, 0, HOST, port)
            else:
                listener = await client.forward_socks(HOST, 0)

            async def ask(number: int) -> str:
                reader, writer = await asyncio.open_connection(HOST, listener.get_port())
                if direction == "socks":
                    writer.write(b"\x05\x01\x00")
                    assert await reader.readexactly(2) == b"\x05\x00"
                    writer.write(b"\x05\x01\x00\x01\x7f\x00\x00\x01" + port.to_bytes(2, "big"))
                    assert (await reader.readexactly(10))[:2] == b"\x05\x00"
                return await shouted(reader, writer, f"text {number}")

            assert await asyncio.gather(*map(ask, range(20))) == [f"TEXT {number}" for number in range(20)]
            for _ in range(20):  # let the handlers end: in Python 3.11 the server does not wait for them
                await asyncio.wait_for(ended.acquire(), CAP_S)
            listener.close()
            await listener.wait_closed()

    run(main())


def test_forwarding_between_unix_sockets(run: Run, keys: Keys, tmp_path: Path) -> None:
    async def main() -> None:
        ended = asyncio.Event()

        async def shout_to_the_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await shout(reader, writer)
            await writer.wait_closed()
            ended.set()

        behind = await asyncio.start_unix_server(shout_to_the_end, str(tmp_path / "behind"))
        async with behind, serving(keys) as server, server.connect() as client:
            listener = await client.forward_local_path(str(tmp_path / "front"), str(tmp_path / "behind"))
            reader, writer = await asyncio.open_unix_connection(str(tmp_path / "front"))
            assert await shouted(reader, writer, "over unix") == "OVER UNIX"
            await asyncio.wait_for(ended.wait(), CAP_S)  # let the handler end, as in test_port_forwarding
            listener.close()
            await listener.wait_closed()

    run(main())


def test_a_connection_through_a_connection(run: Run, keys: Keys) -> None:
    async def main() -> None:
        async with (
            serving(keys) as outer,
            serving(keys) as inner,
            outer.connect() as client,
            inner.connect(tunnel=client) as deeper,
        ):
            assert (await deeper.run("echo from within")).stdout == "from within\n"

    run(main())


@pytest.mark.parametrize("who", ["client", "server"])
def test_a_lost_connection(run: Run, keys: Keys, who: str) -> None:
    async def main() -> None:
        async with serving(keys) as server:
            for round_number in range(5):
                client = await server.connect()
                process = await client.create_process("wait")
                assert await process.stdout.readline() == "waiting\n"
                (client if who == "client" else server.accepted[round_number]).abort()
                await asyncio.wait_for(client.wait_closed(), CAP_S)
                await asyncio.wait_for(server.accepted[round_number].wait_closed(), CAP_S)
                assert process.is_closing() or await process.stdout.read() == ""

    run(main())


def test_a_command_is_given_up(run: Run, keys: Keys) -> None:
    async def main() -> None:
        async with serving(keys) as server, server.connect() as client:
            for _ in range(5):
                with pytest.raises(TimeoutError):
                    await client.run("wait", timeout=0.02)
                waiting = asyncio.ensure_future(client.run("wait"))
                await asyncio.sleep(0)
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
            assert (await client.run("echo on")).stdout == "on\n"

    run(main())


def test_real_programs_behind_the_server(run: Run, keys: Keys) -> None:
    """As sshd does, the server starts a subprocess and connects the subprocess's streams with the channel."""

    async def shell(process: asyncssh.SSHServerProcess[bytes]) -> None:
        assert process.command is not None
        pipe = asyncio.subprocess.PIPE
        child = await asyncio.create_subprocess_shell(process.command, stdin=pipe, stdout=pipe, stderr=pipe)
        await process.redirect(stdin=child.stdin, stdout=child.stdout, stderr=child.stderr)
        status = await child.wait()
        await process.stdout.drain()
        await process.stderr.drain()
        process.exit(status)
        await process.wait_closed()

    async def main() -> None:
        async with serving(keys, process_factory=shell) as server, server.connect() as client:
            command = "cat; echo to stderr >&2; exit 5"
            data = BLOB[:300_000]
            done = await client.run(command, input=data, encoding=None)
            assert (done.stdout, done.stderr, done.exit_status) == (data, b"to stderr\n", 5)
            numbers = await asyncio.gather(*(client.run(f"echo {n}", stdin=asyncssh.DEVNULL) for n in range(10)))
            assert [done.stdout for done in numbers] == [f"{n}\n" for n in range(10)]

    run(main())
