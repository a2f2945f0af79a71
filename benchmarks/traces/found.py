"""Recorded jobs and what `gnomon compare` finds in them: steps by the wall clock, kinds, and faults by name.

    python -m benchmarks.traces.found [--folder DIR] > benchmarks/results/traces.md

Thirteen small jobs on CPUs, each recorded with and without marks of steps, and seven with a fault put in. Needs
torch and transformers; a few minutes on two cores. Other processes on the cores appear in the traces.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from datetime import date
from pathlib import Path

import torch

from benchmarks.traces.jobs import FAULTS, JOBS, record
from gnomon.formats.kineto import read_traces
from gnomon.report.profile import Profile, profile_of


def _recorded(job: str, fault: str, folder: Path, marks: bool = True) -> tuple[Profile, float]:
    seconds = record(job, fault, folder, marks=marks)
    # The first of three or more steps is left out on both sides.
    return profile_of(read_traces(str(folder))), statistics.median_low(seconds[1:])


def main() -> int:
    """Print the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path)
    folder = parser.parse_args().folder or Path(tempfile.mkdtemp())
    torch.set_num_threads(1)
    print("# What is found in recorded traces\n")
    print(f"{date.today()}, torch {torch.__version__}, CPU, gloo; one thread a rank.")
    print("`python -m benchmarks.traces.found`\n")
    print("| job | step, wall ms | found ms | without marks | most time in | names |\n|---|---|---|---|---|---|")
    for job in JOBS:
        profile, wall = _recorded(job, "", folder / job)
        unmarked, _ = _recorded(job, "", folder / f"{job}-unmarked", marks=False)
        rank = profile.slowest
        kinds = ", ".join(f"{kind.kind} {kind.seconds / rank.step.seconds:.0%}" for kind in rank.kinds[:3])
        names = ", ".join(f"{finding.name} {finding.share:.0%}" for finding in profile.findings) or "none"
        print(
            f"| {job} | {wall * 1e3:.1f} | {rank.step.seconds * 1e3:.1f} | {unmarked.slowest.step.seconds * 1e3:.1f} | "
            f"{kinds} | {names} |"
        )
        sys.stdout.flush()
    print("\n| job | fault put in | found, by its seconds |\n|---|---|---|")
    right = 0
    for job, fault in FAULTS:
        profile, _ = _recorded(job, fault, folder / f"{job}-{fault.replace(' ', '-')}")
        found = [f"{finding.name} {finding.share:.0%}" for finding in profile.findings]
        right += any(finding.name == fault for finding in profile.findings)
        print(f"| {job} | {fault} | {', '.join(found)} |")
        sys.stdout.flush()
    print(f"\n{right} of {len(FAULTS)} faults are named.")
    return 0 if right == len(FAULTS) else 1


if __name__ == "__main__":
    sys.exit(main())
