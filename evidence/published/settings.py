"""Precision, recompute, schedule and sharding of a published run: the table's words as parts of a plan.

Each function returns a part with notes on what was assumed. Sources write one thing in many ways, so words are read by
what they contain; what is still not understood counts as not stated, with a note, where that is honest, and is refused
with InputError where a guess would change what runs. Leaves out meshes and machines.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from evidence.published import nvidia
from evidence.published.notes import NoteFacts
from evidence.published.row import Row
from evidence.published.rules import first, says
from gnomon.errors import InputError
from gnomon.formats.megatron.recompute import MLA_UP_PROJ, MLP
from gnomon.plans import DType, Fp8, Offload, Optimizer, Precision, Saved, SavedRule, Schedule, Vocabulary
from gnomon.plans.parts import INPUT, Preset

Notes = tuple[str, ...]

XLA = r"maxtext|paxml|torch.?xla|jax|levanter|easylm|\bt5x\b|\bflax\b|torchprime"
"""Programs that a compiler lays out: their recipes name a few mesh axes, and every other is 1."""

XLA_FP8_GATHERS = r"maxtext"
"""Programs whose eight-bit products are XLA's own, which casts a weight before it gathers it: openxla/xla pull request
4462 (2023-07), xla/service/gpu/gemm_rewriter.cc, xla/service/collective_quantizer.h (2024-07). Paxml's are Transformer
Engine's (ENABLE_TE=1, NVIDIA/dgxc-benchmarking v24.11.1 paxml/configure.sh). Read 2026-11-23."""

TE_FP8_GATHERS = r"megatron-bridge|^nemo$"
"""Programs whose recipes keep eight-bit parameters, which their distributed optimizer and Megatron-FSDP gather as they
are: `fp8_params` of NVIDIA/dgxc-benchmarking's yamls (v24.11.1, v25.02.02) and of NVIDIA/NeMo 7a8f1cc
nemo/collections/llm/recipes/precision/mixed_precision.py bf16_with_fp8_mixed; `fp8_param_gather` of
NVIDIA-NeMo/Megatron-Bridge v0.2.0 src/megatron/bridge/training/mixed_precision.py (not with NVFP4; under MXFP8 sixteen
bits travel in the gradients' buffer); `torch.uint8` in Megatron-FSDP's param_and_grad_buffer.py (NVIDIA/Megatron-LM
core_v0.15.1). Read 2026-11-23."""

GATHERED_RECIPES = ("delayed", "tensorwise")
"""Recipes under which they do."""

RECIPES = (
    (r"nvfp4|fp4", "nvfp4"),
    (r"mx", "mxfp8"),
    (r"row", "rowwise"),
    (r"block|subchannel|-sc\b", "blockwise"),
    (r"-cs|current|tensor|full", "tensorwise"),
)
"""(pattern of low precisions, recipe). What matches none is delayed scaling, Transformer Engine's default for years."""

MODULES = (
    (r"layernorm|norm", ("*norm*",)),
    (r"moe_act|act\b", ("*.act",)),
    (r"mla_up_proj", MLA_UP_PROJ),
    (r"\bmlp\b", MLP),
    (r"\bmoe\b", ("*experts*", "*dispatch*")),
)
"""(pattern of Megatron Core's recompute modules, tensors of our blocks), beside `core_attn`, the preset `selective`."""

DENSE_LAYERS = 3
"""Of DeepSeek-V3, whose feed-forward is what `mlp` names; experts are `moe` and `moe_act`."""

SCHEDULES = (
    (r"zb-?h1|zb-?1p|zerobubbleh1|zero-bubble-1", ("zero_bubble_h1", 1, "loop")),
    (r"zb-?h2|zb-?2p|zb-inf|zero-bubble-2", ("zero_bubble_h2", 1, "loop")),
    (r"interleaved-?zero|interleavedzerobubble|zb-?vpp", ("interleaved_zero_bubble", 2, "loop")),
    (r"zb-?v|zbv", ("zero_bubble_v", 2, "v")),
    (r"v-?half", ("v_half", 2, "v")),
    (r"v-?min", ("v_min", 2, "v")),
    (r"dual-?pipe-?v", ("dualpipe_v", 2, "v")),
    (r"interleaved|1f1b-?i\b|vpp", ("interleaved_one_f_one_b", 2, "loop")),
    (r"bfs", ("looped_bfs", 2, "loop")),
    (r"gpipe|afab", ("gpipe", 1, "loop")),
    (r"1f1b", ("one_f_one_b", 1, "loop")),
)
"""(pattern of schedules, (name, virtual stages at least, placement))."""

METHODS: Mapping[str, Vocabulary] = {
    **dict.fromkeys(("", "baseline", "redis"), "ends"),
    "vocab-1": "vocab_1",
    "vocab-2": "vocab_2",
    "interlaced": "interlaced",
}
"""Methods of the vocabulary-parallel paper -> where the embedding and the head are."""

BF16_SECTION = "Rebalancing layers"
"""From this section of BigScience's page on, its runs have an optimizer that accumulates bf16 gradients in fp32; those
before accumulate in fp16 (train/tr11-176B-ml/chronicles-prequel.md, read 2026-11-21)."""

OLDER_THAN_RECIPES = "a recipe that switches it off names no layers; taken as none"


NARROW_GRADIENTS = r"megatron-bridge"
"""Programs whose published runs hold and reduce gradients in bf16: their performance recipes set
`grad_reduce_in_fp32 = False` (NVIDIA-NeMo/Megatron-Bridge src/megatron/bridge/perf_recipes/_common.py _perf_precision,
read 2026-11-22). Of NeMo's before, those whose scripts say so (`nvidia.narrow_gradients`)."""


OWN_GRADIENTS = r"^(?!.*megatron).*(?:deepspeed|colossal|internevo|internlm)"
"""Programs that under ZeRO accumulate and reduce gradients in the parameters' dtype (deepspeedai/DeepSpeed edaa722
deepspeed/runtime/engine.py get_data_types, communication_data_type, read 2026-11-23; as `formats.deepspeed` reads its
files). BigScience's fork of Megatron-DeepSpeed accumulates in fp32."""

ZERO_BUBBLE = r"megatron-lm (?:fork|zero-?bubble)|zero-?bubble"
"""Forks of Megatron-LM for schedules: their example sets fp16, no dropout, an untied embedding and FlashAttention
(sail-sg/zero-bubble-pipeline-parallelism f6d5d35 examples/pretrain_zero_bubble.sh)."""


def precision(row: Row) -> tuple[Precision, Notes]:
    """Dtypes of the run."""
    result, notes = _precision(row)
    program = row.framework.lower()
    if re.search(XLA, program) and result.compute == "bf16":
        # weights stay in fp32 and are cast where they are used; gradients leave their products in bf16
        return replace(result, param="fp32", grad="fp32", reduce="bf16", master="none"), notes
    if (
        (re.search(NARROW_GRADIENTS, program) or nvidia.narrow_gradients(row))
        and result.compute == "bf16"
        and result.param == "bf16"
    ):
        return replace(result, grad="bf16", reduce="bf16"), notes
    if re.search(OWN_GRADIENTS, program) and re.search(r"zero[-_ ]?[1-3]|gemini", (row.zero_or_fsdp or "").lower()):
        return replace(result, grad=result.param, reduce=result.param), notes
    return result, notes


def _precision(row: Row) -> tuple[Precision, Notes]:
    name = (row.precision or "").rstrip("?").lower()
    notes: Notes = ()
    if _before_bf16_optimizer(row):
        name, notes = "fp16", ("precision not stated: fp16, as the source has it before its BF16 optimizer",)
    elif not name and re.search(ZERO_BUBBLE, row.framework.lower()):
        name, notes = "fp16", ("precision not stated: fp16, as the program's example sets it",)
    elif not name and re.search(r"v100|\bt4|titan|2080|p100", row.device.lower()):
        name, notes = "fp16", ("precision not stated: fp16, as the device has no bf16",)
    elif not name:
        name, notes = "bf16", ("precision not stated: taken as bf16",)
    elif (row.precision or "").endswith("?"):
        notes = (f"precision {name} assumed by the table",)
    sharded = (row.zero_or_fsdp or "").lower()
    whole = bool(re.search(r"fsdp|hsdp|full_?shard|hybrid_?shard", sharded)) and "megatron" not in sharded
    if re.search(r"fp8|float8|fp4|mxfp", name):
        base = Precision(param="fp32", master="none") if whole else Precision()
        recipe: Any = next((to for pattern, to in RECIPES if re.search(pattern, name)), "delayed")
        program = row.framework.lower()
        gathers = (bool(re.search(XLA_FP8_GATHERS, program)) and not _wide_experts(row)) or (
            recipe in GATHERED_RECIPES and bool(re.search(TE_FP8_GATHERS, program))
        )
        fixed = says(replace(row, precision=name), "fixed_scales")
        return replace(base, fp8=Fp8(recipe=recipe, gather=gathers, fixed=fixed)), notes
    if re.fullmatch(r"(tf32|fp32|float32|32-?(?:true|bit)?)(\+tf32)?", name):
        compute: DType = "tf32" if "tf32" in name else "fp32"
        return Precision(param="fp32", compute=compute, grad="fp32", reduce="fp32", master="none"), notes
    if re.search(r"bf-?16|bfloat16", name):
        reduce: DType = "bf16" if "pure" in name else "fp32"
        if whole:  # FSDP keeps fp32 shards and gathers them in bf16
            return Precision(param="fp32", compute="bf16", grad="fp32", reduce=reduce, master="none"), notes
        return Precision(reduce=reduce), notes
    if re.search(r"fp-?16|float16|half|^amp$|^16", name) and whole:
        return Precision(param="fp32", compute="fp16", grad="fp32", reduce="fp16", master="none"), notes
    if re.search(r"fp-?16|float16|half|^amp$|^mixed$|^16", name):
        # Megatron-LM accumulates and reduces fp16 gradients in fp16 unless told otherwise.
        return Precision(param="fp16", compute="fp16", grad="fp16", reduce="fp16"), notes
    if re.search(r"tf32|fp32|float32|\bf32|single", name):
        compute = "tf32" if "tf32" in name and "no tf32" not in name else "fp32"
        return Precision(param="fp32", compute=compute, grad="fp32", reduce="fp32", master="none"), notes
    raise InputError(f"precision {row.precision!r} cannot be said in a plan")


def _before_bf16_optimizer(row: Row) -> bool:
    assumed = (row.precision or "").endswith("?")
    return assumed and "chronicles-prequel" in (row.source or "") and row.section != BF16_SECTION


def saved(row: Row) -> tuple[Saved, Notes, bool]:
    """What is recomputed or offloaded, notes, and whether the source leaves recompute open."""
    how, offload = (row.recompute or "").lower(), (row.offload or "none").lower()
    if match := re.match(r"act:(.*)", offload):
        return _remat(match[1].split(","), row)
    if how == "qkv_proj_offloaded":
        return _remat(["query_proj", "key_proj", "value_proj"], row)
    if how in KEPT_BY_PRESETS:
        return _remat([], row, KEPT_BY_PRESETS[how])
    if moves_optimizer(row) and not re.search(r"activation", offload):
        offload = "none"
    if match := re.fullmatch(r"activation cpu offload num_layers=(\d+)", offload):
        if (row.pp or 1) > 1:
            raise InputError(f"offload {row.offload!r} with pp = {row.pp}: which layers is not said")
        rules = (SavedRule(calls=f"layers[0:{match[1]}]", action="offload"),)
        return Saved(rules=rules), () if how else (_OPEN,), not how
    if not how and offload == "none" and (by_recipe := _by_recipe(row)) is not None:
        return by_recipe
    if (found_there := _remat_of_release(row)) is not None:
        return found_there
    if offload == "fused_group_mlp":  # Megatron-Bridge: what experts' activation reads, where it is large
        made, notes, is_open = _recompute(how, row)
        away = SavedRule(tensors=("*.experts.up_proj",), action="offload")
        return replace(made, rules=(*made.rules, away)), notes, is_open
    if re.search(r"activation|checkpoint|hidden", offload) and _whole(how, row):
        return _inputs_away(row)
    if offload not in ("none", "no", "off", "false", "0", "-"):
        return Saved(), (f"offload {row.offload!r} of named tensors is left out: memory is over-estimated",), True
    if "every k-th block" in row.notes or "k-th" in how:
        return Saved(), ("the share of blocks that are recomputed is not given",), True
    return _recompute(how, row)


_OPEN = "recompute not stated"


def again(layers: int) -> SavedRule:
    """Everything of so many layers made again, the least that suffices: what `jax.checkpoint` leaves to run once XLA
    has dropped what no gradient reads, such as the last product of a layer."""
    return SavedRule(calls=f"layers[0:{layers}]", action="recompute")


REMAT = {"query_proj": ("*q_proj", "*q_rotary"), "key_proj": ("*k_proj", "*k_rotary"), "value_proj": ("*v_proj",),
         "out_proj": ("*o_proj", "*attention_residual"), "mlpwo": ("*down_proj",),
         "context": ("*attn.core*",)}  # fmt: skip
REMAT_OF_GPT = {"combined_qkv": ("*attn.c_attn*",), "out_proj": ("*attn.c_proj",), "ffn_layer1": ("*mlp.c_fc",),
                "ffn_layer2": ("*mlp.c_proj",)}  # fmt: skip
REMAT_OF_EXPERTS = {"mlpwo": ("*.experts.w2",)}
"""MaxText's names of tensors -> ours (src/MaxText/configs/base.yml, custom remat_policy; layers/moe.py; read
2026-11-22). Queries and keys get theirs after they are rotated (layers/attentions.py); with an output projection the
sum with the residual stream, which is what gradients read, costs nothing."""

QKV = ("query_proj", "key_proj", "value_proj")
KEPT_BY_PRESETS: Mapping[str, Sequence[str]] = {
    "save_qkv_proj": QKV,
    "save_out_proj": ("out_proj",),
    "save_dot_except_mlp": (*QKV, "out_proj"),
    "save_dot_with_context_except_mlp": (*QKV, "context", "out_proj"),
    "save_dot_except_mlpwi": (*QKV, "out_proj", "mlpwo"),
}
"""MaxText's remat_policy -> what it keeps (src/maxtext/layers/decoders.py get_remat_policy, read 2026-11-23)."""


def tiled(row: Row) -> bool:
    """Whether the recipe's loss runs part by part."""
    return says(row, "loss_by_parts")


def _by_recipe(row: Row) -> tuple[Saved, Notes, bool] | None:
    """What a recipe for TPUs keeps, here or on the host."""
    moved: list[str] = first(row, "remat_on_host", [])
    kept: list[str] | None = first(row, "remat_kept")
    if kept is None and not moved:
        return None
    made, notes, is_open = _remat(moved, row, kept or [])
    if tiled(row):
        made = replace(made, rules=(*made.rules, SavedRule(calls="head", action="recompute")))
        notes = (*notes, "the loss part by part: its logits again")
    return made, notes, is_open


def _remat(moved: list[str], row: Row, kept: Sequence[str] = ()) -> tuple[Saved, Notes, bool]:
    """MaxText's `remat_policy: custom` with tensors on the host or kept: these are not made again, all else is."""
    latent_or_dense = not row.experts or row.kv_heads == "MLA"
    known = REMAT if latent_or_dense else {**REMAT, **REMAT_OF_EXPERTS}
    names = [tensor for name in moved if name in known for tensor in known[name]]
    tensors = ((INPUT,) if "decoder_layer_input" in moved else ()) + tuple(names)
    rules = [SavedRule(tensors=tensors, action="offload")] if tensors else []
    if kept:
        rules.insert(0, SavedRule(tensors=tuple(tensor for name in kept for tensor in known[name]), action="keep"))
    words = [f"{', '.join(kept)} kept"] * bool(kept) + [f"{', '.join(moved)} on the host"] * bool(moved)
    return (
        Saved(rules=(again(row.layers or 0), *rules)),
        (f"custom remat: {', '.join([*words, 'the rest again'])}",),
        False,
    )


def _remat_of_release(row: Row) -> tuple[Saved, Notes, bool] | None:
    """What the recipe of a release keeps, of sources whose rows do not say."""
    kept: list[str] | None = first(row, "remat_of_release")
    if kept is None or row.recompute or "dgxc-benchmarking" not in (row.source or "").lower():
        return None
    names = REMAT_OF_GPT if "paxml" in (row.source or "").lower() else REMAT
    rule = SavedRule(tensors=tuple(tensor for name in kept for tensor in names[name]), action="keep")
    return (
        Saved(rules=(again(row.layers or 0), rule)),
        (f"as the recipe of its release: {', '.join(kept)} kept",),
        False,
    )


def _wide_experts(row: Row) -> bool:
    return says(row, "wide_experts")


def moves_optimizer(row: Row) -> bool:
    """Whether optimizer states are on the host."""
    offload, sharding = (row.offload or "").lower(), f"{row.zero_or_fsdp or ''} {row.framework}".lower()
    return bool(
        re.search(r"optim\w*[- _]?(?:cpu|offload|to cpu)|cpu[- _]?optim|cpu[- _]?adam", f"{offload} {sharding}")
        or re.search(r"optim|^cpu$|^yes$|^true$", offload)
        or re.search(r"zero[- _]?infinity|cpu[-_ ]?offload|zero[-_ ]?(?:stage[-_ ]?)?[123]?[-_ +]*offload", sharding)
    )


def _recompute(how: str, row: Row) -> tuple[Saved, Notes, bool]:
    if not how:
        return Saved(), (_OPEN,), True
    if how in ("-", "?", "unknown", "default", "custom"):
        return Saved(), (f"recompute {row.recompute!r}: what of, is not said; taken as not stated",), True
    if how in ("none", "no", "off", "false", "0", "no_recompute") or re.search(r"=\s*(?:false|off|none|0)$", how):
        return _norms_again(row), (), False
    if match := re.search(r"(?<![\d.])(0?\.\d+|\d\d)(%?)$", how):
        share = float(match[1]) / (100 if match[2] else 1)
        if 0 < share < 1:
            count = int(share * (row.layers or 0) / (row.pp or 1))
            return Saved(rules=(SavedRule(first_per_stage=count, action="recompute"),)), (), False
    if how == "full block num_layers=none":
        return Saved(), (f"recompute {row.recompute!r}: {OLDER_THAN_RECIPES}",), False
    if match := re.search(r"block\D*(\d+)", how):
        return Saved(rules=(SavedRule(first_per_stage=int(match[1]), action="recompute"),)), (), False
    if match := re.search(r"uniform\D*(\d+)", how):
        return Saved(preset="full", every=int(match[1])), (), False
    if how.startswith("unsloth"):  # unsloth_zoo gradient_checkpointing.py Unsloth_Offloaded_Gradient_Checkpointer
        return _inputs_away(row)
    if _whole(how, row):
        if re.search(XLA, row.framework.lower()):
            return Saved(rules=(again(row.layers or 0),)), (), False
        return Saved(preset="full"), (), False
    if match := re.search(r"(?:every|selective[ :=(]*)\D*(\d+)", how):  # torchtitan: every n-th layer is recomputed
        count = row.layers or 0
        some = tuple(SavedRule(calls=f"layers[{i}]", action="recompute") for i in range(0, count, int(match[1])))
        return Saved(rules=some), (), False
    if match := re.search(r"\[(.*)\]", how):
        rules = tuple(
            SavedRule(tensors=tensors, action="recompute", calls=calls)
            for pattern, tensors in MODULES
            if re.search(pattern, match[1]) and (calls := _layers_with(tensors, row))
        )
        preset: Preset = "selective" if "core_attn" in match[1] else "none"
        note = f"recompute {row.recompute}: what our blocks have of these modules"
        return Saved(preset=preset, rules=rules), (note,), False
    if re.search(r"\bop\b|sac|per.?op|^minimal|save_dot", how):
        note = "recompute of chosen ops: every product kept, what lies between them made again"
        # MaxText's `minimal` is the least of its presets, and what else a recipe moves to the host is not said
        open_ = how.startswith("minimal")
        rule = SavedRule(tensors=("*norm*", "*act*", "*residual*"), action="recompute")
        return Saved(rules=(rule,)), (note,), open_
    if how.startswith("selective") or how == "core_attn":
        return Saved(preset="selective"), (), False
    return Saved(), (f"recompute {row.recompute!r} is not understood: taken as not stated",), True


NORMS_AGAIN = r"internevo|internlm"
"""Programs that make norms again where layers are not checkpointed: `dropout_selective_checkpoint`, on by default
(InternLM/InternEvo c628a8c internlm/model/modeling_internlm.py _forward; read 2026-11-23)."""


def _norms_again(row: Row) -> Saved:
    again = re.search(NORMS_AGAIN, row.framework.lower()) is not None
    return Saved(rules=(SavedRule(tensors=("*norm*",), action="recompute"),)) if again else Saved()


WHOLE = (
    r"^(?:full|yes|ac full|true|all|layer|on|enabled|every layer|nothing_saveable)"
    r"|(?:gradient|grad|activation)s?[-_ ]?(?:checkpoint|ckpt)\w*(?:$|\s*[=:]\s*(?:true|yes|on|full|1))"
    r"|^(?:checkpoint\w*|ckpt)(?:[-_ ]?activations?)?$|_offloaded$|\bfull$"
)
"""Recompute in words that mean whole layers."""


def _whole(how: str, row: Row) -> bool:
    """Whether whole layers run again. The first Megatron-LM and DeepSpeed knew nothing less."""
    return re.search(WHOLE, how) is not None


def _inputs_away(row: Row) -> tuple[Saved, Notes, bool]:
    """Whole layers, whose inputs wait on the host."""
    away = SavedRule(tensors=(INPUT,), action="offload")
    note = ("what layers read is on the host",)
    if re.search(XLA, row.framework.lower()):
        return Saved(rules=(again(row.layers or 0), away)), note, False
    return Saved(preset="full", rules=(away,)), note, False


def _layers_with(tensors: tuple[str, ...], row: Row) -> str:
    """Selector of the layers that have what a module names, or nothing."""
    if not row.experts or tensors != MLP:
        return "*"
    return f"layers[0:{DENSE_LAYERS}]" if row.kv_heads == "MLA" else ""


def lighter_first(layers: int, stages: int, *, xla: bool) -> tuple[Saved, ...]:
    """What a run whose source is silent may have recomputed, the least first: nothing; norms and activations; whole
    layers, a quarter of each stage's at a time; all of them. xla: as XLA runs it, at last with what layers read moved
    to the host, as MaxText's recipes have it (`decoder_layer_input: offload`, configs/base.yml; read 2026-11-22)."""
    between = SavedRule(tensors=("*norm*", "*act", "*.act"), action="recompute")
    collected = [Saved(), Saved(rules=(between,))]
    share = -(-layers // max(stages, 1))
    for quarter in (1, 2, 3):
        if (count := share * quarter // 4) > 0:
            collected.append(Saved(rules=(between, SavedRule(first_per_stage=count, action="recompute"))))
    away = SavedRule(tensors=("input",), action="offload")
    if xla:
        return (*dict.fromkeys(collected), Saved(rules=(again(layers),)), Saved(rules=(again(layers), away)))
    return (*dict.fromkeys(collected), Saved(preset="full"))


def _unmoved(name: str) -> str:
    """Words of sharding without those of offloading."""
    return re.sub(r"[-_ ]?offload\w*", "", name).strip(" +,") or "none"


def _virtual_stages(row: Row, pp: int) -> int:
    text = row.vpp or "1"
    if match := re.fullmatch(r"layers/vstage=(\d+)", text):
        stages, rest = divmod(row.layers or 0, pp * int(match[1]))
        if rest or not stages:
            raise InputError(f"{row.layers} layers do not divide into pp = {pp} with {match[1]} a virtual stage")
        return stages
    if not text.isdigit():
        raise InputError(f"vpp = {text!r} is not a whole number")
    return int(text)


def schedule(row: Row, facts: NoteFacts, pp: int, micro_batch: int) -> Schedule:
    """The pipeline's order."""
    if facts.method not in METHODS:
        raise InputError(f"method {facts.method!r} of the vocabulary-parallel paper cannot be said in a plan")
    virtual = _virtual_stages(row, pp) if pp > 1 else 1
    name: Any = "interleaved_one_f_one_b" if virtual > 1 else "one_f_one_b"
    placement: Any = "loop"
    stated = next((to for pattern, to in SCHEDULES if re.search(pattern, facts.schedule)), None)
    if stated is not None and pp > 1:
        name, least, placement = stated
        virtual = max(virtual, least) if least > 1 else 1
        if name == "one_f_one_b" and _virtual_stages(row, pp) > 1:
            name, virtual = "interleaved_one_f_one_b", _virtual_stages(row, pp)
    vocabulary = METHODS[facts.method] if pp > 1 else "ends"
    return Schedule(
        name=name,
        virtual_stages=virtual,
        placement=placement,
        vocabulary=vocabulary,
        micro_batch_size=micro_batch,
    )


STAGES = r"(?:zero|stage)[-_ ]?(?:stage[-_ ]?)?([0-3])(?!\d)|(?:^|[-_ ])z([0-3])(?![0-9a-z])|^([0-3])$"
"""Stages of ZeRO in the words of tables and of files (`ds_z3_config.json`)."""


SHARDED = r"\bfsdp|torchtitan|composer|foundry|\bolmo|full[-_ ]?shard"
"""Programs that divide parameters, if their row does not say otherwise: what their names say, and torchtitan's
`data_parallel_shard_degree = -1`, llm-foundry's `sharding_strategy: FULL_SHARD`, OLMo's `fsdp` sections."""

DISTRIBUTED = r"^nemo$|megatron-bridge"
"""Programs whose recipes have the distributed optimizer (NVIDIA/NeMo nemo/collections/llm/recipes: `use_distributed_
optimizer=True`; NVIDIA-NeMo/Megatron-Bridge recipes)."""


def _by_program(row: Row) -> tuple[Optimizer, Notes] | None:
    """What a program's name says where the row says nothing."""
    program = row.framework.lower()
    if (row.num_devices or 1) == 1:
        return None
    stage: Any
    if match := re.search(r"zero[- ]?(?:stage[- ]?)?([123])", program):
        stage = int(match[1])
    elif re.search(SHARDED, program) and "automodel" not in program:
        stage = 3
    elif re.search(DISTRIBUTED, program):
        stage = 1
    else:
        return None
    return Optimizer(zero=stage), (f"sharding not given: ZeRO {stage}, as {row.framework} has it",)


def optimizer(row: Row) -> tuple[Optimizer, Notes]:
    """How ZeRO divides. A word that is not known is a refusal: it says what every rank holds."""
    name = (row.zero_or_fsdp or "none").lower()
    if moves_optimizer(row):
        part, notes = optimizer(replace(row, offload=None, zero_or_fsdp=_unmoved(name), framework="-"))
        return replace(part, offload=Offload(), clip=False), (*notes, "optimizer states and the update on the host")
    if row.zero_or_fsdp is None and re.search(XLA, row.framework.lower()):
        return Optimizer(zero=3), (f"sharding not given: fsdp over all devices, {row.framework}'s default",)
    if row.zero_or_fsdp is None and (default := _by_program(row)) is not None:
        return default
    if name in ("none", "ddp", "no"):
        return Optimizer(zero=0), ()
    if match := re.search(STAGES, name):
        stage: Any = int(next(filter(None, match.groups())))
        return Optimizer(zero=stage), ()
    if re.search(r"grad_op|shard_grad|no.?reshard", name):
        return Optimizer(zero=3, reshard_after_forward=False), ()
    if re.search(r"fsdp|hsdp|gemini|full[-_ ]?shard|hybrid[-_ ]?shard|sharded", name):
        return Optimizer(zero=3), ()
    if re.search(r"dist\w*[- _]opt|hybrid[-_ ]?zero|^zero\b|\bos\b|use_distributed|^dist(?:ributed)?$", name):
        return Optimizer(zero=1), ()
    if row.num_devices == 1:
        return Optimizer(zero=0), ()
    if re.search(r"\bsdp\b|^2d\b", name):
        return Optimizer(zero=3), ()
    if re.search(r"ddp|data.?parallel|replicat|^dp\b|horovod|^-$|^false$|^off$", name):
        return Optimizer(zero=0), ()
    raise InputError(f"zero_or_fsdp = {row.zero_or_fsdp!r} cannot be said in a plan")
