"""Files in tasks: cancellation, faults of the system, several loops and processes, and what is left at the end."""

from __future__ import annotations

import asyncio
import copy
import errno
import os
import pickle
import resource
import signal
import threading

import pytest
from busy_files import BusyFileThreads
from support import iterations, run_script

import grapeshot.files
from grapeshot import _core

pytestmark = pytest.mark.only_on("grapeshot")


@pytest.fixture
def _in_threads(monkeypatch):
    """Make calls in threads, even reads of data in memory. Opens that need not wait are made in the loop's thread."""
    monkeypatch.setenv("GRAPESHOT_FILE_THREADS", "1")
    monkeypatch.setattr(_core, "_aio_read_now", lambda *_: None)


# ---------------------------------------------------------------- use


@pytest.mark.only_on("asyncio", "uvloop", "grapeshot")
@pytest.mark.leaks_on(
    asyncio="the loop does not close the queue, which closes itself only when it is collected",
    uvloop="the loop does not close the queue, which closes itself only when it is collected",
)
@pytest.mark.usefixtures("engine", "reads")
async def test_as_in_the_documentation(loop, tmp_path):
    path = tmp_path / "notes.txt"
    async with grapeshot.files.open(path, "w", encoding="utf-8") as file:
        assert await file.write("first\nsecond €\n") == 15
        await file.writelines(["third\n", "last"])
    async with grapeshot.files.open(path, encoding="utf-8") as file:
        assert [line async for line in file] == ["first\n", "second €\n", "third\n", "last"]
        assert await file.readlines() == []
    file = await grapeshot.files.open(path, "rb")
    try:
        assert await file.readlines(7) == [b"first\n", "second €\n".encode()]
        assert await file.peek() == b"third\nlast"
        buffer = bytearray(4)
        assert await file.readinto(buffer) == 4
        assert await file.readinto1(memoryview(buffer)[2:]) == 2
        assert buffer == b"thd\n"
        assert await file.read1() == b"last"
    finally:
        await file.close()


@pytest.mark.usefixtures("engine", "reads")
async def test_many_tasks(loop, tmp_path):
    async def use(number):
        data = os.urandom(3000 + number)
        async with grapeshot.files.open(tmp_path / str(number), "xb") as file:
            await file.write(data)
            await file.fsync(only_data=bool(number % 2))
        async with grapeshot.files.open(tmp_path / str(number), "rb") as file:
            assert await file.read() == data

    await asyncio.gather(*map(use, range(200)))


@pytest.mark.usefixtures("engine", "reads")
async def test_tasks_that_share_a_file(loop, tmp_path):
    """The methods run one after the other, so no line is divided or lost."""
    path = tmp_path / "file"
    async with grapeshot.files.open(path, "w", buffering=50) as file:
        await asyncio.gather(*(file.write(f"line {number:04}\n") for number in range(500)))
    lines = []
    async with grapeshot.files.open(path, buffering=64) as file:

        async def read():
            while line := await file.readline():
                lines.append(line)

        await asyncio.gather(*(read() for _ in range(5)))
    assert sorted(lines) == [f"line {number:04}\n" for number in range(500)]


@pytest.mark.usefixtures("engine")
async def test_a_task_that_reads_lets_others_run(loop, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(64 * 1024 * 1024))
    ticks = 0

    def tick():
        nonlocal ticks
        ticks += 1
        loop.call_soon(tick)

    loop.call_soon(tick)
    async with grapeshot.files.open(path, "rb", buffering=0) as file:
        while await file.read(64 * 1024):
            pass
    assert ticks > 10


@pytest.mark.usefixtures("engine", "reads")
async def test_a_pipe(loop):
    read_end, write_end = os.pipe()
    async with grapeshot.files.open(read_end, "rb") as reader, grapeshot.files.open(write_end, "wb") as writer:
        assert not await reader.seekable()
        for name in ("tell", "truncate"):
            with pytest.raises(OSError):
                await getattr(reader, name)()
        with pytest.raises(OSError, match="Illegal seek"):
            await reader.seek(0)
        waiting = asyncio.ensure_future(reader.readline())
        await iterations(3)
        assert not waiting.done()
        await writer.write(b"one\ntwo\nthree")
        await writer.flush()
        assert await waiting == b"one\n"
        assert await reader.read(5) == b"two\nt"
        await writer.close()
        assert await reader.read() == b"hree"


@pytest.mark.usefixtures("engine")
async def test_a_descriptor_that_is_not_closed(loop, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    fd = os.open(path, os.O_RDONLY)
    try:
        os.lseek(fd, 2, os.SEEK_SET)
        async with grapeshot.files.open(fd, "rb", closefd=False) as file:
            assert await file.read(3) == b"234"
            assert not file.closefd
        # The descriptor is now at the position of the file object, although the file object had read further ahead.
        assert os.read(fd, 2) == b"56"
    finally:
        os.close(fd)


async def test_an_opener(loop, tmp_path):
    threads = []

    def opener(path, flags):
        threads.append(threading.current_thread())
        return os.open(path, flags, 0o600)

    async with grapeshot.files.open(tmp_path / "file", "w", opener=opener) as file:
        assert not os.get_inheritable(file.fileno())
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600
    assert threads[0] is not threading.current_thread()


async def test_permissions_of_a_new_file(loop, tmp_path):
    before = os.umask(0o027)
    try:
        async with grapeshot.files.open(tmp_path / "file", "w"):
            pass
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


# ---------------------------------------------------------------- cancellation


@pytest.mark.usefixtures("_in_threads")
async def test_a_cancelled_read_loses_nothing(loop, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    for name, args in (("read", (4,)), ("read", ()), ("readline", ()), ("peek", ()), ("readinto", (bytearray(3),))):
        async with grapeshot.files.open(path, "rb") as file:
            assert await file.read(2) == b"01"
            await file.seek(2, os.SEEK_SET)
            file._ahead, file._taken = b"", 0
            file._position = 2
            with BusyFileThreads(tmp_path / "busy") as threads:
                task = asyncio.ensure_future(getattr(file, name)(*args))
                await iterations(3)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert await file.tell() == 2
                threads.release()
            assert await file.read() == b"23456789", name


@pytest.mark.usefixtures("_in_threads")
async def test_a_cancelled_read_of_text_loses_nothing(loop, tmp_path):
    path = tmp_path / "file"
    path.write_text("ä" * 100_000 + "\nend", encoding="utf-8")  # several times the file's buffer of 64 KiB
    for is_sought in (False, True):
        async with grapeshot.files.open(path, encoding="utf-8") as file:
            assert await file.read(5) == "ä" * 5
            position = await file.tell()
            with BusyFileThreads(tmp_path / "busy"):
                task = asyncio.ensure_future(file.readline())
                await iterations(3)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            if is_sought:
                await file.seek(position)
            assert await file.readline() == "ä" * 99_995 + "\n"
            assert await file.read() == "end"


@pytest.mark.usefixtures("_in_threads")
async def test_the_next_call_waits_for_a_cancelled_write(loop, tmp_path):
    """A cancelled write goes on, and the descriptor stays open until the write has ended."""
    path = tmp_path / "file"
    path.write_bytes(b"..........")
    file = await grapeshot.files.open(path, "r+b", buffering=0)
    with BusyFileThreads(tmp_path / "busy") as threads:
        writing = asyncio.ensure_future(file.write(b"first"))
        await iterations(3)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        number = file.fileno()
        closing = asyncio.ensure_future(file.close())
        await iterations(5)
        assert not closing.done()
        assert os.fstat(number)
        threads.release()
        await closing
    assert path.read_bytes() == b"first....."


@pytest.mark.parametrize("mode", ["wb", "ab"])
@pytest.mark.usefixtures("_in_threads")
async def test_cancelled_flushes_write_everything_once(loop, tmp_path, mode):
    path = tmp_path / "file"
    file = await grapeshot.files.open(path, mode)
    expected = b""
    for number in range(20):
        expected += b"record %d\n" % number
        await file.write(b"record %d\n" % number)
        with BusyFileThreads(tmp_path / "busy"):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.002):
                    await file.flush()
    await file.close()
    assert path.read_bytes() == expected


@pytest.mark.usefixtures("_in_threads")
async def test_a_cancelled_close_writes_the_buffer(loop, tmp_path):
    path = tmp_path / "file"
    file = await grapeshot.files.open(path, "wb")
    await file.write(b"first")
    with BusyFileThreads(tmp_path / "busy"):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await file.flush()
        await asyncio.wait_for(asyncio.shield(asyncio.sleep(0)), 1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await file.close()
        assert file.closed
    await asyncio.sleep(0.05)
    assert path.read_bytes() == b"first"


@pytest.mark.usefixtures("engine", "reads")
async def test_cancelled_reads_of_a_pipe_lose_nothing(loop):
    """The data comes at most a few iterations before the cancellation."""
    read_end, write_end = os.pipe()
    received = b""
    async with grapeshot.files.open(read_end, "rb", buffering=0) as file:
        for number in range(300):
            task = asyncio.ensure_future(file.read(100))
            await iterations(number % 4)
            os.write(write_end, b"%d," % number)
            await iterations(number % 3)
            task.cancel()
            try:
                received += await task
            except asyncio.CancelledError:
                pass
        os.close(write_end)
        received += await file.read()
    assert received == b"".join(b"%d," % number for number in range(300))


@pytest.mark.usefixtures("engine")
async def test_cancelled_opens_leave_no_descriptors(loop, tmp_path):
    """Each task is cancelled zero to four iterations after it was made: before, during or after the open."""
    for number in range(200):
        task = asyncio.ensure_future(grapeshot.files.open(tmp_path / "file", "wb").__aenter__())
        await iterations(number % 5)
        task.cancel()
        try:
            await (await task).close()
        except asyncio.CancelledError:
            pass
    await asyncio.sleep(0.05)


@pytest.mark.usefixtures("engine", "reads")
async def test_a_descriptor_that_others_use_too(loop, tmp_path):
    """Writes go to the descriptor's own position, as on standard output."""
    path = tmp_path / "file"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        for number in range(3):
            async with grapeshot.files.open(fd, "w", closefd=False) as file:
                await file.write(f"{number} ours\n")
            os.write(fd, b"theirs\n")
    finally:
        os.close(fd)
    assert path.read_text() == "0 ours\ntheirs\n1 ours\ntheirs\n2 ours\ntheirs\n"


@pytest.mark.usefixtures("engine", "reads")
@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-8-sig"])
async def test_positions_at_the_end_of_a_chunk(loop, tmp_path, encoding):
    path = tmp_path / "file"
    path.write_text("line\n" * 3000, encoding=encoding)
    with open(path, encoding=encoding) as control:
        async with grapeshot.files.open(path, encoding=encoding) as file:
            for length in (2047, 2048, 4095, 8191):
                assert await file.read(length) == control.read(length)
                assert await file.tell() == control.tell()


@pytest.mark.usefixtures("engine")
async def test_wrong_arguments_of_methods(loop, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    async with grapeshot.files.open(path, "r+b") as file:
        for name, args, error in (
            ("write", (5,), TypeError),
            ("write", ([65],), TypeError),
            ("write", ("text",), TypeError),
            ("write", (memoryview(b"abcd")[::2],), BufferError),
            ("read", (2.5,), TypeError),
            ("readline", (2.5,), TypeError),
            ("seek", (2.0,), TypeError),
            ("seek", (0, 9), ValueError),
            ("readinto", (b"1234",), TypeError),
        ):
            with pytest.raises(error):
                await getattr(file, name)(*args)
        assert await file.read() == b"0123456789"
    with pytest.raises(ValueError, match="closed file"):
        await file.writelines([])
    with pytest.raises(ValueError, match="closed file"):
        async with file:
            pass


@pytest.mark.usefixtures("_in_threads")
async def test_a_cancelled_close_closes_the_file(loop, tmp_path):
    path = tmp_path / "file"
    path.touch()
    file = await grapeshot.files.open(path, "rb")
    number = file.fileno()
    with BusyFileThreads(tmp_path / "busy") as threads:
        closing = asyncio.ensure_future(file.close())
        await iterations(3)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert file.closed
        await file.close()
        assert os.fstat(number)
        threads.release()
    async with asyncio.timeout(10):
        while True:
            try:
                os.fstat(number)
            except OSError:
                break
            await asyncio.sleep(0.001)


@pytest.mark.usefixtures("engine")
async def test_a_cancelled_open_leaves_no_descriptor(loop, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for _ in range(5):
        task = asyncio.ensure_future(grapeshot.files.open(tmp_path / "fifo", "rb").__aenter__())
        await iterations(3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    # Opens that still wait for the other end of the FIFO now succeed, and their descriptors are closed.
    writer = os.open(tmp_path / "fifo", os.O_RDWR | os.O_NONBLOCK)
    await asyncio.sleep(0.05)
    os.close(writer)


@pytest.mark.usefixtures("_in_threads")
async def test_cancelled_waits_end_at_once(loop, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"content")
    async with grapeshot.files.open(path, "rb") as file:
        with BusyFileThreads(tmp_path / "busy"):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await file.read()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await file.read()


# ---------------------------------------------------------------- faults


@pytest.mark.usefixtures("engine")
async def test_a_full_disk(loop):
    file = await grapeshot.files.open("/dev/full", "wb")
    await file.write(b"content")
    with pytest.raises(OSError) as raised:
        await file.flush()
    assert raised.value.errno == errno.ENOSPC
    with pytest.raises(OSError) as raised:
        await file.close()
    assert raised.value.errno == errno.ENOSPC
    assert file.closed


@pytest.mark.usefixtures("engine", "reads")
async def test_errors_of_calls(loop, tmp_path):
    # Reading the memory of this process at an address that it does not have is an I/O error.
    async with grapeshot.files.open("/proc/self/mem", "rb", buffering=0) as file:
        with pytest.raises(OSError) as raised:
            await file.read(8)
        assert raised.value.errno == errno.EIO
    async with grapeshot.files.open(tmp_path / "file", "wb") as file:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
        try:
            await file.write(b"x" * 300_000)
            raise AssertionError("the limit has no effect")
        except OSError as error:
            assert error.errno == errno.EFBIG
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, handler)
        # Data that was not written stays in the buffer.
        await file.flush()
    assert (tmp_path / "file").stat().st_size == 300_000


@pytest.mark.usefixtures("engine")
async def test_an_open_when_no_descriptor_is_free(loop, tmp_path):
    path = tmp_path / "file"
    path.touch()
    async with grapeshot.files.open(path):
        pass  # the loop's AioQueue, which needs a descriptor, exists now
    taken = []
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, before[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                taken.append(os.dup(0))
        with pytest.raises(OSError) as raised:
            await grapeshot.files.open(path)
        assert (raised.value.errno, raised.value.filename) == (errno.EMFILE, path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for number in taken:
            os.close(number)


async def test_a_file_that_is_not_closed(loop, tmp_path):
    file = await grapeshot.files.open(tmp_path / "file", "wb")
    await file.write(b"content")
    number = file.fileno()
    with pytest.warns(ResourceWarning, match="unclosed file <BinaryFile"):
        del file
    with pytest.raises(OSError):
        os.fstat(number)
    assert (tmp_path / "file").read_bytes() == b"content"


async def test_a_file_cannot_be_copied(loop, tmp_path):
    async with grapeshot.files.open(tmp_path / "file", "w") as file:
        for call in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="cannot pickle"):
                call(file)


def test_a_file_of_another_loop(tmp_path):
    async def refused(file):
        for name, args in (("read", ()), ("write", (b"x",)), ("flush", ()), ("seek", (0,)), ("close", ())):
            with pytest.raises(RuntimeError, match="belongs to another event loop"):
                await getattr(file, name)(*args)

    first, second = grapeshot.new_event_loop(), grapeshot.new_event_loop()
    try:
        file = first.run_until_complete(grapeshot.files.open(tmp_path / "file", "w+b").__aenter__())
        second.run_until_complete(refused(file))
        first.run_until_complete(file.close())
    finally:
        first.close()
        second.close()


async def test_an_unused_open_warns_like_any_coroutine(loop, tmp_path):
    opening = grapeshot.files.open(tmp_path / "file")
    with pytest.warns(RuntimeWarning, match="never awaited"):
        del opening


# ---------------------------------------------------------------- loops and processes


LEFT_BEHIND = """
import asyncio, os, signal, sys, threading, time, grapeshot, grapeshot.files
os.mkfifo("{fifo}")
async def main():
    asyncio.ensure_future(grapeshot.files.open("{fifo}", "rb").__aenter__())
    task = asyncio.ensure_future(write())
    await asyncio.sleep(0.05)
    {end}
async def write():
    async with grapeshot.files.open("{file}", "wb") as file:
        while True:
            await file.write(bytes(1 << 20))
            await file.seek(0)
start = time.monotonic()
try:
    grapeshot.run(main())
except KeyboardInterrupt:
    print("interrupted")
print("over")
"""


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(
    ("end", "printed"),
    [
        ("pass", "over"),
        ("task.cancel()", "over"),
        ("os.kill(os.getpid(), signal.SIGINT); await asyncio.sleep(10)", "interrupted\nover"),
        ("sys.stdout.flush(); os._exit(0)", ""),
        ("sys.exit(0)", ""),
    ],
)
def test_calls_under_way_at_the_end(tmp_path, end, printed):
    """Nothing waits for ever for a call that cannot be interrupted, and no memory is freed while a call uses it."""
    code = LEFT_BEHIND.format(fifo=tmp_path / "fifo", file=tmp_path / "file", end=end)
    assert run_script(None, code, flags=()).strip() == printed


@pytest.mark.usefixtures("engine")
def test_a_child_has_a_queue_of_its_own(tmp_path):
    (tmp_path / "file").write_bytes(b"content" * 1000)
    code = f"""
import asyncio, os, grapeshot, grapeshot.files
async def read():
    async with grapeshot.files.open("{tmp_path}/file", "rb") as file:
        return len(await file.read())
async def write(name):
    async with grapeshot.files.open("{tmp_path}/" + name, "wb") as file:
        await file.write(b"x" * 5)
async def main():
    print(await read(), flush=True)
    await write("parent")
    child = os.fork()
    if not child:
        asyncio._set_running_loop(None)
        os._exit(grapeshot.run(main_of_child()))
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status))
    await write("parent")
    print(await read())
async def main_of_child():
    await write("child")
    return 7 if await read() == 7000 else 1
grapeshot.run(main())
"""
    assert run_script(None, code, flags=()).split() == ["7000", "7", "7000"]
    assert (tmp_path / "child").read_bytes() == b"xxxxx"


async def test_a_closed_loop(loop):
    other = grapeshot.new_event_loop()
    other.close()
    from grapeshot._loop import aio

    with pytest.raises(RuntimeError, match="Event loop is closed"):
        aio.queue_of(other)


@pytest.mark.usefixtures("engine", "reads")
def test_loops_in_threads(tmp_path):
    failures = []

    async def main(name):
        for number in range(50):
            async with grapeshot.files.open(tmp_path / f"{name}-{number}", "w+b") as file:
                await file.write(b"%d" % number)
                await file.seek(0)
                assert await file.read() == b"%d" % number

    def body(name):
        try:
            grapeshot.run(main(name))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=body, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
