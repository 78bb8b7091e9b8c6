"""Turn the JSON of a comparison into Markdown: `python -m benchmarks.tables results.json`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.intervals import LEAST_PAIRS, STANDINGS, TOO_FEW, Interval
from benchmarks.standings import (
    OURS,
    RAW,
    Outcome,
    best_peer,
    count,
    judge,
    median,
    number,
    ratio,
    standing,
    total,
    verdict,
)


def digits(value: float) -> str:
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.2f}"


def with_interval(found: Interval | None) -> str:
    """The median, with half of its interval as a percentage."""
    if found is None:
        return "-"
    half = (found.high - found.low) / 2 / abs(found.middle) if found.middle else 0.0
    return f"{digits(found.middle)} ±{half:.0%}"


def ratio_text(found: Interval | None, emphasis: str = "**") -> str:
    if found is None:
        return "-"
    return f"{emphasis}{found.middle:.2f}{emphasis} ({found.low:.2f}-{found.high:.2f})"


def best_cell(outcome: Outcome) -> str:
    """The ratio to the best peer."""
    best = best_peer(outcome)
    return "-" if best is None else f"{ratio_text(ratio(outcome, best))} of {best}"


def raw_cell(outcome: Outcome) -> str:
    """The ratio to the raw server, if the row has one."""
    found = ratio(outcome, RAW)
    return f"{found.middle:.2f}" if found else "-"


def one_line(outcome: Outcome) -> str:
    """Return a case in one line, for the terminal."""
    parts = [f"{loop} {with_interval(number(outcome, loop))}" for loop in outcome["numbers"]]
    if best := best_peer(outcome):
        parts.append(f"{ratio_text(ratio(outcome, best), '')} of {best}: {standing(outcome)}")
    parts += [f"bound {judge(outcome, bound)[0]}: {verdict(outcome, bound)}" for bound in outcome["bounds"]]
    return outcome.get("left_out") or ", ".join(parts)


def cell(outcome: Outcome, loop: str) -> str:
    """The number, `failed`, or `-` if the loop does not take part or lacks the feature."""
    if loop in outcome["failures"]:
        return "failed"
    return with_interval(number(outcome, loop))


def remarks(result: dict[str, Any]) -> list[str]:
    """Return the notes below a table: why cells are empty, and what is special about a row."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for outcome in result["cases"]:
        for loop, reason in outcome.get("unsupported", {}).items():
            reasons.setdefault((loop, reason.strip(" :")), []).append(outcome["name"])
    lines = [f"{loop} does not support {', '.join(names)}: {reason}." for (loop, reason), names in reasons.items()]
    lines += [
        f"{outcome['title']}: left out because {outcome['left_out']}."
        for outcome in result["cases"]
        if outcome.get("left_out")
    ]
    lines += [growth for outcome in result["cases"] if (growth := growth_text(outcome, result["cases"]))]
    for outcome in result["cases"]:
        if rate := outcome.get("kept", {}).get("rate_rps"):
            lines.append(
                f"{outcome['title']}: {rate:,} requests per second; the slowest loop is {outcome['kept']['slowest']}."
            )
        if tool := outcome.get("kept", {}).get("tool"):
            lines.append(f"{outcome['title']}: the version is {tool}.")
        asked = [(loop, median(outcome, loop, "queries")) for loop in outcome["numbers"]]
        if counts := [f"{queries:,.0f} ({loop})" for loop, queries in asked if queries is not None]:
            lines.append(f"{outcome['title']}: queries that reached the DNS server: {', '.join(counts)}.")
        for loop in outcome["numbers"]:
            if resent := total(outcome, loop, "resent"):
                of = total(outcome, loop, "requests")
                lines.append(f"{outcome['title']}, on {loop}: {resent:,.0f} of {of:,.0f} datagrams were sent again.")
            unanswered, of = (total(outcome, loop, name) for name in ("unanswered", "requests"))
            if unanswered > 0.01 * of:
                lines.append(
                    f"{outcome['title']}, on {loop}: {unanswered:,.0f} requests were not answered, {of:,.0f} were."
                )
            if speedup := median(outcome, loop, "speedup"):
                cpu_us_of_one = median(outcome, loop, "cpu_us_of_one") or 1.0
                more = (median(outcome, loop, "cpu_us") or 0.0) / cpu_us_of_one
                line = (
                    f"{outcome['title']}, on {loop}: two loops serve {speedup:.2f} times as many requests as one, "
                    f"with {more:.2f} times the CPU per request."
                )
                if of_processes := median(outcome, loop, "speedup_of_processes"):
                    more = (median(outcome, loop, "cpu_us_of_processes") or 0.0) / cpu_us_of_one
                    line += f" Two processes serve {of_processes:.2f} times as many, with {more:.2f} times the CPU."
                lines.append(line)
            if early := total(outcome, loop, "early"):
                of = total(outcome, loop, "sleeps")
                lines.append(f"{outcome['title']}, on {loop}: {early:,.0f} of {of:,.0f} sleeps ended too early.")
    return lines


def growth_text(outcome: Outcome, outcomes: Sequence[Outcome]) -> str:
    """How each loop's number compares with its number at a smaller scale, such as 100 connections instead of 8,000."""
    smaller = next((other for other in outcomes if other["name"] == outcome.get("grown_from")), None)
    if smaller is None:
        return ""
    pairs = [(loop, median(outcome, loop), median(smaller, loop)) for loop in outcome["numbers"]]
    parts = [f"{loop} {large / small:.2f}" for loop, large, small in pairs if large and small]
    return f"{outcome['title']}, as a multiple of {smaller['title']}: {', '.join(parts)}." if parts else ""


def rows(header: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    numeric = ["---" if index == 0 else "---:" for index in range(len(header))]
    return ["| " + " | ".join(cells) + " |" for cells in (header, numeric, *body)]


def main_table(outcomes: Sequence[Outcome], loops: Sequence[str]) -> list[str]:
    has_raw = RAW in loops
    header = [outcomes[0]["group"], *loops, f"{OURS} / best peer", f"{OURS} is", *([f"/ {RAW}"] if has_raw else [])]
    body = [
        [
            f"{outcome['title']}, {outcome['unit']}",
            *(cell(outcome, loop) for loop in loops),
            best_cell(outcome),
            standing(outcome),
            *([raw_cell(outcome)] if has_raw else []),
        ]
        for outcome in outcomes
    ]
    return rows(header, body)


LATENCIES = {"p50_us": "p50", "p99_us": "p99", "p999_us": "p99.9"}


def load_cell(outcome: Outcome, loop: str) -> str:
    rps = median(outcome, loop, "rps")
    if rps is None:
        return "-"
    latencies = [digits(value) for name in LATENCIES if (value := median(outcome, loop, name)) is not None]
    return f"{digits(rps)}; {' / '.join(latencies)}" if latencies else digits(rps)


def load_header(outcomes: Sequence[Outcome]) -> str:
    """Return the header with the latencies that the rows have. The JSON of older comparisons lacks p99.9."""
    known = [
        text
        for name, text in LATENCIES.items()
        if any(median(outcome, loop, name) for outcome in outcomes for loop in outcome["numbers"])
    ]
    return f"Requests/s; latency {' / '.join(known)} in us" if known else "Requests/s"


def load_table(outcomes: Sequence[Outcome], loops: Sequence[str]) -> list[str]:
    """Return the table of throughput and latency."""
    header = [load_header(outcomes), *loops]
    measured = [outcome for outcome in outcomes if any(median(outcome, loop, "rps") for loop in loops)]
    return rows(header, [[outcome["title"], *(load_cell(outcome, loop) for loop in loops)] for outcome in measured])


def start_table(outcomes: Sequence[Outcome], loops: Sequence[str]) -> list[str]:
    header = ["Start, whole process in ms CPU", *loops]
    return rows(header, [["", *(with_interval(number(outcomes[0], loop, "whole_ms")) for loop in loops)]])


def summary(result: dict[str, Any]) -> str:
    """How many rows are ahead, equal and behind."""
    standings = count(result["cases"])
    if not standings:
        return "Nothing was compared."
    few = f"enough runs for a verdict, which needs at least {LEAST_PAIRS} pairs of runs"
    beside = {"ahead": "ahead of every peer", "equal": "equal", "behind": "behind a peer"}
    parts = ", ".join(f"{beside[word]} in {standings[word]}" for word in STANDINGS if standings[word])
    if not parts:
        return f"No row with a peer has {few}. (Rows with a peer: {standings.total()}.)"
    said = f"Of the {standings.total()} rows that have a peer, {OURS} is {parts}."
    return f"{said} The others ({standings[TOO_FEW]}) do not have {few}." if standings[TOO_FEW] else said


def separate_parts(result: dict[str, Any]) -> str:
    """Return a sentence if the rows come from several revisions."""
    revisions: dict[str, int] = {}
    for outcome in result["cases"]:
        revision = outcome.get("revision") or "unknown"
        revisions[revision] = revisions.get(revision, 0) + 1
    if len(revisions) < 2:
        return ""
    counted = ", ".join(f"{count} of {revision}" for revision, count in revisions.items())
    return f"The rows were measured at different times, from these revisions: {counted}."


RAW_TEXT = "The raw server uses epoll without Python, and the interpreter's OpenSSL for TLS."


def loads(settings: dict[str, Any]) -> str:
    """Return how long servers are loaded, and on which cores."""
    return (
        f"Servers are loaded for {settings['seconds']:g} s after {settings['warm_up_s']:g} s of warm-up; the server "
        f"runs on core {settings['server_core']}, the load on core {settings['load_core']}"
        f"{', where it polls without sleeping' if settings['spin'] else ''}."
    )


# The rule for the rows of every comparison. docs/speed.md has it once, above its tables.
RULE = (
    "Each number is the median of its runs, ± half of its 95 % interval. Ratios are calculated run by run, and the "
    "95 % interval of their median is in brackets. Below 1, grapeshot needs less than the peer. A row is ahead only "
    "if the whole interval is below 1 for every peer, behind if it is above 1 for any peer, and otherwise equal. "
    "This is the verdict of the row. The same rule gives a verdict for each single peer. Of the peers whose verdict is "
    f"that of the row, the best peer is the one with the highest ratio. A row with fewer than {LEAST_PAIRS} runs gets "
    "no verdict (too few runs), because its interval would be too uncertain."
)


def groups(result: dict[str, Any]) -> list[list[Outcome]]:
    """The rows that were not left out, group by group."""
    found: dict[str, list[Outcome]] = {}
    for outcome in result["cases"]:
        if not outcome.get("left_out"):
            found.setdefault(outcome["group"], []).append(outcome)
    return list(found.values())


def shown_loops(result: dict[str, Any], outcomes: Sequence[Outcome]) -> list[str]:
    """The loops that have a number in one of these rows, or failed in one."""
    return [
        loop
        for loop in result["loops"]
        if any(loop in outcome["numbers"] or loop in outcome["failures"] for outcome in outcomes)
    ]


def how_text(result: dict[str, Any], *, has_rule: bool = True) -> str:
    """Return how it was measured, and the rule that decides a row."""
    settings = result["settings"]
    parts = [f"{settings['runs']} alternating runs, each in a fresh process."]
    if has_rule:
        parts.append(RULE)
    if "warm_up_s" in settings:
        parts.append(loads(settings))
    return " ".join([*parts, result.get("how", RAW_TEXT)])


def where(result: dict[str, Any]) -> str:
    """Return when, on which machine and with which versions it was measured."""
    machine = result["machine"]
    packages = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    python = f"CPython {machine['python']}{' free-threaded' if machine['free_threaded'] else ''}"
    return (
        f"Measured {result['taken']}: {machine['processor']}, {machine['cores']} cores, {machine['system']}; "
        f"{python} ({machine['python_compiler']}); {packages}; revision {machine['revision'] or 'unknown'}."
    )


def failures(result: dict[str, Any]) -> list[str]:
    return [
        f"{outcome['title']} on {loop} failed: {reason}"
        for outcome in result["cases"]
        for loop, reason in outcome["failures"].items()
    ]


def markdown(result: dict[str, Any], *, has_rule: bool = True) -> str:
    """The whole page. A page with several comparisons has the rule only once."""
    heading = result.get("heading", "# Comparison")
    lines = [heading, "", where(result), "", how_text(result, has_rule=has_rule), "", summary(result)]
    if parts := separate_parts(result):
        lines += ["", parts]
    lines += [f"\n**{name} was left out**: {reason}" for name, reason in result["missing"].items()]
    for outcomes in groups(result):
        loops = shown_loops(result, outcomes)
        lines += ["", *main_table(outcomes, loops)]
        if any(median(outcome, loop, "rps") for outcome in outcomes for loop in loops):
            lines += ["", *load_table(outcomes, loops)]
        if any(number(outcome, loop, "whole_ms") for outcome in outcomes for loop in loops):
            lines += ["", *start_table(outcomes, loops)]
    if notes := remarks(result) + failures(result):
        lines += ["", *(f"- {text}" for text in notes)]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("json", type=Path, help="the JSON that benchmarks.compare wrote")
    parser.add_argument("--write", type=Path, help="write to this file instead of stdout")
    args = parser.parse_args()
    page = markdown(json.loads(args.json.read_text())) + "\n"
    if args.write:
        args.write.write_text(page)
    else:
        print(page, end="")


if __name__ == "__main__":
    main()
