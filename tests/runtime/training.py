"""Jobs that train on text, as their processes run them."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch.distributed as dist
from runtime.parity import FP32

from gnomon.models.llama import LlamaConfig, llama
from gnomon.plans import Mesh, Optimizer, Plan, Precision, Schedule, Workload
from gnomon.runtime import AdamWSettings as AdamWSettings
from gnomon.runtime import Executor, Outcome, Record, Source, TrainingJob, train
from gnomon.runtime.launch.train import corpus_of as corpus_of

CONFIG = LlamaConfig(
    name="bytes", num_layers=2, hidden_size=32, num_heads=2, num_kv_heads=2, head_dim=16, ffn_size=64, vocab_size=256
)
ALONE = Plan(schedule=Schedule(num_microbatches=1), precision=FP32)
PLANS = {
    "pp": replace(ALONE, mesh=Mesh(pp=2), schedule=Schedule(name="zero_bubble_h1", num_microbatches=4)),
    "zero 1": replace(ALONE, mesh=Mesh(dp_shard=2), optimizer=Optimizer(zero=1)),
    "zero 3": replace(ALONE, mesh=Mesh(dp_shard=2), optimizer=Optimizer(zero=3)),
    "tp": replace(ALONE, mesh=Mesh(tp=2)),
    "mixed precision, zero 1": replace(
        ALONE, mesh=Mesh(dp_shard=2), optimizer=Optimizer(zero=1), precision=Precision()
    ),
}


def source(data: Path) -> Source:
    """The text of a test; its tokens lie beside it."""
    return Source(path=data, cache=data.parent / f"{data.name}-tokens")


def job(data: Path, plan: Plan, steps: int, **more: object) -> TrainingJob:
    workload = Workload(global_batch_size=8, seq_len=32)
    given = TrainingJob(graph=llama(CONFIG), plan=plan, workload=workload, steps=steps, data=source(data), quiet=True)
    return replace(given, settings=replace(given.settings, lr=1e-2), **more)  # type: ignore[arg-type]


def config_folder(folder: Path, layers: int = CONFIG.num_layers) -> Path:
    """A folder with a config.json of CONFIG's model, with so many layers."""
    folder.mkdir()
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "num_hidden_layers": layers,
        "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": 256,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "hidden_act": "silu",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def interrupted(given: TrainingJob, after: int) -> Outcome:
    """Trains, and tells the last rank alone to end in step `after`."""
    asked = Executor.total_loss
    seen = []

    def total_loss(self: Executor, result: object) -> float:
        seen.append(result)
        if len(seen) == after and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return asked(self, result)  # type: ignore[arg-type]

    with patch.object(Executor, "total_loss", total_loss):
        return train(given)


def stories(data: Path, folder: Path) -> dict[str, tuple[tuple[Record, ...], ...]]:
    """Of each plan: twelve steps in one go; ended by a signal in the fifth; and resumed."""
    records = {}
    for name, plan in PLANS.items():
        whole = train(job(data, plan, 12))
        partly = job(data, plan, 12, checkpoints=folder / name, resume=True)
        before, after = interrupted(partly, 5), train(partly)
        assert (before.signal, before.resumed_from, after.signal, after.resumed_from) == (signal.SIGTERM, 0, 0, 5)
        records[name] = (whole.records, before.records, after.records)
    return records
