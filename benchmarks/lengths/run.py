"""Sequences of several lengths as they run: speed of each way to make microbatches of them, and memory by length.

    python benchmarks/lengths/run.py speed [ROUNDS [CONTEXT [CSV COLUMN]]]   # tokens a CPU-second of each way
    python benchmarks/lengths/run.py real [ROUNDS [CONTEXT [CSV COLUMN]]]    # the same on lengths of real text alone
    python benchmarks/lengths/run.py peaks [LONGEST]    # ChunkFlow's peak from 2,048 tokens on
    python benchmarks/lengths/run.py cp [ROUNDS [CONTEXT]]        # Skrull beside every sequence divided, two processes

`speed` trains a small Llama in float32 on batches of one process: one long sequence among forty short ones, lengths
drawn as chats are (87 % under 1/8 of the context), and real text (`corpora`): 64 docstrings of Python's standard
library, and eight of the documents whose tokens a CSV has counted, each cut at the context (four times that for the
CSV's). Each way does the same step on the same tokens: transformers' own loop padded
and sorted, then Gnomon's runtime padded, sorted and padded, packed, and the plan that `plan_lengths` finds. Steps of
all ways take turns; CPU-seconds are compared, since other processes share the machine. What is found goes to
`results/lengths.md` by hand, with the date and the machine.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from corpora import column, docstrings, drawn, said
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from gnomon.graph import Graph
from gnomon.hardware import parse_cluster
from gnomon.methods import method
from gnomon.models.llama import LlamaConfig, llama
from gnomon.plans import Layout, Mesh, Pass, Plan, Precision, Schedule, Workload
from gnomon.prediction import predict
from gnomon.runtime import Executor
from gnomon.runtime.processes.launch import launch
from gnomon.search.questions.lengths import peers, plan_lengths
from gnomon.software import stack

FP32 = Precision(param="fp32", compute="fp32", grad="fp32", reduce="fp32", master="none")
CONFIG = LlamaConfig(
    name="small", num_layers=2, hidden_size=128, num_heads=4, num_kv_heads=2, head_dim=32, ffn_size=352, vocab_size=1024
)
THIN = replace(
    CONFIG, num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=1, head_dim=16, ffn_size=176, vocab_size=16384
)
"""Of the peaks: a sequence of 65,536 tokens takes two minutes."""
BUDGET_S = 5.0
"""CPU-seconds for a search."""
MICRO = 8
"""Sequences of a microbatch where it is a number of sequences."""
CHUNK = 2048


def chats(context: int, count: int, seed: int = 0) -> tuple[int, ...]:
    """Lengths of which the longest is the context, drawn as `benchmarks/memory/chunkflow.py` does."""
    rng, u = np.random.default_rng(seed), np.random.default_rng(seed + 1).random(count - 1)
    low = np.select([u < 0.8712, u < 0.9935], [context // 128, context // 8], context // 2)
    high = np.select([u < 0.8712, u < 0.9935], [context // 8, context // 2], context)
    return (context, *np.exp(rng.uniform(np.log(low), np.log(high))).astype(int).tolist())


def batches(context: int) -> Mapping[str, tuple[int, ...]]:
    """Lengths of the batches that are made up."""
    short = context // 64
    return {
        f"{context} x 1, {short} x 39": (short,) * 20 + (context,) + (short,) * 19,
        f"chats to {context}, 40": chats(context, 40),
    }


def real(context: int, counted: Sequence[str]) -> Mapping[str, tuple[int, ...]]:
    """Lengths of batches of real text. counted: a CSV and its column, or nothing."""
    found = {"docstrings": (docstrings(), 64, context)}
    if counted:
        found[Path(counted[0]).stem] = column(*counted), 8, 4 * context
    for name, (lengths, _, _) in found.items():
        print(f"{name}: {said(lengths)}", flush=True)
    return {f"{name}, {count} to {most}": drawn(lengths, count, most) for name, (lengths, count, most) in found.items()}


def tokens(lengths: Sequence[int], vocab: int) -> dict[str, Tensor]:
    """A batch of random ones."""
    ids = torch.randint(0, vocab, (sum(lengths) + 1,), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids[:-1], "labels": ids[1:], "lengths": torch.tensor(lengths)}


def planned(*passes: Pass, size: int = 1, mesh: Mesh = Mesh(), layout: Layout = Layout()) -> Plan:  # noqa: B008
    """Returns a plan in float32 with these passes."""
    return Plan(
        mesh=mesh, layout=layout, schedule=Schedule(micro_batch_size=size, passes=tuple(passes)), precision=FP32
    )


def theirs(lengths: Sequence[int], *, by_length: bool) -> Callable[[], None]:
    """A step of transformers' model on padded microbatches, as its Trainer makes them."""
    import transformers

    c = CONFIG
    config = transformers.LlamaConfig(
        hidden_size=c.hidden_size, num_hidden_layers=c.num_layers, num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads, intermediate_size=c.ffn_size, vocab_size=c.vocab_size,
        max_position_embeddings=max(lengths), use_cache=False,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    optimizer, batch = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), tokens(lengths, c.vocab_size)
    rows = list(zip(batch["input_ids"].split(list(lengths)), batch["labels"].split(list(lengths)), strict=True))
    if by_length:
        rows.sort(key=lambda row: -len(row[0]))

    def step() -> None:
        for first in range(0, len(rows), MICRO):
            some = rows[first : first + MICRO]
            ids, labels = (
                torch.nn.utils.rnn.pad_sequence([row[at] for row in some], batch_first=True, padding_value=-100 * at)
                for at in (0, 1)
            )
            logits = model(input_ids=ids, attention_mask=(labels != -100).long()).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            (loss / sum(lengths)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def ours(graph: Graph, plan: Plan, lengths: Sequence[int]) -> tuple[Executor, Callable[[], None]]:
    """A step of Gnomon's runtime."""
    vocab = next(dim.size for block in graph.blocks for dim in block.dims if dim.name == "vocab") or 0
    executor, batch = Executor(graph, plan, Workload(lengths=tuple(lengths))), tokens(lengths, vocab)

    def step() -> None:
        executor.step(batch)

    return executor, step


def in_turns(steps: Mapping[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Median CPU-seconds of a step of each."""
    took: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            began = time.process_time()
            step()
            if number:
                took[name].append(time.process_time() - began)
    return {name: median(seconds) for name, seconds in took.items()}


def _before(end: float) -> bool:
    return time.process_time() < end


def speed(rounds: int, given: Mapping[str, tuple[int, ...]]) -> None:
    """One table a batch."""
    graph, cluster = llama(CONFIG), parse_cluster("local")
    for batch, lengths in given.items():
        end = time.process_time() + BUDGET_S
        made = plan_lengths(
            graph, cluster, Workload(lengths=lengths), stack("gnomon"), methods=(*peers(), method("chunkflow")),
            base=planned(), keep_going=partial(_before, end),
        )  # fmt: skip
        way = made.ways[0]
        plans = {
            "padded": planned(Pass(name="padding"), size=MICRO),
            "sorted, padded": planned(Pass(name="group_by_length"), Pass(name="padding"), size=MICRO),
            "sorted": planned(Pass(name="group_by_length"), size=MICRO),
            "packed": planned(Pass(name="packing")),
            "batch order": planned(size=MICRO),
            f"found: {way.method or 'without a method'}": made.best.plan,
        }
        steps = {
            "transformers, padded": theirs(lengths, by_length=False),
            "transformers, sorted": theirs(lengths, by_length=True),
        }
        running = {name: ours(graph, plan, lengths) for name, plan in plans.items()}
        print(f"{batch}: {made.predicted} plans predicted", flush=True)
        took = in_turns(steps | {name: step for name, (_, step) in running.items()}, rounds)
        found = made.best.plan.schedule
        said = f"micro_batch_size {found.micro_batch_size} {found.passes}"
        print(f"{batch}: {sum(lengths):,} tokens, {rounds} rounds; found {said}", flush=True)
        for name, seconds in took.items():
            work = Workload(lengths=lengths)
            expected = predict(graph, cluster, plans[name], work, stack("gnomon")).step_s if name in plans else None
            told = "" if expected is None else f"  predicted {expected:6.2f} s"
            print(f"  {name:28} {seconds:6.2f} CPU-s  {sum(lengths) / seconds:8,.0f} tokens/CPU-s{told}", flush=True)
        for executor, _ in running.values():
            executor.leave()


def peaks(longest: int) -> None:
    """A line for each length: one sequence in chunks of CHUNK, one kept."""
    graph, first = llama(THIN), 0.0
    passes = (Pass(name="chunkflow", params=(("chunk_size", CHUNK), ("keep", 1))),)
    for size in (2**power for power in range(11, longest.bit_length())):
        executor, _ = ours(graph, planned(*passes), (size,))
        batch = tokens((size,), THIN.vocab_size)
        made = executor.measured_step(batch, memory=True)[1]
        assert made.memory is not None
        alive = _alive(lambda executor=executor, batch=batch: executor.step(batch))
        held = (
            made.memory.resident_bytes.sum() + np.cumsum(made.memory.change_bytes[np.argsort(made.memory.time_s)]).max()
        )
        first = first or alive
        print(f"{size:7,} tokens: between actions {held / 2**20:7.1f} MiB, peak {alive:7.1f} MiB, {alive / first:.3f}")
        executor.leave()


def _alive(step: Callable[[], Any]) -> float:
    """MiB of tensors at the fullest moment of a step: torch's allocations and frees as its profiler has them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    at = most = 0
    for event in profiled.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            at += event.nbytes()
            most = max(most, at)
    return most / 2**20


def divided(rounds: int, lengths: tuple[int, ...]) -> dict[str, tuple[float, float]]:
    """On each of two processes: (least seconds, median CPU-seconds of both) of a step of each plan, in turns."""
    graph, layout, longest = llama(CONFIG), Layout(context="ring"), max(lengths)
    passes = (Pass(name="skrull", params=(("capacity", longest + longest // 16),)),)
    plans = {
        "every sequence divided": planned(size=len(lengths), mesh=Mesh(cp=2), layout=layout),
        "skrull": planned(*passes, mesh=Mesh(cp=2), layout=layout),
    }
    running = {name: ours(graph, plan, lengths) for name, plan in plans.items()}
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in plans}
    for number in range(rounds + 1):
        for name, (_, step) in running.items():
            dist.barrier()
            began, cpu = time.perf_counter(), time.process_time()
            step()
            spent = torch.tensor(time.process_time() - cpu, dtype=torch.float64)
            dist.all_reduce(spent)
            if number:
                took[name].append((time.perf_counter() - began, float(spent)))
    for executor, _ in running.values():
        executor.leave()
    return {name: (min(w for w, _ in both), median(c for _, c in both)) for name, both in took.items()}


def main() -> None:
    """What the first argument names."""
    what, count = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0
    context = int(sys.argv[3]) if len(sys.argv) > 3 else 2048
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True)
    if what == "cp":
        made_up = f"{context} x 1, {context // 32} x 32", (context, *(context // 32,) * 32)
        for name, lengths in (made_up, *real(context, ()).items()):
            for way, (wall, cpu) in launch(divided, 2, count or 5, lengths)[0].items():
                print(f"{name}: {way:24} {wall:7.3f} s at best, {cpu:7.3f} CPU-s", flush=True)
        return
    with tempfile.TemporaryDirectory():
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        if what in ("speed", "real"):
            made_up = batches(context) if what == "speed" else {}
            speed(count or 3, {**made_up, **real(context, sys.argv[4:6])})
        else:
            peaks(count or 65536)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
