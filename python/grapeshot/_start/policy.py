"""The event loop policy, for the Python versions that have policies (up to 3.15).

The first use of ``grapeshot.EventLoopPolicy`` imports this module, and so does ``grapeshot.install()`` where there are
policies. The import raises ImportError if this Python's asyncio has none.
"""

from __future__ import annotations

import asyncio

from grapeshot._loop import Loop, new_event_loop

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    _Base = Any
else:
    # Python 3.14 gave the class a private name.
    for _name in ("_BaseDefaultEventLoopPolicy", "BaseDefaultEventLoopPolicy"):
        if _name in vars(asyncio.events):
            _Base = vars(asyncio.events)[_name]
            break
    else:
        raise ImportError(
            "this Python's asyncio has no event loop policies; use grapeshot.run() or grapeshot.install()"
        )


class EventLoopPolicy(_Base):  # type: ignore[misc]  # the name of the base depends on the Python version
    """asyncio's default policy, except that it makes a :class:`grapeshot.Loop`.

    ``get_event_loop`` and ``set_event_loop`` apply to the calling thread, and behave as in the default policy of the
    running Python. There are no child watchers (deprecated, removed in Python 3.14), because a grapeshot loop does not
    need them.
    """

    def _loop_factory(self) -> Loop:
        return new_event_loop()
