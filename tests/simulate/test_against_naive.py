"""The engine against a naive simulator on hundreds of random Programs, and the period against its own definition."""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction

import numpy as np
import pytest
from simulate.naive import Node, play, waits
from simulate.random_programs import random_program

from gnomon.program import Deadlock, Program, Structure, dependencies, order, problems
from gnomon.program.order import _Entries as Entries
from gnomon.program.order import _one_by_one as one_by_one
from gnomon.program.order import _together as together
from gnomon.simulate import Durations, Script, makespans, period, periods, play_steps
from gnomon.simulate import play as play_step
from gnomon.simulate.play import Clock

PROGRAMS = 900


def valid(seed: int) -> Structure | None:
    """The Structure of a random Program, or None if it deadlocks. It must not be wrong in any other way."""
    program = random_program(np.random.default_rng(seed))
    deps = dependencies(program)
    assert [p for p in deps.problems if p.what != "wrong order on a communicator"] == []
    result = order(program, deps)
    if isinstance(result, Deadlock):
        assert [p.what for p in problems(program)] == ["deadlock"]
        return None
    return Structure(program=program, deps=deps, order=result)


def random_durations(program: Program, rng: np.random.Generator, *, lags: bool) -> Durations:
    busy = rng.integers(0, 12, len(program.keys)) / 4
    return Durations(busy=busy, lag=rng.integers(0, 5, len(program.keys)) / 4 if lags else None)


def test_every_action_of_three_steps_agrees_with_the_naive_simulator() -> None:
    played = 0
    for seed in range(PROGRAMS):
        structure = valid(seed)
        if structure is None:
            continue
        program, rng = structure.program, np.random.default_rng(seed)
        durations = random_durations(program, rng, lags=seed % 2 == 0)
        lag = np.zeros(len(program.keys)) if durations.lag is None else durations.lag
        wanted = play(program, durations.busy.tolist(), lag.tolist(), 3)
        for step, times in enumerate(play_steps(structure, durations, 3)):
            at = structure.order.position
            for row in range(program.num_rows):
                actual = float(times.start[at[row]]), float(times.end[at[row]])
                assert actual == wanted[step, row], (seed, step, program.where(row))
        played += 1
    assert played >= 660


def ratio_graph(program: Program, durations: Durations) -> list[tuple[int, int, Fraction, int]]:
    """Edges (from, to, seconds, steps) of the naive simulator's dependencies, from steps 3 to 6, where all wrap."""
    before, root = waits(program, 7)
    name: dict[Node, int] = defaultdict(lambda: len(name))
    longest: dict[Node, Fraction] = defaultdict(Fraction)
    for node, r in root.items():
        longest[r] = max(longest[r], Fraction(float(durations.busy[program.key[node[1]]])))
    edges = set()
    for node, sources in before.items():
        if node[0] == 6:
            for source, _ in sources:
                a, b = root[source], root[node]
                if a != b:
                    edges.add((name[0, a[1]], name[0, b[1]], longest[a], b[0] - a[0]))
    return sorted(edges)


def has_gain(edges: list[tuple[int, int, Fraction, int]], ratio: Fraction) -> bool:
    """Whether some cycle is longer than `ratio` per step (Bellman-Ford on lengths minus ratio times steps)."""
    nodes = 1 + max((max(a, b) for a, b, _, _ in edges), default=0)
    far = [Fraction(0)] * nodes
    for _ in range(nodes + 1):
        changed = False
        for a, b, seconds, steps in edges:
            if far[a] + seconds - ratio * steps > far[b]:
                far[b], changed = far[a] + seconds - ratio * steps, True
        if not changed:
            return False
    return True


@pytest.mark.parametrize("part", range(4))
def test_the_period_is_the_maximum_cycle_ratio(part: int) -> None:
    proofs = set()
    for seed in range(part * 60, part * 60 + 60):
        structure = valid(seed)
        if structure is None:
            continue
        durations = random_durations(structure.program, np.random.default_rng(seed), lags=False)
        result = period(structure, durations)
        proofs.add(result.proof)
        others = random_durations(structure.program, np.random.default_rng(seed + 1000), lags=False)
        after = play_step(Clock.of(structure, others))  # wherever it goes on from, it is the same
        assert period(structure, durations, after).seconds == result.seconds
        ratio = Fraction(result.cycle_seconds) / result.cycle_steps
        edges = ratio_graph(structure.program, durations)
        assert not has_gain(edges, ratio), f"seed {seed}: some cycle is longer than {ratio}"
        if ratio > 0:
            assert has_gain(edges, ratio - Fraction(1, 10**6)), f"seed {seed}: no cycle is as long as {ratio}"
    assert proofs == {"repeats", "fixed point"}


def test_streams_one_by_one_and_together_give_one_order() -> None:
    """Deadlocks included."""
    for seed in range(300):
        program = random_program(np.random.default_rng(seed))
        entries = Entries(program, dependencies(program))
        for one, other in zip(one_by_one(entries), together(entries), strict=True):
            assert np.array_equal(one, other), seed


def test_many_vectors_agree_with_one_at_a_time() -> None:
    for seed in range(120):
        structure = valid(seed)
        if structure is None:
            continue
        rng = np.random.default_rng(seed)
        busy = rng.integers(0, 12, (5, len(structure.program.keys))) / 4
        script = Script.of(structure)
        for i, (whole, steady) in enumerate(
            zip(makespans(script, Durations(busy=busy)), periods(script, Durations(busy=busy)), strict=True)
        ):
            one = Durations(busy=busy[i])
            assert whole == max(play_steps(structure, one, 1)[0].end, default=0.0)
            assert steady == period(structure, one).seconds
