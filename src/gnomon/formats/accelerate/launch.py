"""`accelerate launch` and its flags as the fields of transformers' TrainingArguments that say the same.

`launched_values(words, folder, assumed)` reads the words before the program: a configuration file, `--use_fsdp`,
`--use_deepspeed`, `--mixed_precision`, processes and machines. The launcher sets environment variables from which
Trainer makes its FSDP or DeepSpeed plugin, and the mixed precision unless the script has `--bf16` or `--fp16`
(huggingface/accelerate 16cb6eb src/accelerate/utils/launch.py; transformers v5.23 training_args.py). SHIPPED are the
configuration files that projects ship, for commands whose file is not here. Leaves out what the fields mean
(`training_arguments`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from gnomon.errors import InputError, nearest
from gnomon.formats.job import flatten, read_source
from gnomon.formats.launched import dashed, find_near
from gnomon.formats.yaml_file import read_yaml

_FSDP1: Mapping[str, object] = {
    "distributed_type": "FSDP",
    "fsdp_config": {"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_backward_prefetch": "BACKWARD_PRE"},
    "mixed_precision": "bf16",
}
_FSDP2: Mapping[str, object] = {
    "distributed_type": "FSDP",
    "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": True},
    "mixed_precision": "bf16",
}
_DDP: Mapping[str, object] = {"distributed_type": "MULTI_GPU", "mixed_precision": "bf16"}


def _zero(stage: int) -> Mapping[str, object]:
    return {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": stage}, "mixed_precision": "bf16"}


SHIPPED: Mapping[str, Mapping[str, object]] = {
    **{f"{ahead}zero{stage}.yaml": _zero(stage) for stage in (1, 2, 3) for ahead in ("", "deepspeed_")},
    "fsdp1.yaml": _FSDP1,
    "fsdp2.yaml": _FSDP2,
    "fsdp.yaml": _FSDP1,
    "multi_gpu.yaml": _DDP,
    "ddp.yaml": _DDP,
    "single_gpu.yaml": {"distributed_type": "NO", "mixed_precision": "bf16"},
}
"""Files of accelerate_configs in TRL (f2cd577), alignment-handbook and open-r1 -> what changes a step in them; eight
processes each, which the devices that are asked about replace."""


def launched_values(words: Sequence[str], folder: Path, assumed: list[str]) -> tuple[dict[str, object], int | None]:
    """(fields, devices that the launcher says) of the words before a program. folder: where its files are looked for;
    assumed: takes what was filled in. InputError for a configuration file that is neither here nor known."""
    launcher = [word.rpartition("/")[2] for word in words]
    if "accelerate" not in launcher and "accelerate.commands.launch" not in launcher:
        return {}, None
    flags = dashed(words)
    values = flatten(_configuration(flags.get("config_file"), folder, assumed))
    merged = {**values, **_flag_values(flags)}
    count = merged.get("num_processes")
    stated = count if isinstance(count, int) and not isinstance(count, bool) else None
    return _as_arguments(merged), stated


def _configuration(name: object, folder: Path, assumed: list[str]) -> Mapping[str, object]:
    if not isinstance(name, str):
        return {}
    if (place := find_near(name, folder)) is not None:
        text, file = read_source(place)
        return read_yaml(text, file)
    last = name.rpartition("/")[2]
    if last in SHIPPED:
        assumed.append(f"{name} is not here: taken as TRL and alignment-handbook ship {last}")
        return SHIPPED[last]
    raise InputError(
        f"accelerate's configuration is in {name[:80]!r}, which is not here{nearest(last, SHIPPED)}; put it beside the "
        f"script, or give what it says as flags of accelerate launch (--use_fsdp, --use_deepspeed --zero_stage 3)"
    )


def _flag_values(flags: Mapping[str, object]) -> dict[str, object]:
    """Flags of accelerate launch by the names of its configuration file."""
    values: dict[str, object] = {}
    for name, value in flags.items():
        match name:
            case "use_fsdp" if value is True:
                values["distributed_type"] = "FSDP"
            case "use_deepspeed" if value is True:
                values["distributed_type"] = "DEEPSPEED"
            case "multi_gpu" if value is True:
                values.setdefault("distributed_type", "MULTI_GPU")
            case "zero_stage" | "offload_optimizer_device" | "offload_param_device" | "gradient_clipping":
                values[f"deepspeed_config.{name}"] = value
            case "deepspeed_config_file":
                values["deepspeed_config.deepspeed_config_file"] = value
            case "num_processes" | "num_machines" | "mixed_precision" | "gradient_accumulation_steps":
                values[name] = value
            case "dynamo_backend":
                values["dynamo_config.dynamo_backend"] = value
            case str() if name.startswith("fsdp_"):
                spelled = {"True": True, "true": True, "False": False, "false": False}
                values[f"fsdp_config.{name}"] = spelled.get(value, value) if isinstance(value, str) else value
            case str() if name.startswith("parallelism_config_"):
                values[f"parallelism_config.{name}"] = value
    return values


def _as_arguments(values: Mapping[str, object]) -> dict[str, object]:
    """Lists the fields of TrainingArguments: `fsdp` and `fsdp_config`, `deepspeed`, and the mixed precision."""
    arguments: dict[str, object] = {}
    kind = values.get("distributed_type")
    if kind == "FSDP":
        arguments["fsdp"] = True
        arguments |= {key: value for key, value in values.items() if key.startswith("fsdp_config.")}
    if kind == "DEEPSPEED":
        arguments["deepspeed"] = _deepspeed(values)
    if (mixed := values.get("mixed_precision")) in ("bf16", "fp16"):
        arguments[f"accelerate_{mixed}"] = True
    if str(values.get("dynamo_config.dynamo_backend", "no")).lower() not in ("no", "none"):
        arguments["torch_compile"] = True
    for key in ("tp", "cp", "sp", "dp_replicate"):
        size = values.get(f"parallelism_config.parallelism_config_{key}_size")
        if isinstance(size, int) and size > 1:
            arguments[f"parallelism_config.{key}_size"] = size
    machines = values.get("num_machines")
    if isinstance(machines, int):
        arguments["num_machines"] = machines
    return arguments


def _deepspeed(values: Mapping[str, object]) -> object:
    """DeepSpeed's configuration as DeepSpeedPlugin writes it, or the path of the one that is named."""
    own = values.get("deepspeed_config.deepspeed_config_file")
    if isinstance(own, str) and own.lower() != "none":
        return own
    stage = values.get("deepspeed_config.zero_stage", 2)
    zero: dict[str, object] = {"stage": stage}
    for part in ("offload_optimizer", "offload_param"):
        device = values.get(f"deepspeed_config.{part}_device")
        if device not in (None, "none"):
            zero[part] = {"device": device}
    return {
        "zero_optimization": zero,
        "bf16": {"enabled": "auto"},
        "gradient_clipping": values.get("deepspeed_config.gradient_clipping", "auto"),
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
    }
