"""Collectives against measured points, closed forms and physics: bytes over peak, monotone, never slower with more."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon import schema
from gnomon.errors import InputError, UnpricedError
from gnomon.hardware import catalogue, parse_cluster
from gnomon.prices import collectives
from gnomon.prices.collectives import (
    KINDS,
    AcrossFit,
    Bend,
    CollectiveFile,
    InsideFit,
    SmallAcrossFit,
    SmallFit,
    across_cost,
    algorithm_costs,
    bound_seconds,
    collective_fits,
    collective_seconds,
    copy_seconds,
    inside_cost,
    p2p_seconds,
)
from gnomon.prices.curves import Provenance
from gnomon.prices.links import AxisLink, axis_link

FILE = Path(collectives.__file__).with_name("collectives.toml")
KIB, MIB, GIB = 2**10, 2**20, 2**30


@cache
def link(spec: str, ranks: int, per_node: int) -> AxisLink:
    """One group with `per_node` ranks on each node, nothing else running."""
    cluster = parse_cluster(spec)
    size = cluster.groups[0].node.count
    devices = np.concatenate([np.arange(per_node) + node * size for node in range(ranks // per_node)])
    return axis_link(cluster, devices[None, :])


H100, A100 = link("8xh100-sxm", 8, 8), link("8xa100-sxm-80gb", 8, 8)
ALPS = {
    ranks: AxisLink(
        ranks=ranks, nodes=ranks // 4, ranks_per_node=4, arch="hopper", inside_kind="nvlink", inside_name="nvlink4",
        inside_bytes_per_s=450e9, inside_latency_s=4.7e-7, switch_sums=False, pair_bytes_per_s=25e9,
        across_kind="ethernet", across_name="slingshot-200", across_bytes_per_s=100e9, across_latency_s=4e-6,
    )
    for ranks in (8, 32, 128, 512, 2048)
}  # fmt: skip
"""GH200 nodes of 4, 4 ports of 25 GB/s."""


@pytest.mark.parametrize(
    ("system", "kind", "nbytes", "measured_us", "within"),
    [
        # nccl-tests in fp16, NCCL 2.29.2 on 8 H100 and 2.27.3 on 8 A100 (AIConfigurator, Apache-2.0, read 2026-11-21).
        (H100, "all_reduce", 4 * KIB, 16, 0.15),
        (H100, "all_reduce", 16 * MIB, 122, 0.15),
        (H100, "all_reduce", 512 * MIB, 2111, 0.10),
        (H100, "all_gather", 512 * MIB, 1402, 0.10),
        (H100, "reduce_scatter", 512 * MIB, 1399, 0.10),
        (H100, "all_to_all", 512 * MIB, 1490, 0.10),
        (A100, "all_reduce", 4 * KIB, 21, 0.15),
        (A100, "all_reduce", 512 * MIB, 4226, 0.10),
        (A100, "all_gather", 512 * MIB, 2288, 0.10),
        # 8 V100 of a DGX-1 class node reach 135 GB/s of bus bandwidth (vTrain, MIT): 2·7/8 GiB / 135 GB/s.
        (link("1xdgx-1-v100-32gb", 8, 8), "all_reduce", GIB, 13920, 0.10),
        # 4 nodes of 8 H100 with 8 NDR ports, NCCL 2.24.3 (vpbenchmarking).
        (link("4x8xh100-sxm", 32, 8), "all_reduce", 128 * MIB, 945, 0.15),
        (link("4x8xh100-sxm", 32, 8), "all_reduce", GIB, 6411, 0.10),
        (link("4x8xh100-sxm", 32, 8), "all_gather", GIB, 3245, 0.10),
        # AWS documentation's samples: 2 nodes of p5 and of p4de.
        (link("2xaws-p5", 16, 8), "all_reduce", 16 * GIB, 66132, 0.10),
        (link("2xaws-p4de", 16, 8), "all_reduce", GIB, 26217, 0.10),
        # nccl-tests on 2 to 32 p5, NCCL 2.28.7 (crazyguitar/aws-gpu-communication-benchmark, CC-BY-4.0): size over the
        # bandwidth it states.
        (link("2xaws-p5", 16, 8), "all_gather", 32 * MIB, 240, 0.05),
        (link("8xaws-p5", 64, 8), "all_gather", 32 * MIB, 713, 0.05),
        (link("32xaws-p5", 256, 8), "all_gather", 32 * MIB, 2699, 0.10),
        (link("32xaws-p5", 256, 8), "all_gather", 2 * GIB, 8141, 0.05),
        (link("32xaws-p5", 256, 8), "all_reduce", 32 * MIB, 1008, 0.10),
        (link("8xaws-p5", 64, 8), "all_reduce", 8 * GIB, 47590, 0.05),
        (link("2xaws-p5", 16, 8), "all_to_all", 2 * GIB, 25405, 0.10),
        (link("32xaws-p5", 256, 8), "all_to_all", 2 * GIB, 52454, 0.10),
        # GH200 Alps, Slingshot-11, medians over settings of NCCL.
        (ALPS[8], "all_reduce", 4 * GIB, 47486, 0.10),
        (ALPS[32], "all_reduce", 4 * GIB, 90072, 0.10),
        (ALPS[128], "all_reduce", 4 * GIB, 92295, 0.10),
        (ALPS[512], "all_reduce", 512, 125, 0.15),
        (ALPS[2048], "all_reduce", 512, 160, 0.15),
        # One message between two H100 of a node (apex_plus), and of two nodes (vidur): 364 and 36 GB/s.
        (link("8xh100-sxm", 2, 2), "send_recv", 128 * MIB, 369, 0.10),
        (link("2x8xh100-sxm", 2, 1), "send_recv", 64 * MIB, 1871, 0.05),
    ],
)
def test_measured_points(system: AxisLink, kind: str, nbytes: int, measured_us: float, within: float) -> None:
    assert collective_seconds(kind, nbytes, system) == pytest.approx(measured_us * 1e-6, rel=within)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8])
def test_a_ring_moves_two_times_n_minus_one_over_n(n: int) -> None:
    """Patarasuk and Yuan 2009: the least that devices without help of switches must send."""
    seen = link("8xa100-sxm-80gb", n, n)
    size = 7 * MIB
    assert bound_seconds("all_reduce", size, seen) == pytest.approx(2 * (n - 1) / n * size / 300e9)
    for kind in ("all_gather", "reduce_scatter", "all_to_all"):
        assert bound_seconds(kind, size, seen) == pytest.approx((n - 1) / n * size / 300e9)


def test_switches_that_add_up_save_nearly_half() -> None:
    """(n+1)/n instead of 2(n−1)/n: 8 H100 read every byte once and write an eighth of the sum."""
    assert bound_seconds("all_reduce", 8e9, H100) == pytest.approx(9e9 / 450e9)
    assert bound_seconds("all_reduce", 8e9, link("8xh100-sxm", 2, 2)) == pytest.approx(8e9 / 450e9)


def test_what_must_leave_a_node() -> None:
    """4 nodes of 8, 400 GB/s each: three quarters of a gathered buffer; all-to-all 8 shares of 24 of 32 parts."""
    seen = link("4x8xh100-sxm", 32, 8)
    assert bound_seconds("all_gather", 4e9, seen) == pytest.approx(3e9 / 400e9)
    assert bound_seconds("all_reduce", 4e9, seen) == pytest.approx(6e9 / 400e9)
    assert bound_seconds("all_to_all", 32e9, seen) == pytest.approx(8 * 24e9 / 400e9)


LINKS = (
    H100, A100, link("8xh100-sxm", 2, 2), link("8xb200-sxm", 4, 4), link("8xmi300x", 8, 8), link("8xl40s", 4, 4),
    link("1xdgx-1-v100-32gb", 8, 8), link("4x8xh100-sxm", 32, 8), link("64x8xa100-sxm-80gb", 64, 1),
    link("2xaws-p5", 16, 8), link("16xaws-p4de", 128, 8), link("2x8xh100-sxm", 2, 1), *ALPS.values(),
)  # fmt: skip
any_link, any_kind = st.sampled_from(LINKS), st.sampled_from(KINDS)
sizes = st.floats(0, 1e12)


@given(any_kind, sizes, any_link)
def test_never_under_the_peak(kind: str, size: float, seen: AxisLink) -> None:
    assert collective_seconds(kind, size, seen) >= bound_seconds(kind, size, seen) * (1 - 1e-12)
    assert collective_seconds(kind, size, seen) >= max(seen.inside_latency_s if seen.nodes == 1 else 0, 1e-7)


@given(any_kind, sizes, sizes, any_link)
def test_more_bytes_never_take_less(kind: str, a: float, b: float, seen: AxisLink) -> None:
    few, many = sorted((a, b))
    assert collective_seconds(kind, few, seen) <= collective_seconds(kind, many, seen)


@given(any_kind, sizes, any_link, st.floats(1, 10), st.floats(1, 10))
def test_more_bandwidth_is_never_slower(kind: str, size: float, seen: AxisLink, inside: float, across: float) -> None:
    faster = replace(
        seen,
        inside_bytes_per_s=seen.inside_bytes_per_s * inside,
        across_bytes_per_s=seen.across_bytes_per_s * across,
        pair_bytes_per_s=seen.pair_bytes_per_s * min(inside, across),
    )
    assert collective_seconds(kind, size, faster) <= collective_seconds(kind, size, seen) * (1 + 1e-12)


@given(any_kind, st.floats(512, 1e11), any_link)
def test_no_jumps(kind: str, size: float, seen: AxisLink) -> None:
    """Also where the fastest algorithm changes and where prices bend: 1% more bytes cost at most 1.1% more time, but
    where NCCL turns from its low-latency protocols to Simple."""
    switch = algorithm_costs(kind, seen)[0].small_bytes
    if size <= switch < size * 1.01:
        size = size * 1.01
    assert collective_seconds(kind, size * 1.01, seen) <= collective_seconds(kind, size, seen) * 1.011


@pytest.mark.parametrize(
    ("system", "kind", "switch", "below_us", "above_us"),
    [
        # The same tables: sizes on both sides of what NCCL's tuning model gives (src/graph/tuning.cc, v2.27.3).
        (link("8xa100-sxm-80gb", 4, 4), "reduce_scatter", 1.79 * MIB, (MIB, 21.1), (2 * MIB, 48.7)),
        (link("8xh100-sxm", 2, 2), "all_reduce", 1.64 * MIB, (MIB, 14.6), (2 * MIB, 27.6)),
        (link("8xh100-sxm", 4, 4), "all_gather", 3.01 * MIB, (2 * MIB, 19.1), (4 * MIB, 36.9)),
        (link("8xh100-sxm", 8, 8), "all_to_all", 128 * KIB, (128 * KIB, 9.8), (256 * KIB, 13.0)),
        (link("8xb200-sxm", 8, 8), "all_reduce", 2.14 * MIB, (2 * MIB, 33.6), (4 * MIB, 54.5)),
        # Rings over EFA: 12 MiB a rank (crazyguitar/aws-gpu-communication-benchmark, 2 and 8 nodes).
        (link("2xaws-p5", 16, 8), "all_gather", 192 * MIB, (128 * MIB, 536), (256 * MIB, 1167)),
        (link("8xaws-p5", 64, 8), "all_gather", 768 * MIB, (512 * MIB, 2023), (GIB, 4709)),
    ],
)
def test_times_jump_where_nccl_changes_protocol(
    system: AxisLink, kind: str, switch: float, below_us: tuple[float, float], above_us: tuple[float, float]
) -> None:
    cost = algorithm_costs(kind, system)[0]
    assert cost.small_bytes == pytest.approx(switch, rel=0.01)
    assert cost.seconds(cost.small_bytes * 1.001) > 1.1 * cost.seconds(cost.small_bytes)
    for size, measured in (below_us, above_us):
        assert collective_seconds(kind, size, system) == pytest.approx(measured * 1e-6, rel=0.15)


@given(any_kind, st.lists(sizes, max_size=5), any_link)
def test_arrays_are_priced_as_their_elements(kind: str, many: list[float], seen: AxisLink) -> None:
    result = collective_seconds(kind, np.array(many), seen)
    assert result.tolist() == [collective_seconds(kind, size, seen) for size in many]
    assert p2p_seconds(np.array(many), seen).tolist() == [p2p_seconds(size, seen) for size in many]


def test_large_all_reduces_of_two_nodes_are_trees_and_of_more_are_rings() -> None:
    """The switch that NCCL makes: two nodes send each byte out once, three or more as a ring does."""
    rates = {}
    for ranks in (8, 128):
        seen = ALPS[ranks]
        rates[ranks] = 16 * GIB / collective_seconds("all_reduce", 16 * GIB, seen)
    assert rates[8] > 0.85 * 100e9  # of the node's 100 GB/s, each byte once
    assert 0.85 * 50e9 < rates[128] < 50.5e9  # 2·127/128 of the bytes


@pytest.mark.parametrize("name", catalogue.node_names())
def test_every_machine_has_every_collective(name: str) -> None:
    node = catalogue.node(name)
    cluster = parse_cluster(f"2x{name}" if node.nic else f"1x{name}")
    ends = np.array([[0, cluster.num_devices - 1]])
    groups = [ends, np.arange(min(8, node.count))[None, :]]
    assert 0 < copy_seconds(GIB, node) < 10
    for kind in KINDS:
        for members in groups:
            seen = axis_link(cluster, members)
            assert bound_seconds(kind, GIB, seen) <= collective_seconds(kind, GIB, seen) < 60


def test_what_has_no_price() -> None:
    with pytest.raises(UnpricedError, match="did you mean 'all_reduce'"):
        collective_seconds("allreduce", 1, H100)
    with pytest.raises(UnpricedError, match="'carrier-pigeon' of kind 'rfc1149'; there are rows for"):
        collective_seconds("all_reduce", 1, replace(H100, inside_kind="rfc1149", inside_name="carrier-pigeon"))
    with pytest.raises(UnpricedError, match="has no bandwidth"):
        collective_seconds("all_reduce", 1, replace(H100, inside_bytes_per_s=0.0))
    with pytest.raises(InputError, match="cannot move -1 bytes"):
        collective_seconds("all_reduce", np.array([5, -1]), H100)
    with pytest.raises(UnpricedError, match="no price for copies"):
        node = catalogue.node("dgx-h100")
        copy_seconds(1, replace(node, host=replace(node.host, name="wire", kind="ici")))


def test_copies_to_the_host() -> None:
    """H100 over PCIe 5, pinned, CUDA's bandwidthTest: 47.5 GB/s at 1 MB, at most 54.8; two on one link halve it."""
    node = replace(catalogue.node("dgx-h100"), devices_per_host_link=1)
    assert 1e6 / copy_seconds(1e6, node) == pytest.approx(47.5e9, rel=0.05)
    assert 1e9 / copy_seconds(1e9, node) == pytest.approx(54.8e9, rel=0.05)
    shared = replace(node, devices_per_host_link=2)
    assert copy_seconds(1e9, shared) == pytest.approx(2 * copy_seconds(1e9, node), rel=0.01)


def test_each_row_says_what_it_is_from() -> None:
    """Measured rows have an error on sizes kept out; assumed ones say so and claim none."""
    file = collective_fits()
    for row in (*file.inside, *file.across, *file.copies):
        source = row.provenance
        assert source.data.startswith("assumed: ") == (source.error == "unchecked"), source
        assert source.error == "unchecked" or source.error.startswith("held out "), source
        assert source.date >= "2026-11-21" and source.range


def test_a_row_without_its_source_is_refused() -> None:
    text = FILE.read_text()
    for line in ("date = ", "error = ", "range = ", "data = "):
        start = text.index(line)
        without = text[:start] + text[text.index("\n", start) + 1 :]
        with pytest.raises(InputError, match=line.split()[0]):
            schema.load(CollectiveFile, without)
        empty = text[:start] + line + '""' + text[text.index("\n", start) :]
        with pytest.raises(InputError, match="must all be said"):
            schema.load(CollectiveFile, empty)


def test_the_file_is_as_the_writer_makes_it() -> None:
    assert schema.dump(collective_fits()) == FILE.read_text()


SAID = Provenance(data="a test", date="2026-11-21", error="unchecked", range="all")


def test_constants_between_and_beyond_the_sizes_of_group() -> None:
    row = InsideFit(
        link="wire", collectives=("all_reduce",), ranks=(2, 8), start_s=(4e-6, 8e-6), share=(0.5, 0.9),
        ramp=(1.0, 2.0), provenance=SAID,
    )  # fmt: skip
    assert row.at(4) == pytest.approx((6e-6, 0.7, 1.5))  # half way over log2
    assert row.at(32) == pytest.approx((12e-6, 0.9, 2.0))  # two doublings on: 2 us each


def test_small_buffers_between_sizes_of_group() -> None:
    small = SmallFit(up_to_bytes=(1e6, 3e6), start_s=(2e-6, 4e-6), share=(0.3, 0.5), ramp=(0.0, 1.0))
    row = InsideFit(
        link="wire", collectives=("all_reduce",), ranks=(2, 8), start_s=(4e-6, 8e-6), share=(0.5, 0.9),
        ramp=(1.0, 2.0), provenance=SAID, small=small,
    )  # fmt: skip
    assert row.small_at(4) == pytest.approx((2e6, 3e-6, 0.4, 0.5))
    with pytest.raises(InputError, match="equally long"):
        replace(row, small=replace(small, share=(0.5,)))
    with pytest.raises(InputError, match="must be positive"):
        replace(small, up_to_bytes=(0, 1))


def bent(*over: tuple[float, ...], at_bytes: tuple[float, ...] = (1e6, 4e6), start_s: float = 1e-9) -> InsideFit:
    """All-gathers of 2 or 8 ranks at half of the peak."""
    return InsideFit(
        link="wire", collectives=("all_gather",), ranks=(2, 8), start_s=(start_s, start_s), share=(0.5, 0.5),
        ramp=(0.0, 0.0), provenance=SAID, bend=Bend(at_bytes=at_bytes, over=over),
    )  # fmt: skip


def test_a_bend_is_a_line_in_logarithms_that_fades() -> None:
    cost = inside_cost(bent((1.21, 1.0)), "all_gather", H100)
    for size, factor in ((1e6, 1.21), (2e6, 1.1), (4e6, 1.0), (0.5e6, 1.1), (0.25e6, 1.0), (1e4, 1.0), (1e9, 1.0)):
        assert cost.seconds(size) == pytest.approx(factor * cost.straight(size))
    assert cost.seconds(np.array([1e6, 2e6])) == pytest.approx([cost.seconds(1e6), cost.seconds(2e6)])
    below = inside_cost(bent((1.0, 0.9)), "all_gather", H100)
    assert below.seconds(1e9) == pytest.approx(0.9 * below.straight(1e9))  # a byte gets no dearer with size
    above = inside_cost(bent((1.0, 1.21)), "all_gather", H100)
    assert above.seconds(8e6) == pytest.approx(1.1 * above.straight(8e6))


def test_bends_of_each_size_of_group() -> None:
    row, four = bent((1.0, 1.0), (1.21, 1.0)), link("8xh100-sxm", 4, 4)
    for seen, factor in ((link("8xh100-sxm", 2, 2), 1.0), (four, 1.21 ** (1 / 2)), (H100, 1.21)):
        cost = inside_cost(row, "all_gather", seen)
        assert cost.seconds(1e6) == pytest.approx(factor * cost.straight(1e6))


def test_a_bend_keeps_to_physics() -> None:
    """Where measured times fall with size the price stays, and it is never under the link's peak."""
    falling = inside_cost(bent((1.5, 0.6), start_s=1e-3), "all_gather", H100)
    assert falling.seconds(2e6) == falling.seconds(4e6) == pytest.approx(1.5 * falling.straight(1e6))
    full = inside_cost(replace(bent((0.9, 0.9), at_bytes=(1e8, 4e8)), share=(1.0, 1.0)), "all_gather", H100)
    assert full.seconds(4e8) == bound_seconds("all_gather", 4e8, H100)


def test_a_bend_ends_at_the_switch() -> None:
    """Small and large buffers bend apart, and neither fades towards the other."""
    small = SmallFit(
        up_to_bytes=(2e6, 2e6), start_s=(1e-9, 1e-9), share=(0.9, 0.9), ramp=(0.0, 0.0),
        bend=Bend(at_bytes=(1e5, 1e6), over=((1.0, 0.95),)),
    )  # fmt: skip
    cost = inside_cost(replace(bent((1.2, 1.2)), small=small), "all_gather", H100)
    assert cost.small is not None
    assert cost.seconds(2e6) == pytest.approx(0.95 * cost.small.straight(2e6))
    assert cost.seconds(2e6 * (1 + 1e-9)) == pytest.approx(1.2 * cost.straight(2e6))


def test_bends_that_do_not_fit_their_row_are_refused() -> None:
    with pytest.raises(InputError, match="one list for all ranks or one for each"):
        bent((1.0, 1.0), (1.0, 1.0), (1.0, 1.0))
    with pytest.raises(InputError, match="a factor for each of at_bytes"):
        bent((1.0,))
    with pytest.raises(InputError, match="must ascend"):
        bent((1.0, 1.0), at_bytes=(4e6, 1e6))
    with pytest.raises(InputError, match="from 0.5 to 2"):
        bent((1.0, 2.5))


def test_small_buffers_of_a_ring_between_nodes() -> None:
    """By hand: 4 nodes of 8 at 400 GB/s; small 1 us + 3 steps of 10 us + 28 of 0.1 us, and half of the rate."""
    seen = link("4x8xh100-sxm", 32, 8)
    small = SmallAcrossFit(up_to_bytes=1000, start_s=1e-6, step_s=1e-5, inside_step_s=1e-7, share=0.5, ramp=0.0)
    row = AcrossFit(
        link="wire", collectives=("all_gather",), algorithm="ring", start_s=1e-4, step_s=2e-5, inside_step_s=0.0,
        share=0.9, ramp=0.0, provenance=SAID, small=small,
    )  # fmt: skip
    cost = across_cost(row, "all_gather", seen)
    assert cost.small_bytes == 32000
    assert cost.seconds(32000) == pytest.approx(1e-6 + 3e-5 + 28e-7 + 32000 * 31 / 32 / 200e9)
    assert cost.seconds(32001) == pytest.approx(1e-4 + 6e-5 + 32001 * 31 / 32 / 360e9)
    with pytest.raises(InputError, match="must be positive"):
        replace(small, up_to_bytes=0)
    with pytest.raises(InputError, match="small buffers"):
        replace(small, share=1.2)


def test_rows_outside_of_physics_are_refused() -> None:
    def row(**changed: float) -> AcrossFit:
        given = {"start_s": 1e-5, "step_s": 1e-6, "inside_step_s": 0.0, "share": 0.9, "ramp": 1.0, **changed}
        return AcrossFit(link="wire", collectives=("all_gather",), algorithm="ring", provenance=SAID, **given)

    for name, value in (("share", 1.01), ("share", 0.0), ("ramp", -0.1), ("start_s", -1e-6), ("step_s", 2.0)):
        with pytest.raises(InputError, match="wire ring all_gather"):
            row(**{name: value})


def test_a_chip_of_two_devices_passes_half_of_a_gather_on() -> None:
    """TPU 7x: 1.5 times what the chip's links alone would take."""
    whole = link("256xtpu-7x", 256, 256)
    alone = replace(whole, inside_name="ici")
    assert collective_seconds("all_gather", 2 * GIB, whole) == pytest.approx(
        1.5 * collective_seconds("all_gather", 2 * GIB, alone), rel=0.05
    )
