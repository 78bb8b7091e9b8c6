"""Run the fuzzers for some time, with a new seed in each round: `make fuzz-python SECONDS=60`.

    python tests/fuzz/run.py --seconds 3600 arguments
    python tests/fuzz/run.py --seed 7 --rounds 1 arguments      repeat the round with seed 7

`arguments` is the name of a fuzzer. Without a name, all fuzzers run. The first failing example ends its fuzzer, and is
printed, shortened as far as possible. The status is 0 if no example fails.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fuzz.budget import Budget

FUZZERS = ("arguments", "transports", "tls_input")


def run(name: str, seconds: float, first: int, rounds: int | None) -> bool:
    """Run one fuzzer; return whether it found nothing."""
    fuzz = importlib.import_module(f"fuzz.test_{name}").fuzz
    end, number = time.monotonic() + seconds, first
    while time.monotonic() < end and (rounds is None or number < first + rounds):
        try:
            fuzz(Budget(number))
        except KeyboardInterrupt:
            raise
        except BaseException:
            traceback.print_exc()
            print(f"{name}: FAILED; to repeat: python tests/fuzz/run.py --rounds 1 --seed {number} {name}", flush=True)
            return False
        number += 1
    print(f"{name}: {number - first} rounds, seeds {first} to {number - 1}", flush=True)
    return True


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", help=f"any of {', '.join(FUZZERS)} (default: all)")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long each fuzzer runs")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000_000)
    parser.add_argument("--rounds", type=int)
    options = parser.parse_args()
    one = functools.partial(run, seconds=options.seconds, first=options.seed, rounds=options.rounds)
    held = [one(name) for name in options.names or FUZZERS]
    sys.exit(0 if all(held) else 1)


if __name__ == "__main__":
    main()
