"""Plans that must train as the plain model does, and what runs them: imported by the tests and by their processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from runtime.plain_llama import Llama
from torch import Tensor

from gnomon import orders
from gnomon.lowering import lower
from gnomon.methods.mario import apply_checkpoint
from gnomon.models.llama import LlamaConfig, llama
from gnomon.plans import (
    Layout,
    Mesh,
    Offload,
    Optimizer,
    Overlap,
    Pass,
    Plan,
    Precision,
    Saved,
    SavedRule,
    Schedule,
    Split,
    Stage,
    Workload,
)
from gnomon.program import Program
from gnomon.runtime import AdamWSettings, Executor, Parameters, Update

FP64 = Precision(param="fp64", compute="fp64", grad="fp64", reduce="fp64", master="none", states="fp64")
FP32 = Precision(param="fp32", compute="fp32", grad="fp32", reduce="fp32", master="none", states="fp32")
CONFIG = LlamaConfig(
    name="small",
    num_layers=5,
    hidden_size=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    ffn_size=24,
    vocab_size=32,
)
WORKLOAD = Workload(global_batch_size=8, seq_len=6)
SETTINGS = AdamWSettings(lr=3e-2, clip_norm=0.4)
STEPS = 2
"""The second shows the first update; parameters at the end show the second one, whose states are of two steps."""


def schedule(name: str, microbatches: int = 4, **more: object) -> Schedule:
    return Schedule(name=name, num_microbatches=microbatches, **more)  # type: ignore[arg-type]


def v(name: str) -> Schedule:
    return schedule(name, virtual_stages=2, placement="v")


def uneven(how: Schedule, *stages: tuple[Mesh, tuple[int, ...]], zero: Literal[0, 1, 2, 3] = 0) -> Plan:
    """A plan whose one or two stages have these meshes and shares of each microbatch."""
    calls = (("*",),) if len(stages) == 1 else (("embed", "layers[0:2]"), ("layers[2:5]", "head"))
    made = (Stage(calls=c, mesh=mesh, shares=shares) for c, (mesh, shares) in zip(calls, stages, strict=True))
    return Plan(stages=tuple(made), schedule=how, optimizer=Optimizer(zero=zero))


def dapple(*stages: tuple[int, str]) -> Plan:
    """A plan of DAPPLE's planner, with its second warm-up: (layers, ranks) of each stage."""
    ends = [sum(layers for layers, _ in stages[: i + 1]) for i in range(len(stages))]
    made = tuple(
        Stage(
            calls=(
                *(("embed",) if end == layers else ()),
                f"layers[{end - layers}:{end}]",
                *(("head",) if end == ends[-1] else ()),
            ),
            mesh=Mesh(dp_shard=len(ranks.split(","))),
            devices=ranks,
        )
        for end, (layers, ranks) in zip(ends, stages, strict=True)
    )
    return Plan(stages=made, schedule=schedule("one_f_one_b", passes=(TWICE,)))


def rounds(name: str, layers: tuple[int, ...], *ranks: tuple[Mesh, str]) -> Plan:
    """Several stages on each pipeline rank, whose meshes differ: (mesh, ranks) of each stage."""
    ends = [sum(layers[: i + 1]) for i in range(len(layers))]
    made = tuple(
        Stage(
            calls=(
                *(("embed",) if end == count else ()),
                f"layers[{end - count}:{end}]",
                *(("head",) if end == ends[-1] else ()),
            ),
            mesh=mesh,
            devices=devices,
        )
        for end, count, (mesh, devices) in zip(ends, layers, ranks, strict=True)
    )
    return Plan(stages=made, schedule=schedule(name))


TWO, ALONE = (Mesh(dp_replicate=2), "0,1"), (Mesh(), "2")
"""Pipeline ranks of two replicas, and of one."""
TWICE = Pass(name="dapple_warmup", params=(("policy", "2p"),))
SP = Layout(sequence_parallel=True)


def cut(tp: int) -> Overlap:
    """Linears beside a collective of tp in as many parts as ranks."""
    return Overlap(splits=(Split(op="*", dim="seq", parts=tp),))


FULL = Saved(preset="full")
WAITING = Overlap(pipeline_sends=False)
BUCKETS = Overlap(bucket_bytes=9000)
"""One or two layers each, in float32."""
UNEVEN = (3, 1, 1, 2)
"""Layers of each bucket, embedding and head counted."""
FUSED = (1, 2, 1, 1, 2)
"""Layers of each action."""
BY_STAGE = Saved(
    rules=(
        SavedRule(stages=(0,), preset="selective"),
        SavedRule(stages=(0,), first_per_stage=2, preset="full"),
    )
)
PLANS: dict[str, Plan] = {
    "one device": Plan(schedule=schedule("one_f_one_b")),
    "one device, full recompute": Plan(schedule=schedule("one_f_one_b"), saved=FULL),
    "one device, selective recompute": Plan(schedule=schedule("gpipe"), saved=Saved(preset="selective")),
    "dp": Plan(mesh=Mesh(dp_replicate=2), schedule=schedule("one_f_one_b")),
    "dp, buckets": Plan(mesh=Mesh(dp_replicate=2), schedule=schedule("one_f_one_b"), overlap=BUCKETS),
    "dp, uneven buckets": Plan(
        mesh=Mesh(dp_replicate=2), schedule=schedule("one_f_one_b"), overlap=Overlap(buckets=UNEVEN)
    ),
    "dp, fused": Plan(
        mesh=Mesh(dp_replicate=2), schedule=schedule("one_f_one_b"), overlap=Overlap(buckets=UNEVEN, fused=FUSED)
    ),
    "pp and dp, fused": Plan(
        mesh=Mesh(pp=2, dp_replicate=2),
        schedule=schedule("zero_bubble_h1"),
        overlap=Overlap(buckets=(4, 3), fused=(1, 3, 1, 2)),
    ),
    "zero 2, fused": Plan(
        mesh=Mesh(dp_shard=2),
        schedule=schedule("one_f_one_b"),
        optimizer=Optimizer(zero=2),
        overlap=Overlap(fused=UNEVEN),
    ),
    "pp and dp, buckets": Plan(
        mesh=Mesh(pp=2, dp_replicate=2), schedule=schedule("interleaved_one_f_one_b", virtual_stages=2), overlap=BUCKETS
    ),
    "tp and dp, buckets": Plan(
        mesh=Mesh(dp_replicate=2, tp=2), schedule=schedule("zero_bubble_h1", 2), overlap=BUCKETS, layout=SP
    ),
    "zero 1": Plan(mesh=Mesh(dp_shard=2), schedule=schedule("one_f_one_b"), optimizer=Optimizer(zero=1)),
    "zero 2": Plan(mesh=Mesh(dp_shard=2), schedule=schedule("one_f_one_b"), optimizer=Optimizer(zero=2)),
    "zero 3": Plan(mesh=Mesh(dp_shard=2), schedule=schedule("one_f_one_b"), optimizer=Optimizer(zero=3)),
    "zero 1, buckets": Plan(
        mesh=Mesh(dp_shard=2), schedule=schedule("one_f_one_b"), optimizer=Optimizer(zero=1), overlap=BUCKETS
    ),
    "zero 2, buckets": Plan(
        mesh=Mesh(dp_shard=2), schedule=schedule("one_f_one_b"), optimizer=Optimizer(zero=2), overlap=BUCKETS
    ),
    "dp 2, shard 2, zero 1, buckets": Plan(
        mesh=Mesh(dp_replicate=2, dp_shard=2), schedule=schedule("one_f_one_b", 2), optimizer=Optimizer(zero=1),
        overlap=BUCKETS,
    ),
    "pp and zero 2, buckets": Plan(
        mesh=Mesh(pp=2, dp_shard=2), schedule=schedule("interleaved_zero_bubble", virtual_stages=2),
        optimizer=Optimizer(zero=2), overlap=BUCKETS,
    ),
    "zero 2, update on the host": Plan(
        mesh=Mesh(dp_shard=2), schedule=schedule("one_f_one_b"), optimizer=Optimizer(zero=2, offload=Offload())
    ),
    "dp, buckets, update on the host": Plan(
        mesh=Mesh(dp_replicate=2), schedule=schedule("one_f_one_b"), overlap=BUCKETS,
        optimizer=Optimizer(offload=Offload(tiles=2)),
    ),
    "zero 2, fused, update on the host": Plan(
        mesh=Mesh(dp_shard=2), schedule=schedule("one_f_one_b"), overlap=Overlap(fused=UNEVEN),
        optimizer=Optimizer(zero=2, offload=Offload()),
    ),
    "pp and zero 1, buckets, update on the host": Plan(
        mesh=Mesh(pp=2, dp_shard=2), schedule=schedule("zero_bubble_h1"), overlap=BUCKETS,
        optimizer=Optimizer(zero=1, offload=Offload()),
    ),
    "zero 3, update on the host": Plan(
        mesh=Mesh(dp_shard=2), schedule=schedule("one_f_one_b", 2), optimizer=Optimizer(zero=3, offload=Offload())
    ),
    "1f1b, part of the update on the host": Plan(
        mesh=Mesh(pp=2), schedule=schedule("one_f_one_b"), optimizer=Optimizer(offload=Offload(fraction=0.5))
    ),
    "zero 3, recompute": Plan(
        mesh=Mesh(dp_shard=2), schedule=schedule("one_f_one_b", 2), optimizer=Optimizer(zero=3), saved=FULL
    ),
    "tp": Plan(mesh=Mesh(tp=2), schedule=schedule("one_f_one_b", 2)),
    "tp and sp": Plan(mesh=Mesh(tp=2), schedule=schedule("one_f_one_b", 2), layout=SP),
    "tp and sp, whole vocabulary": Plan(
        mesh=Mesh(tp=2), schedule=schedule("one_f_one_b", 2), layout=replace(SP, vocab_parallel=False)
    ),
    "tp and sp, cut": Plan(mesh=Mesh(tp=2), schedule=schedule("one_f_one_b", 2), layout=SP, overlap=cut(2)),
    "pp, tp and sp, cut, split backward": Plan(
        mesh=Mesh(pp=2, tp=2), schedule=schedule("zero_bubble_h1", 2), layout=replace(SP, keep_gathered=True),
        overlap=cut(2),
    ),
    "tp, sp and zero 3, cut, recompute": Plan(
        mesh=Mesh(dp_shard=2, tp=2), schedule=schedule("one_f_one_b", 2), layout=SP, optimizer=Optimizer(zero=3),
        overlap=cut(2), saved=FULL,
    ),
    "tp, whole vocabulary": Plan(
        mesh=Mesh(tp=2), schedule=schedule("one_f_one_b", 2), layout=Layout(vocab_parallel=False)
    ),
    "tp and sp, gathered logits": Plan(
        mesh=Mesh(tp=2), schedule=schedule("one_f_one_b", 2), layout=replace(SP, loss_parallel=False)
    ),
    "tp and sp, gathered kept, recompute": Plan(
        mesh=Mesh(tp=2),
        schedule=schedule("one_f_one_b", 2),
        layout=replace(SP, keep_gathered=True),
        saved=FULL,
    ),
    "cp, gathered": Plan(
        mesh=Mesh(cp=2), schedule=schedule("one_f_one_b", 2),
        layout=Layout(context="all_gather", context_order="contiguous"),
    ),
    "cp, ulysses": Plan(
        mesh=Mesh(cp=2), schedule=schedule("one_f_one_b", 2),
        layout=Layout(context="ulysses", context_order="contiguous"),
    ),
    "1f1b": Plan(mesh=Mesh(pp=2), schedule=schedule("one_f_one_b")),
    "1f1b, recompute by two": Plan(
        mesh=Mesh(pp=2), schedule=schedule("one_f_one_b"), saved=Saved(preset="full", every=2)
    ),
    "1f1b, uneven, recompute by stage": Plan(
        mesh=Mesh(pp=2), schedule=schedule("one_f_one_b", layers_per_stage=(4, 1)), saved=BY_STAGE
    ),
    "v half, uneven, recompute by stage": Plan(
        mesh=Mesh(pp=2), schedule=replace(v("v_half"), layers_per_stage=(2, 1, 2, 0)), saved=BY_STAGE
    ),
    "gpipe": Plan(mesh=Mesh(pp=2), schedule=schedule("gpipe")),
    "1f1b, sends waited for": Plan(mesh=Mesh(pp=2), schedule=schedule("one_f_one_b"), overlap=WAITING),
    "interleaved, sends waited for": Plan(
        mesh=Mesh(pp=2), schedule=schedule("interleaved_one_f_one_b", virtual_stages=2), overlap=WAITING
    ),
    "zero bubble v, sends waited for": Plan(mesh=Mesh(pp=2), schedule=v("zero_bubble_v"), overlap=WAITING),
    "interleaved": Plan(mesh=Mesh(pp=2), schedule=schedule("interleaved_one_f_one_b", virtual_stages=2)),
    "zero bubble h1": Plan(mesh=Mesh(pp=2), schedule=schedule("zero_bubble_h1")),
    "zero bubble h1, recompute": Plan(mesh=Mesh(pp=2), schedule=schedule("zero_bubble_h1"), saved=FULL),
    "zero bubble v": Plan(mesh=Mesh(pp=2), schedule=v("zero_bubble_v")),
    "v half": Plan(mesh=Mesh(pp=2), schedule=v("v_half")),
    "v min": Plan(mesh=Mesh(pp=2), schedule=v("v_min")),
    "dualpipe v": Plan(mesh=Mesh(pp=2), schedule=v("dualpipe_v")),
    "looped bfs": Plan(mesh=Mesh(pp=2), schedule=schedule("looped_bfs", virtual_stages=2)),
    "zero bubble h2": Plan(mesh=Mesh(pp=2), schedule=schedule("zero_bubble_h2")),
    "interleaved zero bubble": Plan(
        mesh=Mesh(pp=2), schedule=schedule("interleaved_zero_bubble", virtual_stages=2)
    ),
    "pp 4, h2": Plan(mesh=Mesh(pp=4), schedule=schedule("zero_bubble_h2", 8)),
    "dp 2, shard 2": Plan(
        mesh=Mesh(dp_replicate=2, dp_shard=2), schedule=schedule("one_f_one_b", 2), optimizer=Optimizer(zero=3)
    ),
    "tp 4: two ranks a key head": Plan(mesh=Mesh(tp=4), schedule=schedule("one_f_one_b", 2)),
    "pp and dp": Plan(mesh=Mesh(pp=2, dp_replicate=2), schedule=schedule("one_f_one_b")),
    "pp and zero 1": Plan(
        mesh=Mesh(pp=2, dp_shard=2), schedule=schedule("interleaved_one_f_one_b", virtual_stages=2),
        optimizer=Optimizer(zero=1),
    ),
    "pp and zero 3": Plan(
        mesh=Mesh(pp=2, dp_shard=2), schedule=schedule("one_f_one_b"), optimizer=Optimizer(zero=3)
    ),
    "looped bfs and zero 3, recompute": Plan(
        mesh=Mesh(pp=2, dp_shard=2), schedule=schedule("looped_bfs", virtual_stages=2),
        optimizer=Optimizer(zero=3), saved=FULL,
    ),
    "v min and zero 2": Plan(mesh=Mesh(pp=2, dp_shard=2), schedule=v("v_min"), optimizer=Optimizer(zero=2)),
    "interleaved zero bubble, tp and sp": Plan(
        mesh=Mesh(pp=2, tp=2), schedule=schedule("interleaved_zero_bubble", virtual_stages=2), layout=SP
    ),
    "pp and tp": Plan(mesh=Mesh(pp=2, tp=2), schedule=schedule("zero_bubble_h1")),
    "pp, tp and sp, v": Plan(mesh=Mesh(pp=2, tp=2), schedule=v("zero_bubble_v"), layout=SP),
    "tp, sp and zero 3": Plan(
        mesh=Mesh(dp_shard=2, tp=2), schedule=schedule("one_f_one_b", 2), layout=SP, optimizer=Optimizer(zero=3)
    ),
    "dualpipe v and dp, recompute": Plan(mesh=Mesh(pp=2, dp_replicate=2), schedule=v("dualpipe_v"), saved=FULL),
    "shares 3 : 1": uneven(schedule("one_f_one_b", 2), (Mesh(dp_replicate=2), (3, 1))),
    "shares 3 : 1, buckets": replace(
        uneven(schedule("one_f_one_b", 2), (Mesh(dp_replicate=2), (3, 1))), overlap=BUCKETS
    ),
    "shares 1 : 3, zero 1, buckets": replace(
        uneven(schedule("one_f_one_b", 2), (Mesh(dp_shard=2), (1, 3)), zero=1), overlap=BUCKETS
    ),
    "shares 1 : 3, zero 1": uneven(schedule("one_f_one_b", 2), (Mesh(dp_shard=2), (1, 3)), zero=1),
    "shares 3 : 1, zero 3": uneven(schedule("one_f_one_b", 2), (Mesh(dp_shard=2), (3, 1)), zero=3),
    "shares 3 : 1 and 1 : 3": uneven(
        schedule("one_f_one_b", 2), (Mesh(dp_shard=2), (3, 1)), (Mesh(dp_shard=2), (1, 3)), zero=1
    ),
    "3 replicas to 1": uneven(schedule("one_f_one_b", 2), (Mesh(dp_replicate=3), (2, 1, 1)), (Mesh(), ())),
    "1 replica to 3, zero bubble h1": uneven(
        schedule("zero_bubble_h1", 2), (Mesh(), ()), (Mesh(dp_replicate=3), (1, 2, 1))
    ),
    "shares 3 : 1 and 1 : 3, zero 3": uneven(
        schedule("gpipe", 2), (Mesh(dp_shard=2), (3, 1)), (Mesh(dp_shard=2), (1, 3)), zero=3
    ),
    "dp 2 to tp 2": uneven(schedule("one_f_one_b", 2), (Mesh(dp_replicate=2), (3, 1)), (Mesh(tp=2), ())),
    "tp 2 to dp 2, recompute": replace(
        uneven(schedule("one_f_one_b", 4), (Mesh(tp=2), ()), (Mesh(dp_replicate=2), ())), saved=FULL
    ),
    "dapple 2 : 1, scattered": dapple((3, "0,2"), (2, "1")),
    "dapple 1 : 2 : 1, scattered": dapple((1, "3"), (3, "0,2"), (1, "1")),
    "interleaved, 2 replicas and 1": rounds("interleaved_one_f_one_b", (1, 1, 2, 1), TWO, ALONE, TWO, ALONE),
    "interleaved zero bubble, tp 2 and 1": rounds(
        "interleaved_zero_bubble", (1, 2, 1, 1), *((Mesh(tp=2), "0,1"), ALONE) * 2
    ),
    "zero bubble v, 2 replicas and 1": rounds("zero_bubble_v", (2, 1, 1, 1), TWO, ALONE, ALONE, TWO),
    "v half, 1 replica and 2": rounds(
        "v_half", (1, 2, 1, 1), (Mesh(), "0"), (Mesh(dp_replicate=2), "1,2"), (Mesh(dp_replicate=2), "1,2"),
        (Mesh(), "0"),
    ),
}  # fmt: skip
REWRITTEN = {"1f1b": ("1f1b, recompute as actions", apply_checkpoint)}
"""Plans that also run with their Program rewritten: a name for it, and the pass."""
BITWISE = [
    ("one device", "one device, full recompute"),
    ("one device", "one device, selective recompute"),
    ("zero bubble h1", "zero bubble h1, recompute"),
    ("1f1b", "1f1b, recompute by two"),
    ("1f1b", "1f1b, recompute as actions"),
    ("1f1b", "gpipe"),
    ("dp", "dp, buckets"),
    ("dp", "dp, uneven buckets"),
    ("dp", "dp, fused"),
]
"""Pairs whose additions are the same, in the same order."""
VARIED = replace(CONFIG, qk_norm=True, qkv_bias=True, num_kv_heads=4, vocab_size=40)
"""Another model: norms on heads, biases, as many key heads as query heads."""
VARIANTS = frozenset({"tp and sp", "zero 3", "pp, tp and sp, v"})
"""Plans that are also tried with it."""
TIED = frozenset(
    {
        "one device", "1f1b", "tp", "pp and dp", "pp and tp", "zero bubble h1", "zero 1", "zero 2", "zero 3",
        "zero bubble v", "v half", "v min", "dualpipe v", "interleaved", "dp 2, shard 2", "pp and zero 1",
        "pp and zero 3", "looped bfs and zero 3, recompute", "v min and zero 2", "tp, sp and zero 3",
        "pp, tp and sp, v", "dualpipe v and dp, recompute", "dp, buckets", "dp, fused", "zero 2, buckets",
    }
)  # fmt: skip
"""Plans that are also tried with the embedding as head."""


SCHEDULES = frozenset(orders.names())
"""Every schedule that trains; each is in some plan."""


def batch(step: int) -> Tensor:
    """Token ids of a step."""
    return token_ids(step, CONFIG, WORKLOAD)


def token_ids(step: int, config: LlamaConfig, workload: Workload) -> Tensor:
    """Those of a step of some model and batch."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(0, config.vocab_size, (workload.global_batch_size, workload.seq_len + 1), generator=generator)


Curve = list[tuple[float, float]]
"""(loss, gradient norm) of each step."""


def plain(
    config: LlamaConfig, dtype: torch.dtype = torch.float64, steps: int = STEPS
) -> tuple[Curve, dict[str, Tensor]]:
    """The plain model on torch's own autograd, AdamW and clipping: curve and final parameters."""
    curve, model = [], Llama(config, seed=7, dtype=dtype)
    for loss, norm, _ in plain_steps(model, steps):
        curve.append((loss, norm))
    return curve, {name: p.detach() for name, p in model.named_parameters()}


Step = tuple[float, float, dict[str, NDArray[np.floating[Any]]]]
"""(loss, gradient norm, gradients before clipping) of a step."""


def plain_steps(model: Llama, steps: int = STEPS) -> Iterator[Step]:
    """Of each step on the batches that plans train on."""
    return trained(model, [batch(step) for step in range(steps)], SETTINGS)


def trained(model: Llama, batches: Iterable[Tensor], settings: AdamWSettings) -> Iterator[Step]:
    """Each step of torch's own autograd, AdamW and clipping."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps)
    for ids in batches:
        adam.zero_grad()
        loss = model(ids[:, :-1], ids[:, 1:]) / ids[:, 1:].numel()
        loss.backward()
        grads = {name: p.grad.flatten().numpy().copy() for name, p in model.named_parameters() if p.grad is not None}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm)
        adam.step()
        yield loss.item(), norm.item(), grads


def plain_gradients() -> list[tuple[float, dict[str, NDArray[np.floating[Any]]]]]:
    """(norm, gradients) of each step of the plain model in float32."""
    return [(norm, grads) for _, norm, grads in plain_steps(Llama(CONFIG, seed=7, dtype=torch.float32))]


Part = dict[str, tuple[int, NDArray[np.floating[Any]]]]
"""Parameter -> (first element within the local parameter, elements)."""


def config_of(name: str) -> LlamaConfig:
    """`NAME, tied` and `NAME, varied` are other models."""
    if name.endswith(", varied"):
        return VARIED
    return replace(CONFIG, tied=name.endswith(", tied"))


def train(
    plan: Plan, config: LlamaConfig = CONFIG, rewrite: Callable[[Program], Program] | None = None
) -> tuple[Curve, Part]:
    """One rank of a plan: curve and this rank's part of the final parameters."""
    plan = replace(plan, precision=FP64)
    program = rewrite(lower(llama(config), plan, None, WORKLOAD)) if rewrite else None
    executor = Executor(llama(config), plan, WORKLOAD, seed=7, settings=SETTINGS, program=program)
    curve = []
    for step in range(STEPS):
        result = executor.step(batch(step))
        curve.append((executor.total_loss(result), float(result.grad_norm)))
    executor.synchronise()
    shards: Part = {}
    for held, _ in executor.parameters():
        for slot, (low, high) in held.pieces():
            shards[slot.name] = (held.mine[0] + low - slot.start, held.shard[low:high].numpy().copy())
    assert not executor.buffers.tensors and not executor.compute.saved and not executor.compute.aside
    executor.leave()
    return curve, shards


def float32(plan: Plan) -> Executor:
    """That of one rank, from the same start as the plain model's."""
    return Executor(llama(CONFIG), replace(plan, precision=FP32), WORKLOAD, seed=7, settings=SETTINGS)


def gradients(executor: Executor) -> list[tuple[float, Part]]:
    """Of the first steps of one rank, one by one: norm and this rank's part of the gradient that the update reads."""
    update, steps = Update.update, [(0.0, Part()) for _ in range(STEPS)]

    def note(self: Update, held: Parameters, *args: Any, **named: Any) -> None:
        for slot, (low, high) in held.pieces():
            grad = held.my_grad()[low:high].numpy().copy()
            steps[self.steps][1][slot.name] = (held.mine[0] + low - slot.start, grad)
        update(self, held, *args, **named)

    with patch.object(Update, "update", note):
        norms = [float(executor.step(batch(step)).grad_norm) for step in range(STEPS)]
    return [(norm, part) for norm, (_, part) in zip(norms, steps, strict=True)]


def train_all(names: list[str]) -> dict[str, tuple[Curve, Part]]:
    """Many plans, one after the other, in one process, and their variants."""
    curves = {name: train(PLANS[name]) for name in names}
    curves.update({f"{name}, tied": train(PLANS[name], config_of(", tied")) for name in names if name in TIED})
    curves.update({f"{name}, varied": train(PLANS[name], VARIED) for name in names if name in VARIANTS})
    curves.update({new: train(PLANS[name], CONFIG, f) for name, (new, f) in REWRITTEN.items() if name in names})
    return curves
