"""Random programs give the same results on grapeshot's files as on Python's own: values, errors, and content."""

from __future__ import annotations

import io
import os
import random

import pytest

import grapeshot.files

pytestmark = pytest.mark.usefixtures("engine", "reads")

SEEDS = [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))]
STEPS = 60
TEXTS = ["", "a", "line\n", "two\nlines\n", "r\rn\r\nn\n", "ä€😀", "x" * 5000 + "\n", "\n" * 50, "€" * 3000]


async def result_of(function, *args):
    """Return the value of a call, or the type of its exception, for a file of either kind."""
    try:
        value = function(*args)
        if hasattr(value, "__await__"):
            value = await value
    except (OSError, ValueError) as error:
        return type(error)
    return value


class Pair:
    """A file of Python's and one of grapeshot's, on two copies of the same content."""

    def __init__(self, folder, content, mode, **options):
        self.paths = [folder / "python", folder / "grapeshot"]
        for path in self.paths:
            path.write_bytes(content)
        self.mode, self.options = mode, options

    async def __aenter__(self):
        self.files = [
            open(self.paths[0], self.mode, **self.options),
            await grapeshot.files.open(self.paths[1], self.mode, **self.options),
        ]
        return self

    async def __aexit__(self, *_):
        self.files[0].close()
        await self.files[1].close()

    async def both(self, name, *args):
        results = [await result_of(getattr(file, name), *args) for file in self.files]
        assert results[1] == results[0], (name, args)
        return results[1]


def content_of(choices, *, is_text):
    texts = "".join(choices.choice(TEXTS) for _ in range(choices.randrange(1, 8))) * choices.choice([1, 1, 40])
    return texts.encode() if is_text else texts.encode() + choices.randbytes(200)


@pytest.mark.only_on("grapeshot")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("buffering", [-1, 10])
@pytest.mark.parametrize("mode", ["rb", "r+b", "w+b", "a+b", "wb"])
async def test_binary_files(loop, tmp_path, mode, buffering, seed):
    choices = random.Random(seed)
    sizes = [-1, 0, 1, 7, 100, 9000, 70_000]
    if mode != "wb":  # some versions of Python refuse None before they see that the file cannot be read
        sizes.append(None)
    async with Pair(tmp_path, content_of(choices, is_text=False), mode, buffering=buffering) as pair:
        for _ in range(STEPS):
            match choices.randrange(9):
                case 0 | 1:
                    await pair.both("read", choices.choice(sizes))
                case 2:
                    await pair.both("readline", choices.choice([-1, 1, 5, 10_000]))
                case 3 | 4:
                    await pair.both("write", choices.randbytes(choices.choice([0, 1, 9, 300, 70_000])))
                    if "a" in mode:
                        # Python's buffer does not know that the data went to the end of the file.
                        await pair.both("seek", 0, os.SEEK_END)
                case 5:
                    await pair.both("seek", choices.choice([0, 1, 5, 4000, 100_000]), os.SEEK_SET)
                case 6:
                    await pair.both("seek", choices.choice([-3, 0, 2]), choices.choice([os.SEEK_CUR, os.SEEK_END]))
                case 7:
                    await pair.both("truncate", choices.choice([None, 3, 5000]))
                case 8:
                    await pair.both("flush")
            await pair.both("tell")
    assert pair.paths[1].read_bytes() == pair.paths[0].read_bytes()


@pytest.mark.only_on("grapeshot")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("newline", [None, "", "\n", "\r", "\r\n"])
@pytest.mark.parametrize("mode", ["r", "r+", "w+", "a+"])
async def test_text_files(loop, tmp_path, mode, newline, seed):
    choices = random.Random(seed)
    encoding = choices.choice(["utf-8", "utf-8", "utf-16", "latin-1", "utf-8-sig"])
    errors = "ignore" if encoding == "latin-1" else "strict"
    content = content_of(choices, is_text=True).decode().encode(encoding, errors)
    options = {"newline": newline, "encoding": encoding, "errors": errors}
    told = [(0, 0)]
    async with Pair(tmp_path, content, mode, **options) as pair:
        for _ in range(STEPS):
            match choices.randrange(8):
                case 0 | 1:
                    await pair.both("read", choices.choice([0, 1, 3, 100, 9000, 9000, -1]))
                case 2 | 3:
                    await pair.both("readline", *choices.choice([(), (), (4,), (9000,)]))
                case 4:
                    # A write elsewhere could overwrite half of a character.
                    await pair.both("seek", 0, os.SEEK_END)
                    await pair.both("write", choices.choice(TEXTS))
                    await pair.both("seek", 0, os.SEEK_END)
                case 5:
                    await pair.both("seek", 0, choices.choice([os.SEEK_SET, os.SEEK_END]))
                case 6:
                    # tell() may return different numbers for the two files: a number also says how to restore the
                    # decoder's state, and there is more than one way to do that.
                    told.append((pair.files[0].tell(), await pair.files[1].tell()))
                case 7:
                    python, ours = choices.choice(told)
                    pair.files[0].seek(python)
                    assert await pair.files[1].seek(ours) == ours
        assert pair.files[1].newlines == pair.files[0].newlines
    assert pair.paths[1].read_bytes() == pair.paths[0].read_bytes()


@pytest.mark.only_on("grapeshot")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", ["rb", "r+b", "ab"])
async def test_unbuffered_files(loop, tmp_path, mode, seed):
    choices = random.Random(seed)
    async with Pair(tmp_path, content_of(choices, is_text=False), mode, buffering=0) as pair:
        for _ in range(STEPS):
            match choices.randrange(6):
                case 0 | 1:
                    await pair.both("read", choices.choice([-1, 0, 3, 5000]))
                case 2:
                    await pair.both("write", choices.randbytes(choices.choice([0, 1, 300])))
                case 3:
                    await pair.both("seek", choices.choice([0, 7, 100_000]))
                case 4:
                    await pair.both("truncate", choices.choice([None, 50, 6000]))
                case 5:
                    await pair.both("readline")
            await pair.both("tell")
    assert pair.paths[1].read_bytes() == pair.paths[0].read_bytes()


@pytest.mark.only_on("grapeshot")
@pytest.mark.parametrize(
    ("args", "options"),
    [
        (("x", "q"), {}),
        (("x", "rw"), {}),
        (("x", ""), {}),
        (("x", "r++"), {}),
        (("x", "tb"), {}),
        (("x", "rb"), {"encoding": "utf-8"}),
        (("x", "rb"), {"newline": ""}),
        (("x", "rb"), {"errors": "strict"}),
        (("here", "r"), {"buffering": 0}),
        (("here", "r"), {"encoding": "no-such-encoding"}),
        (("here", "r"), {"newline": "x"}),
        (("x", 5), {}),
        ((None,), {}),
        ((1.5,), {}),
        ((-1,), {}),
        ((9999,), {}),
        (("x", "r"), {"closefd": False}),
        (("no-such-file",), {}),
        (("/",), {}),
        (("/", "wb"), {}),
        (("a\0b",), {}),
        ((b"no-such-file", "rb"), {}),
        (("",), {}),
        (("here", "x"), {}),
        (("here", "rb"), {"opener": lambda path, flags: -1}),
        (("here", "rb"), {"opener": lambda path, flags: "x"}),
    ],
)
async def test_wrong_arguments_and_paths(loop, tmp_path, monkeypatch, args, options):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").touch()
    with pytest.raises((OSError, ValueError, TypeError, LookupError)) as expected:
        open(*args, **options)
    with pytest.raises(expected.type) as raised:
        await grapeshot.files.open(*args, **options)
    assert raised.type is expected.type
    if isinstance(expected.value, OSError):
        assert raised.value.args == expected.value.args
        assert raised.value.filename == expected.value.filename


@pytest.mark.only_on("grapeshot")
@pytest.mark.parametrize("mode", ["r", "w", "x", "a", "rb", "r+b", "w+b", "xb", "ab", "a+b", "r+", "w+"])
@pytest.mark.parametrize("buffering", [-1, 0])
async def test_state(loop, tmp_path, mode, buffering):
    if buffering == 0 and "b" not in mode:
        pytest.skip("text files have a buffer")
    names = ["python", "grapeshot"]
    if "x" not in mode:
        for name in names:
            (tmp_path / name).write_text("content")
    with open(tmp_path / names[0], mode, buffering) as python:
        async with grapeshot.files.open(tmp_path / names[1], mode, buffering) as ours:
            assert ours.readable() == python.readable()
            assert await ours.writable() == python.writable()
            assert await ours.seekable() == python.seekable()
            assert await ours.isatty() == python.isatty()
            assert ours.mode == python.mode
            assert ours.name == tmp_path / names[1]
            assert not os.get_inheritable(ours.fileno())
            for call in (("read",), ("write", "x" if "b" not in mode else b"x"), ("readline",), ("tell",)):
                expected = await result_of(getattr(python, call[0]), *call[1:])
                assert await result_of(getattr(ours, call[0]), *call[1:]) == expected, call
            if isinstance(python, io.TextIOWrapper):
                assert (ours.encoding, ours.errors) == (python.encoding, python.errors)
    assert ours.closed
    for name in ("read", "readline", "tell", "flush", "writable", "isatty", "truncate"):
        assert await result_of(getattr(ours, name)) is ValueError, name
    with pytest.raises(ValueError, match="closed file"):
        ours.fileno()
    await ours.close()
