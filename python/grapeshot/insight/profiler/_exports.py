"""Exports a profile for other tools: as speedscope's JSON, and as a file for ``pstats``."""

from __future__ import annotations

import itertools
import json
import marshal
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ._profile import Profile

    _Place = tuple[str, int, str]


def write_speedscope(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Write two profiles, one of CPU time and one of wall time. The outermost frame is the coro, task or thread.

    Source: https://www.speedscope.app/file-format-schema.json
    """
    frames: list[dict[str, object]] = [
        {"name": name, "file": file, "line": line} if file else {"name": name} for name, file, line in profile.functions
    ]
    owner_frame = len(frames)
    frames.extend({"name": str(owner)} for owner in profile.owners)
    profiles = []
    for name, column in (("CPU time", 4), ("wall time", 5)):
        samples, weights = [], []
        for index, node in enumerate(profile.nodes):
            if node[column]:
                samples.append([owner_frame + node[0], *reversed(profile.path(index))])
                weights.append(node[column])
        profiles.append(
            {
                "type": "sampled",
                "name": name,
                "unit": "nanoseconds",
                "startValue": 0,
                "endValue": sum(weights),
                "samples": samples,
                "weights": weights,
            }
        )
    page = {
        "$schema": "https://www.speedscope.app/file-format-schema.json",
        "exporter": "grapeshot",
        "name": "grapeshot",
        "activeProfileIndex": 0,
        "shared": {"frames": frames},
        "profiles": profiles,
    }
    with open(path, "w", encoding="utf-8") as file:
        json.dump(page, file)


def write_pstats(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Write a file for ``pstats.Stats(path)``. Times are CPU seconds. The format has no coros, tasks or threads.

    Source: ``Lib/cProfile.py``, ``snapshot_stats``.
    """
    places: list[_Place] = [(file or "~", line, name) for name, file, line in profile.functions]
    callers: dict[_Place, dict[_Place, list[float]]] = {}
    for index, (_, parent, function, calls, cpu, _) in enumerate(profile.nodes):
        above = profile.path(parent)
        if above:
            entry = callers.setdefault(places[function], {}).setdefault(places[above[0]], [0, 0, 0.0, 0.0])
            # False if these calls are recursive: further out in the chain of calls, the same caller has called the same
            # function. In a caller's entry, the number of all calls precedes the number of primitive calls. In the
            # function's own entry, the number of primitive calls comes first.
            is_outer = (function, above[0]) not in itertools.pairwise(above)
            entry[0] += calls
            entry[1] += calls * is_outer
            entry[2] += cpu / 1e9
            entry[3] += profile.totals[index][1] / 1e9 * is_outer
    stats = {
        (row.file or "~", row.line, row.name): (
            row.primitive_calls,
            row.calls,
            row.own_cpu / 1e9,
            row.cpu / 1e9,
            {caller: tuple(entry) for caller, entry in callers.get((row.file or "~", row.line, row.name), {}).items()},
        )
        for row in profile.function_rows()
    }
    with open(path, "wb") as file:
        marshal.dump(stats, file)
