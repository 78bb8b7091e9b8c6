"""The memory of Python frames in coros."""

from __future__ import annotations

import resource

import pytest
from support import coro_is_available

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import coro

DEPTHS, CALLS = 40, 500


@pytest.mark.parametrize("stack", ["shared", "own"])
def test_calls_at_the_end_of_a_chunk_map_no_memory(stack):
    """CPython keeps Python frames in chunks of memory. For a frame that does not fit into the current chunk, CPython
    maps a new chunk, and unmaps it when the frame ends. grapeshot keeps such chunks for the next call.
    """

    def leaf():
        pass

    def descend(left):
        if left:
            descend(left - 1)
        for _ in range(CALLS):
            leaf()

    def count_faults():
        descend(DEPTHS)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        descend(DEPTHS)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    # The first use of a new mapping causes a page fault. Without a reserve of chunks there would be CALLS or more
    # faults.
    assert coro.run(lambda: coro.spawn(count_faults, stack=stack).join()) < CALLS / 2
