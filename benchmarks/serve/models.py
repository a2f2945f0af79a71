"""Every decoder that Gnomon runs, served: `python benchmarks/serve/models.py [TYPE …] [--no-file]`.

Each is built tiny by transformers with random weights, saved, and served in float32 in prompts of pieces of 16 tokens,
beside another request. Prints how many of 200 greedy tokens are those of `generate`, and writes the table to
benchmarks/results/serve_models.md. Exits with 1 where a type that is served differs. Leaves out speed, and encoders
with a decoder (`seq2seq`).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

import torch  # noqa: E402
from runtime.hf_models import CONFIGS  # noqa: E402
from serve.against_generate import compare  # noqa: E402
from transformers import CONFIG_MAPPING  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "serve_models.md"
COUNT = 200


def main() -> int:
    """The table, and the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", help="model types (default: all)")
    parser.add_argument("--no-file", action="store_true", help="print only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines, wrong, equal = [f"| model type | of {COUNT} tokens the same |", "|---|---|"], 0, 0
    for kind in CONFIGS:
        name = kind.partition(" ")[0]
        if name in CONFIG_MAPPING and getattr(CONFIG_MAPPING[name](), "is_encoder_decoder", False):
            continue  # benchmarks/serve/seq2seq.py has these
        if not CONFIGS[kind] or (options.types and name not in options.types):
            continue
        with tempfile.TemporaryDirectory() as folder:
            found = compare(kind, Path(folder), count=COUNT)
        wrong += not found.refusal and found.same < COUNT
        equal += not found.refusal and found.same == COUNT
        lines.append(f"| {kind} | {found.refusal.splitlines()[0][:100] if found.refusal else found.same} |")
        print(lines[-1], flush=True)
    if not options.no_file:
        head = [
            "# Greedy tokens of served models against transformers' generate",
            "",
            f"`python benchmarks/serve/models.py{''.join(f' {one}' for one in options.types)}`, "
            f"{datetime.now(UTC):%Y-%m-%d}, torch {torch.__version__}, float32, random "
            f"weights. {equal} model types and variants answer the same {COUNT} tokens; {wrong} do not.",
            "",
        ]
        RESULTS.write_text("\n".join([*head, *lines]) + "\n", encoding="utf-8")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
