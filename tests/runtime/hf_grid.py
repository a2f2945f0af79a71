"""Plans drawn at random over model types of transformers, each trained beside transformers itself in train mode.

`draw(number, seed)` gives a case: a tiny model of one type, a plan that `plans.check` accepts, and how its batches are
made. Everything a plan decides is drawn together: the mesh and its order, placement, views of experts, schedules and
their placement, ZeRO, the update on the host and its parts, delay, clipping, buckets, what is saved, layouts. `Oracle`
is transformers' own model, autograd, clipping and AdamW in float64: every document alone in a forward of its own, so
that packing and padding are compared with neither. `grid.Workers` runs a case and `grid.judge` compares loss, gradient
norm, held-out loss and every parameter. Left out: dtypes other than float64, GPUs, speed.
"""

from __future__ import annotations

import random
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from runtime import grid
from runtime.grid import Plain
from runtime.hf_models import CONFIGS, VOCAB, Wide, build, quiet
from runtime.parity import FP64, SETTINGS
from torch import Tensor
from torch.nn import functional

from gnomon.errors import GnomonError, PlanError
from gnomon.formats.huggingface.known import layout
from gnomon.formats.huggingface.parts import ReadOptions
from gnomon.formats.huggingface.read import read_hf_config
from gnomon.formats.huggingface.weights import Layout as FileLayout
from gnomon.graph import Graph
from gnomon.lowering import lower
from gnomon.models.numerics import with_numerics
from gnomon.plans import Layout, Mesh, Offload, Optimizer, Overlap, Plan, Workload
from gnomon.plans import check as check_plan
from gnomon.runtime import Executor
from gnomon.runtime.mesh.groups import meshes_of
from gnomon.runtime.module.one_process import OneProcess
from gnomon.runtime.parameters.weights import Folder, WeightReader, settled
from gnomon.software import own

MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"num_hidden_layers": 5},
    "llama (tied)": {"num_hidden_layers": 4, "tie_word_embeddings": True, "num_key_value_heads": 1},
    "qwen2": {"num_hidden_layers": 3, "tie_word_embeddings": True},
    "qwen3": {"num_hidden_layers": 4},
    "gemma2": {"num_hidden_layers": 4},
    "gemma3_text": {"num_hidden_layers": 4},
    "gpt2": {"n_layer": 4},
    "gpt_neox": {"num_hidden_layers": 4},
    "phi3": {"num_hidden_layers": 3},
    "olmo2": {"num_hidden_layers": 4},
    "granite": {"num_hidden_layers": 4, "tie_word_embeddings": True},
    "mixtral": {"num_hidden_layers": 3},
    "qwen3_moe": {"num_hidden_layers": 4, "tie_word_embeddings": True, "norm_topk_prob": True},
    "deepseek_v3": {"num_hidden_layers": 4},
    "mamba2": {"num_hidden_layers": 4},
    "t5": {"num_layers": 2},
}
"""Type, and in brackets a variant -> what differs from the sample's config (`hf_models.CONFIGS`)."""
BALANCED: Mapping[str, Mapping[str, Any]] = {
    f"{name} (balanced)": {**MODELS.get(name, {}), "output_router_logits": True, "router_aux_loss_coef": 0.5}
    for name in ("mixtral", "qwen3_moe", "olmoe", "granitemoe")
}
"""The same with the loss that balances experts, of each microbatch on each data-parallel rank."""
EXPERTS = ("mixtral", "qwen3_moe", "deepseek_v3", "olmoe", "granitemoe")
DATA = ("stream", "documents", "padded", "masked")
"""Rows of one stream; of packed documents; each of one document and padded; with labels of -100 at random, up to whole
rows of them."""
UNLEARNT = -100
REFUSED = 0.1
"""Share of the plans without a Program that are tried all the same: each must be refused in one line."""


@dataclass(frozen=True, kw_only=True)
class HfCase:
    """A plan, and what it is for."""

    number: int
    model: str
    """Of MODELS."""
    folder: Path
    """With a folder of weights for each model."""
    plan: Plan
    workload: Workload
    data: str
    """Of DATA."""
    measured: bool

    @property
    def config(self) -> str:
        """What a report shows."""
        return f"{self.model}, {self.data}"

    def __str__(self) -> str:
        return f"case {self.number}, {self.config}, {self.plan.world_size} ranks"

    def executor(self) -> Executor:
        """This rank of it."""
        graph, where = read(self.model, str(self.folder))
        values = WeightReader(Folder.of(self.folder / self.model), where)
        return Executor(graph, self.plan, self.workload, settings=SETTINGS, values=values)

    def batch(self, step: int) -> dict[str, Tensor]:
        """Of a step."""
        return batch(self.model, self.data, self.workload, step)

    def plain(self, on_device: frozenset[str]) -> Plain:
        """What transformers does."""
        optimizer = self.plan.optimizer
        delay_after = optimizer.delay_after if optimizer.delay else grid.STEPS
        prompt = on_device if optimizer.delay else frozenset[str]()
        rows = 0
        if self.model in BALANCED:
            ranks = self.plan.stage_mesh(0).data_ranks
            count = self.plan.schedule.num_microbatches
            of_unit = (
                self.workload.global_batch_size // count
                if count
                else (self.plan.schedule.micro_batch_size or 0) * ranks
            )
            rows = of_unit // ranks
        return trained(
            self.model, str(self.folder), self.data, self.workload, optimizer.clip, delay_after, prompt, rows
        )


# --- the model, on both sides


def made(model: str) -> Any:
    """The model of transformers in float64, in train mode."""
    kind = model.partition(" ")[0]
    return build(kind, {**CONFIGS[kind], **MODELS.get(model, {}), **BALANCED.get(model, {})}).train()


def prepared(folder: Path, model: str) -> None:
    """Writes the weights that both sides begin with, if they are not there."""
    if not (folder / model).exists():
        with quiet(), Wide():  # which changes what random weights are, too
            made(model).save_pretrained(folder / model)


@cache
def read(model: str, folder: str) -> tuple[Graph, FileLayout]:
    """The graph of a folder, and where its parameters lie in the files."""
    text = (Path(folder) / model / "config.json").read_text()
    found = read_hf_config(text, model, ReadOptions(bert_head="mlm", complete=True))
    assert not isinstance(found.numerics, str), found.numerics
    graph = with_numerics(found.graph, found.numerics)
    return graph, settled(Folder.of(Path(folder) / model), layout(graph, model.partition(" ")[0]))


# --- data


@cache
def batch(model: str, data: str, workload: Workload, step: int) -> dict[str, Tensor]:
    """Inputs of the graph by name, rows first."""
    rows, seq = workload.global_batch_size, workload.seq_len
    rng = random.Random(f"{data}/{rows}/{seq}/{step}")
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    ids = torch.randint(3, VOCAB, (rows, seq + 1), generator=generator)  # below are special tokens
    inputs, labels = ids[:, :-1].clone(), ids[:, 1:].clone()
    more: dict[str, Tensor] = {}
    if data == "documents":
        cuts = [sorted(rng.sample(range(1, seq), rng.choice((0, 1, 1, 2)))) for _ in range(rows)]
        more["documents"] = torch.tensor(
            [[sum(at >= cut for cut in cuts[r]) for at in range(seq)] for r in range(rows)]
        )
        for row, of_row in enumerate(cuts):
            for cut in of_row:
                labels[row, cut - 1] = UNLEARNT  # the next document's first token
    if data == "padded":
        lengths = torch.tensor([rng.randint(2, seq) for _ in range(rows)])
        more["lengths"] = lengths
        beyond = torch.arange(seq) >= lengths[:, None]
        inputs[beyond], labels[beyond] = 0, UNLEARNT
    if data == "masked":
        share = torch.tensor([rng.choice((0.0, 0.3, 0.8, 1.0)) for _ in range(rows)], dtype=torch.float64)
        share[rng.randrange(rows)] = 0.0  # some are learnt
        labels[torch.rand(rows, seq, generator=generator, dtype=torch.float64) < share[:, None]] = UNLEARNT
    given = {"input_ids": inputs, "labels": labels, **more}
    if model.startswith("t5"):
        given["decoder_input_ids"] = torch.randint(3, VOCAB, (rows, seq), generator=generator)
    return given


def documents(given: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Each document of a batch in a row of its own; rows of one length together."""
    if "documents" not in given and "lengths" not in given:
        yield dict(given)
        return
    for row in range(len(given["labels"])):
        if "lengths" in given:
            ends = [int(given["lengths"][row])]
        else:
            of_row = given["documents"][row]
            ends = [*(torch.nonzero(of_row[1:] != of_row[:-1]).flatten() + 1).tolist(), len(of_row)]
        for first, stop in zip((0, *ends), ends, strict=False):
            yield {name: given[name][row : row + 1, first:stop] for name in ("input_ids", "labels")}


def summed_loss(model: Any, given: Mapping[str, Tensor], rows: int = 0) -> Tensor:
    """Over all labels of a batch. rows: of each forward of a model that balances its experts, whose loss of them counts
    once for each label; 0 for others."""
    total: Tensor = torch.zeros((), dtype=torch.float64)
    parts = (
        [{n: x[i : i + rows] for n, x in given.items()} for i in range(0, len(given["labels"]), rows)] if rows else []
    )
    for one in parts or documents(given):
        inputs = {name: x for name, x in one.items() if name != "labels"}
        made = model(**inputs, use_cache=False)
        flat, labels = made.logits.flatten(0, 1), one["labels"].flatten()
        total = total + functional.cross_entropy(flat, labels, ignore_index=UNLEARNT, reduction="sum")
        if rows:
            total = total + model.config.router_aux_loss_coef * made.aux_loss * (labels >= 0).sum()
    return total


# --- the oracle


def parameter_groups(model: Any) -> list[dict[str, Any]]:
    """As trainers have them: biases and the parameters of norms do not decay, everything else does."""
    norms = {
        id(p)
        for module in model.modules()
        if "norm" in type(module).__name__.lower()
        for p in module.parameters(recurse=False)
    }
    single = [p for name, p in model.named_parameters() if id(p) in norms or p.ndim < 2]
    known = {id(p) for p in single}
    return [
        {"params": [p for p in model.parameters() if id(p) not in known], "weight_decay": SETTINGS.weight_decay},
        {"params": single, "weight_decay": 0.0},
    ]


def _layer_of(name: str) -> str:
    """What the names of a layer's parameters have in common, in the Graph and in transformers; for a parameter outside
    of layers its own last two words."""
    found = re.search(r"(?:(?:en|de)coder\.)?\w+\.\d+(?=\.)", name)
    return found[0] if found else ".".join(name.split(".")[-2:])


@cache
def trained(
    model: str,
    folder: str,
    data: str,
    workload: Workload,
    clip: bool,
    delay_after: int,
    prompt: frozenset[str] = frozenset(),
    rows: int = 0,
) -> Plain:
    """Steps of transformers' model in train mode. delay_after: updates before they lag by one step. prompt: parameters
    of the Graph whose updates never do. rows: as in `summed_loss`."""
    torch.set_num_threads(1)
    with quiet(), Wide():
        theirs = made(model)
        adam = torch.optim.AdamW(parameter_groups(theirs), lr=SETTINGS.lr, betas=SETTINGS.betas, eps=SETTINGS.eps)
        curve, waiting, updates = list[tuple[float, float]](), None, 0
        layers = {_layer_of(name) for name in prompt}
        in_time = [_layer_of(name) in layers for name, _ in theirs.named_parameters()]
        assert {_layer_of(name) for name, _ in theirs.named_parameters()} >= layers

        def update(grads: list[Tensor | None]) -> float:
            for parameter, grad in zip(theirs.parameters(), grads, strict=True):
                parameter.grad = grad
            norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), SETTINGS.clip_norm if clip else float("inf"))
            adam.step()
            return norm.item()

        for step in range(grid.STEPS):
            given = batch(model, data, workload, step)
            adam.zero_grad()
            loss = summed_loss(theirs, given, rows) / int((given["labels"] >= 0).sum())
            loss.backward()  # type: ignore[no-untyped-call]
            grads = [p.grad for p in theirs.parameters()]
            norm = float("nan")
            if updates < delay_after:
                norm = update(grads)
                updates += 1
            else:
                late = [None] * len(grads) if waiting is None else waiting
                due = [now if own else lag for now, lag, own in zip(grads, late, in_time, strict=True)]
                if any(grad is not None for grad in due):
                    norm = update(due)
                updates += waiting is not None
                waiting = [None if own else now for now, own in zip(grads, in_time, strict=True)]
            curve.append((loss.item(), norm))
        if waiting is not None:
            update(waiting)
        given = batch(model, data, workload, grid.STEPS)
        with torch.no_grad():
            held_out = float(summed_loss(theirs, given, rows)) / int((given["labels"] >= 0).sum())
        return Plain(curve=curve, held_out=held_out, parameters=_parameters(theirs, model, folder))


def _parameters(theirs: Any, model: str, folder: str) -> dict[str, NDArray[np.float64]]:
    """By Gnomon's names, through the files that transformers writes."""
    graph, where = read(model, folder)
    with tempfile.TemporaryDirectory() as out:
        theirs.save_pretrained(out)
        values = WeightReader(Folder.of(Path(out)), where)
        slots = OneProcess(graph, values=values, dtype=torch.float64).slots
        found = {slot.name: values(slot) for slot in slots}
    return {name: value.numpy().copy() for name, value in found.items() if value is not None}


# --- plans

NAMES = (*grid.FLAT, *grid.FLAT, *grid.LOOPED, *grid.TURNED)


def draw(number: int, folder: Path, seed: int = 0, *, balanced: bool = False) -> HfCase:
    """Case `number`, the same for the same seed; model types take turns, or those that balance their experts."""
    rng = random.Random(f"hf/{seed}/{number}")
    models = list(BALANCED if balanced else MODELS)
    model = models[number % len(models)]
    prepared(folder, model)
    graph, _ = read(model, str(folder))
    while True:
        case = _drawn(rng, number, model, folder)
        try:
            check_plan(case.plan, graph, None, case.workload)
        except PlanError:
            continue
        if not _is_refused(case, graph) or rng.random() < REFUSED:
            return case


def _is_refused(case: HfCase, graph: Graph) -> bool:
    """Whether the plan has no Program, or decides what the runtime does not carry out."""
    try:
        lower(graph, case.plan, None, case.workload)
        meshes_of(case.plan)
        if case.model.partition(" ")[0] in EXPERTS:
            _ = case.plan.mesh.experts
    except GnomonError:
        return True
    return own.plan_reason(case.plan) is not None


def _drawn(rng: random.Random, number: int, model: str, folder: Path) -> HfCase:
    sizes = {**CONFIGS[model.partition(" ")[0]], **MODELS.get(model, {}), **BALANCED.get(model, {})}
    layers = next(value for key, value in reversed(sizes.items()) if key.endswith(("layers", "layer")))
    name = rng.choice(NAMES)
    world = rng.choice((2, 2, 4, 4, 4))
    optimizer, overlap = _optimizer(rng), _overlap(rng)
    unlike = rng.random() < 0.15 and model not in BALANCED  # whose loss depends on which rows are together
    plan = grid._unlike(rng, name, world, layers) if unlike else grid._alike(rng, name, world, layers)
    if not unlike:
        mesh = plan.mesh
        order = tuple(rng.sample(mesh.order, 5)) if rng.random() < 0.6 else mesh.order
        plan = replace(plan, mesh=replace(mesh, order=order, **_views(rng, model, mesh)))
        if optimizer.zero and rng.random() < 0.5 and mesh.dp_shard * mesh.cp == 1:  # or ZeRO is seldom drawn
            optimizer = replace(optimizer, zero=0)
    placement = tuple(rng.sample(range(world), world)) if rng.random() < 0.3 and not plan.placement else ()
    plan = replace(
        plan,
        optimizer=optimizer,
        overlap=overlap,
        layout=_layout(rng),
        saved=grid._saved(rng, layers),
        precision=FP64,
        placement=placement,
    )
    if rng.random() < 0.1 and not unlike:
        vocabulary = rng.choice(("vocab_1", "vocab_2", "interlaced"))
        plan = replace(plan, schedule=replace(plan.schedule, vocabulary=vocabulary))
    workload = Workload(global_batch_size=rng.choice((4, 8)), seq_len=8, sizes=_sizes(model))
    data = rng.choice(DATA) if rng.random() < 0.7 else "stream"
    if model in BALANCED:  # whose forwards are of whole rows
        data = "masked" if data == "masked" else "stream"
    return HfCase(
        number=number, model=model, folder=folder, plan=plan, workload=workload, data=data,
        measured=rng.random() < 0.15,
    )  # fmt: skip


def _sizes(model: str) -> tuple[tuple[str, int], ...]:
    return (("enc_seq", 8),) if model.startswith("t5") else ()


def _views(rng: random.Random, model: str, mesh: Mesh) -> dict[str, int]:
    """How the experts refold the ranks."""
    folded = mesh.dp_shard * mesh.cp * mesh.tp
    if model.partition(" ")[0] not in EXPERTS or folded == 1:
        return {}
    ep = rng.choice([n for n in (1, 2, 4) if folded % n == 0])
    etp = rng.choice([n for n in (1, 2, 4) if (folded // ep) % n == 0])
    return {"ep": ep, "etp": etp}


def _optimizer(rng: random.Random) -> Optimizer:
    zero = rng.choice((0, 0, 1, 2, 3, 3))
    offload = None
    if rng.random() < 0.35:
        offload = Offload(
            fraction=rng.choice((1.0, 1.0, 0.5)),
            tiles=rng.choice((None, None, 1, 2)),
            accumulate=rng.choice(("host", "device")),
        )
    delay = 1 if offload is not None and rng.random() < 0.3 else 0
    away = zero == 3 and not delay and rng.random() < 0.25
    return Optimizer(
        zero=zero,
        offload=offload,
        delay=delay,
        delay_after=rng.choice((0, 1)),
        clip=rng.random() < 0.5,
        offload_parameters=away,
        parameter_tier=rng.choice(("host", "disk")) if away else "host",
        reshard_after_forward=rng.random() < 0.7,
        keep_last_block=rng.random() < 0.7,
    )


def _overlap(rng: random.Random) -> Overlap:
    more: dict[str, Any] = {}
    if rng.random() < 0.25:
        more["bucket_bytes"] = rng.choice((2000, 40_000, 200_000))
    return Overlap(
        grad_reduce=rng.random() < 0.75 or "bucket_bytes" in more,
        param_gather=rng.random() < 0.75,
        pipeline_sends=rng.random() < 0.7,
        prefetch=rng.choice((0, 1, 2)),
        **more,
    )


def _layout(rng: random.Random) -> Layout:
    return Layout(
        sequence_parallel=rng.random() < 0.4,
        context=rng.choice(("ring", "all_gather", "ulysses")),
        context_order=rng.choice(("zigzag", "contiguous")),
        keep_gathered=rng.random() < 0.2,
    )
