"""What the choices beyond the exact search gain: `gnomon plan --refine` on models, machines and stacks.

    python benchmarks/search/refine.py      # prints the table kept in results/refine.md

"Quick" is what `gnomon plan` does without a word, the rest is `--refine`.
Claim: the descent takes about as long as the search or less, never loses, and its gains are those of the choices named;
the quick one finds what is worth it in a fraction of the search's time.
All numbers are predictions of one version. Which gains a real run shows is not measured here.
"""

from __future__ import annotations

import statistics
import time

import gnomon
from gnomon.plans import Goal, Optimizer, Plan, Workload
from gnomon.search.refinement.choices import allowed, show_value
from gnomon.search.refinement.refine import QUICK, refine
from gnomon.software import stack

CASES = (
    ("llama-3.1-8b", "4x8xh100-sxm", 128, "torchtitan", (), None),
    ("llama-3.1-8b", "1x8xa100-sxm-80gb", 64, "pytorch-fsdp", (), None),
    ("llama-3.1-8b", "2x8xa100-sxm-40gb", 64, "deepspeed", (), None),
    ("llama-3.1-70b", "8x8xa100-sxm-80gb", 256, "megatron-lm", (), None),
    ("llama-3.1-70b", "4x8xh100-sxm", 64, "torchtitan", ("fp8",), None),
    ("llama-2-70b", "16x8xh100-sxm", 256, "nanotron", (), None),
    ("mixtral-8x7b", "4x8xh100-sxm", 128, "megatron-lm", (), None),
    ("gpt2-xl", "1x8xv100-sxm-32gb", 64, "megatron-deepspeed", (), None),
    ("llama-3.1-8b", "1x8xh100-sxm", 32, "deepspeed", (), 40 * 2**30),
)
"""(model, machines, sequences of a step, stack, allowed, bytes of a device that may be filled)."""


def main() -> None:
    """One row a case; the median and the worst gain."""
    names = "model machines stack search_core_s quick_core_s gain_% refine_core_s predictions gain_% by".split()
    print(f"| {' | '.join(name.replace('_', ' ') for name in names)} |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    gains = []
    for model, machines, batch, name, allow, memory in CASES:
        program, start = stack(name), time.process_time()
        length = 1024 if model.startswith("gpt2") else 4096
        base = Plan(optimizer=Optimizer(clip=False)) if name == "deepspeed" else None
        work = Workload(global_batch_size=batch, seq_len=length)
        result = gnomon.plan(model, machines, work, program, Goal(memory_bytes=memory), base=base)
        searched, start = time.process_time() - start, time.process_time()
        open_ = allowed(program, allow=allow, forbid=(), fixed=())
        quick = refine(result, choices=open_, effort=QUICK)
        hasty, start = time.process_time() - start, time.process_time()
        refined = refine(result, choices=open_)
        spent = time.process_time() - start
        gain = 1 - refined.best.step_s / result.best[0].step_s
        gains.append(gain)
        by = ", ".join(f"{s.choice.name} {show_value(s.choice, s.after)}" for s in refined.steps) or "nothing"
        little = f"{(1 - quick.best.step_s / result.best[0].step_s) * 100:.2f}"
        cells = (model, machines, name, f"{searched:.1f}", f"{hasty:.1f}", little)
        cells += (f"{spent:.1f}", f"{refined.tried}", f"{gain * 100:.2f}", by)
        print(f"| {' | '.join(cells)} |", flush=True)
    print(f"\nmedian gain {statistics.median(gains) * 100:.2f} %, least {min(gains) * 100:.2f} %")


if __name__ == "__main__":
    main()
