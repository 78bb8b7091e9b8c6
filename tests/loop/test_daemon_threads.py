"""The interpreter exits while a daemon thread is in a call from the loop into Python. The program must still end with
status 0.

Up to 3.13 the interpreter ends such a thread when the thread asks for the GIL again. On some systems this unwinds the
thread's stack. When the unwinding reaches frames of grapeshot, grapeshot makes the thread hang instead
(`core/src/sys/unwinding/mod.rs`). Most tests bring the thread into one kind of call and keep it there, so that the
interpreter ends the thread at exactly that point.
"""

from __future__ import annotations

import sys

import pytest
from support import coro_is_available, run_script
from tls.contexts import HOSTNAME, authority, certificate

# asyncio's loop shows that the tests themselves are right. A run on a third loop would show nothing more.
pytestmark = [pytest.mark.slow, pytest.mark.only_on("asyncio", "grapeshot")]

HEAD = """
import asyncio, logging, os, socket, ssl, sys, threading, time

HOST = "127.0.0.1"
entered = threading.Event()

def stay(*_args, **_options):
    entered.set()
    while True:
        time.sleep(0.001)

class Stays:
    __del__ = stay

class Last:
    # The interpreter deletes `last` after it has begun to end threads. The delay gives the daemon thread time to end.
    def __del__(self, sleep=time.sleep):
        sleep(0.05)

last = Last()

def serve():
    loop = new_event_loop()
    try:
        scene(loop)
    finally:
        os._exit(7)
"""

TAIL = """
threading.Thread(target=serve, daemon=True).start()
if not entered.wait(20):
    os._exit(8)
print("exit", flush=True)
"""


def exits(kind, code):
    """Check that the program ends with status 0 if its main thread exits while the daemon thread is in `stay()`. The
    daemon thread runs the function `scene(loop)`, which `code` defines.
    """
    assert run_script(kind, HEAD + code + TAIL) == "exit\n"


def exits_in(kind, *lines):
    """Like `exits`, for a `scene` that consists of these lines and then runs the loop."""
    exits(kind, "def scene(loop):\n" + "".join(f"    {line}\n" for line in (*lines, "loop.run_forever()")))


@pytest.mark.parametrize("is_debug", [False, True])
@pytest.mark.parametrize("count", [0, 1, 4, 5, 9])
def test_handles(loop_kind, count, is_debug):
    exits_in(loop_kind, f"loop.set_debug({is_debug})", f"loop.call_soon(stay, *range({count}))")


@pytest.mark.parametrize(
    "line",
    [
        "loop.call_later(0, stay)",
        "loop.call_soon_threadsafe(stay)",
        "future = loop.create_future(); future.add_done_callback(stay); future.set_result(1)",
        "loop.run_in_executor(None, int).add_done_callback(stay)",
        "loop.create_task(loop.getaddrinfo('localhost', 80)).add_done_callback(stay)",
        "a, b = socket.socketpair(); loop.add_reader(a, stay); b.send(b'x')",
        "a, b = socket.socketpair(); loop.add_writer(a, stay)",
    ],
)
def test_callbacks(loop_kind, line):
    exits_in(loop_kind, line)


@pytest.mark.parametrize(
    "line",
    [
        "loop.call_exception_handler({'message': 'called'})",
        "loop.call_soon(lambda: 1 / 0)",
        "loop.call_soon(lambda *things: 1 / 0, 1, 2, 3, 4, 5)",
        "loop.set_debug(True); loop.call_soon(lambda: 1 / 0)",
        "a, b = socket.socketpair(); loop.add_writer(a, lambda: 1 / 0)",
    ],
)
def test_exception_handlers(loop_kind, line):
    exits_in(loop_kind, "loop.set_exception_handler(stay)", line)


@pytest.mark.parametrize(
    "line",
    [
        "loop.call_soon(lambda thing: None, Stays())",
        "loop.call_soon(lambda *things: None, 1, 2, 3, 4, Stays())",
        "loop.call_soon(print, Stays()).cancel()",
        "loop.call_later(1000, print, Stays()).cancel()",
        "loop.call_soon(print, Stays()); loop.close()",
        "loop.call_later(1000, print, Stays()); loop.close()",
        "a, b = socket.socketpair(); loop.add_reader(a, print, Stays()); loop.remove_reader(a)",
        "loop.set_task_factory(Stays().__init__); loop.set_task_factory(None)",
    ],
)
def test_finalizers(loop_kind, line):
    exits_in(loop_kind, line, "import gc; gc.collect()")


@pytest.mark.parametrize("is_debug", [False, True])
@pytest.mark.parametrize(
    "line",
    [
        "loop.set_task_factory(stay); loop.create_task(main())",
        "loop.call_soon(loop.create_task, main(1))",
        "loop.call_soon(loop.add_reader, File(), print)",
        "loop.call_later(Delay(), print)",
        "loop.create_task(loop.sock_recv(Socket(), 1))",
        "loop.create_task(loop.sock_sendall(Socket(), b'x'))",
        "loop.create_task(loop.sock_accept(Socket()))",
        "loop.create_task(loop.sock_connect(Socket(), ('localhost', 1)))",
    ],
)
def test_methods_that_call_python_code(loop_kind, line, is_debug):
    exits(
        loop_kind,
        f"""
async def main(*args):
    stay(*args)

class File:
    fileno = stay

class Delay:
    __add__ = __radd__ = __float__ = __lt__ = __mul__ = stay

class Socket(socket.socket):
    def __init__(self):
        super().__init__()
        self.setblocking(False)
    recv = send = accept = connect = stay

def scene(loop):
    loop.set_debug({is_debug})
    {line}
    loop.run_forever()
""",
    )


def test_the_log_of_slow_callbacks(loop_kind):
    exits_in(
        loop_kind,
        "logging.getLogger('asyncio').addFilter(stay)",
        "loop.set_debug(True)",
        "loop.slow_callback_duration = 0",
        "loop.call_soon(int)",
    )


STREAMS = """
class Server:
    def connection_made(self, transport):
        at("connection_made")
        self.transport = transport

    def data_received(self, data):
        at("data_received")
        self.answer()

    def get_buffer(self, size):
        at("get_buffer")
        return bytearray(10)

    def buffer_updated(self, count):
        at("buffer_updated")
        self.answer()

    def answer(self):
        if where == "writelines":
            self.transport.writelines(stay() for _ in range(1))
        while not self.is_paused:
            self.transport.write(bytes(1 << 20))

    is_paused = False

    def pause_writing(self):
        at("pause_writing")
        self.is_paused = True
        loop.call_soon(self.client.resume_reading)

    def resume_writing(self):
        at("resume_writing")
        if where == "finalizer":
            self.transport.set_protocol(asyncio.Protocol())
        self.client.close() if where != "eof_received" else self.client.write_eof()

    def eof_received(self):
        at("eof_received")
        return True

    def connection_lost(self, exc):
        at("connection_lost")
        if where == "handler":
            raise ValueError

    def __del__(self):
        if where == "finalizer":
            stay()

class Simple(Server, asyncio.Protocol):
    pass

class Buffered(Server, asyncio.BufferedProtocol):
    pass

class Client(asyncio.Protocol):
    def connection_made(self, transport):
        if not is_tls:
            transport.pause_reading()
        Server.client = transport
        transport.write(b"x")

    def data_received(self, data):
        if is_tls:
            Server.client.close()

def at(place):
    if place == where:
        stay()

def factory():
    at("factory")
    return Buffered() if "buffer" in where else Simple()

def scene(own_loop):
    global loop
    loop = own_loop
    if where == "handler":
        loop.set_exception_handler(stay)
    loop.run_until_complete(main())

async def main():
    contexts = [None, None]
    name = None
    if is_tls:
        name = hostname
        contexts = [ssl.SSLContext(kind) for kind in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT)]
        contexts[0].load_cert_chain(chain)
        contexts[1].load_verify_locations(root)
        if where == "sni_callback":
            contexts[0].sni_callback = stay
    server = await loop.create_server(factory, HOST, 0, ssl=contexts[0])
    address = server.sockets[0].getsockname()
    await loop.create_connection(Client, *address, ssl=contexts[1], server_hostname=name)
    await asyncio.Event().wait()
"""

CALLS = ["factory", "connection_made", "data_received", "get_buffer", "buffer_updated", "writelines", "connection_lost"]


@pytest.mark.parametrize("where", [*CALLS, "pause_writing", "resume_writing", "eof_received", "finalizer", "handler"])
def test_streams(loop_kind, where):
    exits(loop_kind, f"where = {where!r}; is_tls = False\n{STREAMS}")


@pytest.mark.parametrize("where", [*CALLS, "sni_callback", "pause_writing", "handler"])
def test_tls(loop_kind, where, tmp_path):
    chain, root = tmp_path / "chain.pem", tmp_path / "root.pem"
    chain.write_bytes(certificate(HOSTNAME).private_key_and_cert_chain_pem.bytes())
    root.write_bytes(authority().cert_pem.bytes())
    names = f"hostname, chain, root = {HOSTNAME!r}, {str(chain)!r}, {str(root)!r}"
    exits(loop_kind, f"where = {where!r}; is_tls = True; {names}\n{STREAMS}")


@pytest.mark.parametrize("where", ["connection_made", "datagram_received"])
def test_datagrams(loop_kind, where):
    exits(
        loop_kind,
        f"""
class Protocol(asyncio.DatagramProtocol):
    {where} = stay

def scene(loop):
    transport, _ = loop.run_until_complete(loop.create_datagram_endpoint(Protocol, local_addr=(HOST, 0)))
    with socket.socket(type=socket.SOCK_DGRAM) as sock:
        sock.sendto(b"x", transport.get_extra_info("sockname"))
    loop.run_forever()
""",
    )


@pytest.mark.parametrize("where", ["connection_made", "data_received", "eof_received", "connection_lost"])
def test_pipes(loop_kind, where):
    exits(
        loop_kind,
        f"""
class Protocol(asyncio.Protocol):
    {where} = stay

def scene(loop):
    reader, writer = os.pipe()
    os.write(writer, b"x")
    os.close(writer)
    loop.run_until_complete(loop.connect_read_pipe(Protocol, open(reader, "rb")))
    loop.run_forever()
""",
    )


@pytest.mark.parametrize("where", ["pipe_data_received", "pipe_connection_lost", "process_exited", "connection_lost"])
def test_processes(loop_kind, where):
    if loop_kind == "asyncio" and sys.version_info < (3, 12):
        pytest.skip("asyncio's child watcher needs a loop in the main thread")
    exits(
        loop_kind,
        f"""
class Protocol(asyncio.SubprocessProtocol):
    {where} = stay

def scene(loop):
    loop.run_until_complete(loop.subprocess_exec(Protocol, sys.executable, "-c", "print(1)", stdin=None))
    loop.run_forever()
""",
    )


def test_while_native_code_panics():
    exits("grapeshot", "from grapeshot import _core\ndef scene(loop): _core._coro_panic(stay)")


def test_panics_are_caught():
    script = """
    from grapeshot import _core
    for _ in range(3):
        try:
            _core._coro_panic(print)
        except RuntimeError as exc:
            print(exc)
    """
    assert run_script("grapeshot", script) == "\ninternal error in grapeshot: a test has asked for it\n" * 3


@pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
@pytest.mark.parametrize("stack", ["shared", "own"])
@pytest.mark.parametrize(
    "work",
    [
        "stay()",
        "sorted([1, 2], key=stay)",
        "Stays()",
        "coro.await_(wait())",
        "asyncio.get_running_loop().call_soon(stay); coro.await_(asyncio.sleep(10))",
        "coro.spawn(int).add_done_callback(stay); coro.await_(asyncio.sleep(10))",
    ],
)
def test_coros(work, stack):
    exits(
        "grapeshot",
        f"""
import grapeshot
from grapeshot import coro

async def wait():
    await asyncio.sleep(0)
    stay()

def function():
    {work}

def scene(loop):
    async def main():
        await coro.spawn(function, stack={stack!r})
    loop.run_until_complete(main())
""",
    )


@pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
@pytest.mark.parametrize(
    "line",
    [
        "lock.acquire(timeout=0.001)",
        "rlock.acquire(timeout=0.001)",
        "items.get(timeout=0.001)",
    ],
)
def test_waits_for_locks_of_patched_threads(line):
    """The thread blocks without the GIL, and asks for it again when its timeout has passed."""
    exits(
        "grapeshot",
        f"""
from grapeshot import _core

def scene(_loop):
    lock, rlock, items = _core.thread_lock(), _core.thread_rlock(), _core.thread_queue()
    for held in (lock, rlock):
        thread = threading.Thread(target=held.acquire)
        thread.start()
        thread.join()
    entered.set()
    while True:
        try:
            {line}
        except Exception:
            pass  # Empty
""",
    )
