"""Coros yield in Python functions that C code calls: callbacks of functions and parsers in C, and special methods."""

from __future__ import annotations

import ast
import bisect
import copy
import functools
import heapq
import io
import itertools
import json
import pickle
import re
import sys
import textwrap
from collections import OrderedDict, defaultdict, deque

import pytest
from support import coro_is_available, run_script, together

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import coro

COUNT = 10


def slow(value):
    """Yield, then return the value."""
    coro.yield_slice()
    return value


def check(work, count=COUNT, **options):
    """Check that `work` returns the same in plain calls and in coros. `work` is called with a number, and with a
    function that yields only in coros.
    """
    expected = [work(number, lambda value: value) for number in range(count)]
    assert together(lambda number: work(number, slow), count, **options) == expected


# ---------------------------------------------------------------- functions of the interpreter

C_FUNCTIONS = {
    "sorted": lambda n, pause: sorted(range(n + 5), key=lambda x: pause(-x)),
    "list.sort": lambda n, pause: (items := [*range(n, -n, -1)], items.sort(key=pause)),
    "cmp_to_key": lambda n, pause: sorted(range(n), key=functools.cmp_to_key(lambda a, b: pause(b - a))),
    "min, max": lambda n, pause: (min(range(n + 1), key=pause), max(range(n + 1), key=pause)),
    "map": lambda n, pause: list(map(pause, range(n))),
    "nested map": lambda n, pause: list(map(lambda x: list(map(pause, range(x))), range(5))),  # noqa: C417
    "filter": lambda n, pause: list(filter(lambda x: pause(x % 2), range(n))),
    "reduce": lambda n, pause: functools.reduce(lambda a, b: pause(a + b), range(n), 0),
    "partial": lambda n, pause: functools.partial(functools.partial(pause, n))(),
    "any, all": lambda n, pause: (any(pause(x > 3) for x in range(n)), all(pause(x < 3) for x in range(n))),
    "zip": lambda n, pause: list(zip(map(pause, range(n)), map(pause, "abcde"), strict=False)),
    "iter": lambda n, pause: list(iter(functools.partial(pause, n), n)),
    "itertools": lambda n, pause: (
        [(key, list(group)) for key, group in itertools.groupby(range(n), lambda x: pause(x // 3))],
        list(itertools.accumulate(range(n), lambda a, b: pause(a + b))),
        list(itertools.takewhile(lambda x: pause(x < 3), range(n))),
    ),
    "re.sub": lambda n, pause: re.sub("[a-e]", lambda match: pause(match[0].upper() * n), "a cabbage"),
    "json hooks": lambda n, pause: (
        json.loads('{"a": [{"b": %d}, 1.5]}' % n, object_hook=pause, parse_float=pause, parse_int=pause),
        json.dumps({"a": object(), "b": [object()]}, default=lambda _: pause(n), indent=1),
    ),
    "heapq, bisect": lambda n, pause: (
        heapq.nlargest(3, range(n), key=pause),
        bisect.bisect([0, 3, 5, 9], n, key=pause),
    ),
    "eval, exec": lambda n, pause: (
        eval("pause(n) + 1"),
        exec("out[0] = pause(n)", {"pause": pause, "out": [0], "n": n}),
    ),
    "deep": lambda n, pause: functools.reduce(
        lambda a, b: min([a, b], key=lambda x: next(map(pause, [x]))), range(n), n
    ),
    "defaultdict": lambda n, pause: [mapping[n] for mapping in [defaultdict(lambda: pause(n))]],
    "lru_cache": lambda n, pause: [cached(n % 3) for cached in [functools.lru_cache(pause)] for _ in range(3)],
    "f-string, %": lambda n, pause: f"{Special(n, pause)!r:>5} {Special(n, pause)} %s" % Special(n, pause),
    "print": lambda n, pause: (out := io.StringIO(), print(Special(n, pause), file=out), out.getvalue())[2],
    "bytes, int, float": lambda n, pause: (bytes(Special(n, pause)), int(Special(n, pause)), float(Special(n, pause))),
    "callables in C": lambda n, pause: list(map(Special(n, pause), range(3))),
}


class Special:
    """An object whose special methods yield."""

    def __init__(self, value, pause=slow):
        self.value, self.pause = value, pause

    def __hash__(self):
        return self.pause(self.value % 3)

    def __eq__(self, other):
        return isinstance(other, Special) and self.pause(self.value) == other.value

    def __lt__(self, other):
        return self.pause(self.value) < other.value

    def __add__(self, other):
        return Special(self.pause(self.value) + other.value, self.pause)

    def __iter__(self):
        self.pause(None)
        return map(self.pause, range(self.value))

    def __len__(self):
        return self.pause(self.value)

    def __contains__(self, item):
        return self.pause(item == self.value)

    def __getitem__(self, item):
        return self.pause(item)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self.pause(name)

    def __call__(self, argument):
        return self.pause((self.value, argument))

    def __repr__(self):
        return self.pause(f"<{self.value}>")

    def __bytes__(self):
        return self.pause(b"%d" % self.value)

    def __int__(self):
        return self.pause(self.value)

    def __float__(self):
        return self.pause(float(self.value))

    def __index__(self):
        return self.pause(self.value)

    def __bool__(self):
        return self.pause(self.value % 2 == 0)

    def __enter__(self):
        return self.pause(self)

    def __exit__(self, *_):
        return self.pause(True)

    def __reduce__(self):
        return Special, (self.pause(self.value),)

    def __deepcopy__(self, memo):
        return Special(self.pause(self.value), self.pause)


@pytest.mark.parametrize("name", C_FUNCTIONS)
def test_functions_of_the_interpreter(name):
    work = C_FUNCTIONS[name]
    check(lambda number, pause: repr(work(number, pause)) if name == "list.sort" else work(number, pause), 6)


def test_special_methods():
    def work(number, pause):
        value = Special(number, pause)
        with value:
            raise KeyError
        return [
            min(Special(x, pause) for x in (3, number, 1)).value,
            sum((Special(x, pause) for x in range(number)), value).value,
            list(value),
            [*value, *value],
            len(value),
            number in value,
            value[number:],
            value.anything,
            getattr(value, "other", None),
            hasattr(value, "__other__"),
            bool(value),
            value(5),
            repr([value, {"a": value}]),
            range(10)[value] if number < 10 else None,
            hex(value),
            dict.fromkeys(map(pause, "abc")),
            [x.value for x in copy.deepcopy([value, value])],
        ]

    check(work)


def test_hashes_and_comparisons_in_dicts_and_sets():
    """While a lookup in a dict is suspended in `__eq__`, other coros insert into the same dict."""
    shared: dict = {}

    def work(number):
        mine = {Special(x): x for x in range(12)}
        assert sorted(mine.values()) == list(range(12))
        assert {Special(x) for x in range(4)} == {Special(x) for x in range(4)}
        shared[Special(number)] = number
        assert shared[Special(number)] == number
        ordered = OrderedDict((Special(x), x) for x in range(5))
        ordered.move_to_end(Special(0))
        return deque(map(Special, range(5))).index(Special(number % 5)), [*ordered.values()]

    assert together(work) == [(number % 5, [1, 2, 3, 4, 0]) for number in range(COUNT)]
    assert sorted(shared.values()) == list(range(COUNT))


def test_pickling():
    def work(number):
        data = [Special(x) for x in range(number)]
        again = pickle.loads(pickle.dumps({"data": data, "more": tuple(data)}))
        return [x.value for x in again["data"]], len(again["more"])

    assert together(work, 5) == [([*range(number)], number) for number in range(5)]


def test_descriptors_metaclasses_and_class_bodies():
    class Meta(type):
        def __new__(cls, name, bases, namespace, **options):
            coro.yield_slice()
            return super().__new__(cls, name, bases, namespace)

        @classmethod
        def __prepare__(cls, name, bases, **options):
            coro.yield_slice()
            return {"option": slow(options["option"])}

        def __call__(cls, *args):
            coro.yield_slice()
            return super().__call__(*args)

        def __instancecheck__(cls, instance):
            return slow(instance == 5)

    class Descriptor:
        def __set_name__(self, owner, name):
            self.name = slow(name)

        def __get__(self, instance, owner):
            return slow((self.name, instance.value))

        def __set__(self, instance, value):
            instance.__dict__["value"] = slow(value)

    def work(number):
        class Base:
            def __init_subclass__(cls, **_):
                coro.yield_slice()

        class Local(Base, metaclass=Meta, option=number):
            coro.yield_slice()
            doubled = tuple(slow(x) for x in (option, option))  # noqa: F821
            attribute = Descriptor()

            def __new__(cls, value):
                coro.yield_slice()
                return super().__new__(cls)

            def __init__(self, value):
                self.attribute = value

            @functools.cached_property
            def cached(self):
                return slow(number)

            @property
            def prop(self):
                return slow(self.cached)

        local = Local(-number)
        return Local.option, Local.doubled, local.attribute, local.prop, isinstance(5, Local), isinstance(6, Local)

    assert together(work) == [(n, (n, n), ("attribute", -n), n, True, False) for n in range(COUNT)]


def test_modules_whose_bodies_yield(tmp_path, monkeypatch):
    for number in range(4):
        (tmp_path / f"slow_module_{number}.py").write_text(
            textwrap.dedent(
                f"""
                from grapeshot import coro
                before = True
                coro.yield_slice()
                if {number}:
                    import slow_module_{max(number - 1, 0)} as other
                    assert other.after
                coro.yield_slice()
                after = True
                """
            )
        )
    monkeypatch.syspath_prepend(tmp_path)

    def work(number):
        import importlib

        return importlib.import_module(f"slow_module_{number}").after

    def main():
        # Each module imports the previous one. The coros run one after the other: import locks belong to threads, so a
        # coro would not wait for a module that another coro is importing, and would get the module half initialized.
        assert [coro.spawn(work, number).join() for number in (1, 3)] == [True, True]
        return True

    assert coro.run(main)
    for name in [name for name in sys.modules if name.startswith("slow_module_")]:
        del sys.modules[name]


def test_an_import_that_another_coro_has_begun(tmp_path, monkeypatch):
    """The thread of both coros already holds the import lock, so the second coro gets the partly initialized module."""
    (tmp_path / "half_done.py").write_text(
        "from grapeshot import coro\nbefore = 1\ncoro.yield_slice()\ncoro.yield_slice()\nafter = 2\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def work():
        import half_done

        return hasattr(half_done, "before"), hasattr(half_done, "after")

    def main():
        first = coro.spawn(work)
        second = coro.spawn(work)
        return first.join(), second.join(), work()

    assert coro.run(main) == ((True, True), (True, False), (True, True))
    del sys.modules["half_done"]


def test_parsers_and_readers_of_the_interpreter():
    class Lines:
        def __init__(self, text):
            self.lines = iter(text.splitlines(keepends=True))

        def readline(self, *_):
            coro.yield_slice()
            return next(self.lines, "")

        def write(self, data):
            return len(slow(data))

    class Raw(io.RawIOBase):
        def __init__(self, data):
            self.data = io.BytesIO(data)

        def readable(self):
            return True

        def readinto(self, buffer):
            coro.yield_slice()
            return self.data.readinto(buffer)

    def work(number):
        import csv
        import tokenize

        rows = list(csv.reader(map(slow, ["a,b\n", f"{number},2\n"])))
        csv.writer(Lines("")).writerow([number])
        tokens = [token.string for token in tokenize.generate_tokens(Lines(f"x = {number}\n").readline)]
        text = io.TextIOWrapper(io.BufferedReader(Raw(b"one\ntwo %d\n" % number), 4))
        tree = ast.NodeVisitor().visit(ast.parse(f"x = {number}"))
        return rows[1], tokens[2], text.readlines()[1], tree

    assert together(work) == [([str(n), "2"], str(n), f"two {n}\n", None) for n in range(COUNT)]


def test_audit_hooks_and_import_hooks_that_yield():
    """The script runs in its own process, because an audit hook cannot be removed."""
    out = run_script(
        None,
        """
        import builtins, sys
        from grapeshot import coro

        seen = set()

        def hook(event, args):
            if event == "my.event":
                coro.yield_slice()
                seen.add(args)

        class Finder:
            @staticmethod
            def find_spec(name, path, target=None):
                coro.yield_slice()

        sys.addaudithook(hook)
        sys.meta_path.insert(0, Finder)

        def work(number):
            for step in range(3):
                sys.audit("my.event", number, step)
            try:
                import nothing_of_that_name
            except ImportError:
                return number

        def display(value):
            coro.yield_slice()
            seen.add(value)

        sys.displayhook = display

        def main():
            print([co.join() for co in [coro.spawn(work, number) for number in range(5)]])
            for co in [coro.spawn(exec, compile(f"{n}; {n} + 1", "<prompt>", "single"), {}) for n in (100, 200)]:
                co.join()

        coro.run(main)
        print(len(seen))
        """,
        flags=("-W", "error", "-X", "faulthandler"),
    )
    assert out.split("\n")[:2] == ["[0, 1, 2, 3, 4]", "19"]
