"""Sentinel's migration between two tiers, simulated on models' own tensors: `python benchmarks/memory/sentinel.py`.

For each model, link and share of its peak memory as the fast tier: a step under Sentinel's plan, under least recently
used, and with a fixed placement, as ratios to a step with everything in the fast tier. The tensors are those of the
Program of one rank: parameters, gradients, optimizer states and saved activations, layer by layer, with predicted
seconds of each row. Then the same of a smaller model, carried out with files on this machine's disk, in turns. Writes
results/sentinel.md. Exits with 1 where another policy is faster than Sentinel's at 20 %. Left out: models that compute
(rows keep a core busy for their seconds); use of a tensor where it lies in the slow tier.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from platform import python_version

from gnomon.models.llama import LlamaConfig, llama
from gnomon.plans import Optimizer, Plan, Precision, Saved, Schedule, Workload
from gnomon.prediction.predict import TimedPlan
from gnomon.prediction.tensors import trace_of
from gnomon.runtime.step.disk_tier import carry_out, measured_link
from gnomon.simulate.two_tiers import Link, least_recently_used, plan_migration, static

RESULTS = Path(__file__).resolve().parents[1] / "results" / "sentinel.md"
GIB = 2**30
SHARES = (1.0, 0.8, 0.6, 0.4, 0.2)
LINKS = {"PCIe 4, 25 GB/s": Link(read=25e9, write=25e9), "NVLink-C2C, 400 GB/s": Link(read=400e9, write=400e9)}
CASES = (
    ("llama-2-7b", "1xa100-sxm-80gb", 16, 4096, "none"),
    ("llama-2-7b", "1xa100-sxm-80gb", 16, 4096, "full"),
    ("llama-2-13b", "1xh100-sxm", 32, 4096, "none"),
    ("mistral-7b", "1xh100-sxm", 16, 8192, "none"),
)
"""(model, device, sequences of a step, their length, what is recomputed)."""
POLICIES = {"Sentinel": plan_migration, "LRU": least_recently_used, "fixed": static}
SMALL = llama(
    LlamaConfig(
        name="llama-21m", num_layers=6, hidden_size=512, num_heads=8, num_kv_heads=8, head_dim=64, ffn_size=1408,
        vocab_size=2048,
    )
)  # fmt: skip
CARRIED = (
    "| fast MiB | share | policy | s | simulated | to LRU | simulated | MiB moved |",
    "|---|---|---|---|---|---|---|---|",
)


def carried(folder: Path, repeats: int) -> tuple[list[str], bool]:
    """Rows of the table of what ran here, and whether Sentinel's plan was the fastest at 20 %."""
    precision = Precision(param="fp32", compute="fp32", grad="fp32", reduce="fp32", master="none", states="fp32")
    plan = Plan(schedule=Schedule(micro_batch_size=2), optimizer=Optimizer(clip=False), precision=precision)
    work = Workload(global_batch_size=4, seq_len=256)
    trace = trace_of(TimedPlan.of(SMALL, "local:1", plan, work, by_layer=True).prediction())
    link, alone, rows, good = measured_link(folder), sum(trace.seconds), list[str](), True
    for share in (0.4, 0.2):
        capacity = share * trace.peak_bytes
        chosen = {name: policy(trace, link, capacity) for name, policy in POLICIES.items()}
        took: dict[str, list[float]] = {name: [] for name in chosen}
        for _ in range(repeats):
            for name, migration in chosen.items():
                result = carry_out(trace, migration, folder, capacity)
                good &= result.peak_bytes <= capacity + 1
                took[name].append(result.step_s)
        medians = {name: statistics.median(seconds) for name, seconds in took.items()}
        good &= share > 0.2 or min(medians, key=lambda name: medians[name]) == "Sentinel"
        for name, migration in chosen.items():
            cells = [f"{capacity / 2**20:.0f}", f"{share:.0%}", name, f"{medians[name]:.2f}", f"{migration.step_s:.2f}"]
            cells += [f"{medians[name] / medians['LRU']:.2f}", f"{migration.step_s / chosen['LRU'].step_s:.2f}"]
            rows.append(f"| {' | '.join(cells)} | {migration.moved_bytes / 2**20:.0f} |")
            print(rows[-1], flush=True)
    head = (
        f"A Llama of {SMALL.num_parameters() / 1e6:.0f}M parameters in fp32, whose rows take {alone:.2f} s together. "
        f"The disk reads {link.read / 1e9:.2f} and writes {link.write / 1e9:.2f} GB/s alone, in pieces of 32 MiB, "
        f"which is what is simulated with. A file for each tensor, on the disk before its memory is free; each "
        f"row checks that it has what was written last. Seconds of a step, the median of {repeats} in turns."
    )
    return [head, "", *CARRIED, *rows], good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="of each job that is carried out")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    parser.add_argument("--disk", type=Path, help="folder on the disk; default the system's for temporary files")
    options = parser.parse_args()
    rows, good = list[str](), True
    for name, device, batch, seq_len, preset in CASES:
        plan = Plan(schedule=Schedule(micro_batch_size=2), optimizer=Optimizer(clip=False), saved=Saved(preset=preset))
        work = Workload(global_batch_size=batch, seq_len=seq_len)
        trace = trace_of(TimedPlan.of(name, device, plan, work, by_layer=True).prediction())
        alone = sum(trace.seconds)
        for words, link in LINKS.items():
            for share in SHARES:
                capacity, began = share * trace.peak_bytes, time.process_time()
                plan_of = plan_migration(trace, link, capacity)
                took = time.process_time() - began
                lru, fixed = least_recently_used(trace, link, capacity), static(trace, link, capacity)
                good &= share > 0.2 or plan_of.step_s <= min(lru.step_s, fixed.step_s)
                good &= max(one.peak_bytes for one in (plan_of, lru, fixed)) <= capacity * (1 + 1e-9)
                steps = [f"{one.step_s / alone:.2f}" for one in (plan_of, lru, fixed)]
                moved = [f"{one.moved_bytes / GIB:.0f}" for one in (plan_of, lru)]
                chosen = [str(plan_of.interval), str(plan_of.ahead), f"{took:.1f}"]
                cells = [f"{name}, {preset}", words, f"{capacity / GIB:.0f}", f"{share:.0%}", *steps, *moved, *chosen]
                rows.append(f"| {' | '.join(cells)} |")
                print(rows[-1], flush=True)
    with tempfile.TemporaryDirectory(dir=options.disk) as folder:
        here, fast = carried(Path(folder), options.repeats)
    options.output.write_text(
        "\n".join(
            [
                "# Sentinel's migration between two tiers, simulated",
                "",
                f"`python benchmarks/memory/sentinel.py`, {datetime.now(UTC):%Y-%m-%d}, Python {python_version()}.",
                "",
                "A step as a ratio to one with everything in the fast tier, whose size is a share of the step's peak. "
                "Model and what is recomputed; one rank, bf16 with fp32 gradients and states, microbatches of 2. Peers "
                "in the same run: least recently used, and a fixed placement of the tensors that are used most. No "
                "policy is above the capacity. Rows: of an interval, as chosen; ahead: intervals read ahead. s: "
                "CPU-seconds of choosing.",
                "",
                "| model | link | fast GiB | share | Sentinel | LRU | fixed | GiB moved | by LRU | rows | ahead | s |",
                "|---|---|---|---|---|---|---|---|---|---|---|---|",
                *rows,
                "",
                "## Carried out on this machine",
                "",
                *here,
                "",
            ]
        )
    )
    return int(not (good and fast))


if __name__ == "__main__":
    sys.exit(main())
