"""Server programs that the tests start: on free ports, in a temporary directory, stopped at the end.

The tests never use a server that already runs on the machine. The fixtures start each server once, and the tests
share it, so each test uses names of its own (for example, for its tables or keys). RabbitMQ is started by its test.
"""

from __future__ import annotations

import dataclasses
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Self

from support import HOST, free_port

from tests.apps.certificates import Certificates
from tests.apps.requirements import program

START_CAP_S = 60.0
STOP_CAP_S = 30.0
TRIES = 5  # another program may take a free port before the server does


class Daemon(ABC):
    """A server program in its own process. `with` starts it, waits until it is ready, and stops it."""

    stop_signal = signal.SIGTERM
    user: str | None = None  # another account to run as

    def __init__(self, certificates: Certificates) -> None:
        self.certificates = certificates
        # pytest's own temporary directory will not do: its path is too long for a unix socket, and other accounts
        # cannot enter it.
        self.folder = Path(tempfile.mkdtemp(prefix="gs-", dir="/tmp"))
        self.log = self.folder / "log"

    @abstractmethod
    def prepare(self) -> None:
        """Fill the directory. This is called once."""

    @abstractmethod
    def command(self) -> list[str]:
        """Return the command line, with newly chosen ports."""

    @abstractmethod
    def is_ready(self, log: str) -> bool:
        """Return whether the log says that the server accepts connections."""

    def learn(self, log: str) -> None:  # noqa: B027 - most servers need no change
        """Learn from the log of a failed start what the next attempt must do differently."""

    def __enter__(self) -> Self:
        try:
            self.give(self.folder)
            self.prepare()
            for _ in range(TRIES):
                if self._start():
                    return self
            raise AssertionError(f"{type(self).__name__} does not start:\n{self.log.read_text()}")
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def __exit__(self, *_error: object) -> None:
        try:
            self.process.send_signal(self.stop_signal)
            self.process.wait(STOP_CAP_S)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
            shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self) -> bool:
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*die_with_parent(), *self.command()],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C must not reach the server: the tests stop it
                **self.account(),
            )
        give_up_s = time.monotonic() + START_CAP_S
        while not self.is_ready(self.log.read_text(errors="replace")):
            if self.process.poll() is not None:
                self.learn(self.log.read_text(errors="replace"))
                return False
            if time.monotonic() > give_up_s:
                self.process.kill()
                self.process.wait()
                return False
            time.sleep(0.01)
        return True

    def run(self, *command: str) -> None:
        """Run a program under the server's account, and wait until it ends."""
        done = subprocess.run(
            command, cwd=self.folder, capture_output=True, text=True, timeout=START_CAP_S, check=False, **self.account()
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"

    def account(self) -> dict[str, Any]:
        """Return arguments for Popen that change the account, if it must be changed."""
        if self.user is None:
            return {}
        entry = pwd.getpwnam(self.user)
        return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}

    def give(self, path: Path) -> None:
        """Give a file to the server's account."""
        if self.user is not None:
            entry = pwd.getpwnam(self.user)
            os.chown(path, entry.pw_uid, entry.pw_gid)

    def write(self, name: str, text: str) -> str:
        """Write a file that only the server may read; return its path."""
        path = self.folder / name
        path.write_text(text)
        path.chmod(0o600)
        self.give(path)
        return str(path)


def die_with_parent() -> list[str]:
    """Return a prefix for a command. With the prefix, the kernel kills the command when the tests end, even if they are
    killed. Where setpriv is missing, the prefix is empty.
    """
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []


@dataclasses.dataclass(frozen=True)
class RedisAddress:
    port: int
    tls_port: int | None  # None: this redis-server was built without TLS
    path: str


class Redis(Daemon):
    """redis-server: over TCP, over TLS (if the build supports it) and on a unix socket. It keeps nothing on disk."""

    def __init__(self, certificates: Certificates) -> None:
        self.program = program("redis-server", "Debian: redis-server")
        self.has_tls = True
        super().__init__(certificates)

    def prepare(self) -> None:
        self.files = [
            *("--tls-cert-file", self.write("cert.pem", self.certificates.chain)),
            *("--tls-key-file", self.write("key.pem", self.certificates.key)),
            *("--tls-ca-cert-file", self.write("ca.pem", self.certificates.authority)),
            *("--tls-auth-clients", "no"),
        ]

    def command(self) -> list[str]:
        path = str(self.folder / "redis.sock")
        self.address = RedisAddress(free_port(), free_port() if self.has_tls else None, path)
        command = [self.program, "--bind", HOST, "--port", str(self.address.port), "--unixsocket", path]
        command += ["--save", "", "--appendonly", "no", "--dir", str(self.folder), "--daemonize", "no"]
        if self.address.tls_port is not None:
            command += ["--tls-port", str(self.address.tls_port), *self.files]
        return command

    def is_ready(self, log: str) -> bool:
        return "eady to accept connections" in log

    def learn(self, log: str) -> None:
        if "Bad directive" in log:
            self.has_tls = False  # a build without TLS rejects the option tls-port


@dataclasses.dataclass(frozen=True)
class PostgresAddress:
    port: int
    folder: str  # the directory of its unix socket
    user: str
    password: str
    database: str


class Postgres(Daemon):
    """PostgreSQL: passwords and optional TLS over TCP, no passwords on its unix socket. If root runs the tests, the
    server runs under another account.
    """

    stop_signal = signal.SIGINT  # PostgreSQL's fast shutdown, which does not wait for clients

    def __init__(self, certificates: Certificates) -> None:
        places = ("/usr/lib/postgresql/*/bin", "/usr/local/pgsql/bin")  # not on Debian's search path
        self.initdb, self.program = (
            os.path.realpath(program(name, "Debian: postgresql", *places)) for name in ("initdb", "postgres")
        )
        if os.geteuid() == 0:
            self.user = "postgres"  # the package creates this account; the server refuses to run as root
        super().__init__(certificates)

    def prepare(self) -> None:
        self.data = self.folder / "data"
        password = self.write("password", "a password\n")
        self.run(
            *(self.initdb, "--pgdata", str(self.data), "--username", "tester", "--no-sync"),
            *("--auth-host", "scram-sha-256", "--auth-local", "trust", "--pwfile", password, "--encoding", "UTF8"),
        )
        self.certificate = self.write("cert.pem", self.certificates.chain)
        self.key = self.write("key.pem", self.certificates.key)

    def command(self) -> list[str]:
        self.address = PostgresAddress(free_port(), str(self.folder), "tester", "a password", "postgres")
        settings = {
            "listen_addresses": HOST,
            "port": self.address.port,
            "unix_socket_directories": self.folder,
            "fsync": "off",
            "ssl": "on",
            "ssl_cert_file": self.certificate,
            "ssl_key_file": self.key,
            "max_connections": 100,
            "lc_messages": "C",
        }
        options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        return [self.program, "-D", str(self.data), *options]

    def is_ready(self, log: str) -> bool:
        return "database system is ready to accept connections" in log


@dataclasses.dataclass(frozen=True)
class MariaDBAddress:
    port: int
    path: str
    user: str
    password: str
    database: str


class MariaDB(Daemon):
    """MariaDB: passwords and optional TLS, both over TCP and on its unix socket. Nothing is synced to disk. If root
    runs the tests, the server runs under another account.
    """

    # Small files without syncing: the data is needed only as long as the tests run.
    SETTINGS: ClassVar[dict[str, str]] = {
        "innodb-log-file-size": "4M",
        "innodb-buffer-pool-size": "8M",
        "innodb-flush-method": "nosync",
        "innodb-flush-log-at-trx-commit": "0",
        "innodb-doublewrite": "OFF",
        "innodb-fast-shutdown": "2",
        "innodb-use-native-aio": "OFF",  # io_uring may be unavailable in a container
        "sync-frm": "OFF",
    }

    def __init__(self, certificates: Certificates) -> None:
        self.install, self.program = (
            program(name, "Debian: mariadb-server", "/usr/sbin", "/usr/local/mysql/*bin")
            for name in ("mariadb-install-db", "mariadbd")
        )
        if os.geteuid() == 0:
            self.user = "mysql"  # the package creates this account; the server refuses to run as root
        super().__init__(certificates)

    def prepare(self) -> None:
        self.options = ["--no-defaults", f"--datadir={self.folder / 'data'}"]
        self.options += [f"--{name}={value}" for name, value in self.SETTINGS.items()]
        self.run(self.install, *self.options, "--skip-test-db", "--auth-root-authentication-method=normal")
        self.files = [
            f"--ssl-cert={self.write('cert.pem', self.certificates.chain)}",
            f"--ssl-key={self.write('key.pem', self.certificates.key)}",
        ]
        self.first = self.write(
            "first.sql",
            "CREATE DATABASE tests;\n"
            "CREATE USER tester@'%' IDENTIFIED BY 'a password';\n"
            "GRANT ALL ON tests.* TO tester@'%';\n"
            "GRANT PROCESS ON *.* TO tester@'%';\n",
        )

    def command(self) -> list[str]:
        path = str(self.folder / "mariadb.sock")
        self.address = MariaDBAddress(free_port(), path, "tester", "a password", "tests")
        command = [self.program, *self.options, *self.files, f"--init-file={self.first}", f"--socket={path}"]
        command += [f"--bind-address={HOST}", f"--port={self.address.port}", f"--pid-file={self.folder / 'pid'}"]
        return [*command, "--skip-log-bin", "--skip-name-resolve", "--max-connections=200"]

    def is_ready(self, log: str) -> bool:
        return "ready for connections" in log


class Memcached(Daemon):
    """memcached over TCP. If root runs the tests, the server runs under another account."""

    def __init__(self, certificates: Certificates) -> None:
        self.program = program("memcached", "Debian: memcached")
        if os.geteuid() == 0:
            self.user = "nobody"
        super().__init__(certificates)

    def prepare(self) -> None:
        pass

    def command(self) -> list[str]:
        self.port = free_port()
        return [self.program, "-vv", "--listen", HOST, "--port", str(self.port), "--udp-port", "0", "--threads", "1"]

    def is_ready(self, log: str) -> bool:
        return "server listening" in log


class RabbitMQ(Daemon):
    """RabbitMQ, without plugins. It also starts Erlang's port mapper (epmd), which `__exit__` ends."""

    def __init__(self, certificates: Certificates) -> None:
        self.program = program(
            "rabbitmq-server", "Debian: rabbitmq-server", "/usr/lib/rabbitmq/bin", variable="REQUIRE_RABBITMQ"
        )
        if os.geteuid() == 0:
            self.user = "rabbitmq"  # the package's account, to which RabbitMQ's start script switches if root runs it
        super().__init__(certificates)

    def prepare(self) -> None:
        self.write("enabled_plugins", "[].")
        # RabbitMQ opens its log file by name. It cannot use `log`: if root runs the tests, root owns that file, and the
        # server's account may not write to it.
        self.own_log = self.folder / "rabbitmq.log"

    def __exit__(self, *_error: object) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)  # `process` is a script, and the server is its child
        super().__exit__(*_error)
        subprocess.run(["epmd", "-port", str(self.mapper_port), "-kill"], stdout=subprocess.DEVNULL, check=False)

    def command(self) -> list[str]:
        self.port, self.mapper_port = free_port(), free_port()
        folder = self.folder
        settings = {
            "HOME": folder,  # where Erlang keeps its cookie
            "RABBITMQ_BASE": folder,
            "RABBITMQ_MNESIA_BASE": folder / "mnesia",
            "RABBITMQ_LOG_BASE": folder,
            "RABBITMQ_LOGS": self.own_log,
            "RABBITMQ_CONF_ENV_FILE": "/dev/null",
            "RABBITMQ_CONFIG_FILE": folder / "none",
            "RABBITMQ_ENABLED_PLUGINS_FILE": folder / "enabled_plugins",
            "RABBITMQ_PID_FILE": folder / "pid",
            "RABBITMQ_NODENAME": f"tests-{self.port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": HOST,
            "RABBITMQ_NODE_PORT": self.port,
            "RABBITMQ_DIST_PORT": free_port(),
            "ERL_EPMD_PORT": self.mapper_port,
        }
        return ["env", *(f"{name}={value}" for name, value in settings.items()), self.program]

    def is_ready(self, log: str) -> bool:
        return self.own_log.exists() and "Server startup complete" in self.own_log.read_text(encoding="utf-8")
