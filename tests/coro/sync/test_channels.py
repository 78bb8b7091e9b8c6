"""Channels: senders and receivers wait for each other; interruptions lose no value."""

from __future__ import annotations

import asyncio
import functools

import pytest
from support import coro_is_available, spawn_blocked

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import coro


def in_coro(test):
    """Return a test that runs `test` as the first coro of a loop."""

    @functools.wraps(test)
    def run():
        coro.run(test)

    return run


@in_coro
def test_senders_wait_for_receivers_in_order():
    channel = coro.channel()
    senders = [spawn_blocked(channel.send, number) for number in range(3)]
    assert channel.balance == 3
    for number in range(3):
        assert channel.receive() == number
        # The sender is now at the end of the ready queue.
        assert not senders[number].done()
        coro.yield_slice()
        assert senders[number].done()
    assert channel.balance == 0


@in_coro
def test_receivers_wait_for_senders_in_order():
    channel = coro.channel()
    receivers = [spawn_blocked(channel.receive) for _ in range(3)]
    assert channel.balance == -3
    for number in range(3):
        channel.send(number)
        assert channel.balance == number - 2
        assert not receivers[number].done()
    assert [receiver.join() for receiver in receivers] == [0, 1, 2]


@in_coro
def test_any_object_can_be_sent():
    channel = coro.channel()
    values = [None, (), KeyError("a value"), KeyError, channel]
    sender = coro.spawn(channel.send_sequence, iter(values))
    assert [channel.receive() for _ in values] == values
    assert sender.join() == len(values)


@in_coro
def test_exceptions_are_raised_in_the_receiver():
    channel = coro.channel()
    receiver = spawn_blocked(channel.receive)
    channel.send_exception(LookupError, "lost", 7)
    with pytest.raises(LookupError) as caught:
        receiver.join()
    assert caught.value.args == ("lost", 7)
    error = OSError("mine")
    sender = spawn_blocked(channel.send_exception, error)
    with pytest.raises(OSError, match="mine") as caught:
        channel.receive()
    assert caught.value is error
    assert sender.join() is None
    for wrong in (["text"], [int], [LookupError("made"), "and arguments"], []):
        with pytest.raises(TypeError):
            channel.send_exception(*wrong)
    assert channel.balance == 0


@in_coro
def test_an_iteration_ends_when_the_channel_is_closed():
    channel = coro.channel()

    def produce():
        channel.send_sequence(range(4))
        channel.close()

    coro.spawn(produce)
    assert list(channel) == [0, 1, 2, 3]
    assert list(channel) == []
    assert (channel.closing, channel.closed) == (True, True)


@in_coro
def test_an_iteration_raises_even_a_ClosedError_that_was_sent():
    channel = coro.channel()
    spawn_blocked(channel.send_exception, coro.ClosedError, "another one")
    with pytest.raises(coro.ClosedError, match="another one"):
        next(channel)


@in_coro
def test_close_keeps_pending_items_and_accepts_no_more():
    channel = coro.channel()
    spawn_blocked(channel.send, 1)
    spawn_blocked(channel.send, 2)
    channel.close()
    assert (channel.closing, channel.closed, channel.balance) == (True, False, 2)
    with pytest.raises(coro.ClosedError):
        channel.send(3)
    assert [channel.receive(), channel.receive()] == [1, 2]
    assert channel.closed
    with pytest.raises(coro.ClosedError):
        channel.receive()


@in_coro
def test_close_ends_receivers_that_wait():
    channel = coro.channel()
    receivers = [spawn_blocked(channel.receive) for _ in range(2)]
    in_loop = spawn_blocked(list, channel)
    channel.send("last")
    channel.close()
    assert receivers[0].join() == "last"
    with pytest.raises(coro.ClosedError):
        receivers[1].join()
    assert in_loop.join() == []


@in_coro
def test_calls_outside_of_coros_succeed_if_they_need_not_wait():
    channel = coro.channel()
    receiver = spawn_blocked(channel.receive)
    loop = asyncio.get_running_loop()
    log = []

    def callback():
        channel.send("from a callback")
        with pytest.raises(coro.YieldFromMain):
            channel.send("nobody receives")
        with pytest.raises(coro.YieldFromMain):
            channel.receive()
        log.append(channel.balance)

    loop.call_soon(callback)
    assert receiver.join() == "from a callback"
    assert log == [0]

    async def task():
        return channel.receive()

    spawn_blocked(channel.send, "for a task")
    assert coro.await_(asyncio.create_task(task())) == "for a task"


# ---- interruptions

WAYS = {
    "interrupt": lambda co: co.interrupt(1),
    "shutdown": lambda co: co.shutdown(),
    "raise_exception": lambda co: co.raise_exception(coro.WakeUp),
    "cancel": lambda co: co.cancel(),
}
INTERRUPTIONS = (coro.CoroCancelled, coro.WakeUp, coro.TimeoutError) if coro_is_available() else ()


@pytest.mark.parametrize("way", WAYS)
def test_the_balance_is_right_at_once(way):
    def main():
        channel = coro.channel()
        senders = [spawn_blocked(channel.send, number) for number in range(4)]
        WAYS[way](senders[1])
        assert channel.balance == 3
        WAYS[way](senders[3])
        assert channel.balance == 2
        assert [channel.receive(), channel.receive()] == [0, 2]
        for sender in senders[1::2]:
            with pytest.raises(INTERRUPTIONS):
                sender.join()
                sender.result()
        receivers = [spawn_blocked(channel.receive) for _ in range(3)]
        WAYS[way](receivers[0])
        assert channel.balance == -2
        channel.send("x")
        channel.send("y")
        assert channel.balance == 0
        assert [receiver.join() for receiver in receivers[1:]] == ["x", "y"]
        with pytest.raises(INTERRUPTIONS):
            receivers[0].join()
            receivers[0].result()

    coro.run(main)


@pytest.mark.parametrize("way", WAYS)
def test_a_value_on_its_way_to_an_interrupted_receiver_goes_to_the_next(way):
    def main():
        channel = coro.channel()
        first, second = spawn_blocked(channel.receive), spawn_blocked(channel.receive)
        channel.send("value")
        WAYS[way](first)
        assert second.join() == "value"
        with pytest.raises(INTERRUPTIONS):
            first.join()
            first.result()
        assert channel.balance == 0

    coro.run(main)


@pytest.mark.parametrize("way", WAYS)
def test_a_value_on_its_way_stays_for_a_later_receiver(way):
    def main():
        channel = coro.channel()
        receiver = spawn_blocked(channel.receive)
        channel.send("value")
        WAYS[way](receiver)
        with pytest.raises(INTERRUPTIONS):
            receiver.join()
            receiver.result()
        # The sender has continued, and the next receiver gets the value without waiting.
        assert channel.balance == 1
        later = spawn_blocked(channel.send, "later")
        assert channel.balance == 2
        assert [channel.receive(), channel.receive()] == ["value", "later"]
        later.join()

    coro.run(main)


@pytest.mark.parametrize("way", WAYS)
def test_a_sender_that_was_interrupted_too_late_has_sent(way):
    def main():
        channel = coro.channel()
        sender = spawn_blocked(channel.send, "value")
        assert channel.receive() == "value"
        WAYS[way](sender)
        with pytest.raises(INTERRUPTIONS):
            sender.join()
            sender.result()
        assert channel.balance == 0

    coro.run(main)


@in_coro
def test_values_are_received_in_the_order_of_sending_though_a_woken_receiver_runs_late():
    """One receiver is woken for a value. Before it runs, another coro receives, and gets that value. The woken receiver
    gets the next value.
    """
    channel = coro.channel()
    order = []

    def pass_by():
        order.append(channel.receive())
        # The woken receiver has already been given the value 2, so interrupting the sender does not take 2 back.
        sender.interrupt()

    woken = spawn_blocked(channel.receive)
    sender = coro.spawn(channel.send, 2)
    passer = coro.spawn(pass_by)
    channel.send(1)  # the woken receiver is in the ready queue after the other two
    order.append(woken.join(10))
    passer.join()
    assert order == [1, 2]
    assert sender.join() is None
    assert sender.cancelled()
    assert channel.balance == 0


@in_coro
def test_timeouts():
    channel = coro.channel()
    with pytest.raises(coro.TimeoutError):
        coro.with_timeout(0.001, channel.receive)
    with pytest.raises(coro.TimeoutError):
        coro.with_timeout(0.001, channel.send, "taken back")
    assert channel.balance == 0
    coro.spawn(channel.send, "in time")
    assert coro.with_timeout(60, channel.receive) == "in time"


class Waits:
    """An object whose finalizer waits."""

    def __init__(self, log):
        self.log = log

    def __del__(self):
        with pytest.raises(coro.TimeoutError):
            coro.fifo().pop(timeout=0.001)
        self.log.append("waited")


@in_coro
def test_an_unsent_value_whose_finalizer_waits():
    """An interruption is pending before the sender waits, so the value is not sent. The value's finalizer may wait."""
    log = []
    channel = coro.channel()

    def send():
        coro.current().cancel()
        channel.send_sequence(Waits(log) for _ in range(1))

    sender = coro.spawn(send)
    assert sender.join() is None
    assert sender.cancelled()
    assert log == ["waited"]
    assert channel.balance == 0
    receiver = spawn_blocked(channel.receive)
    channel.send("value")
    assert receiver.join() == "value"


@in_coro
def test_a_value_that_an_interrupted_wait_has_left_may_wait_in_its_finalizer():
    """A waiting coro gets a value, but is interrupted before it runs. Its next wait, `acquire`, frees the value. The
    value's finalizer releases the semaphore, so `acquire` must then check again whether the coro has to wait.
    """
    semaphore = coro.semaphore(0)
    condition = coro.condition_variable()

    class Releases:
        def __del__(self):
            semaphore.release()
            coro.yield_slice()

    def wait_twice():
        with pytest.raises(coro.Interrupted):
            condition.wait()
        return semaphore.acquire(timeout=10)

    waiter = spawn_blocked(wait_twice)
    condition.wake_all(Releases())
    waiter.interrupt()
    coro.yield_slice()
    assert waiter.join(1) is True
