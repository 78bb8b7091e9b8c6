"""What is special about `coro.watch_file` with kqueue: it compares directory listings and keeps files open."""

from __future__ import annotations

import errno
import os
import resource
import sys

import pytest
from coro.io import vnode_events
from support import coro_is_available

pytestmark = [
    pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter"),
    pytest.mark.skipif(sys.platform != "linux", reason="the events are made with inotify, which only Linux has"),
]
if coro_is_available():
    from grapeshot import coro
    from grapeshot.coro import _kqueue, _watch_file


@pytest.fixture(autouse=True)
def by_kqueue(monkeypatch):
    monkeypatch.setattr(_kqueue, "_select", vnode_events)
    monkeypatch.setattr(_watch_file, "select", vnode_events)


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "folder"
    path.mkdir()
    return path


def told(events):
    """Return the pending events, with base names instead of paths."""
    return [
        event and tuple(os.path.basename(each) if each else each for each in event)
        for event in vnode_events.events_of(events)
    ]


def open_descriptors():
    paths = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    # Leave out the descriptor with which the directory was listed.
    return {path: os.readlink(path) for path in paths if os.path.lexists(path)}


def rotate(folder):
    (folder / "a").rename(folder / "a.1")
    (folder / "a").touch()


def replace(folder):
    (folder / "new").write_bytes(b"new")
    (folder / "new").rename(folder / "a")


def write_and_replace(folder):
    (folder / "a").write_bytes(b"longer")
    replace(folder)


def write_anew(folder):
    (folder / "a").unlink()
    (folder / "a").write_bytes(b"new")


def come_and_go(folder):
    (folder / "new").touch()
    (folder / "new").unlink()


def exchange(folder):
    for source, destination in (("a", "c"), ("b", "a"), ("c", "b")):
        (folder / source).rename(folder / destination)


def link(folder):
    (folder / "c").hardlink_to(folder / "a")


def unlink_one(folder):
    (folder / "first").unlink()


def move_over(folder):
    (folder / "b").rename(folder / "a")


def move_out(folder):
    (folder / "a").rename(folder.parent / "a")


def move_out_for_another(folder):
    move_out(folder)
    (folder / "a").touch()


def move_and_write(folder):
    (folder / "a").rename(folder / "c")
    (folder / "c").write_bytes(b"more")


def move_and_delete(folder):
    (folder / "a").rename(folder / "c")
    (folder / "c").unlink()


def move_others_out(folder):
    for name in ("link", "below"):
        (folder / name).rename(folder.parent / name)


def move_others(folder):
    for name in ("link", "below"):
        (folder / name).rename(folder / f"{name}2")


@pytest.mark.parametrize(
    ("change", "in_directory", "of_file"),
    [
        (rotate, [("moved", "a", "a.1"), ("created", "a", None)], [("moved", "a", "a.1"), ("created", "a", None)]),
        (replace, [("created", "a", None)], [("created", "a", None)]),
        (write_and_replace, [("created", "a", None)], [("created", "a", None)]),
        (write_anew, [("created", "a", None)], [("created", "a", None)]),
        (come_and_go, [], []),
        (exchange, [("moved", "a", "b"), ("moved", "b", "a")], [("moved", "a", "b"), ("created", "a", None)]),
        (link, [("created", "c", None)], []),
        (unlink_one, [("deleted", "first", None)], []),
        (move_over, [("moved", "b", "a")], [("created", "a", None)]),
        (move_out, [("moved", "a", None)], [("moved", "a", None)]),
        (
            move_out_for_another,
            [("moved", "a", None), ("created", "a", None)],
            [("moved", "a", None), ("created", "a", None)],
        ),
        (move_and_write, [("moved", "a", "c"), ("modified", "c", None)], [("moved", "a", "c")]),
        (move_and_delete, [("deleted", "a", None)], [("deleted", "a", None)]),
        (move_others_out, [("deleted", "below", None), ("deleted", "link", None)], []),
        (move_others, [("moved", "below", "below2"), ("moved", "link", "link2")], []),
    ],
)
def test_changes_between_two_listings(folder, change, in_directory, of_file):
    for name in ("a", "b", "first"):
        (folder / name).write_text(name)
    (folder / "second").hardlink_to(folder / "first")
    (folder / "link").symlink_to("a")
    (folder / "below").mkdir()

    def main():
        before = open_descriptors()
        with coro.watch_file(folder) as all_events, coro.watch_file(folder / "a") as events:
            change(folder)
            # A directory lists its names in any order, so the events of some changes come in any order, too.
            found = told(all_events)
            assert (sorted(found) if change in (exchange, move_others_out, move_others) else found) == in_directory
            assert told(events) == of_file
            # Each file that exists now is watched under its present name.
            for path in sorted(folder.iterdir()):
                if path.name in {"a", "b", "c", "a.1", "second"}:
                    with open(path, "ab") as file:
                        file.write(b"x")
                    names = {each.name for each in folder.iterdir() if each.is_file() and each.samefile(path)}
                    names -= {"link", "link2"}
                    assert sorted(told(all_events)) == [("modified", name, None) for name in sorted(names)]
                    assert told(events) == [("modified", "a", None) for name in names if name == "a"]
        assert open_descriptors() == before

    coro.run(main)


def test_the_target_of_a_link_into_another_directory_is_watched(tmp_path, folder):
    (tmp_path / "file").touch()
    (folder / "link").symlink_to("../file")

    def main():
        with coro.watch_file(folder / "link") as events:
            (folder / "link").rename(folder / "other")
            assert told(events) == [("moved", "link", "other")]
            (folder / "other").rename(folder / "link")
            assert told(events) == [("created", "link", None)]
            (tmp_path / "file").rename(tmp_path / "file2")
            assert told(events) == []
            (tmp_path / "file2").write_bytes(b"x")
            assert told(events) == [("modified", "link", None)]
            (folder / "link").rename(tmp_path / "link")
            assert told(events) == [("deleted", "link", None)]

    coro.run(main)


def test_a_fifo_is_not_opened(folder):
    os.mkfifo(folder / "fifo")

    def main():
        with coro.watch_file(folder) as all_events, coro.watch_file(folder / "fifo") as events:
            with pytest.raises(OSError) as caught:
                os.open(folder / "fifo", os.O_WRONLY | os.O_NONBLOCK)
            assert caught.value.errno == errno.ENXIO  # the FIFO has no reader
            (folder / "fifo").unlink()
            assert told(all_events) == told(events) == [("deleted", "fifo", None)]

    coro.run(main)


def test_descriptors_are_closed(folder):
    def main():
        before = open_descriptors()
        for path in (folder / "nowhere" / "file", folder / "file" / "below"):
            (folder / "file").touch()
            with pytest.raises(OSError):
                coro.watch_file(path)
            assert open_descriptors() == before
        with coro.watch_file(folder / "file") as events:
            watching = open_descriptors()
            for _ in range(3):
                (folder / "file").unlink()
                assert told(events) == [("deleted", "file", None)]
                assert len(open_descriptors()) == len(watching) - 1
                (folder / "file").touch()
                assert told(events) == [("created", "file", None)]
                assert open_descriptors() == watching
        assert open_descriptors() == before
        events = coro.watch_file(folder)
        with pytest.warns(ResourceWarning, match="unclosed"):
            del events
        assert open_descriptors() == before

    coro.run(main)


@pytest.fixture
def leave():
    """Return a function that leaves `count` descriptors free or, without a count, restores the limit."""
    old = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = []

    def leave(count=None):
        if count is None:
            resource.setrlimit(resource.RLIMIT_NOFILE, old)
            return
        highest = max(int(name) for name in os.listdir("/proc/self/fd"))
        while not taken or taken[-1] < highest:
            taken.append(os.open("/", os.O_RDONLY))
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(taken[-1], highest) + 1 + count, old[1]))

    yield leave
    resource.setrlimit(resource.RLIMIT_NOFILE, old)
    for fd in taken:
        os.close(fd)


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_descriptors_run_out_at_the_start(folder, leave, count):
    """The descriptors run out at the kqueue (0 are left), the directory (1), its listing (2) or the second file (3).

    The listing is closed before the files are opened.
    """
    for name in ("a", "b"):
        (folder / name).touch()

    def main():
        leave(count)
        with pytest.raises(OSError) as caught:
            coro.watch_file(folder)
        assert caught.value.errno == errno.EMFILE
        leave()
        leave(4)
        coro.watch_file(folder).close()

    coro.run(main)


def test_descriptors_run_out_later(tmp_path, folder, leave):
    """The next comparison of listings finds the changes that were missed for lack of a descriptor."""
    (tmp_path / "other").touch()
    (tmp_path / "another").touch()

    def main():
        with coro.watch_file(folder) as all_events, coro.watch_file(folder / "file") as events:
            leave(0)
            (tmp_path / "other").rename(folder / "file")
            assert told(all_events) == [("overflow", "folder", None)]
            assert told(events) == [("overflow", "file", None), ("created", "file", None)]
            leave()
            (tmp_path / "another").rename(folder / "file")
            assert told(all_events) == told(events) == [("created", "file", None)]
            (folder / "file").write_bytes(b"x")
            assert told(all_events) == told(events) == [("modified", "file", None)]

    coro.run(main)


def test_the_end_of_a_directory(folder):
    def main():
        for notes, kind in ((vnode_events.KQ_NOTE_REVOKE, "deleted"), (vnode_events.KQ_NOTE_RENAME, "moved")):
            with coro.watch_file(folder) as events:
                # `vnode_events` never reports REVOKE, so the notes are passed directly. A real kqueue reports REVOKE,
                # for example, when the file system is unmounted by force.
                events._watch._take({events._watch._root: notes})
                assert told(events) == [(kind, "folder", None), None]

    coro.run(main)
