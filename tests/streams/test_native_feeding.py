"""Repeat tests of test_feeding.py with the readers and protocols of grapeshot.streams."""

from __future__ import annotations

import pytest
from streams import readers
from streams.test_feeding import (  # noqa: F401
    test_a_buffer_of_another_type,
    test_a_reader_is_not_kept,
    test_a_reader_that_is_gone,
    test_a_transport_that_fails_to_pause,
    test_a_view_of_the_buffer,
    test_a_view_of_the_buffer_when_a_large_read_is_due,
    test_a_waiter_that_is_done,
    test_a_waiting_reader_is_woken,
    test_another_protocol_and_back,
    test_any_object_may_wait,
    test_cancelled_in_the_same_iteration,
    test_data_after_feed_eof,
    test_data_received_of_the_object,
    test_end_of_stream,
    test_end_of_stream_when_a_large_read_is_due,
    test_from_a_pipe,
    test_large_reads_after_buffered_data,
    test_no_python_code_runs,
    test_over_tls,
    test_paused_beyond_twice_the_limit,
    test_reading_that_the_user_has_paused,
    test_sizes_from_one_to_beyond_every_buffer,
    test_the_buffer_stays_the_same_object,
    test_the_reader_of_a_protocol_replaced,
    test_the_transport_of_a_reader_replaced,
    test_unusual_limits,
    test_waiters_of_other_types,
    test_woken_in_order_with_other_callbacks,
)

import grapeshot.streams


@pytest.fixture(autouse=True)
def _native(monkeypatch):
    monkeypatch.setattr(readers, "usual", grapeshot.streams)
