"""How much a fuzzer does: a small and always equal part in `make test`, any time in `make fuzz`."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings

QUICK = settings(
    deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck), print_blob=False
)
RANDOM = settings(QUICK, derandomize=False)


def count(base: Any, examples: int) -> Any:
    """The settings with that many examples."""
    return settings(base, max_examples=examples)
