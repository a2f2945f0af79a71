"""Whether the programs themselves read what `gnomon export` writes: their own parsers, on plans of several shapes.

    python benchmarks/export_check.py PYTHON --megatron DIR --deepspeed DIR --nanotron DIR

PYTHON has torch, torchtitan 0.2.2 and accelerate 1.15.0; the folders are checkouts of Megatron-LM (d98e8a6), DeepSpeed
(edaa722) and nanotron (2411b02), the last one's `src`. Exported files are given to their program's parser, one process
a program, and what the parser makes of them is compared with the plan: axes, batch, stages. Prints the table kept in
results/export.md; ends with 1 if a parser refuses a file or reads something else.

For Megatron-LM the script is run by bash with a `torchrun` that prints its arguments; then parse_args and
validate_args, as on a device of compute capability 9.0. For accelerate its launch command's own reading of the file, as
far as the environment of the processes. DeepSpeedConfig is given the number of data-parallel ranks. Nanotron is read
with empty modules in the place of kernels for GPUs. No training is started.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gnomon.cli.export import export_file
from gnomon.errors import GnomonError
from gnomon.formats import programs
from gnomon.formats.export import Export
from gnomon.plans import (
    Layout,
    Mesh,
    Optimizer,
    Overlap,
    Plan,
    PlanFile,
    Precision,
    Saved,
    Schedule,
    Workload,
)

FSDP = Precision(param="fp32", compute="bf16", grad="fp32", reduce="fp32", master="none")
WORK = Workload(global_batch_size=128, seq_len=4096)
SP = Layout(sequence_parallel=True)
PLANS = {
    "one device": PlanFile(
        model="llama-3.2-1b",
        on="h100-sxm",
        workload=Workload(global_batch_size=4, seq_len=2048),
        plan=Plan(schedule=Schedule(micro_batch_size=1), saved=Saved(preset="full")),
    ),
    "data parallel": PlanFile(
        model="llama-3.1-8b",
        on="1x8xh100-sxm",
        workload=WORK,
        plan=Plan(mesh=Mesh(dp_shard=8), schedule=Schedule(micro_batch_size=2), saved=Saved(preset="full")),
    ),
    "ZeRO 1, tp": PlanFile(
        model="llama-3.1-8b",
        on="4x8xh100-sxm",
        workload=WORK,
        plan=Plan(
            mesh=Mesh(dp_shard=16, tp=2),
            schedule=Schedule(micro_batch_size=1),
            layout=SP,
            optimizer=Optimizer(zero=1),
            saved=Saved(preset="selective"),
        ),
    ),
    "FSDP, hybrid": PlanFile(
        model="llama-3.1-8b",
        on="4x8xh100-sxm",
        workload=WORK,
        plan=Plan(
            mesh=Mesh(dp_replicate=4, dp_shard=8),
            schedule=Schedule(micro_batch_size=2),
            optimizer=Optimizer(zero=3),
            precision=FSDP,
            saved=Saved(preset="full"),
        ),
    ),
    "1F1B, uneven": PlanFile(
        model="llama-3.1-8b",
        on="4x8xh100-sxm",
        workload=WORK,
        plan=Plan(
            mesh=Mesh(pp=4, dp_shard=4, tp=2),
            schedule=Schedule(micro_batch_size=1, layers_per_stage=(7, 9, 9, 7)),
            layout=SP,
            optimizer=Optimizer(zero=1),
        ),
    ),
    "interleaved, cp": PlanFile(
        model="llama-3.1-70b",
        on="16x8xh100-sxm",
        workload=Workload(global_batch_size=64, seq_len=32768),
        plan=Plan(
            mesh=Mesh(pp=4, dp_shard=2, cp=2, tp=8),
            schedule=Schedule(name="interleaved_one_f_one_b", virtual_stages=2, micro_batch_size=1),
            layout=SP,
            optimizer=Optimizer(zero=1),
            saved=Saved(preset="full"),
        ),
    ),
    "context parallel": PlanFile(
        model="llama-3.1-8b",
        on="2x8xh100-sxm",
        workload=Workload(global_batch_size=8, seq_len=65536),
        plan=Plan(
            mesh=Mesh(dp_shard=4, cp=4),
            schedule=Schedule(micro_batch_size=1),
            layout=Layout(context="all_gather"),
            optimizer=Optimizer(zero=3),
            precision=FSDP,
            saved=Saved(preset="full"),
        ),
    ),
    "experts": PlanFile(
        model="qwen3-30b-a3b",
        on="4x8xh100-sxm",
        workload=WORK,
        plan=Plan(
            mesh=Mesh(dp_shard=32, ep=8),
            schedule=Schedule(micro_batch_size=1),
            optimizer=Optimizer(zero=1),
            saved=Saved(preset="full"),
        ),
    ),
    "DeepSeek-V3": PlanFile(
        model="deepseek-v3",
        on="256x8xh100-sxm",
        workload=Workload(global_batch_size=8192, seq_len=4096),
        plan=Plan(
            mesh=Mesh(pp=8, dp_shard=256, ep=64),
            schedule=Schedule(micro_batch_size=1, layers_per_stage=(7, 8, 8, 8, 8, 8, 8, 6)),
            optimizer=Optimizer(zero=1),
            saved=Saved(preset="full"),
        ),
    ),
    "GPT-3 on 512": PlanFile(
        model="gpt3-175b",
        on="64x8xa100-sxm-80gb",
        workload=Workload(global_batch_size=512, seq_len=2048),
        plan=Plan(
            mesh=Mesh(pp=8, dp_shard=8, tp=8),
            schedule=Schedule(name="interleaved_one_f_one_b", virtual_stages=4, micro_batch_size=1),
            layout=SP,
            optimizer=Optimizer(zero=1),
            overlap=Overlap(bucket_bytes=160_000_000),
            saved=Saved(preset="selective"),
        ),
    ),
}

LOOP = """
for path, facts in cases:
    try:
        print("FOUND " + json.dumps(read(path, facts)), flush=True)
    except (Exception, SystemExit) as error:
        print("FOUND " + json.dumps({"refused": f"{type(error).__name__}: {error}"[:300]}), flush=True)
"""

SNIPPETS = {
    "torchtitan": """
from torchtitan.config.manager import ConfigManager
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.distributed.pipeline_parallel import generate_llm_fqn_per_model_part
def read(path, facts):
    c = ConfigManager().parse_args(["--job.config_file", path])
    p, t = c.parallelism, c.training
    dims = ParallelDims(dp_replicate=p.data_parallel_replicate_degree, dp_shard=p.data_parallel_shard_degree,
        cp=p.context_parallel_degree, tp=p.tensor_parallel_degree, pp=p.pipeline_parallel_degree,
        ep=p.expert_parallel_degree, etp=p.expert_tensor_parallel_degree, world_size=facts["world"])
    stages = p.module_fqns_per_model_part
    if stages is None and dims.pp > 1:
        stages = generate_llm_fqn_per_model_part(facts["stages"], facts["layers"],
            p.pipeline_parallel_first_stage_less_layers, p.pipeline_parallel_last_stage_less_layers)
    split = [sum(n.startswith("layers.") for n in s) for s in stages] if stages else []
    return dict(dp_replicate=dims.dp_replicate, tp=dims.tp, pp=dims.pp, cp=dims.cp, ep=dims.ep,
        batch=t.global_batch_size, seq_len=t.seq_len, split=split)
""",
    "deepspeed": """
from deepspeed.runtime import config
config.dist.get_rank = lambda *a: 0
class Ranks:
    def get_data_parallel_world_size(self):
        return self.data
def read(path, facts):
    ranks = Ranks()
    ranks.data = facts["data"]
    c = config.DeepSpeedConfig(path, mpu=ranks)
    return dict(batch=c.train_batch_size, micro=c.train_micro_batch_size_per_gpu,
        microbatches=c.gradient_accumulation_steps, zero=c.zero_optimization_stage)
""",
    "accelerate": """
from accelerate.commands.launch import launch_command_parser, _validate_launch_command
from accelerate.utils.launch import prepare_multi_gpu_env
def read(path, facts):
    args = launch_command_parser().parse_args(["--config_file", path, "train.py"])
    args = _validate_launch_command(args)[0]
    exported = {"world": args.num_processes}
    if args.use_fsdp:
        env = prepare_multi_gpu_env(args)
        assert env["FSDP_VERSION"] == "2", env["FSDP_VERSION"]
        for axis in ("dp_replicate", "dp_shard", "tp", "cp"):
            exported[axis] = int(env[f"PARALLELISM_CONFIG_{axis.upper()}_SIZE"])
    return exported
""",
    "nanotron": """
from unittest.mock import MagicMock
for name in absent:  # kernels for GPUs, which the configuration does not need
    sys.modules[name] = MagicMock(__spec__=None, __version__="2.8.0")
from nanotron.config import get_config_from_file
def read(path, facts):
    c = get_config_from_file(path)
    p = c.parallelism
    return dict(world=p.dp * p.pp * p.tp * p.context_parallel_size, tp=p.tp, pp=p.pp, cp=p.context_parallel_size,
        batch=c.global_batch_size, seq_len=c.tokens.sequence_length, micro=c.tokens.micro_batch_size)
""",
    "megatron": """
import os, subprocess, tempfile, typing
import typing_extensions
typing.override = getattr(typing, "override", typing_extensions.override)
import torch
torch.cuda.get_device_properties = lambda *a: type("Device", (), {"major": 9, "minor": 0})()
torch.cuda.get_device_capability = lambda *a: (9, 0)
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.training.arguments import parse_args, validate_args
def words_of(path):
    with tempfile.TemporaryDirectory() as folder:
        fake = os.path.join(folder, "torchrun")
        with open(fake, "w") as file:
            file.write('#!/bin/bash\\nprintf "%s\\\\n" "$CUDA_DEVICE_MAX_CONNECTIONS" "$@"\\n')
        os.chmod(fake, 0o755)
        env = {"PATH": folder + ":" + os.environ["PATH"]}
        done = subprocess.run(["bash", path], env=env, capture_output=True, text=True, check=True)
    return done.stdout.split("\\n")[:-1]
def read(path, facts):
    connections, *words = words_of(path)
    nodes, each = (int(words[words.index(name) + 1]) for name in ("--nnodes", "--nproc-per-node"))
    os.environ |= {"WORLD_SIZE": str(nodes * each), "RANK": "0", "CUDA_DEVICE_MAX_CONNECTIONS": connections}
    sys.argv = ["pretrain_gpt.py", *words[words.index("pretrain_gpt.py") + 1 :]]
    a = validate_args(parse_args())
    text, split = a.pipeline_model_parallel_layout, []
    if text is not None:
        parts = PipelineParallelLayerLayout(text, a.pipeline_model_parallel_size).layout
        split = [rank[part].count(LayerType.decoder) for part in range(len(parts[0])) for rank in parts]
    return dict(world=nodes * each, tp=a.tensor_model_parallel_size, pp=a.pipeline_model_parallel_size,
        cp=a.context_parallel_size, ep=a.expert_model_parallel_size, data=a.data_parallel_size,
        batch=a.global_batch_size, micro=a.micro_batch_size, seq_len=a.seq_length,
        virtual=a.virtual_pipeline_model_parallel_size or 1, split=split)
""",
}

ABSENT = (
    "flash_attn flash_attn.flash_attn_interface flash_attn.layers flash_attn.layers.rotary flash_attn.bert_padding "
    "flash_attn.ops flash_attn.ops.triton flash_attn.ops.triton.layer_norm functorch.dim ring_flash_attn "
    "grouped_gemm grouped_gemm.ops"
).split()
"""Modules that stand empty while nanotron's configuration is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One plan and one program."""

    plan: str
    program: str
    verdict: str
    """`read`, `not exported` or `WRONG`."""
    detail: str
    listed: int
    """Fields that were not expressed."""


def facts_of(result: Export) -> dict[str, object]:
    """What the parser should find, from the file as Gnomon reads it."""
    plan, work = result.job.plan, result.job.workload
    mesh = plan.mesh
    split = list(plan.schedule.layers_per_stage)
    layers = 0 if result.job.model is None else getattr(result.job.model, "num_layers", 0)
    return {
        "world": mesh.world_size,
        "tp": mesh.tp,
        "pp": mesh.pp,
        "cp": mesh.cp,
        "ep": mesh.ep,
        "dp_replicate": mesh.dp_replicate,
        "dp_shard": mesh.dp_shard,
        "data": mesh.data_ranks,
        "batch": work.global_batch_size,
        "seq_len": work.seq_len,
        "micro": plan.schedule.micro_batch_size,
        "microbatches": work.global_batch_size // ((plan.schedule.micro_batch_size or 1) * mesh.data_ranks),
        "virtual": plan.schedule.virtual_stages,
        "zero": plan.optimizer.zero,
        "split": split,
        "stages": plan.num_stages,
        "layers": layers,
    }


def checks(program: str, python: str, path: str) -> Iterator[Check]:
    """The program's own parser on each exported file, in one process."""
    exports: dict[str, Export] = {}
    for name, file in PLANS.items():
        try:
            exports[name] = export_file(file, program)
        except GnomonError as error:
            yield Check(plan=name, program=program, verdict="not exported", detail=str(error).split(";")[0], listed=0)
    suffix = {"megatron": "sh", "torchtitan": "toml", "deepspeed": "json"}.get(program, "yaml")
    with tempfile.TemporaryDirectory() as folder:
        cases = []
        for index, one in enumerate(exports.values()):
            file_path = Path(folder) / f"job{index}.{suffix}"
            file_path.write_text(one.text, encoding="utf-8")
            cases.append((str(file_path), facts_of(one)))
        top = f"import json, sys\nabsent = {ABSENT!r}\ncases = json.loads({json.dumps(cases)!r})\n"
        done = subprocess.run(
            [python, "-c", top + SNIPPETS[program] + LOOP],
            env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
        )
    answers = [line.removeprefix("FOUND ") for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    if len(answers) != len(exports):
        raise SystemExit(f"{program}: {done.stderr[-1500:]}")
    for (name, exported), answer in zip(exports.items(), answers, strict=True):
        read, facts = json.loads(answer), facts_of(exported)
        # A list that is empty is a split that the program makes itself.
        wrong = [
            f"{key} {value}, not {facts.get(key)}" for key, value in read.items() if value not in ([], facts.get(key))
        ]
        yield Check(
            plan=name,
            program=program,
            verdict="WRONG" if wrong else "read",
            detail=", ".join(wrong) or f"{len(read)} values agree",
            listed=len(exported.unwritten),
        )


def main() -> int:
    parser = argparse.ArgumentParser(description="Exported files, read by the programs' own parsers.")
    parser.add_argument("python")
    for program in ("megatron", "deepspeed", "nanotron"):
        parser.add_argument(f"--{program}", default="", metavar="DIR")
    parser.add_argument("--only", choices=programs.writable_programs())
    options = parser.parse_args()
    paths = {program: getattr(options, program) for program in ("megatron", "deepspeed", "nanotron")}
    wrong = 0
    print("| plan | program | result | values compared, or why not | not expressed |\n| --- | --- | --- | --- | --- |")
    for program in programs.writable_programs() if options.only is None else (options.only,):
        for one in checks(program, options.python, paths.get(program, "")):
            wrong += one.verdict == "WRONG"
            print(f"| {one.plan} | {program} | {one.verdict} | {one.detail} | {one.listed} |", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
