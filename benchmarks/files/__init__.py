"""Compare libraries that tasks use to read and write files: `python -m benchmarks.files`."""
