"""Compare libraries with which tasks read and write files: `python -m benchmarks.files`."""
