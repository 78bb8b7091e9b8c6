"""Adds to the site what the Markdown pages lack: tables of contents, index.html, and pictures that raw HTML shows."""

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
    """Append hidden tables of contents to the home page; the theme builds its navigation from them."""
    if page == app.config.root_doc:
        for title, pages in app.config.navigation.items():
            source[0] += "\n".join(["", "```{toctree}", ":hidden:", f":caption: {title}", "", *pages, "```", ""])


def drop_links_to_folders(app: Sphinx, doctree: nodes.document) -> None:
    """Replace links to folders with plain text: GitHub can show a folder, but the site does not contain it."""
    page = Path(app.env.doc2path(app.env.current_document.docname))
    for link in list(doctree.findall(addnodes.pending_xref)):
        if link.get("reftype") == "myst" and (page.parent / link["reftarget"]).is_dir():
            link.replace_self(link.children)


def copy_files(app: Sphinx, error: Exception | None) -> None:
    """Copy the pictures that raw HTML refers to, and the home page to index.html, which web servers look for."""
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
