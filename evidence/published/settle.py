"""What a source leaves open about recompute, settled as an honest reader would: the least that fits.

`settled(run)` returns the run to predict, with a note on what was taken. The run ran, so its memory sufficed: where the
source is silent, it is read with the least recompute with which the prediction fits the device, or as it is if none
does. A source that states its recompute is taken at its word.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from evidence.published.run import Run
from evidence.published.settings import XLA, lighter_first
from gnomon.errors import GnomonError
from gnomon.plans import Plan, Saved
from gnomon.prediction import Prediction, predict

NARROWER = "bf16 gradients"
"""Tried before whole layers are taken to run again: those who could choose would rather not."""


def settled(run: Run) -> tuple[Run, Prediction]:
    """The run as it is to be read, and its prediction. GnomonError as `predict` raises it."""
    first = run, _predicted(run)
    if _room(*first):
        return first
    last = _least(run, first) if run.recompute_open else first
    if run.recompute_open and _whole_layers(last[0].plan.saved):
        lighter = next((other for other in otherwise(run) if other.notes[-1].endswith(NARROWER)), None)
        if lighter is not None and _room(lighter, made := _predicted(lighter)):
            return lighter, made
    for other in () if _room(*last) else otherwise(run):
        try:
            found = other, _predicted(other)
            if not _room(*found) and run.recompute_open:
                found = _least(other, found)
        except GnomonError:
            continue
        if _room(*found):
            return found
    return last


def otherwise(run: Run) -> Iterator[Run]:
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


def _predicted(run: Run) -> Prediction:
    return predict(run.graph, run.cluster, run.plan, run.workload, run.stack)


def _room(run: Run, found: Prediction) -> bool:
    """Whether it may have run; under XLA, which would rather make tensors again than gather parameters late, with room
    to do as it likes."""
    return found.has_room if re.search(XLA, run.row.framework.lower()) else found.may_have_run


def _least(run: Run, first: tuple[Run, Prediction]) -> tuple[Run, Prediction]:
    """With the least recompute that fits, or as much as can be."""
    last = first
    xla = bool(re.search(XLA, run.row.framework.lower()))
    for saved in lighter_first(run.row.layers or 0, run.plan.num_stages, xla=xla)[1:]:
        tried = replace(run, plan=replace(run.plan, saved=saved))
        try:
            found = _predicted(tried)
        except GnomonError:
            continue
        what = "the least that fits" if _room(tried, found) else "nothing fits; taken as much as can be"
        last = replace(tried, notes=(*run.notes, f"recompute not stated: {what}, {_words(saved)}")), found
        if _room(tried, found):
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
