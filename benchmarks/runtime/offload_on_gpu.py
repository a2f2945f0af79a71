"""Offloading and recomputation on the GPU of this machine: `python benchmarks/runtime/offload_on_gpu.py`.

Steps of Pythia 1.4B, bf16 with fp32 gradients, master weights and AdamW states, random weights and tokens, no clipping:
predicted (`gnomon predict` for the catalogue's device of that name and the stack `gnomon`; nothing is calibrated here)
and measured, seconds and bytes of torch's allocator. Beside them FSDP2 with `CPUOffloadPolicy` and torch's fused AdamW
on the same model of transformers, which keeps the parameters on the host too; it alternates with ZeRO-Offload's plan.
First the losses of four steps of a small model in fp64, with the update on the host and with it on the device. Writes
results/offload_gpu.md. `--device cpu` tries the script on a small model. Left out: several GPUs.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from on_gpu import CLUSTERS, FP64, quick_weights, timed

import gnomon
from gnomon.plans import Offload, Optimizer, Plan, Saved, SavedRule, Schedule, Workload
from gnomon.request.runnable import read_runnable_model

RESULTS = Path(__file__).resolve().parents[1] / "results" / "offload_gpu.md"
HOST = Optimizer(offload=Offload(), clip=False)


@dataclass(frozen=True, slots=True)
class Case:
    """A step."""

    name: str
    optimizer: Optimizer = field(default_factory=lambda: Optimizer(clip=False))
    saved: Saved = field(default_factory=Saved)
    peer: bool = False
    """Alternates with FSDP2's."""


CASES = (
    Case("nothing"),
    Case("update on the host, gradients added there", HOST),
    Case("update on the host, gradients added on the device",
         Optimizer(offload=Offload(accumulate="device"), clip=False), peer=True),
    Case("the same, in one piece", Optimizer(offload=Offload(accumulate="device", tiles=1), clip=False)),
    Case("the same, a step late", Optimizer(offload=Offload(accumulate="device", tiles=1), clip=False, delay=1,
                                            delay_after=0)),
    Case("update of half of the layers on the host", Optimizer(offload=Offload(fraction=0.5), clip=False)),
    Case("layers recomputed", saved=Saved(preset="full")),
    Case("attention recomputed", saved=Saved(preset="selective")),
    Case("layers recomputed, their inputs on the host",
         saved=Saved(preset="full", rules=(SavedRule(tensors=("input",), action="offload"),))),
    Case("feed-forward's tensors on the host", saved=Saved(rules=(SavedRule(tensors=("mlp.*",), action="offload"),))),
)  # fmt: skip


def fsdp_step(config: Any, ids: torch.Tensor, micro: int, device: str) -> Callable[[], object]:
    """A step of FSDP2 with parameters, gradients and states on the host."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
    from transformers import AutoModelForCausalLM

    if not dist.is_initialized():
        dist.init_process_group("cuda:nccl,cpu:gloo" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0,
                                world_size=1)  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    model.train()
    how = {
        "mesh": init_device_mesh(device, (1,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(),
    }
    for layer in model.gpt_neox.layers:
        fully_shard(layer, **how)
    fully_shard(model, **how)
    adam = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), fused=True)

    def step() -> object:
        adam.zero_grad()
        parts = ids.split(micro)
        for number, part in enumerate(parts):
            model.set_requires_gradient_sync(number == len(parts) - 1)
            loss = model(input_ids=part, labels=part, use_cache=False).loss
            (loss * (len(part) / len(ids))).backward()
        adam.step()
        return loss.item()

    return step


def one(case: Case, options: argparse.Namespace, cluster: str) -> dict[str, Any]:
    """A row of the table."""
    graph = read_runnable_model(options.model)[0]
    plan = Plan(schedule=Schedule(micro_batch_size=options.micro), optimizer=case.optimizer, saved=case.saved)
    work = Workload(global_batch_size=options.batch, seq_len=options.seq_len)
    guess, on_gpu = gnomon.predict(graph, cluster, plan, work, "gnomon"), options.device == "cuda"
    row: dict[str, Any] = {
        "case": case.name,
        "predicted_s": guess.step_s,
        "predicted_bytes": guess.memory[0].allocated_bytes,
        "predicted_classes": dict(guess.memory[0].by_class),
    }
    ids = torch.randint(0, 256, (options.batch, options.seq_len + 1), generator=torch.Generator().manual_seed(0))
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    with gnomon.prepare(graph, plan, workload=work, device=options.device) as job:
        for _ in range(3):
            job.step(ids)
        if on_gpu:
            row["measured_bytes"] = torch.cuda.max_memory_allocated() - before
        peer = None
        if case.peer:
            try:
                peer = peer_of(options, ids)
                if on_gpu:
                    torch.cuda.reset_peak_memory_stats()
                    before = torch.cuda.memory_allocated()
                for _ in range(2):
                    peer()
                if on_gpu:
                    row["peer_bytes"] = torch.cuda.max_memory_allocated() - before
            except Exception as error:
                row["peer_failed"] = f"{type(error).__name__}: {error}"[:300]
                peer = None
        ours, theirs = [], []
        for _ in range(options.steps):
            ours.append(timed(lambda: job.step(ids), options.device))
            if peer is not None:
                theirs.append(timed(peer, options.device))
        row["measured_s"], row["spread"] = statistics.median(ours), (min(ours), max(ours))
        spans = job.timeline()
        row["moved"] = dict(job.executor.host.nbytes)
        del spans
        if theirs:
            row["peer_s"] = statistics.median(theirs)
            row["ratio"] = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    return row


def peer_of(options: argparse.Namespace, ids: torch.Tensor) -> Callable[[], object]:
    """FSDP2's step on the same tokens."""
    from transformers import GPTNeoXConfig

    large = options.device == "cuda"
    config = GPTNeoXConfig(
        vocab_size=50304, hidden_size=2048 if large else 64, intermediate_size=8192 if large else 256,
        num_hidden_layers=24 if large else 2, num_attention_heads=16 if large else 4, hidden_dropout=0.0,
        attention_dropout=0.0, rotary_pct=0.25, tie_word_embeddings=False,
    )  # fmt: skip
    return fsdp_step(config, ids[:, :-1].to(options.device), options.micro, options.device)


def exact(device: str) -> dict[str, float]:
    """Largest relative difference of four steps' losses in fp64 to those with the update on the CPU's device side."""
    work = Workload(global_batch_size=4, seq_len=64)
    ids = torch.randint(0, 256, (4, 65), generator=torch.Generator().manual_seed(0))
    plans = {
        "added on the host": Optimizer(offload=Offload(), clip=False),
        "added on the device": Optimizer(offload=Offload(accumulate="device"), clip=False),
        "half of the layers": Optimizer(offload=Offload(fraction=0.5), clip=False),
        "clipped": Optimizer(offload=Offload(), clip=True),
        "a step late": Optimizer(offload=Offload(), clip=False, delay=1, delay_after=1),
        "a step late, in one piece": Optimizer(offload=Offload(tiles=1, accumulate="device"), clip=False, delay=1,
                                               delay_after=1),
    }  # fmt: skip

    def losses(optimizer: Optimizer, where: str) -> list[float]:
        plan = Plan(schedule=Schedule(num_microbatches=2), precision=FP64, optimizer=optimizer)
        with gnomon.prepare("llama-tiny", plan, workload=work, device=where) as job:
            return [float(job.step(ids)) for _ in range(4)]

    def apart(a: list[float], b: list[float]) -> float:
        return max(abs(x / y - 1) for x, y in zip(a, b, strict=True))

    collected = {}
    for name, optimizer in plans.items():
        late = optimizer.delay > 0
        plain = losses(optimizer if late else Optimizer(clip=optimizer.clip), "cpu")
        collected[name] = apart(losses(optimizer, device), plain)
    return collected


def main() -> int:
    """Runs, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--model", default="")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=0)
    parser.add_argument("--micro", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=300, help="start no case after this")
    parser.add_argument("--rows", type=Path, help="append each row as JSON to this file")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    began, on_gpu = time.perf_counter(), options.device == "cuda"
    options.model = options.model or ("pythia-1.4b" if on_gpu else "llama-tiny")
    options.seq_len = options.seq_len or (2048 if on_gpu else 64)
    name = torch.cuda.get_device_name() if on_gpu else "cpu"
    cluster = next(cluster for part, cluster in CLUSTERS.items() if part in name)
    print(f"{name}, torch {torch.__version__}, predicted as {cluster}", flush=True)
    agrees = exact(options.device)
    print("fp64 losses, largest relative difference:", agrees, flush=True)
    quick_weights()
    rows = []
    for case in CASES:
        if time.perf_counter() - began > options.seconds:
            break
        try:
            row = one(case, options, cluster)
        except Exception as error:  # a case that fails is a row that says so
            row = {"case": case.name, "failed": f"{type(error).__name__}: {error}"[:600]}
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
            with suppress(AttributeError):
                torch._C._host_emptyCache()
        print(f"{time.perf_counter() - began:6.1f} s", json.dumps(row), flush=True)
        if options.rows:
            with options.rows.open("a") as file:
                file.write(json.dumps(row) + "\n")
        rows.append(row)
    lines = table(rows, agrees, name, cluster, options)
    print("\n".join(lines))
    options.output.write_text("\n".join(lines) + "\n")
    return 0


def table(
    rows: list[dict[str, Any]], agrees: dict[str, float], name: str, cluster: str, options: argparse.Namespace
) -> list[str]:
    """The result page."""
    good = [row for row in rows if "failed" not in row]
    lines = [
        "# Offloading and recomputation on one GPU",
        "",
        f"`python benchmarks/runtime/offload_on_gpu.py`, {datetime.now(UTC):%Y-%m-%d}, {name}, torch "
        f"{torch.__version__}. {options.model}, {options.batch} x {options.seq_len}, microbatches "
        f"of {options.micro}. Predicted as "
        f"`{cluster}` with the stack `gnomon`; nothing was calibrated or fitted on this machine.",
        "",
        "Losses of four steps in fp64 against the update on the device (a step late: against the same plan on a CPU), "
        "largest relative difference: " + ", ".join(f"{what} {apart:.1e}" for what, apart in agrees.items()) + ".",
        "",
        "| | predicted s | measured s (from, to) | off | GiB predicted | measured | off |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if "failed" in row:
            lines.append(f"| {row['case']} | {row['failed']} | | | | | |")
            continue
        low, high = row["spread"]
        mine, theirs = row["predicted_bytes"] / 2**30, row.get("measured_bytes", 0) / 2**30
        lines.append(
            f"| {row['case']} | {row['predicted_s']:.3f} | {row['measured_s']:.3f} ({low:.3f} to {high:.3f}) | "
            f"{row['predicted_s'] / row['measured_s'] - 1:+.1%} | {mine:.1f} | {theirs:.1f} | "
            f"{f'{mine / theirs - 1:+.1%}' if theirs else ''} |"
        )
    for row in good:
        if "ratio" in row:
            lines += ["", f"FSDP2 with CPUOffloadPolicy, in turn with \"{row['case']}\": {row['peer_s']:.3f} s, "
                      f"{row.get('peer_bytes', 0) / 2**30:.1f} GiB; ours over its: {row['ratio']:.2f}."]  # fmt: skip
    return lines


if __name__ == "__main__":
    sys.exit(main())
