"""`gnomon run JOB.yaml`: another program's job file carried out by Gnomon's runtime, and what of it that does not do.

`planned_job(options)` returns the plan file that the job is, and the options with what its file says of data, rates and
steps; where the command says them, the command holds. One process, on this machine. Lines that are not carried out are
said before anything is trained, and those that would be another training (preferences, rewards) are refused. Leaves out
which fields mean what (`formats`), and training (`run`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gnomon.cli.options.flags import changed_options
from gnomon.cli.options.run import RunOptions
from gnomon.errors import InputError
from gnomon.formats import programs
from gnomon.formats.given import ReadContext
from gnomon.formats.job import Fields, Job, flatten, read_source
from gnomon.formats.launched import dashed
from gnomon.formats.learnt import Learnt
from gnomon.formats.trainer_source import YAML_ENDS, commands_of, plain
from gnomon.formats.yaml_file import read_yaml
from gnomon.hardware import parse_cluster
from gnomon.models.presets import known_name
from gnomon.plans import PlanFile, Precision

ON = "local:1"

MODEL = ("model_name_or_path", "base_model", "model", "config")
"""Keys of the network."""
FP32 = Precision(param="fp32", compute="fp32", grad="fp32", reduce="fp32", master="none", states="fp32")

SCHEDULES = {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"}
SCHEDULES |= {"warmup_stable_decay": "wsd", "cosine_with_min_lr": "cosine"}
"""transformers' lr_scheduler_type -> ours."""

OTHER_TRAINING = ("rlhf_type", "reward_funcs", "num_generations", "rl")
PREFERENCES = ("dpo", "kto", "orpo", "ppo", "rm", "grpo", "reward", "simpo", "cpo", "rloo")

UNLIKE = {
    "use_liger_kernel": "Liger's kernels are not used: the same loss by Gnomon's own",
    "enable_liger_kernel": "Liger's kernels are not used: the same loss by Gnomon's own",
    "liger_fused_linear_cross_entropy": "the loss is computed over whole logits: the same number",
    "cut_cross_entropy": "the loss is computed over whole logits: the same number",
    "use_unsloth": "Unsloth's kernels are not used",
    "flash_attn": "attention is PyTorch's",
    "attn_implementation": "attention is PyTorch's",
    "flash_attention": "attention is PyTorch's",
    "neftune_noise_alpha": "no noise is added to embeddings",
    "label_smoothing_factor": "the loss is not smoothed",
    "lora_dropout": "adapters have no dropout",
    "use_dora": "",
    "deepspeed": "one process holds everything: nothing is sharded",
    "fsdp": "one process holds everything: nothing is sharded",
    "group_by_length": "samples are not sorted by length",
    "weight_decay": "weight decay is that of the runtime (--explain-optimizer)",
}
"""Key -> what is done in its place, where it is switched on; empty: it is done."""


def is_job(path: str) -> bool:
    """Whether a file is another program's job file, and no plan file."""
    file = Path(path)
    return not path.endswith(".toml") and file.is_file() and programs.recognised(file) is not None


def planned_job(options: RunOptions) -> tuple[PlanFile, RunOptions, tuple[str, ...]]:
    """(the plan file, the options with what the job's file says, lines that are not carried out)."""
    path = Path(options.plan)
    kind = programs.recognised(path)
    assert kind is not None, "asked by is_job"
    values = _values(path)
    _refuse_other_training(path, values)
    job = kind.read(path, ReadContext(devices=1))
    lines = [f"{key} = {_short(values[key])}: {why}" for key, why in UNLIKE.items() if why and _on(values.get(key))]
    name, folder = _model(path, values, job)
    plan = replace(job.plan, overlap=type(job.plan.overlap)())
    if plan.mesh.world_size > 1:
        raise InputError(
            f"{path} divides its model over {plan.mesh.world_size} ranks; gnomon run takes such a plan "
            f"from gnomon fit {path} --on local:{plan.mesh.world_size} -o plan.toml"
        )
    learnt = Learnt(learn="answers") if kind.learnt is None else kind.learnt(values)
    lines += learnt.differences
    if plan.optimizer.low_rank is not None:
        lines.append(f"{plan.optimizer.low_rank.method}: moments are of whole gradients, which are not projected")
    optimizer = replace(plan.optimizer, zero=0, offload=None, offload_parameters=False, low_rank=None, paged=False)
    plan = replace(plan, optimizer=optimizer)
    precision = plan.precision
    if any(getattr(device.dense_peak, precision.compute) is None for device in parse_cluster(ON).devices):
        lines.append(f"{precision.compute}: trained in fp32, as this machine is not measured in it (gnomon calibrate)")
        precision = replace(FP32, states=precision.states)
    if precision.states not in ("fp32", "bf16", "fp16", "fp64"):
        lines.append(f"{_optimizer_key(values)}: states are trained in {precision.compute}, not narrower")
        precision = replace(precision, states=precision.param)
    if any(rule.action == "offload" for rule in plan.saved.rules):
        lines.append("checkpoints on the host: this machine has one memory")
        plan = replace(plan, saved=replace(plan.saved, rules=()))
    plan = replace(plan, precision=precision)
    training = _with_file(options, values, path, folder, learnt)
    epochs = next((key for key in ("num_train_epochs", "num_epochs") if values.get(key)), "")
    if epochs and not values.get("max_steps") and "steps" not in changed_options(options):
        lines.append(f"{epochs} = {values[epochs]}: a run is of steps, of which this has {training.steps} (--steps)")
    file = PlanFile(model=name, on=ON, workload=job.workload, plan=plan)
    return file, training, tuple(lines)


def _values(path: Path) -> dict[str, Any]:
    """The fields of a YAML file or of the command of a script, by name."""
    text, name = read_source(path)
    if path.suffix.lower() in YAML_ENDS:
        return flatten(read_yaml(text, name, []))
    launches = commands_of(programs.sample(path))
    words = launches[-1].options if launches else ()
    return {key: plain(value) for key, value in dashed(words).items()} | {
        "script": launches[-1].program if launches else ""
    }


def _refuse_other_training(path: Path, values: Mapping[str, Any]) -> None:
    """InputError for preferences, rewards and rollouts."""
    named = str(values.get("stage") or values.get("rl") or values.get("rlhf_type") or "")
    script = Path(str(values.get("script", ""))).stem
    key = next((key for key in OTHER_TRAINING if values.get(key)), "stage" if named in PREFERENCES else "")
    if key or any(script.startswith(kind) for kind in PREFERENCES):
        what = f"{key} = {_short(values[key])}" if key else f"the script {script}"
        raise InputError(
            f"{path}: {what}: gnomon run trains on text and on answers, by the loss of the next token; preferences, "
            f"rewards and rollouts are not trained. gnomon predict says what a step of it takes"
        )


def _model(path: Path, values: Mapping[str, Any], job: Job) -> tuple[str, Path | None]:
    """(name or path of the network with its adapters, its folder)."""
    key = next((key for key in MODEL if isinstance(values.get(key), str)), "")
    if not key:
        raise InputError(f"{path} does not say its network as a name or a folder; gnomon run needs one")
    named = str(values[key])
    adapters = job.graph().name.partition("+")[2]
    end = f"+{adapters}" if adapters else ""
    for place in (path.parent / named, Path(named)):
        if (place / "config.json").is_file():
            return f"{place}{end}", place
    try:
        return f"{known_name(named.rpartition('/')[2].lower())}{end}", None
    except InputError:
        raise InputError(f"{key} = {named}: no folder with a config.json next to {path}; download it there") from None


def _with_file(
    options: RunOptions, values: Mapping[str, Any], path: Path, folder: Path | None, learnt: Learnt
) -> RunOptions:
    """The options that the command leaves out, as the file says them."""
    changed = changed_options(options)
    f = Fields(values, str(path))
    found: dict[str, Any] = {}
    if f.has("learning_rate"):
        found["lr"] = f.number("learning_rate")
    if f.has("max_steps") and f.peek("max_steps") not in (-1, "-1"):
        found["steps"] = f.integer("max_steps")
    if f.has("seed"):
        found["seed"] = f.integer("seed", least=0)
    steps: Any = changed.get("steps", found.get("steps", options.steps))
    schedule = next((str(values[k]) for k in ("lr_scheduler_type", "lr_scheduler") if values.get(k)), "linear")
    if schedule not in SCHEDULES:
        f.fail("lr_scheduler_type", f"{schedule!r}: gnomon run has {', '.join(sorted(SCHEDULES))}; or --lr-schedule")
    found["lr_schedule"] = SCHEDULES[schedule]
    if f.has("warmup_steps"):
        found["warmup_steps"] = f.integer("warmup_steps", least=0)
    elif f.has("warmup_ratio"):
        found["warmup_steps"] = int(steps * f.number("warmup_ratio"))
    packed = next(
        (values[k] for k in ("packing", "sample_packing", "neat_packing") if values.get(k) is not None), False
    )
    joined = bool(packed) and not (values.get("neat_packing") or values.get("sample_packing"))
    found["packing"] = "padded" if not packed else "stream" if joined else "documents"
    found["learn"] = learnt.learn
    if learnt.template is not None and folder is not None and (folder / "tokenizer.json").is_file():
        found["chat_template"] = os.fspath(learnt.template)
    for key in ("chat_template_jinja", "chat_template_path", "chat_template"):
        if isinstance(values.get(key), str) and (template := _template(path, str(values[key]))):
            found["chat_template"] = template
    data = changed.get("data") or _data(path, values)
    found["data"] = data
    if folder is not None:
        if (folder / "tokenizer.json").is_file():
            found["tokenizer"] = str(folder)
        if any(folder.glob("*.safetensors")):
            found["weights"] = str(folder)
    return replace(options, **{name: value for name, value in found.items() if name not in changed})


def _template(path: Path, named: str) -> str:
    """The file of a chat template that is named, or that lies in a folder of that name; empty where it is none."""
    for place in (path.parent / named, Path(named)):
        for file in (place, place / "chat_template.jinja"):
            if file.is_file() and file.suffix in (".jinja", ".jinja2", ".j2"):
                return os.fspath(file)
    return ""


def _data(path: Path, values: Mapping[str, Any]) -> str:
    """The file or folder of the data set that the job names. InputError for one that is not here."""
    named = values.get("datasets") or values.get("dataset") or values.get("dataset_name") or values.get("train_file")
    if isinstance(named, list) and named:
        named = named[0].get("path") if isinstance(named[0], Mapping) else named[0]
    folder = str(values.get("dataset_dir") or "data")
    for place in (path.parent, Path(), path.parent / folder, Path(folder)):
        if named and (place / str(named)).exists():
            return str(place / str(named))
        listed = place / "dataset_info.json"
        if named and listed.is_file():  # LLaMA-Factory's
            known = json.loads(listed.read_text(encoding="utf-8")).get(str(named).split(",")[0], {})
            file = known.get("file_name") if isinstance(known, Mapping) else None
            if file and (place / str(file)).is_file():
                return os.fspath(place / str(file))
    raise InputError(f"{path}: the data set {_short(named)} is not here; give --data PATH, of text or of messages")


def _optimizer_key(values: Mapping[str, Any]) -> str:
    key = next((key for key in ("optim", "optimizer") if values.get(key)), "optimizer")
    return f"{key} = {_short(values.get(key))}"


def _on(value: object) -> bool:
    return value not in (None, False, "", 0, "false", "disabled", "auto")


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
