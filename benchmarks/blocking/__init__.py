"""Compare coros with similar libraries, in blocking-style servers and clients: `python -m benchmarks.blocking`."""
