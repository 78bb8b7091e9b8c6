"""The part ``thread`` of :func:`grapeshot.coro.patch`: the modules ``_thread`` and ``threading``.

If a coro starts a thread, the new thread is a coro. If a task or callback starts a thread, the new thread is a coro,
too, provided that the loop has live coros (the workers of a CoroPoolExecutor do not count). Everywhere else, and in
modules that keep the originals, threads are real. A ``coro.threads.Thread`` is always real. Locks work between all of
these.
"""

from __future__ import annotations

import _thread
import asyncio
import concurrent.futures.thread
import contextvars
import functools
import os
import sys
import threading
import types

from grapeshot import _core
from grapeshot.coro import _borrowing
from grapeshot.coro._errors import CancelledError
from grapeshot.coro._executor import WORKERS
from grapeshot.coro._hiding import spawn_hiding

from . import _handles, _idents, _import_hooks, _import_locks, _logging, _originals, _waits
from ._handles import HAS_HANDLES, Running, Sentinel, ThreadHandle
from ._local import local

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

get_ident = _core._coro_get_ident
_current_or_none = _core._coro_current_or_none
_start_real = _thread.start_new_thread
_real_ident = _thread.get_ident
_start_joinable: Any = getattr(_thread, "start_joinable_thread", None)
_RealHandle: Any = getattr(_thread, "_ThreadHandle", None)
_make_real_handle: Any = getattr(_thread, "_make_thread_handle", None)
_set_real_name: Any = getattr(_thread, "set_name", None)
_excepthook = threading.excepthook

# Up to Python 3.12: ident of a real thread -> the sentinel that reports its end.
_sentinels: dict[int, Sentinel] = {}


# The threads that are coros and have not ended.
_running: set[Any] = set()
# Threads that are coros and got a KeyboardInterrupt, each with that exception.
_interrupted: dict[Any, BaseException] = {}
_count_real = _thread._count
# The main thread's own handle, which is kept here while a coro stands for the main thread.
_main_handle: list[Any] = []


def count() -> int:
    """Return the number of running threads: threads that are coros, and real threads except the main thread."""
    return _count_real() + len(_running)


def join_all() -> None:
    """Wait in a coro until all threads that are not daemons have ended, as the interpreter does when it exits."""
    me = threading.current_thread()
    while True:
        left = [thread for thread in threading.enumerate() if not thread.daemon and thread is not me]
        left = [thread for thread in left if thread is not threading.main_thread() and thread.is_alive()]
        # Leave out threads of executors: the interpreter ends them later.
        left = [thread for thread in left if thread not in concurrent.futures.thread._threads_queues]
        if not left:
            return
        for thread in left:
            thread.join()


def begin_main() -> None:
    """Make ``threading`` treat the running coro, the first one of a program, as the main thread from now on.

    Threads that it starts are then not daemons by default.
    """
    coro = _core._coro_current()
    main: Any = threading.main_thread()
    main._ident = coro.id
    threading._active[coro.id] = main  # type: ignore[attr-defined]
    if HAS_HANDLES:
        _main_handle.append(getattr(main, _handles.HANDLE_NAME))
        setattr(main, _handles.HANDLE_NAME, make_thread_handle(coro.id))
    coro._stands_for_main_thread = True


def end_main() -> None:
    """Undo :func:`begin_main`."""
    main: Any = threading.main_thread()
    threading._active.pop(main._ident, None)  # type: ignore[attr-defined]
    main._ident = _real_ident()
    if HAS_HANDLES:
        setattr(main, _handles.HANDLE_NAME, _main_handle.pop())
    threading._active[main._ident] = main  # type: ignore[attr-defined]


def enumerate_threads() -> list[threading.Thread]:
    """Return all Thread objects that are alive.

    While a coro stands for the main thread, ``threading._active`` has the main thread twice: under the coro's id, and
    under the real ident, which the loop's own code uses. The returned list has the main thread once.
    """
    module: Any = threading
    with module._active_limbo_lock:
        return list(dict.fromkeys([*module._active.values(), *module._limbo.values()]))


def active_count() -> int:
    """Return the number of Thread objects that are alive."""
    return len(enumerate_threads())


# ---------------------------------------------------------------- starting


def _is_real(function: object) -> bool:
    return getattr(getattr(function, "__self__", None), "_grapeshot_is_real", False)


def begins_coro(function: object) -> bool:
    """Whether a thread that is started here with this function will be a coro."""
    if _is_real(function) or not _core._coro_begins_thread():
        return False
    if _core._coro_current_or_none() is not None:
        return True
    # A task or a callback starts the thread, which becomes a coro if the loop has live coros. Workers of executors do
    # not count here: idle workers live on for some seconds, so the kind of thread would depend on whether an executor
    # was used just before.
    loop: Any = asyncio._get_running_loop()
    return any(co._loop is loop and co not in WORKERS for co in _core._coro_live())


def _report(function: object, exc: BaseException) -> None:
    """Report an exception of a function that runs in a thread without a Thread object."""
    if not isinstance(exc, (SystemExit, CancelledError)):
        _core._coro_report_error_of_thread(exc, function)


def _run(function: Callable[..., object], args: Any, kwargs: Any, running: Running) -> None:
    coro = _current_or_none()
    try:
        function(*args, **kwargs)
        if coro is not None and coro in _interrupted:
            raise _interrupted.pop(coro)
    except BaseException as exc:
        if coro is not None and isinstance(exc, KeyboardInterrupt):
            raise
        _report(function, exc)
    finally:
        _running.discard(coro)
        running.finish()


def _spawn(function: Callable[..., object], args: Any, kwargs: Any, running: Running, *, is_daemon: bool = True) -> Any:
    """Start a thread that is a coro. ``is_daemon`` is ignored if there is a Thread object, which has its own flag."""
    thread = getattr(function, "__self__", None)
    name = getattr(thread, "name", None) if isinstance(thread, threading.Thread) else None
    # Like a real thread, the coro begins with an empty context, and asyncio sees no running loop in the coro. (From
    # Python 3.14 on, Thread objects have a context of their own, in which threading calls run().)
    coro = spawn_hiding(_run, function, args, kwargs, running, name=name, context=contextvars.Context())
    inherited = getattr(thread, "_context", None)
    if isinstance(inherited, contextvars.Context):
        # In free-threaded builds, `inherited` is a copy of the caller's context. The caller may belong to a run of a
        # borrowed loop (see `_borrowing`), but the new thread does not.
        _borrowing.leave_run(inherited)
    if thread.daemon if isinstance(thread, threading.Thread) else is_daemon:
        coro._make_daemon()
    _running.add(coro)
    # If the loop is closed before the coro has run, _run() is never called. So this callback, too, records that the
    # thread has ended.
    coro.add_done_callback(lambda _: _note_end(coro, running), context=contextvars.Context())
    if isinstance(thread, threading.Thread) and _current_or_none() is None:
        # Thread.start() waits until the new thread is running. A coro cannot run before this task or callback returns,
        # so mark it as running now.
        thread._ident = coro.id  # type: ignore[attr-defined]
        thread._started.set()  # type: ignore[attr-defined]
    return coro


def _note_end(coro: Any, running: Running) -> None:
    _running.discard(coro)
    running.finish()


def start_new_thread(function: Callable[..., object], args: Any, kwargs: Any = None, /) -> int:
    """Start a new thread, which is a coro where ``begins_coro`` says so, and return its identifier."""
    if not callable(function):
        raise TypeError("first arg must be callable")
    if not isinstance(args, tuple):
        raise TypeError("2nd arg must be a tuple")
    if kwargs is not None and not isinstance(kwargs, dict):
        raise TypeError("optional 3rd arg must be a dictionary")
    sys.audit("_thread.start_new_thread", function, args, kwargs)
    kwargs = kwargs or {}
    if not begins_coro(function):
        return _start_real(_run_real, (function, args, kwargs))
    running = Running()
    coro = _spawn(function, args, kwargs, running)
    thread: Any = getattr(function, "__self__", None)
    if not HAS_HANDLES and isinstance(thread, threading.Thread):
        # This makes is_alive() true from now on, and keeps threading from waiting for the thread at exit.
        thread._tstate_lock = Sentinel(running, coro)  # type: ignore[attr-defined]
        thread._set_tstate_lock = _do_nothing  # type: ignore[attr-defined]
    ident: int = coro.id
    return ident


def _do_nothing() -> None:
    pass


def _run_real(function: Callable[..., object], args: Any, kwargs: Any) -> None:
    try:
        function(*args, **kwargs)
    except BaseException as exc:
        _report(function, exc)
    finally:
        sentinel = _sentinels.pop(_real_ident(), None)
        if sentinel is not None:
            sentinel.finish()


def set_sentinel() -> Sentinel:
    """Return the sentinel lock that tells threading when the current thread ends."""
    sentinel = _sentinels[_real_ident()] = Sentinel()
    return sentinel


def start_joinable_thread(function: Callable[[], object], handle: Any = None, daemon: bool = True) -> Any:
    """Start a new thread, which is a coro where ``begins_coro`` says so, and return its handle."""
    if not callable(function):
        raise TypeError("thread function must be callable")
    if handle is None:
        handle = ThreadHandle()
    elif not isinstance(handle, ThreadHandle):
        if isinstance(handle, _RealHandle):
            return _start_joinable(function, handle=handle, daemon=daemon)
        raise TypeError("'handle' must be a _ThreadHandle")
    sys.audit("_thread.start_joinable_thread", function, daemon, handle)
    running = handle.begin()
    try:
        if begins_coro(function):
            handle.begin_coro(_spawn(function, (), {}, running, is_daemon=daemon))
        else:
            handle.begin_real(_RealHandle())
            _start_joinable(lambda: _run(function, (), {}, running), handle=handle._real, daemon=daemon)
    except BaseException:
        handle.fail()
        raise
    return handle


def make_thread_handle(ident: int) -> ThreadHandle:
    """Return a handle for a running thread: for the main thread, or for a thread that threading has not started."""
    coro = _current_or_none()
    if coro is None or coro.id != ident:
        return ThreadHandle.around(_make_real_handle(ident))
    handle = ThreadHandle()
    running = handle.begin()
    handle.begin_coro(coro)
    coro.add_done_callback(lambda _: running.finish(), context=contextvars.Context())
    return handle


def set_name(name: str) -> None:
    """Set the system's name of a real thread. A coro must not change the name of the thread that runs it."""
    if _current_or_none() is None:
        _set_real_name(name)


def excepthook(args: Any, /) -> None:
    """Report an exception of ``Thread.run``.

    If a coro was shut down or cancelled, nothing is reported. A KeyboardInterrupt, which real threads never get, is
    passed on to the loop.
    """
    coro = _current_or_none()
    if coro is not None and issubclass(args.exc_type, CancelledError):
        return
    if coro is not None and issubclass(args.exc_type, KeyboardInterrupt):
        _interrupted[coro] = args.exc_value or args.exc_type()
        return
    if coro is not None and args.thread is None:
        # Without a thread in `args`, the original would print the identifier of the real thread.
        thread = types.SimpleNamespace(name=str(coro.id))
        args = threading.ExceptHookArgs((args.exc_type, args.exc_value, args.exc_traceback, thread))
    _excepthook(args)


# ---------------------------------------------------------------- real threads

_real_names = dict(vars(threading))
for _kind in ("Condition", "Semaphore", "BoundedSemaphore", "Event", "Barrier"):
    _originals.clone_class(_real_names[_kind], _real_names)


def _start_really(self: Any) -> None:
    """Start a real thread, even if a coro calls this.

    This must not let other coros run, because callers may hold real locks.
    """
    if not self._started.is_set():
        self._started = _real_names["Event"]()
    threading.Thread.start(self)


class RealThread(threading.Thread):
    """A thread that is always a real one, even if a coro starts it. Coros may join it."""

    _grapeshot_is_real = True
    start = _start_really


RealThread.__name__ = RealThread.__qualname__ = "Thread"


def _current_real_thread() -> threading.Thread:
    """``threading.current_thread()`` for modules that keep the originals: returns the real thread, even in a coro."""
    return threading._active.get(_real_ident()) or threading.current_thread()  # type: ignore[attr-defined]


def _show_real_threads() -> None:
    for name in ("Condition", "Semaphore", "BoundedSemaphore", "Event", "Barrier"):
        _originals.show("threading", name, _real_names[name])
    _originals.show("threading", "Thread", RealThread)
    _originals.show("threading", "current_thread", _current_real_thread)
    _originals.show("threading", "currentThread", _current_real_thread)


def _forget_dummies() -> None:
    """Make threading drop a coro's dummy Thread object when the coro ends.

    threading makes such an object if ``current_thread`` is called in a coro that was not started as a Thread.
    """
    module: Any = threading
    if hasattr(module, "_thread_local_info"):
        # Versions of threading that have `_thread_local_info` delete the dummy when this thread-local data is freed.
        # Make the data local to coros, so that it is freed when the coro ends.
        module._thread_local_info = local()
        return
    kind = module._DummyThread
    real_init = kind.__init__

    def __init__(self: Any) -> None:  # noqa: N807
        real_init(self)
        coro = _current_or_none()
        if coro is not None:
            coro.add_done_callback(_forget_dummy, context=contextvars.Context())

    kind.__init__ = __init__


def _forget_dummy(coro: Any) -> None:
    threading._active.pop(coro.id, None)  # type: ignore[attr-defined]


def _ensure_thread_object() -> None:
    """Before a fork, make threading create a Thread object for the running coro, if it has none.

    Without such an object, threading's code in the child takes the coro for the main thread. The coro's id is not the
    ident of the main thread, so that code fails, and does not drop the threads of the parent.
    """
    if _current_or_none() is not None:
        threading.current_thread()


def _keep_process_pools_real() -> None:
    """Make the thread that manages a ProcessPoolExecutor a real one, because it waits on pipes."""
    module = sys.modules.get("concurrent.futures.process")
    manager: Any = getattr(module, "_ExecutorManagerThread", None)
    if manager is not None:
        manager._grapeshot_is_real = True
        manager.start = _start_really


# ---------------------------------------------------------------- polling


def _yield_after_failure(kind: Any, name: str) -> None:
    """Patch a method: after a few calls in a row that return False, the coro yields."""
    method = getattr(kind, name)

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        if not result:
            _waits.note_poll()
        return result

    setattr(kind, name, call)


def _wait(self: Any, timeout: float | None = None) -> bool:
    """Replaces ``threading.Condition.wait``, which does not expect to be interrupted.

    The wait of a coro may be interrupted. If a waiter is interrupted after it was notified, the notification goes to
    another waiter. A waiter that is notified after its time is over, but before it has the lock again, counts as
    notified.
    """
    if not self._is_owned():
        raise RuntimeError("cannot wait on un-acquired lock")
    waiter: Any = _core.thread_lock()
    waiter.acquire()
    self._waiters.append(waiter)
    state = self._release_save()
    is_notified = False
    try:
        if timeout is None:
            is_notified = waiter.acquire()
        elif timeout > 0:
            is_notified = waiter.acquire(True, timeout)
        else:
            is_notified = waiter.acquire(False)
    except BaseException:
        self._acquire_restore(state)
        if not _leave(self._waiters, waiter):
            self.notify()
        raise
    self._acquire_restore(state)
    return is_notified or not _leave(self._waiters, waiter)


def _leave(waiters: Any, waiter: Any) -> bool:
    """Remove the waiter. Return False if ``notify`` has removed it."""
    try:
        waiters.remove(waiter)
    except ValueError:
        return False
    return True


def undisturbed(kind: Any, name: str) -> None:
    """Patch a method such as ``release``: an interruption does not end its wait for the object's internal lock.

    Otherwise a timeout could lose, for example, a permit of a semaphore. The internal lock is never held for long.
    """
    method = getattr(kind, name)

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        before = _core._coro_set_undisturbed(True)
        try:
            return method(*args, **kwargs)
        finally:
            _core._coro_set_undisturbed(before)

    setattr(kind, name, call)


def _patch_polls(module: Any) -> None:
    """Let other coros run when code polls in a loop. This covers events and barriers too, which use conditions.

    Only methods that wait may yield, because callers of such methods must be prepared for an interruption anyway. The
    other methods, such as ``release``, are made :func:`undisturbed`.
    """
    module.Condition.wait = functools.wraps(module.Condition.wait)(_wait)
    _yield_after_failure(module.Condition, "wait")
    _yield_after_failure(module.Semaphore, "acquire")
    for kind, names in (
        (module.Semaphore, ("release", "__exit__")),
        (module.BoundedSemaphore, ("release",)),
        (module.Event, ("set", "clear")),
    ):
        for name in names:
            undisturbed(kind, name)


class _AllocateLock:
    """Replaces ``_thread.allocate_lock`` up to Python 3.12. Pickles refer to it by its name.

    Like the builtin, it does not become a method when it is a class attribute.
    """

    __module__ = "_thread"
    __name__ = "allocate_lock"

    def __call__(self) -> Any:
        return _core.thread_lock()

    def __reduce__(self) -> str:
        return self.__name__


# ---------------------------------------------------------------- patching


def _replacements() -> dict[str, dict[str, Any]]:
    lock, rlock = _core.thread_lock, _core.thread_rlock
    allocate = lock if HAS_HANDLES else _AllocateLock()
    low: dict[str, Any] = {
        "allocate_lock": allocate,
        "allocate": allocate,
        "LockType": lock,
        "RLock": rlock,
        "_local": local,
        "get_ident": get_ident,
        "start_new_thread": start_new_thread,
        "start_new": start_new_thread,
        "_count": count,
    }
    high: dict[str, Any] = {
        "_allocate_lock": allocate,
        "Lock": allocate,
        "_CRLock": rlock,
        "local": local,
        "get_ident": get_ident,
        "enumerate": enumerate_threads,
        "active_count": active_count,
    }
    if HAS_HANDLES:
        low["lock"] = lock
        handles = {
            "start_joinable_thread": start_joinable_thread,
            "_make_thread_handle": make_thread_handle,
            "_ThreadHandle": ThreadHandle,
        }
        low |= handles
        high |= {f"_{name.lstrip('_')}": new for name, new in handles.items()}
        high["_LockType"] = lock
    else:
        low["_set_sentinel"] = high["_set_sentinel"] = set_sentinel
        high["_start_new_thread"] = start_new_thread
    if _set_real_name is not None:
        low["set_name"] = high["_set_name"] = set_name
    if threading.excepthook is _excepthook:
        high["excepthook"] = excepthook
    # Programs assign this to threading.excepthook to restore the default.
    high["__excepthook__"] = excepthook
    return {"_thread": low, "threading": high}


def patch() -> None:
    """Replace the names.

    ``_active_limbo_lock`` and ``_shutdown_locks_lock`` of threading stay real locks. A coro is hardly ever suspended
    while it holds one of them (only a finalizer could do that), so no thread waits for them for long. Also, the start
    of a real thread acquires ``_active_limbo_lock``, and must not let other coros run.
    """
    import concurrent.futures.process  # noqa: F401

    _handles.watch_running_threads()
    for module_name, names in _replacements().items():
        for name, new in names.items():
            if hasattr(sys.modules[module_name], name):
                _originals.replace(module_name, name, new)
    if not HAS_HANDLES:
        threading.Thread._wait_for_tstate_lock = _handles.wait_for_tstate_lock  # type: ignore[attr-defined]
    _import_hooks.after_import("threading", _patch_polls)
    _import_hooks.after_import("logging", _logging.patch)
    _forget_dummies()
    if HAS_HANDLES:
        os.register_at_fork(before=_ensure_thread_object)
    _show_real_threads()
    _keep_process_pools_real()
    _import_locks.patch()
    _idents.patch()
