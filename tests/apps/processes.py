"""Servers in processes of their own, whose output is recorded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from tests.apps.wire import TIMEOUT_S

REPOSITORY = Path(__file__).resolve().parents[2]
# The PYTHONPATH with which a process can import the modules of the tests.
_PLACES = [str(REPOSITORY), str(REPOSITORY / "tests"), os.environ.get("PYTHONPATH")]
SEARCH_PATH = os.pathsep.join(filter(None, _PLACES))


class Process:
    """A server in its own process. Its output is recorded. `close()` ends it."""

    def __init__(
        self,
        *arguments: str,
        env: dict[str, str] | None = None,
        cwd: Path = REPOSITORY,
        python: str | Path = sys.executable,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.process = subprocess.Popen(
            [python, *arguments],
            cwd=cwd,
            env=os.environ | {"PYTHONUNBUFFERED": "1"} | (env or {}),
            pass_fds=pass_fds,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.output: list[str] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.output.append(line.rstrip())
                self._changed.notify_all()

    def wait_line(self, *texts: str, count: int = 1) -> str:
        """Wait until `count` lines contain all of the texts; return the last of these `count` lines."""

        def found() -> list[str]:
            return [line for line in self.output if all(text in line for text in texts)]

        with self._changed:
            is_there = self._changed.wait_for(lambda: len(found()) >= count, TIMEOUT_S)
            assert is_there, f"{texts!r} is not in the output: {self.output}"
            return found()[count - 1]

    def finish(self) -> int:
        code = self.process.wait(TIMEOUT_S)
        self._reader.join(TIMEOUT_S)
        return code

    def close(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)  # the group includes the processes that the server started
        except ProcessLookupError:
            pass
        self.process.wait()
        self._reader.join(TIMEOUT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
