"""`gnomon serve`: an OpenAI-compatible server of a folder of weights.

`run(options)` serves until it is told to end and returns 0. Leaves out predictions of servers (`predict_serve`).
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from gnomon import schema
from gnomon.cli.missing import INFERENCE
from gnomon.cli.options.server import EngineOptions, ServerOptions
from gnomon.cli.run import need_torch
from gnomon.cli.values import quantity
from gnomon.errors import InputError
from gnomon.late import load_late
from gnomon.serving.file import ServeFile
from gnomon.software.engine import Engine, engine
from gnomon.units import parse_bytes, parse_seconds

KEY = "GNOMON_API_KEY"
"""Variable with the key that requests must bear."""
NOT_RUN = ("dp", "ep")
"""Axes of a plan that the engine does not divide a replica by."""


def run(options: ServerOptions) -> int:
    """Serve."""
    need_torch("serving")
    if not Path(options.folder).expanduser().exists():
        raise InputError(f"{options.folder} is no folder of weights, which gnomon serve wants; {INFERENCE}")
    status: int = load_late("gnomon.serve.server:serve")(settings_of(options))
    return status


def rules_of(options: EngineOptions, base: Engine) -> Engine:
    """The engine's record with the limits that were given."""
    return replace(
        base,
        max_seqs=options.max_num_seqs or base.max_seqs,
        max_batched_tokens=options.max_num_batched_tokens or base.max_batched_tokens,
    )


def settings_of(options: ServerOptions) -> Any:
    """As options and the plan say; options win."""
    plan = None if options.plan is None else schema.load_file(ServeFile, options.plan)
    base, replicas, longest = engine("gnomon"), options.replicas or 1, options.max_model_len
    tp, pp = options.tensor_parallel_size or 1, options.pipeline_parallel_size or 1
    if plan is not None:
        if plan.engine != "gnomon":
            raise InputError(f"{options.plan} is of {plan.engine}; make one with gnomon plan --serve --engine gnomon")
        if axis := next((name for name in NOT_RUN if getattr(plan.serving, name) > 1), None):
            raise InputError(
                f"{options.plan} has {axis} = {getattr(plan.serving, axis)}, and the engine divides a replica by tp "
                f"and pp; make a plan with {axis} = 1"
            )
        if plan.prefill_count:
            raise InputError(
                f"{options.plan} has {plan.prefill_count} engines for prompts and {plan.decode_count} for answers, and "
                f"each of this program does both; make a plan without --pools"
            )
        tp = options.tensor_parallel_size or plan.serving.tp
        pp = options.pipeline_parallel_size or plan.serving.pp
        base = plan.record()
        replicas = options.replicas or plan.serving.replicas
        longest = options.max_model_len or plan.serving.max_model_len
    folder = Path(options.folder).expanduser()
    threads = options.threads or max(1, (os.cpu_count() or 1) // (replicas * tp * pp))
    return load_late("gnomon.serve.settings:Settings")(
        folder=str(folder),
        tokenizer=Path(options.tokenizer).expanduser() if options.tokenizer else None,
        name=options.name or folder.resolve().name,
        adapters=tuple(_adapter(word) for word in options.lora),
        rules=rules_of(options, base),
        dtype=options.dtype,
        weights=options.weights,
        kv_bytes=quantity("--kv-memory", parse_bytes, options.kv_memory),
        max_model_len=longest,
        host=options.host,
        port=options.port,
        api_key=options.api_key or os.environ.get(KEY, ""),
        workers=replicas,
        ways=load_late("gnomon.serve.sizes:Ways")(tp=tp, pp=pp),
        threads=threads,
        max_waiting=options.max_waiting,
        max_body_bytes=quantity("--max-body", parse_bytes, options.max_body),
        drain_s=quantity("--drain", parse_seconds, options.drain),
    )


def _adapter(word: str) -> tuple[str, Path]:
    """NAME=FOLDER."""
    name, _, folder = word.partition("=")
    path = Path(folder).expanduser()
    if not name or not folder or not path.is_dir():
        raise InputError(f"--lora {word}: give NAME=FOLDER, a folder with adapter_config.json")
    return name, path
