"""Comparisons of grapeshot with uvloop, asyncio and a raw epoll server: see README.md in this folder."""
