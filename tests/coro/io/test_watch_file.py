"""`coro.watch_file`: events of files and directories."""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
import time
from pathlib import Path

import pytest
from coro.io import vnode_events
from support import coro_is_available, in_thread, until_waiting

pytestmark = [
    pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter"),
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux has inotify"),
]
if coro_is_available():
    from grapeshot import coro
    from grapeshot.coro import _inotify, _kqueue, _watch_file


@pytest.fixture(params=["inotify", "kqueue"], autouse=True)
def system(request, monkeypatch):
    """Watch with inotify, and with a stand-in for the kqueue of other systems."""
    if request.param == "kqueue":
        monkeypatch.setattr(_kqueue, "_select", vnode_events)
        monkeypatch.setattr(_watch_file, "select", vnode_events)
    return request.param


@pytest.fixture(params=["coros", "threads"])
def run(request):
    """The function with which a test runs its code: in a coro, or in a thread where no coro runs."""
    return coro.run if request.param == "coros" else in_thread


def kinds(events):
    """Return the kinds of all pending events."""
    return [event and event.kind for event in vnode_events.events_of(events)]


def test_the_life_of_a_file(tmp_path, run):
    path = tmp_path / "file"

    def main():
        with coro.watch_file(path) as events:
            assert events.path == str(path)
            assert repr(events) == f"<watch_file {str(path)!r}>"
            assert kinds(events) == []
            path.write_bytes(b"")
            assert events.wait() == coro.FileEvent("created", str(path), None)
            with open(path, "ab", buffering=0) as file:
                file.write(b"a")
                assert events.wait() == ("modified", str(path), None)
                file.write(b"b")
                file.write(b"c")
                assert kinds(events) == ["modified"]
            path.read_bytes()
            path.chmod(0o600)
            assert kinds(events) == []
            os.truncate(path, 1)
            assert kinds(events) == ["modified"]
            path.unlink()
            assert kinds(events) == ["deleted"]

    run(main)


def test_others_in_the_same_directory_are_not_reported(tmp_path):
    path = tmp_path / "file"
    path.touch()

    def main():
        with coro.watch_file(path) as events:
            (tmp_path / "file2").write_bytes(b"x")
            (tmp_path / "file2").rename(tmp_path / "fil")
            (tmp_path / "fil").unlink()
            assert kinds(events) == []

    coro.run(main)


def test_editors_that_replace_the_file(tmp_path):
    path, other = tmp_path / "file", tmp_path / "file.new"
    path.write_bytes(b"old")

    def main():
        with coro.watch_file(path) as events:
            for turn in range(3):
                # A new file replaces the old one.
                other.write_bytes(b"new")
                other.rename(path)
                assert kinds(events) == ["created"]
                with open(path, "ab") as file:
                    file.write(b"more")
                assert kinds(events) == ["modified"], turn
                # The old file becomes a backup, whose changes are not reported.
                backup = tmp_path / "file~"
                path.rename(backup)
                assert events.wait() == ("moved", str(path), str(backup))
                backup.write_bytes(b"backup")
                assert kinds(events) == []
                path.write_bytes(b"newest")
                assert kinds(events) == ["created"]

    coro.run(main)


def test_a_file_that_others_keep_open_after_its_end(tmp_path):
    path = tmp_path / "file"

    def main():
        with open(path, "wb", buffering=0) as file, coro.watch_file(path) as events:
            path.unlink()
            assert kinds(events) == ["deleted"]
            file.write(b"x")
            assert kinds(events) == []
            path.touch()
            assert kinds(events) == ["created"]
            file.write(b"x")
            assert kinds(events) == []

    coro.run(main)


def test_links(tmp_path):
    """The target of a symbolic link is watched, and so is the link. A change through a hard link is reported, too."""
    first, second, link = tmp_path / "first", tmp_path / "second", tmp_path / "link"
    first.touch()
    second.touch()
    link.symlink_to(first)

    def main():
        with coro.watch_file(link) as events:
            first.write_bytes(b"x")
            assert kinds(events) == ["modified"]
            (tmp_path / "new").symlink_to(second)
            (tmp_path / "new").rename(link)
            assert kinds(events) == ["created"]
            first.write_bytes(b"y")
            assert kinds(events) == []
            second.write_bytes(b"z")
            assert kinds(events) == ["modified"]
        (tmp_path / "hard").hardlink_to(second)
        with coro.watch_file(second) as events:
            (tmp_path / "hard").write_bytes(b"longer")
            assert kinds(events) == ["modified"]

    coro.run(main)


def test_a_directory(tmp_path, run):
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    folder.mkdir()

    def main():
        with coro.watch_file(f"{folder}/") as events:
            (folder / "a").touch()
            assert events.wait(10) == ("created", str(folder / "a"), None)
            (folder / "a").write_bytes(b"x")
            assert events.wait(10) == ("modified", str(folder / "a"), None)
            (folder / "a").rename(folder / "b")
            assert events.wait() == ("moved", str(folder / "a"), str(folder / "b"))
            (folder / "b").rename(outside)
            assert events.wait() == ("moved", str(folder / "b"), None)
            outside.rename(folder / "c")
            assert events.wait() == ("created", str(folder / "c"), None)
            (folder / "c").unlink()
            assert events.wait() == ("deleted", str(folder / "c"), None)
            (folder / "below").mkdir()
            (folder / "below" / "file").touch()
            assert kinds(events) == ["created"]
            (folder / "below" / "file").unlink()
            (folder / "below").rmdir()
            folder.rmdir()
            assert [event.kind for event in events] == ["deleted", "deleted"]
            assert events.wait() is None

    run(main)


def test_the_end_of_the_directory_of_a_file(tmp_path):
    folder = tmp_path / "folder"
    for way, last in (("rmdir", "deleted"), ("rename", "moved")):
        folder.mkdir()
        (folder / "file").touch()

        def main(way=way, last=last):
            with coro.watch_file(folder / "file") as events:
                if way == "rmdir":
                    (folder / "file").unlink()
                    folder.rmdir()
                    assert [event.kind for event in events] == ["deleted", last]
                else:
                    folder.rename(tmp_path / "elsewhere")
                    assert list(events) == [(last, str(folder / "file"), None)]

        coro.run(main)


def test_a_relative_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def main():
        with coro.watch_file("file") as events:
            open("file", "wb").close()
            assert events.wait() == ("created", "file", None)
            os.rename("file", "other")
            assert events.wait() == ("moved", "file", "other")

    coro.run(main)


def test_names_of_any_bytes(tmp_path):
    name = os.fsencode(tmp_path) + b"/\xff name"

    def main():
        with coro.watch_file(name) as events:
            open(name, "wb").close()
            assert os.fsencode(events.wait().path) == name

    coro.run(main)


@pytest.mark.slow
@pytest.mark.parametrize("system", ["inotify"], indirect=True)
def test_overflow(tmp_path):
    """The kernel drops events when its queue is full, and says so."""
    limit = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    if limit > 100_000:
        pytest.skip("the queue is too long to fill")
    path, folder = tmp_path / "file", tmp_path / "folder"
    folder.mkdir()

    def main():
        with coro.watch_file(folder) as all_events, coro.watch_file(path) as events:
            for number in range(limit // 2 + 10):
                os.symlink("x", folder / "name")
                os.unlink(folder / "name")
                if number == 5:
                    path.touch()
            assert kinds(events) == ["created"]
            found = kinds(all_events)
            assert found[-1] == "overflow"
            assert found.count("overflow") == 1
            (folder / "later").touch()
            assert kinds(all_events) == ["created"]

    coro.run(main)


def test_a_timeout_while_other_files_change(tmp_path, monkeypatch):
    """Events keep waking the coro, but none of them is about the file."""
    end = time.monotonic() + 10

    def main():
        with coro.watch_file(tmp_path / "file") as events:
            receive = events._watch.receive

            def receive_more(left_s):
                if time.monotonic() < end:
                    (tmp_path / "other").touch()
                    (tmp_path / "other").unlink()
                return receive(left_s)

            monkeypatch.setattr(events._watch, "receive", receive_more)
            with pytest.raises(TimeoutError):
                events.wait(0.05)
        assert time.monotonic() < end

    coro.run(main)


def test_waiting():
    """A coro waits while others run; an interruption loses nothing; closing ends the iteration."""

    def main():
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "file")
            events = coro.watch_file(path)
            with events:
                waiting = coro.spawn(events.wait)
                until_waiting(waiting)
                with pytest.raises(coro.SimultaneousError):
                    events.wait()
                with open(path, "wb"):
                    assert waiting.join().kind == "created"
                with pytest.raises(TimeoutError):
                    events.wait(0.001)
                waiting = coro.spawn(events.wait)
                until_waiting(waiting)
                os.unlink(path)
                waiting.shutdown()
                waiting.join()
                assert events.wait(10).kind == "deleted"
                listing = coro.spawn(list, events)
                until_waiting(listing)
            assert listing.join() == []
            events.close()
            assert (events.wait(), list(events)) == (None, [])
            assert repr(events).endswith(", closed>")

    coro.run(main)


def test_files_that_cannot_be_watched(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        coro.watch_file(tmp_path / "nowhere" / "file")
    assert caught.value.filename == str(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        coro.watch_file(tmp_path / "file" / "below")
    with pytest.raises(TypeError):
        coro.watch_file(5)


@pytest.mark.parametrize("system", ["inotify"], indirect=True)
def test_a_system_with_neither_inotify_nor_kqueue(tmp_path, monkeypatch):
    monkeypatch.setattr(_inotify, "_made", [])
    monkeypatch.setattr(ctypes, "CDLL", lambda *args, **kwargs: object())
    with pytest.raises(NotImplementedError, match="kqueue"):
        coro.watch_file(tmp_path)
