"""Compare files that tasks read and write: `python -m benchmarks.files`."""
