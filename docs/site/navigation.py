"""What Sphinx needs beside the pages: tables of contents, an index.html, the pictures of raw HTML, links to folders."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sphinx import addnodes

if TYPE_CHECKING:
    from docutils import nodes
    from sphinx.application import Sphinx

PICTURE = re.compile(r'\b(?:src|srcset)="([^":]+)"')


def add_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """Give the home page the hidden tables of contents from which the theme makes the navigation."""
    if page == app.config.root_doc:
        for title, pages in app.config.navigation.items():
            source[0] += "\n".join(["", "```{toctree}", ":hidden:", f":caption: {title}", "", *pages, "```", ""])


def drop_links_to_folders(app: Sphinx, doctree: nodes.document) -> None:
    """Make plain text of links to folders: GitHub shows their files, but the site does not have them."""
    page = Path(app.env.doc2path(app.env.current_document.docname))
    for link in list(doctree.findall(addnodes.pending_xref)):
        if link.get("reftype") == "myst" and (page.parent / link["reftarget"]).is_dir():
            link.replace_self(link.children)


def copy_files(app: Sphinx, error: Exception | None) -> None:
    """Copy the pictures that raw HTML shows, and the home page to the name that servers look for."""
    if error is not None or app.builder.name != "html":
        return
    out = Path(app.outdir)
    for name in app.env.found_docs:
        page = Path(app.env.doc2path(name))
        for picture in PICTURE.findall(page.read_text(encoding="utf-8")):
            copy = (out / name).parent / picture
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(page.parent / picture, copy)
    shutil.copyfile(out / f"{app.config.root_doc}.html", out / "index.html")


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_config_value("navigation", {}, "env")
    app.connect("source-read", add_contents)
    app.connect("doctree-read", drop_links_to_folders)
    app.connect("build-finished", copy_files)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
