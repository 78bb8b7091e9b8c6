"""The native threads that look up names: they answer like the socket module, share equal lookups, and do not use the
executor. Nothing waits for them when a program ends.
"""

from __future__ import annotations

import _thread
import asyncio
import concurrent.futures
import os
import platform
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support import coro_is_available, iterations, run_script

pytestmark = pytest.mark.slow


def answer_of(function, *args):
    try:
        return function(*args)
    except Exception as error:
        return type(error), error.args


async def answer_by(awaitable):
    try:
        return await awaitable
    except Exception as error:
        return type(error), error.args


# ---------------------------------------------------------------- answers


@pytest.mark.parametrize("host", ["localhost", b"localhost", "a..b", "x" * 64, "", "a\0b"])
@pytest.mark.parametrize("port", [0, 80, "http", b"80", None, 2**70, 1.5, True, "\ud800", "no-such-service"])
@pytest.mark.parametrize("kind", [0, socket.SOCK_STREAM])
@pytest.mark.skip_on(uvloop="its errors have other arguments")
async def test_getaddrinfo_answers_like_the_socket_module(loop, host, port, kind):
    for flags in (0, socket.AI_CANONNAME, socket.AI_PASSIVE | socket.AI_NUMERICSERV):
        expected = answer_of(socket.getaddrinfo, host, port, 0, kind, 0, flags)
        assert await answer_by(loop.getaddrinfo(host, port, type=kind, flags=flags)) == expected


@pytest.mark.skip_on(uvloop="its errors have other arguments")
@pytest.mark.parametrize("flags", [-1, 2**40, 1.5, "0"])
async def test_wrong_flags(loop, flags):
    expected = answer_of(socket.getaddrinfo, "localhost", 80, 0, 0, 0, flags)
    assert await answer_by(loop.getaddrinfo("localhost", 80, flags=flags)) == expected


ADDRESSES = [
    ("127.0.0.1", 80),
    ("127.1", 80),
    ("127.0.0.1", 70_000),
    ("127.0.0.1", -1),
    ("127.0.0.1", 80, 0),
    ("::1", 80),
    ("::1", 80, 5),
    ("::1", 80, 2**20),
    ("::1", 80, 0, 1),
    ("::1", 80, 0, -1),
    ("fe80::1", 80, 0, 987_654),
    ("localhost", 80),
    ("a\0b", 80),
    ("\ud800", 80),
    (b"127.0.0.1", 80),
    ("127.0.0.1", "80"),
    ("127.0.0.1",),
    ("::1", 80, 0, 0, 0),
    ["127.0.0.1", 80],
]


@pytest.mark.skip_on(uvloop="it accepts some of these addresses, and raises other errors")
@pytest.mark.parametrize("address", ADDRESSES, ids=range(len(ADDRESSES)))
@pytest.mark.parametrize("flags", [0, socket.NI_NUMERICHOST, socket.NI_NUMERICHOST | socket.NI_NUMERICSERV, 2**20])
async def test_getnameinfo_answers_like_the_socket_module(loop, address, flags):
    expected = answer_of(socket.getnameinfo, address, flags)
    assert await answer_by(loop.getnameinfo(address, flags)) == expected


async def test_each_waiter_gets_a_list_of_its_own(loop):
    one, other = await asyncio.gather(loop.getaddrinfo("localhost", 80), loop.getaddrinfo("localhost", 80))
    assert one == other
    one.clear()
    assert other


@pytest.mark.skip_on(uvloop="it raises no audit events")
def test_audit_hooks_hear_of_lookups(loop_kind):
    code = """
    import asyncio, socket, sys
    seen = []
    sys.addaudithook(lambda event, args: seen.append((event, *args)) if event.startswith("socket.get") else None)
    loop = new_event_loop()
    loop.run_until_complete(loop.getaddrinfo("localhost", "80", type=socket.SOCK_STREAM))
    loop.run_until_complete(loop.getnameinfo(("127.0.0.1", 80)))
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    assert seen == [
        ("socket.getaddrinfo", "localhost", "80", 0, socket.SOCK_STREAM, 0),
        ("socket.getnameinfo", ("127.0.0.1", 80)),
    ], seen
    assert all(type(value) is int for value in seen[0][3:]), seen
    """
    run_script(loop_kind, code)


# ---------------------------------------------------------------- the executor, and replaced functions


@pytest.mark.only_on("grapeshot")
async def test_a_full_executor_delays_no_lookup(loop):
    gate = threading.Event()
    loop.set_default_executor(concurrent.futures.ThreadPoolExecutor(1))
    blocker = loop.run_in_executor(None, gate.wait)
    try:
        assert await loop.getaddrinfo("localhost", 80)
        assert await loop.getnameinfo(("127.0.0.1", 80))
        with pytest.raises(socket.gaierror):
            await loop.getaddrinfo("name.invalid", 80)
    finally:
        gate.set()
        await blocker


@pytest.mark.only_on("grapeshot")
async def test_no_python_thread(loop):
    before = _thread._count(), threading.enumerate()
    await loop.getaddrinfo("localhost", 80)
    await loop.getnameinfo(("127.0.0.1", 80))
    assert (_thread._count(), threading.enumerate()) == before
    assert loop._default_executor is None


@pytest.mark.only_on("grapeshot")
async def test_a_replaced_getnameinfo_is_called(loop, monkeypatch):
    monkeypatch.setattr(socket, "getnameinfo", lambda *_: ("replaced", "0"))
    assert await loop.getnameinfo(("127.0.0.1", 80)) == ("replaced", "0")


@pytest.mark.parametrize("module", ["socket", "_socket"])
@pytest.mark.skip_on(uvloop="it does not use the socket module")
async def test_a_replaced_getaddrinfo_is_called(loop, monkeypatch, module):
    answer = [(2, 1, 6, "", ("192.0.2.1", 80))]
    monkeypatch.setattr(sys.modules[module], "getaddrinfo", lambda *_, **__: answer)
    assert await loop.getaddrinfo("localhost", 80) == answer


@pytest.mark.only_on("grapeshot")
async def test_lookups_after_the_executor_was_shut_down(loop):
    await loop.shutdown_default_executor()
    assert await loop.getaddrinfo("localhost", 80)


# ---------------------------------------------------------------- lookups that take long


# A library that replaces functions of the C library through LD_PRELOAD. Its getaddrinfo() treats names with these
# endings specially:
#   .slow         It writes "began NAME" to the descriptor $BEGAN_FD, waits until it can read a byte from $GATE_FD, and
#                 answers with 127.0.0.1.
#   .errno        It fails with EAI_SYSTEM. The errno is the number before this ending.
#   .latin .utf   It answers with 127.0.0.1 and a canonical name that is not ASCII.
# For the addresses from 192.0.2.1 to 192.0.2.3, its getnameinfo() returns names and services that are not ASCII.
INTERPOSED = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int ends_with(const char *host, const char *end) {
    return host && strlen(host) > strlen(end) && !strcmp(host + strlen(host) - strlen(end), end);
}

int getnameinfo(const struct sockaddr *address, socklen_t length, char *host, socklen_t host_length, char *service,
                socklen_t service_length, int flags) {
    unsigned ip = address->sa_family == AF_INET ? ntohl(((const struct sockaddr_in *)address)->sin_addr.s_addr) : 0;
    if (ip >> 8 == 0xc00002 && (ip & 255) >= 1 && (ip & 255) <= 3) {
        strcpy(host, (ip & 255) == 1 ? "b\\xfc" : "b\\xc3\\xbc");
        strcpy(service, (ip & 255) == 2 ? "s\\xfc" : "s\\xc3\\xbc");
        return 0;
    }
    int (*original)(const struct sockaddr *, socklen_t, char *, socklen_t, char *, socklen_t, int) =
        dlsym(RTLD_NEXT, "getnameinfo");
    return original(address, length, host, host_length, service, service_length, flags);
}

int getaddrinfo(const char *host, const char *service, const struct addrinfo *hints, struct addrinfo **found) {
    int (*original)(const char *, const char *, const struct addrinfo *, struct addrinfo **) =
        dlsym(RTLD_NEXT, "getaddrinfo");
    if (ends_with(host, ".errno")) {
        errno = atoi(host);
        return EAI_SYSTEM;
    }
    if (ends_with(host, ".latin") || ends_with(host, ".utf")) {
        int result = original("127.0.0.1", service, hints, found);
        if (!result && hints->ai_flags & AI_CANONNAME) {
            free((*found)->ai_canonname);
            (*found)->ai_canonname = strdup(ends_with(host, ".utf") ? "b\\xc3\\xbc" : "b\\xfc");
        }
        return result;
    }
    if (ends_with(host, ".slow")) {
        char line[300], byte;
        int size = snprintf(line, sizeof line, "began %s\\n", host);
        if (write(atoi(getenv("BEGAN_FD")), line, size) < 0 || read(atoi(getenv("GATE_FD")), &byte, 1) < 0)
            return EAI_SYSTEM;
        return original("127.0.0.1", service, hints, found);
    }
    return original(host, service, hints, found);
}
"""


def compiled(folder: Path, text: str) -> str:
    """Compile a C text to a library for LD_PRELOAD, and return the path of the library."""
    source, library = folder / "library.c", folder / "library.so"
    source.write_text(text)
    try:
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("NOT TESTED: there is no C compiler")
    return str(library)


@pytest.fixture(scope="module")
def slow_library(tmp_path_factory) -> str:
    return compiled(tmp_path_factory.mktemp("slow"), INTERPOSED)


SLOW = """
import asyncio, contextlib, gc, os, signal, socket, sys, threading, time
import grapeshot
with contextlib.suppress(ImportError):  # no coros on this interpreter
    from grapeshot import coro

began, began_fd = os.pipe()
gate_fd, gate = os.pipe()
os.environ |= {"BEGAN_FD": str(began_fd), "GATE_FD": str(gate_fd)}
os.set_blocking(began, False)

def begun():
    with contextlib.suppress(BlockingIOError):
        return [line.split()[1] for line in os.read(began, 65536).decode().splitlines()]
    return []

async def until_begun(count):
    names = []
    while len(names) < count:
        names += begun()
        await asyncio.sleep(0.001)
    return names

def let_go(count):
    os.write(gate, b"." * count)
"""


def run_slow(slow_library: str, code: str, **variables: str) -> str:
    """Run SLOW and `code` as one program, with the library `slow_library` in LD_PRELOAD."""
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", SLOW + code],
        env=os.environ | {"LD_PRELOAD": slow_library} | variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


linux_only = pytest.mark.skipif(sys.platform != "linux", reason="the test replaces a function with LD_PRELOAD")


@linux_only
@pytest.mark.parametrize("kind", ["asyncio.SelectorEventLoop", "grapeshot.new_event_loop"])
def test_texts_and_errors_of_the_c_library(slow_library, kind):
    """The C library's texts are decoded as strict UTF-8, whatever the encoding of the file system is.

    A lookup that fails with EAI_SYSTEM raises the OSError for its errno, even if the errno is 0.
    """
    code = f"""
loop = {kind}()

def answer_of(call):
    try:
        return loop.run_until_complete(call)
    except Exception as error:
        return type(error), *error.args

def canonical(host):
    answer = answer_of(loop.getaddrinfo(host, 80, type=socket.SOCK_STREAM, flags=socket.AI_CANONNAME))
    return answer[0][3] if type(answer) is list else answer

assert sys.getfilesystemencoding() != "utf-8"
assert canonical("a.utf") == "b\\xfc", canonical("a.utf")
wrong = UnicodeDecodeError, "utf-8", b"b\\xfc", 1, 2, "invalid start byte"
assert canonical("a.latin") == wrong, canonical("a.latin")
names = [answer_of(loop.getnameinfo((f"192.0.2.{{n}}", 80))) for n in (1, 2, 3)]
wrong_service = UnicodeDecodeError, "utf-8", b"s\\xfc", 1, 2, "invalid start byte"
assert names == [wrong, wrong_service, ("b\\xfc", "s\\xfc")], names
for errno, kind in [(0, OSError), (2, FileNotFoundError), (110, TimeoutError), (9999, OSError)]:
    text = os.strerror(errno) if errno else "Error"
    found = answer_of(loop.getaddrinfo(f"{{errno}}.errno", 80))
    assert found == (kind, errno, text), found
loop.run_until_complete(loop.shutdown_default_executor())
loop.close()
"""
    run_slow(slow_library, code, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")


@linux_only
def test_a_single_processor_does_not_limit_the_lookups(slow_library):
    """Even a process that may use only one processor makes many lookups at a time, because a lookup only waits."""
    code = """
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

async def main():
    loop = asyncio.get_running_loop()
    asked = [asyncio.ensure_future(loop.getaddrinfo(f"{n}.slow", 80)) for n in range(40)]
    async with asyncio.timeout(20):
        await until_begun(32)
    let_go(40)
    assert all(await asyncio.gather(*asked))

grapeshot.run(main())
"""
    run_slow(slow_library, code)


@linux_only
def test_equal_lookups_are_shared(slow_library):
    code = """
async def main():
    loop = asyncio.get_running_loop()
    asked = [asyncio.ensure_future(loop.getaddrinfo(name, 80)) for name in ["a.slow", "b.slow"] * 50]
    assert sorted(await until_begun(2)) == ["a.slow", "b.slow"]
    let_go(2)
    answers = await asyncio.gather(*asked)
    assert len(answers) == 100 and all(answer == answers[0] for answer in answers)
    assert begun() == []

grapeshot.run(main())
"""
    run_slow(slow_library, code)


@linux_only
def test_a_cancelled_wait_ends_at_once(slow_library):
    code = """
async def main():
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(loop.getaddrinfo("a.slow", 80))
    await until_begun(1)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.01):
            await loop.getaddrinfo("a.slow", 80)
        raise AssertionError
    assert begun() == []  # the second lookup has joined the first
    last = asyncio.ensure_future(loop.getaddrinfo("a.slow", 80))
    await asyncio.sleep(0)
    let_go(1)
    assert await last
    assert not loop._resolver._waiting

grapeshot.run(main())
"""
    run_slow(slow_library, code)


@linux_only
@pytest.mark.parametrize("end", ["return", "sys.exit(0)", "loop.close(); return"])
def test_nothing_waits_for_a_lookup_at_the_end(slow_library, end):
    code = f"""
loop = grapeshot.new_event_loop()

async def main():
    global task
    task = asyncio.ensure_future(loop.getaddrinfo("a.slow", 80))
    await until_begun(1)
    task.cancel()

def end():
    loop.run_until_complete(main())
    {end}

end()
"""
    run_slow(slow_library, code)


@linux_only
def test_a_loop_that_is_closed_during_lookups(slow_library):
    code = """
for _ in range(20):
    loop = grapeshot.new_event_loop()
    tasks = [loop.create_task(loop.getaddrinfo(f"{n}.slow", 80)) for n in range(3)]
    loop.run_until_complete(asyncio.sleep(0))
    loop.run_until_complete(asyncio.sleep(0))
    for task in tasks:
        task._log_destroy_pending = False
    loop.close()
    del tasks, task
    gc.collect()
let_go(100)

async def main():
    assert await asyncio.get_running_loop().getaddrinfo("localhost", 80)

grapeshot.run(main())
"""
    run_slow(slow_library, code)


@linux_only
def test_a_forked_child_has_threads_of_its_own(slow_library):
    """All lookup threads of the parent are busy. The child has none of them, so its first lookup starts a new one."""
    code = """
async def look_up(name):
    return await asyncio.get_running_loop().getaddrinfo(name, 80)

async def main():
    loop = asyncio.get_running_loop()
    tasks = [asyncio.ensure_future(look_up(f"{n}.slow")) for n in range(3)]
    await until_begun(3)
    pid = os.fork()
    if pid == 0:
        asyncio._set_running_loop(None)
        status = 1
        try:
            new = grapeshot.new_event_loop()
            status = 0 if new.run_until_complete(new.getaddrinfo("localhost", 80)) else 2
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    let_go(3)
    assert all(await asyncio.gather(*tasks))

grapeshot.run(main())
"""
    run_slow(slow_library, code)


# After a thread has looked up a name that ends with `.slow`, each call of malloc in this thread writes "began malloc"
# to $BEGAN_FD, and then takes 20 ms. When the process reads this text, it forks: the thread is then in malloc, and
# may hold a lock.
SLOW_MALLOC = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <netdb.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static __thread int is_slow;
extern void *__libc_malloc(size_t);

int getaddrinfo(const char *host, const char *service, const struct addrinfo *hints, struct addrinfo **found) {
    int (*original)(const char *, const char *, const struct addrinfo *, struct addrinfo **) =
        dlsym(RTLD_NEXT, "getaddrinfo");
    if (!host || strlen(host) < 5 || strcmp(host + strlen(host) - 5, ".slow"))
        return original(host, service, hints, found);
    int result = original("127.0.0.1", service, hints, found);
    is_slow = 1;
    return result;
}

void *malloc(size_t length) {
    if (is_slow) {
        if (write(atoi(getenv("BEGAN_FD")), "began malloc\\n", 13) < 0)
            abort();
        usleep(20000);
    }
    return __libc_malloc(length);
}
"""
FORKS = {
    "a coro": """
def main():
    loop = asyncio.get_running_loop()
    loop.set_dns_cache(60)
    import grapeshot.coro._dns
    lookup = coro.spawn(grapeshot.coro._dns.getaddrinfo, "a.slow", 80)
    count = 0
    while not lookup.done():
        if begun():
            pid = os.fork()
            if not pid:
                signal.alarm(20)
                return
            assert os.waitpid(pid, 0)[1] == 0
            count += 1
        coro.sleep_relative(0.0001)
    assert count

coro.run(main)
""",
    "the program": """
loop = grapeshot.new_event_loop()
loop.set_dns_cache(60)
lookup = loop.create_task(loop.getaddrinfo("a.slow", 80))
count = 0
while not lookup.done():
    loop.run_until_complete(asyncio.sleep(0.0001))
    if begun():
        pid = os.fork()
        if not pid:
            signal.alarm(20)
            loop.close()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        count += 1
assert count
loop.close()
""",
}


@linux_only
@pytest.mark.parametrize("forker", FORKS if coro_is_available() else ["the program"])
def test_a_forked_child_closes_the_loop(tmp_path, forker):
    """If a lookup thread of the parent holds a lock during the fork, the lock stays locked in the child. So when the
    child closes the loop, it must not wait for this lock.
    """
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("NOT TESTED HERE: the test replaces glibc's malloc")
    run_slow(compiled(tmp_path, SLOW_MALLOC), FORKS[forker])


@linux_only
@pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
def test_a_literal_with_a_name_after_it(slow_library):
    """inet_aton(3) ignores what follows an address and a space, but getaddrinfo(3) looks up the whole text."""
    code = """
def main():
    coro.patch()
    for function in (socket.gethostbyname, socket.gethostbyname_ex):
        lookup = coro.spawn(function, "127.0.0.1 x.slow")
        with coro.timeout(20):
            while not begun():
                coro.sleep_relative(0.001)
        assert not lookup.done()
        let_go(1)
        coro.await_(asyncio.wait([lookup]))
        if function is socket.gethostbyname:
            assert lookup.result() == "127.0.0.1"

coro.run(main)
"""
    run_slow(slow_library, code)


@linux_only
@pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
@pytest.mark.parametrize("function", ["coro._dns.getaddrinfo", "socket.getaddrinfo"])
def test_coros(slow_library, function):
    code = f"""
def main():
    import grapeshot.coro._dns
    if "socket" in {function!r}:
        coro.patch()
    count = len(threading.enumerate())
    coros = [coro.spawn({function}, "a.slow", 80) for _ in range(10)]
    interrupted = coro.spawn({function}, "b.slow", 80)
    names = []
    while len(names) < 2:
        names += begun()
        coro.sleep_relative(0.001)
    assert sorted(names) == ["a.slow", "b.slow"], names
    interrupted.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        interrupted.join()
    let_go(2)
    answers = [each.join() or each.result() for each in coros]
    assert answers[0][0][4] == ("127.0.0.1", 80) and all(answer == answers[0] for answer in answers)
    assert coro.await_(asyncio.sleep(0, "alive")) == "alive"

coro.run(main)
"""
    run_slow(slow_library, code)


# ---------------------------------------------------------------- the cache


@linux_only
def test_the_cache(slow_library):
    code = """
async def main():
    loop = asyncio.get_running_loop()
    async def lookups(name):
        task = asyncio.ensure_future(loop.getaddrinfo(name, 80))
        count = 0
        while not task.done():
            await asyncio.sleep(0.001)
            names = begun()
            count += len(names)
            let_go(len(names))
        assert await task
        return count

    assert [await lookups("a.slow") for _ in range(3)] == [1, 1, 1]
    loop.set_dns_cache(1000)
    assert [await lookups("a.slow") for _ in range(3)] == [1, 0, 0]
    assert await lookups("b.slow") == 1
    loop.set_dns_cache(0)
    assert await lookups("a.slow") == 1
    for wrong in (-1, float("nan")):
        try:
            loop.set_dns_cache(wrong)
        except ValueError:
            continue
        raise AssertionError(wrong)

grapeshot.run(main())
"""
    run_slow(slow_library, code)


@pytest.mark.only_on("grapeshot")
async def test_many_lookups(loop):
    hosts = {"localhost": 0, "no address": socket.AI_NUMERICHOST, "127.0.0.1": 0}
    asked = [loop.getaddrinfo(host, port, flags=flags) for port in range(300) for host, flags in hosts.items()]
    answers = await asyncio.gather(*asked, return_exceptions=True)
    for port in range(300):
        found, unknown, literal = answers[3 * port : 3 * port + 3]
        assert found[0][4] == literal[0][4] == ("127.0.0.1", port)
        assert type(unknown) is socket.gaierror
    await iterations(3)
    assert not loop._resolver._waiting
