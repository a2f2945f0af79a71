"""Migrations carried out with files: every row finds what was written last, in no more memory than was given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gnomon.errors import RunError
from gnomon.runtime.step.disk_tier import carry_out, measured_link
from gnomon.simulate.two_tiers import (
    STEPS,
    Link,
    Migration,
    TierTensor,
    TierTrace,
    least_recently_used,
    plan_migration,
    static,
)

LAYERS, KIB = 6, 1024.0
LINK = Link(read=1e9, write=1e9)


def step() -> TierTrace:
    """Layers forward, back, and updated: weights, what forwards keep, gradients, states."""
    tensors, uses, writes = list[TierTensor](), list[tuple[int, ...]](), list[frozenset[int]]()
    for layer in range(LAYERS):
        for name, nbytes, carried in (("w", 64, True), ("s", 160, False), ("g", 64, False), ("m", 128, True)):
            tensors.append(TierTensor(name=f"{name}{layer}", nbytes=nbytes * KIB, carried=carried))
    for layer in range(LAYERS):
        uses.append((4 * layer, 4 * layer + 1))
        writes.append(frozenset({4 * layer + 1}))
    for layer in reversed(range(LAYERS)):
        uses.append((4 * layer, 4 * layer + 1, 4 * layer + 2))
        writes.append(frozenset({4 * layer + 2}))
    for layer in range(LAYERS):
        uses.append((4 * layer, 4 * layer + 2, 4 * layer + 3))
        writes.append(frozenset({4 * layer, 4 * layer + 3}))
    return TierTrace(tensors=tuple(tensors), seconds=(0.001,) * len(uses), uses=tuple(uses), writes=tuple(writes))


@pytest.mark.parametrize("share", [0.2, 0.5, 1.0])
@pytest.mark.parametrize("policy", [static, least_recently_used, plan_migration])
def test_rows_find_what_was_written_last(
    policy: Callable[[TierTrace, Link, float], Migration], share: float, tmp_path: Path
) -> None:
    trace = step()
    capacity = share * trace.peak_bytes
    migration = policy(trace, LINK, capacity)
    carried = carry_out(trace, migration, tmp_path, capacity)
    assert carried.peak_bytes <= capacity + 1 and carried.step_s >= sum(trace.seconds)
    moved = {what: sum(trace.tensors[m.tensor].nbytes for m in migration.moves if m.what == what)
             for what in ("read", "write")}  # fmt: skip
    last = STEPS * len(trace.uses)
    late = sum(trace.tensors[m.tensor].nbytes for m in migration.moves if m.what == "write" and m.row == last)
    assert (carried.read_bytes, carried.written_bytes) == (moved["read"], moved["write"] - late)


def test_a_migration_that_loses_a_change_is_found(tmp_path: Path) -> None:
    trace = step()
    capacity = 0.2 * trace.peak_bytes
    right = least_recently_used(trace, LINK, capacity)
    moves = tuple(move._replace(what="drop") if move.what == "write" else move for move in right.moves)
    with pytest.raises(RunError, match="was changed . times, and what came from the disk"):
        carry_out(trace, replace(right, moves=moves), tmp_path, capacity)


def test_a_disk_has_a_speed(tmp_path: Path) -> None:
    link = measured_link(tmp_path, 1 << 20)
    assert link.read > 0 and link.write > 0 and not list(tmp_path.iterdir())
