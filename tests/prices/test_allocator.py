"""The caching allocator by hand, against one published snapshot and published pairs of allocated and reserved."""

from __future__ import annotations

from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prices.allocator_replay import Pool, replay

import gnomon.prices.allocator as allocator
from gnomon.errors import InputError
from gnomon.hardware.catalogue import device
from gnomon.prices.allocator import (
    MIB,
    RESERVED_SHARE_LOW,
    Figure,
    communicator_bytes,
    device_overhead,
    least_overhead,
    place_memory,
    reserved_estimate,
    reserved_when_full,
    round_up,
    segment_bytes,
    workspace_bytes,
)
from gnomon.software import Fact, Stack

PLAIN = Stack(name="plain", version="1")
GROWING = PLAIN.with_values(
    (Fact(field="allocator", source="this test", date="2026-11-21"),), allocator="expandable_segments"
)
H100, A100, L40S, CPU = device("h100-sxm-80gb"), device("a100-sxm-80gb"), device("l40s-48gb"), device("cpu-process")
V100 = device("v100-sxm-32gb")

PUBLISHED = (
    # Peak allocated, peak reserved in MB, as training logs in public repositories print them.
    (5670.39, 6406.0),  # NVIDIA/Megatron-LM#5662
    (12606.06, 17482.0),  # NVIDIA/Megatron-LM#60
    (12003.60, 12232.0),  # Megatron-Bridge
    (50664.25, 54556.0),  # Megatron-DeepSpeed
    (41299.50, 46764.0),  # Megatron-DeepSpeed
    (30227.65, 31086.0),  # Megatron-LM
    (50277.16, 53386.0),  # Megatron-LM
    (63359.77, 66802.0),  # Megatron-LM
    (75078.43, 75682.0),  # Megatron-LM
    (84019.37, 84732.0),  # Megatron-LM, mixture of experts
    (19415.07, 20170.0),  # nanotron
    (136133.80, 137672.0),  # Primus
)


@pytest.mark.parametrize(("asked", "block"), [(0, 0), (1, 512), (512, 512), (513, 1024), (40_000, 40_448)])
def test_blocks(asked: int, block: int) -> None:
    assert round_up(asked) == block


@pytest.mark.parametrize(
    ("asked", "segment"),
    [
        (0, 0),
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB - 1, 10 * MIB),  # rounds up to 10 MiB first
        (10 * MIB, 10 * MIB),
        (21 * MIB, 22 * MIB),
    ],
)
def test_segments(asked: int, segment: int) -> None:
    assert segment_bytes(asked) == segment


def test_published_snapshot() -> None:
    # discuss.pytorch.org 178671: W (1000 x 10), b and X in fp32, y = X @ W + b, with the cuBLAS workspace. The snapshot
    # shows blocks of 40448, 512 and 4096 bytes, a free 512, y's 512 and 2051072 free in 2 MiB; 8519680 in 20 MiB.
    replayed = replay(
        [("W", 40_000), ("b", 40), ("X", 4_000), ("workspace", 8_519_680), ("XW", 40), ("y", 40), ("XW", 0)]
    )
    assert replayed.reserved_bytes == 2_097_152 + 20_971_520
    assert replayed.allocated_bytes == 45_568 + 512 + 8_519_680
    assert 2_097_152 - (replayed.allocated_bytes - 8_519_680) == 2_051_072


def test_best_fit_split_and_merge_by_hand() -> None:
    whole, parts = ("a", 30 * MIB), [("b", 12 * MIB), ("c", 18 * MIB)]
    assert replay([whole, ("a", 0), *parts]).reserved_bytes == 30 * MIB  # split
    assert replay([whole, ("a", 0), *parts, ("b", 0), ("c", 0), ("d", 30 * MIB)]).reserved_bytes == 30 * MIB  # merged
    # Up to 1 MiB that is left over stays with the block, and counts as allocated.
    assert replay([whole, ("a", 0), ("b", 29 * MIB)]).allocated_bytes == 30 * MIB
    assert replay([("b", 29 * MIB)]).allocated_bytes == 30 * MIB
    # Best fit: 12 MiB go where 12 are free, so that 30 still fit.
    cached = [("x", 30 * MIB), ("y", 12 * MIB), ("x", 0), ("y", 0)]
    assert replay([*cached, ("p", 12 * MIB), ("q", 30 * MIB)]).reserved_bytes == 42 * MIB


def test_fragmentation_by_hand() -> None:
    events = [("a", 30 * MIB), ("b", 30 * MIB), ("b", 0), ("c", 40 * MIB)]
    assert replay(events).reserved_bytes == (30 + 30 + 40) * MIB
    # Expanding: two 20 MiB pages hold a and 10 MiB of b, a third the rest; c takes b's place and one page more.
    assert replay(events, expandable=True).reserved_bytes == 80 * MIB
    # A hole in the middle cannot grow.
    hole = [("a", 30 * MIB), ("b", 30 * MIB), ("a", 0), ("c", 40 * MIB)]
    assert replay(hole, expandable=True).reserved_bytes == 100 * MIB


def test_traces_that_make_no_sense() -> None:
    with pytest.raises(InputError, match="allocated twice"):
        replay([("a", 1), ("a", 2)])
    with pytest.raises(InputError, match="not allocated"):
        replay([("a", 0)])
    with pytest.raises(InputError, match="-1 bytes"):
        round_up(-1)


@st.composite
def traces(draw: st.DrawFn, least: int = 1) -> list[tuple[int, int]]:
    live: list[int] = []
    events = []
    for name in range(draw(st.integers(1, 40))):
        events.append((name, draw(st.integers(least, 64 * MIB) | st.integers(least, least + 2 * MIB))))
        live.append(name)
        for _ in range(draw(st.integers(0, len(live)))):
            events.append((live.pop(draw(st.integers(0, len(live) - 1))), 0))
    return events


@given(traces(), st.booleans())
def test_peaks_are_ordered(events: list[tuple[int, int]], expandable: bool) -> None:
    replayed = replay(events, expandable=expandable)
    assert replayed.requested_bytes <= replayed.allocated_bytes <= replayed.reserved_bytes
    assert replayed.reserved_bytes <= sum(max(segment_bytes(size), round_up(size) + 20 * MIB) for _, size in events)
    assert replayed.reserved_bytes % (2 * MIB) == 0


@given(traces(least=MIB + 1))
def test_what_is_free_again_is_one_block(events: list[tuple[int, int]]) -> None:
    held = replay(events, expandable=True).reserved_bytes
    live = {name for name, size in events if size} - {name for name, size in events if not size}
    again = [*events, *((name, 0) for name in live), ("all", held)]
    assert replay(again, expandable=True).reserved_bytes == held


@given(traces())
def test_no_block_overlaps_another(events: list[tuple[int, int]]) -> None:
    # Freeing in any order gives every byte back: else the pool has lost or doubled a block.
    pool = Pool(small=False, expandable=False)
    blocks = {}
    for name, size in events:
        if size:
            blocks[name] = pool.take(max(round_up(size), MIB + 512))
        else:
            pool.give(blocks.pop(name))
        assert sum(size for size, _, _ in pool.idle) + sum(b.size for b in blocks.values()) == pool.reserved


def test_estimate_against_published_jobs() -> None:
    errors = [reserved_estimate(a * 1e6, 0, PLAIN) / (r * 1e6) - 1 for a, r in PUBLISHED]
    assert median(abs(error) for error in errors) < 0.05
    above = [r >= a * (1 + RESERVED_SHARE_LOW.value) for a, r in PUBLISHED]
    assert sum(above) >= 0.9 * len(PUBLISHED)


@given(st.floats(0, 2e11), st.floats(0, 2e11), st.floats(0, 1e11))
def test_estimate_grows_with_what_is_allocated(one: float, other: float, largest: float) -> None:
    less, more = sorted((one, other))
    for stack in (PLAIN, GROWING):
        assert less <= reserved_estimate(less, largest, stack) <= reserved_estimate(more, largest, stack)
    assert reserved_estimate(less, largest, GROWING) <= reserved_estimate(less, largest, PLAIN)


def test_a_full_device_reserves_no_more_than_it_has() -> None:
    usual = reserved_estimate(78e9, 1e9, PLAIN)
    assert usual == pytest.approx(78e9 * 1.06, rel=1e-3)
    assert reserved_estimate(78e9, 1e9, PLAIN, limit_bytes=81e9) == 81e9
    assert reserved_estimate(78e9, 1e9, PLAIN, limit_bytes=100e9) == usual
    # But not less than the tensors and what is always lost: such a job does not fit.
    assert reserved_estimate(81e9, 1e9, PLAIN, limit_bytes=80e9) > 81e9


def test_overhead_by_hand() -> None:
    assert device_overhead(A100, PLAIN, 0) == 890 * MIB
    assert device_overhead(A100, PLAIN, 3) == (890 + 3 * 688) * MIB
    assert device_overhead(L40S, PLAIN, 3) == (890 + 3 * 100) * MIB
    assert device_overhead(H100, PLAIN, 0, exchange_peers=7) == 890 * MIB + 3_280_000_000
    assert device_overhead(CPU, PLAIN, 3) == communicator_bytes(CPU) == workspace_bytes(CPU, PLAIN) == 0
    assert communicator_bytes(A100, 2) == 544 * MIB
    # Forward's thread and backward's have a handle of cuBLAS each.
    assert workspace_bytes(A100, PLAIN) == 2 * (2 * 4096 * 1024 + 8 * 16 * 1024)
    assert workspace_bytes(H100, PLAIN) == 2 * 32 * MIB
    engine = Fact(field="transformer_engine", source="this test", date="2026-11-21")
    fixed = Fact(field="cublas_workspace_bytes", source="this test", date="2026-11-21")
    te = PLAIN.with_values((engine, fixed), transformer_engine=True, cublas_workspace_bytes=16 * MIB)
    assert workspace_bytes(A100, te) == (2 * 16 + 4) * MIB
    assert workspace_bytes(H100, te) == (2 * 16 + 32) * MIB
    facts = (Fact(field="device_overhead_bytes", source="this test", date="2026-11-21"),)
    assert device_overhead(H100, PLAIN.with_values(facts, device_overhead_bytes=7), 3) == 7


def test_software_of_2022_loads_every_kernel_and_connects_every_group() -> None:
    fact = Fact(field="preloaded_kernels", source="this test", date="2026-11-21")
    old = PLAIN.with_values((fact,), preloaded_kernels=True)
    assert device_overhead(A100, old, 2) == least_overhead(A100, old, 2) == (1573 + 2 * 688) * MIB
    assert device_overhead(V100, old, 0) == 1271 * MIB
    assert least_overhead(A100, PLAIN, 2) == (890 + 688) * MIB


@given(
    allocated=st.integers(0, 90 * 2**30),
    more=st.integers(0, 2**33),
    name=st.sampled_from(["h100-sxm-80gb", "v100-sxm-32gb", "l40s-48gb", "tpu-v5p", "cpu-process"]),
    stack=st.sampled_from([PLAIN, GROWING]),
    groups=st.integers(0, 6),
    peers=st.integers(0, 7),
    largest=st.integers(1, 2**34),
    flat=st.sampled_from([0, 2**30]),
)
def test_peaks_do_not_fall_and_what_is_needed_decides(
    allocated: int, more: int, name: str, stack: Stack, groups: int, peers: int, largest: int, flat: int
) -> None:
    on = device(name)
    actual, fuller = (
        place_memory(on, stack, size, groups, exchange_peers=peers, largest=largest, flat=flat)
        for size in (allocated, allocated + more)
    )
    assert allocated <= actual.peak_bytes <= fuller.peak_bytes or largest > allocated
    assert actual.peak_bytes <= actual.usual_bytes <= fuller.usual_bytes
    # On a whole device what decides is the least that must be there, not what usually is.
    if on.kind != "tpu" and largest <= allocated:
        needed = reserved_when_full(allocated, stack) + least_overhead(on, stack, groups)
        assert (actual.peak_bytes <= on.memory_bytes) == (needed <= on.memory_bytes)


def test_xla_gathers_no_earlier_than_there_is_room() -> None:
    """On 95 GB a job of 100 GB, 8 of them gathered early, fits; one of 104 does not. Where there is room, all is
    there."""
    on = device("tpu-v5p")
    over = on.memory_bytes + 5 * 2**30
    tight = place_memory(on, PLAIN, over, 0, early=8 * 2**30)
    assert tight.peak_bytes == on.memory_bytes and tight.usual_bytes == over
    assert place_memory(on, PLAIN, over, 0, early=4 * 2**30).peak_bytes == on.memory_bytes + 2**30
    assert place_memory(on, PLAIN, 2**30, 0, early=2**29).peak_bytes == 2**30


def test_every_measured_number_is_a_figure() -> None:
    # What is a plain number in the module is a rule of the allocator, listed in its own source.
    plain = {name for name, value in vars(allocator).items() if name.isupper() and isinstance(value, int | float)}
    assert plain == {
        "MIB",
        "BLOCK_BYTES",
        "SMALL_BYTES",
        "SMALL_SEGMENT_BYTES",
        "OWN_SEGMENT_BYTES",
        "LARGE_SEGMENT_BYTES",
        "SEGMENT_STEP_BYTES",
        "CUBLAS_HANDLES",
    }
    with pytest.raises(InputError, match="source"):
        Figure(value=1.0, source="", date="2026-11", confidence="unchecked")
