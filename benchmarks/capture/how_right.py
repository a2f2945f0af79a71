"""Predictions of captured modules against this machine: `python benchmarks/capture/how_right.py`.

After `gnomon calibrate`. Causal language models of transformers, one a family, small, with random weights, in fp32
and one thread: captured from code, priced for this machine as it was calibrated, and trained by `gnomon.prepare` in
one process. Beside it a plain loop of the same module with fused AdamW and clipping. All jobs take turns,
so that what disturbs the machine disturbs all; a step's seconds are without what its thread waited for a core. Memory
is the most bytes of tensors in a step, counted op by op in one more step, against what is predicted that tensors
take. Writes results/capture_how_right.md. `--only` picks families. Wants idle cores.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import gnomon
from gnomon.frontend.inputs import CodeModel
from gnomon.frontend.named import build as built
from gnomon.frontend.named import captured_of
from gnomon.plans import Plan, Precision, Schedule, Workload
from gnomon.runtime.watch.layer_bytes import LiveBytes
from gnomon.runtime.watch.waiting import waited_s, waited_since

RESULTS = Path(__file__).resolve().parents[1] / "results" / "capture_how_right.md"
FP32 = Precision(param="fp32", compute="fp32", grad="fp32", reduce="fp32", master="none", states="fp32")
BATCH, LENGTH, VOCAB = 4, 128, 4096
WORK = Workload(global_batch_size=BATCH, seq_len=LENGTH)
PLAN = Plan(schedule=Schedule(micro_batch_size=BATCH), precision=FP32)
FAMILIES = (
    "arcee bloom codegen cohere exaone4 gemma gemma2 gemma3_text glm gpt2 gpt_bigcode gpt_neo gpt_neox gptj "
    "granite helium llama mistral olmo olmo2 opt persimmon phi phi3 qwen2 qwen3 seed_oss smollm3 stablelm "
    "starcoder2 xglm"
).split()
SIZES = {
    "hidden_size": 256, "n_embd": 256, "d_model": 256, "word_embed_proj_dim": 256, "intermediate_size": 768,
    "n_inner": 768, "ffn_dim": 768, "num_hidden_layers": 4, "n_layer": 4, "num_layers": 4, "num_attention_heads": 4,
    "n_head": 4, "num_heads": 4, "attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "rotary_dim": 32,
    "vocab_size": VOCAB, "max_position_embeddings": 512, "n_positions": 512,
}  # fmt: skip


class Trained(nn.Module):
    """A model of transformers with the loss of its next tokens."""

    def __init__(self, kind: str) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        super().__init__()
        config = AutoConfig.for_model(kind)
        for name, size in SIZES.items():
            if isinstance(vars(config).get(name), int):
                setattr(config, name, size)
        for name in list(vars(config)):
            if name.endswith(("_dropout", "_pdrop", "dropout")) and isinstance(getattr(config, name), float):
                setattr(config, name, 0.0)
            if name.endswith("token_id") and isinstance(getattr(config, name), int):
                setattr(config, name, 1)
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[: SIZES["num_hidden_layers"]]
        if kind == "gpt_neo":
            config.attention_types = [[["global", "local"], 2]]
            config.attention_layers = ["global", "local"] * 2
        self.model = AutoModelForCausalLM.from_config(config)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.model(input_ids=ids, use_cache=False).logits
        return functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))


def build(kind: str) -> Trained:
    """What the code in `CODE` names."""
    torch.manual_seed(0)
    return Trained(kind)


def code(kind: str) -> str:
    return f"how_right:build_{kind}(ids=int64[batch,seq={LENGTH}], labels=int64[batch,seq={LENGTH}])"


for _kind in FAMILIES:  # a function for each, since code is named by a function without arguments
    globals()[f"build_{_kind}"] = lambda kind=_kind: build(kind)


@dataclass(kw_only=True)
class Row:
    """A family."""

    kind: str
    parameters: int
    predicted_s: float
    predicted_bytes: float
    step: Callable[[], object]
    plain: Callable[[], object]
    counted: Callable[[], int]
    measured: list[float]
    loop: list[float]
    nbytes: int = 0

    @property
    def off(self) -> float:
        return self.predicted_s / statistics.median(self.measured) - 1

    @property
    def memory_off(self) -> float:
        return self.predicted_bytes / self.nbytes - 1


def prepared(kind: str) -> Row:
    """Captured, priced, and ready to take steps."""
    named = CodeModel.parse(code(kind))
    found = captured_of(named, built(named))
    guess = gnomon.predict(found.graph, "local:1", PLAN, WORK, "gnomon")
    ids = torch.randint(0, VOCAB, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    batch = {"ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
    live = LiveBytes(torch.device("cpu"))
    job = gnomon.prepare(code(kind), PLAN, workload=WORK)
    module = build(kind)
    module.train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)

    def loop() -> float:
        optimizer.zero_grad()
        loss = module(**batch)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        return float(loss.detach())

    def counted() -> int:
        before = job.executor.resident_bytes()
        with live:
            job.step(batch)
        return int(before + live.most)

    sizes = guess.memory[0].by_class
    return Row(
        kind=kind, parameters=found.graph.num_parameters(), predicted_s=guess.step_s,
        predicted_bytes=sum(size for name, size in sizes.items() if name not in ("workspace", "overhead")),
        step=lambda: job.step(batch), plain=loop, counted=counted, measured=[], loop=[],
    )  # fmt: skip


def seconds(call: Callable[[], object]) -> float:
    """Of a call, without what this thread waited for a core."""
    waited, began = waited_s(), time.perf_counter()
    call()
    took, lost = time.perf_counter() - began, waited_since(waited)
    return took if math.isnan(lost) else took - lost


def main() -> int:
    """Runs, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="families, with commas between")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, failed = list[Row](), list[str]()
    for kind in options.only.split(",") if options.only else FAMILIES:
        try:
            rows.append(prepared(kind))
            for call in (rows[-1].step, rows[-1].plain):
                call()
                call()
        except Exception as error:  # of a model of others: which, and why, is part of the table
            failed.append(f"{kind}: {type(error).__name__}: {str(error).strip().splitlines()[0][:200]}")
            rows = [row for row in rows if row.kind != kind]
            print(failed[-1], file=sys.stderr, flush=True)
            continue
        print(f"{kind}: prepared", flush=True)
    if not rows:
        return 1
    for number in range(options.rounds):
        for row in rows:
            row.measured.append(seconds(row.step))
            row.loop.append(seconds(row.plain))
        print(f"round {number + 1} of {options.rounds}", flush=True)
    for row in rows:
        row.nbytes = row.counted()
    options.output.write_text("\n".join(lines(rows, failed, options.rounds)) + "\n")
    print(options.output.read_text())
    return 0


def lines(rows: list[Row], failed: list[str], rounds: int) -> list[str]:
    """The page."""
    import transformers

    off, memory = (sorted(abs(getattr(row, name)) for row in rows) for name in ("off", "memory_off"))
    over = [statistics.median(a / b for a, b in zip(row.measured, row.loop, strict=True)) for row in rows]
    out = [
        "# Captured models: predicted and measured on this machine",
        "",
        f"`python benchmarks/capture/how_right.py`, {datetime.now(UTC):%Y-%m-%d}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}. fp32, one thread, {BATCH} sequences of {LENGTH} tokens, hidden size "
        f"256, 4 layers; medians of {rounds} rounds in which all take turns, without waiting for a core. Plain: a "
        "loop of the module itself with torch's fused AdamW; both clip gradients. MiB: tensors at the peak of a step.",
        "",
        f"{len(rows)} families: step {off[len(off) // 2]:.1%} off in the median, {off[-1]:.1%} at worst; memory "
        f"{memory[len(memory) // 2]:.1%} in the median, {memory[-1]:.1%} at worst. Gnomon's step over the plain "
        f"loop's: {statistics.median(over):.3f} in the median, {max(over):.3f} at worst.",
        "",
        "| family | parameters, M | predicted ms | measured ms | off | plain ms | over plain | MiB predicted | counted "
        "| off |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row, ratio in zip(rows, over, strict=True):
        measured, loop = statistics.median(row.measured), statistics.median(row.loop)
        out.append(
            f"| {row.kind} | {row.parameters / 1e6:.1f} | {1e3 * row.predicted_s:.1f} | {1e3 * measured:.1f} | "
            f"{row.off:+.1%} | {1e3 * loop:.1f} | {ratio:.3f} | {row.predicted_bytes / 2**20:.1f} | "
            f"{row.nbytes / 2**20:.1f} | {row.memory_off:+.1%} |"
        )
    return out + [f"\nNot run: {why}" for why in failed]


if __name__ == "__main__":
    sys.exit(main())
