"""How much a fuzzer does: always the same few examples in `make test`, and as many as you like in `make fuzz`."""

from __future__ import annotations

from typing import Any

import hypothesis
from hypothesis import HealthCheck


class Budget:
    """Holds the seed of the examples, and makes settings. Without a seed, the examples are always the same."""

    def __init__(self, seed: int | None = None) -> None:
        self.seed = seed

    def settings(self, examples: int, **more: Any) -> Any:
        return hypothesis.settings(
            max_examples=examples,
            deadline=None,
            derandomize=self.seed is None,
            database=None,
            suppress_health_check=list(HealthCheck),
            print_blob=False,
            **more,
        )

    def seeded(self, test: Any) -> Any:
        """Return the test, or the state machine, with the seed applied."""
        return test if self.seed is None else hypothesis.seed(self.seed)(test)


QUICK = Budget()
