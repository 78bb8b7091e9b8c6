"""Compare coros with greenlet, gevent, runloom, greenback and asyncio's tasks: `python -m benchmarks.coros`."""
