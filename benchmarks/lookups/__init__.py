"""Compare name lookups: `python -m benchmarks.lookups`."""
