"""DeepSeek-V3's mixture block with its true sizes on 64 ranks, its all-to-alls hidden by another microbatch.

dp_shard 16 x cp 2 x tp 2, sequence parallel; experts refold the same 64 ranks: ep 64, four of 256 experts a rank. One
sequence of 4096 tokens a data-parallel rank, so 4096 / 2 / 2 = 1024 tokens a rank, each sent to 8 experts: 8192 rows of
7168 in bf16 = 117,440,512 bytes (112 MiB) a rank in each of four all-to-alls, of which 63/64 = 115,605,504 leave it.
Latents: queries 1536, keys and values 512 + 64 with the rotary key; tp gathers them, not the 7168-wide states: 2048 ·
1536 · 2 = 6,291,456, 2048 · 512 · 2 = 2,097,152 and 2048 · 64 · 2 = 262,144 bytes. A rank holds 64 of 128 heads: q_b
64·192·1536 = 18,874,368 numbers, kv_b 64·256·512 = 8,388,608, and 4·3·7168·2048 = 176,160,768 of experts.
Routed experts cost 8192 rows · 6·7168·2048 = 721,554,505,728 FLOPs a rank, the shared one, cut over tp, an eighth.

Times (one microbatch a rank; shared expert .25, so routed 2; the rest is chosen): attention 1.5, all-to-all 1; backward
twice as much, all-to-alls 1. One microbatch, 3.75 + 7.5 = 11.25 of compute:
    compute  A 0-1.5  SH -1.75   E 2.5-4.5   M 5.5  SHb -6   Eb 6.5-10.5   Ab 11.5-14.5
    ep       D 1.5-2.5           C 4.5-5.5          Cb 5.5-6.5             Db 10.5-11.5
14.5: the shared expert hides .25 and .5 of four all-to-alls, 3.25 are exposed.
Two microbatches in turn (22.5 of compute), one computes while the other's rows travel:
    compute  A0 0-1.5 SH0 -1.75 A1 -3.25 E0 -5.25 E1 -7.25 M0 SH1 -7.5 SHb0 -8 M1 8.25 SHb1 -8.75
             Eb0 9.25-13.25 Eb1 -17.25 Ab0 -20.25 Ab1 -23.25
    ep       D0 1.5-2.5 D1 3.25-4.25 C0 5.25-6.25 C1 7.25-8.25 Cb0 -9.25 Cb1 -10.25 Db0 13.25-14.25 Db1 17.25-18.25
23.25: of eight all-to-alls only .25 + .5 around the turn to backward are exposed, where nothing is left to compute.

Sizes in units of 14 MiB (1024 tokens of 7168): rows before and after an all-to-all 8, else 1; attention's, weights and
gradients 0. The shared expert's input H and the rows received R stay until their backward. One microbatch: combine has
H, SH, R, E and makes C: 26; the experts' backward has the gradients DM and DH, R, DE and makes DR: 26 again. Two: when
Eb0 begins, both have R (16), there are DE0 and DR0 (16), DM and DH of both (4), and Cb1 begins to write DE1 (8): 44.
Sources: DeepSeek-AI 2024 (sizes; overlap of two microbatches, section 3.2.1). Times and schedule by hand.
"""

from __future__ import annotations

from case_format import Case, Expected, Peak

from gnomon.graph import BF16, Setting, forward_work
from gnomon.models.deepseek import deepseek_v3, deepseek_v3_671b
from gnomon.plans import Layout, Mesh, Plan, Schedule
from gnomon.sharding import shard_graph

GRAPH = deepseek_v3(deepseek_v3_671b())
MESH = Mesh(dp_shard=16, cp=2, tp=2, ep=64)
PLAN = Plan(mesh=MESH, layout=Layout(sequence_parallel=True), schedule=Schedule(num_microbatches=1))
HEADER = """\
buffer H step per unit
buffer T step per unit
buffer R step per unit
buffer E step per unit
buffer C step per unit
buffer SH step per unit
buffer DM step per unit
buffer DH step per unit
buffer DE step per unit
buffer DR step per unit
buffer DT step per unit
kind ATTN on compute: read P, write S, write H, write T
kind DISPATCH on ep comm ep: consume T, write R
kind SHARED on compute: read P, read H, write SH
kind EXPERTS on compute: read P, read R, write E
kind COMBINE on ep comm ep: consume E, write C
kind MERGE on compute: consume C, consume SH, write DM
kind COMBINE_B on ep comm ep: read DM, write DE
kind SHARED_B on compute: read P, consume H, read DM, write DH, accumulate G
kind EXPERTS_B on compute: read P, consume R, consume DE, write DR, accumulate G
kind DISPATCH_B on ep comm ep: consume DR, write DT
kind ATTN_B on compute: read P, consume S, consume DM, consume DH, consume DT, accumulate G
"""
ONE = f"""\
gnomon.program/1
stages 1
units 1
{HEADER}class 0 count 64
  0ATTN0 0DISPATCH0 0SHARED0 0EXPERTS0 0COMBINE0 0MERGE0
  0COMBINE_B0 0SHARED_B0 0EXPERTS_B0 0DISPATCH_B0 0ATTN_B0 0OPT
"""
TWO = f"""\
gnomon.program/1
stages 1
units 2
{HEADER}class 0 count 64
  0ATTN0 0DISPATCH0 0SHARED0 0ATTN1 0DISPATCH1 0EXPERTS0 0COMBINE0 0EXPERTS1 0COMBINE1
  0MERGE0 0COMBINE_B0 0SHARED1 0SHARED_B0 0MERGE1 0COMBINE_B1 0SHARED_B1
  0EXPERTS_B0 0DISPATCH_B0 0EXPERTS_B1 0DISPATCH_B1 0ATTN_B0 0ATTN_B1 0OPT
"""


def true_sizes() -> None:
    sizes = {"batch": 1, "seq": 4096}
    block = shard_graph(GRAPH, PLAN.layout, MESH, sizes, BF16)["moe_layers"]
    exchanges = [c for c in block.collectives if c.axis == "ep"]
    assert [(c.path, c.phase) for c in exchanges] == [
        ("mlp.dispatch", "forward"),
        ("mlp.combine", "forward"),
        ("mlp.combine", "backward"),
        ("mlp.dispatch", "backward"),
    ]
    assert {(c.ranks, c.bytes, c.sent_bytes) for c in exchanges} == {(64, 117_440_512, 115_605_504)}
    gathered = {c.tensor: c.bytes for c in block.forward if c.axis == "tp" and c.kind == "all_gather"}
    assert gathered["self_attn.q_a_layernorm"] == 6_291_456
    assert gathered["self_attn.kv_a_layernorm"] == 2_097_152
    assert gathered["self_attn.k_rotary"] == 262_144
    held = block.local_elements
    assert held["self_attn.q_b_proj.weight"] == 18_874_368 and held["self_attn.kv_b_proj.weight"] == 8_388_608
    assert held["self_attn.kv_a_proj_with_mqa.weight"] == (512 + 64) * 7168  # whole on every rank
    assert sum(held[f"mlp.experts.{name}_proj.weight"] for name in ("gate", "up", "down")) == 176_160_768


def routed_experts_cost_eight_times_the_shared_one() -> None:
    block = shard_graph(GRAPH, PLAN.layout, MESH, {"batch": 1, "seq": 4096}, BF16)["moe_layers"]

    def flops(path: str) -> object:
        setting = Setting(sizes=block.sizes(path), dtypes=BF16, causal_flops="half")
        return forward_work(block.op(path).op, block.block, setting).matmul_flops

    for name in ("gate_proj", "up_proj", "down_proj"):
        assert flops(f"mlp.experts.{name}") == 721_554_505_728 // 3
        assert flops(f"mlp.shared_experts.{name}") == 721_554_505_728 // 3 // 8


def experts_refold_the_same_ranks() -> None:
    dense, experts = MESH.views
    assert (dense.num_ranks, experts.num_ranks, experts.size("ep"), experts.size("edp")) == (64, 64, 64, 1)
    assert experts.groups("ep").shape == (1, 64)  # every rank exchanges rows with every other


BUSY = {
    **{"ATTN": 1.5, "SHARED": 0.25, "EXPERTS": 2, "DISPATCH": 1, "COMBINE": 1, "MERGE": 0, "OPT": 0},
    **{"ATTN_B": 3, "SHARED_B": 0.5, "EXPERTS_B": 4, "DISPATCH_B": 1, "COMBINE_B": 1},
}
SIZES = {
    **dict.fromkeys(("S", "P", "G"), 0),
    **dict.fromkeys(("T", "R", "E", "C", "DE", "DR", "DT"), 8),
    **dict.fromkeys(("H", "SH", "DM", "DH"), 1),
}
CASES = (
    Case(
        name="deepseek_v3_block",
        graph=GRAPH,
        plan=PLAN,
        program=ONE,
        busy=BUSY,
        sizes=SIZES,
        expected=Expected(
            makespan=14.5,
            period=14.5,
            exposed={0: 3.25},
            idle={0: 3.25},
            issue_peaks={0: Peak(size=26, action="0COMBINE0")},
            time_peaks={0: Peak(size=26, action="0COMBINE0", moment=4.5)},
            ends={"0:0EXPERTS0": 4.5, "0:0MERGE0": 5.5, "0:0COMBINE_B0": 6.5, "0:0DISPATCH_B0": 11.5},
        ),
        also=(true_sizes, routed_experts_cost_eight_times_the_shared_one, experts_refold_the_same_ranks),
    ),
    Case(
        name="deepseek_v3_block-two-microbatches",
        graph=GRAPH,
        plan=PLAN,
        program=TWO,
        busy=BUSY,
        sizes=SIZES,
        expected=Expected(
            makespan=23.25,
            period=23.25,
            exposed={0: 0.75},
            idle={0: 0.75},
            issue_peaks={0: Peak(size=44, action="0EXPERTS_B0")},
            time_peaks={0: Peak(size=44, moment=9.25)},
            ends={"0:0MERGE1": 8.25, "0:0COMBINE_B1": 10.25, "0:0EXPERTS_B1": 17.25, "0:0DISPATCH_B1": 18.25},
        ),
    ),
)
