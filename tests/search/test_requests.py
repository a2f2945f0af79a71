"""Requests that no plan can meet: each has one answer, with the nearest that is possible."""

from __future__ import annotations

from dataclasses import replace

import pytest

import gnomon
from gnomon.errors import PlanError
from gnomon.hardware import parse_cluster
from gnomon.models.presets import model
from gnomon.plans import Fp8, Goal, Offload, Optimizer, Overlap, Plan, Precision, Workload
from gnomon.search import make_space
from gnomon.software import stack

EIGHT = "1x8xa100-sxm-80gb"
TWO = "1x2xa100-sxm-80gb"


@pytest.mark.parametrize(
    ("model", "on", "batch", "seq_len", "fixed", "message"),
    [
        ("llama-3.1-8b", EIGHT, 16, 4096, {"tp": 3}, r"tp = 3 does not divide heads = 32; the nearest legal tp is 2"),
        ("llama-3.1-8b", EIGHT, 16, 4096, {"tp": 8, "pp": 4}, r"tp=8 x pp=4 is 32 ranks, but .* has 8.*or 32 devices"),
        ("llama-tiny", EIGHT, 8, 64, {"dp_shard": 3}, r"3 ranks, which does not divide the 8 .*that does is 2"),
        ("llama-tiny", EIGHT, 7, 64, {"dp_shard": 8}, r"batch of 7 .* over 8 .*nearest legal global batch is 8"),
        ("llama-tiny", EIGHT, 8, 64, {"ep": 2}, r"ep x etp = 2, but .* has no experts; use ep = 1"),
        ("llama-tiny", EIGHT, 8, 4, {"cp": 8}, r"seq_len = 4 does not divide into .* 16 parts; .* length is 16"),
        ("llama-tiny", EIGHT, 8, 64, {"pp": 8}, r"pp = 8 is more than the 4 layers of llama-tiny; use pp = 4"),
        ("llama-tiny", EIGHT, 8, 64, {"pp": 2, "virtual_stages": 64}, r"128 stages.*nearest is virtual_stages = 2"),
        ("llama-tiny", TWO, 8, 64, {"virtual_stages": 2, "schedule": "gpipe"}, r"gpipe takes 1 virtual stages.*not 2"),
        ("gpt2-xl", EIGHT, 8, 4096, {}, r"learned positions for 1024; the longest legal seq_len is 1024"),
        ("dit-xl-2", EIGHT, 8, 4096, {}, "dit-xl-2 has 256 tokens a sample; use seq_len = 256"),
        ("unet-tiny", EIGHT, 8, 64, {}, "unet-tiny takes no sequences: a sample counts as 1 token; use seq_len = 1"),
        ("llama-tiny", TWO, 1, 64, {"pp": 2, "schedule": "dualpipe_v"}, r"nearest: .* needs at least 2 x 2 = 4"),
    ],
)
def test_contradictions(model: str, on: str, batch: int, seq_len: int, fixed: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        gnomon.plan(model, on, Workload(global_batch_size=batch, seq_len=seq_len), fixed=fixed)


def test_a_search_has_up_to_eight_virtual_stages() -> None:
    """As docs/plan.md says; more only where they are asked for."""
    work, machines = Workload(global_batch_size=64, seq_len=4096), parse_cluster("8x8xh100-sxm")
    space = make_space(model("llama-3.1-405b"), machines, work)
    assert max(space.virtual_stages) == 8
    assert make_space(model("llama-3.1-405b"), machines, work, fixed={"virtual_stages": 14}).virtual_stages == (14,)


def test_a_plan_whose_program_cannot_run_does_not_end_the_search() -> None:
    """Skip connections of a U-Net over virtual stages arrive in another order than they are received in."""
    result = gnomon.plan("unet-tiny", TWO, Workload(global_batch_size=4, seq_len=1), fixed={"pp": 2})
    assert result.best and result.why_illegal["wrong order on a communicator"] > 0
    assert result.counts.covered == result.counts.space


SMALL = Workload(global_batch_size=4, seq_len=64)


def test_everything_forbidden() -> None:
    with pytest.raises(PlanError, match=r"no choice of zero is left: forbidden are zero>=0"):
        gnomon.plan("llama-tiny", TWO, SMALL, forbid=["zero>=0"])


def test_what_the_stack_lacks() -> None:
    with pytest.raises(PlanError, match=r"cp = 2 is asked for, but t5-small: .* adds a bias or sinks to scores"):
        gnomon.plan(model("t5-small"), TWO, replace(SMALL, sizes=(("enc_seq", 64),)), stack("gnomon"), fixed={"cp": 2})
    adafactor = Plan(optimizer=Optimizer(kind="adafactor", offload=Offload(), delay=1))
    with pytest.raises(PlanError, match=r"tp = 2 is asked for, but the runtime does not carry out optimizer.kind"):
        gnomon.plan("llama-tiny", TWO, SMALL, stack("gnomon"), base=adafactor, fixed={"tp": 2})


@pytest.mark.parametrize(
    ("name", "fixed", "message"),
    [
        (
            "megatron-lm",
            {"zero": 3},
            "zero = 3 is asked for, but stack megatron-lm runs only ZeRO 0, 1; ask for another zero",
        ),
        ("nanotron", {"zero": 2}, "stack nanotron runs only ZeRO 0, 1;"),
        ("torchtitan", {"zero": 1}, "stack torchtitan runs only ZeRO"),
        ("llm-foundry", {"cp": 2}, "cp = 2 is asked for, but stack llm-foundry has no context parallelism"),
        ("deepspeed", {"context": "ring"}, "stack deepspeed exchanges context only by ulysses"),
        ("megatron-lm", {"schedule": "zero_bubble_v"}, "stack megatron-lm runs only .*one_f_one_b"),
        ("deepspeed", {"zero": 3, "pp": 2}, "divides ranks over dp_shard, tp only"),
    ],
)
def test_what_a_stacks_record_rules_out(name: str, fixed: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        gnomon.plan("llama-tiny", TWO, SMALL, stack(name), fixed=fixed)


def test_deepspeed_divides_gradients_where_there_is_no_pipeline() -> None:
    result = gnomon.plan("llama-tiny", TWO, SMALL, stack("deepspeed"), fixed={"zero": 3}, top=100)
    assert {candidate.plan.mesh.pp for candidate in result.best} == {1}
    assert result.counts.covered == result.space.size


@pytest.mark.parametrize(
    ("name", "base", "message"),
    [
        ("bert-large", Plan(), "does not run 'bert-large' by its name.*or plan for another program"),
        ("llama-tiny", Plan(overlap=Overlap(bucket_bytes=1 << 20)), "takes a stage's gradients as reduced at once"),
        ("llama-tiny", Plan(precision=Precision(param="bf16", compute="fp32")), "make each pair alike, or plan for"),
    ],
)
def test_what_our_own_runtime_does_not_run(name: str, base: Plan, message: str) -> None:
    """By its name a model is refused that the runtime does not know."""
    with pytest.raises(PlanError, match=message):
        gnomon.plan(name, TWO, SMALL, stack("gnomon"), base=base)


def test_fp8_where_there_is_none() -> None:
    with pytest.raises(PlanError, match=r"a100-sxm-80gb has none; use bf16, or devices with fp8"):
        gnomon.plan("llama-tiny", TWO, SMALL, base=Plan(precision=Precision(fp8=Fp8(recipe="tensorwise"))))


def test_a_limit_below_the_parameters_names_one_that_does() -> None:
    with pytest.raises(PlanError, match=r"every one holds [0-9.]+ GiB or more .*: --memory [0-9]+MiB") as caught:
        gnomon.plan("llama-3.1-8b", "1x4xa100-sxm-80gb", SMALL, goal=Goal(memory_bytes=2**30))
    enough = int(str(caught.value).rpartition("--memory ")[2].removesuffix("MiB"))
    result = gnomon.plan("llama-3.1-8b", "1x4xa100-sxm-80gb", SMALL, goal=Goal(memory_bytes=enough * 2**20), top=1)
    assert result.best[0].prediction.tightest.peak_bytes <= enough * 2**20


def test_a_model_larger_than_all_memory_names_machines_that_hold_it() -> None:
    work = Workload(global_batch_size=16, seq_len=512)
    with pytest.raises(PlanError, match=r"every one holds .* fits on ([0-9]+) devices"):
        gnomon.plan(
            "llama-3.1-8b", "1x1xv100-sxm-32gb", work, base=Plan(precision=Precision(param="fp16", compute="fp16"))
        )


def test_a_number_of_virtual_stages_is_kept() -> None:
    """Two of them leave V and looped schedules, three only looped ones."""
    work = Workload(global_batch_size=8, seq_len=64)
    for virtual, names in ((1, {"one_f_one_b", "gpipe", "zero_bubble_h1", "zero_bubble_h2"}), (2, None)):
        result = gnomon.plan("llama-tiny", TWO, work, fixed={"pp": 2, "virtual_stages": virtual})
        assert {candidate.plan.schedule.virtual_stages for candidate in result.best} == {virtual}
        assert names is None or {candidate.plan.schedule.name for candidate in result.best} <= names
