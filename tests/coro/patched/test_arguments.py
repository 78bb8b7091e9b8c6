"""Patched functions convert their arguments once, before they wait."""

from __future__ import annotations

import pytest
from support import coro_is_available

from tests.coro.patched.same_output import check_same_output

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")

SCRIPTS = {
    "select with iterators": """
        import select, socket, threading
        near, far = socket.socketpair()
        begun, found = threading.Event(), []
        def work():
            begun.set()
            found.append(select.select(iter([near]), (), (x for x in ()))[0] == [near])
        thread = threading.Thread(target=work)
        thread.start()
        begun.wait()
        far.send(b"x")
        thread.join()
        print(found)
        for wrong in (5, None):
            try:
                select.select([], wrong, [])
            except TypeError as error:
                print(error)
    """,
    "two receivers with iterators": """
        import socket, threading
        near, far = socket.socketpair(type=socket.SOCK_DGRAM)
        buffers = [bytearray(4), bytearray(4)]
        threads = [threading.Thread(target=lambda b=b: near.recvmsg_into(iter([b]))) for b in buffers]
        for thread in threads:
            thread.start()
        for word in (b"left", b"more"):
            far.send(word)
        for thread in threads:
            thread.join()
        print(sorted(map(bytes, buffers)))
    """,
    "two senders that wait": """
        import array, os, socket, threading
        near, far = socket.socketpair()
        near.settimeout(0)
        count = 0
        try:
            while True:
                count += near.send(bytes(4096))
        except BlockingIOError:
            near.settimeout(None)
        reader, writer = os.pipe()
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [reader]))
        senders = [
            threading.Thread(target=lambda w=w: near.sendmsg(iter([w]), iter([rights]))) for w in (b"abc", b"abc")
        ]
        for thread in senders:
            thread.start()
        data, passed = b"", 0
        while len(data) < count + 6:
            part, messages, *_ = far.recvmsg(65536, 100)
            data += part
            passed += len(messages)
        print(data[count:], passed)
    """,
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_same_output(name, tmp_path):
    check_same_output(tmp_path / "script.py", SCRIPTS[name])
