"""Who may connect to a back door, where its socket may be, and which files it replaces."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import socket
import stat
import threading

import pytest
from insight.callers import NOBODY, call, connected_as_nobody, needs_root, output_of

from grapeshot._loop import peer
from grapeshot.insight import backdoor
from grapeshot.insight.backdoor import _path

pytestmark = pytest.mark.usefixtures("tasks")


async def test_the_file_is_for_its_user_only(loop, path):
    before = os.umask(0)
    try:
        with backdoor.serve(path):
            status = path.lstat()
            assert stat.S_ISSOCK(status.st_mode)
            assert stat.S_IMODE(status.st_mode) == 0o600
            assert status.st_uid == os.geteuid()
            assert os.listdir(path.parent) == ["app.bd"]  # nothing temporary is left
    finally:
        os.umask(before)
    assert os.listdir(path.parent) == []


def test_the_file_never_has_a_wider_mode(path, monkeypatch):
    """Whatever the umask is, and however late chmod is called, no other user can reach the socket."""
    seen = []

    def chmod(name, mode):
        seen.append(stat.S_IMODE(os.lstat(os.path.dirname(name)).st_mode))
        assert not path.exists()
        real(name, mode)

    real = os.chmod
    monkeypatch.setattr(os, "chmod", chmod)
    before = os.umask(0)
    try:
        _path.SocketFile(str(path)).close()
    finally:
        os.umask(before)
    assert seen[0] == 0o700


@needs_root
@pytest.mark.parametrize("is_open", [False, True], ids=["mode 0600", "mode 0666"])
async def test_another_user_is_refused(loop, path, is_open, caplog):
    for folder in (path.parent, *path.parent.parents):
        if not folder.stat().st_mode & stat.S_IXOTH:
            folder.chmod(folder.stat().st_mode | stat.S_IXOTH)
    with backdoor.serve(path) as server:
        if is_open:
            path.chmod(0o666)  # now everybody can connect, but the server also checks the client's user
        with caplog.at_level(logging.WARNING, "grapeshot.insight.backdoor"):
            output = await output_of(*await connected_as_nobody(path))
        if is_open:
            assert output == b"got "
            assert f"a client of the user {NOBODY} was refused" in caplog.text
        else:
            assert output.startswith(b"PermissionError(13,")
            assert "was refused" not in caplog.text
        assert server._count == 0
        with await call(path) as caller:
            assert await caller.ask("1 + 1") == "2\n"


async def test_the_user_is_compared_before_a_byte_is_read(loop, path, monkeypatch, caplog):
    monkeypatch.setattr(peer, "peer_uid", lambda sock: os.geteuid() + 1)
    with backdoor.serve(path) as server:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(path))
            sock.sendall(b"import sys; sys.exit()\n")
            sock.setblocking(False)
            try:
                assert await loop.sock_recv(sock, 100) == b""
            except ConnectionResetError:
                pass  # the server has closed the connection without reading
        assert server._count == 0
    assert "was refused" in caplog.text


def test_systems_that_cannot_identify_a_clients_user(path, new_loop, monkeypatch):
    async def main():
        with pytest.raises(NotImplementedError, match="identify a client's user"):
            backdoor.serve(path)

    monkeypatch.setattr(peer, "peer_uid", None)
    new_loop().run_until_complete(main())
    assert not path.exists()


# ------------------------------------------------------------------ directories


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_directory_that_others_can_write_to(path, mode, depth):
    folder = path.parent / "deep"
    folder.mkdir(0o700)
    (folder, path.parent)[depth].chmod(mode)
    with pytest.raises(PermissionError, match="others can write to the directory"):
        _path.SocketFile(str(folder / "app.bd"))
    (folder, path.parent)[depth].chmod(mode | stat.S_ISVTX)
    _path.SocketFile(str(folder / "app.bd")).close()
    assert os.listdir(folder) == []


@needs_root
def test_a_directory_of_another_user(path):
    os.chown(path.parent, NOBODY, -1)
    with pytest.raises(PermissionError, match=f"the directory belongs to the user {NOBODY}"):
        _path.SocketFile(str(path))


def test_a_directory_behind_a_link_is_checked(path):
    real = path.parent / "real"
    real.mkdir(0o700)
    (path.parent / "link").symlink_to(real)
    file = _path.SocketFile(str(path.parent / "link" / "app.bd"))
    assert file.path == str(real / "app.bd")
    file.close()
    real.chmod(0o777)
    with pytest.raises(PermissionError):
        _path.SocketFile(str(path.parent / "link" / "app.bd"))


@needs_root
@pytest.mark.parametrize("depth", [0, 1], ids=["the last", "one above"])
def test_a_directory_behind_a_link_of_another_user(path, depth):
    """The link's target may be safe now, but the owner of the link can change the target at any time."""
    real = path.parent / "real"
    (real / "deep").mkdir(0o700, parents=True)
    link = path.parent / "link"
    link.symlink_to(real / "deep" if depth == 0 else real)
    os.lchown(link, NOBODY, -1)
    folder = link if depth == 0 else link / "deep"
    with pytest.raises(PermissionError, match=f"the symbolic link belongs to the user {NOBODY}") as caught:
        _path.SocketFile(str(folder / "app.bd"))
    assert caught.value.filename == str(link)
    os.lchown(link, 0, -1)
    _path.SocketFile(str(folder / "app.bd")).close()


def test_links_lead_to_the_real_directory(path):
    (path.parent / "a" / "b").mkdir(0o700, parents=True)
    (path.parent / "up").symlink_to("a/b/../..")
    (path.parent / "absolute").symlink_to(path.parent / "up" / "a")
    file = _path.SocketFile(str(path.parent / "absolute" / "b" / "app.bd"))
    assert file.path == os.path.realpath(path.parent / "a" / "b" / "app.bd")
    file.close()


def test_links_in_a_circle(path):
    (path.parent / "one").symlink_to("two")
    (path.parent / "two").symlink_to("one")
    with pytest.raises(OSError) as caught:
        _path.SocketFile(str(path.parent / "one" / "app.bd"))
    assert caught.value.errno == errno.ELOOP


def test_a_directory_that_is_not_there(path):
    with pytest.raises(FileNotFoundError):
        _path.SocketFile(str(path.parent / "none" / "app.bd"))


@pytest.mark.parametrize("wrong", ["", "{folder}/", "\0app", "{folder}/a\0b"])
def test_invalid_paths(path, wrong):
    with pytest.raises(ValueError, match="not a valid path for a socket"):
        _path.SocketFile(wrong.format(folder=path.parent))
    assert os.listdir(path.parent) == []


def test_a_path_that_is_too_long(path):
    long = str(path) + "x" * 200
    with pytest.raises(OSError, match="too long for a socket") as caught:
        _path.SocketFile(long)
    assert (caught.value.errno, caught.value.filename) == (errno.ENAMETOOLONG, long)
    assert os.listdir(path.parent) == []


async def test_a_path_may_be_bytes(loop, path):
    with backdoor.serve(os.fsencode(path)) as server:
        assert server.path == str(path)
        assert path.exists()


# ------------------------------------------------------------------ files that exist at the path


def leave_stale(path):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))
        sock.listen(1)


def test_a_stale_socket_is_replaced(path):
    leave_stale(path)
    file = _path.SocketFile(str(path))
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(path))
    assert stat.S_IMODE(path.lstat().st_mode) == 0o600
    file.close()
    assert os.listdir(path.parent) == []


@pytest.mark.parametrize("is_full", [False, True])
def test_a_socket_that_somebody_listens_on_is_refused(path, is_full):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))
        sock.listen(0)
        waiting = []
        while is_full:
            client = socket.socket(socket.AF_UNIX)
            waiting.append(client)
            client.setblocking(False)
            try:
                client.connect(str(path))
            except BlockingIOError:
                break
        with pytest.raises(OSError) as caught:
            _path.SocketFile(str(path))
        for client in waiting:
            client.close()
    assert caught.value.errno == errno.EADDRINUSE
    assert path.exists()
    assert os.listdir(path.parent) == ["app.bd"]


@pytest.mark.parametrize("kind", ["file", "directory", "link to a file", "link to a socket", "dangling link"])
def test_other_kinds_of_files_are_not_replaced(path, kind):
    target = path.parent / "target"
    if kind == "file":
        path.write_text("precious")
    elif kind == "directory":
        path.mkdir()
    else:
        if kind == "link to a file":
            target.write_text("precious")
        elif kind == "link to a socket":
            leave_stale(target)
        path.symlink_to(target)
    before = path.lstat()
    with pytest.raises(FileExistsError, match="already exists there"):
        _path.SocketFile(str(path))
    assert path.lstat() == before
    assert target.exists() == (kind.startswith("link"))


@needs_root
def test_a_socket_of_another_user_is_refused(path):
    leave_stale(path)
    os.lchown(path, NOBODY, -1)
    with pytest.raises(PermissionError, match=f"a socket of the user {NOBODY} already exists there"):
        _path.SocketFile(str(path))


def test_many_replace_a_stale_socket_at_once(path):
    """One thread wins, and its socket stays reachable. The other threads report that the socket is in use."""
    for _ in range(20):
        leave_stale(path)
        barrier = threading.Barrier(8)
        files, errors = [], []

        def begin():
            barrier.wait()
            try:
                files.append(_path.SocketFile(str(path)))
            except OSError as exc:
                errors.append(exc.errno)

        threads = [threading.Thread(target=begin) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(files) == 1
        assert set(errors) == {errno.EADDRINUSE}
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(path))
        files[0].close()
        assert os.listdir(path.parent) == []


def test_closing_leaves_the_file_of_a_successor(path):
    first = _path.SocketFile(str(path))
    path.unlink()
    second = _path.SocketFile(str(path))
    first.close()
    assert path.exists()
    second.close()
    assert not path.exists()


async def test_a_path_may_name_the_process(loop, path):
    with backdoor.serve(path.parent / "app-{pid}.bd") as server:
        assert server.path == str(path.parent / f"app-{os.getpid()}.bd")


async def test_a_forked_child_leaves_the_file_and_the_client_alone(loop, path):
    with backdoor.serve(path) as server, await call(path) as caller:
        text = await caller.ask("import os, warnings; warnings.simplefilter('ignore'); pid = os.fork() or os._exit(0)")
        assert text == ""
        assert await caller.ask("os.waitpid(pid, 0)[1]") == "0\n"
        assert not server.is_closed
        assert path.exists()


async def test_without_descriptors_the_server_waits_and_goes_on(loop, path, monkeypatch, caplog):
    monkeypatch.setattr("grapeshot.insight.backdoor._server._PAUSE_S", 0.001)
    with backdoor.serve(path) as server:

        class Failing:
            """A listening socket that has no descriptor for the first connection."""

            def __init__(self, sock):
                self.sock, self.failures = sock, 1

            def accept(self):
                if self.failures:
                    self.failures -= 1
                    raise OSError(errno.EMFILE, "Too many open files")
                return self.sock.accept()

            def __getattr__(self, name):
                return getattr(self.sock, name)

        server._file.sock = Failing(server._file.sock)
        with await call(path) as caller:
            assert await caller.ask("1 + 1") == "2\n"
    assert re.search("no client can be accepted: .*Too many open files", caplog.text)


def test_a_lock_that_somebody_keeps(path, monkeypatch):
    """A process that holds the lock of the directory cannot make this process hang."""
    monkeypatch.setattr(_path, "_LOCK_WITHIN_S", 0.01)
    leave_stale(path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(OSError, match="another process holds the lock") as caught:
            _path.SocketFile(str(path))
        assert caught.value.errno == errno.EADDRINUSE
    finally:
        os.close(descriptor)
    _path.SocketFile(str(path)).close()
