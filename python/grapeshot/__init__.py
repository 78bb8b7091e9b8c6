"""grapeshot: an asyncio event loop with a native core.

There are four ways to use it, from the shortest to the most explicit::

    grapeshot.install()                                        # asyncio.run() uses grapeshot from now on
    grapeshot.run(main())                                      # run one program, install nothing
    asyncio.run(main(), loop_factory=grapeshot.new_event_loop) # the same with asyncio's function (Python 3.12+)
    loop = grapeshot.new_event_loop()                          # a loop to run by hand

Importing the package changes nothing in asyncio. Only :func:`install` changes something there, and :func:`uninstall`
undoes it.

Some names are loaded on first use, so that importing the package stays fast:

- ``insight``, which shows what a running program does (its coros and tasks, CPU time, descriptors and memory), and has
  a profiler;
- ``files``, files that tasks read and write without a thread for each call;
- ``streams``, a module with asyncio's streams in native code;
- ``threads``, queues and calls between the loops of several threads;
- ``EventLoopPolicy``, which exists only on Python versions that have event loop policies, and which causes no
  deprecation warning;
- ``__version__``, which is read from the installed metadata.
"""

from ._loop import Loop, new_event_loop
from ._loop.limits import LimitError
from ._start.run import install, run, uninstall

TYPE_CHECKING = False
if TYPE_CHECKING:
    from . import files as files
    from . import insight as insight
    from . import streams as streams
    from . import threads as threads
    from ._start.policy import EventLoopPolicy as EventLoopPolicy

    __version__: str

__all__ = ["LimitError", "Loop", "install", "new_event_loop", "run", "uninstall"]

_LAZY_NAMES = ("EventLoopPolicy", "__version__", "files", "insight", "streams", "threads")

if not TYPE_CHECKING:  # hidden from type checkers, so that they report names that do not exist

    def __getattr__(name):
        from importlib import import_module

        if name not in _LAZY_NAMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name == "__version__":
            value = import_module("importlib.metadata").version("grapeshot")
        elif name == "EventLoopPolicy":
            try:
                value = import_module("grapeshot._start.policy").EventLoopPolicy
            except ImportError as exc:
                raise AttributeError(f"module {__name__!r} has no attribute {name!r}: {exc}") from None
        else:
            value = import_module(f"grapeshot.{name}")
        globals()[name] = value
        return value

    def __dir__():
        return sorted({*globals(), *_LAZY_NAMES})
