"""`fd_sock`, `file_sock`, `aio_read`, `aio_write` and `read_stream`: pipes, FIFOs, terminals and regular files."""

from __future__ import annotations

import errno
import io
import os
import pty
import random
import threading
import tty

import pytest
from busy_files import BusyFileThreads
from support import coro_is_available, in_thread, until_waiting

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import _core, coro
    from grapeshot.coro import _at_once

BIG = bytes(range(256)) * 4096


@pytest.fixture(params=["coros", "threads"])
def run(request):
    """The function with which a test runs its code: in a coro, or in a thread where no coro runs."""
    return coro.run if request.param == "coros" else in_thread


def pipe(**options):
    read_end, write_end = os.pipe()
    return coro.fd_sock(read_end, **options), coro.fd_sock(write_end, **options)


# ---- descriptors that become ready ---------------------------------------------------------------------------------


def test_a_pipe():
    def main():
        reader, writer = pipe()
        with reader, writer:
            assert not os.get_blocking(reader.fileno())
            waiting = coro.spawn(reader.recv, 100)
            until_waiting(waiting)
            assert writer.send(b"abc") == 3
            assert waiting.join() == b"abc"
            sending = coro.spawn(writer.write, BIG)
            received = bytearray()
            buffer = bytearray(10_000)
            while len(received) < len(BIG):
                received += buffer[: reader.recv_into(buffer)]
            assert received == BIG
            assert sending.join() == len(BIG)
            writer.close()
            assert reader.recv(1) == b""

    coro.run(main)


def test_in_a_thread_without_coros():
    def main():
        reader, writer = pipe()
        with reader, writer:
            sending = threading.Thread(target=writer.sendall, args=(BIG,))
            sending.start()
            received = bytearray()
            while len(received) < len(BIG):
                received += reader.recv(100_000)
            sending.join()
            assert received == BIG

    in_thread(main)


def test_a_descriptor_that_others_share_stays_as_it_is(run):
    def main():
        read_end, write_end = os.pipe()
        reader, writer = (coro.fd_sock(number, closefd=False) for number in (read_end, write_end))
        try:
            with reader, writer:
                writer.sendall(b"abcdef")
                # Nothing is lost if a read takes less than there is.
                assert [reader.recv(2), reader.recv(2), reader.recv(2)] == [b"ab", b"cd", b"ef"]
                reader.settimeout(0.001)
                with pytest.raises(TimeoutError):
                    reader.recv(1)
                reader.settimeout(0)
                with pytest.raises(BlockingIOError):
                    reader.recv(1)
                assert os.get_blocking(read_end)
                assert os.get_blocking(write_end)
            assert reader.closed
            os.write(write_end, b"open")
            assert os.read(read_end, 10) == b"open"
        finally:
            os.close(read_end)
            os.close(write_end)

    run(main)


def test_a_large_write_to_a_shared_descriptor_does_not_block_the_loop():
    def main():
        read_end, write_end = os.pipe()
        with coro.fd_sock(read_end) as reader, coro.fd_sock(write_end, closefd=False) as writer:
            try:
                os.set_blocking(write_end, True)
                sending = coro.spawn(writer.sendall, BIG)
                received = bytearray()
                while len(received) < len(BIG):
                    received += reader.recv(50_000)
                sending.join()
                assert received == BIG
            finally:
                os.close(write_end)

    coro.run(main)


def test_a_fifo_and_a_terminal(tmp_path):
    def main():
        path = tmp_path / "fifo"
        os.mkfifo(path)
        read_end = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with coro.fd_sock(read_end) as reader, coro.file_sock(open(path, "wb", buffering=0)) as writer:
            waiting = coro.spawn(reader.recv, 10)
            until_waiting(waiting)
            writer.sendall(b"fifo")
            assert waiting.join() == b"fifo"
            with pytest.raises(OSError) as caught:
                writer.tell()
            assert caught.value.errno == errno.ESPIPE
        primary, secondary = pty.openpty()
        tty.setraw(secondary)
        with coro.fd_sock(primary) as near, coro.fd_sock(secondary) as far:
            waiting = coro.spawn(far.recv, 100)
            until_waiting(waiting)
            near.sendall(b"typed")
            assert waiting.join() == b"typed"
        with coro.file_sock(open("/dev/zero", "rb", buffering=0)) as zeroes:
            assert zeroes.recv(3) == bytes(3)

    coro.run(main)


def test_timeouts(run):
    def main():
        reader, writer = pipe()
        with reader, writer:
            assert reader.gettimeout() is None
            for wrong in (-1, float("nan")):
                with pytest.raises(ValueError, match="timeout must be None"):
                    reader.settimeout(wrong)
            reader.settimeout(0.001)
            assert reader.gettimeout() == 0.001
            with pytest.raises(TimeoutError):
                reader.recv(1)
            reader.settimeout(0)
            with pytest.raises(BlockingIOError):
                reader.recv(1)
            writer.settimeout(0.001)
            with pytest.raises(TimeoutError):
                writer.sendall(BIG)

    run(main)


def test_one_coro_at_a_time_may_read():
    def main():
        reader, writer = pipe()
        with reader, writer:
            waiting = coro.spawn(reader.recv, 1)
            until_waiting(waiting)
            with pytest.raises(coro.SimultaneousError):
                reader.recv(1)
            writer.send(b"x")
            assert waiting.join() == b"x"

    coro.run(main)


def test_closing_wakes_a_waiting_reader():
    def main():
        reader, writer = pipe()
        with writer:
            waiting = coro.spawn(reader.recv, 1)
            until_waiting(waiting)
            number = reader.fileno()
            reader.close()
            reader.close()
            # The descriptor stays open until the coro has left the call.
            os.fstat(number)
            with pytest.raises(coro.ClosedError) as caught:
                waiting.join()
            assert caught.value.errno == errno.EBADF
            with pytest.raises(OSError):
                os.fstat(number)
            for call in (lambda: reader.recv(1), reader.detach):
                with pytest.raises(coro.ClosedError):
                    call()
            assert (reader.fileno(), repr(reader)) == (-1, "<fd_sock closed>")
            with pytest.raises(BrokenPipeError):
                writer.send(b"x")

    coro.run(main)


def test_closing_from_another_thread():
    def main():
        reader, writer = pipe()
        with writer:
            waiting = coro.spawn(reader.recv, 1)
            until_waiting(waiting)
            coro.threads.run(reader.close)
            with pytest.raises(coro.ClosedError):
                waiting.join()

    coro.run(main)


def test_detach_gives_the_descriptor_back():
    def main():
        reader, writer = pipe()
        with writer:
            number = reader.detach()
            try:
                assert reader.closed
                assert os.get_blocking(number)
                writer.sendall(b"x")
                assert os.read(number, 1) == b"x"
            finally:
                os.close(number)

    coro.run(main)


def test_a_reader_that_is_not_closed_causes_a_warning():
    read_end, write_end = os.pipe()
    os.close(write_end)
    reader = coro.fd_sock(read_end)
    with pytest.warns(ResourceWarning, match=f"unclosed <fd_sock fd={read_end}>"):
        del reader
    with pytest.raises(OSError):
        os.fstat(read_end)
    with pytest.raises(OSError):
        coro.fd_sock(read_end)
    with pytest.raises(OSError):
        coro.file_sock(read_end)


def test_interrupted_reads_lose_nothing():
    def main():
        generator = random.Random(1)
        reader, writer = pipe()
        received = bytearray()

        def read():
            while len(received) < len(BIG):
                try:
                    received.extend(reader.recv(generator.randrange(1, 20_000)))
                except coro.Interrupted:
                    pass

        with reader, writer:
            reading = coro.spawn(read)
            at = 0
            while at < len(BIG):
                length = generator.randrange(1, 30_000)
                writer.sendall(BIG[at : at + length])
                at += length
                for _ in range(generator.randrange(3)):
                    coro.yield_slice()
                if not reading.done():
                    reading.interrupt()
            reading.join()
            assert received == BIG

    coro.run(main)


# ---- regular files -------------------------------------------------------------------------------------------------


def test_a_file_is_read_and_written(tmp_path, run):
    def main():
        path = tmp_path / "file"
        with coro.file_sock(open(path, "w+b")) as file:
            assert file.write(BIG) == len(BIG)
            assert file.tell() == len(BIG)
            assert file.recv(1) == b""
            assert file.seek(0) == 0
            assert file.recv(5) == BIG[:5]
            buffer = bytearray(3)
            assert file.recv_into(buffer) == 3
            assert buffer == BIG[5:8]
            assert file.seek(-4, os.SEEK_END) == len(BIG) - 4
            assert file.seek(1, os.SEEK_CUR) == len(BIG) - 3
            assert file.recv(100) == BIG[-3:]
            for offset, whence in ((-1, os.SEEK_SET), (0, 7)):
                with pytest.raises(ValueError, match="no such position"):
                    file.seek(offset, whence)
        assert path.read_bytes() == BIG
        with coro.file_sock(open(path, "ab")) as file:
            file.sendall(b"end")
            assert file.tell() == len(BIG) + 3
        assert path.read_bytes() == BIG + b"end"
        with coro.file_sock(open(path, "rb")) as file, pytest.raises(OSError):
            file.send(b"x")

    run(main)


@pytest.fixture
def _in_threads(monkeypatch):
    """Run all reads and writes of files in threads, even reads of data that is in the page cache."""
    monkeypatch.setenv("GRAPESHOT_FILE_THREADS", "1")
    monkeypatch.setattr(_core, "_aio_read_now", lambda *_: None)


@pytest.mark.usefixtures("_in_threads")
def test_the_loop_goes_on_while_a_file_is_read(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"content")

    def main():
        with BusyFileThreads(tmp_path) as threads, coro.file_sock(open(path, "rb")) as file:
            reading = coro.spawn(file.recv, 100)
            until_waiting(reading)
            with pytest.raises(coro.SimultaneousError):
                file.recv(1)
            threads.release()
            assert reading.join() == b"content"

    coro.run(main)


@pytest.mark.usefixtures("_in_threads")
def test_an_interrupted_read_of_a_file_loses_nothing(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"content")

    def main():
        with coro.file_sock(open(path, "rb")) as file:
            with BusyFileThreads(tmp_path):
                reading = coro.spawn(file.recv, 3)
                until_waiting(reading)
                reading.shutdown()
                reading.join()
                assert file.tell() == 0
            assert file.recv(100) == b"content"

    coro.run(main)


@pytest.mark.usefixtures("_in_threads")
def test_an_interrupted_write_of_a_file_goes_on(tmp_path):
    """The next call and the close of the descriptor wait until the interrupted write has ended."""
    path = tmp_path / "file"
    path.write_bytes(b"..........")

    def main():
        plain = open(path, "r+b")
        with BusyFileThreads(tmp_path) as threads:
            with coro.file_sock(plain) as file:
                number = file.fileno()
                writing = coro.spawn(file.send, b"first")
                until_waiting(writing)
                writing.shutdown()
                writing.join()
                next_one = coro.spawn(file.send, b"2nd")
                until_waiting(next_one)
                next_one.shutdown()
                next_one.join()
            assert not plain.closed
            assert os.fstat(number).st_size == 10
            threads.release()
            while not plain.closed:
                coro.sleep_relative(0.001)
        with pytest.raises(coro.ClosedError):
            file.recv(1)

    coro.run(main)
    assert path.read_bytes() == b"first....."


@pytest.mark.parametrize("data", ["text", 5])
def test_data_that_is_not_bytes(tmp_path, run, data):
    def main():
        with coro.file_sock(open(tmp_path / "file", "wb")) as file:
            with pytest.raises(TypeError):
                file.send(data)
            assert file.send(b"x") == 1
        with open(tmp_path / "file", "r+b") as plain, pytest.raises(TypeError):
            coro.aio_write(plain.fileno(), data, 0)

    run(main)


@pytest.mark.usefixtures("_in_threads")
def test_calls_at_an_offset(tmp_path, run):
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")

    def main():
        fd = os.open(path, os.O_RDWR)
        try:
            assert coro.aio_read(fd, 4, 3) == b"3456"
            assert coro.aio_read(fd, 100, 8) == b"89"
            assert coro.aio_read(fd, 100, 10) == coro.aio_read(fd, 0, 0) == b""
            assert coro.aio_write(fd, bytearray(b"ab"), 9) == 2
            assert coro.aio_write(fd, memoryview(b""), 0) == 0
            assert os.lseek(fd, 0, os.SEEK_CUR) == 0
            for call in (
                lambda: coro.aio_read(fd, -1, 0),
                lambda: coro.aio_read(fd, 1, -1),
                lambda: coro.aio_write(fd, b"x", -1),
            ):
                with pytest.raises(OSError, match="Invalid argument"):
                    call()
        finally:
            os.close(fd)
        with pytest.raises(OSError, match="Bad file descriptor"):
            coro.aio_read(-1, 1, 0)
        with pytest.raises(OSError, match="Bad file descriptor"):
            coro.aio_write(-1, b"x", 0)

    run(main)
    assert path.read_bytes() == b"012345678ab"


@pytest.mark.usefixtures("_in_threads")
def test_calls_of_many_coros(tmp_path):
    """Each coro writes and reads its own part of the file."""
    size, parts = 10_000, 60

    def use(fd, index):
        data = bytes([index]) * size
        assert coro.aio_write(fd, data, index * size) == size
        assert coro.aio_read(fd, size, index * size) == data

    def main():
        with open(tmp_path / "file", "w+b") as file:
            coro.in_parallel([(use, (file.fileno(), index)) for index in range(parts)])

    coro.run(main)
    assert (tmp_path / "file").stat().st_size == size * parts


def test_the_position_of_a_buffered_file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")

    def main():
        with open(path, "r+b") as plain:
            assert plain.read(3) == b"012"  # the buffer holds more than these bytes
            with coro.file_sock(plain, closefd=False) as file:
                assert file.recv(2) == b"34"
            assert not plain.closed
            plain.seek(0)
            plain.write(b"abc")  # still in the buffer, not in the file
            with coro.file_sock(plain, closefd=False) as file:
                file.seek(0)
                assert file.recv(5) == b"abc34"
        number = os.open(path, os.O_RDONLY)
        with coro.file_sock(number) as file:
            assert file.recv(3) == b"abc"
        with pytest.raises(OSError):
            os.fstat(number)
        with open(path) as text, pytest.raises(TypeError, match="binary"):
            coro.file_sock(text)

    coro.run(main)


# ---- read_stream ---------------------------------------------------------------------------------------------------


class Pieces:
    """A source that returns its pieces one after the other. If a piece is an exception, the source raises it."""

    def __init__(self, *pieces):
        self.pieces = list(pieces)

    def recv(self, count):
        piece = self.pieces.pop(0) if self.pieces else b""
        if isinstance(piece, BaseException):
            raise piece
        if len(piece) > count:
            self.pieces.insert(0, piece[count:])
        return piece[:count]


def test_parts_of_a_stream():
    stream = coro.read_stream(Pieces(b"head", b"er\r", b"\n\r\nbo", b"dy tail", b" end\nlast"))
    assert stream.read_until(b"\r\n") == b"header\r\n"
    assert stream.read_line() == b"\r\n"
    assert stream.read_exact(0) == b""
    assert stream.read_exact(4) == b"body"
    assert stream.unread == 5
    assert repr(stream) == "<read_stream 5 bytes unread>"
    assert stream.recv(3) == b" ta"
    assert stream.recv(100) == b"il"
    assert list(stream) == [b" end\n", b"last"]
    assert (stream.read_line(), stream.read_all(), stream.recv(1)) == (b"", b"", b"")
    for wrong in (lambda: stream.read_until(b""), lambda: stream.read_exact(-1), lambda: coro.read_stream(stream, 0)):
        with pytest.raises(ValueError):
            wrong()
    unread = coro.read_stream(Pieces(b"line\nunread"))
    assert unread.read_line() == b"line\n"
    with pytest.raises(ValueError, match=r"must not be negative, got -1"):
        unread.recv(-1)
    assert unread.recv(10) == b"unread"


def test_every_split_of_a_delimiter():
    data = b"aXYXYZbXXYZXYZ"
    for first in range(len(data)):
        for second in range(first, len(data)):
            stream = coro.read_stream(Pieces(*filter(None, (data[:first], data[first:second], data[second:]))))
            assert [stream.read_until(b"XYZ") for _ in range(3)] == [b"aXYXYZ", b"bXXYZ", b"XYZ"]


def test_a_stream_that_ends_too_early():
    stream = coro.read_stream(Pieces(b"abc"))
    with pytest.raises(EOFError, match=r"after 3 of 10 bytes"):
        stream.read_exact(10)
    with pytest.raises(EOFError, match=r"after 3 bytes without b';'"):
        stream.read_until(b";")
    assert stream.read_all() == b"abc"


def test_limits():
    import asyncio

    for pieces, limit in (((b"0123456789\nx",), 10), ((b"01234", b"56789", b"\nx"), 10)):
        stream = coro.read_stream(Pieces(*pieces), limit=limit)
        for call in (stream.read_line, lambda stream=stream: stream.read_until(b"\n")):
            with pytest.raises(asyncio.LimitOverrunError) as caught:
                call()
            assert caught.value.consumed == 10
        # The failed calls have lost nothing. With a higher limit, a read succeeds.
        assert stream.read_line(limit=11) == b"0123456789\n"
        assert stream.read_all() == b"x"
    stream = coro.read_stream(Pieces(b"12345", b"6"))
    with pytest.raises(asyncio.LimitOverrunError):
        stream.read_all(limit=4)
    assert stream.read_all(limit=6) == b"123456"
    # A last line without a line end may be as long as the limit.
    assert coro.read_stream(Pieces(b"ab", b"cd"), 4).read_line() == b"abcd"


def test_an_error_of_the_source_loses_nothing():
    stream = coro.read_stream(Pieces(b"ab", TimeoutError("timed out"), b"c", KeyError("x"), b"d\n"))
    with pytest.raises(TimeoutError):
        stream.read_line()
    with pytest.raises(KeyError):
        stream.read_exact(5)
    assert stream.read_line() == b"abcd\n"


def test_sources(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"line\nrest")

    def main():
        assert list(coro.read_stream(io.BytesIO(b"line\nrest"))) == [b"line\n", b"rest"]
        with open(path, "rb") as file, open(path, "rb", buffering=0) as raw:
            assert list(coro.read_stream(file)) == [b"line\n", b"rest"]
            assert list(coro.read_stream(raw)) == [b"line\n", b"rest"]
            # Reading through the stream has not moved the position of `raw`.
            assert raw.read(4) == b"line"
            with coro.file_sock(raw, closefd=False) as source:
                assert coro.read_stream(source).read_until(b"\n") == b"\n"
                assert source.tell() == 9
        near, far = coro.socketpair()
        with near, far, near.makefile("rb") as file:
            for source in (near, file):
                stream = coro.read_stream(source)
                waiting = coro.spawn(stream.read_line)
                until_waiting(waiting)
                far.sendall(b"wire\n")
                assert waiting.join() == b"wire\n"
        for wrong in (5, "text", io.StringIO("text"), None):
            with pytest.raises(TypeError):
                coro.read_stream(wrong)

    coro.run(main)


def test_interrupts_at_random_points_of_a_stream():
    """Lines of random length come whole and in order, although their reader is interrupted."""
    generator = random.Random(2)
    lines = [b"%d:" % number + b"x" * generator.randrange(3000) + b"\n" for number in range(300)]
    data = b"".join(lines)
    got = []

    def main():
        near, far = coro.socketpair()
        stream = coro.read_stream(near)

        def read():
            while len(got) < len(lines):
                try:
                    with coro.timeout(generator.choice((None, 0, 0.0001))):
                        got.append(stream.read_line())
                except (coro.Interrupted, coro.TimeoutError):
                    pass

        with near, far:
            reading = coro.spawn(read)
            at = 0
            while at < len(data):
                length = generator.randrange(1, 5000)
                far.sendall(data[at : at + length])
                at += length
                coro.yield_slice()
                if generator.random() < 0.5 and not reading.done():
                    reading.interrupt()
            reading.join()

    coro.run(main)
    assert got == lines


def shared_ends(kind):
    """Return two ends in blocking mode: one to read from, one to write to."""
    if kind == "pipe":
        return os.pipe()
    near, far = pty.openpty()
    tty.setraw(far)
    return (near, far) if kind == "master" else (far, near)


@pytest.mark.parametrize("kind", ["pipe", "terminal", "master"])
def test_another_reader_is_faster(kind):
    """The data that made the descriptor ready is gone when the coro reads. The coro waits again."""

    def main():
        reader, writer = shared_ends(kind)
        shared = coro.fd_sock(reader, closefd=False)
        waiting = coro.spawn(shared.recv, 10)
        until_waiting(waiting)
        os.write(writer, b"gone")
        while waiting._status == "waiting":
            coro.yield_slice()
        assert os.read(reader, 10) == b"gone"
        until_waiting(waiting)
        os.write(writer, b"here")
        assert waiting.join() == b"here"
        shared.close()
        os.close(writer)
        os.close(reader)

    coro.run(main)


def test_data_that_a_real_thread_has_read_is_not_lost():
    """A thread reads for the coro. When the coro is interrupted, the thread continues, and the next reader gets the
    data that the thread has read.
    """

    def main():
        reader, writer = shared_ends("master")
        first = coro.spawn(_at_once._read_in_thread, reader, lambda: os.read(reader, 10), 10)
        until_waiting(first)
        first.raise_exception(KeyError)
        with pytest.raises(KeyError):
            first.join()
        os.write(writer, b"ab")
        shared = coro.fd_sock(reader, closefd=False)
        assert [shared.recv(1), shared.recv(1)] == [b"a", b"b"]
        assert not _at_once._pending_reads
        shared.close()
        os.close(writer)
        os.close(reader)

    coro.run(main)


def test_sendall_has_one_time_limit():
    """As in socket.sendall, the timeout limits the whole call, even if the reader keeps reading slowly."""

    def main():
        reading, writing = os.pipe()
        with coro.fd_sock(reading) as reader, coro.fd_sock(writing) as writer:

            def read_slowly():
                while reader.recv(4096):
                    coro.sleep_relative(0.01)

            reads = coro.spawn(read_slowly)
            writer.settimeout(0.1)
            with pytest.raises(TimeoutError):
                writer.sendall(bytes(100_000_000))
            reads.shutdown()

    coro.run(main)
