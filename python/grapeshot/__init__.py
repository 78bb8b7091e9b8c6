"""grapeshot: an asyncio event loop with a native core.

There are four ways to use it, from the shortest to the most explicit::

    grapeshot.install()                                        # asyncio.run() uses grapeshot from now on
    grapeshot.run(main())                                      # run one program, install nothing
    asyncio.run(main(), loop_factory=grapeshot.new_event_loop) # the same with asyncio's function (Python 3.12+)
    loop = grapeshot.new_event_loop()                          # a loop to run by hand

Importing the package changes nothing in asyncio; only :func:`install` does, and :func:`uninstall` undoes it.

Some names are loaded on first use, so that importing the package stays fast:

- ``__version__``, which is read from the installed metadata;
- ``EventLoopPolicy``, which exists only on Python versions that have event loop policies, and which causes no
  deprecation warning;
- ``streams``, a module with asyncio's streams in native code;
- ``Statistics``, the type that ``loop.statistics()`` returns;
- ``tree()``, which shows every coro and task with what it waits for;
- ``accounting()``, which shows who uses CPU time, descriptors and memory;
- ``backdoor``, a Python prompt inside a running process;
- ``profiler``, which shows where CPU time is used and where coros and tasks wait.
"""

from ._limits import LimitError
from ._loop import Loop, new_event_loop
from ._run import install, run, uninstall

TYPE_CHECKING = False
if TYPE_CHECKING:
    from . import backdoor as backdoor
    from . import profiler as profiler
    from . import streams as streams
    from ._accounting import accounting as accounting
    from ._policy import EventLoopPolicy as EventLoopPolicy
    from ._statistics import Statistics as Statistics
    from ._tree import tree as tree

    __version__: str

__all__ = ["LimitError", "Loop", "install", "new_event_loop", "run", "uninstall"]

_LAZY_NAMES = ("EventLoopPolicy", "Statistics", "__version__", "accounting", "backdoor", "profiler", "streams", "tree")

if not TYPE_CHECKING:  # a type checker sees the names above, and still reports any other name

    def __getattr__(name):
        if name == "__version__":
            from importlib.metadata import version

            value = version("grapeshot")
        elif name == "streams":
            import grapeshot.streams as value
        elif name == "EventLoopPolicy":
            try:
                from . import _policy
            except ImportError as exc:
                raise AttributeError(f"module {__name__!r} has no attribute {name!r}: {exc}") from None
            value = _policy.EventLoopPolicy
        elif name == "Statistics":
            from . import _statistics

            value = _statistics.Statistics
        elif name == "accounting":
            from ._accounting import accounting as value
        elif name == "tree":
            from ._tree import tree as value
        elif name == "backdoor":
            import grapeshot.backdoor as value
        elif name == "profiler":
            import grapeshot.profiler as value
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value

    def __dir__():
        return sorted({*globals(), *_LAZY_NAMES})
