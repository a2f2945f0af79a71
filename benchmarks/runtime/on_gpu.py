"""Predicted beside measured on the GPU of this machine: `python benchmarks/runtime/on_gpu.py`.

Each case is a training step of Gnomon's runtime on one GPU: bf16 weights and compute, fp32 gradients, master weights
and AdamW states, random weights and tokens. The prediction is that of `gnomon predict` with the stack `gnomon` for the
catalogue's device of that name; nothing is calibrated on the machine. Steps are timed with the GPU idle before and
after; memory is the peak of what torch's allocator handed out. Some cases alternate with a step of transformers' model
(autocast to bf16, fused AdamW, clipping). First the losses of three steps in fp64, on the GPU and on the CPU. Writes
results/runtime_gpu.md. `--device cpu` tries the script on small models. Left out: several GPUs.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import gnomon
from gnomon.plans import Plan, Precision, Saved, Schedule, Workload
from gnomon.request.runnable import read_runnable_model
from gnomon.runtime.parameters.parameters import Parameters, Slot
from gnomon.timeline import NONE, Timeline

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "runtime_gpu.md"
FP64 = Precision(param="fp64", compute="fp64", grad="fp64", reduce="fp64", master="none", states="fp64")
CLUSTERS = {"H100": "1xh100-sxm", "H200": "1xh200-sxm-141gb", "cpu": "1xh100-sxm"}
MIXTRAL = {
    "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_size": 1024, "intermediate_size": 3584,
    "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 8, "num_local_experts": 8,
    "num_experts_per_tok": 2, "vocab_size": 32000, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    "rope_theta": 1e6, "hidden_act": "silu", "tie_word_embeddings": False, "router_aux_loss_coef": 0.0,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """A step."""

    model: str
    batch: int
    seq_len: int
    micro: int
    """Sequences of a microbatch."""
    saved: Any = "none"
    peer: bool = False
    """Beside transformers' model."""


CASES = (
    Case("llama-3.2-1b", 8, 2048, 1),
    Case("llama-3.2-1b", 8, 2048, 4, peer=True),
    Case("llama-3.2-1b", 8, 2048, 8, "full"),
    Case("llama-3.2-1b", 2, 8192, 1, "selective"),
    Case("qwen3-0.6b", 8, 2048, 4, peer=True),
    Case("gpt2", 32, 1024, 16, peer=True),
    Case("gpt2", 32, 1024, 2),
    Case("gpt2-xl", 8, 1024, 4),
    Case("pythia-1.4b", 8, 2048, 2),
    Case("qwen2.5-1.5b", 4, 4096, 1),
    Case("gemma-2-2b", 2, 2048, 1),
    Case("mixtral", 8, 2048, 2),
    Case("llama-3.2-3b", 4, 2048, 2, "full"),
    Case("qwen2.5-0.5b", 16, 1024, 8),
    Case("qwen3-1.7b", 4, 2048, 1, "full"),
)
SMALL = (Case("llama-tiny", 4, 64, 2, "full"), Case("llama-mini", 4, 32, 1))


def quick_weights() -> None:
    """Random weights drawn on the GPU: to draw those of `initial` takes a minute for 3 billion, and no time that is
    measured here depends on them."""

    def fill(self: Parameters, value: Callable[[Slot], torch.Tensor]) -> None:
        flat = torch.randn(self.size, device=self.device) * 0.02
        for slot in self.slots:
            if len(slot.shape) == 1:
                flat[slot.start : slot.stop] = 1.0
        self.master, self.flat = flat.to(self.dtypes.master), flat.to(self.dtypes.param)

    Parameters.fill = fill  # type: ignore[method-assign]


def synchronize(device: str) -> None:
    """Waits for the GPU."""
    if device == "cuda":
        torch.cuda.synchronize()


def timed(step: Callable[[], object], device: str) -> float:
    """Seconds."""
    synchronize(device)
    began = time.perf_counter()
    step()
    synchronize(device)
    return time.perf_counter() - began


def transformers_step(config: Any, ids: torch.Tensor, micro: int, device: str) -> Callable[[], object]:
    """A step as people write it."""
    from transformers import AutoModelForCausalLM

    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    model.train()
    adam = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), fused=True)

    def step() -> object:
        adam.zero_grad()
        for part in ids.split(micro):
            with torch.autocast(device, torch.bfloat16):
                loss = model(input_ids=part, labels=part, use_cache=False).loss
            (loss * (len(part) / len(ids))).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        return loss.item()

    return step


def hf_config(name: str) -> Any:
    """Of the models that have a peer here."""
    from transformers import GPT2Config, LlamaConfig, Qwen3Config

    if name == "gpt2":
        return GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    if name == "qwen3-0.6b":
        return Qwen3Config(
            vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
            num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
        )  # fmt: skip
    return LlamaConfig(
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, tie_word_embeddings=True, rope_theta=500000.0,
    )  # fmt: skip


def one(case: Case, model: str, cluster: str, device: str, steps: int) -> dict[str, Any]:
    """A row of the table."""
    graph = read_runnable_model(model)[0]
    plan = Plan(schedule=Schedule(micro_batch_size=case.micro), saved=Saved(preset=case.saved))
    work = Workload(global_batch_size=case.batch, seq_len=case.seq_len)
    guess = gnomon.predict(graph, cluster, plan, work, "gnomon")
    row: dict[str, Any] = {
        "case": f"{case.model}, {case.batch} x {case.seq_len}, microbatches of {case.micro}, recompute {case.saved}",
        "predicted_s": guess.step_s,
        "predicted_bytes": guess.memory[0].allocated_bytes,
        "predicted_reserved": guess.memory[0].reserved_bytes,
        "predicted_classes": dict(guess.memory[0].by_class),
        "predicted_kinds": kinds(guess.timeline()),
    }
    ids = torch.randint(0, 256, (case.batch, case.seq_len + 1), generator=torch.Generator().manual_seed(0))
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    peer = None
    with gnomon.prepare(graph, plan, workload=work, device=device) as job:
        for _ in range(3):
            job.step(ids)
        if device == "cuda":
            row["measured_bytes"] = torch.cuda.max_memory_allocated()
            row["measured_reserved"] = torch.cuda.max_memory_reserved()
        if case.peer:
            try:
                own = ids[:, :-1].to(device)
                peer = transformers_step(hf_config(case.model), own, case.micro, device)
                for _ in range(3):
                    peer()
            except torch.cuda.OutOfMemoryError:
                peer = None
        ours, theirs = [], []
        for _ in range(steps):
            ours.append(timed(lambda: job.step(ids), device))
            if peer is not None:
                theirs.append(timed(peer, device))
        row["measured_s"] = statistics.median(ours)
        row["spread"] = (min(ours), max(ours))
        row["measured_kinds"] = kinds(job.timeline())
        if theirs:
            row["peer_s"] = statistics.median(theirs)
            row["ratio"] = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    return row


def kinds(timeline: Timeline) -> dict[str, float]:
    """Seconds of each kind of row on the first worker."""
    spans = timeline.spans
    names = [timeline.kinds[kind] for kind in spans.kind[(spans.worker == 0) & (spans.path == NONE)]]
    took = spans.duration_s[(spans.worker == 0) & (spans.path == NONE)]
    return {name: float(sum(s for k, s in zip(names, took, strict=True) if k == name)) for name in dict.fromkeys(names)}


def exact(device: str) -> dict[str, float]:
    """Largest relative difference of three steps' losses in fp64 between `device` and the CPU."""
    collected = {}
    work = Workload(global_batch_size=4, seq_len=64)
    ids = torch.randint(0, 256, (4, 65), generator=torch.Generator().manual_seed(0))
    for name in ("llama-mini", "llama-tiny"):
        losses = {}
        for where in ("cpu", device):
            plan = Plan(schedule=Schedule(num_microbatches=2), precision=FP64)
            with gnomon.prepare(name, plan, workload=work, device=where) as job:
                losses[where] = [job.step(ids) for _ in range(3)]
        collected[name] = max(abs(a / b - 1) for a, b in zip(losses["cpu"], losses[device], strict=True))
    return collected


def main() -> int:
    """Runs, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--only", default="", help="cases whose text has this")
    parser.add_argument("--seconds", type=float, default=400, help="start no case after this")
    parser.add_argument("--rows", type=Path, help="append each row as JSON to this file")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    began = time.perf_counter()
    name = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    cluster = next(cluster for part, cluster in CLUSTERS.items() if part in name)
    print(f"{name}, torch {torch.__version__}, predicted as {cluster}", flush=True)
    agrees = exact(options.device)
    print("fp64 losses, largest relative difference to the CPU:", agrees, flush=True)
    quick_weights()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mixtral.json"
        path.write_text(json.dumps(MIXTRAL))
        for case in CASES if options.device == "cuda" else SMALL:
            if options.only not in case.model or time.perf_counter() - began > options.seconds:
                continue
            try:
                model = str(path) if case.model == "mixtral" else case.model
                row = one(case, model, cluster, options.device, options.steps)
            except Exception as error:  # a case that fails is a row that says so
                row = {"case": str(case), "failed": f"{type(error).__name__}: {error}"[:600]}
            gc.collect()
            if options.device == "cuda":
                torch.cuda.empty_cache()
            print(f"{time.perf_counter() - began:6.1f} s", json.dumps(row), flush=True)
            if options.rows:
                with options.rows.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            rows.append(row)
    lines = table(rows, agrees, name, cluster)
    print("\n".join(lines))
    options.output.write_text("\n".join(lines) + "\n")
    return 0


def table(rows: list[dict[str, Any]], agrees: dict[str, float], name: str, cluster: str) -> list[str]:
    """The result page."""
    good = [row for row in rows if "failed" not in row]
    off = [row["predicted_s"] / row["measured_s"] - 1 for row in good]
    lines = [
        "# Predicted and measured on one GPU",
        "",
        f"`python benchmarks/runtime/on_gpu.py`, {datetime.now(UTC):%Y-%m-%d}, {name}, torch {torch.__version__}. "
        f"Predicted as `{cluster}` with the stack `gnomon`; nothing was calibrated or fitted on this machine.",
        f"fp64 losses of three steps on the GPU and on the CPU differ by at most {max(agrees.values()):.1e} of them.",
        "",
        "| step | predicted | measured (from, to) | off | GiB predicted | measured | off | over transformers |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if "failed" in row:
            lines.append(f"| {row['case']} | {row['failed']} | | | | | | |")
            continue
        low, high = row["spread"]
        mine, theirs = row["predicted_bytes"] / 2**30, row.get("measured_bytes", 0) / 2**30
        lines.append(
            f"| {row['case']} | {row['predicted_s']:.3f} s | {row['measured_s']:.3f} s ({low:.3f} to {high:.3f}) | "
            f"{row['predicted_s'] / row['measured_s'] - 1:+.1%} | {mine:.1f} | {theirs:.1f} | "
            f"{f'{mine / theirs - 1:+.1%}' if theirs else ''} | {row.get('ratio', float('nan')):.2f} |"
        )
    if good:
        lines += [
            "",
            f"Step: median {statistics.median(map(abs, off)):.1%}, worst {max(off, key=abs):+.1%} of {len(off)}.",
        ]
    return [line.replace(" | nan |", " | |") for line in lines]


if __name__ == "__main__":
    sys.exit(main())
