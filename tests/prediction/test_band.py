"""Bands: they hold the prediction, say what they rest on, and are wider where less is known."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.errors import InputError
from gnomon.plans import Fp8, Layout, Mesh, Optimizer, Plan, Precision, Schedule, Workload
from gnomon.prediction import Prediction, predict
from gnomon.prediction.band import COVERAGE, OPAQUE, Ratios, band_numbers, band_of, memory_ratios
from gnomon.prediction.evidence import LEAST, Evidence, evidence
from gnomon.software import OwnNumber, OwnRuns, Stack, stack

PLAIN = Evidence(
    known="stack",
    own_runs=0,
    launch=0.0,
    communication=0.0,
    waiting=0.0,
    crossing=False,
    nodes=0.0,
    tensor_across=False,
    debugged=False,
    routed=False,
    eight_bit=False,
    measured=True,
)
SHARE = st.floats(0, 1)


def width(result: Evidence) -> float:
    ratios = band_of(result)
    return ratios.high / ratios.low


def job(on: str = "1x8xh100-sxm", program: Stack | None = None, **changes: object) -> Prediction:
    plan = Plan(mesh=Mesh(dp_shard=4, tp=2), schedule=Schedule(micro_batch_size=1), optimizer=Optimizer(zero=1))
    work = Workload(global_batch_size=8, seq_len=1024)
    return predict("gpt2", on, replace(plan, **changes), work, program or stack("nanotron"))  # type: ignore[arg-type]


@given(
    st.builds(
        Evidence,
        known=st.sampled_from(LEAST),
        own_runs=st.integers(0, 20),
        launch=SHARE,
        communication=SHARE,
        waiting=SHARE,
        crossing=st.booleans(),
        nodes=st.floats(0, 12),
        tensor_across=st.booleans(),
        debugged=st.booleans(),
        routed=st.booleans(),
        eight_bit=st.booleans(),
        measured=st.booleans(),
        opaque=SHARE,
    )
)
def test_a_band_holds_the_prediction_and_hardness_never_narrows_it(result: Evidence) -> None:
    ratios = band_of(result)
    assert 0 < ratios.low < 1 < ratios.high
    harder = replace(result, launch=1.0, communication=1.0, waiting=1.0, crossing=True, routed=True, measured=False)
    harder = replace(harder, nodes=result.nodes + 1, tensor_across=True, debugged=True)
    assert width(harder) >= width(result) or result.opaque  # what waits is not computed without a rule
    assert width(replace(result, opaque=1.0)) >= width(result) >= width(replace(result, opaque=0.0))


@given(SHARE, SHARE)
def test_a_band_holds_that_opaque_ops_take_twice_or_half_as_long(opaque: float, waiting: float) -> None:
    known, wide = (band_of(replace(PLAIN, waiting=waiting, opaque=share)) for share in (0.0, opaque))
    part = opaque * (1 - waiting)
    assert wide.high == pytest.approx(known.high * (1 - part + OPAQUE * part))
    assert wide.low == pytest.approx(known.low * (1 - part + part / OPAQUE))


def test_the_less_is_known_the_wider() -> None:
    levels = [replace(PLAIN, known=known) for known in LEAST if known != "own"]  # from nothing to the stack's own runs
    widths = [width(level) for level in levels]
    assert widths == sorted(widths, reverse=True)
    assert widths[0] > 1.3 * widths[-1]


def test_more_own_runs_never_widen_it() -> None:
    widths = [width(replace(PLAIN, known="own", own_runs=runs)) for runs in (1, 3, 10, 100)]
    assert widths == sorted(widths, reverse=True)
    assert widths[1] < width(replace(PLAIN, known="device"))


def test_a_prediction_has_its_band() -> None:
    result = job()
    band = result.band
    assert band.low_s < result.step_s < band.high_s and band.coverage == COVERAGE
    assert band.low_bytes < result.tightest.peak_bytes < band.high_bytes
    shown = result.to_mapping()["band"]
    assert shown["low_s"] == band.low_s and shown["coverage"] == COVERAGE


def test_evidence_of_a_prediction() -> None:
    result = evidence(job().pricing, job().step_s)
    assert (result.known, result.crossing, result.routed, result.eight_bit, result.measured) == (
        "stack",
        False,
        False,
        False,
        True,
    )
    assert result.launch > 0 and result.communication >= 0
    shares = result.launch + result.communication
    assert shares <= 1
    far = job("2x8xh100-sxm", Stack(name="unheard-of", version="0"), mesh=Mesh(dp_shard=8, tp=2), layout=Layout())
    assert evidence(far.pricing, far.step_s).known == "device"
    assert evidence(far.pricing, far.step_s).crossing
    eight = job(precision=Precision(fp8=Fp8(recipe="tensorwise")))
    assert evidence(eight.pricing, eight.step_s).eight_bit
    assert width(evidence(far.pricing, far.step_s)) > width(result)


def test_own_runs_narrow_a_band() -> None:
    own = OwnRuns(
        numbers=(OwnNumber(name="compute", value=0.8),), runs=5, data="mine", date="-", error="-", range="hopper"
    )
    unknown = Stack(name="unheard-of", version="0")
    before, after = job(program=unknown), job(program=replace(unknown, own=own))
    assert evidence(after.pricing, after.step_s).own_runs == 5
    assert after.band.high_s / after.band.low_s < before.band.high_s / before.band.low_s


def test_the_numbers_say_where_they_are_from() -> None:
    source = band_numbers().provenance
    assert "left out" in source.data and "in their band" in source.error and source.date.startswith("2026-")
    assert memory_ratios().low < 1 < memory_ratios().high
    with pytest.raises(InputError, match="hold the prediction"):
        Ratios(low=1.1, high=1.2)
