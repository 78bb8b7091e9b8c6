"""The site that `make docs` builds: no warning, no page or public name left out, no dead link, and nothing that a
browser would fetch from another site.
"""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from apps.requirements import absent
from project.markdown import ROOT
from support import coro_is_available

import grapeshot

SITE = ROOT / "docs" / "site"
OF_COROS = {"Client", "Server", "Stream"}
# The elements and attributes that make a browser load something. The href of an <a> is not loaded.
LOADED = {
    ("img", "src"),
    ("link", "href"),
    ("script", "src"),
    ("source", "srcset"),
    ("iframe", "src"),
    ("video", "src"),
}


class Page(HTMLParser):
    """A page's links, its ids (the possible targets of links), and the files that it loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.names: set[str] = {""}
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id":
                self.names.add(value or "")
            elif (tag, name) in LOADED:
                self.loaded.append(value or "")
            elif (tag, name) == ("a", "href"):
                self.links.append(value or "")


def build(source: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """Run Sphinx as `make docs` does."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    [options] = re.findall(r"\$\(BIN\)/python -m sphinx (.*) -d \S+ \. \S+$", makefile, re.MULTILINE)
    command = [
        sys.executable,
        "-m",
        "sphinx",
        *options.split(),
        "-d",
        str(out / "doctrees"),
        str(source),
        str(out / "html"),
    ]
    return subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def html(tmp_path_factory):
    """The folder with the site."""
    if sys.implementation.name != "cpython" or not coro_is_available():
        pytest.skip("the reference of coros needs an interpreter that has them")
    try:
        import furo  # noqa: F401
        import myst_parser  # noqa: F401
        import sphinx  # noqa: F401
    except ImportError as error:
        absent(str(error.name), "requirements/docs.in", "REQUIRE_DOCS")
    out = tmp_path_factory.mktemp("site")
    done = build(ROOT, out)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    return out / "html"


@pytest.fixture(scope="module")
def found(html):
    return {
        path.relative_to(html).as_posix(): Page(path) for path in html.rglob("*.html") if "_downloads" not in path.parts
    }


def test_every_page_for_users_is_in_the_site(found):
    expected = {
        path.relative_to(ROOT).with_suffix(".html").as_posix() for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
    }
    assert expected <= found.keys()
    assert "index.html" in found


@pytest.mark.parametrize(
    "module",
    [
        "",
        ".streams",
        ".insight.backdoor",
        ".insight.profiler",
        ".rpc",
        ".coro",
        ".coro.rpc",
        ".coro.wsgi",
        ".coro.threads",
    ],
)
def test_every_public_name_is_in_the_reference(found, module):
    there = {name.removeprefix("module-") for page in found.values() for name in page.names}
    names = importlib.import_module(f"grapeshot{module}").__all__
    if module == "":
        names = {*names, *grapeshot._LAZY_NAMES} - {"__version__"}
    # grapeshot.coro.rpc has three names of its own. Its other names come from grapeshot.rpc, and the reference shows
    # those names only under grapeshot.rpc.
    left_out = set(importlib.import_module("grapeshot.rpc").__all__) - OF_COROS if module == ".coro.rpc" else set()
    assert {name for name in names if name not in left_out and f"grapeshot{module}.{name}" not in there} == set()


def test_an_attributes_docstring_may_have_a_colon(html):
    text = (html / "docs" / "reference" / "insight.html").read_text(encoding="utf-8")
    assert "Gauge: coros and handles in the ready queue" in re.sub(r"<[^>]*>", "", text)


def test_native_methods_are_as_in_the_stub(html, found):
    assert "grapeshot.coro.fifo.push" in found["docs/reference/coro.html"].names
    text = (html / "docs" / "reference" / "coro.html").read_text(encoding="utf-8")
    [signature] = re.findall(r'<dt[^>]*id="grapeshot\.coro\.fifo\.push">(.*?)</dt>', text, re.DOTALL)
    assert re.sub(r"<[^>]*>|\s", "", signature).startswith("push(item:_T,/,block:bool=True,timeout:float|None=None)")
    # This sentence is only in the stub; the docstring of the native method is shorter.
    assert "the coro that has waited longest gets it" in text


def test_the_site_loads_nothing_from_other_sites(html, found):
    assert all(page.loaded for page in found.values())
    assert [
        f"{name}: {source}"
        for name, page in found.items()
        for source in page.loaded
        if source != "#"
        and (urlsplit(source).netloc or not (html / name).parent.joinpath(urlsplit(source).path).is_file())
    ] == []
    for style in html.rglob("*.css"):
        text = style.read_text(encoding="utf-8")
        assert re.findall(r"@import[^;]*|url\(\s*['\"]?(?:https?:)?//[^)]*", text) == [], style


def test_links_inside_the_site_have_targets(html, found):
    dead = []
    for name, page in found.items():
        for link in map(urlsplit, page.links):
            if link.scheme or link.netloc:
                continue
            path = (html / name).parent / unquote(link.path) if link.path else html / name
            target = found.get(path.resolve().relative_to(html.resolve()).as_posix())
            names = target.names if target else {""}
            if not path.is_file() or unquote(link.fragment) not in names:
                dead.append(f"{name}: {link.geturl()}")
    assert dead == []


def test_a_warning_ends_the_build(html, tmp_path):
    """Build a small project with the configuration of the site: first without faults, then with three dead links."""
    shutil.copytree(SITE, tmp_path / "docs" / "site")
    configuration = tmp_path / "docs" / "site" / "conf.py"
    text = configuration.read_text(encoding="utf-8")
    configuration.write_text(text + "\nnavigation = {}\n", encoding="utf-8")
    (tmp_path / "README.md").write_text("# Title\n\n{py:func}`asyncio.sleep`\n", encoding="utf-8")
    assert build(tmp_path, tmp_path / "good").returncode == 0
    wrong = ["[nowhere](docs/missing.md)", "{py:func}`asyncio.missing`", "{py:func}`grapeshot.missing`"]
    (tmp_path / "README.md").write_text("# Title\n\n" + "\n\n".join(wrong) + "\n", encoding="utf-8")
    done = build(tmp_path, tmp_path / "bad")
    assert done.returncode != 0
    assert all(what in done.stderr for what in ("docs/missing.md", "asyncio.missing", "grapeshot.missing")), done.stderr
