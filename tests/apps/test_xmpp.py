"""xmpppy, a blocking XMPP client, in coros: many clients wait for their answers at the same time.

The server is part of this file. It does not offer TLS, asks for the user's password by SASL (RFC 6120, section 6), and
returns each client's message after all clients have sent theirs.
"""

from __future__ import annotations

import pytest
from support import coro_is_available, run_script

pytest.importorskip("xmpp", reason="xmpppy is not installed")

CLIENTS = 20

PROGRAM = (
    f"CLIENTS = {CLIENTS}\n"
    r'''
from grapeshot import coro

coro.patch()

import asyncio, base64, os, re, socket, sys, threading, warnings
import grapeshot

warnings.simplefilter("ignore")  # xmpppy's own code causes warnings
import xmpp

STREAMS, SASL = "http://etherx.jabber.org/streams", "urn:ietf:params:xml:ns:xmpp-sasl"
FEATURES = {
    False: f"<mechanisms xmlns='{SASL}'><mechanism>PLAIN</mechanism></mechanisms>",
    True: "<bind xmlns='urn:ietf:params:xml:ns:xmpp-bind'/><session xmlns='urn:ietf:params:xml:ns:xmpp-session'/>",
}
STANZA = re.compile(
    r"\s*(?:<\?xml[^>]*\?>)?\s*(<stream:stream[^>]*>|</stream:stream>|<(\w+)[^>]*/>|<(\w+)\b.*?</\3\s*>)", re.S
)
everybody = threading.Barrier(CLIENTS)


def serve(sock):
    text, user = "", None
    with sock:
        while data := sock.recv(4096):
            text += data.decode()
            while found := STANZA.match(text):
                stanza, text = found[1], text[found.end() :]
                if stanza.startswith("</stream:"):
                    sock.sendall(b"</stream:stream>")
                    return
                sock.sendall(answer(stanza, user).encode())
                if stanza.startswith("<auth"):
                    user = base64.b64decode(re.search(r">(.*?)<", stanza, re.S)[1]).split(b"\0")[1].decode()


def answer(stanza, user):
    if stanza.startswith("<stream:stream"):
        return (
            f"<?xml version='1.0'?><stream:stream xmlns='jabber:client' xmlns:stream='{STREAMS}' from='localhost'"
            f" id='1' version='1.0'><stream:features>{FEATURES[user is not None]}</stream:features>"
        )
    if stanza.startswith("<auth"):
        return f"<success xmlns='{SASL}'/>"
    number = re.search(r"""\bid=["']([^"']*)""", stanza)
    if stanza.startswith("<iq"):
        bound = ""
        if "xmpp-bind" in stanza:
            bound = f"<bind xmlns='urn:ietf:params:xml:ns:xmpp-bind'><jid>{user}@localhost/here</jid></bind>"
        return f"<iq type='result' id='{number[1]}'>{bound}</iq>"
    everybody.wait(timeout=20)  # no client gets an answer before all have asked
    body = re.search(r"<body>(.*?)</body>", stanza, re.S)[1]
    return f"<message from='echo@localhost' to='{user}@localhost'><body>{body}, {user}</body></message>"


def listen(server):
    for _ in range(CLIENTS):
        sock, _ = server.accept()
        threading.Thread(target=serve, args=(sock,)).start()


def ask(name, address, answers):
    client = xmpp.Client("localhost", debug=[])
    assert client.connect(address, secure=0, use_srv=False)
    assert client.auth(name, "secret", "here") == "sasl"
    client.RegisterHandler("message", lambda _, message: answers.__setitem__(name, message.getBody()))
    client.send(xmpp.Message("echo@localhost", "hello"))
    while name not in answers:
        assert client.Process(10)
    if sys.platform == "linux":
        assert len(os.listdir("/proc/self/task")) < CLIENTS  # these are coros, not threads
    client.UnregisterDisconnectHandler(client.DisconnectHandler)
    client.disconnect()


def work():
    answers = {}
    with socket.create_server(("127.0.0.1", 0)) as server:
        threads = [threading.Thread(target=listen, args=(server,))]
        threads += [
            threading.Thread(target=ask, args=(f"user{number}", server.getsockname(), answers))
            for number in range(CLIENTS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return answers


async def main():
    ticks = 0

    async def tick():
        nonlocal ticks
        while True:
            await asyncio.sleep(0.001)
            ticks += 1

    ticking = asyncio.create_task(tick())
    answers = await coro.spawn(work)
    ticking.cancel()
    assert ticks
    assert answers == {f"user{number}": f"hello, user{number}" for number in range(CLIENTS)}
    print(len(answers), "answers")


grapeshot.run(main())
'''
)


@pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
def test_clients_wait_at_the_same_time():
    assert run_script("grapeshot", PROGRAM, flags=("-W", "ignore")).strip() == f"{CLIENTS} answers"
