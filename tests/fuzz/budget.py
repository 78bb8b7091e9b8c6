"""How much a fuzzer does: a small and always equal part in `make test`, any time in `make fuzz`."""

from __future__ import annotations

from typing import Any

import hypothesis
from hypothesis import HealthCheck


class Budget:
    """Without a seed always the same examples."""

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
        """The test, or the state machine, with the seed."""
        return test if self.seed is None else hypothesis.seed(self.seed)(test)


QUICK = Budget()
