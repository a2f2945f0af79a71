"""Megatron-LM's options for changes of a job, as its command has them.

`TERMS` are dashed (`--recompute-granularity full`); those of programs that take the same arguments otherwise are made
from them by `renamed`. Read where the reader was read from. Leaves out what they do (`search.fit.options`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gnomon.search.fit.terms import REMOVED, Change, Setting, Style, Terms, Words


def _recompute(change: Change) -> list[Setting]:
    saved = change.after.saved
    if saved.rules:  # of some layers of each stage
        count = max((rule.first_per_stage or 0 for rule in saved.rules), default=0)
        return [
            ("recompute-granularity", "full"),
            ("recompute-method", "block"),
            ("recompute-num-layers", count),
        ]
    whole = change.before.saved.preset == "full" or bool(change.before.saved.rules)
    gone: list[Setting] = [("recompute-method", REMOVED), ("recompute-num-layers", REMOVED)] if whole else []
    if saved.preset == "none":
        return [("recompute-granularity", REMOVED), *gone]
    if saved.preset == "selective":
        return [("recompute-granularity", "selective"), *gone]
    return [("recompute-granularity", "full"), ("recompute-method", "uniform"), ("recompute-num-layers", 1)]


def _zero(change: Change) -> list[Setting] | None:
    stage = change.after.optimizer.zero
    if stage == 1:
        return [("use-distributed-optimizer", True)]
    strategy = {2: "optim_grads", 3: "optim_grads_params"}.get(stage)
    if strategy is None:
        return None
    return [("use-megatron-fsdp", True), ("data-parallel-sharding-strategy", strategy)]


def _host(change: Change) -> list[Setting] | None:
    offload = change.after.optimizer.offload
    if offload is not None and offload.accumulate != "device":
        return None  # main gradients are summed in the device's buffers
    share = 1.0 if offload is None else offload.fraction
    words: list[Setting] = [("optimizer-cpu-offload", True)]
    return words + ([("optimizer-offload-fraction", share)] if share < 1 else [])


def _axis(name: str, option: str) -> Words:
    return lambda change: [(option, getattr(change.after.mesh, name))]


def _tensor(change: Change) -> list[Setting]:
    settings: list[Setting] = [("sequence-parallel", True)] if change.after.layout.sequence_parallel else []
    return [("tensor-model-parallel-size", change.after.mesh.tp), *settings]


WORDS: dict[str, Words] = {
    "micro_batch_size": lambda change: [("micro-batch-size", change.micro)],
    "recompute": _recompute,
    "sequence_parallel": lambda change: [("sequence-parallel", True)],
    "zero": _zero,
    "optimizer_offload": _host,
    "bucket_bytes": lambda change: [
        ("ddp-bucket-size", (change.after.overlap.bucket_bytes or 0) // {"fp32": 4}.get(change.after.precision.grad, 2))
    ],
    "precision": lambda change: [("bf16", True)],
    "global_batch": lambda change: [("global-batch-size", change.workload.global_batch_size)],
    "tp": _tensor,
    "pp": _axis("pp", "pipeline-model-parallel-size"),
    "cp": _axis("cp", "context-parallel-size"),
}

TERMS = Terms(style="dashes", words=WORDS, in_part=frozenset({"recompute", "optimizer_offload"}))


def renamed(spell: Callable[[str, object], Setting], style: Style) -> Terms:
    """The same words by other names."""

    def with_spelling(words: Words) -> Words:
        def settings(change: Change) -> Sequence[Setting] | None:
            written = words(change)
            return None if written is None else [spell(key, value) for key, value in written]

        return settings

    return Terms(
        style=style, words={name: with_spelling(words) for name, words in WORDS.items()}, in_part=TERMS.in_part
    )
