"""``python -m grapeshot.gevent PROGRAM``: run a program patched by gevent, with gevent on a grapeshot loop."""

from __future__ import annotations

import gevent.monkey  # type: ignore[import-untyped]

from ._loop import Loop

if __name__ == "__main__":
    gevent.config.loop = Loop
    gevent.monkey.main()
