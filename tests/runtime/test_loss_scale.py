"""fp16 and its dynamic loss scale: a scale that is a power of two changes nothing, an overflow leaves a step out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

import gnomon  # noqa: E402
from gnomon.models.llama import LlamaConfig, llama  # noqa: E402
from gnomon.plans import Offload, Optimizer, Plan, Precision, Schedule, Workload  # noqa: E402
from gnomon.runtime.launch.job import PreparedJob  # noqa: E402
from gnomon.runtime.optim.loss_scale import LossScale  # noqa: E402
from gnomon.runtime.optim.update import AdamWSettings  # noqa: E402
from gnomon.software import stack  # noqa: E402

pytestmark = pytest.mark.torch

CONFIG = LlamaConfig(
    name="narrow", num_layers=2, hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16, ffn_size=64, vocab_size=64
)
WORK = Workload(global_batch_size=4, seq_len=16)
FP32 = Precision(param="fp32", compute="fp32", grad="fp32", reduce="fp32", master="none", states="fp32")
FP16 = Precision(param="fp16", compute="fp16")
IDS = torch.arange(4 * 17).view(4, 17) * 7 % 64


@contextmanager
def job(
    precision: Precision,
    scale: LossScale | None = None,
    optimizer: Optimizer = Optimizer(),  # noqa: B008 (frozen)
    settings: AdamWSettings = AdamWSettings(lr=1e-2),  # noqa: B008 (frozen)
) -> Iterator[PreparedJob]:
    plan = Plan(schedule=Schedule(num_microbatches=2), precision=precision, optimizer=optimizer)
    with gnomon.prepare(llama(CONFIG), plan, workload=WORK, settings=settings, seed=3) as result:
        if scale is not None:
            result.executor.state.loss_scale = scale
        yield result


def test_fp16_learns_as_fp32_does() -> None:
    """To what 11 bits of a number lose."""
    losses = []
    for precision in (FP32, FP16):
        with job(precision) as result:
            losses.append([result.step(IDS) for _ in range(5)])
    assert losses[1] == pytest.approx(losses[0], rel=5e-3) and losses[1][-1] < losses[1][0]


def test_a_power_of_two_changes_no_bit() -> None:
    runs = []
    for scale in (None, LossScale(scale=2.0**12)):
        with job(FP32, scale) as run:
            norms = [run.executor.step(IDS).grad_norm.item() for _ in range(3)]
            runs.append((norms, run.state_dict()))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(value, runs[1][1][name]) for name, value in runs[0][1].items())


def test_an_overflow_leaves_the_step_out_and_halves_the_scale(tmp_path: Path) -> None:
    """The state goes on from a checkpoint; after `growth_interval` good steps the scale doubles."""
    with job(FP16, LossScale(scale=2.0**36, growth_interval=2)) as run:
        before = run.state_dict()
        run.step(IDS)
        scaler, (_, adam) = run.executor.state.loss_scale, next(run.executor.parameters())
        assert scaler is not None and scaler.scale == 2.0**35 and adam.steps == 0
        assert all(torch.equal(value, before[name]) for name, value in run.state_dict().items())
        scaler.scale = 2.0**10
        run.step(IDS)
        assert (scaler.scale, scaler.good_steps, adam.steps) == (2.0**10, 1, 1)
        run.save(tmp_path)
        run.step(IDS)
        assert (scaler.scale, scaler.good_steps) == (2.0**11, 0)
        after = run.state_dict()
    with job(FP16, LossScale(growth_interval=2)) as run:
        run.load(tmp_path)
        run.step(IDS)
        assert run.executor.state.loss_scale is not None and run.executor.state.loss_scale.scale == 2.0**11
        assert all(torch.equal(value, after[name]) for name, value in run.state_dict().items())


@pytest.mark.parametrize("offload", [None, Offload()])
def test_without_clipping_an_overflow_leaves_the_step_out_too(offload: Offload | None) -> None:
    """By the norm, which the rows then measure, as those that are predicted do; nothing is clipped to it."""
    plain, wide = Optimizer(clip=False, offload=offload), AdamWSettings(lr=1e-2, clip_norm=math.inf)
    with job(FP16, LossScale(scale=2.0**36), optimizer=plain) as run:
        before = run.state_dict()
        run.step(IDS)
        assert run.executor.state.loss_scale == LossScale(scale=2.0**35)
        assert all(torch.equal(value, before[name]) for name, value in run.state_dict().items())
        program, plan = run.executor.program, run.executor.plan
    states = []
    for optimizer in (plain, Optimizer(offload=offload)):
        with job(FP16, optimizer=optimizer, settings=wide) as run:
            norms = [run.executor.step(IDS).grad_norm.item() for _ in range(3)]
            states.append((norms, run.state_dict()))
    assert states[0][0] == states[1][0]
    assert all(torch.equal(value, states[1][1][name]) for name, value in states[0][1].items())
    predicted = gnomon.predict(llama(CONFIG), "1xa100-sxm-80gb", plan, WORK, stack("gnomon")).structure.program
    assert [program.token(row) for row in range(program.num_rows)] == [
        predicted.token(row) for row in range(predicted.num_rows)
    ]
    assert not plan.optimizer.clip and "NORM" in {kind.name for kind in program.kinds}
