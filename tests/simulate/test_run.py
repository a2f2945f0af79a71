"""`simulate`: causes and steady states of random Programs against plain definitions, breakdowns that add up, and FSDP
by hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from simulate.test_against_naive import random_durations, valid
from simulate.time_order import time_order_peaks

from gnomon.errors import InputError
from gnomon.program import (
    BufferClass,
    Communicator,
    Kind,
    ProgramBuilder,
    Structure,
    effects,
    lanes,
    parse_program,
    validate,
)
from gnomon.simulate import Durations, durations, period, play_steps, simulate
from gnomon.timeline import (
    ROLES,
    Timeline,
    breakdown,
    exposed_communication,
    idle_intervals,
    memory_curve,
    peaks,
)
from gnomon.timeline.difference import difference
from gnomon.timeline.text import parse_timeline, print_timeline
from gnomon.units import TICK_S

SIZES = {"T": 3.0, "U": 5.0, "Q": 7.0, "Z": 11.0, "A": 13.0, "M": 17.0}
PROGRAMS = 300


def random_cases() -> Iterator[tuple[int, Structure, Durations]]:
    for seed in range(PROGRAMS):
        structure = valid(seed)
        if structure is not None:
            yield seed, structure, random_durations(structure.program, np.random.default_rng(seed), lags=seed % 2 == 0)


def check_sums(timeline: Timeline) -> None:
    """Shares of each worker add up to the step exactly."""
    parts = breakdown(timeline)
    for worker in parts.workers:
        assert sum(Fraction(s.seconds) for s in parts.of(worker)) == Fraction(timeline.step_s)


def test_every_span_starts_when_its_cause_ends() -> None:
    waited = 0
    for seed, structure, seconds in random_cases():
        spans = simulate(structure, seconds, steps=3).spans
        for i, cause in enumerate(spans.cause.tolist()):
            start = spans.start_s[i]
            if cause < 0:
                assert start == 0, (seed, i)
                continue
            end = spans.end_s[cause]
            assert start in (end, end + spans.lag_s[cause]), (seed, i)
            waited += spans.worker[cause] != spans.worker[i]
    assert waited > 1000


def test_breakdowns_of_random_programs_agree_with_a_walk_by_quarters() -> None:
    """Durations are quarters of a second, so each quarter of an idle interval is one thing: ask the chain which."""
    idle_seen = 0
    for _, structure, seconds in random_cases():
        timeline = simulate(structure, seconds, steps=2)
        check_sums(timeline)
        wanted: dict[tuple[str, str, str], float] = {}
        idle = idle_intervals(timeline)
        for i in range(len(idle.until)):
            worker = timeline.workers[idle.worker[i]].name
            assert timeline.spans.end_s[idle.arrival[i]] <= idle.end_s[i]
            for quarter in range(int(idle.start_s[i] * 4), int(idle.end_s[i] * 4)):
                key = (worker, *doing(timeline, int(idle.arrival[i]), quarter / 4))
                wanted[key] = wanted.get(key, 0) + 0.25
        actual: dict[tuple[str, str, str], float] = {}
        for s in breakdown(timeline).shares:
            if not s.busy:
                key = (s.worker, s.part, s.action)
                actual[key] = actual.get(key, 0) + s.seconds
        assert actual == wanted
        idle_seen += len(wanted)
    assert idle_seen > 500


def doing(timeline: Timeline, span: int, moment: float) -> tuple[str, str]:
    """What the chain of causes that ends with `span` did from `moment` on: (part, kind)."""
    s = timeline.spans
    while moment < s.start_s[span]:
        span = int(s.cause[span])
    role = ROLES[s.role[span]]
    part = "communication" if moment >= s.end_s[span] else {"compute": "bubble"}.get(role, role)
    return part, timeline.kinds[s.kind[span]]


def test_a_steady_step_satisfies_every_dependency_and_repeats() -> None:
    proofs = {"repeats": 0, "fixed point": 0}
    for seed, structure, seconds in random_cases():
        timeline, proved = simulate(structure, seconds, steady=True), period(structure, seconds)
        proofs[proved.proof] += 1
        assert 0 <= timeline.step_s - proved.seconds < 2 * TICK_S
        spans = timeline.spans
        program, edges = structure.program, structure.deps.edges
        row = np.arange(program.num_rows)
        assert spans.size == len(row), "random Programs have no composites"
        seen = np.where(edges.data, spans.lag_s[edges.source], 0) + spans.end_s[edges.source]
        slack = spans.start_s[edges.target] + edges.distance * timeline.step_s - seen
        assert slack.min(initial=0) >= -2 * TICK_S, seed
        for lane in np.unique(lanes(program)):
            on = row[lanes(program) == lane]
            assert (spans.start_s[on[1:]] >= spans.end_s[on[:-1]]).all()
            assert spans.start_s[on[0]] + timeline.step_s >= spans.end_s[on[-1]]
        bound = np.flatnonzero(spans.cause >= 0)
        cause = spans.cause[bound]
        gap = spans.start_s[bound] + spans.cause_steps[bound] * timeline.step_s - spans.end_s[cause]
        assert (np.minimum(abs(gap), abs(gap - spans.lag_s[cause])) <= 2 * TICK_S).all(), seed
        check_sums(timeline)
    assert min(proofs.values()) > 20


def test_where_clocks_repeat_the_steady_step_is_the_one_played() -> None:
    """Memory and starts of a late step, shifted, are those of the steady timeline."""
    compared = 0
    for seed, structure, seconds in random_cases():
        result = period(structure, seconds)
        if result.proof != "repeats" or result.plays > 12 or result.seconds == 0:
            continue
        late = play_steps(structure, seconds, result.plays + 4)
        times = late[result.plays]
        steady = simulate(structure, seconds, SIZES, steady=True)
        at = structure.order.position
        assert np.array_equal(times.start[at] - times.start.min(), steady.spans.start_s), seed
        timeline = simulate(structure, seconds, SIZES, steps=result.plays + 4)
        begin = float(times.start.min())
        for worker in steady.workers:
            curve, whole = memory_curve(steady, worker.name), memory_curve(timeline, worker.name)
            if times.end.max() > late[result.plays + 1].start.min() + result.seconds:
                continue  # steps overlap so far that four more are not enough to see all of them
            inside = (whole.time_s >= begin) & (whole.time_s < begin + result.seconds)
            values = dict(zip((whole.time_s[inside] - begin).tolist(), whole.bytes[inside].tolist(), strict=True))
            theirs = dict(zip(curve.time_s.tolist(), curve.bytes.tolist(), strict=True))
            assert {t: b for t, b in theirs.items() if t in values} == values, seed
            compared += len(values)
    assert compared > 200


def test_peaks_are_those_in_time_order() -> None:
    for _, structure, seconds in random_cases():
        timeline = simulate(structure, seconds, SIZES, steps=2)
        assert timeline.memory is not None
        for peak, (wanted, moment), resident in zip(
            peaks(timeline),
            time_order_peaks(structure, seconds, SIZES, steps=2),
            timeline.memory.resident_bytes.sum(axis=1),
            strict=True,
        ):
            assert peak.bytes == wanted
            if peak.bytes > resident:
                assert peak.moment_s == moment


def test_differences_of_random_programs_add_up_and_texts_read_back() -> None:
    for seed, structure, seconds in random_cases():
        if seed % 4:
            continue
        slower = Durations(busy=seconds.busy * 1.5, lag=seconds.lag)
        for steady in (False, True):
            one, two = (simulate(structure, d, SIZES, steady=steady) for d in (seconds, slower))
            result = difference(one, two)
            for worker in one.workers:
                assert sum(Fraction(c.seconds) for c in result.of(worker.name)) == Fraction(two.step_s - one.step_s)
            assert parse_timeline(print_timeline(one)) == one


# FSDP, four blocks on one rank: gather AG 2, F 1, B 2, scatter RS 2, OPT 1/4; one block is gathered ahead, the last
# block is not gathered again for its backward, and the optimizer begins with block 0, whose gradient comes last.
FSDP = """\
gnomon.program/1
stages 4
units 1
buffer PF step per stage
buffer GF step per stage
kind AG on gather comm fsdp: read P, write PF
kind F on compute: consume PF, consume X, write S, write Y
kind FK on compute: read PF, consume X, write S, write Y
kind B on compute: consume PF, consume S, consume DY, write DX, write GF
kind RS on scatter comm fsdp: consume GF, write G
comm fsdp collective
class 0
  0AG 1AG 0F0 2AG 1F0 3AG 2F0 2AG 3FK0 3B0 3RS 1AG 2B0 2RS 0AG 1B0 1RS 0B0 0RS 0OPT 1OPT 2OPT 3OPT
"""
FSDP_BUSY = {"AG": 2, "F": 1, "FK": 1, "B": 2, "RS": 2, "OPT": 0.25}


def test_fsdp_exposes_gathers_and_the_last_scatter() -> None:
    """From rest: gathers end at 2 4 6 8 and forwards of 1 second follow each, so 2 + 1 + 1 + 1 are exposed; backwards
    9-17 hide all but the last scatter, 17-19; then four OPT until 20. Computing 4 + 8 + 1, exposed 7.
    """
    structure = validate(parse_program(FSDP))
    seconds = durations(structure.program, FSDP_BUSY)
    timeline = simulate(structure, seconds)
    assert (timeline.makespan_s, timeline.period_s) == (20, 19.25)
    assert exposed_communication(timeline) == {"class 0": 7}
    parts = breakdown(timeline)
    assert parts.idle_s("class 0") == 7
    assert {s.action: s.seconds for s in parts.of("class 0") if not s.busy} == {"AG": 5, "RS": 2}


def test_fsdp_in_the_steady_state_hides_part_of_the_first_gather() -> None:
    """The next step's first gather starts when OPT of block 0 is done, at 19.25, under the other three: 2 - 3/4 of it
    is exposed, with 1 + 1 + 1 of the forward and 2 of the last scatter 6.25; 13 + 6.25 is the period.
    """
    structure = validate(parse_program(FSDP))
    seconds = durations(structure.program, FSDP_BUSY)
    timeline = simulate(structure, seconds, steady=True)
    assert timeline.step_s == 19.25
    assert exposed_communication(timeline) == {"class 0": 6.25}
    last = [(s.action, s.seconds) for s in breakdown(timeline).of("class 0") if s.at_end]
    assert last == [("AG", 1.25)]


def test_a_period_off_the_grid_is_rounded_up() -> None:
    """Three messages may be in flight and each takes 1 + 4.25 (lag) + 1 seconds: 6.25 / 3 seconds a step."""
    kinds = (
        Kind(name="PUT", stream="out", comm="net", message="send", hop=1),
        Kind(name="GET", stream="in", comm="net", message="recv", hop=1, effects=effects("write M")),
        Kind(name="WORK", effects=effects("consume M")),
    )
    builder = ProgramBuilder(num_stages=2, units=1, kinds=kinds)
    builder.add_all(builder.rank_class(), [("PUT", 0, 0)])
    builder.add_all(builder.rank_class(), [("GET", 1, 0), ("WORK", 1, 0)])
    program = builder.build(
        buffers=(BufferClass(name="M", memory="activations"),),
        comms=(Communicator(name="net", semantics="buffered", capacity=3),),
    )
    structure = validate(program)
    seconds = durations(program, {"PUT": 1, "GET": 1, "WORK": 0.5}, {"PUT": 4.25})
    result = period(structure, seconds)
    assert (result.cycle_seconds, result.cycle_steps) == (6.25, 3)
    timeline = simulate(structure, seconds, {"M": 1}, steady=True)
    assert 0 < Fraction(timeline.step_s) - Fraction(25, 12) < Fraction(TICK_S)
    check_sums(timeline)
    (busy, *idle) = breakdown(timeline).of("class 1")[::-1]
    assert (busy.action, busy.seconds) == ("WORK", 0.5)
    assert {(s.part, s.action) for s in idle} == {("communication", "GET"), ("communication", "PUT")}
    assert len(timeline.spans.start_s) == 3 and parse_timeline(print_timeline(timeline)) == timeline


def test_composites_are_one_span() -> None:
    text = """\
gnomon.program/1
stages 1
units 2
class 0
  0F0 (0F1&0B0) 0B1 0OPT
"""
    structure = validate(parse_program(text))
    timeline = simulate(structure, durations(structure.program, {"F": 1, "B": 2, "F&B": 2.5, "OPT": 0.25}))
    assert [timeline.kinds[k] for k in timeline.spans.kind] == ["F", "F&B", "B", "OPT"]
    assert [timeline.paths[p] if p >= 0 else "" for p in timeline.spans.path] == ["", "(0F1&0B0)", "", ""]
    assert timeline.makespan_s == 5.75
    shares = breakdown(timeline).shares
    assert [(s.action, s.seconds) for s in shares] == [("F&B", 2.5), ("B", 2), ("F", 1), ("OPT", 0.25)]


def test_of_two_that_end_together_the_one_with_data_is_the_cause() -> None:
    """Gather, the reader of Q and the first action all end at 1, when TWO starts, which needs the gathered parameters,
    may now overwrite Q, and follows ONE; at 2 only its own stream is left."""
    text = """\
gnomon.program/1
stages 1
units 1
buffer PF step per stage
buffer Q carried per stage
kind AG on gather comm fsdp: read P, write PF
kind LOOK on side: read Q
kind ONE on compute: read P
kind TWO on compute: consume PF, write Q
comm fsdp collective
class 0
  0AG 0LOOK 0ONE 0TWO 0ONE
"""
    structure = validate(parse_program(text))
    timeline = simulate(structure, durations(structure.program, {"*": 1}))
    assert timeline.spans.start_s.tolist() == [0, 0, 0, 1, 2]
    assert timeline.spans.cause.tolist() == [-1, -1, -1, 0, 3]
    slower = simulate(structure, durations(structure.program, {"*": 1, "AG": 0.5}))
    assert slower.spans.cause.tolist() == [-1, -1, -1, 1, 3], "to overwrite Q matters more than to follow ONE"


def test_roles_follow_communicators_and_streams() -> None:
    text = """\
gnomon.program/1
stages 1
units 1
kind STEP on adam: consume G, read P, write P
kind LOOK on side: read P
class 0
  0F0 0B0 0AR@compute 0STEP 0LOOK:dp
"""
    structure = validate(parse_program(text))
    seconds = durations(structure.program, {"*": 1})
    clock = simulate(structure, seconds, roles={"adam": "host"})
    assert [ROLES[r] for r in clock.spans.role] == ["compute", "compute", "communication", "host", "communication"]
    assert exposed_communication(clock) == {"class 0": 2}
    assert breakdown(clock).seconds("class 0", "host") == 1
    assert breakdown(simulate(structure, seconds)).seconds("class 0", "bubble") == 1


def test_refused() -> None:
    structure = validate(parse_program(FSDP))
    seconds = durations(structure.program, FSDP_BUSY)
    with pytest.raises(InputError, match="plays one scenario"):
        simulate(structure, replace(seconds, busy=np.stack([seconds.busy, seconds.busy])))
    with pytest.raises(InputError, match="steps must be at least 1"):
        simulate(structure, seconds, steps=0)
    with pytest.raises(InputError, match="1 for a steady step"):
        simulate(structure, seconds, steps=2, steady=True)
