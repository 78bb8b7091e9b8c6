"""Look inside a running program: its tasks and coros, descriptors, memory and CPU time, and how long things take.

:func:`tree`
    Tasks, coros, timers, sockets and threads at this moment. Each task and coro is shown with the object it waits for.
:func:`accounting`
    CPU time, descriptors and memory, listed by owner.
:mod:`grapeshot.insight.backdoor`
    A Python prompt in a running process.
:mod:`grapeshot.insight.profiler`
    Where CPU time is used, and where tasks and coros wait.
:mod:`grapeshot.insight.otel`
    The loop's counters as OpenTelemetry metrics.

The loop's own methods are :meth:`Loop.statistics() <grapeshot.Loop.statistics>`,
:meth:`~grapeshot.Loop.measure_callbacks`, :meth:`~grapeshot.Loop.add_slow_listener` and
:meth:`~grapeshot.Loop.set_cpu_accounting`; this package has the classes of their results. The commands for a shell are
``python -m grapeshot attach``, ``top``, ``tree`` and ``profile``.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from . import backdoor as backdoor
    from . import profiler as profiler
    from ._accounting import Accounting as Accounting
    from ._accounting import Memory as Memory
    from ._accounting import accounting as accounting
    from ._charges import Cpu as Cpu
    from ._charges import CpuTally as CpuTally
    from ._descriptors import Descriptor as Descriptor
    from ._measuring import SlowCallback as SlowCallback
    from ._statistics import Histogram as Histogram
    from ._statistics import Statistics as Statistics
    from ._subjects import Subject as Subject
    from ._tally import Tally as Tally
    from ._tree import Socket as Socket
    from ._tree import Thread as Thread
    from ._tree import Timer as Timer
    from ._tree import Tree as Tree
    from ._tree import tree as tree
    from ._waits import Node as Node

# Each module is imported when one of its names is first used. A loop needs only a few of the modules, and few programs
# use the others.
_MODULE_OF = {
    "Accounting": "_accounting",
    "Cpu": "_charges",
    "CpuTally": "_charges",
    "Descriptor": "_descriptors",
    "Histogram": "_statistics",
    "Memory": "_accounting",
    "Node": "_waits",
    "SlowCallback": "_measuring",
    "Socket": "_tree",
    "Statistics": "_statistics",
    "Subject": "_subjects",
    "Tally": "_tally",
    "Thread": "_tree",
    "Timer": "_tree",
    "Tree": "_tree",
    "accounting": "_accounting",
    "backdoor": "backdoor",
    "profiler": "profiler",
    "tree": "_tree",
}

__all__ = [*_MODULE_OF]  # noqa: PLE0604  # the keys are strings

if not TYPE_CHECKING:  # hidden from type checkers, which would otherwise accept names that do not exist

    def __getattr__(name):
        from importlib import import_module

        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = import_module(f"{__name__}.{_MODULE_OF[name]}")
        value = module if _MODULE_OF[name] == name else getattr(module, name)
        globals()[name] = value
        return value

    def __dir__():
        return sorted({*globals(), *_MODULE_OF})
