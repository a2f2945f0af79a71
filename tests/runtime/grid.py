"""Plans drawn at random, each trained for three steps beside the plain model: what the runtime is never silently wrong
about.

`draw(number, seed)` gives a case: a small model, a plan that `plans.check` accepts, a batch. Case by case one value of
one boolean or enum field of `overlap`, `optimizer` or `layout` is set (`FIELDS`), for tied and untied weights in turn;
the rest is drawn. `Workers` runs cases in one set of processes, each against a time limit; `judge` compares what came
back with the plain model: loss, gradient norm, held-out loss, and every element of every parameter. Left out: dtypes
other than fp64, and speed.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import count, product
from math import prod
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from traceback import format_exc
from types import TracebackType
from typing import Any, Literal, Protocol, Self, get_args, get_origin, get_type_hints

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from runtime.parity import FP64, SETTINGS, token_ids, trained
from runtime.plain_llama import Llama
from runtime.ranks import context
from torch import Tensor

from gnomon.errors import GnomonError, PlanError
from gnomon.models.llama import LlamaConfig, llama
from gnomon.plans import Layout, Mesh, Optimizer, Overlap, Pass, Plan, Saved, SavedRule, Schedule, Stage, Workload
from gnomon.plans import check as check_plan
from gnomon.runtime import Executor
from gnomon.runtime.processes.launch import rank_at
from gnomon.runtime.step.evaluate import evaluate

STEPS = 3
PARTS: dict[str, type] = {"overlap": Overlap, "optimizer": Optimizer, "layout": Layout}
FLAT = ("gpipe", "one_f_one_b", "zero_bubble_h1", "zero_bubble_h2")
LOOPED = ("interleaved_one_f_one_b", "looped_bfs", "interleaved_zero_bubble")
TURNED = ("zero_bubble_v", "v_half", "v_min", "dualpipe_v")
RUN = {
    "kind": ("adamw",), "delay": (0,), "offload_parameters": (False,), "experts": (False,), "optimizer": (False,),
    "parameter_tier": ("host",),
}  # fmt: skip
"""Values that are drawn where a field is not the one that is set: of the others the runtime refuses every plan."""


def values(cls: type) -> dict[str, tuple[Any, ...]]:
    """Field -> its values, of fields that have a few: booleans and enums."""
    hints = get_type_hints(cls)
    types = {field.name: hints[field.name] for field in fields(cls)}
    return {
        name: (False, True) if hint is bool else get_args(hint)
        for name, hint in types.items()
        if hint is bool or get_origin(hint) is Literal
    }


FIELDS = [
    (part, name, value)
    for part, cls in PARTS.items()
    for name, of in values(cls).items()
    for value in of
    if name != "kind" or value == "adamw"
]
"""Every value of every such field: (part of the plan, field, value). Update rules are compared in `test_optim`."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A plan, and what it is for."""

    number: int
    field: tuple[str, str, Any]
    """What is set: one of FIELDS."""
    config: LlamaConfig
    plan: Plan
    workload: Workload
    measured: bool
    """Whether the steps are measured ones, with memory."""

    def executor(self) -> Executor:
        """This rank of it."""
        return Executor(llama(self.config), self.plan, self.workload, seed=7, settings=SETTINGS)

    def batch(self, step: int) -> Tensor:
        """Of a step."""
        return token_ids(step, self.config, self.workload)

    def plain(self, on_device: frozenset[str]) -> Plain:
        """What it must train as. on_device: parameters that are updated there, and so in their own step."""
        return plain(self.config, self.workload, self.plan.optimizer.clip)

    def __str__(self) -> str:
        part, name, value = self.field
        tied = "tied" if self.config.tied else "untied"
        return f"case {self.number}, {part}.{name} = {value}, {tied}, {self.plan.world_size} ranks"


def draw(number: int, seed: int = 0) -> Case:
    """Case `number`, the same for the same seed."""
    rng = random.Random(f"{seed}/{number}")
    field = FIELDS[number % len(FIELDS)]
    for attempt in count():
        if attempt % 200 == 0:
            name = rng.choice((*FLAT, *LOOPED, *TURNED))
        case = _drawn(rng, number, field, name)
        if attempt < 1000 and not in_effect(case.plan, field):
            continue
        try:
            check_plan(case.plan, llama(case.config), None, case.workload)
        except PlanError:
            continue
        return case
    raise AssertionError


def in_effect(plan: Plan, field: tuple[str, str, Any]) -> bool:
    """Whether the rest of a plan lets the field do something, so that cases are not spent on what is not there."""
    meshes = [plan.stage_mesh(stage) for stage in range(plan.num_stages)]
    shards, tp = min(mesh.dp_shard for mesh in meshes) > 1, max(mesh.tp for mesh in meshes) > 1
    cp = max(mesh.cp for mesh in meshes) > 1
    zero = plan.optimizer.zero
    needs = {
        "zero": zero == 0 or shards,
        "reshard_after_forward": zero == 3 and shards,
        "keep_last_block": zero == 3 and shards,
        "param_gather": zero > 0 and shards,
        "grad_reduce": zero < 3 and max(mesh.data_ranks for mesh in meshes) > 1,
        "pipeline_sends": plan.num_stages > 1,
        "sequence_parallel": tp,
        "vocab_parallel": tp,
        "loss_parallel": tp,
        "context": cp,
        "context_order": cp,
        "keep_gathered": tp and plan.layout.sequence_parallel,
    }
    return needs.get(field[1], True)


def _drawn(rng: random.Random, number: int, field: tuple[str, str, Any], name: str) -> Case:
    """Some case whose plan has the schedule; it may not be possible."""
    layers = rng.choice((2, 3, 4, 5))
    varied = rng.random() < 0.3
    config = LlamaConfig(
        name="drawn", num_layers=layers, hidden_size=16, num_heads=4, num_kv_heads=rng.choice((1, 2, 4)), head_dim=4,
        ffn_size=24, vocab_size=32, tied=(number + number // len(FIELDS)) % 2 == 0, qk_norm=varied, qkv_bias=varied,
    )  # fmt: skip
    workload = Workload(global_batch_size=rng.choice((4, 4, 8)), seq_len=rng.choice((4, 8)))
    world = rng.choice((1, 2, 2, 2, 2, 4))
    overlap = Overlap(**_part(rng, "overlap", field), prefetch=rng.choice((0, 1, 2)))
    parts = {
        "overlap": overlap,
        "optimizer": Optimizer(**_part(rng, "optimizer", field)),
        "layout": Layout(**_part(rng, "layout", field)),
        "saved": _saved(rng, layers),
        "precision": FP64,
    }
    unlike = rng.random() < 0.25
    plan = _unlike(rng, name, world, layers) if unlike else _alike(rng, name, world, layers)
    plan = replace(plan, **parts)
    return Case(
        number=number, field=field, config=config, plan=plan, workload=workload, measured=rng.random() < 0.25
    )  # fmt: skip


def _part(rng: random.Random, part: str, field: tuple[str, str, Any]) -> dict[str, Any]:
    """Values of a part's fields, the one that is set among them."""
    chosen = {}
    for name, of in values(PARTS[part]).items():
        of = RUN.get(name, of)
        default = PARTS[part].__dataclass_fields__[name].default
        chosen[name] = rng.choice((default, rng.choice(of)))
    if field[0] == part:
        chosen[field[1]] = field[2]
    if chosen.get("parameter_tier") == "disk":
        chosen["offload_parameters"] = True
    return chosen


def _saved(rng: random.Random, layers: int) -> Saved:
    preset = rng.choice(("none", "none", "selective", "full"))
    if rng.random() < 0.2:
        first = rng.randrange(layers)
        rule = SavedRule(calls=f"layers[{first}:{rng.randint(first + 1, layers)}]", preset=rng.choice(("none", "full")))
        return Saved(preset=preset, rules=(rule,))  # type: ignore[arg-type]
    return Saved(preset=preset, every=rng.choice((1, 2, 3)) if preset == "full" else 1)  # type: ignore[arg-type]


def _mesh(rng: random.Random, ranks: int, *axes: str) -> Mesh:
    """A mesh of so many ranks, at random."""
    every = [
        dict(zip(axes, sizes, strict=True))
        for sizes in product(range(1, ranks + 1), repeat=len(axes))
        if prod(sizes) == ranks
    ]
    mesh = Mesh(**rng.choice(every))
    return replace(mesh, order=tuple(rng.sample(mesh.order, 5))) if rng.random() < 0.25 else mesh


def _schedule(rng: random.Random, name: str, virtual: int) -> Schedule:
    more: dict[str, Any] = {"num_microbatches": rng.choice((1, 2, 4))}
    if rng.random() < 0.2:
        more = {"micro_batch_size": rng.choice((1, 2))}
    if rng.random() < 0.15:
        more["rounds"] = 2
    if name == "one_f_one_b" and rng.random() < 0.2:
        more["passes"] = (Pass(name="dapple_warmup", params=(("policy", rng.choice(("p", "2p"))),)),)
    placement = "v" if name in TURNED else "loop"
    return Schedule(name=name, virtual_stages=virtual, placement=placement, **more)  # type: ignore[arg-type]


def _virtual(rng: random.Random, name: str) -> int:
    """Stages on each pipeline rank."""
    return 2 if name in TURNED else rng.choice((2, 2, 3)) if name in LOOPED else 1


def _alike(rng: random.Random, name: str, world: int, layers: int) -> Plan:
    mesh, virtual = _mesh(rng, world, "pp", "dp_replicate", "dp_shard", "cp", "tp"), _virtual(rng, name)
    stages, schedule = mesh.pp * virtual, _schedule(rng, name, virtual)
    if rng.random() < 0.3:
        cuts = sorted(rng.choices(range(layers + 1), k=stages - 1))
        parts = tuple(b - a for a, b in zip((0, *cuts), (*cuts, layers), strict=True))
        schedule = replace(schedule, layers_per_stage=parts)
    return Plan(mesh=mesh, schedule=schedule)


def _unlike(rng: random.Random, name: str, world: int, layers: int) -> Plan:
    """Stages with meshes and shares of their own, on ranks of their own, or several on the same."""
    ranks = rng.randint(1, min(world, 3))
    cuts = sorted(rng.sample(range(1, world), ranks - 1))
    firsts = list(zip((0, *cuts), (*cuts, world), strict=True))
    meshes = [_mesh(rng, b - a, "dp_replicate", "dp_shard", "tp") for a, b in firsts]
    homes = [*range(ranks), *reversed(range(ranks))] if name in TURNED else [*range(ranks)] * _virtual(rng, name)
    ends = sorted(rng.choices(range(layers + 1), k=len(homes) - 1))
    shares = {r: _shares(rng, meshes[r].data_ranks) for r in range(ranks)} if rng.random() < 0.6 else {}
    stages = []
    for i, (home, a, b) in enumerate(zip(homes, (0, *ends), (*ends, layers), strict=True)):
        calls = (*(("embed",) if i == 0 else ()), *((f"layers[{a}:{b}]",) if b > a else ()))
        calls = (*calls, *(("head",) if i == len(homes) - 1 else ())) or ("layers[0:0]",)
        first, last = firsts[home]
        devices = f"{first}:{last}"
        stages.append(Stage(calls=calls, mesh=meshes[home], devices=devices, shares=shares.get(home, ())))
    return Plan(stages=tuple(stages), schedule=replace(_schedule(rng, name, 1), virtual_stages=1))


def _shares(rng: random.Random, ranks: int) -> tuple[int, ...]:
    """Of four sequences, one or more each."""
    cuts = sorted(rng.sample(range(1, 4), ranks - 1))
    return tuple(b - a for a, b in zip((0, *cuts), (*cuts, 4), strict=True))


# --- the plain model


@dataclass(frozen=True, kw_only=True)
class Plain:
    """What the plain model does on one device."""

    curve: list[tuple[float, float]]
    """(loss, gradient norm before clipping) of each step."""
    held_out: float
    """Loss of one more batch, without training on it."""
    parameters: dict[str, NDArray[np.float64]]
    """After the last step."""


@cache
def plain(config: LlamaConfig, workload: Workload, clip: bool) -> Plain:
    """Three steps of torch's own layers, autograd, AdamW and clipping, in float64."""
    torch.set_num_threads(1)  # two threads wait for each other longer than these tensors take
    model = Llama(config, seed=7, dtype=torch.float64)
    batches = [token_ids(step, config, workload) for step in range(STEPS + 1)]
    settings = SETTINGS if clip else replace(SETTINGS, clip_norm=float("inf"))
    curve = [(loss, norm) for loss, norm, _ in trained(model, batches[:-1], settings)]
    ids = batches[-1]
    with torch.no_grad():
        held_out = float(model(ids[:, :-1], ids[:, 1:])) / ids[:, 1:].numel()
    parameters = {name: value.detach().numpy() for name, value in model.named_parameters()}
    return Plain(curve=curve, held_out=held_out, parameters=parameters)


# --- one rank of a case


class Runnable(Protocol):
    """What is run and judged: a `Case`, or one of `hf_grid`."""

    plan: Plan
    measured: bool

    def executor(self) -> Executor:
        """This rank of it. PlanError where it is refused."""

    def batch(self, step: int) -> Any:
        """Of a step, on every rank; after the last one a batch that is not trained on."""

    def plain(self, on_device: frozenset[str]) -> Plain:
        """What it must train as. on_device: parameters that are updated there, and so in their own step."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Some neighbouring elements of a parameter on one rank."""

    name: str
    whole: tuple[int, ...]
    """Shape of the parameter."""
    offset: tuple[int, ...]
    """Where in it what the rank's tensor-parallel group gives it begins."""
    shape: tuple[int, ...]
    """And its shape."""
    first: int
    """First of these elements in that."""
    elements: NDArray[np.float64]
    on_host: bool
    """Whether it is updated there."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What one rank says of a case."""

    kind: Literal["trained", "refused", "failed"]
    message: str = ""
    """The error."""
    curve: tuple[tuple[float, float], ...] = ()
    held_out: float = 0.0
    parts: tuple[Part, ...] = ()


def attempt(case: Runnable) -> Answer:
    """This rank's part of a case. What is refused is refused before anything runs; any other error is a failure."""
    try:
        executor = case.executor()
        executor.feed.take(case.batch(0))
    except GnomonError as error:
        return Answer(kind="refused", message=str(error))
    curve = []
    for step in range(STEPS):
        batch = case.batch(step)
        result = executor.measured_step(batch, memory=True)[0] if case.measured else executor.step(batch)
        curve.append((executor.total_loss(result), float(result.grad_norm)))
    executor.settle()
    held_out = evaluate(executor, case.batch(STEPS))
    executor.synchronise()
    left = [*executor.buffers.tensors, *executor.compute.saved, *executor.compute.aside]
    assert not left, f"left over after a step: {left[:4]}"
    parts = tuple(
        Part(
            name=slot.name,
            whole=slot.whole,
            offset=slot.offset,
            shape=slot.shape,
            first=held.mine[0] + low - slot.start,
            elements=held.shard[low:high].numpy().copy(),
            on_host=number in executor.state.on_host,
        )
        for number, stage in executor.stages.items()
        for held in stage.own_parameters
        for slot, (low, high) in held.pieces()
    )
    executor.leave()
    return Answer(kind="trained", curve=tuple(curve), held_out=held_out, parts=parts)


def serve(rank: int, folder: str, orders: Connection) -> None:
    """One process: joins groups of as many processes as its cases have ranks, and does its part of each case."""
    torch.set_num_threads(1)
    joined = -1
    os.environ["RANK"] = str(rank)  # the number of its process, which a placement gives a rank
    while True:
        try:
            meeting, case = orders.recv()
        except EOFError:
            return
        if meeting != joined:
            if joined >= 0:
                dist.destroy_process_group()
            joined, size, places = meeting, case.plan.world_size, case.plan.placement
            store = f"file://{folder}/{meeting}"
            dist.init_process_group("gloo", init_method=store, rank=rank_at(rank, places), world_size=size)
        try:
            orders.send(attempt(case))
        except Exception:
            orders.send(Answer(kind="failed", message=format_exc(limit=-3)))


# --- all ranks of it

Verdict = Literal["equal", "refused", "wrong", "hung", "crashed"]
BAD: tuple[Verdict, ...] = ("wrong", "hung", "crashed")


class Workers:
    """One set of processes that runs case after case; another one takes its place after a case that hung or failed."""

    def __init__(self, size: int = 4, *, limit_s: float = 120.0) -> None:
        self.size, self.limit_s = size, limit_s
        self.folder = tempfile.TemporaryDirectory()
        self.meetings = count()
        self.meeting: tuple[int, int, tuple[int, ...]] = (-1, 0, ())
        """(number, ranks, placement) of the last group of processes: others were left out of it, and meet anew."""
        self.started = 0
        self._start()

    def _start(self) -> None:
        made = context()
        self.pipes, self.processes, self.meeting = [], [], (-1, 0, ())
        self.started += 1
        below = Path(self.folder.name, str(self.started))
        below.mkdir()
        for rank in range(self.size):
            ours, theirs = made.Pipe()
            process = made.Process(target=serve, args=(rank, str(below), theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def _end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        for pipe in self.pipes:
            pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()
        self.folder.cleanup()

    def run(self, case: Runnable) -> dict[int, Answer]:
        """Answers by rank; of those that gave one within the limit."""
        if self.meeting[1:] != (case.plan.world_size, case.plan.placement):
            self.meeting = (next(self.meetings), case.plan.world_size, case.plan.placement)
        ranks = {self.pipes[rank]: rank for rank in range(case.plan.world_size)}
        for pipe in ranks:
            pipe.send((self.meeting[0], case))
        answers: dict[int, Answer] = {}
        until = monotonic() + self.limit_s
        while len(answers) < len(ranks) and (left := until - monotonic()) > 0:
            for pipe in wait([pipe for pipe, rank in ranks.items() if rank not in answers], left):
                assert isinstance(pipe, Connection)
                try:
                    answers[ranks[pipe]] = pipe.recv()
                except EOFError:
                    answers[ranks[pipe]] = Answer(kind="failed", message="the process died")
            if any(answer.kind == "failed" for answer in answers.values()):
                until = min(until, monotonic() + 5.0)  # the others may wait for it, or say better what is wrong
        if len(answers) < len(ranks) or any(answer.kind == "failed" for answer in answers.values()):
            self._end()
            self._start()
        return answers

    def judged(self, case: Runnable) -> tuple[Verdict, str]:
        """The case run and judged."""
        return judge(case, self.run(case))


def judge(case: Runnable, answers: dict[int, Answer]) -> tuple[Verdict, str]:
    """(verdict, what is wrong or why it is refused)."""
    kinds = {answer.kind for answer in answers.values()}
    if failed := {rank: answer.message for rank, answer in answers.items() if answer.kind == "failed"}:
        return "crashed", "; ".join(f"rank {rank}: {message}" for rank, message in failed.items())
    if len(answers) < case.plan.world_size:
        silent = sorted(set(range(case.plan.world_size)) - set(answers))
        others = f"; others: {sorted(kinds)}" if kinds else ""
        return "hung", f"ranks {silent} gave no answer{others}"
    if "refused" in kinds:
        reasons = {answer.message for answer in answers.values()}
        if kinds != {"refused"} or len(reasons) > 1:
            return "wrong", f"ranks do not agree: {sorted(kinds)} {sorted(reasons)}"
        return "refused", reasons.pop()
    wrong = "; ".join(_differences(case, answers))
    return ("wrong", wrong) if wrong else ("equal", "")


def _differences(case: Runnable, answers: dict[int, Answer]) -> Iterator[str]:
    """What is not as in the plain model, to 1e-9."""
    clip = case.plan.optimizer.clip
    parts = [part for answer in answers.values() for part in answer.parts]
    want = case.plain(frozenset(part.name for part in parts if not part.on_host))
    seen = {name: np.zeros(value.shape, bool).reshape(-1) for name, value in want.parameters.items()}
    for rank, answer in answers.items():
        for step, ((loss, norm), (wanted, wanted_norm)) in enumerate(zip(answer.curve, want.curve, strict=True)):
            if not _near(loss, wanted):
                yield f"rank {rank}, step {step}: loss {loss!r}, not {wanted!r}"
            if clip and not (_near(norm, wanted_norm) or norm != norm and wanted_norm != wanted_norm):
                yield f"rank {rank}, step {step}: gradient norm {norm!r}, not {wanted_norm!r}"
        if not _near(answer.held_out, want.held_out):
            yield f"rank {rank}: loss without training {answer.held_out!r}, not {want.held_out!r}"
        for part in answer.parts:
            places = np.arange(prod(part.whole)).reshape(part.whole)
            for dim, (first, size) in enumerate(zip(part.offset, part.shape, strict=True)):
                places = places.take(range(first, first + size), axis=dim)
            mine = places.reshape(-1)[part.first : part.first + len(part.elements)]
            wanted_elements = want.parameters[part.name].reshape(-1)[mine]
            seen[part.name][mine] = True
            # those near 0 to 1e-9: AdamW divides by the root of the second moment plus eps, so that where a gradient is
            # 0 but for rounding (1e-16) a step moves by up to lr x 1e-16 / eps = 3e-10; equal with a larger eps
            if not np.allclose(part.elements, wanted_elements, rtol=1e-9, atol=1e-9):
                far = np.abs(part.elements - wanted_elements).max()
                yield f"rank {rank}: {part.name} is off by {far:.1e}"
    for name, held in seen.items():
        if not held.all():
            yield f"{int((~held).sum())} elements of {name} are on no rank"


def _near(result: float, wanted: float) -> bool:
    return abs(result - wanted) <= 1e-9 * abs(wanted)
