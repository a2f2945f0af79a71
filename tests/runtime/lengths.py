"""Steps on sequences of several lengths beside transformers, each of whose forwards has one sequence: float64.

`Case` is a tiny model of a type and a plan; `prepared` writes the model's weights and the gradients that transformers
finds; `worst` runs one step and returns the largest difference of loss and of any gradient on this rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from runtime.hf_models import VOCAB, Wide, build, quiet
from runtime.parity import FP64, SETTINGS
from torch import Tensor
from torch.nn import functional

from gnomon.formats.huggingface.known import layout
from gnomon.formats.huggingface.parts import ReadOptions
from gnomon.formats.huggingface.read import read_hf_config
from gnomon.models.numerics import with_numerics
from gnomon.plans import Layout, Mesh, Optimizer, Pass, Plan, Saved, Schedule, Workload
from gnomon.runtime import Executor
from gnomon.runtime.optim.update import Update
from gnomon.runtime.parameters.parameters import Parameters
from gnomon.runtime.parameters.weights import Folder, WeightReader, settled

LENGTHS = (29, 7, 3, 16, 12, 5, 1, 9)
"""Of a batch: one much longer than the others, one of a single token, none a multiple of anything."""
IGNORED = -100


def chunkflow(keep: int, chunk_size: int = 8) -> tuple[Pass, ...]:
    """As a plan asks for it."""
    return (Pass(name="chunkflow", params=(("chunk_size", chunk_size), ("keep", keep))),)


def skrull(capacity: int) -> tuple[Pass, ...]:
    """As a plan asks for it."""
    return (Pass(name="skrull", params=(("capacity", capacity),)),)


def planned(
    mesh: Mesh = Mesh(),  # noqa: B008 (frozen)
    *passes: Pass,
    size: int = 2,
    layout: Layout = Layout(),  # noqa: B008
    zero: Any = 0,
    preset: Any = "none",
) -> Plan:
    """size: sequences of a microbatch on one worker."""
    return Plan(
        mesh=mesh,
        schedule=Schedule(micro_batch_size=size, passes=tuple(passes)),
        layout=layout,
        optimizer=Optimizer(zero=zero),
        saved=Saved(preset=preset),
        precision=FP64,
    )


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model type of `hf_models.CONFIGS`, and how it runs."""

    kind: str
    plan: Plan


def batch(lengths: Sequence[int] = LENGTHS) -> dict[str, Tensor]:
    """Tokens one after the other; every fifth counts for nothing."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(3, VOCAB, (sum(lengths) + 1,), generator=generator)
    labels = ids[1:].clone()
    labels[::5] = IGNORED
    return {"input_ids": ids[:-1], "labels": labels, "lengths": torch.tensor(lengths)}


def prepared(kind: str, folder: Path) -> float:
    """Writes weights and gradients of transformers; returns its loss."""
    given = batch()
    with quiet(), Wide():
        model = build(kind)
        model.save_pretrained(folder / kind / "weights")
        counted, total = int((given["labels"] >= 0).sum()), 0.0
        rows = zip(*(given[name].split(LENGTHS) for name in ("input_ids", "labels")), strict=True)
        for ids, labels in rows:
            logits = model(input_ids=ids[None], use_cache=False).logits
            loss = functional.cross_entropy(logits[0], labels, ignore_index=IGNORED, reduction="sum") / counted
            loss.backward()
            total += float(loss.detach())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
            for _, buffer in model.named_buffers():
                buffer.zero_()
        model.save_pretrained(folder / kind / "gradients")
    return total


def worst(case: Case, folder: Path, loss: float) -> tuple[float, float]:
    """(difference of the loss, largest of any gradient on this rank over that gradient's largest element)."""
    work = Workload(lengths=LENGTHS[::-1])  # as of another step: the batch makes units of its own
    return against(case, folder, work, batch(), loss)


def against(case: Case, folder: Path, work: Workload, given: dict[str, Tensor], loss: float) -> tuple[float, float]:
    """The same of any batch, against the gradients in the folder."""
    text = (folder / case.kind / "weights" / "config.json").read_text()
    read = read_hf_config(text, case.kind, ReadOptions(bert_head="mlm", complete=True))
    assert not isinstance(read.numerics, str)
    graph = with_numerics(read.graph, read.numerics)
    made = Folder.of(folder / case.kind / "weights")
    where = settled(made, layout(graph, case.kind.partition(" ")[0]))
    expected = WeightReader(Folder.of(folder / case.kind / "gradients"), where)
    off = [0.0]

    def compared(self: Update, held: Parameters, *args: Any, **named: Any) -> None:
        for slot, (low, high) in held.pieces():
            wanted = expected(slot)
            first = held.mine[0] + low - slot.start
            part = wanted.flatten()[first : first + high - low]
            size = wanted.abs().max().clamp(min=1e-6)
            off.append(float(((held.my_grad()[low:high] - part).abs().max() if high > low else 0.0) / size))

    with quiet():
        executor = Executor(graph, case.plan, work, settings=SETTINGS, values=WeightReader(made, where))
        with patch.object(Update, "update", compared):
            ours = executor.total_loss(executor.step(given))
    executor.leave()
    return abs(ours / loss - 1), max(off)


def all_of(cases: Mapping[str, Case], folder: Path, losses: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """`worst` of each case, by name."""
    return {name: worst(case, folder, losses[case.kind]) for name, case in cases.items()}


def before_and_after(
    case: Case, folder: Path, work: Workload, given: dict[str, Tensor], ending: str
) -> dict[str, tuple[Tensor, Tensor]]:
    """Of parameters whose names end so their values before a step and after it, where this rank has them whole."""
    text = (folder / case.kind / "weights" / "config.json").read_text()
    read = read_hf_config(text, case.kind, ReadOptions(bert_head="mlm", complete=True))
    assert not isinstance(read.numerics, str)
    graph = with_numerics(read.graph, read.numerics)
    made = Folder.of(folder / case.kind / "weights")
    values = WeightReader(made, settled(made, layout(graph, case.kind.partition(" ")[0])))
    with quiet():
        executor = Executor(graph, case.plan, work, settings=SETTINGS, values=values)
        names = [(held, slot.name) for held, _ in executor.parameters() for slot in held.slots]
        chosen = [(held, name) for held, name in names if name.endswith(ending)]
        before = {name: held.value(name).clone() for held, name in chosen}
        executor.step(given)
        executor.synchronise()
        found = {name: (before[name], held.value(name).clone()) for held, name in chosen}
    executor.leave()
    return found
