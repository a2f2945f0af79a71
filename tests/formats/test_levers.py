"""Levers of fine-tuning: each setting of the table is read by its program's reader and changes what is predicted."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from gnomon.errors import InputError
from gnomon.formats import programs
from gnomon.formats.given import ReadContext
from gnomon.formats.job import Job
from gnomon.formats.levers import LEVERS, PROGRAMS, table
from gnomon.search.fit.options import ADAPTED, OPTIONS

BASES: dict[str, dict[str, Any]] = {
    "llama-factory": {
        "model_name_or_path": "meta-llama/Llama-3.2-1B", "stage": "sft", "finetuning_type": "full",
        "template": "llama3",
        "cutoff_len": 1024, "packing": False, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1,
        "pure_bf16": True, "disable_gradient_checkpointing": True,
    },
    "axolotl": {
        "base_model": "meta-llama/Llama-3.2-1B", "sequence_len": 1024, "micro_batch_size": 1,
        "gradient_accumulation_steps": 1, "bf16": True,
    },
    "trl": {
        "model_name_or_path": "meta-llama/Llama-3.2-1B", "max_length": 1024, "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 1, "gradient_checkpointing": False, "torch_dtype": "float32",
    },
    "transformers": {
        "model_name_or_path": "meta-llama/Llama-3.2-1B", "block_size": 1024, "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 1,
    },
    "swift": {
        "model": "meta-llama/Llama-3.2-1B", "dataset": "d", "tuner_type": "full", "max_length": 1024,
        "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "gradient_checkpointing": False,
    },
    "torchtune": {
        "model": {"_component_": "torchtune.models.llama3_2.llama3_2_1b"}, "tokenizer": {"max_seq_len": 1024},
        "optimizer": {"_component_": "torch.optim.AdamW"}, "batch_size": 1, "dtype": "bf16",
        "loss": {"_component_": "torch.nn.CrossEntropyLoss"},
    },
    "deepspeed": {
        "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0}, "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW"},
    },
    "accelerate": {
        "compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "mixed_precision": "bf16",
        "num_processes": 2, "fsdp_config": {"fsdp_sharding_strategy": "NO_SHARD", "fsdp_offload_params": False},
    },
}  # fmt: skip
"""A plain job of each program: all of a small network, by replicas."""

COMMANDS = {"transformers": "python run_clm.py", "swift": "swift sft"}
"""Programs whose jobs are commands."""


def file_of(program: str, said: str) -> str:
    """The base with these settings, as its program has it."""
    values: dict[str, Any] = yaml.safe_load(yaml.safe_dump(BASES[program]))
    for part in said.split("; ") if said else ():
        key, _, text = part.partition(": ")
        *path, last = key.split(".")
        at = values
        for name in path:
            at = at.setdefault(name, {})
        at[last] = yaml.safe_load(text)
    if (start := COMMANDS.get(program)) is None:
        return json.dumps(values) if program == "deepspeed" else yaml.safe_dump(values)
    words = [
        f"--{key} {' '.join(map(str, value)) if isinstance(value, list) else value}" for key, value in values.items()
    ]
    return " ".join([start, *words])


def read(tmp_path: Path, program: str, said: str, devices: int) -> Job:
    """The job of one file."""
    path = tmp_path / ("run.sh" if program in COMMANDS else "job.json" if program == "deepspeed" else "job.yaml")
    path.write_text(file_of(program, said))
    model = "llama-3.2-1b" if program in ("deepspeed", "accelerate") else None
    given = ReadContext(model=model, devices=devices, seq_len=1024, micro_batch_size=1 if model else None)
    return programs.find(program).read(path, given)


def keys(said: str) -> set[str]:
    """The keys that the settings begin with."""
    return {part.partition(":")[0].split(".")[0] for part in said.split("; ")}


@pytest.mark.parametrize("lever", LEVERS, ids=lambda lever: lever.name)
def test_each_setting_is_read_and_priced(lever: Any, tmp_path: Path) -> None:
    for program, said in lever.settings.items():
        devices = 1 if "layerwise" in said else 2
        plain, changed = (read(tmp_path, program, text, devices) for text in ("", said))
        unread = {one.field for one in changed.unexpressed if one.field.split(".")[0] in keys(said)}
        if lever.priced == "yes":
            assert not unread, (program, changed.unexpressed)
            same = (plain.plan, plain.model, plain.stack) == (changed.plan, changed.model, changed.stack)
            assert not same, (program, said)


def test_options_are_those_of_fit() -> None:
    named = {option.name for option in OPTIONS} | ADAPTED | {"tf32"}
    assert {lever.option for lever in LEVERS if lever.option} <= named
    assert {program for lever in LEVERS for program in lever.settings} == set(PROGRAMS)


def test_the_table_is_in_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "levers.md").read_text("utf-8")
    assert "\n".join(f"    {line}" for line in table().splitlines()) in page


@pytest.mark.parametrize(
    ("program", "said", "message"),
    [
        (
            "llama-factory",
            "use_galore: true; deepspeed: zero3",
            r"which deepspeed divides.*use_galore",
        ),
        ("trl", "optim: galore_adamw", "which linears.*optim_target_modules"),
        ("trl", "optim: galore_adamw; optim_target_modules: all-linear; optim_args: rank=x", "'x'.*optim_args"),
        (
            "llama-factory",
            "use_galore: 1; galore_layerwise: 1; gradient_accumulation_steps: 4",
            "adds up 4.*use_galore",
        ),
        ("llama-factory", "finetuning_type: freeze; freeze_trainable_modules: mpl", "no module.*'mpl'.*mlp"),
        ("axolotl", "unfrozen_parameters: ['^nothing']", "left to train.*unfrozen_parameters"),
        ("swift", "freeze_parameters_ratio: 1.5", "no share.*freeze_parameters_ratio"),
    ],
)
def test_mistakes_are_named_by_the_files_own_key(program: str, said: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message) as error:
        read(tmp_path, program, said, 2)
    assert not re.search(r"\n", str(error.value))


@pytest.mark.parametrize(
    ("flags", "zero", "away"),
    [
        ("--deepspeed --zero_stage 3", 3, False),
        ("--zero_stage 3 --offload --deepspeed", 3, True),
        ("--deepspeed --deepspeed_config ds.json", 2, False),
    ],
)
def test_deepspeeds_own_switch_takes_its_settings_from_beside_it(
    flags: str, zero: int, away: bool, tmp_path: Path
) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    path = tmp_path / "run.sh"
    path.write_text(
        "deepspeed main.py --model_name_or_path meta-llama/Llama-3.2-1B --per_device_train_batch_size 1 "
        f"--gradient_accumulation_steps 1 --max_seq_len 512 {flags}"
    )
    plan = programs.find("transformers").read(path, ReadContext(devices=2)).plan
    assert (plan.optimizer.zero, plan.optimizer.offload_parameters) == (zero, away)


def test_deepspeeds_own_switch_alone_is_asked_about(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(
        "deepspeed main.py --model_name_or_path meta-llama/Llama-3.2-1B --per_device_train_batch_size 1 --deepspeed"
    )
    with pytest.raises(InputError, match="no --zero_stage says how.*deepspeed"):
        programs.find("transformers").read(path, ReadContext(devices=2, seq_len=512))
