"""Writes a profile as one self-contained HTML page, with sortable tables and an icicle graph of the calls."""

from __future__ import annotations

import html
import json
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ._profile import Profile

_TEMPLATE = os.path.join(os.path.dirname(__file__), "page.html")


def write_page(profile: Profile, path: str | os.PathLike[str], title: str = "profile") -> None:
    """Write the page. It contains the data as JSON."""
    with open(_TEMPLATE, encoding="utf-8") as file:
        text = file.read()
    data: dict[str, object] = profile.as_json() | {
        "function_rows": [
            [str(row), row.file, row.line, row.calls, row.cpu, row.own_cpu, row.wall, row.own_wall, row.wait]
            for row in profile.function_rows()
        ]
    }
    # Escape `<`, because a `</script>` in the data would end the element.
    embedded = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    text = text.replace("{{title}}", html.escape(title)).replace("{{heading}}", html.escape(profile.heading()))
    with open(path, "w", encoding="utf-8") as file:
        file.write(text.replace("{{data}}", embedded))
