"""Plans that are offered for a program: its own file says them, and is predicted to take as long."""

from __future__ import annotations

from random import Random

import pytest

from gnomon.errors import GnomonError
from gnomon.formats import programs
from gnomon.hardware import parse_cluster
from gnomon.plans import Plan, Workload
from gnomon.prediction import predict
from gnomon.request.exported import SAME, Target, based, lacks, target
from gnomon.request.model import read_config
from gnomon.search import make_space
from gnomon.search.space.points import Point
from gnomon.software import stack, stacks, unsupported

JOBS = {
    "gpt2-xl": ("1x8xa100-sxm-80gb", Workload(global_batch_size=32, seq_len=1024)),
    "llama-3.1-8b": ("2x8xh100-sxm", Workload(global_batch_size=64, seq_len=4096)),
    "mixtral-8x7b": ("2x8xh100-sxm", Workload(global_batch_size=64, seq_len=4096)),
    "qwen3-8b": ("1x8xh100-sxm", Workload(global_batch_size=64, seq_len=4096)),
}


def to_program(model: str, name: str) -> Target:
    on, work = JOBS[model]
    config, graph = read_config(model)
    result = target(stack(name), config, graph, parse_cluster(on), work)
    assert result is not None
    return result


def offered(to: Target, seed: str, count: int, *, flat: bool = False) -> list[Plan]:
    """Plans that a search for the program looks at, drawn at random. flat: without a pipeline."""
    base = based(Plan(), to, precision=True)
    space = make_space(to.graph, to.machines, to.workload, base=base, stack=to.stack)
    points = [point for point in space.points() if not flat or point.pp == 1]
    random, actual = Random(seed), list[Plan]()
    while len(actual) < count:
        try:
            plan = space.plan(random.choice(points))
            predict(to.graph, to.machines, plan, to.workload, to.stack)
        except GnomonError:  # a combination that no plan has, as experts that do not divide
            continue
        actual.append(plan)
    return actual


@pytest.mark.parametrize("model", JOBS)
@pytest.mark.parametrize("name", sorted(programs.stacks()))
def test_what_is_offered_for_a_program_comes_back_from_its_file(model: str, name: str) -> None:
    to = to_program(model, name)
    if lacks(Plan(), to):
        assert (name, model) in {("torchtitan", "gpt2-xl"), ("nanotron", "gpt2-xl"), ("torchtitan", "mixtral-8x7b")}
        return
    for plan in offered(to, f"{model} {name}", 3):
        try:
            message, prediction = to.offered(plan)  # as `gnomon plan` does
        except GnomonError:  # what it leaves out, as experts over groups that the program makes otherwise
            continue
        assert unsupported(to.stack, message) == ()
        again, repeated = to.predicted(message)
        assert again == message
        assert repeated.step_s == pytest.approx(prediction.step_s, rel=SAME)


@pytest.mark.parametrize("name", [name for name in stacks() if name not in ("gnomon", "vtrain")])
def test_a_search_for_a_program_looks_at_what_it_runs_only(name: str) -> None:
    """The limits of the search and what `predict` says of a plan are one record."""
    on, work = JOBS["llama-3.1-8b"]
    space = make_space(read_config("llama-3.1-8b")[1], parse_cluster(on), work, stack=stack(name))
    points = [point for point in space.points() if space.runs(point.pp, point.zero)]
    for point in Random(name).sample(points, min(200, len(points))):
        assert unsupported(stack(name), space.plan(point)) == ()


@pytest.mark.parametrize("name", sorted(programs.stacks()))
def test_the_search_for_a_program_knows_what_its_files_say(name: str) -> None:
    """Without a pipeline a plan of the space is nearly its file's, so that the search ranks what will be offered: sizes
    of buckets, and what a file sets in the program, are left (5%)."""
    to = to_program("llama-3.1-8b", name)
    for plan in offered(to, name, 3, flat=True):
        try:
            message, prediction = to.predicted(plan)
        except GnomonError:
            continue
        before = predict(to.graph, to.machines, plan, to.workload, to.stack)
        assert prediction.step_s == pytest.approx(before.step_s, rel=0.05), message


def test_a_plan_of_a_program_that_has_no_such_plan() -> None:
    """What the record rules out: ZeRO 2 and kept gathers in torchtitan, replicas and experts in nanotron, pipelines and
    context parallelism in DeepSpeed."""
    spaces = {}
    for name in programs.stacks():
        to = to_program("mixtral-8x7b", name)
        spaces[name] = list(make_space(to.graph, to.machines, to.workload, stack=to.stack).points())

    def values(name: str, field: str) -> set[object]:
        return {getattr(point, field) for point in spaces[name]}

    assert set(Point._fields) > {"zero", "keep_gathered"}
    assert values("torchtitan", "zero") == {3} and values("torchtitan", "keep_gathered") == {False}
    assert values("nanotron", "dp_replicate") == values("nanotron", "ep") == {1}
    assert values("nanotron", "context") == {"ring"}
    assert values("deepspeed", "pp") == values("deepspeed", "cp") == values("deepspeed", "ep") == {1}
    assert values("megatron-lm", "keep_gathered") == {False}
    assert values("pytorch-fsdp", "pp") == {1}
