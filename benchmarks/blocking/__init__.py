"""Blocking-style servers on coros beside those of their peers: `python -m benchmarks.blocking`."""
