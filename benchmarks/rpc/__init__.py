"""Compare calls between processes with grpc.aio and rpyc: `python -m benchmarks.rpc`."""
