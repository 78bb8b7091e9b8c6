"""Run gunicorn's corpus of good and bad requests against `grapeshot.coro.wsgi`: `python tests/suites/corpus.py`.

The corpus is in the sdist that `suites.toml` pins ([corpus.gunicorn]); `.ci/matrix suites requests` runs this program.
Each `.http` file of the corpus has a request (or several on one connection), and the `.py` file beside it says how
gunicorn parses the request, and under which settings. Our server gets the same settings where it has them. A good
request must reach the application with the same method, target, query, version and body; a bad one must not be answered
with 200. The exceptions are in `suites.toml`, each with its reason. An exception that is not needed fails the run.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

# The settings of gunicorn that our server has, too. Each value is the setting's name in our server, and the limit that
# our server gets if gunicorn's limit is 0. (gunicorn limits the whole request line; our server limits the target.)
LIMITS = {
    "limit_request_line": ("max_target_size", 8190),
    "limit_request_fields": ("max_headers", 100),
    "limit_request_field_size": ("max_header_size", 8190),
}
TIMEOUT_S = 20.0
HERE = Path(__file__).resolve().parent


def load(file: Path, config: Any) -> tuple[Any, dict[str, Any]]:
    """Run the Python file beside a request. Return the expected result, and the settings that the file changes."""

    def uri(target: str) -> dict[str, str]:
        from gunicorn.util import split_request_uri

        return {"raw": target, "query": split_request_uri(target).query or ""}

    names: dict[str, Any] = {"uri": uri, "cfg": config}
    exec(compile(file.read_text(), str(file), "exec"), names)
    config, defaults = names["cfg"], type(config)().settings  # the file may have replaced the configuration
    changed = {
        name: setting.get() for name, setting in config.settings.items() if setting.get() != defaults[name].get()
    }
    return names["request"], {name: value for name, value in changed.items() if not callable(value)}


def decode(file: Path) -> bytes:
    r"""Return the bytes of a request. The files write line ends and other characters as escapes: \r\n, \0, \n, \t,
    \xHH.
    """
    data = file.read_bytes().replace(b"\n", b"")
    for escape, octets in ((b"\\r\\n", b"\r\n"), (b"\\0", b"\0"), (b"\\n", b"\n"), (b"\\t", b"\t")):
        data = data.replace(escape, octets)
    return re.sub(rb"\\x([0-9A-Fa-f]{2})", lambda match: bytes([int(match[1], 16)]), data)


def with_host(data: bytes) -> bytes:
    """Return the request with a Host field, which RFC 9112 (3.2) requires of HTTP/1.1, but gunicorn does not."""

    def add(match: re.Match[bytes]) -> bytes:
        return match[0] if re.search(rb"(?im)^host[ \t]*:", match[0]) else match[1] + b"Host: a\r\n" + match[2]

    return re.sub(rb"(?s)([A-Z-]+ [^\r\n]* HTTP/1\.1\r\n)(\r\n|.*?\r\n\r\n)", add, data)


def exchange(address: Any, data: bytes, step: int) -> list[str]:
    """Send a request in pieces of `step` bytes; return the statuses of the answers."""
    from grapeshot import coro

    received = b""
    with coro.tcp_sock() as sock:
        sock.settimeout(TIMEOUT_S)
        sock.connect(address)
        try:
            for start in range(0, len(data), step):
                sock.sendall(data[start : start + step])
            sock.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # the server has stopped reading
        try:
            while part := sock.recv(65536):
                received += part
        except ConnectionResetError:
            pass
    return [status.decode() for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", received)]


def judge_good(wanted: Any, seen: list[dict[str, Any]], statuses: list[str]) -> str | None:
    """Return how the server failed to serve a good request, or None if it served the request correctly."""
    wanted = wanted if isinstance(wanted, list) else [wanted]
    if statuses != ["200"] * len(wanted) or len(seen) != len(wanted):
        return f"answered with {statuses}"
    for environ, each in zip(seen, wanted, strict=True):
        got = (environ["REQUEST_METHOD"], environ["RAW_URI"], environ["QUERY_STRING"], environ["SERVER_PROTOCOL"])
        version = "HTTP/{}.{}".format(*each["version"])
        if got != (each["method"], each["uri"]["raw"], each["uri"]["query"], version):
            return f"became {got}"
        if environ["body"] != (each["body"] or b""):
            return f"has the body {environ['body']!r}"
    return None


def check(folder: Path) -> dict[str, str]:
    """Send the whole corpus; return the problems, by the name of the request."""
    from gunicorn.config import Config

    from grapeshot.coro import wsgi

    problems: dict[str, str] = {}
    seen: list[dict[str, Any]] = []

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        seen.append({**environ, "body": environ["wsgi.input"].read()})
        start_response("200 OK", [("Content-Length", "0")])
        return []

    count = 0
    for file in sorted(folder.glob("*/*.http")):
        name = f"{file.parent.name}/{file.stem}"
        wanted, settings = load(file.with_suffix(".py"), Config())
        options = {"max_target_size": 4094} | {
            LIMITS[key][0]: value or LIMITS[key][1] for key, value in settings.items() if key in LIMITS
        }
        is_good, data = file.parent.name == "valid", decode(file)
        with wsgi.serve(application, "127.0.0.1", 0, **options) as server:  # type: ignore[arg-type]
            address = server.sockets[0].getsockname()
            for step in (1 << 20, 1) if len(data) < 2000 else (1 << 20,):
                count += 1
                seen.clear()
                statuses = exchange(address, data, step)
                if is_good and statuses[-1:] == ["400"]:
                    seen.clear()
                    statuses = exchange(address, with_host(data), step)
                if is_good:
                    problem = judge_good(wanted, seen, statuses)
                else:
                    problem = "answered with 200" if statuses[-1:] == ["200"] else None
                if problem is not None:
                    problems.setdefault(name, problem)
    print(f"{count} requests of the corpus in {folder}", flush=True)
    return problems


def compare(problems: dict[str, str], exceptions: dict[str, str]) -> list[str]:
    """Return what to report: problems that are not in `exceptions`, and entries of `exceptions` without a problem."""
    told = [f"FAILED {name}: {problem}" for name, problem in problems.items() if name not in exceptions]
    return told + [f"PASSES {name}, but is listed: {why}" for name, why in exceptions.items() if name not in problems]


def exceptions_of(corpus: dict[str, Any]) -> dict[str, str]:
    return {name: entry["reason"] for entry in corpus["differs"] for name in entry["requests"]}


def main() -> int:
    corpus = tomllib.loads((HERE / "suites.toml").read_text())["corpus"]["gunicorn"]
    if len(sys.argv) == 1:
        sys.path.insert(0, str(HERE))  # this file runs as a program, not as part of a package
        import run

        # The new process has an environment with gunicorn and httptools, and imports the same grapeshot as this one.
        python, work = run.prepare("gunicorn", corpus)
        environment = os.environ | {"PYTHONPATH": str(run.package()), "PYTHONUTF8": "1"}
        command = [str(python), str(Path(__file__).resolve()), str(work / "tests" / "requests")]
        return subprocess.run(command, env=environment, check=False).returncode
    from grapeshot import coro

    told = compare(coro.run(check, Path(sys.argv[1])), exceptions_of(corpus))
    print("\n".join(told) or "everything is as listed")
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(main())
