"""A crawler that visits a site with `requests`, 20 pages at a time, in one thread.

    python examples/crawler.py https://example.org/     # crawl that site
    python examples/crawler.py --demo                   # crawl a small, slow site in this process

Needs requests (`pip install requests`). After `coro.patch()`, other coros run while one waits for a socket. requests
itself is unchanged, and `fetch` is ordinary blocking code.
"""

from __future__ import annotations

from grapeshot import coro

coro.patch()  # before importing modules that use sockets

import argparse
import contextlib
import functools
import html.parser
import http.server
import threading
import time
import urllib.parse
from collections.abc import Iterator

import requests

AT_ONCE = 20
LIMIT = 1000


class Links(html.parser.HTMLParser):
    """Collects the targets of a page's links."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.page = page
        self.found: set[str] = set()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        target = dict(attributes).get("href")
        if tag == "a" and target:
            self.found.add(urllib.parse.urljoin(self.page, urllib.parse.urldefrag(target).url))


def fetch(session: requests.Session, url: str) -> tuple[str, int | str, set[str]]:
    """Return a page's address, its status or the name of the error, and its links."""
    try:
        response = session.get(url, timeout=10)
    except requests.RequestException as error:
        return url, type(error).__name__, set()
    links = Links(response.url)
    if response.headers.get("Content-Type", "").startswith("text/html"):
        links.feed(response.text)
    return url, response.status_code, links.found


def crawl(start: str) -> dict[str, int | str]:
    """Follow the links of the site; return the status of each page."""
    site = urllib.parse.urlsplit(start).netloc
    seen: dict[str, int | str] = {}
    level = {start}
    pool = coro.Pool(AT_ONCE)
    with requests.Session() as session:
        for scheme in ("http://", "https://"):
            session.mount(scheme, requests.adapters.HTTPAdapter(pool_maxsize=AT_ONCE))
        while level and len(seen) < LIMIT:
            found: set[str] = set()
            for url, status, links in pool.imap_unordered(functools.partial(fetch, session), level):
                seen[url] = status
                found |= links
            level = {link for link in found if urllib.parse.urlsplit(link).netloc == site} - seen.keys()
    return seen


class DemoPage(http.server.BaseHTTPRequestHandler):
    """Page n links to pages 10n to 10n+9, up to page 100, which does not exist. Each page takes 0.1 s."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        time.sleep(0.1)
        number = int(self.path[1:] or 0)
        links = "".join(f'<a href="/{n}">{n}</a> ' for n in range(10 * number, 10 * number + 10) if n <= 100)
        body = links.encode()
        self.send_response(200 if number < 100 else 404)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def demo_site() -> Iterator[str]:
    """Serve the demo pages in threads of this process (which are coros here); yield the first page's address."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), DemoPage) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def main(start: str) -> None:
    began = time.monotonic()
    seen = crawl(start)
    for url, status in sorted(seen.items()):
        if status != 200:
            print(f"{url}: {status}")
    print(f"{len(seen)} pages in {time.monotonic() - began:.1f} s")


def main_of_demo() -> None:
    with demo_site() as start:
        main(start)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Visit all pages of a site.")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("start", nargs="?", help="the address of the first page")
    where.add_argument("--demo", action="store_true", help="crawl a small site in this process")
    options = parser.parse_args()
    if options.demo:
        coro.run(main_of_demo)
    else:
        coro.run(main, options.start)
