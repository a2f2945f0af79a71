"""Experts placed by popularity: as even as any placement can be, by the cut that bounds every split of rows."""

from __future__ import annotations

import json
import random
from itertools import combinations, product
from pathlib import Path

import pytest

from gnomon.cli import main
from gnomon.errors import InputError
from gnomon.hardware import parse_cluster
from gnomon.models.presets import model
from gnomon.plans.workload import RouterLoad
from gnomon.serving.iteration import IterationPrice
from gnomon.serving.layout import Serving
from gnomon.serving.placement import loads, place_experts
from gnomon.serving.weights import shape_of
from gnomon.software.engine import engine


def least(rows: list[int], held: tuple[tuple[int, ...], ...]) -> float:
    """Rows of the busiest device at the best split: of every set of experts, its rows over the devices that hold any of
    it (the cut of a flow from experts to devices, Hall's theorem)."""
    worst = 0.0
    for size in range(1, len(rows) + 1):
        for few in combinations(range(len(rows)), size):
            reached = sum(bool(set(own) & set(few)) for own in held)
            worst = max(worst, sum(rows[e] for e in few) / reached if reached else float("inf"))
    return worst


def test_the_placement_is_the_best_of_all() -> None:
    rng = random.Random(0)
    for _ in range(12):
        experts, ep, redundant = rng.choice([(4, 2, 0), (4, 2, 2), (4, 4, 4), (6, 3, 0), (6, 2, 2), (3, 3, 3)])
        rows = [int(1000 * rng.random() ** 3) + 1 for _ in range(experts)]
        each = (experts + redundant) // ep
        best = min(
            least(rows, held)
            for held in product(combinations(range(experts), each), repeat=ep)
            if len({e for own in held for e in own}) == experts
        )
        found = place_experts(rows, redundant, ep)
        own = tuple(found[rank * each : (rank + 1) * each] for rank in range(ep))
        assert least(rows, own) == pytest.approx(best, abs=1.0)


def test_copies_even_out_a_skewed_load_and_a_balanced_one_stays() -> None:
    skewed = RouterLoad(kind="zipf", s=1.2)
    plain, more = loads(skewed, 16, 0, 4), loads(skewed, 16, 8, 4)
    assert 1 <= more.placed < plain.placed <= plain.in_order and plain.in_order == more.in_order
    assert more.placed < 1.05 < 1.5 < plain.in_order
    balanced = loads(RouterLoad(), 16, 0, 4)
    assert balanced.in_order == pytest.approx(1) and balanced.placed == pytest.approx(1)
    with pytest.raises(InputError, match="redundant experts = 3"):
        loads(skewed, 16, 3, 4)


def test_a_busier_device_takes_longer_and_copies_take_memory() -> None:
    graph, cluster = model("mixtral-8x7b"), parse_cluster("8xh100-sxm")
    even = Serving(tp=8, ep=8, max_model_len=1024)
    skewed = Serving(tp=8, ep=8, max_model_len=1024, expert_load=1.7)
    one, other = (IterationPrice(graph, cluster, serving, engine("vllm")) for serving in (even, skewed))
    assert other._body[4096] > one._body[4096]
    copied = Serving(tp=8, ep=8, max_model_len=1024, redundant_experts=8)
    held, more = (
        sum(b.weight_bytes * b.count for b in shape_of(graph, s).blocks) for s in (even, copied)
    )  # fmt: skip
    experts = 32 * 3 * 4096 * 14336 * 2
    assert more - held == pytest.approx(experts, rel=0.01)


def test_the_command_says_what_placing_gains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load = tmp_path / "load.json"
    load.write_text(json.dumps([100, 50, 20, 10, 5, 5, 5, 5]))
    asked = ["predict", "mixtral-8x7b", "--serve", "--on", "8xh100-sxm", "--tp", "8", "--ep", "4"]
    asked += ["--input-len", "200", "--output-len", "20", "--concurrency", "8", "--num-requests", "16"]
    times = []
    for more in ([], ["--router", str(load)], ["--router", str(load), "--redundant-experts", "8"]):
        assert main([*asked, *more, "--json"]) == 0
        times.append(json.loads(capsys.readouterr().out))
    plain, placed_, copied = (told["ttft"]["p50_s"] for told in times)
    assert plain <= copied <= placed_
    said = " ".join(times[2]["assumptions"])
    assert "in order" in said and "8 copies" in said
    assert main([*asked, "--redundant-experts", "8"]) == 2
    assert "--router" in capsys.readouterr().err
