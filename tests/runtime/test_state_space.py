"""A Mamba-2 scan in chunks is the recurrence token by token; what of it the runtime does not run is refused."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

import gnomon  # noqa: E402
from gnomon.errors import PlanError  # noqa: E402
from gnomon.graph import Graph  # noqa: E402
from gnomon.hardware import parse_cluster  # noqa: E402
from gnomon.models.presets import graph_of  # noqa: E402
from gnomon.models.tiny import tiny  # noqa: E402
from gnomon.plans import Plan, Precision, Saved, Schedule, Workload  # noqa: E402
from gnomon.runtime.ops.state_space import scan  # noqa: E402
from gnomon.runtime.watch.measure import CLASSES, Recorder  # noqa: E402
from gnomon.search.space.points import make_space  # noqa: E402
from gnomon.software import own, stack  # noqa: E402

pytestmark = pytest.mark.torch

FP32 = Precision(param="fp32", compute="fp32", grad="fp32", reduce="fp32", master="none", states="fp32")
WORK = Workload(global_batch_size=4, seq_len=32)


def mamba() -> Graph:
    return tiny(graph_of("mamba2-2.7b"))


@settings(max_examples=25, deadline=None)
@given(tokens=st.integers(1, 21), chunk=st.integers(1, 9), groups=st.sampled_from([1, 2]), seed=st.integers(0, 99))
def test_chunks_are_the_recurrence(tokens: int, chunk: int, groups: int, seed: int) -> None:
    """Outputs and gradients, in float64."""
    make = torch.Generator().manual_seed(seed)
    heads, width, state = 4, 3, 5
    x = torch.randn(2, tokens, heads, width, generator=make, dtype=torch.float64, requires_grad=True)
    b, c = (torch.randn(2, tokens, groups, state, generator=make, dtype=torch.float64) for _ in range(2))
    decay = -torch.rand(2, tokens, heads, generator=make, dtype=torch.float64) * 3
    decay.requires_grad_()
    held, outputs = torch.zeros(2, heads, width, state, dtype=torch.float64), []
    for t in range(tokens):
        of_head = [part[:, t].repeat_interleave(heads // groups, dim=1) for part in (b, c)]
        held = decay[:, t].exp()[..., None, None] * held + x[:, t, :, :, None] * of_head[0][:, :, None]
        outputs.append((held * of_head[1][:, :, None]).sum(-1))
    want, made = torch.stack(outputs, dim=1), scan(x, decay, b, c, chunk)
    assert torch.allclose(made, want, rtol=1e-10, atol=1e-12)
    weights = torch.randn(want.shape, generator=make, dtype=torch.float64)
    gradients = [torch.autograd.grad((y * weights).sum(), (x, decay), retain_graph=True) for y in (made, want)]
    assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-11) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("preset", ["none", "full"])
def test_what_is_kept_is_as_predicted(preset: str) -> None:
    plan = Plan(schedule=Schedule(num_microbatches=2), precision=FP32, saved=Saved(preset=preset))  # type: ignore[arg-type]
    ids = torch.arange(4 * 33).view(4, 33) * 7 % 32
    with gnomon.prepare(mamba(), plan, workload=WORK) as job:
        losses = [job.step(ids) for _ in range(3)]
        recorder = Recorder(memory=True)
        job.executor.step(ids, recorder)
    assert losses[2] < losses[1] < losses[0]
    held = max(levels[CLASSES.index("activations")] for _, levels in recorder.levels)
    forecast = gnomon.predict(mamba(), "local:1", plan, WORK, stack("gnomon"))
    assert held == pytest.approx(forecast.memory[0].by_class["activations"], rel=0.05)


def test_packed_rows_are_refused() -> None:
    plan = Plan(schedule=Schedule(num_microbatches=1), precision=FP32)
    ids = torch.arange(4 * 33).view(4, 33) * 7 % 32
    documents = (torch.arange(32) // 16).expand(4, 32)
    with gnomon.prepare(mamba(), plan, workload=WORK) as job:
        with pytest.raises(PlanError, match="scans run over whole rows"):
            job.step({"input_ids": ids[:, :-1], "labels": ids[:, 1:], "documents": documents})


def test_a_search_divides_groups_of_heads_and_no_sequence() -> None:
    graph = graph_of("nemotron-h-8b")
    assert own.tensor_parallel_reason(graph, 16) and own.tensor_parallel_reason(graph, 8) is None
    work = Workload(global_batch_size=8, seq_len=256)
    space = make_space(graph, parse_cluster("8xa100-sxm-80gb"), work, stack=stack("gnomon"))
    assert space.tp == (1, 2, 4, 8) and space.cp == (1,)
