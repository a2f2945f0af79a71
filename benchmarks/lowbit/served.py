"""A model of Qwen2.5-0.5B's shape served in bf16, int8, int4 and 4:16: tokens a CPU-second, predicted and measured.

    python benchmarks/lowbit/served.py [--layers 24] [--rounds 3] [--folder WORK] [--write]

Random weights; int4 and 4:16 are folders that `gnomon compress` writes, int8 is rounded as it is read. One thread, one
sequence, `--tokens` tokens after a prompt of 32, by the engine of `gnomon generate`, in turn in one process. Predicted:
what `gnomon compress` prints, products alone, with this machine's rates in CPU time.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import save_file

from gnomon.compiler.machine import this_machine
from gnomon.compiler.tiles.tile_cost import Rates
from gnomon.compiler.tiles.tile_cost import measure_rates as measured_rates
from gnomon.formats.huggingface.known import layout
from gnomon.runtime.checkpoint.compress import compress, predicted_tokens_per_s
from gnomon.runtime.checkpoint.pretrained import model_of
from gnomon.runtime.parameters.weights import Folder, settled
from gnomon.serve.load import open_model
from gnomon.serve.sampling import Sampling
from gnomon.software.engine import engine
from gnomon.storage.names import storage_of

RESULT = Path(__file__).parents[1] / "results" / "lowbit_served.md"
HIDDEN, FFN, HEADS, KV, WIDTH, VOCAB = 896, 4864, 14, 2, 64, 151936
FORMS = ("bf16", "int8", "int4-g64", "4:16")
PROMPT = list(range(100, 132))


def made(folder: Path, layers: int) -> Path:
    """A folder of random weights of that shape, with the table as the head's matrix."""
    whole = folder / "whole"
    if (whole / "model.safetensors").exists():
        return whole
    whole.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": HIDDEN, "intermediate_size": FFN,
        "num_hidden_layers": layers, "num_attention_heads": HEADS, "num_key_value_heads": KV, "vocab_size": VOCAB,
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", "hidden_act": "silu", "use_sliding_window": False,
    }  # fmt: skip
    (whole / "config.json").write_text(json.dumps(config))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(layers):
        base = f"model.layers.{layer}"
        for name, rows, columns in (
            ("self_attn.q_proj", HIDDEN, HIDDEN), ("self_attn.k_proj", KV * WIDTH, HIDDEN),
            ("self_attn.v_proj", KV * WIDTH, HIDDEN), ("self_attn.o_proj", HIDDEN, HIDDEN),
            ("mlp.gate_proj", FFN, HIDDEN), ("mlp.up_proj", FFN, HIDDEN), ("mlp.down_proj", HIDDEN, FFN),
        ):  # fmt: skip
            shapes[f"{base}.{name}.weight"] = rows, columns
            if name[-6] in "qkv" and "attn" in name:
                shapes[f"{base}.{name}.bias"] = (rows,)
        shapes |= {f"{base}.{name}.weight": (HIDDEN,) for name in ("input_layernorm", "post_attention_layernorm")}
    torch.manual_seed(0)
    save_file({k: (torch.randn(v) * 0.02).bfloat16() for k, v in shapes.items()}, str(whole / "model.safetensors"))
    return whole


def predicted(whole: Path, name: str, at: Rates) -> float:
    """Tokens a CPU-second, as `gnomon compress` says them a second."""
    model, folder = model_of(whole), Folder.of(whole)
    where = settled(folder, layout(model.graph, model.model_type))
    pieces = {piece.tensor: piece.shape for own in where.pieces.values() for piece in own}
    chosen = {k: (v[0], v[1]) for k, v in pieces.items() if ".layers." in k and len(v) == 2}
    storage: Any = storage_of("2:4" if name == "bf16" else name)
    said = predicted_tokens_per_s(model.graph, where, chosen, storage, at)
    assert said is not None
    return said[0] if name == "bf16" else said[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "gnomon-lowbit-served")
    parser.add_argument("--write", action="store_true", help=f"to {RESULT.name}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    at = measured_rates(time.process_time)
    whole = made(options.folder, options.layers)
    engines: dict[str, Any] = {}
    for name in FORMS:
        place, weights = whole, "stored"
        if name == "int8":
            weights = "int8"
        elif name != "bf16":
            place = options.folder / name.replace(":", "of")
            if not place.exists():
                how: Any = "rtn" if name.startswith("int") else "magnitude"
                compress(whole, place, storage_of(name), how)  # type: ignore[arg-type]
        rules = replace(engine("gnomon"), max_seqs=1)
        engines[name] = open_model(
            place, rules, dtype="bf16", weights=weights, kv_bytes=1 << 26, longest_asked=len(PROMPT) + options.tokens
        )
        print(name, "is read", flush=True)
    took: dict[str, list[float]] = {name: [] for name in FORMS}
    for number in range(options.rounds):
        for name in (*FORMS[number % 4 :], *FORMS[: number % 4]):
            model = engines[name]
            model.add(PROMPT, Sampling(max_tokens=options.tokens, temperature=0.0))
            model.step()  # the prompt
            start, steps = time.process_time(), 0
            while model.has_work:
                model.step()
                steps += 1
            took[name].append(steps / (time.process_time() - start))
    lines = [
        "# Qwen2.5-0.5B's shape, served\n",
        f"{date.today()}, `python {' '.join(['benchmarks/lowbit/served.py', *sys.argv[1:]])}`, {this_machine().model}, "
        f"one thread, torch {torch.__version__}, load average {os.getloadavg()[0]:.1f}, random weights, "
        f"{options.layers} layers. Tokens a CPU-second after the prompt, one sequence: median [least, most] of "
        f"{options.rounds} rounds. "
        "Predicted: products alone, from the machine's rates.\n",
        "| weights | bytes of matrices | predicted | measured | predicted / measured | times bf16 |",
        "|---|---|---|---|---|---|",
    ]
    for name in FORMS:
        seen, said = median(took[name]), predicted(whole, name, at)
        held = sum(one.bytes for one in {id(one): one for one in engines[name].model.program.weights}.values()) / 1e6
        lines.append(
            f"| {name} | {held:.0f} MB | {said:.0f} | {seen:.0f} [{min(took[name]):.0f}, {max(took[name]):.0f}] | "
            f"{said / seen:.2f} | {seen / median(took['bf16']):.2f} |"
        )
    print("\n".join(lines))
    if options.write:
        RESULT.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
