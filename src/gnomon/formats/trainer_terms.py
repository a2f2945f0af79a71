"""Words of trainers around transformers for changes of a job: keys of their YAML, or flags of their command.

`trainer_terms(…)` puts together what they share (batch, checkpointing, Liger, optimizers, sharding by a DeepSpeed file
or by FSDP) under each one's names; `DEEPSPEED` are those of DeepSpeed's own JSON. The rest is in the programs' folders.
Read where the readers were read from. Leaves out what the words do (`search.fit.options`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from gnomon.late import load_late
from gnomon.plans import Plan, Precision
from gnomon.search.fit.terms import REMOVED, Change, Setting, Style, Terms, Words
from gnomon.software import Stack, with_facts

AUTO: Mapping[str, object] = {
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "gradient_clipping": "auto",
    "gradient_accumulation_steps": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}
"""What is left to the trainer, whose own arguments say it."""


def _sharding(plan: Plan) -> dict[str, object]:
    """DeepSpeed's zero_optimization of a plan."""
    optimizer = plan.optimizer
    out: dict[str, object] = {"stage": optimizer.zero}
    if optimizer.offload is not None:
        out["offload_optimizer"] = {"device": "cpu"}
    if optimizer.offload_parameters:
        out["offload_param"] = {"device": "cpu" if optimizer.parameter_tier == "host" else "nvme"}
    return out


SHARDING = ("stage", "offload_optimizer", "offload_param")
"""Keys of zero_optimization that `_sharding` says; the others stay as they are."""


def _engine(plan: Plan, engine: Mapping[str, object] | None) -> dict[str, object]:
    """The whole configuration of a plan: what there is of it, with its sharding. engine: None for one that is not
    there, whose other fields are then left to the trainer."""
    rest = {name: value for name, value in (engine or AUTO).items() if name != "zero_optimization"}
    # The user's bucket sizes and thresholds stay: only what the plan decides is replaced.
    old = (engine or {}).get("zero_optimization", {})
    remaining = {k: v for k, v in old.items() if k not in SHARDING} if isinstance(old, Mapping) else {}
    return {"zero_optimization": {**_sharding(plan), **remaining}, **rest}


def on_host(change: Change) -> bool:
    """Whether gradients are summed on the host where the optimizer is there, as DeepSpeed does."""
    offload = change.after.optimizer.offload
    # A plan that sums on the device has no spelling in DeepSpeed's file.
    return offload is None or offload.accumulate == "host"


def _zero_json(change: Change) -> list[Setting] | None:
    if not on_host(change):
        return None
    return [("zero_optimization", json.dumps(_sharding(change.after)))]


def _bucket_elements(change: Change) -> int:
    """Elements of DeepSpeed's bucket, which a plan has in bytes of what is reduced."""
    # Its buckets are counted in elements of what is reduced.
    width = {"fp32": 4}.get(change.after.precision.reduce, 2)
    return (change.after.overlap.bucket_bytes or 0) // width


DEEPSPEED = Terms(
    style="json",
    words={
        "zero": _zero_json,
        "optimizer_offload": _zero_json,
        "parameter_offload": _zero_json,
        "parameter_disk": _zero_json,
        "bucket_bytes": lambda change: [("zero_optimization.reduce_bucket_size", _bucket_elements(change))],
        "prefetch": lambda change: [("zero_optimization.stage3_prefetch_bucket_size", 0)],
        "precision": lambda change: [("bf16", '{"enabled": true}')],
        "global_batch": lambda change: [("gradient_accumulation_steps", change.microbatches)],
        "micro_batch_size": lambda change: [
            ("train_micro_batch_size_per_gpu", change.micro),
            ("gradient_accumulation_steps", change.microbatches),
        ],
        "recompute": lambda change: [("", "in the script: model.gradient_checkpointing_enable()")],
        "tp": lambda change: [("tensor_parallel.autotp_size", change.after.mesh.tp)],
    },
)
"""Of a configuration of DeepSpeed by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerTerms:
    """The names that one trainer spells settings by."""

    micro: str = "per_device_train_batch_size"
    steps: str = "gradient_accumulation_steps"
    recompute: tuple[str, bool] = ("gradient_checkpointing", True)
    """The switch, and what it is where layers are recomputed."""
    chunked_loss: tuple[Setting, ...] = (("use_liger_kernel", True),)
    all_of_liger: bool = True
    """Whether that puts Liger's norms and activations in place too."""
    optim: str = "optim"
    """The key of the optimizer's name, which is transformers' OptimizerNames'."""
    low_rank: Words | None = None
    """What projects gradients; None for transformers' own names of optimizers."""
    deepspeed: Mapping[tuple[int, bool, bool], str] = field(default_factory=dict)
    """(stage, optimizer on the host, parameters there) -> the value of `deepspeed` that names a file of the project."""
    beside_zero_3: tuple[Setting, ...] = ()
    """What of the job's settings the program refuses under DeepSpeed's stage 3, as it is then."""
    fsdp_host: Words
    """What moves FSDP's parameters and states to the host."""
    fsdp: tuple[Setting, ...]
    """What shards a job of replicas by FSDP; empty where DeepSpeed is the way."""
    away: tuple[Setting, ...] = ()
    """What sends checkpoints to the host; empty where the program does not."""
    all_away: bool = False
    """Whether it sends all that is kept, where nothing is recomputed."""
    adapters: tuple[Setting, ...] = ()
    """What trains LoRA on all linears of layers in place of the whole network; empty where a file cannot say so."""
    quantised: tuple[Setting, ...] = ()
    """What, beside `adapters`, stores the frozen network in NF4."""
    further: Mapping[str, Words] = field(default_factory=dict)
    """Of options beside these."""


def _narrow(spelled: TrainerTerms, change: Change) -> list[Setting]:
    kind = change.after.optimizer.kind
    return [(spelled.optim, "lion_8bit" if kind == "lion" else "adamw_bnb_8bit")]


def _paged(spelled: TrainerTerms, change: Change) -> list[Setting]:
    bits = 8 if change.after.precision.states == "int8" else 32
    return [(spelled.optim, f"paged_adamw_{bits}bit")]


def _low_rank(spelled: TrainerTerms, change: Change, style: Style) -> list[Setting] | None:
    """Writes transformers' names: APOLLO's moments are of the parameters' dtype, GaLore's may have eight bits."""
    low, narrow = change.after.optimizer.low_rank, change.after.precision.states == "int8"
    # A flag is one word: transformers takes it for a regular expression.
    linears = ".*(attn|mlp).*" if style == "flags" else "[attn, mlp]"
    if low is None or (narrow and low.method == "apollo"):
        return None
    return [
        (spelled.optim, f"{low.method}_adamw{'_8bit' if narrow else ''}"),
        ("optim_target_modules", linears),
        ("optim_args", f"rank={low.rank},update_proj_gap={low.every}"),
    ]


def trainer_terms(
    spelled: TrainerTerms,
    *,
    by: str,
    style: Style = "yaml",
    engine: Mapping[str, object] | None = None,
    table: bool = False,
    named: str = "",
) -> Terms:
    """Lists a trainer's terms. by: what shards the job, `deepspeed`, `fsdp` or nothing (replicas). engine: DeepSpeed's
    configuration of the job, where it is the user's own; table: whether that is a table in the file itself. named: the
    file that the job names, which a project may ship."""
    usual = _shipped(named)

    def file_of(plan: Plan) -> str:
        optimizer = plan.optimizer
        return spelled.deepspeed.get((optimizer.zero, optimizer.offload is not None, optimizer.offload_parameters), "")

    def file(change: Change) -> list[Setting] | None:
        lines = configuration(change)
        extra_lines = spelled.beside_zero_3 if change.after.optimizer.zero == 3 != change.before.optimizer.zero else ()
        return None if lines is None else [*lines, *extra_lines]

    def configuration(change: Change) -> list[Setting] | None:
        if not on_host(change):
            return None
        name = file_of(change.after)
        # A file that the project ships is what its users know; a table of one's own only where there is none.
        if engine is None and name:
            return [("deepspeed", name)]
        if not table:
            return [("deepspeed", _engine(change.after, engine or usual))]
        sharding = _sharding(change.after)
        # Left in, an offload of the plan before would still be on.
        gone: dict[str, object] = {name: REMOVED for name in SHARDING if name not in sharding}
        return [
            (f"deepspeed.zero_optimization.{name}", json.dumps(value) if isinstance(value, dict) else value)
            for name, value in (sharding | gone).items()
        ]

    def recompute(change: Change) -> list[Setting] | None:
        """All of a layer, or nothing of it."""
        key, on = spelled.recompute
        preset = change.after.saved.preset
        # transformers' gradient checkpointing is a layer whole or not at all.
        return None if preset == "selective" else [(key, on if preset == "full" else not on)]

    words: dict[str, Words] = {
        "micro_batch_size": lambda change: [(spelled.micro, change.micro), (spelled.steps, change.microbatches)],
        "recompute": recompute,
        "precision": lambda change: [("bf16", True)],
        "tf32": lambda change: [("tf32", True)],
        "global_batch": lambda change: [(spelled.steps, change.microbatches)],
        "chunked_loss": lambda change: spelled.chunked_loss,
        "eight_bit_states": lambda change: _narrow(spelled, change),
        "four_bit_states": lambda change: [(spelled.optim, "adamw_torch_4bit")],
        "paged_states": lambda change: _paged(spelled, change),
        "low_rank": spelled.low_rank or (lambda change: _low_rank(spelled, change, style)),
    }
    if spelled.away:
        words["input_offload"] = lambda change: spelled.away
    if spelled.adapters:
        words["adapters"] = lambda change: spelled.adapters
    if spelled.adapters and spelled.quantised:
        words["adapters_nf4"] = lambda change: tuple((dict(spelled.adapters) | dict(spelled.quantised)).items())
    if spelled.all_away:
        words["activation_offload"] = lambda change: spelled.away
    if by == "deepspeed":
        words |= {
            "zero": file,
            "optimizer_offload": file,
            "parameter_offload": file,
            "bucket_bytes": lambda change: [
                ("", f'in the DeepSpeed file: "reduce_bucket_size": {_bucket_elements(change)}')
            ],
            "prefetch": lambda change: [("", 'in the DeepSpeed file: "stage3_prefetch_bucket_size": 0')],
        }
    elif by == "fsdp":
        words |= {
            "cpu_offload": spelled.fsdp_host,
            "reshard_after_forward": lambda change: spelled.fsdp,
        }
    else:
        words["zero"] = (lambda change: spelled.fsdp) if spelled.fsdp else file

    def plan_of_change(change: Change) -> Plan:
        """Brings what shards the job its own dtypes, where replicas become shards, and under ZeRO 3, which the plan
        before had not, what the project's file says of gathering ahead."""
        plan = change.after
        if not by and plan.optimizer.zero and not change.before.optimizer.zero:
            plan = replace(plan, precision=_sharded_dtypes(plan.precision, bool(spelled.fsdp)))
        if plan.optimizer.zero != 3 or change.before.optimizer.zero == 3 or not by and spelled.fsdp:
            return plan
        configured = engine or _shipped(file_of(plan)) or usual or {}
        stages = configured.get("zero_optimization", {})
        # ZeRO 3's gathers run ahead only with overlap_comm, which is its default at that stage.
        ahead = not isinstance(stages, Mapping) or stages.get("overlap_comm", True) is True
        return replace(plan, overlap=replace(plan.overlap, param_gather=ahead, prefetch=int(ahead)))

    extra_lines = {"chunked_loss": _with_ligers_modules} if spelled.all_of_liger else {}
    return Terms(style=style, words={**words, **spelled.further}, stack_changes=extra_lines, plan_of=plan_of_change)


def _shipped(name: str) -> Mapping[str, object] | None:
    """DeepSpeed's configuration of a file that a project ships under that name."""
    # By name: the reader of DeepSpeed's own files takes its words from here.
    found: tuple[Mapping[str, object], str] | None = load_late("gnomon.formats.deepspeed.shipped:shipped")(name)
    return None if found is None else found[0]


def _sharded_dtypes(before: Precision, by_fsdp: bool) -> Precision:
    """Dtypes of replicas in 16 bits once accelerate's FSDP or DeepSpeed shards them: FSDP widens what is trained to
    fp32, DeepSpeed has a copy in fp32; both reduce in the compute dtype, and states are in fp32 unless narrower."""
    if before.compute == "fp32":
        return before
    states = before.states if before.states in NARROW_STATES else "fp32"
    stored, master = ("fp32", "none") if by_fsdp else (before.compute, "fp32")
    return replace(before, param=stored, grad=stored, reduce=before.compute, master=master, states=states)  # type: ignore[arg-type]


NARROW_STATES = ("int8", "fp4_e2m1")
"""Dtypes of states that an optimizer of their own chooses, whatever those of the parameters are."""


def _with_ligers_modules(record: Stack) -> Stack:
    return with_facts(record, "linkedin/Liger-Kernel", "2026-11-29", norm="fused", activation="fused")


def fsdp_of(plan: Plan) -> str:
    """TrainingArguments' `fsdp` of a plan."""
    words = ["full_shard" if plan.optimizer.reshard_after_forward else "shard_grad_op", "auto_wrap"]
    if plan.mesh.dp_replicate > 1:
        words[0] = "hybrid_shard" if plan.optimizer.reshard_after_forward else "hybrid_shard_zero2"
    return " ".join([*words, *(["offload"] if plan.optimizer.offload_parameters else [])])


def fsdp_host(change: Change) -> list[Setting]:
    """TrainingArguments' words for what FSDP has on the host, sharded as before."""
    return [("fsdp", fsdp_of(change.after))]


HUGGING_FACE = TrainerTerms(fsdp_host=fsdp_host, fsdp=(("fsdp", "full_shard auto_wrap"),))
"""Scripts that parse TrainingArguments, TRL's among them."""
