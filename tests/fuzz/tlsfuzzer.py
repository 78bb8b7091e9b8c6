"""Run scripts of tlsfuzzer (https://github.com/tlsfuzzer/tlsfuzzer) against a TLS server on grapeshot.

    python tests/fuzz/tlsfuzzer.py --scripts CLONE/scripts --python PYTHON [--count 40] [--seconds 600] [NAME...]

`.ci/soak fuzz` does this. PYTHON must have tlslite-ng. Without NAME, all scripts in NAMES run in random order. No
script starts after the given seconds. Each script has several conversations with the server. A conversation that fails
on grapeshot is run again there and, if it fails again, on asyncio. If it fails on asyncio too, the cause is OpenSSL and
its configuration, not the loop. The status is 0 if no conversation fails only on grapeshot, at least one script has
run, and both servers have ended without an error.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import ssl
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import trustme
from support import HOST, loop_factory

# The scripts about records, alerts and the order of messages. The others test which algorithms OpenSSL knows.
NAMES = (
    "conversation connection-abort early-application-data fuzzed-MAC fuzzed-ciphertext fuzzed-finished "
    "fuzzed-padding hello-request-by-client interleaved-application-data-in-renegotiation invalid-content-type "
    "lengths message-duplication openssl-3712 record-layer-fragmentation renegotiation-disabled ssl-death-alert "
    "truncating-of-client-hello truncating-of-finished zero-length-data tls13-ccs tls13-connection-abort "
    "tls13-conversation tls13-count-tickets tls13-empty-alert tls13-finished tls13-finished-plaintext "
    "tls13-keyupdate tls13-keyupdate-from-server tls13-lengths tls13-multiple-ccs-messages "
    "tls13-record-layer-limits tls13-record-padding tls13-unencrypted-alert tls13-zero-content-type "
    "tls13-zero-length-data"
).split()
SCRIPT_S = 300
FAILED = re.compile(r"^\t'(.+)'$", re.MULTILINE)


class Answering(asyncio.Protocol):
    """Answers every request with the same HTTP response."""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.request = b""

    def data_received(self, data: bytes) -> None:
        self.request = self.request[-3:] + data
        if b"\n\n" in self.request.replace(b"\r", b""):
            self.transport.write(b"HTTP/1.0 200 OK\r\nContent-Length: 3\r\n\r\nyes")
            self.request = b""


async def serve() -> None:
    """Print the port, and serve until stdin ends."""
    loop = asyncio.get_running_loop()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    rsa = trustme.KeyType.RSA
    trustme.CA(key_type=rsa).issue_cert("localhost", key_type=rsa).configure_cert(context)
    faults: list[Any] = []
    loop.set_exception_handler(lambda _loop, context: faults.append(context))
    server = await loop.create_server(Answering, HOST, 0, ssl=context)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    server.close()
    unexpected = [each for each in faults if not isinstance(each.get("exception"), (OSError, type(None)))]
    if unexpected:
        sys.exit(f"reported: {unexpected}")


class Server:
    """A server on one kind of loop, in its own process."""

    def __init__(self, kind: str) -> None:
        command = [sys.executable, __file__, "--serve", kind]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def end(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(30)


def failures(options: argparse.Namespace, name: str, port: int, conversations: list[str]) -> set[str]:
    """Run the given conversations of a script, or `--count` random ones if the list is empty. Return the failures."""
    script = Path(options.scripts) / f"test-{name}.py"
    count = [] if conversations else ["-n", str(options.count)]
    done = subprocess.run(
        [options.python, script, "-h", HOST, "-p", str(port), *count, *conversations],
        env=os.environ | {"PYTHONPATH": str(Path(options.scripts).parent)},
        capture_output=True,
        text=True,
        timeout=SCRIPT_S,
        check=False,
    )
    summary = done.stdout.rpartition("Test end")[2]
    if done.returncode and "FAIL" not in summary:
        raise RuntimeError(f"test-{name}.py has not run: {done.stderr[-500:] or done.stdout[-500:]}")
    return set(FAILED.findall(summary.partition("FAILED:")[2])) if done.returncode else set()


def compare(options: argparse.Namespace) -> bool:
    """Run the scripts, print a line for each, and return whether the status is 0 (see the top of this file)."""
    ours, control = Server("grapeshot"), Server("asyncio")
    held, ran = True, 0
    names = options.names or random.sample(NAMES, len(NAMES))
    end = time.monotonic() + options.seconds
    for index, name in enumerate(names):
        if time.monotonic() > end:
            print(f"no time for {', '.join(names[index:])}")
            break
        try:
            suspect = failures(options, name, ours.port, [])
            alone = {
                each
                for each in suspect
                if failures(options, name, ours.port, [each]) and not failures(options, name, control.port, [each])
            }
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(f"{name}: NOT RUN: {error}", flush=True)
            continue
        ran += 1
        note = f", other failures: {len(suspect - alone)}" if suspect - alone else ""
        print(f"{name}: {'FAILED on grapeshot only: ' + str(sorted(alone)) if alone else 'held'}{note}", flush=True)
        held = held and not alone
    return bool((ours.end() == 0) & (control.end() == 0)) and held and ran > 0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--scripts")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        with asyncio.Runner(loop_factory=loop_factory(options.serve)) as runner:
            runner.run(serve())
    else:
        sys.exit(0 if compare(options) else 1)


if __name__ == "__main__":
    main()
