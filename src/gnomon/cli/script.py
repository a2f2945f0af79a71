"""`gnomon predict SCRIPT.py --args "…"`: a training script that is run up to its first step, and read as a job.

`script_format(arguments)` reads a script as a format reads a file: it is run unmodified by `gnomon.frontend.script` in
a process of its own, without GPU and network, and what was found there becomes a Job: fields of a Trainer by the
readers of TRL and transformers, a loop of one's own by what it did. Running it is running the user's code, and only
`--args` asks for it. Leaves out what happens in that process.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from gnomon.errors import InputError
from gnomon.formats.format import Format, Sample
from gnomon.formats.given import SEQ_LEN, Network, ReadContext
from gnomon.formats.huggingface.read import read_hf_config
from gnomon.formats.job import Fields, Job, flatten, with_job_fields
from gnomon.formats.trainer_optimizers import update_of
from gnomon.formats.trainer_source import Source
from gnomon.formats.trainer_words import names_of
from gnomon.formats.trainers import (
    AUTOCAST,
    BF16,
    FP16,
    FP32,
    Modules,
    Training,
    adapted,
    by_deepspeed,
    inline,
    job_of,
)
from gnomon.formats.transformers import read_fields as read_trainer
from gnomon.formats.trl import read_fields as read_trl
from gnomon.graph.plain import from_plain
from gnomon.plans import Precision
from gnomon.plans.check import sample_tokens
from gnomon.software import stack

SECONDS = 600
"""A script may take so long to its first step."""

LINES = 3
"""Last lines of a script's output that are shown where it fails."""


def script_format(arguments: str) -> Format:
    """How a script with such arguments is read."""
    return Format(
        name="script",
        program="a Python script, run up to its first step",
        files="Python",
        looks=_never,
        read=partial(_read, arguments),
    )


def _never(sample: Sample) -> bool:
    return False


def _read(arguments: str, path: Path, context: ReadContext) -> Job:
    found = found_in(path, arguments, context.devices or 1)
    network = _network(found)
    ran = (
        f"{path.name} was run up to {found['stopped']}, without GPU and network; its model has "
        f"{found['parameters'] / 1e6:,.4g} million parameters, {found['trained'] / 1e6:,.4g} of them trained"
    )
    assumed = [ran, *map(str, found["notes"]), *map(str, found.get("said", ()))]
    if found["kind"] == "trainer":
        return _of_trainer(path, found, replace(context, model=context.model or network), assumed)
    return _of_loop(path, found, replace(context, model=context.model or network), assumed)


def found_in(path: Path, arguments: str, devices: int) -> dict[str, Any]:
    """What the process found. InputError with what the script said where it ended before a step."""
    try:
        words = shlex.split(arguments)
    except ValueError as error:
        raise InputError(f"--args {arguments[:60]!r} is no command line: {error}") from None
    source = str(Path(__file__).parents[2])
    paths = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory(prefix="gnomon-script-") as folder:
        answer, log = Path(folder) / "answer.json", Path(folder) / "log"
        command = [sys.executable, "-m", "gnomon.frontend.script", str(answer), str(devices), str(path), *words]
        with log.open("wb") as out:
            try:
                subprocess.run(
                    command,
                    # A script that asks a question is told that nobody answers, in place of waiting.
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "PYTHONPATH": paths},
                    timeout=SECONDS,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                raise InputError(
                    f"{path.name} came to no step within {SECONDS} s; give it fewer data, or name its model by MODEL"
                ) from None
        log_lines = [line for line in log.read_text("utf-8", "replace").splitlines() if line.strip()][-LINES:]
        if not answer.is_file():
            if any("No module named 'torch'" in line for line in log_lines):
                raise InputError(f"running {path.name} needs torch: pip install gnomon[torch]")
            raise InputError(
                f"{path.name} ended its process before a first step; it last said: {' | '.join(log_lines)}"
            )
        found: dict[str, Any] = json.loads(answer.read_text("utf-8"))
    if "error" in found:
        last_lines = f"; it last said: {' | '.join(log_lines)}" if "status" in str(found["error"]) and log_lines else ""
        raise InputError(f"{str(found['error']).removesuffix('; its last line is above')}{last_lines}")
    return found


def _network(found: Mapping[str, Any]) -> Network:
    """What the script trains, adapters aside."""
    if "config" in found:
        model = read_hf_config(json.dumps(found["config"]), found["name"])
        return model.graph if model.config is None else model.config
    return from_plain(found["graph"])


def _of_trainer(path: Path, found: Mapping[str, Any], context: ReadContext, assumed: list[str]) -> Job:
    """Returns the job of a Trainer, read from the fields of its arguments as a launch script's flags are."""
    fields = dict(found["fields"])
    lengths: list[list[int]] = found["lengths"]
    fields["torch_dtype"] = found["dtype"]
    longest = max((length for _, length in lengths), default=0)
    if longest and context.seq_len is None:
        mean = -(-sum(rows * length for rows, length in lengths) // sum(rows for rows, _ in lengths))
        context = replace(context, seq_len=mean)
        assumed.append(f"{len(lengths)} batches of the script's own data are padded to {mean} tokens in the mean")
        if len({length for _, length in lengths}) == 1:
            fields["packing"] = True  # blocks of one length: no sample is shorter
    source = Source(
        fields=Fields(flatten(fields), path.name, context),
        folder=path.resolve().parent,
        program="",
        num_devices=None,
        assumed=assumed,
    )
    kind = str(found["trainer"]).lower()
    names = ("sft", "dpo", "grpo", "rloo", "reward", "kto", "orpo", "cpo", "ppo", "gkd", "prm", "bco", "xpo")
    if any(name in kind for name in names) or "max_length" in fields:
        return read_trl(source, kind.removesuffix("trainer"), context)
    return read_trainer(source, context)


HALF: Mapping[str, Precision] = {"bfloat16": AUTOCAST, "float16": FP16}
"""Dtype of autocast over fp32 -> ours."""

DTYPES: Mapping[str, Literal["bf16", "fp16"]] = {"bfloat16": "bf16", "float16": "fp16"}

SHARDS = {"shard_grad_op": 2, "hybrid_shard_zero2": 2, "no_shard": 0}


def _of_loop(path: Path, found: Mapping[str, Any], context: ReadContext, assumed: list[str]) -> Job:
    """Returns the job of a loop without a Trainer, from the calls that it made up to its first step."""
    launcher: Mapping[str, Any] = found["launcher"]
    autocast = found["autocast"] or {"bf16": "bfloat16", "fp16": "float16"}.get(
        str(launcher.get("mixed_precision")), ""
    )
    precision = HALF.get(autocast, FP32)
    if found["dtype"] in ("bfloat16", "float16"):
        precision = BF16 if found["dtype"] == "bfloat16" else replace(BF16, param="fp16", compute="fp16", grad="fp16")
    shards: Mapping[str, Any] = found["shards"]
    if found["sharding"].startswith("fsdp") and found["dtype"] == "float32" and "param_dtype" in shards:
        compute: Literal["bf16", "fp16", "fp32"] = DTYPES.get(shards["param_dtype"], "fp32")
        precision = replace(AUTOCAST, compute=compute, reduce=DTYPES.get(shards.get("reduce_dtype", ""), "fp32"))
    plugins = {name: launcher[name] for name in ("deepspeed_plugin", "fsdp_plugin") if name in launcher}
    values = {**found["adapters"], **plugins, "optim": _optimizer(found["optimizer"])}
    engine = {} if found["deepspeed"] is None else {"deepspeed": found["deepspeed"]}
    f = Fields(flatten({**values, **engine}), path.name, context)
    for name in plugins:
        f.report(name, "what shards the model; read as replicas: --set fsdp=full_shard is for a Trainer's script only")
    seq_len = found["seq"]
    model = context.model
    assert model is not None
    if found["adapters"]:
        targets = names_of(f.raw("lora_target_modules"))
        four = bool(f.raw("load_in_4bit"))
        model = adapted(f, model, f.integer("lora_r", 8), targets, four_bits=four, named="lora_target_modules")
    if seq_len is None and "graph" in found:
        seq_len = sample_tokens(from_plain(found["graph"]))
    zero = 0 if not found["sharding"].startswith("fsdp") else SHARDS.get(str(shards.get("strategy")), 3)
    update = update_of(f, "optim", "adamw_torch", model)
    by_file = inline(f, "deepspeed") is not None
    f.account((), {}, ())
    hugging = "config" in found
    mode = "compiled" if found["compiled"] else "eager"
    training = Training(
        model=model,
        micro=found["batch"],
        steps=found["microbatches"],
        seq_len=seq_len or SEQ_LEN,
        zero=zero,  # type: ignore[arg-type]
        offload=bool(shards.get("offload")),
        recompute=found["checkpointed"],
        precision=precision,
        update=update,
        clip=found["clipped"],
        stack=with_job_fields(stack("pytorch-fsdp"), "torch.compile of the script", launch_mode=mode),
        modules=_modules(found) if hugging else None,
    )
    if found["compiled"]:
        assumed.append("the script compiles its model")
    if by_file:
        values = {name: value for name, value in found["deepspeed"].items() if name != "gradient_accumulation_steps"}
        f = Fields(flatten({"deepspeed": values}), path.name, context)
        inline(f, "deepspeed")
        return by_deepspeed(f, context, training, "deepspeed", path.resolve().parent, assumed)
    return job_of(f, context, training, assumed)


CLASSES: Mapping[str, str] = {"AdamW8bit": "adamw_bnb_8bit", "Adam8bit": "adamw_bnb_8bit", "AdamW": "adamw_torch"}
"""Class of an optimizer -> transformers' name for it, where that is another than its own in small letters."""


def _optimizer(cls: str) -> str:
    return CLASSES.get(cls, cls.lower())


def _modules(found: Mapping[str, Any]) -> Modules:
    experts = {"grouped_mm": "grouped", "eager": "stacked", "batched_mm": "stacked"}.get(str(found["experts"]), "eager")
    return Modules(fused=False, loss="unfused", compiled=found["compiled"], experts=experts)  # type: ignore[arg-type]
