"""Controllers: what they decide, by hand and for any incidents, and that a trace gives the same decisions again."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.control import CONTROLLERS, Incident, JobProcesses, Look, Recorder, SimulatedLauncher, read_trace, replayed
from gnomon.control.controllers import keepers
from gnomon.errors import GnomonError, InputError
from gnomon.plans import Mesh, Plan, Schedule

WORKERS = Plan(mesh=Mesh(dp_replicate=4))
PIPELINES = Plan(mesh=Mesh(pp=3, dp_replicate=2), schedule=Schedule(name="one_f_one_b", num_microbatches=4))


def started(name: str, plan: Plan, processes: int) -> SimulatedLauncher:
    """A job all of whose processes are ready."""
    workers = name == "logical_workers"
    job = SimulatedLauncher(name, plan, restarts=2, requested=processes if workers else 0)
    for process in range(processes):
        job.happens(Incident(what="came", process=process, rank=-1 if workers else process))
        job.happens(Incident(what="ready", process=process))
    return job


def test_workers_go_on_at_once_and_newcomers_wait_for_each_other() -> None:
    job = started("logical_workers", WORKERS, 4)
    assert job.look()[1].members == (0, 1, 2, 3)  # type: ignore[union-attr]
    assert job.look()[1] is None
    job.happens(Incident(what="lost", process=1))
    job.happens(Incident(what="came", process=4))
    decision = job.look()[1]
    assert decision is not None and (decision.members, decision.plan.placement) == ((0, 2, 3), (0, 0, 1, 2))
    job.happens(Incident(what="came", process=5))
    job.happens(Incident(what="ready", process=4))
    assert job.look()[1] is None, "5 loads"
    job.happens(Incident(what="ready", process=5))
    decision = job.look()[1]
    assert decision is not None and decision.members == (0, 2, 3, 4), "four are wanted"
    assert job.seen.there == (0, 2, 3, 4), "and 5 is of no use"


def test_a_stage_goes_to_its_keeper_and_home_again() -> None:
    """Rank (stage, replica): keepers are the same replica's stage before."""
    job = started("takeover", PIPELINES, 6)
    first = job.look()[1]
    assert first is not None and first.plan.placement == (0, 1, 2, 3, 4, 5)
    lost = 2
    keeper = keepers(PIPELINES)[lost]
    job.happens(Incident(what="met"))
    job.happens(Incident(what="lost", process=lost))
    taken = job.look()[1]
    assert taken is not None and taken.members[taken.plan.placement[lost]] == keeper and not taken.lost
    job.happens(Incident(what="came", process=6, rank=lost))
    job.happens(Incident(what="ready", process=6))
    assert job.look()[1] is None, "the others have not met"
    job.happens(Incident(what="met"))
    home = job.look()[1]
    assert home is not None and home.members[home.plan.placement[lost]] == 6
    job.happens(Incident(what="lost", process=6))
    job.happens(Incident(what="lost", process=keeper))
    apart = job.look()[1]
    assert apart is not None and apart.lost == (lost,)
    for process, rank in ((7, keeper), (8, lost)):
        job.happens(Incident(what="met"))
        job.happens(Incident(what="came", process=process, rank=rank))
        job.happens(Incident(what="ready", process=process))
        last = job.look()[1]
        assert last is not None and bool(last.lost) == (rank == keeper), "all wait until every place is taken"


INCIDENTS = st.lists(
    st.tuples(
        st.sampled_from(["lost", "came", "ready", "asked", "speeds", "parted", "met", "look"]), st.integers(0, 99)
    ),
    max_size=40,
)


def played(name: str, plan: Plan, incidents: list[tuple[str, int]]) -> tuple[SimulatedLauncher, list[Look]]:
    """A job to which these happen."""
    job, born = started(name, plan, plan.world_size), plan.world_size
    looks = [Look(at=0.0, seen=seen, decision=decision) for seen, decision in [job.look()]]
    for what, number in incidents:
        there, loading = job.seen.there, [one for one in job.seen.there if one not in job.seen.ready]
        if what == "lost" and there:
            job.happens(Incident(what="lost", process=there[number % len(there)]))
        elif what == "came" and len(there) < plan.world_size:
            missing = [rank for rank in range(plan.world_size) if rank not in job.seen.ranks]
            rank = -1 if name == "logical_workers" else missing[number % len(missing)]
            job.happens(Incident(what="came", process=born, rank=rank))
            born += 1
        elif what == "ready" and loading:
            job.happens(Incident(what="ready", process=loading[number % len(loading)]))
        elif what == "asked" and name == "logical_workers":
            job.happens(Incident(what="asked", number=1 + number % 4))
        elif what == "speeds" and name == "logical_workers" and set(job.seen.members) <= set(there):
            speeds = tuple(1.0 + number * (place % 2) for place in range(len(job.seen.members)))
            job.happens(Incident(what="speeds", speeds=speeds))
        elif what == "parted" or what == "met":
            job.happens(Incident(what=what))  # type: ignore[arg-type]
        seen, decision = job.look()
        looks.append(Look(at=float(len(looks)), seen=seen, decision=decision))
    return job, looks


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(sorted(CONTROLLERS)), incidents=INCIDENTS)
def test_any_trace_gives_the_same_decisions_again(
    name: str, incidents: list[tuple[str, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Those who train are ready, each rank's work has one place among them, and the file is all that is needed."""
    plan = WORKERS if name == "logical_workers" else PIPELINES
    _, looks = played(name, plan, incidents)
    path = tmp_path_factory.mktemp("trace") / "decisions"
    recorder = Recorder(path, controller=name, plan=plan, restarts=2)
    for look in looks:
        recorder.look(look.seen, look.decision)
        if (decision := look.decision) is not None:
            assert set(decision.members) <= set(look.seen.ready)
            if not decision.lost:
                places = decision.plan.device_of
                assert len(places) == plan.world_size and max(places) < len(decision.members)
    trace = read_trace(path)
    assert trace.plan == plan
    assert list(replayed(trace)) == [(look.seen, look.decision) for look in trace.looks]
    written = [look for at, look in enumerate(looks) if look.decision or not at or look.seen != looks[at - 1].seen]
    assert [(look.seen, look.decision) for look in trace.looks] == [(look.seen, look.decision) for look in written]


@settings(max_examples=150, deadline=None)
@given(cut=st.integers(0, 3000), text=st.text(max_size=8), removed=st.integers(0, 9))
def test_a_mutated_trace_is_refused_or_read(
    cut: int, text: str, removed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "mutated"
    recorder = Recorder(path, controller="takeover", plan=PIPELINES, restarts=2)
    for look in played("takeover", PIPELINES, [("lost", 2), ("met", 0)])[1]:
        recorder.look(look.seen, look.decision)
    whole = path.read_text()
    path.write_text(whole[:cut] + text + whole[cut + removed :], encoding="utf-8")
    try:
        read_trace(path)
    except GnomonError as error:
        assert str(error)


def test_what_is_no_trace_is_said(tmp_path: Path) -> None:
    path = tmp_path / "decisions"
    with pytest.raises(InputError, match="cannot read"):
        read_trace(path)
    path.write_text("{}\n")
    with pytest.raises(InputError, match="decisions:1"):
        read_trace(path)
    with pytest.raises(InputError, match="cannot write decisions"):
        Recorder(tmp_path, controller="takeover", plan=PIPELINES, restarts=0)


def test_nothing_is_decided_of_nobody() -> None:
    for name, controller in CONTROLLERS.items():
        assert (
            controller.decide(WORKERS if name == "logical_workers" else PIPELINES, JobProcesses(there=(), ready=()))
            is None
        )
