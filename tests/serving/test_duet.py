"""Subgraphs on two devices: the best of all assignments where they are few, cut where every path crosses."""

from __future__ import annotations

import json
import random
from itertools import product

import pytest

from gnomon.cli import main
from gnomon.graph import BlockBuilder, Call, Dim, Dtypes, Graph, Tensor
from gnomon.hardware import parse_cluster
from gnomon.ops.work import Setting
from gnomon.serving.duet import DuetLane, Subgraph, choose, corrected, makespan, op_seconds, subgraphs

LANE = DuetLane(bytes_per_s=1e3, latency_s=0.1)


def played(parts: list[Subgraph], places: tuple[int, ...], lane: DuetLane) -> float:
    """By events: a device takes its next subgraph, in order, as soon as all that it reads is there."""
    end: dict[int, float] = {}
    there: dict[tuple[int, str, int], float] = {}
    free, lane_free, left = [0.0, 0.0], 0.0, list(range(len(parts)))
    while left:
        index = left.pop(0)
        place, starts = places[index], [free[places[index]]]
        for source, tensor, count in parts[index].reads:
            if places[source] != place and (source, tensor, place) not in there:
                lane_free = max(lane_free, end[source]) + lane.latency_s + count / lane.bytes_per_s
                there[source, tensor, place] = lane_free
            starts.append(end[source] if places[source] == place else there[source, tensor, place])
        end[index] = free[place] = max(starts) + parts[index].seconds[place]
    return max(end.values())


def made(rng: random.Random, count: int) -> list[Subgraph]:
    return [
        Subgraph(
            name=str(at), seconds=(rng.uniform(0.1, 3), rng.uniform(0.1, 3)), ops=1,
            reads=tuple((s, t, 300.0 * (s + (t == "b"))) for s in range(at) for t in "ab" if rng.random() < 0.25),
        )
        for at in range(count)
    ]  # fmt: skip


def test_few_subgraphs_are_placed_as_the_best_of_all() -> None:
    rng = random.Random(0)
    near = 0
    for _ in range(25):
        parts = made(rng, rng.randint(1, 7))
        every = [played(parts, places, LANE) for places in product((0, 1), repeat=len(parts))]
        found = choose(parts, LANE)
        alone = min(found.alone_s)
        assert found.exact and found.seconds == pytest.approx(min(every) if min(every) <= 0.95 * alone else alone)
        places, seconds = corrected(parts, LANE)
        assert seconds == pytest.approx(makespan(parts, places, LANE)) and seconds >= min(every) - 1e-9
        near += seconds <= 1.1 * min(every)
    assert near >= 20  # flips of one and of two find it, or nearly


def test_each_tensor_crosses_once_and_all_that_are_read_do() -> None:
    """Three products of one tensor read it once; a second reader of another tensor pays for that one too."""
    lane = DuetLane(bytes_per_s=1.0, latency_s=0.0)
    setting = Setting(
        sizes={"batch": 1, "seq": 1}, dtypes=Dtypes(param="fp32", compute="fp32"), causal_flops="half"
    )  # fmt: skip
    every = {"seconds": (1.0, 1.0), "ops": 1}
    parts = [
        Subgraph(name="0", reads=(), **every),
        Subgraph(name="1", reads=((0, "x", 5.0),), **every),
        Subgraph(name="2", reads=((0, "x", 5.0), (0, "y", 7.0)), **every),
    ]
    assert makespan(parts, (0, 1, 1), lane) == 1 + 5 + 7 + 1
    price = op_seconds(parse_cluster("1xcpu-process").devices[0], "fp32")
    reads = [part.reads for part in subgraphs(branches(), setting, (price, price))]
    assert [[count for _, _, count in one] for one in reads] == [[], [4.0 * 8], [4.0 * 8], [4.0 * 8, 4.0 * 8]]


def branches() -> Graph:
    """Two branches of one tensor, of which one reads it by two ops."""
    batch, seq, hidden = Dim(name="batch"), Dim(name="seq"), Dim(name="hidden", size=8)
    b = BlockBuilder("both")
    x = b.op("activation", "in", (b.input("x", batch, seq, hidden),), fn="tanh")
    twice = b.add("twice", b.op("activation", "left", (x,), fn="tanh"), x)
    block = b.build(b.add("sum", twice, b.op("activation", "right", (x,), fn="relu")))
    given = Tensor(name="x", dims=(batch, seq, hidden), dtype="compute")
    call = Call(block="both", name="both", inputs=(("x", "x"),))
    return Graph(name="g", inputs=(given,), blocks=(block,), calls=(call,), outputs=(f"both.{block.outputs[0]}",))


def two_towers() -> Graph:
    """A wide product beside a long chain of tiny ops, and a sum."""
    hidden, wide = Dim(name="hidden", size=1024), Dim(name="ffn", size=32768)
    batch, seq = Dim(name="batch"), Dim(name="seq")
    b = BlockBuilder("both")
    x = b.input("x", batch, seq, hidden)
    first = b.op("activation", "in", (x,), fn="tanh")
    up = b.linear("wide.up", first, out=(wide,), contract=(hidden,), bias=False)
    down = b.linear("wide.down", up, out=(hidden,), contract=(wide,), bias=False)
    tiny = first
    for at in range(60):
        tiny = b.op("activation", f"deep.{at}", (tiny,), fn="tanh")
    block = b.build(b.add("sum", down, tiny))
    given = Tensor(name="x", dims=(batch, seq, hidden), dtype="compute")
    call = Call(block="both", name="both", inputs=(("x", "x"),))
    return Graph(name="towers", inputs=(given,), blocks=(block,), calls=(call,), outputs=(f"both.{block.outputs[0]}",))


def test_branches_are_apart_and_run_at_the_same_time() -> None:
    setting = Setting(
        sizes={"batch": 1, "seq": 1}, dtypes=Dtypes(param="fp32", compute="fp32"), causal_flops="half"
    )  # fmt: skip
    devices = [parse_cluster(name).devices[0] for name in ("1xa100-sxm-80gb", "1xcpu-process")]
    parts = subgraphs(two_towers(), setting, [op_seconds(device, "fp32") for device in devices])
    assert [part.ops for part in parts] == [1, 2, 60, 1]
    assert [[source for source, _, _ in part.reads] for part in parts] == [[], [0], [0], [1, 2]]
    found = choose(parts, DuetLane(bytes_per_s=25e9, latency_s=10e-6))
    assert found.places[1] == 0 and found.places[2] == 1
    assert found.seconds < 0.95 * min(found.alone_s)


def test_the_command_says_where_and_why_not(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "bert-base", "--serve", "--on", "1xa100-sxm-80gb", "--beside", "cpu-process"]
    assert main([*asked, "--input-len", "64"]) == 0
    told = capsys.readouterr().out
    assert "subgraphs" in told and "save less than 5 %" in told
    assert main([*asked, "--input-len", "64", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["seconds"] == min(found["alone_s"]) and found["subgraphs"]
    for wrong, why in (([], "--input-len"), (["--input-len", "8", "--rate", "3"], "--rate")):
        assert main([*asked, *wrong]) == 2
        assert why in capsys.readouterr().err
