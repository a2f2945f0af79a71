"""`python -m evidence.jobfiles_check FILES --peers DIR …`: what Gnomon reads in public files, and their own programs.

Files are those of `evidence.jobfiles`, each with the options that it was read with there. Every program's own parser
reads the same file, one process a program, and each field that both have is compared: layers, widths, heads, lengths,
batches, axes, ZeRO, dtype, recomputation. Checkouts, none of which is part of this repository: `--megatron`,
`--deepspeed`, `--nanotron` (its `src`), `--verl`, `--openrlhf`; `--peers` is a folder with torchtitan 0.2.2 and
hydra-core 1.3 (`pip install --target DIR --no-deps …`). Megatron-LM and OpenRLHF get the words that Gnomon reads from
the script, since a stranger's script is not run. Leaves out fields that a program computes while it runs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from evidence.jobfiles import Listed, Outcome, index, outcomes
from gnomon.cli.jobs import job_file, read_job
from gnomon.cli.options.flags import parse_options
from gnomon.cli.options.predict import PredictOptions
from gnomon.errors import GnomonError
from gnomon.formats.given import parse_settings
from gnomon.formats.job import Job
from gnomon.formats.megatron.read import training_launch
from gnomon.formats.shell import launches
from gnomon.hardware.specs import parse_cluster
from gnomon.models.presets import CONFIGS

Facts = Mapping[str, object]

LOOP = """
import json, sys
def answer(path, facts):
    try:
        return {k: v for k, v in read(path, facts).items() if v is not None}
    except (Exception, SystemExit) as error:
        return {"refused": f"{type(error).__name__}: {error}"[:200]}
for path, facts in json.load(open(cases)):
    print("FOUND " + json.dumps(answer(path, facts)), flush=True)
"""

MEGATRON = """
import os, typing, typing_extensions
typing.override = getattr(typing, "override", typing_extensions.override)
import torch
torch.cuda.get_device_properties = lambda *a: type("Device", (), {"major": 9, "minor": 0})()
torch.cuda.get_device_capability = lambda *a: (9, 0)
from megatron.training.arguments import parse_args
def read(path, facts):
    words = facts["words"]
    sys.argv = ["pretrain_gpt.py", *words]
    a = parse_args(ignore_unknown_args=True)
    older = {"--checkpoint-activations", "--activations-checkpoint-method", "--deepspeed", "--use-megatron-fsdp",
             "--use-torch-fsdp2", "--recompute-activations"} & set(words)
    layers = a.num_layers or a.encoder_num_layers
    found = dict(tp=a.tensor_model_parallel_size, pp=a.pipeline_model_parallel_size, cp=a.context_parallel_size,
        ep=a.expert_model_parallel_size, micro=a.micro_batch_size, batch=a.global_batch_size, seq_len=a.seq_length,
        dtype="bf16" if a.bf16 else "fp16" if a.fp16 else "fp32")
    for option, field in (("--ds-sequence-parallel-size", "cp"), ("--moe-expert-parallel-size", "ep")):
        if option in words:  # Megatron-DeepSpeed's own
            del found[field]
    if not facts["given_model"]:
        found |= dict(layers=layers, hidden=a.hidden_size, heads=a.num_attention_heads, ffn=a.ffn_hidden_size,
            kv_heads=a.num_query_groups if a.group_query_attention else a.num_attention_heads)
        if a.multi_latent_attention:
            del found["kv_heads"]
    if not older:
        found |= dict(zero=int(a.use_distributed_optimizer), recompute=a.recompute_granularity or "none")
        if a.num_layers_per_virtual_pipeline_stage and layers:
            found["virtual"] = layers // found["pp"] // a.num_layers_per_virtual_pipeline_stage
        elif a.num_virtual_stages_per_pipeline_rank:
            found["virtual"] = a.num_virtual_stages_per_pipeline_rank
    return found
"""

DEEPSPEED = """
from deepspeed.runtime import config
config.dist.get_rank = lambda *a: 0
class Ranks:
    def get_data_parallel_world_size(self):
        return self.data
def without(value):  # what the trainer fills in
    if isinstance(value, dict):
        return {k: without(v) for k, v in value.items() if v != "auto"}
    return value
def read(path, facts):
    ranks = Ranks()
    ranks.data = facts["data"]
    written = json.load(open(path))
    values = without(written)
    batches = ("train_batch_size", "train_micro_batch_size_per_gpu")
    if not any(key in values for key in batches):
        values["train_micro_batch_size_per_gpu"] = facts["micro"]
        values["gradient_accumulation_steps"] = 1
    c = config.DeepSpeedConfig(values, mpu=ranks)
    left = any(written.get(key, {}).get("enabled") == "auto" for key in ("bf16", "fp16"))
    half = "bf16" if c.bfloat16_config.enabled else "fp16" if c.float16_config.enabled else "fp32"
    z = c.zero_config
    device = z.offload_optimizer.device if z.offload_optimizer is not None else "none"
    offload = str(getattr(device, "value", device)) != "none" and z.stage > 0
    return dict(batch=c.train_batch_size, micro=c.train_micro_batch_size_per_gpu, zero=c.zero_optimization_stage,
        dtype=None if left else half, offload=offload,
        clip=c.gradient_clipping > 0 if not offload and "gradient_clipping" in values else None)
"""

NANOTRON = """
from unittest.mock import MagicMock
for name in ("flash_attn flash_attn.flash_attn_interface flash_attn.layers flash_attn.layers.rotary "
        "flash_attn.bert_padding flash_attn.ops flash_attn.ops.triton flash_attn.ops.triton.layer_norm functorch.dim "
        "ring_flash_attn grouped_gemm grouped_gemm.ops datasets datasets.download "
        "datasets.download.streaming_download_manager").split():
    sys.modules[name] = MagicMock(__spec__=None, __version__="2.8.0")
import pathlib
sys.modules["datasets.download.streaming_download_manager"].xPath = pathlib.Path
from nanotron.config import get_config_from_file
def read(path, facts):
    c = get_config_from_file(path, skip_unused_config_keys=True, skip_null_keys=True)
    p, m = c.parallelism, c.model.model_config
    return dict(world=p.dp * p.pp * p.tp * p.context_parallel_size, tp=p.tp, pp=p.pp, cp=p.context_parallel_size,
        batch=c.global_batch_size, seq_len=c.tokens.sequence_length, micro=c.tokens.micro_batch_size,
        layers=m.num_hidden_layers, hidden=m.hidden_size, heads=m.num_attention_heads, kv_heads=m.num_key_value_heads,
        ffn=m.intermediate_size, zero=c.optimizer.zero_stage if c.optimizer else None,
        dtype={"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32"}.get(str(c.model.dtype)),
        recompute="full" if p.recompute_layer else "none")
"""

TORCHTITAN = """
from torchtitan.config.manager import ConfigManager
def read(path, facts):
    c = ConfigManager().parse_args(["--job.config_file", path])
    p, t = c.parallelism, c.training
    return dict(tp=p.tensor_parallel_degree, cp=p.context_parallel_degree, pp=p.pipeline_parallel_degree,
        ep=p.expert_parallel_degree, dp_replicate=p.data_parallel_replicate_degree, seq_len=t.seq_len,
        batch=t.global_batch_size if t.global_batch_size > 0 else None,
        micro=t.local_batch_size if p.pipeline_parallel_degree == 1 else None,
        recompute={"full": "full", "none": "none"}.get(c.activation_checkpoint.mode))
"""

CONFIG = """
from transformers import AutoConfig
def read(path, facts):
    c = AutoConfig.from_pretrained(path)
    c = c.get_text_config()
    get = lambda *names: next((getattr(c, n) for n in names if isinstance(getattr(c, n, None), int)), None)
    heads = get("num_attention_heads")
    layers = get("num_hidden_layers", "num_layers")
    if getattr(c, "is_encoder_decoder", False):  # both parts count
        layers += get("num_decoder_layers") or layers
    return dict(layers=layers, hidden=get("hidden_size"), heads=heads, vocab=get("vocab_size"),
        kv_heads=get("num_key_value_heads") or heads, ffn=get("intermediate_size", "n_inner", "ffn_dim", "d_ff"))
"""

VERL = """
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
import logging, os
root = os.path.join(checkout, "verl", "trainer", "config")
def read(path, facts):
    words = [w for w in facts["words"] if "=" in w and not w.startswith("--") and "\ue000" not in w]
    learning = any(w.lstrip("+").startswith("actor_rollout_ref.") for w in words)
    name = facts["config"] or ("ppo_trainer" if learning else "sft_trainer_engine")
    known = {"ppo_trainer", "ppo_megatron_trainer", "sft_trainer_engine"}
    with initialize_config_dir(root, version_base=None):
        c = compose(name if name in known else "ppo_trainer", overrides=words)
    if learning:
        a, d = c.actor_rollout_ref.actor, c.data
        n = c.actor_rollout_ref.rollout.n
        found = dict(batch=a.ppo_mini_batch_size * n, seq_len=d.max_prompt_length + d.max_response_length,
            world=c.trainer.nnodes * c.trainer.n_gpus_per_node,
            micro=None if a.use_dynamic_bsz or a.ppo_micro_batch_size_per_gpu is None
            else min(a.ppo_micro_batch_size_per_gpu, a.ppo_mini_batch_size * n // facts["ranks"]))
        engine = a.megatron if "megatron" in a else None
    else:
        found = dict(batch=c.data.train_batch_size, seq_len=c.data.max_length,
            micro=None if c.data.use_dynamic_bsz else c.data.micro_batch_size_per_gpu)
        engine = c.engine if "tensor_model_parallel_size" in c.engine else None
        a = c.engine
    if engine is not None:
        found |= dict(tp=engine.tensor_model_parallel_size, pp=engine.pipeline_model_parallel_size,
            cp=engine.context_parallel_size, ep=engine.expert_model_parallel_size)
        o = engine.override_transformer_config
        found["recompute"] = o.recompute_granularity or "none"
    else:
        inner = a.get("fsdp_config", {}).get("ulysses_sequence_parallel_size", 1)
        found["cp"] = a.get("ulysses_sequence_parallel_size", 1)
        found["cp"] = found["cp"] if found["cp"] > 1 else inner
        model = c.actor_rollout_ref.model if learning else c.model
        found["recompute"] = "full" if model.enable_gradient_checkpointing else "none"
    return found
"""

OPENRLHF = """
import argparse, ast, datetime, os
def parser_of(program):
    name = program.removeprefix("openrlhf.cli.")
    tree = ast.parse(open(os.path.join(checkout, "openrlhf", "cli", name + ".py")).read())
    main = next(n for n in tree.body if isinstance(n, ast.If))
    kept = []
    for node in main.body:
        if "parse_args" in ast.unparse(node):
            break
        kept.append(node)
    names = {"argparse": argparse, "os": os, "datetime": datetime.datetime}
    exec(compile(ast.Module(kept, []), name, "exec"), names)
    return names["parser"]
def read(path, facts):
    a = vars(parser_of(facts["program"]).parse_known_args(facts["words"])[0])
    part = "actor" if "ppo" in facts["program"] else "model"
    return dict(batch=a["train.batch_size"], micro=a["train.micro_batch_size"], seq_len=a["data.max_len"],
        zero=a["ds.zero_stage"], cp=a["ds.ring_attn_size"], tp=a["ds.tensor_parallel_size"],
        dtype=a.get("ds.param_dtype"), recompute="full" if a[part + ".gradient_checkpointing_enable"] else "none")
"""

PROGRAMS = {
    "megatron": (MEGATRON, "megatron"),
    "deepspeed": (DEEPSPEED, "deepspeed"),
    "nanotron": (NANOTRON, "nanotron"),
    "torchtitan": (TORCHTITAN, "peers"),
    "config.json": (CONFIG, ""),
    "verl": (VERL, "verl"),
    "openrlhf": (OPENRLHF, "openrlhf"),
}
"""Format -> (its program's own reading, the option with its checkout)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """One file and its program's parser."""

    listed: Listed
    same: tuple[str, ...]
    other: tuple[str, ...]
    """Fields that differ, with both values."""
    refused: str
    """Why the program's parser did not read it."""


def job_of(outcome: Outcome, files: Path) -> Job | None:
    """The job as Gnomon reads it with the options of the table; None where there is none."""
    path = outcome.listed.below(files)
    options = parse_options(PredictOptions, [str(path), *outcome.given])
    source = job_file(options)
    if source is None:
        return None
    return read_job(source, options, options.network, parse_cluster(options.on or "").num_devices)


def facts_of(job: Job) -> dict[str, object]:
    """What both may say."""
    plan, work, mesh = job.plan, job.workload, job.plan.mesh
    model = CONFIGS[job.model]() if isinstance(job.model, str) and job.model in CONFIGS else job.model
    heads = getattr(model, "num_heads", None)
    return {
        "layers": getattr(model, "num_layers", None),
        "hidden": getattr(model, "hidden_size", None),
        "heads": heads,
        "kv_heads": getattr(model, "num_kv_heads", heads),
        "ffn": getattr(model, "ffn_size", None) if not getattr(model, "num_experts", 0) else None,
        "vocab": getattr(model, "vocab_size", None),
        **{axis: getattr(mesh, axis) for axis in ("tp", "pp", "cp", "ep", "dp_replicate")},
        "world": job.stated_devices,
        "ranks": mesh.data_ranks,
        "data": mesh.data_ranks * mesh.cp,
        "micro": plan.schedule.micro_batch_size,
        "batch": work.global_batch_size,
        "seq_len": work.seq_len,
        "zero": plan.optimizer.zero,
        "virtual": plan.schedule.virtual_stages,
        "dtype": plan.precision.param,
        "offload": plan.optimizer.offload is not None,
        "clip": plan.optimizer.clip,
        "recompute": "full" if plan.saved.rules and plan.saved.preset == "none" else plan.saved.preset,
    }


def words_of(outcome: Outcome, files: Path) -> dict[str, object]:
    """A script's words, and what was given in place of its network."""
    path, given = outcome.listed.below(files), outcome.given
    settings = parse_settings([b for a, b in zip(given, given[1:], strict=False) if a == "--set"])
    collected: dict[str, object] = {"given_model": "--model" in given, "words": [], "program": "", "config": ""}
    if path.suffix in (".json", ".toml", ".yaml", ".yml"):
        return collected
    text = path.read_text(encoding="utf-8-sig")
    if text.lstrip().startswith("--"):
        return {**collected, "words": text.replace("\\\n", " ").split()}
    script = launches(text, os.environ, settings, path.resolve().parent)
    launch = script.launches[-1] if outcome.listed.format != "megatron" else training_launch(script, str(path))
    words = [*launch.options, *(f"{k}={v}" for k, v in settings.items() if "." in k)]
    name = next((w.partition("=")[2] for w in words if w.startswith("--config-name=")), "")
    return {**collected, "words": words, "program": launch.program, "config": name.strip("'\"").removesuffix(".yaml")}


def network_facts(outcome: Outcome, files: Path) -> dict[str, object]:
    """Of a config.json, whose reader returns a Graph: sizes that its own keys give."""
    from gnomon.formats.huggingface.read import read_hf_config

    path = outcome.listed.below(files)
    result = read_hf_config(path.read_text(encoding="utf-8"), path.stem)
    sizes = {dim.name.rpartition(".")[2]: dim.size for block in result.graph.blocks for dim in block.dims}
    layers = sum(layer.call.first is not None for layer in result.graph.layers())
    names = {"hidden": "hidden", "heads": "heads", "kv_heads": "kv_heads", "ffn": "ffn", "vocab": "vocab"}
    return {"layers": layers, **{name: sizes.get(dim) for name, dim in names.items()}}


def checked(name: str, done: Sequence[Outcome], files: Path, checkout: str, scratch: Path) -> Iterator[Checked]:
    """The program's own parser on all files of one format, in one process."""
    cases, ours, kept = [], [], []
    for outcome in done:
        path = outcome.listed.below(files)
        try:
            if name == "config.json":
                facts = network_facts(outcome, files)
            else:
                if (job := job_of(outcome, files)) is None:
                    continue
                facts = {**facts_of(job), **words_of(outcome, files)}
        except GnomonError:
            continue
        cases.append((str(path), facts))
        ours.append(facts)
        kept.append(outcome)
    scratch.mkdir(parents=True, exist_ok=True)
    listing = scratch / "cases.json"
    listing.write_text(json.dumps(cases), encoding="utf-8")
    top = f"import sys\ncases, checkout = {str(listing)!r}, {checkout!r}\n"
    done_run = subprocess.run(
        [sys.executable, "-c", top + PROGRAMS[name][0] + LOOP],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    answers = [json.loads(x.removeprefix("FOUND ")) for x in done_run.stdout.splitlines() if x.startswith("FOUND ")]
    if len(answers) != len(cases):
        print(f"{name}: the program's parser ended early: {done_run.stderr.strip()[-300:]}", file=sys.stderr)
    for outcome, facts, theirs in zip(kept, ours, answers, strict=False):
        pairs = {k: (facts[k], v) for k, v in theirs.items() if facts.get(k) is not None and k != "refused"}
        yield Checked(
            listed=outcome.listed,
            same=tuple(k for k, (a, b) in pairs.items() if a == b),
            other=tuple(f"{k}: {a}, {name} has {b}" for k, (a, b) in pairs.items() if a != b),
            refused=str(theirs.get("refused", "")),
        )


def main() -> int:
    """Print the table, and every field that differs; ends with 1 if one does."""
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("files", type=Path, metavar="FILES", help="folder with the files")
    for name in ("peers", "megatron", "deepspeed", "nanotron", "verl", "openrlhf"):
        options.add_argument(f"--{name}", default="", metavar="DIR")
    options.add_argument("--format", default="", help="formats between commas; all")
    options.add_argument("--most", type=int, default=1000, metavar="N", help="files of a format, spread over them")
    options.add_argument("--scratch", type=Path, default=Path("/tmp/jobfiles-check"), metavar="DIR")
    options.add_argument("--workers", type=int, default=2, metavar="N")
    asked = options.parse_args()
    wrong = 0
    print(f"{'format':12} {'checked':>7} {'fields':>6} {'same':>6} {'other':>5} {'not read by its parser':>23}")
    for name in asked.format.split(",") if asked.format else PROGRAMS:
        which = PROGRAMS[name][1]
        checkout = getattr(asked, which) if which else "-"
        if not checkout:
            continue
        os.environ["PYTHONPATH"] = os.pathsep.join(
            x for x in (checkout, asked.peers, os.environ.get("PYTHONPATH", "")) if x
        )
        listed = [one for one in index() if one.format == name and one.below(asked.files).is_file()]
        listed = listed[:: max(1, len(listed) // asked.most)]
        read = [
            o
            for o in outcomes(listed, asked.files, whole=False, workers=asked.workers)
            if "as it" in o.outcome or "with" in o.outcome
        ]
        collected = list(checked(name, read, asked.files, checkout, asked.scratch))
        good = [one for one in collected if not one.refused]
        counted = Counter(same=sum(len(o.same) for o in good), other=sum(len(o.other) for o in good))
        total = counted["same"] + counted["other"]
        refused = len(collected) - len(good)
        print(f"{name:12} {len(good):7} {total:6} {counted['same']:6} {counted['other']:5} {refused:23}")
        for one in good:
            for field in one.other:
                print(f"    {one.listed.repository}/{one.listed.path}: {field}")
        for why, times in Counter(one.refused[:90] for one in collected if one.refused).most_common(4):
            print(f"    {times} not read by its parser: {why}")
        wrong += counted["other"]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
