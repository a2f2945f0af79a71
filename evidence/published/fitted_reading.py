"""The fitted reading of a run: what its source leaves open, chosen with the outcome in sight.

`to_run` gives a run's first reading, which nothing that was measured has decided. `fitted_reading(run)` returns the run
as it is read with everything that was measured known, its prediction, and a note on each choice: the numbers of stacks
are fitted to this reading, and tables show it beside the first. CHOICES lists every such choice with the numbers that
it counts for. Predictions of what was left out (`evidence.validation`) use the first reading alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from evidence.published import nanotron
from evidence.published.run import Run
from evidence.published.settings import XLA, lighter_first
from evidence.readings import JobThresholds, readings
from gnomon.errors import GnomonError
from gnomon.formats.nanotron.read import stages_of
from gnomon.models.llama import LlamaConfig
from gnomon.plans import Plan, Saved
from gnomon.prediction import Prediction, predict


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A rule that decides how rows are read and has seen how the runs came out."""

    what: str
    """What it decides."""
    numbers: int
    """Fitted numbers that it counts for: thresholds, or one for a choice between two readings."""
    seen: Literal["step time", "that it ran"]
    """What of the outcome decides it."""
    where: str
    """Where it is written."""
    left_out: str
    """What predictions of a source that was left out do."""


FIRST = "first reading"

CHOICES = (
    Choice(
        what="nanotron: which jobs ran without the checks of collectives that its script sets, and which polled",
        numbers=2,
        seen="step time",
        where="published/nanotron.py environment",
        left_out=FIRST,
    ),
    Choice(
        what="nanotron: the thresholds of these two",
        numbers=5,
        seen="step time",
        where="readings.toml",
        left_out=f"{FIRST}; fitted again without each model",
    ),
    Choice(
        what="nanotron: a stage ends where its share of the weights is met exactly",
        numbers=1,
        seen="step time",
        where="gnomon/formats/nanotron/read.py stages_of",
        left_out=FIRST,
    ),
    Choice(
        what="recompute not stated: the least of a list that fits the device",
        numbers=1,
        seen="that it ran",
        where="published/fitted_reading.py",
        left_out=FIRST,
    ),
    Choice(
        what="NeMo and Megatron-Bridge, where nothing fits: bf16 gradients, experts divided over tp, ZeRO 3",
        numbers=3,
        seen="that it ran",
        where="published/fitted_reading.py",
        left_out=FIRST,
    ),
    Choice(
        what="LiBai: the device, which the source does not name, is a V100",
        numbers=1,
        seen="step time",
        where="published/machines.py DEVICES",
        left_out="kept: without a device there is no reading",
    ),
)
"""Every one of them. A new one is listed here, and is not used for what is left out."""

NARROWER = "bf16 gradients"
"""Tried before whole layers are taken to run again: those who could choose would rather not."""


def first_prediction(run: Run) -> Prediction:
    """Of the first reading. GnomonError as `predict` raises it."""
    return predict(run.graph, run.cluster, run.plan, run.workload, run.stack)


def fitted_reading(run: Run, first: Prediction | None = None) -> tuple[Run, Prediction]:
    """The run as everything that was measured has it read, and its prediction. GnomonError as `predict` raises it.

    first: the prediction of the first reading, where it is known."""
    read = as_measured(run, readings().nanotron)
    made = first if first is not None and same(read, run) else first_prediction(read)
    return (read, made) if _room(read, made) else _until_it_fits(read, made)


def same(one: Run, other: Run) -> bool:
    """Whether two readings of a run have one prediction."""
    return (one.plan, one.stack) == (other.plan, other.stack)


def as_measured(run: Run, known: JobThresholds) -> Run:
    """The run with what its time decides."""
    if not nanotron.of_benchmark(run.row):
        return run
    counts = stages_of(run.model, run.plan.mesh.pp) if isinstance(run.model, LlamaConfig) else ()
    if counts and counts != run.plan.schedule.layers_per_stage:
        note = f"stages of {' '.join(map(str, counts))} layers: as its step times have it, where a share is met exactly"
        plan = replace(run.plan, schedule=replace(run.plan.schedule, layers_per_stage=counts))
        run = replace(run, plan=plan, notes=(*run.notes, note))
    return replace(run, stack=nanotron.as_timed(run.stack, run.row, known))


def _until_it_fits(run: Run, made: Prediction) -> tuple[Run, Prediction]:
    """Other readings in turn until one fits: the run ran, so its memory sufficed. A source that states its recompute
    is taken at its word; the first reading, where nothing fits."""
    last = _least(run, (run, made)) if run.recompute_open else (run, made)
    if run.recompute_open and _whole_layers(last[0].plan.saved):
        lighter = next((other for other in _other_settings(run) if other.notes[-1].endswith(NARROWER)), None)
        if lighter is not None and _room(lighter, tried := first_prediction(lighter)):
            return lighter, tried
    for other in () if _room(*last) else _other_settings(run):
        try:
            candidate = other, first_prediction(other)
            if not _room(*candidate) and run.recompute_open:
                candidate = _least(other, candidate)
        except GnomonError:
            continue
        if _room(*candidate):
            return candidate
    return last


def _other_settings(run: Run) -> Iterator[Run]:
    """The run with other settings in place of those that a table of NeMo's runs assumes: gradients in bf16; parameters
    divided too (Megatron-FSDP), which needs no stages; experts divided over tp, Megatron Core's default."""
    plan, row = run.plan, run.row
    if not re.search("megatron-bridge|nemo", row.framework.lower()) or "dist" not in (row.zero_or_fsdp or ""):
        return
    tries: list[tuple[Plan, str]] = []
    if plan.precision.param == "bf16" and plan.precision.grad == "fp32":
        tries.append((replace(plan, precision=replace(plan.precision, grad="bf16", reduce="bf16")), NARROWER))
    mesh = plan.mesh
    divides = mesh.dp_shard * mesh.cp * mesh.tp % (mesh.ep * mesh.tp) == 0
    if row.experts and mesh.tp > 1 and mesh.etp == 1 and divides:
        tries.append((replace(plan, mesh=replace(plan.mesh, etp=plan.mesh.tp)), "experts divided over tp"))
    if plan.mesh.pp == 1:
        tries.append((replace(plan, optimizer=replace(plan.optimizer, zero=3)), "parameters divided too"))
    for tried, what in tries:
        note = f"does not fit as the table assumes; taken with {what}"
        yield replace(run, plan=tried, notes=(*run.notes, note))


def _room(run: Run, result: Prediction) -> bool:
    """Whether it may have run; under XLA, which would rather make tensors again than gather parameters late, with room
    to do as it likes."""
    return result.has_room if re.search(XLA, run.row.framework.lower()) else result.may_have_run


def _least(run: Run, first: tuple[Run, Prediction]) -> tuple[Run, Prediction]:
    """With the least recompute that fits, or as much as can be."""
    last = first
    xla = bool(re.search(XLA, run.row.framework.lower()))
    for saved in lighter_first(run.row.layers or 0, run.plan.num_stages, xla=xla)[1:]:
        tried = replace(run, plan=replace(run.plan, saved=saved))
        try:
            result = first_prediction(tried)
        except GnomonError:
            continue
        what = "the least that fits" if _room(tried, result) else "nothing fits; taken as much as can be"
        last = replace(tried, notes=(*run.notes, f"recompute not stated: {what}, {_words(saved)}")), result
        if _room(tried, result):
            break
    return last


def _whole_layers(saved: Saved) -> bool:
    """Whether whole layers run again, all or some."""
    everything = any(rule.tensors == ("*",) and rule.action == "recompute" for rule in saved.rules)
    return saved.preset == "full" or everything


def _words(saved: Saved) -> str:
    if _whole_layers(saved) and not any(rule.first_per_stage for rule in saved.rules):
        return (
            "all layers, their inputs on the host" if any(r.action == "offload" for r in saved.rules) else "all layers"
        )
    counts = [rule.first_per_stage for rule in saved.rules if rule.first_per_stage is not None]
    layers = f"{counts[0]} layers of each stage, " if counts else ""
    return f"{layers}norms and activations"
