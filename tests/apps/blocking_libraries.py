"""Blocking clients for blocking_program.py, used as their manuals recommend.

Each class wraps one library. `ask` sends a number to a slow server, and returns the number from the server's reply.
`attempt` calls a server that misbehaves. Nothing in this module knows about coros.
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
from typing import Any

HOST = "127.0.0.1"
COUNT = 50
DELAY_S = 0.2
LONG_S = 60


class Library:
    needs: tuple[str, ...] = ()  # modules that are slow to import

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments
        for name in self.needs:
            importlib.import_module(name)

    def open(self) -> None:
        """Create what the calling threads share."""

    def close(self) -> None:
        """Close what `open` created."""

    def ask(self, number: int) -> int:
        raise NotImplementedError

    def attempt(self, port: int, timeout_s: float) -> None:
        raise NotImplementedError


# ---------------------------------------------------------------- HTTP


class Requests(Library):
    """One session with a pool of connections."""

    needs = ("requests.adapters",)

    def open(self) -> None:
        import requests
        import requests.adapters

        self.session = requests.Session()
        self.session.mount("http://", requests.adapters.HTTPAdapter(pool_maxsize=COUNT))

    def close(self) -> None:
        self.session.close()

    def ask(self, number: int) -> int:
        response = self.session.get(f"http://localhost:{self.arguments['port']}/{number}", timeout=LONG_S)
        response.raise_for_status()
        return int(response.text[1:])

    def attempt(self, port: int, timeout_s: float) -> None:
        import requests

        requests.get(f"http://{HOST}:{port}/", timeout=timeout_s)


class HttpClient(Library):
    needs = ("http.client", "urllib.request")

    def ask(self, number: int) -> int:
        import http.client

        connection = http.client.HTTPConnection(HOST, self.arguments["port"], timeout=LONG_S)
        connection.request("GET", f"/{number}")
        text = connection.getresponse().read()
        connection.close()
        return int(text[1:])

    def attempt(self, port: int, timeout_s: float) -> None:
        import urllib.request

        urllib.request.urlopen(f"http://{HOST}:{port}", timeout=timeout_s)


class Botocore(Library):
    """Requests to S3, signed by botocore."""

    needs = ("botocore.config", "botocore.session")

    def open(self) -> None:
        self.client = self.make(self.arguments["port"], LONG_S)

    def close(self) -> None:
        self.client.close()

    def make(self, port: int, timeout_s: float) -> Any:
        import botocore.config
        import botocore.session

        config = botocore.config.Config(
            max_pool_connections=COUNT,
            connect_timeout=timeout_s,
            read_timeout=timeout_s,
            retries={"total_max_attempts": 1},
            s3={"addressing_style": "path"},
            response_checksum_validation="when_required",
        )
        return botocore.session.get_session().create_client(
            "s3",
            region_name="eu-central-1",
            aws_access_key_id="key",
            aws_secret_access_key="secret",
            endpoint_url=f"http://{HOST}:{port}",
            config=config,
        )

    def ask(self, number: int) -> int:
        body = self.client.get_object(Bucket="bucket", Key=str(number))["Body"].read()
        return int(body.removeprefix(b"/bucket/"))

    def attempt(self, port: int, timeout_s: float) -> None:
        client = self.make(port, timeout_s)
        try:
            client.get_object(Bucket="bucket", Key="key")
        finally:
            client.close()


# ---------------------------------------------------------------- databases


class PyMySQL(Library):
    needs = ("pymysql",)

    def connect(self, **options: Any) -> Any:
        import pymysql

        return pymysql.connect(user="tester", password="a password", database="tests", **options)

    def ask(self, number: int) -> int:
        connection = self.connect(**self.arguments)
        try:
            with connection.cursor() as cursor:
                cursor.execute("SELECT SLEEP(%s), %s", (DELAY_S, number))
                slept, answer = cursor.fetchone()
        finally:
            connection.close()
        assert slept == 0
        return int(answer)

    def attempt(self, port: int, timeout_s: float) -> None:
        limits = {"connect_timeout": timeout_s, "read_timeout": timeout_s}
        self.connect(host=HOST, port=port, ssl_disabled=True, **limits).close()


class Psycopg(Library):
    needs = ("psycopg",)

    def connect(self, **options: Any) -> Any:
        import psycopg

        return psycopg.connect(**options)

    def ask(self, number: int) -> int:
        connection = self.connect(**self.arguments)
        try:
            cursor = connection.cursor()
            cursor.execute("SELECT pg_sleep(%s), %s", (DELAY_S, number))
            return int(cursor.fetchone()[1])
        finally:
            connection.close()

    def attempt(self, port: int, timeout_s: float) -> None:
        self.connect(host=HOST, port=port, connect_timeout=max(timeout_s, 2), user="tester", dbname="none").close()


class Psycopg2(Psycopg):
    """psycopg2 with the wait callback that it offers to programs with cooperative threads."""

    needs = ("psycopg2.extensions", "psycopg2.extras")

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__(arguments)
        import psycopg2.extensions
        import psycopg2.extras

        psycopg2.extensions.set_wait_callback(psycopg2.extras.wait_select)

    def connect(self, **options: Any) -> Any:
        import psycopg2

        return psycopg2.connect(**options)


class Django(Library):
    """Django's ORM on PostgreSQL: each thread has a connection of its own."""

    needs = ("django.conf", "django.db", "django.db.backends.postgresql.base")

    def open(self) -> None:
        import django
        import django.conf

        address = self.arguments
        django.conf.settings.configure(
            DATABASES={
                "default": {
                    "ENGINE": "django.db.backends.postgresql",
                    "HOST": address["host"],
                    "PORT": address["port"],
                    "USER": address["user"],
                    "PASSWORD": address["password"],
                    "NAME": address["dbname"],
                    "OPTIONS": address.get("options", {}),
                }
            },
            DEFAULT_AUTO_FIELD="django.db.models.AutoField",
        )
        django.setup()
        from django.db import connection, models

        class Row(models.Model):
            number = models.IntegerField()

            class Meta:
                app_label = "tests"

        self.model = Row
        with connection.schema_editor() as editor:
            editor.create_model(Row)
        connection.close()

    def close(self) -> None:
        from django.db import connection

        with connection.schema_editor() as editor:
            editor.delete_model(self.model)
        connection.close()

    def ask(self, number: int) -> int:
        from django.db import connection
        from django.db.models import CharField, Func, Value

        sleep = Func(Value(DELAY_S), function="pg_sleep", output_field=CharField())
        try:
            made = self.model.objects.create(number=number)
            return int(self.model.objects.filter(pk=made.pk).annotate(slept=sleep).values_list("number", "slept")[0][0])
        finally:
            connection.close()


class Pymemcache(Library):
    """A pool of connections, which the threads share."""

    needs = ("pymemcache.client.base",)

    def open(self) -> None:
        from pymemcache.client.base import PooledClient

        self.client = PooledClient((HOST, self.arguments["port"]), max_pool_size=COUNT)

    def close(self) -> None:
        self.client.close()

    def ask(self, number: int) -> int:
        assert self.client.set(f"key{number}", str(number), noreply=False)
        return int(self.client.get(f"key{number}"))

    def attempt(self, port: int, timeout_s: float) -> None:
        from pymemcache.client.base import Client

        client = Client((HOST, port), connect_timeout=timeout_s, timeout=timeout_s)
        try:
            client.get("key")
        finally:
            client.close()


# ---------------------------------------------------------------- the standard library's other clients


class Smtp(Library):
    needs = ("smtplib",)

    def ask(self, number: int) -> int:
        import smtplib

        with smtplib.SMTP(HOST, self.arguments["port"], timeout=LONG_S) as client:
            client.ehlo()
            return int(client.verify(str(number))[1])

    def attempt(self, port: int, timeout_s: float) -> None:
        import smtplib

        smtplib.SMTP(HOST, port, timeout=timeout_s).ehlo()


class Pop3(Library):
    needs = ("poplib",)

    def ask(self, number: int) -> int:
        import poplib

        client = poplib.POP3(HOST, self.arguments["port"], timeout=LONG_S)
        client.user("user")
        client.pass_("password")
        lines = client.top(number, 0)[1]
        client.quit()
        return int(lines[0].removeprefix(b"Subject: "))

    def attempt(self, port: int, timeout_s: float) -> None:
        import poplib

        poplib.POP3(HOST, port, timeout=timeout_s).user("user")


class Imap(Library):
    needs = ("imaplib",)

    def ask(self, number: int) -> int:
        import imaplib

        with imaplib.IMAP4(HOST, self.arguments["port"], timeout=LONG_S) as client:
            client.login("user", "password")
            return int(client.select(str(number))[1][0])

    def attempt(self, port: int, timeout_s: float) -> None:
        import imaplib

        imaplib.IMAP4(HOST, port, timeout=timeout_s)


class Ftp(Library):
    needs = ("ftplib",)

    def ask(self, number: int) -> int:
        import ftplib

        with ftplib.FTP() as client:
            client.connect(HOST, self.arguments["port"], timeout=LONG_S)
            client.login("user", "password")
            return int(client.size(str(number)))

    def attempt(self, port: int, timeout_s: float) -> None:
        import ftplib

        client = ftplib.FTP()
        client.connect(HOST, port, timeout=timeout_s)
        client.login()


# ---------------------------------------------------------------- clients and servers in one process


class Meeting:
    """A barrier: all threads continue DELAY_S after the last one has arrived, as with Crowd in slow_servers.py."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(COUNT)

    def wait(self) -> None:
        self.barrier.wait(LONG_S)
        time.sleep(DELAY_S)


class Threaded(Library):
    """A server from the library, which runs in this process with a thread for each connection."""

    def open(self) -> None:
        self.meeting = Meeting()
        self.server = self.make_server()
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()

    def make_server(self) -> Any:
        raise NotImplementedError


class XmlRpc(Threaded):
    needs = ("xmlrpc.client", "xmlrpc.server")

    def make_server(self) -> Any:
        import socketserver
        import xmlrpc.server

        class Server(socketserver.ThreadingMixIn, xmlrpc.server.SimpleXMLRPCServer):
            request_queue_size = 2 * COUNT

        server = Server((HOST, 0), logRequests=False)
        server.register_function(self.echo, "echo")
        return server

    def echo(self, number: int) -> int:
        self.meeting.wait()
        return number

    def ask(self, number: int) -> int:
        import xmlrpc.client

        with xmlrpc.client.ServerProxy(f"http://{HOST}:{self.server.server_address[1]}") as proxy:
            return int(proxy.echo(number))

    def attempt(self, port: int, timeout_s: float) -> None:
        import http.client
        import xmlrpc.client

        class Transport(xmlrpc.client.Transport):
            def make_connection(self, host: Any) -> Any:
                return http.client.HTTPConnection(host, timeout=timeout_s)

        with xmlrpc.client.ServerProxy(f"http://{HOST}:{port}", transport=Transport()) as proxy:
            proxy.echo(1)


class Flask(Threaded):
    """A Flask application on its development server."""

    needs = ("flask", "werkzeug.serving")

    def make_server(self) -> Any:
        import flask
        import werkzeug.serving

        app = flask.Flask(__name__)
        logging.getLogger("werkzeug").setLevel(logging.ERROR)

        @app.get("/<int:number>")
        def echo(number: int) -> str:
            self.meeting.wait()
            return flask.request.path

        werkzeug.serving.BaseWSGIServer.request_queue_size = 2 * COUNT
        return werkzeug.serving.make_server(HOST, 0, app, threaded=True)

    def ask(self, number: int) -> int:
        import urllib.request

        with urllib.request.urlopen(f"http://{HOST}:{self.server.server_port}/{number}", timeout=LONG_S) as response:
            return int(response.read()[1:])


class Thrift(Library):
    """TSocket, and a server with a thread for each connection. The messages are written without generated code."""

    needs = ("thrift.server.TServer", "thrift.protocol.TBinaryProtocol")

    def open(self) -> None:
        import socket

        from thrift.server.TServer import TThreadedServer
        from thrift.transport.TSocket import TServerSocket

        self.meeting = Meeting()
        self.listening = TServerSocket(HOST, 0, socket_family=socket.AF_INET)
        self.listening.listen()
        self.listening.listen = lambda: None  # serve() calls it again, and the original would choose another port
        server = TThreadedServer(self, self.listening, daemon=True)
        # Only the end of the program stops the server.
        threading.Thread(target=server.serve, daemon=True).start()

    def process(self, incoming: Any, outgoing: Any) -> None:
        """Answer one call. Thrift's servers call this method."""
        from thrift.Thrift import TMessageType

        name, _, number = incoming.readMessageBegin()
        incoming.readMessageEnd()
        self.meeting.wait()
        outgoing.writeMessageBegin(name, TMessageType.REPLY, number)
        outgoing.writeMessageEnd()
        outgoing.trans.flush()

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__(arguments)
        logging.getLogger("thrift").setLevel(logging.CRITICAL + 1)  # it logs refused connections

    def call(self, port: int, number: int, timeout_s: float) -> int:
        from thrift.protocol.TBinaryProtocol import TBinaryProtocol
        from thrift.Thrift import TMessageType
        from thrift.transport.TSocket import TSocket

        sock = TSocket(HOST, port)
        sock.setTimeout(timeout_s * 1000)
        sock.open()
        try:
            protocol = TBinaryProtocol(sock)
            protocol.writeMessageBegin("echo", TMessageType.CALL, number)
            protocol.writeMessageEnd()
            return int(protocol.readMessageBegin()[2])
        finally:
            sock.close()

    def ask(self, number: int) -> int:
        return self.call(self.listening.handle.getsockname()[1], number, LONG_S)

    def attempt(self, port: int, timeout_s: float) -> None:
        self.call(port, 1, timeout_s)


LIBRARIES: dict[str, type[Library]] = {
    "requests": Requests,
    "http.client": HttpClient,
    "botocore": Botocore,
    "pymysql": PyMySQL,
    "psycopg": Psycopg,
    "psycopg2": Psycopg2,
    "django": Django,
    "pymemcache": Pymemcache,
    "smtplib": Smtp,
    "poplib": Pop3,
    "imaplib": Imap,
    "ftplib": Ftp,
    "xmlrpc": XmlRpc,
    "flask": Flask,
    "thrift": Thrift,
}
