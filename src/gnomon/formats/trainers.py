"""Jobs of trainers that wrap PyTorch: what axolotl, LLaMA-Factory, TRL, torchtune, litgpt and others have in common.

`Training` is what such a file says in our terms and `job_of` makes it a Job: replicas or shards by DDP and FSDP, or as
a DeepSpeed file beside it says. `adapted` puts LoRA beside a frozen network. Leaves out the names that each program
gives these things (its own folder).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from gnomon.errors import GraphError, InputError, nearest
from gnomon.formats.deepspeed import read as deepspeed
from gnomon.formats.deepspeed.shipped import named_stage, shipped
from gnomon.formats.given import Network, ReadContext, network_graph
from gnomon.formats.hub import network_called
from gnomon.formats.job import Fields, Job, divides, microbatches, read_source, with_job_fields
from gnomon.formats.keys import read_json
from gnomon.formats.shell import unknown
from gnomon.formats.trainer_optimizers import ADAMW, Update
from gnomon.formats.trainer_words import flag, names_of
from gnomon.graph import Graph
from gnomon.models.lora import INT8, NF4, Adapters, Base, whole_parameters, with_adapters
from gnomon.models.trained import Trained, with_trained
from gnomon.plans import (
    INPUTS_AWAY,
    Layout,
    Mesh,
    Offload,
    Optimizer,
    Overlap,
    Plan,
    Precision,
    Saved,
    SavedRule,
    Schedule,
    Workload,
)
from gnomon.search.space.points import repeated_layers
from gnomon.software import Stack, stack

BF16 = Precision(param="bf16", compute="bf16", grad="bf16", reduce="bf16", master="none", states="bf16")
"""A model loaded in bf16: parameters, gradients and Adam's states."""
AUTOCAST = Precision(param="fp32", compute="bf16", grad="fp32", reduce="fp32", master="none", states="fp32")
"""torch.autocast over fp32 parameters."""
FP32 = Precision(param="fp32", compute="fp32", grad="fp32", reduce="fp32", master="none", states="fp32")
FP16 = replace(AUTOCAST, compute="fp16")

Loss = Literal["unfused", "in_place", "fused", "chunked"]
"""As `Stack.cross_entropy`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Modules:
    """How transformers' modules run in a job: as they are, or as Liger, torch.compile and others put in their place."""

    fused: bool
    """Norms and activations are one kernel each. Otherwise LlamaRMSNorm widens to fp32, squares, scales and multiplies
    in ops of their own, and keeps the fp32 copy and the normalised row; SiLU and its product are two ops
    (huggingface/transformers v5.23 src/transformers/models/llama/modeling_llama.py)."""
    loss: Loss
    """Logits widened to fp32 and their loss op by op, as in transformers' ForCausalLMLoss, or as a kernel has it."""
    compiled: bool
    """torch.compile makes the kernels."""
    experts: Literal["grouped", "eager", "stacked"]
    """As `Stack.moe_experts`."""
    eager: bool = False
    """The file asks for attention op by op, with a softmax in fp32."""
    flash: bool = False
    """The file asks for FlashAttention. Otherwise attention is PyTorch's, which has no soft cap of scores: models with
    one run it op by op (Gemma 2), as types without PyTorch's kernels do (GPT-J, GPT-Neo; Bloom, CodeGen always)."""

    def of(self, record: Stack, model: Network | str | None = None) -> Stack:
        """The program's record with them, and with what they leave to be chosen. model: that they make up."""
        in_steps = self.eager or model is not None and _attends_in_steps(network_graph(model), self.flash)
        plain = "fused" if self.fused or self.compiled else "unfused"
        able = record.runs.choices + tuple(c for c in LEVERS if c not in record.runs.choices)
        return with_job_fields(
            record,
            "transformers' modules",
            # Inductor fuses a norm's ops into one kernel as Liger does, so both count as fused.
            norm=plain,
            activation=plain,
            attention="unfused_fp32_softmax" if in_steps else record.layers.attention,
            cross_entropy=self.loss,
            launch_mode="compiled" if self.compiled else None,
            moe_experts=self.experts,
            choices=able,
            recompute=("none", "full"),
        )


def _attends_in_steps(graph: Graph, flash: bool) -> bool:
    """Whether attention runs op by op: scores with a cap and types without PyTorch's kernels, where FlashAttention is
    not asked for; types without that either."""
    ops = [op for block in graph.blocks for op in block.ops if op.does == "attends"]
    own = any(op.attr("softcap", 0.0) or op.attr("eager", "") == "by_flash" for op in ops)
    return (own and not flash) or any(op.attr("eager", "") == "op_by_op" for op in ops)


LEVERS = ("chunked_loss", "eight_bit_states", "four_bit_states", "paged_states", "low_rank", "input_offload")
"""What trainers around transformers have beside what the program that shards has: Liger's loss, bitsandbytes' and
torchao's optimizers, GaLore and APOLLO."""

LIGER = ("use_liger_kernel", "enable_liger_kernel", "use_liger")
"""Switches of all of Liger's kernels: norms, activations, and the loss with the head."""
LIGER_PARTS = ("liger_rms_norm", "liger_glu_activation", "liger_layer_norm")
CHUNKED = ("liger_fused_linear_cross_entropy", "cut_cross_entropy", "use_liger_loss", "unsloth_cross_entropy_loss")
"""Losses that are computed with the head, so that logits are never whole: Liger's, Apple's CCE. So is Unsloth's from
2025.11 on, which `use_unsloth` brings with norms, activations and rotary embedding as kernels of its own."""
IN_ONE = ("liger_cross_entropy", "flash_attn_cross_entropy")
IN_PARTS = ("chunked_cross_entropy",)
ATTENTION = ("attn_implementation", "flash_attn", "attn_impl", "flash_attention")
"""Keys that choose the kernel of attention; of the last one its being on."""
KERNELS = """
    auto eager sdpa flash_attention_2 flash_attention_3 flex_attention disabled fa2 fa3 flash_attn flash_attn_3 flash
    flash_attention flash_attention_4 fa4 kernels true false none xformers paged_attention sage_attention math
    """.split()
"""Words that they know."""
FLASH = ("fa2", "fa3", "flash_attn", "flash_attention_2", "flash_attention_3", "flash_attn_3", "true")
IN_STEPS = ("eager", "disabled")
"""`disabled` is LLaMA-Factory's word for it (src/llamafactory/model/model_utils/attention.py)."""
EXPERTS = ("experts_implementation", "experts_impl")


def modules_of(f: Fields) -> Modules:
    """How transformers' modules run, by the names that trainers around them share. Experts are modules of their own, as
    in transformers before release 5, unless the file says how they run."""
    liger = any(flag(f, name) for name in LIGER)
    own = flag(f, "use_unsloth")
    # Keyword arguments of Liger's own apply_liger_kernel_to_…; the defaults are what use_liger_kernel alone switches
    # on.
    parts = {  # TrainingArguments.liger_kernel_config switches kernels one by one
        name: flag(f, f"liger_kernel_config.{name}", default)
        for name, default in (("rms_norm", liger), ("swiglu", liger), ("fused_linear_cross_entropy", liger))
    }
    plain = liger and flag(f, "liger_kernel_config.cross_entropy")
    listed = [flag(f, name) for name in LIGER_PARTS]
    loss: Loss = "unfused"
    tiled = f.peek("loss_type") == "chunked_nll"  # TRL's
    if (
        (liger and parts["fused_linear_cross_entropy"] and not plain)
        or tiled
        or own
        or any([flag(f, n) for n in CHUNKED])
    ):
        loss = "chunked"
    elif plain or any([flag(f, name) for name in IN_ONE]):
        loss = "fused"
    elif any([flag(f, name) for name in IN_PARTS]):
        loss = "in_place"
    f.ignore("liger_rope", "liger_kernel_config.rope", "chunked_cross_entropy_num_chunks")
    how = next((str(f.raw(name)) for name in EXPERTS if f.has(name)), "")
    f.ignore(*EXPERTS)
    experts: Literal["grouped", "eager", "stacked"] = "eager"
    if how in ("grouped_mm", "sonicmoe", "deepgemm"):
        experts = "grouped"
    elif how == "eager":
        experts = "stacked"  # the key is of release 5, where weights of experts are one tensor
    elif how == "batched_mm":
        f.report(next(name for name in EXPERTS if f.has(name)), BATCHED)
        experts = "stacked"
    elif how:
        f.fail(EXPERTS[0], f"{how!r} is none of transformers' ways: grouped_mm, batched_mm or eager")
    for key in ATTENTION:
        # A typo would be read as sdpa and priced so; transformers itself refuses it later.
        if (named := str(f.peek(key) or "auto").lower()) not in KERNELS and "/" not in named:  # a kernel of the hub
            f.fail(key, f"{f.peek(key)!r} is no way to attend{nearest(named, KERNELS)}: {', '.join(KERNELS[:9])}")
    in_steps = [key for key in ATTENTION if str(f.peek(key) or "").lower() in IN_STEPS]
    f.ignore(*in_steps)  # accounted for: not among what has no effect
    eager = flag(f, "eager_attention") or bool(in_steps)
    return Modules(
        fused=(liger and parts["rms_norm"] and parts["swiglu"]) or own or any(listed),
        loss=loss,
        compiled=flag(f, "torch_compile"),
        experts=experts,
        eager=eager,
        flash=any(str(f.peek(key) or "").lower() in FLASH for key in ATTENTION),
    )


BATCHED = "a copy of an expert's weights for each token that it has: read as a loop over experts, far too small"


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What a trainer's file says."""

    model: Network | str
    """What is trained, adapters included."""
    micro: int
    """Sequences of a microbatch on a rank."""
    steps: int | None = None
    """Microbatches of a step; None where `total` says it."""
    total: int | None = None
    """Sequences of a step."""
    seq_len: int
    """Tokens of a sequence."""
    zero: Literal[0, 2, 3] = 0
    """0 is DDP; FSDP is 3, and 2 where parameters stay gathered after forward."""
    replicas: int = 1
    """Groups of ranks that hold the same shards (hybrid sharding)."""
    tp: int = 1
    cp: int = 1
    layout: Layout = Layout()
    """What tensor and context parallelism do."""
    offload: bool = False
    """FSDP's parameters, gradients and states on the host."""
    recompute: bool = False
    """Activation checkpointing of whole layers."""
    activations_away: bool = False
    """What is kept for backward waits on the host: with checkpointing, the inputs of layers."""
    precision: Precision = BF16
    update: Update = ADAMW
    clip: bool = True
    stack: Stack | None = None
    """The software; FSDP's or DDP's record where there is none."""
    modules: Modules | None = None
    """How the network's modules run, where they are transformers'; None where the program has its own."""
    loads: Literal["each_rank", "first_rank"] | None = None
    """As `Stack.loads`, where nothing else decides: transformers reads a file at a time under ZeRO 3 of DeepSpeed, and
    for a base that is quantised."""

    @property
    def saved(self) -> Saved:
        """What is kept between forward and backward."""
        if self.recompute:
            return Saved(preset="full", rules=(INPUTS_AWAY,) if self.activations_away else ())
        if not self.activations_away:
            return Saved()
        layers, count = repeated_layers(network_graph(self.model))
        return Saved(rules=(SavedRule(calls=layers, action="offload", first_per_stage=count),))


def job_of(
    f: Fields, context: ReadContext, training: Training, assumed: Sequence[str] = (), stated: int | None = None
) -> Job:
    """The job on the devices that are given. InputError for sizes that do not divide."""
    if context.devices is None:
        raise InputError("the file does not say how many devices it runs on; give --on CLUSTER (in Python devices=)")
    shared = training.tp * training.cp
    # One process a device in all trainers that are read here.
    if context.devices % shared:
        raise InputError(
            f"{context.devices} devices are not a multiple of tensor x context = {training.tp} x "
            f"{training.cp}; the nearest "
            f"number of devices is {max(1, round(context.devices / shared)) * shared}"
        )
    data = context.devices // shared
    divides("data-parallel ranks", data, "replicas", training.replicas)
    mesh = Mesh(dp_replicate=training.replicas, dp_shard=data // training.replicas, cp=training.cp, tp=training.tp)
    micro = context.micro_batch_size or training.micro
    total = context.global_batch or (micro * (training.steps or 1) * data if training.total is None else training.total)
    # verl's and others' micro batch is an upper limit of what a rank takes at once.
    if training.total is not None and total % data == 0:
        micro = min(micro, total // data)  # no rank has more than its share
    microbatches(total, micro, data, ("the global batch", "the micro batch"))
    record = training.stack or stack("pytorch-fsdp")
    offload = Offload() if training.offload and training.zero else None
    # FSDP that keeps parameters gathered is ZeRO 3 without resharding here, not ZeRO 2: gradients are scattered by
    # unit.
    zero = 3 if training.zero else 0
    plan = Plan(
        mesh=mesh,
        schedule=Schedule(micro_batch_size=micro),
        saved=training.saved,
        layout=training.layout,
        overlap=Overlap(),
        optimizer=Optimizer(
            zero=zero,  # type: ignore[arg-type]
            reshard_after_forward=training.zero != 2,
            offload=offload,
            offload_parameters=offload is not None,
            clip=training.clip,
        ),
        precision=training.precision,
    )
    steps = total // (micro * data)
    training.update.check(f, divided_by="fsdp" if zero else "", devices=data, steps=steps)
    return Job(
        model=training.model,
        plan=training.update.plan(plan),
        workload=Workload(global_batch_size=total, seq_len=context.seq_len or training.seq_len),
        stack=loaded(record if training.modules is None else training.modules.of(record, training.model), training),
        devices=context.devices,
        notes=tuple(f.notes),
        unexpressed=tuple(f.unexpressed),
        assumed=tuple(assumed),
        stated_devices=stated,
    )


def loaded(record: Stack, training: Training, zero: int = 0) -> Stack:
    """The record with how the model is loaded. zero: DeepSpeed's stage. A base in four bits is quantised file by file
    (huggingface/transformers v4.57 src/transformers/modeling_utils.py _load_pretrained_model; accelerate 16cb6eb
    FullyShardedDataParallelPlugin.cpu_ram_efficient_loading)."""
    how: str | None = training.loads
    if how == "each_rank" and (zero == 3 or _in_four_bits(training.model)):
        how = "by_file"
    return record if how is None else with_job_fields(record, "from_pretrained", loads=how)


def _in_four_bits(model: Network | str) -> bool:
    graph = network_graph(model)
    return any(tensor.dtype in (NF4, INT8) for block in graph.blocks for tensor in block.frozen)


def by_deepspeed(
    f: Fields, context: ReadContext, training: Training, key: str, folder: Path | None, assumed: list[str]
) -> Job:
    """The job whose sharding and precision a DeepSpeed file says, under `key`, inline or by its path.

    Where the file is not here, its name may say the stage (`zero3_bf16.json`), which is then taken with DeepSpeed's
    defaults and listed. f: accounted for already.
    """
    values, file = _deepspeed_values(f, key, inline(f, key), folder, assumed)
    if context.devices is not None and context.devices % training.cp:
        divides("devices", context.devices, "sequence parallel ranks", training.cp)
    half = {"bf16": "bf16", "fp16": "fp16"}.get(training.precision.compute, "no")
    # Otherwise DeepSpeed would train in fp32 what the trainer's file says is bf16.
    if half != "no" and not {"bf16", "fp16"} & set(values):  # accelerate puts its own in (DeepSpeedPlugin)
        values = {**values, half: {"enabled": True}}
    zero = values.get("zero_optimization")
    if isinstance(zero, Mapping) and zero.get("stage") == "auto":
        values = {**values, "zero_optimization": {**zero, "stage": 2}}
        assumed.append("zero_optimization.stage = auto: accelerate fills in 2, its plugin's default")
    if values.get("gradient_clipping") == "auto":  # max_grad_norm, which is on unless it is 0
        # Which number it is does not matter here: only whether gradients are clipped.
        values = {**values, "gradient_clipping": 1.0 if training.clip else 0.0}
    job = deepspeed.job_of(
        values,
        file,
        context=replace(
            context,
            devices=None if context.devices is None else context.devices // training.cp,
            model=training.model,
            seq_len=context.seq_len or training.seq_len,
            micro_batch_size=context.micro_batch_size or training.micro,
            settings={},
        ),
        steps=training.steps or 1,
        mixed_precision=half,
        saved=training.saved,
    )
    plan, notes = job.plan, job.notes
    if training.cp > 1:  # the ranks of a sequence hold other shards of the same states
        plan = replace(plan, mesh=replace(plan.mesh, cp=training.cp), layout=training.layout)
    if "optimizer" not in values:  # the trainer's own, wrapped by DeepSpeed
        training.update.check(f, divided_by=key, devices=context.devices or 1, steps=training.steps or 1)
        plan = training.update.plan(plan)
        notes = tuple(note for note in notes if not note.startswith("optimizer.type:"))
    record = job.stack if training.modules is None else training.modules.of(job.stack, training.model)
    return replace(
        job,
        plan=plan,
        devices=context.devices,
        stack=loaded(record, training, plan.optimizer.zero),
        notes=(*f.notes, *notes),
        unexpressed=(*f.unexpressed, *job.unexpressed),
        assumed=(*assumed, *job.assumed),
    )


def own_engine(key: str, value: object, folder: Path | None) -> tuple[Mapping[str, object], str] | None:
    """(DeepSpeed's configuration, its name) of a mapping, of JSON, or of a file that is here; None for another name."""
    if isinstance(value, Mapping):
        return value, key
    name = str(value)
    if name.lstrip()[:1] == "{":
        return read_json(name, key), key
    around = () if folder is None else (folder, *folder.parents)
    # Trainers start at the root of a project, whose files name others from there.
    for place in (Path(name), *(parent / name for parent in around)):
        if place.is_file():
            return read_json(read_source(place)[0], str(place)), str(place)
    return None


SWITCHED = (True, "True", "true")
"""DeepSpeed's own switch (`deepspeed.add_config_arguments`), whose settings other arguments say."""
BESIDE_SWITCH = ("deepspeed_config", "zero_stage", "offload")
"""These: a file, or DeepSpeed-Chat's stage and offload (microsoft/DeepSpeedExamples applications/DeepSpeed-Chat
training/utils/ds_utils.py get_train_ds_config)."""


def _switched(f: Fields, key: str) -> object:
    """The settings of a script that is started with `--deepspeed` alone."""
    if (file := f.peek("deepspeed_config")) is not None:
        return file
    if f.peek("zero_stage") is None:
        f.fail(key, "is a switch here, and no --deepspeed_config and no --zero_stage says how: --set deepspeed=zero3")
    away = {"device": "cpu"} if flag(f, "offload") else {"device": "none"}
    stage = f.integer("zero_stage", 0, least=0)
    return {"zero_optimization": {"stage": stage, "offload_param": away, "offload_optimizer": away}}


def _deepspeed_values(
    f: Fields, key: str, value: object, folder: Path | None, assumed: list[str]
) -> tuple[Mapping[str, object], str]:
    """(a configuration, its name) of a path, of a stage's name, or of a mapping."""
    if value in SWITCHED:
        value = _switched(f, key)
    if (own := own_engine(key, value, folder)) is not None:
        return own
    name = str(value)
    if (known := shipped(name)) is not None:
        values, project = known
        assumed.append(f"{key} = {name} is not here: taken as {project} ships it (--set {key}=…)")
        return values, name
    by_name = named_stage(name)
    if by_name is None:
        f.raw(key)  # a variable that the script does not set is asked for by its name
        f.fail(key, f"its DeepSpeed settings are in {name!r}, which is not here; --set {key}=zero3, or another path")
    absent = " is not here" if name.endswith(".json") else ""
    assumed.append(
        f"{key} = {name}{absent}: {by_name.describe()} by its name, DeepSpeed's defaults else (--set {key}=…)"
    )
    return by_name.values(), name


def model_of(f: Fields, key: str, context: ReadContext, folder: Path | None, assumed: list[str]) -> Network | str:
    """The network under `key`, or the one that is given."""
    if context.model is not None:
        f.ignore(key)
        return context.model
    name = f.peek(key)
    if isinstance(name, str) and unknown(name) and (last := name.rpartition("/")[2]) and not unknown(last):
        name = last  # the folder of a model does not matter
    else:
        name = f.raw(key)
    f.ignore(key)
    if name is None:
        f.fail(key, "the file does not say the network; give --model NAME, or --model path/to/config.json")
    if not isinstance(name, str):
        words = " ".join(map(str, name)) if isinstance(name, list | tuple) else ""
        problem = f"takes one name, not {words[:60]!r}" if words else "has no name after it"
        f.fail(key, f"{problem}; give --model NAME (gnomon catalogue models), or --model path/to/config.json")
    network, note = network_called(name, folder)
    if note:
        assumed.append(note)
    return network


def adapted(
    f: Fields,
    model: Network | str,
    rank: int,
    targets: Sequence[str],
    *,
    four_bits: bool,
    eight_bits: bool = False,
    named: str,
    magnitudes: bool = False,
) -> Network | str:
    """The network frozen, with adapters of `rank` on `targets` (none: on all linears of layers). Targets that it has
    not (joined projections, experts) are listed under `named`. magnitudes: DoRA, which a switch of its own asks for
    too."""
    graph = network_graph(model)
    layers = {call.block for call in graph.calls if call.first is not None}
    known = {op.path.rpartition(".")[2] for block in graph.blocks if block.name in layers for op in block.ops}
    if four_bits and eight_bits:
        f.fail("load_in_8bit", "the frozen network is stored in four bits or in eight; leave one of both out")
    # A joined projection of another type stands for its parts here, unless the network has that name itself.
    spelled = [one for t in targets for one in (JOINED.get(t, (t,)) if t not in known else (t,))]
    there = tuple(t for t in dict.fromkeys(spelled) if any(fnmatchcase(name, t) for name in known))
    if targets and not there:
        near = nearest(targets[0], known)
        f.fail(named, f"no linear of the network is called {targets[0]!r}{near}: {linears(graph)}")
    if missing := [t for t in spelled if t not in there]:
        f.note_default(named, ", ".join(missing), "no linear of this network has the name: without its adapter")
    if not (four_bits or eight_bits) and (key := stored_in_four(f)):
        f.note_default(key, str(f.peek(key)), "stored in four bits by its name; read as NF4, half a byte a weight")
        four_bits = True
    magnitudes = any([flag(f, key) for key in MAGNITUDES]) or magnitudes
    if magnitudes:
        f.note_default(next((key for key in MAGNITUDES if f.has(key)), "dora"), "true", NORMS)
    base: Base = "nf4" if four_bits else "int8" if eight_bits else "compute"
    adapters = Adapters(rank=rank, targets=there, base=base, magnitudes=magnitudes)
    return with_adapters(graph, replace(adapters, whole=_whole(f, graph)))


WHOLE = ("modules_to_save", "lora_modules_to_save", "additional_target", "peft_config.modules_to_save")
"""Keys that name modules which are trained whole beside adapters."""


def _whole(f: Fields, graph: Graph) -> tuple[str, ...]:
    """Modules of this network whose own weights are trained; those that it has not are listed."""
    there: list[str] = []
    for key in WHOLE:
        for name in names_of(f.raw(key)):
            # PEFT goes by the end of a path; nothing here has a path with the name of its class before it.
            module = name.rpartition(".")[2]
            try:
                whole_parameters(graph, (module,))
            except GraphError:
                f.note_default(key, name, "no module of this network has the name: read as frozen")
            else:
                there.append(module)
    return tuple(dict.fromkeys(there))


USUAL = (("q_proj", "v_proj"), ("query", "value"), ("q", "v"), ("query_key_value",), ("c_attn",))
"""Linears that PEFT adapts where nothing says which, by a model's type (huggingface/peft src/peft/utils/constants.py
TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING)."""


def usual_targets(model: Network | str) -> tuple[str, ...]:
    """Linears of this network that PEFT adapts where nothing says which."""
    known = {op.path.rpartition(".")[2] for block in network_graph(model).blocks for op in block.ops}
    return next((names for names in USUAL if known.issuperset(names)), USUAL[0])


NAMES = ("model_name_or_path", "base_model", "model")
"""Keys of trainers that name a network."""
IN_FOUR = re.compile(r"bnb-4bit|[-_]awq\b|[-_]gptq(?!-int8)|[-_]int4\b|[-_]4bit\b", re.IGNORECASE)
"""In the names of weights that are stored in four bits."""


def stored_in_four(f: Fields) -> str | None:
    """The key of a network whose name says that it is stored in four bits; None for any other."""
    return next((key for key in NAMES if IN_FOUR.search(str(f.peek(key) or ""))), None)


def in_part(f: Fields, key: str, model: Network | str, trained: Trained) -> Network | str:
    """The network of which a part is trained, and how much that is among what is said of `key`."""
    graph = network_graph(model)
    try:
        part = with_trained(graph, trained)
    except GraphError as error:
        f.fail(key, str(error))
    count = part.num_parameters()
    share = count / (count + part.num_frozen())
    f.notes.append(f"{key}: {count / 1e6:,.4g} million parameters are trained, {share:.1%} of the network")
    return part


def layers_in_part(names: Sequence[str], chosen: Set[str]) -> tuple[str, ...]:
    """Regular expressions of chosen names among all of a network: one for all of its whole layers."""
    by_layer: dict[str, list[str]] = {}
    for name in names:
        found = re.match(r"(.*\.\d+\.)", name)
        by_layer.setdefault(found[1] if found else name, []).append(name)
    # A layer all of whose parameters are chosen, said once in place of parameter by parameter.
    whole = [start for start, own in by_layer.items() if len(own) > 1 and chosen >= set(own)]
    starts: dict[str, list[str]] = {}
    for start in whole:
        prefix, _, number = start.rstrip(".").rpartition(".")
        starts.setdefault(prefix, []).append(number)
    single = (n for start, own in by_layer.items() if start not in whole for n in own if n in chosen)
    layers = (f"^{re.escape(prefix)}\\.({'|'.join(numbers)})\\." for prefix, numbers in starts.items())
    return (*layers, *(f"^{re.escape(name)}$" for name in single))


JOINED: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("query_key_value", "qkv_proj", "W_pack", "Wqkv", "c_attn"), ("q_proj", "k_proj", "v_proj")),
    "gate_up_proj": ("gate_proj", "up_proj"),
    **dict.fromkeys(("fc1", "fc_in", "dense_h_to_4h", "c_fc", "wi"), ("up_proj",)),
    **dict.fromkeys(("fc2", "fc_out", "dense_4h_to_h"), ("down_proj",)),
    **dict.fromkeys(("out_proj", "dense", "wo"), ("o_proj",)),
    "w1": ("gate_proj",),
    "w2": ("down_proj",),
    "w3": ("up_proj",),
}
"""Names of linears in other types of transformers -> those of the same weights here, of a network that has not got the
name itself. An adapter beside a joined projection has one inner product where three have three."""


def linears(graph: Graph) -> str:
    """Names of the linears of its layers."""
    layers = {call.block for call in graph.calls if call.first is not None}
    ops = (op for block in graph.blocks if block.name in layers for op in block.ops if op.does == "multiplies")
    return ", ".join(sorted({op.path.rpartition(".")[2] for op in ops}))


def whole_in_bits(f: Fields, *keys: str) -> None:
    """InputError for a network that is stored quantised and trained without adapters, which transformers refuses."""
    if key := next((key for key in keys if flag(f, key)), ""):
        f.fail(key, "a quantised network is trained by adapters only; say which, or leave it out")


MAGNITUDES = ("use_dora", "peft_use_dora", "model.use_dora")
"""Switches of DoRA."""
NORMS = (
    "each forward computes the norms of the adapted weights, some passes over each: not priced, so somewhat too fast"
)


def either_half(f: Fields, bf16: bool, fp16: bool) -> None:
    """InputError for both, which transformers refuses."""
    if bf16 and fp16:
        f.fail("fp16", "bf16 and fp16 are both switched on, of which transformers takes one; leave one out")


def inline(f: Fields, key: str) -> object:
    """The value of a key, or the mapping under it that was flattened; None where there is neither."""
    value, prefix = f.peek(key), f"{key}."
    below = {name.removeprefix(prefix): f.peek(name) for name in f.names() if name.startswith(prefix)}
    if value not in (None, "", False) or not below:
        return value or None
    f.ignore(*(f"{prefix}{name}" for name in below))
    nested: dict[str, Any] = {}
    for name, inner in below.items():
        *path, last = name.split(".")
        at = nested
        for part in path:
            at = at.setdefault(part, {})
        at[last] = inner
    return nested
