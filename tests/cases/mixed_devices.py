"""Two kinds of device with unequal shares (Whale): one A100 and two V100 in data parallelism, m 2.

By hand a sequence takes .25 forward on an A100 and .625 on a V100, about the ratio of their peaks (312 and 125 TFLOP/s
in fp16); backward twice that. Of nine sequences of a microbatch the A100 takes 5 and each V100 2: 1.25 forward for
both. The reduction of gradients takes 1, the update .5. Two rank classes, of 1 and 2 ranks, whose reductions are one
group.

    shares 5 : 2 : 2   every rank 2·(1.25 + 2.5) = 7.5, together 8.5, updated 9. No device waits but for the reduction:
                       18 sequences · 3 over a speed of 4 + 2·1.6 sequences a unit of time is 54 / 7.2 = 7.5 too
    shares 3 : 3 : 3   A100 2·(.75 + 1.5) = 4.5, V100 2·(1.875 + 3.75) = 11.25, together 12.25, updated 12.75:
                       the A100 waits 6.75 for the V100s and 1 for the reduction

Weights: a loss is a mean over the 18 sequences of the batch, so a microbatch of the A100 weighs 5/18, of the V100s
together 4/18. With 1/3 for each rank, a sequence of a V100 would count 2.5 times as much as one of the A100.
Memory, one microbatch's activations of 1 a sequence, weights 4 and gradients 4: 13 on the A100, 10 on a V100; with
equal shares 11 on both. Source: by hand; Jia et al. 2022 (Whale), section 3; peaks from the catalogue.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from case_format import Case, Expected, Peak

from gnomon.hardware import parse_cluster
from gnomon.lowering import lower
from gnomon.models.gpt import GptConfig, gpt
from gnomon.plans import Mesh, Optimizer, Plan, Schedule, Stage, Workload
from gnomon.program import Program, parse_program, validate
from gnomon.simulate import durations, simulate
from gnomon.timeline import breakdown

CONFIG = GptConfig(name="two", num_layers=2, hidden_size=64, num_heads=4, vocab_size=256, max_positions=32)
GRAPH = gpt(CONFIG)
CLUSTER = parse_cluster("1xa100-sxm-40gb+2xv100-sxm-32gb")
WORKLOAD = Workload(global_batch_size=18, seq_len=32)


def plan(*shares: int) -> Plan:
    return Plan(
        stages=(Stage(calls=("*",), mesh=Mesh(dp_replicate=3), shares=shares),),
        schedule=Schedule(num_microbatches=2),
        optimizer=Optimizer(clip=False),
    )


UNEVEN, EVEN = plan(5, 2, 2), plan(3, 3, 3)
BY_SPEED = """\
gnomon.program/1
stages 1
unit 0 = 0:0:32 1:0:32 2:0:32 3:0:32 4:0:32 weight 0.2777777777777778
unit 1 = 5:0:32 6:0:32 7:0:32 8:0:32 weight 0.2222222222222222 worker 1
unit 2 = 9:0:32 10:0:32 11:0:32 12:0:32 13:0:32 weight 0.2777777777777778
unit 3 = 14:0:32 15:0:32 16:0:32 17:0:32 weight 0.2222222222222222 worker 1
class 0
  0F0 0B0 0F2 0B2 0AR#0 0OPT
class 1 count 2
  0F1 0B1 0F3 0B3 0AR#0 0OPT
"""
EQUAL = """\
gnomon.program/1
stages 1
unit 0 = 0:0:32 1:0:32 2:0:32 weight 0.16666666666666666
unit 1 = 3:0:32 4:0:32 5:0:32 6:0:32 7:0:32 8:0:32 weight 0.3333333333333333 worker 1
unit 2 = 9:0:32 10:0:32 11:0:32 weight 0.16666666666666666
unit 3 = 12:0:32 13:0:32 14:0:32 15:0:32 16:0:32 17:0:32 weight 0.3333333333333333 worker 1
class 0
  0F0 0B0 0F2 0B2 0AR#0 0OPT
class 1 count 2
  0F1 0B1 0F3 0B3 0AR#0 0OPT
"""


def lowered(chosen: Plan) -> Callable[[], Program]:
    return lambda: lower(GRAPH, chosen, CLUSTER, WORKLOAD)


def weights_are_shares_of_the_batch() -> None:
    units = parse_program(BY_SPEED).units
    actual = [(unit.worker, Fraction(unit.weight).limit_denominator(100)) for unit in units]
    assert actual == [(0, Fraction(5, 18)), (1, Fraction(4, 18))] * 2
    assert sorted(sequence for unit in units for sequence, _, _ in unit.pieces) == list(range(18))


def peaks_of_the_devices() -> None:
    fast, slow = CLUSTER.devices[0].dense_peak.fp16, CLUSTER.devices[1].dense_peak.fp16
    assert (fast, slow) == (312e12, 125e12)


def the_fast_device_waits_for_the_slow_ones() -> None:
    structure = validate(parse_program(EQUAL))
    parts = breakdown(simulate(structure, durations(structure.program, EQUAL_BUSY)))
    waits = [(s.action, s.arrival, s.seconds) for s in parts.of("class 0") if s.part == "bubble"]
    # From 4.5, when the V100s are in their first backward: 1.125 of it, their second forward, their second backward.
    assert sorted(waits) == [("B", "AR", 1.125 + 3.75), ("F", "AR", 1.875)]


EQUAL_BUSY = {"0:F": 0.75, "0:B": 1.5, "1:F": 1.875, "1:B": 3.75, "AR": 1, "OPT": 0.5}
SIZES = {**dict.fromkeys(("X", "Y", "DX", "DY"), 0), "P": 4, "G": 4}
CASES = (
    Case(
        name="mixed_devices",
        graph=GRAPH,
        plan=UNEVEN,
        cluster=CLUSTER,
        program=BY_SPEED,
        lowered=lowered(UNEVEN),
        busy={"F": 1.25, "B": 2.5, "AR": 1, "OPT": 0.5},
        sizes={**SIZES, "0:S": 5, "1:S": 2},
        expected=Expected(
            makespan=9,
            period=9,
            exposed={0: 1, 1: 1},
            idle={0: 1, 1: 1},
            issue_peaks={0: Peak(size=13, action="0B0"), 1: Peak(size=10, action="0B1")},
            time_peaks={0: Peak(size=13, moment=1.25), 1: Peak(size=10, moment=1.25)},
            ends={"0:0B2": 7.5, "1:0B3": 7.5, "0:0AR": 8.5, "1:0AR": 8.5},
        ),
        also=(weights_are_shares_of_the_batch, peaks_of_the_devices),
    ),
    Case(
        name="mixed_devices-equal-shares",
        graph=GRAPH,
        plan=EVEN,
        cluster=CLUSTER,
        program=EQUAL,
        lowered=lowered(EVEN),
        busy=EQUAL_BUSY,
        sizes={**SIZES, "S": 3},
        expected=Expected(
            makespan=12.75,
            period=12.75,
            exposed={0: 1, 1: 1},
            idle={0: 7.75, 1: 1},
            issue_peaks={0: Peak(size=11), 1: Peak(size=11)},
            ends={"0:0B2": 4.5, "1:0B3": 11.25, "0:0AR": 12.25},
        ),
        also=(the_fast_device_waits_for_the_slow_ones,),
    ),
)
