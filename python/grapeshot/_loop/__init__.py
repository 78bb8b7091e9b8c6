"""The Loop class, composed of the native core, asyncio's abstract class and the method modules.

A method module contains plain functions whose first parameter is the loop. Assigned to the class here, they become its
methods. Modules that few programs need are imported on first use.
"""

from __future__ import annotations

import asyncio
import os
import sys
import warnings

from grapeshot import _core

from . import connect, dns, hooks, lifecycle, limits, serve, signals, sock, tls
from .base import BaseLoop
from .lazy import LazyModule

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from grapeshot.insight import _charges, _measuring, _statistics

    from . import datagram as _datagram
    from . import pipes as _pipes
    from . import sendfile as _sendfile
    from . import subprocess as _subprocess
    from . import unix as _unix
else:
    _charges = LazyModule("grapeshot.insight._charges")
    _datagram = LazyModule("grapeshot._loop.datagram")
    _measuring = LazyModule("grapeshot.insight._measuring")
    _pipes = LazyModule("grapeshot._loop.pipes")
    _sendfile = LazyModule("grapeshot._loop.sendfile")
    _statistics = LazyModule("grapeshot.insight._statistics")
    _subprocess = LazyModule("grapeshot._loop.subprocess")
    _unix = LazyModule("grapeshot._loop.unix")


def _is_debug_mode() -> bool:
    """Whether new loops start in debug mode: with ``-X dev``, or if PYTHONASYNCIODEBUG is set (``-E`` ignores it)."""
    if sys.flags.dev_mode:
        return True
    return not sys.flags.ignore_environment and bool(os.environ.get("PYTHONASYNCIODEBUG"))


class Loop(BaseLoop):
    """An asyncio event loop with a native core. Make one with :func:`grapeshot.new_event_loop`.

    A loop belongs to the thread that runs it. Other threads may call :meth:`call_soon_threadsafe`, functions built on
    it such as :func:`asyncio.run_coroutine_threadsafe`, and a few methods such as :meth:`time` and :meth:`statistics`.
    Times are in seconds of ``time.monotonic()``.
    """

    def __init__(self) -> None:
        super().__init__()
        if _is_debug_mode():
            self.set_debug(True)
        if "GRAPESHOT_DEBUG" in os.environ and not sys.flags.ignore_environment:
            from grapeshot.insight import _debug_log

            _debug_log.begin(self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} running={self.is_running()} closed={self.is_closed()} debug={self.get_debug()}>"

    def __del__(self, _warn: Any = warnings.warn, _is_finalizing: Any = sys.is_finalizing) -> None:
        if self.is_closed():
            return
        _warn(f"unclosed event loop {self!r}", ResourceWarning, source=self)
        if self.is_running():
            return
        try:
            self.close()
        except Exception:
            if not _is_finalizing():
                raise
            # If the loop is still the current one when the interpreter exits, it is freed after the modules that
            # close() needs. Then only the native part can be closed.
            self._close()

    # running, closing, executor, asynchronous generators, errors
    run_forever = lifecycle.run_forever
    run_until_complete = lifecycle.run_until_complete
    close = lifecycle.close
    set_debug = lifecycle.set_debug
    shutdown_asyncgens = lifecycle.shutdown_asyncgens
    run_in_executor = lifecycle.run_in_executor
    set_default_executor = lifecycle.set_default_executor
    shutdown_default_executor = lifecycle.shutdown_default_executor
    get_exception_handler = lifecycle.get_exception_handler
    set_exception_handler = lifecycle.set_exception_handler
    default_exception_handler = lifecycle.default_exception_handler
    call_exception_handler = lifecycle.call_exception_handler

    # insight
    statistics = _statistics.statistics
    measure_callbacks = _measuring.measure_callbacks
    add_slow_listener = _measuring.add_slow_listener
    remove_slow_listener = _measuring.remove_slow_listener
    _on_slow = _measuring.on_slow
    set_cpu_accounting = _charges.set_cpu_accounting

    # limits
    set_limits = limits.set_limits
    get_limits = limits.get_limits

    # names and signals
    _resolve = dns.getaddrinfo
    getaddrinfo = _core._coroutine_method(dns.getaddrinfo)
    getnameinfo = dns.getnameinfo
    set_dns_cache = dns.set_dns_cache
    add_signal_handler = signals.add_signal_handler
    remove_signal_handler = signals.remove_signal_handler
    _signals_arrived = signals.signals_arrived

    # TCP
    create_connection = connect.create_connection
    connect_accepted_socket = connect.connect_accepted_socket
    create_server = serve.create_server
    start_tls = tls.start_tls

    # Unix sockets
    create_unix_connection = _unix.create_unix_connection
    create_unix_server = _unix.create_unix_server

    # pipes
    connect_read_pipe = _pipes.connect_read_pipe
    connect_write_pipe = _pipes.connect_write_pipe

    # datagrams
    # The abstract class still declares reuse_address, which asyncio's own loops have not accepted since Python 3.11.
    create_datagram_endpoint = _datagram.create_datagram_endpoint  # type: ignore[assignment]

    # subprocesses
    subprocess_exec = _subprocess.subprocess_exec
    subprocess_shell = _subprocess.subprocess_shell
    _make_subprocess_transport = _subprocess.make_transport
    _log_subprocess: Any = asyncio.base_events.BaseEventLoop._log_subprocess  # type: ignore[attr-defined]

    # plain sockets
    sock_connect = sock.sock_connect
    sock_recv = _core._coroutine_method(sock.sock_recv)
    sock_recv_into = _core._coroutine_method(sock.sock_recv_into)
    sock_recvfrom = _core._coroutine_method(sock.sock_recvfrom)
    sock_recvfrom_into = _core._coroutine_method(sock.sock_recvfrom_into)
    sock_sendall = _core._coroutine_method(sock.sock_sendall)
    sock_sendto = _core._coroutine_method(sock.sock_sendto)
    sock_accept = _core._coroutine_method(sock.sock_accept)

    # files
    sendfile = _sendfile.sendfile
    sock_sendfile = _sendfile.sock_sendfile
    _sendfile_native = _sendfile.sendfile_native
    _sock_sendfile_native = _sendfile.sock_sendfile_native


# CPython makes calls of native methods faster (it specializes them) only if they are found on the exact type.
_core._bind_methods(Loop)


def new_event_loop() -> Loop:
    """Return a new, open grapeshot event loop. It is not set as the current loop of any thread.

    Close it with :meth:`Loop.close`. A loop that was not closed causes a :class:`ResourceWarning` when it is freed.

    Raises:
        OSError: the system has no descriptor left for the poller (``EMFILE``, ``ENFILE``).
    """
    if hooks.borrow is not None and (borrowed := hooks.borrow(None)) is not None:
        # The caller is a coro that hides its loop: `borrowed` is a new loop that borrows the hidden one.
        return borrowed  # type: ignore[no-any-return]
    return Loop()
