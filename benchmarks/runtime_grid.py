"""Many plans drawn at random, each run beside transformers: `python benchmarks/runtime_grid.py [--cases N]`.

With `--oracle transformers` (the default) plans of several model types are compared with transformers' own model in
train mode (`tests/runtime/hf_grid.py`). With `--oracle plain` every value of every boolean and enum field of a plan's
overlap, optimizer and layout comes up in turn, with tied and untied weights, on 1, 2 and 4 processes; the axes,
schedules, shares and what is saved are drawn. Each plan must give the oracle's loss, gradient norm and parameters over
three steps in float64 to 1e-9, or be refused before the first step with one reason. Prints each case as it ends, how
many were equal, why others were refused, and what is wrong, hung (its processes are ended at --limit) or crashed;
writes that to a file in results/, of the cases that ran. Exits with 1 where anything is wrong, hung or crashed. Left
out: GPUs, speed, and other dtypes.
"""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from platform import python_version
from traceback import format_exc
from types import FrameType
from typing import NoReturn

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from runtime import grid, hf_grid  # noqa: E402  (the tests run a sample of the same cases)

RESULTS = ROOT / "benchmarks" / "results"
NAMES = {
    "transformers": "runtime_grid_transformers.md",
    "balanced": "runtime_grid_balanced.md",
    "plain": "runtime_grid.md",
}
DRAWN = {
    "plain": f"{len(grid.FIELDS)} values of fields, tied and untied weights in turn",
    "transformers": f"{len(hf_grid.MODELS)} types in turn, beside transformers in train mode, each document alone",
    "balanced": f"{len(hf_grid.BALANCED)} types in turn with the loss that balances experts, beside transformers",
}


def reason(message: str) -> str:
    """A refusal without the numbers of its plan."""
    return re.sub(r"\[[^\]]*\]|\d+", "N", message.split(";")[0])


def main() -> int:
    """The table, and the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=400, help="plans to try (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="number of the first of them (default: %(default)s)")
    parser.add_argument(
        "--oracle",
        choices=tuple(NAMES),
        default="transformers",
        help="what plans are compared with: model types of transformers in train mode, those that balance "
        "their experts by a loss, or a plain Llama of torch",
    )
    parser.add_argument("--seed", type=int, default=0, help="another seed draws other plans")
    parser.add_argument("--only", type=int, nargs="+", help="these cases alone; writes no file")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds after which a case counts as hung")
    parser.add_argument("--budget", type=float, help="seconds after which no other case is begun (default: none)")
    parser.add_argument("-o", "--output", type=Path, help="file of the table; default one beside earlier results")
    options = parser.parse_args()
    began = time.monotonic()
    numbers = options.only or range(options.first, options.first + options.cases)
    verdicts, reasons, bad = Counter[str](), Counter[str](), list[str]()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the cases that ended are reported
    try:
        for shown, case, verdict, message in results(numbers, options):
            verdicts[verdict] += 1
            print(
                f"{time.monotonic() - began:.0f} s: {verdict}: {shown}; "
                f"{verdicts.total()} of {len(numbers)}: {dict(verdicts)}",
                file=sys.stderr,
                flush=True,
            )
            if verdict == "refused":
                reasons[reason(message)] += 1
            if verdict in grid.BAD:
                bad.append(f"{verdict}: {shown}: {message}")
                print(f"{bad[-1]}\n    {case!r}", flush=True)
            if options.budget is not None and time.monotonic() - began > options.budget:
                break
    except KeyboardInterrupt:
        print("interrupted: what follows is of the cases that ended", file=sys.stderr)
    count = verdicts.total()
    which = f"--only {' '.join(map(str, options.only))}" if options.only else f"--cases {count} --first {options.first}"
    asked = f"--oracle {options.oracle} {which} --seed {options.seed}"
    lines = report(asked, options.oracle, verdicts, reasons, bad, time.monotonic() - began)
    print("\n".join(lines))
    if options.only is None:
        output = options.output or RESULTS / NAMES[options.oracle]
        output.write_text("\n".join([*lines, ""]), encoding="utf-8")
    return int(bool(bad))


def results(
    numbers: Sequence[int], options: argparse.Namespace
) -> Iterator[tuple[str, grid.Case | hf_grid.HfCase | None, grid.Verdict, str]]:
    """(its name, the case, verdict, message), in the order of numbers. A draw and an oracle have the limit too."""
    with tempfile.TemporaryDirectory() as weights, grid.Workers(limit_s=options.limit) as workers:
        for number in numbers:
            case: grid.Case | hf_grid.HfCase | None = None
            verdict: grid.Verdict
            try:
                with within(options.limit):
                    if options.oracle == "plain":
                        case = grid.draw(number, options.seed)
                    else:
                        case = hf_grid.draw(number, Path(weights), options.seed, balanced=options.oracle == "balanced")
                answers = workers.run(case)
                with within(options.limit):
                    verdict, message = grid.judge(case, answers)
            except TimeoutError as error:
                verdict, message = "hung", f"outside the ranks: {error}"
            except Exception:  # of the draw or the oracle: it is this case's, and the next ones are tried
                verdict, message = "crashed", f"outside the ranks: {format_exc(limit=-3)}"
            yield str(case or f"case {number}"), case, verdict, message


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """TimeoutError in this thread when they have passed."""

    def late(signum: int, frame: FrameType | None) -> NoReturn:
        raise TimeoutError(f"not done in {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def report(
    asked: str, oracle: str, verdicts: Counter[str], reasons: Counter[str], bad: list[str], seconds: float
) -> list[str]:
    """The page."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    date = datetime.now(UTC).date().isoformat()
    return [
        "# Plans drawn at random, run beside the plain model",
        "",
        f"{date}, commit {commit or 'unknown'}, Python {python_version()}, torch {torch.__version__} (CPU, gloo), "
        f"{seconds:.0f} s for `python benchmarks/runtime_grid.py {asked}`.",
        f"{DRAWN[oracle]}; loss, gradient norm, held-out loss and parameters of three steps in float64 to 1e-9.",
        "",
        "| tried | equal | refused before the first step | wrong | hung | crashed |",
        "| --- | --- | --- | --- | --- | --- |",
        f"| {verdicts.total()} | {verdicts['equal']} | {verdicts['refused']} | {verdicts['wrong']} | "
        f"{verdicts['hung']} | {verdicts['crashed']} |",
        "",
        "| refused | why |",
        "| --- | --- |",
        *(f"| {count} | {why} |" for why, count in reasons.most_common()),
        *(["", *(f"- {line}" for line in bad)] if bad else []),
    ]


if __name__ == "__main__":
    sys.exit(main())
