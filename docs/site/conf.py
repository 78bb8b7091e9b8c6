"""Configures Sphinx, which builds the site from the project's Markdown pages and the reference: `make docs`.

Sphinx reads the project's root directory, so that the links between pages work on the site as they do on GitHub. The
Markdown pages contain nothing that is specific to Sphinx. NAVIGATION lists the pages of the site in their order.
"""

from __future__ import annotations

import sys
from pathlib import Path

SITE = Path(__file__).parent
sys.path[:0] = [str(SITE.parents[1] / "python"), str(SITE)]

HOME = "README"
NAVIGATION = {
    "Start": ["docs/start", "docs/uvloop", "docs/coro-migration", "From libuv or Node.js <docs/phases>"],
    "Use": [
        "docs/frameworks",
        "docs/scaling",
        "docs/coro",
        "docs/blocking-functions",
        "docs/celery",
        "docs/gevent",
        "docs/eventlet",
        "docs/files",
        "docs/rpc",
        "docs/insight",
        "docs/troubleshooting",
    ],
    "Reference": [
        "docs/reference/grapeshot",
        "docs/reference/objects",
        "docs/reference/streams",
        "docs/reference/files",
        "docs/reference/threads",
        "docs/reference/insight",
        "docs/reference/rpc",
        "docs/reference/coro",
        "docs/reference/wsgi",
        "docs/reference/gevent",
    ],
    "Facts": ["docs/compatibility", "docs/features", "docs/limits", "docs/versions", "docs/speed"],
    "Project": ["docs/architecture", "CHANGELOG", "CONTRIBUTING", "CODE_OF_CONDUCT", "SECURITY", "docs/releasing"],
    "Internals": [
        "docs/internals/layers",
        "docs/internals/binding",
        "docs/internals/free-threading",
        "docs/internals/cores",
        "docs/internals/operating-system",
        "docs/internals/event-loop",
        "docs/internals/poller-and-timers",
        "docs/internals/transports",
        "docs/internals/processes",
        "docs/internals/tls",
        "docs/internals/aiofastnet",
        "docs/internals/streams-and-sock",
        "docs/internals/files",
        "docs/internals/coros",
        "docs/internals/coro-io",
        "docs/internals/patching",
        "docs/internals/looking-inside",
        "docs/internals/rpc",
        "docs/internals/benchmarks-and-tests",
        "docs/internals/measurements",
        "docs/internals/tried",
    ],
    "Measurements": [
        "benchmarks/README",
        "Calls between processes <benchmarks/results/rpc>",
        "Files <benchmarks/results/files>",
        "Name lookups <benchmarks/results/lookups>",
        "Two loops in two threads <benchmarks/results/two-loops>",
        "Coros on free-threaded Python <benchmarks/results/coros-3.14t>",
        "Programs for gevent, eventlet, FastAPI, Django and Celery <benchmarks/results/programs>",
    ],
}
PAGES = [HOME, *(entry.split("<")[-1].rstrip(">") for entries in NAVIGATION.values() for entry in entries)]

project = "grapeshot"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "navigation", "reference"]
root_doc = HOME
include_patterns = [f"{page}.{kind}" for page in PAGES for kind in ("md", "rst")]
# Folders without pages; searching them would only take time.
exclude_patterns = [".*", "build", "core", "dist", "examples", "python", "src", "target", "tests"]
navigation = NAVIGATION
nitpicky = True
myst_heading_anchors = 4  # the same anchors as on GitHub

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["wide.css"]
html_title = "grapeshot"
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
pygments_style = "friendly"
