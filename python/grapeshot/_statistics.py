"""``loop.statistics()``: the loop's counters, which the native core keeps, put in order."""

from __future__ import annotations

from dataclasses import dataclass

from ._base import BaseLoop


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """How often durations of some length occurred. The error of what it tells of them is at most an eighth."""

    count: int
    sum_s: float
    max_s: float
    buckets: tuple[tuple[float, int], ...]
    """The ends of the intervals, in seconds and in order, with the number of durations in each that are below its end,
    and not below the one before it. Intervals without durations are left out."""

    def percentile(self, percent: float) -> float:
        """Return the end of the interval in which this percentage of all durations is reached, in seconds.

        It is 0.0 without durations, and never more than ``max_s``.
        """
        wanted = self.count * percent / 100
        seen = 0
        for end_s, number in self.buckets:
            seen += number
            if seen >= wanted:
                return min(end_s, self.max_s)
        return self.max_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """What a loop has done since it was made; :meth:`grapeshot.Loop.statistics` returns it.

    Names that end in ``_s`` are seconds, those with ``bytes`` are bytes, all others are counts. They never go down,
    except the gauges (``GAUGES`` has their names), which tell how many there are at this moment, or were at most.
    ``HISTOGRAMS`` has the names of the others that are no numbers.
    """

    GAUGES = frozenset(("ready", "most_ready", "timers", "coros", "pinned_coros"))
    HISTOGRAMS = frozenset(("callback_durations", "scheduling_delays"))

    iterations: int
    """Iterations of the loop."""
    polls: int
    """System calls that asked for events. Iterations with ready work skip some."""
    events: int
    """What these have returned: ready descriptors, wake-ups by other threads and signals."""
    callbacks: int
    """Handles that were taken from the ready queue: of ``call_soon``, timers, tasks' steps, readers and writers. A
    handle that was cancelled there counts; the methods of protocols do not, because no handle calls them."""
    ready: int
    """Gauge: what waits in the ready queue, coros and handles."""
    most_ready: int
    """The most that one iteration has found in the ready queue."""
    running_s: float
    """Time in ``run_forever`` and its relatives, without ``polling_s``. Waiting for the GIL counts as running."""
    polling_s: float
    """Time in which the loop was blocked and waited for events."""
    timers: int
    """Gauge: timers that are set and not cancelled."""
    timers_set: int
    """Calls of ``call_later`` and ``call_at``, and sleeps and timeouts of coros."""
    timers_run: int
    """Timers that became due."""
    threadsafe_calls: int
    """Calls of ``call_soon_threadsafe``, from any thread."""
    wakeups: int
    """How often another thread has woken the loop while it was blocked."""
    writes: int
    """System calls that have sent something: of transports, ``sock_sendall``, ``sock_sendto``, and of coros' sockets
    ``sendall``, ``write``, and ``send`` of one ``bytes`` without flags. Not counted are ``sendfile`` by the system,
    and of coros' sockets any other ``send``, ``sendto``, ``sendmsg`` and ``writev``, and all that they send in TLS."""
    bytes_written: int
    """The bytes that these have sent; of a transport with TLS those on the wire, encrypted."""
    corked_writes: int
    """Calls of a TCP or unix transport's ``write`` and ``writelines`` that made no system call of their own: their
    data was kept until the callback or the step was over, to leave together with that of others."""
    connections_accepted: int
    """Connections that servers, ``sock_accept`` and coros' sockets have accepted."""
    accept_errors: int
    """Failures to accept one, for want of descriptors for instance."""
    coros: int
    """Gauge: coros that have been started and have not ended."""
    pinned_coros: int
    """Gauge: those of them that have a stack of their own, which is never moved."""
    coros_started: int
    """Coros that were started."""
    coro_switches: int
    """How often a coro went on."""
    coro_evictions: int
    """How often a coro's stack was copied away, because another one needed its place."""
    coro_bytes_copied: int
    """The bytes of stacks that were copied away and back."""
    callback_durations: Histogram | None
    """How long what the loop calls took; None if :meth:`grapeshot.Loop.measure_callbacks` was never called."""
    scheduling_delays: Histogram | None
    """How long it had to wait: from the end of the callback that scheduled it, the return of the poll, or the deadline
    of the timer to its start; None as above."""


def statistics(self: BaseLoop) -> Statistics:
    """Return what the loop has done since it was made: iterations, callbacks, writes and so on.

    Any thread may call it at any time, also after :meth:`close`. Each number is exact, but while the loop runs in
    another thread, two of them may be of slightly different moments. ``ready`` and ``timers`` are then those of the
    beginning of the current iteration in a free-threaded build.
    """
    counted = self._statistics()
    ended, pinned_ended = counted.pop("coros_ended"), counted.pop("pinned_coros_ended")
    pinned_started = counted.pop("pinned_coros_started")
    return Statistics(
        ready=counted.pop("noted_ready"),
        timers=counted.pop("noted_timers"),
        coros=counted["coros_started"] - ended,
        pinned_coros=pinned_started - pinned_ended,
        callback_durations=_histogram(counted.pop("callback_durations", None)),
        scheduling_delays=_histogram(counted.pop("scheduling_delays", None)),
        **counted,
    )


def _histogram(measured: tuple[int, int, list[tuple[int, int]]] | None) -> Histogram | None:
    if measured is None:
        return None
    sum_ns, max_ns, buckets = measured
    return Histogram(
        count=sum(number for _, number in buckets),
        sum_s=sum_ns / 1e9,
        max_s=max_ns / 1e9,
        buckets=tuple((end_ns / 1e9, number) for end_ns, number in buckets),
    )
