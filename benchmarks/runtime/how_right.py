"""How right predictions are on this machine: `python benchmarks/runtime/how_right.py`, after `gnomon calibrate`.

Each pair of a small model (nine architectures) and a plan (one process and two) is run by `gnomon run`, as a user does,
and its predicted step time is put beside the median that was measured. Writes results/how_right.md: median and worst
error, and rank correlation. `--methods` takes plans with methods that save memory in place of the usual ones, and
writes results/how_right_methods.md; their memory: `benchmarks/memory/peaks.py`. `--only` picks pairs by a word,
`--steps` sets how many steps each runs. `--rounds N` runs everything N times, each round after a calibration of its
own, and takes the medians: for a machine whose load changes. `--processes 1` leaves out plans of two. `--real-time` has
calibrations and runs before all other work of the machine (root only; nothing else gets a core meanwhile). Seconds in
which a rank was ready without a core that others had are not counted; those in which the other one waited for it are.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from gnomon.plans import (
    Layout,
    Mesh,
    Optimizer,
    Overlap,
    Plan,
    PlanFile,
    Precision,
    Saved,
    SavedRule,
    Schedule,
    Workload,
    save_plan_file,
)
from gnomon.plans.parts import Offload, Pass

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "how_right.md"
METHODS = RESULTS.with_name("how_right_methods.md")
METHOD_MODELS = ("llama", "gpt2")
"""Models that plans with methods are run with."""
REAL_TIME = "HOW_RIGHT_REAL_TIME"
"""Set where runs go before all other work of the machine."""
PROCESSES = 2
"""At once, at most."""
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


def methods() -> Iterator[tuple[str, Plan]]:
    """Plans with what this tool can do about memory, on one process."""
    one = Plan(schedule=Schedule(name="one_f_one_b", micro_batch_size=2), precision=FP32)
    host = Optimizer(offload=Offload(), clip=False)
    yield "selective recompute", replace(one, saved=Saved(preset="selective"))
    yield "every second layer recomputed", replace(one, saved=Saved(preset="full", every=2))
    yield "feed-forward recomputed", replace(one, saved=rule("mlp.*", "recompute"))
    yield "feed-forward's tensors offloaded", replace(one, saved=rule("mlp.*", "offload"))
    yield (
        "layers recomputed, inputs offloaded",
        replace(one, saved=Saved(preset="full", rules=(SavedRule(tensors=("input",), action="offload"),))),
    )
    yield "update on the host", replace(one, optimizer=host)
    yield (
        "update on the host, gradients added on the device",
        replace(one, optimizer=replace(host, offload=Offload(accumulate="device"))),
    )
    yield "half of the update on the host", replace(one, optimizer=replace(host, offload=Offload(fraction=0.5)))
    yield "update on the host, a step late", replace(one, optimizer=replace(host, delay=1, delay_after=0))
    away = Optimizer(zero=3, offload_parameters=True)
    yield "parameters on the host", replace(one, optimizer=away)
    yield "parameters and update on the host", replace(one, optimizer=replace(away, clip=False, offload=Offload()))
    yield "parameters on a disk", replace(one, optimizer=replace(away, parameter_tier="disk"))


def parallel_methods() -> Iterator[tuple[str, Plan]]:
    """The same on two processes, and what divides memory among them."""
    usual, single = Schedule(name="one_f_one_b", micro_batch_size=2), Schedule(name="one_f_one_b", micro_batch_size=1)
    pp, dp, sp = (
        Plan(mesh=Mesh(pp=2), schedule=single, precision=FP32),
        Mesh(dp_shard=2),
        Layout(sequence_parallel=True),
    )
    host = Optimizer(offload=Offload(), clip=False)
    for stage in (1, 2):
        yield f"zero {stage}", Plan(mesh=dp, schedule=usual, precision=FP32, optimizer=Optimizer(zero=stage))
    yield "zero 2, update on the host", Plan(mesh=dp, schedule=usual, precision=FP32, optimizer=replace(host, zero=2))
    yield "zero 3, update on the host", Plan(mesh=dp, schedule=usual, precision=FP32, optimizer=replace(host, zero=3))
    away = Optimizer(zero=3, offload_parameters=True)
    for tier in ("host", "disk"):
        kept = replace(away, parameter_tier=tier)
        yield f"zero 3, parameters on the {tier}", Plan(mesh=dp, schedule=usual, precision=FP32, optimizer=kept)
    yield (
        "zero 3, full recompute",
        Plan(mesh=dp, schedule=usual, precision=FP32, optimizer=Optimizer(zero=3), saved=Saved(preset="full")),
    )
    yield (
        "dp 2, buckets of 4 MiB",
        Plan(mesh=Mesh(dp_replicate=2), schedule=usual, precision=FP32, overlap=Overlap(bucket_bytes=4 << 20)),
    )
    yield "tp 2", Plan(mesh=Mesh(tp=2), schedule=usual, precision=FP32)
    yield "tp 2, sequence parallel", Plan(mesh=Mesh(tp=2), schedule=usual, precision=FP32, layout=sp)
    yield (
        "tp 2, sequence parallel, selective recompute",
        Plan(mesh=Mesh(tp=2), schedule=usual, precision=FP32, layout=sp, saved=Saved(preset="selective")),
    )
    yield "pp 2, full recompute", replace(pp, saved=Saved(preset="full"))
    yield "pp 2, mario", replace(pp, schedule=replace(single, passes=(Pass(name="mario"),)))
    yield "pp 2, first stage recomputed", replace(pp, saved=Saved(rules=(SavedRule(stages=(0,), preset="full"),)))
    for name in ("gpipe", "zero_bubble_h1"):
        yield f"pp 2, {name}", replace(pp, schedule=replace(single, name=name))
    for name in ("zero_bubble_v", "v_half", "v_min"):
        order = replace(single, name=name, virtual_stages=2, placement="v")
        yield f"pp 2, {name}", replace(pp, schedule=order)
    yield "pp 2, interleaved", replace(pp, schedule=replace(single, name="interleaved_one_f_one_b", virtual_stages=2))
    yield (
        "pp 2 x dp 2, zero 1",
        Plan(mesh=Mesh(pp=2, dp_shard=2), schedule=single, precision=FP32, optimizer=Optimizer(zero=1)),
    )


def rule(tensors: str, action: str) -> Saved:
    return Saved(rules=(SavedRule(tensors=(tensors,), action=action),))


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
    def own_s(self) -> float:
        """Measured, without that."""
        return self.measured_s * (1 - self.waited)

    @property
    def off(self) -> float:
        """Error of the prediction."""
        return self.predicted_s / self.own_s - 1


def run(model: str, name: str, plan: Plan, folder: Path, steps: int) -> Pair:
    """One pair, by the command line."""
    config = folder / f"{model}.json"
    config.write_text(json.dumps(CONFIGS[model]))
    path = folder / "plan.toml"
    on = f"local:{plan.world_size}"
    save_plan_file(PlanFile(model=str(config), on=on, stack="gnomon", workload=WORK, plan=plan), path)
    told = json.loads(command("run", str(path), "--steps", str(steps), "--json"))
    return Pair(
        model=model,
        plan=name,
        predicted_s=told["predicted"]["step_s"],
        measured_s=told["measured"]["step_s"],
        waited=told["measured"]["waited_for_a_core"] or 0.0,
    )


def command(*words: str) -> str:
    """What it prints. RuntimeError where it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "gnomon", *words],
        capture_output=True,
        text=True,
        timeout=1800,
        env=os.environ,
        preexec_fn=real_time if REAL_TIME in os.environ else None,
    )
    if done.returncode:
        raise RuntimeError(f"gnomon {' '.join(words)}: {done.stderr.strip()[-400:]}")
    return done.stdout


def real_time() -> None:
    """Has this process, and what it starts, run before all others. PermissionError where the user may not."""
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


def medians(pairs: list[Pair]) -> list[Pair]:
    """One pair from those of all rounds."""
    by_name: dict[tuple[str, str], list[Pair]] = {}
    for pair in pairs:
        by_name.setdefault((pair.model, pair.plan), []).append(pair)
    return [
        Pair(
            model=model,
            plan=plan,
            predicted_s=median(p.predicted_s for p in same),
            measured_s=median(p.measured_s for p in same),
            waited=median(p.waited for p in same),
        )
        for (model, plan), same in by_name.items()
    ]


def rank_correlation(pairs: list[Pair]) -> float:
    """Spearman's: the correlation of ranks, of which no two are alike."""
    ranks = [
        np.argsort(np.argsort(times)) for times in zip(*((p.predicted_s, p.measured_s) for p in pairs), strict=True)
    ]
    return float(np.corrcoef(*ranks)[0, 1])


def jobs(options: argparse.Namespace) -> Iterator[tuple[str, str, Plan]]:
    """(model, name of the plan, plan) of one round; plans with methods on two models, as more would take an hour."""
    chosen = [*methods(), *parallel_methods()] if options.methods else list(plans())
    for model in METHOD_MODELS if options.methods else CONFIGS:
        for name, plan in chosen:
            if plan.world_size <= options.processes and options.only in f"{model} {name}":
                yield model, name, plan


def main() -> int:
    """Runs, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="a word of `model plan`, as in 'gpt2' or 'zero 3'")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--methods", action="store_true", help="plans with methods that save memory")
    parser.add_argument("--rounds", type=int, default=0, help="rounds, each after a calibration; default one, without")
    parser.add_argument("--processes", type=int, default=PROCESSES, help="plans of as many at most; 1: a busy machine")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--real-time", action="store_true", help="before all other work of the machine")
    options = parser.parse_args()
    os.environ |= {REAL_TIME: "1"} if options.real_time else {}
    output = options.output or (METHODS if options.methods else RESULTS)
    pairs, failed = list[Pair](), dict[str, None]()
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(max(1, options.rounds)):
            if options.rounds:
                os.environ["GNOMON_HOME"] = folder
                command("calibrate", "--processes", str(PROCESSES))
            for model, name, plan in jobs(options):
                try:
                    pairs.append(run(model, name, plan, Path(folder), options.steps))
                except RuntimeError as error:
                    failed[f"{model}, {name}: {error}"] = None
                    print(error, file=sys.stderr, flush=True)
                    continue
                p = pairs[-1]
                print(f"{model}, {name}: {p.predicted_s:.3f} s predicted, {p.own_s:.3f} measured", flush=True)
                output.write_text("\n".join(lines(medians(pairs), list(failed), options)) + "\n")
    return 0 if pairs else 1


def lines(pairs: list[Pair], failed: list[str], options: argparse.Namespace) -> Iterator[str]:
    """The page."""
    errors, raw = sorted(abs(p.off) for p in pairs), sorted(abs(p.predicted_s / p.measured_s - 1) for p in pairs)
    words = ["--methods"] * options.methods + [f"--rounds {options.rounds}"] * bool(options.rounds)
    words += ["--real-time"] * options.real_time
    words += [f"--processes {options.processes}"] * (options.processes < PROCESSES) + [f"--steps {options.steps}"]
    yield f"# Predicted and measured on this machine{': methods that save memory' if options.methods else ''}"
    yield ""
    yield (
        f"`{' '.join(['python benchmarks/runtime/how_right.py', *words])}`, {datetime.now(UTC):%Y-%m-%d}, "
        f"{os.cpu_count()} cores, {options.steps} steps each, fp32, batches of {WORK.global_batch_size} sequences of "
        f"{WORK.seq_len} tokens. Measured without the share of the step in which a rank was ready without a core "
        "(last column)."
    )
    yield ""
    yield (
        f"{len(pairs)} pairs: error of the step time {errors[len(errors) // 2]:.1%} median, {errors[-1]:.1%} at worst; "
        f"with that share counted, {raw[len(raw) // 2]:.1%} and {raw[-1]:.1%}. Peak memory: [peaks.md](peaks.md)."
    )
    if len(pairs) > 2:
        yield f"Rank correlation of step times {rank_correlation(pairs):.3f}."
    yield ""
    yield "| model | plan | predicted s | measured s | off by | no core |"
    yield "|---|---|---|---|---|---|"
    for p in sorted(pairs, key=lambda p: (p.model, p.plan)):
        yield f"| {p.model} | {p.plan} | {p.predicted_s:.3f} | {p.own_s:.3f} | {p.off:+.0%} | {p.waited:.0%} |"
    for why in failed:
        yield f"\nNot run: {why}"


if __name__ == "__main__":
    sys.exit(main())
