"""Key updates and renegotiation. Python's ssl cannot start them, so the openssl program does."""

from __future__ import annotations

import asyncio
import shutil
import subprocess

import pytest
from support import HOST, Echo
from tls.contexts import HOSTNAME, authority, server_context
from tls.test_handshake import TLS12, TLS13

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl program")


class Client:
    """Runs openssl s_client. A line of its input is data, or a command if it begins with a command's letter."""

    def __init__(self, address, version, folder):
        authority_file = folder / "authority.pem"
        authority().cert_pem.write_to_path(str(authority_file))
        target = f"{address[0]}:{address[1]}"
        command = ["openssl", "s_client", "-connect", target, "-servername", HOSTNAME, version]
        self.process = subprocess.Popen(
            [*command, "-CAfile", str(authority_file), "-verify_return_error"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_exc):
        self.process.kill()
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()

    def send(self, line):
        self.process.stdin.write(line)
        self.process.stdin.flush()

    async def wait_for(self, text):
        """Reads the output up to a line that contains `text`."""
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, self.process.stdout.readline):
            if text in line:
                return
        pytest.fail(f"s_client ended without {text!r}")


async def test_key_update(loop, serve, tmp_path):
    """The client changes the keys of both directions (K) or of one (k). Data is echoed before and after each change."""
    server = await serve(Echo, HOST, 0, ssl=server_context(version=TLS13))
    with Client(server.sockets[0].getsockname(), "-tls1_3", tmp_path) as client:
        for number, command in enumerate([b"K\n", b"k\n", b"K\n", b"K\n"]):
            client.send(b"before %d\n" % number)
            await client.wait_for(b"before %d" % number)
            client.send(command)
            await client.wait_for(b"KEYUPDATE")
            client.send(b"after %d\n" % number)
            await client.wait_for(b"after %d" % number)


async def test_renegotiation_is_refused(loop, serve, tmp_path):
    """OpenSSL refuses the renegotiation that a TLS 1.2 client requests. The server continues with other clients."""
    server = await serve(Echo, HOST, 0, ssl=server_context(version=TLS12))
    for _ in range(2):
        with Client(server.sockets[0].getsockname(), "-tls1_2", tmp_path) as client:
            client.send(b"hello\n")
            await client.wait_for(b"hello")
            client.send(b"R\n")
            await client.wait_for(b"no renegotiation")
