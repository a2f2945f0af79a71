"""Real sizes of ten models through `gnomon.capture`, on the meta device: `python benchmarks/capture/real_sizes.py`.

Each in a process of its own: CPU seconds and memory of the capture, ops, blocks, opaque share, parameters, and
FLOPs of forward and backward against torch's counter. After `gnomon calibrate` a step of those that fit this machine:
bytes kept for backward, seconds and memory. On the meta device torch has no flash attention, so that what a
module keeps there is not what it keeps elsewhere. Sizes are those of the models' published configs. Writes
results/capture_real_sizes_2026-11-28.md.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results" / "capture_real_sizes_2026-11-28.md"
LENGTH, ROWS = 512, 2
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama-3-8B": ("llama", {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8}),
    "Mixtral-8x7B": ("mixtral", {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2}),
    "DeepSeek-V3": ("deepseek_v3", {
        "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 256}),
    "Qwen3-30B-A3B": ("qwen3_moe", {
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "num_experts": 128, "num_experts_per_tok": 8}),
    "BERT-large": ("bert", {
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}),
    "ViT-L/16": ("vit", {
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}),
    "T5-large": ("t5", {
        "vocab_size": 32128, "d_model": 1024, "d_kv": 64, "d_ff": 4096, "num_layers": 24, "num_decoder_layers": 24,
        "num_heads": 16}),
    "Whisper-large-v3": ("whisper", {
        "vocab_size": 51866, "d_model": 1280, "encoder_layers": 32, "decoder_layers": 32, "encoder_ffn_dim": 5120,
        "decoder_ffn_dim": 5120, "encoder_attention_heads": 20, "decoder_attention_heads": 20, "num_mel_bins": 128}),
    "GPT-2 XL": ("gpt2", {"n_embd": 1600, "n_layer": 48, "n_head": 25}),
    "SAM ViT-H": ("sam_vision_model", {
        "hidden_size": 1280, "num_hidden_layers": 32, "num_attention_heads": 16, "mlp_dim": 5120,
        "global_attn_indexes": [7, 15, 23, 31]}),
}  # fmt: skip


def built(kind: str, sizes: dict[str, Any], heads: bool, device: str = "meta", dtype: Any = None) -> Any:
    """The body, in bf16 where nothing else is said; of a language model with its head."""
    import torch
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    config = AutoConfig.for_model(kind)
    for name, value in sizes.items():
        setattr(config, name, value)
    for name, value in vars(config).items():
        if name.endswith(("dropout", "_pdrop", "_dropout_prob", "dropout_rate")) and isinstance(value, float):
            setattr(config, name, 0.0)
    with torch.device(device):
        return (AutoModelForCausalLM if heads else AutoModel).from_config(config, dtype=dtype or torch.bfloat16)


CAUSAL = ("llama", "mixtral", "deepseek_v3", "qwen3_moe", "gpt2")


def example(kind: str, model: Any) -> dict[str, Any]:
    import torch

    ids = torch.zeros(ROWS, LENGTH, dtype=torch.long, device="meta")
    if kind in ("vit", "sam_vision_model"):
        side = model.config.image_size
        return {"pixel_values": torch.zeros(ROWS, 3, side, side, dtype=torch.bfloat16, device="meta")}
    if kind == "whisper":
        mel = torch.zeros(ROWS, model.config.num_mel_bins, 3000, dtype=torch.bfloat16, device="meta")
        return {"input_features": mel, "decoder_input_ids": ids[:, :448]}
    return {"input_ids": ids, **({"decoder_input_ids": ids.clone()} if kind == "t5" else {})}


def one(name: str, *, steps: bool) -> dict[str, Any]:
    """The row of a model. steps: on this machine, of those that fit it."""
    import torch

    sys.path.insert(0, str(Path(__file__).parents[2]))
    from benchmarks.capture.transformers_types import flops_error
    from gnomon.frontend.capture import captured
    from gnomon.frontend.opaque import shares
    from gnomon.models.presets import model as preset

    torch.set_num_threads(1)
    kind, sizes = MODELS[name]
    model = built(kind, sizes, kind in CAUSAL)
    given = example(kind, model)
    before, begin, wall = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time(), time.perf_counter()
    found = captured(model, given, name=kind)
    spent, took = time.process_time() - begin, time.perf_counter() - wall
    after, graph = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, found.graph
    parts = shares(graph, {"batch": ROWS, "seq": LENGTH})
    row: dict[str, Any] = {
        "name": name, "cpu_s": spent, "wall_s": took, "mib": after / 1024, "added_mib": (after - before) / 1024,
        "ops": found.steps, "blocks": len(graph.blocks), "layers": len(graph.layers()),
        "opaque_bytes": sum(part.bytes for part in parts.values()),
        "opaque_flops": sum(part.flops for part in parts.values()),
        "parameters": graph.num_parameters(),
        "wanted": sum(x.numel() for x in model.parameters() if x.requires_grad), "notes": list(found.notes),
    }  # fmt: skip
    unread = sum(flops for _, flops in found.unread)
    asked = {"flops": lambda: flops_error(model, {**given, **masked(kind, model)}, graph, unread)}
    asked["cached"] = lambda: cached(name, graph)
    if name in PRESETS:
        asked["built_in"] = lambda: graph.num_parameters() / preset(PRESETS[name]).num_parameters() - 1
    if steps and row["wanted"] < HERE:
        asked["step"] = lambda: here(kind, sizes)
    for key, work in asked.items():
        try:
            row[key] = work()
        except Exception as error:
            row[key] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160]}"
    return row


LOAD = """
import sys, time
from gnomon.request import cache
begin, wall = time.process_time(), time.perf_counter()
kept = cache.load(sys.argv[1])
print(time.process_time() - begin, time.perf_counter() - wall, time.process_time(), kept[0].num_parameters())
"""


def cached(name: str, graph: Any) -> dict[str, float]:
    """Seconds in which a new process, without torch, has the Graph from the disk; with its imports as `process_s`."""
    from gnomon.request import cache

    with tempfile.TemporaryDirectory() as folder:
        os.environ[cache.VARIABLE] = folder
        cache.store(name, (graph, ()), [])
        run = subprocess.run([sys.executable, "-c", LOAD, name], capture_output=True, text=True, check=True)
    cpu_s, wall_s, process_s, parameters = run.stdout.split()
    if int(parameters) != graph.num_parameters():
        raise ValueError(f"{parameters} parameters came back")
    return {"cpu_s": float(cpu_s), "wall_s": float(wall_s), "process_s": float(process_s)}


def masked(kind: str, model: Any) -> dict[str, Any]:
    """A whole mask for causal attention that is written out: transformers makes its own by looking at values. The
    products are the same."""
    import torch

    if hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation("eager")
    if kind not in CAUSAL:
        return {}
    return {"attention_mask": torch.zeros(ROWS, 1, LENGTH, LENGTH, dtype=torch.bfloat16, device="meta")}


HERE = 400_000_000
"""Parameters up to which a step is made on this machine."""


def here(kind: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """Kept bytes, seconds and memory of a step on this machine: fp32, random weights, two rows of 128 tokens."""
    import torch

    from benchmarks.capture.trained import Headed, kept_error, step
    from gnomon.frontend.capture import captured

    torch.manual_seed(0)
    model = built(kind, sizes, heads=False, device="cpu", dtype=torch.float32)
    given = {name: torch.zeros(x.shape, dtype=x.dtype) for name, x in example(kind, model).items()}
    given = {name: x.float() if x.is_floating_point() else x[:, :128] for name, x in given.items()}
    headed = Headed(model, given).eval()
    given["answers"] = torch.arange(ROWS)
    found = captured(headed, given, training=False)
    return {"kept": kept_error(headed, given, found.graph), **step(headed, found, given)}


PRESETS = {"Llama-3-8B": "llama-3.1-8b", "Mixtral-8x7B": "mixtral-8x7b", "DeepSeek-V3": "deepseek-v3"}
"""Models that are built in too."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names, with commas between")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    parser.add_argument("--no-step", action="store_true", help="no steps on this machine")
    parser.add_argument(
        "--rows", type=Path, help="JSON lines that are added to; models that are there are not run again"
    )
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.one:
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        print(json.dumps(one(options.one, steps=not options.no_step)))
        return 0
    kept = options.rows is not None and options.rows.exists()
    rows = [json.loads(line) for line in options.rows.read_text().splitlines()] if kept else []
    flags = ["--no-step"] if options.no_step else []
    for name in options.only.split(",") if options.only else MODELS:
        if any(row["name"] == name for row in rows):
            continue
        run = subprocess.run([sys.executable, __file__, "--one", name, *flags], capture_output=True, text=True)
        rows.append(json.loads(run.stdout.splitlines()[-1]) if run.returncode == 0 else {"name": name})
        print(json.dumps(rows[-1]) if run.returncode == 0 else run.stderr[-600:], file=sys.stderr, flush=True)
        if options.rows is not None and run.returncode == 0:
            with options.rows.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    options.output.write_text(page(rows))
    print(options.output.read_text())
    return int(any(len(row) == 1 for row in rows))


def page(rows: list[dict[str, Any]]) -> str:
    import torch
    import transformers

    steps = [(row["name"], row["step"]) for row in rows if isinstance(row.get("step"), dict)]
    lines = [
        f"# Ten models at their real sizes, captured on the meta device, {datetime.now(UTC):%Y-%m-%d}",
        "",
        f"`python benchmarks/capture/real_sizes.py`, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, one thread, one process a model, beside other work (CPU seconds are without what "
        f"it took, wall seconds are not). bf16, {ROWS} sequences of {LENGTH} tokens (Whisper: 30 s of sound and 448 "
        f"tokens; images of the model's own size), dropout 0. Parameters: those trained, of the Graph less of the "
        f"module, and of a built-in model. FLOPs: of forward and backward, over torch's counter on the module. MiB: of "
        f"the process at its peak until the capture is done, and what the capture added. Cached: CPU seconds in which "
        f"a new process has the Graph from the disk, and with all that it imports.",
        "",
        "| model | parameters, B | off by | against the built-in | CPU s | wall s | cached | with imports | MiB | "
        "added | ops | blocks | layers | opaque bytes | opaque FLOPs | FLOPs off |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if len(row) == 1:
            lines.append(f"| {row['name']} | not captured | | | | | | | | | | | | | | |")
            continue
        lines.append(
            f"| {row['name']} | {row['wanted'] / 1e9:.3f} | {row['parameters'] - row['wanted']} | "
            f"{percent(row.get('built_in'))} | {row['cpu_s']:.2f} | {row['wall_s']:.2f} | {kept(row)} | "
            f"{row['mib']:.0f} | "
            f"{row['added_mib']:.0f} | {row['ops']} | {row['blocks']} | {row['layers']} | {row['opaque_bytes']:.0%} | "
            f"{row['opaque_flops']:.0%} | {percent(row.get('flops'))} |"
        )
    if not steps:
        return "\n".join(lines) + "\n"
    lines += [
        "",
        f"A step on this machine, fp32, one thread, {ROWS} rows (of 128 tokens), of those below 0.4 B parameters:",
        "",
    ]
    lines += ["| model | kept off | predicted s | measured s | off | plain loop s | MiB predicted | counted | off |"]
    lines += ["|---|---|---|---|---|---|---|---|---|"]
    for name, step in steps:
        lines.append(
            f"| {name} | {step['kept']:+.2%} | {step['predicted_s']:.2f} | {step['measured_s']:.2f} | "
            f"{step['time_error']:+.1%} | {step['plain_s']:.2f} | {step['predicted_bytes'] / 2**20:.0f} | "
            f"{step['counted_bytes'] / 2**20:.0f} | {step['memory_error']:+.1%} |"
        )
    return "\n".join(lines) + "\n"


def kept(row: dict[str, Any]) -> str:
    """Two columns."""
    own = row.get("cached")
    return f"{own['cpu_s']:.2f} | {own['process_s']:.2f}" if isinstance(own, dict) else f"{own or '-'} |"


def percent(value: Any) -> str:
    """A share, or why there is none."""
    return f"{value:+.2%}" if isinstance(value, float) else str(value or "-")


if __name__ == "__main__":
    sys.exit(main())
