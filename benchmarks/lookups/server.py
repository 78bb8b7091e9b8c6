"""The DNS server for the benchmark of lookups. The processes of the benchmark send their queries to it.

dnsmasq listens on 127.0.0.1:53 in a new network namespace, which has only the loopback interface, so nothing leaves
the machine. In a new mount namespace, other files take the place of /etc/resolv.conf and /etc/nsswitch.conf.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks._load import MeasurementError
from benchmarks._machine import cores, on_core

DOMAIN = "grapeshot.test"
ADDRESSES = ("192.0.2.1", "2001:db8::1")
TTL_S = 60
ADDRESS = ("127.0.0.1", 53)
# The files of the system that are replaced, and their new contents.
FILES = {"/etc/resolv.conf": f"nameserver {ADDRESS[0]}\n", "/etc/nsswitch.conf": "hosts: files dns\n"}
START_WITHIN_S = 10.0
# A variable in the environment of the process that runs in the namespaces.
INSIDE = "GRAPESHOT_BENCH_NAMESPACE"


def program() -> str | None:
    """Return the path of dnsmasq, which is usually not in the PATH of a user."""
    return shutil.which("dnsmasq", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")


def _unshare() -> list[str]:
    """Return the command that runs another command in new namespaces.

    A user other than root also needs a user namespace.
    """
    return ["unshare", "--mount", "--net", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]


def why_impossible() -> str | None:
    """Return why the server cannot run here, or None if it can."""
    if sys.platform != "linux" or shutil.which("unshare") is None or shutil.which("mount") is None:
        return "it needs Linux, and the programs unshare and mount"
    if program() is None:
        return "dnsmasq is not installed (Debian: apt-get install dnsmasq-base)"
    done = subprocess.run([*_unshare(), "true"], capture_output=True, text=True, check=False)
    return done.stderr.strip() if done.returncode else None


def run_inside(command: Sequence[str]) -> int:
    """Run a command in new namespaces, and return its exit status. The command must call `running()`."""
    return subprocess.run([*_unshare(), *command], env=os.environ | {INSIDE: "1"}, check=False).returncode


def is_inside() -> bool:
    return INSIDE in os.environ


def _start_loopback() -> None:
    """Switch the interface on, as `ip link set lo up` does."""
    import fcntl

    get_flags, set_flags, is_up = 0x8913, 0x8914, 1  # SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = bytearray(struct.pack("16sH14x", b"lo", 0))
        fcntl.ioctl(sock, get_flags, request)
        (flags,) = struct.unpack_from("H", request, 16)
        struct.pack_into("H", request, 16, flags | is_up)
        fcntl.ioctl(sock, set_flags, request)


@contextlib.contextmanager
def running() -> Iterator[None]:
    """Run the server in this process's namespaces, on the core that is not measured.

    Raises MeasurementError if it does not start.
    """
    if not is_inside():
        raise MeasurementError("the DNS server runs only in namespaces of its own")
    _start_loopback()
    found = program()
    if found is None:
        raise MeasurementError("dnsmasq is not installed")
    command = [found, "--no-daemon", "--conf-file=/dev/null", "--no-resolv", "--no-hosts", "--bind-interfaces"]
    command += [f"--listen-address={ADDRESS[0]}", f"--port={ADDRESS[1]}", f"--local-ttl={TTL_S}"]
    command += [f"--address=/{DOMAIN}/{address}" for address in ADDRESSES]
    with tempfile.TemporaryDirectory(prefix="lookups-") as folder:
        for number, (path, text) in enumerate(FILES.items()):
            file = Path(folder) / str(number)
            file.write_text(text)
            subprocess.run(["mount", "--bind", str(file), path], check=True)
        with on_core(cores()[1]):
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + START_WITHIN_S
            while not _answers():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise MeasurementError(f"{found} does not start")
                time.sleep(0.02)
            yield
        finally:
            process.terminate()
            process.wait()
            for path in FILES:
                subprocess.run(["umount", path], check=True)


def _answers() -> bool:
    try:
        count_queries()
    except (OSError, MeasurementError):
        return False
    return True


def count_queries() -> int:
    """Return how many queries the server had answered before the query that this function sends.

    That query asks for a TXT record of the class CHAOS (dnsmasq(8), "hits.bind"). The next call counts that query, too.
    """
    name = b"".join(bytes([len(part)]) + part for part in (b"hits", b"bind")) + b"\0"
    query = struct.pack("!6H", 1, 0x100, 1, 0, 0, 0) + name + struct.pack("!2H", 16, 3)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.settimeout(1)
        sock.connect(ADDRESS)
        sock.send(query)
        reply = sock.recv(512)
    # The reply repeats the query. Then comes the answer: name, type, class, time to live, length of the data, length of
    # the text, text.
    answer = reply[len(query) :]
    if len(answer) < 14 or not answer[13:].isdigit():
        raise MeasurementError(f"the DNS server says {reply!r}")
    return int(answer[13:])
