"""The textbook policies of the replay against brute force (tests/fleet/brute.py), on random traces.

python benchmarks/fleet/brute.py [500]: for each policy, on how many traces every start, end, preemption and move is the
same, and the seeds of the others. Exit status 1 if any differ.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from fleet.test_brute import NAMES, differences  # noqa: E402


def main(count: int) -> int:
    """All policies on so many traces."""
    total = 0
    for name in NAMES:
        wrong = differences(name, range(count))
        total += len(wrong)
        seeds = f"; seeds {', '.join(map(str, wrong))}" if wrong else ""
        print(f"{name:<10}{count - len(wrong):>5} of {count} equal{seeds}", flush=True)
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 500))
