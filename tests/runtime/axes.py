"""Plans of context, expert and tensor parallelism against the plain model, for the tests and their processes."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

from runtime.parity import SP, cut, schedule

from gnomon.graph import Graph
from gnomon.models.bert import BertConfig, bert
from gnomon.models.deepseek import deepseek_v3, deepseek_v3_671b
from gnomon.models.llama import LlamaConfig, llama
from gnomon.models.lora import Adapters, with_adapters
from gnomon.models.mixtral import MixtralConfig, mixtral
from gnomon.models.presets import model
from gnomon.models.t5 import T5Config, t5
from gnomon.models.tiny import tiny
from gnomon.models.vit import VitConfig, vit
from gnomon.plans import Layout, LayoutRule, Mesh, Optimizer, Overlap, Plan, Saved, Workload
from gnomon.plans.check import sample_tokens
from gnomon.runtime.checks import parity
from gnomon.runtime.checks.parity import FP64, ParityResult, Small
from gnomon.runtime.ops import context

SIZES = {"num_layers": 2, "hidden_size": 16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4, "vocab_size": 32}
LLAMA = llama(LlamaConfig(name="llama", ffn_size=24, **SIZES))
ODD = llama(LlamaConfig(name="odd", ffn_size=24, **SIZES | {"num_heads": 6, "num_kv_heads": 3}))
TIED = llama(LlamaConfig(name="tied", ffn_size=24, tied=True, **SIZES))
MIXTURE = MixtralConfig(name="mixtral", num_experts=4, experts_per_token=2, expert_ffn_size=12, **SIZES)
MIXTRAL, WINDOWED = mixtral(MIXTURE), mixtral(replace(MIXTURE, window=5))
T5 = t5(
    T5Config(
        name="t5", num_layers=2, num_decoder_layers=2, hidden_size=16, num_heads=4, head_dim=4, ffn_size=24,
        vocab_size=32, gated=True, tied=False, dropout=0.0,
    )
)  # fmt: skip
DEEPSEEK = tiny(model("deepseek-v3"), tp=2, layers=1)
FURTHER = tiny(deepseek_v3(deepseek_v3_671b(mtp_modules=2)), tp=2, layers=1)
SCANS = tiny(model("nemotron-h-8b"), tp=2, layers=1)
ADAPTED = with_adapters(LLAMA, Adapters(rank=2))
WIDE = SIZES | {"hidden_size": 64, "head_dim": 32}
"""Of which two tensor-parallel ranks have whole blocks of 64."""
FOUR_BITS = with_adapters(llama(LlamaConfig(name="wide", ffn_size=128, **WIDE)), Adapters(rank=2, base="nf4"))
GPT2 = tiny(model("gpt2"), tp=2, layers=1)
BERT = bert(
    BertConfig(
        name="bert", num_layers=2, hidden_size=16, num_heads=4, ffn_size=24, vocab_size=32, head="mlm", dropout=0.0,
        attention_dropout=0.0,
    )
)  # fmt: skip
VIT = vit(
    VitConfig(
        name="vit", num_layers=2, hidden_size=16, num_heads=4, ffn_size=24, image_size=12, patch_size=4, num_classes=6
    )
)  # fmt: skip
WORKLOAD = Workload(global_batch_size=4, seq_len=16)
ZB = schedule("zero_bubble_h1", 2)
ROWS = Overlap(experts=True)
"""Dispatch and combine are rows."""
BY_GATHER = Layout(dispatch="all_gather")
"""All tokens come to all ranks of experts."""


def small(
    graph: Graph, mesh: Mesh, zero: int = 0, how: object = None, kind: str = "adamw", rows: int = 4, **parts: object
) -> Small:
    plan = Plan(
        mesh=mesh,
        schedule=how or schedule("one_f_one_b", 1 if mesh.data_ranks == 4 else 2),
        optimizer=Optimizer(kind=kind, zero=zero),  # type: ignore[arg-type]
        precision=FP64,
        **parts,  # type: ignore[arg-type]
    )
    encoded = (("enc_seq", 16),) if graph is T5 else ()
    work = replace(WORKLOAD, global_batch_size=rows, sizes=encoded, seq_len=sample_tokens(graph) or WORKLOAD.seq_len)
    return Small(graph=graph, plan=plan, workload=work)


def whole(*dims: str, sequence_parallel: bool = False) -> Layout:
    """Every rank has all of these dims."""
    return Layout(sequence_parallel=sequence_parallel, rules=tuple(LayoutRule(dim=dim) for dim in dims))


def away(job: Small) -> Small:
    """The same with parameters that wait on the host."""
    return replace(job, plan=replace(job.plan, optimizer=replace(job.plan.optimizer, offload_parameters=True)))


def packed(job: Small) -> Small:
    """The same with rows of several documents."""
    return replace(job, packed=True)


CASES: dict[str, Small] = {
    "ring, contiguous": small(LLAMA, Mesh(cp=2), layout=Layout(context_order="contiguous")),
    "ring, recompute, zero 3": small(LLAMA, Mesh(cp=2), 3, saved=Saved(preset="full")),
    "ring, window": small(WINDOWED, Mesh(cp=2)),
    "ring outside dp_shard, zero 3": small(
        LLAMA, Mesh(dp_shard=2, cp=2, order=("cp", "dp_replicate", "dp_shard", "tp", "pp")), 3
    ),
    "gathered": small(LLAMA, Mesh(cp=2), 1, layout=Layout(context="all_gather")),
    "gathered, kept, window": small(WINDOWED, Mesh(cp=2), layout=Layout(context="all_gather", keep_gathered=True)),
    "ulysses": small(LLAMA, Mesh(cp=2), 2, layout=Layout(context="ulysses")),
    "ring, packed": packed(small(LLAMA, Mesh(cp=2))),
    "gathered, window, packed": packed(small(WINDOWED, Mesh(cp=2), layout=Layout(context="all_gather"))),
    "ulysses, packed": packed(small(LLAMA, Mesh(cp=2), layout=Layout(context="ulysses"))),
    "learned positions over cp, packed": packed(small(GPT2, Mesh(cp=2))),
    "experts": small(MIXTRAL, Mesh(dp_shard=2, ep=2)),
    "experts by a gather, zero 3": small(
        MIXTRAL, Mesh(dp_shard=2, ep=2), 3, saved=Saved(preset="full"), layout=BY_GATHER
    ),
    "experts by a gather over tp, beside shared ones": small(
        DEEPSEEK, Mesh(tp=2, ep=2), layout=replace(BY_GATHER, sequence_parallel=True)
    ),
    "experts, zero 3": small(MIXTRAL, Mesh(dp_shard=2, ep=2), 3, saved=Saved(preset="full")),
    "exchanges of experts as rows": small(MIXTRAL, Mesh(dp_shard=2, ep=2), 1, overlap=ROWS),
    "exchanges of experts as rows, zero 3": small(
        MIXTRAL, Mesh(dp_shard=2, ep=2), 3, overlap=ROWS, saved=Saved(preset="full")
    ),
    "exchanges of slices of experts as rows": small(MIXTRAL, Mesh(dp_shard=2, etp=2), 2, overlap=ROWS),
    "exchanges of experts as rows, split backward": small(MIXTRAL, Mesh(cp=2, ep=2), how=ZB, overlap=ROWS),
    "exchanges of experts as rows over tp": small(MIXTRAL, Mesh(tp=2, ep=2), layout=SP, overlap=ROWS),
    "exchanges of experts as rows beside shared ones": small(DEEPSEEK, Mesh(dp_shard=2, ep=2), overlap=ROWS),
    "slices of experts": small(MIXTRAL, Mesh(dp_shard=2, etp=2), 1),
    "experts over cp, split backward": small(MIXTRAL, Mesh(cp=2, ep=2), how=ZB),
    "whole experts beside tp": small(MIXTRAL, Mesh(tp=2), layout=SP),
    "experts over tp": small(MIXTRAL, Mesh(tp=2, ep=2), layout=SP),
    "a rotary key without heads over tp": small(DEEPSEEK, Mesh(tp=2), layout=SP),
    "further tokens over tp": small(FURTHER, Mesh(tp=2), layout=SP),
    "further tokens, split backward": small(FURTHER, Mesh(pp=2), how=ZB),
    "further tokens, zero 3": small(FURTHER, Mesh(dp_shard=2), 3),
    "scans over tp": small(SCANS, Mesh(tp=2), layout=SP),
    "scans over tp, recompute": small(SCANS, Mesh(tp=2), saved=Saved(preset="full")),
    "scans over tp and zero 3": small(SCANS, Mesh(tp=2, dp_shard=2), 3, layout=SP),
    "learned positions over tp": small(GPT2, Mesh(tp=2), layout=SP),
    "heads of a table of positions over tp": small(T5, Mesh(tp=2), layout=SP),
    "two tables of embeddings over tp": small(BERT, Mesh(tp=2)),
    "images over tp": small(VIT, Mesh(tp=2)),
    "images, zero 3": small(VIT, Mesh(dp_shard=2), 3),
    "gradient buckets over cp": small(LLAMA, Mesh(cp=2), overlap=Overlap(bucket_bytes=1)),
    "gradient buckets of experts": small(MIXTRAL, Mesh(dp_shard=2, ep=2), overlap=Overlap(bucket_bytes=1)),
    "gradient buckets of experts, zero 2": small(
        MIXTRAL, Mesh(dp_shard=2, ep=2), 2, overlap=Overlap(bucket_bytes=9000)
    ),
    "parameters on the host, experts": away(small(MIXTRAL, Mesh(dp_shard=2, ep=2), 3)),
    "parameters on the host, stages alone": away(small(ADAPTED, Mesh(pp=2), 3)),
    "encoder and decoder, one stage each": small(T5, Mesh(pp=2)),
    "encoder and decoder, zero 3": small(T5, Mesh(dp_shard=2), 3),
    "encoder and decoder, split backward": small(T5, Mesh(pp=2), how=ZB),
    "cut linears of an encoder and a decoder": small(T5, Mesh(tp=2), layout=SP, overlap=cut(2)),
    "cut linears beside experts, split backward": small(MIXTRAL, Mesh(tp=2), layout=SP, overlap=cut(2), how=ZB),
    "cut linears and adapters, recompute": small(
        ADAPTED, Mesh(tp=2), layout=SP, overlap=cut(2), saved=Saved(preset="full")
    ),
    "whole heads over tp": small(ODD, Mesh(tp=2), layout=whole("heads", "kv_heads")),
    "whole heads over tp and zero 3": small(ODD, Mesh(tp=2, dp_shard=2), 3, layout=whole("heads", "kv_heads")),
    "whole ffn and vocabulary over tp": small(T5, Mesh(tp=2), layout=whole("ffn", "vocab", sequence_parallel=True)),
    "frozen base, zero 3": small(ADAPTED, Mesh(dp_shard=2), 3),
    "base in four bits, zero 3": small(FOUR_BITS, Mesh(dp_shard=2), 3),
    "base in four bits, zero 1, recompute": small(FOUR_BITS, Mesh(dp_shard=2), 1, saved=Saved(preset="full")),
    "base in four bits on the host, stages": away(small(FOUR_BITS, Mesh(pp=2), 3)),
    "base in four bits, split backward": small(FOUR_BITS, Mesh(pp=2), how=ZB),
    "base in four bits over tp, cut linears": small(FOUR_BITS, Mesh(tp=2), layout=SP, overlap=cut(2)),
    "adafactor over tp": small(LLAMA, Mesh(tp=2), layout=SP, kind="adafactor"),
    "adafactor, zero 2": small(LLAMA, Mesh(dp_shard=2), 2, kind="adafactor"),
    "adafactor of experts, zero 3": small(MIXTRAL, Mesh(dp_shard=2, ep=2), 3, kind="adafactor"),
    "muon over tp": small(LLAMA, Mesh(tp=2), layout=SP, kind="muon"),
    "muon, zero 1": small(LLAMA, Mesh(dp_shard=2), 1, kind="muon"),
    "muon of slices of experts, zero 2": small(MIXTRAL, Mesh(dp_shard=2, etp=2), 2, kind="muon"),
    "muon, a table that is the head on another stage": small(TIED, Mesh(pp=2), kind="muon"),
    "muon, two ranks a key head": small(LLAMA, Mesh(tp=4), kind="muon"),
    "muon, tp and zero 3": small(LLAMA, Mesh(dp_shard=2, tp=2), 3, layout=SP, kind="muon"),
    "adafactor of experts, tp and zero 1": small(
        MIXTRAL, Mesh(dp_shard=2, tp=2, ep=2, etp=2), 1, layout=SP, kind="adafactor"
    ),
    "cut linears over four": small(LLAMA, Mesh(tp=4), layout=SP, overlap=cut(4)),
    "ring of four": small(LLAMA, Mesh(cp=4)),
    "ulysses and tp": small(LLAMA, Mesh(cp=2, tp=2), layout=replace(SP, context="ulysses")),
    "pipeline and ring": small(LLAMA, Mesh(pp=2, cp=2), how=ZB),
    "dp, cp, zero 3": small(LLAMA, Mesh(dp_shard=2, cp=2), 3),
    "edp, ep, zero 2": small(MIXTRAL, Mesh(dp_shard=4, ep=2), 2),
    "replicas, ep, zero 1": small(MIXTRAL, Mesh(dp_replicate=2, dp_shard=2, ep=2), 1),
    "ep and etp over dp and cp": small(MIXTRAL, Mesh(dp_shard=2, cp=2, ep=2, etp=2)),
    "ep and etp by a gather": small(MIXTRAL, Mesh(dp_shard=2, cp=2, ep=2, etp=2), layout=BY_GATHER),
    "exchanges of experts as rows in a pipeline": small(
        MIXTRAL, Mesh(pp=2, dp_shard=2, ep=2), 1, how=schedule("one_f_one_b", 2), overlap=ROWS
    ),
    "exchanges of experts as rows, dualpipe": small(
        tiny(model("mixtral-8x7b"), tp=1, ep=2, layers=4),
        Mesh(pp=2, dp_shard=2, ep=2),
        how=replace(schedule("dualpipe_v", 4), virtual_stages=2, placement="v"),
        overlap=ROWS,
        rows=8,
    ),
    "an encoder's output skips stages": small(T5, Mesh(pp=4)),
    "encoder, decoder and tp": small(T5, Mesh(pp=2, tp=2), layout=SP),
    "cp, tp, ep over both": small(MIXTRAL, Mesh(cp=2, tp=2, ep=4), layout=SP),
}
"""Each of the ways to run attention and experts, alone and with other axes."""
BROKEN = "gathered, in the wrong order"


def compare_all(world_size: int) -> dict[str, ParityResult]:
    """Of every case of so many processes, in one of them. Two steps: parameters at the end show the second update,
    whose states are of both."""
    with patch.object(parity, "STEPS", 2):
        actual = {name: parity.compare(job) for name, job in CASES.items() if job.plan.world_size == world_size}
        if world_size == 2:
            with patch.object(context, "in_order", lambda x, axis: x):
                actual[BROKEN] = parity.compare(CASES["gathered"])
    return actual
