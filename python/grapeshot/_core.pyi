"""The native core: the loop, handles, transports, TLS, child processes and coros.

Programs use it through :class:`grapeshot.Loop` and :mod:`grapeshot.coro`.

Only the thread that runs the loop may call these methods, except ``call_soon_threadsafe``, ``time``, ``is_running``,
``is_closed`` and ``Handle.cancel`` of a handle made by ``call_soon_threadsafe``. Times are seconds of
``time.monotonic()``.
"""

import asyncio
import sys
from collections.abc import Callable, Coroutine, Generator, Iterable
from contextvars import Context
from socket import socket
from ssl import SSLContext, SSLObject
from types import CodeType, FrameType, GenericAlias
from typing import Any, Generic, Literal, Protocol, Self, TypeVar, TypeVarTuple, final

from _typeshed import FileDescriptorLike, ReadableBuffer, StrOrBytesPath, WriteableBuffer
from typing_extensions import disjoint_base

__all__ = [
    "Coro",
    "DatagramTransport",
    "Handle",
    "Loop",
    "ReadPipeTransport",
    "SSLTransport",
    "StreamTransport",
    "TimerHandle",
    "WritePipeTransport",
    "_StreamReader",
    "_StreamReaderProtocol",
    "_StreamWriter",
    "_after_fork",
    "_before_fork",
    "_bind_methods",
    "_coro_act",
    "_coro_after_fork",
    "_coro_begins_thread",
    "_coro_bind_socket_methods",
    "_coro_can_wait",
    "_coro_check_function",
    "_coro_current",
    "_coro_current_or_none",
    "_coro_end_closed_wait",
    "_coro_end_sleep",
    "_coro_end_thread",
    "_coro_end_wait",
    "_coro_evict_always",
    "_coro_fail_evictions",
    "_coro_get_ident",
    "_coro_hide_loop",
    "_coro_is_hidden",
    "_coro_is_on_loop",
    "_coro_latency_hint",
    "_coro_live",
    "_coro_monotonic",
    "_coro_new",
    "_coro_note_collection",
    "_coro_now",
    "_coro_panic",
    "_coro_read_now",
    "_coro_report_always",
    "_coro_report_error_of_thread",
    "_coro_run_number",
    "_coro_running_loop",
    "_coro_send_signal",
    "_coro_set_default_latency_limit",
    "_coro_set_exception_notifier",
    "_coro_set_hooks",
    "_coro_set_latency_limit",
    "_coro_set_registry",
    "_coro_set_selfishness",
    "_coro_set_stack_slots",
    "_coro_set_switch_stamps",
    "_coro_setup",
    "_coro_show_loop",
    "_coro_shut_down",
    "_coro_sleep_absolute",
    "_coro_sleep_relative",
    "_coro_socket_type",
    "_coro_spawn",
    "_coro_spawn_hiding",
    "_coro_stack_info",
    "_coro_stop_watchdog",
    "_coro_switch_stamps",
    "_coro_unwatch",
    "_coro_wait",
    "_coro_wait_for_read",
    "_coro_wait_for_wake",
    "_coro_wait_for_write",
    "_coro_wait_info",
    "_coro_write_now",
    "_coro_yield_slice",
    "_coroutine_method",
    "_decode_msgpack",
    "_file_len",
    "_log_topics",
    "_path_status",
    "_remove_path",
    "_send_file",
    "_set_position",
    "_set_stream_types",
    "channel",
    "condition_variable",
    "fifo",
    "lock",
    "mutex",
    "semaphore",
    "thread_lock",
    "thread_queue",
    "thread_rlock",
]

_T = TypeVar("_T")
_T_co = TypeVar("_T_co", covariant=True)
_Ts = TypeVarTuple("_Ts")
_F = TypeVar("_F", bound=Callable[..., Any])

class _ConnectionOwner(Protocol):
    """What ``Loop._listen`` calls for the connections that it accepts."""

    def _attach(self, transport: StreamTransport) -> None: ...
    def _detach(self, transport: StreamTransport) -> None: ...
    def _accepting(self, transport: StreamTransport, is_waiting: bool) -> asyncio.Future[None] | None: ...

class _Listener(Protocol):
    """A listening socket that connections are accepted from."""

    def _stop(self) -> None: ...

@disjoint_base
class Handle(asyncio.Handle):
    """A callback to run once. A native type; ``isinstance(handle, asyncio.Handle)`` holds through ``__class__``."""

    def cancel(self) -> None:
        """Keep the callback from running, if it has not run yet, and drop it and its arguments. Idempotent."""

    def cancelled(self) -> bool:
        """Whether :meth:`cancel` was called."""

    def get_context(self) -> Context:
        """Return the context that the callback runs in. On every Python version (asyncio: 3.12+)."""

    def _run(self) -> None: ...

    # Slots of asyncio.Handle: they can be set and deleted. The callback and its arguments are None once cancelled.
    _callback: Any
    _args: Any
    _context: Any
    _loop: Any
    _cancelled: Any
    _source_traceback: Any
    _repr: Any

@final
class TimerHandle(Handle, asyncio.TimerHandle):  # type: ignore[misc]  # asyncio's is a base by __class__ only
    """A callback to run once at a time. Ordered by that time; ``isinstance(handle, asyncio.TimerHandle)`` holds."""

    def when(self) -> float:
        """Return the time of the callback, in seconds of the loop's clock."""

    def __hash__(self) -> int: ...
    def __lt__(self, value: asyncio.TimerHandle, /) -> bool: ...
    def __le__(self, value: asyncio.TimerHandle, /) -> bool: ...
    def __gt__(self, value: asyncio.TimerHandle, /) -> bool: ...
    def __ge__(self, value: asyncio.TimerHandle, /) -> bool: ...
    def __eq__(self, value: object, /) -> bool: ...
    _when: Any
    _scheduled: Any

@disjoint_base
class Loop:
    """The native part of an event loop. Abstract in practice: :class:`grapeshot.Loop` adds the rest.

    It calls Python code only through public methods: ``call_exception_handler(context)`` on itself, the methods of
    futures, protocols and task factories, and ``_attach``/``_detach`` on a server.
    """

    slow_callback_duration: float
    """In debug mode a callback that takes this many seconds or more is logged (default 0.1)."""

    def __new__(cls) -> Loop: ...

    # --- scheduling

    def call_soon(self, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None) -> Handle:
        """Run ``callback(*args)`` in the next iteration of the loop, in ``context`` (None: a copy of the current one).

        Raises:
            RuntimeError: the loop is closed, or in debug mode this is not the loop's thread.
            TypeError: in debug mode, ``callback`` is not a plain callable.
        """

    def call_later(
        self,
        delay: float,
        callback: Callable[[*_Ts], object],
        *args: *_Ts,
        context: Context | None = None,
    ) -> TimerHandle:
        """Run ``callback(*args)`` once ``delay`` seconds from now, never earlier; a negative delay keeps its order.

        Raises:
            TypeError: ``delay`` is None or not a number.
            RuntimeError: as :meth:`call_soon`.
        """

    def call_at(
        self,
        when: float,
        callback: Callable[[*_Ts], object],
        *args: *_Ts,
        context: Context | None = None,
    ) -> TimerHandle:
        """Run ``callback(*args)`` once at ``when``, in seconds of :meth:`time`. Raises: as :meth:`call_later`."""

    def call_soon_threadsafe(
        self, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None
    ) -> Handle:
        """Like :meth:`call_soon`, from any thread and from signal handlers; wakes the loop if it sleeps."""

    def time(self) -> float:
        """Return the loop's clock in seconds: ``time.monotonic()``."""

    # --- futures and tasks

    def create_future(self) -> asyncio.Future[Any]:
        """Return a new :class:`asyncio.Future` of this loop."""

    if sys.version_info >= (3, 13):
        def create_task(
            self,
            coro: Generator[Any, None, _T] | Coroutine[Any, Any, _T],
            *,
            name: str | None = None,
            context: Context | None = None,
            eager_start: bool | None = None,
            **kwargs: Any,
        ) -> asyncio.Task[_T]:
            """Return a task that runs ``coro``: an :class:`asyncio.Task`, or what the task factory makes.

            Raises:
                RuntimeError: the loop is closed.
                TypeError: ``coro`` is not a coroutine.
            """
    else:
        def create_task(
            self,
            coro: Generator[Any, None, _T] | Coroutine[Any, Any, _T],
            *,
            name: str | None = None,
            context: Context | None = None,
            **kwargs: Any,
        ) -> asyncio.Task[_T]:
            """Return a task that runs ``coro``: an :class:`asyncio.Task`, or what the task factory makes.

            Raises:
                RuntimeError: the loop is closed.
                TypeError: ``coro`` is not a coroutine.
            """

    def set_task_factory(self, factory: Callable[..., Any] | None) -> None:
        """Make tasks with ``factory(loop, coro, **kwargs)``; None: with :class:`asyncio.Task`.

        Raises:
            TypeError: ``factory`` is neither callable nor None.
        """

    def get_task_factory(self) -> Callable[..., Any] | None:
        """Return the task factory, None if the default is in use."""

    def _set_task_observer(self, observer: Callable[[Any], object] | None, /) -> None:
        """Let ``create_task``, and the start of a coro, call ``observer(task)``; None: call nothing."""

    def _set_step_observer(self, observer: Callable[[Any, int, int], object] | None, /) -> None:
        """Call ``observer(what, wall_ns, cpu_ns)`` after each step of a callback, coro or transport; None: nothing."""

    # --- state

    def is_running(self) -> bool:
        """Whether the loop runs in some thread."""

    def is_closed(self) -> bool:
        """Whether the loop was closed."""

    def stop(self) -> None:
        """Leave the run at the end of the current iteration; callbacks that are already scheduled for it still run."""

    def get_debug(self) -> bool:
        """Whether the debug mode is on."""

    def set_debug(self, enabled: bool) -> None:
        """Set the native flag of the debug mode."""

    # --- limits
    _limits: tuple[int | None, int | None, int | None]
    _open_connections: int

    def _set_limits(self, connections: int | None, descriptors: int | None, coros: int | None) -> None: ...
    def _check_place(self, is_connection: bool) -> None:
        """Raise LimitError if there may not be one more descriptor, or connection."""

    def _resume_paused(self) -> None: ...

    # --- descriptors: an int, or an object with fileno()

    def add_reader(self, fd: FileDescriptorLike, callback: Callable[[*_Ts], Any], *args: *_Ts) -> None:
        """Call ``callback(*args)`` whenever ``fd`` can be read; the reader before is cancelled.

        Raises:
            RuntimeError: the loop is closed, or a transport of this loop uses the descriptor.
            ValueError: not a descriptor.
            OSError: the system's poller refuses it (EPERM for a regular file).
        """

    def remove_reader(self, fd: FileDescriptorLike) -> bool:
        """Stop watching ``fd`` for reading; return whether it was watched. Raises: as :meth:`add_reader`."""

    def add_writer(self, fd: FileDescriptorLike, callback: Callable[[*_Ts], Any], *args: *_Ts) -> None:
        """Call ``callback(*args)`` whenever ``fd`` can be written. Otherwise as :meth:`add_reader`."""

    def remove_writer(self, fd: FileDescriptorLike) -> bool:
        """Stop watching ``fd`` for writing; return whether it was watched. Raises: as :meth:`add_reader`."""

    # The same without the check for a transport, and with the handle.
    def _add_reader(self, fd: FileDescriptorLike, callback: Callable[[*_Ts], Any], *args: *_Ts) -> Handle: ...
    def _remove_reader(self, fd: FileDescriptorLike) -> bool: ...
    def _add_writer(self, fd: FileDescriptorLike, callback: Callable[[*_Ts], Any], *args: *_Ts) -> Handle: ...
    def _remove_writer(self, fd: FileDescriptorLike) -> bool: ...
    def _ensure_fd_no_transport(self, fd: FileDescriptorLike) -> None:
        """Raise RuntimeError if an open transport of this loop uses ``fd``, ValueError if it is not a descriptor."""

    # --- plain sockets: non-blocking; the loop does not own them
    # Each call returns a coroutine of a native type. Its first step makes the system call, and it waits only if that
    # would block. All of them raise
    #   OSError: the system call failed
    #   TypeError: an argument has the wrong type, or ``sock`` is an ``ssl.SSLSocket``
    #   ValueError: in debug mode, ``sock`` is not non-blocking
    #   RuntimeError: it has to wait, and a transport of this loop uses the descriptor, or the loop is closed

    def sock_recv(self, sock: socket, nbytes: int) -> Coroutine[Any, Any, bytes]:
        """Receive up to ``nbytes`` bytes; ``b""`` means that the peer sends no more."""

    def sock_recv_into(self, sock: socket, buf: WriteableBuffer) -> Coroutine[Any, Any, int]:
        """Receive into ``buf``, at most its length; return the number of bytes, 0 at the end of the stream."""

    def sock_recvfrom(self, sock: socket, bufsize: int) -> Coroutine[Any, Any, tuple[bytes, Any]]:
        """Receive a datagram, cut off at ``bufsize`` bytes; return ``(data, address)``, the address None if unknown."""

    def sock_recvfrom_into(
        self, sock: socket, buf: WriteableBuffer, nbytes: int = 0
    ) -> Coroutine[Any, Any, tuple[int, Any]]:
        """Receive a datagram into ``buf``, at most ``nbytes`` bytes (0: its length); return ``(length, address)``."""

    def sock_sendall(self, sock: socket, data: ReadableBuffer) -> Coroutine[Any, Any, None]:
        """Send all of ``data`` on a connected socket; after an error or cancellation nobody knows how much was sent."""

    def sock_sendto(self, sock: socket, data: ReadableBuffer, address: Any) -> Coroutine[Any, Any, int]:
        """Send one datagram to ``address``; return its length."""

    def sock_accept(self, sock: socket) -> Coroutine[Any, Any, tuple[socket, Any]]:
        """Accept a connection on the listening ``sock``; return ``(connection, address)``, the former non-blocking."""

    def _wait_writable(self, sock: socket) -> Coroutine[Any, Any, None]:
        """Wait until ``sock`` takes data, is connected, or has failed; events before the call do not count."""

    # --- names

    def getaddrinfo(
        self,
        host: bytes | str | None,
        port: bytes | str | int | None,
        *,
        family: int = 0,
        type: int = 0,  # noqa: A002
        proto: int = 0,
        flags: int = 0,
    ) -> Coroutine[Any, Any, list[Any]]:
        """Return what :func:`socket.getaddrinfo` returns, without blocking the loop.

        Literals with a numeric port are answered natively; anything else, and everything in debug mode or with a
        replaced ``socket.getaddrinfo``, goes to ``_resolve``, which takes the same arguments.

        Raises:
            socket.gaierror: the name does not resolve.
            RuntimeError: the default executor was shut down, or the loop is closed.
        """

    # --- for the Python half of the loop

    @property
    def _thread_id(self) -> int | None:
        """The identifier of the thread that runs the loop, None while it does not run."""

    def _attributes_changed(self) -> None:
        """Called when ``time`` or ``call_at`` was set on the loop, or deleted: timers follow a program's own clock."""

    def _check_closed(self) -> None:
        """Raise RuntimeError if the loop is closed."""

    def _check_running(self) -> None:
        """Raise RuntimeError if this loop runs, or another one in this thread."""

    def _run(self) -> None:
        """Run iterations until :meth:`stop`; KeyboardInterrupt and SystemExit of a callback leave it."""

    def _statistics(self) -> dict[str, Any]:
        """Return what the loop has counted, and its times in seconds, by name. Any thread may call it."""

    def _set_measured(self, is_on: bool, slow_ns: int | None) -> None:
        """Measure how long steps take and wait, and call ``_on_slow`` after those that take at least ``slow_ns``."""

    def _running_since_ns(self) -> int | None:
        """Return when the measured step began that runs now, in nanoseconds, or None. Any thread may call it."""

    def _signal_fd(self) -> int:
        """Return the descriptor for :func:`signal.set_wakeup_fd`: the loop reads it and calls ``_signals_arrived``.

        It is made with the first call and stays the loop's, which closes it in :meth:`_close`.

        Raises:
            RuntimeError: the loop is closed.
            OSError: no descriptor is left.
        """

    def _close(self) -> None:
        """Drop what is scheduled and watched and close the poller and the waker. Idempotent.

        Raises:
            RuntimeError: the loop is running.
        """

    def _forget_parent(self) -> None:
        """In the child of a fork: drop what is scheduled and watched, without running any code; watch anew."""

    def _watch_child(self, pid: int, callback: Callable[[int | None], object]) -> None:
        """Call ``callback(returncode)`` in the current context, straight from the poller, when child ``pid`` has ended.

        The status is fetched in the same step; None: somebody else has fetched it. SIGCHLD is not used.

        Raises:
            ProcessLookupError: the child has ended, and somebody else has fetched its status already.
            RuntimeError: the loop is closed.
            OSError: no descriptor is left.
        """

    def _stream(
        self,
        sock: socket,
        protocol: asyncio.BaseProtocol,
        waiter: asyncio.Future[None] | None = None,
        server: _ConnectionOwner | None = None,
    ) -> StreamTransport:
        """Take over the connected, non-blocking ``sock``; ``connection_made``, then ``waiter``, come from the loop."""

    def _listen(
        self,
        sock: socket,
        protocol_factory: Callable[[], asyncio.BaseProtocol],
        server: _ConnectionOwner,
        backlog: int,
    ) -> _Listener:
        """Accept on the listening ``sock``, at most ``backlog`` connections per iteration, each with its own protocol.

        ``_stop()`` of the result ends that and leaves ``sock`` open.
        """

    def _read_pipe(
        self,
        pipe: Any,
        protocol: asyncio.BaseProtocol,
        waiter: asyncio.Future[None] | None = None,
        extra: dict[str, Any] | None = None,
    ) -> ReadPipeTransport:
        """Take over ``pipe`` (``fileno()``, ``close()``); ``connection_made``, then ``waiter``, come from the loop.

        Raises:
            ValueError: neither a pipe, nor a socket, nor a character device; ``pipe`` stays the caller's.
            OSError: its descriptor is closed.
        """

    def _write_pipe(
        self,
        pipe: Any,
        protocol: asyncio.BaseProtocol,
        waiter: asyncio.Future[None] | None = None,
        extra: dict[str, Any] | None = None,
    ) -> WritePipeTransport:
        """As :meth:`_read_pipe`, for the end that writes."""

    def _datagram(
        self,
        sock: socket,
        protocol: asyncio.BaseProtocol,
        remote_address: Any = None,
        waiter: asyncio.Future[None] | None = None,
    ) -> DatagramTransport:
        """Take over the non-blocking datagram ``sock``, which sends to ``remote_address`` only (None: to any).

        ``connection_made``, then ``waiter``, come from the loop.
        """

    def _server_transports(self, server: _ConnectionOwner) -> list[StreamTransport]:
        """Return the open transports of the connections accepted for ``server``."""

    def _tls(
        self,
        protocol: asyncio.BaseProtocol,
        sslcontext: SSLContext,
        waiter: asyncio.Future[SSLTransport | None] | None,
        server_side: bool,
        server_hostname: str | None,
        handshake_timeout: float,
        shutdown_timeout: float,
        call_connection_made: bool = True,
        accepted: bool = False,
        below: asyncio.BaseTransport | None = None,
    ) -> SSLTransport:
        """Make a TLS transport for ``protocol``, to be the protocol of the transport below it.

        ``waiter`` gets its result or exception when the handshake ends. Nobody waits for an ``accepted`` one; debug
        mode reports its failure. Limits are in seconds. The callbacks run in a copy of the context of ``below``, if
        that is one of our transports, otherwise of the current one.

        Raises:
            ValueError, ssl.SSLError: what ``sslcontext.wrap_bio()`` raises.
        """

@final
class StreamTransport(asyncio.Transport):
    """A connection over a stream socket. Made by the loop only; it owns the socket and closes it.

    A write outside of the protocol's callbacks is sent at once; writes inside a callback go out together after it.
    """

    _start_tls_compatible: bool

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return ``socket`` (an asyncio ``TransportSocket``), ``sockname`` or ``peername``; else ``default``."""

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Switch to ``protocol`` at once: bytes not yet delivered go to it."""

    def get_protocol(self) -> asyncio.BaseProtocol:
        """Return the protocol in use."""

    def is_closing(self) -> bool:
        """Whether the transport is closed or about to be."""

    def is_reading(self) -> bool:
        """Whether received data is delivered."""

    def pause_reading(self) -> None:
        """Deliver no data until :meth:`resume_reading`. Idempotent."""

    def resume_reading(self) -> None:
        """Deliver data again. Idempotent."""

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Call ``pause_writing`` above ``high`` waiting bytes, ``resume_writing`` at ``low`` (64 KiB; a quarter of it).

        Raises:
            ValueError: not ``high >= low >= 0``.
        """

    def get_write_buffer_limits(self) -> tuple[int, int]:
        """Return ``(low, high)`` in bytes."""

    def get_write_buffer_size(self) -> int:
        """Return the number of bytes that wait to be sent."""

    def write(self, data: ReadableBuffer) -> None:
        """Send ``data`` after all earlier data; the part that the system does not take now is copied.

        Raises:
            TypeError: ``data`` is not bytes-like.
            RuntimeError: after :meth:`write_eof`.
        """

    def writelines(self, list_of_data: Iterable[ReadableBuffer]) -> None:
        """Send several buffers as one. Raises: as :meth:`write`."""

    def write_eof(self) -> None:
        """Send all earlier data, then end the sending side; reading goes on. Idempotent."""

    def can_write_eof(self) -> bool:
        """Return True."""

    def close(self) -> None:
        """Stop reading, send what was written, then close and call ``connection_lost(None)``. Idempotent."""

    def abort(self) -> None:
        """Close at once; unsent data is lost. ``connection_lost(None)`` follows from the loop. Idempotent."""

    def _force_close(self, exc: BaseException | None) -> None:
        """:meth:`abort` with the exception for ``connection_lost``: what TLS above it calls."""

    # Attributes of asyncio's own transports that programs read.
    @property
    def _paused(self) -> bool: ...

    # for Loop.sendfile
    _sendfile_compatible: Any
    @property
    def _protocol_paused(self) -> bool:
        """Whether the protocol was told to pause writing, and not yet to resume."""

    def _start_sendfile(self, future: asyncio.Future[None], /) -> None:
        """Refuse writes until :meth:`_end_sendfile`; ``future`` is done once all earlier data is sent.

        Raises:
            RuntimeError: another sendfile is in progress.
            ConnectionError: the connection is over; ``future`` gets it when that happens later.
        """

    def _wait_writable(self, future: asyncio.Future[None], /) -> None:
        """``future`` is done once the socket takes data. Raises: ConnectionError, as :meth:`_start_sendfile`."""

    def _end_sendfile(self) -> None:
        """Take writes again. Idempotent."""

@final
class ReadPipeTransport(asyncio.ReadTransport):
    """The reading end of a pipe, FIFO, terminal or socket. Made by the loop only; it owns the pipe and closes it."""

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Switch to ``protocol`` at once."""

    def get_protocol(self) -> asyncio.BaseProtocol:
        """Return the protocol in use."""

    def is_closing(self) -> bool:
        """Whether the transport is closed or about to be."""

    def is_reading(self) -> bool:
        """Whether data is read and delivered."""

    def pause_reading(self) -> None:
        """Read nothing until :meth:`resume_reading`. Idempotent."""

    def resume_reading(self) -> None:
        """Read again. Idempotent."""

    def close(self) -> None:
        """Stop reading; ``connection_lost(None)`` follows from the loop, then the pipe is closed. Idempotent."""

@final
class WritePipeTransport(asyncio.WriteTransport):
    """The writing end of a pipe, FIFO, terminal or socket. Made by the loop only; it owns the pipe and closes it."""

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Switch to ``protocol`` at once."""

    def get_protocol(self) -> asyncio.BaseProtocol:
        """Return the protocol in use."""

    def is_closing(self) -> bool:
        """Whether the transport is closed or about to be."""

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Call ``pause_writing`` above ``high`` waiting bytes, ``resume_writing`` at ``low`` (64 KiB; a quarter of it).

        Raises:
            ValueError: not ``high >= low >= 0``.
        """

    def get_write_buffer_limits(self) -> tuple[int, int]:
        """Return ``(low, high)`` in bytes."""

    def get_write_buffer_size(self) -> int:
        """Return the number of bytes that wait to be written."""

    def write(self, data: ReadableBuffer) -> None:
        """Write ``data`` after all earlier data; ignored if the pipe is closing, after some writes with a warning.

        Raises:
            TypeError: ``data`` is not bytes-like.
        """

    def writelines(self, list_of_data: Iterable[ReadableBuffer]) -> None:
        """Write several buffers as one. Raises: as :meth:`write`."""

    def write_eof(self) -> None:
        """The same as :meth:`close`: a pipe goes one way."""

    def can_write_eof(self) -> bool:
        """Return True."""

    def close(self) -> None:
        """Write what is buffered, call ``connection_lost(None)`` from the loop, and close the pipe. Idempotent."""

    def abort(self) -> None:
        """Close at once; unwritten data is lost. ``connection_lost(None)`` follows from the loop. Idempotent."""

@final
class SSLTransport(asyncio.Transport, asyncio.Protocol):
    """TLS above any stream transport. Made by the loop only; it is the protocol of the transport below it as well.

    ``connection_made`` comes when the handshake is complete. Writes inside a callback are encrypted together after it.
    """

    _start_tls_compatible: bool

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return ``sslcontext``, ``ssl_object``, ``peercert``, ``cipher`` or ``compression``; else as the one below.

        All but the first are there once the handshake is complete, and stay after the connection's end.
        """

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Switch to ``protocol`` at once: bytes not yet delivered go to it."""

    def get_protocol(self) -> asyncio.BaseProtocol:
        """Return the application's protocol."""

    def is_closing(self) -> bool:
        """Whether the transport is closed or about to be."""

    def is_reading(self) -> bool:
        """Whether received data is delivered."""

    def pause_reading(self) -> None:
        """Deliver no data until :meth:`resume_reading`. Idempotent."""

    def resume_reading(self) -> None:
        """Deliver data again; the loop delivers what has arrived meanwhile. Idempotent."""

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Call ``pause_writing`` above ``high`` waiting bytes, ``resume_writing`` at ``low`` (512 KiB; a quarter).

        Raises:
            ValueError: not ``high >= low >= 0``.
        """

    def get_write_buffer_limits(self) -> tuple[int, int]:
        """Return ``(low, high)`` in bytes."""

    def get_write_buffer_size(self) -> int:
        """Return the number of bytes that the transport below has not taken yet."""

    def set_read_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """While reading is paused, receive up to ``high`` bytes (256 KiB; on again at ``low``, a quarter of it).

        Raises:
            ValueError: not ``high >= low >= 0``.
        """

    def get_read_buffer_limits(self) -> tuple[int, int]:
        """Return ``(low, high)`` in bytes."""

    def get_read_buffer_size(self) -> int:
        """Return the number of received bytes that are not decrypted yet."""

    def write(self, data: ReadableBuffer) -> None:
        """Encrypt and send ``data`` after all earlier data; the part that is not taken now is kept.

        Raises:
            TypeError: ``data`` is not bytes-like.
        """

    def writelines(self, list_of_data: Iterable[ReadableBuffer]) -> None:
        """Encrypt and send several buffers together. Raises: as :meth:`write`."""

    def write_eof(self) -> None:
        """Raise NotImplementedError: TLS connections end in both directions at once, as in asyncio."""

    def can_write_eof(self) -> bool:
        """Return False."""

    def close(self) -> None:
        """Send what was written and ``close_notify``, await the peer's, then close. Idempotent.

        ``connection_lost(None)`` follows; TimeoutError for it if the peer does not answer in time.
        """

    def abort(self) -> None:
        """Close at once; unsent data is lost. ``connection_lost(None)`` follows from the loop. Idempotent."""

    # The protocol of the transport below.
    def connection_made(self, transport: asyncio.BaseTransport) -> None: ...
    def connection_lost(self, exc: Exception | None) -> None: ...
    def data_received(self, data: bytes) -> None: ...
    def eof_received(self) -> bool: ...
    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...
    def _feed(self, data: bytes) -> None:
        """Take ciphertext that somebody else has received before ``connection_made``."""

    def _on_timeout(self) -> None: ...
    def _force_close(self, exc: BaseException | None) -> None: ...

    # Attributes of asyncio's own TLS transport that programs read.
    @property
    def _ssl_protocol(self) -> SSLTransport: ...
    @property
    def _transport(self) -> asyncio.BaseTransport | None: ...
    @property
    def _app_transport(self) -> SSLTransport: ...
    @property
    def _app_protocol(self) -> asyncio.BaseProtocol | None: ...
    @property
    def _sslcontext(self) -> SSLContext: ...
    @property
    def _sslobj(self) -> SSLObject: ...
    @property
    def _app_reading_paused(self) -> bool: ...
    @property
    def _protocol_paused(self) -> bool: ...

@final
class DatagramTransport(asyncio.Transport, asyncio.DatagramTransport):
    """An endpoint over a datagram socket. Made by the loop only; it owns the socket and closes it.

    Errors of the socket go to ``error_received``, and the transport goes on. An exception in the protocol is
    reported to the loop's exception handler and changes nothing else.
    """

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Switch to ``protocol`` at once."""

    def get_protocol(self) -> asyncio.BaseProtocol:
        """Return the protocol in use, None once ``connection_lost`` has run."""

    def is_closing(self) -> bool:
        """Whether the transport is closed or about to be."""

    def is_reading(self) -> bool:
        """Whether received datagrams are delivered."""

    def pause_reading(self) -> None:
        """Deliver no datagram until :meth:`resume_reading`. Idempotent."""

    def resume_reading(self) -> None:
        """Deliver datagrams again. Idempotent."""

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Call ``pause_writing`` above ``high`` waiting bytes, ``resume_writing`` at ``low`` (64 KiB; a quarter of it).

        Raises:
            ValueError: not ``high >= low >= 0``.
        """

    def get_write_buffer_limits(self) -> tuple[int, int]:
        """Return ``(low, high)`` in bytes."""

    def get_write_buffer_size(self) -> int:
        """Return the number of bytes that wait to be sent, from Python 3.13 on with 8 for each datagram."""

    def sendto(self, data: ReadableBuffer, addr: Any = None) -> None:
        """Send ``data`` as one datagram to ``addr`` (None: to the remote address); what has to wait is copied.

        Up to Python 3.12 empty ``data`` is ignored. A refusal by the system goes to ``error_received``.

        Raises:
            TypeError: ``data`` is not bytes-like.
            ValueError: the endpoint has a remote address, and ``addr`` is another one.
        """

    def close(self) -> None:
        """Stop receiving, send what waits, then close and call ``connection_lost(None)``. Idempotent."""

    def abort(self) -> None:
        """Close at once; unsent datagrams are lost. ``connection_lost(None)`` follows from the loop. Idempotent."""

@disjoint_base
class _StreamReader:
    """The native part of :class:`grapeshot.streams.StreamReader`: what is held, reading it, and who waits for it."""

    _buffer: bytearray
    _eof: bool
    _exception: BaseException | None
    _limit: int
    _loop: asyncio.AbstractEventLoop
    _paused: bool
    _transport: asyncio.BaseTransport | None
    _waiter: Any

    def feed_data(self, data: Any) -> None:
        """Hold data until it is read."""

    def read(self, n: int = -1) -> Coroutine[Any, Any, bytes]:
        """Return up to ``n`` bytes; all until the end if ``n`` is negative."""

    def readexactly(self, n: int) -> Coroutine[Any, Any, bytes]:
        """Return exactly ``n`` bytes."""

    def readuntil(self, separator: Any = b"\n") -> Coroutine[Any, Any, bytes]:
        """Return all bytes up to the separator, with it."""

    def readline(self) -> Coroutine[Any, Any, bytes]:
        """Return one line."""

    def __aiter__(self) -> Self: ...
    def __anext__(self) -> Coroutine[Any, Any, bytes]: ...

@disjoint_base
class _StreamWriter:
    """The native part of :class:`grapeshot.streams.StreamWriter`."""

    _loop: asyncio.AbstractEventLoop
    _protocol: Any
    _reader: Any
    _transport: Any

    def write(self, data: ReadableBuffer) -> None:
        """Write to the transport."""

    def drain(self) -> Coroutine[Any, Any, None]:
        """Wait until the transport takes data."""

@disjoint_base
class _StreamReaderProtocol:
    """The native part of :class:`grapeshot.streams.StreamReaderProtocol`: it feeds the reader."""

    _connection_lost: bool
    _loop: asyncio.AbstractEventLoop
    _paused: bool
    _stream_reader_wr: Any

    def data_received(self, data: bytes) -> None:
        """Feed the reader."""

def _set_stream_types(
    reader: type[asyncio.StreamReader],
    writer: type[asyncio.StreamWriter],
    protocol: type[asyncio.StreamReaderProtocol],
) -> None:
    """Tell native code the classes whose objects it may use without calling their methods."""

def _coroutine_method(stub: _F, owner: type | None = None) -> _F:
    """Return the native method of ``owner`` (None: the loop) that has the stub's name, as a coroutine function.

    It has the stub's signature.

    Raises:
        AttributeError: there is no such method.
        TypeError: it is not native.
    """

def _file_len(fd: int) -> int:
    """Return the length of a file in bytes; 0 for most descriptors that are not of a regular file."""

def _set_position(fd: int, offset: int) -> None:
    """Set the position of the next read from a file, in bytes from its beginning."""

def _send_file(socket_fd: int, file_fd: int, offset: int, count: int) -> int:
    """:func:`os.sendfile`: send up to ``count`` bytes and return how many went; 0 at the end of the file.

    Raises:
        BlockingIOError: the socket takes nothing now.
        OSError: the system cannot combine the two, or the connection failed.
    """

def _path_status(path: StrOrBytesPath) -> tuple[bool, int]:
    """Return whether a Unix socket lies at ``path``, and its inode number. Raises: as :func:`os.stat`."""

def _remove_path(path: StrOrBytesPath) -> None:
    """Remove the file at ``path``. Raises: as :func:`os.remove`."""

def _before_fork() -> None:
    """Send what the step that the thread's loop is running has written, before the process is forked."""

def _after_fork() -> None:
    """In the child of a fork: writes of the step that goes on there leave at once."""

def _log_topics(io: bool, tls: bool) -> None:
    """Log the events of connections, and of TLS, or do not."""

def _decode_msgpack(decode: Callable[[bytes], Any], packet: bytes) -> Any:
    """Call a decoder of msgpack that runs no Python code, without garbage collections meanwhile.

    Raises:
        ValueError: lists that are keys have more than 3,000 values, or values are nested too deep. It was not called.
    """

def _bind_methods(kind: type[Loop]) -> None:
    """Put the native methods on ``kind`` itself, except those that it defines; TypeError unless it is a Loop."""

@disjoint_base
class Coro(Generic[_T_co]):
    """The native part of :class:`grapeshot.coro.Coro`: a function with a stack of its own, run by the loop."""

    def __class_getitem__(cls, item: Any, /) -> GenericAlias: ...
    @property
    def id(self) -> int:
        """A number that no other coro of the process has."""
    @property
    def name(self) -> str:
        """The name, ``coro <id>`` unless it was given one."""
    @property
    def _status(self) -> str:
        """One of new, ready, running, waiting, done."""
    @property
    def _loop(self) -> Any:
        """The loop that runs it."""
    @property
    def _context(self) -> Context | None:
        """The context it runs in, None once it has ended."""
    @property
    def _function(self) -> Callable[..., object] | None:
        """The function that it runs, None once it has ended."""
    @property
    def _must_cancel(self) -> bool:
        """Whether a ``CancelledError`` of ``cancel()`` is to be raised where it waits next."""
    @property
    def _exception(self) -> BaseException | None:
        """What the function has raised, or None. Reading this does not mark the exception as retrieved."""
    def start(self) -> None:
        """Schedule a new coro. ScheduleError if it was started before."""
    def done(self) -> bool:
        """Whether it has returned or raised."""
    def result(self) -> _T_co:
        """Return the result, or raise the exception. ``asyncio.InvalidStateError`` before the end.

        A coro that was shut down, interrupted or cancelled has none. This raises CoroCancelled then where a coro asks,
        so that an ``except Exception`` sees it, and elsewhere the CancelledError that asyncio expects of a task.
        """
    def exception(self) -> BaseException | None:
        """Return the exception, or None. InvalidStateError before the end; raises as ``result`` if it was cancelled."""
    def add_done_callback(self, fn: Callable[[Any], object], context: Context | None = None) -> None:
        """Call ``fn(self)`` from the loop, in ``context`` or a copy of the caller's, once the coro has ended."""
    def remove_done_callback(self, fn: Callable[[Any], object], /) -> int:
        """Remove the callback; return how many times it was there."""
    def __await__(self) -> Generator[Any, None, _T_co]: ...
    def __iter__(self) -> Generator[Any, None, _T_co]: ...

    # Whether a task has begun to await it, the future that await_() waits for, and the cancel() calls that uncancel()
    # has not taken back.
    _asyncio_future_blocking: bool
    @property
    def _hides_loop(self) -> bool:
        """Whether asyncio's functions see no running loop in it."""
    @property
    def _is_daemon(self) -> bool:
        """Whether it stands for a daemon thread: nobody waits for its end."""
    # Whether it is such a coro that did not end when it was told to. It is not told again.
    _is_given_up: bool
    _awaited: Any
    _cancel_count: int

    def set_name(self, name: object, /) -> None:
        """Give it the name ``str(name)``."""
    def _make_daemon(self) -> None:
        """Let it stand for a daemon thread; ScheduleError in another thread."""
    def set_max_selfish_acts(self, count: int | None, /) -> None:
        """Let it yield after ``count`` I/O operations that were ready at once; None: after as many as the others."""
    def stack_info(self) -> dict[str, Any]:
        """Return where its stack is.

        ``kind`` (``shared`` or ``own``), ``where`` (``in place``, ``evicted``, or ``none`` before its first run and
        after its end), ``slot`` (which of the shared stacks it uses, None if it has one for itself), ``bytes_used`` of
        C stack, and ``frame_bytes``, the memory that its Python frames have. ScheduleError in another thread.
        """
    def get_frame(self) -> FrameType | None:
        """Return the innermost frame of a suspended coro, None if it runs, has not begun or has ended."""
    def _check_thread(self) -> None:
        """ScheduleError in another thread than the coro's."""
    def _wake(self, value: Any = None) -> None:
        """Let a waiting coro go on; its wait returns ``value``. ScheduleError if it does not wait."""
    def _throw(self, exception: BaseException, /) -> None:
        """Raise ``exception`` where it waits; at once if it runs, behind others that are pending."""
    def _throw_later(self, exception: BaseException | None, /) -> None:
        """The same, but a running coro gets it with its next wait. None takes a pending CancelledError back."""
    def _take_back(self, exception: BaseException, /) -> bool:
        """Do not raise ``exception`` if it is still pending; whether it was."""
    def _outcome(self) -> _T_co:
        """Return what the function has returned, or raise what it has raised; None if it was cancelled."""
    def _task_outcome(self) -> _T_co:
        """The same; one that was cancelled gives its own exception."""
    def _failure(self) -> BaseException | None:
        """Return what the function has raised, or None."""
    def _failure_unseen(self) -> BaseException | None:
        """The same, None too if somebody has looked before."""

def _coro_set_registry(
    registry: set[Any] | None, register: Callable[[Any], object], unregister: Callable[[Any], object], /
) -> None:
    """Take the set of weak references in which asyncio finds tasks that are not its own.

    With None the functions are called instead.
    """

@disjoint_base
class semaphore:  # noqa: N801
    """``value`` permits. A coro that waits for many is not overtaken by a later one that wants few."""

    def __init__(self, value: int = 1) -> None: ...
    @property
    def avail(self) -> int:
        """The number of free permits."""
    def __int__(self) -> int: ...
    def acquire(self, value: int = 1, block: bool = True, timeout: float | None = None) -> bool:
        """Wait in order until ``value`` permits are free; take them and return True.

        Returns False if they are not free within ``timeout`` seconds, or, without ``block``, at once.

        Raises:
            YieldFromMain: it would have to wait, and this is no coro.
            ValueError: ``value`` is below 1.
            ScheduleError: it belongs to another thread.
        """
    def try_acquire(self, value: int = 1) -> bool:
        """As :meth:`acquire`, but return False instead of waiting."""
    def release(self, value: int = 1) -> None:
        """Give ``value`` permits to waiting coros, or put them back. Callbacks and tasks may call this, too."""
    def __enter__(self) -> Self: ...
    def __exit__(self, *args: object) -> None: ...

@disjoint_base
class lock:  # noqa: N801
    """A lock that one coro holds, and releases."""

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        """Wait in order until the lock is free; take it and return True.

        Returns False if that takes more than ``timeout`` seconds, or, without ``block``, if it is not free.

        Raises:
            LockError: this coro holds it already, and would wait for itself.
            YieldFromMain: not in a coro.
            ScheduleError: it belongs to another thread.
        """
    def try_acquire(self) -> bool:
        """As :meth:`acquire`, but return False instead of waiting."""
    def release(self) -> None:
        """Give the lock to the coro that has waited longest. LockError unless this coro holds it."""
    def locked(self) -> bool:
        """Whether a coro holds it."""
    def has_lock(self, coro: Coro[Any] | None = None) -> bool:
        """Whether ``coro`` holds it, by default the one that runs."""
    def __enter__(self) -> Self: ...
    def __exit__(self, *args: object) -> None: ...

@disjoint_base
class mutex:  # noqa: N801
    """A lock that its holder may take again; it is free after as many releases."""

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        """Wait until the lock is free or this coro's own; hold it once more. Returns and raises: as a lock's."""
    def lock(self) -> bool:
        """As :meth:`acquire`; return whether it had to wait."""
    def try_acquire(self) -> bool:
        """As :meth:`acquire`, without waiting; return whether the coro holds it now."""
    def release(self) -> None:
        """Undo one ``acquire``. LockError unless this coro holds it."""
    def unlock(self) -> bool:
        """As :meth:`release`; return whether another coro has got the mutex."""
    def locked(self) -> bool:
        """Whether a coro holds it."""
    def has_lock(self, coro: Coro[Any] | None = None) -> bool:
        """Whether ``coro`` holds it, by default the one that runs."""
    def __enter__(self) -> Self: ...
    def __exit__(self, *args: object) -> None: ...

@final
class thread_lock:  # noqa: N801
    """``_thread.lock`` for coros and real threads. Anybody may release it."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take the lock; return whether that was possible in time.

        A coro waits while others run, a real thread blocks. A lock that is free is taken at once, everywhere.

        Raises:
            ValueError, OverflowError: the timeout is none.
            RuntimeError: a coro cannot wait here (in what the collector calls, in a greenlet), and no other real thread
                holds the lock.
        """
    def acquire_lock(self, blocking: bool = True, timeout: float = -1) -> bool:
        """The same."""
    def release(self) -> None:
        """Give the lock to the first that waits for it. RuntimeError if it is free."""
    def release_lock(self) -> None:
        """The same."""
    def locked(self) -> bool:
        """Whether somebody holds it."""
    def locked_lock(self) -> bool:
        """The same."""
    def _at_fork_reinit(self) -> None: ...
    def __enter__(self, blocking: bool = True, timeout: float = -1) -> bool: ...
    def __exit__(self, *args: object) -> None: ...

@disjoint_base
class thread_rlock:  # noqa: N801
    """``_thread.RLock`` for coros and real threads: its holder may take it again."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take the lock once more; return whether that was possible in time. Raises: as that of a lock."""
    def release(self) -> None:
        """Undo one ``acquire``. RuntimeError unless the coro, or the thread, holds it."""
    if sys.version_info >= (3, 14):
        def locked(self) -> bool:
            """Whether somebody holds it."""

    def _is_owned(self) -> bool: ...
    def _recursion_count(self) -> int: ...
    def _release_save(self) -> tuple[int, int]: ...
    def _acquire_restore(self, state: tuple[int, int], /) -> None: ...
    def _at_fork_reinit(self) -> None: ...
    def __enter__(self, blocking: bool = True, timeout: float = -1) -> bool: ...
    def __exit__(self, *args: object) -> None: ...

@disjoint_base
class thread_queue(Generic[_T]):  # noqa: N801
    """``_queue.SimpleQueue`` for coros and real threads."""

    def put(self, item: _T, block: bool = True, timeout: float | None = None) -> None:
        """Append an item. Never waits."""
    def put_nowait(self, item: _T) -> None:
        """The same."""
    def get(self, block: bool = True, timeout: float | None = None) -> _T:
        """Remove the oldest item and return it.

        Raises:
            queue.Empty: there was none in time.
            RuntimeError: there is none, and a coro cannot wait here.
        """
    def get_nowait(self) -> _T:
        """The same without waiting."""
    def qsize(self) -> int:
        """The number of items that nobody was woken for."""
    def empty(self) -> bool:
        """Whether there is none."""
    def __class_getitem__(cls, item: Any, /) -> GenericAlias: ...

@disjoint_base
class condition_variable:  # noqa: N801
    """Coros wait until they are woken; nothing is remembered for those that come later. ``len`` of it wait."""

    def __len__(self) -> int: ...
    def wait(self, timeout: float | None = None, block: bool = True) -> Any:
        """Wait; return what ``wake_one``, ``wake_n`` or ``wake_all`` was given.

        TimeoutError if nobody wakes it within ``timeout`` seconds, and, without ``block``, at once.
        """
    def wake_one(self, value: Any = None) -> bool:
        """Wake the coro that has waited longest; return False if none waits.

        If it is interrupted before it runs, the next one is woken in its place.
        """
    def wake_n(self, count: int, value: Any = None) -> int:
        """Wake up to ``count`` coros, each as ``wake_one``; return how many there were."""
    def wake_all(self, value: Any = None) -> int:
        """Wake all that wait now; return how many there were."""
    def raise_all(self, exc: BaseException | type[BaseException], /) -> int:
        """Raise ``exc``, or one exception each of the class, in all that wait now; return how many there were."""
    def _use(self) -> None:
        """ScheduleError in another thread than its own."""
    def _wait_as(self, kind: int, block: bool, timeout: float | None, /) -> bool:
        """Wait as one of that kind; return whether it was woken in time."""
    def _first(self) -> int | None:
        """Return the kind of the coro that has waited longest."""
    def _wake_first(self) -> Any:
        """Wake it and return it, or None. If it is interrupted before it runs, nobody else is woken."""

@disjoint_base
class fifo(Generic[_T]):  # noqa: N801
    """A queue of up to ``maxsize`` items, None or 0: of any number. ``len`` items can be popped without waiting."""

    def __class_getitem__(cls, item: Any, /) -> GenericAlias: ...
    def __init__(self, maxsize: int | None = 0) -> None: ...
    def __len__(self) -> int: ...
    @property
    def maxsize(self) -> int:
        """How many items it takes, 0 for any number."""
    def push(self, item: _T, /, block: bool = True, timeout: float | None = None) -> None:
        """Append ``item``, for the coro that has waited longest. Callbacks and tasks of the loop may call this, too.

        Waits in order for space if there is a limit. If it raises, the item is not in the queue.

        Raises:
            Full: there was no space within ``timeout`` seconds, or, without ``block``, there is none.
            YieldFromMain: it would have to wait, and this is no coro.
            ScheduleError: it belongs to another thread.
        """
    def pop(self, block: bool = True, timeout: float | None = None) -> _T:
        """Return the oldest item; wait in order for one.

        Raises:
            Empty: none has come within ``timeout`` seconds, or, without ``block``, there is none.
            YieldFromMain, ScheduleError: as ``push``.
        """
    def pop_all(self, block: bool = True, timeout: float | None = None) -> list[_T]:
        """Return all items, waiting for one; an empty list where ``pop`` raises Empty. Raises: as ``pop``."""

@disjoint_base
class channel(Generic[_T]):  # noqa: N801
    """A rendezvous: ``send`` and ``receive`` wait for each other (Stackless Python's channels).

    A coro that finds a partner waiting does not wait: it goes on, and the partner becomes the last ready entry. A
    sender that is interrupted before a receiver has taken its value takes it back. A receiver that is interrupted
    after a sender has gone on leaves the value to the next receiver. Iteration receives until the channel is closed.
    """

    def __class_getitem__(cls, item: Any, /) -> GenericAlias: ...
    @property
    def balance(self) -> int:
        """The number of values that can be received without waiting, or minus the receivers that wait."""
    @property
    def closing(self) -> bool:
        """Whether it was closed."""
    @property
    def closed(self) -> bool:
        """Whether it was closed and nothing is left in it."""
    def send(self, value: _T, /, block: bool = True, timeout: float | None = None) -> None:
        """Give ``value`` to a receiver, waiting for one.

        Raises:
            ClosedError: the channel is closed.
            TimeoutError: nobody has received it within ``timeout`` seconds, or, without ``block``, nobody waits for it.
            YieldFromMain: it would have to wait, and this is no coro.
            ScheduleError: it belongs to another thread.
        """
    def send_exception(self, exc: BaseException | type[BaseException], /, *args: Any) -> None:
        """Raise ``exc``, or ``exc(*args)`` of a class, in a receiver, waiting for one. Raises: as ``send``."""
    def send_sequence(self, values: Iterable[_T], /) -> int:
        """Send each of the values; return how many there were. Raises: as ``send``."""
    def receive(self, block: bool = True, timeout: float | None = None) -> _T:
        """Return the value of a sender, waiting for one, or raise its exception.

        Raises:
            ClosedError: the channel is closed and nobody sends.
            TimeoutError: nobody has sent one within ``timeout`` seconds, or, without ``block``, nobody waits to send.
            YieldFromMain, ScheduleError: as ``send``.
        """
    def close(self) -> None:
        """Take no more values. Receivers get those that are waiting, then ClosedError."""
    def __iter__(self) -> Self: ...
    def __next__(self) -> _T: ...

def _coro_setup(errors: Any, kind: type[Coro[Any]], /) -> str | None:
    """Take the package's exception classes and its Coro; None, or why there are no coros on this interpreter."""

def _coro_panic(function: Callable[[], object], /) -> None:
    """Panic, and call ``function`` while the native frames are unwound. For tests."""

def _coro_note_collection(phase: str, info: dict[str, int], /) -> None:
    """Note that a garbage collection begins or has ended on this stack: a coro must not leave it meanwhile."""

def _coro_new(
    function: Callable[..., Any],
    /,
    *args: Any,
    name: str | None = None,
    context: Context | None = None,
    stack: Literal["shared", "own"] = "shared",
    **kwargs: Any,
) -> Any:
    """Make a coro of ``function(*args, **kwargs)`` that its method ``start`` starts. Otherwise as ``coro.spawn``."""

def _coro_spawn(
    function: Callable[..., Any],
    /,
    *args: Any,
    name: str | None = None,
    context: Context | None = None,
    stack: Literal["shared", "own"] = "shared",
    **kwargs: Any,
) -> Any:
    """Start a coro that runs ``function(*args, **kwargs)``, and return it.

    It runs in the next iteration of the loop. If no loop runs yet, the thread's next ``coro.run`` or
    ``coro.event_loop`` runs it.

    Args:
        name: the name in ``repr()`` and in messages, ``coro <id>`` by default.
        context: the context in which the coro runs, by default a copy of the current one.
        stack: ``"shared"``: several coros share the stack, which may be evicted while the coro waits. ``"own"``: it
            is never evicted, for C code that gives away pointers to its stack.

    Raises:
        TypeError: ``function`` cannot be called, or is async.
        RuntimeError: an event loop that is not grapeshot's runs in this thread.
        MemoryError: there is no stack of its own for the coro.
    """

def _coro_spawn_hiding(
    function: Callable[..., Any],
    /,
    *args: Any,
    name: str | None = None,
    context: Context | None = None,
    stack: Literal["shared", "own"] = "shared",
    **kwargs: Any,
) -> Any:
    """Make a coro and start it, as ``_coro_spawn``; asyncio's functions see no running loop in it."""

def _coro_hide_loop() -> Any:
    """Hide the loop from the running coro; return asyncio's current task. RuntimeError if it is hidden already."""

def _coro_show_loop(task: Any, /) -> None:
    """Show the loop to the running coro, which hides it, with ``task`` as the current task (None: with none).

    RuntimeError if the coro does not hide the loop, or another loop runs in it.
    """

def _coro_is_hidden() -> bool:
    """Return whether a coro runs here that hides the loop."""

def _coro_running_loop() -> Any:
    """Return the loop that runs in this thread, even if the running coro hides it; None if there is none."""

def _coro_check_function(function: object, caller: str, /) -> None:
    """TypeError, as one of ``caller``, unless a coro can run ``function``: it is callable, and not async."""

def _coro_current() -> Any:
    """Return the coro that runs. YieldFromMain if none does."""

def _coro_current_or_none() -> Any:
    """Return the coro that runs, or None."""

def _coro_get_ident() -> int:
    """Return the id of the coro that runs, elsewhere the ident of the thread."""

def _coro_begins_thread() -> bool:
    """Whether a patched thread that is started here is a coro: in a coro, and where a loop runs that has coros."""

def _coro_can_wait() -> bool:
    """Whether a coro runs here that could wait."""

def _coro_monotonic() -> float:
    """What ``time.monotonic()`` returns. A program that replaces that, as tests do, does not change this."""

def _coro_read_now(fd: int, length: int, /) -> bytes | None:
    """Read from a descriptor without blocking, whatever its mode. None: there is no such call for it."""

def _coro_write_now(fd: int, data: ReadableBuffer, /) -> int | None:
    """Write to a descriptor without blocking, whatever its mode. None: there is no such call for it."""

def _coro_report_error_of_thread(exception: BaseException, function: object, /) -> None:
    """Give an exception that nobody can handle to ``sys.unraisablehook``."""

def _coro_yield_slice() -> None:
    """Let everything run that is ready. YieldFromMain outside of a coro."""

def _coro_wait(coros: Iterable[Any] = ..., timeout: float | None = None, count: int | None = None) -> Any:
    """Wait until all of ``coros`` have ended, ``count`` of them, or ``timeout`` seconds are over.

    Returns a list of those that have ended, in the order in which they did, at most ``count``. Futures of
    ``grapeshot.coro`` and of asyncio, and tasks, can be waited for as well. Nothing that they have raised is raised
    here, and an interruption of this coro leaves them alone.

    Without arguments: wait until ``schedule`` is called with this coro, and return the value that it is given.

    Raises:
        NotStartedError: one of them was not started.
        RuntimeError: a coro waits for itself.
        YieldFromMain: outside of a coro.
    """

def _coro_wait_for_wake() -> BaseException | None:
    """Wait until somebody wakes this coro; return what has interrupted the wait, None if nothing has."""

def _coro_now() -> float:
    """Return the time of the loop's clock, in seconds; where no loop runs that of ``time.monotonic()``."""

def _coro_sleep_absolute(when: float, /) -> None:
    """Wait until ``loop.time()`` is ``when``."""

def _coro_sleep_relative(delay: float, /) -> None:
    """Wait for ``delay`` seconds."""

def _coro_end_wait(coro: Coro[Any], /) -> None:
    """What the timer of a limited wait calls."""

def _coro_end_sleep(coro: Coro[Any], /) -> None:
    """What the timer of a sleep calls."""

def _coro_live() -> list[Any]:
    """Return the coros of this thread between their start and their end."""

def _coro_set_switch_stamps(on: bool, /) -> None:
    """Set whether the moments of switches are noted, in all threads."""

def _coro_switch_stamps() -> tuple[int, int, int, int]:
    """Return when a coro of this thread was last entered and left.

    Nanoseconds of ``time.monotonic_ns()`` and ``time.thread_time_ns()`` of the one, then of the other; 0 if unknown.
    """

def _coro_wait_info(coro: Coro[Any], /) -> tuple[str, int] | None:
    """Return ``("read", fd)``, ``("write", fd)``, or ``("queue", address)`` of a queue in what the coro waits for.

    None if it waits for neither. ScheduleError in another thread than the coro's.
    """

def _coro_stack_info() -> dict[str, Any]:
    """Return numbers of this thread's coros.

    ``switches``, ``evictions``, ``bytes_copied`` and ``started`` since its first coro; ``live`` coros and
    ``bytes_saved`` of evicted stacks now; ``slots`` and ``evicts_always`` as they are set.
    """

def _coro_set_selfishness(count: int, /) -> int:
    """Let the coros of this thread yield after ``count`` I/O operations that were ready at once (4 at the start).

    Returns the number before. ValueError unless it is between 0 and 65534.
    """

def _coro_act() -> None:
    """Note that the running coro begins I/O. It yields now if much was ready at once before. Nothing elsewhere."""

# What each record ends with that tells of a late run.
_coro_latency_hint: str

def _coro_set_latency_limit(seconds: float | None, /) -> float:
    """Set how long something may keep a loop of this thread from going on: ``coro.set_latency_warning``.

    The thread is watched from now on, also without coros. Returns the limit before. ValueError if ``seconds`` is
    negative or NaN.
    """

def _coro_set_default_latency_limit(seconds: float | None, /) -> None:
    """Set that limit for this thread and for those that begin later, which are watched once they have coros."""

def _coro_report_always(flag: bool, /) -> None:
    """Set for the process whether late runs are reported also if nothing waits for their end."""

def _coro_set_exception_notifier(
    function: Callable[[Any, BaseException], object] | None, /
) -> Callable[[Any, BaseException], object] | None:
    """Call ``function(coro, exception)`` when an exception ends a coro; return the one before.

    It is called in the coro, where the exception is being handled, for every coro of the process, and not for
    CancelledError (Interrupted among them), SystemExit and KeyboardInterrupt. What it raises goes to the loop's
    exception handler. None: that handler is told of exceptions that nobody has retrieved, as those of tasks.
    """

def _coro_shut_down(loop: Any, rounds: int, /) -> int:
    """Raise Shutdown in this thread's coros (of ``loop``, None: of all), in rounds, without a loop that runs.

    Returns how many are left. SystemExit and KeyboardInterrupt of a coro come out at the end.
    """

def _coro_end_thread() -> None:
    """Let this thread make no more coros."""

def _coro_after_fork() -> Coro[Any] | None:
    """In the child of a fork: if a coro has forked, forget all others. It cannot wait, and make others, here.

    Return the coro that has forked.
    """

def _coro_set_hooks(
    pending_loop: Callable[[], Any],
    watch_thread: Callable[[], object],
    wait_for: Callable[..., list[Any]],
    report_late: Callable[[str, str, float, list[tuple[CodeType, int]]], object],
    end_child: Callable[[Any, bool], bool],
    run_forever: Callable[..., None],
    /,
) -> None:
    """Take what makes a loop for coros outside of any, watches threads end, waits for coros, logs late runs.

    Stacks of late runs begin behind ``run_forever``.
    """

def _coro_unwatch() -> None:
    """Let the watchdog leave this thread alone until its next run. Nothing inside of what a loop runs."""

def _coro_run_number() -> int:
    """Return how many runs of coros have begun in this thread."""

def _coro_send_signal(number: int, handler: object, /) -> bool:
    """Send the signal to this process, unless another handler has been set for it. Return whether it was sent."""

def _coro_stop_watchdog() -> None:
    """End the watchdog until the next coro runs: before a fork; or at the exit, once it is through with a report."""

def _coro_set_stack_slots(count: int | None, /) -> None:
    """Let later coros of this thread share ``count`` stacks (1 to 4096).

    None, as at the start: up to eight coros that live at the same time have a stack each, and all others share one.
    """

def _coro_evict_always(flag: bool, /) -> None:
    """Whether this thread's stacks are evicted and overwritten after each switch: for tests."""

def _coro_fail_evictions(count: int, /) -> None:
    """Let that many evictions and new stacks fail as if there were no memory: for tests."""

def _coro_wait_for_read(fd: FileDescriptorLike, /, timeout: float | None = None) -> None:
    """Wait until a descriptor, or an object with ``fileno()``, can be read without blocking.

    The end of a stream and an error count as readable, and so does a connection that can be accepted. Regular files
    can always be read. In a thread without coros, the thread blocks.

    Raises:
        TimeoutError: it could not within ``timeout`` seconds; 0 asks for the state.
        SimultaneousError: another coro waits for the same.
        ClosedError: it was closed meanwhile.
        ValueError: ``fd`` is no descriptor.
    """

def _coro_wait_for_write(fd: FileDescriptorLike, /, timeout: float | None = None) -> None:
    """Wait until a descriptor, or an object with ``fileno()``, can be written without blocking.

    Raises: as for reading.
    """

def _coro_socket_type(base: type[socket], /) -> type[Any]:
    """Return the native type of sockets whose calls let other coros run. It derives from ``socket.socket``."""

def _coro_bind_socket_methods(kind: type[socket], /) -> None:
    """Put the native methods of sockets on ``kind`` itself, except those that it replaces.

    Raises TypeError unless it derives from the native type.
    """

def _coro_is_on_loop() -> bool:
    """Whether a coro runs here that can wait on its loop: not in the child of a coro that has forked."""

def _coro_end_closed_wait(sock: Any, is_write: bool, coro: Coro[Any], /) -> None:
    """End the wait of a coro of this thread on a socket that another thread closes."""
