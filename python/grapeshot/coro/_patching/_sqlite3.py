"""The part ``sqlite3`` of :func:`grapeshot.coro.patch`: other coros run while one waits for a locked database.

SQLite itself waits in C code, for up to the connection's timeout. Here SQLite gets a timeout of one millisecond, and
the coro repeats the call, with pauses, until the connection's own timeout is over. A call may be repeated only if it
has changed nothing when it finds the database locked. These calls can be repeated, or continued:

- A statement in a transaction, or one that begins a transaction, takes its locks before it does anything. So it can be
  repeated.
- Outside of a transaction, a statement also commits. If the commit fails, SQLite undoes the statement, so it can be
  repeated as a whole.
- ``executemany`` and scripts execute one statement after the other. If one of these finds the database locked, only
  this one is repeated. (In a transaction, only the first statement of an ``executemany`` can find the database locked.)
- A commit that finds the database locked leaves the transaction open, so it can be repeated.

A statement that changes data outside of a transaction cannot be repeated if it calls functions of the program or
returns rows (``RETURNING``): a repetition would call the functions, or return the rows, a second time. In this case the
coro repeats ``BEGIN EXCLUSIVE`` until it succeeds, and ends this empty transaction. Then it executes the statement at
once, with the connection's own timeout.

If waiting would be a deadlock, SQLite does not wait. (For example, a transaction that has read something wants to
write, while another one waits for all readers to end.) Such a call takes less than one millisecond, and its error is
raised at once, as without patching.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import sqlite3
import sys
import tempfile

from grapeshot import _core
from grapeshot.coro._countdown import Countdown

from . import _originals, _waits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any

_monotonic = _core._coro_monotonic
_ident = _core._coro_get_ident
_connect: Any = sqlite3.connect
_Connection: Any = sqlite3.Connection
_Cursor: Any = sqlite3.Cursor

# The timeout that SQLite gets while a coro repeats calls. It is not 0, because the duration of a call shows whether
# SQLite has waited in it.
_PROBE_MS = 1
_PROBE_S = _PROBE_MS / 1000
# SQLite has waited in a call that took at least this long.
_LEAST_S = 0.9 * _PROBE_S
# The pauses between two attempts, in seconds. The last one is repeated. SQLite itself begins with the same pauses.
_PAUSES_S = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.025)
# The position of `factory` among the arguments of connect().
_FACTORY_INDEX = 5
_LEGACY = getattr(sqlite3, "LEGACY_TRANSACTION_CONTROL", -1)
_HAS_AUTOCOMMIT = sys.version_info >= (3, 12)

_SPACE = r"(?:\s|--[^\n]*(?:\n|$)|/\*.*?\*/)*"
_TOKEN = re.compile(r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|`(?:[^`]|``)*`|\[[^\]]*\]|--[^\n]*|/\*.*?\*/|;""", re.DOTALL)
_FIRST_WORD = re.compile(_SPACE + r"(\w+)", re.DOTALL)
_ASKS_TIMEOUT = re.compile(_SPACE + r"pragma\s+(?:\w+\s*\.\s*)?busy_timeout\s*;?\s*$", re.DOTALL | re.IGNORECASE)
# Before these statements, the module sqlite3 begins a transaction.
_BEGINNING = frozenset(("insert", "update", "delete", "replace"))
# Outside of a transaction, these statements can always be repeated: if they find the database locked, they have neither
# written anything nor called a function of the program.
_HARMLESS = frozenset(("select", "pragma", "begin", "commit", "end", "rollback", "savepoint", "release"))


def _is_busy(error: sqlite3.OperationalError) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY


def _first_word(sql: Any) -> str:
    found = _FIRST_WORD.match(sql) if isinstance(sql, str) else None
    return found[1].lower() if found else ""


class _Parameters:
    """The parameters of ``executemany``. Each attempt begins with the first tuple of parameters.

    ``is_past_first`` becomes true when an attempt asks for the second tuple.
    """

    def __init__(self, parameters: Any) -> None:
        self._rest = iter(parameters)
        self._first = tuple(itertools.islice(self._rest, 1))
        self.is_past_first = False

    def __iter__(self) -> Iterator[Any]:
        return itertools.chain(self._first, self._note(), self._rest)

    def _note(self) -> Iterator[Any]:
        self.is_past_first = True
        yield from ()


class Cursor(sqlite3.Cursor):
    """A cursor whose calls let other coros run while the database is locked."""

    # For executemany() outside of a transaction: the number of rows changed by all its statements except the last.
    _changed = 0

    @property
    def rowcount(self) -> int:
        count: int = _Cursor.rowcount.__get__(self)
        return count + self._changed if self._changed else count

    def execute(self, sql: Any, /, *parameters: Any) -> Any:
        self._changed = 0
        owner = _owner_of(self)
        if owner is None:
            return _Cursor.execute(self, sql, *parameters)
        if isinstance(sql, str) and ("busy_timeout" in sql or "busy_timeout" in sql.lower()):
            return owner._set_timeout(self, sql, parameters)
        if not owner._must_block(sql):
            return owner._repeat(_Cursor.execute, self, sql, *parameters)
        result = owner._call_alone(_Cursor.execute, self, sql, *parameters)
        if self.description is not None and not isinstance(self, _Fetching):
            self.__class__ = _fetching(type(self))
        return result

    def executemany(self, sql: str, parameters: Any, /) -> Any:
        self._changed = 0
        owner = _owner_of(self)
        if owner is None:
            return _Cursor.executemany(self, sql, parameters)
        if owner._commits_itself(_first_word(sql)):
            return self._execute_each(owner, sql, iter(parameters))
        given = _Parameters(parameters)

        def attempt() -> Any:
            try:
                return _Cursor.executemany(self, sql, iter(given))
            except sqlite3.OperationalError as error:
                if not given.is_past_first:
                    raise
                # The statement was executed with the first parameters, so it got the locks. Do not repeat the call.
                return error

        outcome = owner._repeat(attempt)
        if isinstance(outcome, sqlite3.OperationalError):
            raise outcome
        return outcome

    def _execute_each(self, owner: Connection, sql: str, parameters: Iterator[Any]) -> Any:
        """Implements ``executemany`` outside of a transaction, where each statement commits by itself."""
        calls = owner._call_alone if owner._must_block(sql) else owner._repeat
        calls(_Cursor.executemany, self, sql, tuple(itertools.islice(parameters, 1)))
        for each in parameters:
            changed = self.rowcount
            calls(_Cursor.executemany, self, sql, (each,))
            self._changed = changed
        return self

    def executescript(self, sql_script: Any, /) -> Any:
        self._changed = 0
        owner = _owner_of(self)
        if owner is None or not isinstance(sql_script, str) or not owner._waits_as_coro():
            return _Cursor.executescript(self, sql_script) if owner is None else owner._run_script(self, sql_script)
        return owner._run_statements(self, sql_script)


class _Fetching:
    """A cursor over the rows of a statement that commits when its last row is fetched.

    If the commit finds the database locked, SQLite itself waits, and blocks the thread.
    """

    __slots__ = ()

    def _prepare(self: Any) -> None:
        owner = _owner_of(self)
        if owner is not None:
            owner._set_now(owner._limit_ms)

    def __next__(self: Any) -> Any:
        self._prepare()
        return _Cursor.__next__(self)

    def fetchone(self: Any) -> Any:
        self._prepare()
        return _Cursor.fetchone(self)

    def fetchmany(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._prepare()
        return _Cursor.fetchmany(self, *args, **kwargs)

    def fetchall(self: Any) -> Any:
        self._prepare()
        return _Cursor.fetchall(self)


@functools.cache
def _fetching(kind: type) -> type:
    """Return a subclass of a cursor class, with the methods of ``_Fetching``.

    ``Cursor.execute`` assigns it to the ``__class__`` of an existing cursor.
    """
    members = {
        "__slots__": (),
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
    }
    return type(kind.__name__, (_Fetching, kind), {**members, "__slots__": ()})


def _owner_of(cursor: Cursor) -> Connection | None:
    try:
        connection: Any = cursor.connection
    except sqlite3.ProgrammingError:
        # The caller then calls sqlite3's own method, which raises the error.
        return None
    return connection if isinstance(connection, Connection) else None


def _statements(script: str) -> Iterator[str]:
    """Split a script into its statements, with their text unchanged."""
    begin = 0
    for found in _TOKEN.finditer(script):
        end = found.end()
        if found[0] == ";" and sqlite3.complete_statement(script[begin:end]):
            yield script[begin:end]
            begin = end
    if script[begin:].strip():
        yield script[begin:]


@functools.cache
def _has_short_sleeps() -> bool:
    """Whether SQLite can sleep for a millisecond. Some builds can sleep only for whole seconds."""
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "locked")
        with (
            contextlib.closing(_connect(path, isolation_level=None)) as holder,
            contextlib.closing(_connect(path, timeout=_PROBE_S, isolation_level=None)) as other,
        ):
            holder.execute("BEGIN EXCLUSIVE")
            began_s = _monotonic()
            with contextlib.suppress(sqlite3.OperationalError):
                other.execute("BEGIN EXCLUSIVE")
            return _monotonic() - began_s >= _LEAST_S


class _Callbacks:
    """Wraps a program's authorizer and trace callback, so that this module's own statements do not call them.

    These statements are ``BEGIN EXCLUSIVE``, ``ROLLBACK`` and ``PRAGMA busy_timeout``.
    """

    def __init__(self) -> None:
        # The threads and coros that are executing one of this module's own statements now. In other threads and coros,
        # statements still call the callbacks.
        self.off_for: set[int] = set()

    def wrap(self, callback: Any, result: Any) -> Any:
        """Return a callback that calls the program's, or returns ``result`` while callbacks are off."""
        if not callable(callback):
            return callback

        def call(*args: Any) -> Any:
            return result if _ident() in self.off_for else callback(*args)

        return call


class Connection(sqlite3.Connection):
    """A connection whose calls let other coros run while the database is locked."""

    # The timeout that the program has set.
    _limit_ms = 0
    # Has one item: the timeout that SQLite has now, or None if it is not known or is being changed. Each change stores
    # a new list here. If a thread has changed the timeout and then does not find its own list here, another thread has
    # changed the timeout, too.
    _now_ms: Sequence[int | None] = (0,)
    # True once SQLite itself has to wait for locks. The methods that set it say why.
    _blocks = False
    _has_functions = False
    _callbacks: _Callbacks | None = None

    def __init__(self, database: Any, *args: Any, **kwargs: Any) -> None:
        timeout = args[0] if args else kwargs.get("timeout", 5.0)
        if isinstance(timeout, (int, float)) and _PROBE_S < timeout < 2**31 / 1000:
            self._limit_ms, self._now_ms = int(timeout * 1000), [_PROBE_MS]
            if args:
                args = (_PROBE_S, *args[1:])
            else:
                kwargs["timeout"] = _PROBE_S
        super().__init__(database, *args, **kwargs)

    # ------------------------------------------------------------ waiting

    def _waits_as_coro(self) -> bool:
        return self._limit_ms > _PROBE_MS and not self._blocks and _waits.can_wait()

    def _set_now(self, limit_ms: int) -> None:
        """Set SQLite's own timeout."""
        if self._now_ms[0] == limit_ms:
            return
        # No lock is held here, because that could lead to a deadlock: the PRAGMA waits for statements of other threads,
        # and such a statement may call a function of the program that needs the same lock.
        now_ms: list[int | None] = [None]
        self._now_ms = now_ms
        with self._callbacks_off():
            _Cursor.execute(_Connection.cursor(self), f"PRAGMA busy_timeout={limit_ms}").close()
        if self._now_ms is now_ms:
            now_ms[0] = limit_ms
        else:
            # Another thread has set the timeout at the same time, so it is unknown which value is in effect now.
            self._now_ms = [None]

    @contextlib.contextmanager
    def _callbacks_off(self) -> Iterator[None]:
        """In this block, the program's callbacks are not called."""
        callbacks = self._callbacks
        if callbacks is None:
            yield
            return
        ident = _ident()
        callbacks.off_for.add(ident)
        try:
            yield
        finally:
            callbacks.off_for.discard(ident)

    def _call_blocking(self, call: Callable[..., Any], *args: Any) -> Any:
        self._set_now(self._limit_ms)
        return call(*args)

    def _call_alone(self, call: Callable[..., Any], *args: Any) -> Any:
        """Make a call that cannot be repeated: first wait until the database is not in use."""
        self._attempt(self._look_for_lock)
        return self._call_blocking(call, *args)

    def _look_for_lock(self) -> None:
        plain = _Connection.cursor(self)
        try:
            with self._callbacks_off():
                _Cursor.execute(plain, "BEGIN EXCLUSIVE")
                _Cursor.execute(plain, "ROLLBACK")
        except sqlite3.OperationalError as error:
            if _is_busy(error):
                raise
            # The database is read-only, for example. The call itself will raise the error.

    def _repeat(self, call: Callable[..., Any], *args: Any) -> Any:
        """Repeat a call until it finds the database unlocked, or the connection's timeout is over."""
        return (self._call_blocking if self._blocks else self._attempt)(call, *args)

    def _attempt(self, call: Callable[..., Any], *args: Any) -> Any:
        if self._limit_ms <= _PROBE_MS or not _waits.can_wait():
            return self._call_blocking(call, *args)
        left_s = Countdown(self._limit_ms / 1000)
        pauses_s = itertools.chain(_PAUSES_S, itertools.repeat(_PAUSES_S[-1]))
        while True:
            self._set_now(_PROBE_MS)
            began_s = _monotonic()
            try:
                return call(*args)
            except sqlite3.OperationalError as error:
                if not _is_busy(error) or left_s.is_over():
                    raise
                if _monotonic() - began_s < _LEAST_S and _has_short_sleeps():
                    # SQLite has not waited, because that would be a deadlock.
                    raise
            if not _has_short_sleeps():
                self._blocks = True
                return self._call_blocking(call, *args)
            _waits.sleep(min(next(pauses_s), left_s() or 0.0))

    def _commits_itself(self, word: str) -> bool:
        """Whether a statement with this first word would be executed outside of a transaction, and commit by itself."""
        if self.in_transaction:
            return False
        has_level = self.isolation_level is not None and self._is_legacy()
        return not (has_level and word in _BEGINNING)

    def _must_block(self, sql: Any) -> bool:
        """Whether this statement must not be repeated after it has found the database locked."""
        if not self._has_functions and not (isinstance(sql, str) and "returning" in sql.lower()):
            return False
        word = _first_word(sql)
        return word not in _HARMLESS and self._commits_itself(word)

    def _set_timeout(self, cursor: Cursor, sql: str, parameters: Any) -> Any:
        """Execute a statement that contains ``PRAGMA busy_timeout``, and store the timeout that it has set."""
        self._set_now(self._limit_ms)
        if _ASKS_TIMEOUT.match(sql):
            return _Cursor.execute(cursor, sql, *parameters)
        try:
            return _Cursor.execute(cursor, sql, *parameters)
        finally:
            self._note_timeout()

    def _note_timeout(self) -> None:
        plain = _Connection.cursor(self)
        plain.row_factory = None
        now_ms: list[int | None] = [None]
        self._now_ms = now_ms
        with self._callbacks_off():
            self._limit_ms = now_ms[0] = _Cursor.execute(plain, "PRAGMA busy_timeout").fetchone()[0]
        plain.close()

    # ------------------------------------------------------------ scripts

    def _is_legacy(self) -> bool:
        return not _HAS_AUTOCOMMIT or self.autocommit == _LEGACY

    def _run_script(self, cursor: Cursor, script: Any) -> Any:
        try:
            return self._call_blocking(_Cursor.executescript, cursor, script)
        finally:
            if isinstance(script, str) and "busy_timeout" in script.lower():
                self._note_timeout()

    def _run_statements(self, cursor: Cursor, script: str) -> Any:
        """Run a script one statement after the other. If the database is locked, only this coro waits."""
        if "\0" in script or self._has_functions or "busy_timeout" in script.lower():
            return self._run_script(cursor, script)
        if self._is_legacy() and self.in_transaction:
            # The original also commits first.
            Connection.commit(self)
        for statement in _statements(script):
            self._repeat(self._run_statement, cursor, statement)
        return cursor

    def _run_statement(self, cursor: Cursor, statement: str) -> None:
        if not self.in_transaction:
            _Cursor.executescript(cursor, statement)
            return
        # executescript() would commit the transaction that the script has begun.
        plain = _Connection.cursor(self)
        _Cursor.execute(plain, statement)
        plain.close()

    # ------------------------------------------------------------ methods

    def cursor(self, factory: Any = Cursor) -> Any:
        made = super().cursor(Cursor if factory is _Cursor else factory)
        if not isinstance(made, Cursor):
            # This cursor class has the original methods, so SQLite has to wait itself.
            self._blocks = True
            self._set_now(self._limit_ms)
        return made

    # These use Connection.cursor(self), not self.cursor(): the originals do not call an overridden `cursor` either, and
    # an overridden `cursor` may call these methods.

    def execute(self, *args: Any) -> Any:
        return Connection.cursor(self).execute(*args)

    def executemany(self, *args: Any) -> Any:
        return Connection.cursor(self).executemany(*args)

    def executescript(self, *args: Any) -> Any:
        return Connection.cursor(self).executescript(*args)

    def commit(self) -> None:
        self._repeat(_Connection.commit, self)

    def __exit__(self, kind: Any, value: Any, traceback: Any, /) -> Any:
        if not self._is_legacy() and self.autocommit is True:
            return False
        if kind is not None or value is not None or traceback is not None:
            Connection.rollback(self)
            return False
        try:
            Connection.commit(self)
        except BaseException:
            # Unlock the database for others.
            Connection.rollback(self)
            raise
        return False

    def _set_isolation_level(self, level: Any) -> None:
        if level is None and self._is_legacy() and self.in_transaction:
            # The original commits here.
            Connection.commit(self)
        _Connection.isolation_level.__set__(self, level)

    isolation_level = property(_Connection.isolation_level.__get__, _set_isolation_level)

    if _HAS_AUTOCOMMIT:

        def _set_autocommit(self, value: Any) -> None:
            if value is True and self.autocommit is False:
                # The original commits here.
                Connection.commit(self)
            _Connection.autocommit.__set__(self, value)

        autocommit = property(_Connection.autocommit.__get__, _set_autocommit)

    def blobopen(self, *args: Any, readonly: bool = False, **kwargs: Any) -> Any:
        if not readonly and not self.in_transaction:
            # Closing the blob commits, and that commit cannot be repeated.
            self._blocks = True
            return self._call_alone(functools.partial(_Connection.blobopen, self, *args, readonly=readonly, **kwargs))
        return self._repeat(functools.partial(_Connection.blobopen, self, *args, readonly=readonly, **kwargs))

    def backup(self, target: Any, *, progress: Any = None, sleep: Any = 0.25, **kwargs: Any) -> None:
        is_usual = (progress is None or callable(progress)) and isinstance(sleep, (int, float)) and sleep >= 0
        if not is_usual or not _waits.can_wait():
            self._set_now(self._limit_ms)
            _Connection.backup(self, target, progress=progress, sleep=sleep, **kwargs)
            return

        def wait(status: int, remaining: int, total: int) -> None:
            if progress is not None:
                progress(status, remaining, total)
            if status in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                _waits.sleep(sleep)

        for each in (self, target):
            if isinstance(each, Connection) and each._waits_as_coro():
                each._set_now(_PROBE_MS)
        _Connection.backup(self, target, progress=wait, sleep=0, **kwargs)

    def set_authorizer(self, *args: Any, **kwargs: Any) -> None:
        self._set_callback(_Connection.set_authorizer, sqlite3.SQLITE_OK, args, kwargs)

    def set_trace_callback(self, *args: Any, **kwargs: Any) -> None:
        self._set_callback(_Connection.set_trace_callback, None, args, kwargs)

    def _set_callback(self, method: Any, result: Any, args: Any, kwargs: Any) -> None:
        if self._callbacks is None:
            self._callbacks = _Callbacks()
        wrap = self._callbacks.wrap
        method(
            self,
            *(wrap(value, result) for value in args),
            **{name: wrap(value, result) for name, value in kwargs.items()},
        )

    def create_function(self, *args: Any, **kwargs: Any) -> None:
        self._has_functions = True
        super().create_function(*args, **kwargs)

    def create_aggregate(self, *args: Any, **kwargs: Any) -> None:
        self._has_functions = True
        super().create_aggregate(*args, **kwargs)

    def create_window_function(self, *args: Any, **kwargs: Any) -> None:
        self._has_functions = True
        super().create_window_function(*args, **kwargs)


def connect(*args: Any, **kwargs: Any) -> Any:
    """Open a connection to a database. Other coros run while one waits for a locked database."""
    if len(args) > _FACTORY_INDEX:
        factory = args[_FACTORY_INDEX]
        args = (*args[:_FACTORY_INDEX], Connection if factory is _Connection else factory, *args[_FACTORY_INDEX + 1 :])
    elif kwargs.get("factory", _Connection) is _Connection:
        kwargs["factory"] = Connection
    return _connect(*args, **kwargs)


def replace() -> None:
    """Replace the names."""
    for module_name in ("sqlite3", "sqlite3.dbapi2"):
        for new in (connect, Connection, Cursor):
            _originals.replace(module_name, new.__name__, new)
