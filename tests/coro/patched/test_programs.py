"""An unmodified program prints the same with `python` and with `python -m grapeshot.coro`.

The programs use the standard library. Servers and clients are threads of one process.
"""

from __future__ import annotations

import pytest
from support import coro_is_available, gil_is_enabled

from tests.coro.patched.same_output import check_same_output

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")

SCRIPTS = {
    "http": """
        import http.client, http.server, json, threading, urllib.error, urllib.request

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body[::-1])
            def do_GET(self):
                self.send_error(404)
            def log_message(self, *args):
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        port = server.server_address[1]
        results = {}
        def client(number):
            connection = http.client.HTTPConnection("localhost", port, timeout=20)
            replies = []
            for step in range(3):
                body = f"{number}-{step}".encode() * (1 + step * 20000)
                connection.request("POST", "/", body)
                replies.append(connection.getresponse().read() == body[::-1])
            connection.close()
            results[number] = replies
        clients = [threading.Thread(target=client, args=(number,)) for number in range(10)]
        for each in clients: each.start()
        for each in clients: each.join()
        print(sorted(results.items()))
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/none")
        except urllib.error.HTTPError as error:
            print(error.code)
            error.close()
        server.shutdown()
        thread.join()
        server.server_close()
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/none")
        except urllib.error.URLError as error:
            print(error.reason)
    """,
    "xmlrpc": """
        import threading, xmlrpc.client, xmlrpc.server
        server = xmlrpc.server.SimpleXMLRPCServer(("127.0.0.1", 0), logRequests=False)
        server.register_function(pow)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        with xmlrpc.client.ServerProxy("http://127.0.0.1:%d" % server.server_address[1]) as proxy:
            print(proxy.pow(2, 10))
            try:
                proxy.nothing()
            except xmlrpc.client.Fault as fault:
                print(fault.faultString)
        server.shutdown(); thread.join(); server.server_close()
    """,
    "smtp": """
        import smtplib, socketserver, threading
        mails = []
        class Handler(socketserver.StreamRequestHandler):
            def say(self, text):
                self.wfile.write(text.encode() + b"\\r\\n")
            def handle(self):
                self.say("220 hello")
                while line := self.rfile.readline().strip():
                    verb = line.split()[0].upper()
                    if verb == b"DATA":
                        self.say("354 go on")
                        lines = []
                        while (line := self.rfile.readline()) != b".\\r\\n":
                            lines.append(line)
                        mails.append(b"".join(lines))
                    self.say("221 bye" if verb == b"QUIT" else "250 ok")
                    if verb == b"QUIT":
                        return
        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = False
        with Server(("127.0.0.1", 0), Handler) as server:
            thread = threading.Thread(target=server.serve_forever, args=(0.01,))
            thread.start()
            def send(number):
                with smtplib.SMTP("127.0.0.1", server.server_address[1], timeout=20) as smtp:
                    smtp.sendmail("a@example.org", ["b@example.org"], f"Subject: {number}\\n\\n.text\\n")
            senders = [threading.Thread(target=send, args=(number,)) for number in range(5)]
            for sender in senders: sender.start()
            for sender in senders: sender.join()
            server.shutdown(); thread.join()
        print(sorted(mails))
    """,
    "logging": """
        import logging, logging.handlers, pickle, socket, struct, threading
        listener = socket.create_server(("127.0.0.1", 0))
        received = []
        def serve():
            connection, _ = listener.accept()
            with connection, connection.makefile("rb") as file:
                while head := file.read(4):
                    received.append(pickle.loads(file.read(struct.unpack(">L", head)[0]))["msg"])
        thread = threading.Thread(target=serve)
        thread.start()
        handler = logging.handlers.SocketHandler(*listener.getsockname())
        logger = logging.getLogger("x")
        logger.addHandler(handler)
        def log(number):
            logger.warning("from %d", number)
        loggers = [threading.Thread(target=log, args=(number,)) for number in range(10)]
        for each in loggers: each.start()
        for each in loggers: each.join()
        handler.close(); thread.join(); listener.close()
        print(sorted(received))
    """,
    "syslog and mail": """
        import logging, logging.handlers, os, socket, tempfile, threading
        received = []
        def serve_lines(listener, count):
            # syslog over TCP ends its messages with a zero byte
            connection, _ = listener.accept()
            with connection:
                data = b""
                while data.count(b"\\0") < count:
                    data += connection.recv(1000)
            received.extend(("tcp", line) for line in data.split(b"\\0")[:-1])
        def serve_datagrams(sock, name, count):
            received.extend((name, sock.recv(1000).rstrip(b"\\0")) for _ in range(count))
        def serve_mail(listener, count):
            for _ in range(count):
                connection, _ = listener.accept()
                with connection, connection.makefile("rwb") as file:
                    def say(line):
                        file.write(line + b"\\r\\n")
                        file.flush()
                    say(b"220 here")
                    while (line := file.readline().rstrip()) != b"quit":
                        if line == b"data":
                            say(b"354 go on")
                            body = []
                            while (line := file.readline().rstrip()) != b".":
                                body.append(line)
                            received.append(("mail", body[-1]))
                        say(b"250 ok")
                    say(b"221 bye")
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "log")
            udp = socket.socket(type=socket.SOCK_DGRAM)
            udp.bind(("127.0.0.1", 0))
            unix = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            unix.bind(path)
            tcp, mail = (socket.create_server(("127.0.0.1", 0)) for _ in range(2))
            servers = [
                threading.Thread(target=serve_datagrams, args=(udp, "udp", 5)),
                threading.Thread(target=serve_datagrams, args=(unix, "unix", 5)),
                threading.Thread(target=serve_lines, args=(tcp, 5)),
                threading.Thread(target=serve_mail, args=(mail, 5)),
            ]
            for each in servers: each.start()
            logger = logging.getLogger("x")
            syslog = logging.handlers.SysLogHandler
            handlers = [
                syslog(udp.getsockname()),
                syslog(path),
                syslog(tcp.getsockname(), socktype=socket.SOCK_STREAM),
                logging.handlers.SMTPHandler(mail.getsockname(), "a@localhost", ["b@localhost"], "news", timeout=20),
            ]
            for each in handlers: logger.addHandler(each)
            loggers = [threading.Thread(target=logger.warning, args=("from %d", number)) for number in range(5)]
            for each in loggers: each.start()
            for each in loggers + servers: each.join()
            for each in handlers: each.close()
            for each in (udp, unix, tcp, mail): each.close()
        print(sorted(received))
    """,
    "pool": """
        import queue, threading, concurrent.futures, time
        jobs, results = queue.Queue(3), queue.SimpleQueue()
        def work():
            while (job := jobs.get()) is not None:
                time.sleep(0.001)
                results.put(job * job)
                jobs.task_done()
            jobs.task_done()
        workers = [threading.Thread(target=work) for _ in range(5)]
        for worker in workers: worker.start()
        for number in range(50): jobs.put(number)
        for _ in workers: jobs.put(None)
        jobs.join()
        for worker in workers: worker.join()
        print(sorted(results.get() for _ in range(50)))
        with concurrent.futures.ThreadPoolExecutor(3) as executor:
            print(list(executor.map(lambda number: number + 1, range(5))))
            future = executor.submit(divmod, 1, 0)
            print(repr(future.exception()))
            print(len(concurrent.futures.wait([executor.submit(time.sleep, 0.01) for _ in range(5)]).done))
    """,
    "subprocess": """
        import os, signal, subprocess, sys, threading
        data = os.urandom(300000)
        done = subprocess.run(["cat"], input=data, capture_output=True)
        print(done.returncode, done.stdout == data, done.stderr)
        process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        process.stdin.write("one\\n")
        print(process.stdout.readline())
        process.stdin.write("two\\nthree")
        process.stdin.close()
        print(process.stdout.read(), process.wait())
        process.stdout.close()
        try:
            subprocess.run(["sleep", "60"], timeout=0.05)
        except subprocess.TimeoutExpired as error:
            print(error.cmd)
        try:
            subprocess.run(["/does/not/exist"])
        except FileNotFoundError as error:
            print(error)
        process = subprocess.Popen(["sleep", "60"])
        thread = threading.Thread(target=process.kill)
        thread.start()
        with os.popen("echo hello") as file:
            print(process.wait(), file.read())
        both = ["sh", "-c", "echo out; echo err >&2; exit 3"]
        with subprocess.Popen(both, stdout=-1, stderr=-1, bufsize=0) as process:
            print(process.stdout.read(), process.stderr.read())
        print(process.returncode)
        print(subprocess.getstatusoutput("exit 7"))
        pid = os.fork()
        if not pid:
            os._exit(5)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        pid = os.fork()
        if not pid:
            signal.pause()
            os._exit(6)
        os.kill(pid, signal.SIGSTOP)
        print(os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1]))
        os.kill(pid, signal.SIGKILL)
        print(os.wait()[0] == pid)
        try:
            os.waitpid(pid, 0)
        except ChildProcessError as error:
            print(error)
    """,
    "select": """
        import os, select, selectors, socket, threading
        def with_select(sock, limit):
            return bool(select.select([sock], [], [], limit)[0])
        def with_poll(sock, limit):
            poll = select.poll()
            poll.register(sock, select.POLLIN)
            return bool(poll.poll(None if limit is None else limit * 1000))
        def with_epoll(sock, limit):
            with select.epoll() as epoll:
                epoll.register(sock, select.EPOLLIN)
                return bool(epoll.poll(limit))
        def with_selector(sock, limit):
            with selectors.DefaultSelector() as selector:
                selector.register(sock, selectors.EVENT_READ)
                return bool(selector.select(limit))
        for wait in (with_select, with_poll, with_epoll, with_selector):
            near, far = socket.socketpair()
            with near, far:
                print(wait(near, 0.01), wait(near, 0))
                both = []
                waiters = [threading.Thread(target=lambda: both.append(wait(near, None))) for _ in range(3)]
                for waiter in waiters: waiter.start()
                far.send(b"x")
                for waiter in waiters: waiter.join()
                # The events are level-triggered, and the data was not read yet.
                print(both, wait(near, 0), wait(near, None), near.recv(5), wait(near, 0))
                far.close()
                print(wait(near, None), near.recv(5))
        for bad in ((["x"], [], []), ([-1], [], []), ([], [], [], -1), ([], [], [], "1"), (5, [], [])):
            try:
                select.select(*bad)
            except (TypeError, ValueError) as error:
                print(type(error).__name__, error)
        read, write = os.pipe()
        os.close(read)
        try:
            select.select([read], [], [], 1)
        except OSError as error:
            print(error)
        os.close(write)
    """,
    "sockets": """
        import socket, threading
        listener = socket.create_server(("127.0.0.1", 0))
        address = listener.getsockname()
        print(type(listener).__name__, type(listener).__module__, isinstance(listener, socket.socket))
        # Several threads accept connections from one listening socket. Below, several threads send on one socket.
        counts = []
        def accept():
            connection, _ = listener.accept()
            with connection:
                counts.append(connection.recv(100))
        threads = [threading.Thread(target=accept) for _ in range(4)]
        for thread in threads: thread.start()
        for number in range(4):
            with socket.create_connection(address, timeout=20) as client:
                client.sendall(b"%d" % number)
        for thread in threads: thread.join()
        print(sorted(counts))
        near, far = socket.socketpair()
        blocks = [bytes([65 + number]) * 400000 for number in range(3)]
        senders = [threading.Thread(target=near.sendall, args=(block,)) for block in blocks]
        for sender in senders: sender.start()
        total = {}
        left = sum(map(len, blocks))
        while left:
            data = far.recv(65536)
            left -= len(data)
            for letter in set(data): total[letter] = total.get(letter, 0) + data.count(letter)
        for sender in senders: sender.join()
        print(sorted(total.items()))
        near.settimeout(0.01)
        for call in (lambda: near.recv(1), lambda: near.makefile("rb").read(1)):
            try:
                call()
            except OSError as error:
                print(type(error).__name__, error)
        near.setblocking(False)
        try:
            near.recv(1)
        except BlockingIOError as error:
            print(error)
        near.close(); far.close()
        listener.close()
        try:
            socket.create_connection(address, timeout=20)
        except ConnectionRefusedError as error:
            print(error)
        for call in (lambda: socket.getaddrinfo("a..b", 1), lambda: socket.gethostbyname("no.invalid")):
            try:
                call()
            except (OSError, UnicodeError) as error:
                print(type(error).__name__)
        print(socket.gethostbyname("localhost"), socket.getnameinfo(("127.0.0.1", 80), 3))
    """,
    "signals": """
        import os, signal, threading, time, socket
        class Alarm(Exception): pass
        def ring(number, frame): raise Alarm(signal.Signals(number).name)
        before = signal.signal(signal.SIGALRM, ring)
        print(before, signal.getsignal(signal.SIGALRM) is ring, signal.getsignal(signal.SIGINT))
        near, far = socket.socketpair()
        for wait in (lambda: time.sleep(60), lambda: near.recv(1), threading.Lock().acquire, threading.Event().wait):
            if wait.__name__ == "acquire": wait()
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            try:
                wait()
            except Alarm as alarm:
                print("woken by", alarm)
        near.close(); far.close()
        hits = []
        signal.signal(signal.SIGUSR1, lambda number, frame: hits.append(number))
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        signal.pause()
        print(hits)
        os.kill(os.getpid(), signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
        print(hits, signal.signal(signal.SIGUSR1, signal.SIG_DFL) is not None, signal.getsignal(signal.SIGUSR1))
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
        print(signal.sigtimedwait([signal.SIGUSR2], 0.01))
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR2)).start()
        print(signal.sigwait([signal.SIGUSR2]))
        signal.pthread_kill(threading.get_ident(), 0)
    """,
    "pipes": """
        import os, threading
        read, write = os.pipe()
        data = os.urandom(1000000)
        sizes = []
        def send():
            sizes.append(os.write(write, data))
            sizes.append(os.writev(write, [b"ab", b"", b"cd"]))
            os.close(write)
        thread = threading.Thread(target=send)
        thread.start()
        got = b""
        while part := os.read(read, 50000):
            got += part
        thread.join()
        print(got == data + b"abcd", sizes)
        os.close(read)
        read, write = os.pipe()
        seen = []
        readers = [threading.Thread(target=lambda: seen.append(os.read(read, 1))) for _ in range(3)]
        for reader in readers: reader.start()
        os.write(write, b"abc")
        for reader in readers: reader.join()
        print(sorted(seen))
        os.set_blocking(read, False)
        for call in (lambda: os.read(read, 1), lambda: os.read(-1, 1), lambda: os.write(write, "text")):
            try:
                call()
            except (OSError, TypeError) as error:
                print(type(error).__name__, error)
        os.close(read)
        try:
            os.write(write, b"x")
        except BrokenPipeError as error:
            print(error)
        os.close(write)
        with open(__file__, "rb") as file:
            print(len(os.read(file.fileno(), 10)))
    """,
}

TLS = """
    import socket, ssl, sys, threading
    chain, key, ca = sys.argv[1:]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain, key)
    trusting = ssl.create_default_context(cafile=ca)
    listener = socket.create_server(("127.0.0.1", 0))
    secure = context.wrap_socket(listener, server_side=True)
    print(type(secure).__name__, isinstance(secure, ssl.SSLSocket), isinstance(secure, socket.socket))
    errors = []
    def serve_one(connection):
        with connection:
            while data := connection.recv(1 << 16):
                connection.sendall(data)
    def serve():
        for _ in range(6):
            try:
                connection, _ = secure.accept()
            except (ssl.SSLError, OSError) as error:
                errors.append(type(error).__name__)
            else:
                threading.Thread(target=serve_one, args=(connection,)).start()
    server = threading.Thread(target=serve)
    server.start()
    results = []
    def client(number):
        with socket.create_connection(secure.getsockname(), timeout=20) as plain:
            with trusting.wrap_socket(plain, server_hostname="localhost") as connection:
                data = bytes([number]) * 300000
                # CPython's own SSLSocket sometimes raises BlockingIOError if one thread reads while another one writes.
                # So without patching, the data is sent in small pieces, and each is read back only after it was sent.
                step = len(data) if "grapeshot.coro" in sys.modules else 1 << 14
                got = b""
                for start in range(0, len(data), step):
                    sender = threading.Thread(target=connection.sendall, args=(data[start : start + step],))
                    sender.start()
                    if step < len(data): sender.join()
                    while len(got) < min(start + step, len(data)):
                        got += connection.recv(1 << 16)
                    sender.join()
                connection.settimeout(0.01)
                try:
                    connection.recv(1)
                except TimeoutError as error:
                    text = str(error)
                results.append((number, got == data, "timed out" in text, connection.version()))
    clients = [threading.Thread(target=client, args=(number,)) for number in range(4)]
    for each in clients: each.start()
    for each in clients: each.join()
    print(sorted(results))
    # One client does not trust the server's authority, and one does not speak TLS.
    with socket.create_connection(secure.getsockname(), timeout=20) as plain:
        try:
            ssl.create_default_context().wrap_socket(plain, server_hostname="localhost")
        except ssl.SSLCertVerificationError as error:
            print(error.reason)
    with socket.create_connection(secure.getsockname(), timeout=20) as plain:
        plain.sendall(b"GET / HTTP/1.0\\r\\n\\r\\n")
        try:
            while plain.recv(100): pass
        except ConnectionResetError:
            pass
    server.join()
    secure.close()
    print(sorted(errors))
    near, far = socket.socketpair()
    near.settimeout(0.01)
    try:
        trusting.wrap_socket(near, server_hostname="localhost")
    except TimeoutError as error:
        print("timed out" in str(error))
    near.close(); far.close()
"""


@pytest.mark.parametrize("name", SCRIPTS)
def test_same_output(name, tmp_path):
    if name == "signals" and not gil_is_enabled():
        pytest.skip("plain CPython 3.14t itself sometimes misses a signal in Event.wait()")
    check_same_output(tmp_path / "script.py", SCRIPTS[name])


def test_same_output_with_tls(tmp_path):
    trustme = pytest.importorskip("trustme")
    authority = trustme.CA()
    issued = authority.issue_cert("localhost")
    chain, key, ca = (tmp_path / name for name in ("chain.pem", "key.pem", "ca.pem"))
    chain.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(key)
    authority.cert_pem.write_to_path(ca)
    check_same_output(tmp_path / "script.py", TLS, str(chain), str(key), str(ca))
