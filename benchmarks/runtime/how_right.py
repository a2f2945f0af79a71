"""How right predictions are on this machine: `python benchmarks/runtime/how_right.py`, after `gnomon calibrate`.

Each pair of a small model (nine architectures) and a plan (one process and two) is run by `gnomon run`, as a user does,
and its predicted step time is put beside the median that was measured. Writes results/how_right.md: median and worst
error, and rank correlation. Memory: `benchmarks/memory/peaks.py`. `--only` picks pairs by a word, `--steps`
sets how many steps each runs. Wants idle cores: where others had them, the run says so and the row is marked.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from gnomon.plans import Mesh, Optimizer, Plan, PlanFile, Precision, Saved, Schedule, Workload, save_plan_file

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "how_right.md"
FP32 = Precision(param="fp32", compute="fp32", grad="fp32", reduce="fp32", master="none", states="fp32")
WORK = Workload(global_batch_size=8, seq_len=128)
SIZES = {
    "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 4096, "max_position_embeddings": 512,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SIZES},
    "mistral": {"model_type": "mistral", "sliding_window": None, **SIZES},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True, **SIZES},
    "qwen3": {"model_type": "qwen3", "head_dim": 64, **SIZES},
    "gemma2": {"model_type": "gemma2", "head_dim": 64, "query_pre_attn_scalar": 64, **SIZES},
    "phi3": {"model_type": "phi3", "pad_token_id": 0, **SIZES},
    "gpt2": {"model_type": "gpt2", "n_embd": 256, "n_layer": 4, "n_head": 4, "vocab_size": 4096, "n_positions": 512},
    "gpt_neox": {"model_type": "gpt_neox", **{k: v for k, v in SIZES.items() if k != "num_key_value_heads"}},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, **SIZES},
}


def plans() -> Iterator[tuple[str, Plan]]:
    """By what they are."""
    usual = Schedule(name="one_f_one_b", micro_batch_size=2)
    yield "one process", Plan(schedule=usual, precision=FP32)
    yield "one process, full recompute", Plan(schedule=usual, precision=FP32, saved=Saved(preset="full"))
    yield "dp 2", Plan(mesh=Mesh(dp_replicate=2), schedule=usual, precision=FP32)
    yield "pp 2", Plan(mesh=Mesh(pp=2), schedule=usual, precision=FP32)
    yield "zero 3", Plan(mesh=Mesh(dp_shard=2), schedule=usual, precision=FP32, optimizer=Optimizer(zero=3))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A model under a plan, predicted and measured."""

    model: str
    plan: str
    predicted_s: float
    measured_s: float
    waited: float
    """Share of the steps in which a rank had no core."""

    @property
    def off(self) -> float:
        """Error of the prediction."""
        return self.predicted_s / self.measured_s - 1


def run(model: str, name: str, plan: Plan, folder: Path, steps: int) -> Pair:
    """One pair, by the command line."""
    config = folder / f"{model}.json"
    config.write_text(json.dumps(CONFIGS[model]))
    path = folder / "plan.toml"
    on = f"local:{plan.world_size}"
    save_plan_file(PlanFile(model=str(config), on=on, stack="gnomon", workload=WORK, plan=plan), path)
    words = [sys.executable, "-m", "gnomon", "run", path, "--steps", str(steps), "--json"]
    done = subprocess.run([str(w) for w in words], capture_output=True, text=True, timeout=1800, env=os.environ)
    if done.returncode:
        raise RuntimeError(f"{model}, {name}: {done.stderr.strip()[-400:]}")
    told = json.loads(done.stdout)
    return Pair(
        model=model,
        plan=name,
        predicted_s=told["predicted"]["step_s"],
        measured_s=told["measured"]["step_s"],
        waited=told["measured"]["waited_for_a_core"] or 0.0,
    )


def rank_correlation(pairs: list[Pair]) -> float:
    """Spearman's: the correlation of ranks, of which no two are alike."""
    ranks = [
        np.argsort(np.argsort(times)) for times in zip(*((p.predicted_s, p.measured_s) for p in pairs), strict=True)
    ]
    return float(np.corrcoef(*ranks)[0, 1])


def main() -> int:
    """Runs, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="a word of `model plan`, as in 'gpt2' or 'zero 3'")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    pairs, failed = list[Pair](), list[str]()
    for model in CONFIGS:
        for name, plan in plans():
            if options.only not in f"{model} {name}":
                continue
            with tempfile.TemporaryDirectory() as folder:
                try:
                    pairs.append(run(model, name, plan, Path(folder), options.steps))
                except RuntimeError as error:
                    failed.append(str(error))
                    print(error, file=sys.stderr, flush=True)
                    continue
            p = pairs[-1]
            print(f"{model}, {name}: {p.predicted_s:.3f} s predicted, {p.measured_s:.3f} measured", flush=True)
            options.output.write_text("\n".join(lines(pairs, failed, options.steps)) + "\n")
    if not pairs:
        return 1
    return 0


def lines(pairs: list[Pair], failed: list[str], steps: int) -> Iterator[str]:
    """The page."""
    errors = sorted(abs(p.off) for p in pairs)
    yield "# Predicted and measured on this machine"
    yield ""
    yield (
        f"`python benchmarks/runtime/how_right.py`, {datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} cores, {steps} "
        f"steps each, fp32, batches of {WORK.global_batch_size} sequences of {WORK.seq_len} tokens."
    )
    yield ""
    yield (
        f"{len(pairs)} pairs: error of the step time {errors[len(errors) // 2]:.1%} median, {errors[-1]:.1%} at worst."
    )
    if len(pairs) > 2:
        yield f"Rank correlation of step times {rank_correlation(pairs):.3f}."
    yield ""
    yield "| model | plan | predicted s | measured s | off by | no core |"
    yield "|---|---|---|---|---|---|"
    for p in sorted(pairs, key=lambda p: (p.model, p.plan)):
        yield f"| {p.model} | {p.plan} | {p.predicted_s:.3f} | {p.measured_s:.3f} | {p.off:+.0%} | {p.waited:.0%} |"
    for why in failed:
        yield f"\nNot run: {why}"


if __name__ == "__main__":
    sys.exit(main())
