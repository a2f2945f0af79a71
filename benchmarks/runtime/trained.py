"""A Llama, a Mixtral and a T5 trained on real text under four plans each: `python benchmarks/runtime/trained.py`.

The text is what ships with Python: modules of its standard library and its language reference (`scripts/demo_model.py`,
whose tokenizer is used). All plans of a model begin from the same weights and read the same batches, in fp32, so
their curves lie on each other but for the order in which sums are taken. Each run is a process, or two, of one thread.
After every step the loss is appended to losses.jsonl in --scratch, and every 100 steps there is a checkpoint, from
which a run that was cut off goes on. When all are done, writes results/runtime_trained.md and .svg. Left out: speed
(`against_torch.py`), other precisions.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from platform import python_version

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import demo_model  # noqa: E402

from gnomon.graph import Graph  # noqa: E402
from gnomon.models.llama import LlamaConfig, llama  # noqa: E402
from gnomon.models.mixtral import MixtralConfig, mixtral  # noqa: E402
from gnomon.models.t5 import T5Config, t5  # noqa: E402
from gnomon.plans import Layout, Mesh, Optimizer, Plan, Precision, Saved, Schedule, Workload  # noqa: E402
from gnomon.runtime import AdamWSettings, Executor  # noqa: E402
from gnomon.runtime.checkpoint.load import load  # noqa: E402
from gnomon.runtime.checkpoint.save import Saver  # noqa: E402
from gnomon.runtime.data.corpus import Corpus  # noqa: E402
from gnomon.runtime.data.store import Source  # noqa: E402
from gnomon.runtime.module.stage import Batch  # noqa: E402
from gnomon.runtime.optim.learning_rate import LearningRate  # noqa: E402
from gnomon.runtime.processes.launch import launch  # noqa: E402
from gnomon.runtime.step.evaluate import evaluate  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
FP32 = Precision(param="fp32", compute="fp32", grad="fp32", reduce="fp32", master="none", states="fp32")
STEPS, SEQUENCES, SEQ_LEN, SEED = 300, 4, 16, 1
HELD_OUT_EVERY, HELD_OUT_BATCHES, SAVE_EVERY = 100, 8, 100
VOCABULARY = demo_model.VOCABULARY
MODELS = {
    "llama": llama(
        LlamaConfig(
            name="llama-33m", num_layers=10, hidden_size=512, num_heads=8, num_kv_heads=8, head_dim=64, ffn_size=1408,
            vocab_size=VOCABULARY,
        )
    ),
    "mixtral": mixtral(
        MixtralConfig(
            name="mixtral-10m", num_layers=4, hidden_size=256, num_heads=8, num_kv_heads=4, head_dim=32, num_experts=4,
            experts_per_token=2, expert_ffn_size=704, vocab_size=VOCABULARY,
        )
    ),
    "t5": t5(
        T5Config(
            name="t5-8m", num_layers=4, num_decoder_layers=4, hidden_size=256, num_heads=8, head_dim=32, ffn_size=704,
            vocab_size=VOCABULARY, gated=True, tied=False, dropout=0.0,
        )
    ),
}  # fmt: skip
RATES = {"llama": 6e-4, "mixtral": 1e-3, "t5": 1e-3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A model under a plan."""

    model: str
    label: str
    """Of the plan."""
    plan: Plan

    @property
    def name(self) -> str:
        """Of its losses and checkpoints."""
        return f"{self.model}: {self.label}"

    @property
    def graph(self) -> Graph:
        """The model."""
        return MODELS[self.model]

    @property
    def workload(self) -> Workload:
        """What a step reads."""
        sizes = (("enc_seq", SEQ_LEN),) if self.model == "t5" else ()
        return Workload(global_batch_size=SEQUENCES, seq_len=SEQ_LEN, sizes=sizes)

    @property
    def settings(self) -> AdamWSettings:
        """Of the update."""
        rate = LearningRate(shape="cosine", warmup_steps=20, total_steps=STEPS, final=0.1)
        return AdamWSettings(lr=RATES[self.model], rate=rate)


def plan(schedule: str = "one_f_one_b", microbatches: int = 1, **fields: object) -> Plan:
    """In fp32."""
    return Plan(schedule=Schedule(name=schedule, num_microbatches=microbatches), precision=FP32, **fields)  # type: ignore[arg-type]


def runs() -> Iterator[Run]:
    """Four of each model."""
    alone = plan()
    tensor = plan(mesh=Mesh(tp=2), layout=Layout(sequence_parallel=True))
    data = {zero: plan(mesh=Mesh(dp_shard=2), optimizer=Optimizer(zero=zero)) for zero in (1, 2, 3)}  # type: ignore[arg-type]
    pipelined = {
        name: plan(name, 4, mesh=Mesh(pp=2), saved=Saved(preset="full")) for name in ("one_f_one_b", "zero_bubble_h1")
    }
    recomputed = replace(data[1], schedule=Schedule(name="one_f_one_b", num_microbatches=2), saved=Saved(preset="full"))
    experts = plan(mesh=Mesh(dp_shard=2, ep=2), optimizer=Optimizer(zero=1))
    chosen = {
        "llama": {
            "1 process": alone,
            "dp 2, ZeRO 3": data[3],
            "pp 2, zero bubble, 4 microbatches, full recompute": pipelined["zero_bubble_h1"],
            "tp 2 with sequence parallelism": tensor,
        },
        "mixtral": {
            "1 process": alone,
            "dp 2, ep 2, ZeRO 1": experts,
            "pp 2, 1F1B, 4 microbatches, full recompute": pipelined["one_f_one_b"],
            "tp 2 with sequence parallelism": tensor,
        },
        "t5": {
            "1 process": alone,
            "dp 2, ZeRO 2": data[2],
            "dp 2, ZeRO 1, 2 microbatches, full recompute": recomputed,
            "tp 2 with sequence parallelism": tensor,
        },
    }
    for model in ("t5", "mixtral", "llama"):  # the long ones last
        for label, decided in chosen[model].items():
            yield Run(model=model, label=label, plan=decided)


def corpus_of(scratch: Path) -> Corpus:
    """The text, encoded; made once."""
    folder = scratch / "text"
    if not (folder / "model" / "config.json").is_file():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        demo_model.write_texts(folder)
        demo_model.write_model(folder)
        (folder / "code" / "reference.txt").write_bytes((folder / "prose.jsonl").read_bytes())
    return Corpus.open(Source(path=folder / "code", tokenizer=folder / "model", cache=scratch / "tokens"))


def batch_of(run: Run, corpus: Corpus, step: int) -> Batch:
    """Of a step, or, below 1, a held-out one. T5 reads the first half of a text and writes the second."""
    length = 2 * SEQ_LEN if run.model == "t5" else SEQ_LEN
    size = {"sequences": SEQUENCES, "seq_len": length}
    given = corpus.batch(step, seed=SEED, **size) if step > 0 else corpus.validation_batch(-step, **size)
    if run.model != "t5":
        return given
    ids, labels = given["input_ids"], given["labels"]
    return {
        "input_ids": ids[:, :SEQ_LEN],
        "decoder_input_ids": ids[:, SEQ_LEN:],
        "labels": labels[:, SEQ_LEN:],
    }


def train(run: Run, scratch: Path, steps: int) -> None:
    """In every rank: from the last checkpoint to the end."""
    corpus = corpus_of(scratch)
    folder = scratch / "checkpoints" / run.name.replace(":", "").replace(",", "").replace(" ", "-")
    executor = Executor(run.graph, run.plan, run.workload, seed=SEED, settings=run.settings)
    done = load(folder, executor)
    saver = Saver(folder, executor, keep=1)
    for step in range(done + 1, steps + 1):
        began = time.process_time()
        result = executor.step(batch_of(run, corpus, step))
        line = {"run": run.name, "step": step, "loss": executor.total_loss(result)}
        line |= {"grad_norm": float(result.grad_norm), "cpu_s": time.process_time() - began}
        if step % HELD_OUT_EVERY == 0 or step == steps:
            held = [evaluate(executor, batch_of(run, corpus, -index)) for index in range(HELD_OUT_BATCHES)]
            line["held_out"] = sum(held) / len(held)
        if dist.get_rank() == 0:
            with (scratch / "losses.jsonl").open("a") as out:
                out.write(json.dumps(line) + "\n")
        if step % SAVE_EVERY == 0:
            saver.start(step, copy=False)
            saver.finish()
    saver.close()
    executor.leave()


def read(scratch: Path) -> dict[str, dict[int, dict[str, float]]]:
    """Run -> step -> what was noted of it, the last time it was made."""
    noted: dict[str, dict[int, dict[str, float]]] = {}
    path = scratch / "losses.jsonl"
    for line in path.read_text().splitlines() if path.is_file() else ():
        record = json.loads(line)
        noted.setdefault(record["run"], {})[record["step"]] = record
    return noted


def main() -> int:
    """Trains what is not trained yet, and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scratch", type=Path, default=ROOT / "demo" / "trained", help="losses, checkpoints and text")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--only", default="", help="runs whose name has this")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    options.scratch.mkdir(parents=True, exist_ok=True)
    corpus_of(options.scratch)
    for run in runs():
        if options.only in run.name and options.steps not in read(options.scratch).get(run.name, {}):
            began = time.monotonic()
            launch(train, run.plan.world_size, run, options.scratch, options.steps)
            print(f"{run.name}: {time.monotonic() - began:.0f} s", flush=True)
    noted = read(options.scratch)
    if all(options.steps in noted.get(run.name, {}) for run in runs()):
        write(options.output, noted, options.steps)
    return 0


def write(folder: Path, noted: dict[str, dict[int, dict[str, float]]], steps: int) -> None:
    """The table and the plot."""
    tokens = SEQUENCES * SEQ_LEN
    lines = [
        "# Three models trained under four plans each",
        "",
        f"`python benchmarks/runtime/trained.py`, {datetime.now(UTC):%Y-%m-%d}, Python {python_version()}, torch "
        f"{torch.__version__}, CPU and gloo on 2 shared cores, fp32, AdamW with clipping and a cosine.",
        f"{steps} steps of {SEQUENCES} sequences of {SEQ_LEN} tokens ({tokens} a step; T5's encoder as many more): "
        f"Python's standard library and language reference, in {VOCABULARY} byte-level BPE tokens.",
        "A model's plans begin from the same weights and read the same batches. Differences are from the run on one "
        "process: the largest of any step, and of the first 20; near: steps until one is over 1e-3 (sums in other "
        "orders round otherwise in fp32, and training makes that grow). CPU-s of a step: rank 0's median by ranks.",
        "",
        "| model | plan | first loss | last (mean of 10) | held out | difference | of first 20 | near | CPU-s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for run in runs():
        curve = noted[run.name]
        base = noted[f"{run.model}: 1 process"]
        apart = [abs(curve[step]["loss"] - base[step]["loss"]) for step in range(1, steps + 1)]
        near = next((step for step, off in enumerate(apart) if off > 1e-3), steps)
        last = sum(curve[step]["loss"] for step in range(max(1, steps - 9), steps + 1)) / min(10, steps)
        cpu = sorted(record["cpu_s"] for record in curve.values())[len(curve) // 2] * run.plan.world_size
        lines.append(
            f"| {run.graph.name}, {run.graph.num_parameters() / 1e6:.1f}M | {run.label} | {curve[1]['loss']:.4f} | "
            f"{last:.4f} | {curve[steps]['held_out']:.4f} | {max(apart):.1e} | {max(apart[:20]):.1e} | {near} | "
            f"{cpu:.2f} |"
        )
    lines += ["", "![loss curves](runtime_trained.svg)"]
    (folder / "runtime_trained.md").write_text("\n".join(lines) + "\n")
    (folder / "runtime_trained.svg").write_text(svg(noted, steps))


WIDTH, HEIGHT, LEFT, TOP, GAP = 300, 260, 46, 46, 26
COLOURS = ("#1b4f8f", "#d9822b", "#2e8b57", "#b0307a")
DASHES = ("", "7 5", "2 4", "1 7 6 3")


def svg(noted: dict[str, dict[int, dict[str, float]]], steps: int) -> str:
    """Twelve curves in three panels on one scale; the first plan's is drawn wide and the others on it."""
    groups = {model: [run for run in runs() if run.model == model] for model in MODELS}
    values = [record["loss"] for curve in noted.values() for record in curve.values()]
    low, high = math.floor(2 * min(values)) / 2, math.ceil(2 * max(values)) / 2
    total = LEFT + len(groups) * (WIDTH + GAP), TOP + HEIGHT + 110
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total[0]} {total[1]}" font-family="sans-serif" '
        'font-size="11">',
        f'<rect width="{total[0]}" height="{total[1]}" fill="white"/>',
        f'<text x="{LEFT}" y="16" font-size="13">Training loss by step, each model under four plans</text>',
    ]
    for place, (model, members) in enumerate(groups.items()):
        x0 = LEFT + place * (WIDTH + GAP)
        graph = MODELS[model]
        title = f"{graph.name}, {graph.num_parameters() / 1e6:.1f}M parameters"
        out.append(f'<text x="{x0}" y="{TOP - 8}">{title}</text>')
        for loss in (low + tick / 2 for tick in range(round(2 * (high - low)) + 1)):
            y = TOP + HEIGHT * (high - loss) / (high - low)
            out.append(f'<path d="M{x0} {y:.1f}h{WIDTH}" stroke="#ddd"/>')
            if place == 0:
                out.append(f'<text x="{x0 - 8}" y="{y + 4:.1f}" text-anchor="end">{loss:.1f}</text>')
        for step in range(0, steps + 1, max(1, steps // 3)):
            x = x0 + WIDTH * step / steps
            out.append(f'<text x="{x:.1f}" y="{TOP + HEIGHT + 15}" text-anchor="middle">{step}</text>')
        for number, run in enumerate(members):
            points = " ".join(
                f"{x0 + WIDTH * step / steps:.1f},{TOP + HEIGHT * (high - record['loss']) / (high - low):.1f}"
                for step, record in sorted(noted[run.name].items())
            )
            style = f'fill="none" stroke="{COLOURS[number]}" stroke-width="{3 if number == 0 else 1.3}" '
            style += f'stroke-dasharray="{DASHES[number]}"'
            if number == 0:
                style += ' opacity="0.45"'
            out.append(f'<polyline points="{points}" {style}/>')
            y = TOP + HEIGHT + 36 + 17 * number
            out.append(f'<path d="M{x0} {y - 4}h26" {style}/><text x="{x0 + 32}" y="{y}">{run.label}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
