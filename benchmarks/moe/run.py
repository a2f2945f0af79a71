"""Mixtures of experts: how even FlexMoE keeps a drifting load, what a skewed step gains, and what gating spares.

    python benchmarks/moe/run.py                  # all of it
    python benchmarks/moe/run.py balance          # busiest over mean rows, step by step, of drifting Zipf loads
    python benchmarks/moe/run.py skewed [ROUNDS]  # a step of static experts, FlexMoE, rows sent ahead; two processes
    python benchmarks/moe/run.py gating [ROUNDS]  # adaptive gating: expert FLOPs and CPU-seconds by threshold
    python benchmarks/moe/run.py mixtral [ROUNDS] # a Mixtral's step beside Hugging Face's loop, one process

Steps of all ways take turns in the same processes, and CPU-seconds are compared, since other processes share the
machine; a step of several ranks takes as long as the rank with most of them. The skew is made by the embedding and the
router: a coordinate that is alike in all tokens, and router weights on it that give experts about Zipf's shares.
Predictions are of the catalogue's `cpu-process`; what one says of skew is the ratio of two steps. What is found goes to
`results/moe.md` by hand, with the date and the machine.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from statistics import mean, median

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from gnomon.control.placing import ROWS_ALONE, Look, imbalance, move
from gnomon.hardware import parse_cluster
from gnomon.models.mixtral import MixtralConfig, mixtral
from gnomon.plans import Experts, Mesh, Plan, Precision, RouterLoad, Schedule, Workload
from gnomon.plans.replicas import in_order
from gnomon.prediction import predict
from gnomon.runtime import AdamWSettings, Executor
from gnomon.runtime.processes.launch import launch
from gnomon.software import stack

FP32 = Precision(param="fp32", compute="fp32", grad="fp32", reduce="fp32", master="none")
CONFIG = MixtralConfig(
    name="small", num_layers=2, hidden_size=256, num_heads=4, num_kv_heads=2, head_dim=64, vocab_size=512,
    num_experts=8, experts_per_token=2, expert_ffn_size=512,
)  # fmt: skip
WORK = Workload(global_batch_size=8, seq_len=256)
STILL = AdamWSettings(lr=1e-9)
"""Too small to change where tokens go."""
S = 1.5
"""Exponent of the load's Zipf law."""
SETTLING = 6
"""First steps, in which experts move."""
DRIFTS = ((16, 4, 8), (64, 8, 16))
"""(experts, ranks, replicas)."""
LOADS, STEPS, SHOWN = 4, 42, (0, 1, 2, 5, 10, 19, 20, 30, 39, 40)
"""Loads that drift, steps of each, and those of the curve that are shown."""


def drifting(experts: int, steps: int, seed: int, tokens: int = 1 << 18) -> Iterator[tuple[int, ...]]:
    """Rows of each expert, step by step: Zipf's shares whose logits walk at random, and of which the largest and the
    smallest change places every twenty steps."""
    random = np.random.default_rng(seed)
    logits = -1.2 * np.log(random.permutation(experts) + 1.0)
    for step in range(steps):
        if step % 20 == 19:
            one, other = logits.argmax(), logits.argmin()
            logits[[one, other]] = logits[[other, one]]
        shares = np.exp(logits) / np.exp(logits).sum()
        yield tuple(random.multinomial(tokens, shares).tolist())
        logits = logits + 0.05 * random.standard_normal(experts)


def balance() -> None:
    """A line for each size of mixture: the curve, averaged over some loads."""
    for experts, ep, replicas in DRIFTS:
        static, flexible, moved, began = list[list[float]](), list[list[float]](), 0, time.process_time()
        for seed in range(LOADS):
            placement, plain = in_order(experts, replicas, ep), in_order(experts, 0, ep)
            static.append([])
            flexible.append([])
            for rows in drifting(experts, STEPS, seed):
                static[-1].append(imbalance(rows, plain, ep))
                flexible[-1].append(imbalance(rows, placement, ep))
                made = move(Look(placement=placement, rows=rows, steps=1), ep, ROWS_ALONE, horizon=10)
                placement, moved = made.placement, moved + len(made.slots)
        curve = np.mean(flexible, axis=0)
        first = max(next(step for step, load in enumerate(one) if load < 1.2) for one in flexible)
        worst = max(load for one in flexible for step, load in enumerate(one) if step >= 20 and step % 20 != 19)
        shown = ", ".join(f"{step}: {curve[step]:.2f}" for step in SHOWN)
        each = 1e3 * (time.process_time() - began) / (LOADS * STEPS)
        print(
            f"{experts} experts, ep {ep}, {replicas} replicas: static {np.mean(static):.2f}; FlexMoE by step {shown}; "
            f"below 1.2 from step {first} at the latest, {worst:.2f} at most from step 20 but for steps of a swap; "
            f"{moved / (LOADS * STEPS):.2f} slots a step, {each:.1f} ms a look",
            flush=True,
        )


def skew(executor: Executor, config: MixtralConfig, s: float = S) -> None:
    """Makes routers send tokens about by Zipf's shares, the largest first: of a normed row the first number is the root
    of half its width, alike in all tokens, and the others are drawn."""
    width = config.hidden_size
    strength = -s * torch.log(torch.arange(1, config.num_experts + 1, dtype=torch.float64))
    for held, _ in executor.parameters():
        for slot in held.slots:
            value, seed = held.value(slot.name), torch.Generator().manual_seed(len(slot.name))
            if slot.name.endswith("embed_tokens.weight"):
                value.normal_(generator=seed)
                value[:, 0] = width**0.5
            if slot.name.endswith("gate.weight"):
                value.normal_(std=(2 / width) ** 0.5, generator=seed)
                value[:, 0] = ((strength - strength.mean()) / (width / 2) ** 0.5).to(value.dtype)


def batch(config: MixtralConfig, work: Workload) -> Tensor:
    """Random ids."""
    shape = (work.batch_size, work.seq_len + 1)
    return torch.randint(0, config.vocab_size, shape, generator=torch.Generator().manual_seed(0))


def ways() -> Mapping[str, Plan]:
    """Plans of two processes."""
    static = Plan(mesh=Mesh(dp_shard=2, ep=2), schedule=Schedule(micro_batch_size=4), precision=FP32)
    return {
        "static": static,
        "static, sent ahead": replace(static, experts=Experts(speculate=True)),
        "FlexMoE": replace(static, experts=Experts(replicas=4, rebalance_every=2)),
    }


BALANCED = "static, balanced"


def of_two(rounds: int) -> dict[str, tuple[float, float, float, list[float]]]:
    """On each process: (median over steps of most CPU-seconds of a rank, of seconds, rows of the busiest over the mean,
    shares of experts) of each way, in turns."""
    torch.set_num_threads(1)
    running, given = {}, batch(CONFIG, WORK)
    counts = {}
    for name, plan in {**ways(), BALANCED: ways()["static"]}.items():
        running[name] = Executor(mixtral(CONFIG), plan, WORK, settings=STILL)
        skew(running[name], CONFIG, 0.0 if name == BALANCED else S)
        seen = counts[name] = torch.zeros(CONFIG.num_experts, dtype=torch.int64)
        running[name].compute.routed = lambda layer, indices, seen=seen: seen.add_(
            torch.bincount(indices.reshape(-1), minlength=len(seen))
        )
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in running}
    for number in range(rounds + SETTLING):
        for name, executor in running.items():
            dist.barrier()
            began, cpu = time.perf_counter(), time.process_time()
            executor.step(given)
            spent = torch.tensor(time.process_time() - cpu, dtype=torch.float64)
            dist.all_reduce(spent, op=dist.ReduceOp.MAX)
            if number >= SETTLING:
                took[name].append((float(spent), time.perf_counter() - began))
    found = {}
    for name, executor in running.items():
        dist.all_reduce(counts[name])
        rows, replicas = counts[name].tolist(), executor.state.replicas
        placement = in_order(8, 0, 2) if replicas is None else next(iter(replicas.placements.values()))
        seconds = [median(values) for values in zip(*took[name], strict=True)]
        found[name] = (*seconds, imbalance(rows, placement, 2), [n / sum(rows) for n in rows])
        executor.leave()
    return found


def skewed(rounds: int) -> None:
    """A line for each way, and what is predicted of it."""
    found = launch(of_two, 2, rounds)[0]
    print("shares of experts: " + " ".join(f"{share:.3f}" for share in found["static"][3]), flush=True)
    graph, cluster, own = mixtral(CONFIG), parse_cluster("2xcpu-process"), stack("gnomon")
    base, expected = found["static"], {}
    for name, plan in {**ways(), BALANCED: ways()["static"]}.items():
        load = RouterLoad(kind="histogram", counts=tuple(found[name][3]))
        expected[name] = predict(graph, cluster, plan, replace(WORK, router=load), own).step_s
    for name, (cpu, wall, busiest, _) in found.items():
        print(
            f"{name:20} {cpu:.3f} CPU-s of the busiest rank ({cpu / base[0]:.2f} of static), {wall:.3f} s; busiest "
            f"{busiest:.2f} times the mean; predicted {expected[name] / expected['static']:.2f} of static",
            flush=True,
        )
    measured, said = base[0] / found[BALANCED][0], expected["static"] / expected[BALANCED]
    print(f"skew makes the static step {measured:.2f} times as long, predicted {said:.2f} ({said / measured - 1:+.0%})")


def gating(rounds: int) -> None:
    """A line for each threshold, of a router as it begins."""
    given = batch(CONFIG, WORK)
    for threshold in (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 1.0):
        plan = Plan(schedule=Schedule(micro_batch_size=8), precision=FP32, experts=Experts(threshold=threshold))
        executor = Executor(mixtral(CONFIG), plan, WORK, settings=STILL)
        skew(executor, CONFIG, 0.5)
        rows: list[int] = []
        executor.compute.routed = lambda layer, indices, rows=rows: rows.append(indices.numel())
        took = []
        for _ in range(rounds + 1):
            began = time.process_time()
            executor.step(given)
            took.append(time.process_time() - began)
        tokens = WORK.batch_size * WORK.seq_len
        second = mean(rows) / tokens - 1
        each = 6 * 3 * CONFIG.hidden_size * CONFIG.expert_ffn_size
        print(
            f"T = {threshold:4.2f}: {second:6.1%} of tokens have two experts; {(1 + second) * each / 1e6:.2f} MFLOP a "
            f"token and layer in experts, {(1 + second) / 2:.2f} of top-2's; {median(took[1:]):.3f} CPU-s a step",
            flush=True,
        )
        executor.leave()


def theirs(config: MixtralConfig, work: Workload, experts: str) -> Callable[[], None]:
    """A step of transformers' model. experts: `eager`, its loop over them; `grouped_mm`, torch's grouped product."""
    import transformers

    made = transformers.MixtralConfig(
        hidden_size=config.hidden_size, num_hidden_layers=config.num_layers, num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads, head_dim=config.head_dim, intermediate_size=config.expert_ffn_size,
        vocab_size=config.vocab_size, num_local_experts=config.num_experts,
        num_experts_per_tok=config.experts_per_token, use_cache=False,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(
        made, attn_implementation="sdpa", experts_implementation=experts
    ).train()
    optimizer, given = torch.optim.AdamW(model.parameters(), lr=1e-9, fused=True), batch(config, work)

    def step() -> None:
        loss = model(input_ids=given[:, :-1], labels=given[:, :-1]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def against(rounds: int) -> None:
    """A line for each size of Mixtral."""
    sizes = {
        "8 experts of 512": CONFIG,
        "32 experts of 128": replace(CONFIG, num_experts=32, expert_ffn_size=128, experts_per_token=4),
        "64 experts of 256": replace(CONFIG, num_experts=64, expert_ffn_size=256, experts_per_token=2),
    }
    for name, config in sizes.items():
        plan = Plan(schedule=Schedule(micro_batch_size=8), precision=FP32)
        executor, given = Executor(mixtral(config), plan, WORK, settings=STILL), batch(config, WORK)
        steps = {
            "transformers' loop": theirs(config, WORK, "eager"),
            "transformers, grouped": theirs(config, WORK, "grouped_mm"),
            "gnomon": lambda e=executor, g=given: e.step(g),
        }
        took: dict[str, list[float]] = {way: [] for way in steps}
        for number in range(rounds + 1):
            for way, step in steps.items():
                began = time.process_time()
                step()
                if number:
                    took[way].append(time.process_time() - began)
        for way, seconds in took.items():
            ratios = sorted(a / b for a, b in zip(seconds, took["gnomon"], strict=True))
            print(
                f"{name}, {way}: {median(seconds):.3f} CPU-s a step, {median(ratios):.2f} times gnomon's "
                f"({ratios[0]:.2f} to {ratios[-1]:.2f})",
                flush=True,
            )
        executor.leave()


def main() -> None:
    """What the first argument names, or all."""
    what, count = sys.argv[1] if len(sys.argv) > 1 else "all", int(sys.argv[2]) if len(sys.argv) > 2 else 8
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True)
    if what in ("all", "balance"):
        balance()
    if what in ("all", "skewed"):
        skewed(count)
    if what in ("all", "gating", "mixtral"):
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        if what != "mixtral":
            gating(count)
        if what != "gating":
            against(count)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
