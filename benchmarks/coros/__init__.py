"""Coros beside greenlet, gevent, greenback and asyncio's tasks: `python -m benchmarks.coros`."""
