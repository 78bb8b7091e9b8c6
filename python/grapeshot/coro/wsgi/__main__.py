"""``python -m grapeshot.coro.wsgi module:application``: serve a WSGI application after ``coro.patch()``."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import logging
import os
import pkgutil
import signal
import socket
import sys

from grapeshot import coro
from grapeshot.coro import _command

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any


class _UsageError(Exception):
    """An error of the user, such as a wrong argument. Its text is printed without a traceback."""


@contextlib.contextmanager
def _naming(what: str) -> Iterator[None]:
    """Turn errors in the block into _UsageError. ``what`` begins the text for an OSError or OverflowError."""
    try:
        yield
    except (OSError, OverflowError) as error:
        raise _UsageError(f"{what}: {error}") from error
    except ValueError as error:
        raise _UsageError(str(error)) from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m grapeshot.coro.wsgi",
        description="Serves a blocking-style WSGI application, with one coro per connection, after coro.patch().",
        epilog="GRAPESHOT_BACKDOOR=PATH in the environment opens a back door at PATH for python -m grapeshot attach. "
        "If PATH is a directory, each process opens a back door of its own in it.",
    )
    parser.add_argument("application", help="MODULE[:NAME]; NAME defaults to 'application'; NAME() calls a factory")
    parser.add_argument("--host", help="address or name to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on (8000)")
    parser.add_argument("--bind", action="append", default=[], help="HOST:PORT, unix:PATH or fd:N; may be repeated")
    parser.add_argument("--unix", action="append", default=[], metavar="PATH", help="unix socket to listen on")
    parser.add_argument("--chdir", help="change to this directory before the application is imported")
    parser.add_argument("--certfile", help="certificate for TLS")
    parser.add_argument("--keyfile", help="the certificate's key, if it is in another file")
    parser.add_argument("--limit", type=int, default=1000, help="open connections per listening address (1000)")
    parser.add_argument("--backlog", type=int, default=2048, help="length of the system's queue of clients (2048)")
    parser.add_argument(
        "--timeout", type=float, default=60.0, help="seconds for a client to send a head or a part of a body (60)"
    )
    parser.add_argument("--keepalive-timeout", type=float, default=60.0, help="idle seconds between requests (60)")
    parser.add_argument("--grace", type=float, default=30.0, help="seconds for requests in progress at the end (30)")
    parser.add_argument("--max-target-size", type=int, default=8190, help="bytes of a request's path and query (8190)")
    parser.add_argument("--max-headers", type=int, default=100, help="header fields of a request (100)")
    parser.add_argument("--max-header-size", type=int, default=8190, help="bytes of one header field (8190)")
    parser.add_argument("--max-head-size", type=int, default=65536, help="bytes of all header fields together (65536)")
    parser.add_argument("--max-body", type=int, default=1 << 30, help="bytes of a request's body, 0: any (1 GiB)")
    parser.add_argument("--access-log", metavar="FILE", help="file for the access log, - for stdout (default: no log)")
    parser.add_argument("--error-log", metavar="FILE", default="-", help="file for the error log (default: stderr)")
    parser.add_argument("--log-level", default="INFO", help="error log's level; DEBUG shows refused requests (INFO)")
    return parser


def _logger(name: str, file: str, stream: Any, level: str, layout: str) -> logging.Logger:
    handler = logging.StreamHandler(stream) if file == "-" else logging.FileHandler(file)
    handler.setFormatter(logging.Formatter(layout))
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False
    return logger


def _logs(options: argparse.Namespace) -> tuple[logging.Logger, logging.Logger | None]:
    layout = "%(asctime)s [%(process)d] %(levelname)s %(message)s"
    with _naming("--error-log"):
        error_log = _logger("grapeshot.wsgi", options.error_log, sys.stderr, options.log_level.upper(), layout)
    if options.access_log is None:
        return error_log, None
    with _naming("--access-log"):
        return error_log, _logger("grapeshot.wsgi.access", options.access_log, sys.stdout, "INFO", "%(message)s")


def _load(name: str) -> Any:
    """Import an application: ``module``, ``module:name``, ``module:name.attribute`` or ``module:factory()``."""
    module, _, attribute = name.partition(":")
    attribute = attribute or "application"
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise
        raise _UsageError(f"there is no module {module!r}") from error
    try:
        found: Any = pkgutil.resolve_name(f"{module}:{attribute.removesuffix('()')}")
    except (AttributeError, ValueError) as error:
        raise _UsageError(f"the module {module!r} has no {attribute!r}") from error
    if attribute.endswith("()"):
        found = found()
    if not callable(found):
        raise _UsageError(f"{name!r} cannot be called")
    if inspect.iscoroutinefunction(found) or inspect.iscoroutinefunction(type(found).__call__):
        raise _UsageError(f"{name!r} is async, like an ASGI application: this server needs a WSGI application")
    return found


def _addresses(options: argparse.Namespace) -> list[tuple[str, dict[str, Any]]]:
    """Return the addresses to listen on, each with its text and its arguments for ``serve``."""
    binds = [*options.bind, *(f"unix:{path}" for path in options.unix)]
    found = [(bind, _address(bind)) for bind in binds]
    if options.host is not None or options.port is not None or not binds:
        address = {"host": options.host or "127.0.0.1", "port": 8000 if options.port is None else options.port}
        found.insert(0, ("{host}:{port}".format_map(address), address))
    return found


def _address(bind: str) -> dict[str, Any]:
    kind, _, rest = bind.partition(":")
    if kind == "unix" and rest:
        return {"path": rest}
    if kind == "fd" and rest.isdecimal():
        with _naming(bind):
            return {"sock": socket.socket(fileno=int(rest))}
    host, _, port = bind.rpartition(":")
    if not port.isdecimal():
        raise _UsageError(f"expected HOST:PORT, unix:PATH or fd:N, got {bind!r}")
    return {"host": host.strip("[]"), "port": int(port)}


def _context(options: argparse.Namespace) -> Any:
    if options.certfile is None:
        return None
    import ssl

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    with _naming(f"--certfile {options.certfile}"):
        context.load_cert_chain(options.certfile, options.keyfile)
    return context


def _serve(options: argparse.Namespace) -> None:
    from grapeshot.coro import wsgi

    error_log, access_log = _logs(options)
    application: Callable[..., Any] = coro.call_blocking(_load, options.application)
    context = _context(options)
    ending = coro.event()
    servers: list[wsgi.Server] = []
    settings = {
        "limit": options.limit,
        "ssl": context,
        "backlog": options.backlog,
        "timeout": options.timeout,
        "keepalive_timeout": options.keepalive_timeout,
        "max_target_size": options.max_target_size,
        "max_headers": options.max_headers,
        "max_header_size": options.max_header_size,
        "max_head_size": options.max_head_size,
        "max_body": options.max_body or None,
        "access_log": access_log,
        "error_log": error_log,
    }
    for bind, address in _addresses(options):
        with _naming(bind):
            server = wsgi.serve(application, **address, **settings)
        servers.append(server)
        for sock in server.sockets:
            error_log.info("Listening on %s", _text(sock.getsockname(), context is not None))
    for signum in (signal.SIGTERM, signal.SIGINT):
        coro.signal_handler.register(signum, lambda _: ending.set())
    ending.wait()
    error_log.info("Ending: waiting up to %g seconds for requests in progress", options.grace)
    # A second signal ends the program at once.
    for signum in (signal.SIGTERM, signal.SIGINT):
        coro.signal_handler.unregister(signum)
        signal.signal(signum, signal.SIG_DFL)
    for server in servers:
        server.close()
    coro.in_parallel([(server.stop, (options.grace,)) for server in servers])


def _text(address: Any, is_secure: bool) -> str:
    if not isinstance(address, tuple):
        return f"unix:{os.fsdecode(address)}"
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    return f"{'https' if is_secure else 'http'}://{host}:{address[1]}"


def main() -> None:
    parser = _parser()
    options = parser.parse_args()
    try:
        if options.chdir is not None:
            with _naming("--chdir"):
                os.chdir(options.chdir)
            sys.path[0] = os.getcwd()
        coro.patch()
        _command.open_back_door_if_asked()
        coro.run(_serve, options, name="server")
    except _UsageError as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")


main()
