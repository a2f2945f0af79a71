"""A model larger than memory, served: `python benchmarks/serve/streamed.py [--no-file]`.

A model of TinyLlama-1.1B's shape (2.1 GB in bfloat16, random weights) in processes whose memory Linux limits (a memory
cgroup, where one can be made; otherwise only what they took is told). All layers in memory: the process is killed.
With `--stream-weights`: it answers, each iteration at what the disk gives, which is predicted from the bytes that it
reads and the rate of the disk as `gnomon calibrate` measures it. Writes benchmarks/results/serve_streamed.md. Leaves
out HTTP.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import torch
from safetensors.torch import save_file

from gnomon.compiler.machine import this_machine
from gnomon.runtime.calibrate.disk import Disk

RESULTS = Path(__file__).resolve().parents[1] / "results" / "serve_streamed.md"
CGROUPS = Path("/sys/fs/cgroup/memory")
LIMIT = 1 << 30
HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, VOCAB = 2048, 5632, 22, 32, 4, 32000
ALONE = """
import json, os, sys, time
from dataclasses import replace
from pathlib import Path
if sys.argv[3]:
    Path(sys.argv[3], "cgroup.procs").write_text(str(os.getpid()))
import torch
from gnomon.serve.load import open_model
from gnomon.serve.sampling import Sampling
from gnomon.software.engine import engine
torch.set_num_threads(1)
rules = replace(engine("gnomon"), max_seqs=8, max_batched_tokens=256)
resident = None if sys.argv[2] == "all" else int(sys.argv[2])
model = open_model(Path(sys.argv[1]), rules, dtype="bf16", kv_bytes=1 << 26, max_model_len=512, resident_bytes=resident)
for at in range(4):
    model.add(list(range(5 + at, 37 + at)), Sampling(max_tokens=9, temperature=0))
steps, tokens = [], []
while model.has_work:
    begin, cpu = time.perf_counter(), time.process_time()
    made = [(one.key, one.chosen.token) for one in model.step()]
    if made:
        tokens += made
        steps.append((time.perf_counter() - begin, time.process_time() - cpu))
peak = int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) << 10
streams = model.model.streams
print(json.dumps({"steps": steps[1:], "tokens": tokens, "peak": peak,
                  "read": streams.streamed_bytes if streams else 0}))
"""


def write(folder: Path) -> int:
    """Bytes of the weights."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": FFN,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "vocab_size": VOCAB,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    head = HIDDEN // HEADS
    layer = {
        "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (KV_HEADS * head, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * head, HIDDEN), "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (FFN, HIDDEN), "mlp.up_proj": (FFN, HIDDEN), "mlp.down_proj": (HIDDEN, FFN),
        "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,),
    }  # fmt: skip
    shapes = {f"model.layers.{at}.{name}.weight": shape for at in range(LAYERS) for name, shape in layer.items()}
    shapes |= {"model.embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN)}
    shapes["model.norm.weight"] = (HIDDEN,)
    noise = (0.02 * torch.randn(FFN * HIDDEN * 8, generator=torch.Generator().manual_seed(0))).bfloat16()
    tensors, at = {}, 0
    for name, shape in shapes.items():
        count = torch.Size(shape).numel()
        part = noise if count > len(noise) else noise[at % (len(noise) - count + 1) :]
        tensors[name] = part.repeat(-(-count // len(part)))[:count].view(shape).clone()
        at += 7919
    save_file(tensors, folder / "model.safetensors")
    return (folder / "model.safetensors").stat().st_size


def limited(name: str) -> str:
    """A cgroup of so much memory, or none."""
    group = CGROUPS / f"gnomon-{os.getpid()}-{name}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(LIMIT))
    except OSError:
        return ""
    return str(group)


def run(folder: Path, resident: str, group: str) -> dict[str, object] | None:
    """What the process said; None where it was killed."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GNOMON_DISK": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(folder), resident, group],
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    if group:
        Path(group).rmdir()
    if done.returncode == -9:
        return None
    if done.returncode:
        raise SystemExit(done.stderr)
    told: dict[str, object] = json.loads(done.stdout)
    return told


def main() -> int:
    """The table, and the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-file", action="store_true", help="print only")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = write(folder)
        disk = Disk(fine=True)
        os.environ["GNOMON_DISK"] = name
        for _ in range(3):
            disk.round()
        rate = disk.axis.sizes[-1] / statistics.median(disk.read[-1])
        free = run(folder, "all", "")
        assert free is not None
        compute = statistics.median(wall for wall, _ in free["steps"])  # type: ignore[attr-defined]
        lines = [
            "| layers in memory | limit | answers | peak memory | read an iteration | an iteration | predicted |",
            "|---|---|---|---|---|---|---|",
        ]
        wrong = 0
        for label, resident, capped in (
            ("all", "all", False), ("all", "all", True), ("256 MiB", str(256 << 20), True), ("none", "0", True),
        ):  # fmt: skip
            group = limited(resident) if capped else ""
            limit = "none" if not capped else f"{LIMIT >> 20} MiB" if group else "none could be made"
            told = free if not capped else run(folder, resident, group)
            if told is None:
                lines.append(f"| {label} | {limit} | killed by Linux | | | | |")
                continue
            walls = sorted(wall for wall, _ in told["steps"])  # type: ignore[attr-defined]
            predicted = max(compute, int(told["read"]) / rate)  # type: ignore[call-overload]
            same = told["tokens"] == free["tokens"]
            wrong += not same
            lines.append(
                f"| {label} | {limit} | {'the same' if same else 'others'} | {int(told['peak']) >> 20} MiB | "  # type: ignore[call-overload]
                f"{int(told['read']) >> 20} MiB | {statistics.median(walls):.2f} s [{walls[0]:.2f}, {walls[-1]:.2f}] | "  # type: ignore[call-overload]
                f"{predicted:.2f} s |"
            )
    print("\n".join(lines))
    if not options.no_file:
        head = [
            "# A model larger than memory",
            "",
            f"`python benchmarks/serve/streamed.py`, {datetime.now(UTC):%Y-%m-%d}, {this_machine().model}, one thread, "
            f"on a machine that others used too: TinyLlama-1.1B's shape, {size >> 20} MiB of bfloat16, four decodes "
            f"an iteration, a disk that gives {rate / 1e9:.2f} GB/s past its caches (`gnomon calibrate`'s measure). "
            "Median [least, most] of iterations. Predicted: the longer of computing, as measured without a limit, and "
            "reading all of it past caches; what the system still has of the file is read faster.",
            "",
        ]
        RESULTS.write_text("\n".join([*head, *lines]) + "\n", encoding="utf-8")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
