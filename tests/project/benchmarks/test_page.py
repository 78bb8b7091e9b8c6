"""The files that are generated from a comparison's JSON: the page and its charts load no other files, and the report
names the rows that got worse.
"""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest
from project.benchmarks import speed_table
from project.benchmarks.samples import GOOD, comparison, outcome

from benchmarks import against

COMMITTED = json.loads(speed_table.RESULTS.read_text(encoding="utf-8"))

# ---------------------------------------------------------------- the page


class Loads(HTMLParser):
    """Collects what a browser would load or run, the ids, the links, and the elements that were not closed."""

    VOID = ("meta", "br", "img", "link", "input", "hr")

    def __init__(self, text):
        super().__init__()
        self.found, self.open, self.ids, self.links = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        if tag not in self.VOID:
            self.open.append(tag)
        if tag in ("script", "link", "img", "iframe", "object", "embed", "source", "audio", "video"):
            self.found.append(tag)
        self.found += [value for name, value in attributes if name == "src"]
        self.found += [f"{name} of {tag}" for name in given if name.startswith("on")]
        self.ids += [given["id"]] if "id" in given else []
        for name in ("href", "xlink:href"):
            if name in given:
                self.links.append(given[name])

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def page_of(*results):
    pytest.importorskip("matplotlib")
    from benchmarks import page

    return page.html(results)


def steady(name):
    curve = [[0.0, 20.0], [0.5, 30.0], [0.9, 60.0], [0.99, 90.0], [0.999, 200.0], [1.0, 400.0]]
    sample = {"cpu_ns": 90.0, "rps": 5000.0, "p50_us": 30.0, "p99_us": 90.0, "p999_us": 200.0, "curve_us": curve}
    return outcome(name, {"grapeshot": [sample], "uvloop": [sample]}, kept={"rate_rps": 5000, "slowest": "uvloop"})


def test_the_page_is_one_file_that_loads_nothing():
    made = comparison(outcome("spawn", GOOD), steady("rate-echo-50%"), missing={"rloop": "no <module>"})
    text = page_of(made, made | {"heading": "# Coros"})
    loads = Loads(text)
    assert loads.found == []
    assert loads.open == []
    assert all(link.startswith("#") and link[1:] in loads.ids for link in loads.links)
    assert not re.search(r"@import|url\((?!#)", text)
    assert not re.search(r"https?://(?!www\.w3\.org/)", re.sub(r"<!DOCTYPE[^>]*>", "", text))
    assert "title of spawn" in text
    assert "no &lt;module&gt;" in text
    assert "5,000/s" in text


def test_the_chart_of_the_readme_shows_the_committed_numbers():
    """Compare the titles, not the bytes: another version of matplotlib draws the same numbers differently."""
    pytest.importorskip("matplotlib")
    made = speed_table.charts(COMMITTED)
    for path, text in made.items():
        committed = path.read_text(encoding="utf-8")
        titles = [
            [title.text for title in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}title")]
            for svg in (text, committed)
        ]
        assert titles[0] == titles[1], f"{path.name} is out of date: run `make tables`"
        assert len(titles[0]) >= 3 * len(speed_table.CHOSEN)
    light, dark = made.values()
    assert light != dark


# ---------------------------------------------------------------- what got worse


def row(own, peer=(100,) * 15):
    return outcome("spawn", {"grapeshot": own, "uvloop": peer})


BEFORE = [40, 50, 60] * 5


@pytest.mark.parametrize(
    ("before", "after", "first", "got_worse"),
    [
        (row(BEFORE), row([70, 80, 90] * 5), "worse: spawn: 0.5 of uvloop before, 0.8 of uvloop now (+60%)", True),
        (row(BEFORE), row([10] * 15), "better: spawn: 0.5 of uvloop before, 0.1 of uvloop now (-80%)", False),
        # The intervals overlap, so the row did not get worse.
        (
            row(BEFORE),
            row([55, 70, 500] * 5),
            "compared 1 rows (those with 15 or more runs) with the runs of then: 0 worse",
            False,
        ),
        (row(BEFORE), row([500] * 14), "compared 0 rows", False),
        # The peer's numbers doubled, too, so it is the machine that got slower.
        (row(BEFORE), row([100] * 15, [200] * 15), "compared 1 rows", False),
        # Without a common peer, the numbers themselves are compared.
        (row(BEFORE, []), row([100] * 15, []), "worse: spawn: 50 before, 100 now (+100%)", True),
        (row(BEFORE), row([]), "worse: spawn has no number now", True),
    ],
)
def test_rows_that_got_worse_are_named(before, after, first, got_worse):
    lines, is_worse = against.report(comparison(before), comparison(after))
    assert lines[0].startswith(first)
    assert is_worse is got_worse
