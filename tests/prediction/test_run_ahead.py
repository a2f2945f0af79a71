"""Reserved memory that collectives hold while the host is ahead of its device."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.formats.job import with_job_fields
from gnomon.hardware import parse_cluster
from gnomon.hardware.scaled import scaled
from gnomon.models.presets import model
from gnomon.plans import Layout, Mesh, Plan, Schedule, Workload
from gnomon.prediction import Prediction, predict
from gnomon.prediction.run_ahead import QUEUE_LAUNCHES, held_by_streams, split_by_microbatches
from gnomon.software import Stack, stack

SEQ, HIDDEN = 4096, 4096
NANOTRON = stack("nanotron")
FREED = NANOTRON.with_values(
    tuple(fact for fact in NANOTRON.facts if fact.field != "held_launches"), held_launches=None
)
CHECKED = with_job_fields(NANOTRON, "TORCH_DISTRIBUTED_DEBUG=DETAIL", checked_collectives=True)


@cache
def result(who: Stack, *, micro: int = 4, count: int = 8, pp: int = 1, memory: int | None = None) -> Prediction:
    """Llama 3.1 8B on eight tensor-parallel ranks a stage."""
    job = Plan(
        mesh=Mesh(tp=8, pp=pp),
        schedule=Schedule(name="one_f_one_b", micro_batch_size=micro),
        layout=Layout(sequence_parallel=True),
    )
    where = scaled(parse_cluster(f"{pp}x8xh100-sxm"), memory_bytes=memory)
    work = Workload(global_batch_size=micro * count, seq_len=SEQ)
    return predict(model("llama-3.1-8b"), where, job, work, who)


def test_a_host_far_ahead_holds_a_full_queue() -> None:
    """1024 launches, one whole activation for every 20: 51 of them."""
    held = held_by_streams(result(NANOTRON).pricing, 0)
    assert held == pytest.approx(QUEUE_LAUNCHES / 20 * 4 * SEQ * HIDDEN * 2, rel=1e-6)
    more, less = result(NANOTRON).tightest, result(FREED).tightest
    assert more.reserved_bytes - less.reserved_bytes == pytest.approx(held, rel=1e-3)
    assert more.allocated_bytes == less.allocated_bytes


def test_a_host_that_waits_for_checks_holds_nothing() -> None:
    assert held_by_streams(result(CHECKED, micro=1).pricing, 0) == 0
    assert held_by_streams(result(FREED).pricing, 0) == 0


@given(micro=st.sampled_from([1, 2, 4]), count=st.sampled_from([4, 8]), pp=st.sampled_from([1, 2]))
def test_no_more_than_the_queue_and_never_less_for_more_microbatches(micro: int, count: int, pp: int) -> None:
    most = QUEUE_LAUNCHES / 20 * micro * SEQ * HIDDEN * 2
    few = held_by_streams(result(NANOTRON, micro=micro, count=count, pp=pp).pricing, 0)
    many = held_by_streams(result(NANOTRON, micro=micro, count=2 * count, pp=pp).pricing, 0)
    assert 0 <= few <= many <= most + 1


def test_later_stages_wait_for_every_message() -> None:
    """The first stage's warm-up is two forwards, the second's one."""
    pricing = result(NANOTRON, micro=2, pp=2).pricing
    first, second = held_by_streams(pricing, 0), held_by_streams(pricing, 1)
    assert 0 < second < first


def test_the_first_stage_issues_its_warm_up_at_once() -> None:
    """Of four stages two forwards of eight layers more than the device has begun, however slow the host is (nanotron on
    128 and 256 H100 with stages, collectives checked: 35 whole activations with 4 stages of 28 layers, 51 with 8 and
    16); where it sleeps until a message is taken, or with one microbatch, no more than in step."""
    tensor = SEQ * HIDDEN * 2
    held = [held_by_streams(result(CHECKED, micro=1, pp=4).pricing, stage) for stage in range(4)]
    assert held[0] in (2 * 16 * tensor, 2 * 17 * tensor) and held[1:] == [5 * tensor] * 3
    polled = with_job_fields(CHECKED, "sleeps between looks", p2p_poll_s=0.1)
    assert held_by_streams(result(polled, micro=1, pp=4).pricing, 0) == 5 * tensor
    assert held_by_streams(result(CHECKED, micro=1, pp=4, count=1).pricing, 0) == 5 * tensor


def test_a_full_device_takes_it_back() -> None:
    """What is held makes a job that needs the room `may not fit` at most."""
    room = result(FREED).tightest.peak_bytes + 2**30
    tight = result(NANOTRON, memory=room).tightest
    assert tight.peak_bytes <= room < tight.usual_bytes and tight.verdict == "may not fit"


def test_a_pipeline_in_step_holds_five_and_splits_a_little() -> None:
    waits, free = result(CHECKED, micro=1, pp=2), result(FREED, micro=1, pp=2)
    held = [held_by_streams(waits.pricing, stage) for stage in (0, 1)]
    assert held == [5 * SEQ * HIDDEN * 2] * 2
    split = round(0.08 * waits.memory[0].by_class["activations"])
    assert split_by_microbatches(waits.pricing, waits.memory[0].by_class["activations"]) == split
    more = waits.memory[0].reserved_bytes - free.memory[0].reserved_bytes
    assert more == pytest.approx(held[0] + split, rel=1e-3)
    assert split_by_microbatches(free.pricing, 2**30) == split_by_microbatches(result(NANOTRON).pricing, 2**30) == 0
