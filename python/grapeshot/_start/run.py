"""The entry points: run a program on a new loop, or install the loop for the whole process.

Any thread may use this module. It imports the policy only when :func:`install` is called, because the policy's base
class is deprecated in Python 3.14 and 3.15, and does not exist in later versions.
"""

from __future__ import annotations

import asyncio
import sys
import types
from collections.abc import Awaitable, Callable, Coroutine

from grapeshot._loop import Loop, new_event_loop

from .runner import Runner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeVar, overload

    _T = TypeVar("_T")

# The object that install() has replaced: ("policy", previous policy) or ("factory", asyncio's new_event_loop). None if
# the loop is not installed.
_replaced: tuple[str, Any] | None = None
# The asyncio functions that install(streams=True) has replaced, by module and name.
_replaced_streams: dict[tuple[types.ModuleType, str], Any] = {}


if TYPE_CHECKING:

    @overload
    def run(main: Awaitable[_T], *, debug: bool | None = None) -> _T: ...

    @overload
    def run(
        main: Callable[[], Awaitable[_T]], *, debug: bool | None = None, threads: int, restart: bool = False
    ) -> list[_T]: ...


def run(main: Any, *, debug: bool | None = None, threads: int | None = None, restart: bool = False) -> Any:
    """Run ``main`` to its end on a new grapeshot loop and return its result, as :func:`asyncio.run` does.

    At the end, the loop's async generators and default executor are shut down and the loop is closed. Ctrl-C cancels
    the main task, and :class:`KeyboardInterrupt` is raised here after the task has cleaned up. If a coro is running at
    that moment and does not yield, KeyboardInterrupt is raised in the coro. ``debug`` sets the loop's debug mode unless
    it is None.

    With ``threads``, ``main`` is an async function without arguments. It is called in this thread and in
    ``threads - 1`` new ones, each with a loop of its own, and the results come back as a list. On a free-threaded
    Python the threads run at the same time. If ``main`` raises in one of them, it is cancelled in the others, and the
    exception is raised here when all have ended. Ctrl-C, or an exception that leaves the loop of this thread, ends all
    of them in the same way. With ``restart``, an :class:`Exception` that ``main`` raises ends nothing: the thread logs
    the exception and calls ``main`` again, after a delay of 0.1 to 5 seconds.

    Raises:
        RuntimeError: another event loop is running in this thread, or no more threads can be started.
        TypeError: ``threads`` is not an integer, or is given and ``main`` is not a function; or ``restart`` is true
            without ``threads``.
        ValueError: ``threads`` is less than 1.
        TypeError, ValueError: this Python's :class:`asyncio.Runner` cannot run ``main``. Which awaitables besides
            coroutines it accepts, and which error it raises, depends on the Python version.

    Source: :class:`asyncio.Runner` (Python 3.11+) with :func:`new_event_loop` as its loop factory.
    """
    check_none_runs("asyncio.run()")
    if threads is not None:
        from . import threads as _threads

        _threads.check(main, threads)
        main = _threads.run(main, threads, debug=debug, restart=restart)
    elif restart:
        raise TypeError("run(restart=True) needs threads=")
    with Runner(debug=debug, loop_factory=new_event_loop) as runner:
        # The runner of a newer Python accepts any awaitable. An older one raises its own error.
        return runner.run(main)


def check_none_runs(what: str) -> None:
    """Raise RuntimeError if an event loop is running in this thread. ``what`` names the caller."""
    if asyncio._get_running_loop() is not None:
        raise RuntimeError(f"{what} cannot be called from a running event loop")


def run_on(loop: Loop, main: Coroutine[Any, Any, _T]) -> _T:
    """Like :func:`run`, but on ``loop``, which is closed at the end. No loop may be running in this thread."""
    with Runner(loop_factory=lambda: loop) as runner:
        return runner.run(main)


def install(*, streams: bool = False, transports: bool = False) -> None:
    """Make grapeshot the loop of :func:`asyncio.run`, :class:`asyncio.Runner` and :func:`asyncio.new_event_loop`.

    Where Python has event loop policies (up to 3.15), this sets :class:`grapeshot.EventLoopPolicy`, without a
    deprecation warning. On a Python without policies, it replaces ``asyncio.new_event_loop``, which ``asyncio.run`` and
    ``asyncio.Runner`` call. A program that passes its own ``loop_factory`` is not affected. While grapeshot is
    installed, another call only adds what its ``streams`` and ``transports`` ask for.

    With ``streams``, the functions of :mod:`grapeshot.streams` also replace ``open_connection``, ``start_server``,
    ``open_unix_connection`` and ``start_unix_server`` in :mod:`asyncio` and ``asyncio.streams``. Code that imported
    these functions by name earlier keeps using asyncio's, and so does code that makes an
    :class:`asyncio.StreamReader` itself.

    Some libraries (such as aiohttp 3.15 and later) use aiofastnet's transports if aiofastnet is installed. With
    ``transports``, they use the loop's own transports on grapeshot's loops. ``install`` imports aiofastnet for that.

    :func:`uninstall` undoes all of this. Loops and streams that already exist do not change.
    """
    global _replaced
    if streams:
        _install_streams()
    if transports:
        from . import transports as own_transports

        own_transports.replace()
    set_policy = _policy_function("set")
    if set_policy is not None:
        from .policy import EventLoopPolicy

        before = _require(_policy_function("get"))()
        if not isinstance(before, EventLoopPolicy):
            set_policy(EventLoopPolicy())
            _replaced = ("policy", before)
    elif asyncio.events.new_event_loop is not new_event_loop:
        _replaced = ("factory", asyncio.events.new_event_loop)
        _set_factory(new_event_loop)


def uninstall() -> None:
    """Undo :func:`install`: restore the previous policy (or, without policies, the previous loop factory).

    The functions that ``install(streams=True, transports=True)`` replaced are restored, too. Anything that other code
    has replaced since then is left as it is.
    """
    global _replaced
    _uninstall_streams()
    if (own_transports := sys.modules.get(f"{__package__}.transports")) is not None:
        own_transports.restore()
    if _replaced is None:
        return
    kind, before = _replaced
    _replaced = None
    if kind == "factory":
        if asyncio.events.new_event_loop is new_event_loop:
            _set_factory(before)
        return
    from .policy import EventLoopPolicy

    if isinstance(_require(_policy_function("get"))(), EventLoopPolicy):
        _require(_policy_function("set"))(before)


def is_installed() -> bool:
    """Whether :func:`install` was called and not undone. Another policy may have been set since then."""
    return _replaced is not None


def _install_streams() -> None:
    from grapeshot import streams

    for module in (asyncio, asyncio.streams):
        for name in streams.FUNCTIONS:
            ours, before = getattr(streams, name), getattr(module, name)
            if before is not ours:
                _replaced_streams[module, name] = before
                setattr(module, name, ours)


def _uninstall_streams() -> None:
    if not _replaced_streams:
        return
    from grapeshot import streams

    for (module, name), before in _replaced_streams.items():
        if getattr(module, name) is getattr(streams, name):
            setattr(module, name, before)
    _replaced_streams.clear()


def _policy_function(verb: str) -> Callable[..., Any] | None:
    """Return asyncio's ``{verb}_event_loop_policy``, or None on a Python without policies.

    Python 3.14 and 3.15 issue warnings for the public names, and have the same functions under private names for
    asyncio's own use. This function prefers the private names, so that install() works even if warnings are errors.
    """
    name = f"{verb}_event_loop_policy"
    return getattr(asyncio.events, f"_{name}", None) or getattr(asyncio.events, name, None)


def _require(function: Callable[..., Any] | None) -> Callable[..., Any]:
    if function is None:
        raise RuntimeError("this Python has only part of asyncio's event loop policy functions")
    return function


def _set_factory(factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
    # asyncio.Runner looks the name up in asyncio.events, programs look it up in asyncio.
    asyncio.events.new_event_loop = factory
    asyncio.new_event_loop = factory
