"""Megatron-Bridge (NeMo) overrides, `model.tensor_model_parallel_size=4 train.global_batch_size=512 …`, to a Job.

`read_megatron_bridge(overrides, model=…, devices=…)` lays them over what its pretraining recipes have in common, and
reads the result as Megatron-LM's arguments. Names and defaults were read from NVIDIA-NeMo/Megatron-Bridge at commit
067f987df03b8355b03192d88d70f1709fedf51a (2026-08-22), src/megatron/bridge/recipes/common.py (_pretrain_common),
src/megatron/bridge/training/{config,mixed_precision,comm_overlap}.py. Leaves out: what single recipes set beyond that;
the model, its parallel sizes and its sequence length are therefore asked for.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from gnomon.errors import FormatError, InputError, nearest
from gnomon.formats.given import NOTHING, Given
from gnomon.formats.job import Fields, Job, ModelConfig, read_source
from gnomon.formats.megatron.options import known_options
from gnomon.formats.megatron.read import job_of
from gnomon.software import stack

COMMON: Mapping[str, object] = {
    "train.micro_batch_size": 2,
    "train.global_batch_size": 32,
    "ddp.overlap_grad_reduce": True,
    "ddp.overlap_param_gather": True,
    "ddp.use_distributed_optimizer": True,
    "mixed_precision": "bf16_mixed",
}
"""What _pretrain_common sets and a step depends on."""

PRECISIONS: Mapping[str, Mapping[str, object]] = {
    "bf16_mixed": {"bf16": True},
    "fp16_mixed": {"fp16": True},
    "bf16_with_fp8_delayed_scaling_mixed": {
        "bf16": True,
        "fp8_format": "hybrid",
        "fp8_recipe": "delayed",
        "fp8_param_gather": True,
    },
    "bf16_with_fp8_current_scaling_mixed": {
        "bf16": True,
        "fp8_format": "hybrid",
        "fp8_recipe": "tensorwise",
        "first_last_layers_bf16": True,
    },
    "bf16_with_fp8_subchannel_scaling_mixed": {"bf16": True, "fp8_format": "hybrid", "fp8_recipe": "blockwise"},
    "bf16_with_mxfp8_mixed": {"bf16": True, "fp8_format": "e4m3", "fp8_recipe": "mxfp8", "fp8_param_gather": True},
}
"""`mixed_precision` -> Megatron-LM's arguments; the fp8 ones gather parameters in eight bits as well where it says."""

RENAMED = {
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "num_moe_experts": "num_experts",
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
    "bucket_size": "ddp_bucket_size",
    "sequence_length": "seq_length",
    "fp8_param": "fp8_param_gather",
    "fp8": "fp8_format",
}
"""Their names -> those of Megatron-LM's arguments."""

INVERTED = {
    "gradient_accumulation_fusion": "no_gradient_accumulation_fusion",
    "overlap_p2p_comm": "no_overlap_p2p_communication",
    "bias_dropout_fusion": "no_bias_dropout_fusion",
    "bias_activation_fusion": "no_bias_swiglu_fusion",
    "apply_rope_fusion": "no_rope_fusion",
}
"""Switches that Megatron-LM's arguments spell the other way round."""

SECTIONS = ("model", "train", "ddp", "optimizer", "dataset", "comm_overlap")
"""Sections whose fields are Megatron-LM's arguments by the same names."""

OTHER_SECTIONS = frozenset(
    """
    env_vars rng rerun_state_machine validation scheduler logger tokenizer checkpoint dist ft straggler
    nvrx_straggler profiling tensor_inspect inprocess_restart optimizer_config_override_provider
    """.split()
)


def _words(text: str, file: str) -> list[str]:
    """The words of a shell's command line. FormatError for a quote that is not closed, or a final `\\`."""
    try:
        return shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        said = {"No closing quotation": "a quote that is not closed", "No escaped character": "a \\ at its very end"}
        raise FormatError(
            f"{file} has {said.get(str(error), str(error))}; it may have been cut off",
            f"line {text.count(chr(10)) + 1}",
        ) from None


def read_megatron_bridge(
    overrides: str | Path | Sequence[str],
    *,
    model: ModelConfig,
    devices: int,
    env: Mapping[str, str] | None = None,
    given: Given = NOTHING,
) -> Job:
    """The job of `section.field=value` words (a list, text, or a file of them) for a model.

    The model's own sizes are its recipe's, so they are given as a config. Raises InputError for a field that Megatron
    does not have (with the nearest), a size that a recipe decides and the words do not give, or a combination that
    Megatron refuses.
    """
    if isinstance(overrides, (str, Path)):
        text, file = read_source(overrides)
        words = _words(text, file)
    else:
        file, words = "<overrides>", list(overrides)
    words += [f"{name}={text}" for name, text in given.settings.items()]
    asked = dict(_assignment(word, env or {}) for word in words)
    for needed in ("model.tensor_model_parallel_size", "model.pipeline_model_parallel_size"):
        if needed not in asked:
            raise InputError(f"{needed} is not among the overrides, and recipes differ in it; --set {needed}=1", needed)
    if given.seq_len is not None:
        asked["model.seq_length"] = given.seq_len
    if not {"model.seq_length", "dataset.seq_length", "dataset.sequence_length"} & set(asked):
        raise InputError(
            "the sequence length is not among the overrides; --set model.seq_length=4096", "model.seq_length"
        )
    values: dict[str, object] = {}
    unexpressed: dict[str, object] = {}
    for key, value in {**COMMON, **asked}.items():
        _translate(key, value, values, unexpressed)
    values.setdefault("max_position_embeddings", values["seq_length"])
    fields = Fields(values, file)
    for key in asked:
        if key.partition(".")[0] in OTHER_SECTIONS:
            fields.notes.append(f"{key}: no effect on a step's time or memory")
    for key, value in unexpressed.items():
        fields.note_default(key, str(value), "known to Megatron-Bridge, but not described here")
    given = replace(given, devices=devices, model=model, settings={})
    return job_of(fields, given=given, name=model.name, base=stack("megatron-bridge"))


def _assignment(word: str, env: Mapping[str, str]) -> tuple[str, object]:
    """`++a.b=value` as (`a.b`, value)."""
    match = re.fullmatch(r"(?:--|\+{0,2})([A-Za-z_][\w.]*)=(.*)", word, re.DOTALL)
    if not match:
        raise FormatError(f"{word[:60]!r} is not section.field=value", "overrides")
    text = re.sub(r"\$\{?(\w+)\}?", lambda m: env.get(m[1], m[0]), match[2])
    plain: dict[str, object] = {"true": True, "false": False, "null": None, "none": None}
    if text.lower() in plain:
        return match[1], plain[text.lower()]
    if text.startswith("[") and text.endswith("]"):
        return match[1], tuple(part.strip(" '\"") for part in text[1:-1].split(",") if part.strip())
    kinds: tuple[Callable[[str], object], ...] = (int, float)
    for kind in kinds:
        try:
            return match[1], kind(text)
        except ValueError:
            continue
    return match[1], text


def _translate(key: str, value: object, values: dict[str, object], unexpressed: dict[str, object]) -> None:
    """Put one override among Megatron-LM's arguments."""
    section, _, field = key.partition(".")
    if key == "mixed_precision":
        if value not in PRECISIONS:
            raise InputError(f"mixed_precision {value!r} is not described{nearest(str(value), PRECISIONS)}", key)
        values.update(PRECISIONS[str(value)])
    elif section == "mixed_precision" and field == "grad_reduce_in_fp32" or key == "ddp.grad_reduce_in_fp32":
        values["grad_reduce_in_bf16"] = value is False
    elif section in OTHER_SECTIONS:
        return
    elif section not in (*SECTIONS, "mixed_precision") or not field:
        raise InputError(f"{key!r} is in no section that is known{nearest(section, [*SECTIONS, *OTHER_SECTIONS])}", key)
    elif field in INVERTED:
        values[INVERTED[field]] = value is False
    elif (name := RENAMED.get(field, field)) in known_options():
        values[name] = value
    elif section in ("model", "ddp", "comm_overlap"):
        raise InputError(f"unknown field {key!r}{nearest(name, known_options())}", key)
    else:
        unexpressed[key] = value
