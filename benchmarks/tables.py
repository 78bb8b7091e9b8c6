"""The table of a comparison in Markdown, from its JSON alone: `python -m benchmarks.tables results.json`."""

from __future__ import annotations

import argparse
import json
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

OURS = "grapeshot"
PEER = "uvloop"
STANDINGS = ("ahead", "equal", "behind")
AGREE = 0.8  # the share of runs that must agree for a row to be ahead or behind
Outcome = dict[str, Any]


def values(outcome: Outcome, loop: str, metric: str) -> list[float]:
    """One number per run, or none when the loop or the metric is not there."""
    return [sample[metric] for sample in outcome["samples"].get(loop, []) if sample.get(metric) is not None]


def ratios(outcome: Outcome, loop: str, peer: str) -> list[float]:
    """Run by run, since the runs of one number lie next to each other in time."""
    pairs = zip(values(outcome, loop, outcome["metric"]), values(outcome, peer, outcome["metric"]), strict=False)
    return [own / other for own, other in pairs if other > 0]


def number(value: float) -> str:
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.2f}"


def with_spread(taken: Sequence[float]) -> str:
    """The median, and half of the range as a part of it."""
    if not taken:
        return "-"
    median = statistics.median(taken)
    spread = (max(taken) - min(taken)) / 2 / abs(median) if median else 0.0
    return f"{number(median)} ±{spread:.0%}"


def ratio_text(taken: Sequence[float]) -> str:
    if not taken:
        return "-"
    return f"**{statistics.median(taken):.2f}** ({min(taken):.2f}-{max(taken):.2f})"


def peers(outcome: Outcome) -> list[str]:
    """Return the peers that grapeshot is compared with in this row."""
    return list(outcome.get("peers", [PEER]))


def ratio_cell(outcome: Outcome) -> str:
    """The ratios to all peers, one per line where there are several."""
    against = peers(outcome)
    if against == [PEER]:
        return ratio_text(ratios(outcome, OURS, PEER))
    taken = [(peer, ratios(outcome, OURS, peer)) for peer in against]
    return "<br>".join(f"{ratio_text(found)} of {peer}" for peer, found in taken if found) or "-"


def ratio_header(outcomes: Iterable[Outcome]) -> str:
    against = {peer for outcome in outcomes for peer in peers(outcome)}
    return f"{OURS} / {PEER if against == {PEER} else 'peer'}"


def judge(outcome: Outcome, bound: dict[str, Any]) -> tuple[str, bool | None]:
    """Return the bound as text, and whether it holds; None: grapeshot or the peer is missing."""
    at_most, peer = bound["at_most"], bound["peer"]
    if peer is None:
        taken, text = values(outcome, OURS, outcome["metric"]), f"{at_most:g} {outcome['unit']}"
    else:
        taken, text = ratios(outcome, OURS, peer), f"{at_most:.2f}" + (f" of {peer}" if peer != PEER else "")
    return text, statistics.median(taken) <= at_most if taken else None


def verdict(outcome: Outcome, bound: dict[str, Any]) -> str:
    _, holds = judge(outcome, bound)
    if holds is None:
        return "not measured"
    if holds:
        return "yes"
    peer = bound["peer"]
    taken = ratios(outcome, OURS, peer) if peer else values(outcome, OURS, outcome["metric"])
    return f"**no** ({statistics.median(taken) / bound['at_most'] - 1:+.0%})"


def standing(taken: Sequence[float]) -> str:
    """`ahead`, `equal` or `behind`, by the ratios of the runs: ahead or behind where four of five runs agree."""
    if not taken:
        return "-"
    if sum(ratio < 1 for ratio in taken) >= AGREE * len(taken):
        return "ahead"
    return "behind" if sum(ratio > 1 for ratio in taken) >= AGREE * len(taken) else "equal"


def standing_cell(outcome: Outcome) -> str:
    """The standing beside each peer, one per line where there are several."""
    found = [standing(ratios(outcome, OURS, peer)) for peer in peers(outcome)]
    return "<br>".join(text for text in found if text != "-") or "-"


def one_line(outcome: Outcome) -> str:
    """Return a case in one line, for people who watch the runs."""
    metric = outcome["metric"]
    parts = [f"{loop} {with_spread(values(outcome, loop, metric))}" for loop in outcome["samples"]]
    taken = [(ratios(outcome, OURS, peer), "" if peer == PEER else f" of {peer}") for peer in peers(outcome)]
    parts += [f"ratio {statistics.median(found):.2f}{whose}" for found, whose in taken if found]
    parts += [f"bound {judge(outcome, bound)[0]}: {verdict(outcome, bound)}" for bound in outcome["bounds"]]
    return ", ".join(parts)


def cell(outcome: Outcome, loop: str) -> str:
    """The number, or why there is none: `-` where the loop does not take part or has no such thing."""
    if loop in outcome["failures"]:
        return "failed"
    return with_spread(values(outcome, loop, outcome["metric"]))


def brief(result: dict[str, Any]) -> str:
    """The chosen rows in plain text, for a terminal."""
    header = ["case", *result["loops"], ratio_header(result["cases"]), "bound", "holds"]
    body = [
        [
            outcome["name"],
            *(cell(outcome, loop) for loop in result["loops"]),
            ratio_cell(outcome).replace("*", "").replace("<br>", "; "),
            "; ".join(judge(outcome, bound)[0] for bound in outcome["bounds"]),
            "; ".join(verdict(outcome, bound).replace("*", "") for bound in outcome["bounds"]),
        ]
        for outcome in result["cases"]
    ]
    widths = [max(len(line[index]) for line in (header, *body)) for index in range(len(header))]
    lines = [
        "  ".join(
            text.ljust(width) if index == 0 else text.rjust(width)
            for index, (text, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in (header, *body)
    ]
    return "\n".join([*lines, *(f"- {text}" for text in remarks(result))])


def remarks(result: dict[str, Any]) -> list[str]:
    """Return the notes: why a cell has no number, and what is special about a row."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for outcome in result["cases"]:
        for loop, reason in outcome.get("unsupported", {}).items():
            reasons.setdefault((loop, reason.strip(" :")), []).append(outcome["name"])
    lines = [f"{loop} has no {', '.join(names)}: {reason}." for (loop, reason), names in reasons.items()]
    for outcome in result["cases"]:
        for loop in outcome["samples"]:
            if resent := sum(values(outcome, loop, "resent")):
                of = sum(values(outcome, loop, "requests"))
                lines.append(f"{outcome['name']} on {loop}: {resent:,.0f} of {of:,.0f} datagrams were sent again.")
            if early := sum(values(outcome, loop, "early")):
                of = sum(values(outcome, loop, "sleeps"))
                lines.append(f"{outcome['name']}, {loop}: {early:,.0f} of {of:,.0f} sleeps ended before their time.")
    return lines


def rows(header: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    numeric = ["---" if index == 0 else "---:" for index in range(len(header))]
    return ["| " + " | ".join(cells) + " |" for cells in (header, numeric, *body)]


def main_table(outcomes: Sequence[Outcome], loops: Sequence[str]) -> list[str]:
    header = [f"{outcomes[0]['group']}", *loops, ratio_header(outcomes), f"{OURS} is"]
    body = [
        [
            f"{outcome['title']}, {outcome['unit']}",
            *(cell(outcome, loop) for loop in loops),
            ratio_cell(outcome),
            standing_cell(outcome),
        ]
        for outcome in outcomes
    ]
    return rows(header, body)


def load_table(outcomes: Sequence[Outcome], loops: Sequence[str]) -> list[str]:
    """Return the table of throughput and latency."""
    header = ["Requests/s; latency p50 / p99 in us", *loops]
    body = []
    for outcome in outcomes:
        cells = [outcome["title"]]
        for loop in loops:
            rps, p50, p99 = (values(outcome, loop, metric) for metric in ("rps", "p50_us", "p99_us"))
            if not rps:
                cells.append("-")
                continue
            cells.append(
                f"{number(statistics.median(rps))}; {number(statistics.median(p50))} / {number(statistics.median(p99))}"
            )
        body.append(cells)
    return rows(header, body)


def start_table(outcomes: Sequence[Outcome], loops: Sequence[str]) -> list[str]:
    header = ["Start, whole process in ms CPU", *loops]
    return rows(header, [["", *(with_spread(values(outcomes[0], loop, "whole_ms")) for loop in loops)]])


def summary(result: dict[str, Any]) -> str:
    """How many rows are ahead, equal and behind, peer by peer."""
    counted: dict[str, Counter[str]] = {}
    for outcome in result["cases"]:
        for peer in peers(outcome):
            counted.setdefault(peer, Counter())[standing(ratios(outcome, OURS, peer))] += 1
    lines = []
    for peer, standings in counted.items():
        compared = sum(standings[word] for word in STANDINGS)
        parts = ", ".join(f"{word} in {standings[word]}" for word in STANDINGS if standings[word])
        if compared:
            lines.append(f"Of the {compared} rows beside {peer}, {OURS} is {parts}.")
    return " ".join(lines) or "Nothing was compared."


def separate_parts(result: dict[str, Any]) -> str:
    """Return a sentence if the rows come from several revisions."""
    revisions: dict[str, int] = {}
    for outcome in result["cases"]:
        revision = outcome.get("revision") or "unknown"
        revisions[revision] = revisions.get(revision, 0) + 1
    if len(revisions) < 2:
        return ""
    counted = ", ".join(f"{count} of {revision}" for revision, count in revisions.items())
    return f"The rows were taken in parts, from these revisions: {counted}."


def how(settings: dict[str, Any]) -> str:
    """Return how loops are compared."""
    return (
        f"{settings['runs']} alternated runs, a fresh process each; loads of {settings['seconds']:g} s after "
        f"{settings['warm_up_s']:g} s of warm-up{', spinning' if settings['spin'] else ''}; server on core "
        f"{settings['server_core']}, load on core {settings['load_core']}. Each number is the median with half of the "
        "range. Ratios are calculated run by run and have their range in brackets; below 1 grapeshot needs less. A row "
        "is ahead or behind if four of five runs agree, otherwise equal. The raw server is epoll without Python, for "
        "TLS with the interpreter's OpenSSL."
    )


def markdown(result: dict[str, Any]) -> str:
    """The whole page."""
    machine, settings = result["machine"], result["settings"]
    packages = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    python = f"CPython {machine['python']}{' free-threaded' if machine['free_threaded'] else ''}"
    where = (
        f"Taken {result['taken']}: {machine['processor']}, {machine['cores']} cores, {machine['system']}; "
        f"{python} ({machine['python_compiler']}); {packages}; revision {machine['revision'] or 'unknown'}."
    )
    lines = [
        result.get("heading", "# Comparison"),
        "",
        where,
        "",
        result.get("how") or how(settings),
        "",
        summary(result),
    ]
    if parts := separate_parts(result):
        lines += ["", parts]
    lines += [f"\n**{name} was left out**: {reason}" for name, reason in result["missing"].items()]
    groups = list(dict.fromkeys(outcome["group"] for outcome in result["cases"]))
    for group in groups:
        outcomes = [outcome for outcome in result["cases"] if outcome["group"] == group]
        loops = [
            loop
            for loop in result["loops"]
            if any(loop in outcome["samples"] or loop in outcome["failures"] for outcome in outcomes)
        ]
        lines += ["", *main_table(outcomes, loops)]
        if any(values(outcome, loop, "rps") for outcome in outcomes for loop in loops):
            lines += ["", *load_table(outcomes, loops)]
        if any(values(outcome, loop, "whole_ms") for outcome in outcomes for loop in loops):
            lines += ["", *start_table(outcomes, loops)]
    if unsupported := remarks(result):
        lines += ["", *(f"- {text}" for text in unsupported)]
    failures = [
        f"- {outcome['title']} on {loop}: {reason}"
        for outcome in result["cases"]
        for loop, reason in outcome["failures"].items()
    ]
    if failures:
        lines += ["", "Failures:", "", *failures]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("json", type=Path, help="what benchmarks.compare wrote")
    parser.add_argument("--write", type=Path, help="a file instead of stdout")
    args = parser.parse_args()
    page = markdown(json.loads(args.json.read_text())) + "\n"
    if args.write:
        args.write.write_text(page)
    else:
        print(page, end="")


if __name__ == "__main__":
    main()
