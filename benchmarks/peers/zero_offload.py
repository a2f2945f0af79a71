"""A step with the update on the host against DeepSpeed's ZeRO-Offload: `python benchmarks/peers/zero_offload.py`.

The same Llama in float32 on one process of this machine, one thread, the same tokens: `deepspeed.initialize` with
ZeRO 2 and `offload_optimizer` on its CPU accelerator (`DS_ACCELERATOR=cpu`, gloo), and Gnomon's runtime with
`optimizer.offload`. They take turns; seconds are CPU-seconds of the process, of which other work takes none. Losses
must agree. Writes results/zero_offload.md. No environment of this project has DeepSpeed: make one as `host_adam.py`
says, and run this with PYTHONPATH=src:tests in it; DeepSpeed builds two extensions at first.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29797"}
os.environ.update({"DS_ACCELERATOR": "cpu", **ALONE})

import deepspeed  # noqa: E402
import torch  # noqa: E402
from runtime.plain_llama import Llama  # noqa: E402
from torch import Tensor  # noqa: E402

import gnomon  # noqa: E402
from gnomon.models.llama import LlamaConfig, llama  # noqa: E402
from gnomon.plans import Offload, Optimizer, Plan, Precision, Schedule, Workload  # noqa: E402
from gnomon.runtime.optim.update import AdamWSettings  # noqa: E402

RESULTS = Path(__file__).resolve().parents[1] / "results" / "zero_offload.md"
CONFIG = LlamaConfig(
    name="llama-51m", num_layers=6, hidden_size=640, num_heads=10, num_kv_heads=10, head_dim=64, ffn_size=1792,
    vocab_size=16000,
)  # fmt: skip
FP32 = Precision(param="fp32", compute="fp32", grad="fp32", reduce="fp32", master="none", states="fp32")
SETTINGS = AdamWSettings(lr=3e-4, weight_decay=0.0, clip_norm=1.0)
SEED, WARM_UP = 3, 2


def deepspeed_step() -> Callable[[Tensor], float]:
    """A step of the engine."""
    s, model = SETTINGS, Llama(CONFIG, seed=SEED, dtype=torch.float32)
    adam = {"lr": s.lr, "betas": list(s.betas), "eps": s.eps, "weight_decay": s.weight_decay}
    given = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": s.clip_norm,
        "optimizer": {"type": "AdamW", "params": adam},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    }
    deepspeed.init_distributed(dist_backend="gloo")
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=given)

    def step(ids: Tensor) -> float:
        loss = engine(ids[:, :-1], ids[:, 1:]) / ids[:, 1:].numel()
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return step


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tables = []
    for batch, tokens in ((1, 32), (1, 64)):
        work = Workload(global_batch_size=batch, seq_len=tokens)
        plan = Plan(schedule=Schedule(num_microbatches=1), precision=FP32, optimizer=Optimizer(offload=Offload()))
        theirs = deepspeed_step()
        with gnomon.prepare(llama(CONFIG), plan, workload=work, seed=SEED, settings=SETTINGS) as job:
            sides = {"DeepSpeed ZeRO-Offload": theirs, "Gnomon, update on the host": job.step}
            spent: dict[str, list[float]] = {name: [] for name in sides}
            generator = torch.Generator().manual_seed(0)
            for number in range(options.rounds + WARM_UP):
                ids, losses = torch.randint(0, CONFIG.vocab_size, (batch, tokens + 1), generator=generator), []
                for name, step in sides.items():
                    began = time.process_time()
                    losses.append(float(step(ids)))
                    if number >= WARM_UP:
                        spent[name].append(time.process_time() - began)
                torch.testing.assert_close(losses[1], losses[0], rtol=2e-4, atol=0)
        first = spent["DeepSpeed ZeRO-Offload"]
        for name, seconds in spent.items():
            ratio = statistics.median(a / b for a, b in zip(seconds, first, strict=True))
            tables.append(f"| {batch} x {tokens} | {name} | {1e3 * statistics.median(seconds):.0f} | {ratio:.2f} |")
            print(tables[-1], flush=True)
    size = sum(p.numel() for p in Llama(CONFIG, seed=SEED, dtype=torch.float32).parameters())
    text = [
        "# A step with the update on the host",
        "",
        f"`python benchmarks/peers/zero_offload.py`, {datetime.now(UTC):%Y-%m-%d}, torch {torch.__version__}, "
        f"DeepSpeed {deepspeed.__version__} (ZeRO 2, `offload_optimizer`, CPU accelerator, gloo), a Llama of "
        f"{size / 1e6:.0f} M parameters in float32, one process, one thread, {options.rounds} steps each in turn, "
        "CPU-seconds. A ratio is the median of those of the steps; below 1 is faster than DeepSpeed. Losses agree to "
        "2e-4 at every step.",
        "",
        "| sequences x tokens | side | ms a step | ratio |",
        "|---|---|---|---|",
        *tables,
        "",
    ]
    options.output.write_text("\n".join(text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
