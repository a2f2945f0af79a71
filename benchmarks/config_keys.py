"""Every key of every config.json that runs, at unusual values: `python benchmarks/config_keys.py [--kinds llama ...]`.

Each case is a tiny model of transformers, with random weights in float64 and in train mode, whose config differs in one
key from the usual: its values, the key left out, older spellings, keys that other classes know. Our model of the same
file must give its loss to 1e-9 and gradients to 1e-8, or be refused by name; anything else is a fault. Prints how many
did, and the faults; writes that to results/config_keys.md. Exits with 1 where there is a fault. One process a share
(`--share 1/2`), no GPU. `--train N` trains every N-th of them for three steps beside transformers.
Left out: several processes, other dtypes, two keys at once.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import sys
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from runtime import config_keys  # noqa: E402  (the tests run a sample of the same cases)
from runtime.trained_alike import judge_trained  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "config_keys.md"
ORDER = ("equal", "refused", "silent", "crash", "theirs")
MEANS = {
    "equal": "loss and gradients of transformers",
    "refused": "an error that names the key",
    "silent": "another model, without a word",
    "crash": "a traceback",
    "theirs": "transformers refuses the file, or fails at it: not counted",
}


def table(rows: list[dict[str, str]]) -> str:
    """The counts, by verdict and in all, and the kinds with most refusals."""
    counts = Counter(row["what"] for row in rows)
    lines = ["| verdict | cases | |", "|---|---|---|"]
    lines += [f"| {what} | {counts[what]:,} | {MEANS[what]} |" for what in ORDER]
    kinds = len({row["kind"] for row in rows})
    return "\n".join([f"{counts.total():,} files of {kinds} model types.", "", *lines])


def main() -> int:
    """Judge, tell, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="+", default=[], help="model types; default all that run")
    parser.add_argument("--share", default="1/1", metavar="I/N", help="every N-th case from the I-th on")
    parser.add_argument(
        "--train", type=int, metavar="N", help="every N-th case and every type as it is: three steps of AdamW instead"
    )
    parser.add_argument("--record", type=Path, help="write a line of JSON a case, and no table")
    parser.add_argument("--join", type=Path, nargs="+", default=[], help="make the table of these records")
    options = parser.parse_args()
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    began, rows = time.process_time(), []
    share, shares = (int(part) for part in options.share.split("/"))
    if options.join:
        rows = [json.loads(line) for path in options.join for line in path.read_text().splitlines()]
    else:
        for number, case in enumerate(config_keys.cases(tuple(options.kinds) or tuple(config_keys.RUNNABLE))):
            if options.train and case.changes and number % options.train:
                continue
            if number % shares == share - 1:
                verdict = judge_trained(case) if options.train else config_keys.judge(case)
                rows.append({"kind": case.kind, "case": str(case), "what": verdict.what, "why": verdict.message})
    faults = [row for row in rows if row["what"] in ("silent", "crash")]
    for row in faults:
        print(f"{row['what']}: {row['case']}: {row['why']}")
    print(table(rows))
    if options.record is not None:
        options.record.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif not (options.kinds or options.train) and shares == 1:
        date = datetime.now(UTC).date().isoformat()
        RESULTS.write_text(
            "# Keys of config.json at unusual values, beside transformers\n\n"
            f"`python benchmarks/config_keys.py`, {date}: torch {torch.__version__}, transformers "
            f"{transformers.__version__}, Python {platform.python_version()}, float64, train mode, one thread, "
            f"{platform.machine()}.\n\n{table(rows)}\n"
        )
    print(f"{time.process_time() - began:.0f} s of CPU", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
