"""Every model type that Gnomon reads, beside transformers: `python benchmarks/runtime/models.py [TYPE …] [--no-file]`.

Each is built tiny by transformers with random weights in float64, saved, read from its folder as `gnomon run --weights`
reads one, and compared: logits, loss and every gradient. Prints one row a type (and variant), the errors or the reason
why the runtime does not run it, and writes the table to benchmarks/results/runtime_models.md. Exits with 1 where a type
that runs differs by more than 1e-9. Leaves out plans (tests/runtime/test_parity.py) and speed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

import torch  # noqa: E402
from runtime.hf_models import CONFIGS, Compared, compare  # noqa: E402

from gnomon.formats.huggingface.known import READERS  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "runtime_models.md"
LIMIT = 1e-9


def main() -> int:
    """The table, and the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", help="model types (default: all)")
    parser.add_argument("--no-file", action="store_true", help="print only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Compared] = []
    began = time.perf_counter()
    for kind in CONFIGS:
        if options.types and kind.partition(" ")[0] not in options.types:
            continue
        with tempfile.TemporaryDirectory() as folder:
            rows.append(compare(kind, Path(folder)))
        print(line(rows[-1]), flush=True)
    untried = sorted(set(READERS) - {kind.partition(" ")[0] for kind in CONFIGS})
    wrong = [row.kind for row in rows if not row.refusal and not max(row.logits, row.loss, row.gradient) < LIMIT]
    runs = {row.kind.partition(" ")[0] for row in rows if not row.refusal}
    told = f"{len(runs)} model types run, {len({r.kind.partition(' ')[0] for r in rows} - runs)} are refused by name"
    told += f"; not in transformers: {', '.join(untried)}" if untried and not options.types else ""
    print(f"{told}; {time.perf_counter() - began:.0f} s", f"WRONG: {', '.join(wrong)}" if wrong else "", sep="\n")
    if not options.no_file and not options.types:
        write(rows, told)
    return 1 if wrong else 0


def line(row: Compared) -> str:
    """One row of the table."""
    if row.refusal:
        return f"| {row.kind} | refused: {row.refusal} | | | |"
    return f"| {row.kind} | runs | {row.logits:.1e} | {row.loss:.1e} | {row.gradient:.1e} |"


def write(rows: list[Compared], told: str) -> None:
    """The dated result."""
    import transformers

    text = [
        "# Model types beside transformers",
        "",
        f"{datetime.now(UTC):%Y-%m-%d}, `python benchmarks/runtime/models.py`, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, CPU, one thread, float64. {told}.",
        "",
        "Errors are the largest difference, relative to the largest element (of the logits; of the loss; of",
        "each parameter's gradient, the worst of them). transformers computes norms and softmax in float64 too.",
        "",
        "| model type | | logits | loss | worst gradient |",
        "|---|---|---|---|---|",
        *map(line, rows),
    ]
    RESULTS.write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    sys.exit(main())
