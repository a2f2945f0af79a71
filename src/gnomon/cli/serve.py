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
RUN_AXES = ("tp", "pp", "dp", "ep")
"""Axes of a plan that divide one replica."""


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
    if plan is not None:
        if plan.engine != "gnomon":
            raise InputError(f"{options.plan} is of {plan.engine}; make one with gnomon plan --serve --engine gnomon")
        divided = [name for name in RUN_AXES if getattr(plan.serving, name) > 1]
        if divided:
            axis, ranks = divided[0], getattr(plan.serving, divided[0])
            raise InputError(
                f"{options.plan} has {axis} = {ranks}, and a replica is served by one process; make a plan with "
                f"{axis} = 1, and replicas"
            )
        base = plan.record()
        replicas = options.replicas or plan.serving.replicas
        longest = options.max_model_len or plan.serving.max_model_len
    folder = Path(options.folder).expanduser()
    threads = options.threads or max(1, (os.cpu_count() or 1) // replicas)
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
