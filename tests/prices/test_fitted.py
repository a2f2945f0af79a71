"""Numbers fitted to runs: where each is known from, within what is physically possible, few enough, and which way each
of them moves a step."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon import schema
from gnomon.errors import InputError
from gnomon.hardware import catalogue
from gnomon.plans import Mesh, Plan, Schedule, Workload
from gnomon.prediction import Prediction, predict
from gnomon.prices import Provenance, host_cost, sustained
from gnomon.prices.fitted import (
    ANY,
    LIMITS,
    FittedRates,
    LinkNumber,
    Rates,
    StackNumber,
    StackRecord,
    evidence_of,
    fitted_rates,
    rates,
)
from gnomon.simulate import period
from gnomon.software import Fact, OwnNumber, OwnRuns, Stack, stacks

H100 = catalogue.device("h100-sxm-80gb")
TEST = Stack(name="test", version="0")
FACT = Fact(field="attention", source="a test", date="2026-11-21")
SOURCE = Provenance(data="a test", date="2026-11-21", error="none", range="this test")


def numbers(**values: float) -> FittedRates:
    """A record of the stack `test`."""
    own = tuple(StackNumber(stack="test", name=name, value=value) for name, value in values.items())  # type: ignore[arg-type]
    return FittedRates(stacks=(StackRecord(numbers=own, provenance=SOURCE),))


@cache
def job() -> Prediction:
    """Two pipeline stages of two-way tensor parallelism, with little work: host and device both show."""
    plan = Plan(mesh=Mesh(pp=2, tp=2), schedule=Schedule(name="one_f_one_b", micro_batch_size=1))
    workload = Workload(global_batch_size=4, seq_len=1024)
    return predict("gpt2", "1x4xh100-sxm-80gb", plan, workload, TEST)


def step_s(result: FittedRates) -> float:
    made = job()
    return period(made.structure, made.pricing.with_numbers(result).durations(made.structure.program)).seconds


def test_every_number_says_where_it_is_from_and_for_what_it_holds() -> None:
    result = fitted_rates()
    assert result.stacks and result.count <= 6 * len(result.stacks) + 20
    assert result.universal is not None and result.shared <= 20
    records = (result.universal, *result.stacks)
    for provenance in (*(r.provenance for r in records), *(n.provenance for n in result.links)):
        assert "runs of" in provenance.data and provenance.date.startswith("2026-")
        assert "left out" in provenance.error and "devices" in provenance.range


def test_every_number_is_of_a_stack_or_a_link_on_record() -> None:
    assert {record.stack for record in fitted_rates().stacks} <= set(stacks())
    for number in fitted_rates().links:
        assert catalogue.link(number.link).name == number.link


def test_no_stack_computes_faster_than_the_burst() -> None:
    for record in fitted_rates().stacks:
        assert all(n.value <= 1 for n in record.numbers if n.name == "compute")
        assert all(1e-6 <= n.value <= 1e-4 for n in record.numbers if n.name == "host_kernel_s")


@pytest.mark.parametrize("name", LIMITS)
def test_numbers_beyond_what_is_possible_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=name):
        numbers(**{name: LIMITS[name][1] * 1.01})


def test_six_numbers_a_stack_each_once() -> None:
    many = tuple(
        StackNumber(stack="test", name=name, value=(low + high) / 2, arch=arch)  # type: ignore[arg-type]
        for name, (low, high) in LIMITS.items()
        for arch in ("ampere", "hopper")
    )
    with pytest.raises(InputError, match="at most 6"):
        StackRecord(numbers=many[:7], provenance=SOURCE)
    one = StackNumber(stack="test", name="compute", value=0.9)
    with pytest.raises(InputError, match="each number once"):
        StackRecord(numbers=(one, one), provenance=SOURCE)


def test_a_generation_comes_before_all_devices() -> None:
    own = (
        StackNumber(stack="test", name="compute", value=0.9),
        StackNumber(stack="test", name="compute", value=0.8, arch="hopper"),
    )
    result = FittedRates(stacks=(StackRecord(numbers=own, provenance=SOURCE),))
    assert result.rates(TEST, "hopper").compute == 0.8
    assert result.rates(TEST, "ampere").compute == 0.9
    assert schema.load(FittedRates, schema.dump(result)) == result


def test_a_generation_without_a_number_has_that_of_the_nearest() -> None:
    """TPU 7x has v6e's, before that of all TPUs, until it has one of its own; v6e never has 7x's."""
    every = StackNumber(stack="test", name="compute", value=0.9, arch="tpu")
    v6e, ironwood = (replace(every, value=x, arch=arch) for x, arch in ((0.8, "tpu-v6e"), (0.7, "tpu-7x")))
    stack = Stack(name="test", version="")

    def compute(arch: str, *numbers: StackNumber) -> float:
        return FittedRates(stacks=(StackRecord(numbers=numbers, provenance=SOURCE),)).rates(stack, arch).compute

    assert compute("tpu-7x", every) == 0.9
    assert compute("tpu-7x", every, v6e) == 0.8
    assert compute("tpu-7x", every, v6e, ironwood) == 0.7
    assert compute("tpu-v6e", every, ironwood) == 0.9


def test_a_stack_without_runs_has_the_rates_of_all_stacks_and_says_so() -> None:
    unknown = Stack(name="unheard-of", version="0")
    assert rates(unknown, H100, FittedRates()) == Rates()
    every = fitted_rates().universal
    assert every is not None
    compute = next(n.value for n in every.numbers if (n.name, n.arch) == ("compute", "hopper"))
    assert sustained(unknown, H100).factor == compute
    assert "no runs fitted for 'unheard-of'" in sustained(unknown, H100).note
    assert host_cost(unknown, H100).confidence == "unchecked"
    tpu = rates(unknown, catalogue.device("tpu-v5p"))  # only what names its generation
    assert (tpu.host_kernel_s, tpu.host_collective_s, tpu.exposed) == (None, 0.0, 1.0)


def test_op_by_op_attention_is_not_slowed_by_what_fused_kernels_reach() -> None:
    every = (StackNumber(stack=ANY, name="attention", value=0.6),)
    result = FittedRates(universal=StackRecord(numbers=every, provenance=SOURCE))
    assert rates(TEST, H100, result).attention == 0.6
    assert rates(TEST.with_values((FACT,), attention="unfused"), H100, result).attention == 1.0


def test_own_numbers_go_before_those_on_record() -> None:
    own = OwnRuns(
        numbers=(OwnNumber(name="compute", value=0.5), OwnNumber(name="exposed", value=0.4, arch="ampere")),
        runs=3,
        data="mine",
        date="2026-11-21",
        error="none",
        range="hopper",
    )
    mine = replace(TEST, own=own)
    result = rates(mine, H100, numbers(compute=0.8, exposed=0.9))
    assert (result.compute, result.exposed) == (0.5, 0.9)
    assert "3 own runs" in sustained(mine, H100).note
    assert evidence_of(mine, H100) == "own"
    with pytest.raises(InputError, match="did you mean 'compute'"):
        rates(replace(TEST, own=replace(own, numbers=(OwnNumber(name="computes", value=0.5),))), H100)


def test_numbers_of_all_stacks_stand_in_for_a_record() -> None:
    """A stack's record goes before the numbers of all stacks; what it leaves out is theirs."""
    every = (
        StackNumber(stack=ANY, name="compute", value=0.8, arch="hopper"),
        StackNumber(stack=ANY, name="exposed", value=0.7),
    )
    result = replace(numbers(compute=0.9), universal=StackRecord(numbers=every, provenance=SOURCE))
    other = Stack(name="other", version="0")
    assert rates(TEST, H100, result) == Rates(compute=0.9, exposed=0.7)
    assert rates(other, H100, result) == Rates(compute=0.8, exposed=0.7)
    assert result.count == 3 and result.shared == 2
    assert evidence_of(other, H100, result) == "device"
    assert evidence_of(other, catalogue.device("v100-sxm-32gb"), result) == "nothing"
    with pytest.raises(InputError, match="named '\\*'"):
        replace(result, universal=numbers(compute=0.9).stacks[0])
    many = tuple(StackNumber(stack=ANY, name="compute", value=0.8, arch=f"a{i}") for i in range(21))
    with pytest.raises(InputError, match="at most 20"):
        FittedRates(universal=StackRecord(numbers=many, provenance=SOURCE))


def test_a_fitted_stack_says_what_it_rests_on() -> None:
    stack = Stack(name="nanotron", version="0")
    assert "fitted to published_runs.csv" in sustained(stack, H100).note
    assert host_cost(stack, H100).confidence == "checked"


def test_by_hand_when_the_host_decides() -> None:
    """With 150 us a kernel the step is launches alone: twice the host time, twice the step but for the update and the
    messages, which are under a hundredth."""
    slow, slower = step_s(numbers(host_kernel_s=75e-6)), step_s(numbers(host_kernel_s=150e-6))
    assert slower == pytest.approx(2 * slow, rel=0.02)


def test_triton_s_attention_has_a_number_of_its_own() -> None:
    """Neither what other kernels reach nor the stack's number for them holds for it, and its own holds for no other."""
    every = (StackNumber(stack=ANY, name="attention", value=0.6),)
    own = (StackNumber(stack="test", name="triton", value=1.2), StackNumber(stack="test", name="attention", value=0.7))
    result = FittedRates(
        universal=StackRecord(numbers=every, provenance=SOURCE), stacks=(StackRecord(numbers=own, provenance=SOURCE),)
    )
    facts = (FACT, replace(FACT, field="attention_kernel"))
    triton = TEST.with_values(facts, attention="flash", attention_kernel="triton")
    assert rates(triton, H100, result).attention == 1.2
    assert rates(replace(triton, name="other"), H100, result).attention == 1.0
    assert rates(TEST, H100, result).attention == 0.7


HOST = ("host_kernel_s", "host_collective_s", "host_unit_s")


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from([*HOST, "exposed", "compute", "attention"]),
    start=st.floats(0.05, 0.95),
    more=st.floats(0.0, 1.0),
)
def test_slower_never_makes_the_step_faster(name: str, start: float, more: float) -> None:
    low, high = LIMITS[name]
    first = low + start * (high - low)
    second = first + more * (high - first)
    before, after = step_s(numbers(**{name: first})), step_s(numbers(**{name: second}))
    if name in ("compute", "attention"):
        before, after = after, before
    assert after >= before


def test_a_slower_network_never_makes_the_step_faster() -> None:
    base = numbers(host_kernel_s=1e-6)
    steps = [
        step_s(replace(base, links=(LinkNumber(link="nvlink4", factor=factor, provenance=SOURCE),)))
        for factor in (0.5, 1.0, 2.0, 8.0)
    ]
    assert steps == sorted(steps) and steps[-1] > steps[0]
