"""`sqlite3` in coros: a coro waits while the database is locked. Scripts print the same with and without the patch."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
from support import CAP_S, coro_is_available

from tests.coro.patched.same_output import check_same_output

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")

# In another thread, a second connection writes, and commits 50 ms later. With the patch, that thread is a coro. If the
# main thread waited in C for the commit, the coro could not run, and the wait would fail at its time limit.
HOLDER = """
import os, sqlite3, sys, tempfile, threading, time

directory = tempfile.TemporaryDirectory()
PATH = os.path.join(directory.name, "data.db")
LIMIT_S = 30
setup = sqlite3.connect(PATH, check_same_thread=False)
setup.executescript("create table t (a integer primary key, b); create table log (b);")

class Holder:
    '''A thread that holds the database's lock for the first 50 ms of a `with` block. Code in the block must wait.'''
    def __init__(self, mode="immediate"):
        self.mode, self.begun = mode, threading.Event()
        self.thread = threading.Thread(target=self.hold)
    def hold(self):
        with_lock = sqlite3.connect(PATH, isolation_level=None, timeout=LIMIT_S)
        with_lock.execute(f"begin {self.mode}")
        with_lock.execute("insert into log values (1)")
        self.begun.set()
        time.sleep(0.05)
        with_lock.execute("commit")
        with_lock.close()
    def __enter__(self):
        self.thread.start()
        self.begun.wait()
    def __exit__(self, *_):
        self.thread.join()

def rows(connection):
    return connection.execute("select a, b from t order by a").fetchall()
"""
SCRIPTS = {
    "writers": """
        def write(number):
            connection = sqlite3.connect(PATH, timeout=LIMIT_S)
            for step in range(10):
                connection.execute("insert into t (b) values (?)", (number * 100 + step,))
                time.sleep(0.002)
                connection.commit()
            connection.close()
        threads = [threading.Thread(target=write, args=(number,)) for number in range(5)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        print(sorted(b for _, b in rows(setup)))
    """,
    "each call": """
        connection = sqlite3.connect(PATH, timeout=LIMIT_S)
        with Holder():
            print(connection.execute("insert into t values (1, 'execute')").rowcount, connection.in_transaction)
        connection.commit()
        with Holder("exclusive"):
            print(rows(connection))
        with Holder(), connection:
            connection.execute("update t set b = 'with'")
        taken = []
        def parameters():
            for number in range(2, 6):
                taken.append(number)
                yield number, f"many {number}"
        with Holder():
            print(connection.executemany("insert into t values (?, ?)", parameters()).rowcount, taken)
        connection.commit()
        print(rows(connection))
        reader = sqlite3.connect(PATH, check_same_thread=False)
        connection.execute("insert into t values (6, 'commit')")
        cursor = reader.execute("select * from t")
        cursor.fetchone()
        def end():
            time.sleep(0.05)
            cursor.fetchall()
        thread = threading.Thread(target=end)
        thread.start()
        connection.commit()
        thread.join()
        print(rows(reader))
    """,
    "without transactions": """
        connection = sqlite3.connect(PATH, timeout=LIMIT_S, isolation_level=None)
        with Holder():
            print(connection.execute("insert into t values (1, 'a')").rowcount)
        taken = []
        def parameters():
            for number in range(2, 8):
                taken.append(number)
                if number == 5:
                    holder.__enter__()
                yield number, "b"
        holder = Holder()
        cursor = connection.executemany("insert into t values (?, ?)", parameters())
        holder.__exit__()
        print(cursor.rowcount, taken, rows(connection), connection.in_transaction)
        with Holder():
            print(connection.execute("insert into t values (10, 'c') returning a").fetchall())
        called = []
        def note(value):
            called.append(value)
            return value
        connection.create_function("note", 1, note)
        with Holder():
            connection.execute("insert into t values (11, note('d'))")
        print(called, len(rows(connection)), connection.execute("delete from t").rowcount)
        for mode in ("deferred", "immediate", "exclusive"):
            with Holder():
                connection.execute(f"begin {mode}")
                connection.execute("insert into t (b) values (?)", (mode,))
                connection.execute("commit")
        print([b for _, b in rows(connection)])
    """,
    "scripts": """
        script = '''
            insert into t values (1, 'a;b'); -- a comment; with a semicolon
            /* begin; */ insert into t values (2, "c");
            create trigger after_insert after insert on t begin
                insert into log values (';'); insert into log values (new.b);
            end;
            begin; insert into t values (3, 'd'); select * from t; update t set b = b || '!'; commit;
            insert into t values (4, 'e')
        '''
        connection = sqlite3.connect(PATH, timeout=LIMIT_S)
        connection.execute("insert into t values (9, 'before')")
        with sqlite3.connect(PATH) as reader:
            pass
        connection.commit()
        with Holder():
            print(connection.executescript(script) is not None, connection.in_transaction)
        print(rows(connection), setup.execute("select count(*) from log").fetchone())
        for wrong in ("insert into t values (20, 1); no sql;", "insert into t values (1, 1)", 5):
            try:
                connection.executescript(wrong)
            except Exception as error:
                print(type(error), error)
        print(len(rows(connection)), connection.in_transaction)
        reader.close()
    """,
    "time limits": """
        connection = sqlite3.connect(PATH, timeout=0.05)
        setup.execute("begin exclusive")
        def fails(call, *args):
            try:
                call(*args)
            except sqlite3.OperationalError as error:
                print(error, error.sqlite_errorname, connection.in_transaction)
        for other in (connection, sqlite3.connect(PATH, timeout=0), sqlite3.connect(PATH, timeout=0.01)):
            fails(other.execute, "insert into t values (1, 1)")
            fails(other.executemany, "insert into t values (1, 1)", [()])
            fails(other.executescript, "select * from t; insert into t values (1, 1)")
        print(connection.execute("pragma busy_timeout").fetchall())
        print(connection.execute("PRAGMA busy_timeout = 20000").fetchall())
        print(connection.execute("pragma main.busy_timeout;").fetchall())
        def end():
            time.sleep(0.05)
            setup.commit()
        thread = threading.Thread(target=end)
        thread.start()
        print(connection.execute("insert into t values (1, 1)").rowcount, connection.in_transaction)
        thread.join()
        connection.commit()
        connection.executescript("pragma busy_timeout(30)")
        print(connection.execute("pragma busy_timeout").fetchall())
        setup.execute("begin immediate")
        fails(connection.execute, "insert into t values (2, 1)")
        # The transaction that begins below reads rows, so the writer (`setup`) cannot commit until this transaction has
        # ended. If the insert waited for the writer, neither would ever end. So the insert fails at once.
        connection.execute("pragma busy_timeout = 30000")
        connection.rollback()
        connection.execute("begin")
        connection.execute("select * from t").fetchall()
        fails(connection.execute, "insert into t values (3, 1)")
        setup.rollback()
    """,
    "classes": """
        class MyConnection(sqlite3.Connection):
            def commit(self):
                print("commit")
                super().commit()
        class MyCursor(sqlite3.Cursor):
            pass
        connection = sqlite3.connect(PATH, timeout=LIMIT_S, factory=MyConnection)
        print(type(connection).__name__, isinstance(setup, sqlite3.Connection), type(setup) is sqlite3.Connection)
        print(type(connection.cursor()) is sqlite3.Cursor, type(connection.cursor(MyCursor)), sqlite3.Connection)
        with connection:
            connection.cursor(MyCursor).execute("insert into t values (1, 2)")
        connection.execute("insert into t values (2, 2)")
        connection.isolation_level = None
        print(connection.in_transaction, connection.isolation_level, rows(connection))
        connection.isolation_level = "IMMEDIATE"
        with Holder():
            connection.cursor(MyCursor).execute("insert into t values (3, 2)")
        connection.rollback()
        try:
            with connection:
                connection.execute("insert into t values (4, 2)")
                raise KeyError("no")
        except KeyError as error:
            print(error, rows(connection))
        connection.row_factory = sqlite3.Row
        print([tuple(row) for row in connection.execute("select * from t")])
        target, calls = sqlite3.connect(PATH + ".copy"), []
        with Holder("exclusive"):
            connection.backup(target, pages=1, sleep=0.01, progress=lambda *args: calls.append(args))
        print(rows(target), calls[-1][:2])
        for wrong, *args in (
            (connection.execute,), (connection.execute, 1), (connection.executemany, "x", 1),
            (connection.execute, "select ?", ()), (connection.backup, 1),
        ):
            try:
                wrong(*args)
            except Exception as error:
                print(type(error))
        connection.execute("insert into log values (zeroblob(4))")
        connection.commit()
        number = setup.execute("select max(rowid) from log").fetchone()[0]
        with Holder(), connection.blobopen("log", "b", number) as blob:
            blob.write(b"blob")
        print(setup.execute("select b from log where typeof(b) = 'blob'").fetchall())
        connection.close()
        try:
            connection.execute("select 1")
        except sqlite3.ProgrammingError as error:
            print(error)
        from sqlite3 import dbapi2
        print(dbapi2.connect is sqlite3.connect, dbapi2.Cursor is sqlite3.Cursor)
        target.close()
    """,
    "a derived class whose cursor() executes": """
        class Mine(sqlite3.Connection):
            def cursor(self, factory=sqlite3.Cursor):
                self.execute("select 1")
                self.executemany("insert into log values (?)", [("cursor",)])
                self.executescript("delete from log; insert into log values ('script')")
                return super().cursor(factory)
        connection = sqlite3.connect(PATH, factory=Mine)
        print(connection.cursor().execute("select b from log").fetchall())
        print(connection.execute("select b from log").fetchall())
        connection.close()
    """,
    "an authorizer and a trace see only the program's statements": """
        def authorize(action, *args):
            actions.add(action)
            return sqlite3.SQLITE_DENY if action in forbidden else sqlite3.SQLITE_OK
        forbidden = sqlite3.SQLITE_PRAGMA, sqlite3.SQLITE_TRANSACTION
        actions, statements = set(), []
        connection = sqlite3.connect(PATH, timeout=30, isolation_level=None)
        connection.create_function("twice", 1, lambda number: 2 * number)
        connection.set_authorizer(authorize)
        connection.set_trace_callback(statements.append)
        connection.execute("insert into t values (twice(4), 2)")
        with Holder():
            connection.execute("insert into t values (9, 2)")
        for statement in ("begin", "pragma user_version"):
            try:
                connection.execute(statement)
            except sqlite3.DatabaseError as error:
                print(error)
        print(actions >= set(forbidden), sorted(set(statements)))
        connection.set_authorizer(None)
        connection.set_trace_callback(None)
        print(rows(connection))
        connection.close()
    """,
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_sqlite(name, tmp_path):
    check_same_output(
        tmp_path / "script.py", HOLDER + textwrap.dedent(SCRIPTS[name]) + "\nsetup.close()\ndirectory.cleanup()\n"
    )


LOOP_RUNS = """
from grapeshot import coro
coro.patch()
coro.set_latency_warning(None)
import sqlite3, threading

def main():
    first = sqlite3.connect("data.db", timeout=60)
    first.execute("create table t (a)")
    first.execute("insert into t values (1)")
    second = sqlite3.connect("data.db", timeout=60)
    waiting = coro.spawn(second.execute, "insert into t values (2)")
    coro.sleep_relative(0.02)
    # While the statement waits, the loop runs. The exception that ends the wait leaves the connection unchanged.
    assert not waiting.done()
    waiting.shutdown()
    coro.sleep_relative(0.02)
    assert waiting.done()
    waiting = coro.spawn(second.execute, "insert into t values (3)")
    coro.sleep_relative(0.02)
    first.commit()
    waiting.join()
    second.commit()
    print(first.execute("select a from t").fetchall())
    # In a real thread, SQLite itself waits.
    first.execute("insert into t values (4)")
    def insert():
        third = sqlite3.connect("data.db", timeout=60)
        third.execute("insert into t values (5)")
        third.commit()
        third.close()
    inserting = coro.spawn(coro.threads.run, insert)
    coro.sleep_relative(0.02)
    assert not inserting.done()
    first.commit()
    inserting.join()
    print(first.execute("select a from t").fetchall())
    first.close()
    second.close()

coro.run(main)
"""


def test_the_loop_runs_while_the_database_is_locked(tmp_path):
    result = subprocess.run(
        [sys.executable, "-c", LOOP_RUNS], capture_output=True, text=True, timeout=CAP_S, check=False, cwd=tmp_path
    )
    assert (result.stdout, result.stderr) == ("[(1,), (3,)]\n[(1,), (3,), (4,), (5,)]\n", "")
