"""Calls between processes beside grpc.aio and rpyc: `python -m benchmarks.rpc`."""
