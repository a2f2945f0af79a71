"""The search against predicting every plan, on random small spaces.

    python benchmarks/search/exact.py [SPACES]      # default 200; prints the line kept in results/search.md

Every other space has the choices of `space.EXTRA_CHOICES` too: products that are cut, activations on the host; half of
these have parameters on the host, and of two in three the update too.

Claim: in each, the plan that the search returns is as fast as the fastest of all plans predicted one by one that fit;
no bound on time is above its plan, none on memory rules out a plan that fits; points add up. The spaces and checks are
those of tests/search, with other seeds too.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from search.test_exact import check  # noqa: E402


def main() -> None:
    """Checks the spaces; an assertion that fails names the seed."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    start, points = time.process_time(), 0
    for seed in range(count):
        points += check(seed, extra_choices=bool(seed % 2), away=seed % 4 == 3)
    spent = time.process_time() - start
    print(f"{time.strftime('%Y-%m-%d')}: {count} spaces, {points:,} points, all alike; {spent:.0f} s of one core")


if __name__ == "__main__":
    main()
