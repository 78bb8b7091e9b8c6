"""Gets samples of a process from its back door."""

from __future__ import annotations

import json
import socket

from grapeshot.insight.backdoor._asking import NOT_A_BACK_DOOR, Asker, LostError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# If the answer is not a sample but, for instance, a traceback, show this many characters from its end.
_MAX_WORDS = 500
_BEGIN = "from grapeshot.insight.backdoor._sampling import Sampler as _Sampler; _sampler = _Sampler(loop, {slow_s!r})"


class Probe:
    """One connection to a back door. Only one thread may call :meth:`sample`; another one may call :meth:`end`."""

    def __init__(self, sock: socket.socket, slow_s: float) -> None:
        self._asker = Asker(sock)
        self._slow_s = slow_s
        self._has_begun = False

    def sample(self, *parts: str) -> dict[str, Any]:
        """Return the result of ``Sampler.collect(*parts)`` in the process. Waits as long as the process takes.

        Raises:
            LostError: the connection has ended, the other end is not a back door, or its answer is not a sample.
        """
        if not self._has_begun:
            self._asker.ask(_BEGIN.format(slow_s=self._slow_s))
            self._has_begun = True
        answer = self._asker.ask(f"_sampler.sample(*{parts!r})")
        try:
            found: dict[str, Any] = json.loads(answer)
        except ValueError:
            raise LostError(answer.strip()[-_MAX_WORDS:] or "no answer") from None
        except RecursionError:
            raise LostError(NOT_A_BACK_DOOR) from None
        if not _is_sample(found, parts):
            raise LostError(NOT_A_BACK_DOOR)
        return found

    def end(self) -> None:
        """Tell the process to stop measuring. It also stops by itself when no more requests arrive."""
        self._asker.tell("_sampler.end()")


def _is_sample(found: Any, parts: tuple[str, ...]) -> bool:
    """Whether an answer has the fields that the screen and the dump rely on.

    Other fields are not checked: if they are not valid, the views raise exceptions, which the screen catches.
    """
    return (
        isinstance(found, dict)
        and type(found.get("pid")) is int
        and isinstance(found.get("took_s"), int | float)
        and all(part in found for part in parts)
    )
