"""The source of the profiler's events: ``sys.monitoring``, or before Python 3.12 ``sys.setprofile``.

The callbacks are installed only while a profile is being taken. No events are reported inside the callbacks.
"""

from __future__ import annotations

import dis
import inspect
import sys
import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType
    from typing import Any

    from ._collector import Collector

_NAME = "grapeshot.insight.profiler"
_C_FUNCTIONS = (
    type(len),  # also the type of the bound methods of built-in objects, such as [].append
    type(str.join),
    type(str.__add__),
    type("".__add__),
    type(dict.__dict__["fromkeys"]),
)


def _c_name(function: Any) -> str:
    name: str = getattr(function, "__qualname__", None) or function.__name__
    module = getattr(function, "__module__", None)
    return f"{module}.{name}" if isinstance(module, str) and module != "builtins" else name


if sys.version_info >= (3, 12):
    THREADS = "all threads"

    def install(collector: Collector) -> None:
        """Send all events of the process to the collector. Raises RuntimeError if another profiler is active."""
        monitoring = sys.monitoring
        tool = monitoring.PROFILER_ID
        try:
            monitoring.use_tool_id(tool, _NAME)
        except ValueError:
            other = monitoring.get_tool(tool)
            raise RuntimeError(f"another profiler is already active in sys.monitoring: {other!r}") from None
        for event, callback in _callbacks(collector).items():
            monitoring.register_callback(tool, event, callback)
        events = monitoring.events
        monitoring.set_events(
            tool,
            events.PY_START
            | events.PY_RESUME
            | events.PY_THROW
            | events.PY_RETURN
            | events.PY_YIELD
            | events.PY_UNWIND
            | events.CALL,
        )

    def uninstall() -> None:
        """Stop the events, unless they have been stopped already."""
        monitoring = sys.monitoring
        tool = monitoring.PROFILER_ID
        if monitoring.get_tool(tool) != _NAME:
            return
        monitoring.set_events(tool, 0)
        for name in ("PY_START", "PY_RESUME", "PY_THROW", "PY_RETURN", "PY_YIELD", "PY_UNWIND"):
            monitoring.register_callback(tool, getattr(monitoring.events, name), None)
        for name in ("CALL", "C_RETURN", "C_RAISE"):
            monitoring.register_callback(tool, getattr(monitoring.events, name), None)
        monitoring.free_tool_id(tool)

    def _callbacks(collector: Collector) -> dict[int, Callable[..., object]]:
        enter, leave, enter_c, leave_c = collector.enter, collector.leave, collector.enter_c, collector.leave_c

        def begins(code: CodeType, _offset: int) -> None:
            enter(code, is_call=True)

        def goes_on(code: CodeType, _offset: int, _error: object = None) -> None:
            enter(code, is_call=False)

        def ends(code: CodeType, _offset: int, _value: object) -> None:
            leave(code, is_yield=False)

        def yields(code: CodeType, _offset: int, _value: object) -> None:
            leave(code, is_yield=True)

        def calls(_code: CodeType, _offset: int, function: object, _argument: object) -> None:
            if isinstance(function, _C_FUNCTIONS):
                enter_c(_c_name(function))

        def returns(_code: CodeType, _offset: int, function: object, _argument: object) -> None:
            if isinstance(function, _C_FUNCTIONS):
                leave_c(_c_name(function))

        events = sys.monitoring.events
        return {
            events.PY_START: begins,
            events.PY_RESUME: goes_on,
            events.PY_THROW: goes_on,
            events.PY_RETURN: ends,
            events.PY_YIELD: yields,
            events.PY_UNWIND: ends,
            events.CALL: calls,
            events.C_RETURN: returns,
            events.C_RAISE: returns,
        }

else:
    THREADS = "this thread and threads started during the profile"

    def install(collector: Collector) -> None:
        """Send the events of this thread, and of threads started from now on.

        Raises RuntimeError if a profiler is active.
        """
        other = sys.getprofile() or threading.getprofile()
        if other is not None:
            raise RuntimeError(f"another profiler is already active in sys.setprofile: {other!r}")
        callback = _callback(collector)
        threading.setprofile(callback)
        sys.setprofile(callback)

    def uninstall() -> None:
        """Stop the events. In other threads, the callback removes itself."""
        sys.setprofile(None)
        threading.setprofile(None)

    _GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
    _YIELD = dis.opmap["YIELD_VALUE"]
    _RESUME = dis.opmap["RESUME"]

    def _is_begin(frame: FrameType) -> bool:
        """Whether a frame is entered for the first time. If not, a generator or coroutine is being resumed."""
        code = frame.f_code
        if not code.co_flags & _GENERATORS:
            return True
        at, text = frame.f_lasti, code.co_code
        return at >= 0 and text[at] == _RESUME and text[at + 1] == 0

    def _is_yield(frame: FrameType) -> bool:
        code = frame.f_code
        return bool(code.co_flags & _GENERATORS) and code.co_code[frame.f_lasti] == _YIELD

    def _callback(collector: Collector) -> Callable[[FrameType, str, Any], None]:
        def callback(frame: FrameType, event: str, argument: Any) -> None:
            if collector.has_ended:
                sys.setprofile(None)
            elif event == "call":
                collector.enter(frame.f_code, is_call=_is_begin(frame))
            elif event == "return":
                collector.leave(frame.f_code, is_yield=_is_yield(frame))
            elif event == "c_call":
                collector.enter_c(_c_name(argument))
            else:
                collector.leave_c(_c_name(argument))

        return callback
