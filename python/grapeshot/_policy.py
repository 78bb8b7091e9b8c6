"""The event loop policy, on the Python versions that have policies (up to 3.15).

Imported on the first use of ``grapeshot.EventLoopPolicy`` or ``grapeshot.install()``; raises ImportError if
this Python's asyncio has no policies any more.
"""

from __future__ import annotations

import asyncio

from ._loop import Loop, new_event_loop

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    _Base = Any
else:
    # Python 3.14 moved the class to the private name and warns about the public one.
    for _name in ("_BaseDefaultEventLoopPolicy", "BaseDefaultEventLoopPolicy"):
        if _name in vars(asyncio.events):
            _Base = vars(asyncio.events)[_name]
            break
    else:
        raise ImportError(
            "this Python's asyncio has no event loop policies; use grapeshot.run() or grapeshot.install()"
        )


class EventLoopPolicy(_Base):  # type: ignore[misc]  # its base has another name in each Python version
    """asyncio's default policy with :class:`grapeshot.Loop` as the loop that it makes.

    ``get_event_loop`` and ``set_event_loop`` behave as in asyncio's own policy of the running Python, thread by thread.
    Child watchers (deprecated, removed in Python 3.14) are not part of it: a grapeshot loop needs none.
    """

    def _loop_factory(self) -> Loop:
        return new_event_loop()
