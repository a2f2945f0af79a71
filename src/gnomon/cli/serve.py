"""`gnomon serve`: an OpenAI-compatible server of a folder of weights.

`run(options)` serves until it is told to end and returns 0. Leaves out predictions of servers (`predict_serve`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gnomon import schema
from gnomon.cli.missing import INFERENCE, need_torch
from gnomon.cli.options.flags import changed_options
from gnomon.cli.options.server import EngineOptions, ServerOptions
from gnomon.cli.values import quantity
from gnomon.errors import InputError
from gnomon.late import load_late
from gnomon.serving.file import ServeFile
from gnomon.software.engine import Engine, engine
from gnomon.units import parse_bytes, parse_seconds

KEY = "GNOMON_API_KEY"
"""Variable with the key that requests must bear."""
STORED: Mapping[str, tuple[str, str]] = {
    "bf16": ("bf16", "stored"),
    "fp32": ("fp32", "stored"),
    "int8-wo": ("bf16", "int8"),
    "int4-g128": ("bf16", "int4-g128"),
    "int4-g64": ("bf16", "int4-g64"),
    "int4-g32": ("bf16", "int4-g32"),
}
"""Weights of a plan -> what is computed in, and how matrices are kept."""


def run(options: ServerOptions) -> int:
    """Loads the folder and serves it until a signal."""
    need_torch("serving")
    if not Path(options.folder).expanduser().exists():
        raise InputError(f"{options.folder} is no folder of weights, which gnomon serve wants; {INFERENCE}")
    status: int = load_late("gnomon.serve.server:serve")(settings_of(options))
    return status


def weights_at(words: str, tokenizer: str | None) -> Path:
    """A folder of weights; of a GGUF file what stands for one. InputError for a file that is not read."""
    path = Path(words).expanduser()
    if path.suffix != ".gguf" or path.is_dir():
        return path
    own = Path(tokenizer) if tokenizer else None
    folder: Path = load_late("gnomon.runtime.checkpoint.gguf_folder:folder_of")(path, tokenizer=own)
    return folder


def rules_of(options: EngineOptions, base: Engine) -> Engine:
    """The engine's record with the limits that were given."""
    return replace(
        base,
        max_seqs=options.max_num_seqs or base.max_seqs,
        max_batched_tokens=options.max_num_batched_tokens or base.max_batched_tokens,
    )


def settings_of(options: ServerOptions) -> Any:
    """The server's settings, from the plan file and the options; options win."""
    plan = None if options.plan is None else _planned(options, schema.load_file(ServeFile, options.plan))
    serving = None if plan is None else plan.serving
    replicas = options.replicas or (serving.replicas if serving else 1)
    tp = options.tensor_parallel_size or (serving.tp if serving else 1)
    pp = options.pipeline_parallel_size or (serving.pp if serving else 1)
    ep = options.expert_parallel_size or (serving.ep if serving else 1)
    dtype, weights = options.dtype, options.weights
    if serving is not None:
        dtype, own = STORED[serving.weights]
        changed = changed_options(options)
        dtype, weights = str(changed.get("dtype", dtype)), str(changed.get("weights", own))
    buckets, every = options.pad_to, options.every_bucket
    if plan is not None and not buckets:
        buckets, every = plan.buckets, every or plan.every_bucket
    if options.every_bucket and not buckets:
        raise InputError("--every-bucket says who has the lengths of --pad-to; give them")
    if options.head != "exact" and tp * pp > 1:
        raise InputError("--head graph is of a model in one process; leave parallel sizes out")
    copies = options.expert_copies or (serving.expert_copies if serving else 0)
    if copies and ep == 1:
        raise InputError(
            "--expert-copies are of experts that other processes have: deal them out (--tensor-parallel-size 2 "
            "--expert-parallel-size 2), or leave it out"
        )
    if copies and options.stream_weights is not None:
        raise InputError("--expert-copies are of experts in memory: leave --stream-weights out, or copies")
    if options.record_experts is not None and (replicas > 1 or pp > 1):
        raise InputError("--record-experts records one replica of one stage; leave --replicas and stages out")
    folder, model_path = weights_at(options.folder, options.tokenizer), Path(options.folder).expanduser().resolve()
    # All processes of all replicas share the machine's cores.
    threads = options.threads or max(1, (os.cpu_count() or 1) // (replicas * tp * pp))
    return load_late("gnomon.serve.settings:Settings")(
        folder=str(folder),
        tokenizer=Path(options.tokenizer).expanduser() if options.tokenizer else None,
        name=options.name or (model_path.stem if model_path.suffix == ".gguf" else model_path.name),
        adapters=tuple(_adapter(word) for word in options.lora),
        rules=rules_of(options, engine("gnomon") if plan is None else plan.record()),
        dtype=dtype,
        weights=weights,
        kv_bytes=quantity("--kv-memory", parse_bytes, options.kv_memory),
        resident_bytes=(
            serving.resident_bytes if serving and not options.stream_weights else resident_of(options.stream_weights)
        ),
        max_model_len=options.max_model_len or (serving.max_model_len if serving else None),
        host=options.host,
        port=options.port,
        api_key=options.api_key or os.environ.get(KEY, ""),
        workers=replicas,
        ways=load_late("gnomon.serve.sizes:Ways")(tp=tp, pp=pp, ep=ep),
        expert_copies=copies,
        record_experts=None if options.record_experts is None else Path(options.record_experts).expanduser(),
        head=options.head,
        buckets=buckets,
        every_bucket=every,
        patience=plan.patience if plan is not None else 1.0,
        threads=threads,
        max_waiting=options.max_waiting,
        max_body_bytes=quantity("--max-body", parse_bytes, options.max_body),
        drain_s=quantity("--drain", parse_seconds, options.drain),
    )


def resident_of(words: str | None) -> int | None:
    """Reads `--stream-weights` as bytes; None where it is not given."""
    return None if words is None else quantity("--stream-weights", parse_bytes, words)


def _planned(options: ServerOptions, plan: ServeFile) -> ServeFile:
    """InputError for what a plan says and the engine does not do."""
    of, serving = options.plan, plan.serving
    if plan.engine != "gnomon":
        raise InputError(f"{of} is of {plan.engine}; make one with gnomon plan --serve --engine gnomon")
    if serving.dp > 1:
        raise InputError(
            f"{of} has dp = {serving.dp}: attention's data parallelism is predicted only, and the engine divides a "
            f"replica by tp, pp and ep; make a plan with dp = 1"
        )
    if serving.redundant_experts:
        raise InputError(
            f"{of} has {serving.redundant_experts} copies of experts, which are predicted only; make a plan without "
            f"--redundant-experts"
        )
    if plan.prefill_count:
        raise InputError(
            f"{of} has {plan.prefill_count} engines for prompts and {plan.decode_count} for answers, and each of this "
            f"program does both; make a plan without --pools"
        )
    if serving.weights not in STORED:
        raise InputError(
            f"{of} has weights in {serving.weights}, and the engine keeps them in {', '.join(STORED)}; make a plan "
            f"with --weights of these"
        )
    if serving.draft != "none":
        raise InputError(f"{of} has guesses by {serving.draft}, which the engine does not check; make a plan without")
    dtype = changed_options(options).get("dtype", STORED[serving.weights][0])
    if serving.kv != dtype:
        raise InputError(
            f"{of} has keys in {serving.kv}, and the engine keeps them as it computes, in {dtype}; make a plan with "
            f"--kv {dtype}, or give --dtype {serving.kv}"
        )
    return plan


def _adapter(word: str) -> tuple[str, Path]:
    """Reads NAME=FOLDER of `--lora`. InputError for a folder that is none of an adapter."""
    name, _, folder = word.partition("=")
    path = Path(folder).expanduser()
    if not name or not folder or not path.is_dir():
        raise InputError(f"--lora {word}: give NAME=FOLDER, a folder with adapter_config.json")
    return name, path
