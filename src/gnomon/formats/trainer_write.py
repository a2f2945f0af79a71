"""A plan as a file of a trainer around PyTorch: what LLaMA-Factory's writer shares with axolotl's, TRL's and others'.

`tuning(asked, program)` says the plan in the words that these programs have in common (adapters, quantisation, sharding
by DeepSpeed or FSDP, loss, batch); `drafted(…)` reads what a writer made of it back by the program's own reader. Leaves
out each program's keys (its own folder).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from gnomon.errors import InputError, PlanError
from gnomon.formats.deepspeed.write import draft as deepspeed_draft
from gnomon.formats.export import Draft, ExportRequest, need_axes
from gnomon.formats.given import Network, ReadContext
from gnomon.formats.hub import find_network
from gnomon.formats.job import Fields, Job, flatten
from gnomon.formats.trainer_source import Source
from gnomon.formats.trainer_terms import fsdp_of
from gnomon.formats.yaml_file import emit_yaml, read_yaml
from gnomon.models.lora import Adapters, parse_adapters
from gnomon.models.presets import HUB_IDS
from gnomon.plans import Plan
from gnomon.software import Stack

OPTIMS: Mapping[str, str] = {
    "adamw": "adamw_torch", "adam": "adamw_torch", "sgd": "sgd", "momentum": "sgd", "adafactor": "adafactor",
    "lion": "lion_32bit", "muon": "muon",
}  # fmt: skip
"""Our kind of an optimizer -> transformers' name."""

PAGED: Mapping[str, str] = {"adamw": "paged_adamw_32bit", "adam": "paged_adamw_32bit", "lion": "paged_lion_32bit"}
EIGHT_BIT: Mapping[str, str] = {"adamw": "adamw_bnb_8bit", "adam": "adamw_bnb_8bit", "lion": "lion_8bit"}

REASONS = (
    ("mesh.*", "the program divides ranks into replicas, or shards over all of them"),
    ("layout.*", "the model's own modules decide how tensors lie"),
    ("overlap.*", "FSDP and DDP have their defaults; DeepSpeed has overlap_comm and a bucket in elements"),
    ("optimizer.kind", "transformers' optimizers are others"),
    ("optimizer.zero", "without DeepSpeed it is DDP or FSDP (ZeRO 3)"),
    ("optimizer.low_rank*", "projected gradients are switched on by keys of each program's own (docs/levers.md)"),
    ("optimizer.*", "FSDP and DeepSpeed offload in their own units"),
    ("precision.fp8*", "eight-bit products are no field of the file"),
    ("precision.*", "the program loads the model in bf16 and trains it so, or computes by autocast over fp32"),
    ("saved.*", "whole layers are recomputed, all of them, or none"),
    ("software.*", "the program has no switch for this"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """A plan in the words that trainers share."""

    model_id: str
    """Id or path of the network that is loaded."""
    base: Network | str
    """That network."""
    adapters: Adapters | None
    micro: int
    steps: int
    """Microbatches of a step."""
    seq_len: int
    recompute: bool
    """Whole layers."""
    away: bool
    """What is kept for backward waits on the host."""
    half: str
    """`bf16`, `fp16`, or empty."""
    pure: bool
    """Parameters are in the half too, without an fp32 copy."""
    optim: str
    clip: float
    deepspeed: Mapping[str, object] | None
    """What shards the job, where DeepSpeed does."""
    fsdp: str
    """Words of `fsdp`, where FSDP does."""
    loss: str
    """`Loss.cross_entropy`, or empty where the plan's software does not say."""
    fused: bool
    """Norms and activations are one kernel each."""
    compiled: bool
    experts: str
    """`experts_implementation`, or empty."""

    @property
    def targets(self) -> list[str]:
        """Names the linears with adapters; none for all."""
        return list(self.adapters.targets) if self.adapters else []

    @property
    def bits(self) -> int | None:
        """Counts the bits of a frozen weight, where it is quantised: 4 in NF4, 8 in LLM.int8."""
        return None if self.adapters is None else {"nf4": 4, "int8": 8}.get(self.adapters.base)

    @property
    def dtype(self) -> str:
        """Names the dtype in which the model is loaded: DeepSpeed keeps copies in fp32 itself."""
        loaded = self.half if self.pure or self.deepspeed is not None else ""
        return {"bf16": "bfloat16", "fp16": "float16"}.get(loaded, "float32")

    def trainer(self) -> dict[str, object]:
        """Lists the fields of TrainingArguments."""
        values: dict[str, object] = {
            "per_device_train_batch_size": self.micro,
            "gradient_accumulation_steps": self.steps,
            "optim": self.optim,
            "max_grad_norm": self.clip,
            "output_dir": "out",
            **self.liger(),
        }
        if self.compiled:
            values["torch_compile"] = True
        if self.experts:
            values["experts_implementation"] = self.experts
        return values | self.sharding()

    def sharding(self) -> dict[str, object]:
        """Writes `deepspeed` or `fsdp`."""
        if self.deepspeed is not None:
            return {"deepspeed": dict(self.deepspeed)}
        return {"fsdp": self.fsdp} if self.fsdp else {}

    def liger(self, name: str = "use_liger_kernel") -> dict[str, object]:
        """Writes Liger's switches; with single kernels off where the plan has not all of them."""
        kernels = {"rms_norm": self.fused, "swiglu": self.fused, "fused_linear_cross_entropy": self.loss == "chunked"}
        if self.loss == "fused":
            kernels["cross_entropy"] = True
        if not any(kernels.values()):
            return {}
        whole = self.fused and self.loss == "chunked"
        return {name: True} | ({} if whole else {"liger_kernel_config": kernels})


def _optim(plan: Plan) -> str:
    """transformers' name of the optimizer with its states as they are kept."""
    kind, states = plan.optimizer.kind, plan.precision.states
    eight = states == "int8" and kind in EIGHT_BIT
    if plan.optimizer.paged and kind in PAGED:
        # transformers says adamw_bnb_8bit, and paged_adamw_8bit.
        return f"paged_{EIGHT_BIT[kind].replace('_bnb', '')}" if eight else PAGED[kind]
    if states == "fp4_e2m1" and kind == "adamw":
        return "adamw_torch_4bit"
    return (EIGHT_BIT if eight else OPTIMS)[kind]


def tuning(request: ExportRequest, program: str, *, axes: tuple[str, ...] = ("pp", "ep", "etp", "cp", "tp")) -> Tuning:
    """The plan of a fine-tuning job. axes: that the program has not. PlanError for a plan with one of them."""
    need_axes(request, program, *axes)
    plan, stack = request.plan, request.stack
    base, adapters = parse_adapters(request.graph.name)
    if adapters is not None and adapters.whole:
        raise PlanError(f"{program}'s file is not written with modules that are trained whole beside adapters")
    by_deepspeed = plan.optimizer.zero in (1, 2) or (stack is not None and stack.name == "deepspeed")
    by_deepspeed = by_deepspeed or (plan.optimizer.offload is not None and not plan.optimizer.offload_parameters)
    pure = plan.precision.master == "none" and plan.precision.param in ("bf16", "fp16")
    half = next((one for one in (plan.precision.compute, plan.precision.param) if one in ("bf16", "fp16")), "")
    return Tuning(
        model_id=request.model_id or (HUB_IDS[base][0] if base in HUB_IDS else base),
        base=_base(request, base, adapters),
        adapters=adapters,
        micro=request.micro,
        steps=request.microbatches,
        seq_len=request.workload.seq_len or 0,
        recompute=plan.saved.preset != "none" or any(rule.action == "recompute" for rule in plan.saved.rules),
        away=any(rule.action == "offload" for rule in plan.saved.rules),
        half=half,
        pure=pure,
        optim=_optim(plan),
        clip=1.0 if plan.optimizer.clip else 0.0,
        deepspeed=_deepspeed(request) if by_deepspeed else None,
        fsdp="" if by_deepspeed or plan.optimizer.zero == 0 else fsdp_of(plan),
        loss="" if stack is None else stack.loss.cross_entropy or "",
        fused=stack is not None and stack.layers.norm == "fused" and stack.launch.launch_mode != "compiled",
        compiled=stack is not None and stack.launch.launch_mode == "compiled",
        experts=_experts(request, stack),
    )


def _base(request: ExportRequest, name: str, adapters: Adapters | None) -> Network | str:
    """The network without adapters. InputError for one that is known with them only."""
    if request.base is not None:
        return request.base
    if adapters is None:
        return request.model or request.graph
    found = find_network(name)
    if found is None:
        raise InputError(f"{name} is not known by its name, without its adapters; give it too: --model CONFIG.json")
    return found[0]


def _experts(request: ExportRequest, stack: Stack | None) -> str:
    routed = any(op.does == "routes" for block in request.graph.blocks for op in block.ops)
    if stack is None or not routed:
        return ""
    return {"grouped": "grouped_mm", "stacked": "eager"}.get(str(stack.experts.moe_experts), "")


def _deepspeed(request: ExportRequest) -> dict[str, object]:
    """DeepSpeed's configuration, less what the trainer says itself."""
    values: dict[str, object] = json.loads(deepspeed_draft(replace(request, model=None)).text)
    for name in ("optimizer", "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        values.pop(name, None)
    return values


def drafted(
    request: ExportRequest, asks: Tuning, text: str, read: Callable[[ReadContext], Job], *, program: str, start: str
) -> Draft:
    """The draft of a text that `read` reads. start: the command that takes it."""
    job = read(ReadContext(devices=request.plan.mesh.world_size, model=asks.base))
    nodes = "" if request.num_nodes == 1 else f" on each of {request.num_nodes} machines"
    elsewhere = (
        "data, chat template, learning rate and number of steps are placeholders; set yours",
        f"start it with {start}{nodes}",
    )
    return Draft(program=program, text=text, job=job, elsewhere=elsewhere, reasons=REASONS)


def as_yaml(values: Mapping[str, object]) -> str:
    """Writes YAML text; lists are written in one line."""
    plain = {k: v for k, v in values.items() if not isinstance(v, list)}
    lists = "".join(f"{k}: {json.dumps(v)}\n" for k, v in values.items() if isinstance(v, list))
    return emit_yaml(plain) + lists


def source_of(text: str, context: ReadContext) -> Source:
    """A YAML text as a trainer's fields."""
    values = flatten(read_yaml(text, "<export>"))
    return Source(fields=Fields(values, "<export>", context), folder=Path(), program="", num_devices=None)
