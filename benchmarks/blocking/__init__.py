"""Compare blocking-style servers and clients on coros with similar libraries: `python -m benchmarks.blocking`."""
