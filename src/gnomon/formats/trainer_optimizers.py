"""The update that a trainer's file asks for, by the names that trainers around transformers share.

`update_of(f, key, default)` reads the optimizer's name and what belongs to it: moments in eight or four bits, states in
pages, gradients projected to few dimensions (GaLore, APOLLO), parameters updated within the backward. `Update.plan`
puts it into a plan. Read from huggingface/transformers v5.23 src/transformers/{training_args,trainer,
trainer_optimizer}.py, bitsandbytes 0.48 bitsandbytes/optim, pytorch/ao torchao/optim, hiyouga/LLaMA-Factory ff6d4d1
src/llamafactory/{hparams/finetuning_args,train/trainer_utils}.py and modelscope/ms-swift 4.0 swift/optimizers/galore.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

from gnomon.errors import nearest
from gnomon.formats.given import Network, network_graph
from gnomon.formats.job import Fields
from gnomon.formats.trainer_words import flag, names_of
from gnomon.plans import LowRank, Overlap, Plan

OPTIMIZERS = {
    "galore_adafactor*": "adafactor",
    "adamw*": "adamw",
    "paged_adamw*": "adamw",
    "*lion*": "lion",
    "adam": "adam",
    "adam_*": "adam",
    "sgd*": "sgd",
    "adafactor": "adafactor",
    "*muon*": "muon",
    "*adamw*": "adamw",
}
"""Pattern of an optimizer's name -> ours."""

NAMED = frozenset(
    """
    adamw_torch adamw_torch_fused adamw_torch_xla adamw_torch_npu_fused adamw_apex_fused adamw_anyprecision adamw_hf
    adamw_torch_4bit adamw_torch_8bit adamw_8bit adamw_bnb_8bit adamw_32bit adamw adam adafactor ademamix ademamix_8bit
    paged_adamw paged_adamw_32bit paged_adamw_8bit paged_ademamix_32bit paged_ademamix_8bit lion_32bit lion_8bit lion
    paged_lion_32bit paged_lion_8bit sgd adagrad rmsprop rmsprop_bnb rmsprop_bnb_8bit rmsprop_bnb_32bit galore_adamw
    galore_adamw_8bit galore_adafactor galore_adamw_layerwise galore_adamw_8bit_layerwise galore_adafactor_layerwise
    lomo adalomo grokadamw schedule_free_radam schedule_free_adamw schedule_free_sgd apollo_adamw
    apollo_adamw_layerwise stable_adamw muon optimi_adamw ao_adamw_4bit ao_adamw_8bit ao_adamw_fp8 adopt_adamw
    came_pytorch lion_pytorch dion sinkgd q_galore_adamw8bit
    """.split()
)
"""Names of transformers' OptimizerNames, and of axolotl's own."""

States = Literal["fp32", "int8", "fp4_e2m1", "fp8_e4m3"]

Q_GALORE = "weights and projections are held in eight and four bits too: memory is too large"
DIVIDED = "projects whole gradients, which {by} divides over ranks: train by replicas, without deepspeed and fsdp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """The optimizer of a job, and how its states are kept."""

    key: str
    """The file's key that asks for what is no plain update of whole gradients."""
    kind: str = "adamw"
    """As `Optimizer.kind`."""
    states: States | None = None
    """Dtype of its moments where it is not that of the precision."""
    wide_tables: bool = False
    """As `Precision.wide_tables`: transformers' Trainer has bitsandbytes keep those of embeddings in 32 bits."""
    paged: bool = False
    low_rank: LowRank | None = None
    in_backward: bool = False
    """Each parameter is updated where its gradient is made, as layerwise optimizers and torchtune's optimizer_in_bwd
    do."""

    def plan(self, plan: Plan) -> Plan:
        """The plan with it. On the host there are no narrow states and no pages."""
        optimizer = replace(plan.optimizer, kind=self.kind, low_rank=self.low_rank)  # type: ignore[arg-type]
        precision = plan.precision
        if plan.optimizer.offload is None:
            optimizer = replace(optimizer, paged=self.paged)
            precision = replace(precision, states=self.states or precision.states, wide_tables=self.wide_tables)
        if not self.in_backward:
            return replace(plan, optimizer=optimizer, precision=precision)
        return replace(
            plan, optimizer=replace(optimizer, clip=False), precision=precision, overlap=Overlap(optimizer=True)
        )

    def check(self, f: Fields, *, divided_by: str, devices: int, steps: int) -> None:
        """One line, with the file's own key, for what its program refuses. divided_by: the key that divides gradients
        over ranks; empty for replicas."""
        if self.low_rank is not None and divided_by:
            f.fail(self.key, DIVIDED.format(by=divided_by))
        if self.in_backward and steps > 1:
            f.fail(self.key, f"updates after each gradient, of which a step adds up {steps}: make it one microbatch")
        if self.in_backward and self.low_rank is not None and devices > 1:
            f.fail(self.key, f"updates layer by layer on one device only, and there are {devices}")


ADAMW = Update(key="optim")
"""Plain AdamW."""


def update_of(f: Fields, key: str, default: str, model: Network | str | None = None) -> Update:
    """The update of an optimizer's name; one that is not known counts as AdamW, and is listed. model: that is
    trained, whose linears are looked at where gradients are projected."""
    if f.raw(key) is True:
        f.fail(key, f"expected a name of an optimizer, as in {default}")
    name = str(f.raw(key) or default).lower()
    kind = next((ours for pattern, ours in OPTIMIZERS.items() if fnmatchcase(name, pattern)), None)
    if kind is not None and key in ("optim", "optimizer") and name not in NAMED:
        f.report(key, f"no optimizer of transformers has the name{nearest(name, NAMED)}; priced as {kind}")
    elif kind is None:
        f.report(key, "another update; priced as AdamW")
    by_trainer = key in ("optim", "optimizer") and "torch" not in name and not name.startswith("ao_")
    states = _states_of(name, by_trainer)
    low_rank, update_key, in_backward = _low_rank(f, key, name, model)
    return Update(
        key=update_key,
        kind=kind or "adamw",
        states=states,
        wide_tables=by_trainer and states == "int8" and low_rank is None,
        paged="paged" in name,
        low_rank=low_rank,
        in_backward=in_backward,
    )


def _states_of(name: str, by_trainer: bool) -> States | None:
    """Moments of bitsandbytes and torchao: a byte or half of one for each, with scales for blocks of them; bitsandbytes
    keeps the others in 32 bits, whatever the parameters' dtype."""
    if re.search(r"8_?bit", name):
        return "int8"
    if re.search(r"4_?bit", name):
        return "fp4_e2m1"
    if name == "ao_adamw_fp8":
        return "fp8_e4m3"
    return "fp32" if "32bit" in name or (by_trainer and name.startswith("paged_")) else None


PROJECTED = ("galore", "apollo")


def _low_rank(f: Fields, key: str, name: str, model: Network | str | None) -> tuple[LowRank | None, str, bool]:
    """(how gradients are projected, the key that says so, whether layer by layer), by transformers' names of optimizers
    or by the switches of LLaMA-Factory and ms-swift."""
    for method in PROJECTED:
        if flag(f, f"use_{method}"):
            return _by_switch(f, method, model)
    method = next((one for one in PROJECTED if name.startswith((one, f"q_{one}"))), "")
    if not method:
        return None, key, name in ("lomo", "adalomo")
    options = _options(f)
    if (targets_value := f.raw("optim_target_modules")) is None:
        f.fail("optim_target_modules", f"{name} needs to know which linears it is for: give all-linear, or names")
    if name.startswith("q_"):
        f.report(key, Q_GALORE)
        options |= {"rank": f.raw("qgalore_rank") or 256, "update_proj_gap": f.raw("qgalore_update_proj_gap") or 200}
    low_rank = LowRank(
        method=method,  # type: ignore[arg-type]
        rank=_whole(f, "optim_args", options.get("rank", 128)),
        every=_whole(f, "optim_args", options.get("update_proj_gap", 200)),
        projection=_projection(method, options.get("proj")),
        targets=_targets(f, targets_value, model),
    )
    return low_rank, key, name.endswith("layerwise")


def _by_switch(f: Fields, method: str, model: Network | str | None) -> tuple[LowRank, str, bool]:
    """LLaMA-Factory's `galore_rank` … and ms-swift's, whose defaults differ."""
    swift = f.has("train_type") or f.has("tuner_type") or f.has("model")
    rank, every = (128, 50) if swift else (16, 200)
    named = f.raw(f"{method}_target") or f.raw(f"{method}_target_modules") or "all"
    layerwise = flag(f, f"{method}_layerwise")
    f.ignore(f"{method}_optim_per_parameter")  # ms-swift's: an optimizer a parameter, all of which step after backward
    if flag(f, f"{method}_quantization"):
        f.report(f"{method}_quantization", Q_GALORE)
    f.ignore(*(f"{method}_{one}" for one in ("scale", "proj_type", "scale_type", "scale_front", "proj_quant")))
    low_rank = LowRank(
        method=method,  # type: ignore[arg-type]
        rank=f.integer(f"{method}_rank", rank),
        every=f.integer(f"{method}_update_proj_gap" if swift else f"{method}_update_interval", every),
        projection=_projection(method, f.raw(f"{method}_proj")),
        targets=("*",) if named in ("all", "all-linear") else tuple(f"*{one}*" for one in names_of(named)),
    )
    return low_rank, f"use_{method}", layerwise


def _projection(method: str, named: object) -> Literal["svd", "random"]:
    usual: Literal["svd", "random"] = "random" if method == "apollo" else "svd"
    return usual if named is None else "svd" if named == "svd" else "random"


def _options(f: Fields) -> dict[str, object]:
    """`optim_args`, as `rank=64, update_proj_gap=100` or a mapping."""
    value = f.raw("optim_args")
    options_given = {n.partition(".")[2]: f.raw(n) for n in f.names() if n.startswith("optim_args.")}
    if isinstance(value, Mapping):
        return {**value}
    pairs = (part.partition("=") for part in str(value or "").split(","))
    return {name.strip(): text.strip() for name, _, text in pairs if text.strip()} | options_given


def _whole(f: Fields, key: str, value: object) -> int:
    text = str(value)
    if not text.isdecimal() or int(text) < 1:
        f.fail(key, f"{value!r} is no whole number of at least 1")
    return int(text)


def _targets(f: Fields, targets_value: object, model: Network | str | None) -> tuple[str, ...]:
    """Our patterns of `optim_target_modules`: all linears, the head among them; parts of names; or a regular expression
    of whole ones."""
    if isinstance(targets_value, str) and targets_value.replace("_", "-") == "all-linear":
        return ("*", "lm_head.weight")
    if isinstance(targets_value, Sequence) and not isinstance(targets_value, str):
        return tuple(f"*{name}*" for name in targets_value)
    if model is None:
        return ("*",)
    graph = network_graph(model)
    found = {
        tensor.name
        for layer in graph.layers()
        for tensor in graph.block(layer.call.block).parameters
        if re.fullmatch(str(targets_value), layer.call.parameter_name(tensor.name, layer.index).removesuffix(".weight"))
    }
    if not found:
        f.fail("optim_target_modules", f"no module of the network has a name that matches {targets_value!r}")
    return tuple(sorted(found))
