"""What several commands ask: a job, its batch, axes and the way it is run, and the program that runs it.

Leaves out reading them into values (`cli.request`).
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Literal

from gnomon import orders
from gnomon.cli.options.flags import Group, Options, option, positional, repeated, switch
from gnomon.cli.values import count, named_size, some, tokens

JOB = Group("with a job file")
BATCH = Group("batch")
AXES = Group("axes (ranks; dp-shard is what remains unless given)")
ADAPTERS = Group("adapters on a frozen model; MODEL+lora16 and MODEL+qlora16 say the same")
HOW = Group("how it is run")

PASTED = "-"
"""In place of a file: what comes by standard input, as a command from a bug report does."""


def counts(text: str) -> tuple[int, ...]:
    """Whole numbers by commas, for argparse."""
    parts = text.split(",")
    if not all(part.strip().isdigit() for part in parts):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a list of whole numbers, as in 9,8,8,7")
    return tuple(int(part) for part in parts)


def _schedules() -> str:
    """Those of files that a user adds come while the program runs."""
    return f"one of {', '.join(orders.names())}"


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class JobFileOptions(Options):
    """A job file whose format is not recognised, and what is given with one."""

    source: tuple[str, str] | None = option(
        "--from",
        metavar=("FORMAT", "FILE"),
        nargs=2,
        help="an existing job, where its format is not recognised: megatron, torchtitan, deepspeed, axolotl, ...",
    )
    network: str | None = option(
        "--model", read=some, metavar="MODEL", help="the network, in place of the file's", group=JOB
    )
    settings: tuple[str, ...] = repeated(
        "--set",
        metavar="NAME=VALUE",
        help="a field of the file (or of config.json), or a variable of a script, by its name there; again for more",
        group=JOB,
    )
    arguments: str | None = option(
        "--args",
        metavar="ARGUMENTS",
        help="of a Python script that is run up to its first step, without GPU and network, to read its model and "
        'settings (--args "" for none); of a launch script, which is read and never run',
        group=JOB,
    )
    vocab_size: int | None = option(
        "--vocab-size", read=count, metavar="N", help="rows of the embedding, where a tokenizer decides", group=JOB
    )
    strict: bool = switch("--strict", help="an error for a field that is not known", group=JOB)


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class JobOptions(JobFileOptions):
    """What a job is: a model and machines, a plan file, or a job file."""

    model: str | None = positional(
        optional=True, metavar="MODEL", help="name, config.json or its folder, a job file, or a plan file"
    )
    on: str | None = option("--on", read=some, metavar="CLUSTER", help="machines, as in 4x8xh100-sxm")
    host_memory: str | None = option("--host-memory", metavar="SIZE", help="what a node's host has, as in 512GiB")
    plan: str | None = option("--plan", read=some, metavar="FILE", help="a plan in TOML; the options below change it")


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class StackOption(Options):
    """The program that runs it."""

    stack: str | None = option(
        "--stack", read=some, metavar="NAME", help="the program that will run it (gnomon catalogue stacks)"
    )


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class LocalOption(Options):
    """Whether what runs on this machine have shown counts."""

    no_local_calibration: bool = switch(
        "--no-local-calibration", help="leave out what gnomon plan --try measured on this machine"
    )


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class BatchOptions(Options):
    """Options of a step's input: batch, sequence length and other sizes."""

    global_batch: int | None = option(
        "--global-batch", read=count, metavar="N", help="sequences in an optimizer step", group=BATCH
    )
    micro_batch_size: int | None = option(
        "--micro-batch-size",
        read=count,
        metavar="N",
        help="sequences of a microbatch on one data-parallel rank",
        group=BATCH,
    )
    seq_len: int | None = option(
        "--seq-len", read=tokens, metavar="N", help="tokens of a sequence; 8k = 8192", group=BATCH
    )
    sizes: tuple[tuple[str, int], ...] = repeated(
        "--size",
        read=named_size,
        metavar="NAME=N",
        help="of another dim that the model leaves open, as enc_seq=512, the tokens of an encoder; again for more",
        group=BATCH,
    )
    inputs: str | None = option(
        "--inputs",
        metavar="INPUTS",
        help="of a MODEL that is code: NAME=DTYPE[DIM,...], as ids=int64[batch,seq]",
        group=BATCH,
    )
    tokens_per_batch: str | None = option(
        "--tokens-per-batch",
        read=some,
        metavar="N",
        help="tokens of an optimizer step, for --global-batch; 4M = 4 x 1024 x 1024",
        group=BATCH,
    )
    router: str | None = option(
        "--router",
        metavar="LOAD",
        help="how tokens spread over experts: balanced, zipf:1.0, a JSON list of counts, or what gnomon run "
        "--record-router wrote",
        group=BATCH,
    )
    capacity: float | None = option(
        "--capacity",
        read=float,
        metavar="C",
        help="rows an expert takes over the mean; more are dropped; no limit",
        group=BATCH,
    )
    pad_experts: bool | None = switch(
        "--pad-experts", default=None, help="every expert computes its whole capacity", group=BATCH
    )


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class AdapterOptions(Options):
    """What is trained on a frozen model."""

    lora_rank: int | None = option(
        "--lora-rank",
        read=count,
        metavar="R",
        help="train LoRA adapters of this rank only; with --serve: of those that are served",
        group=ADAPTERS,
    )
    lora_targets: str | None = option(
        "--lora-targets",
        read=some,
        metavar="NAMES",
        help="linears that get one, as in q_proj,v_proj; all of layers",
        group=ADAPTERS,
    )
    lora_base: Literal["compute", "nf4", "int8"] | None = option(
        "--lora-base", choices=("compute", "nf4", "int8"), help="how frozen linears are stored; compute", group=ADAPTERS
    )


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class PrecisionOption(Options):
    """What numbers are stored and computed in."""

    precision: str | None = option(
        "--precision",
        metavar="DTYPE",
        choices=("bf16", "fp16", "fp32", "fp8"),
        help="bf16, fp16, fp32 or fp8",
        group=HOW,
    )


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class LayoutOptions(BatchOptions, AdapterOptions, PrecisionOption, LocalOption):
    """Batch, axes, and how a job is run."""

    tp: int | None = option("--tp", read=count, metavar="N", help="tensor parallelism", group=AXES)
    pp: int | None = option("--pp", read=count, metavar="N", help="pipeline stages", group=AXES)
    cp: int | None = option(
        "--cp", read=count, metavar="N", help="context parallelism: parts of a sequence", group=AXES
    )
    ep: int | None = option(
        "--ep", read=count, metavar="N", help="expert parallelism, over ranks of dp-shard, cp and tp", group=AXES
    )
    dp_shard: int | None = option(
        "--dp-shard", read=count, metavar="N", help="data parallelism; ZeRO divides over these", group=AXES
    )
    dp_replicate: int | None = option(
        "--dp-replicate", read=count, metavar="N", help="data parallelism beyond them: replicas (HSDP)", group=AXES
    )
    vpp: int | None = option("--vpp", read=count, metavar="N", help="virtual stages on each pipeline rank", group=AXES)
    layers_per_stage: tuple[int, ...] | None = option(
        "--layers-per-stage", read=counts, metavar="N,N", help="layers of each stage, as in 9,8,8,7", group=AXES
    )
    zero: Literal[0, 1, 2, 3] | None = option(
        "--zero", read=int, metavar="STAGE", choices=(0, 1, 2, 3), help="ZeRO stage; 3 is FSDP", group=HOW
    )
    recompute: Literal["none", "selective", "full"] | None = option(
        "--recompute", metavar="HOW", choices=("none", "selective", "full"), help="none, selective or full", group=HOW
    )
    context: str | None = option(
        "--context",
        metavar="HOW",
        choices=("ring", "all_gather", "ulysses"),
        help="with cp: ring, all_gather or ulysses",
        group=HOW,
    )
    schedule: str | None = option("--schedule", metavar="NAME", help=_schedules, group=HOW)
    sequence_parallel: bool | None = switch("--sequence-parallel", default=None, help="with tp", group=HOW)


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class TrainingOptions(JobOptions, StackOption, LayoutOptions):
    """A job, where it may come from any file."""

    pass
