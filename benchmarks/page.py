"""Make one HTML page from the runs of one or more comparisons: `python -m benchmarks.page RUNS ... --write FILE`.

The page loads nothing: styles and charts are in it, and it has no scripts.
"""

from __future__ import annotations

import argparse
import html as escape
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import charts, digest, tables
from benchmarks.intervals import STANDINGS, TOO_FEW
from benchmarks.standings import OURS, RAW, Outcome, best_peer, count, ratio, standing

STYLE = """
:root { color-scheme: light dark; --text: #1f2328; --soft: #59636e; --grid: #d1d9e0; --back: #ffffff; --band: #f6f8fa;
  --ahead: #1a7f37; --equal: #9a6700; --behind: #cf222e; }
@media (prefers-color-scheme: dark) { :root { --text: #e6edf3; --soft: #9198a1; --grid: #3d444d; --back: #0d1117;
  --band: #151b23; --ahead: #3fb950; --equal: #d29922; --behind: #f85149; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1280px; padding: 1.5rem 1rem 4rem; background: var(--back); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.7rem; margin: 0 0 .3rem; } h2 { font-size: 1.35rem; margin: 2.6rem 0 .4rem; }
h3 { font-size: 1.05rem; margin: 1.8rem 0 .4rem; }
p { margin: .4rem 0; max-width: 56rem; } td .soft { white-space: nowrap; }
.soft, figcaption { color: var(--soft); font-size: .87rem; }
nav a { margin-right: 1rem; } a { color: inherit; }
.tiles { display: flex; flex-wrap: wrap; gap: .7rem; margin: .9rem 0; padding: 0; list-style: none; }
.tiles li { border: 1px solid var(--grid); border-radius: .5rem; padding: .45rem 1rem; min-width: 6.5rem; }
.tiles b { display: block; font-size: 1.5rem; line-height: 1.2; }
.wide { overflow-x: auto; margin: .5rem 0; }
.wide svg { display: block; width: 100%; min-width: 720px; height: auto; }
table { border-collapse: collapse; font-size: .84rem; font-variant-numeric: tabular-nums; width: 100%; }
th, td { padding: .28rem .55rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--grid); }
th:first-child, td:first-child { text-align: left; white-space: normal; min-width: 13rem; position: sticky; left: 0;
  background: var(--back); }
thead th { color: var(--soft); font-weight: 600; } tbody tr:hover td { background: var(--band); }
.ahead { color: var(--ahead); } .equal { color: var(--equal); } .behind { color: var(--behind); }
td.ahead, td.equal, td.behind { font-weight: 600; }
ul.notes { padding-left: 1.1rem; font-size: .87rem; }
details { margin: .5rem 0; } summary { cursor: pointer; color: var(--soft); }
"""


def text(words: str) -> str:
    return escape.escape(words)


def identifier(*words: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", " ".join(words).lower()).strip("-")


def name_of(result: dict[str, Any]) -> str:
    return str(result.get("heading", "# The loop")).strip("# ")


def cell(words: str, css: str = "", tag: str = "td") -> str:
    return f'<{tag} class="{css}">{text(words)}</{tag}>' if css else f"<{tag}>{text(words)}</{tag}>"


def html_table(header: Sequence[str], body: Sequence[str]) -> str:
    head = "".join(cell(words, tag="th") for words in header)
    lines = "".join(f"<tr>{line}</tr>" for line in body)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'


def main_table(outcomes: Sequence[Outcome], loops: Sequence[str]) -> str:
    has_raw = RAW in loops
    header = ["", f"{OURS} is", "/ best peer", *([f"/ {RAW}"] if has_raw else []), *loops]
    body = []
    for outcome in outcomes:
        word, best = standing(outcome), best_peer(outcome)
        of_best = f"{tables.ratio_text(ratio(outcome, best), '')} of {best}" if best else "-"
        line = [
            f'<td>{text(outcome["title"])} <span class="soft">{text(outcome["unit"])}</span></td>',
            cell(word, word if word in STANDINGS else ""),
            cell(of_best),
            *([cell(tables.raw_cell(outcome))] if has_raw else []),
            *(cell(tables.cell(outcome, loop)) for loop in loops),
        ]
        body.append("".join(line))
    return html_table(header, body)


def load_table(outcomes: Sequence[Outcome], loops: Sequence[str]) -> str:
    measured = [outcome for outcome in outcomes if any(tables.load_cell(outcome, loop) != "-" for loop in loops)]
    if not measured:
        return ""
    body = [
        "".join([cell(outcome["title"]), *(cell(tables.load_cell(outcome, loop)) for loop in loops)])
        for outcome in measured
    ]
    table = html_table([tables.load_header(measured), *loops], body)
    return f"<details><summary>Throughput and latency</summary>{table}</details>"


def figure(drawn: str | None, caption: str) -> str:
    return (
        f'<figure style="margin:0"><div class="wide">{drawn}</div><figcaption>{caption}</figcaption></figure>'
        if drawn
        else ""
    )


def group_section(result: dict[str, Any], outcomes: Sequence[Outcome]) -> str:
    title = outcomes[0]["group"]
    loops = tables.shown_loops(result, outcomes)
    name = identifier(name_of(result), title)
    return "".join(
        [
            f'<h3 id="{name}">{text(title)}</h3>' if title != name_of(result) else "",
            figure(charts.group_chart(name, outcomes, loops), "The bands are 95 % intervals."),
            figure(charts.latency_chart(f"{name}-latency", outcomes, loops), "Latency by percentile."),
            main_table(outcomes, loops),
            load_table(outcomes, loops),
        ]
    )


def tiles(result: dict[str, Any]) -> str:
    standings = count(result["cases"])
    if not standings:
        return ""
    words = (*STANDINGS, TOO_FEW) if standings[TOO_FEW] else STANDINGS
    made = [f'<li class="{identifier(word)}"><b>{standings[word]}</b>{word}</li>' for word in words]
    return f'<ul class="tiles">{"".join(made)}</ul>'


def suite_section(result: dict[str, Any]) -> str:
    notes = [f"{name} was left out: {reason}" for name, reason in result["missing"].items()] + tables.remarks(result)
    notes += tables.failures(result)
    listed = "".join(f"<li>{text(note)}</li>" for note in notes)
    return "".join(
        [
            f'<h2 id="{identifier(name_of(result))}">{text(name_of(result))}</h2>',
            f"<p>{text(tables.summary(result))}</p>",
            tiles(result),
            f'<p class="soft">{text(tables.where(result))}</p>',
            f'<p class="soft">{text(tables.separate_parts(result))}</p>',
            *(group_section(result, outcomes) for outcomes in tables.groups(result)),
            f'<h3>Notes</h3><ul class="notes">{listed}</ul>' if listed else "",
            f"<details><summary>How it was measured</summary><p>{text(tables.how_text(result))}</p></details>",
        ]
    )


def html(results: Sequence[dict[str, Any]]) -> str:
    links = "".join(f'<a href="#{identifier(name_of(result))}">{text(name_of(result))}</a>' for result in results)
    body = "".join(suite_section(result) for result in results)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><title>grapeshot compared</title>'
        f"<style>{STYLE}</style></head><body><h1>grapeshot compared</h1>"
        f'<p class="soft">Less is better, except for requests per second.</p><nav>{links}</nav>{body}</body></html>\n'
    )


def load(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Return digests of these comparisons, with latency by quantile."""
    return [digest.digest(json.loads(path.read_text()), has_curves=True) for path in paths]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=Path, nargs="+", help="the runs that comparisons wrote, target/bench/*-runs.json")
    parser.add_argument("--write", type=Path, required=True, help="the HTML file")
    args = parser.parse_args()
    args.write.write_text(html(load(args.json)), encoding="utf-8")


if __name__ == "__main__":
    main()
