"""The native core: the loop, handles, transports, TLS, child processes and coros.

Programs use it through :class:`grapeshot.Loop` and :mod:`grapeshot.coro`.

Only the thread that runs the loop may call the methods of the loop and of its objects. The exceptions are
``call_soon_threadsafe``, ``create_future``, ``time``, ``is_running``, ``is_closed``, ``stop``, ``get_debug``,
``set_debug``, ``Handle.cancel`` of a handle that ``call_soon_threadsafe`` returned, and methods whose docstrings say
so. Times are in seconds of ``time.monotonic()``.
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
    "_HAS_HOST_LOOKUPS",
    "_HUB_EVENTS",
    "Coro",
    "DatagramTransport",
    "Handle",
    "Loop",
    "ReadPipeTransport",
    "SSLTransport",
    "StreamTransport",
    "TimerHandle",
    "WritePipeTransport",
    "_AioQueue",
    "_HubIo",
    "_HubLoop",
    "_Resolver",
    "_StreamReader",
    "_StreamReaderProtocol",
    "_StreamWriter",
    "_after_fork",
    "_aio_after_fork",
    "_aio_before_fork",
    "_aio_open_now",
    "_aio_read_now",
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
    "_coro_live_tasks",
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
    "_coro_set_selfishness",
    "_coro_set_stack_slots",
    "_coro_set_switch_stamps",
    "_coro_set_undisturbed",
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
    "_coro_wait_for_write",
    "_coro_wait_info",
    "_coro_write_now",
    "_coro_yield_slice",
    "_coroutine_method",
    "_decode_msgpack",
    "_exchange_running_loops",
    "_file_len",
    "_keep_forever",
    "_open_child_watch",
    "_path_status",
    "_remove_path",
    "_resolver_after_fork",
    "_resolver_before_fork",
    "_send_file",
    "_set_position",
    "_set_resolver",
    "_set_stream_types",
    "channel",
    "condition_variable",
    "fifo",
    "lock",
    "mutex",
    "semaphore",
    "shared_channel",
    "shared_queue",
    "thread_lock",
    "thread_queue",
    "thread_rlock",
    "wakeup",
]

_T = TypeVar("_T")
_T_co = TypeVar("_T_co", covariant=True)
_Ts = TypeVarTuple("_Ts")
_F = TypeVar("_F", bound=Callable[..., Any])

class _ConnectionOwner(Protocol):
    """The server object that ``Loop._listen`` informs about the connections it accepts."""

    def _attach(self, transport: StreamTransport) -> None: ...
    def _detach(self, transport: StreamTransport) -> None: ...
    def _accepting(self, transport: StreamTransport, is_waiting: bool) -> asyncio.Future[None] | None: ...

class _Listener(Protocol):
    """A listening socket from which the loop accepts connections."""

    def _stop(self) -> None: ...

@disjoint_base
class Handle(asyncio.Handle):
    """A callback to run once, or at each event if ``_add_reader`` or ``_add_writer`` returned the handle.

    A native type; ``isinstance(handle, asyncio.Handle)`` holds through ``__class__``.
    """

    def cancel(self) -> None:
        """Prevent the callback from running, if it has not run yet, and release it and its arguments. Idempotent."""

    def cancelled(self) -> bool:
        """Whether :meth:`cancel` was called."""

    def get_context(self) -> Context:
        """Return the context that the callback runs in. Available on every Python version (in asyncio: 3.12+)."""

    def _run(self) -> None: ...

    # The slots of asyncio.Handle, which can be set and deleted. Once the handle is cancelled, the callback and its
    # arguments are None.
    _callback: Any
    _args: Any
    _context: Any
    _loop: Any
    _cancelled: Any
    _source_traceback: Any
    _repr: Any

@final
class TimerHandle(Handle, asyncio.TimerHandle):  # type: ignore[misc]  # asyncio.TimerHandle is only in __class__
    """A callback to run once, at a given time. Timers are ordered by their times.

    ``isinstance(handle, asyncio.TimerHandle)`` holds.
    """

    def when(self) -> float:
        """Return the time at which the callback is due, in seconds of the loop's clock."""

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
    """The native part of an event loop. It is not usable alone: :class:`grapeshot.Loop` adds the rest.

    It calls these methods of the Python half: ``call_exception_handler``, ``_resolve``, ``_on_slow`` and
    ``_signals_arrived``. It calls these methods of a server: ``_attach``, ``_detach``, ``_accepting``, ``is_serving``.
    """

    slow_callback_duration: float
    """In debug mode, a callback that takes at least this many seconds is logged (default 0.1)."""

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
        """Run ``callback(*args)`` once, ``delay`` seconds from now and never earlier.

        Timers run in the order of their times. A negative ``delay`` is allowed: it is a time that has already passed.

        Raises:
            TypeError: ``delay`` is None or not a number.
            RuntimeError: like :meth:`call_soon`.
        """

    def call_at(
        self,
        when: float,
        callback: Callable[[*_Ts], object],
        *args: *_Ts,
        context: Context | None = None,
    ) -> TimerHandle:
        """Run ``callback(*args)`` once at ``when``, in seconds of :meth:`time`. Raises: like :meth:`call_later`."""

    def call_soon_threadsafe(
        self, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None
    ) -> Handle:
        """Like :meth:`call_soon`, for any thread and for signal handlers. Wakes the loop if it is blocked."""

    def time(self) -> float:
        """Return the current time of the loop's clock in seconds, which is ``time.monotonic()``."""

    # --- futures and tasks

    def create_future(self) -> asyncio.Future[Any]:
        """Return a new :class:`asyncio.Future` attached to this loop."""

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
        """Make tasks with ``factory(loop, coro, **kwargs)``, or with :class:`asyncio.Task` if ``factory`` is None.

        Raises:
            TypeError: ``factory`` is neither callable nor None.
        """

    def get_task_factory(self) -> Callable[..., Any] | None:
        """Return the task factory, or None if the default is in use."""

    def _set_task_observer(self, observer: Callable[[Any], object] | None, /) -> None:
        """Call ``observer(task)`` for each new task and each coro that starts. None removes the observer."""

    def _set_step_observer(self, observer: Callable[[Any, int, int], object] | None, /) -> None:
        """Call ``observer(what, wall_ns, cpu_ns)`` after each step of a callback, coro or transport.

        None removes the observer.
        """

    def _log_events(self, io: bool, tls: bool) -> None:
        """Switch the logging of connection events (``io``) and of TLS events (``tls``) on or off."""

    # --- state

    def is_running(self) -> bool:
        """Whether the loop is running, in any thread."""

    def is_closed(self) -> bool:
        """Whether the loop was closed."""

    def stop(self) -> None:
        """Stop running at the end of the current iteration. Callbacks already scheduled for it still run."""

    def get_debug(self) -> bool:
        """Whether debug mode is on."""

    def set_debug(self, enabled: bool) -> None:
        """Set the native flag of debug mode."""

    # --- limits
    _limits: tuple[int | None, int | None, int | None]
    _open_connections: int

    def _set_limits(self, connections: int | None, descriptors: int | None, coros: int | None) -> None: ...
    def _check_limits(self, is_connection: bool) -> None:
        """Raise LimitError if the limits allow no further descriptor (or, with ``is_connection``, no connection)."""

    def _resume_listeners(self) -> None: ...

    # --- descriptors: an int, or an object with fileno()

    def add_reader(self, fd: FileDescriptorLike, callback: Callable[[*_Ts], Any], *args: *_Ts) -> None:
        """Call ``callback(*args)`` whenever ``fd`` can be read. Cancels and replaces an earlier reader of ``fd``.

        Raises:
            RuntimeError: the loop is closed, or a transport of this loop uses the descriptor.
            ValueError: ``fd`` is not a descriptor.
            OSError: the system's poller refuses the descriptor (EPERM for a regular file).
        """

    def remove_reader(self, fd: FileDescriptorLike) -> bool:
        """Stop watching ``fd`` for reading; return whether it was watched (False if the loop is closed).

        Raises:
            RuntimeError: a transport of this loop uses the descriptor.
            ValueError: ``fd`` is not a descriptor.
        """

    def add_writer(self, fd: FileDescriptorLike, callback: Callable[[*_Ts], Any], *args: *_Ts) -> None:
        """Call ``callback(*args)`` whenever ``fd`` can be written. Otherwise like :meth:`add_reader`."""

    def remove_writer(self, fd: FileDescriptorLike) -> bool:
        """Stop watching ``fd`` for writing. Otherwise like :meth:`remove_reader`."""

    # Like the four methods above, except that `_add_...` returns the handle, and `_remove_...` does not check whether a
    # transport uses the descriptor.
    def _add_reader(self, fd: FileDescriptorLike, callback: Callable[[*_Ts], Any], *args: *_Ts) -> Handle: ...
    def _remove_reader(self, fd: FileDescriptorLike) -> bool: ...
    def _add_writer(self, fd: FileDescriptorLike, callback: Callable[[*_Ts], Any], *args: *_Ts) -> Handle: ...
    def _remove_writer(self, fd: FileDescriptorLike) -> bool: ...
    def _ensure_fd_no_transport(self, fd: FileDescriptorLike) -> None:
        """Raise RuntimeError if an open transport of this loop uses ``fd``, ValueError if it is not a descriptor."""

    # --- plain sockets: they must be non-blocking, and the loop does not own them
    # Each call returns a coroutine of a native type. Its first step makes the system call; the coroutine waits only if
    # that would block. (``_wait_writable`` makes no system call, and always waits.) All of the coroutines raise
    #   OSError: the system call failed
    #   TypeError: an argument has the wrong type, or ``sock`` is an ``ssl.SSLSocket``
    #   ValueError: in debug mode, ``sock`` is blocking or has a timeout
    #   RuntimeError: the call has to wait, but a transport of this loop uses the descriptor, or the loop is closed

    def sock_recv(self, sock: socket, nbytes: int) -> Coroutine[Any, Any, bytes]:
        """Receive up to ``nbytes`` bytes. ``b""`` means that the peer has closed its sending side."""

    def sock_recv_into(self, sock: socket, buf: WriteableBuffer) -> Coroutine[Any, Any, int]:
        """Receive at most ``len(buf)`` bytes into ``buf``; return how many, 0 at the end of the stream."""

    def sock_recvfrom(self, sock: socket, bufsize: int) -> Coroutine[Any, Any, tuple[bytes, Any]]:
        """Receive a datagram, truncated to ``bufsize`` bytes; return ``(data, address)``.

        The address is None if the sender's address is not known.
        """

    def sock_recvfrom_into(
        self, sock: socket, buf: WriteableBuffer, nbytes: int = 0
    ) -> Coroutine[Any, Any, tuple[int, Any]]:
        """Receive a datagram into ``buf``, at most ``nbytes`` bytes (0: ``len(buf)``); return ``(length, address)``."""

    def sock_sendall(self, sock: socket, data: ReadableBuffer) -> Coroutine[Any, Any, None]:
        """Send all of ``data`` on a connected socket.

        After an error or a cancellation there is no way to tell how much was sent.
        """

    def sock_sendto(self, sock: socket, data: ReadableBuffer, address: Any) -> Coroutine[Any, Any, int]:
        """Send one datagram to ``address``; return its length."""

    def sock_accept(self, sock: socket) -> Coroutine[Any, Any, tuple[socket, Any]]:
        """Accept a connection on the listening ``sock``; return ``(connection, address)``.

        ``connection`` is a non-blocking socket.
        """

    def _wait_writable(self, sock: socket) -> Coroutine[Any, Any, None]:
        """Wait until ``sock`` can be written, is connected, or has failed.

        Only a new event ends this wait. An event that the loop has already got from the poller does not, even if the
        loop has not handled it yet.
        """

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

        Native code answers for most IP addresses with a numeric port. All other calls go to ``_resolve``, which takes
        the same arguments. In debug mode, and while ``socket.getaddrinfo`` is replaced, every call goes there.

        Raises:
            socket.gaierror: the name does not resolve.
            RuntimeError: the process cannot start a thread, the loop is closed, or a replacement of
                ``socket.getaddrinfo`` needs the default executor, which was shut down.
        """

    # --- for the Python half of the loop

    @property
    def _thread_id(self) -> int | None:
        """The identifier of the thread that runs the loop, or None while the loop does not run."""

    def _attributes_changed(self) -> None:
        """Make timers use the methods ``time`` and ``call_at`` that the loop has now.

        Called when the program sets or deletes one of these attributes.
        """

    def _check_closed(self) -> None:
        """Raise RuntimeError if the loop is closed."""

    def _check_running(self) -> None:
        """Raise RuntimeError if this loop is running, or if another loop is running in this thread."""

    def _run(self) -> None:
        """Run iterations until :meth:`stop`. Raises KeyboardInterrupt and SystemExit if a callback raises them."""

    def _statistics(self) -> dict[str, Any]:
        """Return the loop's counters, and its times in seconds, by name. Any thread may call it."""

    def _set_measured(self, is_on: bool, slow_ns: int | None) -> None:
        """Measure how long steps take, and how long they wait before they run.

        ``_on_slow`` is called after each step that takes at least ``slow_ns``, or never if ``slow_ns`` is None.
        """

    def _running_since_ns(self) -> int | None:
        """Return the time in nanoseconds at which the current measured step began, or None. Any thread may call it."""

    def _signal_fd(self) -> int:
        """Return the descriptor for :func:`signal.set_wakeup_fd`.

        The loop calls ``_signals_arrived`` with the bytes that arrive there. The first call creates the descriptor;
        the loop owns it and closes it in :meth:`_close`.

        Raises:
            RuntimeError: the loop is closed.
            OSError: the system has no descriptor left.
        """

    def _close(self) -> None:
        """Drop all callbacks and watched descriptors, and close the poller and the waker. Idempotent.

        Raises:
            RuntimeError: the loop is running.
        """

    def _forget_parent(self) -> None:
        """In the child of a fork: drop the parent's callbacks and watched descriptors, without running any code.

        The loop gets a poller of its own.
        """

    def _watch_child(self, pid: int, callback: Callable[[int | None], object]) -> None:
        """Call ``callback(returncode)`` in a copy of the current context when child ``pid`` has ended.

        The loop fetches the exit status and calls ``callback`` at once, without ``call_soon``. The return code is None
        if the status was fetched elsewhere first. SIGCHLD is not used.

        Raises:
            ProcessLookupError: the child has ended, and its status was already fetched elsewhere.
            RuntimeError: the loop is closed.
            OSError: the system has no descriptor left.
        """

    def _stream(
        self,
        sock: socket,
        protocol: asyncio.BaseProtocol,
        waiter: asyncio.Future[None] | None = None,
        server: _ConnectionOwner | None = None,
    ) -> StreamTransport:
        """Take over the connected, non-blocking ``sock``.

        The loop then calls ``connection_made`` and completes ``waiter``.
        """

    def _listen(
        self,
        sock: socket,
        protocol_factory: Callable[[], asyncio.BaseProtocol],
        server: _ConnectionOwner,
        backlog: int,
    ) -> _Listener:
        """Accept connections on the listening ``sock``, each with its own protocol, at most ``backlog`` per iteration.

        ``_stop()`` of the returned object stops accepting and leaves ``sock`` open.
        """

    def _read_pipe(
        self,
        pipe: Any,
        protocol: asyncio.BaseProtocol,
        waiter: asyncio.Future[None] | None = None,
        extra: dict[str, Any] | None = None,
    ) -> ReadPipeTransport:
        """Take over ``pipe``, an object with ``fileno()`` and ``close()``.

        The loop then calls ``connection_made`` and completes ``waiter``.

        Raises:
            ValueError: ``pipe`` is neither a pipe, nor a socket, nor a character device. The caller still owns it.
            OSError: its descriptor is closed.
        """

    def _write_pipe(
        self,
        pipe: Any,
        protocol: asyncio.BaseProtocol,
        waiter: asyncio.Future[None] | None = None,
        extra: dict[str, Any] | None = None,
    ) -> WritePipeTransport:
        """Like :meth:`_read_pipe`, for the writing end."""

    def _datagram(
        self,
        sock: socket,
        protocol: asyncio.BaseProtocol,
        remote_address: Any = None,
        waiter: asyncio.Future[None] | None = None,
    ) -> DatagramTransport:
        """Take over the non-blocking datagram ``sock``, which sends only to ``remote_address`` (None: to any address).

        The loop then calls ``connection_made`` and completes ``waiter``.
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
        """Make a TLS transport for ``protocol``.

        The caller sets the new TLS transport as the protocol of the transport below.

        ``waiter`` gets its result or exception when the handshake ends. No caller waits for the handshake of an
        ``accepted`` connection, so debug mode reports its handshake if that fails. Time limits are in seconds. The
        callbacks run in a copy of the context of ``below`` if that is a native transport, and otherwise in a copy of
        the current context.

        Raises:
            ValueError, ssl.SSLError: what ``sslcontext.wrap_bio()`` raises.
        """

@final
class StreamTransport(asyncio.Transport):
    """A connection over a stream socket. It owns the socket and closes it. Only the loop makes such transports.

    Data written inside a callback of the protocol is collected and sent together when the callback returns, or as soon
    as it is more than 64 KiB. A small write by other code that the loop runs may be held until all steps that are ready
    have run. All other data is sent at once.
    """

    _start_tls_compatible: bool

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return ``socket`` (an asyncio ``TransportSocket``), ``sockname`` or ``peername``; else ``default``."""

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Switch to ``protocol`` at once. Bytes that were not delivered yet go to it."""

    def get_protocol(self) -> asyncio.BaseProtocol:
        """Return the protocol in use."""

    def is_closing(self) -> bool:
        """Whether the transport is closed or about to be."""

    def is_reading(self) -> bool:
        """Whether the protocol is given the data that arrives."""

    def pause_reading(self) -> None:
        """Deliver no data until :meth:`resume_reading`. Idempotent."""

    def resume_reading(self) -> None:
        """Deliver data again. Idempotent."""

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Call ``pause_writing`` above ``high`` unsent bytes, and ``resume_writing`` when at most ``low`` are left.

        By default ``high`` is 64 KiB and ``low`` a quarter of ``high``.

        Raises:
            ValueError: not ``high >= low >= 0``.
        """

    def get_write_buffer_limits(self) -> tuple[int, int]:
        """Return ``(low, high)`` in bytes."""

    def get_write_buffer_size(self) -> int:
        """Return the number of bytes that are not sent yet."""

    def write(self, data: ReadableBuffer) -> None:
        """Send ``data`` after all earlier data. If some of it has to wait, it is copied, unless it is ``bytes``.

        Raises:
            TypeError: ``data`` is not bytes-like.
            RuntimeError: :meth:`write_eof` was called before.
        """

    def writelines(self, list_of_data: Iterable[ReadableBuffer]) -> None:
        """Send several buffers as if they were one. Raises: like :meth:`write`."""

    def write_eof(self) -> None:
        """Send all earlier data, then close the sending side. Reading continues. Idempotent."""

    def can_write_eof(self) -> bool:
        """Return True."""

    def close(self) -> None:
        """Stop reading, send all buffered data, then close and call ``connection_lost(None)``. Idempotent."""

    def abort(self) -> None:
        """Close at once and discard unsent data. The loop then calls ``connection_lost(None)``. Idempotent."""

    def _force_close(self, exc: BaseException | None) -> None:
        """Like :meth:`abort`, but pass the given exception to ``connection_lost``. Called by a TLS transport above."""

    # asyncio's own transports have these attributes, and programs read them.
    @property
    def _paused(self) -> bool: ...

    # for Loop.sendfile
    _sendfile_compatible: Any
    @property
    def _protocol_paused(self) -> bool:
        """Whether the protocol was told to pause writing, and not yet to resume."""

    def _start_sendfile(self, future: asyncio.Future[None], /) -> None:
        """Refuse writes until :meth:`_end_sendfile`, and complete ``future`` once all earlier data is sent.

        Raises:
            RuntimeError: another sendfile is in progress.
            ConnectionError: the connection has ended. If it ends later, ``future`` gets this exception.
        """

    def _wait_writable(self, future: asyncio.Future[None], /) -> None:
        """Complete ``future`` once the socket can be written. Raises: ConnectionError, like :meth:`_start_sendfile`."""

    def _end_sendfile(self) -> None:
        """Accept writes again. Idempotent."""

@final
class ReadPipeTransport(asyncio.ReadTransport):
    """The reading end of a pipe, FIFO, terminal or socket. It owns and closes the pipe. Only the loop makes it."""

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
        """Stop reading. The loop then calls ``connection_lost(None)`` and closes the pipe. Idempotent."""

@final
class WritePipeTransport(asyncio.WriteTransport):
    """The writing end of a pipe, FIFO, terminal or socket. It owns and closes the pipe. Only the loop makes it."""

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Switch to ``protocol`` at once."""

    def get_protocol(self) -> asyncio.BaseProtocol:
        """Return the protocol in use."""

    def is_closing(self) -> bool:
        """Whether the transport is closed or about to be."""

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Call ``pause_writing`` above ``high`` unwritten bytes, and ``resume_writing`` when at most ``low`` are left.

        By default ``high`` is 64 KiB and ``low`` a quarter of ``high``.

        Raises:
            ValueError: not ``high >= low >= 0``.
        """

    def get_write_buffer_limits(self) -> tuple[int, int]:
        """Return ``(low, high)`` in bytes."""

    def get_write_buffer_size(self) -> int:
        """Return the number of bytes that are not written yet."""

    def write(self, data: ReadableBuffer) -> None:
        """Write ``data`` after all earlier data.

        Data for a pipe that is closing is ignored; repeated attempts cause a warning in the log.

        Raises:
            TypeError: ``data`` is not bytes-like.
        """

    def writelines(self, list_of_data: Iterable[ReadableBuffer]) -> None:
        """Write several buffers as if they were one. Raises: like :meth:`write`."""

    def write_eof(self) -> None:
        """The same as :meth:`close`, because a pipe has only one direction."""

    def can_write_eof(self) -> bool:
        """Return True."""

    def close(self) -> None:
        """Write all buffered data. The loop then calls ``connection_lost(None)`` and closes the pipe. Idempotent."""

    def abort(self) -> None:
        """Close at once and discard unwritten data. The loop then calls ``connection_lost(None)``. Idempotent."""

@final
class SSLTransport(asyncio.Transport, asyncio.Protocol):
    """TLS above any stream transport. It is the protocol of that transport. Only the loop makes TLS transports.

    ``connection_made`` is called when the handshake is complete. Data written inside a callback is encrypted together
    when the callback returns.
    """

    _start_tls_compatible: bool

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return ``sslcontext``, ``ssl_object``, ``peercert``, ``cipher`` or ``compression``.

        All of these except ``sslcontext`` are available once the handshake is complete, and stay available after the
        connection has ended. Any other name is looked up in the transport below.
        """

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Switch to ``protocol`` at once. Bytes that were not delivered yet go to it."""

    def get_protocol(self) -> asyncio.BaseProtocol:
        """Return the application's protocol."""

    def is_closing(self) -> bool:
        """Whether the transport is closed or about to be."""

    def is_reading(self) -> bool:
        """Whether reading is not paused. True even after :meth:`close`, as in asyncio."""

    def pause_reading(self) -> None:
        """Deliver no data until :meth:`resume_reading`. Idempotent."""

    def resume_reading(self) -> None:
        """Deliver data again. The loop then delivers the data that arrived during the pause. Idempotent."""

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Call ``pause_writing`` above ``high`` unsent bytes, and ``resume_writing`` when at most ``low`` are left.

        By default ``high`` is 512 KiB and ``low`` a quarter of ``high``.

        Raises:
            ValueError: not ``high >= low >= 0``.
        """

    def get_write_buffer_limits(self) -> tuple[int, int]:
        """Return ``(low, high)`` in bytes."""

    def get_write_buffer_size(self) -> int:
        """Return the number of bytes that the transport below has not accepted yet."""

    def set_read_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """While reading is paused, stop receiving above ``high`` bytes; after it is resumed, receive again when at most
        ``low`` are left.

        By default ``high`` is 256 KiB and ``low`` a quarter of ``high``.

        Raises:
            ValueError: not ``high >= low >= 0``.
        """

    def get_read_buffer_limits(self) -> tuple[int, int]:
        """Return ``(low, high)`` in bytes."""

    def get_read_buffer_size(self) -> int:
        """Return the number of received bytes that are not decrypted yet."""

    def write(self, data: ReadableBuffer) -> None:
        """Encrypt and send ``data`` after all earlier data. The part that cannot be sent now is kept.

        Raises:
            TypeError: ``data`` is not bytes-like.
        """

    def writelines(self, list_of_data: Iterable[ReadableBuffer]) -> None:
        """Encrypt and send several buffers together. Raises: like :meth:`write`."""

    def write_eof(self) -> None:
        """Raise NotImplementedError, as in asyncio: a TLS connection ends in both directions at once."""

    def can_write_eof(self) -> bool:
        """Return False."""

    def close(self) -> None:
        """Send all buffered data and ``close_notify``, wait for the peer's ``close_notify``, then close. Idempotent.

        The loop then calls ``connection_lost(None)``, or passes it a TimeoutError if the peer did not answer in time.
        """

    def abort(self) -> None:
        """Close at once and discard unsent data. The loop then calls ``connection_lost(None)``. Idempotent."""

    # The methods of a protocol, which the transport below calls.
    def connection_made(self, transport: asyncio.BaseTransport) -> None: ...
    def connection_lost(self, exc: Exception | None) -> None: ...
    def data_received(self, data: bytes) -> None: ...
    def eof_received(self) -> bool: ...
    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...
    def _feed(self, data: bytes) -> None:
        """Accept ciphertext that was received elsewhere, before ``connection_made``."""

    def _on_timeout(self) -> None: ...
    def _force_close(self, exc: BaseException | None) -> None: ...

    # asyncio's own TLS transport has these attributes, and programs read them.
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
    """An endpoint over a datagram socket. It owns the socket and closes it. Only the loop makes such transports.

    Errors of the socket are passed to ``error_received``, and the transport stays open. An exception in the protocol
    is reported to the loop's exception handler and has no other effect.
    """

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Switch to ``protocol`` at once."""

    def get_protocol(self) -> asyncio.BaseProtocol:
        """Return the protocol in use, or None once ``connection_lost`` has run."""

    def is_closing(self) -> bool:
        """Whether the transport is closed or about to be."""

    def is_reading(self) -> bool:
        """Whether the protocol is given the datagrams that arrive."""

    def pause_reading(self) -> None:
        """Deliver no datagram until :meth:`resume_reading`. Idempotent."""

    def resume_reading(self) -> None:
        """Deliver datagrams again. Idempotent."""

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Call ``pause_writing`` above ``high`` unsent bytes, and ``resume_writing`` when at most ``low`` are left.

        By default ``high`` is 64 KiB and ``low`` a quarter of ``high``.

        Raises:
            ValueError: not ``high >= low >= 0``.
        """

    def get_write_buffer_limits(self) -> tuple[int, int]:
        """Return ``(low, high)`` in bytes."""

    def get_write_buffer_size(self) -> int:
        """Return the number of bytes that are not sent yet. From Python 3.13 on, each datagram counts 8 bytes more."""

    def sendto(self, data: ReadableBuffer, addr: Any = None) -> None:
        """Send ``data`` as one datagram to ``addr`` (None: to the remote address).

        If ``data`` has to wait, it is copied, unless it is ``bytes``. Up to Python 3.12, empty ``data`` is ignored. If
        the system refuses the datagram, ``error_received`` is called.

        Raises:
            TypeError: ``data`` is not bytes-like.
            ValueError: the endpoint has a remote address, and ``addr`` is a different one.
        """

    def close(self) -> None:
        """Stop receiving, send all buffered datagrams, then close and call ``connection_lost(None)``. Idempotent."""

    def abort(self) -> None:
        """Close at once and discard unsent datagrams. The loop then calls ``connection_lost(None)``. Idempotent."""

@final
class _Resolver:
    """Looks up names in threads that do not use Python. Each loop that looks up names has one.

    A method that asks a question returns a ticket at once, and :meth:`take` delivers the answer with this ticket. An
    answer that is at most ``max_age`` seconds old may be used again. Equal questions that are open at the same time
    share one lookup.
    """

    def fileno(self) -> int:
        """Return a descriptor that is readable while there may be something to take."""
    def getaddrinfo(
        self,
        host: bytes | None,
        service: bytes | None,
        family: int,
        kind: int,
        proto: int,
        flags: int,
        max_age: float,
        /,
    ) -> int:
        """Ask ``getaddrinfo(3)``. Raises: RuntimeError if no thread can be started."""
    def getnameinfo(self, host: bytes, port: bytes, flowinfo: int, scope_id: int, flags: int, max_age: float, /) -> int:
        """Ask ``getnameinfo(3)`` for the name of a numeric host and port."""
    def gethostbyname(self, host: bytes, max_age: float, /) -> int:
        """Ask ``gethostbyname(3)``. Works only if ``_HAS_HOST_LOOKUPS`` is true."""
    def gethostbyaddr(self, host: bytes, max_age: float, /) -> int:
        """Ask ``gethostbyaddr(3)``. Works only if ``_HAS_HOST_LOOKUPS`` is true."""
    def forget(self, ticket: int, /) -> None:
        """Withdraw a question. If no other caller has asked it and its lookup has not begun, the lookup is not made."""
    def take(self, into: list[tuple[int, Any]], /) -> None:
        """Append a pair to ``into`` for each answer that has arrived: the ticket, and the answer or exception to raise.

        Raises:
            MemoryError: no memory is left for some of the pairs. The next call appends them.
        """
    def wake(self) -> None:
        """Make the descriptor readable, even if nothing has arrived."""

@final
class _AioQueue:
    """Makes calls on files without blocking the loop: with io_uring, or in threads on systems without it.

    Each loop that uses files has one. All methods that start a call return its ticket, or raise OSError if the process
    cannot start a thread. Offset -1 means the file's own position. If the environment variable GRAPESHOT_FILE_THREADS
    is set to 1, threads make all calls.
    """

    def open(self, path: bytes, flags: int, mode: int, /) -> int:
        """``open(2)``, with ``O_CLOEXEC``. The result is a descriptor."""
    def close(self, fd: int, /) -> int:
        """``close(2)``. It cannot be cancelled."""
    def read(self, fd: int, size: int, offset: int, /) -> int:
        """``pread(2)``. The result is bytes."""
    def write(self, fd: int, data: ReadableBuffer, offset: int, /) -> int:
        """``pwrite(2)``. The result is the number of bytes. The buffer is exported until the call has ended."""
    def sync(self, fd: int, only_data: bool, /) -> int:
        """``fsync(2)`` or ``fdatasync(2)``."""
    def truncate(self, fd: int, length: int, /) -> int:
        """``ftruncate(2)``."""
    def cancel(self, ticket: int, /) -> bool:
        """Cancel a call. Return True if it had not begun; otherwise :meth:`take` still delivers its result later."""
    def take(self, into: list[tuple[int, Any]], /) -> None:
        """Append a pair to ``into`` for each call that has ended: its ticket, and its result or exception to raise.

        Raises:
            MemoryError: no memory is left for some of the pairs. The next call appends them.
        """
    def wake(self) -> None:
        """Make the descriptor readable, even if no call has ended."""
    def fileno(self) -> int:
        """Return the descriptor that is readable when calls may have ended."""
    def has_ring(self) -> bool:
        """Whether io_uring makes the calls."""
    def stop(self, limit: float, /) -> list[int]:
        """Cancel all calls except those that close a file, then wait for the calls that are left.

        Waits at most ``limit`` seconds. Returns the tickets of the calls that have not ended by then.
        """

@disjoint_base
class _StreamReader:
    """The native part of :class:`grapeshot.streams.StreamReader`: the buffer, the methods that read, and the waiter."""

    _buffer: bytearray
    _eof: bool
    _exception: BaseException | None
    _limit: int
    _loop: asyncio.AbstractEventLoop
    _paused: bool
    _transport: asyncio.BaseTransport | None
    _waiter: Any

    def feed_data(self, data: Any) -> None:
        """Buffer ``data`` until it is read."""

    def read(self, n: int = -1) -> Coroutine[Any, Any, bytes]:
        """Return up to ``n`` bytes; if ``n`` is negative, everything up to the end of the stream."""

    def readexactly(self, n: int) -> Coroutine[Any, Any, bytes]:
        """Return exactly ``n`` bytes."""

    def readuntil(self, separator: Any = b"\n") -> Coroutine[Any, Any, bytes]:
        """Return all bytes up to and including the separator."""

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
        """Wait until the transport accepts more data."""

@disjoint_base
class _StreamReaderProtocol:
    """The native part of :class:`grapeshot.streams.StreamReaderProtocol`: it feeds the reader."""

    _connection_lost: bool
    _loop: asyncio.AbstractEventLoop
    _paused: bool
    _stream_reader_wr: Any

    def data_received(self, data: bytes) -> None:
        """Feed the reader."""

@disjoint_base
class _HubLoop:
    """The native part of :class:`grapeshot.gevent.Loop`."""

    asyncio_loop: Loop
    # How many things keep ``run()`` from returning: active watchers with a reference, callbacks, calls of ``ref()``.
    _references: int
    # Whether ``run()`` returns after the next watcher or callback.
    _is_once: bool
    _is_destroyed: bool

    def _set_loop(self, loop: Loop) -> None:
        """Set ``asyncio_loop``, once, before anything else.

        Raises:
            TypeError: ``loop`` is not a grapeshot loop.
            RuntimeError: ``asyncio_loop`` was set before.
        """

    def _take_io(self, fd: int) -> list[_HubIo]:
        """Stop watching a descriptor that is about to be closed. Return its watchers, which stay active."""

    def _take_all_io(self, is_forked: bool) -> list[_HubIo]:
        """Stop watching all descriptors. Return their watchers, which stay active.

        In the child of a fork, this does not touch the poller, which is still the parent's.
        """

@disjoint_base
class _HubIo:
    """The native part of gevent's io watchers. ``_callback`` and ``_args`` are None while there is no callback."""

    loop: Any
    callback: Callable[..., Any] | None
    _callback: Callable[..., Any] | None
    _args: tuple[Any, ...] | None
    @property
    def _fd(self) -> int: ...
    @property
    def _events(self) -> int: ...
    _ref: bool
    _is_active: bool
    # None if the watcher was taken off its descriptor
    @property
    def _descriptor(self) -> object: ...
    def _set(self, loop: _HubLoop, fd: int, events: int) -> None:
        """Set what the watcher will watch.

        Raises:
            TypeError: ``loop`` is not a loop of gevent's hub.
            ValueError: the watcher is active, or ``fd`` is negative.
        """

    def start(self, callback: Callable[..., Any], *args: Any, pass_events: bool = False) -> None:
        """Call ``callback(*args)`` in the hub whenever the descriptor is ready.

        With ``pass_events``, the first argument of the callback says which events happened: 1 (can be read), 2 (can be
        written), 3 (both), or -1 if the descriptor is closed. If the watcher is already active, the callback
        replaces the earlier one.

        Raises:
            TypeError: ``callback`` is not callable.
            ValueError: the loop is destroyed.
            RuntimeError: a transport, a task or a callback of asyncio uses the descriptor.
            OSError: the system has no memory left to watch the descriptor.
        """

    def stop(self) -> None:
        """Stop, and forget the callback."""

    def close(self) -> None:
        """Stop. The watcher is not used again, and its descriptor may be closed next."""

    def _begin(self) -> None:
        """Watch again, in the child of a fork."""

    def _fire(self, events: int = 0) -> None:
        """Call the callback now."""

# A placeholder. Where it is the first argument of a callback, the callback gets the events that happened instead.
_HUB_EVENTS: object

def _exchange_running_loops(event: str, greenlets: tuple[Any, Any]) -> None:
    """Exchange the running loops and current tasks of two greenlets, the one that ran and the one that runs next.

    This function is passed to :func:`greenlet.settrace`. From then on, greenlet calls it at each switch.
    """

def _set_stream_types(
    reader: type[asyncio.StreamReader],
    writer: type[asyncio.StreamWriter],
    protocol: type[asyncio.StreamReaderProtocol],
) -> None:
    """Register the stream classes. Native code may use their instances without calling their Python methods."""

def _coroutine_method(stub: _F, owner: type | None = None) -> _F:
    """Return the native method of ``owner`` (None: the loop) that has the name of ``stub``, as a coroutine function.

    The result has the signature of ``stub``.

    Raises:
        AttributeError: ``owner`` has no such method.
        TypeError: the method is not native.
    """

def _file_len(fd: int) -> int:
    """Return the length of a file in bytes, or 0 for most descriptors that do not refer to a regular file."""

def _set_position(fd: int, offset: int) -> None:
    """Set the position of the next read from a file, in bytes from its beginning."""

def _send_file(socket_fd: int, file_fd: int, offset: int, count: int) -> int:
    """:func:`os.sendfile`: send up to ``count`` bytes and return how many were sent, 0 at the end of the file.

    Raises:
        BlockingIOError: the socket accepts no data now.
        OSError: the system cannot send from this file to this socket, or the connection failed.
    """

def _path_status(path: StrOrBytesPath) -> tuple[bool, int]:
    """Return whether ``path`` is a Unix socket, and its inode number. Raises: like :func:`os.stat`."""

def _remove_path(path: StrOrBytesPath) -> None:
    """Remove the file at ``path``. Raises: like :func:`os.remove`."""

def _before_fork() -> None:
    """Before a fork: send the data that the loop of this thread still holds."""

def _open_child_watch(pid: int) -> int:
    """Open a descriptor that becomes readable when a child process has ended. This does not fetch the status.

    Raises:
        ProcessLookupError: there is no such process any more. (Where a thread watches the child because the kernel has
            no pidfds or a sandbox refuses them, the descriptor is readable instead.)
        OSError: the process cannot open a descriptor or start that thread, or ``pid`` is not positive.
    """

def _after_fork() -> None:
    """In the child of a fork: send writes at once until the loop's current run ends.

    Data that is held back could be lost, because the child may exit first.
    """

# Whether _Resolver.gethostbyname and gethostbyaddr work on this system.
_HAS_HOST_LOOKUPS: bool

def _set_resolver(function: object, native: object) -> None:
    """Register CPython's own ``socket.getaddrinfo`` (``function``) and ``_socket.getaddrinfo`` (``native``).

    While a program has replaced one of them, native code does not answer lookups of address literals itself.
    """

def _keep_forever(value: object) -> None:
    """Never free this object. It belongs to the parent of this forked process."""

def _resolver_before_fork() -> None:
    """End the idle threads, which wait for the next lookup."""

def _resolver_after_fork() -> None:
    """In the child of a fork: make new threads for lookups when they are needed."""

def _aio_read_now(fd: int, size: int, offset: int) -> bytes | None:
    """Read from a file if the data is in memory. Return None if the call would wait, or if the system cannot tell."""

def _aio_open_now(path: bytes, flags: int) -> int | None:
    """Open an existing file if its path is in memory. Return None if the call would wait."""

def _aio_before_fork() -> None:
    """End the idle threads, which wait for the next call on a file."""

def _aio_after_fork() -> None:
    """In the child of a fork: make new threads for files when they are needed."""

def _decode_msgpack(decode: Callable[[bytes], Any], packet: bytes) -> Any:
    """Call ``decode(packet)`` with garbage collection paused (without a GIL, it is not paused).

    ``decode`` must be a msgpack decoder that runs no Python code.

    Raises:
        ValueError: the packet exceeds a limit, and ``decode`` was not called. There are limits for lists as map keys
            (3,000 in total, counted together with their contents), for numbers and dates as map keys (how many there
            are, and how often they collide), and for the depth of nesting.
    """

def _bind_methods(kind: type[Loop]) -> None:
    """Put the native methods on ``kind`` itself, except those that it overrides.

    TypeError unless ``kind`` is a subclass of Loop.
    """

@disjoint_base
class Coro(Generic[_T_co]):
    """The native part of :class:`grapeshot.coro.Coro`: a function with a stack of its own, run by the loop."""

    def __class_getitem__(cls, item: Any, /) -> GenericAlias: ...
    @property
    def id(self) -> int:
        """A number that is unique among the coros of the process."""
    @property
    def name(self) -> str:
        """The name: ``coro <id>``, unless the coro was given another one."""
    @property
    def _status(self) -> str:
        """One of new, ready, running, waiting, done."""
    @property
    def _loop(self) -> Any:
        """The loop that runs the coro."""
    @property
    def _context(self) -> Context | None:
        """The context that the coro runs in, or None once it has ended."""
    @property
    def _function(self) -> Callable[..., object] | None:
        """The function that the coro runs, or None once it has ended."""
    @property
    def _callbacks(self) -> list[tuple[Callable[[Any], object], Context]] | None:
        """The callbacks with their contexts, or None if there is no callback. anyio reads this attribute of tasks."""
    @property
    def _must_cancel(self) -> bool:
        """Whether ``cancel()`` was called and the next wait is to raise its ``CancelledError``."""
    @property
    def _exception(self) -> BaseException | None:
        """The exception that ended the function, or None. Reading this does not mark the exception as retrieved."""
    def start(self) -> None:
        """Schedule a new coro. ScheduleError if it was started before."""
    def done(self) -> bool:
        """Whether the function has returned or raised."""
    def result(self) -> _T_co:
        """Return the function's result, or raise its exception. ``asyncio.InvalidStateError`` if it has not ended.

        A coro that was shut down, interrupted or cancelled has no result. For such a coro, this method raises
        CoroCancelled if the caller is a coro, and otherwise CancelledError, as asyncio expects of a task. ``except
        Exception`` catches CoroCancelled.
        """
    def exception(self) -> BaseException | None:
        """Return the function's exception, or None if it has returned.

        InvalidStateError if it has not ended. If the coro was cancelled, this raises the same exception as ``result``.
        """
    def add_done_callback(self, fn: Callable[[Any], object], context: Context | None = None) -> None:
        """Call ``fn(self)`` from the loop once the coro has ended, in ``context`` or in a copy of the caller's."""
    def remove_done_callback(self, fn: Callable[[Any], object], /) -> int:
        """Remove the callback; return how many times it had been added."""
    def __await__(self) -> Generator[Any, None, _T_co]: ...
    def __iter__(self) -> Generator[Any, None, _T_co]: ...

    # Whether a task has begun to await this coro.
    _asyncio_future_blocking: bool
    @property
    def _hides_loop(self) -> bool:
        """Whether asyncio's functions see no running loop in this coro."""
    @property
    def _is_daemon(self) -> bool:
        """Whether the coro represents a daemon thread. If so, nothing waits for its end."""
    # Whether asyncio.all_tasks() leaves the coro out.
    _is_unlisted: bool
    # Whether the coro represents a daemon thread and did not end when it was told to. It is not told again.
    _is_given_up: bool
    # The future that await_() waits for.
    _awaited: Any
    # The number of cancel() calls that uncancel() has not undone.
    _cancel_count: int

    def set_name(self, name: object, /) -> None:
        """Set the name to ``str(name)``."""
    def _make_daemon(self) -> None:
        """Let the coro represent a daemon thread. ScheduleError if the coro belongs to another thread."""
    def set_max_selfish_acts(self, count: int | None, /) -> None:
        """Make the coro yield after ``count`` I/O operations in a row that did not have to wait.

        None: use the limit of the thread's other coros.
        """
    def stack_info(self) -> dict[str, Any]:
        """Return where the coro's stack is.

        - ``kind``: ``shared`` or ``own``
        - ``where``: ``in place`` or ``evicted`` (copied away); ``none`` before the first run and after the end
        - ``slot``: the number of the shared stack that the coro uses, or None if no other coro may use its stack
        - ``bytes_used``: how many bytes of C stack the coro uses
        - ``frame_bytes``: how many bytes its Python frames take

        ScheduleError if the coro belongs to another thread.
        """
    def get_frame(self) -> FrameType | None:
        """Return the innermost frame of a suspended coro. None if it is running, has not begun or has ended."""
    def _check_thread(self) -> None:
        """ScheduleError if the coro belongs to another thread."""
    def _wake(self, value: Any = None) -> None:
        """Resume a waiting coro; its wait returns ``value``. ScheduleError if the coro is not waiting."""
    def _throw(self, exception: BaseException, /) -> None:
        """Raise ``exception`` where the coro waits, after other pending exceptions. A running coro gets it at once."""
    def _throw_later(self, exception: BaseException | None, /) -> None:
        """Like ``_throw``, but a running coro gets it in its next wait. None withdraws a pending CancelledError."""
    def _take_back(self, exception: BaseException, /) -> bool:
        """Withdraw ``exception`` if it is still pending; return whether it was."""
    def _outcome(self) -> _T_co:
        """Return the function's result, or raise its exception. None if the coro was cancelled."""
    def _task_outcome(self) -> _T_co:
        """Like ``_outcome``, but raise the coro's CancelledError if the coro was cancelled."""
    def _failure(self) -> BaseException | None:
        """Return the function's exception, or None."""
    def _failure_unseen(self) -> BaseException | None:
        """Like ``_failure``, but None if the exception was retrieved before."""

@disjoint_base
class semaphore:  # noqa: N801
    """A number of permits, ``value`` at first. Coros get them in the order in which they asked.

    So a coro that waits for many permits is not overtaken by one that asks later for fewer.
    """

    def __init__(self, value: int = 1) -> None: ...
    @property
    def avail(self) -> int:
        """The number of free permits."""
    def __int__(self) -> int: ...
    def acquire(self, value: int = 1, block: bool = True, timeout: float | None = None) -> bool:
        """Wait until ``value`` permits are free; take them and return True.

        Returns False if they do not become free within ``timeout`` seconds. With ``block`` false it does not wait, and
        returns False if they are not free now.

        Raises:
            YieldFromMain: the call would have to wait, and the caller is not a coro.
            ValueError: ``value`` is below 1.
            ScheduleError: the semaphore belongs to another thread.
        """
    def try_acquire(self, value: int = 1) -> bool:
        """Like :meth:`acquire`, but return False instead of waiting."""
    def release(self, value: int = 1) -> None:
        """Give back ``value`` permits, to waiting coros first. Callbacks and tasks may call this, too."""
    def __enter__(self) -> Self: ...
    def __exit__(self, *args: object) -> None: ...

@disjoint_base
class lock:  # noqa: N801
    """A lock that one coro at a time holds. Only the coro that holds it can release it."""

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        """Wait until the lock is free; take it and return True. Coros get it in the order in which they asked.

        Returns False if the lock does not become free within ``timeout`` seconds. With ``block`` false it does not
        wait, and returns False if the lock is not free now.

        Raises:
            LockError: this coro holds the lock already and would wait for itself.
            YieldFromMain: the caller is not a coro.
            ScheduleError: the lock belongs to another thread.
        """
    def try_acquire(self) -> bool:
        """Like :meth:`acquire`, but return False instead of waiting."""
    def release(self) -> None:
        """Release the lock. The coro that has waited longest gets it. LockError unless this coro holds the lock."""
    def locked(self) -> bool:
        """Whether a coro holds the lock."""
    def has_lock(self, coro: Coro[Any] | None = None) -> bool:
        """Whether ``coro`` holds the lock. The default is the running coro."""
    def __enter__(self) -> Self: ...
    def __exit__(self, *args: object) -> None: ...

@disjoint_base
class mutex:  # noqa: N801
    """A lock that can be acquired again by the coro that holds it. It is free after as many releases as acquires."""

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        """Wait until the mutex is free or held by this coro, then acquire it once more.

        Returns and raises like ``lock.acquire``, except that acquiring the mutex again is not an error.
        """
    def lock(self) -> bool:
        """Like :meth:`acquire`, but return whether the call had to wait."""
    def try_acquire(self) -> bool:
        """Like :meth:`acquire`, but without waiting; return whether the coro now holds the mutex."""
    def release(self) -> None:
        """Undo one ``acquire``. LockError unless this coro holds the mutex."""
    def unlock(self) -> bool:
        """Like :meth:`release`, but return whether the mutex was passed to another coro."""
    def locked(self) -> bool:
        """Whether a coro holds the mutex."""
    def has_lock(self, coro: Coro[Any] | None = None) -> bool:
        """Whether ``coro`` holds the mutex. The default is the running coro."""
    def __enter__(self) -> Self: ...
    def __exit__(self, *args: object) -> None: ...

@final
class thread_lock:  # noqa: N801
    """``_thread.lock`` for coros and real threads. Any of them may release it, not only the one that acquired it."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take the lock; return whether that was possible in time.

        While a coro waits, other coros run; a real thread blocks. A lock that is free is always taken at once.

        Raises:
            ValueError, OverflowError: ``timeout`` is not valid.
            RuntimeError: the call has to wait, but the coro cannot wait here (in a function that the garbage collector
                calls, or in a greenlet). But if a real thread other than the coro's own holds the lock, the call
                blocks the coro's thread instead of raising. Also raised if the caller is a task or callback that
                would wait without a limit, and a coro of the same thread holds the lock.
        """
    def acquire_lock(self, blocking: bool = True, timeout: float = -1) -> bool:
        """The same as ``acquire``."""
    def release(self) -> None:
        """Give the lock to the first waiter. RuntimeError if the lock is free."""
    def release_lock(self) -> None:
        """The same as ``release``."""
    def locked(self) -> bool:
        """Whether the lock is held."""
    def locked_lock(self) -> bool:
        """The same as ``locked``."""
    def _release_save(self) -> tuple[int, int]: ...
    def _acquire_restore(self, state: tuple[int, int], /) -> None: ...
    def _at_fork_reinit(self) -> None: ...
    def __enter__(self, blocking: bool = True, timeout: float = -1) -> bool: ...
    def __exit__(self, *args: object) -> None: ...

@disjoint_base
class thread_rlock:  # noqa: N801
    """``_thread.RLock`` for coros and real threads. The coro or thread that holds it may acquire it again."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take the lock once more; return whether that was possible in time. Raises: like ``thread_lock.acquire``."""
    def release(self) -> None:
        """Undo one ``acquire``. RuntimeError unless this coro, or this thread, holds the lock."""
    if sys.version_info >= (3, 14):
        def locked(self) -> bool:
            """Whether the lock is held."""

    def _is_owned(self) -> bool: ...
    def _recursion_count(self) -> int: ...
    def _release_save(self) -> tuple[int, int]: ...
    def _acquire_restore(self, state: tuple[int, int], /) -> None: ...
    def _at_fork_reinit(self) -> None: ...
    def __enter__(self, blocking: bool = True, timeout: float = -1) -> bool: ...
    def __exit__(self, *args: object) -> None: ...

@disjoint_base
class shared_queue(Generic[_T]):  # noqa: N801
    """The native part of ``grapeshot.threads.Queue``. The methods without an underscore are public there."""

    @property
    def _capacity(self) -> int:
        """How many items fit; 0 if there is no limit."""
    @property
    def unfinished_tasks(self) -> int:
        """The number of items for which ``task_done`` was not called yet."""
    @property
    def is_shutdown(self) -> bool:
        """Whether ``shutdown`` was called."""
    def put(self, item: _T, block: bool = True, timeout: float | None = None) -> None:
        """Put an item into the queue. If the queue is full, wait until there is a place.

        Raises:
            queue.Full: there was no place in time.
            ShutDown: the queue was shut down.
            RuntimeError: the call has to wait, but the caller is a task or callback, or a coro that cannot wait here.
            ValueError: the timeout is negative.
        """
    def put_nowait(self, item: _T) -> None:
        """``put`` with ``block=False``."""
    def get(self, block: bool = True, timeout: float | None = None) -> _T:
        """Remove the oldest item and return it. If the queue is empty, wait for an item.

        Raises:
            queue.Empty: there was no item in time.
            ShutDown: the queue was shut down, and has no items left.
            RuntimeError: the call has to wait, but the caller is a task or callback, or a coro that cannot wait here.
            ValueError: the timeout is negative.
        """
    def get_nowait(self) -> _T:
        """``get`` with ``block=False``."""
    def join(self) -> None:
        """Wait until ``task_done`` was called for each item that was put.

        Raises:
            RuntimeError: the call has to wait, but the caller is a task or callback, or a coro that cannot wait here.
        """
    def task_done(self) -> None:
        """Say that the work on one item is done. Raises ValueError if the work on all items is already done."""
    def shutdown(self, immediate: bool = False) -> None:
        """Shut the queue down: ``put`` raises ShutDown from now on, and ``get`` when no items are left.

        If ``immediate`` is true, the items that are left are dropped, and count as done.
        """
    def qsize(self) -> int:
        """Return the number of items that a ``get`` could take now."""
    def empty(self) -> bool:
        """Return whether there are no items."""
    def full(self) -> bool:
        """Return whether there is no place."""
    def _limit(self, capacity: int) -> None: ...
    def _try_get(self, absent: object, /) -> Any: ...
    def _try_put(self, item: _T, /) -> bool: ...
    def _enter(self, side: int, loop: asyncio.AbstractEventLoop, /) -> Any: ...
    def _leave(self, side: int, future: Any, /) -> None: ...
    def _get_promised(self, absent: object, /) -> Any: ...
    def _put_reserved(self, item: _T, /) -> None: ...
    def __class_getitem__(cls, item: Any, /) -> GenericAlias: ...
    def _is_finished(self) -> bool: ...

@disjoint_base
class shared_channel(Generic[_T]):  # noqa: N801
    """The native part of ``grapeshot.threads.Channel``. The methods without an underscore are public there."""

    @property
    def capacity(self) -> int:
        """How many items fit; 0 if there is no limit."""
    @property
    def is_closed(self) -> bool:
        """Whether ``close`` was called."""
    def send(self, item: _T, block: bool = True, timeout: float | None = None) -> None:
        """Send an item. If the channel is full, wait until there is a place.

        Raises:
            TimeoutError: there was no place in time.
            ClosedError: the channel is closed.
            RuntimeError: the call has to wait, but the caller is a task or callback, or a coro that cannot wait here.
            ValueError: the timeout is negative.
        """
    def send_nowait(self, item: _T) -> None:
        """``send`` with ``block=False``."""
    def receive(self, block: bool = True, timeout: float | None = None) -> _T:
        """Remove the oldest item and return it. If the channel is empty, wait for an item.

        Raises:
            TimeoutError: there was no item in time.
            ClosedError: the channel is closed, and has no items left.
            RuntimeError: the call has to wait, but the caller is a task or callback, or a coro that cannot wait here.
            ValueError: the timeout is negative.
        """
    def receive_nowait(self) -> _T:
        """``receive`` with ``block=False``."""
    def close(self) -> None:
        """Close the channel: ``send`` raises ClosedError from now on, and ``receive`` when no items are left."""
    def qsize(self) -> int:
        """Return the number of items that a ``receive`` could take now."""
    def _limit(self, capacity: int) -> None: ...
    def _try_get(self, absent: object, /) -> Any: ...
    def _try_put(self, item: _T, /) -> bool: ...
    def _enter(self, side: int, loop: asyncio.AbstractEventLoop, /) -> Any: ...
    def _leave(self, side: int, future: Any, /) -> None: ...
    def _get_promised(self, absent: object, /) -> Any: ...
    def _put_reserved(self, item: _T, /) -> None: ...
    def __class_getitem__(cls, item: Any, /) -> GenericAlias: ...

@final
class wakeup:  # noqa: N801
    """A callback that wakes the coro that waits for it. A call before the wait is not lost."""

    @property
    def has_come(self) -> bool:
        """Whether the object was called."""
    def __call__(self, *_: object) -> None:
        """Wake the coro."""
    def wait(self) -> None:
        """Wait until the object was called, or the coro is woken in another way."""
    def wait_quietly(self) -> BaseException | None:
        """Like ``wait``, but return an interruption instead of raising it. Raises only if the coro cannot wait."""

@disjoint_base
class thread_queue(Generic[_T]):  # noqa: N801
    """``_queue.SimpleQueue`` for coros and real threads."""

    def put(self, item: _T, block: bool = True, timeout: float | None = None) -> None:
        """Append an item. Never waits."""
    def put_nowait(self, item: _T) -> None:
        """The same as ``put``."""
    def get(self, block: bool = True, timeout: float | None = None) -> _T:
        """Remove the oldest item and return it, waiting for one if the queue is empty.

        Raises:
            queue.Empty: no item arrived in time.
            RuntimeError: the queue is empty, and the coro cannot wait here.
        """
    def get_nowait(self) -> _T:
        """Like ``get``, but without waiting."""
    def qsize(self) -> int:
        """The number of items in the queue, without those that are reserved for waiters which have been woken."""
    def empty(self) -> bool:
        """Whether ``qsize`` is 0."""
    def __class_getitem__(cls, item: Any, /) -> GenericAlias: ...

@disjoint_base
class condition_variable:  # noqa: N801
    """A queue of coros that wait to be woken. Waking has no effect on coros that begin to wait later.

    ``len()`` is the number of coros that wait.
    """

    def __len__(self) -> int: ...
    def wait(self, timeout: float | None = None, block: bool = True) -> Any:
        """Wait; return the value passed to ``wake_one``, ``wake_n`` or ``wake_all``.

        TimeoutError if the coro is not woken within ``timeout`` seconds, or at once if ``block`` is false.
        """
    def wake_one(self, value: Any = None) -> bool:
        """Wake the coro that has waited longest; return False if no coro waits.

        If that coro is interrupted before it runs, the next one is woken in its place.
        """
    def wake_n(self, count: int, value: Any = None) -> int:
        """Wake at most ``count`` coros, each like ``wake_one``; return how many were woken."""
    def wake_all(self, value: Any = None) -> int:
        """Wake all coros that wait now; return how many were woken."""
    def raise_all(self, exc: BaseException | type[BaseException], /) -> int:
        """Raise ``exc`` in all coros that wait now; return how many there were.

        If ``exc`` is a class, each coro gets an exception of its own.
        """
    def _use(self) -> None:
        """ScheduleError if the condition variable belongs to another thread."""
    def _wait_as(self, kind: int, block: bool, timeout: float | None, /) -> bool:
        """Wait; return whether the coro was woken in time.

        ``kind`` is a number that the caller chooses. While this coro is the one that has waited longest, ``_first``
        returns the number.
        """
    def _first(self) -> int | None:
        """Return the kind of the coro that has waited longest, or None if no coro waits."""
    def _wake_first(self) -> Any:
        """Wake the coro that has waited longest and return it, or None if no coro waits.

        If that coro is interrupted before it runs, no other coro is woken.
        """

@disjoint_base
class fifo(Generic[_T]):  # noqa: N801
    """A first-in, first-out queue of at most ``maxsize`` items (None or 0: no limit).

    ``len()`` is the number of items that can be popped without waiting.
    """

    def __class_getitem__(cls, item: Any, /) -> GenericAlias: ...
    def __init__(self, maxsize: int | None = 0) -> None: ...
    def __len__(self) -> int: ...
    @property
    def maxsize(self) -> int:
        """The largest number of items that fit, or 0 for no limit."""
    def push(self, item: _T, /, block: bool = True, timeout: float | None = None) -> None:
        """Append ``item``. If coros wait for one, the coro that has waited longest gets it.

        If the queue is full, wait for space; coros get it in the order in which they asked. If the call raises, the
        item is not in the queue. Callbacks and tasks of the loop may call this, too.

        Raises:
            Full: there was no space within ``timeout`` seconds, or, with ``block`` false, there is none now.
            YieldFromMain: the call would have to wait, and the caller is not a coro.
            ScheduleError: the queue belongs to another thread.
        """
    def pop(self, block: bool = True, timeout: float | None = None) -> _T:
        """Remove and return the oldest item, waiting for one if the queue is empty.

        Coros get items in the order in which they asked.

        Raises:
            Empty: no item came within ``timeout`` seconds, or, with ``block`` false, there is none now.
            YieldFromMain, ScheduleError: like ``push``.
        """
    def pop_all(self, block: bool = True, timeout: float | None = None) -> list[_T]:
        """Remove and return all items, waiting for the first one if the queue is empty.

        Where ``pop`` raises Empty, this returns an empty list. Otherwise it raises like ``pop``.
        """

@disjoint_base
class channel(Generic[_T]):  # noqa: N801
    """A rendezvous, as in Stackless Python: ``send`` and ``receive`` wait for each other.

    A coro whose partner is already waiting continues at once, and the partner goes to the end of the ready queue. If a
    sender is interrupted before a receiver has taken its value, the value is withdrawn. If a receiver is interrupted
    after the sender has continued, the next receiver gets the value. Iterating over a channel receives until the
    channel is closed.
    """

    def __class_getitem__(cls, item: Any, /) -> GenericAlias: ...
    @property
    def balance(self) -> int:
        """The number of values that can be received without waiting. If receivers wait: minus their number."""
    @property
    def closing(self) -> bool:
        """Whether :meth:`close` was called."""
    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called and no values are left."""
    def send(self, value: _T, /, block: bool = True, timeout: float | None = None) -> None:
        """Wait for a receiver, and give it ``value``.

        Raises:
            ClosedError: the channel is closed.
            TimeoutError: no receiver came within ``timeout`` seconds, or, with ``block`` false, none is waiting now.
            YieldFromMain: the call would have to wait, and the caller is not a coro.
            ScheduleError: the channel belongs to another thread.
        """
    def send_exception(self, exc: BaseException | type[BaseException], /, *args: Any) -> None:
        """Wait for a receiver; raise ``exc`` in it, or ``exc(*args)`` if ``exc`` is a class. Raises: like ``send``."""
    def send_sequence(self, values: Iterable[_T], /) -> int:
        """Send each of the values; return how many there were. Raises: like ``send``."""
    def receive(self, block: bool = True, timeout: float | None = None) -> _T:
        """Wait for a sender; return the value that it sends, or raise the exception that it sends.

        Raises:
            ClosedError: the channel is closed and no sender is waiting.
            TimeoutError: no sender came within ``timeout`` seconds, or, with ``block`` false, none is waiting now.
            YieldFromMain, ScheduleError: like ``send``.
        """
    def close(self) -> None:
        """Accept no more values. Receivers get the values of waiting senders, and after that ClosedError."""
    def __iter__(self) -> Self: ...
    def __next__(self) -> _T: ...

def _coro_setup(errors: Any, kind: type[Coro[Any]], /) -> str | None:
    """Register the package's exception classes and its Coro class.

    Returns None, or the reason why this interpreter cannot run coros.
    """

def _coro_panic(function: Callable[[], object], /) -> None:
    """Panic, and call ``function`` while the native frames are unwound. For tests."""

def _coro_note_collection(phase: str, info: dict[str, int], /) -> None:
    """A callback for ``gc.callbacks``. While a garbage collection runs on a stack, that stack is not copied away."""

def _coro_new(
    function: Callable[..., Any],
    /,
    *args: Any,
    name: str | None = None,
    context: Context | None = None,
    stack: Literal["shared", "own"] = "shared",
    **kwargs: Any,
) -> Any:
    """Make a coro that will run ``function(*args, **kwargs)`` once its method ``start`` is called.

    Otherwise like ``coro.spawn``.
    """

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

    The coro runs in the next iteration of the loop. If no loop is running yet, it runs in this thread's next
    ``coro.run`` or ``coro.event_loop``.

    Args:
        name: the name in ``repr()`` and in messages. The default is ``coro <id>``.
        context: the context in which the coro runs. The default is a copy of the current one.
        stack: with ``"shared"``, several coros share a stack, and the coro's part of it may be copied away while the
            coro waits. With ``"own"``, the coro has a stack that never moves; use it for C code that gives pointers to
            its stack to other code.

    Raises:
        TypeError: ``function`` is not callable, or is async.
        RuntimeError: an event loop that is not grapeshot's is running in this thread.
        MemoryError: with ``stack="own"``, no memory is left for the stack.
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
    """Like ``_coro_spawn``, but asyncio's functions see no running loop in the coro."""

def _coro_hide_loop() -> Any:
    """Hide the loop from the running coro; return asyncio's current task.

    RuntimeError if the loop is already hidden.
    """

def _coro_show_loop(task: Any, /) -> None:
    """Undo ``_coro_hide_loop``: show the loop to the running coro, with ``task`` (or None) as the current task.

    RuntimeError if the loop is not hidden from the coro, or if the coro is running another loop.
    """

def _coro_is_hidden() -> bool:
    """Return whether a coro is running here and the loop is hidden from it."""

def _coro_running_loop() -> Any:
    """Return the loop that is running in this thread, even if it is hidden from the running coro.

    None if no loop runs.
    """

def _coro_check_function(function: object, caller: str, /) -> None:
    """Raise TypeError, with ``caller`` in the message, if ``function`` is not callable or is async."""

def _coro_current() -> Any:
    """Return the running coro. YieldFromMain if no coro is running."""

def _coro_current_or_none() -> Any:
    """Return the running coro, or None."""

def _coro_get_ident() -> int:
    """Return the id of the running coro, or the ident of the thread outside of coros."""

def _coro_begins_thread() -> bool:
    """Whether this code runs in a coro, or in a task or callback of a loop that has coros.

    ``threading``, once patched, asks this before it starts a thread as a coro. In a process that a coro has forked, the
    answer is no, because the loop runs in the parent.
    """

def _coro_set_undisturbed(flag: bool, /) -> bool:
    """Set whether the running coro, when interrupted, goes on waiting for a lock or queue that threads share.

    This concerns only waits without a time limit. If ``flag`` is true, an interruption during such a wait is raised
    when the coro next waits for something else.
    Returns the old value. Outside of a coro this does nothing.
    """

def _coro_can_wait() -> bool:
    """Whether a coro is running here and may wait."""

def _coro_monotonic() -> float:
    """Return the time of the clock behind ``time.monotonic()``, even if a test has replaced that function."""

def _coro_read_now(fd: int, length: int, /) -> bytes | None:
    """Read from a descriptor without blocking, even if it is in blocking mode. None if the system cannot do that."""

def _coro_write_now(fd: int, data: ReadableBuffer, /) -> int | None:
    """Write to a descriptor without blocking, even if it is in blocking mode. None if the system cannot do that."""

def _coro_report_error_of_thread(exception: BaseException, function: object, /) -> None:
    """Call ``sys.unraisablehook`` with an exception that no caller can handle."""

def _coro_yield_slice() -> None:
    """Let everything that is ready run. YieldFromMain outside of a coro."""

def _coro_wait(coros: Iterable[Any] = ..., timeout: float | None = None, count: int | None = None) -> Any:
    """Wait, for at most ``timeout`` seconds, until all of ``coros``, or ``count`` of them, have ended.

    Returns a list of the ones that have ended, at most ``count``: first those that had ended before the call, in the
    order of ``coros``, and then the others in the order in which they ended. ``coros`` may also contain tasks, and
    futures of ``grapeshot.coro`` and of asyncio. Their exceptions are not raised here. If this coro is interrupted
    while it waits, that does not affect them.

    Without arguments: wait until ``schedule`` is called with this coro, and return the value passed to it.

    Raises:
        NotStartedError: one of the coros was not started.
        RuntimeError: a coro waits for itself.
        YieldFromMain: the caller is not a coro.
    """

def _coro_now() -> float:
    """Return the time of the loop's clock in seconds, or ``time.monotonic()`` where no loop is running."""

def _coro_sleep_absolute(when: float, /) -> None:
    """Wait until ``loop.time()`` is ``when``."""

def _coro_sleep_relative(delay: float, /) -> None:
    """Wait for ``delay`` seconds."""

def _coro_end_wait(coro: Coro[Any], /) -> None:
    """The callback of the timer that limits a wait."""

def _coro_end_sleep(coro: Coro[Any], /) -> None:
    """The callback of the timer of a sleep."""

def _coro_live() -> list[Any]:
    """Return the coros of this thread that have started and not ended."""

def _coro_live_tasks() -> list[Any]:
    """Return the live coros of all threads, for ``asyncio.all_tasks()``.

    Coros that represent daemon threads, and coros that the program has unregistered from asyncio's tasks, are left out.
    """

def _coro_set_switch_stamps(on: bool, /) -> None:
    """Set, for all threads, whether the times of switches are recorded."""

def _coro_switch_stamps() -> tuple[int, int, int, int]:
    """Return when a coro of this thread was last entered, and when one was last left.

    Each time is given twice, as ``time.monotonic_ns()`` and as ``time.thread_time_ns()``; 0 if unknown.
    """

def _coro_wait_info(coro: Coro[Any], /) -> tuple[str, int] | None:
    """Return what the coro waits for: ``("read", fd)``, ``("write", fd)``, or ``("queue", address)``.

    ``address`` is the address of the wait queue inside the object that the coro waits for. None if the coro waits for
    something else, or does not wait.
    ScheduleError if the coro belongs to another thread.
    """

def _coro_stack_info() -> dict[str, Any]:
    """Return statistics about this thread's coros.

    ``switches``, ``evictions``, ``bytes_copied`` and ``started`` count from the thread's first coro on. ``live``
    (coros) and ``bytes_saved`` (in evicted stacks) are current values. ``slots`` and ``evicts_always`` are settings.
    """

def _coro_set_selfishness(count: int, /) -> int:
    """Make the coros of this thread yield after ``count`` I/O operations in a row that did not have to wait.

    The number is 4 at first. Returns the previous number. ValueError unless ``count`` is between 0 and 65534.
    """

def _coro_act() -> None:
    """Count an I/O operation of the running coro. Yield if too many of them in a row did not have to wait.

    Outside of coros this does nothing.
    """

# The last words of each log record about a late run. A run is late if it holds up the loop beyond the latency limit.
_coro_latency_hint: str

def _coro_set_latency_limit(seconds: float | None, /) -> float:
    """Set the latency limit of this thread: code that holds up a loop for longer is reported.

    ``coro.set_latency_warning`` calls this. None or 0 switches the reports off. With any other limit, the thread is
    watched from now on, even without coros. Returns the previous limit. ValueError if ``seconds`` is negative or NaN.
    """

def _coro_set_default_latency_limit(seconds: float | None, /) -> None:
    """Set the latency limit of this thread and of threads that begin later.

    These threads are watched once they have coros.
    """

def _coro_report_always(flag: bool, /) -> None:
    """Set, for the process, whether late runs are reported even if nothing was waiting for them to end."""

def _coro_set_exception_notifier(
    function: Callable[[Any, BaseException], object] | None, /
) -> Callable[[Any, BaseException], object] | None:
    """Call ``function(coro, exception)`` when an exception ends a coro; return the previous function.

    ``function`` is called for every coro of the process, in the coro, while the exception is being handled. It is not
    called for CancelledError (and its subclass Interrupted), SystemExit and KeyboardInterrupt. If ``function`` raises,
    the loop's exception handler is called. If ``function`` is None, the loop's exception handler is told about
    exceptions that were never retrieved, as it is for tasks.
    """

def _coro_shut_down(loop: Any, rounds: int, /) -> int:
    """Raise Shutdown in this thread's coros on ``loop`` (None: on any loop), in at most ``rounds`` rounds.

    A coro that does not end in one round is resumed in the next. The loop need not be running. If a coro calls this
    function, the function only counts the coros.

    Returns how many coros are left, not counting daemons that were given up. The first SystemExit or KeyboardInterrupt
    that a coro raises is raised here after the last round.
    """

def _coro_end_thread() -> None:
    """Refuse to make new coros in this thread from now on."""

def _coro_after_fork() -> Coro[Any] | None:
    """In the child of a fork: if a coro forked, forget all others and return it, else return None.

    In the child, that coro can neither wait nor make other coros.
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
    """Register the Python functions that native code uses.

    Args:
        pending_loop: returns a loop for coros that are spawned where no loop runs.
        watch_thread: makes the coros of the thread end when the thread ends.
        wait_for: waits for coros.
        report_late: logs a late run.
        end_child: is called in the child of a fork, when the coro that forked has ended there.
        run_forever: is not called. The logged stack of a late run omits the frame of this function and all outer ones.
    """

def _coro_unwatch() -> None:
    """Make the watchdog ignore this thread until a loop next runs code in it. No effect in code that a loop runs."""

def _coro_run_number() -> int:
    """Return how many runs of coros have begun in this thread."""

def _coro_send_signal(number: int, handler: object, /) -> bool:
    """Send the signal to this process, unless a handler other than ``handler`` is set. Return whether it was sent."""

def _coro_stop_watchdog() -> None:
    """Before a fork and at exit: stop the watchdog. If it is making a report, wait up to a second for the report.

    The watchdog starts again when a loop next runs code in a thread that has a latency limit.
    """

def _coro_set_stack_slots(count: int | None, /) -> None:
    """Make new coros of this thread share ``count`` stacks (1 to 4096).

    None is the default: up to eight coros that live at the same time have a stack each, and all others share one.
    """

def _coro_evict_always(flag: bool, /) -> None:
    """For tests: set whether this thread's stacks are evicted and overwritten after each switch."""

def _coro_fail_evictions(count: int, /) -> None:
    """For tests: make the next ``count`` evictions and new stacks fail as if no memory were left."""

def _coro_wait_for_read(fd: FileDescriptorLike, /, timeout: float | None = None) -> None:
    """Wait until a descriptor, or an object with ``fileno()``, can be read without blocking.

    A descriptor is also readable at the end of a stream, after an error, and when a connection can be accepted. Regular
    files are always readable. Outside of coros, the call blocks the thread.

    Raises:
        TimeoutError: the descriptor was not readable within ``timeout`` seconds. If that is 0, the call does not wait.
        SimultaneousError: another coro is waiting to read from the same descriptor.
        ClosedError: the descriptor was closed during the wait.
        ValueError: ``fd`` is not a descriptor.
    """

def _coro_wait_for_write(fd: FileDescriptorLike, /, timeout: float | None = None) -> None:
    """Wait until a descriptor, or an object with ``fileno()``, can be written without blocking.

    Raises: like ``wait_for_read``.
    """

def _coro_socket_type(base: type[socket], /) -> type[Any]:
    """Return the native socket type whose blocking calls let other coros run. It derives from ``base``."""

def _coro_bind_socket_methods(kind: type[socket], /) -> None:
    """Put the native socket methods on ``kind`` itself, except those that it overrides.

    TypeError unless ``kind`` derives from the native type.
    """

def _coro_is_on_loop() -> bool:
    """Whether a coro is running here that can wait on its loop. A coro that has forked cannot do so in the child."""

def _coro_end_closed_wait(sock: Any, is_write: bool, coro: Coro[Any], /) -> None:
    """Another thread closes a socket on which this thread's ``coro`` waits: end that wait."""
