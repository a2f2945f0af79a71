"""Plan, workload, cluster and stack of a published run.

Each function returns a value with notes on what the row leaves open and how it was filled in; InputError says what is
missing or what no plan can say. Leaves out whether the plan can run: `plans.check` and `predict` decide that.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache

from gnomon.errors import InputError
from gnomon.formats.job import chosen
from gnomon.formats.nanotron import stages_of
from gnomon.formats.published.megatron_ci import expert_slices, optimizer_instances, with_test_options
from gnomon.formats.published.notes import NoteFacts
from gnomon.formats.published.row import Row
from gnomon.hardware import Cluster, NodeGroup, catalogue, parse_cluster
from gnomon.models.llama import LlamaConfig
from gnomon.plans import (
    DType,
    Fp8,
    Layout,
    Mesh,
    Optimizer,
    Overlap,
    Plan,
    Precision,
    Saved,
    SavedRule,
    Schedule,
    Split,
    Stack,
    Workload,
)
from gnomon.plans.stacks import stack as named_stack

Notes = tuple[str, ...]

FRAMEWORKS = (
    (r"nanotron", "nanotron"),
    (r"megatron-deepspeed|megatron\+deepspeed", "megatron-deepspeed"),
    (r"megatron-bridge", "megatron-bridge"),
    (r"automodel|torchtitan|fsdp2", "torchtitan"),
    (r"nemo", "megatron-bridge"),
    (r"composer|llm-foundry", "llm-foundry"),
    (r"megatron", "megatron-lm"),
    (r"deepspeed", "deepspeed"),
    (r"pytorch|fsdp1", "pytorch-fsdp"),
)
"""(pattern of frameworks, stack that it is, or that is nearest to it). What matches none is a stack of which nothing is
known."""

SAME = r"nanotron|megatron-deepspeed|megatron-bridge|torchtitan|composer|^megatron-lm(?: ci)?$"
"""Frameworks that the stack's record is about; for others it is the nearest, and a note says so."""

DEVICES = {
    "a100": ("a100-sxm-80gb", "memory of the A100 not stated: taken as 80 GB"),
    "a100-sxm-80gb?": ("a100-sxm-80gb", "device not in the source that was read: taken as A100 80 GB"),
    "a100-40gb": ("a100-sxm-40gb", "form of the A100 not stated: taken as SXM"),
    "v100-sxm3-32gb(DGX-2H)": ("v100-sxm3-32gb", ""),
    "tpu7x-ironwood(chip)": ("tpu-7x", ""),
}
"""Names of the table -> (name in the catalogue, what was assumed)."""

NETWORKS = (
    (r"AWS EFA", "aws-p5", None, 0),
    (r"Omni-Path", "jean-zay-a100", None, 0),
    (r"1600 Gbps", None, "roce-200", 8),
    (r"800 Gbps total/node", None, "infiniband-hdr", 4),
    (r"EDR", None, "infiniband-edr", 1),
    (r"RoCE 400 Gbps per GPU", None, "roce-400", 8),
    (r"^400 Gbps$", None, "roce-100", 4),
    (r"^800 Gbps$", None, "roce-100", 8),
)
"""(pattern of the interconnect column, node, port, ports a node). What matches none keeps the device's usual node."""

FP8_RECIPES = {"fp8": "delayed", "fp8-amp": "delayed", "fp8-cs": "tensorwise", "mxfp8": "mxfp8"}
"""Precision of the table -> recipe: plain `fp8` is Transformer Engine's default of these years, delayed scaling."""


def mesh(row: Row) -> tuple[Mesh, Notes]:
    """Axes. InputError when an axis is not given, or the product is not the number of devices."""
    missing = [c for c in ("tp", "pp") if getattr(row, c) is None]
    if missing:
        raise InputError(f"{', '.join(missing)} not given")
    devices, tp, pp, cp, ep = (getattr(row, c) or 1 for c in ("num_devices", "tp", "pp", "cp", "ep"))
    if devices % (tp * pp * cp):
        raise InputError(f"{devices} devices are not a multiple of tp x pp x cp = {tp} x {pp} x {cp}")
    dp = devices // (tp * pp * cp)
    if row.dp is not None and row.dp != dp:
        raise InputError(f"dp = {row.dp}, but {devices} devices / (tp {tp} x pp {pp} x cp {cp}) = {dp}")
    shard = dp // optimizer_instances(row)
    if found := re.search(r"shard=(\d+)", row.zero_or_fsdp or ""):
        shard = min(int(found[1]), dp)
    elif row.zero_or_fsdp == "hsdp":
        shard = min(row.devices_per_node or 8, dp)
    if dp % shard:
        raise InputError(f"{dp} data-parallel ranks are not a multiple of the {shard} that shard")
    etp = expert_slices(row, tp)
    return Mesh(pp=pp, dp_replicate=dp // shard, dp_shard=shard, cp=cp, tp=tp, ep=ep, etp=etp), ()


def plan(row: Row, facts: NoteFacts) -> tuple[Plan, Notes]:
    """Every decision of the run."""
    axes, notes = mesh(row)
    precision, more = _precision(row)
    saved, again = _saved(row)
    schedule = _schedule(row, facts, axes.pp)
    sequence, assumed = _sequence_parallel(row)
    splits = (Split(op="*", dim="seq", parts=axes.tp),) if facts.async_tp and axes.tp > 1 else ()
    made = Plan(
        mesh=axes,
        schedule=schedule,
        saved=saved,
        layout=Layout(sequence_parallel=sequence),
        overlap=Overlap(splits=splits),
        optimizer=_optimizer(row),
        precision=precision,
    )
    return made, (*notes, *more, *again, *assumed)


def with_stages(made: Plan, row: Row, config: object) -> tuple[Plan, Notes]:
    """The plan with the stages that the program cuts, where it does not divide layers evenly."""
    if not re.search(r"nanotron", row.framework.lower()) or not isinstance(config, LlamaConfig):
        return made, ()
    counts = stages_of(config, made.mesh.pp)
    if not counts:
        return made, ()
    listed = " ".join(map(str, counts))
    note = f"stages of {listed} layers: nanotron balances weights, the head's with them"
    return replace(made, schedule=replace(made.schedule, layers_per_stage=counts)), (note,)


def workload(row: Row) -> Workload:
    """The global batch."""
    missing = [c for c in ("global_batch", "seq_len") if getattr(row, c) is None]
    if missing:
        raise InputError(f"{', '.join(missing)} not given")
    return Workload(global_batch_size=row.global_batch or 0, seq_len=row.seq_len or 0)


def stack(row: Row, facts: NoteFacts) -> tuple[Stack, Notes]:
    """What the program does, with what the row says about it."""
    program = row.framework.lower()
    name = next((name for pattern, name in FRAMEWORKS if re.search(pattern, program)), None)
    notes: Notes = ()
    if name is None:
        notes = (f"no record of what {row.framework} does",)
    elif not re.search(SAME, program):
        notes = (f"{row.framework} taken as the stack {name}",)
    attention = None
    if row.flash_attention:
        attention = "unfused" if row.flash_attention.startswith("no") else "flash"
    launch = "compiled" if facts.compiled else None
    found = _chosen(name, row.framework, row.family, attention, launch)
    return with_test_options(found, row), notes


@lru_cache(maxsize=64)
def _chosen(name: str | None, framework: str, family: str, attention: str | None, launch: str | None) -> Stack:
    base = Stack(name=framework, version="") if name is None else named_stack(name)
    return chosen(base, f"published runs, {family}", attention=attention, launch=launch)


def cluster(row: Row) -> tuple[Cluster, Notes]:
    """The machines, with the network that the row names."""
    device, note = DEVICES.get(row.device, (row.device, ""))
    if row.device.startswith("unstated"):
        raise InputError(f"device not stated ({row.device})")
    if row.num_devices is None:
        raise InputError("num_devices not given")
    devices = row.num_devices
    per_node = row.devices_per_node or 8
    if devices > per_node and devices % per_node:
        raise InputError(f"{devices} devices do not fill nodes of {per_node}")
    shape = (devices // per_node, per_node) if devices > per_node else (1, devices)
    found = next((rest for p, *rest in NETWORKS if re.search(p, row.interconnect or "")), (None, None, 0))
    return _cluster(device, shape, *found), (note,) if note else ()


@lru_cache(maxsize=512)
def _cluster(device: str, shape: tuple[int, int], node: str | None, port: str | None, ports: int) -> Cluster:
    nodes, per_node = shape
    if node is not None and catalogue.node(node).device.name == catalogue.device(device).name:
        return parse_cluster(f"{nodes}x{per_node}x{node}")
    made = parse_cluster(f"{nodes}x{per_node}x{device}")
    if port is None or nodes == 1:
        return made
    groups = tuple(
        NodeGroup(node=replace(group.node, nic=catalogue.link(port), nics=ports), count=group.count)
        for group in made.groups
    )
    return replace(made, groups=groups)


def _precision(row: Row) -> tuple[Precision, Notes]:
    name = (row.precision or "").rstrip("?")
    notes: Notes = ()
    if not name:
        name, notes = "bf16", ("precision not stated: taken as bf16",)
    elif row.precision != name:
        notes = (f"precision {name} assumed by the table",)
    whole = bool(re.search(r"fsdp", row.zero_or_fsdp or "")) and "megatron" not in (row.zero_or_fsdp or "")
    if name == "fp32":
        return Precision(param="fp32", compute="fp32", grad="fp32", reduce="fp32", master="none"), notes
    if name == "fp16":
        # Megatron-LM accumulates and reduces fp16 gradients in fp16 unless told otherwise.
        return Precision(param="fp16", compute="fp16", grad="fp16", reduce="fp16"), notes
    if name in FP8_RECIPES:
        base = Precision(param="fp32", master="none") if whole else Precision()
        return replace(base, fp8=Fp8(recipe=FP8_RECIPES[name])), notes  # type: ignore[arg-type]
    if name in ("bf16", "bf16-amp", "bf16-pure"):
        reduce: DType = "bf16" if name == "bf16-pure" else "fp32"
        if whole:  # FSDP keeps fp32 shards and gathers them in bf16
            return Precision(param="fp32", compute="bf16", grad="fp32", reduce=reduce, master="none"), notes
        return Precision(reduce=reduce), notes
    raise InputError(f"precision {row.precision!r} cannot be said in a plan")


def _saved(row: Row) -> tuple[Saved, Notes]:
    how = row.recompute or ""
    notes: Notes = ()
    if not how:
        notes = ("recompute not stated: taken as none",)
    if row.offload and (found := re.fullmatch(r"activation cpu offload num_layers=(\d+)", row.offload)):
        if (row.pp or 1) > 1:
            raise InputError(f"offload {row.offload!r} with pp = {row.pp}: which layers is not said")
        rules = (SavedRule(calls=f"layers[0:{found[1]}]", action="offload"),)
        return Saved(rules=rules), notes
    if row.offload not in (None, "none"):
        raise InputError(f"offload {row.offload!r} cannot be said in a plan")
    if how in ("", "none"):
        return Saved(), notes
    if how == "full block num_layers=None":
        # `block` recomputes the first num_layers of a stage; Megatron Core refuses it without a number
        return Saved(), (*notes, f"recompute {how!r}: a recipe that switches it off names no layers; taken as none")
    if how.startswith("full"):
        return Saved(preset="full"), notes
    if how == "selective":
        if "every k-th block" in row.notes:
            raise InputError("the share of blocks that are recomputed is not given")
        return Saved(preset="selective"), notes
    if how.startswith("selective ["):
        return Saved(), (*notes, f"recompute {how} taken as none: memory is over-, time underestimated")
    raise InputError(f"recompute {how!r} cannot be said in a plan")


def _virtual_stages(row: Row, pp: int) -> int:
    text = row.vpp or "1"
    if found := re.fullmatch(r"layers/vstage=(\d+)", text):
        stages, rest = divmod(row.layers or 0, pp * int(found[1]))
        if rest or not stages:
            raise InputError(f"{row.layers} layers do not divide into pp = {pp} with {found[1]} a virtual stage")
        return stages
    if not text.isdigit():
        raise InputError(f"vpp = {text!r} is not a whole number")
    return int(text)


def _schedule(row: Row, facts: NoteFacts, pp: int) -> Schedule:
    if row.micro_batch is None:
        raise InputError("micro_batch not given")
    if facts.method not in ("", "baseline"):
        raise InputError(f"method {facts.method!r} of the vocabulary-parallel paper cannot be said in a plan")
    if facts.schedule == "v-half":
        return Schedule(name="v_half", virtual_stages=2, placement="v", micro_batch_size=row.micro_batch)
    virtual = _virtual_stages(row, pp) if pp > 1 else 1
    name = "interleaved_one_f_one_b" if virtual > 1 else "one_f_one_b"
    return Schedule(name=name, virtual_stages=virtual, micro_batch_size=row.micro_batch)  # type: ignore[arg-type]


def _sequence_parallel(row: Row) -> tuple[bool, Notes]:
    if row.sequence_parallel is not None:
        return row.sequence_parallel == "yes" and (row.tp or 1) > 1, ()
    if "REDUCE_SCATTER" in row.notes and (row.tp or 1) > 1:
        return True, ("sequence parallelism assumed: the benchmark script's last setting",)
    return False, ()


def _optimizer(row: Row) -> Optimizer:
    name = row.zero_or_fsdp or "none"
    if name in ("none", "zero0", "ddp"):
        return Optimizer(zero=0)
    if name.startswith(("zero1", "zero2")):
        return Optimizer(zero=1 if name.startswith("zero1") else 2)
    if name == "fsdp-shard_grad_op":
        return Optimizer(zero=3, reshard_after_forward=False)
    if name in ("zero3", "hsdp") or re.fullmatch(r"fsdp(\d*|-full_shard|2 shard=\d+|\(megatron\) shard=\d+)", name):
        return Optimizer(zero=3)
    raise InputError(f"zero_or_fsdp = {name!r} cannot be said in a plan")
